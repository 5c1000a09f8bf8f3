"""How a party signs its messages.

A message is `HBS1`, the exchange, the party's number, the content, and a signature (ECDSA, P-384, of `device.key`) over
the terms, the list of parties, the exchange, the number and the content. The terms name run and attempt, so a message
of another attempt is refused. What the server sends is not signed: a party believes only what other parties have
signed, and the digest of the list is in every signature after the first exchange.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from homebody.federation.secure_sum.identities import holds as _holds
from homebody.federation.secure_sum.identities import identity_of, sign_statement
from homebody.federation.secure_sum.messages import (
    DIGEST_BYTES,
    EXCHANGES,
    HEAD,
    OVERHEAD,
    SIGNATURE_BYTES,
    BadMessage,
    Exchange,
    Terms,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["identity_of", "open_signed", "sign", "verify"]

_MAGIC, _LABEL = b"HBS1", b"homebody secure sum 1, signed\0"


def sign(
    key: ec.EllipticCurvePrivateKey, terms: Terms, listed: bytes, exchange: Exchange, number: int, content: bytes
) -> bytes:
    """What a party sends. listed: the digest of the list of parties, or nothing before there is one."""
    digest = hashlib.sha256(content).digest()
    signature = sign_statement(key, _statement(terms, listed, exchange, number, digest))
    return HEAD.pack(_MAGIC, EXCHANGES.index(exchange), number) + content + signature


def open_signed(
    message: bytes, identity: bytes, terms: Terms, listed: bytes, exchange: Exchange, number: int
) -> tuple[bytes, bytes]:
    """Content and signature of what this party sends in this exchange; refused if it is anything else."""
    if len(message) < OVERHEAD or not message.startswith(_MAGIC):
        raise BadMessage("The answer is no message of a secure sum.")
    if HEAD.unpack_from(message) != (_MAGIC, EXCHANGES.index(exchange), number):
        raise BadMessage(f"The answer is of another exchange than '{exchange}', or of another party.")
    content, signature = message[HEAD.size : -SIGNATURE_BYTES], message[-SIGNATURE_BYTES:]
    if not verify(signature, identity, terms, listed, exchange, number, hashlib.sha256(content).digest()):
        raise BadMessage("The answer's signature does not hold for this device, attempt and exchange.")
    return content, signature


def verify(
    signature: bytes, identity: bytes, terms: Terms, listed: bytes, exchange: Exchange, number: int, digest: bytes
) -> bool:
    """Whether this device signed content of this digest as this party's in this exchange."""
    return _holds(identity, signature, _statement(terms, listed, exchange, number, digest))


def _statement(terms: Terms, listed: bytes, exchange: Exchange, number: int, digest: bytes) -> bytes:
    head = HEAD.pack(_MAGIC, EXCHANGES.index(exchange), number)
    return b"".join([_LABEL, terms.digest, listed or bytes(DIGEST_BYTES), head, digest])

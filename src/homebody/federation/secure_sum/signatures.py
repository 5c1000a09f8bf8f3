"""How a party signs its messages.

A message is `HBS1`, the exchange, the party's number, the content, and a signature (ECDSA, P-384, of `device.key`) over
the terms, the list of parties, the exchange, the number and the content. The terms name run and attempt, so a message
of another attempt is refused. What the server sends is not signed: a party believes only what other parties have
signed, and the digest of the list is in every signature after the first exchange.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from homebody.errors import HomebodyError
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

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
except ImportError as error:
    raise HomebodyError("A secure sum among devices needs the extra: pip install 'homebody[deploy]'.") from error

__all__ = ["identity_of", "open_signed", "sign", "verify"]

_MAGIC, _LABEL = b"HBS1", b"homebody secure sum 1, signed\0"


def identity_of(key: ec.EllipticCurvePublicKey) -> bytes:
    """A device's public key in 49 bytes: a compressed point of P-384.

    >>> len(identity_of(ec.generate_private_key(ec.SECP384R1()).public_key()))
    49
    """
    if not isinstance(key.curve, ec.SECP384R1):
        raise HomebodyError("A device's key is an elliptic one (ECDSA P-384): `homebody keys device` makes one.")
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


@lru_cache(maxsize=4096)
def _public(identity: bytes) -> ec.EllipticCurvePublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), identity)


def sign(
    key: ec.EllipticCurvePrivateKey, terms: Terms, listed: bytes, exchange: Exchange, number: int, content: bytes
) -> bytes:
    """What a party sends. listed: the digest of the list of parties, or nothing before there is one."""
    digest = hashlib.sha256(content).digest()
    der = key.sign(_statement(terms, listed, exchange, number, digest), ec.ECDSA(hashes.SHA384()))
    signature = b"".join(part.to_bytes(SIGNATURE_BYTES // 2, "big") for part in decode_dss_signature(der))
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
    half = SIGNATURE_BYTES // 2
    der = encode_dss_signature(int.from_bytes(signature[:half], "big"), int.from_bytes(signature[half:], "big"))
    return _holds(identity, der, _statement(terms, listed, exchange, number, digest))


def _holds(identity: bytes, der: bytes, statement: bytes) -> bool:
    try:
        _public(identity).verify(der, statement, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


def _statement(terms: Terms, listed: bytes, exchange: Exchange, number: int, digest: bytes) -> bytes:
    return b"".join(
        [
            _LABEL,
            terms.digest,
            listed or bytes(DIGEST_BYTES),
            HEAD.pack(_MAGIC, EXCHANGES.index(exchange), number),
            digest,
        ]
    )

"""What a server asks a helper for, signed.

A request is `HBQ1`, its kind, the epoch, the server's key (Ed25519, `reports.key` in its folder), the content, and a
signature over all of it. Nothing here needs torch, so that a proxy starts quickly.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from homebody.errors import HomebodyError, install

try:
    from nacl import bindings as sodium
    from nacl.exceptions import CryptoError
except ImportError as error:
    raise HomebodyError(
        f"A secure sum with a helper needs an extra: {install('serve')} for a proxy, with '.[deploy]' for servers and "
        "devices."
    ) from error

__all__ = ["OVERHEAD", "ROW_BYTES", "BadRequest", "ForgedRequest", "HelperRequest", "open_request", "sign_request"]

Kind = Literal["epoch", "set"]
_KINDS: tuple[Kind, ...] = ("epoch", "set")
_MAGIC, _LABEL = b"HBQ1", b"homebody helper request 1\0"
_HEAD = struct.Struct("<4sB16s32s")
SEED_BYTES, DIGEST_BYTES = 32, 32
SEALED_BYTES = SEED_BYTES + 32 + sodium.crypto_sign_BYTES + sodium.crypto_box_SEALBYTES
"""Seed, the device's key and its signature, sealed."""
ROW_BYTES = DIGEST_BYTES + SEALED_BYTES
"""A device in a set: the digest of its masked vector, and what it sealed."""
OVERHEAD = _HEAD.size + sodium.crypto_sign_BYTES
"""Bytes of a request beside its content."""


class BadRequest(ValueError):
    """It is no such request; the sentence says why."""


class ForgedRequest(BadRequest):
    """It has the form of a request, and the server that it names did not sign it."""


class HelperRequest(NamedTuple):
    """A request, once its signature was checked."""

    kind: Kind
    epoch: bytes
    server: bytes
    """The key of the server that signed it."""
    content: bytes


def sign_request(kind: Kind, epoch: bytes, content: bytes, secret: bytes) -> bytes:
    """A request as bytes. secret: the server's key that signs, of 64 bytes.

    >>> public, secret = sodium.crypto_sign_keypair()
    >>> open_request(sign_request("set", bytes(16), b"rows", secret), "set") == ("set", bytes(16), public, b"rows")
    True
    """
    body = _HEAD.pack(_MAGIC, _KINDS.index(kind), epoch, secret[32:]) + content
    return body + bytes(sodium.crypto_sign(_LABEL + body, secret)[: sodium.crypto_sign_BYTES])


def open_request(body: bytes, kind: Kind) -> HelperRequest:
    """A request of this kind; whether the server is known is for the caller to say."""
    if len(body) < OVERHEAD or not body.startswith(_MAGIC):
        raise BadRequest("This is no request to a helper.")
    _, number, epoch, server = _HEAD.unpack_from(body)
    if number != _KINDS.index(kind):
        raise BadRequest("The request is of another kind.")
    signed, signature = body[: -sodium.crypto_sign_BYTES], body[-sodium.crypto_sign_BYTES :]
    try:
        sodium.crypto_sign_open(signature + _LABEL + signed, server)
    except (CryptoError, ValueError) as error:
        raise ForgedRequest("The request's signature does not hold.") from error
    return HelperRequest(kind, epoch, server, signed[_HEAD.size :])

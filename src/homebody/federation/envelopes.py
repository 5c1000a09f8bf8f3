"""Reports on their way through a proxy: sealed one by one, and enveloped for one hop.

A report is four bytes: twice the number of its entry, plus its bit. Each is sealed by itself to the server's key of the
epoch (libsodium's sealed box, X25519 and XSalsa20-Poly1305): a proxy can split and shuffle them and read none, and
all are of one length. A key serves one epoch and is then forgotten: what is sealed to another's cannot be opened, and
what was recorded on the way can never be read afterwards.

An envelope carries sealed reports over one hop, a device's to a proxy (a message) or a proxy's to whoever is next (a
batch): `HBR1`, its kind, the epoch, a random number of its own, how many reports, who sends it, the reports, and the
sender's signature (Ed25519) over all of it. The number makes a repetition known for what it is.
"""

from __future__ import annotations

import os
import struct
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError

try:
    from nacl import bindings as sodium
    from nacl.exceptions import CryptoError
except ImportError as error:
    raise HomebodyError("Sealing reports needs the extra: pip install 'homebody[serve]'.") from error

__all__ = [
    "EPOCH_BYTES",
    "HEAD_BYTES",
    "REPORT_BYTES",
    "BadEnvelope",
    "BadSignature",
    "Envelope",
    "epoch_keys",
    "named_sender",
    "open_envelope",
    "seal_reports",
    "sign_envelope",
    "signing_keys",
    "unseal_reports",
]

PLAIN_BYTES = 4
REPORT_BYTES = PLAIN_BYTES + sodium.crypto_box_SEALBYTES
"""Of a sealed report."""
EPOCH_BYTES = 16
SIGNATURE_BYTES = sodium.crypto_sign_BYTES
_HEAD = struct.Struct("<4sB16s16sI32s")
HEAD_BYTES = _HEAD.size
_MAGIC = b"HBR1"
_KINDS: tuple[Literal["message", "batch"], ...] = ("message", "batch")
_UNREADABLE = np.uint32(2**32 - 1)


class BadEnvelope(ValueError):
    """It is not what it should be; the sentence says how."""


class BadSignature(BadEnvelope):
    """It has the form of an envelope, and its sender did not sign it."""


class Envelope(NamedTuple):
    """A message between two hops."""

    kind: Literal["message", "batch"]
    """From a device, or from a proxy."""
    epoch: bytes
    number: bytes
    """Drawn at random by the sender; the same again is a repetition."""
    reports: bytes
    """Sealed, one behind the other."""

    @property
    def size(self) -> int:
        return len(self.reports) // REPORT_BYTES


def epoch_keys() -> tuple[bytes, bytes]:
    """A public key to seal to, and the secret one that opens."""
    public, secret = sodium.crypto_box_keypair()
    return public, secret


def seal_reports(pairs: npt.NDArray[np.integer], public: bytes) -> bytes:
    """Each of these reports (twice an entry's number, plus a bit) sealed by itself; in a random order.

    >>> public, secret = epoch_keys()
    >>> sealed = seal_reports(np.array([7, 1000]), public)
    >>> len(sealed) == 2 * REPORT_BYTES, sorted(unseal_reports(sealed, public, secret).tolist())
    (True, [7, 1000])
    """
    if len(pairs) and not 0 <= int(pairs.min()) <= int(pairs.max()) < 2**31:
        raise HomebodyError("A report names one of at most 2³⁰ entries.")
    plain = pairs.astype("<u4").tobytes()
    sealed = [sodium.crypto_box_seal(plain[at : at + PLAIN_BYTES], public) for at in range(0, len(plain), PLAIN_BYTES)]
    order = np.argsort(np.frombuffer(os.urandom(8 * len(sealed)), dtype=np.uint64))
    return b"".join(sealed[place] for place in order)


def unseal_reports(sealed: bytes, public: bytes, secret: bytes) -> npt.NDArray[np.uint32]:
    """The contents of these reports, in order; 2³² − 1 for a report that the key does not open."""
    out = np.full(len(sealed) // REPORT_BYTES, _UNREADABLE, dtype="<u4")
    for place, at in enumerate(range(0, len(out) * REPORT_BYTES, REPORT_BYTES)):
        try:
            plain = sodium.crypto_box_seal_open(sealed[at : at + REPORT_BYTES], public, secret)
        except CryptoError:
            continue
        out[place] = int.from_bytes(plain, "little")
    return out


def signing_keys(seed: bytes | None = None) -> tuple[bytes, bytes]:
    """Who a sender is to the next hop (32 bytes), and the secret that signs (64 bytes)."""
    public, secret = sodium.crypto_sign_seed_keypair(os.urandom(32) if seed is None else seed)
    return public, secret


def sign_envelope(envelope: Envelope, secret: bytes) -> bytes:
    """As bytes, signed.

    >>> public, secret = signing_keys()
    >>> sent = Envelope("message", bytes(16), os.urandom(16), bytes(2 * REPORT_BYTES))
    >>> sender, content = open_envelope(sign_envelope(sent, secret))
    >>> sender == public, content == sent
    (True, True)
    """
    head = _HEAD.pack(_MAGIC, _KINDS.index(envelope.kind), envelope.epoch, envelope.number, envelope.size, secret[32:])
    signed: bytes = sodium.crypto_sign(head + envelope.reports, secret)
    return signed[SIGNATURE_BYTES:] + signed[:SIGNATURE_BYTES]


def named_sender(body: bytes) -> bytes:
    """Whom an envelope names as its sender: believed only once `open_envelope` has checked the signature."""
    sender: bytes = _HEAD.unpack_from(body)[-1]
    return sender


def envelope_bytes(reports: int) -> int:
    """The size of an envelope of so many reports."""
    return HEAD_BYTES + reports * REPORT_BYTES + SIGNATURE_BYTES


def open_envelope(body: bytes) -> tuple[bytes, Envelope]:
    """Who signed it, and what it holds; whether that sender is known is for the caller to say."""
    if len(body) < HEAD_BYTES + SIGNATURE_BYTES or not body.startswith(_MAGIC):
        raise BadEnvelope("This is no envelope of reports.")
    _, kind, epoch, number, count, sender = _HEAD.unpack_from(body)
    if kind >= len(_KINDS):
        raise BadEnvelope("The envelope is of a kind that is not known here.")
    if len(body) != HEAD_BYTES + count * REPORT_BYTES + SIGNATURE_BYTES:
        raise BadEnvelope("The envelope's length is not that of its reports.")
    try:
        sodium.crypto_sign_open(body[-SIGNATURE_BYTES:] + body[:-SIGNATURE_BYTES], sender)
    except (CryptoError, ValueError) as error:
        raise BadSignature("The envelope's signature does not hold.") from error
    return sender, Envelope(_KINDS[kind], epoch, number, body[HEAD_BYTES:-SIGNATURE_BYTES])

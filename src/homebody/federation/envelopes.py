"""Reports on their way through a proxy: sealed one by one, and enveloped for one hop.

A report is four bytes: twice the number of its entry, plus its bit. Each is sealed by itself to the server's key of the
epoch (libsodium's sealed box, X25519 and XSalsa20-Poly1305): a proxy can split and shuffle them and read none, and
all are of one length. A key serves one epoch and is then forgotten: what is sealed to another's cannot be opened, and
what was recorded on the way can never be read afterwards.

A report of another length, such as one on an impression, is sealed in the same way; all of an epoch are of one length.

An envelope carries sealed reports over one hop, a device's to a proxy (a message) or a proxy's to whoever is next (a
batch): `HBR1`, its kind, the epoch, a random number of its own, how many reports, who sends it, the reports, and the
sender's signature (Ed25519) over all of it. The number makes a repetition known for what it is. `HBR2` is the same with
the length of a sealed report after their number, for reports that are not of 52 bytes.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError, install
from homebody.federation.epoch import BIT_BYTES, SEAL_BYTES

try:
    from nacl import bindings as sodium
    from nacl.exceptions import CryptoError
except ImportError as error:
    raise HomebodyError(f"Sealing reports needs the extra: {install('serve')}.") from error

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
    "seal_contents",
    "seal_reports",
    "sign_envelope",
    "signing_keys",
    "unseal_contents",
    "unseal_reports",
]

PLAIN_BYTES = BIT_BYTES
assert sodium.crypto_box_SEALBYTES == SEAL_BYTES
REPORT_BYTES = PLAIN_BYTES + SEAL_BYTES
"""Of a sealed report of one bit."""
EPOCH_BYTES = 16
SIGNATURE_BYTES = sodium.crypto_sign_BYTES
_HEAD, _LONG_HEAD = struct.Struct("<4sB16s16sI32s"), struct.Struct("<4sB16s16sIH32s")
HEAD_BYTES = _HEAD.size
_MAGIC, _LONG = b"HBR1", b"HBR2"
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
    each: int = REPORT_BYTES
    """Bytes of a sealed report."""

    @property
    def size(self) -> int:
        return len(self.reports) // self.each


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
    return seal_contents([plain[at : at + PLAIN_BYTES] for at in range(0, len(plain), PLAIN_BYTES)], public)


def seal_contents(contents: Sequence[bytes], public: bytes) -> bytes:
    """Each of these contents, which are of one length, sealed by itself; in a random order."""
    sealed = [sodium.crypto_box_seal(content, public) for content in contents]
    order = np.argsort(np.frombuffer(os.urandom(8 * len(sealed)), dtype=np.uint64))
    return b"".join(sealed[place] for place in order)


def unseal_reports(sealed: bytes, public: bytes, secret: bytes) -> npt.NDArray[np.uint32]:
    """The contents of these reports, in order; 2³² − 1 for a report that the key does not open."""
    plain = unseal_contents(sealed, REPORT_BYTES, public, secret)
    whole = (_UNREADABLE if content is None else int.from_bytes(content, "little") for content in plain)
    return np.fromiter(whole, dtype="<u4", count=len(plain))


def unseal_contents(sealed: bytes, each: int, public: bytes, secret: bytes) -> list[bytes | None]:
    """The contents of reports of so many sealed bytes, in order; None for a report that the key does not open.

    >>> public, secret = epoch_keys()
    >>> sorted(unseal_contents(seal_contents([b"ab", b"cd"], public), 2 + SEAL_BYTES, public, secret))
    [b'ab', b'cd']
    """
    out: list[bytes | None] = []
    for at in range(0, len(sealed) - each + 1, each):
        try:
            out.append(sodium.crypto_box_seal_open(sealed[at : at + each], public, secret))
        except CryptoError:
            out.append(None)
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
    about = (_KINDS.index(envelope.kind), envelope.epoch, envelope.number, envelope.size)
    if envelope.each == REPORT_BYTES:
        head = _HEAD.pack(_MAGIC, *about, secret[32:])
    else:
        head = _LONG_HEAD.pack(_LONG, *about, envelope.each, secret[32:])
    signed: bytes = sodium.crypto_sign(head + envelope.reports, secret)
    return signed[SIGNATURE_BYTES:] + signed[:SIGNATURE_BYTES]


def named_sender(body: bytes) -> bytes:
    """Whom an envelope names as its sender: believed only once `open_envelope` has checked the signature."""
    sender: bytes = (_LONG_HEAD if body.startswith(_LONG) else _HEAD).unpack_from(body)[-1]
    return sender


def envelope_bytes(reports: int, each: int = REPORT_BYTES) -> int:
    """The size of an envelope of so many reports, of so many sealed bytes."""
    head = HEAD_BYTES if each == REPORT_BYTES else _LONG_HEAD.size
    return head + reports * each + SIGNATURE_BYTES


def open_envelope(body: bytes) -> tuple[bytes, Envelope]:
    """Who signed it, and what it holds; whether that sender is known is for the caller to say."""
    head, each = (_LONG_HEAD, 0) if body.startswith(_LONG) else (_HEAD, REPORT_BYTES)
    if len(body) < head.size + SIGNATURE_BYTES or not body.startswith((_MAGIC, _LONG)):
        raise BadEnvelope("This is no envelope of reports.")
    _, kind, epoch, number, count, *more, sender = head.unpack_from(body)
    each = more[0] if more else each
    if kind >= len(_KINDS):
        raise BadEnvelope("The envelope is of a kind that is not known here.")
    if each <= SEAL_BYTES or len(body) != head.size + count * each + SIGNATURE_BYTES:
        raise BadEnvelope("The envelope's length is not that of its reports.")
    try:
        sodium.crypto_sign_open(body[-SIGNATURE_BYTES:] + body[:-SIGNATURE_BYTES], sender)
    except (CryptoError, ValueError) as error:
        raise BadSignature("The envelope's signature does not hold.") from error
    return sender, Envelope(_KINDS[kind], epoch, number, body[head.size : -SIGNATURE_BYTES], each)

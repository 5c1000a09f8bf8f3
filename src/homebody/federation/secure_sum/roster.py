"""A roster: the devices that somebody other than the server vouches for.

A server could take part in a sum as many devices that it invents. A device with the public key of a roster's signer
takes part among the devices of a signed roster only.

A roster is `HBR1`, its number, the lengths of the run's name and of the list, the name, and the devices' keys in
ascending order; the signature (ECDSA, P-384) follows. Any other form is refused. A device never goes back to a roster
of a smaller number.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from homebody.errors import HomebodyError, several
from homebody.federation.secure_sum import FEWEST, IDENTITY_BYTES, SIGNATURE_BYTES
from homebody.federation.secure_sum.identities import holds, identity_of, sign_statement

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["BadRoster", "Roster"]

_MAGIC, _LABEL = b"HBR1", b"homebody roster 1, signed\0"
_HEAD = struct.Struct("<4sQBI")
_LONGEST_NAME = 200
MOST_DEVICES = 1 << 20
LONGEST = _HEAD.size + _LONGEST_NAME + IDENTITY_BYTES * MOST_DEVICES + SIGNATURE_BYTES
"""The most bytes of a signed roster."""


class BadRoster(HomebodyError):
    """A roster that is malformed, not signed by the right key, or older than the one at hand."""


@dataclass(frozen=True)
class Roster:
    """The devices that may be parties of a secure sum.

    >>> from cryptography.hazmat.primitives.asymmetric import ec
    >>> devices = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(3)]
    >>> signer = ec.generate_private_key(ec.SECP384R1())
    >>> roster = Roster.of(1, map(identity_of, devices))
    >>> Roster.read(roster.signed(signer), signer.public_key()) == roster, identity_of(devices[0]) in roster.devices
    (True, True)
    """

    number: int
    """Grows with every roster of the same signer."""
    devices: frozenset[bytes]
    """Public keys, as `identity_of` writes them."""
    run: str = ""
    """The training that it is for; empty: any."""

    def __post_init__(self) -> None:
        if type(self.number) is not int or not 1 <= self.number < 1 << 63:
            raise BadRoster(f"A roster's number is a whole number from 1, not {self.number!r}.")
        if not FEWEST <= len(self.devices) <= MOST_DEVICES:
            raise BadRoster(
                f"A roster has {FEWEST} to {MOST_DEVICES:,} devices, not {len(self.devices):,}: no device takes part "
                "among fewer."
            )
        # A compressed point begins with 2 or 3. Whether it is on the curve shows when its signature is checked.
        if not all(len(device) == IDENTITY_BYTES and device[0] in (2, 3) for device in self.devices):
            raise BadRoster("The roster has an entry that is no public key of a device.")
        if len(self.run.encode()) > _LONGEST_NAME or not self.run.isprintable():
            raise BadRoster(f"A run's name in a roster is one line of at most {_LONGEST_NAME} bytes.")

    @classmethod
    def of(cls, number: int, devices: Iterable[bytes], run: str = "") -> Roster:
        """A roster of these devices; refused if one is there twice."""
        listed = list(devices)
        if len(set(listed)) < len(listed):
            raise BadRoster("The roster names a device twice: leave one out.")
        return cls(number, frozenset(listed), run)

    @classmethod
    def decode(cls, content: bytes) -> Roster:
        """A roster without signature."""
        roster, rest = cls._decode(content)
        if rest:
            raise BadRoster(
                "The roster is longer than it should be: it is signed already, or damaged."
                if len(rest) == SIGNATURE_BYTES
                else "The roster is longer than it should be."
            )
        return roster

    @classmethod
    def read(cls, content: bytes, signer: ec.EllipticCurvePublicKey) -> Roster:
        """A roster that this key signed; refused if it is anything else."""
        roster = cls.unverified(content)
        if not holds(identity_of(signer), content[-SIGNATURE_BYTES:], _LABEL + content[:-SIGNATURE_BYTES]):
            raise BadRoster("The roster is not signed by the key that this device was given for rosters.")
        return roster

    @classmethod
    def unverified(cls, content: bytes) -> Roster:
        """A signed roster, for whoever only passes it on: the signature is not checked."""
        roster, rest = cls._decode(content)
        if len(rest) != SIGNATURE_BYTES:
            raise BadRoster(
                "The roster is not signed: sign it with `homebody keys sign-roster`."
                if not rest
                else f"The roster's signature has {several(len(rest), 'byte')}, not {SIGNATURE_BYTES}."
            )
        return roster

    @classmethod
    def _decode(cls, content: bytes) -> tuple[Roster, bytes]:
        if len(content) > LONGEST:
            raise BadRoster(f"A roster has at most {LONGEST:,} bytes, not {len(content):,}.")
        if not content.startswith(_MAGIC):
            raise BadRoster("This is no roster: `homebody keys roster` makes one.")
        if len(content) < _HEAD.size:
            raise BadRoster("The roster ends too early.")
        _, number, length, count = _HEAD.unpack_from(content)
        start = _HEAD.size + length
        end = start + count * IDENTITY_BYTES
        if end > len(content):
            raise BadRoster("The roster ends too early.")
        try:
            run = content[_HEAD.size : start].decode()
        except UnicodeDecodeError as error:
            raise BadRoster("The run's name in the roster is no text.") from error
        listed = [content[at : at + IDENTITY_BYTES] for at in range(start, end, IDENTITY_BYTES)]
        if any(before >= after for before, after in pairwise(listed)):
            raise BadRoster("The roster names a device twice, or is not in order.")
        return cls(number, frozenset(listed), run), content[end:]

    def signed(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        """The roster with this key's signature, as `read` takes it."""
        return self.content + sign_statement(key, _LABEL + self.content)

    @cached_property
    def content(self) -> bytes:
        """The inverse of `decode`."""
        run = self.run.encode()
        head = _HEAD.pack(_MAGIC, self.number, len(run), len(self.devices))
        return b"".join([head, run, *sorted(self.devices)])

    @cached_property
    def digest(self) -> str:
        """The digest of the list, by which a device and the server name it (`wire.digest`). The signature is no part of
        it: two signatures of one list are the same roster."""
        return hashlib.sha256(self.content).hexdigest()[:32]

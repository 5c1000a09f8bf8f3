"""A secure sum that a helper opens: one exchange with devices, one with the helper.

The helper makes a key for one sum, its *epoch*. A device adds a mask to its vector. It seals the mask's seed to the
helper's key, and sends both to the server in one message. The server adds up the masked vectors and forwards the sealed
seeds of one set of devices. The helper adds up the masks of that set and all of the noise, and the server takes that
sum off its own. So the server learns the sum with noise, and the helper no vector.

| who | sends | to |
|---|---|---|
| helper | `HelperEpoch`: its key, and the terms of the sum | server and devices |
| device | `sign_message`: masked vector; seed, the device's key and signature, sealed | server |
| server | `HelpedSum.request`: for each device the digest of its masked vector and what it sealed | helper |
| helper | `Helper.open`: the sum of the masks and the noise | server |

A device signs (Ed25519, `reports.key`) terms, epoch, and the digests of its masked vector and its seed. The terms say
how much noise the helper adds, so a server cannot ask for less. A seed serves one device in one epoch: the mask is
derived from terms, epoch and the device's key as well, so that a copied box gives another mask. The signature lies in
the sealed box: the server does not learn by which key the helper knows a device.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from nacl import bindings as sodium
from nacl.exceptions import CryptoError

from homebody.errors import Abandoned, HomebodyError, several
from homebody.federation.secure_sum.masks import MaskedSum, derive
from homebody.federation.secure_sum.messages import (
    DIGEST_BYTES,
    FEWEST,
    BadMessage,
    SumTerms,
    Unpacker,
    blob,
    numbers_of,
    pack_numbers,
)
from homebody.federation.secure_sum.requests import ROW_BYTES, SEALED_BYTES, SEED_BYTES
from homebody.privacy.channel import Channel
from homebody.privacy.grid import gaussian
from homebody.privacy.ring import Numbers, Ring
from homebody.privacy.secure_sum import check_shares, threshold
from homebody.rng import SystemRng

__all__ = [
    "EPOCH_BYTES",
    "ROW_BYTES",
    "HelpedParty",
    "HelpedSum",
    "HelpedTerms",
    "Helper",
    "HelperEpoch",
    "SetRefused",
    "draw_noise",
    "noise_depth",
    "sign_message",
]

EPOCH_BYTES = 16
NO_NOISE = -1
_MAGIC = b"HBL1"
_LABEL = b"homebody helped sum 1, signed\0"
_MOST_BYTES = 1 << 28
"""Of a vector."""
_DEEPEST = 60


class SetRefused(BadMessage):
    """The helper opens no such set. faulty: the rows that it cannot open, by their place, and why."""

    def __init__(self, sentence: str, faulty: Mapping[int, str] | None = None) -> None:
        super().__init__(sentence)
        self.faulty = dict(faulty or {})


@dataclass(frozen=True)
class HelpedTerms(SumTerms):
    """What devices, server and helper must agree on before a sum begins.

    >>> terms = HelpedTerms("run", "round 3#1", parties=100, entries=54_000, width=4, depth=19)
    >>> terms.quorum, HelpedTerms.decode(terms.encode()) == terms
    (67, True)
    """

    depth: int = NO_NOISE
    """The standard deviation of the helper's noise is 2 to this power; −1: it adds none."""
    least: float = 2 / 3
    """The share of the parties whose messages must be in the set."""
    people: int = 0
    """The most people whose updates are in the sum, which the step of its numbers may depend on; 0: not stated."""
    asks: str = ""
    """A digest of what devices are asked to compute: the helper tells all of them the same; empty: not stated."""

    _magic, _numbers, _with = b"HBH1", struct.Struct("<IIBbdI"), " with a helper"

    def __post_init__(self) -> None:
        depth = (self.depth, NO_NOISE, _DEEPEST, "as the power of two of its noise")
        self._check(self.asks, depth, (self.people, 0, (1 << 32) - 1, "people"))
        if self.entries * self.width > _MOST_BYTES:
            raise HomebodyError(f"A vector of a secure sum with a helper has at most {_MOST_BYTES:,} bytes.")
        if self.depth >= 8 * self.width - 1:
            raise HomebodyError("The noise of a secure sum is wider than its numbers: use more bytes.")
        check_shares(self.least, 0.0, helper=True)

    @property
    def quorum(self) -> int:
        """How many messages a set has at least."""
        return max(FEWEST, threshold(self.parties, self.least))

    @property
    def ring(self) -> Ring:
        return Ring(self.width, 1.0, whole=True)


@dataclass(frozen=True)
class HelperEpoch:
    """One sum, as the helper describes it to everybody.

    >>> terms = HelpedTerms("run", "round 3#1", parties=4, entries=2, width=4)
    >>> epoch = HelperEpoch(bytes(16), bytes(32), terms, closes=2_000_000_000)
    >>> HelperEpoch.read(epoch.to_json()) == epoch
    True
    """

    id: bytes
    key: bytes
    """The public key that seeds are sealed to."""
    terms: HelpedTerms
    closes: float
    """Unix seconds; after that the key is gone."""

    @classmethod
    def read(cls, said: object) -> HelperEpoch:
        """A description from another party, checked; names that are not known here are ignored."""
        if not isinstance(said, Mapping):
            raise BadMessage("The description of a helper's epoch is not a JSON object.")
        texts = []
        for name, form in (("epoch", "[0-9a-f]{32}"), ("key", "[0-9a-f]{64}"), ("terms", "(?:[0-9a-f]{2}){1,600}")):
            if type(said.get(name)) is not str or not re.fullmatch(form, said[name]):
                raise BadMessage(f"'{name}' of a helper's epoch is missing or malformed.")
            texts.append(bytes.fromhex(said[name]))
        closes = said.get("closes")
        if not isinstance(closes, int | float) or isinstance(closes, bool) or not 0 < closes < 2**40:
            raise BadMessage("'closes' of a helper's epoch is missing or malformed.")
        return cls(texts[0], texts[1], HelpedTerms.decode(texts[2]), float(closes))

    def to_json(self) -> dict[str, Any]:
        """The inverse of `read`."""
        terms = self.terms.encode().hex()
        return {"epoch": self.id.hex(), "key": self.key.hex(), "terms": terms, "closes": self.closes}

    @cached_property
    def digest(self) -> bytes:
        """Stands for this sum and this key: sealed to another, a message is another release."""
        return hashlib.sha256(b"".join([b"homebody helped sum 1\0", self.terms.digest, self.id, self.key])).digest()

    def agrees(self, other: HelperEpoch) -> bool:
        """Whether both describe the same epoch, whenever it closes."""
        return replace(self, closes=other.closes) == other


def noise_depth(channel: Channel) -> int:
    """`HelpedTerms.depth` for the noise that a helper adds to sums of this channel.

    >>> from homebody.privacy import Clip, Gaussian, SecureSum
    >>> noise_depth(Channel(Clip(1), SecureSum(helper=True), Gaussian(z=1)))
    19
    """
    return NO_NOISE if channel.facts.grid is None else channel.facts.grid.depth


def sign_message(epoch: HelperEpoch, numbers: Numbers, secret: bytes) -> bytes:
    """What a device sends the server: its vector, masked, and what the helper needs to take the mask off a sum.

    Store it before it leaves, and give the same bytes if asked again: each call draws another mask.
    secret: the device's key that signs, of 64 bytes.
    """
    if len(numbers) != epoch.terms.entries:
        raise HomebodyError(f"A vector of this sum has {epoch.terms.entries:,} numbers, not {len(numbers):,}.")
    seed, sender = os.urandom(SEED_BYTES), secret[32:]
    masked = MaskedSum(epoch.terms.entries, epoch.terms.width)
    masked.add_numbers(numbers)
    masked.add(_mask_key(epoch, seed, sender))
    vector = masked.packed()
    signed = sodium.crypto_sign(_statement(epoch, seed, hashlib.sha256(vector).digest()), secret)
    sealed = sodium.crypto_box_seal(seed + sender + signed[: sodium.crypto_sign_BYTES], epoch.key)
    return _MAGIC + epoch.id + sealed + vector


class HelpedParty:
    """A device in a sum that a helper opens: it draws its mask once, and gives the same message again.

    message: what it gave before. secret: the device's key that signs, of 64 bytes.
    """

    def __init__(self, epoch: HelperEpoch, secret: bytes, message: bytes | None = None) -> None:
        self._epoch, self._secret, self._message = epoch, secret, message

    def answer(self, vector: Callable[[], Numbers]) -> bytes:
        """The message to the server. vector: computes what the device adds, unless it did so before."""
        if self._message is None:
            self._message = sign_message(self._epoch, vector(), self._secret)
        return self._message

    def state(self) -> bytes:
        """To store before the message leaves."""
        assert self._message is not None, "there is nothing to store before it answers"
        return self._message


def _mask_key(epoch: HelperEpoch, seed: bytes, sender: bytes) -> bytes:
    bound = hashlib.sha256(epoch.terms.digest + epoch.id + sender).digest()
    return derive(seed, bound, "helped mask", 0, 0)


def _statement(epoch: HelperEpoch, seed: bytes, vector: bytes) -> bytes:
    return b"".join([_LABEL, epoch.terms.digest, epoch.id, hashlib.sha256(seed).digest(), vector])


class HelpedSum:
    """The server's side: it collects messages, asks the helper about one set, and takes the masks off the sum.

    Store `state` before the request is sent, and after a crash send the same again: the helper opens one set. `faults`
    says whose messages were refused, and why.
    """

    def __init__(self, epoch: HelperEpoch) -> None:
        self.epoch, self._terms = epoch, epoch.terms
        self._messages: dict[int, tuple[bytes, bytes]] = {}
        self._stored: tuple[tuple[int, ...], bytes, bytes] | None = None
        """Senders, request and the sum of the masked vectors, of a set that was stored."""
        self.faults: dict[int, str] = {}

    def state(self) -> bytes:
        """The set as it stands, without its vectors."""
        described = json.dumps(self.epoch.to_json()).encode()
        return b"".join(map(blob, (described, pack_numbers(self.senders), self.request(), self._total())))

    @classmethod
    def of_state(cls, state: bytes) -> HelpedSum:
        cursor = Unpacker(state, "The stored set of a secure sum")
        described, senders, request, total = (cursor.blob() for _ in range(4))
        cursor.end()
        known = cls(HelperEpoch.read(json.loads(described)))
        known._stored = numbers_of(senders, "senders of the stored set"), request, total
        return known

    @property
    def senders(self) -> tuple[int, ...]:
        """Whose messages are in the set, in its order."""
        return tuple(sorted(self._messages)) if self._stored is None else self._stored[0]

    def take(self, number: int, message: bytes) -> bool:
        """Add a device's message to the set; whether it has the form of one."""
        try:
            self._messages[number] = self._read(message)
        except BadMessage as error:
            self.faults[number] = str(error)
            return False
        return True

    def _read(self, message: bytes) -> tuple[bytes, bytes]:
        start = len(_MAGIC) + EPOCH_BYTES
        expected = start + SEALED_BYTES + self._terms.entries * self._terms.width
        if len(message) != expected or not message.startswith(_MAGIC):
            raise BadMessage(f"A message of this secure sum has {expected:,} bytes, and this is not one.")
        if message[len(_MAGIC) : start] != self.epoch.id:
            raise BadMessage("The message is of another epoch of the helper.")
        return message[start : start + SEALED_BYTES], message[start + SEALED_BYTES :]

    def request(self) -> bytes:
        """What the helper is sent: a row for each device of the set."""
        if self._stored is not None:
            return self._stored[1]
        messages = (self._messages[number] for number in self.senders)
        return b"".join(hashlib.sha256(vector).digest() + sealed for sealed, vector in messages)

    def leave_out(self, faulty: Mapping[int, str]) -> None:
        """Take out the rows that the helper refused, by their places in the request."""
        if self._stored is not None:
            raise Abandoned("The helper refuses a set whose vectors are gone after a restart: nothing was opened.")
        senders = self.senders
        for place, why in faulty.items():
            if 0 <= place < len(senders):
                del self._messages[senders[place]]
                self.faults[senders[place]] = why

    def opened(self, answer: bytes) -> Numbers:
        """The sum of the set's vectors with the helper's noise, given the helper's answer."""
        terms = self._terms
        if len(answer) != terms.entries * terms.width:
            raise BadMessage(f"The helper's answer has {len(answer):,} bytes, not {terms.entries * terms.width:,}.")
        return terms.ring.subtract(terms.ring.unpack(self._total()), terms.ring.unpack(answer))

    def _total(self) -> bytes:
        if self._stored is not None:
            return self._stored[2]
        total = MaskedSum(self._terms.entries, self._terms.width)
        for _, vector in self._messages.values():
            total.add_packed(vector)
        return total.packed()


def draw_noise(depth: int, entries: int) -> npt.NDArray[np.int64]:
    """Normal noise of standard deviation 2^depth, rounded to whole numbers, from the operating system's bits."""
    drawn: npt.NDArray[np.int64] = gaussian(SystemRng(), depth, entries).numpy()
    return drawn


class Helper:
    """The helper in one epoch. Open one set: the caller stores the answer before it is given, gives it again where the
    same set is asked about, and refuses another.

    secret: the secret half of the epoch's key. known: whether a key is that of a registered device.
    """

    def __init__(
        self,
        epoch: HelperEpoch,
        secret: bytes,
        known: Callable[[bytes], bool],
        draw: Callable[[int, int], npt.NDArray[np.int64]] = draw_noise,
    ) -> None:
        self.epoch, self._secret, self._known, self._draw = epoch, secret, known, draw
        self._public = sodium.crypto_scalarmult_base(secret)

    def open(self, request: bytes) -> bytes:
        """The sum of the masks of this set, and the noise."""
        terms, total = self.epoch.terms, MaskedSum(self.epoch.terms.entries, self.epoch.terms.width)
        for key in self._mask_keys(request):
            total.add(key)
        if terms.depth != NO_NOISE:
            total.add_numbers(self._draw(terms.depth, terms.entries).view(np.uint64))
        return total.packed()

    def _mask_keys(self, request: bytes) -> Iterable[bytes]:
        """The key of each mask of a set, once every row was checked."""
        terms, count = self.epoch.terms, len(request) // ROW_BYTES
        if len(request) % ROW_BYTES:
            raise SetRefused("The set is no whole number of rows.")
        if not terms.quorum <= count <= terms.parties:
            raise SetRefused(
                f"The set has {several(count, 'message')}: of {terms.parties:,} devices, {terms.quorum:,} at least "
                "must be in it."
            )
        keys: dict[bytes, bytes] = {}
        faulty: dict[int, str] = {}
        for place in range(count):
            row = request[place * ROW_BYTES : (place + 1) * ROW_BYTES]
            try:
                sender, seed = self._checked(row[:DIGEST_BYTES], row[DIGEST_BYTES:])
                if sender in keys:
                    raise BadMessage("A device has two messages in the set.")
                keys[sender] = _mask_key(self.epoch, seed, sender)
            except BadMessage as error:
                faulty[place] = str(error)
        if faulty:
            raise SetRefused(f"{several(len(faulty), 'message')} of the set cannot be opened.", faulty)
        return keys.values()

    def _checked(self, vector: bytes, sealed: bytes) -> tuple[bytes, bytes]:
        try:
            plain = sodium.crypto_box_seal_open(sealed, self._public, self._secret)
        except CryptoError as error:
            raise BadMessage("The message was not sealed to the key of this epoch.") from error
        seed, sender, signature = plain[:SEED_BYTES], plain[SEED_BYTES : SEED_BYTES + 32], plain[SEED_BYTES + 32 :]
        if not self._known(sender):
            raise BadMessage("The helper does not know the device that signed the message.")
        try:
            sodium.crypto_sign_open(signature + _statement(self.epoch, seed, vector), sender)
        except (CryptoError, ValueError) as error:
            raise BadMessage("The message's signature does not hold for this sum, epoch and vector.") from error
        return sender, seed

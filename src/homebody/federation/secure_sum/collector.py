"""The server's side of a secure sum: it asks, passes on, adds up, and takes the masks off the sum."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from homebody.errors import Abandoned, HomebodyError, several
from homebody.federation.secure_sum import shamir
from homebody.federation.secure_sum.masks import KEY_BYTES, MaskedSum, agree, derive, public_half, round_key
from homebody.federation.secure_sum.messages import (
    COUNT,
    DIGEST_BYTES,
    EXCHANGES,
    IDENTITY_BYTES,
    KEYS_BYTES,
    OPENED,
    SEALED,
    SIGNATURE_BYTES,
    SIGNED,
    BadMessage,
    Exchange,
    Listing,
    RowForm,
    Terms,
    Unpacker,
    blob,
    commitment,
    numbers_of,
    pack_numbers,
)
from homebody.federation.secure_sum.signatures import open_signed
from homebody.privacy.ring import Numbers

__all__ = ["Collector", "OpenedSum", "PartyQuestions", "talk"]

Answers = Iterable[tuple[int, bytes]]
"""The number of a party, and what it answered; each as it comes, and each once."""
_STATE = b"HBC1"
_ROSTER = RowForm(IDENTITY_BYTES)
_KEYS = RowForm(KEYS_BYTES, SIGNATURE_BYTES)
_COMMITMENTS = RowForm(DIGEST_BYTES)
_PROBE = round_key(hashlib.sha256(b"any key shows whether another is of low order").digest())
_TRIES = 200
"""Choices of shares that are tried where some are wrong."""


@dataclass(frozen=True)
class PartyQuestions:
    """What to send to whom. Store the collector's state before it is sent, and after a crash send the same again."""

    exchange: Exchange
    common: bytes
    """The beginning of every party's question."""
    own: Mapping[int, bytes]
    """The rest, for each party that is asked."""
    needed: int
    """With fewer answers the sum is abandoned."""

    def question(self, number: int) -> bytes:
        return self.common + self.own[number]


@dataclass(frozen=True)
class OpenedSum:
    """The end of a secure sum."""

    numbers: Numbers
    """The sum of the survivors' vectors, modulo 2^(8·width)."""
    survivors: tuple[int, ...]


@dataclass
class _Known:
    """What the server knows between two exchanges; all of it is plain data."""

    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Round keys and their signature."""
    sealed: dict[int, bytes] = field(default_factory=dict)
    """What each party sealed, until it is passed on."""
    commitments: dict[int, bytes] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()
    sum: bytes = b""
    signatures: dict[int, bytes] = field(default_factory=dict)


class _Coming:
    """What has come in the present exchange, until its last answer."""

    def __init__(self, terms: Terms) -> None:
        self.keys: set[bytes] = set()
        self.sum = MaskedSum(terms.entries, terms.width)
        self.senders: list[int] = []
        self.opened: dict[int, dict[int, int]] = {}
        """The shares of each party's secret, by their points."""
        self.openers: set[int] = set()
        """Who opened shares."""


class Collector:
    """One attempt at a secure sum, on the server. `ask` says what to send, `take` reads the answers, `talk` does both.

    A party whose answer is refused counts as lost; `faults` says why. Where fewer than `Terms.quorum` are left,
    `Abandoned` is raised, and nothing was opened.

    roster: the identity of the device behind each number that is asked.
    """

    def __init__(self, terms: Terms, roster: Mapping[int, bytes]) -> None:
        if len(roster) != terms.parties or len(set(roster.values())) != terms.parties:
            raise HomebodyError(f"A secure sum among {terms.parties:,} parties needs as many different devices.")
        if not all(len(device) == IDENTITY_BYTES and 0 <= number < 1 << 32 for number, device in roster.items()):
            raise HomebodyError(f"A party has a number of 32 bits and an identity of {IDENTITY_BYTES} bytes.")
        self.terms, self._roster = terms, dict(sorted(roster.items()))
        self._place, self._known, self._coming = 0, _Known(), _Coming(terms)
        self.faults: dict[int, str] = {}
        """Why a party's answer was refused, by its number."""
        self.result: OpenedSum | None = None

    @property
    def survivors(self) -> tuple[int, ...]:
        """The numbers of those whose vectors came, once they did."""
        return self._known.survivors

    def ask(self) -> PartyQuestions | None:
        """What to send next, or None once the sum is open."""
        if self.result is not None:
            return None
        known, common, rest = self._known, b"", dict.fromkeys(self._roster, b"")
        match exchange := EXCHANGES[self._place]:
            case "shares":
                common = self._list()
                graph = self._listing.graph
                signed = {number: SIGNED.pack(number, signature) for number, (_, signature) in known.keys.items()}
                rest = {number: b"".join(signed[other] for other in graph.neighbours(number)) for number in known.keys}
            case "masked":
                rest = self._inboxes()
            case "survivors":
                common, rest = pack_numbers(known.survivors), dict.fromkeys(known.survivors, b"")
            case "open":
                enough = itertools.islice(sorted(known.signatures.items()), self.terms.quorum)
                common = b"".join(SIGNED.pack(number, signature) for number, signature in enough)
                rest = dict.fromkeys(known.signatures, b"")
        return PartyQuestions(exchange, common, rest, self.terms.quorum)

    def take(self, answers: Answers) -> None:
        """Read the answers to what `ask` gave, one after the other, until there are no more."""
        exchange, asked, taken = EXCHANGES[self._place], set(self._asked()), 0
        listed = b"" if exchange == "keys" else self._listing.digest
        read = {
            "keys": self._read_keys,
            "shares": self._read_shares,
            "masked": self._read_masked,
            "survivors": self._read_survivors,
            "open": self._read_opened,
        }[exchange]
        self._coming = _Coming(self.terms)
        for number, answer in answers:
            if number not in asked:
                continue  # nobody whom this exchange asks, or somebody's second answer
            asked.remove(number)
            try:
                read(number, *open_signed(answer, self._roster[number], self.terms, listed, exchange, number))
            except BadMessage as error:
                self.faults[number] = str(error)
            else:
                taken += 1
        if taken < self.terms.quorum:
            raise Abandoned(
                f"{several(taken, 'party', 'parties')} of {self.terms.parties:,} answered '{exchange}' of a secure "
                f"sum, and {self.terms.quorum:,} must: nothing was opened."
            )
        if exchange == "masked":
            self._known.survivors, self._known.sum = tuple(sorted(self._coming.senders)), self._coming.sum.packed()
            self._known.sealed = {}
        elif exchange == "open":
            self.result = OpenedSum(self._unmasked(), self._known.survivors)
        self._place += 1

    def _asked(self) -> Iterable[int]:
        """Whom the present exchange asks: those who answered the one before."""
        known = self._known
        return (self._roster, known.keys, known.commitments, known.survivors, known.signatures)[self._place]

    def _read_keys(self, number: int, content: bytes, signature: bytes) -> None:
        pair, used = {content[:KEY_BYTES], content[KEY_BYTES:]}, self._coming.keys
        if len(content) != KEYS_BYTES or any(agree(_PROBE, key) is None for key in pair):
            raise BadMessage("The answer has no two round keys.")
        if len(pair) < 2 or pair & used:
            raise BadMessage("A round key in the answer is another party's, or is there twice.")
        used.update(pair)
        self._known.keys[number] = content, signature

    def _read_shares(self, number: int, content: bytes, _: bytes) -> None:
        committed, sealed = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        receivers = tuple(row[0] for row in SEALED.unpack(sealed, "sealed shares"))
        if receivers != self._listing.graph.neighbours(number):
            raise BadMessage("There are not shares for each neighbour, and for nobody else.")
        self._known.commitments[number], self._known.sealed[number] = committed, sealed

    def _read_masked(self, number: int, content: bytes, _: bytes) -> None:
        expected = self.terms.entries * self.terms.width
        if len(content) != expected:
            raise BadMessage(f"A masked vector has {expected:,} bytes, not {len(content):,}.")
        self._coming.sum.add_packed(content)
        self._coming.senders.append(number)

    def _read_survivors(self, number: int, content: bytes, signature: bytes) -> None:
        if content != hashlib.sha256(pack_numbers(self._known.survivors)).digest():
            raise BadMessage("The answer signs other survivors.")
        self._known.signatures[number] = signature

    def _read_opened(self, holder: int, content: bytes, _: bytes) -> None:
        survivors, graph, shares = set(self._known.survivors), self._listing.graph, []
        owners = {*graph.neighbours(holder), holder}.intersection(self._known.commitments)
        for owner, own_mask, share in OPENED.unpack(content, "opened shares"):
            if owner not in owners:
                raise BadMessage("The answer opens a share of a party that gave it none.")
            if own_mask != bytes([owner in survivors]):
                raise BadMessage("The answer opens the secret of a party that stays closed.")
            if (value := int.from_bytes(share, "little")) >= shamir.PRIME:
                raise BadMessage("A share in the answer is too large to be one.")
            shares.append((owner, value))
        self._coming.openers.add(holder)
        for owner, value in shares:
            self._coming.opened.setdefault(owner, {})[graph.holders(owner)[holder]] = value

    def _list(self) -> bytes:
        return Listing.encode(
            (number, self._roster[number], keys[:KEY_BYTES], keys[KEY_BYTES:])
            for number, (keys, _) in sorted(self._known.keys.items())
        )

    @cached_property
    def _listing(self) -> Listing:
        return Listing.read(self.terms, self._list())[0]

    def _inboxes(self) -> dict[int, bytes]:
        inboxes: dict[int, list[bytes]] = {number: [] for number in self._known.commitments}
        for sender in sorted(self._known.sealed):
            for receiver, box in SEALED.unpack(self._known.sealed[sender], "sealed shares"):
                if receiver in inboxes:
                    inboxes[receiver].append(SEALED.pack(sender, box))
        return {number: b"".join(boxes) for number, boxes in inboxes.items()}

    def _unmasked(self) -> Numbers:
        """The sum without its masks: survivors' own, and those that survivors have in common with the lost."""
        known, terms, listing = self._known, self.terms, self._listing
        total, survivors = MaskedSum(terms.entries, terms.width), set(known.survivors)
        total.add_packed(known.sum)
        secrets = {number: self._secret(number) for number in known.commitments}
        if closed := [number for number, secret in secrets.items() if secret is None]:
            self._suspect(closed)
            raise Abandoned(self._why_closed(closed[0]))
        for number, secret in secrets.items():
            assert secret is not None
            if number in survivors:
                total.subtract(derive(secret, terms.digest, "own mask", number, number))
                continue
            lost = round_key(secret)
            for other in listing.graph.neighbours(number):
                if other in survivors:
                    agreed = agree(lost, listing.mask[other])
                    assert agreed is not None, "a key of low order was refused in the first exchange"
                    low, high = min(number, other), max(number, other)
                    key = derive(agreed, terms.digest, "mask", low, high)
                    (total.subtract if other == low else total.add)(key)
        return total.numbers()

    def _secret(self, number: int) -> bytes | None:
        """The secret of a party that is opened; where some shares are wrong, other choices of them are tried. None if
        there are too few, or none of them fit."""
        shares, threshold = self._coming.opened.get(number, {}), self._listing.graph.design.threshold
        if len(shares) < threshold:
            return None
        for chosen in itertools.islice(_choices(sorted(shares), threshold), _TRIES):
            secret = shamir.combine({point: shares[point] for point in chosen})
            if secret is not None and self._is_secret(number, secret):
                return secret
        return None

    def _why_closed(self, number: int) -> str:
        count, threshold = len(self._coming.opened.get(number, {})), self._listing.graph.design.threshold
        if count < threshold:
            return (
                f"Party {number} of a secure sum has {several(count, 'share')} of a secret opened, and it takes "
                f"{threshold:,}: the sum stays closed."
            )
        return f"The shares of party {number} do not fit together: the sum stays closed."

    def _suspect(self, closed: Sequence[int]) -> None:
        """Blame the few parties whose secrets stay closed, though others' open: they gave out wrong shares.

        Those who hold the shares may lie instead. So a party is blamed only if more of them say so than may collude.
        """
        graph, opened = self._listing.graph, self._coming.opened
        threshold = graph.design.threshold
        liars = max(1, min(self.terms.colluders, threshold - 1))
        if len(closed) > liars:
            return
        for number in closed:
            count = len(opened.get(number, {}))
            against = len(self._coming.openers.intersection(graph.holders(number))) - count
            if count >= threshold:
                if math.comb(count, threshold) > _TRIES:
                    continue  # not every choice was tried, so that a few wrong shares may be all
                against += count - threshold + 1
            if against > liars:
                self.faults[number] = "The shares that it gave to others do not open its secret."

    def _is_secret(self, number: int, secret: bytes) -> bool:
        if number in self._known.survivors:
            return commitment(self.terms.digest, number, secret) == self._known.commitments[number]
        return public_half(secret) == self._listing.mask[number]

    def state(self) -> bytes:
        """All that the server needs to go on from here, before or after it asks. It opens no vector."""
        known = self._known
        parts = [
            _ROSTER.pack_all((number, device) for number, device in self._roster.items()),
            _KEYS.pack_all((number, *both) for number, both in sorted(known.keys.items())),
            b"".join(COUNT.pack(number) + blob(sealed) for number, sealed in sorted(known.sealed.items())),
            _COMMITMENTS.pack_all(sorted(known.commitments.items())),
            pack_numbers(known.survivors),
            known.sum,
            SIGNED.pack_all(sorted(known.signatures.items())),
            b"".join(COUNT.pack(number) + blob(why.encode()) for number, why in sorted(self.faults.items())),
        ]
        if self.result is not None:
            raise HomebodyError("A secure sum that is opened has no state: store its result.")
        return b"".join([_STATE, blob(self.terms.encode()), bytes([self._place]), *(blob(part) for part in parts)])

    @classmethod
    def of_state(cls, state: bytes) -> Collector:
        """The collector as it was: `ask` gives the same bytes again."""
        cursor = Unpacker(state, "The stored state of a secure sum")
        if cursor.take(4) != _STATE:
            raise BadMessage("This is no stored state of a server in a secure sum.")
        terms, place = Terms.decode(cursor.blob()), cursor.take(1)[0]
        roster, keys, sealed, commitments, survivors, total, signatures, faults = (cursor.blob() for _ in range(8))
        cursor.end()
        if place >= len(EXCHANGES):
            raise BadMessage("The stored state of a secure sum names an exchange that there is not.")
        collector = cls(terms, dict(_ROSTER.unpack(roster, "devices")))
        collector._place = place
        collector._known = _Known(
            {row[0]: (row[1], row[2]) for row in _KEYS.unpack(keys, "round keys")},
            _blobs(sealed),
            dict(_COMMITMENTS.unpack(commitments, "commitments")),
            numbers_of(survivors, "survivors"),
            total,
            dict(SIGNED.unpack(signatures, "signatures of the survivors")),
        )
        collector.faults = {number: why.decode(errors="replace") for number, why in _blobs(faults).items()}
        return collector


def talk(collector: Collector) -> Generator[PartyQuestions, Answers, OpenedSum]:
    """Ask, and take what is sent back, until the sum is there; `Abandoned` where too few parties are left."""
    while (asked := collector.ask()) is not None:
        collector.take((yield asked))
    assert collector.result is not None
    return collector.result


def _blobs(body: bytes) -> dict[int, bytes]:
    cursor, blobs = Unpacker(body, "The stored state of a secure sum"), dict[int, bytes]()
    while not cursor.ended:
        number = cursor.number()
        blobs[number] = cursor.blob()
    return blobs


def _choices(points: list[int], count: int) -> Iterable[list[int]]:
    """Choices of so many points, always the same: all if they are few; otherwise the first, those without one of the
    first each, and then others."""
    if math.comb(len(points), count) <= _TRIES:
        yield from map(list, itertools.combinations(points, count))
        return
    yield points[:count]
    for left_out in points[:count]:
        yield [point for point in points if point != left_out][:count]
    for attempt in itertools.count():
        order = sorted(points, key=lambda point: hashlib.sha256(COUNT.pack(attempt) + COUNT.pack(point)).digest())
        yield sorted(order[:count])

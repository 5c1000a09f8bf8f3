"""What parties and server send one another, as bytes.

Rows are a party's number and fields of fixed length, in the order of the numbers. Any other form is refused.
What a party sends is signed (`signatures.py`).

| exchange | the server sends | a party answers with |
|---|---|---|
| keys | nothing | two round keys: to seal shares to, and to mask with |
| shares | the list of all parties with their round keys; signatures of the neighbours | a commitment; shares, sealed |
| masked | the shares that are for this party | its vector, masked |
| survivors | the numbers of those whose vectors came | the digest of these |
| open | the signatures of enough survivors | a share of one secret of each neighbour |
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args

from homebody.errors import HomebodyError
from homebody.federation.secure_sum import FEWEST, IDENTITY_BYTES, SIGNATURE_BYTES
from homebody.federation.secure_sum.graph import Graph, design
from homebody.federation.secure_sum.shamir import SHARE_BYTES
from homebody.privacy.secure_sum import check_shares, threshold

__all__ = [
    "EXCHANGES",
    "FEWEST",
    "IDENTITY_BYTES",
    "SIGNATURE_BYTES",
    "BadMessage",
    "Exchange",
    "Listing",
    "RowForm",
    "SumTerms",
    "Terms",
    "Unpacker",
    "traffic",
]

Exchange = Literal["keys", "shares", "masked", "survivors", "open"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

KEYS_BYTES = 2 * 32
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Two shares, sealed."""
DIGEST_BYTES = 32
HEAD = struct.Struct("<4sBI")
OVERHEAD = HEAD.size + SIGNATURE_BYTES
"""Bytes of a signed message beside its content."""
_LONGEST_NAME = 200


class BadMessage(HomebodyError):
    """What came from the server or from a party breaks the protocol; the sentence says how."""


class RowForm:
    """A fixed form of a part of a message: a party's number, and so many bytes for each field.

    >>> RowForm(2, 1).pack(7, b"ab", b"c")
    b'\\x07\\x00\\x00\\x00abc'
    """

    def __init__(self, *sizes: int) -> None:
        self._form = struct.Struct("<I" + "".join(f"{size}s" for size in sizes))
        self.size = self._form.size

    def pack(self, *fields: int | bytes) -> bytes:
        return self._form.pack(*fields)

    def pack_all(self, rows: Iterable[tuple[Any, ...]]) -> bytes:
        return b"".join(self._form.pack(*row) for row in rows)

    def unpack(self, body: bytes, what: str) -> list[tuple[Any, ...]]:
        """The rows of a body; refused unless numbers ascend, so that each is there once."""
        if len(body) % self.size:
            raise BadMessage(f"The {what} have {len(body):,} bytes, which is no whole number of rows.")
        rows = list(self._form.iter_unpack(body))
        if any(row[0] >= after[0] for row, after in pairwise(rows)):
            raise BadMessage(f"The {what} name a party twice, or are not in the order of the parties.")
        return rows


LISTED = RowForm(IDENTITY_BYTES, 32, 32)
"""A party in the list: its device's key, and its two round keys."""
SIGNED = RowForm(SIGNATURE_BYTES)
SEALED = RowForm(SEALED_BYTES)
NUMBERED = RowForm()
OPENED = RowForm(1, SHARE_BYTES)
"""A share: whether it is of the party's own mask (1), or of the key that it masks with others (0)."""
COUNT = struct.Struct("<I")


class Unpacker:
    """Bytes that are read from the start to the end; refused where they end early or late."""

    def __init__(self, body: bytes, what: str) -> None:
        self._body, self._at, self._what = body, 0, what

    def take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._body):
            raise BadMessage(f"{self._what} ends too early.")
        return self._body[start : self._at]

    def number(self) -> int:
        (value,) = COUNT.unpack(self.take(COUNT.size))
        return int(value)

    def blob(self) -> bytes:
        """Bytes with their length before them, as `blob` writes them."""
        return self.take(self.number())

    @property
    def ended(self) -> bool:
        return self._at == len(self._body)

    def end(self) -> None:
        if self._at != len(self._body):
            raise BadMessage(f"{self._what} is longer than it should be.")


def blob(content: bytes) -> bytes:
    return COUNT.pack(len(content)) + content


@dataclass(frozen=True)
class SumTerms:
    """What all parties of an attempt must agree on before it begins; `people` and `asks` are the last two fields."""

    run: str
    attempt: str
    """Names one attempt at one sum of the run. A second attempt has another name."""
    parties: int
    """How many are asked."""
    entries: int
    """Numbers in a vector."""
    width: int
    """The bytes of a number: sums are modulo 2^(8·width)."""

    _magic: ClassVar[bytes]
    _numbers: ClassVar[struct.Struct]
    """The numbers of the terms, in the order of the fields."""
    _with: ClassVar[str] = ""

    def _check(self, asks: str, *counts: tuple[int, int, int, str]) -> None:
        """Refuse names that are too long, and numbers out of range. counts: a number, the least, the most, and what."""
        for name in (self.run, self.attempt):
            if not 0 < len(name.encode()) <= _LONGEST_NAME:
                raise HomebodyError(f"Run and attempt of a secure sum have names of 1 to {_LONGEST_NAME} bytes.")
        if len(asks.encode()) > _LONGEST_NAME:
            raise HomebodyError(f"What a secure sum asks is a digest of at most {_LONGEST_NAME} bytes.")
        for count, low, most, what in (
            (self.parties, 1, 1 << 20, "parties"),
            (self.entries, 1, (1 << 32) - 1, "numbers in a vector"),
            (self.width, 1, 8, "bytes in a number"),
            *counts,
        ):
            if type(count) is not int or not low <= count <= most:
                raise HomebodyError(f"A secure sum has {low} to {most:,} {what}, not {count!r}.")

    def encode(self) -> bytes:
        run, attempt, *numbers, asks = (getattr(self, spec.name) for spec in fields(self))
        names = (blob(name.encode()) for name in (run, attempt, asks))
        return b"".join([self._magic, *names, self._numbers.pack(*numbers)])

    @classmethod
    def decode(cls, body: bytes) -> Self:
        cursor = Unpacker(body, "The description of a secure sum")
        if cursor.take(4) != cls._magic:
            raise BadMessage(f"This is no description of a secure sum{cls._with}.")
        try:
            run, attempt, asks = (cursor.blob().decode() for _ in range(3))
            numbers = cls._numbers.unpack(cursor.take(cls._numbers.size))
        except UnicodeDecodeError as error:
            raise BadMessage("A name in the description of a secure sum is no text.") from error
        cursor.end()
        values: tuple[Any, ...] = (run, attempt, *numbers, asks)
        return cls(*values)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.encode()).digest()


@dataclass(frozen=True)
class Terms(SumTerms):
    """What the parties of a sum agree on that devices open.

    >>> terms = Terms("run", "round 3#1", parties=100, entries=54_000, width=3)
    >>> terms.quorum, Terms.decode(terms.encode()) == terms
    (67, True)
    """

    least: float = 2 / 3
    """The share of the parties that must stay to the end."""
    colluding: float = 0.1
    """The share that may collude with the server."""
    people: int = 0
    """The most people whose updates are in the sum, which the step of its numbers may depend on; 0: not stated."""
    asks: str = ""
    """A digest of what every party is asked to work on: parameters, method, stages. Who is asked something else has
    other terms, and signs nothing that holds for these. Empty: not stated."""

    _magic, _numbers = b"HBT1", struct.Struct("<IIBddI")

    def __post_init__(self) -> None:
        self._check(self.asks)
        if type(self.people) is not int or not 0 <= self.people < 1 << 32:
            raise HomebodyError(f"The people of a secure sum are a whole number of 32 bits, not {self.people!r}.")
        check_shares(self.least, self.colluding)
        if not 2 * self.quorum > self.parties * (1 + self.colluding):
            raise HomebodyError(
                f"Of {self.parties:,} parties {self.quorum:,} must answer, and two such sets may have no honest party "
                "in common: raise least, or lower colluding."
            )

    @property
    def quorum(self) -> int:
        """How many parties must stay to the end."""
        return threshold(self.parties, self.least)

    @property
    def colluders(self) -> int:
        """How many parties may collude with the server."""
        return int(self.colluding * self.parties + 1e-9)


@dataclass(frozen=True)
class Listing:
    """The parties that gave round keys, as everyone learns them."""

    devices: dict[int, bytes]
    """Each party's public key, as `identity_of` writes it."""
    seal: dict[int, bytes]
    mask: dict[int, bytes]
    digest: bytes
    graph: Graph

    @staticmethod
    def encode(rows: Iterable[tuple[int, bytes, bytes, bytes]]) -> bytes:
        """Rows in the order of their numbers: number, device, key to seal to, key to mask with."""
        packed = [LISTED.pack(*row) for row in rows]
        return COUNT.pack(len(packed)) + b"".join(packed)

    @staticmethod
    def read(terms: Terms, question: bytes) -> tuple[Listing, bytes]:
        """The list at the beginning of a question, and what follows it."""
        cursor = Unpacker(question, "The list of parties")
        body = cursor.take(LISTED.size * cursor.number())
        return _listing(terms, body), question[COUNT.size + len(body) :]


@lru_cache(maxsize=2)
def _listing(terms: Terms, body: bytes) -> Listing:
    rows = LISTED.unpack(body, "list of parties")
    if not terms.quorum <= len(rows) <= terms.parties:
        raise BadMessage(
            f"The list names {len(rows):,} parties: of {terms.parties:,}, {terms.quorum:,} at least must take part."
        )
    devices, seal, mask = ({row[0]: row[place] for row in rows} for place in (1, 2, 3))
    if len(set(devices.values())) < len(rows):
        raise BadMessage("The list names one device as two parties.")
    if len({*seal.values(), *mask.values()}) < 2 * len(rows):
        raise BadMessage("A round key is in the list twice.")
    digest = hashlib.sha256(terms.digest + body).digest()
    graph = Graph(list(devices), design(len(rows), terms.quorum, terms.colluders), digest)
    return Listing(devices, seal, mask, digest, graph)


def commitment(attempt: bytes, number: int, secret: bytes) -> bytes:
    """A party's commitment to the seed of its own mask, so that a wrong share of it is noticed."""
    content = b"".join([b"homebody secure sum 1, own mask\0", attempt, COUNT.pack(number), secret])
    return hashlib.sha256(content).digest()


def numbers_of(body: bytes, what: str) -> tuple[int, ...]:
    return tuple(row[0] for row in NUMBERED.unpack(body, what))


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return NUMBERED.pack_all((number,) for number in numbers)


def traffic(terms: Terms, degree: int) -> dict[Exchange, tuple[int, int]]:
    """The bytes that a party sends and receives in each exchange, where everyone answers."""
    sealed = degree * SEALED.size
    content: dict[Exchange, tuple[int, int]] = {
        "keys": (KEYS_BYTES, 0),
        "shares": (DIGEST_BYTES + sealed, COUNT.size + terms.parties * LISTED.size + degree * SIGNED.size),
        "masked": (terms.entries * terms.width, sealed),
        "survivors": (DIGEST_BYTES, terms.parties * NUMBERED.size),
        "open": ((degree + 1) * OPENED.size, terms.quorum * SIGNED.size),
    }
    return {exchange: (OVERHEAD + sent, received) for exchange, (sent, received) in content.items()}

"""How a round's updates come back: in letters, as reports through a proxy, or as a secure sum among devices.

Each way is a conversation: a generator that says what to ask of whom, gets the answers as they come, and ends with the
sum. `Flower` sends what it asks. Letters and reports take one turn, a secure sum takes five.

A channel with a Shuffle has its devices send one-bit reports, each sealed by itself to a key of the round's epoch,
through a proxy to the server's intake; their letters say no more than that they did. A channel with a SecureSum has
them mask their vectors so that the server can open the sum alone.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from homebody.core import Rows, Tree
from homebody.errors import Abandoned, several
from homebody.federation import wire
from homebody.federation.epoch import BIT_BYTES, SEAL_BYTES
from homebody.federation.secure_sum.helped import HelpedTerms
from homebody.federation.secure_sum.messages import FEWEST, Exchange, Terms, Unpacker, blob
from homebody.federation.server.answers import Answer
from homebody.federation.server.letters import PAUSE, Ask
from homebody.federation.server.records import StoredSum
from homebody.federation.task import SumTask, Task
from homebody.privacy import Channel
from homebody.privacy.grid import STEPS
from homebody.privacy.ring import Numbers, Ring

if TYPE_CHECKING:
    from homebody.federation.secure_sum.collector import Collector
    from homebody.federation.server.epochs import EpochResult, Epochs
    from homebody.federation.server.records import Records, RegisteredDevice

__all__ = [
    "LetterRoute",
    "MessageRoute",
    "NothingLeft",
    "ProxyRoute",
    "Route",
    "SecureRoute",
    "SumRoute",
    "Summed",
    "TooFew",
    "bounds",
    "by_device",
    "cleaning",
    "largest",
    "sent_by_devices",
]

ROUNDING = 1.001
"""By how much a number in 16 bits may be over its bound."""
SPARE = 0.1
"""The share by which reports may be more than those who were asked send."""
SHARES: dict[Exchange, float] = {"keys": 0.1, "shares": 0.15, "masked": 0.6, "survivors": 0.5, "open": 1.0}
"""The share of the time that is left which an exchange of a secure sum may take: the work is done in the third."""
_STORED = "The stored sum"


Answers = Iterable[tuple["RegisteredDevice", Answer]]
"""A device, and what it answered, each as it comes."""


@dataclass(frozen=True)
class Summed:
    """The sum of what people sent, and how many they were."""

    sum: Tree
    answered: int
    beside: int = 0
    """Bytes that came outside letters."""
    updates: Mapping[int, Tree] = field(default_factory=lambda: MappingProxyType({}))
    """The update of each person, if updates came in letters."""
    shares: int | None = None
    """How many shares of a secure sum's noise are in it; None: one of each person."""
    parties: int = 0
    """The number of parties that the noise of a secure sum was fitted to; 0: not stated."""


class TooFew(Abandoned):
    """Fewer people answered than must."""

    def __init__(self, answered: int) -> None:
        super().__init__(f"{several(answered, 'client')} answered, and more must.")
        self.answered = answered


class NothingLeft(Abandoned):
    """A secure sum ended before any device was asked for its vector: no update left a device."""


class Route(ABC):
    """A way for updates to come back."""

    proxied = False

    @abstractmethod
    def talk(self, task: Task, users: list[int], needed: int) -> Generator[Ask, Answers, Summed]:
        """What to ask of whom, until the sum is there; needed: how many people must be in it. `Abandoned` where fewer
        are."""

    def left(self) -> float:
        """Seconds for which updates can still arrive."""
        return math.inf


@dataclass(frozen=True)
class LetterRoute(Route):
    """Updates come back in the devices' own letters.

    wanted: the shape of each tensor of an update. within: the largest number, and the most rows. clean: what is done
    to an update that passed these checks. reads: adds messages, stacked, to the sums, where the server reads each.
    """

    wanted: Mapping[str, wire.Expected]
    within: tuple[float, int | None]
    clean: Callable[[Tree], Tree]
    reads: Callable[[Tree, Tree], None] | None = None

    def talk(self, task: Task, users: list[int], needed: int) -> Generator[Ask, Answers, Summed]:
        """Updates are added in the order of people's numbers, in doubles, or exactly where they are whole steps of a
        grid."""
        updates: dict[int, Tree] = {}
        for _, answer in (yield Ask(task, users, needed, self._read)):
            updates.update(answer.updates)
        if len(updates) < needed:
            raise TooFew(len(updates))
        sums: Tree = {}
        if self.reads is not None:
            whole = self.read_all([updates[number] for number in sorted(updates)])
            return Summed(whole, len(updates), 0, updates)
        for name, (shape, size, kind) in self.wanted.items():
            exact = torch.int64 if kind in STEPS else torch.float64
            sums[name] = torch.zeros(shape if size is None else (size, *shape), dtype=exact)
        for number in sorted(updates):
            for name, value in updates[number].items():
                if isinstance(value, Rows):
                    there = value.index >= 0  # rows that a clip has added up leave padding behind
                    sums[name].index_add_(0, value.index[there], value.value[there].to(sums[name].dtype))
                else:
                    sums[name] += value
        kinds = {name: torch.promote_types(form.kind, torch.float32) for name, form in self.wanted.items()}
        sums = {name: value if value.dtype == torch.int64 else value.to(kinds[name]) for name, value in sums.items()}
        return Summed(sums, len(updates), 0, updates)

    def read_all(self, messages: Sequence[Tree]) -> Tree:
        """The sums of messages that the channel reads one by one."""
        assert self.reads is not None
        sums: Tree = {}
        self.reads({name: torch.stack([message[name] for message in messages]) for name in self.wanted}, sums)
        return sums

    def _read(self, part: bytes) -> Tree:
        """What one person sent, checked and cleaned: nothing that came from a device is used before."""
        return self.clean(wire.decode_update(part, self.wanted, *self.within))


def cleaning(channel: Channel, n_items: int) -> Callable[[Tree], Tree]:
    """What is done to an update of this channel that came in a letter: it is clipped once more, or refused."""
    reader = channel.facts.reader
    if reader is None:
        return channel.bounded

    def admitted(message: Tree) -> Tree:
        if not reader.admits(message, n_items):
            raise wire.Malformed("The message says what no device of this method says.")
        return message

    return admitted


@dataclass
class ProxyRoute(Route):
    """Updates come back as sealed reports through a proxy, in an epoch of the intake's."""

    epochs: Epochs
    name: str
    asks: str
    channel: Channel
    wanted: Mapping[str, wire.Expected]
    seconds: float

    proxied = True
    size = BIT_BYTES
    """Bytes of a report."""

    def __post_init__(self) -> None:
        reports, shuffle = self.channel.facts.reports, self.channel.facts.shuffle
        assert reports is not None
        assert shuffle is not None
        self._k, self._among = reports.k, shuffle.users or 1

    def talk(self, task: Task, users: list[int], needed: int) -> Generator[Ask, Answers, Summed]:
        """Ask, then wait for the reports of all who said that they had reported, or until the epoch closes. An epoch
        that was closed before the round was cut short is not asked about again."""
        from homebody.federation.envelopes import envelope_bytes

        if (done := self.epochs.closed(self.name)) is not None:
            return Summed(self._tree(done, needed, len(users)), done.people)
        about = (self.name, self.asks, self._k, self._entries, self.seconds, self._among, self.size)
        self._epoch = self.epochs.open(*about)
        self._end = time.monotonic() + self.seconds
        # A letter says that reports were sent, and nothing else.
        sent = partial(wire.decode_update, wanted={}, largest=0.0, rows=0)
        answers = yield Ask(replace(task, epoch=self._epoch), users, needed, sent)
        if (people := sum(len(answer.updates) for _, answer in answers)) < needed:
            raise TooFew(people)
        while self.epochs.arrived(self.name) < self._k * people and self.left() > 0:
            time.sleep(PAUSE)
        done = self.epochs.close(self.name, people)
        # As if each person had a message of their own: how many share a device is not told.
        size = envelope_bytes(self._k, self.size + SEAL_BYTES)
        return Summed(self._tree(done, needed, len(users)), people, people * size)

    def left(self) -> float:
        """By the wall clock, which devices and proxies are told; and no longer than planned, should it be set back."""
        return min(self.epochs.left(self._epoch), self._end - time.monotonic())

    @property
    def _entries(self) -> int:
        return sum(_size(form) for form in self.wanted.values()) // 2

    def _tree(self, done: EpochResult, needed: int, asked: int) -> Tree:
        """The inverse of `wire.report_numbers` for counts."""
        self._check(int(done.counts.sum()), needed, asked)
        tree, start = {}, 0
        for name, form in sorted(self.wanted.items()):
            end = start + _size(form)
            tree[name] = torch.from_numpy(done.counts[start:end].astype(np.float32))
            start = end
        return tree

    def _check(self, arrived: int, needed: int, asked: int) -> None:
        """Refuse reports that are too few, or far more than the people asked can have sent: a few more do little harm,
        and must not let one device stop a round that all are charged for."""
        if arrived < self._k * needed:
            raise Abandoned(
                f"{several(arrived, 'report')} arrived before their epoch closed, and {self._k * needed:,} must: "
                "check that the proxy runs, that its next hop is this server's address for reports, and that its "
                "settings hold and least_devices are low enough."
            )
        most = self._k * (asked + max(1, int(SPARE * asked)))
        if arrived > most:
            raise Abandoned(
                f"{several(arrived, 'report')} arrived, but these people send at most {self._k * asked:,}: a proxy "
                "accepts too many reports from someone, or forges reports."
            )


@dataclass
class MessageRoute(ProxyRoute):
    """Messages that the server reads one by one come back whole, each sealed by itself: nobody knows whose it is.

    The ledger counts on no shuffle: a message is charged as if it came in a letter.

    plain: the way back in letters, which says how a message is checked. among: how many people's messages a proxy must
    mix before it passes any on.
    """

    plain: LetterRoute
    among: int

    def __post_init__(self) -> None:
        self._k, self._among, self.size = 1, self.among, wire.packed_bytes(self.wanted)

    @property
    def _entries(self) -> int:
        return 1

    def _tree(self, done: EpochResult, needed: int, asked: int) -> Tree:
        """The messages, read by the channel. One that no device of this method sends is dropped, and counted."""
        found: list[Tree] = []
        for at in range(0, len(done.reports), self.size):
            try:
                message = wire.unpacked(done.reports[at : at + self.size], self.wanted)
                wire.check(message, self.wanted, *self.plain.within)
                found.append(self.plain.clean(message))
            except wire.Malformed:
                self.epochs.records.count("reports_refused: no message of this method")
        self._check(len(found), needed, asked)
        return self.plain.read_all(found)


@dataclass(frozen=True)
class SecureRoute(Route):
    """Updates come back as one sum of masked vectors: a party is a device, its people added up.

    How far the attempt is, is stored before each question. After a kill the same is asked again, and whoever is asked
    answers the same; once the sum is open, nobody is asked any more.

    asks: a digest of what letters ask, which the terms hold: devices take part only with others that were asked the
    same. devices: all that are registered. blame: refuses an answer of the device of this first number, and says why.
    """

    records: Records
    attempt: str
    asks: str
    channel: Channel
    wanted: Mapping[str, wire.Expected]
    devices: Sequence[RegisteredDevice]
    blame: Callable[[int, str], None]

    form: ClassVar[type[Terms | HelpedTerms]]

    @abstractmethod
    def terms_in(self, state: bytes) -> Terms | HelpedTerms:
        """The terms of an attempt in this state."""

    @abstractmethod
    def ring(self, terms: Terms | HelpedTerms) -> Ring:
        """The whole numbers of an attempt."""

    @cached_property
    def entries(self) -> int:
        return sum(math.prod(form.shape) for form in self.wanted.values())

    def stored(self, task: Task) -> StoredSum:
        """How far this attempt is. One that asked something else is not gone on with: measurements are charged whenever
        they are asked for, and a round is tried under another name, which is charged too."""
        stored = self.records.sum(self.attempt) or StoredSum({}, None, None)
        if stored.state is not None:
            terms = self.terms_in(stored.state)
        elif stored.result is not None:
            terms = self.terms_of(stored.result)
        else:
            return stored
        if terms.asks == self.asks:
            return stored
        if task.do == "train":
            raise Abandoned("The attempt that was cut short asked something else.")
        return StoredSum({}, None, None)

    def terms_of(self, result: bytes) -> Terms | HelpedTerms:
        return self.form.decode(Unpacker(result, _STORED).blob())

    def refuse_few(self, theirs: Mapping[int, Sequence[int]]) -> None:
        if len(theirs) < FEWEST:
            raise Abandoned(
                f"The people of this round are on {several(len(theirs), 'device')}, and a secure sum needs {FEWEST} at "
                "least: ask more people a round (--cohort), or register more devices."
            )

    def opened(self, people: Mapping[int, int], terms: Terms | HelpedTerms, numbers: Numbers) -> Summed:
        """The sum, once it is stored: how many people of each device are in it, its terms, its numbers."""
        result = blob(terms.encode()) + self.ring(terms).pack(numbers)
        self.records.put_sum(self.attempt, people, None, result)
        return self.summed(people, result)

    def summed(self, people: Mapping[int, int], result: bytes) -> Summed:
        """A sum as it was stored."""
        content = Unpacker(result, _STORED)
        ring = self.ring(self.form.decode(content.blob()))
        numbers = ring.unpack(content.take(self.entries * ring.width))
        return Summed(
            ring.decode(numbers, {name: form.shape for name, form in self.wanted.items()}), sum(people.values())
        )


@dataclass(frozen=True)
class SumRoute(SecureRoute):
    """Devices open their sum between them. roster: the signed list of devices that may take part; empty: the server has
    none."""

    roster: bytes = b""

    form = Terms

    def talk(self, task: Task, users: list[int], needed: int) -> Generator[Ask, Answers, Summed]:
        from homebody.federation.server.rosters import read_roster

        people, state, result = self.stored(task)
        if result is not None:
            return self.summed(people, result)
        theirs = by_device(self.devices, users)
        collector = self._collector(task.run, theirs, state)
        named = read_roster(self.roster).digest if self.roster else ""
        while (asked := collector.ask()) is not None:
            self.records.put_sum(self.attempt, people, collector.state(), None)
            gave, known = dict[int, int](), set(collector.faults)
            whom = [user for first in asked.own for user in theirs.get(first, ())]
            answers = yield Ask(
                replace(task, sum=SumTask(collector.terms, asked.exchange, named)),
                whom,
                asked.needed,
                questions=asked.question,
                share=SHARES[asked.exchange],
                roster=self.roster,
            )
            try:
                collector.take(sent_by_devices(answers, theirs, gave))
            except Abandoned as error:
                raise NothingLeft(str(error)) if asked.exchange in ("keys", "shares") else error from None
            finally:
                for first in collector.faults.keys() - known:
                    self.blame(first, collector.faults[first])
            if asked.exchange == "masked":
                people = {first: gave[first] for first in collector.survivors}
                if sum(people.values()) < needed:
                    raise TooFew(sum(people.values()))
        assert collector.result is not None
        return self.opened(people, collector.terms, collector.result.numbers)

    def summed(self, people: Mapping[int, int], result: bytes) -> Summed:
        parties = self.terms_of(result).parties
        return replace(super().summed(people, result), shares=len(people), parties=parties)

    def ring(self, terms: Terms | HelpedTerms) -> Ring:
        """After a restart others may be there than those whom the terms are about."""
        return self.channel.among(terms.parties).ring(self.entries, terms.people)

    def terms_in(self, state: bytes) -> Terms:
        from homebody.federation.secure_sum.collector import Collector

        return Collector.of_state(state).terms

    def _collector(self, run: str, theirs: Mapping[int, Sequence[int]], state: bytes | None) -> Collector:
        from homebody.federation.flower.protocol import load_public
        from homebody.federation.secure_sum.collector import Collector
        from homebody.federation.secure_sum.signatures import identity_of

        if state is not None:
            return Collector.of_state(state)
        self.refuse_few(theirs)
        assert self.channel.facts.sum is not None
        people = sum(map(len, theirs.values()))
        sizes = (len(theirs), self.entries, self.channel.ring(self.entries, people).width)
        terms = Terms(run, self.attempt, *sizes, *self.channel.facts.sum.shares, people, self.asks)
        keys = {device.first: device.public_key for device in self.devices}
        return Collector(terms, {first: identity_of(load_public(keys[first])) for first in theirs})


def by_device(devices: Sequence[RegisteredDevice], users: Iterable[int]) -> dict[int, list[int]]:
    """These people by the first number of their device."""
    firsts, theirs = sorted(device.first for device in devices), dict[int, list[int]]()
    for user in users:
        theirs.setdefault(firsts[bisect_right(firsts, user) - 1], []).append(user)
    return theirs


def sent_by_devices(
    answers: Answers, theirs: Mapping[int, Sequence[int]], gave: dict[int, int]
) -> Iterator[tuple[int, bytes]]:
    """What devices sent, and in `gave` how many of their people it is of."""
    for device, answer in answers:
        if answer.message is not None:
            there = set(answer.people) - answer.declined  # whoever opted out on the way was not asked for it
            gave[device.first] = sum(user in there for user in theirs.get(device.first, ()))
            yield device.first, answer.message


def _size(form: wire.Expected) -> int:
    assert form.size is not None
    return form.size


def bounds(channel: Channel, otherwise: float) -> tuple[float, int | None]:
    """The largest number and the most rows that can come out of a channel's half on the device."""
    facts = channel.facts
    if facts.reports is not None:
        return 1.0, facts.reports.k
    most = otherwise
    if not facts.noise_on_device:  # such noise may exceed any bound
        most = min((otherwise, *(ROUNDING * norm for norm in facts.norms.values())))
    return most / facts.grid.step if facts.grid else most, None


def largest(updates: Mapping[int, Tree]) -> int | None:
    """The person whose update has the largest number; None if nobody sent one.

    >>> largest({4: {"w": torch.ones(2)}, 7: {"w": torch.tensor([0.0, -3.0])}})
    7
    """

    def most(number: int) -> float:
        tensors = [value.value if isinstance(value, Rows) else value for value in updates[number].values()]
        return max((float(tensor.to(torch.float64).abs().max()) for tensor in tensors if tensor.numel()), default=-1.0)

    number = max(updates, key=most, default=None)
    return None if number is None or most(number) < 0 else number

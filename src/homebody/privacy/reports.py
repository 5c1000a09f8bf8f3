"""Bits that are randomised on the device: one-bit reports, the shuffle that amplifies them, and randomised response."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from homebody import kernels, ops
from homebody.core import CALL, HEAD_BYTES, Cohort, Rows, Total, Tree, Update, Work
from homebody.errors import HomebodyError
from homebody.privacy.events import OBSERVERS, Charge, Event, PureRelease, Reports, ShuffledReports, Unit
from homebody.privacy.stages import Facts, Stage, check_number, dense, real
from homebody.rng import Rng

__all__ = [
    "PAIRS",
    "OneBit",
    "RandomisedResponse",
    "Shuffle",
    "counts_name",
    "parse_counts_name",
    "sealed_bytes",
    "tally",
]

PAIRS = "²"
"""Suffix of a tensor's name: the sum of the products of its entries, pair by pair."""
_BLOCK = 512
"""Rows of a symmetric matrix that are computed together; entries below them are left out."""
SEALING = 300_000
"""Operations that sealing one report counts as."""


@dataclass(frozen=True)
class OneBit(Stage):
    """k reports of one bit each, instead of the update (Minto et al., RecSys 2021, after Nguyên et al.).

    A report draws one of the update's D entries evenly, projects its value g on [−1, 1], and says 1 with probability
    (g(e^ε − 1) + e^ε + 1) / (2e^ε + 2). The server reads ±D(e^ε + 1)/(e^ε − 1) at that entry. **The k reports of a
    client are averaged**, so the decoded sum is an unbiased estimate of the sum of the projected updates; the paper
    adds them up, which makes k times that.

    What a device sends of a tensor is a count of (entry, bit) pairs, under the name that `counts_name` gives it.

    >>> import homebody as hb
    >>> channel = hb.Channel(hb.OneBit(epsilon=0.5, k=2))
    >>> channel.facts.hidden
    'one-bit reports'
    >>> hb.account.onebit(0.5, reports=2, rounds=3)["epsilon"].item()
    3.0
    """

    epsilon: float
    k: int = 1

    dense = True
    samples = True

    def __post_init__(self) -> None:
        check_number("ε of a one-bit report", self.epsilon)
        if type(self.k) is not int or self.k < 1:
            raise HomebodyError(f"The reports of a device, k, are a whole number from 1, not {self.k!r}.")

    def chance(self, value: Tensor) -> Tensor:
        """P[1] for values in [−1, 1]. The formula above, written so that no ε overflows."""
        return 0.5 + 0.5 * math.tanh(self.epsilon / 2) * value.to(torch.float64)

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.hidden:
            raise HomebodyError(f"One-bit reports cannot follow {facts.hidden}: they are noise enough; keep one.")
        return self, replace(facts, norms={}, hidden="one-bit reports", reports=self)

    def work(self, given: Work) -> Work:
        """A device's work with this stage: it reads the update, and draws and seals k reports."""
        entries = given.bytes // 4
        operations = given.operations + 20 * entries + SEALING * self.k + 50 * CALL
        return Work(given.memory + 32 * entries + 256 * self.k, operations, sealed_bytes(self.k) + HEAD_BYTES)

    def device(self, update: Update, rng: Rng) -> Update:
        flat = {name: real(dense(value)) for name, value in update.items()}
        shapes = {name: tuple(value.shape) for name, value in flat.items()}
        drawn = rng.integers(_entries(shapes), self.k)
        value = torch.cat([value.flatten() for value in flat.values()])[drawn]
        return self._sent(shapes, drawn, self._toss(self.projected(value), rng))

    def devices(self, update: Update, rng: Rng) -> Update:
        """As `device`, for stacked clients: what they draw comes first, so that formulas are asked for that alone."""
        update = {name: value.dense() if isinstance(value, Rows) else value for name, value in update.items()}
        shapes = {
            name: tuple(value.shape[1:] if isinstance(value, Tensor) else value.shape) for name, value in update.items()
        }
        drawn, start = ops.integers_of_many(rng, _entries(shapes), self.k), 0
        value = torch.zeros(drawn.shape, device=drawn.device)
        for name, table in update.items():
            size = math.prod(shapes[name])
            # Where the entry is another table's, whatever is found is written over, or stays from the one before.
            here = drawn if len(update) == 1 else (drawn - start).clamp(0, size - 1)
            picked = real(table.flatten(1).gather(1, here) if isinstance(table, Tensor) else table.at(here))
            value = picked if start == 0 else torch.where(drawn >= start, picked, value)
            start += size
        return self._sent(shapes, drawn, ops.tosses_of_many(rng, self.projected(value), math.tanh(self.epsilon / 2)))

    def projected(self, value: Tensor) -> Tensor:
        """Values projected on [−1, 1]; NaN becomes 0."""
        return torch.nan_to_num(value.clamp(-1, 1))

    def _toss(self, value: Tensor, rng: Rng) -> Tensor:
        # 52 bits: the smallest of the two chances must be met to the last per mille, or ε is not what it says.
        return ((rng.bits(self.k) >> 12) & (2**52 - 1)).to(torch.float64) < ops.grid(self.chance(value))

    def _sent(self, shapes: Mapping[str, Sequence[int]], drawn: Tensor, bit: Tensor) -> Update:
        sent, start = {}, 0
        for name, sides in shapes.items():
            size = math.prod(sides)
            pair = torch.add(bit.to(drawn.dtype), drawn - start if start else drawn, alpha=2)
            if len(shapes) > 1:
                pair = torch.where((drawn >= start) & (drawn < start + size), pair, -1)
            sent[counts_name(name, sides)] = Rows(pair, torch.ones_like(bit), 2 * size)
            start += size
        return sent

    def server(self, total: Total, rng: Rng) -> Total:
        counts = {name: dense(value).view(-1, 2) for name, value in total.sum.items()}
        bias = math.tanh(self.epsilon / 2)
        unit = sum(len(count) for count in counts.values()) / bias / self.k
        read, means = {}, {}
        for counted, count in counts.items():
            name, sides = parse_counts_name(counted)
            read[name] = ((count[:, 1] - count[:, 0]) * unit).view(sides)
            size = count.sum(1)
            usual = (count[:, 1] - count[:, 0]).sum() / size.sum().clamp(min=1)
            mean = torch.where(size > 0, (count[:, 1] - count[:, 0]) / size.clamp(min=1), usual)
            means[name] = (mean / bias).view(sides)
        return Total(read, total.clients, means)

    def deviation(self, entries: int, clients: int) -> float:
        """Of k × clients reports each is about one entry of all, and counts as ±entries / (k tanh(ε/2)) there."""
        return math.sqrt(entries * clients / self.k) / math.tanh(self.epsilon / 2)

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        return _reports(lambda count: Reports(self.epsilon, count), self.k)


@dataclass(frozen=True)
class Shuffle(Stage):
    """A proxy that splits messages into single reports and passes them on in a random order.

    It amplifies only for single reports of one bit, only if the proxy does not collude with the observer, and only if
    at least `users` people report honestly: by default the whole cohort.

    >>> import homebody as hb
    >>> hb.Channel(hb.OneBit(epsilon=0.5, k=1), hb.Shuffle()).facts.hides_senders
    True
    >>> alone, mixed = hb.account.onebit(0.5), hb.account.shuffle(10_000, 0.5)
    >>> alone["epsilon"].item(), round(mixed["epsilon"].item(), 3)
    (0.5, 0.02)
    """

    users: int | None = None
    reports: tuple[float, int] | None = field(default=None, kw_only=True, repr=False)
    """ε of a report and how many a device sends; a channel takes it from the stage before."""

    keeps_sum = True

    def __post_init__(self) -> None:
        if self.users is not None and (type(self.users) is not int or self.users < 1):
            raise HomebodyError(f"The people whose reports are shuffled are a whole number from 1, not {self.users!r}.")

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.reports is None:
            raise HomebodyError(
                "A Shuffle hides who sent a single report; a whole update can be linked to its sender by what it "
                "says: put OneBit right before it."
            )
        if facts.shuffled:
            raise HomebodyError("A second Shuffle hides nothing more: leave one out.")
        placed = replace(self, reports=(facts.reports.epsilon, facts.reports.k))
        return placed, replace(facts, shuffle=placed)

    def deviation(self, entries: int, clients: int) -> float:
        return 0.0

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if self.reports is None:
            raise HomebodyError("A Shuffle must be put into a Channel.")
        epsilon, k = self.reports
        users = cohort.size if self.users is None else self.users
        if users > cohort.size:
            raise HomebodyError(f"Reports cannot be shuffled among {users} people: {cohort.size} take part in a round.")
        return _reports(lambda count: ShuffledReports(epsilon, count, users), k)


def counts_name(name: str, shape: Sequence[int]) -> str:
    """The name that counts of a tensor's (entry, bit) pairs travel under: the tensor's name and its shape.

    It is part of the wire format. The counts are a flat table, so the server needs the shape to put estimates back in
    place; and entries of several tensors are numbered in the order of these names.

    >>> counts_name("item", (3, 4)), counts_name("bias", ())
    ('item[3,4]', 'bias[]')
    """
    return f"{name}[{','.join(map(str, shape))}]"


def parse_counts_name(text: str) -> tuple[str, tuple[int, ...]]:
    """The inverse of `counts_name`.

    >>> parse_counts_name("item[3,4]"), parse_counts_name("bias[]")
    (('item', (3, 4)), ('bias', ()))
    """
    name, _, shape = text.removesuffix("]").rpartition("[")
    return name, tuple(int(side) for side in shape.split(",") if side)


def tally(charges: Sequence[Charge], rounds: int) -> dict[str, float] | None:
    """What the server would learn of one person without any shuffle: ε of a report, of a round, of all; by addition.

    None where rounds are not charged by reports.

    >>> import numpy as np
    >>> from homebody.privacy import Channel
    >>> round_ = Channel(OneBit(2.5, k=100), Shuffle()).charges(Cohort(np.arange(9), "all", 9, 9))
    >>> tally(round_, rounds=20)
    {'count': 100, 'epsilon': 2.5, 'round': 250.0, 'total': 5000.0}
    """
    for charge in charges:
        if (charge.observer, charge.unit) == ("server", "user") and isinstance(charge.event, Reports | ShuffledReports):
            epsilon, count = charge.event.epsilon, charge.event.count
            return {"count": count, "epsilon": epsilon, "round": epsilon * count, "total": epsilon * count * rounds}
    return None


def sealed_bytes(count: int) -> int:
    """The size of a message: its head and signature, and so many reports of four bytes, each in a sealed box."""
    return count * (4 + 48) + 73 + 64


def _entries(shapes: Mapping[str, Sequence[int]]) -> int:
    """How many entries there are to draw from."""
    count = sum(math.prod(sides) for sides in shapes.values())
    if not 0 < count < 2**30:
        raise HomebodyError(f"One-bit reports name one of 1 to 2³⁰ entries; the update has {count:,}.")
    return count


def _reports(event: Callable[[int], Event], k: int) -> list[Charge]:
    """The same charges for every observer: a report is randomised before anyone sees it, and nothing else hides it."""
    units: tuple[tuple[Unit, int], ...] = (("user", k), ("report", 1))
    return [Charge(observer, unit, event(count)) for observer in OBSERVERS for unit, count in units]


@dataclass(frozen=True)
class RandomisedResponse(Stage):
    """Every entry of the update as one bit (Warner, 1965): is it above ½? True with probability e^ε / (1 + e^ε).

    The server **reads each message before it sums**: beside the sum of a tensor `w` it gets the sum of w wᵀ, `w²`,
    which a sum of messages does not tell. Both are estimated without bias; the diagonal of `w²` is the sum itself.

    Each entry costs ε, and only a method knows how many its update has: it calls `charges_for`.

    >>> sure, update = RandomisedResponse(epsilon=50.0), {"w": torch.tensor([1.0, 0.0, 1.0])}
    >>> sums: Tree = {}
    >>> sure.read({"w": sure.device(update, Rng.of(0))["w"][None]}, sums)
    >>> sure.server(Total(sums, clients=1), Rng.of(0)).sum["w²"].tolist()
    [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]]
    """

    epsilon: float

    dense = True
    reads = True

    def __post_init__(self) -> None:
        check_number("ε of randomised response", self.epsilon)

    @property
    def truth(self) -> float:
        """The probability that a bit is what it should be."""
        return 1 / (1 + math.exp(-self.epsilon))

    @property
    def spread(self) -> float:
        """The variance that randomising adds to the estimate of one bit."""
        return 0.25 / math.sinh(self.epsilon / 2) ** 2 if self.epsilon < 700 else 0.0

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.hidden:
            raise HomebodyError(f"Randomised response cannot follow {facts.hidden}: it is noise enough; keep one.")
        return self, replace(facts, norms={}, hidden="randomised response", responses=self)

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: self._answered(dense(value) > 0.5, rng.fold(name)) for name, value in update.items()}

    def _answered(self, truths: Tensor, rng: Rng) -> Tensor:
        # Rounded down, and never to a certainty: whatever ε is, a lie is at least as likely as it says.
        honest = min(int(self.truth * 2**52), 2**52 - 1)
        drawn = (rng.bits(*truths.shape) >> 12) & (2**52 - 1)
        return truths ^ (drawn >= honest)

    def read(self, messages: Update, sums: Tree) -> None:
        """Add what these messages, stacked, say to the sums: whole numbers, the same in whatever order.

        Of the products the upper half alone, which is all there is to know of them.
        """
        for name, bits in messages.items():
            rows, entries = bits.flatten(1), bits[0].numel()
            if name not in sums:
                sums[name] = bits.new_zeros(bits.shape[1:], dtype=torch.int32)
                sums[name + PAIRS] = bits.new_zeros(entries, entries, dtype=torch.int32)
            sums[name] += bits.sum(0, dtype=torch.int32)
            pairs = sums[name + PAIRS]
            if rows.device.type == "cpu":
                kernels.count_pairs(rows.numpy(), pairs.numpy())
            else:
                pairs += products_in_torch(rows)

    def server(self, total: Total, rng: Rng) -> Total:
        lie, scale = 1 - self.truth, 1 / math.tanh(self.epsilon / 2)
        read = {
            name: ((dense(value) - total.clients * lie) * scale).float()
            for name, value in total.sum.items()
            if not name.endswith(PAIRS)
        }
        for name, value in total.sum.items():
            if name.endswith(PAIRS):
                alone = read[name.removesuffix(PAIRS)].flatten()
                read[name] = self._estimated(value, total.sum[name.removesuffix(PAIRS)].flatten(), total.clients, alone)
        return Total(read, total.clients)

    def _estimated(self, upper: Tensor, ones: Tensor, clients: int, alone: Tensor) -> Tensor:
        """Σ (bᵢ − q)(bⱼ − q) / (p − q)², from the counts in the upper half; in their place, which they need no more.

        Two matrices of a large catalogue would be too many. Nothing is written over before it was read.
        """
        lie, scale = 1 - self.truth, 1 / math.tanh(self.epsilon / 2)
        out = upper.view(torch.float32)
        for start in range(0, len(upper), _BLOCK):
            rows = slice(start, start + _BLOCK)
            both = upper[rows, start:] - lie * (ones[rows, None] + ones[None, start:])
            both = both.add_(clients * lie**2).mul_(scale**2)
            out[start:, rows] = both.T
            out[rows, start:] = both
            corner = both[:, : len(both)]
            out[rows, rows] = corner.triu() + corner.triu(1).T
        out.diagonal().copy_(alone)  # a bit is its own square
        return out

    def charges_for(self, entries: int) -> list[Charge]:
        """What a round with so many entries in an update tells every observer.

        Two people differ in all entries at worst. One interaction more or less changes one entry.
        """
        events: tuple[tuple[Unit, Event], ...] = (
            ("user", Reports(self.epsilon, entries)),
            ("interaction", PureRelease(self.epsilon, relation="add-remove")),
            ("report", Reports(self.epsilon, 1)),
        )
        return [Charge(observer, unit, event) for observer in OBSERVERS for unit, event in events]

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        raise HomebodyError(
            "Randomised response is charged for every entry of an update: only a method that says how many there are "
            "can use it, such as dplcf."
        )


def products_in_torch(rows: Tensor) -> Tensor:
    """In how many rows both of two columns are set, on any device: exact up to 2²⁴ of them."""
    return (rows.float().T @ rows.float()).to(torch.int32)

"""Randomised response: a yes or no for every entry of an update, each true with a known probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from homebody import kernels
from homebody.core import Cohort, Total, Tree, Update
from homebody.errors import HomebodyError
from homebody.privacy.events import OBSERVERS, Charge, Event, PureRelease, Reports, Unit
from homebody.privacy.stages import Facts, Stage, check_number, dense
from homebody.rng import Rng

__all__ = ["PAIRS", "RandomisedResponse"]

PAIRS = "²"
"""Suffix of a tensor's name: the sum of the products of its entries, pair by pair."""
_BLOCK = 512
"""Rows of a symmetric matrix that are computed together; entries below them are left out."""


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

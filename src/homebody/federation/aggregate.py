"""How a round's updates come back: in the devices' letters, or as reports through a proxy.

A channel with a Shuffle has its devices send one-bit reports, each sealed by itself to a key of the round's epoch,
through a proxy to the server's intake; their letters say no more than that they did. Everything else is the same.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from homebody.core import Rows, Tree, Update
from homebody.counts import several
from homebody.errors import Abandoned
from homebody.federation import wire
from homebody.federation.letters import PAUSE
from homebody.privacy import Channel
from homebody.privacy.grid import STEPS

__all__ = ["Intake", "Letters", "Part", "Reports", "about", "bounds", "flat", "largest", "summed"]

ROUNDING = 1.001
"""By how much a number in 16 bits may be over its bound."""
SPARE = 0.1
"""The share by which reports may be more than those who were asked send."""
NOT_ABOUT = frozenset({"first", "people", "epoch", "keep"})
"""What a letter says to one device alone, or of something else than the work."""


class Part(NamedTuple):
    """One person's answer."""

    number: int
    tree: Tree


class Epoch(Protocol):
    """What reports are sealed to."""

    @property
    def k(self) -> int: ...
    def told(self) -> dict[str, Any]: ...


class Closed(Protocol):
    """What came of it."""

    @property
    def counts(self) -> npt.NDArray[np.int64]: ...
    @property
    def people(self) -> int: ...


class Intake(Protocol):
    """Where reports arrive: `homebody.federation.server.epochs.Epochs`."""

    def open(self, name: str, shared: str, k: int, entries: int, seconds: float, among: int) -> Epoch: ...
    def left(self, epoch: Any) -> float: ...
    def arrived(self, name: str) -> int: ...
    def close(self, name: str, people: int) -> Closed: ...
    def closed(self, name: str) -> Closed | None: ...


def about(header: Mapping[str, Any]) -> str:
    """A name for all that a letter asks, whomever it is written to: every device must be asked the same.

    >>> about({"do": "train", "first": 0}) == about({"first": 7, "do": "train"})
    True
    """
    common = {name: value for name, value in header.items() if name not in NOT_ABOUT}
    return wire.digest(json.dumps(common, sort_keys=True).encode())


def flat(update: Update) -> npt.NDArray[np.int64]:
    """The reports of an update that was made into such, as numbers over all its tensors: in the order of their names.

    >>> one = torch.ones(2)
    >>> flat({"b[2]": Rows(torch.tensor([3, -1]), one, 4), "a[1]": Rows(torch.tensor([-1, 1]), one, 2)})
    array([1, 5])
    """
    found, start = [], 0
    for _, rows in sorted(update.items()):
        found.append(start + rows.index[rows.index >= 0].numpy())
        start += rows.size
    return np.concatenate(found)


class Letters:
    """In the answers themselves."""

    proxied = False

    def __init__(
        self, wanted: Mapping[str, wire.Expected], bounds: tuple[float, int | None], clean: Callable[[Tree], Tree]
    ) -> None:
        self._wanted, self._bounds, self._clean = wanted, bounds, clean

    def read(self, part: bytes) -> Tree:
        """What one person sent, checked and cleaned: nothing that came from a device is looked at before."""
        return self._clean(_read(part, self._wanted, self._bounds))

    def before(self, needed: int, asked: int) -> tuple[Tree, int] | None:
        """What came of it, where that is known already, and of how many."""
        return None

    def letter(self) -> dict[str, Any]:
        """What letters say of the way."""
        return {}

    def left(self) -> float:
        """Seconds that it is open."""
        return math.inf

    def sum(self, answers: Sequence[Part], needed: int, asked: int) -> tuple[Tree, int]:
        """Of all that came back, and the bytes of it that were in no letter."""
        return summed(answers, self._wanted), 0


class Reports:
    """As sealed reports, in an epoch of the intake's."""

    proxied = True

    def __init__(
        self,
        intake: Intake,
        name: str,
        asks: str,
        channel: Channel,
        told: Mapping[str, wire.Expected],
        seconds: float,
    ) -> None:
        self._intake, self._name, self._asks = intake, name, asks
        reports, shuffle = channel.facts.reports, channel.facts.shuffle
        assert reports is not None
        assert shuffle is not None
        self._k, self._among = reports.k, shuffle.users or 1
        self._told, self._seconds = told, seconds

    def read(self, part: bytes) -> Tree:
        """In a letter stands nothing but that reports were sent."""
        return _read(part, {}, (0.0, 0))

    def before(self, needed: int, asked: int) -> tuple[Tree, int] | None:
        """An epoch that was closed before the round was cut short."""
        done = self._intake.closed(self._name)
        return None if done is None else (self._tree(done.counts, needed, asked), done.people)

    def letter(self) -> dict[str, Any]:
        """Opens the epoch, or comes back to it."""
        self._epoch = self._intake.open(self._name, self._asks, self._k, self._entries, self._seconds, self._among)
        self._end = time.monotonic() + self._seconds
        return {"epoch": self._epoch.told()}

    def left(self) -> float:
        """By the wall clock, which devices and proxies are told; and no longer than planned, should it be set back."""
        return min(self._intake.left(self._epoch), self._end - time.monotonic())

    def sum(self, answers: Sequence[Part], needed: int, asked: int) -> tuple[Tree, int]:
        """Wait for the reports of all who said that they had reported, or until the epoch closes."""
        from homebody.federation.envelopes import HEAD_BYTES, REPORT_BYTES, SIGNATURE_BYTES

        while self._intake.arrived(self._name) < self._k * len(answers) and self.left() > 0:
            time.sleep(PAUSE)
        done = self._intake.close(self._name, len(answers))
        # As if each person had a message of their own: how many share a device is not told.
        sent = len(answers) * (HEAD_BYTES + SIGNATURE_BYTES + self._k * REPORT_BYTES)
        return self._tree(done.counts, needed, asked), sent

    @property
    def _entries(self) -> int:
        return sum(_size(one) for one in self._told.values()) // 2

    def _tree(self, counts: npt.NDArray[np.int64], needed: int, asked: int) -> Tree:
        """The inverse of `flat`, for counts; refused where they are of too few, or far more than those who were asked
        can have sent. A few more do little harm, and must not let one device stop a round that all are charged for."""
        arrived = int(counts.sum())
        if arrived < self._k * needed:
            raise Abandoned(
                f"{several(arrived, 'report')} arrived before their epoch closed, and {self._k * needed:,} must: "
                "does the proxy run, does it hold them for too long, or does it wait for more devices than there are, "
                "and is this server's intake its next?"
            )
        most = self._k * (asked + max(1, int(SPARE * asked)))
        if arrived > most:
            raise Abandoned(
                f"{several(arrived, 'report')} arrived of people who send {self._k * asked:,} at most: a proxy lets "
                "somebody send too much, or makes reports up."
            )
        tree, start = {}, 0
        for name, one in sorted(self._told.items()):
            end = start + _size(one)
            tree[name] = torch.from_numpy(counts[start:end].astype(np.float32))
            start = end
        return tree


def _size(one: wire.Expected) -> int:
    assert one.size is not None
    return one.size


def _read(part: bytes, wanted: Mapping[str, wire.Expected], bounds: tuple[float, int | None]) -> Tree:
    if len(part) > wire.longest(wanted):
        raise wire.Malformed("The update is larger than any of its method's.")
    tree = wire.unpack(part)
    wire.check(tree, wanted, *bounds)
    return tree


def bounds(channel: Channel, otherwise: float) -> tuple[float, int | None]:
    """The largest number and the most rows that can come out of a channel's half on the device."""
    facts = channel.facts
    if facts.reports is not None:
        return 1.0, facts.reports.k
    most = otherwise
    if not facts.noise_on_device:  # such noise may exceed any bound
        most = min((otherwise, *(ROUNDING * norm for norm in facts.norms.values())))
    return most / facts.grid.step if facts.grid else most, None


def largest(answers: Sequence[Part]) -> int | None:
    """Who sent the largest number; None where nobody sent any.

    >>> largest([Part(4, {"w": torch.ones(2)}), Part(7, {"w": torch.tensor([0.0, -3.0])})])
    7
    """

    def most(part: Part) -> float:
        tensors = [value.value if isinstance(value, Rows) else value for value in part.tree.values()]
        return max((float(one.to(torch.float64).abs().max()) for one in tensors if one.numel()), default=-1.0)

    found = max(answers, key=most, default=None)
    return None if found is None or most(found) < 0 else found.number


def summed(answers: Sequence[Part], wanted: Mapping[str, wire.Expected]) -> Tree:
    """The sum in order of the clients' numbers, in doubles, or exactly where they are whole steps of a grid."""
    sums = {
        name: torch.zeros(
            shape if size is None else (size, *shape), dtype=torch.int64 if kind in STEPS else torch.float64
        )
        for name, (shape, size, kind) in wanted.items()
    }
    for _, tree in answers:
        for name, value in tree.items():
            if isinstance(value, Rows):
                there = value.index >= 0  # rows that a clip has added up leave padding behind
                sums[name].index_add_(0, value.index[there], value.value[there].to(sums[name].dtype))
            else:
                sums[name] += value
    return {
        name: total if total.dtype == torch.int64 else total.to(torch.promote_types(wanted[name].kind, torch.float32))
        for name, total in sums.items()
    }

"""How a round's updates come back: in the devices' letters, or as reports through a proxy.

A channel with a Shuffle has its devices send one-bit reports, each sealed by itself to a key of the round's epoch,
through a proxy to the server's intake; their letters say no more than that they did. Everything else is the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from homebody.core import Rows, Tree
from homebody.errors import Abandoned, several
from homebody.federation import wire
from homebody.federation.server.letters import PAUSE
from homebody.federation.task import Task
from homebody.privacy import Channel
from homebody.privacy.grid import STEPS

if TYPE_CHECKING:
    from homebody.federation.server.epochs import Epochs

__all__ = ["LetterRoute", "ProxyRoute", "bounds", "largest"]

ROUNDING = 1.001
"""By how much a number in 16 bits may be over its bound."""
SPARE = 0.1
"""The share by which reports may be more than those who were asked send."""


class LetterRoute:
    """Updates come back in the devices' own letters.

    wanted: the shape of each tensor of an update. within: the largest number, and the most rows. clean: what is done
    to an update that passed these checks.
    """

    proxied = False

    def __init__(
        self, wanted: Mapping[str, wire.Expected], within: tuple[float, int | None], clean: Callable[[Tree], Tree]
    ) -> None:
        self._wanted, self._within, self._clean = wanted, within, clean

    def read(self, part: bytes) -> Tree:
        """What one person sent, checked and cleaned: nothing that came from a device is used before."""
        return self._clean(wire.decode_update(part, self._wanted, *self._within))

    def before(self, needed: int, asked: int) -> tuple[Tree, int] | None:
        """The sum of an earlier attempt and the number of its people, where it is known already."""
        return None

    def open(self, task: Task) -> Task:
        """The task as letters describe it."""
        return task

    def left(self) -> float:
        """Seconds for which updates can still arrive."""
        return math.inf

    def sum(self, updates: Mapping[int, Tree], needed: int, asked: int) -> tuple[Tree, int]:
        """The sum of all updates, and the bytes that arrived outside letters. Updates are added in the order of
        `updates`, in doubles, or exactly where they are whole steps of a grid."""
        sums: Tree = {}
        for name, (shape, size, kind) in self._wanted.items():
            exact = torch.int64 if kind in STEPS else torch.float64
            sums[name] = torch.zeros(shape if size is None else (size, *shape), dtype=exact)
        for tree in updates.values():
            for name, value in tree.items():
                if isinstance(value, Rows):
                    there = value.index >= 0  # rows that a clip has added up leave padding behind
                    sums[name].index_add_(0, value.index[there], value.value[there].to(sums[name].dtype))
                else:
                    sums[name] += value
        kinds = {name: torch.promote_types(form.kind, torch.float32) for name, form in self._wanted.items()}
        return {name: value if value.dtype == torch.int64 else value.to(kinds[name]) for name, value in sums.items()}, 0


class ProxyRoute:
    """Updates come back as sealed reports through a proxy, in an epoch of the intake's."""

    proxied = True

    def __init__(
        self,
        epochs: Epochs,
        name: str,
        asks: str,
        channel: Channel,
        wanted: Mapping[str, wire.Expected],
        seconds: float,
    ) -> None:
        self._epochs, self._name, self._asks = epochs, name, asks
        reports, shuffle = channel.facts.reports, channel.facts.shuffle
        assert reports is not None
        assert shuffle is not None
        self._k, self._among = reports.k, shuffle.users or 1
        self._wanted, self._seconds = wanted, seconds

    def read(self, part: bytes) -> Tree:
        """A letter says that reports were sent, and nothing else."""
        return wire.decode_update(part, {}, 0.0, 0)

    def before(self, needed: int, asked: int) -> tuple[Tree, int] | None:
        """An epoch that was closed before the round was cut short."""
        done = self._epochs.closed(self._name)
        return None if done is None else (self._tree(done.counts, needed, asked), done.people)

    def open(self, task: Task) -> Task:
        """The task with its epoch, which is opened, or found open."""
        self._epoch = self._epochs.open(self._name, self._asks, self._k, self._entries, self._seconds, self._among)
        self._end = time.monotonic() + self._seconds
        return replace(task, epoch=self._epoch)

    def left(self) -> float:
        """By the wall clock, which devices and proxies are told; and no longer than planned, should it be set back."""
        return min(self._epochs.left(self._epoch), self._end - time.monotonic())

    def sum(self, updates: Mapping[int, Tree], needed: int, asked: int) -> tuple[Tree, int]:
        """Wait for the reports of all who said that they had reported, or until the epoch closes."""
        from homebody.federation.envelopes import envelope_bytes

        while self._epochs.arrived(self._name) < self._k * len(updates) and self.left() > 0:
            time.sleep(PAUSE)
        done = self._epochs.close(self._name, len(updates))
        # As if each person had a message of their own: how many share a device is not told.
        sent = len(updates) * envelope_bytes(self._k)
        return self._tree(done.counts, needed, asked), sent

    @property
    def _entries(self) -> int:
        return sum(_size(form) for form in self._wanted.values()) // 2

    def _tree(self, counts: npt.NDArray[np.int64], needed: int, asked: int) -> Tree:
        """The inverse of `wire.report_numbers` for counts. Refused where too few arrived, or far more than the people
        asked can have sent: a few more do little harm, and must not let one device stop a round that all are charged
        for."""
        arrived = int(counts.sum())
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
        tree, start = {}, 0
        for name, form in sorted(self._wanted.items()):
            end = start + _size(form)
            tree[name] = torch.from_numpy(counts[start:end].astype(np.float32))
            start = end
        return tree


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

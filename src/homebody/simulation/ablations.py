"""Clients that rank with an item table which is not their own, or unadapted: to see what tuning is worth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from homebody.core import Method, Rows, Tree, Users
from homebody.simulation.clients import SAMPLES_AT_ONCE
from homebody.simulation.simulator import Simulator

__all__ = ["ITEM", "Borrowing", "Held", "Unadapted", "item_tables"]

ITEM = "item"
"""What methods call their item table, and clients what they changed of it."""


class Held(NamedTuple):
    """The item tables of some clients: one that all of them began with, and what each changed of it."""

    place: npt.NDArray[np.int64]
    """Which of the clients that were asked for."""
    base: Tensor
    """(M, …)"""
    change: Rows | None
    """Stacked; None where clients tune no table."""

    def dense(self) -> Tensor:
        """(clients, M, …): everyone's whole table."""
        tables = self.base.expand(len(self.place), *self.base.shape)
        return tables if self.change is None else tables + torch.func.vmap(Rows.dense)(self.change)


def item_tables(
    runtime: Simulator, method: Method, shared: Tree, users: Users, most: int | None = None
) -> Iterator[Held]:
    """The table that each of these clients ranks with, as it has it, at most so many clients at a time."""
    order = np.argsort(users, kind="stable")
    for some, width in runtime._store.groups(users, SAMPLES_AT_ONCE, most):
        for chosen, tree, local in Simulator._holdings(runtime, method, shared, some, runtime._data(some, width)):
            place = order[np.searchsorted(users, some[_positions(chosen, len(some))], sorter=order)]
            change = local.get(ITEM)
            yield Held(place, tree[ITEM], change if isinstance(change, Rows) else None)


class Borrowing(Simulator):
    """The clients of a simulator, each with an item table from elsewhere and all else its own.

    lender: client u ranks with the tuned table of client lender[u]; None: everyone with the latest shared table.
    """

    def __init__(self, runtime: Simulator, lender: Users | None) -> None:
        vars(self).update(vars(runtime))  # the same clients; nothing of them is written to
        self._lender = lender

    def _holdings(
        self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice | Tensor, Tree, Tree]]:
        for chosen, tree, local in super()._holdings(method, shared, users, data):
            if self._lender is None:
                yield chosen, {**tree, ITEM: shared[ITEM]}, {**local, ITEM: _nothing(local[ITEM])}
                continue
            place = _positions(chosen, len(users))
            rest = {name: value for name, value in local.items() if name != ITEM}
            for lent in item_tables(self, method, shared, self._lender[users[place]]):
                some = self._tensor(lent.place)
                own = tree_map(lambda leaf, some=some: leaf[some], rest)
                yield self._tensor(place[lent.place]), {**tree, ITEM: lent.base}, {**own, ITEM: lent.change}


class Unadapted(Simulator):
    """The clients of a simulator, whose devices rank with what they were given: none adapts it first."""

    def __init__(self, runtime: Simulator) -> None:
        vars(self).update(vars(runtime))  # the same clients; nothing of them is written to

    def _adapted(self, method: Method, shared: Tree, users: Users, locals_: Tree, data: tuple[Tensor, ...]) -> Tree:
        return locals_


def _positions(chosen: slice | Tensor, count: int) -> npt.NDArray[np.int64]:
    return np.arange(count)[chosen] if isinstance(chosen, slice) else chosen.cpu().numpy()


def _nothing(rows: Rows) -> Rows:
    """No change of any row, for as many clients."""
    return Rows(rows.index[:, :0], rows.value[:, :0], rows.size)

"""Simulated clients without their own item table, or without adapting: to measure what personalising is worth."""

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
"""The name of the item table in shared parameters, and of a client's changes to it in its local state."""


class Held(NamedTuple):
    """The item tables of some clients: the table that all of them started from, and each client's changes."""

    place: npt.NDArray[np.int64]
    """Positions of these clients among those that were asked for."""
    base: Tensor
    """(M, …)"""
    change: Rows | None
    """Stacked; None if clients tune no table."""

    def dense(self) -> Tensor:
        """(clients, M, …): the whole table of each client."""
        tables = self.base.expand(len(self.place), *self.base.shape)
        return tables if self.change is None else tables + torch.func.vmap(Rows.dense)(self.change)


def item_tables(
    runtime: Simulator, method: Method, shared: Tree, users: Users, most: int | None = None
) -> Iterator[Held]:
    """The item table that each of these clients ranks with, for at most `most` clients at a time."""
    order = np.argsort(users, kind="stable")
    for some, width in runtime._store.groups(users, SAMPLES_AT_ONCE, most):
        for chosen, tree, local in Simulator._holdings(runtime, method, shared, some, runtime._data(some, width)):
            place = order[np.searchsorted(users, some[_positions(chosen, len(some))], sorter=order)]
            change = local.get(ITEM)
            yield Held(place, tree[ITEM], change if isinstance(change, Rows) else None)


class Borrowing(Simulator):
    """The clients of a simulator, each with another item table and otherwise its own state.

    lender: client u ranks with the tuned table of client lender[u]; None: everyone with the latest shared table.
    """

    def __init__(self, runtime: Simulator, lender: Users | None) -> None:
        runtime.share_with(self)
        self._lender = lender

    def _holdings(
        self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice | Tensor, Tree, Tree]]:
        for chosen, tree, local in super()._holdings(method, shared, users, data):
            if self._lender is None:
                table = local[ITEM]
                unchanged = Rows(table.index[:, :0], table.value[:, :0], table.size)
                yield chosen, {**tree, ITEM: shared[ITEM]}, {**local, ITEM: unchanged}
                continue
            place = _positions(chosen, len(users))
            rest = {name: value for name, value in local.items() if name != ITEM}
            for lent in item_tables(self, method, shared, self._lender[users[place]]):
                some = self._tensor(lent.place)
                states = tree_map(lambda leaf, some=some: leaf[some], rest)
                yield self._tensor(place[lent.place]), {**tree, ITEM: lent.base}, {**states, ITEM: lent.change}


class Unadapted(Simulator):
    """The clients of a simulator, which rank with the shared parameters and do not adapt to them first."""

    def __init__(self, runtime: Simulator) -> None:
        runtime.share_with(self)

    def _adapted(self, method: Method, shared: Tree, users: Users, locals_: Tree, data: tuple[Tensor, ...]) -> Tree:
        return locals_


def _positions(chosen: slice | Tensor, count: int) -> npt.NDArray[np.int64]:
    return np.arange(count)[chosen] if isinstance(chosen, slice) else chosen.cpu().numpy()

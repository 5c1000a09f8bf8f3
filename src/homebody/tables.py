"""Tables that are not written out: some rows of one, or a formula for its entries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["Computed", "Rows", "written"]


@dataclass(frozen=True)
class Rows:
    """Some rows of a table of `size` rows: what a client touches of a table it never copies.

    Rows of the same index add up. An index of -1 marks padding; its value counts for nothing.

    >>> Rows(torch.tensor([2, 2, -1]), torch.tensor([[1.0], [2.0], [9.0]]), size=3).dense().tolist()
    [[0.0], [0.0], [3.0]]
    """

    index: Tensor
    value: Tensor
    size: int

    def dense(self) -> Tensor:
        """The whole table, zero where there is no row."""
        return _summed(torch.where(self.index < 0, self.size, self.index), self.value, self.size + 1)[:-1]

    def coalesced(self) -> Rows:
        """The same table with each index once, in ascending order, and padding behind them.

        >>> rows = Rows(torch.tensor([2, 0, 2, -1]), torch.tensor([1.0, 5.0, 2.0, 9.0]), size=3).coalesced()
        >>> rows.index.tolist(), rows.value.tolist()
        ([0, 2, -1, -1], [5.0, 3.0, 0.0, 0.0])
        """
        if not self.index.shape[0]:
            return self
        ordered, origin = torch.where(self.index < 0, self.size, self.index).sort(stable=True)
        new = torch.cat([torch.ones_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
        place = new.cumsum(0) - 1
        value = self.value[origin]
        real = (ordered < self.size).view(-1, *[1] * (value.dim() - 1))
        # Each place is written by rows of one index alone, so whichever comes last writes the same.
        index = torch.full_like(ordered, self.size).scatter(0, place, ordered)
        return Rows(
            torch.where(index < self.size, index, -1),
            _summed(place, torch.where(real, value, 0), len(ordered)),
            self.size,
        )


def _summed(slot: Tensor, value: Tensor, places: int) -> Tensor:
    """(places, …) with each row of `value` added at its slot; in an order that is always the same, also under vmap."""
    table = value.new_zeros(places, *value.shape[1:])
    if value.device.type == "cpu":
        return table.scatter_add(0, slot.view(-1, *[1] * (value.dim() - 1)).expand_as(value), value)
    return table.index_put((slot,), value, accumulate=True)  # it sorts first


def _rebuild(leaves: Iterable[Tensor], size: Any) -> Rows:
    index, value = leaves
    return Rows(index, value, size)


# vmap takes Rows in and out like any other tree.
_pytree.register_pytree_node(
    Rows,
    lambda rows: ([rows.index, rows.value], rows.size),
    _rebuild,
    serialized_type_name="homebody.core.Rows",
)


@runtime_checkable
class Computed(Protocol):
    """The tables of several clients, each worked out only where it is looked at: whole they would take too much room.

    A fused kernel may give one in the place of a stacked tensor; it is the same numbers.
    """

    shape: tuple[int, ...]
    """Of one client's table."""

    def at(self, entries: Tensor) -> Tensor:
        """Each client's values, (clients, k), at these places (clients, k) of its flattened table."""

    def dense(self) -> Tensor:
        """All of it: (clients, *shape)."""


def written(update: dict[str, Any]) -> dict[str, Any]:
    """Stacked updates with every formula worked out."""
    return {name: value if isinstance(value, Tensor | Rows) else value.dense() for name, value in update.items()}

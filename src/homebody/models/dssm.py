"""DSSM on features: the input of a network that reads a person's and an item's features side by side.

Every value that a feature may take is a row of one table, and so is every number's direction. What a person, an item
or a circumstance is like is a sum of such rows with weights, in a block of the input for each feature: one row of a
category, the mean of a set's rows, a number times its row. An item has a row of its own besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from homebody import ops
from homebody.core import Catalogue, Column
from homebody.errors import unknown_name

__all__ = ["PARTS", "Described", "Vocabulary", "vectors"]

PARTS = ("person", "around", "items")
"""What describes an interaction: the person, the circumstances and the item. Batches name their tensors after these."""


class Described(NamedTuple):
    """Which rows of the table of features describe something, with which weights, in which blocks of the input."""

    row: Tensor
    """(..., K) rows of the table."""
    weight: Tensor
    """(..., K); 0 for padding."""
    block: Tensor
    """(F, K) ones where row k belongs to block f."""

    def on(self, device: torch.device) -> Described:
        """The same on this device; without any feature it would be on the CPU."""
        return Described(*(part.to(device) for part in self))

    def at(self, place: Tensor) -> Described:
        """Of several things, those at these places."""
        return self._replace(row=ops.take_rows(self.row, place), weight=ops.take_rows(self.weight, place))


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the feature table that the values of each feature have: of people, items and circumstances.

    >>> genres = Column(torch.tensor([[1, 2], [2, -1], [-1, -1]]), 3, "many")
    >>> years = Column(torch.tensor([0.5, 0.0, -1.0]), 1, "number")
    >>> known = Vocabulary.of(Catalogue(3, {"genres": genres, "year": years}))
    >>> known.size, known.items(known.catalogue.items).row.tolist()
    (4, [[1, 2, 3], [2, 0, 3], [0, 0, 3]])
    >>> known.items(known.catalogue.items).weight.tolist()
    [[0.5, 0.5, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]]
    """

    catalogue: Catalogue
    users: tuple[str, ...]
    contexts: tuple[str, ...]
    item_names: tuple[str, ...]

    @classmethod
    def of(cls, catalogue: Catalogue, chosen: str = "") -> Vocabulary:
        """The vocabulary of the chosen features; empty: all but texts; "none": no features."""
        known = (catalogue.people, catalogue.contexts, catalogue.items)
        names = [name.strip() for name in chosen.split(",")] if chosen.strip() else []
        if names == ["none"]:
            return cls(catalogue, (), (), ())
        everything = [name for columns in known for name in columns]
        for name in names:
            if name not in everything:
                raise unknown_name("feature of this data", name, everything or ["none"])
        taken = (
            tuple(name for name, column in columns.items() if (name in names if names else not column.text))
            for columns in known
        )
        return cls(catalogue, *taken)

    @property
    def columns(self) -> list[Column]:
        """The features, in the order of their rows."""
        whose = (
            (self.catalogue.people, self.users),
            (self.catalogue.contexts, self.contexts),
            (self.catalogue.items, self.item_names),
        )
        return [columns[name] for columns, names in whose for name in names]

    @property
    def size(self) -> int:
        """How many rows the table has."""
        return sum(column.size for column in self.columns)

    @property
    def values(self) -> int:
        """The most rows that describe one interaction: its person, its circumstances and its item."""
        return sum(column.width for column in self.columns)

    @property
    def unknown(self) -> list[int]:
        """The rows that stand for unknown values."""
        rows, start = [], 0
        for column in self.columns:
            rows += [start] if column.kind == "one" else []
            start += column.size
        return rows

    def person(self, values: Mapping[str, Tensor]) -> Described:
        """One person, by their features."""
        return self._described(values, self.users, self.catalogue.people, 0, ())

    def around(self, values: Mapping[str, Tensor], count: int | None = None) -> Described:
        """The circumstances of `count` interactions, or of one moment; missing ones count as unknown."""
        start = sum(self.catalogue.people[name].size for name in self.users)
        return self._described(values, self.contexts, self.catalogue.contexts, start, () if count is None else (count,))

    def items(self, values: Mapping[str, Column]) -> Described:
        """All items, by their features."""
        start = self.size - sum(self.catalogue.items[name].size for name in self.item_names)
        own = {name: values[name].values for name in self.item_names}
        return self._described(own, self.item_names, self.catalogue.items, start, (self.catalogue.n_items,))

    def _described(
        self,
        values: Mapping[str, Tensor],
        names: tuple[str, ...],
        columns: Mapping[str, Column],
        start: int,
        shape: tuple[int, ...],
    ) -> Described:
        rows, weights, blocks = [], [], []
        for number, name in enumerate(names):
            column, given = columns[name], values.get(name)
            if given is None:
                given = torch.zeros(shape, dtype=torch.float32 if column.kind == "number" else torch.int64)
                given = given.to(column.values.device)
                given = given[..., None] - 1 if column.several else given
            if column.kind == "number":
                row, weight = torch.zeros_like(given, dtype=torch.int64)[..., None], given[..., None]
            elif column.kind == "one":
                row, weight = given[..., None], torch.ones_like(given, dtype=torch.float32)[..., None]
            else:
                there = (given >= (1 if column.kind == "sequence" else 0)).float()
                row, weight = given.clamp(min=0), there / there.sum(-1, keepdim=True).clamp(min=1)
            rows.append(torch.where(weight != 0, row + start, 0) if column.several else row + start)
            weights.append(weight)
            blocks += [number] * row.shape[-1]
            start += column.size
        if not rows:
            none = torch.zeros(*shape, 0, dtype=torch.int64)
            return Described(none, none.float(), torch.zeros(0, 0))
        block = torch.zeros(len(names), len(blocks))
        block[blocks, list(range(len(blocks)))] = 1.0
        return Described(torch.cat(rows, -1), torch.cat(weights, -1).float(), block.to(rows[0].device))


def vectors(table: Tensor, described: Described) -> Tensor:
    """One vector for each description: its blocks side by side."""
    rows = table[described.row] * described.weight[..., None]
    return (described.block @ rows).flatten(-2)

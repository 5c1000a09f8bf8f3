"""Towers of a deep structured semantic model: a person's features and an item's features as vectors that are compared.

A tower's first layer is linear and has no offset, so it is a sum of rows: an item's are those of its 3-grams and its
genres (`item_rows`), a person's those of their values, each times the value (`inputs`). The layers after it are dense,
with tanh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from homebody.bags import Bags, sum_rows
from homebody.core import Column, Tree
from homebody.models.networks import Flat, glorot, layer_shapes
from homebody.rng import Rng

__all__ = ["TINY", "Tower", "cosine", "first_layer", "input_width", "inputs", "item_rows", "row_count"]


@dataclass(frozen=True)
class Tower(Flat):
    """The layers of Eq. 3: l_1 = W_1 x, l_i = f(W_i l_{i−1} + b_i), and the last of them is y; f is tanh.

    Its parameters are `first`, which is W_1 with a row for each input, and `layers`, all others in one flat vector,
    whose size and parts these are.

    >>> tower = Tower((3, 2))
    >>> tower.encode(torch.zeros(tower.size), torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    widths: tuple[int, ...] = (64, 32, 16)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Weights and offset of each layer after the first."""
        return layer_shapes(self.widths)

    def numbers(self, inputs: int) -> int:
        """How many parameters the tower has for so many inputs."""
        return inputs * self.widths[0] + self.size

    def start(self, inputs: int, rng: Rng) -> Tree:
        """Uniform weights within √(6 / (inputs + outputs)) of each layer, as DSSM's authors draw them; offsets of 0."""
        weights = [glorot(rng.fold(n), *both) for n, both in enumerate(pairwise((inputs, *self.widths)))]
        layers = [part for w in weights[1:] for part in (w.flatten(), w.new_zeros(w.shape[1]))]
        return {"first": weights[0], "layers": torch.cat(layers)}

    def encode(self, layers: Tensor, first: Tensor) -> Tensor:
        """y (…, last width) of what the first layer gave (…, first width)."""
        parts = self.parts(layers)
        for weight, offset in zip(parts[::2], parts[1::2], strict=True):
            first = (first @ weight + offset).tanh()
        return first


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """Eq. 4, over the last dimension; 0 where a vector is 0.

    >>> cosine(torch.tensor([3.0, 4.0]), torch.tensor([[6.0, 8.0], [-4.0, 3.0], [0.0, 0.0]])).tolist()
    [1.0, 0.0, 0.0]
    """
    return (left * right).sum(-1) * torch.rsqrt(
        (left * left).sum(-1).clamp(min=TINY) * (right * right).sum(-1).clamp(min=TINY)
    )


TINY = 1e-16
"""A vector whose square is smaller counts as this long, so that a division stays finite."""


def row_count(columns: Mapping[str, Column]) -> int:
    """How many rows the first layer of an item tower has: one for each value of these features."""
    return sum(column.size for column in columns.values())


def item_rows(columns: Mapping[str, Column]) -> tuple[Tensor, Tensor]:
    """Which rows of the first layer are added up for each item (N, K), with which weights (N, K).

    Each 3-gram and each genre counts once, a word of a sequence as often as it is there, and a number as itself.
    Unknown values and padding have weight 0.

    >>> genres = Column(torch.tensor([[1, 2], [2, -1]]), 3, "many")
    >>> year = Column(torch.tensor([0.5, -1.0]), 1, "number")
    >>> row, weight = item_rows({"genres": genres, "year": year})
    >>> row.tolist(), weight.tolist()
    ([[1, 2, 3], [2, 0, 3]], [[1.0, 1.0, 0.5], [1.0, 0.0, -1.0]])
    """
    rows, weights, start = [], [], 0
    for column in columns.values():
        values = column.values if column.several else column.values[:, None]
        if column.kind == "number":
            row, weight = torch.zeros_like(values, dtype=torch.int64), values.float()
        else:
            weight = (values >= (0 if column.kind == "many" else 1)).float()
            row = values
        rows.append(torch.where(weight != 0, row + start, 0) if column.kind != "number" else row + start)
        weights.append(weight)
        start += column.size
    return torch.cat(rows, 1), torch.cat(weights, 1)


def first_layer(table: Tensor, row: Tensor, weight: Tensor) -> Tensor:
    """l_1 (N, width) as sums of the table's rows. No gradient passes through: see `homebody.bags.spread_rows`."""
    (sums,) = sum_rows(table, bags_of(row, weight))
    return sums[:, 0]


def bags_of(row: Tensor, weight: Tensor) -> Bags:
    """All of an item's rows in one block."""
    return Bags(row, weight, torch.zeros(row.shape[-1], dtype=torch.int64, device=row.device), 1)


def input_width(columns: Sequence[Column]) -> int:
    """The length of `inputs` for these features.

    >>> age, job = Column(torch.empty(0), 1, "number"), Column(torch.empty(0, dtype=torch.int64), 22, "one")
    >>> input_width([age, job])
    22
    """
    return sum(column.size - 1 if column.kind == "one" else column.size for column in columns)


def inputs(columns: Mapping[str, Column], values: Mapping[str, Tensor]) -> Tensor:
    """One person's features as one vector x: numbers as they are, categories and sets as ones among zeros.

    What is unknown is all zeros.

    >>> people = {"age": Column(torch.empty(0), 1, "number"), "job": Column(torch.empty(0), 4, "one")}
    >>> inputs(people, {"age": torch.tensor(0.5), "job": torch.tensor(2)}).tolist()
    [0.5, 0.0, 1.0, 0.0]
    """
    parts = []
    for name, column in columns.items():
        value = values[name]
        if column.kind == "number":
            parts.append(value[None].float())
            continue
        code = torch.arange(1 if column.kind == "one" else 0, column.size, device=value.device)
        parts.append((value.reshape(-1, 1) == code).any(0).float())
    return torch.cat(parts)

"""Sums of some rows of a table, such as an item's features, and steps on those rows: for a client, or a cohort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from homebody import kernels
from homebody.ops import Tensors, for_cohort, repeatable

__all__ = ["Bags", "spread_rows", "sum_rows"]

SMALL = 1 << 20
"""Numbers that one thread has added up before others, where they are busy, have even begun."""


class Bags(NamedTuple):
    """Sums of rows of a table: for each of N things, K rows with weights, of which some belong to each block."""

    row: Tensor
    """(N, K)."""
    weight: Tensor
    """(N, K)."""
    block: Tensor
    """(K,) which block of the sums a column belongs to."""
    blocks: int
    """How many there are."""


@for_cohort
def _sum_rows(table: Tensor, blocks: tuple[int, ...], *parts: Tensor) -> Tensors:
    bags = [Bags(*bag) for bag in zip(parts[::3], parts[1::3], parts[2::3], blocks, strict=True)]
    if table.device.type == "cpu":
        sums = [table.new_empty(*row.shape[:2], size, table.shape[2]) for row, _, _, size in bags]
        for (*three, _), out in zip(bags, sums, strict=True):
            given = [part.contiguous().numpy() for part in (table, *three)]
            small = three[0].numel() * table.shape[2] <= SMALL
            kernels.sum_rows(*given, out.numpy(), alone=small)
        return tuple(sums)
    rows = (table.gather(1, row.flatten(1)[:, :, None].expand(-1, -1, table.shape[2])) for row, *_ in bags)
    return tuple(
        _one_hot(block, size)[:, None] @ (entries.reshape(*row.shape, table.shape[2]) * weight[..., None])
        for (row, weight, block, size), entries in zip(bags, rows, strict=True)
    )


def sum_rows(table: Tensor, *bags: Bags) -> Tensors:
    """(N, blocks, D) for each of the bags: their sums of rows of a table (R, D).

    No gradient passes through: `spread_rows` is the way back.

    >>> table = torch.tensor([[1.0], [10.0], [100.0]])
    >>> bags = Bags(torch.tensor([[0, 1, 2]]), torch.tensor([[0.5, 0.5, 2.0]]), torch.tensor([0, 0, 1]), 2)
    >>> sum_rows(table, bags)[0].tolist()
    [[[5.5], [200.0]]]
    """
    return _sum_rows(table, tuple(bag.blocks for bag in bags), *(part for bag in bags for part in bag[:3]))


@for_cohort
def _spread_rows(table: Tensor, *parts: Tensor) -> Tensor:
    # A table that all clients have in common becomes one for each.
    out = table.contiguous().view_as(table)
    for row, weight, block, change in zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True):
        if table.device.type == "cpu":
            given = [part.contiguous().numpy() for part in (row, weight, block, change)]
            kernels.spread_rows(*given, out.numpy(), alone=row.numel() * table.shape[2] <= SMALL)
            continue
        value = (_one_hot(block, change.shape[2]).mT[:, None] @ change) * weight[..., None]
        place = row.flatten(1) + torch.arange(len(row), device=row.device)[:, None] * table.shape[1]
        with repeatable():
            out.flatten(0, 1).index_add_(0, place.flatten(), value.flatten(0, 2))
    return out


def spread_rows(table: Tensor, bags: Sequence[Bags], changes: Sequence[Tensor]) -> Tensor:
    """The table after each row has changed as the sums it is in should, by its weight in them.

    The table is given away: it may be written to, so that a step costs what it touches and no more.

    >>> row, weight = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> bags = Bags(row, weight, torch.tensor([0, 0]), 1)
    >>> spread_rows(torch.zeros(2, 1), [bags], [torch.tensor([[[4.0]], [[8.0]]])]).tolist()
    [[2.0], [10.0]]
    """
    given = (part for bag, change in zip(bags, changes, strict=True) for part in (*bag[:3], change))
    return _spread_rows(table, *given)


def _one_hot(block: Tensor, blocks: int) -> Tensor:
    return (block[:, None] == torch.arange(blocks, device=block.device)[:, None]).float()

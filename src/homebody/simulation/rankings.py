"""The best items by their scores, without what a person has already."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Users
from homebody.data.population import Population, UserItems, entries

__all__ = ["Ranking", "best_new", "best_of"]


class Ranking(NamedTuple):
    """The best items of some users: row r is about `users[r]`, the best first."""

    users: Users
    items: npt.NDArray[np.int64]
    """(U, k); -1 where a user has no more."""
    scores: npt.NDArray[np.float32]
    """(U, k)"""

    def pairs(self, row: int) -> list[tuple[int, float]]:
        """One user's items with their scores."""
        both = zip(self.items[row].tolist(), self.scores[row].tolist(), strict=True)
        return [(item, score) for item, score in both if item >= 0]


def best_new(scores: Tensor, population: Population, users: Users, k: int) -> Ranking:
    """The k best items that each of these users has neither here nor elsewhere. `scores` (U, items) is written to.

    >>> two = Population("toy", np.array([0, 2, 3]), np.array([4, 1, 4], dtype=np.int32), n_items=5)
    >>> best = best_new(torch.tensor([[0.0, 9, 2, 3, 9], [5, 1, 2, 3, 9]]), two, np.array([0, 1]), k=2)
    >>> best.items.tolist(), best.scores.tolist()
    ([[3, 2], [0, 3]], [[3.0, 2.0], [5.0, 3.0]])
    """
    _cross_out(scores, users, UserItems(population.indptr, population.items))
    if population.elsewhere is not None:
        _cross_out(scores, users, population.elsewhere)
    best = torch.topk(scores, min(k, scores.shape[1]), dim=1)
    items = torch.where(best.values > -torch.inf, best.indices, -1)
    return Ranking(users, items.numpy(), best.values.float().numpy())


def _cross_out(scores: Tensor, users: Users, theirs: UserItems) -> None:
    starts = theirs.indptr[users]
    counts = theirs.indptr[users + 1] - starts
    rows: npt.NDArray[np.integer[Any]] = np.repeat(np.arange(len(users)), counts)
    columns = theirs.items[entries(starts, counts)].astype(np.int64)
    scores[torch.from_numpy(rows), torch.from_numpy(columns)] = -torch.inf


def best_of(scores: Tensor, k: int) -> list[tuple[int, float]]:
    """The k items with the highest scores; −∞ marks what is not to be recommended.

    >>> best_of(torch.tensor([0.5, -torch.inf, 0.75]), 3)
    [(2, 0.75), (0, 0.5)]
    """
    best = torch.topk(scores, min(k, len(scores)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(item, score) for item, score in pairs if score > -np.inf]

"""What a random order of the items gets, worked out rather than drawn: the expectation of every metric.

A question has P relevant items and C others, N in all. In a random order the first k places are a sample of k of the N
without replacement. No metric here depends on which items they are, so its expectation is a function of P, C and k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["BY_CHANCE", "OF_IMPRESSIONS_BY_CHANCE"]


@lru_cache(maxsize=64)
def _gains(k: int) -> Tensor:
    """The gain of the first 0, 1, … k places together."""
    each = 1.0 / torch.log2(torch.arange(k).double() + 2.0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), each.cumsum(0)])


def _harmonic(counts: Tensor) -> Tensor:
    """1 + 1/2 + … + 1/n of each n."""
    most = int(counts.max()) if len(counts) else 0
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), (1.0 / torch.arange(1, most + 1).double()).cumsum(0)])
    return sums[counts]


def _none_yet(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    """(Q, k + 1): the probability that none of the relevant items is among the first 0, 1, … k places."""
    place = torch.arange(k)
    left = (others[:, None] - place).clamp(min=0).double() / (relevant + others)[:, None].sub(place).clamp(min=1)
    return torch.cat([torch.ones(len(relevant), 1, dtype=torch.float64), left.cumprod(1)], 1)


def hit(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    """
    >>> hit(torch.tensor([1, 2, 3]), torch.tensor([99, 2, 1]), 2).tolist()
    [0.02..., 0.83..., 1.0]
    """
    return 1.0 - _none_yet(relevant, others, k)[:, -1]


def recall(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    total = relevant + others
    return total.clamp(max=k).double() / total


def precision(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    return relevant * recall(relevant, others, k) / k


def ndcg(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    total, gains = relevant + others, _gains(k)
    return relevant * gains[total.clamp(max=k)] / total / gains[relevant.clamp(max=k)]


def reciprocal_rank(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    first = -_none_yet(relevant, others, k).diff(dim=1)
    return (first / torch.arange(1, k + 1)).sum(1)


def hits(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    return recall(torch.ones_like(relevant), others, k)


def gain(relevant: Tensor, others: Tensor, k: int) -> Tensor:
    return ndcg(torch.ones_like(relevant), others, k)


def auc(relevant: Tensor, others: Tensor) -> Tensor:
    return torch.full((len(relevant),), 0.5, dtype=torch.float64)


def mean_reciprocal_rank(relevant: Tensor, others: Tensor) -> Tensor:
    total = relevant + others
    return _harmonic(total) / total


BY_CHANCE: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "hr": hit,
    "ndcg": ndcg,
    "precision": precision,
    "recall": recall,
    "mrr": reciprocal_rank,
    "hits": hits,
    "gain": gain,
}
"""The expectation of each of `metrics.METRICS`, of questions with so many relevant items and so many others."""
OF_IMPRESSIONS_BY_CHANCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "auc": auc,
    "mrr": mean_reciprocal_rank,
    "ndcg@5": lambda relevant, others: ndcg(relevant, others, 5),
    "ndcg@10": lambda relevant, others: ndcg(relevant, others, 10),
}
"""The same of `metrics.OF_IMPRESSIONS`."""

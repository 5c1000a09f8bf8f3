"""Ranks and what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from homebody.core import Evaluated, Users

__all__ = ["Block", "Question", "Ranks", "hit_ratio", "ndcg", "rank", "summarise"]


class Question(NamedTuple):
    """What some users are asked: where does the held-out item stand?"""

    target: Tensor
    """(B,) the held-out items."""
    candidates: Tensor
    """(B, C) the sampled items it is ranked against; -1 pads."""
    seen: Tensor
    """(B, S) what the full ranking leaves out; the size of the catalogue pads."""


class Ranks(NamedTuple):
    """Where each held-out item stands, 0 the top."""

    sampled: Tensor
    full: Tensor


def rank(scores: Tensor, question: Question) -> Ranks:
    """Ranks of the held-out items, given scores for (users, items). Ties, and scores that are no number,
    count against the model.

    >>> asked = Question(torch.tensor([2]), torch.tensor([[0, 1]]), torch.tensor([[3, 5]]))
    >>> rank(torch.tensor([[0.5, 0.1, 0.5, 0.9, 0.7]]), asked)
    Ranks(sampled=tensor([1]), full=tensor([2]))
    """
    target = scores.gather(1, question.target[:, None])
    sampled = ~(scores.gather(1, question.candidates.clamp(min=0)) < target) & (question.candidates >= 0)
    everything = (~(scores < target)).sum(1)
    inside = question.seen < scores.shape[1]
    seen = ~(scores.gather(1, question.seen.clamp(max=scores.shape[1] - 1)) < target) & inside
    return Ranks(sampled.sum(1), everything - seen.sum(1) - 1)


def hit_ratio(ranks: Tensor, k: int) -> float:
    """Share of users whose held-out item is among their first k.

    >>> hit_ratio(torch.tensor([0, 9, 10]), 10)
    0.6666666666666666
    """
    return float((ranks < k).double().mean())


def ndcg(ranks: Tensor, k: int) -> float:
    """Normalised discounted cumulative gain with one relevant item.

    >>> ndcg(torch.tensor([0, 2, 10]), 10)
    0.5
    """
    gain = torch.where(ranks < k, 1.0 / torch.log2(ranks.double() + 2.0), 0.0)
    return float(gain.mean())


class Block(NamedTuple):
    """Some users' scores for all items, and what they are asked."""

    users: Users
    scores: Tensor
    asked: Mapping[str, Question]


def summarise(blocks: Iterable[Block], ks: Sequence[int] = (5, 10, 20)) -> Evaluated:
    """Metrics over blocks of users: test under bare names, other held-out parts prefixed by theirs."""
    found: dict[str, list[Ranks]] = {}
    users = []
    for block in blocks:
        users.append(block.users)
        for held, question in block.asked.items():
            found.setdefault(held, []).append(rank(block.scores, question))
    ranks = {held: Ranks(*map(torch.cat, zip(*parts, strict=True))) for held, parts in found.items()}
    metrics = {}
    for held, (sampled, full) in ranks.items():
        prefix = "" if held == "test" else f"{held}/"
        for kind, values in (("", sampled), ("full/", full)):
            for k in ks:
                metrics[f"{prefix}{kind}hr@{k}"] = hit_ratio(values, k)
                metrics[f"{prefix}{kind}ndcg@{k}"] = ndcg(values, k)
    order = np.argsort(np.concatenate(users))
    test = ranks["test"]
    return Evaluated(
        metrics,
        {
            "user": torch.from_numpy(np.concatenate(users)[order]),
            "rank": test.sampled.cpu()[order],
            "full/rank": test.full.cpu()[order],
        },
    )

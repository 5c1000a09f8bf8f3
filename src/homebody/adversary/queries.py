"""Canaries that ask: a lower bound on the ε of a query, from what it tells.

A canary has one of two interests that are as far apart as any, and a fair coin decides which. It tells it as a device
does, and the attacker, who knows the two, guesses the coin by the ratio of the likelihoods of what was told. No attack
on one query is stronger.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.adversary.bounds import Lower, clopper_pearson
from homebody.adversary.impressions import interest_likelihood
from homebody.errors import HomebodyError
from homebody.privacy.queries import Attention, Choice, Mechanism, PrivUnit, Vector, clipped
from homebody.rng import Rng

__all__ = ["STRONG", "bound", "farthest", "ratio"]

STRONG = 1e4
"""An interest of this size leaves nothing for other places."""


def farthest(query: Mechanism) -> Tensor:
    """(2, r) two interests that are as easy to tell apart by this mechanism as any.

    >>> farthest(Attention(1.0, size=4, theta=0.6)).tolist()
    [[10000.0, 10000.0, 0.0, 0.0], [0.0, 0.0, 10000.0, 10000.0]]
    >>> farthest(PrivUnit(1.0, size=2)).tolist()
    [[1.0, 0.0], [-1.0, -0.0]]
    """
    match query:
        case Choice():
            return STRONG * torch.eye(query.basis)[:2]
        case Attention():
            first, other = 1, 2
            if query.noise == "laplace":
                # Both may fill their places evenly, as far as θ and a sum of 1 allow.
                sizes = [min(1.0, query.theta * places**0.5) for places in range(query.size + 1)]
                first = max(range(1, query.size), key=lambda places: sizes[places] + sizes[query.size - places])
                other = query.size
            place = torch.arange(query.size)
            return STRONG * torch.stack([place < first, (place >= first) & (place < other)]).float()
        case PrivUnit():
            direction = torch.eye(query.size)[0]
        case Vector():
            direction = torch.ones(query.size)
        case _:
            raise HomebodyError(f"Canaries know no two interests that {type(query).__name__} tells apart best.")
    return torch.stack([direction, -direction]) * (1.0 if isinstance(query, PrivUnit) else STRONG)


def ratio(query: Mechanism, told: Tensor, pair: Tensor) -> Tensor:
    """(n,) how much likelier the first of two interests makes what was told than the other, as a logarithm."""
    sides = []
    for interest in pair:
        same = interest.expand(len(told), -1)
        if isinstance(query, PrivUnit):
            direction = torch.nn.functional.normalize(interest.double(), dim=0)
            cap = query.cap
            near, far = math.log(cap.p / cap.q), math.log((1 - cap.p) / (1 - cap.q))
            sides.append(torch.where(told.double() @ direction >= cap.gamma, near, far))
        elif isinstance(query, Vector):
            apart = (told.double() - clipped(same, query.theta).double()).abs() / query.scale
            sides.append(-(apart if query.noise == "laplace" else apart**2 / 2).sum(-1))
        else:
            sides.append(interest_likelihood(query, told, same))
    return sides[0] - sides[1]


def bound(query: Mechanism, delta: float, rng: Rng, count: int = 10_000) -> Lower:
    """What so many canaries, each of which asks once, show of ε.

    >>> found = bound(Choice(2.0, basis=4), 0.0, Rng.of(0), count=2000)
    >>> 1.0 < found.epsilon < 2.0
    True
    """
    coins = rng.fold("coins").bits(count) > 0
    pair = farthest(query)
    streams = rng.fold("query").fold(torch.arange(count))
    given = torch.where(coins[:, None], pair[0], pair[1])
    told = vmap(lambda interest, key: query.device(interest, Rng(key)))(given, streams.key)
    scores = ratio(query, told, pair).numpy().astype(np.float64)
    return clopper_pearson(scores, coins.numpy(), delta)

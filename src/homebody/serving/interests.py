"""Interests: directions in which items lie, found without anybody's history.

They are the centres of clusters of the items' places, by direction. Everyone knows them, so nothing is spent on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homebody.rng import Rng

__all__ = ["cluster", "lists", "of_catalogue"]

PASSES = 30
"""Passes in which the centres settle."""
FIRST = 1000
"""Centres are made of so many items, those that come first for everyone: the others are seldom in a list."""
AT_ONCE = 1 << 22
"""Products that are held at once."""


def of_catalogue(places: Tensor, order: Tensor, count: int) -> Tensor:
    """The interests of a catalogue, by the places of its items and the order that is the same for everyone."""
    return cluster(places[order[: max(FIRST, 8 * count)]], count)


def cluster(places: Tensor, count: int) -> Tensor:
    """(B, r) unit vectors: the centres of `count` clusters of places (N, r) by direction, the same each time.

    The first centres are drawn far from one another, each by its squared distance from those before (k-means++).

    >>> centres = cluster(torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]]), 2)
    >>> sorted(centres.round(decimals=1).abs().tolist())
    [[0.0, 1.0], [1.0, 0.0]]
    """
    rng = Rng.of(0, "interests")
    some = places[places.norm(dim=1) > 0].float()
    if not len(some):
        return torch.nn.functional.normalize(rng.fold("blank").normal(count, places.shape[1]), dim=1)
    unit = torch.nn.functional.normalize(some, dim=1)
    centre = unit[rng.integers(len(unit), 1)]
    far = 1 - unit @ centre[0]
    for _ in range(count - 1):
        chance = far.clamp(min=0).double() ** 2
        edge = chance.cumsum(0)
        place = int((edge < rng.uniform(1).double() * edge[-1]).sum().clamp(max=len(unit) - 1))
        centre = torch.cat([centre, unit[place : place + 1]])
        far = torch.minimum(far, 1 - unit @ unit[place])
    before = None
    for _ in range(PASSES):
        nearest = torch.cat([(part @ centre.T).argmax(1) for part in torch.split(unit, max(1, AT_ONCE // count))])
        if before is not None and torch.equal(nearest, before):
            break
        before = nearest
        sums = torch.zeros_like(centre).index_add(0, nearest, unit)
        centre = torch.nn.functional.normalize(torch.where(sums.any(1, keepdim=True), sums, centre), dim=1)
    return centre


def lists(places: Tensor, interests: Tensor, k: int, without: Tensor) -> Tensor:
    """(B, k) the items that fit each interest best, best first, without those of `without`."""
    kept = torch.ones(len(places), dtype=torch.bool)
    kept[without] = False
    free = kept.nonzero()[:, 0]
    k = min(k, len(free))
    found = []
    for some in torch.split(interests.float(), max(1, AT_ONCE // max(1, len(places)))):
        fit = (places.float() @ some.T).T[:, free]
        found.append(free[fit.topk(k, dim=1).indices])
    return torch.cat(found)

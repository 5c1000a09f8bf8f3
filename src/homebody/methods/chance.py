"""Random scores: what no learning at all gives, the lowest line of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import About, Users
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng

__all__ = ["Chance"]

AT_ONCE = 64
"""People whose scores are drawn together: few enough for caches."""


@dataclass(frozen=True)
class Chance(Reference):
    """A random order of the items for each person; HR@10 among 99 others is 0.1.

    >>> import numpy as np
    >>> score = Chance().trained(Histories.of([[1, 2], [1]], n_items=3), seed=4)
    >>> both = score(np.array([0, 1]), torch.arange(3))
    >>> both.shape, torch.equal(both[0], both[1]), torch.equal(both[1:], score(np.array([1]), torch.arange(3)))
    (torch.Size([2, 3]), False, True)
    """

    about: ClassVar[About] = About(title="random scores: reads nobody's history", diagnostic=True, rounds=1)
    reads: ClassVar[bool] = False

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        def score(users: Users, items: Tensor) -> Tensor:
            some = torch.split(torch.from_numpy(users)[:, None], AT_ONCE)
            drawn = (Rng.of(seed, "random").fold(part).fold(items).key for part in some)
            return torch.cat([((bits >> 40) & 0xFFFFFF).float() for bits in drawn])  # as many bits as a float holds

        yield score

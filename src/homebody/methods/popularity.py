"""Popularity: what most people took, for everyone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from homebody.core import About
from homebody.reference import Histories, Reference, Score

__all__ = ["Popularity"]


@dataclass(frozen=True)
class Popularity(Reference):
    """Items by the number of their interactions.

    >>> score = Popularity().trained(Histories.of([[1, 2], [1]], n_items=3))
    >>> score(np.array([0]), torch.arange(3))
    tensor([[0., 2., 1.]])
    """

    about: ClassVar[About] = About(title="the same list for everyone, by number of interactions", rounds=1)

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        learnt = np.repeat(histories.learn, np.diff(histories.indptr))
        count = np.bincount(histories.items[learnt], minlength=histories.catalogue.n_items)
        popularity = torch.from_numpy(count).float()
        yield lambda users, items: popularity[items].expand(len(users), -1)

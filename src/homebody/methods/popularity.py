"""Popularity: what most people took, for everyone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from homebody.core import Users
from homebody.reference import Histories, Reference

__all__ = ["Popularity"]


@dataclass(frozen=True)
class Popularity(Reference):
    """Items by the number of their interactions.

    >>> from homebody.core import Catalogue
    >>> histories = Histories(np.array([0, 2, 3]), np.array([1, 2, 1], dtype=np.int32), Catalogue(3))
    >>> Popularity().fit(histories, seed=0)(np.array([0]))
    tensor([[0., 2., 1.]])
    """

    title: ClassVar[str] = "the same list for everyone, by number of interactions"

    def fit(self, histories: Histories, seed: int) -> Callable[[Users], Tensor]:
        count = torch.from_numpy(np.bincount(histories.items, minlength=histories.catalogue.n_items)).float()
        return lambda users: count.expand(len(users), -1)

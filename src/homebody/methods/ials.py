"""iALS: Collaborative Filtering for Implicit Feedback Datasets (Hu, Koren and Volinsky, ICDM 2008).

The centralised original of `fedials`, with the same fields: from the same initial factors both walk the same
way, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from homebody.core import Users, param
from homebody.methods.fedials import FedIALS
from homebody.methods.ials_kernels import half_sweep
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng

__all__ = ["IALS"]


@dataclass(frozen=True)
class IALS(Reference):
    """Alternating least squares on everyone's histories."""

    factors: int = param(16, "size of a user's and of an item's vector", low=1)
    confidence: float = param(5.0, "α: extra weight of an interaction over a non-interaction", low=0)
    regularisation: float = param(1.0, "λ", low=1e-9)
    init_scale: float = param(0.1, "spread of the initial item factors, over √factors", low=1e-9)

    default_rounds: ClassVar[int] = 5
    title: ClassVar[str] = "implicit ALS on everyone's histories, in one place"
    paper: ClassVar[str] = "Hu et al., Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008"

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        start = FedIALS(factors=self.factors, init_scale=self.init_scale)
        rng = Rng.of(seed, "train").fold("shared")  # the stream that `fit` gives a federated method
        items = start.init_shared(histories.catalogue, rng)["item"].double().numpy()
        owner = np.repeat(np.arange(len(histories.indptr) - 1), np.diff(histories.indptr))
        learnt = np.flatnonzero(histories.learn[owner])
        by_item = learnt[np.argsort(histories.items[learnt], kind="stable")]
        people = owner[by_item].astype(np.int32)
        sizes = np.bincount(histories.items[learnt], minlength=histories.catalogue.n_items)
        item_indptr = np.concatenate([[0], np.cumsum(sizes)])
        weights = (self.confidence, self.regularisation)
        users = half_sweep(histories.indptr, histories.items, items, *weights)
        while True:
            items = half_sweep(item_indptr, people, np.where(histories.learn[:, None], users, 0.0), *weights)
            users = half_sweep(histories.indptr, histories.items, items, *weights)
            yield partial(_dot, torch.from_numpy(users).float(), torch.from_numpy(items).float())


def _dot(x: Tensor, y: Tensor, users: Users, items: Tensor) -> Tensor:
    return x[torch.from_numpy(users)] @ y[items].T

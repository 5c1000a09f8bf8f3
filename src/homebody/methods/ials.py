"""iALS: Collaborative Filtering for Implicit Feedback Datasets (Hu, Koren and Volinsky, ICDM 2008).

The centralised original of `fedials`: with the same fields and the same initial factors both walk the same
way, up to rounding. `scaling` is of Rendle et al. (Revisiting the Performance of iALS on Item Recommendation
Benchmarks, RecSys 2022): a row's λ grows with what it is learnt from, so that one λ fits data of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from homebody.core import About, param
from homebody.methods.fedials import FedIALS
from homebody.methods.kernels.ials import half_sweep
from homebody.reference import Histories, Products, Reference, Score
from homebody.rng import Rng
from homebody.settings import Range, common_params

__all__ = ["IALS"]


@dataclass(frozen=True)
class IALS(Reference):
    """Alternating least squares on everyone's histories.

    >>> import homebody as hb
    >>> model = hb.fit(hb.IALS(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    factors: int = param(64, "size of a user's and of an item's vector", low=1, search=(16, 32, 64))
    confidence: float = param(
        5.0, "α: extra weight of an interaction over a non-interaction", low=0, search=Range(0.5, 50, log=True)
    )
    regularisation: float = param(0.05, "λ", low=1e-9, search=Range(0.005, 1, log=True))
    scaling: float = param(1.0, "ν: a row with n members has λ (n + others / α)^ν; 0: λ for all", low=0, high=1)
    init_scale: float = param(0.1, "spread of the initial item factors, over √factors", low=1e-9)

    about: ClassVar[About] = About(
        title="implicit ALS on everyone's histories, in one place",
        paper="Hu et al., Collaborative Filtering for Implicit Feedback Datasets, ICDM 2008",
        rounds=10,
    )

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        same = FedIALS(**common_params(self, FedIALS))
        rng = Rng.of(seed, "train").fold("shared")  # the stream that `fit` gives a federated method
        items = same.init_shared(histories.catalogue, rng)["item"].double().numpy()
        owner = np.repeat(np.arange(len(histories.indptr) - 1), np.diff(histories.indptr))
        learnt = np.flatnonzero(histories.learn[owner])
        by_item = learnt[np.argsort(histories.items[learnt], kind="stable")]
        people = owner[by_item].astype(np.int32)
        sizes = np.bincount(histories.items[learnt], minlength=histories.catalogue.n_items)
        item_indptr = np.concatenate([[0], np.cumsum(sizes)])
        present = histories.learn & (np.diff(histories.indptr) > 0)
        of_user, of_item = (
            same.ridge(torch.from_numpy(np.diff(indptr)).double(), others).numpy()
            for indptr, others in ((histories.indptr, histories.catalogue.n_items), (item_indptr, int(present.sum())))
        )
        users = half_sweep(histories.indptr, histories.items, items, self.confidence, of_user)
        while True:
            taught = np.where(present[:, None], users, 0.0)
            items = half_sweep(item_indptr, people, taught, self.confidence, of_item)
            users = half_sweep(histories.indptr, histories.items, items, self.confidence, of_user)
            yield Products(torch.from_numpy(users).float(), torch.from_numpy(items).float())

"""MF: matrix factorisation (Koren, Bell and Volinsky, IEEE Computer 2009) for implicit feedback, learnt as He et
al. learn (Neural Collaborative Filtering, WWW 2017): the centralised baseline of PFedRec's authors.

| He et al.                             | here                                                       |
|---------------------------------------|------------------------------------------------------------|
| p_u, q_i, latent vectors              | rows of `users` and `items`, `factors` wide                |
| ŷ_ui = σ(p_u · q_i)                   | the logit p_u · q_i ranks                                  |
| L, log-loss on Y ∪ Y⁻ (equation 7)    | `train_mf`, mean over a batch of `batch_size`              |
| Y⁻, 4 negatives a positive            | `draw`, anew each pass                                     |
| Adam, learning rate                   | `learning_rate`; only touched rows move, as in SparseAdam  |

A late-comer's vector takes the same steps after each pass, with the items as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Users, param
from homebody.methods.mf_kernels import Floats, draw, table, train_mf
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng

__all__ = ["MF"]


@dataclass(frozen=True)
class MF(Reference):
    """Matrix factorisation on everyone's histories, by Adam on log-loss with sampled negatives."""

    factors: int = param(32, "size of a user's and of an item's vector", low=1)
    learning_rate: float = param(0.0005, "Adam's step", low=0)
    negatives: int = param(4, "negatives drawn for each positive, anew each pass", low=1)
    batch_size: int = param(256, "samples in a step", low=1)
    regularisation: float = param(0.0, "λ: a sample adds λ/2 of its two vectors' squared lengths", low=0)
    init_scale: float = param(0.1, "standard deviation of the initial vectors", low=0)

    default_rounds: ClassVar[int] = 100
    title: ClassVar[str] = "matrix factorisation on everyone's histories, in one place"
    paper: ClassVar[str] = "Koren et al., IEEE Computer 2009; log-loss as in He et al., WWW 2017"

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        rng = Rng.of(seed, "mf")
        n_users, n_items = len(histories.indptr) - 1, histories.catalogue.n_items
        users = table(self.init_scale * rng.fold("users").normal(n_users, self.factors))
        items = table(self.init_scale * rng.fold("items").normal(n_items, self.factors))
        steps = late_steps = 0
        late = ~histories.learn
        for number in count():
            steps = self._pass(histories, histories.learn, users, items, rng.fold("learn", number), steps)
            if late.any():
                late_steps = self._pass(histories, late, users, items, rng.fold("late", number), late_steps)
            yield partial(_dot, torch.from_numpy(users[:, 0]), torch.from_numpy(items[:, 0]))

    def _pass(self, histories: Histories, who: npt.NDArray[np.bool_], users: Floats, items: Floats, rng: Rng, steps: int) -> int:
        sampled = draw(histories, who, self.negatives, rng)
        frozen = who is not histories.learn
        rates = self.learning_rate, self.regularisation
        return int(train_mf(*sampled, users, items, *rates, self.batch_size, steps, frozen))


def _dot(p: Tensor, q: Tensor, users: Users, items: Tensor) -> Tensor:
    return p[torch.from_numpy(users)] @ q[items].T

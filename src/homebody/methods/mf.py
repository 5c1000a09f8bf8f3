"""MF: matrix factorisation (Koren, Bell and Volinsky, IEEE Computer 2009) for implicit feedback, learnt as He et
al. learn (Neural Collaborative Filtering, WWW 2017): the centralised baseline of PFedRec's authors.

| He et al.                             | here                                                       |
|---------------------------------------|------------------------------------------------------------|
| p_u, q_i, latent vectors              | rows of `users` and `items`, `factors` wide                |
| ŷ_ui = σ(p_u · q_i)                   | the logit p_u · q_i ranks                                  |
| L, log-loss on Y ∪ Y⁻ (equation 7)    | `train`, mean over a batch of `batch_size`              |
| Y⁻, 4 negatives a positive            | `draw`, anew each pass                                     |
| Adam, learning rate                   | `learning_rate`; only touched rows move, as in SparseAdam  |

A late-comer's vector takes the same steps after each pass, with the items as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from homebody.core import About, param
from homebody.methods.kernels.mf import Embeddings, draw, train
from homebody.reference import Histories, Products, Reference, Score
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["MF"]


@dataclass(frozen=True)
class MF(Reference):
    """Matrix factorisation on everyone's histories, by Adam on log-loss with sampled negatives.

    >>> import homebody as hb
    >>> model = hb.fit(hb.MF(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    factors: int = param(32, "size of a user's and of an item's vector", low=1, search=(16, 32, 64))
    learning_rate: float = param(0.002, "Adam's learning rate", low=0, search=Range(0.0003, 0.01, log=True))
    negatives: int = param(4, "negatives drawn for each positive, anew each pass", low=1)
    batch_size: int = param(256, "samples in a step", low=1)
    regularisation: float = param(
        0.005, "λ: a sample adds λ/2 of its two vectors' squared lengths", low=0, search=Range(0.0005, 0.05, log=True)
    )
    init_scale: float = param(0.01, "standard deviation of the initial vectors", low=0)

    about: ClassVar[About] = About(
        title="matrix factorisation on everyone's histories, in one place",
        paper="Koren et al., IEEE Computer 2009; log-loss as in He et al., WWW 2017",
        rounds=50,
    )

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        rng, late = Rng.of(seed, "mf"), ~histories.learn
        users = Embeddings(self.init_scale * rng.fold("users").normal(len(late), self.factors))
        items = Embeddings(self.init_scale * rng.fold("items").normal(histories.catalogue.n_items, self.factors))
        rates = self.learning_rate, self.regularisation
        steps = late_steps = 0
        for number in count():
            samples = draw(histories, histories.learn, self.negatives, rng.fold("learn", number))
            steps = train(samples, users, items, rates, self.batch_size, steps, frozen=False)
            if late.any():
                samples = draw(histories, late, self.negatives, rng.fold("late", number))
                late_steps = train(samples, users, items, rates, self.batch_size, late_steps, frozen=True)
            yield Products(users.value, items.value)

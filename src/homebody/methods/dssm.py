"""DSSM: Learning Deep Structured Semantic Models for Web Search using Clickthrough Data (Huang et al., CIKM 2013), on
everyone's histories in one place: the centralised rows of Huang et al., *A Federated Multi-View Deep Learning
Framework for Privacy-Preserving Recommendations*, 2020.

| paper                                     | here                                                                 |
|-------------------------------------------|----------------------------------------------------------------------|
| query Q: a person's features              | `view`: the views that one user tower reads, side by side            |
| document D: an item's features            | `features`: 3-grams of titles, genres                                |
| l_1 = W_1 x, l_i = tanh(W_i l_{i−1} + b_i) | `homebody.models.towers.Tower`, as in `fl-mv-dssm`; `widths`        |
| R(Q, D), the cosine                       | `towers.cosine`                                                      |
| P(D|Q), γ; −log P(D⁺|Q)                   | `_loss`; `gamma`, `negatives`                                        |
| Adam 0.001, batches of 20                 | `learning_rate`, `batch_size`                                        |

A pass takes every interaction once, in random order, each with negatives that its person does not have, drawn anew.
Who came later teaches nothing and is scored by their features. Somebody of whom the views know nothing gets equal
scores for all items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import normalize

from homebody.bags import spread_rows
from homebody.core import About, param
from homebody.methods.kernels.mf import outside
from homebody.models.networks import tower_widths
from homebody.models.towers import Tower, bags_of, cosine, first_layer, inputs, item_rows, row_count
from homebody.models.views import tower_columns, view_columns
from homebody.reference import Histories, Products, Reference, Score
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["DSSM"]


@dataclass(frozen=True)
class DSSM(Reference):
    """A user tower and an item tower, trained together on everyone's histories.

    >>> import homebody as hb
    >>> from homebody.testing import described
    >>> model = hb.fit(hb.DSSM(widths="8,4"), described(), rounds=1, quiet=True)
    >>> model.epsilon
    {'server': inf, 'clients': inf, 'public': inf}
    """

    view: str = param("", "views that the user tower reads, such as taste or profile,taste; empty: every view")
    features: str = param("", "items' features it reads, such as title,genres; empty: all but numbers")
    gamma: float = param(10.0, "γ: by how much cosines are multiplied", low=0, search=Range(1, 20, log=True))
    negatives: int = param(4, "negatives drawn for each positive", low=1, search=Range(1, 20, log=True))
    batch_size: int = param(20, "interactions in a step, each with its negatives", low=1)
    learning_rate: float = param(0.001, "Adam's learning rate", low=0, search=Range(1e-4, 0.01, log=True))
    widths: str = param("64,32,16", "units of each layer of a tower", check=tower_widths)

    needs: ClassVar[tuple[str, ...]] = ("user features", "item features")
    about: ClassVar[About] = About(
        title="a user tower and an item tower on features, trained on everyone's histories, in one place",
        paper="Huang et al., Learning Deep Structured Semantic Models for Web Search, CIKM 2013",
        rounds=5,
    )

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        rng, tower = Rng.of(seed, "dssm"), Tower(tower_widths("widths", self.widths))
        people, items = self._inputs(histories), tower_columns(histories.catalogue, self.features)
        learnt = {
            f"{whose}/{part}": value.requires_grad_()
            for whose, inside in (("user", people.shape[1]), ("item", row_count(items)))
            for part, value in tower.start(inside, rng.fold(whose)).items()
        }
        adam = torch.optim.Adam(learnt.values(), lr=self.learning_rate)
        described = item_rows(items)
        for number in count():
            self._train(histories, tower, learnt, adam, people, described, rng.fold("learn", number))
            now = {name: value.detach().clone() for name, value in learnt.items()}
            of_people = tower.encode(now["user/layers"], people @ now["user/first"])
            of_items = tower.encode(now["item/layers"], first_layer(now["item/first"], *described))
            yield Products(normalize(of_people) * (people != 0).any(1, keepdim=True), normalize(of_items))

    def _inputs(self, histories: Histories) -> Tensor:
        """What the user tower reads of each person, (people, inputs)."""
        views = view_columns(histories.catalogue, self.view)
        columns = {name: column for own in views.values() for name, column in own.items()}
        values = {name: torch.from_numpy(histories.features[name]) for name in columns}
        found: Tensor = vmap(lambda own: inputs(columns, own))(values)
        return found

    def _train(
        self,
        histories: Histories,
        tower: Tower,
        learnt: dict[str, Tensor],
        adam: torch.optim.Adam,
        people: Tensor,
        described: tuple[Tensor, Tensor],
        rng: Rng,
    ) -> None:
        owner = np.repeat(np.arange(len(histories.indptr) - 1), np.diff(histories.indptr))
        known = histories.learn & (people != 0).any(1).numpy()
        taught = torch.from_numpy(np.flatnonzero(known[owner]))
        places = taught[rng.bits(len(taught)).argsort()].numpy()
        whose = owner[places]
        drawn = torch.from_numpy(outside(histories, whose, self.negatives, rng))
        samples = torch.cat([torch.from_numpy(histories.items[places].astype(np.int64))[:, None], drawn], 1)
        for begin in range(0, len(places), self.batch_size):
            batch = samples[begin : begin + self.batch_size]
            bags = bags_of(*(part[batch.clamp(min=0).flatten()] for part in described))
            summed = first_layer(learnt["item/first"].detach(), bags.row, bags.weight).requires_grad_()
            person = people[torch.from_numpy(whose[begin : begin + self.batch_size])] @ learnt["user/first"]
            of_person = tower.encode(learnt["user/layers"], person)
            of_items = tower.encode(learnt["item/layers"], summed).reshape(*batch.shape, -1)
            adam.zero_grad()
            self._loss(of_person, of_items, batch >= 0).backward()  # type: ignore[no-untyped-call]
            assert summed.grad is not None
            zeros = torch.zeros_like(learnt["item/first"])
            learnt["item/first"].grad = spread_rows(zeros, [bags], [summed.grad[:, None]])
            adam.step()

    def _loss(self, person: Tensor, items: Tensor, real: Tensor) -> Tensor:
        """The mean of −log P(D⁺|Q) over a batch, among the items that were drawn."""
        fit = torch.where(real, self.gamma * cosine(person[:, None], items), -torch.inf)
        return (fit.logsumexp(1) - fit[:, 0]).mean()

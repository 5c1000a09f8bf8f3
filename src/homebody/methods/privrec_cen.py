"""PrivRec-CEN: the network of PrivRec (Wang et al., VLDB Journal 2021), trained in one place.

| paper                                    | here                                                                   |
|------------------------------------------|------------------------------------------------------------------------|
| the same network                         | `PrivRec` with these fields; `features`, `factors`, `hidden`           |
| the centralised environment              | mini-batches over everyone's interactions, Adam's `learning_rate`      |
| each user is a task                      | everyone who is asked adapts it to what they have, as a device would   |

A batch is so many interactions of anyone, each with `negatives` that its person does not have, drawn anew each pass.
Adam is lazy: of tables only touched rows move. Who came later teaches nothing: they only adapt. The adaptation is
PrivRec's own, `adapt_epochs` of SGD with `adapt_rate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import binary_cross_entropy_with_logits

from homebody.core import About, Batch, Data, Method, Tree, Users, param
from homebody.data import split_kernels
from homebody.methods.kernels import adapt_many
from homebody.methods.kernels.mf import Embeddings, avoided, outside
from homebody.methods.privrec import PrivRec
from homebody.models.dssm import Vocabulary
from homebody.models.networks import read_widths
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng
from homebody.settings import Range, common_params

__all__ = ["Adapted", "Everyone", "PrivRecCEN"]

ONLY = torch.zeros(1, dtype=torch.int64)
ADAPTED_BYTES = 64 << 20
"""Limit on the adapted parameters of the people who are scored together."""
SCORES_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class PrivRecCEN(Reference):
    """A network on features of people and items, trained on everyone's histories; each person adapts it.

    >>> import homebody as hb
    >>> from homebody.testing import described
    >>> model = hb.fit(hb.PrivRecCEN(factors=4, hidden="4"), described(), rounds=1, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    features: str = param("", "features to use, such as age,genres; empty: all but texts; none: items' own rows")
    factors: int = param(64, "size of a feature's vector", low=1, search=(16, 32, 64))
    hidden: str = param("64,64,64,64", "widths of the hidden layers", check=read_widths)
    activation: str = param("relu", "activation of the hidden layers", choices=("relu", "sigmoid"))
    learning_rate: float = param(0.001, "Adam's learning rate", low=0, search=Range(0.0001, 0.01, log=True))
    batch_size: int = param(256, "interactions in a step, each with its negatives", low=1)
    negatives: int = param(4, "negatives drawn for each interaction, anew each pass", low=1, search=Range(1, 8))
    adapt_epochs: int = param(10, "passes when someone adapts; 0: nobody does", low=0, search=Range(1, 100, log=True))
    adapt_rate: float = param(0.1, "learning rate when someone adapts", low=0, search=Range(0.01, 1, log=True))
    adapt_items: int = param(0, "latest interactions of a person to adapt to; 0: all", low=0)
    adapt_batch: int = param(32, "interactions in such a step; 0: all in one step", low=0)
    init_scale: float = param(0.1, "standard deviation of the initial rows", low=0, search=Range(0.01, 1, log=True))

    about: ClassVar[About] = About(
        title="PrivRec's network on everyone's histories, in one place; each one adapts it",
        paper="Wang et al., Fast-adapting and Privacy-preserving Federated Recommender System, VLDBJ 2021",
        rounds=10,
    )

    @property
    def task(self) -> PrivRec:
        """The method by which each person adapts the network."""
        changed = {"learning_rate": self.adapt_rate, "epochs": 1, "batch_size": self.adapt_batch}
        return PrivRec(**{**common_params(self, PrivRec), **changed, "adapt_epochs": max(1, self.adapt_epochs)})

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        rng = Rng.of(seed, "privrec-cen")
        start = self.task.init_shared(histories.catalogue, rng.fold("shared"))
        learnt = {name: Embeddings(value if value.ndim == 2 else value[None]) for name, value in start.items()}
        everyone = Everyone(histories, self.features)
        steps = 0
        for number in count():
            steps = self._train(everyone, learnt, steps, rng.fold("learn", number))
            shared = {name: rows.value.clone() for name, rows in learnt.items()}
            shared["layers"] = shared["layers"][0]
            yield Adapted(self.task, shared, everyone, rng.fold("adapt"), adapts=self.adapt_epochs > 0)

    def _train(self, everyone: Everyone, learnt: dict[str, Embeddings], steps: int, rng: Rng) -> int:
        """One pass of mini-batches. Returns the number of steps so far."""
        known = everyone.known
        network = self.task.network_for(known)
        places = everyone.taught[rng.bits(len(everyone.taught)).argsort()]
        whose = everyone.owner[places]
        drawn = torch.from_numpy(outside(everyone.histories, whose.numpy(), self.negatives, rng))
        samples = torch.cat([everyone.items[places][:, None], drawn], 1)
        for begin in range(0, len(places), self.batch_size):
            batch = slice(begin, begin + self.batch_size)
            sample, place, who = samples[batch], places[batch], whose[batch]
            real, flat = (sample >= 0).float(), sample.clamp(min=0).flatten()
            label = torch.zeros_like(real)
            label[:, 0] = 1.0
            given = (everyone.people.at(who), everyone.around.at(place), everyone.described.at(flat))
            layers = learnt["layers"].value[0].clone().requires_grad_()
            item = learnt["item"].value[flat].requires_grad_()
            rows = [learnt["feature"].value[part.row].requires_grad_() for part in given]
            person, around, about = (
                (part.block @ (row * part.weight[..., None])).flatten(-2) for part, row in zip(given, rows, strict=True)
            )
            beside = torch.cat([person, around], -1).repeat_interleave(1 + self.negatives, 0)
            value = network.logit(layers, torch.cat([item, about], -1), beside).reshape(label.shape)
            loss = binary_cross_entropy_with_logits(value, label, weight=real, reduction="sum") / real.sum()
            slopes = torch.autograd.grad(loss, [layers, item, *rows])
            steps += 1
            learnt["layers"].step(ONLY, slopes[0][None], self.learning_rate, steps)
            learnt["item"].step(flat, slopes[1], self.learning_rate, steps)
            index = torch.cat([part.row.flatten() for part in given])
            change = torch.cat([slope.flatten(0, -2) for slope in slopes[2:]])
            learnt["feature"].step(index, change, self.learning_rate, steps)
        return steps


class Everyone:
    """Everything that is collected: people, their interactions, and the items."""

    def __init__(self, histories: Histories, features: str) -> None:
        self.catalogue, self.known = histories.catalogue, Vocabulary.of(histories.catalogue, features)
        self.histories = histories
        self.lengths = np.diff(histories.indptr)
        self.items = torch.from_numpy(histories.items.astype(np.int64))
        self.owner = torch.from_numpy(np.repeat(np.arange(len(self.lengths)), self.lengths))
        self.taught = torch.from_numpy(np.flatnonzero(np.repeat(histories.learn, self.lengths)))
        """Positions of the interactions that training uses."""
        self.features, self.contexts = (
            {name: torch.from_numpy(values) for name, values in columns.items()}
            for columns in (histories.features, histories.contexts)
        )
        people = self.known.person(self.features)
        # Users without features share one description.
        row, weight = (part.expand(len(self.lengths), -1) for part in people[:2])
        self.people = people._replace(row=row, weight=weight)
        self.around = self.known.around(self.contexts, len(self.items))
        self.described = self.known.items(histories.catalogue.items)
        self._avoided = avoided(histories)

    def data(self, users: Users) -> tuple[Tensor, ...]:
        """The data of these people, padded to a common length, as the arguments of `one`, a row for each person."""
        start, stop = self.histories.indptr[:-1], self.histories.indptr[1:]
        places = np.empty((len(users), int(self.lengths[users].max(initial=0))), dtype=np.int64)
        valid = np.empty(places.shape, dtype=np.bool_)
        split_kernels.pad_items(users, start, stop, np.arange(len(self.items)), places, valid)
        indptr, avoid = self._avoided
        excluded = np.empty((len(users), int(np.diff(indptr)[users].max(initial=0))), dtype=np.int64)
        split_kernels.pad_rows(users, indptr, avoid, self.catalogue.n_items, excluded)
        who, where, real = torch.from_numpy(users), torch.from_numpy(places), torch.from_numpy(valid)
        return (
            torch.where(real, self.items[where], 0),
            real,
            torch.from_numpy(excluded),
            *(values[who] for values in self.features.values()),
            *(values[where] for values in self.contexts.values()),
        )

    def one(self, items: Tensor, valid: Tensor, excluded: Tensor, *others: Tensor) -> Data:
        features = dict(zip(self.features, others, strict=False))
        contexts = dict(zip(self.contexts, others[len(features) :], strict=True))
        return Data(items, valid, excluded, self.catalogue, features, contexts)


@dataclass(frozen=True)
class Adapted:
    """Scores after each person has adapted the common parameters as a device of the method would."""

    method: Method
    shared: Tree
    everyone: Everyone
    rng: Rng
    adapts: bool = True
    """False: nobody adapts, and the common parameters rank."""

    def __call__(self, users: Users, items: Tensor) -> Tensor:
        return self.now(users, torch.arange(len(users)), {}, items)

    def now(self, users: Users, owner: Tensor, circumstances: Mapping[str, Tensor], items: Tensor) -> Tensor:
        """As `homebody.reference.ScoreNow` says; people of similar length adapt together."""
        out = torch.empty(len(owner), len(items))
        size = max(1, ADAPTED_BYTES // sum(value.nbytes for value in self.shared.values()))
        questions = max(1, SCORES_AT_ONCE // max(1, len(items) * self.method.scoring.numbers))
        order = torch.from_numpy(np.argsort(self.everyone.lengths[users], kind="stable"))
        for start in range(0, len(users), size):
            chosen = order[start : start + size]
            some = users[chosen.numpy()]
            data = self.everyone.data(some)
            mine = self._mine(some, data)
            place = torch.full((len(users),), -1).scatter(0, chosen, torch.arange(len(chosen)))[owner]
            asked = (place >= 0).nonzero()[:, 0]
            for first in range(0, len(asked), questions):
                now = asked[first : first + questions]
                whose = place[now]
                trees = {name: value[whose] for name, value in mine.items()}
                around = {name: values[now] for name, values in circumstances.items()}
                out[now] = self._scores(trees, items, around, *(part[whose] for part in data))
        return out

    def _mine(self, users: Users, data: tuple[Tensor, ...]) -> Tree:
        if not self.adapts:
            return {}

        def prepare(key: Tensor, *parts: Tensor) -> Batch:
            return self.method.prepare(self.everyone.one(*parts), Rng(key))

        batches = vmap(prepare)(self.rng.fold(torch.from_numpy(users)).key, *data)
        return adapt_many(self.method, self.shared, {}, batches)

    def _scores(self, mine: Tree, items: Tensor, now: Mapping[str, Tensor], *data: Tensor) -> Tensor:
        def score(mine: Tree, around: Mapping[str, Tensor], *parts: Tensor) -> Tensor:
            return self.method.score(self.shared, mine, self.everyone.one(*parts)._replace(now=around), items)

        return vmap(score)(mine, dict(now), *data)

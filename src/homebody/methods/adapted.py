"""Everyone's data in one place, and the scores of a model that each person adapts to their own history first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.core import Batch, Data, Method, Tree, Users
from homebody.data import split_kernels
from homebody.methods.kernels import adapt_many
from homebody.methods.kernels.mf import avoided
from homebody.models.dssm import Described, Vocabulary
from homebody.reference import Histories
from homebody.rng import Rng

__all__ = ["Adapted", "Everyone", "at"]

ADAPTED_BYTES = 64 << 20
"""Limit on the adapted parameters of the people who are scored together."""
SCORES_AT_ONCE = 1 << 21


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
        # Of whom nothing is known there is one description for all.
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
        """One person's data."""
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
                own = {name: value[whose] for name, value in mine.items()}
                around = {name: values[now] for name, values in circumstances.items()}
                out[now] = self._scores(own, items, around, *(part[whose] for part in data))
        return out

    def _mine(self, users: Users, data: tuple[Tensor, ...]) -> Tree:
        if not self.adapts:
            return {}

        def prepare(key: Tensor, *own: Tensor) -> Batch:
            return self.method.prepare(self.everyone.one(*own), Rng(key))

        batches = vmap(prepare)(self.rng.fold(torch.from_numpy(users)).key, *data)
        return adapt_many(self.method, self.shared, {}, batches)

    def _scores(self, mine: Tree, items: Tensor, now: Mapping[str, Tensor], *data: Tensor) -> Tensor:
        def score(own: Tree, around: Mapping[str, Tensor], *parts: Tensor) -> Tensor:
            return self.method.score(self.shared, own, self.everyone.one(*parts)._replace(now=around), items)

        scores: Tensor = vmap(score)(mine, dict(now), *data)
        return scores


def at(described: Described, place: Tensor) -> Described:
    """The descriptions at these places."""
    return described._replace(row=described.row[place], weight=described.weight[place])

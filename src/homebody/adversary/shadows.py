"""Models of one method on parts of the people, to attack and compare with, and what an outsider computes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import logsigmoid

from homebody import ops
from homebody.core import Catalogue, Method, Tree, Users
from homebody.data.splits import Split
from homebody.errors import several
from homebody.progress import Round
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.simulation.states import LocalStore
from homebody.training import choose, fit

__all__ = ["Lab", "Outsider", "Released", "ShadowModel", "by_features", "trained_for", "whole_histories"]

NEGATIVES = 4
"""Drawn for each of a person's items."""
AT_ONCE = 1 << 21
"""Numbers that scores are computed from together."""
Bools = npt.NDArray[np.bool_]


class Released(NamedTuple):
    """A model that was trained before, on the people of the split who learn."""

    method: Method
    """The method of its last phase."""
    shared: Tree
    seed: int
    epsilon: float
    """Certified for the public, at the δ that `attack` is given."""


class ShadowModel(NamedTuple):
    """A model of some of the people, and who of them took part."""

    method: Method
    shared: Tree
    split: Split
    took: Bools
    """(users) who was in a cohort."""
    epsilon: float


@dataclass
class Lab:
    """Trains models on some of the people, all in the same way."""

    method: Method
    split: Split
    rounds: int
    cohort: int | None
    delta: float
    device: str
    fused: bool
    rng: Rng
    step: Callable[[int, int], None]
    trainings: int = 0
    done: int = 0
    notes: list[str] = field(default_factory=list)

    def generator(self, what: str) -> np.random.Generator:
        return np.random.default_rng(int(self.rng.fold(what).key) % 2**64)

    def trained(self, who: Users, name: str) -> ShadowModel:
        """A model trained on these people alone, as the run trains it. The last round is kept."""
        seed = int(self.rng.fold("training", name).key)
        split = replace(self.split, learn=_marked(who, self.split.n_users))
        size, method, delta = self._size(len(who), name), self.method, self.delta
        each = sum(phase.rounds or self.rounds for phase in method.phases)

        def tell(line: Round) -> None:
            self.step(self.done * each + line.step, self.trainings * each)

        runtime = Simulator(split, device=self.device, fused=self.fused)
        fitted = fit(
            method, runtime, rounds=self.rounds, cohort=size, seed=seed, delta=delta, evaluate_every=0, on_round=tell
        )
        self.done += 1
        took = _took(method, who, self.split.n_users, self.rounds, size, seed)
        return ShadowModel(fitted.method, fitted.shared, split, took, fitted.epsilon["public"])

    def as_released(self, released: Released) -> ShadowModel:
        who = np.flatnonzero(self.split.learn & (self.split.lengths > 0))
        took = _took(self.method, who, self.split.n_users, self.rounds, self.cohort, released.seed)
        return ShadowModel(released.method, released.shared, self.split, took, released.epsilon)

    def outsider(self, model: ShadowModel) -> Outsider:
        """The attacker that reads a model, the same way for every model."""
        return Outsider(model.split, model.method, self.rng.fold("reading"), device=self.device, fused=self.fused)

    def _size(self, members: int, name: str) -> int | None:
        if self.cohort is None or self.cohort <= members:
            return self.cohort
        self.notes.append(
            f"The {name} model has {several(members, 'person', 'people')}, so all are in a round, not {self.cohort:,}."
        )
        return members


def trained_for(method: Method, planned: int, chosen: int) -> int:
    """How many rounds to train so that the last phase ends at step `chosen` and earlier phases stay as they are.

    >>> from homebody.methods.fedmf import FedMF
    >>> trained_for(FedMF(), planned=100, chosen=40)
    40
    """
    *before, _ = method.phases
    if any(phase.rounds is None for phase in before):
        return planned
    return max(1, chosen - sum(phase.rounds or 0 for phase in before))


def whole_histories(split: Split) -> Split:
    """The split in which people who do not learn have as much to train on as members do."""
    bounds = split.bounds.copy()
    bounds[1:3] = np.where(split.learn, bounds[1:3], bounds[3])
    return replace(split, bounds=bounds)


def _took(method: Method, who: Users, n_users: int, rounds: int, cohort: int | None, seed: int) -> Bools:
    """Who was in the cohort of some round, as `fit` draws it."""
    if cohort is None:
        return _marked(who, n_users)
    took = np.zeros(n_users, dtype=np.bool_)
    for phase in method.phases:
        if phase.public:
            continue  # others are in its cohorts
        rng = Rng.of(seed, phase.name)
        for number in range(1, (phase.rounds or rounds) + 1):
            took[choose(who, cohort, rng.fold("cohort", number)).users] = True
    return took


def _marked(who: Users, n_users: int) -> Bools:
    marks = np.zeros(n_users, dtype=np.bool_)
    marks[who] = True
    return marks


def by_features(method: Method, catalogue: Catalogue) -> bool:
    """Whether the shared parameters alone rank items by a person's features: devices hold no state of their own."""
    acting = method.phases[-1].method or method
    if not {"user features", "contexts"} & {*acting.needs, *acting.uses}:
        return False
    shared = acting.init_shared(catalogue, Rng.of(0))
    return not acting.init_local({name: value.cpu() for name, value in shared.items()}, Rng.of(0))


class Outsider(Simulator):
    """Scores people with a released model. Nobody holds local state, whether or not they took part in the training.

    rng: for what is drawn about people; the same for several models, so that all get the same questions.
    """

    def __init__(self, split: Split, method: Method, rng: Rng, *, device: str = "cpu", fused: bool = True) -> None:
        super().__init__(split, device=device, fused=fused)
        self._store = LocalStore(split.lengths, np.flatnonzero(split.lengths > 0))
        self._method = method
        self._draws = rng.fold("draws")
        self.begin(method, rng)

    def preference(self, shared: Tree, users: Users) -> npt.NDArray[np.float64]:
        """How much the model prefers each person's items to others: the mean of log σ(own − other).

        Each item is compared with `NEGATIVES` others, in the same context. Local state, if the method has any, is first
        computed from the person's items, as on a device that joins.
        """
        out = np.empty(len(users))
        order = np.argsort(users)
        samples = max(1, AT_ONCE // (self._method.scoring.numbers * (1 + NEGATIVES)))
        for some, width in self._store.groups(users, samples):
            data = self._data(some, width)
            locals_ = self._fresh(self._method, shared, some)
            if locals_:
                locals_ = self._adapted(self._method, shared, some, locals_, data)
            keys = self._streams(self._own(self._draws), some).key
            preferred = vmap(lambda local, key, *part: self._preferred(shared, local, key, *part))(locals_, keys, *data)
            out[order[np.searchsorted(users, some, sorter=order)]] = preferred.double().cpu().numpy()
        return out

    def _preferred(self, shared: Tree, local: Tree, key: Tensor, *columns: Tensor) -> Tensor:
        data, method = self._client_data(*columns), self._method
        drawn = ops.negatives(Rng(key), data, len(data.items) * NEGATIVES).reshape(-1, NEGATIVES)
        real = data.valid[:, None] & (drawn >= 0)
        items = torch.cat([data.items[:, None], drawn.clamp(min=0)], 1)
        if data.contexts:
            scores = vmap(lambda now, some: method.score(shared, local, data._replace(now=now), some))(
                dict(data.contexts), items
            )
        else:
            scores = method.score(shared, local, data, items.flatten()).reshape(items.shape)
        apart = torch.where(real, logsigmoid(scores[:, :1] - scores[:, 1:]), 0.0)
        return apart.sum() / real.sum().clamp(min=1)

    def lists(self, shared: Tree, users: Users, k: int) -> npt.NDArray[np.int64]:
        """(users, k) the model's top items for each person's features, without their history."""
        seen = [column.reshape(len(users), -1).astype(np.float64) for column in self._seen(users)]
        table = np.concatenate([np.zeros((len(users), 1)), *seen], axis=1)
        _, first, kind = np.unique(table, axis=0, return_index=True, return_inverse=True)
        n_items, distinct = self.catalogue.n_items, users[first]
        size = max(1, AT_ONCE // n_items)
        pieces = (distinct[start : start + size] for start in range(0, len(distinct), size))
        return np.concatenate([self._listed(shared, some, min(k, n_items)) for some in pieces])[kind.reshape(-1)]

    def described(self, users: Users) -> npt.NDArray[np.float32]:
        """(users, columns) each person's features for a classifier: one-hot columns and numbers; texts are left out."""
        around = self.split.encoded["contexts"].columns
        columns = [*self.split.encoded["users"].columns.values(), *(around[name] for name in self._taken[0])]
        tables = [np.zeros((len(users), 0), dtype=np.float32)]
        for column, values in zip(columns, self._seen(users), strict=True):
            if column.kind == "number":
                tables.append(values.astype(np.float32)[:, None])
            elif not column.text:
                codes = values.reshape(len(users), -1).astype(np.int64)
                ones = np.zeros((len(users), column.size + 1), dtype=np.float32)
                np.put_along_axis(ones, codes, 1.0, axis=1)  # padding is -1: the last column
                tables.append(ones[:, :-1])
        return np.concatenate(tables, axis=1)

    def _listed(self, shared: Tree, users: Users, k: int) -> npt.NDArray[np.int64]:
        everything = torch.arange(self.catalogue.n_items, device=self.device)
        # Without history: only what the model makes of features.
        items, valid, excluded, *rest = self._data(users)
        features, others = rest[: len(self._features)], rest[len(self._features) :]
        data = (items[:, :0], valid[:, :0], excluded[:, :0], *features, *(values[:, :0] for values in others))
        now = {name: values[:, None] for name, values in self._latest(users).items()}
        scores = self._scores(self._method, shared, users, data, everything, now or None)
        scores = scores[:, 0] if now else scores
        return torch.topk(scores, k).indices.cpu().numpy()

    def _latest(self, users: Users) -> dict[str, Tensor]:
        """The context of each person's last interaction, if the method reads it."""
        rows = torch.from_numpy(self.split.rows[self.split.bounds[1, users] - 1].astype(np.int64)).to(self.device)
        return {name: values[rows] for name, values in self._taken[0].items()}

    def _seen(self, users: Users) -> list[npt.NDArray[np.generic]]:
        """What the model reads of each person: features, and the last context."""
        features = [values[self._tensor(users)] for values in self._features.values()]
        return [values.cpu().numpy() for values in (*features, *self._latest(users).values())]

    def _holdings(
        self, method: Method, shared: Tree, users: Users, data: tuple[Tensor, ...]
    ) -> Iterator[tuple[slice | Tensor, Tree, Tree]]:
        yield slice(None), shared, self._fresh(method, shared, users)

"""Models of the same method, settings and data, each trained on some of the people: to attack, and to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from homebody.audit.outsiders import Outsider
from homebody.core import Method, Tree, Users
from homebody.counts import several
from homebody.data.splits import Split
from homebody.fit import choose, fit
from homebody.progress import Round
from homebody.rng import Rng
from homebody.simulation import Simulator

__all__ = ["Lab", "Released", "ShadowModel", "trained_for", "whole_histories"]

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
        """A model of these people alone, as the run would make it; the last round stands."""
        seed = int(self.rng.fold("training", name).key)
        split = replace(self.split, learn=_marked(who, self.split.n_users))
        size = self._size(len(who), name)
        method = self.method
        each = sum(phase.rounds or self.rounds for phase in method.phases)

        def tell(line: Round) -> None:
            self.step(self.done * each + line.step, self.trainings * each)

        fitted = fit(
            method,
            Simulator(split, device=self.device, fused=self.fused),
            rounds=self.rounds,
            cohort=size,
            seed=seed,
            delta=self.delta,
            evaluate_every=0,
            on_round=tell,
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
    """The rounds after which a training ends at the model of step `chosen`, where no earlier phase would change too.

    >>> from homebody.methods.fedmf import FedMF
    >>> trained_for(FedMF(), planned=100, chosen=40)
    40
    """
    *before, _ = method.phases
    if any(phase.rounds is None for phase in before):
        return planned
    return max(1, chosen - sum(phase.rounds or 0 for phase in before))


def whole_histories(split: Split) -> Split:
    """The split with all that someone has to train on where they do not learn, as members have it."""
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

"""The only training loop: simulation, cluster and deployment differ in the `Runtime` they pass it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from homebody.core import Evaluated, Method, Runtime, Tree, Users
from homebody.errors import HomebodyError, unknown_name
from homebody.privacy import Ledger
from homebody.rng import Rng

__all__ = ["Best", "Checkpoints", "Fitted", "Progress", "Round", "fit"]

SELECT = "valid/ndcg@10"
"""The round is chosen by this metric unless the caller names another."""


@dataclass(frozen=True)
class Round:
    """What is known after a round; one line of the run record."""

    phase: str
    round: int
    clients: int
    loss: float | None
    metrics: dict[str, float]
    """Empty where the round was not evaluated."""
    epsilon: dict[str, float]
    bytes_up: int
    bytes_down: int
    seconds: float
    """Of wall time, for training."""
    evaluation_seconds: float


@dataclass
class Best:
    """The round chosen on validation."""

    step: int
    evaluated: Evaluated
    shared: Tree
    clients: Tree


@dataclass
class Progress:
    """Everything a run needs to go on from where it stood."""

    step: int = 0
    """Rounds done, over all phases."""
    shared: Tree = field(default_factory=dict)
    server: Tree = field(default_factory=dict)
    clients: Tree = field(default_factory=dict)
    best: Best | None = None


class Checkpoints(Protocol):
    """Where a run's progress survives the process."""

    def load(self) -> Progress | None:
        """The last progress that was saved whole."""

    def due(self) -> bool:
        """Whether it is time to save again."""

    def save(self, progress: Progress) -> None:
        """Replace the saved progress, all or nothing."""


@dataclass(frozen=True)
class Fitted:
    """A trained model: the shared parameters, and a runtime whose clients hold the rest."""

    method: Method
    runtime: Runtime
    shared: Tree
    evaluated: Evaluated
    """At the round chosen on validation."""
    chosen: int
    """That round, counted over all phases."""
    ledger: Ledger

    @property
    def metrics(self) -> dict[str, float]:
        """On test under bare names, on validation under `valid/`."""
        return self.evaluated.metrics

    @property
    def epsilon(self) -> dict[str, float]:
        """Certified ε for each observer."""
        return self.ledger.epsilons()

    def recommend(self, user: int, k: int = 10) -> list[tuple[int, float]]:
        """A client's best new items and their scores, computed on its device."""
        return self.runtime.recommend(self.method, self.shared, user, k)


def fit(
    method: Method,
    runtime: Runtime,
    *,
    rounds: int = 100,
    cohort: int | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    evaluate_every: int = 1,
    select: str = SELECT,
    on_round: Callable[[Round], None] | None = None,
    checkpoints: Checkpoints | None = None,
) -> Fitted:
    """Train: choose cohort → charge ledger → collect through the channel → server step → evaluate → record.

    cohort: clients a round; None takes all. evaluate_every: 0 never evaluates and keeps the last round.
    """
    if rounds < 1:
        raise HomebodyError(f"Rounds must be at least 1, not {rounds}.")
    if evaluate_every < 0:
        raise HomebodyError(f"evaluate-every must be 0 (never) or more, not {evaluate_every}.")
    ledger = Ledger() if ledger is None else ledger
    progress = (checkpoints.load() if checkpoints else None) or Progress()
    start = 0
    for phase in method.phases:
        acting, end = phase.method or method, start + (phase.rounds or rounds)
        if progress.step < end:
            rng = Rng.of(seed, phase.name)
            _enter(acting, runtime, progress, rng, fresh=progress.step == start)
            for step in range(progress.step + 1, end + 1):
                number = step - start
                who = choose(runtime.available(), cohort, rng.fold("cohort", number))
                ledger.charge(f"{phase.name}/{number}", acting.uplink.charges())
                began = time.perf_counter()
                got = runtime.collect(acting, progress.shared, who, rng.fold("round", number), step)
                progress.shared, progress.server = acting.server(progress.shared, progress.server, got.total)
                trained = time.perf_counter()
                _refuse_divergence(progress.shared, number)
                progress.step, evaluated = step, Evaluated({})
                if evaluate_every and (number % evaluate_every == 0 or step == end):
                    evaluated = runtime.evaluate(acting, progress.shared)
                    if progress.best is None or _better(evaluated, progress.best.evaluated, select):
                        progress.best = Best(step, evaluated, progress.shared, runtime.state())
                if on_round:
                    seconds = (trained - began, time.perf_counter() - trained)
                    on_round(
                        Round(phase.name, number, len(who), got.loss, evaluated.metrics, ledger.epsilons(),
                              got.bytes_up, got.bytes_down, *seconds)
                    )  # fmt: skip
                if checkpoints and (step == end or checkpoints.due()):
                    progress.clients = runtime.state()
                    checkpoints.save(progress)
        start = end
    if progress.best is None:
        return Fitted(acting, runtime, progress.shared, Evaluated({}), progress.step, ledger)
    runtime.load_state(progress.best.clients)
    best = progress.best
    return Fitted(acting, runtime, best.shared, best.evaluated, best.step, ledger)


def choose(available: Users, size: int | None, rng: Rng) -> Users:
    """A cohort of fixed size without replacement, in ascending order."""
    if not len(available):
        raise HomebodyError("No client is available to train with.")
    if size is None:
        return available
    if not 1 <= size <= len(available):
        raise HomebodyError(f"A cohort has 1 to {len(available)} clients here, not {size}.")
    generator = np.random.default_rng(int(rng.key) % 2**64)
    return np.sort(generator.choice(available, size, replace=False))


def _enter(method: Method, runtime: Runtime, progress: Progress, rng: Rng, fresh: bool) -> None:
    """Begin a phase, or come back to its middle."""
    runtime.begin(method, rng.fold("clients"))
    if not fresh:
        runtime.load_state(progress.clients)
        return
    shared = method.init_shared(runtime.catalogue, rng.fold("shared"))
    kept = {n: v for n, v in progress.shared.items() if n in shared and shared[n].shape == v.shape}
    progress.shared = {name: value.to(runtime.device) for name, value in (shared | kept).items()}
    progress.server = method.init_server(progress.shared)
    progress.best = None


def _better(new: Evaluated, old: Evaluated, select: str) -> bool:
    if select not in new.metrics:
        raise unknown_name("metric to choose the round by", select, new.metrics)
    return new.metrics[select] > old.metrics[select]


def _refuse_divergence(shared: Tree, number: int) -> None:
    for name, value in shared.items():
        if not bool(torch.isfinite(value).all()):
            raise HomebodyError(
                f"Training diverged in round {number}: '{name}' is no longer finite. A smaller learning rate helps."
            )

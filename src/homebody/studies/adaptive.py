"""Adaptive search: Optuna chooses each trial's settings from the trials before it, and ends those that fall behind.

| file      | what                                                                                |
|-----------|-------------------------------------------------------------------------------------|
| optuna.db | Optuna's own storage, in SQLite: settings, validation by round and states of all trials |

Settings are chosen by a Gaussian process and its expected improvement (Jones et al., Efficient Global Optimization,
1998): with so few trials it finds better ones than Optuna's default, TPE. A trial is ended when its best round so far
is below the lowest quarter of the finished trials at the same round; Golovin et al. (Google Vizier, KDD 2017) take the
median.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from homebody.errors import HomebodyError, install
from homebody.settings import Range
from homebody.studies.space import Space, every_point, points, size, tidied, within

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import RDBStorage
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial, Trial

__all__ = ["STORAGE", "Adaptive", "adaptive", "has_optuna", "insist_on_optuna"]

STORAGE = "optuna.db"
DIVERGED = "diverged"
"""The attribute of a trial that diverged, with the error."""
NEEDS = f"Adaptive search needs Optuna: {install('tune')}. Or give --strategy even, which spreads the settings evenly."
EVEN = 4
"""The first trials are spread evenly; there is little to learn from fewer."""
FINISHED = 4
"""No trial is ended before so many have finished."""
KEPT = 75.0
"""Per cent of the finished trials among which a trial must be to go on. It is not the half, because trials that are
ended early do not count: the better a search gets, the better those are that it has finished."""
LOOKS = 20
"""How often a trial is compared with the others, at most; the first quarter of its rounds is left in peace."""
DRAWS = 4
"""How often settings are drawn until there are some that were not tried; then come the next of the even spread."""


def has_optuna() -> bool:
    """Whether adaptive search is possible here."""
    return importlib.util.find_spec("optuna") is not None


def insist_on_optuna() -> None:
    """Refuse an adaptive search where Optuna is not installed."""
    if not has_optuna():
        raise HomebodyError(NEEDS)


class Adaptive:
    """The settings of one search, as Optuna chooses them. Only one process works on it."""

    prunes = True

    def __init__(self, study: Study, first: Mapping[str, Any], space: Space, trials: int, *, larger: bool) -> None:
        """first: the settings of trial 0. larger: whether a larger value is better."""
        self._study, self._space, self._trials, self._larger = study, space, trials, larger
        self._inside = all(within(where, first[name]) for name, where in space.items())
        self._first = dict(first)
        study.sampler = _sampler(space, self._first, study.user_attrs["seed"], inside=self._inside)
        self._open: dict[int, Trial] = {}
        self._reached: dict[int, tuple[int, float | None]] = {}
        """Of each open trial, the last round that was reported, and the best value so far."""

    def known(self) -> list[dict[str, Any]]:
        """The settings of the trials so far. Those that were cut short are open again."""
        from optuna.trial import Trial, TrialState

        known = self._study.get_trials(deepcopy=False)[: self._trials]
        for trial in known:
            if trial.state == TrialState.RUNNING and trial.number not in self._open:
                reported = trial.intermediate_values
                self._open[trial.number] = Trial(self._study, trial._trial_id)
                last = trial.last_step
                self._reached[trial.number] = (0, None) if last is None else (last, reported[last])
        return [self._settle(trial.number) for trial in known]

    def pruned(self) -> dict[int, float | None]:
        """The trials that were ended early, with their best value until then."""
        from optuna.trial import TrialState

        ended = self._study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        return {trial.number: trial.value for trial in ended if DIVERGED not in trial.user_attrs}

    def ask(self) -> dict[str, Any] | None:
        """The next settings, or None if no more are to be tried."""
        count = len(self._study.get_trials(deepcopy=False))
        if count >= min(self._trials, size(self._space) + (not self._inside)):
            return None
        trial = self._study.ask()
        self._open[trial.number], self._reached[trial.number] = trial, (0, None)
        return self._settle(trial.number)

    def report(self, number: int, measured: Mapping[int, float], rounds: int) -> bool:
        """Take in a trial's values by round; whether it is to be ended now."""
        if (trial := self._open.get(number)) is None:
            return False  # it was told before, and runs again only because its record is lost
        every = -(-rounds // LOOKS)
        seen, best = self._reached[number]
        ended = False
        for step, value in sorted(measured.items()):
            if math.isfinite(value) and (best is None or (value > best if self._larger else value < best)):
                best = value
            if best is not None and step // every > seen // every and step < rounds:
                seen = step
                trial.report(best, step)
                ended = ended or (4 * step >= rounds and bool(trial.should_prune()))
        self._reached[number] = seen, best
        return ended

    def tell(self, number: int, value: float | None, error: str = "") -> None:
        """How a trial ended: its value, or None if it was ended early or diverged; then with the error."""
        from optuna.trial import TrialState

        if (trial := self._open.pop(number, None)) is None:
            return
        if value is not None and not math.isfinite(value):
            value, error = None, f"The value is {value}."  # which Optuna refuses
        if error:
            trial.set_user_attr(DIVERGED, error)
        # Optuna's sampler learns nothing from a trial that failed, and keeps away from where one was pruned.
        self._study.tell(number, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)

    def _settle(self, number: int) -> dict[str, Any]:
        """A trial's settings; one that is open gets those that it lacks, as if it had never been cut short."""
        if number == 0 and not self._inside:
            return dict(self._first)  # Optuna cannot hold values outside the ranges
        if (trial := self._open.get(number)) is not None:
            for name, where in self._space.items():
                _suggest(trial, name, where)
        params = self._study.get_trials(deepcopy=False)[number].params
        return {name: params[name] for name in self._space}


@contextmanager
def adaptive(
    folder: Path,
    name: str,
    first: Mapping[str, Any],
    space: Space,
    trials: int,
    *,
    seed: int,
    metric: str,
    larger: bool,
) -> Iterator[Adaptive]:
    """An adaptive search that is stored in this folder under this name, begun or continued."""
    import optuna

    verbosity, file = optuna.logging.get_verbosity(), folder / STORAGE
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    begun = file.exists()
    try:
        with _storing(file), _connected(file) as storage:
            study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction="maximize" if larger else "minimize",
                pruner=optuna.pruners.PercentilePruner(KEPT, n_startup_trials=FINISHED),
                load_if_exists=True,
            )
            study.set_user_attr("seed", seed)
            study.set_user_attr("metric", metric)
            begun = True
            yield Adaptive(study, first, space, trials, larger=larger)
    finally:
        if not begun:  # without a study in it the file is of no use
            for part in (file, file.with_name(f"{file.name}-journal")):
                part.unlink(missing_ok=True)
        optuna.logging.set_verbosity(verbosity)


@contextmanager
def _connected(file: Path) -> Iterator[RDBStorage]:
    from optuna.storages import RDBStorage

    storage = RDBStorage(f"sqlite:///{file.resolve()}")
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


@contextmanager
def _storing(file: Path) -> Iterator[None]:
    """Say in a sentence what SQLite refuses."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
        reason = getattr(cause, "orig", None) or type(cause).__name__
        raise HomebodyError(
            f"{file} cannot be read or written ({reason}): make room on its disk; if it is damaged, move it away."
        ) from error


def _suggest(trial: Trial, name: str, where: Range | tuple[Any, ...]) -> None:
    """Have Optuna choose a field, unless it has."""
    if isinstance(where, tuple):
        trial.suggest_categorical(name, where)
    elif isinstance(where.low, int):
        trial.suggest_int(name, where.low, int(where.high), log=where.log)
    else:
        trial.suggest_float(name, where.low, where.high, log=where.log)


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space as Optuna has it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(where: Range | tuple[Any, ...]) -> BaseDistribution:
        if isinstance(where, tuple):
            return CategoricalDistribution(where)
        if isinstance(where.low, int):
            return IntDistribution(where.low, int(where.high), log=where.log)
        return FloatDistribution(where.low, where.high, log=where.log)

    return {name: of(where) for name, where in space.items()}


def _sampler(space: Space, first: Mapping[str, Any], seed: int, *, inside: bool) -> BaseSampler:
    """The defaults, then a few settings of the even spread, then those that a Gaussian process chooses; none twice.

    What it draws depends on the seed, the trial's number and the trials before it alone, so that a search that was
    cut short goes on as if it never had been.
    """
    from optuna.samplers import BaseSampler
    from optuna.trial import TrialState

    class Sampler(BaseSampler):
        def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
            return {} if trial.number == 0 and not inside else distributions(space)

        def sample_relative(
            self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
        ) -> dict[str, Any]:
            if not search_space:
                return {}
            if trial.number == 0:
                return dict(first)
            before = study.get_trials(deepcopy=False)[: trial.number]
            tried = [first, *(other.params for other in before)]
            done = sum(other.state == TrialState.COMPLETE for other in before)
            for draw in range(DRAWS if done > 1 and trial.number >= EVEN else 0):
                drawn = np.random.SeedSequence([seed % 2**64, trial.number, draw]).generate_state(1)
                values = tidied(space, _drawn(study.direction, before, search_space, int(drawn[0])))
                if values not in tried:
                    return values
            others = itertools.chain(points(space, seed), every_point(space))
            return next(point for point in others if point not in tried)

        def sample_independent(self, *_: Any) -> Any:
            raise AssertionError("all fields are sampled together")

    return Sampler()


def _drawn(
    direction: StudyDirection, before: Sequence[FrozenTrial], space: dict[str, BaseDistribution], seed: int
) -> dict[str, Any]:
    """The settings that promise most, given the trials so far.

    Optuna's sampler would learn nothing from trials that were ended early or diverged, and come back to where they
    are. Here they count: see `_scored`.
    """
    import optuna
    from optuna.trial import TrialState

    known = [trial for trial in before if trial.params.keys() == space.keys()]
    values = _scored(direction, known)
    seen = optuna.create_study(direction="maximize")
    for trial in known:
        if trial.state == TrialState.RUNNING:
            seen.add_trial(optuna.create_trial(state=trial.state, params=trial.params, distributions=space))
        else:
            value = values[trial.number]
            seen.add_trial(optuna.create_trial(value=value, params=trial.params, distributions=space))
    sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=0)
    number = seen.ask()._trial_id
    return sampler.sample_relative(seen, seen._storage.get_trial(number), space)


def _scored(direction: StudyDirection, known: Sequence[FrozenTrial]) -> dict[int, float]:
    """A score below 0 for each trial that is over, 0 for the best: the log of how far it is behind, in steps of what
    the median is behind. One that was ended early or diverged counts as the worst.

    Trials differ most among the bad ones, where it does not matter, and would hide the small differences among the
    good ones from the model.
    """
    from optuna.study import StudyDirection
    from optuna.trial import TrialState

    done = TrialState.COMPLETE
    sign = -1.0 if direction == StudyDirection.MINIMIZE else 1.0
    over = [trial for trial in known if trial.state != TrialState.RUNNING]
    finished = {trial.number: sign * trial.value for trial in over if trial.value is not None and trial.state == done}
    best, worst = max(finished.values()), min(finished.values())
    step = best - statistics.median(finished.values()) or 1.0
    return {trial.number: -math.log1p((best - finished.get(trial.number, worst)) / step) for trial in over}

"""Look for better hyper-parameters: trials over a search space, chosen on validation, kept and continued.

| file       | what                                                                              |
|------------|-----------------------------------------------------------------------------------|
| study.json | what was asked, every trial with its validation metric, and the best               |
| best.toml  | the recipe of the best trial                                                       |
| optuna.db  | of an adaptive search: see `homebody.studies.adaptive`                             |
| trials/    | a run's record for each trial and seed                                             |
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

from homebody.errors import HomebodyError, refuse_unknown, several
from homebody.evaluation.metrics import ERRORS
from homebody.files import insisting, private_folder
from homebody.methods import find
from homebody.recipe import Recipe, fingerprint
from homebody.report import RunFolder
from homebody.run import InMemory, Watcher, prepare
from homebody.settings import check_counts, params
from homebody.studies.adaptive import adaptive, has_optuna, insist_on_optuna
from homebody.studies.cells import CellProgress, cell_key, code_version, commit, count_done, run_cells
from homebody.studies.space import Space, points, size, space_text, within

__all__ = ["Search", "Strategy", "command", "strategy_of", "tune"]

SCHEMA_VERSION = 1
Strategy = Literal["adaptive", "even"]
"""Each trial is chosen by Optuna from those before it, or trials are spread evenly over the space."""
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True)
class Search:
    """A search for hyper-parameters: a recipe, the ranges of its fields, and how many trials."""

    recipe: Recipe
    """Its `fields` are fixed; its seed is the first one, and that of the draw."""
    space: Space
    trials: int = 8
    seeds: int = 1
    strategy: Strategy = "even"
    mark: str = ""
    """A fingerprint of the data, if they are in memory and the recipe only names them."""

    @property
    def name(self) -> str:
        """The folder's name. It does not depend on the number of trials, so a search can be extended."""
        asked = {"recipe": self.recipe.to_toml(), "space": _texts(self.space), "seeds": self.seeds}
        if self.strategy != "even":
            asked["strategy"] = self.strategy
        if self.mark:
            asked["data"] = self.mark
        short = (self.recipe.short_method, Path(self.recipe.data).stem)
        readable = "-".join(re.sub(r"[^\w.-]+", "_", part)[:40] for part in short)
        return f"tune-{readable}-{fingerprint({'study': json.dumps(asked).encode()})[:12]}"

    def first(self) -> dict[str, Any]:
        """The varied fields of trial 0: the defaults."""
        defaults = {spec.name: spec.default for spec in params(find(self.recipe.method))}
        return {name: defaults[name] for name in self.space}

    def settings(self) -> list[dict[str, Any]]:
        """The varied fields of each trial, spread evenly: the defaults first, and none twice; fewer if there are no
        more."""
        first = self.first()
        others = (point for point in points(self.space, self.recipe.seed) if point != first)
        return [first, *islice(others, self.trials - 1)]

    @property
    def larger(self) -> bool:
        """Whether a larger value of the metric is better."""
        return self.recipe.selects().rpartition("/")[2] not in ERRORS

    def possible(self) -> float:
        """How many trials there can be, of different settings."""
        first = self.first()
        return size(self.space) + (not all(within(where, first[name]) for name, where in self.space.items()))

    def recipes(self, setting: dict[str, Any]) -> list[Recipe]:
        """A trial's runs, one for each seed."""
        chosen = {**self.recipe.fields, **setting}
        return [replace(self.recipe, fields=chosen, seed=self.recipe.seed + k) for k in range(self.seeds)]


def strategy_of(asked: str | None) -> Strategy:
    """The strategy that was asked for; by default adaptive where that is possible.

    >>> strategy_of("even")
    'even'
    """
    if asked is None:
        return "adaptive" if has_optuna() else "even"
    refuse_unknown("strategy", [asked], STRATEGIES)
    return cast(Strategy, asked)


class Chooser(Protocol):
    """What chooses the settings of trials."""

    prunes: bool
    """Whether it may end a trial early."""

    def known(self) -> Sequence[dict[str, Any]]:
        """The settings of the trials so far."""

    def pruned(self) -> Mapping[int, float | None]:
        """Those of them that were ended early, with their best value until then."""

    def ask(self) -> dict[str, Any] | None:
        """The next settings to try, or None."""

    def report(self, number: int, measured: Mapping[int, float], rounds: int) -> bool:
        """Take in values of a trial by round, of so many rounds; whether to end it now."""

    def tell(self, number: int, value: float | None, error: str = "") -> None:
        """How a trial ended: its value, or None if it was ended early or diverged; then with the error."""


class Even:
    """All settings are known from the start, and no trial is ended early."""

    prunes = False

    def __init__(self, settings: Sequence[dict[str, Any]]) -> None:
        self._settings = settings

    def known(self) -> Sequence[dict[str, Any]]:
        return self._settings

    def pruned(self) -> Mapping[int, float | None]:
        return {}

    def ask(self) -> dict[str, Any] | None:
        return None

    def report(self, number: int, measured: Mapping[int, float], rounds: int) -> bool:
        return False

    def tell(self, number: int, value: float | None, error: str = "") -> None:
        pass


def tune(
    search: Search,
    out: Path,
    *,
    jobs: int = 1,
    watch: Callable[[CellProgress, dict[str, Any]], None] | None = None,
    watcher: Watcher | None = None,
    data: InMemory | None = None,
) -> dict[str, Any]:
    """Run the trials that are not done yet and return the record; `watch` receives it as it grows.

    data: what is learnt from, instead of what the recipe names; the search's `mark` tells it from other data.
    """
    _check(search)
    check_counts(jobs=jobs)
    watcher = watcher or Watcher()
    path = out / search.name
    settings = [search.first()] if search.strategy == "adaptive" else search.settings()
    recipes = [recipe for setting in settings for recipe in search.recipes(setting)]
    if count_done(recipes, path / "trials") < len(recipes):
        prepare(recipes[0], watcher, data)
    if (possible := search.possible()) < search.trials:
        watcher.say(f"There are only {possible} different settings to try.")
    with insisting(f"No search can be written below {out}"):
        private_folder(path)
    folder = RunFolder(path)
    with folder.alone(), _plan(search, settings, path) as plan:
        watcher.begun(path)
        study = _Study(search, plan, folder, watch)
        run_cells(
            study.known(),
            path / "trials",
            jobs=jobs,
            watch=study.progress,
            say=watcher.say,
            on_error="keep",
            keep_state=False,
            more=study.more,
            data=data,
        )
        record = study.written(complete=True)
        best = record["best"]
        if best is None:
            first = next(row["error"] for row in record["trials"])
            raise HomebodyError(f"None of {several(len(study.trials), 'trial')} came to an end; the first: {first}")
        folder.write_text("best.toml", search.recipes(best["fields"])[0].to_toml())
        return {**record, "study": str(path)}


def _plan(search: Search, settings: Sequence[dict[str, Any]], path: Path) -> contextlib.AbstractContextManager[Chooser]:
    if search.strategy == "even":
        return contextlib.nullcontext(Even(settings))
    return adaptive(
        path,
        cell_key(search.recipe),  # of the code and the data too: after a change, trials are new ones
        search.first(),
        search.space,
        search.trials,
        seed=search.recipe.seed,
        metric=search.recipe.selects(),
        larger=search.larger,
    )


@dataclass
class _Trial:
    """A trial: its settings, and a run for each seed with what came of it."""

    fields: dict[str, Any]
    runs: list[Recipe]
    results: list[dict[str, Any] | None]
    pruned: bool = False
    reached: float | None = None
    """The best value of a trial that was ended early."""

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [result for result in self.results if result and "error" in result]

    @property
    def settled(self) -> bool:
        return self.pruned or bool(self.failed) or None not in self.results


@dataclass
class _Study:
    """A search under way: which cell is whose run, and what is known of each trial."""

    search: Search
    plan: Chooser
    folder: RunFolder
    watch: Callable[[CellProgress, dict[str, Any]], None] | None
    trials: list[_Trial] = field(default_factory=list)
    cells: list[tuple[int, int]] = field(default_factory=list)
    """The trial and the run of each cell that was given out."""
    waiting: deque[tuple[int, int]] = field(default_factory=deque)

    def known(self) -> list[Recipe]:
        """The cells of the trials that there are: those that are done tell their results again."""
        pruned = self.plan.pruned()
        for number, fields in enumerate(self.plan.known()):
            self._add(fields)
            self.trials[number].pruned, self.trials[number].reached = number in pruned, pruned.get(number)
        self.waiting = deque((trial, run) for trial, run in self.waiting if trial not in pruned)
        self.record = self.written()
        return [self._give() for _ in range(len(self.waiting))]

    def more(self) -> Recipe | None:
        """Another cell, if there is one now."""
        if not self.waiting and (fields := self.plan.ask()) is not None:
            self._add(fields)
        return self._give() if self.waiting else None

    def progress(self, now: CellProgress) -> bool:
        """Take in how far a cell is; whether its trial is to be ended."""
        number, run = self.cells[now.cell]
        trial = self.trials[number]
        prune = False
        if now.result is None:
            if run == 0 and now.measured and not trial.settled:
                prune = self.plan.report(number, now.measured, now.planned)
        elif not trial.settled:
            self._ended(number, run, now.result)
        if self.watch:
            self.watch(now, self.record)
        return prune

    def _ended(self, number: int, run: int, result: dict[str, Any]) -> None:
        trial = self.trials[number]
        if "cut_short" in result:
            trial.pruned = True
            self.plan.tell(number, None)
            trial.reached = self.plan.pruned()[number]
        else:
            trial.results[run] = result
            if trial.failed and result["diverged"]:  # any other failure may not come again
                self.plan.tell(number, None, trial.failed[0]["error"])
            elif trial.settled and not trial.failed:
                self.plan.tell(number, statistics.fmean(self._values(trial)))
            elif run == 0 and self.plan.prunes:
                self.waiting.extend((number, other) for other in range(1, self.search.seeds))
        if trial.settled:
            self.record = self.written()

    def _add(self, fields: dict[str, Any]) -> None:
        runs = self.search.recipes(fields)
        # Where a trial may be ended by its first run, the others wait for that.
        count = 1 if self.plan.prunes else len(runs)
        self.waiting.extend((len(self.trials), run) for run in range(count))
        self.trials.append(_Trial(fields, runs, [None] * len(runs)))

    def _give(self) -> Recipe:
        trial, run = self.waiting.popleft()
        self.cells.append((trial, run))
        return self.trials[trial].runs[run]

    def _values(self, trial: _Trial) -> list[float]:
        metric = self.search.recipe.selects().removeprefix("valid/")
        return [float(result["validation"][metric]) for result in trial.results if result]

    def written(self, *, complete: bool = False) -> dict[str, Any]:
        """All that is known so far, as it was just written. Only the best trial's test metrics are in it, and only
        once all are done."""
        record = _record(self.search, self.trials, [self._outcome(trial) for trial in self.trials], complete)
        self.folder.write_json("study.json", record)
        return record

    def _outcome(self, trial: _Trial) -> dict[str, Any]:
        """What came of one trial."""
        runs = [f"trials/{cell_key(recipe)}" for recipe in trial.runs]
        nothing = {"validation": None, "by_seed": None, "seconds": None, "runs": runs}
        if trial.failed:
            return {"status": "failed", **nothing, "error": trial.failed[0]["error"]}
        if trial.pruned:
            return {"status": "pruned", **nothing, "validation": trial.reached, "runs": runs[:1]}
        if not trial.settled:
            return {"status": "waiting", **nothing}
        values = self._values(trial)
        seconds = sum(result["seconds"] for result in trial.results if result)
        return {
            "status": "done",
            "validation": statistics.fmean(values),
            "by_seed": values,
            "seconds": seconds,
            "runs": runs,
        }


def command(recipe: Recipe) -> str:
    """What to type to run a recipe.

    >>> command(Recipe("fedmf", "ml-100k", fields={"factors": 8}, rounds=20, filters={"core": 5}))
    'homebody run fedmf --data ml-100k --rounds 20 --filter core=5 --set factors=8'
    """
    return shlex.join(["homebody", "run", recipe.method, *recipe.options()])


def _check(search: Search) -> None:
    recipe = search.recipe
    recipe.check()
    recipe.build()
    check_counts(trials=search.trials, seeds=search.seeds)
    if search.strategy == "adaptive":
        insist_on_optuna()
    if not recipe.selects().startswith("valid/"):
        raise HomebodyError(f"Trials are chosen on validation, by a metric under valid/, not by '{recipe.selects()}'.")
    for name in search.space:
        if name in recipe.fields:
            raise HomebodyError(f"{name} is fixed and searched at once: leave out --set {name} or --search {name}.")
    if not search.space and search.trials > 1:
        raise HomebodyError(
            f"There is nothing to vary in {recipe.short_method}: name a field and where to look, "
            "as --search field=low:high."
        )


def _record(
    search: Search, trials: Sequence[_Trial], outcomes: Sequence[dict[str, Any]], complete: bool
) -> dict[str, Any]:
    rows = [
        {"trial": number, "fields": trial.fields, **outcome}
        for number, (trial, outcome) in enumerate(zip(trials, outcomes, strict=True))
    ]
    done = [row for row in rows if row["status"] == "done"]
    best: dict[str, Any] | None = None
    if done:
        sign = 1.0 if search.larger else -1.0
        top = max(done, key=lambda row: (sign * row["validation"], -row["trial"]))
        chosen = trials[top["trial"]]
        best = {name: top[name] for name in ("trial", "fields", "validation")}
        best |= {"command": command(chosen.runs[0]), "test": None}
        if complete:
            tested = [result["metrics"] for result in chosen.results if result]
            best["test"] = {name: statistics.fmean(metrics[name] for metrics in tested) for name in tested[0]}
    known = {name: value for name, value in asdict(search.recipe).items() if value is not None}
    return {
        "schema": SCHEMA_VERSION,
        "spec": {
            "method": search.recipe.method,
            "data": search.recipe.data,
            "strategy": search.strategy,
            "trials": search.trials,
            "seeds": search.seeds,
            "select": search.recipe.selects(),
            "search": _texts(search.space),
            "recipe": known,
        },
        "commit": commit(),
        "code": code_version(search.recipe),
        "complete": complete,
        "trials": rows,
        "best": best,
    }


def _texts(space: Space) -> dict[str, str]:
    return {name: space_text(where) for name, where in space.items()}

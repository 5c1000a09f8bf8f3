"""Better settings for a method, in one call."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from homebody.core import Method
from homebody.data.splits import Split
from homebody.errors import HomebodyError, several
from homebody.markup import html
from homebody.methods import find
from homebody.notebook.asking import Named, data_of, method_of, recipe_of
from homebody.notebook.comparing import records
from homebody.notebook.progress import ProgressLine, watching
from homebody.notebook.wording import python_errors
from homebody.recipe import Recipe, fingerprint
from homebody.reference import Reference
from homebody.run import InMemory
from homebody.settings import Range, check_counts
from homebody.simulation import Simulator
from homebody.studies.cells import CellProgress
from homebody.studies.space import parse_search, search_space, space_text
from homebody.studies.tune import Search, strategy_of
from homebody.studies.tune import tune as run_trials

__all__ = ["Tuned", "tune"]


@dataclass(frozen=True, eq=False, repr=False)
class Tuned:
    """A search for better settings. `best` is the method with those that validation chose.

    >>> import homebody as hb
    >>> few = hb.load("synthetic:users=80,items=40,mean=8")
    >>> found = hb.tune("fedials", few, trials=3, rounds=2, strategy="even", quiet=True)
    >>> found
    <Tuned: fedials on synthetic:users=80,items=40,mean=8, 3 trials; best valid/ndcg@10 ...: factors=...>
    >>> hb.fit(found.best, few, rounds=2, quiet=True).method == found.best
    True
    """

    details: Mapping[str, Any]
    """What the command prints with `--json`."""

    @property
    def best(self) -> Method | Reference:
        """The method with the best settings; `hb.fit(found.best, data)` trains it."""
        return self.recipe.build()

    @property
    def recipe(self) -> Recipe:
        """The best trial's recipe."""
        asked = Recipe(**self.details["spec"]["recipe"])
        return replace(asked, fields={**asked.fields, **self.settings})

    @property
    def settings(self) -> dict[str, Any]:
        """The best values of the fields that were varied."""
        return dict(self.details["best"]["fields"])

    @property
    def validation(self) -> float:
        """The metric that chose, of the best trial."""
        return float(self.details["best"]["validation"])

    @property
    def metrics(self) -> dict[str, float]:
        """Test metrics of the best trial. Those of the others are not shown: they would be a choice on test."""
        return dict(self.details["best"]["test"])

    @property
    def frame(self) -> pl.DataFrame:
        """A row a trial: its settings, how it ended, the metric that chose, and its seconds."""
        trials, metric = self.details["trials"], self.details["spec"]["select"]
        columns: dict[str, list[Any]] = {name: [trial[name] for trial in trials] for name in ("trial", "status")}
        columns |= {name: [trial["fields"][name] for trial in trials] for name in self.settings}
        columns |= {metric: [trial["validation"] for trial in trials]}
        columns |= {"seconds": [trial["seconds"] for trial in trials]}
        return pl.DataFrame(columns, schema_overrides={metric: pl.Float64, "seconds": pl.Float64})

    def _title(self) -> str:
        spec = self.details["spec"]
        method = spec["method"].rpartition(":")[2]
        return f"{method} on {spec['data']}, {several(len(self.details['trials']), 'trial')}"

    def _chosen(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"best {self.details['spec']['select']} {self.validation:.4f}: {fields or 'the defaults'}"

    def __repr__(self) -> str:
        return f"<Tuned: {self._title()}; {self._chosen()}>"

    def _repr_html_(self) -> str:
        frame = self.frame.sort(self.details["spec"]["select"], descending=self._larger(), nulls_last=True)
        rows = [["" if value is None else _short(value) for value in row] for row in frame.iter_rows()]
        return html(self._title(), frame.columns, rows, [self._chosen()], most=10)

    def _larger(self) -> bool:
        return Search(self.recipe, {}).larger


@python_errors
def tune(
    method: Named,
    data: Any,
    *,
    trials: int = 8,
    search: Mapping[str, str | Range | Sequence[Any]] | None = None,
    strategy: str | None = None,
    seeds: int = 1,
    seed: int = 0,
    jobs: int = 1,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Tuned:
    """Search a method's settings and choose the best on validation.

    method, data, quiet, settings: as in `fit`; settings that the method was given are fixed. trials: how many settings
    to try, the defaults first. search: where to look, a field each: "0.01:1:log", a list of values, or a `Range`; by
    default the ranges that the method declares. strategy: "adaptive", which needs Optuna, or "even"; by default
    adaptive where Optuna is installed. seeds: runs of each trial, whose validation is averaged.
    jobs: trials in parallel, for data that is given by name. out: a folder that keeps the search, so that the same call
    goes on after an interruption; by default nothing is kept.

    >>> import homebody as hb
    >>> few = hb.load("synthetic:users=80,items=40,mean=8")
    >>> found = hb.tune(
    ...     hb.FedIALS(factors=4), few, trials=3, search={"regularisation": "0.1:10:log"}, rounds=2, quiet=True
    ... )
    >>> found.best.factors, found.frame.columns
    (4, ['trial', 'status', 'confidence', 'regularisation', 'valid/ndcg@10', 'seconds'])
    """
    check_counts(trials=trials, seeds=seeds, jobs=jobs)
    if search is not None and not isinstance(search, Mapping):
        raise HomebodyError(f"search names fields and where to look, as in {{'factors': [8, 16]}}, not {search!r}.")
    line = ProgressLine(quiet=quiet)
    with watching("data", line) as watcher:
        given = data_of(data, watcher)
    recipe = recipe_of(method_of(method), given, {**settings, "seed": seed})
    if jobs > 1 and not isinstance(given, str):
        raise HomebodyError(
            f"jobs={jobs} needs data that other processes can read: name a data set or a file, or leave jobs out."
        )
    kind = find(recipe.method)
    declared, _ = search_space(kind)
    asked = parse_search(kind, [f"{name}={_text(where)}" for name, where in (search or {}).items()])
    space = {**{name: where for name, where in declared.items() if name not in recipe.fields}, **asked}
    mark = "" if isinstance(given, str) else fingerprint_of(given)
    wanted = Search(recipe, space, trials, seeds, strategy_of(strategy), mark)

    def watch(now: CellProgress, record: Mapping[str, Any]) -> None:
        best = record["best"]
        told = f", best {recipe.selects()} {best['validation']:.4f}" if best else ""
        done = sum(trial["status"] != "waiting" for trial in record["trials"])
        line.show(f"tune {recipe.short_method}: {done} of {trials} trials, round {now.done} of {now.planned}{told}")

    with records(out) as folder, watching("tune", line) as watcher:
        memory = None if isinstance(given, str) else given
        record = run_trials(wanted, folder, jobs=jobs, watch=watch, watcher=watcher, data=memory)
    return Tuned(record)


def fingerprint_of(data: InMemory) -> str:
    """What tells data in memory from other data.

    >>> import homebody as hb
    >>> one, other = (hb.load(f"synthetic:users=30,items=20,mean=6,seed={seed}") for seed in (0, 1))
    >>> fingerprint_of(one) == fingerprint_of(other), fingerprint_of(one) == fingerprint_of(hb.split(one))
    (False, False)
    """
    split = data.split if isinstance(data, Simulator) else data
    population = split.population if isinstance(split, Split) else split
    arrays = {name: getattr(population, name) for name in ("indptr", "items", "times", "ratings")}
    parts = {name: np.ascontiguousarray(array).data for name, array in arrays.items() if array is not None}
    for name in ("user_features", "item_features", "contexts"):
        if (features := getattr(population, name)) is not None:
            features.table.write_ipc(content := io.BytesIO())
            parts[name] = content.getbuffer()
    if isinstance(split, Split):
        about = (split.way, split.protocol, split.how, split.seed, split.negatives)
        parts |= {name: np.ascontiguousarray(getattr(split, name)).data for name in ("rows", "bounds", "learn")}
        parts["about"] = memoryview(repr(about).encode())
    return fingerprint(parts)


def _text(where: str | Range | Sequence[Any]) -> str:
    """Where to look, as the command takes it."""
    return where if isinstance(where, str) else space_text(where if isinstance(where, Range) else tuple(where))


def _short(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value

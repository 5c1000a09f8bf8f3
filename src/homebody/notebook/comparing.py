"""Several methods on the same data, side by side."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from homebody.errors import HomebodyError, several
from homebody.markup import html
from homebody.notebook.asking import MethodSettings, Named, data_of, loaded, method_of, population_in, recipe_of
from homebody.notebook.fitted import Fitted
from homebody.notebook.plots import Plot
from homebody.notebook.progress import ProgressLine, watching
from homebody.notebook.wording import in_python, python_errors
from homebody.recipe import Recipe
from homebody.report.comparison import METRICS, comparison_columns, legend, reference_rows, summarise_runs
from homebody.report.svg import DotPanel, DotRow, dot_chart
from homebody.report.words import metric_name
from homebody.run import InMemory, finish
from homebody.settings import check_counts
from homebody.studies.leaderboard import fitting, table_of

__all__ = ["Comparison", "compare", "leaderboard", "records"]


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Methods side by side. `frame` has the figures, `details` what the command prints with `--json`.

    >>> import homebody as hb
    >>> few = hb.load("synthetic:users=120,items=60,mean=10")
    >>> found = hb.compare(["popularity", "ials"], few, seeds=2, quiet=True)
    >>> found
    <Comparison: 2 methods on synthetic:users=120,items=60,mean=10, 2 seeds; best: ...>
    >>> found.frame.columns[:3]
    ['method', 'hr@10', 'hr@10 sd']
    """

    details: Mapping[str, Any]

    @property
    def best(self) -> str:
        """The method of the best mean NDCG."""
        return str(self.details["best"]).rpartition(":")[2]

    @property
    def frame(self) -> pl.DataFrame:
        """A row a method: mean and deviation of each metric, p against the best, ε for each observer, costs."""
        rows = self.details["methods"]
        figures: dict[str, list[Any]] = {"method": [_name(row) for row in rows]}
        if any("kind" in row for row in rows):
            figures["kind"] = [row["kind"] for row in rows]
        for name in _metrics(rows):
            spread = [row["metrics"].get(name, {}) for row in rows]
            figures |= {name: [each.get("mean") for each in spread], f"{name} sd": [each.get("sd") for each in spread]}
        figures["p"] = [row.get("p_against_best") for row in rows]
        for who in rows[0]["epsilon"]:
            figures[f"epsilon/{who}"] = [float(row["epsilon"][who]) for row in rows]
        figures |= {name: [row[name] for row in rows] for name in ("rounds", "bytes_up", "bytes_down", "seconds")}
        kinds = {name: pl.Float64 for name in figures if name not in ("method", "kind", "rounds")}
        return pl.DataFrame(figures, schema_overrides=kinds)

    @property
    def remarks(self) -> list[str]:
        """What the columns mean, and what a reader must know besides."""
        skipped = [f"not in the table: {each['name']}: {each['reason']}" for each in self.details.get("skipped", [])]
        said = self.details["legend"] if "legend" in self.details else [*legend(self.details), *self.details["notes"]]
        return [in_python(line) for line in (*self.details.get("cautions", []), *said, *skipped)]

    def plot(self, metric: str = "ndcg@10") -> Plot:
        """Each method's mean as a dot, with the deviation over seeds."""
        rows = self.details["methods"]
        if metric not in rows[0]["metrics"]:
            raise HomebodyError(f"There is no metric '{metric}' here. Known: {', '.join(rows[0]['metrics'])}.")
        means = [(_name(row), row["metrics"][metric]) for row in rows]
        dots = [DotRow(name, None, spread["mean"], spread["sd"] or 0.0) for name, spread in means]
        return Plot(dot_chart(self._title(), metric_name(metric), [DotPanel("", dots)]))

    def _title(self) -> str:
        return f"{self.details['data']}, protocol {self.details['protocol']}, {self._seeds()}"

    def _seeds(self) -> str:
        return several(len(self.details["seeds"]), "seed")

    def __repr__(self) -> str:
        methods = several(len(self.details["methods"]), "method")
        return f"<Comparison: {methods} on {self.details['data']}, {self._seeds()}; best: {self.best}>"

    def __str__(self) -> str:
        """The table as the command prints it."""
        from rich.console import Console

        from homebody.report.terminal import comparison_table

        text = io.StringIO()
        rows = [{**row, "name": _name(row)} for row in self.details["methods"]]
        console = Console(file=text, width=120)
        comparison_table({**self.details, "methods": rows}, console)
        return text.getvalue() + "\n".join(self.remarks)

    def _repr_html_(self) -> str:
        columns = comparison_columns(list(self.details["methods"][0]["epsilon"]))
        methods = [(_name(row), row) for row in self.details["methods"]]
        methods += [(f"{row['name']} (reference)", row) for row in reference_rows(self.details)]
        rows = [(name, *(column.text(row) for column in columns)) for name, row in methods]
        headings = ("method", *(column.heading for column in columns))
        return html(self._title(), headings, rows, self.remarks, most=len(rows))


class ComparedMethod(NamedTuple):
    """One method of a comparison, and what it is called there."""

    label: str
    method: MethodSettings | Fitted


@python_errors
def compare(
    methods: Iterable[Named | Fitted] | Mapping[str, Named | Fitted],
    data: Any = None,
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Methods side by side on the same data: mean and deviation over seeds, and which differ from the best.

    methods: as `fit` takes them, or models that `fit` gave, which are not trained again; in a mapping, under names of
    your own. data, out, quiet, settings: as in `fit`. seeds: how many seeds each method is run with, from 0.
    All methods are asked the same questions, so users are compared in pairs (sign flips, Holm's correction).

    >>> import homebody as hb
    >>> few = hb.load("synthetic:users=120,items=60,mean=10")
    >>> sizes = {"small": hb.FedIALS(factors=2), "large": hb.FedIALS(factors=16)}
    >>> hb.compare(sizes, few, seeds=1, rounds=2, quiet=True).frame["method"].to_list()
    ['small', 'large']
    """
    _check_seeds(seeds)
    entries = _labelled(methods)
    line = ProgressLine(quiet=quiet)
    with records(out) as folder:
        results = [_as(entry.label, entry.method.result) for entry in entries if isinstance(entry.method, Fitted)]
        _refuse_unlike([entry.method for entry in entries if isinstance(entry.method, Fitted)])
        todo = [(entry.label, entry.method) for entry in entries if isinstance(entry.method, MethodSettings)]
        if todo:
            if data is None:
                raise HomebodyError("Methods are compared on data: hb.compare(methods, data).")
            given = _read(data, todo[0][1], settings, line)
            recipes = [
                (label, recipe_of(method, given[1], {**settings, "seed": seed}))
                for label, method in todo
                for seed in range(seeds)
            ]
            for _, recipe in recipes:
                recipe.build()  # a senseless one is refused before any is run
            results += [
                _as(
                    label,
                    _run(
                        recipe,
                        given[0],
                        folder,
                        line,
                        f"run {number} of {len(recipes)}: {label}",
                        lasting=out is not None,
                    ),
                )
                for number, (label, recipe) in enumerate(recipes, start=1)
            ]
        order = {entry.label: place for place, entry in enumerate(entries)}
        results.sort(key=lambda result: order[result["method"]])
        return Comparison(_kept(summarise_runs(results), out))


@python_errors
def leaderboard(
    data: Any,
    *,
    methods: Iterable[Named] = (),
    seeds: int = 3,
    out: str | Path | None = None,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """All methods that this data has enough for, or those named, with accuracy, ε and costs, best first.

    A method that fails is left out, and the remarks say why. data, out, quiet, settings: as in `fit`; seeds: how many.

    >>> import homebody as hb
    >>> few = hb.load("synthetic:users=80,items=40,mean=8")
    >>> board = hb.leaderboard(few, methods=["ials", "popularity"], seeds=1, quiet=True)
    >>> sorted(board.frame["kind"])
    ['centralised', 'centralised']
    """
    _check_seeds(seeds)
    line = ProgressLine(quiet=quiet)
    named = {each.label: each.method for each in _labelled(methods) if isinstance(each.method, MethodSettings)}
    given = _read(data, next(iter(named.values()), method_of("popularity")), settings, line)
    entrants = fitting(population_in(given[0]), [method.name for method in named.values()])
    known = {method.name: method for method in named.values()}
    chosen = [known.get(name) or method_of(name) for name in entrants.some()]
    results: list[dict[str, Any]] = []
    with records(out) as folder:
        for method in chosen:
            for seed in range(seeds):
                number = len(results) + 1
                recipe = recipe_of(method, given[1], {**settings, "seed": seed})
                label = f"run {number} of {len(chosen) * seeds}: {recipe.short_method}"
                try:
                    results.append(_run(recipe, given[0], folder, line, label, lasting=out is not None))
                except HomebodyError as error:
                    results.append({"method": method.name, "error": str(error)})
        return Comparison(_kept(table_of(results, entrants), out))


def _labelled(methods: Iterable[Named | Fitted] | Mapping[str, Named | Fitted]) -> list[ComparedMethod]:
    """Each method with its name; two of the same name are told apart by their settings."""
    if isinstance(methods, Mapping):
        return [ComparedMethod(str(label), _settings(method)) for label, method in methods.items()]
    if isinstance(methods, str) or not isinstance(methods, Iterable):
        raise HomebodyError("hb.compare takes a list of methods, such as ['fedials', hb.FedMF(factors=16)].")
    given = [_settings(method) for method in methods]
    names = [_short(method) for method in given]
    entries = [
        ComparedMethod(f"{name} {_apart(method)}".strip() if names.count(name) > 1 else name, method)
        for name, method in zip(names, given, strict=True)
    ]
    labels = [entry.label for entry in entries]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise HomebodyError(f"{twice} stands twice: name them, as in hb.compare({{'first': …, 'second': …}}, data).")
    return entries


def _kept(details: dict[str, Any], out: str | Path | None) -> dict[str, Any]:
    """Without the folders of runs that go when the call ends."""
    if out is None:
        details["methods"] = [{**row, "runs": []} for row in details["methods"]]
    return details


def _check_seeds(seeds: object) -> None:
    """Refuse anything but how many seeds there are."""
    if not isinstance(seeds, int) or isinstance(seeds, bool):
        raise HomebodyError(f"seeds is how many seeds each method is run with, such as 3, not {seeds!r}.")
    check_counts(seeds=seeds)


def _settings(method: Named | Fitted) -> MethodSettings | Fitted:
    return method if isinstance(method, Fitted) else method_of(method)


def _short(method: MethodSettings | Fitted) -> str:
    return (method.recipe.method if isinstance(method, Fitted) else method.name).rpartition(":")[2]


def _apart(method: MethodSettings | Fitted) -> str:
    """The settings that differ from the defaults."""
    fields, stages = (
        (method.recipe.fields, method.recipe.stages) if isinstance(method, Fitted) else (method.fields, method.stages)
    )
    return " ".join([*(f"{name}={value}" for name, value in fields.items()), *stages])


def _refuse_unlike(models: Sequence[Fitted]) -> None:
    """Refuse models that were asked different questions."""
    for model in models[1:]:
        one, other = models[0].split, model.split
        same = one.protocol == other.protocol and one.n_users == other.n_users
        if not (same and np.array_equal(one.bounds, other.bounds) and np.array_equal(one.items, other.items)):
            raise HomebodyError(f"{models[0]!r} and {model!r} were asked different questions: train both on one split.")


def _read(data: Any, method: MethodSettings, settings: Mapping[str, Any], line: ProgressLine) -> tuple[InMemory, Any]:
    """The data in memory, and as it was given."""
    with watching("data", line) as watcher:
        given = data_of(data, watcher)
        return loaded(recipe_of(method, given, settings), given, watcher), given


def _run(
    recipe: Recipe, data: InMemory, folder: Path, line: ProgressLine, label: str, *, lasting: bool
) -> dict[str, Any]:
    with watching(label, line, recipe.selects()) as watcher:
        done = finish(recipe, folder, watcher, data=data, lasting=lasting)
    return {**done.result}


def _as(label: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {**result, "method": label}


@contextmanager
def records(out: str | Path | None) -> Iterator[Path]:
    """Where the records go: a folder that goes too, unless one is named."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="homebody-") as folder:
        yield Path(folder)


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("name") or row["method"]).rpartition(":")[2]


def _metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that stand in a table, first the usual ones."""
    known = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    return [name for name in METRICS if name in known] or known[:4]

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

from homebody.data import Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError, several
from homebody.evaluation.metrics import main_cutoff
from homebody.files import path_of
from homebody.markup import html
from homebody.notebook.asking import MethodSettings, Named, data_of, loaded, method_of, population_in, recipe_of
from homebody.notebook.fitted import Fitted
from homebody.notebook.plots import Plot, refuse_unmeasured
from homebody.notebook.progress import ProgressLine, watching
from homebody.notebook.wording import in_python, python_errors
from homebody.recipe import Recipe, under_one_budget
from homebody.report.comparison import (
    METRICS,
    comparison_columns,
    in_common,
    legend,
    reference_rows,
    refuse_unlike,
    seeds_of,
    summarise_runs,
)
from homebody.report.svg import DotPanel, DotRow, dot_chart
from homebody.report.words import metric_name
from homebody.run import InMemory, finish, settled
from homebody.settings import check_counts, is_count
from homebody.simulation import Simulator
from homebody.studies.leaderboard import fitting, table_of

__all__ = ["Comparison", "compare", "leaderboard", "records"]

ASKED = ("split", "protocol", "negatives", "public", "held_out", "cutoffs")
"""What runs that are compared have in common, beside their people and items."""


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
        refuse_unmeasured([metric], rows[0]["metrics"])
        means = [(_name(row), row["metrics"][metric]) for row in rows]
        dots = [DotRow(name, None, spread["mean"], spread["sd"] or 0.0) for name, spread in means]
        return Plot(dot_chart(self._title(), metric_name(metric), [DotPanel("", dots)]))

    def _title(self) -> str:
        return f"{self.details['data']}, protocol {self.details['protocol']}, {self._seeds()}"

    def _seeds(self) -> str:
        return seeds_of(self.details)

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


class AskedRun(NamedTuple):
    """What a run asks of its users."""

    label: str
    fields: Mapping[str, Any]
    people: Population
    seed: int
    split_seed: int
    """What decides who is asked what; by default the run's own seed."""


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
    if not (entries := _labelled(methods)):
        raise HomebodyError("There is no method to compare: name one or more, such as ['fedials', 'popularity'].")
    line = ProgressLine(quiet=quiet)
    trained = [(entry.label, entry.method) for entry in entries if isinstance(entry.method, Fitted)]
    todo = [(entry.label, entry.method) for entry in entries if isinstance(entry.method, MethodSettings)]
    if todo and data is None:
        raise HomebodyError("Methods are compared on data: hb.compare(methods, data).")
    if settings and not todo:
        raise HomebodyError(f"These models are trained already: leave out {next(iter(settings))}.")
    asked = [_asked_of(label, model.recipe, model.split) for label, model in trained]
    recipes: list[tuple[str, Recipe]] = []
    given: tuple[InMemory, Any] | None = None
    if data is not None:
        given = _read(data, todo[0][1] if todo else method_of("popularity"), settings, line)
        recipes = [
            (label, recipe_of(method, given[1], {**settings, "seed": seed}))
            for label, method in todo
            for seed in range(seeds)
        ]
        for _, recipe in recipes:
            recipe.build()  # a senseless one is refused before any is run
        rows, notes = under_one_budget([recipe for _, recipe in recipes])
        recipes = [(label, row) for (label, _), row in zip(recipes, rows, strict=True)]
        for note in notes:
            line.say(note)
        asked += [_asked_of(label, settled(recipe, given[0]), given[0]) for label, recipe in recipes]
        if trained and not todo:
            asked.append(asked[0]._replace(label="the data", people=population_in(given[0])))
    _refuse_unlike(asked)
    results = [_as(label, model.result) for label, model in trained]
    with records(out) as folder:
        for number, (label, recipe) in enumerate(recipes, start=1):
            said = f"run {number} of {len(recipes)}: {label}"
            assert given is not None
            results.append(_as(label, _run(recipe, given[0], folder, line, said, lasting=out is not None)))
        order = {entry.label: place for place, entry in enumerate(entries)}
        results.sort(key=lambda result: order[result["method"]])
        return Comparison(_kept(summarise_runs(in_common(results)), out))


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
    if not is_count(seeds):
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


def _asked_of(label: str, recipe: Recipe, data: InMemory) -> AskedRun:
    """What a run of this recipe on this data asks of its users."""
    split = data.split if isinstance(data, Simulator) else data
    people = population_in(data)
    how = recipe.held_out or ("random" if people.times is None else "latest")
    fields = {
        **{name: getattr(recipe, name) for name in ("split", "protocol", "negatives", "public")},
        "held_out": split.how if isinstance(split, Split) else how,
        # Users are compared in pairs at this list length alone.
        "cutoffs": main_cutoff(recipe.measured()),
    }
    return AskedRun(label, fields, people, recipe.seed, split.seed if isinstance(split, Split) else recipe.seed)


def _refuse_unlike(asked: Sequence[AskedRun]) -> None:
    """Refuse runs that do not compare; those of one seed are compared user by user, so their splits are the same."""
    refuse_unlike([(each.label, each.fields) for each in asked], ASKED)
    for seed in dict.fromkeys(each.seed for each in asked):
        same = [(each.label, {"the seed of the split": each.split_seed}) for each in asked if each.seed == seed]
        refuse_unlike(same, ["the seed of the split"])
    _refuse_other_people(asked)


def _refuse_other_people(asked: Sequence[AskedRun]) -> None:
    """Refuse runs of other people or items: their figures do not compare."""
    for each in asked[1:]:
        one, other = asked[0].people, each.people
        if one is other:
            continue
        same = (one.n_users, one.n_items) == (other.n_users, other.n_items) and _same_ids(one, other)
        if one.n_interactions and other.n_interactions:  # a model may have been kept without its people
            same = same and np.array_equal(one.indptr, other.indptr) and np.array_equal(one.items, other.items)
        if not same:
            sizes = [
                f"{name} has {people.name} ({several(people.n_users, 'user')}, {several(people.n_items, 'item')}, "
                f"{several(people.n_interactions, 'interaction')})"
                for name, people in ((asked[0].label, one), (each.label, other))
            ]
            raise HomebodyError(
                f"These runs do not compare, because their interactions differ: {' and '.join(sizes)}. "
                "Train both on the same data."
            )


def _same_ids(one: Population, other: Population) -> bool:
    if one.item_ids is None or other.item_ids is None:
        return one.item_ids is other.item_ids
    return one.item_ids.cast(pl.String).equals(other.item_ids.cast(pl.String))


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
        yield path_of(out)
        return
    with tempfile.TemporaryDirectory(prefix="homebody-") as folder:
        yield Path(folder)


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("name") or row["method"]).rpartition(":")[2]


def _metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that stand in a table, first the usual ones."""
    known = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    return [name for name in METRICS if name in known] or known[:4]

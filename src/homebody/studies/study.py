"""A study is one table or figure of a paper: its rows, the recipe of each run, and the published figures."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from homebody.data.splits import PROTOCOLS
from homebody.errors import HomebodyError, unknown_name
from homebody.privacy.specs import with_noise
from homebody.recipe import Recipe
from homebody.report.words import ATTACKS, OF_RUNS, QUANTITIES, VIEW_ATTACK
from homebody.settings import KINDS as VALUES
from homebody.settings import fits
from homebody.studies import probes
from homebody.studies.serving import serving_probe

__all__ = [
    "COMPUTED",
    "COUNTS",
    "EPSILON",
    "KINDS",
    "Reader",
    "Row",
    "Study",
    "check_names",
    "check_study",
    "deviations",
    "insist_distinct",
    "published",
    "spending",
]

Form = Literal["table", "figure"]
KINDS: dict[Form, tuple[str, ...]] = {
    "table": ("table", "pairs", "sweep", "serving", "accounting", "membership", "statistics"),
    "figure": (
        *("table", "convergence", "sweep", "serving", "tables", "embedding", "adaptation"),
        *("lengths", "view-attack", "noise"),
    ),
}
COMPUTED = {
    "accounting": ("epsilon_public", "certified"),
    "lengths": ("people", "counted"),
    "statistics": ("count", "counted"),
    "noise": ("noise_scale", "computed"),
}
"""Kinds that no run is made for: what they show, and what stands in place of a protocol."""
LISTED = ("sweep", "serving", "accounting", "noise")
"""Kinds whose published figures are a list for each value, where they have any."""
COUNTS = ("news", "users", "impressions", "positive samples", "negative samples")
"""What a table of statistics may count: the names of its rows."""
SWEPT = ("sweep", "serving")
"""Kinds that may vary a setting of their runs."""
EPSILON = "run.epsilon"
"""What a sweep over the ε of the runs' budgets varies. ∞ is a run without noise."""
OURS = {"method", "data", "fields", "seed", "protocol", "rounds", "data_dir"}
"""Recipe fields that have their own place in a paper's recipe."""
RUN = {spec.name for spec in fields(Recipe)} - OURS
DEFAULTS = {"cutoffs": [5, 10, 20]}


@dataclass(frozen=True)
class Row:
    """One line of a table, or one curve of a figure."""

    name: str
    method: str | None = None
    """None where this version has no such method: `missing` says why."""
    fields: dict[str, Any] = field(default_factory=dict)
    on: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields that differ from data set to data set."""
    run: dict[str, Any] = field(default_factory=dict)
    run_on: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of the run that differ from data set to data set."""
    rounds: int | None = None
    published: dict[str, list[Any]] = field(default_factory=dict)
    """By data set, a figure a metric; in a sweep, a list of them for each value."""
    note: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    """By data set."""
    missing: str = ""
    published_sd: dict[str, list[Any]] = field(default_factory=dict)
    """The deviations beside the published figures, in the same shape."""
    values: list[Any] = field(default_factory=list)
    """In a sweep, this row's own, in place of the study's."""
    slice: dict[str, str] = field(default_factory=dict)
    """By data set, the group of users that this row is about."""
    seeds: int | None = None
    """This row's own number of seeds, in place of the study's."""
    fixed: bool = False
    """In a sweep, whether the values do not concern it: a baseline for the others."""
    diverges: bool = False
    """Whether training is known to diverge: that is then what the row shows, and no failure."""
    release: dict[str, Any] = field(default_factory=dict)
    """In an account, what a round tells; the study's own is for all rows."""
    serving: dict[str, Any] = field(default_factory=dict)
    """Of a serving study, the fields of the method that its finished model is asked under; none: as it was trained."""

    def note_on(self, data: str) -> str:
        return " ".join(filter(None, (self.note, self.notes.get(data, ""))))

    def metric_on(self, data: str, metric: str) -> str:
        """What a run's result calls this row's metric."""
        return f"{self.slice[data]}/{metric}" if data in self.slice and metric not in QUANTITIES else metric


@dataclass(frozen=True)
class Study:
    """A table or a figure: what is run for it, and how it is shown."""

    form: Form
    kind: str
    """One of `KINDS`: a table, pairs with their improvement, a sweep, curves over rounds, a probe, or a computation."""
    id: str
    title: str
    metrics: list[str]
    also: list[str]
    """Quantities of a run that stand beside the metrics, without a published figure."""
    scale: float
    data: list[str]
    protocols: list[str]
    seeds: int
    rounds: int | None
    run: dict[str, Any]
    run_on: dict[str, dict[str, Any]]
    """Settings of a run that differ from data set to data set."""
    rows: list[Row]
    vary: str = ""
    """In a sweep, what changes: fields.NAME, of the method, or run.NAME, of the run; in a serving study also
    serving.NAME, of the requests. Of an adaptation, the field."""
    values: list[Any] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """What the values are called on a page."""
    axis: str = ""
    """What it is that changes, for people."""
    lines: bool = False
    """Of a sweep, whether a picture shows it as lines over its values."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Names of rows: one without, one with what is being tried."""
    note: str = ""
    optional: list[str] = field(default_factory=list)
    """Data sets that are left out where they are not at hand, unless they are asked for by name."""
    release: dict[str, Any] = field(default_factory=dict)
    """In an account, what a round tells, as far as rows have it in common."""
    attack: dict[str, Any] = field(default_factory=dict)
    """Settings of the attacks on its models."""
    orders: list[tuple[str, str]] = field(default_factory=list)
    """Names of two rows whose order in the paper is compared with the obtained one."""

    def probe_at(self, row: Row, point: int = 0) -> str:
        """The probe of the model behind a point; empty where the run itself is shown."""
        if self.kind != "serving":
            return probes.probe_of(self.kind, self.vary, self.values, self.attack)
        place, _, name = self.vary.partition(".")
        varied = {name: self.points(row)[point]} if place == "serving" and not row.fixed else {}
        return serving_probe({**row.serving, **varied}) if row.serving else ""

    @property
    def listed(self) -> bool:
        """Whether a row has a point for each value, and not one line of figures."""
        return self.kind in LISTED and (self.kind != "serving" or bool(self.vary))

    @property
    def label(self) -> str:
        return f"{self.form.capitalize()} {self.id}"

    @property
    def against(self) -> str:
        """The protocol under which our figures are compared with the published ones."""
        return "published" if "published" in self.protocols else self.protocols[0]

    def seeds_of(self, row: Row) -> int:
        """How many seeds a row is run with."""
        return row.seeds or self.seeds

    def points(self, row: Row) -> list[Any]:
        """A row's values in a sweep; a table or a curve has one point that is no value."""
        if row.fixed:
            return [None] * len(self.values)
        return (row.values or self.values) or [None]

    def recipe(self, row: Row, data: str, protocol: str, seed: int, value: Any = None) -> Recipe:
        """One cell: what is run for one row, data set, protocol, seed and (in a sweep) value."""
        assert row.method is not None
        fields = {**row.fields, **row.on.get(data, {})}
        run = {**self.run, **self.run_on.get(data, {}), **row.run, **row.run_on.get(data, {})}
        rounds = row.rounds if row.rounds is not None else self.rounds
        if self.vary == "run.rounds" and not row.fixed:
            rounds = value
        elif self.vary == EPSILON and not row.fixed:
            run = spending(run, value)
        elif self.kind in SWEPT and not row.fixed:
            place, _, name = self.vary.partition(".")
            {"fields": fields, "run": run}.get(place, {})[name] = value
        lengths = {int(match[1]) for metric in self.metrics if (match := re.search(r"@(\d+)$", metric))}
        if "cutoffs" not in run and not lengths <= set(DEFAULTS["cutoffs"]):
            run["cutoffs"] = sorted(lengths.union(DEFAULTS["cutoffs"]))
        return Recipe(row.method, data, fields=fields, rounds=rounds, seed=seed, protocol=protocol, **run)


def spending(run: Mapping[str, Any], epsilon: float) -> dict[str, Any]:
    """The settings of a run with this ε in its budget; with ∞ there is neither a budget nor noise.

    >>> spending({"budget": "eps=8,observer=server", "calibrate": True}, 0.5)
    {'budget': 'eps=0.5,observer=server', 'calibrate': True}
    >>> spending({"budget": "eps=8", "calibrate": True, "stages": ["clip:norm=1", "gaussian"]}, math.inf)
    {'stages': ['clip:norm=1', 'gaussian:z=0.0']}
    """
    if "budget" not in run or not run.get("calibrate"):
        raise HomebodyError("To vary run.epsilon, give run a budget, and calibrate = true.")
    if math.isfinite(epsilon):
        return {**run, "budget": re.sub(r"\beps=[^,]*", f"eps={epsilon:g}", run["budget"])}
    if "stages" not in run:
        raise HomebodyError("To vary run.epsilon up to inf, give run its stages: they are run without their noise.")
    others = {name: value for name, value in run.items() if name not in ("budget", "calibrate")}
    return {**others, "stages": with_noise(run["stages"], 0.0)}


def published(study: Study, row: Row, data: str, point: int = 0) -> dict[str, float]:
    """The published figure of each metric, in parts of one; where there is none, the metric is left out."""
    return _printed(study, row.published.get(data, []), point)


def deviations(study: Study, row: Row, data: str, point: int = 0) -> dict[str, float]:
    """The deviation of each published figure, where the paper has one."""
    return _printed(study, row.published_sd.get(data, []), point)


def _printed(study: Study, figures: list[Any], point: int) -> dict[str, float]:
    if study.listed and figures:
        figures = figures[point]
    return {
        metric: figure if metric in QUANTITIES else figure / study.scale
        for metric, figure in zip(study.metrics, figures, strict=False)
        if not math.isnan(figure)
    }


def check_study(study: Study, where: str, *, load: bool = True) -> None:
    """Raise for what only a whole study shows: figures that do not fit, methods that refuse their fields.

    load: False loads no method.
    """
    if study.kind not in COMPUTED:
        check_names("protocol", study.protocols, PROTOCOLS, where)
    check_names("quantity of a run", study.also, OF_RUNS, where)
    if study.kind == "membership":
        check_names("figure of an attack", study.metrics, ATTACKS, where)
    if study.kind == "view-attack":
        check_names("figure of an attack on a view", study.metrics, VIEW_ATTACK, where)
    check_names("row", [name for pair in study.orders for name in pair], [row.name for row in study.rows], where)
    if not study.rows and study.kind != "lengths":
        raise HomebodyError(f"{where}: it has no [[row]].")
    if study.seeds < 1:
        raise HomebodyError(f"{where}: seeds must be at least 1, not {study.seeds}.")
    if not study.scale > 0:
        raise HomebodyError(f"{where}: scale must be above 0, not {study.scale:g}.")
    _check_by_data(study, study.run_on, "run_on", dict, where)
    _check_by_data(study, dict.fromkeys(study.optional, ""), "optional", str, where)
    insist_distinct([row.name for row in study.rows], where, "rows named")
    if study.kind == "statistics":
        check_names("count", [row.name for row in study.rows], COUNTS, where)
    for row in study.rows:
        _check_row(study, row, f"{where}, row '{row.name}'", load)


def check_names(what: str, names: Iterable[str], known: Collection[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise at(where, unknown_name(what, name, known))


def _check_by_data(study: Study, given: dict[str, Any], part: str, kind: type, where: str) -> None:
    for data, value in given.items():
        check_names(f"data set of this {study.form} in '{part}'", [data], study.data, where)
        if not isinstance(value, kind):
            wanted = {"dict": "a table of settings", "str": "a text", "list": "a list of figures"}[kind.__name__]
            raise HomebodyError(f"{where}: {part}.{data} must be {wanted}, not {value!r}.")


def _check_row(study: Study, row: Row, where: str, load: bool) -> None:
    parts = {"on": dict, "run_on": dict, "notes": str, "slice": str, "published": list, "published_sd": list}
    for part, kind in parts.items():
        _check_by_data(study, getattr(row, part), part, kind, where)
    for settings in (study.run, *study.run_on.values(), row.run, *row.run_on.values()):
        check_names("setting of a run", settings, RUN, where)
    for part in ("published", "published_sd"):
        for data, figures in getattr(row, part).items():
            _check_figures(study, f"{part}.{data}", figures, where)
    if row.seeds is not None and row.seeds < 1:
        raise HomebodyError(f"{where}: seeds must be at least 1, not {row.seeds}.")
    if row.values and (study.kind not in SWEPT or len(row.values) != len(study.values)):
        raise HomebodyError(f"{where}: values are for a sweep, and as many as it has ({len(study.values)}).")
    if row.fixed and (study.kind not in SWEPT or not study.vary or row.values):
        raise HomebodyError(f"{where}: fixed is for a row of a sweep that has no values of its own.")
    if row.serving and study.kind != "serving":
        raise HomebodyError(f"{where}: serving is for a row of a {study.form} of kind 'serving'.")
    if study.vary.startswith("serving.") and not row.serving and not row.fixed:
        raise HomebodyError(f"{where}: its requests have no settings: give it serving, or fixed = true.")
    if row.method is None:
        return
    for data in study.data:
        for point, value in enumerate(study.points(row)):
            try:
                recipe = study.recipe(row, data, study.protocols[0], 0, value)
                recipe.check()
                method = recipe.build() if load else None
                if (probe := study.probe_at(row, point)) and method is not None:
                    probes.refuse(probe, method, recipe.method)
            except HomebodyError as error:
                raise at(where, error) from error
            if data in row.slice and row.slice[data] not in recipe.slices:
                raise HomebodyError(
                    f"{where}: slice.{data} is {row.slice[data]}, which its runs on {data} do not report: "
                    f'add run_on.{data} = {{ slices = ["{row.slice[data]}"] }}.'
                )


def _check_figures(study: Study, name: str, given: Sequence[Any], where: str) -> None:
    lists = given if study.listed else [given]
    wanted = f"{len(study.metrics)} figures ({', '.join(study.metrics)})"
    if study.listed and len(given) != len(study.values):
        raise HomebodyError(f"{where}: {name} must have {len(study.values)} lists, one for each value.")
    for figures in lists:
        if not isinstance(figures, list) or not all(type(number) in (int, float) for number in figures):
            raise HomebodyError(f"{where}: {name} must be a list of {wanted}, not {figures!r}.")
        if len(figures) != len(study.metrics):
            raise HomebodyError(f"{where}: {name} has {len(figures)} figures, and the {study.form} {wanted}.")


def insist_distinct(names: Sequence[str], where: str, what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise HomebodyError(f"{where}: there are {names.count(name)} {what} '{name}'; each needs its own.")


def at(where: str, error: HomebodyError) -> HomebodyError:
    return HomebodyError(f"{where}: {error}")


class Reader:
    """Takes values out of a TOML table one by one, each of its kind; what is left over is refused."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = dict(values), where
        self.known: list[str] = []

    def take(self, name: str, kind: type, default: Any = MISSING) -> Any:
        self.known.append(name)
        if name not in self.values:
            if default is MISSING:
                near = difflib.get_close_matches(name, self.values, n=1)
                raise self.error(f"'{name}' is missing" + (f" (is '{near[0]}' meant?)" if near else ""))
            return default
        value = self.values.pop(name)
        if not fits(value, kind):
            raise self.error(f"'{name}' must be {VALUES[kind]}, not {value!r}")
        return float(value) if kind is float else value

    def identity(self) -> str:
        """The number or letter that the paper gives it, written as a text or as a number."""
        if type(self.values.get("id")) is int:
            self.values["id"] = str(self.values["id"])
        identity: str = self.take("id", str)
        self.where = f"{self.where.rpartition(' ')[0]} {identity}"
        return identity

    def texts(self, name: str, default: Any = MISSING) -> list[str]:
        """At least one; a default may be none."""
        if name not in self.values and default is not MISSING:
            self.known.append(name)
            return list(default)
        values: list[str] = self.take(name, list)
        if not values or not all(isinstance(value, str) for value in values):
            raise self.error(f"'{name}' must be a list of at least one text, not {values!r}")
        insist_distinct(values, self.where, f"entries of '{name}' called")
        return list(values)

    def tables(self, name: str) -> Iterator[dict[str, Any]]:
        values = self.take(name, list, [])
        for value in values:
            if not isinstance(value, dict):
                raise self.error(f"'{name}' must be written as [[{name}]], not {value!r}")
            yield value

    def done(self) -> None:
        for name in self.values:
            raise self.wrong(unknown_name("key", name, self.known))

    def error(self, text: str) -> HomebodyError:
        return HomebodyError(f"{self.where}: {text}.")

    def wrong(self, error: HomebodyError) -> HomebodyError:
        return at(self.where, error)

"""A paper's recipe: which runs its tables and figures need, and what was published.

It is a folder with a `recipe.toml`; docs/reproducing.md explains the format to authors.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import homebody
from homebody.data.splits import PROTOCOLS
from homebody.errors import HomebodyError, unknown_name
from homebody.methods import METHODS
from homebody.recipe import Recipe
from homebody.studies import probes
from homebody.studies.reader import Reader, at, insist_distinct

__all__ = ["Paper", "Row", "Study", "find_paper", "list_papers", "read_paper"]

SCHEMA_VERSION = 1
FILE = "recipe.toml"
FIGURES = ("convergence", "sweep", *probes.PROBES)
OURS = {"method", "data", "fields", "seed", "protocol", "rounds", "data_dir"}
"""Recipe fields that have their own place in a paper's recipe."""
RUN = {spec.name for spec in fields(Recipe)} - OURS
DEFAULTS = {"cutoffs": [5, 10, 20]}


@dataclass(frozen=True)
class Row:
    """One line of a table, or one curve of a figure."""

    name: str
    method: str | None
    """None where this version has no such method: `missing` says why."""
    fields: dict[str, Any]
    on: dict[str, dict[str, Any]]
    """Fields that differ from data set to data set."""
    run: dict[str, Any]
    rounds: int | None
    published: dict[str, list[Any]]
    """By data set, a figure a metric; in a sweep, a list of them for each value."""
    note: str
    notes: dict[str, str]
    """By data set."""
    missing: str

    def note_on(self, data: str) -> str:
        return " ".join(filter(None, (self.note, self.notes.get(data, ""))))


@dataclass(frozen=True)
class Study:
    """A table or a figure: what is run for it, and how it is shown."""

    kind: str
    """table, convergence, sweep, or a probe: tables, embedding."""
    id: str
    title: str
    metrics: list[str]
    scale: float
    data: list[str]
    protocols: list[str]
    seeds: int
    rounds: int | None
    run: dict[str, Any]
    rows: list[Row]
    vary: str = ""
    """In a sweep, what changes: fields.NAME, of the method, or run.NAME, of the run."""
    values: list[Any] = field(default_factory=list)
    note: str = ""

    @property
    def label(self) -> str:
        return f"{'Table' if self.kind == 'table' else 'Figure'} {self.id}"

    @property
    def points(self) -> list[Any]:
        """The values of a sweep; a table or a curve has one point that is no value."""
        return self.values or [None]

    def recipe(self, row: Row, data: str, protocol: str, seed: int, value: Any = None) -> Recipe:
        """One cell: what is run for one row, data set, protocol, seed and (in a sweep) value."""
        assert row.method is not None
        own = {**row.fields, **row.on.get(data, {})}
        run = {**self.run, **row.run}
        if self.kind == "sweep":
            place, _, name = self.vary.partition(".")
            (own if place == "fields" else run)[name] = value
        lengths = {int(found[1]) for metric in self.metrics if (found := re.search(r"@(\d+)$", metric))}
        if "cutoffs" not in run and not lengths <= set(DEFAULTS["cutoffs"]):
            run["cutoffs"] = sorted(lengths.union(DEFAULTS["cutoffs"]))
        rounds = row.rounds if row.rounds is not None else self.rounds
        return Recipe(row.method, data, fields=own, rounds=rounds, seed=seed, protocol=protocol, **run)


@dataclass(frozen=True)
class Paper:
    """A paper, its tables and figures."""

    name: str
    folder: Path
    title: str
    citation: str
    docs: str
    note: str
    tables: list[Study]
    figures: list[Study]

    @property
    def studies(self) -> list[Study]:
        return [*self.tables, *self.figures]


def places() -> list[Path]:
    """Where papers are looked for by name: here, in the source checkout, in the installed package."""
    package = Path(homebody.__file__).resolve().parent
    return [Path("experiments"), package.parents[1] / "experiments", package / "experiments"]


def list_papers() -> list[Path]:
    """The folders of all papers that are known by name; the first place that has a name wins."""
    found: dict[str, Path] = {}
    for place in places():
        for file in sorted(place.glob(f"*/{FILE}")):
            found.setdefault(file.parent.name, file.parent)
    return [found[name] for name in sorted(found)]


def find_paper(name: str) -> Path:
    """The folder of a paper: given itself, or by name."""
    given = Path(name)
    if (given / FILE).is_file():
        return given
    known = {folder.name: folder for folder in list_papers()}
    if name in known:
        return known[name]
    if given.is_dir() or len(given.parts) > 1:
        raise HomebodyError(f"{name} holds no {FILE}: give a paper's folder, or its name (see `homebody reproduce`).")
    raise unknown_name("paper", name, known)


def read_paper(folder: Path) -> Paper:
    """Read and check a paper's recipe. What is wrong is said with its place, before anything runs."""
    name = folder.resolve().name
    where = f"{name}/{FILE}"
    try:
        values = tomllib.loads((folder / FILE).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HomebodyError(f"{where} is not valid TOML: {error}.") from error
    except OSError as error:
        raise HomebodyError(f"{where} cannot be read: {error.strerror}.") from error
    top = Reader(values, where)
    if top.take("schema", int, SCHEMA_VERSION) > SCHEMA_VERSION:
        raise HomebodyError(f"{where} was written for a newer Homebody; update to run it.")
    title, citation = top.take("title", str), top.take("citation", str)
    docs, note = top.take("docs", str, ""), top.take("note", str, "")
    tables = [
        _study(Reader(table, f"{where}, table {number}"), folder, "table")
        for number, table in enumerate(top.tables("table"), 1)
    ]
    figures = [
        _figure(Reader(figure, f"{where}, figure {number}"), folder, tables)
        for number, figure in enumerate(top.tables("figure"), 1)
    ]
    top.done()
    if not tables and not figures:
        raise HomebodyError(f"{where} has neither a [[table]] nor a [[figure]].")
    for studies in (tables, figures):
        insist_distinct([study.id for study in studies], where, f"{'tables' if studies is tables else 'figures'} of id")
    return Paper(name, folder, title, citation, docs, note, tables, figures)


def _study(reader: Reader, folder: Path, kind: str, vary: str = "", values: Sequence[Any] = ()) -> Study:
    identity = reader.identity()
    study = Study(
        kind=kind,
        id=identity,
        title=reader.take("title", str),
        metrics=reader.texts("metrics"),
        scale=reader.take("scale", float, 1.0),
        data=reader.texts("data"),
        protocols=reader.texts("protocols", ["published", "strict"]),
        seeds=reader.take("seeds", int, 3),
        rounds=reader.take("rounds", int, None),
        run=reader.take("run", dict, {}),
        note=reader.take("note", str, ""),
        rows=[],
        vary=vary,
        values=list(values),
    )
    for number, row in enumerate(reader.tables("row"), 1):
        called = f" '{row['name']}'" if isinstance(row.get("name"), str) else f" {number}"
        study.rows.append(_row(Reader(row, f"{reader.where}, row{called}"), folder))
    reader.done()
    _check(study, reader.where)
    return study


def _figure(reader: Reader, folder: Path, tables: Sequence[Study]) -> Study:
    kind = reader.take("kind", str)
    if kind not in FIGURES:
        raise reader.wrong(unknown_name("kind of figure", kind, FIGURES))
    vary, values = ("", [])
    if kind == "sweep":
        vary, values = reader.take("vary", str), reader.take("values", list)
        if vary.partition(".")[0] not in ("fields", "run") or not vary.partition(".")[2]:
            raise reader.error(f"vary must be fields.NAME or run.NAME, not '{vary}'")
        if not values:
            raise reader.error("values must name at least one value")
    if kind == "tables":
        vary, values = "probe.item table", list(probes.TABLES)
    source = reader.take("table", str, "")
    if not source:
        return _study(reader, folder, kind, vary, values)
    # The rows of a table, so that nothing is written, or run, twice.
    known = {table.id: table for table in tables}
    if source not in known:
        raise reader.wrong(unknown_name("table", source, known))
    table = known[source]
    rows = {row.name: row for row in table.rows}
    named = reader.texts("rows", list(rows))
    for name in named:
        if name not in rows:
            raise reader.wrong(unknown_name(f"row of table {source}", name, rows))
    study = Study(
        kind=kind,
        id=reader.identity(),
        title=reader.take("title", str),
        metrics=reader.texts("metrics", table.metrics),
        scale=reader.take("scale", float, table.scale),
        data=reader.texts("data", table.data),
        protocols=reader.texts("protocols", table.protocols),
        seeds=reader.take("seeds", int, table.seeds),
        rounds=reader.take("rounds", int, table.rounds),
        run={**table.run, **reader.take("run", dict, {})},
        note=reader.take("note", str, ""),
        # A table's figures and what is said of them say nothing of a curve.
        rows=[replace(rows[name], published={}, note="", notes={}) for name in named],
        vary=vary,
        values=list(values),
    )
    reader.done()
    for place, row in enumerate(study.rows):
        study.rows[place] = replace(row, on={name: own for name, own in row.on.items() if name in study.data})
    _check(study, reader.where)
    return study


def _row(reader: Reader, folder: Path) -> Row:
    name = reader.take("name", str)
    missing = reader.take("missing", str, "")
    method = reader.take("method", str, "" if missing else MISSING)
    path, colon, _ = method.rpartition(":")
    if colon and path.endswith(".py"):
        method = f"{(folder / path).resolve()}{method[len(path) :]}"
    elif method not in METHODS and not missing:
        raise reader.wrong(unknown_name("method", method, METHODS))
    elif method not in METHODS:
        method = ""
    row = Row(
        name=name,
        method=method or None,
        fields=reader.take("fields", dict, {}),
        on=reader.take("on", dict, {}),
        run=reader.take("run", dict, {}),
        rounds=reader.take("rounds", int, None),
        published=reader.take("published", dict, {}),
        note=reader.take("note", str, ""),
        notes=reader.take("notes", dict, {}),
        missing=missing,
    )
    reader.done()
    return row


def _check(study: Study, where: str) -> None:
    """What only shows when a whole table is read: figures that do not fit, methods that refuse their fields."""
    for protocol in study.protocols:
        if protocol not in PROTOCOLS:
            raise at(where, unknown_name("protocol", protocol, PROTOCOLS))
    if not study.rows:
        raise HomebodyError(f"{where}: it has no [[row]].")
    if study.seeds < 1:
        raise HomebodyError(f"{where}: seeds must be at least 1, not {study.seeds}.")
    if not study.scale > 0:
        raise HomebodyError(f"{where}: scale must be above 0, not {study.scale:g}.")
    insist_distinct([row.name for row in study.rows], where, "rows named")
    for row in study.rows:
        here = f"{where}, row '{row.name}'"
        for name in (*study.run, *row.run):
            if name not in RUN:
                raise at(here, unknown_name("setting of a run", name, RUN))
        for part in ("on", "published", "notes"):
            for data, value in getattr(row, part).items():
                if data not in study.data:
                    raise at(here, unknown_name(f"data set of this table in '{part}'", data, study.data))
                if part == "on" and not isinstance(value, dict):
                    raise HomebodyError(f"{here}: on.{data} must be a table of fields, not {value!r}.")
                if part == "notes" and not isinstance(value, str):
                    raise HomebodyError(f"{here}: notes.{data} must be a text, not {value!r}.")
                if part == "published":
                    _check_published(study, data, value, here)
        if row.method is None:
            continue
        for data in study.data:
            for value in study.points:
                try:
                    recipe = study.recipe(row, data, study.protocols[0], 0, value)
                    recipe.check()
                    method = recipe.build()
                    if study.kind in probes.PROBES:
                        probes.refuse(study.kind, method, recipe.method)
                except HomebodyError as error:
                    raise at(here, error) from error


def _check_published(study: Study, data: str, given: Any, where: str) -> None:
    lists = [given] if study.kind != "sweep" else given
    wanted = f"{len(study.metrics)} figures ({', '.join(study.metrics)})"
    if study.kind == "sweep" and (not isinstance(given, list) or len(given) != len(study.values)):
        raise HomebodyError(f"{where}: published.{data} must have {len(study.values)} lists, one for each value.")
    for figures in lists:
        if not isinstance(figures, list) or not all(type(one) in (int, float) for one in figures):
            raise HomebodyError(f"{where}: published.{data} must be a list of {wanted}, not {figures!r}.")
        if len(figures) != len(study.metrics):
            raise HomebodyError(f"{where}: published.{data} has {len(figures)} figures, and the table {wanted}.")


def published(study: Study, row: Row, data: str, point: int = 0) -> dict[str, float]:
    """The published figure of each metric, in parts of one; where there is none, the metric is left out."""
    figures = row.published.get(data, [])
    if study.kind == "sweep" and figures:
        figures = figures[point]
    return {
        metric: figure / study.scale
        for metric, figure in zip(study.metrics, figures, strict=False)
        if not math.isnan(figure)
    }

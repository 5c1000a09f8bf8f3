"""Reading a paper's recipe: the runs of its tables and figures, and the published figures.

It is a folder with a `recipe.toml`; docs/reproducing.md explains the format to authors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import homebody
from homebody import settings
from homebody.errors import HomebodyError, unknown_name
from homebody.files import insisting
from homebody.methods import METHODS
from homebody.report.words import ATTACKS, VIEW_ATTACK
from homebody.studies import probes
from homebody.studies.figures import NoisyRelease
from homebody.studies.probes import TABLES
from homebody.studies.serving import PaddedRequest
from homebody.studies.study import (
    COMPUTED,
    EPSILON,
    KINDS,
    Form,
    Reader,
    Row,
    Study,
    check_names,
    check_study,
    insist_distinct,
)

__all__ = ["Paper", "find_paper", "list_papers", "read_paper"]

SCHEMA_VERSION = 1
FILE = "recipe.toml"
SWAPPED = {"values": list(TABLES), "labels": list(TABLES), "axis": "item table"}
"""The values of such a figure are item tables, not settings of a run: its points come from one run."""
LENGTHS = [0, 10, 20, 50, 100, 200, 500, 1000]
"""Where groups of people by their interactions begin, if a recipe does not say."""


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

    @property
    def methods(self) -> list[str]:
        """What its rows run, each once."""
        return list(dict.fromkeys(row.method for study in self.studies for row in study.rows if row.method))


def places() -> list[Path]:
    """Where papers are looked for by name: here, in the source checkout, in the installed package."""
    package = Path(homebody.__file__).resolve().parent
    return [Path("experiments"), package.parents[1] / "experiments", package / "experiments"]


def list_papers() -> list[Path]:
    """The folders of all papers that are known by name; the first place that has a name wins."""
    papers: dict[str, Path] = {}
    for place in places():
        for file in sorted(place.glob(f"*/{FILE}")):
            papers.setdefault(file.parent.name, file.parent)
    return [papers[name] for name in sorted(papers)]


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


def read_paper(folder: Path, *, load: bool = True) -> Paper:
    """Read and check a paper's recipe. An error names its place, before anything runs.

    load: False loads no method, so that no code of the folder runs; their settings are not checked then.
    """
    name = folder.resolve().name
    where = f"{name}/{FILE}"
    try:
        with insisting(f"{where} cannot be read"):
            text = (folder / FILE).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HomebodyError(f"{where} is not valid TOML: {error}.") from error
    top = Reader(settings.load(text, where, SCHEMA_VERSION)[0], where)
    title, citation = top.take("title", str), top.take("citation", str)
    docs, note = top.take("docs", str, ""), top.take("note", str, "")
    studies: dict[Form, list[Study]] = {"table": [], "figure": []}
    for form, read in studies.items():
        for number, values in enumerate(top.tables(form), 1):
            read.append(_study(Reader(values, f"{where}, {form} {number}"), folder, form, studies["table"], load))
    top.done()
    if not any(studies.values()):
        raise HomebodyError(f"{where} has neither a [[table]] nor a [[figure]].")
    for form, read in studies.items():
        insist_distinct([study.id for study in read], where, f"{form}s of id")
    return Paper(name, folder, title, citation, docs, note, studies["table"], studies["figure"])


def _study(reader: Reader, folder: Path, form: Form, tables: Sequence[Study], load: bool) -> Study:
    """One table or figure; with `table`, on the settings and rows of another, so that nothing is run twice."""
    kind = reader.take("kind", str, "table" if form == "table" else MISSING)
    check_names(f"kind of {form}", [kind], KINDS[form], reader.where)
    base = _base(reader, tables)

    def like(name: str, otherwise: Any = MISSING) -> Any:
        return getattr(base, name) if base else otherwise

    identity, computed = reader.identity(), COMPUTED.get(kind)
    if kind == "accounting" and reader.take("observer", str, "public") == "views":
        computed = ("epsilon_views", "certified for views")
    attacks = {"membership": list(ATTACKS), "view-attack": list(VIEW_ATTACK)}
    metrics = attacks[kind] if kind in attacks else like("metrics")
    study = Study(
        form=form,
        kind=kind,
        id=identity,
        title=reader.take("title", str),
        metrics=[computed[0]] if computed else reader.texts("metrics", metrics),
        also=[] if computed else reader.texts("also", []),
        scale=1.0 if computed else reader.take("scale", float, 1.0 if kind == "embedding" else like("scale", 1.0)),
        data=reader.texts("data", like("data")),
        protocols=[computed[1]] if computed else reader.texts("protocols", like("protocols", ["published", "strict"])),
        seeds=1 if computed else reader.take("seeds", int, like("seeds", 3)),
        rounds=reader.take("rounds", int, like("rounds", None)),
        run={**like("run", {}), **reader.take("run", dict, {})},
        run_on=reader.take("run_on", dict, {}),
        note=reader.take("note", str, ""),
        optional=reader.texts("optional", []),
        rows=[],
        pairs=_pairs(reader) if kind == "pairs" else [],
        orders=_pairs(reader, "orders") if kind in ("table", "serving") and "orders" in reader.values else [],
        **VARIED[kind](reader) if kind in VARIED else {},
    )
    for data, changes in like("run_on", {}).items():
        if data in study.data:
            study.run_on[data] = {**changes, **study.run_on.get(data, {})}
    study.optional.extend(name for name in like("optional", []) if name in study.data and name not in study.optional)
    study.rows.extend(_rows(reader, folder, study, base))
    reader.done()
    if study.orders and study.listed:
        raise reader.error("orders compare the rows of a table: they are not for one that varies a setting")
    check_study(study, reader.where, load=load)
    return study


def _base(reader: Reader, tables: Sequence[Study]) -> Study | None:
    source = reader.take("table", str, "")
    known = {table.id: table for table in tables}
    check_names("table before this one", [source] if source else [], known, reader.where)
    return known.get(source)


def _served(reader: Reader) -> dict[str, Any]:
    """As in a sweep, of the training or of the requests; without either, one point a row."""
    if "vary" not in reader.values:
        reader.known.append("vary")
        return {}
    return _varied(reader, ("fields", "run", "serving"))


def _varied(reader: Reader, places: Sequence[str] = ("fields", "run")) -> dict[str, Any]:
    vary, values = reader.take("vary", str), reader.take("values", list)
    place, _, name = vary.partition(".")
    if place not in places or not name:
        known = [f"{place}.NAME" for place in places]
        raise reader.error(f"vary must be {', '.join(known[:-1])} or {known[-1]}, not '{vary}'")
    if not values:
        raise reader.error("values must name at least one value")
    if vary == EPSILON and not all(type(value) in (int, float) and value > 0 for value in values):
        raise reader.error(f"the values of {EPSILON} must be numbers above 0, or inf, not {values!r}")
    labels = reader.texts("labels", [str(value) for value in values])
    if len(labels) != len(values):
        raise reader.error(f"labels must be {len(values)} texts, one for each value, not {len(labels)}")
    return {"vary": vary, "values": values, "labels": labels, "axis": reader.take("axis", str, name)}


def _adapted(reader: Reader) -> dict[str, Any]:
    """What devices adapt by: a field of the method, and whole numbers; 0 is a model that no device has adapted."""
    varied = _varied(reader)
    whole = all(type(value) is int and value >= 0 for value in varied["values"])
    if not varied["vary"].startswith("fields.") or not whole:
        raise reader.error("an adaptation varies fields.NAME, of the method, over whole numbers from 0")
    return varied


def _shares(reader: Reader, name: str, axis: str, text: Callable[[float], str]) -> dict[str, Any]:
    """What a computed study has a point for: shares, from 0 to under 1."""
    shares = [float(share) if type(share) is int else share for share in reader.take(name, list)]
    if not shares or not all(type(share) is float and 0 <= share < 1 for share in shares):
        raise reader.error(f"{name} must be numbers from 0 to under 1, at least one, not {shares!r}")
    labels = [f"{axis} = {text(share)}" for share in shares]
    return {"values": shares, "labels": labels, "axis": axis, "release": reader.take("release", dict, {})}


def _short(number: float) -> str:
    """
    >>> _short(0.0), _short(1e-4), _short(2.5e-06), _short(0.01)
    ('0', '1e-4', '2.5e-6', '0.01')
    """
    digits, _, power = f"{number:e}".partition("e")
    return f"{float(digits):g}e{int(power)}" if 0 < number < 0.001 else f"{number:g}"


def _lengths(reader: Reader) -> dict[str, Any]:
    least = reader.take("from", list, LENGTHS)
    rising = all(type(number) is int for number in least) and sorted(set(least)) == least
    if not least or not rising or least[0] < 0:
        raise reader.error(f"'from' must be rising whole numbers, the least of each group, not {least!r}")
    ends = [f"–{after - 1:,}" if after - 1 > number else "" for number, after in pairwise(least)]
    labels = [f"{number:,}{end}" for number, end in zip(least, [*ends, " or more"], strict=True)]
    return {"values": least, "labels": labels, "axis": "interactions a person"}


def _view_attack(reader: Reader) -> dict[str, Any]:
    """A point for each noise and number of participations."""
    attack = reader.take("attack", dict, {})
    try:
        values = [name for name, _, _ in probes.attacked_points(attack)]
    except HomebodyError as error:
        raise reader.wrong(error) from error
    return {"attack": attack, "values": values, "labels": values, "axis": "noise σ, and T participations read"}


VARIED: dict[str, Callable[[Reader], dict[str, Any]]] = {
    "sweep": lambda reader: {**_varied(reader), "lines": reader.take("lines", bool, False)},
    "serving": _served,
    "noise": lambda reader: _shares(reader, "paddings", "p", "{:g}".format),
    "tables": lambda reader: SWAPPED,
    "adaptation": _adapted,
    "accounting": lambda reader: _shares(reader, "deltas", "δ", _short),
    "lengths": _lengths,
    "membership": lambda reader: {"attack": reader.take("attack", dict, {})},
    "view-attack": _view_attack,
}
"""What a kind has besides rows, and how it is read."""


def _pairs(reader: Reader, name: str = "pairs") -> list[tuple[str, str]]:
    pairs = reader.take(name, list)
    which = {"pairs": "the one without and the one with it", "orders": "the one above and the one below"}[name]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(row, str) for row in pair):
            raise reader.error(f"{name} must be lists of two rows, {which}, not {pair!r}")
    if not pairs:
        raise reader.error(f"{name} must name at least one pair of rows")
    return [(without, other) for without, other in pairs]


def _rows(reader: Reader, folder: Path, study: Study, base: Study | None) -> list[Row]:
    """Those written here; those named of the table that this one builds on; without either, all of that table's."""
    known = {row.name: row for row in base.rows} if base else {}
    written = []
    for number, row in enumerate(reader.tables("row"), 1):
        called = f"'{row['name']}'" if isinstance(row.get("name"), str) else number
        written.append(_row(Reader(row, f"{reader.where}, row {called}"), folder, study, known))
    here = {row.name: row for row in written}
    if study.kind == "pairs":
        names = list(dict.fromkeys(name for pair in study.pairs for name in pair))
        return [*written, *_taken(reader, [name for name in names if name not in here], known, study, published=True)]
    if base is None:
        return written
    return [*written, *_taken(reader, reader.texts("rows", [] if written else list(known)), known, study)]


def _taken(
    reader: Reader, names: Sequence[str], known: Mapping[str, Row], study: Study, *, published: bool = False
) -> list[Row]:
    """Rows as another table has them; its figures and what is said of them stay there, unless they are asked for."""
    check_names("row of the table that this one builds on", names, known, reader.where)
    return [_here(known[name], study, published=published) for name in names]


def _here(row: Row, study: Study, *, published: bool = False) -> Row:
    def part(by_data: Mapping[str, Any]) -> dict[str, Any]:
        return {data: value for data, value in by_data.items() if data in study.data}

    row = replace(row, on=part(row.on), run_on=part(row.run_on), slice=part(row.slice), values=[])
    if not published:
        said = (row.note, part(row.notes)) if study.form == "table" else ("", {})
        return replace(row, published={}, published_sd={}, note=said[0], notes=said[1])
    return replace(row, published=part(row.published), published_sd=part(row.published_sd), notes=part(row.notes))


RELEASES: dict[str, Callable[[Mapping[str, Any]], object]] = {"accounting": NoisyRelease.of, "noise": PaddedRequest.of}
"""How what a row releases is checked, by kind."""


def _computed(reader: Reader, study: Study) -> Row:
    """A row of a study without runs; published figures of an account are one for each δ, of noise for each padding."""
    given = reader.take("release", dict, {}) if study.kind in RELEASES else {}
    try:
        if study.kind in RELEASES:
            RELEASES[study.kind]({**study.release, **given})
    except HomebodyError as error:
        raise reader.wrong(error) from error
    figures = reader.take("published", dict, {})
    for data, numbers in figures.items() if study.listed else ():
        figures[data] = [[n] for n in numbers] if isinstance(numbers, list) else numbers
    row = Row(
        reader.take("name", str),
        rounds=reader.take("rounds", int, None),
        published=figures,
        note=reader.take("note", str, ""),
        notes=reader.take("notes", dict, {}),
        release=given,
    )
    reader.done()
    return row


KEPT = {"rounds": int, "note": str, "notes": dict, "slice": dict, "seeds": int}
"""What a row has of the row that it builds on, unless it says otherwise."""
OWN = {"published": dict, "published_sd": dict, "values": list, "fixed": bool, "diverges": bool}
"""What a row has by itself alone."""


def _row(reader: Reader, folder: Path, study: Study, known: Mapping[str, Row]) -> Row:
    if study.kind in COMPUTED:
        return _computed(reader, study)
    name = reader.take("name", str)
    if known and not {"method", "missing"} & set(reader.values):
        source = reader.take("of", str, name)
        check_names("row of the table that this one builds on", [source], known, reader.where)
        row = replace(_here(known[source], study), name=name)
    else:
        row = _new_row(reader, folder, name)
    new: dict[str, Any] = {}
    for part in ("on", "run_on"):
        before: dict[str, dict[str, Any]] = getattr(row, part)
        # What is no table of fields is refused when the whole study is checked.
        given = {
            data: {**before.get(data, {}), **settings} if isinstance(settings, dict) else settings
            for data, settings in reader.take(part, dict, {}).items()
        }
        new[part] = {**before, **given}
    new |= {name: {**getattr(row, name), **reader.take(name, dict, {})} for name in ("fields", "run", "serving")}
    new |= {name: reader.take(name, kind, getattr(row, name)) for name, kind in KEPT.items()}
    new |= {name: reader.take(name, kind, kind()) for name, kind in OWN.items()}
    row = replace(row, **new)
    reader.done()
    return row


def _new_row(reader: Reader, folder: Path, name: str) -> Row:
    missing = reader.take("missing", str, "")
    method = reader.take("method", str, "" if missing else MISSING)
    path, colon, _ = method.rpartition(":")
    if colon and path.endswith(".py"):
        method = f"{(folder / path).resolve()}{method[len(path) :]}"
    elif method not in METHODS and not missing:
        raise reader.wrong(unknown_name("method", method, METHODS))
    elif method not in METHODS:
        method = ""
    return Row(name, method or None, missing=missing)

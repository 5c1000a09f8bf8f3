"""A CSV or Parquet file of one's own, one row an interaction.

Its other columns may be features: of users, of items or of interactions.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.columns import FileColumn, known_kinds, listed, names_of_items, single, usual
from homebody.data.population import Features, Kind, Population, build
from homebody.errors import HomebodyError, several

__all__ = ["USUAL_NAMES", "choose_columns", "describe", "even_table", "raw_table", "read_table"]

SEPARATORS = (",", "\t", ";")
USUAL_NAMES = {
    "user": ("user", "userid"),
    "item": ("item", "itemid", "movieid"),
    "time": ("time", "timestamp"),
    "rating": ("rating",),
}
Longs = npt.NDArray[np.int64]
Owner = Literal["users", "items", "interactions"]
MUCH_MORE = 10
"""A column that fits users and items belongs to items if this many times as many rows support it."""


def read_table(
    path: str | Path,
    *,
    user_col: str | None = None,
    item_col: str | None = None,
    time_col: str | None = None,
    rating_col: str | None = None,
    feature_cols: str | Sequence[str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Population:
    """The population in a CSV (comma, tab or semicolon; also gzipped) or Parquet file.

    A column that is not named is found by its usual name in any spelling of case, `_` and `-`: user,
    user_id, item, item_id, movieId, time, timestamp, rating. Times and ratings may be absent, and an empty
    name (`rating_col=""`) leaves one out. Times are numbers or ISO dates; dates without a zone are UTC.

    All other columns are features, of users, items or interactions as they look (`describe`),
    and of the `kinds` given or guessed. `feature_cols` names those to take instead, as a list or with commas
    between them; empty, there are none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "loans.csv")
    ...     _ = file.write_text("reader;book;day\\nann;emma;2024-02-01\\nann;ulysses;2023-12-31\\n")
    ...     loans = read_table(file, user_col="reader", item_col="book", time_col="day")
    >>> loans.item_ids.gather(loans.history(0)).to_list()
    ['ulysses', 'emma']
    """
    path = Path(path)
    given = {"user": user_col, "item": item_col, "time": time_col, "rating": rating_col}
    wanted = known_kinds(kinds or {})
    names: dict[str, str] = {}
    others: list[str] = []

    def choose(present: list[str]) -> list[str]:
        names.update(choose_columns(path, present, given))
        others.extend(_features(path, present, names, given, feature_cols))
        return [*names.values(), *others]

    table = raw_table(path, choose)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so there is nobody to learn from.")
    column = {role: FileColumn(table[name], role, path) for role, name in names.items()}
    population = build(
        path.stem,
        column["user"].ids(),
        column["item"].ids(),
        times=column["time"].times() if "time" in column else None,
        ratings=column["rating"].numbers() if "rating" in column else None,
        # The numbers of the file's rows end up in the population's order.
        contexts=Features(pl.DataFrame({"row": np.arange(table.height)}), {"row": "numeric"}) if others else None,
    )
    if population.contexts is None:
        return population
    order = population.contexts.table["row"].to_numpy()
    asked = others if feature_cols is not None else ()
    return describe(population, table.select(others), path, order, wanted=wanted, asked=asked)


def raw_table(path: Path, choose: Callable[[list[str]], list[str]] | None = None) -> pl.DataFrame:
    """A file's columns as they stand, those of CSV as text; `choose` picks from their names, otherwise all."""
    separator = None if _is_parquet(path) else _separator(path)
    with _failures_named(path):
        if separator is None:
            present = list(pl.read_parquet_schema(path))
        else:
            present = pl.read_csv(path, separator=separator, infer_schema=False, n_rows=0).columns
    names = present if choose is None else choose(present)
    with _failures_named(path):
        if separator is None:
            return pl.read_parquet(path, columns=names)
        # As text: ids such as 007 stay as written, and a bad value can be shown.
        return pl.read_csv(path, separator=separator, infer_schema=False, columns=names)


def even_table(path: Path) -> pl.DataFrame:
    """All columns of a file, as `raw_table` reads them; a row with more or fewer cells than the header is refused."""
    if not _is_parquet(path):
        _refuse_ragged(path, _separator(path))
    return raw_table(path)


def _refuse_ragged(path: Path, separator: str) -> None:
    with _bytes(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=separator)
        wanted = len(next(filter(None, lines), []))
        for row, cells in enumerate(lines, start=1):
            if cells and len(cells) != wanted:  # an empty line has no id, and is refused for that
                raise HomebodyError(
                    f"{path} cannot be read as a table: row {row} has {several(len(cells), 'cell')}, and the "
                    f"header has {wanted:,}; give each row as many cells as the header."
                )


def _is_parquet(path: Path) -> bool:
    """By the name, or failing that by the first bytes, which also prove that the file can be opened."""
    if path.is_dir():
        raise HomebodyError(
            f"{path} is a folder; give a CSV or Parquet file, or name a dataset and point --data-dir at its folder."
        )
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise HomebodyError(f"There is no file {path}.") from None
    except OSError as error:
        raise HomebodyError(f"{path} cannot be opened: {error.strerror or error}.") from error
    if not magic:
        raise HomebodyError(f"{path} is empty: it needs a header line and at least one row.")
    return path.suffix.lower() in {".parquet", ".pq"} or magic == b"PAR1"


def _separator(path: Path) -> str:
    with _bytes(path) as text:
        first = text.readline(1 << 20).decode("utf-8-sig")
    return max(SEPARATORS, key=first.count)


@contextmanager
def _bytes(path: Path) -> Iterator[BinaryIO]:
    """A file to read, unpacked if it is gzipped. What the block finds wrong with it becomes a sentence."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with cast(BinaryIO, gzip.open(path) if packed else path.open("rb")) as file:
            yield file
    except UnicodeDecodeError as error:
        raise HomebodyError(f"{path} is not UTF-8 text; save it as UTF-8 CSV or as Parquet.") from error
    except (OSError, EOFError, csv.Error) as error:
        raise HomebodyError(f"{path} cannot be read: {error}.") from error


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.NoDataError:
        raise HomebodyError(f"{path} is empty: it needs a header line and at least one row.") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        if "utf-8" in str(error).lower():
            raise HomebodyError(f"{path} is not UTF-8 text; save it as UTF-8 CSV or as Parquet.") from error
        if "more fields than defined" in str(error):
            raise HomebodyError(
                f"{path} cannot be read as a table: a row has more values than the header has columns; correct it."
            ) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(f"{path} cannot be read as a table; it may be damaged: {reason}.") from error


def choose_columns(
    path: Path, present: list[str], given: dict[str, str | None], *, required: Collection[str] = ("user", "item")
) -> dict[str, str]:
    """The column of each role: as given, or by its usual names. Columns that are not required may be missing."""
    chosen = {}
    for role, name in given.items():
        if name is None:
            name = single(path, role, usual(present, USUAL_NAMES[role]), f"name one with --{role}-col")
        elif name and name not in present:
            raise HomebodyError(f"{path} has no column '{name}' (--{role}-col); its columns are {listed(present)}.")
        if name:
            chosen[role] = name
        elif role in required:
            numeric = all(name.replace(".", "").isdigit() for name in present)
            headless = " (does the file lack a header line?)" if numeric else ""
            raise HomebodyError(
                f"Which column of {path} is the {role}? Name it with --{role}-col; its columns are "
                f"{listed(present)}{headless}."
            )
    for role, other in combinations(chosen, 2):
        if chosen[role] == chosen[other]:
            raise HomebodyError(
                f"The {role} and the {other} of {path} cannot both be in the column '{chosen[role]}'; "
                f"name two with --{role}-col and --{other}-col."
            )
    return chosen


def _features(
    path: Path,
    present: list[str],
    names: Mapping[str, str],
    given: Mapping[str, str | None],
    wanted: str | Sequence[str] | None,
) -> list[str]:
    """The columns to take for features, in the file's order."""
    roles = {name: role for role, name in names.items()}
    if wanted is None:
        # What was left out by an empty name is not wanted in another way either.
        refused = [name for role, col in given.items() if col == "" for name in usual(present, USUAL_NAMES[role])]
        return [name for name in present if name not in roles and name not in refused]
    if isinstance(wanted, str):
        whole = wanted and wanted in present
        wanted = [wanted] if whole else [name.strip() for name in wanted.split(",") if name.strip()]
    for name in wanted:
        if name not in present:
            raise HomebodyError(f"{path} has no column '{name}' (--feature-cols); its columns are {listed(present)}.")
        if name in roles:
            raise HomebodyError(
                f"The column '{name}' of {path} has the {roles[name]}s, so it cannot be a feature too; leave it out of "
                "--feature-cols."
            )
    return [name for name in present if name in wanted]


class _Holders(NamedTuple):
    """The users, or the items: whom each row of the file is about."""

    of: Longs
    number: int


class _Whose(NamedTuple):
    owner: Owner
    picks: Longs | None = None
    """For each user or item, the row of the file whose value counts."""
    filled: int = 0
    """Rows without a value whose user or item has one in another row."""
    tied: bool = False
    """Whether it could as well be of items."""


@dataclass(frozen=True)
class _Feature:
    values: pl.Series
    kind: Kind
    whose: _Whose


def describe(
    population: Population,
    table: pl.DataFrame,
    path: Path,
    order: Longs,
    *,
    wanted: Mapping[str, Kind],
    asked: Collection[str] = (),
) -> Population:
    """The population with the columns of its own file for features; interaction r is the file's row `order[r]`.

    A column that is the same in all rows of each user is a feature of users, one that is the same in all rows of
    each item a feature of items, any other a context of interactions. One that is both is of users, unless hardly
    any of them has a second row to confirm it. If a column is neither, a missing value counts as what the user (or
    the item) has in other rows.

    Columns that were not `asked` for, and of which the kind is not `wanted`, are left out where they say nothing,
    as ids do, or cannot be used; the population's notes say so.

    >>> two = Population("toy", np.array([0, 2, 4]), np.array([0, 1, 0, 1], dtype=np.int32), 2)
    >>> more = pl.DataFrame({"job": ["cook", "cook", "vet", "cook"], "hour": [9.5, 8.5, 9.5, 7.5], "id": [1, 2, 3, 4]})
    >>> described = describe(two, more, Path("a.csv"), np.arange(4), wanted={})
    >>> described.contexts.names, described.notes[-1]
    (['job', 'hour'], 'a.csv: left out id (different in every row); --feature-cols NAMES takes it all the same.')
    """
    holders: dict[Owner, _Holders] = {
        "users": _Holders(
            _in_file(np.repeat(np.arange(population.n_users), population.lengths), order), population.n_users
        ),
        "items": _Holders(_in_file(population.items, order), population.n_items),
    }
    features: dict[str, _Feature] = {}
    left: dict[str, str] = {}
    refused: list[str] = []
    for name in table.columns:
        if not name.strip():
            left["a column"] = "without a name"
            continue
        column, insist = FileColumn(table[name], "feature", path), name in asked or name in wanted
        try:
            feature = _feature(column, holders, wanted.get(name), insist=insist)
        except HomebodyError as error:
            if insist:
                raise
            # A bad column that nobody asked for must not stop the others.
            refused.append(f"{str(error).rstrip('.')}; until then it is left out.")
            continue
        if isinstance(feature, str):
            left[name] = feature
        else:
            features[name] = feature
    users, items, contexts = (_table(features, owner) for owner in get_args(Owner))
    return replace(
        population,
        user_features=users,
        item_features=items,
        item_names=None if items is None else names_of_items(items.table, population.item_ids),
        contexts=None if contexts is None else contexts.rows(order),
        notes=(*population.notes, *_notes(path, features, left), *refused),
    )


def _in_file(holders: npt.NDArray[np.integer], order: Longs) -> Longs:
    """From the population's order to the file's."""
    out = np.empty(len(order), dtype=np.int64)
    out[order] = holders
    return out


def _table(features: Mapping[str, _Feature], owner: Owner) -> Features | None:
    owned = {name: feature for name, feature in features.items() if feature.whose.owner == owner}
    table = pl.DataFrame([feature.values.alias(name) for name, feature in owned.items()])
    return Features(table, {name: feature.kind for name, feature in owned.items()}) if owned else None


def _feature(
    column: FileColumn, holders: Mapping[Owner, _Holders], kind: Kind | None, *, insist: bool
) -> _Feature | str:
    """What the column is, or why it is left out."""
    looks = _looks(column)
    if not insist and looks.null_count() == len(looks):
        return "empty"
    if not insist and looks.null_count() == 0 and (looks == looks[0]).all():
        return "the same in every row"
    whose = _whose(looks, holders)
    single = whose.picks is None
    if not insist and single and _all_different(looks) and not _fractions(looks):
        return "different in every row"
    values = column if whose.picks is None else FileColumn(column.values.gather(whose.picks), column.role, column.path)
    kind = kind or (values.guess_of_items() if whose.owner == "items" else values.guess())
    if not insist and single and kind == "text":
        # Thousands of numbers for each interaction, and mostly written after it.
        return "free text about interactions"
    if not insist and kind == "categorical" and _all_different(values.bare()):
        return f"no two {whose.owner} share one"
    try:
        return _Feature(values.as_kind(kind), kind, whose)
    except HomebodyError:
        column.as_kind(kind)  # refuses the same, but by the file's rows
        raise


def _looks(column: FileColumn) -> pl.Series:
    """Values that are equal if and only if they look the same; nothing is null."""
    if isinstance(column.values.dtype, pl.List | pl.Array):
        return column.as_kind("multi-hot").list.join("\x1f")
    return column.bare()


def _whose(looks: pl.Series, holders: Mapping[Owner, _Holders]) -> _Whose:
    known = looks.is_not_null().to_numpy()
    rows = np.arange(len(looks))
    same: list[tuple[int, _Whose]] = []
    nearly: list[tuple[int, _Whose]] = []
    for owner, (of, number) in holders.items():
        picks = np.empty(number, dtype=np.int64)
        picks[of] = rows
        picks[of[known]] = rows[known]
        alike = looks.eq_missing(looks.gather(picks[of])).to_numpy()
        # How many rows say again what another said of the same user or item.
        confirmed = int(known.sum()) - int(known[picks].sum())
        if alike.all():
            same.append((confirmed, _Whose(owner, picks)))
        elif confirmed and (alike | ~known).all():
            nearly.append((confirmed, _Whose(owner, picks, int((~known & known[picks[of]]).sum()))))
    if nearly and looks.drop_nulls().n_unique() == 1:
        # A mark in some rows is constant wherever it is set: its information is where it is missing.
        nearly = []
    fit = same or nearly
    if not fit:
        return _Whose("interactions")
    if len(fit) == 1:
        return fit[0][1]
    (of_users, users), (of_items, items) = fit
    if of_items > MUCH_MORE * of_users:
        return items
    return users._replace(tied=of_users > 0)


def _all_different(values: pl.Series) -> bool:
    known = values.drop_nulls()
    return len(known) > 1 and known.n_unique() == len(known)


def _fractions(values: pl.Series) -> bool:
    """Whether all are numbers, and not only whole ones: amounts, though no two be equal."""
    if values.dtype != pl.String and not values.dtype.is_numeric():
        return False
    number = values.cast(pl.Float64, strict=False)
    return number.null_count() == values.null_count() and bool((number != number.round()).any())


def _notes(path: Path, features: Mapping[str, _Feature], left: Mapping[str, str]) -> Iterable[str]:
    taken: dict[Owner, list[str]] = {owner: [] for owner in get_args(Owner)}
    for name, each in features.items():
        taken[each.whose.owner].append(f"{name} as {each.kind}")
    if features:
        parts = "; ".join(f"of {owner} {', '.join(names)}" for owner, names in taken.items() if names)
        yield (
            f"{path.name}: took for features {parts} (--feature-cols NAMES takes others, or none, and "
            "--kind COLUMN=KIND takes one otherwise)."
        )
    for name, feature in features.items():
        if feature.whose.tied:
            yield (
                f"{path.name}: {name} is the same in all rows of each user, and of each item too; it is taken for a "
                "feature of users."
            )
    filled = [f"{name} ({several(each.whose.filled, 'row')})" for name, each in features.items() if each.whose.filled]
    if filled:
        yield f"{path.name}: where {', '.join(filled)} is missing, what other rows say of the same user or item counts."
    if left:
        why = ", ".join(f"{name} ({reason})" for name, reason in left.items())
        them = "it" if len(left) == 1 else "them"
        yield f"{path.name}: left out {why}; --feature-cols NAMES takes {them} all the same."

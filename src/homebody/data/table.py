"""A CSV or Parquet file of one's own, one row an interaction."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl

from homebody.data.builder import build
from homebody.data.columns import Column, ids, listed, numbers, times, usual
from homebody.data.features import Features
from homebody.data.file_features import describe
from homebody.data.kinds import known_kinds
from homebody.data.population import Population
from homebody.errors import HomebodyError

__all__ = ["choose_columns", "listed", "raw_table", "read_table", "usual"]

SEPARATORS = (",", "\t", ";")
USUAL_NAMES = {
    "user": ("user", "userid"),
    "item": ("item", "itemid", "movieid"),
    "time": ("time", "timestamp"),
    "rating": ("rating",),
}


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

    All other columns are features, of users, items or interactions as they look (`homebody.data.file_features`),
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
    column = {role: Column(table[name], role, path) for role, name in names.items()}
    population = build(
        path.stem,
        ids(column["user"]),
        ids(column["item"]),
        times=times(column["time"]) if "time" in column else None,
        ratings=numbers(column["rating"]) if "rating" in column else None,
        contexts=_numbered(table.height) if others else None,
    )
    if population.contexts is None:
        return population
    order = population.contexts.table["row"].to_numpy()
    asked = others if feature_cols is not None else ()
    return describe(population, table.select(others), path, order, wanted=wanted, asked=asked)


def raw_table(path: Path, choose: Callable[[list[str]], list[str]] | None = None) -> pl.DataFrame:
    """A file's columns as they stand, those of CSV as text; `choose` picks from their names, otherwise all."""
    separator = None if _is_parquet(path) else _separator(path)
    present = _header(path, separator)
    return _read(path, separator, present if choose is None else choose(present))


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
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if packed else path.open("rb") as text:
            first = text.readline(1 << 20).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HomebodyError(f"{path} is not UTF-8 text; save it as UTF-8 CSV or as Parquet.") from error
    except (OSError, EOFError) as error:
        raise HomebodyError(f"{path} cannot be read: {error}.") from error
    return max(SEPARATORS, key=first.count)


def _header(path: Path, separator: str | None) -> list[str]:
    with _failures_named(path):
        if separator is None:
            return list(pl.read_parquet_schema(path))
        return pl.read_csv(path, separator=separator, infer_schema=False, n_rows=0).columns


def _read(path: Path, separator: str | None, names: list[str]) -> pl.DataFrame:
    with _failures_named(path):
        if separator is None:
            return pl.read_parquet(path, columns=names)
        # As text: ids such as 007 stay as written, and a bad value can be shown.
        return pl.read_csv(path, separator=separator, infer_schema=False, columns=names)


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.NoDataError:
        raise HomebodyError(f"{path} is empty: it needs a header line and at least one row.") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        if "utf-8" in str(error).lower():
            raise HomebodyError(f"{path} is not UTF-8 text; save it as UTF-8 CSV or as Parquet.") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(f"{path} cannot be read as a table; it may be damaged: {reason}.") from error


def choose_columns(
    path: Path, present: list[str], given: dict[str, str | None], *, required: Collection[str] = ("user", "item")
) -> dict[str, str]:
    """The column of each role: as given, or by its usual names. Columns that are not required may be missing."""
    chosen = {}
    for role, name in given.items():
        if name is None:
            name = _usual(path, present, role)
        elif name and name not in present:
            raise HomebodyError(f"{path} has no column '{name}' (--{role}-col); its columns are {listed(present)}.")
        if name:
            chosen[role] = name
        elif role in required:
            headless = " (does the file lack a header line?)" if all(map(_numeric, present)) else ""
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


def _numbered(rows: int) -> Features:
    """The numbers of the file's rows, which find their way into the population's order."""
    return Features(pl.DataFrame({"row": np.arange(rows)}), {"row": "numeric"})


def _usual(path: Path, present: list[str], role: str) -> str | None:
    matches = usual(present, USUAL_NAMES[role])
    if len(matches) > 1:
        raise HomebodyError(
            f"{path} has several columns that could be the {role} ({listed(matches)}); name one with --{role}-col."
        )
    return matches[0] if matches else None


def _numeric(name: str) -> bool:
    return name.replace(".", "").isdigit()

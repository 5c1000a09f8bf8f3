"""Histories and impressions in files: reads rows from CSV and Parquet, and writes CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from homebody.data.attach import impression_columns
from homebody.data.columns import FileColumn, listed, mark, unmark_all
from homebody.data.readers import raw_table
from homebody.data.roles import choose_columns
from homebody.errors import HomebodyError
from homebody.federation.device.history import TIME_LIMIT
from homebody.files import replacing

if TYPE_CHECKING:
    from homebody.federation.device.impressions import Impression

__all__ = [
    "COLUMNS",
    "SHOWN_COLUMNS",
    "HistoryRows",
    "ShownRow",
    "read_impressions",
    "read_rows",
    "write_impressions",
    "write_rows",
]

COLUMNS = ("user", "item", "time", "rating")
"""The column names of an export; an import also finds other usual names."""
SHOWN_COLUMNS = ("impression", "user", "item", "clicked", "time")
"""The same of impressions: a row for each item that was shown."""
_NO_LINE = r"[\p{Cc}\x{2028}\x{2029}]"


class HistoryRows(NamedTuple):
    """The rows of a file, in its order."""

    users: list[str] | None
    """None where the file is about one person."""
    items: list[str]
    times: Sequence[int | float | None]
    ratings: Sequence[float | None]


class ShownRow(NamedTuple):
    """One impression of a file."""

    user: str | None
    """None where the file is about one person."""
    shown: tuple[str, ...]
    clicked: tuple[str, ...]
    time: int | float


def read_impressions(path: Path, person: str | None, *, item_limit: int, name_limit: int) -> list[ShownRow]:
    """The impressions of a CSV or Parquet file, in its order. An item counts once in an impression, as clicked if once
    clicked; the time of an impression is the first that its rows have."""
    chosen: dict[str, str] = {}

    def choose(present: list[str]) -> list[str]:
        chosen.update(impression_columns(path, present, optional=() if person is None else ("user",)))
        return list(chosen.values())

    table = raw_table(path, choose)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so there are no impressions.")
    column = {role: FileColumn(table[name], role, path) for role, name in chosen.items()}
    column["time"].refuse(column["time"].bare().is_null(), "a time in every row")
    users = _texts(column["user"], name_limit) if "user" in column else pl.repeat("", table.height, eager=True)
    if person is not None and users.n_unique() > 1:
        raise HomebodyError(f"{path} holds {users.n_unique():,} users, not {person} alone: leave out --person.")
    rows = pl.DataFrame(
        {
            "impression": _texts(column["impression"], name_limit),
            "user": users,
            "item": _texts(column["item"], item_limit),
            "clicked": column["clicked"].flags(),
            "time": pl.Series(_times(column["time"]), strict=False),
        }
    )
    whole = ("impression", "user")
    once = rows.group_by(*whole, "item", maintain_order=True).agg(pl.col("clicked").any(), pl.col("time").min())
    lists = once.group_by(*whole, maintain_order=True).agg(
        "item", pl.col("item").filter("clicked").alias("clicks"), pl.col("time").min()
    )
    twice = lists.filter(pl.col("impression").is_duplicated())
    if twice.height:
        raise HomebodyError(
            f"The impression '{twice['impression'][0]}' of {path} belongs to several users: give each its own number."
        )
    return [
        ShownRow(None if person is not None else user, tuple(items), tuple(clicks), time)
        for _, user, items, clicks, time in lists.iter_rows()
    ]


def write_impressions(path: Path, some: Iterable[tuple[str, Impression]]) -> int:
    """Write a CSV file of people's impressions, which only its owner can read; returns how many they are."""
    count = 0

    def rows() -> Iterable[tuple[object, ...]]:
        nonlocal count
        for user, one in some:
            count += 1
            clicks = set(one.clicked)
            yield from ((count, mark(user), mark(item), int(item in clicks), one.time) for item in one.shown)

    _write(path, SHOWN_COLUMNS, rows())
    return count


def read_rows(
    path: Path, person: str | None, given: dict[str, str | None], *, item_limit: int, name_limit: int
) -> HistoryRows:
    """The rows of a CSV or Parquet file. Every row is checked, and the first bad one refuses the whole file."""
    chosen: dict[str, str] = {}

    def choose(present: list[str]) -> list[str]:
        chosen.update(choose_columns(path, present, given, required=("item",)))
        if "user" not in chosen and person is None:
            raise HomebodyError(
                f"Whose history is {path}? Name the person with --person, or the column of users with --user-col; "
                f"its columns are {listed(present)}."
            )
        return list(chosen.values())

    table = raw_table(path, choose)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so there is nothing to import.")
    column = {role: FileColumn(table[name], role, path) for role, name in chosen.items()}
    users = _texts(column["user"], name_limit) if "user" in column else None
    if person is not None and users is not None:
        if (several := users.n_unique()) > 1:
            raise HomebodyError(
                f"{path} holds {several:,} users in its column '{chosen['user']}', not {person} alone: leave out "
                f"--person to add each of them, or say --user-col '' to give {person} all of its rows."
            )
        users = None
    nothing = [None] * table.height
    return HistoryRows(
        None if users is None else users.to_list(),
        _texts(column["item"], item_limit).to_list(),
        _times(column["time"]) if "time" in column else nothing,
        _ratings(column["rating"]) if "rating" in column else nothing,
    )


def write_rows(path: Path, rows: Iterable[tuple[str, str, int | float | None, float | None]]) -> int:
    """Write a CSV file that only its owner can read, completely or not at all. Returns the number of rows."""
    return _write(path, COLUMNS, ((mark(user), mark(item), *rest) for user, item, *rest in rows))


def _write(path: Path, names: Sequence[str], rows: Iterable[tuple[object, ...]]) -> int:
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        count = 0
        for row in rows:
            writer.writerow(row)
            count += 1
        text.detach()  # flushes, and leaves the file open
    return count


def _texts(column: FileColumn, limit: int) -> pl.Series:
    """Ids as they are written, without spaces around them. Every cell is an id, also NA or 007."""
    column.bare()  # refuses what is neither text nor number
    values = column.values
    if values.dtype.is_float():
        whole = values.cast(pl.Int64, strict=False)
        values = whole if (whole == values).all() else values
    text = unmark_all(values.cast(pl.String).str.strip_chars())
    bad = (text.str.len_chars() == 0) | (text.str.len_chars() > limit) | text.str.contains(_NO_LINE)
    column.refuse(bad.fill_null(True), f"one line of 1 to {limit:,} characters in every row")
    return text


def _times(column: FileColumn) -> Sequence[int | float | None]:
    """Numbers as they are written; dates as seconds since 1970; None for an empty cell."""
    times, bare = _read_present(column, FileColumn.times)
    if times.dtype.is_temporal():
        micro = [None if moment is None else int(moment) for moment in times.dt.epoch("us").to_list()]
        return [at if at is None else at // 10**6 if at % 10**6 == 0 else at / 10**6 for at in micro]
    far = times.cast(pl.Float64).abs() > TIME_LIMIT  # whole numbers may be stored in fewer bits than the limit has
    column.refuse(far.fill_null(False), f"times of at most {TIME_LIMIT}")
    if column.values.dtype == pl.String and times.dtype.is_float():
        # Whole numbers among others stay whole: a float does not hold all of them.
        exact = bare.cast(pl.Int64, strict=False).to_list()
        return [time if whole is None else whole for whole, time in zip(exact, times.to_list(), strict=True)]
    return list(times.to_list())


def _ratings(column: FileColumn) -> Sequence[float | None]:
    ratings, _ = _read_present(column, FileColumn.numbers)
    return list(ratings.cast(pl.Float64).to_list())


@dataclass(frozen=True)
class _Present(FileColumn):
    """The rows of a column that are not empty. An error about one of them names its row in the whole file."""

    whole: FileColumn
    places: pl.Series

    def refuse(self, bad: pl.Series, needs: str, remedy: str = "", *, as_written: bool = False) -> None:
        marks = pl.repeat(False, len(self.whole.values), eager=True)
        self.whole.refuse(marks.scatter(self.places.filter(bad), True), needs, remedy, as_written=as_written)


def _read_present(column: FileColumn, read: Callable[[FileColumn], pl.Series]) -> tuple[pl.Series, pl.Series]:
    """The values that `read` finds in the rows that are not empty, null elsewhere; and the bare column."""
    bare = column.bare()
    places = bare.is_not_null().arg_true().cast(pl.Int64)
    if len(places) == 0:
        return pl.Series([None] * len(bare), dtype=pl.Int64), bare
    values = read(_Present(bare.drop_nulls(), column.role, column.path, column, places))
    rows = pl.DataFrame({"row": places, "value": values})
    everyone = pl.int_range(len(bare), eager=True).alias("row").to_frame()
    return everyone.join(rows, on="row", how="left", maintain_order="left")["value"], bare

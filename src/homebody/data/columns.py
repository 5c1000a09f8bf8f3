"""Columns of other people's files: what they hold, or a sentence that says where they do not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from homebody.data.spreadsheets import unmarked_all
from homebody.errors import HomebodyError

__all__ = ["Column", "flags", "ids", "listed", "numbers", "numbers_or_nothing", "times", "usual"]

# What spreadsheets and data frames write where there was nothing.
MISSING = ("", "nan", "NaN", "NAN", "null", "NULL", "None", "NA", "N/A", "<NA>")

# After `T` and `Z` have been spelled out.
DATE_FORMATS = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%d %H:%M:%S%.f%:z",
    "%Y-%m-%d %H:%M:%S%.f%z",
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d %H:%M%:z",
)


@dataclass(frozen=True)
class Column:
    """One column, what it is for, and the file it came from, so that an error can say all three.

    >>> stars = Column(pl.Series("stars", ["3", "bad"]), "rating", Path("a.csv"))
    >>> numbers(stars)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The rating column 'stars' of a.csv must hold numbers, but row 2 has 'bad'
    (1 such row, counted from 1, header aside).
    """

    values: pl.Series
    role: str
    path: Path

    def bare(self) -> pl.Series:
        """The values, with every spelling of nothing as null and text without surrounding spaces."""
        values = self.values
        if values.dtype.is_nested() or values.dtype in (pl.Binary, pl.Duration, pl.Object):
            raise HomebodyError(
                f"The {self.role} column '{values.name}' of {self.path} holds {values.dtype} values; "
                "it needs plain text or numbers."
            )
        if values.dtype.is_float():
            return values.fill_nan(None)
        if values.dtype in (pl.Categorical, pl.Enum, pl.String):
            text = values.cast(pl.String).str.strip_chars()
            return text.set(text.is_in(MISSING), None)
        return values

    def refuse(self, bad: pl.Series, needs: str, remedy: str = "") -> None:
        """Raise if any row is marked, showing the first."""
        row = bad.arg_max()
        if row is None or not bad[row]:
            return
        value = self.values[row]
        shown = "nothing" if self.bare()[row] is None else f"'{value}'"
        count = int(bad.sum())
        raise HomebodyError(
            f"The {self.role} column '{self.values.name}' of {self.path} must hold {needs}, but row "
            f"{row + 1} has {shown} ({count} such {'row' if count == 1 else 'rows'}, counted from 1, "
            f"header aside){remedy}."
        )


def ids(column: Column) -> pl.Series:
    """Ids as whole numbers where all are written as such, otherwise as text.

    >>> ids(Column(pl.Series(["10", "9"]), "user", Path("a.csv"))).dtype, ids(
    ...     Column(pl.Series(["007", "9"]), "user", Path("a.csv"))
    ... ).dtype
    (Int64, String)
    """
    values = column.bare()
    column.refuse(values.is_null(), f"{'an' if column.role == 'item' else 'a'} {column.role} in every row")
    if values.dtype.is_integer():
        return values
    if values.dtype.is_float():
        whole = values.cast(pl.Int64, strict=False)
        return whole if (whole == values).all() else values
    text = unmarked_all(values.cast(pl.String))
    if text.str.ends_with(".0").all():
        # Data frames write whole numbers so once one of them was missing.
        text = text.str.strip_suffix(".0")
    whole = text.cast(pl.Int64, strict=False)
    # 007 and 7 may be two people: only what a number would be written as is a number.
    return whole if (whole.cast(pl.String) == text).all() and whole.null_count() == 0 else text


def numbers(column: Column) -> pl.Series:
    """Finite numbers in every row.

    >>> numbers(Column(pl.Series(["1", "2.5"]), "rating", Path("a.csv"))).to_list()
    [1.0, 2.5]
    """
    values = _as_numbers(column.bare())
    column.refuse(~values.cast(pl.Float32).is_finite().fill_null(False), "numbers")
    return values


def numbers_or_nothing(column: Column, remedy: str = "") -> pl.Series:
    """Finite numbers, or null where there is nothing.

    >>> numbers_or_nothing(Column(pl.Series(["1", "NA"]), "numeric", Path("a.csv"))).to_list()
    [1, None]
    """
    values = column.bare()
    found = _as_numbers(values)
    column.refuse(found.is_null() & values.is_not_null(), "numbers", remedy)
    return found


def flags(column: Column) -> pl.Series:
    """Yes or no, written as 1 or 0, true or false.

    >>> flags(Column(pl.Series(["1", "False"]), "clicked", Path("a.csv"))).to_list()
    [True, False]
    """
    values = column.bare().cast(pl.String).str.to_lowercase()
    yes, no = values.is_in(["1", "1.0", "true"]), values.is_in(["0", "0.0", "false"])
    column.refuse(~(yes | no).fill_null(False), "1 or 0 (or true or false)")
    return yes


def times(column: Column) -> pl.Series:
    """Numbers, or ISO dates as moments in UTC.

    >>> times(Column(pl.Series(["2024-01-01T00:00:00Z"]), "time", Path("a.csv"))).dt.epoch("s").to_list()
    [1704067200]
    """
    values = column.bare()
    if values.dtype.is_temporal():
        if values.dtype not in (pl.Date, pl.Datetime):
            raise HomebodyError(
                f"The time column '{values.name}' of {column.path} holds {values.dtype} values; it needs "
                "numbers or dates."
            )
        column.refuse(values.is_null(), "a time in every row")
        return values.cast(pl.Datetime("us"))
    counted = _as_numbers(values)
    if values.dtype == pl.String and counted.null_count():
        dated = _as_dates(values)
        # What most rows are is what the column is meant to be; the others are the mistakes.
        if dated.null_count() < counted.null_count():
            counted = dated
    column.refuse(counted.cast(pl.Int64, strict=False).is_null(), "numbers (of 64 bits) or ISO dates")
    return counted


def usual(present: list[str], names: Collection[str]) -> list[str]:
    """The columns called by one of these names, in any spelling of case, `_` and `-`.

    >>> usual(["User_ID", "age"], {"user", "userid"})
    ['User_ID']
    """
    return [name for name in present if name.strip().lower().replace("_", "").replace("-", "") in names]


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(f"'{name}'" for name in names)


def _as_numbers(values: pl.Series) -> pl.Series:
    """Null where there is no finite number; whole numbers stay whole, which floats cannot always hold."""
    if values.dtype == pl.String:
        whole = values.cast(pl.Int64, strict=False)
        if whole.null_count() == values.null_count():
            return whole
        values = values.cast(pl.Float64, strict=False)
    elif not values.dtype.is_numeric():
        return values.is_null().replace_strict({True: None, False: None}, return_dtype=pl.Float64)
    if values.dtype.is_decimal():
        values = values.cast(pl.Float64)
    return values if values.dtype.is_integer() else values.set(~values.is_finite(), None)


def _as_dates(text: pl.Series) -> pl.Series:
    text = text.str.replace(r"^(\d{4}-\d{2}-\d{2})[Tt]", "$1 ").str.replace(r"[Zz]$", "+00:00")
    dates = pl.Series([None], dtype=pl.Datetime("us")).new_from_index(0, len(text))
    for form in DATE_FORMATS:
        if dates.null_count() == text.null_count():
            break
        parsed = text.str.to_datetime(form, time_unit="us", strict=False)
        moment = parsed.dt.convert_time_zone("UTC").dt.replace_time_zone(None) if "z" in form else parsed
        dates = dates.zip_with(dates.is_not_null(), moment)
    return dates

"""Columns of other people's files: their values, or an error that names the row; and which kind of feature they are.

A spreadsheet takes a cell that begins with = + - or @ for a formula, which may start programs or send data away. An
apostrophe before it makes it text: names are marked so when they are written, and are bare again when they are read.
Numbers stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import polars as pl

from homebody.data.dates import EITHER_WAY, compact, day_first, iso, moments, with_format
from homebody.data.origins import Named, Origin, option
from homebody.data.population import KINDS, Kind, Numbered
from homebody.errors import HomebodyError, refuse_unknown

__all__ = ["FileColumn", "known_kinds", "listed", "mark", "mark_all", "names_of_items", "single", "unmark_all", "usual"]

# What spreadsheets and data frames write where there was nothing.
MISSING = ("", "nan", "NaN", "NAN", "null", "NULL", "None", "NA", "N/A", "<NA>")

TEXTS = (pl.String, pl.Categorical, pl.Enum)
"""Types of texts."""
_FORMULA = "^'*[=+\\-@\\t\\r\\n＝＋－＠]"
_MARKED = "^'+[=+\\-@\\t\\r\\n＝＋－＠]"
_NUMBER = "^[+-]?(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"
DECIMAL_COMMA = "^[+-]?[0-9]+,[0-9]{1,2}$"
SEPARATOR = "|"
FEW = 32
"""Whole numbers with more distinct values than this are amounts, not codes."""
LONG = 12
"""Characters from which on a text, on average, is something to read rather than a label."""
EXACT = 2.0**53
"""Above this, floats cannot hold every whole number."""
EPOCHS = ((7e8, 2.2e9), (7e11, 2.2e12))
"""Seconds, and milliseconds, from 1992 to 2039: numbers that are taken for times."""
TITLES = ("title", "name")
"""The name of the column of item names."""
# Numbers are not written like this, codes are: 01234.
PADDED = r"^[+-]?0\d"


@dataclass(frozen=True)
class FileColumn:
    """One column, what it is for, and the file it came from, so that an error can say all three.

    >>> stars = FileColumn(pl.Series("stars", ["3", "bad"]), "rating", Path("a.csv"))
    >>> stars.numbers()
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The rating column 'stars' of a.csv must hold numbers, but row 2 has 'bad'
    (1 such row, counted from 1, header aside); --rating-col '' does without ratings.
    """

    values: pl.Series
    role: str
    path: Path | Named

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
        if values.dtype in TEXTS:
            text = values.cast(pl.String).str.strip_chars()
            return text.set(text.is_in(MISSING), None)
        return values

    def refuse(self, bad: pl.Series, needs: str, remedy: str = "", *, as_written: bool = False) -> None:
        """Raise if any row is marked, showing the first. as_written: a spelling of nothing, such as NaN, is shown."""
        row = bad.arg_max()
        if row is None or not bad[row]:
            return
        value = self.values[row]
        shown = f"'{value}'" if as_written or self.bare()[row] is not None else "nothing"
        count = int(bad.sum())
        raise HomebodyError(
            f"The {self.role} column '{self.values.name}' of {self.path} must hold {needs}, but row "
            f"{row + 1} has {shown} ({count} such {'row' if count == 1 else 'rows'}, counted from 1, "
            f"header aside){remedy}."
        )

    def ids(self) -> pl.Series:
        """Ids as whole numbers where all are written as such, otherwise as text.

        >>> [FileColumn(pl.Series(some), "user", Path("a.csv")).ids().dtype for some in (["10", "9"], ["007", "9"])]
        [Int64, String]
        """
        values = self.bare()
        self.refuse(values.is_null(), f"{'an' if self.role == 'item' else 'a'} {self.role} in every row")
        if values.dtype in (pl.Int32, pl.Int64):
            return values
        if values.dtype.is_integer():
            small = values.cast(pl.Int64, strict=False)
            return small if small.null_count() == 0 else values.cast(pl.String)
        if values.dtype.is_float():
            self.refuse(values.abs() > EXACT, f"{self.role}s that floats hold exactly, up to 2^53", ": make it a text")
            whole = values.cast(pl.Int64, strict=False)
            return whole if (whole == values).all() else values
        text = unmark_all(values.cast(pl.String))
        if text.str.ends_with(".0").all():
            # Data frames write whole numbers so once one of them was missing.
            text = text.str.strip_suffix(".0")
        whole = text.cast(pl.Int64, strict=False)
        # 007 and 7 may be two people: only what a number would be written as is a number.
        return whole if (whole.cast(pl.String) == text).all() and whole.null_count() == 0 else text

    def numbered(self) -> Numbered:
        """The distinct ids, and for each row which it has.

        >>> FileColumn(pl.Series("who", ["b", " a", "a"]), "user", Path("a.csv")).numbered().rows.tolist()
        [1, 0, 0]
        """
        values = self.values
        if values.dtype not in TEXTS:
            return Numbered.of(self.ids())
        # What is done to a text is done once, however many rows have it.
        written = Numbered.of(values.fill_null(""))
        distinct = FileColumn(written.ids.alias(values.name), self.role, self.path)
        if distinct.bare().null_count():
            self.ids()  # refuses them by their rows
        return Numbered.of(distinct.ids()).of_rows(written.rows)

    def numbers(self) -> pl.Series:
        """Finite numbers in every row. A comma with one or two digits after it is a point.

        >>> FileColumn(pl.Series(["1", "2.5"]), "rating", Path("a.csv")).numbers().to_list()
        [1.0, 2.5]
        """
        values = self.bare()
        if values.dtype == pl.String and values.str.contains(DECIMAL_COMMA).any():
            plain = values.str.contains(f"{DECIMAL_COMMA}|^[+-]?[0-9]+$")
            values = values if not plain.all() else values.str.replace(",", ".", literal=True)
        values = _as_numbers(values)
        self.refuse(~values.cast(pl.Float32).is_finite().fill_null(False), "numbers", f"; {self._without()}")
        return values

    def _without(self) -> str:
        """How to do without the column."""
        equal = "=" if _in_python(self.path) else " "
        return f"{option(self.path, f'{self.role}_col')}{equal}'' does without {self.role}s"

    def numbers_or_nothing(self, remedy: str = "") -> pl.Series:
        """Finite numbers, or null where there is nothing.

        >>> FileColumn(pl.Series(["1", "NA"]), "numeric", Path("a.csv")).numbers_or_nothing().to_list()
        [1, None]
        """
        values = self.bare()
        numbers = _as_numbers(values)
        self.refuse(numbers.is_null() & values.is_not_null(), "numbers", remedy)
        return numbers

    def refuse_not_finite(self, remedy: str = "") -> None:
        """Refuse a cell that reads as NaN or as an infinite number; an empty one may be.

        >>> FileColumn(pl.Series("x", ["1", "", "-inf"]), "feature", Path("a.csv")).refuse_not_finite()
        Traceback (most recent call last):
            ...
        homebody.errors.HomebodyError: The feature column 'x' of a.csv must hold no NaN and nothing infinite, but row 3
        has '-inf' (1 such row, counted from 1, header aside).
        """
        values = self.values
        if values.dtype.is_nested() or not (values.dtype.is_float() or values.dtype in (pl.String, pl.Categorical)):
            return
        text = values if values.dtype.is_float() else values.cast(pl.String).str.strip_chars()
        bad = ~text.cast(pl.Float64, strict=False).is_finite()
        self.refuse(bad.fill_null(False), "no NaN and nothing infinite", remedy, as_written=True)

    def flags(self) -> pl.Series:
        """Yes or no, written as 1 or 0, true or false.

        >>> FileColumn(pl.Series(["1", "False"]), "clicked", Path("a.csv")).flags().to_list()
        [True, False]
        """
        values = self.bare().cast(pl.String).str.to_lowercase()
        yes, no = values.is_in(["1", "1.0", "true"]), values.is_in(["0", "0.0", "false"])
        self.refuse(~(yes | no).fill_null(False), "1 or 0 (or true or false)")
        return yes

    def times(self, form: str | None = None) -> pl.Series:
        """Numbers, or dates as moments in UTC; in this format, if one is given.

        >>> FileColumn(pl.Series(["2024-01-01T00:00:00Z"]), "time", Path("a.csv")).times().dt.epoch("s").to_list()
        [1704067200]
        >>> FileColumn(pl.Series("day", ["1/2/2024"]), "time", Path("a.csv")).times()
        Traceback (most recent call last):
            ...
        homebody.errors.HomebodyError: The day or the month may come first in the time column 'day' of a.csv, such as
        '1/2/2024': give --time-format '%d/%m/%Y' or '%m/%d/%Y'.
        """
        values = self.bare()
        if values.dtype.is_temporal():
            if values.dtype not in (pl.Date, pl.Datetime):
                raise HomebodyError(
                    f"The time column '{values.name}' of {self.path} holds {values.dtype} values; it needs "
                    "numbers or dates."
                )
            self.refuse(values.is_null(), "a time in every row")
            if isinstance(values.dtype, pl.Datetime) and values.dtype.time_zone is not None:
                values = values.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
            return values.cast(pl.Datetime("us"))
        if form is not None:
            found = with_format(values.cast(pl.String), form)
            self.refuse(found.is_null(), f"times written as {form} ({option(self.path, 'time_format')})")
            return found
        if (dates := compact(values)) is not None and dates.null_count() == 0:
            return dates
        counted = _as_numbers(values)
        if values.dtype == pl.String and counted.null_count():
            dated = self._dated(values, counted.null_count())
            # The column has the type of most rows; the other rows are mistakes.
            if dated.null_count() < counted.null_count():
                counted = dated
        remedy = f"; {option(self.path, 'time_format', '%d.%m.%Y %H:%M')} reads such a form, {self._without()}"
        wrong = counted.cast(pl.Int64, strict=False).is_null()
        self.refuse(wrong, "numbers (of 64 bits) or dates", remedy if values.null_count() < len(values) else "")
        return counted.cast(pl.Int64) if counted.dtype.is_integer() else counted

    def _dated(self, text: pl.Series, least: int) -> pl.Series:
        dates = iso(text)
        if dates.null_count() == text.null_count():
            return dates
        first = day_first(text)
        if first is None:
            forms = " or ".join(f"'{form}'" for form in EITHER_WAY)
            sample = moments(text.head(1000), True)
            if sample.null_count() * 2 <= len(sample):
                row = int(text.str.contains(r"^\d{1,2}[/-]\d{1,2}[/-]").fill_null(False).arg_max() or 0)
                raise HomebodyError(
                    f"The day or the month may come first in the time column '{text.name}' of {self.path}, such as "
                    f"'{text[row]}': give "
                    f"{option(self.path, 'time_format')}{'=' if _in_python(self.path) else ' '}{forms}."
                )
        return moments(text, first)

    def mostly_numbers(self) -> bool:
        """Whether more than half of the values are numbers, finite or not.

        >>> FileColumn(pl.Series("x", ["1", "inf", "?"]), "rating", Path("a.csv")).mostly_numbers()
        True
        """
        if not (self.values.dtype in TEXTS or self.values.dtype.is_numeric()):
            return False
        values = self.bare().drop_nulls()
        return values.cast(pl.Float64, strict=False).null_count() * 2 < len(values)

    def mostly_times(self) -> bool:
        """Whether more than half of the values are dates, or seconds or milliseconds since 1970 of recent decades.

        >>> FileColumn(pl.Series("x", ["2024-02-01", "yesterday", "2024-02-02"]), "time", Path("a.csv")).mostly_times()
        True
        """
        return self._share_of_times() > 0.5

    def looks_like_times(self) -> bool:
        """Whether the values are dates, or seconds or milliseconds since 1970 of recent decades.

        >>> columns = [["2024-02-01"], ["1700000000", "1700000009"], ["1999"], ["soon"]]
        >>> [FileColumn(pl.Series("x", values), "feature", Path("a.csv")).looks_like_times() for values in columns]
        [True, True, False, False]
        """
        return self._share_of_times() == 1.0

    def _share_of_times(self) -> float:
        """Of the first 1,000 values."""
        if self.values.dtype.is_temporal():
            return float(self.values.dtype in (pl.Date, pl.Datetime))
        if not (self.values.dtype in TEXTS or self.values.dtype.is_numeric()):
            return 0.0
        few = FileColumn(self.values.drop_nulls().head(1000), self.role, self.path).bare().drop_nulls()
        if not len(few):
            return 0.0
        counted = _as_numbers(few)
        if counted.null_count() == 0:
            return float(max(counted.is_between(*span).sum() for span in EPOCHS) / len(few))
        dated = 0 if few.dtype != pl.String else len(few) - moments(few, bool(day_first(few))).null_count()
        return dated / len(few)

    def guess(self) -> Kind:
        """The kind of feature that the values look like.

        Lists, and texts of which one has a `|`, are multi-hot. Numbers are categorical if they are whole, have at
        most 32 distinct values and each value stands twice on average; otherwise numeric. Texts of which more
        than half are distinct, and which are long (12 characters on average) or of several words, are text;
        others are categorical. Numbers with leading zeros are codes, so texts.

        >>> kinds = [["Drama|War", "Drama"], ["7", "7"], ["7", "8.5"], ["F", "M"], ["Emma, a novel", "Dracula, retold"]]
        >>> [FileColumn(pl.Series("x", values), "feature", Path("a.csv")).guess() for values in kinds]
        ['multi-hot', 'categorical', 'numeric', 'categorical', 'text']
        """
        if isinstance(self.values.dtype, pl.List | pl.Array):
            return "multi-hot"
        values = self.bare().drop_nulls()
        if len(values) == 0 or values.dtype == pl.Boolean or values.dtype.is_temporal():
            return "categorical"
        number = _number_like(values)
        if number.all():
            amount, distinct = values.cast(pl.Float64), values.n_unique()
            codes = (amount == amount.round()).all() and distinct <= FEW and distinct * 2 <= len(values)
            return "categorical" if codes else "numeric"
        text = values.cast(pl.String)
        if text.str.contains(SEPARATOR, literal=True).any():
            return "multi-hot"
        if number.sum() * 2 > len(values):
            # Most are numbers, so the others are mistakes, or the file's owner says that they are not.
            return "numeric"
        long = text.str.len_chars().sum() >= LONG * len(text) or text.str.contains(r"\s").sum() * 2 >= len(text)
        return "text" if long and text.n_unique() * 2 > len(text) else "categorical"

    def guess_of_items(self) -> Kind:
        """The same, but what items are called is something to read, however short it is."""
        kind = self.guess()
        return "text" if kind == "categorical" and usual([self.values.name], TITLES) else kind

    def as_kind(self, kind: Kind) -> pl.Series:
        """The values as `Features` holds that kind; an invalid value is refused, with its row.

        >>> genres = FileColumn(pl.Series("genres", ["War|Drama|War", None]), "item", Path("a.csv"))
        >>> genres.as_kind("multi-hot").to_list()
        [['War', 'Drama'], None]
        """
        name = self.values.name
        column = FileColumn(self.values, kind, self.path)
        if kind == "multi-hot":
            return _lists(column)
        if isinstance(self.values.dtype, pl.List | pl.Array):
            raise HomebodyError(f"The column '{name}' of {self.path} holds lists, so it is multi-hot, not {kind}.")
        if kind == "numeric":
            return column.numbers_or_nothing(f"; put them right, or say what it is with --kind {name}=categorical")
        values = column.bare()
        return _codes(values) if kind == "categorical" else values.cast(pl.String)


def usual(present: list[str], names: Collection[str]) -> list[str]:
    """The columns called by one of these names, in any spelling of case, `_` and `-`.

    >>> usual(["User_ID", "age"], {"user", "userid"})
    ['User_ID']
    """
    return [name for name in present if name.strip().lower().replace("_", "").replace("-", "") in names]


def single(path: Origin, role: str, matches: list[str], remedy: str) -> str | None:
    """The column of a role, or None; several candidates are refused."""
    if len(matches) > 1:
        raise HomebodyError(f"{path} has several columns that could be the {role} ({listed(matches)}); {remedy}.")
    return matches[0] if matches else None


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(f"'{name}'" for name in names)


def _in_python(origin: Origin) -> bool:
    return "--" not in option(origin, "time_format")


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


def mark(text: str) -> str:
    """A cell that no spreadsheet computes.

    >>> [mark(text) for text in ("=1+1", "'=1+1", "-2.5", "-x", "o'clock")]
    ["'=1+1", "''=1+1", '-2.5', "'-x", "o'clock"]
    """
    return f"'{text}" if re.search(_FORMULA, text) and not re.search(_NUMBER, text) else text


def mark_all(names: pl.Series) -> pl.Series:
    """`mark` for a column; one of numbers stays as it is."""
    if names.dtype != pl.String:
        return names
    formula = names.str.contains(_FORMULA) & ~names.str.contains(_NUMBER)
    return ("'" + names).zip_with(formula, names)


def unmark_all(names: pl.Series) -> pl.Series:
    """The inverse of `mark_all`.

    >>> unmark_all(mark_all(pl.Series(["=1+1", "'=1+1", "-2.5", "o'clock"]))).to_list()
    ['=1+1', "'=1+1", '-2.5', "o'clock"]
    """
    return names.str.slice(1).zip_with(names.str.contains(_MARKED).fill_null(False), names)


def names_of_items(rows: pl.DataFrame, known: pl.Series | None) -> pl.Series | None:
    """Names for people, from a column of titles or names; an item without one keeps its id."""
    called = [name for title in TITLES for name in usual(rows.columns, (title,))]
    if not called or isinstance(rows[called[0]].dtype, pl.List):
        return None
    ids = pl.Series(range(rows.height)) if known is None else known
    names = rows[called[0]].cast(pl.String)
    return names.zip_with(names.is_not_null(), ids.cast(pl.String)).alias("name")


def known_kinds(given: Mapping[str, str]) -> dict[str, Kind]:
    """The declared kinds of columns; an unknown kind is refused."""
    refuse_unknown("kind of feature", given.values(), KINDS)
    return {name: cast(Kind, kind) for name, kind in given.items()}


def _codes(values: pl.Series) -> pl.Series:
    """Whole numbers if all are, and each can be kept as it is; otherwise texts."""
    if values.dtype == pl.Boolean or not _number_like(values.drop_nulls()).all():
        return values.cast(pl.String)
    whole = values.cast(pl.Int64, strict=False)
    if not values.dtype.is_integer() and (values.dtype != pl.String or whole.null_count() > values.null_count()):
        # Data frames write whole numbers as 3.0 once one of them was missing.
        number = values.cast(pl.Float64)
        whole = number.set((number != number.round()) | (number.abs() > EXACT), None).cast(pl.Int64)
    return whole if whole.null_count() == values.null_count() else values.cast(pl.String)


def _number_like(values: pl.Series) -> pl.Series:
    if values.dtype.is_numeric():
        return values.is_not_null()
    text = values.cast(pl.String)
    number = text.cast(pl.Float64, strict=False)
    if text.str.contains(PADDED).any():
        return number.is_null() & number.is_not_null()
    return number.is_finite().fill_null(False)


def _lists(column: FileColumn) -> pl.Series:
    values = column.values
    if isinstance(values.dtype, pl.List | pl.Array):
        inner = values.dtype.inner
        if isinstance(inner, pl.DataType) and inner.is_nested():
            raise HomebodyError(
                f"The column '{values.name}' of {column.path} holds {values.dtype} values; it needs lists of texts."
            )
        parts = values.cast(pl.List(pl.String))
    else:
        parts = column.bare().cast(pl.String).str.split(SEPARATOR)
    parts = parts.list.eval(pl.element().str.strip_chars())
    parts = parts.list.eval(pl.element().filter(pl.element().is_not_null() & ~pl.element().is_in(MISSING)))
    return parts.list.unique(maintain_order=True)

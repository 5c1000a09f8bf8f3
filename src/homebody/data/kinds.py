"""What kind of feature a column is: a guess that can be overruled, and the values in the form of that kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import polars as pl

from homebody.data.columns import MISSING, Column, numbers_or_nothing, usual
from homebody.data.features import KINDS, Kind
from homebody.errors import HomebodyError, unknown_name

__all__ = ["as_kind", "guess", "guess_of_items", "known_kinds", "names_of_items"]

SEPARATOR = "|"
FEW = 32
"""Whole numbers with more distinct values than this are amounts, not codes."""
LONG = 12
"""Characters from which on a text, on average, is something to read rather than a label."""

EXACT = 2.0**53
"""Above it, floats are not all the whole numbers there are."""

TITLES = ("title", "name")
"""What the column is called that says how items are."""

# Numbers are not written like this, codes are: 01234.
PADDED = r"^[+-]?0\d"


def guess(column: Column) -> Kind:
    """The kind that a column's values look like.

    Lists, and texts of which one has a `|`, are multi-hot. Numbers are categorical if they are whole, have at
    most 32 distinct values and each value stands twice on average; otherwise numeric. Texts of which more
    than half are distinct, and which are long (12 characters on average) or of several words, are text;
    others are categorical. Numbers with leading zeros are codes, so texts.
    Dates (of Parquet) are categorical.

    >>> from pathlib import Path
    >>> kinds = [["Drama|War", "Drama"], ["7", "7"], ["7", "8.5"], ["F", "M"], ["Emma, a novel", "Dracula, another"]]
    >>> [guess(Column(pl.Series("x", values), "feature", Path("a.csv"))) for values in kinds]
    ['multi-hot', 'categorical', 'numeric', 'categorical', 'text']
    """
    if isinstance(column.values.dtype, pl.List | pl.Array):
        return "multi-hot"
    values = column.bare().drop_nulls()
    if len(values) == 0 or values.dtype == pl.Boolean or values.dtype.is_temporal():
        return "categorical"
    number = _number_like(values)
    if number.all():
        amount = values.cast(pl.Float64)
        codes = (amount == amount.round()).all() and _few(values)
        return "categorical" if codes else "numeric"
    text = values.cast(pl.String)
    if text.str.contains(SEPARATOR, literal=True).any():
        return "multi-hot"
    if number.sum() * 2 > len(values):
        # Most are numbers, so the others are mistakes, or the file's owner says that they are not.
        return "numeric"
    long = text.str.len_chars().sum() >= LONG * len(text) or text.str.contains(r"\s").sum() * 2 >= len(text)
    return "text" if long and text.n_unique() * 2 > len(text) else "categorical"


def guess_of_items(column: Column) -> Kind:
    """The same, but what items are called is something to read, however short it is."""
    kind = guess(column)
    return "text" if kind == "categorical" and usual([column.values.name], TITLES) else kind


def names_of_items(rows: pl.DataFrame, known: pl.Series | None) -> pl.Series | None:
    """Names for people, from a column of titles or names; an item without one keeps its id."""
    called = [name for title in TITLES for name in usual(rows.columns, (title,))]
    if not called or isinstance(rows[called[0]].dtype, pl.List):
        return None
    own = pl.Series(range(rows.height)) if known is None else known
    names = rows[called[0]].cast(pl.String)
    return names.zip_with(names.is_not_null(), own.cast(pl.String)).alias("name")


def known_kinds(given: Mapping[str, str]) -> dict[str, Kind]:
    """The kinds that columns are said to be of, if there are such kinds."""
    for kind in given.values():
        if kind not in KINDS:
            raise unknown_name("kind of feature", kind, KINDS)
    return {name: cast(Kind, kind) for name, kind in given.items()}


def as_kind(column: Column, kind: Kind) -> pl.Series:
    """The values as `Features` holds that kind; a value that is none is refused, with its row.

    >>> from pathlib import Path
    >>> as_kind(Column(pl.Series("genres", ["War|Drama|War", None]), "item", Path("a.csv")), "multi-hot").to_list()
    [['War', 'Drama'], None]
    """
    name = column.values.name
    column = Column(column.values, kind, column.path)
    if kind == "multi-hot":
        return _lists(column)
    if isinstance(column.values.dtype, pl.List | pl.Array):
        raise HomebodyError(f"The column '{name}' of {column.path} holds lists, so it is multi-hot, not {kind}.")
    if kind == "numeric":
        return numbers_or_nothing(column, f"; put them right, or say what it is with --kind {name}=categorical")
    values = column.bare()
    return _codes(values) if kind == "categorical" else values.cast(pl.String)


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


def _few(values: pl.Series) -> bool:
    distinct = values.n_unique()
    return distinct <= FEW and distinct * 2 <= len(values)


def _lists(column: Column) -> pl.Series:
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

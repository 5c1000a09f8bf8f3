"""Names in CSV files that a spreadsheet would run as a formula: marked when they are written, bare again when read.

A spreadsheet takes a cell that begins with = + - or @ for a formula, which may start programs or send data away. An
apostrophe before it makes it text. Numbers stay as they are.
"""

from __future__ import annotations

import re

import polars as pl

__all__ = ["marked", "marked_all", "unmarked_all"]

_FORMULA = "^'*[=+\\-@\\t\\r\\n＝＋－＠]"
_MARKED = "^'+[=+\\-@\\t\\r\\n＝＋－＠]"
_NUMBER = "^[+-]?(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]+)?$"


def marked(text: str) -> str:
    """A cell that no spreadsheet computes.

    >>> [marked(text) for text in ("=1+1", "'=1+1", "-2.5", "-x", "o'clock")]
    ["'=1+1", "''=1+1", '-2.5', "'-x", "o'clock"]
    """
    return f"'{text}" if re.search(_FORMULA, text) and not re.search(_NUMBER, text) else text


def marked_all(names: pl.Series) -> pl.Series:
    """`marked` for a column; one of numbers stays as it is."""
    if names.dtype != pl.String:
        return names
    formula = names.str.contains(_FORMULA) & ~names.str.contains(_NUMBER)
    return ("'" + names).zip_with(formula, names)


def unmarked_all(names: pl.Series) -> pl.Series:
    """The inverse of `marked_all`.

    >>> unmarked_all(marked_all(pl.Series(["=1+1", "'=1+1", "-2.5", "o'clock"]))).to_list()
    ['=1+1', "'=1+1", '-2.5', "o'clock"]
    """
    return names.str.slice(1).zip_with(names.str.contains(_MARKED).fill_null(False), names)

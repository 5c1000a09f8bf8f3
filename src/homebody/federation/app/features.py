"""What an app knows of people, from a file."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl

from homebody.data.columns import FileColumn, single, unmark_all, usual
from homebody.data.table import USUAL_NAMES, raw_table
from homebody.errors import HomebodyError

__all__ = ["read_features"]


def read_features(path: Path) -> dict[str, dict[str, str]]:
    """Each person's features by name, as texts: the server's model says how they are written in numbers.

    The id is in a column of a usual name, such as user or id, otherwise in the first. An empty cell is no feature.
    """
    table = raw_table(path)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so it describes nobody.")
    matches = usual(table.columns, USUAL_NAMES["user"]) or usual(table.columns, ("id",))
    key = single(path, "user", matches, "rename all but one") or table.columns[0]
    names = [name for name in table.columns if name != key]
    if not names:
        raise HomebodyError(f"{path} has only the column '{key}', so it says nothing about anybody.")
    people = FileColumn(table[key], "user", path).ids().cast(pl.String)
    if (twice := people.filter(people.is_duplicated())).len():
        raise HomebodyError(f"{path} has several rows about the user '{twice[0]}': leave one row for each.")
    columns = {name: _texts(FileColumn(table[name], "feature", path)) for name in names}
    features = {
        person: {name: values[row] for name, values in columns.items() if values[row]}
        for row, person in enumerate(people.to_list())
    }
    if not any(features.values()):
        raise HomebodyError(f"{path} has no value in any column but '{key}', so it says nothing about anybody.")
    return features


def _texts(column: FileColumn) -> list[str]:
    """A column's values as texts; a number that is not finite is refused."""
    values = column.values
    texts = unmark_all(values) if values.dtype == pl.String else values.cast(pl.String)
    shown = [(text or "").strip() for text in texts.to_list()]
    bad = pl.Series([_is_not_finite(text) for text in shown], dtype=pl.Boolean)
    column.refuse(bad, "no NaN and nothing infinite", "; leave the cell empty if nothing is known")
    return shown


def _is_not_finite(text: str) -> bool:
    try:
        return not math.isfinite(float(text))
    except ValueError:
        return False

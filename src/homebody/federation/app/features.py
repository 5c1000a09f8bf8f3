"""What an app knows of people, from a file."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from homebody.data.attach import Say, id_column
from homebody.data.columns import FileColumn, unmark_all
from homebody.data.readers import raw_table
from homebody.errors import HomebodyError

__all__ = ["read_features"]


def read_features(path: Path, say: Say | None = None) -> dict[str, dict[str, str]]:
    """Each person's features by name, as texts: the server's model says how they are written in numbers.

    The id is in a column of a usual name, such as user or id, otherwise in the first, which is said. An empty cell is
    no feature.
    """
    table = raw_table(path)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so it describes nobody.")
    say = say or (lambda message: None)
    key = id_column(path, table.columns, "user", say)
    names = [name for name in table.columns if name != key]
    people = FileColumn(table[key], "user", path).ids().cast(pl.String)
    if (twice := people.filter(people.is_duplicated())).len():
        raise HomebodyError(f"{path} has several rows about the user '{twice[0]}': leave one row for each.")
    columns = {name: _texts(FileColumn(table[name], "feature", path)) for name in names}
    for name in names:
        _say_texts_among_numbers(FileColumn(table[name], "feature", path), say)
    features = {
        person: {name: values[row] for name, values in columns.items() if values[row]}
        for row, person in enumerate(people.to_list())
    }
    if not any(features.values()):
        raise HomebodyError(f"{path} has no value in any column but '{key}', so it says nothing about anybody.")
    return features


def _say_texts_among_numbers(column: FileColumn, say: Say) -> None:
    """Only the server knows whether a column is of numbers, so a text among them is said, not refused."""
    if column.values.dtype != pl.String or column.guess() != "numeric":
        return
    values = unmark_all(column.values)
    strange = column.bare().is_not_null() & values.str.strip_chars().cast(pl.Float64, strict=False).is_null()
    if (row := strange.arg_max()) is not None and strange[row]:
        say(
            f"{column.path.name}: most of '{column.values.name}' are numbers, but row {row + 1} has '{values[row]}'; "
            "if the server's model has numbers there, it counts as unknown."
        )


def _texts(column: FileColumn) -> list[str]:
    """A column's values as texts; a number that is not finite is refused."""
    column.refuse_not_finite("; leave the cell empty if nothing is known")
    values = column.values
    texts = unmark_all(values) if values.dtype == pl.String else values.cast(pl.String)
    return [(text or "").strip() for text in texts.to_list()]

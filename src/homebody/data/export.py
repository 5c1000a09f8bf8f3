"""Some or all people of a population as a CSV file: what a device would have known of them from the beginning."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.columns import SEPARATOR, mark_all
from homebody.data.population import Population, entries
from homebody.errors import HomebodyError, unknown_name
from homebody.files import replacing

__all__ = ["chosen", "export", "export_elsewhere", "export_view"]


def chosen(text: str, count: int) -> npt.NDArray[np.int64]:
    """Users by number: single ones and ranges, each of them once.

    >>> chosen("0-2,7", 10).tolist()
    [0, 1, 2, 7]
    >>> chosen("8-12", 10)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no user 12: users are numbered 0 to 9.
    """
    parts = [re.fullmatch(r"\s*(\d{1,12})\s*(?:-\s*(\d{1,12})\s*)?", part) for part in text.split(",")]
    ranges = [(int(part[1]), int(part[2] or part[1])) for part in parts if part]
    if None in parts or any(first > last for first, last in ranges):
        raise HomebodyError(f"Users are given by number, such as 0-19 or 0-4,7, not as '{text}'.")
    highest = max(last for _, last in ranges)
    if highest >= count:
        raise HomebodyError(f"There is no user {highest}: users are numbered 0 to {count - 1}.")
    users = np.concatenate([np.arange(first, last + 1) for first, last in ranges])
    if len(np.unique(users)) != len(users):
        raise HomebodyError(f"'{text}' names a user twice: name each once.")
    return users


def export(population: Population, path: Path, users: npt.NDArray[np.int64] | None = None) -> int:
    """Write users' interactions as user, item, time and rating, each as the source calls it; how many they are.

    A user's own are in their order; time and rating are left out where the population has none. A name that a
    spreadsheet would run is marked, and found again when the file is read. The file is readable by its owner alone,
    and whole or not there.
    """
    users = np.arange(population.n_users) if users is None else users
    lengths = population.lengths[users]
    rows = entries(population.indptr[users], lengths)
    columns: dict[str, pl.Series] = {
        "user": _called(np.repeat(users, lengths), population.user_ids),
        "item": _called(population.items[rows], population.item_ids),
    }
    if population.times is not None:
        columns["time"] = pl.Series(population.times[rows])
    if population.ratings is not None:
        columns["rating"] = pl.Series(population.ratings[rows])
    _write(path, columns)
    return len(rows)


def export_elsewhere(population: Population, path: Path, users: npt.NDArray[np.int64] | None = None) -> int:
    """Write what users have in another app as user and item, in the order of the items; how many they are."""
    elsewhere = population.elsewhere
    if elsewhere is None:
        raise HomebodyError(f"{population.name} has nothing elsewhere: make a view of it, such as --view taste=svd.")
    keep = np.ones(len(elsewhere.items), dtype=np.bool_) if users is None else np.isin(elsewhere.owners, users)
    columns = {
        "user": _called(elsewhere.owners[keep], population.user_ids),
        "item": _called(elsewhere.items[keep], population.item_ids),
    }
    _write(path, columns)
    return int(keep.sum())


def export_view(
    population: Population, view: str, path: Path, users: npt.NDArray[np.int64] | None = None
) -> tuple[int, int]:
    """Write the features of a view, a row for each user that has any; how many rows and features they are.

    Columns are named without the view: `taste.1` is written as 1.
    """
    features = population.user_features
    views = {} if features is None else features.views
    columns = [name for name, given in views.items() if given == view]
    if features is None or not columns:
        raise unknown_name("view", view, sorted(set(views.values())) or ["none"])
    users = np.arange(population.n_users) if users is None else users
    table = features.table.select(columns)[users]
    there = ~table.select(pl.all_horizontal(pl.all().is_null())).to_series()
    written = {"user": _called(users, population.user_ids)}
    for name in columns:
        values = table[name].list.join(SEPARATOR) if table[name].dtype == pl.List(pl.String) else table[name]
        written[name.removeprefix(f"{view}.")] = mark_all(values)
    _write(path, {name: values.filter(there) for name, values in written.items()})
    return int(there.sum()), len(columns)


def _called(numbers: npt.NDArray[np.integer], ids: pl.Series | None) -> pl.Series:
    return pl.Series(numbers) if ids is None else mark_all(ids.gather(pl.Series(numbers)))


def _write(path: Path, columns: dict[str, pl.Series]) -> None:
    with replacing(path) as file:
        pl.DataFrame(columns).write_csv(file)

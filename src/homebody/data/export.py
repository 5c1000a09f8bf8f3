"""Some or all people of a population as a CSV file: what a device would have known of them from the beginning."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.columns import mark_all
from homebody.data.population import Population
from homebody.errors import HomebodyError
from homebody.files import replacing

__all__ = ["chosen", "export"]


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
    found = np.concatenate([np.arange(first, last + 1) for first, last in ranges])
    if len(np.unique(found)) != len(found):
        raise HomebodyError(f"'{text}' names a user twice: name each once.")
    return found


def export(population: Population, path: Path, users: npt.NDArray[np.int64] | None = None) -> int:
    """Write users' interactions as user, item, time and rating, each as the source calls it; how many they are.

    A user's own are in their order; time and rating are left out where the population has none. A name that a
    spreadsheet would run is marked, and found again when the file is read. The file is readable by its owner alone,
    and whole or not there.
    """
    users = np.arange(population.n_users) if users is None else users
    lengths = population.lengths[users]
    ends = np.cumsum(lengths)
    # Where each chosen user's rows begin, and then one after the other.
    rows = np.repeat(population.indptr[users] - ends + lengths, lengths) + np.arange(int(lengths.sum()))
    columns: dict[str, pl.Series] = {
        "user": _called(np.repeat(users, lengths), population.user_ids),
        "item": _called(population.items[rows], population.item_ids),
    }
    if population.times is not None:
        columns["time"] = pl.Series(population.times[rows])
    if population.ratings is not None:
        columns["rating"] = pl.Series(population.ratings[rows])
    with replacing(path) as file:
        pl.DataFrame(columns).write_csv(file)
    return len(rows)


def _called(numbers: npt.NDArray[np.integer], ids: pl.Series | None) -> pl.Series:
    return pl.Series(numbers) if ids is None else mark_all(ids.gather(pl.Series(numbers)))

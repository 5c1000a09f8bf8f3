"""Results as frames, with users and items as the data calls them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.core import Users
from homebody.data import Population
from homebody.errors import HomebodyError
from homebody.files import insisting, replacing
from homebody.simulation.rankings import Ranking

__all__ = ["check_frame_file", "history_frame", "item_frame", "ranking_frame", "users_of", "write_frame"]

Longs = npt.NDArray[np.int64]


def users_of(population: Population, given: object) -> Users:
    """The numbers of users: one by the name that the data gives them, several of a list, or everyone by "all".

    >>> two = Population("toy", np.array([0, 1, 2]), np.array([0, 1], dtype=np.int32), 2, user_ids=pl.Series([7, 9]))
    >>> users_of(two, 9).tolist(), users_of(two, [9, 7]).tolist(), users_of(two, "all").tolist()
    ([1], [1, 0], [0, 1])
    >>> users_of(two, [8, 9])
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no user '8' in this population; the first is called 7.
    """
    if isinstance(given, str) and given == "all":
        return np.arange(population.n_users)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return np.array([population.user(str(given))])
    names = pl.Series("user", [str(name) for name in given], dtype=pl.String)
    ids = pl.Series(np.arange(population.n_users)) if population.user_ids is None else population.user_ids
    known = pl.DataFrame({"user": ids.cast(pl.String), "number": np.arange(population.n_users)})
    numbers = names.to_frame().join(known, on="user", how="left", maintain_order="left")["number"]
    if (unknown := names.filter(numbers.is_null())).len():
        population.user(unknown[0])  # raises, and says what users are called
    return numbers.to_numpy().astype(np.int64)


def ranking_frame(population: Population, users: Users, rankings: Iterable[Ranking]) -> pl.DataFrame:
    """A row for each recommended item: user, rank, item, its name if items have names, score. Users in this order.

    >>> two = Population("toy", np.array([0, 1, 2]), np.array([0, 1], dtype=np.int32), 3, item_ids=pl.Series(["a", \
"b", "c"]))
    >>> best = Ranking(np.array([1, 0]), np.array([[2, 0], [1, -1]]), np.array([[3, 1], [2, 0]], dtype=np.float32))
    >>> ranking_frame(two, np.array([0, 1]), [best]).rows()
    [(0, 1, 'b', 2.0), (1, 1, 'c', 3.0), (1, 2, 'a', 1.0)]
    """
    groups = list(rankings)
    people = np.concatenate([group.users for group in groups]) if groups else np.empty(0, dtype=np.int64)
    place = np.full(population.n_users, -1)
    place[people] = np.arange(len(people))
    # Somebody who was asked for twice stands twice, as in the list that was given.
    order = place[users]
    items = np.concatenate([group.items for group in groups])[order] if groups else np.empty((0, 0), dtype=np.int64)
    scores = np.concatenate([group.scores for group in groups])[order] if groups else np.empty((0, 0), np.float32)
    there = items >= 0
    rows, columns = np.nonzero(there)
    ids = None if population.user_ids is None else population.user_ids.gather(pl.Series(users[rows]))
    user = pl.Series("user", users[rows]) if ids is None else ids.alias("user")
    frame = item_frame(population, items[there], scores[there])
    return frame.insert_column(0, user).insert_column(1, pl.Series("rank", columns + 1))


def item_frame(population: Population, items: Longs, scores: npt.NDArray[np.float32]) -> pl.DataFrame:
    """Items as the data calls them, with their scores."""
    columns = named_items(population, items)
    return pl.DataFrame([*columns, pl.Series("score", scores)])


def named_items(population: Population, items: Longs) -> list[pl.Series]:
    """The ids of these items, and their names if they have any."""
    at = pl.Series(items)
    ids = pl.Series(items) if population.item_ids is None else population.item_ids.gather(at)
    names = [] if population.item_names is None else [population.item_names.gather(at).alias("name")]
    return [ids.alias("item"), *names]


def history_frame(lines: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """A row a round: what was trained, every metric, and ε so far for each observer; null where nothing was measured.

    >>> history_frame([{"phase": "train", "round": 1, "step": 1, "clients": 9, "loss": None, "bytes_up": 8,
    ...     "bytes_down": 4, "seconds": 0.5, "metrics": {"hr@10": 0.25}, "epsilon": {"server": "inf"}}]).rows()
    [('train', 1, 1, 9, None, inf, 0.25, 8, 4, 0.5)]
    """
    plain = ("phase", "round", "step", "clients", "loss")
    costs = ("bytes_up", "bytes_down", "seconds", "evaluation_seconds", "compile_seconds")
    metrics, observers = (
        list(dict.fromkeys(name for line in lines for name in line[key])) for key in ("metrics", "epsilon")
    )
    columns: dict[str, list[Any]] = {name: [line.get(name) for line in lines] for name in plain}
    columns |= {f"epsilon/{who}": [_number(line["epsilon"].get(who)) for line in lines] for who in observers}
    columns |= {name: [_number(line["metrics"].get(name)) for line in lines] for name in metrics}
    columns |= {name: [line.get(name) for line in lines] for name in costs if lines and name in lines[0]}
    floats = ("loss", "seconds", "evaluation_seconds", "compile_seconds")
    kinds = {name: pl.Float64 for name in columns if name in floats or "/" in name or name in metrics}
    columns["loss"] = [_number(value) for value in columns["loss"]]
    return pl.DataFrame(columns, schema_overrides=kinds)


FORMATS = (".parquet", ".csv")


def check_frame_file(path: Path) -> None:
    """Refuse a name that says no format a frame is written in, before anything is worked out."""
    if path.suffix.lower() not in FORMATS:
        raise HomebodyError(f"A table is written as Parquet or CSV: end the name in .parquet or .csv, not {path.name}.")
    if path.is_dir():
        raise HomebodyError(f"{path} is a folder: give the name of a file.")


def write_frame(frame: pl.DataFrame, path: Path) -> None:
    """Write a frame into a file that only its owner reads, whole or not at all."""
    check_frame_file(path)
    content = io.BytesIO()  # polars has errors of its own for a full disk
    (frame.write_csv if path.suffix.lower() == ".csv" else frame.write_parquet)(content)
    with insisting(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content.getbuffer())


def _number(value: Any) -> float | None:
    """A number of a record, where JSON has texts for those that are not finite."""
    return None if value is None else float(value)

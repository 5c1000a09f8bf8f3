"""From columns, one row an interaction, to a population."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.features import Features
from homebody.data.population import Population
from homebody.errors import HomebodyError

__all__ = ["build"]

Clock = npt.NDArray[np.int64] | npt.NDArray[np.float64]


def build(
    name: str,
    users: pl.Series,
    items: pl.Series,
    *,
    times: pl.Series | None = None,
    ratings: pl.Series | None = None,
    contexts: Features | None = None,
) -> Population:
    """A population from one row per interaction, none of them missing a user, an item or a time.

    Users and items are numbered in the sorted order of their ids (numbers as numbers), so the same rows
    give the same population whatever order people first appear in. Times may be numbers or dates; they
    order a history at full precision, then are kept as whole numbers (dates as seconds since 1970). Rows of
    equal time keep their order. Row r of `contexts` goes with row r, wherever that ends up.

    >>> toy = build("toy", pl.Series([7, 7, 3]), pl.Series(["b", "a", "b"]), times=pl.Series([9, 5, 1]))
    >>> toy.user_ids.to_list(), toy.item_ids.to_list(), toy.indptr.tolist(), toy.items.tolist()
    ([3, 7], ['a', 'b'], [0, 1, 3], [1, 0, 1])
    """
    if len(users) == 0:
        raise HomebodyError(f"'{name}' has no rows: a population needs at least one interaction.")
    user_ids, row_user = _number(users)
    item_ids, row_item = _number(items)
    clock = None if times is None else _clock(times)
    order = _order(row_user, len(user_ids), clock)
    indptr = np.zeros(len(user_ids) + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_user, minlength=len(user_ids)), out=indptr[1:])
    return Population(
        name,
        indptr,
        row_item[order],
        n_items=len(item_ids),
        times=None if times is None else _whole(times)[order],
        ratings=None if ratings is None else ratings.cast(pl.Float32).to_numpy()[order],
        user_ids=user_ids,
        item_ids=item_ids,
        contexts=None if contexts is None else contexts.rows(order),
    )


def _number(ids: pl.Series) -> tuple[pl.Series, npt.NDArray[np.int32]]:
    """The distinct ids, sorted, and for each row the place of its id among them."""
    rank = ids.rank("dense").cast(pl.Int32) - 1
    return ids.unique().sort(), rank.to_numpy()


def _order(row_user: npt.NDArray[np.int32], n_users: int, clock: Clock | None) -> npt.NDArray[np.intp]:
    """The rows by user, then time; rows of equal time keep the order of the file, for every sort is stable."""
    if clock is None:
        return np.argsort(row_user, kind="stable")
    if clock.dtype.kind == "i":
        low = int(clock.min())
        span = int(clock.max()) - low + 1
        if n_users * span < 2**63:
            # User and time in one number: one sort instead of two.
            return np.argsort(row_user * np.int64(span) + (clock - np.int64(low)), kind="stable")
    return np.lexsort((clock, row_user))


def _clock(times: pl.Series) -> Clock:
    return times.to_physical().to_numpy()


def _whole(times: pl.Series) -> npt.NDArray[np.int64]:
    if times.dtype.is_temporal():
        return times.dt.epoch("s").to_numpy()
    if times.dtype.is_float():
        times = times.floor()
    return times.cast(pl.Int64).to_numpy()

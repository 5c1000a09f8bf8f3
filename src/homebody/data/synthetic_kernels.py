"""Compiled loops behind `homebody.data.synthetic`: one user at a time, the same numbers on any thread."""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import numpy.typing as npt

from homebody.kernels import GOLDEN, below, mix
from homebody.parallel import inner, parallel

__all__ = ["alias_tables", "draw_histories", "draw_lengths"]

_LENGTHS = np.uint64(1)
_HISTORIES = np.uint64(2)
_LOW_HALF = np.uint64(0xFFFFFFFF)
_USERS_PER_BLOCK = 2048


@inner(forceinline=True)
def _stream(seed: np.uint64, purpose: np.uint64, user: int) -> np.uint64:
    return mix(mix(mix(seed + GOLDEN) ^ purpose) + np.uint64(user + 1) * GOLDEN)


@inner(forceinline=True)
def _bits(stream: np.uint64, position: int) -> np.uint64:
    return mix(stream + np.uint64(position + 1) * GOLDEN)


@inner(forceinline=True)
def _uniform(stream: np.uint64, position: int) -> float:
    """In the open interval (0, 1)."""
    return (float(_bits(stream, position) >> np.uint64(11)) + 0.5) * 2.0**-53


@inner(forceinline=True)
def _normal(stream: np.uint64, position: int) -> float:
    """Box and Muller; takes this position and the next."""
    radius = math.sqrt(-2.0 * math.log(_uniform(stream, position)))
    return radius * math.cos(2.0 * math.pi * _uniform(stream, position + 1))


@parallel(over="out")
def draw_lengths(
    lower, upper, seed: np.uint64, shortest: int, extra: int, location: float, sigma: float, out: npt.NDArray[np.int64]
) -> None:
    """Lengths from `shortest` to `shortest + extra`; rounding is random, so that it keeps the mean."""
    for user in range(lower, upper):
        stream = _stream(seed, _LENGTHS, user)
        length = math.exp(min(location + sigma * _normal(stream, 0), 50.0))
        out[user] = shortest + math.floor(min(length, float(extra)) + _uniform(stream, 2))


@nb.njit(cache=True)
def alias_tables(
    weights: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Vose's alias method, a table per row: draw a column, keep it with its probability or take the other."""
    n_rows, n_columns = weights.shape
    keep = np.ones((n_rows, n_columns), dtype=np.float32)
    other = np.empty((n_rows, n_columns), dtype=np.int32)
    for row in range(n_rows):
        for column in range(n_columns):
            other[row, column] = column
        share = weights[row] * (n_columns / weights[row].sum())
        small = np.empty(n_columns, dtype=np.int32)
        large = np.empty(n_columns, dtype=np.int32)
        n_small = n_large = 0
        for column in range(n_columns):
            if share[column] < 1.0:
                small[n_small] = column
                n_small += 1
            else:
                large[n_large] = column
                n_large += 1
        while n_small > 0 and n_large > 0:
            n_small -= 1
            poor, rich = small[n_small], large[n_large - 1]
            keep[row, poor] = share[poor]
            other[row, poor] = rich
            share[rich] -= 1.0 - share[poor]
            if share[rich] < 1.0:
                n_large -= 1
                small[n_small] = rich
                n_small += 1
    return keep, other


@inner()
def _sort(items, holder, user):
    """Bring distinct items into ascending order, which `holder` says are this user's; numpy's sort takes two seconds to
    compile. Many are read off the whole catalogue, few are moved one by one."""
    if len(items) ** 2 > 4 * len(holder):
        n = 0
        for item in range(len(holder)):
            if holder[item] == user:
                items[n] = item
                n += 1
        return
    for i in range(1, len(items)):
        item, place = items[i], i
        while place > 0 and items[place - 1] > item:
            items[place] = items[place - 1]
            place -= 1
        items[place] = item


@parallel(over=lambda seed, indptr, *rest: -(-(len(indptr) - 1) // _USERS_PER_BLOCK))
def draw_histories(
    lower,
    upper,
    seed: np.uint64,
    indptr: npt.NDArray[np.int64],
    keep: npt.NDArray[np.float32],
    other: npt.NDArray[np.int32],
    sharpness: float,
    out: npt.NDArray[np.int32],
) -> None:
    """Fill each user's row with distinct items from their mixture, in ascending order."""
    n_factors, n_items = keep.shape
    n_users = len(indptr) - 1
    for block in range(lower, upper):
        taste = np.empty(n_factors)
        # Who drew the item last: cleared by moving to the next user.
        holder = np.full(n_items, -1, dtype=np.int32)
        for user in range(block * _USERS_PER_BLOCK, min((block + 1) * _USERS_PER_BLOCK, n_users)):
            stream = _stream(seed, _HISTORIES, user)
            total = 0.0
            for factor in range(n_factors):
                total += math.exp(sharpness * _normal(stream, 2 * factor))
                taste[factor] = total
            begin, end = indptr[user], indptr[user + 1]
            wanted = end - begin
            drawn = 0
            position = 2 * n_factors
            patience = position + 2 * (16 * wanted + 64)
            while drawn < wanted:
                if position < patience:
                    choice = _uniform(stream, position) * total
                    factor = 0
                    while factor < n_factors - 1 and taste[factor] <= choice:
                        factor += 1
                    bits = _bits(stream, position + 1)
                    item = np.int64(((bits >> np.uint64(32)) * np.uint64(n_items)) >> np.uint64(32))
                    if float(bits & _LOW_HALF) * 2.0**-32 >= keep[factor, item]:
                        item = np.int64(other[factor, item])
                    position += 2
                else:
                    item = below(stream, position, n_items)
                    while holder[item] == user:
                        item = (item + 1) % n_items
                    position += 1
                if holder[item] != user:
                    holder[item] = user
                    out[begin + drawn] = item
                    drawn += 1
            _sort(out[begin:end], holder, user)

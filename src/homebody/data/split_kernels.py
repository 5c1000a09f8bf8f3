"""Compiled loops behind `homebody.data.splits`, over users' segments of flat arrays."""

from __future__ import annotations

import numba as nb
import numpy as np

from homebody.kernels import below, nth_outside

__all__ = [
    "candidates",
    "count_repeats",
    "first_only",
    "hold_out",
    "pad_excluded",
    "pad_items",
    "sort_segments",
]


@nb.njit(parallel=True, cache=True)
def sort_segments(indptr, items):
    out = items.copy()
    for user in nb.prange(len(indptr) - 1):
        out[indptr[user] : indptr[user + 1]].sort()
    return out


@nb.njit(parallel=True, cache=True)
def count_repeats(indptr, ordered):
    """How many interactions repeat an earlier one of the same user; `ordered` is sorted within users."""
    repeats = np.zeros(len(indptr) - 1, dtype=np.int64)
    for user in nb.prange(len(indptr) - 1):
        for i in range(indptr[user] + 1, indptr[user + 1]):
            repeats[user] += ordered[i] == ordered[i - 1]
    return repeats


@nb.njit(cache=True)
def first_only(indptr, items, n_items):
    """Which interactions are a user's first with that item."""
    keep = np.empty(len(items), dtype=np.bool_)
    last_user = np.full(n_items, -1, dtype=np.int64)
    for user in range(len(indptr) - 1):
        for i in range(indptr[user], indptr[user + 1]):
            keep[i] = last_user[items[i]] != user
            last_user[items[i]] = user
    return keep


@nb.njit(parallel=True, cache=True)
def hold_out(indptr, items, keys, least):
    """Move two randomly chosen interactions of each user to the end, the others keeping their order."""
    out = items.copy()
    for user in nb.prange(len(indptr) - 1):
        start, stop = indptr[user], indptr[user + 1]
        if stop - start < least:
            continue
        for draw in range(2):
            end = stop - draw
            chosen = start + below(keys[user], draw, end - start)
            item = out[chosen]
            for i in range(chosen, end - 1):
                out[i] = out[i + 1]
            out[end - 1] = item
    return out


@nb.njit(parallel=True, cache=True)
def pad_items(users, start, stop, items, out, valid):
    for row in nb.prange(len(users)):
        first = start[users[row]]
        length = stop[users[row]] - first
        for i in range(out.shape[1]):
            inside = i < length
            out[row, i] = items[first + i] if inside else 0
            valid[row, i] = inside


@nb.njit(parallel=True, cache=True)
def pad_excluded(users, indptr, ordered, spare_a, spare_b, fill, out):
    """The distinct entries of each user's sorted segment, less up to two spared items, then `fill`."""
    for row in nb.prange(len(users)):
        user = users[row]
        n, previous = 0, -1
        for i in range(indptr[user], indptr[user + 1]):
            item = ordered[i]
            if item != previous and item != spare_a[row] and item != spare_b[row]:
                out[row, n] = item
                n += 1
            previous = item
        for i in range(n, out.shape[1]):
            out[row, i] = fill


@nb.njit(parallel=True, cache=True)
def candidates(keys, excluded, n_items, out):
    """Distinct items outside each row's sorted list, evenly drawn (Floyd's algorithm); -1 where too few."""
    count = out.shape[1]
    for row in nb.prange(len(keys)):
        listed = np.searchsorted(excluded[row], n_items)
        free = n_items - listed
        n = min(count, free)
        chosen = np.empty(n, dtype=np.int64)
        for i in range(n):
            top = free - n + i
            rank = below(keys[row], i, top + 1)
            for j in range(i):
                if chosen[j] == rank:
                    rank = top
                    break
            chosen[i] = rank
        for i in range(count):
            out[row, i] = nth_outside(excluded[row], listed, chosen[i]) if i < n else -1

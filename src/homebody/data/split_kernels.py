"""Compiled loops behind `homebody.data.splits`, over users' segments of flat arrays."""

from __future__ import annotations

import numba as nb
import numpy as np

from homebody.kernels import ZERO, Array, below, nth_outside
from homebody.parallel import inner, parallel

__all__ = ["candidates", "first_only", "hold_out", "merge", "pad_items", "pad_rows"]


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


def hold_out(starts: Array, stops: Array, rows: Array, keys: Array, counts: Array) -> Array:
    """Move randomly chosen entries of each user to the end, one after another, the others keeping their order."""
    out = rows.copy()
    _hold_out(starts, stops, keys, counts, out)
    return out


@parallel(over="starts")
def _hold_out(lower, upper, starts, stops, keys, counts, out):
    for user in range(lower, upper):
        start, stop = starts[user], stops[user]
        for draw in range(counts[user]):
            end = stop - draw
            chosen = start + below(keys[user], draw, end - start)
            row = out[chosen]
            for i in range(chosen, end - 1):
                out[i] = out[i + 1]
            out[end - 1] = row


@parallel(over="users")
def pad_items(lower, upper, users, start, stop, items, out, valid):
    for row in range(lower, upper):
        first = start[users[row]]
        length = stop[users[row]] - first
        for i in range(out.shape[1]):
            inside = i < length
            out[row, i] = items[first + i] if inside else 0
            valid[row, i] = inside


@inner()
def _next(user, bounds, ordered, which, at, also, place):
    """The smallest item under the cursors of the chosen parts and of the common list; -1 at the end."""
    item = -1
    for part in range(len(which)):
        if which[part] and at[part] < bounds[part + 1, user]:
            head = ordered[at[part]]
            if item < 0 or head < item:
                item = head
    if place < len(also) and (item < 0 or also[place] < item):
        item = also[place]
    return item


@inner()
def _merge(user, bounds, ordered, take, leave, also, out):
    """The distinct items of a user's chosen parts and of the common list, less those of the left ones."""
    parts = len(take)
    at, gone = bounds[:parts, user].copy(), bounds[:parts, user].copy()
    place, n = ZERO, 0
    while True:
        item = _next(user, bounds, ordered, take, at, also, place)
        if item < 0:
            return n
        kept = True
        for part in range(parts):
            end = bounds[part + 1, user]
            if take[part]:
                while at[part] < end and ordered[at[part]] == item:
                    at[part] += 1
            if leave[part]:
                while gone[part] < end and ordered[gone[part]] < item:
                    gone[part] += 1
                kept = kept and not (gone[part] < end and ordered[gone[part]] == item)
        if place < len(also) and also[place] == item:
            place += 1
        if kept:
            if len(out):
                out[n] = item
            n += 1


@parallel(over="users")
def merge(lower, upper, users, bounds, ordered, take, leave, also, starts, out, counts):
    """Each user's merged items, at their place in `out`, and how many there are; where `out` is empty, they are counted
    alone."""
    for row in range(lower, upper):
        place = out[starts[row] : starts[row + 1]] if len(out) else out
        if len(place) or not len(out):
            counts[row] = _merge(users[row], bounds, ordered, take, leave, also, place)


@parallel(over="users")
def pad_rows(lower, upper, users, indptr, items, fill, out):
    for row in range(lower, upper):
        first = indptr[users[row]]
        length = indptr[users[row] + 1] - first
        for i in range(out.shape[1]):
            out[row, i] = items[first + i] if i < length else fill


@parallel(over="keys")
def candidates(lower, upper, keys, excluded, n_items, out):
    """Distinct items outside each row's sorted list, evenly drawn (Floyd's algorithm); -1 where too few."""
    count = out.shape[1]
    for row in range(lower, upper):
        listed = excluded.shape[1]
        while listed > 0 and excluded[row, listed - 1] >= n_items:
            listed -= 1
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

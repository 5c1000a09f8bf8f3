"""The best items for many queries in one pass over all items: exact and compiled.

Items are columns of a table that has room for more. A removed item is a column of NaN, which is never above anything.
A pass may run while items are added or removed: it sees each of them as it was, or as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from homebody.parallel import inner

__all__ = ["BestItems", "Columns"]

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
_TILE = 1024
"""Items that are scored at a time: their scores stay in the processor's nearest cache."""
_BLOCK, _FEW = 64, 16
"""Scores that are compared with the least of the best at a time, and again where one of them is above it."""
_NONE = np.iinfo(np.int64).max
"""The key of no item."""
_ROOM = 1.25
"""How much more than the items a table has room for when it is made anew."""


class BestItems(NamedTuple):
    """The best items of each query, the best first; -1 where there are no more."""

    items: Numbers
    scores: Floats


class Columns:
    """Items as columns: the score of an item is the product of its column and a query's weights.

    >>> columns = Columns(np.array([[1.0, 2.0, 0.0], [0.0, 0.0, 3.0]]))
    >>> columns.best(np.array([[1.0, 0.0], [0.0, 1.0]]), 2).items.tolist()
    [[1, 0], [2, 0]]
    >>> columns.add(np.array([[9.0], [0.0]])); columns.remove(np.array([1]))
    >>> columns.best(np.array([[1.0, 0.0]]), 2).items.tolist()
    [[3, 0]]
    """

    def __init__(self, columns: npt.NDArray[Any]) -> None:
        self._count = columns.shape[1]
        self._table: Floats = np.ascontiguousarray(columns, dtype=np.float32)

    def __len__(self) -> int:
        return self._count

    @property
    def wide(self) -> int:
        """How many weights a query has."""
        return len(self._table)

    def add(self, columns: npt.NDArray[Any]) -> None:
        """Add items behind the others."""
        count = self._count + columns.shape[1]
        if count > self._table.shape[1]:
            larger = np.empty((self.wide, int(_ROOM * count) + 1), dtype=np.float32)
            larger[:, : self._count] = self._table[:, : self._count]
            self._table = larger
        self._table[:, self._count : count] = columns
        self._count = count

    def remove(self, items: npt.NDArray[Any]) -> None:
        """Let these never be among the best again."""
        self._table[:, items] = np.nan

    def best(self, weights: npt.NDArray[Any], k: int) -> BestItems:
        """The k best items of each query; of equal ones, those that came first."""
        count, table = self._count, self._table
        given = np.ascontiguousarray(weights, dtype=np.float32)
        keys = np.full((len(given), 4 * k + _BLOCK), _NONE)
        _rank(table, count, given, k, keys)
        return _ranked(np.sort(keys[:, :k], axis=1))


def _ranked(keys: Numbers) -> BestItems:
    """The items and scores of keys."""
    ascending = ~(keys >> 32)
    bits = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).astype(np.int32)
    none = keys == _NONE
    return BestItems(np.where(none, -1, keys & 0xFFFFFFFF), np.where(none, np.float32(np.nan), bits.view(np.float32)))


@nb.njit(nogil=True, cache=True)
def _rank(columns, count, weights, k, keys):
    """The keys of each query's k best items, in any order. Whenever a block might not fit behind what may be among the
    best, that is cut to its k best."""
    queries, room = keys.shape
    tile = np.empty(_TILE, dtype=np.float32)
    bits = tile.view(np.int32)
    held = np.zeros(queries, dtype=np.int64)
    least = np.full(queries, -np.inf, dtype=np.float32)
    for start in range(0, count, _TILE):
        size = min(_TILE, count - start)
        tile[size:] = np.nan  # what is no item is above nothing
        for query in range(queries):
            _products(columns, weights[query], start, size, tile)
            key, n, bound = keys[query], held[query], least[query]
            for block in range(0, _TILE, _BLOCK):
                if not _any_above(tile[block : block + _BLOCK], bound, _BLOCK):
                    continue
                for few in range(block, block + _BLOCK, _FEW):
                    if not _any_above(tile[few : few + _FEW], bound, _FEW):
                        continue
                    for place in range(few, few + _FEW):
                        if tile[place] > bound:
                            key[n] = _key(bits[place], start + place)
                            n += 1
                if n > room - _BLOCK:
                    bound = _cut(key, n, k)
                    n = k
            held[query], least[query] = n, bound
    for query in range(queries):
        if held[query] > k:
            _cut(keys[query], held[query], k)


@inner(forceinline=True)
def _any_above(scores, bound, size):
    """Whether one of the scores is above the bound. The compiler knows their number, and compares many at once."""
    above = np.int32(0)
    for place in range(size):
        above |= np.int32(scores[place] > bound)
    return above != 0


@inner(forceinline=True)
def _key(bits, item):
    """A score, by its bits, and its item as one number: the smaller, the better; of equal scores, the first item."""
    ascending = np.int64(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (~ascending << 32) | np.int64(item)


@inner()
def _cut(key, n, k):
    """Put the k smallest of n keys first (Hoare's selection), and give the score of the largest of them."""
    low, high = 0, n - 1
    while low < high:
        pivot, left, right = key[(low + high) // 2], low, high
        while left <= right:
            while key[left] < pivot:
                left += 1
            while key[right] > pivot:
                right -= 1
            if left <= right:
                key[left], key[right] = key[right], key[left]
                left += 1
                right -= 1
        if k - 1 <= right:
            high = right
        elif k - 1 >= left:
            low = left
        else:
            break
    largest = key[0]
    for place in range(1, k):
        largest = max(largest, key[place])
    bits = np.empty(1, dtype=np.int32)
    ascending = ~(largest >> 32)
    bits[0] = np.int32(ascending ^ ((ascending >> 31) & 0x7FFFFFFF))
    return bits.view(np.float32)[0]


@inner(forceinline=True)
def _products(columns, weights, start, size, out):
    """The scores of some items."""
    end, wide = start + size, len(weights)
    head = wide % 4
    for place in range(size):
        out[place] = 0
    for row in range(head):
        weight, column = weights[row], columns[row, start:end]
        for place in range(size):
            out[place] += weight * column[place]
    for row in range(head, wide, 4):
        a, b, c, d = weights[row], weights[row + 1], weights[row + 2], weights[row + 3]
        first, second = columns[row, start:end], columns[row + 1, start:end]
        third, fourth = columns[row + 2, start:end], columns[row + 3, start:end]
        for place in range(size):
            half = a * first[place] + b * second[place]
            out[place] += half + (c * third[place] + d * fourth[place])

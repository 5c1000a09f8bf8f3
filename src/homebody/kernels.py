"""Compiled loops behind `homebody.ops`: one client a row, rows in parallel, the same numbers on any thread."""

from __future__ import annotations

import numba as nb
import numpy as np

__all__ = ["draw_negatives", "lay_over", "permute", "scatter_sum", "touch"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@nb.njit(inline="always")
def mix(bits):
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


@nb.njit(inline="always")
def below(key, position, high):
    """The integer under `high` that `Rng.integers` gives at this position."""
    bits = mix(np.uint64(key) + np.uint64(position + 1) * GOLDEN)
    return np.int64(((bits >> np.uint64(32)) * np.uint64(high)) >> np.uint64(32))


@nb.njit(inline="always")
def nth_outside(excluded, n_excluded, rank):
    """The rank-th item that is not in the sorted list: rank + how many listed ones come before it."""
    low, high = 0, n_excluded
    while low < high:
        middle = (low + high) >> 1
        if excluded[middle] - middle <= rank:
            low = middle + 1
        else:
            high = middle
    return rank + low


@nb.njit(parallel=True, cache=True)
def draw_negatives(keys, excluded, n_items, count, out):
    for row in nb.prange(len(keys)):
        listed = np.searchsorted(excluded[row], n_items)
        free = n_items - listed
        for position in range(count):
            if free > 0:
                rank = below(keys[row], position, free)
                out[row, position] = nth_outside(excluded[row], listed, rank)
            else:
                out[row, position] = -1


@nb.njit(parallel=True, cache=True)
def permute(keys, valid, out):
    """Valid positions first, in the order of their hashed keys (ties by position), then the others."""
    width = valid.shape[1]
    for row in nb.prange(len(keys)):
        source = np.empty(width, dtype=np.int64)
        n = 0
        for position in range(width):
            if valid[row, position]:
                source[n] = position
                n += 1
        tail = n
        for position in range(width):
            if not valid[row, position]:
                out[row, tail] = position
                tail += 1
        # One bucket an element on average, then an insertion sort that rarely moves anything.
        hashes = np.empty(n, dtype=np.int64)
        start = np.zeros(n + 1, dtype=np.int64)
        for i in range(n):
            bits = mix(np.uint64(keys[row]) + np.uint64(source[i] + 1) * GOLDEN)
            hashes[i] = np.int64(bits >> np.uint64(33))
            start[((hashes[i] * n) >> 31) + 1] += 1
        for i in range(n):
            start[i + 1] += start[i]
        sorted_hash = np.empty(n, dtype=np.int64)
        for i in range(n):
            bucket = (hashes[i] * n) >> 31
            place = start[bucket]
            start[bucket] += 1
            sorted_hash[place] = hashes[i]
            out[row, place] = source[i]
        for i in range(1, n):
            value, position = sorted_hash[i], out[row, i]
            j = i - 1
            while j >= 0 and sorted_hash[j] > value:
                sorted_hash[j + 1] = sorted_hash[j]
                out[row, j + 1] = out[row, j]
                j -= 1
            sorted_hash[j + 1] = value
            out[row, j + 1] = position


@nb.njit(inline="always")
def _ones(word):
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@nb.njit(parallel=True, cache=True)
def touch(items, valid, n_items, index, slot):
    """Sorted distinct items of each row, and where each position's item stands among them; -1 pads."""
    width = items.shape[1]
    words = (n_items + 63) >> 6
    one = np.uint64(1)
    for row in nb.prange(items.shape[0]):
        seen = np.zeros(words, dtype=np.uint64)
        before = np.empty(words, dtype=np.int64)
        for position in range(width):
            if valid[row, position]:
                item = items[row, position]
                seen[item >> 6] |= one << np.uint64(item & 63)
        n = 0
        for word in range(words):
            before[word] = n
            left = seen[word]
            while left:
                lowest = left & (~left + one)
                index[row, n] = (word << 6) + _ones(lowest - one)
                n += 1
                left ^= lowest
        for i in range(n, index.shape[1]):
            index[row, i] = -1
        for position in range(width):
            if valid[row, position]:
                item = items[row, position]
                under = seen[item >> 6] & ((one << np.uint64(item & 63)) - one)
                slot[row, position] = before[item >> 6] + _ones(under)
            else:
                slot[row, position] = 0


@nb.njit(parallel=True, cache=True)
def lay_over(below_, items, index, over, n_items, out):
    """`over` where an item is in the row's index, `below_` elsewhere."""
    for row in nb.prange(index.shape[0]):
        where = np.full(n_items, -1, dtype=np.int32)
        for i in range(index.shape[1]):
            if index[row, i] >= 0:
                where[index[row, i]] = i
        for position in range(items.shape[1]):
            i = where[items[row, position]]
            out[row, position] = over[row, i] if i >= 0 else below_[row, position]


@nb.njit(parallel=True, cache=True)
def scatter_sum(index, value, table):
    """Add rows to a table in a fixed order; threads share out the columns, so the sum never varies."""
    width = table.shape[1]
    blocks = (width + 15) // 16
    for block in nb.prange(blocks):
        low, high = block * 16, min(width, block * 16 + 16)
        for i in range(len(index)):
            if index[i] >= 0:
                target, source = table[index[i]], value[i]
                for column in range(low, high):
                    target[column] += source[column]

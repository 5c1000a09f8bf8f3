"""Compiled loops behind `homebody.ops` and `homebody.bags`: one client a row, the same numbers on any thread."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from homebody.parallel import inner, parallel

__all__ = [
    "NO",
    "YES",
    "ZERO",
    "add_rows",
    "add_scaled",
    "count_pairs",
    "draw_negatives",
    "drop",
    "in_order",
    "integers",
    "label",
    "lay_over",
    "permute",
    "permute_often",
    "power",
    "scale",
    "scatter_sum",
    "spread_rows",
    "store",
    "sum_rows",
    "take_rows",
    "toss",
    "touch",
]

Array = npt.NDArray[Any]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


ZERO, YES, NO = np.int64(0), np.bool_(True), np.bool_(False)
"""Constants of the usual types: a bare 0 or True has a type of its own, and what it is passed to is compiled again."""


@inner(forceinline=True)
def store(source, out):
    """`out[:] = source`, in one dimension. Assigning a slice would make numba compile its error for unequal lengths
    as well, which takes three seconds."""
    for place in range(len(out)):
        out[place] = source[place]


@inner(forceinline=True)
def mix(bits):
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


@inner(forceinline=True)
def below(key, position, high):
    """The integer under `high` that `Rng.integers` gives at this position."""
    bits = mix(np.uint64(key) + np.uint64(position + 1) * GOLDEN)
    return np.int64(((bits >> np.uint64(32)) * np.uint64(high)) >> np.uint64(32))


@inner(forceinline=True)
def nth_outside(excluded, n_excluded, rank):
    """The rank-th item that is not in the sorted list: rank + how many listed ones come before it.

    The search takes no branch that depends on the data: the processor could not guess it.
    """
    before, left = 0, n_excluded
    while left > 1:
        half = left >> 1
        middle = before + half - 1
        before += half * (excluded[middle] - middle <= rank)
        left -= half
    if left == 1:
        before += excluded[before] - before <= rank
    return rank + before


SEARCH = 8
"""Items that can be written down in the time that one search of a list takes."""


@inner(forceinline=True)
def _negatives_of(key, excluded, n_items, out):
    listed = np.searchsorted(excluded, n_items)
    free = n_items - listed
    if free <= 0:
        out[:] = -1
    elif len(out) * SEARCH > n_items:
        # Many are drawn from a small catalogue: writing down what is outside the list is cheaper than searching it.
        outside = np.empty(free, dtype=np.int32)
        item = n = 0
        for place in range(listed + 1):
            end = excluded[place] if place < listed else n_items
            while item < end:
                outside[n] = item
                n += 1
                item += 1
            item += 1
        for position in range(len(out)):
            out[position] = outside[below(key, position, free)]
    else:
        for position in range(len(out)):
            out[position] = nth_outside(excluded, listed, below(key, position, free))


@parallel(over="keys")
def draw_negatives(lower, upper, keys, excluded, n_items, out):
    for row in range(lower, upper):
        _negatives_of(keys[row], excluded[row], n_items, out[row])


@inner(forceinline=True)
def _permutation_of(key, source, order):
    """`source` in the order of its hashed entries, ties as they stand; into `order`. It ascends."""
    n = len(source)
    # The hash in the upper half, the entry in the lower one: what is compared, and what is moved, is one number.
    hashed = np.empty(n, dtype=np.int64)
    start = np.zeros(n + 1, dtype=np.int32)
    # One bucket an element on average, then an insertion sort that rarely moves anything.
    for i in range(n):
        bits = np.int64(mix(np.uint64(key) + np.uint64(source[i] + 1) * GOLDEN) >> np.uint64(33))
        start[((bits * n) >> 31) + 1] += 1
        hashed[i] = (bits << 32) | source[i]
    for i in range(n):
        start[i + 1] += start[i]
    ordered = np.empty(n, dtype=np.int64)
    for i in range(n):
        bucket = ((hashed[i] >> 32) * n) >> 31
        place = start[bucket]
        start[bucket] = place + 1
        ordered[place] = hashed[i]
    for i in range(1, n):
        value = ordered[i]
        j = i - 1
        while j >= 0 and ordered[j] > value:
            ordered[j + 1] = ordered[j]
            j -= 1
        ordered[j + 1] = value
    for i in range(n):
        order[i] = ordered[i] & 0xFFFFFFFF


@inner(forceinline=True)
def _parted(valid, source, behind):
    """The valid positions, and the others, in order; how many are valid."""
    n = 0
    for position in range(len(valid)):
        source[n], behind[position - n] = position, position
        n += valid[position]
    return n


@parallel(over="keys")
def permute(lower, upper, keys, valid, out):
    """Valid positions first, in the order of their hashes (ties by position), then the others."""
    width = valid.shape[1]
    for row in range(lower, upper):
        source, behind = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
        n = _parted(valid[row], source, behind)
        _permutation_of(keys[row], source[:n], out[row])
        store(behind[: width - n], out[row, n:])


@parallel(over="keys")
def permute_often(lower, upper, keys, valid, out):
    """As `permute`, so many times over, each time with a key of its own."""
    width = valid.shape[1]
    for row in range(lower, upper):
        source, behind = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
        n = _parted(valid[row], source, behind)
        for turn in range(out.shape[1]):
            key = mix(np.uint64(keys[row]) + np.uint64(turn + 1) * GOLDEN)
            _permutation_of(key, source[:n], out[row, turn])
            store(behind[: width - n], out[row, turn, n:])


@parallel(over="items")
def label(lower, upper, draw_keys, order_keys, items, valid, excluded, n_items, per_item, out, labels, real):
    """Each row's items and their negatives, shuffled: `negatives` and `shuffled` in one pass."""
    length = items.shape[1]
    step = per_item + 1
    for row in range(lower, upper):
        drawn = np.empty(length * per_item, dtype=np.int64)
        _negatives_of(draw_keys[row], excluded[row], n_items, drawn)
        # What stands at a position, doubled, plus 1 for the client's own items.
        marked = np.empty(length * step, dtype=np.int64)
        source = np.empty(length * step, dtype=np.int64)
        n = 0
        for i in range(length):
            if not valid[row, i]:
                continue
            marked[i * step] = 2 * items[row, i] + 1
            source[n] = i * step
            n += 1
            if drawn[i * per_item] >= 0:
                for j in range(per_item):
                    marked[i * step + 1 + j] = 2 * drawn[i * per_item + j]
                    source[n] = i * step + 1 + j
                    n += 1
        order = np.empty(n, dtype=np.int64)
        _permutation_of(order_keys[row], source[:n], order)
        for place in range(n):
            entry = marked[order[place]]
            out[row, place] = entry >> 1
            labels[row, place] = entry & 1
            real[row, place] = True
        out[row, n:] = 0
        labels[row, n:] = 0
        real[row, n:] = False


@inner(forceinline=True)
def _ones(word):
    """How many bits are set: the compiler knows this for what it is, and takes the processor's own."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@parallel(over="items")
def touch(lower, upper, items, valid, n_items, index, slot):
    """Sorted distinct items of each row, and where each position's item stands among them; -1 pads."""
    width = items.shape[1]
    words = (n_items + 63) >> 6
    bit = np.uint64(1)
    for row in range(lower, upper):
        seen = np.zeros(words, dtype=np.uint64)
        before = np.empty(words, dtype=np.int64)
        for position in range(width):
            if valid[row, position]:
                item = items[row, position]
                seen[item >> 6] |= bit << np.uint64(item & 63)
        n = 0
        for word in range(words):
            before[word] = n
            left = seen[word]
            while left:
                lowest = left & (~left + bit)
                index[row, n] = (word << 6) + _ones(lowest - bit)
                n += 1
                left ^= lowest
        index[row, n:] = -1
        for position in range(width):
            if valid[row, position]:
                item = items[row, position]
                under = seen[item >> 6] & ((bit << np.uint64(item & 63)) - bit)
                slot[row, position] = before[item >> 6] + _ones(under)
            else:
                slot[row, position] = 0


@parallel(over="index")
def lay_over(lower, upper, below_, items, index, over, n_items, add, out):
    """`over` where an item is in the row's index, added to `below_` or in its place; `below_` elsewhere."""
    for row in range(lower, upper):
        where = np.full(n_items, -1, dtype=np.int32)
        for i in range(index.shape[1]):
            if index[row, i] >= 0:
                where[index[row, i]] = i
        for position in range(items.shape[1]):
            value, i = below_[row, position], where[items[row, position]]
            if i >= 0:
                value = value + over[row, i] if add else over[row, i]
            out[row, position] = value


@parallel(over="slot")
def take_rows(lower, upper, table, slot, out):
    """Rows of each client's own table."""
    for client in range(lower, upper):
        for i in range(slot.shape[1]):
            store(table[client, slot[client, i]], out[client, i])


@parallel(over="slot")
def add_rows(lower, upper, slot, value, scale, table):
    """Add scaled rows to each client's own table, in place."""
    for client in range(lower, upper):
        for i in range(slot.shape[1]):
            target, source = table[client, slot[client, i]], value[client, i]
            for column in range(len(target)):
                target[column] += scale * source[column]


@parallel(over="row")
def sum_rows(lower, upper, tables, row, weight, block, sums):
    """Sums of some rows of each client's own table with weights, in each block."""
    for client in range(lower, upper):
        table, rows, out = tables[client], row[client], sums[client]
        out[:] = 0
        for i in range(rows.shape[0]):
            for k in range(rows.shape[1]):
                w = weight[client, i, k]
                if w != 0:
                    source, target = table[rows[i, k]], out[i, block[client, k]]
                    for column in range(len(source)):
                        target[column] += w * source[column]


@parallel(over="row")
def spread_rows(lower, upper, row, weight, block, change, tables):
    """Add to the rows that `sum_rows` takes what their block changes by, with the same weights, in place."""
    for client in range(lower, upper):
        table, rows, changes = tables[client], row[client], change[client]
        for i in range(rows.shape[0]):
            for k in range(rows.shape[1]):
                w = weight[client, i, k]
                if w != 0:
                    target, source = table[rows[i, k]], changes[i, block[client, k]]
                    for column in range(len(target)):
                        target[column] += w * source[column]


@parallel(over="keys")
def integers(lower, upper, keys, high, out):
    """Each row's integers under `high`, as `Rng.integers` gives them."""
    for row in range(lower, upper):
        for position in range(out.shape[1]):
            out[row, position] = below(keys[row], position, high)


@parallel(over="keys")
def toss(lower, upper, keys, value, bias, out):
    """A coin for each value, by the upper 52 bits of what `Rng.bits` gives."""
    for row in range(lower, upper):
        for position in range(out.shape[1]):
            bits = mix(np.uint64(keys[row]) + np.uint64(position + 1) * GOLDEN) >> np.uint64(12)
            chance = 0.5 + 0.5 * bias * np.float64(value[row, position])
            wanted = min(max(chance * 4503599627370496.0, 2.0), 4503599627370494.0)  # never certain
            out[row, position] = np.float64(bits) < wanted


@parallel(over=lambda keys, least, kept, out: out.shape[0] * out.shape[1])
def drop(lower, upper, keys, least, kept, out):
    """Each place `kept` where its 16 bits of what `Rng.bits` gives reach `least`, otherwise 0."""
    count, width = out.shape[1], out.shape[2]
    words = (width + 3) // 4
    for both in range(lower, upper):
        stream, row = both // count, both % count
        for word in range(words):
            bits = mix(np.uint64(keys[stream]) + np.uint64(row * words + word + 1) * GOLDEN)
            for place in range(4 * word, min(4 * word + 4, width)):
                out[stream, row, place] = kept if bits & np.uint64(0xFFFF) >= least else np.float32(0.0)
                bits >>= np.uint64(16)


@parallel(over=lambda index, value, table: (table.shape[1] + 15) // 16)
def scatter_sum(lower, upper, index, value, table):
    """Add rows to a table in a fixed order; threads share out the columns, so the sum never varies."""
    width = table.shape[1]
    for i in range(len(index)):
        row = index[i]
        if row < 0:
            continue
        for block in range(lower, upper):
            low = block * 16
            if low + 16 <= width:  # so many that the compiler needs no loop
                for column in range(16):
                    table[row, low + column] += value[i, low + column]
            else:
                for column in range(low, width):
                    table[row, column] += value[i, column]


def in_order(index: Array, value: Array) -> bool:
    """Whether every client's rows are there once, in ascending order, and nothing but zeros behind them."""
    right = np.ones(len(index), dtype=np.bool_)
    _in_order(index, value, right)
    return bool(right.all())


@parallel(over="index")
def _in_order(lower, upper, index, value, right):
    for row in range(lower, upper):
        highest = -1
        padded = False
        for position in range(index.shape[1]):
            if index[row, position] < 0:
                padded = True
                for number in value[row, position]:
                    if number != 0:
                        right[row] = False
            elif padded or index[row, position] <= highest:
                right[row] = False
            else:
                highest = index[row, position]


@parallel(over="value")
def power(lower, upper, value, order, out):
    """Each row's sum of |x| or of x², in doubles."""
    for row in range(lower, upper):
        total = 0.0
        for number in value[row]:
            wide = np.float64(number)
            total += abs(wide) if order == 1 else wide * wide
        out[row] = total


@parallel(over="value")
def scale(lower, upper, value, factor, out):
    """Each row times its factor, in doubles; a factor of 0 gives zeros, whatever the row holds."""
    for row in range(lower, upper):
        for position in range(value.shape[1]):
            wide = np.float64(value[row, position])
            out[row, position] = wide * factor[row] if factor[row] != 0 else 0.0


@parallel(over="value")
def add_scaled(lower, upper, value, factor, out):
    """Add each row times its factor to `out`, in place; a factor of 0 adds nothing, whatever the row holds."""
    for row in range(lower, upper):
        if factor[row] != 0:
            for position in range(value.shape[1]):
                out[row, position] += np.float64(value[row, position]) * factor[row]


def count_pairs(bits: Array, pairs: Array) -> None:
    """Add to the upper half of `pairs` in how many rows of `bits` both of two columns are set."""
    _count_pairs(_packed(bits), pairs)


@nb.njit(cache=True)
def _packed(bits):
    """64 rows in a word for each column; as many words as make four."""
    rows, size = bits.shape
    packed = np.zeros(((rows + 255) // 256 * 4, size), dtype=np.uint64)
    for row in range(rows):
        for column in range(size):
            packed[row // 64, column] |= np.uint64(bits[row, column]) << np.uint64(row % 64)
    return packed


@parallel(over="pairs")
def _count_pairs(lower, upper, packed, pairs):
    size = packed.shape[1]
    for place in range(lower, upper):
        # Long rows and short ones by turns, so that every thread gets as much.
        column = np.int64(place) // 2 if place % 2 == 0 else size - 1 - np.int64(place) // 2
        row = pairs[column, column:]
        for word in range(0, len(packed), 4):
            first, second = packed[word, column:], packed[word + 1, column:]
            third, fourth = packed[word + 2, column:], packed[word + 3, column:]
            a, b, c, d = first[0], second[0], third[0], fourth[0]
            for other in range(size - column):
                half = _ones(a & first[other]) + _ones(b & second[other])
                row[other] += np.int32(half + _ones(c & third[other]) + _ones(d & fourth[other]))

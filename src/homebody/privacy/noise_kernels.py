"""Compiled samplers of exact noise: whole numbers, made of random bits by whole-number arithmetic alone.

Random bits come in units of 32. A stream of them is `state` (key, position, units read) and `units`: where `units` is
empty they are hashed from key and position, as `homebody.rng.Rng` does; otherwise they are read from it in order.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from homebody.kernels import GOLDEN, mix, store
from homebody.parallel import inner, parallel

__all__ = [
    "MOST_UNITS",
    "add_steps",
    "noise_keyed",
    "noise_read",
    "round_at_random",
    "skellam_keyed",
    "skellam_read",
    "steps",
]

MOST_UNITS = 1024
"""One draw reads more with probability under 2⁻²⁰⁰."""
_AT_ONCE = 2048
"""Draws that one thread makes in a row."""
_BLOCK = 1024
"""Numbers that are copied before they are rounded: they stay in the fastest cache."""
_MASK = np.uint64(0xFFFFFFFF)
_ROUNDED = 2.0**30
"""Numbers from here on are not rounded but left out: nothing that was clipped comes near."""


@inner(forceinline=True)
def _unit(state, units):
    count = state[2]
    state[2] = count + np.uint64(1)
    if len(units):
        return np.uint64(units[min(np.int64(count), len(units) - 1)])
    return mix(mix(state[0] + (count + np.uint64(1)) * GOLDEN) + (state[1] + np.uint64(1)) * GOLDEN) >> np.uint64(32)


@inner(forceinline=True)
def _word(state, units):
    high = _unit(state, units)
    return (high << np.uint64(32)) | _unit(state, units)


@inner(forceinline=True)
def _less(high, low, state, units):
    """True with probability (high · 2⁶⁴ + low) / 2¹²⁸: a random fraction is compared until a unit differs."""
    for limb in (high >> np.uint64(32), high & _MASK, low >> np.uint64(32), low & _MASK):
        drawn = _unit(state, units)
        if drawn != limb:
            return drawn < limb
    return False


@inner(forceinline=True)
def _one_of(count, state, units):
    """True with probability 1 / count."""
    usable = np.uint64(2**32) - np.uint64(2**32) % count
    drawn = _unit(state, units)
    while drawn >= usable:
        drawn = _unit(state, units)
    return drawn % count == 0


@inner()
def _survives(high, low, state, units):
    """True with probability e^−γ, where γ < 1 is this fraction of 2¹²⁸ (Canonne, Kamath and Steinke, Algorithm 1).

    The first k at which an event of probability γ / k fails is odd with that probability.
    """
    k = np.uint64(1)
    while _less(high, low, state, units) and (k == np.uint64(1) or _one_of(k, state, units)):
        k += np.uint64(1)
    return k & np.uint64(1) == np.uint64(1)


@inner()
def _survives_one(state, units):
    """True with probability 1 / e: as above with γ = 1, whose first event never fails."""
    k = np.uint64(2)
    while _one_of(k, state, units):
        k += np.uint64(1)
    return k & np.uint64(1) == np.uint64(1)


@inner()
def _laplace(depth, state, units):
    """k with probability proportional to exp(−|k| / 2^depth), exactly, for a depth of at most 40."""
    shift = np.uint64(63 - depth)
    while True:
        word = _word(state, units)
        within = (word >> np.uint64(1)) >> shift  # below 2^depth; the lowest bit of the word is free for the sign
        if not _survives((within << shift) << np.uint64(1), np.uint64(0), state, units):
            continue
        times = np.int64(0)
        while _survives_one(state, units):
            times += 1
        size = (times << depth) + np.int64(within)
        if not word & np.uint64(1):
            return size
        if size:  # zero has one sign
            return -size


@inner(forceinline=True)
def _wide(a, b):
    """The product of two 64-bit numbers in 128 bits."""
    a1, a0, b1, b0 = a >> np.uint64(32), a & _MASK, b >> np.uint64(32), b & _MASK
    low, middle_1, middle_2 = a0 * b0, a0 * b1, a1 * b0
    middle = (low >> np.uint64(32)) + (middle_1 & _MASK) + (middle_2 & _MASK)
    high = a1 * b1 + (middle_1 >> np.uint64(32)) + (middle_2 >> np.uint64(32)) + (middle >> np.uint64(32))
    return high, (middle << np.uint64(32)) | (low & _MASK)


@inner()
def _settled(cell, word, high, low, state, units):
    """The cell of a random fraction whose first 64 bits are those of a boundary: by 192 bits more."""
    first, second, third = _word(state, units), _word(state, units), _word(state, units)
    while cell < len(high) - 1 and high[cell] == word:
        rest = low[cell]
        if first < rest[0] or (first == rest[0] and (second < rest[1] or (second == rest[1] and third < rest[2]))):
            break
        cell += 1
    return cell


@inner()
def _gaussian(depth, high, low, guide, state, units):
    """A normal variable of standard deviation 2^depth, rounded to a whole number.

    Its size, in cells of 1/256 of the deviation, is cell c plus a fraction u of it. A table gives c with probability
    proportional to exp(−c²/2¹⁷), and (c, u) is kept with probability exp(−(2cu + u²)/2¹⁷): together that is the density
    of a half normal. Two things are not exact. Of u, 44 bits are drawn, and the middle of what they leave open stands
    for it: the density is off by a factor within 1 ± 2⁻¹⁰⁰. The table has 256 bits and ends at 20 deviations: that is
    under 2⁻²⁴⁰ in total variation.
    """
    while True:
        word = _word(state, units)
        cell = guide[word >> np.uint64(52)]
        while high[cell] < word:
            cell += 1
        if high[cell] == word:
            cell = _settled(cell, word, high, low, state, units)
        bits = _word(state, units)
        fraction = bits >> np.uint64(20)
        middle = (fraction << np.uint64(1)) | np.uint64(1)  # u · 2⁴⁵
        above, below = _wide(middle, (np.uint64(cell) << np.uint64(46)) + middle)  # (2cu + u²) · 2⁹⁰
        above = (above << np.uint64(21)) | (below >> np.uint64(43))  # a fraction of 2¹²⁸: shifted by 128 − 90 − 17
        if _survives(above, below << np.uint64(21), state, units):
            size = (np.uint64(cell) << np.uint64(44)) | fraction  # in 2⁻⁵² of the deviation
            shift = np.uint64(52 - depth)
            size = np.int64((size + (np.uint64(1) << (shift - np.uint64(1)))) >> shift)
            return -size if bits & np.uint64(1) else size


@inner()
def _noise(depth, high, low, guide, state, units):
    """Normal noise by its table, or Laplace noise where there is none."""
    if len(high):
        return _gaussian(depth, high, low, guide, state, units)
    return _laplace(depth, state, units)


@parallel(over=lambda keys, depth, high, low, guide, out: len(keys) * -(-out.shape[1] // _AT_ONCE))
def noise_keyed(lower, upper, keys, depth, high, low, guide, out):
    units = np.empty(0, dtype=np.uint32)
    width = out.shape[1]
    blocks = (width + _AT_ONCE - 1) // _AT_ONCE
    for block in range(lower, upper):
        row, state = block // blocks, np.zeros(3, dtype=np.uint64)
        for place in range(block % blocks * _AT_ONCE, min(width, (block % blocks + 1) * _AT_ONCE)):
            state[0], state[1], state[2] = np.uint64(keys[row]), np.uint64(place), np.uint64(0)
            out[row, place] = _noise(depth, high, low, guide, state, units)


@nb.njit(cache=True, nogil=True)
def noise_read(units, depth, high, low, guide, out):
    """As many draws as these units are enough for; answers how many."""
    state, done = np.zeros(3, dtype=np.uint64), 0
    while done < len(out) and len(units) - np.int64(state[2]) >= MOST_UNITS:
        out[done] = _noise(depth, high, low, guide, state, units)
        done += 1
    return done


@inner(forceinline=True)
def _skellam(word, high, guide):
    """The place in the table of a random fraction of which these are the first 64 bits, unless a boundary has them."""
    bucket = np.int64(word >> np.uint64(52))
    first, last = guide[bucket], guide[bucket + 1]
    while first < last:
        middle = (first + last) >> 1
        if high[middle] < word:
            first = middle + 1
        else:
            last = middle
    return first


@inner()
def _skellam_settled(place, word, more, high, low):
    """The place of a random fraction whose first 64 bits are those of a boundary: by 64 bits more."""
    while place < len(high) - 1 and high[place] == word and low[place] <= more:
        place += 1
    return place


@parallel(over=lambda keys, high, low, guide, smallest, out: len(keys) * -(-out.shape[1] // _AT_ONCE))
def skellam_keyed(lower, upper, keys, high, low, guide, smallest, out):
    width = out.shape[1]
    blocks = (width + _AT_ONCE - 1) // _AT_ONCE
    for block in range(lower, upper):
        row = block // blocks
        for place in range(block % blocks * _AT_ONCE, min(width, (block % blocks + 1) * _AT_ONCE)):
            own = np.uint64(keys[row]) + np.uint64(place + 1) * GOLDEN
            word = mix(own)
            found = _skellam(word, high, guide)
            if found < len(high) and high[found] == word:
                found = _skellam_settled(found, word, mix(word ^ mix(np.uint64(keys[row]))), high, low)
            out[row, place] = smallest + min(found, len(high) - 1)


@nb.njit(cache=True, nogil=True)
def skellam_read(words, more, high, low, guide, smallest, out):
    """A draw for each of these words of 64 bits. Ties are settled by `more`, in turn; answers how many it took of it.

    A draw that finds none left is not made, nor are those after it: `out` must be drawn anew.
    """
    ties = 0
    for place in range(len(out)):
        found = _skellam(words[place], high, guide)
        if found < len(high) and high[found] == words[place]:
            if ties < len(more):
                found = _skellam_settled(found, words[place], more[ties], high, low)
            ties += 1
        out[place] = smallest + min(found, len(high) - 1)
    return ties


@parallel(over="value")
def round_at_random(lower, upper, value, keys, starts, scale, most, tries, out):
    """Each row times `scale` as whole numbers, each rounded up or down at random so that its mean stays.

    A row is drawn anew while its squares add up to more than `most`, if that is not negative. After so many tries it is
    rounded toward zero, and if that is too much as well it becomes zeros. starts: where its tensors begin, and the end;
    keys: one for each tensor.
    """
    for row in range(lower, upper):
        for attempt in range(tries + 2):
            power = np.int64(0)
            for tensor in range(len(starts) - 1):
                key = mix(np.uint64(keys[row, tensor]) + np.uint64(attempt + 1) * GOLDEN)
                for place in range(starts[tensor], starts[tensor + 1]):
                    number = np.float64(value[row, place]) * scale
                    if attempt > tries or not abs(number) < _ROUNDED:
                        out[row, place] = 0
                        continue
                    below = np.floor(number)
                    if attempt == tries:
                        below = np.trunc(number)
                    elif number != below:
                        bits = mix(key + np.uint64(place - starts[tensor] + 1) * GOLDEN)
                        if np.float64(bits >> np.uint64(11)) * 2.0**-53 < number - below:
                            below += 1.0
                    whole = np.int64(below)
                    out[row, place] = whole
                    if most >= 0:
                        power += whole * whole
                        if power > most:
                            break
                if 0 <= most < power:
                    break
            if most < 0 or power <= most:
                break


@parallel(over="value")
def steps(lower, upper, value, step, most, out):
    """Each number as whole steps, toward zero, at most so many; what is no number is 0.

    `out` may lie where `value` does: a block is read before it is written.
    """
    for row in range(lower, upper):
        block = np.empty(_BLOCK, dtype=value.dtype)
        for start in range(0, value.shape[1], _BLOCK):
            end = min(value.shape[1], start + _BLOCK)
            store(value[row, start:end], block[: end - start])
            for place in range(end - start):
                count = np.float64(block[place]) / step
                count = count if count == count else 0.0
                out[row, start + place] = min(max(count, -most), most)


@parallel(over=lambda value, out: -(-len(out) // _AT_ONCE))
def add_steps(lower, upper, value, out):
    """Add every row to the sums: a block of columns a thread, so that the sums stay in its cache."""
    for block in range(lower, upper):
        end = min(len(out), (block + 1) * _AT_ONCE)
        for row in range(len(value)):
            for place in range(block * _AT_ONCE, end):
                out[place] += value[row, place]

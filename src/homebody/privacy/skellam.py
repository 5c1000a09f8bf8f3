"""Exact draws of Skellam noise: the difference of two Poisson variables of the same mean.

A draw turns random bits into noise by whole-number arithmetic alone. Its table is computed in whole numbers too.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.privacy import noise_kernels
from homebody.privacy.grid import drawn
from homebody.rng import Rng

__all__ = ["UNIT", "skellam"]

UNIT = 1 << 10
"""Variances are whole numbers of 1 / UNIT."""
_WIDEST = 1 << 32
"""A larger variance is drawn as a sum: a table for it would not fit into caches, nor be computed in a second."""
_LOST = 130
"""A table ends where a probability of less than 2⁻¹³⁰ is left."""


def skellam(rng: Rng, units: int, *shape: int) -> Tensor:
    """Skellam variables of mean 0 and variance units / UNIT, drawn exactly; runs under vmap.

    A table holds the cumulative distribution in 128 bits. 64 random bits are looked up in it; if they equal those of a
    boundary, 64 more decide. A draw is exact to 2⁻¹⁰⁷ in total variation. The largest table has 2²⁰·⁷ entries.

    >>> skellam(Rng.of(0), 5 * UNIT, 4).dtype
    torch.int64
    """
    parts = -(-units // (_WIDEST * UNIT))
    if parts > 1:
        return torch.stack([skellam(rng, -(-units // parts), *shape) for _ in range(parts)]).sum(0)
    return drawn(rng, shape, partial(_from_system, units), noise_kernels.skellam_keyed, *table(units))


def _from_system(units: int, count: int) -> npt.NDArray[np.int64]:
    """Drawn from the operating system's bits. About one draw in 2⁴⁹ needs more than 64 of them."""
    out = np.empty(count, dtype=np.int64)
    spare = 64
    while True:
        words = np.frombuffer(bytearray(os.urandom(8 * (count + spare))), dtype=np.uint64)
        if noise_kernels.skellam_read(words[spare:], words[:spare], *table(units), out) <= spare:
            return out


class Table(NamedTuple):
    """The cumulative distribution of a Skellam variable: at each place, P(X ≤ smallest + place) · 2¹²⁸, exclusive."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]
    guide: npt.NDArray[np.int64]
    """The first place whose `high` reaches a prefix, for each prefix of 12 bits."""
    smallest: int


@lru_cache(maxsize=4)
def table(units: int) -> Table:
    """The table of a Skellam variable of mean 0 and variance v = units / UNIT.

    P(k) is proportional to the Bessel function I_k(v). Miller's recurrence I_(k−1) = I_(k+1) + (2k/v) I_k is followed
    downwards in whole numbers: it is stable in that direction, and what it begins with does not matter further down.
    """
    variance, level = units / UNIT, _LOST * math.log(2)
    largest = math.ceil(level / 3 + math.sqrt(level**2 / 9 + 2 * level * variance))  # by Bernstein's inequality
    above, here, tail = 0, 1 << 64, 0
    tails = []
    for twice in range(2 * largest * UNIT, 0, -2 * UNIT):
        tail += here
        tails.append(tail)  # P(X ≥ k), from the largest k down to 1
        above, here = here, above + twice * here // units
    total = 2 * tail + here
    shift = total.bit_length() + 64
    inverse = (1 << (128 + shift)) // total
    lower = b"".join([(part * inverse >> shift).to_bytes(16, "little") for part in tails])  # P(X ≤ −k)
    words = np.frombuffer(lower, dtype="<u8").astype(np.uint64).reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    # P(X ≤ k) = 1 − P(X ≥ k + 1), from k = 0 up, modulo 2¹²⁸. Where that is 1, the largest number stands for it.
    ones, zero = np.uint64(2**64 - 1), (low == 0) & (high == 0)
    low_up = np.where(zero, ones, ~low + np.uint64(1))[::-1]
    high_up = np.where(zero, ones, ~high + (low == 0))[::-1]
    low, high = np.concatenate([low, low_up, [ones]]), np.concatenate([high, high_up, [ones]])
    first = np.arange(4096, dtype=np.uint64) << np.uint64(52)
    guide = np.append(np.searchsorted(high, first), len(high)).astype(np.int64)
    return Table(high, low, guide, -largest)

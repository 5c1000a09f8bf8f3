"""What a shuffle hides: Feldman, McMillan and Talwar, "Hiding Among the Clones" (FOCS 2021).

Each of n people sends one report of an ε₀-LDP randomiser, and the observer sees the reports in random order. With
probability e^−ε₀ each of the others' reports is a *clone*: as likely to have come from the first person under
either of their two values. The observer then learns no more than from a pair of counts: with C ~ Bin(n − 1, e^−ε₀),
A ~ Bin(C, ½) and a bit that is right with probability e^ε₀ / (e^ε₀ + 1), whether the first person's report added to
A or to C − A. Everything here is computed from that pair; it holds for any ε₀-LDP randomiser.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["clone_losses", "closed_form", "closed_form_limit", "split_on_grid"]

_TAIL = 46.0
"""What is less likely than e^−46 is counted as the worst that can happen instead of being computed."""
_BUCKETS = 400
"""Numbers of clones that are told apart."""


def closed_form_limit(users: int, delta: float) -> float:
    """The largest ε₀ that the closed form speaks of: log(n / (16 log(2/δ))).

    >>> round(closed_form_limit(6040, 1e-6), 2), round(closed_form_limit(1000, 1e-6), 2)
    (3.26, 1.46)
    """
    return math.log(users / (16 * math.log(2 / delta)))


def closed_form(epsilon: float, users: int, delta: float) -> float | None:
    """ε after one shuffle, by Theorem 3.1; nothing outside its condition.

    >>> round(closed_form(1.0, 10**6, 1e-6), 4)
    0.0235
    >>> closed_form(2.5, 1000, 1e-6) is None
    True
    """
    if delta <= 0 or epsilon > closed_form_limit(users, delta):
        return None
    gain = math.exp(epsilon)
    spread = 8 * math.sqrt(gain * math.log(4 / delta) / users) + 8 * gain / users
    return min(epsilon, math.log1p((gain - 1) / (gain + 1) * spread))


@lru_cache(maxsize=1)
def clone_losses(epsilon: float, users: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The privacy loss of one shuffle and its probability, cell by cell.

    Given c clones, the first count x is one of 0 … c + 1. With t = x / (c + 1) and α the probability of the right
    bit, its loss is log((αt + (1−α)(1−t)) / ((1−α)t + α(1−t))). Where cells are lumped together, it is into a worse
    one: fewer clones tell more, so numbers of clones are rounded down, and tails count as the whole ε₀.
    """
    from scipy import stats

    right, wrong, rate = 1 / (1 + math.exp(-epsilon)), 1 / (1 + math.exp(epsilon)), math.exp(-epsilon)
    clones = stats.binom(users - 1, rate)
    # Bernstein's inequality; for the counts given c, Hoeffding's.
    reach = _TAIL / 3 + math.sqrt(_TAIL**2 / 9 + 2 * _TAIL * (users - 1) * rate * (1 - rate))
    low = max(0, math.floor((users - 1) * rate - reach))
    high = min(users - 1, math.ceil((users - 1) * rate + reach))
    starts = np.unique(np.linspace(low, high, _BUCKETS).astype(np.int64))
    ends = np.append(starts[1:] - 1, users - 1)
    weights = clones.cdf(ends) - clones.cdf(starts - 1)
    losses, masses = [], []
    for c, weight in zip(starts.tolist(), weights.tolist(), strict=True):
        reach = math.sqrt(_TAIL * (c + 1) / 2)
        x = np.arange(max(0, math.floor((c + 1) / 2 - reach)), min(c + 1, math.ceil((c + 1) / 2 + reach)) + 1)
        t = x / (c + 1)
        here, there = right * t + wrong * (1 - t), wrong * t + right * (1 - t)
        losses.append(np.log(here / there))
        masses.append(weight * 2 * here * stats.binom.pmf(x, c + 1, 0.5))
    loss, mass = np.concatenate(losses), np.concatenate(masses)
    # What is missing, by truncation or rounding: as if there were no clone at all.
    missing = max(0.0, 1 - mass.sum())
    loss = np.append(loss, [epsilon, -epsilon])
    return loss, np.append(mass, [missing * right, missing * wrong])


def split_on_grid(
    losses: NDArray[np.float64], masses: NDArray[np.float64], interval: float
) -> tuple[int, NDArray[np.float64]]:
    """Losses put on multiples of the interval: the lowest multiple, and the mass on it and on each above.

    A loss between two multiples is split among them so that its mass is kept in both worlds: p and p·e^−loss. Telling
    the parts apart could only tell more, so the bound stays one, and it is far closer than rounding up.

    >>> lowest, mass = split_on_grid(np.array([0.25]), np.array([1.0]), 0.1)
    >>> lowest, mass.round(2).tolist()
    (2, [0.49, 0.51])
    >>> float((mass * np.exp([-0.2, -0.3])).sum() / np.exp(-0.25))
    1.0
    """
    places = np.floor(losses / interval).astype(np.int64)
    above = -np.expm1(-(losses - places * interval)) / -math.expm1(-interval)
    above = np.clip(above, 0.0, 1.0) * masses
    lowest = int(places.min())
    size = int(places.max()) - lowest + 2
    mass = np.zeros(size)
    mass += np.bincount(places - lowest, masses - above, size)
    mass += np.bincount(places - lowest + 1, above, size)
    return lowest, mass

"""Lower bounds on ε from guesses: what a claim of (ε, δ) would make too unlikely to have happened.

Both estimators are given a score of each secret coin, larger where the attacker thinks it fell on `True`. Their bounds
hold with the stated confidence whatever the scores are; a poor attack only makes them small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError

__all__ = ["Lower", "clopper_pearson", "one_run", "one_run_p_value"]

FEWEST = 8
"""Guesses; fewer could not show anything."""
LARGEST = 50.0
"""No bound beyond this is looked for."""
_THRESHOLDS = 400

Coins = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lower:
    """An ε that the true one is not below, with a confidence."""

    epsilon: float
    confidence: float
    estimator: Literal["one-run", "Clopper–Pearson"]
    guesses: int
    right: int
    coins: int
    """Guesses could be withheld."""


def one_run(scores: Scores, coins: Coins, delta: float, confidence: float = 0.95) -> Lower:
    """Steinke, Nasr and Jagielski 2023, Theorem 5.2: many fair coins in one run, or in several.

    Each coin may change what happens in one run alone, and flipping one is the change that (ε, δ) is about; the coins
    may have been used together. The attacker guesses the highest and the lowest scores, and withholds the others: how
    many, of a few numbers, may be chosen after the fact, since each is held to its share of the error.

    >>> coins = np.arange(200) % 2 == 0
    >>> round(one_run(np.where(coins, 1.0, -1.0), coins, delta=1e-6).epsilon, 2)
    3.76
    >>> one_run(np.zeros(200), coins, delta=1e-6).epsilon
    0.0
    """
    _check(scores, coins, confidence)
    total = len(scores)
    ladder = [total]
    while ladder[-1] // 2 >= FEWEST:
        ladder.append(ladder[-1] // 2)
    order = np.argsort(scores, kind="stable")
    best = Lower(0.0, confidence, "one-run", total, 0, total)
    for place, guesses in enumerate(ladder):
        low = guesses // 2
        right = int((~coins[order[:low]]).sum() + coins[order[total - (guesses - low) :]].sum())
        found = _largest(total, guesses, right, delta, (1 - confidence) / len(ladder))
        if found > best.epsilon or place == 0:
            best = Lower(found, confidence, "one-run", guesses, right, total)
    return best


def one_run_p_value(coins: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely at least so many right guesses are at most, if (ε, δ) held.

    With W ~ Bin(guesses, e^ε/(1 + e^ε)): P[W ≥ right] + 2 · coins · δ · max over i of P[right > W ≥ right − i] / i.

    >>> one_run_p_value(coins=10, guesses=3, right=3, epsilon=0.0, delta=0.0)
    0.125
    """
    from scipy import special, stats

    chance = special.expit(epsilon)
    reached = float(stats.binom.sf(right - 1, guesses, chance))
    if delta == 0 or right == 0:
        return reached
    steps = np.arange(1, right + 1)
    near = (stats.binom.sf(right - steps - 1, guesses, chance) - reached) / steps
    return min(1.0, reached + 2 * coins * delta * float(near.max()))


def clopper_pearson(scores: Scores, coins: Coins, delta: float, confidence: float = 0.95) -> Lower:
    """One coin in each of many independent runs: bounds on both error rates, by Clopper and Pearson.

    ε ≥ log((1 − δ − FNR) / FPR), and the same with the rates exchanged. The threshold is chosen on the first half of
    the runs and the rates are bounded on the second, so that the choice costs nothing.
    """
    _check(scores, coins, confidence)
    half = len(scores) // 2
    if min(coins[:half].sum(), (~coins[:half]).sum(), coins[half:].sum(), (~coins[half:]).sum()) == 0:
        return Lower(0.0, confidence, "Clopper–Pearson", len(scores) - half, 0, len(scores))
    tried = np.unique(np.quantile(scores[:half], np.linspace(0, 1, _THRESHOLDS)))
    threshold = tried[int(np.argmax(_of_rates(scores[:half], coins[:half], tried, delta, confidence)))]
    left, truth = scores[half:], coins[half:]
    found = float(_of_rates(left, truth, np.array([threshold]), delta, confidence)[0])
    right = int(((left >= threshold) == truth).sum())
    return Lower(found, confidence, "Clopper–Pearson", len(left), right, len(scores))


def _of_rates(scores: Scores, coins: Coins, thresholds: Scores, delta: float, confidence: float) -> Scores:
    from scipy import stats

    inside, outside = np.sort(scores[coins]), np.sort(scores[~coins])
    missed = np.searchsorted(inside, thresholds)
    false = len(outside) - np.searchsorted(outside, thresholds)
    each = 1 - (1 - confidence) / 2
    most = [
        np.where(wrong < count, stats.beta.ppf(each, wrong + 1, np.maximum(count - wrong, 1)), 1.0)
        for wrong, count in ((missed, len(inside)), (false, len(outside)))
    ]
    ways = [
        np.log(np.maximum(1 - delta - one, 1e-300) / other) for one, other in ((most[0], most[1]), (most[1], most[0]))
    ]
    found: Scores = np.maximum(np.maximum(*ways), 0.0)
    return found


def _largest(coins: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest ε that is refuted at this error; 0 where none is."""
    low, high = 0.0, LARGEST
    if one_run_p_value(coins, guesses, right, low, delta) > error:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if one_run_p_value(coins, guesses, right, middle, delta) > error else (middle, high)
    return low


def _check(scores: Scores, coins: Coins, confidence: float) -> None:
    if not 0 < confidence < 1:
        raise HomebodyError(f"A confidence is above 0 and under 1, such as 0.95, not {confidence:g}.")
    if len(scores) != len(coins):
        raise HomebodyError(f"There must be a score for each coin, not {len(scores)} for {len(coins)}.")
    if not all(map(math.isfinite, scores)):
        raise HomebodyError("A score of an attack must be a finite number.")

"""Lower bounds on ε from guesses of secret coins: a claim of (ε, δ) is refuted if it makes them too unlikely.

Every estimator takes a score for each coin, larger where the attacker thinks it fell on `True`. A poor attack makes a
bound small, never wrong. What each bound assumes, beside fair coins:

| estimator | assumes | compares |
|---|---|---|
| `one_run` | nothing: coins may have been used together | right guesses with one (ε, δ) |
| `count_guesses` | scores are independent, each depends on its own coin | right guesses with every (ε, δ) of a curve |
| `gaussian` | the same, and scores are normal with one spread | the distance of the means with a Gaussian mechanism |
| `clopper_pearson` | one coin in each of many runs | both error rates with one (ε, δ) |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from homebody.errors import HomebodyError
from homebody.privacy import GaussianRelease
from homebody.privacy.accountant import epsilon as epsilon_of

__all__ = [
    "CountedGuesses",
    "Lower",
    "clopper_pearson",
    "count_guesses",
    "gaussian",
    "independent_p_value",
    "noise_found",
    "one_run",
    "one_run_p_value",
    "share_found",
]

FEWEST = 8
"""The fewest guesses that can show anything."""
LARGEST = 50.0
"""The largest ε that is tried."""
_THRESHOLDS = 400
SEEN = 0.9
"""The probability with which an audit detects the smallest violation that it reports as detectable."""

Coins = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float64]
Curve = Sequence[tuple[float, float]]
"""A claim at many δ: pairs (ε, δ) that all hold."""


@dataclass(frozen=True)
class Lower:
    """A lower bound on ε, with its confidence."""

    epsilon: float
    confidence: float
    estimator: Literal["one-run", "Clopper–Pearson", "Gaussian"]
    guesses: int
    right: int
    coins: int
    """All coins, also those that were not guessed."""


@dataclass(frozen=True)
class CountedGuesses:
    """How many guesses were right, and how many a claim allows."""

    guesses: int
    right: int
    most: int
    """More right guesses than this are less likely than the error, if the claim holds."""
    coins: int

    @property
    def too_many(self) -> bool:
        return self.right > self.most


def one_run(scores: Scores, coins: Coins, delta: float, confidence: float = 0.95) -> Lower:
    """Steinke, Nasr and Jagielski 2023, Theorem 5.2: many fair coins in one run, or in several.

    Each coin affects one run only, and flipping it is the change that (ε, δ) is about; a run may use many coins. The
    attacker guesses the highest and the lowest scores and withholds the others. A few numbers of guesses are tried,
    each with its share of the error, so the best may be chosen afterwards.

    >>> coins = np.arange(200) % 2 == 0
    >>> round(one_run(np.where(coins, 1.0, -1.0), coins, delta=1e-6).epsilon, 2)
    3.76
    >>> one_run(np.zeros(200), coins, delta=1e-6).epsilon
    0.0
    """
    _check(scores, coins, confidence)
    total, ladder = len(scores), _ladder(scores, coins)
    best = Lower(0.0, confidence, "one-run", total, ladder[0][1], total)
    for guesses, right in ladder:
        epsilon = _largest(total, guesses, right, delta, (1 - confidence) / len(ladder))
        if epsilon > best.epsilon:
            best = Lower(epsilon, confidence, "one-run", guesses, right, total)
    return best


def one_run_p_value(coins: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of at least so many right guesses, if (ε, δ) holds.

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


def count_guesses(scores: Scores, coins: Coins, curve: Curve, confidence: float = 0.95) -> CountedGuesses:
    """Right guesses, and the most that a claimed curve allows if scores are independent of one another.

    Guesses are withheld as in `one_run`. Every pair of the curve bounds the same probability, so the smallest bound
    holds, and more pairs cost nothing. The result has the number of guesses that comes nearest to a refutation.

    >>> coins = np.arange(400) % 2 == 0
    >>> count_guesses(np.where(coins, 1.0, -1.0), coins, [(1.0, 1e-6)]).too_many
    True
    >>> count_guesses(np.zeros(400), coins, [(1.0, 1e-6)]).too_many
    False
    """
    _check(scores, coins, confidence)
    total, tried = len(scores), _useful(len(scores), curve, 1 - confidence)
    ladder = [(guesses, right) for guesses, right in _ladder(scores, coins) if guesses in tried]
    _, guesses, right = min((_allowed_by(total, guesses, right, curve), guesses, right) for guesses, right in ladder)
    return CountedGuesses(guesses, right, _most(total, guesses, curve, (1 - confidence) / len(tried)), total)


def independent_p_value(coins: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of at least so many right guesses, if (ε, δ) holds for each coin on its own.

    The worst case under (ε, δ) reveals a coin with probability δ, and otherwise shows it with probability e^ε/(1 + e^ε)
    and its opposite with the rest. So K ~ Bin(coins, δ) guesses, at most all of them, are certain, and the others are
    right with that probability.

    >>> round(independent_p_value(coins=3, guesses=3, right=3, epsilon=0.0, delta=0.5), 6)  # (½ + ½ · ½)³
    0.421875
    >>> independent_p_value(coins=10, guesses=3, right=3, epsilon=0.0, delta=0.0)
    0.125
    """
    from scipy import special

    if right <= 0:
        return 1.0
    chance = special.expit(epsilon)
    # P[K = k] for k under `right`, and what is left: as many certain guesses are enough.
    certain = np.arange(right)
    mass = np.diff(special.bdtr(certain, coins, delta), prepend=0.0)
    reached = special.bdtrc(right - certain - 1, guesses - certain, chance)
    return min(1.0, float(mass @ reached + special.bdtrc(right - 1, coins, delta)))


def gaussian(scores: Scores, coins: Coins, delta: float, confidence: float = 0.95) -> Lower:
    """For scores that are normal around two means with one deviation: a bound from the distance of the means.

    In deviations, that distance is μ of Gaussian differential privacy (Dong, Roth and Su 2022), and ε at δ follows from
    it. Student's t of the two samples is noncentral with parameter μ √(heads · tails / coins), so the bound is exact.

    >>> generator = np.random.default_rng(0)
    >>> coins = generator.random(1000) < 0.5
    >>> lower = gaussian(generator.normal(size=1000) + np.where(coins, 1.0, -1.0), coins, delta=1e-6)  # μ = 2
    >>> round(lower.epsilon, 1)  # 11.0 is the ε of μ = 2
    9.7
    """
    _check(scores, coins, confidence)
    heads, tails = scores[coins], scores[~coins]
    total = len(scores)
    if min(len(heads), len(tails)) < 2:
        return Lower(0.0, confidence, "Gaussian", total, 0, total)
    middle = (heads.mean() + tails.mean()) / 2
    right = int(((scores > middle) == coins).sum())
    size = math.sqrt(len(heads) * len(tails) / total)
    spread = math.sqrt((((heads - heads.mean()) ** 2).sum() + ((tails - tails.mean()) ** 2).sum()) / (total - 2))
    apart = float(heads.mean() - tails.mean())
    ratio = min(apart / max(spread, 1e-300), _LARGEST_MU)
    mu = _noncentral(ratio * size, total - 2, 1 - confidence) / size
    return Lower(_of_gaussian(mu, delta), confidence, "Gaussian", total, right, total)


def noise_found(epsilon: float, coins: int, delta: float, confidence: float) -> float:
    """The share of the stated noise that `gaussian` would find too little with probability `SEEN`.

    epsilon: certified at δ for a Gaussian mechanism. Half of the coins are taken to be heads.

    >>> round(noise_found(2.55, coins=1000, delta=1e-6, confidence=0.95), 2)
    0.75
    """
    mu, size, freedom = _mu_of(epsilon, delta), math.sqrt(coins) / 2, coins - 2
    low, high = 0.0, _LARGEST_MU * size * 2
    while high - low > 1e-6:  # the t that just refutes μ
        middle = (low + high) / 2
        low, high = (low, middle) if _noncentral(middle, freedom, 1 - confidence) > mu * size else (middle, high)
    # And the parameter at which t exceeds that often enough.
    return min(1.0, mu * size / _noncentral(high, freedom, SEEN))


def share_found(curve: Curve, coins: int, confidence: float) -> tuple[float, float | None]:
    """The share of right guesses that a claim allows on average, and the share that refutes it with probability `SEEN`.

    All coins are guessed, as by `count_guesses`. None: even perfect guesses would not refute it.

    >>> allowed, detected = share_found([(0.5, 0.0)], coins=1000, confidence=0.95)
    >>> round(allowed, 3), detected is not None and round(detected, 3)
    (0.622, 0.679)
    """
    from scipy import stats

    allowed = min((math.exp(-e) * d + 1) / (1 + math.exp(-e)) for e, d in curve)
    most = _most(coins, coins, curve, (1 - confidence) / len(_useful(coins, curve, 1 - confidence)))
    if most >= coins:
        return min(1.0, allowed), None
    return min(1.0, allowed), float(stats.beta.ppf(SEEN, most + 1, coins - most))


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
    epsilon = float(_of_rates(left, truth, np.array([threshold]), delta, confidence)[0])
    right = int(((left >= threshold) == truth).sum())
    return Lower(epsilon, confidence, "Clopper–Pearson", len(left), right, len(scores))


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
    ways = [np.log(np.maximum(1 - delta - rate, 1e-300) / other) for rate, other in (most, most[::-1])]
    return np.maximum(np.maximum(*ways), 0.0)


@lru_cache(maxsize=4096)
def _largest(coins: int, guesses: int, right: int, delta: float, error: float) -> float:
    """The largest ε that is refuted at this error, or 0."""
    low, high = 0.0, LARGEST
    if one_run_p_value(coins, guesses, right, low, delta) > error:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if one_run_p_value(coins, guesses, right, middle, delta) > error else (middle, high)
    return low


def _ladder(scores: Scores, coins: Coins) -> list[tuple[int, int]]:
    """Guesses of the highest and lowest scores, and how many are right: of all coins, of half of them, and so on."""
    total, order = len(scores), np.argsort(scores, kind="stable")
    out = []
    for guesses in _rungs(total):
        low = guesses // 2
        right = int((~coins[order[:low]]).sum() + coins[order[total - (guesses - low) :]].sum())
        out.append((guesses, right))
    return out


def _rungs(total: int) -> list[int]:
    """The numbers of guesses that are tried."""
    return [total >> place for place in range(max(1, (total // FEWEST).bit_length()))]


def _useful(coins: int, curve: Curve, error: float) -> list[int]:
    """The rungs that could refute a claim if all guesses were right. The others need no share of the error."""
    rungs = _rungs(coins)
    useful = [rung for rung in rungs if _allowed_by(coins, rung, rung, curve) <= error / len(rungs)]
    return useful or [coins]


def _allowed_by(coins: int, guesses: int, right: int, curve: Curve) -> float:
    """The smallest upper bound on the probability of so many right guesses, over the pairs of a curve."""
    return min(_independent_p_value(coins, guesses, right, epsilon, delta) for epsilon, delta in curve)


_independent_p_value = lru_cache(maxsize=1 << 14)(independent_p_value)


def _most(coins: int, guesses: int, curve: Curve, error: float) -> int:
    """The largest number of right guesses whose bound is above the error."""
    low, high = 0, guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        likely = _allowed_by(coins, guesses, middle, curve) > error
        low, high = (middle, high) if likely else (low, middle)
    return low


_LARGEST_MU = 20.0
"""The largest distance of means that is tried: an ε of about 300."""


@lru_cache(maxsize=16)
def _roots(freedom: int) -> tuple[Scores, Scores]:
    """Roots of the mean of `freedom` squares of normal numbers, and the weight of each."""
    from scipy import stats

    first, last = (math.sqrt(float(stats.chi2.ppf(share, freedom)) / freedom) for share in (1e-12, 1 - 1e-12))
    s = np.linspace(first, last, 2001)
    weight = np.exp(stats.chi2.logpdf(freedom * s**2, freedom) + np.log(s))
    return s, weight / weight.sum()


def _noncentral(t: float, freedom: int, error: float) -> float:
    """The noncentrality at which Student's t reaches this value with this probability; 0 where it is negative.

    P[T ≥ t] is the mean of Φ(noncentrality − t s) over s, the root of a mean of `freedom` squares of normal numbers.
    """
    from scipy import special

    s, weight = _roots(freedom)
    low, high = 0.0, max(t, 0.0) * float(s[-1]) + 40
    if float(weight @ special.ndtr(-t * s)) >= error:
        return 0.0
    while high - low > 1e-9 * (1 + high):
        middle = (low + high) / 2
        low, high = (middle, high) if float(weight @ special.ndtr(middle - t * s)) < error else (low, middle)
    return low


def _of_gaussian(mu: float, delta: float) -> float:
    """ε of a Gaussian mechanism whose noise is 1/μ of what one person changes."""
    if mu < 1e-9 or delta <= 0:
        return 0.0
    return epsilon_of([(GaussianRelease(1 / mu, "replace-one"), 1)], delta, only=("analytic",)).epsilon


def _mu_of(epsilon: float, delta: float) -> float:
    low, high = 0.0, _LARGEST_MU
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if _of_gaussian(middle, delta) > epsilon else (middle, high)
    return low


def _check(scores: Scores, coins: Coins, confidence: float) -> None:
    if not 0 < confidence < 1:
        raise HomebodyError(f"A confidence is above 0 and under 1, such as 0.95, not {confidence:g}.")
    if len(scores) != len(coins):
        raise HomebodyError(f"There must be a score for each coin, not {len(scores)} for {len(coins)}.")
    if not all(map(math.isfinite, scores)):
        raise HomebodyError("A score of an attack must be a finite number.")

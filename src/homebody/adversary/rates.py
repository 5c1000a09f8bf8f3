"""How well an attack tells members from others: AUC and rates with intervals, and the most that (ε, δ) allows.

A score is larger where the attacker thinks that someone is a member. Intervals are of 95 %, unless an `error` is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Allowed", "Figure", "Rate", "allowed", "balanced", "ceiling", "delong", "mean_interval", "rate_at"]

ERROR = 0.05
Scores = npt.NDArray[np.float64]
Members = npt.NDArray[np.bool_]


class Figure(NamedTuple):
    """A figure and its interval."""

    value: float
    low: float
    high: float


class Rate(NamedTuple):
    """The true positive rate at a small false positive rate."""

    at: float
    """The false positive rate that was asked for."""
    true: Figure
    false: Figure


class Allowed(NamedTuple):
    """The most that any attack reaches on average, if (ε, δ) holds for one person's membership."""

    epsilon: float
    delta: float

    @property
    def advantage(self) -> float:
        """Of true over false positives."""
        # (e^ε − 1 + 2δ) / (e^ε + 1), with e^ε divided out, so that a large ε does no harm.
        small = math.exp(-self.epsilon)
        return min(1.0, (1 - small + 2 * self.delta * small) / (1 + small))

    @property
    def accuracy(self) -> float:
        """Of guesses, where half are members.

        >>> Allowed(0.0, 0.0).accuracy, round(Allowed(1.0, 0.0).accuracy, 4), Allowed(math.inf, 0.0).accuracy
        (0.5, 0.7311, 1.0)
        """
        return (1 + self.advantage) / 2

    def rate(self, false: float) -> float:
        """True positives at so many false ones: min(e^ε · false + δ, 1 − e^−ε (1 − δ − false)).

        >>> Allowed(0.0, 0.01).rate(0.01), round(Allowed(2.0, 0.0).rate(0.01), 4), Allowed(math.inf, 0.0).rate(0.0)
        (0.02, 0.0739, 1.0)
        """
        if self.epsilon > 700:
            return 1.0
        grown = math.exp(self.epsilon) * false + self.delta
        return max(0.0, min(1.0, grown, 1 - math.exp(-self.epsilon) * (1 - self.delta - false)))

    @property
    def auc(self) -> float:
        """The area under `rate`.

        >>> Allowed(0.0, 0.0).auc, round(Allowed(1.0, 0.0).auc, 4), Allowed(math.inf, 0.0).auc
        (0.5, 0.7311, 1.0)
        """
        if self.epsilon > 700 or self.delta >= 1:
            return 1.0
        corner = (1 - self.delta) / (1 + math.exp(self.epsilon))
        height = self.rate(corner)
        rising = corner * (self.delta + height) / 2
        return min(1.0, rising + (1 - self.delta - corner) * (height + 1) / 2 + self.delta)


def allowed(epsilon: float, delta: float, relation: str) -> Allowed:
    """The bound that certified (ε, δ) puts on telling whether one person or another is among the members.

    That replaces one person. If ε is about adding or removing one, a replacement takes two such steps.

    >>> allowed(1.0, 0.0, "replace-one").epsilon, allowed(1.0, 0.0, "add-remove").epsilon
    (1.0, 2.0)
    """
    if relation == "replace-one" or not math.isfinite(epsilon):
        return Allowed(epsilon, delta)
    return Allowed(2 * epsilon, min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta))


def clopper_pearson_interval(count: int, total: int, error: float = ERROR) -> Figure:
    """A share, and Clopper and Pearson's exact interval.

    >>> tuple(round(number, 4) for number in clopper_pearson_interval(3, 10))
    (0.3, 0.0667, 0.6525)
    """
    from scipy import stats

    low = float(stats.beta.ppf(error / 2, count, total - count + 1)) if count else 0.0
    high = float(stats.beta.ppf(1 - error / 2, count + 1, total - count)) if count < total else 1.0
    return Figure(count / total, low, high)


def mean_interval(values: Sequence[float] | Scores) -> Figure:
    """The mean of shares or AUCs, with its interval at 95 %: normal, over people.

    >>> tuple(round(number, 3) for number in mean_interval([0.0, 1.0, 1.0, 1.0]))
    (0.75, 0.26, 1.0)
    """
    each = np.asarray(values, dtype=np.float64)
    half = 1.96 * float(each.std(ddof=1)) / len(each) ** 0.5 if len(each) > 1 else 0.0
    middle = float(each.mean())
    return Figure(middle, max(0.0, middle - half), min(1.0, middle + half))


def delong(scores: Scores, members: Members, error: float = ERROR) -> Figure:
    """AUC, with the interval of DeLong, DeLong and Clarke-Pearson; a tie counts half.

    If all members are above all others, or below, its variance is 0. The interval is then the exact one of as many
    trials as the smaller group has people.

    >>> delong(np.array([3.0, 1.0, 2.0, 0.0]), np.array([True, True, False, False])).value
    0.75
    >>> tuple(round(number, 3) for number in delong(np.arange(20.0), np.arange(20) >= 10))
    (1.0, 0.692, 1.0)
    """
    from scipy.stats import norm, rankdata

    inside, outside = scores[members], scores[~members]
    every = rankdata(np.concatenate([inside, outside]))
    above = (every[: len(inside)] - rankdata(inside)) / len(outside)
    below = 1 - (every[len(inside) :] - rankdata(outside)) / len(inside)
    area = float(above.mean())
    if area in (0.0, 1.0):
        few = min(len(inside), len(outside))
        return clopper_pearson_interval(few if area else 0, few, error)
    spread = sum(float(part.var(ddof=1)) / len(part) for part in (above, below) if len(part) > 1)
    half = float(norm.ppf(1 - error / 2)) * math.sqrt(spread)
    return Figure(area, max(0.0, area - half), min(1.0, area + half))


def rate_at(scores: Scores, members: Members, false: float, error: float = ERROR) -> Rate | None:
    """The true positive rate at the lowest threshold with at most this false positive rate.

    None: there are too few others for so small a rate. The intervals treat the threshold as given.

    >>> scores, members = np.arange(200.0), np.arange(200) >= 100
    >>> rate_at(scores, members, 0.01).true.value, rate_at(scores[::-1], members, 0.01).true.value
    (1.0, 0.0)
    >>> rate_at(scores, members, 0.001)
    """
    outside = np.sort(scores[~members])
    may = math.floor(false * len(outside) + 1e-9)
    if may < 1:
        return None
    threshold = outside[len(outside) - may - 1] if may < len(outside) else -math.inf
    counts = [int((scores[kind] > threshold).sum()) for kind in (members, ~members)]
    true, wrong = (
        clopper_pearson_interval(count, int(kind.sum()), error)
        for count, kind in zip(counts, (members, ~members), strict=True)
    )
    return Rate(false, true, wrong)


def balanced(guesses: Members, members: Members, error: float = ERROR) -> Figure:
    """Balanced accuracy: the mean of the shares guessed right among members and among others, with its interval.

    >>> guesses, members = np.array([True] * 6 + [False] * 4), np.array([True] * 5 + [False] * 5)
    >>> tuple(round(number, 3) for number in balanced(guesses, members))
    (0.9, 0.533, 0.997)
    """
    shares = [
        clopper_pearson_interval(int((guesses[kind] == members[kind]).sum()), int(kind.sum()), error)
        for kind in (members, ~members)
    ]
    value = sum(share.value for share in shares) / 2
    # Zou and Donner: distances to the limits of each share add up as deviations do.
    low = math.hypot(*(share.value - share.low for share in shares)) / 2
    high = math.hypot(*(share.high - share.value for share in shares)) / 2
    return Figure(value, value - low, value + high)


def ceiling(kinds: npt.NDArray[np.int64], members: Members) -> float:
    """The largest `balanced` of any guesses that are the same for all people of one kind.

    >>> ceiling(np.array([0, 0, 0, 1]), np.array([True, True, False, False]))
    0.75
    """
    shares = [
        np.bincount(kinds[kind], minlength=int(kinds.max()) + 1) / max(1, kind.sum()) for kind in (members, ~members)
    ]
    return float(np.maximum(*shares).sum() / 2)

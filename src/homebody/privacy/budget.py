"""Budgets of ε: whether events stay within one, how many rounds it allows, and which noise spends it exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from homebody.errors import HomebodyError
from homebody.privacy.accountant import Accountant, epsilon
from homebody.privacy.events import Event, GaussianRelease, LaplaceRelease, Relation, Sampling

__all__ = ["calibrate", "calibrate_events", "most_rounds", "within"]

_CHEAP: tuple[Accountant, ...] = ("basic", "optimal", "analytic", "rdp")
_SPENT = 1e-3
"""Calibrated noise leaves at most this share of the budget unspent."""
_EVERYONE = Sampling()


def within(events: Iterable[tuple[Event, int]], target: float, delta: float, *, group: int = 1) -> bool:
    """Whether everything together stays within ε = target: the cheap accountants first, for a loop that asks often.

    >>> event = GaussianRelease(1, "replace-one", Sampling("fixed", cohort=30, population=4800))
    >>> within([(event, 1000)], 2.5, 1e-6), within([(event, 1100)], 2.5, 1e-6)
    (True, False)
    """
    counted = list(events)
    if epsilon(counted, delta, group=group, only=_CHEAP).epsilon <= target:
        return True
    return epsilon(counted, delta, group=group).epsilon <= target


def most_rounds(event: Event, target: float, delta: float, *, limit: int = 10**6) -> int:
    """How often the event may happen within ε = target, up to a limit.

    >>> most_rounds(GaussianRelease(1, "replace-one", Sampling("fixed", cohort=30, population=4800)), 2.5, 1e-6)
    1048
    """
    low, high = 0, 1
    while high <= limit and within([(event, high)], target, delta):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within([(event, middle)], target, delta) else (low, middle)
    return low


def calibrate(
    target: float,
    delta: float,
    rounds: int,
    relation: Relation,
    sampling: Sampling = _EVERYONE,
    *,
    kind: Literal["gaussian", "laplace"] = "gaussian",
    group: int = 1,
) -> float:
    """The smallest noise multiplier that keeps this many rounds within (target, δ); it spends ε to 0.1 %.

    >>> z = calibrate(2.446, 1e-6, 1000, "replace-one", Sampling("fixed", cohort=30, population=4800))
    >>> round(z, 2)
    1.0
    """
    release = GaussianRelease if kind == "gaussian" else LaplaceRelease
    if kind == "gaussian" and delta == 0:
        raise HomebodyError("Gaussian noise has no ε at δ = 0: give a δ above 0, or use Laplace noise.")
    return calibrate_events(lambda z: [(release(z, relation, sampling), rounds)], target, delta, group=group)


def calibrate_events(
    events: Callable[[float], Iterable[tuple[Event, int]]], target: float, delta: float, *, group: int = 1
) -> float:
    """The smallest noise at which `events(noise)` stays within (target, δ), where more noise never costs more.

    The search is on a logarithmic scale, by secants kept within a bracket: a bound is dear.
    """
    if not (math.isfinite(target) and target > 0):
        raise HomebodyError(f"The ε to spend must be a finite number above 0, not {target}.")

    def over(log_noise: float) -> float:
        """By how much the budget is overspent, as a logarithm; the middle of what is allowed is 0."""
        spent = epsilon(events(math.exp(log_noise)), delta, group=group).epsilon
        if spent == 0 or math.isinf(spent):
            return math.copysign(math.inf, spent - target)
        return math.log(spent / target) + _SPENT / 2

    # Too little noise at `low`, enough at `high`.
    low, high, step = 0.0, 0.0, 1.5
    at_low = at_high = over(0.0)
    while at_low < 0:
        high, at_high, low = low, at_low, low - step
        at_low = over(low)
        if low < -30:
            raise HomebodyError(f"Any noise at all keeps ε under {target:g}: the budget cannot be spent.")
    while at_high > _SPENT / 2:
        low, at_low, high = high, at_high, high + step
        at_high = over(high)
        if high > 30:
            raise HomebodyError(
                f"No noise brings ε down to {target:g} at δ = {delta:g}: take a larger ε or δ, or fewer rounds."
            )
    for attempt in range(60):
        if at_high > -_SPENT / 2:
            break
        middle = (low + high) / 2
        if attempt % 3 < 2 and math.isfinite(at_low - at_high):
            middle = (at_low * high - at_high * low) / (at_low - at_high)
        at_middle = over(middle)
        if at_middle > _SPENT / 2:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return math.exp(high)

"""Budgets of ε, which are checked before each round of a run, and the noise that spends one exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from homebody.errors import HomebodyError
from homebody.markup import html
from homebody.privacy.accountant import epsilon
from homebody.privacy.channel import Channel
from homebody.privacy.events import Charge, Event, Observer, Unit
from homebody.privacy.ledger import DELTA, Ledger
from homebody.settings import fits, parse, plain

__all__ = ["Budget", "calibrate_events", "calibrated", "check_delta"]

_SPENT = 1e-3
"""Calibrated noise leaves at most this share of the budget unspent."""
Planned = Callable[[Channel], Sequence[tuple[Sequence[Charge], int]]]
"""What the planned rounds through a channel would be charged, and how many rounds there are of each."""


@dataclass(frozen=True)
class Budget:
    """An ε that nothing released to an observer may exceed.

    >>> budget = Budget.parse("eps=8,delta=1e-5,unit=user,observer=public")
    >>> budget
    Budget(epsilon=8.0, delta=1e-05, unit='user', observer='public')
    >>> print(budget)
    eps=8,delta=1e-05,unit=user,observer=public
    """

    epsilon: float
    delta: float = DELTA
    unit: Unit = "user"
    observer: Observer = "public"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            value = plain(getattr(self, name))
            if not fits(value, float):
                raise HomebodyError(f"A budget's {name} must be a number, not {value!r}.")
            object.__setattr__(self, name, float(value))
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise HomebodyError(f"A budget's eps must be a finite number above 0, not {self.epsilon:g}.")
        check_delta(self.delta)
        for name, value, known in (("unit", self.unit, Unit), ("observer", self.observer, Observer)):
            if value not in get_args(known):
                raise HomebodyError(f"There is no {name} '{value}' for a budget: {', '.join(get_args(known))}.")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget from text such as eps=8,delta=1e-6,unit=user,observer=public; only eps is required."""
        given: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if not equals or key not in ("eps", "delta", "unit", "observer") or key in given:
                raise HomebodyError(f"A budget reads eps=8,delta=1e-6,unit=user,observer=public, not '{text}'.")
            given[key] = value
        if "eps" not in given:
            raise HomebodyError(f"The budget '{text}' says no eps; give one, as in eps=8,delta=1e-6.")
        values: dict[str, Any] = {name: given[name] for name in ("unit", "observer") if name in given}
        for key, name in (("eps", "epsilon"), ("delta", "delta")):
            if key in given:
                values[name] = parse(f"A budget's {key}", given[key], float)
        return cls(**values)

    def __str__(self) -> str:
        return f"eps={self.epsilon:g},delta={self.delta:g},unit={self.unit},observer={self.observer}"

    @property
    def who(self) -> str:
        """What it protects, for a sentence."""
        return f"one {self.unit}, against the {self.observer}, at δ = {self.delta:g}"

    def _repr_html_(self) -> str:
        return html(f"Budget: ε = {self.epsilon:g} for {self.who}")

    def allows(self, ledger: Ledger, charges: Sequence[Charge]) -> bool:
        """Whether the budget allows these charges too."""
        return ledger.within(self.epsilon, self.observer, self.unit, delta=self.delta, also=charges)

    def spent(self, ledger: Ledger, charges: Sequence[Charge] = ()) -> float:
        """ε so far, with these charges added."""
        return ledger.epsilon(self.observer, self.unit, delta=self.delta, also=charges).epsilon

    def refuse_hopeless(self, charges: Sequence[Charge]) -> None:
        """Refuse to begin if the budget does not allow one round of these charges."""
        self.refuse_infinite(charges)
        first = self.spent(Ledger(), charges)
        if first > self.epsilon:
            raise HomebodyError(
                f"The budget of ε = {self.epsilon:g} is less than the first round alone takes, ε = {first:.4g} for "
                f"{self.who}: add noise, or raise it."
            )

    def refuse_infinite(self, charges: Sequence[Charge]) -> None:
        """Refuse to begin if no ε bounds a round, or if the observer sees nothing of it."""
        if not any(charge.observer == self.observer for charge in charges):
            raise HomebodyError(f"Nothing is released to the observer '{self.observer}' here, so no budget holds it.")
        bound = Ledger().epsilon(self.observer, self.unit, delta=self.delta, also=charges)
        if math.isinf(bound.epsilon):
            raise HomebodyError(
                f"A budget of ε = {self.epsilon:g} cannot hold: from the first round ε is ∞ for {self.who}. "
                f"{' '.join(bound.notes)}"
            )


def check_delta(delta: float) -> None:
    """Refuse a δ outside [0, 1)."""
    if not 0 <= delta < 1:
        raise HomebodyError(f"δ must be at least 0 and under 1, not {delta:g}.")


def calibrate_events(
    events: Callable[[float], Iterable[tuple[Event, int]]], target: float, delta: float, *, group: int = 1
) -> float:
    """The smallest noise at which `events(noise)` stays within (target, δ), where more noise never costs more.

    The search is on a logarithmic scale, by secants kept within a bracket: a bound is dear. ε is spent to 0.1 %.

    >>> from homebody.privacy import GaussianRelease, Sampling
    >>> sampling = Sampling("fixed", cohort=30, population=4800)
    >>> z = calibrate_events(lambda z: [(GaussianRelease(z, "replace-one", sampling), 1000)], 2.446, 1e-6)
    >>> round(z, 2)
    1.0
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


def calibrated(channel: Channel, budget: Budget, planned: Planned) -> float:
    """The smallest noise of this channel that keeps all planned rounds within the budget: z, or b of Laplace noise."""
    if budget.unit != "user":
        raise HomebodyError(f"--calibrate finds the noise for unit=user, which it is charged for, not {budget.unit}.")
    places = [n for n, stage in enumerate(channel.stages) if stage.noise_field]
    if len(places) != 1:
        raise HomebodyError(
            "--calibrate needs one gaussian, laplace, skellam or view-noise stage whose noise it can find."
        )
    (place,) = places

    def with_noise(noise: float) -> Channel:
        stage = channel.stages[place]
        noisy = replace(stage, **{stage.noise_field: noise})  # type: ignore[type-var]
        return channel.with_stages(*channel.stages[:place], noisy, *channel.stages[place + 1 :])

    def events(noise: float) -> list[tuple[Any, int]]:
        counted = []
        for charges, rounds in planned(with_noise(noise)):
            about = [charge for charge in charges if (charge.observer, charge.unit) == (budget.observer, budget.unit)]
            counted += [(charge.event, rounds) for charge in about]
        return counted

    for charges, _ in planned(with_noise(1.0)):
        budget.refuse_infinite(charges)
    return calibrate_events(events, budget.epsilon, budget.delta)

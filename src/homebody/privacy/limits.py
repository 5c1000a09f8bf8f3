"""Privacy budgets of a run: checked before each round, and spent exactly if the noise is calibrated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from homebody.errors import HomebodyError
from homebody.privacy.budget import calibrate_events
from homebody.privacy.channel import Channel
from homebody.privacy.events import Charge, Observer, Unit
from homebody.privacy.ledger import DELTA, Ledger
from homebody.privacy.stages import Gaussian, Laplace

__all__ = ["Budget", "calibrated", "check_delta"]

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
                try:
                    values[name] = float(given[key])
                except ValueError:
                    raise HomebodyError(f"A budget's {key} must be a number, not '{given[key]}'.") from None
        return cls(**values)

    def __str__(self) -> str:
        return f"eps={self.epsilon:g},delta={self.delta:g},unit={self.unit},observer={self.observer}"

    @property
    def who(self) -> str:
        """What it protects, for a sentence."""
        return f"one {self.unit}, against the {self.observer}, at δ = {self.delta:g}"

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


def calibrated(channel: Channel, budget: Budget, planned: Planned) -> float:
    """The smallest noise of this channel that keeps all planned rounds within the budget: z, or b of Laplace noise."""
    if budget.unit != "user":
        raise HomebodyError(f"--calibrate finds the noise for unit=user, which it is charged for, not {budget.unit}.")
    places = [n for n, stage in enumerate(channel.stages) if isinstance(stage, Gaussian | Laplace)]
    if len(places) != 1:
        raise HomebodyError("--calibrate needs a gaussian or a laplace stage whose noise it can find.")
    (place,) = places

    def with_noise(noise: float) -> Channel:
        stage = channel.stages[place]
        noisy = replace(stage, z=noise) if isinstance(stage, Gaussian) else replace(stage, b=noise)  # type: ignore[type-var]
        return channel.with_stages(*channel.stages[:place], noisy, *channel.stages[place + 1 :])

    def events(noise: float) -> list[tuple[Any, int]]:
        found = []
        for charges, rounds in planned(with_noise(noise)):
            about = [one for one in charges if (one.observer, one.unit) == (budget.observer, budget.unit)]
            found += [(one.event, rounds) for one in about]
        return found

    for charges, _ in planned(with_noise(1.0)):
        budget.refuse_infinite(charges)
    return calibrate_events(events, budget.epsilon, budget.delta)

"""The one door off the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from homebody.core import Cohort, Total, Update
from homebody.privacy.events import OBSERVERS, Charge, NonPrivate
from homebody.rng import Rng

__all__ = ["Channel", "Stage"]


class Stage(Protocol):
    """One step of the way out: half on the device, half on the server."""

    def device(self, update: Update, rng: Rng) -> Update:
        """Change what one client sends. Runs under vmap."""

    def server(self, total: Total, rng: Rng) -> Total:
        """Change what the server is given."""


@dataclass(frozen=True)
class Channel:
    """What every update passes on its way from a client to the server.

    Without stages it is a plain sum: the server could read each client's update, and nothing is private.

    >>> import numpy as np
    >>> everyone = Cohort(np.arange(3), "all", size=3, population=3)
    >>> for charge in Channel().charges(everyone):
    ...     print(charge.observer, charge.event.kind)
    server not-private
    clients not-private
    public not-private
    """

    stages: tuple[Stage, ...] = ()

    def __init__(self, *stages: Stage) -> None:
        object.__setattr__(self, "stages", stages)

    def device(self, update: Update, rng: Rng) -> Update:
        """The device's half: each stage in order."""
        for number, stage in enumerate(self.stages):
            update = stage.device(update, rng.fold(number))
        return update

    def server(self, total: Total, rng: Rng) -> Total:
        """The server's half: the stages unwound in reverse."""
        for number, stage in reversed(list(enumerate(self.stages))):
            total = stage.server(total, rng.fold(number))
        return total

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What one round through this channel tells each observer.

        No stage declares a bound yet, so every release is charged as not private.
        """
        reason = "updates leave the device as they are, and the next shared model is computed from their sum"
        return [Charge(observer, "user", NonPrivate(reason)) for observer in OBSERVERS]

"""The one door off the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from homebody.core import Cohort, Total, Update
from homebody.errors import HomebodyError
from homebody.privacy.events import OBSERVERS, Charge, NonPrivate
from homebody.privacy.stages import Message
from homebody.rng import Rng

__all__ = ["Channel", "Stage"]


class Stage(Protocol):
    """One step of the way out: half on the device, half on the server.

    With `on_sum = True` it acts on the sum and comes after all that act on a device. With
    `place(message) -> (stage, message)` it takes its place among the others: see `homebody.privacy.stages`. One
    without may do as it likes, and nothing private is claimed for it.
    """

    def device(self, update: Update, rng: Rng) -> Update:
        """Change what one client sends. Runs under vmap."""

    def server(self, total: Total, rng: Rng) -> Total:
        """Change what the server is given."""


@runtime_checkable
class _Mechanism(Protocol):
    """A stage that bounds what is told."""

    def charges(self, cohort: Cohort) -> Sequence[Charge]: ...


@dataclass(frozen=True)
class Channel:
    """What every update passes on its way from a client to the server, written as the message travels.

    On each device the stages' halves run in the order they are listed. The messages are summed. On the server, what
    was done on the way out is undone in reverse; then the stages that act on the sum run in the order they are listed.

    Nonsense is refused here, before anything runs. Without stages it is a plain sum: the server could read each
    client's update, and nothing is private.

    >>> import numpy as np
    >>> from homebody.privacy import Clip, Gaussian, SecureSum
    >>> cohort = Cohort(np.arange(30), "fixed", size=30, population=4800)
    >>> for charge in Channel(Clip(40), SecureSum(), Gaussian(z=1)).charges(cohort):
    ...     print(charge.observer, "–", charge.event)
    server – not private: the server adds the noise itself: it sees the sum without it
    clients – Gaussian noise, 1 × the ℓ2 sensitivity (replace-one); 30 of 4,800 drawn without replacement
    public – Gaussian noise, 1 × the ℓ2 sensitivity (replace-one); 30 of 4,800 drawn without replacement
    >>> Channel(Gaussian(z=1))
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: Gaussian noise needs a bound on what one person can change: put a Clip of order 2 \
before it.
    """

    stages: tuple[Stage, ...] = ()

    def __init__(self, *stages: Stage) -> None:
        placed: list[Stage] = []
        message = Message()
        for stage in stages:
            _check_order(placed, stage, message)
            stage, message = _place(stage, message)
            placed.append(stage)
        object.__setattr__(self, "stages", tuple(placed))

    @property
    def dense(self) -> bool:
        """Whether devices send, or work on, whole tables: many clients at once then need much memory."""
        return any(getattr(stage, "dense", False) for stage in self.stages)

    def device(self, update: Update, rng: Rng) -> Update:
        """The device's half: each stage in order."""
        for number, stage in enumerate(self.stages):
            update = stage.device(update, rng.fold(number))
        return update

    def server(self, total: Total, rng: Rng) -> Total:
        """The server's half: what the devices did, undone in reverse; then what acts on the sum, in order."""
        numbered = list(enumerate(self.stages))
        undone = [(number, stage) for number, stage in reversed(numbered) if not _on_sum(stage)]
        for number, stage in (*undone, *((number, stage) for number, stage in numbered if _on_sum(stage))):
            total = stage.server(total, rng.fold(number))
        return total

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What one round through this channel tells each observer: as its last mechanism says, if it has one."""
        for stage in reversed(self.stages):
            if isinstance(stage, _Mechanism):
                return stage.charges(cohort)
        reason = "updates leave the device as they are, and the next shared model is computed from their sum"
        if self.stages:
            reason = "no noise is added to what leaves the device, and the next shared model is computed from the sum"
        return [Charge(observer, "user", NonPrivate(reason)) for observer in OBSERVERS]


def _on_sum(stage: Stage) -> bool:
    return bool(getattr(stage, "on_sum", False))


def _check_order(before: Sequence[Stage], stage: Stage, message: Message) -> None:
    name = type(stage).__name__
    summed = next((type(one).__name__ for one in before if _on_sum(one)), None)
    if summed and not _on_sum(stage):
        raise HomebodyError(f"{name} works on the device, so it cannot come after {summed}, which acts on the sum.")
    noise = next((one for one in before if _on_sum(one) and isinstance(one, _Mechanism)), None)
    if noise and name == "SecureSum":
        raise HomebodyError(f"SecureSum makes the sum that {type(noise).__name__} adds noise to: put it before.")
    if message.reports and not _on_sum(stage) and name != "Shuffle":
        raise HomebodyError(f"{name} cannot follow one-bit reports: they leave as they are, or through a Shuffle.")


def _place(stage: Stage, message: Message) -> tuple[Stage, Message]:
    place = getattr(stage, "place", None)
    if place is None:
        return stage, replace(message, norms={}, strange=type(stage).__name__)
    found: tuple[Stage, Message] = place(message)
    return found

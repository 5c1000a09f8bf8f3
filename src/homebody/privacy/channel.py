"""The one door off the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.func import vmap

from homebody.core import Cohort, Rows, Total, Tree, Update, Work, ships, written
from homebody.errors import HomebodyError
from homebody.privacy.events import OBSERVERS, Charge, NonPrivate
from homebody.privacy.grid import Grid
from homebody.privacy.requests import AskRows
from homebody.privacy.stages import Clip, Message, passed
from homebody.rng import Rng

__all__ = ["Channel", "Stage"]


class Stage(Protocol):
    """One step of the way out: half on the device, half on the server.

    With `on_sum = True` it acts on the sum and comes after all that act on a device; its `device` may still put the
    update into another form. With `place(message) -> (stage, message)` it takes its place among the others: see
    `homebody.privacy.stages`. One without may do as it likes, and nothing private is claimed for it. With
    `noise_of_many(sums, devices, rng)` a stage that adds noise on the device can draw the sum of many devices' noise at
    once, for simulations, and add it to sums of what its `before_noise(update)` gives; whoever changes its `device`
    must change all three. With `devices(update, rng)` a first stage that looks at a few entries does the work of
    `device` for many clients at once, and reads formulas (`homebody.core.Computed`) where it needs them. With
    `read(messages, sums)` its half on the server begins with each message instead of their sum: it adds what many of
    them, stacked, say to the sums that its `server` is given and uses up. It is then the last stage. With
    `work(given)` it says what a device's work becomes with its half; without, it counts as a pass over every entry.
    """

    def device(self, update: Update, rng: Rng) -> Update:
        """Change what one client sends. Runs under vmap. It may write over the update that it is given."""

    def server(self, total: Total, rng: Rng) -> Total:
        """Change what the server is given."""


@runtime_checkable
class _Mechanism(Protocol):
    """A stage that bounds what is told."""

    def charges(self, cohort: Cohort) -> Sequence[Charge]: ...


class _Reader(Protocol):
    """A stage whose half on the server reads each message."""

    def read(self, messages: Update, sums: Tree) -> None: ...


class _Noise(Protocol):
    """A stage that knows what the noise of many devices adds up to."""

    def before_noise(self, update: Update) -> Update: ...

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree: ...


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

    @property
    def asks(self) -> bool:
        """Whether devices ask for the rows that they work on, instead of downloading whole tables."""
        return any(isinstance(stage, AskRows) for stage in self.stages)

    @property
    def ends_in_noise(self) -> bool:
        """Whether the last thing on a device is noise whose sum over many devices can be drawn at once."""
        return self._last_noise() is not None

    @property
    def reads(self) -> bool:
        """Whether the server must read each message before it sums them: see `read`."""
        return self._reader() is not None

    def read(self, messages: Update, sums: Tree) -> None:
        """Add to the sums what the server reads in these messages, stacked along the first dimension."""
        reader = self._reader()
        if reader is None:
            raise HomebodyError("The messages of this channel are summed as they come: there is nothing to read.")
        reader.read(messages, sums)

    def _reader(self) -> _Reader | None:
        found: list[_Reader] = [stage for stage in self.stages if hasattr(stage, "read")]  # type: ignore[misc]
        return found[-1] if found else None

    def device(self, update: Update, rng: Rng) -> Update:
        """The device's half: each stage in order."""
        for number, stage in enumerate(self._working):
            update = stage.device(update, rng.fold(number))
        return update

    def devices(self, update: Update, rng: Rng) -> Update:
        """The device's half for many clients, stacked; a formula is worked out only as far as the stages look at it."""
        for number, stage in enumerate(self._working):
            streams = rng.fold(number)
            if number == 0 and self.samples:
                update = stage.devices(update, streams)  # type: ignore[attr-defined]
                continue
            half = stage.device
            update = vmap(lambda key, own, half=half: half(own, Rng(key)))(streams.key, written(update))
        return written(update)

    @property
    def samples(self) -> bool:
        """Whether a device looks at a few entries of its update alone: the rest need not be worked out."""
        return bool(self._working) and hasattr(self._working[0], "devices")

    def bounded(self, update: Update, clean: Callable[[Tree], Tree] = lambda tree: tree) -> Update:
        """An update as it came to the server, clipped once more: a device that leaves its clip out gains nothing.

        Only where nothing but clips happens on the device: what was added to a clipped update may exceed the clip.
        clean: what else the server does to the numbers before it clips them.

        >>> import torch
        >>> from homebody.privacy import Clip
        >>> Channel(Clip(1)).bounded({"w": torch.tensor([30.0, 40.0])})["w"].tolist()
        [0.59..., 0.79...]
        """
        if not self.plain:
            return update
        grid = self.grid
        known = clean(_mapped(update, grid.doubles) if grid else update)
        for stage in self._working:
            known = known if _on_sum(stage) else stage.device(known, Rng.of(0))
        return _mapped(known, grid.whole) if grid else known

    @property
    def grid(self) -> Grid | None:
        """What the numbers of a message are whole steps of; None where they are plain numbers."""
        grids = (getattr(stage, "grid", None) for stage in self._working if _on_sum(stage))
        return next((grid for grid in grids if grid is not None), None)

    @property
    def plain(self) -> bool:
        """Whether an update comes to the server as it was worked out, or clipped: without noise of the device's."""
        return all(isinstance(stage, Clip) for stage in self._working if not _on_sum(stage))

    def for_sum(self, update: Update, rng: Rng) -> Update:
        """What one client adds to the sum of many, for simulations, where nobody looks at a single message.

        That is the device's half without what leaves the sum as it was, and without noise that `noise_of_many` adds.
        """
        for number, stage in self._for_sum:
            if number == self._last_noise():
                noise: _Noise = stage  # type: ignore[assignment]
                return noise.before_noise(update)
            update = stage.device(update, rng.fold(number))
        return update

    @property
    def sums_dense(self) -> bool:
        """Whether `for_sum` works on whole tables."""
        last = self._last_noise()
        return any(getattr(stage, "dense", False) for number, stage in self._for_sum if number != last)

    @property
    def fills(self) -> bool:
        """Whether devices fill the tables that they send, though a sum can do without: `for_sum` leaves that out."""
        return any(getattr(stage, "dense", False) and _keeps_sum(stage) for stage in self._working)

    @property
    def _for_sum(self) -> list[tuple[int, Stage]]:
        return [(number, stage) for number, stage in enumerate(self._working) if not _keeps_sum(stage)]

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        """Sums of what came `for_sum`, with the noise of so many devices: distributed as if each had drawn its own, at
        the cost of one. For simulations, where nobody looks at a single message."""
        number = self._last_noise()
        if number is None:
            raise HomebodyError("This channel does not end in noise on the device: there is none to be summed.")
        noise: _Noise = self._working[number]  # type: ignore[assignment]
        return noise.noise_of_many(sums, devices, rng.fold(number))

    @property
    def _working(self) -> tuple[Stage, ...]:
        """The stages that change something: a request beside them must not change what noise they draw."""
        return tuple(stage for stage in self.stages if not isinstance(stage, AskRows))

    def _last_noise(self) -> int | None:
        for number, stage in reversed(list(enumerate(self._working))):
            if _noise_adds_up(stage):
                return number
            if not _keeps_sum(stage):
                return None
        return None

    def work(self, given: Work) -> Work:
        """What a device's work becomes with its half of the channel."""
        for stage in self._working:
            given = getattr(stage, "work", passed)(given)
        return given

    def server(self, total: Total, rng: Rng) -> Total:
        """The server's half: what the devices did, undone in reverse; then what acts on the sum, in order."""
        numbered = list(enumerate(self._working))
        undone = [(number, stage) for number, stage in reversed(numbered) if not _on_sum(stage)]
        for number, stage in (*undone, *((number, stage) for number, stage in numbered if _on_sum(stage))):
            total = stage.server(total, rng.fold(number))
        return total

    def deviation(self, entries: int, clients: int) -> float:
        """The standard deviation of the noise in each number of a sum over so many clients, whose messages have so many
        numbers before they leave; NaN where a stage does not say.

        >>> from homebody.privacy import Clip, Gaussian
        >>> Channel(Clip(2), Gaussian(z=1.5)).deviation(entries=10, clients=100)
        6.0
        """
        found = [getattr(stage, "deviation", None) for stage in self.stages]
        return math.hypot(*(math.nan if one is None else one(entries, clients) for one in found))

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What one round through this channel tells each observer: as its last mechanism says, if it has one."""
        return self.with_requests(self._charges(cohort))

    def with_requests(self, charges: Sequence[Charge]) -> Sequence[Charge]:
        """These charges, and what devices tell the server by what they ask it for."""
        for stage in self.stages:
            if isinstance(stage, AskRows):
                charges = stage.told(charges)
        return charges

    @property
    def stated_by(self) -> str | None:
        """The stage that states its own charges and does not ship with Homebody; None: there is none."""
        kinds = [type(self), *(type(stage) for stage in self.stages if isinstance(stage, _Mechanism))]
        return next((kind.__name__ for kind in kinds if not ships(kind)), None)

    def claims(self, charges: Sequence[Charge], by: str) -> Sequence[Charge]:
        """Charges that somebody states and nothing derives: every observer may be told everything."""
        claimed = "; ".join(dict.fromkeys(f"to {one.observer}, of a {one.unit}: {one.event}" for one in charges))
        reason = f"{by} states itself what it tells, and nothing derives it; it claims {claimed or 'nothing'}"
        observers = dict.fromkeys((*OBSERVERS, *(charge.observer for charge in charges)))
        return [Charge(observer, "user", NonPrivate(reason)) for observer in observers]

    def _charges(self, cohort: Cohort) -> Sequence[Charge]:
        """Without regard to requests."""
        for stage in reversed(self.stages):
            if isinstance(stage, _Mechanism):
                return stage.charges(cohort)
        reason = "updates leave the device as they are, and the next shared model is computed from their sum"
        if self.stages:
            reason = "no noise is added to what leaves the device, and the next shared model is computed from the sum"
        return [Charge(observer, "user", NonPrivate(reason)) for observer in OBSERVERS]


def _mapped(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    return {
        name: Rows(value.index, change(value.value), value.size) if isinstance(value, Rows) else change(value)
        for name, value in tree.items()
    }


def _on_sum(stage: Stage) -> bool:
    return bool(getattr(stage, "on_sum", False))


def _noise_adds_up(stage: Stage) -> bool:
    """Whether it adds noise on the device and knows the sum of many; one whose device half was changed does not."""
    if _on_sum(stage):
        return False
    makers = [
        next((kind for kind in type(stage).__mro__ if name in vars(kind)), None) for name in ("device", "noise_of_many")
    ]
    return makers[1] is not None and makers[0] is makers[1]


def _keeps_sum(stage: Stage) -> bool:
    """Whether its half on the device leaves a sum as it is; what a parent says of itself holds for no changed half."""
    order = type(stage).__mro__
    places = [
        next((n for n, kind in enumerate(order) if name in vars(kind)), len(order)) for name in ("keeps_sum", "device")
    ]
    return bool(getattr(stage, "keeps_sum", False)) and places[0] <= places[1]


def _check_order(before: Sequence[Stage], stage: Stage, message: Message) -> None:
    if isinstance(stage, AskRows):
        return  # it acts on what comes to the device, before anything leaves
    name = type(stage).__name__
    if message.read:
        raise HomebodyError(f"{name} cannot follow {message.read}: the server reads each message as it left a device.")
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

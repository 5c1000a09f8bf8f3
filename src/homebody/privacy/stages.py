"""The stages that ship: what bounds a message, what hides it, and what each observer is told in the end.

The one-bit reports are in `homebody.privacy.reports`, randomised response in `homebody.privacy.responses`, the requests
in `homebody.privacy.requests`.

| stage | on the device | on the server | told |
|---|---|---|---|
| `Clip` | bounds the update | | nothing is hidden by it alone |
| `Gaussian` | rounds to a grid | adds noise to the sum | the server ∞; others by `GaussianRelease` |
| `Laplace` | rounds to a grid, adds noise | or adds it here | by `LaplaceRelease`; on the device to the server too |
| `OneBit` | sends k bits of k random entries | makes an estimate of them | everyone, by `Reports` |
| `Shuffle` | | | everyone behind the proxy, by `ShuffledReports` |
| `RandomisedResponse` | sends a bit for every entry | sums them and their products | everyone, as its method says |
| `SecureSum` | sends all of a table, not rows of it | | the sum alone, which is not noise |
| `AskRows` | asks for the rows it works on | | the server ∞; others as the rest of the channel says |

Noise is exact: see `homebody.privacy.grid`. A stage takes its place in a channel by `place`: it is told what is known
of the message so far, refuses what makes no sense, and says what is known after it. Its noise comes from the stream
that it is handed, and from nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from homebody import ops
from homebody.core import CALL, Cohort, Rows, Total, Tree, Update, Work
from homebody.errors import HomebodyError
from homebody.privacy.events import (
    OBSERVERS,
    Charge,
    Event,
    GaussianRelease,
    LaplaceRelease,
    NonPrivate,
    Relation,
    Sampling,
)
from homebody.privacy.grid import COARSEST, Grid, gaussian, laplace
from homebody.rng import Rng

__all__ = ["Clip", "Gaussian", "Laplace", "Message", "SecureSum", "Step"]

_SHRUNK = 1 - 2**-20
"""Rounding to 32 bits must not carry a clipped update over its bound."""


@dataclass(frozen=True)
class Message:
    """What is known of one client's message, after the stages so far."""

    norms: Mapping[int, float] = field(default_factory=dict)
    """The bounds that its ℓ1 and ℓ2 norm never exceed, where there are any."""
    hidden: str = ""
    """The stage that added noise already."""
    reports: tuple[float, int] | None = None
    """ε of a report and how many there are, where the message is nothing but randomised reports."""
    shuffled: bool = False
    read: str = ""
    """The stage whose server half reads each message before they are summed."""
    secret: bool = False
    """Whether the server gets the sum alone."""
    strange: str = ""
    """A stage that states nothing about itself: its half on the server could undo any bound."""
    asks: bool = False
    """Whether the device tells the server which rows it works on."""

    def bound(self, order: Literal[1, 2], noise: str) -> float:
        """The norm that this noise is measured against; refused where there is none."""
        if self.hidden:
            raise HomebodyError(f"{noise} cannot follow {self.hidden}: no bound holds after it, and noise needs one.")
        if self.strange:
            raise HomebodyError(
                f"{noise} cannot follow {self.strange}, which states no bound of its own: its half on the server could "
                "undo any other."
            )
        if order not in self.norms:
            other = f" ℓ{3 - order} alone bounds nothing here:" if self.norms else ""
            raise HomebodyError(
                f"{noise} needs a bound on what one person can change:{other} put a Clip of order {order} before it."
            )
        return self.norms[order]


class Step:
    """Halves that change nothing."""

    on_sum: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    """Whether its half on the device fills a table that rows were sent of."""
    keeps_sum: ClassVar[bool] = False
    """Whether its half on the device leaves the sum of all messages as it was."""

    def device(self, update: Update, rng: Rng) -> Update:
        return update

    def server(self, total: Total, rng: Rng) -> Total:
        return total

    def place(self, message: Message) -> tuple[Self, Message]:
        return self, message

    def deviation(self, entries: int, clients: int) -> float:
        """The standard deviation of the noise that it leaves in each number of a sum over so many clients, whose
        messages have so many numbers."""
        return 0.0


@dataclass(frozen=True)
class Clip(Step):
    """Scales an update down to a norm, so that one person can change a sum by so much and no more.

    A norm for each tensor bounds each on its own; the whole is bounded by their combined norm. Rows of the same index
    add up before they are measured. An update that is no longer finite is sent as zeros: the bound holds for it too.

    >>> Clip(1.0).device({"w": torch.tensor([3.0, 4.0])}, Rng.of(0))["w"].tolist()
    [0.599..., 0.799...]
    >>> Clip({"w": 3.0, "b": 4.0}).sensitivity("add-remove"), Clip({"w": 3.0, "b": 4.0}).sensitivity("replace-one")
    (5.0, 10.0)
    """

    norm: float | Mapping[str, float] = field(hash=False)
    order: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise HomebodyError(f"A clip is of order 1 or 2, not {self.order!r}.")
        norms = list(self.norm.values()) if isinstance(self.norm, Mapping) else [self.norm]
        if not norms:
            raise HomebodyError("A clip of each tensor needs at least one tensor's norm.")
        for value in norms:
            check_number("The norm of a clip", value)

    @property
    def whole(self) -> float:
        """The norm that a whole update never exceeds."""
        if not isinstance(self.norm, Mapping):
            return float(self.norm)
        return sum(self.norm.values()) if self.order == 1 else math.hypot(*self.norm.values())

    def sensitivity(self, relation: Relation) -> float:
        """How far, in this norm, one person moves a sum: with or without them, or with another in their place."""
        return _sensitivity(self.whole, relation)

    def place(self, message: Message) -> tuple[Self, Message]:
        if message.hidden:
            raise HomebodyError(f"A Clip cannot follow {message.hidden}: clip first, then add noise.")
        known = min(self.whole, message.norms.get(self.order, math.inf))
        return self, replace(message, norms={**message.norms, self.order: known})

    def device(self, update: Update, rng: Rng) -> Update:
        own = {name: ops.coalesced(value) if isinstance(value, Rows) else value for name, value in update.items()}
        powers = {name: ops.power(_values(value), self.order) for name, value in own.items()}
        if isinstance(self.norm, Mapping):
            for name in own:
                if name not in self.norm:
                    raise HomebodyError(
                        f"The clip names no norm for the update's '{name}'; it must bound every tensor."
                    )
            return {name: self._scaled(value, powers[name], self.norm[name]) for name, value in own.items()}
        power = torch.stack(list(powers.values())).sum(0)
        return {name: self._scaled(value, power, self.norm) for name, value in own.items()}

    def _scaled(self, value: Rows | Tensor, power: Tensor, bound: float) -> Rows | Tensor:
        norm = power if self.order == 1 else power.sqrt()
        factor = torch.where(norm > bound * _SHRUNK, bound * _SHRUNK / norm, 1.0)
        factor = torch.where(torch.isfinite(norm), factor, 0.0)
        if isinstance(value, Rows):
            return Rows(value.index, ops.scaled(value.value, factor), value.size)
        return ops.scaled(value, factor)


@dataclass(frozen=True)
class Gaussian(Step):
    """Noise that the server adds to the sum, of z × the ℓ2 sensitivity, in every coordinate.

    The server adds it, so it sees the sum without it: ε = ∞ against the server. The others see the noised sum, and do
    not learn who was in the cohort. Devices send whole numbers of the grid's steps; the noise is a normal variable,
    rounded to the grid.
    """

    z: float
    relation: Relation = "replace-one"
    sensitivity: float | None = field(default=None, kw_only=True, repr=False)
    """ℓ2, under the relation; a channel takes it from its clip."""
    grid: Grid | None = field(default=None, kw_only=True, repr=False, compare=False)
    """What updates are rounded to; None where there is no noise."""

    on_sum: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("z, the noise multiplier of Gaussian noise,", self.z, zero=True)
        _known("relation", self.relation, get_args(Relation))

    @property
    def scale(self) -> float:
        """The noise's standard deviation."""
        return self.z * _placed(self.sensitivity, "Gaussian noise")

    def place(self, message: Message) -> tuple[Self, Message]:
        bound = message.bound(2, "Gaussian noise")
        known = _sensitivity(bound, self.relation)
        grid = Grid.fitted(self.z * known, bound) if self.z else None
        return replace(self, sensitivity=known, grid=grid), replace(message, hidden="Gaussian noise")

    def work(self, given: Work) -> Work:
        """What a device's work becomes."""
        return noised(given)

    def device(self, update: Update, rng: Rng) -> Update:
        return _on_grid(update, self.grid) if self.grid else update

    def deviation(self, entries: int, clients: int) -> float:
        return self.scale

    def server(self, total: Total, rng: Rng) -> Total:
        _placed(self.sensitivity, "Gaussian noise")
        return Total(_noised(total.sum, self.grid, rng, gaussian), total.clients) if self.grid else total

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if not self.z:
            return _everyone(NonPrivate("Gaussian noise with z = 0 is no noise"))
        relation, share = _counted(self.relation, cohort)
        return _noise_on_sum(GaussianRelease(self.z * share, relation, sampling(cohort)))


@dataclass(frozen=True)
class Laplace(Step):
    """Discrete Laplace noise of scale b in every coordinate, against an ℓ1 clip.

    On the device nobody sees the update without it, so it holds against the server as well, which learns who took
    part: nothing is amplified there. On the sum it is like Gaussian noise. `unbounded` adds it to an upload that
    nothing bounds, as PFedRec's appendix does: that certifies nothing, and is charged as not private.
    """

    b: float
    where: Literal["device", "sum"] = "device"
    relation: Relation = "replace-one"
    unbounded: bool = False
    sensitivity: float | None = field(default=None, kw_only=True, repr=False)
    """ℓ1, under the relation; a channel takes it from its clip."""
    grid: Grid | None = field(default=None, kw_only=True, repr=False, compare=False)
    """What updates are rounded to; None where there is no noise, or nothing bounds what it is added to."""

    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("b, the scale of Laplace noise,", self.b, zero=True)
        _known("place for Laplace noise", self.where, ("device", "sum"))
        _known("relation", self.relation, get_args(Relation))
        if self.where == "device" and self.relation != "replace-one":
            raise HomebodyError(
                "Noise on the device hides what is sent, not that it is sent: its relation is replace-one."
            )
        if self.unbounded and self.where == "sum":
            raise HomebodyError(
                "Unbounded Laplace noise is added on the device, as it was published: leave out where=sum."
            )

    @property
    def on_sum(self) -> bool:  # type: ignore[override]
        return self.where == "sum"

    def place(self, message: Message) -> tuple[Self, Message]:
        if self.unbounded:
            if message.norms:
                raise HomebodyError("The update is clipped, so Laplace noise is bounded here: leave out unbounded.")
            return self, replace(message, hidden="Laplace noise")
        bound = message.bound(1, "Laplace noise")
        grid = Grid.fitted(self.b, bound, coarsest=COARSEST) if self.b else None
        known = _sensitivity(bound, self.relation)
        return replace(self, sensitivity=known, grid=grid), replace(message, hidden="Laplace noise")

    def work(self, given: Work) -> Work:
        """What a device's work becomes."""
        return noised(given)

    def device(self, update: Update, rng: Rng) -> Update:
        whole = self.before_noise(update)
        return whole if self.on_sum else self._noised(whole, rng)

    def server(self, total: Total, rng: Rng) -> Total:
        return Total(self._noised(total.sum, rng), total.clients) if self.on_sum else total

    def before_noise(self, update: Update) -> Update:
        return _on_grid(update, self.grid) if self.grid else update

    def deviation(self, entries: int, clients: int) -> float:
        return math.sqrt(2 * (1 if self.on_sum else clients)) * self.b

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        """These sums of updates, before their noise, with the noise that so many devices add between them.

        It is drawn at once. Where there are several, it is the sum of as many continuous variables, rounded: of the
        sum of discrete ones that differs by a relative 2⁻⁴⁰ and less in its variance, and it serves simulations alone.
        """
        return self._noised(sums, rng, devices)

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if self.unbounded:
            return _everyone(NonPrivate("Laplace noise is added to an update that nothing bounds"))
        if not self.b:
            return _everyone(NonPrivate("Laplace noise with b = 0 is no noise"))
        relation, share = _counted(self.relation, cohort) if self.on_sum else (self.relation, 1.0)
        event = LaplaceRelease(share * self.b / _placed(self.sensitivity, "Laplace noise"), relation, sampling(cohort))
        if self.on_sum:
            return _noise_on_sum(event)
        # The server picks the cohort, so being drawn hides nobody from it.
        known = replace(event, sampling=Sampling())
        return [Charge(who, "user", known if who == "server" else event) for who in OBSERVERS]

    def _noised(self, tree: Tree, rng: Rng, devices: int = 1) -> Tree:
        if self.unbounded:
            return _blurred(tree, self.b, rng, devices)
        _placed(self.sensitivity, "Laplace noise")
        if self.grid is None:
            return {name: real(dense(value)) for name, value in tree.items()}
        if devices == 1:
            return _noised(tree, self.grid, rng, laplace)
        scale = 2.0**self.grid.depth

        def draw(own: Rng, depth: int, *shape: int) -> Tensor:
            return (scale * own.laplace_sum(devices, *shape)).round().to(torch.int64)

        return _noised(tree, self.grid, rng, draw)


@dataclass(frozen=True)
class SecureSum(Step):
    """Declares that the server learns the sum over the cohort and no single update.

    The sum itself is exact: without noise ε stays ∞. Whole tables are summed, since which rows a device sends would
    tell what it touched. A simulation just sums.
    """

    on_sum: ClassVar[bool] = True
    dense: ClassVar[bool] = True
    keeps_sum: ClassVar[bool] = True

    def place(self, message: Message) -> tuple[Self, Message]:
        if message.secret:
            raise HomebodyError("A second SecureSum has nothing left to sum: leave one out.")
        if message.shuffled:
            raise HomebodyError("A Shuffle and a SecureSum both hide who sent what: keep one of them.")
        return self, replace(message, secret=True)

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: dense(value) for name, value in update.items()}


def noised(given: Work) -> Work:
    """A device's work once every entry of the update is a whole number of 64 bits on a grid."""
    return passed(given) + Work(bytes=given.bytes)


def passed(given: Work) -> Work:
    """A device's work once every entry of the update was noised, or changed in another way."""
    entries = given.bytes // 4
    return given + Work(memory=64 * entries, operations=2_000 * entries + 50 * CALL)


def sampling(cohort: Cohort) -> Sampling:
    """How the cohort was drawn, for those who do not learn who is in it."""
    return Sampling("fixed", cohort.size, cohort.population) if cohort.sampling == "fixed" else Sampling()


def _counted(relation: Relation, cohort: Cohort) -> tuple[Relation, float]:
    """The relation that noise on a sum is accounted under, and by how much its multiplier shrinks there.

    Where everyone takes part, a sum is divided by how many they are, and a departure changes that too: the mean moves
    by as much as by a replacement. So the number of people is taken for public, and the noise is measured against a
    replacement, which moves the sum twice as far.
    """
    return ("replace-one", 0.5) if relation == "add-remove" and cohort.sampling == "all" else (relation, 1.0)


def _everyone(event: Event) -> list[Charge]:
    return [Charge(observer, "user", event) for observer in OBSERVERS]


def _noise_on_sum(event: Event) -> list[Charge]:
    own = NonPrivate("the server adds the noise itself: it sees the sum without it")
    return [Charge(observer, "user", own if observer == "server" else event) for observer in OBSERVERS]


def _sensitivity(norm: float, relation: Relation) -> float:
    return norm if relation == "add-remove" else 2 * norm


def _placed(sensitivity: float | None, noise: str) -> float:
    if sensitivity is None:
        raise HomebodyError(f"{noise} takes its measure from the clip of its channel: put it into a Channel.")
    return sensitivity


def dense(value: Rows | Tensor) -> Tensor:
    return value.dense() if isinstance(value, Rows) else value


def _values(value: Rows | Tensor) -> Tensor:
    return value.value if isinstance(value, Rows) else value


def real(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _on_grid(update: Update, grid: Grid) -> Update:
    """A clipped update in whole numbers of the grid's steps, written over what the clip gave."""
    out: Update = {}
    for name, value in update.items():
        steps = grid.whole(_values(value), over=True)
        out[name] = Rows(value.index, steps, value.size) if isinstance(value, Rows) else steps
    return out


def _noised(tree: Tree, grid: Grid, rng: Rng, draw: Callable[..., Tensor]) -> Tree:
    """Exact noise in every coordinate, also in those that nobody touched: which ones are zero would tell.

    What is not in steps yet is rounded to them first.
    """
    out = {}
    for name, value in tree.items():
        whole = dense(value)
        steps = (grid.whole(whole) if whole.is_floating_point() else whole).to(torch.int64)
        out[name] = grid.values(steps + draw(rng.fold(name), grid.depth, *steps.shape))
    return out


def _blurred(tree: Tree, scale: float, rng: Rng, devices: int) -> Tree:
    """Laplace noise in floating point, which certifies nothing."""
    out = {}
    for name, value in tree.items():
        whole, own = real(dense(value)), rng.fold(name)
        noise = own.laplace(*whole.shape) if devices == 1 else own.laplace_sum(devices, *whole.shape)
        out[name] = whole + (scale * noise).to(whole.dtype)
    return out


def check_number(what: str, value: object, *, zero: bool = False) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not right or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise HomebodyError(f"{what} must be a number {'from' if zero else 'above'} 0, not {value!r}.")


def _known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise HomebodyError(f"There is no {what} '{value}': {' or '.join(known)}.")

"""What a stage is (`Stage`), what a channel knows of a message (`Facts`), and the stages that clip, sum and add noise.

One-bit reports, the shuffle and randomised response are in `homebody.privacy.reports`, the stages for several apps of
one person in `homebody.privacy.views`, the secure sum and the noise that devices add to it in
`homebody.privacy.secure_sum`.

| stage | on the device | on the server | what is charged |
|---|---|---|---|
| `Clip` | bounds the update | | nothing is hidden by it alone |
| `Gaussian` | rounds to a grid | adds noise to the sum | the server ∞; others by `GaussianRelease` |
| the same with a helper | rounds to a grid | the helper adds noise | also the server, by `HelpedRelease` |
| `Laplace` | rounds to a grid, adds noise | or adds it here | by `LaplaceRelease`; on the device to the server too |
| `VectorLaplace` | the same after an ℓ2 clip | | everyone, by `LaplaceRelease` |
| `ImpressionReport` | sends a noised interest and a pseudo-click | reads each | everyone, each half by its event |
| `OneBit` | sends k bits of k random entries | estimates the sum from them | everyone, by `Reports` |
| `Shuffle` | | | everyone behind the proxy, by `ShuffledReports` |
| `RandomisedResponse` | sends a bit for every entry | sums them and their products | everyone, as its method says |
| `Skellam` | rounds to steps, adds a share of the noise | | everyone, by `SkellamRelease` |
| `SecureSum` | sends whole tables, not rows of them | | the sum alone: what `Skellam` says of it, or nothing |
| `Views` | bounds each view's part, joins them | | the other views, as not private |
| `ViewNoise` | adds noise to what the views joined | | the other views, by `GaussianRelease` |

Noise is exact: see `homebody.privacy.grid`. It is drawn from the stream that a stage is given, and from nowhere else.

To add a stage: derive it from `Stage` here or in a file of its own in this folder, and name it in `STAGES` of
`homebody.privacy.specs`. CONTRIBUTING.md has an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

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
    HelpedRelease,
    LaplaceRelease,
    NonPrivate,
    Relation,
    Sampling,
)
from homebody.privacy.grid import COARSEST, STEPS, Grid, gaussian, laplace
from homebody.rng import Rng

if TYPE_CHECKING:
    from homebody.privacy.reports import OneBit, RandomisedResponse, Shuffle
    from homebody.privacy.secure_sum import SecureSum, Skellam
    from homebody.privacy.views import ViewNoise, Views

__all__ = ["Clip", "Facts", "Gaussian", "Laplace", "Stage", "VectorLaplace"]

_SHRUNK = 1 - 2**-20
"""Rounding to 32 bits must not carry a clipped update over its bound."""
_FINE, _HELPED = 28, 18
"""A clip's norm has 2 to this power steps, or up to twice as many; with a helper fewer, so that a sum over 4,000 people
and its noise fit into 4 bytes a number."""


@dataclass(frozen=True)
class Facts:
    """What is known of one client's message after the stages so far; `Channel.facts` is what holds after all of them.

    Each stage adds to it in `place`. Others ask it instead of looking at the stages.
    """

    norms: Mapping[int, float] = field(default_factory=dict)
    """Bounds on the ℓ1 and ℓ2 norm of the update before any noise, by order; empty: nothing bounds it."""
    clips: tuple[Clip, ...] = ()
    hidden: str = ""
    """What hides the update, for a sentence: "Laplace noise", "one-bit reports"; empty: nothing does."""
    noise: Literal["", "gaussian", "laplace", "skellam"] = ""
    noise_on_sum: bool = False
    """Whether noise is added to the sum: by a helper (`helped`), or by the server, which sees the sum without it."""
    grid: Grid | None = None
    """What the numbers of a message are whole steps of; None: they are plain numbers."""
    reports: OneBit | None = None
    """The stage that sends one-bit reports instead of the update."""
    shuffle: Shuffle | None = None
    """The stage that hides who sent which report."""
    responses: RandomisedResponse | None = None
    """The stage that sends a random bit for every entry of the update."""
    views: Views | None = None
    """The stage that joins the parts of a person's views."""
    view_noise: ViewNoise | None = None
    """The stage that adds noise to what the views joined."""
    skellam: Skellam | None = None
    """The stage that adds a share of the noise on each device."""
    sum: SecureSum | None = None
    """The stage by which the server gets the sum alone."""
    unknown: str = ""
    """A stage that states nothing about itself: its half on the server could undo any bound."""
    plain: bool = True
    """Whether devices send their updates as computed, or clipped, and do nothing else to them."""
    reader: Stage | None = None
    """The stage whose half on the server reads each message before they are summed."""
    names_lists: bool = False
    """Whether a message names items that its person was shown: devices then tell only of lists that the server ranked,
    and so knows."""
    mechanism: Stage | None = None
    """The last stage that states what a round costs."""
    acts_on_sum: str = ""
    """The first stage that acts on the sum."""

    @property
    def secret(self) -> bool:
        """Whether the server gets the sum alone."""
        return self.sum is not None

    @property
    def helped(self) -> bool:
        """Whether a helper opens the sum. Noise on the sum is then the helper's, and the server never sees it bare."""
        return self.sum is not None and self.sum.helper

    @property
    def noise_on_device(self) -> bool:
        return bool(self.noise) and not self.noise_on_sum

    @property
    def shuffled(self) -> bool:
        """Whether reports go through a proxy, which mixes them."""
        return self.shuffle is not None

    @property
    def hides_senders(self) -> bool:
        """Whether the server gets a sum, or reports without senders, instead of each client's message."""
        return self.secret or self.shuffled

    def bound(self, order: Literal[1, 2], noise: str) -> float:
        """The norm that this noise is measured against; refused where there is none."""
        if self.hidden:
            raise HomebodyError(f"{noise} cannot follow {self.hidden}: no bound holds after it, and noise needs one.")
        if self.unknown:
            raise HomebodyError(
                f"{noise} cannot follow {self.unknown}, which states no bound of its own: its half on the server could "
                "undo any other."
            )
        if order not in self.norms:
            other = f" ℓ{3 - order} alone bounds nothing here:" if self.norms else ""
            raise HomebodyError(
                f"{noise} needs a bound on what one person can change:{other} put a Clip of order {order} before it."
            )
        return self.norms[order]


class Stage:
    """One step of the way out: half on the device, half on the server.

    A stage overrides `device` and `server`. With nothing else it may do anything, and nothing private is claimed for
    it. The other members state what a channel may rely on. `keeps_sum`, `samples` and `noise_adds_up` are promises
    about the device half: a subclass that changes that half loses them, unless it makes them again itself.

    >>> from homebody.privacy import SecureSum
    >>> class Doubled(SecureSum):
    ...     def device(self, update, rng):
    ...         return {name: 2 * value for name, value in update.items()}
    >>> SecureSum.keeps_sum, Doubled.keeps_sum
    (True, False)
    """

    on_sum: bool = False
    """Whether it acts on the sum. It then comes after all that act on a device; its `device` may still put the update
    into another form."""
    dense: ClassVar[bool] = False
    """Whether its device half fills a table that rows were sent of."""
    reads: ClassVar[bool] = False
    """Whether the server's half begins with each message, in `read`. It is then the last stage."""
    keeps_sum: ClassVar[bool] = False
    """Whether its device half leaves the sum of all messages as it was."""
    samples: ClassVar[bool] = False
    """Whether its device half looks at a few entries only, and `devices` does the same for many clients."""
    noise_adds_up: ClassVar[bool] = False
    """Whether its device half is `before_noise`, then noise whose sum over many devices `noise_of_many` can draw."""
    noise_field: ClassVar[str] = ""
    """The field that says how much noise it adds, which `--calibrate` finds; empty where there is none."""

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        parents = [parent for parent in cls.__bases__ if issubclass(parent, Stage)]
        for promise, halves in _PROMISES.items():
            changed = any(getattr(cls, half) is not getattr(parent, half) for parent in parents for half in halves)
            if changed and promise not in vars(cls):
                setattr(cls, promise, False)

    def device(self, update: Update, rng: Rng) -> Update:
        """Change what one client sends. Runs under vmap. It may overwrite the update that it is given."""
        return update

    def server(self, total: Total, rng: Rng) -> Total:
        """Change what the server is given."""
        return total

    def place(self, facts: Facts) -> tuple[Stage, Facts]:
        """Take a place in a channel: refuse what makes no sense after these facts, and state the facts after it.

        The stage that is returned may have taken settings from the facts, such as a sensitivity. By default a stage
        states nothing: bounds on what devices send end with it, and noise cannot follow.
        """
        return self, replace(facts, norms=facts.norms if self.on_sum else {}, unknown=type(self).__name__)

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What one round tells each observer. Only for stages that hide something; a channel asks the last of them."""
        raise HomebodyError(f"{type(self).__name__} states no charges.")

    def with_share(self, share: float) -> Self:
        """This stage with a part of its budget: more noise, if it adds any. Releases whose shares add up to 1 cost
        together what one release with the noise of this stage would."""
        if not self.noise_field:
            return self
        more = math.sqrt(share) if self.noise_field == "z" else share
        return replace(self, **{self.noise_field: getattr(self, self.noise_field) / more})  # type: ignore[type-var]

    def deviation(self, entries: int, clients: int) -> float:
        """The standard deviation of the noise that it leaves in each number of a sum over so many clients, whose
        messages have so many numbers; NaN: not known."""
        return math.nan

    def work(self, given: Work) -> Work:
        """A device's work with this stage: by default, one pass over every entry."""
        return passed(given)

    def nothing(self, update: Update) -> Update:
        """What somebody hands to the channel who has nothing to learn from; `update` is anybody's."""
        nothing: Update = {}
        for name, value in update.items():
            some = isinstance(value, Rows)
            nothing[name] = Rows(value.index[:0], value.value[:0], value.size) if some else torch.zeros_like(value)
        return nothing

    def admits(self, message: Update, n_items: int) -> bool:
        """Whether a device's half could have sent this message, whose kinds and shapes are right. A stage that reads
        messages says so for each before `read`: devices may send anything."""
        raise HomebodyError(f"{type(self).__name__} takes no messages from real devices.")

    def read(self, messages: Update, sums: Tree) -> None:
        """Add what these messages, stacked, say to the sums that `server` is given and may overwrite."""
        raise HomebodyError(f"{type(self).__name__} reads no messages.")

    def devices(self, update: Update, rng: Rng) -> Update:
        """`device` for many clients, stacked. It reads formulas (`homebody.core.Computed`) only where it needs them."""
        raise HomebodyError(f"{type(self).__name__} does not sample.")

    def before_noise(self, update: Update, rng: Rng) -> Update:
        """What noise is added to."""
        raise HomebodyError(f"{type(self).__name__} adds no noise on the device.")

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        """Sums of what `before_noise` gave, with the noise that so many devices add between them; for simulations."""
        raise HomebodyError(f"{type(self).__name__} adds no noise on the device.")


_PROMISES = {
    "keeps_sum": ("device",),
    "samples": ("device", "devices"),
    "noise_adds_up": ("device", "before_noise", "noise_of_many"),
}
"""The functions that each promise of a stage is about: a subclass that changes one of them loses the promise."""


@dataclass(frozen=True)
class Clip(Stage):
    """Scales an update down to a norm, so that one person can change a sum by so much and no more.

    A norm for each tensor bounds each on its own; the whole is bounded by their combined norm. Rows of the same index
    add up before they are measured. An update that is no longer finite is sent as zeros: the bound holds for it too.

    >>> Clip(1.0).device({"w": torch.tensor([3.0, 4.0])}, Rng.of(0))["w"].tolist()
    [0.599..., 0.799...]
    >>> Clip({"w": 3.0, "b": 4.0}).whole
    5.0
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

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.hidden:
            raise HomebodyError(f"A Clip cannot follow {facts.hidden}: clip first, then add noise.")
        known = min(self.whole, facts.norms.get(self.order, math.inf))
        return self, replace(facts, norms={**facts.norms, self.order: known}, clips=(*facts.clips, self))

    def work(self, given: Work) -> Work:
        return touched(given)

    def device(self, update: Update, rng: Rng) -> Update:
        values = {name: ops.coalesced(value) if isinstance(value, Rows) else value for name, value in update.items()}
        powers = {name: ops.power(values_of(value), self.order) for name, value in values.items()}
        if isinstance(self.norm, Mapping):
            for name in values:
                if name not in self.norm:
                    raise HomebodyError(
                        f"The clip names no norm for the update's '{name}'; it must bound every tensor."
                    )
            return {name: self._scaled(value, powers[name], self.norm[name]) for name, value in values.items()}
        power = torch.stack(list(powers.values())).sum(0)
        return {name: self._scaled(value, power, self.norm) for name, value in values.items()}

    def deviation(self, entries: int, clients: int) -> float:
        return 0.0

    def _scaled(self, value: Rows | Tensor, power: Tensor, bound: float) -> Rows | Tensor:
        factor = clip_factor(power, self.order, bound)
        if isinstance(value, Rows):
            return Rows(value.index, ops.scaled(value.value, factor), value.size)
        return ops.scaled(value, factor)


def clip_factor(power: Tensor, order: int, bound: float) -> Tensor:
    """What an update is multiplied by so that its norm is within the bound: 1, or less; 0 if it is not finite.

    power: the sum of its numbers' |x| or x², in 64 bits.
    """
    norm = power if order == 1 else power.sqrt()
    factor = torch.where(norm > bound * _SHRUNK, bound * _SHRUNK / norm, 1.0)
    return torch.where(torch.isfinite(norm), factor, 0.0)


class NoiseStage(Stage):
    """A stage that adds noise in every coordinate: a device works on whole tables, in whole numbers of 64 bits."""

    def work(self, given: Work) -> Work:
        return (touched if self.on_sum else passed)(given) + Work(bytes=given.bytes)


@dataclass(frozen=True)
class Gaussian(NoiseStage):
    """Noise that is added to the sum, of z × the ℓ2 sensitivity, in every coordinate.

    The server adds it, so it sees the sum without it: ε = ∞ against the server. The others see the noised sum, and do
    not learn who was in the cohort. Devices send whole numbers of the grid's steps; the noise is a normal variable,
    rounded to the grid.

    After a secure sum with a helper, the helper adds it: ε is finite against the server too, which knows who was in the
    cohort.

    >>> import homebody as hb
    >>> channel = hb.Channel(hb.Clip(1.0), hb.Gaussian(z=4))
    >>> channel, channel.facts.noise_on_sum
    (Channel(Clip(norm=1.0), Gaussian(z=4)), True)
    >>> round(hb.account.gaussian(4.0, rounds=2)["epsilon"].item(), 2)
    1.54
    """

    z: float
    relation: Relation = "replace-one"
    sensitivity: float | None = field(default=None, kw_only=True, repr=False)
    """ℓ2, under the relation; a channel takes it from its clip."""
    grid: Grid | None = field(default=None, kw_only=True, repr=False, compare=False)
    """What updates are rounded to; None where there is no noise."""
    helped: bool = field(default=False, kw_only=True, repr=False, compare=False)
    """Whether a helper adds it; a channel takes that from its secure sum."""
    added: bool = field(default=False, kw_only=True, repr=False, compare=False)
    """Whether the helper has added it already; see `Channel.noised_elsewhere`."""

    on_sum = True
    noise_field = "z"

    def __post_init__(self) -> None:
        check_number("z, the noise multiplier of Gaussian noise,", self.z, zero=True)
        check_known("relation", self.relation, get_args(Relation))

    @property
    def scale(self) -> float:
        """The noise's standard deviation."""
        return self.z * placed(self.sensitivity, "Gaussian noise")

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        bound = facts.bound(2, "Gaussian noise")
        known = _sensitivity(bound, self.relation)
        grid = Grid.fitted(self.z * known, bound, bits=_HELPED if facts.helped else _FINE) if self.z else None
        after = replace(facts, hidden="Gaussian noise", noise="gaussian", noise_on_sum=True, grid=grid)
        return replace(self, sensitivity=known, grid=grid, helped=facts.helped), after

    def device(self, update: Update, rng: Rng) -> Update:
        return on_grid(update, self.grid) if self.grid else update

    def deviation(self, entries: int, clients: int) -> float:
        return self.scale

    def server(self, total: Total, rng: Rng) -> Total:
        placed(self.sensitivity, "Gaussian noise")
        if self.grid is None:
            return total
        if self.added:
            return Total({name: self.grid.values(dense(value)) for name, value in total.sum.items()}, total.clients)
        return Total(noised(total.sum, self.grid, rng, gaussian), total.clients)

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if not self.z:
            return _everyone(NonPrivate("Gaussian noise with z = 0 is no noise"))
        relation, share = _counted(self.relation, cohort)
        charges = _noise_on_sum(GaussianRelease(self.z * share, relation, sampling(cohort)))
        if not self.helped:
            return charges
        # The server picks the cohort, so being drawn hides nobody from it.
        known = HelpedRelease(self.z * share, relation)
        return [replace(charge, event=known) if charge.observer == "server" else charge for charge in charges]


@dataclass(frozen=True)
class Laplace(NoiseStage):
    """Discrete Laplace noise of scale b in every coordinate, against an ℓ1 clip.

    On the device nobody sees the update without it, so it holds against the server as well, which learns who took
    part: nothing is amplified there. On the sum it is like Gaussian noise. `unbounded` adds it to an upload that
    nothing bounds, as PFedRec's appendix does: that certifies nothing, and is charged as not private.

    >>> import homebody as hb
    >>> channel = hb.Channel(hb.Clip(1.0, order=1), hb.Laplace(b=4.0))
    >>> channel.facts.hidden, channel.facts.norms
    ('Laplace noise', {1: 1.0})
    >>> hb.account.laplace(2.0, rounds=2)["epsilon"].item()
    1.0
    """

    b: float
    where: Literal["device", "sum"] = "device"
    relation: Relation = "replace-one"
    unbounded: bool = False
    sensitivity: float | None = field(default=None, kw_only=True, repr=False)
    """ℓ1, under the relation; a channel takes it from its clip."""
    grid: Grid | None = field(default=None, kw_only=True, repr=False, compare=False)
    """What updates are rounded to; None where there is no noise, or nothing bounds what it is added to."""

    dense = True
    noise_adds_up = True
    noise_field = "b"

    def __post_init__(self) -> None:
        check_number("b, the scale of Laplace noise,", self.b, zero=True)
        check_known("place for Laplace noise", self.where, ("device", "sum"))
        check_known("relation", self.relation, get_args(Relation))
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

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.helped:
            raise HomebodyError("The helper of a secure sum adds Gaussian noise: use gaussian instead of laplace.")
        after = replace(facts, hidden="Laplace noise", noise="laplace", noise_on_sum=self.on_sum)
        if self.unbounded:
            if facts.norms:
                raise HomebodyError("The update is clipped, so Laplace noise is bounded here: leave out unbounded.")
            return self, after
        bound = facts.bound(1, "Laplace noise")
        grid = Grid.fitted(self.b, bound, coarsest=COARSEST) if self.b else None
        known = _sensitivity(bound, self.relation)
        return replace(self, sensitivity=known, grid=grid), replace(after, grid=grid if self.on_sum else None)

    def device(self, update: Update, rng: Rng) -> Update:
        whole = self.before_noise(update, rng)
        return whole if self.on_sum else self._noised(whole, rng)

    def server(self, total: Total, rng: Rng) -> Total:
        return Total(self._noised(total.sum, rng), total.clients) if self.on_sum else total

    def before_noise(self, update: Update, rng: Rng) -> Update:
        return on_grid(update, self.grid) if self.grid else update

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
        event = LaplaceRelease(share * self.b / placed(self.sensitivity, "Laplace noise"), relation, sampling(cohort))
        return _noise_on_sum(event) if self.on_sum else noise_on_device(event)

    def _noised(self, tree: Tree, rng: Rng, devices: int = 1) -> Tree:
        if self.unbounded:
            return _blurred(tree, self.b, rng, devices)
        placed(self.sensitivity, "Laplace noise")
        if self.grid is None:
            return {name: real(dense(value)) for name, value in tree.items()}
        if devices == 1:
            return noised(tree, self.grid, rng, laplace)
        scale = 2.0**self.grid.depth

        def draw(stream: Rng, depth: int, *shape: int) -> Tensor:
            return (scale * stream.laplace_sum(devices, *shape)).round().to(torch.int64)

        return noised(tree, self.grid, rng, draw)


@dataclass(frozen=True)
class VectorLaplace(NoiseStage):
    """Discrete Laplace noise on the device after an ℓ2 clip, its scale set by ε and by the number of entries n.

    An update of ℓ2 norm θ has an ℓ1 norm of up to θ√n, so two of them are up to 2θ√n apart: `certified` noise has the
    scale 2θ√n / ε. `published` noise has 2θ / ε, as DP-FedRec prints it (Liu et al., 2022); n is not part of a charge,
    so what it costs, ε√n, is charged as not private.
    """

    epsilon: float
    guarantee: Literal["certified", "published"] = "certified"
    norm: float | None = field(default=None, kw_only=True, repr=False)
    """θ; a channel takes it from its clip."""

    dense = True
    noise_adds_up = True

    def __post_init__(self) -> None:
        check_number("ε of Laplace noise", self.epsilon)
        check_known("guarantee", self.guarantee, ("certified", "published"))

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        norm = facts.bound(2, "Laplace noise")
        return replace(self, norm=norm), replace(facts, hidden="Laplace noise", noise="laplace")

    def scale(self, entries: int) -> float:
        """The scale of the noise in each of so many entries."""
        root = math.sqrt(entries) if self.guarantee == "certified" else 1.0
        return 2 * placed(self.norm, "Laplace noise") * root / self.epsilon

    def _laplace(self, tree: Tree) -> Laplace:
        """Plain Laplace noise for an update of this size."""
        entries = sum(dense(value).numel() for value in tree.values())
        norm = placed(self.norm, "Laplace noise")
        bound, scale = norm * math.sqrt(entries), self.scale(entries)
        return Laplace(scale, sensitivity=2 * bound, grid=Grid.fitted(scale, bound, coarsest=COARSEST))

    def device(self, update: Update, rng: Rng) -> Update:
        return self._laplace(update).device(update, rng)

    def before_noise(self, update: Update, rng: Rng) -> Update:
        return self._laplace(update).before_noise(update, rng)

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        return self._laplace(sums).noise_of_many(sums, devices, rng)

    def deviation(self, entries: int, clients: int) -> float:
        return math.sqrt(2 * clients) * self.scale(entries)

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if self.guarantee == "published":
            reason = "Laplace noise of scale 2θ/ε stands against an ℓ1 sensitivity of 2θ√n, for n parameters"
            return _everyone(NonPrivate(reason))
        return noise_on_device(LaplaceRelease(1 / self.epsilon, "replace-one", sampling(cohort)))


def passed(given: Work) -> Work:
    """A device's work if every entry of the update is noised, or changed in another way."""
    entries = given.bytes // 4
    return given + Work(memory=64 * entries, operations=2_000 * entries + 50 * CALL)


def touched(given: Work) -> Work:
    """A device's work if every entry of the update is scaled, rounded or added up, and no noise is drawn."""
    entries = given.bytes // 4
    return given + Work(memory=32 * entries, operations=300 * entries + 50 * CALL)


def sampling(cohort: Cohort) -> Sampling:
    """How the cohort was drawn, for those who do not learn who is in it."""
    return Sampling("fixed", cohort.size, cohort.population) if cohort.sampling == "fixed" else Sampling()


def _counted(relation: Relation, cohort: Cohort) -> tuple[Relation, float]:
    """The relation that noise on a sum is accounted under, and by how much its multiplier shrinks there.

    Where everyone takes part and the sum is divided by how many they are, a departure changes that too: the mean moves
    by as much as by a replacement. So the number of people is taken for public, and the noise is measured against a
    replacement, which moves the sum twice as far.
    """
    moves = relation == "add-remove" and cohort.sampling == "all" and cohort.divided
    return ("replace-one", 0.5) if moves else (relation, 1.0)


def _everyone(event: Event) -> list[Charge]:
    return [Charge(observer, "user", event) for observer in OBSERVERS]


def _noise_on_sum(event: Event) -> list[Charge]:
    unhidden = NonPrivate("the server adds the noise itself: it sees the sum without it")
    return [Charge(observer, "user", unhidden if observer == "server" else event) for observer in OBSERVERS]


def noise_on_device(event: GaussianRelease | LaplaceRelease) -> list[Charge]:
    """What noise on the device tells each observer. The server picks the cohort: being drawn hides nobody from it."""
    known = replace(event, sampling=Sampling())
    return [Charge(who, "user", known if who == "server" else event) for who in OBSERVERS]


def _sensitivity(norm: float, relation: Relation) -> float:
    """How far one person moves a sum of updates of this norm: with or without them, or another in their place."""
    return norm if relation == "add-remove" else 2 * norm


def placed(sensitivity: float | None, noise: str) -> float:
    if sensitivity is None:
        raise HomebodyError(f"{noise} takes its measure from the clip of its channel: put it into a Channel.")
    return sensitivity


def dense(value: Rows | Tensor) -> Tensor:
    return value.dense() if isinstance(value, Rows) else value


def values_of(value: Rows | Tensor) -> Tensor:
    return value.value if isinstance(value, Rows) else value


def real(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def summable(value: Rows | Tensor) -> Tensor:
    """A tensor, or the whole table that rows were sent of, in a type that can be summed."""
    numbers = values_of(value)
    numbers = numbers.to(torch.int64) if numbers.dtype in STEPS else real(numbers)
    return Rows(value.index, numbers, value.size).dense() if isinstance(value, Rows) else numbers


def mapped(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """A tree with its numbers changed; `Rows` keep their indices."""
    return {
        name: Rows(value.index, change(value.value), value.size) if isinstance(value, Rows) else change(value)
        for name, value in tree.items()
    }


def on_grid(update: Update, grid: Grid) -> Update:
    """A clipped update in whole numbers of the grid's steps, written over what the clip gave."""
    return mapped(update, partial(grid.whole, over=True))


def noised(tree: Tree, grid: Grid, rng: Rng, draw: Callable[..., Tensor]) -> Tree:
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
        whole, stream = real(dense(value)), rng.fold(name)
        noise = stream.laplace(*whole.shape) if devices == 1 else stream.laplace_sum(devices, *whole.shape)
        out[name] = whole + (scale * noise).to(whole.dtype)
    return out


def check_number(what: str, value: object, *, zero: bool = False) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not right or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        raise HomebodyError(f"{what} must be a number {'from' if zero else 'above'} 0, not {value!r}.")


def check_known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise HomebodyError(f"There is no {what} '{value}': {' or '.join(known)}.")

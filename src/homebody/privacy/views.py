"""Stages for people whose data lies in several apps of one device, the *views*: none may learn what another holds.

A device with views computes an update of parts "VIEW/item/…", each view's gradient of what all of them share, and of
others such as "VIEW/user/…". `Views` bounds each view's shared part and joins them as "item/…"; `ViewNoise` adds noise
to that, so that a view which subtracts its own part from the aggregate learns little of the others
(`local_secure_aggregate` of FL-MV-DSSM). Both run in the trusted part of the device: no app is believed to have
clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, get_args

import torch
from torch import Tensor

from homebody import ops
from homebody.core import Cohort, Rows, Tree, Update
from homebody.errors import HomebodyError
from homebody.privacy import stages
from homebody.privacy.events import Charge, GaussianRelease, NonPrivate, Relation
from homebody.privacy.grid import Grid, gaussian
from homebody.privacy.ring import entries_of
from homebody.privacy.stages import Facts, NoiseStage, Stage, check_number, clip_factor, dense, sampling
from homebody.rng import Rng

__all__ = ["ToView", "ViewNoise", "Views", "split_views"]

SHARED = "item"
"""What the views have in common: names of its parts begin with this, behind the view's name before they are joined."""
SLACK = 2.0**-12
"""By so much less than the clip's norm a view's part is bounded. Adding parts up in 32 bits and rounding the sum to a
grid moves it by less than that, if it has no more numbers than `_check_size` allows: so the norm bounds what a view
changes on the grid too."""


@dataclass(frozen=True)
class Views(Stage):
    """Scales each view's shared part down to an ℓ2 norm, and gives the mean over the views as "item/…".

    sample: how many views, drawn in each round, take part; 0: all. The mean divides by the planned number of views,
    whoever answers. Drawing views earns no privacy: a view knows whether the others were drawn from what it is sent.

    >>> parts = {"a/item/w": torch.tensor([3.0, 4.0]), "b/item/w": torch.tensor([0.0, 0.5]), "b/user/w": torch.ones(1)}
    >>> joined = Views(clip=1.0).device(parts, Rng.of(0))
    >>> {name: [round(number, 2) for number in value.tolist()] for name, value in joined.items()}
    {'b/user/w': [1.0], 'item/w': [0.3, 0.65]}
    """

    clip: float
    sample: int = 0
    count: int | None = field(default=None, kw_only=True, repr=False)
    """How many views there are, if the method names them."""

    def __post_init__(self) -> None:
        check_number("The norm that a view's part is clipped to", self.clip)
        if type(self.sample) is not int or self.sample < 0:
            raise HomebodyError(f"The views drawn in a round are a whole number, 0 for all, not {self.sample!r}.")
        if self.count is not None and self.sample > self.count:
            raise HomebodyError(f"{self.sample} views cannot be drawn from {self.count}: take fewer, or 0 for all.")

    @property
    def among(self) -> int | None:
        """|B|, by which the sum is divided; None: not known before an update is seen."""
        return self.sample or self.count

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.hidden:
            raise HomebodyError(f"Views cannot follow {facts.hidden}: they bound each view's part before any noise.")
        if facts.views is not None:
            raise HomebodyError("A second Views has nothing left to join: leave one out.")
        # What else leaves the device, such as user towers, is not bounded here.
        return self, replace(facts, norms={}, views=self)

    def device(self, update: Update, rng: Rng) -> Update:
        kept, views = split_views(update)
        among = self.sample or self.count or max(1, len(views))
        drawn = _drawn(rng, len(views), self.sample)
        parts: dict[str, list[Rows | Tensor]] = {}
        factors = []
        for place, raw in enumerate(views.values()):
            tables = {name: ops.coalesced(value) if isinstance(value, Rows) else value for name, value in raw.items()}
            power = torch.stack([ops.power(stages.values_of(value), 2) for value in tables.values()]).sum(0)
            factors.append(clip_factor(power, 2, self.clip * (1 - SLACK)) * (drawn[place] / among))
            for name, value in tables.items():
                parts.setdefault(name, []).append(value)
        return {**kept, **{f"{SHARED}/{name}": _sum(tables, factors) for name, tables in parts.items()}}

    def deviation(self, entries: int, clients: int) -> float:
        return 0.0

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        why = "a view that knows its own part reads the others' from the mean, which carries no noise"
        return [Charge("views", "user", NonPrivate(why))]


@dataclass(frozen=True)
class ViewNoise(NoiseStage):
    """Gaussian noise on "item/…" on the device: z × what one view changes in the mean, which is clip / |B|.

    It is drawn exactly, on a grid. A view sees the noised aggregate alone, so it is charged for each round it is in;
    drawing views, or people, hides nothing from the views of a person who takes part.

    Of what leaves the device it covers "item/…" and nothing else. Whether there is anything else, only the method
    knows: `whole` is what the server, other clients and the public are charged if there is not.
    """

    z: float
    relation: Relation = "add-remove"
    clip: float | None = field(default=None, kw_only=True, repr=False)
    """The norm of a view's part; a channel takes it from `Views`."""
    among: int | None = field(default=None, kw_only=True, repr=False)
    """|B|, from `Views` too."""
    grid: Grid | None = field(default=None, kw_only=True, repr=False, compare=False)
    """What the mean is rounded to; None where there is no noise, or |B| is not known."""

    dense = True
    noise_adds_up = True
    noise_field = "z"

    def __post_init__(self) -> None:
        check_number("z, the noise multiplier of view noise,", self.z, zero=True)
        stages.check_known("relation", self.relation, get_args(Relation))

    @property
    def scale(self) -> float:
        """The noise's standard deviation in the mean over the views of one person."""
        return self.z * self._clip / self._among

    @property
    def _clip(self) -> float:
        if self.clip is None:
            raise HomebodyError("View noise takes its measure from Views: put both into a Channel.")
        return self.clip

    @property
    def _among(self) -> int:
        if self.among is None:
            raise HomebodyError(
                "View noise depends on how many views there are: name them, as in --set views=profile,taste."
            )
        return self.among

    def place(self, facts: Facts) -> tuple[Self, Facts]:
        if facts.views is None or facts.unknown:
            raise HomebodyError(
                "View noise needs a bound on what one view can change: put views right before it, as in views:clip=0.5."
            )
        if facts.hidden or facts.norms:
            raise HomebodyError("View noise comes right after views: leave out what stands between them.")
        views = facts.views
        known = replace(self, clip=views.clip, among=views.among, grid=None)
        if self.z and known.among:
            known = replace(known, grid=Grid.fitted(known.scale, views.clip))
        if not self.z:
            return known, replace(facts, view_noise=None)
        return known, replace(facts, hidden="view noise", noise="gaussian", noise_on_sum=False, view_noise=known)

    def before_noise(self, update: Update, rng: Rng) -> Update:
        return {**update, **stages.on_grid(_covered(update), self._grid)} if self.z else update

    def device(self, update: Update, rng: Rng) -> Update:
        if not self.z:
            return update
        _check_size(entries_of(_covered(update)), self._grid, self._clip / self._among)
        return self._noised(update, rng, gaussian)

    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        """These sums of means, before their noise, with the noise that so many devices add between them.

        A sum of normal variables is one; of the sum of rounded ones it differs by a relative 2⁻⁴⁰ and less in its
        variance, and it serves simulations alone.
        """
        if not self.z:
            return {name: stages.real(dense(value)) for name, value in sums.items()}

        def draw(stream: Rng, depth: int, *shape: int) -> Tensor:
            if devices == 1:
                return gaussian(stream, depth, *shape)
            return (math.sqrt(devices) * 2.0**depth * stream.normal_doubles(*shape)).round().to(torch.int64)

        return self._noised(sums, rng, draw)

    def deviation(self, entries: int, clients: int) -> float:
        return self.scale * math.sqrt(clients) if self.z else 0.0

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if not self.z:
            return [Charge("views", "user", NonPrivate("view noise with z = 0 is no noise"))]
        times = self.z if self.relation == "add-remove" else self.z / 2
        return [Charge("views", "user", GaussianRelease(times, self.relation))]

    def whole(self, cohort: Cohort) -> list[Charge]:
        """What one round tells all observers, if a message holds "item/…" and nothing else.

        A person in another's place moves the mean over their views by up to twice the clip. The server knows who takes
        part; the others do not.
        """
        views = list(self.charges(cohort))
        if not self.z:
            return views
        event = GaussianRelease(self.z / (2 * self._among), "replace-one", sampling(cohort))
        return [*stages.noise_on_device(event), *views]

    @property
    def _grid(self) -> Grid:
        if self.grid is None:
            _ = self._clip, self._among
            raise HomebodyError("View noise must be put into a Channel, after Views.")
        return self.grid

    def _noised(self, tree: Tree, rng: Rng, draw: Callable[..., Tensor]) -> Tree:
        noisy = stages.noised(_covered(tree), self._grid, rng, draw)
        return {name: noisy[name] if name in noisy else stages.real(dense(value)) for name, value in tree.items()}


@dataclass(frozen=True)
class ToView:
    """A release of what a person's views predict to one of them, such as an app that shows it.

    Each view's vector is clipped, and noise of z × the clip is added to their sum: what one view changes in it.

    >>> ToView.parse("taste:clip=0.05,z=4", clip=0.5, z=None)
    ToView(view='taste', clip=0.05, z=4.0)
    """

    view: str
    clip: float
    z: float

    def __post_init__(self) -> None:
        check_number("The norm that a view's prediction is clipped to", self.clip)
        check_number("z, the noise multiplier of a prediction that leaves for a view,", self.z)

    @classmethod
    def parse(cls, text: str, *, clip: float, z: float | None) -> Self:
        """From text such as taste or taste:clip=0.05,z=4; clip, z: what holds if it does not say."""
        view, _, rest = text.partition(":")
        given: dict[str, float] = {"clip": clip} if z is None else {"clip": clip, "z": z}
        for part in rest.split(",") if rest else []:
            key, _, value = (word.strip() for word in part.partition("="))
            try:
                given |= {key: float(value)}
            except ValueError:
                key = ""
            if key not in ("clip", "z"):
                raise HomebodyError(f"A prediction leaves for a view as NAME:clip=0.05,z=4, not '{text}'.")
        if "z" not in given:
            raise HomebodyError(
                f"Without noise {view} would read what the other views know: say how much, as in {view}:z=4."
            )
        return cls(view, **given)

    def charges(self) -> list[Charge]:
        """What one such release tells."""
        return [Charge("views", "user", GaussianRelease(self.z, "add-remove"))]

    def sum(self, vectors: Tensor, rng: Rng) -> Tensor:
        """The noised sum of the views' vectors (views, N), exactly on a grid.

        Each vector is rounded to the grid by itself, so that the clip bounds what it changes there too.
        """
        wide = vectors.double()
        factor = clip_factor((wide * wide).sum(1), 2, self.clip)
        bounded = torch.where(factor[:, None] > 0, wide * factor[:, None], 0.0)
        grid = Grid.fitted(self.z * self.clip, self.clip)
        steps = grid.whole(bounded).to(torch.int64).sum(0)
        return grid.values(steps + gaussian(rng, grid.depth, *steps.shape))


def split_views(update: Update) -> tuple[Update, dict[str, Update]]:
    """An update's other parts, and each view's shared part without its prefix.

    >>> split_views({"a/item/w": 1, "a/user/w": 2, "b/item/w": 3})
    ({'a/user/w': 2}, {'a': {'w': 1}, 'b': {'w': 3}})
    """
    kept: Update = {}
    views: dict[str, Update] = {}
    for name, value in update.items():
        view, _, rest = name.partition(f"/{SHARED}/")
        if rest and "/" not in view:
            views.setdefault(view, {})[rest] = value
        else:
            kept[name] = value
    return kept, views


def _covered(tree: Tree) -> Tree:
    """The parts of a message that `Views` joined."""
    return {name: value for name, value in tree.items() if name.startswith(f"{SHARED}/")}


def _drawn(rng: Rng, views: int, sample: int) -> Tensor:
    """1 for each view that takes part, 0 for the others."""
    if not sample or sample >= views:
        return torch.ones(views, device=rng.key.device)
    return (rng.fold("views").uniform(views).argsort().argsort() < sample).float()


def _check_size(numbers: int, grid: Grid, moved: float) -> None:
    """Refuse tables so large that rounding them could exceed the slack in what one view moves."""
    if math.sqrt(numbers) * grid.step > SLACK / 2 * moved:
        raise HomebodyError(
            f"View noise on {numbers:,} numbers cannot be drawn exactly on its grid: take fewer features or views."
        )


def _sum(parts: Sequence[Rows | Tensor], factors: Sequence[Tensor]) -> Rows | Tensor:
    """The sum of the views' parts, each times its factor. All views work on the same samples: most often their rows are
    the same."""
    rows = [part for part in parts if isinstance(part, Rows)]
    if len(rows) == len(parts):
        return ops.weighted_rows(rows, factors)
    return torch.stack([ops.scaled(dense(part), by) for part, by in zip(parts, factors, strict=True)]).sum(0)

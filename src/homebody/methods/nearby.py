"""Nearby pairs: a private recommender of our own, from two noised sums and nothing else.

People who take items one after another say how items belong together. Each device sends two messages in all, each
bounded to length 1 and summed under noise; everything that follows is computed from the two noised sums and from what
is public, and costs no more privacy.

| step                                            | here                                                           |
|-------------------------------------------------|----------------------------------------------------------------|
| 1. an item counts 1 / √(number of one's items)  | the phase `popularity`: `NearbyPopularity`                     |
| p, what the noised sum says of popularity       | `shared["popularity"]`, of mean 1 over the kept items          |
| the `items` most popular ones are kept          | `shared["place"]`: the place among them, or -1                 |
| 2. a pair of items at most `window` apart       | the phase `pairs`: `Nearby.client`                             |
| counts decay^(distance - 1) × (p_i p_j)^-damping |                                                               |
| all of a person's pairs have length 1           |                                                                |
| 3. M, the sum of pairs, with noise              | `total.sum["pairs"]`: a triangle, or a sketch of it            |
| X, what M says of how items belong together     | `homebody.models.pairs.posterior`; as vectors: `shared["item"]` |
| 4. one's own recent items, the last one first   | `score`, on the device, at no cost                             |

The popularity has `share` of the budget: its noise is 1/√share times that of the channel, that of the pairs
1/√(1 - share) times, and both together cost what one release with the channel's noise would.

A triangle of 3,706 items is 27 MB. With `buckets` a device sends a count sketch in its place: each pair is added to
one of so many numbers, with a random sign. A hash of the pair says which and with what sign. The sketch is what the
channel clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import (
    About,
    Batch,
    Catalogue,
    Data,
    Phase,
    Rows,
    Stateless,
    Total,
    Tree,
    Update,
    Work,
    param,
)
from homebody.errors import HomebodyError
from homebody.models import pairs
from homebody.privacy import Channel, Clip, Gaussian, SecureSum
from homebody.rng import Rng
from homebody.settings import Range, common_params

__all__ = ["Nearby", "NearbyPopularity", "PublicFeatures"]

USUAL = 1.0
"""The mean popularity: items under it weigh as if they had it."""
CHANNEL = Channel(Clip(1.0), SecureSum(helper=True), Gaussian(z=0.6533, relation="add-remove"))
"""ε = 8 at δ = 1e-6 for what both releases tell together."""


def under_one(name: str, value: float) -> None:
    """Refuse a share that leaves nothing for the pairs."""
    if value == 1.0:
        raise HomebodyError(f"{name} must be under 1, or nothing of the budget is left for pairs: not {value:g}.")


@dataclass(frozen=True)
class _ByRecentItems(Stateless):
    """What all of them share: vectors of items, and a person who is the sum of their recent items' vectors."""

    uplink: Channel = CHANNEL
    features: bool = param(True, "whether what is public of items says which belong together")
    items: int = param(4000, "items whose pairs are counted: the most popular ones", low=2)
    rank: int = param(100, "numbers of an item's vector", low=1)
    damping: float = param(0.3, "by how much pairs of popular items weigh less", low=0, high=1, search=Range(0.0, 0.5))
    recency: float = param(1.1, "the n-th last item of one's own weighs n to minus this power", low=0, high=10)
    trust: float = param(0.33, "what each item of one's own counts for against popularity", low=0)

    uses: ClassVar[tuple[str, ...]] = ("item features", "texts")

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        n = catalogue.n_items
        return {
            "popularity": torch.zeros(n),
            "place": torch.full((n,), -1),
            "item": torch.zeros(n, self.rank + 1),
        }

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        numbers = catalogue.n_items * (self.rank + 4)
        held, operations = 3 * numbers + longest * (2 * self.rank + 40), 8 * numbers + longest * (4 * self.rank + 400)
        return Work.of(held, operations, calls=300, sent=max(catalogue.n_items, 2 * longest))

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": data.items, "valid": data.valid}

    def independent(self, shared: Tree) -> tuple[Tensor, Tensor]:
        """How often each item is in a pair, up to a factor, as its popularity alone says; and the kept items."""
        place = shared["place"]
        popularity = shared["popularity"]
        return popularity * popularity.clamp_min(USUAL) ** -self.damping, torch.nonzero(place >= 0).flatten()

    def alike(self, catalogue: Catalogue | None, kept: Tensor) -> Tensor | None:
        return pairs.likeness(catalogue, kept) if self.features and catalogue is not None else None

    def placed(self, shared: Tree, kept: Tensor, fitted: pairs.Together, g: Tensor) -> Tensor:
        """The vectors of all items: the last number is what popularity says, which all items have."""
        item = torch.zeros_like(shared["item"])
        item[kept, : fitted.vectors.shape[1]] = fitted.vectors
        item[:, -1] = g * fitted.independent**0.5
        return item

    def person(self, shared: Tree, data: Data) -> Tensor:
        """Where somebody is among the items' vectors, by their recent items; zeros if they have none."""
        mine, later = data.items, data.valid.sum() - data.valid.cumsum(0)
        recent = data.valid * (1.0 + later) ** -self.recency
        vector = (recent / shared["popularity"][mine].clamp_min(USUAL).sqrt()) @ shared["item"][mine]
        # So many items of equal weight would say as much; the more there are, the less popularity has to say.
        evidence = recent.sum().square() / recent.square().sum().clamp_min(1e-20)
        return torch.cat([self.trust * evidence * vector[:-1], vector[-1:]])

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        scores = shared["item"][items] @ self.person(shared, data)
        return torch.where(data.valid.any(), scores, shared["popularity"][items])


@dataclass(frozen=True)
class NearbyPopularity(_ByRecentItems):
    """The first phase, and a control: how popular items are, from one noised sum, and what is public of them.

    >>> import homebody as hb
    >>> model = hb.fit(NearbyPopularity(), "synthetic:users=50,items=30,mean=6", quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    about: ClassVar[About] = About(
        title="a control: popularity from one noised sum, and public features",
        rounds=1,
        draws_negatives=False,
        divides=False,
    )

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        items, valid = batch["items"], batch["valid"]
        each = valid / valid.sum().clamp_min(1).sqrt()
        return {"popularity": Rows(torch.where(valid, items, -1), each, len(shared["popularity"]))}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        count = total.sum["popularity"]
        popularity = pairs.positive(count, self.uplink.deviation(len(count), total.clients))
        best = popularity.topk(min(self.items, len(count))).indices.sort().values
        popularity = popularity / popularity[best].mean()
        place = torch.full_like(shared["place"], -1)
        place[best] = torch.arange(len(best), device=place.device)
        known = {**shared, "popularity": popularity, "place": place}
        return {**known, "item": self.vectors(known, total.catalogue)}, state

    def vectors(self, shared: Tree, catalogue: Catalogue | None) -> Tensor:
        """Of all items, from their popularity and what is public of them."""
        g, kept = self.independent(shared)
        return self.placed(shared, kept, pairs.prior(g[kept], self.alike(catalogue, kept), self.rank), g)


@dataclass(frozen=True)
class PublicFeatures(NearbyPopularity):
    """A control: nothing is sent; items that are like a person's own by what is public of them.

    >>> PublicFeatures().phases[0].rounds, PublicFeatures.about.sends
    (None, False)
    """

    uplink: Channel = Channel()

    about: ClassVar[About] = replace(
        NearbyPopularity.about, title="a control: public features of items alone; nothing is sent", sends=False
    )
    needs: ClassVar[tuple[str, ...]] = ("item features",)

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        return {}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        nothing = torch.ones_like(shared["popularity"])
        return super().server(shared, state, replace(total, sum={"popularity": nothing}))


@dataclass(frozen=True)
class Nearby(_ByRecentItems):
    """Two noised sums, of items and of pairs that people take near one another; a device ranks by its recent items.

    >>> import homebody as hb
    >>> model = hb.fit(Nearby(rank=4), "synthetic:users=50,items=30,mean=6", quiet=True)
    >>> model.recommend(user=7, k=3).height, round(model.epsilon["server"], 2)
    (3, 7.99)
    """

    window: int = param(40, "how many places apart the items of a pair may be", low=1, search=(10, 20, 40, 80))
    decay: float = param(0.95, "what a pair weighs for each further place", low=0, high=1, search=(0.9, 0.95, 1.0))
    share: float = param(0.1, "the popularity's share of the budget", low=1e-6, high=1, check=under_one)
    buckets: int = param(0, "numbers of the sketch that a device sends of its pairs; 0: all pairs", low=0)

    about: ClassVar[About] = About(
        title="pairs of items that people take near one another, in two noised sums; devices rank by their own items",
        rounds=1,
        draws_negatives=False,
        divides=False,
    )

    @property
    def phases(self) -> Sequence[Phase]:
        common = {**common_params(self, NearbyPopularity), "features": False}
        popularity = NearbyPopularity(uplink=self.uplink.with_share(self.share), **common)
        second = replace(self, uplink=self.uplink.with_share(1.0 - self.share))
        return (Phase("popularity", popularity, 1, evaluated=False), Phase("pairs", second, 1))

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        each = min(longest, self.window) * longest
        sent = max(pairs.entries(min(self.items, catalogue.n_items), self.buckets), 2 * each)
        return super().work(catalogue, longest) + Work.of(40 * each, 1_000 * each, calls=200, sent=sent)

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        items, valid, place = batch["items"], batch["valid"], shared["place"]
        damped = shared["popularity"].clamp_min(USUAL) ** -self.damping
        longest, kept = len(items), min(self.items, len(place))
        distance = torch.arange(1, max(1, min(self.window, longest - 1)) + 1, device=items.device)[:, None]
        first = torch.arange(longest, device=items.device)
        later = (first + distance).clamp_max(longest - 1)
        one, other = place[items].expand(len(distance), -1), place[items[later]]
        real = (first + distance < longest) & valid & valid[later] & (one != other)
        real &= (one.minimum(other) >= 0) & (one.maximum(other) < kept)
        weight = real * self.decay ** (distance - 1) * damped[items] * damped[items[later]]
        weight = weight / (weight * weight).sum().sqrt().clamp_min(1e-20)
        slot, sign = pairs.slots(one.minimum(other), one.maximum(other), kept, self.buckets)
        size = pairs.entries(kept, self.buckets)
        return {"pairs": Rows(torch.where(real, slot, -1).flatten(), (sign * weight).flatten(), size)}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        g, kept = self.independent(shared)
        told = total.sum["pairs"]
        noise = self.uplink.deviation(len(told), total.clients)
        alike = self.alike(total.catalogue, kept)
        among = min(self.items, len(shared["place"]))  # more than were kept, if items came since
        vectors = pairs.posterior(told, noise, g[kept], alike, self.rank, self.buckets, among)
        return {**shared, "item": self.placed(shared, kept, vectors, g)}, state

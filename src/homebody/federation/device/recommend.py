"""Recommendations on a device, from what it stores: no network is needed."""

from __future__ import annotations

import json
from typing import NamedTuple

import torch

from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.home import Home
from homebody.federation.device.household import Household, carried
from homebody.federation.device.people import Person
from homebody.federation.task import acting
from homebody.rng import Rng

__all__ = ["RankedItem", "recommend"]


class RankedItem(NamedTuple):
    """One item for one person."""

    item: str
    name: str
    score: float


def recommend(home: Home, person: Person, k: int = 10) -> list[RankedItem]:
    """A person's best new items, by the model that the device holds."""
    model = home.models.ranking()
    content = None if model is None else home.models.shared(model.digest)
    if model is None or content is None:
        raise HomebodyError("This device has no model yet: it gets one when it takes part in a round.")
    described = json.loads(model.description)
    digest = described.get("features", "")
    if digest and home.items.schema(digest) is None:
        raise HomebodyError(
            "This device lacks the features that its model was trained with: it gets them with the next round."
        )
    phase = model.release.rpartition("/")[0]
    method = acting(described, phase)
    household = Household.of(home, [person], {**described, "measures": False}, len(home.items))
    household.begin(method, Rng(torch.tensor(described["clients_key"])))
    fresh = method.init_shared(household.catalogue, Rng.of(described["seed"]))
    shared = carried(wire.decode_tree(content), fresh)  # items that came after the model have fresh rows
    state = home.models.state(person.slot, described["run"], model.step + 1)
    if state is not None and household.split.lengths[0]:
        household.restore(home, 0, state, phase, shared)
    population = household.split.population
    best = household.recommend(method, shared, 0, k)
    return [RankedItem(population.item_id(item), population.item_name(item), score) for item, score in best]

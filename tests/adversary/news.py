"""People with impressions, whose items have titles."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import polars as pl

from homebody.core import Tree
from homebody.data.partitions import split
from homebody.data.population import Features
from homebody.methods.fedrec import FedRec
from homebody.methods.privaterec import PrivateRec
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import impressed

SMALL = {"d": 8, "heads": 2, "words": "random"}


@cache
def _titled() -> Simulator:
    people = impressed().population
    draw = np.random.default_rng(3)
    titles = [" ".join(f"word{number}" for number in draw.integers(400, size=6)) for _ in range(people.n_items)]
    items = Features(pl.DataFrame({"title": titles}), {"title": "sequence"})
    told = replace(people, item_features=items)
    return Simulator(split(told, "impressions-people:test=0.2,valid=0.3", seed=5))


def started(method: FedRec, seed: int = 1) -> tuple[Simulator, Tree]:
    """A simulator of 149 clients that learn from an impression, and a method's first parameters."""
    simulator = _titled()
    simulator.begin(method, Rng.of(0))
    return simulator, method.init_shared(simulator.catalogue, Rng.of(seed))


def certified(**settings: object) -> PrivateRec:
    return PrivateRec(**{**SMALL, "encoder": "id", **settings})  # type: ignore[arg-type]

"""Real devices with real homes, in one process and without a network: the runtime that asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from homebody.data import Population
from homebody.recipe import Recipe

N_ITEMS = 30


def people(lengths: tuple[int, ...] = (6, 9, 4, 12, 5, 7, 8), items: int = N_ITEMS, seed: int = 3) -> Population:
    """A few people with times, none of whom has an item twice."""
    rng = np.random.default_rng(seed)
    own = [rng.choice(items, length, replace=False) for length in lengths]
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    times = np.concatenate([np.arange(length) + 100 * user for user, length in enumerate(lengths)]).astype(np.int64)
    return Population("seven", indptr, np.concatenate(own).astype(np.int32), items, times)


def near(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)


METHODS = {
    "fedmf": {"factors": 4},
    "fedmf dual": {"factors": 4, "dual": True},
    "pfedrec": {"factors": 4},
    "pfedrec deep": {"factors": 4, "hidden": "3"},
    "fedials": {"factors": 4},
    "fedrecon": {"factors": 4},
    "fedncf": {"factors": 4, "hidden": "4,2"},
    "fedncf dual": {"factors": 4, "hidden": "4,2", "dual": True},
}


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("method", METHODS)
def test_devices_train_what_a_simulation_trains(town: Callable[..., Any], method: str, cohort: int | None) -> None:
    plan = Recipe(method.split()[0], "devices", METHODS[method], rounds=3, seed=5, cohort=cohort, evaluate_every=0)
    one = town(people(), (3, 1, 2, 1), plan)
    fitted = one.fit()
    near(fitted.shared, one.simulated().shared)
    assert one.records.counters() == {}
    assert [line["clients"] for line in one.records.rounds()] == [cohort or 7] * 3

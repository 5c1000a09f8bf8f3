"""`nearby` on devices: both of its phases through a secure sum that a helper opens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from homebody.recipe import Recipe

PLAN = Recipe(
    "nearby",
    "devices",
    {"rank": 4},
    stages=["clip:norm=1", "secure-sum:helper=true"],
    rounds=1,
    seed=5,
    evaluate_every=0,
)


@pytest.mark.parametrize("fields", [{}, {"buckets": 50}, {"items": 9}])
def test_devices_learn_what_a_simulation_learns(village: Callable[..., Any], fields: dict[str, Any]) -> None:
    one = village(replace(PLAN, fields={**PLAN.fields, **fields}))
    fitted = one.fit()
    one.near(fitted.shared, one.simulated().shared, tolerance=1e-4)
    assert one.told() == ["popularity/1", "pairs/1"]
    assert [line["clients"] for line in one.records.rounds()] == [7, 7]

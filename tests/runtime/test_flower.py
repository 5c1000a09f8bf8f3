"""Real devices with real homes, in one process and without a network: the runtime that asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from homebody.recipe import Recipe

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


@pytest.fixture(autouse=True)
def cohorts_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real cohorts are drawn by the system; here they are those of the simulation that is compared with."""
    monkeypatch.setattr("homebody.fit._draw", lambda runtime, rng, number: rng.fold("cohort", number))


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("method", METHODS)
def test_devices_train_what_a_simulation_trains(
    town: Callable[..., Any], people: Callable[..., Any], method: str, cohort: int | None
) -> None:
    plan = Recipe(method.split()[0], "devices", METHODS[method], rounds=3, seed=5, cohort=cohort, evaluate_every=0)
    one = town(people(), (3, 1, 2, 1), plan)
    fitted = one.fit()
    one.near(fitted.shared, one.simulated().shared)
    assert one.records.counters() == {}
    assert [line["clients"] for line in one.records.rounds()] == [cohort or 7] * 3


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedials"])
def test_numbers_may_travel_in_sixteen_bits(town: Callable[..., Any], people: Callable[..., Any], method: str) -> None:
    plan = Recipe(method, "devices", METHODS[method], rounds=3, seed=5, evaluate_every=0)
    one = town(people(), (4, 3), plan, half=True)
    fitted = one.fit()
    wanted = one.simulated()
    one.near(fitted.shared, wanted.shared, tolerance=0.01)
    assert any(not torch.equal(fitted.shared[name], value) for name, value in wanted.shared.items())
    full = town(people(), (4, 3), plan)
    full.fit()
    assert one.records.rounds()[1]["bytes_up"] < 0.8 * full.records.rounds()[1]["bytes_up"]


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedrecon"])
def test_what_devices_measure_is_what_a_simulation_measures(
    town: Callable[..., Any], people: Callable[..., Any], method: str, cohort: int | None
) -> None:
    plan = Recipe(method, "devices", METHODS[method], rounds=3, seed=5, cohort=cohort, cutoffs=[3])
    one = town(people(), (3, 2, 1, 1), plan)
    fitted = one.fit()
    lines: list[Any] = []
    wanted = one.simulated(on_round=lines.append)
    for found, line in zip(one.records.rounds(), lines, strict=True):
        assert found["metrics"] == pytest.approx(line.metrics, abs=1e-6)
    assert (fitted.chosen, fitted.metrics) == (wanted.chosen, pytest.approx(wanted.metrics, abs=1e-6))
    one.near(fitted.shared, wanted.shared)
    told = [entry.release for entry in one.records.ledger().entries()]
    rounds = [name for n in (1, 2, 3) for name in (f"train/{n}", f"train/{n}/telemetry")]
    assert list(dict.fromkeys(told)) == rounds

"""A method that shuffles, trained over real processes: server, intake, proxy and devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from homebody.data import Population
from homebody.deploy.admin import opened
from homebody.deploy.home import Home
from homebody.recipe import Recipe

K = 20


def plan(rounds: int, method: str = "fedmf") -> Recipe:
    stages = [f"one-bit:epsilon=2.5,k={K}", "shuffle"]
    return Recipe(method, "devices", rounds=rounds, seed=4, evaluate_every=0, stages=stages)


def test_reports_go_through_the_proxy_and_train_the_model(few: Population, world: Callable[..., Any]) -> None:
    federation = world(few, 2, plan(3), shuffling={"least_devices": 2})
    federation.start(once=True)
    assert federation.finish() == 0
    with opened(federation.server) as (_, records):
        assert [line["clients"] for line in records.rounds()] == [8] * 3
        assert records.counters()["reports_accepted"] == 8 * K * 3
    assert bool(torch.isfinite(federation.shared()["item"]).all())
    with Home(federation.devices[0]) as home:
        assert home.reports() == 4 * K * 3

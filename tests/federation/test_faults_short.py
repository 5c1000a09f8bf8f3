"""The shortest of the faults that `make test-faults` causes: each part killed once, in one run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homebody.data import Population
from homebody.recipe import Recipe


def test_a_run_survives_the_kill_of_a_device_of_the_trainer_and_of_the_server(
    few: Population, world: Callable[..., Any]
) -> None:
    federation = world(few, 2, Recipe("pfedrec", "devices", rounds=24, seed=4, evaluate_every=0))
    federation.start(once=True)
    federation.wait_for("server", "opened", release="train/3")
    federation.kill("device0")
    federation.start("device0")
    federation.wait_for("server", "opened", release="train/9")
    os.kill(federation.trainer(), signal.SIGKILL)
    federation.wait_for("server", "opened", release="train/16")
    children = [federation.trainer(), federation.link()]
    federation.kill("server")
    federation.wait(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children are gone")
    federation.start("server", once=True)
    assert federation.finish() == 0
    assert federation.said("server", "started") == 3
    federation.check()


def test_a_secure_sum_survives_the_kill_of_a_device_and_of_the_trainer(
    few: Population, world: Callable[..., Any]
) -> None:
    stages = ["secure-sum:range=100"]
    recipe = Recipe("fedmf", "devices", {"factors": 4}, stages=stages, rounds=8, seed=4, evaluate_every=0)
    federation = world(few, 4, recipe)
    federation.start(once=True)
    federation.wait_for("server", "sent", 2, exchange="masked")
    federation.kill("device0")
    federation.start("device0")
    federation.wait_for("server", "sent", federation.said("server", "sent", exchange="open") + 2, exchange="open")
    os.kill(federation.trainer(), signal.SIGKILL)
    assert federation.finish() == 0
    federation.check()

"""A method of one's own on devices, as real processes: installed on each machine, allowed on each device, sent by
nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.packaged import install
from typer.testing import CliRunner

from homebody.cli import app
from homebody.data import Population
from homebody.data.partitions import everything
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.federation.server.admin import opened
from homebody.recipe import Recipe
from homebody.simulation import Simulator
from homebody.training import fit

ROUNDS = 2


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what processes that are started from now on find installed."""
    before = os.environ.get("PYTHONPATH", "")

    def set_path(*sites: Path) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (before, *map(str, sites)))))

    return set_path


def test_a_method_of_a_package_is_trained_where_it_is_allowed_and_the_same(
    tmp_path: Path,
    few: Population,
    world: Callable[..., Any],
    path: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, other = install(tmp_path / "right", "1.0"), install(tmp_path / "other", "1.1")
    monkeypatch.syspath_prepend(right)
    plan = Recipe("biased-mf", "devices", rounds=ROUNDS, seed=3, evaluate_every=0)
    federation = world(few, 3, plan, popen=subprocess.Popen)
    for device in federation.devices[1:]:
        done = CliRunner().invoke(app, ["client", "methods", str(device), "--allow", "biased-mf"])
        assert (done.exit_code, done.output.startswith("biased-mf: allowed, my-package 1.0 (code ")) == (0, True)

    # One device does not allow it, one lacks the package, one has another version: each says so to the operator.
    path(right)
    federation.start("server")
    path()
    federation.start("device0", "device1")
    path(other)
    federation.start("device2")
    wanted = (
        "and it allows none of that name: install the package my-package 1.0 that brings it",
        "This device allows the method 'biased-mf', but its package my-package 1.0 is not installed here.",
        "The server has the method 'biased-mf' of my-package 1.0 (code ",
    )

    def refusals() -> str:
        return "\n".join(one["said"] for one in federation.log("server") if one["event"] == "refused")

    federation.wait(lambda: all(sentence in refusals() for sentence in wanted), "each device says what is wrong")
    assert ", and this device that of my-package 1.1 (code " in refusals()
    assert federation.rounds() == 0
    with opened(federation.server) as (_, records):
        said = {seen.refuses for seen in records.presence().values()}
    assert all(any(sentence in refusal for refusal in said) for sentence in wanted), "`server status` has them too."
    for name in ("server", *(device.name for device in federation.devices)):
        federation.kill(name)

    with Home(federation.devices[0]) as home:
        home.configure(methods=["biased-mf"])
    path(right)
    federation.start(once=True)
    assert federation.finish() == 0
    fitted = fit(plan.build(), Simulator(everything(few, seed=3)), rounds=ROUNDS, seed=3, evaluate_every=0)
    torch.testing.assert_close(federation.shared()["item"], fitted.shared["item"], rtol=0, atol=1e-5)

    # The model ranks at home, as long as the method stays allowed.
    with Home(federation.devices[0]) as home:
        person = home.people.active()[0]
        assert len(recommend(home, person, 3)) == 3
        home.configure(methods=[])
        with pytest.raises(Exception, match="it allows none of that name"):
            recommend(home, person, 3)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]

"""Real processes over real sockets, with TLS and authentication: the same numbers as in a simulation."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.warm import Nest

from homebody.data import Population
from homebody.data.partitions import everything, leave_one_out
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.federation.server.admin import opened
from homebody.federation.server.records import why_ended
from homebody.recipe import Recipe
from homebody.simulation import Simulator
from homebody.training import fit

ROUNDS = 5


@pytest.mark.parametrize("method", ["pfedrec", "fedmf", "fedials"])
def test_twenty_people_on_four_devices_train_what_a_simulation_trains(
    method: str, twenty: Population, world: Callable[..., Any], warm: Nest
) -> None:
    plan = Recipe(method, "devices", rounds=ROUNDS, seed=3, evaluate_every=1 if method == "pfedrec" else 0)

    def popen(command: list[str], **given: Any) -> Any:
        """Of each command one is a process that a person might have started, with all its imports."""
        cold = method == "fedmf" and command[-1].endswith(("--once", "device0"))
        return (subprocess.Popen if cold else warm.popen)(command, **given)

    federation = world(twenty, 4, plan, popen=popen)
    federation.start(once=True)
    assert federation.finish() == 0
    split = leave_one_out(twenty, seed=3) if plan.evaluate_every else everything(twenty, seed=3)
    wanted = fit(plan.build(), Simulator(split), rounds=ROUNDS, seed=3, evaluate_every=plan.evaluate_every)
    last = fit(plan.build(), Simulator(split), rounds=ROUNDS, seed=3, evaluate_every=0)
    found = federation.shared()
    for name, value in last.shared.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    with opened(federation.server) as (_, records):
        lines, ledger = records.rounds(), records.ledger()
        assert [line["clients"] for line in lines] == [20] * ROUNDS
        told = {entry.release for entry in ledger.entries()}
    rounds = {f"train/{number}" for number in range(1, ROUNDS + 1)}
    if not plan.evaluate_every:
        assert told == rounds
        return
    # What devices measure is the same too, and is charged.
    assert told == rounds | {f"{name}/telemetry" for name in rounds}
    assert lines[-1]["metrics"]["hr@10"] == pytest.approx(last_metrics(plan, split)["hr@10"], abs=1e-6)
    with Home(federation.devices[0]) as home:
        mine = [(one.item, one.score) for one in recommend(home, home.people.find("person 2"), 5)]
        assert len(home.ledger(2).entries()) == 3 * 2 * ROUNDS
    assert len(mine) == 5
    assert wanted.chosen == max(range(1, ROUNDS + 1), key=lambda n: lines[n - 1]["metrics"]["valid/ndcg@10"])


def last_metrics(plan: Recipe, split: Any) -> dict[str, float]:
    lines: list[Any] = []
    fit(plan.build(), Simulator(split), rounds=ROUNDS, seed=3, on_round=lines.append)
    metrics: dict[str, float] = lines[-1].metrics
    return metrics


def test_the_server_keeps_its_state_in_postgresql(
    twenty: Population, world: Callable[..., Any], new_postgresql: str
) -> None:
    plan = Recipe("fedials", "devices", rounds=2, seed=3, evaluate_every=0)
    federation = world(twenty, 1, plan, database=new_postgresql)
    federation.start(once=True)
    assert federation.finish() == 0
    assert not list(federation.server.glob("*.sqlite"))
    wanted = fit(plan.build(), Simulator(everything(twenty, seed=3)), rounds=2, seed=3, evaluate_every=0)
    torch.testing.assert_close(federation.shared()["item"], wanted.shared["item"], rtol=0, atol=1e-5)
    with opened(federation.server) as (_, records):
        assert records.ledger().releases() == 2


def test_a_device_that_pauses_leaves_and_comes_back_when_it_resumes(few: Population, world: Callable[..., Any]) -> None:
    federation = world(few, 1, Recipe("fedials", "devices", rounds=1, seed=3, evaluate_every=0))
    assert (federation.server / "server.sqlite").stat().st_mode & 0o777 == 0o600
    federation.start()
    federation.wait_for("server", "finished")
    with Home(federation.devices[0]) as home:
        home.configure(paused=True)
        federation.wait_for("device0", "paused")
        home.configure(paused=False)
        federation.wait_for("device0", "joined", count=2)


@pytest.mark.parametrize("setting", ["listen", "metrics"])
def test_a_busy_port_names_the_setting_its_file_and_the_option(
    setting: str, few: Population, world: Callable[..., Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        busy = {"port": port} if setting == "listen" else {"metrics": f"127.0.0.1:{port}"}
        federation = world(few, 1, Recipe("fedials", "devices", rounds=1, evaluate_every=0), **busy)
        federation.start("server")
        assert federation.finish() == 2
    said = (federation.folder / "server.log").read_text()
    assert f"127.0.0.1:{port}: Address already in use; give another address as {setting} in" in said
    assert f"{federation.server}/server.toml, where --{setting} of `homebody server init` put it." in said


@pytest.mark.parametrize(
    "ended",
    [
        {},
        {"stages": ["clip:norm=0.5", "gaussian:z=4"], "budget": "eps=3,delta=1e-6,observer=public"},
    ],
    ids=["all rounds", "budget spent"],
)
def test_a_server_that_is_started_after_training_gives_its_model_to_one_newcomer(
    ended: dict[str, Any], few: Population, world: Callable[..., Any]
) -> None:
    """Nobody who trained comes back, and fewer people than `--least` are there."""
    federation = world(few, 1, Recipe("fedmf", "devices", rounds=30 if ended else 2, evaluate_every=0, **ended))
    newcomer = federation._device(1, [3])
    federation.start("server", "device0")
    federation.wait_for("server", "finished")
    rounds = federation.rounds()
    assert rounds < 30
    for name in ("server", "device0"):
        federation.kill(name)

    federation.start("server", newcomer.name)
    federation.wait_for("server", "published", devices=1, items=few.n_items)
    assert federation.said("server", "waiting") == 1, "Only before the training."
    with opened(federation.server) as (_, records):
        assert why_ended(records.notes()) is not None

        def connected() -> list[str]:
            there = [mark for mark, seen in records.presence().items() if seen.connected]
            return [device.name for device in records.devices() if device.fingerprint in there]

        federation.wait(lambda: connected() == [newcomer.name], "the one device that is there is said to be")
    with Home(newcomer) as home:
        federation.wait(lambda: home.models.ranking() is not None, "the newcomer has the model")
        assert len(recommend(home, home.people.find("person 3"), 5)) == 5
    with opened(federation.server) as (_, records):
        assert len(records.rounds()) == rounds

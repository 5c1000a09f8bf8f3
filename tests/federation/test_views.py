"""Apps of their own processes, on real devices: the same numbers as in a simulation, whoever is killed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from homebody.data import Population
from homebody.data.partitions import everything
from homebody.federation.app.folder import AppFolder
from homebody.federation.device.home import Home
from homebody.federation.schema import FeatureSchema
from homebody.federation.server.admin import opened
from homebody.recipe import Recipe
from homebody.simulation import Simulator
from homebody.training import fit

ROUNDS = 5
JOBS = ("cook", "vet", "spy")


def known(users: int) -> dict[str, list[dict[str, str]]]:
    """What the two apps know of each user: a number for each of three tastes, and a job as one of three ones."""
    rng = np.random.default_rng(7)
    taste = [{str(n): f"{value:.6f}" for n, value in enumerate(row, 1)} for row in rng.normal(size=(users, 3))]
    job = [{"1": str(int(user % 2)), "2": str(user % 3)} for user in range(users)]
    return {"taste": taste, "job": job}


def simulated(federation: Any, few: Population, recipe: Recipe, apps: dict[str, list[dict[str, str]]]) -> Any:
    with opened(federation.server) as (_, records):
        content = records.features()
    assert content is not None
    schema = FeatureSchema.read(content)
    profiles = [
        {f"{view}.{name}": value for view, people in apps.items() for name, value in people[user].items()}
        for user in range(few.n_users)
    ]
    split = replace(everything(few, seed=recipe.seed), coded=schema.encoded(profiles, few.n_items))
    return fit(recipe.build(), Simulator(split), rounds=ROUNDS, seed=recipe.seed, evaluate_every=0)


@pytest.mark.parametrize("killed", [False, True])
def test_two_devices_with_two_apps_each_train_what_a_simulation_trains(
    killed: bool, few: Population, world: Callable[..., Any]
) -> None:
    fields = {"views": "taste,job", "widths": "8,4", "batch_size": 6, "aggregate_users": not killed}
    recipe = Recipe("fl-mv-dssm", "devices", rounds=ROUNDS, seed=3, evaluate_every=0, fields=fields)
    apps = known(few.n_users)
    federation = world(few, 2, recipe, views=["taste=3", "job=2"], apps=apps)
    federation.start("device0", "device1", *federation.apps)
    for device in ("device0", "device1"):
        federation.wait_for(device, "view joined", 2)
    if killed:
        federation.processes["device0-taste"].send_signal(signal.SIGSTOP)
    federation.start("server", once=True)
    if killed:
        kill_in_rounds(federation)
    assert federation.finish() == 0

    wanted = simulated(federation, few, recipe, apps)
    found = federation.shared()
    assert found.keys() == wanted.shared.keys()
    for name, value in wanted.shared.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)

    rounds = {f"train/{number}" for number in range(1, ROUNDS + 1)}
    with opened(federation.server) as (_, records):
        assert [line["clients"] for line in records.rounds()] == [few.n_users] * ROUNDS
        assert {entry.release for entry in records.ledger().entries()} == rounds
    people: dict[str, list[str]] = {}
    for folder in federation.devices:
        with Home(folder) as home:
            people[folder.name] = [person.name for person in home.people.all()]
            asked = ROUNDS * len(people[folder.name])
            # What came of a question to an app is counted once it is done with: a killed device may ask again.
            for view in home.views.all():
                assert (view.away, view.slow, view.nonsense) == (0, 0, 0)
                assert view.answered >= asked
            for person in home.people.all():
                entries = home.ledger(person).entries()
                assert len({(entry.release, entry.observer) for entry in entries}) == len(entries)
                assert {entry.observer for entry in entries} == {"server", "clients", "public", "views"}
                assert sorted(mark.release for mark in home.outbox.sent(person)) == sorted(rounds)
    for name in federation.apps:
        with AppFolder(federation.folder / name) as app:
            assert app.people() == people[name.partition("-")[0]]
            for person in app.people():
                assert sorted(one.release for one in app.seen(person)) == sorted(rounds)
                own = app.ledger(person)
                assert own.releases() == ROUNDS == len(own.entries())


def kill_in_rounds(federation: Any) -> None:
    """Kill an app in the first round, and a device in a later one; both come back."""
    federation.wait_for("device0-job", "answered")  # the round waits for the other app, which was stopped
    federation.kill("device0-taste")
    federation.start("device0-taste")
    federation.wait(lambda: federation.rounds() >= 1, "a round is done")
    federation.processes["device1-job"].send_signal(signal.SIGSTOP)
    federation.wait(
        lambda: federation.said("device1", "asked", kind="train") > federation.said("device1", "answered", do="train"),
        "the other device is in a round",
    )
    federation.kill("device1")
    federation.processes["device1-job"].send_signal(signal.SIGCONT)
    federation.start("device1")

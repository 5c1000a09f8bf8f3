"""A method that shuffles, trained over real processes: server, intake, proxy and devices. Whatever is killed, every
report is counted once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from homebody.data import Population
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.federation.envelopes import REPORT_BYTES, unseal_reports
from homebody.federation.server.admin import opened
from homebody.federation.server.epochs import Epochs
from homebody.recipe import Recipe

K = 20
Make = Callable[..., Any]


def plan(rounds: int) -> Recipe:
    stages = [f"one-bit:epsilon=2.5,k={K}", "shuffle"]
    return Recipe("fedmf", "devices", rounds=rounds, seed=4, evaluate_every=0, stages=stages)


class Keys:
    """The secret halves of all epochs, which the server itself deletes."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, bytes] = {}
        self._folder, self._done = folder / "epochs", threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.005):
            for file in self._folder.glob("*.key"):
                with suppress(OSError):
                    if file.stem not in self.found and len(content := file.read_bytes()) == 32:
                        self.found[file.stem] = content

    def stop(self) -> dict[str, bytes]:
        self._done.set()
        self._thread.join()
        return self.found


def check(federation: Any, rounds: int, secrets: dict[str, bytes]) -> None:
    """Every round has the reports of everybody, once; and those of the last are what devices wrote down."""
    people = federation.population.n_users
    federation.check(exact=False)
    with opened(federation.server) as (_, records):
        assert [line["clients"] for line in records.rounds()] == [people] * rounds
        found = records.database.execute("SELECT name, arrived, people FROM epoch ORDER BY place").fetchall()
        run = found[0][0].partition("/")[0]
        assert found == [(f"{run}/train/{number}", people * K, people) for number in range(1, rounds + 1)]
        epochs = Epochs(records, federation.server)
        last = epochs.named(f"{run}/train/{rounds}")
        closed = epochs.closed(last.name)
        assert not list((federation.server / "epochs").iterdir())
    pairs: list[int] = []
    for folder in federation.devices:
        with Home(folder) as home:
            for person in home.people.all():
                (digest,) = home.outbox.answered(person, run, f"train/{rounds}")
                own = home.outbox.answer(person, run, f"train/{rounds}", digest)
                assert len(own) == K * REPORT_BYTES
                pairs += unseal_reports(own, last.key, secrets[last.id.hex()]).tolist()
            assert home.outbox.reports() == rounds * K * len(home.people.all())
    assert closed.counts.tolist() == np.bincount(pairs, minlength=2 * last.entries).tolist()
    assert bool(torch.isfinite(federation.shared()["item"]).all())


def test_a_run_survives_the_kill_of_every_part_and_counts_every_report_once(few: Population, world: Make) -> None:
    rounds = 10
    federation = world(few, 2, plan(rounds), shuffling={"least_devices": 2})
    keys = Keys(federation.server)
    try:
        federation.start(once=True)
        federation.wait_for("server", "opened", release="train/2")
        federation.kill("device0")
        federation.start("device0")
        federation.wait_for("server", "opened", release="train/4")
        os.kill(federation.intake(), signal.SIGKILL)
        federation.wait_for("server", "opened", release="train/6")
        os.kill(federation.trainer(), signal.SIGKILL)
        federation.wait_for("server", "opened", release="train/8")
        federation.kill("proxy")
        federation.start("proxy")
        assert federation.finish() == 0
    finally:
        secrets = keys.stop()
    assert federation.said("server", "started") == 2
    assert federation.said("server", "intake ended") == 1
    check(federation, rounds, secrets)
    with Home(federation.devices[0]) as home:
        assert len(recommend(home, home.people.find("person 2"), 5)) == 5
        (line,) = {(entry.event, entry.unit) for entry in home.ledger(2).entries() if entry.unit == "user"}
        assert '"kind": "reports"' in line[0]


@pytest.mark.faults
def test_reports_are_counted_once_whatever_is_killed_and_whenever(few: Population, world: Make) -> None:
    rng, rounds = np.random.default_rng(2), 40
    federation = world(few, 3, plan(rounds), shuffling={"least_devices": 3})
    keys = Keys(federation.server)
    try:
        federation.start(once=True)
        federation.wait_for("server", "round")
        while federation.processes["server"].poll() is None:
            time.sleep(rng.uniform(0.2, 2.5))
            victim = rng.choice(["device0", "device1", "device2", "proxy", "intake", "trainer"])
            if victim in ("intake", "trainer"):
                child = federation.intake() if victim == "intake" else federation.trainer()
                with suppress(ProcessLookupError, TypeError):
                    os.kill(child, signal.SIGKILL)
            else:
                federation.kill(victim)
                federation.start(victim)
            done = federation.said("server", "round")
            federation.wait(
                lambda seen=done: (
                    federation.said("server", "round") > seen or federation.processes["server"].poll() is not None
                ),
                "another round is done",
            )
        assert federation.finish() == 0
    finally:
        secrets = keys.stop()
    check(federation, rounds, secrets)

"""A run, a service and devices, from end to end, as processes that are killed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.processes import COMMAND, free_port, wait_until
from tests.warm import Nest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.privacy import Budget
from homebody.recipe import Recipe
from homebody.run import execute
from homebody.serving.client import Client

ROWS = 40


def said(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


class Scene:
    """A service and a device, as processes."""

    def __init__(self, folder: Path, warm: Nest) -> None:
        self.folder, self._warm = folder, warm
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        recipe = Recipe("fedials", "synthetic:users=60,items=300,mean=12", rounds=2, fields={"factors": 8})
        run = execute(recipe, folder / "runs")["run"]
        port = free_port()
        self.service, self.device, self.url = folder / "service", folder / "phone", f"https://127.0.0.1:{port}"
        made = ("--query", "choice:epsilon=5,interests=8", "--rows", ROWS, "--listen", f"127.0.0.1:{port}")
        said("serve", "init", self.service, "--run", run, *made)
        self.ca = self.service / "keys" / "ca.pem"

    def start(self, *words: object) -> None:
        name = str(words[0])
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [*COMMAND, *map(str, words)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
            self.processes[name] = self._warm.popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def answers(self) -> bool:
        try:
            with Client(self.url, ca=self.ca) as client:
                return client.model().rows == ROWS
        except HomebodyError:
            return False


@pytest.fixture
def scene(tmp_path: Path, warm: Nest) -> Iterator[Scene]:
    made = Scene(tmp_path, warm)
    yield made
    for name in list(made.processes):
        made.kill(name)


def test_a_run_is_served_to_a_device_whatever_is_killed(scene: Scene) -> None:
    device = scene.device
    said("client", "init", device, "--budget", "eps=16,delta=1e-6")
    said("client", "people", device, "--add", "ann", "--add", "bob")
    for item in (3, 14, 15):
        said("client", "append", device, "ann", item)
    said("client", "serving", device, "--url", scene.url, "--ca", scene.ca, "--mode", "query", "--every", "1s")
    scene.start("serve", "start", scene.service)
    wait_until(scene.answers, "the service answers")

    with Home(device) as home:

        def left(who: str) -> int:
            return sum(query.left is not None for query in home.queries.of(who))

        scene.start("client", "start", device)
        wait_until(lambda: left("ann") == 1, "a query leaves")
        scene.kill("client")
        scene.start("client", "start", device)
        wait_until(lambda: left("ann") == 2, "another leaves")
        scene.kill("serve")
        with pytest.raises(HomebodyError, match="A client is running"), home.store.only_client():
            pass
        found: dict[str, Any] = json.loads(said("client", "recommend", device, "ann", "--from", "server", "--json"))
        assert found["way"] in ("query", "shelf")
        assert len(found["items"]) == 10
        scene.start("serve", "start", scene.service)
        wait_until(lambda: any(query.state == "refused" for query in home.queries.of("bob")), "the budget is spent")
        wait_until(lambda: any(query.state == "refused" for query in home.queries.of("ann")), "the budget is spent")
        model = home.received.model
        for who in ("ann", "bob"):
            entries, queries = home.ledger(who).entries(), home.queries.of(who)
            assert len({entry.digest for entry in entries}) == len(entries) == 3
            assert {entry.digest for entry in entries} == {
                query.nonce for query in queries if query.state == "answered"
            }
            assert Budget.parse("eps=16,delta=1e-6,observer=server").spent(home.ledger(who)) == 15
            assert len(home.queries.answers(who, model)) == 3
    for who in ("ann", "bob"):
        found = json.loads(said("client", "recommend", device, who, "--json"))
        assert (found["way"], found["epsilon"], found["spent"], len(found["items"])) == ("query", 5.0, 15.0, 10)
    said("client", "impressions", "click", device, "bob", found["items"][0]["item"])
    text = said("client", "ledger", device, "--person", "ann")
    assert "3 queries left for the service: 3 of kind choice" in text
    assert "The budget allows no further query" in text
    assert "/v1/lists" not in scene.log("serve") + scene.log("client")

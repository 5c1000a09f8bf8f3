"""A server and some devices as real processes: everything as a person would start it."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homebody.data import Population, load
from homebody.deploy.admin import make, opened
from homebody.deploy.home import Home
from homebody.deploy.keys import make_device_key, read_public
from homebody.deploy.plan import Plan
from homebody.recipe import Recipe
from homebody.runtime.flower_wire import fingerprint

PATIENCE = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class World:
    """A folder with a server and its devices."""

    def __init__(self, folder: Path, population: Population, devices: int, recipe: Recipe, **settings: Any) -> None:
        folder.mkdir()
        self.folder, self.population = folder, population
        self.port = settings.pop("port", None) or free_port()
        people = np.array_split(np.arange(population.n_users), devices)
        self.server = folder / "server"
        plan = Plan(
            recipe,
            listen=f"127.0.0.1:{self.port}",
            **{"metrics": "", "quorum": 1.0, "least": population.n_users, "deadline": 30.0, **settings},
        )
        catalogue = folder / "items.csv"
        with catalogue.open("w", newline="") as file:
            csv.writer(file).writerows(
                [("id", "name"), *((f"i{item}", f"Item {item}") for item in range(population.n_items))]
            )
        make(self.server, plan, str(catalogue), [])
        self.devices = [self._device(number, some.tolist()) for number, some in enumerate(people)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _device(self, number: int, people: list[int], at: str | None = None) -> Path:
        folder = self.folder / f"device{number}"

        def furnish(inside: Path) -> None:
            (inside / "ca.pem").write_bytes((self.server / "keys" / "ca.pem").read_bytes())
            make_device_key(inside)

        with Home.create(folder, server=at or f"127.0.0.1:{self.port}", furnish=furnish) as home:
            for user in people:
                person = home.add_person(f"person {user}")
                start, end = self.population.indptr[user : user + 2]
                for row in range(start, end):
                    when = None if self.population.times is None else int(self.population.times[row])
                    home.append(person, f"i{self.population.items[row]}", time=when)
        key = read_public(folder / "device.pub")
        with opened(self.server) as (_, records):
            records.add_device(fingerprint(key), key, folder.name, len(people))
        return folder

    def start(self, *names: str, once: bool = False) -> None:
        """Start the server, or devices by name; all of them where none is named."""
        for name in names or ("server", *(device.name for device in self.devices)):
            command = (
                ["server", "start", str(self.server)]
                if name == "server"
                else ["client", "start", str(self.folder / name)]
            )
            command += ["--once"] if name == "server" and once else []
            with (self.folder / f"{name}.log").open("ab") as log, (self.folder / f"{name}.out").open("ab") as out:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-P", "-c", "from homebody.cli import main; main()", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
                )

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process, by default without a farewell."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait()

    def trainer(self) -> int | None:
        """The process that trains, a child of the server's."""
        return _child(self.processes["server"].pid, "homebody.deploy.trainer")

    def link(self) -> int | None:
        return _child(self.processes["server"].pid, "homebody.runtime.superlink")

    def log(self, name: str) -> list[dict[str, Any]]:
        """What a process has said so far."""
        path = self.folder / f"{name}.log"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def wait_for(self, name: str, event: str, count: int = 1, **facts: Any) -> None:
        """Until a process has said this so often."""

        def said() -> bool:
            found = [one for one in self.log(name) if one["event"] == event]
            return sum(all(one.get(key) == value for key, value in facts.items()) for one in found) >= count

        self.wait(said, f"{name} says {event}")

    def wait(self, done: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        until = time.monotonic() + patience
        while not done():
            if time.monotonic() > until:
                logs = {path.name: path.read_text()[-3000:] for path in self.folder.glob("*.log")}
                raise AssertionError(f"Waited {patience:g} s until {what}. " + "\n".join(map(str, logs.items())))
            time.sleep(0.02)

    def finish(self) -> int:
        """Wait for a server that was started `once`; its exit code."""
        process = self.processes["server"]
        self.wait(lambda: process.poll() is not None, "the server is done")
        return int(process.returncode)

    def shared(self) -> dict[str, Any]:
        with opened(self.server) as (_, records):
            progress = records.load()
            assert progress is not None
            return progress.shared

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def _child(parent: int, module: str) -> int | None:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if above == parent and module.encode() in words:
                return int(entry.name)
    return None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes a world in a folder of the test's own; what still runs of it at the end is killed."""
    made: list[World] = []

    def make_world(population: Population, devices: int, plan: Recipe, **settings: Any) -> World:
        made.append(World(tmp_path / f"world{len(made)}", population, devices, plan, **settings))
        return made[-1]

    yield make_world
    for one in made:
        one.stop()


@pytest.fixture
def twenty(real_data: Path) -> Population:
    """The first twenty people of MovieLens-100K, with its whole catalogue."""
    population, users = load("ml-100k", data_dir=str(real_data)), 20
    end = int(population.indptr[users])
    assert population.times is not None
    return Population(
        "twenty", population.indptr[: users + 1], population.items[:end], population.n_items, population.times[:end]
    )

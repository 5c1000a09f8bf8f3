"""A SuperLink of our own in a real process, and devices with keys; and devices without a network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from tests.processes import wait_until
from tests.warm import Nest

if TYPE_CHECKING:
    from tests.federation.helped import Helper


class Ground:
    """A folder of keys, and a SuperLink that can be started, killed and started again on the same port.

    popen: starts a process, as `subprocess.Popen` does.
    """

    def __init__(self, folder: Path, popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        from homebody.federation.service.certificates import make_authority

        self.folder = folder
        make_authority(folder)
        self.ca, self.secret = (folder / "ca.pem").read_bytes(), (folder / "secret").read_bytes()
        with closing(socket.socket()) as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = int(taken.getsockname()[1])
        self.address = f"localhost:{self.port}"
        self.popen = popen
        self.process: subprocess.Popen[bytes] | None = None
        self._devices = 0

    def device(self) -> tuple[bytes, bytes]:
        """The two halves of a new key: private, public."""
        from homebody.federation.service.certificates import make_device_key

        self._devices += 1
        public = make_device_key(self.folder / f"device{self._devices}")
        return public.with_suffix(".key").read_bytes(), public.read_bytes()

    def start(self, *more: str, tls: bool = True) -> None:
        command = [
            sys.executable,
            "-m",
            "homebody.federation.flower.superlink",
            "--port",
            str(self.port),
            "--follow-parent",
        ]
        command += ["--secret", str(self.folder / "secret"), *more]
        if tls:
            command += ["--cert", str(self.folder / "server.pem"), "--key", str(self.folder / "server.key")]
        self.process = self.popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.await_port(self.process)

    def await_port(self, process: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: process.poll() is not None or _answers(self.port), "the link listens")
        assert process.poll() is None, process.communicate()[1].decode()

    def kill(self) -> str:
        """Kill -9; gives what it had written."""
        assert self.process is not None
        self.process.kill()
        _, said = self.process.communicate()
        self.process = None
        return said.decode()


def _answers(port: int) -> bool:
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, warm: Nest) -> Iterator[Ground]:
    """One SuperLink for a module, with TLS and registered keys only; it starts warm."""
    made = Ground(tmp_path_factory.mktemp("ground"), warm.popen)
    made.start("--limit", str(8 << 20))
    yield made
    said = made.kill()
    assert said == "", said


@pytest.fixture
def own_ground(tmp_path: Path) -> Iterator[Ground]:
    """A SuperLink for one test, which starts and kills it."""
    made = Ground(tmp_path / "ground")
    yield made
    if made.process is not None:
        made.kill()


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Reply(NamedTuple):
    message: str
    body: bytes | None
    error: str = ""


class Mail:
    """Letters without a network: each is answered by the device itself, when somebody waits for the answer.

    twisted: what becomes of a device's answer to a letter of a kind, by its mark: other bytes, several answers, or
    none at all.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.devices: dict[str, Any] = {}
        self.keys: dict[str, bytes] = {}
        self.offline: set[str] = set()
        self.registered: set[bytes] = set()
        self.twisted: dict[str, Callable[[str, bytes, bytes], Any]] = {}
        self.letters: list[tuple[str, str, bytes]] = []
        self.answers: list[tuple[str, str, bytes]] = []
        self._waiting: dict[str, tuple[str, str, bytes]] = {}
        self._nodes: dict[str, int] = {}

    def register(self, public_key: bytes, name: str) -> None:
        self.registered.add(public_key)

    def unregister(self, public_key: bytes) -> None:
        self.registered.discard(public_key)

    def nodes(self) -> dict[str, int]:
        there = [mark for mark in self.devices if mark not in self.offline and self.keys[mark] in self.registered]
        return {mark: self._nodes.setdefault(mark, 7000 + len(self._nodes)) for mark in there}

    def send(self, letters: Mapping[int, tuple[str, bytes]], deadline: float) -> dict[str, int]:
        marks = {node: mark for mark, node in self._nodes.items()}
        sent = {}
        for node, (kind, body) in letters.items():
            if marks[node] in self.offline:
                continue
            number = f"message {len(self.letters)}"
            self.letters.append((marks[node], kind, body))
            self._waiting[number] = (marks[node], kind, body)
            sent[number] = node
        return sent

    def receive(self, messages: Collection[str], wait: float) -> list[Reply]:
        found: list[Reply] = []
        for number in sorted(set(messages) & self._waiting.keys(), key=lambda name: -int(name.split()[1])):
            mark, kind, body = self._waiting[number]
            del self._waiting[number]
            if mark in self.offline:
                found.append(Reply(number, None, "The device is gone."))
                continue
            given = self.devices[mark].answer(body)
            twist = self.twisted.get(mark)
            become = given if twist is None else twist(kind, body, given)
            for one in become if isinstance(become, list) else [become]:
                if one is not None:
                    self.answers.append((mark, kind, one))
                    found.append(Reply(number, one))
        if not found:
            self.clock.sleep(wait)
        return found


class Town:
    """A server's runtime and records, and real devices with real homes, in one process and without a network."""

    def __init__(
        self, folder: Path, population: Any, sizes: Sequence[int], plan: Any, items: int | None = None, **more: Any
    ) -> None:
        from homebody.database import connect
        from homebody.federation.device.home import Home
        from homebody.federation.server.plan import ServerPlan
        from homebody.federation.server.records import Records
        from homebody.federation.service.certificates import make_device_key, read_public

        self.population, self.recipe = population, plan
        self.clock = more.pop("clock")
        self.plan = ServerPlan(plan, **{"quorum": 1.0, "run": "0123456789abcdef", **more})
        self.records = Records(connect(folder / "server.sqlite"))
        self.grow(population.n_items if items is None else items)
        self.mail, self.logs = Mail(self.clock), list[dict[str, Any]]()
        self.homes: list[Home] = []
        user = 0
        times = [None] * len(population.items) if population.times is None else population.times.tolist()
        for number, size in enumerate(sizes):
            home = Home.create(folder / f"device{number}", server="127.0.0.1:9092", furnish=make_device_key)
            with home.store.writing(data=True) as db:  # an import of a file takes ten times as long
                for one in range(user, user + size):
                    rows = range(*population.indptr[one : one + 2])
                    slot = home.people.add(f"person-{one}").slot if rows else None
                    lines = [(slot, f"item-{population.items[row]}", times[row]) for row in rows]
                    db.executemany("INSERT INTO interaction (person, item, time) VALUES (?, ?, ?)", lines)
            for one in range(len(home.people.all()), size):
                home.people.add(f"person-{user + one}")
            user += size
            self.homes.append(home)
            mark = f"mark{number}"
            key = read_public(home.path / "device.pub")
            self.records.add_device(mark, key, f"device {number}", size)
            self.mail.keys[mark] = key
            self.mail.devices[mark] = self.device(home)

    def device(self, home: Any, reporter: Any = None) -> Any:
        """A device whose waits before an answer leaves take no time: they put its clock forward instead."""
        from homebody.federation.device.device import Device

        waited: list[float] = []
        return Device(
            home,
            self.log,
            reporter,
            clock=lambda: time.monotonic() + sum(waited),
            sleep=lambda left: waited.append(left),
        )

    def grow(self, count: int) -> None:
        """Give the catalogue so many items in all."""
        known = self.records.n_items()
        self.records.add_items([(f"item-{item}", f"Title of {item}") for item in range(known, count)])

    def log(self, event: str, **facts: Any) -> None:
        self.logs.append({"event": event, **facts})

    def runtime(self, keep: int | None = None) -> Any:
        from homebody.federation.server.runtime import Flower

        return Flower(self.mail, self.records, self.plan, keep=keep, log=self.log)

    def fit(self, runtime: Any = None, **more: Any) -> Any:
        """Train as the trainer does."""
        from homebody.training import fit

        recipe = self.recipe
        asked = {
            "rounds": recipe.rounds,
            "cohort": recipe.cohort,
            "seed": recipe.seed,
            "ledger": self.records.ledger(),
            "budget": recipe.allowed(),
            "evaluate_every": recipe.every(recipe.build()),
            "on_round": self.records.add_round,
            "checkpoints": self.records,
        }
        return fit(recipe.build(), runtime or self.runtime(), **{**asked, **more})

    def simulated(self, users: Sequence[int] | None = None, population: Any = None, **more: Any) -> Any:
        """The same training in the simulator; of some users, under the numbers that they have."""
        import numpy as np

        from homebody.data.partitions import everything, leave_one_out
        from homebody.simulation import Simulator
        from homebody.training import fit

        recipe, population = self.recipe, population or self.population
        if recipe.every(recipe.build()):
            split = leave_one_out(population, protocol=recipe.protocol, how=recipe.held_out, seed=recipe.seed)
        else:
            split = everything(population, seed=recipe.seed)
        runtime = Simulator(split, cutoffs=recipe.measured())
        if users is not None:
            runtime._members = np.array(users)
        asked = {"rounds": recipe.rounds, "cohort": recipe.cohort, "seed": recipe.seed}
        return fit(recipe.build(), runtime, **{**asked, "evaluate_every": recipe.every(recipe.build()), **more})

    @staticmethod
    def near(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 1e-5) -> None:
        import torch

        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance)

    def told(self) -> list[str]:
        """The releases that the server's ledger knows of, in order."""
        return list(dict.fromkeys(entry.release for entry in self.records.ledger().entries()))

    def own(self, device: int, slot: int) -> list[str]:
        """Likewise a person's, without what tells letters apart."""
        entries = self.homes[device].ledger(slot).entries()
        return [name.partition("@")[0].partition("/")[2] for name in dict.fromkeys(entry.release for entry in entries)]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.logs if one["event"] == event]

    def close(self) -> None:
        for home in self.homes:
            home.close()
        self.records.database.close()


@pytest.fixture
def town(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Town]]:
    """Makes towns, each in a folder of its own; time passes in them only where somebody waits."""
    made: list[Town] = []
    clock = Clock()
    monkeypatch.setattr("homebody.federation.server.runtime.time", clock)
    monkeypatch.setattr("homebody.federation.server.letters.time", clock)
    monkeypatch.setattr("homebody.federation.server.aggregate.time", clock)
    # Homes write through to the disk at every step: in memory that costs nothing.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:

        def make(*given: Any, **more: Any) -> Town:
            folder = Path(place, f"town{len(made)}")
            folder.mkdir()
            made.append(Town(folder, *given, clock=clock, **more))
            return made[-1]

        yield make
        for one in made:
            one.close()


@pytest.fixture
def people() -> Callable[..., Any]:
    """Makes a few people with times, none of whom has an item twice."""
    import numpy as np

    from homebody.data import Population

    def make(lengths: Sequence[int] = (6, 9, 4, 12, 5, 7, 8), items: int = 30, seed: int = 3) -> Population:
        rng = np.random.default_rng(seed)
        own = [rng.choice(items, length, replace=False) for length in lengths]
        indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        times = np.concatenate([np.arange(length) + 100 * user for user, length in enumerate(lengths)])
        return Population("town", indptr, np.concatenate(own).astype(np.int32), items, times.astype(np.int64))

    return make


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Helper]:
    """A proxy in this process that opens secure sums."""
    from tests.federation.helped import Helper

    made = Helper(tmp_path / "helper")
    yield made
    made.client.close()


@pytest.fixture
def village(
    town: Callable[..., Town], people: Callable[..., Any], helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Makes towns whose devices have the helper for a proxy; of some devices the helper does not know."""
    from tests.federation.helped import URL

    from homebody.federation.server.runtime import Flower

    monkeypatch.setattr("homebody.federation.server.helper._FIRST_PAUSE", 0.01)

    def village(
        plan: Any, unknown: Sequence[int] = (), population: Any = None, sizes: Sequence[int] = (2, 2, 2, 1), **more: Any
    ) -> Any:
        one: Any = town(people() if population is None else population, sizes, plan, helper=URL, **more)
        one.reporters = [helper.reporter(number not in unknown) for number in range(len(one.homes))]
        for number, home in enumerate(one.homes):
            one.mail.devices[f"mark{number}"] = one.device(home, one.reporters[number])
        one.runtime = lambda keep=None: Flower(
            one.mail, one.records, one.plan, keep=keep, helper=helper.asks(), log=one.log
        )
        return one

    return village

"""A server and some devices as real processes: everything as a person would start it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.processes import COMMAND, PATIENCE, free_port

from homebody.data import Population, load
from homebody.data.partitions import everything
from homebody.federation.app.folder import AppFolder, AppSettings
from homebody.federation.device.home import Home
from homebody.federation.flower.protocol import fingerprint
from homebody.federation.proxy import admin as proxy_admin
from homebody.federation.proxy import settings as proxy_settings
from homebody.federation.server.admin import make, opened
from homebody.federation.server.plan import ServerPlan
from homebody.federation.service.certificates import make_device_key, read_public
from homebody.federation.service.keys import make_report_key, read_report_pub
from homebody.recipe import Recipe
from homebody.simulation import Simulator
from homebody.training import fit


class Proxy:
    """A network between one device and the server, to be cut, slowed down or swallowed."""

    def __init__(self, target: int) -> None:
        self.rate: float | None = None
        """Bytes a second, each way of each connection."""
        self.hole = False
        """Whether everything is taken, and nothing passed on."""
        self._target, self._open = target, threading.Event()
        self._lock, self._sockets = threading.Lock(), set[socket.socket]()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._serve()

    def cut(self) -> None:
        """Break every connection; new ones may be made at once."""
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def refuse(self) -> None:
        """Break every connection, and let none be made."""
        self._open.clear()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def accept(self) -> None:
        """After `refuse`."""
        self._listening = socket.create_server(("127.0.0.1", self.port))
        self._serve()

    def _serve(self) -> None:
        self._open.set()
        threading.Thread(target=self._take, args=(self._listening,), daemon=True).start()

    def _take(self, listening: socket.socket) -> None:
        while self._open.is_set():
            try:
                near = listening.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target), timeout=PATIENCE)
            except OSError:
                if listening.fileno() < 0 or not self._open.is_set():
                    return
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(4096 if self.rate else 1 << 16):
                if self.hole:
                    continue
                if self.rate:
                    time.sleep(len(piece) / self.rate)
                sink.sendall(piece)
        with self._lock:
            for one in (source, sink):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                self._sockets.discard(one)
        source.close()


class World:
    """A folder with a server and its devices.

    proxied: each device comes through a network of its own. rooted: where the server's folder is, if elsewhere.
    popen: starts a process, as `subprocess.Popen` does.
    shuffling: settings of a proxy that reports go through, where there is one. helping: there is a proxy that opens
    secure sums. columns: features of items, and
    person_features of people, as `server init` takes them. apps: of each view that apps hold, what they know of each
    user; every device has an app for each, called DEVICE-VIEW. views: those, as `server init` takes them.
    """

    def __init__(
        self,
        folder: Path,
        population: Population,
        devices: int,
        recipe: Recipe,
        *,
        proxied: bool = False,
        rooted: Path | None = None,
        shuffling: dict[str, Any] | None = None,
        helping: bool = False,
        columns: dict[str, list[str]] | None = None,
        person_features: Sequence[str] = (),
        views: Sequence[str] = (),
        apps: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        **settings: Any,
    ) -> None:
        folder.mkdir()
        self.folder, self.population, self.recipe, self._popen = folder, population, recipe, popen
        self.port = settings.pop("port", None) or free_port()
        people = np.array_split(np.arange(population.n_users), devices)
        self.server = (rooted or folder) / "server"
        self.proxies = [Proxy(self.port) for _ in range(devices)] if proxied else []
        self.proxy = folder / "proxy" if shuffling is not None or helping else None
        self.proxy_port = free_port()
        if shuffling is not None:
            settings["reports"] = f"127.0.0.1:{free_port()}"
        authority = self._make_helper(folder / "proxy") if helping else None
        settings |= {"helper": f"https://127.0.0.1:{self.proxy_port}"} if helping else {}
        plan = ServerPlan(
            recipe,
            listen=f"127.0.0.1:{self.port}",
            **{"metrics": "", "quorum": 1.0, "least": population.n_users, "deadline": PATIENCE, **settings},
        )
        catalogue = folder / "items.csv"
        with catalogue.open("w", newline="") as file:
            own = columns or {}
            rows = [
                (f"i{item}", f"Item {item}", *(one[item] for one in own.values())) for item in range(population.n_items)
            ]
            csv.writer(file).writerows([("id", "name", *own), *rows])
        make(self.server, plan, str(catalogue), [], person_features, views, authority)
        self.intake_port = int(plan.reports.rpartition(":")[2] or 0)
        if helping:
            proxy_admin.allow(folder / "proxy", [self.server / "keys" / "reports.pub"], server=True)
        elif self.proxy is not None:
            self._make_proxy(self.proxy, shuffling or {})
        self._sockets = Path(tempfile.mkdtemp(prefix="hb"))  # a socket's path is short
        self.apps: list[str] = []
        self.devices = [self._device(number, some.tolist()) for number, some in enumerate(people)]
        for device, some in zip(self.devices, people, strict=True):
            for view, known in (apps or {}).items():
                self._make_app(device, view, {f"person {user}": known[user] for user in some})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def _make_helper(self, folder: Path) -> bytes:
        """A proxy that opens sums alone; the certificate of its authority."""
        proxy_admin.make(folder, proxy_settings.ProxySettings(next="", listen=f"127.0.0.1:{self.proxy_port}"))
        return (folder / "keys" / "ca.pem").read_bytes()

    def _make_proxy(self, folder: Path, settings: dict[str, Any]) -> None:
        chosen = proxy_settings.ProxySettings(
            next=f"https://127.0.0.1:{self.intake_port}",
            next_ca=True,
            listen=f"127.0.0.1:{self.proxy_port}",
            **{"hold": 0.2, "least_devices": 1, "lead": 1.0, **settings},
        )
        public = proxy_admin.make(folder, chosen, next_ca=self.server / "keys" / "ca.pem")
        with opened(self.server) as (_, records):
            records.add_proxy(read_report_pub(public), "mixer")

    def _device(self, number: int, people: list[int]) -> Path:
        folder = self.folder / f"device{number}"

        def furnish(inside: Path) -> None:
            (inside / "ca.pem").write_bytes((self.server / "keys" / "ca.pem").read_bytes())
            make_device_key(inside)
            if self.proxy is not None:
                (inside / "proxy-ca.pem").write_bytes((self.proxy / "keys" / "ca.pem").read_bytes())
                proxy_admin.allow(self.proxy, [make_report_key(inside)], people=len(people))

        port = self.proxies[number].port if self.proxies else self.port
        through = f"https://127.0.0.1:{self.proxy_port}" if self.proxy is not None else ""
        with Home.create(folder, server=f"127.0.0.1:{port}", proxy=through, furnish=furnish) as home:
            home.configure(limits={"seconds": PATIENCE})  # a busy machine may compile for minutes
            for user in people:
                person = home.people.add(f"person {user}")
                start, end = self.population.indptr[user : user + 2]
                for row in range(start, end):
                    when = None if self.population.times is None else int(self.population.times[row])
                    home.history.append(person, f"i{self.population.items[row]}", time=when)
        key = read_public(folder / "device.pub")
        with opened(self.server) as (_, records):
            records.add_device(fingerprint(key), key, folder.name, len(people))
        return folder

    def _make_app(self, device: Path, view: str, known: dict[str, Mapping[str, str]]) -> None:
        name, user = f"{device.name}-{view}", os.getuid()
        with Home(device) as home:
            token = home.views.add(view, user, same_user=True)
        settings = AppSettings(view, str(self._sockets / device.name), user, token)
        with AppFolder.create(self.folder / name, settings) as folder:
            folder.describe(known)
        self.apps.append(name)

    def start(self, *names: str, once: bool = False) -> None:
        """Start the server, the proxy, or devices by name; all of them where none is named."""
        proxy = ("proxy",) if self.proxy is not None else ()
        for name in names or ("server", *proxy, *(device.name for device in self.devices), *self.apps):
            listening = ["--socket", str(self._sockets / name), "--view-seconds", str(PATIENCE)] if self.apps else []
            command = {
                "server": ["server", "start", str(self.server)],
                "proxy": ["proxy", "run", str(self.folder / name)],
                **{app: ["view", "start", str(self.folder / app)] for app in self.apps},
            }.get(name, ["client", "start", str(self.folder / name), *listening])
            command += ["--once"] if name == "server" and once else []
            with (self.folder / f"{name}.log").open("ab") as log, (self.folder / f"{name}.out").open("ab") as out:
                self.processes[name] = self._popen(
                    [*COMMAND, *command],
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
        return _child(self.processes["server"].pid, "homebody.federation.server.trainer")

    def link(self) -> int | None:
        return _child(self.processes["server"].pid, "homebody.federation.flower.superlink")

    def intake(self) -> int | None:
        """The process that takes in reports, a child of the server's."""
        return _child(self.processes["server"].pid, "homebody.federation.server.intake")

    def log(self, name: str) -> list[dict[str, Any]]:
        """What a process has said so far."""
        path = self.folder / f"{name}.log"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def said(self, name: str, event: str, **facts: Any) -> int:
        """How often a process has said this."""
        found = [one for one in self.log(name) if one["event"] == event]
        return sum(all(one.get(key) == value for key, value in facts.items()) for one in found)

    def wait_for(self, name: str, event: str, count: int = 1, **facts: Any) -> None:
        """Until a process has said this so often."""
        self.wait(lambda: self.said(name, event, **facts) >= count, f"{name} says {event} {facts or ''}")

    def rounds(self) -> int:
        """How many rounds are done."""
        with opened(self.server) as (_, records):
            return len(records.rounds())

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
        children = [self.trainer(), self.link(), self.intake()] if "server" in self.processes else []
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        for child in filter(None, children):  # one that was stopped does not notice
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for proxy in self.proxies:
            proxy.refuse()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def check(self, *, attempts: dict[int, int] | None = None, exact: bool = True) -> None:
        """Whatever happened: every round is done once, was charged once for each attempt, and every person told each
        thing once; and the model is the one of an undisturbed run.

        attempts: how many a round took, where it was not one. exact: whether everybody took part in every round.
        """
        rounds = self.recipe.rounds
        assert rounds
        names = {
            f"train/{number}{'' if attempt == 1 else f'#{attempt}'}"
            for number in range(1, rounds + 1)
            for attempt in range(1, (attempts or {}).get(number, 1) + 1)
        }
        with opened(self.server) as (_, records):
            assert [line["step"] for line in records.rounds()] == list(range(1, rounds + 1))
            entries = records.ledger().entries()
            progress = records.load()
        assert {entry.release for entry in entries} == names
        assert len({(entry.release, entry.observer, entry.unit) for entry in entries}) == len(entries)
        assert progress is not None
        assert progress.step == rounds
        for folder in self.devices:
            with Home(folder) as home:
                for person in home.people.all():
                    own = home.ledger(person).entries()
                    assert len({(entry.release, entry.observer, entry.unit) for entry in own}) == len(own)
                    told = {entry.release for entry in own}
                    sent = [mark.release for mark in home.outbox.sent(person)]
                    assert len(set(sent)) == len(sent) == len(told), "Nothing is told twice."
                    assert not exact or set(sent) == {f"train/{number}" for number in range(1, rounds + 1)}
        if exact:
            seed = self.recipe.seed
            wanted = fit(
                self.recipe.build(),
                Simulator(everything(self.population, seed=seed)),
                rounds=rounds,
                seed=seed,
                evaluate_every=0,
            )
            for name, value in wanted.shared.items():
                torch.testing.assert_close(progress.shared[name], value, rtol=0, atol=1e-5)


def _child(parent: int, module: str) -> int | None:
    """The child that runs a module: it stands in its command line, or is its name (`tests.warm`)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                above = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if above != parent:
                    continue
                words = (entry / "cmdline").read_bytes().split(b"\0")
                name = (entry / "comm").read_text().strip()
            except (OSError, IndexError, ValueError):
                continue
            if module.encode() in words or name == module.rpartition(".")[2]:
                return int(entry.name)
    return None


def few_people() -> Population:
    """Eight made-up people: quick to train, so that the faults are what takes time."""
    rng = np.random.default_rng(5)
    histories = [np.sort(rng.choice(40, size, replace=False)) for size in rng.integers(6, 14, 8)]
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in histories])]).astype(np.int64)
    return Population("few", indptr, np.concatenate(histories).astype(np.int32), n_items=40)


def twenty_people(folder: Path) -> Population:
    """The first twenty people of MovieLens-100K, with its whole catalogue."""
    population, users = load("ml-100k", data_dir=str(folder)), 20
    end = int(population.indptr[users])
    assert population.times is not None
    return Population(
        "twenty", population.indptr[: users + 1], population.items[:end], population.n_items, population.times[:end]
    )

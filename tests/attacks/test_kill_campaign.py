"""A thousand times kill -9, of every kind of process, at any moment and under load.

What was acknowledged is not lost, no charge is lost or doubled, every ledger's chain is whole, and where a run is
deterministic it ends as one that nobody disturbed.

Processes are started warm (`tests.warm`), so that kills find them at work. `make test-faults` starts them as a person
does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from tests.attacks.conftest import Campaign
from tests.cli.test_run import rounds_of
from tests.federation.proxy.conftest import Device, Load, Process, Sink, made, sink, started  # noqa: F401
from tests.federation.test_shuffling import K, Keys
from tests.federation.test_shuffling import check as check_reports
from tests.federation.test_shuffling import plan as shuffled_plan
from tests.federation.world import World
from tests.processes import wait_until
from tests.warm import CALM, COMMAND, Nest

from homebody.data import Population
from homebody.federation.proxy.admin import report
from homebody.federation.server.admin import opened
from homebody.privacy import Entry, Ledger
from homebody.recipe import Recipe

ROUNDS = 60
"""Of a federation, and as many kills at most: then it is let go on to its end."""
DATA = "synthetic:users=60,items=80,mean=10"
NOISED = ["--stage", "clip:norm=0.5", "--stage", "secure-sum", "--stage", "gaussian:z=2"]
PAPER = f"""
title = "t"
citation = "c"
[[table]]
id = "1"
title = "t"
data = ["{DATA}"]
metrics = ["hr@10"]
seeds = 1
run = {{ stages = ["clip:norm=0.5", "secure-sum", "gaussian:z=2"] }}
[[table.row]]
name = "one"
method = "fedmf"
[[table.row]]
name = "two"
method = "pfedrec"
[[table.row]]
name = "three"
method = "fedmf"
fields = {{ factors = 4 }}
"""
COMMANDS = {
    "run": ["run", "pfedrec", "--data", DATA, "--rounds", "60", *NOISED, "--out", "runs", "--json"],
    "tune": ["tune", "fedmf", "--data", DATA, "--rounds", "40", "--trials", "3", *NOISED, "--out", "runs", "--json"],
    "reproduce": ["reproduce", "tiny", "--rounds", "40", "--out", "runs", "--json"],
}
OTHERWISE = re.compile("seconds|date|study|folder|^run$|rss")
"""What differs from one undisturbed run to the next."""
STAMP = re.compile(r"-\d{8}-\d{6}")


class Progress:
    """How many rounds a server has opened, by its log; it is read once."""

    def __init__(self, federation: World) -> None:
        self._path, self._read, self._found, self._rest = federation.folder / "server.log", 0, 0, b""

    def opened(self) -> int:
        with self._path.open("rb") as log:
            log.seek(self._read)
            new = log.read()
        self._read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        self._found += sum(b'"event": "opened"' in line for line in lines)
        return self._found


def disturb(federation: World, count: int, names: list[str], rng: np.random.Generator) -> Counter[str]:
    """Kill so many processes of a federation, or fewer if its training ends before.

    Two of three die after some progress, and the others at any moment, also while something comes back: but not three
    in a row, so that no device seems to be killed by what it is asked.
    """
    killed, progress, hasty = Counter[str](), Progress(federation), 2
    children = {"trainer": federation.trainer, "link": federation.link, "intake": federation.intake}

    def over() -> bool:
        return federation.processes["server"].poll() is not None

    while killed.total() < count:
        if hasty == 2 or rng.random() < 2 / 3:
            before, hasty = progress.opened(), 0
            federation.wait(
                lambda before=before: progress.opened() > before or over(), f"training goes on after {killed}", 600
            )
        else:
            hasty += 1
        time.sleep(rng.uniform(0, 0.4))
        if over():
            break
        name = names[rng.integers(len(names))]
        if name in children:
            pid = children[name]()
            if pid is None:  # it died with another, and is coming back
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        else:
            federation.kill(name)
            federation.start(name, once=name == "server")
        killed["supervisor" if name == "server" else name.rstrip("0123456789")] += 1
    return killed


def ended(federation: World) -> None:
    """The training came to its end by itself, and nothing was cut off or doubled on the way."""
    process = federation.processes["server"]
    federation.wait(lambda: process.poll() is not None, "the training ends", 1800)
    assert process.returncode == 0, (federation.folder / "server.log").read_text()[-3000:]
    assert not federation.said("server", "abandoned"), "Nobody was away for as long as a deadline."
    with opened(federation.server) as (_, records):
        records.ledger().verify()
    for name in federation.processes:
        assert "Traceback" not in (federation.folder / f"{name}.log").read_text()


@pytest.mark.attack
def test_every_process_of_a_federation(
    few: Population,
    world: Callable[..., World],
    campaign: Campaign,
) -> None:
    """Devices hold private states, and the model is the simulator's at the end."""
    count, rng, killed, finished = campaign.size(200, least=4), np.random.default_rng(21), Counter[str](), 0
    names = ["trainer", "link", "device0", "device1", "server"]
    while killed.total() < count:
        recipe = Recipe("pfedrec", "devices", rounds=ROUNDS, seed=4 + finished, evaluate_every=0)
        federation = world(few, 2, recipe)
        federation.start(once=True)
        killed += disturb(federation, count - killed.total(), names, rng)
        ended(federation)
        federation.check()
        federation.stop()
        finished += 1
    campaign.did("kills in a federation", killed.total(), **killed, federations_finished=finished)


@pytest.mark.attack
def test_every_process_of_a_shuffled_federation(
    few: Population,
    world: Callable[..., World],
    campaign: Campaign,
) -> None:
    """Every report of every round is counted exactly once."""
    count, rng, killed, finished = campaign.size(250, least=4), np.random.default_rng(22), Counter[str](), 0
    names = ["trainer", "link", "intake", "proxy", "device0", "device1", "server"]
    while killed.total() < count:
        # With a larger ε the accountant would take longer than the round.
        recipe = replace(shuffled_plan(ROUNDS), stages=[f"one-bit:epsilon=0.05,k={K}", "shuffle"])
        federation = world(few, 2, recipe, shuffling={"least_devices": 2}, longest=20)
        keys = Keys(federation.server)
        try:
            federation.start(once=True)
            killed += disturb(federation, count - killed.total(), names, rng)
            ended(federation)
        finally:
            secrets = keys.stop()
        check_reports(federation, ROUNDS, secrets)
        federation.stop()
        finished += 1
    campaign.did("kills in a shuffled federation", killed.total(), **killed, federations_finished=finished)


@pytest.mark.attack
def test_a_proxy_under_load(
    made: Callable[..., Any],  # noqa: F811
    started: Callable[..., Process],  # noqa: F811
    sink: Sink,  # noqa: F811
    warm: Nest,
    campaign: Campaign,
) -> None:
    """Every report that was acknowledged arrives exactly once."""
    count = campaign.size(150, least=2)
    rng = np.random.default_rng(23)
    sink.k, sink.cut = 1_000_000, 0.2
    devices = [Device() for _ in range(4)]
    proxy = started(*made(*devices, hold=0.2, most=1_000_000, batch=2000), popen=warm.popen)
    load = Load(proxy.port, devices, size=50)
    for _ in range(count):
        time.sleep(rng.uniform(0.0, 1.0))
        proxy.kill()
        proxy.start()
    accepted = load.stop()
    wait_until(lambda: report(proxy.folder)["held"] == 0, "everything has gone out", 600)
    assert sorted(sink.came()) == accepted
    assert len(accepted) == len(set(accepted)) > 0
    campaign.did("kills of a proxy under load", count, reports_acknowledged=len(accepted), reports_lost=0)


class Place:
    """A folder in which a command is given again and again until it is done."""

    def __init__(self, what: str, folder: Path, jobs: int, warm: Nest) -> None:
        (folder / "experiments" / "tiny").mkdir(parents=True)
        (folder / "experiments" / "tiny" / "recipe.toml").write_text(PAPER)
        self.what, self.folder, self._jobs, self._warm = what, folder, jobs, warm
        self._charged: dict[str, list[Entry]] = {}
        self._done: set[str] = set()

    def start(self) -> Running:
        """Give the command: a run that was begun is resumed by its folder, the others are given as before."""
        command = [*COMMANDS[self.what], "--jobs", str(self._jobs)]
        if self.what == "run":
            begun = sorted(self.folder.glob("runs/*/recipe.toml"))
            command = ["run", "--resume", str(begun[0].parent), "--json"] if begun else COMMANDS["run"]
        files = self.folder.with_suffix(".out"), self.folder.with_suffix(".err")
        with files[0].open("wb") as out, files[1].open("wb") as err:
            process = self._warm.popen(
                [sys.executable, "-P", "-c", COMMAND, *command],
                cwd=self.folder,
                env=CALM,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return Running(process, *files)

    def ledgers(self) -> dict[str, list[Entry]]:
        """What was charged; the chain of each is checked as it is opened."""
        found = {}
        for file in sorted(self.folder.rglob("ledger.sqlite")):
            ledger = Ledger(file)
            found[STAMP.sub("", str(file.relative_to(self.folder)))] = ledger.entries()
            ledger.close()
        return found

    def check(self) -> None:
        """Whatever was killed: nothing that was charged or finished is lost, nothing was charged twice, and every round
        that is recorded was charged before."""
        charged = self.ledgers()
        for name, entries in self._charged.items():
            assert charged[name][: len(entries)] == entries
        for entries in charged.values():
            names = [(entry.release, entry.observer, entry.unit) for entry in entries]
            assert len(set(names)) == len(names)
        for file in self.folder.rglob("metrics.jsonl"):
            lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
            done = {f"train/{json.loads(line)['round']}" for line in lines}
            name = STAMP.sub("", str(file.with_name("ledger.sqlite").relative_to(self.folder)))
            assert done <= {entry.release for entry in charged.get(name, [])}
        done = {str(file.relative_to(self.folder)) for file in self.folder.rglob("result.json")}
        assert self._done <= done
        self._charged, self._done = charged, done

    def outcome(self, told: dict[str, Any]) -> dict[str, Any]:
        """All that must not depend on what happened on the way."""
        assert not list(self.folder.rglob("*.partial"))
        return {
            "told": timeless(told),
            "charged": self.ledgers(),
            "rounds": [{**line, "epsilon": None} for line in self._rounds()],
            "files": Counter(
                STAMP.sub("", str(file.relative_to(self.folder))) for file in self.folder.rglob("*") if file.is_file()
            ),
        }

    def spent(self) -> list[float]:
        """The ε that is stated after each round: of all that was charged, also of rounds that are done again."""
        return [float(line["epsilon"]["public"]) for line in self._rounds()]

    def _rounds(self) -> list[dict[str, Any]]:
        runs = sorted(file.parent for file in self.folder.rglob("metrics.jsonl"))
        return [line for run in runs for line in rounds_of(run)]


class Running(NamedTuple):
    """A command, and the files of what it says."""

    process: Any
    out: Path
    err: Path

    def ends_before(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return self.process.poll() is not None

    def result(self) -> dict[str, Any]:
        """What it told in the end."""
        assert self.process.wait(600) == 0, self.err.read_text()[-3000:]
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def kill(self, victims: list[psutil.Process]) -> None:
        """These workers, and the command itself unless it has died."""
        workers = self.workers()
        for one in victims:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.kill()
        self.process.wait()
        assert "Traceback" not in (said := self.err.read_text()), said[-3000:]
        psutil.wait_procs(workers, timeout=300)  # those of a command that was killed end by themselves


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if not OTHERWISE.search(name)}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def one_kill(running: Running, seconds: float, rng: np.random.Generator) -> tuple[Counter[str], bool]:
    """Kill a command after so long, or one of its workers, or all of them at once; whether it was done before.

    A command replaces a worker that died. Half of the time it is let go on to its end, and is killed as well otherwise.
    """
    if running.ends_before(seconds):
        return Counter(), True
    kind, workers = rng.integers(3), running.workers()
    if kind == 0 or not workers:
        running.kill([])
        return Counter(command=1), False
    if kind == 1:
        running.kill(workers)
        return Counter(command_with_its_workers=1), False
    with suppress(psutil.NoSuchProcess):
        workers[rng.integers(len(workers))].kill()
    if rng.random() < 0.5 or running.ends_before(rng.uniform(0, 1.0)):
        running.result()
        return Counter(worker=1), True
    running.kill([])
    return Counter(worker=1, command=1), False


def kill_command(what: str, count: int, seed: int, folder: Path, jobs: int, warm: Nest) -> tuple[Counter[str], int]:
    """Kill a command so often, from the beginning again whenever it came to its end; what was killed, and its ends."""
    rng, killed, finished = np.random.default_rng(seed), Counter[str](), 0
    whole = Place(what, folder / "whole", jobs, warm)
    began = time.monotonic()
    expected = whole.outcome(whole.start().result())
    seconds, spent = min(10.0, time.monotonic() - began), whole.spent()
    while killed.total() < count:
        place, before, done = Place(what, folder / f"killed{finished}", jobs, warm), killed.total(), False
        while not done and killed.total() < min(count, before + 8):
            hit, done = one_kill(place.start(), rng.uniform(0, 0.8 * seconds), rng)
            seconds *= 1.1 if hit else 0.7  # as fast as the machine is at the moment, which others use
            killed += hit
            place.check()
        assert place.outcome(place.start().result()) == expected  # given again, what is done is told again
        place.check()
        assert all(least <= stated <= max(spent) for least, stated in zip(spent, place.spent(), strict=True))
        finished += 1
    return killed, finished


@pytest.mark.parametrize("what", COMMANDS)
def test_killed_it_goes_on_to_the_same_result(what: str, tmp_path: Path, warm: Nest) -> None:
    kill_command(what, 1, 7, tmp_path, 1, warm)


@pytest.mark.attack
def test_a_run(tmp_path: Path, warm: Nest, campaign: Campaign) -> None:
    killed, finished = kill_command("run", campaign.size(200, least=4), 24, tmp_path, 1, warm)
    campaign.did("kills of `homebody run`", killed.total(), **killed, runs_finished=finished)


@pytest.mark.attack
def test_a_study(tmp_path: Path, warm: Nest, campaign: Campaign) -> None:
    killed, finished = kill_command("tune", campaign.size(100, least=4), 25, tmp_path, 2, warm)
    campaign.did("kills of `homebody tune` and its workers", killed.total(), **killed, studies_finished=finished)


@pytest.mark.attack
def test_a_reproduction(tmp_path: Path, warm: Nest, campaign: Campaign) -> None:
    killed, finished = kill_command("reproduce", campaign.size(100, least=4), 26, tmp_path, 2, warm)
    campaign.did("kills of `homebody reproduce` and its workers", killed.total(), **killed, finished=finished)

"""A thousand times kill -9, of every kind of process, at any moment and under load.

What was acknowledged is not lost, no charge is lost or doubled, every ledger's chain is whole, and where a run is
deterministic it ends as one that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.attacks.conftest import Campaign
from tests.cli.test_run import ledger_of, rounds_of
from tests.cli.test_tune import outcome, study_in
from tests.deploy.conftest import World, few, world  # noqa: F401
from tests.deploy.test_shuffling import K, Keys
from tests.deploy.test_shuffling import check as check_reports
from tests.deploy.test_shuffling import plan as shuffled_plan
from tests.proxy.conftest import Device, Load, Process, Sink, made, sink, started, wait_until  # noqa: F401
from tests.studies.conftest import TINY

from homebody.data import Population
from homebody.deploy.admin import opened
from homebody.privacy import Ledger
from homebody.proxy.admin import report
from homebody.recipe import Recipe

pytestmark = pytest.mark.attack

START = [sys.executable, "-P", "-c", "from homebody.cli import main; main()"]
CALM = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
DATA = "synthetic:users=200,items=150,mean=15"
RUN = ["run", "pfedrec", "--data", DATA, "--rounds", "150", "--json"]
TUNE = ["tune", "fedmf", "--data", DATA, "--rounds", "60", "--set", "factors=4", "--trials", "6", "--json"]


def disturb(federation: World, count: int, names: list[str], rng: np.random.Generator) -> Counter[str]:
    """Kill so many processes of a federation, one after the other, each after some progress."""
    killed: Counter[str] = Counter()
    children = {"trainer": federation.trainer, "link": federation.link, "intake": federation.intake}
    for _ in range(count):
        before = federation.said("server", "opened")
        wait_until(
            lambda before=before: (
                federation.said("server", "opened") > before or federation.processes["server"].poll() is not None
            ),
            f"training goes on after {killed}: {(federation.folder / 'server.log').read_text()[-2000:]}",
            600,
        )
        assert federation.processes["server"].poll() is None, "The training was over before the campaign."
        time.sleep(rng.uniform(0, 0.4))
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


def given_up(federation: World) -> dict[int, int]:
    """How many attempts those rounds took that were given up: a device that was silent for long is not waited for."""
    names = [one["release"].partition("#")[0] for one in federation.log("server") if one["event"] == "abandoned"]
    return {int(name.rpartition("/")[2]): count + 1 for name, count in Counter(names).items()}


def verify(federation: World) -> None:
    with opened(federation.server) as (_, records):
        records.ledger().verify()
    for name in ("server", "device0", "device1"):
        assert "Traceback" not in (federation.folder / f"{name}.log").read_text()


def test_every_process_of_a_federation(
    few: Population,  # noqa: F811
    world: Callable[..., World],  # noqa: F811
    campaign: Campaign,
) -> None:
    """Devices hold private states, and the model is the simulator's at the end."""
    count = campaign.size(200, least=4)
    recipe = Recipe("pfedrec", "devices", rounds=3 * count + 20, seed=4, evaluate_every=0)
    federation = world(few, 2, recipe, deadline=600.0)
    federation.start(once=True)
    names = ["trainer", "link", "device0", "device1", "server"]
    killed = disturb(federation, count, names, np.random.default_rng(21))
    assert _finished(federation) == 0
    attempts = given_up(federation)
    federation.check(attempts=attempts)
    verify(federation)
    campaign.did("kills in a federation", killed.total(), **killed, rounds_tried_again=len(attempts))


def test_every_process_of_a_shuffled_federation(
    few: Population,  # noqa: F811
    world: Callable[..., World],  # noqa: F811
    campaign: Campaign,
) -> None:
    """Every report of every round is counted exactly once."""
    count = campaign.size(250, least=4)
    rounds = 2 * count + 20
    federation = world(few, 2, shuffled_plan(rounds), shuffling={"least_devices": 2}, deadline=600.0)
    keys = Keys(federation.server)
    try:
        federation.start(once=True)
        names = ["trainer", "link", "intake", "proxy", "device0", "device1", "server"]
        killed = disturb(federation, count, names, np.random.default_rng(22))
        assert _finished(federation) == 0
    finally:
        secrets = keys.stop()
    attempts = given_up(federation)
    if attempts:
        federation.check(attempts=attempts, exact=False)
    else:
        check_reports(federation, rounds, secrets)
    with opened(federation.server) as (_, records):
        arrived = [count for (count,) in records.database.execute("SELECT arrived FROM epoch").fetchall()]
        assert max(arrived) == K * few.n_users, "No report is counted twice."
        assert arrived.count(K * few.n_users) >= rounds, "No report of a round that is done is lost."
    verify(federation)
    campaign.did("kills in a shuffled federation", killed.total(), **killed, rounds_tried_again=len(attempts))


def _finished(federation: World) -> int:
    process = federation.processes["server"]
    wait_until(lambda: process.poll() is not None, "the training ends", 3600)
    return int(process.returncode)


def test_a_proxy_under_load(
    made: Callable[..., Any],  # noqa: F811
    started: Callable[..., Process],  # noqa: F811
    sink: Sink,  # noqa: F811
    campaign: Campaign,
) -> None:
    """Every report that was acknowledged arrives exactly once."""
    count = campaign.size(150, least=2)
    rng = np.random.default_rng(23)
    sink.k, sink.cut = 1_000_000, 0.2
    devices = [Device() for _ in range(4)]
    proxy = started(*made(*devices, hold=0.2, most=1_000_000, batch=2000))
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


def test_a_run(tmp_path: Path, campaign: Campaign) -> None:
    count = campaign.size(200, least=2)
    rng, kills, finished = np.random.default_rng(24), 0, 0
    whole_result, whole, seconds = _undisturbed(tmp_path, RUN)
    while kills < count:
        out = tmp_path / f"killed{finished}"
        command, began = RUN, kills
        while kills < count and kills < began + 10:
            hit = _killed(
                [*command, *(() if "--resume" in command else ("--out", str(out)))], rng.uniform(0, 0.7 * seconds)
            )
            if not hit:
                break
            kills += 1
            for run in out.glob("*/recipe.toml"):
                command = ["run", "--resume", str(run.parent), "--json"]
                if (run.parent / "ledger.sqlite").exists():
                    _covered(run.parent)
        if "--resume" not in command:  # killed before there was a folder
            command = [*command, "--out", str(out)]
        found = _result(command)
        run = Path(found["run"])
        assert found["metrics"] == whole_result["metrics"]
        assert rounds_of(run) == rounds_of(whole)
        assert ledger_of(run) == ledger_of(whole)
        assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in whole.iterdir())
        finished += 1
    campaign.did("kills of `homebody run`", kills, runs_finished=finished)


def _covered(run: Path) -> None:
    """Every round that is recorded was charged before, once."""
    ledger = Ledger(run / "ledger.sqlite")  # verifies the chain
    names = [(entry.release, entry.observer, entry.unit) for entry in ledger.entries()]
    ledger.close()
    assert len(set(names)) == len(names)
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    done = {json.loads(line)["round"] for line in lines if line.endswith("}")}
    assert {f"train/{number}" for number in done} <= {name for name, *_ in names}


def test_a_study(tmp_path: Path, campaign: Campaign) -> None:
    count = campaign.size(100, least=2)

    def command(out: Path) -> list[str]:
        return [*TUNE, "--jobs", "2", "--out", str(out)]

    def check(out: Path, wanted: Path) -> None:
        assert outcome(study_in(out)) == outcome(study_in(wanted))

    killed, finished = _studies(tmp_path, count, command, check, np.random.default_rng(25))
    campaign.did("kills of `homebody tune` and its workers", killed.total(), **killed, studies_finished=finished)


def test_a_reproduction(tmp_path: Path, campaign: Campaign) -> None:
    count = campaign.size(100, least=2)
    paper = tmp_path / "tiny"
    paper.mkdir()
    (paper / "recipe.toml").write_text(TINY.replace("rounds = 3", "rounds = 40").replace("rounds = 2", "rounds = 40"))

    def command(out: Path) -> list[str]:
        return ["reproduce", str(paper), "--jobs", "2", "--json", "--out", str(out)]

    def check(out: Path, wanted: Path) -> None:
        one, other = (json.loads((place / "reproduce/tiny/result.json").read_text()) for place in (out, wanted))
        assert _timeless(one["studies"]) == _timeless(other["studies"])

    killed, finished = _studies(tmp_path, count, command, check, np.random.default_rng(26))
    campaign.did("kills of `homebody reproduce` and its workers", killed.total(), **killed, finished=finished)


def _timeless(value: Any) -> Any:
    """Without what differs from one undisturbed run to the next."""
    if isinstance(value, dict):
        times = ("seconds", "rss", "cpu", "started", "began", "ended", "time")
        return {key: _timeless(one) for key, one in value.items() if not any(word in key for word in times)}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def _studies(
    folder: Path,
    count: int,
    command: Callable[[Path], list[str]],
    check: Callable[[Path, Path], None],
    rng: np.random.Generator,
) -> tuple[Counter[str], int]:
    """Kill a command or one of its workers, again and again, and give it again until it is done."""
    began = time.monotonic()
    _result(command(folder / "whole"))
    seconds = time.monotonic() - began
    killed, finished = Counter[str](), 0
    while killed.total() < count:
        out, before = folder / f"killed{finished}", killed.total()
        while killed.total() < min(count, before + 8):
            kind = ["command", "worker"][rng.integers(2)]
            if not _killed(command(out), rng.uniform(0, 0.7 * seconds), worker=kind == "worker"):
                break
            killed[kind] += 1
            for ledger in out.glob("**/ledger.sqlite"):
                _covered(ledger.parent)
        _result(command(out))
        check(out, folder / "whole")
        for ledger in out.glob("**/ledger.sqlite"):
            twin = folder / "whole" / ledger.relative_to(out)
            assert ledger_of(ledger.parent) == ledger_of(twin.parent)
        finished += 1
    return killed, finished


def _undisturbed(folder: Path, command: list[str]) -> tuple[dict[str, Any], Path, float]:
    began = time.monotonic()
    found = _result([*command, "--out", str(folder / "whole")])
    return found, Path(found["run"]), time.monotonic() - began


def _result(command: list[str]) -> dict[str, Any]:
    done = subprocess.run([*START, *command], env=CALM, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _killed(command: list[str], seconds: float, *, worker: bool = False) -> bool:
    """Start a command, and kill it or one of its workers after so long; False if it was done before.

    The workers of a command that was killed end by themselves; the next begins once they have.
    """
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*START, *command], env=CALM, **quiet)  # type: ignore[call-overload]
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    workers: list[psutil.Process] = []
    hit = process.poll() is None
    if hit:
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process.pid).children(recursive=True)
        if worker and workers:
            with suppress(psutil.NoSuchProcess):
                workers[0].kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)  # it may go on without it, or end
        process.kill()
    _, said = process.communicate()
    assert b"Traceback" not in said, said[-3000:]
    psutil.wait_procs(workers, timeout=60)
    return hit

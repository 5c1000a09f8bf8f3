"""`tune` and `reproduce` killed with SIGKILL at random moments, with their workers: the same command goes on to the
same result, and nothing that a trial or a cell charged is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from homebody.privacy import Entry, Ledger

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
"""
COMMANDS = {
    "tune": ["tune", "fedmf", "--data", DATA, "--rounds", "12", "--trials", "2", *NOISED],
    "reproduce": ["reproduce", "tiny", "--rounds", "12"],
}
TIMES = ("seconds", "run_seconds", "date", "study", "folder", "run")
CALM = {**os.environ, "NUMBA_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
"""A worker's threads are part of what shapes a release, so they are the same each time."""


def begun(what: str, place: Path, jobs: int) -> subprocess.Popen[bytes]:
    (place / "experiments" / "tiny").mkdir(parents=True, exist_ok=True)
    (place / "experiments" / "tiny" / "recipe.toml").write_text(PAPER)
    script = "import sys; from homebody.cli import main; sys.argv[0] = 'homebody'; main()"
    command = [sys.executable, "-c", script, *COMMANDS[what], "--jobs", str(jobs), "--out", "runs", "--json"]
    return subprocess.Popen(command, cwd=place, env=CALM, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(what: str, place: Path, jobs: int) -> dict[str, Any]:
    """The command's JSON, its times and places aside."""
    process = begun(what, place, jobs)
    out, err = process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = timeless(json.loads(out))
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name not in TIMES}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def ledgers(place: Path) -> dict[str, list[Entry]]:
    found = {}
    for file in sorted(place.rglob("ledger.sqlite")):
        ledger = Ledger(file)
        found[str(file.relative_to(place))] = ledger.entries()
        ledger.close()
    return found


def acknowledged(place: Path) -> set[str]:
    """Cells that have their result: whoever saw it may rely on it."""
    return {str(file.relative_to(place)) for file in place.rglob("result.json")}


def kill(process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """The parent, or one of its workers, or all at once."""
    own = psutil.Process(process.pid)
    workers = own.children(recursive=True)
    victims = chance.choice([[own], [own, *workers], chance.sample(workers, min(1, len(workers))) or [own]])
    for one in victims:
        try:
            one.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    if own not in victims:  # a worker's death costs the command one retry
        time.sleep(chance.random())
        process.kill()
    process.communicate()


def killed(what: str, kills: int, seed: int, tmp_path: Path, jobs: int) -> int:
    """Kill a command so often that is under way, then let it end; how many kills met it at work."""
    chance = random.Random(seed)
    began = time.monotonic()
    expected, whole = finished(what, tmp_path / "whole", jobs), time.monotonic() - began
    place, met = tmp_path / "killed", 0
    charged: dict[str, list[Entry]] = {}
    known: set[str] = set()
    for _ in range(kills):
        process = begun(what, place, jobs)
        try:
            process.wait(timeout=whole * chance.uniform(0.2, 1.0))
            process.communicate()
        except subprocess.TimeoutExpired:
            kill(process, chance)
            met += 1
        now = ledgers(place)
        for name, entries in charged.items():
            assert now[name][: len(entries)] == entries  # append-only, over every kill
        assert known <= acknowledged(place)
        charged, known = now, acknowledged(place)
    assert finished(what, place, jobs) == expected
    ended = ledgers(place)
    assert ended == ledgers(tmp_path / "whole")  # nothing lost, and nothing charged twice
    for name, entries in charged.items():
        assert ended[name][: len(entries)] == entries
    assert not list(place.rglob("*.partial"))
    return met


@pytest.mark.parametrize("what", COMMANDS)
def test_killed_it_goes_on_to_the_same_result(what: str, tmp_path: Path) -> None:
    killed(what, 1, 7, tmp_path, jobs=1)


@pytest.mark.attack
@pytest.mark.parametrize("what", COMMANDS)
def test_killed_at_many_moments(what: str, campaign: Any, tmp_path: Path) -> None:
    """Five times from the beginning, since a command that is killed often enough comes to its end."""
    times, met = campaign.size(5), 0
    for seed in range(times):
        met += killed(what, 8, seed, tmp_path / str(seed), jobs=2)
    campaign.did(f"kills of `{what}` and its workers", 8 * times, met_at_work=met)

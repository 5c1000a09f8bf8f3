"""`homebody run`, as a person at a keyboard meets it: real processes, and real kills.

Processes start warm (`tests.warm`) but for two that start as a person starts them: what they give must be the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.warm import Nest

from homebody.privacy import Entry, Ledger

HOMEBODY = str(Path(sysconfig.get_path("scripts")) / "homebody")
KEYS = {
    "method",
    "data",
    "protocol",
    "seed",
    "rounds",
    "metrics",
    "epsilon",
    "bytes_up",
    "bytes_down",
    "seconds",
    "seconds_per_round",
    "peak_rss_mb",
    "run",
}
LONG = ["run", "pfedrec", "--data", "synthetic:users=200,items=150,mean=15", "--rounds", "150", "--evaluate-every", "5"]
LONG += ["--json"]
"""Takes long enough for a checkpoint or two, and for kills."""
CALM = {**os.environ, "NUMBA_NUM_THREADS": "1"}
"""Tests run side by side: threads that wait for one another's cores would take most of the time."""


def call(*arguments: str, cwd: Path, warm: Nest | None = None) -> subprocess.CompletedProcess[str]:
    run = subprocess.run if warm is None else warm.run
    return run([HOMEBODY, *arguments], cwd=cwd, env=CALM, capture_output=True, text=True)


def result(*arguments: str, cwd: Path, warm: Nest | None = None) -> dict[str, Any]:
    """The one JSON object a command prints, and nothing else."""
    done = call(*arguments, cwd=cwd, warm=warm)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("}\n")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """What a command that failed said: one line, exit code 2, nothing on stdout."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    line = done.stderr.strip()
    assert "\n" not in line
    assert line.startswith("homebody: ")
    return line


def ledger_of(run: Path) -> list[Entry]:
    ledger = Ledger(run / "ledger.sqlite")
    entries = ledger.entries()
    ledger.close()
    return entries


def rounds_of(run: Path) -> list[dict[str, Any]]:
    """The recorded rounds, their times aside."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in lines]


def test_one_object_on_stdout_the_same_each_time_and_another_with_another_seed(tmp_path: Path, warm: Nest) -> None:
    command = ["run", "pfedrec", "--data", "synthetic", "--rounds", "8", "--json"]
    first, again = result(*command, cwd=tmp_path), result(*command, cwd=tmp_path, warm=warm)
    other = result(*command, "--seed", "1", "--out", "elsewhere", cwd=tmp_path, warm=warm)
    assert set(first) >= KEYS
    assert (first["method"], first["data"], first["protocol"], first["seed"]) == ("pfedrec", "synthetic", "strict", 0)
    assert set(first["metrics"]) >= {"hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10"}
    assert first["epsilon"] == {"server": "inf", "clients": "inf", "public": "inf"}
    assert first["rounds"] == 8
    assert min(first[key] for key in ("bytes_up", "bytes_down", "seconds", "seconds_per_round", "peak_rss_mb")) > 0
    assert again["metrics"] == first["metrics"]
    assert again["run"] != first["run"]
    assert other["metrics"] != first["metrics"]
    assert Path(first["run"]).parent == Path("runs")
    assert Path(other["run"]).parent == Path("elsewhere")
    assert rounds_of(tmp_path / first["run"]) == rounds_of(tmp_path / again["run"])
    assert ledger_of(tmp_path / first["run"]) == ledger_of(tmp_path / again["run"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Nest) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    found = result(*LONG, cwd=folder, warm=warm)
    return found, folder / found["run"]


def killed(command: list[str], cwd: Path, warm: Nest, moment: Callable[[], bool]) -> bool:
    """Start a command and kill it at a moment; False if it was done before."""
    process = warm.popen([HOMEBODY, *command], cwd=cwd, env=CALM, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not moment():
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return bool(process.returncode == -signal.SIGKILL)


def some(folder: Path, pattern: str) -> Callable[[], bool]:
    return lambda: any(True for _ in folder.glob(f"runs/*/{pattern}"))


@pytest.mark.parametrize(
    "patterns",
    [["metrics.jsonl"], ["state-*.safetensors", ".state-*.partial"], [".*.partial", ".lock", "state.json"]],
    ids=["before a checkpoint", "after one and again amid the next", "three times"],
)
def test_a_run_that_was_killed_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], Path], patterns: list[str], warm: Nest
) -> None:
    expected, whole = undisturbed
    command = LONG
    kills = 0
    for pattern in patterns:
        kills += killed(command, tmp_path, warm, some(tmp_path, pattern))
        runs = [path.parent for path in tmp_path.glob("runs/*/recipe.toml")]
        if runs:
            (run,) = runs
            command = ["run", "--resume", str(run), "--json"]
    assert kills
    found = result(*command, cwd=tmp_path, warm=warm)
    run = tmp_path / found["run"]
    assert found["metrics"] == expected["metrics"]
    assert found["chosen_round"] == expected["chosen_round"]
    assert (found["bytes_up"], found["bytes_down"]) == (expected["bytes_up"], expected["bytes_down"])
    assert rounds_of(run) == rounds_of(whole)
    assert ledger_of(run) == ledger_of(whole)
    assert ledger_of(run)[-1].hash == ledger_of(whole)[-1].hash
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_what_is_said_before_training_is_not_repeated_in_the_same_place(tmp_path: Path, warm: Nest) -> None:
    rows = ["user,item,same"] + [f"u{user},i{(user + step) % 9},x" for user in range(12) for step in range(5)]
    (tmp_path / "own.csv").write_text("\n".join(rows) + "\n")
    words = [HOMEBODY, "run", "popularity", "--data", "own.csv"]
    into = {"cwd": tmp_path, "env": CALM, "text": True, "stdout": subprocess.PIPE}
    together = warm.run(words, stderr=subprocess.STDOUT, **into)
    apart = warm.run(words, stderr=subprocess.PIPE, **into)
    assert (together.returncode, apart.returncode) == (0, 0)
    assert together.stdout.count("left out same") == 1
    assert (apart.stdout.count("left out same"), apart.stderr.count("left out same")) == (1, 1)


def test_a_finished_run_says_its_result_again(undisturbed: tuple[dict[str, Any], Path], warm: Nest) -> None:
    expected, run = undisturbed
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != ".lock"}
    assert result("run", "--resume", str(run), "--json", cwd=run, warm=warm) == {**expected, "run": str(run)}
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir() if path.name != ".lock"} == before


def test_a_second_process_is_refused_while_the_first_works(tmp_path: Path, warm: Nest) -> None:
    process = warm.popen(
        [HOMEBODY, *LONG, "--rounds", "100000"],
        cwd=tmp_path,
        env=CALM,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not some(tmp_path, "metrics.jsonl")():
        time.sleep(0.01)
    (run,) = tmp_path.glob("runs/*")
    refused = call("run", "--resume", str(run), "--json", cwd=tmp_path, warm=warm)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)  # a person presses Ctrl-C
    output, errors = process.communicate()
    assert f"Another process is working on {run}" in sentence(refused)
    assert (process.returncode, output) == (130, b"")
    go_on = f"Go on with `homebody run --resume {run.relative_to(tmp_path)}`."
    assert errors.decode().strip() == f"homebody: interrupted. {go_on}"


def test_a_resumed_run_takes_no_other_options(undisturbed: tuple[dict[str, Any], Path], warm: Nest) -> None:
    _, run = undisturbed
    for option in (("--rounds", "9"), ("--set", "factors=3"), ("--out", "elsewhere")):
        refused = call("run", "--resume", str(run), *option, "--json", cwd=run, warm=warm)
        assert f"leave out {option[0]}." in sentence(refused)


def test_a_file_of_ones_own(tmp_path: Path, warm: Nest) -> None:
    rows = [f"person {user},book {(user * 7 + step * step) % 23}" for user in range(12) for step in range(6)]
    (tmp_path / "my.csv").write_text("\n".join(["u,i", *rows]) + "\n")
    arguments = ["run", "fedmf", "--data", "my.csv", "--user-col", "u", "--item-col", "i", "--rounds", "2", "--json"]
    found = result(*arguments, cwd=tmp_path, warm=warm)
    assert (found["data"], found["rounds"]) == ("my.csv", 2)
    # The run is whole without the folder it was started from.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked = ["recommend", str(tmp_path / found["run"]), "--user", "person 3", "--json"]
    items = result(*asked, cwd=elsewhere, warm=warm)["items"]
    assert items
    assert all(item["item"].startswith("book ") for item in items)
    owned = {row.split(",")[1] for row in rows if row.startswith("person 3,")}
    assert not owned & {item["item"] for item in items}


def test_a_method_of_ones_own_is_found_again_from_anywhere(tmp_path: Path, warm: Nest) -> None:
    (tmp_path / "mine.py").write_text(
        "from homebody.core import About\nfrom homebody.methods.fedmf import FedMF\n\n\n"
        "class Mine(FedMF):\n    about = About(rounds=3)\n"
    )
    arguments = ["--data", "synthetic:users=20,items=30,mean=6", "--json"]
    found = result("compare", "mine.py:Mine", "--seeds", "1", *arguments, cwd=tmp_path, warm=warm)
    (run,) = found["methods"][0]["runs"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked = ["recommend", str(tmp_path / run), "--user", "3", "-k", "4", "--json"]
    done = call(*asked, "--trust-code", cwd=elsewhere, warm=warm)
    assert "mine.py (SHA-256 " in done.stderr
    assert len(json.loads(done.stdout)["items"]) == 4
    assert "--trust-code" in call(*asked, cwd=elsewhere, warm=warm).stderr


def test_a_failure_in_a_real_process(tmp_path: Path) -> None:
    done = call("run", "pfedrek", "--data", "synthetic", "--out", "runs", "--json", cwd=tmp_path)
    assert "There is no method 'pfedrek'; did you mean 'pfedrec'?" in sentence(done)
    assert list(tmp_path.iterdir()) == []

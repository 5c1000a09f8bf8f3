"""`homebody tune`: what it prints, what it keeps, and that a kill costs little."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import COMMAND, wait_until
from tests.warm import Nest

from homebody.cli import main
from homebody.studies import adaptive
from homebody.studies import tune as studies_tune

DATA = "synthetic:users=60,items=40,mean=10"
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "biased_mf.py"
TUNE = ["tune", "fedials", "--data", DATA, "--rounds", "2", "--jobs", "1", "--strategy", "even"]

SLOW = '''
import time
from dataclasses import dataclass
from pathlib import Path

from homebody.methods.fedials import FedIALS
from homebody.settings import Range, param

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Slow(FedIALS):
    """Each round takes a while, until it need not."""

    factors: int = param(4, "size of a vector", low=1, search=(2, 4, 6, 8))

    def init_shared(self, catalogue, rng):
        with (HERE / "begun").open("a") as log:
            log.write(f"{self.factors} {self.regularisation}\\n")
        return super().init_shared(catalogue, rng)

    def server(self, shared, state, total):
        if not (HERE / "awake").exists():
            time.sleep(0.4)
        return super().server(shared, state, total)
'''


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str, columns: int = 200) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output, errors

    return run


def outcome(study: dict[str, Any]) -> dict[str, Any]:
    """A study without times and places."""
    trials = [{name: trial[name] for name in ("fields", "status", "validation")} for trial in study["trials"]]
    return {"trials": trials, "best": {**study["best"], "command": ""}, "complete": study["complete"]}


def study_in(out: Path) -> dict[str, Any]:
    (path,) = out.glob("tune-*/study.json")
    study: dict[str, Any] = json.loads(path.read_text())
    return study


def test_the_table_names_what_was_varied_and_the_best(run: Any, tmp_path: Path) -> None:
    code, output, _ = run(*TUNE, "--trials", "3", "--set", "factors=4", "--out", str(tmp_path))
    assert code == 0
    study = study_in(tmp_path)
    best = study["best"]
    assert list(study["spec"]["search"]) == ["confidence", "regularisation"]
    ordered = sorted(study["trials"], key=lambda trial: -trial["validation"])
    rows = [line.split() for line in output.splitlines() if line.strip()[:1].isdigit()]
    assert [int(row[0]) for row in rows] == [trial["trial"] for trial in ordered]
    assert rows[0][1:4] == [*map(str, ordered[0]["fields"].values()), f"{best['validation']:.4f}"]
    assert f"ndcg@10 {best['test']['ndcg@10']:.4f}" in output
    assert f"run it: {best['command']}" in output
    assert "--set factors=4" in best["command"]


def test_a_narrow_terminal_shows_whole_numbers(run: Any, tmp_path: Path) -> None:
    arguments = ("tune", "fedmf", "--data", DATA, "--rounds", "1", "--jobs", "1", "--trials", "2")
    _, output, _ = run(*arguments, "--out", str(tmp_path), columns=80)
    assert f"{study_in(tmp_path)['best']['validation']:.4f}" in output
    assert "ndcg@10" in output


def test_json_is_one_object_and_the_same_study_again(run: Any, tmp_path: Path) -> None:
    arguments = (*TUNE, "--trials", "3", "--search", "factors=2,4", "--out", str(tmp_path), "--json")
    code, output, errors = run(*arguments)
    assert (code, errors) == (0, "")
    study = json.loads(output)
    assert study["spec"]["search"]["factors"] == "2,4"
    assert {trial["fields"]["factors"] for trial in study["trials"][1:]} <= {2, 4}
    assert json.loads(run(*arguments)[1]) == study


def test_an_adaptive_search_names_what_was_ended_early_and_its_charts(run: Any, tmp_path: Path) -> None:
    options = ["--data", DATA, "--rounds", "12", "--trials", "10", "--jobs", "1", "--out", str(tmp_path)]
    code, output, _ = run("tune", "fedmf", *options, "--search", "learning_rate=0.0001:0.4:log")
    assert code == 0
    study = study_in(tmp_path)
    pruned = sum(trial["status"] == "pruned" for trial in study["trials"])
    assert pruned > 0
    assert f"{pruned} trial{'s' if pruned > 1 else ''} ended early" in output
    (database,) = tmp_path.glob("tune-*/optuna.db")
    assert f"charts: optuna-dashboard sqlite:///{database}" in output


def test_without_optuna_settings_are_spread_evenly(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "has_optuna", lambda: False)
    monkeypatch.setattr(studies_tune, "has_optuna", lambda: False)
    options = ["--data", DATA, "--rounds", "2", "--trials", "2", "--jobs", "1", "--out", str(tmp_path)]
    code, _, errors = run("tune", "fedials", *options)
    assert code == 0
    assert "Settings are spread evenly. With Optuna, trials learn from one another: pip install '.[tune]'" in errors
    assert study_in(tmp_path)["spec"]["strategy"] == "even"
    code, _, errors = run("tune", "fedials", *options, "--strategy", "adaptive")
    assert code == 2
    assert "Adaptive search needs Optuna: pip install '.[tune]' in Homebody's clone." in errors


def test_a_file_of_ones_own_is_searched_around_its_defaults(run: Any, tmp_path: Path) -> None:
    method = f"{EXAMPLE}:BiasedMF"
    code, _, errors = run(
        "tune", method, "--data", DATA, "--rounds", "1", "--trials", "2", "--jobs", "1", "--out", str(tmp_path)
    )
    assert code == 0
    said = "BiasedMF declares no search ranges; looking around its defaults: factors 4:16, learning_rate 0.02:2:log"
    assert said in errors
    assert study_in(tmp_path)["best"]["command"].startswith(f"homebody run {method}")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--trials", "0"), "Trials must be at least 1, not 0."),
        (("--jobs", "0"), "Jobs must be at least 1, not 0."),
        (("--search", "factor=1:2"), "There is no field of FedIALS 'factor'"),
        (("--strategy", "random"), "There is no strategy 'random'"),
        (("--search", "factors=4:2"), "A range goes from a lower number to a higher one"),
        (("--set", "factors=4", "--search", "factors=2:4"), "factors is fixed and searched at once"),
        (("--rounds", "0"), "Rounds must be at least 1, not 0."),
        (("--cohort", "99"), "A cohort has 1 to"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    run: Any, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, output, errors = run(*TUNE, *arguments, "--out", str(tmp_path / "out"))
    assert (code, output) == (2, "")
    assert f"homebody: {sentence}" in errors
    assert not (tmp_path / "out").exists()


def test_methods_shows_where_tune_looks(run: Any) -> None:
    _, output, _ = run("methods", "fedmf")
    assert "0.01:1:log" in output
    (described,) = json.loads(run("methods", "fedmf", "--json")[1])["methods"]
    search = {field["name"]: field["search"] for field in described["fields"]}
    assert search["factors"] == "16,32,64"
    assert search["batch_size"] is None


def test_interrupted_it_says_how_to_go_on(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("homebody.studies.tune.run_cells", stopped)
    code, output, errors = run(*TUNE, "--out", str(tmp_path))
    assert (code, output) == (130, "")
    assert errors.splitlines()[-1] == "homebody: interrupted. The same command goes on from here."


@pytest.mark.parametrize("strategy", ["even", "adaptive"])
def test_killed_and_started_again_it_ends_the_same(
    run: Any, tmp_path: Path, warm: Nest, warm_workers: None, strategy: str
) -> None:
    """Of an adaptive search, the first settings do not depend on which trial ends first, and none is ended early."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    begun = tmp_path / "begun"

    def command(out: str) -> list[str]:
        options = ["--data", DATA, "--rounds", "6", "--trials", "4", "--search", "factors=2,6,8", "--json"]
        options += ["--strategy", strategy]
        return ["tune", f"{file}:Slow", *options, "--out", str(tmp_path / out)]

    parent = warm.popen([*COMMAND, *command("killed"), "--jobs", "2"])
    wait_until(lambda: begun.exists() and len(begun.read_text().splitlines()) == 4, "two trials are under way")
    # Two trials are done, and two are in the middle.
    wait_until(
        lambda: len(list((tmp_path / "killed").glob("tune-*/trials/*/metrics.jsonl"))) == 4, "both have begun to train"
    )
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) == 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=300)
    wait_until(
        lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers), "the workers end"
    )
    assert not study_in(tmp_path / "killed")["complete"]
    (tmp_path / "awake").touch()
    again = json.loads(run(*command("killed"), "--jobs", "2")[1])
    beginnings = begun.read_text().splitlines()
    assert len(set(beginnings)) == 4
    assert len(beginnings) <= 6  # a trial without a checkpoint begins again; one that is done does not
    whole = json.loads(run(*command("whole"), "--jobs", "1")[1])
    assert outcome(again) == outcome(whole) == outcome(study_in(tmp_path / "killed"))

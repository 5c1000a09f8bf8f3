"""Bad input: one clear sentence, exit code 2, and nothing half-written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from homebody.cli import main

DATA = "synthetic:users=20,items=30,mean=6"
METHODS = '''
from dataclasses import dataclass

import torch

from homebody.core import Method, Rows
from homebody.methods.fedmf import FedMF
from homebody.privacy import Channel


class Shapeless(FedMF):
    def score(self, shared, local, data, items):
        return super().score(shared, local, data, items).sum()


class Forgetful(FedMF):
    def server(self, shared, state, total):
        return {"thing": shared["item"]}, state


class Poison(FedMF):
    """Its clients send what is no number."""

    def client(self, shared, local, batch):
        update, local = super().client(shared, local, batch)
        rows = update["item"]
        return {"item": Rows(rows.index, rows.value * torch.nan, rows.size)}, local


class Undecorated(Method):
    uplink = Channel()


@dataclass(frozen=True)
class Empty(Method):
    uplink: Channel = Channel()


@dataclass(frozen=True)
class Doorless(Method):
    def init_shared(self, catalogue, rng):
        return {"item": torch.zeros(catalogue.n_items)}

    def init_local(self, shared, rng):
        return {}


@dataclass(frozen=True)
class Halfway(FedMF):
    def client(self, shared, local, batch):
        return Method.client(self, shared, local, batch)


def helper():
    return 3
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMEBODY_DATA", str(tmp_path))  # an empty shelf: nothing is read from elsewhere
    (tmp_path / "mine.py").write_text(METHODS)
    (tmp_path / "broken.py").write_text("class Mine(:\n    pass\n")
    (tmp_path / "raising.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "file").write_text("a file, not a folder")
    return tmp_path


def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it fails: one line on stderr. Anything else escapes as a traceback would."""
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capsys.readouterr()
    assert ended.value.code == 2
    assert output == ""
    assert errors.startswith("homebody: ")
    assert errors.count("\n") == 1, errors
    return errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["pfedrek"],
            "There is no method 'pfedrek'; did you mean 'pfedrec'? Known: alone, dp-als, dp-fedrec, dp-privrec, dplcf",
        ),
        (["zzz"], "There is no method 'zzz'. Known:"),
        (["mine.py"], "Name the class in mine.py as well: mine.py:MyMethod"),
        (["nowhere.py:Mine"], "There is no file"),
        (["mine.py:Poisson"], "did you mean 'Poison'?"),
        (["mine.py:helper"], "There is no method in"),
        (["mine.py:FedMF"], "There is no method in"),
        (["broken.py:Mine"], "broken.py cannot be imported: SyntaxError"),
        (["raising.py:Mine"], "raising.py cannot be imported: ModuleNotFoundError"),
        (["mine.py:Undecorated"], "dataclass"),
        (["mine.py:Empty"], "Empty must define init_shared()"),
        (["mine.py:Doorless"], "uplink"),
        (["mine.py:Halfway"], "Halfway must define client()"),
        (["mine.py:Shapeless"], "Shapeless.score() must give one number for each of 30 items"),
        (["mine.py:Forgetful"], "Forgetful.server() must keep the names and shapes"),
        (["fedmf", "--set", "factors=10000000000"], "does not fit in memory"),
        (["mine.py:Poison"], "Training diverged in round 1: 'item' is no longer finite"),
        (["fedmf", "--data", "ml-10m"], "There is no dataset 'ml-10m'; did you mean"),
        (["fedmf", "--data", "nowhere.csv"], "nowhere.csv"),
        (["fedmf", "--data", "synthetic:user=3"], "did you mean 'users'?"),
        (["fedmf", "--data", "synthetic:users=3,items=2,mean=2"], "has the 3 interactions that leave-one-out needs"),
        (["fedmf", "--data-dir", "nowhere", "--data", "ml-100k"], "The data folder nowhere"),
        (["fedmf", "--set", "factor=3"], "There is no field of fedmf 'factor'; did you mean 'factors'?"),
        (["fedmf", "--set", "factors"], "--set takes field=value, not 'factors'"),
        (["fedmf", "--set", "factors=many"], "factors must be a whole number, not 'many'"),
        (["fedmf", "--set", "factors=0"], "factors must be at least 1, not 0"),
        (["fedmf", "--set", "learning_rate=nan"], "learning_rate must be a finite number"),
        (["fedmf", "--set", "learning_rate=-1"], "learning_rate must be at least 0, not -1.0"),
        (["fedmf", "--set", "learning_rate=1e38"], "Training diverged in round 1"),
        (["popularity", "--set", "factors=3"], "There is no field of popularity 'factors'"),
        (["fedmf", "--rounds", "0"], "Rounds must be at least 1, not 0"),
        (["popularity", "--rounds", "-1"], "Rounds must be at least 1, not -1"),
        (["fedmf", "--protocol", "strikt"], "There is no protocol 'strikt'; did you mean 'strict'?"),
        (["fedmf", "--held-out", "lates"], "did you mean 'latest'?"),
        (["fedmf", "--cohort", "0"], "A cohort has 1 to 20 clients with this data, not 0"),
        (["fedmf", "--cohort", "21"], "A cohort has 1 to 20 clients with this data, not 21"),
        (["fedmf", "--cohort", "-5"], "A cohort has 1 to 20 clients with this data, not -5"),
        (["fedmf", "--device", "gpu"], "The device 'gpu' cannot be used here"),
        (["fedmf", "--device", "cuda:99"], "The device 'cuda:99' cannot be used here"),
        (["popularity", "--device", "cuda:99"], "The device 'cuda:99' cannot be used here"),
        (["fedmf", "--device", "meta"], "The device 'meta' cannot be used here"),
        (["fedmf", "--seed", "9" * 30], "seed"),
        (["fedmf", "--out", "file"], "No run can be written below file"),
        (["fedmf", "--out", "file/below/that"], "No run can be written below file/below/that"),
        (["popularity", "--out", "file"], "No run can be written below file"),
        (["fedmf", "--user-col", "u"], "--user-col is for a file of your own"),
        ([], "Give either a method to run (see `homebody methods`) or --resume RUN."),
        (["fedmf", "--resume", "file"], "Give either a method to run (see `homebody methods`) or --resume RUN."),
        (["--resume", "nowhere"], "There is no run in nowhere"),
        (["--resume", "file"], "There is no run in file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    data = [] if "--data" in arguments or "--resume" in arguments or not arguments else ["--data", DATA]
    assert said in failure(monkeypatch, capsys, "run", *arguments, *data, "--json")
    runs = here / "runs"
    assert not runs.exists() or list(runs.iterdir()) == []
    assert (here / "file").read_text() == "a file, not a folder"


@pytest.mark.parametrize("seed", ["-1", "9223372036854775807"])
def test_any_whole_number_of_64_bits_is_a_seed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    command = ["run", "fedmf", "--data", DATA, "--rounds", "1", "--cohort", "3", "--seed", seed, "--json"]
    monkeypatch.setattr(sys, "argv", ["homebody", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert f'"seed": {seed}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fedmf", "pfedrek"], "did you mean 'pfedrec'?"),
        (["fedmf", "--seeds", "0"], "Seeds must be at least 1, not 0"),
        (["fedmf", "--rounds", "0"], "Rounds must be at least 1, not 0"),
        (["fedmf", "--cohort", "99"], "A cohort has 1 to 20 clients"),
        (["fedmf", "--protocol", "open"], "There is no protocol 'open'"),
        (["fedmf", "--out", "file"], "No run can be written below file"),
        (["popularity", "fedmf", "--device", "gpu"], "The device 'gpu' cannot be used here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_compare(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in failure(monkeypatch, capsys, "compare", *arguments, "--data", DATA, "--json")
    assert not (here / "runs").exists() or list((here / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nowhere"], "There is no run in nowhere"),
        (["show", "file"], "There is no run in file"),
        (["recommend", "nowhere", "--user", "1"], "There is no run in nowhere"),
        (["methods", "fedmg"], "There is no method 'fedmg'; did you mean 'fedmf'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_other_commands(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in failure(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [["run", "fedmf", "--rounds", "many"], ["run", "fedmf", "--evaluate-every", "0"], ["fly"], ["run", "--speed", "3"]],
    ids=" ".join,
)
def test_what_the_command_line_itself_refuses(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert "Usage:" in errors
    assert not (here / "runs").exists()

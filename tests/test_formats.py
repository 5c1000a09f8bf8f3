"""Files that the last version wrote: today's code opens them, reads the same from them, and continues from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.federation.conftest import Clock, Mail
from typer.testing import CliRunner

from homebody import run_notes
from homebody.cli import app
from homebody.federation import wire
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.envelopes import open_envelope
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender, VerifiedMessage
from homebody.federation.server.admin import opened
from homebody.federation.server.runtime import Flower
from homebody.privacy import Ledger
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import reopen, resume
from homebody.training import fit

FILES = Path(__file__).parent / "fixtures" / "0.1.0"
TIMES = {"seconds", "seconds_per_round", "evaluation_seconds", "compile_seconds", "cpu_seconds", "peak_rss_mb", "run"}


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Copies files of the last version to a folder of the test's own, with the permissions that they had."""

    def copied(name: str) -> Path:
        shutil.copytree(FILES / name, tmp_path / name)
        for path in (tmp_path / name).rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        return tmp_path / name

    return copied


def answered(*arguments: object) -> Any:
    """What a command prints as JSON."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def repeats() -> bool:
    """Whether this machine computes the same bits as the one that wrote the files."""
    then = json.loads((FILES / "runs" / "fedmf" / "finished" / "environment.json").read_text())
    packages = {name: version(name) for name in then["packages"]}
    return packages == then["packages"] and torch.backends.cpu.get_cpu_capability() == then["instructions"]


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Bit by bit where the machine allows it."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0 if repeats() else 1e-5)


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in TIMES}


@pytest.fixture
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's code, packages and machine count as those of the last version: a run continues, and no round is another
    release."""
    then = json.loads((FILES / "runs" / "fedmf" / "finished" / "environment.json").read_text())
    shaped_by_the_run = ("data_fingerprint", "method_fingerprint", "recipe_fingerprint", "outside")
    of_today = run_notes.environment

    def environment(*given: Any) -> dict[str, Any]:
        now = of_today(*given)
        return {**then, **{name: now[name] for name in shaped_by_the_run}}

    monkeypatch.setattr("homebody.run_notes.environment", environment)


@pytest.mark.parametrize(("method", "rounds"), [("fedmf", 4), ("pfedrec", 3)])
def test_an_interrupted_run_continues_to_the_same_result(
    copied: Callable[[str], Path], same_code: None, method: str, rounds: int
) -> None:
    folder = copied(f"runs/{method}")
    resume(folder / "interrupted")
    found, wanted = RunFolder.open(folder / "interrupted"), RunFolder.open(folder / "finished")
    assert [line["round"] for line in found.rounds()] == list(range(1, rounds + 1))
    assert found.read_json("result.json")["notes"] == []
    if repeats():
        old, new = timeless(wanted.read_json("result.json")), found.read_json("result.json")
        old.pop("meaning")  # a sentence, which may be reworded
        assert {name: new[name] for name in old} == old
        assert [timeless(line) for line in found.rounds()] == [timeless(line) for line in wanted.rounds()]
        assert found.ranks().to_dicts() == wanted.ranks().to_dicts()
    states = [next(one.path.glob("state-*.safetensors")) for one in (found, wanted)]
    assert states[0].name == states[1].name
    same(load_file(states[0]), load_file(states[1]))


def test_a_run_that_other_code_began_is_charged_for_every_round_that_is_run_again(
    copied: Callable[[str], Path],
) -> None:
    result = resume(copied("runs/fedmf") / "interrupted")
    assert result["rounds"] == 4
    assert result["epsilon"]["public"] == pytest.approx(4.113952090374946)  # round 3 was released twice
    assert len(result["notes"]) == 1


def test_a_finished_run_shows_its_result_and_its_model(copied: Callable[[str], Path]) -> None:
    folder = copied("runs/fedmf") / "finished"
    shown = answered("show", folder)
    assert shown["epsilon"] == {"server": "inf", "clients": 3.591309401633555, "public": 3.591309401633555}
    assert (shown["rounds"], shown["chosen_round"], shown["metrics"]["ndcg@10"]) == (4, 1, 0.3334611530503339)
    assert resume(folder)["metrics"] == shown["metrics"]
    fitted, population = reopen(folder)
    assert population.n_users == 12
    assert len(fitted.ranked(user=0, k=3)) == 3
    metrics = fitted.runtime.evaluate(fitted.method, fitted.shared).metrics
    if repeats():
        assert {name: metrics[name] for name in shown["metrics"]} == shown["metrics"]


def test_a_ledger_has_the_same_chain_and_the_same_epsilon(copied: Callable[[str], Path]) -> None:
    ledger = Ledger(copied("runs/fedmf") / "finished" / "ledger.sqlite")
    ledger.verify()
    assert [entry.release for entry in ledger.entries()] == [f"train/{n}" for n in range(1, 5) for _ in range(3)]
    assert ledger.epsilons(1e-6)["public"] == 3.591309401633555
    ledger.close()


def letters(folder: Path, device: str) -> list[tuple[str, bytes, bytes]]:
    """The letters to a device in the order in which it got them, each with its kind and its answer."""
    return [
        (path.stem.partition(f"{device}-")[2], path.read_bytes(), path.with_suffix(".answer").read_bytes())
        for path in sorted((folder / "letters").glob(f"*-{device}-*.letter"))
    ]


def answering(home: Home) -> Device:
    """A device whose waits before an answer leaves take no time."""
    clock = Clock()
    return Device(home, clock=clock.monotonic, sleep=clock.sleep)


@pytest.mark.parametrize("device", ["device0", "device1"])
def test_a_home_answers_the_same_letters_with_the_same_bytes(copied: Callable[[str], Path], device: str) -> None:
    """The first letter is of a round that the home has answered, the others are of rounds that follow."""
    folder = copied("federations/fedmf")
    with Home(folder / device) as home:
        acting = answering(home)
        for kind, letter, answer in letters(folder, device):
            found = acting.answer(letter)
            if repeats():
                assert found == answer, kind
            header, parts = wire.decode_letter(found)
            wanted, others = wire.decode_letter(answer)
            assert header == wanted
            assert parts.keys() == others.keys()


def test_a_home_sends_a_stored_answer_again_and_draws_no_new_one(copied: Callable[[str], Path]) -> None:
    """The answer was randomised on the device: working it out again would give other bytes, and another charge."""
    folder = copied("federations/noised")
    with Home(folder / "device0") as home:
        acting = answering(home)
        ((_, letter, answer),) = letters(folder, "device0")
        assert acting.answer(letter) == answer
    for person in answered("client", "ledger", folder / "device0")["people"]:
        assert (person["ledger"]["rows"], person["ledger"]["releases"], person["sent"]["answers"]) == (6, 1, 1)
        spent = {(one["observer"], one["unit"]): one["epsilon"] for one in person["certified"]}
        assert (spent["server", "user"], spent["server", "report"]) == (1.9999933391809464, 0.4999983934685588)


def test_a_home_has_its_people_history_and_recommendations(copied: Callable[[str], Path], tmp_path: Path) -> None:
    device = copied("federations/fedmf") / "device0"
    status = answered("client", "status", device)
    assert [(one["name"], one["active"], one["interactions"]) for one in status["people"]] == [
        ("person 0", True, 5),
        ("person 1", True, 7),
    ]
    assert (status["server"], status["name"], status["items"], status["model"]["step"]) == (
        "127.0.0.1:9092",
        "room 0",
        12,
        2,
    )
    answered("client", "export", device, tmp_path / "history.csv")
    rows = (tmp_path / "history.csv").read_text().splitlines()
    assert rows[:3] == ["user,item,time,rating", "person 0,i1,1000,", "person 0,i6,1001,"]
    assert len(rows) == 13
    best = answered("client", "recommend", device, "person 0")["items"]
    assert [one["item"] for one in best] == ["i3", "i7", "i5", "i9", "i10", "i4", "i8"]
    assert best[0]["score"] == pytest.approx(-0.5655182600021362, abs=1e-6)
    ledger = answered("client", "ledger", device)["people"][0]["ledger"]
    chain = "005e1bff75044e0fca8c3637e7afb41ff60b3e3f46094b41eb18440009b0250b"
    assert (ledger["rows"], ledger["releases"], ledger["hash"]) == (9, 3, chain)


def test_a_server_has_its_rounds_devices_and_epsilon(copied: Callable[[str], Path]) -> None:
    status = answered("server", "status", copied("federations/fedmf") / "server")
    assert (status["method"], status["rounds"], status["planned"], status["items"]) == ("fedmf", 2, 4, 12)
    assert [(one["name"], one["first"], one["people"]) for one in status["devices"]] == [
        ("room 0", 0, 2),
        ("room 1", 2, 1),
    ]
    assert status["measured"]["metrics"]["ndcg@10"] == 0.5810199975967407
    assert status["epsilon"] == {"server": "inf", "clients": "inf", "public": "inf"}
    noised = answered("server", "status", copied("federations/noised") / "server")
    assert set(noised["epsilon"].values()) == {1.9999933391809464}


def test_a_federation_continues_to_the_same_model(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock = copied("federations/fedmf"), Clock()
    for module in ("runtime", "letters", "aggregate"):
        monkeypatch.setattr(f"homebody.federation.server.{module}.time", clock)
    homes = [Home(folder / name) for name in ("device0", "device1")]
    mail = Mail(clock)
    with opened(folder / "server") as (plan, records):
        for known, home in zip(records.devices(), homes, strict=True):
            mail.keys[known.fingerprint] = known.public_key
            mail.devices[known.fingerprint] = answering(home)
        recipe = plan.recipe
        fitted = fit(
            recipe.build(),
            Flower(mail, records, plan),
            rounds=recipe.rounds,
            seed=recipe.seed,
            ledger=records.ledger(),
            evaluate_every=recipe.every(recipe.build()),
            on_round=records.add_round,
            checkpoints=records,
        )
        assert [line["step"] for line in records.rounds()] == [1, 2, 3, 4]
    for home in homes:
        home.close()
    same(dict(fitted.shared), load_file(folder / "shared.safetensors"))


def test_a_proxy_has_its_senders_epochs_and_reports(copied: Callable[[str], Path]) -> None:
    folder = copied("proxy")
    status = answered("proxy", "status", folder / "proxy")
    assert [status[name] for name in ("devices", "proxies", "epochs", "held")] == [2, 1, 2, 19]
    store = ProxyStore(folder / "proxy", ProxySettings.read(folder / "proxy"))
    assert [batch.reports for batch in store.under_way()] == [(folder / "batch.reports").read_bytes()]
    for path in sorted(folder.glob("*.envelope")):
        key, envelope = open_envelope(path.read_bytes())
        assert store.senders()[store.mark(key)] == Sender(False, 1)
        with store.transaction():
            assert store.accept([VerifiedMessage(key, Sender(False, 1), envelope)], now=2e9) == ["repeated"]
    with store.transaction():
        rest = store.cut()
    assert rest is not None
    assert rest.size == 6
    store.close()


def test_a_study_is_read_from_its_trials(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run again where the code is the same: the seconds are those of the last version."""
    then = json.loads((FILES / "runs" / "fedmf" / "finished" / "environment.json").read_text())
    monkeypatch.setattr("homebody.studies.cells.code_fingerprint", lambda: then["code_fingerprint"])
    folder = copied("tune")
    (study,) = folder.glob("tune-*")
    wanted = json.loads((study / "study.json").read_text())
    for name in ("study.json", "best.toml"):
        (study / name).unlink()
    asked = ["--data", "synthetic:users=12,items=16,mean=6", "--rounds", "2", "--trials", "2", "--set", "factors=2"]
    asked += ["--strategy", "even"]  # which was the only one
    found = answered("tune", "fedials", *asked, "--jobs", "1", "--out", folder)
    assert found["trials"] == wanted["trials"]
    assert found["best"] == wanted["best"]
    assert (study / "best.toml").read_text() == (FILES / "tune" / study.name / "best.toml").read_text()


def test_a_recipe_is_read_and_written_as_it_was() -> None:
    text = (FILES / "recipe.toml").read_text()
    recipe = Recipe.from_toml(text)
    assert (recipe.method, recipe.split, recipe.cohort, recipe.columns) == (
        "privrec",
        "held-out-users:test=0.2",
        20,
        {"user": "who", "item": "what"},
    )
    assert recipe.to_toml() == text

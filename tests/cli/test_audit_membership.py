"""`homebody audit RUN --attack membership`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.typed import typed

from homebody.adversary import shadows
from homebody.recipe import Recipe
from homebody.run import execute

DATA = "synthetic:users=240,items=80,mean=12"
Call = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    recipes = {
        "everyone": Recipe("fedials", DATA, rounds=2, fields={"factors": 4}, cohort=60),
        "some": Recipe("fedials", DATA, rounds=3, fields={"factors": 4}, split="held-out-users:test=0.4,valid=0.05"),
        "noised": Recipe(
            "fedmf",
            DATA,
            rounds=2,
            fields={"factors": 4},
            cohort=40,
            evaluate_every=2,
            stages=["clip:norm=1", "gaussian:z=2"],
        ),
    }
    return {name: Path(execute(recipe, out, name=name)["run"]) for name, recipe in recipes.items()}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def called(run: Path, *arguments: object, code: int = 0) -> tuple[str, str]:
        return typed(monkeypatch, capsys, "audit", run, "--attack", "membership", *arguments, code=code)

    return called


def test_a_run_that_held_people_out_is_attacked_itself(call: Call, runs: dict[str, Path]) -> None:
    out, error = call(runs["some"], "--shadows", 4, "--json")
    assert error == ""
    found = json.loads(out)
    assert (found["attack"], found["target"]) == ("membership", "the run's model")
    assert found["members"] + found["others"] == 240
    assert found["took_part"] == found["trained_on"] == found["members"]
    assert found["rounds"] == json.loads((runs["some"] / "result.json").read_text())["chosen_round"]
    assert found["epsilon"]["public"] == found["allowed"]["epsilon"] == "inf"


def test_otherwise_a_target_is_trained(call: Call, runs: dict[str, Path]) -> None:
    out, _ = call(runs["everyone"], "--shadows", 4, "--people", 200)
    assert "fedials: who was in the training? 100 members, 100 others" in out
    assert "attacked: a model trained for the audit as the run's was, on half of the people; " in out
    assert "of 120 members were in a round" in out
    assert "lists: What FedIALS shares gives nobody a list by their features alone" in out
    assert "found at 1 % false" in out
    assert "of those in a round" in out
    assert "∞ for the attacked model, ∞ for the run" in out


def test_what_is_certified_stands_beside(call: Call, runs: dict[str, Path]) -> None:
    out, _ = call(runs["noised"], "--shadows", 4, "--json")
    found = json.loads(out)
    # Half as many people to hide among: the attacked model's ε is larger than the run's.
    assert found["epsilon"]["public"] < found["allowed"]["epsilon"] < 20
    assert 0.5 < found["allowed"]["auc"] < 1
    assert not found["contradicted"]
    assert found["stages"] == ["clip:norm=1", "gaussian:z=2"]


def test_fewer_rounds_are_said(call: Call, runs: dict[str, Path]) -> None:
    found = json.loads(call(runs["some"], "--shadows", 4, "--rounds", 1, "--json")[0])
    assert (found["rounds"], found["target"]) == (1, "trained for the audit")
    assert any("Every model had 1 round," in note for note in found["notes"])
    _, error = call(runs["some"], "--rounds", 0, code=2)
    assert "Rounds must be at least 1, not 0" in error


def test_an_attack_beyond_what_is_certified_ends_with_1(
    call: Call, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = shadows.Lab.trained
    monkeypatch.setattr(shadows.Lab, "trained", lambda *given: trained(*given)._replace(epsilon=0.01))
    fedials = Recipe("fedials", "synthetic:users=240,items=80,mean=12", rounds=3, fields={"factors": 16})
    run = Path(execute(fedials, runs["some"].parent, name="overfit")["run"])
    out, _ = call(run, code=1)
    assert "CONTRADICTED: an attack gets further than the certified ε allows" in out


def test_options_of_other_attacks_are_refused(call: Call, runs: dict[str, Path]) -> None:
    _, error = call(runs["some"], "--users", 30, code=2)
    assert "--users is not for --attack membership" in error

"""`hb.audit`: attacks on a fitted model or a finished run, as frames."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from tests.cli.typed import typed

import homebody as hb
from homebody.privacy import Clip, Gaussian
from homebody.recipe import Recipe
from homebody.run import execute
from homebody.training import fit

DATA = "synthetic:users=120,items=80,mean=12"
NOISED = hb.Channel(Clip(1.0), Gaussian(z=1.0))


@pytest.fixture(scope="module")
def split() -> hb.Split:
    return hb.leave_one_out(hb.load(DATA))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stages = ["clip:norm=1", "gaussian:z=1"]
    recipe = Recipe("fedmf", DATA, rounds=3, fields={"factors": 4}, cohort=40, stages=stages)
    return Path(execute(recipe, tmp_path_factory.mktemp("runs"), name="noised")["run"])


def test_a_fitted_model_and_its_run_are_attacked_alike(split: hb.Split, run: Path) -> None:
    model = fit(hb.FedMF(factors=4, uplink=NOISED), hb.Simulator(split), rounds=3, cohort=40)
    for attack in (
        lambda what: hb.audit.interactions(what, users=20),
        lambda what: hb.audit.canary(what, canaries=100),
        lambda what: hb.audit.membership(what, people=60, shadows=4, rounds=1),
    ):
        direct, opened = attack(model), attack(run)
        assert direct.frame.equals(opened.frame)
        assert {**direct.details, "run": None, "data": None} == {**opened.details, "run": None, "data": None}
        assert opened.details["run"] == str(run)


def test_the_command_prints_what_the_function_returns(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = hb.audit.canary(run, canaries=100, seed=3)
    given = ("audit", run, "--attack", "canary", "--canaries", 100, "--seed", 3)
    out, _ = typed(monkeypatch, capsys, *given, "--json")
    assert json.loads(out) == found.details
    out, _ = typed(monkeypatch, capsys, *given)
    assert all(remark in out for remark in found.remarks)
    assert found.shown.title in out


def test_an_audit_leaves_the_model_as_it_was(split: hb.Split) -> None:
    model = fit(hb.FedMF(factors=4), hb.Simulator(split), rounds=2)
    before = model.runtime.evaluate(model.method, model.shared)
    hb.audit.canary(model, canaries=50)
    hb.audit.interactions(model, users=5)
    hb.audit.inspect(model)
    assert model.runtime.evaluate(model.method, model.shared).metrics == before.metrics


def test_the_frame_of_canaries_has_numbers_to_compare(run: Path) -> None:
    frame = hb.audit.canary(run, canaries=100).frame
    assert frame["observer"].to_list() == ["server", "clients", "public"]
    assert frame["certified"][0] == math.inf
    assert frame.select(pl.col("at_least") <= pl.col("certified")).to_series().all()
    assert not frame["contradicted"].any()
    assert (frame["certified"] <= frame["certified_for_run"]).all()


def test_rounds_that_a_budget_ended_are_audited_as_they_were(split: hb.Split) -> None:
    from homebody.privacy import Budget

    method = hb.FedMF(factors=4, uplink=NOISED)
    whole = fit(method, hb.Simulator(split), rounds=3, cohort=40)
    ended = fit(
        method, hb.Simulator(split), rounds=50, cohort=40, budget=Budget(whole.epsilon["public"] + 1e-6, whole.delta)
    )
    assert ended.stopped
    assert hb.audit.canary(ended, canaries=50).details["rounds"] == 3


def test_inspecting_a_method_and_a_model(split: hb.Split) -> None:
    method = hb.FedMF(factors=4)
    message = hb.audit.inspect(method, split, user=split.population.user_ids[3] if split.population.user_ids else "3")
    assert message.frame["bytes"].sum() == message.bytes
    assert message.frame.columns[:2] == ["part", "shape"]
    trained = hb.audit.inspect(fit(method, hb.Simulator(split), rounds=1), user="3")
    assert trained.parts == message.parts
    assert "one message of user 3" in repr(message)
    assert "is charged each round" in message._repr_html_()
    with pytest.raises(hb.HomebodyError, match="give data as well"):
        hb.audit.inspect(method)
    with pytest.raises(hb.HomebodyError, match="leave out cohort"):
        hb.audit.inspect(fit(method, hb.Simulator(split), rounds=1), cohort=3)
    with pytest.raises(hb.HomebodyError, match="it collects whole histories"):
        hb.audit.inspect("popularity", split)
    with pytest.raises(hb.HomebodyError, match="There is no user"):
        hb.audit.inspect(method, split, user="nobody")


def test_inspecting_by_name_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("inspect", "fedmf", "--data", DATA, "--user", 7, "--cohort", 30, "--stage", "clip:norm=1", "--json")
    printed = json.loads(typed(monkeypatch, capsys, *given)[0])
    message = hb.audit.inspect("fedmf", DATA, user=7, cohort=30, stages=["clip:norm=1"])
    assert json.loads(json.dumps(message.as_dict())).items() <= printed.items()
    assert printed["user"] == "7"


def test_an_audit_is_short_and_shows_its_table(run: Path) -> None:
    found = hb.audit.interactions(run, users=5)
    assert found.attack == "interactions"
    assert len(repr(found)) < 200
    assert "not contradicted" in repr(found)
    page = found._repr_html_()
    assert "whose items are whose?" in page
    assert "popularity alone" in page
    assert "stages: clip:norm=1" in page


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (lambda model: hb.audit.view(model, participations=[1.5]), "Participations are whole numbers"),
        (lambda model: hb.audit.words(model, trials=3), "Trials and confidence are for models that send reports"),
        (lambda model: hb.audit.linkage("nowhere"), "There is no run in"),
        (lambda model: hb.audit.canary(5), "takes a model of hb.fit, or the folder of a finished run, not this int"),
        (lambda model: hb.audit.canary(hb.fit("popularity", DATA, quiet=True)), "is a centralised reference"),
    ],
)
def test_misuse_is_a_sentence(run: Path, attack: Callable[[Path], object], sentence: str) -> None:
    with pytest.raises(hb.HomebodyError, match=sentence):
        attack(run)

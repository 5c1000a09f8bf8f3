"""`hb.tune`: a search from Python mirrors the command, takes what is in memory, and gives a method to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import homebody as hb
from homebody.notebook.tuning import fingerprint_of
from homebody.settings import Range
from homebody.studies import cells
from homebody.studies.tune import tune as run_trials

DATA = "synthetic:users=60,items=40,mean=10"
SETTINGS: dict[str, Any] = {"trials": 3, "rounds": 2, "strategy": "even", "quiet": True}


@pytest.fixture(scope="module")
def people() -> hb.Population:
    return hb.load(DATA)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of searches, and the trials that were run anew."""
    ran: list[str] = []
    execute = cells.execute

    def counted(*arguments: Any, **named: Any) -> Any:
        ran.append(named["name"])
        return execute(*arguments, **named)

    monkeypatch.setattr(cells, "execute", counted)
    return ran


def test_it_finds_what_the_command_finds(tmp_path: Path) -> None:
    found = hb.tune(hb.FedIALS(init_scale=0.2), DATA, out=tmp_path, **SETTINGS)
    (path,) = tmp_path.glob("tune-*/study.json")
    record = json.loads(path.read_text())
    assert {name: value for name, value in found.details.items() if name != "study"} == record
    assert isinstance(found.best, hb.FedIALS)
    assert found.best.init_scale == 0.2
    assert found.settings == record["best"]["fields"]
    assert found.metrics == record["best"]["test"]
    assert found.validation == record["best"]["validation"]
    assert found.frame["status"].to_list() == ["done"] * 3
    assert found.frame["valid/ndcg@10"].max() == found.validation
    assert "hr@10" not in "".join(found.frame.columns)


def test_the_best_can_be_fitted_and_does_as_well(people: hb.Population) -> None:
    found = hb.tune("fedials", people, **SETTINGS)
    model = hb.fit(found.best, people, rounds=2, quiet=True)
    assert model.method == found.best
    assert model.metrics["ndcg@10"] == found.metrics["ndcg@10"]


def test_stages_stay_with_the_best(people: hb.Population) -> None:
    stages = ["clip:norm=1", "gaussian:z=2"]
    found = hb.tune("fedmf", people, stages=stages, search={"factors": [2, 4]}, **SETTINGS)
    assert hb.fit(found.best, people, rounds=1, quiet=True).epsilon["public"] < float("inf")


@pytest.mark.parametrize("kind", ["split", "simulator"])
def test_what_is_in_memory_is_searched_as_what_has_a_name(people: hb.Population, kind: str) -> None:
    named = hb.tune("fedials", DATA, **SETTINGS)
    split = hb.split(people, seed=0)
    found = hb.tune("fedials", split if kind == "split" else hb.Simulator(split), **SETTINGS)
    assert found.frame["valid/ndcg@10"].to_list() == named.frame["valid/ndcg@10"].to_list()


def test_the_same_call_goes_on_and_other_data_are_another_search(
    people: hb.Population, tmp_path: Path, searched: list[str]
) -> None:
    first = hb.tune("fedials", people, out=tmp_path, **SETTINGS)
    assert len(searched) == 3
    more = hb.tune("fedials", hb.load(DATA), out=tmp_path, **{**SETTINGS, "trials": 4})
    assert len(searched) == 4
    assert more.frame.head(3).drop("seconds").equals(first.frame.drop("seconds"))
    hb.tune("fedials", hb.load(f"{DATA},seed=1"), out=tmp_path, **SETTINGS)
    assert len(searched) == 7
    assert len(list(tmp_path.glob("tune-*"))) == 2


def test_an_interrupted_search_in_memory_goes_on(people: hb.Population, tmp_path: Path, searched: list[str]) -> None:
    class Stop(BaseException):
        pass

    def stop(now: Any, record: Any) -> None:
        if now.cell == 1 and now.done:
            raise Stop

    def interrupted(*arguments: Any, **named: Any) -> Any:
        return run_trials(*arguments, **{**named, "watch": stop})

    whole = hb.tune("fedials", people, **SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("homebody.notebook.tuning.run_trials", interrupted)
        with pytest.raises(Stop):
            hb.tune("fedials", people, out=tmp_path, **SETTINGS)
    begun = len(searched)
    assert (
        hb.tune("fedials", people, out=tmp_path, **SETTINGS).frame.drop("seconds").equals(whole.frame.drop("seconds"))
    )
    assert len(searched) <= begun + 2


def test_where_to_look(people: hb.Population) -> None:
    search = {"factors": [2, 4], "regularisation": Range(0.1, 10.0, log=True), "confidence": "2:4"}
    found = hb.tune("fedials", people, search=search, **SETTINGS)
    assert found.details["spec"]["search"] == {
        "factors": "2,4",
        "regularisation": "0.1:10:log",
        "confidence": "2:4",
    }


def test_an_adaptive_search(people: hb.Population) -> None:
    pytest.importorskip("optuna", reason="no optuna: the extra `tune` is not installed")
    found = hb.tune("fedials", people, **{**SETTINGS, "trials": 8, "strategy": "adaptive"})
    assert found.details["spec"]["strategy"] == "adaptive"
    assert found.frame.height == 8


def test_it_shows_itself(people: hb.Population) -> None:
    found = hb.tune("fedials", people, **SETTINGS)
    assert repr(found).startswith(f"<Tuned: fedials on {DATA}, 3 trials; best valid/ndcg@10 {found.validation:.4f}: ")
    assert len(repr(found)) < 200
    page = found._repr_html_()
    best = page.partition("<tbody><tr>")[2].partition("</tr>")[0]
    assert f"{found.validation:.4g}" in best
    assert str(found.settings["factors"]) in best


def test_nothing_is_kept_unless_it_is_asked_for(
    people: hb.Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hb.tune("fedials", people, **SETTINGS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"jobs": 2}, "jobs=2 needs data that other processes can read"),
        ({"trials": 0}, "Trials must be at least 1, not 0."),
        ({"round": 3}, "There is no setting 'round'; did you mean 'rounds'?"),
        ({"search": {"factor": [1]}}, "There is no field of FedIALS 'factor'"),
        ({"search": {"factors": "4:2"}}, "A range goes from a lower number to a higher one"),
        ({"strategy": "random"}, "There is no strategy 'random'"),
        ({"select": "ndcg@10"}, "Trials are chosen on validation"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(people: hb.Population, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(hb.HomebodyError) as error:
        hb.tune("fedials", people, **{**SETTINGS, **given})
    assert sentence in str(error.value)


def test_a_fingerprint_covers_all_that_is_learnt_from(people: hb.Population) -> None:
    splits = [hb.split(people, seed=seed) for seed in (0, 1)]
    known = [fingerprint_of(data) for data in (people, *splits)]
    assert len(set(known)) == 3
    assert fingerprint_of(hb.load(DATA)) == known[0]
    assert fingerprint_of(hb.Simulator(splits[0])) == known[1]

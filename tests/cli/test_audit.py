"""`homebody audit`: attacks on a finished run, beside what is certified."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.typed import typed

from homebody.cli.audit import _bar
from homebody.core import Total
from homebody.privacy import Gaussian
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute

DATA = "synthetic:users=120,items=80,mean=12"
Call = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    recipes = {
        "plain": Recipe("fedmf", DATA, rounds=3, fields={"factors": 4}),
        "noised": Recipe(
            "fedmf", DATA, rounds=3, fields={"factors": 4}, cohort=40, stages=["clip:norm=1", "gaussian:z=1"]
        ),
        "summed": Recipe("pfedrec", DATA, rounds=3, fields={"factors": 4}, stages=["clip:norm=1", "secure-sum"]),
        "bits": Recipe("pfedrec", DATA, rounds=3, fields={"factors": 4}, stages=["one-bit:epsilon=1,k=5"]),
        "reference": Recipe("popularity", DATA),
    }
    return {name: Path(execute(recipe, out, name=name)["run"]) for name, recipe in recipes.items()}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return partial(typed, monkeypatch, capsys, "audit")


def found(call: Call, *arguments: object) -> dict[str, Any]:
    out, error = call(*arguments, "--json")
    assert error == ""
    assert out.count("\n") == 1
    result: dict[str, Any] = json.loads(out)
    return result


def test_the_server_reads_plain_uploads_and_noised_ones_alike(call: Call, runs: dict[str, Path]) -> None:
    plain, noised = (found(call, runs[name], "--attack", "interactions", "--users", 30) for name in ("plain", "noised"))
    assert plain["users"] == noised["users"] == 30
    assert min(plain["auc"], noised["auc"]) > 0.95
    assert plain["epsilon"] == {"server": "inf", "clients": "inf", "public": "inf"}
    assert noised["epsilon"]["server"] == "inf"
    assert 0 < noised["epsilon"]["public"] < 20
    assert noised["stages"] == ["clip:norm=1", "gaussian:z=1"]
    assert plain["interval"][0] <= plain["auc"] <= plain["interval"][1]


def test_it_reads_less_behind_a_sum_and_nothing_from_bits(call: Call, runs: dict[str, Path]) -> None:
    summed = found(call, runs["summed"], "--attack", "interactions")
    assert summed["reads"].startswith("the sum over a cohort of 120")
    assert summed["users"] == 100
    assert summed["auc"] < 0.9
    assert summed["assumes"][0].startswith("The server sees the sum of 80 of 120 parties or more")
    assert summed["assumes"][0] in call(runs["summed"], "--attack", "interactions")[0]
    assert found(call, runs["plain"], "--attack", "interactions", "--users", 5)["assumes"] == []
    bits = found(call, runs["bits"], "--attack", "interactions")
    assert bits["epsilon"]["server"] == pytest.approx(15, rel=1e-3)
    assert bits["auc"] < 0.6


def test_the_same_seed_says_the_same(call: Call, runs: dict[str, Path]) -> None:
    for attack in (["interactions", "--users", 10], ["canary", "--canaries", 200]):
        first, again, other = (found(call, runs["noised"], "--attack", *attack, "--seed", seed) for seed in (1, 1, 2))
        assert first == again
        assert first | {"seed": 2} != other


def test_canaries_stay_under_what_is_certified(call: Call, runs: dict[str, Path]) -> None:
    result = found(call, runs["noised"], "--attack", "canary", "--canaries", 60, "--trials", 2, "--confidence", 0.9)
    assert (result["canaries"], result["trials"], result["rounds"], result["confidence"]) == (60, 2, 3, 0.9)
    server, clients, public = result["observers"]
    assert server["certified"] == "inf"
    assert server["lower"]["epsilon"] > 2
    for one in (clients, public):
        assert one["lower"]["coins"] == 120
        assert one["lower"]["epsilon"] <= one["certified"] < result["epsilon"][one["observer"]]
        assert not one["contradicted"]


def test_a_contradiction_is_said_and_ends_with_1(
    call: Call, runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unchanged(self: Gaussian, total: Total, rng: Rng) -> Total:
        assert self.grid is not None
        return Total({name: self.grid.values(value) for name, value in total.sum.items()}, total.clients)

    monkeypatch.setattr(Gaussian, "server", unchanged)
    out, _ = call(runs["noised"].parent / "quiet", "--attack", "canary", code=2)
    assert out == ""
    recipe = Recipe("fedmf", DATA, rounds=1, fields={"factors": 4}, stages=["clip:norm=1", "gaussian:z=3"])
    run = execute(recipe, runs["noised"].parent)["run"]
    out, _ = call(run, "--attack", "canary", code=1)
    assert "clients: CONTRADICTED: ε is at least" in out
    result, _ = call(run, "--attack", "canary", "--json", code=1)
    assert [one["contradicted"] for one in json.loads(result)["observers"]][:2] == [False, True]


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ("interactions", ["the message", "popularity alone", "server ∞", "nothing bounds what it reads"]),
        (
            "canary",
            [
                "one-run bound",
                "(replace-one)",
                "at most 0.05",
                "any lower bound agrees",
                "clients: not contradicted; with probability 90 %",
            ],
        ),
    ],
)
def test_tables_fit_80_columns(call: Call, runs: dict[str, Path], attack: str, words: list[str]) -> None:
    out, _ = call(runs["noised"], "--attack", attack)
    table, _, sentences = out.rpartition("\n\n")  # a table ends with a blank line
    assert max(map(len, table.splitlines())) <= 80
    assert sentences
    assert all(word in out for word in words)


@pytest.mark.parametrize(
    ("run", "arguments", "sentence"),
    [
        ("plain", ["--attack", "canry"], "There is no attack 'canry'; did you mean 'canary'?"),
        ("plain", ["--attack", "canary", "--users", "5"], "--users is not for --attack canary: leave it out."),
        ("plain", ["--attack", "interactions", "--trials", "5"], "--trials is not for --attack interactions"),
        ("plain", ["--attack", "interactions", "--users", "0"], "at least 1 user to read, not 0"),
        ("plain", ["--attack", "canary", "--canaries", "0"], "at least 1 canary and 1 trial, not 0 and 1"),
        ("plain", ["--attack", "canary", "--confidence", "95"], "above 0 and under 1, such as 0.95, not 95"),
        ("reference", ["--attack", "interactions"], "popularity is a centralised reference"),
        ("nowhere", ["--attack", "canary"], "There is no run in"),
    ],
)
def test_errors_are_one_sentence(
    call: Call, runs: dict[str, Path], run: str, arguments: list[str], sentence: str
) -> None:
    out, error = call(runs.get(run, Path("nowhere")), *arguments, code=2)
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("homebody: ")
    assert sentence in error


def test_progress_is_told_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("homebody.cli.audit.time.monotonic", lambda: now[0])
    monkeypatch.setattr("rich.progress.Progress.update", lambda *_, **__: None)
    monkeypatch.setattr("rich.progress.Progress.add_task", lambda *_, **__: 0)
    with _bar("rounds", quiet=False) as step:
        for done, now[0] in enumerate((1.0, 6.0, 7.0, 12.0), start=1):
            step(done, 4)
    assert capsys.readouterr().err == "rounds: 2 of 4\nrounds: 4 of 4\n"


def test_reports_are_linked_by_their_order_and_not_behind_a_proxy(call: Call, tmp_path: Path) -> None:
    run = execute(Recipe("fmf-ldp", DATA, rounds=2, stages=["one-bit:epsilon=2.5,k=40", "shuffle"]), tmp_path)["run"]
    linked = found(call, run, "--attack", "linkage", "--users", 60)
    assert list(linked["views"]) == ["through a proxy", "as they come"]
    mixed, open_ = linked["views"].values()
    assert (mixed["devices"], mixed["reports"], open_["batches"]) == (60, 2400, 60)
    assert open_["linked"]
    assert open_["everything"][0] > 0.95
    assert mixed["difference"][0] < 0.05
    text, _ = call(run, "--attack", "linkage", "--users", 60)
    assert "which reports are of one device? 2,400 of 60 devices" in " ".join(text.split())
    assert max(map(len, text.splitlines()[:7])) <= 80
    assert "behind the proxy order and batches tell" in text


def test_without_a_shuffle_there_is_one_view(call: Call, runs: dict[str, Path]) -> None:
    (name,) = found(call, runs["bits"], "--attack", "linkage")["views"]
    assert name == "as they come"
    assert "without a shuffle stage nothing mixes them" in call(runs["bits"], "--attack", "linkage")[0]
    _, error = call(runs["plain"], "--attack", "linkage", code=2)
    assert "Only reports of one bit can be linked: this run's channel makes none." in error

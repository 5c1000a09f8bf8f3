"""`hb.account`: the calculator, papers, ledgers and statements as frames."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from tests.cli.typed import typed

import homebody as hb
from homebody.privacy import Charge, Clip, Gaussian, GaussianRelease, NonPrivate
from homebody.recipe import Recipe
from homebody.run import execute
from homebody.training import fit

DRAWN = {"cohort": 30, "population": 4800}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stages = ["clip:norm=0.5", "gaussian:z=2"]
    data = "synthetic:users=30,items=20,mean=8"
    recipe = Recipe("fedials", data, fields={"factors": 4}, rounds=3, cohort=10, stages=stages, budget="eps=30")
    return Path(execute(recipe, tmp_path_factory.mktemp("runs"))["run"])


def test_noise_and_epsilon_are_two_ways_to_ask() -> None:
    there = hb.account.gaussian(1.5, rounds=200, **DRAWN)
    back = hb.account.gaussian(epsilon=there["epsilon"].item(), rounds=200, **DRAWN)
    assert back["noise"].item() == pytest.approx(1.5, rel=2e-3)
    assert back["epsilon"].item() <= there["epsilon"].item()


def test_rounds_and_deltas_give_a_row_each() -> None:
    frame = hb.account.laplace(2.0, rounds=[1, 10], delta=[0.0, 1e-6])
    assert frame.select("rounds", "delta").rows() == [(1, 0.0), (1, 1e-6), (10, 0.0), (10, 1e-6)]
    assert frame.filter(pl.col("delta") == 0)["epsilon"].to_list() == [0.5, 5.0]
    assert frame.filter(pl.col("epsilon") > frame["epsilon_of_one_round"])["rounds"].unique().to_list() == [10]
    bounds = frame.explode("bounds").unnest("bounds")
    assert (bounds["bound"] >= bounds["epsilon"] * (1 - 1e-5)).all()


def test_frames_of_all_mechanisms_go_together() -> None:
    noise = [hb.account.gaussian(1.0), hb.account.laplace(1.0), hb.account.skellam(1.0, entries=100)]
    reports = [hb.account.onebit(1.0), hb.account.shuffle(1000, 1.0)]
    frame = pl.concat([*noise, *reports], how="diagonal")
    assert frame["mechanism"].to_list() == ["gaussian", "laplace", "skellam", "onebit", "shuffle"]
    assert frame["epsilon"].is_finite().all()


def test_what_no_accountant_bounds_is_infinite() -> None:
    row = hb.account.gaussian(1.0, delta=0.0).row(0, named=True)
    assert (row["epsilon"], row["accountant"], row["bounds"]) == (math.inf, "none", [])
    assert row["notes"] == ["No accountant bounds this at this δ."]


def test_the_command_prints_what_the_function_returns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("account", "gaussian", "--noise", 1, "--cohort", 30, "--population", 4800, "--rounds", 100, "--json")
    printed = json.loads(typed(monkeypatch, capsys, *given)[0])
    row = hb.account.gaussian(1.0, rounds=100, **DRAWN).row(0, named=True)
    assert printed.pop("bounds") == {each["by"]: each["bound"] for each in row.pop("bounds")}
    assert printed == row
    printed = json.loads(typed(monkeypatch, capsys, "account", "--paper", "fmf-ldp", "--json")[0])
    assert [row["certified"] for row in printed["rows"]] == hb.account.paper("fmf-ldp")["certified"].to_list()
    assert printed["title"] == hb.account.paper("fmf-ldp")["title"][0]


def test_a_ledger_is_told_line_by_line() -> None:
    ledger = hb.Ledger()
    assert hb.account.ledger(ledger).height == 0
    told = [
        Charge("server", "user", NonPrivate("plain updates")),
        Charge("public", "user", GaussianRelease(4, "replace-one")),
    ]
    for number in range(1, 6):
        ledger.charge(f"train/{number}", told, number=number, code="toy")
    frame = hb.account.ledger(ledger, delta=1e-5)
    assert frame["rounds"].to_list() == ["train, rounds 1–5"] * 2
    assert frame["observers"].to_list() == [["server"], ["public"]]
    assert frame["count"].to_list() == [5, 5]
    server, public = frame["epsilon_of_one"]
    assert server == math.inf
    assert public == pytest.approx(hb.account.gaussian(4.0, delta=1e-5)["epsilon"].item())
    assert frame.schema == hb.account.ledger(hb.Ledger()).schema


def test_a_model_has_the_ledger_of_its_run(run: Path) -> None:
    split = hb.leave_one_out(hb.load("synthetic:users=30,items=20,mean=8"))
    method = hb.FedIALS(factors=4, uplink=hb.Channel(Clip(0.5), Gaussian(z=2)))
    model = fit(method, hb.Simulator(split), rounds=3, cohort=10)
    assert hb.account.ledger(model).equals(hb.account.ledger(run))


class TestStatement:
    def test_its_frames_agree_with_the_calculator(self, run: Path) -> None:
        stated = hb.account.statement(run)
        expected = hb.account.gaussian(2.0, rounds=3, cohort=10, population=30).row(0, named=True)
        public = stated.certified.filter(observer="public", unit="user").row(0, named=True)
        assert public["epsilon"] == expected["epsilon"]
        assert public["epsilon_of_one_round"] == expected["epsilon_of_one_round"]
        assert public["odds"] == pytest.approx(math.exp(public["epsilon"]))
        server = stated.certified.filter(observer="server", unit="user").row(0, named=True)
        assert (server["epsilon"], server["odds"], server["found_at_1_percent"]) == (math.inf, math.inf, 1.0)
        assert stated.ledger.equals(hb.account.ledger(run))

    def test_the_command_prints_and_writes_it(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stated = hb.account.statement(run, delta=1e-4)
        out, _ = typed(monkeypatch, capsys, "account", "--run", run, "--delta", "1e-4", "--json")
        assert json.loads(out) == stated.details
        files = stated.save(tmp_path / "out")
        assert [file.name for file in files] == ["statement.json", "statement.html"]
        assert json.loads(files[0].read_text(encoding="utf-8")) == stated.details

    def test_it_is_short_and_shows_its_tables(self, run: Path) -> None:
        stated = hb.account.statement(run)
        assert len(repr(stated)) < 200
        assert "server ∞" in repr(stated)
        page = stated._repr_html_()
        for text in ("All rounds ran within it", "train, rounds 1–3", "odds ×", "Outside of it"):
            assert text in page

    def test_a_ledger_that_was_changed_is_refused(self, run: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(run, copy)
        with sqlite3.connect(copy / "ledger.sqlite") as database:
            database.execute("DROP TRIGGER charge_is_never_changed")
            database.execute("UPDATE charge SET observer = 'views' WHERE observer = 'server'")
        database.close()
        for ask in (hb.account.statement, hb.account.ledger):
            with pytest.raises(hb.HomebodyError, match="tampered"):
                ask(copy)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: hb.account.gaussian(), "Give either a noise"),
        (lambda: hb.account.gaussian(1.0, epsilon=1.0), "Give either a noise"),
        (lambda: hb.account.onebit(), "Give either the ε of one report"),
        (lambda: hb.account.gaussian(1.0, rounds=0), "The number of rounds must be at least 1, not 0"),
        (lambda: hb.account.gaussian(1.0, delta=1.0), "under 1, not 1"),
        (lambda: hb.account.gaussian(1.0, cohort=3), "give the population as well"),
        (lambda: hb.account.gaussian(1.0, sampling="fixed"), "needs a cohort"),
        (lambda: hb.account.gaussian(epsilon=1.0, delta=0.0), "no ε at δ = 0"),
        (lambda: hb.account.gaussian(1.0, relation="edit"), "no relation 'edit'"),
        (lambda: hb.account.paper("privatrec"), "did you mean 'privaterec'"),
        (lambda: hb.account.secure_sum(2), "takes 3 parties or more"),
        (lambda: hb.account.meaning(1.0, delta=2.0), "under 1, not 2"),
        (lambda: hb.account.ledger("nowhere"), "There is no run in nowhere"),
        (lambda: hb.account.ledger(5), "A statement is made of a model of hb.fit"),
        (lambda: hb.account.statement(hb.Ledger()), "not of this Ledger"),
        (lambda: hb.account.gaussian("1"), "noise takes numbers, not '1'"),
        (lambda: hb.account.gaussian([1.0, 2.0]), "noise takes numbers, not"),
        (lambda: hb.account.gaussian(1.0, rounds=1.5), "rounds takes whole numbers, not 1.5"),
        (lambda: hb.account.gaussian(1.0, rounds="10"), "rounds takes whole numbers, not '10'"),
        (lambda: hb.account.onebit(1.0, delta=None), "delta takes numbers, not None"),
    ],
)
def test_misuse_is_a_sentence(ask: Callable[[], object], sentence: str) -> None:
    with pytest.raises(hb.HomebodyError, match=sentence):
        ask()

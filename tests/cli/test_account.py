"""`homebody account`: the calculator, and what papers claim."""

from __future__ import annotations

import builtins
import json
import shutil
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest

from homebody.cli import main
from homebody.recipe import Recipe
from homebody.run import execute


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["homebody", "account", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(*arguments: str) -> Any:
        assert run(monkeypatch, *arguments, "--json") == 0
        return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return ask


EXAMPLE = ["gaussian", "--noise", "1", "--cohort", "30", "--population", "4800", "--rounds", "1000", "--delta", "1e-6"]


def test_the_example(answer: Any) -> None:
    found = answer(*EXAMPLE)
    assert found["epsilon"] == pytest.approx(2.446, rel=1e-3)
    assert (found["accountant"], found["relation"], found["sampling"]) == ("rdp", "replace-one", "fixed")
    assert (found["noise"], found["rounds"], found["delta"]) == (1, 1000, 1e-6)
    assert found["epsilon_of_one_round"] < found["epsilon"]


def test_the_sampling_follows_the_relation(answer: Any) -> None:
    found = answer(*EXAMPLE, "--relation", "add-remove")
    assert (found["sampling"], found["accountant"]) == ("poisson", "pld")
    assert found["epsilon"] == pytest.approx(1.298, rel=2e-3)


def test_no_sampling_though_there_is_a_cohort(answer: Any) -> None:
    known = answer(*EXAMPLE, "--sampling", "none")
    plain = answer("gaussian", "--noise", "1", "--rounds", "1000", "--delta", "1e-6")
    assert known["epsilon"] == plain["epsilon"]
    assert known["sampling"] == "none"


def test_secure_sum(answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("secure-sum", "--parties", "1000")
    assert (found["degree"], found["threshold"], found["complete"]) == (96, 37, False)
    assert found["privacy"] <= 2**-40
    assert found["failure"] <= 2**-20
    assert found["excess_noise"] == pytest.approx((1000 / 567) ** 0.5)
    assert [row["exchange"] for row in found["exchanges"]] == ["keys", "shares", "masked", "survivors", "open"]
    assert any("a server that follows the protocol" in note for note in found["notes"])
    small = answer("secure-sum", "--parties", "100", "--entries", "10", "--width", "3", "--least", "0.9")
    assert (small["degree"], small["threshold"], small["failure"]) == (99, 90, 0)
    assert small["exchanges"][2]["sent"] == 105 + 30
    assert not any("a server that follows the protocol" in note for note in small["notes"])
    assert run(monkeypatch, "secure-sum", "--parties", "1000") == 0
    shown = capsys.readouterr().out
    assert "neighbours of a party" in shown
    assert "2^-40.2" in shown
    assert answer("secure-sum", "--parties", "3")["quorum"] == 3  # devices refuse fewer
    assert run(monkeypatch, "secure-sum", "--parties", "2") == 2
    assert "takes 3 parties or more" in capsys.readouterr().err
    assert run(monkeypatch, "secure-sum", "--parties", "100", "--least", "0.5") == 2
    assert "let least be above 0.55" in capsys.readouterr().err


def test_many_parties_are_said_where_epsilon_is(answer: Any) -> None:
    among = [*EXAMPLE[1:3], "--entries", "54000", "--population", "4800", "--cohort"]
    assert not any("follows the protocol" in note for note in answer("skellam", *among, "128")["notes"])
    assert any("follows the protocol" in note for note in answer("skellam", *among, "129")["notes"])


def test_skellam_noise(answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = answer("skellam", "--noise", "1", "--entries", "54000")
    assert server["epsilon"] == pytest.approx(5.222, abs=1e-3)
    assert (server["steps"], server["entries"], server["accountant"]) == (8192, 54_000, "rdp")
    public = answer("skellam", *EXAMPLE[1:], "--entries", "54000")
    assert public["epsilon"] == pytest.approx(2.446, abs=1e-3)
    found = answer("skellam", "--epsilon", "5.222", "--relation", "add-remove")
    assert (found["noise"], found["steps"]) == (pytest.approx(1, rel=2e-3), 4096)
    assert run(monkeypatch, "skellam", "--epsilon", "1", "--delta", "0") == 2
    assert "Skellam noise has no ε at δ = 0" in capsys.readouterr().err


def test_several_values_are_a_table(
    answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("laplace", "--noise", "2", *["--rounds", "1", "--rounds", "10", "--delta", "0", "--delta", "1e-6"])
    rows = answer(*arguments)["rows"]
    assert [(row["rounds"], row["delta"]) for row in rows] == [(1, 0), (1, 1e-6), (10, 0), (10, 1e-6)]
    assert [row["epsilon"] for row in rows if row["delta"] == 0] == [0.5, 5]
    assert run(monkeypatch, *arguments) == 0
    assert "0.5" in capsys.readouterr().out


def test_gaussian_noise_at_delta_0_is_infinite(answer: Any) -> None:
    assert answer("gaussian", "--noise", "1", "--delta", "0")["epsilon"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["onebit", "--report-epsilon", "1", "--rounds", "20"], 20),
        (["onebit", "--report-epsilon", "2.5", "--reports", "100", "--rounds", "20"], 5000),
        (["onebit", "--report-epsilon", "1", "--group", "3"], 3),
        (["laplace", "--noise", "0.5", "--rounds", "4"], 8),
    ],
)
def test_pure_mechanisms(answer: Any, arguments: list[str], expected: float) -> None:
    assert answer(*arguments)["epsilon"] == expected


def test_shuffle(answer: Any) -> None:
    found = answer("shuffle", "--report-epsilon", "4", "--users", "100000")
    assert 0.1675 <= found["epsilon"] <= 0.1728
    assert found["bounds"]["closed-form shuffle"] > found["epsilon"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["gaussian", "--epsilon", "2", "--rounds", "10", "--delta", "1e-5"], "noise"),
        (["laplace", "--epsilon", "2", "--rounds", "10"], "noise"),
        (["onebit", "--epsilon", "2", "--reports", "5", "--rounds", "10"], "report_epsilon"),
        (["shuffle", "--epsilon", "2", "--reports", "5", "--users", "1000"], "report_epsilon"),
    ],
)
def test_the_other_direction(answer: Any, arguments: list[str], name: str) -> None:
    found = answer(*arguments)
    assert 2 * (1 - 1e-3) <= found["epsilon"] <= 2
    given = [f"--{name.replace('_', '-')}", repr(found[name])]
    again = answer(*arguments[:1], *given, *arguments[3:])
    assert again["epsilon"] == pytest.approx(found["epsilon"])


class TestPlot:
    def test_it_needs_nothing_else(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("plotly", reason="no plotly: a plot needs the extra `report`")
        file = tmp_path / "over rounds.html"
        assert run(monkeypatch, "onebit", "--report-epsilon", "1", "--rounds", "30", "--plot", str(file)) == 0
        text = file.read_text(encoding="utf-8")
        assert "certified" in text
        assert 'src="http' not in text

    def test_without_plotly_it_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        plain = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name.startswith("plotly"):
                raise ImportError(name)
            return plain(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
        assert run(monkeypatch, "onebit", "--report-epsilon", "1", "--plot", str(tmp_path / "a.html")) == 2
        assert "pip install '.[report]' in Homebody's clone" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


class TestPapers:
    @pytest.mark.parametrize("name", ["privrec", "fl-mv-dssm", "pfedrec", "fmf-ldp", "privaterec"])
    def test_every_row_has_both_columns_and_a_sentence(
        self, answer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        rows = answer("--paper", name)["rows"]
        assert all(row["why"].endswith(".") and row["observer"] and row["unit"] for row in rows)
        assert any(row["observer"] == "server" for row in rows)
        assert run(monkeypatch, "--paper", name) == 0
        printed = capsys.readouterr().out
        assert "claimed ε" in printed
        assert "certified ε" in printed

    def test_tables_4_and_5_are_whole(self, answer: Any) -> None:
        rows = [row for row in answer("--paper", "privrec")["rows"] if row["what"].startswith("Table")]
        assert len(rows) == 12 * 4
        found = {(row["what"], row["delta"]): (row["claimed"], row["certified"]) for row in rows}
        assert found["Table 4, 30/4800", 0] == ("inf", "inf")
        for (what, delta), expected in {
            ("Table 4, 5/4800", 1e-8): (1.7439, 1.283),
            ("Table 4, 5/4800", 1e-6): (1.3602, 0.899),
            ("Table 4, 5/4800", 1e-4): (0.9764, 0.516),
            ("Table 4, 30/4800", 1e-8): (18.9107, 3.022),
            ("Table 4, 30/4800", 1e-6): (16.6081, 2.446),
            ("Table 4, 30/4800", 1e-4): (14.3056, 1.829),
            ("Table 5, 15/760", 1e-6): (45.5485, 8.511),
        }.items():
            assert found[what, delta] == pytest.approx(expected, rel=1e-3)

    def test_what_is_published_without_a_bound_is_infinite(self, answer: Any) -> None:
        for name, what in (
            ("privrec", "two-stage training"),
            ("pfedrec", "Laplace noise, λ = 0.1 … 0.5 (Table 7)"),
            ("fl-mv-dssm", "user towers"),
            ("privaterec", "training, history, ε_t = 10"),
        ):
            rows = [row for row in answer("--paper", name)["rows"] if row["what"] == what]
            assert rows
            assert all(row["certified"] == "inf" for row in rows)

    def test_fmf_ldp(self, answer: Any) -> None:
        rows = answer("--paper", "fmf-ldp")["rows"]
        certified = {(row["what"], row["observer"], row["unit"], row["delta"]): row["certified"] for row in rows}
        assert certified["one report", "server", "report", 0] == 2.5
        assert certified["20 epochs", "server", "user", 0] == 5000
        assert certified["20 epochs", "server", "user", 1e-6] == pytest.approx(4505, rel=1e-3)

    def test_fl_mv_dssm(self, answer: Any) -> None:
        certified = [row["certified"] for row in answer("--paper", "fl-mv-dssm")["rows"] if row["observer"] == "views"]
        assert certified[:4] == pytest.approx([10.20, 27.2, 80.0, 260.9], rel=2e-3)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("gaussian --noise 0", "above 0, not 0.0"),
        ("gaussian --noise -1", "above 0, not -1.0"),
        ("gaussian --noise nan", "above 0, not nan"),
        ("gaussian", "either --noise"),
        ("gaussian --noise 1 --epsilon 1", "either --noise"),
        ("gaussian --epsilon 0", "above 0, not 0.0"),
        ("gaussian --epsilon -2", "above 0, not -2.0"),
        ("gaussian --epsilon inf", "above 0, not inf"),
        ("gaussian --epsilon 1 --delta 0", "no ε at δ = 0"),
        ("gaussian --noise 1 --delta 1", "under 1, not 1"),
        ("gaussian --noise 1 --delta -1e-9", "at least 0"),
        ("gaussian --noise 1 --rounds 0", "at least 1, not 0"),
        ("gaussian --noise 1 --group 0", "at least 1 member"),
        ("gaussian --noise 1 --cohort 31 --population 30", "cannot be drawn from a population of 30"),
        ("gaussian --noise 1 --cohort 31 --population 30 --sampling none", "cannot be drawn"),
        ("gaussian --noise 1 --cohort 0 --population 30", "at least 1 member"),
        ("gaussian --noise 1 --cohort 3", "give the population as well"),
        ("gaussian --noise 1 --sampling fixed", "needs a cohort"),
        ("gaussian --noise 1 --cohort 3 --population 9 --sampling magic", "no sampling 'magic'"),
        ("gaussian --noise 1 --cohort 3 --population 9 --sampling fixed --relation add-remove", "replace-one"),
        ("gaussian --noise 1 --relation edit", "no relation 'edit'"),
        ("gaussian --noise 1 --plot a.png", "a.html"),
        ("onebit --report-epsilon 0", "above 0, not 0.0"),
        ("onebit --report-epsilon 1 --reports 0", "whole number from 1"),
        ("shuffle --report-epsilon 1 --users 0", "whole number from 1"),
        ("--paper privatrec", "did you mean 'privaterec'"),
        ("--paper privrec gaussian --noise 1", "--paper does not go with a mechanism"),
    ],
)
def test_bad_values_get_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, sentence: str
) -> None:
    assert run(monkeypatch, *arguments.split()) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("homebody: ")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from homebody.recipe import Recipe
    from homebody.run import execute

    stages = ["clip:norm=0.5", "gaussian:z=2"]
    data = "synthetic:users=30,items=20,mean=8"
    recipe = Recipe("fedials", data, fields={"factors": 4}, rounds=3, cohort=10, stages=stages, evaluate_every=3)
    return Path(execute(recipe, tmp_path_factory.mktemp("runs"))["run"])


class TestRun:
    def test_it_is_explained_as_the_calculator_would(
        self, answer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        asked = ["--noise", "2", "--cohort", "10", "--population", "30", "--rounds", "3", "--delta", "1e-6"]
        expected = answer("gaussian", *asked)
        found = {row["observer"]: row for row in answer("--run", str(folder))["certified"]}
        assert found["public"]["epsilon"] == expected["epsilon"]
        assert found["public"]["epsilon_of_one_round"] == expected["epsilon_of_one_round"]
        assert found["server"]["epsilon"] == "inf"
        assert run(monkeypatch, "--run", str(folder)) == 0
        said = capsys.readouterr().out
        assert "train, rounds 1–3 (FedIALS, homebody" in said
        assert f"ε = {expected['epsilon']:.4g} at δ = 1e-06 over 3 releases" in said

    def test_delta_and_statement(self, answer: Any, folder: Path, tmp_path: Path) -> None:
        found = answer("--run", str(folder), "--delta", "1e-3", "--statement", str(tmp_path / "out"))
        assert found["delta"] == 1e-3
        assert json.loads((tmp_path / "out" / "statement.json").read_text(encoding="utf-8")) == found
        assert (tmp_path / "out" / "statement.html").is_file()

    def test_where_it_was_written_is_said(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(monkeypatch, "--run", str(folder), "--statement", str(tmp_path)) == 0
        assert capsys.readouterr().out.endswith(
            f"statement: {tmp_path}/statement.json\nstatement: {tmp_path}/statement.html\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--run", "nowhere"], "There is no run in nowhere"),
            (["--run", "RUN", "--paper", "pfedrec"], "--paper and --run cannot be combined"),
            (["--run", "RUN", "gaussian", "--noise", "1"], "--run does not go with a mechanism: leave out 'gaussian'"),
            (["--delta", "1e-5"], "--delta needs a run"),
            (["--statement", "x"], "--statement needs a run"),
            (["--paper", "pfedrec", "--statement", "x"], "--statement needs a run"),
            (["--delta", "1e-5", "gaussian", "--noise", "1"], "--delta does not go with a mechanism"),
            (["--run", "RUN", "--delta", "1"], "δ must be at least 0 and under 1"),
        ],
    )
    def test_nonsense(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        assert run(monkeypatch, *(str(folder) if word == "RUN" else word for word in arguments)) == 2
        error = capsys.readouterr().err
        assert message in " ".join(error.split())
        assert "Traceback" not in error

    def test_a_ledger_that_was_changed(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        database = sqlite3.connect(copy / "ledger.sqlite", isolation_level=None)
        database.execute("DROP TRIGGER charge_is_never_changed")
        database.execute("UPDATE charge SET observer = 'views' WHERE id = 1")
        database.close()
        assert run(monkeypatch, "--run", str(copy), "--statement", str(tmp_path / "out")) == 2
        assert "was tampered with: row 1 breaks its chain" in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "out").exists()


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    stages = ["clip:norm=1", "gaussian:z=20"]
    recipe = Recipe("fedmf", "synthetic:users=30,items=40,mean=8", fields={"factors": 4}, rounds=2, stages=stages)
    return Path(execute(recipe, tmp_path)["run"])


def test_the_price_of_releasing_a_training_again(answer: Any, small_run: Path) -> None:
    """Two rounds, three times, are six rounds; the server sees all of it in any case."""
    once, thrice = answer("--run", str(small_run), "--times", "1", "--times", "3")["rows"]
    assert (once["times"], thrice["times"], once["delta"]) == (1, 3, 1e-6)
    assert once["server"] == thrice["server"] == "inf"
    for row, rounds in ((once, 2), (thrice, 6)):
        said = answer("gaussian", "--noise", "20", "--rounds", str(rounds))
        assert row["public"] == row["clients"] == pytest.approx(said["epsilon"], rel=1e-6)
    at_larger_delta = answer("--run", str(small_run), "--times", "1", "--delta", "0.001")["rows"][0]
    assert at_larger_delta["public"] < once["public"]


def test_times_are_printed_as_a_table(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--run", str(small_run), "--times", "1", "--times", "12") == 0
    said = capsys.readouterr().out
    assert "released so many times; δ = 1e-06" in said
    assert [line.split()[:2] for line in said.splitlines() if line.strip()[:1].isdigit()] == [["1", "∞"], ["12", "∞"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--times", "2"], "--times needs a run: give its folder with --run."),
        (["--run", "RUN", "--times", "0"], "A training is released at least once, not 0 times."),
        (["--run", "RUN", "--times", "2", "--statement", "out"], "--times and --statement cannot be combined"),
    ],
)
def test_times_that_make_no_sense(
    small_run: Path,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(small_run) if each == "RUN" else each for each in arguments]
    assert run(monkeypatch, *given) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())

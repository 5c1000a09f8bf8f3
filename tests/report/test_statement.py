"""Privacy statements: what a run's ledger certifies, said whole and derived anew."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sqlite3
from collections.abc import Sequence
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homebody import __version__
from homebody.errors import HomebodyError
from homebody.privacy import (
    OBSERVERS,
    Charge,
    GaussianRelease,
    LaplaceRelease,
    Ledger,
    NonPrivate,
    PureRelease,
    Reports,
    Sampling,
)
from homebody.privacy.accountant import epsilon
from homebody.privacy.assumptions import ROSTER
from homebody.privacy.secure_sum import SEMI_HONEST
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.statement import PARTICIPANTS, SELECTION, SHOWN, SIMULATED, lines_of, releases_of, statement
from homebody.report.statement_page import print_statement, statement_page, write_statement
from homebody.report.terminal import print_run
from homebody.report.words import NOT_COVERED
from homebody.run import Watcher, execute

DATA = "synthetic:users=30,items=20,mean=8"
NOISE = ["clip:norm=0.5", "secure-sum", "gaussian:z=2"]
SAMPLED = Sampling("fixed", 10, 30)
PLAIN = NonPrivate("plain updates")


def ran(parent: Path, **rest: Any) -> Path:
    recipe = Recipe(**{"method": "fedials", "data": DATA, "fields": {"factors": 4}, "evaluate_every": 9, **rest})
    return Path(execute(recipe, parent)["run"])


@pytest.fixture(scope="module")
def noised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten of thirty a round, noised by the server, until the budget ends it."""
    budget = "eps=6,delta=1e-5,unit=user,observer=public"
    return ran(tmp_path_factory.mktemp("noised"), rounds=40, cohort=10, stages=NOISE, budget=budget)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noised on the device: the server knows who took part, the others do not."""
    stages = ["clip:norm=1,order=1", "laplace:b=4"]
    return ran(tmp_path_factory.mktemp("local"), rounds=3, cohort=10, stages=stages)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    budget = "eps=1,delta=1e-5"
    return ran(tmp_path_factory.mktemp("reference"), method="popularity", fields={}, budget=budget)


def of(path: Path, delta: float | None = None) -> dict[str, Any]:
    return statement(RunFolder.open(path), delta)


def rows(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["observer"], row["unit"]): row for row in found["certified"]}


def text_of(found: dict[str, Any]) -> str:
    console = Console(record=True, width=200, force_terminal=False, file=StringIO())
    print_statement(found, console)
    return console.export_text()


def made(parent: Path, releases: Sequence[tuple[str, Sequence[Charge]]], **recipe: Any) -> Path:
    """A run's folder with a ledger and no more."""
    folder = RunFolder.create(parent, "made")
    folder.write_text("recipe.toml", Recipe(**{"method": "fedmf", "data": "toy", **recipe}).to_toml())
    ledger = Ledger(folder.ledger_path)
    for name, charges in releases:
        ledger.charge(name, charges, code="Toy, homebody 1")
    ledger.close()
    return folder.path


def everyone(event: Any) -> list[Charge]:
    return [Charge(observer, "user", event) for observer in OBSERVERS]


class Text(HTMLParser):
    """What a page shows."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.text = re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


class TestNoiseByTheServer:
    def test_each_figure_is_what_the_accountant_says_of_what_ran(self, noised: Path) -> None:
        found = of(noised)
        count = found["run"]["rounds"]
        assert 1 < count < 40
        event = GaussianRelease(2, "replace-one", SAMPLED)
        total, one = epsilon([(event, count)], 1e-5), epsilon([(event, 1)], 1e-5)
        for observer in ("clients", "public"):
            row = rows(found)[observer, "user"]
            assert row["epsilon"] == total.epsilon <= 6
            assert row["epsilon_of_one_round"] == one.epsilon < total.epsilon
            assert (row["accountant"], row["relation"], row["delta"]) == (total.accountant, "replace-one", 1e-5)
            assert row["other_bounds"] == {n: v for n, v in total.bounds.items() if n != total.accountant}
            assert row["releases"] == count
            assert row["sampling"] == ["10 of 30 drawn without replacement"]
            assert row["mechanisms"] == [str(event)]
            assert row["notes"] == list(total.notes) != []
        server = rows(found)["server", "user"]
        assert (server["epsilon"], server["epsilon_of_one_round"], server["accountant"]) == ("inf", "inf", "none")
        assert server["notes"] == ["Not private: the server adds the noise itself: it sees the sum without it."]

    def test_rounds_are_one_line(self, noised: Path) -> None:
        found = of(noised)
        count = found["run"]["rounds"]
        (line,) = found["ledger"]["lines"]
        assert line["rounds"] == f"train, rounds 1–{count}"
        assert line["code"] == f"FedIALS, homebody {__version__}"
        server, others = line["told"]
        assert (server["observers"], others["observers"]) == (["server"], ["clients", "public"])
        event = GaussianRelease(2, "replace-one", SAMPLED)
        assert others["epsilon_of_one"] == epsilon([(event, 1)], 1e-5).epsilon

    def test_the_chain_is_named_by_its_last_hash(self, noised: Path) -> None:
        ledger = Ledger(noised / "ledger.sqlite")
        entries = ledger.entries()
        ledger.close()
        told = of(noised)["ledger"]
        assert (told["verified"], told["rows"], told["hash"]) == (True, len(entries), entries[-1].hash)
        assert told["releases"] == len(entries) / 3

    def test_the_budget_ended_it(self, noised: Path) -> None:
        budget = of(noised)["budget"]
        result = RunFolder.open(noised).read_json("result.json")
        assert result["stopped"].startswith("Training stopped before round")
        assert (budget["stopped"], budget["state"]) == (True, result["stopped"])
        assert (budget["epsilon"], budget["observer"]) == (6, "public")
        assert budget["spent"] == result["epsilon"]["public"]
        assert f"{result['rounds']} rounds of 40 planned" in text_of(of(noised))

    def test_stages_with_their_settings(self, noised: Path) -> None:
        clip, secure, gaussian = of(noised)["stages"]
        assert clip["settings"] == {"norm": 0.5, "order": 2}
        assert "ℓ2 norm of at most 0.5" in clip["means"]
        assert (secure["stage"], secure["settings"]) == ("secure-sum", {})
        # Clipped to 0.5, a replacement moves the sum by 1: z = 2 is a deviation of 2.
        assert gaussian["settings"] == {"z": 2, "relation": "replace-one", "sensitivity": 1, "scale": 2}
        assert "standard deviation 2" in gaussian["means"]

    def test_what_is_outside_is_said(self, noised: Path) -> None:
        found = of(noised)
        assert {SELECTION, SIMULATED} <= set(found["outside"])
        assert "Sampling amplifies only against an observer who does not learn who took part." in found["assumptions"]

    def test_another_delta(self, noised: Path) -> None:
        looser = rows(of(noised, 1e-3))["public", "user"]
        assert looser["epsilon"] < rows(of(noised))["public", "user"]["epsilon"]
        assert looser["delta"] == 1e-3
        none = rows(of(noised, 0.0))["public", "user"]
        assert none["epsilon"] == "inf"
        assert "No accountant bounds this at this δ." in none["notes"]

    @pytest.mark.parametrize("delta", [1.0, -0.1, math.nan])
    def test_a_delta_that_is_none(self, noised: Path, delta: float) -> None:
        with pytest.raises(HomebodyError, match="δ must be"):
            of(noised, delta)

    def test_show_says_the_finite_epsilon(self, noised: Path) -> None:
        console = Console(record=True, width=400, force_terminal=False, file=StringIO())
        print_run(RunFolder.open(noised), console)
        (line,) = (one for one in console.export_text().splitlines() if one.startswith("ledger:"))
        spent = rows(of(noised))["public", "user"]["epsilon"]
        assert line.endswith(f"ε server ∞, clients {spent:.3g}, public {spent:.3g} at δ = 1e-05")


class TestNoiseOnTheDevice:
    def test_sampling_hides_nobody_from_the_server(self, local: Path) -> None:
        found = rows(of(local))
        # An ℓ1 clip of 1 is a sensitivity of 2: b = 4 is multiplier 2, ε = 0.5 a round.
        plain = epsilon([(LaplaceRelease(2, "replace-one"), 3)], 1e-6).epsilon
        drawn = epsilon([(LaplaceRelease(2, "replace-one", SAMPLED), 3)], 1e-6).epsilon
        assert found["server", "user"]["epsilon"] == plain == pytest.approx(1.5, rel=1e-3)
        assert found["public", "user"]["epsilon"] == found["clients", "user"]["epsilon"] == drawn < plain / 2
        assert found["server", "user"]["sampling"] == ["no sampling"]
        text = text_of(of(local))
        assert "to server, about one user: Laplace noise, 2 × the ℓ1 sensitivity (replace-one); no sampling" in text
        assert "to clients and public, about one user: Laplace noise" in text

    def test_no_budget_and_no_paper(self, local: Path) -> None:
        found = of(local)
        assert found["budget"] is found["paper"] is None
        assert "Budget" not in text_of(found)


class TestReference:
    def test_raw_data_were_collected(self, reference: Path) -> None:
        found = of(reference)
        assert found["run"]["kind"] == "centralised"
        assert {row["epsilon"] for row in found["certified"]} == {"inf"}
        (line,) = found["ledger"]["lines"]
        assert line["rounds"] == "collection"
        assert line["told"][0]["observers"] == list(OBSERVERS)
        text = text_of(found)
        assert "to server, clients and public, about one user: not private: raw data collected; ε = ∞ once" in text
        assert "collects everyone's history" in text
        assert SELECTION in found["outside"]
        assert SIMULATED not in found["outside"]

    def test_a_budget_does_not_hold_for_it(self, reference: Path) -> None:
        state = of(reference)["budget"]["state"]
        assert "the budget does not hold for it: ε = ∞ of 1 is spent" in state


class TestLedgers:
    def test_a_run_that_is_not_complete(self, tmp_path: Path) -> None:
        def stop(line: Any) -> None:
            if line.round == 2:
                raise KeyboardInterrupt

        recipe = Recipe("fedials", DATA, fields={"factors": 4}, rounds=5, stages=NOISE, budget="eps=50")
        with pytest.raises(KeyboardInterrupt):
            execute(recipe, tmp_path, Watcher(on_round=stop), name="cut")
        found = of(tmp_path / "cut")
        assert (found["run"]["complete"], found["run"]["rounds"], found["run"]["planned"]) == (False, 2, 5)
        assert found["budget"]["state"].startswith("The run is not complete: ε = ")
        assert found["ledger"]["lines"][0]["rounds"] == "train, rounds 1–2"
        assert "Not complete: 2 rounds recorded." in text_of(found)

    def test_a_ledger_of_the_first_schema(self, tmp_path: Path) -> None:
        path = made(tmp_path, [])
        (path / "ledger.sqlite").unlink()
        event = GaussianRelease(1, "replace-one", SAMPLED)
        _first_schema(path / "ledger.sqlite", [f"train/{n}" for n in range(1, 4)], event)
        found = of(path)
        (line,) = found["ledger"]["lines"]
        assert (line["rounds"], line["code"]) == ("train, rounds 1–3", None)
        assert rows(found)["public", "user"]["epsilon"] == epsilon([(event, 3)], 1e-6).epsilon
        assert rows(found)["clients", "user"]["releases"] == 0
        assert found["versions"]["code"] == []
        assert "Against the clients, about one person, with everything they did: nothing was released." in text_of(
            found
        )

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ('UPDATE charge SET event = \'{"kind": "pure"}\' WHERE id = 2', "tampered with: row 2"),
            ("DELETE FROM charge WHERE id = 1", "tampered with"),
            (
                "DELETE FROM charge WHERE release = (SELECT release FROM charge ORDER BY id DESC LIMIT 1)",
                "lost charges",
            ),
        ],
    )
    def test_a_ledger_that_was_changed_is_refused(self, noised: Path, tmp_path: Path, change: str, match: str) -> None:
        path = Path(shutil.copytree(noised, tmp_path / "copy"))
        database = sqlite3.connect(path / "ledger.sqlite", isolation_level=None)
        for trigger in ("charge_is_never_changed", "charge_is_never_removed"):
            database.execute(f"DROP TRIGGER {trigger}")
        database.execute(change)
        database.close()
        with pytest.raises(HomebodyError, match=match):
            of(path)

    def test_no_ledger_is_refused_and_none_is_made(self, tmp_path: Path) -> None:
        path = made(tmp_path, [])
        (path / "ledger.sqlite").unlink()
        with pytest.raises(HomebodyError, match=r"no ledger\.sqlite"):
            of(path)
        assert not (path / "ledger.sqlite").exists()

    def test_an_empty_ledger_certifies_that_nothing_was_told(self, tmp_path: Path) -> None:
        found = of(made(tmp_path, []))
        assert {row["epsilon"] for row in found["certified"]} == {0}
        assert found["ledger"]["hash"] is None
        assert "The ledger is empty" in text_of(found)
        assert "nothing released" in Text(statement_page(found)).text

    def test_lines_break_where_rounds_differ(self, tmp_path: Path) -> None:
        plain, noise = everyone(PLAIN), everyone(PureRelease(1.0))
        told = [("a/1", plain), ("a/2", plain), ("a/3", noise), ("a/4", plain), ("b/5", plain), ("b/7", plain)]
        path = made(tmp_path, [*told, ("b/7", plain), ("b/6", plain), ("b/7", plain), ("export", plain)])
        assert [line["rounds"] for line in of(path)["ledger"]["lines"]] == [
            "a, rounds 1–2",
            "a, round 3",
            "a, round 4",
            "b, round 5",
            "b, round 7",
            "b, round 7, released again (time 2)",
            "b, round 6",
            "b, round 7, released again (time 3)",
            "export",
        ]

    def test_one_round_is_all_its_parts_and_the_worst_counts(self, tmp_path: Path) -> None:
        two = [Charge("public", "user", PureRelease(0.5), part) for part in ("items", "towers")]
        path = made(tmp_path, [("train/1", two), ("train/2", two[:1])])
        row = rows(of(path, 0.0))["public", "user"]
        assert (row["epsilon_of_one_round"], row["epsilon"]) == (1.0, 1.5)
        first = of(path)["ledger"]["lines"][0]
        assert [told["part"] for told in first["told"]] == ["items", "towers"]

    def test_a_report_is_in_one_release_alone(self, tmp_path: Path) -> None:
        told = [Charge("server", "user", Reports(0.5, 4)), Charge("server", "report", Reports(0.5))]
        found = rows(of(made(tmp_path, [("train/1", told), ("train/2", told)]), 0.0))
        assert found["server", "report"]["epsilon"] == 0.5
        assert found["server", "user"]["epsilon"] == 4.0
        assert ("public", "report") not in found

    def test_a_charge_for_a_part_alone_bounds_nothing_about_the_person(self, tmp_path: Path) -> None:
        told = [Charge("server", "interaction", PureRelease(0.5))]
        found = rows(of(made(tmp_path, [("train/1", told)]), 0.0))
        assert found["server", "interaction"]["epsilon"] == 0.5
        assert (found["server", "user"]["epsilon"], found["server", "user"]["epsilon_of_one_round"]) == ("inf", "inf")
        assert "a part of a person's data alone" in found["server", "user"]["notes"][0]

    def test_nor_does_it_keep_a_budget_or_a_claim(self, tmp_path: Path) -> None:
        told = [Charge("server", "interaction", PureRelease(0.5))]
        path = made(tmp_path, [("train/1", told)], method="fmf-ldp", budget="eps=8,observer=server")
        found = of(path)
        assert found["budget"]["state"].startswith("The budget is broken: ε = ∞ of 8")
        assert {row["this_run"] for row in found["paper"]["rows"] if row["unit"] == "user"} == {"inf", None}

    def test_views_are_an_observer_where_they_were_told(self, tmp_path: Path) -> None:
        found = rows(of(made(tmp_path, [("train/1", [Charge("views", "user", PureRelease(1.0))])])))
        assert [observer for observer, _ in found] == ["server", "clients", "views", "public"]
        assert found["views", "user"]["epsilon"] == pytest.approx(1.0, rel=1e-4)

    def test_a_long_ledger_is_one_line(self) -> None:
        ledger = Ledger()
        for number in range(1, 301):
            ledger.charge(f"train/{number}", everyone(PLAIN))
        (line,) = lines_of(list(releases_of(ledger.entries())), 1e-6)
        assert (line["first"], line["last"], line["count"]) == (1, 300, 300)


def _first_schema(path: Path, releases: Sequence[str], event: Any) -> None:
    from homebody.database import statements
    from homebody.privacy.ledger import _SCHEMA

    database = sqlite3.connect(path, isolation_level=None)
    for sql in statements(_SCHEMA):
        database.execute(sql)
    previous = "0" * 64
    for name in releases:
        row = (name, "", "public", "user", Charge("public", "user", event).as_json(), previous)
        previous = hashlib.sha256(json.dumps(row).encode()).hexdigest()
        columns = "release, part, observer, unit, event, previous, hash"
        database.execute(f"INSERT INTO charge ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, previous))
    database.execute("PRAGMA user_version = 1")
    database.close()


class TestClaims:
    def test_claimed_and_certified_are_two_columns(self, tmp_path: Path) -> None:
        charges = [Charge("server", "user", Reports(2.5, 10)), Charge("server", "report", Reports(2.5))]
        path = made(tmp_path, [("train/1", charges), ("train/2", charges)], method="fmf-ldp")
        found = of(path)
        claim = next(row for row in found["paper"]["rows"] if row["what"] == "20 epochs" and row["delta"] == 0)
        assert (claim["claimed"], claim["certified"], claim["this_run"]) == (250, 5000, 50)
        model = next(row for row in found["paper"]["rows"] if row["observer"] == "public")
        assert model["this_run"] is None
        page = Text(statement_page(found)).text
        assert re.search(r"20 epochs server user 0 250 5,000 50 ", page)
        assert "nothing released" in page
        assert "20 epochs; server, user, δ = 0: 250, 5,000, 50" in text_of(found)


class TestFiles:
    def test_the_json_reads_back(self, noised: Path, tmp_path: Path) -> None:
        found = of(noised)
        written, _ = write_statement(found, tmp_path / "new" / "statement")

        def refuse(name: str) -> None:
            pytest.fail(f"{name} is not JSON")

        assert json.loads(written.read_text(encoding="utf-8"), parse_constant=refuse) == found
        assert found["schema"] == 1
        assert sorted(file.name for file in written.parent.iterdir()) == ["statement.html", "statement.json"]

    def test_no_path_and_no_seed_is_in_it(self, tmp_path: Path) -> None:
        table = tmp_path / "secret place" / "people.csv"
        method = f"{tmp_path}/mine.py:Mine"
        path = made(tmp_path, [("train/1", everyone(PLAIN))], method=method, data=str(table), seed=4711)
        found = of(path)
        assert (found["run"]["method"], found["run"]["data"]) == ("Mine", "people.csv")
        for text in (json.dumps(found), statement_page(found)):
            assert str(tmp_path) not in text
            assert "secret place" not in text
            assert "4711" not in text

    def test_the_page_holds_the_figures_and_loads_nothing(self, noised: Path, tmp_path: Path) -> None:
        found = of(noised)
        _, written = write_statement(found, tmp_path)
        page = written.read_text(encoding="utf-8")
        shown = Text(page)
        spent = rows(found)["public", "user"]
        for part in (
            *("∞", f"{spent['epsilon']:.4g}", f"{spent['epsilon_of_one_round']:.4g}", "δ = 1e-05", "replace-one"),
            *(found["ledger"]["hash"], found["budget"]["state"], SELECTION, SIMULATED, found["versions"]["derived"]),
            *("10 of 30 drawn without replacement", "standard deviation 2", "it sees the sum without it"),
        ):
            assert part in shown.text
        assert "script" not in shown.tags
        assert not re.search(r"(?:https?:)?//\w", page)
        assert not re.search(r"\b(?:src|href)=\"(?!data:,)", page)

    def test_what_epsilon_means_is_said_for_each_observer(self, noised: Path) -> None:
        found = of(noised)
        row = rows(found)["public", "user"]
        assert row["odds"] == pytest.approx(math.exp(row["epsilon"]))
        bound = min(math.exp(row["epsilon"]) * 0.01 + 1e-5, 1 - math.exp(-row["epsilon"]) * (1 - 1e-5 - 0.01))
        assert row["found_at_1_percent"] == pytest.approx(bound)
        assert rows(found)["server", "user"]["odds"] == "inf"
        assert found["not_covered"] == list(NOT_COVERED)
        out = StringIO()
        print_statement(found, Console(file=out, width=80))
        for shown in (Text(statement_page(found)).text, out.getvalue()):
            assert "server: ε = ∞: nothing bounds what an observer learns about one person" in shown
            assert row["allows"] in shown
            assert all(text in shown for text in NOT_COVERED)

    def test_a_statement_of_an_earlier_version_has_no_words_for_it(self, noised: Path) -> None:
        found = of(noised)
        for row in found["certified"]:
            del row["allows"]
        del found["not_covered"]
        assert "What ε means" not in statement_page(found)
        out = StringIO()
        print_statement(found, Console(file=out, width=80))
        assert "What ε means" not in out.getvalue()

    def test_names_and_reasons_are_escaped(self, tmp_path: Path) -> None:
        bad = "<img src=x onerror=alert(1)>"
        charges = [Charge("server", "user", NonPrivate(bad), part=bad)]
        path = made(tmp_path, [(f"{bad}/1", charges)], method=f"x.py:{bad}", data=f"a & {bad}")
        found = of(path)
        page = statement_page(found)
        assert bad not in page
        shown = Text(page)
        assert "img" not in shown.tags
        assert f"{bad} on a & {bad}" in shown.text

    def test_a_place_that_cannot_be_written_to(self, local: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(HomebodyError, match="cannot be written to"):
            write_statement(of(local), tmp_path / "file")

    def test_a_second_statement_replaces_the_first(self, noised: Path, local: Path, tmp_path: Path) -> None:
        write_statement(of(noised), tmp_path)
        written, _ = write_statement(of(local), tmp_path)
        assert json.loads(written.read_text(encoding="utf-8"))["stages"][1]["stage"] == "laplace"
        assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            ["clip:norm.item=0.5,norm.bias=0.1"],
            "each tensor of its update down to an ℓ2 norm of at most item 0.5, bias 0.1",
        ),
        (
            ["clip:norm=1,order=1", "laplace:b=4,where=sum"],
            "The server adds Laplace noise of scale 4 to every coordinate",
        ),
        (["laplace:b=4,unbounded=true"], "nothing bounds what it hides"),
        (["one-bit:epsilon=2.5,k=100"], "sends 100 reports of one bit"),
        (["one-bit:epsilon=1,k=1"], "sends 1 report of one bit"),
        (["one-bit:epsilon=1,k=1", "shuffle:users=20"], "mixed with those of at least 20 people"),
        (["one-bit:epsilon=1,k=1", "shuffle"], "mixed with those of the whole cohort"),
        (["clip:norm=1", "ask-rows"], "Each device tells the server which rows of the shared tables it works on"),
        (
            ["clip:norm=1", "skellam:z=2,least=0.8"],
            "4 at least, 2 × the ℓ2 sensitivity of 2 (replace-one), if 80% of them answer and no more than 10% tell",
        ),
        (["secure-sum:range=4"], "Numbers beyond ±4 are cut off"),
        (["ask-rows", "secure-sum"], "The server learns the sum over the cohort and no single update"),
        (
            ["clip:norm=1", "skellam:z=2,least=0.8,colluding=0.2", "secure-sum"],
            (
                "It opens if 80% of the parties answer, and holds if no more than 20% collude with the server. The "
                "parties learn who takes part."
            ),
        ),
    ],
)
def test_each_stage_in_a_sentence(tmp_path: Path, stages: list[str], words: str) -> None:
    found = of(made(tmp_path, [("train/1", everyone(PLAIN))], stages=stages))
    assert words in found["stages"][-1]["means"]
    assert words in Text(statement_page(found)).text
    assert (PARTICIPANTS in found["outside"]) == any(stage.startswith("skellam") for stage in stages)
    assert (SEMI_HONEST in found["outside"]) == any(stage.startswith("skellam") for stage in stages)
    assert (ROSTER in found["outside"]) == any(stage.startswith("secure-sum") for stage in stages)


def test_what_reports_on_impressions_do_not_cover_is_said(tmp_path: Path) -> None:
    """Among candidates that the server drew, a report does not say which impression it is about."""
    for fields, said in (({}, True), ({"candidates": 50}, False)):
        path = made(tmp_path / str(said), [("train/1", everyone(PLAIN))], method="privaterec", fields=fields)
        assert (SHOWN in of(path)["outside"]) is said


def test_a_budget_that_holds_and_one_that_is_broken(tmp_path: Path) -> None:
    told = [("train/1", everyone(PureRelease(1.0)))]
    kept = RunFolder.open(made(tmp_path / "a", told, budget="eps=2"))
    kept.write_json("result.json", {"stopped": None})
    assert statement(kept)["budget"]["state"].startswith("All rounds ran within it: ε = 1 of 2 is spent")
    broken = statement(RunFolder.open(made(tmp_path / "b", told, budget="eps=0.5")))["budget"]
    assert broken["state"].startswith("The budget is broken: ε = 1 of 0.5 is spent for one user, against the public")

"""A tiny paper from its recipe to its pages; cut short, gone on with, and merged."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homebody.errors import HomebodyError
from homebody.report import RunFolder
from homebody.studies import cells, figures, reproduce
from homebody.studies.cells import CellProgress
from homebody.studies.papers import read_paper
from homebody.studies.provenance import without_paths
from homebody.studies.reproduce import plan
from homebody.studies.study import Row

Write = Callable[..., Path]
Made = tuple[reproduce.Plan, dict[str, Any], Path]
DATA = "synthetic:users=40,items=60,mean=12"


def part(result: dict[str, Any], label: str, data: str = DATA) -> dict[str, Any]:
    found: dict[str, Any] = next(study for study in result["studies"] if study["label"] == label)["data"][data]
    return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were begun, by name."""
    begun: list[str] = []
    execute = cells.execute

    def counting(recipe: Any, *arguments: Any, **named: Any) -> Any:
        begun.append(recipe.name)
        return execute(recipe, *arguments, **named)

    monkeypatch.setattr(cells, "execute", counting)
    return begun


def test_a_whole_paper(tmp_path: Path, write_paper: Write, counted: list[str]) -> None:
    planned = plan(read_paper(write_paper(tmp_path)))
    result = reproduce.reproduce(planned, tmp_path / "runs")
    folder = tmp_path / "runs" / "reproduce" / "tiny"
    assert json.loads((folder / "result.json").read_text()) == json.loads(json.dumps(result))
    # Two methods, two protocols, two seeds; the first figure shows the table's runs, the second two of its own.
    assert len(counted) == len(planned.recipes) == 8 + 2

    table = part(result, "Table 1")
    popularity, fedmf, absent = table["rows"]
    for row, steps in ((popularity, 1), (fedmf, 3)):
        for protocol in ("published", "strict"):
            found = row["obtained"][protocol]
            runs = [RunFolder.open(tmp_path / "runs" / "cells" / name) for name in found["cells"]]
            results = [run.read_json("result.json") for run in runs]
            assert [one["seed"] for one in results] == [0, 1]
            assert {(one["protocol"], one["rounds"]) for one in results} == {(protocol, steps)}
            for metric in ("hr@10", "ndcg@10"):
                values = [one["metrics"][metric] for one in results]
                assert found["metrics"][metric]["values"] == values
                assert found["metrics"][metric]["mean"] == pytest.approx(statistics.fmean(values))
                assert found["metrics"][metric]["sd"] == pytest.approx(statistics.stdev(values))
    hr = popularity["obtained"]["published"]["metrics"]["hr@10"]["mean"]
    assert popularity["difference"] == {"hr@10": pytest.approx(100 * (hr - 0.995))}
    assert popularity["short"] == ["hr@10"]
    assert fedmf["short"] == []
    assert (absent["missing"], absent["obtained"], absent["difference"]) == ("nobody wrote it", {}, {})
    assert (table["planned"], table["finished"]) == (8, 8)
    assert set(table["meanings"]) == {"published", "strict"}

    curve = part(result, "Figure 2")["rows"][0]["curves"]["strict"]["hr@10"]
    runs = [RunFolder.open(tmp_path / "runs" / "cells" / name) for name in fedmf["obtained"]["strict"]["cells"]]
    lines = [[line["metrics"]["hr@10"] for line in run.rounds()] for run in runs]
    assert curve["round"] == [1, 2, 3]
    assert curve["mean"] == pytest.approx([statistics.fmean(pair) for pair in zip(*lines, strict=True)])
    assert curve["low"] == [min(pair) for pair in zip(*lines, strict=True)]
    assert curve["high"] == [max(pair) for pair in zip(*lines, strict=True)]

    sweep = part(result, "Figure 3")["rows"][0]["points"]
    assert [(point["value"], point["published"]) for point in sweep] == [(2, {"ndcg@10": 0.1}), (4, {"ndcg@10": 0.2})]
    assert [point["obtained"]["strict"]["n"] for point in sweep] == [1, 1]

    (made,) = result["invocations"]
    assert made["command"] == "homebody reproduce tiny"
    assert made["parts"] == f"Table 1: {DATA}; Figure 2: {DATA}; Figure 3: {DATA}"
    assert "core" in made["machine"]
    assert "memory" in made["machine"]
    for name in ("result.json", "RESULTS.md", "results.svg", "index.html"):
        text = (folder / name).read_text(encoding="utf-8")
        assert str(tmp_path) not in text, f"{name} tells a path of this machine"
    assert not list(folder.glob(".*"))


SPENT = f"""
title = "What a budget costs"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "1"
title = "At one ε"
metrics = ["hr@10"]
also = ["epsilon"]
data = ["{DATA}"]
protocols = ["strict"]
seeds = 2

[[table.row]]
name = "private"
method = "nearby"
fields = {{ rank = 4 }}
[table.row.run]
budget = "eps=8,observer=server"
calibrate = true
stages = ["clip:norm=1", "secure-sum:helper=true", "gaussian:relation=add-remove"]

[[table.row]]
name = "popularity"
method = "popularity"
rounds = 1
seeds = 1

[[figure]]
id = "1"
kind = "sweep"
title = "By ε"
table = "1"
also = ["epsilon"]
vary = "run.epsilon"
values = [2, 8, inf]
labels = ["2", "8", "∞"]
axis = "ε"
lines = true
[[figure.row]]
name = "private"
[[figure.row]]
name = "popularity"
fixed = true
"""


def test_a_curve_over_a_budgets_epsilon(tmp_path: Path, write_paper: Write, counted: list[str]) -> None:
    folder = write_paper(tmp_path, SPENT)
    planned = plan(read_paper(folder))
    result = reproduce.reproduce(planned, tmp_path / "runs")
    # Three ε with two seeds, of which one is the table's; and popularity with a seed of its own.
    assert len(counted) == len(planned.recipes) == 3 * 2 + 1
    private, popularity = part(result, "Figure 1")["rows"]
    spent = [point["obtained"]["strict"]["metrics"]["epsilon"]["mean"] for point in private["points"]]
    assert [float(epsilon) for epsilon in spent] == [pytest.approx(2, rel=2e-3), pytest.approx(8, rel=2e-3), math.inf]
    assert [point["value"] for point in private["points"]] == ["2", "8", "∞"]
    assert [point["obtained"]["strict"]["n"] for point in popularity["points"]] == [1, 1, 1]
    page = (tmp_path / "runs" / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "1. 1 seed." in page
    assert "(1 of 2)" not in page
    reproduce.publish(result, folder)
    drawn = (folder / "curves.svg").read_text(encoding="utf-8")
    assert drawn.count('<polyline class="curve curve0"') == drawn.count('<polyline class="flat flat0"') == 1
    assert "](curves.svg)" in page


def test_seeds_that_are_asked_for_are_those_of_all_rows(tmp_path: Path, write_paper: Write) -> None:
    planned = plan(read_paper(write_paper(tmp_path, SPENT)), table="1", seeds=3)
    assert [recipe.seed for recipe in planned.recipes if recipe.method == "popularity"] == [0, 1, 2]


def test_a_synthetic_population_that_is_optional_is_run_if_it_is_named(tmp_path: Path, write_paper: Write) -> None:
    text = SPENT.replace("seeds = 2\n", f'seeds = 2\noptional = ["{DATA}"]\n')
    paper = read_paper(write_paper(tmp_path, text))
    assert not plan(paper).recipes
    assert plan(paper, data=[DATA]).recipes


COLD = f"""
title = "Two splits in one table"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "1"
title = "Known people and new ones"
metrics = ["hr@10"]
data = ["{DATA}"]
protocols = ["strict"]
seeds = 1
rounds = 1

[[table.row]]
name = "known"
method = "popularity"

[[table.row]]
name = "new"
method = "popularity"
run = {{ split = "cold-users:test=0.2,valid=0" }}
"""


def test_every_row_says_its_own_split(tmp_path: Path, write_paper: Write) -> None:
    planned = plan(read_paper(write_paper(tmp_path, COLD)))
    result = reproduce.reproduce(planned, tmp_path / "runs")
    texts = part(result, "Table 1")["meanings_of_rows"]["strict"]
    assert list(texts.values()) == [["known"], ["new"]]
    known, new = texts
    assert "split leave-one-out" in known
    assert "split cold-users:test=0.2,valid=0" in new
    for name in ("RESULTS.md", "index.html"):
        text = (tmp_path / "runs" / "reproduce" / "tiny" / name).read_text(encoding="utf-8")
        assert "each table and figure states its split" in text
        assert "obtained, strict (known): split leave-one-out" in text
        assert "obtained, strict (new): split cold-users:test=0.2,valid=0" in text


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, write_once: Write) -> Made:
    """A paper with every kind of table, run once."""
    tmp_path = tmp_path_factory.mktemp("tables")
    planned = plan(read_paper(write_once(tmp_path)))
    return planned, reproduce.reproduce(planned, tmp_path / "runs"), tmp_path


class TestTablesOfTables:
    """Every kind of table, on one set of runs."""

    def test_nothing_is_run_twice(self, everything: Made) -> None:
        planned, _, tmp_path = everything
        # Table 1: 2 rows, 2 protocols, 2 seeds. Table 6: 1 seed, 2 protocols; of its 4 points one is Table 1's.
        # Table 10: 2 protocols, 2 seeds, with slices. Figure 3: 2 points.
        assert len(planned.recipes) == 8 + 2 * 3 + 4 + 2
        assert len(list((tmp_path / "runs" / "cells").glob("*/result.json"))) == len(planned.recipes)
        assert planned.others == []

    def test_pairs(self, everything: Made) -> None:
        _, result, _ = everything
        one, other, gain = part(result, "Table 4")["rows"]
        assert (one["name"], other["name"], gain["name"]) == ("Popularity", "FedMF+<x>", "improvement on Popularity")
        assert gain["published"] == {"hr@10": pytest.approx(1.0 / 99.5 - 1)}
        for protocol in ("published", "strict"):
            for metric in ("hr@10", "ndcg@10"):
                before, after = (line["obtained"][protocol]["metrics"][metric] for line in (one, other))
                found = gain["obtained"][protocol]["metrics"][metric]
                assert found["mean"] == pytest.approx(after["mean"] / before["mean"] - 1)
                each = [new / old - 1 for old, new in zip(before["values"], after["values"], strict=True)]
                assert found["values"] == pytest.approx(each)
                assert found["sd"] == pytest.approx(statistics.stdev(each))
        ours = gain["obtained"]["published"]["metrics"]["hr@10"]["mean"]
        assert gain["difference"] == {"hr@10": pytest.approx(100 * (ours - gain["published"]["hr@10"]))}
        assert gain["short"] == []
        assert [one["obtained"], other["obtained"]] == [row["obtained"] for row in part(result, "Table 1")["rows"][:2]]

    def test_costs(self, everything: Made) -> None:
        _, result, tmp_path = everything
        (row,) = part(result, "Table 5")["rows"]
        assert row["published"] == {"parameters": 244, "epochs": 7, "seconds": 100}
        assert (row["difference"], row["short"]) == ({}, [])
        found = row["obtained"]["published"]["metrics"]
        runs = [
            RunFolder.open(tmp_path / "runs" / "cells" / name).read_json("result.json")
            for name in row["obtained"]["published"]["cells"]
        ]
        assert found["parameters"] == {"mean": 60 * 4 + 4, "sd": 0.0, "values": [244.0, 244.0]}
        assert found["epochs"]["values"] == [run["chosen_round"] for run in runs]
        assert found["seconds"]["values"] == [run["seconds"] for run in runs]
        assert list(row["obtained"]) == ["published"]

    def test_a_sweep_as_a_table(self, everything: Made) -> None:
        _, result, _ = everything
        first, own = part(result, "Table 6")["rows"]
        assert [(point["label"], point["value"]) for point in own["points"]] == [
            ("none", ["clip:norm=2"]),
            ("some", ["clip:norm=1,order=1", "laplace:b=0.25"]),
        ]
        epsilon = [
            [point["obtained"]["strict"]["metrics"]["epsilon"]["mean"] for point in row["points"]]
            for row in (first, own)
        ]
        assert [row[0] for row in epsilon] == ["inf", "inf"]
        # Three rounds, each of a sensitivity of 2 over b, or less when they are composed well.
        assert 0 < epsilon[0][1] <= 3 * 4
        assert epsilon[0][1] < epsilon[1][1] <= 3 * 8
        assert first["points"][0]["published_sd"] == pytest.approx({"hr@10": 0.005, "ndcg@10": 0.0025})
        same = part(result, "Table 1")["rows"][1]["obtained"]["strict"]["cells"]
        assert first["points"][0]["obtained"]["strict"]["cells"] == same[:1]

    def test_a_slice_of_the_users(self, everything: Made) -> None:
        _, result, tmp_path = everything
        everyone, few = part(result, "Table 10")["rows"]
        assert everyone["obtained"]["strict"]["cells"] == few["obtained"]["strict"]["cells"]
        run = RunFolder.open(tmp_path / "runs" / "cells" / few["obtained"]["strict"]["cells"][0]).read_json(
            "result.json"
        )
        assert few["obtained"]["strict"]["metrics"]["hr@10"]["values"][0] == run["metrics"]["-12/hr@10"]
        assert everyone["obtained"]["strict"]["metrics"]["hr@10"]["values"][0] == run["metrics"]["hr@10"]
        assert run["metrics"]["-12/hr@10"] != run["metrics"]["hr@10"]
        assert set(few["difference"]) == {"hr@10", "ndcg@10"}

    def test_the_files(self, everything: Made) -> None:
        _, result, tmp_path = everything
        folder = tmp_path / "runs" / "reproduce" / "tiny"

        def refuse(text: str) -> None:
            raise AssertionError(f"{text} is no JSON")

        assert json.loads((folder / "result.json").read_text(), parse_constant=refuse) == result
        told = (folder / "RESULTS.md").read_text(encoding="utf-8")
        assert "| improvement on Popularity |" in told
        assert "| FedMF | 244 | 244 | 7 | " in told
        assert "| FedMF+&lt;x> | ε, server | obtained | ∞ | " in told
        assert "Not run yet" not in told
        again = reproduce.reproduce(plan(read_paper(tmp_path / "tiny"), table="4"), tmp_path / "runs")
        assert part(again, "Table 6")["rows"] == part(result, "Table 6")["rows"]


def test_only_some_protocols(tmp_path: Path, write_paper: Write, counted: list[str]) -> None:
    paper = read_paper(write_paper(tmp_path))
    out = tmp_path / "runs"
    planned = plan(paper, table="1", protocols=["strict"])
    assert planned.command == "homebody reproduce tiny --table 1 --protocol strict"
    assert {recipe.protocol for recipe in planned.recipes} == {"strict"}
    first = part(reproduce.reproduce(planned, out), "Table 1")
    assert (first["planned"], first["finished"], first["protocols"]) == (4, 4, ["strict"])
    assert first["rows"][1]["obtained"]["published"]["n"] == 0
    assert first["rows"][1]["difference"] == {}, "strict figures are not held against the published ones"
    told = (out / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "Asked for under strict only" in told
    assert "not finished" not in told

    # What was run before is shown beside what is asked for now.
    second = reproduce.reproduce(plan(paper, table="1", protocols=["published"]), out)
    both = part(second, "Table 1")
    assert len(counted) == 8
    assert [made["runs"] for made in second["invocations"]] == [4], "what was only looked up is not counted"
    assert (both["planned"], both["finished"]) == (4, 4)
    assert both["rows"][1]["obtained"]["strict"] == first["rows"][1]["obtained"]["strict"]
    assert set(both["rows"][1]["difference"]) == {"hr@10", "ndcg@10"}
    assert set(both["meanings"]) == {"published", "strict"}
    # The third figure is under strict alone.
    assert {study.label for study, _ in plan(paper, protocols=["published"]).studies} == {"Table 1", "Figure 2"}


def test_a_pair_without_all_its_seeds_has_no_deviation(tmp_path: Path, write_paper: Write, more: str) -> None:
    planned = plan(read_paper(write_paper(tmp_path, more)), table="4")
    out = tmp_path / "runs"

    def interrupt(progress: CellProgress) -> None:
        if progress.finished == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(planned, out, watch=interrupt)
    *_, gain = part(json.loads((out / "reproduce" / "tiny" / "result.json").read_text()), "Table 4")["rows"]
    assert gain["obtained"]["published"]["n"] == 1
    assert gain["obtained"]["published"]["metrics"]["hr@10"]["sd"] is None
    assert gain["obtained"]["strict"]["metrics"] == {}


class TestFigures:
    """From made-up results of three seeds."""

    def lines(self, folder: Path, of: dict[str, list[float | None]]) -> list[dict[str, Any]]:
        """Of Table 4 under strict; None: a seed that failed."""
        study = replace(read_paper(folder).tables[1], seeds=3, protocols=["strict"], metrics=["hr@10"])

        def results(row: Row, protocol: str, point: int) -> list[dict[str, Any]]:
            common = {"seconds": 1.0, "chosen_round": 1, "run": "x"}
            return [
                {"error": "It broke.", **common} if value is None else {"metrics": {"hr@10": value}, **common}
                for value in of[row.name]
            ]

        return figures.pairs(figures.Runs(study, DATA, results, lambda run: []))

    def test_seeds_are_paired_only_where_all_are_there(self, tmp_path: Path, write_paper: Write, more: str) -> None:
        folder = write_paper(tmp_path, more)
        *_, gain = self.lines(folder, {"Popularity": [0.1, 0.2, 0.3], "FedMF+<x>": [0.2, 0.2, 0.6]})
        found = gain["obtained"]["strict"]["metrics"]["hr@10"]
        assert found["mean"] == pytest.approx(2 / 3)
        assert found["values"] == pytest.approx([1.0, 0.0, 1.0])
        *_, gain = self.lines(folder, {"Popularity": [0.1, None, 0.3], "FedMF+<x>": [0.2, 0.2, None]})
        found = gain["obtained"]["strict"]["metrics"]["hr@10"]
        assert found["mean"] == pytest.approx(0.0)
        assert (found["values"], found["sd"], gain["obtained"]["strict"]["n"]) == ([], None, 2)

    def test_nothing_can_be_gained_on_nothing(self, tmp_path: Path, write_paper: Write, more: str) -> None:
        folder = write_paper(tmp_path, more)
        *_, gain = self.lines(folder, {"Popularity": [0.0, 0.0, 0.0], "FedMF+<x>": [0.2, 0.2, 0.6]})
        assert gain["obtained"]["strict"]["metrics"] == {}
        *_, gain = self.lines(folder, {"Popularity": [0.0, 0.1, 0.2], "FedMF+<x>": [0.2, 0.2, 0.2]})
        assert gain["obtained"]["strict"]["metrics"]["hr@10"] == {"mean": pytest.approx(1.0), "sd": None, "values": []}

    @pytest.mark.parametrize(("ours", "short"), [(0.9799, ["hr@10"]), (0.9801, []), (0.999, []), (1.0, [])])
    def test_what_falls_short(
        self, ours: float, short: list[str], tmp_path: Path, write_paper: Write, more: str
    ) -> None:
        """Of 99.5, by more than 1.5 points."""
        one, *_ = self.lines(write_paper(tmp_path, more), {"Popularity": [ours] * 3, "FedMF+<x>": [0.5] * 3})
        assert one["short"] == short


def test_cut_short_and_gone_on_with(tmp_path: Path, write_paper: Write, counted: list[str]) -> None:
    planned = plan(read_paper(write_paper(tmp_path)), table="1")
    out = tmp_path / "runs"
    seen: list[CellProgress] = []

    def interrupt(progress: CellProgress) -> None:
        seen.append(progress)
        if progress.finished == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce(planned, out, watch=interrupt)
    assert len(counted) == 3
    partial = json.loads((out / "reproduce" / "tiny" / "result.json").read_text())
    table = part(partial, "Table 1")
    assert (table["planned"], table["finished"]) == (8, 3)
    popularity, fedmf, _ = table["rows"]
    assert popularity["obtained"]["published"]["n"] == 2
    assert popularity["obtained"]["strict"]["n"] == 1
    assert fedmf["obtained"]["strict"] | {"seconds": None} == {
        "n": 0,
        "metrics": {},
        "errors": [],
        "diverged": False,
        "seconds": None,
        "chosen_rounds": [],
        "cells": [],
    }
    told = (out / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "Not complete: 3 of 8 runs are finished." in told
    assert "(1 of 2)" in told
    assert "not finished" in told

    result = reproduce.reproduce(planned, out)
    assert len(counted) == 8
    assert len(set(counted)) == 8, "a run that was finished was run again"
    assert part(result, "Table 1")["finished"] == 8
    again = reproduce.reproduce(planned, out)
    assert len(counted) == 8
    assert [row["obtained"] for row in part(again, "Table 1")["rows"]] == [
        row["obtained"] for row in part(result, "Table 1")["rows"]
    ]


def test_parts_of_several_commands_stand_side_by_side(tmp_path: Path, write_paper: Write, tiny: str) -> None:
    other = "synthetic:users=30,items=50,mean=12"
    text = tiny.replace(f'data = ["{DATA}"]\nseeds = 2', f'data = ["{DATA}", "{other}"]\nseeds = 2')
    paper = read_paper(write_paper(tmp_path, text))
    out = tmp_path / "runs"
    reproduce.reproduce(plan(paper, table="1", data=[other], seeds=1, rounds=1), out)
    result = reproduce.reproduce(plan(paper, table="1", data=[DATA], seeds=1, rounds=2), out)
    (table,) = (study for study in result["studies"] if study["label"] == "Table 1")
    assert list(table["data"]) == [DATA, other]
    assert [part(result, "Table 1", name)["rounds"] for name in (DATA, other)] == [2, 1]
    assert {made["command"]: made["parts"] for made in result["invocations"]} == {
        f"homebody reproduce tiny --table 1 --data {DATA} --seeds 1 --rounds 2": f"Table 1: {DATA}",
        f"homebody reproduce tiny --table 1 --data {other} --seeds 1 --rounds 1": f"Table 1: {other}",
    }
    assert next(study for study in result["studies"] if study["label"] == "Figure 2")["data"] == {}
    # The latest result of a part is the one that stays.
    latest = reproduce.reproduce(plan(paper, table="1", data=[other], seeds=2, rounds=1), out)
    assert part(latest, "Table 1", other)["seeds"] == 2
    assert part(latest, "Table 1")["seeds"] == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('metrics = ["ndcg@10"]', 'metrics = ["hr@10"]'),
        ("values = [2, 4]", 'values = [2, 4]\nlabels = ["two", "four"]'),
        ("values = [2, 4]", 'values = [2, 4]\nalso = ["seconds"]'),
    ],
)
def test_columns_that_changed_are_not_mixed(old: str, new: str, tmp_path: Path, write_paper: Write, tiny: str) -> None:
    out = tmp_path / "runs"
    reproduce.reproduce(plan(read_paper(write_paper(tmp_path)), figure="3"), out)
    changed = tiny.replace(old, new)
    paper = read_paper(write_paper(tmp_path / "changed", changed))
    result = reproduce.reproduce(plan(paper, table="1", seeds=1, rounds=1), out)
    assert next(study for study in result["studies"] if study["label"] == "Figure 3")["data"] == {}


def test_a_run_that_fails_is_told_of_and_stops_nothing(tmp_path: Path, write_paper: Write, tiny: str) -> None:
    text = tiny.replace("learning_rate = 0.05", "learning_rate = 1e30, item_rate = 1e30")
    result = reproduce.reproduce(plan(read_paper(write_paper(tmp_path, text)), table="1", seeds=1), tmp_path / "runs")
    popularity, fedmf, _ = part(result, "Table 1")["rows"]
    assert popularity["obtained"]["strict"]["n"] == 1
    assert fedmf["obtained"]["strict"]["n"] == 0
    (error,) = fedmf["obtained"]["strict"]["errors"]
    told = (tmp_path / "runs" / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "| failed |" in told
    assert error.split(".")[0][:30] in told
    assert str(tmp_path) not in told


def test_what_is_known_to_diverge_is_a_result_if_it_does(
    tmp_path: Path, write_paper: Write, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(text: str, out: str) -> tuple[dict[str, Any], str]:
        paper = read_paper(write_paper(tmp_path / out, text))
        result = reproduce.reproduce(plan(paper, table="1", seeds=1), tmp_path / out / "runs")
        return part(result, "Table 1")["rows"][1], (
            tmp_path / out / "runs" / "reproduce" / "tiny" / "RESULTS.md"
        ).read_text(encoding="utf-8")

    known = tiny.replace('method = "fedmf"\n', 'method = "fedmf"\ndiverges = true\n', 1)
    row, text = told(known.replace("learning_rate = 0.05", "learning_rate = 1e30, item_rate = 1e30"), "diverging")
    assert row["diverges"]
    assert row["obtained"]["strict"]["diverged"]
    assert "| diverged |" in text
    assert "diverged, as it is known to (strict): Training diverged" in text
    assert "failed" not in text
    row, text = told(known, "learning")
    assert row["obtained"]["strict"]["n"] == 1
    assert "diverged" not in text

    def failing(*arguments: Any, **named: Any) -> dict[str, Any]:
        raise HomebodyError("It broke.")

    monkeypatch.setattr(cells, "execute", failing)
    row, text = told(known, "failing")
    assert "failed (strict): It broke." in text
    assert "diverged" not in text


def test_a_failure_tells_no_path(tmp_path: Path, write_paper: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **named: Any) -> dict[str, Any]:
        raise HomebodyError(f"It broke in {tmp_path}/runs/fedmf-1.")

    monkeypatch.setattr(cells, "execute", failing)
    result = reproduce.reproduce(plan(read_paper(write_paper(tmp_path)), seeds=1), tmp_path / "runs")
    assert part(result, "Table 1")["rows"][1]["obtained"]["strict"]["errors"] == ["It broke in …/fedmf-1."]
    assert part(result, "Figure 2")["rows"][0]["errors"] == ["It broke in …/fedmf-1."]
    assert part(result, "Figure 3")["rows"][0]["points"][0]["obtained"]["strict"]["errors"] == [
        "It broke in …/fedmf-1."
    ]
    assert str(tmp_path) not in json.dumps(result)


def test_without_plotly_there_is_no_page_but_all_else(
    tmp_path: Path, write_paper: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "has_plotly", lambda: False)
    reproduce.reproduce(plan(read_paper(write_paper(tmp_path)), table="1", seeds=1, rounds=1), tmp_path)
    assert sorted(path.name for path in (tmp_path / "reproduce" / "tiny").iterdir()) == [
        "RESULTS.md",
        "result.json",
        "results.svg",
    ]


def test_a_metric_that_no_run_has(tmp_path: Path, write_paper: Write, tiny: str) -> None:
    text = tiny.replace('metrics = ["ndcg@10"]', 'metrics = ["gini@10"]')
    with pytest.raises(HomebodyError, match="There is no metric 'gini@10'"):
        reproduce.reproduce(plan(read_paper(write_paper(tmp_path, text)), figure="3"), tmp_path)


def test_a_result_of_another_version_is_not_mixed_in(tmp_path: Path, write_paper: Write) -> None:
    file = tmp_path / "reproduce" / "tiny" / "result.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"schema": 1, "paper": "tiny", "studies": []}')
    with pytest.raises(HomebodyError, match="written by another version of Homebody, or for another paper"):
        reproduce.reproduce(plan(read_paper(write_paper(tmp_path)), table="1"), tmp_path)


def test_a_result_that_is_none_is_not_written_over(tmp_path: Path, write_paper: Write) -> None:
    file = tmp_path / "reproduce" / "tiny" / "result.json"
    file.parent.mkdir(parents=True)
    file.write_text("[]")
    with pytest.raises(HomebodyError, match="is not the result of a reproduction"):
        reproduce.reproduce(plan(read_paper(write_paper(tmp_path)), table="1"), tmp_path)
    assert file.read_text() == "[]"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"table": "9"}, "There is no table '9'"),
        ({"figure": "9"}, "There is no figure '9'"),
        ({"data": ["ml-1m"]}, "There is no data set of this part of the paper 'ml-1m'"),
        ({"protocols": ["isolated"]}, "There is no protocol of this part of the paper 'isolated'"),
        ({"seeds": 0}, "Seeds must be at least 1, not 0"),
        ({"rounds": -1}, "Rounds must be at least 1, not -1"),
    ],
)
def test_what_cannot_be_planned(asked: dict[str, Any], expected: str, tmp_path: Path, write_paper: Write) -> None:
    with pytest.raises(HomebodyError, match=expected):
        plan(read_paper(write_paper(tmp_path)), **asked)


def test_a_plan_is_what_was_asked_for(tmp_path: Path, write_paper: Write) -> None:
    paper = read_paper(write_paper(tmp_path))
    assert {study.label for study, _ in plan(paper, figure="2").studies} == {"Figure 2"}
    assert {study.label for study, _ in plan(paper, table="1", figure="3").studies} == {"Table 1", "Figure 3"}
    recipes = plan(paper, table="1", seeds=3, rounds=5).recipes
    assert len(recipes) == 2 * 2 * 3
    assert {recipe.rounds for recipe in recipes} == {5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is in /a/b/c-1.", "It is in …/c-1."),
        ("'/home/me/x.csv' is not there", "'…/x.csv' is not there"),
        ("see https://example.org/a/b or 3/4", "see https://example.org/a/b or 3/4"),
        ("full/hr@10 and valid/ndcg@10", "full/hr@10 and valid/ndcg@10"),
    ],
)
def test_no_folder_of_this_machine_gets_onto_a_page(text: str, expected: str) -> None:
    assert without_paths(text) == expected


def test_runs_of_another_machine_are_told_of(tmp_path: Path, write_paper: Write) -> None:
    planned = plan(read_paper(write_paper(tmp_path)), table="1")
    result = reproduce.reproduce(planned, tmp_path / "runs")
    assert not [note for note in part(result, "Table 1")["notes"] if "machine" in note]
    run = next((tmp_path / "runs" / "cells").glob("fedmf*")) / "environment.json"
    environment = json.loads(run.read_text())
    run.write_text(json.dumps({**environment, "cores": environment["cores"] + 14}))
    again = reproduce.reproduce(planned, tmp_path / "runs")
    assert (
        f"1 of 8 runs were made on another machine, of {environment['cores'] + 14} cores."
        in (part(again, "Table 1")["notes"])
    )


def test_where_an_epsilon_that_counts_on_a_shuffle_is_shown_a_footnote_says_so(
    tmp_path: Path, more: str, write_paper: Write
) -> None:
    text = more.replace('["clip:norm=1,order=1", "laplace:b=0.5"]]', '["one-bit:epsilon=2,k=5", "shuffle"]]')
    paper = read_paper(write_paper(tmp_path, text))
    found = part(reproduce.reproduce(plan(paper, table="6", rounds=1), tmp_path / "runs"), "Table 6")["footnotes"]
    assert found == ["ε of fedmf holds behind a proxy that does not collude with the observer; by addition it is 10"]
    unseen = read_paper(write_paper(tmp_path, text.replace('also = ["epsilon"]', ""), "other"))
    result = reproduce.reproduce(plan(unseen, table="6", rounds=1), tmp_path / "runs")
    assert part(result, "Table 6")["footnotes"] == []


def test_all_on_one_device(tmp_path: Path, write_paper: Write) -> None:
    planned = plan(read_paper(write_paper(tmp_path)), table="1", device="cuda")
    assert planned.command == "homebody reproduce tiny --table 1 --device cuda"
    assert {recipe.device for recipe in planned.recipes} == {"cuda"}

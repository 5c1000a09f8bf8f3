"""A tiny paper from its recipe to its pages; cut short, gone on with, and merged."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homebody.errors import HomebodyError
from homebody.report import RunFolder
from homebody.studies import cells, reproduce
from homebody.studies.cells import Progress
from homebody.studies.made import without_paths
from homebody.studies.papers import read_paper
from homebody.studies.reproduce import plan

Write = Callable[..., Path]
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
    for name in ("result.json", "RESULTS.md", "index.html"):
        text = (folder / name).read_text(encoding="utf-8")
        assert str(tmp_path) not in text, f"{name} tells a path of this machine"
    assert not list(folder.glob(".*"))


def test_cut_short_and_gone_on_with(tmp_path: Path, write_paper: Write, counted: list[str]) -> None:
    planned = plan(read_paper(write_paper(tmp_path)), table="1")
    out = tmp_path / "runs"
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
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


def test_columns_that_changed_are_not_mixed(tmp_path: Path, write_paper: Write, tiny: str) -> None:
    out = tmp_path / "runs"
    reproduce.reproduce(plan(read_paper(write_paper(tmp_path)), figure="3"), out)
    changed = tiny.replace('metrics = ["ndcg@10"]', 'metrics = ["hr@10"]')
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
    assert sorted(path.name for path in (tmp_path / "reproduce" / "tiny").iterdir()) == ["RESULTS.md", "result.json"]


def test_a_metric_that_no_run_has(tmp_path: Path, write_paper: Write, tiny: str) -> None:
    text = tiny.replace('metrics = ["ndcg@10"]', 'metrics = ["gini@10"]')
    with pytest.raises(HomebodyError, match="There is no metric 'gini@10'"):
        reproduce.reproduce(plan(read_paper(write_paper(tmp_path, text)), figure="3"), tmp_path)


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

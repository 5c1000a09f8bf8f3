"""Pairs, costs and sweeps as Markdown, as a page and on the terminal, from results whose every figure is known."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homebody.report.charts import sweep_charts
from homebody.report.markdown import reproduction_markdown
from homebody.report.reproduction import rounds_table, state, sweep_table, values_table
from homebody.report.reproduction_page import reproduction_page
from homebody.report.terminal import print_reproduction

BOTH = ["published", "strict"]


def found(n: int = 2, errors: tuple[str, ...] = (), **metrics: tuple[Any, float | None]) -> dict[str, Any]:
    spreads = {
        name.replace("_at_", "@"): {"mean": mean, "sd": sd, "values": [mean] * n}
        for name, (mean, sd) in metrics.items()
    }
    return {"n": n if metrics else 0, "metrics": spreads, "errors": list(errors), "cells": []}


def line(name: str = "", **changes: Any) -> dict[str, Any]:
    empty = {
        "note": "",
        "missing": "",
        "published": {},
        "published_sd": {},
        "obtained": {},
        "difference": {},
        "short": [],
    }
    return {**({"name": name} if name else {}), **empty, **changes}


def study(label: str, kind: str, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    part = {
        "made": {},
        "seeds": 2,
        "rounds": None,
        "protocols": changes.get("protocols", BOTH),
        "planned": 4,
        "finished": 4,
        "meanings": {},
        "notes": [],
        "rows": rows,
    }
    whole = {
        "id": label[-1],
        "label": label,
        "form": label.split()[0].lower(),
        "kind": kind,
        "title": "A title",
        "note": "",
        "metrics": ["hr@10"],
        "also": [],
        "scale": 100,
        "protocols": BOTH,
        "against": "published",
        "vary": "",
        "axis": "",
        "labels": [],
        "data": {"toy": part},
    }
    return {**whole, **changes}


def paper(*studies: dict[str, Any]) -> dict[str, Any]:
    empty = {"docs": "", "note": "", "tolerance": 1.5, "invocations": []}
    return {"paper": "toy", "title": "A paper", "citation": "Someone", "studies": list(studies), **empty}


def pairs() -> dict[str, Any]:
    strict = found(hr_at_10=(0.5, None), n=1)
    rows = [
        line(
            "One",
            published={"hr@10": 0.5},
            published_sd={"hr@10": 0.0125},
            obtained={"published": found(hr_at_10=(0.48, 0.01)), "strict": strict},
            difference={"hr@10": -2.0},
            short=["hr@10"],
        ),
        line("Two", missing="nobody wrote it", published={"hr@10": 0.6}),
        line("improvement on One", improvement=True, missing="nobody wrote it", published={"hr@10": 0.2}),
        line("improvement on Zero", improvement=True, obtained={p: found(hr_at_10=(-0.1, 0.05)) for p in BOTH}),
    ]
    return study("Table 2", "pairs", rows)


def costs() -> dict[str, Any]:
    ours = found(parameters=(53857.0, 0.0), epochs=(61.5, 2.25), seconds=(23.54, 0.3))
    rows = [
        line("PFedRec", published={"parameters": 53857, "epochs": 61, "seconds": 854}, obtained={"published": ours}),
        line("Central", published={}, obtained={"published": found(seconds=(2.0, None), n=1)}),
    ]
    metrics = ["parameters", "epochs", "seconds"]
    return study("Table 5", "table", rows, metrics=metrics, protocols=["published"], scale=100)


def noise(form: str = "Table 7") -> dict[str, Any]:
    points = [
        {
            "value": [],
            "label": "λ = 0",
            **line(
                published={"hr@10": 0.7},
                published_sd={"hr@10": 0.02},
                obtained={p: found(hr_at_10=(0.6, 0.01), epsilon=("inf", None)) for p in BOTH},
                difference={"hr@10": -10.0},
                short=["hr@10"],
            ),
        },
        {
            "value": ["laplace:b=1"],
            "label": "λ = 1",
            **line(
                published={"hr@10": 0.5},
                obtained={
                    "published": found(hr_at_10=(0.55, 0.01), epsilon=(2.446, 0.0)),
                    "strict": found(errors=("It broke.",)),
                },
                difference={"hr@10": 5.0},
            ),
        },
    ]
    for point in points:
        for key in ("note", "missing"):
            del point[key]
    bare = [{"value": point["value"], "label": point["label"], **line()} for point in points]
    rows = [line("Ours", points=points, note="A remark."), line("Away", missing="nobody wrote it", points=bare)]
    return study(form, "sweep", rows, also=["epsilon"], vary="run.stages", axis="noise", labels=["λ = 0", "λ = 1"])


class Cells(HTMLParser):
    """The texts of the cells of every row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


def on_terminal(result: dict[str, Any], tmp_path: Path, labels: list[str], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_reproduction(result, tmp_path, labels, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(one) <= width for one in text.splitlines() if not one.startswith("page:"))
    assert "…" not in text
    return str(text)


class TestPairs:
    def test_markdown(self) -> None:
        text = reproduction_markdown(paper(pairs()))
        assert "| One | 50.00 ± 1.25 | 48.00 ± 1.00 | 50.00 (1 of 2) | ▼ −2.00 |" in text
        assert "| Two <sup>[1](#notes)</sup> | 60.00 | not run | not run | – |" in text
        assert "| improvement on One | +20.00 % | not run | not run | – |" in text
        assert "| improvement on Zero | – | −10.00 % ± 5.00 | −10.00 % ± 5.00 | – |" in text
        assert text.count("nobody wrote it") == text.count("\n1. not run: nobody wrote it.") == 1

    def test_page(self) -> None:
        rows = {row[0]: row[1:] for row in Cells(reproduction_page(paper(pairs()))).rows if row}
        assert rows["improvement on Zero"] == ["–", "−10.00 % ± 5.00", "−10.00 % ± 5.00", "–"]
        assert rows["improvement on One"] == ["+20.00 %", "not run", "not run", "–"]

    def test_terminal(self, tmp_path: Path) -> None:
        text = on_terminal(paper(pairs()), tmp_path, ["Table 2"])
        assert re.search(r"One +HR@10 +50\.00 ± 1\.25 +48\.00 ± 1\.00 +50\.00 \(1 of 2\) +▼ −2\.00", text)
        assert "▼ short by more than 1.5 points" in text
        assert "RESULTS.md" in text
        one = pairs()
        one["data"]["toy"]["protocols"] = ["published"]
        assert "strict" in on_terminal(paper(one), tmp_path, ["Table 2"])
        for row in one["data"]["toy"]["rows"]:
            row["obtained"].pop("strict", None)
        assert on_terminal(paper(one), tmp_path, ["Table 2"]).count("obtained,") == 1


class TestCosts:
    def test_markdown_says_what_is_to_be_known_of_the_runs(self) -> None:
        study = costs()
        for part in study["data"].values():
            part["notes"] = ["2 of 5 runs were made on another machine, of 16 cores."]
        text = reproduction_markdown(paper(study))
        assert "<summary>Notes on the runs on toy</summary>" in text
        assert text.count("\n- 2 of 5 runs were made on another machine, of 16 cores.\n") == 1

    def test_a_note_that_holds_for_some_studies_names_them(self) -> None:
        first, second, third = costs(), noise(), pairs()
        for study in (first, second, third):
            study["data"]["toy"]["notes"] = ["Of all."]
        second["data"]["toy"]["notes"].append("Of one.")
        text = reproduction_markdown(paper(first, second, third))
        assert text.count("\n- Of all.\n- Of one. (Table 7)\n") == 1

    def test_a_footnote_is_everywhere(self, tmp_path: Path) -> None:
        said = "ε of one holds behind a proxy"
        one = costs()
        one["data"]["toy"]["footnotes"] = [said]
        assert reproduction_markdown(paper(one)).count(f"\n- {said}") == 1
        assert reproduction_page(paper(one)).count(f"<li>{said}</li>") == 1
        assert on_terminal(paper(one), tmp_path, ["Table 5"]).count(said) == 1

    def test_markdown_has_no_differences(self) -> None:
        text = reproduction_markdown(paper(costs()))
        assert (
            "| method | parameters<br>published | parameters<br>obtained, published protocol | epochs<br>published |"
            in text
        )
        assert "| PFedRec | 53,857 | 53,857 | 61 | 61.5 ± 2.2 | 854 | 23.5 ± 0.3 |" in text
        assert "| Central | – | – | – | – | – | 2.0 (1 of 2) |" in text
        assert "difference" not in text
        assert "× 100" not in text

    def test_page_has_no_differences(self) -> None:
        text = reproduction_page(paper(costs()))
        rows = {row[0]: row[1:] for row in Cells(text).rows if row}
        assert rows["PFedRec"] == ["53,857", "53,857", "61", "61.5 ± 2.2", "854", "23.5 ± 0.3"]
        assert "difference" not in text.partition('id="made"')[0]
        assert "reach the published" not in text

    def test_terminal(self, tmp_path: Path) -> None:
        text = on_terminal(paper(costs()), tmp_path, ["Table 5"])
        assert re.search(r"PFedRec +parameters +53,857 +53,857 *\n +epochs +61 +61\.5 ± 2\.2 *\n", text)
        assert "differ" not in text


class TestOurOwn:
    """A table that the paper does not have: nothing stands beside what was obtained."""

    def ours(self) -> dict[str, Any]:
        three = ["published", "isolated", "strict"]
        rows = [
            line(
                "Alone",
                obtained={
                    name: found(hr_at_10=(share, 0.01)) for name, share in zip(three, (1.0, 0.1, 0.2), strict=True)
                },
            )
        ]
        return study("Table x", "table", rows, protocols=three)

    def test_markdown(self) -> None:
        text = reproduction_markdown(paper(self.ours()))
        heads = ("obtained, published protocol", "obtained, isolated", "obtained, strict")
        assert f"| method | {' | '.join(f'HR@10<br>{head}' for head in heads)} |" in text
        assert "| Alone | 100.00 ± 1.00 | 10.00 ± 1.00 | 20.00 ± 1.00 |" in text

    def test_page(self) -> None:
        rows = {row[0]: row[1:] for row in Cells(reproduction_page(paper(self.ours()))).rows if row}
        assert rows["Alone"] == ["100.00 ± 1.00", "10.00 ± 1.00", "20.00 ± 1.00"]
        assert [head.rpartition(",")[2].strip() for head in rows["method"]] == [
            "published protocol",
            "isolated",
            "strict",
        ]

    def test_terminal(self, tmp_path: Path) -> None:
        text = on_terminal(paper(self.ours()), tmp_path, ["Table x"])
        assert re.search(r"Alone +HR@10 +100\.00 ± 1\.00 +10\.00 ± 1\.00 +20\.00 ± 1\.00 *\n", text)
        assert "differ" not in text


class TestSweeps:
    def test_a_table_has_a_column_a_value(self) -> None:
        one = noise()
        grid = sweep_table(one, one["data"]["toy"])
        assert grid.columns == ["method", "metric", "source", "λ = 0", "λ = 1"]
        assert grid.rows == [
            ["Ours", "HR@10", "published", "70.00 ± 2.00", "50.00"],
            ["Ours", "HR@10", "obtained, published protocol", "▼ 60.00 ± 1.00", "55.00 ± 1.00"],
            ["Ours", "HR@10", "obtained, strict", "60.00 ± 1.00", "failed"],
            ["Ours", "ε, server", "obtained, published protocol", "∞", "2.45"],
            ["Ours", "ε, server", "obtained, strict", "∞", "failed"],
            ["Away", "", "not run", "–", "–"],
        ]

    def test_what_no_protocol_changes_stands_once(self) -> None:
        one = noise()
        points = one["data"]["toy"]["rows"][0]["points"]
        points[1]["obtained"]["strict"] = points[1]["obtained"]["published"]
        rows = [row[2:] for row in sweep_table(one, one["data"]["toy"]).rows if row[1] == "ε, server"]
        assert rows == [["obtained", "∞", "2.45"]]
        # Metrics that happen to agree are said of each.
        for point in points:
            point["short"] = []
        both = [row[2] for row in sweep_table(one, one["data"]["toy"]).rows if row[1] == "HR@10"]
        assert both == ["published", "obtained, published protocol", "obtained, strict"]

    def test_a_figure_has_a_line_a_value(self) -> None:
        one = noise("Figure 7")
        grid = values_table(one, one["data"]["toy"])
        assert grid.columns == ["method", "noise", "source", "HR@10", "ε, server"]
        assert grid.rows[:3] == [
            ["Ours", "λ = 0", "published", "70.00 ± 2.00", "–"],
            ["Ours", "λ = 0", "obtained, published protocol", "▼ 60.00 ± 1.00", "∞"],
            ["Ours", "λ = 0", "obtained, strict", "60.00 ± 1.00", "∞"],
        ]
        assert grid.rows[-1] == ["Away", "", "not run", "–", "–"]

    def test_only_what_was_asked_for_or_is_there(self) -> None:
        one = noise()
        part = one["data"]["toy"]
        part["protocols"] = ["published"]
        assert {row[2] for row in sweep_table(one, part).rows} >= {"obtained, strict"}
        for point in part["rows"][0]["points"]:
            point["obtained"]["strict"] = found()
        assert "obtained, strict" not in {row[2] for row in sweep_table(one, part).rows}
        assert state(part, BOTH) == ["Asked for under published only; of the rest what had been run before."]
        assert state({**part, "protocols": BOTH}, BOTH) == []

    def test_markdown(self) -> None:
        text = reproduction_markdown(paper(noise()))
        assert "A column for each value of: noise." in text
        assert "**toy**, × 100, 2 seeds:" in text
        assert "| Ours | HR@10 | obtained, published protocol | ▼ 60.00 ± 1.00 | 55.00 ± 1.00 |" in text
        assert "| Ours <sup>[1](#notes), [2](#notes)</sup> | HR@10 | published | 70.00 ± 2.00 | 50.00 |" in text
        assert "\n1. failed (strict): It broke.\n2. A remark.\n3. not run: nobody wrote it.\n" in text

    def test_page(self) -> None:
        text = reproduction_page(paper(noise()))
        rows = Cells(text).rows
        assert rows[0] == ["method", "metric", "source", "λ = 0", "λ = 1"]
        assert rows[1] == ["Ours1, 2", "HR@10", "published", "70.00 ± 2.00", "50.00"]
        assert rows[4] == ["Ours", "ε, server", "obtained, published protocol", "∞", "2.45"]
        assert "Table 7 on toy <span class=soft>× 100, 2 seeds</span>" in text
        assert "1 of 2 obtained figures reach the published ones" in text
        assert text.count('class="down">▼ 60.00') == 1

    def test_terminal(self, tmp_path: Path) -> None:
        text = on_terminal(paper(noise()), tmp_path, ["Table 7"])
        assert re.search(r"Ours +λ = 0 +published +70\.00 ± 2\.00 +–", text)
        assert re.search(r"\n +obtained, published +▼ 60\.00 ± 1\.00 +∞", text)
        assert "protocol" not in text

    @pytest.mark.parametrize("axis", ["noise", "noise on the upload, in all its length"])
    def test_figures_are_never_cut(self, axis: str, tmp_path: Path) -> None:
        one = noise()
        one["axis"] = axis
        one["data"]["toy"]["rows"][0]["name"] = "A method of a long name, with more to it"
        text = on_terminal(paper(one), tmp_path, ["Table 7"])
        assert text.count("± 1.00") == 3
        assert text.count("2.45") == 1

    def test_what_is_not_asked_for_is_not_printed(self, tmp_path: Path) -> None:
        assert "λ" not in on_terminal(paper(noise(), costs()), tmp_path, ["Table 5"])

    def test_charts_of_what_has_no_number(self) -> None:
        accuracy, epsilon = sweep_charts(noise("Figure 7"), "a")
        ours, theirs = accuracy["views"]["published"]["series"][:2]
        assert (ours["x"], ours["mean"]) == (["λ = 0", "λ = 1"], [60.0, pytest.approx(55.0)])
        assert (theirs["x"], theirs["loose"]) == (["λ = 0", "λ = 1"], True)
        assert accuracy["views"]["published"]["ticks"]["text"] == ["λ = 0", "λ = 1"]
        # Infinity has no place on an axis.
        (bounded, *_) = epsilon["views"]["published"]["series"]
        assert (bounded["x"], bounded["mean"], bounded["told"][0][:4]) == (["λ = 1"], [2.446], "2.45")
        assert epsilon["views"]["published"]["y"] == "ε, server"


class TestSplits:
    """A legend that holds for all, or one for each study whose split is another."""

    def of(self, *meanings: str) -> dict[str, Any]:
        studies = [study(f"Table {number}", "table", [line("A")]) for number in range(1, len(meanings) + 1)]
        for one, meaning in zip(studies, meanings, strict=True):
            one["data"]["toy"]["meanings"] = {"strict": meaning}
        return paper(*studies)

    def test_one_split_is_said_once(self) -> None:
        text = reproduction_markdown(self.of("fair; split ratio, held out", "fair; split ratio, held out"))
        assert text.count("split ratio") == 1
        assert "- *obtained, strict*: fair; split ratio, held out." in text

    def test_several_are_said_with_their_tables(self) -> None:
        result = self.of("fair; split ratio, held out", "fair; split cold-users, held out")
        text = reproduction_markdown(result)
        assert "- *obtained, strict*: fair; each table and figure states its split." in text
        first, second = text.split("## Table 2")
        assert "- obtained, strict: split ratio, held out." in first.split("## Table 1")[1]
        assert "cold-users" not in first
        assert "- obtained, strict: split cold-users, held out." in second
        assert reproduction_page(result).count("split ratio, held out.") == 1

    def test_meanings_that_differ_in_more_than_the_split_are_all_said(self) -> None:
        assert "*obtained, strict*: fair; or: unfair." in reproduction_markdown(self.of("fair", "unfair"))


def test_curves_at_the_same_rounds() -> None:
    every = {"n": 2, "round": list(range(1, 101)), "mean": [step / 200 for step in range(1, 101)]}
    some = {"n": 2, "round": [1, *range(3, 60, 3)], "mean": [0.9, *(0.1 for _ in range(3, 60, 3))]}
    rows = [
        {"name": "Every", "note": "", "missing": "", "curves": {"strict": {"hr@10": every}}, "errors": []},
        {"name": "Third", "note": "", "missing": "", "curves": {"strict": {"hr@10": some}}, "errors": ["It broke."]},
    ]
    one = study("Figure 4", "convergence", rows)
    grid = rounds_table(one, one["data"]["toy"])
    assert grid.columns[3:] == [*(f"round {step}" for step in (10, 20, 40, 60, 80, 100)), "best", "in round"]
    assert grid.rows[1] == [
        "Every",
        "strict",
        "HR@10",
        "5.00",
        "10.00",
        "20.00",
        "30.00",
        "40.00",
        "50.00",
        "50.00",
        "100",
    ]
    assert grid.rows[2][:3] == ["Third", "published", "failed"]
    # At the last round before that was evaluated; after its own last one a curve says nothing.
    assert grid.rows[3] == ["Third", "strict", "HR@10", "10.00", "10.00", "10.00", "–", "–", "–", "90.00", "1"]
    assert rounds_table(one, one["data"]["toy"], shares=(1.0,)).columns[3:] == ["round 100", "best", "in round"]

"""Pages and Markdown from results that were made up, so that every figure is known; and a real browser's view."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.processes import PATIENCE

from homebody.errors import HomebodyError
from homebody.report import pages
from homebody.report.charts import convergence_charts, privacy_chart, sweep_charts
from homebody.report.markdown import leaderboard_markdown, reproduction_markdown
from homebody.report.pages import leaderboard_page
from homebody.report.reproduction import picture
from homebody.report.reproduction_page import reproduction_page

EVIL = '<script>alert("x")</script>|*a*'
MADE = {
    "command": "homebody reproduce toy --seeds 2",
    "version": "1.2.3",
    "commit": "abc123",
    "machine": "2 cores, Some CPU, 8 GB memory, no GPU",
    "date": "2030-01-02 03:04 UTC",
    "seconds": 75.0,
    "runs": 4,
    "run_seconds": 7384.0,
    "parts": "Table 1: toy",
}


def found(*values: float, errors: tuple[str, ...] = ()) -> dict[str, Any]:
    mean = sum(values) / len(values) if values else 0.0
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None
    metrics = {"hr@10": {"mean": mean, "sd": sd, "values": list(values)}} if values else {}
    return {"n": len(values), "metrics": metrics, "errors": list(errors), "cells": [], "seconds": 1.0}


def row(name: str, **changes: Any) -> dict[str, Any]:
    plain = {"name": name, "note": "", "missing": "", **figures()}
    return {**plain, **changes}


def figures(**changes: Any) -> dict[str, Any]:
    return {"published": {}, "published_sd": {}, "obtained": {}, "difference": {}, "short": [], **changes}


def study(kind: str, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    part = {
        "made": MADE,
        "seeds": 2,
        "rounds": None,
        "protocols": ["published", "strict"],
        "planned": 4,
        "finished": 4,
        "meanings": {"published": "as in the papers", "strict": "as it should be"},
        "notes": ["2 users were left out"],
        "rows": rows,
    }
    label = {"table": "Table 1", "pairs": "Table 4", "convergence": "Figure 2", "sweep": "Figure 3"}[kind]
    whole = {
        "id": label[-1],
        "label": label,
        "form": label.split()[0].lower(),
        "kind": kind,
        "title": f"Title & {EVIL}",
        "note": "",
        "metrics": ["hr@10"],
        "also": [],
        "scale": 100,
        "protocols": ["published", "strict"],
        "against": "published",
        "vary": "fields.factors" if kind == "sweep" else "",
        "axis": "factors" if kind == "sweep" else "",
        "labels": ["2", "4"] if kind == "sweep" else [],
        "data": {"toy": part},
    }
    return {**whole, **changes}


def reproduction() -> dict[str, Any]:
    curve = {"n": 2, "round": [1, 2], "mean": [0.1, 0.3], "low": [0.05, 0.2], "high": [0.15, 0.4]}
    table = [
        row(
            "Short",
            note=f"because {EVIL}",
            published={"hr@10": 0.7},
            obtained={"published": found(0.5, 0.6), "strict": found(0.4)},
            difference={"hr@10": -15.0},
            short=["hr@10"],
        ),
        row(
            "Fine",
            published={"hr@10": 0.5},
            obtained={"published": found(0.51, 0.53), "strict": found(errors=("It broke.",))},
            difference={"hr@10": 2.0},
        ),
        row("Away+Long", missing="nobody wrote it", published={"hr@10": 0.25}),
    ]
    curves = {"curves": {p: {"hr@10": curve} for p in ("published", "strict")}, "errors": []}
    lines = [
        {"name": EVIL, "note": "", "missing": "", **curves},
        {"name": "Other", "note": "", "missing": "not here", "curves": {}, "errors": []},
    ]
    ours = [{"published": found(0.2, 0.4), "strict": found()}, {"published": found(0.5, 0.5), "strict": found()}]
    points = [
        {"value": 2, "label": "2", **figures(published={"hr@10": 0.3}, obtained=ours[0])},
        {"value": 4, "label": "4", **figures(obtained=ours[1])},
    ]
    sweep = [{"name": "Swept", "note": "", "missing": "", "points": points}]
    studies = [study("table", table), study("convergence", lines), study("sweep", sweep)]
    return {
        "paper": "toy",
        "title": f"A paper {EVIL}",
        "citation": "Someone",
        "docs": "docs/methods.md",
        "note": "",
        "tolerance": 1.5,
        "studies": studies,
        "invocations": [MADE],
    }


def leader(name: str, kind: str, ndcg: float, epsilon: dict[str, Any], p: float | None) -> dict[str, Any]:
    spread = {"mean": ndcg, "sd": 0.01}
    return {
        "name": name,
        "kind": kind,
        "metrics": dict.fromkeys(("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10"), spread),
        "p_against_best": p,
        "epsilon": epsilon,
        "bytes_up": 56_445,
        "bytes_down": 1000,
        "seconds": 12.34,
    }


def board() -> dict[str, Any]:
    return {
        "data": "toy",
        "protocol": "strict",
        "seeds": [0, 1],
        "observers": ["server", "public"],
        "best": "central",
        "methods": [
            leader("central", "centralised", 0.4, {"server": "inf", "public": "inf"}, None),
            leader("private", "federated", 0.3, {"server": "inf", "public": 2.446}, 0.0312),
            leader(EVIL, "federated", 0.2, {"server": "inf", "public": 80.0}, 0.0001),
        ],
        "skipped": [{"name": "news", "reason": "needs impressions, which this data lacks"}],
        "legend": ["what it means"],
        "cautions": ["Fewer rounds than by default: private 3 of 100."],
        "references": {
            "popularity": {"hr@10": {"mean": 0.35, "sd": 0.0}, "ndcg@10": {"mean": 0.95, "sd": 0.0}},
            "chance": {"hr@10": {"mean": 0.1, "sd": 0.0}, "ndcg@10": {"mean": 0.045, "sd": 0.0}},
        },
        "made": MADE,
    }


class Page(HTMLParser):
    """Tags, texts of table cells, and anything that would be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.loads: list[str] = []
        self._cell = False
        # Plotly's own source is no markup.
        self.feed(re.sub(r"<script>.*?</script>", "<script></script>", text, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


class TestMarkdown:
    def test_a_row_a_method_and_data_set(self) -> None:
        text = reproduction_markdown(reproduction())
        assert (
            "| method | HR@10<br>published | HR@10<br>obtained, published protocol | HR@10<br>obtained, strict | "
            "HR@10<br>difference |" in text
        )
        assert "| Short <sup>[1](#notes)</sup> | 70.00 | 55.00 ± 7.07 | 40.00 (1 of 2) | ▼ −15.00 |" in text
        assert "| Fine <sup>[2](#notes)</sup> | 50.00 | 52.00 ± 1.41 | failed | +2.00 |" in text
        assert "| Away+Long <sup>[3](#notes)</sup> | 25.00 | not run | not run | – |" in text
        assert "\n3. not run: nobody wrote it." in text
        assert "\n2. failed (strict): It broke." in text
        assert "\n1. because" in text
        assert "1 of 2 obtained figures reach the published ones" in text
        assert "**toy**, × 100, 2 seeds:" in text

    def test_the_picture_stands_above_the_tables(self) -> None:
        text = reproduction_markdown(reproduction())
        assert text.index("](results.svg)") < text.index("## ")
        drawing = picture(reproduction())
        assert drawing is not None
        assert (drawing.count('class="ours"'), drawing.count('class="theirs"')) == (3, 4), "with the key's"
        assert "<script" not in drawing
        ElementTree.fromstring(drawing)
        result = reproduction()
        result["studies"][0]["data"] = {}
        assert picture(result) is None
        assert "results.svg" not in reproduction_markdown(result)

    def test_its_making(self) -> None:
        text = reproduction_markdown(reproduction())
        for part in ("`homebody reproduce toy --seeds 2`", "abc123", "1.2.3", "8 GB", "2030-01-02", "1 min 15 s"):
            assert part in text
        assert "- *obtained, published protocol*: as in the papers." in text

    def test_curves_and_sweeps_as_tables(self) -> None:
        text = reproduction_markdown(reproduction())
        assert "| method | protocol | metric | round 1 | round 2 | best | in round |" in text
        assert "| published | HR@10 | 10.00 | 30.00 | 30.00 | 2 |" in text
        assert "| Other <sup>[4](#notes)</sup> |  | not run | – | – | – | – |" in text
        assert "| method | source | 2 | 4 |" in text
        assert "| Swept | published | 30.00 | – |" in text
        assert "| Swept | obtained, published protocol | 30.00 ± 14.14 | 50.00 ± 0.00 |" in text
        assert "| Swept | obtained, strict | not finished | not finished |" in text

    def test_what_came_from_outside_stays_a_text(self) -> None:
        for text in (reproduction_markdown(reproduction()), leaderboard_markdown(board())):
            assert "<script" not in text
            assert "&lt;script>" in text
            for line in text.splitlines():
                if line.startswith("| ") and "alert" in line:
                    assert "\\|\\*a\\*" in line

    def test_a_leaderboard(self) -> None:
        text = leaderboard_markdown(board())
        assert "| central | centralised |" in text
        assert "| best | ∞ | ∞ | 56.4 | 1.0 | 12.3 |" in text
        assert "| 0.031 | ∞ | 2.45 |" in text
        assert "- news: needs impressions, which this data lacks" in text
        assert "| popularity | reference | 0.3500 ± 0.0000 | 0.9500 ± 0.0000 |" in text
        assert "- Fewer rounds than by default: private 3 of 100." in text


class TestPage:
    def test_the_table_has_every_figure(self) -> None:
        text = reproduction_page(reproduction())
        rows = {row[0]: row[1:] for row in Page(text).rows if row}
        short = next(cells for name, cells in rows.items() if name.startswith("Short"))
        assert short == ["70.00", "55.00 ± 7.07", "40.00 (1 of 2)", "▼ −15.00"]
        away = next(cells for name, cells in rows.items() if name.startswith("Away+Long"))
        assert away == ["25.00", "not run", "not run", "–"]
        assert '<li id="note-3">not run: nobody wrote it.</li>' in text
        assert '<li id="note-2">failed (strict): It broke.</li>' in text
        assert 'title="seeds: 50.00, 60.00"' in text

    @pytest.mark.parametrize("make", [lambda: reproduction_page(reproduction()), lambda: leaderboard_page(board())])
    def test_nothing_is_loaded_and_nothing_injected(self, make: Any) -> None:
        text = make()
        page = Page(text)
        assert all(link.startswith(("#", "data:,")) for link in page.loads)
        assert page.tags.count("script") == 3
        assert "default-src 'none'" in text
        # Not in the data of the charts either: there it would end the script.
        before, _, after = text.partition('id="charts">')
        data = json.loads(after.partition("</script>")[0])
        assert "alert" in json.dumps(data)
        assert "<script>alert" not in before
        assert "<script>alert" not in after
        names = [line["name"] for c in data for v in c["views"].values() for line in v.get("series", v.get("points"))]
        assert any(name.startswith("&lt;script&gt;") for name in names)

    def test_for_those_who_do_not_see_it(self) -> None:
        text = reproduction_page(reproduction())
        page = Page(text)
        assert '<html lang="en">' in text
        assert page.tags.count("table") == page.tags.count("caption")
        assert page.tags.count("figure") == page.tags.count("figcaption") == 2
        assert text.count('role="img" aria-label="') == 2 + 1, "the charts and the picture"
        assert "the band reaches from the lowest to the highest seed" in text

    def test_references_stand_below_the_methods_and_are_never_best(self) -> None:
        page = Page(leaderboard_page(board()))
        names = [row[0] for row in page.rows if row]
        assert [name.replace("\xa0", "") for name in names[-2:]] == ["popularityreference", "chancereference"]
        chance = page.rows[-1]
        assert chance[1:3] == ["0.1000 ± 0.0000", "0.0450 ± 0.0000"]
        assert set(chance[5:]) == {""}
        text = leaderboard_page(board())
        assert not re.search(r"class=best>0\.9500", text)
        assert "Fewer rounds than by default: private 3 of 100." in text

    def test_equals_to_the_digits_shown_are_both_best(self) -> None:
        result = board()
        row = result["methods"][1]
        row["metrics"] = {metric: {"mean": 0.400001, "sd": 0.01} for metric in row["metrics"]}
        assert leaderboard_page(result).count("class=best") == 8

    def test_a_part_that_is_not_complete_says_so(self) -> None:
        result = reproduction()
        result["studies"][0]["data"]["toy"] |= {"finished": 1, "rounds": 7}
        text = reproduction_page(result)
        assert "Not complete: 1 of 4 runs are finished." in text
        assert "7 rounds on the command line" in text
        assert "Not complete" not in reproduction_page(reproduction())

    def test_how_many_reach_the_published_figures(self) -> None:
        assert "1 of 2 obtained figures reach the published ones" in reproduction_page(reproduction())

    def test_a_paper_of_which_nothing_has_run(self) -> None:
        result = reproduction()
        for one in result["studies"]:
            one["data"] = {}
        text = reproduction_page({**result, "invocations": []})
        assert "Not run yet: Table 1, Figure 2, Figure 3." in text
        assert "plotly" not in text.lower()
        told = reproduction_markdown({**result, "invocations": []})
        assert "Not run yet: Table 1, Figure 2, Figure 3." in told
        assert "## Table" not in told

    def test_without_plotly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pages, "has_plotly", lambda: False)
        pages._plotly.cache_clear()
        with pytest.raises(HomebodyError, match=r"pip install '\.\[report\]' in"):
            leaderboard_page(board())


class TestCharts:
    def test_curves_with_bands(self) -> None:
        (chart,) = convergence_charts(study("convergence", reproduction()["studies"][1]["data"]["toy"]["rows"]), "a")
        (line,) = chart["views"]["strict"]["series"]
        assert (line["x"], line["mean"]) == ([1, 2], [10.0, 30.0])
        assert (line["low"], line["high"]) == ([5.0, 20.0], [15.0, 40.0])
        assert line["told"][1] == "30.00 (20.00 to 40.00, 2 seeds)"

    def test_one_seed_has_no_band(self) -> None:
        rows = reproduction()["studies"][1]["data"]["toy"]["rows"]
        rows[0]["curves"]["strict"]["hr@10"]["n"] = 1
        (chart,) = convergence_charts(study("convergence", rows), "a")
        (line,) = chart["views"]["strict"]["series"]
        assert (line["low"], line["told"][1]) == (None, "30.00")

    def test_a_sweep_with_what_was_published(self) -> None:
        (chart,) = sweep_charts(reproduction()["studies"][2], "a")
        ours, theirs = chart["views"]["published"]["series"]
        assert (ours["x"], ours["mean"], ours["low"]) == ([2, 4], [pytest.approx(30.0), 50.0], [20.0, 50.0])
        assert (theirs["x"], theirs["mean"], theirs["loose"]) == ([2], [30.0], True)
        assert chart["views"]["published"]["ticks"] == {"at": [2, 4], "text": ["2", "4"]}

    def test_infinity_lies_to_the_right_of_every_bound(self) -> None:
        view = privacy_chart(board())["views"]["public"]
        at = {point["y"]: point["x"] for point in view["points"]}
        assert at[0.3] == pytest.approx(math.log10(2.446))
        assert at[0.2] == pytest.approx(math.log10(80))
        left, right = view["zone"]
        assert max(at[0.3], at[0.2]) < left < at[0.4] < right
        assert view["ticks"]["text"] == ["1", "10", "100", "∞"]
        assert view["range"][0] < at[0.3]
        assert view["range"][1] == right

    def test_where_nothing_is_bounded_there_is_only_infinity(self) -> None:
        view = privacy_chart(board())["views"]["server"]
        assert view["ticks"]["text"] == ["∞"]
        places = [point["x"] for point in view["points"]]
        assert len(set(places)) == 3
        assert all(view["zone"][0] < place < view["zone"][1] for place in places)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
class TestBrowser:
    """The page in a real browser, from disk, with no name that resolves."""

    def view(self, folder: Path, page: Path, *flags: str) -> tuple[str, str]:
        assert BROWSER is not None
        command = [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=10000"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1280,1000", *flags, "--dump-dom", page.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True)
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
        return re.sub(r"<script.*?</script>", "", done.stdout.decode(), flags=re.DOTALL), "\n".join(said)

    def test_a_reproduction(self, tmp_path: Path) -> None:
        page = tmp_path / "index.html"
        page.write_text(reproduction_page(reproduction()), encoding="utf-8")
        shown, complaints = self.view(tmp_path, page)
        assert complaints == ""
        # A band and a line; in the sweep the line, its band and what was published.
        assert re.findall(r'data-drawn="(\d+)"', shown) == ["2", "3"]
        assert shown.count('class="main-svg"') >= 2
        assert shown.count("<table>") == 2 + 1
        assert "55.00" in shown
        assert "▼ −15.00" in shown
        assert "alert(" in shown
        assert "<script>alert" not in shown

    @pytest.mark.parametrize("dark", [False, True])
    def test_a_leaderboard_by_day_and_night(self, tmp_path: Path, dark: bool) -> None:
        page = tmp_path / "index.html"
        page.write_text(leaderboard_page(board()), encoding="utf-8")
        shown, complaints = self.view(tmp_path, page, f"--blink-settings=preferredColorScheme={0 if dark else 1}")
        assert complaints == ""
        assert re.findall(r'data-drawn="(\d+)"', shown) == ["2"]
        assert "no bound" in shown
        # The colour of federated methods by day, by night.
        assert ("rgb(108, 171, 255)" in shown, "rgb(31, 111, 209)" in shown) == (dark, not dark)

    @pytest.mark.parametrize("make", [lambda: reproduction_page(reproduction()), lambda: leaderboard_page(board())])
    def test_it_fits_a_phone(self, tmp_path: Path, make: Any) -> None:
        (tmp_path / "index.html").write_text(make(), encoding="utf-8")
        frame = tmp_path / "frame.html"
        frame.write_text(
            '<iframe src="index.html" style="width:390px;height:800px;border:0"></iframe><p id="said"></p><script>'
            "setTimeout(() => { const page = document.querySelector('iframe').contentDocument.documentElement;"
            "document.getElementById('said').textContent = `wide ${page.scrollWidth}`; }, 3000)</script>",
            encoding="utf-8",
        )
        shown, _ = self.view(tmp_path, frame, "--allow-file-access-from-files")
        (wide,) = re.findall(r"wide (\d+)", shown)
        assert 300 < int(wide) <= 390

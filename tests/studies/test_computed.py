"""Tables and figures without a run: what is certified, and how long histories are."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from homebody.data import load
from homebody.errors import HomebodyError
from homebody.privacy.papers import PRIVREC_DELTAS, PRIVREC_TABLES, paper
from homebody.report.terminal import print_reproduction
from homebody.studies import cells, reproduce
from homebody.studies.figures import NoisyRelease, binned
from homebody.studies.papers import read_paper
from homebody.studies.plan import plan

ROOT = Path(__file__).parents[2]
DATA = "synthetic:users=40,items=60,mean=12"
PAPER = f"""
title = "Without runs"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "4"
kind = "accounting"
title = "What is certified"
data = ["{DATA}"]
deltas = [0, 1e-6, 0.01]
rounds = 100
release = {{ noise = 1.0, population = 4800 }}
note = "Of one person."
[[table.row]]
name = "5 of 4800"
release = {{ cohort = 5 }}
published = {{ "{DATA}" = [inf, 1.5, nan] }}
[[table.row]]
name = "all, once"
release = {{ sampling = "none", noise = 2.0, relation = "add-remove" }}
rounds = 1
note = "Nobody is drawn."

[[figure]]
id = "2"
kind = "lengths"
title = "Long tails"
data = ["{DATA}"]
from = [0, 5, 6, 15]

[[figure]]
id = "3-a"
kind = "sweep"
title = "Over rounds"
vary = "run.rounds"
values = [1, 2]
metrics = ["hr@10"]
also = ["seconds_per_round", "epsilon_public"]
data = ["{DATA}"]
protocols = ["strict"]
seeds = 1
[[figure.row]]
name = "FedMF"
method = "fedmf"
fields = {{ factors = 2 }}
[[figure.row]]
name = "popularity"
method = "popularity"
rounds = 1
fixed = true
"""


def rows(result: dict[str, Any], label: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(one for one in result["studies"] if one["label"] == label)["data"][DATA]["rows"]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("computed")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "recipe.toml").write_text(PAPER, encoding="utf-8")
    paper = read_paper(folder / "tiny")
    reproduce.reproduce(plan(paper, table="4"), folder / "runs")
    return reproduce.reproduce(plan(paper, figure="2"), folder / "runs"), folder / "runs" / "reproduce" / "tiny"


def test_an_account(made: tuple[dict[str, Any], Path]) -> None:
    result, folder = made
    drawn, once = rows(result, "Table 4")
    figures = [point["obtained"]["certified"]["metrics"]["epsilon_public"]["mean"] for point in drawn["points"]]
    release = NoisyRelease(1.0, 5, 4800)
    assert figures == ["inf", release.epsilon(100, 1e-6), release.epsilon(100, 0.01)]
    assert 0 < release.epsilon(100, 0.01) < release.epsilon(100, 1e-6) < release.epsilon(1000, 1e-6)
    assert [point["published"] for point in drawn["points"]] == [
        {"epsilon_public": "inf"},
        {"epsilon_public": 1.5},
        {},
    ]
    # One Gaussian release without sampling, by the exact formula (Balle and Wang, 2018).
    value = once["points"][1]["obtained"]["certified"]["metrics"]["epsilon_public"]["mean"]
    normal = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    delta = normal(0.25 - value * 2) - math.exp(value) * normal(-0.25 - value * 2)
    assert delta == pytest.approx(1e-6, rel=0.05)
    (study,) = [one for one in result["studies"] if one["label"] == "Table 4"]
    part = study["data"][DATA]
    assert (part["planned"], part["finished"], part["seeds"], study["protocols"]) == (0, 0, 0, ["certified"])

    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert "| method | source | δ = 0 | δ = 1e-6 | δ = 0.01 |" in text
    assert "| 5 of 4800 | published | ∞ | 1.5 | – |" in text
    assert f"| 5 of 4800 | certified | ∞ | {figures[1]:.3g} |" in text
    assert "- *certified*: ε of one person" in text
    assert "seed" not in text.partition("## Table 4")[2].partition("## ")[0]
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "Table 4 on synthetic:users=40,items=60,mean=12</caption>" in page
    assert "Nobody is drawn." in page
    console = Console(width=80, file=io.StringIO())
    print_reproduction(result, folder, ["Table 4"], console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{figures[1]:.3g}" in told
    assert "certified" in told
    assert "0 seed" not in told


def test_lengths_of_histories(made: tuple[dict[str, Any], Path]) -> None:
    result, folder = made
    population = load(DATA)
    own = np.array([len(set(population.history(user).tolist())) for user in range(40)])
    expected = [int(((own >= low) & (own < high)).sum()) for low, high in ((0, 5), (5, 6), (6, 15), (15, 10**9))]
    different, interactions = rows(result, "Figure 2")
    assert [point["label"] for point in different["points"]] == ["0–4", "5", "6–14", "15 or more"]
    for line, counts in ((different, expected), (interactions, expected)):  # nobody repeats anything here
        found = [point["obtained"]["counted"]["metrics"]["people"]["mean"] for point in line["points"]]
        assert found == counts
        assert sum(found) == 40
        assert line["note"] == f"40 people, the one in the middle with {np.median(own):.0f}."
    page = (folder / "index.html").read_text(encoding="utf-8")
    (chart,) = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    assert chart["views"]["counted"]["series"][0]["mean"] == expected
    assert chart["views"]["counted"]["series"][0]["x"] == ["0–4", "5", "6–14", "15 or more"]
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert "| method | 0–4 | 5 | 6–14 | 15 or more |" in text
    counts = " | ".join(map(str, expected))
    assert re.search(rf"\| different items <sup>.*</sup> \| {re.escape(counts)} \|", text)


@given(st.lists(st.integers(0, 300), min_size=1), st.sets(st.integers(0, 200), min_size=1))
def test_groups_hold_everyone_from_the_least_on(counts: list[int], least: set[int]) -> None:
    edges = sorted(least)
    found = binned(np.array(counts), edges)
    ends = [*edges[1:], math.inf]
    assert found == [sum(low <= one < high for one in counts) for low, high in zip(edges, ends, strict=True)]


def test_data_that_is_not_there_is_told_of(tmp_path: Path, write_paper: Callable[..., Path]) -> None:
    text = PAPER.replace(f'title = "Long tails"\ndata = ["{DATA}"]', 'title = "Long tails"\ndata = ["absent.csv"]')
    result = reproduce.reproduce(plan(read_paper(write_paper(tmp_path, text)), figure="2"), tmp_path / "runs")
    (study,) = [one for one in result["studies"] if one["label"] == "Figure 2"]
    (row,) = study["data"]["absent.csv"]["rows"]
    assert "absent.csv" in row["errors"][0]
    assert "failed: " in (tmp_path / "runs" / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")


def test_a_sweep_over_rounds_with_a_line_that_stays(tmp_path: Path, write_paper: Callable[..., Path]) -> None:
    paper = read_paper(write_paper(tmp_path, PAPER))
    planned = plan(paper, figure="3")  # asked for by its number alone
    assert [(one.method, one.rounds) for one in planned.recipes] == [("fedmf", 1), ("fedmf", 2), ("popularity", 1)]
    result = reproduce.reproduce(planned, tmp_path / "runs")
    fedmf, popularity = rows(result, "Figure 3-a")
    for point, steps in zip(fedmf["points"], (1, 2), strict=True):
        (name,) = point["obtained"]["strict"]["cells"]
        kept = json.loads((tmp_path / "runs" / "cells" / name / "result.json").read_text())
        assert kept["rounds"] == steps
        found = point["obtained"]["strict"]["metrics"]
        assert found["seconds_per_round"]["mean"] == kept["seconds_per_round"]
        assert found["epsilon_public"]["mean"] == kept["epsilon"]["public"] == "inf"
    one, other = (point["obtained"]["strict"] for point in popularity["points"])
    assert one == other
    assert one["n"] == 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("deltas = [0, 1e-6, 0.01]", "deltas = [0, 1]", "deltas must be numbers from 0 to under 1"),
        ("release = { cohort = 5 }", "release = { cohorts = 5 }", "row '5 of 4800': There is no setting of a release"),
        ("release = { cohort = 5 }", "", "release.cohort is missing"),
        ("release = { cohort = 5 }", 'release = { cohort = "5" }', "release.cohort must be a whole number, not '5'"),
        ("release = { cohort = 5 }", "release = { cohort = 5000 }", "row '5 of 4800'.*5000"),
        ("[inf, 1.5, nan]", "[inf, 1.5]", "must have 3 lists, one for each value"),
        ("[inf, 1.5, nan]", "[inf, 1.5, 'x']", r"must be a list of 1 figures"),
        ("deltas =", 'protocols = ["strict"]\ndeltas =', "There is no key 'protocols'"),
        ("from = [0, 5, 6, 15]", "from = [5, 5]", "'from' must be rising whole numbers"),
        ("from = [0, 5, 6, 15]", "from = [-1, 5]", "'from' must be rising whole numbers"),
        (
            "fixed = true",
            "fixed = true\nvalues = [1, 2]",
            "fixed is for a row of a sweep that has no values of its own",
        ),
        ('also = ["seconds_per_round", "epsilon_public"]', 'also = ["people"]', "no quantity of a run 'people'"),
    ],
)
def test_what_a_recipe_may_not_say(
    tmp_path: Path, write_paper: Callable[..., Path], old: str, new: str, expected: str
) -> None:
    assert old in PAPER
    with pytest.raises(HomebodyError, match=expected):
        read_paper(write_paper(tmp_path, PAPER.replace(old, new, 1)))


def test_privrecs_account_is_the_one_of_the_audit() -> None:
    """The recipe prints the figures that docs/accounting.md does, and certifies the same."""
    tables = {one.id: one for one in read_paper(ROOT / "experiments" / "privrec").tables}
    claims = [claim for claim in paper("privrec").claims if claim.observer == "public"]
    for number, (population, printed) in zip(("4", "5"), PRIVREC_TABLES.items(), strict=True):
        study = tables[number]
        (data,) = study.data
        assert study.values == [0.0, *PRIVREC_DELTAS]
        listed = {row.release["cohort"]: row for row in study.rows if row.published}
        assert {cohort: tuple(one for (one,) in row.published[data][1:]) for cohort, row in listed.items()} == printed
        for row in study.rows:
            release = NoisyRelease.of({**study.release, **row.release})
            assert release.population == population
            same = [one for one in claims if one.event == release.event() and one.count == study.rounds]
            assert same, row.name


def test_figures_by_their_number(tmp_path: Path) -> None:
    found = read_paper(ROOT / "experiments" / "privrec")
    assert {study.id for study, _ in plan(found, table="6").studies} == {"6-ml-1m", "6-frappe"}
    assert len(plan(found, figure="3").studies) == 6
    assert [study.id for study, _ in plan(found, figure="2").studies] == ["2"]
    with pytest.raises(HomebodyError, match="no figure '1'"):
        plan(found, figure="1")


def test_nothing_is_run(tmp_path: Path, write_paper: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "execute", lambda *_, **__: pytest.fail("something was run"))
    planned = plan(read_paper(write_paper(tmp_path, PAPER)), table="4")
    assert planned.recipes == planned.cells == []
    result = reproduce.reproduce(planned, tmp_path / "runs")
    (made,) = result["invocations"]
    assert (made["runs"], made["run_seconds"]) == (0, 0)


def test_parts_run_elsewhere_stay_beside_the_recipe(tmp_path: Path, write_paper: Callable[..., Path]) -> None:
    folder = write_paper(tmp_path, PAPER)
    paper = read_paper(folder)
    reproduce.publish(reproduce.reproduce(plan(paper, table="4"), tmp_path / "here"), folder)
    reproduce.publish(reproduce.reproduce(plan(paper, figure="2"), tmp_path / "elsewhere"), folder)
    kept = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [study["label"] for study in kept["studies"] if study["data"]] == ["Table 4", "Figure 2"]
    assert len(kept["invocations"]) == 2
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert "| 5 of 4800 |" in text
    assert "Long tails" in text
    # Figures under other columns do not go together with new ones.
    (folder / "recipe.toml").write_text(
        PAPER.replace("deltas = [0, 1e-6, 0.01]", "deltas = [0.5]").replace("[inf, 1.5, nan]", "[inf]"),
        encoding="utf-8",
    )
    reproduce.publish(reproduce.reproduce(plan(read_paper(folder), figure="2"), tmp_path / "elsewhere"), folder)
    kept = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [study["label"] for study in kept["studies"] if study["data"]] == ["Figure 2"]

"""Studies of views: the order of rows, ε against views, and attacks of one view on another. On a tiny paper."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from homebody.errors import HomebodyError
from homebody.report.markdown import reproduction_markdown
from homebody.report.reproduction_page import reproduction_page
from homebody.report.terminal import print_reproduction
from homebody.studies import probes, reproduce
from homebody.studies.figures import ordered
from homebody.studies.papers import read_paper
from homebody.studies.plan import plan

ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]
PAPER = """
title = "Two apps"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "3"
title = "Rankings"
metrics = ["full/ndcg@10", "full/auc"]
data = ["{data}"]
protocols = ["strict"]
seeds = 1
rounds = 2
run = {{ split = "ratio:test=0.2,valid=0", evaluate_every = 1, delta = 0.001, item_features = "{folder}/items.csv", \
views = {{ profile = "{folder}/profile.csv", taste = "svd:size=3,share=0.3" }} }}
orders = [["both", "popularity"]]

[[table.row]]
name = "both"
method = "fl-mv-dssm"
fields = {{ views = "profile,taste", widths = "8,4", batch_size = 5 }}
run = {{ stages = ["views:clip=0.5"] }}
published = {{ "{data}" = [0.2, 0.9] }}
[[table.row]]
name = "popularity"
method = "popularity"
published = {{ "{data}" = [0.3, 0.8] }}

[[table]]
id = "epsilon"
kind = "accounting"
observer = "views"
title = "ε"
data = ["{data}"]
deltas = [0.001]
rounds = 100
release = {{ sampling = "none" }}
[[table.row]]
name = "σ = 4"
release = {{ noise = 4.0, relation = "add-remove" }}
published = {{ "{data}" = [4.33] }}
[[table.row]]
name = "σ = 4, replaced"
release = {{ noise = 2.0, relation = "replace-one" }}

[[figure]]
id = "noise"
kind = "sweep"
title = "Noise"
table = "3"
rows = ["both"]
also = ["epsilon_views"]
vary = "run.stages"
values = [["views:clip=0.5"], ["views:clip=0.5", "view-noise:z=1"]]
labels = ["0", "1"]

[[figure]]
id = "attack"
kind = "view-attack"
title = "Attack"
table = "3"
metrics = ["view/feature", "view/feature, first tower", "view/most", "view/error"]
rows = ["both"]
attack = {{ sigmas = [0, 1], participations = [1, 2], users = 4 }}
"""


@pytest.fixture
def text(tmp_path: Path) -> str:
    generator = np.random.default_rng(0)
    pairs = [(user, item) for user in range(40) for item in generator.permutation(30)[:10]]
    files = {
        "data.csv": ["user,item", *(f"u{user},i{item}" for user, item in pairs)],
        "items.csv": ["item,title,genre", *(f"i{item},Film number {item},g{item % 4}" for item in range(30))],
        "profile.csv": ["user,gender,job", *(f"u{user},{'fm'[user % 2]},j{user % 3}" for user in range(40))],
    }
    for name, lines in files.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return PAPER.format(data=tmp_path / "data.csv", folder=tmp_path)


def part(result: dict[str, Any], label: str) -> dict[str, Any]:
    (found,) = next(one for one in result["studies"] if one["label"] == label)["data"].values()
    return dict(found)


def test_a_paper_of_two_apps(tmp_path: Path, write_paper: Write, text: str) -> None:
    paper = read_paper(write_paper(tmp_path, text))
    result = reproduce.reproduce(plan(paper), tmp_path / "runs")

    rows = part(result, "Table 3")["rows"]
    means = {row["name"]: row["obtained"]["strict"]["metrics"] for row in rows}
    said = part(result, "Table 3")["footnotes"]
    assert len(said) == 1
    # Printed: popularity above in NDCG, below in AUC.
    found = means["both"]["full/ndcg@10"]["mean"] < means["popularity"]["full/ndcg@10"]["mean"]
    where = said[0].partition("NOT in the paper's order")[0 if found else 2]
    assert "full NDCG@10" in where

    one, replaced = part(result, "Table epsilon")["rows"]
    (point,) = one["points"]
    assert point["obtained"]["certified for views"]["metrics"]["epsilon_views"]["mean"] == pytest.approx(
        10.20, abs=0.01
    )
    (other,) = replaced["points"]
    assert other["obtained"]["certified for views"]["metrics"]["epsilon_views"]["mean"] == pytest.approx(
        27.18, abs=0.01
    )

    (noise,) = part(result, "Figure noise")["rows"]
    epsilons = [one["obtained"]["strict"]["metrics"]["epsilon_views"]["mean"] for one in noise["points"]]
    assert float(epsilons[0]) == math.inf
    assert 0 < epsilons[1] < 20

    (attacked,) = part(result, "Figure attack")["rows"]
    assert [one["label"] for one in attacked["points"]] == [
        "σ = 0, T = 1",
        "σ = 0, T = 2",
        "σ = 1, T = 1",
        "σ = 1, T = 2",
    ]
    first = attacked["points"][0]["obtained"]["strict"]["metrics"]
    assert first["view/feature"]["mean"] == 1
    assert first["view/error"]["mean"] <= 1e-4
    assert first["view/feature"]["interval"][1] == 1
    assert "view/feature, first tower" not in first, "its towers are aggregated: the attacker has the view's"
    assert attacked["points"][2]["obtained"]["strict"]["metrics"]["view/most"]["mean"] == pytest.approx(
        0.8413, abs=1e-4
    )

    written = reproduction_markdown(result)
    assert "one feature guessed, of two" in written
    assert "certified for views" in written
    assert "the paper's order" in written
    assert "σ = 1, T = 2" in reproduction_page(result)
    shown = io.StringIO()
    print_reproduction(result, tmp_path, ["Figure attack"], Console(file=shown, width=200))
    assert "one feature guessed" in shown.getvalue()


def test_orders_of_rows_that_were_not_run_say_nothing(tmp_path: Path, write_paper: Write, text: str) -> None:
    (table, *_) = read_paper(write_paper(tmp_path, text)).tables
    lines = [{"name": name, "obtained": {}, "published": {}} for name in ("both", "popularity")]
    assert ordered(table, lines) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('["both", "popularity"]', '["both", "chance"]', "no row 'chance'"),
        ('["both", "popularity"]', '["both"]', "the one above and the one below"),
        ("users = 4", "people = 4", "setting of the attack"),
        ("users = 4", "users = [4]", "attack.users must be like 30"),
        ("sigmas = [0, 1]", "sigmas = 1", "attack.sigmas must be like"),
        ("participations = [1, 2]", "participations = [1.5]", "attack.participations must be like"),
        ('"view/most"', '"view/least"', "figure of an attack on a view"),
        ('rows = ["both"]\nattack', 'rows = ["popularity"]\nattack', "popularity has no views"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, write_paper: Write, text: str, old: str, new: str, sentence: str
) -> None:
    assert old in text
    with pytest.raises(HomebodyError, match=sentence):
        read_paper(write_paper(tmp_path, text.replace(old, new)))


class TestFLMVDSSM:
    """The paper's own recipe."""

    def test_it_has_every_table_and_figure(self) -> None:
        paper = read_paper(ROOT / "experiments" / "fl-mv-dssm")
        assert [study.id for study in paper.tables] == ["3", "2", "epsilon"]
        assert [study.id for study in paper.figures] == ["2", "noise", "attack"]
        three = paper.tables[0]
        printed = [row.name for row in three.rows if row.published]
        assert len(printed) == 8
        assert all(len(row.published["ml-100k"]) == len(row.published_sd["ml-100k"]) == 4 for row in three.rows[:8])
        assert [len(study.rows) for study in paper.figures] == [6, 2, 2]

    def test_its_figures_show_runs_of_its_table(self) -> None:
        paper = read_paper(ROOT / "experiments" / "fl-mv-dssm")
        table = plan(paper, table="3", data=["ml-100k"]).recipes
        for figure in ("2", "attack"):
            assert all(recipe in table for recipe in plan(paper, figure=figure).recipes)
        assert sum(recipe not in table for recipe in plan(paper, figure="noise").recipes) == 2 * 3 * 3

    def test_models_are_attacked_with_the_noise_of_the_issue(self) -> None:
        figure = read_paper(ROOT / "experiments" / "fl-mv-dssm").figures[2]
        probe = figure.probe_at(figure.rows[0])
        assert probe == "view:sigmas=0/1/4,participations=1/10/100,users=30"
        assert probes.file_of(Path("cell"), probe).name.startswith("probe-view-")

"""One model under other settings of its requests: what is found, that nothing is trained again, and what is refused."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from homebody.core import Method
from homebody.errors import HomebodyError
from homebody.methods.privaterec import PrivateRec
from homebody.report.terminal import print_reproduction
from homebody.run import reopen
from homebody.simulation import Simulator
from homebody.studies import cells, probes, reproduce, run_cells
from homebody.studies.papers import read_paper
from homebody.studies.plan import Plan, plan
from homebody.studies.serving import serving, serving_probe

ROOT = Path(__file__).parents[2]
PUBLISHED = {"query": "attention", "serving_guarantee": "published", "serving_epsilon": 10.0}
PAPER = """
title = "Requests"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "2"
kind = "serving"
title = "Trained"
metrics = ["impressions/auc", "skew"]
also = ["epsilon", "epsilon_query"]
scale = 100
data = ["news.csv"]
protocols = ["strict"]
seeds = 1
rounds = 2
orders = [["weights", "weights, nobody"]]
run = { split = "impressions-people:test=0.3,valid=0.2", impressions = "shown.csv", delta = 0.001 }
[[table.row]]
name = "weights"
method = "privaterec"
fields = { encoder = "id", d = 8, guarantee = "published", basis = 3, learning_rate = 0.05 }
published = { "news.csv" = [60.0, nan] }
[[table.row]]
name = "weights, nobody"
method = "privaterec"
fields = { encoder = "id", d = 8, guarantee = "published", basis = 3, learning_rate = 0.05 }
serving = { query = "nobody" }
[[table.row]]
name = "popularity"
method = "popularity"
rounds = 1

[[figure]]
id = "5"
kind = "serving"
title = "Asked"
table = "2"
also = ["epsilon_query"]
vary = "serving.serving_epsilon"
values = [0.5, 10.0, inf]
labels = ["½", "10", "∞"]
axis = "ε_s"
[[figure.row]]
name = "as published"
of = "weights"
serving = { query = "attention", serving_guarantee = "published" }
[[figure.row]]
name = "weights, nobody"
fixed = true
[[figure.row]]
name = "popularity"
fixed = true

[[figure]]
id = "7"
kind = "serving"
title = "By d"
table = "2"
vary = "fields.d"
values = [4, 8]
[[figure.row]]
name = "weights"
serving = { query = "attention", serving_epsilon = 10.0 }
"""


@pytest.fixture
def news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 60 readers of 30 articles, who like one half of them, and an impression of each."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(3)
    read, shown = ["user,item,time"], ["impression,user,item,clicked,time"]
    for user in range(60):
        liked = draw.permutation(15) + 15 * (user % 2)
        others = draw.permutation(15) + 15 * (1 - user % 2)
        read += [f"u{user},a{item},{time}" for time, item in enumerate(liked[:5])]
        read.append(f"u{user},a{liked[5]},11")
        shown += [
            f"{user},u{user},a{item},{int(item == liked[5])},10" for item in draw.permutation([*others[:6], liked[5]])
        ]
    (tmp_path / "news.csv").write_text("\n".join(read), encoding="utf-8")
    (tmp_path / "shown.csv").write_text("\n".join(shown), encoding="utf-8")
    return tmp_path


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that were begun, by the names of their folders."""
    names: list[str] = []
    execute = cells.execute

    def counting(recipe: Any, out: Path, *arguments: Any, **named: Any) -> Any:
        names.append(named["name"])
        return execute(recipe, out, *arguments, **named)

    monkeypatch.setattr(cells, "execute", counting)
    return names


def planned(write_paper: Callable[..., Path], news: Path, text: str = PAPER, **asked: Any) -> Plan:
    folder = news / "papers" / "tiny"
    return plan(read_paper(folder if folder.exists() else write_paper(news / "papers", text)), **asked)


def rows_of(result: dict[str, Any], label: str) -> dict[str, Any]:
    (study,) = (study for study in result["studies"] if study["label"] == label)
    return {line["name"]: line for line in study["data"]["news.csv"]["rows"]}


def means(figures: dict[str, Any]) -> dict[str, float]:
    return {name: float(figure["mean"]) for name, figure in figures["obtained"]["strict"]["metrics"].items()}


def trained(write_paper: Callable[..., Path], news: Path) -> tuple[Method, Simulator, Any]:
    """The model of table 2."""
    (recipe, *_) = planned(write_paper, news, table="2").recipes
    (result,) = run_cells([recipe], news / "runs")
    fitted, _ = reopen(Path(result["run"]))
    assert isinstance(fitted.runtime, Simulator)
    return fitted.method, fitted.runtime, fitted.shared


def test_a_model_is_trained_once_and_asked_often(
    write_paper: Callable[..., Path], news: Path, begun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = reproduce.reproduce(planned(write_paper, news, table="2"), news / "out")
    assert [name.partition("-")[0] for name in begun] == ["privaterec", "popularity"]
    assert not list((news / "out").rglob("state*")), "models are removed once they were asked"
    # All that figure 5 shows was asked while the model was there.
    monkeypatch.setattr(probes, "take", lambda *_: pytest.fail("a model is asked again"))
    figure = reproduce.reproduce(planned(write_paper, news, figure="5"), news / "out")
    assert len(begun) == 2

    lines = rows_of(table, "Table 2")
    own, nobody, popular = (means(lines[name]) for name in ("weights", "weights, nobody", "popularity"))
    assert own.keys() == {"impressions/auc", "epsilon"}, "a run that is not asked has neither τ nor ε of a request"
    assert nobody["epsilon_query"] == 0
    assert popular.keys() == {"impressions/auc", "epsilon"}
    points = [means(point) for point in rows_of(figure, "Figure 5")["as published"]["points"]]
    assert points[2]["impressions/auc"] == own["impressions/auc"], "without noise it is the run's own figure"
    assert [point["skew"] > 0 for point in points] == [True, True, False]
    assert points[0]["skew"] > points[1]["skew"]
    assert [round(point["epsilon_query"], 2) for point in points[1:]] == [17.86, math.inf]
    fixed = [means(point) for point in rows_of(figure, "Figure 5")["weights, nobody"]["points"]]
    assert [{**point, "epsilon": nobody["epsilon"]} for point in fixed] == [nobody] * 3


def test_a_removed_model_is_trained_once_more_and_answers_the_same(
    write_paper: Callable[..., Path], news: Path, begun: list[str]
) -> None:
    asked = planned(write_paper, news, figure="5")
    reproduce.reproduce(asked, news / "out")
    answers = {file: file.read_text() for file in (news / "out").rglob("probe-serving*.json")}
    assert len(answers) == 5, "three ε_s, nobody, and what figure 7 would show of this model"
    lost = next(file for file in answers if "serving_epsilon-0.5" in file.name)
    lost.unlink()
    reproduce.reproduce(asked, news / "out")
    assert [name.endswith("-again") for name in begun] == [False, False, True]
    assert {file: file.read_text() for file in (news / "out").rglob("probe-serving*.json")} == answers


def test_each_value_of_a_field_of_the_training_has_its_own_model(
    write_paper: Callable[..., Path], news: Path, begun: list[str]
) -> None:
    result = reproduce.reproduce(planned(write_paper, news, figure="7"), news / "out")
    first, second = (means(point) for point in rows_of(result, "Figure 7")["weights"]["points"])
    assert len(begun) == 2
    assert first != second


def test_skew_is_the_share_of_places_that_change(write_paper: Callable[..., Path], news: Path) -> None:
    method, runtime, shared = trained(write_paper, news)
    assert isinstance(method, PrivateRec)
    found = serving(method, runtime, shared, serving_probe(PUBLISHED).partition(":")[2], 1e-3)
    noised = replace(method, query="attention", serving_guarantee="published", serving_epsilon=10.0)
    shown = runtime.split.population.impressions
    assert shown is not None
    assert runtime.split.shown is not None
    shares = []
    for number in runtime.split.shown["test"]:
        user, items = int(shown.users[number]), shown.items[shown.indptr[number] : shown.indptr[number + 1]]
        orders = [
            items[np.argsort(-runtime.scores(asked, shared, user).numpy()[items], kind="stable")]
            for asked in (method, noised)
        ]
        shares.append(np.mean(orders[0] != orders[1]))
    assert len(shares) == 18
    assert found["metrics"]["skew"] == pytest.approx(np.mean(shares))
    assert 0 < found["metrics"]["skew"] < 1
    assert found["metrics"]["impressions/auc"] == runtime.evaluate(noised, shared).metrics["impressions/auc"]


@pytest.mark.parametrize(
    ("settings", "epsilon"),
    [
        (PUBLISHED, 17.86),
        ({**PUBLISHED, "serving_guarantee": "certified"}, 10.0),
        ({**PUBLISHED, "serving_noise": "laplace", "serving_guarantee": "certified"}, 10.0),
        ({"query": "choice", "serving_epsilon": 5}, 5.0),
        ({"query": "nobody"}, 0.0),
        ({"query": ""}, 0.0),
        ({"query": "nobody", "serving_epsilon": math.inf}, 0.0),
        ({"query": "attention", "serving_epsilon": math.inf}, math.inf),
    ],
)
def test_epsilon_of_a_request_is_certified(
    write_paper: Callable[..., Path], news: Path, settings: dict[str, Any], epsilon: float
) -> None:
    method, runtime, shared = trained(write_paper, news)
    found = serving(method, runtime, shared, serving_probe(settings).partition(":")[2], 1e-3)
    assert found["epsilon_query"] == pytest.approx(epsilon, abs=0.01)


def test_pages_show_requests(write_paper: Callable[..., Path], news: Path) -> None:
    result = reproduce.reproduce(planned(write_paper, news, figure="5"), news / "out")
    result = reproduce.reproduce(planned(write_paper, news, table="2"), news / "out")
    folder = news / "out" / "reproduce" / "tiny"
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    (head,) = (line for line in text.splitlines() if line.startswith("| method |") and "AUC<br>published" in line)
    assert [name in head for name in ("τ", "ε, server", "ε, a request")] == [True] * 3
    assert "| as published | ε, a request |" in text
    assert "17.9 | ∞ |" in text
    assert "weights and weights, nobody, " in text, "the order of two rows is stated"
    assert "A column for each value of: ε\\_s." in text
    shown = io.StringIO()
    print_reproduction(result, folder, ["Table 2", "Figure 5"], Console(file=shown, width=200))
    assert "ε, a request" in shown.getvalue()
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "news.csv: τ" in page


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('serving = { query = "nobody" }', "serving = { basis = 4 }", "no field of a request 'basis'"),
        ('serving = { query = "nobody" }', 'serving = { query = "vector" }', "query must be"),
        ('method = "popularity"', 'method = "popularity"\nserving = { query = "nobody" }', "no device"),
        ('method = "popularity"', 'method = "fedmf"\nserving = { query = "nobody" }', "have no settings"),
        (
            'kind = "serving"\ntitle = "Trained"',
            'title = "Trained"',
            "serving is for a row of a table of kind 'serving'",
        ),
        ('name = "popularity"\nfixed = true', 'name = "popularity"', "give it serving, or fixed = true"),
        ('vary = "serving.serving_epsilon"', 'vary = "request.epsilon"', "fields.NAME, run.NAME or serving.NAME"),
        (
            'axis = "ε_s"',
            'axis = "ε_s"\norders = [["popularity", "as published"]]',
            "orders compare the rows of a table",
        ),
        ("[0.5, 10.0, inf]", "[-1.0, 10.0, inf]", "serving_epsilon"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_runs(
    write_paper: Callable[..., Path], news: Path, old: str, new: str, said: str
) -> None:
    assert old in PAPER
    with pytest.raises(HomebodyError, match=re.escape(said)):
        read_paper(write_paper(news, PAPER.replace(old, new, 1)))


def test_statistics_and_noise_need_no_run(write_paper: Callable[..., Path], news: Path) -> None:
    text = """
title = "Without runs"
citation = "Nobody, Nowhere 2020"
[[table]]
id = "1"
kind = "statistics"
title = "Data"
data = ["news.csv"]
run = { impressions = "shown.csv" }
[[table.row]]
name = "impressions"
published = { "news.csv" = [230117] }
[[table.row]]
name = "negative samples"
[[figure]]
id = "6"
kind = "noise"
title = "Padding"
data = ["news.csv"]
paddings = [0, 0.5]
release = { guarantee = "certified" }
[[figure.row]]
name = "10"
release = { epsilon = 10 }
"""
    result = reproduce.reproduce(planned(write_paper, news, text), news / "out")
    lines = rows_of(result, "Table 1")
    counts = {name: line["obtained"]["counted"]["metrics"]["count"]["mean"] for name, line in lines.items()}
    assert counts == {"impressions": 60, "negative samples": 360}
    points = rows_of(result, "Figure 6")["10"]["points"]
    scales = [point["obtained"]["computed"]["metrics"]["noise_scale"]["mean"] for point in points]
    assert [round(scale, 3) for scale in scales] == [0.574, 0.525]
    shown = (news / "out" / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "| impressions | 230,117 | 60 |" in shown
    for old, new, said in (
        ('name = "negative samples"', 'name = "readers"', "readers"),
        ("paddings = [0, 0.5]", "paddings = [1]", "under 1"),
        ("release = { epsilon = 10 }", "", "release.epsilon is missing"),
        ("release = { epsilon = 10 }", "release = { epsilon = -1 }", "above 0"),
        ("release = { epsilon = 10 }", 'release = { epsilon = 1, noise = "none" }', "none"),
    ):
        with pytest.raises(HomebodyError, match=re.escape(said)):
            read_paper(write_paper(news, text.replace(old, new), name=f"wrong-{said[:4]}-{len(new)}"))


def tiny_privaterec() -> str:
    """Our recipe of PrivateRec on readers of 30 articles by id, with vectors of 8 numbers."""
    text = (ROOT / "experiments" / "privaterec" / "recipe.toml").read_text(encoding="utf-8")
    text = re.sub(r"^(on|published|published_sd|run_on|optional) = .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^data = .*$", 'data = ["news.csv"]', text, flags=re.MULTILINE)
    text = (
        re.sub(r'encoder = "\w+"', 'encoder = "id"', text)
        .replace("d = 400", "d = 8")
        .replace("cohort = 128", "cohort = 8")
    )
    text = re.sub(r"^values = \[50, .*$", "values = [4, 8]", text, flags=re.MULTILINE)
    text = text.replace('split = "impressions-people"', 'split = "impressions-people", impressions = "shown.csv"')
    return re.sub(
        r"^steps = .*$",
        "steps = 2",
        text.replace('kind = "statistics"', 'kind = "statistics"\nrun = { impressions = "shown.csv" }'),
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize(
    "asked", [{"table": "1"}, {"table": "3-plm"}, {"figure": "5"}, {"figure": "6"}, {"figure": "9"}]
)
def test_the_recipe_of_privaterec_runs(write_paper: Callable[..., Path], news: Path, asked: dict[str, str]) -> None:
    todo = planned(write_paper, news, tiny_privaterec(), **asked, seeds=1, rounds=1)
    result = json.loads(json.dumps(reproduce.reproduce(todo, news / "out")))
    for study in (study for study in result["studies"] if study["data"]):
        part = study["data"]["news.csv"]
        assert part["finished"] == part["planned"]
        for line in part["rows"]:
            for group in (line, *line.get("points", [])):
                for outcome in group.get("obtained", {}).values():
                    assert not outcome["errors"]
                    assert outcome["metrics"]
            assert not line.get("errors")
    assert (news / "out" / "reproduce" / "tiny" / "RESULTS.md").exists()


def test_every_part_of_privaterec_has_what_its_figures_are_held_against() -> None:
    paper = read_paper(ROOT / "experiments" / "privaterec")
    numbers = {study.label.partition("-")[0] for study in paper.studies}
    assert numbers == {"Table 1", "Table 2", "Table 3", *(f"Figure {number}" for number in range(4, 10))}
    for study in (study for study in paper.studies if study.kind not in ("statistics", "noise")):
        names = " / ".join(row.name for row in study.rows)
        for wanted in ("PrivateRec", "certified attention", "choice", "nobody", "popularity"):
            assert wanted in names, (study.label, wanted)

"""One trained model, adapted in several ways; and attacks on who was in its training. End to end, on tiny papers."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from homebody.errors import HomebodyError
from homebody.methods.privrec import PrivRec
from homebody.recipe import Recipe
from homebody.report.terminal import print_reproduction
from homebody.run import prepare, reopen
from homebody.simulation import Simulator
from homebody.simulation.ablations import Unadapted
from homebody.studies import cells, probes, reproduce, run_cells
from homebody.studies.papers import read_paper
from homebody.studies.plan import plan
from homebody.training import fit

Write = Callable[..., Path]
DATA = "synthetic:users=160,items=60,mean=12"
SMALL = '{ factors = 2, hidden = "4", epochs = 3, adapt_epochs = 0, adapt_rate = 0.0 }'
PAPER = f"""
title = "Who adapts, who was in"
citation = "Nobody, Nowhere 2020"

[[table]]
id = "2"
title = "Hits"
metrics = ["full/hits@20"]
data = ["{DATA}"]
protocols = ["strict"]
seeds = 2
rounds = 2
run = {{ split = "held-out-users:test=0.2,valid=0", held_out = "random", cohort = 10, evaluate_every = 100 }}
[[table.row]]
name = "PrivRec"
method = "privrec"
fields = {SMALL}

[[table]]
id = "6"
kind = "membership"
title = "Attacks"
data = ["{DATA}"]
protocols = ["strict"]
seeds = 1
rounds = 2
attack = {{ shadows = 4 }}
run = {{ split = "held-out-users:test=0.5,valid=0", held_out = "random", cohort = 10, evaluate_every = 0 }}
[[table.row]]
name = "PrivRec"
method = "privrec"
fields = {SMALL}
published = {{ "{DATA}" = [0.65, nan, nan, nan, nan] }}

[[figure]]
id = "steps"
kind = "adaptation"
title = "By passes"
table = "2"
vary = "fields.adapt_epochs"
values = [0, 1, 3]
[[figure]]
id = "items"
kind = "adaptation"
title = "By interactions"
table = "2"
seeds = 1
vary = "fields.adapt_items"
values = [0, 2, 1000]
axis = "at hand"
"""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    execute = cells.execute

    def counting(recipe: Any, out: Path, *arguments: Any, **named: Any) -> Any:
        names.append(named["name"])
        return execute(recipe, out, *arguments, **named)

    monkeypatch.setattr(cells, "execute", counting)
    return names


def rows(result: dict[str, Any], label: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = next(one for one in result["studies"] if one["label"] == label)["data"][DATA]["rows"]
    return found


def test_adaptations_of_one_model(tmp_path: Path, write_paper: Write, begun: list[str]) -> None:
    paper = read_paper(write_paper(tmp_path, PAPER))
    out = tmp_path / "runs"
    result = reproduce.reproduce(plan(paper, figure="steps"), out)
    assert len(begun) == 2, "two seeds, whatever the number of values"
    (row,) = rows(result, "Figure steps")
    assert [point["value"] for point in row["points"]] == [0, 1, 3]
    found = [point["obtained"]["strict"]["metrics"]["full/hits@20"]["values"] for point in row["points"]]
    kept = [json.loads((out / "cells" / name / "result.json").read_text()) for name in begun]
    # Three passes are what it trains with, and so what a run adapts by.
    assert found[2] == [one["metrics"]["full/hits@20"] for one in kept]
    assert len({tuple(values) for values in found}) == 3

    # The models are gone: a figure that was not asked for then trains once more, and the table nothing.
    result = reproduce.reproduce(plan(paper, table="2"), out)
    assert len(begun) == 2
    result = reproduce.reproduce(plan(paper, figure="items"), out)
    assert [name.endswith("-again") for name in begun[2:]] == [True]
    (items,) = rows(result, "Figure items")
    by_items = [point["obtained"]["strict"]["metrics"]["full/hits@20"]["mean"] for point in items["points"]]
    assert (by_items[0], by_items[2]) == (found[0][0], found[2][0])
    assert by_items[1] not in by_items[::2]

    page = (out / "reproduce" / "tiny" / "index.html").read_text(encoding="utf-8")
    charts = json.loads(page.split('id="charts">')[1].split("</script>")[0])
    assert charts[0]["views"]["strict"]["series"][0]["x"] == [0, 1, 3]
    assert charts[0]["views"]["strict"]["series"][0]["mean"] == pytest.approx([sum(one) / 2 for one in found])
    assert "the shared model as it was sent" in page
    text = (out / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    assert "the shared model as it was sent" in text
    assert "| method | 0 | 2 | 1000 |" in text
    console = Console(width=80, file=io.StringIO())
    print_reproduction(result, out, ["Figure items"], console)
    assert f"{by_items[1]:.4f}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_zero_is_the_common_start() -> None:
    recipe = Recipe("privrec", DATA, split="held-out-users:test=0.2,valid=0", held_out="random")
    _, split = prepare(recipe)
    method = PrivRec(factors=4, hidden="8", epochs=2, learning_rate=0.5, adapt_epochs=0, adapt_rate=0.0)
    runtime = Simulator(split)
    fitted = fit(method, runtime, rounds=1, cohort=10, evaluate_every=0)
    found = probes.adaptation(probes.ProbedRun(fitted, recipe, "adapt_epochs=0,2"))
    assert found["people"] == len(split.asked())
    still = runtime.evaluate(PrivRec(**{**vars(method), "adapt_rate": 1e-30}), fitted.shared).metrics
    assert found["metrics"]["0"] == pytest.approx({n: v for n, v in still.items() if not n.startswith("valid/")})
    own = runtime.evaluate(method, fitted.shared).metrics
    assert found["metrics"]["2"] == {n: v for n, v in own.items() if not n.startswith("valid/")}
    assert found["metrics"]["0"] != found["metrics"]["2"]
    # Nothing was left behind in the runtime that lent its clients.
    assert Unadapted(runtime).evaluate(method, fitted.shared).metrics != own
    assert runtime.evaluate(method, fitted.shared).metrics == own


def test_attacks(tmp_path: Path, write_paper: Write, begun: list[str]) -> None:
    paper = read_paper(write_paper(tmp_path, PAPER))
    out = tmp_path / "runs"
    reproduce.reproduce(plan(paper, table="2"), out)
    assert not list((out / "cells").glob("*/probe-*")), "what costs much waits until it is asked for"
    result = reproduce.reproduce(plan(paper, table="6"), out)
    (row,) = rows(result, "Table 6")
    found = row["obtained"]["strict"]
    assert found["errors"] == []
    (name,) = found["cells"]
    kept = json.loads((out / "cells" / name / "probe-membership-shadows-4-people-0.json").read_text())
    full = kept["found"]
    assert (full["target"], full["trained_on"], full["shadows"]) == ("the run's model", 80, 4)
    assert full["members"] + full["others"] + full["lists"]["shadow_people"] == 160
    metrics = found["metrics"]
    assert metrics["attack/accuracy"]["mean"] == full["lists"]["accuracy"][0]
    assert metrics["attack/accuracy"]["interval"] == full["lists"]["accuracy"][1:]
    assert metrics["lira/auc"]["mean"] == full["likelihood_ratio"]["auc"][0]
    assert metrics["attack/allowed"]["mean"] == 1.0, "nothing is noised, so nothing is bounded"
    assert row["difference"] == {"attack/accuracy": pytest.approx(100 * (metrics["attack/accuracy"]["mean"] - 0.65))}
    text = (out / "reproduce" / "tiny" / "RESULTS.md").read_text(encoding="utf-8")
    low, high = metrics["lira/auc"]["interval"]
    assert f"{metrics['lira/auc']['mean']:.4f} [{low:.4f}, {high:.4f}]" in text
    assert "the interval of 95 %" in text
    assert "likelihood ratio: AUC" in (out / "reproduce" / "tiny" / "index.html").read_text(encoding="utf-8")
    console = Console(width=100, file=io.StringIO())
    print_reproduction(result, out, ["Table 6"], console)
    assert f"[{low:.4f}, {high:.4f}]" in console.file.getvalue()  # type: ignore[attr-defined]
    before = len(begun)
    assert rows(reproduce.reproduce(plan(paper, table="6"), out), "Table 6") == [row]
    assert len(begun) == before


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_how_far_a_look_is(tmp_path: Path, jobs: int, request: pytest.FixtureRequest) -> None:
    if jobs > 1:
        request.getfixturevalue("warm_workers")
    recipe = Recipe("privrec", DATA, fields={"factors": 2, "hidden": "4", "epochs": 1}, rounds=1, cohort=5)
    told: list[tuple[int, int]] = []
    run_cells(
        [recipe],
        tmp_path,
        jobs=jobs,
        probes=[["adaptation:adapt_epochs=0,1,2,3,4"]],
        watch=lambda progress: told.append((progress.done, progress.planned)),
    )
    assert (5, 5) in told
    assert told[-1][0] == told[-1][1]


def test_an_attack_needs_people_who_were_not_in_it(tmp_path: Path) -> None:
    recipe = Recipe("privrec", DATA, fields={"factors": 2, "hidden": "4", "epochs": 1}, rounds=1, cohort=5)
    (result,) = run_cells([recipe], tmp_path, probes=[["membership:shadows=4,people=0"]])
    assert "Everyone is in the training here" in result["refused"]["membership:shadows=4,people=0"]


def test_the_attack_gets_what_the_run_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrated noise, the cohort and the seed reach the shadow models, and the model is the run's own."""
    asked: dict[str, Any] = {}

    def pretending(method: Any, split: Any, **named: Any) -> dict[str, Any]:
        asked.update(named, method=method, split=split)
        raise HomebodyError("That is enough.")

    monkeypatch.setattr("homebody.adversary.membership.attack", pretending)
    recipe = Recipe(
        "privrec",
        DATA,
        fields={"factors": 2, "hidden": "4", "epochs": 1},
        rounds=2,
        seed=3,
        cohort=7,
        split="held-out-users:test=0.5,valid=0",
        budget="eps=5,delta=1e-5,observer=public",
        calibrate=True,
        stages=["clip:norm=0.5", "secure-sum", "gaussian"],
        evaluate_every=0,
    )
    (result,) = run_cells([recipe], tmp_path, probes=[["membership:shadows=6,people=50"]])
    assert result["refused"] == {"membership:shadows=6,people=50": "That is enough."}
    assert (asked["shadows"], asked["people"], asked["seed"]) == (6, 50, 3)
    assert (asked["rounds"], asked["cohort"], asked["delta"]) == (2, 7, 1e-5)
    fitted, _ = reopen(Path(result["run"]))
    assert asked["method"].uplink == fitted.method.uplink
    assert asked["method"].uplink.stages[-1].z > 0
    assert all(torch.equal(value, fitted.shared[name]) for name, value in asked["released"].shared.items())
    assert asked["released"].epsilon == fitted.epsilon["public"] <= 5
    assert asked["split"].learn.sum() == 80
    fitted.ledger.close()


def test_figures_of_an_attack_that_could_not_be_tried() -> None:
    found = {
        "lists": {"skipped": "no forest"},
        "likelihood_ratio": {"auc": [0.5, 0.4, 0.6], "rates": [{"false_positives": 0.001, "true": [0.1, 0.0, 0.2]}]},
        "allowed": {"accuracy": 0.9},
    }
    told = probes.membership_figures(found)
    assert [name for name, value in told["metrics"].items() if not math.isnan(value)] == ["lira/auc", "attack/allowed"]
    assert told["intervals"]["lira/auc"] == [0.4, 0.6]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("values = [0, 1, 3]", "values = [0, 0.5]", "over whole numbers from 0"),
        ("values = [0, 1, 3]", "values = [-1]", "over whole numbers from 0"),
        ('vary = "fields.adapt_epochs"', 'vary = "run.cohort"', "an adaptation varies fields.NAME"),
        ('vary = "fields.adapt_epochs"', 'vary = "fields.adapt_epoch"', "did you mean 'adapt_epochs'"),
        ("attack = { shadows = 4 }", "attack = { shadow = 4 }", "no setting of the attack 'shadow'"),
        ("attack = { shadows = 4 }", "attack = { shadows = 'x' }", "attack.shadows must be a whole number"),
        ("attack = { shadows = 4 }", 'metrics = ["hr@10"]', "no figure of an attack 'hr@10'"),
    ],
)
def test_what_a_recipe_may_not_say(tmp_path: Path, write_paper: Write, old: str, new: str, expected: str) -> None:
    assert old in PAPER
    with pytest.raises(HomebodyError, match=expected):
        read_paper(write_paper(tmp_path, PAPER.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("probe", "method", "expected"),
    [
        ("adaptation:adapt_epochs=0", "popularity", "no device adapts"),
        ("adaptation:epochs=0", "fedmf", "The devices of fedmf do not adapt"),
        ("membership:shadows=4,people=0", "popularity", "keeps no model that could be attacked"),
    ],
)
def test_refused_before_anything_is_trained(probe: str, method: str, expected: str) -> None:
    with pytest.raises(HomebodyError, match=expected):
        probes.refuse(probe, Recipe(method, DATA).build(), method)

"""Whole runs on every way to split: repeatable, resumable, and with the metrics that were asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homebody import run as runs
from homebody.data import Population, load
from homebody.data.partitions import WAYS
from homebody.data.population import Impressions
from homebody.evaluation.metrics import METRICS, OF_IMPRESSIONS
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import Watcher, execute, reopen, resume

DATA = "synthetic:users=40,items=50,mean=12"
FEDMF = Recipe("fedmf", DATA, fields={"factors": 4}, rounds=3)
TIMES = {"seconds", "seconds_per_round", "evaluation_seconds", "compile_seconds", "cpu_seconds", "peak_rss_mb", "run"}
EVERY_WAY = pytest.mark.parametrize("way", sorted(WAYS))


class Stop(BaseException):
    """Ends a run from inside, as Ctrl-C does."""


@pytest.fixture(autouse=True)
def impressions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone was shown ten items twice; of these they clicked one or two."""

    def with_impressions(*arguments: Any, **options: Any) -> Population:
        population = load(*arguments, **options)
        generator = np.random.default_rng(1)
        users = np.repeat(np.arange(population.n_users), 2)
        items = np.stack([generator.permutation(population.n_items)[:10] for _ in users]).astype(np.int32)
        clicked = np.zeros(items.shape, dtype=np.bool_)
        clicked[:, 3] = clicked[::3, 7] = True
        shown = Impressions(
            users, np.arange(len(users) + 1) * 10, items.ravel(), clicked.ravel(), np.arange(len(users))
        )
        return replace(population, impressions=shown)

    monkeypatch.setattr(runs, "load", with_impressions)


def the_run(parent: Path) -> Path:
    (path,) = parent.iterdir()
    return path


def told(path: Path) -> dict[str, Any]:
    folder = RunFolder.open(path)

    def timeless(line: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in line.items() if name not in TIMES}

    state = [file for file in path.iterdir() if file.suffix == ".safetensors"]
    return {
        "result": timeless(folder.read_json("result.json")),
        "rounds": [timeless(line) for line in folder.rounds()],
        "ranks": folder.ranks().to_dicts(),
        "state": [file.read_bytes() for file in state],
    }


def names(way: str, cutoffs: tuple[int, ...] = (5, 10, 20)) -> set[str]:
    one = {"auc", *(f"{name}@{k}" for name in METRICS for k in cutoffs)}
    if way.startswith("impressions"):
        return one | {f"impressions/{name}" for name in OF_IMPRESSIONS}
    return one | {f"full/{name}" for name in one}


@EVERY_WAY
def test_a_run_is_the_same_after_an_interruption(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(FEDMF, split=way, cohort=9)
    result = execute(recipe, tmp_path / "whole")
    assert set(result["metrics"]) == set(result["validation"]) == names(way)
    assert all(0 <= value <= 1 for value in result["metrics"].values())
    assert f"split {way} ({WAYS[way].title})" in result["meaning"]
    assert Recipe.from_toml((the_run(tmp_path / "whole") / "recipe.toml").read_text()) == recipe

    def stop(line: Any) -> None:
        if line.round == 2:
            raise Stop

    monkeypatch.setattr(RunFolder, "due", lambda self: True)
    with pytest.raises(Stop):
        execute(recipe, tmp_path / "part", Watcher(on_round=stop))
    done: list[int] = []
    resume(the_run(tmp_path / "part"), Watcher(on_round=lambda line: done.append(line.round)))
    assert done == [2, 3]
    assert told(the_run(tmp_path / "part")) == told(the_run(tmp_path / "whole"))
    fitted, _ = reopen(the_run(tmp_path / "part"))
    assert fitted.runtime.evaluate(fitted.method, fitted.shared).metrics == fitted.metrics
    kept = RunFolder.open(the_run(tmp_path / "part")).ranks().columns
    full = [] if way.startswith("impressions") else ["full_ndcg@10", "full_rank"]
    assert sorted(kept) == sorted(["user", "rank", "ndcg@10", *full])


@EVERY_WAY
@pytest.mark.parametrize("method", ["popularity", "ials", "pfedrec"])
def test_methods_and_references_run_on_every_way(tmp_path: Path, way: str, method: str) -> None:
    said: list[str] = []
    fields = {} if method == "popularity" else {"factors": 4}
    result = execute(Recipe(method, DATA, fields, rounds=2, split=way), tmp_path, Watcher(say=said.append))
    assert set(result["metrics"]) == names(way)
    assert result["notes"] == said[-len(result["notes"]) :] or not result["notes"]
    ranks = RunFolder.open(the_run(tmp_path)).ranks()
    assert len(ranks) > 0
    assert ranks["ndcg@10"].mean() == pytest.approx(result["metrics"]["ndcg@10"])


def test_the_metrics_that_were_asked_for(tmp_path: Path) -> None:
    recipe = replace(FEDMF, cutoffs=[1, 30], slices=["-10", "10-"], split="ratio")
    result = execute(recipe, tmp_path)
    plain = names("ratio", (1, 10, 30))
    assert set(result["metrics"]) == plain | {f"{group}/{name}" for group in ("-10", "10-") for name in plain}
    assert set(result["validation"]) <= set(result["metrics"])
    assert "10-/ndcg@30" in result["validation"]
    fitted, _ = reopen(Path(result["run"]))
    assert fitted.runtime.evaluate(fitted.method, fitted.shared).metrics == fitted.metrics
    one = execute(replace(recipe, method="ials", slices=["10-"]), tmp_path / "ials")
    assert set(one["metrics"]) == plain | {f"10-/{name}" for name in plain}
    assert one["metrics"]["10-/auc"] != one["metrics"]["auc"]


def test_the_round_is_chosen_by_the_metric_that_was_named(tmp_path: Path) -> None:
    result = execute(replace(FEDMF, cutoffs=[1], select="valid/full/recall@7", split="ratio"), tmp_path)
    lines = [json.loads(line) for line in (the_run(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    best = max(lines, key=lambda line: line["metrics"]["valid/full/recall@7"])
    assert result["chosen_round"] == best["round"]
    assert set(result["metrics"]) == names("ratio", (1, 7))
    assert "ndcg@7" in RunFolder.open(the_run(tmp_path)).ranks().columns


def test_a_reference_that_is_never_evaluated_says_nothing(tmp_path: Path) -> None:
    result = execute(Recipe("ials", DATA, {"factors": 4}, rounds=3, evaluate_every=0), tmp_path)
    assert (result["metrics"], result["chosen_round"], result["rounds"]) == ({}, 3, 3)


def test_a_strict_split_and_its_settings_reach_the_split(tmp_path: Path) -> None:
    few = execute(replace(FEDMF, split="held-out-users:test=0.1", rounds=1), tmp_path / "few")
    many = execute(replace(FEDMF, split="held-out-users:test=0.4", rounds=1), tmp_path / "many")
    assert few["notes"] == [
        "4 users are asked in validation and 4 in test, after adapting to the rest of what they have."
    ]
    assert many["notes"][0].startswith("4 users are asked in validation and 16 in test")
    assert len(RunFolder.open(the_run(tmp_path / "many")).ranks()) == 16

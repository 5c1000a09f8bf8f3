"""All methods that fit a data set, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from homebody.data import Population, load
from homebody.errors import HomebodyError
from homebody.methods import METHODS
from homebody.methods.baselines import Popularity
from homebody.recipe import Recipe
from homebody.report.comparison import summarise_runs
from homebody.studies import cells, leaderboard
from homebody.studies.leaderboard import fitting

DATA = "synthetic:users=40,items=60,mean=12"


@pytest.fixture(scope="module")
def population() -> Population:
    return load(DATA)


@dataclass(frozen=True)
class Demanding(Popularity):
    """What it needs is set by the tests."""

    needs: ClassVar[tuple[str, ...]] = ()


@pytest.fixture
def demanding(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    find = leaderboard.find

    def demand(*needs: str) -> None:
        monkeypatch.setattr(Demanding, "needs", needs)
        monkeypatch.setattr(leaderboard, "find", lambda name: Demanding if name == "demanding" else find(name))

    return demand


class TestFitting:
    def test_what_needs_nothing_fits_everything(self, population: Population) -> None:
        found = fitting(population)
        assert {*found.methods, *(one["name"] for one in found.skipped)} == set(METHODS)
        assert {"popularity", "fedmf", "pfedrec", "ials", "fedials"} <= set(found.methods)

    def test_what_lacks_something_is_told_of(self, population: Population, demanding: Callable[..., None]) -> None:
        demanding("ratings", "impressions")
        bare = replace(population, ratings=None, impressions=None)
        found = fitting(bare, ["demanding", "popularity"])
        assert found.methods == ["popularity"]
        reason = "needs ratings, which this data lacks"
        assert found.skipped == [{"name": "demanding", "reason": reason}]

    @pytest.mark.parametrize(("need", "field"), [("ratings", "ratings"), ("times", "times")])
    def test_what_is_there_is_seen(
        self, need: str, field: str, population: Population, demanding: Callable[..., None]
    ) -> None:
        demanding(need)
        kind = {"ratings": np.float32, "times": np.int64}[field]
        there: dict[str, Any] = {field: np.ones(population.n_interactions, dtype=kind)}
        assert fitting(replace(population, **there), ["demanding"]).methods == ["demanding"]
        away: dict[str, Any] = {field: None}
        assert fitting(replace(population, **away), ["demanding"]).methods == []

    def test_a_need_that_nobody_knows(self, population: Population, demanding: Callable[..., None]) -> None:
        demanding("rating")
        with pytest.raises(HomebodyError, match="kind of data that a method may need 'rating'; did you mean 'ratings'"):
            fitting(population, ["demanding"])


def run(population: Population, out: Path, **named: Any) -> dict[str, Any]:
    recipe = Recipe("popularity", DATA, rounds=2)
    return leaderboard.leaderboard(recipe, population, out, **{"seeds": 2, **named})


def test_methods_side_by_side(population: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    execute = cells.execute
    monkeypatch.setattr(cells, "execute", lambda recipe, *a, **n: begun.append(recipe) or execute(recipe, *a, **n))
    result = run(population, tmp_path, methods=["popularity", "fedmf"], command="homebody leaderboard --seeds 2")
    assert [(recipe.method, recipe.seed) for recipe in begun] == [
        ("popularity", 0),
        ("popularity", 1),
        ("fedmf", 0),
        ("fedmf", 1),
    ]
    (folder,) = (tmp_path / "leaderboard").iterdir()
    assert folder.name.startswith("synthetic-users-40-items-60-mean-12-strict-")
    assert result["folder"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["LEADERBOARD.md", "index.html", "result.json"]
    written = json.loads((folder / "result.json").read_text())
    assert written == {name: value for name, value in json.loads(json.dumps(result)).items() if name != "folder"}
    assert str(tmp_path) not in json.dumps(written)

    rows = {row["name"]: row for row in result["methods"]}
    assert (rows["popularity"]["kind"], rows["fedmf"]["kind"]) == ("centralised", "federated")
    assert result["methods"][0]["name"] == result["best"]
    means = [row["metrics"]["ndcg@10"]["mean"] for row in result["methods"]]
    assert means == sorted(means, reverse=True)
    assert result["observers"] == ["server", "clients", "public"]
    finished = [
        {**json.loads((tmp_path / "cells" / cell / "result.json").read_text()), "run": str(tmp_path / "cells" / cell)}
        for name in ("popularity", "fedmf")
        for cell in rows[name]["cells"]
    ]
    expected = {row["method"]: row for row in summarise_runs(finished)["methods"]}
    for name, row in rows.items():
        for key in ("metrics", "epsilon", "bytes_up", "bytes_down", "seconds", "p_against_best"):
            assert row[key] == expected[name][key], key

    again = run(population, tmp_path, methods=["popularity", "fedmf", "ials"])
    assert len(begun) == 6, "only the new method is run"
    assert {row["name"] for row in again["methods"]} == {"popularity", "fedmf", "ials"}


def test_an_epsilon_behind_a_proxy_is_told_of_on_every_page(population: Population, tmp_path: Path) -> None:
    result = run(population, tmp_path, methods=["popularity", "private-popularity"], seeds=1)
    said = "ε of private-popularity holds behind a proxy that does not collude with the observer; by addition it is 500"
    assert said in result["legend"]
    for name in ("LEADERBOARD.md", "index.html"):
        assert (Path(result["folder"]) / name).read_text().count(said) == 1


def test_a_method_that_fails_is_listed_with_its_reason(
    population: Population, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = cells.execute

    def failing(recipe: Recipe, *arguments: Any, **named: Any) -> dict[str, Any]:
        if recipe.method == "fedmf" and recipe.seed == 1:
            raise HomebodyError("It does not fit, says /some/where/else.")
        return execute(recipe, *arguments, **named)

    monkeypatch.setattr(cells, "execute", failing)
    result = run(population, tmp_path, methods=["fedmf", "popularity"])
    assert [row["name"] for row in result["methods"]] == ["popularity"]
    assert result["skipped"] == [{"name": "fedmf", "reason": "failed: It does not fit, says …/else."}]
    with pytest.raises(HomebodyError, match="No method got through: It does not fit"):
        run(population, tmp_path / "again", methods=["fedmf"])


def test_where_nothing_fits(population: Population, tmp_path: Path, demanding: Callable[..., None]) -> None:
    demanding("impressions")
    with pytest.raises(HomebodyError, match="No method fits this data: demanding needs impressions"):
        run(population, tmp_path, methods=["demanding"])

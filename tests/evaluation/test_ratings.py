"""How wrong predicted ratings are: over all that are held out, and where circumstances count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from homebody.core import Data, Scoring, Tree
from homebody.data import Population
from homebody.data.partitions import split
from homebody.data.population import Features
from homebody.errors import HomebodyError
from homebody.evaluation import Block, questions, summarise
from homebody.methods.fedmf import FedMF
from homebody.progress import better
from homebody.recipe import Recipe
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.training import fit

# Three people with four items each; the last two of each are held out, the first of those for validation.
ITEMS = np.array([0, 1, 2, 3, 1, 2, 3, 4, 4, 3, 2, 1], dtype=np.int32)
RATINGS = np.array([1, 1, 5, 4, 1, 1, 3, 2, 1, 1, 2, 1], dtype=np.float32)
TOY = Population("toy", np.array([0, 4, 8, 12]), ITEMS, 6, times=np.tile(np.arange(4), 3), ratings=RATINGS)


@dataclass(frozen=True)
class Threes(FedMF):
    """Says 3 of everything, and half as much more of item 4; by the weather, where there is any."""

    @property
    def scoring(self) -> Scoring:
        return Scoring("ratings")

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        around = data.now.get("weather", torch.tensor(0))
        return torch.where(items == 4, 3.5, 3.0) + around


class Weathered(Threes):
    uses = ("contexts",)


def test_errors_are_over_all_held_out_ratings() -> None:
    done = split(TOY, "leave-one-out", how="latest", negatives=2)
    found = Simulator(done, slices=["4-5"])
    found.begin(method := Threes(factors=2), fit_rng())
    metrics = found.evaluate(method, method.init_shared(found.catalogue, fit_rng())).metrics
    wrong, valid = np.array([3 - 4, 3.5 - 2, 3 - 1]), np.array([3 - 5, 0, 1])  # test, then validation
    for prefix, expected in (("", wrong), ("4-5/", wrong), ("valid/", valid), ("valid/4-5/", valid)):
        assert metrics[f"{prefix}rmse"] == pytest.approx(np.sqrt((expected**2).mean()))
        assert metrics[f"{prefix}mae"] == pytest.approx(np.abs(expected).mean())


def test_of_a_slice_only_its_users_count() -> None:
    mixed = replace(
        TOY,
        indptr=np.array([0, 4, 8, 15]),
        items=np.concatenate([ITEMS[:8], np.array([4, 3, 2, 1, 0, 5, 3], dtype=np.int32)[:7]]),
        times=np.concatenate([np.tile(np.arange(4), 2), np.arange(7)]),
        ratings=np.concatenate([RATINGS[:8], np.array([1, 1, 2, 1, 1, 5, 5], dtype=np.float32)]),
    )
    done = split(mixed, "leave-one-out", how="latest", negatives=1)
    found = Simulator(done, slices=["-5"])
    found.begin(method := Threes(factors=2), fit_rng())
    metrics = found.evaluate(method, method.init_shared(found.catalogue, fit_rng())).metrics
    assert metrics["-5/mae"] == pytest.approx((1 + 1.5) / 2)
    assert metrics["mae"] != metrics["-5/mae"]


def test_each_is_asked_in_its_own_circumstances() -> None:
    weather = Features(pl.DataFrame({"weather": ["a", "b"] * 6}), {"weather": "categorical"})
    done = split(replace(TOY, contexts=weather), "leave-one-out", how="latest", negatives=2)
    found = Simulator(done)
    found.begin(method := Weathered(factors=2), fit_rng())
    metrics = found.evaluate(method, method.init_shared(found.catalogue, fit_rng())).metrics
    assert metrics["mae"] == pytest.approx((abs(3 + 2 - 4) + abs(3.5 + 2 - 2) + abs(3 + 2 - 1)) / 3)  # b is code 2
    assert metrics["valid/mae"] == pytest.approx((abs(3 + 1 - 5) + abs(3 + 1 - 3) + abs(3 + 1 - 2)) / 3)


def test_of_several_held_out_each_is_asked_once_in_its_own_circumstances() -> None:
    weather = Features(pl.DataFrame({"weather": ["a", "b", "a", "b"] * 3}), {"weather": "categorical"})
    done = split(replace(TOY, contexts=weather), "ratio:test=0.5,valid=0.25", how="latest", negatives=2)
    found = Simulator(done)
    found.begin(method := Weathered(factors=2), fit_rng())
    metrics = found.evaluate(method, method.init_shared(found.catalogue, fit_rng())).metrics
    # Held out are the last two of each; nobody learns from b, so it is unknown: code 0, and a is code 1.
    wrong = [3 + 1 - 5, 3 - 4, 3 + 1 - 3, 3.5 - 2, 3 + 1 - 2, 3 - 1]
    assert metrics["mae"] == pytest.approx(np.abs(wrong).mean())
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.square(wrong).mean()))


def test_a_rating_of_each_of_several_interactions_with_an_item_counts() -> None:
    again = replace(TOY, items=np.array([0, 1, 2, 2, 1, 2, 3, 4, 4, 3, 2, 1], dtype=np.int32))
    done = split(again, "ratio:test=0.5,valid=0.25", protocol="published", how="latest", negatives=2)
    asked = questions(done, np.array([0]), rated=True)["test"]
    assert asked.relevant.tolist() == [[2], [2]]
    scores = torch.full((1, 6), 3.0)
    told = summarise([Block(np.array([0]), scores, {"test": asked})]).metrics
    assert told["mae"] == pytest.approx((abs(3 - 5) + abs(3 - 4)) / 2)


def test_whatever_ranks_is_not_asked_for_ratings() -> None:
    done = split(TOY, "leave-one-out", how="latest", negatives=2)
    found = fit(FedMF(factors=2), Simulator(done), rounds=1)
    assert "rmse" not in found.metrics
    assert "ndcg@10" in found.metrics


def test_the_round_of_least_error_is_chosen_where_ratings_are_predicted() -> None:
    done = split(TOY, "leave-one-out", how="latest", negatives=2)
    found = fit(Threes(factors=2), Simulator(done), rounds=2)
    assert found.chosen == 1  # no later one is better
    assert Threes().scoring.select == "valid/rmse"
    worse, best = (found.evaluated.__class__({"valid/rmse": value}) for value in (1.2, 1.1))
    assert better(best, worse, "valid/rmse")
    assert not better(worse, best, "valid/rmse")


def fit_rng():  # type: ignore[no-untyped-def]
    from homebody.rng import Rng

    return Rng.of(0)


EXPLICIT = {"output": "explicit", "factors": 4, "hidden": "8", "epochs": 10, "learning_rate": 0.05}


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """People who all like some items and dislike the others."""
    rng = np.random.default_rng(1)
    liked = rng.random(30) < 0.5
    rows = [
        (u, i, t, 4 + u % 2 if liked[i] else 1 + u % 2)
        for u in range(40)
        for t, i in enumerate(rng.permutation(30)[:15])
    ]
    file = tmp_path_factory.mktemp("rated") / "rated.csv"
    pl.DataFrame(rows, schema=["user", "item", "time", "rating"], orient="row").write_csv(file)
    return file


def test_a_run_says_how_wrong_it_is_and_beats_the_mean(rated: Path, tmp_path: Path) -> None:
    recipe = Recipe("privrec", str(rated), fields=EXPLICIT, rounds=20, cohort=20, split="ratio", evaluate_every=10)
    result = execute(recipe, tmp_path)
    note = next(note for note in result["notes"] if note.startswith("always guessing the mean"))
    mean = float(note.partition("RMSE ")[2].partition(",")[0])
    assert result["metrics"]["rmse"] < 0.9 * mean
    assert result["metrics"]["mae"] <= result["metrics"]["rmse"]
    assert "rmse" in result["validation"]
    assert Recipe.from_toml((Path(result["run"]) / "recipe.toml").read_text()).selects() == "valid/rmse"


def test_the_note_of_the_mean_is_as_worked_out_by_hand(rated: Path, tmp_path: Path) -> None:
    recipe = Recipe("privrec", str(rated), fields=EXPLICIT, rounds=1, cohort=5, split="leave-one-out")
    result = execute(recipe, tmp_path)
    table = pl.read_csv(rated).with_columns(last=pl.col("time").rank("ordinal", descending=True).over("user"))
    mean = table.filter(pl.col("last") > 2)["rating"].mean()
    wrong = table.filter(pl.col("last") == 1)["rating"] - mean
    both = f"RMSE {(wrong**2).mean() ** 0.5:.4f}, MAE {wrong.abs().mean():.4f}"
    assert f"always guessing the mean of the training ratings, {mean:.3f}, has {both}" in result["notes"]


def test_data_without_ratings_is_refused(tmp_path: Path) -> None:
    recipe = Recipe("privrec", "synthetic:users=30,items=20,mean=6", fields=EXPLICIT)
    with pytest.raises(HomebodyError, match=r"privrec predicts ratings with these settings, and synthetic.* has none"):
        execute(recipe, tmp_path)
    assert not list(tmp_path.iterdir())

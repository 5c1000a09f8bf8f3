"""Beyond accuracy: figures worked out by hand, and lists against a plain sort."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import homebody as hb
from homebody.core import Evaluated
from homebody.data.partitions import leave_one_out
from homebody.data.population import Features, Population
from homebody.data.splits import Split
from homebody.evaluation import beyond, first_lists, metric_kernels, metrics
from homebody.evaluation.beyond import LEAST_USERS, gini
from homebody.evaluation.metrics import Block, Question
from homebody.rng import Rng

PEOPLE = 24


@pytest.fixture
def split() -> Split:
    """Everyone trains on item 0; half of them on item 1 too, so that they are the more active ones."""
    histories = [[0, 1, 6, 7] if user % 2 else [0, 6, 7] for user in range(PEOPLE)]
    indptr = np.concatenate([[0], np.cumsum([len(items) for items in histories])])
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    kinds = Features(
        pl.DataFrame({"genre": [["a"], ["a"], ["b"], ["a", "b"], [], ["b"], ["a"], ["b"]]}), {"genre": "multi-hot"}
    )
    sexes = Features(pl.DataFrame({"sex": ["F", "M"] * (PEOPLE // 2)}), {"sex": "categorical"})
    people = Population("toy", indptr, items, n_items=8, item_features=kinds, user_features=sexes)
    return leave_one_out(people, how="latest")


def evaluated(lists: list[list[int]], ndcg: list[float] | None = None) -> Evaluated:
    users = torch.arange(len(lists))
    gains = torch.tensor(ndcg or [0.0] * len(lists), dtype=torch.float64)
    per_user = {"user": users, "ndcg@3": gains, "full/ndcg@3": gains / 2}
    return Evaluated({}, per_user, lists={"user": users, "items": torch.tensor(lists, dtype=torch.int32)})


def test_coverage_novelty_and_popularity(split: Split) -> None:
    found = beyond(split, evaluated([[0, 1, 2]] * PEOPLE))
    assert found is not None
    assert found["k"] == 3
    assert found["coverage"] == pytest.approx(3 / 8)
    # All have item 0, half have item 1, and nobody has item 2, which counts as if one person did.
    assert found["novelty"] == pytest.approx((0 + 1 + math.log2(PEOPLE)) / 3)
    assert found["popularity"] == pytest.approx((1 + 0.5 + 0) / 3)
    # Histories: item 0 alone for half of them, items 0 and 1 for the others.
    assert found["history_popularity"] == pytest.approx((1 + 0.75) / 2)
    assert found["popularity_lift"] == pytest.approx(0.5 / 0.875 - 1)
    assert found["gini"] == pytest.approx(5 / 8)


def test_short_lists_count_for_what_they_have(split: Split) -> None:
    whole, short = beyond(split, evaluated([[0, 0, 0]] * PEOPLE)), beyond(split, evaluated([[0, -1, -1]] * PEOPLE))
    assert whole is not None
    assert short is not None
    for name in ("novelty", "popularity", "gini"):
        assert short[name] == pytest.approx(whole[name])
    assert math.isnan(short["diversity"])


@pytest.mark.parametrize(
    ("items", "distance"),
    [
        ([0, 1, 6], 0.0),
        ([0, 2, -1], 1.0),
        ([0, 3, -1], 1 - 1 / math.sqrt(2)),
        ([0, 1, 2], 2 / 3),
        ([0, 1, 4], 0.0),  # nothing is known of item 4
    ],
)
def test_diversity_by_features(split: Split, items: list[int], distance: float) -> None:
    found = beyond(split, evaluated([items] * PEOPLE))
    assert found is not None
    assert found["diversity_by"] == "item features"
    assert found["diversity"] == pytest.approx(distance, abs=1e-12)


def test_diversity_by_vectors_where_items_have_no_features(split: Split) -> None:
    bare = replace(split, population=replace(split.population, item_features=None))
    vectors = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0], *[[0.0, 0.0]] * 5])
    found = beyond(bare, evaluated([[0, 1, 2]] * PEOPLE), vectors)
    assert found is not None
    assert found["diversity_by"] == "item vectors"
    assert found["diversity"] == pytest.approx(1 - (0 + 2 / math.sqrt(2)) / 3)
    without = beyond(bare, evaluated([[0, 1, 2]] * PEOPLE))
    assert without is not None
    assert "diversity" not in without


def test_groups_are_by_activity_and_by_declared_category(split: Split) -> None:
    gains = [0.2 if user % 2 else 0.6 for user in range(PEOPLE)]
    found = beyond(split, evaluated([[0, 1, 2]] * PEOPLE, gains))
    assert found is not None
    shown = {(one["by"], one["group"]): (one["users"], one["ndcg@3"], one["full/ndcg@3"]) for one in found["groups"]}
    assert {who: count for who, (count, *_) in shown.items()} == {
        ("activity", "1 to 1 items"): 12,
        ("activity", "2 to 2 items"): 12,
        ("sex", "F"): 12,
        ("sex", "M"): 12,
    }
    assert shown["activity", "1 to 1 items"][1:] == pytest.approx((0.6, 0.3))
    assert shown["sex", "M"][1:] == pytest.approx((0.2, 0.1))
    assert found["gaps"] == pytest.approx({"activity": 0.4, "sex": 0.4})


def test_small_groups_say_nothing(split: Split) -> None:
    assert LEAST_USERS > 3
    names = ["F", "M", "X"] + ["F", "M"] * ((PEOPLE - 3) // 2) + ["F"]
    sexes = Features(pl.DataFrame({"sex": names[:PEOPLE]}), {"sex": "categorical"})
    few = replace(split, population=replace(split.population, user_features=sexes))
    found = beyond(few, evaluated([[0, 1, 2]] * PEOPLE))
    assert found is not None
    assert {one["group"] for one in found["groups"] if one["by"] == "sex"} == {"F", "M"}


def test_without_lists_there_are_gaps_alone(split: Split) -> None:
    found = beyond(split, replace(evaluated([[0, 1, 2]] * PEOPLE), lists={}))
    assert found is not None
    assert set(found) == {"k", "groups", "gaps"}
    assert beyond(split, Evaluated({})) is None


def test_gini() -> None:
    assert gini(np.zeros(4)) == 0.0
    assert gini(np.array([1, 3])) == pytest.approx(0.25)
    counts = np.random.default_rng(0).integers(0, 9, 50)
    apart = np.abs(counts[:, None] - counts).sum() / (2 * len(counts) * counts.sum())
    assert gini(counts) == pytest.approx(apart)


class TestFirstLists:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("count", [metric_kernels, metrics._Plain])
    def test_as_a_plain_sort_gives_them(self, seed: int, count: Any) -> None:
        """Ties, infinities and what is no number included; some lists are shorter than asked for."""
        rng = np.random.default_rng(seed)
        n, q, k = 130, 40, 10
        scores = rng.integers(0, 40, (7, n)).astype(np.float32)
        scores[rng.random(scores.shape) < 0.1] = np.nan
        scores[rng.random(scores.shape) < 0.05] = -np.inf
        scores[rng.random(scores.shape) < 0.05] = np.inf
        seen = np.full((q, n), n, dtype=np.int64)
        for row in range(q):
            left_out = np.sort(rng.choice(n, rng.integers(0, n + 1 if row % 5 == 0 else 60), replace=False))
            seen[row, : len(left_out)] = left_out
        owner = rng.integers(0, 7, q)
        found = count.first(*map(torch.from_numpy, (scores, owner, seen)), k).numpy()
        for row in range(q):
            of = scores[owner[row]]
            able = [item for item in range(n) if item not in set(seen[row]) and of[item] > -np.inf]
            wanted = sorted(able, key=lambda item: (-of[item], item))[:k]
            assert found[row].tolist() == wanted + [-1] * (k - len(wanted))

    def test_impressions_have_none(self) -> None:
        asked = Question(torch.tensor([[0]]), torch.tensor([[1]]), None, torch.tensor([0]))
        assert first_lists([Block(np.array([0]), torch.rand(1, 3), {"test": asked})]) == {}

    def test_they_are_what_people_are_recommended(self) -> None:
        split = hb.leave_one_out(hb.load("synthetic:users=40,items=60,mean=8"))
        method, simulator = hb.FedMF(factors=4), hb.Simulator(split)
        simulator.begin(method, Rng.of(0))
        shared = method.init_shared(simulator.catalogue, Rng.of(0))
        lists = simulator.first_items(method, shared)
        user = int(lists["user"][3])
        held_out = set(split.part(user, "test").tolist())
        told = [item for item, _ in simulator.recommend(method, shared, user, 10)]
        # A recommendation leaves out all that somebody has; in these lists, what is asked for may stand.
        others = [item for item in lists["items"][3].tolist() if item not in held_out]
        assert others == told[: len(others)]
        assert len(others) >= 9

"""What chance gets: held against every order of a few items, and against what is measured of scores."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

import homebody as hb
from homebody.evaluation import CUTOFFS, measure, measure_beside_chance
from homebody.evaluation import chance as by_chance
from homebody.evaluation.metrics import METRICS, OF_IMPRESSIONS, Block, Question, beside_chance, place
from homebody.methods.baselines import Popularity


def every_order(relevant: int, others: int) -> list[torch.Tensor]:
    """The scores of every order of so many items; the relevant ones come first."""
    total = relevant + others
    return [torch.tensor([order], dtype=torch.float64) for order in permutations(range(total))]


@pytest.mark.parametrize(("relevant", "others"), [(1, 4), (2, 3), (3, 1), (1, 0), (2, 0)])
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_expectation_is_the_mean_over_all_orders(relevant: int, others: int, k: int) -> None:
    rows = torch.arange(relevant + others)
    question = Question(rows[None, :relevant], rows[None, relevant:], None, torch.tensor([0]))
    counts = torch.tensor([relevant]), torch.tensor([others])
    orders = [place(scores, question)[""] for scores in every_order(relevant, others)]
    for name, metric in METRICS.items():
        mean = np.mean([float(metric(places, k)[0]) for places in orders])
        assert float(by_chance.BY_CHANCE[name](*counts, k)[0]) == pytest.approx(mean), name
    for name, of_one in OF_IMPRESSIONS.items():
        if name != "auc" or others:
            mean = np.mean([float(of_one(places)[0]) for places in orders])
            assert float(by_chance.OF_IMPRESSIONS_BY_CHANCE[name](*counts)[0]) == pytest.approx(mean), name


def test_every_metric_has_an_expectation() -> None:
    assert by_chance.BY_CHANCE.keys() == METRICS.keys()
    assert by_chance.OF_IMPRESSIONS_BY_CHANCE.keys() == OF_IMPRESSIONS.keys()


@pytest.mark.parametrize("way", ["leave-one-out", "ratio:test=0.3,valid=0.1", "cold-items", "cold-users"])
def test_popularity_is_measured_as_any_reference_is(way: str) -> None:
    split = hb.split(hb.load("synthetic:users=80,items=60,mean=12"), way, negatives=20)
    score = Popularity().trained(split.histories())
    whole = measure(split, score, slices=["-15"]).metrics
    beside = measure_beside_chance(split, score, slices=["-15"])
    assert beside.scores == {name: value for name, value in whole.items() if not name.startswith("valid/")}
    assert beside.chance.keys() == beside.scores.keys()
    assert 0 < beside.chance["full/hr@5"] < 1
    assert beside.chance["auc"] == 0.5


def test_one_held_out_item_among_99_others() -> None:
    split = hb.leave_one_out(hb.load("synthetic:users=50,items=400,mean=12"))
    beside = measure_beside_chance(split, Popularity().trained(split.histories()))
    assert beside.chance["hr@10"] == pytest.approx(0.1)
    assert beside.chance["ndcg@10"] == pytest.approx(sum(1 / np.log2(np.arange(10) + 2)) / 100)
    assert set(beside.against.tolist()) == {99}


def test_a_small_catalogue_has_fewer_to_rank_against() -> None:
    split = hb.leave_one_out(hb.load("synthetic:users=50,items=40,mean=12"))
    beside = measure_beside_chance(split, Popularity().trained(split.histories()))
    assert beside.against.max() < 40
    assert beside.chance["hr@10"] > 0.25
    own = sum(split.sizes(part) for part in ("train", "valid", "test"))
    assert beside.against.tolist() == (40 - own)[split.sizes("test") > 0].tolist()


def test_impressions_are_ranked_among_what_was_shown() -> None:
    """Two impressions: of 2 and of 4 items, one click each."""
    scores = torch.zeros(1, 4)
    relevant, others = torch.tensor([[0], [1]]), torch.tensor([[1, -1, -1], [0, 2, 3]])
    asked = Question(relevant, others, None, torch.tensor([0, 0]))
    measured = beside_chance([Block(np.array([0]), scores, {"test": asked}, impressions=True)], CUTOFFS)
    assert measured.chance["impressions/auc"] == 0.5
    assert measured.chance["impressions/mrr"] == pytest.approx(
        np.mean([(1 + 1 / 2) / 2, (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4])
    )
    assert measured.against.tolist() == [1, 3]

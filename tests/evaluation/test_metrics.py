"""Every metric against a loop that a person would write, and the compiled counting against plain torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.evaluation import CUTOFFS, Block, Question, summarise
from homebody.evaluation import metric_kernels as kernels
from homebody.evaluation.metrics import (
    METRICS,
    NOWHERE,
    Places,
    _Plain,
    hit,
    main_cutoff,
    ndcg,
    place,
    precision,
    recall,
    reciprocal_rank,
    skew,
)

quick = settings(max_examples=150, deadline=None)
numbers = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0, math.nan, math.inf, -math.inf])


class Asked(NamedTuple):
    """One question, in lists."""

    scores: list[float]
    relevant: list[int]
    candidates: list[int]
    seen: list[int]


@st.composite
def questions(draw: st.DrawFn, most: int = 5) -> list[Asked]:
    n_items = draw(st.integers(2, 14))
    out = []
    for _ in range(draw(st.integers(1, 4))):
        order = list(draw(st.permutations(range(n_items))))
        count = draw(st.integers(1, min(most, n_items)))
        relevant, others = order[:count], order[count:]
        scores = draw(st.lists(numbers, min_size=n_items, max_size=n_items))
        candidates = others[: draw(st.integers(0, len(others)))]
        out.append(Asked(scores, relevant, candidates, sorted(others[draw(st.integers(0, len(others))) :])))
    return out


def pad(rows: list[list[int]], fill: int) -> torch.Tensor:
    width = max(map(len, rows), default=0)
    padded = [row + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)


def together(asked: list[Asked]) -> tuple[torch.Tensor, Question]:
    """The questions as tensors; the rows of the scores stand the other way round, as owners may."""
    last = len(asked) - 1
    scores = torch.tensor([one.scores for one in reversed(asked)])
    return scores, Question(
        pad([one.relevant for one in asked], -1),
        pad([one.candidates for one in asked], -1),
        pad([one.seen for one in asked], len(asked[0].scores)),
        torch.tensor([last - row for row in range(len(asked))]),
    )


def naive_ranks(one: Asked, others: list[int]) -> list[int]:
    """A relevant item stands behind every other that is not certainly worse, and behind better relevant ones."""
    behind = sorted(sum(not one.scores[other] < one.scores[item] for other in others) for item in one.relevant)
    return [count + better for better, count in enumerate(behind)]


def naive_metrics(one: Asked, others: list[int], k: int) -> dict[str, float]:
    ranks = naive_ranks(one, others)
    inside = [rank for rank in ranks if rank < k]
    alone = [sum(not one.scores[other] < one.scores[item] for other in others) for item in one.relevant]
    best = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(ranks))))
    right = 0.0
    for item in one.relevant:
        for other in others:
            mine, theirs = one.scores[item], one.scores[other]
            right += 1.0 if theirs < mine else 0.5 if theirs == mine else 0.0
    pairs = len(one.relevant) * len(others)
    return {
        "hr": float(bool(inside)),
        "ndcg": sum(1 / math.log2(rank + 2) for rank in inside) / best,
        "precision": len(inside) / k,
        "recall": len(inside) / len(ranks),
        "mrr": 1 / (ranks[0] + 1) if inside else 0.0,
        "hits": sum(rank < k for rank in alone) / len(alone),
        "gain": sum(1 / math.log2(rank + 2) for rank in alone if rank < k) / len(alone),
        "auc": right / pairs if pairs else 1.0,
    }


def everything_else(one: Asked) -> list[int]:
    return [item for item in range(len(one.scores)) if item not in one.seen and item not in one.relevant]


@given(questions(), st.integers(1, 16))
@quick
def test_every_metric_is_what_a_loop_would_count(asked: list[Asked], k: int) -> None:
    scores, question = together(asked)
    found = place(scores, question)
    assert list(found) == ["", "full/"]
    for kind, against in (("", lambda one: one.candidates), ("full/", everything_else)):
        for row, one in enumerate(asked):
            others = against(one)
            expected = naive_metrics(one, others, k)
            ranks = naive_ranks(one, others)
            places = found[kind]
            assert places.rank[row].tolist()[: len(ranks)] == ranks
            assert all(rank >= NOWHERE for rank in places.rank[row].tolist()[len(ranks) :])
            assert places.relevant[row] == len(one.relevant)
            for name, metric in METRICS.items():
                assert metric(places, k)[row] == pytest.approx(expected[name], abs=1e-12), name
            assert places.auc[row] == pytest.approx(expected["auc"], abs=1e-12)


def test_the_metrics_by_hand() -> None:
    """Relevant items in places 2, 3 and 12 (counted from 1); one of two in place 1, the other far away."""
    places = Places(torch.tensor([[1, 2, 11], [0, 40, NOWHERE]]), torch.tensor([3, 2]), torch.tensor([0.7, 0.5]))
    assert hit(places, 1).tolist() == [0.0, 1.0]
    assert hit(places, 2).tolist() == [1.0, 1.0]
    assert precision(places, 5).tolist() == [0.4, 0.2]
    assert precision(places, 20).tolist() == [3 / 20, 1 / 20]
    assert recall(places, 11).tolist() == pytest.approx([2 / 3, 1 / 2])
    assert recall(places, 12).tolist() == pytest.approx([1.0, 1 / 2])
    assert reciprocal_rank(places, 1).tolist() == [0.0, 1.0]
    assert reciprocal_rank(places, 2).tolist() == [0.5, 1.0]
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert ndcg(places, 10)[0] == pytest.approx((1 / math.log2(3) + 1 / 2) / ideal)
    assert ndcg(places, 2).tolist() == pytest.approx(
        [(1 / math.log2(3)) / (1 + 1 / math.log2(3)), 1 / (1 + 1 / math.log2(3))]
    )
    assert ndcg(places, 1).tolist() == [0.0, 1.0]


def test_ties_count_against_the_model_and_for_half_in_auc() -> None:
    asked = Asked([0.0] * 6, [2], [0, 1, 5], [4])
    found = place(*together([asked]))
    assert found[""].rank.tolist() == [[3]]
    assert found["full/"].rank.tolist() == [[4]]
    assert found[""].auc.tolist() == found["full/"].auc.tolist() == [0.5]
    several = place(*together([Asked([0.0] * 6, [2, 3], [0, 1, 5], [4])]))
    assert several[""].rank.tolist() == [[3, 4]]
    assert several["full/"].rank.tolist() == [[3, 4]]


@pytest.mark.parametrize("also", [0, 2])
@pytest.mark.parametrize("broken", ["all", "relevant", "others"])
def test_scores_that_are_no_number_never_rank_well(broken: str, also: int) -> None:
    scores = torch.linspace(0, 1, 200).repeat(3, 1)
    target = torch.stack([torch.tensor([199, 150, 30]) - step for step in range(also + 1)], 1)
    candidates = torch.stack([torch.arange(40, 139)] * 3)
    own = torch.zeros(3, 200, dtype=torch.bool).scatter(1, target, True)
    gone = {"all": torch.ones_like(own), "relevant": own, "others": ~own}[broken]
    question = Question(target, candidates, torch.full((3, 1), 200), torch.arange(3))
    found = place(scores.masked_fill(gone, math.nan), question)
    assert found[""].rank.tolist() == [[99 + step for step in range(also + 1)]] * 3
    assert found["full/"].rank.tolist() == [[199 - also + step for step in range(also + 1)]] * 3
    for places in found.values():
        assert places.auc.tolist() == [0.0] * 3
        for metric in METRICS.values():
            assert metric(places, 10).tolist() == [0.0] * 3


@given(questions(most=14))
@quick
def test_the_compiled_counting_is_the_plain_one(asked: list[Asked]) -> None:
    scores, question = together(asked)
    same_counts(scores, question)


def same_counts(scores: torch.Tensor, question: Question) -> None:
    there = question.relevant >= 0
    for ours, plain, against in (
        (kernels.among, _Plain.among, question.candidates),
        (kernels.in_catalogue, _Plain.in_catalogue, question.seen),
    ):
        above, tied, others = ours(scores, question.owner, question.relevant, against)
        expected = plain(scores, question.owner, question.relevant, against)
        assert torch.equal(above[there], expected[0][there])
        assert torch.equal(tied[there], expected[1][there])
        assert torch.equal(others, expected[2])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", ["distinct", "few", "with what is no number", "infinite"])
@pytest.mark.parametrize(("most", "seen"), [(1, 0), (1, 40), (2, 0), (30, 40), (150, 50), (290, 10)])
def test_the_compiled_counting_is_the_plain_one_at_size(most: int, seen: int, values: str, kind: torch.dtype) -> None:
    generator = np.random.default_rng(most * 1000 + seen)
    rows, n_items = 40, 300
    scores = generator.normal(size=(rows, n_items))
    if values != "distinct":
        scores = np.round(scores)
    if values == "with what is no number":
        scores[generator.random(scores.shape) < 0.2] = np.nan
    if values == "infinite":
        scores[generator.random(scores.shape) < 0.4] = np.inf
        scores[generator.random(scores.shape) < 0.4] = -np.inf
    asked = []
    for _ in range(rows):
        order = generator.permutation(n_items).tolist()
        count = int(generator.integers(1, most + 1))
        left = order[count : count + int(generator.integers(0, seen + 1))]
        asked.append(Asked([0.0] * n_items, order[:count], order[count : count + 99], sorted(left)))
    _, question = together(asked)
    same_counts(torch.from_numpy(scores).to(kind), question)
    # Padding may stand before the relevant items as well.
    same_counts(torch.from_numpy(scores).to(kind), question._replace(relevant=question.relevant.flip(1)))


def test_no_full_ranking_where_none_is_asked_for() -> None:
    scores, question = together([Asked([0.1, 0.2, 0.3], [0], [1, 2], [])])
    assert list(place(scores, question._replace(seen=None))) == [""]


@given(questions(), st.integers(0, 3), st.lists(st.integers(1, 15), min_size=1, max_size=3, unique=True))
@quick
def test_a_summary_is_the_mean_over_users_of_the_mean_over_their_questions(
    asked: list[Asked], shift: int, cutoffs: list[int]
) -> None:
    """Each question of three stands for a user; the fourth, if any, is the first user's second question."""
    scores, question = together(asked)
    users = np.array([7, 3, 5, 7])[: len(asked)]
    blocks = [
        Block(users[row : row + 1], scores[question.owner[row : row + 1]], {"test": one, "valid": one})
        for row in range(len(asked))
        for one in [
            Question(
                question.relevant[row : row + 1],
                question.candidates[row : row + 1],
                None if question.seen is None else question.seen[row : row + 1],
                torch.tensor([0]),
            )
        ]
    ]
    inside = np.zeros(9, dtype=np.bool_)
    inside[[3, 8]] = True
    nobody = np.zeros(9, dtype=np.bool_)
    found = summarise(blocks, cutoffs, {"few": inside, "none": nobody})
    expected: dict[str, float] = {}
    for kind, against in (("", lambda one: one.candidates), ("full/", everything_else)):
        for k in cutoffs:
            by_user: dict[int, list[dict[str, float]]] = {}
            for user, one in zip(users.tolist(), asked, strict=True):
                by_user.setdefault(user, []).append(naive_metrics(one, against(one), k))
            for name in [*METRICS, "auc"]:
                means = {user: sum(row[name] for row in rows) / len(rows) for user, rows in by_user.items()}
                label = name if name == "auc" else f"{name}@{k}"
                for prefix in ("", "valid/"):
                    expected[f"{prefix}{kind}{label}"] = sum(means.values()) / len(means)
                    if 3 in means:
                        expected[f"{prefix}few/{kind}{label}"] = means[3]
    assert found.metrics == pytest.approx(expected, abs=1e-12)
    who = sorted(set(users.tolist()))
    k = main_cutoff(cutoffs)
    assert list(found.per_user) == ["user", f"ndcg@{k}", "rank", f"full/ndcg@{k}", "full/rank"]
    assert found.per_user["user"].tolist() == who
    for place_, user in enumerate(who):
        rows = [one for number, one in zip(users.tolist(), asked, strict=True) if number == user]
        gains = [naive_metrics(one, one.candidates, k)["ndcg"] for one in rows]
        assert found.per_user[f"ndcg@{k}"][place_] == pytest.approx(sum(gains) / len(gains), abs=1e-12)
        firsts = [naive_ranks(one, one.candidates)[0] for one in rows]
        assert found.per_user["rank"][place_] == int(sum(firsts) / len(firsts))
        full = [naive_ranks(one, everything_else(one))[0] for one in rows]
        assert found.per_user["full/rank"][place_] == int(sum(full) / len(full))


def test_the_usual_metrics_have_their_names() -> None:
    scores, question = together([Asked([0.3, 0.1, 0.2], [0], [1], [2])])
    metrics = summarise([Block(np.array([0]), scores, {"test": question, "valid": question})]).metrics
    kinds = [f"{held}{kind}" for held in ("", "valid/") for kind in ("", "full/")]
    at = [f"{name}@{k}" for name in ("hr", "ndcg", "precision", "recall", "mrr", "hits", "gain") for k in (5, 10, 20)]
    assert sorted(metrics) == sorted(f"{kind}{name}" for kind in kinds for name in [*at, "auc"])
    assert CUTOFFS == (5, 10, 20)


@pytest.mark.parametrize(("cutoffs", "main"), [([5, 10, 20], 10), ([1, 30], 1), ([9, 11], 9), ([12], 12), ([20, 5], 5)])
def test_comparisons_are_made_at_ten_or_near_it(cutoffs: list[int], main: int) -> None:
    assert main_cutoff(cutoffs) == main


def test_the_skew_is_the_share_of_places_that_another_item_takes() -> None:
    plain = torch.tensor([[4.0, 3, 2, 1], [1, 2, 9, 9], [2, 1, 0, 0]])
    noisy = torch.tensor([[4.0, 3, 1, 2], [3, 2, 0, 0], [2, 1, 5, 5]])
    there = torch.tensor([[True] * 4, [True, True, False, False], [True, True, False, False]])
    assert skew(plain, noisy, there).tolist() == [0.5, 1.0, 0.0]
    assert skew(plain, plain).tolist() == [0.0, 0.0, 0.0]

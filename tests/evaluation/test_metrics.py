from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.evaluation import Block, Question, describe, hit_ratio, ndcg, questions, rank, summarise

quick = settings(max_examples=80, deadline=None)
numbers = st.sampled_from([-1.0, 0.0, 0.25, 0.5, 1.0, 2.0, math.nan, math.inf, -math.inf])


def naive_rank(scores: list[float], target: int, against: list[int]) -> int:
    """How many of the others are not certainly worse."""
    return sum(not scores[item] < scores[target] for item in against if item != target)


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[list[float]], list[int], list[list[int]], list[list[int]]]:
    n_items, users = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    scores, targets, candidates, seen = [], [], [], []
    for _ in range(users):
        scores.append(draw(st.lists(numbers, min_size=n_items, max_size=n_items)))
        target = draw(st.integers(0, n_items - 1))
        others = [item for item in range(n_items) if item != target]
        targets.append(target)
        candidates.append(draw(st.lists(st.sampled_from(others), unique=True)))
        seen.append(sorted(draw(st.lists(st.sampled_from(others), unique=True))))
    return scores, targets, candidates, seen


def question(targets: list[int], candidates: list[list[int]], seen: list[list[int]], n_items: int) -> Question:
    def pad(rows: list[list[int]], fill: int) -> torch.Tensor:
        width = max(map(len, rows), default=0)
        padded = [row + [fill] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)

    return Question(torch.tensor(targets), pad(candidates, -1), pad(seen, n_items))


@given(asked())
@quick
def test_a_rank_is_the_number_of_others_that_are_not_worse(
    drawn: tuple[list[list[float]], list[int], list[list[int]], list[list[int]]],
) -> None:
    scores, targets, candidates, seen = drawn
    n_items = len(scores[0])
    found = rank(torch.tensor(scores), question(targets, candidates, seen, n_items))
    for user, (own, target) in enumerate(zip(scores, targets, strict=True)):
        assert found.sampled[user] == naive_rank(own, target, candidates[user])
        unseen = [item for item in range(n_items) if item not in seen[user]]
        assert found.full[user] == naive_rank(own, target, unseen)


def test_ties_count_against_the_model() -> None:
    everything_alike = rank(torch.zeros(1, 6), question([2], [[0, 1, 5]], [[4]], 6))
    assert everything_alike.sampled.tolist() == [3]
    assert everything_alike.full.tolist() == [4]


@pytest.mark.parametrize("broken", ["all", "target", "others"])
def test_scores_that_are_no_number_never_rank_well(broken: str) -> None:
    scores = torch.linspace(0, 1, 200).repeat(3, 1)
    target = torch.tensor([199, 150, 30])
    candidates = torch.stack([torch.arange(40, 139)] * 3)
    keep = torch.zeros(3, 200, dtype=torch.bool).scatter(1, target[:, None], True)
    gone = {"all": torch.ones_like(keep), "target": keep, "others": ~keep}[broken]
    found = rank(scores.masked_fill(gone, math.nan), Question(target, candidates, torch.full((3, 1), 200)))
    assert found.sampled.tolist() == [99] * 3
    assert found.full.tolist() == [199] * 3
    assert hit_ratio(found.sampled, 10) == hit_ratio(found.full, 10) == 0.0
    assert ndcg(found.sampled, 10) == ndcg(found.full, 10) == 0.0


@given(st.lists(st.integers(0, 120), min_size=1, max_size=30), st.integers(1, 100))
@quick
def test_hit_ratio_and_ndcg_are_the_means_over_users(ranks: list[int], k: int) -> None:
    hits = [1.0 if place < k else 0.0 for place in ranks]
    gains = [1.0 / math.log2(place + 2) if place < k else 0.0 for place in ranks]
    assert hit_ratio(torch.tensor(ranks), k) == pytest.approx(sum(hits) / len(ranks), abs=1e-12)
    assert ndcg(torch.tensor(ranks), k) == pytest.approx(sum(gains) / len(ranks), abs=1e-12)


def naive_metrics(split: object, scores: np.ndarray, held: str, k: int) -> dict[str, float]:
    """One user after another, as a person would."""
    hits, gains, full_hits, full_gains = [], [], [], []
    for user in split.asked().tolist():  # type: ignore[attr-defined]
        training = set(split.training(user).tolist())  # type: ignore[attr-defined]
        valid, test = int(split.valid[user]), int(split.test[user])  # type: ignore[attr-defined]
        target = valid if held == "valid" else test
        left_out = training if held == "valid" else training | {valid}
        own = scores[user].tolist()
        sampled = [item for item in split.candidates(np.array([user]), held)[0].tolist() if item >= 0]  # type: ignore[attr-defined]
        place = naive_rank(own, target, sampled)
        everywhere = naive_rank(own, target, [item for item in range(len(own)) if item not in left_out])
        hits.append(place < k)
        gains.append(1 / math.log2(place + 2) if place < k else 0.0)
        full_hits.append(everywhere < k)
        full_gains.append(1 / math.log2(everywhere + 2) if everywhere < k else 0.0)
    prefix = "" if held == "test" else "valid/"
    columns = {"hr": hits, "ndcg": gains, "full/hr": full_hits, "full/ndcg": full_gains}
    return {f"{prefix}{name}@{k}": sum(column) / len(column) for name, column in columns.items()}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Population, np.ndarray]:
    n_items = draw(st.integers(6, 25))
    histories = draw(
        st.lists(st.lists(st.integers(0, n_items - 1), unique=True, max_size=n_items), min_size=1, max_size=5)
    )
    histories.append(list(range(4)))
    lengths = [len(history) for history in histories]
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    population = Population("toy", np.concatenate([[0], np.cumsum(lengths)]), items, n_items=n_items)
    seed = draw(st.integers(0, 2**31))
    # Few values, so that ties are common.
    scores = np.random.default_rng(seed).integers(0, 6, (len(histories), n_items)).astype(np.float32)
    return population, scores


@given(
    worlds(),
    st.sampled_from(["strict", "isolated", "published"]),
    st.sampled_from([4, 99]),
    st.integers(1, 12),
)
@quick
def test_a_populations_metrics_are_those_of_a_loop_over_users(
    world: tuple[Population, np.ndarray], protocol: str, negatives: int, k: int
) -> None:
    population, scores = world
    split = leave_one_out(population, protocol=protocol, negatives=negatives, how="latest")
    users = split.asked()
    cut = len(users) // 2
    blocks = [
        Block(some, torch.from_numpy(scores[some]), questions(split, some))
        for some in (users[cut:], users[:cut])
        if len(some)
    ]
    evaluated = summarise(blocks, ks=(k,))
    expected = naive_metrics(split, scores, "test", k) | naive_metrics(split, scores, "valid", k)
    assert evaluated.metrics == pytest.approx(expected, abs=1e-12)
    assert evaluated.per_user["user"].tolist() == users.tolist()
    for place, user in enumerate(users.tolist()):
        sampled = [item for item in split.candidates(np.array([user]), "test")[0].tolist() if item >= 0]
        assert evaluated.per_user["rank"][place] == naive_rank(scores[user].tolist(), int(split.test[user]), sampled)


def test_the_usual_metrics_have_their_names() -> None:
    population = Population("toy", np.array([0, 4]), np.array([3, 0, 2, 1], dtype=np.int32), n_items=6)
    split = leave_one_out(population, how="latest")
    users = split.asked()
    metrics = summarise([Block(users, torch.rand(1, 6, generator=torch.Generator().manual_seed(0)),
                               questions(split, users))]).metrics  # fmt: skip
    parts = [f"{held}{kind}{name}@{k}" for held in ("", "valid/") for kind in ("", "full/")
             for name in ("hr", "ndcg") for k in (5, 10, 20)]  # fmt: skip
    assert sorted(metrics) == sorted(parts)


def test_questions_are_what_the_split_holds_out() -> None:
    population = Population("toy", np.array([0, 4]), np.array([3, 0, 2, 1], dtype=np.int32), n_items=6)
    asked = questions(leave_one_out(population, how="latest", negatives=2), np.array([0]))
    assert asked["valid"].target.tolist() == [2]
    assert asked["test"].target.tolist() == [1]
    assert sorted(asked["test"].candidates[0].tolist()) == [4, 5]
    assert [item for item in asked["test"].seen[0].tolist() if item < 6] == [0, 2, 3]
    assert [item for item in asked["valid"].seen[0].tolist() if item < 6] == [0, 3]


@pytest.mark.parametrize("protocol", ["strict", "isolated", "published"])
def test_the_protocol_is_said_beside_a_number(protocol: str) -> None:
    line = describe(protocol, how="random", negatives=7)
    assert line.startswith(f"protocol {protocol}: ")
    assert "random item held out" in line
    assert "7 sampled negatives" in line
    assert ("flatters" in line) == (protocol == "published")

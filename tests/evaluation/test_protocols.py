"""From a split to questions, groups of users, and what is said beside a number."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from homebody.data import load
from homebody.data.partitions import WAYS, leave_one_out, split
from homebody.data.population import Impressions, Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.evaluation import Block, describe, measure, questions, sliced, summarise
from homebody.evaluation.metrics import METRICS

quick = settings(max_examples=60, deadline=None)
FOUR = Population("toy", np.array([0, 4]), np.array([3, 0, 2, 1], dtype=np.int32), n_items=6)
SEVERAL = ["leave-one-out", "ratio", "held-out-users", "cold-users", "cold-items", "cold-both"]


def behind(scores: list[float], target: int, others: set[int]) -> int:
    return sum(not scores[other] < scores[target] for other in others)


def naive(done: Split, scores: np.ndarray, held: str, k: int) -> dict[str, float]:
    """One user after another, as a person would, from the parts of the split alone."""
    rows: dict[str, list[float]] = {}
    for user in range(done.n_users):
        parts = {part: set(done.part(user, part).tolist()) for part in ("train", "valid", "test", "withheld")}  # type: ignore[arg-type]
        relevant = parts[held]
        if not relevant:
            continue
        left_out = parts["train"] | parts["withheld"] | (parts["valid"] if held == "test" else set())
        if done.unasked is not None:  # new items among new items
            left_out = set(done.unasked[held].tolist())  # type: ignore[index]
        sampled = {item for item in done.candidates(np.array([user]), held)[0].tolist() if item >= 0}  # type: ignore[arg-type]
        own = scores[user].tolist()
        for kind, others in (("", sampled), ("full/", set(range(done.n_items)) - left_out - relevant)):
            count = sorted(behind(own, item, others) for item in relevant)
            ranks = [place + better for better, place in enumerate(count)]
            inside = [rank for rank in ranks if rank < k]
            best = sum(1 / math.log2(rank + 2) for rank in range(min(k, len(ranks))))
            rows.setdefault(f"{kind}hr@{k}", []).append(float(bool(inside)))
            rows.setdefault(f"{kind}ndcg@{k}", []).append(sum(1 / math.log2(rank + 2) for rank in inside) / best)
            rows.setdefault(f"{kind}recall@{k}", []).append(len(inside) / len(ranks))
    prefix = "" if held == "test" else "valid/"
    return {f"{prefix}{name}": sum(column) / len(column) for name, column in rows.items()}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Population, np.ndarray]:
    n_items = draw(st.integers(10, 25))
    history = st.lists(st.integers(0, n_items - 1), unique=True, max_size=n_items)
    histories = draw(st.lists(history, min_size=4, max_size=7))
    histories += [list(range(n_items))] * 2 + [list(range(8))] * 6
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    indptr = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    seed = draw(st.integers(0, 2**31))
    # Few values, so that ties are common.
    scores = np.random.default_rng(seed).integers(0, 6, (len(histories), n_items)).astype(np.float32)
    return Population("toy", indptr, items, n_items=n_items), scores


@pytest.mark.parametrize("way", SEVERAL)
@given(
    world=worlds(),
    protocol=st.sampled_from(["strict", "isolated", "published"]),
    negatives=st.sampled_from([4, 99]),
    k=st.integers(1, 12),
)
@quick
def test_a_populations_metrics_are_those_of_a_loop_over_users(
    way: str, world: tuple[Population, np.ndarray], protocol: str, negatives: int, k: int
) -> None:
    population, scores = world
    try:
        done = split(population, way, protocol=protocol, negatives=negatives, how="latest")
    except HomebodyError:
        reject()  # nobody to ask, as tests of the splits cover
    users = done.asked()
    cut = len(users) // 2
    blocks = [
        Block(some, torch.from_numpy(scores[some]), questions(done, some))
        for some in (users[cut:], users[:cut][::-1].copy())
        if len(some)
    ]
    found = summarise(blocks, (k,)).metrics
    expected = naive(done, scores, "test", k) | naive(done, scores, "valid", k)
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert len(found) == 4 * (len(METRICS) + 1)


def test_questions_are_what_the_split_holds_out() -> None:
    asked = questions(leave_one_out(FOUR, how="latest", negatives=2), np.array([0]))
    assert asked["valid"].relevant.tolist() == [[2]]
    assert asked["test"].relevant.tolist() == [[1]]
    assert asked["test"].owner.tolist() == [0]
    assert sorted(asked["test"].candidates[0].tolist()) == [4, 5]
    assert asked["test"].seen is not None
    assert asked["valid"].seen is not None
    assert [item for item in asked["test"].seen[0].tolist() if item < 6] == [0, 2, 3]
    assert [item for item in asked["valid"].seen[0].tolist() if item < 6] == [0, 3]


def test_whoever_is_not_asked_has_no_row() -> None:
    population = Population("toy", np.array([0, 2, 12]), np.array([1, 0, *range(10)], dtype=np.int32), n_items=20)
    done = split(population, "ratio", how="latest")
    asked = questions(done, np.array([0, 1]))
    assert asked["test"].owner.tolist() == [1]
    assert asked["test"].relevant.tolist() == [[8, 9]]
    assert asked["valid"].relevant.tolist() == [[7]]
    assert questions(done, np.array([0])) == {}


def shown(*lines: tuple[int, list[int], list[int]]) -> Impressions:
    items = [[*others, *clicked] for _, clicked, others in lines]
    return Impressions(
        np.array([user for user, _, _ in lines]),
        np.concatenate([[0], np.cumsum([len(row) for row in items])]),
        np.array([item for row in items for item in row], dtype=np.int32),
        np.array([flag for _, clicked, others in lines for flag in [False] * len(others) + [True] * len(clicked)]),
    )


def test_each_impression_is_a_question() -> None:
    impressions = shown(
        (0, [1], [2, 3]), (0, [4, 5], [0]), (1, [], [1]), (2, [3], [0, 1, 2]), (2, [0], [5]), (2, [2], [4])
    )  # fmt: skip
    three = Population("toy", np.array([0, 1, 2, 3]), np.array([5, 5, 5], dtype=np.int32), 6, impressions=impressions)
    done = split(three, "impressions")
    asked = questions(done, np.array([2, 1, 0]))
    assert asked["valid"].owner.tolist() == [2, 0]
    assert asked["valid"].relevant.tolist() == [[1], [3]]
    assert asked["valid"].candidates.tolist() == [[2, 3, -1], [0, 1, 2]]
    assert asked["test"].owner.tolist() == [2, 0, 0]
    assert asked["test"].relevant.tolist() == [[4, 5], [0, -1], [2, -1]]
    assert asked["test"].candidates.tolist() == [[0], [5], [4]]
    assert asked["test"].seen is None
    assert questions(done, np.array([1])) == {}
    # By score items stand 5, 4, 3, 2, 1, 0, for user 2 the other way round.
    scores = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5]])
    found = summarise([Block(np.array([2, 1, 0]), scores, asked)], (1, 2))
    # User 0 finds 4 and 5 before 0; user 2 finds 0 before 5, and 2 before 4.
    assert found.per_user["user"].tolist() == [0, 2]
    assert (found.metrics["auc"], found.metrics["hr@1"], found.metrics["mrr@1"]) == (1.0, 1.0, 1.0)
    assert found.metrics["recall@1"] == pytest.approx((0.5 + 1.0) / 2)
    # In validation user 0 finds 1 behind 2 and 3, and user 2 finds 3 behind 0, 1 and 2.
    assert (found.metrics["valid/auc"], found.metrics["valid/hr@2"]) == (0.0, 0.0)
    assert not [name for name in found.metrics if "full/" in name]


def test_a_users_impressions_weigh_as_much_as_anothers() -> None:
    """Of user 0's two tests one is right; user 1's only one is right: three quarters, not two thirds."""
    lines = [(0, [1], [2])] * 2 + [(0, [1], [2]), (0, [2], [1]), (1, [1], [2]), (1, [1], [2])]
    two = Population("toy", np.array([0, 1, 2]), np.array([0, 0], dtype=np.int32), 3, impressions=shown(*lines))
    users = np.array([0, 1])
    block = Block(users, torch.tensor([[0.0, 2, 1]] * 2), questions(split(two, "impressions"), users))
    found = summarise([block], (1,))
    assert found.metrics["hr@1"] == pytest.approx(0.75)
    assert found.metrics["auc"] == pytest.approx(0.75)
    assert not [name for name in found.metrics if name.startswith("impressions/")]
    every = summarise([block._replace(impressions=True)], (1,), {"first": np.array([True, False])})
    assert every.metrics["auc"] == pytest.approx(0.75)
    assert every.metrics["impressions/auc"] == pytest.approx(2 / 3)
    assert every.metrics["first/impressions/auc"] == pytest.approx(1 / 2)
    assert every.metrics["valid/impressions/auc"] == 1.0


def test_impressions_are_measured_as_papers_on_news_do() -> None:
    """Against plain loops over the places: MRR over all clicks, uncut, and NDCG at 5 and 10, whatever the cut-offs."""
    draw = np.random.default_rng(5)
    lines = []
    for user in range(30):
        items = draw.permutation(40)[: draw.integers(3, 30)].tolist()
        clicks = int(draw.integers(1, 3))
        lines += [(user, items[:clicks], items[clicks:])] * 2
    everyone = Population("toy", np.arange(31), np.zeros(30, dtype=np.int32), 40, impressions=shown(*lines))
    done = split(everyone, "impressions")
    scores = torch.from_numpy(draw.random((30, 40)))
    found = measure(done, lambda users, items: scores[torch.from_numpy(users)][:, items], (1,))
    expected: dict[str, list[float]] = {"auc": [], "mrr": [], "ndcg@5": [], "ndcg@10": []}
    for user, clicked, others in lines[1::2]:
        order = sorted([*clicked, *others], key=lambda item: -scores[user, item])
        places = [order.index(item) + 1 for item in clicked]
        pairs = [scores[user, one] > scores[user, other] for one in clicked for other in others]
        expected["auc"].append(float(np.mean(pairs)))
        expected["mrr"].append(float(np.mean([1 / place for place in places])))
        for k in (5, 10):
            gain = sum(1 / np.log2(place + 1) for place in places if place <= k)
            expected[f"ndcg@{k}"].append(gain / sum(1 / np.log2(place + 2) for place in range(min(k, len(clicked)))))
    for name, values in expected.items():
        assert found.metrics[f"impressions/{name}"] == pytest.approx(np.mean(values)), name


def test_only_what_somebody_was_shown_is_scored() -> None:
    lines = [(0, [1], [2]), (0, [1], [2]), (1, [4], [2]), (1, [4], [1])]
    two = Population("toy", np.array([0, 1, 2]), np.array([0, 0], dtype=np.int32), 9, impressions=shown(*lines))
    asked: list[list[int]] = []

    def score(users: np.ndarray, items: torch.Tensor) -> torch.Tensor:
        asked.append(items.tolist())
        return items.double().expand(len(users), -1)

    found = measure(split(two, "impressions"), score)
    assert asked == [[1, 2, 4]]
    assert found.metrics["impressions/auc"] == 0.5
    assert found.metrics["valid/impressions/auc"] == 0.5


@pytest.mark.parametrize(("name", "users"), [("ml-100k", 199), ("ml-1m", 751)])
def test_slices_are_those_of_the_paper(real_data: Path, name: str, users: int) -> None:
    """PFedRec, table 9: so many users have 20 to 30 interactions."""
    if not (real_data / name).exists():
        pytest.skip(f"no {name} here")
    population = load(name, data_dir=str(real_data))
    assert int(sliced(population, ["20-30"])["20-30"].sum()) == users


def test_neighbouring_slices_share_nobody_and_leave_nobody_out() -> None:
    lengths = list(range(6))
    population = Population(
        "toy", np.concatenate([[0], np.cumsum(lengths)]), np.zeros(sum(lengths), dtype=np.int32), n_items=1
    )
    groups = sliced(population, ["-2", "2-4", "4-"])
    assert {name: np.flatnonzero(inside).tolist() for name, inside in groups.items()} == {
        "-2": [0, 1],
        "2-4": [2, 3],
        "4-": [4, 5],
    }
    assert sliced(population, []) == {}
    for text in ("", "-", "20", "a-b", "3-x", "--3", "1-2-3"):
        with pytest.raises(HomebodyError, match="A slice of users is a range of interactions"):
            sliced(population, [text])
    for text in ("6-", "-0", "3-3", "4-2"):
        with pytest.raises(HomebodyError, match=f"No user of toy has {text} interactions"):
            sliced(population, [text])


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("protocol", ["strict", "isolated", "published"])
def test_the_protocol_and_the_split_are_said_beside_a_number(protocol: str, way: str) -> None:
    given = way if way in ("leave-one-out", "impressions") else f"{way}:test=0.25"
    line = describe(protocol, how="random", negatives=7, way=given)
    assert line.startswith(f"protocol {protocol}: ")
    assert f"split {given} ({WAYS[way].title})" in line
    new = way in ("cold-items", "cold-both")
    of_shown = way.startswith("impressions")
    assert ("random held out; ranked against 7 sampled negatives" in line) == (not of_shown and not new)
    assert ("ranked against 7 sampled new items" in line) == new
    assert ("at most 7" in describe(protocol, negatives=7, way=given, enough=False)) == (not of_shown)
    assert ("ranked among what was shown" in line) == of_shown
    assert ("flatters" in line) == (protocol == "published")
    assert line.endswith("round chosen on validation")

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from homebody.core import Catalogue
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.methods.kernels.mf import Embeddings, draw, train
from homebody.methods.mf import MF
from homebody.reference import Histories
from homebody.rng import Rng


def histories(people: list[list[int]], n_items: int, avoid: list[list[int]] | None = None) -> Histories:
    def rows(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.concatenate([[0], np.cumsum([len(own) for own in lists])]).astype(np.int64),
            np.array([item for own in lists for item in own], dtype=np.int32),
        )

    everyone = np.ones(len(people), dtype=np.bool_)
    return Histories(*rows(people), Catalogue(n_items), everyone, None if avoid is None else rows(avoid))


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_pass_has_every_training_item_and_its_negatives(people: list[list[int]], negatives: int, seed: int) -> None:
    who = np.arange(len(people)) % 3 != 1
    users, items, labels = draw(histories(people, 7), who, negatives, Rng.of(seed))
    for user, own in enumerate(people):
        taken, drawn = (items[(users == user) & (labels == label)].tolist() for label in (1, 0))
        assert sorted(taken) == (sorted(own) if who[user] else [])
        assert len(drawn) == (negatives * len(own) if who[user] and len(set(own)) < 7 else 0)
        assert not set(drawn) & set(own)


def test_negatives_avoid_what_they_must_and_are_drawn_evenly() -> None:
    people = [[1], [0] * 2000]
    given_ = histories(people, 6, avoid=[[1, 3, 4], [0, 5]])
    users, items, labels = draw(given_, np.array([True, True]), 4, Rng.of(3))
    assert set(items[(users == 0) & (labels == 0)]) <= {0, 2, 5}
    counts = np.bincount(items[(users == 1) & (labels == 0)], minlength=6)
    assert counts[[0, 5]].tolist() == [0, 0]
    # 8000 draws over 4 items: within five standard deviations of 2000, wrong once in a million seeds
    assert (abs(counts[1:5] - 2000) < 5 * np.sqrt(8000 * 3 / 16)).all()
    assert labels[:1000].mean() == pytest.approx(0.2, abs=0.07), "samples are shuffled"


@pytest.mark.parametrize(
    ("protocol", "avoided"), [("strict", [0, 3]), ("published", [0, 1, 2, 3]), ("isolated", [0, 1, 2, 3, 4, 5])]
)
def test_what_negatives_avoid_is_the_protocols(protocol: str, avoided: list[int]) -> None:
    items = np.array([3, 0, 2, 1], dtype=np.int32)
    split = leave_one_out(Population("one", np.array([0, 4]), items, n_items=6), protocol=protocol, how="latest")
    avoid = split.histories().avoid
    assert avoid is not None
    assert avoid[0].tolist() == [0, len(avoided)]
    assert avoid[1].tolist() == avoided
    assert (avoid[0].dtype, avoid[1].dtype) == (np.int64, np.int32)


def test_repeated_items_are_avoided_once() -> None:
    items = np.array([3, 3, 0, 2, 2, 1, 3, 3, 3], dtype=np.int32)
    population = Population("two", np.array([0, 6, 9]), items, n_items=6)
    indptr, avoided = leave_one_out(population, protocol="published", how="latest").histories().avoid or ((), ())
    assert (list(indptr), list(avoided)) == ([0, 4, 5], [0, 1, 2, 3, 3])


def test_embeddings_take_the_steps_of_sparse_adam() -> None:
    start = Rng.of(1).normal(5, 3)
    rows, weight = Embeddings(start), start.clone().requires_grad_()
    optimiser = torch.optim.SparseAdam([weight], lr=0.03)
    for number in range(1, 6):
        index = Rng.of(2, number).integers(4, 6)
        slopes = Rng.of(3, number).normal(6, 3)
        rows.step(index, slopes, 0.03, number)
        weight.grad = torch.sparse_coo_tensor(index[None], slopes, (5, 3), check_invariants=True)
        optimiser.step()
    assert_close(rows.value, weight.detach())
    assert torch.equal(rows.value[4], start[4])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pass_is_what_autograd_makes_of_it(frozen: bool) -> None:
    starts = [0.5 * Rng.of(4, name).normal(size, 3) for name, size in (("users", 4), ("items", 6))]
    users, items = (Embeddings(start) for start in starts)
    plain = [start.clone().requires_grad_() for start in starts]
    optimiser = torch.optim.SparseAdam(plain[:1] if frozen else plain, lr=0.05)
    sample = Rng.of(5).integers(4, 23), Rng.of(6).integers(6, 23), Rng.of(7).integers(2, 23).float()
    steps = train(tuple(part.numpy() for part in sample), users, items, (0.05, 0.3), 5, 0, frozen)
    assert steps == 5
    for user, item, label in zip(*(part.split(5) for part in sample), strict=True):
        p, q = plain[0][user], plain[1][item]
        loss = binary_cross_entropy_with_logits((p * q).sum(1), label)
        loss = loss + 0.3 / 2 * (p.square().sum() + q.square().sum()) / len(label)
        for weight, slope in zip(plain, torch.autograd.grad(loss, plain), strict=True):
            weight.grad = slope.to_sparse(1)
        optimiser.step()
    assert_close(users.value, plain[0].detach(), rtol=1e-4, atol=1e-5)
    assert_close(items.value, plain[1].detach(), rtol=1e-4, atol=1e-5)
    assert (users.slot < 0).all()
    assert (items.slot < 0).all()
    assert frozen == torch.equal(items.value, starts[1])


def test_two_kinds_of_people_and_a_late_comer() -> None:
    people = [[0, 1, 2]] * 10 + [[3, 4, 5]] * 10 + [[0, 1]]
    late = histories(people, 6)._replace(learn=np.arange(21) < 20)
    scores = MF(factors=4, learning_rate=0.05, batch_size=16).trained(late)(np.array([0, 10, 20]), torch.arange(6))
    assert scores[0, :3].min() > scores[0, 3:].max()
    assert scores[1, 3:].min() > scores[1, :3].max()
    assert scores[2, :3].min() > scores[2, 3:].max(), "a late-comer's two items say what the third is"

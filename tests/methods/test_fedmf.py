from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from homebody.core import Catalogue, Cohort, Data
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.methods.fedmf import FedMF
from homebody.rng import Rng
from homebody.simulation import Simulator

TABLE = np.array([[1.0, 0.0], [0.5, -1.0], [-0.3, 0.7], [0.2, 0.4], [-1.0, 1.0]])
RATE, ITEM_RATE = 0.5, 0.4
BOTH = Cohort(np.array([0, 1]), "all", size=2, population=2)
# Under `published` one item is left to be each person's negative: 4 for the first, 3 for the second.
SAMPLES = {0: [(0, 1), (4, 0), (1, 1), (4, 0)], 1: [(1, 1), (3, 0), (4, 1), (3, 0)]}


def by_hand(samples: list[tuple[int, int]], user: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """One batch: both sides step from the same point. Gives the rows' change, the vector, the loss."""
    g_user, g_table, loss = np.zeros(2), np.zeros((5, 2)), 0.0
    for item, label in samples:
        p = 1 / (1 + math.exp(-TABLE[item] @ user))
        loss -= math.log(p if label else 1 - p) / len(samples)
        g_user += (p - label) / len(samples) * TABLE[item]
        g_table[item] += (p - label) / len(samples) * user
    return -(RATE * 5 * ITEM_RATE) * g_table, user - RATE * g_user, loss


def test_two_clients_by_hand() -> None:
    items = np.array([0, 1, 2, 3, 1, 4, 0, 2], dtype=np.int32)
    population = Population("two", np.array([0, 4, 8]), items, n_items=5)
    split = leave_one_out(population, protocol="published", how="latest", negatives=1)
    method = FedMF(factors=2, learning_rate=RATE, item_rate=ITEM_RATE, negatives=1)
    shared = {"item": torch.from_numpy(TABLE).float(), "user": torch.tensor([0.3, -0.1])}
    users = {0: np.array([0.6, -0.4]), 1: np.array([-0.2, 0.9])}
    for number, samples in SAMPLES.items():
        data = Data(*(torch.from_numpy(part)[0] for part in split.padded(np.array([number]))), Catalogue(5))
        batch = method.prepare(data, Rng.of(0).fold(number))
        drawn = zip(batch["index"][batch["slot"]].tolist(), batch["label"].tolist(), strict=True)
        assert sorted(drawn) == sorted(samples)
        change, vector, loss = by_hand(samples, users[number])
        local = {"user": torch.from_numpy(users[number]).float(), "loss": torch.tensor(0.0)}
        update, local = method.client(shared, local, batch)
        np.testing.assert_allclose(update["item"].dense(), change, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(local["user"], vector, rtol=1e-6)
        assert float(local["loss"]) == pytest.approx(loss, rel=1e-6)
    # Now through the simulator, whose clients begin with the common vector.
    simulator = Simulator(split)
    simulator.begin(method, Rng.of(7))
    drawn_users = {
        number: method.init_local(shared, Rng.of(7).fold("local").fold(number))["user"].double().numpy()
        for number in (0, 1)
    }
    got = simulator.collect(method, shared, BOTH, Rng.of(3), step=1)
    hand = {number: by_hand(SAMPLES[number], drawn_users[number]) for number in (0, 1)}
    after, _ = method.server(shared, {}, got.total)
    table = TABLE + (hand[0][0] + hand[1][0]) / 2
    np.testing.assert_allclose(after["item"], table, rtol=1e-5, atol=1e-6)
    assert got.loss == pytest.approx((hand[0][2] + hand[1][2]) / 2, rel=1e-6)
    # Everyone ranks with the shared table, the new one.
    for number, left in ((0, 4), (1, 3)):
        ((item, score),) = simulator.recommend(method, after, number, 5)
        assert item == left
        assert score == pytest.approx(float(table[left] @ hand[number][1]), rel=1e-5)


def test_user_vectors_begin_small_and_from_one_start() -> None:
    method = FedMF(factors=16)
    shared = method.init_shared(Catalogue(9), Rng.of(0))
    assert 0 < float(shared["user"].abs().max()) <= 1 / math.sqrt(16)
    for user in (0, 1):
        assert torch.equal(method.init_local(shared, Rng.of(0).fold(user))["user"], shared["user"])

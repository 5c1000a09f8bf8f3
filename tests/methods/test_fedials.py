from __future__ import annotations

import numpy as np
import pytest
import torch

from homebody.core import Catalogue, Cohort, Data
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.methods.fedials import FedIALS
from homebody.methods.ials import IALS
from homebody.reference import Histories
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import population
from homebody.training import fit

ALPHA, LAMBDA = 3.0, 0.7
BOTH = Cohort(np.array([0, 1]), "all", size=2, population=2)


def solve(other: np.ndarray, taken: np.ndarray, scaling: float = 0.0) -> np.ndarray:
    """(YᵀCY + λI)⁻¹ YᵀCp with every confidence written out, as in the paper."""
    rows = []
    for preference in taken:
        confidence = np.diag(1 + ALPHA * preference)
        ridge = LAMBDA * (preference.sum() + len(preference) / ALPHA) ** scaling
        system = other.T @ confidence @ other + ridge * np.eye(other.shape[1])
        rows.append(np.linalg.inv(system) @ other.T @ confidence @ (preference > 0))
    return np.array(rows)


def test_two_clients_by_hand() -> None:
    items = np.array([0, 1, 2, 3, 1, 4, 0, 2], dtype=np.int32)
    split = leave_one_out(Population("two", np.array([0, 4, 8]), items, n_items=5), how="latest")
    method = FedIALS(factors=2, confidence=ALPHA, regularisation=LAMBDA)
    table = np.array([[1.0, 0.0], [0.5, -1.0], [-0.3, 0.7], [0.2, 0.4], [-1.0, 1.0]])
    taken = np.array([[1, 1, 0, 0, 0], [0, 1, 0, 0, 1]])
    shared = {"item": torch.from_numpy(table).float()}
    people = solve(table, taken)
    for user in (0, 1):
        data = Data(*(torch.from_numpy(part)[0] for part in split.padded(np.array([user]))), Catalogue(5))
        scores = method.score(shared, {}, data, torch.arange(5))
        np.testing.assert_allclose(scores, table @ people[user], rtol=1e-4, atol=1e-5)
        update, _ = method.client(shared, {}, method.prepare(data, Rng.of(0)))
        np.testing.assert_allclose(update["gram"], np.outer(people[user], people[user]), rtol=1e-4, atol=1e-6)
    simulator = Simulator(split)
    simulator.begin(method, Rng.of(0))
    got = simulator.collect(method, shared, BOTH, Rng.of(0), step=1)
    after, _ = method.server(shared, {}, got.total)
    expected = solve(people, taken.T)
    np.testing.assert_allclose(after["item"], expected, rtol=1e-4, atol=1e-5)
    assert not expected[2].any(), "nobody took item 2"


@pytest.mark.parametrize(("rounds", "scaling"), [(1, 0.0), (4, 0.0), (4, 0.7)])
def test_it_is_centralised_ials(rounds: int, scaling: float) -> None:
    split = population()
    fields = {"factors": 6, "confidence": 4.0, "regularisation": 0.5, "scaling": scaling, "init_scale": 0.3}
    fitted = fit(FedIALS(**fields), Simulator(split), rounds=rounds, seed=3, evaluate_every=0)
    scores = IALS(**fields).trained(split.histories(), 3, rounds)(np.arange(split.n_users), torch.arange(split.n_items))
    for user in range(0, split.n_users, 7):
        for item, score in fitted.ranked(user, k=split.n_items):
            assert score == pytest.approx(float(scores[user, item]), abs=1e-4)


@pytest.mark.parametrize("scaling", [0.0, 0.5])
def test_ials_by_hand(scaling: float) -> None:
    taken = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1], [1, 0, 1]])
    everyone = Histories.of([[0, 1], [1, 2], [2], [0, 2]], n_items=3)
    method = FedIALS(factors=2, init_scale=0.5)
    table = method.init_shared(Catalogue(3), Rng.of(8, "train").fold("shared"))["item"].double().numpy()
    for _ in range(3):
        people = solve(table, taken, scaling)
        table = solve(people, taken.T, scaling)
    reference = IALS(factors=2, confidence=ALPHA, regularisation=LAMBDA, scaling=scaling, init_scale=0.5)
    scores = reference.trained(everyone, 8, rounds=3)(np.array([2, 0, 1, 3]), torch.arange(3))
    np.testing.assert_allclose(scores, (solve(table, taken, scaling) @ table.T)[[2, 0, 1, 3]], rtol=1e-4, atol=1e-5)


def test_the_seed_is_where_it_begins() -> None:
    everyone = population().histories()
    one, other = (IALS(factors=4).trained(everyone, seed, 1)(np.array([0]), torch.arange(9)) for seed in (0, 1))
    assert not torch.equal(one, other)


def test_twice_the_same_item_counts_twice() -> None:
    method = FedIALS(factors=2, confidence=ALPHA, regularisation=LAMBDA)
    table = torch.tensor([[1.0, 0.0], [0.5, -1.0]])
    found = method.user_vector({"item": table}, torch.tensor([1, 1]), torch.tensor([True, True]))
    y, own = table.double().numpy(), table[1].double().numpy()
    system = y.T @ y + 2 * ALPHA * np.outer(own, own) + LAMBDA * np.eye(2)
    np.testing.assert_allclose(found, np.linalg.solve(system, 2 * (1 + ALPHA) * own), rtol=1e-5)

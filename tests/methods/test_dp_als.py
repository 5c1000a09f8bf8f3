from __future__ import annotations

import numpy as np
import pytest
import torch

from homebody.core import Catalogue, Cohort, Data, Total, Tree
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.errors import HomebodyError
from homebody.methods.dp_als import DPALS, halved, whole
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import population
from homebody.training import fit

ALPHA, LAMBDA, RIDGE = 3.0, 0.7, 0.4
TAKEN = np.array([[1, 1, 0, 0, 0], [0, 1, 0, 0, 1]])
TABLE = np.array([[1.0, 0.0], [0.5, -1.0], [-0.3, 0.7], [0.2, 0.4], [-1.0, 1.0]])


def directions(table: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """(YᵀCY + λI)⁻¹ YᵀCp of everyone, of length 1."""
    rows = []
    for preference in taken:
        confidence = np.diag(1 + ALPHA * preference)
        x = np.linalg.solve(table.T @ confidence @ table + LAMBDA * np.eye(2), table.T @ confidence @ preference)
        rows.append(x / np.linalg.norm(x))
    return np.array(rows)


def solved(people: np.ndarray, taken: np.ndarray, squares: float) -> np.ndarray:
    """The item half, people weighing 1 / √(1 + m (1 + s²)), with every weight written out."""
    weight = np.diag((1 + taken.sum(1) * (1 + squares**2)) ** -0.5)
    gram = people.T @ weight @ people
    ridge = RIDGE * np.trace(gram) / 2 * np.eye(2)
    rows = []
    for preference in taken.T:
        own = people.T @ (weight * preference[:, None]) @ people if squares else np.zeros((2, 2))
        system = gram + ALPHA * own + ridge
        rows.append(np.linalg.solve(system, (1 + ALPHA) * people.T @ weight @ preference))
    return np.array(rows)


@pytest.mark.parametrize("squares", [0.0, 1.0, 0.5])
def test_two_clients_by_hand(squares: float) -> None:
    items = np.array([0, 1, 2, 3, 1, 4, 0, 2], dtype=np.int32)
    split = leave_one_out(Population("two", np.array([0, 4, 8]), items, n_items=5), how="latest")
    method = DPALS(
        uplink=Channel(), factors=2, confidence=ALPHA, regularisation=LAMBDA, item_ridge=RIDGE, squares=squares
    )
    shared, simulator = {"item": torch.from_numpy(TABLE).float()}, Simulator(split)
    simulator.begin(method, Rng.of(0))
    both = Cohort(np.array([0, 1]), "all", size=2, population=2)
    got = simulator.collect(method, shared, both, Rng.of(0), step=1)
    after, _ = method.server(shared, {}, got.total)
    expected = solved(directions(TABLE, TAKEN), TAKEN, squares)
    np.testing.assert_allclose(after["item"], expected, rtol=1e-4, atol=1e-5)
    assert not expected[2].any(), "nobody has item 2"


def sent(method: DPALS, items: list[int], n_items: int = 40, seed: int = 0) -> Tree:
    owned = torch.tensor(items)
    data = Data(owned, torch.ones_like(owned, dtype=torch.bool), owned, Catalogue(n_items))
    shared = method.init_shared(data.catalogue, Rng.of(1))
    update, _ = method.client(shared, {}, method.prepare(data, Rng.of(seed)))
    return {"gram": update["gram"], "item": update["item"].dense()}


@pytest.mark.parametrize("count", [1, 7, 40])
@pytest.mark.parametrize("squares", [0.0, 2.0])
def test_whatever_somebody_has_they_send_a_message_of_length_1(count: int, squares: float) -> None:
    update = sent(DPALS(factors=3, squares=squares), list(range(count)))
    length = sum(float((value.double() ** 2).sum()) for value in update.values()) ** 0.5
    assert length == pytest.approx(1.0, abs=1e-6)


def test_a_round_is_told_of_a_few_items_drawn_anew() -> None:
    method = DPALS(factors=3, sampled=5)
    told = [sent(method, list(range(0, 40, 2)), seed=seed)["item"].norm(dim=1).nonzero()[:, 0] for seed in range(40)]
    assert all(len(items) == 5 for items in told)
    assert set(torch.cat(told).tolist()) == set(range(0, 40, 2)), "the seeds are fixed"
    assert len(sent(method, [1, 2])["item"].norm(dim=1).nonzero()) == 2


def test_a_matrix_is_as_long_as_its_half() -> None:
    square = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.5, 3.0], [-1.0, 3.0, 2.0]])
    assert float(halved(square).norm()) == pytest.approx(float(square.norm()))
    torch.testing.assert_close(whole(torch.stack([halved(square)] * 2), 3), torch.stack([square] * 2))


def test_noise_that_leaves_no_definite_matrix_is_survived() -> None:
    """Its negative part is cut off: the ridge is then what the items are solved with."""
    method = DPALS(factors=2, squares=1.0, confidence=5.0, item_ridge=1.0)
    bad = halved(torch.tensor([[3.0, 0.0], [0.0, -5.0]]))
    rows = torch.cat([torch.ones(4, 2), -bad.expand(4, -1)], dim=1)
    after, _ = method.server({"item": torch.zeros(4, 2)}, {}, Total({"gram": bad, "item": rows}, 9))
    # The Gram matrix is diag(3, 0), an item's own diag(0, 5), and the ridge 1.5: 6 / 4.5 and 6 / (5 × 5 + 1.5).
    torch.testing.assert_close(after["item"], torch.tensor([6 / 4.5, 6 / 26.5]).expand(4, -1))


def test_its_default_noise_costs_what_it_says() -> None:
    split = population()
    assert fit(DPALS(factors=2), Simulator(split), rounds=3, evaluate_every=0).epsilon["server"] == pytest.approx(
        8, abs=0.01
    )


def test_a_cohort_is_refused_under_its_relation() -> None:
    with pytest.raises(HomebodyError, match="accounted under replace-one"):
        fit(DPALS(factors=2), Simulator(population()), rounds=1, cohort=20)

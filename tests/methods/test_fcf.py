from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from homebody.core import Catalogue, Cohort, Data, Rows, Total, Tree
from homebody.data.partitions import leave_one_out, split
from homebody.data.population import Population
from homebody.data.synthetic import Synthetic, synthetic
from homebody.errors import HomebodyError
from homebody.evaluation import measure
from homebody.methods.baselines import Popularity
from homebody.methods.fcf import FCF
from homebody.privacy import Channel, Clip
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

ALPHA, LAMBDA = 3.0, 0.7
TAKEN = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0]])
METHOD = FCF(factors=2, confidence=ALPHA, regularisation=LAMBDA)
TABLE = torch.tensor([[1.0, 0.0], [0.5, -1.0], [-0.3, 0.7], [0.2, 0.4], [-1.0, 1.0]])


def data_of(preference: Tensor) -> Data:
    items = preference.nonzero()[:, 0]
    return Data(items, torch.ones_like(items, dtype=torch.bool), items, Catalogue(len(preference)))


def objective(people: Tensor, table: Tensor, taken: Tensor) -> Tensor:
    """J of the paper, with every confidence and preference written out."""
    confidence = 1 + ALPHA * taken
    squares = confidence * (taken - people @ table.T) ** 2
    return squares.sum() + LAMBDA * ((people**2).sum() + (table**2).sum())


def minimised(table: Tensor, taken: Tensor) -> Tensor:
    """Every person's vector, from the paper's closed form in 64 bits."""
    found = []
    for preference in taken.double():
        confidence = torch.diag(1 + ALPHA * preference)
        system = table.T @ confidence @ table + LAMBDA * torch.eye(table.shape[1], dtype=torch.float64)
        found.append(torch.linalg.solve(system, table.T @ confidence @ preference))
    return torch.stack(found)


def total_of(method: FCF, table: Tensor, taken: Tensor) -> Total:
    sums: Tree = {}
    for preference in taken:
        update, _ = method.client({"item": table}, {}, method.prepare(data_of(preference), Rng.of(0)))
        for name, value in update.items():
            sums[name] = sums.get(name, 0) + (value.dense() if isinstance(value, Rows) else value)
    return Total(sums, len(taken))


def test_the_sum_of_what_clients_send_is_the_gradient_of_the_whole_loss() -> None:
    table = TABLE.double().requires_grad_()
    people = minimised(table.detach(), TAKEN).requires_grad_()
    objective(people, table, TAKEN).backward()
    assert people.grad is not None
    assert float(people.grad.abs().max()) < 1e-12, "each vector is the best for its table"
    found = METHOD.gradient(TABLE, total_of(METHOD, TABLE, TAKEN))
    torch.testing.assert_close(found.double(), table.grad, rtol=1e-4, atol=1e-5)


def test_what_one_client_sends_is_the_papers_dense_f() -> None:
    (x,) = minimised(TABLE.double(), TAKEN[:1])
    c, p = 1 + ALPHA * TAKEN[0], TAKEN[0]
    dense = torch.stack([c[i] * (p[i] - x @ TABLE[i].double()) * x for i in range(5)])
    sent = total_of(METHOD, TABLE, TAKEN[:1]).sum
    torch.testing.assert_close((sent["item"] - TABLE @ sent["gram"]).double(), dense, rtol=1e-4, atol=1e-6)


def test_a_clip_bounds_the_pair_and_not_the_dense_table() -> None:
    """The two carry the same sum, but not the same length: what a clip does to one is not what it does to the other."""
    sent = total_of(METHOD, TABLE, TAKEN[:1]).sum
    pair = float(torch.cat([sent["item"].flatten(), sent["gram"].flatten()]).norm())
    dense = float((sent["item"] - TABLE @ sent["gram"]).norm())
    assert abs(pair - dense) > 0.1
    clipped = Channel(Clip(pair / 2)).device(total_of(METHOD, TABLE, TAKEN[:1]).sum, Rng.of(0))
    torch.testing.assert_close(clipped["gram"], sent["gram"] / 2)


def test_the_server_takes_one_step_of_adam_a_round() -> None:
    method = FCF(factors=2, regularisation=LAMBDA, learning_rate=0.3, beta1=0.8, beta2=0.95, eps=1e-3)
    parameter = TABLE.clone().requires_grad_()
    adam = torch.optim.Adam([parameter], lr=0.3, betas=(0.8, 0.95), eps=1e-3)
    shared: Tree = {"item": TABLE}
    state = method.init_server(shared)
    for number in range(6):
        total = total_of(method, shared["item"], TAKEN[number % 2 :])
        parameter.grad = method.gradient(parameter.detach(), total)
        adam.step()
        shared, state = method.server(shared, state, total)
        torch.testing.assert_close(shared["item"], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_round_of_the_simulator_is_that_step() -> None:
    items = np.array([0, 1, 2, 3, 1, 4, 0, 2], dtype=np.int32)
    people = leave_one_out(Population("two", np.array([0, 4, 8]), items, n_items=5), how="latest")
    simulator = Simulator(people)
    simulator.begin(METHOD, Rng.of(0))
    both = Cohort(np.array([0, 1]), "all", size=2, population=2)
    got = simulator.collect(METHOD, {"item": TABLE}, both, Rng.of(0), step=1)
    expected = total_of(METHOD, TABLE, TAKEN[:2])
    torch.testing.assert_close(METHOD.gradient(TABLE, got.total), METHOD.gradient(TABLE, expected))


def test_an_item_that_comes_later_has_a_first_step_of_its_own() -> None:
    """However old the others' moments are, a first step of Adam is as long as the learning rate."""
    state = METHOD.init_server({"item": TABLE})
    shared: Tree = {"item": TABLE}
    for _ in range(5):
        shared, state = METHOD.server(shared, state, total_of(METHOD, shared["item"], TAKEN))
    grown: Tree = {"item": torch.cat([shared["item"], torch.tensor([[0.3, -0.2]])])}
    fresh = METHOD.init_server(grown)
    kept = {name: torch.cat([state[name], fresh[name][5:]]) for name in fresh}
    taken = torch.cat([TAKEN, torch.tensor([[0], [1], [0]])], dim=1)
    after, _ = METHOD.server(grown, kept, total_of(METHOD, grown["item"], taken))
    step = (after["item"] - grown["item"]).abs()
    torch.testing.assert_close(step[5], torch.full((2,), METHOD.learning_rate))
    assert not torch.allclose(step[:5], torch.full((5, 2), METHOD.learning_rate), rtol=1e-3)


def test_someone_new_is_served_and_better_than_by_popularity() -> None:
    made = synthetic(Synthetic(users=300, items=120, mean=16, factors=4, seed=5))
    people = split(made, "held-out-users:test=0.2,valid=0.2,asked=0.5", seed=1)
    simulator = Simulator(people)
    fitted = fit(FCF(factors=8), simulator, rounds=40, evaluate_every=10)
    common = measure(people, Popularity().trained(people.histories())).metrics
    assert fitted.metrics["valid/ndcg@10"] > common["valid/ndcg@10"] + 0.02
    guest = int(np.flatnonzero(~people.learn)[0])
    data = Data(*(torch.from_numpy(part)[0] for part in people.padded(np.array([guest]))), simulator.catalogue)
    every = FCF(factors=8).score(fitted.shared, {}, data, torch.arange(people.n_items))
    for item, score in fitted.ranked(guest, k=5):
        assert score == pytest.approx(float(every[item]), abs=1e-5)


def test_someone_without_a_history_has_equal_scores_and_moves_nothing() -> None:
    nobody = Data(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), torch.tensor([5]), Catalogue(5))
    assert not METHOD.score({"item": TABLE}, {}, nobody, torch.arange(5)).any()
    update, _ = METHOD.client({"item": TABLE}, {}, METHOD.prepare(nobody, Rng.of(0)))
    assert not update["gram"].any()
    assert not update["item"].dense().any()


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_a_decay_of_one_is_refused(name: str) -> None:
    with pytest.raises(HomebodyError, match=f"{name} must be under 1"):
        FCF(**{name: 1.0})

"""FED-MVMF against the loss of its paper, written out in 64 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from homebody.core import Catalogue, Column, Data, Rows, Total, Tree
from homebody.data import load
from homebody.data.partitions import split
from homebody.errors import HomebodyError
from homebody.methods.fcf import FCF
from homebody.methods.fed_mvmf import FedMVMF
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit
from homebody.view_vectors import make_views

ALPHA, VIEWS, ITEMS, LAMBDA = 3.0, 0.6, 1.7, 0.7
METHOD = FedMVMF(factors=2, confidence=ALPHA, view_weight=VIEWS, item_weight=ITEMS, regularisation=LAMBDA)
TAKEN = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
GENRES = torch.tensor([[1, 2], [2, -1], [-1, -1], [1, -1], [0, 2]])
CATALOGUE = Catalogue(
    5,
    {"genres": Column(GENRES, 3, "many"), "title": Column(GENRES, 3, "many", text=True)},
    {
        "job": Column(torch.empty(0, dtype=torch.int64), 3, "one", view="profile"),
        "taste.1": Column(torch.empty(0), 1, "number", view="taste"),
        "taste.2": Column(torch.empty(0), 1, "number", view="taste"),
        "town": Column(torch.empty(0, dtype=torch.int64), 3, "one"),
    },
)
JOBS, TASTES = [1, 0, 2, 2], [[0.5, -1.0], [2.0, 0.3], [0.0, 0.0], [-1.5, 0.7]]
SHARED: Tree = {
    "item": torch.tensor([[1.0, 0.0], [0.5, -1.0], [-0.3, 0.7], [0.2, 0.4], [-1.0, 1.0]]),
    "features": torch.tensor([[0, 1, 1], [0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1]]).float(),
    "view/profile": torch.tensor([[0.3, -0.2], [0.9, 0.4]]),
    "view/taste": torch.tensor([[-0.5, 0.1], [0.2, 0.8]]),
}


def data_of(person: int) -> Data:
    items = TAKEN[person].nonzero()[:, 0]
    features = {
        "job": torch.tensor(JOBS[person]),
        "taste.1": torch.tensor(TASTES[person][0]),
        "taste.2": torch.tensor(TASTES[person][1]),
        "town": torch.tensor(1),
    }
    return Data(items, torch.ones_like(items, dtype=torch.bool), items, CATALOGUE, features)


def described(person: int) -> dict[str, Tensor]:
    """x of each view that knows the person."""
    found = {}
    if JOBS[person]:
        found["view/profile"] = torch.eye(2)[JOBS[person] - 1].double()
    if any(TASTES[person]):
        found["view/taste"] = torch.tensor(TASTES[person]).double()
    return found


def objective(people: Tensor, shared: Tree, v: Tensor) -> Tensor:
    """J, with every sum of the paper written out."""
    total = ((1 + ALPHA * TAKEN) * (TAKEN - people @ shared["item"].T) ** 2).sum()
    for person, vector in enumerate(people):
        for name, x in described(person).items():
            total = total + VIEWS * ((x - shared[name] @ vector) ** 2).sum()
    total = total + ITEMS * ((shared["features"] - shared["item"] @ v.T) ** 2).sum()
    squares = (people, shared["item"], v, shared["view/profile"], shared["view/taste"])
    return total + LAMBDA * torch.stack([(one**2).sum() for one in squares]).sum()


def total_of(people: range = range(4)) -> Total:
    sums: Tree = {}
    for person in people:
        update, _ = METHOD.client(SHARED, {}, METHOD.prepare(data_of(person), Rng.of(0)))
        for name, value in update.items():
            sums[name] = sums.get(name, 0) + (value.dense() if isinstance(value, Rows) else value)
    return Total(sums, len(people))


def vectors() -> Tensor:
    return torch.stack([METHOD.user_vector(SHARED, METHOD.prepare(data_of(person), Rng.of(0))) for person in range(4)])


def test_shared_parameters_are_those_of_the_views_and_of_the_items() -> None:
    made = METHOD.init_shared(CATALOGUE, Rng.of(0))
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        name: tuple(value.shape) for name, value in SHARED.items()
    }
    assert torch.equal(made["features"], SHARED["features"])
    assert METHOD.takes_in(CATALOGUE) == ("job", "taste.1", "taste.2")


def test_each_vector_is_the_best_for_the_whole_loss() -> None:
    wide = {name: value.double() for name, value in SHARED.items()}
    people = vectors().double().requires_grad_()
    objective(people, wide, torch.zeros(3, 2).double()).backward()
    assert people.grad is not None
    assert float(people.grad.abs().max()) < 1e-5


def test_the_server_has_the_gradient_of_the_whole_loss() -> None:
    wide = {name: value.double().requires_grad_() for name, value in SHARED.items()}
    table, features = SHARED["item"].double(), SHARED["features"].double()
    # V is the best for the items, as each person's vector is: then the rest is the whole gradient.
    system = ITEMS * table.T @ table + LAMBDA * torch.eye(2).double()
    v = torch.linalg.solve(system, ITEMS * table.T @ features).T.requires_grad_()
    objective(vectors().double(), wide, v).backward()
    assert v.grad is not None
    assert float(v.grad.abs().max()) < 1e-10
    found = METHOD.gradients(SHARED, total_of())
    assert set(found) == {"item", "view/profile", "view/taste"}
    for name, slope in found.items():
        torch.testing.assert_close(slope.double(), wide[name].grad, rtol=1e-4, atol=1e-5)


def test_a_view_that_knows_nothing_is_left_out() -> None:
    """The third has no taste, the second no job: their part of that gradient is zero."""
    second, third = (total_of(range(person, person + 1)).sum for person in (1, 2))
    assert not second["view/profile"].any()
    assert second["view/taste"].any()
    assert not third["view/taste"].any()
    assert third["view/profile"].any()


def test_somebody_without_a_history_has_a_vector_by_their_views() -> None:
    batch = METHOD.prepare(data_of(3), Rng.of(0))
    assert METHOD.user_vector(SHARED, batch).abs().sum() > 0.1
    nobody = {**batch, "view/profile": torch.zeros(2), "view/taste": torch.zeros(2)}
    assert not METHOD.user_vector(SHARED, nobody).any()


def test_the_server_takes_one_step_of_adam_on_every_matrix() -> None:
    method = replace(METHOD, learning_rate=0.3, beta1=0.8, beta2=0.95, eps=1e-3)
    names = ["item", "view/profile", "view/taste"]
    parameters = {name: SHARED[name].clone().requires_grad_() for name in names}
    adam = torch.optim.Adam(parameters.values(), lr=0.3, betas=(0.8, 0.95), eps=1e-3)
    shared, state = dict(SHARED), method.init_server(SHARED)
    for _ in range(4):
        total = total_of()
        for name, slope in method.gradients(shared, total).items():
            parameters[name].grad = slope
        adam.step()
        shared, state = method.server(shared, state, total)
        for name in names:
            torch.testing.assert_close(shared[name], parameters[name].detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(shared["features"], SHARED["features"])


def test_without_weight_on_views_and_items_it_is_fcf() -> None:
    people = make_views(load("synthetic:users=80,items=40,mean=12"), {"taste": "svd:size=3"})
    done = split(people, "ratio:valid=0.1", how="random")
    mine, other = (
        fit(replace(method, factors=4, confidence=2.0, regularisation=1.0), Simulator(done), rounds=5, evaluate_every=5)
        for method in (FedMVMF(view_weight=0.0, item_weight=0.0), FCF())
    )
    torch.testing.assert_close(mine.shared["item"], other.shared["item"], rtol=1e-3, atol=1e-4)
    assert mine.metrics["ndcg@10"] == pytest.approx(other.metrics["ndcg@10"], abs=0.02)


def test_views_help_where_histories_are_short() -> None:
    """80 % of everything is elsewhere: who has a taste from there is served better than by what is left."""
    people = make_views(load("synthetic:users=400,items=100,mean=25,factors=4"), {"taste": "svd:size=6,share=0.8"})
    done = split(people, "cold-users:test=0.3,valid=0.1", how="random")
    method = FedMVMF(factors=8, confidence=2.0, regularisation=1.0)
    fitted, alone = (
        fit(replace(method, view_weight=weight), Simulator(done), rounds=30, evaluate_every=30) for weight in (5.0, 0.0)
    )
    assert alone.metrics["auc"] < 0.55  # a vector of zeros: all items are alike, and ties count against it
    assert fitted.metrics["auc"] > 0.65


def test_data_without_views_is_refused() -> None:
    with pytest.raises(HomebodyError, match="No feature of people is in a view"):
        METHOD.init_shared(Catalogue(3), Rng.of(0))
    with pytest.raises(HomebodyError, match="There is no view of this data 'tast'; did you mean 'taste'"):
        FedMVMF(views="tast").init_shared(CATALOGUE, Rng.of(0))
    with pytest.raises(HomebodyError, match="beta1 must be under 1"):
        FedMVMF(beta1=1.0)


def test_items_need_no_features() -> None:
    bare = Catalogue(5, {}, CATALOGUE.people)
    made = METHOD.init_shared(bare, Rng.of(0))
    assert made["features"].shape == (5, 0)
    total = total_of()
    slopes = METHOD.gradients({**SHARED, "features": made["features"]}, total)
    without = replace(METHOD, item_weight=0.0).gradients(SHARED, total)
    torch.testing.assert_close(slopes["item"], without["item"])
    assert METHOD.uplink == Channel()
    assert np.isfinite(METHOD.work(bare, 10).memory)

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, leaky_relu

from homebody.core import Batch, Catalogue, Data, Rows, Total, Tree
from homebody.data.partitions import split
from homebody.data.synthetic import Synthetic, synthetic
from homebody.methods.fedgnn import FedGNN
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import chance
from homebody.training import fit

METHOD = FedGNN(factors=3, learning_rate=0.4, item_rate=0.5, steps=3, negatives=2)
ITEMS = 9
HISTORIES = [[4], [2, 6], [7, 1], [3, 8, 0], [5, 1, 5, 2], [0, 1, 2, 3, 4, 5, 6, 7], [*range(ITEMS)]]


def shared() -> Tree:
    """Nothing at its start, where W is the identity and would hide a transposition."""
    draw = Rng.of(4)
    return {
        "item": draw.normal(ITEMS, 3),
        "transform": draw.normal(3, 3),
        "attention": draw.normal(6),
        "user": draw.normal(3),
    }


def data_of(items: list[int]) -> Data:
    own = torch.tensor(items, dtype=torch.int64)
    return Data(own, torch.ones_like(own, dtype=torch.bool), own.unique(), Catalogue(ITEMS))


def logit(user: Tensor, table: Tensor, w: Tensor, a: Tensor, neighbours: list[int], item: int) -> Tensor:
    """The layer of the docstring, node by node."""
    node = user
    if neighbours:
        strength = [leaky_relu(a @ torch.cat([w @ user, w @ table[j]]), 0.2) for j in neighbours]
        shares = torch.stack(strength).softmax(0)
        node = user + sum(share * (w @ table[j]) for share, j in zip(shares, neighbours, strict=True))
    return node @ (table[item] + w @ user)


def samples_of(batch: Batch) -> list[tuple[int, float]]:
    """Every sample by itself: an item and its label."""
    found = []
    for label, name, count in ((1.0, "own", "times"), (0.0, "drawn", "drawn_times")):
        for item, times in zip(batch[name].tolist(), batch[count].tolist(), strict=True):
            found += [(item, label)] * int(times)
    return found


def plain_round(start: Tree, history: list[int], samples: list[tuple[int, float]], steps: int) -> tuple[Tree, float]:
    """A client as anyone would write it: parameters, a loop over samples, an optimiser."""
    user, table, w, a = (nn.Parameter(start[name].clone()) for name in ("user", "item", "transform", "attention"))
    optimiser = torch.optim.SGD([user, table, w, a], lr=METHOD.learning_rate)
    label = torch.tensor([label for _, label in samples])
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        graph = sorted(set(history))
        logits = [logit(user, table, w, a, [j for j in graph if j != item], item) for item, _ in samples]
        loss = binary_cross_entropy_with_logits(torch.stack(logits), label)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    after = {"user": user, "item": table, "transform": w, "attention": a}
    return {name: value.detach() for name, value in after.items()}, sum(losses) / len(losses)


@pytest.mark.parametrize("history", HISTORIES)
def test_a_client_is_a_plain_loop_over_its_graph(history: list[int]) -> None:
    start = shared()
    batch = METHOD.prepare(data_of(history), Rng.of(1))
    samples = samples_of(batch)
    assert sorted(item for item, label in samples if label) == sorted(history)
    assert len(samples) == (3 if len(set(history)) < ITEMS else 1) * len(history), "who has everything has no negatives"
    assert not {item for item, label in samples if not label} & set(history)
    after, loss = plain_round(start, history, samples, METHOD.steps)
    update, local = METHOD.client(start, METHOD.init_local(start, Rng.of(0)), batch)
    torch.testing.assert_close(local["user"], after["user"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(update["item"].dense(), after["item"] - start["item"], rtol=1e-4, atol=1e-5)
    for name in ("transform", "attention"):
        torch.testing.assert_close(update[name], after[name] - start[name], rtol=1e-4, atol=1e-5)
    assert float(local["loss"]) == pytest.approx(loss, rel=1e-4)
    assert set(METHOD.asks(batch)["item"].tolist()) - {-1} == {item for item, _ in samples}


def test_the_user_vector_is_no_part_of_what_leaves() -> None:
    start = shared()
    update, _ = METHOD.client(start, METHOD.init_local(start, Rng.of(0)), METHOD.prepare(data_of([1, 2]), Rng.of(1)))
    assert sorted(update) == ["attention", "item", "transform"]


def test_the_server_takes_means_and_a_longer_one_of_rows() -> None:
    start = shared()
    rows = Rows(torch.tensor([2, 7]), torch.tensor([[1.0, 0.0, 2.0], [0.0, 4.0, 0.0]]), ITEMS).dense()
    sums = {"item": rows, "transform": torch.ones(3, 3), "attention": torch.arange(6.0)}
    after, _ = METHOD.server(start, {}, Total(sums, clients=2))
    torch.testing.assert_close(after["item"], start["item"] + ITEMS * 0.5 * rows / 2)
    torch.testing.assert_close(after["transform"], start["transform"] + 0.5)
    torch.testing.assert_close(after["attention"], start["attention"] + torch.arange(6.0) / 2)
    assert torch.equal(after["user"], start["user"])


@pytest.mark.parametrize("history", HISTORIES)
def test_a_score_hears_all_that_the_person_has(history: list[int]) -> None:
    start, user = shared(), torch.tensor([0.4, -0.2, 1.1])
    found = METHOD.score(start, {"user": user}, data_of(history), torch.arange(ITEMS))
    layer = (start["item"], start["transform"], start["attention"])
    expected = torch.stack([logit(user, *layer, sorted(set(history)), item) for item in range(ITEMS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_attention_to_one_item_alone_leaves_the_others_their_shares(size: float) -> None:
    """Without that item's edge next to nothing is left to divide by, or nothing at all."""
    history, method = [3, 8, 0, 6], replace(METHOD, steps=1)
    start = {**shared(), "attention": size * torch.ones(6)}
    batch = method.prepare(data_of(history), Rng.of(1))
    after, loss = plain_round(start, history, samples_of(batch), steps=1)
    update, local = method.client(start, {"user": start["user"]}, batch)
    assert float(local["loss"]) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(local["user"], after["user"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(update["item"].dense(), after["item"] - start["item"], rtol=1e-4, atol=1e-4)


def test_someone_without_a_history_has_the_scores_of_their_vector_and_moves_nothing() -> None:
    start = shared()
    nobody = Data(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), torch.tensor([9]), Catalogue(9))
    batch = METHOD.prepare(nobody, Rng.of(1))
    update, local = METHOD.client(start, METHOD.init_local(start, Rng.of(0)), batch)
    assert not update["item"].dense().any()
    assert not update["transform"].any()
    assert torch.equal(local["user"], start["user"])
    layer = (start["item"], start["transform"], start["attention"])
    expected = torch.stack([logit(start["user"], *layer, [], item) for item in range(ITEMS)])
    torch.testing.assert_close(METHOD.score(start, local, nobody, torch.arange(ITEMS)), expected)


def test_someone_who_did_not_train_adapts_and_is_served() -> None:
    made = synthetic(Synthetic(users=300, items=120, mean=16, factors=4, seed=5))
    people = split(made, "held-out-users:test=0.2,valid=0.2,asked=0.5", seed=1)
    fitted = fit(FedGNN(factors=8), Simulator(people), rounds=30, evaluate_every=10)
    mean, error = chance(people)
    assert fitted.metrics["valid/ndcg@10"] > mean + 4 * error
    guest = int(np.flatnonzero(~people.learn)[0])
    assert len(fitted.ranked(guest, k=5)) == 5

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from homebody.core import Catalogue, Cohort, Data
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.data.splits import Split
from homebody.data.synthetic import Synthetic, synthetic
from homebody.methods.pfedrec import PFedRec
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import choose, fit

Vector = list[float]
TABLE: list[Vector] = [[1.0, 0.0], [0.5, -1.0], [-0.3, 0.7], [0.2, 0.4], [-1.0, 1.0]]
WEIGHT, BIAS = [0.6, -0.4], 0.1
RATE, ITEM_RATE = 0.5, 0.2
BOTH = Cohort(np.array([0, 1]), "all", size=2, population=2)
ROW_RATE = RATE * 5 * ITEM_RATE
"""The learning rate × the number of items × the item rate."""


def two_people() -> Split:
    """Five items; under `published` each person has one item left to be a negative, so nothing is random.

    The first trains on 0 and 1 against 4, the second on 1 and 4 against 3; nobody touches 2.
    """
    items = np.array([0, 1, 2, 3, 1, 4, 0, 2], dtype=np.int32)
    return leave_one_out(
        Population("two", np.array([0, 4, 8]), items, n_items=5), protocol="published", how="latest", negatives=1
    )


SAMPLES = {0: [(0, 1), (4, 0), (1, 1), (4, 0)], 1: [(1, 1), (3, 0), (4, 1), (3, 0)]}


def dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def by_hand(
    samples: list[tuple[int, int]], table: list[Vector], weight: Vector, bias: float
) -> tuple[list[Vector], Vector, float, float]:
    """One batch: a step on the score function, the loss anew, a step on the rows."""
    n = len(samples)
    errors, loss = [], 0.0
    for item, label in samples:
        p = sigmoid(dot(table[item], weight) + bias)
        loss -= math.log(p if label else 1 - p) / n
        errors.append((p - label) / n)
    weight = [
        weight[f] - RATE * sum(error * table[item][f] for error, (item, _) in zip(errors, samples, strict=True))
        for f in range(2)
    ]
    bias = bias - RATE * sum(errors)
    again = [(sigmoid(dot(table[item], weight) + bias) - label) / n for item, label in samples]
    tuned = [list(row) for row in table]
    for error, (item, _) in zip(again, samples, strict=True):
        for f in range(2):
            tuned[item][f] -= ROW_RATE * error * weight[f]
    return tuned, weight, bias, loss


def shared() -> dict[str, Tensor]:
    return {"item": torch.tensor(TABLE), "weight": torch.tensor(WEIGHT), "bias": torch.tensor(BIAS)}


def own_data(split: Split, user: int) -> Data:
    padded = split.padded(np.array([user]))
    return Data(*(torch.from_numpy(part)[0] for part in padded), Catalogue(split.n_items))


def close(found: Tensor, expected: object, within: float = 1e-6) -> bool:
    return torch.allclose(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=within, atol=within)


def test_two_clients_by_hand() -> None:
    split, method = two_people(), PFedRec(factors=2, learning_rate=RATE, item_rate=ITEM_RATE, negatives=1)
    tables = []
    for user, samples in SAMPLES.items():
        data = own_data(split, user)
        batch = method.prepare(data, Rng.of(0).fold(user))
        drawn = zip(batch["index"][batch["slot"]].tolist(), batch["label"].tolist(), strict=True)
        assert sorted(drawn) == sorted(samples)

        tuned, weight, bias, loss = by_hand(samples, TABLE, WEIGHT, BIAS)
        update, local = method.client(shared(), method.init_local(shared(), Rng.of(1)), batch)
        assert close(local["weight"], weight)
        assert close(local["bias"], bias)
        assert close(local["loss"], loss)
        change = [[a - b for a, b in zip(new, old, strict=True)] for new, old in zip(tuned, TABLE, strict=True)]
        assert close(update["item"].dense(), change)

        # It ranks with its own tuned rows, over the table they were tuned from.
        scores = method.score(shared(), local, data, torch.arange(5))
        assert close(scores, [dot(row, weight) + bias for row in tuned])
        tables.append(tuned)

    simulator = Simulator(split)
    simulator.begin(method, Rng.of(1))
    got = simulator.collect(method, shared(), BOTH, Rng.of(0), step=1)
    after, _ = method.server(shared(), {}, got.total)
    # The mean of whole tables: a row that one of two touched moves half as far, one that none touched stays.
    mean = [[(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(*tables, strict=True)]
    assert close(after["item"], mean)
    assert after["item"][2].tolist() == shared()["item"][2].tolist()
    assert torch.equal(after["weight"], shared()["weight"])
    losses = [by_hand(samples, TABLE, WEIGHT, BIAS)[3] for samples in SAMPLES.values()]
    assert got.loss == pytest.approx(sum(losses) / 2, rel=1e-6)
    # Each sends three rows of two numbers and their indices; each is sent the table and the first score function.
    assert got.bytes_up == 2 * 3 * (4 + 2 * 4)
    assert got.bytes_down == 2 * (5 * 2 + 3) * 4
    # Both rank with what they tuned, not with the new mean.
    for user, left in ((0, 4), (1, 3)):
        tuned, weight, bias, _ = by_hand(SAMPLES[user], TABLE, WEIGHT, BIAS)
        ((item, score),) = simulator.recommend(method, after, user, 5)
        assert item == left
        assert score == pytest.approx(dot(tuned[left], weight) + bias, rel=1e-5)


def test_the_second_round_overwrites_the_table_and_keeps_the_score_function() -> None:
    split, method = two_people(), PFedRec(factors=2, learning_rate=RATE, item_rate=ITEM_RATE, negatives=1)
    first = [by_hand(samples, TABLE, WEIGHT, BIAS) for samples in SAMPLES.values()]
    mean = [[(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(first[0][0], first[1][0], strict=True)]
    second = [by_hand(SAMPLES[user], mean, first[user][1], first[user][2]) for user in (0, 1)]
    simulator = Simulator(split)
    simulator.begin(method, Rng.of(1))
    tree = shared()
    for step in (1, 2):
        got = simulator.collect(method, tree, BOTH, Rng.of(step), step=step)
        tree, _ = method.server(tree, {}, got.total)
    expected = [
        [(a + b) / 2 for a, b in zip(*rows, strict=True)] for rows in zip(second[0][0], second[1][0], strict=True)
    ]
    assert close(tree["item"], expected, within=1e-5)


def test_it_begins_as_the_authors_code_does() -> None:
    method = PFedRec(factors=16)
    start = method.init_shared(Catalogue(4000), Rng.of(0))
    assert start["item"].shape == (4000, 16)
    # Five standard errors; the seed is fixed.
    assert abs(float(start["item"].mean())) < 5 / math.sqrt(64_000)
    assert abs(float(start["item"].var()) - 1) < 5 * math.sqrt(2 / 64_000)
    assert float(torch.cat([start["weight"], start["bias"][None]]).abs().max()) <= 1 / math.sqrt(16)
    one, other = (method.init_local(start, Rng.of(0).fold(user)) for user in (1, 2))
    assert torch.equal(one["weight"], other["weight"]), "one common initial score function for all"
    assert torch.equal(one["weight"], start["weight"])


def test_the_settings_are_the_papers() -> None:
    method = PFedRec()
    assert (method.factors, method.learning_rate, method.item_rate) == (32, 0.1, 80.0)
    assert (method.negatives, method.batch_size, method.epochs, method.about.rounds) == (4, 256, 1, 100)
    assert method.row_rate({"item": torch.zeros(1682, 2)}) == pytest.approx(0.1 * 1682 * 80)


class Slow:
    """PFedRec in ordinary PyTorch: every client has a whole table, a layer and two optimisers."""

    def __init__(self, method: PFedRec, split: Split, seed: int) -> None:
        self.method, self.split = method, split
        self.rng = Rng.of(seed, "train")
        start = method.init_shared(Catalogue(split.n_items), self.rng.fold("shared"))
        self.table = start["item"].double()
        self.layers: dict[int, nn.Linear] = {}
        self.tables: dict[int, Tensor] = {}
        self.start = start

    def round(self, number: int, cohort: list[int]) -> float:
        """Everyone in turn; the plain mean of their tables; their mean loss."""
        losses = [self.client(user, number) for user in cohort]
        self.table = torch.stack([self.tables[user] for user in cohort]).mean(0)
        return sum(losses) / len(losses)

    def client(self, user: int, number: int) -> float:
        method, n_items = self.method, self.split.n_items
        layer = self.layers.setdefault(user, self.layer())
        embedding = nn.Embedding.from_pretrained(self.table.clone(), freeze=False)
        score_sgd = torch.optim.SGD(layer.parameters(), lr=method.learning_rate)
        item_sgd = torch.optim.SGD(embedding.parameters(), lr=method.learning_rate * n_items * method.item_rate)
        batch = method.prepare(own_data(self.split, user), self.rng.fold("round", number).fold(user))
        real = batch["valid"]
        items, labels = batch["index"][batch["slot"]][real], batch["label"][real].double()
        criterion, total = nn.BCEWithLogitsLoss(), 0.0
        for _ in range(method.epochs):
            for some, target in zip(items.split(method.batch_size), labels.split(method.batch_size), strict=True):
                for turn, sgd in enumerate((score_sgd, item_sgd)):
                    score_sgd.zero_grad()
                    item_sgd.zero_grad()
                    loss = criterion(layer(embedding(some)).squeeze(1), target)
                    loss.backward()
                    sgd.step()
                    total += loss.item() * len(some) * (turn == 0)
        self.tables[user] = embedding.weight.detach().clone()
        return total / (method.epochs * len(items))

    def layer(self) -> nn.Linear:
        layer = nn.Linear(self.method.factors, 1, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(self.start["weight"][None])
            layer.bias.copy_(self.start["bias"][None])
        return layer

    def scores(self, user: int) -> Tensor:
        layer = self.layers.get(user) or self.layer()
        with torch.no_grad():
            return layer(self.tables.get(user, self.table)).squeeze(1)


@cache
def after_three_rounds(size: int | None) -> tuple[Slow, list[float]]:
    """The plain way and its losses, for the kernel and the vmapped client alike."""
    split = leave_one_out(synthetic(Synthetic(users=30, items=50, mean=12, seed=2)), seed=2)
    slow, losses = Slow(PFedRec(factors=6, batch_size=20, epochs=2, item_rate=3.0), split, seed=9), []
    for number in (1, 2, 3):
        cohort = choose(np.arange(split.n_users), size, slow.rng.fold("cohort", number))
        losses.append(slow.round(number, cohort.users.tolist()))
    return slow, losses


@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "vmap"])
@pytest.mark.parametrize("size", [None, 12], ids=["everyone", "some"])
def test_three_rounds_equal_plain_per_client_pytorch(fused: bool, size: int | None) -> None:
    (slow, slow_losses), losses = after_three_rounds(size), []
    method, split = slow.method, slow.split
    fitted = fit(
        method,
        Simulator(split, fused=fused),
        rounds=3,
        cohort=size,
        seed=9,
        evaluate_every=0,
        on_round=lambda done: losses.append(done.loss),
    )
    assert losses == pytest.approx(slow_losses, rel=1e-4)
    assert torch.allclose(fitted.shared["item"].double(), slow.table, rtol=1e-3, atol=1e-4)
    for user in range(split.n_users):
        own = slow.scores(user)
        fast = dict(fitted.ranked(user, k=split.n_items))
        assert set(fast) == set(range(split.n_items)) - set(split.population.history(user).tolist())
        for item, score in fast.items():
            assert score == pytest.approx(float(own[item]), rel=1e-3, abs=1e-3), f"user {user}, item {item}"

"""FMF-LDP's mathematics by hand, what its reports decode to, and that the compiled round is the plain one."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from homebody.core import Catalogue, Cohort, Data, Total
from homebody.data.partitions import everything, leave_one_out
from homebody.data.population import Population
from homebody.data.synthetic import Synthetic, synthetic
from homebody.evaluation import measure
from homebody.methods.baselines import Popularity
from homebody.methods.fmf_ldp import DELTA, FMFLDP, RELIABLE
from homebody.methods.kernels import train_many
from homebody.privacy import Channel, Clip, OneBit, Shuffle
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

ALPHA, LAMBDA = 3.0, 0.01
V = np.array([[0.9, 0.1], [0.5, -0.8], [-0.3, 0.7], [0.2, 0.4], [-0.6, 0.5]])
TAKEN = np.array([[2, 1, 0, 0, 0], [0, 1, 0, 1, 1]])
"""How often each of two people took each of five items."""
HISTORIES = ([0, 1, 0], [4, 1, 3])
TWO = Population("two", np.array([0, 2, 5]), np.array([0, 1, 4, 1, 3], dtype=np.int32), n_items=5)
"""Without the repetition, which splits leave out."""


def by_hand(taken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and f as the paper writes them, every confidence written out."""
    C, p = np.diag(1 + ALPHA * taken), (taken > 0).astype(float)
    x = np.linalg.inv(V.T @ C @ V + LAMBDA * np.eye(2)) @ V.T @ C @ p
    return x, ((1 + ALPHA * taken) * (p - V @ x))[:, None] * x


def method(*stages: object, **fields: object) -> FMFLDP:
    """The published one, with two factors."""
    given = {"decoder": "published", "factors": 2, "confidence": ALPHA, "regularisation": LAMBDA, **fields}
    return FMFLDP(Channel(*stages), **given)  # type: ignore[arg-type]


def shared() -> dict[str, torch.Tensor]:
    return {"item": torch.from_numpy(V).float()}


def data(user: int) -> Data:
    own = torch.tensor(HISTORIES[user])
    return Data(own, torch.ones(3, dtype=torch.bool), own.unique(), Catalogue(5))


@pytest.mark.parametrize("user", [0, 1])
def test_a_client_by_hand_with_an_item_that_was_taken_twice(user: int) -> None:
    x, f = by_hand(TAKEN[user])
    own = data(user)
    update, _ = method().client(shared(), {}, method().prepare(own, Rng.of(0)))
    np.testing.assert_allclose(update["item"], f, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(method().score(shared(), {}, own, torch.arange(5)), V @ x, rtol=1e-4, atol=1e-6)


def test_the_published_server_takes_its_steps() -> None:
    rate, f = 0.02, np.arange(10.0).reshape(5, 2)
    server = method(OneBit(2.5, k=7), learning_rate=rate, steps=3)
    after, _ = server.server(shared(), {}, Total({"item": torch.from_numpy(4 * f).float()}, clients=4))
    expected = V.copy()
    for _ in range(3):
        expected = expected - rate * (-2 * f + 2 * LAMBDA * expected)
    np.testing.assert_allclose(after["item"], expected, rtol=1e-5)


def test_the_steps_go_along_the_gradient_of_the_loss() -> None:
    """f is −½ of the derivative of Eq. 1, at the x that minimises it: by finite differences."""

    def loss(table: np.ndarray) -> float:
        total = 0.0
        for taken in TAKEN:
            C, p = 1 + ALPHA * taken, (taken > 0).astype(float)
            x = np.linalg.solve(table.T @ (C[:, None] * table) + LAMBDA * np.eye(2), table.T @ (C * p))
            total += float((C * (p - table @ x) ** 2).sum() + LAMBDA * (x**2).sum())
        return total

    f = sum(by_hand(taken)[1] for taken in TAKEN)
    for place in product(range(5), range(2)):
        step = np.zeros_like(V)
        step[place] = 1e-5
        slope = (loss(V + step) - loss(V - step)) / 2e-5
        assert slope == pytest.approx(-2 * f[place], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_the_decoded_mean_is_that_of_the_projected_gradients_within_four_standard_errors() -> None:
    split, k, epsilon = everything(TWO), 40, 1.0
    exact = [by_hand(taken.clip(max=1))[1] for taken in TAKEN]
    expected = sum(np.clip(f, -1, 1) for f in exact)
    assert (np.abs(exact) > 1).any(), "something is projected"
    acting, simulator = method(OneBit(epsilon, k), Shuffle()), Simulator(split)
    simulator.begin(acting, Rng.of(0))
    both = Cohort(np.arange(2), "all", 2, 2)
    rounds = 1500
    sums = np.stack(
        [simulator.collect(acting, shared(), both, Rng.of(4, n), 1).total.sum["item"].numpy() for n in range(rounds)]
    )
    # A report is ±B with B = MF / tanh(ε/2) in one of MF entries, and two people's k reports are averaged over k.
    most = math.sqrt(2 * 10 / math.tanh(epsilon / 2) ** 2 / k)
    error = sums.std(axis=0, ddof=1) / math.sqrt(rounds)
    assert (error <= 1.1 * most / math.sqrt(rounds)).all()
    assert (np.abs(sums.mean(axis=0) - expected) < 4 * error).all()


def test_nobodys_history_changes_the_chance_of_a_report_by_more_than_e_to_the_epsilon() -> None:
    """Exactly, by enumeration: every report that a device of five items can send, for every pair of histories."""
    epsilon = 2.5
    stage, acting = OneBit(epsilon), method()
    chances = []
    for taken in product((0, 1), repeat=5):
        own = np.flatnonzero(taken)
        held = Data(torch.from_numpy(own), torch.ones(len(own), dtype=torch.bool), torch.from_numpy(own), Catalogue(5))
        update, _ = acting.client(shared(), {}, acting.prepare(held, Rng.of(0)))
        one = stage.chance(update["item"].flatten().clamp(-1, 1))
        chances.append(torch.cat([one, 1 - one]) / 10)  # an entry is drawn evenly, whatever the history
    table = torch.stack(chances)
    ratio = float((table.max(0).values / table.min(0).values).max())
    assert ratio <= math.exp(epsilon) * (1 + 1e-9)
    assert float(table.sum(1).sub(1).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "stages",
    [(OneBit(2.5, 30), Shuffle()), (Clip(0.5),), (Clip(0.5), OneBit(1.0, 3)), ()],
    ids=["reports", "clip", "both", "plain"],
)
def test_the_compiled_round_is_the_plain_one(stages: tuple[object, ...]) -> None:
    population = synthetic(Synthetic(users=200, items=60, mean=12, seed=3))
    split, acting = leave_one_out(population, seed=1), FMFLDP(Channel(*stages), factors=3)  # type: ignore[arg-type]
    table = {"item": 0.3 * Rng.of(5).normal(60, 3)}
    totals = []
    for fused in (True, False):
        simulator = Simulator(split, fused=fused)
        simulator.begin(acting, Rng.of(0))
        everyone = simulator.available()
        cohort = Cohort(everyone, "all", len(everyone), len(everyone))
        totals.append(simulator.collect(acting, table, cohort, Rng.of(7), 1))
    torch.testing.assert_close(totals[0].total.sum["item"], totals[1].total.sum["item"], rtol=1e-4, atol=1e-4)
    assert totals[0].bytes_up == totals[1].bytes_up


def test_an_upload_of_a_hundred_reports_is_small() -> None:
    split = leave_one_out(synthetic(Synthetic(users=50, items=400, mean=12)), seed=1)
    acting, simulator = FMFLDP(), Simulator(split)
    simulator.begin(acting, Rng.of(0))
    everyone = simulator.available()
    cohort = Cohort(everyone, "all", len(everyone), len(everyone))
    table = acting.init_shared(simulator.catalogue, Rng.of(0))
    got = simulator.collect(acting, table, cohort, Rng.of(1), 1)
    assert got.bytes_up / len(everyone) <= 450
    assert got.bytes_down == 2 * 400 * 5 * 4 * len(everyone), "a table to work with, and one to rank with"


def improved(**fields: object) -> FMFLDP:
    return FMFLDP(decoder="improved", **fields)  # type: ignore[arg-type]


def test_what_the_improved_server_sends_makes_reports_say_whether_and_in_which_direction() -> None:
    """Nearly every entry is projected to ±1: the sign of 2p − 1, times that of the person's taste."""
    acting, rng = improved(factors=3), np.random.default_rng(4)
    split = everything(synthetic(Synthetic(users=80, items=60, mean=10, seed=2)))
    T = np.linalg.qr(np.column_stack([np.ones(60), rng.normal(size=(60, 2))]))[0][:, 1:] * math.sqrt(60)
    table = {"item": torch.from_numpy(acting.scale * np.column_stack([np.ones(60), DELTA * T])).float()}
    right = 0
    for user in range(80):
        own = split.training(user).astype(np.int64)
        held = Data(torch.from_numpy(own), torch.ones(len(own), dtype=torch.bool), torch.from_numpy(own), Catalogue(60))
        update, _ = acting.client(table, {}, acting.prepare(held, Rng.of(0)))
        said = update["item"].clamp(-1, 1).numpy()
        answer = np.where(np.isin(np.arange(60), own), 1.0, -1.0)
        taste = np.sign(T[own].sum(0))
        right += (np.abs(said[:, 0] - answer) < 1e-3).sum()
        right += (np.abs(said[:, 1:] - answer[:, None] * taste) < 1e-3).sum()
    assert right > 0.9 * 80 * 60 * 3


def served(acting: FMFLDP, shared_: dict, state: dict, mean: np.ndarray) -> tuple[dict, dict]:
    return acting.server(shared_, state, Total({"item": torch.from_numpy(5 * mean).float()}, clients=5))


def projected(columns: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Without what 1 and q explain."""
    known = np.column_stack([np.ones_like(q), q])
    return columns - known @ np.linalg.lstsq(known, columns, rcond=None)[0]


def test_the_improved_server_by_hand() -> None:
    acting, rng = improved(factors=3, regularisation=1e-6, ridge=0.1), np.random.default_rng(1)
    shared_ = acting.init_shared(Catalogue(8), Rng.of(0))
    assert torch.equal(shared_["item"], torch.full((8, 3), 1e-4)), "at first every column asks for popularity"
    state = acting.init_server(shared_)
    # Popularity: the three columns nearly agree, so that tastes are asked next.
    first = np.linspace(-0.9, 0.5, 8)[:, None] + 0.05 * rng.normal(size=(8, 3))
    shared_, state = served(acting, shared_, state, first)
    q = (1 + first.mean(1)) / 2
    noise = first.var(axis=1, ddof=1).mean() / 4
    assert noise / 3 <= (1 - RELIABLE) * q.var()
    T = shared_["item"].double().numpy()[:, 1:] / (1e-4 * DELTA)
    np.testing.assert_allclose(shared_["item"][:, 0], 1e-4, rtol=1e-6)
    np.testing.assert_allclose(T.T @ np.column_stack([np.ones(8), q, T]), 8 * np.eye(2, 4, 2), atol=1e-4)
    np.testing.assert_allclose(shared_["rank"], np.column_stack([q, 0 * T]) * math.sqrt(1e-5), rtol=1e-5)
    # Tastes, twice; popularity goes on in column 0.
    tastes = rng.uniform(-0.9, 0.9, size=(2, 8, 3))
    for one in tastes:
        shared_, state = served(acting, shared_, state, one)
    q = (1 + (first.sum(1) + tastes[:, :, 0].sum(0)) / 5) / 2
    B = projected(tastes[:, :, 1:].mean(0) / 2, q)
    T = shared_["item"].double().numpy()[:, 1:] / (1e-4 * DELTA)
    np.testing.assert_allclose(T[:, 0], B[:, 0] / np.linalg.norm(B[:, 0]) * math.sqrt(8), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(T.T @ np.column_stack([np.ones(8), q, T]), 8 * np.eye(2, 4, 2), atol=1e-4)
    shrunk = B * np.clip(1 - noise / 2 / (B**2).mean(0), 0, None)
    assert (shrunk != 0).any()
    np.testing.assert_allclose(shared_["rank"], np.column_stack([q, shrunk]) * math.sqrt(1e-5), rtol=1e-3, atol=1e-7)


def test_popularity_is_asked_until_it_stands_out_of_the_noise() -> None:
    acting, rng = improved(factors=4), np.random.default_rng(2)
    shared_ = acting.init_shared(Catalogue(50), Rng.of(0))
    state, asked = acting.init_server(shared_), []
    z = rng.uniform(-1, -0.6, size=50)
    for _ in range(30):
        asked.append(bool((shared_["item"] == shared_["item"][0, 0]).all()))
        shared_, state = served(acting, shared_, state, z[:, None] + 0.3 * rng.normal(size=(50, 4)))
    changes = sum(one != other for one, other in pairwise(asked))
    assert asked[0]
    assert asked[3], "a spread of 0.12 within noise of 0.3"
    assert not asked[-1]
    assert changes == 1
    noise = 0.3**2 / 4 / asked.count(False) * acting.regularisation / acting.ridge
    assert shared_["rank"][:, 1:].square().mean() < 0.3 * noise, "there are no tastes: what is found is noise, and goes"


@pytest.mark.parametrize("items", [1, 2, 3, 4, 5, 6])
def test_fewer_items_than_factors(items: int) -> None:
    acting = improved(factors=5)
    shared_ = acting.init_shared(Catalogue(items), Rng.of(0))
    state = acting.init_server(shared_)
    rng = np.random.default_rng(items)
    for _ in range(4):
        shared_, state = served(acting, shared_, state, rng.uniform(-1, 1, size=(items, 1)) + np.zeros((items, 5)))
        assert {name: tuple(value.shape) for name, value in shared_.items()} == dict.fromkeys(shared_, (items, 5))
        assert all(bool(torch.isfinite(value).all()) for value in (*shared_.values(), *state.values()))


def test_where_padding_stands_changes_nothing() -> None:
    acting, table = improved(factors=3), {"item": 0.3 * Rng.of(5).normal(9, 3)}
    items = torch.tensor([[4, 2, 4, 7], [2, 4, 4, 7]])
    valid = torch.tensor([[False, True, True, True], [True, True, False, True]])
    update, _ = train_many(acting, table, {}, {"items": items, "valid": valid})
    plain, _ = torch.func.vmap(acting.client, in_dims=(None, None, 0))(table, {}, {"items": items, "valid": valid})
    torch.testing.assert_close(update["item"].dense(), plain["item"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_of_the_same_reports_the_improved_server_makes_more() -> None:
    split = leave_one_out(synthetic(Synthetic(users=3000, items=150, mean=15, factors=4, seed=5)), seed=1)
    found = {}
    for name, acting in {"improved": improved(), "published": FMFLDP(decoder="published")}.items():
        fitted = fit(acting, Simulator(split), rounds=12, seed=2, evaluate_every=12)
        found[name] = fitted.metrics["hr@10"]
    popularity = Popularity().trained(split.histories())
    found["popularity"] = measure(split, popularity, (10,)).metrics["hr@10"]
    assert found["improved"] > found["popularity"] + 0.03 > found["published"], found

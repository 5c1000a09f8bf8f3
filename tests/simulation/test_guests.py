"""Clients that never train: they adapt to what they bring, or start afresh, and teach nobody anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from homebody.core import Batch, Data, Tree
from homebody.data import Population, load
from homebody.data.partitions import split
from homebody.data.population import Impressions
from homebody.data.splits import Split
from homebody.evaluation import Block, questions, summarise
from homebody.methods.baselines import Popularity
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.ials import IALS
from homebody.methods.pfedrec import PFedRec
from homebody.rng import Rng
from homebody.simulation import Simulator, clients
from homebody.training import Trained, fit

SMALL = {
    "fedmf": FedMF(factors=4, item_rate=1.0),
    "pfedrec": PFedRec(factors=4, item_rate=1.0),
    "fedials": FedIALS(factors=4),
}
FEDERATED = pytest.mark.parametrize("name", SMALL)
WAYS = pytest.mark.parametrize("way", ["held-out-users", "cold-users", "cold-items", "cold-both", "ratio"])


@pytest.fixture(scope="module")
def population() -> Population:
    return load("synthetic:users=40,items=50,mean=14")


def changed(population: Population, who: np.ndarray) -> Population:
    """The same people, but what these have is numbered the other way round."""
    inside = np.repeat(who, population.lengths)
    items = np.where(inside, population.n_items - 1 - population.items, population.items).astype(np.int32)
    return replace(population, items=items)


def trained(method: object, done: Split, rounds: int = 2, **options: object) -> Trained:
    return fit(method, Simulator(done, **options), rounds=rounds, seed=1, evaluate_every=rounds)  # type: ignore[arg-type]


def client(done: Split, user: int) -> Data:
    """What this user's device holds, without padding; strict."""
    items = torch.from_numpy(done.training(user).astype(np.int64))
    avoided = np.union1d(done.training(user), done.absent).astype(np.int64)
    return Data(items, torch.ones(len(items), dtype=torch.bool), torch.from_numpy(avoided), Simulator(done).catalogue)


@FEDERATED
@pytest.mark.parametrize("way", ["held-out-users", "cold-users"])
def test_guests_never_train_and_change_nothing(population: Population, name: str, way: str) -> None:
    done = split(population, way, seed=3)
    other = split(changed(population, ~done.learn), way, seed=3)
    assert np.array_equal(done.learn, other.learn)
    guests = np.flatnonzero(~done.learn)
    assert not np.array_equal(done.items, other.items)
    assert not set(guests) & set(Simulator(done).available().tolist())
    one, two = trained(SMALL[name], done), trained(SMALL[name], other)
    for key, value in one.shared.items():
        assert torch.equal(value, two.shared[key])
    if (name, way) != ("fedials", "cold-users"):  # who has nothing likes everything alike there
        assert one.evaluated.metrics != two.evaluated.metrics
    state = one.runtime.state()
    assert not state["local/held"][torch.from_numpy(guests)].any()
    assert state["local/held"].sum() == len(done.learn) - len(guests)


@FEDERATED
def test_a_guest_ranks_with_what_it_adapted_to(population: Population, name: str) -> None:
    method = SMALL[name]
    done = split(population, "held-out-users", seed=3)
    fitted = trained(method, done)
    everything = torch.arange(done.n_items)
    rng = Rng.of(1, "train").fold("clients")
    adapting = 0
    for user in done.asked().tolist():
        data = client(done, user)
        fresh = method.init_local(fitted.shared, rng.fold("local").fold(user))
        batch = method.prepare(data, rng.fold("adapt").fold(user))
        adapted = method.adapt(fitted.shared, fresh, batch)
        scores = method.score(fitted.shared, adapted, data, everything)
        told = dict(fitted.ranked(user, done.n_items))
        assert set(told) == set(range(done.n_items)) - set(population.history(user).tolist())
        assert told == {item: pytest.approx(float(scores[item]), rel=1e-4, abs=1e-5) for item in told}
        untouched = method.score(fitted.shared, fresh, data, everything)
        adapting += not torch.allclose(scores, untouched, rtol=1e-3)
    assert adapting == (0 if name == "fedials" else len(done.asked()))  # its score is the adaptation


@FEDERATED
def test_a_user_without_history_ranks_with_a_fresh_state(population: Population, name: str) -> None:
    method = SMALL[name]
    done = split(population, "cold-users", seed=3)
    assert (done.lengths[done.asked()] == 0).all()
    fitted = trained(method, done)
    rng = Rng.of(1, "train").fold("clients")
    for user in done.asked().tolist():
        data = client(done, user)
        fresh = method.init_local(fitted.shared, rng.fold("local").fold(user))
        scores = method.score(fitted.shared, fresh, data, torch.arange(done.n_items))
        told = dict(fitted.ranked(user, done.n_items))
        assert told == {item: pytest.approx(float(scores[item]), rel=1e-4, abs=1e-5) for item in told}


@dataclass(frozen=True)
class Shy(FedMF):
    """Learns as FedMF does, and marks whoever adapted."""

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        mark = (1 + batch["label"].sum()) * torch.ones_like(local["user"])
        return {"user": 1000.0 * mark}


def test_whoever_trains_or_has_nothing_does_not_adapt(population: Population) -> None:
    done = split(population, "held-out-users", seed=3)
    fitted = trained(Shy(factors=4, item_rate=1.0), done)
    sums = fitted.shared["item"].sum(1)
    for user in range(done.n_users):
        told = dict(fitted.ranked(user, done.n_items))
        marked = {item: float(1000 * (1 + done.lengths[user]) * sums[item]) for item in told}
        if told:  # someone has everything
            assert (told == pytest.approx(marked, rel=1e-4, abs=1e-2)) == (not done.learn[user])
    cold = split(population, "cold-users", seed=3)
    told = dict(trained(Shy(factors=4, item_rate=1.0), cold).ranked(int(cold.asked()[0]), 5))
    assert all(abs(score) < 100 for score in told.values())


@WAYS
@FEDERATED
def test_each_users_result_is_the_one_computed_alone(
    population: Population, way: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = split(population, way, seed=2)
    together = trained(SMALL[name], done)
    monkeypatch.setattr(clients, "SCORES_AT_ONCE", 1)
    monkeypatch.setattr(clients, "CACHED_BYTES", 0)
    alone = Simulator(done)
    alone.begin(SMALL[name], Rng.of(1, "train").fold("clients"))
    alone.load_state(together.runtime.state())
    found = alone.evaluate(SMALL[name], together.shared)
    assert found.metrics == pytest.approx(together.metrics, abs=0.01)
    expected = together.evaluated.per_user
    assert torch.equal(found.per_user["user"], expected["user"])
    assert found.per_user["user"].tolist() == np.flatnonzero(done.sizes("test")).tolist()
    off = (found.per_user["full/rank"] != expected["full/rank"]).sum()
    assert off <= 1  # should a tie fall apart by rounding


def test_evaluation_leaves_no_trace_and_repeats_itself(population: Population) -> None:
    done = split(population, "held-out-users", seed=3)
    fitted = trained(SMALL["fedmf"], done)
    again = fitted.runtime.evaluate(fitted.method, fitted.shared)
    assert again.metrics == fitted.metrics
    every, seldom = (
        fit(SMALL["fedmf"], Simulator(done), rounds=3, seed=1, evaluate_every=n, select="valid/auc") for n in (1, 3)
    )
    last = every.runtime.evaluate(every.method, every.shared) if every.chosen == 3 else None
    assert last is None or last.metrics == seldom.metrics


def by_hand(done: Split, scores: np.ndarray) -> dict[str, float]:
    users = done.asked()
    block = Block(users, torch.from_numpy(scores[users].astype(np.float32)), questions(done, users))
    return summarise([block]).metrics


def test_popularity_counts_what_those_who_train_have(population: Population) -> None:
    done = split(population, "held-out-users", seed=3)
    count = np.zeros(done.n_items)
    for user in np.flatnonzero(done.learn):
        np.add.at(count, done.training(user), 1)
    score = Popularity().trained(done.histories())
    assert score(np.array([0, 1]), torch.arange(done.n_items)).tolist() == [count.tolist()] * 2
    everyone = np.bincount(done.histories().items, minlength=done.n_items)
    assert not np.array_equal(count, everyone)


def test_ials_places_guests_by_what_they_have_and_learns_nothing_from_them(population: Population) -> None:
    done = split(population, "held-out-users", seed=3)
    other = split(changed(population, ~done.learn), "held-out-users", seed=3)
    everything, members, guests = torch.arange(done.n_items), np.flatnonzero(done.learn), np.flatnonzero(~done.learn)
    method = IALS(factors=4, regularisation=1.0, scaling=0.0)  # as FedIALS has them
    one, two = (method.trained(each.histories(), seed=1, rounds=3) for each in (done, other))
    assert torch.equal(one(members, everything), two(members, everything))
    assert not torch.allclose(one(guests, everything), two(guests, everything), rtol=1e-3)
    # FedIALS walks the same way, and its guests solve the same least squares.
    fitted = trained(FedIALS(factors=4), done, rounds=3)
    scores = one(np.arange(done.n_users), everything)
    for user in guests.tolist():
        told = dict(fitted.ranked(user, done.n_items))
        assert told == {item: pytest.approx(float(scores[user, item]), rel=1e-2, abs=1e-3) for item in told}
    metrics = by_hand(done, scores.numpy())
    assert fitted.metrics["full/ndcg@10"] == pytest.approx(metrics["full/ndcg@10"], abs=0.02)


def test_cutoffs_and_slices_are_measured(population: Population) -> None:
    done = split(population, "ratio", seed=3)
    found = trained(SMALL["fedmf"], done, cutoffs=[1, 10, 30], slices=["-12", "12-"])
    names = {name.rpartition("@")[2] for name in found.metrics if "@" in name}
    assert names == {"1", "10", "30"}
    short, long = (population.lengths < 12)[done.asked()], (population.lengths >= 12)[done.asked()]
    tested = done.sizes("test")[done.asked()] > 0
    counts = [(short & tested).sum(), (long & tested).sum()]
    mixed = np.average([found.metrics["-12/full/ndcg@30"], found.metrics["12-/full/ndcg@30"]], weights=counts)
    assert mixed == pytest.approx(found.metrics["full/ndcg@30"])
    assert "valid/-12/auc" in found.metrics


def with_impressions(population: Population) -> Population:
    """Everyone but the last is shown two of their own items among ten others, twice."""
    generator = np.random.default_rng(0)
    users = np.repeat(np.arange(population.n_users - 1), 2)
    items = np.stack([generator.permutation(population.n_items)[:12] for _ in users])
    clicked = np.zeros(items.shape, dtype=np.bool_)
    clicked[:, 3] = clicked[::3, 7] = True
    indptr = np.arange(len(users) + 1) * 12
    return replace(population, impressions=Impressions(users, indptr, items.ravel().astype(np.int32), clicked.ravel()))


@FEDERATED
def test_impressions_are_asked_and_never_learnt_from(population: Population, name: str) -> None:
    shown = with_impressions(population)
    done = split(shown, "impressions")
    found = trained(SMALL[name], done, cutoffs=[1, 10])
    assert found.evaluated.per_user["user"].tolist() == list(range(39))
    assert not [metric for metric in found.metrics if "full/" in metric]
    assert "valid/auc" in found.metrics
    assert shown.impressions is not None
    ranks = []
    for user in range(39):
        one, runtime = np.array([user]), found.runtime
        assert isinstance(runtime, Simulator)
        everything = torch.arange(done.n_items)
        scores = runtime._scores(found.method, found.shared, one, runtime._data(one), everything)[0].tolist()
        number = 2 * user + 1
        items = shown.impressions.items[12 * number : 12 * number + 12].tolist()
        flags = shown.impressions.clicked[12 * number : 12 * number + 12].tolist()
        wanted = [item for item, flag in zip(items, flags, strict=True) if flag]
        others = [item for item, flag in zip(items, flags, strict=True) if not flag]
        ranks.append(min(sum(scores[other] >= scores[item] for other in others) for item in wanted))
    assert found.evaluated.per_user["rank"].tolist() == ranks
    given = shown.impressions
    first = Impressions(given.users[:2], given.indptr[:3], given.items[:24], given.clicked[:24])
    fewer = trained(SMALL[name], split(replace(shown, impressions=first), "impressions"), cutoffs=[1, 10])
    assert all(torch.equal(value, fewer.shared[key]) for key, value in found.shared.items())

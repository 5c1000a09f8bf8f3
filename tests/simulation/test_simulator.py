"""The simulator: many clients at once, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from homebody.core import Batch, Catalogue, Cohort, Collected, Data, Method, Rows, Total, Tree, Update
from homebody.data import Population, load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel, Stage
from homebody.rng import Rng
from homebody.simulation import Simulator, clients, simulator
from homebody.simulation import states as stores
from homebody.training import fit

SMALL = {
    "fedmf": FedMF(factors=4, item_rate=1.0),
    "pfedrec": PFedRec(factors=4, item_rate=1.0),
    "fedials": FedIALS(factors=4),
}
FEDERATED = pytest.mark.parametrize("name", SMALL)


@dataclass(frozen=True)
class Counts(Method):
    """How often each item is in a training history, who was asked, and one number a client keeps."""

    uplink: Channel = Channel()

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"count": torch.zeros(catalogue.n_items)}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"rounds": torch.zeros(()), "loss": torch.zeros(())}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"index": torch.where(data.valid, data.items, -1)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        ones = torch.ones_like(batch["index"], dtype=torch.float32)
        update = {"count": Rows(batch["index"], ones, len(shared["count"])), "people": torch.ones(3)}
        return update, {"rounds": local["rounds"] + 1, "loss": (batch["index"] >= 0).sum().float()}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {"count": total.sum["count"]}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: torch.Tensor) -> torch.Tensor:
        return shared["count"][items] + local["rounds"]


def people(*histories: Sequence[int], n_items: int) -> Split:
    """A split of hand-made histories: the last item is for test, the one before for validation."""
    indptr = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    return leave_one_out(Population("toy", indptr, items, n_items=n_items), how="latest")


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load("synthetic:users=40,items=60,mean=12"))


@pytest.fixture(scope="module")
def few() -> Split:
    return leave_one_out(load("synthetic:users=12,items=50,mean=9"))


def begun(method: Method, split: Split, **options: bool) -> tuple[Simulator, Tree]:
    runtime = Simulator(split, **options)
    runtime.begin(method, Rng.of(0, "clients"))
    return runtime, method.init_shared(runtime.catalogue, Rng.of(0, "shared"))


def collected(
    runtime: Simulator, method: Method, shared: Tree, users: Sequence[int], rng: Rng, step: int = 1
) -> Collected:
    cohort = Cohort(np.array(users), "fixed", len(users), len(runtime.available()))
    return runtime.collect(method, shared, cohort, rng, step)


def a_round(runtime: Simulator, method: Method, shared: Tree, cohort: Sequence[int], step: int) -> Tree:
    """A round for these clients, and the server's step."""
    got = collected(runtime, method, shared, cohort, Rng.of(0, "round", step), step)
    return method.server(shared, method.init_server(shared), got.total)[0]


def liked(runtime: Simulator, method: Method, shared: Tree, user: int) -> dict[int, float]:
    """What a client would tell its owner of every item it does not have: its state, as anyone can see it."""
    return dict(runtime.recommend(method, shared, user, k=runtime.catalogue.n_items))


def close(left: Tree, right: Tree, tolerance: float = 1e-5) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[name], right[name], rtol=tolerance, atol=tolerance) for name in left
    )


def copied(tree: Tree) -> Tree:
    return {name: value.clone() for name, value in tree.items()}


def same(left: Tree, right: Tree) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_round_by_hand() -> None:
    split = people([0, 1, 2, 3], [1, 4, 0], [1, 2], n_items=5)
    method = Counts()
    runtime, shared = begun(method, split)
    got = collected(runtime, method, shared, [0, 1, 2], Rng.of(0))
    assert got.total.sum["count"].tolist() == [1.0, 3.0, 1.0, 0.0, 0.0]
    assert got.total.sum["people"].tolist() == [3.0, 3.0, 3.0]
    assert got.total.clients == 3
    assert got.bytes_up == 5 * (4 + 4) + 3 * 12  # five rows of an index and a number, three dense vectors
    assert got.bytes_down == 3 * 5 * 4
    assert got.loss == pytest.approx(5 / 3)
    alone = collected(runtime, method, shared, [1], Rng.of(0), 2)
    assert alone.total.sum["count"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert (alone.bytes_up, alone.bytes_down, alone.total.clients) == (8 + 12, 20, 1)
    rounds = [liked(runtime, method, {"count": torch.zeros(5)}, user) for user in range(3)]
    assert [next(iter(scores.values())) for scores in rounds] == [1.0, 2.0, 1.0]


def test_bytes_of_the_methods_by_hand() -> None:
    """Two training items of four; twenty negatives for each touch the other two, all but surely."""
    split = people([0, 1, 2, 3], n_items=4)
    for method, up, down in (
        (FedMF(factors=2, negatives=20), 4 * (4 + 2 * 4), 4 * 2 * 4 + 2 * 4),
        (PFedRec(factors=2, negatives=20), 4 * (4 + 2 * 4), 4 * 2 * 4 + 3 * 4),
        (FedIALS(factors=2), 2 * 2 * 4 + 2 * (4 + (2 + 3) * 4), 4 * 2 * 4),
    ):
        runtime, shared = begun(method, split)
        got = collected(runtime, method, shared, [0], Rng.of(0))
        assert (got.bytes_up, got.bytes_down) == (up, down), method


@FEDERATED
def test_a_cohort_sends_the_sum_of_what_its_clients_would_send_alone(split: Split, name: str) -> None:
    method = SMALL[name]
    cohort = [3, 4, 17, 30]
    runtime, shared = begun(method, split)
    together = collected(runtime, method, shared, cohort, Rng.of(1))
    alone = []
    for user in cohort:
        own, _ = begun(method, split)
        alone.append(collected(own, method, shared, [user], Rng.of(1)))
    total = {name: sum(one.total.sum[name] for one in alone) for name in together.total.sum}
    assert close(together.total.sum, total)
    assert together.bytes_up == sum(one.bytes_up for one in alone)


@FEDERATED
def test_a_simulated_client_is_the_one_the_method_describes(split: Split, name: str) -> None:
    """One client by hand, without padding, from (seed, round, user) alone."""
    method, user = SMALL[name], 7
    runtime, shared = begun(method, split)
    got = collected(runtime, method, shared, [user], Rng.of(3))
    items = torch.from_numpy(split.training(user).astype(np.int64))
    data = Data(items, torch.ones(len(items), dtype=torch.bool), items.sort().values, runtime.catalogue)
    local = method.init_local(shared, Rng.of(0, "clients").fold("local").fold(user))
    update, local = method.client(shared, local, method.prepare(data, Rng.of(3).fold(user)))
    dense = {key: value.dense() if isinstance(value, Rows) else value for key, value in update.items()}
    assert close(got.total.sum, dense)
    everything = torch.arange(60)
    scores = method.score(shared, local, data, everything)
    for item, score in liked(runtime, method, shared, user).items():
        assert score == pytest.approx(float(scores[item]), rel=1e-4, abs=1e-5)


@FEDERATED
def test_fused_and_plain_give_the_same_numbers(split: Split, name: str) -> None:
    method = replace(SMALL[name], **({} if name == "fedials" else {"batch_size": 16, "epochs": 2}))
    fused = fit(method, Simulator(split), rounds=3, seed=2)
    plain = fit(method, Simulator(split, fused=False), rounds=3, seed=2)
    assert close(fused.shared, plain.shared, 1e-4)
    for metric, value in fused.metrics.items():
        assert value == pytest.approx(plain.metrics[metric], abs=0.03)


@FEDERATED
@pytest.mark.parametrize("buckets", ["one bucket", "a bucket for each length"])
def test_neither_chunks_nor_buckets_change_the_numbers(
    few: Split, name: str, buckets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = SMALL[name]
    whole = fit(method, Simulator(few), rounds=2, evaluate_every=2)
    monkeypatch.setattr(clients, "SAMPLES_AT_ONCE", 40)
    monkeypatch.setattr(simulator, "SAMPLES_AT_ONCE", 40)
    monkeypatch.setattr(clients, "SCORES_AT_ONCE", 150)
    monkeypatch.setattr(clients, "CACHED_BYTES", 0)
    if buckets != "one bucket":
        monkeypatch.setattr(stores, "WASTE", 0.0)
        monkeypatch.setattr(stores, "SMALL", 0)
    parts = fit(method, Simulator(few), rounds=2, evaluate_every=2)
    assert close(whole.shared, parts.shared)
    assert parts.metrics == pytest.approx(whole.metrics, abs=0.1)  # one of twelve people, should a tie fall apart
    assert parts.evaluated.per_user["user"].tolist() == list(range(12))
    for user in range(12):
        assert dict(parts.ranked(user, 50)) == pytest.approx(dict(whole.ranked(user, 50)), rel=1e-3, abs=1e-4)


@FEDERATED
def test_the_same_seed_gives_the_same_bits_and_another_does_not(split: Split, name: str) -> None:
    first = fit(SMALL[name], Simulator(split), rounds=2, seed=1)
    again = fit(SMALL[name], Simulator(split), rounds=2, seed=1)
    other = fit(SMALL[name], Simulator(split), rounds=2, seed=2)
    assert same(first.shared, again.shared)
    assert first.metrics == again.metrics
    assert first.ranked(3) == again.ranked(3)
    assert not close(first.shared, other.shared)


@FEDERATED
def test_absent_clients_keep_their_state_bit_for_bit(split: Split, name: str) -> None:
    method = SMALL[name]
    runtime, start = begun(method, split)
    shared = a_round(runtime, method, start, range(40), 1)
    before = [liked(runtime, method, start, user) for user in range(40)]
    cohort = [2, 3, 11, 39]
    for step in (2, 3):
        shared = a_round(runtime, method, shared, cohort, step)
    after = [liked(runtime, method, start, user) for user in range(40)]
    changed = [user for user in range(40) if before[user] != after[user]]
    assert changed == ([] if name == "fedials" else cohort)  # FedIALS' clients keep nothing to change


@FEDERATED
def test_newcomers_and_regulars_may_meet_in_a_cohort(split: Split, name: str) -> None:
    """Each leaves the round as if the others were not there."""
    method = SMALL[name]
    runtime, start = begun(method, split)
    apart, _ = begun(method, split)
    shared = a_round(runtime, method, start, [4, 5, 6, 20], 1)
    assert close(shared, a_round(apart, method, start, [4, 5, 6, 20], 1), 1e-6)
    a_round(runtime, method, shared, [5, 6, 7, 21], 2)
    for user in (5, 6, 7, 21):
        a_round(apart, method, shared, [user], 2)
    for user in (4, 5, 6, 7, 20, 21, 30):
        assert liked(runtime, method, start, user) == pytest.approx(liked(apart, method, start, user), rel=1e-5)


@FEDERATED
def test_partial_participation_trains_and_evaluates_everyone(split: Split, name: str) -> None:
    fitted = fit(SMALL[name], Simulator(split), rounds=8, cohort=6)
    again = fit(SMALL[name], Simulator(split), rounds=8, cohort=6)
    assert fitted.metrics == again.metrics
    assert len(fitted.evaluated.per_user["user"]) == 40


def test_a_newcomer_starts_from_the_initial_score_function_and_the_current_table(split: Split) -> None:
    method = SMALL["pfedrec"]
    runtime, start = begun(method, split)
    shared = start
    for step in (1, 2):
        shared = a_round(runtime, method, shared, range(20), step)
    assert not torch.equal(shared["item"], start["item"])
    scores = shared["item"] @ start["weight"] + start["bias"]
    told = liked(runtime, method, shared, 25)
    assert told == {item: pytest.approx(float(scores[item]), rel=1e-5) for item in told}
    joined = collected(runtime, method, shared, [25], Rng.of(9), 3)
    fresh, _ = begun(method, split)
    first = collected(fresh, method, shared, [25], Rng.of(9))
    assert torch.equal(joined.total.sum["item"], first.total.sum["item"])


def test_a_pfedrec_client_ranks_with_the_table_it_last_trained_from(split: Split) -> None:
    method = SMALL["pfedrec"]
    runtime, start = begun(method, split)
    shared = a_round(runtime, method, start, range(40), 1)
    before = liked(runtime, method, shared, 8)
    for step in (2, 3):
        shared = a_round(runtime, method, shared, [0, 1, 2], step)
    assert liked(runtime, method, shared, 8) == before
    latest = FedMF(factors=4, item_rate=1.0)
    other, start = begun(latest, split)
    shared = a_round(other, latest, start, range(40), 1)
    assert liked(other, latest, shared, 8) != liked(other, latest, a_round(other, latest, shared, [0], 2), 8)


def test_tables_that_nobody_trained_from_last_are_dropped(split: Split) -> None:
    method = SMALL["pfedrec"]
    runtime, shared = begun(method, split)

    def bases() -> set[int]:
        return {int(name.split("/")[1]) for name in runtime.state() if name.startswith("base/")}

    for step, cohort, kept in (
        (1, range(40), {1}),
        (2, [0, 1], {1, 2}),
        (3, [0], {1, 2, 3}),
        (4, [0, 1], {1, 4}),
        (5, range(40), {5}),
    ):
        shared = a_round(runtime, method, shared, cohort, step)
        assert bases() == kept


@FEDERATED
@pytest.mark.parametrize("cohorts", [[range(40)] * 4, [[1, 2, 3], [4, 5], [1, 4], range(40)]])
def test_a_state_that_was_taken_stays_as_it_was_and_can_be_gone_back_to(
    split: Split, name: str, cohorts: list[Sequence[int]]
) -> None:
    method = SMALL[name]
    runtime, shared = begun(method, split)
    shared = a_round(runtime, method, shared, range(40), 1)
    shared = a_round(runtime, method, shared, cohorts[0], 2)
    taken = runtime.state()
    before, shared_before = copied(taken), copied(shared)
    then = shared
    for step, cohort in enumerate(cohorts[1:], 3):
        then = a_round(runtime, method, then, cohort, step)
    assert same(taken, before)
    assert same(shared, shared_before)

    back = Simulator(split)
    back.begin(method, Rng.of(0, "clients"))
    back.load_state(taken)
    again = shared
    for step, cohort in enumerate(cohorts[1:], 3):
        again = a_round(back, method, again, cohort, step)
    assert same(again, then)
    assert same(back.state(), runtime.state())
    assert same(taken, before)
    for user in (0, 1, 4, 30):
        assert liked(back, method, again, user) == liked(runtime, method, then, user)


@FEDERATED
def test_a_phase_begins_with_clients_that_hold_nothing(split: Split, name: str) -> None:
    method = SMALL[name]
    runtime, shared = begun(method, split)
    fresh = liked(runtime, method, shared, 3)
    a_round(runtime, method, shared, range(40), 1)
    runtime.begin(method, Rng.of(0, "clients"))
    assert liked(runtime, method, shared, 3) == fresh


@FEDERATED
def test_someone_without_training_items_takes_no_part_and_is_still_served(name: str) -> None:
    split = people([0, 1, 2, 3], [], [4, 1], [5, 2, 0, 1], n_items=7)
    assert split.lengths.tolist() == [2, 0, 2, 2]
    runtime = Simulator(split)
    assert runtime.available().tolist() == [0, 2, 3]
    fitted = fit(SMALL[name], runtime, rounds=3)
    assert fitted.evaluated.per_user["user"].tolist() == [0, 3]
    assert len(fitted.ranked(1, k=20)) == 7
    assert {item for item, _ in fitted.ranked(2, k=20)} == {0, 2, 3, 5, 6}


@FEDERATED
def test_one_person_and_few_items_are_enough(name: str) -> None:
    fitted = fit(SMALL[name], Simulator(people([3, 0, 2], n_items=5)), rounds=2)
    assert fitted.metrics["full/hr@5"] == fitted.metrics["hr@5"] == 1.0
    assert {item for item, _ in fitted.ranked(0)} == {1, 4}
    everything = fit(SMALL[name], Simulator(people([3, 0, 2, 1], n_items=4)), rounds=2)
    assert everything.metrics["hr@5"] == 1.0
    assert everything.ranked(0) == []


def test_nobody_is_recommended_what_they_have(split: Split) -> None:
    fitted = fit(SMALL["fedials"], Simulator(split), rounds=1)
    for user in range(0, 40, 4):
        best = fitted.ranked(user, k=60)
        items, scores = [item for item, _ in best], [score for _, score in best]
        assert not set(items) & set(split.population.history(user).tolist())
        assert len(items) == 60 - len(split.population.history(user))
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("user", [-1, 40])
def test_recommending_to_nobody_is_an_error(split: Split, user: int) -> None:
    runtime, shared = begun(SMALL["fedmf"], split)
    with pytest.raises(HomebodyError, match="users are numbered 0 to 39"):
        runtime.recommend(SMALL["fedmf"], shared, user, 3)


def test_ranks_by_hand() -> None:
    """Scores are how often an item is in training: item 1 three times, 0 and 2 once."""
    split = people([0, 1, 2, 3], [1, 4, 0], [1, 2], n_items=5)
    fitted = fit(Counts(), Simulator(split), rounds=1)
    # User 0 is tested on 3 against 4, a tie, which counts against us; user 1 on 0 against 2 (a tie) and 3.
    assert fitted.evaluated.per_user["user"].tolist() == [0, 1]
    assert fitted.evaluated.per_user["rank"].tolist() == [1, 1]
    assert fitted.evaluated.per_user["full/rank"].tolist() == [1, 1]
    assert fitted.metrics["ndcg@10"] == pytest.approx(1 / np.log2(3))


@dataclass(frozen=True)
class Fifth(Stage):
    """Sends a fifth, draws a number for each client, and gives the server the sum five times."""

    def device(self, update: Update, rng: Rng) -> Update:
        return {"people": update["people"] / 5, "draw": rng.uniform(1)}

    def server(self, total: Total, rng: Rng) -> Total:
        return Total({name: value * 5 for name, value in total.sum.items()}, total.clients)


def test_every_update_passes_the_stages_of_the_channel(split: Split) -> None:
    method = Counts(uplink=Channel(Fifth()))
    runtime, shared = begun(method, split)
    got = collected(runtime, method, shared, [1, 2, 3], Rng.of(0))
    assert got.total.sum["people"].tolist() == pytest.approx([3.0, 3.0, 3.0])
    assert "count" not in got.total.sum
    assert got.bytes_up == 3 * (12 + 4)
    again = collected(runtime, method, shared, [1], Rng.of(0))
    other = collected(runtime, method, shared, [2], Rng.of(0))
    assert not torch.equal(again.total.sum["draw"], other.total.sum["draw"])


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "meta", ""])
def test_a_device_that_cannot_be_used_is_an_error(split: Split, device: str) -> None:
    with pytest.raises(HomebodyError, match="cannot be used here"):
        Simulator(split, device=device)


@pytest.mark.parametrize("few", [True, False])
def test_few_clients_work_on_one_thread(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    split, before = leave_one_out(load("synthetic:users=6,items=20,mean=5")), torch.get_num_threads()
    seen: list[int] = []

    class Telling(Counts):
        def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
            seen.append(torch.get_num_threads())
            return super().client(shared, local, batch)

    monkeypatch.setattr(clients, "ON_ONE_THREAD", 1000 if few else 1)
    try:
        torch.set_num_threads(2)
        fit(Telling(), Simulator(split), rounds=1, evaluate_every=0)
        assert set(seen) == {1 if few else 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@FEDERATED
def test_a_copy_holds_the_same_and_changes_nothing(name: str) -> None:
    split = leave_one_out(load("synthetic:users=60,items=40,mean=8"))
    fitted = fit(SMALL[name], Simulator(split), rounds=3, cohort=20)
    before = [fitted.ranked(user) for user in range(split.n_users)]
    other = fitted.runtime.copy(fitted.method)
    assert [other.recommend(fitted.method, fitted.shared, user, 10) for user in range(split.n_users)] == before
    fit(replace(SMALL[name], item_rate=0.5) if name != "fedials" else SMALL[name], other, rounds=2, seed=1)
    assert [fitted.ranked(user) for user in range(split.n_users)] == before

"""A few clients a round, through whole trainings: who joins late, who stays away, what is sent and what is charged."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from homebody.core import Data, Method, Tree
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import (
    Channel,
    Clip,
    Gaussian,
    GaussianRelease,
    NonPrivate,
    Sampling,
    SecureSum,
    event_from_json,
)
from homebody.progress import Round
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import Trained, choose, fit

SEED, COHORT, ROUNDS, ITEMS = 3, 8, 6, 60
TRAIN = Rng.of(SEED, "train")
METHOD = PFedRec(factors=4, item_rate=1.0)


@cache
def split() -> Split:
    return leave_one_out(load(f"synthetic:users=40,items={ITEMS},mean=12"))


@cache
def trained(rounds: int) -> Trained:
    return fit(METHOD, Simulator(split()), rounds=rounds, cohort=COHORT, seed=SEED, evaluate_every=0)


def before(number: int) -> Tree:
    """What the server held when this round began."""
    return (
        METHOD.init_shared(split().catalogue("cpu"), TRAIN.fold("shared"))
        if number == 1
        else trained(number - 1).shared
    )


def cohorts() -> list[set[int]]:
    everyone = Simulator(split()).available()
    return [set(choose(everyone, COHORT, TRAIN.fold("cohort", one)).users.tolist()) for one in range(1, ROUNDS + 1)]


def data(user: int) -> Data:
    items = torch.from_numpy(split().training(user).astype(np.int64))
    return Data(items, torch.ones(len(items), dtype=torch.bool), items.sort().values, split().catalogue("cpu"))


def alone(user: int, numbers: list[int]) -> Tree:
    """This client's rounds by hand, each from the table of that round; its state after the last of them."""
    local = METHOD.init_local(before(numbers[0]), Rng.of(0))
    for number in numbers:
        batch = METHOD.prepare(data(user), TRAIN.fold("round", number).fold(user))
        local = METHOD.client(before(number), local, batch)[1]
    return local


def check_ranking(user: int, shared: Tree, local: Tree) -> None:
    scores = METHOD.score(shared, local, data(user), torch.arange(ITEMS))
    told = dict(trained(ROUNDS).ranked(user, ITEMS))
    assert len(told) == ITEMS - len(split().population.history(user))
    assert told == {item: pytest.approx(float(scores[item]), rel=1e-4, abs=1e-5) for item in told}


def test_the_initial_score_function_never_changes() -> None:
    start, end = before(1), trained(ROUNDS).shared
    assert torch.equal(start["weight"], end["weight"])
    assert torch.equal(start["bias"], end["bias"])
    assert not torch.equal(start["item"], end["item"])


def test_who_joins_in_the_last_round_starts_from_the_initial_score_function_and_the_current_table() -> None:
    *earlier, last = cohorts()
    late = last - set().union(*earlier)
    assert late
    start = before(1)
    for user in late:
        fresh = METHOD.init_local(before(ROUNDS), Rng.of(0))
        assert torch.equal(fresh["weight"], start["weight"])
        check_ranking(user, before(ROUNDS), alone(user, [ROUNDS]))


def test_who_stays_away_keeps_its_state_and_the_table_it_trained_from() -> None:
    taken = {user: [number for number, some in enumerate(cohorts(), 1) if user in some] for user in range(40)}
    away = {user: numbers for user, numbers in taken.items() if numbers and numbers[-1] < ROUNDS}
    assert {len(numbers) for numbers in away.values()} >= {1, 2}
    for user, numbers in away.items():
        check_ranking(user, before(numbers[-1]), alone(user, numbers))


def test_who_never_took_part_ranks_with_the_initial_score_function_and_the_latest_table() -> None:
    never = set(range(40)) - set().union(*cohorts())
    assert never
    shared = trained(ROUNDS).shared
    for user in never:
        check_ranking(user, shared, METHOD.init_local(shared, Rng.of(0)))


@pytest.mark.parametrize("cohort", [1, COHORT, 40])
def test_bytes_are_those_of_the_cohort(cohort: int) -> None:
    lines: list[Round] = []
    fit(METHOD, Simulator(split()), rounds=3, cohort=cohort, seed=SEED, evaluate_every=0, on_round=lines.append)
    runtime = Simulator(split())
    for line in lines:
        users = choose(runtime.available(), cohort, TRAIN.fold("cohort", line.round)).users
        assert line.clients == len(users) == cohort
        assert line.bytes_down == cohort * (ITEMS * 4 + 4 + 1) * 4
        asked = [
            index
            for _, one in runtime.requests(METHOD, users, TRAIN.fold("round", line.round))
            for index in one["item"]
        ]
        rows = sum(int((index >= 0).sum()) for index in asked)
        assert line.bytes_up == rows * (4 + 4 * 4)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("cohort", [None, COHORT, 40])
def test_a_draw_amplifies_against_those_who_do_not_see_it(cohort: int | None, asks: bool) -> None:
    stages = (Clip(0.5), SecureSum(), Gaussian(1.0))
    method = FedMF(factors=2, uplink=Channel(*stages, asks_rows=asks))
    fitted = fit(method, Simulator(split()), rounds=2, cohort=cohort, seed=SEED, evaluate_every=0)
    entries = fitted.ledger.entries()
    assert [(entry.release, entry.observer) for entry in entries] == [
        (f"train/{number}", who) for number in (1, 2) for who in ("server", "clients", "public")
    ]
    drawn = Sampling() if cohort is None else Sampling("fixed", cohort, 40)
    for entry in entries:
        if entry.observer == "server":
            assert isinstance(event_from_json(entry.event), NonPrivate)
        else:
            assert event_from_json(entry.event) == GaussianRelease(1.0, "replace-one", drawn)
    assert fitted.epsilon["server"] == float("inf")
    everyone = fit(method, Simulator(split()), rounds=2, seed=SEED, evaluate_every=0).epsilon["public"]
    assert (fitted.epsilon["public"] < 0.9 * everyone) == (cohort == COHORT)


@pytest.mark.parametrize("method", [METHOD, FedMF(factors=4, item_rate=1.0)])
def test_means_divide_by_the_cohort(method: Method) -> None:
    """The server's first step is the sum of the cohort's updates over its size, not over everyone."""
    runtime = Simulator(split())
    cohort = choose(runtime.available(), COHORT, TRAIN.fold("cohort", 1))
    runtime.begin(method, TRAIN.fold("clients"))
    start = method.init_shared(runtime.catalogue, TRAIN.fold("shared"))
    total = runtime.collect(method, start, cohort, TRAIN.fold("round", 1), 1).total
    fitted = fit(method, Simulator(split()), rounds=1, cohort=COHORT, seed=SEED, evaluate_every=0)
    torch.testing.assert_close(fitted.shared["item"] - start["item"], total.sum["item"] / COHORT)

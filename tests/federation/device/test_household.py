"""The people of one device, each worked for alone: the same numbers as among thousands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Rows, Tree
from homebody.data import Population
from homebody.data.partitions import leave_one_out
from homebody.federation.device.home import Home
from homebody.federation.device.household import Household, grown
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel, Clip, Laplace
from homebody.rng import DeviceRng, Rng
from homebody.simulation import Simulator


def population(*histories: list[int]) -> Population:
    lengths = [len(one) for one in histories]
    items = np.concatenate([np.array(one, dtype=np.int32) for one in histories])
    times = np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
    return Population("toy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), items, 20, times)


HISTORIES = ([0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11, 0], [12, 13, 14, 1])
ALL = leave_one_out(population(*HISTORIES), seed=2)
METHOD = PFedRec(factors=3)


@pytest.fixture
def household() -> Household:
    """The second and third of four people."""
    split = leave_one_out(population(*HISTORIES[1:3]), seed=2)
    made = Household(replace(split, numbers=np.array([1, 2])))
    made.begin(METHOD, Rng.of(1))
    return made


@pytest.fixture
def simulator() -> Simulator:
    made = Simulator(ALL)
    made.begin(METHOD, Rng.of(1))
    return made


def close(left: Tree, right: Tree) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, Rows):
            torch.testing.assert_close(value.dense(), right[name].dense(), rtol=0, atol=1e-6)
        else:
            torch.testing.assert_close(value, right[name], rtol=0, atol=1e-6)


def test_a_person_alone_sends_what_they_send_among_others(household: Household, simulator: Simulator) -> None:
    shared = METHOD.init_shared(simulator.catalogue, Rng.of(4))
    for user, number in ((0, 1), (1, 2)):
        update, kept = household.train(METHOD, shared, user, Rng.of(6))
        close(update, simulator.message(METHOD, shared, number, Rng.of(6)))
        assert {"weight", "bias", "item"} <= kept.keys()


def test_a_held_state_is_gone_on_from(household: Household) -> None:
    shared = METHOD.init_shared(household.catalogue, Rng.of(4))
    first, kept = household.train(METHOD, shared, 0, Rng.of(6))
    household.hold(0, kept)
    second, _ = household.train(METHOD, shared, 0, Rng.of(6))
    household.begin(METHOD, Rng.of(1))
    anew, _ = household.train(METHOD, shared, 0, Rng.of(6))
    close(anew, first)
    with pytest.raises(AssertionError):
        close(second, first)


def test_what_a_person_measures_is_theirs(household: Household, simulator: Simulator) -> None:
    """The mean over all four, put together from each alone, is the simulator's."""
    shared = METHOD.init_shared(simulator.catalogue, Rng.of(4))
    alone = []
    for number, history in enumerate(HISTORIES):
        split = leave_one_out(population(history), seed=2)
        one = Household(replace(split, numbers=np.array([number])))
        one.begin(METHOD, Rng.of(1))
        alone.append(one.measure(METHOD, shared, 0))
    whole = simulator.evaluate(METHOD, shared).metrics
    assert whole == pytest.approx({name: np.mean([one[name] for one in alone]) for name in whole}, abs=1e-9)


def test_who_has_too_little_measures_nothing() -> None:
    split = leave_one_out(population([0, 1, 2], [3]), seed=2)
    one = Household(split)
    one.begin(METHOD, Rng.of(1))
    shared = METHOD.init_shared(one.catalogue, Rng.of(4))
    assert one.measure(METHOD, shared, 1) == {}
    assert one.measure(METHOD, shared, 0) != {}


@pytest.mark.random_draws
def test_noise_is_the_systems_and_negatives_are_everybodys() -> None:
    """Fails if half of at least 50 coordinates agree by chance, each within 1e-5 or on one point of noise's grid: with
    a chance of at most 1e-3 each, that is below C(50, 25) · 1e-75 < 1e-60."""
    method = FedMF(factors=3, uplink=Channel(Clip(1.0, order=1), Laplace(1.0)))
    one = Household(ALL)
    one.begin(method, Rng.of(1))
    shared = method.init_shared(one.catalogue, Rng.of(4))
    (first, kept), (second, again) = (one.train(method, shared, 0, Rng.of(6)) for _ in range(2))
    alike = torch.isclose(first["item"], second["item"])
    assert alike.numel() >= 50
    assert alike.double().mean() < 0.5
    close(kept, again)
    assert one.stream is DeviceRng


@pytest.mark.random_draws
def test_the_systems_noise_has_the_scale_that_was_asked_for() -> None:
    """12,000 draws of Laplace noise of scale 1: their mean distance from 0 is 1, and their mean 0.

    By Chernoff's bound the first is 0.07 away with a probability of at most 2 exp(-12000 (0.07 - log 1.07)) < 2e-12,
    and the second 0.1 away with at most 2 exp(-12000 · 0.1² / 4 · 0.99) < 4e-13.
    """
    method = FedMF(factors=3, uplink=Channel(Clip(1e-9, order=1), Laplace(1.0)))
    one = Household(ALL)
    one.begin(method, Rng.of(1))
    shared = method.init_shared(one.catalogue, Rng.of(4))
    drawn = torch.stack([one.train(method, shared, 0, Rng.of(6))[0]["item"] for _ in range(200)])
    assert drawn.numel() >= 12_000
    assert float(drawn.abs().mean()) == pytest.approx(1.0, abs=0.07)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=0.1)


def test_states_grow_with_the_tables() -> None:
    state: dict[str, Any] = {"item": Rows(torch.tensor([3]), torch.ones(1, 2), 4), "weight": torch.ones(2)}
    found = grown(state, {"item": torch.zeros(9, 2), "weight": torch.zeros(5)})
    assert (found["item"].size, found["item"].index.tolist()) == (9, [3])
    assert found["weight"].tolist() == [1.0, 1.0]
    assert grown({"own": Rows(torch.tensor([0]), torch.ones(1), 4)}, {})["own"].size == 4


@pytest.mark.parametrize("measures", [True, False])
def test_a_device_draws_the_order_of_ties_where_the_server_says_so(tmp_path: Path, measures: bool) -> None:
    """Whether or not it measures, and whatever order its interactions came in."""
    found = []
    for name, order in (("one", list(range(12))), ("other", [5, 9, 2, 11, 0, 7, 1, 3, 10, 8, 4, 6])):
        with Home.create(tmp_path / name, server="127.0.0.1:9092") as home:
            ann = home.people.add("ann")
            home.items.add(0, [(f"item-{item:02}", "") for item in range(12)])
            for item in order:
                home.history.append(ann, f"item-{item:02}", time=item // 6)
            asked = {"protocol": "strict", "seed": 3, "negatives": 2, "cutoffs": [10]}
            described = {**asked, "first": 0, "measures": measures, "held_out": "latest-random"}
            split = Household.of(home, [ann], described, 12).split
            found.append([split.part(0, part).tolist() for part in ("train", "valid", "test")])
    assert found[0] == found[1]
    items = [item for part in found[0] for item in part]
    assert items != sorted(items)
    assert len(found[0][2]) == measures
    assert {item // 6 for item in items[:6]} == {0}

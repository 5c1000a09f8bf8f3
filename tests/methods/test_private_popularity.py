"""Popularity through one-bit reports: the same order as popularity's, at fmf-ldp's budget."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch.testing import assert_close

from homebody.core import Catalogue, Data, Total
from homebody.methods.baselines import PrivatePopularity
from homebody.privacy import Channel, OneBit, Shuffle, ShuffledReports, event_from_json
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import population
from homebody.training import fit

FOUR = Catalogue(n_items=4)


def _data(items: list[int], valid: list[bool]) -> Data:
    return Data(torch.tensor(items), torch.tensor(valid), torch.tensor(sorted(set(items))), FOUR)


def test_the_table_says_of_every_item_whether_it_is_there() -> None:
    """Item 0 is padding in the second place; item 3 stands there twice."""
    method, shared = PrivatePopularity(), {"taken": torch.zeros(4)}
    mine = _data([3, 0, 1, 3], [True, False, True, True])
    update, kept = method.client(shared, {}, method.prepare(mine, Rng.of(0)))
    assert update["taken"].tolist() == [-1, 1, -1, 1]
    assert kept == {}


def test_rounds_are_averaged_and_a_new_item_over_its_own_alone() -> None:
    method, shared = PrivatePopularity(), {"taken": torch.zeros(2)}
    state = method.init_server(shared)
    for first, second in ((2.0, -4.0), (6.0, 0.0)):
        shared, state = method.server(shared, state, Total({"taken": torch.tensor([first, second])}, clients=2))
    assert shared["taken"].tolist() == [2.0, -1.0]
    # As `fit` carries them over where an item has come.
    grown = {name: torch.cat([value, torch.zeros(1)]) for name, value in state.items()}
    wider = {"taken": torch.cat([shared["taken"], torch.zeros(1)])}
    shared, _ = method.server(wider, grown, Total({"taken": torch.tensor([4.0, 4.0, 6.0])}, clients=2))
    assert_close(shared["taken"], torch.tensor([2.0, 0.0, 3.0]))
    assert method.score(shared, {}, _data([0], [True]), torch.tensor([2, 0])).tolist() == [3.0, 2.0]


def test_the_estimate_is_unbiased() -> None:
    """Within 4 standard errors of how many people have each item, in each of 120 entries: p = 0.008 altogether."""
    split, k, rounds = population(), 50, 8
    method = PrivatePopularity(uplink=Channel(OneBit(epsilon=2.5, k=k)))
    found = fit(method, Simulator(split), rounds=rounds, evaluate_every=0).shared["taken"].numpy()
    indptr, items = split.histories()[:2]
    owned = [np.unique(items[start:end]) for start, end in pairwise(indptr)]
    truth = 2 * np.bincount(np.concatenate(owned), minlength=split.n_items) / split.n_users - 1
    unit = split.n_items / np.tanh(1.25)
    # Each report is ±unit at one of n places, and there are users × k × rounds of them.
    error = unit / np.sqrt(split.n_items * split.n_users * k * rounds)
    assert np.abs(found - truth).max() < 4 * error
    assert np.corrcoef(found, truth)[0, 1] > 0.8


def test_it_is_charged_like_fmf_ldp() -> None:
    charged = PrivatePopularity.uplink.stages
    assert charged == Channel(OneBit(epsilon=2.5, k=100), Shuffle()).stages
    assert PrivatePopularity.about.rounds == 20
    fitted = fit(PrivatePopularity(), Simulator(population()), rounds=2, evaluate_every=0)
    by_user = {event_from_json(one.event) for one in fitted.ledger.entries() if one.unit == "user"}
    assert by_user == {ShuffledReports(2.5, 100, users=300)}
    unshuffled = PrivatePopularity(uplink=Channel(OneBit(epsilon=2.5, k=100)))
    ledger = fit(unshuffled, Simulator(population()), rounds=2, evaluate_every=0).ledger
    assert ledger.epsilon("server", delta=0.0).epsilon == 500

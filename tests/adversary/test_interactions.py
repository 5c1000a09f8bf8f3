"""What the server reads from uploads: everything, unless something keeps it from doing so."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from homebody.adversary.interactions import RULES, ItemReading, area, read_interactions
from homebody.adversary.rates import mean_interval
from homebody.core import Method
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel, Clip, Gaussian, Laplace, OneBit, SecureSum, Shuffle
from homebody.simulation import Simulator
from homebody.training import Trained, fit


def reading(method: Method, simulator: Simulator, users: int = 40, **how: int) -> ItemReading:
    fitted: Trained = fit(method, simulator, rounds=3, evaluate_every=0)
    return read_interactions(method, simulator, fitted.shared, users=users, **how)


@pytest.mark.parametrize("uplink", [Channel(), Channel(Clip(0.1)), Channel(Clip(0.1), Gaussian(z=5))])
@pytest.mark.parametrize("method", [FedMF(factors=4), PFedRec(factors=4), FedIALS(factors=4)])
def test_a_plain_message_tells_all_and_noise_of_the_server_changes_nothing(
    simulator: Simulator, method: FedMF | PFedRec | FedIALS, uplink: Channel
) -> None:
    found = reading(replace(method, uplink=uplink), simulator)
    assert len(found.auc) == 40
    assert found.auc.mean() > 0.98
    assert found.as_dict()["share_above"] > 0.9
    assert found.auc.mean() > found.popularity.mean() + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedMF(factors=4), PFedRec(factors=4)])
def test_noise_on_the_device_keeps_it_from_the_server(simulator: Simulator, method: FedMF | PFedRec) -> None:
    noisy = replace(method, uplink=Channel(Clip(1.0, order=1), Laplace(b=2)))
    bits = replace(method, uplink=Channel(OneBit(epsilon=1.0, k=5)))
    for hidden in (noisy, bits):
        _, low, high = mean_interval(reading(hidden, simulator, users=200).auc)
        assert low < 0.53
        assert high < 0.56


def test_bits_with_little_noise_and_many_of_them_tell_again(simulator: Simulator) -> None:
    loud = FedMF(factors=4, uplink=Channel(OneBit(epsilon=12.0, k=5000)))
    assert reading(loud, simulator).auc.mean() > 0.9


@pytest.mark.parametrize("uplink", [Channel(Clip(0.1), SecureSum()), Channel(OneBit(epsilon=9.0, k=3000), Shuffle())])
def test_a_sum_tells_far_less_than_a_message(simulator: Simulator, uplink: Channel) -> None:
    method = FedMF(factors=4, uplink=uplink)
    found = reading(method, simulator, cohort=100)
    assert "the sum over a cohort of 100" in found.reads
    assert found.auc.mean() < 0.8
    alone = reading(replace(method, uplink=Channel(*uplink.stages[:-1])), simulator)
    assert alone.reads.startswith("each client's own message")
    assert alone.auc.mean() > found.auc.mean() + 0.15


def test_a_sum_over_two_tells_much(simulator: Simulator) -> None:
    """The attacker's own device and one other: less hides in a small cohort."""
    found = reading(FedIALS(factors=4, uplink=Channel(SecureSum())), simulator, cohort=2)
    assert len(found.auc) == 1
    assert found.auc[0] > 0.9


def test_it_keeps_nothing_and_repeats_itself(simulator: Simulator) -> None:
    method = PFedRec(factors=4)
    shared = fit(method, simulator, rounds=2, evaluate_every=0).shared
    before = {name: value.clone() for name, value in simulator.state().items()}
    steps: list[tuple[int, int]] = []
    first = read_interactions(method, simulator, shared, users=5, seed=3, step=lambda *one: steps.append(one))
    again = read_interactions(method, simulator, shared, users=5, seed=3)
    other = read_interactions(method, simulator, shared, users=5, seed=4)
    assert np.array_equal(first.auc, again.auc)
    assert np.array_equal(first.popularity, again.popularity)
    assert not np.array_equal(first.popularity, other.popularity)
    assert steps[-1] == (15, 15)  # ten of its own
    after = simulator.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_area_by_hand() -> None:
    scores = np.array([0.9, 0.1, 0.5, 0.5])
    assert area(scores, np.array([0])) == 1
    assert area(scores, np.array([1])) == 0
    assert area(scores, np.array([2])) == pytest.approx(0.5)  # above one, level with one, below one
    assert area(scores, np.array([0, 2])) == pytest.approx((2 + 1.5) / 4)
    with pytest.raises(HomebodyError, match="every item"):
        area(scores, np.arange(4))


def test_rules_by_hand() -> None:
    """Two own items move up along (1, 1), three negatives down, the last row was not sent."""
    table = torch.tensor([[2.0], [1.5], [-1.0], [-1.0], [-1.0], [0.0]]) @ torch.ones(1, 2)
    sent = table.any(dim=1)
    fewer, more, far = (rule(table.double(), sent) for rule in RULES.values())
    assert fewer.argsort()[::-1][:2].tolist() == [0, 1]
    assert more.argsort()[:1].tolist() == [5]
    assert sorted(more.argsort()[::-1][:3].tolist()) == [2, 3, 4]
    assert far.argsort().tolist()[0] == 5
    assert far.argsort()[::-1][:2].tolist() == [0, 1]


def test_interval_by_hand() -> None:
    found = ItemReading("", "", "", np.array([0.5, 0.7, 0.6, 1.0]), np.zeros(4))
    _, low, high = mean_interval(found.auc)
    assert low == pytest.approx(0.7 - 1.96 * np.std([0.5, 0.7, 0.6, 1.0], ddof=1) / 2)
    assert high == pytest.approx(0.7 + 1.96 * np.std([0.5, 0.7, 0.6, 1.0], ddof=1) / 2)
    assert found.as_dict()["share_above"] == 0.25


@dataclass(frozen=True)
class Mean(FedMF):
    """Sends the mean of its rows alone."""

    def client(self, shared, local, batch):  # type: ignore[no-untyped-def]
        update, kept = super().client(shared, local, batch)
        return {"mean": update["item"].value.mean(0)}, kept


def test_what_has_no_row_for_each_item_cannot_be_read(simulator: Simulator) -> None:
    method = Mean(factors=4)
    shared = FedMF(factors=4).init_shared(simulator.catalogue, simulator._rng)
    with pytest.raises(HomebodyError, match="Mean sends nothing with a row for each item"):
        read_interactions(method, simulator, shared, users=3)
    with pytest.raises(HomebodyError, match="at least 1 user"):
        read_interactions(method, simulator, shared, users=0)

"""The noise of many devices as one draw: the same distribution, and only where nothing comes after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

from homebody.core import Cohort, Collected, Rows, Total, Update
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.privacy import Channel, Clip, Gaussian, Laplace, Ledger, OneBit, SecureSum
from homebody.privacy.stages import Stage
from homebody.progress import Round
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

NOISY = {
    "clipped": Channel(Clip(0.5, order=1), Laplace(0.2)),
    "unbounded": Channel(Laplace(0.2, unbounded=True)),
    "behind a secure sum": Channel(Clip(0.5, order=1), Laplace(0.2), SecureSum()),
}


@dataclass(frozen=True)
class Double(Stage):
    """Sends twice as much, and the server halves it."""

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: (value.dense() if isinstance(value, Rows) else value) * 2 for name, value in update.items()}

    def server(self, total: Total, rng: Rng) -> Total:
        return Total({name: value / 2 for name, value in total.sum.items()}, total.clients)


class Quieter(Laplace):
    """Someone's own device half; what its noise adds up to is not for `Laplace` to say."""

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: value.dense() + self.b / 2 for name, value in update.items()}


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load("synthetic:users=60,items=400,mean=10"))


def a_round(method: FedMF, split: Split, users: Sequence[int], seed: int = 0, *, fused: bool = True) -> Collected:
    runtime = Simulator(split, fused=fused)
    runtime.begin(method, Rng.of(0, "clients"))
    shared = method.init_shared(runtime.catalogue, Rng.of(0, "shared"))
    cohort = Cohort(np.array(users), "fixed", len(users), len(runtime.available()))
    return runtime.collect(method, shared, cohort, Rng.of(seed, "round"), 1)


def noise(channel: Channel, split: Split, users: Sequence[int], seed: int, *, fused: bool) -> torch.Tensor:
    """The released sum less the sum of the same updates without noise."""
    quiet = Channel(*(stage for stage in channel.stages if not isinstance(stage, Laplace)))
    noisy, still = (
        a_round(FedMF(factors=8, item_rate=0.01, uplink=one), split, users, seed, fused=fused).total.sum["item"]
        for one in (channel, quiet)
    )
    return (noisy - still).double().flatten()


@pytest.mark.parametrize("clients", [1, 2, 20])
@pytest.mark.parametrize("name", NOISY)
def test_both_ways_have_the_same_distribution(split: Split, name: str, clients: int) -> None:
    """3,200 sums each way: two-sample Kolmogorov–Smirnov at one in a million, moments within 5 standard errors."""
    ways = [noise(NOISY[name], split, range(clients), 5, fused=fused) for fused in (True, False)]
    assert not torch.equal(*ways)
    assert stats.ks_2samp(*(way.numpy() for way in ways)).pvalue > 1e-6
    assert stats.ks_2samp(ways[0].numpy() / 2, ways[1].numpy()).pvalue < 1e-6  # it could tell half the noise
    variance = 2 * clients * 0.2**2
    fourth = (12 * clients + 12 * clients**2) * 0.2**4
    for way in ways:
        assert abs(way.mean()) < 5 * math.sqrt(variance / len(way))
        assert abs((way**2).mean() - variance) < 5 * math.sqrt((fourth - variance**2) / len(way))


def test_the_noise_of_another_round_or_tensor_is_another(split: Split) -> None:
    first, again, other = (noise(NOISY["unbounded"], split, range(9), seed, fused=True) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 5 / math.sqrt(len(first))
    both = NOISY["unbounded"].noise_of_many({"a": torch.zeros(9), "b": torch.zeros(9)}, 3, Rng.of(0))
    assert not torch.equal(both["a"], both["b"])


@pytest.mark.parametrize("name", NOISY)
def test_devices_are_counted_as_sending_whole_tables_and_charged_alike(split: Split, name: str) -> None:
    method = FedMF(factors=3, uplink=NOISY[name])
    lines: dict[bool, list[Round]] = {True: [], False: []}
    ledgers = {True: Ledger(), False: Ledger()}
    for fused, ledger in ledgers.items():
        fit(method, Simulator(split, fused=fused), rounds=3, cohort=7, ledger=ledger, on_round=lines[fused].append)
    assert ledgers[True].entries() == ledgers[False].entries()
    for fast, plain in zip(lines[True], lines[False], strict=True):
        assert fast.bytes_up == plain.bytes_up == 7 * 400 * 3 * 4
        assert fast.bytes_down == plain.bytes_down
        assert fast.epsilon == plain.epsilon


def test_a_clip_still_bounds_each_device(split: Split) -> None:
    """With next to no noise, the sum is that of the updates as each was clipped."""
    bound = 1e-3
    clipped = a_round(FedMF(factors=4, uplink=Channel(Clip(bound, order=1))), split, range(9)).total.sum["item"]
    method = FedMF(factors=4, uplink=Channel(Clip(bound, order=1), Laplace(1e-9)))
    assert torch.allclose(a_round(method, split, range(9)).total.sum["item"], clipped, atol=1e-6)
    assert clipped.abs().sum() <= 9 * bound


def test_one_message_has_its_own_noise_in_every_coordinate(split: Split) -> None:
    method = FedMF(factors=4, uplink=NOISY["unbounded"])
    runtime = Simulator(split)
    runtime.begin(method, Rng.of(0, "clients"))
    shared = method.init_shared(runtime.catalogue, Rng.of(0, "shared"))
    message = runtime.message(method, shared, 3, Rng.of(0, "round"))["item"]
    assert message.shape == (400, 4)
    assert bool((message != 0).all())
    alone = a_round(method, split, [3], fused=False).total.sum["item"]
    torch.testing.assert_close(message, alone)


@pytest.mark.parametrize(
    ("stages", "ends"),
    [
        ((), False),
        ((Clip(1.0, order=1),), False),
        ((Clip(1.0, order=1), Laplace(1.0)), True),
        ((Clip(1.0, order=1), Laplace(1.0), SecureSum()), True),
        ((Laplace(1.0, unbounded=True),), True),
        ((Clip(1.0, order=1), Laplace(1.0), Double()), False),
        ((Double(), Laplace(1.0, unbounded=True)), True),
        ((Clip(1.0, order=1), Laplace(1.0, where="sum")), False),
        ((Clip(1.0), Gaussian(1.0)), False),
        ((OneBit(1.0),), False),
        ((Clip(1.0, order=1), Quieter(1.0)), False),
    ],
)
def test_only_noise_that_comes_last_is_drawn_at_once(stages: tuple[Stage, ...], ends: bool) -> None:
    channel = Channel(*stages)
    assert channel.ends_in_noise == Channel(*stages, asks_rows=True).ends_in_noise == ends
    if not ends:
        with pytest.raises(HomebodyError, match="does not end in noise"):
            channel.noise_of_many({"w": torch.zeros(1)}, 2, Rng.of(0))


@pytest.mark.parametrize(
    "channel", [Channel(Laplace(0.2, unbounded=True), Double()), Channel(Quieter(0.2, unbounded=True))]
)
def test_otherwise_devices_draw_their_own(split: Split, channel: Channel) -> None:
    method = FedMF(factors=4, item_rate=0.01, uplink=channel)
    ways = [a_round(method, split, range(20), fused=fused).total.sum["item"] for fused in (True, False)]
    torch.testing.assert_close(*ways, rtol=1e-4, atol=1e-5)


def test_noise_takes_its_measure_from_the_clip() -> None:
    with pytest.raises(HomebodyError, match="put it into a Channel"):
        Laplace(1.0).noise_of_many({"w": torch.zeros(1)}, 2, Rng.of(0))


def test_nobody_adds_no_noise(split: Split) -> None:
    """As where made-up people alone were drawn for a round."""
    method = FedMF(factors=4, uplink=NOISY["unbounded"])
    runtime = Simulator(split)
    runtime.begin(method, Rng.of(0, "clients"))
    shared = method.init_shared(runtime.catalogue, Rng.of(0, "shared"))
    nobody = Cohort(np.array([], dtype=np.int64), "fixed", 3, 60)
    got = runtime.collect(replace(method), shared, nobody, Rng.of(0), 1)
    assert (got.total.sum, got.bytes_up, got.bytes_down) == ({}, 0, 0)


@dataclass(frozen=True)
class Louder(SecureSum):
    """Says nothing new of itself, and changes what is sent."""

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: value * 2 for name, value in super().device(update, rng).items()}


def test_a_changed_half_after_the_noise_is_not_passed_over() -> None:
    noise = (Clip(0.5, order=1), Laplace(0.2))
    assert Channel(*noise, SecureSum()).ends_in_noise
    assert not Channel(*noise, Louder()).ends_in_noise

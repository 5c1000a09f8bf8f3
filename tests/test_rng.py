from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import vmap

from homebody.rng import DeviceRng, Rng, SystemRng, mix

DRAWS = {
    "bits": lambda rng, *shape: rng.bits(*shape),
    "uniform": lambda rng, *shape: rng.uniform(*shape),
    "normal": lambda rng, *shape: rng.normal(*shape),
    "laplace": lambda rng, *shape: rng.laplace(*shape),
    "integers": lambda rng, *shape: rng.integers(10, *shape),
}
N = 200_000
FIVE_SIGMA = 5.0
"""A normal statistic is this far off in one of two million seeds; the seeds here are fixed."""

words = st.integers(-(2**63), 2**63 - 1)


def splitmix(word: int) -> int:
    """The reference finaliser, on unsigned integers of Python."""
    word %= 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


@given(words)
def test_mix_is_splitmix64s_finaliser(word: int) -> None:
    assert int(mix(torch.tensor(word))) % 2**64 == splitmix(word)


@given(st.integers(0, 2**62), st.integers(0, 10**6))
def test_bits_are_splitmix64_started_at_the_key(seed: int, user: int) -> None:
    rng = Rng.of(seed, "train").fold(user)
    key = int(Rng(rng.key).next_key())
    expected = [splitmix(key + position * 0x9E3779B97F4A7C15) for position in range(1, 5)]
    assert [int(word) % 2**64 for word in rng.bits(4)] == expected


@pytest.mark.parametrize("draw", DRAWS)
@given(short=st.integers(0, 40), more=st.integers(0, 40), inner=st.lists(st.integers(1, 4), max_size=2))
@settings(max_examples=30, deadline=None)
def test_a_longer_draw_begins_with_the_shorter_one(draw: str, short: int, more: int, inner: list[int]) -> None:
    one, other = (DRAWS[draw](Rng.of(5, "x"), length, *inner) for length in (short, short + more))
    assert one.shape == (short, *inner)
    assert torch.equal(one, other[:short])


@pytest.mark.parametrize("draw", DRAWS)
def test_a_client_draws_the_same_alone_and_among_others(draw: str) -> None:
    users = torch.tensor([4, 0, 4_000_000_000, 17])
    rng = Rng.of(1, "train", 3)

    def twice(key: Tensor) -> Tensor:
        own = Rng(key)
        return torch.stack([DRAWS[draw](own, 6), DRAWS[draw](own, 6)])

    together = vmap(twice)(rng.fold(users).key)
    for row, user in zip(together, users.tolist(), strict=True):
        assert torch.equal(row, twice(rng.fold(user).key))


def test_a_stream_is_named_by_all_its_parts_in_order() -> None:
    names = [(0,), (1,), (0, "a"), ("a", 0), (0, "b"), (0, "ab"), (0, "a", "b"), (0, 1, 2), (0, 2, 1), (-1,)]
    keys = [int(Rng.of(*parts).key) for parts in names]
    assert len(set(keys)) == len(keys)
    assert [int(Rng.of(*parts).key) for parts in names] == keys
    assert int(Rng.of(0).fold("a").fold(3).key) == int(Rng.of(0, "a", 3).key)


def test_folding_leaves_the_stream_as_it_was() -> None:
    rng, other = Rng.of(3), Rng.of(3)
    rng.fold("below", 4)
    assert torch.equal(rng.uniform(5), other.uniform(5))


def test_privacy_noise_has_a_stream_of_its_own() -> None:
    rng = Rng.of(3).fold(torch.arange(5))
    assert not torch.isin(rng.private.key, rng.key).any()
    assert torch.equal(rng.private.key, Rng.of(3).fold(torch.arange(5)).private.key)


def test_neighbouring_keys_are_all_different() -> None:
    keys = torch.stack([Rng.of(seed, "train", number).fold(torch.arange(200)).key
                        for seed in range(5) for number in range(20)])  # fmt: skip
    assert len(keys.unique()) == keys.numel()


def uncorrelated(one: Tensor, other: Tensor) -> bool:
    """Correlation within five standard errors of none."""
    table = torch.stack([one.double().flatten(), other.double().flatten()])
    return abs(float(torch.corrcoef(table)[0, 1])) < FIVE_SIGMA / math.sqrt(table.shape[1])


def test_streams_are_independent() -> None:
    base = Rng.of(0, "train")
    users = Rng(base.fold("round", 1).key).fold(torch.arange(N)).key
    first_of_each = vmap(lambda key: Rng(key).uniform())(users)
    next_round = vmap(lambda key: Rng(key).uniform())(base.fold("round", 2).fold(torch.arange(N)).key)
    in_a_row = base.uniform(N)
    pairs = {
        "one stream and the next user's": (base.fold(1).uniform(N), base.fold(2).uniform(N)),
        "one round and the next": (first_of_each, next_round),
        "neighbouring users": (first_of_each[:-1], first_of_each[1:]),
        "neighbouring positions": (in_a_row[:-1], in_a_row[1:]),
        "one draw and the next": (base.uniform(N), base.uniform(N)),
        "one seed and the next": (Rng.of(0).uniform(N), Rng.of(1).uniform(N)),
    }
    for what, (one, other) in pairs.items():
        assert not torch.equal(one, other), what
        assert uncorrelated(one, other), what
        # Not only in the mean: the parity of the upper halves agrees half of the time.
        agree = float(((one > 0.5) == (other > 0.5)).double().mean())
        assert abs(agree - 0.5) < FIVE_SIGMA * 0.5 / math.sqrt(len(one)), what


def check_moments(sample: Tensor, mean: float, variance: float, fourth: float) -> None:
    """Mean and variance within five standard errors, given the fourth central moment."""
    sample = sample.double()
    assert abs(float(sample.mean()) - mean) < FIVE_SIGMA * math.sqrt(variance / len(sample))
    spread = float(((sample - mean) ** 2).mean())
    assert abs(spread - variance) < FIVE_SIGMA * math.sqrt((fourth - variance**2) / len(sample))


def test_uniform_has_the_moments_and_the_open_interval() -> None:
    sample = Rng.of(1).uniform(N)
    check_moments(sample, 1 / 2, 1 / 12, 1 / 80)
    assert sample.dtype == torch.float32
    assert 0.0 < float(sample.min()) < float(sample.max()) < 1.0


@pytest.mark.parametrize("bits", [0, -1])
def test_uniform_is_open_at_both_ends(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rng, "bits", lambda self, *shape: torch.full(shape, bits))
    assert 0.0 < float(Rng.of(0).uniform(1)) < 1.0
    assert math.isfinite(float(Rng.of(0).laplace(1)))
    assert math.isfinite(float(Rng.of(0).normal(1)))
    assert 0 <= int(Rng.of(0).integers(2**31, 1)) < 2**31


def test_normal_has_the_moments_and_the_tails() -> None:
    sample = Rng.of(2).normal(N)
    check_moments(sample, 0.0, 1.0, 3.0)
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = math.erfc(bound / math.sqrt(2))
        found = float((sample.abs() > bound).double().mean())
        assert abs(found - share) < FIVE_SIGMA * math.sqrt(share * (1 - share) / N)


def test_laplace_has_the_moments_and_the_tails() -> None:
    sample = Rng.of(3).laplace(N)
    check_moments(sample, 0.0, 2.0, 24.0)
    for bound in (0.5, 1.0, 3.0):
        share = math.exp(-bound)
        found = float((sample.abs() > bound).double().mean())
        assert abs(found - share) < FIVE_SIGMA * math.sqrt(share * (1 - share) / N)


@pytest.mark.parametrize("count", [1, 2, 3, 50, 6040])
def test_a_sum_of_laplace_variables_has_their_moments(count: int) -> None:
    check_moments(Rng.of(5).laplace_sum(count, N), 0.0, 2.0 * count, 12.0 * count + 12.0 * count**2)


def test_a_sum_of_laplace_variables_is_distributed_as_one() -> None:
    """Kolmogorov and Smirnov, rejecting a correct sample once in a million: one variable, the known law of the sum of
    two, and sums of draws."""
    one, two = (Rng.of(6).laplace_sum(count, N).double().numpy() for count in (1, 2))
    assert stats.kstest(one, stats.laplace.cdf).pvalue > 1e-6
    below = lambda x: np.where(x < 0, 0.5 + np.abs(x) / 4, 0) * np.exp(-np.abs(x))  # noqa: E731
    assert stats.kstest(two, lambda x: np.where(x < 0, below(x), 1 - below(-np.abs(x)))).pvalue > 1e-6
    for count in (5, 40):
        sums = Rng.of(7).laplace(20_000, count).double().sum(1).numpy()
        assert stats.ks_2samp(Rng.of(8).laplace_sum(count, 20_000).numpy(), sums).pvalue > 1e-6


@given(short=st.integers(0, 40), more=st.integers(0, 40), count=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_a_longer_draw_of_sums_begins_with_the_shorter_one(short: int, more: int, count: int) -> None:
    """Also where someone has to draw again; and what comes next does not depend on that."""
    left, right = Rng.of(5, "x"), Rng.of(5, "x")
    one, other = left.laplace_sum(count, short, 3), right.laplace_sum(count, short + more, 3)
    assert one.shape == (short, 3)
    assert one.dtype == torch.float64
    assert torch.equal(one, other[:short])
    if count:
        assert torch.equal(left.uniform(2), right.uniform(2))


@pytest.mark.parametrize("high", [1, 2, 7, 2**31])
def test_integers_are_even_over_their_range(high: int) -> None:
    sample = Rng.of(4).integers(high, N)
    assert sample.dtype == torch.int64
    assert 0 <= int(sample.min()) <= int(sample.max()) < high
    cells = torch.bincount(sample * 7 // high if high > 7 else sample, minlength=min(high, 7))
    share = 1 / len(cells)
    assert ((cells / N - share).abs() <= FIVE_SIGMA * math.sqrt(share * (1 - share) / N)).all()


def test_a_device_draws_what_everybody_draws_and_keeps_its_own_to_itself() -> None:
    agreed, device = Rng.of(3, "round"), DeviceRng(Rng.of(3, "round").key)
    assert torch.equal(agreed.fold("x", 5).normal(4), device.fold("x", 5).normal(4))
    assert isinstance(device.fold("x").fold(2), DeviceRng)
    assert isinstance(device.fold("x").private, SystemRng)
    assert torch.equal(agreed.private.bits(4), Rng.of(3, "round").private.bits(4))
    assert not torch.equal(device.private.bits(4), device.private.bits(4))


@pytest.mark.random_draws
@pytest.mark.parametrize("draw", DRAWS)
def test_nobody_draws_the_systems_numbers_again(draw: str) -> None:
    """By no name and no key; 20 draws of at least 3 bits each are the same once in 2⁶⁰."""
    streams = [SystemRng(), SystemRng(torch.tensor(7)), SystemRng().fold("noise", 3), SystemRng().private]
    found = [DRAWS[draw](rng, 20) for rng in (*streams, streams[0])]
    assert len({tuple(one.tolist()) for one in found}) == len(found)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
def test_the_systems_numbers_have_the_shape_that_was_asked_for(shape: tuple[int, ...]) -> None:
    for draw in DRAWS.values():
        assert draw(SystemRng(), *shape).shape == shape


@pytest.mark.random_draws
def test_the_systems_numbers_are_distributed_as_the_others() -> None:
    """Not seeded: each of the four bounds is 8 standard errors wide.

    A normal mean is missed by that with a probability of 1e-15. By Chernoff's bounds the squares of normal draws (a χ²)
    and the sizes of Laplace draws (a Gamma) are with at most 2 exp(-30) < 2e-13.
    """
    rng, wide = SystemRng(), 8.0
    assert abs(float(rng.uniform(N).mean()) - 0.5) < wide * math.sqrt(1 / 12 / N)
    assert abs(float(rng.normal(N).square().mean()) - 1) < wide * math.sqrt(2 / N)
    assert abs(float(rng.laplace(N).abs().mean()) - 1) < wide * math.sqrt(1 / N)
    # A sum of 7 has variance 14 and fourth moment (3 + 3/7) · 14².
    sums = rng.laplace_sum(7, N).double().square().mean()
    assert abs(float(sums) - 14) < wide * 14 * math.sqrt((2 + 3 / 7) / N)

"""Exact noise: whole numbers with just the chances they should have, and no rounding that a bound does not know of."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from torch.func import vmap

from homebody.core import Rows, Total, Tree
from homebody.privacy import Channel, Clip, Gaussian, Laplace, SecureSum, grid, noise_kernels
from homebody.privacy.grid import Grid, gaussian, laplace
from homebody.rng import Rng, SystemRng

DRAWS = 400_000


def chances(draw: Callable[..., Tensor], depth: int, steps: np.ndarray) -> np.ndarray:
    scale = 2.0**depth
    if draw is laplace:
        q = math.exp(-1 / scale)
        return (1 - q) / (1 + q) * q ** np.abs(steps)
    return stats.norm.cdf((steps + 0.5) / scale) - stats.norm.cdf((steps - 0.5) / scale)


@pytest.mark.random_draws
@pytest.mark.parametrize("rng", [Rng.of(11), SystemRng()], ids=["seed", "system"])
@pytest.mark.parametrize("depth", [0, 2, 5])
@pytest.mark.parametrize("draw", [laplace, gaussian])
def test_every_whole_number_has_its_chance(draw: Callable[..., Tensor], depth: int, rng: Rng) -> None:
    """Pearson's χ² over all cells that 200 draws or more are expected in, and what is left as one.

    A correct sampler is refused with probability 1e-10: with so many in each cell χ² has its distribution that far out
    to within a factor of ten.
    """
    drawn = draw(rng, depth, DRAWS).numpy()
    steps = np.arange(-20 * 2**depth, 20 * 2**depth + 1)
    expected = DRAWS * chances(draw, depth, steps)
    kept = expected >= 200
    seen = np.array([(drawn == step).sum() for step in steps[kept]])
    observed, wanted = np.append(seen, DRAWS - seen.sum()), np.append(expected[kept], DRAWS - expected[kept].sum())
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert stats.chi2.sf(statistic, len(observed) - 1) > 1e-10
    double = chances(draw, depth + 1, steps)
    off = float(((observed - np.append(DRAWS * double[kept], 1e3)) ** 2 / wanted).sum())
    assert stats.chi2.sf(off, len(observed) - 1) < 1e-100  # noise of twice the scale would be seen


@pytest.mark.parametrize("depth", [20, 28, 40])
@pytest.mark.parametrize(("draw", "like"), [(laplace, stats.laplace), (gaussian, stats.norm)])
def test_fine_noise_is_like_the_continuous_one(
    draw: Callable[..., Tensor], like: stats.rv_continuous, depth: int
) -> None:
    drawn = draw(Rng.of(5), depth, DRAWS)
    assert stats.kstest(drawn.double().numpy() / 2**depth, like.cdf).pvalue > 1e-6
    # The lowest bits are as good as fair coins: nothing of the draw is coarser than the grid.
    for bit in range(4):
        assert abs(((drawn >> bit) & 1).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(DRAWS)


def test_the_table_is_right_to_256_bits() -> None:
    from mpmath import mp, mpf

    high, low, _ = grid._table("gaussian")
    with mp.workprec(500):
        weights = [mp.exp(mpf(-(cell**2)) / 2**17) for cell in range(len(high))]
        total = mp.fsum(weights)
        for cell in (0, 1, 17, 255, 256, 1000, 3000, 5000):
            exact = int(mp.floor(mp.fsum(weights[: cell + 1]) / total * 2**256))
            found = int(high[cell]) << 192 | int(low[cell][0]) << 128 | int(low[cell][1]) << 64 | int(low[cell][2])
            assert abs(found - exact) < 2**16
        # What lies beyond the last cell.
        assert mp.erfc(20 / mp.sqrt(2)) < mpf(2) ** -240


def read(units: list[int], depth: int = 8) -> int:
    """The first Gaussian draw that these 32-bit units make; zeros follow."""
    padded = np.zeros(noise_kernels.MOST_UNITS + 64, dtype=np.uint32)
    padded[: len(units)] = units
    out = np.empty(1, dtype=np.int64)
    assert noise_kernels.noise_read(padded, depth, *grid._table("gaussian"), out) == 1
    return int(out[0])


def units(*words: int) -> list[int]:
    return [half for word in words for half in (word >> 32, word & 0xFFFFFFFF)]


def test_a_draw_by_hand() -> None:
    """At a depth of 8 a step is a cell: cell 3 and three quarters of it are rounded to 4, with either sign."""
    high, low, _ = grid._table("gaussian")
    three = int(high[3]) - 5
    survives = [0xFFFFFFFF]  # above γ: kept at once
    assert read([*units(three, 0xC << 60), *survives]) == 4
    assert read([*units(three, (0xC << 60) | 1), *survives]) == -4
    assert read([*units(three, 0x4 << 60), *survives]) == 3
    # A fraction that agrees with a boundary in 64, 128 and 192 bits is settled by what follows.
    first, second, third = (int(word) for word in low[3])
    for rest, cell in (
        ((first - 1, 0, 0), 3),
        ((first + 1, 0, 0), 4),
        ((first, second - 1, 0), 3),
        ((first, second + 1, 0), 4),
        ((first, second, third - 1), 3),
        ((first, second, third), 4),
    ):
        assert read([*units(int(high[3]), *rest, 0), *survives]) == cell


def test_a_draw_that_does_not_survive_is_made_anew() -> None:
    high, _, _ = grid._table("gaussian")
    refused = [0, 0xFFFFFFFF]  # below γ, then not below it: k = 2 is even
    again = [*units(int(high[6]) - 5, 0), 0xFFFFFFFF]
    assert read([*units(int(high[2000]) - 5, 0xC << 60), *refused, *again]) == 6


def test_streams_do_not_depend_on_padding_or_on_company() -> None:
    for draw in (laplace, gaussian):
        assert torch.equal(draw(Rng.of(3), 20, 5, 2), draw(Rng.of(3), 20, 9, 2)[:5])
        keys = Rng.of(4).fold(torch.arange(7)).key
        together = vmap(lambda key, draw=draw: draw(Rng(key), 20, 3))(keys)
        alone = torch.stack([draw(Rng(key), 20, 3) for key in keys])
        assert torch.equal(together, alone)
        rng = Rng.of(5)
        assert not torch.equal(draw(rng, 20, 4), draw(rng, 20, 4))


values = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(values, min_size=1, max_size=8),
    st.sampled_from([1, 2]),
    st.floats(2.0**-20, 2.0**20),
    st.floats(2.0**-30, 2.0**30),
)
def test_a_clip_bounds_an_update_on_the_grid_too(numbers: list[float], order: int, bound: float, ratio: float) -> None:
    """In exact arithmetic: the steps' norm is at most the bound, in steps."""
    fitted = Grid.fitted(bound * ratio, bound)
    clipped = Clip(bound, order=order).device({"w": torch.tensor(numbers)}, Rng.of(0))["w"]
    steps = [abs(int(one)) for one in fitted.whole(clipped)]
    if order == 1:
        assert sum(steps) * fitted.step <= bound
    else:
        assert math.isqrt(sum(one * one for one in steps)) * fitted.step <= bound


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_rounding_is_toward_zero_and_finite(kind: torch.dtype) -> None:
    fitted = Grid.fitted(1.0, 4.0)
    given = torch.tensor([0.0, 3.0, -3.0, 2.0]).to(kind)
    assert torch.equal(fitted.values(fitted.whole(given)), given.float())
    assert torch.equal(fitted.whole(given.double()), fitted.whole(given))
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.9 * fitted.step, -0.9 * fitted.step])
    assert fitted.whole(odd)[[0, 3, 4]].tolist() == [0, 0, 0]
    strided = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(fitted.values(fitted.whole(strided)), strided)


@pytest.mark.parametrize(("scale", "bound"), [(1e-30, 1.0), (1e-9, 1e3), (1e30, 1.0), (3.0, 0.7)])
def test_any_scale_fits_into_64_bits(scale: float, bound: float) -> None:
    fitted = Grid.fitted(scale, bound)
    most = abs(int(fitted.whole(torch.tensor([bound]))[0]))
    assert 1000 * most + 1000 * 80 * 2**fitted.depth < 2**63


CHANNELS = {
    "gaussian": Channel(Clip(0.5), Gaussian(1.0)),
    "behind a secure sum": Channel(Clip(0.5), SecureSum(), Gaussian(1.0)),
    "laplace on the sum": Channel(Clip(0.5, order=1), Laplace(1.0, where="sum")),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_sums_of_messages_are_exact_in_any_order(name: str) -> None:
    channel = CHANNELS[name]
    updates = [{"w": torch.randn(7, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n % 5)} for n in range(40)]
    sent = [channel.device(update, Rng.of(0))["w"].to(torch.int64) for update in updates]
    assert all(one.dtype == torch.int64 and int(one.abs().max()) > 0 for one in sent)
    forwards, backwards = sum(sent), sum(reversed(sent))
    release = [channel.server(Total({"w": total}, 40), Rng.of(1)).sum["w"] for total in (forwards, backwards)]
    assert torch.equal(*release)


def test_the_server_clips_what_came_in_steps() -> None:
    channel = CHANNELS["gaussian"]
    assert channel.facts.grid is not None
    honest = channel.device({"w": torch.tensor([30.0, 40.0])}, Rng.of(0))
    again = channel.bounded(honest)
    assert (again["w"] - honest["w"]).abs().max() <= 2**8  # a relative 2⁻²⁰ at most
    loud = {"w": honest["w"] * 5}
    assert float(channel.facts.grid.doubles(channel.bounded(loud)["w"]).norm()) <= 0.5
    rows = {"w": Rows(torch.tensor([1]), loud["w"][None], 3)}
    assert float(channel.facts.grid.doubles(channel.bounded(rows)["w"].value).norm()) <= 0.5


def test_without_noise_nothing_is_rounded() -> None:
    channel = Channel(Clip(1.0), Gaussian(0.0))
    update: Tree = {"w": torch.tensor([0.1, 0.2])}
    assert torch.equal(channel.device(update, Rng.of(0))["w"], update["w"])
    assert torch.equal(channel.server(Total(update, 1), Rng.of(0)).sum["w"], update["w"])


@pytest.mark.parametrize("width", [1, 1023, 1024, 1025, 5000])
def test_rounding_in_place_gives_the_same_steps(width: int) -> None:
    grid = Grid.fitted(scale=0.7, bound=1.0)
    value = torch.rand(3, width, generator=torch.Generator().manual_seed(width)) * 2 - 1
    value[0, 0], value[1, -1] = torch.nan, torch.inf
    kept = value.clone()
    wanted = grid.whole(value)
    assert torch.equal(value.nan_to_num(), kept.nan_to_num())
    steps = vmap(lambda own: grid.whole(own, over=True))(value)
    assert torch.equal(steps, wanted)
    assert steps.data_ptr() == value.data_ptr()

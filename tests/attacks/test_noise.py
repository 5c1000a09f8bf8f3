"""Whether noise can be taken off again by looking at the numbers that it falls on (Mironov, 2012)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from homebody.core import Total
from homebody.privacy import Channel, Clip, Gaussian, Laplace
from homebody.rng import Rng

ROWS, WIDTH, TOUCHED = 2000, 32, 100


def reachable(value: Tensor, scale: float) -> Tensor:
    """Whether a 32-bit number is this scale times another one: all that a zero plus floating-point noise can become."""
    wide = value.double() / scale
    near = wide.float()
    found = torch.zeros(value.shape, dtype=torch.bool)
    for other in (
        near,
        torch.nextafter(near, torch.tensor(torch.inf)),
        torch.nextafter(near, torch.tensor(-torch.inf)),
    ):
        found |= other * torch.tensor(scale, dtype=torch.float32) == value
        found |= (other.double() * scale).float() == value
    return found


def update() -> Tensor:
    """Some rows of a table that a person touched; the others are zero."""
    table = torch.zeros(ROWS, WIDTH)
    table[:TOUCHED] = 1e-2 * Rng.of(3).normal(TOUCHED, WIDTH)
    return table


def distinguished(release: Tensor, scale: float) -> float:
    """By how many standard errors touched entries are rarer among the reachable ones than untouched ones."""
    seen = reachable(release, scale)
    touched, untouched = seen[:TOUCHED].double(), seen[TOUCHED:].double()
    share = float(seen.double().mean())
    error = math.sqrt(max(share * (1 - share), 1e-4) * (1 / touched.numel() + 1 / untouched.numel()))
    return float(untouched.mean() - touched.mean()) / error


def in_floats(draw: Callable[..., Tensor], scale: float) -> Tensor:
    """The same release with noise in 32-bit floating point."""
    return update() + scale * draw(Rng.of(9), ROWS, WIDTH)


def on_the_device(scale: float) -> Tensor:
    channel = Channel(Clip(100.0, order=1), Laplace(scale))
    return channel.device({"item": update()}, Rng.of(9))["item"]


def on_the_sum(scale: float) -> Tensor:
    channel = Channel(Clip(100.0), Gaussian(scale / 200))
    sums = channel.device({"item": update()}, Rng.of(9))
    return channel.server(Total(sums, 1), Rng.of(8)).sum["item"]


def on_the_sum_laplace(scale: float) -> Tensor:
    channel = Channel(Clip(100.0, order=1), Laplace(scale, where="sum"))
    sums = channel.device({"item": update()}, Rng.of(9))
    return channel.server(Total(sums, 1), Rng.of(8)).sum["item"]


def of_many(scale: float) -> Tensor:
    channel = Channel(Clip(100.0, order=1), Laplace(scale))
    sums = channel.for_sum({"item": update()}, Rng.of(9))
    return channel.noise_of_many({"item": sums["item"].to(torch.int64)}, 50, Rng.of(8))["item"]


@pytest.mark.parametrize("scale", [1.7, 2000.0])
@pytest.mark.parametrize("release", [on_the_device, on_the_sum, on_the_sum_laplace, of_many])
def test_noise_does_not_tell_which_rows_were_touched(release: Callable[[float], Tensor], scale: float) -> None:
    """6 standard errors: with a seed. Noise in floating point is far beyond that."""
    assert abs(distinguished(release(scale), scale)) < 6


@pytest.mark.parametrize("draw", [Rng.laplace, Rng.normal])
def test_noise_in_floating_point_would_tell(draw: Callable[..., Tensor]) -> None:
    assert distinguished(in_floats(draw, 1.7), 1.7) > 30


def test_the_lowest_digits_of_a_release_are_those_of_noise() -> None:
    """Of entries within one octave, the last bits of touched and untouched ones are alike, and even."""
    for release in (on_the_device(2000.0), on_the_sum(2000.0)):
        bits = release.numpy().view(np.int32)
        octave = (np.abs(release.numpy()) >= 1024) & (np.abs(release.numpy()) < 2048)
        for bit in range(4):
            ones = ((bits >> bit) & 1)[octave]
            assert abs(ones.mean() - 0.5) < 6 * 0.5 / math.sqrt(len(ones))

"""Laplace noise after an ℓ2 clip, as DP-FedRec adds it: its scale, its charge, and the noise of many devices.

Statistical tests have fixed seeds; a right stage fails each of them once in a million others.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap

from homebody.core import Cohort, Tree
from homebody.errors import HomebodyError
from homebody.privacy import Channel, Clip, Laplace, Ledger, NonPrivate
from homebody.privacy.events import LaplaceRelease, Sampling
from homebody.privacy.stages import VectorLaplace
from homebody.rng import Rng

SOME = Cohort(np.arange(5), "fixed", 5, 50)
SHAPES = {"table": (12, 4), "offset": (16,)}  # 64 numbers


def update(value: float = 0.0) -> Tree:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def flat(tree: Tree) -> np.ndarray:
    return torch.cat([value.double().flatten() for value in tree.values()]).numpy()


@pytest.mark.parametrize(("guarantee", "scale"), [("certified", 2 * 0.3 * 8 / 3), ("published", 2 * 0.3 / 3)])
def test_the_scale_is_that_of_all_numbers_together(guarantee: str, scale: float) -> None:
    channel = Channel(Clip(0.3), VectorLaplace(3.0, guarantee))  # type: ignore[arg-type]
    stage = channel.stages[1]
    assert isinstance(stage, VectorLaplace)
    assert stage.scale(64) == pytest.approx(scale)
    assert stage.deviation(64, 9) == pytest.approx(3 * math.sqrt(2) * scale)
    keys = Rng.of(1).fold(torch.arange(300)).key
    sent = vmap(lambda key: channel.device(update(), Rng(key)))(keys)
    noise = flat(sent)
    assert stats.kstest(noise, stats.laplace(scale=scale).cdf).pvalue > 1e-6
    assert stats.kstest(noise, stats.laplace(scale=1.1 * scale).cdf).pvalue < 1e-6


def test_noise_is_added_to_the_clipped_update() -> None:
    """64 numbers of 1 have a norm of 8: each becomes 0.3 / 8. The mean of 19,200 has a deviation of √2 b / 139."""
    channel = Channel(Clip(0.3), VectorLaplace(300.0))
    sent = vmap(lambda key: channel.device(update(1.0), Rng(key)))(Rng.of(2).fold(torch.arange(300)).key)
    assert abs(flat(sent).mean() - 0.3 / 8) < 5 * math.sqrt(2) * 0.016 / 139


@pytest.mark.parametrize("guarantee", ["certified", "published"])
def test_the_noise_of_many_is_that_of_each_added_up(guarantee: str) -> None:
    channel = Channel(Clip(0.3), VectorLaplace(3.0, guarantee))  # type: ignore[arg-type]
    assert channel.ends_in_noise
    keys = Rng.of(3).fold(torch.arange(150 * 6)).key
    each = vmap(lambda key: channel.device(update(), Rng(key)))(keys)
    slow = flat({name: value.view(150, 6, -1).sum(1) for name, value in each.items()})
    fast = np.concatenate([flat(channel.noise_of_many(update(), 6, Rng.of(4, number))) for number in range(150)])
    assert stats.ks_2samp(slow, fast).pvalue > 1e-6
    assert stats.ks_2samp(slow, 1.25 * fast).pvalue < 1e-6


def test_charges() -> None:
    certified, published = (Channel(Clip(0.3), VectorLaplace(3.0, how)) for how in ("certified", "published"))
    charged = {charge.observer: charge for charge in certified.charges(SOME)}
    assert charged.keys() == {"server", "clients", "public"}
    assert all(charge.unit == "user" for charge in charged.values())
    assert charged["server"].event == LaplaceRelease(1 / 3.0, "replace-one")
    assert charged["public"].event == LaplaceRelease(1 / 3.0, "replace-one", Sampling("fixed", 5, 50))
    ledger = Ledger()
    ledger.charge("round 1", certified.charges(SOME))
    assert ledger.epsilon("server", "user", delta=0.0).epsilon == pytest.approx(3.0)
    assert ledger.epsilon("public", "user", delta=1e-5).epsilon < 2.0
    for charge in published.charges(SOME):
        assert isinstance(charge.event, NonPrivate)
        assert "2θ√n" in str(charge.event)


def test_it_needs_a_clip_in_l2() -> None:
    for stages in ((VectorLaplace(1.0),), (Clip(1.0, order=1), VectorLaplace(1.0))):
        with pytest.raises(HomebodyError, match="put a Clip of order 2 before it"):
            Channel(*stages)
    with pytest.raises(HomebodyError, match="put it into a Channel"):
        VectorLaplace(1.0).device(update(), Rng.of(0))
    with pytest.raises(HomebodyError, match="Laplace noise cannot follow Laplace noise"):
        Channel(Clip(1.0), VectorLaplace(1.0), Laplace(1.0))
    with pytest.raises(HomebodyError, match="ε of Laplace noise must be a number above 0"):
        VectorLaplace(0.0)
    with pytest.raises(HomebodyError, match="There is no guarantee 'printed'"):
        VectorLaplace(1.0, "printed")  # type: ignore[arg-type]

"""Somebody who leaves, where everyone takes part and a sum is divided by how many they are: the printed ε covers by how
much the mean moves. How many they are is public."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from homebody.core import Cohort, Total
from homebody.privacy import Channel, Clip, Gaussian, Laplace, Ledger
from homebody.privacy.events import Relation
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute

NORM, PEOPLE, ENTRIES, DELTA = 2.0, 20, 50_000, 1e-6
RELATIONS: list[Relation] = ["add-remove", "replace-one"]


def released(channel: Channel, values: list[float]) -> tuple[float, float]:
    """The mean over these people of what they send, without the noise on it; and how far that noise spreads.

    The same noise on nothing at all is taken off again; that of all entries tells its spread, by the seed.
    """

    def mean(values: list[float]) -> torch.Tensor:
        sent = []
        for number, value in enumerate(values):
            update = torch.zeros(ENTRIES)
            update[0] = value
            sent.append(channel.device({"item": update}, Rng.of(number))["item"])
        # Whole steps stay whole numbers: others would be rounded to steps again.
        total = Total({"item": torch.stack(sent).sum(0)}, len(values))
        return channel.server(total, Rng.of(7)).mean["item"].double()

    noise = mean([0.0] * len(values))
    return float(mean(values)[0] - noise[0]), float(noise.abs().mean())


def moved(channel: Channel) -> float:
    """By how much of the noise's mean size a mean moves when one leaves who is the opposite of everybody else."""
    others = [NORM] * (PEOPLE - 1)
    (there, size), (gone, _) = released(channel, [*others, -NORM]), released(channel, others)
    return abs(there - gone) / size


def printed(channel: Channel) -> float:
    ledger = Ledger()
    ledger.charge("train/1", channel.charges(Cohort(np.arange(PEOPLE), "all", PEOPLE, PEOPLE)))
    found = ledger.epsilon("public", delta=DELTA).epsilon
    ledger.close()
    return found


def exact(shift: float, delta: float = DELTA) -> float:
    """ε of two normal distributions that are so many standard deviations apart (Balle and Wang, 2018)."""

    def excess(epsilon: float) -> float:
        far, near = stats.norm.cdf([-shift / 2 - epsilon / shift, shift / 2 - epsilon / shift])
        return float(near - math.exp(epsilon) * far - delta)

    return float(optimize.brentq(excess, 0, 100))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("z", [1.0, 1.5, 4.0])
def test_gaussian_noise_covers_a_departure(z: float, relation: Relation) -> None:
    channel = Channel(Clip(NORM), Gaussian(z, relation))
    shift = moved(channel) * math.sqrt(2 / math.pi)  # the mean of |N(0, 1)|
    assert shift == pytest.approx((2 if relation == "add-remove" else 1) / z, rel=0.02)  # the spread is known to 0.5 %
    assert printed(channel) >= exact(shift) * 0.95


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("b", [4.0, 16.0])
def test_laplace_noise_on_the_sum_covers_a_departure(b: float, relation: Relation) -> None:
    channel = Channel(Clip(NORM, order=1), Laplace(b, where="sum", relation=relation))
    shift = moved(channel)
    assert shift == pytest.approx(2 * NORM / b, rel=0.02)
    assert printed(channel) >= shift * 0.95


@pytest.mark.parametrize("relation", RELATIONS)
def test_so_does_what_a_run_prints(relation: Relation, tmp_path: Path) -> None:
    """A sum that is divided by n moves by 2S/n, with noise of z S/n or of z 2S/n."""
    stages = ["clip:norm=1", f"gaussian:z=1.5,relation={relation}"]
    recipe = Recipe("fedmf", "synthetic:users=20,items=30,mean=6", fields={"factors": 4}, rounds=1, stages=stages)
    result = execute(recipe, tmp_path)
    ledger = Ledger(Path(result["run"]) / "ledger.sqlite")
    delta = ledger.epsilon("public").delta
    ledger.close()
    shift = (2 if relation == "add-remove" else 1) / 1.5
    assert result["epsilon"]["public"] >= exact(shift, delta) * (1 - 1e-6)

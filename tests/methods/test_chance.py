"""Random scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from homebody.methods.baselines import Chance
from homebody.recipe import Recipe
from homebody.reference import Histories
from homebody.run import execute

NOBODY = Histories.of([], n_items=100)


def test_every_place_is_as_likely_as_any_other() -> None:
    """χ² of where item 7 stands among 100, over 20,000 people; and neighbours share nothing."""
    scores = Chance().trained(NOBODY, seed=3)(np.arange(20_000), torch.arange(100))
    place = (scores > scores[:, 7:8]).sum(1)
    count = torch.bincount(place, minlength=100).double()
    assert float(((count - 200) ** 2 / 200).sum()) < 160  # 99 degrees of freedom: p < 1e-4
    assert abs(float(torch.corrcoef(torch.stack([scores[:-1, 7], scores[1:, 7]]))[0, 1])) < 4 / 20_000**0.5
    assert abs(float((place < 10).double().mean()) - 0.1) < 4 * (0.09 / 20_000) ** 0.5


def test_it_depends_on_the_seed() -> None:
    one, two = (Chance().trained(NOBODY, seed=seed)(np.arange(3), torch.arange(100)) for seed in (1, 2))
    assert not torch.equal(one, two)


def test_it_collects_nothing_and_is_charged_nothing(tmp_path: Path) -> None:
    data = "synthetic:users=60,items=40,mean=10"
    result = execute(Recipe("random", data), tmp_path)
    assert result["epsilon"] == {"server": 0.0, "clients": 0.0, "public": 0.0}
    assert result["bytes_up"] == 0
    assert execute(Recipe("popularity", data), tmp_path)["bytes_up"] > 0

"""What the other apps of a person see of a message, as `homebody inspect` and a privacy statement say it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from homebody.adversary.inspection import inspect
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.privacy import Channel, SecureSum, ViewNoise, Views
from homebody.recipe import Recipe
from homebody.report.record import RunFolder
from homebody.report.statement import statement
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.testing import described


def gaussian_epsilon(distance: float, delta: float) -> float:
    """ε of Gaussian noise whose deviation is 1 over this distance (Balle and Wang, 2018)."""

    def over(epsilon: float) -> float:
        near, far = distance / 2 - epsilon / distance, -distance / 2 - epsilon / distance
        return float(norm.cdf(near) - math.exp(epsilon) * norm.cdf(far)) - delta

    return float(brentq(over, 0, 50))


@pytest.mark.parametrize("noisy", [True, False])
def test_views_see_the_samples_and_the_mean(noisy: bool) -> None:
    stages = (Views(0.5), *([ViewNoise(z=2.0)] if noisy else []), SecureSum())
    method = FLMVDSSM(Channel(*stages), views="profile,taste", widths="4,3", batch_size=3)
    found = inspect(method, Simulator(described()), 3, cohort=20)
    sees = found.observers["views"]
    assert sees.sees.startswith("The samples")
    assert ("noise of 0.5 in every number" in sees.sees) == noisy
    assert ("Gaussian noise, 2 ×" in sees.charged[0]) == noisy
    assert "not private" in found.observers["server"].charged[0]
    assert {part.name for part in found.parts} >= {"item/first", "taste/user/first"}


def test_a_statement_names_the_views(tmp_path: Path) -> None:
    for name in ("hobby", "shop"):
        lines = ["user,x", *(f"{user},{(user + len(name)) % 5}" for user in range(40))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    (tmp_path / "items.csv").write_text("\n".join(["item,colour", *(f"{item},c{item % 4}" for item in range(30))]))
    recipe = Recipe(
        method="fl-mv-dssm",
        data="synthetic:users=40,items=30,mean=8",
        views={name: str(tmp_path / f"{name}.csv") for name in ("hobby", "shop")},
        item_features=str(tmp_path / "items.csv"),
        kinds={"colour": "categorical"},
        vocabularies={"hobby.x": "0..10", "shop.x": "0..10"},
        fields={"views": "hobby,shop", "widths": "4,3", "aggregate_users": False},
        stages=["views:clip=0.5", "view-noise:z=4", "secure-sum"],
        rounds=2,
        cohort=20,
        delta=1e-3,
    )
    found = statement(RunFolder.open(Path(execute(recipe, tmp_path / "runs")["run"])))
    rows = {row["observer"]: row for row in found["certified"]}
    assert rows["views"]["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(2) / 4, 1e-3), rel=1e-3)
    assert rows["views"]["sees"] == "what a person's other views tell this one"
    assert rows["views"]["epsilon"] < rows["server"]["epsilon"]
    said = {one["stage"]: one["means"] for one in found["stages"]}
    assert "ℓ2 norm of at most 0.5" in said["views"]
    assert "4 × what one view can change in it (add-remove)" in said["view-noise"]
    claims = {row["observer"] for row in found["paper"]["rows"]}
    assert "views" in claims

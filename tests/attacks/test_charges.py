"""Code that does not ship with Homebody and states less than it tells: its claim is kept, and never certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from homebody.core import Batch, Cohort, Tree, Update, releases
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.errors import HomebodyError
from homebody.methods import trust
from homebody.methods.dplcf import DPLCF
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import Alone
from homebody.privacy import OBSERVERS, Channel, Charge, Clip, Laplace, LaplaceRelease, Ledger, NonPrivate
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.statement import statement
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.training import fit

DATA = "synthetic:users=30,items=40,mean=8"
COHORT = Cohort(np.arange(4), "all", 4, 4, 12)
UNDERSTATED = '''
from dataclasses import dataclass
from homebody.methods.fedmf import FedMF
from homebody.privacy import OBSERVERS, Charge, LaplaceRelease


@dataclass(frozen=True)
class Quiet(FedMF):
    """Sends plain updates, and says that there is noise."""

    def charges(self, cohort):
        return [Charge(who, "user", LaplaceRelease(1000.0, "replace-one")) for who in OBSERVERS]
'''


def test_a_method_file_that_understates_is_not_certified(tmp_path: Path) -> None:
    file = tmp_path / "quiet.py"
    file.write_text(UNDERSTATED)
    trust(f"{file}:Quiet")
    result = execute(Recipe(f"{file}:Quiet", DATA, fields={"factors": 4}, rounds=2), tmp_path / "runs")
    assert {float(value) for value in result["epsilon"].values()} == {float("inf")}
    assert any("Quiet states itself what it tells each observer" in note for note in result["notes"])
    folder = RunFolder.open(Path(result["run"]))
    ledger = Ledger(folder.ledger_path)
    (said,) = {entry.event for entry in ledger.entries()}
    ledger.close()
    assert "Quiet states itself what it tells, and nothing derives it; it claims" in said
    assert "1000" in said
    for row in statement(folder)["certified"]:
        assert row["epsilon"] == "inf"
        assert any("it claims" in mechanism for mechanism in row["mechanisms"])


def test_a_budget_is_not_kept_by_a_claim(tmp_path: Path) -> None:
    file = tmp_path / "quiet.py"
    file.write_text(UNDERSTATED)
    trust(f"{file}:Quiet")
    recipe = Recipe(f"{file}:Quiet", DATA, fields={"factors": 4}, rounds=2, budget="eps=1,delta=0,observer=server")
    with pytest.raises(HomebodyError, match="budget"):
        execute(recipe, tmp_path / "runs")


@dataclass(frozen=True)
class Talks(Alone):
    """Its parent sends nothing and is charged nothing."""

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        return {}, local


@dataclass(frozen=True)
class Inherits(DPLCF):
    """It inherits what it states, and may send something else."""


@dataclass(frozen=True)
class Silent(Laplace):
    """It inherits its charges, and adds no noise."""

    def device(self, update: Update, rng: Any) -> Update:
        return update


class Loose(Clip):
    """It inherits the bound that noise is measured against, and clips nothing."""

    def device(self, update: Update, rng: Any) -> Update:
        return update


@pytest.mark.parametrize(
    "method",
    [
        Talks(factors=2),
        Inherits(),
        FedMF(factors=2, uplink=Channel(Clip(1.0, order=1), Silent(1000.0))),
        FedMF(factors=2, uplink=Channel(Loose(1.0, order=1), Laplace(1000.0))),
    ],
    ids=["sends", "method", "noise", "clip"],
)
def test_what_is_inherited_or_comes_with_a_stage_is_a_claim_too(method: Any) -> None:
    charges = releases(method, COHORT)
    assert {charge.observer for charge in charges} == set(OBSERVERS)
    assert all(isinstance(charge.event, NonPrivate) for charge in charges)


def test_what_ships_is_derived() -> None:
    noisy = FedMF(factors=2, uplink=Channel(Clip(1.0, order=1), Laplace(10.0)))
    assert not any(isinstance(charge.event, NonPrivate) for charge in releases(noisy, COHORT))
    assert releases(Alone(factors=2), COHORT) == ()
    assert not any(isinstance(charge.event, NonPrivate) for charge in releases(DPLCF(), COHORT))


@dataclass(frozen=True)
class Mine(FedMF):
    """A method of one's own whose charges its channel derives."""


def test_a_method_that_leaves_its_charges_to_the_channel_is_certified() -> None:
    noisy = Mine(factors=2, uplink=Channel(Clip(1.0, order=1), Laplace(10.0)))
    assert any(isinstance(charge.event, LaplaceRelease) for charge in releases(noisy, COHORT))


@dataclass(frozen=True)
class Silences(FedMF):
    """It would be charged nothing, if anybody asked it."""

    stated_by = None

    def releases(self, cohort: Cohort) -> Sequence[Charge]:
        return ()


def test_releases_are_not_overridden() -> None:
    due = releases(Silences(factors=2), COHORT)
    assert due == releases(FedMF(factors=2), COHORT)
    assert {charge.observer for charge in due} == set(OBSERVERS)
    fitted = fit(Silences(factors=2), Simulator(leave_one_out(load(DATA))), rounds=2)
    assert fitted.ledger.releases() == 2
    assert set(fitted.epsilon.values()) == {float("inf")}

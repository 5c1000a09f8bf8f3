"""What a report on an impression is charged."""

from __future__ import annotations

import numpy as np
import pytest

from homebody.core import Cohort
from homebody.privacy import Channel, ImpressionReport, Ledger
from homebody.privacy.queries import before_padding

ALL = Cohort(np.arange(30), "all", 30, 30)


def charged(stage: ImpressionReport, reports: int) -> Ledger:
    ledger = Ledger()
    for number in range(reports):
        ledger.charge(f"round {number}", Channel(stage).charges(ALL))
    return ledger


@pytest.mark.parametrize("mechanism", ["choice", "attention"])
@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_a_person_costs_both_halves_and_an_interaction_one(mechanism: str, padding: float) -> None:
    stage = ImpressionReport(0.5, mechanism, padding=padding)  # type: ignore[arg-type]
    ledger, whole = charged(stage, reports=3), before_padding(0.5, 0.0, padding)[0]
    for observer in ("server", "clients", "public"):
        assert ledger.epsilon(observer, "user", delta=0.0).epsilon == pytest.approx(3 * (whole + 0.5))  # type: ignore[arg-type]
        assert ledger.epsilon(observer, "interaction", delta=0.0).epsilon == pytest.approx(1.5)  # type: ignore[arg-type]


def test_gaussian_noise_is_charged_for_both_units() -> None:
    ledger = charged(ImpressionReport(1.0, "attention", 5, noise="gaussian"), reports=1)
    for unit in ("user", "interaction"):
        assert 1.9 < ledger.epsilon("server", unit, delta=1e-3).epsilon <= 2.0  # type: ignore[arg-type]

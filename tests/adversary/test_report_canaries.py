"""Canaries that send reports on impressions. Seeds are fixed; confidences are as `plant` states them."""

from __future__ import annotations

import pytest
import torch
from tests.adversary.news import certified, started

from homebody.adversary.canaries import Finding, plant
from homebody.adversary.report_canaries import opposites
from homebody.core import Update
from homebody.methods.privaterec import PrivateRec
from homebody.privacy.impressions import ImpressionReport
from homebody.privacy.queries import Attention, attention_l1, attention_l2
from homebody.rng import Rng

CHEAP = {"steps": 1, "batch_size": 16}


def found(method: PrivateRec, **how: object) -> dict[str, Finding]:
    simulator, _ = started(method)
    findings = plant(method, simulator, **{"rounds": 2, "canaries": 400, **how})  # type: ignore[arg-type]
    assert [one.observer for one in findings] == ["server", "clients", "public"]
    return {one.observer: one for one in findings}


@pytest.mark.parametrize(
    "method",
    [
        certified(**CHEAP, epsilon=0.5),
        certified(**CHEAP, epsilon=0.5, padding=0.5),
        certified(**CHEAP, mechanism="attention", basis=5, epsilon=0.5),
        certified(**CHEAP, mechanism="attention", basis=5, epsilon=0.5, theta=0.5),
        certified(**CHEAP, mechanism="attention", basis=5, epsilon=0.5, noise="gaussian"),
    ],
    ids=["choice", "padded", "laplace", "clipped", "gaussian"],
)
def test_lower_bounds_stay_under_what_is_certified(method: PrivateRec) -> None:
    """A right ledger fails this with a probability of at most 0.001 for each of five cases."""
    server = found(method, confidence=0.999)["server"]
    assert server.lower is not None
    assert server.lower.epsilon <= server.certified < 4
    assert not server.contradicted


def test_large_epsilons_show_and_nothing_is_measured_in_the_model() -> None:
    findings = found(certified(**CHEAP, epsilon=8.0))
    assert findings["server"].lower is not None
    assert findings["server"].lower.epsilon > 3
    assert findings["clients"].lower is findings["public"].lower is None


def test_reports_that_tell_too_much_are_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    right, loud = ImpressionReport.device, ImpressionReport(3.0)

    def device(self: ImpressionReport, update: Update, rng: Rng) -> Update:
        return right(loud, update, rng)

    monkeypatch.setattr(ImpressionReport, "device", device)
    assert found(certified(**CHEAP, epsilon=0.5), confidence=0.999)["server"].contradicted


def test_a_cohort_is_drawn_and_canaries_in_it_are_read() -> None:
    server = found(certified(**CHEAP, epsilon=8.0), cohort=200)["server"]
    assert server.lower is not None
    assert 1 < server.lower.epsilon < server.certified
    assert not server.contradicted


@pytest.mark.parametrize("theta", [0.3, 0.5, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("basis", [2, 5, 16])
def test_opposites_are_as_far_apart_as_the_sensitivity_says(theta: float, basis: int) -> None:
    from homebody.adversary.impressions import exact

    for noise, norm, most in (("laplace", 1, attention_l1(theta, basis)), ("gaussian", 2, attention_l2(theta))):
        stage = ImpressionReport(1.0, "attention", basis, theta, noise)  # type: ignore[arg-type]
        assert isinstance(stage.query, Attention)
        heads, tails = exact(stage.query, opposites(stage)).double()
        distance = float(torch.linalg.vector_norm(heads - tails, norm))
        assert most * (1 - 1e-5) <= distance <= most

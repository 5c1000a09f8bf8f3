"""Budgets: kept, counted in rounds, and spent to 0.1 %."""

from __future__ import annotations

import pytest

from homebody.errors import HomebodyError
from homebody.privacy.accountant import epsilon, within
from homebody.privacy.budget import calibrate_events
from homebody.privacy.events import Event, GaussianRelease, LaplaceRelease, Relation, Reports, Sampling


def fixed(cohort: int, population: int) -> Sampling:
    return Sampling("fixed", cohort, population)


def poisson(cohort: int, population: int) -> Sampling:
    return Sampling("poisson", cohort, population)


class TestBudgets:
    def test_within(self) -> None:
        event = GaussianRelease(1, "add-remove", poisson(30, 4800))
        # Under the cheap accountant's bound, over the tight one's; between the two; and over both.
        assert within([(event, 1000)], 1.7, 1e-6)
        assert within([(event, 1000)], 1.3, 1e-6)
        assert not within([(event, 1000)], 1.29, 1e-6)

    @pytest.mark.parametrize(
        ("event", "target", "delta", "rounds"),
        [
            (Reports(1.0), 20.5, 0, 20),
            (Reports(1.0), 0.5, 0, 0),
            (GaussianRelease(1, "replace-one", fixed(30, 4800)), 2.5, 1e-6, 1048),
        ],
    )
    def test_the_most_rounds(self, event: Event, target: float, delta: float, rounds: int) -> None:
        assert not rounds or within([(event, rounds)], target, delta)
        assert not within([(event, rounds + 1)], target, delta)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("relation", "sampling", "kind"),
        [
            ("replace-one", fixed(100, 943), "gaussian"),
            ("add-remove", poisson(100, 943), "gaussian"),
            ("add-remove", Sampling(), "gaussian"),
            ("replace-one", Sampling(), "laplace"),
        ],
    )
    @pytest.mark.parametrize("target", [0.5, 8.0])
    def test_calibration_spends_the_budget_and_no_more(
        self, relation: Relation, sampling: Sampling, kind: str, target: float
    ) -> None:
        release = GaussianRelease if kind == "gaussian" else LaplaceRelease
        noise = calibrate_events(lambda z: [(release(z, relation, sampling), 100)], target, 1e-5)
        spent = epsilon([(release(noise, relation, sampling), 100)], 1e-5).epsilon
        assert target * (1 - 1e-3) <= spent <= target

    def test_calibration_of_a_pure_budget(self) -> None:
        noise = calibrate_events(lambda b: [(LaplaceRelease(b, "replace-one"), 10)], 5.0, 0)
        assert noise == pytest.approx(2, rel=2e-3)

    def test_calibration_of_several_events(self) -> None:
        def events(noise: float) -> list[tuple[Event, int]]:
            return [(GaussianRelease(noise, "replace-one"), 10), (Reports(1.0), 1)]

        noise = calibrate_events(events, 4.0, 1e-5)
        assert 4 * (1 - 1e-3) <= epsilon(events(noise), 1e-5).epsilon <= 4

    def test_what_no_noise_can_reach(self) -> None:
        with pytest.raises(HomebodyError, match="No noise brings"):
            calibrate_events(lambda z: [(GaussianRelease(z, "replace-one"), 1), (Reports(3.0), 1)], 2.0, 1e-5)
        with pytest.raises(HomebodyError, match="No noise brings ε down to 1 at δ = 0: take a larger ε or δ"):
            calibrate_events(lambda z: [(GaussianRelease(z, "add-remove"), 1)], 1, 0)
        with pytest.raises(HomebodyError, match="above 0"):
            calibrate_events(lambda z: [(GaussianRelease(z, "add-remove"), 1)], 0, 1e-6)

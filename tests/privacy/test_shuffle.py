"""Amplification by shuffling, against the published figures and by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.privacy.accountant import epsilon
from homebody.privacy.events import PureRelease, Reports, ShuffledReports
from homebody.privacy.shuffle import clone_losses, closed_form, closed_form_limit, split_on_grid


def shuffled(each: float, users: int, delta: float, *, count: int = 1, rounds: int = 1) -> dict[str, float]:
    return dict(epsilon([(ShuffledReports(each, count, users), rounds)], delta).bounds)


def test_the_authors_example() -> None:
    # The README of the authors' program: 100,000 reports of ε = 4 at δ = 1e-6 are between 0.16754 and 0.17279 by its
    # numerical bound, and at most 0.53780 by its closed form, of which Theorem 3.1 is the simpler, tighter variant.
    bounds = shuffled(4, 100_000, 1e-6)
    assert 0.1675385583317841 <= bounds["pld"] <= 0.172790550755978
    assert bounds["closed-form shuffle"] == pytest.approx(0.5378040242374512, rel=0.01)
    assert bounds["closed-form shuffle"] < 0.5378040242374512


def test_the_closed_form_by_hand() -> None:
    # n = 10,000, ε₀ = log 3, δ = 4/e^4: (2/4)(8 √(3·4)/100 + 24/10,000).
    expected = math.log(1 + 0.5 * (8 * math.sqrt(12) / 100 + 0.0024))
    assert closed_form(math.log(3), 10_000, 4 * math.exp(-4)) == pytest.approx(expected)


def test_the_closed_form_has_a_condition() -> None:
    limit = closed_form_limit(6040, 1e-6)
    assert limit == pytest.approx(math.log(6040 / (16 * math.log(2e6))))
    assert closed_form(limit, 6040, 1e-6) is not None
    assert closed_form(limit * 1.0001, 6040, 1e-6) is None
    assert closed_form(1.0, 6040, 0) is None
    assert "closed-form shuffle" not in shuffled(2.5, 1000, 1e-6)
    assert "closed-form shuffle" in shuffled(2.5, 6040, 1e-6)


@pytest.mark.parametrize(("each", "users"), [(0.5, 1), (1.0, 2), (1.0, 12), (2.0, 30), (0.1, 30)])
def test_the_losses_by_enumeration(each: float, users: int) -> None:
    """Both worlds' probability of every pair of counts, straight from the definition."""
    rate, right = math.exp(-each), math.exp(each) / (1 + math.exp(each))
    worlds: dict[tuple[int, int], list[float]] = {}
    for c in range(users):
        for a in range(c + 1):
            chance = math.comb(users - 1, c) * rate**c * (1 - rate) ** (users - 1 - c) * math.comb(c, a) / 2**c
            for pair, first, second in (((a + 1, c - a), right, 1 - right), ((a, c - a + 1), 1 - right, right)):
                here = worlds.setdefault(pair, [0.0, 0.0])
                here[0] += chance * first
                here[1] += chance * second
    loss, mass = clone_losses(each, users)
    assert mass.sum() == pytest.approx(1)
    assert (mass * np.exp(-loss)).sum() == pytest.approx(1)
    for level in np.linspace(0, each, 9):
        exact = sum(max(0.0, first - math.exp(level) * second) for first, second in worlds.values())
        ours = (mass * np.maximum(0, -np.expm1(level - loss))).sum()
        assert ours == pytest.approx(exact, abs=1e-12)


def test_alone_there_is_nobody_to_hide_among() -> None:
    assert shuffled(1.5, 1, 0)["basic"] == 1.5
    assert min(shuffled(1.5, 1, 1e-9).values()) == pytest.approx(1.5, abs=1e-3)


def test_without_delta_a_shuffle_hides_nothing() -> None:
    assert shuffled(2.5, 6040, 0, count=100, rounds=20) == {"basic": 5000}


def test_reports_of_one_person_compose() -> None:
    bounds = shuffled(2.5, 6040, 1e-6, count=100, rounds=20)
    assert bounds == shuffled(2.5, 6040, 1e-6, count=2000)
    assert bounds["pld"] == pytest.approx(21.4, rel=0.01)
    # Between one shuffle and the sum of 2,000; far under what the server could read without the proxy.
    assert 2000 * shuffled(2.5, 6040, 1e-6)["pld"] > bounds["pld"] > 10 * shuffled(2.5, 6040, 1e-6)["pld"]
    assert epsilon([(Reports(2.5, 100), 20)], 1e-6).epsilon > 100 * bounds["pld"]
    assert bounds["pld"] < bounds["closed-form shuffle"] < bounds["basic"]


def test_closed_forms_compose_with_their_share_of_delta() -> None:
    each = closed_form(1.0, 6040, 1e-6 / 20)
    assert each is not None
    known = epsilon([(PureRelease(each, 1e-6 / 20), 10)], 1e-6, only=("basic", "optimal", "rdp"))
    assert shuffled(1.0, 6040, 1e-6, rounds=10)["closed-form shuffle"] == pytest.approx(known.epsilon)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 4), st.integers(1, 20_000), st.sampled_from([1e-4, 1e-6, 1e-8]))
def test_the_numerical_bound_is_under_the_closed_form_and_improves_with_people(
    each: float, users: int, delta: float
) -> None:
    bounds = shuffled(each, users, delta)
    assert bounds["pld"] <= bounds.get("closed-form shuffle", each) + 2e-4
    assert shuffled(each, 2 * users, delta)["pld"] <= bounds["pld"] + 2e-4


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 1)), min_size=1, max_size=20), st.floats(0.001, 0.5))
def test_the_grid_keeps_both_worlds_and_never_tells_less(cells: list[tuple[float, float]], interval: float) -> None:
    losses, masses = (np.array(column) for column in zip(*cells, strict=True))
    lowest, mass = split_on_grid(losses, masses, interval)
    points = (lowest + np.arange(len(mass))) * interval
    assert mass.sum() == pytest.approx(masses.sum())
    assert (mass * np.exp(-points)).sum() == pytest.approx((masses * np.exp(-losses)).sum())
    for level in np.linspace(-5, 5, 7):
        before = (masses * np.maximum(0, -np.expm1(level - losses))).sum()
        assert (mass * np.maximum(0, -np.expm1(level - points))).sum() >= before - 1e-9 * (1 + math.exp(level + 5))


@pytest.mark.parametrize("each", [25.0, 35.0, 800.0])
def test_a_report_that_hides_nothing_is_not_helped_by_a_shuffle(each: float) -> None:
    assert min(shuffled(each, 100, 1e-6, count=2).values()) == pytest.approx(2 * each, rel=1e-5)

"""Areas, rates and their intervals, and what (ε, δ) allows."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.adversary.rates import Allowed, allowed, balanced, ceiling, clopper_pearson_interval, delong, rate_at


def test_delongs_interval_by_hand() -> None:
    scores, members = np.array([3.0, 1.0, 2.0, 2.0, 0.0]), np.array([True, True, False, False, False])
    found = delong(scores, members)
    # Of the members 3 is above all three and 1 above one; 2, 2 and 0 are below one, one and both of the two.
    assert found.value == pytest.approx((1 + 1 / 3) / 2)
    spread = np.var([1, 1 / 3], ddof=1) / 2 + np.var([1 / 2, 1 / 2, 1], ddof=1) / 3
    assert found.low == pytest.approx(max(0, found.value - 1.959964 * math.sqrt(spread)), abs=1e-6)
    assert found.high == 1.0


def test_ties_are_half_and_show_nothing() -> None:
    found = delong(np.zeros(40), np.arange(40) < 20)
    assert found.value == 0.5


def test_delongs_interval_holds_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    members = np.arange(120) < 60
    truth = 0.5 * (1 + math.erf(1 / 2))  # of two normals, one deviation apart
    held = 0
    for _ in range(400):
        found = delong(generator.normal(size=120) + members, members)
        held += found.low <= truth <= found.high
    assert held / 400 > 0.91  # 95 % less four standard errors


def test_a_perfect_order_is_not_certain() -> None:
    up, down = (delong(sign * np.arange(40.0), np.arange(40) >= 20) for sign in (1, -1))
    assert (up.value, up.high, down.value, down.low) == (1, 1, 0, 0)
    assert up.low == pytest.approx(0.025 ** (1 / 20))
    assert down.high == pytest.approx(1 - 0.025 ** (1 / 20))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.5, 1e-3), (2.0, 0.05), (8.0, 1e-6)])
def test_what_is_allowed_is_one_curve(epsilon: float, delta: float) -> None:
    bound = Allowed(epsilon, delta)
    false = np.linspace(0, 1, 20_001)
    true = np.array([bound.rate(one) for one in false])
    area = float(((true[1:] + true[:-1]) / 2).mean())
    assert bound.auc == pytest.approx(area, abs=1e-4)
    assert bound.accuracy == pytest.approx((1 + (true - false).max()) / 2, abs=1e-3)
    # Both of the inequalities that define (ε, δ) hold on it, and everywhere one of them with equality.
    first, second = math.exp(epsilon) * false + delta - true, math.exp(epsilon) * (1 - true) + delta - (1 - false)
    assert min(first.min(), second.min()) > -1e-9
    touched = np.minimum(np.abs(first), np.abs(second))[true < 1]
    assert touched.max(initial=0) < 1e-6 * math.exp(epsilon)


def test_one_added_or_removed_takes_two_steps_to_another_in_their_place() -> None:
    assert allowed(1.0, 1e-3, "replace-one") == Allowed(1.0, 1e-3)
    assert allowed(1.0, 1e-3, "add-remove") == Allowed(2.0, pytest.approx((1 + math.e) * 1e-3))
    assert allowed(math.inf, 1e-3, "add-remove").auc == 1.0


def test_rates_count_over_the_threshold() -> None:
    others, mine = np.arange(300.0), np.array([296.5, 297.5, 298.0, 298.5, 400.0])
    scores, members = np.concatenate([others, mine]), np.arange(305) >= 300
    found = rate_at(scores, members, 0.01)
    assert found is not None
    # Three of the others may be taken for members: 297, 298 and 299. The threshold is 296.
    assert (found.true.value, found.false.value) == (1.0, 0.01)
    assert found.true == clopper_pearson_interval(5, 5)
    few = rate_at(scores[1:], members[1:], 0.005)
    assert few is not None
    assert (few.true.value, few.false.value) == (0.4, pytest.approx(1 / 299))
    assert rate_at(scores, members, 0.001) is None


def test_ties_at_the_threshold_are_not_taken() -> None:
    scores, members = np.zeros(300), np.arange(300) >= 200
    found = rate_at(scores, members, 0.01)
    assert found is not None
    assert (found.true.value, found.false.value) == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=12))
def test_the_ceiling_is_the_best_of_all_classifiers(people: list[tuple[int, bool]]) -> None:
    kinds, members = np.array([kind for kind, _ in people]), np.array([member for _, member in people])
    if members.all() or not members.any():
        return
    best = max(balanced(np.array(rule)[kinds], members).value for rule in product([False, True], repeat=4))
    assert ceiling(kinds, members) == pytest.approx(best)

"""What must hold of ε whatever was charged: it never falls, does not depend on order, and is no more than its parts.

Bounds come from grids and series, so they may differ by a little where the truth does not: a relative 1e-3 is allowed.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from homebody.privacy import (
    Charge,
    Event,
    GaussianRelease,
    LaplaceRelease,
    Ledger,
    NonPrivate,
    PureRelease,
    Reports,
    Sampling,
    ShuffledReports,
)
from homebody.privacy.accountant import epsilon

SLACK = 1 + 1e-3
DELTA = 1e-6
Counted = list[tuple[Event, int]]

few = st.sampled_from([1, 2, 3, 20, 400])
multiplier = st.sampled_from([0.5, 1.0, 2.0, 4.0, 30.0])
small = st.sampled_from([0.01, 0.1, 1.0, 2.5])
some = st.sampled_from([Sampling(), Sampling("fixed", 30, 4800), Sampling("fixed", 60, 4800)])
by_chance = st.sampled_from([Sampling(), Sampling("poisson", 1, 100)])
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(GaussianRelease, multiplier, st.just("replace-one"), some),
    st.builds(GaussianRelease, multiplier, st.just("add-remove"), by_chance),
    st.builds(LaplaceRelease, multiplier, st.just("replace-one")),
    st.builds(PureRelease, small, st.sampled_from([0.0, 1e-9]), st.just("replace-one")),
    st.builds(Reports, small, few),
    # Shuffles of the same cost under different names: 2 × 10,000 people at one ε.
    st.builds(ShuffledReports, small, st.sampled_from([1, 5]), st.sampled_from([5_000, 10_000, 10_001])),
)
ledgers = st.lists(st.tuples(events, few), min_size=1, max_size=4)
quickly = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@quickly
@given(ledgers, st.tuples(events, few), st.sampled_from([1, 1, 1, 3]))
def test_one_more_charge_never_lowers_epsilon(ran: Counted, more: tuple[Event, int], group: int) -> None:
    before, after = epsilon(ran, DELTA, group=group), epsilon([*ran, more], DELTA, group=group)
    assert after.epsilon * SLACK >= before.epsilon
    for name, value in before.bounds.items():
        # By each accountant alone as well, as long as it covers the larger ledger and the relation stays.
        if name in after.bounds and after.relation == before.relation:
            assert after.bounds[name] * SLACK >= value, name


@quickly
@given(ledgers)
def test_the_order_of_charges_does_not_matter(ran: Counted) -> None:
    assert epsilon(ran, DELTA).epsilon == pytest.approx(epsilon(ran[::-1], DELTA).epsilon, rel=1e-6)


@quickly
@given(ledgers, ledgers)
def test_a_whole_ledger_costs_no_more_than_its_parts(one: Counted, other: Counted) -> None:
    parts = epsilon(one, DELTA / 2).epsilon + epsilon(other, DELTA / 2).epsilon
    if epsilon(one, DELTA).relation == epsilon(other, DELTA).relation:
        assert epsilon([*one, *other], DELTA).epsilon <= parts * SLACK


@pytest.mark.parametrize("epsilon_", [0.5, 1.0])
def test_shuffles_of_equal_cost_are_counted_apart(epsilon_: float) -> None:
    """5,000 rounds, and one more with another number of people whose closed form is the same."""
    many = (ShuffledReports(epsilon_, 1, 10_000), 5_000)
    alone = epsilon([many], DELTA)
    for users in (10_000, 10_001, 10**9):
        assert epsilon([many, (ShuffledReports(epsilon_, 1, users), 1)], DELTA).epsilon * SLACK >= alone.epsilon
    # Reports so small that both come to the same term.
    tiny = [(ShuffledReports(1e-12, 1, users), 5_000) for users in (10_000, 20_000)]
    both = epsilon(tiny, DELTA, only=("closed-form shuffle",))
    one = epsilon(tiny[:1], DELTA, only=("closed-form shuffle",))
    assert both.epsilon * SLACK >= one.epsilon


@quickly
@given(st.lists(events, min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_ledger_that_grows_never_says_less(charges: list[Event], twice: list[bool]) -> None:
    """Through the ledger itself, release by release; for reports and interactions too."""
    ledger = Ledger()
    said = dict.fromkeys(("user", "interaction", "report"), 0.0)
    for number, event in enumerate(charges):
        for _ in range(1 + twice[number]):
            ledger.charge(f"train/{number}", [Charge("public", "user", event)])
        for unit, before in said.items():
            now = ledger.epsilon("public", unit, delta=DELTA).epsilon
            assert now * SLACK >= before
            said[unit] = now
    ledger.charge("last", [Charge("public", "user", NonPrivate("everything is told"))])
    assert math.isinf(ledger.epsilon("public", delta=DELTA).epsilon)
    ledger.close()

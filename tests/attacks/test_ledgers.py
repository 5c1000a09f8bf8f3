"""What must hold of ε whatever was charged: it never falls, does not depend on order, and is no more than its parts.

Bounds come from grids and series, so they may differ by a little where the truth does not: a relative 1e-3 is allowed.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.attacks.conftest import Campaign

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
from homebody.privacy.accountant import Accountant, epsilon
from homebody.privacy.events import Unit

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
cheap: st.SearchStrategy[Event] = st.one_of(
    st.builds(GaussianRelease, multiplier, st.just("replace-one")),
    st.builds(GaussianRelease, multiplier, st.just("add-remove")),
)
ledgers = st.lists(st.tuples(events, few), min_size=1, max_size=4)
CHEAP: tuple[Accountant, ...] = ("basic", "optimal", "analytic", "closed-form shuffle", "rdp")


def examples(count: int) -> settings:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=slow, database=None)


def check_growth(ran: Counted, more: tuple[Event, int], group: int, only: tuple[Accountant, ...] | None) -> None:
    before = epsilon(ran, DELTA, group=group, only=only)
    after = epsilon([*ran, more], DELTA, group=group, only=only)
    if only is None:
        assert after.epsilon * SLACK >= before.epsilon
    for name, value in before.bounds.items():
        # By each accountant alone as well, as long as it covers the larger ledger and the relation stays. Whoever goes
        # part by part may find a better way to part a larger ledger.
        if name in after.bounds and after.relation == before.relation and name != "by parts":
            assert after.bounds[name] * SLACK >= value, name


def check_order(ran: Counted, only: tuple[Accountant, ...] | None) -> None:
    there, back = epsilon(ran, DELTA, only=only), epsilon(ran[::-1], DELTA, only=only)
    assert there.epsilon == pytest.approx(back.epsilon, rel=1e-6)


def check_parts(one: Counted, other: Counted) -> None:
    whole = epsilon([*one, *other], DELTA)
    halves = [epsilon(part, DELTA / 2) for part in (one, other)]
    if all(half.relation == whole.relation for half in halves):
        assert whole.epsilon <= sum(half.epsilon for half in halves) * SLACK


@pytest.mark.slow
@examples(80)
@given(ledgers, st.tuples(events, few), st.sampled_from([1, 1, 3]))
def test_one_more_charge_never_lowers_a_bound(ran: Counted, more: tuple[Event, int], group: int) -> None:
    check_growth(ran, more, group, CHEAP)


@examples(80)
@given(ledgers)
def test_the_order_of_charges_does_not_matter(ran: Counted) -> None:
    check_order(ran, CHEAP)


@pytest.mark.slow
@examples(8)
@given(ledgers, st.tuples(events, few))
def test_all_accountants_together(ran: Counted, more: tuple[Event, int]) -> None:
    check_growth(ran, more, 1, None)
    check_parts(ran, [more])


def test_a_ledger_is_no_more_than_its_parts_where_no_accountant_covers_it() -> None:
    """Sampled Gaussian noise has no PLD and shuffles no Rényi divergence; what has both must go with the former."""
    noise: Counted = [
        (GaussianRelease(0.5, "replace-one", Sampling("fixed", 30, 4800)), 400),
        (GaussianRelease(1.0, "replace-one"), 3),
        (LaplaceRelease(1.0, "replace-one"), 1),
    ]
    check_parts(noise, [(ShuffledReports(1.0, 5, 5000), 20)])


@pytest.mark.attack
def test_all_accountants_together_at_length(campaign: Campaign) -> None:
    checked = Counter[str]()

    @examples(campaign.size(300))
    @given(ledgers, ledgers, st.sampled_from([1, 1, 3]))
    def check(one: Counted, other: Counted, group: int) -> None:
        check_growth(one, other[0], group, None)
        check_order([*one, *other], None)
        check_parts(one, other)
        checked["for_one" if group == 1 else "for_a_group"] += 1

    check()
    campaign.did("ledgers that grow, are turned round and are split", checked.total(), **checked)


def test_shuffles_of_equal_cost_are_counted_apart() -> None:
    """Among so few people that shuffling gains nothing: both kinds come to the same term."""
    many, more = (ShuffledReports(0.01, 1, 385), 5_000), (ShuffledReports(0.01, 1, 386), 1)
    both, one = (epsilon(ran, DELTA, only=("closed-form shuffle",)) for ran in ([many, more], [many]))
    assert both.epsilon >= one.epsilon > 0


@examples(25)
@given(st.lists(cheap, min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_ledger_that_grows_never_says_less(charges: list[Event], twice: list[bool]) -> None:
    """Through the ledger itself, release by release; for reports and interactions too."""
    ledger = Ledger()
    said: dict[Unit, float] = {"user": 0.0, "interaction": 0.0, "report": 0.0}
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

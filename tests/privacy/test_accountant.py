"""The accountant: the figures it must meet, the rules it must keep, and second opinions."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.errors import HomebodyError
from homebody.privacy.accountant import Bound, epsilon
from homebody.privacy.events import (
    Event,
    GaussianRelease,
    LaplaceRelease,
    NonPrivate,
    PureRelease,
    Relation,
    Reports,
    Sampling,
    ShuffledReports,
)
from homebody.privacy.mechanisms import amplified


def fixed(cohort: int, population: int) -> Sampling:
    return Sampling("fixed", cohort, population)


def poisson(cohort: int, population: int) -> Sampling:
    return Sampling("poisson", cohort, population)


def gaussian(
    multiplier: float, relation: Relation, rounds: int, delta: float, sampling: Sampling | None = None
) -> Bound:
    return epsilon([(GaussianRelease(multiplier, relation, sampling or Sampling()), rounds)], delta)


class TestFigures:
    @pytest.mark.parametrize(
        ("cohort", "population", "expected"),
        [(5, 4800, 0.899), (30, 4800, 2.446), (2, 760, 1.275), (15, 760, 8.511)],
    )
    def test_fixed_size_under_replace_one(self, cohort: int, population: int, expected: float) -> None:
        bound = gaussian(1, "replace-one", 1000, 1e-6, fixed(cohort, population))
        assert bound.epsilon == pytest.approx(expected, rel=1e-3)
        assert bound.accountant == "rdp"

    @pytest.mark.parametrize(
        ("multiplier", "cohort", "population", "expected"),
        [(1, 30, 4800, 1.298), (1, 15, 760, 4.382), (2, 30, 4800, 0.436), (2, 15, 760, 1.500)],
    )
    def test_poisson_under_add_remove(self, multiplier: int, cohort: int, population: int, expected: float) -> None:
        bound = gaussian(multiplier, "add-remove", 1000, 1e-6, poisson(cohort, population))
        assert bound.epsilon == pytest.approx(expected, rel=2e-3)
        assert bound.accountant == "pld"
        assert bound.epsilon < bound.bounds["rdp"] < 1.35 * bound.epsilon

    def test_gaussian_without_sampling(self) -> None:
        bound = gaussian(4, "add-remove", 100, 1e-3)
        assert bound.bounds["pld"] == pytest.approx(10.20, rel=1e-3)
        assert bound.bounds["rdp"] == pytest.approx(11.27, rel=1e-3)
        assert bound.accountant == "analytic"
        assert bound.epsilon == pytest.approx(bound.bounds["pld"], rel=1e-6)

    @pytest.mark.parametrize(
        ("multiplier", "relation", "expected"),
        [(2, "replace-one", 27.2), (1, "add-remove", 80.0), (0.5, "replace-one", 260.9)],
    )
    def test_views(self, multiplier: float, relation: Relation, expected: float) -> None:
        # σ = 4 and σ = 1 times the clip: replacing one of the views moves the sum twice as far.
        assert gaussian(multiplier, relation, 100, 1e-3).epsilon == pytest.approx(expected, rel=2e-3)

    def test_one_bit_reports(self) -> None:
        assert epsilon([(Reports(1.0), 20)], 0).epsilon == 20
        assert epsilon([(Reports(1.0, 20), 1)], 0).epsilon == 20
        assert epsilon([(Reports(2.5, 100), 20)], 0).epsilon == 5000
        assert epsilon([(Reports(2.5, 100), 20)], 1e-6).epsilon == pytest.approx(4505, rel=1e-3)


class TestPublishedTables:
    """DP-PrivRec's Tables 4 and 5, by the reading that explains them: each of a round's M deltas is counted as a
    composition of its own, 1000·M in all, with the general bound for sampling without replacement of autodp."""

    @pytest.mark.slow
    def test_autodp_reproduces_every_row(self) -> None:
        from homebody.privacy.papers import PRIVREC_DELTAS, PRIVREC_TABLES

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from autodp import rdp_acct, rdp_bank
        compared = 0
        for population, rows in PRIVREC_TABLES.items():
            for cohort, claimed in rows.items():
                accountant = rdp_acct.anaRDPacct()
                accountant.compose_subsampled_mechanism(
                    lambda order: rdp_bank.RDP_gaussian({"sigma": 1.0}, order), cohort / population, coeff=1000 * cohort
                )
                for delta, value in zip(PRIVREC_DELTAS, claimed, strict=True):
                    assert accountant.get_eps(delta) == pytest.approx(value, abs=1e-3)
                    ours = gaussian(1, "replace-one", 1000, delta, fixed(cohort, population)).epsilon
                    assert ours < value
                    compared += 1
        assert compared == 36


class TestTraps:
    """What dp-accounting 0.6 does, and that we do not."""

    def test_pld_forgets_how_often_a_randomised_response_happened(self) -> None:
        import dp_accounting as dp

        flip = 2 / (math.e + 1)
        trap = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
        trap.compose(dp.RandomizedResponseDpEvent(flip, 2), 20)
        assert trap.get_epsilon(0) == pytest.approx(1, abs=1e-3)
        for event, count in ((Reports(1.0), 20), (Reports(1.0, 4), 5), (PureRelease(1.0), 20)):
            for delta in (0.0, 1e-6):
                bound = epsilon([(event, count)], delta)
                assert all(value == pytest.approx(20, rel=1e-3) for value in bound.bounds.values())

    def test_pld_doubles_the_sensitivity_under_replace_one_and_rdp_does_not(self) -> None:
        import dp_accounting as dp

        relation = dp.NeighboringRelation.REPLACE_ONE
        by_pld, by_rdp = dp.pld.PLDAccountant(relation), dp.rdp.RdpAccountant(neighboring_relation=relation)
        for trap in (by_pld, by_rdp):
            trap.compose(dp.GaussianDpEvent(4), 100)
        assert by_pld.get_epsilon(1e-3) == pytest.approx(27.2, rel=2e-3)
        assert by_rdp.get_epsilon(1e-3) == pytest.approx(11.27, rel=1e-3)
        same, other = (gaussian(4, relation, 100, 1e-3).bounds for relation in ("add-remove", "replace-one"))
        assert same == other

    def test_laplace_and_randomised_response_take_different_relations(self) -> None:
        import dp_accounting as dp

        for relation, event in (
            (dp.NeighboringRelation.REPLACE_ONE, dp.LaplaceDpEvent(1)),
            (dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.RandomizedResponseDpEvent(0.5, 2)),
        ):
            with pytest.raises(dp.UnsupportedEventError):
                dp.pld.PLDAccountant(relation).compose(event)
        # Both under replace-one, as stated: ε = 1 and ε = 2.
        together = epsilon([(LaplaceRelease(1, "replace-one"), 1), (Reports(2.0), 1)], 0)
        assert (together.epsilon, together.relation) == (3, "replace-one")
        # The Laplace noise stated under add-remove protects a replacement half as well.
        together = epsilon([(LaplaceRelease(1, "add-remove"), 1), (Reports(2.0), 1)], 0)
        assert (together.epsilon, together.relation) == (4, "replace-one")

    @pytest.mark.parametrize("multiplier", [0.05, 0.7, 20.0])
    @pytest.mark.parametrize("noise", ["gaussian", "laplace"])
    def test_losses_are_inverted_together_to_the_last_digit(self, noise: str, multiplier: float) -> None:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        from homebody.privacy.mechanisms import _DISCRETE, GaussianTerm, LaplaceTerm, Term, composed_pld

        interval = 1e-2 if multiplier < 0.1 else 1e-4
        term: Term = GaussianTerm(multiplier) if noise == "gaussian" else LaplaceTerm(multiplier * _DISCRETE)
        ours = composed_pld({term: 1}, interval)._pmf_remove.to_dense_pmf()
        made = getattr(distributions, f"from_{noise}_mechanism")(multiplier, value_discretization_interval=interval)
        theirs = made._pmf_remove.to_dense_pmf()
        assert (ours._lower_loss, ours._infinity_mass) == (theirs._lower_loss, theirs._infinity_mass)
        assert np.array_equal(ours._probs, theirs._probs)

    @pytest.mark.parametrize(("multiplier", "cohort", "population"), [(0.3, 999, 1000), (1.0, 30, 4800), (400.0, 1, 2)])
    def test_divergences_of_a_sample_are_summed_together_to_the_last_digit(
        self, multiplier: float, cohort: int, population: int
    ) -> None:
        import dp_accounting as dp

        from homebody.privacy.mechanisms import GaussianTerm, _rdp_of_sampled_gaussian, rdp_orders

        orders = rdp_orders()
        event = dp.SampledWithoutReplacementDpEvent(population, cohort, dp.GaussianDpEvent(multiplier))
        theirs = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation.REPLACE_ONE).compose(event).rdp
        term = GaussianTerm(multiplier, Sampling("fixed", cohort=cohort, population=population))
        assert np.array_equal(_rdp_of_sampled_gaussian(term, orders), theirs)


class TestRules:
    def test_nothing_released(self) -> None:
        assert epsilon([], 1e-6).epsilon == 0

    def test_one_release_that_is_not_private_is_enough(self) -> None:
        bound = epsilon([(GaussianRelease(100, "add-remove"), 1), (NonPrivate("plain sums"), 1)], 1e-6)
        assert bound.epsilon == math.inf
        assert bound.notes == ("Not private: plain sums.",)

    def test_gaussian_noise_has_no_pure_epsilon(self) -> None:
        bound = gaussian(1, "add-remove", 1, 0)
        assert (bound.epsilon, bound.accountant) == (math.inf, "none")

    def test_the_whole_population_is_no_sample(self) -> None:
        assert gaussian(2, "replace-one", 10, 1e-6, fixed(9, 9)).bounds == gaussian(2, "replace-one", 10, 1e-6).bounds

    def test_poisson_is_not_counted_under_replace_one(self) -> None:
        bound = gaussian(2, "replace-one", 10, 1e-6, poisson(1, 1000))
        assert bound.bounds == gaussian(2, "replace-one", 10, 1e-6).bounds
        assert any("Poisson" in note for note in bound.notes)

    def test_the_order_and_grouping_of_events_do_not_matter(self) -> None:
        one, two = GaussianRelease(3, "replace-one"), Reports(0.1, 2)
        together = epsilon([(one, 5), (two, 3)], 1e-6)
        assert epsilon([(two, 1), (one, 2), (two, 2), (one, 3)], 1e-6).epsilon == pytest.approx(together.epsilon)

    def test_mixed_ledgers_cost_more_than_their_parts_and_no_more_than_their_sum(self) -> None:
        parts: list[tuple[Event, int]] = [
            (GaussianRelease(1, "replace-one", fixed(30, 4800)), 100),
            (GaussianRelease(5, "replace-one"), 10),
            (LaplaceRelease(10, "replace-one"), 10),
            (Reports(0.5), 3),
            (ShuffledReports(1.0, 2, 5000), 10),
            (PureRelease(0.1, 1e-9), 5),
        ]
        apart = [epsilon([part], 1e-6 / len(parts)).epsilon for part in parts]
        together = epsilon(parts, 1e-6)
        assert together.accountant == "by parts"
        assert max(epsilon([part], 1e-6).epsilon for part in parts) < together.epsilon < sum(apart)
        # The shuffle by PLD with a quarter of δ, all the rest by RDP.
        shuffle, rest = parts[4:5], [*parts[:4], *parts[5:]]
        two = epsilon(shuffle, 2.5e-7, only=("pld",)), epsilon(rest, 7.5e-7, only=("rdp",))
        assert together.epsilon == pytest.approx(sum(part.epsilon for part in two))

    def test_mixed_without_shuffles_needs_no_split(self) -> None:
        bound = epsilon([(GaussianRelease(1, "replace-one", fixed(30, 4800)), 100), (Reports(0.5), 3)], 1e-6)
        assert set(bound.bounds) == {"basic", "rdp", "by parts"}
        assert bound.accountant == "rdp"

    def test_delta_of_a_release_counts(self) -> None:
        assert epsilon([(PureRelease(0.1, 1e-7), 10)], 1e-6).epsilon == pytest.approx(1)
        assert epsilon([(PureRelease(0.1, 1e-7), 11)], 1e-6).epsilon == math.inf
        # As a replacement it fails for certain.
        assert epsilon([(PureRelease(5, 0.5, "add-remove"), 1), (Reports(1.0), 1)], 0.9).epsilon == math.inf
        assert epsilon([(PureRelease(1, 0.999999), 10**6)], 0.9).epsilon == math.inf

    def test_every_accountant_takes_it_off(self) -> None:
        noise = (GaussianRelease(2, "replace-one"), 5)
        leaky = epsilon([noise, (PureRelease(0.5, 9e-7), 1)], 1e-6).bounds
        clean = epsilon([noise, (PureRelease(0.5), 1)], 1e-7).bounds
        assert leaky["rdp"] == pytest.approx(clean["rdp"], rel=1e-6)
        assert leaky["pld"] == pytest.approx(clean["pld"], rel=1e-3)
        assert leaky["basic"] == pytest.approx(clean["basic"], rel=1e-6)
        assert leaky.keys() == clean.keys() == {"basic", "rdp", "pld"}

    def test_sampling_amplifies_a_pure_release(self) -> None:
        expected = math.log(1 + 0.01 * (math.e - 1))
        for event in (
            PureRelease(1, 0, "replace-one", fixed(1, 100)),
            PureRelease(1, 0, "add-remove", poisson(1, 100)),
            LaplaceRelease(1, "replace-one", fixed(1, 100)),
            LaplaceRelease(1, "add-remove", poisson(1, 100)),
            Reports(0.25, 4, fixed(1, 100)),
        ):
            assert epsilon([(event, 1)], 0).epsilon == pytest.approx(expected)
        assert epsilon([(PureRelease(1, 1e-4, "replace-one", fixed(1, 100)), 1)], 1e-6).epsilon == pytest.approx(
            expected
        )

    def test_amplification_of_a_huge_epsilon(self) -> None:
        assert amplified(5000, 0.5) == pytest.approx(5000 + math.log(0.5))

    def test_a_loss_distribution_is_not_asked_below_its_precision(self) -> None:
        assert "pld" not in gaussian(1, "add-remove", 10, 1e-14, poisson(1, 100)).bounds

    @pytest.mark.parametrize("delta", [-1e-9, 1.0, 2.0, math.nan])
    def test_delta_has_bounds(self, delta: float) -> None:
        with pytest.raises(HomebodyError, match="δ must be"):
            epsilon([(Reports(1.0), 1)], delta)

    @pytest.mark.parametrize("count", [0, -1, 1.5])
    def test_counts_are_whole(self, count: int) -> None:
        with pytest.raises(HomebodyError, match="whole number of times"):
            epsilon([(Reports(1.0), count)], 0)

    def test_of_bounds_that_differ_by_rounding_the_simplest_is_named(self) -> None:
        assert epsilon([(Reports(1.0), 20)], 1e-6).accountant == "optimal"


class TestGroups:
    def test_scaling_where_it_is_exact(self) -> None:
        for one, three in (
            (GaussianRelease(3, "add-remove"), GaussianRelease(1, "add-remove")),
            (LaplaceRelease(3, "add-remove"), LaplaceRelease(1, "add-remove")),
            (Reports(1.0), Reports(3.0)),
        ):
            assert epsilon([(one, 7)], 1e-6, group=3).epsilon == epsilon([(three, 7)], 1e-6).epsilon

    def test_sampled_groups_by_the_general_rule(self) -> None:
        event = GaussianRelease(1, "add-remove", poisson(15, 760))
        pair = epsilon([(event, 1000)], 1e-6, group=2)
        smaller = [10.0 ** -(6 + k / 4) for k in range(20)]
        ones = [(epsilon([(event, 1000)], d, only=("pld",)).epsilon, d) for d in smaller]
        by_hand = min(2 * one for one, d in ones if d * (1 + math.exp(one)) <= 1e-6)
        assert pair.epsilon == pytest.approx(by_hand)
        assert pair.epsilon > 2 * epsilon([(event, 1000)], 1e-6).epsilon

    def test_add_remove_as_replace_one_is_a_group_of_two(self) -> None:
        mixed = epsilon([(GaussianRelease(4, "add-remove"), 100), (Reports(1e-9), 1)], 1e-3)
        assert epsilon([(PureRelease(800, 0, "add-remove"), 1), (Reports(1.0), 1)], 0).epsilon == 1601
        leaky = epsilon([(PureRelease(1, 1e-8, "add-remove"), 1), (Reports(1.0), 1)], 1e-8 * (1 + math.e))
        assert leaky.bounds["basic"] == 3
        assert mixed.bounds["rdp"] == pytest.approx(gaussian(2, "replace-one", 100, 1e-3).bounds["rdp"], rel=1e-6)


class TestSecondOpinions:
    @pytest.mark.parametrize(("cohort", "population"), [(30, 4800), (15, 760)])
    @pytest.mark.parametrize("multiplier", [1.0, 2.0])
    def test_prv_accountant_agrees(self, multiplier: float, cohort: int, population: int) -> None:
        from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

        rate = cohort / population
        mechanism = PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=multiplier)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accountant = PRVAccountant(mechanism, max_self_compositions=1000, eps_error=0.01, delta_error=1e-10)
            low, _, high = accountant.compute_epsilon(1e-6, [1000])
        assert low <= gaussian(multiplier, "add-remove", 1000, 1e-6, poisson(cohort, population)).epsilon <= high

    @pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
    @pytest.mark.parametrize("delta", [1e-3, 1e-6])
    def test_autodp_agrees_on_gaussian_noise(self, multiplier: float, delta: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from autodp import dp_bank
        theirs = dp_bank.get_eps_ana_gaussian(multiplier, delta)
        assert gaussian(multiplier, "add-remove", 1, delta).epsilon == pytest.approx(theirs, rel=1e-6)

    def test_optimal_composition_by_enumeration(self) -> None:
        # Three randomised responses of ε = 1: eight outcomes, summed by hand.
        p, total = math.e / (1 + math.e), 1.5
        worlds = [(p**a * (1 - p) ** (3 - a), (1 - p) ** a * p ** (3 - a), math.comb(3, a)) for a in range(4)]
        fails = sum(n * max(0.0, here - math.exp(total) * there) for here, there, n in worlds)
        assert epsilon([(Reports(1.0), 3)], fails, only=("optimal",)).epsilon == pytest.approx(total)
        assert epsilon([(Reports(1.0), 3)], fails, only=("pld",)).epsilon == pytest.approx(total, abs=1e-3)

    def test_noise_on_several_coordinates_is_no_worse_than_on_one(self) -> None:
        # Laplace noise is accounted on one coordinate that moves by the whole ℓ1 sensitivity. Split over two, the
        # same total tells less, at every ε.
        from homebody.privacy.mechanisms import LaplaceTerm, composed_pld

        for part in (0.01, 0.1, 0.3, 0.5):
            for whole in (0.1, 1.0, 4.0):
                one = composed_pld({LaplaceTerm(1 / whole): 1}, 1e-3)
                split = {LaplaceTerm(1 / (whole * part)): 1, LaplaceTerm(1 / (whole * (1 - part))): 1}
                two = composed_pld(split if part != 0.5 else {LaplaceTerm(2 / whole): 2}, 1e-3)
                for level in np.linspace(0, whole * 0.99, 25):
                    assert two.get_delta_for_epsilon(level) <= one.get_delta_for_epsilon(level)

    @pytest.mark.parametrize("count", [285, 293, 301, 313])
    def test_an_epsilon_whose_exponential_is_no_float(self, count: int) -> None:
        bounds = epsilon([(Reports(2.5), count)], 1e-6).bounds
        assert bounds["pld"] == pytest.approx(bounds["optimal"], rel=1e-5)

    @pytest.mark.parametrize(
        "event",
        [
            ShuffledReports(2.5, 20, 8),
            ShuffledReports(2.5, 20, 6040),
            Reports(2.5, 20),
            LaplaceRelease(0.1, "replace-one"),
        ],
    )
    def test_a_large_epsilon_takes_no_more_memory_than_a_small_one(self, event: Event) -> None:
        # A trainer asks after every round; its plan may run to an ε that protects nobody.
        from homebody.privacy.accountant import _interval
        from homebody.privacy.mechanisms import composed_pld, terms

        for rounds in (1, 40, 300):
            ran = terms([(event, rounds)], "replace-one", set())
            assert composed_pld(ran, _interval(ran))._pmf_remove.size < 2.5e6


class TestProperties:
    noise = st.floats(0.3, 20)
    rounds = st.integers(1, 200)

    @settings(max_examples=10, deadline=None)
    @given(noise, rounds, st.sampled_from([1e-3, 1e-6, 1e-9]))
    def test_more_noise_fewer_rounds_and_a_larger_delta_never_cost_more(self, z: float, t: int, delta: float) -> None:
        here = gaussian(z, "add-remove", t, delta).epsilon
        slack = 1 + 1e-5
        assert gaussian(z * 1.1, "add-remove", t, delta).epsilon <= here * slack
        assert gaussian(z, "add-remove", t + 1, delta).epsilon >= here / slack
        assert gaussian(z, "add-remove", t, delta * 10).epsilon <= here * slack

    @settings(max_examples=15, deadline=None)
    @given(noise, st.integers(1, 20), st.sampled_from([1e-3, 1e-6]))
    def test_every_accountant_is_at_least_the_exact_one(self, z: float, t: int, delta: float) -> None:
        bounds = gaussian(z, "add-remove", t, delta).bounds
        assert all(value >= bounds["analytic"] * (1 - 1e-6) for value in bounds.values())

    @settings(max_examples=15, deadline=None)
    @given(st.floats(0.01, 3), st.integers(1, 60), st.sampled_from([1e-3, 1e-6]))
    def test_reports_stay_between_the_exact_bound_and_the_sum(self, each: float, count: int, delta: float) -> None:
        bounds = epsilon([(Reports(each), count)], delta).bounds
        assert bounds["basic"] == pytest.approx(each * count)
        assert all(value >= bounds["optimal"] * (1 - 1e-6) - 1e-9 for value in bounds.values())
        assert bounds["optimal"] <= bounds["basic"] * (1 + 1e-9)

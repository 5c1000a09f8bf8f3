"""Lower bounds on ε: against the published formula, a second implementation, and mechanisms whose ε is known."""

from __future__ import annotations

import importlib.util
import math
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from homebody.audit.bounds import LARGEST, _largest, clopper_pearson, one_run, one_run_p_value
from homebody.errors import HomebodyError


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    """jax-privacy's auditing module alone: it needs no JAX, its package does."""
    package = importlib.util.find_spec("jax_privacy")
    if package is None or package.origin is None:
        pytest.skip("jax-privacy is not installed")
    spec = importlib.util.spec_from_file_location("its_auditing", Path(package.origin).with_name("auditing.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["its_auditing"] = module
    spec.loader.exec_module(module)
    return module


class TestOneRun:
    @pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
    def test_without_delta_the_p_value_is_the_tail_of_a_binomial(self, epsilon: float) -> None:
        """By enumeration: every guess is right with probability e^ε/(1 + e^ε)."""
        chance = math.exp(epsilon) / (1 + math.exp(epsilon))
        for right in range(5):
            tail = sum(
                math.prod(chance if hit else 1 - chance for hit in hits)
                for hits in product([0, 1], repeat=4)
                if sum(hits) >= right
            )
            assert one_run_p_value(9, 4, right, epsilon, 0.0) == pytest.approx(tail)

    def test_delta_adds_the_term_of_the_theorem(self) -> None:
        """Theorem 5.2, written out as it is printed."""
        coins, guesses, right, epsilon, delta = 60, 30, 24, 0.4, 1e-3
        chance = 1 / (1 + math.exp(-epsilon))
        mass = [math.comb(guesses, k) * chance**k * (1 - chance) ** (guesses - k) for k in range(guesses + 1)]
        beta = sum(mass[right:])
        alpha = max(sum(mass[max(0, right - i) : right]) / i for i in range(1, coins + 1))
        found = one_run_p_value(coins, guesses, right, epsilon, delta)
        assert found == pytest.approx(beta + 2 * coins * delta * alpha)

    def test_all_right_among_ten_thousand_reaches_far(self) -> None:
        coins = np.arange(10_000) % 2 == 0
        found = one_run(np.where(coins, 1.0, 0.0), coins, delta=0.0)
        # The whole ladder shares the error of 5 %, and all 10,000 guesses are right: q^10000 = 0.05 / 11.
        assert found.guesses == found.right == 10_000
        error = 0.05 / 11
        chance = error ** (1 / 10_000)
        assert found.epsilon == pytest.approx(math.log(chance / (1 - chance)), abs=1e-4)

    def test_withheld_guesses_are_those_nearest_the_middle(self) -> None:
        coins = np.tile([True, False], 200)
        scores = np.where(coins, 5.0, -5.0)
        scores[:200] = np.linspace(-1, 1, 200)  # of no use, and in the middle
        found = one_run(scores, coins, delta=1e-6)
        assert (found.guesses, found.right) == (200, 200)

    @pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
    def test_randomised_response_is_never_overestimated_more_often_than_stated(self, epsilon: float) -> None:
        """500 audits of a mechanism that is exactly ε-DP: at 90 %, at most 50 + 4 deviations may be above it."""
        generator = np.random.default_rng(int(10 * epsilon))
        above = 0
        for _ in range(500):
            coins = generator.random(100) < 0.5
            told = coins ^ (generator.random(100) > 1 / (1 + math.exp(-epsilon)))
            above += one_run(told + generator.random(100) / 2, coins, 0.0, 0.9).epsilon > epsilon
        assert above <= 50 + 4 * math.sqrt(500 * 0.1 * 0.9)

    def test_it_agrees_with_jax_privacy(self, oracle: ModuleType) -> None:
        generator = np.random.default_rng(0)
        for delta, shift in ((1e-5, 1.0), (1e-3, 2.0), (1e-6, 4.0)):
            inside, outside = generator.normal(shift, 1, 120), generator.normal(0, 1, 110)
            for threshold in (0.5, 1.0, 2.0):
                theirs = oracle.CanaryScoreAuditor(inside, outside).epsilon_one_run(
                    0.05, delta, threshold_strategy=oracle.Explicit(threshold)
                )
                right, wrong = int((inside >= threshold).sum()), int((outside >= threshold).sum())
                assert _largest(230, right + wrong, right, delta, 0.05) == pytest.approx(theirs, abs=1e-4)

    def test_a_bound_is_never_beyond_what_is_looked_for(self) -> None:
        assert _largest(10**6, 10**6, 10**6, 0.0, 0.5) < LARGEST


class TestClopperPearson:
    def test_two_rates_by_hand(self) -> None:
        """200 runs, half of them to choose the threshold; of the others 50 heads, 5 missed, and 50 tails, 1 false."""
        coins = np.tile([True, False], 100)
        scores = np.where(coins, 1.0, 0.0)
        scores[100 + 2 * np.arange(5)] = 0.0
        scores[101] = 1.0
        found = clopper_pearson(scores, coins, delta=0.01)
        missed, false = stats.beta.ppf(0.975, 6, 45), stats.beta.ppf(0.975, 2, 49)
        assert found.epsilon == pytest.approx(
            max(math.log((0.99 - missed) / false), math.log((0.99 - false) / missed)), rel=1e-6
        )
        assert (found.guesses, found.right) == (100, 94)

    def test_coins_that_all_fall_alike_show_nothing(self) -> None:
        assert clopper_pearson(np.arange(50.0), np.ones(50, dtype=bool), 1e-6).epsilon == 0

    def test_scores_that_know_nothing_show_nothing(self) -> None:
        generator = np.random.default_rng(1)
        assert clopper_pearson(generator.normal(size=2000), generator.random(2000) < 0.5, 1e-6).epsilon < 0.1

    def test_randomised_response_is_never_overestimated_more_often_than_stated(self) -> None:
        generator = np.random.default_rng(2)
        above = 0
        for _ in range(500):
            coins = generator.random(400) < 0.5
            told = coins ^ (generator.random(400) > 1 / (1 + math.exp(-1)))
            above += clopper_pearson(told.astype(float), coins, 0.0, 0.9).epsilon > 1
        assert above <= 50 + 4 * math.sqrt(500 * 0.1 * 0.9)


@pytest.mark.parametrize("estimate", [one_run, clopper_pearson])
def test_nonsense_is_refused(estimate: object) -> None:
    assert callable(estimate)
    with pytest.raises(HomebodyError, match="a score for each coin"):
        estimate(np.zeros(3), np.zeros(4, dtype=bool), 0.0)
    with pytest.raises(HomebodyError, match=r"above 0 and under 1, such as 0.95, not 95"):
        estimate(np.zeros(9), np.zeros(9, dtype=bool), 0.0, 95)
    with pytest.raises(HomebodyError, match="finite"):
        estimate(np.full(9, np.nan), np.zeros(9, dtype=bool), 0.0)

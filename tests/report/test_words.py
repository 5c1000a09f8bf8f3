"""What ε means in words: held against the trade-off that (ε, δ) states."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from homebody.report.words import NOT_COVERED, epsilon_meaning


@given(epsilon=some.floats(0, 20), delta=some.floats(0, 0.5))
def test_best_attack_is_the_exact_trade_off(epsilon: float, delta: float) -> None:
    false = 0.01
    bound = min(math.exp(epsilon) * false + delta, 1 - math.exp(-epsilon) * (1 - delta - false))
    meaning = epsilon_meaning(epsilon, delta)
    assert meaning.found == pytest.approx(bound, abs=1e-12)
    assert meaning.odds == pytest.approx(math.exp(epsilon))


def test_randomised_response_reaches_the_bound() -> None:
    """The mechanism that makes the worst of ε: an attack on it, at its best threshold, finds what is stated."""
    epsilon = math.log(99.0)  # it lies in 1 % of answers, so flagging one answer has 1 % false positives
    assert epsilon_meaning(epsilon).found == pytest.approx(0.99)


def test_more_epsilon_allows_more() -> None:
    found = [epsilon_meaning(epsilon, 1e-6).found for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 56.9, 5000.0, math.inf)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(0.01 + 1e-6)
    assert found[-1] == 1.0


@pytest.mark.parametrize("epsilon", ["inf", math.inf])
def test_infinite_epsilon_promises_nothing(epsilon: str | float) -> None:
    meaning = epsilon_meaning(epsilon, 1e-6)
    assert (meaning.odds, meaning.found, meaning.short) == (math.inf, 1.0, "no bound")
    assert "nothing bounds" in meaning.sentence


def test_zero_is_nothing_only_without_a_slack() -> None:
    assert "depends on one person" in epsilon_meaning(0.0).sentence
    assert "up to δ = 0.1" in epsilon_meaning(0.0, 0.1).sentence
    assert epsilon_meaning(0.0, 0.1).found == pytest.approx(0.11)


def test_words_say_the_numbers() -> None:
    sentence = epsilon_meaning(2.446, 1e-6, "one interaction").sentence
    assert "ε = 2.45" in sentence
    assert "one interaction" in sentence
    assert "factor of at most 11.5" in sentence
    assert "11.54 %" in sentence
    assert "audit" not in sentence
    assert "rules out little" in epsilon_meaning(8, 1e-6).sentence
    assert "nearly all" in epsilon_meaning(60, 1e-6).sentence


def test_what_no_epsilon_covers_is_listed() -> None:
    said = " ".join(NOT_COVERED)
    for subject in ("pool", "stays sure", "known already", "friends", "δ"):
        assert subject in said

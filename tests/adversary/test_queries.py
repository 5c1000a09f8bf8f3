"""Canaries that ask: they show most of what a query costs, and never more; a mechanism that tells more is found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from homebody.adversary.queries import bound, farthest, ratio
from homebody.privacy.queries import Mechanism, PrivUnit, Query
from homebody.rng import Rng

QUERIES = [
    "choice:epsilon=2,interests=16",
    "choice:epsilon=5,interests=16",
    "unit:epsilon=2",
    "unit:epsilon=5",
    "attention:epsilon=2,interests=5",
    "attention:epsilon=3,delta=1e-3,interests=5,theta=0.7",
    "vector:epsilon=2",
    "vector:epsilon=3,delta=1e-3",
]


@pytest.mark.parametrize("text", QUERIES)
def test_canaries_stay_under_what_a_query_certifies(text: str) -> None:
    """A bound is too high with a probability of 5 % at most; the seed is fixed."""
    query = Query.parse(text)
    shown = bound(query.mechanism(size=12), query.delta, Rng.of(3), count=4000)
    assert 0 < shown.epsilon <= query.epsilon
    if query.kind in ("choice", "unit"):  # of these a query may show everything
        assert shown.epsilon > 0.7 * query.epsilon


@pytest.mark.parametrize("text", QUERIES[::2])
def test_a_mechanism_that_tells_more_than_it_says_is_found(text: str) -> None:
    query = Query.parse(text)
    loud = replace(query, epsilon=3 * query.epsilon).mechanism(size=12)
    assert bound(loud, query.delta, Rng.of(3), count=4000).epsilon > query.epsilon


@pytest.mark.parametrize("text", QUERIES)
def test_no_answer_speaks_louder_than_the_guarantee(text: str) -> None:
    """Without a δ, what is told is never more than e^ε times as likely under one interest as under another."""
    query = Query.parse(text)
    mechanism: Mechanism = query.mechanism(size=12)
    pair = farthest(mechanism)
    told = torch.stack([mechanism.device(pair[seed % 2], Rng.of(seed)) for seed in range(200)])
    loudest = float(ratio(mechanism, told, pair).abs().max())
    if not query.delta:
        assert loudest <= query.epsilon * (1 + 1e-4)
    if isinstance(mechanism, PrivUnit) or query.kind == "choice":
        assert loudest == pytest.approx(query.epsilon, rel=1e-3)
    assert math.isfinite(loudest)

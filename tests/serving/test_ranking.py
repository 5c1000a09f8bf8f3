"""The ranking finds the best of all items, whatever waits beside a query, and whatever comes and goes meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.serving.ranking import Columns


def expected(columns: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """The best by numpy; equal scores in the order of the items."""
    scores = (weights[:, None, :] * columns.T[None]).sum(-1)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    kept = np.isfinite(np.take_along_axis(scores, order, axis=1))
    order = np.where(kept, order, -1)
    return np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 31, 32, 33, 1023, 1024, 1025, 3000]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([1, 7, 100, 500]),
    st.booleans(),
)
def test_the_best_of_all_are_found(seed: int, count: int, wide: int, queries: int, k: int, ties: bool) -> None:
    draw = np.random.default_rng(seed)
    # Small whole numbers: sums are exact in any order, and many scores are equal.
    high = 2 if ties else 1000
    columns = draw.integers(-high, high + 1, (wide, count)).astype(np.float32)
    columns[:, draw.random(count) < 0.1] = np.nan
    weights = draw.integers(-high, high + 1, (queries, wide)).astype(np.float32)
    ranked = Columns(columns).best(weights, k)
    assert ranked.items.tolist() == expected(columns, weights, k).tolist()
    for row, (items, scores) in enumerate(zip(*ranked, strict=True)):
        real = items >= 0
        assert scores[real].tolist() == (weights[row] @ columns)[items[real]].tolist()
        assert np.isnan(scores[~real]).all()


def test_items_that_come_and_go() -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(-9, 10, (3, 50)).astype(np.float32)
    columns, weights = Columns(table), np.array([[1.0, 2.0, -1.0]])
    for step in range(60):
        more = rng.integers(-9, 10, (3, step % 7)).astype(np.float32)
        table = np.concatenate([table, more], axis=1)
        columns.add(more)
        gone = rng.integers(0, table.shape[1], 2)
        table[:, gone] = np.nan
        columns.remove(gone)
        assert columns.best(weights, 10).items.tolist() == expected(table, weights, 10).tolist()
    assert len(columns) == table.shape[1]


def test_what_waits_beside_a_query_changes_nothing() -> None:
    draw = np.random.default_rng(1)
    columns, weights = Columns(draw.normal(size=(5, 5000))), draw.normal(size=(40, 5))
    together = columns.best(weights, 100)
    for row in range(40):
        alone = columns.best(weights[row : row + 1], 100)
        assert together.items[row].tolist() == alone.items[0].tolist()
        assert together.scores[row].tobytes() == alone.scores[0].tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite(value: float) -> None:
    columns = Columns(np.array([[value, 1.0, 2.0]]))
    items = columns.best(np.ones((1, 1)), 3).items[0].tolist()
    assert items == ([0, 2, 1] if value == np.inf else [2, 1, -1])

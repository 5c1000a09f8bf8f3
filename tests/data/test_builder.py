from __future__ import annotations

from datetime import datetime

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.data.population import Features, build
from homebody.errors import HomebodyError

ROWS = st.lists(st.tuples(st.integers(-5, 5), st.integers(90, 110), st.integers(0, 3)), min_size=1, max_size=60)


@given(ROWS)
def test_it_equals_a_plain_loop(rows: list[tuple[int, int, int]]) -> None:
    users, items, times = (pl.Series(column) for column in zip(*rows, strict=True))
    people = build("loop", users, items, times=times, ratings=times)
    names = sorted({user for user, _, _ in rows})
    catalogue = sorted({item for _, item, _ in rows})
    assert people.user_ids is not None
    assert people.item_ids is not None
    assert people.times is not None
    assert people.ratings is not None
    assert people.user_ids.to_list() == names
    assert people.item_ids.to_list() == catalogue
    for number, name in enumerate(names):
        own = sorted((row for row in rows if row[0] == name), key=lambda row: row[2])
        mine = slice(people.indptr[number], people.indptr[number + 1])
        assert people.history(number).tolist() == [catalogue.index(item) for _, item, _ in own]
        assert people.times[mine].tolist() == [time for _, _, time in own]
        assert people.ratings[mine].tolist() == [time for _, _, time in own]
    assert people.items.dtype == np.int32
    assert people.indptr.dtype == np.int64


def test_without_times_the_order_is_the_files() -> None:
    people = build("toy", pl.Series([2, 1, 2, 2]), pl.Series([9, 9, 7, 8]))
    assert people.history(1).tolist() == [2, 0, 1]
    assert people.times is None


def test_numbers_sort_as_numbers_and_text_as_text() -> None:
    assert build("n", pl.Series([10, 9]), pl.Series([1, 1])).user_ids.to_list() == [9, 10]  # type: ignore[union-attr]
    assert build("t", pl.Series(["9", "10"]), pl.Series([1, 1])).user_ids.to_list() == ["10", "9"]  # type: ignore[union-attr]


def test_fractions_of_a_second_order_a_history_before_they_are_dropped() -> None:
    moments = pl.Series([datetime(2024, 1, 1, 0, 0, 0, 900), datetime(2024, 1, 1, 0, 0, 0, 100)])
    for times in (moments, pl.Series([7.9, 7.1])):
        people = build("toy", pl.Series([1, 1]), pl.Series([1, 2]), times=times)
        assert people.items.tolist() == [1, 0]
        assert people.times is not None
        assert len(set(people.times.tolist())) == 1


def test_times_before_1970_round_down() -> None:
    people = build("toy", pl.Series([1]), pl.Series([1]), times=pl.Series([-0.5]))
    assert people.times is not None
    assert people.times.tolist() == [-1]


def test_no_rows_is_an_error() -> None:
    with pytest.raises(HomebodyError, match="has no rows"):
        build("toy", pl.Series([], dtype=pl.Int64), pl.Series([], dtype=pl.Int64))


@given(ROWS, st.sampled_from([1, 2**40, 2**61]))
def test_contexts_go_with_their_rows(rows: list[tuple[int, int, int]], unit: int) -> None:
    """Also where times are so far apart that user and time do not fit into one number."""
    users, items, times = (pl.Series(column) for column in zip(*rows, strict=True))
    number = pl.Series("row", range(len(rows)))
    contexts = Features(pl.DataFrame([number]), {"row": "numeric"})
    people = build("loop", users, items, times=times * unit, ratings=number, contexts=contexts)
    assert people.contexts is not None
    assert people.ratings is not None
    assert people.contexts.kinds == {"row": "numeric"}
    expected = sorted(range(len(rows)), key=lambda row: (rows[row][0], rows[row][2]))
    assert people.contexts.table["row"].to_list() == expected
    assert people.ratings.tolist() == expected


def test_times_at_both_ends_of_64_bits_are_ordered() -> None:
    ends = pl.Series([2**63 - 1, -(2**63), 0])
    assert build("toy", pl.Series([1, 1, 1]), pl.Series([0, 1, 2]), times=ends).items.tolist() == [1, 2, 0]

"""Interactions at the same time: which of them is the latest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from homebody.data.partitions import everything, leave_one_out, split
from homebody.data.population import Impressions, Population, build
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.evaluation import describe


def tied() -> Population:
    """The first has three at the last moment, the second none tied, the third everything at once."""
    items = np.array([5, 6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6], dtype=np.int32)
    times = np.array([1, 2, 3, 3, 3, 1, 2, 3, 7, 7, 7, 7])
    return Population("tied", np.array([0, 5, 8, 12]), items, n_items=12, times=times)


def parts(how: str, user: int) -> list[list[int]]:
    made = leave_one_out(tied(), how=how, negatives=2)
    return [made.part(user, part).tolist() for part in ("train", "valid", "test")]


def test_the_last_in_the_file_is_the_latest_of_a_tie() -> None:
    assert parts("latest", 0) == [[5, 6, 7], [8], [9]]
    assert parts("latest", 1) == [[0], [1], [2]]
    assert parts("latest", 2) == [[3, 4], [5], [6]]


def test_or_the_first_of_them() -> None:
    """As a rank of falling times gives it that counts the first of a tie first."""
    assert parts("latest-first", 0) == [[5, 6, 9], [8], [7]]
    assert parts("latest-first", 1) == [[0], [1], [2]]
    assert parts("latest-first", 2) == [[6, 5], [4], [3]]


def test_it_holds_in_other_splits_and_without_repeats() -> None:
    made = split(tied(), "ratio:test=0.25,valid=0.25", how="latest-first", negatives=2)
    assert made.part(2, "test").tolist() == [3]
    items = np.array([5, 6, 6, 5, 7], dtype=np.int32)
    people = Population("twice", np.array([0, 5]), items, n_items=9, times=np.array([1, 2, 2, 2, 2]))
    strict = leave_one_out(people, how="latest-first", negatives=2)
    assert [strict.part(0, part).tolist() for part in ("train", "valid", "test")] == [[5], [7], [6]]
    published = leave_one_out(people, how="latest-first", negatives=2, protocol="published")
    assert [published.part(0, part).tolist() for part in ("train", "valid", "test")] == [[5, 7, 5], [6], [6]]


def test_without_times_there_is_no_latest_first() -> None:
    people = Population("timeless", np.array([0, 4]), np.array([1, 2, 3, 4], dtype=np.int32), n_items=9)
    with pytest.raises(HomebodyError, match="timeless has no times, so nothing is the latest"):
        leave_one_out(people, how="latest-first", negatives=2)


def test_the_sentence_beside_a_number_says_so() -> None:
    assert "latest (of a tie in time, the first in the file) held out" in describe("strict", "latest-first")


def crowded(order: np.ndarray, *, timeless: bool = False) -> Population:
    """200 people with 12 interactions at 4 moments each, whose file has its rows in this order."""
    users, items = np.divmod(np.arange(2400) * 7 % 2400, 12)
    times = None if timeless else pl.Series((items * 5 + users) % 4)[order]
    return build("crowded", pl.Series(users)[order], pl.Series(items)[order], times=times)


def listed(made: Split) -> list[list[int]]:
    return [made.part(user, part).tolist() for user in range(made.n_users) for part in ("train", "valid", "test")]


IN_ORDER, SHUFFLED = np.arange(2400), np.random.default_rng(0).permutation(2400)


@pytest.mark.parametrize("timeless", [False, True])
@pytest.mark.parametrize("way", ["leave-one-out", "ratio", "held-out-users", "cold-items"])
def test_the_order_of_the_file_does_not_matter_where_ties_are_drawn(way: str, timeless: bool) -> None:
    one, other = (
        listed(split(crowded(order, timeless=timeless), way, how="latest-random", negatives=2))
        for order in (IN_ORDER, SHUFFLED)
    )
    assert one == other
    if way == "leave-one-out":
        by_file = [
            listed(split(crowded(order, timeless=timeless), how="latest", negatives=2))
            for order in (IN_ORDER, SHUFFLED)
        ]
        assert by_file[0] != by_file[1]


def test_drawn_ties_stay_in_time_order() -> None:
    made = split(crowded(SHUFFLED), how="latest-random", negatives=2)
    times = made.population.times
    assert times is not None
    moments = times[made.rows].reshape(200, 12)
    assert (np.diff(moments, axis=1) >= 0).all()
    assert (np.sort(made.rows.reshape(200, 12), axis=1) == np.arange(2400).reshape(200, 12)).all()


def test_the_seed_draws_any_of_a_tie_evenly() -> None:
    """Each of 3 is the last in a third of 600 draws: within 6 standard deviations, so false once in 10⁸ times; and
    the seeds are fixed."""
    last = [
        leave_one_out(tied(), how="latest-random", seed=seed, negatives=2).part(0, "test")[0] for seed in range(600)
    ]
    items, counts = np.unique(last, return_counts=True)
    assert items.tolist() == [7, 8, 9]
    assert (np.abs(counts - 200) < 6 * np.sqrt(600 * 2 / 9)).all()


def test_nothing_held_out_is_in_the_same_order() -> None:
    people = crowded(SHUFFLED)
    whole = everything(people, how="latest-random")
    held = leave_one_out(people, how="latest-random", negatives=2)
    assert whole.items.tolist() == held.items.tolist()


def test_impressions_keep_what_came_before_them() -> None:
    """They may count it: of a tie in time, an interaction that came after must not change places with one before."""
    shown = Impressions(
        np.array([0, 0, 2]),
        np.array([0, 2, 4, 6]),
        np.array([7, 10, 8, 11, 5, 0], dtype=np.int32),
        np.array([True, False] * 3),
        before=np.array([2, 3, 2]),
    )
    people = replace(tied(), impressions=shown)
    for how in ("latest", "latest-random"):
        assert split(people, "impressions", how=how).items.tolist() == tied().items.tolist()
        assert everything(people, how=how).items.tolist() == tied().items.tolist()


def test_a_number_says_that_ties_are_drawn() -> None:
    assert "latest (of a tie in time, one at random) held out" in describe("strict", "latest-random")

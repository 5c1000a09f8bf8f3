"""Interactions at the same time: which of them is the latest."""

from __future__ import annotations

import numpy as np
import pytest

from homebody.data.partitions import leave_one_out, split
from homebody.data.population import Population
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

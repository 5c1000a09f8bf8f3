from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.methods.baselines import Popularity
from homebody.reference import Histories, LearntImpressions


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_the_score_is_the_number_of_interactions_for_everyone(people: list[list[int]]) -> None:
    items = [item for history in people for item in history]
    score = Popularity().trained(Histories.of(people, n_items=7))
    expected = [float(items.count(item)) for item in range(7)]
    assert score(np.arange(len(people)), torch.arange(7)).tolist() == [expected] * len(people)


def test_a_click_that_may_be_learnt_from_counts_once() -> None:
    users, indptr = np.array([0, 0, 1]), np.array([0, 2, 4, 6])
    items, clicked = np.array([1, 3, 2, 3, 0, 3], dtype=np.int32), np.array([True, False, True, True, False, True])
    shown = LearntImpressions(users, indptr, items, clicked, np.zeros(3, dtype=np.int64))
    people = Histories.of([[1], [1, 2]], n_items=4)._replace(shown=shown)
    score = Popularity().trained(people)
    # User 0 has item 1 already and clicks 2 and 3; user 1 clicks 3.
    assert score(np.array([0]), torch.arange(4)).tolist() == [[0.0, 2.0, 2.0, 2.0]]

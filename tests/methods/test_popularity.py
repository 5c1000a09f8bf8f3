from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.methods.baselines import Popularity
from homebody.reference import Histories


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_the_score_is_the_number_of_interactions_for_everyone(people: list[list[int]]) -> None:
    items = [item for history in people for item in history]
    score = Popularity().trained(Histories.of(people, n_items=7))
    expected = [float(items.count(item)) for item in range(7)]
    assert score(np.arange(len(people)), torch.arange(7)).tolist() == [expected] * len(people)

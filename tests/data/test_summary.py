from __future__ import annotations

import numpy as np
import pytest

from homebody.data import summary
from homebody.data.population import Population


@pytest.mark.parametrize("at_once", [1, 3, 1 << 22])
def test_counts_by_hand(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "INTERACTIONS_AT_ONCE", at_once)
    people = Population(
        "toy",
        np.array([0, 3, 3, 5, 9]),
        np.array([0, 1, 0, 2, 2, 1, 1, 1, 3], dtype=np.int32),
        n_items=20,
        # The third user's first time is the first user's last: two people, so no tie.
        times=np.array([1, 2, 5, 5, 6, 7, 7, 7, 8]),
        ratings=np.array([1, 2, 3, 4, 5, 1, 2, 3, 4], dtype=np.float32),
    )
    found = summary.summarise(people)
    assert found.duplicates == 4
    assert found.sparsity == 1 - 5 / 80
    assert found.tied_users == 0.25
    assert (found.shortest, found.median, found.longest) == (0, 2.5, 4)
    assert found.unseen_items == 16
    assert found.top_tenth == (4 + 2) / 9
    assert (found.first_time, found.last_time, found.ratings) == (1, 8, (1.0, 5.0))

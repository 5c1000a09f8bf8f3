from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from homebody.data.population import Features, Population
from homebody.errors import HomebodyError

INDPTR = np.array([0, 2, 2, 3])
ITEMS = np.array([1, 0, 2], dtype=np.int32)


def test_a_user_without_interactions_has_an_empty_history() -> None:
    people = Population("toy", INDPTR, ITEMS, n_items=3)
    assert people.history(1).tolist() == []
    assert people.lengths.tolist() == [2, 0, 1]
    assert people.popularity.tolist() == [1, 1, 1]


@pytest.mark.parametrize("user", [-1, 3])
def test_a_user_out_of_range_is_refused(user: int) -> None:
    with pytest.raises(HomebodyError, match="users are numbered 0 to 2"):
        Population("toy", INDPTR, ITEMS, n_items=3).history(user)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"items": ITEMS.astype(np.int64)}, "needs int32 items"),
        ({"indptr": np.array([0, 2, 2, 4])}, "run from 0 to its 3 interactions"),
        ({"indptr": np.array([0, 2, 1, 3])}, "go backwards"),
        ({"indptr": np.array([], dtype=np.int64)}, "run from 0"),
        ({"n_items": 2}, "numbered 0 to 1, not 0 to 2"),
        ({"items": np.array([-1, 0, 2], dtype=np.int32)}, "not -1 to 2"),
        ({"times": np.zeros(2, dtype=np.int64)}, "2 rows of times for 3 interactions"),
        ({"ratings": np.zeros(4, dtype=np.float32)}, "4 rows of ratings"),
        ({"user_ids": pl.Series(["a"])}, "1 rows of user ids for 3 users"),
        ({"item_features": Features(pl.DataFrame({"year": [1]}), {"year": "numeric"})}, "item features for 3 items"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, object], sentence: str) -> None:
    arrays: dict[str, object] = {"indptr": INDPTR, "items": ITEMS, "n_items": 3, **changes}
    with pytest.raises(HomebodyError, match=sentence):
        Population("toy", **arrays)  # type: ignore[arg-type]

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import polars as pl
import pytest

from homebody.data import summary
from homebody.data.population import Features, Impressions, Population
from homebody.data.summary import FeatureSummary, ImpressionSummary


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


def test_activity_in_steps_of_one_two_and_five() -> None:
    lengths = [0, 0, 1, 1, 2, 4, 5, 9, 10, 19, 20, 49, 50, 99, 100]
    people = Population("toy", np.cumsum([0, *lengths]), np.zeros(sum(lengths), dtype=np.int32), n_items=1)
    found = summary.summarise(people).activity
    assert [(one.least, one.most, one.users) for one in found] == [
        *((0, 0, 2), (1, 1, 2), (2, 4, 2), (5, 9, 2)),
        *((10, 19, 2), (20, 49, 2), (50, 99, 2), (100, 199, 1)),
    ]


def test_features_and_impressions_are_counted() -> None:
    people = Population(
        "toy",
        np.array([0, 1, 2]),
        np.array([0, 1], dtype=np.int32),
        n_items=3,
        user_features=Features(pl.DataFrame({"age": [3, None]}), {"age": "numeric"}),
        item_features=Features(
            pl.DataFrame({"genres": [["a", "b"], [], ["b"]], "title": ["x", "x", None]}),
            {"genres": "multi-hot", "title": "text"},
        ),
        contexts=Features(pl.DataFrame({"day": ["Mo", "Mo"]}), {"day": "categorical"}),
        impressions=Impressions(
            np.array([1, 1]),
            np.array([0, 2, 5]),
            np.array([0, 1, 0, 1, 2], dtype=np.int32),
            np.array([True, False, True, True, False]),
        ),
    )
    found = summary.summarise(people)
    assert found.user_features == [FeatureSummary("age", "numeric", 1, 0.5)]
    assert found.item_features == [
        FeatureSummary("genres", "multi-hot", 2, 0.0),
        FeatureSummary("title", "text", 1, pytest.approx(1 / 3)),
    ]
    assert found.contexts == [FeatureSummary("day", "categorical", 1, 0.0)]
    assert found.impressions == ImpressionSummary(impressions=2, users=1, shown=5, clicked=3)
    assert json.loads(json.dumps(asdict(found)))["activity"] == [{"least": 1, "most": 1, "users": 2}]


def test_people_without_any_interaction() -> None:
    nobody = Population("toy", np.array([0, 0]), np.zeros(0, dtype=np.int32), n_items=1)
    assert [(one.least, one.most, one.users) for one in summary.summarise(nobody).activity] == [(0, 0, 1), (1, 1, 0)]

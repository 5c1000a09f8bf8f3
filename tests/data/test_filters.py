from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.data.filters import Filters, apply
from homebody.data.population import Features, Impressions, Population
from homebody.errors import HomebodyError


def marked(histories: list[list[int]], n_items: int, shown: list[tuple[int, list[int]]] | None = None) -> Population:
    """A population in which every column says whose and what it is, so that a slip of numbers shows."""
    user = np.repeat(np.arange(len(histories)), [len(history) for history in histories])
    item = np.array([item for history in histories for item in history], dtype=np.int32)
    pair = user * 1000 + item
    place = np.arange(len(item))
    impressions = None
    if shown is not None:
        impressions = Impressions(
            np.array([who for who, _ in shown], dtype=np.int64),
            np.cumsum([0, *(len(items) for _, items in shown)]),
            np.array([item for _, items in shown for item in items], dtype=np.int32),
            # The first that is shown is clicked.
            np.array([place == 0 for _, items in shown for place in range(len(items))], dtype=np.bool_),
        )
    return Population(
        "toy",
        np.cumsum([0, *(len(history) for history in histories)]),
        item,
        n_items,
        times=place,
        ratings=(place % 5 + 1).astype(np.float32),
        user_ids=pl.Series([f"u{number}" for number in range(len(histories))], dtype=pl.String),
        item_ids=pl.Series([f"i{number}" for number in range(n_items)], dtype=pl.String),
        item_names=pl.Series([f"name of i{number}" for number in range(n_items)], dtype=pl.String),
        user_features=Features(
            pl.DataFrame({"user": range(len(histories))}, schema={"user": pl.Int64}), {"user": "categorical"}
        ),
        item_features=Features(
            pl.DataFrame({"tags": [[f"i{number}"] for number in range(n_items)]}, schema={"tags": pl.List(pl.String)}),
            {"tags": "multi-hot"},
        ),
        contexts=Features(pl.DataFrame({"pair": pair}, schema={"pair": pl.Int64}), {"pair": "categorical"}),
        impressions=impressions,
    )


def histories(population: Population) -> dict[str, list[str]]:
    assert population.user_ids is not None
    return {
        name: [population.item_id(item) for item in population.history(user).tolist()]
        for user, name in enumerate(population.user_ids)
    }


def check_consistent(whole: Population, part: Population) -> None:
    """Each of the part's columns still speaks of the same users, items and interactions."""
    assert whole.times is not None
    assert whole.ratings is not None
    assert part.times is not None
    assert part.ratings is not None
    assert part.user_ids is not None
    assert part.item_ids is not None
    assert part.item_names is not None
    assert part.user_features is not None
    assert part.item_features is not None
    assert part.contexts is not None
    assert part.user_ids.to_list() == [f"u{number}" for number in part.user_features.table["user"]]
    assert [[name] for name in part.item_ids] == part.item_features.table["tags"].to_list()
    assert [f"name of {name}" for name in part.item_ids] == part.item_names.to_list()
    assert part.items.tolist() == [
        part.item_ids.to_list().index(f"i{item}") for item in whole.items[part.times].tolist()
    ]
    owner = np.repeat(np.arange(whole.n_users), whole.lengths)[part.times]
    assert [f"u{user}" for user in owner] == [
        name for name, length in zip(part.user_ids, part.lengths, strict=True) for _ in range(length)
    ]
    assert part.contexts.table["pair"].to_list() == (owner * 1000 + whole.items[part.times]).tolist()
    assert part.ratings.tolist() == whole.ratings[part.times].tolist()
    assert np.all(np.diff(part.times) > 0)


some_histories = st.lists(st.lists(st.integers(0, 7), max_size=9), min_size=1, max_size=9).filter(any)
some_filters = st.fixed_dictionaries(
    {},
    optional={
        "min_rating": st.integers(1, 5),
        "top_items": st.integers(1, 9),
        "items": st.integers(1, 9),
        "users": st.integers(1, 9),
        "min_item": st.integers(1, 3),
        "min_user": st.integers(1, 3),
        "sample_items": st.integers(1, 9),
        "sample_users": st.integers(1, 9),
        "core": st.integers(1, 3),
        "seed": st.integers(0, 3),
    },
)


class TestProperties:
    @settings(max_examples=200, deadline=None)
    @given(some_histories, some_filters, st.data())
    def test_columns_stay_together(self, own: list[list[int]], filters: dict[str, int], data: st.DataObject) -> None:
        lists = st.lists(st.integers(0, 7), min_size=2, max_size=4, unique=True)
        shown = data.draw(st.lists(st.tuples(st.integers(0, len(own) - 1), lists), max_size=6))
        whole = marked(own, 8, sorted(shown))
        try:
            part = apply(whole, filters)
        except HomebodyError as error:
            assert "removes all" in str(error)  # noqa: PT017 - some filters leave nobody, others somebody
            return
        check_consistent(whole, part)
        assert part.impressions is not None
        assert whole.impressions is not None
        left, old = asked(part), asked(whole)
        for who, seen in left:
            assert any(who == other and set(seen) <= set(all_of) for other, all_of in old)
            assert {clicked for _, clicked in seen} == {True, False}
        if not set(filters) <= {"seed"}:
            met = set(part.items.tolist()) | set(part.impressions.items.tolist())
            assert met == set(range(part.n_items))
        assert histories(apply(whole, filters)) == histories(part)

    @settings(max_examples=200, deadline=None)
    @given(some_histories, st.integers(1, 4))
    def test_a_core_is_the_largest_part_in_which_all_have_enough(self, own: list[list[int]], k: int) -> None:
        whole = marked(own, 8)
        # The slow way: one user or item at a time.
        rows = [(user, item) for user, history in enumerate(own) for item in history]
        while True:
            few = [
                (place, number)
                for place in (0, 1)
                for number in {row[place] for row in rows}
                if sum(row[place] == number for row in rows) < k
            ]
            if not few:
                break
            rows = [row for row in rows if row[few[0][0]] != few[0][1]]
        if not rows:
            with pytest.raises(HomebodyError, match=f"core={k} removes all"):
                apply(whole, {"core": k})
            return
        part = apply(whole, {"core": k})
        assert part.lengths.min() >= k
        assert part.popularity.min() >= k
        assert histories(part) == {
            f"u{user}": [f"i{item}" for other, item in rows if other == user] for user in {row[0] for row in rows}
        }

    @settings(max_examples=50, deadline=None)
    @given(some_histories, st.integers(1, 8), st.integers(1, 8), st.integers(0, 5))
    def test_a_smaller_subset_is_part_of_a_larger(self, own: list[list[int]], one: int, other: int, seed: int) -> None:
        small, large = sorted((one, other))
        whole = marked(own, 8)
        few, many = (histories(apply(whole, {"users": count, "seed": seed})) for count in (small, large))
        assert len(few) == min(small, sum(map(bool, own)))
        assert few.items() <= many.items()


def asked(population: Population) -> list[tuple[str, list[tuple[str, bool]]]]:
    found = population.impressions
    assert found is not None
    assert population.user_ids is not None
    assert np.all(np.diff(found.users) >= 0)
    return [
        (
            population.user_ids[int(user)],
            [
                (population.item_id(item), bool(hit))
                for item, hit in zip(found.items[a:b], found.clicked[a:b], strict=True)
            ],
        )
        for user, a, b in zip(found.users, found.indptr[:-1], found.indptr[1:], strict=True)
    ]


class TestByHand:
    def test_ratings(self) -> None:
        part = apply(marked([[0, 1, 2], [3, 4, 0]], 5), {"min_rating": 4})
        assert histories(part) == {"u1": ["i3", "i4"]}

    def test_the_most_popular_with_ties_by_id(self) -> None:
        whole = marked([[3, 1], [3, 2], [4, 1, 2]], 6)
        assert histories(apply(whole, {"top_items": 2})) == {"u0": ["i1"], "u1": ["i2"], "u2": ["i1", "i2"]}
        assert apply(whole, {"top_items": 2}).item_ids.to_list() == ["i1", "i2"]  # type: ignore[union-attr]
        assert apply(whole, {"top_items": 3}).item_ids.to_list() == ["i1", "i2", "i3"]  # type: ignore[union-attr]
        # One nobody has is not popular, however many are asked for.
        assert apply(whole, {"top_items": 6}).n_items == 4

    def test_minima_count_once_and_items_first(self) -> None:
        whole = marked([[0, 1], [0, 2], [1, 3], [1]], 4)
        part = apply(whole, {"min_item": 2, "min_user": 2})
        # i2 and i3 go, then everyone but u0; i0 and i1 stay with one interaction each.
        assert histories(part) == {"u0": ["i0", "i1"]}

    def test_subsets_depend_on_the_seed(self) -> None:
        whole = marked([[user % 8] for user in range(40)], 8)
        chosen = {tuple(histories(apply(whole, {"users": 5, "seed": seed}))) for seed in range(6)}
        assert len(chosen) == 6
        items = {tuple(apply(whole, {"items": 3, "seed": seed}).item_ids.to_list()) for seed in range(8)}  # type: ignore[union-attr]
        assert len(items) > 3
        assert all(len(one) == 3 for one in items)

    def test_impressions_keep_items_without_history_alive(self) -> None:
        whole = marked([[0], [1, 2], []], 6, [(0, [5, 0]), (0, [1, 0]), (1, [2, 1]), (2, [4, 1])])
        part = apply(whole, {"min_rating": 2})  # u0's only interaction goes, and with it its impressions
        assert histories(part) == {"u1": ["i1", "i2"], "u2": []}
        assert asked(part) == [("u1", [("i2", True), ("i1", False)]), ("u2", [("i4", True), ("i1", False)])]
        assert part.item_ids.to_list() == ["i1", "i2", "i4"]  # type: ignore[union-attr]
        # A filter of items speaks against what nobody has met.
        popular = apply(whole, {"top_items": 3})
        assert asked(popular) == [("u0", [("i1", True), ("i0", False)]), ("u1", [("i2", True), ("i1", False)])]

    def test_the_sentence(self) -> None:
        said: list[str] = []
        whole = marked([[0, 1], [0, 1], [2]], 4, [(0, [1, 0]), (2, [2, 0])])
        apply(whole, {"core": 2, "seed": 3}, say=said.append)
        assert said == [
            "The filters core=2, seed=3 kept 2 of 3 users, 2 of 4 items, 4 of 5 interactions and 1 of 2 impressions."
        ]

    @pytest.mark.parametrize("filters", [None, {}, {"seed": 4}])
    def test_no_filter_changes_nothing(self, filters: dict[str, Any] | None) -> None:
        whole = marked([[0], []], 4)
        assert apply(whole, filters) is whole


class TestRefusals:
    @pytest.mark.parametrize(
        ("filters", "sentence"),
        [
            ({"kcore": 5}, "There is no filter 'kcore'; did you mean 'core'"),
            ({"core": 0}, "The filter core needs a whole number from 1 up, not 0"),
            ({"core": "five"}, "core needs a whole number from 1 up, not 'five'"),
            ({"core": 2.5}, "core needs a whole number"),
            ({"users": True}, "users needs a whole number"),
            ({"items": None}, "items needs a whole number"),
            ({"items": "9" * 30}, "items needs a whole number"),
            ({"seed": -1}, "seed needs a whole number from 0 up"),
            ({"min_rating": "nan"}, "min_rating needs a number"),
            ({"min_rating": True}, "min_rating needs a number"),
            ({"min_rating": None}, "min_rating needs a number"),
            ({"min_rating": 9}, "The filter min_rating=9 removes all 2 users of toy"),
            ({"core": 5}, "The filter core=5 removes all"),
        ],
    )
    def test_in_a_sentence(self, filters: dict[str, Any], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            apply(marked([[0, 1], [0]], 2), filters)

    def test_ratings_that_are_not_there(self) -> None:
        bare = Population("toy", np.array([0, 1]), np.zeros(1, np.int32), 1)
        with pytest.raises(HomebodyError, match="min_rating=4 needs ratings, and toy has none"):
            apply(bare, {"min_rating": 4})

    def test_texts_are_read_as_numbers(self) -> None:
        assert Filters.parse({"core": "5", "min_rating": "3.5"}) == Filters(core=5, min_rating=3.5)


def test_a_sample_is_drawn_from_what_the_other_filters_left() -> None:
    whole = marked([[0, 1, 2, 3], [0, 1, 2], [0, 1], [4], [5]], 6)
    part = apply(whole, {"min_item": 2, "min_user": 2, "sample_items": 2, "sample_users": 2})
    assert part.n_users == 2
    assert part.n_items == 2
    assert set().union(*histories(part).values()) <= {"i0", "i1", "i2"}
    assert set(histories(part)) <= {"u0", "u1", "u2"}
    for seed in range(9):  # whichever are drawn
        assert apply(whole, {"min_item": 2, "sample_items": 3, "seed": seed}).n_items == 3

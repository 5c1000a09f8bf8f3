from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.data.codes import Code, Pairs, trigrams
from homebody.data.encode import Encoded, encode
from homebody.data.population import Features, Kind
from homebody.errors import HomebodyError


def encoded(kind: Kind, values: pl.Series, known: list[bool] | None = None, unit: str = "users") -> Encoded:
    mask = np.ones(len(values), dtype=np.bool_) if known is None else np.array(known, dtype=np.bool_)
    return encode(Features(values.alias("x").to_frame(), {"x": kind}), mask, unit=unit)


class TestCategorical:
    def test_codes_follow_the_order_of_values(self) -> None:
        found = encoded("categorical", pl.Series([10, 9, None, 10, 8]), [True, True, True, True, False])
        assert found.columns["x"].values.tolist() == [2, 1, 0, 2, 0]
        assert found.columns["x"].values.dtype == np.int64
        assert (found.columns["x"].size, found.columns["x"].kind) == (3, "one")
        assert found.codes["x"].values == ("9", "10")
        assert found.notes == (
            "1 of 5 users has no 'x'; it counts as unknown.",
            "1 of 5 users has a 'x' that none in training has; it counts as unknown.",
        )

    def test_the_order_of_rows_does_not_matter(self) -> None:
        values = pl.Series(["b", "a"], dtype=pl.Categorical)
        assert encoded("categorical", values).columns["x"].values.tolist() == [2, 1]

    def test_when_nobody_is_known(self) -> None:
        found = encoded("categorical", pl.Series(["a", "b"]), [False, False])
        assert found.columns["x"].values.tolist() == [0, 0]
        assert found.columns["x"].size == 1
        assert found.notes == ("2 of 2 users have a 'x' that none in training has; it counts as unknown.",)

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.none() | st.text(max_size=3), st.booleans()), min_size=1, max_size=20))
    def test_codes_lead_back_to_values(self, rows: list[tuple[str | None, bool]]) -> None:
        values, known = [value for value, _ in rows], [seen for _, seen in rows]
        found = encoded("categorical", pl.Series(values, dtype=pl.String), known)
        vocabulary = {value for value, seen in rows if seen and value is not None}
        meaning = [None, *found.codes["x"].values]
        assert [meaning[code] for code in found.columns["x"].values] == [
            value if value in vocabulary else None for value in values
        ]
        assert found.columns["x"].size == len(vocabulary) + 1
        assert meaning[1:] == sorted(vocabulary, key=str.encode)


class TestViews:
    def test_a_column_knows_its_view_and_so_does_its_code(self) -> None:
        table = pl.DataFrame({"job": ["cook", "vet"], "age": [3.5, None], "town": ["Ulm", "Ulm"]})
        kinds: dict[str, Kind] = {"job": "categorical", "age": "numeric", "town": "categorical"}
        features = Features(table, kinds, views={"age": "taste", "job": "profile"})
        found = encode(features.rows(np.array([1, 0])), np.ones(2, dtype=np.bool_))
        assert [found.columns[name].view for name in kinds] == ["profile", "taste", ""]
        assert [Code.from_json(found.codes[name].to_json()).view for name in kinds] == ["profile", "taste", ""]

    def test_a_code_without_a_view_is_written_as_it_was(self) -> None:
        assert "view" not in Code("one", ("cook",)).to_json()

    def test_a_view_is_a_text(self) -> None:
        with pytest.raises(HomebodyError, match="another version"):
            Code.from_json({**Code("one").to_json(), "view": 3})

    def test_a_view_of_a_column_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(HomebodyError, match="did you mean 'age'"):
            Features(pl.DataFrame({"age": [1]}), {"age": "numeric"}, views={"agee": "profile"})


class TestMultiHot:
    def test_by_hand(self) -> None:
        lists = pl.Series([["b", "a"], ["c"], None, [], ["a", "d", "e"]])
        found = encoded("multi-hot", lists, [True, True, True, True, False], "items")
        assert found.columns["x"].values.tolist() == [[1, 2], [3, -1], [-1, -1], [-1, -1], [1, -1]]
        assert found.columns["x"].values.dtype == np.int64
        assert (found.columns["x"].size, found.columns["x"].kind) == (4, "many")
        assert found.notes == (
            "1 of 5 items has no 'x'.",
            "1 of 5 items has a value of 'x' that none in training has (2 different); it is dropped.",
        )

    def test_when_nothing_is_left(self) -> None:
        found = encoded("multi-hot", pl.Series([["a"], None], dtype=pl.List(pl.String)), [False, False])
        assert found.columns["x"].values.tolist() == [[-1], [-1]]

    @settings(deadline=None)
    @given(st.lists(st.tuples(st.none() | st.lists(st.sampled_from("abcdef"), max_size=5), st.booleans()), min_size=1))
    def test_codes_lead_back_to_sets(self, rows: list[tuple[list[str] | None, bool]]) -> None:
        values, known = [value for value, _ in rows], [seen for _, seen in rows]
        found = encoded("multi-hot", pl.Series(values, dtype=pl.List(pl.String)), known)
        vocabulary = {part for value, seen in rows if seen for part in value or []}
        meaning = ["", *found.codes["x"].values]
        matrix = found.columns["x"].values
        assert [{meaning[code] for code in line if code >= 0} for line in matrix] == [
            set(value or []) & vocabulary for value in values
        ]
        assert np.all(matrix != 0)
        for line in matrix.tolist():
            codes = [code for code in line if code > 0]
            assert line == sorted(set(codes)) + [-1] * (len(line) - len(codes))


def slow_trigrams(text: str) -> set[str]:
    words = "".join(char if char.isalnum() else " " for char in text.lower()).split()
    return {f"#{word}#"[start : start + 3] for word in words for start in range(len(word))}


def grams_of(found: Pairs, rows: int) -> dict[int, list[str]]:
    return {row: found.distinct.gather(found.value[found.row == row]).to_list() for row in range(rows)}


class TestText:
    def test_trigrams_by_hand(self) -> None:
        found = trigrams(pl.Series(["Toy Story", None, "", "a-b", "toy"]))
        assert grams_of(found, 5) == {
            0: ["#to", "toy", "oy#", "#st", "sto", "tor", "ory", "ry#"],
            1: [],
            2: [],
            3: ["#a#", "#b#"],
            4: ["#to", "toy", "oy#"],
        }

    @settings(deadline=None)
    @given(st.lists(st.text("abcXYZ é19 -!'", max_size=12), min_size=1, max_size=8))
    def test_trigrams_like_the_slow_way(self, texts: list[str]) -> None:
        found = trigrams(pl.Series(texts))
        assert found.distinct.to_list() == sorted(set().union(*map(slow_trigrams, texts)), key=str.encode)
        assert [set(grams) for grams in grams_of(found, len(texts)).values()] == [*map(slow_trigrams, texts)]

    def test_they_are_encoded_as_a_set(self) -> None:
        found = encoded("text", pl.Series(["cat cat", "cats", None]), [True, False, False], "items")
        assert found.codes["x"].values == ("#ca", "at#", "cat")
        assert found.columns["x"].values.tolist() == [[1, 2, 3], [1, 3, -1], [-1, -1, -1]]
        assert found.columns["x"].kind == "many"
        assert found.notes == (
            "1 of 3 items has no 'x'.",
            "1 of 3 items has a 3-gram of 'x' that none in training has (2 different); it is dropped.",
        )


class TestNumeric:
    def test_by_hand(self) -> None:
        found = encoded("numeric", pl.Series([1.0, 3.0, None, 6.0]), [True, True, True, False])
        assert found.columns["x"].values.tolist() == [-1.0, 1.0, 0.0, 4.0]
        assert found.columns["x"].values.dtype == np.float32
        assert (found.columns["x"].size, found.columns["x"].kind) == (1, "number")
        assert found.notes == ("1 of 4 users has no 'x'; it counts as the mean.",)

    def test_what_is_no_number_is_missing(self) -> None:
        found = encoded("numeric", pl.Series([1.0, 3.0, float("nan"), float("inf")]))
        assert found.columns["x"].values.tolist() == [-1.0, 1.0, 0.0, 0.0]
        assert found.notes == ("2 of 4 users have no 'x'; it counts as the mean.",)

    def test_a_constant_says_nothing(self) -> None:
        found = encoded("numeric", pl.Series([0.1, 0.1, 0.1]))
        assert found.columns["x"].values.tolist() == pytest.approx([0, 0, 0])
        assert found.notes == ("'x' is the same for all users in training, so it says nothing.",)
        found = encoded("numeric", pl.Series([1, 2]), [False, False])
        assert found.notes == ("'x' is unknown of all users in training, so it says nothing.",)
        assert np.isfinite(found.columns["x"].values).all()

    @settings(deadline=None)
    @given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
    def test_any_numbers_become_finite(self, values: list[float | None]) -> None:
        found = encoded("numeric", pl.Series(values, dtype=pl.Float64)).columns["x"].values
        assert np.isfinite(found).all()
        assert [number for number, value in zip(found, values, strict=True) if value is None] == [0.0] * values.count(
            None
        )

    @settings(deadline=None)
    @given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=9, unique=True))
    def test_they_are_standardised(self, values: list[int]) -> None:
        found = encoded("numeric", pl.Series(values)).columns["x"].values.astype(np.float64)
        np.testing.assert_allclose(found * np.std(values) + np.mean(values), values, atol=1e-3)


def test_columns_stand_side_by_side() -> None:
    table = pl.DataFrame({"age": [1, 2], "job": ["a", "b"], "tags": [["x"], ["y"]], "title": ["One", "Two"]})
    kinds: dict[str, Kind] = {"age": "numeric", "job": "categorical", "tags": "multi-hot", "title": "text"}
    found = encode(Features(table, kinds), np.array([True, True]))
    assert {name: column.kind for name, column in found.columns.items()} == {
        "age": "number",
        "job": "one",
        "tags": "many",
        "title": "many",
    }
    assert found.notes == ()


@pytest.mark.parametrize("known", [np.array([True]), np.array([1, 0]), np.ones((2, 1), dtype=np.bool_)])
def test_a_mask_of_another_shape_is_refused(known: np.ndarray) -> None:
    features = Features(pl.DataFrame({"x": [1, 2]}), {"x": "numeric"})
    with pytest.raises(HomebodyError, match="must be marked by 2 booleans"):
        encode(features, known)

"""Where trials look: declared, guessed or asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.errors import HomebodyError
from homebody.methods import METHODS, find
from homebody.reference import Histories, Reference, Score
from homebody.settings import Range, param, params
from homebody.studies.space import Space, parse_search, points, search_space, space_text


@dataclass(frozen=True)
class Undeclared(Reference):
    rate: float = param(0.1, "a number", low=0)
    share: float = param(0.5, "a number with both bounds", low=0.2, high=1)
    nothing: float = param(0.0, "a number that has no size to go by")
    size: int = param(9, "a whole number", low=1)
    few: int = param(1, "a whole number at its bound", low=1)
    stuck: int = param(1, "a whole number between bounds", low=1, high=1)
    fair: bool = param(True, "a switch")
    kind: str = param("plain", "a text")

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        raise NotImplementedError


class TestSpace:
    def test_guessed_around_the_defaults_and_inside_the_bounds(self) -> None:
        space, declared = search_space(Undeclared)
        assert not declared
        assert space == {
            "rate": Range(0.01, 1.0, log=True),
            "share": Range(0.2, 1.0, log=True),
            "size": Range(4, 18),
            "few": Range(1, 2),
            "fair": (False, True),
        }

    def test_a_method_that_declares_one_range_has_its_other_fields_left_alone(self) -> None:
        space, declared = search_space(find("fedials"))
        assert declared
        assert list(space) == ["factors", "confidence", "regularisation"]

    @pytest.mark.parametrize("name", METHODS)
    def test_every_method_can_be_built_all_over_its_space(self, name: str) -> None:
        found = find(name)
        space, _ = search_space(found)
        for point in islice(points(space, seed=3), 50):
            found(**point)
        assert {type(found(**point)) for point in islice(points(space, 0), 1)} <= {found}

    def test_declared_numbers_take_the_kind_of_their_field(self) -> None:
        @dataclass(frozen=True)
        class Declared(Undeclared):
            rate: float = param(0.1, "", search=Range(1, 4))
            share: float = param(0.5, "", search=(1, 0.5))
            size: int = param(9, "", search=Range(1.0, 4.0))

        space, _ = search_space(Declared)
        rate, size = space["rate"], space["size"]
        assert isinstance(rate, Range)
        assert isinstance(size, Range)
        assert (type(rate.low), type(size.low)) == (float, int)
        assert [type(value) for value in space["share"]] == [float, float]  # type: ignore[union-attr]

    @pytest.mark.parametrize("text", ["rate=0.001:10:log", "size=2:30", "fair=true,false", "kind=a,b:c", "size=3"])
    def test_what_is_asked_for_reads_as_it_was_typed(self, text: str) -> None:
        name, _, where = text.partition("=")
        assert space_text(parse_search(Undeclared, [text])[name]) == where

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("rate", "--search takes field=low:high, field=low:high:log or field=a,b,c, not 'rate'."),
            ("rate=", "--search takes"),
            ("rat=1:2", "There is no field of Undeclared 'rat'; did you mean 'rate'?"),
            ("rate=2:1", "A range goes from a lower number to a higher one, not from 2.0 to 1.0."),
            ("rate=1:1", "A range goes from"),
            ("rate=0:inf", "A range goes from"),
            ("rate=0:1:log", "A logarithmic range must start above 0, not at 0.0."),
            ("rate=0.1:1:lin", "rate is searched from low:high or low:high:log, not '0.1:1:lin'."),
            ("rate=1:2:log:3", "rate is searched from"),
            ("rate=-1:1", "rate must be at least 0, not -1.0."),
            ("share=0.5:2", "share must be at most 1, not 2.0."),
            ("size=1.5:3", "size must be a whole number, not '1.5'."),
            ("size=a,b", "size must be a whole number, not 'a'."),
            ("size=0,4", "size must be at least 1, not 0."),
            ("fair=0:1", "fair is true or false: search it as fair=true,false."),
            ("fair=yes,no", "fair must be true or false, not 'yes'."),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, text: str, sentence: str) -> None:
        with pytest.raises(HomebodyError) as error:
            parse_search(Undeclared, [text])
        assert str(error.value).startswith(sentence)

    def test_a_range_for_what_is_no_number_is_refused(self) -> None:
        @dataclass(frozen=True)
        class Declared(Undeclared):
            kind: str = param("plain", "", search=Range(1, 4))

        with pytest.raises(HomebodyError, match="kind is a text: name the values to try"):
            search_space(Declared)


SPACES: list[Space] = [
    {"rate": Range(0.001, 10.0, log=True), "size": Range(1, 300, log=True), "few": Range(1, 3)},
    {"share": Range(-1.0, 1.0), "fair": (True, False)},
]


class TestPoints:
    @given(st.sampled_from(SPACES), st.integers(-(2**63), 2**63 - 1), st.integers(1, 40))
    def test_they_lie_in_the_space_and_more_of_them_begin_with_fewer(self, space: Space, seed: int, count: int) -> None:
        some = list(islice(points(space, seed), count))
        assert list(islice(points(space, seed), count + 5))[:count] == some
        for point in some:
            for name, where in space.items():
                if isinstance(where, Range):
                    assert where.low <= point[name] <= where.high
                    assert type(point[name]) is type(where.low)
                else:
                    assert point[name] in where

    def test_other_seeds_draw_others(self) -> None:
        assert next(points(SPACES[0], 0)) != next(points(SPACES[0], 1))

    def test_none_comes_twice_and_a_small_space_ends(self) -> None:
        found = list(points({"size": Range(1, 4), "fair": (True, False)}, seed=5))
        assert len(found) == 8
        assert len({(point["size"], point["fair"]) for point in found}) == 8
        assert list(points({}, seed=0)) == []

    @pytest.mark.parametrize(
        ("where", "low", "high"),
        [(Range(0.01, 1.0, log=True), 0.01, 0.1), (Range(0.0, 1.0), 0.0, 0.5), (Range(1, 10), 1, 5), ((1, 2), 1, 1)],
    )
    def test_they_are_spread_evenly(self, where: Any, low: float, high: float) -> None:
        """Half of the points lie in the first half; a random draw of 200 would be off by 7 as a rule."""
        space: Space = {"x": where, "y": Range(0.0, 1.0)}
        values = np.array([point["x"] for point in islice(points(space, seed=2), 200)])
        assert abs(((values >= low) & (values <= high)).sum() - 100) <= 4

    def test_whole_numbers_are_equally_likely(self) -> None:
        space: Space = {"x": Range(1, 4), "y": Range(0.0, 1.0)}
        counts = np.bincount([point["x"] for point in islice(points(space, seed=0), 400)])
        assert counts[0] == 0
        assert np.abs(counts[1:] - 100).max() <= 4


def test_fields_know_where_to_look() -> None:
    (rate,) = (spec for spec in params(find("fedmf")) if spec.name == "learning_rate")
    assert rate.metadata["search"] == Range(0.01, 1, log=True)

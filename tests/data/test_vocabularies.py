"""What is declared of features: read from texts, written for devices, and the same for a table and for one person."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.data.codes import Code, Scale
from homebody.data.encode import encode
from homebody.data.population import Features, Kind
from homebody.data.vocabularies import Counted, Declaration, kinds_of, parse
from homebody.errors import HomebodyError
from homebody.rng import Rng

SAID = ("cook,vet", "hash:64", "many:hash:9", "text:hash:512", "many:chess,golf", "number:40:15", "range:-5:120")
KINDS: dict[str, Kind] = dict(
    zip(SAID, ("categorical", "categorical", "multi-hot", "text", "multi-hot", "numeric", "numeric"), strict=True)
)


@pytest.mark.parametrize("said", SAID)
def test_a_code_travels_whole(said: str) -> None:
    code = parse("x", said)
    assert isinstance(code, Code)
    assert Code.from_json(json.loads(json.dumps(code.to_json()))) == code


def test_codes_that_were_stored_before_there_were_buckets_are_read() -> None:
    old = {"kind": "number", "values": [], "text": False, "scale": [8.0, 0.5, 0.25], "width": 1}
    assert Code.from_json(old) == Code("number", scale=Scale(8.0, 0.5, 0.25))
    assert Code("number", scale=Scale(8.0, 0.5, 0.25)).to_json() == old


@pytest.mark.parametrize("buckets", [-1, 0.5, "64", 1 << 30, True, None])
def test_buckets_that_are_none_are_refused(buckets: object) -> None:
    told = {**Code("one", buckets=64).to_json(), "buckets": buckets}
    with pytest.raises(HomebodyError, match="another version"):
        Code.from_json(told)


@pytest.mark.parametrize("said", SAID)
def test_a_table_is_encoded_as_each_person_alone(said: str) -> None:
    code, kind = parse("x", said), KINDS[said]
    assert isinstance(code, Code)
    values = {
        "numeric": pl.Series([1.5, None, 900.0, -3.0]),
        "multi-hot": pl.Series([["golf", "spy"], None, [], ["chess", "golf"]]),
        "text": pl.Series(["A cat.", None, "", "cats and dogs"]),
        "categorical": pl.Series(["vet", None, "spy", "cook"]),
    }[kind]
    found = encode(Features(values.alias("x").to_frame(), {"x": kind}, {"x": code}), np.zeros(4, dtype=np.bool_))
    for row, value in zip(found.columns["x"].values, values.to_list(), strict=True):
        alone = code.of("x", value)[0]
        assert [one for one in np.atleast_1d(row) if one != -1] == [one for one in np.atleast_1d(alone) if one != -1]
    assert found.columns["x"].size == code.size


def test_values_of_a_file_are_its_lines(tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("cook\n\n vet, of cats \ncook\n", encoding="utf-8")
    code = parse("job", f"file:{tmp_path / 'jobs.txt'}")
    assert isinstance(code, Code)
    assert code.values == ("cook", "vet, of cats")


def test_a_declaration_fixes_the_kind() -> None:
    assert kinds_of({"a": "hash:4", "b": "many:hash:4", "c": "range:0:1", "d": "found"}, {"d": "text"}) == {
        "a": "categorical",
        "b": "multi-hot",
        "c": "numeric",
        "d": "text",
    }
    with pytest.raises(HomebodyError, match="'a' is declared as text, but its vocabulary is for categorical"):
        kinds_of({"a": "hash:4"}, {"a": "text"})


@given(st.floats(0.01, 15), st.floats(1e-11, 0.1))
def test_one_person_reaches_the_threshold_with_at_most_delta(epsilon: float, delta: float) -> None:
    private = Counted(epsilon, delta)
    reach = np.exp(-(private.threshold - 1) / private.scale) / (1 + np.exp(-1 / private.scale))
    assert reach <= delta


def test_each_person_counts_once_however_much_they_have() -> None:
    """One person has a value 1,000 times, 100 have another once; noise of scale 1/4 by the seed."""
    people = np.concatenate([np.zeros(1000, dtype=np.int64), np.arange(1, 101)])
    values = np.concatenate([np.zeros(1000, dtype=np.int64), np.ones(100, dtype=np.int64)])
    assert Counted(8.0).kept(people, values, 3, Rng.of(2)).tolist() == [False, True, False]


@pytest.mark.parametrize("said", [Counted(1.0), parse("x", "hash:4")])
def test_rows_keep_what_is_declared(said: Declaration) -> None:
    features = Features(pl.DataFrame({"x": ["a", "b"]}), {"x": "categorical"}, {"x": said})
    assert features.rows(np.array([1])).declared == {"x": said}

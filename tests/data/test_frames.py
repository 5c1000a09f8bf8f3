"""Data frames of other libraries are read as files of the same rows are."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl
import pytest

from homebody.data.frames import as_polars
from homebody.data.population import Population
from homebody.data.sources import load
from homebody.errors import HomebodyError

pd = pytest.importorskip("pandas", reason="no pandas: the extra `pandas` is not installed")
pa = pytest.importorskip("pyarrow", reason="no pyarrow: the extra `pandas` is not installed")

LOANS = pl.DataFrame(
    {
        "customer": ["ben", "ann", "ann", "cat", "cat"],
        "asin": ["e", "e", "d", "d", "c"],
        "date": ["2024-01-03", "2024-01-02", "2024-01-01", "2024-01-05", "2024-01-04"],
        "stars": [5, 4, 3, 2, 1],
        "job": ["vet", "cook", "cook", "cook", "cook"],
        "weather": ["rain", "sun", "rain", None, "sun"],
    }
)


class Stream:
    """What speaks Arrow's protocol and is nothing else."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.frame.__arrow_c_stream__(requested_schema)


class Interchange:
    """What speaks the interchange protocol of data frames and is nothing else."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> object:
        return self.frame.__dataframe__(nan_as_null, allow_copy)


def of_pandas(frame: pl.DataFrame) -> Any:
    return frame.to_pandas()


WAYS: dict[str, Callable[[pl.DataFrame], Any]] = {
    "polars": lambda frame: frame,
    "lazy": pl.DataFrame.lazy,
    "arrow": pl.DataFrame.to_arrow,
    "arrow-batch": lambda frame: frame.to_arrow().to_batches()[0],
    "stream": Stream,
    "pandas": of_pandas,
    "pandas-objects": lambda frame: pd.DataFrame({name: frame[name].to_list() for name in frame.columns}, dtype=object),
    "pandas-categories": lambda frame: of_pandas(frame).astype({"customer": "category", "asin": "category"}),
    "pandas-arrow": lambda frame: of_pandas(frame).convert_dtypes(dtype_backend="pyarrow"),
    "pandas-nullable": lambda frame: of_pandas(frame).convert_dtypes(),
    "pandas-index": lambda frame: of_pandas(frame).set_index("customer"),
    "pandas-two-indices": lambda frame: of_pandas(frame).set_index(["customer", "asin"]),
    "pandas-other-rows": lambda frame: of_pandas(frame).set_index(pd.Index([9, 3, 7, 5, 1])),
    "pandas-sparse": lambda frame: of_pandas(frame).astype({"stars": "Sparse[int64]"}),
}


def look(people: Population) -> tuple[Any, ...]:
    sides = (people.user_features, people.item_features, people.contexts)
    return (
        [*map(str, people.user_ids)] if people.user_ids is not None else None,
        [*map(str, people.item_ids)] if people.item_ids is not None else None,
        people.indptr.tolist(),
        people.items.tolist(),
        None if people.times is None else people.times.tolist(),
        None if people.ratings is None else people.ratings.tolist(),
        [None if side is None else side.table.to_dict(as_series=False) for side in sides],
    )


@pytest.mark.parametrize("way", list(WAYS))
def test_every_frame_is_the_same_population(way: str, tmp_path: Any) -> None:
    LOANS.write_csv(tmp_path / "loans.csv")
    expected = look(load(tmp_path / "loans.csv"))
    people = load(WAYS[way](LOANS))
    assert look(people) == expected
    assert people.name == "frame"
    assert people.notes[0].startswith(
        "the frame: took customer for users, asin for items, date for times, stars for ra"
    )
    assert "feature_cols=[names]" in people.notes[1]
    assert "--" not in " ".join(people.notes)


def test_the_interchange_protocol() -> None:
    frame = LOANS.select("customer", "asin").to_arrow()
    if not hasattr(frame, "__dataframe__"):
        pytest.skip("this pyarrow has dropped `__dataframe__`, through which frames of other packages are read")
    assert load(Interchange(frame)).n_interactions == 5


def test_types_of_pandas() -> None:
    zone = pd.to_datetime(["2024-01-01 09:00", None]).tz_localize("Asia/Tokyo")
    columns: dict[str, tuple[Any, list[Any]]] = {
        "whole": (pd.array([1, None], dtype="Int64"), [1, None]),
        "small": (np.array([1, 2], dtype=np.uint8), [1, 2]),
        "number": (pd.array([1.5, None], dtype="Float32"), [1.5, None]),
        "flag": (pd.array([True, None], dtype="boolean"), [True, None]),
        "text": (pd.array(["x", None], dtype="string[python]"), ["x", None]),
        "label": (pd.Categorical(["u", None]), ["u", None]),
        "grade": (pd.Categorical([3, None]), [3, None]),
        "moment": (pd.to_datetime(["2024-01-01", None]), [dt.datetime(2024, 1, 1), None]),
        "zoned": (zone, [dt.datetime(2024, 1, 1), None]),
        "date": ([dt.date(2024, 1, 1), None], [dt.date(2024, 1, 1), None]),
        "decimal": ([Decimal("1.5"), None], [Decimal("1.5"), None]),
        "list": ([["a", "b"], None], [["a", "b"], None]),
        "mixture": ([1, "a"], ["1", "a"]),
        "huge": ([2**70, 1], [2**70, 1]),
        "empty": (np.array([np.nan, np.nan]), [None, None]),
    }
    for name, (values, expected) in columns.items():
        found = as_polars(pd.DataFrame({name: pd.Series(values)}))[name]
        if found.dtype.is_float():
            found = found.fill_nan(None)
        assert found.to_list() == expected, name


WITHOUT_ARROW = """
import sys
sys.modules["pyarrow"] = None
import pandas as pd
import homebody as hb
frame = pd.DataFrame({
    "user": ["ann", "ann", None], "item": pd.array([1, 2, 3], dtype="Int64"),
    "time": pd.to_datetime(["2024-01-02", "2024-01-01", "2024-01-03"]), "job": pd.Categorical(["vet", "vet", "cook"]),
})
people = hb.load(frame, drop_missing=True)
print(people.user_ids.to_list(), people.item_ids.gather(people.history(0)).to_list(), people.notes[1])
"""


def test_pandas_without_pyarrow() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ARROW], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("['ann'] [2, 1] the frame: left out 1 row, 1 without a user (drop_missing).")


@pytest.mark.parametrize("first", ["ann", "a long name that many rows share"])
@pytest.mark.parametrize("nothing", [None, float("nan"), pd.NA, pd.NaT])
def test_texts_among_objects(first: str, nothing: Any) -> None:
    frame = pd.DataFrame({"user": pd.Series([first, nothing, "bob", 7], dtype=object), "item": [1, 2, 3, 4]})
    for given, ids in ((frame.head(3), ["bob", first]), (frame, ["7", "bob", first])):
        people = load(given, drop_missing=True)
        assert people.user_ids is not None
        assert sorted(people.user_ids.to_list()) == sorted(ids)
        assert people.n_interactions == len(ids)


def test_a_pandas_frame_without_pyarrow() -> None:
    """As docs/python.md says."""
    script = "import sys; sys.modules['pyarrow'] = None; import pandas as pd; import polars as pl; "
    script += "frame = pl.DataFrame({'item': ['emma', None], 'score': [1.5, 2.0]}); "
    script += "print(pd.DataFrame(frame.to_dict(as_series=False)).to_dict('list'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{'item': ['emma', "), done.stderr


@pytest.mark.parametrize("library", [lambda frame: frame, of_pandas, pl.DataFrame.to_arrow])
def test_features_and_impressions_may_be_frames_too(library: Callable[[pl.DataFrame], Any]) -> None:
    users = library(pl.DataFrame({"user": ["ann", "ben", "cat"], "age": [31.5, 40.5, 22.5]}))
    items = library(pl.DataFrame({"asin": ["c", "d", "e", "f"], "title": ["Carmilla", "Dracula", "Emma", "Faust"]}))
    shown = pl.DataFrame({"impression": [1, 1], "user": ["ann", "ann"], "item": ["e", "f"], "clicked": [1, 0]})
    people = load(library(LOANS), feature_cols=[], user_features=users, item_features=items, impressions=library(shown))
    assert people.user_features is not None
    assert people.user_features.table["age"].to_list() == [31.5, 40.5, 22.5]
    assert people.item_names is not None
    assert people.item_names.to_list() == ["Carmilla", "Dracula", "Emma", "Faust"]
    assert people.impressions is not None
    assert people.impressions.items.tolist() == [2, 3]
    notes = " ".join(people.notes)
    assert "the frame of user features: took age as numeric (kinds={column: kind} takes it otherwise)." in notes
    assert "--" not in notes


class Unreadable:
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        raise RuntimeError("the connection is closed\nsecond line")


TWICE = pd.DataFrame([[1, 2, 3]], columns=["user", "item", "item"])


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (
            pd.DataFrame({"user": [1], "what": [2]}),
            {},
            r"Which column of the frame is the item\? Name it with item_col;",
        ),
        (pl.DataFrame({"user": [1], "item": [2]}).clear(), {}, "The frame has no rows, so there is nobody"),
        (pd.DataFrame(), {}, "The frame is empty: it needs a column of users and one of items."),
        (TWICE, {}, "The frame has two columns called 'item': rename one of them."),
        (pa.table([[1], [2], [3]], names=["user", "item", "item"]), {}, "The frame has several columns of one name"),
        (
            pd.DataFrame({"user": ["ann", ["bob"]], "item": [1, 2]}),
            {},
            "The column 'user' of the frame cannot be read: unexpected value",
        ),
        (
            pd.DataFrame({"user": pd.Series(["ann", "\ud800"], dtype=object), "item": [1, 2]}),
            {},
            "The column 'user' of the frame cannot be read: .* surrogates not allowed",
        ),
        (pd.Series([1, 2]), {}, "The frame is a pandas Series: give a DataFrame"),
        (Unreadable(), {}, "The frame of type Unreadable cannot be read as a table: the connection is closed."),
        (42, {}, "Data come from a name, a file, the address of a database or a data frame"),
        ([1, 2], {}, "not from a list"),
        (
            pd.DataFrame({"user": [1, None], "item": [1, 2]}),
            {},
            "row 2 has nothing .*; drop_missing leaves such rows out",
        ),
        (LOANS, {"user_col": "who"}, r"The frame has no column 'who' \(user_col\)"),
        (LOANS, {"separator": ";"}, "separator is for a file or a database; the frame has rows and columns already"),
        (LOANS, {"query": "SELECT 1"}, "query is for a file or a database"),
        (LOANS, {"user_features": 42}, "not from a int"),
        (
            LOANS,
            {"user_features": pl.DataFrame({"user": ["ann"]})},
            "^The frame of user features has only the column 'user'",
        ),
        (pd.DataFrame({"user": [2.0**60, 2.0**60 + 2048], "item": [1, 2]}), {}, "floats hold exactly, up to 2\\^53"),
        (pd.DataFrame({"user": [1, 2], "item": [[1], [2]]}), {}, "item column 'item' of the frame holds List"),
        (pd.DataFrame({"user": [1], "item": [pd.Timedelta(1)]}), {}, "holds Duration"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(source: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence) as caught:
        load(source, **options)
    assert "\n" not in str(caught.value)

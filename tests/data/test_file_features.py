"""A file of one's own that has everything in it: who met what, and what is known of them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from homebody.data.partitions import split
from homebody.data.population import Population
from homebody.data.sources import load
from homebody.data.table import describe
from homebody.errors import HomebodyError

LOANS = """user,item,time,age,job,title,genre,weather
ben,e,3,40,vet,Emma,novel|comedy,rain
ann,e,2,31,cook,Emma,novel|comedy,sun
ann,d,1,31,cook,Dracula,horror,rain
cat,d,5,31,cook,Dracula,horror,
cat,c,4,31,cook,Carmilla,horror,sun
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.csv"


def features(people: Population) -> dict[str, dict[str, list[Any]]]:
    sides = {"users": people.user_features, "items": people.item_features, "interactions": people.contexts}
    return {side: own.table.to_dict(as_series=False) for side, own in sides.items() if own is not None}


def read(file: Path, text: str, **options: Any) -> Population:
    file.write_text(text)
    return load(file, **options)


class TestWhose:
    def test_columns_are_of_users_of_items_or_of_interactions(self, file: Path) -> None:
        people = read(file, LOANS)
        assert features(people) == {
            "users": {"age": [31, 40, 31], "job": ["cook", "vet", "cook"]},
            "items": {
                "title": ["Carmilla", "Dracula", "Emma"],
                "genre": [["horror"], ["horror"], ["novel", "comedy"]],
            },
            # Ann read Dracula before Emma, and Cat Carmilla before Dracula: contexts go with them.
            "interactions": {"weather": ["rain", "sun", "rain", "sun", None]},
        }
        assert people.items.tolist() == [1, 2, 2, 0, 1]
        assert people.user_features is not None
        assert people.user_features.kinds == {"age": "numeric", "job": "categorical"}
        (_, note) = people.notes
        assert note == (
            "mine.csv: took for features of users age as numeric, job as categorical; of items title as text, genre as "
            "multi-hot; of interactions weather as categorical (--feature-cols NAMES takes others, or none, and "
            "--kind COLUMN=KIND takes one otherwise)."
        )

    def test_titles_are_what_items_are_called(self, file: Path) -> None:
        people = read(file, LOANS.replace("Carmilla", ""))
        assert [people.item_name(item) for item in range(3)] == ["c", "Dracula", "Emma"]

    def test_a_value_that_some_rows_lack_counts_for_all_of_the_user(self, file: Path) -> None:
        people = read(file, "user,item,age\n1,a,20\n1,b,\n1,c,20\n2,a,NaN\n2,b,30\n2,c, \n3,a,\n3,b,NA\n3,c,null\n")
        assert features(people) == {"users": {"age": [20, 30, None]}}
        assert (
            "mine.csv: where age (3 rows) is missing, what other rows say of the same user or item counts."
            in (people.notes[1:])
        )

    def test_one_contradiction_makes_it_a_context(self, file: Path) -> None:
        people = read(file, "user,item,mood\n1,a,good\n1,b,\n1,c,bad\n2,a,bad\n2,b,bad\n2,c,bad\n")
        assert features(people) == {"interactions": {"mood": ["good", None, "bad", "bad", "bad", "bad"]}}

    def test_a_mark_in_some_rows_is_not_spread_over_the_others(self, file: Path) -> None:
        sold = read(file, "user,item,gift\n1,a,yes\n1,b,\n2,a,\n2,b,yes\n3,a,yes\n3,b,yes\n")
        assert features(sold) == {"interactions": {"gift": ["yes", None, None, "yes", "yes", "yes"]}}
        people = read(file, "user,item,member\n1,a,yes\n1,b,yes\n2,a,\n2,b,\n3,a,yes\n3,b,yes\n")
        assert features(people) == {"users": {"member": ["yes", None, "yes"]}}

    def test_values_that_stand_once_a_user_prove_nothing(self, file: Path) -> None:
        people = read(file, "user,item,code\n1,a,x\n1,b,\n2,a,\n2,b,y\n3,a,x\n3,b,\n4,a,y\n4,b,\n5,a,\n5,b,x\n")
        assert list(features(people)) == ["interactions"]

    def test_what_is_both_is_of_users_if_they_come_back(self, file: Path) -> None:
        north, south = "{0},{1},north\n", "{0},{1},south\n"
        two_items = "user,item,side\n" + "".join(
            (north if user < 2 else south).format(user, item + 2 * (user >= 2))
            for user in range(4)
            for item in range(2)
        )
        people = read(file, two_items)
        assert features(people) == {"users": {"side": ["north", "north", "south", "south"]}}
        assert people.notes[2] == (
            "mine.csv: side is the same in all rows of each user, and of each item too; it is taken for a feature of "
            "users."
        )
        one_each = read(file, "user,item,genre\n1,a,war\n2,a,war\n3,b,love\n4,b,love\n5,c,war\n6,c,war\n")
        assert features(one_each) == {"items": {"genre": ["war", "love", "war"]}}
        assert len(one_each.notes) == 2
        few_items = "".join(f"{user},{'ab'[user % 2]},{'xy'[user % 2]}\n" * 2 for user in range(6))
        assert features(read(file, f"user,item,kind\n{few_items}")) == {"users": {"kind": ["x", "y"] * 3}}

    def test_lists_and_dates_of_parquet(self, tmp_path: Path) -> None:
        frame = {
            "user": [1, 1, 2, 2, 3, 3],
            "item": ["a", "b", "a", "b", "a", "b"],
            "tags": [["x", "y"], None, ["x", "y"], None, ["x", "y"], None],
            "since": [dt.date(2024, 1, day) for day in (1, 1, 2, 2, 1, 1)],
            "price": [1.5, float("nan"), 2.5, 2.5, 1.5, 1.5],
        }
        pl.DataFrame(frame).write_parquet(tmp_path / "mine.parquet")
        assert features(load(tmp_path / "mine.parquet")) == {
            "users": {"price": [1.5, 2.5, 1.5]},
            "items": {"tags": [["x", "y"], None]},
        }
        assert "left out since (dates of users)" in load(tmp_path / "mine.parquet").notes[-1]

    @given(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["x", "y", None])), min_size=1, max_size=8
        )
    )
    def test_against_the_definition(self, rows: list[tuple[int, int, str | None]]) -> None:
        users = sorted({user for user, _, _ in rows})
        items = sorted({item for _, item, _ in rows})
        order = np.array(sorted(range(len(rows)), key=lambda row: rows[row][0]))
        bounds = np.cumsum([0, *(sum(user == one for user, _, _ in rows) for one in users)])
        people = Population(
            "toy", bounds, np.array([items.index(rows[row][1]) for row in order], dtype=np.int32), len(items)
        )
        table = pl.DataFrame({"x": pl.Series([value for _, _, value in rows], dtype=pl.String)})
        found = features(describe(people, table, Path("a.csv"), order, wanted={"x": "text"}))
        ((side, columns),) = found.items()

        def of(place: int, one: int) -> list[str | None]:
            return [row[2] for row in rows if row[place] == one]

        for name, place, known in (("users", 0, users), ("items", 1, items)):
            strict = all(len(set(of(place, one))) == 1 for one in known)
            if side == name:
                assert all(len(set(of(place, one)) - {None}) <= 1 for one in known)
                assert columns["x"] == [next(iter(set(of(place, one)) - {None}), None) for one in known]
            if side == "interactions":
                assert not strict
                assert columns["x"] == [rows[row][2] for row in order]


class TestLeftOut:
    @pytest.mark.parametrize(
        ("values", "reason"),
        [
            (["1", "2", "3", "4", "5", "6"], "different in every row"),
            (["r1", "r2", "r3", "r4", "r5", "r6"], "different in every row"),
            (["so it was", "oh my", "a|b c", "why not me", "of a kind", "no more"], "different in every row"),
            (["x"] * 6, "the same in every row"),
            (["", "NaN", "null", "", "", ""], "empty"),
            (["u1", "u1", "u2", "u2", "u3", "u3"], "no two users share one"),
            (["i1", "i2", "i1", "i2", "i1", "i2"], "no two items share one"),
            (
                ["I liked it a lot", "it is a bad one", "it is a bad one", "what a book", "a fine book", ""],
                "free text about interactions",
            ),
        ],
    )
    def test_what_says_nothing_is_left_out_and_said(self, file: Path, values: list[str], reason: str) -> None:
        rows = [f"{1 + n // 2},{'ab'[n % 2]},{value}" for n, value in enumerate(values)]
        text = "\n".join(["user,item,x", *rows])
        people = read(file, text)
        assert features(people) == {}
        assert people.notes[1:] == (f"mine.csv: left out x ({reason}); --feature-cols NAMES takes it all the same.",)
        assert len(features(read(file, text, feature_cols=["x"]))) == 1
        assert len(features(read(file, text, kinds={"x": "categorical"}))) == 1

    def test_amounts_are_kept_though_no_two_are_equal(self, file: Path) -> None:
        people = read(file, "user,item,km\n1,a,1.5\n1,b,2\n2,a,\n2,b,3\n")
        assert features(people) == {"interactions": {"km": [1.5, 2.0, None, 3.0]}}

    def test_a_column_without_a_name(self, file: Path) -> None:
        text = ",user,item,age\n0,1,a,3.5\n1,1,b,3.5\n1,2,a,2.5\n0,2,b,2.5\n"
        assert features(read(file, text)) == {"users": {"age": [3.5, 2.5]}}
        assert load(file).notes[-1] == "mine.csv: left out 1 column without a name."
        assert features(load(file, feature_cols="")) == {}

    def test_something_else_among_numbers(self, file: Path) -> None:
        text = "user,item,age\n2,a,40\n1,a,31\n1,b,31\n2,b,40\n3,a,old\n3,b,old\n"
        sentence = (
            f"The numeric column 'age' of {file} must hold numbers, but row 5 has 'old' (2 such rows, counted from 1, "
            "header aside); put them right, or say what it is with --kind age=categorical"
        )
        people = read(file, text)
        assert features(people) == {}
        assert people.notes[1:] == (f"{sentence}; until then it is left out.",)
        for asked in ({"feature_cols": "age"}, {"kinds": {"age": "numeric"}}):
            with pytest.raises(HomebodyError) as caught:
                load(file, **asked)
            assert str(caught.value) == f"{sentence}."
        assert features(load(file, kinds={"age": "categorical"})) == {"users": {"age": ["31", "40", "old"]}}

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ([{"a": 1}, {"a": 2}], "holds Struct"),
            ([b"x", b"y"], "holds Binary values"),
            ([dt.timedelta(1), dt.timedelta(2)], "holds Duration"),
            ([[["a"]], [["b"]]], "needs lists of texts"),
        ],
    )
    def test_what_cannot_be_a_feature_stops_only_who_asks_for_it(
        self, tmp_path: Path, values: list[Any], sentence: str
    ) -> None:
        path = tmp_path / "mine.parquet"
        pl.DataFrame({"user": [1, 2], "item": [1, 1], "x": values}).write_parquet(path)
        assert sentence in load(path).notes[1]
        with pytest.raises(HomebodyError, match=sentence):
            load(path, feature_cols=["x"])


class TestChoice:
    def test_named_columns_alone_are_read(self, file: Path) -> None:
        assert {side: list(own) for side, own in features(read(file, LOANS, feature_cols="weather, age")).items()} == {
            "users": ["age"],
            "interactions": ["weather"],
        }
        assert list(features(load(file, feature_cols=["genre"]))["items"]) == ["genre"]

    @pytest.mark.parametrize("nothing", ["", []])
    def test_none_at_all(self, file: Path, nothing: str | list[str]) -> None:
        people = read(file, LOANS, feature_cols=nothing)
        assert features(people) == {}
        assert people.item_names is None
        assert people.notes[1:] == ()

    def test_a_name_with_a_comma(self, file: Path) -> None:
        people = read(file, 'user,item,"a,b",a\n1,a,x,1.5\n1,b,x,1.5\n2,a,y,2.5\n2,b,y,2.5\n', feature_cols="a,b")
        assert list(features(people)["users"]) == ["a,b"]

    @pytest.mark.parametrize(
        ("wanted", "sentence"),
        [
            ("age,wether", r"no column 'wether' \(--feature-cols\); its columns are 'user', 'item'"),
            (["user"], r"The column 'user' of .*mine\.csv has the users, so it cannot be a feature too"),
        ],
    )
    def test_columns_that_cannot_be_taken(self, file: Path, wanted: str | list[str], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence) as caught:
            read(file, LOANS, feature_cols=wanted)
        assert "\n" not in str(caught.value)

    def test_what_an_empty_name_leaves_out_is_no_feature_either(self, file: Path) -> None:
        text = "user,item,rating,timestamp\n1,a,5,1\n1,b,4,2\n2,a,5,2\n2,b,4,1\n"
        assert features(read(file, text, rating_col="", time_col="")) == {}
        assert list(features(load(file, rating_col="", feature_cols="rating"))) == ["items"]

    def test_a_named_dataset_has_its_features_already(self) -> None:
        with pytest.raises(
            HomebodyError, match="--feature-cols is for a file of your own; 'synthetic' has its columns"
        ):
            load("synthetic", feature_cols="age")

    def test_kinds(self, file: Path) -> None:
        people = read(file, LOANS, kinds={"age": "categorical", "weather": "text"})
        assert people.user_features is not None
        assert people.contexts is not None
        assert people.user_features.kinds["age"] == "categorical"
        assert people.contexts.kinds == {"weather": "text"}
        with pytest.raises(HomebodyError, match="no feature 'aeg'; did you mean 'age'"):
            load(file, kinds={"aeg": "numeric"})
        with pytest.raises(HomebodyError, match="no kind of feature 'number'"):
            load(file, kinds={"age": "number"})
        with pytest.raises(HomebodyError, match=r"no feature 'job'. Known: age\."):
            load(file, kinds={"job": "text"}, feature_cols="age")

    def test_files_of_features_add_to_them_and_take_their_place(self, file: Path, tmp_path: Path) -> None:
        (tmp_path / "users.csv").write_text("user,age,town\nann,50.5,Rome\nben,51.5,Rome\ncat,52.5,Oslo\n")
        people = read(file, LOANS, user_features=tmp_path / "users.csv")
        assert features(people)["users"] == {
            "job": ["cook", "vet", "cook"],
            "age": [50.5, 51.5, 52.5],
            "town": ["Rome", "Rome", "Oslo"],
        }
        assert "users.csv takes the place of the users' 'age' that mine has already." in people.notes

    def test_filters_keep_features_with_their_people(self, file: Path) -> None:
        people = read(file, LOANS, filters={"min_user": 2})
        assert features(people)["users"] == {"age": [31, 31], "job": ["cook", "cook"]}
        assert features(people)["interactions"] == {"weather": ["rain", "sun", "sun", None]}


def test_what_training_never_met_is_unknown_to_the_model(file: Path) -> None:
    """Held-out users of whom one has a job of their own, items of which one has no genre."""
    job = ["spy" if user == 7 else ("cook", "vet")[user % 2] for user in range(10)]
    genre = ["" if item == 3 else ("war|love", "war")[item % 2] for item in range(5)]
    rows = [f"{user},{item},{job[user]},{genre[item]}" for user in range(10) for item in range(5)]
    people = read(file, "\n".join(["user,item,job,genre", *rows]))
    done = next(one for seed in range(50) if not (one := split(people, "held-out-users", seed=seed)).learn[7])
    jobs, genres = done.encoded["users"].columns["job"], done.encoded["items"].columns["genre"]
    assert jobs.values.tolist() == [0 if user == 7 else 1 + user % 2 for user in range(10)]
    assert jobs.size == 3
    assert genres.values.tolist() == [[1, 2], [2, -1], [1, 2], [-1, -1], [1, 2]]
    assert done.encoded["users"].notes == (
        "1 of 10 users has a 'job' that none in training has; it counts as unknown.",
    )
    assert done.encoded["items"].notes == ("1 of 5 items has no 'genre'.",)

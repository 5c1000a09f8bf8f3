from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from homebody.data.attach import attach
from homebody.data.columns import FileColumn
from homebody.data.population import Features, Impressions, Population
from homebody.errors import HomebodyError


@pytest.fixture
def people() -> Population:
    """Users 7, 9 and 12; items a, b, c and d."""
    return Population(
        "toy",
        np.array([0, 2, 3, 4]),
        np.array([0, 1, 2, 3], dtype=np.int32),
        n_items=4,
        user_ids=pl.Series([7, 9, 12]),
        item_ids=pl.Series(["a", "b", "c", "d"]),
    )


@pytest.fixture
def said() -> list[str]:
    return []


def users_of(people: Population, path: Path, text: str, said: list[str], **kinds: str) -> pl.DataFrame:
    path.write_text(text)
    found = attach(people, user_features=path, kinds=kinds, say=said.append).user_features
    assert found is not None
    return found.table


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users.csv"


class TestRows:
    @pytest.mark.parametrize(
        ("header", "separator"),
        [("user", ","), ("User_ID", "\t"), ("id", ";"), ("who", ","), ("userId", ","), ("reader", ",")],
    )
    def test_the_id_column_is_found(
        self, people: Population, file: Path, said: list[str], header: str, separator: str
    ) -> None:
        text = f"{header},age\n12,3.5\n7,1.5\n9,2.5\n".replace(",", separator)
        assert users_of(people, file, text, said)["age"].to_list() == [1.5, 2.5, 3.5]
        assert any("first, 'who'" in line for line in said) == (header == "who")
        assert any("took 'reader' for the users' ids" in line for line in said) == (header == "reader")

    def test_the_id_may_stand_anywhere_if_it_has_a_usual_name(
        self, people: Population, file: Path, said: list[str]
    ) -> None:
        found = users_of(people, file, "age,user\n3.5,12\n1.5,7\n2.5,9\n", said)
        assert found.to_dict(as_series=False) == {"age": [1.5, 2.5, 3.5]}

    def test_text_ids_meet_numbers_as_they_are_written(self, people: Population, file: Path, said: list[str]) -> None:
        found = users_of(people, file, "user,age\n007,1.5\nx,2.5\n9,3.5\n", said)
        assert found["age"].to_list() == [None, 3.5, None]
        assert f"{file.name} has 2 rows about users that have no interactions; left out." in said
        assert f"{file.name} misses 2 of 3 users; nothing is known of them." in said

    def test_number_ids_meet_texts(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        named = Population("t", np.array([0, 1]), np.zeros(1, np.int32), 2, item_ids=pl.Series(["10", "x"]))
        pl.DataFrame({"item": [10], "price": [2.5]}).write_parquet(tmp_path / "items.parquet")
        found = attach(named, item_features=tmp_path / "items.parquet", say=said.append).item_features
        assert found is not None
        assert found.table["price"].to_list() == [2.5, None]

    def test_a_population_without_ids_goes_by_numbers(self, file: Path, said: list[str]) -> None:
        numbered = Population("t", np.array([0, 1, 2]), np.zeros(2, np.int32), 1)
        assert users_of(numbered, file, "user,age\n1,2.5\n0,1.5\n", said)["age"].to_list() == [1.5, 2.5]

    def test_the_first_of_identical_rows_counts(self, people: Population, file: Path, said: list[str]) -> None:
        text = "user,age,tags\n7,1.5,a|b\n9,2.5,\n7,1.50,a|b\n12,3.5,c\n7,1.5,a|b\n"
        assert users_of(people, file, text, said)["age"].to_list() == [1.5, 2.5, 3.5]
        assert f"{file.name} repeats itself in 2 rows; the first of each counts." in said
        assert len(said) == 2  # the kinds as well

    def test_contradicting_rows_are_refused(self, people: Population, file: Path, said: list[str]) -> None:
        text = "user,age\n5,1\n5,2\n9,3\n7,1\n7,2\n9,4\n7,2\n"
        with pytest.raises(HomebodyError, match=r"several different rows about the user '9' \(2 such users\)"):
            users_of(people, file, text, said)

    def test_contradictions_about_strangers_do_not_matter(
        self, people: Population, file: Path, said: list[str]
    ) -> None:
        assert users_of(people, file, "user,age\n5,1\n5,2\n9,3\n", said)["age"].to_list() == [None, 3, None]

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("", "is empty"),
            ("user,age\n", "no rows below its header, so it says nothing about any user"),
            ("user\n7\n", "only the column 'user'"),
            ("user,user_id,age\n7,7,1\n", r"several columns that could be the user \('user', 'user_id'\)"),
            ("user,age\n,1\n", "must hold a user in every row, but row 1 has nothing"),
            ("user,age\nx,1\ny,2\n", "describes none of the population's users: its first user is 'x', and the"),
            ("user,age\n7,1.5\n9,2.5\n12,old\n", r"numeric column 'age' of .* must hold numbers, but row 3 has 'old' "),
        ],
    )
    def test_bad_files_are_one_sentence(
        self, people: Population, file: Path, said: list[str], text: str, sentence: str
    ) -> None:
        with pytest.raises(HomebodyError, match=sentence) as error:
            users_of(people, file, text, said)
        assert str(error.value).endswith(".")

    def test_a_row_of_mixed_types_says_what_to_do(self, people: Population, file: Path, said: list[str]) -> None:
        text = "user,age\n7,1.5\n9,2.5\n12,old\n"
        with pytest.raises(HomebodyError, match=r"\(1 such row.*\); put them right, or .* --kind age=categorical\.$"):
            users_of(people, file, text, said)
        assert users_of(people, file, text, said, age="categorical")["age"].to_list() == ["1.5", "2.5", "old"]

    def test_what_the_source_knows_stays_beside_it(self, people: Population, file: Path, said: list[str]) -> None:
        old = Features(pl.DataFrame({"job": ["x", "y", "z"], "age": [1, 2, 3]}), {"job": "text", "age": "numeric"})
        known = Population(
            "toy", people.indptr, people.items, 4, user_ids=people.user_ids, item_ids=people.item_ids, user_features=old
        )
        found = users_of(known, file, "user,age\n7,1.5\n9,2.5\n12,3.5\n", said)
        assert found.to_dict(as_series=False) == {"job": ["x", "y", "z"], "age": [1.5, 2.5, 3.5]}
        assert f"{file.name} takes the place of the users' 'age' that toy has already." in said


class TestKinds:
    @pytest.mark.parametrize(
        ("values", "kind"),
        [
            (["Drama|War", "Drama", None], "multi-hot"),
            ([["Drama", "War"], None], "multi-hot"),
            (["1.5", "2", "NA"], "numeric"),
            ([str(value) for value in range(40)] * 3, "numeric"),
            (["1", "2", "3"], "numeric"),
            (["1", "2", "1", "2", ""], "categorical"),
            ([1, 2, 1, 2], "categorical"),
            ([1.0, 2.0, 1.0, 2.0, None], "categorical"),
            ([1.5, 2.0, 1.5, 2.0], "numeric"),
            (["01234", "00501", "90210", "10001"], "categorical"),
            ([True, False], "categorical"),
            (["writer", "cook", "writer", "vet"], "categorical"),
            (["Emma", "Ulysses", "Dracula"], "categorical"),
            (["The Turn of the Screw", "Emma", "Bleak House"], "text"),
            (["Frankenstein's", "Middlemarching", "Wuthering-H"], "text"),
            (["Of the same words"] * 4, "categorical"),
            ([None, "NA", ""], "categorical"),
        ],
    )
    def test_the_guess(self, values: list[object], kind: str) -> None:
        assert FileColumn(pl.Series("x", values), "feature", Path("a.csv")).guess() == kind

    def test_the_guess_is_said_and_overruled(self, people: Population, file: Path, said: list[str]) -> None:
        text = "user,year,code,tags\n7,1999,5,x\n9,2001,5,y|x|y\n12,1999,5,\n"
        plain = users_of(people, file, text, said)
        took = "took year as numeric, code as categorical, tags as multi-hot"
        assert said == [f"{file.name}: {took} (--kind COLUMN=KIND takes it otherwise)."]
        assert plain["tags"].to_list() == [["x"], ["y", "x"], None]
        given = users_of(people, file, text, said, year="categorical", code="numeric", tags="text")
        assert given.rows() == [(1999, 5, "x"), (2001, 5, "y|x|y"), (1999, 5, None)]
        assert len(said) == 1

    def test_forms_of_values(self, people: Population, tmp_path: Path) -> None:
        frame = pl.DataFrame(
            {
                "user": [7, 9, 12],
                "lists": [["a", None, " b "], [], None],
                "numbers": [[1, 2], [2], [3]],
                "yes": [True, False, None],
                "whole": [1.0, 2.0, float("nan")],
            }
        )
        frame.write_parquet(tmp_path / "u.parquet")
        kinds = {"whole": "categorical"}
        found = attach(people, user_features=tmp_path / "u.parquet", kinds=kinds).user_features
        assert found is not None
        assert found.table["lists"].to_list() == [["a", "b"], [], None]
        assert found.table["numbers"].to_list() == [["1", "2"], ["2"], ["3"]]
        assert found.table["yes"].to_list() == ["true", "false", None]
        assert found.table["whole"].to_list() == [1, 2, None]

    @pytest.mark.parametrize(
        ("values", "codes"),
        [
            (["9007199254740993", "9007199254740992"], [9007199254740993, 9007199254740992]),
            (["99999999999999999999", "1"], ["99999999999999999999", "1"]),
            (["3.0", "4.0"], [3, 4]),
            (["1e30", "4"], ["1e30", "4"]),
            (["1.5", "4"], ["1.5", "4"]),
            (["07", "7"], ["07", "7"]),
            (["7", None], [7, None]),
            ([None, "NA"], [None, None]),
        ],
    )
    def test_codes_stay_what_they_are(self, values: list[str | None], codes: list[object]) -> None:
        column = FileColumn(pl.Series("x", values, dtype=pl.String), "feature", Path("a.csv"))
        assert column.as_kind("categorical").to_list() == codes

    @pytest.mark.parametrize(
        ("values", "kind", "kept"),
        [
            (pl.Series(["a", "b", "a"], dtype=pl.Categorical), "categorical", ["a", "b", "a"]),
            (pl.Series(["1.5", "2", "3"]).cast(pl.Decimal(10, 2)), "numeric", [1.5, 2.0, 3.0]),
            (pl.Series([2**64 - 1, 2**64 - 1, 1], dtype=pl.UInt64), "numeric", [2**64 - 1, 2**64 - 1, 1]),
        ],
    )
    def test_types_of_parquet(
        self, people: Population, tmp_path: Path, values: pl.Series, kind: str, kept: list[object]
    ) -> None:
        pl.DataFrame({"user": [7, 9, 12], "x": values}).write_parquet(tmp_path / "u.parquet")
        found = attach(people, user_features=tmp_path / "u.parquet").user_features
        assert found is not None
        assert found.kinds == {"x": kind}
        assert found.table["x"].to_list() == kept

    def test_dates_are_features_only_if_that_is_said(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        file = tmp_path / "u.parquet"
        days = pl.Series(["2024-01-01", "2024-01-01", "2024-01-02"])
        pl.DataFrame({"user": [7, 9, 12], "age": [1.5, 2.5, 3.5], "since": days.str.to_date()}).write_parquet(file)
        found = attach(people, user_features=file, say=said.append).user_features
        assert found is not None
        assert found.names == ["age"]
        assert "u.parquet: left out since (looks like times); --kind COLUMN=KIND takes it all the same." in said
        found = attach(people, user_features=file, kinds={"since": "categorical"}).user_features
        assert found is not None
        assert found.table["since"].to_list() == days.to_list()
        pl.DataFrame({"user": [7], "since": days[:1]}).write_parquet(file)
        with pytest.raises(HomebodyError, match="has no column that can be a feature of users"):
            attach(people, user_features=file)

    @pytest.mark.parametrize("values", [[{"a": 1}], [b"x"], [[{"a": 1}]], [[[1]]]])
    def test_types_that_say_nothing_are_refused(self, people: Population, tmp_path: Path, values: list[object]) -> None:
        pl.DataFrame({"user": [7], "x": values}).write_parquet(tmp_path / "u.parquet")
        with pytest.raises(HomebodyError, match=r"column 'x' of .* holds .* values; it needs"):
            attach(people, user_features=tmp_path / "u.parquet")

    @pytest.mark.parametrize(
        ("kinds", "sentence"),
        [
            ({"aeg": "numeric"}, "There is no feature 'aeg'; did you mean 'age'"),
            ({"age": "number"}, "There is no kind of feature 'number'; did you mean 'numeric'"),
            ({"tags": "numeric"}, "'tags' of .* must hold numbers, but row 1 has 'x'"),
        ],
    )
    def test_unknown_columns_and_kinds_are_refused(
        self, people: Population, file: Path, said: list[str], kinds: dict[str, str], sentence: str
    ) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            users_of(people, file, "user,age,tags\n7,1,x\n", said, **kinds)

    def test_lists_are_nothing_but_multi_hot(self, people: Population, tmp_path: Path) -> None:
        pl.DataFrame({"user": [7], "tags": [["a"]]}).write_parquet(tmp_path / "u.parquet")
        with pytest.raises(HomebodyError, match=r"'tags' of .* holds lists, so it is multi-hot, not text"):
            attach(people, user_features=tmp_path / "u.parquet", kinds={"tags": "text"})

    def test_the_sources_own_columns_take_other_kinds(self, people: Population) -> None:
        table = pl.DataFrame({"year": [1990, None, 2000, 1990]})
        known = Population("toy", people.indptr, people.items, 4, item_features=Features(table, {"year": "numeric"}))
        found = attach(known, kinds={"year": "multi-hot"}).item_features
        assert found is not None
        assert found.table["year"].to_list() == [["1990"], None, ["2000"], ["1990"]]
        assert found.kinds == {"year": "multi-hot"}
        with pytest.raises(HomebodyError, match="no feature 'x' to declare as text: toy has no features"):
            attach(people, kinds={"x": "text"})


class TestTitles:
    def test_they_name_items_that_have_no_names(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        path = tmp_path / "items.csv"
        path.write_text("item,Title\nb,Ulysses\na,Emma\nd,\n")
        found = attach(people, item_features=path, say=said.append)
        assert found.item_names is not None
        assert found.item_names.to_list() == ["Emma", "Ulysses", "c", "d"]
        assert found.item_features is not None
        assert found.item_features.kinds == {"Title": "text"}
        again = tmp_path / "again.csv"
        again.write_text("item,name\na,other\n")
        assert attach(found, item_features=again).item_name(0) == "Emma"

    def test_users_names_are_just_a_column(self, people: Population, file: Path) -> None:
        file.write_text("user,name\n7,Ann\n9,Ben\n")
        found = attach(people, user_features=file)
        assert found.item_names is None
        assert found.user_features is not None
        assert found.user_features.kinds == {"name": "categorical"}


def shown(people: Population, path: Path, text: str, said: list[str]) -> Impressions:
    path.write_text(text)
    found = attach(people, impressions=path, say=said.append).impressions
    assert found is not None
    return found


class TestImpressions:
    def test_they_stand_by_user_and_time(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        text = (
            "Impression_ID,user,item,clicked,time\n"
            "3,9,a,0,5\n3,9,c,1,5\n10,7,b,true,9\n10,7,a,FALSE,9\n2,7,d,1,8\n2,7,c,0,8\n2,7,a,0,8\n"
        )
        found = shown(people, tmp_path / "i.csv", text, said)
        assert found.users.tolist() == [0, 0, 1]
        assert found.indptr.tolist() == [0, 3, 5, 7]
        assert found.items.tolist() == [3, 2, 0, 1, 0, 0, 2]
        assert found.clicked.tolist() == [True, False, False, True, False, False, True]
        assert (found.users.dtype, found.indptr.dtype, found.items.dtype) == (np.int64, np.int64, np.int32)
        assert said == []

    def test_times_are_kept(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        days = {"3,9,a,0": "2024-01-01", "3,9,c,1": "2024-01-01", "2,7,b,1": "1970-01-02", "2,7,a,0": "1970-01-02"}
        text = "\n".join(["impression,user,item,clicked,time", *(f"{row},{day}" for row, day in days.items())])
        found = shown(people, tmp_path / "i.csv", text, said)
        assert found.times is not None
        assert found.times.tolist() == [86_400, 1_704_067_200]
        assert shown(people, tmp_path / "j.csv", text.replace("time", "other"), said).times is None

    @pytest.mark.parametrize("numbers", [False, True])
    def test_items_that_are_shown_and_described_join_although_nobody_has_them(
        self, people: Population, tmp_path: Path, said: list[str], numbers: bool
    ) -> None:
        if numbers:
            people = replace(people, item_ids=pl.Series([1, 2, 3, 4]))
        a, _, _, d, e, f = "123456" if numbers else "abcdef"
        shows = tmp_path / "i.csv"
        shows.write_text(f"impression,user,item,clicked\n1,7,{e},1\n1,7,{a},0\n1,7,{f},0\n")
        items = tmp_path / "items.csv"
        items.write_text(f"item,title\n{a},Emma\n{e},Ulysses by James\n{d},Dracula\n")
        found = attach(people, item_features=items, impressions=shows, kinds={"title": "text"}, say=said.append)
        assert found.n_items == 5
        assert found.item_ids is not None
        assert found.item_ids.to_list() == ([1, 2, 3, 4, 5] if numbers else list("abcde"))
        assert found.impressions is not None
        assert found.impressions.items.tolist() == [4, 0]  # f is not described: it is left out, as before
        assert found.item_features is not None
        assert found.item_features.table["title"].to_list() == ["Emma", None, None, "Dracula", "Ulysses by James"]
        assert found.item_name(4) == "Ulysses by James"
        assert said[0] == "1 item that nobody has is shown and described: known too."
        assert people.n_items == 4
        assert attach(people, item_features=items, kinds={"title": "text"}).n_items == 4

    def test_without_times_they_stand_as_in_the_file(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        text = "impression,user,item,clicked\nz,7,a,0\ny,7,c,0\nz,7,b,1\ny,7,d,1\n"
        found = shown(people, tmp_path / "i.csv", text, said)
        assert found.indptr.tolist() == [0, 2, 4]
        assert found.items.tolist() == [0, 1, 2, 3]

    def test_what_cannot_be_used_is_counted_and_said(self, people: Population, tmp_path: Path, said: list[str]) -> None:
        path = tmp_path / "i.csv"
        rows = [
            *("1,7,a,0", "1,7,b,1", "1,7,zz,0", "1,7,a,1"),  # an unknown item; a is shown twice, clicked once
            *("2,7,a,0", "2,7,b,0"),  # no click
            "3,9,a,1",  # nothing else
            *("4,9,a,1", "4,9,zz,0"),  # nothing else once zz is out
            *("5,99,a,1", "5,99,b,0"),  # nobody's
            *("6,9,c,1", "6,9,d,0", "6,9,d,0"),
        ]
        found = shown(people, path, "\n".join(["impression,user,item,clicked", *rows]), said)
        assert found.users.tolist() == [1]
        assert found.items.tolist() == [2, 3]
        assert said == [
            f"{path.name} has 1 impression of users who have no interactions; left out.",
            f"{path.name} shows items that the population does not have in 2 rows; those are left out.",
            "i.csv: 2 items are shown again in the same impression: each counts once, as clicked if once clicked.",
            "i.csv: 1 impression has no click: left out, as there is nothing to rank.",
            "i.csv: 3 impressions have nothing that was not clicked: left out, as there is nothing to rank.",
        ]

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("impression,user,item\n1,7,a\n", "no column 'clicked': impressions need the columns impression, user"),
            ("impression,user,item,clicked\n", "there are no impressions"),
            ("impression,user,item,clicked\n1,7,a,2\n", "must hold 1 or 0 .* but row 1 has '2'"),
            ("impression,user,item,clicked\n1,7,a,\n", "must hold 1 or 0 .* but row 1 has nothing"),
            (
                "impression,user,item,clicked\n1,7,a,1\n1,9,b,0\n",
                r"impression '1' of .* belongs to 2 users \(1 such imp",
            ),
            ("impression,user,item,clicked\n1,7,a,1\n1,7,b,1\n", "No impression of .* can be used"),
            ("impression,user,item,clicked\n1,99,a,1\n1,99,b,0\n", "No impression of .* can be used"),
            ("impression,user,item,clicked,click\n1,7,a,1,1\n", "several columns that could be the clicked"),
        ],
    )
    def test_bad_files_are_one_sentence(
        self, people: Population, tmp_path: Path, said: list[str], text: str, sentence: str
    ) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            shown(people, tmp_path / "i.csv", text, said)

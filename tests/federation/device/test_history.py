"""Histories on a device: in from files, noted, deleted, and out again as they were."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from homebody.data import load
from homebody.errors import HomebodyError
from homebody.federation.device.history import Interaction, read_time
from homebody.federation.device.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as made:
        yield made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.csv"


def items(home: Home, who: str) -> list[str]:
    return [one.item for one in home.history.of(who)]


def test_oldest_first_ties_as_they_came_and_without_a_time_before_all(home: Home) -> None:
    home.people.add("ann")
    for item, when in (("c", 5), ("b", 2.5), ("d", 5), ("a", -3)):
        home.history.append("ann", item, when)
    assert home.history.of("ann") == [
        Interaction("a", -3, None),
        Interaction("b", 2.5, None),
        Interaction("c", 5, None),
        Interaction("d", 5, None),
    ]


def test_an_import_without_times_keeps_the_order_of_the_file_and_what_comes_now_is_last(home: Home, file: Path) -> None:
    file.write_text("item\nz\nb\nz\n")
    assert home.history.import_file(file, "ann")[:3] == (3, 0, 0)
    before = int(time.time())
    noted = home.history.append("ann", "a", rating=4)
    assert noted.time is not None
    assert before <= noted.time <= time.time()
    assert noted.rating == 4.0
    assert items(home, "ann") == ["z", "b", "z", "a"]


def test_a_file_of_several_people_numbers_them_as_they_appear(home: Home, file: Path) -> None:
    home.people.add("bob")
    file.write_text("user_id\titem_id\ttimestamp\trating\nzoe\tx\t3\t5\nbob\ty\t1\t2.5\nann\tx\t2\t1\nzoe\tw\t1\t1\n")
    done = home.history.import_file(file)
    assert done[:3] == (4, 0, 0)
    assert [(one.slot, one.name) for one in done.new] == [(1, "zoe"), (2, "ann")]
    assert home.history.of("zoe") == [Interaction("w", 1, 1.0), Interaction("x", 3, 5.0)]
    assert home.history.of("bob") == [Interaction("y", 1, 2.5)]


def test_only_some_of_a_file_in_the_order_given(home: Home, file: Path) -> None:
    file.write_text("user,item\n" + "".join(f"{user},i{user}\n" for user in (1, 2, 3, 4, 3)))
    done = home.history.import_file(file, only=["4", "3", "4"])
    assert done.added == 3
    assert done.left_out == 2
    assert [(one.slot, one.name) for one in home.people.all()] == [(0, "4"), (1, "3")]
    with pytest.raises(HomebodyError, match=r"There is no user in .* '9'"):
        home.history.import_file(file, only=["1", "9"])
    with pytest.raises(HomebodyError, match="either --person or --only"):
        home.history.import_file(file, "ann", only=["1"])
    assert len(home.people.all()) == 2


def test_a_file_that_has_grown_can_be_imported_again(home: Home, file: Path) -> None:
    file.write_text("item,time\na,1\na,1\nb,2\n")
    assert home.history.import_file(file, "ann")[:2] == (3, 0)
    assert home.history.import_file(file, "ann")[:2] == (0, 3)
    file.write_text("item,time\na,1\na,1\na,1\nb,2\nb,3\nb,2.0\n")
    assert home.history.import_file(file, "ann")[:2] == (3, 3)
    assert [tuple(one)[:2] for one in home.history.of("ann")] == [
        ("a", 1), ("a", 1), ("a", 1), ("b", 2), ("b", 2), ("b", 3)
    ]  # fmt: skip
    assert home.history.import_file(file, "bob")[:2] == (6, 0)  # what another did is no repeat


def test_a_file_of_one_user_may_be_another_name_for_a_person_and_one_of_several_may_not(home: Home, file: Path) -> None:
    file.write_text("user,item\n7,a\n7,b\n")
    home.history.import_file(file, "ann")
    assert items(home, "ann") == ["a", "b"]
    file.write_text("user,item\n7,a\n8,b\n")
    with pytest.raises(HomebodyError, match="holds 2 users in its column 'user', not bob alone"):
        home.history.import_file(file, "bob")
    assert [one.name for one in home.people.all()] == ["ann"]
    assert home.history.import_file(file, "bob", user_col="").added == 2


def test_columns_of_other_names_and_cells_that_hold_nothing(home: Home, file: Path) -> None:
    file.write_text("book;day;stars;user\nemma;2024-01-02;5;\nulysses;;;\ndubliners;2024-01-01T06:00:00.25;NA;\n")
    home.history.import_file(file, "ann", user_col="", item_col="book", time_col="day", rating_col="stars")
    assert home.history.of("ann") == [
        Interaction("ulysses", None, None),
        Interaction("dubliners", 1704088800.25, None),
        Interaction("emma", 1704153600, 5.0),
    ]
    home.history.import_file(file, "bob", user_col="", time_col="", rating_col="")
    assert home.history.of("bob")[0] == Interaction("emma", None, None)


def test_ids_are_texts_as_they_are_written(home: Home, file: Path) -> None:
    file.write_text('item\n007\n7\nNA\n" a,b "\n1.0\n"say ""hi"""\n')
    home.history.import_file(file, "ann")
    assert items(home, "ann") == ["007", "7", "NA", "a,b", "1.0", 'say "hi"']


def test_parquet_with_numbers_for_ids(home: Home, tmp_path: Path) -> None:
    table = {"user": [3, 3, 1], "item": [10.0, 2.0, 10.0], "time": [2, None, 1], "rating": [1, 2, 3]}
    pl.DataFrame(table).write_parquet(tmp_path / "rows.parquet")
    home.history.import_file(tmp_path / "rows.parquet")
    assert home.history.of("3") == [Interaction("2", None, 2.0), Interaction("10", 2, 1.0)]
    assert home.history.of("1") == [Interaction("10", 1, 3.0)]


LONG = "x" * 1001


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("item,time\n", "has no rows below its header"),
        ("thing\nemma\n", "Which column of .* is the item"),
        ("item,item_id\na,b\n", "several columns that could be the item"),
        ("item,time\nemma,1\nulysses,noon\n", "time column 'time' .* row 2 has 'noon'"),
        ("item,time\nemma,\nulysses,1\nada,\npersuasion,noon\n", r"row 4 has 'noon' \(1 such row"),
        ("item,time\nemma,1e300\n", "time column"),
        (f"item,time\nemma,0.5\nulysses,{2**62 + 1000}\n", "times of at most 4611686018427387904, but row 2"),
        ("item,rating\nemma,5\nulysses,inf\n", "rating column 'rating' .* row 2 has 'inf'"),
        ("item,rating\nemma,1e39\n", "rating column"),
        ("item,time\nemma,1\n,2\n", "item column 'item' .* row 2 has nothing"),
        (f"item\nemma\n{LONG}\n", "one line of 1 to 1,000 characters in every row, but row 2"),
        ('item\nemma\n"a\nb"\n', "one line of 1 to 1,000 characters in every row, but row 2"),
        ("item,time\nemma\nulysses,1,2,3\n", "Line 2 of .* has 1 cell, and the header has 2: correct it"),
    ],
)
def test_a_bad_file_is_refused_whole(home: Home, file: Path, text: str, said: str) -> None:
    before = home.store.changes
    file.write_text(text)
    with pytest.raises(HomebodyError, match=said):
        home.history.import_file(file, "ann")
    assert home.people.all() == []
    assert home.store.changes == before


def test_a_file_must_say_whose_it_is(home: Home, file: Path) -> None:
    file.write_text("item\nemma\n")
    with pytest.raises(HomebodyError, match="Whose history is"):
        home.history.import_file(file)
    file.write_text("user,item\n,emma\n")
    with pytest.raises(HomebodyError, match=r"user column 'user' .* row 1 has nothing"):
        home.history.import_file(file)
    with pytest.raises(HomebodyError, match="no column 'who'"):
        home.history.import_file(file, user_col="who")
    with pytest.raises(HomebodyError, match="cannot both be in the column 'item'"):
        home.history.import_file(file, user_col="item")
    with pytest.raises(HomebodyError, match="There is no file"):
        home.history.import_file(file.with_name("none.csv"), "ann")
    assert home.people.all() == []


@pytest.mark.parametrize(
    ("item", "when", "rating", "said"),
    [
        ("", 1, None, "An item id must be one line of 1 to 1,000 characters, not ''"),
        (LONG, 1, None, "An item id must be"),
        ("a\x00b", 1, None, "An item id must be"),
        ("\ud800", 1, None, "An item id must be"),
        (7, 1, None, "An item id must be"),
        ("emma", "noon", None, "A time must be a finite number, not 'noon'"),
        ("emma", math.nan, None, "A time must be"),
        ("emma", math.inf, None, "A time must be"),
        ("emma", 2**62 + 1, None, "A time must be"),
        ("emma", 10**400, None, "A time must be"),
        ("emma", True, None, "A time must be"),
        ("emma", 1, math.nan, "A rating must be"),
        ("emma", 1, 1e39, "A rating must be"),
        ("emma", 1, "good", "A rating must be"),
    ],
)
def test_nonsense_is_not_noted(home: Home, item: Any, when: Any, rating: Any, said: str) -> None:
    home.people.add("ann")
    with pytest.raises(HomebodyError, match=said):
        home.history.append("ann", item, when, rating)
    assert home.history.of("ann") == []


def test_now_is_not_put_among_times_of_another_clock(home: Home) -> None:
    home.people.add("ann")
    home.history.append("ann", "emma", time.time() * 1000)
    with pytest.raises(HomebodyError, match="not in the past as seconds since 1970"):
        home.history.append("ann", "ulysses")
    assert items(home, "ann") == ["emma"]


def test_numbers_of_numpy_are_numbers(home: Home) -> None:
    home.people.add("ann")
    home.history.append("ann", "emma", np.int64(2**60 + 1), np.float32(2.5))  # type: ignore[arg-type]
    assert home.history.of("ann") == [Interaction("emma", 2**60 + 1, 2.5)]


def test_deleting(home: Home) -> None:
    for name in ("ann", "bob"):
        home.people.add(name)
        for item, when in (("emma", 1), ("ulysses", 2), ("emma", 3), ("ulysses", 4)):
            home.history.append(name, item, when)
    assert home.history.delete("ann", "emma", before=3) == 1
    assert home.history.of("ann")[1].time == 3
    assert home.history.delete("ann", "emma") == 1
    assert home.history.delete("ann", "persuasion") == 0
    assert home.history.delete("ann", all=True, before=4) == 1
    assert home.history.of("ann") == [Interaction("ulysses", 4, None)]
    assert home.history.delete("ann", all=True) == 1
    assert home.history.of("ann") == []
    assert len(home.history.of("bob")) == 4
    for wrong in ({}, {"item": "emma", "all": True}, {"before": 3}):
        with pytest.raises(HomebodyError, match="either an item, or --all"):
            home.history.delete("bob", **wrong)  # type: ignore[arg-type]
    with pytest.raises(HomebodyError, match="A time must be"):
        home.history.delete("bob", all=True, before=math.nan)
    assert len(home.history.of("bob")) == 4


def test_what_has_no_time_is_older_than_nothing(home: Home, file: Path) -> None:
    file.write_text("item,time\nemma,\nulysses,1\n")
    home.history.import_file(file, "ann")
    assert home.history.delete("ann", all=True, before=10) == 1
    assert items(home, "ann") == ["emma"]


def test_what_is_deleted_is_gone_from_the_files(home: Home) -> None:
    home.people.add("ann")
    for number in range(200):
        home.history.append("ann", f"secret{number}", number)
    home.history.delete("ann", "secret7")
    left = b"".join(one.read_bytes() for one in home.path.rglob("*") if one.is_file())
    assert b"secret7\x07" not in left
    assert b"secret8" in left
    home.history.delete("ann", all=True)
    assert b"secret" not in b"".join(one.read_bytes() for one in home.path.rglob("*") if one.is_file())


def test_an_export_is_whole_or_not_there(home: Home, file: Path) -> None:
    home.people.add("ann")
    home.history.append("ann", "emma", 1, 5)
    home.people.add("bob")
    home.history.append("bob", "a,b", 2.5)
    assert home.history.export(file) == 2
    assert file.read_text() == 'user,item,time,rating\nann,emma,1,5.0\nbob,"a,b",2.5,\n'
    assert home.history.export(file, "bob") == 1
    assert file.read_text() == 'user,item,time,rating\nbob,"a,b",2.5,\n'
    with pytest.raises(HomebodyError, match="no person 'zoe'"):
        home.history.export(file, "zoe")
    with pytest.raises(HomebodyError, match=r"none/mine\.csv cannot be written: No such file"):
        home.history.export(file.parent / "none" / "mine.csv")
    assert sorted(one.name for one in file.parent.iterdir()) == ["device", "rows.csv"]
    assert len(file.read_text().splitlines()) == 2


texts = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=20).filter(
    lambda text: text.strip() == text
)
whens = st.one_of(
    st.none(),
    st.integers(-(2**62), 2**62),
    st.floats(-(2.0**62), 2.0**62, allow_subnormal=False).filter(lambda value: not value.is_integer()),
)
stars = st.one_of(st.none(), st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False))
rows = st.lists(st.tuples(st.sampled_from("pqr"), texts, whens, stars), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@example(names=["0", "1", "00"], rows=[("p", "0", 2**62 - 1, None), ("p", "0", 0.5, None)])
@given(names=st.lists(texts, min_size=3, max_size=3, unique=True), rows=rows)
def test_an_export_imported_elsewhere_is_the_same_home(
    names: list[str], rows: list[tuple[str, str, int | float | None, float | None]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "all.csv")
        with Home.create(Path(folder, "one"), server="127.0.0.1:9092") as one:
            for name in names:
                one.people.add(name)
            for who, item, when, rating in rows:
                if when is None:
                    # Only files leave times out.
                    Path(folder, "x.csv").write_text('item,time,rating\n"' + item.replace('"', '""') + '",,\n')
                    one.history.import_file(Path(folder, "x.csv"), names["pqr".index(who)])
                else:
                    one.history.append(names["pqr".index(who)], item, when, rating)
            count = one.history.export(file)
            before = {name: one.history.of(name) for name in names if one.history.of(name)}
        with Home.create(Path(folder, "two"), server="127.0.0.1:9092") as two:
            assert two.history.import_file(file)[:3] == (count, 0, 0)
            assert {one.name: two.history.of(one) for one in two.people.all()} == before
            assert two.history.import_file(file)[:3] == (0, count, 0)


def test_a_population_is_what_the_loader_makes_of_the_same_file(home: Home, file: Path) -> None:
    """Ties in time included, of which there are many."""
    draw = np.random.default_rng(3)
    ranges = {"user": 12, "item": 40, "time": 15, "rating": 5}
    pl.DataFrame({name: draw.integers(0, most, 400) for name, most in ranges.items()}).write_csv(file)
    wanted = load(file)
    assert wanted.user_ids is not None
    assert wanted.item_ids is not None
    home.history.import_file(file, only=[str(name) for name in wanted.user_ids])
    home.items.add(0, [(str(item), "") for item in wanted.item_ids])
    found = home.history.population()
    assert found.notes == ()
    for name in ("indptr", "items", "times", "ratings"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
        assert getattr(found, name).dtype == getattr(wanted, name).dtype
    assert [found.item_id(n) for n in range(found.n_items)] == [wanted.item_id(n) for n in range(wanted.n_items)]


@pytest.mark.parametrize("text", ["noon", "", "2024-13-01", "nan", "inf"])
def test_a_time_that_is_none(text: str) -> None:
    with pytest.raises(HomebodyError, match="A time must be"):
        read_time(text)

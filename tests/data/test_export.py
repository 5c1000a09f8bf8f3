from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from homebody.cli import app
from homebody.data import Population, load
from homebody.data.export import chosen, export
from homebody.errors import HomebodyError

THREE = Population(
    "three",
    np.array([0, 2, 2, 5]),
    np.array([1, 0, 2, 1, 1], dtype=np.int32),
    n_items=3,
    times=np.array([5, 6, 7, 8, 9]),
    ratings=np.array([1, 2.5, 3, 4, 5], dtype=np.float32),
    user_ids=pl.Series(["ann", "bob", 'c"d, e']),
    item_ids=pl.Series([10, 20, 30]),
)


def test_some_users_as_the_source_calls_them_in_the_order_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    assert export(THREE, file, np.array([2, 0])) == 5
    assert file.read_text().splitlines() == [
        "user,item,time,rating",
        '"c""d, e",30,7,3.0',
        '"c""d, e",20,8,4.0',
        '"c""d, e",20,9,5.0',
        "ann,20,5,1.0",
        "ann,10,6,2.5",
    ]
    assert file.stat().st_mode & 0o777 == 0o600


def test_columns_that_a_population_lacks_are_left_out(tmp_path: Path) -> None:
    bare = Population("bare", THREE.indptr, THREE.items, 3)
    assert export(bare, tmp_path / "all.csv") == 5
    assert (tmp_path / "all.csv").read_text().splitlines() == ["user,item", "0,1", "0,0", "2,2", "2,1", "2,1"]


def test_what_is_written_can_be_loaded_again(tmp_path: Path) -> None:
    people = load("synthetic:users=40,items=25,mean=6")
    export(people, tmp_path / "all.csv")
    again = load(str(tmp_path / "all.csv"))
    assert again.n_interactions == people.n_interactions
    for user in range(people.n_users):
        mine = [again.item_id(int(item)) for item in again.history(again.user(str(user)))]
        assert mine == [people.item_id(int(item)) for item in people.history(user)]


@given(st.lists(st.integers(0, 30), min_size=1, unique=True))
def test_users_by_number_and_by_range(numbers: list[int]) -> None:
    assert chosen(",".join(map(str, numbers)), 31).tolist() == numbers
    low, high = min(numbers), max(numbers)
    assert chosen(f" {low} - {high} ", 31).tolist() == list(range(low, high + 1))


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2", "1.5", "0-2-4", "9" * 20])
def test_senseless_users_are_refused(text: str) -> None:
    with pytest.raises(HomebodyError, match="by number"):
        chosen(text, 10)


def test_users_that_are_not_there_or_come_twice_are_refused() -> None:
    with pytest.raises(HomebodyError, match="There is no user 10: users are numbered 0 to 9"):
        chosen("0-10", 10)
    with pytest.raises(HomebodyError, match="twice"):
        chosen("0-4,3", 10)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "old.csv"
    file.write_text("as it was")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(HomebodyError, match=r"The disk takes no more of .*old\.csv \(No space left on device\)"):
        export(THREE, file)
    assert [one.name for one in tmp_path.iterdir()] == ["old.csv"]
    assert file.read_text() == "as it was"


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    command = ["data", "export", "synthetic:users=9,items=9,mean=5", str(file), "--users", "3-5"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0
    table = pl.read_csv(file)
    assert set(table["user"]) == {3, 4, 5}
    assert done.stdout == f"{len(table)} interactions of 3 users are in {file}.\n"


def test_an_odd_file_becomes_a_plain_one(tmp_path: Path) -> None:
    odd, plain = tmp_path / "odd.txt", tmp_path / "plain.csv"
    odd.write_bytes("josé^emma^31/01/24\nann^emma^\n".encode("latin-1"))
    words = ["data", "export", str(odd), str(plain), "--separator", "^", "--encoding", "latin-1", "--no-header"]
    done = CliRunner().invoke(app, [*words, "--time-col", "3", "--drop-missing"])
    assert done.exit_code == 0, done.output
    assert plain.read_text(encoding="utf-8") == "user,item,time\njosé,emma,1706659200\n"

"""Spreadsheets, databases and packed files, and the options that say how a file is written."""

from __future__ import annotations

import datetime as dt
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homebody.data import delimited, population
from homebody.data.delimited import read_text
from homebody.data.origins import Layout
from homebody.data.population import Numbered, _ascending
from homebody.data.sources import load
from homebody.errors import HomebodyError
from homebody.recipe import Recipe
from homebody.run import population_of

LOANS = pl.DataFrame(
    {
        "customer": [7, 7, 8, None],
        "title": ["Emma", "Dracula", "Emma", "Faust"],
        "day": [dt.date(2024, 1, day) for day in (2, 1, 3, 4)],
    }
)
WHERE = {"user_col": "customer", "item_col": "title", "drop_missing": True}


def histories(people: Any) -> dict[object, list[object]]:
    return {name: people.item_ids.gather(people.history(at)).to_list() for at, name in enumerate(people.user_ids)}


class TestSheets:
    @pytest.fixture
    def sheet(self, tmp_path: Path) -> Path:
        pytest.importorskip("fastexcel", reason="no fastexcel: the extra `files` is not installed")
        writer = pytest.importorskip("xlsxwriter", reason="no xlsxwriter: the extra `dev` is not installed")
        file = tmp_path / "loans.xlsx"
        with writer.Workbook(file) as book:
            LOANS.write_excel(book, worksheet="loans")
            LOANS.write_excel(book, worksheet="older")
        return file

    def test_the_first_sheet_is_read(self, sheet: Path) -> None:
        people = load(sheet, **WHERE)
        assert histories(people) == {7: ["Dracula", "Emma"], 8: ["Emma"]}
        notes = "\n".join(people.notes)
        assert "read the sheet 'loans', the first of 2" in notes
        assert "left out 1 row, 1 without a user (--drop-missing)" in notes

    def test_a_sheet_with_the_ending_of_a_text(self, sheet: Path) -> None:
        named = sheet.rename(sheet.with_suffix(".csv"))
        assert load(named, **WHERE).n_interactions == 3

    def test_half_a_sheet(self, sheet: Path) -> None:
        sheet.write_bytes(sheet.read_bytes()[:2000])
        with pytest.raises(HomebodyError, match=r"loans\.xlsx cannot be read as a table; it may be damaged"):
            load(sheet)

    def test_what_reads_sheets_may_be_absent(self, sheet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "fastexcel", None)
        with pytest.raises(HomebodyError, match=r"is a spreadsheet: install .*'\.\[files\]'.*, or save it as CSV"):
            load(sheet)


class TestZstandard:
    def test_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        packer = pytest.importorskip("zstandard", reason="no zstandard: the extra `files` is not installed")
        file = tmp_path / "loans.csv.zst"
        whole = packer.compress(LOANS.write_csv().encode())
        file.write_bytes(whole)
        assert load(file, **WHERE).n_interactions == 3
        file.write_bytes(whole[:30])
        with pytest.raises(HomebodyError, match=r"loans\.csv\.zst"):
            load(file, **WHERE)
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(HomebodyError, match="packed by zstandard: install what reads it"):
            load(file)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    file = tmp_path / "shop.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE loans (customer, title TEXT, day TEXT)")
        database.executemany("INSERT INTO loans VALUES (?, ?, ?)", [(a, b, str(c)) for a, b, c in LOANS.iter_rows()])
    database.close()
    return file


class TestDatabases:
    def test_the_only_table_of_sqlite(self, shop: Path) -> None:
        people = load(f"sqlite:///{shop}", **WHERE)
        assert people.name == "shop"
        assert histories(people) == {7: ["Dracula", "Emma"], 8: ["Emma"]}
        assert people.notes[0].startswith("shop.db: took day for times")

    def test_a_query(self, shop: Path) -> None:
        query = "SELECT title AS item, customer || 'x' AS user FROM loans WHERE customer IS NOT NULL"
        assert histories(load(f"sqlite:///{shop}", query=query)) == {"7x": ["Emma", "Dracula"], "8x": ["Emma"]}

    def test_a_column_of_several_types(self, shop: Path) -> None:
        with sqlite3.connect(shop) as database:
            database.execute("INSERT INTO loans VALUES ('nine', 'Emma', '2024-02-01')")
        database.close()
        assert set(histories(load(f"sqlite:///{shop}", **WHERE))) == {"7", "8", "nine"}

    @pytest.mark.parametrize(
        ("query", "sentence"),
        [
            ("SELECT * FROM lones", "does not answer: no such table: lones"),
            ("DELETE FROM loans", "does not answer: attempt to write a readonly database"),
            ("SELECT 1 AS user, 2 AS user", "two columns called 'user'"),
            ("SELECT title AS item, 1 AS user FROM loans WHERE 0", "has no rows"),
        ],
    )
    def test_queries_that_are_refused(self, shop: Path, query: str, sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence) as caught:
            load(f"sqlite:///{shop}", query=query)
        assert "\n" not in str(caught.value)
        assert load(f"sqlite:///{shop}", **WHERE).n_interactions == 3

    def test_addresses_that_are_refused(self, shop: Path) -> None:
        with sqlite3.connect(shop) as database:
            database.execute("CREATE TABLE books (title)")
        database.close()
        for source, sentence in {
            f"sqlite:///{shop}": r"Give --query 'SELECT .*', or the like; its tables are books, loans\.",
            "sqlite:///no/such.db": r"There is no file no/such\.db",
            str(shop): "is an SQLite database: give its address, sqlite:///",
            "mysql://ann@host/shop": "nothing that reads mysql://",
            "postgresql://ann:secret@host/shop": "has a password, which would be kept with the run",
        }.items():
            with pytest.raises(HomebodyError, match=sentence) as caught:
                load(source)
            assert "secret" not in str(caught.value)

    def test_a_run_on_a_database_is_kept_as_a_recipe(self, shop: Path) -> None:
        query = "SELECT * FROM loans WHERE customer > 0"
        recipe = Recipe("popularity", f"sqlite:///{shop}", columns={"item_col": "title"}, query=query)
        again = Recipe.from_toml(recipe.to_toml())
        assert again == recipe
        assert population_of(again).n_interactions == 3

    @pytest.mark.processes
    def test_postgresql(self, new_postgresql: str, monkeypatch: pytest.MonkeyPatch) -> None:
        psycopg = pytest.importorskip("psycopg", reason="no psycopg: the extra `files` is not installed")
        with psycopg.connect(new_postgresql, autocommit=True) as database:
            database.execute("CREATE TABLE loans (customer bigint, title text, day date)")
            for row in LOANS.iter_rows():
                database.execute("INSERT INTO loans VALUES (%s, %s, %s)", row)
        query = "SELECT customer, title, day FROM loans"
        assert histories(load(new_postgresql, query=query, **WHERE)) == {7: ["Dracula", "Emma"], 8: ["Emma"]}
        with pytest.raises(HomebodyError, match="read-only transaction"):
            load(new_postgresql, query="DELETE FROM loans RETURNING customer, title")
        with pytest.raises(HomebodyError, match=r"What of .* are the interactions"):
            load(new_postgresql)
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(HomebodyError, match=r"PostgreSQL database: install .*'\.\[files\]'"):
            load(new_postgresql, query=query)


def test_options_of_a_recipe_reach_the_file(tmp_path: Path) -> None:
    file = tmp_path / "old.txt"
    file.write_bytes("josé^emma^31/01/24\nann^emma^\nann^faust^01/02/24\n".encode("latin-1"))
    recipe = Recipe(
        "popularity",
        str(file),
        columns={"time_col": "3"},
        separator="^",
        encoding="latin-1",
        no_header=True,
        drop_missing=True,
        time_format="%d/%m/%y",
    )
    people = population_of(Recipe.from_toml(recipe.to_toml()))
    assert histories(people) == {"ann": ["faust"], "josé": ["emma"]}
    assert recipe.options() == [
        *("--data", str(file), "--time-col", "3", "--time-format", "%d/%m/%y", "--separator", "^"),
        *("--encoding", "latin-1", "--no-header", "--drop-missing"),
    ]
    with pytest.raises(HomebodyError, match="no encoding 'klingon'"):
        Recipe("popularity", "mine.csv", encoding="klingon").check()
    with pytest.raises(HomebodyError, match="no_header must be true or false"):
        Recipe("popularity", "mine.csv", no_header="yes").check()  # type: ignore[arg-type]


def test_an_option_for_files_with_a_named_dataset_is_refused() -> None:
    for options in ({"no_header": True}, {"time_format": "%Y"}, {"query": "SELECT 1"}, {"drop_missing": True}):
        name = next(iter(options)).replace("_", "-")
        with pytest.raises(HomebodyError, match=f"--{name} is for a file of your own"):
            load("synthetic", **options)  # type: ignore[arg-type]


CELL = st.text(st.sampled_from('ab1,;"\n\t é'), max_size=4)


class TestParts:
    """A file that is read in many small parts is the same as one that is read whole."""

    @settings(deadline=None, max_examples=60)
    @given(table=st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=12), part=st.integers(1, 40))
    def test_any_table_that_a_csv_writer_wrote(
        self, table: list[tuple[str, str, str]], part: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        file = tmp_path_factory.mktemp("parts") / "mine.csv"
        rows = [("a", "b", "c"), *table]
        quoted = "".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) + "\n" for row in rows)
        file.write_text(quoted, encoding="utf-8", newline="")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(delimited, "PART", part)
            found = read_text(file, None, Layout()).rows
        written = [tuple(str(cell or "") for cell in row) for row in found.rows()]
        assert written == table

    def test_a_file_of_many_parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "mine.csv"
        file.write_bytes("\ufeffuser,item\n".encode() + b"".join(b"u%d,%d\n" % (n % 50, n) for n in range(5000)))
        whole = histories(load(file))
        monkeypatch.setattr(delimited, "PART", 1000)
        assert histories(load(file)) == whole
        file.write_bytes(file.read_bytes() + b"u1,1,2\n")
        with pytest.raises(HomebodyError, match="Line 5,002 of"):
            load(file)
        file.write_bytes(file.read_bytes().replace(b"u1,1,2\n", b"\xff,1\n"))
        with pytest.raises(HomebodyError, match="line 5,002 has the byte 0xFF"):
            load(file)

    def test_a_column_that_stops_to_be_numbers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "mine.csv"
        file.write_text("user,item\n" + "".join(f"{n},{n}\n" for n in range(500)) + "x,007\n")
        monkeypatch.setattr(delimited, "PART", 100)
        table = read_text(file, None, Layout()).rows
        assert table["user"].to_list() == [*map(str, range(500)), "x"]
        assert table["item"].to_list() == [*map(str, range(500)), "007"]


class TestNumbers:
    @given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), max_size=30))
    def test_the_order_is_stable_whatever_the_numbers(self, values: list[int]) -> None:
        array = np.array(values, dtype=np.int64)
        assert _ascending(array).tolist() == sorted(range(len(values)), key=lambda place: values[place])

    @given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3), min_size=1, max_size=30))
    def test_numbers_and_texts_are_numbered_in_their_order(self, values: list[int]) -> None:
        numbers = Numbered.of(pl.Series(values, dtype=pl.Int64))
        assert numbers.ids.to_list() == sorted(set(values))
        assert numbers.ids.gather(numbers.rows).to_list() == values
        texts = Numbered.of(pl.Series([str(value) for value in values]))
        assert texts.ids.to_list() == sorted({str(value) for value in values})
        assert texts.ids.gather(texts.rows).to_list() == [str(value) for value in values]

    @pytest.mark.parametrize("hashes", [[7, 7, 7, 7, 7], [1 << 60, 2 << 60, 3 << 60, 1 << 60, 2 << 60]])
    def test_texts_of_one_hash_are_still_two(self, hashes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where only the last row of several parts shows it."""
        values = ["a", "c", "b", "a", "b"]
        monkeypatch.setattr(population, "AT_ONCE", 2)
        monkeypatch.setattr(pl.Series, "hash", lambda self: pl.Series(hashes, dtype=pl.UInt64))
        numbered = Numbered.of(pl.Series(values))
        assert numbered.ids.to_list() == ["a", "b", "c"]
        assert numbered.rows.tolist() == [0, 2, 1, 0, 1]

    def test_categories_are_numbered_in_the_order_of_their_texts(self) -> None:
        for kind in (pl.Categorical, pl.Enum(["z", "b", "a"])):
            numbered = Numbered.of(pl.Series(["b", "a", "b"], dtype=kind))
            assert numbered.ids.to_list() == ["a", "b"]
            assert numbered.rows.tolist() == [1, 0, 1]

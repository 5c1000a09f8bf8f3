"""Files as people have them: each is read whole, or refused in one sentence that names what to do."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from homebody.data.sources import load
from homebody.errors import HomebodyError

PLAIN = "user,item,time,rating\n" + "".join(f"u{n % 7},i{n % 5},{1_700_000_000 + n},{n % 5 + 1}\n" for n in range(40))
"""40 rows."""


def rows(*lines: str, header: str = "user,item") -> bytes:
    return "\n".join([header, *lines, ""]).encode()


def dated(*forms: str) -> bytes:
    """A row a date: of one person, newest first, so that only an order by time turns them round."""
    return rows(*(f'ann,{len(forms) - n},"{form}"' for n, form in enumerate(reversed(forms))), header="user,item,date")


@dataclass
class Odd:
    """A file, and what is expected of it."""

    content: bytes
    rows: int = 0
    """Rows that it has; all are read, or counted as left out. 0: it is refused."""
    says: str = ""
    """What the refusal, or a note, says."""
    name: str = "mine.csv"
    options: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0
    check: Callable[[Any], bool] = lambda people: True


def ordered(people: Any) -> bool:
    """Whether the history is in the order of the dates."""
    history: list[int] = people.item_ids.gather(people.history(0)).to_list()
    return people.times is not None and history == sorted(history)


def zipped(**members: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as pack:
        for name, content in members.items():
            pack.writestr(name.replace("_", "."), content)
    return packed.getvalue()


DAYS = {
    "iso": ("2024-01-31", "2024-02-01", "2024-02-11"),
    "iso-moment": ("2024-01-31T23:00:00Z", "2024-02-01T01:30:00+01:00", "2024-02-01T01:00:00.5Z"),
    "iso-space-utc": ("2024-01-31 23:00:00 UTC", "2024-02-01 00:00:00 UTC", "2024-02-01 10:00:00 UTC"),
    "iso-log": ("2024-01-31 23:00:00,250", "2024-01-31 23:00:00,750", "2024-02-01 10:00:00,000"),
    "slashes": ("2024/1/31", "2024/2/1", "2024/2/11"),
    "compact": ("20240131", "20240201", "20240211"),
    "points": ("31.01.2024", "01.02.2024", "11.02.2024 10:30"),
    "day-first": ("31/01/2024", "01/02/2024", "11/02/2024"),
    "day-first-short": ("31/1/24", "1/2/24", "11/2/24"),
    "month-first": ("01/31/2024", "02/01/2024", "02/11/2024"),
    "clock-of-12": ("1/31/2024 11:00 PM", "2/1/2024 1:00 AM", "2/1/2024 1:00 PM"),
    "named-month": ("31 Jan 2024", "1 February 2024", "11-Feb-2024"),
    "american": ("Jan 31, 2024", "February 1st, 2024", "Feb 11, 2024"),
    "unix": ("Wed Jan 31 23:00:00 2024", "Thu Feb  1 00:00:00 2024", "Sun Feb 11 00:00:00 2024"),
    "twitter": ("Wed Jan 31 23:00:00 +0000 2024", "Thu Feb 01 01:30:00 +0100 2024", "Sun Feb 11 00:00:00 +0000 2024"),
    "mail": ("Wed, 31 Jan 2024 23:00:00 +0000", "Thu, 01 Feb 2024 00:00:00 GMT", "Sun, 11 Feb 2024 00:00:00 +0000"),
    "apache": ("31/Jan/2024:23:00:00 +0000", "01/Feb/2024:00:00:00 +0000", "11/Feb/2024:00:00:00 +0000"),
    "amazon": ("01 31, 2024", "02 1, 2024", "02 11, 2024"),
    "seconds": ("1706742000", "1706745600", "1707609600"),
    "fractions": ("1706742000.25", "1706742000.75", "1707609600.0"),
    "milliseconds": ("1706742000250", "1706742000750", "1707609600000"),
}

FILES: dict[str, Odd] = {
    # encodings
    "utf-8-bom": Odd(b"\xef\xbb\xbf" + PLAIN.encode(), 40),
    "utf-16-bom": Odd(PLAIN.encode("utf-16"), 40),
    "utf-16-be-bom": Odd(b"\xfe\xff" + PLAIN.encode("utf-16-be"), 40),
    "utf-32-bom": Odd(PLAIN.encode("utf-32"), 40),
    "utf-16-without-bom": Odd(PLAIN.encode("utf-16-le"), says="--encoding utf-16-le"),
    "utf-16-named": Odd(PLAIN.encode("utf-16-le"), 40, options={"encoding": "utf-16-le"}),
    "latin-1": Odd(rows("josé,emma", "ann,emma").decode().encode("latin-1"), says="line 2.* --encoding latin-1"),
    "latin-1-named": Odd(
        rows("josé,emma", "ann,emma").decode().encode("latin-1"),
        2,
        options={"encoding": "latin-1"},
        check=lambda people: "josé" in people.user_ids.to_list(),
    ),
    "utf-8-named-latin-1": Odd(
        "user,item\njosé,emma\n".encode(), 1, "looks like UTF-8, and is read as", options={"encoding": "latin-1"}
    ),
    "windows": Odd(rows("ann,5€", "bob,6€").decode().encode("cp1252"), says="--encoding cp1252"),
    "windows-named": Odd(rows("ann,5€", "bob,6€").decode().encode("cp1252"), 2, options={"encoding": "cp1252"}),
    "japanese": Odd(rows("花子,本", "太郎,本").decode().encode("shift_jis"), 2, options={"encoding": "shift_jis"}),
    "wrong-encoding": Odd(
        "user,item\nß,1\n".encode(), says="is not ascii text: line 2 .*--encoding", options={"encoding": "ascii"}
    ),
    "unknown-encoding": Odd(PLAIN.encode(), says="no encoding 'klingon'", options={"encoding": "klingon"}),
    # separators
    "tabs": Odd(PLAIN.replace(",", "\t").encode(), 40),
    "semicolons": Odd(PLAIN.replace(",", ";").encode(), 40),
    "pipes": Odd(PLAIN.replace(",", "|").encode(), 40, r"took \| for what stands between values"),
    "double-colons": Odd(PLAIN.replace(",", "::").encode(), 40, "took :: for what stands between values"),
    "carets": Odd(PLAIN.replace(",", "^").encode(), says=r"--separator \^"),
    "wrong-separator": Odd(PLAIN.replace(",", "\t").encode(), says="--separator tab", options={"separator": ";"}),
    "carets-named": Odd(PLAIN.replace(",", "^").encode(), 40, options={"separator": "^"}),
    "spaces": Odd(PLAIN.replace(",", " ").encode(), says="--separator space"),
    "spaces-named": Odd(PLAIN.replace(",", " ").encode(), 40, options={"separator": "space"}),
    "control-a": Odd(PLAIN.replace(",", "\x01").encode(), 40, options={"separator": "\\x01"}),
    "hash-hash": Odd(PLAIN.replace(",", "##").encode(), 40, options={"separator": "##"}),
    "no-separator": Odd(PLAIN.encode(), says="A separator is", options={"separator": "\n"}),
    # ends of lines
    "windows-lines": Odd(PLAIN.replace("\n", "\r\n").encode(), 40),
    "old-mac-lines": Odd(PLAIN.replace("\n", "\r").encode(), 40),
    "no-last-newline": Odd(PLAIN.encode().rstrip(), 40),
    "blank-lines": Odd(PLAIN.replace("\n", "\n\n").encode() + b"\r\n\n", 40),
    # headers
    "no-header": Odd(b"196,242,3,881250949\n186,302,3,891717742\n", says="--no-header"),
    "no-header-texts": Odd(b"ann,emma,2024-01-31\nbob,emma,2024-02-01\n", says="--no-header"),
    "no-header-named": Odd(
        b"196,242,3,881250949\n186,302,3,891717742\n",
        2,
        "took 1 for users, 2 for items",
        options={"no_header": True},
    ),
    "no-header-movielens": Odd(
        b"1::1193::5::978300760\n1::661::3::978302109\n",
        2,
        "'4' looks like times: --time-col 4",
        options={"no_header": True, "rating_col": "3"},
        name="ratings.dat",
    ),
    "no-header-times-second": Odd(
        b"1,2014-04-07T10:51:09.277Z,214\n1,2014-04-07T10:54:09.868Z,215\n",
        says="Column 2 looks like times: name the item's with --item-col",
        options={"no_header": True},
    ),
    "no-header-columns": Odd(
        b"5,ann,emma\n4,bob,emma\n", 2, options={"no_header": True, "user_col": "2", "item_col": "3", "rating_col": "1"}
    ),
    "spaces-in-header": Odd(rows("ann, emma", "bob, emma", header="user, item"), 2),
    "index-column": Odd(rows("0,ann,emma", "1,bob,emma", header=",user,item"), 2, "without a name"),
    "duplicated-columns": Odd(
        rows("1,2,3", header="user,item,item"), says="two columns called 'item', the columns 2 and 3"
    ),
    "row-names-of-r": Odd(rows('"1","ann","emma"', header='"user","item"'), says="Line 2 .*3 cells, .*header has 2"),
    "other-languages": Odd(rows("1,2", header="utilisateur,objet"), says="--user-col"),
    # values
    "padded-ids": Odd(rows("007,1", "7,1", "07,1"), 3, check=lambda people: people.n_users == 3),
    "float-ids": Odd(rows("1.0,10.0", "2.0,10.0"), 2, check=lambda people: people.user_ids.to_list() == [1, 2]),
    "huge-ids": Odd(
        rows("123456789012345678901234567890,1", "123456789012345678901234567891,1"),
        2,
        check=lambda people: people.n_users == 2,
    ),
    "64-bit-ids": Odd(
        rows("9223372036854775807,1", "9223372036854775806,1", "-9223372036854775808,2"),
        3,
        check=lambda people: people.n_users == 3,
    ),
    "text-among-numbers": Odd(rows("1,1", "x2,1"), 2, check=lambda people: people.user_ids.to_list() == ["1", "x2"]),
    "one-user": Odd(rows("ann,1", "ann,2", "ann,3"), 3, check=lambda people: people.n_users == 1),
    "one-item": Odd(rows("ann,1", "bob,1", "cat,1"), 3, check=lambda people: people.n_items == 1),
    "one-row": Odd(rows("ann,1"), 1),
    "repeated-rows": Odd(rows("ann,1", "ann,1", "ann,1"), 3),
    "decimal-comma": Odd(
        rows("ann;1;4,5", "bob;1;3", header="user;item;rating"),
        2,
        check=lambda people: people.ratings.tolist() == [4.5, 3],
    ),
    "thousands": Odd(rows("ann;1;4,500", "bob;1;3", header="user;item;rating"), says="rating.* row 1 has '4,500'"),
    "nothing": Odd(b"", says="is empty"),
    "only-header": Odd(b"user,item\n", says="no rows"),
    "only-blank-lines": Odd(b"\n\r\n\n", says="is empty"),
    "missing-user": Odd(rows("ann,1", ",2", "NaN,3", "bob,4"), says="row 2 has nothing .*--drop-missing"),
    "missing-user-dropped": Odd(
        rows("ann,1", ",2", "NaN,3", "bob,"),
        4,
        "left out 3 rows, 2 without a user, 1 without an item",
        options={"drop_missing": True},
        dropped=3,
    ),
    "missing-time": Odd(
        rows("ann,1,5", "ann,2,", header="user,item,time"), says="time.* row 2 has nothing .*--drop-missing"
    ),
    "missing-rating-dropped": Odd(
        rows("ann,1,5", "ann,2,", "ann,3,null", header="user,item,rating"),
        3,
        "left out 2 rows, 2 without a rating",
        options={"drop_missing": True},
        dropped=2,
    ),
    "nothing-is-complete": Odd(rows(",1", "ann,"), says="No row .* is complete", options={"drop_missing": True}),
    "some-text-for-a-time": Odd(rows("ann,1,5", "ann,2,soon", header="user,item,time"), says="'soon'.*--time-format"),
    # rows
    "short-row": Odd(
        rows("ann,1,5", "bob,1", header="user,item,rating"), says="Line 3 .* 2 cells, .* header has 3: .*--drop"
    ),
    "long-row": Odd(rows("ann,1", "bob,1,5", "cat,1"), says="Line 3 .* 3 cells, .* header has 2: .*--drop-missing"),
    "ragged-rows-dropped": Odd(
        rows("ann,1", "bob,1,5", "cat", "dan,1"),
        4,
        "left out 2 rows with more or fewer cells than the header",
        options={"drop_missing": True},
        dropped=2,
    ),
    "trailing-separator": Odd(rows("ann,1,", "bob,1,", header="user,item,"), 2, "without a name"),
    "comments-first": Odd(b"# made today\nuser,item\nann,1\n", says="Line 2 .* 2 cells, .*header has 1"),
    # quotation marks
    "quoted": Odd(rows('"ann","a, b"', '"bob","say ""hi"""', '"cat","two\nlines"'), 3),
    "quoted-header": Odd(rows('"ann","1"', header='"user","item"'), 1),
    "inches": Odd(
        rows('ann,5" disk', 'bob,6" disk'),
        2,
        "quotation marks inside values",
        check=lambda people: people.item_ids.to_list() == ['5" disk', '6" disk'] and people.n_users == 2,
    ),
    "one-inch": Odd(rows('ann,5" disk', "bob,tape"), 2, "quotation marks inside values"),
    "inches-among-quoted": Odd(
        rows('ann,5" disk', 'bob,"tape"'), 2, check=lambda people: set(people.item_ids.to_list()) == {'5" disk', "tape"}
    ),
    "inches-and-blank-lines": Odd(rows('ann,5" disk', "", 'bob,6" disk'), 2, "quotation marks inside values"),
    "inches-and-needed": Odd(rows('ann,5" disk', 'bob,"a, b"'), says="Line 2 .*quotation mark inside a value"),
    "open-quote": Odd(rows('ann,"emma', "bob,emma"), says="quotation mark that is not closed in line 2"),
    "space-before-quote": Odd(rows('ann, "emma"', 'bob, "emma"'), 2, check=lambda people: people.n_items == 1),
    "nul": Odd(b"user,item\nann,em\x00ma\n", says="Line 2 .*NUL byte.*--encoding"),
    "formula": Odd(rows("ann,'=1+1", "bob,'=1+1"), 2, check=lambda people: people.item_ids.to_list() == ["=1+1"]),
    # packed
    "gzip": Odd(gzip.compress(PLAIN.encode()), 40, name="mine.csv.gz"),
    "gzip-named-csv": Odd(gzip.compress(PLAIN.encode()), 40),
    "two-gzips": Odd(gzip.compress(PLAIN[:200].encode()) + gzip.compress(PLAIN[200:].encode()), 40, name="mine.csv.gz"),
    "half-a-gzip": Odd(gzip.compress(PLAIN.encode())[:90], says="may be damaged", name="mine.csv.gz"),
    "bzip2": Odd(bz2.compress(PLAIN.encode()), 40, name="mine.csv.bz2"),
    "xz": Odd(lzma.compress(PLAIN.encode()), 40, name="mine.csv.xz"),
    "half-an-xz": Odd(lzma.compress(PLAIN.encode())[:60], says="may be damaged", name="mine.csv.xz"),
    "zip": Odd(zipped(mine_csv=PLAIN), 40, "the only file in it", name="mine.zip"),
    "zip-named-csv": Odd(zipped(mine_csv=PLAIN), 40, "the only file in it"),
    "zip-of-two": Odd(
        zipped(mine_csv=PLAIN, other_csv=PLAIN), says="zip archive of 2 files: unpack it", name="mine.zip"
    ),
    "half-a-zip": Odd(zipped(mine_csv=PLAIN)[:100], says="may be damaged", name="mine.zip"),
    # other formats
    "json-lines": Odd(
        b"".join(json.dumps({"user": n % 3, "item": f"i{n}", "tags": ["x"]}).encode() + b"\n" for n in range(9)),
        9,
        name="mine.jsonl",
    ),
    "json-lines-packed": Odd(
        gzip.compress(b'{"user": 1, "item": 2}\n{"user": 1, "item": 3}\n'), 2, name="mine.jsonl.gz"
    ),
    "json-lines-broken": Odd(
        b'{"user": 1, "item": 2}\n{"user": 1, \n', says="Line 2 .* is no JSON object", name="a.jsonl"
    ),
    "json-lines-two-in-one": Odd(
        b'{"user": 1, "item": 2}{"user": 1, "item": 3}\n', says="Line 1 .* is no JSON object", name="a.jsonl"
    ),
    "json-lines-spread": Odd(b'{\n"user": 1,\n"item": 2\n}\n', says="Line 1 .* is no JSON object", name="a.jsonl"),
    "json-lines-nested": Odd(
        b'{"user": 1, "item": 2, "more": {"a": 1}}\n{"user": 1, "item": 3}\n', 2, "more", name="a.jsonl"
    ),
    "json-list": Odd(b'[{"user": 1, "item": 2}, {"user": 1, "item": 3}]', 2, name="mine.json"),
    "hdf5": Odd(b"\x89HDF\r\n\x1a\n" + bytes(100), says="HDF5 file.* save the table as Parquet or CSV", name="mine.h5"),
    "picture": Odd(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9, says="mine.csv is a PNG file, so it is no table"),
    "bytes": Odd(b"\x0a\xff\x00" + bytes(range(256)) * 9, says="mine.csv is no table: it has bytes that no text has"),
    "called-a-sheet": Odd(b"not excel", says="mine.xlsx is no table: it is called a spreadsheet", name="mine.xlsx"),
    "text-called-a-sheet": Odd(PLAIN.encode(), 40, name="mine.xls"),
    "other-language": Odd(
        rows("ann;1", header="Kunde;Artikel"), says="are the user and the item. .* with --user-col and --item-col;"
    ),
    "option-of-another-format": Odd(
        b'{"user": 1, "item": 2}\n', says="--separator is for text files", name="mine.jsonl", options={"separator": ";"}
    ),
    "query-of-a-file": Odd(PLAIN.encode(), says="--query asks a database", options={"query": "SELECT 1"}),
    # dates
    **{f"date-{form}": Odd(dated(*days), 3, check=ordered) for form, days in DAYS.items()},
    "date-mostly": Odd(
        dated("2024-02-01", "yesterday", "2024-02-02"), says="row 2 has 'yesterday'.*--time-col '' does without times"
    ),
    "date-hardly": Odd(
        dated("2024-02-01", "yesterday", "today"), 3, "date is not taken for times.*--time-col date insists"
    ),
    "date-of-no-use": Odd(
        dated("2024-02-01", "yesterday", "2024-02-02"), 3, "took user for users", options={"time_col": ""}
    ),
    "ratings-infinite": Odd(
        rows("ann,1,inf", "bob,1,4", header="user,item,stars"),
        says="row 1 has 'inf'.*--rating-col '' does without ratings",
    ),
    "date-either-way": Odd(
        dated("01/02/2024", "02/03/2024"), says="day or the month may come first.*--time-format '%d/%m/%Y'"
    ),
    "date-with-a-format": Odd(
        dated("01/02/2024", "02/01/2024"),
        2,
        options={"time_format": "%m/%d/%Y"},
        check=ordered,
    ),
    "date-with-a-wrong-format": Odd(
        dated("2024-01-01"), says="written as %d.%m.%Y", options={"time_format": "%d.%m.%Y"}
    ),
    "date-of-unknown-name": Odd(
        rows("ann,1,2024-02-01", "ann,2,2024-01-01", "bob,1,2024-03-01", header="user,item,lent"), 3, "--time-col lent"
    ),
}


@pytest.mark.parametrize("name", list(FILES))
def test_a_file_is_read_whole_or_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    odd = FILES[name]
    file = tmp_path / odd.name
    file.write_bytes(odd.content)
    if not odd.rows:
        with pytest.raises(HomebodyError, match=odd.says) as caught:
            load(file, **odd.options)
        assert "\n" not in str(caught.value)
        assert str(file) in str(caught.value) or odd.options
        return
    people = load(file, **odd.options)
    assert people.n_interactions + odd.dropped == odd.rows
    assert odd.check(people)
    notes = "\n".join(people.notes)
    assert re.search(odd.says, notes), notes


def test_there_are_forty_and_more_of_them_with_a_dozen_forms_of_dates() -> None:
    assert len(FILES) >= 40
    assert len(DAYS) >= 12

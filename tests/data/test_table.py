from __future__ import annotations

import gzip
from datetime import UTC, date, datetime, time
from pathlib import Path

import polars as pl
import pytest

from homebody.data.columns import FileColumn
from homebody.data.readers import read
from homebody.data.table import read_table
from homebody.errors import HomebodyError


def histories(file: Path, **columns: str) -> dict[object, list[object]]:
    people = read_table(file, **columns)
    assert people.user_ids is not None
    assert people.item_ids is not None
    return {name: people.item_ids.gather(people.history(user)).to_list() for user, name in enumerate(people.user_ids)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.csv"


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize(
    "header", ["user,item,time", "user_id,item_id,timestamp", "userId,movieId,TIME", "User-ID,Item-ID,time"]
)
def test_usual_names_and_separators_are_found(file: Path, header: str, separator: str) -> None:
    file.write_text(f"{header}\n10,b,2\n9,b,1\n10,a,1\n".replace(",", separator))
    assert histories(file) == {9: ["b"], 10: ["a", "b"]}


def test_named_columns_win_over_usual_names(file: Path) -> None:
    file.write_text("user,who,item,stars\nx,ann,1,2.5\n")
    people = read_table(file, user_col="who", rating_col="stars")
    assert people.user_ids is not None
    assert people.ratings is not None
    assert people.user_ids.to_list() == ["ann"]
    assert people.ratings.tolist() == [2.5]


def test_an_empty_name_leaves_a_column_out(file: Path) -> None:
    file.write_text("user,item,rating\n1,2,good\n")
    assert read_table(file, rating_col="").ratings is None


def test_ids_stay_as_written(file: Path) -> None:
    file.write_text("user,item\n007,1.0\n7,10.0\n 7 ,9.0\n")
    assert histories(file) == {"007": [1], "7": [10, 9]}


@pytest.mark.parametrize(
    "times",
    [
        ("2024-01-01", "2024-01-02", "2024-01-03"),
        ("2024-01-01T10:00:00Z", "2024-01-01T10:00:00-01:00", "2024-01-01T10:00:00-0200"),
        ("2024-01-01 10:00", "2024-01-01 10:00:01.25", "2024-01-01T10:00:01.5"),
        ("1.5", "1e3", "2000"),
        ("-3", "9007199254740992", "9007199254740993"),
    ],
)
def test_times_are_numbers_or_iso_dates(file: Path, times: tuple[str, str, str]) -> None:
    first, second, third = times
    file.write_text(f"user,item,time\n1,3,{third}\n1,1,{first}\n1,2,{second}\n")
    assert histories(file) == {1: [1, 2, 3]}


def test_dates_become_seconds(file: Path) -> None:
    file.write_text("user,item,time\n1,3,1970-01-02T01:00:00+01:00\n")
    assert read_table(file).times.tolist() == [86400]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"mine.csv is empty"),
        ("\n\n", r"mine.csv is empty"),
        ("user,item\n", r"no rows below its header"),
        ("who,what\n1,2\n", r"with --user-col and --item-col; its columns are 'who', 'what'\.$"),
        ("user,what\n1,2\n", r"--item-col; its columns are 'user', 'what'"),
        ("196,242,3\n186,302,3\n", r"if the file has no header line, give --no-header"),
        ("user,userId,item\n1,1,2\n", r"several columns that could be the user \('user', 'userId'\)"),
        ("user,item\nNaN,1\n3,4\n,5\n", r"user column 'user'.* row 1 has nothing \(2 such rows"),
        (
            "user,item\n1,1\n3,\n",
            r"item column 'item'.* an item in every row, but row 2 has nothing \(1 such row,",
        ),
        ("user,item,time\n1,1,5\n1,2,soon\n1,3,x\n", r"time column.* row 2 has 'soon' \(2 such rows"),
        ("user,item,time\n1,1,2024-01-01\n1,2,soon\n", r"row 2 has 'soon'"),
        ("user,item,time\n1,1,2024-01-01\n1,1,2024-02-31\n", r"row 2 has '2024-02-31'"),
        ("user,item,time\n1,1,\n", r"time column.* row 1 has nothing"),
        ("user,item,time\n1,1,1e300\n", r"row 1 has '1e300'"),
        ("user,item,rating\n1,1,4\n1,2,inf\n", r"rating column.* numbers, but row 2 has 'inf'"),
        ("user,item,rating\n1,1,1e300\n", r"row 1 has '1e300'"),
        ("user,item\n1,2,3,4\n", r"^Line 2 of .*mine.csv has 4 cells, and the header has 2: .*--drop-missing\.$"),
    ],
)
def test_a_bad_file_is_one_sentence(file: Path, text: str, sentence: str) -> None:
    file.write_text(text)
    with pytest.raises(HomebodyError, match=sentence) as caught:
        read_table(file)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there_is_named_with_those_that_are(file: Path) -> None:
    file.write_text("user,item\n1,2\n")
    with pytest.raises(HomebodyError, match=r"no column 'when' \(--time-col\); its columns are 'user', 'item'"):
        read_table(file, time_col="when")
    with pytest.raises(HomebodyError, match="cannot both be in the column 'item'"):
        read_table(file, user_col="item")


def test_text_that_is_not_utf_8_is_refused(file: Path) -> None:
    for text in (b"us\xe9r,item\n1,2\n", b"user,item\nRen\xe9,2\n"):
        file.write_bytes(text)
        with pytest.raises(HomebodyError, match=r"(?i)utf-8"):
            read_table(file)


def test_a_gzipped_file_and_half_of_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv.gz"
    packed = gzip.compress(b"user,item\n" + b"".join(b"%d,%d\n" % (n, n * n) for n in range(999)))
    file.write_bytes(packed)
    assert read_table(file).n_users == 999
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(HomebodyError, match="cannot be read as a table"):
        read_table(file)


def test_parquet_of_every_usual_type(tmp_path: Path) -> None:
    file = tmp_path / "mine.parquet"
    moments = [datetime(2024, 1, 2, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)]
    for users in (pl.Series([1, 1]), pl.Series([1.0, 1.0]), pl.Series(["1", "1"], dtype=pl.Categorical)):
        for times in (
            pl.Series(moments),
            pl.Series([date(2024, 1, 2), date(2024, 1, 1)]),
            pl.Series([2.5, 2.25]),
        ):
            pl.DataFrame({"user": users, "item": ["a", "b"], "time": times}).write_parquet(file)
            assert histories(file) == {1: ["b", "a"]}
    pl.DataFrame({"user": [1], "item": [2], "time": [datetime(2024, 1, 1, tzinfo=UTC)]}).with_columns(
        pl.col("time").dt.convert_time_zone("Asia/Tokyo")
    ).write_parquet(file)
    assert read_table(file).times.tolist() == [1704067200]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        ({"user": [1.0, float("nan")], "item": [1, 2]}, "row 2 has nothing"),
        ({"user": [1, None], "item": [1, 2]}, "row 2 has nothing"),
        ({"user": [1, 2], "item": [[1], [2]]}, r"holds List\(Int64\) values"),
        ({"user": [1, 2], "item": [1, 2], "time": [time(1), time(2)]}, "holds Time values"),
        ({"user": [1, 2], "item": [1, 2], "time": [True, False]}, "numbers"),
    ],
)
def test_a_bad_parquet_column_is_one_sentence(tmp_path: Path, frame: dict[str, list[object]], sentence: str) -> None:
    file = tmp_path / "mine.parquet"
    pl.DataFrame(frame).write_parquet(file)
    with pytest.raises(HomebodyError, match=sentence):
        read_table(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.parquet"
    with pytest.raises(HomebodyError, match=r"There is no file .*mine\.parquet"):
        read_table(file)
    with pytest.raises(HomebodyError, match="is a folder"):
        read_table(tmp_path)
    pl.DataFrame({"user": range(999), "item": range(999)}).write_parquet(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(HomebodyError, match="cannot be read as a table; it may be damaged"):
        read_table(file)


def test_a_file_in_latin_1_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "my.csv"
    path.write_bytes("user,item\nann,x\njosé,y\n".encode("latin-1"))
    with pytest.raises(HomebodyError, match=r"is not UTF-8 text: line 3 .* give --encoding latin-1,"):
        read_table(path)


def test_times_are_as_wide_as_in_a_population_however_small_they_are(file: Path) -> None:
    file.write_text("user,item,time\n1,1,5\n")
    assert FileColumn(read(file).rows["time"], "time", file).times().dtype == pl.Int64

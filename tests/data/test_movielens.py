from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from homebody.data.movielens import read_ml_1m, read_ml_100k, read_ml_large
from homebody.data.population import Population
from homebody.errors import HomebodyError

RATINGS = "2\t10\t3\t50\n1\t10\t4\t20\n2\t9\t5\t40\n1\t267\t1\t20\n"
PEOPLE = (("1", "24", "M", "writer", "1"), ("2", "53", "F", "other", "T8H1N"))
FLAGS = {"9": (5, 8), "10": (1,), "267": (0,)}


def equal(one: Population, other: Population) -> bool:
    arrays = ("indptr", "items", "times", "ratings")
    columns, tables = ("user_ids", "item_ids", "item_names"), ("user_features", "item_features")
    return (
        all(np.array_equal(getattr(one, a), getattr(other, a)) for a in arrays)
        and all(getattr(one, c).equals(getattr(other, c)) for c in columns)
        and all(getattr(one, t).table.equals(getattr(other, t).table) for t in tables)
    )


@pytest.fixture
def grouplens(tmp_path: Path) -> Path:
    folder = tmp_path / "grouplens"
    folder.mkdir()
    titles = {"10": "Cérémonie, La (1995) ", "9": 'The "Quoted" (1972) (V)', "267": "unknown"}
    (folder / "u.data").write_text(RATINGS)
    (folder / "u.user").write_text("".join("|".join(person) + "\n" for person in PEOPLE))
    (folder / "u.item").write_text(
        "".join(
            "|".join([item, title, "", "", "", *("1" if g in FLAGS[item] else "0" for g in range(19))]) + "\n"
            for item, title in titles.items()
        ),
        encoding="latin-1",
    )
    return folder


@pytest.fixture
def recbole(tmp_path: Path) -> Path:
    folder = tmp_path / "recbole"
    folder.mkdir()
    (folder / "ml-100k.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + RATINGS)
    (folder / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        + "".join("\t".join(person) + "\n" for person in PEOPLE)
    )
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '9\tThe "Quoted" (1972)\tV\tComedy Drama\n'
        "10\tCérémonie, La\t1995\tAction\n"
        "267\tunkonwn\tunkonwn\tunknown\n",
        encoding="utf-8",
    )
    return folder


def test_both_layouts_of_ml_100k_give_the_same_population(grouplens: Path, recbole: Path) -> None:
    people = read_ml_100k(grouplens)
    assert equal(people, read_ml_100k(recbole))
    assert people.item_names is not None
    assert people.item_features is not None
    assert people.user_features is not None
    assert people.item_names.to_list() == ['The "Quoted" (1972) (V)', "Cérémonie, La (1995)", "unknown"]
    assert people.item_features.table["genres"].to_list() == [["Comedy", "Drama"], ["Action"], ["unknown"]]
    assert people.item_features.table["year"].to_list() == [1972, 1995, None]
    assert people.item_features.table["title"].to_list() == people.item_names.to_list()
    assert people.item_features.kinds == {"genres": "multi-hot", "year": "numeric", "title": "text"}
    assert people.user_features.table.rows() == [(24, "M", "writer"), (53, "F", "other")]
    assert people.user_features.kinds == {"age": "numeric", "gender": "categorical", "occupation": "categorical"}
    assert people.user_features.views == dict.fromkeys(["age", "gender", "occupation"], "profile")
    # User 1 rated two movies at one time: file order. User 2's rows come in the wrong order.
    assert [people.history(user).tolist() for user in (0, 1)] == [[1, 2], [0, 1]]


def test_ratings_alone_are_enough(grouplens: Path) -> None:
    (grouplens / "u.item").unlink()
    (grouplens / "u.user").unlink()
    people = read_ml_100k(grouplens)
    assert people.n_interactions == 4
    assert people.item_names is people.user_features is None


def test_ml_1m_from_the_zip_and_unpacked(tmp_path: Path) -> None:
    files = {
        "ratings.dat": "1::5::3::20\n1::2::4::10\n3::5::1::30\n",
        "users.dat": "1::F::1::10::48067\n2::M::18::0::1\n3::M::56::20::70072\n",
        "movies.dat": "2::Älta: a (tale) (1990)::Drama|War\n4::Unrated (1991)::Comedy\n5::B (2000)::Action\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    unpacked = read_ml_1m(tmp_path)
    packed = tmp_path / "packed"
    packed.mkdir()
    with zipfile.ZipFile(packed / "ml-1m.zip", "w") as pack:
        for name in files:
            pack.write(tmp_path / name, f"ml-1m/{name}")
    assert equal(unpacked, read_ml_1m(packed))
    assert unpacked.item_names is not None
    assert unpacked.user_features is not None
    assert unpacked.item_features is not None
    assert unpacked.item_names.to_list() == ["Älta: a (tale) (1990)", "B (2000)"]
    assert unpacked.item_features.table.rows() == [
        (["Drama", "War"], 1990, "Älta: a (tale) (1990)"),
        (["Action"], 2000, "B (2000)"),
    ]
    # Ages are ranges there.
    assert unpacked.user_features.kinds["age"] == "categorical"
    assert unpacked.user_features.views == dict.fromkeys(["age", "gender", "occupation"], "profile")
    assert unpacked.user_features.table.rows() == [(1, "F", "K-12 student"), (56, "M", "writer")]
    assert unpacked.items.tolist() == [0, 1, 1]


LARGE = {
    "ratings.csv": (
        "userId,movieId,rating,timestamp\n"
        "7,50,4.5,300\n7,10,0.5,100\n7,30,3.0,100\n2,131262,5.0,1147880044\n2,10,1.0,1147880044\n"
    ),
    "movies.csv": (
        "movieId,title,genres\n"
        '10,"American President, The (1995)",Comedy|Drama|Romance\n'
        "20,Unrated (1990),War\n"
        '30,"Say ""Aah"" (1992)",Comedy\n'
        "131262,Innocence (2014),(no genres listed)\n"
    ),
}


def packed(folder: Path, name: str, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as pack:
        for part, text in files.items():
            pack.writestr(f"{name}/{part}", text)
    return folder


@pytest.mark.parametrize("name", ["ml-20m", "ml-25m"])
def test_the_large_ones_from_the_zip_and_unpacked(tmp_path: Path, name: str) -> None:
    for part, text in LARGE.items():
        (tmp_path / part).write_text(text, encoding="utf-8")
    unpacked = read_ml_large(name, tmp_path)
    zipped = read_ml_large(name, packed(tmp_path / "zip", name, LARGE))
    for people in (unpacked, zipped):
        assert people.name == name
        assert people.user_ids is not None
        assert people.item_ids is not None
        assert people.item_names is not None
        assert people.item_features is not None
        assert people.ratings is not None
        assert people.times is not None
        assert people.user_ids.to_list() == [2, 7]
        assert people.item_ids.to_list() == [10, 30, 50, 131262]
        # Two times are tied: file order. Movie 50 is not described, movie 20 not rated.
        assert [people.history(user).tolist() for user in (0, 1)] == [[3, 0], [0, 1, 2]]
        assert people.ratings.tolist() == [5.0, 1.0, 0.5, 3.0, 4.5]
        assert people.times.tolist() == [1147880044, 1147880044, 100, 100, 300]
        assert people.item_names.to_list() == [
            "American President, The (1995)",
            'Say "Aah" (1992)',
            "50",
            "Innocence (2014)",
        ]
        assert people.item_features.table["genres"].to_list() == [
            ["Comedy", "Drama", "Romance"],
            ["Comedy"],
            None,
            None,
        ]
        assert people.item_features.table["year"].to_list() == [1995, 1992, None, 2014]
        assert people.item_features.table["title"][2] is None
        assert people.user_features is None


def test_large_ratings_alone_are_enough(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text(LARGE["ratings.csv"])
    assert read_ml_large("ml-25m", tmp_path).item_names is None


@pytest.mark.parametrize(
    ("part", "text", "sentence"),
    [
        ("ratings.csv", "user,movie,rating,timestamp\n1,2,3,4\n", "should start with the columns userId, movieId"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,2,3,4\n1,2", r"has no rating in row 2, so it is damaged"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,two,3,4\n", "cannot be read and may be damaged"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,2,3,4,5\n", "cannot be read and may be damaged"),
        ("ratings.csv", "", "should start with the columns"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n", "has no rows"),
        ("movies.csv", "movieId,title\n1,A\n", "should start with the columns movieId, title, genres"),
        ("movies.csv", None, "holds no ml-25m/movies.csv"),
        ("ratings.csv", None, "holds no ml-25m/ratings.csv"),
    ],
)
def test_large_files_that_are_wrong_are_one_sentence(
    tmp_path: Path, part: str, text: str | None, sentence: str
) -> None:
    files = {**LARGE, part: text}
    packed(tmp_path, "ml-25m", {part: text for part, text in files.items() if text is not None})
    with pytest.raises(HomebodyError, match=sentence) as caught:
        read_ml_large("ml-25m", tmp_path)
    assert "\n" not in str(caught.value)


def test_an_archive_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    whole = packed(tmp_path, "ml-25m", LARGE) / "ml-25m.zip"
    spoilt = bytearray(whole.read_bytes())
    # In the middle of the first member's compressed bytes.
    spoilt[60:80] = bytes(20)
    for content in (b"PK not really", whole.read_bytes()[:100], b"", bytes(spoilt)):
        whole.write_bytes(content)
        (tmp_path / "ml-1m.zip").write_bytes(content)
        with pytest.raises(HomebodyError, match="cannot be unpacked and may be damaged"):
            read_ml_large("ml-25m", tmp_path)
    (tmp_path / "ml-1m.zip").write_bytes(b"PK not really")
    with pytest.raises(HomebodyError, match="cannot be unpacked and may be damaged"):
        read_ml_1m(tmp_path)
    packed(tmp_path, "ml-1m", {"ratings.dat": "1::2::3::4\n"})
    with pytest.raises(HomebodyError, match=r"ml-1m\.zip is not the published archive: it holds no ml-1m/users\.dat"):
        read_ml_1m(tmp_path)


def test_small_files_that_are_wrong_are_one_sentence(grouplens: Path) -> None:
    (grouplens / "u.user").write_text("1|old|M|writer|1\n2|53|F|other|2\n")
    with pytest.raises(HomebodyError, match=r"u\.user cannot be read and may be damaged"):
        read_ml_100k(grouplens)
    (grouplens / "u.data").write_text("1\t2\t3\n")
    with pytest.raises(HomebodyError, match=r"u\.data should have 4 columns .* its first row has 3"):
        read_ml_100k(grouplens)


def test_published_ml_100k(real_data: Path) -> None:
    people = read_ml_100k(real_data / "ml-100k")
    assert (people.n_users, people.n_items, people.n_interactions) == (943, 1682, 100_000)
    assert people.item_names is not None
    assert people.item_names[[0, 542]].to_list() == ["Toy Story (1995)", "Misérables, Les (1995)"]
    assert people.lengths.min() == 20
    assert people.item_names.null_count() == 0


def test_published_ml_1m(real_data: Path) -> None:
    people = read_ml_1m(real_data / "ml-1m")
    assert (people.n_users, people.n_items, people.n_interactions) == (6040, 3706, 1_000_209)
    assert people.item_names is not None
    assert people.user_features is not None
    assert people.item_names.null_count() == 0
    assert people.user_features.table["occupation"].null_count() == 0

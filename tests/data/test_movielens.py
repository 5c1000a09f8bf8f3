from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from homebody.data.movielens import read_ml_1m, read_ml_100k
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
    assert people.user_features.table.rows() == [(24, "M", "writer"), (53, "F", "other")]
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
    assert unpacked.item_features.table.rows() == [(["Drama", "War"], 1990), (["Action"], 2000)]
    assert unpacked.user_features.table.rows() == [(1, "F", "K-12 student"), (56, "M", "writer")]
    assert unpacked.items.tolist() == [0, 1, 1]


def test_an_archive_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ml-1m.zip").write_bytes(b"PK not really")
    with pytest.raises(HomebodyError, match="is not the MovieLens-1M archive"):
        read_ml_1m(tmp_path)


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

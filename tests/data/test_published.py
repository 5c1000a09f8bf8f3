"""Lastfm-2K, Amazon-Video, Frappe and Book-Crossing, on small files in their formats and on the published ones."""

from __future__ import annotations

import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from homebody.data.population import Population
from homebody.data.published import read_amazon_video, read_book_crossing, read_frappe, read_lastfm_2k
from homebody.errors import HomebodyError

TAGS = "9,52,13,1238536800000\n9,51,13,1241128800000\n2,52,15,-420771600000\n9,52,15,1238536800000\n"
ARTISTS = 'id\tname\turl\tpictureURL\n52\tMørke "Sind\thttp://a\t\n7\tUnheard\thttp://b\thttp://c\n'
USES = (
    "user\titem\tcnt\tdaytime\tweekday\tisweekend\thomework\tcost\tweather\tcountry\tcity\n"
    "4\t11\t7\tmorning\tsunday\tweekend\tunknown\tfree\tsunny\tSpain\t0\n"
    "1\t3\t1\tevening\tmonday\tworkday\thome\tpaid\tunknown\tunknown\t369\n"
    "4\t3\t28752\tnight\tsunday\tweekend\twork\tfree\tfoggy\tPeru\t12\n"
    "4\t11\t2\tnoon\tfriday\tworkday\tunknown\tfree\trainy\tSpain\t0\n"
)
APPS = (
    "item\tpackage\tcategory\tdownloads\tdeveloper\ticon\tlanguage\tdescription\tname\tprice\trating\tshort desc\n"
    '3\tcom.a\tTools\t10,000+\tA\thttp://i\ten\t"Says ""hi"""\tThe A\t$2.99\t4.5\t\n'
    "5\tcom.c\tTools\t10,000+\tC\thttp://i\ten\tUnused\tC\tFree\t4.5\tNever\n"
    "11\tunknown\tunknown\tunknown\tunknown\tunknown\tunknown\tunknown\tunknown\tunknown\tunknown\tunknown\n"
)
BOOKS = (
    '"User-ID";"ISBN";"Book-Rating"\r\n"30";"034545104X";"0"\r\n"4";"\\"0432534220\\"";"10"\r\n'
    '"30";"0155061224";"5"\r\n"4";"2.02.032126.2º";"1"\r\n"30";"034545104X";"7"\r\n'
)


def put(folder: Path, name: str, text: str, encoding: str = "utf-8") -> Path:
    (folder / name).write_bytes(text.encode(encoding))
    return folder


def frappe(folder: Path, uses: str | None = USES, apps: str | None = APPS) -> Path:
    with zipfile.ZipFile(folder / "Mobile_Frappe.zip", "w") as pack:
        for member, text in (("frappe.csv", uses), ("meta.csv", apps)):
            if text is not None:
                pack.writestr(f"Mobile_Frappe/frappe/{member}", text)
    return folder


def test_lastfm_keeps_every_row_and_names_the_artists(tmp_path: Path) -> None:
    people = read_lastfm_2k(put(put(tmp_path, "ratings.dat", TAGS), "artists.dat", ARTISTS))
    assert people.user_ids is not None
    assert people.item_names is not None
    assert people.times is not None
    assert people.user_ids.to_list() == [2, 9]
    assert people.item_names.to_list() == ["51", 'Mørke "Sind']
    assert [people.history(user).tolist() for user in (0, 1)] == [[1], [1, 1, 0]]
    assert people.times.tolist() == [-420771600, 1238536800, 1238536800, 1241128800]
    assert people.ratings is None
    (tmp_path / "artists.dat").unlink()
    assert read_lastfm_2k(tmp_path).item_names is None


def test_amazon_video(tmp_path: Path) -> None:
    rows = "B,Y,5.0,1281052800\r\nA,Z,2.0,1198195200\r\nA,Y,1.0,1198195200\r\nB,X,4.0,1203897600\r\n"
    people = read_amazon_video(put(tmp_path, "ratings.dat", rows))
    assert people.user_ids is not None
    assert people.ratings is not None
    assert people.times is not None
    assert people.user_ids.to_list() == ["A", "B"]
    assert [people.history(user).tolist() for user in (0, 1)] == [[2, 1], [0, 1]]
    assert people.ratings.tolist() == [2, 1, 4, 5]
    assert people.times.tolist()[-1] == 1281052800


def test_frappe_has_contexts_in_the_interactions_order(tmp_path: Path) -> None:
    people = read_frappe(frappe(tmp_path))
    assert people.contexts is not None
    assert people.ratings is not None
    assert [people.history(user).tolist() for user in (0, 1)] == [[0], [1, 0, 1]]
    assert people.ratings.tolist() == [1, 7, 28752, 2]
    assert people.contexts.names == [
        *("daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
    ]
    assert set(people.contexts.kinds.values()) == {"categorical"}
    assert people.contexts.table["daytime"].to_list() == ["evening", "morning", "night", "noon"]
    assert people.contexts.table["weather"].to_list() == [None, "sunny", "foggy", "rainy"]
    assert people.contexts.table["city"].to_list() == [369, 0, 12, 0]
    assert people.times is None


def test_frappe_describes_apps_without_their_counts(tmp_path: Path) -> None:
    people = read_frappe(frappe(tmp_path))
    assert people.item_features is not None
    assert people.item_names is not None
    assert people.item_names.to_list() == ["The A", "11"]
    assert people.item_features.table.rows() == [
        ("Tools", "10,000+", "A", "en", pytest.approx(2.99), 4.5, "The A", None),
        (None,) * 8,
    ]
    assert people.item_features.kinds["downloads"] == "categorical"
    assert people.item_features.kinds["price"] == "numeric"
    assert people.item_features.kinds["short_description"] == "text"
    assert "cnt" not in people.item_features.names
    foreign = APPS.replace("$2.99", "€\xa00,99").replace("unknown\tunknown\tunknown\n", "Free\t3\tx\n")
    again = read_frappe(frappe(tmp_path, apps=foreign)).item_features
    assert again is not None
    assert again.table["price"].to_list() == [None, 0.0]


def test_book_crossing_plain_and_packed(tmp_path: Path) -> None:
    (tmp_path / "BX-Book-Ratings.csv.xz").write_bytes(lzma.compress(BOOKS.encode("latin-1")))
    packed = read_book_crossing(tmp_path)
    (tmp_path / "BX-Book-Ratings.csv.xz").unlink()
    for people in (packed, read_book_crossing(put(tmp_path, "BX-Book-Ratings.csv", BOOKS, "latin-1"))):
        assert people.user_ids is not None
        assert people.item_ids is not None
        assert people.ratings is not None
        assert people.user_ids.to_list() == [4, 30]
        assert people.item_ids.to_list() == ['"0432534220"', "0155061224", "034545104X", "2.02.032126.2º"]
        assert [people.history(user).tolist() for user in (0, 1)] == [[0, 3], [2, 1, 2]]
        assert people.ratings.tolist() == [10, 1, 0, 5, 7]
        assert people.times is None


def lastfm_rows(rows: str) -> Callable[[Path], Population]:
    return lambda folder: read_lastfm_2k(put(folder, "ratings.dat", rows))


def book_rows(content: bytes) -> Callable[[Path], Population]:
    def read(folder: Path) -> Population:
        (folder / "BX-Book-Ratings.csv.xz").write_bytes(content)
        return read_book_crossing(folder)

    return read


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (read_lastfm_2k, r"ratings\.dat cannot be read: No such file"),
        (lastfm_rows(""), r"ratings\.dat is empty"),
        (lastfm_rows("1,2,3\n"), r"should have 4 columns \(user, artist, tag, time\), but its first row has 3"),
        (lastfm_rows(TAGS + "9,5"), "has no tag in row 5"),
        (lastfm_rows(TAGS + "9,x,1,1\n"), "cannot be read and may be damaged"),
        (
            lambda folder: read_lastfm_2k(put(put(folder, "ratings.dat", TAGS), "artists.dat", "id\tartist\n")),
            r"artists\.dat should start with the columns id, name, url, pictureURL, but starts with id, artist",
        ),
        (lambda folder: read_amazon_video(put(folder, "ratings.dat", "A;B;5;1\n")), "should have 4 columns"),
        (lambda folder: read_amazon_video(put(folder, "ratings.dat", "A,B,good,1\n")), "cannot be read and may be"),
        (lambda folder: read_frappe(frappe(folder, uses=None)), r"holds no Mobile_Frappe/frappe/frappe\.csv"),
        (lambda folder: read_frappe(frappe(folder, apps=None)), r"holds no Mobile_Frappe/frappe/meta\.csv"),
        (lambda folder: read_frappe(frappe(folder, uses=USES.replace("cnt", "n"))), "should start with the columns"),
        (lambda folder: read_frappe(frappe(folder, uses=USES + "4\t1")), "has no cnt in row 5"),
        (lambda folder: read_frappe(frappe(folder, apps=APPS.replace("icon", "i"))), r"meta\.csv\) should start with"),
        (lambda folder: read_frappe(put(folder, "Mobile_Frappe.zip", "PK")), "cannot be unpacked and may be damaged"),
        (read_frappe, "cannot be read: No such file"),
        (book_rows(lzma.compress(BOOKS.encode("latin-1"))[:-20]), "cannot be unpacked and may be damaged"),
        (book_rows(b"not packed"), "cannot be unpacked and may be damaged"),
        (book_rows(lzma.compress(b"a;b;c\n1;2;3\n")), "should start with the columns User-ID, ISBN, Book-Rating"),
        (book_rows(lzma.compress((BOOKS + '"7";"9').encode("latin-1"))), "damaged"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, read: Callable[[Path], Population], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_published_frappe(real_data: Path) -> None:
    if not (real_data / "frappe").exists():
        pytest.skip("no published Frappe")
    people = read_frappe(real_data / "frappe")
    assert people.item_features is not None
    assert people.contexts is not None
    assert people.ratings is not None
    assert people.item_features.table["category"].null_count() == 550
    # Six prices are in other currencies.
    assert people.item_features.table["price"].null_count() == 556
    assert people.contexts.table["homework"].null_count() == 75_670
    assert people.ratings.max() == 28_752
    assert people.contexts.table["daytime"].value_counts().sort("count")["count"].to_list() == [
        *(3895, 7918, 11597, 12257, 17515, 19883, 23138)
    ]


def test_published_lastfm(real_data: Path) -> None:
    if not (real_data / "lastfm-2k").exists():
        pytest.skip("no published Lastfm-2K")
    people = read_lastfm_2k(real_data / "lastfm-2k")
    assert people.item_names is not None
    assert people.item_ids is not None
    assert people.item_names.null_count() == 0
    # 389 artists have no name.
    assert (people.item_names == people.item_ids.cast(str)).sum() >= 389
    pairs = sum(len(set(people.history(user).tolist())) for user in range(people.n_users))
    assert pairs == 70_508

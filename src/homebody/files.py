"""Files that only their owner reads, written whole; and locks. No link is followed where something is written.

A folder may come from somebody else, with links under the names that we write: a write through one would land in any
file of whoever opens the folder. So a new file is made where no file is, and then renamed into its place.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from homebody.errors import HomebodyError, Unavailable

__all__ = [
    "PRIVATE",
    "SHARED",
    "appending",
    "holding",
    "insisting",
    "is_full",
    "is_held",
    "path_of",
    "private_folder",
    "read_settings",
    "replace_all",
    "replacing",
    "sync_folder",
    "touch",
    "unwritten",
    "write_new",
    "write_synced",
]

PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
SHARED = 0o666
"""As readable as the umask says: for what people ask for to show to others."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PAUSE = 0.05
_NOT_PLAIN = "it is a link, or no plain file"


def path_of(given: object) -> Path:
    """A file or folder from the text or path that names it.

    >>> path_of(None)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: A file or folder is named by a text or a Path, not None.
    """
    if not isinstance(given, str | os.PathLike):
        raise HomebodyError(f"A file or folder is named by a text or a Path, not {given!r}.")
    return Path(given)


def private_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder that only its owner enters; one that is there, and the folders above it, stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE_FOLDER, exist_ok=exist_ok)


def touch(path: Path) -> None:
    """Create a private file if it is missing; a link is refused.

    A file that is there is not opened: closing it would let go of the locks that this process holds on it.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE))
    except FileExistsError:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EINVAL, _NOT_PLAIN, str(path)) from None


@contextmanager
def replacing(path: Path, *, mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """A file to write the new content into; it takes the place of `path` once it is whole and on the disk.

    mode: who may read it, less what the umask forbids. A full disk leaves the old content, and is said.
    """
    scratch = path.with_name(f".{path.name}.partial")
    try:
        scratch.unlink(missing_ok=True)
        try:
            with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(path)
        except BaseException:
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unwritten(path, error) from error


def replace_all(folder: Path, texts: Mapping[str, str], *, mode: int = PRIVATE) -> None:
    """Replace several files of a folder. Where one of them finds no room, none is replaced."""
    with ExitStack() as files:
        for name, text in texts.items():
            file = files.enter_context(replacing(folder / name, mode=mode))
            file.write(text.encode())
            file.flush()


def write_new(folder: Path, files: dict[str, bytes]) -> list[Path]:
    """All of them or none; never over a file that is there."""
    paths = {folder / name: content for name, content in files.items()}
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in paths:
            if path.exists():
                raise FileExistsError(0, "File exists", str(path))
        for path, content in paths.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                written.append(path)
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise HomebodyError(
                f"{error.filename} already exists, and replacing it would lock out whoever trusts it: choose another "
                "folder, or remove the file first."
            ) from error
        raise HomebodyError(f"The keys cannot be written to {folder}: {error.strerror}.") from error
    return list(paths)


def write_synced(path: Path, content: bytes, *, over: bool = False) -> None:
    """Write a private file that is on the disk when this returns. over: it may replace a file, but never a link."""
    flags = os.O_TRUNC | os.O_NOFOLLOW if over else os.O_EXCL
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flags, PRIVATE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk: a file whose name is lost is lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_settings(path: Path, what: str, missing: str) -> str:
    """The text of a settings file. missing: the sentence where there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HomebodyError(missing) from None
    except (OSError, UnicodeDecodeError) as error:
        raise HomebodyError(f"{what} {path} cannot be read: {error}.") from error


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """A private file opened for appending, created if it is missing."""
    try:
        with os.fdopen(_opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            yield file
    except OSError as error:
        raise unwritten(path, error) from error


@contextmanager
def insisting(sentence: str) -> Iterator[None]:
    """Say what the system refuses in the block: the sentence, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise HomebodyError(f"{sentence}: {error.strerror or error}.") from error


def is_full(error: OSError) -> bool:
    """Whether room is what was missing, so that the same may work later."""
    return error.errno in _FULL


def unwritten(path: Path, error: OSError) -> HomebodyError:
    """Why a file was not written, in a sentence."""
    why = error.strerror or str(error)
    if is_full(error):
        return Unavailable(f"The disk takes no more of {path} ({why}): make room and start again.")
    return HomebodyError(f"{path} cannot be written: {why}.")


@contextmanager
def holding(lock: Path, busy: str, *, patience: float = 0.0, waits: Callable[[], None] | None = None) -> Iterator[int]:
    """Hold a lock until the end of the block or of the process, however it ends; the number of its file.

    busy: the sentence for whoever cannot have it within `patience` seconds. waits: told once before that wait.
    """
    import fcntl

    until = time.monotonic() + patience
    while True:
        try:
            number = _opened(lock, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise unwritten(lock, error) from error
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(number, lock):
                break
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(number)
                raise HomebodyError(busy) from None
            if waits is not None:
                waits()
                waits = None
            time.sleep(_PAUSE)
        except BaseException:
            os.close(number)
            raise
        os.close(number)
    try:
        yield number
    finally:
        os.close(number)


def is_held(lock: Path) -> bool:
    """Whether some process holds a lock; nothing is written."""
    import fcntl

    try:
        number = _opened(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise HomebodyError(f"{lock} cannot be opened: {error.strerror}.") from error
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(number)
    return False


def _opened(path: Path, flags: int) -> int:
    """The number of a plain file. Never truncated, and never by way of a link or a pipe that a stranger left there."""
    try:
        number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, PRIVATE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _NOT_PLAIN, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, _NOT_PLAIN, str(path))
    return number


def _is_there(number: int, path: Path) -> bool:
    """Whether the open file still has that name: a lock on a removed file excludes nobody."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(number), path.lstat())
    return False

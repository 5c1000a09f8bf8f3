"""What people and peers give: addresses, names of one line, files to read, and folders to make a service in."""

from __future__ import annotations

import ipaddress
import re
import shutil
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from homebody.errors import HomebodyError

__all__ = [
    "LONGEST_SPAN",
    "ago",
    "check_proxy",
    "check_view",
    "claiming",
    "is_loopback",
    "making",
    "one_line",
    "read_authority",
    "read_file",
    "read_span",
    "span",
    "split_address",
]

_HOST = r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
_ADDRESS = re.compile(_HOST + r":(?P<port>[0-9]{1,5})")
_URL = re.compile(r"(?P<scheme>https?)://" + _HOST + r"(:(?P<port>\d{1,5}))?/?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_SPAN = 366 * _UNITS["d"]
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def split_address(text: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT, or None if the text is malformed.

    >>> split_address("[::1]:9092"), split_address("example.org"), split_address("example.org:0")
    (('::1', 9092), None, None)
    """
    match = _ADDRESS.fullmatch(text)
    port = int(match["port"]) if match else 0
    return (match["host"].strip("[]"), port) if match and 0 < port < 65536 else None


def read_span(text: str) -> int:
    """Seconds from a span of time as people write it.

    >>> read_span("24h"), read_span("90s"), read_span("7d")
    (86400, 90, 604800)
    """
    match = re.fullmatch(r"(\d{1,9})\s*([smhd])", text.strip())
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= seconds <= LONGEST_SPAN:
        raise HomebodyError(f"A span of time is a number with s, m, h or d, such as 24h, up to 366d, not '{text}'.")
    return seconds


def span(seconds: int) -> str:
    """The inverse of `read_span`, in the largest unit that fits.

    >>> span(86400), span(90), span(7200)
    ('1d', '90s', '2h')
    """
    unit, size = next((unit, size) for unit, size in reversed(_UNITS.items()) if seconds % size == 0)
    return f"{seconds // size}{unit}"


def ago(seconds: float) -> str:
    """A span of time in the largest unit that it reaches, rounded down.

    >>> ago(0.4), ago(119), ago(90_000)
    ('0s', '1m', '1d')
    """
    whole = max(0, int(seconds))
    unit, size = next(((unit, size) for unit, size in reversed(_UNITS.items()) if whole >= size), ("s", 1))
    return f"{whole // size}{unit}"


def check_proxy(url: str, what: str = "A proxy") -> None:
    """Refuse what is no address of a proxy.

    >>> check_proxy("http://example.org:9094")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: A proxy on another machine is reached by https://, not 'http://example.org:9094'.
    """
    address = _URL.fullmatch(url)
    if not address or (address["port"] and not 0 < int(address["port"]) < 65536):
        raise HomebodyError(f"{what}'s address must be https://HOST:PORT, not '{url}'.")
    if address["scheme"] == "http" and not is_loopback(address["host"]):
        raise HomebodyError(f"{what} on another machine is reached by https://, not '{url}'.")


def check_view(name: str) -> None:
    """Refuse what cannot be the name of an app's view."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
        raise HomebodyError(f"The name of a view is a letter, then letters, digits, _ or -, not '{name}'.")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def read_file(path: Path, limit: int = -1) -> bytes:
    """The content of a file that somebody names, or its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise HomebodyError(f"{path} cannot be read: {error.strerror or error}.") from error


@contextmanager
def making(folder: Path, what: str) -> Iterator[None]:
    """Make a service's folder, which its owner alone can read: whole, or not at all."""
    fresh = False
    try:
        fresh = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)  # who takes part is nobody else's business
        yield
    except BaseException as error:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise HomebodyError(f"No {what} can be made in {folder}: {error.strerror}.") from error
        raise


@contextmanager
def claiming(folder: Path, what: str, file: str = "") -> Iterator[None]:
    """Make a folder of people's data, with one for their ledgers, where there is nothing: whole, or not at all.

    file: a folder that has it is one already.
    """
    fresh = False
    try:
        fresh = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file and (folder / file).exists():
            raise HomebodyError(f"{folder} is a {what} already; use it, or name another folder.")
        if any(folder.iterdir()):
            raise HomebodyError(f"{folder} is not empty; name a folder that is, or one that is not there yet.")
        folder.chmod(0o700)
        (folder / "ledgers").mkdir(mode=0o700)
    except OSError as error:
        if fresh:
            with suppress(OSError):
                folder.rmdir()
        raise HomebodyError(f"No {what} can be made in {folder}: {error.strerror or error}.") from error
    try:
        yield
    except BaseException:
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if fresh:
            folder.rmdir()
        raise


def one_line(text: object, what: str, limit: int) -> str:
    """A text of one line without spaces around it.

    >>> one_line(" emma ", "An item id", 1000)
    'emma'
    >>> one_line("", "An item id", 1000)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: An item id must be one line of 1 to 1,000 characters, not ''.
    """
    bare = text.strip() if isinstance(text, str) else ""
    if not bare or len(bare) > limit or _UNPRINTABLE.search(bare):
        shown = ascii(text)
        shown = shown if len(shown) <= 80 else f"{shown[:80]} …"
        raise HomebodyError(f"{what} must be one line of 1 to {limit:,} characters, not {shown}.")
    return bare


def read_authority(path: Path) -> bytes:
    """The certificate of an authority in PEM form, as it is in the file."""
    text = read_file(path)
    try:
        ssl.create_default_context(cadata=text.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise HomebodyError(f"{path} holds no certificate of an authority: it is a PEM file such as ca.pem.") from error
    return text

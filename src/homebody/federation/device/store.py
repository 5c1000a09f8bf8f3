"""The file a device keeps everything in: one SQLite database, written all or nothing, read while another writes."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.service.text import ADDRESS, URL, is_loopback, one_line
from homebody.files import touch

__all__ = ["SCHEMA_VERSION", "TIME_LIMIT", "Settings", "Store", "finite", "limited"]

SCHEMA_VERSION = 3
TIME_LIMIT = 2**62
"""Times are no further from 0, so that whole ones and others stand in one column of 64 bits."""
PATIENCE = 30.0
"""Seconds to wait for others who write."""
PROBE = 0.25
"""Seconds that one who only looks whether a client is running may hold up one who starts."""
_SCHEMA = """
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE person (slot INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, active INTEGER NOT NULL);
CREATE TABLE interaction (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    person INTEGER NOT NULL REFERENCES person,
    item TEXT NOT NULL,
    time,
    rating REAL
);
CREATE INDEX interaction_of_person ON interaction (person, item);
CREATE TABLE item (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL);
CREATE TABLE shared (digest TEXT PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE model (
    one INTEGER PRIMARY KEY CHECK (one = 0),
    description TEXT NOT NULL,
    digest TEXT NOT NULL,
    release TEXT NOT NULL,
    step INTEGER NOT NULL
);
CREATE TABLE state (
    person INTEGER NOT NULL REFERENCES person,
    run TEXT NOT NULL,
    step INTEGER NOT NULL,
    base TEXT,
    bytes BLOB NOT NULL,
    PRIMARY KEY (person, run, step)
);
CREATE TABLE mark (
    id INTEGER PRIMARY KEY,
    person INTEGER NOT NULL REFERENCES person,
    run TEXT NOT NULL,
    release TEXT NOT NULL,
    digest TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    at INTEGER NOT NULL,
    reports INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX mark_of_release ON mark (person, run, release, digest);
CREATE TABLE begun (
    person INTEGER NOT NULL,
    run TEXT NOT NULL,
    release TEXT NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (person, run, release, digest)
);
CREATE TABLE answer (mark INTEGER PRIMARY KEY REFERENCES mark, bytes BLOB NOT NULL);
"""
_MESSAGES = (
    "CREATE TABLE message (id INTEGER PRIMARY KEY, ask TEXT NOT NULL, people TEXT NOT NULL, bytes BLOB NOT NULL);"
)
_PROFILES = (
    "CREATE TABLE profile (person INTEGER NOT NULL REFERENCES person, name TEXT NOT NULL, value TEXT NOT NULL, "
    "PRIMARY KEY (person, name));"
)
_SHEETS = "CREATE TABLE sheet (digest TEXT PRIMARY KEY, bytes BLOB NOT NULL);"
_FORWARD = {
    1: ("ALTER TABLE mark ADD COLUMN reports INTEGER NOT NULL DEFAULT 0", _MESSAGES),
    2: (_PROFILES, _SHEETS),
}
"""What makes the next schema of each."""


LIMITS = ("memory", "operations", "bytes", "seconds")
"""Of a task; a home's settings have each as `most_…`."""


@dataclass(frozen=True)
class Settings:
    """What a device was told: where its server is, what it may spend, whether it rests.

    >>> Settings(server="example.org:9092").paused
    False
    >>> Settings(server="example.org")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The server's address must be HOST:PORT, such as example.org:9092, not 'example.org'.
    """

    server: str
    name: str = ""
    """What the device calls itself."""
    budget: str | None = None
    """As `homebody.privacy.Budget` reads it, for each person; none where all may be told that the method tells."""
    paused: bool = False
    node: int | None = None
    """The number that the network last knew it by."""
    proxy: str = ""
    """The address of the proxy that reports go through; none where no method is taken part in that shuffles."""
    most_memory: int = 2 << 30
    """Bytes that the work on a letter may hold at once, by its method's estimate."""
    most_operations: int = 10**12
    """Arithmetic operations that the work on a letter may take, likewise."""
    most_bytes: int = 256 << 20
    """Bytes that an answer may have, likewise."""
    most_seconds: float = 120.0
    """Seconds that the work for one person may take by the clock before it is given up."""

    def __post_init__(self) -> None:
        found = ADDRESS.fullmatch(str(self.server))
        if not found or not 0 < int(found["port"]) < 65536:
            raise HomebodyError(
                f"The server's address must be HOST:PORT, such as example.org:9092, not '{self.server}'."
            )
        if self.name:
            one_line(self.name, "A device's name", 200)
        if self.proxy:
            _check_proxy(self.proxy)
        for name in LIMITS:
            value = getattr(self, f"most_{name}")
            if type(value) not in ((int, float) if name == "seconds" else (int,)) or not 0 < value < 2**62:
                whole = "a number" if name == "seconds" else "a whole number"
                raise HomebodyError(f"A device's limit of {name} must be {whole} above 0, not {value!r}.")

    @property
    def limits(self) -> dict[str, int | float]:
        """What a task may take, by name."""
        return {name: getattr(self, f"most_{name}") for name in LIMITS}

    @property
    def host(self) -> str:
        """The server's name or number alone.

        >>> Settings(server="[::1]:9092").host
        '::1'
        """
        return self.server.rpartition(":")[0].strip("[]")


def limited(settings: Settings, limits: Mapping[str, float]) -> Settings:
    """Settings with other limits of a task, by their names.

    >>> limited(Settings(server="localhost:9092"), {"memory": 1e9}).limits["memory"]
    1000000000
    """
    for name in limits:
        if name not in LIMITS:
            raise unknown_name("limit of a device", name, LIMITS)
    whole = {name: int(value) if name != "seconds" and value == value // 1 else value for name, value in limits.items()}
    changes: dict[str, Any] = {f"most_{name}": value for name, value in whole.items()}
    return replace(settings, **changes)


class Store:
    """An open file. It belongs to the thread that opened it; another opens its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file = self.path / "home.sqlite"
        if not self.file.is_file():
            raise HomebodyError(f"There is no device in {self.path}; make one with `homebody client init`.")
        with self._named("opened"):
            self._db = sqlite3.connect(self.file, isolation_level=None, timeout=PATIENCE)
            try:
                self._refuse_others()
                for pragma in _PRAGMAS:
                    self._db.execute(pragma)
                self._bring_forward()
            except BaseException:
                self._db.close()
                raise

    @classmethod
    def lay_out(cls, folder: Path, settings: Settings) -> None:
        """The empty file, in a folder that has none: it is there whole, or not at all."""
        scratch = folder / "home.sqlite.partial"
        try:
            scratch.unlink(missing_ok=True)
            os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            database = sqlite3.connect(scratch, isolation_level=None)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = FULL")
                values = ", ".join(f"('{name}', {_quoted(value)})" for name, value in asdict(settings).items())
                database.executescript(
                    f"BEGIN; {_SCHEMA} {_MESSAGES} {_PROFILES} {_SHEETS} "
                    f"INSERT INTO setting VALUES {values}, ('changes', '0'); "
                    f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            finally:
                database.close()
            scratch.rename(folder / "home.sqlite")
        except (OSError, sqlite3.Error) as error:
            raise HomebodyError(f"No device can be made in {folder}: {error}.") from error

    def _refuse_others(self) -> None:
        version = self._version()
        if version > SCHEMA_VERSION:
            raise HomebodyError(
                f"The device in {self.path} was written by a newer Homebody (schema {version}); update to use it."
            )
        if version < 1:
            raise HomebodyError(f"{self.file} is not a device's store; make one with `homebody client init`.")

    def _bring_forward(self) -> None:
        """To the newest schema, step by step, all or nothing."""
        if self._version() == SCHEMA_VERSION:
            return
        with self._writing():
            for version in range(self._version(), SCHEMA_VERSION):
                for statement in _FORWARD[version]:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        return int(version)

    @property
    def settings(self) -> Settings:
        """As they are now, whoever changed them."""
        names = {one.name for one in fields(Settings)}
        rows = self._ask("SELECT name, value FROM setting")
        return Settings(**{name: json.loads(value) for name, value in rows if name in names})

    def configure(self, **changes: Any) -> Settings:
        """Change some settings, by name: all of those given, or none."""
        if changes.get("budget") is not None:
            from homebody.privacy import Budget

            Budget.parse(changes["budget"])
        with self._writing():
            settings = replace(self.settings, **changes)
            self._db.executemany(
                "INSERT OR REPLACE INTO setting VALUES (?, ?)",
                [(name, json.dumps(value)) for name, value in asdict(settings).items()],
            )
        return settings

    def limit(self, limits: Mapping[str, float]) -> Settings:
        """Change what a task may take, by name."""
        changed = limited(self.settings, limits)
        return self.configure(**{f"most_{name}": value for name, value in changed.limits.items()})

    @property
    def changes(self) -> int:
        """Rises with every change of people, histories or the catalogue: of what `population` is made of."""
        return int(self._ask("SELECT value FROM setting WHERE name = 'changes'")[0][0])

    @property
    def overruns(self) -> int:
        """Answers that left later than their estimate said: how long those took depended on somebody's history."""
        rows = self._ask("SELECT value FROM setting WHERE name = 'overruns'")
        return int(rows[0][0]) if rows else 0

    def note_overrun(self) -> None:
        """One more of `overruns`."""
        with self._writing():
            self._db.execute(
                "INSERT INTO setting VALUES ('overruns', '1') ON CONFLICT (name) DO UPDATE SET value = value + 1"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the one client that runs here, until the end of the block or of the process, however it ends."""
        lock = self._lock(2 * PROBE)
        try:
            if not self._free(lock, "BEGIN EXCLUSIVE"):
                raise HomebodyError(
                    f"A client is running in {self.path} already; stop it first, or use another folder."
                )
            yield
        finally:
            lock.close()

    def running(self) -> bool:
        """Whether a client runs here now."""
        lock = self._lock(0)
        try:
            return not self._free(lock, "SELECT COUNT(*) FROM sqlite_master")
        finally:
            lock.close()

    def _lock(self, patience: float) -> sqlite3.Connection:
        """An empty database whose lock dies with its process; children do not inherit it."""
        file = self.path / "running.lock"
        try:
            touch(file)
            return sqlite3.connect(file, isolation_level=None, timeout=patience)
        except (OSError, sqlite3.Error) as error:
            raise HomebodyError(f"{file} cannot be opened: {getattr(error, 'strerror', None) or error}.") from error

    def _free(self, lock: sqlite3.Connection, statement: str) -> bool:
        """Whether nobody is in the way of this statement."""
        try:
            lock.execute(statement).fetchall()
        except sqlite3.Error as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                return False
            raise HomebodyError(f"{self.path} cannot be locked: {error}.") from error
        return True

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._named("read"):
            return self._db.execute(question, values).fetchall()

    @contextmanager
    def _writing(self, *, data: bool = False) -> Iterator[None]:
        """A change, whole or not at all, and on the disk when this ends; `data`: it counts as one of `changes`."""
        with self._named("written"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                if data:
                    self._db.execute("UPDATE setting SET value = value + 1 WHERE name = 'changes'")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _scrub(self) -> None:
        """Empty the log of writes, which still holds what was deleted. A reader may hold that up: the next deletion
        that finds none does it then."""
        with self._named("cleared of what was deleted, which is not in use any more"):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def _named(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            unchanged = ", so nothing was changed" if done == "written" else ""
            raise HomebodyError(f"The device's store {self.file} cannot be {done}: {error}{unchanged}.") from error


_PRAGMAS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    # What is deleted is overwritten, not just forgotten.
    "PRAGMA secure_delete = ON",
    # Nothing of a history goes into a file elsewhere.
    "PRAGMA temp_store = MEMORY",
    "PRAGMA journal_size_limit = 4194304",
)


def finite(value: Any, what: str, most: float) -> int | float:
    """A number from -most to most.

    >>> finite(3, "A time", 1e9), finite(2.5, "A time", 1e9)
    (3, 2.5)
    >>> finite("noon", "A time", 1e9)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: A time must be a finite number, not 'noon'.
    """
    real = isinstance(value, int | float | Real) and not isinstance(value, bool)
    if real and -most <= value <= most:
        return int(value) if isinstance(value, Integral) else float(value)
    raise HomebodyError(f"{what} must be a finite number, not {value!r:.80}.")


def _check_proxy(url: str) -> None:
    """
    >>> _check_proxy("http://example.org:9094")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: A proxy on another machine is reached by https://, not 'http://example.org:9094'.
    """
    found = URL.fullmatch(url)
    if not found or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise HomebodyError(f"A proxy's address must be https://HOST:PORT, not '{url}'.")
    if found["scheme"] == "http" and not is_loopback(found["host"]):
        raise HomebodyError(f"A proxy on another machine is reached by https://, not '{url}'.")


def _quoted(value: object) -> str:
    return "'" + json.dumps(value).replace("'", "''") + "'"

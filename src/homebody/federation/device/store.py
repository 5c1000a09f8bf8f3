"""The tables of a device's SQLite file, `home.sqlite`. Change what a device stores here.

A new table or column goes into `_TABLES`, and as a step from the last schema version into `_MIGRATIONS`: files that an
earlier version made are brought forward when they are opened. The parts of a `Home` read and write the tables:

    people.py     person, profile
    history.py    interaction
    impressions.py  impression
    known_items.py  item, sheet
    models.py     shared, model, state
    outbox.py     begun, mark, answer, message
    sums.py       secure_sum
    views.py      view
    received.py   received
    queries.py    turn, query
    home.py       setting

Two things are files of their own: each person's ledger (home.py), and the roster (known_roster.py).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError
from homebody.files import holding, is_held

__all__ = ["SCHEMA_VERSION", "HomeStore"]

SCHEMA_VERSION = 7
WRITE_TIMEOUT = 30.0
"""Seconds to wait for other processes that write."""
PROBE_SECONDS = 0.5
"""Seconds for which a check whether a client is running may delay a client that starts."""
_TABLES = """
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE person (slot INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, active INTEGER NOT NULL);
CREATE TABLE interaction (
    id INTEGER PRIMARY KEY AUTOINCREMENT, person INTEGER NOT NULL REFERENCES person, item TEXT NOT NULL, time,
    rating REAL
);
CREATE INDEX interaction_of_person ON interaction (person, item);
CREATE TABLE item (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL);
CREATE TABLE shared (digest TEXT PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE model (
    one INTEGER PRIMARY KEY CHECK (one = 0), description TEXT NOT NULL, digest TEXT NOT NULL, release TEXT NOT NULL,
    step INTEGER NOT NULL
);
CREATE TABLE state (
    person INTEGER NOT NULL REFERENCES person, run TEXT NOT NULL, step INTEGER NOT NULL, base TEXT, bytes BLOB NOT NULL,
    PRIMARY KEY (person, run, step)
);
CREATE TABLE mark (
    id INTEGER PRIMARY KEY, person INTEGER NOT NULL REFERENCES person, run TEXT NOT NULL, release TEXT NOT NULL,
    digest TEXT NOT NULL, bytes INTEGER NOT NULL, at INTEGER NOT NULL, reports INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX mark_of_release ON mark (person, run, release, digest);
CREATE TABLE begun (
    person INTEGER NOT NULL, run TEXT NOT NULL, release TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (person, run, release, digest)
);
CREATE TABLE answer (mark INTEGER PRIMARY KEY REFERENCES mark, bytes BLOB NOT NULL);
"""
_MESSAGE = (
    "CREATE TABLE message (id INTEGER PRIMARY KEY, ask TEXT NOT NULL, people TEXT NOT NULL, bytes BLOB NOT NULL);"
)
_PROFILE = (
    "CREATE TABLE profile (person INTEGER NOT NULL REFERENCES person, name TEXT NOT NULL, value TEXT NOT NULL, "
    "PRIMARY KEY (person, name));"
)
_SHEET = "CREATE TABLE sheet (digest TEXT PRIMARY KEY, bytes BLOB NOT NULL);"
_VIEW = (
    "CREATE TABLE view (name TEXT PRIMARY KEY, uid INTEGER NOT NULL, token TEXT NOT NULL, "
    "answered INTEGER NOT NULL DEFAULT 0, away INTEGER NOT NULL DEFAULT 0, slow INTEGER NOT NULL DEFAULT 0, "
    "nonsense INTEGER NOT NULL DEFAULT 0);"
)
_SECURE_SUM = "CREATE TABLE secure_sum (terms TEXT PRIMARY KEY, state BLOB NOT NULL);"
_IMPRESSION = (
    "CREATE TABLE impression (id INTEGER PRIMARY KEY AUTOINCREMENT, person INTEGER NOT NULL REFERENCES person, "
    "time NOT NULL, ranked TEXT NOT NULL, shown TEXT NOT NULL, clicked TEXT NOT NULL);"
)
_OF_PERSON = "CREATE INDEX impression_of_person ON impression (person);"
_RECEIVED = (
    "CREATE TABLE received (name TEXT PRIMARY KEY, model TEXT NOT NULL, version INTEGER NOT NULL, bytes BLOB NOT NULL);"
)
_TURN = "CREATE TABLE turn (one INTEGER PRIMARY KEY CHECK (one = 0), number INTEGER NOT NULL, at INTEGER NOT NULL);"
_QUERY = (
    "CREATE TABLE query (id INTEGER PRIMARY KEY, person INTEGER NOT NULL REFERENCES person, turn INTEGER NOT NULL, "
    "nonce TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, model TEXT NOT NULL, event TEXT NOT NULL, state TEXT NOT NULL, "
    "at INTEGER NOT NULL, left INTEGER, told BLOB, answer BLOB);"
)
_MIGRATIONS = {
    1: ("ALTER TABLE mark ADD COLUMN reports INTEGER NOT NULL DEFAULT 0", _MESSAGE),
    2: (_PROFILE, _SHEET),
    3: (_VIEW,),
    4: (_SECURE_SUM,),
    5: (_IMPRESSION, _OF_PERSON),
    6: (_RECEIVED, _TURN, _QUERY),
}
"""The statements that lead from each schema version to the next."""
_PRAGMAS = (
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    # Deleted data is overwritten.
    "PRAGMA secure_delete = ON",
    # No part of a history goes into a temporary file elsewhere.
    "PRAGMA temp_store = MEMORY",
    "PRAGMA journal_size_limit = 4194304",
)


class HomeStore:
    """The open SQLite file of a device. Only the thread that opened it may use it; another thread opens its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "home.sqlite"
        if not self.file.is_file():
            raise HomebodyError(f"There is no device in {folder}; make one with `homebody client init`.")
        with self._explained("opened"):
            self.connection = sqlite3.connect(self.file, isolation_level=None, timeout=WRITE_TIMEOUT)
            try:
                version = self._version()
                if version > SCHEMA_VERSION:
                    raise HomebodyError(
                        f"The device in {folder} was written by a newer Homebody (schema {version}); update to use it."
                    )
                if version < 1:
                    raise HomebodyError(f"{self.file} is not a device's store; make one with `homebody client init`.")
                for pragma in _PRAGMAS:
                    self.connection.execute(pragma)
                self._migrate()
            except BaseException:
                self.connection.close()
                raise

    @staticmethod
    def create(folder: Path, settings: Mapping[str, Any]) -> None:
        """Create the file with empty tables and these settings, completely or not at all."""
        scratch = folder / "home.sqlite.partial"
        try:
            scratch.unlink(missing_ok=True)
            os.close(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            with closing(sqlite3.connect(scratch, isolation_level=None)) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = FULL")
                later = (_MESSAGE, _PROFILE, _SHEET, _VIEW, _SECURE_SUM, _IMPRESSION, _OF_PERSON)
                tables = " ".join((_TABLES, *later, _RECEIVED, _TURN, _QUERY))
                database.executescript(f"BEGIN; {tables} PRAGMA user_version = {SCHEMA_VERSION};")
                rows = [(name, json.dumps(value)) for name, value in {**settings, "changes": 0}.items()]
                database.executemany("INSERT INTO setting VALUES (?, ?)", rows)
                database.execute("COMMIT")
            scratch.rename(folder / "home.sqlite")
        except (OSError, sqlite3.Error) as error:
            raise HomebodyError(f"No device can be made in {folder}: {error}.") from error

    def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """The rows that a query finds."""
        with self._explained("read"):
            return self.connection.execute(query, values).fetchall()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Several queries that all see the same moment."""
        with self._explained("read"):
            self.connection.execute("BEGIN")
            try:
                yield self.connection
            finally:
                self.connection.execute("COMMIT")

    @contextmanager
    def writing(self, *, data: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction: when it ends, all of its writes are on the disk, or none. A nested one is part of the outer.
        data: the transaction counts as one of `changes`."""
        if self.connection.in_transaction:
            yield self.connection
            return
        with self._explained("written"):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                if data:
                    self.connection.execute("UPDATE setting SET value = value + 1 WHERE name = 'changes'")
                self.connection.execute("COMMIT")
            except BaseException:
                self.connection.rollback()
                raise

    @property
    def changes(self) -> int:
        """How often people, histories or the catalogue have changed: everything that a population is made from."""
        return int(self.read("SELECT value FROM setting WHERE name = 'changes'")[0][0])

    def scrub(self) -> None:
        """Empty the write-ahead log, which still holds deleted data. A reader may prevent it; then the next deletion
        does it."""
        with self._explained("cleared of what was deleted, which is not in use any more"):
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def only_client(self) -> AbstractContextManager[int]:
        """Be the only client that runs here, until the block ends or the process dies."""
        busy = f"A client is running in {self.folder} already; stop it first, or use another folder."
        return holding(self.folder / "running.lock", busy, patience=PROBE_SECONDS)

    def client_runs(self) -> bool:
        """Whether a client runs here now."""
        return is_held(self.folder / "running.lock")

    def close(self) -> None:
        self.connection.close()

    def _migrate(self) -> None:
        """Bring the tables to the newest schema, all steps or none."""
        if self._version() == SCHEMA_VERSION:
            return
        with self.writing():
            for version in range(self._version(), SCHEMA_VERSION):
                for statement in _MIGRATIONS[version]:
                    self.connection.execute(statement)
            self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _version(self) -> int:
        return int(self.connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        """Turn an error of SQLite into a sentence that names the file."""
        try:
            yield
        except sqlite3.Error as error:
            unchanged = ", so nothing was changed" if done == "written" else ""
            raise HomebodyError(f"The device's store {self.file} cannot be {done}: {error}{unchanged}.") from error

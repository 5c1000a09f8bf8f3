"""The append-only record of every privacy charge, each row chained to the one before it by a hash."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from homebody.errors import HomebodyError
from homebody.privacy.events import OBSERVERS, Charge

__all__ = ["Entry", "Ledger"]

SCHEMA_VERSION = 1
_GENESIS = "0" * 64
_COLUMNS = "release, part, observer, unit, event, previous, hash"
_SCHEMA = """
CREATE TABLE charge (
    id INTEGER PRIMARY KEY,
    release TEXT NOT NULL,
    part TEXT NOT NULL,
    observer TEXT NOT NULL,
    unit TEXT NOT NULL,
    event TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (release, part, observer, unit)
);
CREATE TRIGGER charge_is_never_changed BEFORE UPDATE ON charge
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER charge_is_never_removed BEFORE DELETE ON charge
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
"""


class Entry(NamedTuple):
    """One row: which release told whom what."""

    id: int
    release: str
    part: str
    observer: str
    unit: str
    event: str
    previous: str
    hash: str


class Ledger:
    """Charged before anything is released; answers ε for an observer.

    A release has a name; a name that is known counts again, under a number. Only one that repeats an earlier
    release bit by bit, as a resumed simulation does, tells nothing more.

    >>> from homebody.privacy import NonPrivate
    >>> ledger = Ledger()
    >>> ledger.epsilon("server")
    0.0
    >>> told = [Charge("server", "user", NonPrivate("plain updates"))]
    >>> ledger.charge("train/1", told)
    >>> ledger.charge("train/1", told, repeat=True)
    >>> ledger.charge("train/1", told)
    >>> [entry.release for entry in ledger.entries()]
    ['train/1', 'train/1#2']
    >>> ledger.epsilon("server"), ledger.epsilon("public")
    (inf, 0.0)
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _statements(_SCHEMA):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise HomebodyError(f"The ledger {path} cannot be opened: {error}.") from error
        if version > SCHEMA_VERSION:
            raise HomebodyError(
                f"The ledger {path} was written by a newer Homebody (schema {version}); update to read it."
            )
        self.verify()

    def charge(self, release: str, charges: Sequence[Charge], *, repeat: bool = False) -> None:
        """Write down what the release will tell, before it happens.

        repeat: if this release is known, it is the same one, run again bit by bit.
        """
        with self._transaction():
            again = "substr(release, 1, length(?) + 1) = ? || '#'"
            count = f"SELECT COUNT(DISTINCT release) FROM charge WHERE release = ? OR {again}"
            (known,) = self._db.execute(count, (release, release, release)).fetchone()
            if known and repeat:
                self._check_same(release, charges)
                return
            name = f"{release}#{known + 1}" if known else release
            last = self._db.execute("SELECT hash FROM charge ORDER BY id DESC LIMIT 1").fetchone()
            previous = last[0] if last else _GENESIS
            for charge in charges:
                row = (name, charge.part, charge.observer, charge.unit, charge.as_json(), previous)
                previous = _hash(*row)
                self._db.execute(f"INSERT INTO charge ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, previous))

    def entries(self) -> list[Entry]:
        """Every row, oldest first."""
        return [Entry(*row) for row in self._db.execute(f"SELECT id, {_COLUMNS} FROM charge ORDER BY id")]

    def releases(self) -> int:
        """How many releases were charged."""
        (count,) = self._db.execute("SELECT COUNT(DISTINCT release) FROM charge").fetchone()
        return int(count)

    def epsilon(self, observer: str, unit: str = "user") -> float:
        """The ε certified against this observer, over everything released so far."""
        query = "SELECT COUNT(*) FROM charge WHERE observer = ? AND unit = ?"
        (releases,) = self._db.execute(query, (observer, unit)).fetchone()
        return math.inf if releases else 0.0

    def epsilons(self) -> dict[str, float]:
        """ε for each observer."""
        return {observer: self.epsilon(observer) for observer in OBSERVERS}

    def verify(self) -> None:
        """Refuse a ledger whose chain is broken."""
        previous = _GENESIS
        for entry in self.entries():
            if entry.previous != previous or entry.hash != _hash(*entry[1:-1]):
                raise HomebodyError(f"The ledger {self.path} was tampered with: row {entry.id} breaks its chain.")
            previous = entry.hash

    def close(self) -> None:
        self._db.close()

    def _check_same(self, release: str, charges: Sequence[Charge]) -> None:
        query = "SELECT part, observer, unit, event FROM charge WHERE release = ? ORDER BY id"
        before = self._db.execute(query, (release,)).fetchall()
        if before != [(charge.part, charge.observer, charge.unit, charge.as_json()) for charge in charges]:
            raise HomebodyError(f"Release {release} is in the ledger with other events than it would have now.")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _hash(*row: str) -> str:
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""

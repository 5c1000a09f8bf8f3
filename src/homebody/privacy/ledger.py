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
_SCHEMA = """
CREATE TABLE charge (
    id INTEGER PRIMARY KEY,
    release TEXT NOT NULL,
    observer TEXT NOT NULL,
    unit TEXT NOT NULL,
    event TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (release, observer, unit)
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
    observer: str
    unit: str
    event: str
    previous: str
    hash: str


class Ledger:
    """Charged before anything is released; answers ε for an observer.

    A release has a name. Charging the same release again changes nothing: a simulation that resumes repeats
    the release bit by bit, so nothing more is told.

    >>> from homebody.privacy import NonPrivate
    >>> ledger = Ledger()
    >>> ledger.epsilon("server")
    0.0
    >>> ledger.charge("train/1", [Charge("server", "user", NonPrivate("plain updates"))])
    >>> ledger.charge("train/1", [Charge("server", "user", NonPrivate("plain updates"))])
    >>> len(ledger.entries()), ledger.epsilon("server"), ledger.epsilon("public")
    (1, inf, 0.0)
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        try:
            self._db = sqlite3.connect(":memory:" if path is None else path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
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

    def charge(self, release: str, charges: Sequence[Charge]) -> None:
        """Write down what the release will tell, before it happens."""
        with self._transaction():
            last = self._db.execute("SELECT hash FROM charge ORDER BY id DESC LIMIT 1").fetchone()
            previous = last[0] if last else _GENESIS
            for charge in charges:
                event = json.dumps(charge.as_dict()["event"], sort_keys=True)
                found = self._db.execute(
                    "SELECT event FROM charge WHERE release = ? AND observer = ? AND unit = ?",
                    (release, charge.observer, charge.unit),
                ).fetchone()
                if found:
                    if found[0] != event:
                        raise HomebodyError(f"Release {release} is in the ledger with another event.")
                    continue
                row = (release, charge.observer, charge.unit, event, previous)
                previous = _hash(*row)
                self._db.execute(
                    "INSERT INTO charge (release, observer, unit, event, previous, hash) VALUES (?, ?, ?, ?, ?, ?)",
                    (*row, previous),
                )

    def entries(self) -> list[Entry]:
        """Every row, oldest first."""
        query = "SELECT id, release, observer, unit, event, previous, hash FROM charge ORDER BY id"
        return [Entry(*row) for row in self._db.execute(query)]

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
            row = (entry.release, entry.observer, entry.unit, entry.event, entry.previous)
            if entry.previous != previous or entry.hash != _hash(*row):
                raise HomebodyError(f"The ledger {self.path} was tampered with: row {entry.id} breaks its chain.")
            previous = entry.hash

    def close(self) -> None:
        self._db.close()

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

"""SQLite: a file of one machine, or memory."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from homebody.database.base import PATIENCE, Cursor, Database
from homebody.errors import HomebodyError, Unavailable
from homebody.files import is_full, touch

__all__ = ["SQLite", "statements"]

_UNUSABLE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_PASSING = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY)


class SQLite(Database):
    dialect = "sqlite"
    _begin = "BEGIN IMMEDIATE"
    _begin_reading = "BEGIN"

    def __init__(self, where: Path | str | None, what: str, name: str | None = None) -> None:
        super().__init__(name or ("in memory" if where is None else str(where)), what)
        db = None
        try:
            if where is not None and not Path(where).exists():
                touch(Path(where))  # SQLite would let others read it, and would follow a link
        except OSError as error:
            kind = Unavailable if is_full(error) else HomebodyError
            raise kind(f"The {what} {self.name} cannot be opened: {error.strerror}.") from error
        try:
            place = ":memory:" if where is None else where
            db = sqlite3.connect(place, isolation_level=None, timeout=PATIENCE, check_same_thread=False)
            self._db = db
            self._write_ahead()
            db.execute("PRAGMA synchronous = FULL")
        except sqlite3.DatabaseError as error:
            if db is not None:
                db.close()
            kind = Unavailable if error.sqlite_errorcode & 0xFF in _PASSING else HomebodyError
            locked = where is not None and not os.access(Path(where).parent, os.W_OK)
            why = "nothing can be written to its folder" if locked else error
            raise kind(f"The {what} {self.name} cannot be opened: {why}.") from error

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        with self._lock:
            if self._depth and not self._db.in_transaction:
                raise self._undone()
            try:
                return self._db.execute(sql, parameters)
            except sqlite3.DatabaseError as error:
                raise self._sentence(error) from error

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        with self.transaction():
            try:
                self._db.executemany(sql, rows)
            except sqlite3.DatabaseError as error:
                raise self._sentence(error) from error

    def close(self) -> None:
        self._db.close()

    def _write_ahead(self) -> None:
        """Keep a log of writes ahead of them. SQLite refuses this at once, without its usual patience, where another
        process does the same at the same moment."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def _control(self, sql: str) -> None:
        try:
            self._db.execute(sql)
        except sqlite3.DatabaseError as error:
            # The error says only that there is no transaction if an earlier statement lost it.
            if self._depth and not self._db.in_transaction and error.sqlite_errorcode == sqlite3.SQLITE_ERROR:
                raise self._undone() from error
            raise self._sentence(error) from error

    def _open(self) -> bool:
        return self._db.in_transaction

    def _run(self, script: str) -> None:
        for statement in statements(script):
            self.execute(statement)

    def _has_versions(self) -> bool:
        return self.execute("SELECT 1 FROM sqlite_master WHERE name = 'homebody_schema'").fetchone() is not None

    def _sentence(self, error: Exception) -> Exception:
        whole = getattr(error, "sqlite_errorcode", 0)
        code = whole & 0xFF
        reading = whole in (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) and not reading:
            return self._full(str(error))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._held()
        if reading or code in _UNUSABLE:
            return HomebodyError(f"The {self._what} {self.name} cannot be used: {error}.")
        return error


def statements(script: str) -> Iterator[str]:
    """The statements of a script for SQLite, each ending a line.

    >>> list(statements("SELECT 1;\\nSELECT 2;"))
    ['SELECT 1;\\n', 'SELECT 2;\\n']
    """
    statement = ""
    for line in script.strip().splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        yield statement

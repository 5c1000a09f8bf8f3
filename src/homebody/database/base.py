"""The common part of both databases: transactions, schemas and error messages."""

from __future__ import annotations

import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol

from homebody.errors import HomebodyError, Unavailable

__all__ = ["PATIENCE", "Conflict", "Cursor", "Database"]

PATIENCE = 30.0
"""Seconds to wait for others who write."""
Conflict = sqlite3.IntegrityError
"""Raised by both databases if a row breaks a rule of its table."""
_VERSIONS = "CREATE TABLE IF NOT EXISTS homebody_schema (component TEXT PRIMARY KEY, version INTEGER NOT NULL)"


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int:
        """How many rows it changed."""

    def fetchone(self) -> Any:
        """The next row, or None."""

    def fetchall(self) -> list[Any]:
        """Every row that is left."""

    def __iter__(self) -> Iterator[Any]: ...


class Database(ABC):
    """A connection that several threads may share: they take turns.

    >>> from homebody.database import connect
    >>> database = connect(None)
    >>> database.migrate("list", ["CREATE TABLE list (number INTEGER PRIMARY KEY, name TEXT NOT NULL)"])
    >>> with database.transaction():
    ...     _ = database.execute("INSERT INTO list (number, name) VALUES (?, ?)", (1, "one"))
    >>> database.execute("SELECT name FROM list").fetchall()
    [('one',)]
    >>> database.close()
    """

    dialect: Literal["sqlite", "postgresql"]

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        """Where it is, for a sentence; never a password."""
        self.undone = 0
        """How many transactions, or parts of one, were undone: what was read within them may not be so any more."""
        self._what = what
        self._lock = threading.RLock()
        self._depth = 0

    def __repr__(self) -> str:
        return f"<Database {self.name}>"

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Run one statement; outside a transaction it is one by itself."""

    @abstractmethod
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Run one statement for each row."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; what is not committed is undone."""

    def one(self, sql: str, *parameters: Any) -> Any:
        """The first row of a query, or None."""
        return self.execute(sql, parameters).fetchone()

    def put(self, table: str, over: str = "", *, add: bool = False, **values: Any) -> None:
        """Insert a row by the names of its columns. over: the columns of a key, where the row takes the place of one of
        the same key; with `add`, its numbers are added to that one's."""
        sql = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
        if over:
            others = [name for name in values if name not in over.split(", ")]
            changes = (f"{name} = {f'{table}.{name} + ' if add else ''}excluded.{name}" for name in others)
            sql += f" ON CONFLICT ({over}) DO UPDATE SET {', '.join(changes)}"
        self.execute(sql, tuple(values.values()))

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        """The rows of a query, one by one; also what fails half-way is a sentence."""
        try:
            yield from self.execute(sql, parameters)
        except sqlite3.DatabaseError as error:
            raise self._sentence(error) from error

    def transaction(self) -> AbstractContextManager[None]:
        """All that is done within it, or nothing. One process writes at a time; the others wait. Within another
        transaction it is a part of it: one that fails is undone alone."""
        return self._step(self._begin)

    def snapshot(self) -> AbstractContextManager[None]:
        """All reads within it see the state of one moment; writers are not blocked."""
        return self._step(self._begin_reading)

    @contextmanager
    def _step(self, begin: str) -> Iterator[None]:
        """A transaction, or a part of the one around it."""
        with self._lock:
            part, keep, undo = f"SAVEPOINT part{self._depth}", "COMMIT", "ROLLBACK"
            if self._depth:
                begin, keep, undo = part, f"RELEASE {part}", f"ROLLBACK TO {part}"
            try:
                self._control(begin)
            except BaseException:
                if not self._depth and self._open():  # PostgreSQL began, and waited for its turn in vain
                    self._control(undo)
                raise
            self._depth += 1
            try:
                yield
                self._control(keep)
            except BaseException:
                self.undone += 1
                if self._open():  # SQLite undoes it all by itself where the disk is full
                    self._control(undo)
                raise
            finally:
                self._depth -= 1

    def migrate(
        self, component: str, steps: Sequence[str], *, postgresql: Sequence[str] | None = None, header: bool = False
    ) -> None:
        """Bring a component's tables to the newest schema: each script makes it out of the one before.

        postgresql: scripts to run there instead. header: SQLite keeps the version in the file's header, which is one
        component's alone.
        """
        with self.transaction():
            version = self.version(component, header=header)
            if version > len(steps):
                raise HomebodyError(
                    f"The {component} {self.name} was written by a newer Homebody (schema {version}); "
                    "update to read it."
                )
            if version == len(steps):
                return
            scripts = steps if self.dialect == "sqlite" or postgresql is None else postgresql
            for script in scripts[version:]:
                self._run(script)
            if header and self.dialect == "sqlite":
                self.execute(f"PRAGMA user_version = {len(steps)}")
            else:
                self._run(_VERSIONS)
                self.put("homebody_schema", "component", component=component, version=len(steps))

    def version(self, component: str, *, header: bool = False) -> int:
        """The schema version of a component's tables; 0 if there are none."""
        if header and self.dialect == "sqlite":
            return int(self.one("PRAGMA user_version")[0])
        if not self._has_versions():
            return 0
        row = self.one("SELECT version FROM homebody_schema WHERE component = ?", component)
        return int(row[0]) if row else 0

    _begin: str
    _begin_reading: str

    @abstractmethod
    def _control(self, sql: str) -> None:
        """Run a statement that begins or ends a transaction."""

    @abstractmethod
    def _open(self) -> bool:
        """Whether the transaction that was begun is still there."""

    @abstractmethod
    def _run(self, script: str) -> None:
        """Run a script of several statements."""

    @abstractmethod
    def _has_versions(self) -> bool:
        """Whether any component has its version in a table."""

    @abstractmethod
    def _sentence(self, error: Exception) -> Exception:
        """What went wrong, for a person; errors of ours stay as they are."""

    def _undone(self) -> HomebodyError:
        return Unavailable(f"The step that was being written to the {self._what} {self.name} was undone.")

    def _full(self, why: str) -> HomebodyError:
        return Unavailable(
            f"The disk takes no more of the {self._what} {self.name} ({why}): "
            "nothing of this step was written; make room and start again."
        )

    def _held(self) -> HomebodyError:
        return Unavailable(
            f"Another process has held the {self._what} {self.name} for more than {PATIENCE:g} seconds; "
            "try again once it is done."
        )

"""One door to SQLite and PostgreSQL: the same SQL, the same transactions, the same sentences where they fail.

SQL is written once, for SQLite, with `?` marks. In PostgreSQL, INTEGER, BLOB and TEXT columns become BIGINT, BYTEA and
TEXT that sorts by its bytes, so that both compare alike.
"""

from __future__ import annotations

import re
from pathlib import Path

from homebody.database.base import PATIENCE, Conflict, Cursor, Database
from homebody.database.postgresql import PostgreSQL
from homebody.database.sqlite import SQLite, statements
from homebody.errors import HomebodyError

__all__ = ["PATIENCE", "Conflict", "Cursor", "Database", "connect", "statements"]


def connect(where: Path | str | None, *, what: str = "database", name: str | None = None) -> Database:
    """A SQLite file, created if missing; a PostgreSQL database by its URL; None for one in memory.

    what, name: what it is called in sentences; a file goes by its path there, unless another name is given.

    >>> connect("mysql://ann:secret@host/db")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: A database is a file or an address that begins with postgresql://, not with mysql:.
    """
    text = "" if where is None else str(where)
    scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]+(?=:/)", text)  # a single letter is a Windows drive
    if isinstance(where, str) and re.match(r"postgres(ql)?://", where):
        return PostgreSQL(where, what)
    if scheme:  # what follows it may hold a password
        given = f"{scheme[0]}:{'//' if '://' in text[: scheme.end() + 3] else '/'}"
        if given.startswith("postgres"):
            raise HomebodyError(
                f"A PostgreSQL database is given as postgresql://user:password@host:port/name, not with {given} ahead."
            )
        raise HomebodyError(
            f"A database is a file or an address that begins with postgresql://, not with {scheme[0]}:."
        )
    return SQLite(where, what, name)

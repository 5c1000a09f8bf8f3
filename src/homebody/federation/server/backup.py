"""The server's whole state in one SQLite file, and back again: also the way from one kind of database to the other."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from homebody.database import Conflict, Database, connect
from homebody.errors import HomebodyError
from homebody.federation.server.records import COMPONENT, Records

__all__ = ["backup", "restore"]

_TABLES = {
    "charge": "id, release, part, observer, unit, event, round, relation, sampling, code, digest, previous, hash",
    "device": "fingerprint, public_key, name, first, people, added, removed",
    "fault": "fingerprint, count, set_aside",
    "proxy": "public_key, name, added",
    "item": "number, id, name",
    "open_round": "release, users, sampling, size, population",
    "checkpoint": "number, about, size, sha256, saved",
    "checkpoint_part": "checkpoint, part, content",
    "round": "step, line",
    "counter": "name, value",
    "note": "name, value",
    "sheet": "number, content",
}
"""What there is to copy, with its columns; the first is the order."""


def backup(records: Records, to: Path) -> None:
    """Write everything as it stands at one moment into a new file; nobody who writes is held up."""
    if to.exists():
        raise HomebodyError(f"{to} is there already: a backup is not written over another.")
    records.ledger().close()  # its tables are there, and its chain is whole
    try:
        with tempfile.TemporaryDirectory(prefix=".backup-", dir=to.parent) as folder:
            scratch = Path(folder) / to.name
            with _opened(scratch, to) as copy:
                Records(copy).ledger().close()
                with records.database.snapshot(), copy.transaction():
                    _copy(records.database, copy)
                Records(copy).ledger().close()
            scratch.chmod(0o600)
            scratch.replace(to)
            _settle(to.parent)
    except OSError as error:
        raise HomebodyError(f"No backup can be written to {to}: {error.strerror or error}.") from error


def restore(source: Path, database: Database) -> None:
    """Fill an empty database from a backup, all or nothing; the backup stays as it is."""
    if not source.is_file():
        raise HomebodyError(f"There is no backup {source}.")
    with tempfile.TemporaryDirectory(prefix="homebody-") as folder:
        scratch = Path(folder) / source.name
        try:
            shutil.copyfile(source, scratch)
        except OSError as error:
            raise HomebodyError(f"The backup {source} cannot be read: {error.strerror or error}.") from error
        with _opened(scratch, source) as copy, database.transaction():
            if not copy.version(COMPONENT):
                raise HomebodyError(f"{source} is no backup of a Homebody server.")
            Records(copy).ledger().close()  # an old one is brought forward, and its chain is whole
            Records(database).ledger().close()
            for table in _TABLES:
                if database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
                    raise HomebodyError(
                        f"The database {database.name} is not empty: a backup is restored into a new one."
                    )
            try:
                _copy(copy, database)
            except Conflict as error:
                raise HomebodyError(f"The backup {source} is damaged: {error}.") from error
            Records(database).ledger().close()


@contextmanager
def _opened(scratch: Path, called: Path) -> Iterator[Database]:
    database = connect(scratch, what="backup", name=str(called))
    try:
        yield database
    finally:
        database.close()


def _copy(source: Database, target: Database) -> None:
    for table, columns in _TABLES.items():
        names = columns.split(", ")
        insert = f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
        rows = _parts(source) if table == "checkpoint_part" else _rows(source, table, columns, names[0])
        while some := list(islice(rows, 1 if table == "checkpoint_part" else 1000)):
            target.executemany(insert, some)


def _rows(source: Database, table: str, columns: str, order: str) -> Iterator[Any]:
    return source.rows(f"SELECT {columns} FROM {table} ORDER BY {order}")


def _parts(source: Database) -> Iterator[Any]:
    """The parts of checkpoints, one at a time: all of them may be more than the memory holds."""
    keys = source.execute("SELECT checkpoint, part FROM checkpoint_part ORDER BY checkpoint, part").fetchall()
    for key in keys:
        query = "SELECT checkpoint, part, content FROM checkpoint_part WHERE checkpoint = ? AND part = ?"
        yield source.execute(query, tuple(key)).fetchone()


def _settle(folder: Path) -> None:
    """Have the folder itself on the disk: a file whose name is lost is lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

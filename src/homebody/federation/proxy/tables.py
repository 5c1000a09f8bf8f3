"""The tables of a proxy's database, and what goes in and out of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from homebody.database import Database, connect
from homebody.errors import HomebodyError
from homebody.federation.envelopes import REPORT_BYTES, Envelope

__all__ = [
    "AT_ONCE",
    "DATABASE",
    "KEY_BYTES",
    "ReportBatch",
    "Epoch",
    "VerifiedMessage",
    "Sender",
    "create",
    "keyed",
    "opened",
    "under_random_keys",
]

DATABASE = "proxy.sqlite"
KEY_BYTES = 16
"""Of the random key that a report is held under."""
AT_ONCE = 1 << 14
"""Reports that one statement inserts, at most."""
_TABLES = f"""
CREATE TABLE proxy (secret BLOB NOT NULL);
CREATE TABLE senders (mark BLOB PRIMARY KEY, proxy INTEGER NOT NULL, people INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE epochs (
    id INTEGER PRIMARY KEY, epoch BLOB NOT NULL UNIQUE, facts TEXT NOT NULL, k INTEGER NOT NULL, closes REAL NOT NULL,
    state INTEGER NOT NULL
);
CREATE TABLE pools (
    pool INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, first REAL NOT NULL, devices INTEGER NOT NULL,
    reports INTEGER NOT NULL, low BLOB NOT NULL, state INTEGER NOT NULL
);
CREATE TABLE heaps (
    heap INTEGER PRIMARY KEY AUTOINCREMENT, pool INTEGER NOT NULL, devices INTEGER NOT NULL, reports INTEGER NOT NULL
);
CREATE INDEX heaps_of_pools ON heaps (pool);
CREATE TABLE held (
    heap INTEGER NOT NULL, key BLOB NOT NULL, report BLOB NOT NULL, PRIMARY KEY (heap, key)
) WITHOUT ROWID;
CREATE TABLE quotas (
    epoch INTEGER NOT NULL, mark BLOB NOT NULL, used INTEGER NOT NULL, pool INTEGER NOT NULL, PRIMARY KEY (epoch, mark)
) WITHOUT ROWID;
CREATE TABLE accepted (
    epoch INTEGER NOT NULL, mark BLOB NOT NULL, content BLOB NOT NULL, PRIMARY KEY (epoch, mark)
) WITHOUT ROWID;
CREATE TABLE batches (
    number BLOB PRIMARY KEY, epoch INTEGER NOT NULL, size INTEGER NOT NULL, reports BLOB NOT NULL,
    CHECK (length(reports) = {REPORT_BYTES} * size)
) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, amount INTEGER NOT NULL) WITHOUT ROWID;
"""


class Sender(NamedTuple):
    """Someone who may send."""

    proxy: bool
    """A proxy before this one, whose batches are of many devices."""
    people: int
    """Of a device: who live with it. Of a proxy: devices that a batch of it counts for, at most; 0: no such bound."""


class VerifiedMessage(NamedTuple):
    """An envelope whose signature holds, from someone known."""

    key: bytes
    sender: Sender
    envelope: Envelope


class Epoch(NamedTuple):
    """What the next hop has said of an epoch, once and for all."""

    epoch: bytes
    facts: Mapping[str, Any]
    closes: float
    """When this proxy closes it."""
    open: bool


class ReportBatch(NamedTuple):
    number: bytes
    epoch: bytes
    reports: bytes

    @property
    def size(self) -> int:
        return len(self.reports) // REPORT_BYTES


def keyed(secret: bytes, *parts: bytes) -> bytes:
    """What stands for these in a list that nobody reads without the secret."""
    return blake2b(b"".join(parts), key=secret, digest_size=16).digest()


def create(folder: Path) -> None:
    """An empty database, for its owner alone."""
    path = folder / DATABASE
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    database = connect(path, what="proxy's database")
    database.migrate("proxy", [_TABLES])
    with database.transaction():
        database.execute("INSERT INTO proxy (secret) VALUES (?)", (os.urandom(32),))
    database.close()


def opened(folder: Path) -> Database:
    """A proxy's database, as it is used."""
    path = folder / DATABASE
    if not path.exists():
        raise HomebodyError(f"The proxy in {folder} has lost its database {DATABASE}: make another proxy.")
    database = connect(path, what="proxy's database")
    # What is deleted is overwritten with zeros, in the tables; the log of what was written keeps it a little longer.
    for pragma in ("secure_delete = ON", "cache_size = -65536", "wal_autocheckpoint = 0", "temp_store = MEMORY"):
        database.execute(f"PRAGMA {pragma}").fetchall()
    database.migrate("proxy", [_TABLES])
    # A statement that inserts many reports counts them off here.
    database.execute("CREATE TEMP TABLE places (place INTEGER PRIMARY KEY)")
    database.execute(
        "INSERT INTO places WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
        "SELECT i FROM n",
        (AT_ONCE - 1,),
    )
    return database


def under_random_keys(reports: bytes) -> tuple[bytes, bytes]:
    """Draw a key for each of these reports; both, in the order of the keys."""
    size = len(reports) // REPORT_BYTES
    keys = np.frombuffer(os.urandom(KEY_BYTES * size), dtype=np.uint8).reshape(size, KEY_BYTES)
    order = np.argsort(keys[:, :8].copy().view(">u8")[:, 0])
    ordered = np.frombuffer(reports, dtype=np.uint8).reshape(size, REPORT_BYTES)[order]
    return keys[order].tobytes(), ordered.tobytes()

"""What a proxy stores as a helper of secure sums.

An epoch is one sum. Its key is a file of its own, on the disk before anybody learns the public half, and is deleted
once a set is opened or the epoch closes. The answer is in the database before it is given. So the proxy may be killed
at any moment: asked about the same set again, it gives the same bytes. An epoch that closed is remembered by its number
alone, and is never opened again.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from nacl import bindings as sodium

from homebody.database import Database
from homebody.federation.proxy.epoch_secrets import Secrets

__all__ = ["TABLES", "EpochSum", "EpochSums"]

TABLES = """
CREATE TABLE servers (mark BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE sums (
    epoch BLOB PRIMARY KEY, server BLOB NOT NULL, key BLOB NOT NULL, terms BLOB NOT NULL, closes REAL NOT NULL,
    opened BLOB, answer BLOB, state INTEGER NOT NULL
);
"""
_OPEN, _CLOSED = 0, 1
MOST_OPEN = 64
"""Epochs that may be open at a time."""


class EpochSum(NamedTuple):
    """An epoch that is open."""

    epoch: bytes
    server: bytes
    """The mark of the server that asked for it."""
    key: bytes
    """The public key that seeds are sealed to."""
    terms: bytes
    closes: float
    secret: bytes
    """The other half; empty once a set was opened."""
    opened: bytes | None
    """The digest of the set that was opened."""
    answer: bytes | None


class EpochSums:
    """The epochs of a helper. Changes are made within a transaction of the database."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._db, self._secrets = database, Secrets(folder, "sums")
        self._ends: dict[bytes, float] = {}
        """When each epoch ends by the monotonic clock, from the first tick that saw it."""

    def allow(self, mark: bytes) -> None:
        """Let a server have sums opened."""
        self._db.execute("INSERT OR IGNORE INTO servers (mark) VALUES (?)", (mark,))

    def forbid(self, mark: bytes) -> bool:
        return self._db.execute("DELETE FROM servers WHERE mark = ?", (mark,)).rowcount > 0

    def servers(self) -> set[bytes]:
        return {mark for (mark,) in self._db.execute("SELECT mark FROM servers").fetchall()}

    def open(self, epoch: bytes, server: bytes, terms: bytes, closes: float) -> str:
        """Begin an epoch: `open`, also if it was begun with the same terms before; `conflict`, `closed` or `full`.

        A server has one sum at a time: its others are closed.
        """
        row = self._db.one("SELECT server, terms, state FROM sums WHERE epoch = ?", epoch)
        if row is not None:
            if row[2] == _CLOSED:
                return "closed"
            return "open" if (row[0], row[1]) == (server, terms) else "conflict"
        query = "SELECT epoch FROM sums WHERE state = ? AND server = ?"
        for (other,) in self._db.execute(query, (_OPEN, server)).fetchall():
            self._close(other)
        if self.count() >= MOST_OPEN:
            return "full"
        self._secrets.make(epoch)
        public = sodium.crypto_scalarmult_base(self._secrets.read(epoch))
        self._db.put("sums", epoch=epoch, server=server, key=public, terms=terms, closes=closes, state=_OPEN)
        return "open"

    def find(self, epoch: bytes, now: float) -> EpochSum | str:
        """An epoch that is open; or `unknown`, or `closed`."""
        query = "SELECT server, key, terms, closes, opened, answer, state FROM sums WHERE epoch = ?"
        row = self._db.one(query, epoch)
        if row is None:
            return "unknown"
        server, key, terms, closes, opened, answer, state = row
        secret = self._secrets.read(epoch)
        if state == _CLOSED or now >= closes or not (secret or answer):
            return "closed"
        return EpochSum(epoch, server, key, terms, closes, b"" if answer else secret, opened, answer)

    def keep(self, epoch: bytes, opened: bytes, answer: bytes) -> tuple[bytes, bytes] | None:
        """Store the answer to the one set that is opened, unless there is one; returns what is stored, or None if the
        epoch has closed."""
        change = "UPDATE sums SET opened = ?, answer = ? WHERE epoch = ? AND state = ? AND opened IS NULL"
        self._db.execute(change, (opened, answer, epoch, _OPEN))
        return self._db.one("SELECT opened, answer FROM sums WHERE epoch = ? AND state = ?", epoch, _OPEN)

    def forget_secret(self, epoch: bytes) -> None:
        """Delete the key of an epoch whose set was opened, once the answer is on the disk."""
        self._secrets.forget(epoch)

    def tick(self, now: float) -> list[bytes]:
        """Close epochs that have ended; returns them."""
        closed = []
        for epoch, closes in self._db.execute("SELECT epoch, closes FROM sums WHERE state = ?", (_OPEN,)).fetchall():
            lasted = time.monotonic() >= self._ends.setdefault(epoch, time.monotonic() + closes - now)
            if now >= closes or lasted:
                self._close(epoch)
                closed.append(epoch)
        return closed

    def _close(self, epoch: bytes) -> None:
        self._ends.pop(epoch, None)
        self._secrets.forget(epoch)
        change = "UPDATE sums SET state = ?, key = x'', terms = x'', opened = NULL, answer = NULL WHERE epoch = ?"
        self._db.execute(change, (_CLOSED, epoch))

    def tidy(self) -> None:
        """Delete keys that a kill left behind: of sums that are answered, closed, or were never begun."""
        query = "SELECT epoch FROM sums WHERE state = ? AND answer IS NULL"
        self._secrets.keep_only({epoch for (epoch,) in self._db.execute(query, (_OPEN,)).fetchall()})

    def count(self) -> int:
        """Epochs that are open."""
        return int(self._db.one("SELECT count(*) FROM sums WHERE state = ?", _OPEN)[0])

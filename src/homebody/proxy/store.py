"""What a proxy keeps on its disk: reports one by one under random keys, and no line from any of them to a sender.

While an epoch is open there are, beside the reports, two lists under a secret of the epoch: how much each sender has
sent (its quota), and which messages were taken (so that a repetition is known). Both are of keyed hashes, and cannot be
read without the secret; it goes when the epoch closes, and they after it.

A pool is what is held of an epoch since its last release. It is released as a whole, by cutting batches off it in the
order of the keys, which is random and has nothing to do with who came when.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from homebody.database import connect
from homebody.errors import HomebodyError
from homebody.proxy.settings import Settings
from homebody.runtime.sealed import REPORT_BYTES, Envelope

__all__ = ["DATABASE", "Batch", "Epoch", "Message", "Sender", "Store", "keyed"]

DATABASE = "proxy.sqlite"
WINDOW = 4
"""Batches of an epoch that may be under way at a time."""
SWEEP = 4096
"""Rows that are swept away in one step."""
_PAGE = 1024
_OPEN, _RELEASED, _DROPPED = 0, 1, 2
_CLOSED, _SWEPT = 1, 2
_TABLES = f"""
CREATE TABLE proxy (secret BLOB NOT NULL);
CREATE TABLE senders (mark BLOB PRIMARY KEY, proxy INTEGER NOT NULL, people INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE epochs (
    id INTEGER PRIMARY KEY, epoch BLOB NOT NULL UNIQUE, facts TEXT NOT NULL, k INTEGER NOT NULL, closes REAL NOT NULL,
    secret BLOB NOT NULL, state INTEGER NOT NULL
);
CREATE TABLE pools (
    pool INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, first REAL NOT NULL, devices INTEGER NOT NULL,
    reports INTEGER NOT NULL, state INTEGER NOT NULL
);
CREATE TABLE held (
    pool INTEGER NOT NULL, key BLOB NOT NULL, report BLOB NOT NULL, PRIMARY KEY (pool, key)
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
    """Of a device: who live with it. Of a proxy: how many devices it stands for; 0: as many as are waited for here."""


class Message(NamedTuple):
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


class Batch(NamedTuple):
    number: bytes
    epoch: bytes
    reports: bytes

    @property
    def size(self) -> int:
        return len(self.reports) // REPORT_BYTES


def keyed(secret: bytes, *parts: bytes) -> bytes:
    """What stands for these in a list that nobody reads without the secret."""
    return blake2b(b"".join(parts), key=secret, digest_size=16).digest()


class Store:
    """A proxy's database. One thread uses it; what changes it is called within `transaction`, which is all or nothing.

    Other processes may read it, and say who may send.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        path = folder / DATABASE
        if not path.exists():
            raise HomebodyError(f"The proxy in {folder} has lost its database {DATABASE}: make another proxy.")
        self._settings = settings
        self._db = connect(path, what="proxy's database")
        # What is deleted is overwritten with zeros.
        for pragma in ("secure_delete = ON", "cache_size = -65536", "wal_autocheckpoint = 0", "temp_store = MEMORY"):
            self._db.execute(f"PRAGMA {pragma}").fetchall()
        self._db.migrate("proxy", [_TABLES])
        # Many reports are inserted by one statement, which counts them off here.
        self._db.execute("CREATE TEMP TABLE places (place INTEGER PRIMARY KEY)")
        self._db.execute(
            "INSERT INTO places WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "SELECT i FROM n",
            (_MOST_AT_ONCE - 1,),
        )
        (self._secret,) = self._db.execute("SELECT secret FROM proxy").fetchone()
        self.transaction = self._db.transaction

    @staticmethod
    def create(folder: Path) -> None:
        """An empty database, for its owner alone."""
        path = folder / DATABASE
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        # Small pages: a report lands on any of them, and each that is touched is written whole.
        with sqlite3.connect(path) as db:
            db.execute(f"PRAGMA page_size = {_PAGE}")
            db.execute("VACUUM")
        db.close()
        database = connect(path, what="proxy's database")
        database.migrate("proxy", [_TABLES])
        with database.transaction():
            database.execute("INSERT INTO proxy (secret) VALUES (?)", (os.urandom(32),))
        database.close()

    def close(self) -> None:
        self._db.close()

    def checkpoint(self, mode: str) -> None:
        """Bring what was written ahead into the tables. Afterwards the log that tells what came together is written
        over; TRUNCATE empties it."""
        self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()

    # Who may send.

    def mark(self, key: bytes) -> bytes:
        """What a sender's key is written down as."""
        return keyed(self._secret, key)

    def senders(self) -> dict[bytes, Sender]:
        found = self._db.execute("SELECT mark, proxy, people FROM senders").fetchall()
        return {mark: Sender(bool(proxy), people) for mark, proxy, people in found}

    def allow(self, key: bytes, sender: Sender) -> None:
        self._db.execute(
            "INSERT INTO senders (mark, proxy, people) VALUES (?, ?, ?) "
            "ON CONFLICT (mark) DO UPDATE SET proxy = excluded.proxy, people = excluded.people",
            (self.mark(key), int(sender.proxy), sender.people),
        )

    def forbid(self, key: bytes) -> bool:
        """Whether it was allowed before."""
        return self._db.execute("DELETE FROM senders WHERE mark = ?", (self.mark(key),)).rowcount > 0

    def changed_elsewhere(self) -> int:
        """A number that is another after another process has written."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # Epochs.

    def epochs(self) -> dict[bytes, Epoch]:
        found = self._db.execute("SELECT epoch, facts, closes, state FROM epochs").fetchall()
        return {epoch: Epoch(epoch, json.loads(facts), closes, state == 0) for epoch, facts, closes, state in found}

    def open_epoch(self, epoch: bytes, facts: Mapping[str, Any], now: float) -> Epoch:
        """Keep what the next hop says of an epoch; what was said first stands."""
        if not self._db.execute("SELECT 1 FROM epochs WHERE epoch = ?", (epoch,)).fetchone():
            left = facts["closes"] - now
            closes = facts["closes"] - min(self._settings.lead, max(0.0, left) / 10)
            self._db.execute(
                "INSERT INTO epochs (epoch, facts, k, closes, secret, state) VALUES (?, ?, ?, ?, ?, 0)",
                (epoch, json.dumps({**facts, "closes": closes}), facts["k"], closes, os.urandom(32)),
            )
        return self.epochs()[epoch]

    def close_epoch(self, epoch: bytes, reason: str) -> None:
        """Forget who sent how much; drop what is not released. The rest of its lists is swept away later."""
        row = self._db.execute("SELECT id FROM epochs WHERE epoch = ? AND state = 0", (epoch,)).fetchone()
        if row is None:
            return
        self._drop(row[0], (_OPEN,), reason)
        self._db.execute("UPDATE epochs SET secret = x'', facts = '{}', state = ? WHERE id = ?", (_CLOSED, row[0]))
        self.count("epochs_closed", 1)

    def _drop(self, row: int, states: tuple[int, ...], reason: str) -> None:
        for state in states:
            found = self._db.execute(
                "SELECT pool, reports FROM pools WHERE epoch = ? AND state = ?", (row, state)
            ).fetchall()
            for pool, reports in found:
                self._db.execute("UPDATE pools SET state = ? WHERE pool = ?", (_DROPPED, pool))
                self.count(f"dropped: {reason}", reports)

    # Reports come in.

    def accept(self, messages: list[Message], now: float) -> list[str]:
        """Take messages in, or not: `accepted`, `repeated`, `conflict`, `limit`, `full`, `closed` or `unknown`."""
        epochs: dict[bytes, Any] = {}
        fresh: dict[int, list[bytes]] = {}
        room = self._settings.most_held - self.held()
        outcomes = []
        for message in messages:
            epoch = message.envelope.epoch
            if epoch not in epochs:
                epochs[epoch] = self._db.execute(
                    "SELECT id, secret, closes, k FROM epochs WHERE epoch = ?", (epoch,)
                ).fetchone()
            row = epochs[epoch]
            if row is None:
                outcomes.append("unknown")
            elif not row[1] or now >= row[2]:
                outcomes.append("closed")
            else:
                outcome = self._accept(message, row, room, now, fresh)
                if outcome == "accepted":
                    room -= message.envelope.size
                outcomes.append(outcome)
        for pool, parts in fresh.items():
            self._hold(pool, b"".join(parts))
        return outcomes

    def _accept(
        self, message: Message, row: tuple[int, bytes, float, int], room: int, now: float, fresh: dict[int, list[bytes]]
    ) -> str:
        epoch, secret, _, k = row
        envelope, size = message.envelope, message.envelope.size
        mark, content = keyed(secret, message.key, envelope.number), keyed(secret, envelope.reports)
        found = self._db.execute("SELECT content FROM accepted WHERE epoch = ? AND mark = ?", (epoch, mark)).fetchone()
        if found:
            return "repeated" if found[0] == content else "conflict"
        who = keyed(secret, message.key)
        used, last = self._db.execute(
            "SELECT used, pool FROM quotas WHERE epoch = ? AND mark = ?", (epoch, who)
        ).fetchone() or (0, 0)
        if not message.sender.proxy and used + size > self.allowance(message.sender, k):
            return "limit"
        if size > room:
            return "full"
        pool = self._open_pool(epoch, now)
        devices = 0 if last == pool else self._weight(message.sender)
        self._db.execute("INSERT INTO accepted (epoch, mark, content) VALUES (?, ?, ?)", (epoch, mark, content))
        self._db.execute(
            "INSERT INTO quotas (epoch, mark, used, pool) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (epoch, mark) DO UPDATE SET used = excluded.used, pool = excluded.pool",
            (epoch, who, used + size, pool),
        )
        self._db.execute(
            "UPDATE pools SET devices = devices + ?, reports = reports + ? WHERE pool = ?", (devices, size, pool)
        )
        fresh.setdefault(pool, []).append(envelope.reports)
        return "accepted"

    def allowance(self, sender: Sender, k: int) -> int:
        """How many reports a device may send in an epoch."""
        return sender.people * min(k, self._settings.most)

    def _weight(self, sender: Sender) -> int:
        """How many devices someone stands for. A proxy has mixed those of many before it sends."""
        return (sender.people or self._settings.least_devices) if sender.proxy else 1

    def _open_pool(self, epoch: int, now: float) -> int:
        found = self._db.execute("SELECT pool FROM pools WHERE epoch = ? AND state = ?", (epoch, _OPEN)).fetchone()
        if found:
            return int(found[0])
        self._db.execute(
            "INSERT INTO pools (epoch, first, devices, reports, state) VALUES (?, ?, 0, 0, ?)", (epoch, now, _OPEN)
        )
        return int(self._db.execute("SELECT last_insert_rowid()").fetchone()[0])

    def _hold(self, pool: int, reports: bytes) -> None:
        """Each report under a key of its own. In the order of the keys: neighbours are written once."""
        step = _MOST_AT_ONCE * REPORT_BYTES
        for start in range(0, len(reports), step):
            keys, ordered = _under_random_keys(reports[start : start + step])
            # One statement for all: a row at a time would wait for the interpreter's lock at each. Were a key there
            # already, everything would be undone; ABORT, the default, keeps a copy of every page for that.
            self._db.execute(
                "INSERT OR ROLLBACK INTO held (pool, key, report) "
                f"SELECT ?1, substr(?2, place * {_KEY} + 1, {_KEY}), substr(?3, place * {REPORT_BYTES} + 1, "
                f"{REPORT_BYTES}) FROM places WHERE place < ?4",
                (pool, keys, ordered, len(keys) // _KEY),
            )

    def held(self) -> int:
        """Reports that are on the disk."""
        (pooled,) = self._db.execute("SELECT coalesce(sum(reports), 0) FROM pools").fetchone()
        (under_way,) = self._db.execute("SELECT coalesce(sum(size), 0) FROM batches").fetchone()
        return int(pooled) + int(under_way)

    # Reports go out.

    def tick(self, now: float, log: Callable[..., None] = lambda *_, **__: None) -> list[bytes]:
        """Release what is due and close what has ended; the epochs that were closed."""
        closed = []
        found = self._db.execute("SELECT id, epoch, closes FROM epochs WHERE state = 0").fetchall()
        for row, epoch, closes in found:
            pool = self._db.execute(
                "SELECT pool, first, devices, reports FROM pools WHERE epoch = ? AND state = ?", (row, _OPEN)
            ).fetchone()
            if pool:
                number, first, devices, reports = pool
                if first > now:  # the clock was put back
                    first = now
                    self._db.execute("UPDATE pools SET first = ? WHERE pool = ?", (now, number))
                waited = now - first >= self._settings.hold or now >= closes
                if waited and devices >= self._settings.least_devices:
                    self._db.execute("UPDATE pools SET state = ? WHERE pool = ?", (_RELEASED, number))
                    self.count("releases", 1)
                    log("released", reports=reports)
            if now >= closes:
                self.close_epoch(epoch, "too few devices")
                closed.append(epoch)
        return closed

    def cut(self) -> Batch | None:
        """Cut the next batch off what is released: its reports leave their rows and get a number, at once."""
        found = self._db.execute(
            "SELECT pools.pool, pools.epoch, epochs.epoch FROM pools JOIN epochs ON epochs.id = pools.epoch "
            "WHERE pools.state = ? AND (SELECT count(*) FROM batches WHERE batches.epoch = pools.epoch) < ? "
            "ORDER BY pools.pool LIMIT 1",
            (_RELEASED, WINDOW),
        ).fetchone()
        if found is None:
            return None
        pool, row, epoch = found
        last = self._boundary("held", "pool", "key", pool, self._settings.batch)
        number = os.urandom(16)
        # Bytes put together as text stay the bytes they are; the table checks the length.
        self._db.execute(
            "INSERT INTO batches (number, epoch, size, reports) SELECT ?, ?, count(*), "
            "CAST(coalesce(group_concat(report, ''), '') AS BLOB) FROM held WHERE pool = ? AND key <= ?",
            (number, row, pool, last),
        )
        self._db.execute("DELETE FROM held WHERE pool = ? AND key <= ?", (pool, last))
        size, reports = self._db.execute("SELECT size, reports FROM batches WHERE number = ?", (number,)).fetchone()
        self._db.execute("UPDATE pools SET reports = reports - ? WHERE pool = ?", (size, pool))
        self._db.execute("DELETE FROM pools WHERE pool = ? AND reports = 0", (pool,))
        return Batch(number, epoch, reports)

    def under_way(self) -> list[Batch]:
        """Batches that were cut and are not done."""
        return [
            Batch(*row)
            for row in self._db.execute(
                "SELECT number, epochs.epoch, reports FROM batches JOIN epochs ON epochs.id = batches.epoch"
            ).fetchall()
        ]

    def finish(self, batch: Batch, outcome: str) -> None:
        """The next hop has answered for good: `forwarded`, or why it does not want it."""
        if outcome == "forwarded":
            self.count("forwarded_reports", batch.size)
            self.count("forwarded_batches", 1)
        else:
            self.count(f"dropped: {outcome}", batch.size)
        self._db.execute("DELETE FROM batches WHERE number = ?", (batch.number,))

    def end_epoch(self, epoch: bytes) -> None:
        """The next hop takes nothing of it any more: what is left of it, released or not, goes nowhere."""
        row = self._db.execute("SELECT id FROM epochs WHERE epoch = ?", (epoch,)).fetchone()
        if row:
            self._drop(row[0], (_OPEN, _RELEASED), "closed by the next hop")
            self.close_epoch(epoch, "closed by the next hop")

    def sweep(self) -> bool:
        """Delete a little of what nobody needs; whether there is more."""
        for (pool,) in self._db.execute("SELECT pool FROM pools WHERE state = ?", (_DROPPED,)).fetchall():
            last = self._boundary("held", "pool", "key", pool, SWEEP)
            gone = self._db.execute("DELETE FROM held WHERE pool = ? AND key <= ?", (pool, last)).rowcount
            if gone < SWEEP:
                self._db.execute("DELETE FROM pools WHERE pool = ?", (pool,))
            return True
        for (epoch,) in self._db.execute("SELECT id FROM epochs WHERE state = ?", (_CLOSED,)).fetchall():
            gone = 0
            for table in ("quotas", "accepted"):
                last = self._boundary(table, "epoch", "mark", epoch, SWEEP)
                gone += self._db.execute(f"DELETE FROM {table} WHERE epoch = ? AND mark <= ?", (epoch, last)).rowcount
            if not gone:
                self._db.execute("UPDATE epochs SET state = ? WHERE id = ?", (_SWEPT, epoch))
            return True
        return False

    def _boundary(self, table: str, group: str, key: str, which: int, count: int) -> bytes:
        """The key of the last of the first so many rows."""
        found = self._db.execute(
            f"SELECT {key} FROM {table} WHERE {group} = ? ORDER BY {key} LIMIT 1 OFFSET ?", (which, count - 1)
        ).fetchone()
        return bytes(found[0]) if found else b"\xff" * _KEY

    # Counts.

    def count(self, name: str, amount: int) -> None:
        self._db.execute(
            "INSERT INTO counters (name, amount) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET amount = amount + excluded.amount",
            (name, amount),
        )

    def counters(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, amount FROM counters ORDER BY name").fetchall())


_KEY = 16
_MOST_AT_ONCE = 1 << 14


def _under_random_keys(reports: bytes) -> tuple[bytes, bytes]:
    """Draw a key for each of these reports; both, in the order of the keys."""
    import numpy as np

    size = len(reports) // REPORT_BYTES
    keys = np.frombuffer(os.urandom(_KEY * size), dtype=np.uint8).reshape(size, _KEY)
    order = np.argsort(keys[:, :8].copy().view(">u8")[:, 0])
    ordered = np.frombuffer(reports, dtype=np.uint8).reshape(size, REPORT_BYTES)[order]
    return keys[order].tobytes(), ordered.tobytes()

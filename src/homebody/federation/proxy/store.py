"""A proxy's database: each report is a row under a random key, with nothing that links it to a sender.

While an epoch is open, two more tables say how much each sender has sent (its quota) and which messages were accepted
(to recognise repetitions). Both hold hashes keyed with a secret of the epoch. The secret is a file of its own (see
`epoch_secrets.py`), which is deleted when the epoch closes; the rows follow.

A pool is what is held of an epoch since its last release. A pool is released as a whole: batches are cut off it in the
order of the random keys, which does not depend on who sent when. Before that its reports lie in heaps of a few thousand
reports, each of at least as many devices as a release needs: inserting rows at random places of a heap writes far fewer
pages of the disk than inserting them at random places of a pool of millions.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from homebody.database import PATIENCE, Database, connect
from homebody.errors import HomebodyError
from homebody.federation.envelopes import REPORT_BYTES, Envelope
from homebody.federation.epoch import BIT_BYTES, SEAL_BYTES, Epoch
from homebody.federation.proxy.epoch_secrets import Secrets
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.sums import TABLES as SUMS
from homebody.federation.proxy.sums import EpochSums

__all__ = ["DATABASE", "ProxyStore", "SealedBatch", "Sender", "Ticked", "VerifiedMessage", "create"]

DATABASE = "proxy.sqlite"
KEY_BYTES = 16
"""Of the random key of a report."""
BATCH_REPORTS = 16_384
"""One-bit reports in a proxy's batch, at most."""
AT_ONCE = 1 << 14
"""The most reports that one statement inserts."""
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
_LONG_REPORTS = """
ALTER TABLE batches RENAME TO short_batches;
CREATE TABLE batches (
    number BLOB PRIMARY KEY, epoch INTEGER NOT NULL, size INTEGER NOT NULL, reports BLOB NOT NULL,
    CHECK (length(reports) % size = 0)
) WITHOUT ROWID;
INSERT INTO batches SELECT number, epoch, size, reports FROM short_batches;
DROP TABLE short_batches;
"""
_STEPS = (_TABLES, SUMS, _LONG_REPORTS)
WINDOW = 4
"""The most batches of an epoch that are being sent at a time."""
HEAP = 8192
"""Reports after which the next heap begins, if they come from enough devices."""
SWEEP = 4096
"""Rows that one step of `sweep` deletes."""
_OPEN, _RELEASED, _DROPPED = 0, 1, 2
_CLOSED, _SWEPT = 1, 2
_LAST = b"\xff" * KEY_BYTES
_OF_POOL = "heap IN (SELECT heap FROM heaps WHERE pool = ?)"


class Sender(NamedTuple):
    """A registered sender."""

    proxy: bool
    """Whether it is a proxy, whose batches come from many devices."""
    people: int
    """Of a device: its people. Of a proxy: the most devices that a batch counts for; 0: no bound."""


class VerifiedMessage(NamedTuple):
    """An envelope with a valid signature of a registered sender."""

    key: bytes
    sender: Sender
    envelope: Envelope


class SealedBatch(NamedTuple):
    number: bytes
    epoch: bytes
    reports: bytes
    size: int
    """How many."""


def keyed(secret: bytes, *parts: bytes) -> bytes:
    """A hash of these parts, keyed with a secret."""
    return blake2b(b"".join(parts), key=secret, digest_size=16).digest()


def create(folder: Path) -> None:
    """Create an empty database that only its owner can read."""
    path = folder / DATABASE
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(opened(folder)) as database:
        database.put("proxy", secret=os.urandom(32))


def opened(folder: Path) -> Database:
    path = folder / DATABASE
    if not path.exists():
        raise HomebodyError(f"The proxy in {folder} has lost its database {DATABASE}: make another proxy.")
    database = connect(path, what="proxy's database")
    # What is deleted is overwritten with zeros, in the tables; the log of what was written keeps it a little longer.
    for pragma in ("secure_delete = ON", "cache_size = -65536", "wal_autocheckpoint = 0", "temp_store = MEMORY"):
        database.execute(f"PRAGMA {pragma}").fetchall()
    database.migrate("proxy", _STEPS)
    # A statement that inserts many reports counts them off here.
    database.execute("CREATE TEMP TABLE places (place INTEGER PRIMARY KEY)")
    counting = "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ?) SELECT i FROM n"
    database.execute(f"INSERT INTO places {counting}", (AT_ONCE - 1,))
    return database


def under_random_keys(reports: bytes, each: int = REPORT_BYTES) -> tuple[bytes, bytes]:
    """Draw a key for each report, of so many bytes. Returns keys and reports in the order of the keys."""
    size = len(reports) // each
    keys = np.frombuffer(os.urandom(KEY_BYTES * size), dtype=np.uint8).reshape(size, KEY_BYTES)
    order = np.argsort(keys[:, :8].copy().view(">u8")[:, 0])
    ordered = np.frombuffer(reports, dtype=np.uint8).reshape(size, each)[order]
    return keys[order].tobytes(), ordered.tobytes()


class Ticked(NamedTuple):
    """What `tick` did."""

    released: list[int]
    """The number of reports of each release."""
    closed: dict[bytes, int]
    """The number of reports that were dropped with each closed epoch."""
    why: dict[bytes, str]
    """Why they were dropped, for the log."""


class ProxyStore:
    """A proxy's database. One thread uses it, and changes it within `transaction`. Other processes may read it, and
    register senders."""

    def __init__(self, folder: Path, settings: ProxySettings) -> None:
        self._settings, self._db = settings, opened(folder)
        self._secrets = Secrets(folder)
        self.sums = EpochSums(self._db, folder)
        (self._secret,) = self._db.one("SELECT secret FROM proxy")
        self.transaction = self._db.transaction
        self._ends: dict[bytes, float] = {}
        """When each open epoch ends by the monotonic clock, from the first tick that saw it."""

    def close(self) -> None:
        self._db.close()

    def checkpoint(self, mode: Literal["PASSIVE", "TRUNCATE"]) -> bool:
        """Bring the write-ahead log into the tables; returns whether no reader was in the way. The log shows what was
        written together; it is then overwritten from its beginning, and TRUNCATE empties it."""
        self._db.execute("PRAGMA busy_timeout = 100").fetchall()  # whoever reads may read on
        try:
            ((busy, _, _),) = self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * PATIENCE)}").fetchall()
        return not busy

    def mark(self, key: bytes) -> bytes:
        """The hash that a sender's key is stored as."""
        return keyed(self._secret, key)

    def senders(self) -> dict[bytes, Sender]:
        rows = self._db.execute("SELECT mark, proxy, people FROM senders").fetchall()
        return {mark: Sender(bool(proxy), people) for mark, proxy, people in rows}

    def allow(self, key: bytes, sender: Sender) -> None:
        self._db.put("senders", "mark", mark=self.mark(key), proxy=int(sender.proxy), people=sender.people)

    def forbid(self, key: bytes) -> bool:
        """Remove a sender; returns whether it was registered."""
        return self._db.execute("DELETE FROM senders WHERE mark = ?", (self.mark(key),)).rowcount > 0

    def changed_elsewhere(self) -> int:
        """A number that changes when another process has written."""
        return int(self._db.one("PRAGMA data_version")[0])

    def epochs(self) -> dict[bytes, Epoch | None]:
        """All epochs that were ever known here, as this proxy describes them; None for a closed one."""
        rows = self._db.execute("SELECT epoch, facts, state FROM epochs").fetchall()
        return {epoch: Epoch.read(json.loads(facts)) if state == 0 else None for epoch, facts, state in rows}

    def open_epoch(self, epoch: Epoch, now: float) -> Epoch | None:
        """Store the next hop's description of an epoch, unless there is one; None if the epoch is closed."""
        if not self._db.one("SELECT 1 FROM epochs WHERE epoch = ?", epoch.id):
            left = epoch.closes - now
            earlier = replace(epoch, closes=epoch.closes - min(self._settings.lead, max(0.0, left) / 10))
            self._secrets.make(epoch.id)
            facts = json.dumps(earlier.to_json())
            self._db.put("epochs", epoch=earlier.id, facts=facts, k=earlier.k, closes=earlier.closes, state=0)
        return self.epochs()[epoch.id]

    def close_epoch(self, epoch: bytes, reason: str) -> int:
        """Delete an epoch's secret and drop its unreleased reports; returns how many. `sweep` deletes the rest."""
        row = self._db.one("SELECT id FROM epochs WHERE epoch = ? AND state = 0", epoch)
        if row is None:
            return 0
        self._ends.pop(epoch, None)
        self._secrets.forget(epoch)  # if nothing can be written then, the epoch still takes no more
        length = f"json_object('bytes', coalesce(json_extract(facts, '$.bytes'), {BIT_BYTES}))"
        self._db.execute(f"UPDATE epochs SET facts = {length}, state = ? WHERE id = ?", (_CLOSED, row[0]))
        self.count("epochs_closed", 1)
        return self._drop(row[0], _OPEN, reason)

    def tidy_secrets(self) -> None:
        """Delete secrets of epochs that are not open, which a power failure may have left. Only the proxy's process may
        call it, since it writes a secret before its epoch."""
        self._secrets.keep_only({epoch for epoch, known in self.epochs().items() if known is not None})
        self.sums.tidy()

    def end_epoch(self, epoch: bytes, reason: str) -> int:
        """Close an epoch and drop its released reports too."""
        row = self._db.one("SELECT id FROM epochs WHERE epoch = ?", epoch)
        return self.close_epoch(epoch, reason) + (self._drop(row[0], _RELEASED, reason) if row else 0)

    def _drop(self, row: int, state: int, reason: str) -> int:
        query = "SELECT coalesce(sum(reports), 0) FROM pools WHERE epoch = ? AND state = ?"
        (reports,) = self._db.one(query, row, state)
        self._db.execute("UPDATE pools SET state = ? WHERE epoch = ? AND state = ?", (_DROPPED, row, state))
        if reports:
            self.count(f"dropped: {reason}", reports)
        return int(reports)

    def accept(self, messages: list[VerifiedMessage], now: float) -> list[str]:
        """The outcome of each message: `accepted`, `repeated`, `conflict`, `limit`, `full`, `closed` or `unknown`."""
        epochs: dict[bytes, Any] = {}
        fresh: dict[tuple[int, int], list[bytes]] = {}
        room = self._settings.most_held - self.held()
        outcomes = []
        for message in messages:
            epoch = message.envelope.epoch
            if epoch not in epochs:
                stored = self._db.one("SELECT id, closes, k, facts FROM epochs WHERE epoch = ?", epoch)
                epochs[epoch] = stored and (stored[0], self._secrets.read(epoch), *stored[1:3], _each(stored[3]))
            row = epochs[epoch]
            if row is None:
                outcomes.append("unknown")
            elif not row[1] or now >= row[2]:
                outcomes.append("closed")
            elif message.envelope.each != row[4]:
                outcomes.append("other size")
            else:
                outcome = self._accept(message, row[:4], room, now, fresh)
                if outcome == "accepted":
                    room -= message.envelope.size
                outcomes.append(outcome)
        for (heap, each), parts in fresh.items():
            self._hold(heap, b"".join(parts), each)
        return outcomes

    def _accept(
        self,
        message: VerifiedMessage,
        row: tuple[int, bytes, float, int],
        room: int,
        now: float,
        fresh: dict[tuple[int, int], list[bytes]],
    ) -> str:
        epoch, secret, _, k = row
        envelope, size = message.envelope, message.envelope.size
        mark, content = keyed(secret, message.key, envelope.number), keyed(secret, envelope.reports)
        before = self._db.one("SELECT content FROM accepted WHERE epoch = ? AND mark = ?", epoch, mark)
        if before:
            return "repeated" if before[0] == content else "conflict"
        who = keyed(secret, message.key)
        quota = self._db.one("SELECT used, pool FROM quotas WHERE epoch = ? AND mark = ?", epoch, who)
        used, last = quota or (0, 0)
        if not message.sender.proxy and used + size > message.sender.people * min(k, self._settings.most):
            return "limit"
        if size > room:
            return "full"
        pool, heap = self._open_heap(epoch, now)
        # Which heap it was is written nowhere: a heap may have few others. A device counts in its first one alone.
        devices = _of_batch(message.sender, size, k) if message.sender.proxy else int(last != pool)
        self._db.put("accepted", epoch=epoch, mark=mark, content=content)
        self._db.put("quotas", "epoch, mark", epoch=epoch, mark=who, used=used + size, pool=pool)
        for table, which in (("pools", pool), ("heaps", heap)):
            change = f"UPDATE {table} SET devices = devices + ?, reports = reports + ? WHERE {table[:-1]} = ?"
            self._db.execute(change, (devices, size, which))
        fresh.setdefault((heap, envelope.each), []).append(envelope.reports)
        return "accepted"

    def _open_heap(self, epoch: int, now: float) -> tuple[int, int]:
        row = self._db.one("SELECT pool FROM pools WHERE epoch = ? AND state = ?", epoch, _OPEN)
        pool = int(row[0]) if row else 0
        if not pool:
            pool = self._inserted("pools", epoch=epoch, first=now, devices=0, reports=0, low=b"\0", state=_OPEN)
        (heap,) = self._db.one("SELECT max(heap) FROM heaps WHERE pool = ?", pool)
        if heap:
            devices, size = self._db.one("SELECT devices, reports FROM heaps WHERE heap = ?", heap)
        if not heap or (size >= HEAP and devices >= self._settings.least_devices):
            heap = self._inserted("heaps", pool=pool, devices=0, reports=0)
        return pool, heap

    def _inserted(self, table: str, **values: Any) -> int:
        self._db.put(table, **values)
        return int(self._db.one("SELECT last_insert_rowid()")[0])

    def _hold(self, heap: int, reports: bytes, each: int) -> None:
        """Insert each report under its own key, in the order of the keys, so that each page is written once."""
        step = AT_ONCE * each
        for start in range(0, len(reports), step):
            keys, ordered = under_random_keys(reports[start : start + step], each)
            # One statement for all: a row at a time would wait for the interpreter's lock at each. Were a key there
            # already, everything would be undone; ABORT, the default, keeps a copy of every page for that.
            self._db.execute(
                "INSERT OR ROLLBACK INTO held (heap, key, report) "
                f"SELECT ?1, substr(?2, place * {KEY_BYTES} + 1, {KEY_BYTES}), substr(?3, place * {each} + 1, "
                f"{each}) FROM places WHERE place < ?4",
                (heap, keys, ordered, len(keys) // KEY_BYTES),
            )

    def held(self) -> int:
        """The number of reports on the disk."""
        (pooled,) = self._db.one("SELECT coalesce(sum(reports), 0) FROM pools")
        (under_way,) = self._db.one("SELECT coalesce(sum(size), 0) FROM batches")
        return int(pooled) + int(under_way)

    def tick(self, now: float) -> Ticked:
        """Release pools that are due, and close epochs that have ended."""
        ticked = Ticked([], {}, {})
        rows = self._db.execute("SELECT id, epoch, closes, k, facts FROM epochs WHERE state = 0").fetchall()
        for row, epoch, closes, k, facts in rows:
            lasted = time.monotonic() >= self._ends.setdefault(epoch, time.monotonic() + closes - now)
            over, few, why = now >= closes or lasted or not self._secrets.read(epoch), "too few devices", ""
            query = "SELECT pool, first, devices, reports FROM pools WHERE epoch = ? AND state = ?"
            pool = self._db.one(query, row, _OPEN)
            if pool:
                number, first, devices, reports = pool
                if first > now:  # the clock was put back
                    first = now
                    self._db.execute("UPDATE pools SET first = ? WHERE pool = ?", (now, number))
                waited = now - first >= self._settings.hold or over
                # Nobody sends more than k: so many are of at least as many people as the server counts on.
                needed = k * (Epoch.read(json.loads(facts)).among - 1) + 1
                least = self._settings.least_devices
                few, has, needs = (few, devices, least) if devices < least else ("too few reports", reports, needed)
                why = f"{few}: {has:,} of {needs:,}"
                if waited and has >= needs:
                    self._db.execute("UPDATE pools SET state = ? WHERE pool = ?", (_RELEASED, number))
                    self.count("releases", 1)
                    ticked.released.append(reports)
            if over:
                ticked.closed[epoch], ticked.why[epoch] = self.close_epoch(epoch, few), why
        return ticked

    def cut(self) -> SealedBatch | None:
        """Cut the next batch off a released pool, in one transaction; None if there is none."""
        next_heap = self._db.one(
            "SELECT pools.pool, pools.epoch, epochs.epoch, epochs.facts FROM pools "
            "JOIN epochs ON epochs.id = pools.epoch WHERE pools.state = ? AND "
            "(SELECT count(*) FROM batches WHERE batches.epoch = pools.epoch) < ? "
            "ORDER BY pools.pool LIMIT 1",
            _RELEASED,
            WINDOW,
        )
        if next_heap is None:
            return None
        pool, row, epoch, facts = next_heap
        # As many bytes at most as a batch of one-bit reports may have: whoever is next takes no more.
        most = max(1, min(self._settings.batch, BATCH_REPORTS * REPORT_BYTES // _each(facts)))
        last, number = self._lowest(pool, most), os.urandom(16)
        # Bytes put together as text stay the bytes they are; the table checks the length.
        self._db.execute(
            "INSERT INTO batches (number, epoch, size, reports) SELECT ?, ?, count(*), "
            "CAST(coalesce(group_concat(report, ''), '') AS BLOB) FROM "
            f"(SELECT report FROM held WHERE {_OF_POOL} AND key <= ? ORDER BY key)",
            (number, row, pool, last),
        )
        self._db.execute(f"DELETE FROM held WHERE {_OF_POOL} AND key <= ?", (pool, last))
        size, reports = self._db.one("SELECT size, reports FROM batches WHERE number = ?", number)
        self._db.execute("UPDATE pools SET reports = reports - ?, low = ? WHERE pool = ?", (size, last, pool))
        if not self._db.one("SELECT reports FROM pools WHERE pool = ?", pool)[0]:
            self._forget_pool(pool)
        return SealedBatch(number, epoch, reports, size)

    def _lowest(self, pool: int, count: int) -> bytes:
        """The largest key among the first `count` reports of a pool."""
        left, low = self._db.one("SELECT reports, low FROM pools WHERE pool = ?", pool)
        if left <= count:
            return _LAST
        # Keys are uniform above those that were cut: look no further than where nearly always enough of them are.
        start = int.from_bytes(low[:8], "big")
        share, last = (count + 5 * count**0.5 + 5) / left, None
        while last is None:
            limit = min(2**64 - 1, start + int((2**64 - start) * share)).to_bytes(8, "big") + _LAST[8:]
            some = f"SELECT key FROM held WHERE {_OF_POOL} AND key <= ? ORDER BY key LIMIT ?"
            (last,) = self._db.one(f"SELECT max(key) FROM ({some})", pool, limit, count)
            share *= 2
        return bytes(last)

    def _forget_pool(self, pool: int) -> None:
        self._db.execute("DELETE FROM heaps WHERE pool = ?", (pool,))
        self._db.execute("DELETE FROM pools WHERE pool = ?", (pool,))

    def under_way(self) -> list[SealedBatch]:
        """Batches that were cut and have no final answer yet."""
        query = "SELECT number, epochs.epoch, reports, size FROM batches JOIN epochs ON epochs.id = batches.epoch"
        return [SealedBatch(*row) for row in self._db.execute(query).fetchall()]

    def finish(self, batch: SealedBatch, outcome: str) -> None:
        """Delete a batch with its final outcome: `forwarded`, or why the next hop refused it."""
        if outcome == "forwarded":
            self.count("forwarded_reports", batch.size)
            self.count("forwarded_batches", 1)
        else:
            self.count(f"dropped: {outcome}", batch.size)
        self._db.execute("DELETE FROM batches WHERE number = ?", (batch.number,))

    def sweep(self) -> bool:
        """Delete some of the rows that are not needed any more; returns whether there may be more."""
        for (pool,) in self._db.execute("SELECT pool FROM pools WHERE state = ?", (_DROPPED,)).fetchall():
            heap = self._db.one("SELECT min(heap) FROM heaps WHERE pool = ?", pool)[0]
            if heap is None:
                self._forget_pool(pool)
            elif self._delete_some("held", "heap", "key", heap) < SWEEP:
                self._db.execute("DELETE FROM heaps WHERE heap = ?", (heap,))
            return True
        for (epoch,) in self._db.execute("SELECT id FROM epochs WHERE state = ?", (_CLOSED,)).fetchall():
            gone = sum(self._delete_some(table, "epoch", "mark", epoch) for table in ("quotas", "accepted"))
            if not gone:
                self._db.execute("UPDATE epochs SET state = ? WHERE id = ?", (_SWEPT, epoch))
            return True
        return False

    def _delete_some(self, table: str, group: str, key: str, which: int) -> int:
        """Delete the first rows of a group, at most `SWEEP`; returns how many."""
        query = f"SELECT {key} FROM {table} WHERE {group} = ? ORDER BY {key} LIMIT 1 OFFSET ?"
        row = self._db.one(query, which, SWEEP - 1)
        last = row[0] if row else _LAST
        return self._db.execute(f"DELETE FROM {table} WHERE {group} = ? AND {key} <= ?", (which, last)).rowcount

    def count(self, name: str, amount: int) -> None:
        self._db.put("counters", "name", add=True, name=name, amount=amount)

    def counters(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, amount FROM counters ORDER BY name").fetchall())


def _each(facts: str) -> int:
    """The sealed bytes of each report of an epoch; all that is left of the description of a closed one."""
    return int(json.loads(facts).get("bytes", BIT_BYTES)) + SEAL_BYTES


def _of_batch(sender: Sender, size: int, k: int) -> int:
    """The least number of devices that a proxy's batch comes from: none sends more than k reports.

    >>> [_of_batch(Sender(True, 0), size, k=100) for size in (99, 100, 2048)], _of_batch(Sender(True, 7), 2048, k=100)
    ([0, 1, 20], 7)
    """
    return min(size // k, sender.people) if sender.people else size // k

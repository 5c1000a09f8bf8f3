"""Epochs: what the reports of one round are sealed to, and the counts that come of them.

The trainer opens and closes them, the intake adds what arrives; they meet in the server's database. A batch is written
down in one transaction together with its number, so that a repetition is known for what it is, and folded into the
counts once such batches outgrow them: what is kept grows with the update, not with its reports. The secret half of an
epoch's key is a file of its own, in no database and in no backup, and is deleted with the epoch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from homebody.errors import Abandoned
from homebody.federation.envelopes import EPOCH_BYTES, epoch_keys
from homebody.federation.epoch import BIT_BYTES, Epoch
from homebody.federation.server.records import PART, Records
from homebody.files import write_synced

__all__ = ["Added", "EpochRecord", "EpochResult", "Epochs", "Over"]

COMPONENT = "intake"
KEPT = 2
"""Epochs whose counts and batches are remembered: the last, and the one before it."""
LEAST_LOG = 1 << 20
"""Bytes of batches that are not worth folding."""
_SCHEMA = """
CREATE TABLE epoch (
    id BLOB PRIMARY KEY, place INTEGER NOT NULL UNIQUE, name TEXT NOT NULL UNIQUE, public BLOB NOT NULL,
    shared TEXT NOT NULL, k INTEGER NOT NULL, entries INTEGER NOT NULL, among INTEGER NOT NULL, closes INTEGER NOT NULL,
    arrived INTEGER NOT NULL, logged INTEGER NOT NULL, people INTEGER
);
CREATE TABLE epoch_batch (
    epoch BLOB NOT NULL, number BLOB NOT NULL, answer TEXT NOT NULL, pairs BLOB, PRIMARY KEY (epoch, number)
);
CREATE TABLE epoch_counts (
    epoch BLOB NOT NULL, part INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY (epoch, part)
);
"""
_LONG_REPORTS = "ALTER TABLE epoch ADD COLUMN size INTEGER NOT NULL DEFAULT 4;"
_STEPS = (_SCHEMA, _LONG_REPORTS)
_COLUMNS = "id, public, shared, k, entries, among, closes, name, arrived, people, size"
Counts = npt.NDArray[np.int64]
"""How often each report came: of entry e, the bit 0 at 2e and the bit 1 at 2e + 1."""


class Over(Abandoned):
    """The epoch takes no reports any more, or is about something else."""


@dataclass(frozen=True)
class EpochRecord(Epoch):
    """An epoch as it stands in the server's database."""

    name: str
    """Of the run and the release that it is about."""
    arrived: int
    """Reports that were taken."""
    people: int | None
    """How many said that they had reported, when it was closed."""


class Added(NamedTuple):
    """The outcome of a batch."""

    accepted: int
    refused: dict[str, int]
    """By reason."""
    again: bool
    """Whether it had come before, and was added then."""


class EpochResult(NamedTuple):
    """The outcome of an epoch."""

    counts: Counts
    people: int
    reports: bytes = b""
    """The reports themselves, in the order of their bytes, where they are not of one bit."""


class Epochs:
    """The epochs of a server.

    >>> import tempfile
    >>> from homebody.database import connect
    >>> folder = tempfile.TemporaryDirectory()
    >>> epochs = Epochs(Records(connect(None)), Path(folder.name))
    >>> epoch = epochs.open("run/train/1", "ab" * 16, k=2, entries=3, seconds=60)
    >>> epochs.add(epoch.id, bytes(16), np.array([1, 1, 4], dtype="<u4"), {}).accepted, epochs.arrived("run/train/1")
    (3, 3)
    >>> epochs.add(epoch.id, bytes(16), np.array([1, 1, 4], dtype="<u4"), {}).again
    True
    >>> epochs.close("run/train/1", people=2).counts.tolist()
    [0, 2, 0, 0, 1, 0]
    >>> epochs.secret(epoch) is None
    True
    >>> epochs.records.database.close(), folder.cleanup()
    (None, None)
    """

    def __init__(self, records: Records, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.records, self._db, self._clock = records, records.database, clock
        self._keys = folder / "epochs"
        self._db.migrate(COMPONENT, _STEPS)

    def open(
        self, name: str, asks: str, k: int, entries: int, seconds: float, among: int = 1, size: int = BIT_BYTES
    ) -> EpochRecord:
        """The epoch of this name, new if there is none; the others are closed then. Raises `Over` where the epoch of
        this name takes no more reports, or is not about this."""
        with self._db.transaction():
            epoch = self.named(name)
            if epoch is not None:
                about = (epoch.asks, epoch.k, epoch.entries, epoch.among, epoch.size)
                if about != (asks, k, entries, among, size) or not self.takes(epoch):
                    raise Over("The epoch is over, or about something else.")
                return epoch
            for (other,) in self._db.execute("SELECT name FROM epoch WHERE people IS NULL").fetchall():
                self.close(other, people=0)
            self._forget()
            public, secret = epoch_keys()
            identity = os.urandom(EPOCH_BYTES)
            # On the disk before anybody learns the public half: what is sealed to it must be opened after a kill too.
            self._keys.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_synced(self._file(identity), secret)
            (place,) = self._db.one("SELECT COALESCE(MAX(place), 0) + 1 FROM epoch")
            closes = int(self._clock() + seconds) + 1
            values = (identity, public, asks, k, entries, among, closes, name, 0, None, size)
            columns: dict[str, Any] = dict(zip(_COLUMNS.split(", "), values, strict=True))
            self._db.put("epoch", place=place, logged=0, **columns)
        return EpochRecord(*values[:-1], size=size)

    def find(self, identity: bytes) -> EpochRecord | None:
        """The epoch that envelopes call so."""
        return self._one("id", identity)

    def named(self, name: str) -> EpochRecord | None:
        return self._one("name", name)

    def takes(self, epoch: EpochRecord) -> bool:
        """Whether reports may still come."""
        return epoch.people is None and self.left(epoch) > 0 and self.secret(epoch) is not None

    def left(self, epoch: EpochRecord) -> float:
        """Seconds until it closes."""
        return epoch.closes - self._clock()

    def secret(self, epoch: EpochRecord) -> bytes | None:
        """The key that opens its reports, for as long as it is open."""
        try:
            return None if epoch.people is not None else self._file(epoch.id).read_bytes()
        except FileNotFoundError:
            return None

    def repeated(self, identity: bytes, number: bytes) -> Added | None:
        """The earlier answer to a batch of this number."""
        row = self._db.one("SELECT answer FROM epoch_batch WHERE epoch = ? AND number = ?", identity, number)
        if row is None:
            return None
        accepted, refused = json.loads(row[0])
        return Added(accepted, refused, again=True)

    def add(self, identity: bytes, number: bytes, pairs: npt.NDArray[Any], refused: Mapping[str, int]) -> Added:
        """Write down what a batch brought, unless it came before; `Over` where the epoch is closed by now.

        pairs: numbers, or reports of more bytes as such (`V24`)."""
        with self._db.transaction():
            before = self.repeated(identity, number)
            if before is not None:
                self.records.count("batches_repeated")
                return before
            epoch = self.find(identity)
            if epoch is None or not self.takes(epoch):
                raise Over("The epoch is closed.")
            ordered = np.sort(pairs)
            content = (ordered.astype("<u4") if epoch.size == BIT_BYTES else ordered).tobytes()
            answer = json.dumps([len(pairs), dict(refused)])
            self._db.put("epoch_batch", epoch=identity, number=number, answer=answer, pairs=content)
            change = "UPDATE epoch SET arrived = arrived + ?, logged = logged + ? WHERE id = ?"
            self._db.execute(change, (len(pairs), len(content), identity))
            (logged,) = self._db.one("SELECT logged FROM epoch WHERE id = ?", identity)
            if epoch.size == BIT_BYTES and logged > max(LEAST_LOG, 16 * epoch.entries):
                self._fold(epoch)
            self.records.count("batches_accepted")
            self.records.count("reports_accepted", len(pairs))
            for reason, count in refused.items():
                self.records.count(f"reports_refused: {reason}", count)
        return Added(len(pairs), dict(refused), again=False)

    def arrived(self, name: str) -> int:
        """How many reports were taken so far."""
        epoch = self.named(name)
        return 0 if epoch is None else epoch.arrived

    def close(self, name: str, people: int) -> EpochResult:
        """Take no more of an epoch's reports, and forget what opens them; what came of it stays for a while."""
        with self._db.transaction():
            epoch = self.named(name)
            if epoch is None:
                raise Over("There is no such epoch.")
            if epoch.people is None:
                content = self._fold(epoch)
                self._db.execute("UPDATE epoch SET people = ? WHERE id = ?", (people, epoch.id))
            else:
                content, people = self._content(epoch), epoch.people
        self._file(epoch.id).unlink(missing_ok=True)
        if epoch.size != BIT_BYTES:
            return EpochResult(np.zeros(0, dtype=np.int64), people, content)
        return EpochResult(np.frombuffer(content, dtype="<i8"), people)

    def closed(self, name: str) -> EpochResult | None:
        """The outcome of a closed epoch, for as long as it is stored."""
        epoch = self.named(name)
        if epoch is None or epoch.people is None:
            return None
        (counts,) = self._db.one("SELECT COUNT(*) FROM epoch_counts WHERE epoch = ?", epoch.id)
        return self.close(name, epoch.people) if counts else None

    def _one(self, column: str, value: bytes | str) -> EpochRecord | None:
        row = self._db.one(f"SELECT {_COLUMNS} FROM epoch WHERE {column} = ?", value)
        return None if row is None else EpochRecord(*row[:-1], size=row[-1])

    def _content(self, epoch: EpochRecord) -> bytes:
        """Counts, or reports of more bytes in their order, folded or not."""
        query = "SELECT content FROM epoch_counts WHERE epoch = ? ORDER BY part"
        folded = b"".join(content for (content,) in self._db.execute(query, (epoch.id,)).fetchall())
        batches = self._db.rows("SELECT pairs FROM epoch_batch WHERE epoch = ? AND pairs IS NOT NULL", (epoch.id,))
        if epoch.size != BIT_BYTES:
            every = np.frombuffer(b"".join((folded, *(content for (content,) in batches))), dtype=f"V{epoch.size}")
            return np.sort(every).tobytes()
        counts = np.zeros(2 * epoch.entries, dtype="<i8")
        if folded:
            counts += np.frombuffer(folded, dtype="<i8")
        for (content,) in batches:
            counts += np.bincount(np.frombuffer(content, dtype="<u4"), minlength=len(counts))
        return counts.tobytes()

    def _fold(self, epoch: EpochRecord) -> bytes:
        """Bring the batches that were logged into the counts, or into one order."""
        whole = self._content(epoch)
        content = memoryview(whole)
        self._db.execute("DELETE FROM epoch_counts WHERE epoch = ?", (epoch.id,))
        for part, start in enumerate(range(0, len(content), PART)):
            self._db.put("epoch_counts", epoch=epoch.id, part=part, content=content[start : start + PART])
        self._db.execute("UPDATE epoch_batch SET pairs = NULL WHERE epoch = ? AND pairs IS NOT NULL", (epoch.id,))
        self._db.execute("UPDATE epoch SET logged = 0 WHERE id = ?", (epoch.id,))
        return whole

    def _forget(self) -> None:
        """What came of epochs before the last, and keys that a kill left behind."""
        last = "SELECT id FROM epoch ORDER BY place DESC LIMIT ?"
        for table in ("epoch_batch", "epoch_counts"):
            self._db.execute(f"DELETE FROM {table} WHERE epoch NOT IN ({last})", (KEPT - 1,))
        if self._keys.is_dir():
            for file in self._keys.iterdir():
                file.unlink(missing_ok=True)  # all epochs are closed by now

    def _file(self, identity: bytes) -> Path:
        return self._keys / f"{identity.hex()}.key"

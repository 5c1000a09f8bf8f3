"""What the server must not forget: devices, items, rounds, checkpoints and counts, beside the ledger in one database.

The parts that stay up beside training read it too, so torch is imported only where tensors are at hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from homebody.errors import HomebodyError, several

if TYPE_CHECKING:
    from homebody.core import Cohort
    from homebody.database import Database
    from homebody.privacy import Ledger
    from homebody.progress import Progress, Round

__all__ = [
    "COMPONENT",
    "Presence",
    "Records",
    "RegisteredDevice",
    "RegisteredProxy",
    "StoredSum",
    "check_text",
    "now",
    "why_ended",
]

COMPONENT = "server's database"
KEPT = 2
"""Checkpoints: the last, and the one before it in case a disk damages the last."""
PART = 1 << 24
"""Bytes of a checkpoint in one row: both databases end at a gigabyte a row, tables of items do not."""
LONGEST = 500
"""Characters of a name or an id: PostgreSQL finds no longer ones again."""
_FEATURES, _ROSTER = 0, 1
"""Rows of the table `sheet`: what every device is sent, encoded."""
MOST_PEOPLE = 1_000_000
"""The most people on one device, to catch a typing mistake."""
_SCHEMA = """
CREATE TABLE device (
    fingerprint TEXT PRIMARY KEY, public_key BLOB NOT NULL, name TEXT NOT NULL, first INTEGER NOT NULL UNIQUE,
    people INTEGER NOT NULL, added TEXT NOT NULL, removed TEXT
);
CREATE UNIQUE INDEX device_name ON device (name) WHERE removed IS NULL;
CREATE TABLE item (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL);
CREATE TABLE open_round (
    release TEXT PRIMARY KEY, users BLOB NOT NULL, sampling TEXT NOT NULL, size INTEGER NOT NULL,
    population INTEGER NOT NULL
);
CREATE TABLE checkpoint (
    number INTEGER PRIMARY KEY, about TEXT NOT NULL, size INTEGER NOT NULL, sha256 TEXT NOT NULL, saved TEXT NOT NULL
);
CREATE TABLE checkpoint_part (
    checkpoint INTEGER NOT NULL, part INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY (checkpoint, part)
);
CREATE TABLE round (step INTEGER PRIMARY KEY, line TEXT NOT NULL);
CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE note (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_STEPS = (
    _SCHEMA,
    "CREATE TABLE proxy (public_key BLOB PRIMARY KEY, name TEXT NOT NULL UNIQUE, added TEXT NOT NULL);",
    "CREATE TABLE sheet (number INTEGER PRIMARY KEY, content BLOB NOT NULL);",
    "CREATE TABLE fault (fingerprint TEXT PRIMARY KEY, count INTEGER NOT NULL, set_aside TEXT);",
    "CREATE TABLE secure_sum (attempt TEXT PRIMARY KEY, people TEXT NOT NULL, state BLOB, result BLOB);",
    """CREATE TABLE presence (
        fingerprint TEXT PRIMARY KEY, seen TEXT NOT NULL, connected INTEGER NOT NULL, people INTEGER NOT NULL,
        refuses TEXT NOT NULL
    );""",
)
# Parameters are noise to a compressor: PostgreSQL would only lose time.
_IN_POSTGRESQL = (f"{_SCHEMA}ALTER TABLE checkpoint_part ALTER COLUMN content SET STORAGE EXTERNAL;\n", *_STEPS[1:])


@dataclass(frozen=True)
class RegisteredDevice:
    """A key that the operator registered, and whom it speaks for."""

    fingerprint: str
    public_key: bytes
    name: str
    first: int
    """Its people are the clients first, first + 1 …; nobody else ever gets these numbers."""
    people: int
    added: str
    """When, in UTC."""
    removed: str | None
    faults: int = 0
    """Answers of its that were refused because they were broken, since it was last readmitted."""
    set_aside: str | None = None
    """Since when it is not asked any more, because of them."""


@dataclass(frozen=True)
class RegisteredProxy:
    """A key whose batches the server takes in."""

    public_key: bytes
    name: str
    added: str
    """When, in UTC."""


class Presence(NamedTuple):
    """A device as the server saw it last."""

    seen: str
    """When it was last connected, in UTC; to a minute or so."""
    connected: bool
    people: int
    """How many of its people take part."""
    refuses: str
    """Why it refuses what it is asked, in its own words; empty if it does not."""


class StoredSum(NamedTuple):
    """An attempt at a secure sum, as far as it is."""

    people: dict[int, int]
    """How many of each device's people are in the sum, by the device's first number."""
    state: bytes | None
    """`Collector.state`, until the sum is open."""
    result: bytes | None
    """The sum, once it is open."""


class Records:
    """The server's state in a database; also where `fit` keeps its checkpoints.

    >>> from homebody.database import connect
    >>> records = Records(connect(None))
    >>> records.add_device("ab12", b"ssh-ecdsa ...", "kitchen", people=3)
    range(0, 3)
    >>> records.add_device("cd34", b"ssh-ecdsa ...", "study", people=1)
    range(3, 4)
    >>> records.add_items([("tt01", "Alien"), ("tt02", "Brazil")]), records.items(since=1)
    ((0, 2), [('tt02', 'Brazil')])
    >>> records.count("refused: too late")
    >>> records.counters()
    {'refused: too late': 1}
    >>> records.add_proxy(bytes(32), "mixer")
    >>> [proxy.name for proxy in records.proxies()]
    ['mixer']
    >>> records.remove_proxy("mixer")
    >>> records.proxies()
    []
    >>> records.database.close()
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        database.migrate(COMPONENT, _STEPS, postgresql=_IN_POSTGRESQL)

    def add_device(self, fingerprint: str, public_key: bytes, name: str, people: int) -> range:
        """Register a key for so many people, and give them their client numbers, for ever."""
        check_text("A device's fingerprint", fingerprint)
        check_text("A device's name", name)
        if not 1 <= people <= MOST_PEOPLE:
            raise HomebodyError(f"A device holds 1 to {MOST_PEOPLE:,} people, not {people}.")
        with self.database.transaction():
            for device in self.devices():
                if device.fingerprint == fingerprint and device.removed:
                    raise HomebodyError(
                        f"The key of '{name}' was removed on {device.removed} (as '{device.name}'); "
                        "a device that comes back needs a new key."
                    )
                if device.fingerprint == fingerprint:
                    raise HomebodyError(f"The key of '{name}' is registered already, as '{device.name}'.")
                if device.name == name and not device.removed:
                    raise HomebodyError(f"There is a device '{name}' already; give this one another name.")
            first = self._number("SELECT COALESCE(MAX(first + people), 0) FROM device")
            row: dict[str, Any] = {"fingerprint": fingerprint, "public_key": public_key, "name": name, "people": people}
            self.database.put("device", **row, first=first, added=now())
        return range(first, first + people)

    def devices(self) -> list[RegisteredDevice]:
        """Every device that was ever registered, in the order of its people's numbers."""
        columns = "device.fingerprint, public_key, name, first, people, added, removed, COALESCE(count, 0), set_aside"
        faults = "LEFT JOIN fault ON fault.fingerprint = device.fingerprint"
        query = f"SELECT {columns} FROM device {faults} ORDER BY first"
        return [RegisteredDevice(*row) for row in self.database.rows(query)]

    def remove_device(self, which: str) -> RegisteredDevice:
        """Take a device out, by its name or its key's fingerprint; its people's numbers stay theirs."""
        with self.database.transaction():
            device = self._device(which)
            if device.removed is not None:
                raise HomebodyError(f"The device '{which}' was removed already, on {device.removed}.")
            device = replace(device, removed=now())
            change = "UPDATE device SET removed = ? WHERE fingerprint = ?"
            self.database.execute(change, (device.removed, device.fingerprint))
        return device

    def add_fault(self, fingerprint: str, most: int) -> bool:
        """Count a broken answer of a device; with the last of `most` it is set aside, and the answer is True."""
        with self.database.transaction():
            self.database.put("fault", "fingerprint", add=True, fingerprint=fingerprint, count=1)
            change = "UPDATE fault SET set_aside = ? WHERE fingerprint = ? AND count >= ? AND set_aside IS NULL"
            changed = self.database.execute(change, (now(), fingerprint, most))
        return changed.rowcount == 1

    def readmit_device(self, which: str) -> RegisteredDevice:
        """Ask a device again that was set aside, by its name or its key's fingerprint; its faults are forgotten."""
        with self.database.transaction():
            device = self._device(which)
            if device.removed:
                raise HomebodyError(f"The device '{which}' was removed on {device.removed}; it needs a new key.")
            if device.set_aside is None:
                raise HomebodyError(f"The device '{which}' is not set aside.")
            self.database.execute("DELETE FROM fault WHERE fingerprint = ?", (device.fingerprint,))
        return replace(device, faults=0, set_aside=None)

    def _device(self, which: str) -> RegisteredDevice:
        """By its name or its key's fingerprint; of several of a name, the one that takes part."""
        known = self.devices()
        matches = [device for device in known if device.name == which and not device.removed]
        matches = matches or [device for device in known if which in (device.fingerprint, device.name)]
        if not matches:
            raise HomebodyError(f"There is no device '{which}': give its name or its key's fingerprint.")
        return matches[-1]

    def note_presence(self, devices: Mapping[str, Presence]) -> None:
        """Write down how these devices were seen, by their fingerprints, in place of what it was before."""
        with self.database.transaction():
            for fingerprint, seen in devices.items():
                row = {**seen._asdict(), "connected": int(seen.connected)}
                self.database.put("presence", "fingerprint", fingerprint=fingerprint, **row)

    def presence(self) -> dict[str, Presence]:
        """How each device was seen last, by its fingerprint; none that never was."""
        query = "SELECT fingerprint, seen, connected, people, refuses FROM presence"
        return {
            fingerprint: Presence(seen, bool(connected), people, refuses)
            for fingerprint, seen, connected, people, refuses in self.database.rows(query)
        }

    def forget_connections(self) -> None:
        """No device is connected: the process that they were connected to has ended."""
        self.database.execute("UPDATE presence SET connected = 0, people = 0, refuses = ''")

    def add_proxy(self, public_key: bytes, name: str) -> None:
        """Let a proxy bring reports."""
        check_text("A proxy's name", name)
        with self.database.transaction():
            for proxy in self.proxies():
                if proxy.public_key == public_key:
                    raise HomebodyError(f"The key of '{name}' is registered already, as '{proxy.name}'.")
                if proxy.name == name:
                    raise HomebodyError(f"There is a proxy '{name}' already; give this one another name.")
            self.database.put("proxy", public_key=public_key, name=name, added=now())

    def proxies(self) -> list[RegisteredProxy]:
        """Every registered proxy, in the order of names."""
        query = "SELECT public_key, name, added FROM proxy ORDER BY name"
        return [RegisteredProxy(*row) for row in self.database.rows(query)]

    def remove_proxy(self, name: str) -> None:
        """Take in nothing more from a proxy."""
        if not self.database.execute("DELETE FROM proxy WHERE name = ?", (name,)).rowcount:
            raise HomebodyError(f"There is no proxy '{name}' here; `homebody server status` names them.")

    def add_items(self, items: Iterable[tuple[str, str]]) -> tuple[int, int]:
        """Append (id, name) pairs to the catalogue: the first new number, and how many are new.

        A number is a position and never changes. Ids that are known, or come twice, are left out, and counted as
        `items known already`.
        """
        given, names = list(items), dict[str, str]()
        for identity, name in given:
            check_text("An item's id", identity)
            check_text("An item's name", name, least=0)
            names.setdefault(identity, name)
        with self.database.transaction():
            for known in self._known(list(names)):
                del names[known]
            first = self.n_items()
            rows = [(number, *item) for number, item in enumerate(names.items(), first)]
            self.database.executemany("INSERT INTO item (number, id, name) VALUES (?, ?, ?)", rows)
            if len(rows) < len(given):
                self.count("items known already", len(given) - len(rows))
        return first, len(rows)

    def items(self, since: int = 0) -> list[tuple[str, str]]:
        """(id, name) of the items from this number on."""
        query = "SELECT id, name FROM item WHERE number >= ? ORDER BY number"
        return [(identity, name) for identity, name in self.database.rows(query, (since,))]

    def n_items(self) -> int:
        return self._number("SELECT COALESCE(MAX(number), -1) + 1 FROM item")

    def open_round(self, release: str, cohort: Cohort) -> None:
        """Write down whom a round is with, before it is charged: after a kill it is with the same people."""
        import numpy as np

        row: dict[str, Any] = {name: getattr(cohort, name) for name in ("sampling", "size", "population")}
        row["users"] = np.asarray(cohort.users, dtype="<i8").tobytes()
        with self.database.transaction():
            before = self.database.one(f"SELECT {', '.join(row)} FROM open_round WHERE release = ?", release)
            if before is None:
                self.database.put("open_round", release=release, **row)
            elif tuple(before) != tuple(row.values()):
                raise HomebodyError(f"The round {release} is open with another cohort; go on with that one.")

    def opened(self, release: str) -> Cohort | None:
        """Whom an open round is with."""
        import numpy as np

        from homebody.core import Cohort

        row = self.database.one("SELECT users, sampling, size, population FROM open_round WHERE release = ?", release)
        if row is None:
            return None
        users, sampling, size, population = row
        return Cohort(np.frombuffer(users, dtype="<i8").astype(np.int64), sampling, size, population)

    def put_sum(self, attempt: str, people: Mapping[int, int], state: bytes | None, result: bytes | None) -> None:
        """Keep how far an attempt at a secure sum is, in place of every other attempt: its state, or its result; or
        neither, before anybody is asked.

        people: how many of each device's people are in the sum, by the device's first number.
        """
        with self.database.transaction():
            self.database.execute("DELETE FROM secure_sum WHERE attempt <> ?", (attempt,))
            row: dict[str, Any] = {"people": json.dumps(people), "state": state, "result": result}
            self.database.put("secure_sum", "attempt", attempt=attempt, **row)

    def sum(self, attempt: str) -> StoredSum | None:
        """How far an attempt at a secure sum is."""
        row = self.database.one("SELECT people, state, result FROM secure_sum WHERE attempt = ?", attempt)
        if row is None:
            return None
        people, *blobs = row
        known = {int(first): count for first, count in json.loads(people).items()}
        return StoredSum(known, *(None if blob is None else bytes(blob) for blob in blobs))

    def due(self) -> bool:
        """A round with real devices is never run twice for want of a checkpoint."""
        return True

    def save(self, progress: Progress) -> None:
        """Keep this progress and the one before it, all or nothing."""
        import safetensors.torch

        from homebody.report.record import packed

        words, tensors = packed(progress)
        about = json.dumps(words)
        content = memoryview(safetensors.torch.save(tensors))
        put, execute, digest = self.database.put, self.database.execute, _digest(about, content)
        with self.database.transaction():
            number = self._number("SELECT COALESCE(MAX(number), 0) + 1 FROM checkpoint")
            put("checkpoint", number=number, about=about, size=len(content), sha256=digest, saved=now())
            for part, start in enumerate(range(0, len(content), PART)):
                put("checkpoint_part", checkpoint=number, part=part, content=content[start : start + PART])
            execute("DELETE FROM checkpoint_part WHERE checkpoint <= ?", (number - KEPT,))
            execute("DELETE FROM checkpoint WHERE number <= ?", (number - KEPT,))

    def load(self) -> Progress | None:
        """The last whole checkpoint, to go on from; the rounds recorded after it are taken back, to be run again. One
        that was damaged is dropped for the one before it, and counted as `checkpoints damaged`."""
        with self.database.transaction():
            number, progress, damaged = self._whole()
            if damaged:
                self.database.execute("DELETE FROM checkpoint_part WHERE checkpoint > ?", (number,))
                self.database.execute("DELETE FROM checkpoint WHERE number > ?", (number,))
                self.count("checkpoints damaged", damaged)
            step = 0 if progress is None else progress.step
            self.database.execute("DELETE FROM round WHERE step > ?", (step,))
        return progress

    def progress(self) -> Progress | None:
        """The last whole checkpoint, to look at; nothing is changed."""
        with self.database.transaction():
            return self._whole()[1]

    def _whole(self) -> tuple[int, Progress | None, int]:
        """The last whole checkpoint: its number and content, and how many after it were damaged."""
        import safetensors.torch

        from homebody.report.record import unpacked

        query = "SELECT number, about, size, sha256 FROM checkpoint ORDER BY number DESC"
        known = self.database.execute(query).fetchall()
        for number, about, size, digest in known:
            content = b"".join(self._parts(number))
            if len(content) == size and _digest(about, content) == digest:
                return number, unpacked(json.loads(about), safetensors.torch.load(content)), known[0][0] - number
        if known:
            raise HomebodyError(
                f"No checkpoint in {self.database.name} is whole (their checksums are wrong); restore a backup."
            )
        return 0, None, 0

    def add_round(self, line: Round) -> None:
        """Record what is known after a round, or fill in what was measured after it."""
        from homebody.report.record import jsonable

        text = json.dumps(jsonable(asdict(line)))
        with self.database.transaction():
            known = self.database.one("SELECT line FROM round WHERE step = ?", line.step)
            if known and (json.loads(known[0])["metrics"] or not line.metrics):
                raise HomebodyError(
                    f"Round {line.step} is recorded already; what came after a checkpoint is loaded first."
                )
            self.database.put("round", "step", step=line.step, line=text)

    def rounds(self, since: int = -1, most: int | None = None) -> list[dict[str, Any]]:
        """The recorded rounds after this one: all of them, or the first so many."""
        end = "" if most is None else f" LIMIT {most}"
        rows = self.database.rows(f"SELECT line FROM round WHERE step > ? ORDER BY step{end}", (since,))
        return [json.loads(line) for (line,) in rows]

    def count(self, name: str, amount: int = 1) -> None:
        self.database.put("counter", "name", add=True, name=name, value=amount)

    def counters(self) -> dict[str, int]:
        return dict(self.database.execute("SELECT name, value FROM counter ORDER BY name").fetchall())

    def note(self, name: str, value: str) -> None:
        """Write down a small fact about how things stand, in place of what it was before."""
        self.database.put("note", "name", name=name, value=value)

    def notes(self) -> dict[str, str]:
        return dict(self.database.execute("SELECT name, value FROM note ORDER BY name").fetchall())

    def put_features(self, content: bytes) -> None:
        """Store the feature schema; once, when a server is made."""
        self.database.put("sheet", number=_FEATURES, content=content)

    def features(self) -> bytes | None:
        """The encoded feature schema; None: the model uses no features."""
        return self._sheet(_FEATURES)

    def put_roster(self, content: bytes) -> None:
        """Store the signed roster that devices are sent, in place of the one before."""
        self.database.put("sheet", "number", number=_ROSTER, content=content)

    def roster(self) -> bytes | None:
        """The signed roster; None: the server has none."""
        return self._sheet(_ROSTER)

    def ledger(self) -> Ledger:
        """The ledger in the same database, its chain verified."""
        from homebody.privacy import Ledger

        return Ledger(self.database)

    def _known(self, identities: list[str]) -> Iterator[str]:
        """Those of these ids that the catalogue has."""
        for start in range(0, len(identities), 500):
            some = identities[start : start + 500]
            query = f"SELECT id FROM item WHERE id IN ({', '.join('?' * len(some))})"
            yield from (identity for (identity,) in self.database.execute(query, some).fetchall())

    def _parts(self, checkpoint: int) -> Iterator[bytes]:
        count = self._number("SELECT COUNT(*) FROM checkpoint_part WHERE checkpoint = ?", checkpoint)
        for part in range(count):
            query = "SELECT content FROM checkpoint_part WHERE checkpoint = ? AND part = ?"
            yield from (content for (content,) in self.database.execute(query, (checkpoint, part)).fetchall())

    def _sheet(self, number: int) -> bytes | None:
        row = self.database.one("SELECT content FROM sheet WHERE number = ?", number)
        return None if row is None else bytes(row[0])

    def _number(self, query: str, *parameters: object) -> int:
        return int(self.database.one(query, *parameters)[0])


def why_ended(notes: Mapping[str, str]) -> str | None:
    """Why training ended, by a server's notes; None while it has not."""
    result = json.loads(notes.get("result", "null"))
    if result is None:
        return None
    return str(result["stopped"] or f"All {several(result['rounds'], 'round is', 'rounds are')} done.")


def now() -> str:
    """In UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _digest(about: str, content: bytes | memoryview) -> str:
    digest = hashlib.sha256(about.encode())
    digest.update(content)
    return digest.hexdigest()


def check_text(what: str, text: str, least: int = 1) -> None:
    """Refuse what one of the databases could not hold."""
    if not least <= len(text) <= LONGEST:
        raise HomebodyError(f"{what} has {least} to {LONGEST} characters, not {len(text)}.")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise HomebodyError(f"{what} must be text without null characters or lone surrogates: {text!r} is not.")

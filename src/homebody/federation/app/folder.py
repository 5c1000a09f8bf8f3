"""An app's folder: what it knows of people, their towers where those stay home, and a record of what it saw.

Only the app's user enters the folder. `app.sqlite` holds everything except the ledgers; each person's ledger is a file
in `ledgers/`.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from homebody.core import Tree
from homebody.database import connect
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.service.text import one_line
from homebody.files import is_held
from homebody.privacy import Charge, Ledger

__all__ = ["AppFolder", "AppSettings", "SeenQuestion"]

FILE = "app.sqlite"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
KEPT_TOWERS = 2
"""Towers kept for each person and run, besides the one of a round that may be gone back to."""
_TABLES = """
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE person (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE feature (
    person INTEGER NOT NULL REFERENCES person,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (person, name)
);
CREATE TABLE tower (
    person INTEGER NOT NULL REFERENCES person,
    run TEXT NOT NULL,
    step INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (person, run, step)
);
CREATE TABLE seen (
    person INTEGER NOT NULL REFERENCES person,
    run TEXT NOT NULL,
    release TEXT NOT NULL,
    digest TEXT NOT NULL,
    what TEXT NOT NULL,
    items INTEGER NOT NULL,
    received INTEGER NOT NULL,
    sent INTEGER NOT NULL,
    at INTEGER NOT NULL,
    PRIMARY KEY (person, run, release, digest)
);
"""


class AppSettings(NamedTuple):
    """How an app reaches its device."""

    view: str
    socket: str
    device_user: int
    """The user that the device's process belongs to: the app talks to no other."""
    token: str

    @classmethod
    def read(cls, file: Path) -> Self:
        """The settings in a device's invitation."""
        try:
            invitation = json.loads(file.read_text(encoding="utf-8"))
            settings = cls(**{name: invitation[name] for name in cls._fields})
        except OSError as error:
            raise HomebodyError(f"{file} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise HomebodyError(f"{file} is no invitation; `homebody client views add` writes one.") from error
        if [type(value) for value in settings] != [str, str, int, str]:
            raise HomebodyError(f"{file} is no invitation; `homebody client views add` writes one.")
        return settings


class SeenQuestion(NamedTuple):
    """One question of the device."""

    run: str
    release: str
    what: str
    items: int
    """How many items of the person it named."""
    received: int
    sent: int
    at: int


class AppFolder:
    """The folder of one app."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / FILE).is_file():
            raise HomebodyError(f"There is no app in {path}; make one with `homebody view init`.")
        self._database = connect(path / FILE, what="app's store")
        self._database.migrate("app", (_TABLES,))
        self._ledgers: dict[int, Ledger] = {}

    @classmethod
    def create(cls, path: Path, settings: AppSettings) -> Self:
        """Create an app in a folder that is empty or does not exist, completely or not at all."""
        if not NAME.fullmatch(settings.view):
            raise HomebodyError(f"The name of a view is a letter, then letters, digits, _ or -, not '{settings.view}'.")
        fresh = not path.exists()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise HomebodyError(f"{path} is not empty; name a folder that is, or one that is not there yet.")
            path.chmod(0o700)
            (path / "ledgers").mkdir(mode=0o700)
        except OSError as error:
            raise HomebodyError(f"No app can be made in {path}: {error.strerror or error}.") from error
        try:
            database = connect(path / FILE, what="app's store")
            database.migrate("app", (_TABLES,))
            with database.transaction():
                database.executemany(
                    "INSERT INTO setting (name, value) VALUES (?, ?)",
                    [(name, json.dumps(value)) for name, value in settings._asdict().items()],
                )
            database.close()
        except BaseException:
            shutil.rmtree(path if fresh else path / "ledgers", ignore_errors=True)
            (path / FILE).unlink(missing_ok=True)
            raise
        return cls(path)

    @property
    def settings(self) -> AppSettings:
        rows = self._database.execute("SELECT name, value FROM setting").fetchall()
        return AppSettings(**{name: json.loads(value) for name, value in rows})

    def describe(self, people: Mapping[str, Mapping[str, str]]) -> None:
        """Replace these people's features, all or none."""
        with self._database.transaction():
            for person, features in people.items():
                number = self._number(person)
                self._database.execute("DELETE FROM feature WHERE person = ?", (number,))
                self._database.executemany(
                    "INSERT INTO feature (person, name, value) VALUES (?, ?, ?)",
                    [
                        (number, one_line(name, "A feature's name", 200), one_line(value, "A feature", 1000))
                        for name, value in features.items()
                    ],
                )

    def features(self, person: str) -> dict[str, str]:
        """What is known of a person, by name."""
        rows = self._database.execute(
            "SELECT f.name, f.value FROM feature f JOIN person p ON p.number = f.person WHERE p.name = ?", (person,)
        )
        return dict(rows.fetchall())

    def people(self) -> list[str]:
        """Everyone whom the app knows or was asked about."""
        return [name for (name,) in self._database.execute("SELECT name FROM person ORDER BY number").fetchall()]

    def tower(self, person: str, run: str, before: int) -> Tree | None:
        """A person's tower after the latest round before this one; None: it has not been trained."""
        row = self._database.execute(
            "SELECT t.content FROM tower t JOIN person p ON p.number = t.person WHERE p.name = ? AND t.run = ? "
            "AND t.step < ? ORDER BY t.step DESC LIMIT 1",
            (person, run, before),
        ).fetchone()
        return None if row is None else wire.decode_tree(bytes(row[0]))

    def put_tower(self, person: str, run: str, step: int, tower: Tree, keep: int | None) -> None:
        """Keep a person's tower after a round. Towers of later rounds are dropped: those are being done again.

        keep: a round that may be gone back to, so that the latest tower up to it stays too.
        """
        with self._database.transaction():
            number = self._number(person)
            self._database.execute("DELETE FROM tower WHERE person = ? AND run = ? AND step >= ?", (number, run, step))
            self._database.execute(
                "INSERT INTO tower (person, run, step, content) VALUES (?, ?, ?, ?)",
                (number, run, step, wire.encode_tree(tower)),
            )
            rows = self._database.execute(
                "SELECT step FROM tower WHERE person = ? AND run = ? ORDER BY step DESC", (number, run)
            ).fetchall()
            steps = [row[0] for row in rows]
            wanted = {*steps[:KEPT_TOWERS], *[old for old in steps if keep is not None and old <= keep][:1]}
            self._database.executemany(
                "DELETE FROM tower WHERE person = ? AND run = ? AND step = ?",
                [(number, run, old) for old in steps if old not in wanted],
            )

    def drop_towers(self, keep: Collection[str]) -> int:
        """Drop everyone's towers except those of these runs. Returns how many were dropped."""
        runs = [run for (run,) in self._database.execute("SELECT DISTINCT run FROM tower").fetchall()]
        if not (old := [(run,) for run in runs if run not in keep]):
            return 0
        with self._database.transaction():
            return sum(self._database.execute("DELETE FROM tower WHERE run = ?", run).rowcount for run in old)

    def note(self, person: str, digest: str, seen: SeenQuestion) -> None:
        """Write down what the device showed; the same question once."""
        with self._database.transaction():
            self._database.execute(
                "INSERT OR IGNORE INTO seen (person, run, release, digest, what, items, received, sent, at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (self._number(person), seen.run, seen.release, digest, *seen[2:]),
            )

    def seen(self, person: str) -> list[SeenQuestion]:
        """What the device showed of a person, in order."""
        rows = self._database.execute(
            "SELECT s.run, s.release, s.what, s.items, s.received, s.sent, s.at FROM seen s "
            "JOIN person p ON p.number = s.person WHERE p.name = ? ORDER BY s.rowid",
            (person,),
        )
        return [SeenQuestion(*row) for row in rows.fetchall()]

    def charge(self, person: str, release: str, charges: list[Charge], digest: str) -> None:
        """Charge what a round shows this app of the person's other views; the same question once."""
        self.ledger(person).charge(release, charges, repeat=True, digest=digest)

    def ledger(self, person: str) -> Ledger:
        """What the app learnt of a person's other views."""
        with self._database.transaction():
            number = self._number(person)
        if number not in self._ledgers:
            self._ledgers[number] = Ledger(self.path / "ledgers" / f"{number}.sqlite")
        return self._ledgers[number]

    def runs(self) -> bool:
        """Whether the app's process runs."""
        return is_held(self.path / ".lock")

    def close(self) -> None:
        for ledger in self._ledgers.values():
            ledger.close()
        self._ledgers.clear()
        self._database.close()

    def _number(self, person: str) -> int:
        name = one_line(person, "A person's name", 200)
        row = self._database.execute("SELECT number FROM person WHERE name = ?", (name,)).fetchone()
        if row is not None:
            return int(row[0])
        (count,) = self._database.execute("SELECT COUNT(*) FROM person").fetchone()
        self._database.execute("INSERT INTO person (number, name) VALUES (?, ?)", (count, name))
        return int(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def now() -> int:
    return int(time.time())

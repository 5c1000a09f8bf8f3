"""An app's folder: what it knows of people, their towers where those stay home, and a record of what it saw.

Only the app's user enters the folder. `app.sqlite` holds everything except the ledgers; each person's ledger is a file
in `ledgers/`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import NamedTuple, Self

from homebody.core import Tree
from homebody.database import connect
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.service.text import check_view, claiming, one_line
from homebody.files import is_held
from homebody.privacy import Ledger

__all__ = ["AppFolder", "AppSettings", "SeenQuestion"]

FILE = "app.sqlite"
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
            if [type(value) for value in settings] != [str, str, int, str]:
                raise ValueError("other kinds")
        except OSError as error:
            raise HomebodyError(f"{file} cannot be read: {error.strerror or error}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise HomebodyError(f"{file} is no invitation; `homebody client views add` writes one.") from error
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


class AppFolder(AbstractContextManager["AppFolder"]):
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
        check_view(settings.view)
        with claiming(path, "app"), closing(connect(path / FILE, what="app's store")) as database:
            database.migrate("app", (_TABLES,))
            with database.transaction():
                for name, value in settings._asdict().items():
                    database.put("setting", name=name, value=json.dumps(value))
        return cls(path)

    @property
    def settings(self) -> AppSettings:
        rows = self._database.rows("SELECT name, value FROM setting")
        return AppSettings(**{name: json.loads(value) for name, value in rows})

    def describe(self, people: Mapping[str, Mapping[str, str]]) -> None:
        """Replace these people's features, all or none."""
        with self._database.transaction():
            for person, features in people.items():
                number = self._number(person)
                self._database.execute("DELETE FROM feature WHERE person = ?", (number,))
                for name, value in features.items():
                    what, said = one_line(name, "A feature's name", 200), one_line(value, "A feature", 1000)
                    self._database.put("feature", person=number, name=what, value=said)

    def features(self, person: str) -> dict[str, str]:
        """What is known of a person, by name."""
        query = "SELECT f.name, f.value FROM feature f JOIN person p ON p.number = f.person WHERE p.name = ?"
        return dict(self._database.rows(query, (person,)))

    def people(self) -> list[str]:
        """Everyone whom the app knows or was asked about."""
        return [name for (name,) in self._database.rows("SELECT name FROM person ORDER BY number")]

    def tower(self, person: str, run: str, before: int) -> Tree | None:
        """A person's tower after the latest round before this one; None: it has not been trained."""
        query = (
            "SELECT t.content FROM tower t JOIN person p ON p.number = t.person WHERE p.name = ? AND t.run = ? "
            "AND t.step < ? ORDER BY t.step DESC LIMIT 1"
        )
        row = self._database.one(query, person, run, before)
        return None if row is None else wire.decode_tree(bytes(row[0]))

    def put_tower(self, person: str, run: str, step: int, tower: Tree, keep: int | None) -> None:
        """Keep a person's tower after a round. Towers of later rounds are dropped: those are being done again.

        keep: a round that may be gone back to, so that the latest tower up to it stays too.
        """
        with self._database.transaction():
            number = self._number(person)
            self._database.execute("DELETE FROM tower WHERE person = ? AND run = ? AND step >= ?", (number, run, step))
            self._database.put("tower", person=number, run=run, step=step, content=wire.encode_tree(tower))
            query = "SELECT step FROM tower WHERE person = ? AND run = ? ORDER BY step DESC"
            steps = [old for (old,) in self._database.rows(query, (number, run))]
            wanted = {*steps[:KEPT_TOWERS], *[old for old in steps if keep is not None and old <= keep][:1]}
            self._database.executemany(
                "DELETE FROM tower WHERE person = ? AND run = ? AND step = ?",
                [(number, run, old) for old in steps if old not in wanted],
            )

    def drop_towers(self, keep: Collection[str]) -> int:
        """Drop everyone's towers except those of these runs. Returns how many were dropped."""
        runs = [run for (run,) in self._database.rows("SELECT DISTINCT run FROM tower")]
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
        query = (
            "SELECT s.run, s.release, s.what, s.items, s.received, s.sent, s.at FROM seen s "
            "JOIN person p ON p.number = s.person WHERE p.name = ? ORDER BY s.rowid"
        )
        return [SeenQuestion(*row) for row in self._database.rows(query, (person,))]

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
        row = self._database.one("SELECT number FROM person WHERE name = ?", name)
        if row is not None:
            return int(row[0])
        (count,) = self._database.one("SELECT COUNT(*) FROM person")
        self._database.put("person", number=count, name=name)
        return int(count)

    def __exit__(self, *_: object) -> None:
        self.close()

"""A service's database: its models by digest, items that were added or removed since, and hashed tokens.

A model itself is a file of its own under `models/`, named by its digest and written whole before its row. Every change
of the items is a version: a service that starts again, or looks again, reads what came after the version it knows.
Nothing of any query is here.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, NamedTuple

from homebody.database import Database, connect
from homebody.errors import HomebodyError
from homebody.files import holding, private_folder, replacing, sync_folder

__all__ = ["DATABASE", "AddedItem", "Changes", "KnownModel", "ServiceStore", "create"]

DATABASE = "serve.sqlite"
MODELS = "models"
_PATIENCE = 60.0
"""Seconds to wait for another process that gives the service a model."""
_TABLES = """
CREATE TABLE state (version INTEGER NOT NULL);
CREATE TABLE models (
    number INTEGER PRIMARY KEY AUTOINCREMENT, digest TEXT NOT NULL UNIQUE, file TEXT NOT NULL,
    version INTEGER NOT NULL, replaced REAL
);
CREATE TABLE added (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, given TEXT NOT NULL, model TEXT NOT NULL,
    row BLOB NOT NULL, version INTEGER NOT NULL
);
CREATE INDEX added_by_version ON added (version);
CREATE TABLE removed (id TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX removed_by_version ON removed (version);
CREATE TABLE tokens (name TEXT PRIMARY KEY, hash BLOB NOT NULL UNIQUE, operator INTEGER NOT NULL) WITHOUT ROWID;
"""
_STEPS = (_TABLES,)


class KnownModel(NamedTuple):
    """A model that the service has or had."""

    digest: str
    file: str
    version: int
    """Of the items when it came."""
    replaced: float | None
    """When another took its place, in seconds since 1970; None: it is the one that is served."""


class AddedItem(NamedTuple):
    """An item that was added after the model came."""

    id: str
    given: Mapping[str, Any]
    """What was given of it, apart from its id."""
    row: bytes
    """What the model makes of it, as a letter."""
    version: int = 0
    number: int = 0
    """No other item that was ever added has it."""


class Changes(NamedTuple):
    """What changed after a version."""

    version: int
    added: list[AddedItem]
    removed: list[str]


def create(folder: Path) -> None:
    """Create an empty database that only its owner can read."""
    private_folder(folder / MODELS)
    path = folder / DATABASE
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    with closing(_opened(folder)) as database:
        database.put("state", version=1)


def _opened(folder: Path) -> Database:
    path = folder / DATABASE
    if not path.exists():
        raise HomebodyError(f"The service in {folder} has lost its database {DATABASE}: make another service.")
    database = connect(path, what="service's database")
    database.migrate("service", _STEPS)
    return database


class ServiceStore:
    """A service's database and its models' files. Several processes may use them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._db = folder, _opened(folder)
        self.transaction, self.snapshot = self._db.transaction, self._db.snapshot

    def close(self) -> None:
        self._db.close()

    def changed_elsewhere(self) -> int:
        """A number that changes when another process, or another connection, has written."""
        return int(self._db.one("PRAGMA data_version")[0])

    # Models

    def models(self) -> list[KnownModel]:
        """Every model that was ever here, in the order in which they came."""
        rows = self._db.execute("SELECT digest, file, version, replaced FROM models ORDER BY version, number")
        return [KnownModel(*row) for row in rows]

    def current(self) -> KnownModel:
        """The model that is served."""
        row = self._db.one("SELECT digest, file, version, replaced FROM models WHERE replaced IS NULL")
        if row is None:
            raise HomebodyError(f"The service in {self._folder} has no model: `homebody serve reload` gives it one.")
        return KnownModel(*row)

    def changing_model(self, patience: float = _PATIENCE) -> AbstractContextManager[int]:
        """Be the only process that writes a model's file and then its row."""
        busy = f"Another process gives the service in {self._folder} a model: try again."
        return holding(self._folder / ".changing", busy, patience=patience)

    def write_model(self, content: bytes) -> str:
        """Write a model's file, and return its name. It counts for nothing before `replace_model`."""
        name = f"{hashlib.sha256(content).hexdigest()[:32]}.model"
        with replacing(self._folder / MODELS / name) as file:
            file.write(content)
        sync_folder(self._folder / MODELS)
        return name

    def read_model(self, file: str) -> bytes:
        path = self._folder / MODELS / file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise HomebodyError(f"The model {path} cannot be read: {error.strerror or error}.") from error
        if hashlib.sha256(content).hexdigest()[:32] != path.stem:
            raise HomebodyError(f"The model {path} is damaged: `homebody serve reload` writes another.")
        return content

    def replace_model(self, digest: str, file: str, now: float, added: Iterable[AddedItem]) -> None:
        """Serve this model from now on, with these of the items that were added. Within `transaction`."""
        version = self.next_version()
        self._db.execute("UPDATE models SET replaced = ? WHERE replaced IS NULL", (now,))
        self._db.execute("DELETE FROM models WHERE digest = ?", (digest,))
        self._db.put("models", digest=digest, file=file, version=version)
        self._db.execute("DELETE FROM added")
        for item in added:
            self._put(item, digest, version)

    def tidy(self, keep: Iterable[str]) -> None:
        """Delete all models' files but these. Within `changing_model`."""
        kept = set(keep)
        for path in (self._folder / MODELS).iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    # Items

    @property
    def version(self) -> int:
        return int(self._db.one("SELECT version FROM state")[0])

    def next_version(self) -> int:
        """Begin the next version. Within `transaction`."""
        self._db.execute("UPDATE state SET version = version + 1")
        return self.version

    def changes(self, since: int) -> Changes:
        """What changed after a version."""
        with self.snapshot():
            rows = "SELECT id, given, row, version, number FROM added WHERE version > ? ORDER BY number"
            added = [AddedItem(id_, json.loads(given), *rest) for id_, given, *rest in self._db.rows(rows, (since,))]
            gone = [id_ for (id_,) in self._db.rows("SELECT id FROM removed WHERE version > ? ORDER BY id", (since,))]
            return Changes(self.version, added, gone)

    def add(self, items: Iterable[AddedItem], model: str) -> int:
        """Add items, as one version. Within `transaction`, in which `current` was seen to be this model."""
        version = self.next_version()
        for item in items:
            if self.has(item.id):
                raise HomebodyError(f"There is an item '{item.id}' already: remove it first, or leave it out.")
            self._db.execute("DELETE FROM removed WHERE id = ?", (item.id,))
            self._put(item, model, version)
        return version

    def has(self, id_: str) -> bool:
        """Whether an item was added, and is still here."""
        return self._db.one("SELECT 1 FROM added WHERE id = ?", id_) is not None

    def is_removed(self, id_: str) -> bool:
        return self._db.one("SELECT 1 FROM removed WHERE id = ?", id_) is not None

    def remove(self, id_: str) -> int:
        """Remove an item, as one version. Within `transaction`."""
        version = self.next_version()
        self._db.execute("DELETE FROM added WHERE id = ?", (id_,))
        self._db.put("removed", "id", id=id_, version=version)
        return version

    def _put(self, item: AddedItem, model: str, version: int) -> None:
        given = json.dumps(dict(item.given))
        self._db.put("added", id=item.id, given=given, model=model, row=item.row, version=version)

    # Tokens

    def add_token(self, name: str, *, operator: bool) -> str:
        """Make a token, of which only the hash is kept."""
        token = secrets.token_urlsafe(32)
        with self.transaction():
            if self._db.one("SELECT 1 FROM tokens WHERE name = ?", name):
                raise HomebodyError(f"There is a token '{name}' already: remove it, or choose another name.")
            self._db.put("tokens", name=name, hash=hashed(token), operator=int(operator))
        return token

    def remove_token(self, name: str) -> None:
        if not self._db.execute("DELETE FROM tokens WHERE name = ?", (name,)).rowcount:
            known = ", ".join(self.tokens()) or "there is none"
            raise HomebodyError(f"There is no token '{name}' ({known}).")

    def tokens(self) -> dict[str, bool]:
        """Tokens by name: whether they are an operator's."""
        rows = self._db.execute("SELECT name, operator FROM tokens ORDER BY name").fetchall()
        return {name: bool(operator) for name, operator in rows}

    def hashes(self) -> dict[bytes, bool]:
        """Hashes of tokens: whether they are an operator's."""
        rows: Iterator[tuple[bytes, int]] = iter(self._db.execute("SELECT hash, operator FROM tokens"))
        return {bytes(hash_): bool(operator) for hash_, operator in rows}

    def counts(self) -> dict[str, int]:
        """Numbers for the operator."""
        tables = ("added", "removed", "tokens", "models")
        return {table: int(self._db.one(f"SELECT count(*) FROM {table}")[0]) for table in tables}


def hashed(token: str) -> bytes:
    """What is kept of a token. It is 32 random bytes: a plain hash of it cannot be searched."""
    return hashlib.sha256(token.encode()).digest()

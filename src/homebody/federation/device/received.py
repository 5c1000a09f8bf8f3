"""What a service has sent a device for all of its people: its model, and rows that are the same for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from homebody.federation.device.store import HomeStore

__all__ = ["Received", "ReceivedPart"]


class ReceivedPart(NamedTuple):
    """One thing that came, as it came."""

    model: str
    """The digest of the model that it belongs to."""
    version: int
    """The version of the catalogue."""
    bytes: bytes


class Received:
    """What came last, by name: `head` is the model without rows; the rows are under the way that they came for."""

    def __init__(self, store: HomeStore) -> None:
        self._store = store

    def get(self, name: str, model: str = "") -> ReceivedPart | None:
        """What came last under this name; model: only if it belongs to this model."""
        query = "SELECT model, version, bytes FROM received WHERE name = ? AND ? IN ('', model)"
        rows = self._store.read(query, (name, model))
        return ReceivedPart(*rows[0]) if rows else None

    @property
    def model(self) -> str:
        """The digest of the model that is here; empty: none."""
        rows = self._store.read("SELECT model FROM received WHERE name = 'head'")
        return str(rows[0][0]) if rows else ""

    @property
    def way(self) -> str:
        """The way to be served that the rows here came for; empty: none."""
        rows = self._store.read("SELECT name FROM received WHERE name != 'head'")
        return str(rows[0][0]) if rows else ""

    def put(self, parts: Mapping[str, ReceivedPart]) -> None:
        """Keep these in the place of all that came before."""
        with self._store.writing() as db:
            db.execute("DELETE FROM received")
            db.executemany("INSERT INTO received VALUES (?, ?, ?, ?)", [(name, *part) for name, part in parts.items()])

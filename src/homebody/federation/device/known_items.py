"""The catalogue that a device knows: items as the server numbers them, and the schema of features."""

from __future__ import annotations

import json
from collections.abc import Sequence

from homebody.errors import HomebodyError
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import one_line

__all__ = ["ITEM_LIMIT", "KnownItems"]

ITEM_LIMIT = 1000
"""Characters of an item's id."""


class KnownItems:
    """The items that the server has told a device of, numbered from 0."""

    def __init__(self, store: HomeStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return int(self._store.read("SELECT COUNT(*) FROM item")[0][0])

    def all(self) -> list[tuple[str, str]]:
        """Id and name of every item, by number; an item without a name is called by its id."""
        rows = self._store.read("SELECT id, name FROM item ORDER BY position")
        return [(item, name or item) for item, name in rows]

    def add(self, first: int, items: Sequence[tuple[str, str]]) -> int:
        """Add items, numbered from `first`; known items may come again. Returns how many are new."""
        checked = [(one_line(item, "An item id", ITEM_LIMIT), str(name)) for item, name in items]
        rows = [(number, *pair) for number, pair in enumerate(checked, first)]
        with self._store.writing(data=True) as db:
            count = len(self)
            if not 0 <= first <= count:
                raise HomebodyError(
                    f"Items from number {first} on cannot be added: the next unknown one is number {count}."
                )
            before = dict(self._store.read("SELECT position, id FROM item WHERE position >= ?", (first,)))
            new = [item for _, item, _ in rows[len(before) :]]
            query = "SELECT id FROM item WHERE id IN (SELECT value FROM json_each(?))"
            taken = {item for (item,) in self._store.read(query, (json.dumps(new),))}
            for number, item, _ in rows:
                if before.get(number, item) != item:
                    raise HomebodyError(
                        f"Item number {number} is '{before[number]}' here and '{item}' now: it is another catalogue, "
                        "and needs a device of its own."
                    )
                if number not in before:
                    if item in taken:
                        raise HomebodyError(f"The item '{item}' cannot have two numbers in one catalogue.")
                    taken.add(item)
            insert = "INSERT INTO item VALUES (?, ?, ?) ON CONFLICT (position) DO UPDATE SET name = excluded.name"
            db.executemany(insert, rows)
            return len(new)

    def put_schema(self, digest: str, content: bytes) -> None:
        """Keep a schema of features in place of the one before."""
        with self._store.writing(data=True) as db:
            db.execute("DELETE FROM sheet")
            db.execute("INSERT INTO sheet VALUES (?, ?)", (digest, content))

    def schema(self, digest: str = "") -> bytes | None:
        """The schema of features, or None if the device has none or, where a digest is given, another."""
        rows = self._store.read("SELECT bytes FROM sheet WHERE ? IN ('', digest)", (digest,))
        return rows[0][0] if rows else None

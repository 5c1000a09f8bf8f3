"""The histories of a device's people as arrays, by the numbers of the catalogue."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np
import polars as pl

from homebody.counts import several
from homebody.data.population import Population
from homebody.federation.device.people import Person

__all__ = ["gather"]

_ROWS = (
    "SELECT position, time, rating FROM interaction JOIN item ON item.id = interaction.item "
    "WHERE person = ? ORDER BY time, interaction.id"
)
_UNKNOWN = (
    "SELECT item, COUNT(*) FROM interaction WHERE person = ? AND NOT EXISTS "
    "(SELECT 1 FROM item WHERE item.id = interaction.item) GROUP BY item"
)


def gather(database: sqlite3.Connection, people: Sequence[Person]) -> Population:
    """One user a person, in their order."""
    rows = [database.execute(_ROWS, (person.slot,)).fetchall() for person in people]
    flat = [row for own in rows for row in own]
    catalogue = database.execute("SELECT id, name FROM item ORDER BY position").fetchall()
    notes = _unknown_items(database, people, len(flat))
    columns = {}
    for place, label in ((1, "Times"), (2, "Ratings")):
        values = [row[place] for row in flat]
        missing = values.count(None)
        if missing in (0, len(flat)):
            columns[label] = values if missing == 0 and values else None
        else:
            columns[label] = None
            have = "has" if missing == 1 else "have"
            notes.append(f"{label} are left out: {missing:,} of {len(flat):,} interactions {have} none.")
    indptr = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(own) for own in rows], out=indptr[1:])
    times, ratings = columns["Times"], columns["Ratings"]
    return Population(
        "home",
        indptr,
        np.array([row[0] for row in flat], dtype=np.int32),
        n_items=len(catalogue),
        # // also takes the whole part of what is between two numbers.
        times=None if times is None else np.array([int(time // 1) for time in times], dtype=np.int64),
        ratings=None if ratings is None else np.array(ratings, dtype=np.float32),
        user_ids=pl.Series([person.name for person in people], dtype=pl.String),
        item_ids=pl.Series([item for item, _ in catalogue], dtype=pl.String),
        item_names=pl.Series([name or item for item, name in catalogue], dtype=pl.String),
        notes=tuple(notes),
    )


def _unknown_items(database: sqlite3.Connection, people: Sequence[Person], known: int) -> list[str]:
    unknown = [dict(database.execute(_UNKNOWN, (person.slot,))) for person in people]
    count = sum(sum(own.values()) for own in unknown)
    if not count:
        return []
    items = len({item for own in unknown for item in own})
    are = "is" if count == 1 else "are"
    some = several(items, "item")
    return [
        f"{count:,} of {known + count:,} interactions {are} with {some} that the catalogue does not know: left out."
    ]

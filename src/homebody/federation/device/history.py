"""The histories of a device's people: imported from files, extended as things happen, deleted, exported."""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from homebody.errors import HomebodyError, several, unknown_name
from homebody.federation.device.known_items import ITEM_LIMIT, KnownItems
from homebody.federation.device.people import People, Person, Who
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import one_line

if TYPE_CHECKING:
    from homebody.data.population import Population
    from homebody.federation.device.history_files import HistoryRows

__all__ = ["NAME_LIMIT", "TIME_LIMIT", "History", "Imported", "Interaction", "chosen_users", "finite", "read_time"]

TIME_LIMIT = 2**62
"""The largest time, in either direction from 0: whole and fractional times share a column of 64 bits."""
NAME_LIMIT = 200
RATING_LIMIT = 3.4028234663852886e38
"""The largest number that 32 bits hold."""
DAY = 86_400
_INTERACTIONS = "SELECT item, time, rating FROM interaction WHERE person = ?"
_KNOWN = (
    "SELECT position, time, rating FROM interaction JOIN item ON item.id = interaction.item "
    "WHERE person = ? ORDER BY time, interaction.id"
)
_CLICKED = "? IN (SELECT value FROM json_each(clicked))"
_UNKNOWN = (
    "SELECT item, COUNT(*) FROM interaction WHERE person = ? AND NOT EXISTS "
    "(SELECT 1 FROM item WHERE item.id = interaction.item) GROUP BY item"
)


class Interaction(NamedTuple):
    """One interaction of a person with an item."""

    item: str
    time: int | float | None
    """In the source's unit; dates are seconds since 1970."""
    rating: float | None


class Imported(NamedTuple):
    """How many of a file's rows were added, and how many were not."""

    added: int
    repeated: int
    """Already in the history."""
    left_out: int
    """Of people who were not asked for."""
    new: tuple[Person, ...]
    """People who were added with the file."""


class History:
    """Everyone's interactions."""

    def __init__(self, store: HomeStore, people: People, items: KnownItems) -> None:
        self._store, self._people, self._items = store, people, items

    def import_file(
        self,
        file: str | Path,
        person: str | Person | None = None,
        *,
        user_col: str | None = None,
        item_col: str | None = None,
        time_col: str | None = None,
        rating_col: str | None = None,
        only: Sequence[str] = (),
    ) -> Imported:
        """Add the rows of a CSV or Parquet file, all or none.

        The rows belong to `person`, or to the people that the column of users names. New people are added in order of
        first appearance. `only` takes the rows of some users, and adds new ones in the order given. A row that is
        already in the history counts as repeated, so a file that has grown can be imported again; a row that occurs n
        times in the file occurs n times in the history. Columns are found by their usual names, as in
        `homebody.data.table`. Times and ratings may be missing, from all rows or from some.
        """
        from homebody.federation.device.history_files import read_rows

        whose = person.name if isinstance(person, Person) else person
        if whose is not None:
            whose = one_line(whose, "A person's name", NAME_LIMIT)
            if only:
                raise HomebodyError("A file of one person's has nobody to choose: leave out either --person or --only.")
        given = {"user": user_col, "item": item_col, "time": time_col, "rating": rating_col}
        path = Path(file)
        rows = read_rows(path, whose, given, item_limit=ITEM_LIMIT, name_limit=NAME_LIMIT)
        names = [whose] if whose is not None else chosen_users(path, rows.users or (), only)
        with self._store.writing(data=True) as db:
            known = {member.name: member for member in self._people.all()}
            new = tuple(self._people.add(name) for name in names if name not in known)
            slots = {member.name: member.slot for member in (*known.values(), *new) if member.name in set(names)}
            fresh, repeated, left_out = self._sort_out(rows, slots, whose)
            db.executemany("INSERT INTO interaction (person, item, time, rating) VALUES (?, ?, ?, ?)", fresh)
        return Imported(len(fresh), repeated, left_out, new)

    def append(
        self, who: Who, item: str, time: int | float | None = None, rating: int | float | None = None
    ) -> Interaction:
        """Add one interaction; it happened now, unless a time is given."""
        item = one_line(item, "An item id", ITEM_LIMIT)
        when = int(clock.time()) if time is None else finite(time, "A time", TIME_LIMIT)
        new = Interaction(item, when, None if rating is None else float(finite(rating, "A rating", RATING_LIMIT)))
        with self._store.writing(data=True) as db:
            person = self._people.find(who)
            if time is None:
                self.refuse_other_unit(person)
            db.execute("INSERT INTO interaction (person, item, time, rating) VALUES (?, ?, ?, ?)", (person.slot, *new))
        return new

    def delete(
        self,
        who: Who,
        item: str | None = None,
        *,
        all: bool = False,  # noqa: A002
        before: int | float | None = None,
    ) -> int:
        """Delete a person's interactions with an item, or all of them; `before`: only older ones. Returns their number.

        The impressions in which the item was clicked go too, or all of them. An interaction without a time is not older
        than any time. The deleted rows are overwritten in the file. What a private state learnt from them stays until
        the person opts out.
        """
        if (item is None) != all:
            raise HomebodyError("Say what to delete: either an item, or --all.")
        where = "person = ?"
        values: list[object] = [self._people.find(who).slot]
        if item is not None:
            where, values = f"{where} AND item = ?", [*values, one_line(item, "An item id", ITEM_LIMIT)]
        if before is not None:
            where, values = f"{where} AND time < ?", [*values, finite(before, "A time", TIME_LIMIT)]
        with self._store.writing(data=True) as db:
            count = db.execute(f"DELETE FROM interaction WHERE {where}", values).rowcount
            db.execute(f"DELETE FROM impression WHERE {where.replace('item = ?', _CLICKED)}", values)
        self._store.scrub()
        return count

    def export(self, file: str | Path, who: Who | None = None) -> int:
        """Write one person's history, or everyone's, as a CSV file that `import_file` reads. Returns its rows."""
        from homebody.federation.device.history_files import write_rows

        people = self._people.all() if who is None else [self._people.find(who)]
        return write_rows(Path(file), ((person.name, *row) for person in people for row in self.of(person)))

    def of(self, who: Who) -> list[Interaction]:
        """A person's interactions, oldest first, ties in the order in which they came; those without a time first."""
        rows = self._store.read(f"{_INTERACTIONS} ORDER BY time, id", (self._people.find(who).slot,))
        return [Interaction(*row) for row in rows]

    def times(self, who: Who, n_items: int, count: int) -> list[int | float | None]:
        """The times of a person's last `count` interactions with the first items of the catalogue."""
        rows = self._store.read(_KNOWN, (self._people.find(who).slot,))
        times = [time for position, time, _ in rows if position < n_items]
        return times[len(times) - count :]

    def lengths(self) -> dict[int, int]:
        """How many interactions each person has, by slot."""
        counts = dict(self._store.read("SELECT person, COUNT(*) FROM interaction GROUP BY person"))
        return {person.slot: counts.get(person.slot, 0) for person in self._people.all()}

    def population(
        self, people: Sequence[Person] | None = None, n_items: int | None = None, longest: int | None = None
    ) -> Population:
        """The histories of these people as arrays, or of all who take part: user u is the u-th of them.

        Items that the catalogue does not know are left out. Times and ratings are left out unless every interaction
        has one. The notes report both. n_items: only the first items of the catalogue, which may have grown since;
        longest: only this many of a person's latest interactions.
        """
        import numpy as np
        import polars as pl

        from homebody.data.population import Population

        with self._store.reading():
            people = self._people.active() if people is None else people
            histories = [self._store.read(_KNOWN, (person.slot,)) for person in people]
            unknown = [dict(self._store.read(_UNKNOWN, (person.slot,))) for person in people]
            catalogue = self._items.all()[:n_items]
        known = sum(map(len, histories))
        notes = _unknown_items(unknown, known)
        complete = []
        for column, label in ((1, "Times"), (2, "Ratings")):
            missing = sum(row[column] is None for history in histories for row in history)
            complete.append(not missing and known > 0)
            if 0 < missing < known:
                have = "has" if missing == 1 else "have"
                notes.append(f"{label} are left out: {missing:,} of {known:,} interactions {have} none.")
        histories = [[row for row in history if row[0] < len(catalogue)] for history in histories]
        histories = histories if longest is None else [history[-longest:] for history in histories]
        flat = [row for history in histories for row in history]
        return Population(
            "home",
            np.cumsum([0, *map(len, histories)], dtype=np.int64),
            np.array([row[0] for row in flat], dtype=np.int32),
            n_items=len(catalogue),
            # // rounds fractions down, also below 0.
            times=np.array([int(row[1] // 1) for row in flat], dtype=np.int64) if complete[0] else None,
            ratings=np.array([row[2] for row in flat], dtype=np.float32) if complete[1] else None,
            user_ids=pl.Series([person.name for person in people], dtype=pl.String),
            item_ids=pl.Series([item for item, _ in catalogue], dtype=pl.String),
            item_names=pl.Series([name for _, name in catalogue], dtype=pl.String),
            notes=tuple(notes),
        )

    def _sort_out(
        self, rows: HistoryRows, slots: dict[str, int], whose: str | None
    ) -> tuple[list[tuple[object, ...]], int, int]:
        """The rows to add; how many are in the history already; how many belong to other people."""
        known: Counter[tuple[object, ...]] = Counter()
        for slot in slots.values():
            known.update((slot, *row) for row in self._store.read(_INTERACTIONS, (slot,)))
        users = rows.users if rows.users is not None else [whose] * len(rows.items)
        fresh: list[tuple[object, ...]] = []
        repeated = left_out = 0
        for user, *rest in zip(users, rows.items, rows.times, rows.ratings, strict=True):
            if user not in slots:
                left_out += 1
                continue
            row = (slots[user], *rest)
            if known[row] > 0:
                known[row] -= 1
                repeated += 1
            else:
                fresh.append(row)
        return fresh, repeated, left_out

    def refuse_other_unit(self, person: Person) -> None:
        """Refuse to add the current second to a history whose times have another unit: it would be misplaced."""
        ((last,),) = self._store.read("SELECT MAX(time) FROM interaction WHERE person = ?", (person.slot,))
        if last is not None and last > clock.time() + DAY:
            raise HomebodyError(
                f"The last time of {person.name} is {last}, which is not in the past as seconds since 1970: "
                "give the time of the new one with --time."
            )


def read_time(text: str) -> int | float:
    """A time as people write it: a number, or an ISO date as seconds since 1970; without a zone it is UTC.

    >>> read_time("881250949"), read_time("2024-01-01"), read_time("2024-01-01T01:00:00.5+01:00")
    (881250949, 1704067200, 1704067200.5)
    """
    for read in (int, float, _seconds):
        try:
            return finite(read(text), "A time", TIME_LIMIT)
        except ValueError:
            continue
    raise HomebodyError(f"A time must be a number or an ISO date, such as 2024-02-01T18:30, not '{text}'.")


def _seconds(text: str) -> int | float:
    date = datetime.fromisoformat(text)
    since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    micro = since // timedelta(microseconds=1)
    return micro // 10**6 if micro % 10**6 == 0 else micro / 10**6


def finite(value: Any, what: str, most: float) -> int | float:
    """A number from -most to most.

    >>> finite(3, "A time", 1e9), finite(2.5, "A time", 1e9)
    (3, 2.5)
    >>> finite("noon", "A time", 1e9)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: A time must be a finite number, not 'noon'.
    """
    real = isinstance(value, int | float | Real) and not isinstance(value, bool)
    if real and -most <= value <= most:
        return int(value) if isinstance(value, Integral) else float(value)
    raise HomebodyError(f"{what} must be a finite number, not {value!r:.80}.")


def chosen_users(path: Path, found: Sequence[str], only: Sequence[str]) -> list[str]:
    """The users whose rows are imported, in the order in which they are added. found: the user of each row."""
    users = dict.fromkeys(found)
    for name in only:
        if name not in users:
            if len(users) <= 20:
                raise unknown_name(f"user in {path}", name, users)
            first = found[0]
            raise HomebodyError(f"There is no user '{name}' in {path}; the first of {len(users):,} is '{first}'.")
    return list(dict.fromkeys(only)) if only else list(users)


def _unknown_items(unknown: Sequence[dict[str, int]], known: int) -> list[str]:
    """The note about interactions with items that the catalogue does not know, if there are any."""
    count = sum(sum(counts.values()) for counts in unknown)
    if not count:
        return []
    are, items = "is" if count == 1 else "are", several(len({item for counts in unknown for item in counts}), "item")
    return [
        f"{count:,} of {known + count:,} interactions {are} with {items} that the catalogue does not know: left out."
    ]

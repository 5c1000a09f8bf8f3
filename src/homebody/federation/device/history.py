"""What people did, as their device holds it: brought in from files, noted as it happens, deleted, taken along."""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.device.people import People, Person, Who
from homebody.federation.device.store import TIME_LIMIT, finite
from homebody.federation.service.text import one_line

if TYPE_CHECKING:
    from homebody.federation.device.history_files import Rows

__all__ = ["History", "Imported", "Interaction", "moment"]

ITEM_LIMIT = 1000
"""Characters of an item's id."""
NAME_LIMIT = 200
RATING_LIMIT = 3.4028234663852886e38
"""The largest that 32 bits hold."""
DAY = 86_400


class Interaction(NamedTuple):
    """One thing a person did with one item."""

    item: str
    time: int | float | None
    """In the source's unit; dates are seconds since 1970."""
    rating: float | None


class Imported(NamedTuple):
    """What became of a file's rows."""

    added: int
    repeated: int
    """Known already."""
    left_out: int
    """Of people who were not asked for."""
    new: tuple[Person, ...]
    """Who was not known before."""


class History(People):
    """Everyone's interactions."""

    def import_csv(
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
        """Add a CSV or Parquet file's rows, all or nothing.

        They are the person's, or with a column of users those whom it names; whoever is new is added, in order of
        first appearance. `only` takes some of the file's users alone, new ones in the order given. A row that is
        known counts as repeated, so a file that has grown can be imported again; one that stands n times in the file
        stands n times in the history. Columns are found by their usual names, as in `homebody.data.table`; times and
        ratings may be absent, from all rows or from some.
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
        names = [whose] if whose is not None else _chosen(path, rows, only)
        with self._writing(data=True):
            known = {one.name: one for one in self.people()}
            new = tuple(self._add_person(name) for name in names if name not in known)
            slots = {name: one.slot for name, one in known.items() if name in set(names)}
            slots.update((one.name, one.slot) for one in new)
            fresh, repeated, left_out = self._sorted_out(rows, slots, whose)
            self._db.executemany("INSERT INTO interaction (person, item, time, rating) VALUES (?, ?, ?, ?)", fresh)
        return Imported(len(fresh), repeated, left_out, new)

    def append(
        self, who: Who, item: str, time: int | float | None = None, rating: int | float | None = None
    ) -> Interaction:
        """Something that happened: now, unless a time is given."""
        item = one_line(item, "An item id", ITEM_LIMIT)
        found = Interaction(
            item,
            int(clock.time()) if time is None else finite(time, "A time", TIME_LIMIT),
            None if rating is None else float(finite(rating, "A rating", RATING_LIMIT)),
        )
        with self._writing(data=True):
            person = self.person(who)
            if time is None:
                self._refuse_other_clock(person)
            self._db.execute(
                "INSERT INTO interaction (person, item, time, rating) VALUES (?, ?, ?, ?)", (person.slot, *found)
            )
        return found

    def delete(
        self,
        who: Who,
        item: str | None = None,
        *,
        all: bool = False,  # noqa: A002
        before: int | float | None = None,
    ) -> int:
        """Delete what the person did with an item, or all; with `before`, only what is older. How much it was.

        What has no time is not older than anything. It is overwritten in the file; what a private state learnt from it
        stays there until the person opts out.
        """
        if (item is None) != all:
            raise HomebodyError("Say what to delete: either an item, or --all.")
        where = "person = ?"
        values: list[object] = [self.person(who).slot]
        if item is not None:
            where, values = f"{where} AND item = ?", [*values, one_line(item, "An item id", ITEM_LIMIT)]
        if before is not None:
            where, values = f"{where} AND time < ?", [*values, finite(before, "A time", TIME_LIMIT)]
        with self._writing(data=True):
            count = self._db.execute(f"DELETE FROM interaction WHERE {where}", values).rowcount
        self._scrub()
        return count

    def export(self, file: str | Path, who: Who | None = None) -> int:
        """One person's history, or everyone's, as a CSV file that `import_csv` takes; how many rows it has."""
        from homebody.federation.device.history_files import write_rows

        people = self.people() if who is None else [self.person(who)]
        return write_rows(Path(file), self._exported(people))

    def history(self, who: Who) -> list[Interaction]:
        """Oldest first, ties in the order they came; what has no time stands before what has one."""
        rows = self._ask(f"{_HISTORY} ORDER BY time, id", (self.person(who).slot,))
        return [Interaction(*row) for row in rows]

    def lengths(self) -> dict[int, int]:
        """How many interactions each person has, by slot."""
        counts = dict(self._ask("SELECT person, COUNT(*) FROM interaction GROUP BY person"))
        return {person.slot: counts.get(person.slot, 0) for person in self.people()}

    def _exported(self, people: Sequence[Person]) -> Iterator[tuple[str, str, int | float | None, float | None]]:
        for person in people:
            for row in self.history(person):
                yield (person.name, *row)

    def _sorted_out(
        self, rows: Rows, slots: dict[str, int], whose: str | None
    ) -> tuple[list[tuple[object, ...]], int, int]:
        """The rows to add; how many are known already; how many are of others."""
        known: Counter[tuple[object, ...]] = Counter()
        for slot in slots.values():
            known.update((slot, *row) for row in self._ask(_HISTORY, (slot,)))
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

    def _refuse_other_clock(self, person: Person) -> None:
        """Now is a number of seconds: in a history that counts otherwise, it would stand in the wrong place."""
        ((last,),) = self._ask("SELECT MAX(time) FROM interaction WHERE person = ?", (person.slot,))
        if last is not None and last > clock.time() + DAY:
            raise HomebodyError(
                f"The last time of {person.name} is {last}, which is not in the past as seconds since 1970: "
                "give the time of the new one with --time."
            )


_HISTORY = "SELECT item, time, rating FROM interaction WHERE person = ?"


def moment(text: str) -> int | float:
    """A time as people write it: a number, or an ISO date as seconds since 1970; without a zone it is UTC.

    >>> moment("881250949"), moment("2024-01-01"), moment("2024-01-01T01:00:00.5+01:00")
    (881250949, 1704067200, 1704067200.5)
    """
    for read in (int, float, _seconds):
        try:
            return finite(read(text), "A time", TIME_LIMIT)
        except ValueError:
            continue
    raise HomebodyError(f"A time must be a number or an ISO date, such as 2024-02-01T18:30, not '{text}'.")


def _seconds(text: str) -> int | float:
    found = datetime.fromisoformat(text)
    since = (found if found.tzinfo else found.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    micro = since // timedelta(microseconds=1)
    return micro // 10**6 if micro % 10**6 == 0 else micro / 10**6


def _chosen(path: Path, rows: Rows, only: Sequence[str]) -> list[str]:
    """Whose rows are taken, in the order they are numbered."""
    assert rows.users is not None
    there = dict.fromkeys(rows.users)
    for name in only:
        if name not in there:
            if len(there) <= 20:
                raise unknown_name(f"user in {path}", name, there)
            first = rows.users[0]
            raise HomebodyError(f"There is no user '{name}' in {path}; the first of {len(there):,} is '{first}'.")
    return list(dict.fromkeys(only)) if only else list(there)

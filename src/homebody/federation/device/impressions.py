"""What a device's people were shown and what of it they clicked: imported, noted as it happens, deleted, exported."""

from __future__ import annotations

import json
import time as clock
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from homebody.errors import HomebodyError, refuse_unknown
from homebody.federation.device.history import (
    NAME_LIMIT,
    TIME_LIMIT,
    History,
    Imported,
    Interaction,
    chosen_users,
    finite,
)
from homebody.federation.device.known_items import ITEM_LIMIT, KnownItems
from homebody.federation.device.people import People, Person, Who
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import one_line

if TYPE_CHECKING:
    from homebody.data.population import Population

__all__ = ["Impression", "ImpressionStore", "Ranked"]

Ranked = Literal["server", "device"]
"""Who put a list in order. What the server ranked it knows; what a device ranked it must not learn."""
MOST_SHOWN = 10_000
"""Items of one list."""
_COLUMNS = "time, ranked, shown, clicked"


class Impression(NamedTuple):
    """A list of items that a person was shown, and what of it they clicked."""

    time: int | float
    """In the unit of the history's times; dates are seconds since 1970."""
    ranked: Ranked
    shown: tuple[str, ...]
    clicked: tuple[str, ...]


class ImpressionStore:
    """Everyone's impressions. A list without a click is kept as the last one that its person was shown."""

    def __init__(self, store: HomeStore, people: People, items: KnownItems, history: History) -> None:
        self._store, self._people, self._items, self._history = store, people, items, history

    def import_file(
        self,
        file: str | Path,
        person: str | Person | None = None,
        *,
        ranked: str = "device",
        only: Sequence[str] = (),
    ) -> Imported:
        """Add the impressions of a CSV or Parquet file, all or none; counted in impressions.

        The file has the columns impression, item, clicked and time, in any of their usual names, and one of users
        unless `person` is given: that of `--impressions`, whose times must be there. New people are added in order of
        first appearance; `only` takes those of some users. An impression that is known already is not added again.
        """
        from homebody.federation.device.history_files import read_impressions

        refuse_unknown("one who ranks a list", [ranked], get_args(Ranked))
        whose = person.name if isinstance(person, Person) else person
        if whose is not None:
            whose = one_line(whose, "A person's name", NAME_LIMIT)
            if only:
                raise HomebodyError("A file of one person's has nobody to choose: leave out either --person or --only.")
        path = Path(file)
        rows = read_impressions(path, whose, item_limit=ITEM_LIMIT, name_limit=NAME_LIMIT)
        users = [str(row.user) for row in rows]
        names = [whose] if whose is not None else chosen_users(path, users, only)
        fresh: list[tuple[object, ...]] = []
        repeated = left_out = 0
        with self._store.writing(data=True) as db:
            before = {member.name: member for member in self._people.all()}
            new = tuple(self._people.add(name) for name in names if name not in before)
            slots = {member.name: member.slot for member in (*before.values(), *new) if member.name in set(names)}
            known: Counter[tuple[object, ...]] = Counter()
            for slot in slots.values():
                some = self._store.read(f"SELECT {_COLUMNS} FROM impression WHERE person = ?", (slot,))
                known.update((slot, *row) for row in some)
            for row in rows:
                user = whose if whose is not None else row.user
                if user not in slots:
                    left_out += 1
                    continue
                added = _as_row(slots[user], Impression(row.time, _ranked(ranked), row.shown, row.clicked))
                if known[added] > 0:
                    known[added] -= 1
                    repeated += 1
                else:
                    fresh.append(added)
            db.executemany(_INSERT, fresh)
        return Imported(len(fresh), repeated, left_out, new)

    def append(
        self,
        who: Who,
        shown: Sequence[str],
        clicked: Sequence[str] = (),
        time: int | float | None = None,
        ranked: str = "device",
    ) -> Impression:
        """Add one impression, as of now unless a time is given; what was clicked joins the history at that time."""
        refuse_unknown("one who ranks a list", [ranked], get_args(Ranked))
        items, clicks = (tuple(one_line(item, "An item id", ITEM_LIMIT) for item in some) for some in (shown, clicked))
        if not 1 <= len(items) <= MOST_SHOWN or len(set(items)) < len(items):
            raise HomebodyError(f"An impression shows 1 to {MOST_SHOWN:,} different items, each once.")
        for item in clicks:
            if item not in items:
                raise HomebodyError(f"'{item}' was clicked and not shown: give it with --shown too.")
        when = int(clock.time()) if time is None else finite(time, "A time", TIME_LIMIT)
        new = Impression(when, _ranked(ranked), items, clicks)
        with self._store.writing(data=True) as db:
            person = self._people.find(who)
            if time is None:
                self._history.refuse_other_unit(person)
            db.execute(_INSERT, _as_row(person.slot, new))
            for item in clicks:
                self._history.append(person, item, when)
        return new

    def show(self, who: Who, shown: Sequence[str], ranked: str) -> None:
        """Keep a list that is shown now. It takes the place of the last one, if nothing of that was clicked."""
        with self._store.writing(data=True) as db:
            person = self._people.find(who)
            db.execute("DELETE FROM impression WHERE person = ? AND clicked = '[]'", (person.slot,))
            if shown:
                new = Impression(int(clock.time()), _ranked(ranked), tuple(shown), ())
                db.execute(_INSERT, _as_row(person.slot, new))

    def click(self, who: Who, item: str) -> Interaction:
        """Note a click in the list that a person was shown last; it joins the history too."""
        with self._store.writing(data=True) as db:
            person = self._people.find(who)
            query = "SELECT id, shown, clicked FROM impression WHERE person = ? ORDER BY id DESC LIMIT 1"
            rows = self._store.read(query, (person.slot,))
            if not rows:
                raise HomebodyError(
                    f"{person.name} was shown no list yet: ask for one with `homebody client recommend`."
                )
            ((number, shown, clicked),) = rows
            if item not in json.loads(shown):
                raise HomebodyError(
                    f"'{item}' is not in the list that {person.name} was shown last: note it with `homebody client "
                    "append`."
                )
            clicks = json.loads(clicked)
            if item in clicks:
                raise HomebodyError(f"{person.name} clicked '{item}' already.")
            noted = self._history.append(person, item)
            db.execute("UPDATE impression SET clicked = ? WHERE id = ?", (json.dumps([*clicks, item]), number))
        return noted

    def export(self, file: str | Path, who: Who | None = None) -> int:
        """Write one person's impressions, or everyone's, as a CSV file that `import_file` reads; returns how many."""
        from homebody.federation.device.history_files import write_impressions

        people = self._people.all() if who is None else [self._people.find(who)]
        return write_impressions(Path(file), ((person.name, one) for person in people for one in self.of(person)))

    def of(self, who: Who) -> list[Impression]:
        """A person's impressions, oldest first."""
        return [one for one, _ in self._rows(self._people.find(who).slot)]

    def lengths(self) -> dict[int, int]:
        """How many impressions with a click each person has, by slot."""
        query = "SELECT person, COUNT(*) FROM impression WHERE clicked != '[]' GROUP BY person"
        counts = dict(self._store.read(query))
        return {person.slot: counts.get(person.slot, 0) for person in self._people.all()}

    def attached(self, population: Population, people: Sequence[Person], ranked: Ranked | None) -> Population:
        """The population of these people with their impressions: those that somebody may learn from.

        ranked: only lists that the server ranked; None: all. Items that the population does not know are left out.
        """
        from dataclasses import replace

        import numpy as np

        from homebody.data.population import Impressions as Arrays
        from homebody.data.population import pointers

        number = {} if population.item_ids is None else {item: at for at, item in enumerate(population.item_ids)}
        users, sizes, before = list[int](), list[int](), list[int]()
        items, clicked = list[int](), list[bool]()
        for user, person in enumerate(people):
            times = self._history.times(person, population.n_items, len(population.history(user)))
            for one, _ in self._rows(person.slot):
                known = [number[item] for item in one.shown if item in number]
                clicks = {number[item] for item in one.clicked if item in number}
                if (ranked is None or one.ranked == ranked) and 0 < len(clicks) < len(known):
                    users.append(user)
                    sizes.append(len(known))
                    before.append(sum(time is None or time < one.time for time in times))
                    items += known
                    clicked += [item in clicks for item in known]
        if not users:
            return population
        shown = Arrays(
            np.array(users, dtype=np.int64),
            pointers(np.array(sizes, dtype=np.int64)),
            np.array(items, dtype=np.int32),
            np.array(clicked, dtype=np.bool_),
            before=np.array(before, dtype=np.int64),
        )
        return replace(population, impressions=shown)

    def _rows(self, slot: int) -> list[tuple[Impression, int]]:
        rows = self._store.read(f"SELECT {_COLUMNS}, id FROM impression WHERE person = ? ORDER BY time, id", (slot,))
        return [
            (Impression(time, ranked, tuple(json.loads(shown)), tuple(json.loads(clicked))), number)
            for time, ranked, shown, clicked, number in rows
        ]


_INSERT = "INSERT INTO impression (person, time, ranked, shown, clicked) VALUES (?, ?, ?, ?, ?)"


def _as_row(slot: int, one: Impression) -> tuple[object, ...]:
    return slot, one.time, one.ranked, json.dumps(list(one.shown)), json.dumps(list(one.clicked))


def _ranked(name: Any) -> Ranked:
    return "server" if name == "server" else "device"

"""Who lives with a device, and who of them takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.device.store import Store
from homebody.federation.service.text import one_line

__all__ = ["People", "Person", "TakesNoPart", "Who"]


class Person(NamedTuple):
    """One client of the federation. The server knows no name: it counts a device's people by their slots."""

    slot: int
    """0, 1, 2 … in the order they were added; never another's."""
    name: str
    active: bool
    """Whether this person takes part."""


Who = Person | int | str
"""A person, a slot or a name."""


class TakesNoPart(HomebodyError):
    """This person opted out, perhaps while a round was being worked on: nothing of theirs is kept or sent."""


class People(Store):
    """The people of a device."""

    def add_person(self, name: str) -> Person:
        """Someone new, in the next slot."""
        name = one_line(name, "A person's name", 200)
        with self._writing(data=True):
            if self._ask("SELECT 1 FROM person WHERE name = ?", (name,)):
                raise HomebodyError(f"There is a person '{name}' already; give this one another name.")
            return self._add_person(name)

    def people(self) -> list[Person]:
        """Everyone, by slot."""
        rows = self._ask("SELECT slot, name, active FROM person ORDER BY slot")
        return [Person(slot, name, bool(active)) for slot, name, active in rows]

    def active(self) -> list[Person]:
        """Those who take part, by slot."""
        return [person for person in self.people() if person.active]

    def person(self, who: Who) -> Person:
        """As they are now: by slot or by name."""
        asked = who.slot if isinstance(who, Person) else who
        column = "slot" if isinstance(asked, int) else "name"
        rows = self._ask(f"SELECT slot, name, active FROM person WHERE {column} = ?", (asked,))
        if rows:
            slot, name, active = rows[0]
            return Person(slot, name, bool(active))
        known = [person.name for person in self.people()]
        if not known:
            raise HomebodyError(f"Nobody lives in {self.path} yet; add someone with `homebody client import`.")
        if isinstance(asked, int):
            raise HomebodyError(f"There is no person in slot {asked}; there are {len(known)}, counted from 0.")
        raise unknown_name("person", asked, known)

    def opt_out(self, who: Who, *, delete_history: bool = False) -> Person:
        """Take no part from now on: private states and stored answers are deleted, if wished history and profile too.

        What was told before was told: the ledger and the marks of what left stay.
        """
        with self._writing(data=True):
            slot = self.person(who).slot
            self._db.execute("UPDATE person SET active = 0 WHERE slot = ?", (slot,))
            self._db.execute("DELETE FROM state WHERE person = ?", (slot,))
            self._db.execute("DELETE FROM answer WHERE mark IN (SELECT id FROM mark WHERE person = ?)", (slot,))
            self._db.execute("DELETE FROM message")  # theirs may be in each
            if delete_history:
                self._db.execute("DELETE FROM interaction WHERE person = ?", (slot,))
                self._db.execute("DELETE FROM profile WHERE person = ?", (slot,))
        self._scrub()
        return self.person(slot)

    def opt_in(self, who: Who) -> Person:
        """Take part again, with no private state."""
        with self._writing(data=True):
            slot = self.person(who).slot
            self._db.execute("UPDATE person SET active = 1 WHERE slot = ?", (slot,))
        return self.person(slot)

    def profile(self, who: Who) -> dict[str, str]:
        """What a person says of themselves; it never leaves the device."""
        slot = self.person(who).slot
        return dict(self._ask("SELECT name, value FROM profile WHERE person = ? ORDER BY name", (slot,)))

    def describe(self, who: Who, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Change what a person says of themselves, by name; None takes a feature back. How it is then."""
        known = {
            one_line(name, "A feature's name", 200): value if value is None else one_line(value, "A feature", 1000)
            for name, value in changes.items()
        }
        with self._writing(data=True):
            slot = self.person(who).slot
            for name, value in known.items():
                self._db.execute("DELETE FROM profile WHERE person = ? AND name = ?", (slot, name))
                if value is not None:
                    self._db.execute("INSERT INTO profile VALUES (?, ?, ?)", (slot, name, value))
        if None in known.values():
            self._scrub()
        return self.profile(slot)

    def _add_person(self, name: str) -> Person:
        ((slot,),) = self._ask("SELECT COUNT(*) FROM person")
        self._db.execute("INSERT INTO person VALUES (?, ?, 1)", (slot, name))
        return Person(slot, name, True)

    def _participant(self, who: Who) -> int:
        """The slot of someone who takes part; within a change, so that nobody opts out between."""
        person = self.person(who)
        if not person.active:
            raise TakesNoPart(f"{person.name} opted out, so nothing is worked out or kept for them; see `opt-in`.")
        return person.slot

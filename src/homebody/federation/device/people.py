"""The people of a device, their profiles, and who of them takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import one_line

__all__ = ["OptedOut", "People", "Person", "Who"]


class Person(NamedTuple):
    """One client of the federation. The server knows no name: it numbers a device's people by their slots."""

    slot: int
    """0, 1, 2 … in the order in which people were added; a slot is never given to another person."""
    name: str
    active: bool
    """Whether this person takes part."""


Who = Person | int | str
"""A person, a slot or a name."""


class OptedOut(HomebodyError):
    """This person opted out, perhaps while a round was being worked on: nothing of theirs is kept or sent."""


class People:
    """The people of a device."""

    def __init__(self, store: HomeStore) -> None:
        self._store = store

    def add(self, name: str) -> Person:
        """Add a person in the next slot."""
        name = one_line(name, "A person's name", 200)
        with self._store.writing(data=True) as db:
            if self._store.read("SELECT 1 FROM person WHERE name = ?", (name,)):
                raise HomebodyError(f"There is a person '{name}' already; give this one another name.")
            ((slot,),) = self._store.read("SELECT COUNT(*) FROM person")
            db.execute("INSERT INTO person VALUES (?, ?, 1)", (slot, name))
            return Person(slot, name, True)

    def all(self) -> list[Person]:
        """Everyone, by slot."""
        rows = self._store.read("SELECT slot, name, active FROM person ORDER BY slot")
        return [Person(slot, name, bool(active)) for slot, name, active in rows]

    def active(self) -> list[Person]:
        """The people who take part, by slot."""
        return [person for person in self.all() if person.active]

    def find(self, who: Who) -> Person:
        """The current record of a person, by slot or by name."""
        key = who.slot if isinstance(who, Person) else who
        column = "slot" if isinstance(key, int) else "name"
        rows = self._store.read(f"SELECT slot, name, active FROM person WHERE {column} = ?", (key,))
        if rows:
            slot, name, active = rows[0]
            return Person(slot, name, bool(active))
        everyone = self.all()
        if not everyone:
            raise HomebodyError(f"Nobody lives in {self._store.folder} yet; add someone with `homebody client import`.")
        if isinstance(key, int):
            raise HomebodyError(f"There is no person in slot {key}; there are {len(everyone)}, counted from 0.")
        raise unknown_name("person", key, [person.name for person in everyone])

    def participant(self, who: Who) -> int:
        """The slot of a person who takes part. Called within a transaction, so that nobody opts out in between."""
        person = self.find(who)
        if not person.active:
            raise OptedOut(f"{person.name} opted out, so nothing is worked out or kept for them; see `opt-in`.")
        return person.slot

    def opt_out(self, who: Who, *, delete_history: bool = False) -> Person:
        """Take no part from now on: private states and stored answers are deleted, if wished history and profile too.
        What left the device before cannot be taken back: the ledger and the record of what was sent stay."""
        with self._store.writing(data=True) as db:
            slot = self.find(who).slot
            db.execute("UPDATE person SET active = 0 WHERE slot = ?", (slot,))
            db.execute("DELETE FROM state WHERE person = ?", (slot,))
            db.execute("DELETE FROM answer WHERE mark IN (SELECT id FROM mark WHERE person = ?)", (slot,))
            db.execute("DELETE FROM message")  # each may hold reports of this person
            db.execute("DELETE FROM secure_sum")  # and this, an update: without it the device helps to open no sum
            db.execute(
                "UPDATE query SET state = CASE WHEN state IN ('drawn', 'charged', 'sent') THEN 'gone' ELSE state END, "
                "told = NULL, answer = NULL WHERE person = ?",
                (slot,),
            )
            if delete_history:
                db.execute("DELETE FROM interaction WHERE person = ?", (slot,))
                db.execute("DELETE FROM impression WHERE person = ?", (slot,))
                db.execute("DELETE FROM profile WHERE person = ?", (slot,))
        self._store.scrub()
        return self.find(slot)

    def opt_in(self, who: Who) -> Person:
        """Take part again, without a private state."""
        with self._store.writing(data=True) as db:
            slot = self.find(who).slot
            db.execute("UPDATE person SET active = 1 WHERE slot = ?", (slot,))
        return self.find(slot)

    def profile(self, who: Who) -> dict[str, str]:
        """A person's features, by name; they never leave the device."""
        slot = self.find(who).slot
        return dict(self._store.read("SELECT name, value FROM profile WHERE person = ? ORDER BY name", (slot,)))

    def describe(self, who: Who, changes: Mapping[str, str | None]) -> dict[str, str]:
        """Set some of a person's features, by name; None removes a feature. Returns the new profile."""
        checked = {
            one_line(name, "A feature's name", 200): value if value is None else one_line(value, "A feature", 1000)
            for name, value in changes.items()
        }
        with self._store.writing(data=True) as db:
            slot = self.find(who).slot
            for name, value in checked.items():
                db.execute("DELETE FROM profile WHERE person = ? AND name = ?", (slot, name))
                if value is not None:
                    db.execute("INSERT INTO profile VALUES (?, ?, ?)", (slot, name, value))
        if None in checked.values():
            self._store.scrub()
        return self.profile(slot)

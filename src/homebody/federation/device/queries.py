"""What a device asks a service, and when: turns, and each person's queries.

A turn is one moment at which a device asks for all of its people. A person's query goes through these states, each
written down before the next begins:

    drawn → charged → sent → answered
      ↓        ↓        ↓
    refused   gone     gone

- `drawn`: what it tells was drawn and is here. It never changes again: a retry sends the same.
- `charged`: the person's ledger has its charge, under the query's nonce. Charged again, it is the same release.
- `sent`: it may have left.
- `answered`: the answer is here, and is used until the next one comes.
- `refused`: the budget did not allow it. Nothing was charged, nothing left.
- `gone`: the service knows its model no more, or its person opted out. The charge stays.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from homebody.errors import HomebodyError
from homebody.federation.device.people import People, Who
from homebody.federation.device.store import HomeStore

__all__ = ["ASKING", "EACH_TURN", "KEPT_ANSWERS", "OPEN", "DrawnQuery", "Overtaken", "Queries", "Turn"]

ASKING = ("query", "server")
"""The modes of being served in which people tell something."""
OPEN = ("drawn", "charged", "sent")
"""States of a query that is still to be answered."""
KEPT_ANSWERS = 8
"""A person's latest answers that are kept: their rows may be of what the person has."""
_IS_OPEN = f"state IN ({', '.join(map(repr, OPEN))})"
_COLUMNS = "id, person, turn, nonce, kind, model, event, state, at, left, told, answer"
EACH_TURN = 2
"""A service whose model changes within a turn is told once more, and then not before the next turn."""


class Overtaken(HomebodyError):
    """Another process of the device has gone on with a query."""


class Turn(NamedTuple):
    """A moment at which the device asked for everybody."""

    number: int
    at: int
    """Seconds since 1970."""


class DrawnQuery(NamedTuple):
    """One query of one person."""

    id: int
    person: int
    turn: int
    nonce: str
    """Stands for this draw in the ledger, and nowhere else."""
    kind: str
    """The mechanism's name."""
    model: str
    """The digest of the model whose interests it is about."""
    event: str
    """What it costs, as the ledger writes it."""
    state: str
    at: int
    """When it was drawn, in seconds since 1970."""
    left: int | None
    """When it first left the device; None: it did not."""
    told: bytes | None
    """What it tells, until it is not needed any more."""
    answer: bytes | None


class Queries:
    """Turns and queries of a device."""

    def __init__(self, store: HomeStore, people: People) -> None:
        self._store, self._people = store, people

    def turn(self) -> Turn | None:
        """The last turn, or None before the first."""
        rows = self._store.read("SELECT number, at FROM turn")
        return Turn(*rows[0]) if rows else None

    def due(self, now: int, every: int) -> bool:
        """Whether the next turn has come. A turn in the future, before the clock was set back, counts as one of now."""
        turn = self.turn()
        if turn is not None and turn.at > now:
            with self._store.writing() as db:
                db.execute("UPDATE turn SET at = ? WHERE at > ?", (now, now))
            return False
        return turn is None or now - turn.at >= every

    def begin_turn(self, now: int, every: int) -> Turn:
        """Begin the next turn if it has come; otherwise go on with the last one."""
        with self._store.writing() as db:
            last = self.turn()
            if last is not None and not self.due(now, every):
                return last
            # At another service turns go on from those before: what was asked in these would count for new ones.
            ((asked,),) = self._store.read("SELECT COALESCE(MAX(turn), 0) FROM query")
            turn = Turn(1 + (asked if last is None else last.number), now)
            db.execute("INSERT OR REPLACE INTO turn VALUES (0, ?, ?)", turn)
        return turn

    def wanted(self, now: int, every: int, model: str) -> bool:
        """Whether a turn has come, or a query of the last one is still to be drawn or answered. model: the one that
        queries are about; empty: nobody is to ask any."""
        turn = self.turn()
        if turn is None or self.due(now, every):
            return True
        return bool(model) and bool(self.open(model) or self.wanting(turn.number, model))

    def wanting(self, turn: int, model: str) -> list[int]:
        """The slots of active people who are to ask something new in this turn: whatever they have, and whether or not
        they use it."""
        return [person.slot for person in self._people.active() if self._wants(person.slot, turn, model)]

    def _wants(self, slot: int, turn: int, model: str) -> bool:
        where = f"person = ? AND model = ? AND {_IS_OPEN}"
        if self._find(where, slot, model):  # one that was not answered is sent again instead
            return False
        rows = self._store.read("SELECT model FROM query WHERE person = ? AND turn = ?", (slot, turn))
        return len(rows) < EACH_TURN and (model,) not in rows

    def draw(
        self, who: Who, turn: int, kind: str, model: str, event: str, *, told: bytes | None, at: int
    ) -> DrawnQuery | None:
        """Write down what a person will tell; None if another process has done so. Without anything to tell, that the
        budget refused it."""
        with self._store.writing() as db:
            slot = self._people.participant(who)
            if not self._wants(slot, turn, model):
                return None
            nonce, state = secrets.token_hex(16), "refused" if told is None else "drawn"
            row = (slot, turn, nonce, kind, model, event, state, at, told)
            columns = "person, turn, nonce, kind, model, event, state, at, told"
            made = db.execute(f"INSERT INTO query ({columns}) VALUES ({', '.join('?' * 9)})", row)
            return self._find("id = ?", made.lastrowid)[0]

    def move(self, query: DrawnQuery, state: str, now: int | None = None) -> DrawnQuery:
        """Carry an open query to its next state. What it tells is deleted where it will not be sent any more.

        now: the time at which it leaves.
        """
        with self._store.writing() as db:
            if state in OPEN:
                self._people.participant(query.person)
            told = "" if state in OPEN else ", told = NULL"
            change = f"state = ?, left = COALESCE(left, ?){told}"
            if not db.execute(
                f"UPDATE query SET {change} WHERE id = ? AND {_IS_OPEN}", (state, now, query.id)
            ).rowcount:
                raise Overtaken("This query was answered or given up in the meantime.")
            return self._find("id = ?", query.id)[0]

    def answer(self, query: DrawnQuery, answer: bytes) -> None:
        """Write down the answer; what was told, and all but the latest answers, are deleted."""
        with self._store.writing() as db:
            slot = self._people.participant(query.person)
            change = "state = 'answered', answer = ?, told = NULL"
            db.execute(f"UPDATE query SET {change} WHERE id = ? AND {_IS_OPEN}", (answer, query.id))
            latest = "SELECT id FROM query WHERE person = ? AND answer IS NOT NULL ORDER BY id DESC LIMIT ?"
            db.execute(
                f"UPDATE query SET answer = NULL WHERE person = ? AND id NOT IN ({latest})", (slot, slot, KEPT_ANSWERS)
            )

    def open(self, model: str) -> list[DrawnQuery]:
        """The queries about this model, of people who take part, that are still to be answered."""
        active = "person IN (SELECT slot FROM person WHERE active)"
        return self._find(f"model = ? AND {_IS_OPEN} AND {active} ORDER BY id", model)

    def give_up(self, model: str) -> None:
        """Give up the open queries that are not about this model: nobody would answer them."""
        with self._store.writing() as db:
            db.execute(f"UPDATE query SET state = 'gone', told = NULL WHERE model != ? AND {_IS_OPEN}", (model,))

    def answers(self, who: Who, model: str) -> list[DrawnQuery]:
        """A person's queries about this model whose answers are here, the latest first."""
        where = "person = ? AND model = ? AND answer IS NOT NULL ORDER BY id DESC"
        return self._find(where, self._people.find(who).slot, model)

    def of(self, who: Who) -> list[DrawnQuery]:
        """Every query of a person, oldest first."""
        return self._find("person = ? ORDER BY id", self._people.find(who).slot)

    def begin_anew(self) -> None:
        """Give up what is open, and delete what came: the device turns to another service."""
        with self._store.writing() as db:
            self.give_up("")
            db.execute("UPDATE query SET answer = NULL")
            db.execute("DELETE FROM turn")
            db.execute("DELETE FROM received")

    def _find(self, where: str, *values: object) -> list[DrawnQuery]:
        return [DrawnQuery(*row) for row in self._store.read(f"SELECT {_COLUMNS} FROM query WHERE {where}", values)]

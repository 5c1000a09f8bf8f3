"""What a device needs to take part in rounds: the catalogue, models, its people's private states, and its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from homebody.errors import HomebodyError
from homebody.federation.device.people import People, Person, Who
from homebody.federation.service.text import one_line

if TYPE_CHECKING:
    from homebody.data import Population

__all__ = ["Mark", "Message", "Model", "Rounds", "State"]

ITEM_LIMIT = 1000
KEPT_ANSWERS = 2
"""Releases of a person whose answers are kept, to be given again."""
KEPT_STATES = 2


class Model(NamedTuple):
    """What the device was last told about the model it ranks with."""

    description: str
    """JSON: method, fields, stages, seed and what else the server says."""
    digest: str
    """Of the shared parameters to rank with."""
    release: str
    step: int


class State(NamedTuple):
    """A person's private state after a round."""

    step: int
    base: str | None
    """The digest of the shared parameters that it refers to."""
    bytes: bytes


class Mark(NamedTuple):
    """One answer that left: to which release, about which shared parameters, how large, and when."""

    run: str
    release: str
    digest: str
    bytes: int
    at: int
    """Seconds since 1970."""
    reports: int = 0
    """How many it had, where it went through a proxy."""


class Message(NamedTuple):
    """What is handed to a proxy, word for word, however often."""

    people: list[int]
    """The slots of those whose reports are in it."""
    bytes: bytes


class Rounds(People):
    """The catalogue, models, states and answers."""

    def add_items(self, first: int, items: Sequence[tuple[str, str]]) -> int:
        """Items as the server numbers them, from `first` on; those that are known may come again. How many are new."""
        checked = [(one_line(item, "An item id", ITEM_LIMIT), str(name)) for item, name in items]
        with self._writing(data=True):
            known = self.n_items()
            if not 0 <= first <= known:
                raise HomebodyError(
                    f"Items from number {first} on cannot be added: the next unknown one is number {known}."
                )
            before = self._ask("SELECT position, id FROM item WHERE position >= ?", (first,))
            for position, item in before:
                if position - first < len(checked) and checked[position - first][0] != item:
                    raise HomebodyError(
                        f"Item number {position} is '{item}' here and '{checked[position - first][0]}' now: it is "
                        "another catalogue, and needs a device of its own."
                    )
            rows = [(first + n, item, name) for n, (item, name) in enumerate(checked)]
            self._refuse_twice([item for position, item, _ in rows if position >= known])
            self._db.executemany(
                "INSERT INTO item VALUES (?, ?, ?) ON CONFLICT (position) DO UPDATE SET name = excluded.name", rows
            )
            return max(0, first + len(rows) - known)

    def put_sheet(self, digest: str, content: bytes) -> None:
        """What the server says of features, in place of what it said before."""
        with self._writing(data=True):
            self._db.execute("DELETE FROM sheet")
            self._db.execute("INSERT INTO sheet VALUES (?, ?)", (digest, content))

    def sheet(self, digest: str = "") -> bytes | None:
        """That; by its name, if that is the one it has."""
        rows = self._ask("SELECT bytes FROM sheet WHERE ? IN ('', digest)", (digest,))
        return rows[0][0] if rows else None

    def n_items(self) -> int:
        """How many items the catalogue has."""
        return int(self._ask("SELECT COUNT(*) FROM item")[0][0])

    def numbers(self, ids: Iterable[str]) -> dict[str, int]:
        """The positions of those ids that the catalogue knows."""
        asked = json.dumps(list(ids))
        return dict(self._ask("SELECT id, position FROM item WHERE id IN (SELECT value FROM json_each(?))", (asked,)))

    def items(self, positions: Iterable[int]) -> list[tuple[str, str]]:
        """Id and name of each of these items; the id where it has no name."""
        wanted = [int(position) for position in positions]
        found = self._ask(
            "SELECT position, id, name FROM item WHERE position IN (SELECT value FROM json_each(?))",
            (json.dumps(wanted),),
        )
        known = {position: (item, name or item) for position, item, name in found}
        missing = next((position for position in wanted if position not in known), None)
        if missing is not None:
            raise HomebodyError(f"There is no item number {missing}: they are numbered 0 to {self.n_items() - 1}.")
        return [known[position] for position in wanted]

    def population(self, people: Sequence[Person] | None = None) -> Population:
        """The histories of those who take part, or of these people: user u is the u-th of them.

        Items that the catalogue does not know are left out, and times and ratings that not all have; its notes say so.
        """
        from homebody.federation.device.population import gather

        with self._named("read"):
            self._db.execute("BEGIN")
            try:
                return gather(self._db, self.active() if people is None else list(people))
            finally:
                self._db.execute("COMMIT")

    def put_shared(self, digest: str, content: bytes) -> None:
        """Keep shared parameters under their digest."""
        _check_name(digest, "A digest")
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO shared VALUES (?, ?)", (digest, content))

    def shared(self, digest: str) -> bytes | None:
        """The shared parameters of this digest, if they are here."""
        rows = self._ask("SELECT bytes FROM shared WHERE digest = ?", (digest,))
        return rows[0][0] if rows else None

    def prune(self, keep: Collection[str]) -> int:
        """Drop shared parameters but these, those that the model ranks with, and those that a kept state refers to."""
        with self._writing():
            return self._db.execute(
                "DELETE FROM shared WHERE digest NOT IN (SELECT value FROM json_each(?)) "
                "AND digest NOT IN (SELECT digest FROM model) "
                "AND digest NOT IN (SELECT base FROM state WHERE base IS NOT NULL)",
                (json.dumps(sorted(keep)),),
            ).rowcount

    def put_model(self, description: str, digest: str, release: str, step: int) -> None:
        """What to rank with from now on."""
        try:
            json.loads(description)
        except (TypeError, ValueError) as error:
            raise HomebodyError(f"A model's description must be JSON, and this is not: {error}.") from error
        _check_name(digest, "A digest")
        with self._writing():
            self._db.execute(
                "INSERT OR REPLACE INTO model VALUES (0, ?, ?, ?, ?)", (description, digest, release, _check_step(step))
            )

    def model(self) -> Model | None:
        """What to rank with; None before the first round."""
        rows = self._ask("SELECT description, digest, release, step FROM model")
        return Model(*rows[0]) if rows else None

    def put_state(self, who: Who, run: str, step: int, base: str | None, content: bytes) -> None:
        """Keep a person's private state after round `step`; what came of later rounds of the run is dropped: they are
        being done again."""
        with self._writing():
            self._put_state(self._participant(who), run, step, base, content)

    def state(self, who: Who, run: str, before: int | None = None) -> State | None:
        """A person's latest private state, or the latest of a round before this one."""
        rows = self._ask(
            "SELECT step, base, bytes FROM state WHERE person = ? AND run = ? AND (? IS NULL OR step < ?) "
            "ORDER BY step DESC LIMIT 1",
            (self.person(who).slot, run, before, before),
        )
        return State(*rows[0]) if rows else None

    def has_states(self, who: Who) -> bool:
        """Whether any private state of this person is here."""
        return bool(self._ask("SELECT 1 FROM state WHERE person = ? LIMIT 1", (self.person(who).slot,)))

    def keep_states(self, run: str, steps: Collection[int]) -> int:
        """Drop a run's states but each person's last two, and their latest at or before each of these steps."""
        with self._writing():
            return self._db.execute(
                "DELETE FROM state WHERE run = ?1 AND rowid NOT IN ("
                "SELECT rowid FROM (SELECT rowid, ROW_NUMBER() OVER (PARTITION BY person ORDER BY step DESC) AS place "
                "FROM state WHERE run = ?1) WHERE place <= ?2) "
                "AND NOT EXISTS (SELECT 1 FROM json_each(?3) AS wanted WHERE state.step = (SELECT MAX(own.step) "
                "FROM state AS own WHERE own.person = state.person AND own.run = ?1 AND own.step <= wanted.value))",
                (run, KEPT_STATES, json.dumps([_check_step(step) for step in steps])),
            ).rowcount

    def begin(self, who: Who, run: str, release: str, digest: str) -> None:
        """Remember that an answer is about to be charged and worked out: so that it is known to be the same later."""
        for text, what in ((run, "A run's name"), (release, "A release's name"), (digest, "A digest")):
            _check_name(text, what)
        with self._writing():
            self._db.execute(
                "INSERT OR IGNORE INTO begun VALUES (?, ?, ?, ?)", (self._participant(who), run, release, digest)
            )

    def begun(self, who: Who, run: str, release: str, digest: str) -> bool:
        """Whether this answer was begun, and none has been given since."""
        return bool(
            self._ask(
                "SELECT 1 FROM begun WHERE person = ? AND run = ? AND release = ? AND digest = ?",
                (self.person(who).slot, run, release, digest),
            )
        )

    def finish(
        self,
        who: Who,
        run: str,
        release: str,
        digest: str,
        step: int,
        base: str | None,
        state: bytes | None,
        answer: bytes,
        reports: int = 0,
    ) -> None:
        """A round is done: its private state, its answer and the mark that it was answered, all together or nothing.

        The answers of a person's last two releases are kept, to be given again word for word; marks stay for good. An
        answer that is kept is never changed: another would tell more. reports: how many it has, for a proxy.
        """
        for text, what in ((run, "A run's name"), (release, "A release's name"), (digest, "A digest")):
            _check_name(text, what)
        with self._writing():
            slot = self._participant(who)
            given = self._answer(slot, run, release, digest)
            if given is not None and given != answer:
                raise HomebodyError(f"{release} was answered in other words; only that answer may be given again.")
            if state is not None:  # there is none where somebody is asked before they ever trained
                self._put_state(slot, run, step, base, state)
            if given is not None:
                return
            self._db.execute(
                "DELETE FROM begun WHERE person = ? AND run = ? AND release = ? AND digest = ?",
                (slot, run, release, digest),
            )
            mark = self._db.execute(
                "INSERT INTO mark (person, run, release, digest, bytes, at, reports) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (slot, run, release, digest, len(answer), int(time.time()), reports),
            ).lastrowid
            self._db.execute("INSERT INTO answer VALUES (?, ?)", (mark, answer))
            self._db.execute(
                "DELETE FROM answer WHERE mark IN (SELECT id FROM mark WHERE person = ?1 AND (run, release) NOT IN "
                "(SELECT run, release FROM mark WHERE person = ?1 GROUP BY run, release "
                "ORDER BY MAX(id) DESC LIMIT ?2))",
                (slot, KEPT_ANSWERS),
            )

    def answer_of(self, who: Who, run: str, release: str, digest: str) -> bytes | None:
        """The answer that was given to just this, if it is still here."""
        return self._answer(self.person(who).slot, run, release, digest)

    def knows(self, who: Who, run: str, release: str) -> set[str]:
        """The digests of the shared parameters that a release of this name was answered about, whatever is kept."""
        rows = self._ask(
            "SELECT digest FROM mark WHERE person = ? AND run = ? AND release = ?",
            (self.person(who).slot, run, release),
        )
        return {digest for (digest,) in rows}

    def marks(self, who: Who) -> list[Mark]:
        """Every answer that left, oldest first."""
        rows = self._ask(
            "SELECT run, release, digest, bytes, at, reports FROM mark WHERE person = ? ORDER BY id",
            (self.person(who).slot,),
        )
        return [Mark(*row) for row in rows]

    def messages(self, ask: str) -> list[Message]:
        """Those that were made of the answers to a letter."""
        rows = self._ask("SELECT people, bytes FROM message WHERE ask = ? ORDER BY id", (ask,))
        return [Message(json.loads(people), content) for people, content in rows]

    def put_message(self, ask: str, people: Sequence[int], content: bytes) -> None:
        """Keep a message before it is sent; those of letters before the last two are dropped."""
        _check_name(ask, "A digest")
        with self._writing():
            for slot in people:
                self._participant(slot)
            self._db.execute(
                "INSERT INTO message (ask, people, bytes) VALUES (?, ?, ?)", (ask, json.dumps(list(people)), content)
            )
            self._db.execute(
                "DELETE FROM message WHERE ask NOT IN "
                "(SELECT ask FROM message GROUP BY ask ORDER BY MAX(id) DESC LIMIT ?)",
                (KEPT_ANSWERS,),
            )

    def reports(self) -> int:
        """How many reports left, of everybody's."""
        return int(self._ask("SELECT COALESCE(SUM(reports), 0) FROM mark")[0][0])

    def _answer(self, slot: int, run: str, release: str, digest: str) -> bytes | None:
        rows = self._ask(
            "SELECT answer.bytes FROM answer JOIN mark ON mark.id = answer.mark "
            "WHERE person = ? AND run = ? AND release = ? AND digest = ?",
            (slot, run, release, digest),
        )
        return rows[0][0] if rows else None

    def _put_state(self, slot: int, run: str, step: int, base: str | None, content: bytes) -> None:
        self._db.execute("DELETE FROM state WHERE person = ? AND run = ? AND step >= ?", (slot, run, _check_step(step)))
        self._db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?)", (slot, run, step, base, content))

    def _refuse_twice(self, ids: Sequence[str]) -> None:
        known = self.numbers(ids)
        seen: set[str] = set()
        for item in ids:
            if item in known or item in seen:
                raise HomebodyError(f"The item '{item}' cannot have two numbers in one catalogue.")
            seen.add(item)


def _check_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**62:
        raise HomebodyError(f"A round's number must be a whole number from 0 on, not {step!r}.")
    return step


def _check_name(text: str, what: str) -> None:
    one_line(text, what, 1000)

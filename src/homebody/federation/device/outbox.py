"""What leaves a device: answers that are given again word for word, messages to the proxy, and the record of both."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from homebody.errors import HomebodyError
from homebody.federation.device.models import Models, PrivateState
from homebody.federation.device.people import People, Who
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import one_line

__all__ = ["Outbox", "ProxyMessage", "SentAnswer"]

KEPT_ANSWERS = 2
"""A person's latest releases whose answers are kept, to be given again."""
_ASKED = "person = ? AND run = ? AND release = ? AND digest = ?"


class SentAnswer(NamedTuple):
    """The record of one answer that left. It stays when the answer itself is dropped."""

    run: str
    release: str
    digest: str
    """What was asked: `Task.ask`."""
    bytes: int
    at: int
    """Seconds since 1970."""
    reports: int = 0
    """The number of reports in it, if it went through a proxy."""


class ProxyMessage(NamedTuple):
    """A message to the proxy; it is sent again byte for byte."""

    people: list[int]
    """The slots of the people whose reports are in it."""
    bytes: bytes


class Outbox:
    """The answers and messages of a device."""

    def __init__(self, store: HomeStore, people: People, models: Models) -> None:
        self._store, self._people, self._models = store, people, models

    def begin(self, who: Who, run: str, release: str, digest: str) -> None:
        """Record that an answer is about to be charged and computed, so that it is recognised after a kill."""
        _check_names(run, release, digest)
        with self._store.writing() as db:
            asked = (self._people.participant(who), run, release, digest)
            db.execute("INSERT OR IGNORE INTO begun VALUES (?, ?, ?, ?)", asked)

    def begun(self, who: Who, run: str, release: str, digest: str) -> bool:
        """Whether this answer was begun, and not given since."""
        asked = (self._people.find(who).slot, run, release, digest)
        return bool(self._store.read(f"SELECT 1 FROM begun WHERE {_ASKED}", asked))

    def finish(
        self,
        who: Who,
        run: str,
        release: str,
        digest: str,
        state: PrivateState | None,
        answer: bytes,
        reports: int = 0,
        size: int | None = None,
    ) -> None:
        """Write down a finished round: the private state, the answer and its record, all or none.

        The answers of a person's last two releases are kept, to be given again word for word; records are kept
        forever. A kept answer is never changed: another one would disclose more. reports: how many it has, for a proxy.
        size: the bytes that left, if the answer itself is kept elsewhere, as that of a secure sum is.
        """
        _check_names(run, release, digest)
        with self._store.writing() as db:
            slot = self._people.participant(who)
            given = self.answer(slot, run, release, digest)
            if given is not None and given != answer:
                raise HomebodyError(f"{release} already has a different answer; only that answer may be sent again.")
            if state is not None:  # a person who is measured before they ever trained has none
                self._models.put_state(slot, run, *state)
            if given is not None and size is None:  # a second vector in a secure sum is a second answer
                return
            db.execute(f"DELETE FROM begun WHERE {_ASKED}", (slot, run, release, digest))
            insert = "INSERT INTO mark (person, run, release, digest, bytes, at, reports) VALUES (?, ?, ?, ?, ?, ?, ?)"
            row = (slot, run, release, digest, len(answer) if size is None else size, int(time.time()), reports)
            mark = db.execute(insert, row).lastrowid
            db.execute("INSERT INTO answer VALUES (?, ?)", (mark, answer))
            db.execute(
                "DELETE FROM answer WHERE mark IN (SELECT id FROM mark WHERE person = ?1 AND (run, release) NOT IN "
                "(SELECT run, release FROM mark WHERE person = ?1 GROUP BY run, release "
                "ORDER BY MAX(id) DESC LIMIT ?2))",
                (slot, KEPT_ANSWERS),
            )

    def answer(self, who: Who, run: str, release: str, digest: str) -> bytes | None:
        """The answer that was given to exactly this, if it is still kept."""
        query = f"SELECT answer.bytes FROM answer JOIN mark ON mark.id = answer.mark WHERE {_ASKED}"
        rows = self._store.read(query, (self._people.find(who).slot, run, release, digest))
        return rows[0][0] if rows else None

    def answered(self, who: Who, run: str, release: str) -> set[str]:
        """The digests of what was answered under this release name, whether or not the answers are still kept."""
        query = "SELECT digest FROM mark WHERE person = ? AND run = ? AND release = ?"
        return {digest for (digest,) in self._store.read(query, (self._people.find(who).slot, run, release))}

    def sent(self, who: Who) -> list[SentAnswer]:
        """The record of every answer of a person that left, oldest first."""
        query = "SELECT run, release, digest, bytes, at, reports FROM mark WHERE person = ? ORDER BY id"
        return [SentAnswer(*row) for row in self._store.read(query, (self._people.find(who).slot,))]

    def reports(self) -> int:
        """How many reports left, of all people together."""
        return int(self._store.read("SELECT COALESCE(SUM(reports), 0) FROM mark")[0][0])

    def put_message(self, ask: str, people: Sequence[int], content: bytes) -> None:
        """Keep a message before it is sent; messages for letters before the last two are dropped."""
        one_line(ask, "A digest", 1000)
        with self._store.writing() as db:
            for slot in people:
                self._people.participant(slot)
            row = (ask, json.dumps(list(people)), content)
            db.execute("INSERT INTO message (ask, people, bytes) VALUES (?, ?, ?)", row)
            latest = "SELECT ask FROM message GROUP BY ask ORDER BY MAX(id) DESC LIMIT ?"
            db.execute(f"DELETE FROM message WHERE ask NOT IN ({latest})", (KEPT_ANSWERS,))

    def messages(self, ask: str) -> list[ProxyMessage]:
        """The messages that hold the answers to a letter."""
        rows = self._store.read("SELECT people, bytes FROM message WHERE ask = ? ORDER BY id", (ask,))
        return [ProxyMessage(json.loads(people), content) for people, content in rows]

    def keeps(self, ask: str, message: ProxyMessage) -> bool:
        """Whether a message may still be sent: all are deleted when a person opts out."""
        return message in self.messages(ask)

    def note_late(self) -> None:
        """Count one more answer that left late."""
        with self._store.writing() as db:
            db.execute("INSERT INTO setting VALUES ('overruns', '1') ON CONFLICT DO UPDATE SET value = value + 1")

    def late(self) -> int:
        """How many answers left later than estimated: their delay depended on somebody's history."""
        rows = self._store.read("SELECT value FROM setting WHERE name = 'overruns'")
        return int(rows[0][0]) if rows else 0


def _check_names(run: str, release: str, digest: str) -> None:
    for text, what in ((run, "A run's name"), (release, "A release's name"), (digest, "A digest")):
        one_line(text, what, 1000)

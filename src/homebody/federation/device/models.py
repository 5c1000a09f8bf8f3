"""The models of a device: shared parameters by digest, the model to rank with, and private states by round."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from homebody.errors import HomebodyError
from homebody.federation.device.people import People, Who
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import one_line

__all__ = ["Models", "PrivateState", "RankingModel"]

KEPT_STATES = 2
"""A person's latest states that are always kept."""


class RankingModel(NamedTuple):
    """The model that a device ranks with."""

    description: str
    """JSON: method, fields, stages, seed and what else the server says about it."""
    digest: str
    """The digest of its shared parameters."""
    release: str
    step: int


class PrivateState(NamedTuple):
    """A person's private state after a round."""

    step: int
    base: str | None
    """The digest of the shared parameters that it refers to."""
    bytes: bytes


class Models:
    """Shared parameters, and the states of each person."""

    def __init__(self, store: HomeStore, people: People) -> None:
        self._store, self._people = store, people

    def put_shared(self, digest: str, content: bytes) -> None:
        """Keep shared parameters under their digest."""
        one_line(digest, "A digest", 1000)
        with self._store.writing() as db:
            db.execute("INSERT OR REPLACE INTO shared VALUES (?, ?)", (digest, content))

    def shared(self, digest: str) -> bytes | None:
        """The shared parameters of this digest, if they are here."""
        rows = self._store.read("SELECT bytes FROM shared WHERE digest = ?", (digest,))
        return rows[0][0] if rows else None

    def drop_unused(self, keep: Collection[str]) -> int:
        """Drop shared parameters except these, those of the model to rank with, and those that a state refers to."""
        with self._store.writing() as db:
            return db.execute(
                "DELETE FROM shared WHERE digest NOT IN (SELECT value FROM json_each(?)) "
                "AND digest NOT IN (SELECT digest FROM model) "
                "AND digest NOT IN (SELECT base FROM state WHERE base IS NOT NULL)",
                (json.dumps(sorted(keep)),),
            ).rowcount

    def rank_with(self, description: str, digest: str, release: str, step: int) -> None:
        """Rank with this model from now on."""
        try:
            json.loads(description)
        except (TypeError, ValueError) as error:
            raise HomebodyError(f"A model's description must be JSON, and this is not: {error}.") from error
        one_line(digest, "A digest", 1000)
        with self._store.writing() as db:
            row = (description, digest, release, _check_step(step))
            db.execute("INSERT OR REPLACE INTO model VALUES (0, ?, ?, ?, ?)", row)

    def ranking(self) -> RankingModel | None:
        """The model to rank with, or None before the first round."""
        rows = self._store.read("SELECT description, digest, release, step FROM model")
        return RankingModel(*rows[0]) if rows else None

    def put_state(self, who: Who, run: str, step: int, base: str | None, content: bytes) -> None:
        """Keep a person's private state after round `step`. States of later rounds of the run are dropped: these
        rounds are being done again."""
        with self._store.writing() as db:
            slot = self._people.participant(who)
            db.execute("DELETE FROM state WHERE person = ? AND run = ? AND step >= ?", (slot, run, _check_step(step)))
            db.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?)", (slot, run, step, base, content))

    def state(self, who: Who, run: str, before: int | None = None) -> PrivateState | None:
        """A person's latest private state; `before`: the latest of a round before this one."""
        which = "person = ? AND run = ? AND (? IS NULL OR step < ?)"
        query = f"SELECT step, base, bytes FROM state WHERE {which} ORDER BY step DESC LIMIT 1"
        rows = self._store.read(query, (self._people.find(who).slot, run, before, before))
        return PrivateState(*rows[0]) if rows else None

    def has_states(self, who: Who) -> bool:
        """Whether the device holds any private state of this person."""
        slot = self._people.find(who).slot
        return bool(self._store.read("SELECT 1 FROM state WHERE person = ? LIMIT 1", (slot,)))

    def keep_states(self, run: str, steps: Collection[int]) -> int:
        """Drop a run's states except each person's last two, and each person's latest at or before each step given."""
        with self._store.writing() as db:
            return db.execute(
                "DELETE FROM state WHERE run = ?1 AND rowid NOT IN ("
                "SELECT rowid FROM (SELECT rowid, ROW_NUMBER() OVER (PARTITION BY person ORDER BY step DESC) AS place "
                "FROM state WHERE run = ?1) WHERE place <= ?2) "
                "AND NOT EXISTS (SELECT 1 FROM json_each(?3) AS wanted WHERE state.step = (SELECT MAX(own.step) "
                "FROM state AS own WHERE own.person = state.person AND own.run = ?1 AND own.step <= wanted.value))",
                (run, KEPT_STATES, json.dumps([_check_step(step) for step in steps])),
            ).rowcount


def _check_step(step: Any) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**62:
        raise HomebodyError(f"A round's number must be a whole number from 0 on, not {step!r}.")
    return step

"""The secure sum that a device takes part in: what it must remember between two exchanges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from homebody.federation.device.store import HomeStore

if TYPE_CHECKING:
    from homebody.federation.task import SumTask

__all__ = ["Sums"]


class Sums:
    """The stored state of an attempt at a secure sum (`Party.state`), by the digest of its terms.

    A device takes part in one attempt at a time. When another begins, or a letter asks for something else, the states
    of those before are deleted, and with them the secrets by which their sums could be opened.
    """

    def __init__(self, store: HomeStore) -> None:
        self._store = store

    def get(self, attempt: SumTask) -> bytes | None:
        """The state after the last exchange that was answered."""
        rows = self._store.read("SELECT state FROM secure_sum WHERE terms = ?", (attempt.digest.hex(),))
        return bytes(rows[0][0]) if rows else None

    def put(self, attempt: SumTask, state: bytes) -> None:
        """Store the state, before the answer leaves."""
        with self._store.writing() as db:
            db.execute("INSERT OR REPLACE INTO secure_sum VALUES (?, ?)", (attempt.digest.hex(), state))

    def drop_others(self, attempt: SumTask | None = None) -> None:
        """Delete the states of all attempts but this one."""
        kept = "" if attempt is None else attempt.digest.hex()
        if not self._store.read("SELECT 1 FROM secure_sum WHERE terms != ? LIMIT 1", (kept,)):
            return
        with self._store.writing() as db:
            db.execute("DELETE FROM secure_sum WHERE terms != ?", (kept,))
        self._store.scrub()

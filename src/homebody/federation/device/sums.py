"""The secure sum that a device takes part in: what it must remember between two exchanges."""

from __future__ import annotations

from homebody.federation.device.store import HomeStore
from homebody.federation.secure_sum.messages import Terms

__all__ = ["Sums"]


class Sums:
    """The stored state of an attempt at a secure sum (`Party.state`), by its terms.

    A device takes part in one attempt at a time. When another begins, or a letter asks for something else, the states
    of those before are deleted, and with them the secrets by which their sums could be opened.
    """

    def __init__(self, store: HomeStore) -> None:
        self._store = store

    def get(self, terms: Terms) -> bytes | None:
        """The state after the last exchange that was answered."""
        rows = self._store.read("SELECT state FROM secure_sum WHERE terms = ?", (terms.digest.hex(),))
        return bytes(rows[0][0]) if rows else None

    def put(self, terms: Terms, state: bytes) -> None:
        """Store the state, before the answer leaves."""
        with self._store.writing() as db:
            db.execute("INSERT OR REPLACE INTO secure_sum VALUES (?, ?)", (terms.digest.hex(), state))

    def drop_others(self, terms: Terms | None = None) -> None:
        """Delete the states of all attempts but this one."""
        kept = "" if terms is None else terms.digest.hex()
        if not self._store.read("SELECT 1 FROM secure_sum WHERE terms != ? LIMIT 1", (kept,)):
            return
        with self._store.writing() as db:
            db.execute("DELETE FROM secure_sum WHERE terms != ?", (kept,))
        self._store.scrub()

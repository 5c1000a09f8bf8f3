"""The views of a device's people that apps hold: whose process each app is, and how often it answered."""

from __future__ import annotations

import hashlib
import hmac
import pwd
import secrets
from typing import Literal, NamedTuple

from homebody.errors import HomebodyError, unknown_name
from homebody.federation.device.store import HomeStore
from homebody.federation.service.text import check_view

__all__ = ["KnownView", "KnownViews", "Outcome", "user_number"]

Outcome = Literal["answered", "away", "slow", "nonsense"]
LARGEST_UID = 2**32 - 2


class KnownView(NamedTuple):
    """One app. The device keeps a digest of its token."""

    name: str
    uid: int
    token: str
    answered: int = 0
    away: int = 0
    slow: int = 0
    nonsense: int = 0

    def admits(self, uid: int, token: str) -> bool:
        """Whether a process of this user that shows this token is the app."""
        return uid == self.uid and hmac.compare_digest(self.token, _digest(token))


class KnownViews:
    """The apps that a device knows."""

    def __init__(self, store: HomeStore) -> None:
        self._store = store

    def add(self, name: str, uid: int, *, same_user: bool = False) -> str:
        """Let a user's process be the app of a view; returns the token that it must show.

        same_user: allow a user who could read this device, or another app of it.
        """
        check_view(name)
        if not 0 <= uid <= LARGEST_UID:
            raise HomebodyError(f"A user's number is between 0 and {LARGEST_UID:,}, not {uid}: see `id -u NAME`.")
        token = secrets.token_hex(32)
        with self._store.writing() as db:
            known = self.all()
            self.refuse_taken(name)
            if not same_user:
                self._refuse_same_user(name, uid, known)
            db.execute("INSERT INTO view (name, uid, token) VALUES (?, ?, ?)", (name, uid, _digest(token)))
        return token

    def refuse_taken(self, name: str) -> None:
        """Refuse the name of a view that this device has."""
        if any(view.name == name for view in self.all()):
            raise HomebodyError(
                f"This device has a view '{name}' already: give this one another name, or remove the other with "
                "`homebody client views remove`."
            )

    def _refuse_same_user(self, name: str, uid: int, known: list[KnownView]) -> None:
        remedy = "give each a user of its own, or add --same-user if they need not be isolated"
        if other := next((view.name for view in known if view.uid == uid), None):
            raise HomebodyError(
                f"The views '{other}' and '{name}' would be processes of one user, {uid}, who can read both: {remedy}."
            )
        if uid == self._store.folder.stat().st_uid:
            raise HomebodyError(f"User {uid} owns this device, and the view '{name}' could read all of it: {remedy}.")
        if uid == 0:
            raise HomebodyError(f"User 0 can read everything on this machine: {remedy}.")

    def all(self) -> list[KnownView]:
        """Every app, by the name of its view."""
        columns = ", ".join(KnownView._fields)
        return [KnownView(*row) for row in self._store.read(f"SELECT {columns} FROM view ORDER BY name")]

    def remove(self, name: str) -> None:
        """Remove an app's view: the app is not asked any more."""
        with self._store.writing() as db:
            known = [view.name for view in self.all()]
            if name not in known:
                raise unknown_name("view of this device", name, known)
            db.execute("DELETE FROM view WHERE name = ?", (name,))

    def count(self, name: str, outcome: Outcome) -> None:
        """Count the outcome of a question to an app."""
        with self._store.writing() as db:
            db.execute(f"UPDATE view SET {outcome} = {outcome} + 1 WHERE name = ?", (name,))


def user_number(user: str) -> int:
    """The number of a user of this machine, given by number or name.

    >>> user_number("1000")
    1000
    """
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise HomebodyError(f"This machine has no user '{user}': give a name or a number.") from None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()

"""Which proxies may bring reports; their keys stand beside the devices', in the server's records."""

from __future__ import annotations

from dataclasses import dataclass

from homebody.errors import HomebodyError
from homebody.federation.server.records import Records, check_text, now

__all__ = ["Proxies", "Proxy"]


@dataclass(frozen=True)
class Proxy:
    """A key that the operator registered."""

    public_key: bytes
    name: str
    added: str
    """When, in UTC."""


class Proxies:
    """Those of a server.

    >>> from homebody.database import connect
    >>> proxies = Proxies(Records(connect(None)))
    >>> proxies.add(bytes(32), "mixer")
    >>> [one.name for one in proxies.all()]
    ['mixer']
    >>> proxies.remove("mixer")
    >>> proxies.all()
    []
    """

    def __init__(self, records: Records) -> None:
        self._db = records.database

    def add(self, public_key: bytes, name: str) -> None:
        """Let a proxy bring reports."""
        check_text("A proxy's name", name)
        with self._db.transaction():
            for one in self.all():
                if one.public_key == public_key:
                    raise HomebodyError(f"The key of '{name}' is registered already, as '{one.name}'.")
                if one.name == name:
                    raise HomebodyError(f"There is a proxy '{name}' already; give this one another name.")
            self._db.execute("INSERT INTO proxy (public_key, name, added) VALUES (?, ?, ?)", (public_key, name, now()))

    def all(self) -> list[Proxy]:
        """In the order of their names."""
        return [Proxy(*row) for row in self._db.rows("SELECT public_key, name, added FROM proxy ORDER BY name")]

    def remove(self, name: str) -> None:
        """Take in nothing more from a proxy."""
        if not self._db.execute("DELETE FROM proxy WHERE name = ?", (name,)).rowcount:
            raise HomebodyError(f"There is no proxy '{name}' here; `homebody server status` names them.")

"""Who may hold how many connections to a service of ours, and how many bytes.

A connection is a stranger's until one of its requests proves a key. Strangers are limited by their address, others by
their key, and all of them together. Where there are too many, the oldest gives way to the newest: whoever proves a key
at once is served, however many connections somebody else leaves idle. An address is known here while a connection is
open, and is not logged.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Connection", "Guard", "Limits", "Overload", "RequestMemory", "Share", "connection_of"]

_GRACE_SECONDS = 2.0
"""For a body to come before it may have to give way to others."""
_FILES = 256
"""That a process has open beside its connections."""


_Name = TypeVar("_Name", str, bytes)


@dataclass(frozen=True)
class Limits:
    """How many connections are held at one time."""

    in_all: int = 4000
    of_an_address: int = 64
    """That have not proved a key yet; an IPv6 network of 64 bits counts as one address."""
    of_a_key: int = 8

    def affordable(self) -> Limits:
        """As many as the system lets a process have, if that is fewer."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.in_all + _FILES
        if soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return Limits(max(16, min(self.in_all, soft - _FILES)), self.of_an_address, self.of_a_key)


class Connection:
    """One that was accepted. `hang_up` is set by whoever serves it."""

    def __init__(self, guard: Guard, address: str) -> None:
        self._guard, self.address = guard, address
        self.key: bytes | None = None
        self.hang_up: Callable[[], object] = lambda: None

    def proved(self, key: bytes) -> None:
        """One of its requests was signed by this key, or showed it."""
        if self.key != key and self in self._guard.connections:
            self._guard.leave(self)
            self.key = key
            self._guard.enter(self)

    def close(self) -> None:
        """It is gone."""
        self._guard.leave(self)


class Guard:
    """Lets connections in, and has others give way.

    >>> guard = Guard(Limits(in_all=3, of_an_address=2, of_a_key=1))
    >>> first, second = guard.admit("192.0.2.1"), guard.admit("192.0.2.1")
    >>> first.proved(b"key")
    >>> third, fourth = guard.admit("192.0.2.1"), guard.admit("192.0.2.1")
    >>> [one in guard.connections for one in (first, second, third, fourth)]
    [True, False, True, True]
    """

    def __init__(self, limits: Limits, counted: Callable[[str], None] = lambda _: None) -> None:
        self.limits, self._counted = limits, counted
        self.connections: dict[Connection, None] = {}
        self._strangers: dict[str, dict[Connection, None]] = {}
        self._known: dict[bytes, dict[Connection, None]] = {}

    def admit(self, host: str) -> Connection | None:
        """A new connection from there; None where nobody can give way to it."""
        if len(self.connections) >= self.limits.in_all:
            if not self._strangers:
                self._counted("too many connections")
                return None
            self._give_way(max(self._strangers.values(), key=len))
        connection = Connection(self, _address(host))
        self.enter(connection)
        return connection

    def enter(self, connection: Connection) -> None:
        """Count it among those of its key, or of its address."""
        self.connections[connection] = None
        if connection.key is None:
            own, most = self._strangers.setdefault(connection.address, {}), self.limits.of_an_address
        else:
            own, most = self._known.setdefault(connection.key, {}), self.limits.of_a_key
        own[connection] = None
        if len(own) > most:
            self._give_way(own)

    def leave(self, connection: Connection) -> None:
        """Count it no more."""
        self.connections.pop(connection, None)
        if connection.key is None:
            _drop(self._strangers, connection.address, connection)
        else:
            _drop(self._known, connection.key, connection)

    def _give_way(self, group: dict[Connection, None]) -> None:
        oldest = next(iter(group))
        self.leave(oldest)
        self._counted("too many connections")
        oldest.hang_up()


def _drop(groups: dict[_Name, dict[Connection, None]], name: _Name, connection: Connection) -> None:
    if (own := groups.get(name)) is not None:
        own.pop(connection, None)
        if not own:
            del groups[name]


def connection_of(scope: Mapping[str, Any]) -> Connection | None:
    """The connection that an ASGI request came by; None where nobody guards it."""
    found: Connection | None = scope.get("state", {}).get("connection")
    return found


def _address(host: str) -> str:
    """
    >>> _address("192.0.2.7"), _address("2001:db8:1:2:3::4"), _address("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8:1:2::', '192.0.2.7')
    """
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if found.version == 4:
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False).network_address)


class Overload(Exception):
    """There is no room for more bytes."""


class RequestMemory:
    """The bytes that requests may take up together, whether they are being read or wait to be dealt with.

    What has come counts, not what was promised: whoever announces much and sends nothing takes nothing. Where there is
    no room left, bodies that have been coming for a while give way, the oldest first.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self.coming: dict[Share, None] = {}
        """Those that are being read, the oldest first."""

    @contextmanager
    def holding(self) -> Iterator[Share]:
        """A request's share of the room, empty at first; given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            share.give_back()


class Share:
    """What one request takes up."""

    def __init__(self, room: RequestMemory) -> None:
        self._room, self._since = room, time.monotonic()
        self._patience: asyncio.Timeout | None = None
        self.size = 0

    def take(self, size: int) -> None:
        """So many bytes more, or `Overload`."""
        room = self._room
        while room.taken + size > room.most:
            oldest = next(iter(room.coming), self)
            if oldest is self or time.monotonic() - oldest._since < _GRACE_SECONDS:
                raise Overload
            oldest._give_way()
        room.taken += size
        self.size += size

    @contextmanager
    def coming(self, patience: asyncio.Timeout) -> Iterator[None]:
        """While the body is read, it may have to give way: then its time is up."""
        self._patience, self._room.coming[self] = patience, None
        try:
            yield
        finally:
            self._room.coming.pop(self, None)

    def give_back(self) -> None:
        self._room.taken -= self.size
        self.size = 0

    def _give_way(self) -> None:
        del self._room.coming[self]
        self.give_back()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(0)

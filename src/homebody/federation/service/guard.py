"""Limits on the connections to a service, and on the memory of its requests.

A connection belongs to a stranger until one of its requests proves a key. Strangers are limited by address, others by
key, and all together. At a limit the oldest connection is closed for the newest, so that idle connections cannot keep
out a peer that proves its key at once. An address is kept while its connection is open, and is never logged.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Connection", "Guard", "Limits", "Overload", "RequestMemory", "Share", "connection_of"]

_GRACE_SECONDS = 2.0
"""Before the memory of a body that is still arriving may be given to another request."""
_FILES = 256
"""Files that a process has open beside its connections."""


@dataclass(frozen=True)
class Limits:
    """How many connections are held at one time."""

    in_all: int = 4000
    of_an_address: int = 64
    """Connections without a proven key; an IPv6 network of 64 bits counts as one address."""
    of_a_key: int = 8

    def affordable(self) -> Limits:
        """The same limits, lowered to the files that the system allows the process."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.in_all + _FILES
        if soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return Limits(max(16, min(self.in_all, soft - _FILES)), self.of_an_address, self.of_a_key)


class Connection:
    """An accepted connection. The server that handles it sets `hang_up`."""

    def __init__(self, guard: Guard, address: str) -> None:
        self._guard, self.address = guard, address
        self.key: bytes | None = None
        self.hang_up: Callable[[], object] = lambda: None

    def proved(self, key: bytes) -> None:
        """Count the connection for this key: one of its requests was signed by it, or showed it."""
        if self.key != key and self in self._guard.connections:
            self._guard.leave(self)
            self.key = key
            self._guard.enter(self)

    def close(self) -> None:
        self._guard.leave(self)


class Guard:
    """Admits connections, and closes the oldest ones at a limit.

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
        """A new connection from a host; None if no other can be closed for it."""
        if len(self.connections) >= self.limits.in_all:
            if not self._strangers:
                self._counted("too many connections")
                return None
            self._give_way(max(self._strangers.values(), key=len))
        connection = Connection(self, _address(host))
        self.enter(connection)
        return connection

    def enter(self, connection: Connection) -> None:
        """Count a connection for its key, or for its address."""
        self.connections[connection] = None
        groups, name = self._group(connection)
        group = groups.setdefault(name, {})
        group[connection] = None
        if len(group) > (self.limits.of_an_address if connection.key is None else self.limits.of_a_key):
            self._give_way(group)

    def leave(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        groups, name = self._group(connection)
        if (group := groups.get(name)) is not None:
            group.pop(connection, None)
            if not group:
                del groups[name]

    def _group(self, connection: Connection) -> tuple[dict[Any, dict[Connection, None]], str | bytes]:
        known = connection.key is not None
        return (self._known, connection.key or b"") if known else (self._strangers, connection.address)

    def _give_way(self, group: dict[Connection, None]) -> None:
        oldest = next(iter(group))
        self.leave(oldest)
        self._counted("too many connections")
        oldest.hang_up()


def connection_of(scope: Mapping[str, Any]) -> Connection | None:
    """The connection of an ASGI request; None if it is not guarded."""
    connection: Connection | None = scope.get("state", {}).get("connection")
    return connection


def _address(host: str) -> str:
    """
    >>> _address("192.0.2.7"), _address("2001:db8:1:2:3::4"), _address("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8:1:2::', '192.0.2.7')
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address)


class Overload(Exception):
    """Requests hold as many bytes as they may."""


class RequestMemory:
    """The bytes that all requests may hold together, while they are read and until they are answered.

    Only bytes that have arrived count, whatever a request announces. At the limit, the bodies that have been arriving
    for a while are dropped, the oldest first.
    """

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self.coming: dict[Share, None] = {}
        """Requests whose bodies are being read, the oldest first."""

    @contextmanager
    def holding(self) -> Iterator[Share]:
        """The share of one request, empty at first and released at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            share.give_back()


class Share:
    """The bytes that one request holds."""

    def __init__(self, room: RequestMemory) -> None:
        self._room, self._since = room, time.monotonic()
        self._patience: asyncio.Timeout | None = None
        self.size = 0

    def take(self, size: int) -> None:
        """Take this many more bytes; `Overload` if there is no room."""
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
        """While the body is read it may be dropped for another request: then `patience` expires."""
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

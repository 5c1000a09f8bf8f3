"""How a service of ours answers over HTTP: a Starlette app on uvicorn, over TLS beyond this machine.

No address of a peer is kept or logged. Nobody can make the process hold more than it has set aside: bodies are counted
against a common room as they come, and who is slow, sends endless headers or opens too many connections is
hung up on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homebody.errors import HomebodyError
from homebody.runtime.door import is_loopback
from homebody.runtime.logs import Lines

try:
    import uvicorn
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
except ImportError as error:
    raise HomebodyError("Serving over HTTP needs the extra: pip install 'homebody[serve]'.") from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = [
    "Gone",
    "Refusal",
    "Room",
    "Share",
    "answer",
    "declared",
    "from_here",
    "listen",
    "read_body",
    "refusals",
    "serve",
    "server",
]

_HEAD_SECONDS = 15.0
"""For the head of a request to come in whole, and for a new connection to begin one."""
_HEAD_BYTES = 32 << 10
_BODY_SECONDS = 30.0
_GRACE_SECONDS = 2.0
"""For a body to come before it may have to give way to others."""
_DRAIN_SECONDS, _DRAIN_BYTES = 5.0, 1 << 20
_FAREWELL_SECONDS = 0.5
_CROWDED = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 5\r\ncontent-type: application/json\r\ncontent-length: 50\r\n"
    b'connection: close\r\n\r\n{"error": "Too many connections are open; wait."}\n'
)


class Refusal(Exception):
    """A request that is answered with a 4xx or 5xx: one sentence for whoever sent it, and a word to count it by."""

    def __init__(
        self, status: int, reason: str, sentence: str, *, retry_after: int | None = None, **fields: Any
    ) -> None:
        super().__init__(sentence)
        self.status, self.reason, self.retry_after = status, reason, retry_after
        self.said = {"error": sentence, **fields}


class Gone(Exception):
    """The peer hung up: nobody is there to answer."""


class Room:
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

    def __init__(self, room: Room) -> None:
        self._room, self._since = room, time.monotonic()
        self._patience: asyncio.Timeout | None = None
        self.size = 0

    def take(self, size: int) -> None:
        """So many bytes more, or a refusal."""
        room = self._room
        while room.taken + size > room.most:
            oldest = next(iter(room.coming), self)
            if oldest is self or time.monotonic() - oldest._since < _GRACE_SECONDS:
                raise Refusal(
                    429, "overload", "More has come in than can be dealt with now; send it again later.", retry_after=1
                )
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


def answer(status: int, said: dict[str, Any], **headers: str) -> Response:
    """A JSON answer; headers are named with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(json.dumps(said) + "\n", status, named, "application/json")


def declared(request: Request, limit: int) -> int:
    """How many bytes the body may turn out to have: what it says, or all that are allowed where it comes in chunks. One
    that says too much is refused before it is read."""
    given = request.headers.get("content-length")
    if given is None:
        return limit
    if not re.fullmatch(r"[0-9]{1,15}", given):
        raise Refusal(400, "malformed", "The content-length must be a whole number.")
    if int(given) > limit:
        raise Refusal(413, "too large", f"A body has at most {limit:,} bytes here, not {int(given):,}.")
    return int(given)


async def read_body(request: Request, limit: int, share: Share) -> bytes:
    """The body, of which no more than `limit` bytes are ever held, each counted in its share of the room as it comes,
    and which must come in time."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_SECONDS) as patience:
            with share.coming(patience):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise Refusal(413, "too large", f"A body has at most {limit:,} bytes here.")
                    share.take(len(part))
                    parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise Refusal(408, "too slow", "The body took too long to come; send it again.", retry_after=1) from None
    except ClientDisconnect:
        raise Gone from None
    finally:
        parts.clear()  # a refusal is still being answered while its frames are kept


async def _drained(request: Request) -> bool:
    """Read on for a little and keep nothing: a peer that is cut off while it sends would not see why. Says whether the
    whole body is read, and another request may follow."""
    size = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > _DRAIN_BYTES:
                    return False
    except RuntimeError:  # it was read already
        return True
    except (TimeoutError, ClientDisconnect):
        return False
    return True


def refusals(app: Starlette, counted: Callable[[str], None]) -> Starlette:
    """Answer every `Refusal` of an app, and what it has no route for, as JSON; `counted` is told why each time."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        counted(error.reason)
        headers = {} if await _drained(request) else {"connection": "close"}
        if error.retry_after is not None:
            headers["retry_after"] = str(error.retry_after)
        return answer(error.status, error.said, **headers)

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        counted("no such request")
        headers = {} if await _drained(request) else {"connection": "close"}
        sentence = "There is nothing here by this name." if error.status_code == 404 else str(error.detail)
        return answer(error.status_code, {"error": sentence}, **headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    app.router.redirect_slashes = False  # what is not here is not elsewhere either
    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Gone, gone)
    return app


def from_here(request: Request) -> bool:
    """Whether this machine itself asks."""
    return request.client is not None and is_loopback(request.client.host)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, or a sentence."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HomebodyError(f"Nobody can listen on {host}:{port}: {reason}; choose another address.") from error


def server(
    app: Starlette,
    listening: socket.socket,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    most_connections: int = 4000,
    keep_alive: int = 5,
    counted: Callable[[str], None] = lambda _: None,
) -> uvicorn.Server:
    """What answers on a socket; without a certificate it must listen on this machine alone.

    keep_alive: seconds that an idle connection is kept. counted: is told why whenever a connection is hung up on.
    """
    host = str(listening.getsockname()[0])
    if (cert is None or key is None) and not is_loopback(host):
        raise HomebodyError(f"{host} can be reached by others: it takes a certificate and its key.")
    # Warnings are of strangers' malformed requests: as many as they please.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app,
        http=_patient(_affordable(most_connections), counted),
        ws="none",
        lifespan="on",
        ssl_certfile=cert,
        ssl_keyfile=None if key is None else str(key),
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=10,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise HomebodyError(f"The certificate {cert} and its key {key} cannot be used: {error}.") from error
    return _Server(config)


def serve(app: Starlette, listening: socket.socket, **settings: Any) -> None:
    """Answer until SIGTERM or SIGINT: then requests that are being dealt with get their answer, and the app's lifespan
    ends. Settings are those of `server`."""
    logging.basicConfig(handlers=[Lines()], level=logging.ERROR, force=True)
    with listening:
        answering = server(app, listening, **settings)
        answering.run(sockets=[listening])
    if not answering.started:
        raise HomebodyError("The service could not start; its own words are above.")


def _affordable(connections: int) -> int:
    """As many connections as the system lets a process have, if that is fewer; some files are opened beside them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(connections, soft - 256))


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """To be told to stop is no failure: the signal is not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _patient(most_connections: int, counted: Callable[[str], None]) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with an end to its patience: it would wait for the head of a request for ever."""
    base: Any
    try:
        base = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    except ImportError:
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol

    class Patient(base):  # type: ignore[misc]
        _alarm: asyncio.TimerHandle | None = None
        _head = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most_connections:
                counted("too many connections")
                transport.write(_CROWDED)
                transport.close()
                return
            self._alarm = self.loop.call_later(_HEAD_SECONDS, self._hang_up)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:  # the head is there, the app has it
                self._head = 0
                if self._alarm is not None:
                    self._alarm.cancel()
                    self._alarm = None
                return
            self._head += len(data)
            if self._head > _HEAD_BYTES:
                self._hang_up()
            elif self._alarm is None:
                self._alarm = self.loop.call_later(_HEAD_SECONDS, self._hang_up)

        def on_response_complete(self) -> None:
            self._head = 0
            super().on_response_complete()

        def connection_lost(self, error: Exception | None) -> None:
            if self._alarm is not None:
                self._alarm.cancel()
            super().connection_lost(error)

        def shutdown(self) -> None:
            super().shutdown()
            if self.transport.is_closing():  # over TLS it would wait for the peer to say farewell, too
                self.loop.call_later(_FAREWELL_SECONDS, self.transport.abort)

        def _hang_up(self) -> None:
            counted("too slow")
            self.transport.abort()

    return Patient

"""HTTP services: a Starlette app on uvicorn, with TLS beyond this machine.

No address of a peer is logged, or kept after its connection is closed. The memory of requests is limited
(`homebody.federation.service.guard`). A peer that is slow to begin TLS or a request, sends endless headers, does not
read its answers, or opens too many connections is disconnected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError, install
from homebody.federation.envelopes import BadEnvelope, BadSignature, Envelope, open_envelope
from homebody.federation.service.guard import Connection, Guard, Limits, Overload, RequestMemory, Share, connection_of
from homebody.federation.service.logs import Lines
from homebody.federation.service.text import is_loopback

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise HomebodyError(f"Serving over HTTP needs the extra: {install('serve')}.") from error

__all__ = [
    "Gone",
    "Limits",
    "PlainTextResponse",
    "Refusal",
    "Request",
    "RequestMemory",
    "Response",
    "Route",
    "Share",
    "Starlette",
    "answer",
    "declared",
    "listen",
    "named_epoch",
    "only_from_here",
    "opened_envelope",
    "proved",
    "read_body",
    "refusal",
    "refusals",
    "serve",
    "server",
]

_HEAD_SECONDS = 15.0
"""For the head of a request to arrive, and for a new connection to begin one."""
_HEAD_BYTES = 32 << 10
_BODY_SECONDS = 30.0
_DRAIN_SECONDS, _DRAIN_BYTES = 5.0, 1 << 20
_FAREWELL_SECONDS = 0.5
_STUCK_SECONDS = 30.0
"""For a peer to read some of an answer."""
_BREATH_SECONDS = 0.2
"""Before the next connection is accepted, if the system allows the process no more of them."""


class Refusal(Exception):
    """A request that is answered with a 4xx or 5xx status, a sentence for its sender, and a reason to count it by."""

    def __init__(
        self, status: int, reason: str, sentence: str, *, retry_after: int | None = None, **fields: Any
    ) -> None:
        super().__init__(sentence)
        self.status, self.reason, self.retry_after = status, reason, retry_after
        self.said = {"error": sentence, **fields}


class Gone(Exception):
    """The peer has closed the connection."""


def answer(status: int, said: dict[str, Any], **headers: str) -> Response:
    """A JSON answer; headers are named with underscores."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Response(json.dumps(said) + "\n", status, named, "application/json")


def declared(request: Request, limit: int) -> int:
    """The most bytes that the body may have: its declared length, or the limit if it comes in chunks. A length over the
    limit is refused before the body is read."""
    given = request.headers.get("content-length")
    if given is None:
        return limit
    if not re.fullmatch(r"[0-9]{1,15}", given):
        raise Refusal(400, "malformed", "The content-length must be a whole number.")
    if int(given) > limit:
        raise Refusal(413, "too large", f"A body has at most {limit:,} bytes here, not {int(given):,}.")
    return int(given)


async def read_body(request: Request, limit: int, share: Share) -> bytes:
    """The body, at most `limit` bytes and within the time limit. Its bytes are counted in `share` as they arrive."""
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
    except Overload:
        raise Refusal(429, "overload", "The service is overloaded; send it again later.", retry_after=1) from None
    except ClientDisconnect:
        raise Gone from None
    finally:
        parts.clear()  # a refusal is still being answered while its frames are kept


async def _drained(request: Request) -> bool:
    """Read the rest of a body and drop it, so that the peer gets to read the refusal. Returns whether all of it was
    read, so that another request may follow."""
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


async def refusal(request: Request, error: Refusal, counted: Callable[[str], None]) -> Response:
    """The answer to a request that is refused, once the rest of its body is read."""
    counted(error.reason)
    headers = {} if await _drained(request) else {"connection": "close"}
    if error.retry_after is not None:
        headers["retry_after"] = str(error.retry_after)
    return answer(error.status, error.said, **headers)


def refusals(app: Starlette, counted: Callable[[str], None]) -> Starlette:
    """Answer each `Refusal` of an app, and each unknown route, as JSON; `counted` receives the reason."""

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            said = {404: "There is nothing here by this name.", 405: "This is not done here by that method."}
            sentence = said.get(error.status_code, f"{error.detail}.")
            error = Refusal(error.status_code, "no such request", sentence)
        assert isinstance(error, Refusal)
        return await refusal(request, error, counted)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it

    app.router.redirect_slashes = False  # what is not here is not elsewhere either
    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(Gone, gone)
    return app


def only_from_here(request: Request) -> None:
    """Answer only this machine; others get a 404."""
    if request.client is None or not is_loopback(request.client.host):
        raise Refusal(404, "no such request", "There is nothing here by this name.")


def opened_envelope(body: bytes) -> tuple[bytes, Envelope]:
    """Who signed an envelope, and what is in it; or a refusal."""
    try:
        return open_envelope(body)
    except BadSignature as error:
        raise Refusal(401, "bad signature", str(error)) from None
    except BadEnvelope as error:
        raise Refusal(400, "malformed", str(error)) from None


def named_epoch(request: Request, what: str) -> bytes:
    """The epoch that a path names; what: as a sentence calls it."""
    name = request.path_params["epoch"]
    if not re.fullmatch(r"[0-9a-f]{32}", name):
        raise Refusal(404, "unknown epoch", f"{what} is named by 32 hexadecimal digits.")
    return bytes.fromhex(name)


def proved(request: Request, key: bytes) -> None:
    """Count the connection for the key that signed its request."""
    if (connection := connection_of(request.scope)) is not None:
        connection.proved(key)


def listen(host: str, port: int, elsewhere: str = "choose another address") -> socket.socket:
    """A socket that listens on this address. elsewhere: what to do where it is taken."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = why_not_bound(error)
        raise HomebodyError(f"The service cannot listen on {host}:{port}: {reason}; {elsewhere}.") from error


def why_not_bound(error: BaseException) -> str:
    """The system's reason, without the address, which Python adds.

    >>> why_not_bound(OSError(98, "Address already in use (while attempting to bind on address ('127.0.0.1', 9092))"))
    'Address already in use'
    """
    return str(getattr(error, "strerror", None) or error).partition(" (while")[0]


def server(
    app: Any,
    listening: socket.socket,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    limits: Limits | None = None,
    keep_alive: int = 5,
    farewell: int = 10,
    date: bool = False,
    counted: Callable[[str], None] = lambda _: None,
) -> uvicorn.Server:
    """A server of an ASGI app on a socket; without a certificate the socket must be on this machine alone.

    keep_alive: seconds that an idle connection is kept. farewell: seconds to answer the last requests when it stops.
    date: whether answers have a date header. counted: receives the reason when a connection is closed at a limit.
    """
    host = str(listening.getsockname()[0])
    if (cert is None or key is None) and not is_loopback(host):
        raise HomebodyError(f"Other machines can reach {host}: give a certificate and its key.")
    # Warnings are of strangers' malformed requests: as many as they please.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    private: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
    config = uvicorn.Config(
        app,
        http=_patient(counted),
        ws="none",
        lifespan="on",
        ssl_certfile=cert,
        ssl_keyfile=None if key is None else str(key),
        date_header=date,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=farewell,
        **private,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise HomebodyError(f"The certificate {cert} and its key {key} cannot be used: {error}.") from error
    return _Server(config, Guard((limits or Limits()).affordable(), counted))


def serve(app: Any, listening: socket.socket, keys: Path | None, counted: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; requests in progress are answered first. keys: the folder of the certificate
    (server.pem, server.key); None: without TLS. counted: as of `server`."""
    cert, key = (None, None) if keys is None else (keys / "server.pem", keys / "server.key")
    logging.basicConfig(handlers=[Lines()], level=logging.ERROR, force=True)
    with listening:
        answering = server(app, listening, cert=cert, key=key, counted=counted)
        answering.run(sockets=[listening])
    if not answering.started:
        raise HomebodyError("The service could not start; the error is above.")


class _Server(uvicorn.Server):
    """Accepts connections itself, so that those are counted too that begin TLS and send nothing."""

    def __init__(self, config: uvicorn.Config, guard: Guard) -> None:
        super().__init__(config)
        self._guard = guard
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            self.should_exit = True
            return
        self.servers = []
        for listening in sockets or []:
            listening.setblocking(False)
            self._begin(self._accept(listening))
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # it hung up before its turn came
            except OSError:
                await asyncio.sleep(_BREATH_SECONDS)
                continue
            connection = self._guard.admit(str(peer[0]))
            if connection is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            greeting = self._begin(self._greet(accepted, connection))
            connection.hang_up = greeting.cancel
            greeting.add_done_callback(partial(_greeted, accepted, connection))

    async def _greet(self, accepted: socket.socket, connection: Connection) -> None:
        """Begin TLS within the time limit, and hand the connection to its protocol."""
        loop, config = asyncio.get_running_loop(), self.config

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config,
                server_state=self.server_state,
                app_state={**self.lifespan.state, "connection": connection},
            )

        patience = _HEAD_SECONDS if config.ssl else None
        # From here on the socket is its transport's, which closes it whatever happens.
        owned = socket.socket(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        with suppress(OSError):
            await loop.connect_accepted_socket(protocol, owned, ssl=config.ssl, ssl_handshake_timeout=patience)
            return
        connection.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal to stop is no failure: it is not raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _greeted(accepted: socket.socket, connection: Connection, greeting: asyncio.Task[None]) -> None:
    """Close the socket if no protocol has taken it over, and forget a connection that was cancelled before."""
    accepted.close()
    if greeting.cancelled():
        connection.close()


def _patient(counted: Callable[[str], None]) -> type[asyncio.Protocol]:
    """uvicorn's protocol with time limits for the head of a request and for reading an answer; it has none itself."""
    base: Any
    try:
        base = import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
    except ImportError:
        base = import_module("uvicorn.protocols.http.h11_impl").H11Protocol

    class Patient(base):  # type: ignore[misc]
        _alarm: asyncio.TimerHandle | None = None
        _stuck: asyncio.TimerHandle | None = None
        _head = 0

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._connection: Connection = self.app_state["connection"]
            self._connection.hang_up = transport.abort
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

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            if self._stuck is not None:
                self._stuck.cancel()
                self._stuck = None
            super().resume_writing()

        def connection_lost(self, error: Exception | None) -> None:
            for alarm in (self._alarm, self._stuck):
                if alarm is not None:
                    alarm.cancel()
            self._connection.close()
            super().connection_lost(error)

        def shutdown(self) -> None:
            super().shutdown()
            if self.transport.is_closing():  # over TLS it would wait for the peer to say farewell, too
                self.loop.call_later(_FAREWELL_SECONDS, self.transport.abort)

        def _watch(self, left: int) -> None:
            """Disconnect unless the peer has read some of the answer by the next look."""

            def look() -> None:
                waits = self.transport.get_write_buffer_size()
                if waits < left:
                    self._watch(waits)
                else:
                    self._hang_up()

            self._stuck = self.loop.call_later(_STUCK_SECONDS, look)

        def _hang_up(self) -> None:
            counted("too slow")
            self.transport.abort()

    return Patient

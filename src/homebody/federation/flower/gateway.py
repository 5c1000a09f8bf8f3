"""The gateway in front of Flower's SuperLink.

Flower serves three APIs on one port. Devices need one, the Fleet API, and sign each request; the other two are open to
everyone, and bodies of any size are read before the sender is checked. The gateway lets strangers reach the Fleet API
only, requires the operator's secret for the others, and limits each body and all bodies together. It also holds a pull
until there is a message, so that devices need not poll.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from homebody.federation.service.guard import Overload, RequestMemory, Share, connection_of

__all__ = ["LIMIT", "OPERATOR", "WAIT", "Gateway", "Headers", "operator_token", "quiet_flower"]

OPERATOR = "homebody-operator"
"""The header that shows the operator's secret, as `operator_token` makes it."""

WAIT = "homebody-wait"
"""The header of a pull that may be held for so many seconds."""

LIMIT = 64 << 20
"""The most bytes of one device's request."""

_OPERATORS_LIMIT = 1 << 30
_STRANGERS_LIMIT = 64 << 10
_LONGEST_HOLD = 25.0
_LONGEST_DRAIN = 10.0
_ROOM = 1 << 30
"""Bytes that the requests of all devices may hold at one time."""
_PATIENCE = 30.0
"""Seconds for the body of a stranger to arrive, and for each piece of a known device's."""

# What our devices use of it; the rest serves Flower's own, which fetch bundles of code.
_FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in ("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages")
)
_DEVICE_PULLS, _DEVICE_PUSHES = "/v1/fleet/pull-messages", "/v1/fleet/push-messages"
_SERVER_PULLS, _SERVER_PUSHES = "/v1/runtime/pull-messages", "/v1/runtime/push-messages"

_KEY_HEADER = b"flwr-public-key"

# The server is one; nodes have numbers above 1.
_SERVER = 1

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Headers = dict[bytes, bytes]


def quiet_flower() -> None:
    """Turn off flwr's telemetry, installations and log; call it before flwr is first imported."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    logger = logging.getLogger("flwr")
    # It sets its own level and handler when imported, and logs keys and numbers of nodes.
    logger.addFilter(lambda record: False)
    logger.propagate = False


def operator_token(secret: bytes) -> str:
    """What stands for the secret in a header: a SuperLink of another operator must not learn the secret.

    >>> len(operator_token(b"any bytes")), operator_token(b"a") == operator_token(b"b")
    (64, False)
    """
    return hmac.new(secret, b"homebody operator", hashlib.sha256).hexdigest()


class _Refusal(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


class _Gone(Exception):
    """The peer has closed the connection."""


@dataclass(eq=False)
class _Held:
    """A pull that waits. When its device sends a newer one it is replaced, and must not claim a message."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class _Answer:
    """An answer of the SuperLink, kept until it is decided whether to send it."""

    parts: list[Message] = field(default_factory=list)

    async def keep(self, part: Message) -> None:
        self.parts.append(part)

    @property
    def status(self) -> int:
        return int(self.parts[0]["status"]) if self.parts else 500

    @property
    def empty(self) -> bool:
        return self.status == 200 and not any(part.get("body") for part in self.parts)


class Gateway:
    """An ASGI application in front of the SuperLink's.

    `known` says whether a request's headers are signed by a registered key; it is asked before a body of more than
    64 KB is read. Without it any sender's body may have `limit` bytes.
    """

    def __init__(
        self, app: App, secret: bytes, limit: int = LIMIT, *, known: Callable[[Headers], bool] | None = None
    ) -> None:
        self.app, self.limit, self.known = app, limit, known
        self._token = operator_token(secret).encode()
        self._held: dict[int, set[_Held]] = {}
        self.room = RequestMemory(_ROOM)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._serve(scope, receive, send)
            except _Refusal as refusal:
                await _say(send, refusal.status)
            except _Gone:
                return
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], dict(scope["headers"])
        if path == "/health" and scope["method"] in {"GET", "HEAD"}:
            await _say(send, 200, b"ok")
            return
        operator = hmac.compare_digest(headers.get(OPERATOR.encode(), b""), self._token)
        if path not in _FLEET and not operator:
            raise _Refusal(404)
        if operator and (connection := connection_of(scope)) is not None:
            connection.proved(OPERATOR.encode())
        wait = _seconds(headers.get(WAIT.encode(), b"0"))
        with self.room.holding() as share:
            body = await self._read(scope, headers, receive, None if operator else share)
            if not (wait and path in {_DEVICE_PULLS, _SERVER_PULLS}):
                await self._pass(scope, body, receive, send)
                return
        await self._hold(scope, body, receive, send, min(wait, _LONGEST_HOLD))

    async def _read(self, scope: Message, headers: Headers, receive: Receive, share: Share | None) -> bytes:
        """The body, up to the limit of its sender. share: None for the operator."""
        declared = _length(headers)
        limit, refusal = (_OPERATORS_LIMIT if share is None else self.limit), 413
        small = declared is not None and declared <= _STRANGERS_LIMIT
        stranger = share is not None
        if share is not None and not small and self.known is not None:
            if await asyncio.to_thread(self.known, headers):
                stranger = False
                self._prove(scope)
            else:
                limit, refusal = min(limit, _STRANGERS_LIMIT), 401
        if declared is not None and declared > limit:
            await _drain(receive)
            raise _Refusal(refusal)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(_PATIENCE) as patience:
                with nullcontext() if share is None else share.coming(patience):
                    while more:
                        part = await receive()
                        if part["type"] != "http.request":
                            raise _Gone
                        piece, more = part.get("body", b""), part.get("more_body", False)
                        size += len(piece)
                        if size > limit:
                            break
                        if share is not None:
                            share.take(len(piece))
                        if not stranger:
                            patience.reschedule(asyncio.get_running_loop().time() + _PATIENCE)
                        parts.append(piece)
        except TimeoutError:
            raise _Refusal(408) from None
        except Overload:
            await _drain(receive)
            raise _Refusal(503) from None
        if size > limit:
            parts.clear()
            if more:
                await _drain(receive)
            raise _Refusal(refusal)
        return b"".join(parts)

    async def _pass(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        path, status = scope["path"], 0

        async def watched(part: Message) -> None:
            nonlocal status
            status = part.get("status", status)
            await send(part)

        await self.app(scope, _replayed(body, receive), watched)
        _note(path, status)
        if status != 200:
            return
        if path in _FLEET:
            self._prove(scope)  # the SuperLink has checked the signature
        if path == _SERVER_PUSHES:
            self._wake(_addressees(body))
        elif path == _DEVICE_PUSHES:
            self._wake({_SERVER})

    def _prove(self, scope: Message) -> None:
        """Count the connection for the key in the request."""
        key, connection = dict(scope["headers"]).get(_KEY_HEADER), connection_of(scope)
        if key and connection is not None and self.known is not None:
            connection.proved(key)

    async def _hold(self, scope: Message, body: bytes, receive: Receive, send: Send, seconds: float) -> None:
        """Ask the SuperLink; if it has no message, wait for a push and ask again. Asking claims the message for good.
        So it never asks for a peer that is gone or for a replaced request."""
        whose, end = _puller(scope["path"], body), time.monotonic() + seconds
        gone = asyncio.ensure_future(receive())
        held, answer, proven = _Held(), _Answer(), False
        self._held.setdefault(whose, set()).add(held)
        try:
            while not held.replaced.is_set():
                held.news.clear()
                answer = _Answer()
                again = dict(scope, state=dict(scope.get("state", {})))
                await self.app(again, _replayed(body, lambda: asyncio.shield(gone)), answer.keep)
                left = end - time.monotonic()
                if not answer.empty or left <= 0:
                    _note(scope["path"], answer.status)
                    break
                if not proven and whose != _SERVER:
                    # The SuperLink has checked that the sender is who it says.
                    proven = True
                    self._prove(scope)
                    for older in self._held[whose] - {held}:
                        older.replaced.set()
                        older.news.set()
                news = asyncio.ensure_future(held.news.wait())
                await asyncio.wait({news, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if gone.done():
                    return
            for part in answer.parts:
                await send(part)
        finally:
            gone.cancel()
            self._held[whose].discard(held)
            if not self._held[whose]:
                del self._held[whose]

    def _wake(self, whose: set[int]) -> None:
        for node in whose & self._held.keys():
            for held in self._held[node]:
                held.news.set()


def _note(path: str, status: int) -> None:
    if status >= 500:
        logging.getLogger("homebody.link").error("the SuperLink failed: %d at %s", status, path)


def _replayed(body: bytes, then: Receive) -> Receive:
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            return await then()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _length(headers: Headers) -> int | None:
    """The content-length; None if the body comes in chunks."""
    given = headers.get(b"content-length")
    if given is None:
        return None
    if not re.fullmatch(rb"[0-9]{1,15}", given):
        raise _Refusal(400)
    return int(given)


def _seconds(given: bytes) -> float:
    try:
        seconds = float(given)
    except ValueError as error:
        raise _Refusal(400) from error
    if not math.isfinite(seconds) or seconds < 0:
        raise _Refusal(400)
    return seconds


async def _drain(receive: Receive) -> None:
    """Read the rest of a body and drop it, so that the peer gets to read the refusal."""
    end = time.monotonic() + _LONGEST_DRAIN
    more = True
    while more and (left := end - time.monotonic()) > 0:
        try:
            part = await asyncio.wait_for(receive(), left)
        except TimeoutError:
            return
        if part["type"] != "http.request":
            raise _Gone
        more = part.get("more_body", False)


async def _say(send: Send, status: int, body: bytes = b"") -> None:
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"text/plain")]
    if status >= 400:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _puller(path: str, body: bytes) -> int:
    """The node that a pull claims to be from; the SuperLink checks it."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from google.protobuf.message import DecodeError

    if path == _SERVER_PULLS:
        return _SERVER
    try:
        return PullMessagesRequest.FromString(body).node.node_id
    except DecodeError:
        return 0


def _addressees(body: bytes) -> set[int]:
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return {message.metadata.dst_node_id for message in PushAppMessagesRequest.FromString(body).messages_list}

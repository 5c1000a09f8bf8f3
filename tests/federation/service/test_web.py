"""How a service of ours answers: nobody slow, greedy or numerous takes it away from the others."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.processes import PATIENCE

from homebody.federation.service import guard, web


class Served:
    """An app on a socket, in a thread."""

    def __init__(self, **settings: Any) -> None:
        self.counted: Counter[str] = Counter()
        self.room = web.RequestMemory(100_000)

        async def take(request: Request) -> Response:
            size = web.declared(request, 50_000)
            with self.room.holding() as share:
                body = await web.read_body(request, size, share)
            return web.answer(200, {"bytes": len(body)})

        async def fails(_: Request) -> Response:
            raise ValueError("a secret at 192.0.2.7")

        self.app = web.refusals(
            Starlette(routes=[Route("/take", take, methods=["POST"]), Route("/fails", fails)]), self.count
        )
        listening = web.listen("127.0.0.1", 0)
        self.port = listening.getsockname()[1]
        self._server = web.server(self.app, listening, counted=self.count, **settings)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def count(self, reason: str) -> None:
        self.counted[reason] += 1

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(300)
        assert not self._thread.is_alive()


@pytest.fixture(params=["httptools", "h11"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """With either parser: the extra `serve` brings one, and where the other is installed that is used."""
    running: list[Served] = []

    def there(name: str) -> Any:
        if request.param not in name:
            raise ImportError
        return import_module(name)

    if request.param == "httptools":
        pytest.importorskip("httptools")
    monkeypatch.setattr(web, "import_module", there)

    def served(**settings: Any) -> Served:
        running.append(Served(**settings))
        return running[-1]

    yield served
    for one in running:
        one.close()


@contextmanager
def said(connection: socket.socket, *parts: bytes) -> Iterator[bytes]:
    """What comes back until the other side closes."""
    with connection:
        for part in parts:
            connection.sendall(part)
        out = b""
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                out += piece
        yield out


def post(body: bytes, *headers: bytes) -> bytes:
    head = [b"POST /take HTTP/1.1", b"host: x", b"content-length: %d" % len(body), b"connection: close", *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def test_whoever_does_not_get_on_is_hung_up_on(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_HEAD_SECONDS", 0.4)
    monkeypatch.setattr(web, "_BODY_SECONDS", 0.4)
    monkeypatch.setattr(web, "_DRAIN_SECONDS", 0.1)
    here = served()
    with said(here.connect()) as nothing:
        assert nothing == b""
    with said(here.connect(), b"POST /take HTTP/1.1\r\nhost: x\r\n") as half_a_head:
        assert half_a_head == b""
    with said(here.connect(), post(bytes(100))[:-50]) as half_a_body:
        assert half_a_body.startswith(b"HTTP/1.1 408")
    assert (here.counted["too slow"], here.room.taken) == (3, 0)
    # After an answer, too: the next head must come in time.
    connection = here.connect()
    connection.sendall(post(b"x").replace(b"connection: close\r\n", b""))
    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    with said(connection, b"POST /ta") as second:
        assert second == b""


def test_a_head_without_end_is_cut_off(served: Callable[..., Served]) -> None:
    here = served()
    connection = here.connect()
    connection.sendall(b"POST /take HTTP/1.1\r\n")
    sent = 0
    with suppress(OSError), connection:
        for _ in range(10_000):
            connection.sendall(b"x-y: %s\r\n" % (b"y" * 1000))
            sent += 1
    assert sent < 10_000
    with said(here.connect(), post(b"abc")) as other:
        assert b'{"bytes": 3}' in other


def test_of_too_many_connections_the_oldest_strangers_give_way(served: Callable[..., Served]) -> None:
    here = served(limits=web.Limits(in_all=16, of_an_address=16))
    several = [here.connect() for _ in range(40)]
    with said(here.connect(), post(b"abc")) as newest:
        assert b'{"bytes": 3}' in newest
    assert here.counted["too many connections"] == 25
    for one in several:
        one.close()


def taken(here: Served, size: int) -> None:
    for _ in range(250):
        if here.room.taken == size:
            return
        time.sleep(0.02)
    raise AssertionError(here.room.taken)


def test_what_is_promised_and_does_not_come_takes_no_room(served: Callable[..., Served]) -> None:
    here = served()
    idle = [here.connect() for _ in range(40)]
    for one in idle:  # 2,000,000 bytes are announced, 20 times as many as there is room for
        one.sendall(post(bytes(50_000))[: -50_000 + 4])
    taken(here, 160)
    with said(here.connect(), post(bytes(50_000))) as other:
        assert b'{"bytes": 50000}' in other
    for one in idle:
        one.close()
    taken(here, 0)
    assert not here.counted


def test_more_than_there_is_room_for_is_refused(served: Callable[..., Served]) -> None:
    here = served()
    waiting = [here.connect() for _ in range(2)]
    for one in waiting:
        one.sendall(post(bytes(50_000))[:-100])
    taken(here, 99_800)
    with said(here.connect(), post(bytes(201))) as third:
        assert third.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in third
    assert here.room.taken == 99_800
    for one in waiting:
        one.close()
    taken(here, 0)
    with said(here.connect(), post(bytes(201))) as fourth:
        assert b'{"bytes": 201}' in fourth
    assert here.counted == {"overload": 1}


def test_bodies_that_do_not_get_on_give_way_the_oldest_first(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(web, "_DRAIN_SECONDS", 0.1)
    here = served()
    waiting = []
    for at in (1, 2):
        waiting.append(here.connect())
        waiting[-1].sendall(post(bytes(50_000))[:-100])
        taken(here, at * 49_900)
    time.sleep(0.15)
    with said(here.connect(), post(bytes(201))) as third:
        assert b'{"bytes": 201}' in third
    assert waiting[0].recv(1000).startswith(b"HTTP/1.1 408")
    waiting[1].sendall(bytes(100))
    assert waiting[1].recv(1000).startswith(b"HTTP/1.1 200")
    for one in waiting:
        one.close()
    taken(here, 0)
    assert here.counted == {"too slow": 1}


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post(bytes(60_000)), b"413"),
        (b"POST /take HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n", b"4"),
        (b"POST /take HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", b"400"),
        (b"POST /take HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"POST /take HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"4"),
        (b"GET /take HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n", b"4"),
    ],
)
def test_bad_requests_get_a_4xx(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, request_bytes: bytes, status: bytes
) -> None:
    monkeypatch.setattr(web, "_DRAIN_SECONDS", 0.1)
    here = served()
    connection = here.connect()
    connection.sendall(request_bytes)
    assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)
    connection.close()
    assert here.room.taken == 0


def test_a_body_in_chunks_is_read_as_far_as_it_may_go(served: Callable[..., Served]) -> None:
    here = served()
    head = b"POST /take HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    chunk = b"2710\r\n" + bytes(10_000) + b"\r\n"
    with said(here.connect(), head, *[chunk] * 5, b"0\r\n\r\n") as enough:
        assert b'{"bytes": 50000}' in enough
    with said(here.connect(), head, *[chunk] * 6, b"0\r\n\r\n") as too_much:
        assert too_much.startswith(b"HTTP/1.1 413")
    assert here.counted == {"too large": 1}


def test_a_failure_is_logged_by_its_kind_alone(
    served: Callable[..., Served], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from homebody.federation.service.logs import Lines

    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [Lines()])
    with said(served().connect(), b"GET /fails HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as answer:
        assert answer.startswith(b"HTTP/1.1 500")
        assert b"secret" not in answer
    told = capsys.readouterr().err
    assert "ValueError" in told
    assert "192.0.2.7" not in told
    assert "secret" not in told


def test_whoever_hangs_up_leaves_nothing_behind(served: Callable[..., Served]) -> None:
    here = served()
    for _ in range(20):
        with here.connect() as connection:
            connection.sendall(post(bytes(40_000))[:20_000])
    for _ in range(200):
        if not here.room.taken:
            break
        time.sleep(0.02)
    assert here.room.taken == 0
    assert not here.counted


def test_a_room_is_given_back_whatever_happens() -> None:
    room = web.RequestMemory(10)

    def cancelled() -> None:
        with room.holding() as share:
            share.take(10)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        cancelled()
    assert room.taken == 0
    with room.holding() as share, room.holding() as other:
        share.take(10)
        with pytest.raises(guard.Overload):
            other.take(1)
        assert room.taken == 10
    assert room.taken == 0

"""Few bytes that would become many: nothing that comes in is unpacked, and no answer takes more than its bytes say."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from homebody.federation import wire
from homebody.federation.device.reporter import Reporter
from homebody.federation.envelopes import signing_keys
from homebody.federation.server.answers import read
from homebody.federation.service import web

BOMB = gzip.compress(bytes(64 << 20))
"""65 KB."""
MOST = 16 << 20


@contextmanager
def frugal() -> Iterator[None]:
    """What is done within takes at most so much memory at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST, f"{peak >> 20} MB"


def test_bodies_are_never_unpacked() -> None:
    """The common reader of proxy and intake gives the bytes that came, whatever they claim to be."""
    room, sizes = web.RequestMemory(1 << 20), list[int]()

    async def take(request: Request) -> Response:
        with room.holding() as share:
            sizes.append(len(await web.read_body(request, web.declared(request, 1 << 20), share)))
        return web.answer(200, {})

    listening = web.listen("127.0.0.1", 0)
    server = web.server(Starlette(routes=[Route("/", take, methods=["POST"])]), listening)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        with frugal(), socket.create_connection(listening.getsockname(), 20) as connection:
            head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\ncontent-length: {len(BOMB)}\r\n\r\n"
            connection.sendall(head.encode() + BOMB)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    finally:
        server.should_exit = True
        thread.join(300)
    assert sizes == [len(BOMB)]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_a_proxys_answer_is_not_unpacked_on_a_device(encoding: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard: list[bytes] = []

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                heard.append(connection.recv(65536))
                head = (
                    f"HTTP/1.1 200 OK\r\ncontent-encoding: {encoding}\r\ncontent-length: {len(BOMB[:60_000])}\r\n\r\n"
                )
                connection.sendall(head.encode() + BOMB[:60_000])

        thread = threading.Thread(target=answer)
        thread.start()
        reporter = Reporter(f"http://127.0.0.1:{listening.getsockname()[1]}", ca=None, secret=signing_keys()[1])
        with frugal():
            assert reporter._once("GET", "/v1/epochs/00", None)[:2] == (200, {})
        reporter.close()
        thread.join(300)
        assert b"accept-encoding: identity" in heard[0].lower()


class One:
    first, people = 0, 1


@pytest.mark.parametrize(
    "text",
    [
        b'{"header": [' + b"[]," * 300_000 + b'[]], "parts": {}}',
        b'{"header": {"to": "x", "people": [' + b"[]," * 300_000 + b'[]]}, "parts": {}}',
        b'{"header": {}, "parts": {' + b",".join(b'"%d": 0' % number for number in range(90_000)) + b"}}",
        b"[" * (1 << 20),
        json.dumps({"header": {"people": [10**4000] * 200}, "parts": {}}).encode(),
    ],
    ids=["lists", "people", "parts", "nested", "digits"],
)
def test_a_header_becomes_no_more_than_some_megabytes(text: bytes) -> None:
    body = struct.pack("<2sHI", b"HB", wire.VERSION, len(text)) + text
    tracemalloc.start()
    try:
        with pytest.raises(wire.Malformed):
            read(body, One(), "x", [0], lambda part: {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_tree_takes_no_more_than_its_bytes_say() -> None:
    """Shapes that would fill any memory, of no bytes at all, or of rows that are not there."""
    for head in (
        [["w", None, ["<f4", [1 << 30, 1 << 20]]]],
        [["w", None, ["<f4", [0, 1 << 30, 1 << 30]]]],
        [["w", 1 << 30, ["<i4", [1]], ["<f4", [1, 1 << 30]]]],
    ):
        empty: dict[str, Any] = {"0": b"", "1": b""} if head[0][1] else {"0": b""}
        with frugal(), pytest.raises(wire.Malformed):
            wire.decode_tree(wire.encode_letter({"tree": head}, empty))

"""The gateway: what passes, what does not, and what is held; first by itself, then in front of a real SuperLink."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from tests.processes import PATIENCE

from homebody.federation.flower.gateway import OPERATOR, WAIT, operator_token
from homebody.federation.flower.superlink import Gateway, main

SECRET = b"the operator's secret"
SHOWN = {OPERATOR: operator_token(SECRET)}
PULL, PUSH = "/v1/fleet/pull-messages", "/v1/runtime/push-messages"


class Inside:
    """Stands for the SuperLink: a pull gives a node's next letter, or an empty body."""

    def __init__(self) -> None:
        self.letters: dict[int, list[bytes]] = {}
        self.seen: list[tuple[str, int]] = []
        self.status = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        part = await receive()
        body, path = part["body"], scope["path"]
        assert not part["more_body"]
        self.seen.append((path, len(body)))
        answer = b""
        if path == PULL:
            waiting = self.letters.get(PullMessagesRequest.FromString(body).node.node_id)
            answer = waiting.pop(0) if waiting else b""
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": answer})


class Peer:
    """One request, in pieces; it hangs up when told."""

    def __init__(self, gateway: Gateway, path: str, *pieces: bytes, method: str = "POST", **headers: str) -> None:
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, piece in enumerate(pieces or (b"",)):
            more = number + 1 < len(pieces)
            self.parts.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self.said: list[Any] = []
        scope = {"type": "http", "path": path, "method": method, "headers": given}
        self.task = asyncio.ensure_future(gateway(scope, self.parts.get, self._hear))

    async def _hear(self, part: Any) -> None:
        self.said.append(part)

    def hang_up(self) -> None:
        self.parts.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int, bytes]:
        await asyncio.wait_for(self.task, 10)
        return self.said[0]["status"], b"".join(part.get("body", b"") for part in self.said)


def status(path: str, *pieces: bytes, method: str = "POST", limit: int = 1000, **headers: str) -> int:
    async def ask() -> int:
        peer = Peer(Gateway(Inside(), SECRET, limit), path, *pieces, method=method, **headers)
        return (await peer.answer())[0]

    return asyncio.run(ask())


def pulling(node: int) -> bytes:
    return PullMessagesRequest(node=Node(node_id=node)).SerializeToString()


def pushed(*nodes: int) -> bytes:
    messages = [Message(metadata=Metadata(dst_node_id=node)) for node in nodes]
    return PushAppMessagesRequest(messages_list=messages).SerializeToString()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/list-nodes",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/get-fab",
        "/v1/fleet/pull-object",
        "/docs",
        "/openapi.json",
        "/",
        "/v1/fleet/pull-messages/",
        "//v1/fleet/pull-messages",
    ],
)
def test_only_the_operator_gets_beyond_the_fleet(path: str) -> None:
    assert status(path) == 404
    assert status(path, **{OPERATOR: "a guess"}) == 404
    assert status(path, **{OPERATOR: SECRET.decode()}) == 404
    assert status(path, **SHOWN) == 200


def test_devices_reach_what_they_need() -> None:
    for name in ("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages"):
        assert status(f"/v1/fleet/{name}") == 200


def test_nobody_registers_a_key_of_their_own() -> None:
    for name in ("register-node", "unregister-node"):
        assert status(f"/v1/fleet/{name}") == 404


def test_health_says_ok_to_everybody() -> None:
    async def ask() -> tuple[int, bytes]:
        return await Peer(Gateway(Inside(), SECRET), "/health", method="GET").answer()

    assert asyncio.run(ask()) == (200, b"ok")
    assert status("/health", method="POST") == 404


def test_bodies_have_a_limit_whether_declared_or_not() -> None:
    path = "/v1/fleet/push-messages"
    assert status(path, bytes(1000), content_length="1000") == 200
    assert status(path, bytes(1001), content_length="1001") == 413
    assert status(path, *[bytes(100)] * 10) == 200
    assert status(path, *[bytes(100)] * 10, b"x") == 413
    assert status(path, *[bytes(100)] * 10, b"x", content_length="5") == 413
    assert status(path, *[bytes(100)] * 11, **SHOWN) == 200


@pytest.mark.parametrize("length", ["-1", "+5", "1e3", "abc", "", "1" * 16, "0x10", "５"])
def test_lengths_that_are_no_numbers_are_bad_requests(length: str) -> None:
    assert status("/v1/fleet/push-messages", content_length=length) == 400


@pytest.mark.parametrize("wait", ["-1", "abc", "", "nan", "inf", "1e999", "1,5"])
def test_waits_that_are_no_numbers_are_bad_requests(wait: str) -> None:
    assert status(PULL, pulling(5), **{WAIT: wait}) == 400


def test_large_bodies_are_read_from_known_senders_only() -> None:
    async def ask(known: bool, *pieces: bytes, **headers: str) -> tuple[int, list[tuple[str, int]]]:
        inside = Inside()
        gateway = Gateway(inside, SECRET, 1 << 20, known=lambda headers: known)
        said, _ = await Peer(gateway, "/v1/fleet/push-messages", *pieces, **headers).answer()
        return said, inside.seen

    large, small = bytes(200_000), bytes(60_000)
    assert asyncio.run(ask(True, large, content_length="200000"))[0] == 200
    assert asyncio.run(ask(False, large, content_length="200000")) == (401, [])
    assert asyncio.run(ask(False, *[small] * 3)) == (401, [])
    assert asyncio.run(ask(False, small, content_length="60000"))[0] == 200
    assert asyncio.run(ask(True, *[large] * 6))[0] == 413


def test_who_hangs_up_while_sending_is_forgotten() -> None:
    async def ask() -> tuple[list[Any], list[tuple[str, int]]]:
        inside = Inside()
        peer = Peer(Gateway(inside, SECRET), "/v1/fleet/push-messages", b"half", b"never sent")
        peer.parts.get_nowait()
        peer.parts.get_nowait()
        peer.parts.put_nowait({"type": "http.request", "body": b"half", "more_body": True})
        peer.hang_up()
        await peer.task
        return peer.said, inside.seen

    assert asyncio.run(ask()) == ([], [])


def test_no_websocket_passes() -> None:
    said: list[Any] = []

    async def ask() -> None:
        async def hear(part: Any) -> None:
            said.append(part)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await Gateway(Inside(), SECRET)({"type": "websocket", "path": PULL, "headers": []}, receive, hear)

    asyncio.run(ask())
    assert [part["type"] for part in said] == ["websocket.close"]


def holding(what: Callable[[Gateway, Inside], Awaitable[None]]) -> None:
    inside = Inside()
    gateway = Gateway(inside, SECRET)
    asyncio.run(what(gateway, inside))
    assert not gateway._held


async def settle() -> None:
    """Let everybody come to where they wait."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_held_pull_is_answered_when_its_message_comes() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        device = Peer(gateway, PULL, pulling(5), **{WAIT: "20"})
        other = Peer(gateway, PULL, pulling(6), **{WAIT: "20"})
        await settle()
        assert not device.task.done()
        inside.letters[5] = [b"letter"]
        asked = len(inside.seen)
        await Peer(gateway, PUSH, pushed(5, 7), **SHOWN).answer()
        assert await device.answer() == (200, b"letter")
        await settle()
        # The other was not even asked for: a round of few must not wake all.
        assert len(inside.seen) == asked + 2
        assert not other.task.done()
        other.hang_up()
        await other.task
        assert other.said == []

    holding(what)


def test_a_held_pull_claims_nothing_for_one_who_has_gone() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        device = Peer(gateway, PULL, pulling(5), **{WAIT: "20"})
        await settle()
        device.hang_up()
        inside.letters[5] = [b"letter"]
        await Peer(gateway, PUSH, pushed(5), **SHOWN).answer()
        await device.task
        assert (device.said, inside.letters[5]) == ([], [b"letter"])

    holding(what)


def test_a_newer_pull_takes_the_place_of_an_older() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        # Its connection was cut without a word, and it calls again.
        older = Peer(gateway, PULL, pulling(5), **{WAIT: "20"})
        await settle()
        newer = Peer(gateway, PULL, pulling(5), **{WAIT: "20"})
        await settle()
        assert await older.answer() == (200, b"")
        inside.letters[5] = [b"letter"]
        await Peer(gateway, PUSH, pushed(5), **SHOWN).answer()
        assert await newer.answer() == (200, b"letter")

    holding(what)


def test_a_stranger_ends_nobodys_pull() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        device = Peer(gateway, PULL, pulling(5), **{WAIT: "20"})
        await settle()
        inside.status = 401
        assert (await Peer(gateway, PULL, pulling(5), **{WAIT: "20"}).answer())[0] == 401
        await settle()
        assert not device.task.done()
        inside.status = 200
        device.hang_up()
        await device.task

    holding(what)


def test_a_hold_ends_with_nothing_after_its_time() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        assert await Peer(gateway, PULL, pulling(5), **{WAIT: "0.05"}).answer() == (200, b"")
        # Asked when it came, and a last time.
        assert len(inside.seen) == 2

    holding(what)


def test_what_is_no_pull_is_left_to_the_superlink() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        inside.status = 400
        path = "/v1/runtime/pull-messages"
        assert (await Peer(gateway, path, b"\xff", **{WAIT: "20"}, **SHOWN).answer())[0] == 400
        inside.letters[0] = []
        assert (await Peer(gateway, PULL, b"", **{WAIT: "20"}).answer())[0] == 400

    holding(what)


def test_a_refused_push_wakes_nobody() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        device = Peer(gateway, PULL, pulling(5), **{WAIT: "20"})
        await settle()
        inside.letters[5] = [b"letter"]
        inside.status = 500
        await Peer(gateway, PUSH, pushed(5), **SHOWN).answer()
        inside.status = 200
        await settle()
        assert not device.task.done()
        device.hang_up()
        await device.task

    holding(what)


def test_a_failure_inside_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        inside.status = 500
        for headers in ({}, {WAIT: "20"}):
            assert (await Peer(gateway, PULL, pulling(5), **headers).answer())[0] == 500

    holding(what)
    assert [record.getMessage() for record in caplog.records] == [f"the SuperLink failed: 500 at {PULL}"] * 2


def test_an_answer_wakes_the_server() -> None:
    async def what(gateway: Gateway, inside: Inside) -> None:
        server = Peer(gateway, "/v1/runtime/pull-messages", b"", **{WAIT: "20"}, **SHOWN)
        await settle()
        asked = len(inside.seen)
        await Peer(gateway, PUSH, pushed(5), **SHOWN).answer()
        await settle()
        assert len(inside.seen) == asked + 1
        await Peer(gateway, "/v1/fleet/push-messages", b"").answer()
        await settle()
        assert len(inside.seen) == asked + 3
        server.hang_up()
        await server.task

    holding(what)


def call(ground: Any, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """One request over TLS; an iterator for a body goes in chunks."""
    trusting = ssl.create_default_context(cafile=ground.folder / "ca.pem")
    with closing(
        http.client.HTTPSConnection("localhost", ground.port, timeout=PATIENCE, context=trusting)
    ) as connection:
        connection.request(method, path, body, {"content-type": "application/protobuf", **headers})
        response = connection.getresponse()
        return response.status, response.read()


def pieces(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield bytes(1 << 20)


def test_a_real_superlink_is_behind_it(ground: Any) -> None:
    assert call(ground, "GET", "/health") == (200, b"ok")
    assert call(ground, "POST", "/v1/control/list-nodes")[0] == 404
    assert call(ground, "GET", "/openapi.json")[0] == 404
    assert call(ground, "POST", "/v1/control/list-nodes", **{OPERATOR: operator_token(ground.secret)})[0] == 200
    # No signature.
    assert call(ground, "POST", "/v1/fleet/pull-messages")[0] == 401
    assert call(ground, "POST", "/v1/fleet/pull-messages", **{WAIT: "20"})[0] == 401
    assert call(ground, "POST", "/v1/fleet/pull-messages", **{WAIT: "soon"})[0] == 400
    assert call(ground, "POST", "/v1/fleet/pull-messages", b"\xff\xff", **{WAIT: "20"})[0] == 400


def test_a_strangers_large_body_is_not_kept(ground: Any) -> None:
    before = peak(ground.process.pid)
    assert call(ground, "POST", "/v1/fleet/push-messages", bytes(40 << 20))[0] == 401
    assert call(ground, "POST", "/v1/fleet/push-messages", pieces(40))[0] == 401
    assert peak(ground.process.pid) - before < 20 << 20
    assert call(ground, "GET", "/health")[0] == 200


def peak(process: int) -> int:
    """The most memory it ever held, in bytes."""
    said = Path(f"/proc/{process}/status")
    if not said.exists():
        pytest.skip("no /proc here")
    (line,) = [line for line in said.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_raw_nonsense_does_not_end_it(ground: Any) -> None:
    trusting = ssl.create_default_context(cafile=ground.folder / "ca.pem")
    for sent in (
        b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST /v1/fleet/push-messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x00\xff nonsense\r\n\r\n",
    ):
        with (
            socket.create_connection(("localhost", ground.port), timeout=PATIENCE) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(sent)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert call(ground, "GET", "/health")[0] == 200


def test_it_ends_with_its_parent(own_ground: Any) -> None:
    own_ground.start(tls=False)
    own_ground.process.stdin.close()
    assert own_ground.process.wait(300) == 0
    assert own_ground.process.stderr.read() == b""
    own_ground.process.stderr.close()
    own_ground.process = None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_quietly_when_told(own_ground: Any, number: signal.Signals) -> None:
    own_ground.start(tls=False)
    own_ground.process.send_signal(number)
    _, said = own_ground.process.communicate(timeout=PATIENCE)
    # It may be told before it is ready, while it still imports.
    assert (said, own_ground.process.returncode in (0, 130, -number)) == (b"", True)
    own_ground.process = None


def test_a_port_that_is_taken_is_said(ground: Any) -> None:
    command = [sys.executable, "-m", "homebody.federation.flower.superlink", "--port", str(ground.port)]
    done = subprocess.run(
        [*command, "--secret", ground.folder / "secret"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"homebody: The service cannot listen on 127.0.0.1:{ground.port}: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--host", "0.0.0.0"], "which others can reach, only with a certificate"),
        (["--host", "server.lan"], "which others can reach, only with a certificate"),
        (["--cert", "server.pem"], "--cert and --key go together"),
        (["--cert", "missing.pem", "--key", "server.key"], "There is no file missing.pem"),
        (["--secret", "short"], "it takes at least 16"),
    ],
)
def test_what_cannot_be_is_said(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("secret").write_bytes(SECRET)
    Path("short").write_bytes(b"short")
    with pytest.raises(SystemExit) as ended:
        main(["--port", "0", "--secret", "secret", *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err

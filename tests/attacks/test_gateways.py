"""Strangers who hold connections and say nothing, or little: whoever has something to say is served all the same.

Every socket of ours is guarded by the same code. The devices' gateway is attacked as a real process with few files to
its name, the others by way of their common server.
"""

from __future__ import annotations

import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import PATIENCE, wait_until

import homebody
from homebody.federation.flower.link import Fleet, Link, LinkDown, Refused
from homebody.federation.service import guard, web
from homebody.federation.service.certificates import make_authority, make_device_key

# Loopback has 2²⁴ addresses: these are the strangers', and ours is 127.0.0.1.
STRANGERS = [f"127.0.1.{number}" for number in range(1, 6)]
FILES = 400
"""That the gateway may have open: 1,024 is usual, and a test is quicker with fewer."""


class Gateway:
    """The link in a process of its own, over TLS."""

    def __init__(self, folder: Path, files: int) -> None:
        self.folder = folder
        make_authority(folder)
        self.ca, self.secret = (folder / "ca.pem").read_bytes(), (folder / "secret").read_bytes()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.port = int(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "homebody.federation.flower.superlink",
            "--port",
            str(self.port),
            "--follow-parent",
        ]
        command += ["--secret", str(folder / "secret")]
        command += ["--cert", str(folder / "server.pem"), "--key", str(folder / "server.key")]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )
        wait_until(lambda: self.answers() or self.process.poll() is not None, "it answers")
        assert self.process.poll() is None

    def answers(self) -> bool:
        """Whether it says that it is well."""
        try:
            with closing(tls(self.port, "127.0.0.1", timeout=20)) as asking:  # it is asked again
                asking.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return asking.recv(100).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def held(self) -> int:
        """How many connections it has."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == self.port for one in found)

    def serves(self, rounds: int, link: Link, fleet: Fleet, node: int) -> None:
        """A letter goes to a device and its answer comes back, over connections that may have to be made anew."""
        for number in range(rounds):
            body = b"%d" % number
            wait_until(lambda body=body: self._once(link, fleet, node, body), "a letter is answered")

    def _once(self, link: Link, fleet: Fleet, node: int, body: bytes) -> bool:
        try:
            (message,) = link.send({node: ("query", body)}, PATIENCE)
            letter = fleet.pull(PATIENCE)
            assert letter is not None
            assert letter.body == body
            fleet.answer(letter, body[::-1])
            (reply,) = link.receive({message}, PATIENCE)
            return reply.body == body[::-1]
        except LinkDown:
            return False

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def plain(port: int, source: str, timeout: float = PATIENCE) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout, source_address=(source, 0))


def context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


TLS = context()


def tls(port: int, source: str, timeout: float = PATIENCE) -> socket.socket:
    return TLS.wrap_socket(plain(port, source, timeout), server_hostname="localhost")


def half(port: int, source: str) -> socket.socket:
    """The beginning of a greeting."""
    connection = plain(port, source)
    connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    return connection


def slow(port: int, source: str) -> socket.socket:
    """The beginning of a request."""
    connection = tls(port, source)
    connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\nx-a: ")
    return connection


def promising(port: int, source: str) -> socket.socket:
    """A request whose body does not come."""
    connection = tls(port, source)
    connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\nx")
    return connection


KINDS: dict[str, Callable[[int, str], socket.socket]] = {
    "connected": plain,
    "half TLS": half,
    "idle TLS": tls,
    "slow head": slow,
    "no body": promising,
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    made = Gateway(tmp_path_factory.mktemp("gateway"), FILES)
    yield made
    made.end()


@contextmanager
def household(gateway: Gateway, name: str) -> Iterator[tuple[Link, Fleet, int]]:
    public = make_device_key(gateway.folder / name)
    with (
        Link(f"localhost:{gateway.port}", ca=gateway.ca, secret=gateway.secret) as link,
        Fleet(f"localhost:{gateway.port}", ca=gateway.ca, key=public.with_suffix(".key").read_bytes()) as fleet,
    ):
        link.register(public.read_bytes(), name)
        link.open()
        yield link, fleet, fleet.join()


def opened(stack: ExitStack, kind: str, port: int, count: int) -> int:
    """How many of so many connections could be opened."""
    found = 0
    for number in range(count):
        with suppress(OSError):
            stack.enter_context(closing(KINDS[kind](port, STRANGERS[number % len(STRANGERS)])))
            found += 1
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_do_not_hold_the_door_shut(gateway: Gateway, kind: str) -> None:
    """More connections than the process may have files: a device that joins meanwhile is served."""
    with ExitStack() as stack:
        held = opened(stack, kind, gateway.port, FILES + 50)
        with household(gateway, f"device {kind}".replace(" ", "-")) as known:
            gateway.serves(2, *known)
        assert held > 100


def test_one_address_takes_no_more_than_its_share(gateway: Gateway) -> None:
    """All from the address that the device has, too: the oldest give way to whoever comes.

    Somebody who has just been hung up on may still be seen for a moment: so 85 of 100, for a limit of 64.
    """
    before, most = gateway.held(), 0
    with ExitStack() as stack:
        for _ in range(100):
            with suppress(OSError):
                stack.enter_context(closing(tls(gateway.port, "127.0.0.1")))
            most = max(most, gateway.held() - before)
        assert 30 < most < 85
        with household(gateway, "neighbour") as known:
            gateway.serves(2, *known)


def test_a_device_keeps_its_connections_while_strangers_come_and_go(gateway: Gateway) -> None:
    with household(gateway, "steady") as (link, fleet, node), ExitStack() as stack:
        gateway.serves(1, link, fleet, node)
        opened(stack, "connected", gateway.port, FILES)
        # Not once is a connection lost that has proved its key.
        for number in range(3):
            assert gateway._once(link, fleet, node, b"%d" % number)


def test_one_key_on_two_devices_answers_each_letter_once_and_harms_nobody_else(gateway: Gateway) -> None:
    """A copied folder: both are the same node, and whoever joins takes the other's place."""
    public = make_device_key(gateway.folder / "twin")
    key, ended = public.with_suffix(".key").read_bytes(), threading.Event()
    answered: Counter[int] = Counter()
    with household(gateway, "bystander") as (link, fleet, node):
        link.register(public.read_bytes(), "twin")

        def live(who: int, known: list[int]) -> None:
            own = Fleet(f"localhost:{gateway.port}", ca=gateway.ca, key=key, last_node=known[0] if known else None)
            joined = False
            while not ended.is_set():
                try:
                    if not joined:
                        known[:] = [own.join()]
                        joined = True
                    letter = own.pull(1)
                    if letter is not None and own.answer(letter, b"%d" % who):
                        answered[who] += 1
                except (LinkDown, Refused):
                    joined = False
                    time.sleep(0.05)
            own.close()

        known: list[int] = []
        twins = [threading.Thread(target=live, args=(who, known)) for who in (1, 2)]
        for one in twins:
            one.start()
        try:
            wait_until(lambda: len(link.nodes()) == 2, "both are there")
            (twin,) = set(link.nodes().values()) - {node}
            replies: Counter[str] = Counter()
            for _ in range(10):
                sent = link.send({twin: ("query", b"who?")}, 30)
                end = time.monotonic() + 30
                while not replies.keys() & sent.keys() and time.monotonic() < end:
                    replies.update(reply.message for reply in link.receive(set(sent), 1))
                for _ in range(2):
                    replies.update(reply.message for reply in link.receive(set(sent), 0.1))
                gateway.serves(1, link, fleet, node)
            assert len(replies) >= 5
            assert set(replies.values()) == {1}
        finally:
            ended.set()
            for one in twins:
                one.join(300)


@pytest.mark.attack
def test_many_strangers_of_every_kind(tmp_path: Path, campaign: Any) -> None:
    """As many files as a process usually has, and twenty times as many connections; devices are served throughout."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    gateway = Gateway(tmp_path / "gateway", 1024)
    try:
        for kind in KINDS:
            count, outcome, ended = campaign.size(4000), Counter[str](), threading.Event()

            def flood(kind: str = kind, count: int = count, outcome: Counter[str] = outcome) -> None:
                held: list[socket.socket] = []
                for number in range(count):
                    try:
                        held.append(KINDS[kind](gateway.port, STRANGERS[number % len(STRANGERS)]))
                        outcome["opened"] += 1
                    except OSError:
                        outcome["hung_up_on"] += 1
                    if len(held) > 2000:
                        held.pop(0).close()
                for one in held:
                    one.close()

            def flooding(flood: Callable[[], None] = flood, ended: threading.Event = ended) -> None:
                flood()
                ended.set()

            thread = threading.Thread(target=flooding)
            thread.start()
            served = 0
            with household(gateway, kind.replace(" ", "-")) as known:
                while not ended.is_set() or served < 3:
                    gateway.serves(1, *known)
                    served += 1
            thread.join()
            campaign.did(f"strangers at the gateway: {kind}", count, **outcome, served=served)
    finally:
        gateway.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def served(app: Any, folder: Path | None = None, **settings: Any) -> Iterator[tuple[int, Counter[str]]]:
    """An app on a socket of ours."""
    counted: Counter[str] = Counter()
    keys = {} if folder is None else {"cert": folder / "server.pem", "key": folder / "server.key"}
    listening = web.listen("127.0.0.1", 0)
    server = web.server(app, listening, counted=lambda reason: counted.update([reason]), **keys, **settings)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield int(listening.getsockname()[1]), counted
    finally:
        server.should_exit = True
        thread.join(300)
        assert not thread.is_alive()


async def large(scope: Any, receive: Any, send: Any) -> None:
    """Answers with 50 MB, whatever is asked; whoever says a key has proved it."""
    if scope["type"] == "lifespan":
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
        return
    key = dict(scope["headers"]).get(b"key")
    if key:
        guard.connection_of(scope).proved(key)  # type: ignore[union-attr]
    body = bytes(50_000_000 if scope["path"] == "/large" else 2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def asked(connection: socket.socket, path: str = "/", key: str = "") -> bytes:
    """An answer, as far as its first two bytes; empty where the connection is gone."""
    found = b""
    try:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nkey: {key}\r\n\r\n".encode())
        while len(found.partition(b"\r\n\r\n")[2]) < 2:
            if not (piece := connection.recv(1000)):
                return b""
            found += piece
    except OSError:
        return b""
    return found


def test_who_has_proved_a_key_is_limited_by_it_and_not_by_the_address() -> None:
    limits = web.Limits(in_all=50, of_an_address=4, of_a_key=2)
    with served(large, limits=limits) as (port, counted), ExitStack() as stack:

        def connect(key: str = "") -> socket.socket:
            made: socket.socket = stack.enter_context(closing(plain(port, "127.0.0.1")))
            if key:
                assert asked(made, key=key).startswith(b"HTTP/1.1 200")
            return made

        known = {key: [connect(key) for _ in range(2)] for key in "abcdef"}
        idle = [connect() for _ in range(20)]
        wait_until(lambda: counted["too many connections"] == 16, "they are counted")
        assert all(asked(one, key=key) for key, own in known.items() for one in own)
        third = connect("a")
        wait_until(lambda: counted["too many connections"] >= 17, "they are counted")
        assert [bool(asked(one, key="a")) for one in (*known["a"], third)].count(True) == 2
        assert len(idle) == 20


def test_where_all_are_known_a_new_connection_waits(tmp_path: Path) -> None:
    limits = web.Limits(in_all=16, of_an_address=4, of_a_key=2)
    with served(large, limits=limits) as (port, counted), ExitStack() as stack:
        for number in range(16):
            one = stack.enter_context(closing(plain(port, "127.0.0.1")))
            assert asked(one, key=f"key {number}")
        other = stack.enter_context(closing(plain(port, "127.0.0.1")))
        assert not asked(other)
        assert counted == {"too many connections": 1}


def test_tls_that_is_begun_and_not_gone_on_with_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_HEAD_SECONDS", 0.5)
    make_authority(tmp_path / "keys")
    with served(large, tmp_path / "keys") as (port, _):
        for kind in ("connected", "half TLS", "idle TLS", "slow head"):
            with closing(KINDS[kind](port, "127.0.0.1")) as connection, suppress(ConnectionError, ssl.SSLError):
                assert connection.recv(100) == b""
        with closing(tls(port, "127.0.0.1")) as connection:
            assert asked(connection).startswith(b"HTTP/1.1 200")


def test_who_does_not_read_its_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_STUCK_SECONDS", 0.3)
    with served(large) as (port, counted):
        with closing(plain(port, "127.0.0.1")) as connection:
            assert asked(connection, "/large").startswith(b"HTTP/1.1 200")
            wait_until(lambda: counted["too slow"] == 1, "it is counted")
        with closing(plain(port, "127.0.0.1")) as connection:
            got = len(asked(connection, "/large"))
            while got < 50_000_000:  # slowly, but it goes on
                got += len(connection.recv(4_000_000))
        assert counted == {"too slow": 1}


def test_every_socket_of_ours_is_behind_the_guard() -> None:
    """Whoever listens does it by way of `homebody.federation.service.web`, but for a device: its apps are local.

    The device's desk knows them by the user that the system states and by a token.
    """
    listening = re.compile(
        r"create_server|HTTPServer|start_server|uvicorn\.(Server|Config|run)\(|(?<!\basked)\.bind\(|(?<!\bweb)\.listen\("
    )
    folder = Path(homebody.__file__).parent
    found = {str(file.relative_to(folder)) for file in folder.rglob("*.py") if listening.search(file.read_text())}
    assert found == {"federation/service/web.py", "federation/device/desk.py"}
    assert "AF_UNIX" in (folder / "federation/device/desk.py").read_text()

"""A proxy, devices that report to it, and a next hop that keeps what comes."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.processes import PATIENCE, free_port, wait_until

from homebody.federation.envelopes import REPORT_BYTES, Envelope, open_envelope, sign_envelope, signing_keys
from homebody.federation.proxy.admin import make
from homebody.federation.proxy.app import Proxy
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender, VerifiedMessage

EPOCH = bytes(range(16))


def reports(count: int) -> bytes:
    """As good as sealed: nobody on the way can tell."""
    return os.urandom(count * REPORT_BYTES)


def split(sealed: bytes) -> list[bytes]:
    return [sealed[at : at + REPORT_BYTES] for at in range(0, len(sealed), REPORT_BYTES)]


class Device:
    """Someone who signs."""

    def __init__(self, people: int = 1) -> None:
        self.key, self.secret = signing_keys()
        self.sender = Sender(False, people)

    def file(self, folder: Path) -> Path:
        path = folder / f"{self.key.hex()[:12]}.pub"
        path.write_text(f"homebody-reports {self.key.hex()}\n")
        return path

    def envelope(self, sealed: bytes, *, epoch: bytes = EPOCH, number: bytes | None = None) -> Envelope:
        kind = "batch" if self.sender.proxy else "message"
        return Envelope(kind, epoch, number or os.urandom(16), sealed)  # type: ignore[arg-type]

    def message(self, sealed: bytes, **rest: Any) -> VerifiedMessage:
        return VerifiedMessage(self.key, self.sender, self.envelope(sealed, **rest))

    def body(self, sealed: bytes, **rest: Any) -> bytes:
        return sign_envelope(self.envelope(sealed, **rest), self.secret)


class Upstream(Device):
    """A proxy that comes before."""

    def __init__(self, devices: int = 0) -> None:
        super().__init__()
        self.sender = Sender(True, devices)


def facts(closes: float, k: int = 10, epoch: bytes = EPOCH) -> dict[str, Any]:
    """What the next hop says of an epoch."""
    return {
        "epoch": epoch.hex(),
        "key": "ab" * 32,
        "shared": "model 1",
        "k": k,
        "entries": 100,
        "among": 1,
        "closes": closes,
    }


class Sink:
    """The next hop: it keeps each batch once, and answers as it is told."""

    def __init__(self) -> None:
        self.k, self.closes = 10, time.time() + 3600
        self.status = 200
        """What batches are answered; each is kept if that is below 300."""
        self.epoch_status = 200
        self.known: bytes | None = None
        """The only epoch there is, if not all; questions about others are answered once `slow` is set."""
        self.slow = threading.Event()
        self.slow.set()
        self.cut = 0.0
        """The share of answers that are lost on their way."""
        self.asked: Counter[str] = Counter()
        self.batches: dict[bytes, bytes] = {}
        self.senders: set[bytes] = set()
        self._lock = threading.Lock()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with sink._lock:
                    sink.asked["epoch"] += 1
                epoch = bytes.fromhex(self.path.rpartition("/")[2])
                stranger = sink.known is not None and epoch != sink.known
                if stranger:
                    sink.slow.wait(PATIENCE)
                self.answer(404 if stranger else sink.epoch_status, facts(sink.closes, sink.k, epoch))

            def do_POST(self) -> None:
                sender, envelope = open_envelope(self.rfile.read(int(self.headers["content-length"])))
                status = sink.status
                with sink._lock:
                    sink.asked["batch"] += 1
                    sink.senders.add(sender)
                    if status < 300:
                        sink.batches.setdefault(envelope.number, envelope.reports)
                if os.urandom(1)[0] < 256 * sink.cut:
                    self.close_connection = True
                    return
                self.answer(status, {"accepted": envelope.size, "refused": {}})

            def answer(self, status: int, said: dict[str, Any]) -> None:
                text = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None: ...

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def came(self) -> list[bytes]:
        """Every report that arrived, as often as it did."""
        with self._lock:
            return [report for batch in self.batches.values() for report in split(batch)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def sink() -> Iterator[Sink]:
    sink = Sink()
    yield sink
    sink.close()


@pytest.fixture
def made(tmp_path: Path, sink: Sink) -> Callable[..., tuple[Path, ProxySettings]]:
    """Make a proxy before the sink, with these settings and devices."""

    def made(*devices: Device, name: str = "proxy", **settings: Any) -> tuple[Path, ProxySettings]:
        given = {
            "next": sink.url,
            "tls": False,
            "hold": 0.0,
            "least_devices": 1,
            "listen": f"127.0.0.1:{free_port()}",
            **settings,
        }
        chosen = ProxySettings(**given)
        make(tmp_path / name, chosen)
        store = ProxyStore(tmp_path / name, chosen)
        with store.transaction():
            for device in devices:
                store.allow(device.key, device.sender)
        store.close()
        return tmp_path / name, chosen

    return made


class Client:
    """Someone who asks a proxy that runs in a thread of this process, without a network."""

    def __init__(self, folder: Path, settings: ProxySettings, **rest: Any) -> None:
        self.service = Proxy(folder, settings, **rest)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._life = self.service.app.router.lifespan_context(self.service.app)
        self._wait(self._life.__aenter__())

    def close(self) -> None:
        if not self._loop.is_closed():
            self._wait(self._life.__aexit__(None, None, None))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _wait(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(PATIENCE)

    def ask(self, method: str, path: str, body: bytes | list[bytes] = b"", address: str = "127.0.0.1") -> Any:
        """What is answered; an exception of the app's is raised here. A body of several parts comes in chunks."""
        return self.begin(method, path, body, address).result(PATIENCE)

    def begin(self, method: str, path: str, body: bytes | list[bytes] = b"", address: str = "127.0.0.1") -> Future[Any]:

        async def parts() -> AsyncIterator[bytes]:
            for part in body:
                assert isinstance(part, bytes)
                yield part

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.service.app, client=(address, 4711))
            async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
                return await http.request(method, path, content=body if isinstance(body, bytes) else parts())

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def send(self, body: bytes, path: str = "/v1/reports") -> Any:
        return self.ask("POST", path, body)

    def counts(self) -> dict[str, int]:
        lines = [line.rsplit(" ", 1) for line in self.ask("GET", "/metrics").text.splitlines() if line[0] != "#"]
        return {name.removeprefix("homebody_proxy_"): int(amount) for name, amount in lines}

    def refused(self, reason: str, times: int) -> bool:
        """Whether something was refused for this so often, once the counts are written."""
        name = f'refused_total{{reason="{reason}"}}'
        wait_until(lambda: self.counts().get(name, 0) >= times, f"{reason} is counted")
        return self.counts()[name] == times


@pytest.fixture
def asking() -> Iterator[Callable[..., Client]]:
    """Run a proxy in this process; it ends with the test."""
    running: list[Client] = []

    def asking(folder: Path, settings: ProxySettings, **rest: Any) -> Client:
        running.append(Client(folder, settings, **rest))
        return running[-1]

    yield asking
    for one in running:
        one.close()


class Process:
    """`homebody proxy run`, as a person starts it; popen starts a process, as `subprocess.Popen` does."""

    def __init__(
        self, folder: Path, settings: ProxySettings, popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        self.folder, self.port, self._popen = folder, settings.port, popen
        self.log = folder.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        command = [sys.executable, "-P", "-c", "from homebody.cli import main; main()", "proxy", "run"]
        with self.log.open("ab") as log:
            self.process = self._popen([*command, str(self.folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, f"the proxy listens: {self.log.read_text()}")
        return self

    def _answers(self) -> bool:
        assert self.process
        assert self.process.poll() is None, self.log.read_text()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            return True
        return False

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> int:
        """Tell it to; how it ended."""
        assert self.process
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        self.process = None
        return code


@pytest.fixture
def started() -> Iterator[Callable[..., Process]]:
    """Start a proxy as a process; it ends with the test."""
    running: list[Process] = []

    def started(folder: Path, settings: ProxySettings, **rest: Any) -> Process:
        running.append(Process(folder, settings, **rest))
        return running[-1].start()

    yield started
    for one in running:
        if one.process:
            one.kill()


class Load:
    """Devices that send at the same time, each message until it is acknowledged, whatever happens to the proxy."""

    def __init__(self, port: int, devices: list[Device], size: int = 20) -> None:
        self._port, self._size = port, size
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.accepted: list[bytes] = []
        """Reports that were acknowledged."""
        self.answers: Counter[int] = Counter()
        self._threads = [threading.Thread(target=self._send, args=(device,), daemon=True) for device in devices]
        for thread in self._threads:
            thread.start()

    def _send(self, device: Device) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        while not self._stop.is_set():
            sealed = reports(self._size)
            body = device.body(sealed)
            while (status := self._status(connection, body)) != 200:
                time.sleep(0.02)
                assert status in (0, 429, 503), status
            with self._lock:
                self.accepted += split(sealed)
        connection.close()

    def _status(self, connection: http.client.HTTPConnection, body: bytes) -> int:
        try:
            connection.request("POST", "/v1/reports", body)
            answer = connection.getresponse()
            answer.read()
            status = answer.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        with self._lock:
            self.answers[status] += 1
        return status

    def stop(self) -> list[bytes]:
        """Send no more; what was acknowledged, once the last has been."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return sorted(self.accepted)

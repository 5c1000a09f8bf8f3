"""A hundred thousand malformed requests for every socket that Homebody listens on, while a federation trains.

The sockets are the link behind the devices' door, the server's /metrics and /health, the intake of reports, and the
proxy. (A proxy and a server are administered from the command line, not over a socket.) Requests are malformed on every
layer: TCP, TLS, HTTP, signatures, envelopes and protobuf. No process may die, answer with an accident, or keep files
or memory; and the federation must go on.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.attacks.conftest import Campaign
from tests.federation.proxy.conftest import Device, Upstream, reports
from tests.federation.world import World
from tests.processes import PATIENCE, free_port, wait_until

from homebody.data import Population
from homebody.federation.flower.fleet import Fleet
from homebody.federation.flower.protocol import fingerprint
from homebody.federation.proxy import admin as proxy_admin
from homebody.federation.server.admin import opened
from homebody.federation.service.certificates import make_device_key, read_public
from homebody.recipe import Recipe

FOUR = 4
"""Threads that send at the same time."""
METHODS = [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE", b"BREW", b"", b"\0"]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/9999", b"http", b""]
LENGTHS = [b"-1", b"", b"7", b"1e3", b"0x10", b"18446744073709551616", b"9" * 40, b" 3", b"3, 3", b"+3", b"\xb2"]
HEADERS = [
    b"transfer-encoding: chunked\r\n",
    b"transfer-encoding: chunked, identity\r\ncontent-length: 5\r\n",
    b"transfer-encoding: \x0bchunked\r\n",
    b"expect: 100-continue\r\n",
    b"content-encoding: gzip\r\n",
    b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\nsec-websocket-version: 13\r\n",
    b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n",
    b"host: \r\n",
    b"host: a\r\nhost: b\r\n",
    b"x-forwarded-for: 127.0.0.1\r\n",
    b"homebody-wait: nan\r\n",
    b"homebody-wait: 1e999\r\n",
    b"homebody-operator: x\r\n",
    b"range: bytes=0-,0-,0-\r\n",
    b"no colon\r\n",
    b": empty\r\n",
    b" folded\r\n",
    b"x: \x00\x01\xff\r\n",
    b"x: " + b"y" * 20_000 + b"\r\n",
    b"".join(b"x%d: y\r\n" % n for n in range(300)),
    b"\n\n",
]


@dataclass(frozen=True)
class Target:
    """A socket, and what one who knows it would send there."""

    name: str
    port: int
    pid: Callable[[], int | None]
    tls: bool
    paths: list[bytes]
    body: Callable[[np.random.Generator], tuple[bytes, bytes]]
    """Headers and a body, well-formed or nearly so."""


class Sender:
    """Sends mutated requests from one thread."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.rng, self.outcomes = target, np.random.default_rng(seed), Counter[str]()
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self._line: socket.socket | None = None

    def send(self, count: int) -> None:
        for _ in range(count):
            try:
                self._one()
            except (OSError, ssl.SSLError):
                self.outcomes["hung_up_on"] += 1
                self._close()
        self._close()

    def _any(self, options: list[bytes]) -> bytes:
        return options[int(self.rng.integers(len(options)))]

    def _one(self) -> None:
        if self.rng.random() < 0.03:
            self._below_http()
            return
        raw, whole = self._request()
        line = self._opened()
        line.sendall(raw)
        line.settimeout(PATIENCE if whole else 0.02)
        status, stays = self._status(line)
        if status:
            self.outcomes[f"{status // 100}xx"] += 1
            if status >= 500:
                self.outcomes[f"accident_{status}"] += 1
        else:
            self.outcomes["no_answer"] += 1
        if not (whole and stays and status):
            self._close()

    def _below_http(self) -> None:
        """Hang up at once, send noise, or speak the wrong protocol."""
        self._close()
        line = socket.create_connection(("127.0.0.1", self.target.port), timeout=PATIENCE)
        kind = self.rng.integers(4)
        if kind == 1:
            line.sendall(self.rng.bytes(int(self.rng.integers(1, 300))))
        elif kind == 2:
            line.sendall(
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.rng.bytes(int(self.rng.integers(0, 500)))
            )
        elif kind == 3:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # a reset instead of a farewell
            line.sendall(b"GET /health HTTP/1.1\r\n")
        line.close()
        self.outcomes["below_http"] += 1

    def _opened(self) -> socket.socket:
        if self._line is None:
            line = socket.create_connection(("127.0.0.1", self.target.port), timeout=PATIENCE)
            try:
                self._line = self._context.wrap_socket(line, server_hostname="localhost") if self.target.tls else line
            except BaseException:
                line.close()
                raise
        return self._line

    def _close(self) -> None:
        if self._line is not None:
            with suppress(OSError):
                self._line.close()
            self._line = None

    def _request(self) -> tuple[bytes, bool]:
        """The bytes, and whether a whole request is there that must be answered, or refused by hanging up."""
        rng = self.rng
        headers, body = self.target.body(rng)
        method = self._any([b"GET", b"POST"]) if rng.random() < 0.8 else self._any(METHODS)
        path = self._any(self.target.paths)
        if rng.random() < 0.1:
            path = self._any(
                [b"*", b"//", b"/%00", b"/../../etc/passwd", b"http://x/", b"/" + b"a" * 9000, b"/\xff", b""]
            )
        version = b"HTTP/1.1" if rng.random() < 0.9 else self._any(VERSIONS)
        honest = rng.random() < 0.85
        length = str(len(body)).encode() if honest else self._any(LENGTHS)
        extra = b"".join(self._any(HEADERS) for _ in range(int(rng.integers(1, 4)))) if rng.random() < 0.25 else b""
        head = b"%s %s %s\r\nhost: x\r\ncontent-length: %s\r\n" % (method, path, version, length)
        raw = head + headers + extra + b"\r\n" + body
        if rng.random() < 0.15:
            return self._bytes(raw), False
        # After HEAD no body comes, whatever its length; after CONNECT or another version nothing more is read.
        usual = version == b"HTTP/1.1" and method not in (b"HEAD", b"CONNECT")
        return raw, honest and usual and not extra

    def _bytes(self, raw: bytes) -> bytes:
        for _ in range(int(self.rng.integers(1, 4))):
            at, kind = int(self.rng.integers(0, len(raw) or 1)), self.rng.integers(4)
            if kind == 0:
                raw = raw[:at] + self.rng.bytes(1) + raw[at + 1 :]
            elif kind == 1:
                raw = raw[:at]
            elif kind == 2:
                raw = raw[:at] + self.rng.bytes(int(self.rng.integers(1, 40))) + raw[at:]
            else:
                raw = raw[at:] + raw[:at]
        return raw

    def _status(self, line: socket.socket) -> tuple[int, bool]:
        """What was answered (0: nothing), and whether the connection may be used again."""
        said = b""
        try:
            while b"\r\n\r\n" not in said:
                piece = line.recv(65536)
                if not piece:
                    return 0, False
                said += piece
            head, _, body = said.partition(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            low = head.lower() + b"\r\n"
            length = low.partition(b"content-length: ")[2].partition(b"\r\n")[0]
            stays = length.isdigit() and b"connection: close" not in low and b" 1.0 " not in head[:12]
            while stays and len(body) < int(length):
                piece = line.recv(65536)
                stays, body = bool(piece), body + piece
            return status, stays and len(body) == int(length)
        except (TimeoutError, ValueError, IndexError):
            return (0, False) if not said.startswith(b"HTTP/") else (int(said[9:12]), False)


def spoilt(rng: np.random.Generator, body: bytes) -> bytes:
    if rng.random() < 0.5 or not body:
        return body
    at = int(rng.integers(len(body)))
    return [body[:at], body[:at] + rng.bytes(1) + body[at + 1 :], body + rng.bytes(9), b"", body[at:]][rng.integers(5)]


def targets(federation: World, folder: Path) -> list[Target]:
    """The four sockets of a federation, each with what a registered sender there could send."""
    from flwr.proto import fleet_pb2 as fleet
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node

    key = folder / "stolen"
    key.mkdir()
    public = read_public(make_device_key(key))
    with opened(federation.server) as (plan, records):
        records.add_device(fingerprint(public), public, "stolen", 1)
        metrics = int(plan.metrics.rpartition(":")[2])
    known, stranger, upstream = Device(), Device(), Upstream()
    assert federation.proxy is not None
    proxy_admin.allow(federation.proxy, [known.file(folder)], people=1)
    stolen = Fleet("127.0.0.1:1", ca=None, key=(key / "device.key").read_bytes())
    signed: list[tuple[float, bytes]] = [(0.0, b"")]

    def signature() -> bytes:
        if time.monotonic() - signed[0][0] > 60:
            lines = "".join(f"{name}: {value}\r\n" for name, value in stolen._signed().items())
            signed[0] = (time.monotonic(), lines.encode())
        return signed[0][1]

    def envelope(rng: np.random.Generator) -> tuple[bytes, bytes]:
        whose = [known, stranger, upstream][rng.integers(3)]
        return b"", spoilt(rng, whose.body(reports(int(rng.integers(0, 4))), epoch=rng.bytes(16)))

    def letter(rng: np.random.Generator) -> tuple[bytes, bytes]:
        node = Node(node_id=int(rng.integers(0, 2**63)))
        request = [
            fleet.PullMessagesRequest(node=node),
            fleet.PushMessagesRequest(node=node),
            fleet.ActivateNodeRequest(public_key=public, heartbeat_interval=float(rng.normal(0, 100))),
            fleet.DeactivateNodeRequest(node_id=node.node_id),
            SendNodeHeartbeatRequest(node=node),
        ][rng.integers(5)]
        headers = signature() if rng.random() < 0.5 else b""
        kind = b"content-type: application/protobuf\r\n" if rng.random() < 0.8 else b""
        return headers + kind, spoilt(rng, request.SerializeToString())

    def nothing(rng: np.random.Generator) -> tuple[bytes, bytes]:
        return b"", rng.bytes(int(rng.integers(0, 30))) if rng.random() < 0.1 else b""

    fleet_paths = [
        *(b"/v1/fleet/pull-messages", b"/v1/fleet/push-messages", b"/v1/fleet/activate-node", b"/health"),
        *(b"/v1/fleet/deactivate-node", b"/v1/fleet/send-node-heartbeat", b"/v1/fleet/register-node", b"/docs"),
        *(b"/v1/runtime/push-messages", b"/v1/control/list-runs", b"/openapi.json", b"/"),
    ]
    report_paths = [
        b"/v1/reports",
        b"/v1/batches",
        b"/v1/epochs/" + b"ab" * 16,
        b"/v1/epochs/",
        b"/health",
        b"/metrics",
    ]
    proxy = federation.processes["proxy"].pid
    return [
        Target("the devices' door", federation.port, federation.link, True, fleet_paths, letter),
        Target("the intake", federation.intake_port, federation.intake, True, report_paths, envelope),
        Target("the proxy", federation.proxy_port, lambda: proxy, True, report_paths, envelope),
        Target(
            "/metrics and /health",
            metrics,
            federation.trainer,
            False,
            [b"/metrics", b"/health", b"/health?x", b"/", b"/metrics/"],
            nothing,
        ),
    ]


def health(target: Target) -> bool:
    sender = Sender(target, 0)
    with suppress(OSError):
        line = sender._opened()
        line.settimeout(5)
        line.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        status, _ = sender._status(line)
        sender._close()
        return status == 200
    sender._close()
    return False


def attack(target: Target, count: int) -> Counter[str]:
    """Send so many requests to one socket; what came back."""
    pid = target.pid()
    assert pid is not None
    files = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    senders = [Sender(target, seed) for seed in range(FOUR)]
    threads = [threading.Thread(target=one.send, args=(-(-count // FOUR),)) for one in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcomes = sum((one.outcomes for one in senders), Counter[str]())
    assert target.pid() == pid, f"The process of {target.name} died."
    wait_until(lambda: health(target), f"{target.name} answers")
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < files + 60, f"{target.name} lets go of files")  # noqa: PTH208
    accidents = {name: number for name, number in outcomes.items() if name.startswith("accident")}
    assert not accidents, (target.name, accidents)
    return outcomes


def memory(federation: World) -> dict[int, float]:
    """Megabytes of every process of a federation."""
    children = (federation.trainer(), federation.link(), federation.intake())
    return {pid: _memory(pid) for pid in (*(one.pid for one in federation.processes.values()), *children) if pid}


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


@pytest.mark.attack
def test_a_hundred_thousand_requests_for_each_socket(
    few: Population,
    world: Callable[..., World],
    campaign: Campaign,
    tmp_path: Path,
) -> None:
    count = campaign.size(100_000)
    stages = ["one-bit:epsilon=0.1,k=2", "shuffle"]  # quick to account for
    recipe = Recipe("fedmf", "devices", rounds=100_000, seed=4, evaluate_every=0, stages=stages)
    federation = world(few, 2, recipe, shuffling={"least_devices": 2}, least=8, metrics=f"127.0.0.1:{free_port()}")
    federation.start("proxy")
    sockets = targets(federation, tmp_path)  # the device that was stolen is registered before the server starts
    federation.start("server", *(device.name for device in federation.devices))
    wait_until(lambda: federation.said("server", "round") >= 2, "training begins", 600)
    for target in sockets:
        wait_until(lambda target=target: health(target), f"{target.name} answers", 60)
        before = memory(federation)
        outcomes = attack(target, count)
        grown = {pid: after - before[pid] for pid, after in memory(federation).items()}
        assert max(grown.values()) < 300, f"Megabytes more after {target.name}: {grown}."
        campaign.did(f"requests to {target.name}", sum(outcomes.values()), **dict(sorted(outcomes.items())))
        done = federation.said("server", "round")
        wait_until(lambda done=done: federation.said("server", "round") > done + 1, "training goes on", 600)
    for name in ("server", "proxy", "device0", "device1"):
        assert "Traceback" not in (federation.folder / f"{name}.log").read_text()
    assert federation.said("server", "trainer ended") == federation.said("server", "intake ended") == 0

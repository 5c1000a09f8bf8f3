"""Whatever is sent to a proxy: a 4xx or a 200, never a 5xx, and nothing is kept that was not accepted."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.federation.proxy.conftest import EPOCH, Client, Device, Process, Sink, Upstream, reports
from tests.processes import PATIENCE, free_port

from homebody.federation.envelopes import HEAD_BYTES, SIGNATURE_BYTES
from homebody.federation.proxy.admin import make, report
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore

tried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
PATHS = [
    "/v1/reports",
    "/v1/batches",
    f"/v1/epochs/{EPOCH.hex()}",
    "/v1/epochs/",
    "/health",
    "/metrics",
    "/v1/reports/",
]


class World:
    """A proxy that holds everything, in a folder of its own."""

    def __init__(self, folder: Path, sink: Sink) -> None:
        self.sink, self.folder = sink, folder / "proxy"
        self.device, self.upstream = Device(people=1000), Upstream()
        self.settings = ProxySettings(next=sink.url, tls=False, least_devices=1000, listen=f"127.0.0.1:{free_port()}")
        make(self.folder, self.settings)
        store = ProxyStore(self.folder, self.settings)
        for one in (self.device, self.upstream):
            store.allow(one.key, one.sender)
        store.close()
        self.held = 0


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    sink = Sink()
    with TemporaryDirectory() as folder:
        yield World(Path(folder), sink)
    sink.close()


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[Client]:
    client = Client(world.folder, world.settings)
    yield client
    client.close()


@st.composite
def spoilt(draw: st.DrawFn, body: bytes) -> bytes:
    """An envelope with something wrong; now and then with nothing wrong."""
    for _ in range(draw(st.integers(0, 3))):
        # The head and the signature are where most goes wrong.
        ends = st.one_of(st.integers(0, HEAD_BYTES - 1), st.integers(1, SIGNATURE_BYTES).map(lambda at: -at))
        at = draw(st.one_of(ends, st.integers(0, 10_000))) % max(1, len(body))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "double", "zero", "swap"]))
        if kind == "flip":
            body = body[:at] + bytes([(body[at] if body else 0) ^ (1 << draw(st.integers(0, 7)))]) + body[at + 1 :]
        elif kind == "cut":
            body = body[:at]
        elif kind == "insert":
            body = body[:at] + draw(st.binary(min_size=1, max_size=60)) + body[at:]
        elif kind == "double":
            body += body
        elif kind == "zero":
            body = body[:at] + bytes(len(body[at : at + 8])) + body[at + 8 :]
        else:
            body = body[at:] + body[:at]
    return body


def accepted(status: int, said: bytes) -> int:
    """How many reports an answer acknowledges; it must be an answer of ours."""
    assert 200 <= status < 500, (status, said)
    if status != 200:
        assert isinstance(json.loads(said)["error"], str)
        return 0
    found = json.loads(said)
    return int(found["accepted"])


@tried
@given(data=st.data())
def test_envelopes_of_all_kinds(world: World, client: Client, data: st.DataObject) -> None:
    sender = data.draw(st.sampled_from([world.device, world.upstream, Device()]))
    epoch = data.draw(st.sampled_from([EPOCH, bytes(16)]))
    whole = sender.body(reports(data.draw(st.integers(0, 4))), epoch=epoch)
    body = data.draw(st.one_of(spoilt(whole), st.binary(max_size=400)))
    path = data.draw(st.sampled_from(PATHS[:2]))
    answer = client.ask("POST", path, body)
    count = accepted(answer.status_code, answer.content)
    assert not count or body == whole
    world.held += count
    again = client.ask("POST", path, body)
    assert (again.status_code, again.content) == (answer.status_code, answer.content)
    assert client.counts()["held_reports"] == world.held


@tried
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"]),
    path=st.one_of(
        st.sampled_from(PATHS), st.text(st.characters(codec="ascii", categories=["L", "N"])).map("/{}".format)
    ),
    body=st.one_of(st.binary(max_size=200), st.lists(st.binary(max_size=50), max_size=4)),
)
def test_requests_of_all_kinds(world: World, client: Client, method: str, path: str, body: bytes | list[bytes]) -> None:
    answer = client.ask(method, path, body)
    assert answer.status_code < 500
    assert client.ask("GET", "/health").status_code == 200
    assert client.counts()["held_reports"] == world.held


def test_bytes_of_all_kinds_on_a_real_socket(tmp_path: Path) -> None:
    """Parsers and all; hundreds of connections to one process, which must stand as it stood."""
    sink = Sink()
    here = World(tmp_path, sink)
    proxy = Process(here.folder, here.settings).start()
    told = sent = 0

    @tried
    @given(data=st.data())
    def tries(data: st.DataObject) -> None:
        nonlocal told, sent
        whole = here.device.body(reports(2))
        body = data.draw(spoilt(whole))
        length = data.draw(st.sampled_from([str(len(body)), "-1", "", "7", "1e3", "0x10", "18446744073709551616"]))
        extra = data.draw(
            st.sampled_from(
                [b"", b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n", b"content-encoding: gzip\r\n"]
            )
        )
        line = data.draw(
            st.sampled_from([b"POST /v1/reports HTTP/1.1", b"POST /v1/reports HTTP/1.0", b"POST /v1/reports"])
        )
        raw = line + b"\r\nhost: x\r\ncontent-length: %s\r\nconnection: close\r\n" % length.encode() + extra + b"\r\n"
        raw = data.draw(st.one_of(st.just(raw + body), spoilt(raw + body), st.binary(max_size=200)))
        complete = raw.endswith(b"\r\n\r\n" + whole) and length == str(len(whole)) and not extra
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=PATIENCE) as connection:
            said = b""
            with suppress(OSError):
                connection.sendall(raw)
                if not complete:  # nothing more will come; whoever hangs up like this hears no answer
                    connection.shutdown(socket.SHUT_WR)
                while piece := connection.recv(65536):
                    said += piece
        sent += 2 * (whole in raw)
        for answer in said.split(b"HTTP/1.1 ")[1:]:
            assert answer[:1] in (b"1", b"2", b"4"), said
            if answer.startswith(b"200"):
                told += json.loads(answer.partition(b"\r\n\r\n")[2]).get("accepted", 0)

    try:
        tries()
        assert proxy.stop() == 0
        assert 0 < told <= report(here.folder)["held"] <= sent
        lines = [json.loads(line) for line in proxy.log.read_text().splitlines()]
        assert {line["event"] for line in lines} <= {"started", "stopped", "epoch opened"}, lines
    finally:
        if proxy.process:
            proxy.kill()
        sink.close()


def test_an_epoch_that_nobody_knows_is_not_asked_for_by_everybody(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.federation.proxy.epochs._REMEMBERED", 60.0)
    world.sink.epoch_status = 404
    before = world.sink.asked["epoch"]
    names = [os.urandom(16).hex() for _ in range(3)]
    for name in names * 5:
        assert client.ask("GET", f"/v1/epochs/{name}").status_code == 404
    assert world.sink.asked["epoch"] == before + 3
    world.sink.epoch_status = 200

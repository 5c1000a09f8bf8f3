"""A proxy as a process: over TLS, behind another proxy, and with no trace of who reported."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.federation.proxy.conftest import EPOCH, Device, Process, Sink, reports, split
from tests.processes import PATIENCE, free_port, wait_until

from homebody.errors import HomebodyError
from homebody.federation.proxy.admin import allow, make, report
from homebody.federation.proxy.app import run
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.service.keys import read_report_pub
from homebody.federation.service.web import listen, serve

Made = Callable[..., tuple[Path, ProxySettings]]
Started = Callable[[Path, ProxySettings], Process]


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, Any]:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_it_serves_over_tls_and_ends_when_told_to(tmp_path: Path, made: Made, started: Started, sink: Sink) -> None:
    device = Device()
    folder, settings = made(device, tls=True)
    proxy = started(folder, settings)
    trusted = ssl.create_default_context(cafile=folder / "keys" / "ca.pem")
    connection = http.client.HTTPSConnection("localhost", settings.port, context=trusted, timeout=PATIENCE)
    assert post(connection, "/v1/reports", device.body(reports(2))) == (200, {"accepted": 2})
    wait_until(lambda: len(sink.came()) == 2, "it has arrived")
    plain = http.client.HTTPConnection("localhost", settings.port, timeout=PATIENCE)
    with pytest.raises((OSError, http.client.HTTPException)):
        post(plain, "/v1/reports", device.body(reports(2)))
    stranger = http.client.HTTPSConnection("localhost", settings.port, timeout=PATIENCE)
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.connect()
    with pytest.raises(HomebodyError, match="already"):
        _at_once(run, folder)
    assert proxy.stop() == 0
    for other in (connection, plain, stranger):
        other.close()
    events = [json.loads(line)["event"] for line in proxy.log.read_text().splitlines()]
    assert [events[0], events[-1]] == ["started", "stopped"]
    assert not (folder / "proxy.sqlite-wal").exists()


def _at_once(run: Callable[[Path], None], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("homebody.federation.proxy.app._FAREWELL", 0.0)
        run(folder)


def test_two_proxies_one_behind_the_other(tmp_path: Path, made: Made, started: Started, sink: Sink) -> None:
    """The second takes the first's batches apart, and mixes them with what devices of its own send."""
    near, own = [Device() for _ in range(3)], Device()
    second, second_settings = made(own, name="second", least_devices=4, tls=True)
    first_settings = ProxySettings(
        next=f"https://localhost:{second_settings.port}", listen=f"127.0.0.1:{free_port()}", tls=False, hold=0.5,
        least_devices=3, next_ca=True,
    )  # fmt: skip
    public = make(tmp_path / "first", first_settings, next_ca=second / "keys" / "ca.pem")
    allow(tmp_path / "first", [device.file(tmp_path) for device in near])
    first, last = started(tmp_path / "first", first_settings), started(second, second_settings)
    connection = http.client.HTTPConnection("127.0.0.1", first.port, timeout=PATIENCE)
    connection.request("GET", f"/v1/epochs/{EPOCH.hex()}")
    closes = json.loads(connection.getresponse().read())["closes"]
    assert closes == pytest.approx(sink.closes - 10)  # each hop closes a little before the next one
    sealed = [reports(10) for _ in near]
    for device, some in zip(near, sealed, strict=True):
        assert post(connection, "/v1/reports", device.body(some))[0] == 200
    # The second does not know the first yet: it is tried again until it does.
    wait_until(lambda: "it answered 401" in first.log.read_text(), "the first is refused")
    assert report(tmp_path / "first")["held"] == 30
    allow(second, [public], proxy=True, people=3)
    wait_until(lambda: report(second)["held"] == 30, "it is let in")
    assert sink.came() == []  # of three devices, where four are waited for
    trusted = ssl.create_default_context(cafile=second / "keys" / "ca.pem")
    mine = reports(10)
    direct = http.client.HTTPSConnection("localhost", last.port, context=trusted, timeout=PATIENCE)
    assert post(direct, "/v1/reports", own.body(mine))[0] == 200
    wait_until(lambda: len(sink.came()) == 40, "everything has arrived")
    assert sorted(sink.came()) == sorted(one for some in (*sealed, mine) for one in split(some))
    assert len(sink.batches) == 1
    assert sink.senders == {read_report_pub(second / "reports.pub")}
    assert "forwarding again" in first.log.read_text()
    wait_until(lambda: report(tmp_path / "first")["forwarded"] == 30, "the first has counted it")
    for other in (connection, direct):
        other.close()


@pytest.mark.random_draws
def test_no_trace_of_who_reported(tmp_path: Path, made: Made, started: Started, sink: Sink) -> None:
    """No key, no number of a message and no address, in any file or any line; also not of those who were refused.

    The shortest that is looked for anywhere has 16 random bytes: in a megabyte they stand by chance below 1e-32.
    """
    devices = [Device() for _ in range(4)]
    stranger = Device()
    folder, settings = made(*devices, least_devices=3, hold=1.0)
    proxy = started(folder, settings)
    told: list[bytes] = []
    for device in (*devices, stranger, *devices):
        connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=PATIENCE)
        connection.connect()
        told.append(b"%d" % connection.sock.getsockname()[1])
        envelope = device.envelope(reports(4))
        body = device.body(envelope.reports, number=envelope.number)
        spoilt = body[:-1] + bytes([body[-1] ^ 1])
        for one in (body, body, spoilt, b"nonsense"):
            post(connection, "/v1/reports", one)
        told += [envelope.number, envelope.number.hex().encode()]
        connection.close()
    told += [text for device in (*devices, stranger) for text in (device.key, device.key.hex().encode())]
    held = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    wait_until(lambda: len(sink.came()) == 32, "everything has arrived")
    wait_until(lambda: b"released" in proxy.log.read_bytes(), "the proxy has logged it")
    proxy.kill()
    left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    log = proxy.log.read_bytes()
    for file, content in (*held.items(), *left.items(), ("the log", log)):
        if file.startswith("reports"):
            continue  # the proxy's own key
        for one in told:
            # A port has few digits: it stands somewhere in a database, or among the digits of a time, by chance.
            if len(one) > 5:
                assert one not in content, file
            elif file == "the log":
                assert not re.search(rb"(?<![\d.])%b(?![\d.])" % one, content)
    assert b"127.0.0.1" not in log
    assert b"127.0.0.1" not in b"".join(content for name, content in left.items() if name != "proxy.toml")


def test_without_a_certificate_it_listens_on_this_machine_alone(tmp_path: Path) -> None:
    from starlette.applications import Starlette

    with pytest.raises(HomebodyError, match=r"Other machines can reach 0\.0\.0\.0: leave out --no-tls"):
        ProxySettings(next="http://localhost:1", listen="0.0.0.0:9445", tls=False)
    with listen("0.0.0.0", 0) as listening, pytest.raises(HomebodyError, match="give a certificate"):
        serve(Starlette(), listening, None, counted=print)
    with pytest.raises(HomebodyError, match="pass reports on with https"):
        ProxySettings(next="http://server.example.org:1")


def test_a_port_that_is_taken_is_said_so(made: Made) -> None:
    folder, settings = made(Device())
    with listen("127.0.0.1", settings.port), pytest.raises(HomebodyError, match="The service cannot listen"):
        run(folder)

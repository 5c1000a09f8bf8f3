"""A device's way to its proxy: it persists, it gives up, and it never reports what only it was asked."""

from __future__ import annotations

import gzip
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import PATIENCE

from homebody.errors import HomebodyError
from homebody.federation.device import reporter as reporter_module
from homebody.federation.device.client import _reporter
from homebody.federation.device.home import Home
from homebody.federation.device.reporter import NotReported, Reporter
from homebody.federation.device.settings import HomeSettings
from homebody.federation.envelopes import epoch_keys, open_envelope, signing_keys, unseal_reports
from homebody.federation.epoch import Epoch
from homebody.federation.service.certificates import make_authority
from homebody.federation.service.keys import make_report_key

EPOCH = {
    "epoch": "ab" * 16,
    "key": "cd" * 32,
    "shared": "ef" * 16,
    "k": 3,
    "entries": 5,
    "among": 2,
    "closes": 2_000_000_000,
}
Answer = tuple[int, bytes, dict[str, str]] | None


def said(status: int, content: Any = None, **headers: str) -> Answer:
    return status, json.dumps({} if content is None else content).encode(), headers


class Proxy:
    """Answers as it is told, one answer after the other, the last for ever; None hangs up."""

    def __init__(self, certificates: Path | None = None) -> None:
        self.answers: list[Answer] = [said(200)]
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                proxy.asked.append((self.command, self.path, body, dict(self.headers)))
                given = proxy.answers.pop(0) if len(proxy.answers) > 1 else proxy.answers[0]
                if given is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                status, content, headers = given
                self.send_response(status)
                for name, value in {"content-length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None: ...

        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        if certificates is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
            self.url = self.url.replace("http:", "https:")
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reporter]]:
    monkeypatch.setattr(reporter_module, "FIRST_PAUSE", 0.01)
    made: list[Reporter] = []

    def reporter(url: str, **more: Any) -> Reporter:
        made.append(Reporter(url, **{"ca": None, "secret": signing_keys()[1], **more}))
        return made[-1]

    yield reporter
    for one in made:
        one.close()


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def test_a_message_is_sent_as_it_is_until_it_is_taken(proxy: Proxy, make: Callable[..., Reporter]) -> None:
    proxy.answers = [said(503), None, said(429, retry_after="0"), said(500), said(200, {"accepted": 3})]
    make(proxy.url).send(b"message", soon())
    assert [(method, path, body) for method, path, body, _ in proxy.asked] == [("POST", "/v1/reports", b"message")] * 5
    headers = {name.lower(): value for name, value in proxy.asked[0][3].items()}
    assert headers["user-agent"] == "homebody", "It does not say which version, or which library."
    assert headers["content-type"] == "application/octet-stream"


def test_a_proxy_that_asks_for_time_is_given_it(proxy: Proxy, make: Callable[..., Reporter]) -> None:
    proxy.answers = [(429, b"{}", {"retry-after": "1"}), said(200)]
    began = time.monotonic()
    make(proxy.url).send(b"message", soon())
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (said(400), "it answered 400"),
        (said(401), "does not know this device's key"),
        (said(404), "it knows no such epoch"),
        (said(409), "it answered 409"),
        (said(410), "the epoch is closed"),
        (said(413), "it answered 413"),
        (said(429, {"limit": True}), "homebody proxy allow --people"),
        (said(302, location="https://example.org"), "it answered 302"),
    ],
)
def test_what_no_patience_helps_against(proxy: Proxy, make: Callable[..., Reporter], answer: Answer, why: str) -> None:
    proxy.answers = [answer]
    with pytest.raises(NotReported, match=why) as raised:
        make(proxy.url).send(b"message", soon())
    assert len(proxy.asked) == 1
    assert "127.0.0.1" not in str(raised.value)


def test_it_gives_up_when_it_is_too_late_or_must_be_silent(proxy: Proxy, make: Callable[..., Reporter]) -> None:
    proxy.answers = [said(503)]
    with pytest.raises(NotReported, match="in time: it answered 503"):
        make(proxy.url).send(b"message", soon(0.3))
    assert len(proxy.asked) > 1
    silent = iter([False, False, True])
    with pytest.raises(NotReported):
        make(proxy.url, silent=lambda: next(silent, True)).send(b"message")
    asked = len(proxy.asked)
    with pytest.raises(NotReported):
        make(proxy.url, silent=lambda: True).send(b"message")
    with pytest.raises(NotReported):
        make(proxy.url).send(b"message", soon(0.2), wanted=lambda: False)
    assert len(proxy.asked) == asked, "Nothing leaves then."


def test_nobody_is_there(make: Callable[..., Reporter]) -> None:
    said = r"in time: http://127\.0\.0\.1:9 cannot be reached \(ConnectError\): see that the proxy runs there"
    with pytest.raises(NotReported, match=said):
        make("http://127.0.0.1:9").send(b"message", soon(0.1))


@pytest.mark.parametrize("name", ["key", "shared", "k", "entries", "among", "epoch"])
def test_an_epoch_that_the_proxy_knows_otherwise_is_refused(
    proxy: Proxy, make: Callable[..., Reporter], name: str
) -> None:
    reporter = make(proxy.url)
    proxy.answers = [said(200, {**EPOCH, "closes": 1_999_999_990, "more": 1})]
    reporter.confirm(Epoch.read(EPOCH), soon())
    assert proxy.asked[0][:2] == ("GET", f"/v1/epochs/{'ab' * 16}")
    value: Any = EPOCH[name]
    another = "0" * len(value) if isinstance(value, str) else value + 1
    for other in (
        {**EPOCH, name: another},
        {**EPOCH, name: "00"},
        {key: value for key, value in EPOCH.items() if key != name},
    ):
        proxy.answers = [said(200, other)]
        with pytest.raises(NotReported, match="another key or another model than the proxy"):
            reporter.confirm(Epoch.read(EPOCH), soon())


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]", b"null", b"[" * 9000])
def test_a_proxy_that_makes_no_sense_confirms_nothing(
    proxy: Proxy, make: Callable[..., Reporter], content: bytes
) -> None:
    proxy.answers = [(200, content, {})]
    with pytest.raises(NotReported):
        make(proxy.url).confirm(Epoch.read(EPOCH), soon())


def test_an_endless_answer_is_not_read(proxy: Proxy, make: Callable[..., Reporter]) -> None:
    proxy.answers = [(200, b" " * (1 << 20), {})]
    with pytest.raises(NotReported, match="RemoteProtocolError"):
        make(proxy.url).confirm(Epoch.read(EPOCH), soon(0.2))


def test_an_answer_is_never_unpacked(proxy: Proxy, make: Callable[..., Reporter]) -> None:
    """A few packed bytes could be gigabytes."""
    content = gzip.compress(json.dumps({**EPOCH, "more": "0" * 50_000_000}).encode())
    assert len(content) < reporter_module.LONGEST_ANSWER
    proxy.answers = [(200, content, {"content-encoding": "gzip"})]
    with pytest.raises(NotReported, match="another key or another model"):
        make(proxy.url).confirm(Epoch.read(EPOCH), soon())
    assert proxy.asked[0][3]["accept-encoding"] == "identity"


@pytest.mark.random_draws
def test_what_is_sealed_is_signed_and_only_the_server_opens_it(make: Callable[..., Reporter]) -> None:
    """Of 80 reports of two people, the first 40 are all of one of them with a chance of 2 / C(80, 40) < 1e-22."""
    public, secret = epoch_keys()
    known, signs = signing_keys()
    reporter = make("http://127.0.0.1:9", secret=signs)
    parts = (np.concatenate([[7, 7], np.arange(38)]), np.arange(100, 140))
    own = [reporter.sealed(Epoch.read({**EPOCH, "key": public.hex()}), part) for part in parts]
    first, second = (reporter.message(Epoch.read(EPOCH), b"".join(own)) for _ in range(2))
    sender, message = open_envelope(first)
    assert (sender, message.kind, message.epoch.hex()) == (known, "message", EPOCH["epoch"])
    found = unseal_reports(message.reports, public, secret).tolist()
    assert sorted(found) == sorted(np.concatenate(parts).tolist())
    assert 0 < sum(report < 100 for report in found[:40]) < 40, "Whose is whose is not to be seen."
    assert open_envelope(second)[1].number != message.number


def test_tls_and_nothing_of_the_environment(
    tmp_path: Path, make: Callable[..., Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        make_authority(folder)
    proxy = Proxy(ours)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    try:
        make(proxy.url, ca=(ours / "ca.pem").read_text()).send(b"message", soon())
        for ca in ((others / "ca.pem").read_text(), None):
            with pytest.raises(NotReported, match=f"{proxy.url} shows another certificate than this device trusts"):
                make(proxy.url, ca=ca).send(b"message", soon(0.3))
    finally:
        proxy.server.shutdown()
        proxy.server.server_close()
    assert len(proxy.asked) == 1


class TestSettings:
    def test_a_device_has_a_reporter_where_it_has_a_proxy(self, tmp_path: Path) -> None:
        with Home.create(tmp_path / "d", server="127.0.0.1:1", proxy="https://localhost:9445") as home:
            make_report_key(tmp_path / "d")
            made = _reporter(home, tmp_path / "d", threading.Event())
            assert made is not None
            made.close()
            home.configure(proxy="")
            assert _reporter(home, tmp_path / "d", threading.Event()) is None

    @pytest.mark.parametrize(
        "url",
        [
            "proxy:9445",
            "ftp://host",
            "https://host:0",
            "https://host:70000",
            "https://a b",
            "https://u:p@host",
            "http://",
        ],
    )
    def test_an_address_that_is_none(self, url: str) -> None:
        with pytest.raises(HomebodyError, match="A proxy's address must be https://HOST:PORT"):
            HomeSettings(server="host:1", proxy=url)

    def test_reports_leave_this_machine_over_tls_alone(self) -> None:
        for url in ("http://localhost:9445", "http://[::1]:9445", "https://example.org", "https://example.org:1/"):
            HomeSettings(server="host:1", proxy=url)
        with pytest.raises(HomebodyError, match="is reached by https"):
            HomeSettings(server="host:1", proxy="http://192.0.2.1:9445")

"""The client: what it keeps, and what it says where a service is away, refuses or answers nonsense."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from tests.processes import PATIENCE, free_port
from tests.serving.conftest import Running, films

from homebody.errors import HomebodyError, Unavailable
from homebody.federation.service import web
from homebody.federation.service.certificates import make_certificates
from homebody.serving import Client
from homebody.serving.client import query_body, told_of

Serve = Callable[..., Running]


@pytest.fixture
def nonsense() -> Iterator[tuple[str, list[bytes]]]:
    """Something that is no service of ours, and what it answers next."""
    answers: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answers[0])

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE)


def test_a_service_that_is_away() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}") as client,
        pytest.raises(Unavailable, match="see that it runs"),
    ):
        client.model()


def test_addresses_and_tokens_that_make_no_sense() -> None:
    with pytest.raises(HomebodyError, match="A service on another machine is reached by https://"):
        Client("http://example.org:9447")
    with pytest.raises(HomebodyError, match="A token must be one line"):
        Client("http://127.0.0.1:9447", token="a\nb")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"model": 3}', b'{"model": "a", "version": "1"}', b"[" * 100_000, b"\xff"],
)
def test_whoever_answers_nonsense(nonsense: tuple[str, list[bytes]], body: bytes) -> None:
    url, answers = nonsense
    answers[:] = [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body)]
    with Client(url) as client:
        for ask in (client.model, lambda: client.query("a", torch.ones(2))):
            with pytest.raises(HomebodyError, match="in a way that is not known here"):
                ask()
        for ask in (client.shelf, client.table, lambda: client.head("a")):
            with pytest.raises((HomebodyError, ValueError)):
                ask()


def test_an_answer_that_breaks_off(nonsense: tuple[str, list[bytes]]) -> None:
    url, answers = nonsense
    with Client(url) as client:
        for answer in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", b"nonsense\r\n\r\n"):
            answers[:] = [answer]
            with pytest.raises(Unavailable):
                client.model()


def test_a_certificate_of_another_authority(served: Serve, tmp_path: Path) -> None:
    for owner in ("mine", "theirs"):
        (tmp_path / owner).mkdir()
        for name, content in make_certificates().items():
            (tmp_path / owner / name).write_bytes(content)
    listening = web.listen("127.0.0.1", 0)
    keys = tmp_path / "mine"
    service = served(films()).service
    server = web.server(service._routed, listening, cert=keys / "server.pem", key=keys / "server.key")
    server.config.lifespan = "off"
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    url = f"https://localhost:{listening.getsockname()[1]}"
    with Client(url, ca=keys / "ca.pem") as client:
        assert client.model().items == 300
    with (
        Client(url, ca=tmp_path / "theirs" / "ca.pem") as client,
        pytest.raises(HomebodyError, match="another certificate than is trusted"),
    ):
        client.model()
    server.should_exit = True
    thread.join(PATIENCE)


def test_what_a_query_says() -> None:
    told = torch.tensor([0.5, -1.0])
    header, numbers = told_of(query_body("abc", told))
    assert header == {"model": "abc"}
    assert numbers is not None
    assert (numbers.tolist(), numbers.dtype.kind) == ([0.5, -1.0], "f")
    assert len(query_body("abc", torch.tensor(3, dtype=torch.int32))) == len(query_body("abc", torch.tensor(250)))


def test_a_connection_that_was_closed_over_there_is_opened_again(served: Serve) -> None:
    here = served(films())
    assert here.client.model().items == 300
    assert here.client._connection is not None
    sock = here.client._connection.sock
    assert sock is not None
    sock.shutdown(2)
    assert here.client.model().items == 300

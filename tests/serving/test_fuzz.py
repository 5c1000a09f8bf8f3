"""Whatever is sent to a service: a 4xx with a sentence or a 200, never a 5xx, and memory stays as it was."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import PATIENCE
from tests.serving.conftest import Running, films, news

from homebody.federation.service import web
from homebody.serving.client import LETTER, list_path

Serve = Callable[..., Running]
HUGE = ["1e999", "-1e999", "1e300", "123456789012345678901234567890", "-0.0", "1e-400", "9" * 400, "NaN", "-Infinity"]
STRANGE: list[Any] = [
    None,
    True,
    False,
    "",
    "a",
    "é\u0000",
    [],
    {},
    [[]],
    [None],
    -1,
    0,
    1,
    5,
    1e9,
    1e10,
    2**63,
    -(2**70),
]


class Wire:
    """Requests over one connection, made anew where the service closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: socket.socket | None = None

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: bytes) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE)
            self._file = self._connection.makefile("rb")
        self._connection.sendall(request)
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self._file.readline()
            assert line, (request[:300], head)
            head += line
        lowered = head.lower()
        length = int(lowered.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        body = b"" if request.startswith(b"HEAD") else self._file.read(length)
        if b"connection: close" in lowered:
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        if self._connection is not None:
            self._file.close()
            self._connection.close()
            self._connection = None


def requests(seed: int, model: str) -> Iterator[bytes]:
    """Requests that are wrong in all kinds of ways, some of them right."""
    draw = np.random.default_rng(seed)

    def one(choices: Any) -> Any:
        return choices[int(draw.integers(len(choices)))]

    def digest() -> str:
        return str(one([model, model, model, "0" * 32, model[:-1], model.upper(), "", "..", "%00", "a" * 3000]))

    def numbers() -> str:
        """A list of numbers as JSON, of about the right length."""
        some = [repr(float(number)) for number in draw.normal(size=int(one([5, 5, 5, 4, 6, 0, 1, 500])))]
        if some and draw.random() < 0.5:
            some[int(draw.integers(len(some)))] = str(one([*HUGE, json.dumps(one(STRANGE))]))
        return f"[{', '.join(some)}]"

    def query() -> bytes:
        kind = int(draw.integers(6))
        if kind == 0:
            return f'{{"model": "{digest()}", "told": {numbers()}}}'.encode()
        if kind == 1:
            return f'{{"model": "{digest()}", "choice": {one([*HUGE, json.dumps(one(STRANGE))])}}}'.encode()
        if kind == 2:
            return json.dumps({one(["model", "told", "x"]): one(STRANGE) for _ in range(3)}).encode()
        if kind == 3:
            return draw.bytes(int(draw.integers(200)))
        whole = json.dumps({"model": model, "told": [0.1] * 5}).encode()
        if kind == 4:
            return whole[: int(draw.integers(len(whole) + 1))]
        return b"[" * int(one([10, 2000, 60_000]))

    def letter() -> bytes:
        header = json.dumps({"header": {"model": digest()}, "parts": {"told": 20}}).encode()
        told = np.array([one([0.1, np.nan, np.inf, -1e38, 1e10]) for _ in range(5)], dtype="<f4").tobytes()
        whole = b"HB" + (1).to_bytes(2, "little") + len(header).to_bytes(4, "little") + header + told
        place = int(draw.integers(len(whole)))
        return one([whole, whole[:place], whole[:place] + draw.bytes(3) + whole[place:], draw.bytes(40)])

    def item() -> bytes:
        return json.dumps({"items": one([one(STRANGE), [{"id": one(STRANGE), "vector": one(STRANGE)}]])}).encode()

    def head(method: str, path: str, body: bytes, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
        return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body

    while True:
        kind = int(draw.integers(8))
        if kind < 3:
            yield head("POST", "/v1/query", query(), f"content-type: {one(['application/json', LETTER, 'x'])}")
        elif kind == 3:
            yield head("POST", "/v1/query", letter(), f"content-type: {LETTER}")
        elif kind == 4:
            choice = one(["000", "005", "006", "-01", "1", "0001", "999", "abc", "%30%30%30", "é", "١٢٣"])
            yield head("GET", f"/v1/lists/{digest()}/{choice}".replace("é", "%C3%A9").replace("١٢٣", "%D9%A1"), b"")
        elif kind == 5:
            path = one(["/v1/table?since=", "/v1/shelf?half=", "/v1/shelf?", "/v1/model?", "/v1/models/", "/v1/items/"])
            value = one(
                ["1", "-1", "x", "9" * 40, "1e3", "%D9%A1", "NaN", "1&since=2", "../../etc/passwd", "%2e%2e%2f"]
            )
            yield head(one(["GET", "GET", "DELETE", "PUT", "HEAD"]), f"{path}{value}", b"")
        elif kind == 6:
            token = one(["", "Bearer", "Bearer x", f"Bearer {os.urandom(12).hex()}", "Basic eDp5", "Bearer \xff"])
            yield head(
                one(["POST", "DELETE"]), one(["/v1/items", "/v1/items/film-1"]), item(), f"authorization: {token}"
            )
        else:
            body = b"x" * int(one([65_537, 70_000]))
            yield head("POST", one(["/v1/query", "/v1/items"]), body)


def attack(here: Running, model: str, count: int, token: str = "") -> dict[int, int]:
    """Send so many requests, and count the answers."""
    found = dict[int, int]()
    with Wire(here.port) as wire:
        for request in islice(requests(7, model), count):
            status, body = wire.send(request)
            found[status] = found.get(status, 0) + 1
            assert 200 <= status < 500, (request[:300], status, body)
            if status >= 400 and not request.startswith(b"HEAD"):
                sentence = json.loads(body)["error"]
                assert sentence.endswith("."), sentence
                assert "Traceback" not in sentence
                assert len(body) < 2000, sentence
    return found


def memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_bad_requests_are_refused_in_a_sentence(served: Serve) -> None:
    for model in (news(), films()):
        here = served(model, name=model.digest)
        found = attack(here, model.digest, 250)
        assert {200, 400, 401, 404, 413, 422} <= found.keys()
        assert here.ask("GET", "/health").status == 200
        assert (here.client.model().version, here.service.room.taken) == (2, 0)


@pytest.mark.faults
def test_ten_thousand_bad_requests_leave_the_memory_as_it_was(served: Serve) -> None:
    model = news()
    here = served(model)
    attack(here, model.digest, 2000)
    before = memory()
    found = attack(here, model.digest, 10_000)
    assert sum(found.values()) == 10_000
    assert memory() - before < 20 << 20
    assert here.service.room.taken == 0
    assert here.ask("GET", "/health").status == 200


def test_slow_senders_are_told_so_and_hold_nothing(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_BODY_SECONDS", 0.3)
    monkeypatch.setattr(web, "_DRAIN_SECONDS", 0.1)
    here = served(news())
    for path in ("/v1/query", "/v1/items"):
        token = f"authorization: Bearer {here.operator}\r\n"
        half = f"POST {path} HTTP/1.1\r\nhost: x\r\n{token}content-length: 100\r\n\r\n{{".encode()
        with Wire(here.port) as wire:
            status, body = wire.send(half)
        assert (status, json.loads(body)) == (408, {"error": "The body took too long to come; send it again."})
    assert here.service.room.taken == 0


def test_an_operators_nonsense_changes_nothing(served: Serve) -> None:
    here = served(films())
    for body in ([], {}, {"items": 1}, {"items": []}, {"items": [{}]}, {"items": [{"id": "a\nb"}]}, {"items": [[1]]}):
        answer = here.ask("POST", "/v1/items", body, here.operator)
        assert answer.status == 400, body
        assert answer.said["error"].endswith(".")
    for value in STRANGE:
        vector = here.ask("POST", "/v1/items", {"items": [{"id": "a", "vector": value}]}, here.operator)
        features = here.ask("POST", "/v1/items", {"items": [{"id": "a", "features": {"x": value}}]}, here.operator)
        assert {vector.status, features.status} <= {400, 422}, value
    assert here.client.model().version == 2


def test_a_feature_that_no_number_or_text_can_hold_is_refused(served: Serve) -> None:
    here = served(news())
    for value in (b"1" + b"0" * 400, b'"cat \\ud800"', b'["cat", "\\ud800"]', b"1e999"):
        body = b'{"items": [{"id": "a", "features": {"title": %s}}]}' % value
        answer = here.ask("POST", "/v1/items", body, here.operator)
        assert (answer.status, answer.said.get("error", "")[:19]) == (400, "The features of 'a'"), value
    assert here.client.model().version == 2


def test_a_list_of_another_model_is_no_list_of_this_one(served: Serve) -> None:
    here, other = served(films()), films(seed=3, query="choice:epsilon=7,interests=6")
    assert here.ask("GET", list_path(other.digest, 1)).status == 404

"""Requests a second that a service answers, how soon, and what starting, new items and a reload cost it.

    python benchmarks/serving.py            # everything, 10 s each
    python benchmarks/serving.py lists      # one case of: lists, small, large

Two processes on this machine, over loopback: the service as `homebody serve start` runs it, and the load (this one),
which sends each request when it is due, whatever became of those before. A time counts from then to the last byte of
the answer. The models are made up: for `lists` 100,000 items of 16 numbers and a choice; for `small` and `large`
100,000 and 1,000,000 news of 16 numbers, B = 5 weights, and the best 100. Beside each figure stands the CPU time of the
service and of the load, which says what two free cores would do where this machine is busy with something else. It is
not part of `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from homebody.core import Catalogue, Column
from homebody.data.codes import Code
from homebody.methods import build
from homebody.privacy.queries import Query
from homebody.rng import Rng
from homebody.serving.client import LETTER, list_path, query_body
from homebody.serving.model import Served
from homebody.serving.model_file import Model
from homebody.serving.operator import add_token, install
from homebody.serving.settings import FILE, ServiceSettings
from homebody.serving.store import create

CONNECTIONS = 48
P99 = 20.0
WORDS = tuple(f"w{number}" for number in range(2000))
NEWS = {"encoder": "nrms", "d": 16, "heads": 2, "words": "random", "basis": 5}

Figure = tuple[str, float, float | None, str]
"""What was measured, the value, its bar, and the unit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"any of {', '.join(CASES)}; all by default")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"there is no case {unknown[0]}; cases: {', '.join(CASES)}")
    loads, figures = [os.getloadavg()[0]], list[Figure]()
    for case in given.cases or CASES:
        print(f"{case} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            figures += CASES[case](Path(folder) / "service", given.seconds)
        loads.append(os.getloadavg()[0])
    facts = f"{os.cpu_count()} cores, priority {os.nice(0)}, load {min(loads):.1f} to {max(loads):.1f}"
    if given.json:
        named = [dict(zip(("what", "measured", "bar", "unit"), figure, strict=True)) for figure in figures]
        print(json.dumps({"machine": facts, "figures": named}))
        return
    print(facts)
    for what, measured, bar, unit in figures:
        least = unit in ("/s", "")
        met = bar is None or (measured >= bar if least else measured <= bar)
        shown = "" if bar is None else f"; bar {bar:,g} {unit}: {'met' if met else 'MISSED'}"
        print(f"  {what}: {measured:,.4g} {unit}{shown}")


def films(count: int) -> Model:
    """Items of 16 numbers, and a choice."""
    table = Rng.of(0).normal(count, 16)
    ids = [f"film-{number}" for number in range(count)]
    query = Query.parse("choice:epsilon=5,interests=16")
    return Model.of(Served.of("fedials", {}, {"item": table}, Catalogue(count), query, ids=ids))


def news(count: int, seed: int = 0) -> Model:
    """News of 16 numbers; the encoder's parameters are drawn, and what it would make of most of them too."""
    rng, few = Rng.of(seed), 100
    code = Code("sequence", WORDS, text=True, width=6)
    words = 1 + rng.fold("titles").integers(len(WORDS), count * 6).view(count, 6)

    def catalogue(n: int) -> Catalogue:
        return Catalogue(n, {"title": Column(words[:n], code.size, "sequence", True, words=WORDS)})

    method: Any = build("privaterec", {**NEWS, "ids": False})
    start = method.init_shared(catalogue(few), rng)
    ids = [f"n{number}" for number in range(count)]
    query, fields = Query.parse("attention:epsilon=5,interests=5"), {**NEWS, "ids": False}
    small = Served.of(
        "privaterec", fields, start, catalogue(few), query, ids=ids[:few], codes={"items": {"title": code}}
    )
    vectors = torch.cat([rng.fold("vectors").normal(count, NEWS["d"]), torch.zeros(1, NEWS["d"])])
    head = replace(small.head, rows=f"{seed}-{count}")
    shared = {**small.shared, "index/news": vectors}
    whole = replace(
        small, head=head, shared=shared, catalogue=catalogue(count), ids=tuple(ids), places=vectors[:-1],
        order=torch.arange(count),
    )  # fmt: skip
    return Model.of(whole)


class World:
    """A service of a model, as a process."""

    def __init__(self, folder: Path, model: Model) -> None:
        folder.mkdir()
        self.folder, self.digest = folder, model.digest
        self.port = free_port()
        query = str(model.served.head.query)
        settings = ServiceSettings(query=query, listen=f"127.0.0.1:{self.port}", tls=False, rows=500, answers=100)
        (folder / FILE).write_text(settings.to_toml())
        create(folder)
        install(folder, model)
        self.token = add_token(folder, "load", operator=True)
        began = time.perf_counter()
        command = [sys.executable, "-P", "-c", "from homebody.cli import main; main()", "serve", "start", str(folder)]
        self._log = (folder.parent / "log").open("ab")
        self.process = subprocess.Popen(command, stderr=self._log)
        while not self._answers():
            if self.process.poll() is not None:
                sys.exit((folder.parent / "log").read_text())
            time.sleep(0.02)
        self.started = time.perf_counter() - began

    def _answers(self) -> bool:
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            method, path, None if body is None else json.dumps(body), {"authorization": f"Bearer {self.token}"}
        )
        answer = connection.getresponse()
        said = json.loads(answer.read())
        if answer.status != 200:
            sys.exit(f"{method} {path}: {said}")
        return said

    @property
    def cpu(self) -> float:
        """Seconds of the processor that the service has had."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def peak(self) -> float:
        """The most megabytes that it ever had in memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def running(folder: Path, model: Model) -> Iterator[World]:
    world = World(folder, model)
    try:
        yield world
    finally:
        world.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Connection(asyncio.Protocol):
    """One request at a time, over a connection that stays."""

    def __init__(self) -> None:
        self._came, self._needs = b"", 0
        self._status = 0
        self.answered: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, request: bytes) -> asyncio.Future[int]:
        answered = self.answered = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self.connection_lost(None)
        else:
            self._transport.write(request)  # type: ignore[attr-defined]
        return answered

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._needs:
            self._came += data
            head, found, rest = self._came.partition(b"\r\n\r\n")
            if not found:
                return
            self._status = int(head[9:12])
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0] or 0)
            self._needs, self._came = length - len(rest), b""
        else:
            self._needs -= len(data)
        if self._needs <= 0 and self.answered is not None:
            answered, self.answered, self._needs = self.answered, None, 0
            answered.set_result(self._status)

    def connection_lost(self, error: Exception | None) -> None:
        if self.answered is not None:
            self.answered.set_result(0)
            self.answered = None


class Sent(NamedTuple):
    """What became of a load."""

    times: list[float]
    """Milliseconds from the moment at which a request was due to the end of its answer."""
    failed: int
    rate: float
    """Answers a second."""
    cpu: float
    """Milliseconds of the processor for each answer: the service's."""
    own: float
    """The load's."""

    def figures(self, name: str, bar: float) -> list[Figure]:
        p50, p99 = np.percentile(self.times, [50, 99])
        return [
            (f"{name}, answers", self.rate, 0.99 * bar, "/s"),
            (f"{name}, p99", float(p99), P99, "ms"),
            (f"{name}, p50", float(p50), None, "ms"),
            (f"{name}, failed", self.failed, 0, "requests"),
            (f"{name}, the service's CPU for each", self.cpu, None, "ms"),
            (f"{name}, the load's CPU for each", self.own, None, "ms"),
            (f"{name}, answers of one core by its CPU time", 1000 / self.cpu, None, "/s"),
        ]


async def paced(world: World, requests: list[bytes], rate: float, seconds: float) -> Sent:
    """Each request when it is due."""
    loop = asyncio.get_running_loop()
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        _, connection = await loop.create_connection(Connection, "127.0.0.1", world.port)
        free.put_nowait(connection)
    for number in range(200):  # the first ones
        connection = await free.get()
        await connection.ask(requests[number % len(requests)])
        free.put_nowait(connection)
    times: list[float] = []
    failed = 0
    tasks = set()

    async def send(request: bytes, due: float) -> None:
        nonlocal failed
        connection = await free.get()
        failed += await connection.ask(request) != 200
        times.append(1000 * (time.perf_counter() - due))
        free.put_nowait(connection)

    cpu, own = world.cpu, time.process_time()
    began = time.perf_counter()
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(send(requests[number % len(requests)], due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.gather(*tasks)
    took = time.perf_counter() - began
    while not free.empty():
        free.get_nowait().close()
    return Sent(
        times, failed, len(times) / took, 1000 * (world.cpu - cpu) / len(times),
        1000 * (time.process_time() - own) / len(times),
    )  # fmt: skip


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\naccept: {LETTER}\r\n\r\n".encode()


def queries(digest: str) -> list[bytes]:
    """What 1,000 devices tell."""
    bodies = [query_body(digest, told) for told in Rng.of(5).normal(1000, 5)]
    return [
        b"POST /v1/query HTTP/1.1\r\nhost: x\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
        % (LETTER.encode(), len(body), body)
        for body in bodies
    ]


def lists(folder: Path, seconds: float) -> list[Figure]:
    """Lists of a choice among 16, of 250 rows each."""
    with running(folder, films(100_000)) as world:
        requests = [get(list_path(world.digest, choice)) for choice in range(16)]
        sent = asyncio.run(paced(world, requests, 4000, seconds))
        return sent.figures("lists of 250 rows at 4,000/s", 4000)


def small(folder: Path, seconds: float) -> list[Figure]:
    """B = 5, the best 100 of 100,000 items."""
    with running(folder, news(100_000)) as world:
        sent = asyncio.run(paced(world, queries(world.digest), 3000, seconds))
        return sent.figures("B = 5, top 100 of 100,000 at 3,000/s", 3000)


def large(folder: Path, seconds: float) -> list[Figure]:
    """B = 5, the best 100 of a million items; new items and another model meanwhile."""
    with running(folder, news(1_000_000)) as world:
        figures: list[Figure] = [
            ("start with 1,000,000 items", world.started, 10.0, "s"),
            ("  the CPU time of that", world.cpu, None, "s"),
            ("memory at the start", world.peak, 1500.0, "MB"),
        ]
        requests = queries(world.digest)
        sent = asyncio.run(paced(world, requests, 500, seconds))
        figures += sent.figures("B = 5, top 100 of 1,000,000 at 500/s", 500)
        during, seen = _meanwhile(world, lambda: _new_items(world, 100, 1), requests, 5.0)
        figures += [
            ("100 new items, until they are in answers", seen, 2.0, "s"),
            ("  requests that failed meanwhile, at 500/s", during.failed, 0, "requests"),
        ]
        during, _ = _meanwhile(world, lambda: _new_items(world, 1000, 10), requests, 15.0)
        figures += [("1,000 new items, requests that failed meanwhile, at 500/s", during.failed, 0, "requests")]
        figures += [("  p99 meanwhile", float(np.percentile(during.times, 99)), None, "ms")]
        other = news(1_000_000, seed=1)
        during, _ = _meanwhile(world, lambda: _reloaded(world, other), requests, 30.0)
        figures += [
            ("reload, requests that failed meanwhile, at 500/s", during.failed, 0, "requests"),
            ("  p99 meanwhile", float(np.percentile(during.times, 99)), None, "ms"),
            ("memory at the end, two models", world.peak, None, "MB"),
        ]
        return figures


def _meanwhile(world: World, work: Callable[[], float], requests: list[bytes], seconds: float) -> tuple[Sent, float]:
    """Do some work beside a load of 500/s."""
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(work()))
    thread.start()
    sent = asyncio.run(paced(world, requests, 500, seconds))
    thread.join()
    return sent, took[0]


def _new_items(world: World, count: int, posts: int) -> float:
    """Add items, and wait until they are in answers; the seconds from the last request."""
    each = count // posts
    before = world.ask("GET", "/v1/model")["items"]
    for first in range(0, count, each):
        ids = [f"new-{before}-{number}" for number in range(first, first + each)]
        items = [{"id": id_, "features": {"title": f"w{place} w{place + 1} w7"}} for place, id_ in enumerate(ids)]
        began = time.perf_counter()
        world.ask("POST", "/v1/items", {"items": items})
    while world.ask("GET", "/v1/model")["items"] < before + count:
        time.sleep(0.01)
    return time.perf_counter() - began


def _reloaded(world: World, model: Model) -> float:
    """Give the service another model, as `homebody serve reload` does, and wait until it is served."""
    began = time.perf_counter()
    install(world.folder, model)
    while world.ask("GET", "/v1/model")["model"] != model.digest:
        time.sleep(0.05)
    return time.perf_counter() - began


CASES = {"lists": lists, "small": small, "large": large}

if __name__ == "__main__":
    main()

"""Reports a second that a proxy takes in with durable acknowledgements while it passes them on, and what comes of them.

    python benchmarks/proxy.py             # 60 s of all it can take, then 30 s of half of 40,000 reports/s
    python benchmarks/proxy.py --opening   # 60 s of 22,000 reports/s into a sink that opens every one
    python benchmarks/proxy.py --kill      # kill -9 every few seconds under load: each report arrives exactly once

Three processes on this machine: the proxy as `homebody proxy run` starts it, a sink in the place of the server, and the
load (this one). Messages of 100 sealed reports are made and signed beforehand, each by one of 4,000 registered devices;
acknowledgements at half load are measured from the moment when a message was due. It is not part of `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from homebody.federation.envelopes import (
    REPORT_BYTES,
    Envelope,
    epoch_keys,
    open_envelope,
    seal_reports,
    sign_envelope,
    signing_keys,
    unseal_reports,
)
from homebody.federation.proxy.admin import make, report
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender

PER_MESSAGE, DEVICES, CONNECTIONS, LEAST = 100, 4000, 64, 100
BAR, HALF, ACK, OPENED = 40_000, 20_000, 50.0, 20_000
OPENING = 22_000
EPOCH = bytes(range(16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hold", type=float, default=5.0, help="Seconds that the proxy holds reports.")
    parser.add_argument("--half", type=float, default=HALF, help="Reports a second for the acknowledgement times.")
    parser.add_argument("--opening", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--sink", nargs=3, metavar=("PORT", "FILE", "SECRET"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.sink:
        asyncio.run(sink(int(asked.sink[0]), Path(asked.sink[1]), bytes.fromhex(asked.sink[2])))
        return
    with tempfile.TemporaryDirectory() as folder:
        # Killed, everything must have arrived at the end; otherwise what the last few devices sent may stay behind.
        world = World(Path(folder), asked.hold, asked.opening, 1 if asked.kill else LEAST)
        run = kills(world, asked.seconds) if asked.kill else opening(world, asked.seconds) if asked.opening else None
        try:
            asyncio.run(run or speed(world, asked))
        finally:
            world.end()


class World:
    """A proxy and a sink."""

    def __init__(self, folder: Path, hold: float, opening: bool, least: int) -> None:
        self.folder, self.opening = folder, opening
        self.port, self.sink_port = free_port(), free_port()
        self.public, self.secret = epoch_keys()
        settings = ProxySettings(
            next=f"http://127.0.0.1:{self.sink_port}",
            listen=f"127.0.0.1:{self.port}",
            hold=hold,
            least_devices=least,
            most=1_000_000,
            tls=False,
        )
        make(folder / "proxy", settings)
        self.devices = [signing_keys() for _ in range(DEVICES)]
        store = ProxyStore(folder / "proxy", settings)
        with store.transaction():
            for public, _ in self.devices:
                store.allow(public, Sender(False, 1))
        store.close()
        given = [str(self.sink_port), str(folder / "came"), (self.public + self.secret).hex() if opening else ""]
        self.sink = subprocess.Popen([sys.executable, __file__, "--sink", *given])
        self.log = (folder / "log").open("ab")
        self.proxy = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", "from homebody.cli import main; main()", "proxy", "run"]
        return subprocess.Popen([*command, str(self.folder / "proxy")], stderr=self.log)

    def messages(self, count: int) -> list[bytes]:
        """Whole requests, signed. Opened, what they hold is drawn from fewer reports, for sealing is slow."""
        size = PER_MESSAGE * REPORT_BYTES
        stock = seal_reports(np.arange(20_000) % 5000, self.public) if self.opening else b""
        made = []
        for number in range(count):
            start = number * size % max(1, len(stock))
            reports = stock[start : start + size] if self.opening else os.urandom(size)
            envelope = Envelope("message", EPOCH, os.urandom(16), reports)
            body = sign_envelope(envelope, self.devices[number % DEVICES][1])
            made.append(b"POST /v1/reports HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        return made

    async def ready(self) -> None:
        for port in (self.sink_port, self.port):
            for _ in range(600):
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                await asyncio.sleep(0.05)

    def end(self) -> None:
        for process in (self.proxy, self.sink):
            process.kill()
            process.wait()
        self.log.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Connection:
    """Requests over one connection, made anew where it breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            self._writer.write(request)
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return int(head[9:12]), await self._reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            raise

    def close(self) -> None:
        if self._writer:
            self._writer.close()
            self._writer = None


def begin() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {PER_MESSAGE} reports a message, {DEVICES} devices")


async def speed(world: World, asked: argparse.Namespace) -> None:
    begin()
    full = world.messages(int(asked.seconds * 150_000 / PER_MESSAGE))
    await world.ready()
    watch = asyncio.create_task(watched(world.proxy.pid, 5.0))
    taken, seconds, cpu = await saturate(world, full, asked.seconds)
    memory = [f"{size:.0f}" for size in await stopped(watch)]
    rate, arrived = taken / seconds, (await total(world))["reports"]
    print(f"all it can take, {seconds:.0f} s: {rate:,.0f} reports/s, bar {BAR:,}: {'met' if rate >= BAR else 'MISSED'}")
    print(f"  passed on meanwhile: {arrived / seconds:,.0f} reports/s")
    print(f"  CPU of the proxy: {cpu / taken * 1e6:.2f} ms per 1,000 reports ({cpu / seconds:.2f} cores)")
    print(f"  its memory, MB, every 5 s: {' '.join(memory)}; its files: {on_disk(world) / 1e6:.0f} MB")
    del full
    seconds = min(asked.seconds, 30.0)
    messages = world.messages(int(seconds * asked.half / PER_MESSAGE))
    await drained(world)
    times, cpu = await paced(world, messages, asked.half)
    p50, p99 = np.percentile(times, [50, 99])
    print(
        f"{asked.half:,.0f} reports/s for {seconds:.0f} s: acknowledged within {p50:.1f} ms (p50), {p99:.1f} ms (p99), "
        f"{max(times):.0f} ms at most; bar {ACK:g} ms: {'met' if p99 < ACK else 'MISSED'}"
    )
    print(f"  CPU of the proxy: {cpu / (len(times) * PER_MESSAGE) * 1e6:.2f} ms per 1,000 reports")
    await account(world, taken + len(times) * PER_MESSAGE)


async def opening(world: World, seconds: float) -> None:
    begin()
    messages = world.messages(int(seconds * OPENING / PER_MESSAGE))
    await world.ready()
    times, cpu = await paced(world, messages, OPENING)
    accepted = len(times) * PER_MESSAGE
    await drained(world)
    found = await total(world)
    rate = found["opened"] / found["seconds"]
    print(
        f"{OPENING:,} reports/s for {seconds:.0f} s; opened from the first batch to the last: {rate:,.0f}/s, "
        f"bar {OPENED:,}: {'met' if rate >= OPENED else 'MISSED'}"
    )
    print(f"  CPU of the proxy: {cpu / accepted * 1e6:.2f} ms per 1,000 reports")
    print(f"  CPU of the sink: {cpu_of(world.sink.pid) / max(1, found['opened']) * 1e6:.2f} ms per 1,000 reports")
    await account(world, accepted)


async def account(world: World, accepted: int) -> None:
    """What became of everything, once nothing moves any more."""
    await drained(world)
    held, found = report(world.folder / "proxy")["held"], await total(world)
    missing = accepted - found["reports"] - held
    print(
        f"accepted {accepted:,}; arrived {found['reports']:,} in {found['batches']:,} batches; {missing:,} lost; "
        f"{held:,} held, of fewer than {LEAST} devices"
    )


async def drained(world: World) -> None:
    """Wait until all has been passed on but what the last few devices sent."""
    began = time.monotonic()
    while report(world.folder / "proxy")["held"] > PER_MESSAGE * LEAST and time.monotonic() - began < 120:
        await asyncio.sleep(1)
    await asyncio.sleep(3)


def on_disk(world: World) -> int:
    return sum(path.stat().st_size for path in (world.folder / "proxy").iterdir())


async def saturate(world: World, messages: list[bytes], seconds: float) -> tuple[int, float, float]:
    """As fast as they are acknowledged, over as many connections."""
    left, taken = deque(messages), 0
    began, cpu = time.monotonic(), cpu_of(world.proxy.pid)

    async def send() -> None:
        nonlocal taken
        connection = Connection(world.port)
        while left and time.monotonic() - began < seconds:
            message = left.popleft()
            status, said = await connection.ask(message)
            if status == 429:
                left.append(message)
                await asyncio.sleep(0.05)
                continue
            assert status == 200, said
            taken += PER_MESSAGE

    await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
    return taken, time.monotonic() - began, cpu_of(world.proxy.pid) - cpu


async def paced(world: World, messages: list[bytes], rate: float) -> tuple[list[float], float]:
    """One message after the other, each when it is due; milliseconds from then to its acknowledgement."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(4 * CONNECTIONS):
        free.put_nowait(Connection(world.port))
    times: list[float] = []

    async def send(message: bytes, due: float) -> None:
        connection = await free.get()
        status, said = await connection.ask(message)
        assert status == 200, said
        times.append(1000 * (time.perf_counter() - due))
        free.put_nowait(connection)

    cpu = cpu_of(world.proxy.pid)
    began, tasks = time.perf_counter(), set()
    for number, message in enumerate(messages):
        due = began + number * PER_MESSAGE / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.add(asyncio.create_task(send(message, due)))
    await asyncio.gather(*tasks)
    return times, cpu_of(world.proxy.pid) - cpu


async def kills(world: World, seconds: float) -> None:
    """Every message is sent until it is acknowledged, whatever happens to the proxy meanwhile."""
    messages = world.messages(int(seconds * BAR / PER_MESSAGE))
    await world.ready()
    left, taken, count, rng = deque(messages), [], 0, np.random.default_rng()
    end = time.monotonic() + seconds

    async def send() -> None:
        connection = Connection(world.port)
        while left and time.monotonic() < end:
            message = left.popleft()
            while True:
                with suppress(OSError, asyncio.IncompleteReadError):
                    status, said = await connection.ask(message)
                    if status == 200:
                        break
                    assert status in (429, 503), said
                await asyncio.sleep(0.05)
            taken.append(message)

    sending = asyncio.gather(*(send() for _ in range(CONNECTIONS)))
    while time.monotonic() < end:
        await asyncio.sleep(rng.uniform(1.0, 4.0))
        world.proxy.kill()
        world.proxy.wait()
        world.proxy = world.start()
        count += 1
    await sending
    accepted = len(taken) * PER_MESSAGE
    began = time.monotonic()
    while (await total(world))["reports"] < accepted and time.monotonic() - began < 120:
        await asyncio.sleep(0.2)
    await asyncio.sleep(5)
    came = np.frombuffer((world.folder / "came").read_bytes(), dtype=f"V{REPORT_BYTES}")
    size = PER_MESSAGE * REPORT_BYTES
    sent = np.frombuffer(b"".join(open_envelope(one.partition(b"\r\n\r\n")[2])[1].reports for one in taken), came.dtype)
    assert len(sent) * REPORT_BYTES == len(taken) * size
    exactly = np.array_equal(np.sort(came), np.sort(sent))
    print(f"{count} kills in {seconds:.0f} s; {accepted:,} reports acknowledged, {len(came):,} arrived")
    print("each exactly once" if exactly else "NOT each exactly once")
    sys.exit(not exactly)


async def watched(pid: int, every: float) -> list[float]:
    """Megabytes in memory, until it is cancelled."""
    sizes = []
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(every)
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGESIZE") / 1e6)
    return sizes


async def stopped(task: asyncio.Task[Any]) -> Any:
    task.cancel()
    return await task


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def total(world: World) -> dict[str, Any]:
    connection = Connection(world.sink_port)
    _, said = await connection.ask(b"GET /total HTTP/1.1\r\nhost: x\r\n\r\n")
    connection.close()
    return dict(json.loads(said))


async def sink(port: int, file: Path, keys: bytes) -> None:
    """In the place of the server's intake: it keeps each batch once, and opens its reports if it has the key."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seen: set[bytes] = set()
    found: dict[str, Any] = {"reports": 0, "batches": 0, "opened": 0, "seconds": 0.0}
    began = 0.0
    facts = {
        "epoch": EPOCH.hex(),
        "key": "00" * 32,
        "shared": "0" * 32,
        "k": 1_000_000,
        "entries": 5000,
        "among": 1,
        "closes": time.time() + 86_400,
    }

    def take(body: bytes) -> dict[str, Any]:
        nonlocal began
        _, envelope = open_envelope(body)
        began = began or time.monotonic()
        if envelope.number not in seen:
            seen.add(envelope.number)
            came.write(envelope.reports)
            found["reports"] += envelope.size
            found["batches"] += 1
            if keys:
                opened = int((unseal_reports(envelope.reports, keys[:32], keys[32:]) < 10_000).sum())
                found["opened"] += opened
            found["seconds"] = time.monotonic() - began
        return {"accepted": envelope.size, "refused": {}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1]
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                said: dict[str, Any] = found if path == b"/total" else facts
                if path == b"/v1/batches":
                    said = await asyncio.to_thread(take, body) if keys else take(body)
                    came.flush()
                text = json.dumps(said).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        writer.close()

    with file.open("wb") as came:
        server = await asyncio.start_server(serve, "127.0.0.1", port, limit=1 << 20)
        await server.serve_forever()


if __name__ == "__main__":
    main()

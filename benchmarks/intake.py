"""Reports a second through a real proxy and a real intake, which opens every one; and through the intake alone.

    python benchmarks/intake.py            # 60 s of 22,000 reports/s through both, and what came of them
    python benchmarks/intake.py --alone    # as many as the intake alone takes in

The intake as the server starts it, with TLS, and one SQLite file; the proxy as `homebody proxy run` starts it, without
TLS towards the load (this process). It is not part of `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
from proxy import DEVICES, LEAST, OPENED, OPENING, PER_MESSAGE, World, begin, cpu_of, free_port, paced

from homebody.federation.envelopes import REPORT_BYTES, Envelope, seal_reports, sign_envelope, signing_keys
from homebody.federation.proxy.admin import make, report
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore, Sender
from homebody.federation.server import admin
from homebody.federation.server.epochs import Epochs
from homebody.federation.server.plan import ServerPlan
from homebody.federation.service.keys import read_report_key
from homebody.recipe import Recipe

ENTRIES, STOCK, BATCH = 50_000, 20_000, 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=OPENING, help="Reports a second.")
    parser.add_argument("--alone", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        world = Whole(Path(folder))
        try:
            begin()
            if asked.alone:
                alone(world, asked.seconds)
            else:
                asyncio.run(together(world, asked.seconds, asked.rate))
        finally:
            world.end()


class Whole(World):
    """A server's intake with an open epoch, and a proxy before it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.sink_port = folder, free_port(), free_port()
        (folder / "items.csv").write_text("id\na\nb\n")
        recipe = Recipe("fedmf", "devices", evaluate_every=0, stages=["one-bit:epsilon=2.5,k=100", "shuffle"])
        plan = ServerPlan(recipe, reports=f"127.0.0.1:{self.sink_port}", metrics="")
        admin.make(folder / "server", plan, str(folder / "items.csv"), [])
        ca = folder / "server" / "keys" / "ca.pem"
        self.context = ssl.create_default_context(cadata=ca.read_text())
        settings = ProxySettings(
            next=f"https://127.0.0.1:{self.sink_port}",
            next_ca=True,
            listen=f"127.0.0.1:{self.port}",
            hold=2.0,
            least_devices=LEAST,
            most=1_000_000,
            tls=False,
        )
        make(folder / "proxy", settings, next_ca=ca)
        self.signer, self.signs = read_report_key(folder / "proxy" / "reports.key")
        with admin.opened(folder / "server") as (_, records):
            records.add_proxy(self.signer, "proxy")
            epochs = Epochs(records, folder / "server")
            self.epoch = epochs.open("run/train/1", "0" * 32, k=1_000_000, entries=ENTRIES, seconds=3600)
        self.devices = [signing_keys() for _ in range(DEVICES)]
        store = ProxyStore(folder / "proxy", settings)
        with store.transaction():
            for public, _ in self.devices:
                store.allow(public, Sender(False, 1))
        store.close()
        self.stock = seal_reports(np.arange(STOCK) % (2 * ENTRIES), self.epoch.key)
        self.log = (folder / "log").open("ab")
        intake = [sys.executable, "-P", "-m", "homebody.federation.server.intake", str(folder / "server")]
        self.sink = subprocess.Popen(intake, stderr=self.log)
        self.proxy = self.start()

    def reports(self, start: int, count: int) -> bytes:
        """From the stock, again and again: sealing is slow, and opening costs the same."""
        size = count * REPORT_BYTES
        at = start * REPORT_BYTES % (len(self.stock) - size)
        return self.stock[at - at % REPORT_BYTES :][:size]

    def messages(self, count: int) -> list[bytes]:
        made = []
        for number in range(count):
            envelope = Envelope(
                "message", self.epoch.id, os.urandom(16), self.reports(number * PER_MESSAGE, PER_MESSAGE)
            )
            body = sign_envelope(envelope, self.devices[number % DEVICES][1])
            made.append(b"POST /v1/reports HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        return made

    def arrived(self) -> int:
        """Opened and counted, or opened and known for a copy: the load is made of a stock, over and over."""
        with admin.opened(self.folder / "server") as (_, records):
            copied = records.counters().get("reports_refused: copied", 0)
            return Epochs(records, self.folder / "server").arrived("run/train/1") + copied

    def memory(self) -> str:
        lines = Path(f"/proc/{self.sink.pid}/status").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("VmHWM"))


async def together(world: Whole, seconds: float, rate: float) -> None:
    messages = world.messages(int(seconds * rate / PER_MESSAGE))
    await world.ready()
    began, cpu = time.monotonic(), cpu_of(world.sink.pid)
    times, proxys = await paced(world, messages, rate)
    sent, accepted, arrived = time.monotonic() - began, len(times) * PER_MESSAGE, world.arrived()
    print(
        f"{accepted / sent:,.0f} reports/s for {sent:.0f} s; counted meanwhile: {arrived / sent:,.0f}/s, "
        f"bar {OPENED:,}: {'met' if arrived / sent >= OPENED else 'MISSED'}"
    )
    print(f"  acknowledged within {np.percentile(times, 99):.0f} ms (p99)")
    print(f"  CPU of the proxy: {proxys / accepted * 1e6:.1f} ms per 1,000 reports")
    held = accepted
    while held > PER_MESSAGE * LEAST and time.monotonic() - began < sent + 120:
        await asyncio.sleep(1)
        held = report(world.folder / "proxy")["held"]
    await asyncio.sleep(3)
    arrived, held = world.arrived(), report(world.folder / "proxy")["held"]
    print(f"  CPU of the intake: {(cpu_of(world.sink.pid) - cpu) / arrived * 1e6:.1f} ms per 1,000; {world.memory()}")
    print(f"accepted {accepted:,}; counted {arrived:,}; {accepted - arrived - held:,} lost; {held:,} held")


def alone(world: Whole, seconds: float) -> None:
    """Batches as fast as they are answered, two at a time."""
    asyncio.run(world.ready())
    began, cpu, rooms = time.monotonic(), cpu_of(world.sink.pid), [0, 0]

    def send(which: int) -> None:
        with httpx.Client(base_url=f"https://127.0.0.1:{world.sink_port}", verify=world.context, timeout=60) as http:
            while time.monotonic() - began < seconds:
                batch = Envelope("batch", world.epoch.id, os.urandom(16), world.reports(0, BATCH))
                assert http.post("/v1/batches", content=sign_envelope(batch, world.signs)).status_code == 200
                rooms[which] += BATCH

    threads = [threading.Thread(target=send, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, spent = time.monotonic() - began, cpu_of(world.sink.pid) - cpu
    assert world.arrived() == sum(rooms)
    print(f"the intake alone, {took:.0f} s: {sum(rooms) / took:,.0f} reports/s, each counted once")
    print(f"  CPU: {spent / sum(rooms) * 1e6:.1f} ms per 1,000 reports ({spent / took:.2f} cores); {world.memory()}")


if __name__ == "__main__":
    main()

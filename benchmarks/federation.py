"""Seconds a round with four real devices takes, beside what the transport alone takes in the same run.

    python benchmarks/federation.py [--rounds 20]

Four processes of each kind come to one SuperLink on this machine, with TLS and registered keys. First the floor: each
gives back the bytes that it is sent, as many as the table has, through `Link` and `Fleet` alone. Then FedMF with
MovieLens-100K's catalogue and its first twenty people: `fit`, ledger, database, devices' stores and all. Then the same
with a secure sum, whose rounds have five exchanges, and with one that a helper opens, a fifth process. Medians, the
first rounds left out, which compile. It takes about three minutes, and is not part of `make bench`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

DEVICES, PEOPLE, FACTORS = 4, 20, 32
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
BAR = 2.0
"""Seconds that a round may take beyond the floor."""
SUM_BAR = 1.0
"""Seconds that a round with a secure sum may take."""
HELPED_BAR = 0.5
"""Seconds that a round may take whose sum a helper opens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--echo", nargs=2, metavar=("FOLDER", "ADDRESS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.echo:
        echo(Path(asked.echo[0]), asked.echo[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        size, floor = measure_floor(Path(folder) / "floor", asked.rounds)
        found, bytes_up = measure_rounds(Path(folder) / "rounds", asked.rounds)
        summed, bytes_summed = measure_rounds(Path(folder) / "sums", asked.rounds, ["secure-sum:range=10"])
        stages = ["secure-sum:range=10,helper=true"]
        helped, bytes_helped = measure_rounds(Path(folder) / "helped", asked.rounds, stages, helper=True)
    print(f"the table: {size:,} bytes; {DEVICES} devices, {PEOPLE} people; {os.cpu_count()} cores, {load()}")
    print(f"floor: {size:9,} bytes to each device and back   {floor:7.3f} s")
    print(f"a round of FedMF: {bytes_up:9,} bytes up in all       {found:7.3f} s")
    over = found - floor
    verdict = "met" if over <= BAR else "MISSED"
    print(f"beyond the floor                                 {over:7.3f} s; bar {BAR:g} s: {verdict}")
    verdict = "met" if summed <= SUM_BAR else "MISSED"
    print(f"with a secure sum: {bytes_summed:9,} bytes up in all      {summed:7.3f} s; bar {SUM_BAR:g} s: {verdict}")
    verdict = "met" if helped <= HELPED_BAR else "MISSED"
    print(f"with a helper:     {bytes_helped:9,} bytes up in all      {helped:7.3f} s; bar {HELPED_BAR:g} s: {verdict}")


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def table_size() -> int:
    """Of the table as it travels."""
    from homebody.core import Catalogue
    from homebody.data import load
    from homebody.federation import wire
    from homebody.recipe import Recipe
    from homebody.rng import Rng

    method = Recipe("fedmf", "devices", fields={"factors": FACTORS}).build()
    return len(wire.encode_tree(method.init_shared(Catalogue(load("ml-100k").n_items), Rng.of(0))))


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def measure_floor(folder: Path, rounds: int) -> tuple[int, float]:
    """Seconds until every device has given back as much as the table has."""
    from homebody.federation.flower.link import Link, LinkDown
    from homebody.federation.service.certificates import make_authority, make_device_key

    size, port = table_size(), free_port()
    make_authority(folder)
    files = [
        "--secret",
        str(folder / "secret"),
        "--cert",
        str(folder / "server.pem"),
        "--key",
        str(folder / "server.key"),
    ]
    with ExitStack() as stack:
        stack.enter_context(running("-m", "homebody.federation.flower.superlink", "--port", str(port), *files))
        address = f"localhost:{port}"
        link = stack.enter_context(
            Link(address, ca=(folder / "ca.pem").read_bytes(), secret=(folder / "secret").read_bytes().strip())
        )
        until = time.monotonic() + 60
        while True:
            try:
                link.open()
                break
            except LinkDown:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        for number in range(DEVICES):
            public = make_device_key(folder / f"device{number}")
            link.register(public.read_bytes(), f"device{number}")
            stack.enter_context(running(__file__, "--echo", str(folder / f"device{number}"), address))
        while len(nodes := link.nodes()) < DEVICES:
            time.sleep(0.1)
        seconds = []
        for _ in range(rounds):
            body, began = os.urandom(size), time.perf_counter()
            waiting = set(link.send(dict.fromkeys(nodes.values(), ("query.echo", body)), 60.0))
            while waiting:
                for reply in link.receive(waiting, 5.0):
                    assert reply.body == body, reply.error
                    waiting.discard(reply.message)
            seconds.append(time.perf_counter() - began)
    return size, statistics.median(seconds[2:])


def echo(folder: Path, address: str) -> None:
    """A device that gives back what it gets."""
    from homebody.federation.flower.fleet import Fleet

    ca = (folder.parent / "ca.pem").read_bytes()
    with Fleet(address, ca=ca, key=(folder / "device.key").read_bytes()) as fleet:
        fleet.join()
        while True:
            letter = fleet.pull(20.0)
            if letter is not None:
                fleet.answer(letter, letter.body)


def measure_rounds(folder: Path, rounds: int, stages: Sequence[str] = (), *, helper: bool = False) -> tuple[float, int]:
    """From one round's end to the next one's, by the server's own log of them."""
    from homebody.data import load
    from homebody.federation.device.home import Home
    from homebody.federation.flower.protocol import fingerprint
    from homebody.federation.proxy import admin as proxy_admin
    from homebody.federation.proxy.settings import ProxySettings
    from homebody.federation.server.admin import make, opened
    from homebody.federation.server.plan import ServerPlan
    from homebody.federation.service.certificates import make_device_key, read_public
    from homebody.federation.service.keys import make_report_key
    from homebody.recipe import Recipe

    population, server = load("ml-100k"), folder / "server"
    folder.mkdir()
    recipe = Recipe(
        "fedmf", "devices", fields={"factors": FACTORS}, stages=list(stages), rounds=rounds, evaluate_every=0
    )
    proxy, listen = folder / "proxy", f"127.0.0.1:{free_port()}"
    through, authority = f"https://{listen}" if helper else "", None
    if helper:
        proxy_admin.make(proxy, ProxySettings(next="", listen=listen))
        authority = (proxy / "keys" / "ca.pem").read_bytes()
    place = f"127.0.0.1:{free_port()}"
    plan = ServerPlan(recipe, listen=place, metrics="", quorum=1.0, least=PEOPLE, helper=through)
    make(server, plan, "ml-100k", [], helper_ca=authority)
    with ExitStack() as stack:
        if helper:
            proxy_admin.allow(proxy, [server / "keys" / "reports.pub"], server=True)
        for number in range(DEVICES):
            at = folder / f"device{number}"

            def furnish(inside: Path) -> None:
                (inside / "ca.pem").write_bytes((server / "keys" / "ca.pem").read_bytes())
                make_device_key(inside)
                if authority is not None:
                    (inside / "proxy-ca.pem").write_bytes(authority)
                    proxy_admin.allow(proxy, [make_report_key(inside)], people=PEOPLE // DEVICES)

            with Home.create(at, server=plan.listen, proxy=through, furnish=furnish) as home:
                for user in range(number, PEOPLE, DEVICES):
                    person = home.people.add(f"person {user}")
                    for row in range(*population.indptr[user : user + 2]):
                        home.history.append(person, population.item_id(int(population.items[row])))
            key = read_public(at / "device.pub")
            with opened(server) as (_, records):
                records.add_device(fingerprint(key), key, at.name, PEOPLE // DEVICES)
            stack.enter_context(running("-c", "from homebody.cli import main; main()", "client", "start", str(at)))
        if helper:
            stack.enter_context(running("-c", "from homebody.cli import main; main()", "proxy", "run", str(proxy)))
        command = ("-c", "from homebody.cli import main; main()", "server", "start", str(server), "--once")
        process = stack.enter_context(running(*command))
        ends: dict[int, float] = {}
        with opened(server) as (_, records):
            while process.poll() is None:
                ends.setdefault(len(records.rounds()), time.perf_counter())
                time.sleep(0.002)
            lines = records.rounds()
    assert len(lines) == rounds
    seen = sorted(ends.items())
    # Rounds that were over between two looks share the time between them.
    seconds = [(after - before) / (n - m) for (m, before), (n, after) in pairwise(seen[2:])]
    return statistics.median(seconds), round(statistics.median(line["bytes_up"] for line in lines))


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    main()

"""What the server takes in from proxies: counted exactly, refused for a reason, and the same whatever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.processes import PATIENCE, wait_until

from homebody.database import Database, connect
from homebody.federation.envelopes import (
    REPORT_BYTES,
    Envelope,
    epoch_keys,
    seal_reports,
    sign_envelope,
    signing_keys,
)
from homebody.federation.server import epochs as epochs_module
from homebody.federation.server.admin import make
from homebody.federation.server.epochs import EpochRecord, Epochs, Over
from homebody.federation.server.intake import MOST_BYTES, MOST_REPORTS, Intake
from homebody.federation.server.plan import ServerPlan
from homebody.federation.server.records import Records
from homebody.recipe import Recipe

ENTRIES = 50


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """An intake without a network, and a proxy that it knows."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.records, self.clock, self.folder = Records(database), Clock(), folder
        self.epochs = Epochs(self.records, folder, self.clock)
        self.intake = Intake(self.epochs, threads=2)
        self.app = self.intake.app()
        self.public, self.secret = signing_keys()
        self.records.add_proxy(self.public, "mixer")

    def open(self, name: str = "run/train/1") -> EpochRecord:
        return self.epochs.open(name, "d" * 32, k=4, entries=ENTRIES, seconds=60)

    def ask(self, method: str, path: str, content: bytes | None = None, **headers: str) -> httpx.Response:
        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=("192.0.2.7", 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://intake") as client:
                return await client.request(method, path, content=content, headers=headers)

        return asyncio.run(asked())

    def batch(self, epoch: EpochRecord, pairs: list[int], number: bytes | None = None) -> bytes:
        reports = seal_reports(np.array(pairs, dtype=np.int64), epoch.key)
        return self.signed(Envelope("batch", epoch.id, number or os.urandom(16), reports))

    def signed(self, envelope: Envelope) -> bytes:
        return sign_envelope(envelope, self.secret)

    def counters(self) -> dict[str, int]:
        self.intake.tell()
        return self.records.counters()


@pytest.fixture
def server(database: Database, tmp_path: Path) -> Server:
    return Server(database, tmp_path)


@pytest.fixture
def light(tmp_path: Path) -> Iterator[Server]:
    """One in memory, for what no database makes a difference to."""
    database = connect(None)
    yield Server(database, tmp_path)
    database.close()


def test_reports_are_counted_once_each(server: Server) -> None:
    epoch = server.open()
    first, second = server.batch(epoch, [0, 1, 1, 99]), server.batch(epoch, [1, 7])
    for body, count in ((first, 4), (second, 2), (first, 4)):
        found = server.ask("POST", "/v1/batches", body)
        assert (found.status_code, found.json()) == (200, {"accepted": count, "refused": {}})
    assert server.epochs.arrived(epoch.name) == 6
    counts = server.epochs.close(epoch.name, people=2).counts
    assert {place: int(count) for place, count in enumerate(counts) if count} == {0: 1, 1: 3, 7: 1, 99: 1}
    assert server.counters() == {"batches_accepted": 2, "batches_repeated": 1, "reports_accepted": 6}


def test_a_copy_within_a_batch_is_a_proxys_and_counts_for_nothing(light: Server) -> None:
    epoch = light.open()
    reports = seal_reports(np.array([3, 3, 8]), epoch.key)  # two people may well say the same
    body = light.signed(Envelope("batch", epoch.id, os.urandom(16), 3 * reports))
    found = light.ask("POST", "/v1/batches", body)
    assert (found.status_code, found.json()) == (200, {"accepted": 3, "refused": {"copied": 6}})
    assert light.epochs.close(epoch.name, people=1).counts[[3, 8]].tolist() == [2, 1]


def test_a_batch_that_comes_twice_at_the_same_time_is_counted_once(server: Server) -> None:
    epoch, pairs = server.open(), np.array([1, 7], dtype="<u4")
    found = [server.epochs.add(epoch.id, bytes(16), pairs, {"unreadable": 1}) for _ in range(2)]
    assert [(one.accepted, one.refused, one.again) for one in found] == [
        (2, {"unreadable": 1}, False),
        (2, {"unreadable": 1}, True),
    ]
    assert server.epochs.close(epoch.name, people=1).counts.sum() == 2


def test_a_closed_epoch_takes_nothing_and_nobody_can_open_its_reports(server: Server) -> None:
    epoch = server.open()
    taken, late = server.batch(epoch, [5]), server.batch(epoch, [6])
    assert server.ask("POST", "/v1/batches", taken).status_code == 200
    assert [file.name for file in (server.folder / "epochs").iterdir()] == [f"{epoch.id.hex()}.key"]
    assert (server.folder / "epochs" / f"{epoch.id.hex()}.key").stat().st_mode & 0o777 == 0o600
    before = server.epochs.close(epoch.name, people=1)
    assert not list((server.folder / "epochs").iterdir())
    found = server.ask("POST", "/v1/batches", late)
    assert (found.status_code, found.json()) == (410, {"error": "The epoch is closed."})
    # One that was taken, and whose answer was lost, is told so.
    assert server.ask("POST", "/v1/batches", taken).status_code == 200
    assert server.ask("GET", f"/v1/epochs/{epoch.id.hex()}").status_code == 410
    again = server.epochs.closed(epoch.name)
    assert again is not None
    assert again.people == 1
    assert np.array_equal(again.counts, before.counts)
    with pytest.raises(Over):
        server.open()


def test_an_epoch_ends_by_time(server: Server) -> None:
    epoch = server.open()
    body = server.batch(epoch, [5])
    server.clock.now += 62
    assert server.ask("POST", "/v1/batches", body).status_code == 410
    assert server.ask("GET", f"/v1/epochs/{epoch.id.hex()}").status_code == 410
    assert server.counters() == {"intake_refused: closed epoch": 2}
    with pytest.raises(Over):
        server.open()


def test_what_everybody_may_know_of_an_epoch(server: Server) -> None:
    epoch = server.open()
    assert server.open() == epoch, "It is the same one when it is opened again."
    found = server.ask("GET", f"/v1/epochs/{epoch.id.hex()}")
    assert found.json() == {
        "epoch": epoch.id.hex(),
        "key": epoch.key.hex(),
        "shared": "d" * 32,
        "k": 4,
        "entries": ENTRIES,
        "among": 1,
        "closes": 1061,
    }
    assert server.ask("GET", f"/v1/epochs/{bytes(16).hex()}").status_code == 404
    for other in ({"asks": "e" * 32}, {"k": 5}, {"entries": 51}, {"among": 2}):
        with pytest.raises(Over):
            server.epochs.open(epoch.name, **{"asks": "d" * 32, "k": 4, "entries": ENTRIES, "seconds": 60, **other})


def test_a_new_epoch_ends_the_others_and_what_came_of_them_is_forgotten_by_and_by(server: Server) -> None:
    first = server.open("run/train/1")
    assert server.ask("POST", "/v1/batches", server.batch(first, [5])).status_code == 200
    second = server.open("run/train/2")
    assert second.key != first.key
    assert server.ask("POST", "/v1/batches", server.batch(first, [6])).status_code == 410
    closed = server.epochs.closed("run/train/1")
    assert closed is not None
    assert (closed.counts.sum(), closed.people) == (1, 0)
    server.open("run/train/3")
    assert server.epochs.closed("run/train/1") is None
    assert server.records.database.execute("SELECT COUNT(*) FROM epoch_batch").fetchone() == (0,)
    assert len(list((server.folder / "epochs").iterdir())) == 1


@pytest.mark.parametrize("entries", [ENTRIES, 3_000_000])
def test_counts_are_folded_and_stay_the_same(server: Server, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs_module, "LEAST_LOG", 40)
    monkeypatch.setattr(epochs_module, "PART", 1 << 16 if entries == ENTRIES else 1 << 24)
    epoch = server.epochs.open("run/train/1", "d" * 32, k=4, entries=entries, seconds=60)
    rng, wanted = np.random.default_rng(1), np.zeros(2 * entries, dtype=np.int64)
    for number in range(9):
        pairs = rng.integers(0, 2 * entries, 300 if entries == ENTRIES else 3)
        wanted += np.bincount(pairs, minlength=2 * entries)
        server.epochs.add(epoch.id, bytes([number]) * 16, pairs.astype("<u4"), {})
    logged = "SELECT COUNT(*) FROM epoch_batch WHERE pairs IS NOT NULL"
    assert server.records.database.execute(logged).fetchone()[0] == (0 if entries == ENTRIES else 9)
    assert server.epochs.arrived(epoch.name) == wanted.sum()
    assert np.array_equal(server.epochs.close(epoch.name, 1).counts, wanted)
    assert server.records.database.execute(logged).fetchone() == (0,)
    closed = server.epochs.closed(epoch.name)
    assert closed is not None
    assert np.array_equal(closed.counts, wanted)


class TestRefusals:
    def test_reports_that_cannot_be_used_are_counted_by_reason(self, server: Server) -> None:
        epoch = server.open()
        other, _ = epoch_keys()
        sealed = seal_reports(np.array([3, 2 * ENTRIES, 2**31 - 1]), epoch.key)
        sealed += seal_reports(np.array([4]), other) + bytes(REPORT_BYTES)
        body = server.signed(Envelope("batch", epoch.id, bytes(16), sealed))
        said = {"accepted": 1, "refused": {"unreadable": 2, "out of range": 2}}
        for _ in range(2):
            found = server.ask("POST", "/v1/batches", body)
            assert (found.status_code, found.json()) == (200, said)
        assert server.counters() == {
            "batches_accepted": 1,
            "batches_repeated": 1,
            "reports_accepted": 1,
            "reports_refused: out of range": 2,
            "reports_refused: unreadable": 2,
        }
        assert server.epochs.close(epoch.name, 1).counts.nonzero()[0].tolist() == [3]

    def test_reports_of_another_epoch_cannot_be_read(self, server: Server) -> None:
        first, second = server.open("run/train/1"), server.open("run/train/2")
        sealed = seal_reports(np.array([3, 4]), first.key)
        body = server.signed(Envelope("batch", second.id, bytes(16), sealed))
        for _ in range(2):
            found = server.ask("POST", "/v1/batches", body)
            assert found.status_code == 422
            assert found.json()["refused"] == {"unreadable": 2}
        assert server.counters()["reports_refused: unreadable"] == 2, "counted once"

    def test_whoever_is_no_registered_proxy(self, server: Server) -> None:
        epoch = server.open()
        body, (_, stranger) = server.batch(epoch, [1]), signing_keys()
        strange = sign_envelope(Envelope("batch", epoch.id, bytes(16), body[73:-64]), stranger)
        bent = bytearray(body)
        bent[-1] ^= 1
        for one, reason in ((strange, "unknown proxy"), (bytes(bent), "bad signature")):
            assert server.ask("POST", "/v1/batches", one).status_code == 401
            assert server.counters()[f"intake_refused: {reason}"] == 1
        server.records.remove_proxy("mixer")
        assert server.ask("POST", "/v1/batches", body).status_code == 401
        assert server.epochs.arrived(epoch.name) == 0

    @pytest.mark.parametrize(
        ("change", "status", "reason"),
        [
            (lambda body: body[:-1], 400, "malformed"),
            (lambda body: b"", 400, "malformed"),
            (lambda body: b"HBR2" + body[4:], 400, "malformed"),
            (lambda body: body[:4] + b"\x07" + body[5:], 400, "malformed"),
            (lambda body: body + bytes(MOST_BYTES), 413, "too large"),
        ],
    )
    def test_what_is_no_batch(self, light: Server, change: Callable[[bytes], bytes], status: int, reason: str) -> None:
        body = change(light.batch(light.open(), [1, 2]))
        assert light.ask("POST", "/v1/batches", body).status_code == status
        assert light.counters() == {f"intake_refused: {reason}": 1}

    def test_an_envelope_that_is_not_for_the_server(self, light: Server) -> None:
        epoch = light.open()
        sealed = seal_reports(np.array([1]), epoch.key)
        for envelope, status, reason in (
            (Envelope("message", epoch.id, bytes(16), sealed), 422, "wrong kind"),
            (Envelope("batch", epoch.id, bytes(16), b""), 400, "malformed"),
            (Envelope("batch", bytes(16), bytes(16), sealed), 404, "unknown epoch"),
        ):
            assert light.ask("POST", "/v1/batches", light.signed(envelope)).status_code == status
            assert light.counters()[f"intake_refused: {reason}"] == 1
        assert light.epochs.arrived(epoch.name) == 0

    def test_other_paths_and_ways(self, light: Server) -> None:
        assert light.ask("GET", "/health").json() == {"status": "ok"}
        assert light.ask("GET", "/v1/batches").status_code == 405
        assert light.ask("GET", "/").status_code == 404
        assert light.ask("GET", "/v1/epochs/zz").status_code == 404
        assert light.ask("GET", "/metrics").status_code == 404, "It is for this machine alone."
        assert light.ask("POST", "/v1/batches", b"", **{"content-length": "9" * 14}).status_code == 413

    def test_a_database_that_is_away_is_asked_again_later(
        self, light: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from homebody.errors import Unavailable

        def away(*_: Any) -> None:
            raise Unavailable("The disk is full.")

        epoch = light.open()
        body = light.batch(epoch, [1])
        with monkeypatch.context() as patched:
            patched.setattr(Epochs, "add", away)
            found = light.ask("POST", "/v1/batches", body)
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert "disk" not in found.text
        assert light.ask("POST", "/v1/batches", body).status_code == 200
        assert "The disk is full." in capsys.readouterr().err


def test_anything_at_all_is_answered_and_changes_nothing(light: Server) -> None:
    epoch = light.open()
    good = light.batch(epoch, [1, 2, 3])
    paths = st.one_of(
        st.sampled_from(["/v1/batches", f"/v1/epochs/{epoch.id.hex()}", "/v1/epochs/", "/health", "/metrics"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=40).map(lambda text: f"/v1/epochs/{text}"),
    )
    bent = st.builds(
        lambda at, bits: good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :],
        st.integers(0, len(good) - 1),
        st.integers(1, 255),
    )
    cut = st.builds(lambda start, end: good[start:end], st.integers(1, len(good)), st.integers(0, len(good) - 1))
    signed = st.builds(
        lambda kind, some, number, reports: light.signed(Envelope(kind, some, number, reports)),
        st.sampled_from(["message", "batch"]),
        st.one_of(st.just(epoch.id), st.binary(min_size=16, max_size=16)),
        st.binary(min_size=16, max_size=16),
        st.binary(max_size=4).map(lambda some: (some * (5 * REPORT_BYTES))[: len(some) * REPORT_BYTES]),
    )

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(["GET", "POST", "PUT", "HEAD", "DELETE"]), paths, st.one_of(st.binary(), bent, cut, signed))
    def asked(method: str, path: str, body: bytes) -> None:
        found = light.ask(method, path, body)
        assert found.status_code < 500
        if method == "POST":
            assert found.status_code >= 400
            assert set(found.json()) <= {"error", "accepted", "refused"}

    asked()
    assert light.epochs.arrived(epoch.name) == 0
    assert light.epochs.named(epoch.name) == epoch
    assert light.ask("POST", "/v1/batches", good).status_code == 200


class Process:
    """A real intake over TLS, to be killed and started again."""

    def __init__(self, folder: Path, database: str = "server.sqlite") -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.port = int(listening.getsockname()[1])
        items = folder / "items.csv"
        items.write_text("id\na\nb\nc\n")
        recipe = Recipe("fedmf", "devices", rounds=1, evaluate_every=0, stages=["one-bit:epsilon=2,k=4", "shuffle"])
        plan = ServerPlan(recipe, reports=f"127.0.0.1:{self.port}", metrics="", database=database)
        self.folder = folder / "server"
        make(self.folder, plan, str(items), [])
        self.records = Records(connect(plan.database_in(self.folder)))
        self.epochs = Epochs(self.records, self.folder)
        self.public, self.secret = signing_keys()
        self.records.add_proxy(self.public, "mixer")
        context = ssl.create_default_context(cadata=(self.folder / "keys" / "ca.pem").read_text())
        self.http = httpx.Client(
            base_url=f"https://localhost:{self.port}", verify=context, trust_env=False, timeout=PATIENCE
        )
        self.log = (folder / "intake.log").open("ab")
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "homebody.federation.server.intake", str(self.folder), "--follow-parent"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def post(self, body: bytes) -> httpx.Response:
        """As a proxy does: again and again until there is an answer."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                found = self.http.post("/v1/batches", content=body)
            except httpx.HTTPError:
                time.sleep(0.02)
                continue
            if found.status_code < 500 and found.status_code != 429:
                return found
        raise AssertionError("It never answered.")

    def close(self) -> None:
        self.http.close()
        self.kill()
        self.records.database.close()
        self.log.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close()


def torment(process: Process, batches: int, kills: int) -> None:
    """Send batches while the intake is killed at random moments: each is counted once."""
    import threading

    rng = np.random.default_rng(3)
    epoch = process.epochs.open("run/train/1", "d" * 32, k=4, entries=ENTRIES, seconds=600)
    pairs = rng.integers(0, 2 * ENTRIES, (batches, 40))
    bodies = [
        sign_envelope(Envelope("batch", epoch.id, os.urandom(16), seal_reports(own, epoch.key)), process.secret)
        for own in pairs
    ]
    done = threading.Event()

    def killing() -> None:
        for _ in range(kills):
            if done.wait(rng.uniform(0.3, 1.2)):
                return
            process.kill()
            process.start()

    thread = threading.Thread(target=killing)
    thread.start()
    while True:
        for body in bodies:
            assert process.post(body).json() == {"accepted": 40, "refused": {}}
        if not thread.is_alive():
            break
    done.set()
    thread.join()
    found = process.epochs.close(epoch.name, people=1)
    assert found.counts.tolist() == np.bincount(pairs.ravel(), minlength=2 * ENTRIES).tolist()
    assert process.records.counters()["reports_accepted"] == pairs.size


def test_an_intake_that_is_killed_counts_every_batch_once(process: Process) -> None:
    torment(process, batches=30, kills=3)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_an_intake_that_is_killed_again_and_again(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    database = "server.sqlite" if kind == "sqlite" else request.getfixturevalue("new_postgresql")
    process = Process(tmp_path, database)
    try:
        torment(process, batches=300, kills=40)
    finally:
        process.close()


def test_a_real_intake_answers_over_tls_says_no_address_and_ends_with_its_parent(process: Process) -> None:
    epoch = process.epochs.open("run/train/1", "d" * 32, k=4, entries=ENTRIES, seconds=600)
    assert process.post(b"nonsense").status_code == 400
    assert process.http.get(f"/v1/epochs/{epoch.id.hex()}").json() == epoch.to_json()
    told = process.http.get("/metrics").text
    assert "# TYPE homebody_" in told or told == ""
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"https://localhost:{process.port}/health", trust_env=False, timeout=PATIENCE)
    wait_until(lambda: "intake_refused: malformed" in process.records.counters(), "the refusal is counted")
    assert 'homebody_intake_refused_total{reason="malformed"} 1' in process.http.get("/metrics").text
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert process.process.wait(300) == 0
    said = (process.folder.parent / "intake.log").read_text()
    assert "127.0.0.1" not in said
    assert process.public.hex() not in said
    for line in said.splitlines():
        json.loads(line)


@pytest.mark.parametrize("what", ["taken", "none", "off"])
def test_an_intake_that_cannot_listen_says_so(process: Process, what: str) -> None:
    plan = process.folder / "server.toml"
    if what != "taken":
        plan.write_text(plan.read_text().replace(f"127.0.0.1:{process.port}", "" if what == "none" else what))
    else:
        # Settings of the next start are none of its business: it comes as far as listening, where another listens.
        plan.write_text(f"future = 1\n{plan.read_text()}")
        process.post(b"nonsense")
    again = subprocess.run(
        [sys.executable, "-P", "-m", "homebody.federation.server.intake", str(process.folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.returncode == 2
    sentence = "The service cannot listen on 127.0.0.1" if what == "taken" else "names no address for them"
    assert sentence in again.stderr
    assert MOST_REPORTS * REPORT_BYTES < MOST_BYTES

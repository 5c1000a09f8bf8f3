"""A proxy as a helper: one set an epoch, answered the same again whatever happens; and every refusal with its count."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.federation.proxy.conftest import Client, Device, Process, Upstream
from tests.processes import wait_until

from homebody.federation.proxy import sums
from homebody.federation.proxy.admin import allow, forbid, make, report
from homebody.federation.proxy.helper import MOST_VECTOR, SECONDS
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore
from homebody.federation.secure_sum.helped import ROW_BYTES, HelpedSum, HelpedTerms, HelperEpoch, sign_message
from homebody.federation.secure_sum.requests import sign_request

Made = Callable[..., tuple[Path, ProxySettings]]
Asking = Callable[..., Client]


TERMS = HelpedTerms("run", "round 1", parties=4, entries=6, width=4, depth=9)


@dataclass
class Sum:
    """A server with its devices, and one sum of theirs."""

    folder: Path
    devices: list[Device]
    server: Device = field(default_factory=Device)
    terms: HelpedTerms = TERMS
    number: bytes = field(default_factory=lambda: os.urandom(16))

    def begin(self, client: Client, seconds: float = 60.0, terms: bytes | None = None) -> Any:
        content = SECONDS.pack(seconds) + (self.terms.encode() if terms is None else terms)
        return client.ask("POST", "/v1/sums", sign_request("epoch", self.number, content, self.server.secret))

    def epoch(self, client: Client) -> HelperEpoch:
        answer = self.begin(client)
        assert answer.status_code == 200, answer.text
        return HelperEpoch.read(answer.json())

    def collected(self, epoch: HelperEpoch, devices: list[Device]) -> HelpedSum:
        total = HelpedSum(epoch)
        for number, device in enumerate(devices):
            vector = np.arange(6, dtype=np.uint64) + np.uint64(100 * number)
            assert total.take(number, sign_message(epoch, vector, device.secret))
        return total

    def set(self, client: Client, rows: bytes, number: bytes | None = None, server: Device | None = None) -> Any:
        body = sign_request("set", number or self.number, rows, (server or self.server).secret)
        return client.ask("POST", f"/v1/sums/{self.number.hex()}/set", body)


@pytest.fixture
def helped(made: Made) -> tuple[Sum, ProxySettings]:
    devices = [Device() for _ in range(4)]
    folder, settings = made(*devices, next="")
    world = Sum(folder, devices)
    allow(folder, [world.server.file(folder)], server=True)
    return world, settings


Helped = tuple[Sum, ProxySettings]


def test_a_set_is_opened_once_and_answered_the_same_again(helped: Helped, asking: Asking) -> None:
    world, settings = helped
    client = asking(world.folder, settings)
    epoch = world.epoch(client)
    assert epoch.terms == world.terms
    assert world.epoch(client) == epoch
    described = client.ask("GET", f"/v1/sums/{world.number.hex()}")
    assert HelperEpoch.read(described.json()) == epoch
    total = world.collected(epoch, world.devices)
    first = world.set(client, total.request())
    assert (first.status_code, len(first.content)) == (200, 24)
    numbers = total.opened(first.content).astype(np.uint32).view(np.int32)
    assert np.abs(numbers - (4 * np.arange(6) + 600)).max() < 12 * 2**9
    assert world.set(client, total.request()).content == first.content
    fewer = world.collected(epoch, world.devices[:3])
    second = world.set(client, fewer.request())
    assert (second.status_code, second.json()["error"]) == (
        409,
        "One set of an epoch is opened, and another one was.",
    )
    assert client.refused("second set", 1)


def test_what_was_answered_survives_a_restart_and_the_key_does_not(helped: Helped, asking: Asking) -> None:
    world, settings = helped
    client = asking(world.folder, settings)
    total = world.collected(world.epoch(client), world.devices)
    keys = world.folder / "sums"
    assert [path.stem for path in keys.iterdir()] == [world.number.hex()]
    answer = world.set(client, total.request()).content
    assert not list(keys.iterdir())
    client.close()
    again = asking(world.folder, settings)
    assert world.set(again, total.request()).content == answer
    assert world.set(again, total.request()[:-ROW_BYTES]).status_code == 409


@pytest.mark.parametrize("point", ["begin", "keep", "forget_secret"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_moment(
    helped: Helped, asking: Asking, monkeypatch: pytest.MonkeyPatch, point: str, after: bool
) -> None:
    """The process ends before or after it writes. Whoever asks again gets one answer for one set, and no other set is
    opened if an answer may have left."""
    world, settings = helped
    name = "open" if point == "begin" else point
    original = getattr(sums.EpochSums, name)

    def killed(*given: Any) -> Any:
        if after:
            original(*given)
        raise RuntimeError("killed")  # the transaction is undone, as after a kill

    first = asking(world.folder, settings)
    if point == "begin":
        with monkeypatch.context() as patch:
            patch.setattr(sums.EpochSums, name, killed)
            assert world.begin(first).status_code == 503
        first.close()
        second = asking(world.folder, settings)
        total = world.collected(world.epoch(second), world.devices)
        assert world.set(second, total.request()).status_code == 200
        return
    total = world.collected(world.epoch(first), world.devices)
    with monkeypatch.context() as patch:
        patch.setattr(sums.EpochSums, name, killed)
        assert world.set(first, total.request()).status_code == 503
    stored = first.service._store.sums.find(world.number, time.time())
    assert not isinstance(stored, str)
    first.close()
    second = asking(world.folder, settings)
    answer = world.set(second, total.request())
    assert answer.status_code == 200
    if stored.answer is not None:
        assert answer.content == stored.answer
    assert world.set(second, total.request()).content == answer.content
    assert world.set(second, total.request()[:-ROW_BYTES]).status_code == 409
    assert not list((world.folder / "sums").iterdir())


def test_a_closed_epoch_is_gone_for_good(helped: Helped, asking: Asking) -> None:
    world, settings = helped
    now = [time.time()]
    client = asking(world.folder, settings, clock=lambda: now[0])
    total = world.collected(world.epoch(client), world.devices)
    now[0] += 61
    wait_until(lambda: not list((world.folder / "sums").iterdir()), "the key is deleted")
    for answer in (
        world.set(client, total.request()),
        world.begin(client),
        client.ask("GET", f"/v1/sums/{world.number.hex()}"),
    ):
        assert answer.status_code == 410
    client.close()
    assert world.begin(asking(world.folder, settings)).status_code == 410


class TestRefusals:
    def test_strangers(self, helped: Helped, asking: Asking) -> None:
        world, settings = helped
        client = asking(world.folder, settings)
        known, stranger = world.server, Device()
        for server in (stranger, world.devices[0]):  # a device is no server
            world.server = server
            assert world.begin(client).status_code == 401
        world.server = known
        epoch = world.epoch(client)
        rows = world.collected(epoch, world.devices).request()
        assert world.set(client, rows, server=stranger).status_code == 401
        other = Device()
        allow(world.folder, [other.file(world.folder)], server=True)
        assert world.set(client, rows, server=other).status_code == 401
        assert client.refused("unknown server", 4)
        assert world.set(client, rows, number=bytes(16)).status_code == 401
        body = sign_request("set", world.number, rows, known.secret)
        path = f"/v1/sums/{world.number.hex()}/set"
        assert client.ask("POST", path, body[:-1] + bytes([body[-1] ^ 1])).status_code == 401
        assert client.refused("bad signature", 1)
        assert client.ask("POST", path, b"hello").status_code == 400
        wrong = sign_request("epoch", world.number, rows, known.secret)
        assert client.ask("POST", path, wrong).status_code == 400
        assert client.refused("malformed", 2)
        forbid(world.folder, [known.file(world.folder)])
        wait_until(lambda: world.begin(client).status_code == 401, "the proxy knows of it")
        assert world.set(client, rows).status_code == 401

    def test_sets_of_a_lying_server(self, helped: Helped, asking: Asking, capfd: pytest.CaptureFixture[str]) -> None:
        world, settings = helped
        client = asking(world.folder, settings)
        epoch = world.epoch(client)
        rows = world.collected(epoch, world.devices).request()
        parts = [rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]
        invented = world.collected(epoch, [*world.devices[:3], Device()]).request()
        lies = {
            "too few": b"".join(parts[:2]),
            "swapped": parts[0][:32] + parts[1][32:] + parts[1][:32] + parts[0][32:] + b"".join(parts[2:]),
            "twice": b"".join([*parts[:3], parts[0]]),
            "invented": invented,
            "not rows": rows[:-1],
        }
        for what, lie in lies.items():
            answer = world.set(client, lie)
            assert answer.status_code == 422, what
        assert world.set(client, invented).json()["faulty"] == {
            "3": "The helper does not know the device that signed the message."
        }
        assert client.refused("set refused", 6)
        assert world.set(client, rows + parts[0]).status_code == 413
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
        assert sum(line["event"] == "set refused" for line in lines) == 6
        assert world.set(client, rows).status_code == 200  # none of these was the one set

    def test_a_proxy_is_no_device(self, made: Made, asking: Asking) -> None:
        devices = [Device(), Device(), Device(), Upstream()]
        folder, settings = made(*devices, next="")
        world = Sum(folder, devices)
        allow(folder, [world.server.file(folder)], server=True)
        client = asking(folder, settings)
        answer = world.set(client, world.collected(world.epoch(client), devices).request())
        assert answer.json()["faulty"].keys() == {"3"}

    def test_a_message_of_another_epoch(self, helped: Helped, asking: Asking) -> None:
        world, settings = helped
        client = asking(world.folder, settings)
        old = world.collected(world.epoch(client), world.devices).request()
        world.number = os.urandom(16)
        world.epoch(client)
        answer = world.set(client, old)
        assert (answer.status_code, len(answer.json()["faulty"])) == (422, 4)

    def test_sums_that_make_no_sense(self, helped: Helped, asking: Asking) -> None:
        world, settings = helped
        client = asking(world.folder, settings)
        assert client.ask("GET", f"/v1/sums/{world.number.hex()}").status_code == 404
        assert client.ask("GET", "/v1/sums/xyz").status_code == 404
        assert world.set(client, bytes(ROW_BYTES)).status_code == 404
        for seconds in (0.5, 1e9, float("nan")):
            assert world.begin(client, seconds).status_code == 422
        for terms in (b"", b"HBH1", world.terms.encode() + b"x"):
            assert world.begin(client, terms=terms).status_code == 422
        large = HelpedTerms("run", "1", 4, MOST_VECTOR // 4 + 1, 4)
        assert world.begin(client, terms=large.encode()).status_code == 422
        assert client.refused("bad sum", 7)
        assert world.begin(client, terms=world.terms.encode() + bytes(2000)).status_code == 413
        world.epoch(client)
        other = HelpedTerms("run", "round 1", parties=4, entries=6, width=4)
        assert world.begin(client, terms=other.encode()).status_code == 409

    def test_only_so_many_are_open(self, helped: Helped, asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sums, "MOST_OPEN", 2)
        world, settings = helped
        client = asking(world.folder, settings)
        for status in (200, 200, 429):
            world.number, world.server = os.urandom(16), Device()
            allow(world.folder, [world.server.file(world.folder)], server=True)
            wait_until(lambda: world.begin(client).status_code != 401, "the proxy knows the server")
            assert world.begin(client).status_code == status

    def test_questions_of_strangers_are_limited(
        self, helped: Helped, asking: Asking, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Devices ask about a sum that is open; they are answered from memory."""
        world, settings = helped
        client = asking(world.folder, settings)
        world.epoch(client)
        path = f"/v1/sums/{world.number.hex()}"
        assert client.ask("GET", path).status_code == 200
        monkeypatch.setattr("homebody.federation.proxy.helper._MOST_WAITING", 0)
        assert client.ask("GET", path).status_code == 200
        assert client.ask("GET", f"/v1/sums/{bytes(16).hex()}").status_code == 429
        assert client.refused("overload", 1)

    def test_a_server_has_one_sum_at_a_time(self, helped: Helped, asking: Asking) -> None:
        """Its earlier sums are closed, and their keys and answers are gone."""
        world, settings = helped
        client = asking(world.folder, settings)
        total = world.collected(world.epoch(client), world.devices)
        assert world.set(client, total.request()).status_code == 200
        first, world.number = world.number, os.urandom(16)
        world.epoch(client)
        assert [path.stem for path in (world.folder / "sums").iterdir()] == [world.number.hex()]
        assert client.ask("GET", f"/v1/sums/{first.hex()}").status_code == 410

    def test_reports_are_not_taken_by_a_helper_alone(self, helped: Helped, asking: Asking) -> None:
        world, settings = helped
        client = asking(world.folder, settings)
        assert client.send(world.devices[0].body(bytes(52))).status_code == 404


def test_two_sets_at_a_time(helped: Helped, asking: Asking) -> None:
    world, settings = helped
    client = asking(world.folder, settings)
    epoch = world.epoch(client)
    requests = [world.collected(epoch, world.devices[:count]).request() for count in (3, 4)]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda rows=rows: found.append(world.set(client, rows).status_code))
        for rows in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [200, 409]


def test_an_operator_lets_servers_in(tmp_path: Path) -> None:
    make(tmp_path / "proxy", ProxySettings(next=""))
    server = Device()
    assert allow(tmp_path / "proxy", [server.file(tmp_path)], server=True) == 1
    state = report(tmp_path / "proxy")
    assert (state["servers"], state["sums"], state["devices"]) == (1, 0, 0)
    assert forbid(tmp_path / "proxy", [server.file(tmp_path)]) == 0
    assert report(tmp_path / "proxy")["servers"] == 0


@pytest.mark.faults
def test_a_killed_process_answers_the_same(helped: Helped, started: Callable[..., Process]) -> None:
    import httpx

    world, settings = helped

    class Over:
        def ask(self, method: str, path: str, body: bytes = b"") -> Any:
            return httpx.request(method, f"http://127.0.0.1:{settings.port}{path}", content=body, timeout=60)

    client: Any = Over()
    process = started(world.folder, settings)
    total = world.collected(world.epoch(client), world.devices)
    process.kill()
    process = process.start()
    answer = world.set(client, total.request())
    assert answer.status_code == 200
    process.kill()
    process.start()
    assert world.set(client, total.request()).content == answer.content


def test_an_older_database_is_carried_forward(tmp_path: Path) -> None:
    from homebody.database import connect
    from homebody.federation.proxy import store

    folder, settings = tmp_path / "proxy", ProxySettings(next="")
    make(folder, settings)
    (folder / store.DATABASE).unlink()
    database = connect(folder / store.DATABASE, what="proxy's database")
    database.migrate("proxy", [store._TABLES])
    database.put("proxy", secret=bytes(32))
    database.close()
    opened = ProxyStore(folder, settings)
    assert opened.sums.servers() == set()
    opened.close()

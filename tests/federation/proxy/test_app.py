"""A proxy's endpoints: every answer, every refusal with its count, and nothing told of a sender."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.federation.proxy.conftest import EPOCH, Client, Device, Sink, Upstream, reports, split
from tests.processes import PATIENCE, wait_until

from homebody.errors import Unavailable
from homebody.federation.envelopes import HEAD_BYTES, REPORT_BYTES, SIGNATURE_BYTES, sign_envelope
from homebody.federation.proxy.admin import allow, forbid
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import DATABASE, ProxyStore, keyed

Made = Callable[..., tuple[Path, ProxySettings]]


def test_reports_come_in_and_go_out(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    devices = [Device() for _ in range(3)]
    client = asking(*made(*devices, least_devices=3))
    sealed = [reports(4) for _ in devices]
    for device, some in zip(devices, sealed, strict=True):
        answer = client.send(device.body(some))
        assert (answer.status_code, answer.json()) == (200, {"accepted": 4})
    wait_until(lambda: len(sink.came()) == 12, "everything has arrived")
    assert sorted(sink.came()) == sorted(report for some in sealed for report in split(some))
    wait_until(lambda: client.counts().get("forwarded_reports_total") == 12, "it is counted")
    counts = client.counts()
    assert (counts["accepted_reports_total"], counts["accepted_messages_total"], counts["held_reports"]) == (12, 3, 0)


def test_nothing_goes_out_while_too_few_have_reported(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    device = Device()
    client = asking(*made(device, least_devices=2))
    assert client.send(device.body(reports(4))).status_code == 200
    time.sleep(1.0)
    assert (sink.asked["batch"], client.counts()["held_reports"]) == (0, 4)


@pytest.mark.parametrize(
    ("spoil", "status", "reason"),
    [
        (lambda body: b"", 400, "malformed"),
        (lambda body: b"hello", 400, "malformed"),
        (lambda body: body[:-1], 400, "malformed"),
        (lambda body: body + b"x", 400, "malformed"),
        (lambda body: b"XXXX" + body[4:], 400, "malformed"),
        (lambda body: body[:4] + b"\x07" + body[5:], 400, "malformed"),
        (lambda body: body[:-1] + bytes([body[-1] ^ 1]), 401, "bad signature"),
        (lambda body: body[:60] + bytes([body[60] ^ 1]) + body[61:], 401, "bad signature"),
        (lambda body: body[:-70] + bytes([body[-70] ^ 1]) + body[-69:], 401, "bad signature"),
        (lambda body: bytes(HEAD_BYTES + 4097 * REPORT_BYTES + SIGNATURE_BYTES), 413, "too large"),
    ],
)
def test_a_spoilt_message_is_refused_and_counted(
    made: Made, asking: Callable[..., Client], spoil: Callable[[bytes], bytes], status: int, reason: str
) -> None:
    device = Device()
    client = asking(*made(device))
    answer = client.send(spoil(device.body(reports(3))))
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert client.refused(reason, 1)
    assert "accepted_reports_total" not in client.counts()


def test_a_message_without_a_report_is_refused(made: Made, asking: Callable[..., Client]) -> None:
    device = Device()
    client = asking(*made(device))
    assert client.send(device.body(b"")).status_code == 400


def test_a_body_in_chunks_is_read_as_far_as_it_may_go(made: Made, asking: Callable[..., Client]) -> None:
    device = Device()
    client = asking(*made(device))
    body = device.body(reports(3))
    assert client.ask("POST", "/v1/reports", [body[:10], body[10:]]).status_code == 200
    assert client.ask("POST", "/v1/reports", [bytes(10_000)] * 100).status_code == 413
    assert client.refused("too large", 1)


def test_strangers_are_refused_and_so_is_the_wrong_door(made: Made, asking: Callable[..., Client]) -> None:
    device, upstream = Device(), Upstream()
    client = asking(*made(device, upstream))
    assert client.send(Device().body(reports(1))).status_code == 401
    assert client.send(Upstream().body(reports(1)), "/v1/batches").status_code == 401
    assert client.send(device.body(reports(1)), "/v1/batches").status_code == 422
    assert client.send(upstream.body(reports(1))).status_code == 422
    # A device that calls its message a batch has no limit of its own then: it is none.
    as_batch = device.envelope(reports(1))._replace(kind="batch")
    assert client.send(sign_envelope(as_batch, device.secret), "/v1/batches").status_code == 401
    as_message = upstream.envelope(reports(1))._replace(kind="message")
    assert client.send(sign_envelope(as_message, upstream.secret)).status_code == 401
    assert client.refused("unknown sender", 4)
    assert client.refused("wrong kind", 2)
    assert client.counts()["held_reports"] == 0


def test_a_repetition_gets_the_same_answer_and_another_content_does_not(
    made: Made, asking: Callable[..., Client]
) -> None:
    device, number = Device(), os.urandom(16)
    client = asking(*made(device, least_devices=2))
    body = device.body(reports(3), number=number)
    first, second = client.send(body), client.send(body)
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert client.send(device.body(reports(3), number=number)).status_code == 409
    counts = client.counts()
    assert (counts["held_reports"], counts["repeated_messages_total"]) == (3, 1)
    assert client.refused("conflict", 1)


def test_too_much_of_one_device_is_refused_for_good(made: Made, asking: Callable[..., Client]) -> None:
    device = Device()
    client = asking(*made(device, least_devices=2))
    assert client.send(device.body(reports(8))).status_code == 200
    answer = client.send(device.body(reports(3)))
    assert answer.status_code == 429
    assert answer.json() == {"error": "This device may send 10 reports in this epoch, and no more.", "limit": True}
    assert "retry-after" not in answer.headers
    assert client.refused("over its limit", 1)


def test_a_full_disk_of_reports_refuses_more_for_a_while(made: Made, asking: Callable[..., Client]) -> None:
    devices = [Device() for _ in range(3)]
    client = asking(*made(*devices, least_devices=9, most_held=10))
    assert client.send(devices[0].body(reports(7))).status_code == 200
    answer = client.send(devices[1].body(reports(7)))
    assert (answer.status_code, "limit" in answer.json()) == (429, False)
    assert int(answer.headers["retry-after"]) > 0
    assert client.refused("full", 1)


def test_more_than_memory_may_hold_is_refused_for_a_while(made: Made, asking: Callable[..., Client]) -> None:
    device = Device()
    client = asking(*made(device, queue=2 << 20))
    room = client.service.room
    with room.holding() as share:
        share.take((2 << 20) - 100)
        answer = client.send(device.body(reports(3)))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert client.send(device.body(reports(3))).status_code == 200
    assert client.refused("overload", 1)
    assert room.taken == 0


def test_an_epoch_is_what_the_next_hop_first_said_of_it(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    folder, settings = made(Device())
    client = asking(folder, settings)
    first = client.ask("GET", f"/v1/epochs/{EPOCH.hex()}")
    assert (first.status_code, first.json()["k"], first.json()["key"]) == (200, 10, "ab" * 32)
    assert first.json()["closes"] == pytest.approx(sink.closes - 5)
    sink.k = 99
    assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").json() == first.json()
    assert sink.asked["epoch"] == 1
    client.close()
    again = asking(folder, settings)
    assert again.ask("GET", f"/v1/epochs/{EPOCH.hex()}").json() == first.json()
    assert sink.asked["epoch"] == 1


def test_an_unknown_epoch_is_asked_for_once_in_a_while(
    made: Made, asking: Callable[..., Client], sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.federation.proxy.epochs._REMEMBERED", 60.0)
    device = Device()
    client = asking(*made(device))
    sink.epoch_status = 404
    for _ in range(3):
        assert client.send(device.body(reports(1))).status_code == 404
        assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 404
    assert sink.asked["epoch"] == 1
    assert client.ask("GET", "/v1/epochs/no").status_code == 404
    assert client.ask("GET", f"/v1/epochs/{'G' * 32}").status_code == 404
    assert client.refused("unknown epoch", 8)


def test_strangers_who_invent_epochs_are_not_in_the_way_of_those_who_may_send(
    made: Made, asking: Callable[..., Client], sink: Sink
) -> None:
    device = Device()
    client = asking(*made(device))
    sink.known = EPOCH
    sink.slow.clear()
    strangers = [client.begin("GET", f"/v1/epochs/{os.urandom(16).hex()}") for _ in range(30)]
    wait_until(lambda: sink.asked["epoch"] == 4, "four are being asked about")
    honest = client.begin("GET", f"/v1/epochs/{EPOCH.hex()}")
    time.sleep(0.3)
    assert sink.asked["epoch"] == 4
    assert client.send(device.body(reports(1))).status_code == 200
    assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 200  # now everybody may know
    assert not honest.done()
    sink.slow.set()
    assert honest.result(PATIENCE).status_code == 200
    assert {stranger.result(PATIENCE).status_code for stranger in strangers} == {404}


def test_whoever_waits_too_long_for_a_turn_is_told_to_come_again(
    made: Made, asking: Callable[..., Client], sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.federation.proxy.epochs._TURN_SECONDS", 0.2)
    monkeypatch.setattr("homebody.federation.proxy.epochs._MOST_WAITING", 6)
    client = asking(*made(Device()))
    sink.known = EPOCH
    sink.slow.clear()
    strangers = [client.begin("GET", f"/v1/epochs/{os.urandom(16).hex()}") for _ in range(6)]
    wait_until(lambda: sink.asked["epoch"] == 4, "four are being asked about")
    crowd = client.ask("GET", f"/v1/epochs/{EPOCH.hex()}")
    assert (crowd.status_code, crowd.headers["retry-after"]) == (429, "1")
    wait_until(lambda: sum(one.done() for one in strangers) == 2, "two have waited for long enough")
    late = client.ask("GET", f"/v1/epochs/{EPOCH.hex()}")
    assert (late.status_code, late.headers["retry-after"]) == (429, "1")
    sink.slow.set()
    assert sorted(one.result(PATIENCE).status_code for one in strangers) == [404] * 4 + [429] * 2
    assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 200


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_next_hop_that_cannot_be_asked_is_said_once_and_so_is_its_return(
    made: Made, asking: Callable[..., Client], sink: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    client = asking(*made(Device()))
    sink.epoch_status = 500
    for _ in range(3):
        assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 503
    sink.epoch_status = 404
    for _ in range(3):
        assert client.ask("GET", f"/v1/epochs/{os.urandom(16).hex()}").status_code == 404
    said = [{name: value for name, value in one.items() if name != "time"} for one in events(capsys.readouterr().err)]
    assert said[:3] == [
        {"event": "started"},
        {"event": "cannot ask the next hop", "next": sink.url, "why": "it answered 500"},
        {"event": "the next hop answers again", "next": sink.url},
    ]
    assert [one["event"] for one in said[3:]] == ["the next hop knows no such epoch"]
    assert said[3]["next"] == sink.url


def test_a_closed_epoch_is_gone(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    device = Device()
    client = asking(*made(device))
    sink.epoch_status = 410
    assert client.send(device.body(reports(1))).status_code == 410
    sink.epoch_status, sink.closes = 200, time.time() - 1
    other = os.urandom(16)
    assert client.send(device.body(reports(1), epoch=other)).status_code == 410
    assert client.ask("GET", f"/v1/epochs/{other.hex()}").status_code == 410
    assert client.refused("epoch closed", 3)


def test_an_epoch_without_an_end_in_sight_is_refused(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    """What keys the lists of who sent how much is kept until then."""
    client = asking(*made(Device()))
    sink.closes = time.time() + 8 * 86_400 + 60
    assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 503
    sink.closes -= 120
    assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 200


def test_too_few_keys_are_said_at_the_start_and_too_few_devices_at_the_end(
    made: Made, asking: Callable[..., Client], sink: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [time.time()]
    sink.closes = now[0] + 1000
    device = Device()
    client = asking(*made(device, least_devices=50), clock=lambda: now[0])
    assert client.send(device.body(reports(2))).status_code == 200
    now[0] += 1000
    wait_until(lambda: client.counts().get('dropped_total{reason="too few devices"}') == 2, "it is dropped")
    client.close()
    asking(*made(Upstream(), name="second", least_devices=50)).close()  # it may bring reports of many
    said = events(capsys.readouterr().err)
    (few,) = (one for one in said if one["event"].startswith("too few may send"))
    assert (few["devices"], few["least_devices"]) == (1, 50)
    (closed,) = (one for one in said if one["event"] == "epoch closed")
    assert (closed["dropped"], closed["why"]) == (2, "too few devices: 1 of 50")


def test_a_log_that_cannot_be_brought_in_is_said_and_tried_again(
    made: Made, asking: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("homebody.federation.proxy.writer.CHECKPOINT", 0.05)
    tried: list[str] = []
    real = sqlite3.connect

    def connect(path: Any, *rest: Any, **more: Any) -> Any:
        if threading.current_thread().name == "checkpoints":
            tried.append("")
            if len(tried) < 3:
                raise sqlite3.OperationalError("unable to open database file")
        return real(path, *rest, **more)

    monkeypatch.setattr(sqlite3, "connect", connect)
    device = Device()
    client = asking(*made(device))
    assert client.send(device.body(reports(2))).status_code == 200
    wait_until(lambda: len(tried) == 3, "it opens the database at the third time")
    client.close()
    assert [one["why"] for one in events(capsys.readouterr().err) if one["event"] == "cannot checkpoint"] == [
        "unable to open database file"
    ]


def test_an_epoch_closes_while_the_proxy_runs(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    """By a clock of our own."""
    now = [time.time()]
    sink.closes = now[0] + 1000
    device, other = Device(), Device()
    client = asking(*made(device, other, least_devices=2), clock=lambda: now[0])
    body = device.body(reports(2))
    assert client.send(body).status_code == 200
    now[0] += 994
    assert client.send(body).status_code == 200
    now[0] += 2
    assert client.send(body).status_code == 410
    assert client.ask("GET", f"/v1/epochs/{EPOCH.hex()}").status_code == 410
    wait_until(lambda: client.counts().get('dropped_total{reason="too few devices"}') == 2, "it is dropped")
    wait_until(lambda: client.counts()["held_reports"] == 0, "it is swept away")


def test_a_busy_proxy_keeps_nothing_that_tells_who_sent_in_a_closed_epoch(
    made: Made, asking: Callable[..., Client], sink: Sink
) -> None:
    """The log of what was written together, too, although there is always more to do; and while somebody reads."""
    now = [time.time()]
    sink.closes = now[0] + 1000
    devices, busy, later = [Device() for _ in range(8)], Device(people=10_000), os.urandom(16)
    folder, settings = made(*devices, busy, least_devices=100)
    client = asking(folder, settings, clock=lambda: now[0])
    for _ in range(4):  # what follows stands far behind in the log, where little is written later
        assert client.send(busy.body(reports(4096))).status_code == 200
    for device in devices:
        assert client.send(device.body(reports(3))).status_code == 200
    secret = (folder / "epochs" / f"{EPOCH.hex()}.secret").read_bytes()
    marks = [keyed(secret, device.key) for device in devices]

    def left() -> bytes:
        return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())

    assert all(mark in left() for mark in marks)
    sink.closes = now[0] + 100_000
    client.ask("GET", f"/v1/epochs/{later.hex()}")
    reader = sqlite3.connect(folder / DATABASE, isolation_level=None)
    reader.execute("BEGIN").execute("SELECT count(*) FROM held").fetchone()
    now[0] += 996
    stop = threading.Event()

    def send_on() -> None:
        while not stop.is_set():
            assert client.send(busy.body(reports(1), epoch=later)).status_code == 200
            time.sleep(0.2)

    sending = threading.Thread(target=send_on)
    sending.start()
    try:
        wait_until(lambda: not list((folder / "epochs").glob(f"{EPOCH.hex()}*")), "the epoch closes")
        reader.close()
        wait_until(lambda: not [mark for mark in marks if mark in left()], "its marks are gone", 20)
    finally:
        stop.set()
        sending.join()
        reader.close()
    assert secret not in left()


@pytest.mark.parametrize(("status", "said"), [(500, None), (200, {"epoch": "00" * 16}), (200, [])])
def test_a_next_hop_that_makes_no_sense_is_asked_again(
    made: Made, asking: Callable[..., Client], sink: Sink, monkeypatch: pytest.MonkeyPatch, status: int, said: Any
) -> None:
    device = Device()
    client = asking(*made(device))
    sink.epoch_status = status
    if said is not None:
        monkeypatch.setattr("tests.federation.proxy.conftest.facts", lambda *_: said)
    answer = client.send(device.body(reports(1)))
    assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (503, True)
    assert client.refused("next hop away", 1)
    sink.epoch_status = 200
    monkeypatch.undo()
    assert client.send(device.body(reports(1))).status_code == 200


def test_answers_of_the_next_hop_are_for_good_or_not(made: Made, asking: Callable[..., Client], sink: Sink) -> None:
    device = Device(people=10)
    client = asking(*made(device))
    for status in (401, 404, 413, 429, 500):  # whoever runs the next hop may yet put it right
        sink.status, before = status, sink.asked["batch"]
        assert client.send(device.body(reports(2))).status_code == 200
        wait_until(lambda before=before: sink.asked["batch"] >= before + 2, f"{sink.status} is tried again")
    sink.status = 200
    wait_until(lambda: len(sink.came()) == 10, "everything arrives in the end")
    assert len(set(sink.came())) == 10
    sink.status = 422
    client.send(device.body(reports(3)))
    refused = 'dropped_total{reason="refused by the next hop"}'
    wait_until(lambda: client.counts().get(refused) == 3, "it is dropped")
    sink.status = 410
    client.send(device.body(reports(4)))
    closed = 'dropped_total{reason="closed by the next hop"}'
    wait_until(lambda: client.counts().get(closed) == 4, "it is dropped")
    assert client.send(device.body(reports(1))).status_code == 410  # the epoch is over


def test_a_batch_that_was_under_way_at_the_end_is_sent_at_the_start(
    made: Made, asking: Callable[..., Client], sink: Sink
) -> None:
    device = Device()
    folder, settings = made(device)
    sink.status = 500
    client = asking(folder, settings)
    sealed = reports(5)
    assert client.send(device.body(sealed)).status_code == 200
    wait_until(lambda: sink.asked["batch"], "it is sent")
    client.close()
    sink.status = 200
    asking(folder, settings)
    wait_until(lambda: sorted(sink.came()) == sorted(split(sealed)), "it has arrived")


def test_who_may_send_can_change_while_it_runs(made: Made, asking: Callable[..., Client], tmp_path: Path) -> None:
    device, settled = Device(), Device()
    folder, settings = made(settled)
    client = asking(folder, settings)
    assert client.send(device.body(reports(1))).status_code == 401
    allow(folder, [device.file(tmp_path)])
    wait_until(lambda: client.send(device.body(reports(1))).status_code == 200, "it is let in")
    forbid(folder, [device.file(tmp_path)])
    wait_until(lambda: client.send(device.body(reports(1))).status_code == 401, "it is shut out")
    assert client.send(settled.body(reports(1))).status_code == 200


def test_nothing_is_acknowledged_that_cannot_be_written(
    made: Made, asking: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    client = asking(*made(device, least_devices=2))
    assert client.ask("GET", "/health").json() == {"status": "ok"}
    body, number = reports(2), os.urandom(16)

    def full(*_: Any) -> Any:
        raise Unavailable("The disk takes no more.")

    client.ask("GET", f"/v1/epochs/{EPOCH.hex()}")
    monkeypatch.setattr(ProxyStore, "cut", full)  # after everything else: what was written before must be undone
    answer = client.send(device.body(body, number=number))
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert client.ask("GET", "/health").status_code == 503
    monkeypatch.undo()
    wait_until(lambda: client.ask("GET", "/health").status_code == 200, "it recovers")
    assert client.counts()["held_reports"] == 0
    assert client.send(device.body(body, number=number)).status_code == 200
    assert client.counts()["held_reports"] == 2
    assert client.refused("cannot write", 1)  # counted although nothing could be written then


def test_counts_are_for_this_machine_alone(made: Made, asking: Callable[..., Client]) -> None:
    client = asking(*made(Device()))
    assert client.ask("GET", "/metrics").status_code == 200
    assert client.ask("GET", "/metrics", address="192.0.2.7").status_code == 404
    assert client.ask("GET", "/health", address="192.0.2.7").status_code == 200


def test_what_is_not_there_is_said_in_the_same_way(made: Made, asking: Callable[..., Client]) -> None:
    client = asking(*made(Device()))
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/reports", 405), ("DELETE", "/health", 405)):
        answer = client.ask(method, path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert client.refused("no such request", 3)

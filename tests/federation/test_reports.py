"""Rounds whose updates come back as sealed reports, in one process and without a network: what arrives is what was
sent, whoever is killed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Cohort, releases
from homebody.errors import Abandoned, HomebodyError
from homebody.federation import wire
from homebody.federation.device.device import Device
from homebody.federation.device.household import Household
from homebody.federation.device.reporter import Reporter
from homebody.federation.envelopes import (
    REPORT_BYTES,
    Envelope,
    open_envelope,
    seal_reports,
    sign_envelope,
    signing_keys,
)
from homebody.federation.epoch import SEAL_BYTES, Epoch
from homebody.federation.server.admin import report
from homebody.federation.server.epochs import Epochs
from homebody.federation.server.intake import Intake
from homebody.federation.server.letters import resting
from homebody.federation.server.runtime import Flower
from homebody.federation.service.web import Refusal
from homebody.federation.task import Task, asks, metric_names
from homebody.privacy import ShuffledReports
from homebody.privacy.events import Reports, event_from_json
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.simulation.clients import Clients

K = 12
PLAN = Recipe("fedmf", "devices", rounds=4, seed=3, evaluate_every=0, stages=[f"one-bit:epsilon=2,k={K}", "shuffle"])
People = Callable[..., Any]


class Mixer:
    """Stands for the proxy, and is in the same process: it takes every message once, and holds reports until told."""

    def __init__(self, one: Any) -> None:
        self.epochs = Epochs(one.records, one.folder, clock=lambda: one.clock.now)
        self.intake = Intake(self.epochs, threads=1)
        self.public, self._secret = signing_keys()
        one.records.add_proxy(self.public, "mixer")
        self.held: dict[bytes, bytes] = {}
        self.numbers: dict[bytes, bytes] = {}
        self.holding, self.broken = False, ""
        self.lies: dict[str, Any] = {}

    def reporter(self, sent: list[list[int]]) -> Reporter:
        mixer, made = self, Reporter("http://127.0.0.1:1", ca=None, secret=signing_keys()[1])
        seal = made.sealed

        def sealed(epoch: Epoch, pairs: Any) -> bytes:
            sent.append(pairs.tolist())
            return seal(epoch, pairs)

        made.sealed = sealed  # type: ignore[method-assign]
        made._once = lambda method, path, body: mixer.answer(method, path, body)  # type: ignore[method-assign]
        return made

    def answer(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any], float]:
        if method == "GET":
            found = self.epochs.find(bytes.fromhex(path.rpartition("/")[2]))
            return (404, {}, 0.0) if found is None else (200, {**found.to_json(), **self.lies}, 0.0)
        assert body is not None
        if self.broken:
            return 400, {"error": self.broken}, 0.0
        _, message = open_envelope(body)
        if self.numbers.setdefault(message.number, body) is body:
            self.held[message.epoch] = self.held.get(message.epoch, b"") + message.reports
        if not self.holding:
            self.release()
        return 200, {"accepted": message.size}, 0.0

    def release(self) -> None:
        for epoch, reports in self.held.items():
            known = self.epochs.find(epoch)
            assert known is not None
            batch = sign_envelope(
                Envelope("batch", epoch, os.urandom(16), reports, known.size + SEAL_BYTES), self._secret
            )
            try:
                answer = self.intake.take(batch)
            except Refusal as refusal:
                if refusal.status == 410:
                    continue
                raise
            assert answer.status_code == 200
            assert json.loads(bytes(answer.body))["refused"] == {}
        self.held.clear()


@pytest.fixture
def mixed(town: Callable[..., Any], people: People) -> Callable[..., Any]:
    """A town whose devices report through a mixer: the town, the mixer, and what each device has sealed."""

    def make(sizes: tuple[int, ...] = (3, 1, 3), plan: Recipe = PLAN, **more: Any) -> tuple[Any, Mixer, list[Any]]:
        one = town(people(), sizes, plan, reports="127.0.0.1:9093", least=sum(sizes), **more)
        one.folder = one.homes[0].path.parent
        mixer, sent = Mixer(one), [[] for _ in sizes]
        for number, home in enumerate(one.homes):
            one.mail.devices[f"mark{number}"] = one.device(home, mixer.reporter(sent[number]))
        return one, mixer, sent

    return make


def runtime(one: Any, mixer: Mixer) -> Flower:
    return Flower(one.mail, one.records, one.plan, epochs=mixer.epochs, log=one.log)


def fit(one: Any, mixer: Mixer, **more: Any) -> Any:
    from homebody.training import fit as train

    recipe = one.recipe
    asked = {
        "rounds": recipe.rounds,
        "seed": recipe.seed,
        "ledger": one.records.ledger(),
        "evaluate_every": recipe.every(recipe.build()),
        "on_round": one.records.add_round,
        "checkpoints": one.records,
    }
    return train(one.plan.method(), runtime(one, mixer), **{**asked, **more})


def test_what_arrives_is_exactly_what_was_sent(mixed: Callable[..., Any]) -> None:
    one, mixer, sent = mixed()
    fit(one, mixer)
    # Seven people, K reports each, in each of four rounds.
    assert [len(messages) for messages in sent] == [3 * 4, 4, 3 * 4]
    assert all(len(message) == K for messages in sent for message in messages)
    epoch = mixer.epochs.named(f"{one.plan.run}/train/4")
    last = [pair for messages in (sent[0][-3:], sent[1][-1:], sent[2][-3:]) for message in messages for pair in message]
    closed = mixer.epochs.closed(f"{one.plan.run}/train/4")
    assert epoch.entries == one.records.load().shared["item"].numel() == len(closed.counts) // 2
    assert closed.counts.tolist() == np.bincount(last, minlength=2 * epoch.entries).tolist()
    assert closed.people == 7
    assert one.records.counters()["reports_accepted"] == 7 * K * 4
    # A letter says that its people reported, and nothing of what.
    parts = [wire.decode_letter(body)[1] for _, kind, body in one.mail.answers if kind == "train"]
    assert all(part == wire.encode_tree({}) for letter in parts for part in letter.values())
    assert not list((one.folder / "epochs").iterdir())


def test_the_model_is_that_of_a_simulation_whose_devices_draw_the_same(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Noise comes from the system on a device; here it is drawn as a simulation draws it.
    monkeypatch.setattr(Household, "_leave", Clients._leave)
    monkeypatch.setattr(Household, "stream", Clients.stream)
    one, mixer, _ = mixed()
    found, wanted = fit(one, mixer), one.simulated()
    one.near(found.shared, wanted.shared, tolerance=1e-6)
    untrained = one.simulated(rounds=1)
    assert not torch.allclose(untrained.shared["item"], wanted.shared["item"], atol=1e-3)


def test_the_server_counts_on_the_shuffle_and_a_device_does_not(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    fit(one, mixer, rounds=1)
    charged = [
        {event_from_json(entry.event) for entry in ledger.entries() if entry.unit == "user"}
        for ledger in (one.records.ledger(), one.homes[0].ledger(0))
    ]
    assert charged == [{ShuffledReports(2.0, K, 7)}, {Reports(2.0, K)}]
    assert one.homes[0].outbox.reports() == 3 * K


def test_people_who_may_be_missing_are_not_counted_on(mixed: Callable[..., Any]) -> None:
    one, _, _ = mixed(quorum=0.5)
    cohort = Cohort(np.arange(7), "all", 7, 7)
    assert releases(one.plan.method(), cohort)[0].event == ShuffledReports(2.0, K, 4)
    with pytest.raises(HomebodyError, match="counts on 5 people, but 4 are enough for a round"):
        replace(one.plan, recipe=replace(PLAN, stages=["one-bit:epsilon=2,k=3", "shuffle:users=5"])).method()


def test_an_epoch_waits_for_all_reports_of_those_who_reported(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed(quorum=0.5)
    mixer.holding = True
    began, sleep, held = one.clock.now, one.clock.sleep, dict[bytes, bytes]()

    def later(seconds: float) -> None:
        sleep(seconds)
        if one.clock.now - began > 10 and not held:  # enough for the quorum, and not all
            held.update({epoch: reports[5 * K * REPORT_BYTES :] for epoch, reports in mixer.held.items()})
            mixer.held = {epoch: reports[: 5 * K * REPORT_BYTES] for epoch, reports in mixer.held.items()}
            mixer.release()
        if one.clock.now - began > 20:
            mixer.held = dict(held)
            mixer.release()

    one.clock.sleep = later
    fit(one, mixer, rounds=1)
    assert 20 < one.clock.now - began < 25
    assert one.told() == ["train/1"]
    assert mixer.epochs.named(f"{one.plan.run}/train/1").arrived == 7 * K


def test_a_round_whose_reports_do_not_come_is_abandoned_and_its_epoch_closed(mixed: Callable[..., Any]) -> None:
    one, mixer, sent = mixed()
    mixer.holding = True
    sleep = one.clock.sleep

    def later(seconds: float) -> None:
        sleep(seconds)
        if one.records.counters().get("rounds_abandoned"):
            mixer.release()

    one.clock.sleep = later
    fit(one, mixer, rounds=1)
    (said,) = one.said("abandoned")
    assert "0 reports arrived before their epoch closed, and 84 must" in said["reason"]
    first, second = (mixer.epochs.named(f"{one.plan.run}/train/1{again}") for again in ("", "#2"))
    assert first.people == 7, "It is closed, and what opens its reports is gone."
    assert first.key != second.key
    assert second.arrived == 7 * K
    # Sealed to another key they are other reports, and are charged anew: on the device too.
    assert one.told() == ["train/1", "train/1#2"]
    assert one.own(0, 0) == ["train/1", "train/1"]
    assert sent[0][0] != sent[0][3]


def test_a_device_that_is_killed_sends_the_very_same_message_again(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, mixer, sent = mixed()
    real, bodies = Mixer.answer, list[bytes]()

    def answer(self: Mixer, method: str, path: str, body: bytes | None) -> Any:
        if body is None:
            return real(self, method, path, body)
        bodies.append(body)
        given = real(self, method, path, body) if len(bodies) != 1 else None  # lost on its way there, or back
        if len(bodies) <= 2:
            raise Killed
        return given

    monkeypatch.setattr(Mixer, "answer", answer)
    for _ in range(2):
        with pytest.raises(Killed):
            fit(one, mixer, rounds=1)
    fit(one, mixer, rounds=1)
    assert bodies[0] == bodies[1] == bodies[2]
    assert [len(messages) for messages in sent] == [3, 1, 3]
    assert one.own(0, 0) == one.own(1, 0) == one.told() == ["train/1"]
    assert mixer.epochs.named(f"{one.plan.run}/train/1").arrived == 7 * K


def test_a_large_household_sends_as_few_messages_as_it_can(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.federation.device.device.MESSAGE_REPORTS", 2 * K + 1)
    one, mixer, _ = mixed((5, 2))
    fit(one, mixer, rounds=2)
    assert sorted(open_envelope(body)[1].size for body in mixer.numbers.values()) == sorted(
        [2 * K, 2 * K, K, 2 * K] * 2
    )
    assert one.homes[0].outbox.messages("nosuch") == []


def test_who_joins_a_household_while_a_round_goes_on_has_a_message_of_their_own(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    fit(one, mixer, rounds=1)
    device, home, (letter,) = one.mail.devices["mark0"], one.homes[0], letters(one, "mark0")
    ask = Task.read(wire.decode_letter(letter)[0]).ask
    (before,) = home.outbox.messages(ask)
    assert before.people == [0, 1, 2]
    home.people.add("late")
    mixer.epochs.closed = lambda name: None
    mixer.answer = lambda method, path, body: (  # the epoch is closed by now, and this proxy does not know it
        (200, wire.decode_letter(letter)[0]["epoch"], 0.0) if body is None else (200, {}, 0.0)
    )
    device.answer(changed(letter, people=[0, 1, 2, 3]))
    assert [message.people for message in home.outbox.messages(ask)] == [[0, 1, 2], [3]]
    assert home.outbox.messages(ask)[0] == before
    # Who opts out takes back what may not have left yet.
    home.people.opt_out(3)
    assert home.outbox.messages(ask) == []


@pytest.mark.parametrize(("more", "believed"), [(4, True), (5, False)], ids=["a few", "too many"])
def test_far_more_reports_than_people_can_send_are_not_believed(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, more: int, believed: bool
) -> None:
    """Seven people of twelve reports: 84, and one person's more; three devices come with so many of the mixer's own."""
    monkeypatch.setattr("homebody.training.ATTEMPTS", 1)
    one, mixer, _ = mixed()
    real = Mixer.release

    def stuffed(self: Mixer) -> None:
        for epoch, reports in self.held.items():
            known = self.epochs.find(epoch)
            assert known is not None
            self.held[epoch] = reports + seal_reports(np.zeros(more, dtype=np.int64), known.key)
        real(self)

    monkeypatch.setattr(Mixer, "release", stuffed)
    if believed:
        fit(one, mixer, rounds=1)
        return
    with pytest.raises(Abandoned, match="99 reports arrived, but these people send at most 84"):
        fit(one, mixer, rounds=1)
    assert one.records.load() is None


def test_an_epoch_that_was_closed_with_too_few_reports_does_not_count_after_a_kill(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, mixer, _ = mixed()
    mixer.holding, real = True, Epochs.close

    def dies(*given: Any, **more: Any) -> Any:
        real(*given, **more)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Epochs, "close", dies)
        with pytest.raises(Killed):
            fit(one, mixer, rounds=1)
    mixer.holding = False
    fit(one, mixer, rounds=1)
    assert one.told() == ["train/1", "train/1#2"]
    assert mixer.epochs.named(f"{one.plan.run}/train/1#2").arrived == 7 * K


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", ["open", "arrived", "close"])
def test_a_trainer_that_is_killed_goes_on_in_the_same_epoch(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    one, mixer, sent = mixed()
    fit(one, mixer, rounds=1)
    real = getattr(Epochs, after)

    def dies(*given: Any, **more: Any) -> Any:
        real(*given, **more)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Epochs, after, dies)
        with pytest.raises(Killed):
            fit(one, mixer, rounds=2)
    fit(one, mixer, rounds=2)
    assert one.told() == ["train/1", "train/2"]
    assert one.own(0, 0) == ["train/1", "train/2"]
    # Whoever was asked again gave the same again, which was counted once; people of one device in one message.
    assert [len(messages) for messages in sent] == [3 * 2, 2, 3 * 2]
    assert one.records.counters()["reports_accepted"] == 7 * K * 2
    assert len(mixer.numbers) == 3 * 2


def letters(one: Any, mark: str) -> list[bytes]:
    """The train letters to a device."""
    return [body for to, kind, body in one.mail.letters if (to, kind) == (mark, "train")]


def changed(letter: bytes, **values: Any) -> bytes:
    header, parts = wire.decode_letter(letter)
    header = {**header, **values}
    if header["epoch"] is not None and "epoch" not in values:
        header["epoch"] = {**header["epoch"], "shared": asks(header)}
    return wire.encode_letter(header, parts)


def test_a_key_of_ones_own_is_refused_before_anything_is_charged(
    mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.training.ATTEMPTS", 1)
    one, mixer, sent = mixed()
    mixer.lies = {"key": "00" * 32}
    with pytest.raises(Abandoned, match="0 of 7 clients answered"):
        fit(one, mixer)
    assert sent == [[], [], []]
    assert all(home.outbox.reports() == 0 and one.own(number, 0) == [] for number, home in enumerate(one.homes))
    assert "names another key or another model than the proxy" in one.said("failed")[0]["reason"]
    # The server is not told why.
    assert {line["said"] for line in one.said("refused")} == {"The device cannot answer this now."}


def test_another_model_than_the_one_that_was_announced_is_refused(mixed: Callable[..., Any]) -> None:
    one, mixer, sent = mixed()
    fit(one, mixer, rounds=1)
    device, (letter,) = one.mail.devices["mark1"], letters(one, "mark1")
    before = mixer.epochs.named(f"{one.plan.run}/train/1")
    for values in ({"step": 7}, {"fields": {"learning_rate": 9.0}}, {"n_items": 29}, {"shared": "0" * 32}):
        header, parts = wire.decode_letter(letter)
        answer, _ = wire.decode_letter(device.answer(wire.encode_letter({**header, **values}, parts)))
        assert answer["refused"] == "The letter's epoch is about another letter."
        # One that names itself is not the one that the proxy knows.
        answer, _ = wire.decode_letter(device.answer(changed(letter, **values)))
        assert "refused" in answer or "lacks" in answer
    assert mixer.epochs.named(f"{one.plan.run}/train/1") == before
    assert [len(messages) for messages in sent] == [3, 1, 3]
    assert one.own(1, 0) == ["train/1"]


@pytest.mark.parametrize(
    "epoch",
    [
        None,
        {},
        {"epoch": "ab" * 16},
        {"key": "zz" * 32},
        {"key": "AB" * 32},
        {"k": 0},
        {"k": True},
        {"entries": 2**40},
        {"closes": -1},
        {"more": 1},
    ],
)
def test_a_letter_whose_epoch_makes_no_sense(mixed: Callable[..., Any], epoch: Any) -> None:
    one, mixer, _ = mixed()
    fit(one, mixer, rounds=1)
    (letter,) = letters(one, "mark1")
    known = wire.decode_letter(letter)[0]["epoch"]
    given = epoch if not epoch or epoch == {"epoch": "ab" * 16} else {**known, **epoch}
    answer, parts = wire.decode_letter(one.mail.devices["mark1"].answer(changed(letter, epoch=given)))
    assert "epoch" in answer["refused"]
    assert parts == {}


def test_reports_of_another_size_than_the_methods_are_not_made(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    fit(one, mixer, rounds=1)
    (letter,) = letters(one, "mark1")
    header, parts = wire.decode_letter(letter)
    for name in ("k", "entries"):
        epoch = {**header["epoch"], name: header["epoch"][name] + 1}
        mixer.lies = epoch
        answer, given = wire.decode_letter(
            one.mail.devices["mark1"].answer(wire.encode_letter({**header, "epoch": epoch}, parts))
        )
        assert given == {}
        assert answer["refused"] == "The letter's epoch is about another update than the method's."


def test_a_device_without_a_proxy_takes_no_part_and_says_why(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    device = Device(one.homes[0], one.log)
    answer, _ = wire.decode_letter(device.answer(wire.encode_letter(runtime(one, mixer)._greeting().header())))
    assert "go through a proxy, and this device has none" in answer["refused"]
    assert "create a new device with `homebody client init … --proxy" in one.said("refused")[0]["reason"]


def test_an_epoch_for_what_goes_through_no_proxy_is_refused(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    fit(one, mixer, rounds=1)
    (letter,) = letters(one, "mark1")
    answer, _ = wire.decode_letter(one.mail.devices["mark1"].answer(changed(letter, stages=["one-bit:epsilon=2,k=12"])))
    assert "or one for something else" in answer["refused"]


def test_a_proxy_that_takes_nothing_makes_people_decline(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed(quorum=0.5)
    other = Mixer.__new__(Mixer)
    other.__dict__.update({**mixer.__dict__, "broken": "no"})
    one.mail.devices["mark1"] = one.device(one.homes[1], other.reporter([]))
    fit(one, mixer, rounds=1)
    assert [line["clients"] for line in one.records.rounds()] == [6]
    assert one.records.counters()["declined"] == 1
    assert one.said("declined")[0]["reason"] == "The proxy took nothing: it answered 400."


@pytest.mark.parametrize("before", [True, False])
def test_a_round_that_devices_declined_says_so_and_who_is_left_alone(mixed: Callable[..., Any], before: bool) -> None:
    """At once, where the proxy does not even confirm the epoch; or for what it did not take."""
    one, mixer, _ = mixed()
    away = Mixer.__new__(Mixer)
    away.__dict__.update({**mixer.__dict__, **({"lies": {"k": 0}} if before else {"broken": "no"})})
    one.mail.devices["mark2"] = one.device(one.homes[2], away.reporter([]))
    asked = runtime(one, mixer)
    users = asked.available()
    method = one.plan.method()
    asked.begin(method, Rng.of(0))
    shared = method.init_shared(asked.catalogue, Rng.of(0))
    cohort = Cohort(users, "all", 7, 7)
    asked.open("train/1", cohort, shared)
    began = datetime.now(UTC).replace(second=0, microsecond=0)
    with pytest.raises(Abandoned) as raised:
        asked.collect(method, shared, cohort, Rng.of(0), 1)
    said = "4 of 7 clients answered within 60 s, 3 declined, and 7 must: does the proxy run, and do devices reach it?"
    assert str(raised.value) == said
    (line,) = one.said("left alone")
    assert line["clients"] == 3
    until = datetime.strptime(line["until"], "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    assert timedelta(minutes=10) <= until - began <= timedelta(minutes=11)
    rest = resting(one.records.notes())
    assert rest is not None
    assert rest["people"] == 3
    assert rest == report(one.plan, one.records)["resting"]
    runtime(one, mixer)
    assert resting(one.records.notes()) is None, "One that is started again asks everybody."


def test_reports_that_do_not_arrive_are_asked_about(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    mixer.holding = True
    with pytest.raises(
        Abandoned, match="next hop is this server's address for reports, and that its settings hold and least_devices"
    ):
        fit(one, mixer, rounds=1)


def test_what_devices_measure_goes_the_same_way(mixed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, rounds=2, evaluate_every=1, stages=["one-bit:epsilon=8,k=1000", "shuffle"])
    monkeypatch.setattr(Household, "measure", lambda *_: dict.fromkeys(metric_names((5, 10, 20)), 0.5))
    one, mixer, _ = mixed(plan=plan)
    fit(one, mixer)
    assert one.told() == ["train/1", "train/1/telemetry", "train/2", "train/2/telemetry"]
    assert one.own(0, 0) == one.told()
    assert mixer.epochs.named(f"{one.plan.run}/train/2/telemetry").arrived == 7 * 1000
    line = one.records.rounds()[-1]
    shares, errors, unclipped = line["metrics"], line["errors"], line["unclipped"]
    names = metric_names((5, 10, 20))
    assert list(shares) == list(errors) == names
    assert len(names) == 88
    assert all(0 <= share <= 1 for share in shares.values())
    assert all(shares[name] == (0 if estimate < 0 else 1) for name, estimate in unclipped.items())
    assert not any(0 <= estimate <= 1 for estimate in unclipped.values())
    # 7,000 reports, each about one of 89 numbers, count as ±u there, u = 89 / 1,000 / tanh(4) = 0.0891. Each of the
    # following fails with a chance below 5e-10.
    # The reports about `asked` are binomial, μ = 7,000 / 89 = 78.7 on average: by Chernoff, exp(−μ + x(1 + ln(μ/x))),
    # they are fewer than 26 or more than 145 with a chance of 2.5e-10. Each says no with one of 3.4e-4: 6 or more of
    # 145 do with one of 2e-11. So the estimate A of 7 is between 16 u and 145 u, and over the 1 that it takes.
    error = errors[names[0]] / math.hypot(1, shares[names[0]])
    assert errors == {name: pytest.approx(error * math.hypot(1, share)) for name, share in shares.items()}
    asked = math.sqrt(89 * 7 / 1000) / math.tanh(4) / error
    assert 16 * 0.089 < asked < 145 * 0.0891
    # The sum over all metrics is 7 × 88 × 0.5 = 308 on average; by Hoeffding, 2 exp(−t² / (2 × 7,000 u²)) < 5e-10 at
    # t = 556 u, it is off by 49.6 at most.
    total = asked * sum(unclipped.get(name, share) for name, share in shares.items())
    assert abs(total - 308) < 49.6
    parts = [wire.decode_letter(body)[1] for _, kind, body in one.mail.answers if kind == "evaluate"]
    assert all(part == wire.encode_tree({}) for letter in parts for part in letter.values())

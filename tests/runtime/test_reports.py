"""Rounds whose updates come back as sealed reports, in one process and without a network: what arrives is what was
sent, whoever is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Cohort
from homebody.deploy.device import Device
from homebody.deploy.epochs import Epochs
from homebody.deploy.intake import Intake
from homebody.deploy.proxies import Proxies
from homebody.deploy.reporter import NotReported, Reporter
from homebody.errors import HomebodyError
from homebody.privacy import ShuffledReports
from homebody.privacy.events import Reports, event_from_json
from homebody.recipe import Recipe
from homebody.runtime import wire
from homebody.runtime.clients import Clients
from homebody.runtime.flower import Flower
from homebody.runtime.household import Household
from homebody.runtime.sealed import Envelope, open_envelope, seal_envelope, signing_keys
from homebody.runtime.web import Refusal

K = 12
PLAN = Recipe("fedmf", "devices", rounds=4, seed=3, evaluate_every=0, stages=[f"one-bit:epsilon=2,k={K}", "shuffle"])
People = Callable[..., Any]


class Mixer:
    """Stands for the proxy, and is in the same process: it takes every message once, and holds reports until told."""

    def __init__(self, one: Any) -> None:
        self.epochs = Epochs(one.records, one.folder, clock=lambda: one.clock.now)
        self.intake = Intake(self.epochs, threads=1)
        self.public, self._secret = signing_keys()
        Proxies(one.records).add(self.public, "mixer")
        self.held: dict[bytes, bytes] = {}
        self.numbers: dict[bytes, bytes] = {}
        self.holding, self.broken = False, ""
        self.lies: dict[str, Any] = {}

    def reporter(self, sent: list[list[int]]) -> Reporter:
        mixer, made = self, Reporter("http://127.0.0.1:1", ca=None, secret=signing_keys()[1])
        seal = made.sealed

        def sealed(epoch: Mapping[str, Any], pairs: Any) -> bytes:
            sent.append(pairs.tolist())
            return seal(epoch, pairs)

        made.sealed = sealed  # type: ignore[method-assign]
        made._once = lambda method, path, body: mixer.answer(method, path, body)  # type: ignore[method-assign]
        return made

    def answer(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, Any], float]:
        if method == "GET":
            found = self.epochs.find(bytes.fromhex(path.rpartition("/")[2]))
            return (404, {}, 0.0) if found is None else (200, {**found.told(), **self.lies}, 0.0)
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
            batch = seal_envelope(Envelope("batch", epoch, os.urandom(16), reports), self._secret)
            try:
                answer = self.intake.take(batch)
            except Refusal as refusal:
                assert refusal.status == 410
                continue
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
            one.mail.devices[f"mark{number}"] = Device(home, one.log, mixer.reporter(sent[number]))
        return one, mixer, sent

    return make


def runtime(one: Any, mixer: Mixer) -> Flower:
    return Flower(
        one.mail, one.records, one.plan.describe(), one.plan.settings(), intake=mixer.epochs, log=one.log
    )


def fit(one: Any, mixer: Mixer, **more: Any) -> Any:
    from homebody.fit import fit as train

    recipe = one.recipe
    asked = {
        "rounds": recipe.rounds,
        "seed": recipe.seed,
        "ledger": one.records.ledger(),
        "evaluate_every": recipe.evaluate_every,
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
    parts = [wire.open_letter(body)[1] for _, kind, body in one.mail.answers if kind == "train"]
    assert all(part == wire.pack({}) for letter in parts for part in letter.values())
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
    assert one.homes[0].reports() == 3 * K


def test_people_who_may_be_missing_are_not_counted_on(mixed: Callable[..., Any]) -> None:
    one, _, _ = mixed(quorum=0.5)
    cohort = Cohort(np.arange(7), "all", 7, 7)
    assert one.plan.method().releases(cohort)[0].event == ShuffledReports(2.0, K, 4)
    with pytest.raises(HomebodyError, match="shuffled among 5 people where 4 are enough"):
        one.plan.changed(recipe=replace(PLAN, stages=["one-bit:epsilon=2,k=3", "shuffle:users=5"])).method()


def test_an_epoch_waits_for_all_reports_of_those_who_reported(mixed: Callable[..., Any]) -> None:
    one, mixer, _ = mixed()
    mixer.holding = True
    began, sleep = one.clock.now, one.clock.sleep

    def later(seconds: float) -> None:
        sleep(seconds)
        if one.clock.now - began > 20:
            mixer.release()

    one.clock.sleep = later
    fit(one, mixer, rounds=1)
    assert 20 < one.clock.now - began < 25
    assert one.told() == ["train/1"]


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
    assert first.people == 0
    assert first.public != second.public
    assert second.arrived == 7 * K
    # Sealed to another key they are other reports, and are charged anew: on the device too.
    assert one.told() == ["train/1", "train/1#2"]
    assert one.own(0, 0) == ["train/1", "train/1"]
    assert sent[0][0] != sent[0][3]


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

    monkeypatch.setattr(Epochs, after, dies)
    with pytest.raises(Killed):
        fit(one, mixer, rounds=2)
    monkeypatch.undo()
    fit(one, mixer, rounds=2)
    assert one.told() == ["train/1", "train/2"]
    assert one.own(0, 0) == ["train/1", "train/2"]
    # Whoever was asked again gave the same again, which was counted once.
    assert [len(messages) for messages in sent] == [3 * 2, 2, 3 * 2]
    assert one.records.counters()["reports_accepted"] == 7 * K * 2
    assert len(mixer.numbers) == 7 * 2

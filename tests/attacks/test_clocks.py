"""A wall clock that is set back or forward on the server or the proxy: nothing waits or is kept for ever, and nothing
is taken after its time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.proto.runtime_pb2 import PushAppMessagesResponse
from tests.federation.test_task import HEADER

from homebody.database import connect
from homebody.errors import Abandoned
from homebody.federation.epoch import Epoch
from homebody.federation.flower.link import Link
from homebody.federation.proxy.admin import make
from homebody.federation.proxy.settings import ProxySettings
from homebody.federation.proxy.store import ProxyStore
from homebody.federation.server.aggregate import ProxyRoute
from homebody.federation.server.answers import Answer
from homebody.federation.server.epochs import EpochResult, Epochs, Over
from homebody.federation.server.records import Records, RegisteredDevice
from homebody.federation.task import Task
from homebody.federation.wire import Expected
from homebody.privacy import Channel, OneBit, Shuffle

DAY = 86_400.0
TASK = Task.read(HEADER)
DEVICE = RegisteredDevice("ab12", b"", "kitchen", first=0, people=2, added="", removed=None)


class Clocks:
    """The wall clock, which anybody may set; and the monotonic one, which passes where somebody waits."""

    def __init__(self) -> None:
        self.wall, self.steady = 1.7e9, 1000.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds
        assert self.steady < 100_000, "it waits for ever"


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    for module in ("server.aggregate", "flower.link", "proxy.store"):
        monkeypatch.setattr(f"homebody.federation.{module}.time", made)
    return made


@pytest.fixture
def epochs(clocks: Clocks, tmp_path: Path) -> Epochs:
    return Epochs(Records(connect(None)), tmp_path, clocks.time)


@pytest.mark.parametrize("jump", [-DAY, -60.0, 30.0, DAY])
def test_a_round_ends_in_its_time_whatever_the_wall_clock_says(clocks: Clocks, epochs: Epochs, jump: float) -> None:
    """One of two people's reports never come."""
    told = {"w[4]": Expected((), 8, None)}  # type: ignore[arg-type]
    way = ProxyRoute(epochs, "run/train/1", "ab" * 16, Channel(OneBit(1.0, k=2), Shuffle(users=1)), told, seconds=90.0)
    talk = way.talk(TASK, [0, 1], 1)
    next(talk)
    epoch = epochs.named("run/train/1")
    assert epoch is not None
    epochs.add(epoch.id, bytes(16), np.array([1, 2], dtype="<u4"), {})
    clocks.wall += jump
    began = clocks.steady
    with pytest.raises(StopIteration) as ended:
        talk.send([(DEVICE, Answer(updates={0: {}, 1: {}}))])
    assert float(ended.value.value.sum["w[4]"].sum()) == 2
    assert clocks.steady - began <= 91


def test_an_epoch_that_a_jump_has_ended_takes_nothing_and_the_next_one_does(clocks: Clocks, epochs: Epochs) -> None:
    first = epochs.open("run/train/1", "ab" * 16, k=1, entries=4, seconds=60)
    clocks.wall += DAY
    with pytest.raises(Over):
        epochs.add(first.id, bytes(16), np.array([1], dtype="<u4"), {})
    second = epochs.open("run/train/1#2", "ab" * 16, k=1, entries=4, seconds=60)
    assert epochs.secret(first) is None
    clocks.wall -= DAY
    assert epochs.add(second.id, bytes(16), np.array([1], dtype="<u4"), {}).accepted == 1
    assert isinstance(epochs.close("run/train/1#2", 1), EpochResult)
    with pytest.raises(Over):
        epochs.add(first.id, os.urandom(16), np.array([1], dtype="<u4"), {})


def test_too_few_reports_abandon_the_round_after_a_jump(clocks: Clocks, epochs: Epochs) -> None:
    told = {"w[4]": Expected((), 8, None)}  # type: ignore[arg-type]
    way = ProxyRoute(epochs, "run/train/1", "ab" * 16, Channel(OneBit(1.0, k=2), Shuffle(users=1)), told, seconds=90.0)
    talk = way.talk(TASK, [0], 1)
    next(talk)
    clocks.wall -= DAY
    with pytest.raises(Abandoned, match="0 reports arrived"):
        talk.send([(DEVICE, Answer(updates={0: {}}))])


def test_letters_that_are_over_are_forgotten_after_a_clock_was_set_back(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run that carries them would never be renewed, and its SuperLink would grow."""
    link = Link("127.0.0.1:9", ca=None, secret=b"0123456789abcdef")

    def taken(name: str, request: Any, *_: Any, **__: Any) -> Any:
        return PushAppMessagesResponse(message_ids=[one.metadata.message_id for one in request.messages_list])

    monkeypatch.setattr(link, "_runtime", taken)
    link.send({7: ("query", b"first")}, 60)
    clocks.wall -= DAY
    clocks.steady += 61
    link.send({7: ("query", b"second")}, 60)
    assert len(link._sent) == 1
    link._wire.close()


@pytest.mark.parametrize("jump", [-365 * DAY, -3600.0, 0.0, 3600.0])
def test_a_proxy_forgets_who_sent_how_much_in_time(clocks: Clocks, tmp_path: Path, jump: float) -> None:
    settings = ProxySettings(next="http://127.0.0.1:9", tls=False, hold=0.0, least_devices=1)
    make(tmp_path / "proxy", settings)
    store = ProxyStore(tmp_path / "proxy", settings)
    epoch = os.urandom(16)
    described = Epoch(epoch, b"k" * 32, "ab" * 16, k=1, entries=9, among=1, closes=clocks.wall + 600)
    with store.transaction():
        store.open_epoch(described, clocks.wall)
        store.tick(clocks.wall)
    clocks.wall += jump
    clocks.sleep(601)
    with store.transaction():
        assert epoch in store.tick(clocks.wall).closed
    assert store.epochs()[epoch] is None
    assert not store._secrets.read(epoch)
    store.close()

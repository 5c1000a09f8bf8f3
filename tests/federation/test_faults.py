"""Whatever happens to real processes on a real network: nothing that was acknowledged is lost, nothing is charged
twice, and the model is the one of an undisturbed run.

The phase that a process is in is known by what it logs; where that is not enough, it is stopped (SIGSTOP) before it
is killed.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from homebody.data import Population
from homebody.federation.device.home import Home
from homebody.federation.secure_sum.messages import EXCHANGES
from homebody.federation.server.admin import opened
from homebody.recipe import Recipe

pytestmark = pytest.mark.faults

Make = Callable[..., Any]


def plan(rounds: int, method: str = "pfedrec") -> Recipe:
    """PFedRec by default: its people hold private state, which must come back with them."""
    return Recipe(method, "devices", rounds=rounds, seed=4, evaluate_every=0)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile, and does not know."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_device_killed_in_each_phase_of_a_round_and_started_again(few: Population, world: Make) -> None:
    rng = np.random.default_rng(1)
    federation = world(few, 2, plan(90), deadline=120.0)
    federation.start(once=True)

    def next_round() -> None:
        done = federation.said("server", "round")
        federation.wait_for("server", "opened", federation.said("server", "opened") + 1)
        federation.wait_for("server", "round", done + 1)

    def again() -> None:
        federation.kill("device0")
        federation.start("device0")
        next_round()

    def asked() -> int:
        return int(federation.said("device0", "asked", kind="train"))

    next_round()
    # Before it pulls: the letter is on its way to a process that will never read it.
    with stopped(federation.processes["device0"].pid):
        sent = federation.said("server", "sent", kind="train")
        federation.wait(
            lambda: federation.said("server", "sent", kind="train") > sent or _waits_for_answers(federation),
            "a letter is sent",
        )
        time.sleep(0.5)
        os.kill(federation.processes["device0"].pid, signal.SIGKILL)
    again()
    # While it works.
    for _ in range(4):
        federation.wait_for("device0", "asked", asked() + 1, kind="train")
        time.sleep(rng.uniform(0, 0.04))
        again()
    # After it wrote its answer, and before that was taken: nobody takes it.
    for _ in range(20):
        federation.wait_for("device0", "asked", asked() + 1, kind="train")
        with stopped(federation.link()):
            federation.wait(lambda: _last_word(federation, "device0") != "asked", "its answer is written down")
            time.sleep(0.3)
            if held := _last_word(federation, "device0") == "answered":
                federation.kill("device0")
        if held:
            break
    assert held, "The link was never stopped in time."
    federation.start("device0")
    next_round()
    # After.
    federation.wait_for("device0", "sent", federation.said("device0", "sent", kind="train") + 1, kind="train")
    again()
    assert federation.finish() == 0
    federation.check()


def _last_word(federation: Any, name: str) -> str:
    """What a process said last of the round it is in."""
    words = [one["event"] for one in federation.log(name)]
    return next((word for word in reversed(words) if word in ("opened", "asked", "answered", "sent", "round")), "")


def _waits_for_answers(federation: Any) -> bool:
    return _last_word(federation, "server") == "sent"


def test_a_device_that_stays_away_costs_a_round_no_more_than_its_deadline(few: Population, world: Make) -> None:
    deadline = 15.0
    federation = world(few, 3, plan(60), deadline=deadline, quorum=0.5, least=1)
    federation.start(*(device.name for device in federation.devices))
    for device in federation.devices:
        federation.wait_for(device.name, "away")  # they are there before the server is: round 1 is with everyone
    federation.start("server", once=True)
    federation.wait_for("server", "joined", 3)
    federation.wait_for("device2", "asked", federation.said("device2", "asked", kind="train") + 2, kind="train")
    federation.kill("device2")
    assert federation.finish() == 0
    with opened(federation.server) as (_, records):
        lines = records.rounds()
        entries = records.ledger().entries()
        assert records.counters()["answers_missing"] == 1
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert {entry.release for entry in entries} == {f"train/{number}" for number in range(1, 61)}
    clients = [line["clients"] for line in lines]
    last = max(number for number, count in enumerate(clients) if count == 8)
    assert set(clients[last + 1 :]) == {6}  # 8 people on 3 devices: the last has 2
    assert max(line["seconds"] for line in lines) < deadline + 2
    assert sum(line["seconds"] > 5 for line in lines[1:]) <= 1


def test_the_trainer_killed_ten_times_at_any_moment_of_a_round(few: Population, world: Make) -> None:
    rng = np.random.default_rng(2)
    federation = world(few, 2, plan(60), deadline=60.0)
    federation.start(once=True)
    moments = [
        ("server", "opened", {}),  # and not charged yet, or just charged
        ("server", "opened", {}),
        ("server", "sent", {"kind": "train"}),
        ("device0", "asked", {"kind": "train"}),
        ("device0", "sent", {"kind": "train"}),  # some answers are in
        ("device1", "sent", {"kind": "train"}),
        ("server", "round", {}),  # stepped and written down, and not saved yet, or just saved
        ("server", "round", {}),
        ("server", "round", {}),
        ("server", "started", {}),  # coming back from the kill before
    ]
    for number, (who, what, facts) in enumerate(moments):
        count = federation.said(who, what, **facts) + (what != "started") * int(rng.integers(1, 4))
        federation.wait_for(who, what, max(count, 1), **facts)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(federation.trainer(), signal.SIGKILL)
        federation.wait_for("server", "trainer ended", number + 1, code=-9)
        federation.wait(federation.trainer, "the trainer is there again")
        if what != "round":
            federation.wait_for("server", "started", number + 2 - (number == 9))
    assert federation.finish() == 0
    assert federation.said("server", "trainer ended") == 10
    federation.check()
    calm = world(few, 2, plan(60), deadline=60.0)
    calm.start(once=True)
    assert calm.finish() == 0
    wanted = calm.shared()
    for name, value in federation.shared().items():
        assert torch.equal(value, wanted[name]), name


def test_the_supervisor_and_the_link_killed_at_any_moment(few: Population, world: Make) -> None:
    rng = np.random.default_rng(3)
    federation = world(few, 2, plan(40), deadline=60.0)
    federation.start(once=True)

    def some_rounds() -> None:
        federation.wait_for("server", "round", federation.said("server", "round") + int(rng.integers(1, 4)))
        time.sleep(rng.uniform(0, 0.2))

    for _ in range(2):
        some_rounds()
        with stopped(federation.link()):  # at once: the new one waits until the children of the other are gone
            federation.kill("server")
            federation.start("server", once=True)
            time.sleep(8)
        some_rounds()
        link = federation.link()
        os.kill(link, signal.SIGKILL)
        federation.wait(lambda was=link: federation.link() not in (None, was), "there is another link")
    some_rounds()
    federation.kill("server")
    time.sleep(1)
    federation.start("server", once=True)
    assert federation.finish() == 0
    federation.check()


def test_a_second_server_in_the_same_folder_is_refused(few: Population, world: Make) -> None:
    federation = world(few, 1, plan(1))
    federation.start("server")
    federation.wait_for("server", "started")
    first = federation.processes.pop("server")
    try:
        federation.start("server")
        assert federation.finish() == 2
        assert "already" in (federation.folder / "server.log").read_text()
        assert first.poll() is None
    finally:
        federation.processes["server"] = first


def test_a_port_that_is_taken_is_said_in_a_sentence(few: Population, world: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        federation = world(few, 1, plan(1), port=taken.getsockname()[1])
        federation.start("server")
        assert federation.finish() == 2
    said = (federation.folder / "server.log").read_text()
    assert "cannot be started on 127.0.0.1" in said
    assert "Traceback" not in said


def test_a_network_that_is_cut_refused_and_slow(few: Population, world: Make) -> None:
    rng = np.random.default_rng(4)
    federation = world(few, 2, plan(60), deadline=120.0, proxied=True)
    federation.start(once=True)
    federation.wait_for("server", "round")
    for _ in range(8):
        time.sleep(rng.uniform(0, 0.3))
        for proxy in federation.proxies:
            proxy.cut()
        federation.wait_for("server", "round", federation.said("server", "round") + 1)
    for proxy in federation.proxies:
        proxy.refuse()
    time.sleep(3)
    for proxy in federation.proxies:
        proxy.accept()
    federation.wait_for("server", "round", federation.said("server", "round") + 2)
    for proxy in federation.proxies:
        proxy.rate = 50_000.0
    federation.wait_for("server", "round", federation.said("server", "round") + 4)
    for proxy in federation.proxies:
        proxy.rate = None
    assert federation.finish() == 0
    federation.check()


def test_a_device_in_a_black_hole_is_not_waited_for_and_comes_back(few: Population, world: Make) -> None:
    federation = world(few, 2, plan(400), deadline=6.0, quorum=0.5, least=1, proxied=True)
    federation.start()
    federation.wait_for("server", "round", clients=8)
    federation.proxies[1].hole = True
    federation.wait_for("server", "silent")
    alone = federation.said("server", "round", clients=4)
    federation.wait_for("server", "round", alone + 3, clients=4)
    together = federation.said("server", "round", clients=8)
    federation.proxies[1].hole = False
    federation.proxies[1].cut()
    federation.wait_for("server", "round", together + 3, clients=8)
    slow = [one for one in federation.log("server") if one["event"] == "round" and one["seconds"] > 5.0]
    assert max(one["seconds"] for one in slow) < 6.0 + 2
    # The round that it was lost in, and the first one, which compiles.
    assert len([one for one in slow if one["round"] > 1]) <= 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of eight megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=8m", "none", place]).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_said_loses_nothing_and_is_waited_for(few: Population, world: Make, small_disk: Path) -> None:
    federation = world(few, 2, plan(40), deadline=60.0, rooted=small_disk)
    federation.start(once=True)
    federation.wait_for("server", "round", 3)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    federation.wait_for("server", "interrupted", 2)
    reasons = [one["reason"] for one in federation.log("server") if one["event"] == "interrupted"]
    assert all("The disk takes no more" in reason or "cannot be opened" in reason for reason in reasons), reasons
    assert "The disk takes no more" in reasons[0]
    assert "Traceback" not in (federation.folder / "server.log").read_text()
    done = [one["round"] for one in federation.log("server") if one["event"] == "round"][-1]
    copy = federation.folder / "copy"
    shutil.copytree(federation.server, copy)  # reading needs room too, for what SQLite keeps beside the file
    with opened(copy) as (_, records):
        progress = records.load()
        assert progress is not None
        assert done - 1 <= progress.step <= done
    (small_disk / "ballast").unlink()
    assert federation.finish() == 0
    federation.check()


def test_a_round_with_too_few_answers_is_given_up_charged_and_tried_again(few: Population, world: Make) -> None:
    federation = world(few, 2, plan(30), deadline=4.0)
    federation.start(once=True)
    federation.wait_for("server", "round", 3)
    federation.wait_for("device1", "asked", federation.said("device1", "asked", kind="train") + 1, kind="train")
    with stopped(federation.processes["device1"].pid):
        federation.wait_for("server", "abandoned")
    # Its answer comes late, and is not wanted; asked again it says the same, and its ledger is not charged again.
    assert federation.finish() == 0
    (given_up,) = [one for one in federation.log("server") if one["event"] == "abandoned"]
    number = int(given_up["release"].partition("/")[2])
    assert given_up["reason"] == "4 of 8 clients answered within 4 s, and 8 must."
    assert federation.said("server", "opened", release=f"train/{number}#2") == 1
    federation.check(attempts={number: 2})
    with opened(federation.server) as (_, records):
        assert records.counters()["rounds_abandoned"] == 1


def test_items_come_while_training_goes_on_and_a_device_was_away(few: Population, world: Make) -> None:
    federation = world(few, 2, plan(2000, "fedmf"), deadline=30.0, quorum=0.5, least=1)
    federation.start()
    federation.wait_for("server", "round", 2, clients=8)
    federation.kill("device1", signal.SIGTERM)
    federation.wait_for("server", "round", clients=4)
    with opened(federation.server) as (_, records):
        assert records.add_items([(f"new{number}", f"New {number}") for number in range(7)]) == (40, 7)
    with Home(federation.devices[0]) as near, Home(federation.devices[1]) as away:
        federation.wait(lambda: len(near.items) == 47, "the device that is there knows the items")
        assert len(away.items) == 40
        near.history.append(near.people.find("person 0"), "new3")
        federation.start("device1")
        federation.wait(lambda: len(away.items) == 47, "the device that was away learns of them")
        assert away.items.all()[43] == near.items.all()[43] == ("new3", "New 3")
    together = federation.said("server", "round", clients=8)
    federation.wait_for("server", "round", together + 3, clients=8)
    assert federation.said("server", "refused") == 0
    shared = federation.shared()
    assert {len(value) for value in shared.values() if value.dim() == 2} == {47}
    # Items come in the middle of a round that is then cut short: what it asks now is something else, and charged.
    with stopped(federation.processes["device0"].pid), stopped(federation.processes["device1"].pid):
        federation.wait(lambda: _waits_for_answers(federation), "a letter is sent")
        time.sleep(1)
        release = [one["release"] for one in federation.log("server") if one["event"] == "opened"][-1]
        with opened(federation.server) as (_, records):
            records.add_items([("newest", "Newest")])
        os.kill(federation.trainer(), signal.SIGKILL)
    federation.wait_for("server", "opened", release=f"{release}#2")
    before = federation.rounds()
    federation.wait(lambda: federation.rounds() > before + 2, "it goes on with the larger tables")
    federation.kill("server")
    with opened(federation.server) as (_, records):
        told = [entry.release for entry in records.ledger().entries()]
    assert {release, f"{release}#2"} <= set(told)
    assert len(federation.shared()["item"]) == 48


@pytest.mark.parametrize("noisy", [False, True])
def test_devices_and_the_trainer_killed_in_every_exchange_of_a_secure_sum(
    few: Population, world: Make, noisy: bool
) -> None:
    rng = np.random.default_rng(6)
    stages = ["clip:norm=1", "skellam:z=2", "secure-sum"] if noisy else ["secure-sum:range=100"]
    recipe = Recipe("fedmf", "devices", {"factors": 4}, stages=stages, rounds=30, seed=4, evaluate_every=0)
    federation = world(few, 4, recipe, deadline=300.0)
    federation.start(once=True)
    kills = [(exchange, who) for exchange in EXCHANGES for who in ("device0", "trainer", "device2")]
    for number, (exchange, who) in enumerate(kills):
        count = federation.said("server", "sent", kind="train", exchange=exchange)
        federation.wait_for("server", "sent", count + 1, kind="train", exchange=exchange)
        time.sleep(rng.uniform(0, 0.05))
        if who == "trainer":
            os.kill(federation.trainer(), signal.SIGKILL)
            federation.wait_for("server", "started", 2 + number // 3)
        else:
            federation.kill(who)
            federation.start(who)
        rounds = federation.said("server", "round")
        federation.wait_for("server", "round", rounds + 1)
    assert federation.finish() == 0
    assert federation.said("server", "abandoned") == 0
    federation.check(exact=not noisy)
    with opened(federation.server) as (_, records):
        assert [line["clients"] for line in records.rounds()] == [8] * 30
        assert math.isfinite(records.ledger().epsilons(1e-6)["server"]) == noisy


@pytest.mark.parametrize("noisy", [False, True])
def test_everybody_killed_in_rounds_whose_sums_a_helper_opens(few: Population, world: Make, noisy: bool) -> None:
    """Devices, trainer and helper, before and after devices were asked."""
    rng = np.random.default_rng(7)
    last = ["clip:norm=1", "secure-sum:helper=true", "gaussian:z=2"]
    stages = last if noisy else ["secure-sum:range=100,helper=true"]
    recipe = Recipe("fedmf", "devices", {"factors": 4}, stages=stages, rounds=20, seed=4, evaluate_every=0)
    federation = world(few, 4, recipe, helping=True, deadline=300.0)
    federation.start(once=True)
    started = 1
    for who in ("device0", "trainer", "proxy", "device2", "proxy", "trainer", "proxy", "device0", "proxy", "trainer"):
        federation.wait_for("server", "sent", federation.said("server", "sent", kind="train") + 1, kind="train")
        time.sleep(rng.uniform(0, 0.3))
        if who == "trainer":
            os.kill(federation.trainer(), signal.SIGKILL)
            started += 1
            federation.wait_for("server", "started", started)
        else:
            federation.kill(who)
            federation.start(who)
        federation.wait_for("server", "round", federation.said("server", "round") + 1)
    assert federation.finish() == 0
    assert federation.said("server", "abandoned") == 0
    assert federation.said("proxy", "set refused") == 0
    federation.check(exact=not noisy)
    with opened(federation.server) as (_, records):
        assert [line["clients"] for line in records.rounds()] == [8] * 20
        assert math.isfinite(records.ledger().epsilons(1e-6)["server"]) == noisy

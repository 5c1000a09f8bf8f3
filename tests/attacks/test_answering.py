"""A hostile server writes to a real device: what owned items can be read from who answers, and when, and how much."""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from tests.processes import PATIENCE

from homebody.core import Catalogue, Cohort, Tree, releases
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device import client
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.device.household import Household
from homebody.federation.device.limits import answering_seconds, estimate
from homebody.federation.service.certificates import make_device_key
from homebody.federation.task import Task
from homebody.methods import find
from homebody.methods.fedmf import FedMF
from homebody.methods.kernels import factors, network, privrec, reports
from homebody.privacy import Channel, Charge, LaplaceRelease, NonPrivate
from homebody.privacy.specs import parse_channel
from homebody.rng import Rng

N_ITEMS = 40
ITEMS = [(f"i{number}", f"Item {number}") for number in range(N_ITEMS)]
OWNED = (3, 7, 11, 12, 25, 31)
PRIVATE = ["clip:norm=1,order=1", "laplace:b=10000000"]
"""ε of about 2e-7 a release."""


class Clock:
    """Time that passes only where somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Attacker:
    """Writes whatever letters it likes to one device."""

    def __init__(self, home: Home) -> None:
        self.home, self.clock, self.logs = home, Clock(), list[dict[str, Any]]()
        self.device = Device(
            home,
            lambda event, **facts: self.logs.append({"event": event, **facts}),
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.step = 0

    def letter(self, method: str = "fedmf", shared: Tree | None = None, **more: Any) -> bytes:
        self.step += 1
        fields = more.pop("fields", {"factors": 2})
        if shared is None:
            shared = find(method)(**fields).init_shared(Catalogue(N_ITEMS), Rng.of(0))  # type: ignore[union-attr]
        content = wire.encode_tree(shared)
        header = {
            "run": "feedbeef00",
            "method": method,
            "fields": fields,
            "stages": [],
            "seed": 1,
            "protocol": "strict",
            "held_out": None,
            "negatives": 5,
            "cutoffs": [3],
            "measures": False,
            "do": "train",
            "release": f"train/{self.step}",
            "step": self.step,
            "key": self.step,
            "clients_key": 5,
            "keep": None,
            "n_items": N_ITEMS,
            "half": False,
            "first": 0,
            "people": [0],
            "shared": wire.digest(content),
        }
        return wire.encode_letter({**header, **more}, {"items": json.dumps([0, ITEMS]).encode(), "shared": content})

    def greeting(self, **more: Any) -> bytes:
        header, _ = wire.decode_letter(
            self.letter(**{"shared": {}, "do": "hello", "release": "", "people": [], **more})
        )
        return wire.encode_letter(header)

    def send(self, body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
        return wire.decode_letter(self.device.answer(body))

    def events(self) -> list[str]:
        return [one["event"] for one in self.logs]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as made:
        ann = made.people.add("ann")
        for when, item in enumerate(OWNED):
            made.history.append(ann, ITEMS[item][0], time=when)
        yield made


@pytest.fixture
def attacker(home: Home) -> Attacker:
    return Attacker(home)


@pytest.mark.parametrize("method", ["fedials", "fcf"])
def test_who_answers_does_not_tell_which_items_are_owned(attacker: Attacker, method: str) -> None:
    """(G + α yyᵀ + λI) is singular in 32 bits for the owner of the one item that has a vector, and for nobody else."""
    fields = {"factors": 2, "confidence": 1e9, "regularisation": 1.0}
    read, lengths = set(), set()
    for item in range(N_ITEMS):
        table = torch.zeros(N_ITEMS, 2)
        table[item] = 1.0
        header, parts = attacker.send(attacker.letter(method, {"item": table}, fields=fields, stages=PRIVATE))
        lengths.update(map(len, parts.values()))
        if header["declined"] or not parts:
            read.add(item)
    assert read == set()
    assert len(lengths) == 1
    assert len({entry.release for entry in attacker.home.ledger(0).entries()}) == N_ITEMS


@pytest.mark.parametrize("do", ["train", "evaluate"])
def test_a_failure_after_the_charge_leaves_as_the_zero_update(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    def fails(household: Household, *given: Any) -> Any:
        raise ZeroDivisionError("because of item i3 of ann")

    monkeypatch.setattr(Household, "train" if do == "train" else "measure", fails)
    body = attacker.letter(do=do, measures=do == "evaluate")
    header, parts = attacker.send(body)
    assert (header["declined"], list(parts)) == ([], ["0"])
    for value in wire.decode_tree(parts["0"]).values():
        assert not bool((value if isinstance(value, torch.Tensor) else value.value).any())
    assert "nothing" in attacker.events()
    assert attacker.send(body)[1] == parts  # asked again it says the same, and is not charged again
    assert attacker.home.ledger(0).releases() == 1
    assert attacker.home.models.state(0, "feedbeef00") is None


def test_a_zero_update_is_noised_as_any_other(attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Household, "train", lambda *given: 1 / 0)
    answers = [wire.decode_tree(attacker.send(attacker.letter(stages=PRIVATE))[1]["0"])["item"] for _ in range(2)]
    assert not torch.equal(*answers)
    assert all(bool(one.any()) for one in answers)


def test_numbers_that_are_not_finite_leave_as_zeros_and_leave_no_state(attacker: Attacker) -> None:
    """Steps as large as a server may choose lead anywhere."""
    fields = {"factors": 2, "learning_rate": 1e30}
    _, parts = attacker.send(attacker.letter("pfedrec", fields=fields))
    assert len(wire.decode_tree(parts["0"])["item"].index) == 0
    assert attacker.home.models.state(0, "feedbeef00") is None
    _, parts = attacker.send(attacker.letter("pfedrec"))
    assert bool(torch.isfinite(wire.decode_tree(parts["0"])["item"].value).all())
    assert len(wire.decode_tree(parts["0"])["item"].index) > 0


def test_a_state_that_cannot_be_read_is_no_reason_to_decline(attacker: Attacker) -> None:
    attacker.send(attacker.letter("pfedrec"))
    attacker.home.models.put_state(0, "feedbeef00", 1, None, b"broken")
    header, parts = attacker.send(attacker.letter("pfedrec"))
    assert (header["declined"], len(parts)) == ([], 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"run": ""}, "not named as it should be"),
        ({"run": "a" * 2000}, "not named as it should be"),
        ({"release": "train\n1"}, "not named as it should be"),
        ({"stages": ["clip:norm=1"] * 17}, "stages or cut-offs"),
        ({"stages": ["clip:norm.strange=1,order=1", "laplace:b=1"]}, "do not go together"),
        ({"n_items": 2**31}, "too large"),
        ({"longest": 0}, "too large"),
        ({"longest": 10**9}, "too large"),
        ({"longest": True}, "of another kind"),
        ({"longest": "all"}, "of another kind"),
    ],
)
def test_what_is_wrong_with_a_letter_shows_before_anybody_is_charged(
    attacker: Attacker, change: dict[str, Any], said: str
) -> None:
    header, parts = attacker.send(attacker.letter(**change))
    assert said in header["refused"]
    assert parts == {}
    assert attacker.home.ledger(0).releases() == 0


def test_parameters_that_do_not_fit_are_not_kept(attacker: Attacker) -> None:
    """Letter by letter they would fill the disk."""
    for size in (3, 4, 5):
        header, _ = attacker.send(attacker.letter(shared={"item": torch.zeros(N_ITEMS, size), "user": torch.zeros(2)}))
        assert "another shape" in header["refused"]
    assert attacker.home.store.read("SELECT COUNT(*) FROM shared")[0][0] == 0


@dataclass
class Slow:
    """Work whose time depends on what somebody has."""

    clock: Clock
    seconds: float

    def __call__(self, *given: Any) -> Any:
        self.clock.sleep(self.seconds)
        raise HomebodyError("too slow to tell anything")


def _answered_after(attacker: Attacker, monkeypatch: pytest.MonkeyPatch, seconds: float, stages: list[str]) -> float:
    monkeypatch.setattr(Household, "train", Slow(attacker.clock, seconds))
    began = attacker.clock.now
    body = attacker.letter(stages=stages)
    attacker.send(body)
    return round(attacker.clock.now - began, 6)


def test_when_an_answer_leaves_does_not_depend_on_the_history(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(seconds: float) -> float:
        return _answered_after(attacker, monkeypatch, seconds, PRIVATE)

    method = FedMF(factors=2, uplink=_channel())
    wanted = answering_seconds(estimate(method, Catalogue(N_ITEMS), 5_000, 1), 1)
    assert {answered(taken) for taken in (0.0, 0.001, 0.2, wanted / 2)} == {wanted}
    assert wanted == pytest.approx(round(wanted / 0.05) * 0.05)  # a multiple of 50 ms
    assert attacker.home.outbox.late() == 0
    assert answered(wanted * 1.5) == pytest.approx(2 * wanted)  # an overrun tells that it was one, and is counted
    assert attacker.home.outbox.late() == 1
    assert "late" in attacker.events()


def _channel() -> Channel:
    return parse_channel(PRIVATE)


def test_where_nothing_is_private_answers_leave_at_once(attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answered_after(attacker, monkeypatch, 0.125, []) == 0.125
    assert _answered_after(attacker, monkeypatch, 0.125, ["clip:norm=1", "gaussian:z=1"]) == 0.125


def test_a_repeated_answer_takes_as_long_as_the_first(attacker: Attacker) -> None:
    body, taken = attacker.letter(stages=PRIVATE), []
    for _ in range(2):
        began = attacker.clock.now
        attacker.send(body)
        taken.append(attacker.clock.now - began)
    assert taken[0] == pytest.approx(taken[1])


def test_a_longer_history_counts_with_its_latest_interactions(attacker: Attacker) -> None:
    """So the time for the longest is the time for all."""
    seen = []
    for longest in (2, 6, 100):
        _, parts = attacker.send(attacker.letter("fedials", longest=longest))
        seen.append(wire.decode_tree(parts["0"])["item"].index.tolist())
    assert seen == [list(OWNED[-2:]), list(OWNED), list(OWNED)]


def test_a_letter_of_the_version_before_names_no_longest_history(attacker: Attacker) -> None:
    header, _ = wire.decode_letter(attacker.letter())
    assert "longest" not in header
    task = Task.read(header)
    assert task.longest == 5_000
    assert task.ask == Task.read({**header, "longest": 5_000}).ask
    assert task.ask != Task.read({**header, "longest": 4_000}).ask


@pytest.mark.parametrize(
    ("method", "fields", "more", "bound"),
    [
        ("fedmf", {}, {"stages": ["one-bit:epsilon=1,k=100000000"]}, "memory"),
        ("fedncf", {"hidden": "20000,20000"}, {}, "memory"),
        ("privrec", {"hidden": "20000,20000"}, {}, "memory"),
        ("pfedrec", {"hidden": "99999999,99999999"}, {}, "memory"),
        ("fedncf", {"hidden": ",".join(["1"] * 100_000)}, {}, "memory"),
        ("fedgnn", {"steps": 1_000_000}, {}, "operations"),
        ("fedmf", {"epochs": 1_000_000}, {}, "operations"),
        ("fedrecon", {"rebuild": 1_000_000}, {}, "operations"),
        ("fedmf", {"negatives": 1_000_000}, {}, "memory"),
        ("fedials", {"factors": 100_000}, {}, "memory"),
        ("fmf-ldp", {"factors": 100_000}, {"stages": ["one-bit:epsilon=1,k=5"]}, "memory"),
        ("privrec", {"epochs": 1_000_000}, {}, "memory"),
        ("nn-self", {"epochs": 10_000}, {}, "memory"),
        ("fedmf", {"factors": 2}, {"n_items": 10**9}, "memory"),
        ("fedncf", {"hidden": "9" * 30}, {}, "memory"),
        ("fedgnn", {"negatives": 100}, {"longest": 10_000_000}, "memory"),
    ],
)
def test_a_greeting_cannot_exhaust_a_device(
    attacker: Attacker, method: str, fields: dict[str, Any], more: dict[str, Any], bound: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for body in (
        attacker.greeting(method=method, fields=fields, **more),
        attacker.letter(method, {"item": torch.zeros(1)}, fields=fields, **more),
    ):
        header, parts = attacker.send(body)
        assert bound in header["refused"]
        assert "this device allows" in header["refused"]
        assert parts == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
    assert attacker.home.ledger(0).releases() == 0


def test_limits_are_the_homes_own(attacker: Attacker) -> None:
    assert "refused" not in attacker.send(attacker.letter())[0]
    for name, value, said in (
        ("memory", 1e4, "of memory, and this device allows 1 MB"),
        ("operations", 1e4, "operations, and this device allows 1.0e+04"),
        ("bytes", 10, "The answer takes up to 1 MB, and this device allows 1 MB"),
    ):
        usual = attacker.home.settings.limits
        attacker.home.configure(limits={name: value})
        assert said in attacker.send(attacker.letter())[0]["refused"]
        attacker.home.configure(limits=usual)
    assert "refused" not in attacker.send(attacker.letter())[0]
    with pytest.raises(HomebodyError, match="There is no limit of a device 'time'"):
        attacker.home.configure(limits={"time": 3})
    with pytest.raises(HomebodyError, match="A device's limit of memory must be a whole number above 0"):
        attacker.home.configure(limits={"memory": 0})


def test_a_catalogue_cannot_fill_the_memory(attacker: Attacker) -> None:
    attacker.home.configure(limits={"memory": 20_000})
    header, _ = attacker.send(attacker.letter())
    assert "of memory" in header["refused"]
    assert len(attacker.home.items) == 0


def test_work_that_takes_too_long_is_given_up_and_leaves_as_zeros(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    attacker.send(attacker.letter())  # from now on the device knows what nothing looks like: only work takes time
    monkeypatch.setattr(Household, "train", lambda *given: free.wait(PATIENCE))
    attacker.home.configure(limits={"seconds": 0.05})
    try:
        header, parts = attacker.send(attacker.letter())
        assert (header["declined"], len(parts)) == ([], 1)
        assert len(wire.decode_tree(parts["0"])["item"].index) == 0
        assert attacker.device.stuck  # the client starts anew: no thread can be stopped
        assert "restarting" in attacker.send(attacker.letter())[0]["refused"]
    finally:
        free.set()


@pytest.mark.parametrize("kernels", [factors, network, privrec, reports])
def test_compiled_kernels_let_other_threads_run(kernels: ModuleType) -> None:
    """One that did not would hold up the clock that it is measured by."""
    compiled = [one.compiled for one in vars(kernels).values() if hasattr(one, "compiled")]
    assert compiled
    assert all(isinstance(one, Dispatcher) and one.targetoptions.get("nogil") for one in compiled)


def test_a_greeting_that_takes_too_long_is_given_up(attacker: Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setattr(Household, "train", lambda *given: free.wait(PATIENCE))
    attacker.home.configure(limits={"seconds": 0.05})
    try:
        header, _ = attacker.send(attacker.greeting(fields={"factors": 2}))
        assert "took longer than this device allows" in header["refused"]
    finally:
        free.set()


def test_a_client_whose_work_does_not_end_starts_itself_anew(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, started = threading.Event(), list[tuple[str, list[str]]]()

    def works(one: Any) -> None:
        with pytest.raises(HomebodyError, match="took longer"):
            one._device._in_time(lambda: free.wait(PATIENCE))

    make_device_key(home.path)
    home.configure(limits={"seconds": 0.05})
    monkeypatch.setattr(client._Client, "run", works)
    monkeypatch.setattr(client.os, "execv", lambda program, arguments: started.append((program, arguments)))
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    threads = torch.get_num_threads()
    try:
        client.take_part(home.path)
    finally:
        free.set()
        torch.set_num_threads(threads)
        for number, handler in handlers:
            signal.signal(number, handler)
    assert started == [(sys.executable, sys.orig_argv)]
    assert not home.store.client_runs()


@pytest.mark.parametrize("now", [-1e9, 0.0, 4e9, 1e11])
def test_a_clock_that_is_set_back_or_forward_changes_no_charge(
    attacker: Attacker, monkeypatch: pytest.MonkeyPatch, now: float
) -> None:
    attacker.home.configure(budget="eps=4.5,delta=0,observer=server")
    stages = ["clip:norm=1,order=1", "laplace:b=1"]  # ε = 2 a release
    first = attacker.letter(stages=stages)
    given = attacker.send(first)
    monkeypatch.setattr(time, "time", lambda: now)
    assert attacker.send(first) == given
    answers = [attacker.send(attacker.letter(stages=stages)) for _ in range(2)]
    assert [len(parts) for _, parts in answers] == [1, 0]
    assert attacker.home.ledger(0).releases() == 2
    assert len(attacker.home.outbox.sent(0)) == 2


class Understated(FedMF):
    """A method file that says less than its channel does."""

    def charges(self, cohort: Cohort) -> list[Charge]:
        return [Charge(who, "user", LaplaceRelease(1e9, "replace-one")) for who in ("server", "clients", "public")]


class Silent(FedMF):
    about = replace(FedMF.about, sends=False)


@pytest.mark.parametrize("noisy", [False, True])
def test_what_a_method_file_states_of_itself_is_never_certified(noisy: bool) -> None:
    method = Understated(uplink=_channel()) if noisy else Understated()
    stated = releases(method, Cohort(np.arange(9), "all", 9, 9))
    assert {one.observer for one in stated} == {"server", "clients", "public"}
    assert all(isinstance(one.event, NonPrivate) for one in stated)


def test_a_method_that_says_that_it_sends_nothing_cannot_send() -> None:
    from homebody.simulation import Simulator
    from homebody.testing import population
    from homebody.training import fit

    claimed = releases(Silent(), Cohort(np.arange(9), "all", 9, 9))
    assert all(isinstance(one.event, NonPrivate) for one in claimed)
    with pytest.raises(HomebodyError, match="says that it sends nothing"):
        fit(Silent(factors=2), Simulator(population()), rounds=1)

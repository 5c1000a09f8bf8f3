"""Real devices with real homes, in one process and without a network: the runtime that asks them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from homebody.core import Catalogue
from homebody.errors import HomebodyError
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.runtime import wire

METHODS = {
    "fedmf": {"factors": 4},
    "fedmf dual": {"factors": 4, "dual": True},
    "pfedrec": {"factors": 4},
    "pfedrec deep": {"factors": 4, "hidden": "3"},
    "fedials": {"factors": 4},
    "fedrecon": {"factors": 4},
    "fedncf": {"factors": 4, "hidden": "4,2"},
    "fedncf dual": {"factors": 4, "hidden": "4,2", "dual": True},
}


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("method", METHODS)
def test_devices_train_what_a_simulation_trains(
    town: Callable[..., Any], people: Callable[..., Any], method: str, cohort: int | None
) -> None:
    plan = Recipe(method.split()[0], "devices", METHODS[method], rounds=3, seed=5, cohort=cohort, evaluate_every=0)
    one = town(people(), (3, 1, 2, 1), plan)
    fitted = one.fit()
    one.near(fitted.shared, one.simulated().shared)
    assert one.records.counters() == {}
    assert [line["clients"] for line in one.records.rounds()] == [cohort or 7] * 3


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedials"])
def test_numbers_may_travel_in_sixteen_bits(town: Callable[..., Any], people: Callable[..., Any], method: str) -> None:
    plan = Recipe(method, "devices", METHODS[method], rounds=3, seed=5, evaluate_every=0)
    one = town(people(), (4, 3), plan, half=True)
    fitted = one.fit()
    wanted = one.simulated()
    one.near(fitted.shared, wanted.shared, tolerance=0.01)
    assert any(not torch.equal(fitted.shared[name], value) for name, value in wanted.shared.items())
    full = town(people(), (4, 3), plan)
    full.fit()
    assert one.records.rounds()[1]["bytes_up"] < 0.8 * full.records.rounds()[1]["bytes_up"]


@pytest.mark.parametrize("cohort", [None, 4])
@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedrecon"])
def test_what_devices_measure_is_what_a_simulation_measures(
    town: Callable[..., Any], people: Callable[..., Any], method: str, cohort: int | None
) -> None:
    plan = Recipe(method, "devices", METHODS[method], rounds=3, seed=5, cohort=cohort, cutoffs=[3])
    one = town(people(), (3, 2, 1, 1), plan)
    fitted = one.fit()
    lines: list[Any] = []
    wanted = one.simulated(on_round=lines.append)
    for found, line in zip(one.records.rounds(), lines, strict=True):
        assert found["metrics"] == pytest.approx(line.metrics, abs=1e-6)
    assert (fitted.chosen, fitted.metrics) == (wanted.chosen, pytest.approx(wanted.metrics, abs=1e-6))
    one.near(fitted.shared, wanted.shared)
    told = [entry.release for entry in one.records.ledger().entries()]
    rounds = [name for n in (1, 2, 3) for name in (f"train/{n}", f"train/{n}/telemetry")]
    assert list(dict.fromkeys(told)) == rounds


PLAN = Recipe("fedmf", "devices", METHODS["fedmf"], rounds=3, seed=5, evaluate_every=0)


def silent(one: Any, *marks: str) -> None:
    """These devices greet, and answer nothing else."""
    for mark in marks:
        one.mail.twisted[mark] = lambda kind, letter, answer: answer if kind == "query.hello" else None


def test_a_round_with_too_few_answers_is_abandoned_charged_and_tried_again(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), (3, 1, 3), PLAN, quorum=0.6)
    asked: list[str] = []

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes | None:
        asked.append(kind)
        return None if kind == "train" and asked.count("train") in (1, 2) else answer

    one.mail.twisted["mark0"] = twist
    one.near(one.fit().shared, one.simulated().shared)
    assert one.told() == ["train/1", "train/1#2", "train/1#3", "train/2", "train/3"]
    assert one.records.counters() == {"answers_missing": 2, "rounds_abandoned": 2}
    assert [line["clients"] for line in one.records.rounds()] == [7, 7, 7]
    # Those who had answered before answered the same, which told nothing more.
    assert one.own(1, 0) == one.own(0, 0) == ["train/1", "train/2", "train/3"]


def test_a_quorum_is_of_the_cohort(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """4 of 7 are 57 %: enough for 0.57, and too few for 0.58."""
    for quorum, enough in ((0.57, True), (0.58, False)):
        one = town(people(), (3, 1, 3), replace(PLAN, rounds=1), quorum=quorum)
        silent(one, "mark0")
        if enough:
            one.fit()
            assert [line["clients"] for line in one.records.rounds()] == [4]
        else:
            with pytest.raises(HomebodyError, match="4 of 7 clients answered within 60 s, and 5 must"):
                one.fit()


def test_after_five_attempts_the_server_gives_up_and_comes_back_to_the_sixth(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), (3, 4), replace(PLAN, rounds=2))
    silent(one, "mark1")
    with pytest.raises(HomebodyError, match=r"3 of 7 clients .* Given up after 5 attempts at round 1\."):
        one.fit()
    assert one.told() == ["train/1", *(f"train/1#{n}" for n in (2, 3, 4, 5))]
    assert one.records.rounds() == []
    one.mail.twisted.clear()
    one.near(one.fit().shared, one.simulated().shared)
    assert one.told()[5:] == ["train/1#6", "train/2"]


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.parametrize("when", ["opened", "charged", "answered", "recorded", "saved"])
@pytest.mark.parametrize("round_", [1, 2])
def test_a_server_killed_in_a_round_goes_on_with_the_same_cohort_and_no_second_charge(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, when: str, round_: int
) -> None:
    plan = replace(PLAN, cohort=4)
    one = town(people(), (3, 1, 3), plan)
    runtime, ledger = one.runtime(), one.records.ledger()
    where = {
        "opened": (one.records, "open_round"),
        "charged": (ledger, "charge"),
        "answered": (runtime, "collect"),
        "recorded": (one.records, "add_round"),
        "saved": (one.records, "save"),
    }
    owner, name = where[when]
    real, calls = getattr(owner, name), [0]

    def killed(*given: Any, **more: Any) -> Any:
        out = real(*given, **more)
        calls[0] += 1
        if calls[0] == round_:
            raise Killed
        return out

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            one.fit(runtime, ledger=ledger, on_round=one.records.add_round)
    # Others are there when it comes back; the round that was cut short is still with those it was opened with.
    one.records.add_device("late", b"late", "late", 1)
    one.near(one.fit().shared, one.simulated().shared)
    assert one.told() == ["train/1", "train/2", "train/3"]
    assert len(one.records.ledger().entries()) == 9
    assert [line["step"] for line in one.records.rounds()] == [1, 2, 3]
    for device, size in enumerate((3, 1, 3)):
        for slot in range(size):
            assert len(one.own(device, slot)) == len(set(one.own(device, slot)))


def test_a_device_that_lost_what_it_was_given_is_given_it_again(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """Here between telemetry, after which the server holds it for known, and the next round."""
    one = town(people(), (3, 1, 3), replace(PLAN, evaluate_every=1))
    devices = one.mail.devices
    lost: list[bytes] = []

    class Forgetful:
        def answer(self, body: bytes) -> bytes:
            header, parts = wire.open_letter(body)
            if header["do"] == "evaluate" and "shared" not in parts:
                lost.append(body)
            if header["do"] == "evaluate" and len(lost) == 1:
                one.homes[0]._db.execute("DELETE FROM shared")
                lost.append(body)
            given: bytes = real.answer(body)
            return given

    real, devices["mark0"] = devices["mark0"], Forgetful()
    runtime = one.runtime()
    one.near(one.fit(runtime).shared, one.simulated().shared)
    assert one.records.counters() == {}
    # A model that a device has is not sent again, unless it is gone.
    known = runtime.publish(PLAN.build(), one.records.load().shared, 3, set())
    before = len(one.mail.letters)
    one.homes[1]._db.execute("DELETE FROM shared")
    runtime.publish(PLAN.build(), one.records.load().shared, 3, set())
    sent = [
        (mark, wire.open_letter(body)[0]["do"], "shared" in wire.open_letter(body)[1])
        for mark, _, body in one.mail.letters[before:]
    ]
    assert known == {"mark0", "mark1", "mark2"}
    assert sorted(sent) == sorted(
        [("mark0", "adapt", False), ("mark1", "adapt", False), ("mark1", "adapt", True), ("mark2", "adapt", False)]
    )


@pytest.mark.parametrize("measured", [0, 1])
def test_items_may_come_while_training_goes_on(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, measured: int
) -> None:
    """After round 1 the catalogue grows from 20 to 30, the moment devices are looked for; after round 2 to 33."""
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=4, evaluate_every=measured), items=20)
    done: list[int] = []

    def on_round(line: Any) -> None:
        one.records.add_round(line)
        done.append(line.step)
        one.grow({1: 30, 2: 33}.get(line.step, 0))

    runtime = one.runtime()
    collect, begun = runtime.collect, {}

    def growing(*given: Any) -> Any:
        out = collect(*given)
        begun[given[-1]] = given[1]["item"]
        if given[-1] == 3:
            one.grow(36)  # between a round and its telemetry
        return out

    monkeypatch.setattr(runtime, "collect", growing)
    fitted = one.fit(runtime, on_round=on_round)
    assert one.records.counters() == {}
    assert done == [1, 2, 3, 4]
    assert [line["clients"] for line in one.records.rounds()] == [7] * 4
    assert len(one.records.load().shared["item"]) == 36
    assert [home.n_items() for home in one.homes] == [36] * 3
    if measured:
        assert all(line["metrics"] for line in one.records.rounds())
        assert len(fitted.shared["item"]) == 36
    # New rows begin as those of a server that knew them from the start.
    start = PLAN.build().init_shared(Catalogue(36), Rng.of(5, "train").fold("shared"))["item"]
    assert [len(begun[step]) for step in (1, 2, 3, 4)] == [20, 30, 33, 36]
    for step, known in ((1, 0), (2, 20), (3, 30), (4, 33)):
        assert torch.equal(begun[step][known:], start[known : len(begun[step])])


def test_a_device_that_was_away_learns_of_the_items_that_came(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.runtime.flower.ITEMS_AT_ONCE", 4)
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=4), items=20)
    one.mail.offline.add("mark1")

    def on_round(line: Any) -> None:
        one.records.add_round(line)
        one.grow(30)
        if line.step == 2:
            one.mail.offline.clear()

    one.fit(on_round=on_round)
    assert [line["clients"] for line in one.records.rounds()] == [6, 6, 7, 7]
    assert one.homes[1].n_items() == 30
    told = [wire.open_letter(body)[1].get("items", b"[0, []]") for mark, _, body in one.mail.letters if mark == "mark1"]
    assert max(len(json.loads(part)[1]) for part in told) == 4
    assert one.homes[1].items([29]) == [("item-29", "Title of 29")]


def test_a_round_that_was_cut_short_is_asked_again_about_the_same_catalogue(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=2), items=20)
    with monkeypatch.context() as patch:

        def killed(line: Any) -> None:
            raise Killed

        patch.setattr(one.records, "save", killed)
        with pytest.raises(Killed):
            one.fit()
    one.grow(30)
    one.fit()
    assert one.told() == ["train/1", "train/2"]
    assert one.own(0, 0) == one.own(2, 2) == ["train/1", "train/2"]
    assert len(one.records.load().shared["item"]) == 30


def test_telemetry_asked_again_after_a_kill_is_answered_the_same(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise included: nobody tells twice what was charged once."""
    noisy = replace(PLAN, rounds=1, evaluate_every=1, stages=["clip:norm=5,order=1", "laplace:b=0.1"])
    for gone in (False, True):
        one = town(people(), (3, 1, 3), noisy, quorum=0.3)
        with monkeypatch.context() as patch:

            def killed(line: Any, one: Any = one) -> None:
                one.lost = line
                raise Killed

            patch.setattr(one.records, "add_round", killed)
            with pytest.raises(Killed):
                one.fit()
        if gone:
            one.mail.offline.add("mark1")
        one.fit()
        (line,) = one.records.rounds()
        # With one device less another model is trained, about which nobody was charged: it is not measured.
        assert line["metrics"] == ({} if gone else one.lost.metrics)
        assert one.told() == ["train/1", "train/1/telemetry"]
        assert one.own(0, 0) == ["train/1", "train/1/telemetry"]


def test_telemetry_leaves_through_a_noisy_channel_and_is_charged(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    plain = replace(PLAN, evaluate_every=1, rounds=2)
    noisy = replace(plain, stages=["clip:norm=5,order=1", "laplace:b=0.001"])
    one, other, exact = (town(people(), (3, 1, 3), plan) for plan in (noisy, noisy, plain))
    for each in (one, other, exact):
        each.fit()
    first = [each.records.rounds()[0]["metrics"] for each in (one, other, exact)]
    assert first[0] != first[1]  # the noise is nobody's to repeat
    entries = [entry for entry in one.records.ledger().entries() if entry.release.endswith("telemetry")]
    assert {entry.observer for entry in entries} == {"server", "clients", "public"}
    assert all("Laplace" in str(entry) or "laplace" in str(entry) for entry in entries)
    mine = one.homes[0].ledger(0)
    assert mine.epsilon("server").epsilon == one.records.ledger().epsilon("server").epsilon < float("inf")
    # What leaves is noise in every coordinate, not what was measured.
    (body,) = [body for mark, kind, body in one.mail.answers if (mark, kind) == ("mark1", "evaluate")][:1]
    told = wire.unpack(wire.open_letter(body)[1]["3"])
    assert int((told["metrics"] == 0).sum()) == 0

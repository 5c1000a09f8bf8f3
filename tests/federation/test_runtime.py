"""Real devices with real homes, in one process and without a network: the runtime that asks them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from homebody.core import Batch, Catalogue, Data, Method, Phase, Rows, Total, Tree
from homebody.errors import Abandoned, HomebodyError
from homebody.federation import wire
from homebody.federation.device.household import recommend
from homebody.federation.server import letters as correspondence
from homebody.privacy import Channel
from homebody.recipe import Recipe
from homebody.rng import Rng

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


@pytest.fixture(autouse=True)
def cohorts_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real cohorts are drawn by the system; here they are those of the simulation that is compared with."""
    monkeypatch.setattr("homebody.training._draw", lambda runtime, rng, number: rng.fold("cohort", number))


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
        one = town(people(), (3, 1, 3), replace(PLAN, rounds=1), quorum=quorum, least=7)
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
    one = town(people(), (3, 4), replace(PLAN, rounds=2), least=7)
    silent(one, "mark1")
    with pytest.raises(Abandoned, match=r"3 of 7 clients .* Given up after 5 attempts at round 1\."):
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
            header, parts = wire.decode_letter(body)
            if header["do"] == "evaluate" and "shared" not in parts:
                lost.append(body)
            if header["do"] == "evaluate" and len(lost) == 1:
                one.homes[0].store.connection.execute("DELETE FROM shared")
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
    one.homes[1].store.connection.execute("DELETE FROM shared")
    runtime.publish(PLAN.build(), one.records.load().shared, 3, set())
    sent = [
        (mark, wire.decode_letter(body)[0]["do"], "shared" in wire.decode_letter(body)[1])
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
    # Told again once it is measured.
    assert done == ([1, 1, 2, 2, 3, 3, 4, 4] if measured else [1, 2, 3, 4])
    assert [line["clients"] for line in one.records.rounds()] == [7] * 4
    assert len(one.records.load().shared["item"]) == 36
    assert [len(home.items) for home in one.homes] == [36] * 3
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
    monkeypatch.setattr("homebody.federation.server.letters.ITEMS_AT_ONCE", 4)
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=4), items=20)
    one.mail.offline.add("mark1")

    def on_round(line: Any) -> None:
        one.records.add_round(line)
        one.grow(30)
        if line.step == 2:
            one.mail.offline.clear()

    one.fit(on_round=on_round)
    assert [line["clients"] for line in one.records.rounds()] == [6, 6, 7, 7]
    assert len(one.homes[1].items) == 30
    told = [
        wire.decode_letter(body)[1].get("items", b"[0, []]") for mark, _, body in one.mail.letters if mark == "mark1"
    ]
    assert max(len(json.loads(part)[1]) for part in told) == 4
    assert one.homes[1].items.all()[29] == ("item-29", "Title of 29")


def test_a_round_that_was_cut_short_and_would_ask_something_else_now_is_charged_anew(
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
    assert one.told() == ["train/1", "train/1#2", "train/2"]
    assert one.own(0, 0) == one.own(2, 2) == ["train/1", "train/1", "train/2"]
    assert len(one.records.load().shared["item"]) == 30


def test_telemetry_asked_again_after_a_kill_is_answered_the_same(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise included. The server is charged again all the same: it does not know who had answered."""
    one = town(
        people(), (3, 1, 3), replace(PLAN, rounds=1, evaluate_every=1, stages=["clip:norm=5,order=1", "laplace:b=0.1"])
    )
    lost: list[Any] = []
    add = one.records.add_round

    def killed(line: Any) -> None:
        if line.metrics:
            lost.append(line.metrics)
            raise Killed
        add(line)

    with pytest.raises(Killed):
        one.fit(on_round=killed)
    fitted = one.fit()
    assert {**fitted.metrics} == lost[0]
    assert one.told() == ["train/1", "train/1/telemetry", "train/1/telemetry#2"]
    assert one.own(0, 0) == ["train/1", "train/1/telemetry"]
    one.fit()  # it is measured, and not asked again
    assert len(one.told()) == 3


@pytest.mark.random_draws
def test_telemetry_leaves_through_a_noisy_channel_and_is_charged(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """Fails by chance if noise is 0 in half of at least 30 numbers, or the same in all of two runs; each is with a
    chance below 1e-3 of one number: below C(30, 15) · 1e-45 < 1e-36."""
    plain = replace(PLAN, evaluate_every=1, rounds=2)
    noisy = replace(plain, stages=["clip:norm=5,order=1", "laplace:b=0.1"])
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
    told = wire.decode_tree(wire.decode_letter(body)[1]["3"])
    assert told["metrics"].numel() >= 30
    assert (told["metrics"] == 0).double().mean() < 0.5


NOISY = replace(PLAN, stages=["clip:norm=1,order=1", "laplace:b=1"])
"""Each round costs the server ε = 2: an ℓ1 sensitivity of 2 against a scale of 1."""


def test_training_ends_before_the_servers_budget_is_broken(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), (3, 1, 3), replace(NOISY, rounds=5, budget="eps=6.5,delta=0,observer=server"))
    fitted = one.fit()
    assert one.told() == ["train/1", "train/2", "train/3"]
    assert fitted.stopped is not None
    assert "before round 4 of 5" in fitted.stopped
    assert fitted.epsilon["server"] == pytest.approx(6.0)


def test_telemetry_that_would_break_the_budget_is_not_asked(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """Three releases fit: two rounds with the first one's telemetry between."""
    plan = replace(NOISY, rounds=2, evaluate_every=1, budget="eps=6.5,delta=0,observer=server")
    one = town(people(), (3, 1, 3), plan)
    one.fit()
    assert one.told() == ["train/1", "train/1/telemetry", "train/2"]
    assert one.records.rounds()[1]["metrics"] == {}
    assert [kind for mark, kind, _ in one.mail.letters if mark == "mark1"].count("evaluate") == 1


def test_a_person_whose_budget_is_spent_declines_and_is_left_alone(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), (3, 1, 3), replace(NOISY, rounds=5), quorum=0.5)
    one.homes[1].configure(budget="eps=4.5,delta=0,observer=server")
    one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [7, 7, 6, 6, 6]
    assert one.records.counters() == {"declined": 1}
    assert one.own(1, 0) == ["train/1", "train/2"]
    assert one.homes[1].ledger(0).epsilon("server", delta=0).epsilon == pytest.approx(4.0)
    assert len(one.own(0, 0)) == 5


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (["secure-sum"], "A secure sum needs to know how large a number may be"),
        (["one-bit:epsilon=1,k=1", "shuffle"], "Shuffle needs a proxy between devices and server"),
        (["ask-rows"], "ask-rows needs more than one letter a round"),
    ],
)
def test_stages_that_devices_cannot_do_yet_are_refused_before_anything_is_charged(
    town: Callable[..., Any], people: Callable[..., Any], stages: list[str], said: str
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, stages=stages))
    with pytest.raises(HomebodyError, match=said):
        one.fit()
    assert one.told() == []


@pytest.mark.parametrize(
    "stages",
    [
        ["clip:norm=1"],
        ["clip:norm=1", "gaussian:z=1"],
        ["clip:norm=1,order=1", "laplace:b=1"],
        ["clip:norm=1,order=1", "laplace:b=1,where=sum"],
        ["laplace:b=0.1,unbounded=true"],
        ["one-bit:epsilon=1,k=3"],
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_every_other_stage_works_on_devices_and_for_telemetry(
    town: Callable[..., Any], people: Callable[..., Any], stages: list[str], half: bool
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=2, stages=stages, evaluate_every=1), half=half)
    one.fit()
    assert one.records.counters() == {}
    assert [line["clients"] for line in one.records.rounds()] == [7, 7]


def test_a_clipped_update_is_what_a_simulation_clips(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, stages=["clip:norm=0.5"]))
    one.near(one.fit().shared, one.simulated().shared)


@pytest.mark.random_draws
@pytest.mark.parametrize("stages", [["clip:norm=1,order=1", "laplace:b=1"], ["clip:norm=1", "gaussian:z=1"]])
def test_noise_comes_from_the_operating_system(
    town: Callable[..., Any], people: Callable[..., Any], stages: list[str]
) -> None:
    """On the device or on the server: the same seed gives other noise each time, and the simulator's is none of it.

    Two draws are within 1e-4 with a chance below 1e-3, so that half of at least 50 numbers are with one below
    C(50, 25) · 1e-75 < 1e-60.
    """
    plan = replace(PLAN, rounds=1, stages=stages)
    one, other = (town(people(), (3, 1, 3), plan) for _ in range(2))
    first, second, simulated = one.fit().shared["item"], other.fit().shared["item"], one.simulated().shared["item"]
    assert first.numel() >= 50
    for one_more in (second, simulated):
        assert torch.isclose(first, one_more, atol=1e-4).double().mean() < 0.5


@pytest.mark.random_draws
def test_two_devices_of_the_same_data_and_seed_draw_other_noise(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """Only what is agreed upon is drawn from the key: without noise their answers are the same, bit by bit.

    With noise, at least 50 numbers would have to agree by chance, each with one below 1e-3: below 1e-150.
    """
    for plan, same in ((PLAN, True), (NOISY, False)):
        twins = [town(people((6,)), (1,), replace(plan, rounds=1)) for _ in range(2)]
        for one in twins:
            one.fit()
        answers = [
            wire.decode_letter(body)[1]["0"] for one in twins for _, kind, body in one.mail.answers if kind == "train"
        ]
        assert (answers[0] == answers[1]) == same


def test_opting_out_and_in_while_training_goes_on(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """One of three in a household, then the only person of a device, who comes back."""
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=6), quorum=0.5)

    def on_round(line: Any) -> None:
        one.records.add_round(line)
        if line.step == 1:
            one.homes[0].people.opt_out("person-1")
            one.homes[1].people.opt_out("person-3")
        if line.step == 4:
            one.homes[1].people.opt_in("person-3")
            one.clock.sleep(correspondence.GREET_SECONDS + correspondence.REST_SECONDS)

    one.fit(on_round=on_round)
    # In round 2 the server does not know yet.
    assert [line["clients"] for line in one.records.rounds()] == [7, 5, 5, 5, 6, 6]
    assert one.own(0, 1) == ["train/1"]
    assert one.own(1, 0) == ["train/1", "train/5", "train/6"]
    assert one.homes[0].models.state(1, one.plan.run) is None


def test_a_device_that_rests_is_not_waited_for(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=4))

    def on_round(line: Any) -> None:
        one.records.add_round(line)
        one.mail.offline = {"mark2"} if line.step in (1, 2) else set()

    began = one.clock.now
    one.fit(on_round=on_round)
    assert [line["clients"] for line in one.records.rounds()] == [7, 4, 4, 7]
    assert one.clock.now - began < 5
    assert one.records.counters() == {}


def test_a_device_that_leaves_between_the_choice_and_the_letter_costs_no_deadline(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=1), quorum=0.5)
    runtime = one.runtime()
    opened = runtime.open

    def leaving(*given: Any) -> Any:
        one.mail.offline.add("mark1")
        return opened(*given)

    monkeypatch.setattr(runtime, "open", leaving)
    began = one.clock.now
    one.fit(runtime)
    assert [line["clients"] for line in one.records.rounds()] == [6]
    assert one.clock.now - began < 5


def leaves_for_a_while(one: Any, monkeypatch: pytest.MonkeyPatch, mark: str, seconds: float) -> None:
    """A device goes away with the first letter of a round, and comes back after so long."""
    post, sleep, back = one.mail.send, one.clock.sleep, [math.inf]

    def send(letters: Any, deadline: float) -> Any:
        sent = post(letters, deadline)
        if back == [math.inf] and {kind for kind, _ in letters.values()} == {"train"}:
            one.mail.offline.add(mark)
            back[0] = one.clock.now + seconds
        return sent

    def passes(given: float) -> None:
        sleep(given)
        if one.clock.now > back[0]:
            one.mail.offline.discard(mark)

    monkeypatch.setattr(one.mail, "send", send)
    monkeypatch.setattr(one.clock, "sleep", passes)


def test_a_device_without_which_there_are_too_few_is_waited_for_until_the_deadline(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give the round up would cost everybody another charge."""
    one = town(people(), (3, 1, 3), PLAN, quorum=0.8, deadline=60.0)
    leaves_for_a_while(one, monkeypatch, "mark2", 40.0)
    one.near(one.fit().shared, one.simulated().shared)
    assert one.told() == ["train/1", "train/2", "train/3"]
    assert one.records.counters() == {}


def test_a_device_that_there_are_enough_without_is_not_waited_for_long(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=1), quorum=0.5, deadline=60.0)
    leaves_for_a_while(one, monkeypatch, "mark2", 40.0)
    began = one.clock.now
    one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [4]
    assert one.clock.now - began < 5


def test_a_round_that_was_cut_short_waits_for_the_devices_that_it_needs(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=1), least=4, deadline=60.0)
    with monkeypatch.context() as patch:
        receive = one.mail.receive

        def killed(*given: Any) -> Any:
            if one.said("opened"):
                raise Killed
            return receive(*given)

        patch.setattr(one.mail, "receive", killed)
        with pytest.raises(Killed):
            one.fit()
    one.mail.offline.add("mark2")
    sleep, back = one.clock.sleep, one.clock.now + 40

    def passes(seconds: float) -> None:
        sleep(seconds)
        if one.clock.now > back:
            one.mail.offline.clear()

    monkeypatch.setattr(one.clock, "sleep", passes)
    one.near(one.fit().shared, one.simulated().shared)
    assert one.told() == ["train/1"]
    assert one.records.counters() == {}


def test_of_more_people_than_are_registered_the_first_take_part(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=1))
    guest = one.homes[1].people.add("a guest")
    one.homes[1].history.append(guest, "item-1")
    one.near(one.fit().shared, one.simulated().shared)
    assert [line["clients"] for line in one.records.rounds()] == [7]
    assert not one.homes[1].ledger_file(guest).exists()


def test_whoever_has_no_history_answers_too_with_nothing(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """Charged like everybody: whether somebody answers must not tell what they have."""
    one = town(people((6, 0, 4)), (2, 1), replace(PLAN, rounds=3))

    def on_round(line: Any) -> None:
        one.records.add_round(line)
        if line.step == 2:
            one.homes[0].history.append("person-1", "item-3")

    one.fit(on_round=on_round)
    assert [line["clients"] for line in one.records.rounds()] == [3, 3, 3]
    assert one.records.counters() == {}
    assert one.own(0, 1) == ["train/1", "train/2", "train/3"]
    states = [one.homes[0].models.state(slot, one.plan.run) for slot in (0, 1)]
    assert [state.step for state in states] == [3, 3]
    assert one.homes[0].models.state(1, one.plan.run, before=3) is None


def test_the_server_waits_for_as_many_people_as_it_was_told(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = town(people(), (3, 1, 3), replace(PLAN, rounds=1), least=7)
    one.mail.offline.add("mark2")
    real = one.clock.sleep

    def sleep(seconds: float) -> None:
        real(seconds)
        if one.clock.now > 1030:
            one.mail.offline.clear()

    monkeypatch.setattr(one.clock, "sleep", sleep)
    one.near(one.fit().shared, one.simulated().shared)
    assert one.said("waiting") == [{"event": "waiting", "present": 4, "least": 7}]


def test_rankings_are_asked_of_devices_alone(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), (3, 1, 3), PLAN)
    with pytest.raises(HomebodyError, match="Rankings stay on the devices"):
        one.fit().ranked(0)


@dataclass(frozen=True)
class Sums(Method):
    """The server adds up what people counted; a person counts their rounds, from what they drew when they joined."""

    uplink: Channel = Channel()

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"total": torch.zeros(catalogue.n_items)}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"rounds": rng.uniform(1)[0]}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"index": torch.where(data.valid, data.items, -1)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Tree, Tree]:
        count = local["rounds"] + 1
        rows = Rows(batch["index"], count.expand(batch["index"].shape), len(shared["total"]))
        return {"total": rows}, {"rounds": count}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {**shared, "total": shared["total"] + total.sum["total"]}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: torch.Tensor) -> torch.Tensor:
        return shared["total"][items] + 0 * local["rounds"]


@dataclass(frozen=True)
class Slower(Sums):
    """Shares one thing more, and ranks from the end."""

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {**super().init_shared(catalogue, rng), "bias": rng.uniform(2)}

    def score(self, shared: Tree, local: Tree, data: Data, items: torch.Tensor) -> torch.Tensor:
        return -shared["total"][items] + 0 * local["rounds"]


@dataclass(frozen=True)
class InTwo(Sums):
    @property
    def phases(self) -> tuple[Phase, ...]:
        return (Phase("first", rounds=2), Phase("second", Slower(self.uplink)))


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A method of two phases, installed for as long as the test runs."""
    monkeypatch.setattr("homebody.methods.find", lambda name: InTwo)
    monkeypatch.setattr("homebody.federation.task.METHODS", {**METHODS, "intwo": "homebody.methods.intwo"})
    return Recipe("intwo", "devices", rounds=2, seed=5, evaluate_every=1, cutoffs=[3])


def test_a_method_of_two_phases_is_the_same_on_devices(
    town: Callable[..., Any], people: Callable[..., Any], in_two: Recipe
) -> None:
    """In the second phase people begin without a state, though the device still has that of the first."""
    one = town(people(), (3, 1, 3), in_two)
    lines: list[Any] = []
    wanted = one.simulated(on_round=lines.append)
    fitted = one.fit()
    one.near(fitted.shared, wanted.shared)
    assert (fitted.chosen, type(fitted.method)) == (wanted.chosen, Slower)
    for found, line in zip(one.records.rounds(), lines, strict=True):
        assert (found["phase"], found["metrics"]) == (line.phase, pytest.approx(line.metrics, abs=1e-6))
    assert one.own(0, 0) == [
        f"{name}{more}" for name in ("first/1", "first/2", "second/1", "second/2") for more in ("", "/telemetry")
    ]


def test_no_device_is_public(town: Callable[..., Any], people: Callable[..., Any], in_two: Recipe) -> None:
    with pytest.raises(HomebodyError, match="No device's data is public"):
        town(people(), (3,), in_two).runtime().available(public=True)


@pytest.mark.parametrize("restarted", [False, True])
def test_devices_rank_with_the_last_phases_method(
    town: Callable[..., Any], people: Callable[..., Any], in_two: Recipe, restarted: bool
) -> None:
    """Also where the server was started anew, after training, before it gave the model away."""
    one = town(people(), (3, 1, 3), in_two)
    runtime = one.runtime()
    fitted = one.fit(runtime)
    if restarted:
        runtime = one.runtime()
        fitted = one.fit(runtime)
    assert runtime.publish(fitted.method, fitted.shared, fitted.chosen, set()) == {"mark0", "mark1", "mark2"}
    best = recommend(one.homes[1], one.homes[1].people.find(0), 3)
    scores = -fitted.shared["total"].clone()
    scores[one.homes[1].history.population().history(0).tolist()] = -torch.inf
    assert [item.score for item in best] == pytest.approx(sorted(scores.tolist(), reverse=True)[:3])
    assert all(item.name.startswith("Title of ") for item in best)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_server_killed_in_any_phase_comes_back_to_it(
    town: Callable[..., Any], people: Callable[..., Any], in_two: Recipe, step: int
) -> None:
    one = town(people(), (3, 1, 3), in_two)

    def killed(line: Any) -> None:
        if line.step == step:
            raise Killed
        one.records.add_round(line)

    with pytest.raises(Killed):
        one.fit(on_round=killed)
    told = one.told()
    fitted = one.fit()
    wanted = one.simulated()
    one.near(fitted.shared, wanted.shared)
    assert fitted.chosen == wanted.chosen
    assert len(one.told()) == 8
    assert one.told()[: len(told)] == told
    assert len(one.own(1, 0)) == len(set(one.own(1, 0))) == 8

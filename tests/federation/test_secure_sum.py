"""A secure sum among real devices with real homes, in one process and without a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Cohort
from homebody.data import Population
from homebody.data.partitions import everything
from homebody.errors import Abandoned, HomebodyError
from homebody.federation import wire
from homebody.federation.device.sums import Sums
from homebody.federation.secure_sum.collector import Collector
from homebody.federation.secure_sum.messages import EXCHANGES
from homebody.federation.secure_sum.together import add_up
from homebody.federation.server.plan import ServerPlan
from homebody.federation.task import Task
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

METHODS = {"fedmf": {"factors": 4}, "pfedrec": {"factors": 4}, "fedials": {"factors": 4}}
RANGE = ["secure-sum:range=1000"]
PLAN = Recipe("fedmf", "devices", {"factors": 4}, stages=RANGE, rounds=2, seed=5, evaluate_every=0)
NOISY = replace(PLAN, stages=["clip:norm=1", "skellam:z=2", "secure-sum"])
HOMES = (2, 2, 2, 1)


def exchange_of(letter: bytes) -> str:
    header, _ = wire.decode_letter(letter)
    task = Task.read(header)
    return task.sum.exchange if task.sum else ""


def in_letters(one: Any, other: Any, *lost: str) -> None:
    """The same as devices reach with their updates in letters, without those who are lost."""
    for mark in lost:
        other.mail.twisted[mark] = lambda kind, letter, answer: answer if kind == "query.hello" else None
    one.near(one.records.load().shared, other.fit().shared, tolerance=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_devices_add_up_what_a_simulation_adds_up(
    town: Callable[..., Any], people: Callable[..., Any], method: str
) -> None:
    plan = Recipe(method, "devices", METHODS[method], stages=RANGE, rounds=5, seed=5, cutoffs=[3])
    one = town(people(), HOMES, plan)
    fitted = one.fit()
    lines: list[Any] = []
    wanted = one.simulated(on_round=lines.append)
    one.near(fitted.shared, wanted.shared, tolerance=1e-4)
    for found, line in zip(one.records.rounds(), lines, strict=True):
        assert found["clients"] == 7
        if method != "fedials":  # whose items are so alike at first that rounding swaps their ranks
            assert found["metrics"] == pytest.approx(line.metrics, abs=1e-4)
    assert one.records.counters() == {}
    kinds = [exchange_of(body) for _, kind, body in one.mail.letters if kind == "train"]
    assert kinds[:20] == [name for name in EXCHANGES for _ in HOMES]


@pytest.mark.parametrize(("method", "most"), [("fedmf", 10), ("pfedrec", 10), ("fedials", 100)])
def test_each_sum_is_the_simulators_to_a_step_for_each_person(
    town: Callable[..., Any], twenty: Population, method: str, most: int
) -> None:
    """Four devices of five people of MovieLens-100K each. Rounding moves each person's numbers by a step at most."""
    plan = Recipe(method, "devices", stages=[f"secure-sum:range={most}"], rounds=5, seed=5, evaluate_every=0)
    one = town(twenty, (5, 5, 5, 5), plan)
    simulator, runtime = Simulator(everything(twenty, seed=5)), one.runtime()
    begin, collect, worst = runtime.begin, runtime.collect, list[float]()

    def beginning(acting: Any, rng: Rng) -> None:
        begin(acting, rng)
        simulator.begin(acting, rng)

    def collecting(acting: Any, shared: Any, cohort: Cohort, *more: Any) -> Any:
        found = collect(acting, shared, cohort, *more)
        wanted = simulator.collect(acting, shared, cohort, *more).total.sum
        entries = sum(value.numel() for value in wanted.values())
        step = acting.uplink.ring(entries, 20).step
        apart = [float((found.total.sum[name] - value).abs().max()) for name, value in wanted.items()]
        largest = max(float(value.abs().max()) for value in wanted.values())
        worst.append((max(apart) - 1e-6 * largest) / step)  # numbers of 32 bits are rounded, too
        return found

    runtime.begin, runtime.collect = beginning, collecting
    one.near(one.fit(runtime).shared, one.simulated().shared, tolerance=1e-4)
    assert len(worst) == 5
    assert max(worst) <= 20


def test_the_server_reads_no_vector_of_one_device(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """What a device sends is masked: as bytes it looks like any other, though its update is nearly all zeros."""
    one = town(people(), HOMES, replace(PLAN, rounds=1))
    one.fit()
    for _, kind, body in one.mail.answers:
        parts = wire.decode_letter(body)[1]
        if kind == "train" and len(parts.get(wire.SUM, b"")) > 500:
            content = parts[wire.SUM][9:-96]
            assert content.count(0) < 0.05 * len(content)
            assert parts.keys() == {wire.SUM}


def test_noise_is_charged_once_and_holds_against_the_server(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, NOISY)
    fitted = one.fit()
    assert one.told() == ["train/1", "train/2"]
    spent = one.records.ledger().epsilons(1e-6)
    assert 0 < spent["server"] < spent["clients"] < math.inf
    # A person counts on the noise of their own device alone, as long as nobody vouches for the others.
    own = one.homes[0].ledger(0)
    assert spent["server"] < own.epsilons(1e-6)["server"] < math.inf
    assert one.own(0, 0) == one.own(3, 0) == ["train/1", "train/2"]
    assert all(bool(torch.isfinite(value).all()) for value in fitted.shared.values())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_device_is_lost_in_any_exchange(town: Callable[..., Any], people: Callable[..., Any], exchange: str) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=1), quorum=0.5)
    one.mail.twisted["mark3"] = lambda kind, letter, answer: None if exchange_of(letter) == exchange else answer
    one.fit()
    lost = ["mark3"] if exchange in EXCHANGES[:3] else []
    in_letters(one, town(people(), HOMES, replace(PLAN, rounds=1, stages=[]), quorum=0.5), *lost)
    assert [line["clients"] for line in one.records.rounds()] == [7 - len(lost)]


def test_too_few_devices_open_nothing_and_a_new_attempt_is_charged_again(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, replace(NOISY, rounds=1), quorum=0.5)
    lost: list[str] = []

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes | None:
        if exchange_of(letter) == "survivors" and len(lost) < 2:
            lost.append(kind)
            return None
        return answer

    one.mail.twisted["mark0"] = one.mail.twisted["mark1"] = twist
    one.fit()
    assert one.told() == ["train/1", "train/1#2"]
    assert one.records.counters()["rounds_abandoned"] == 1
    # Its vector had left: the second has other noise, and is charged.
    assert one.own(0, 0) == ["train/1", "train/1"]


@pytest.mark.parametrize("exchange", ["keys", "shares"])
@pytest.mark.parametrize("times", [1, 3])
def test_before_a_vector_left_a_sum_is_begun_again_without_a_charge(
    town: Callable[..., Any], people: Callable[..., Any], exchange: str, times: int
) -> None:
    """A few times: then the round is abandoned, and is another release with people drawn anew."""
    one = town(people(), HOMES, replace(NOISY, rounds=1), quorum=0.5)
    lost: list[str] = []

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes | None:
        if exchange_of(letter) == exchange and len(lost) < 2 * times:
            lost.append(kind)
            return None
        return answer

    one.mail.twisted["mark0"] = one.mail.twisted["mark1"] = twist
    one.fit()
    assert one.told() == ["train/1", "train/1#2"][: 1 + times // 3]
    assert one.own(0, 0) == ["train/1"]
    counted = {"sums_begun_again": min(times, 2), "answers_missing": 2 * times}
    assert one.records.counters() == (counted if times < 3 else {**counted, "rounds_abandoned": 1})


class Killed(Exception):
    pass


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_device_that_is_killed_before_or_after_it_answers(
    town: Callable[..., Any],
    people: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    exchange: str,
    stored: bool,
) -> None:
    """Killed before its answer is stored, or after it: asked again, it answers once and is charged once."""
    one = town(people(), HOMES, replace(NOISY, rounds=1))
    device, put = one.mail.devices["mark0"], Sums.put
    answer, asked, died = device.answer, list[str](), list[str]()

    def dying(self: Any, terms: Any, state: bytes) -> None:
        dies = self is one.homes[0].sums and not died and asked[-1] == exchange
        if stored or not dies:
            put(self, terms, state)
        if dies and stored:
            one.homes[0].store.connection.execute("COMMIT")  # what was written stays, as after a kill
        if dies:
            died.append(exchange)
            raise Killed

    def answering(body: bytes, until: float = math.inf) -> bytes:
        asked.append(exchange_of(body))
        given = answer(body, until)
        if wire.decode_letter(given)[0].get("refused") == "The device cannot answer this now.":
            one.mail.devices["mark0"] = revived = one.device(one.homes[0])
            given = revived.answer(body, until)
        return bytes(given)

    monkeypatch.setattr(Sums, "put", dying)
    monkeypatch.setattr(device, "answer", answering)
    one.fit()
    assert died == [exchange]
    assert one.told() == ["train/1"]
    assert one.own(0, 0) == ["train/1"]
    assert [line["clients"] for line in one.records.rounds()] == [7]


@pytest.mark.parametrize("exchange", [*EXCHANGES, "opened"])
def test_a_server_that_is_killed_in_any_exchange_goes_on(
    town: Callable[..., Any], people: Callable[..., Any], exchange: str
) -> None:
    one = town(people(), HOMES, replace(NOISY, rounds=1))
    put, died = one.records.put_sum, list[str]()

    def dying(attempt: str, people: Any, state: bytes | None, result: bytes | None) -> None:
        put(attempt, people, state, result)
        ask = Collector.of_state(state).ask() if state else None
        if not died and (ask.exchange if ask else "opened") == exchange:
            died.append(exchange)
            raise Killed

    one.records.put_sum = dying
    with pytest.raises(Killed):
        one.fit()
    one.records.put_sum = put
    one.fit()
    assert one.told() == ["train/1"]
    assert [line["clients"] for line in one.records.rounds()] == [7]
    assert one.own(0, 0) == one.own(3, 0) == ["train/1"]


def test_a_person_who_declines_is_not_in_the_sum(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=1), quorum=0.5)
    other = town(people(), HOMES, replace(PLAN, rounds=1, stages=[]), quorum=0.5)
    for each in (one, other):
        each.runtime().available()
        each.homes[3].configure(budget="eps=1,observer=server")
    one.fit()
    in_letters(one, other)
    assert [line["clients"] for line in one.records.rounds()] == [6]


def test_a_letter_without_a_secure_sum_where_the_method_has_one_is_refused(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=1))
    one.fit()
    letter = next(body for mark, kind, body in one.mail.letters if kind == "train")
    header, parts = wire.decode_letter(letter)
    for changed in ({"sum": None}, {"stages": []}):
        asked = wire.encode_letter({**header, **changed}, parts)
        assert "secure sum" in wire.decode_letter(one.mail.devices["mark0"].answer(asked))[0]["refused"]
    terms = replace(Task.read(header).sum.terms, width=8)
    asked = wire.encode_letter({**header, "sum": {"terms": terms.encode().hex(), "exchange": "keys"}}, parts)
    assert "The terms of the secure sum" in wire.decode_letter(one.mail.devices["mark0"].answer(asked))[0]["refused"]


def test_a_device_that_lies_is_refused_logged_and_counted(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=1), quorum=0.5)

    def forged(kind: str, letter: bytes, answer: bytes) -> bytes:
        if exchange_of(letter) != "masked":
            return answer
        header, parts = wire.decode_letter(answer)
        return wire.encode_letter(header, {wire.SUM: parts[wire.SUM][:-1] + b"?"})

    one.mail.twisted["mark3"] = forged
    one.fit()
    in_letters(one, town(people(), HOMES, replace(PLAN, rounds=1, stages=[]), quorum=0.5), "mark3")
    (name,) = one.records.counters()
    assert name == "refused: The answer's signature does not hold for this device, attempt and exchange."
    assert one.records.devices()[3].faults == 1
    assert one.said("refused")[-1]["device"] == "mark3"


def test_a_round_on_two_devices_is_abandoned(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=1, cohort=3))
    runtime, method = one.runtime(), one.recipe.build()
    runtime.begin(method, Rng.of(0))
    runtime.available()
    shared = method.init_shared(runtime.catalogue, Rng.of(0))
    opened = runtime.open("train/1", Cohort(np.array([0, 1, 3]), "fixed", 3, 7), shared)
    assert opened.cohort.parties == 2
    with pytest.raises(Abandoned, match="on 2 devices, and a secure sum needs 3"):
        runtime.collect(method, shared, opened.cohort, Rng.of(0), 1)


def test_what_a_server_cannot_do_is_refused_before_it_starts() -> None:
    for stages, cohort, match in (
        (["secure-sum"], None, "put a Clip before it, or give its range"),
        (["clip:norm=1", "secure-sum"], 2, "needs 3 devices at least"),
        (["clip:norm=1", "skellam:z=1"], None, "put `secure-sum` after it"),
        (["clip:norm=1", "secure-sum", "skellam:z=1"], None, "cannot come after SecureSum"),
        (["clip:norm=1", "secure-sum:least=0.5"], None, "let least be above"),
        (["ask-rows", "clip:norm=1", "secure-sum"], None, "ask-rows"),
        (["clip:norm=1", "skellam:z=1e15", "secure-sum"], None, "does not fit into 64 bits"),
    ):
        with pytest.raises(HomebodyError, match=match):
            ServerPlan(replace(PLAN, stages=stages, cohort=cohort)).method()


@pytest.mark.parametrize("stages", [RANGE, NOISY.stages, ["clip:norm=1", "secure-sum"]])
def test_a_plain_simulation_has_the_conversation_of_devices(
    people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stages: list[str]
) -> None:
    sums = list[int]()

    def counted(vectors: Any, *given: Any) -> Any:
        sums.append(len(vectors))
        return add_up(vectors, *given)

    monkeypatch.setattr("homebody.federation.secure_sum.together.add_up", counted)
    split, recipe = everything(people(), seed=5), replace(PLAN, stages=stages)
    plain, fused = (
        fit(recipe.build(), Simulator(split, fused=how), rounds=2, seed=5, evaluate_every=0) for how in (False, True)
    )
    assert sums == [7, 7]
    noise = recipe.build().uplink.among(7).deviation(1, 7)
    for name, value in fused.shared.items():
        # Means over 7 people; each of two rounds adds noise, and rounding to steps.
        torch.testing.assert_close(plain.shared[name], value, rtol=0, atol=1e-4 + 12 * noise / 7)

"""Devices that answer as no device should: each is refused, logged and counted, and the others train on unharmed."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from homebody.core import Cohort, Collected, Method, Rows, Tree, Users
from homebody.data.partitions import everything
from homebody.federation import wire
from homebody.federation.server import letters as correspondence
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

PLAN = Recipe("fedmf", "devices", {"factors": 4}, rounds=3, seed=5, evaluate_every=0)
SIZES = (3, 1, 3)
BAD, MARK = 3, "mark1"


class Without(Simulator):
    """A simulation in which one client is asked in the first round, answers nothing of use, and is left alone."""

    rounds = 0

    def available(self) -> Users:
        members = super().available()
        return members if self.rounds == 0 else members[members != BAD]

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        self.rounds += 1
        return super().collect(method, shared, replace(cohort, users=cohort.users[cohort.users != BAD]), rng, step)


def changed(change: Callable[[Tree], Tree]) -> Callable[[dict[str, Any], dict[str, bytes]], bytes]:
    """The answer with another update in it."""

    def twist(header: dict[str, Any], parts: dict[str, bytes]) -> bytes:
        return wire.encode_letter(
            header, {name: wire.encode_tree(change(wire.decode_tree(part))) for name, part in parts.items()}
        )

    return twist


def filled(value: float, kind: torch.dtype = torch.float32) -> Callable[[Tree], Tree]:
    def fill(tree: Tree) -> Tree:
        rows = tree["item"]
        numbers = rows.value.to(kind).clone()
        numbers[-1, -1] = value
        return {"item": Rows(rows.index, numbers, rows.size)}

    return fill


def rows_of(change: Callable[[Rows], Rows]) -> Callable[[Tree], Tree]:
    return lambda tree: {"item": change(tree["item"])}


def renamed(*names: str) -> Callable[[dict[str, Any], dict[str, bytes]], bytes]:
    return lambda header, parts: wire.encode_letter(header, {name: parts[str(BAD)] for name in names})


def headed(**facts: Any) -> Callable[[dict[str, Any], dict[str, bytes]], bytes]:
    return lambda header, parts: wire.encode_letter({**header, **facts}, parts)


def other_version(header: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    letter = wire.encode_letter(header, parts)
    return letter[:2] + struct.pack("<H", wire.VERSION + 1) + letter[4:]


def outside(header: dict[str, Any], parts: dict[str, bytes]) -> bytes:
    """A row behind the end of its table."""
    head = {"tree": [["item", 30, ["<i4", [1]], ["<f4", [1, 4]]]]}
    return wire.encode_letter(
        header, {str(BAD): wire.encode_letter(head, {"0": struct.pack("<i", 30), "1": bytes(16)})}
    )


SHAPE, FINITE, NUMBER = "'item' has another shape", "'item' has numbers that are not finite", "someone else's number"
WHO = "its answer does not say who it is"
DECLINES = "The answer declines for people who were not asked"
TWISTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, bytes]], bytes], str]] = {
    "wrong width": (changed(rows_of(lambda rows: Rows(rows.index, rows.value[:, :-1], rows.size))), SHAPE),
    "too many dimensions": (changed(rows_of(lambda rows: Rows(rows.index, rows.value[..., None], rows.size))), SHAPE),
    "other table": (changed(rows_of(lambda rows: Rows(rows.index, rows.value, rows.size + 1))), SHAPE),
    "whole table": (changed(lambda tree: {"item": tree["item"].dense()}), SHAPE),
    "other name": (changed(lambda tree: {"items": tree["item"]}), "The update has other names"),
    "one name more": (changed(lambda tree: {**tree, "more": torch.zeros(1)}), "The update has other names"),
    "no names": (changed(lambda tree: {}), "The update has other names"),
    "NaN": (changed(filled(float("nan"))), FINITE),
    "infinite": (changed(filled(float("-inf"))), FINITE),
    "infinite in 16 bits": (changed(filled(float("inf"), torch.float16)), FINITE),
    "huge": (changed(filled(-1e30)), "'item' has numbers over 1e\\+09"),
    "huge in 64 bits": (changed(filled(1e300, torch.float64)), "'item' is of another kind"),
    "whole numbers": (changed(filled(7, torch.int64)), "'item' is of another kind"),
    "truth values": (changed(filled(1, torch.bool)), "'item' is of another kind"),
    "outside": (outside, "A row is outside its table"),
    "another's number": (renamed("0"), NUMBER),
    "nobody's number": (renamed("99"), NUMBER),
    "negative number": (renamed("-1"), NUMBER),
    "no number": (renamed("²"), NUMBER),
    "long number": (renamed("9" * 5000), NUMBER),
    "other version": (other_version, "another wire version"),
    "oversized": (
        lambda header, parts: wire.encode_letter(header, {str(BAD): parts[str(BAD)] + bytes(5_000_000)}),
        "The update is larger",
    ),
    "cut": (lambda header, parts: wire.encode_letter(header, parts)[:-1], "The parts' lengths do not add up"),
    "cut update": (
        lambda header, parts: wire.encode_letter(header, {str(BAD): parts[str(BAD)][:-1]}),
        "The parts' lengths",
    ),
    "empty": (lambda header, parts: b"", "The letter is too short"),
    "noise": (lambda header, parts: b"HBnoise" * 50, "another wire version"),
    "another's letter": (headed(to="0" * 32), "an answer to another letter"),
    "no letter named": (headed(to=None), "an answer to another letter"),
    "people no list": (headed(people={}), WHO),
    "people below 0": (headed(people=[-1]), WHO),
    "people no numbers": (headed(people=[True]), WHO),
    "items below 0": (headed(items=-1), WHO),
    "holds too much": (headed(holds=["x"] * 1000), WHO),
    "refuses": (headed(refused="\ud800\0 no"), "the device refuses"),
    "refuses in lists": (headed(refused=[[[]]]), "The answer refuses in something else than a sentence"),
    "refuses at length": (headed(refused="no" * 1000), "The answer refuses in something else than a sentence"),
    "declines in lists": (headed(declined=[[1]]), DECLINES),
    "declines in an object": (headed(declined={"3": 1}), DECLINES),
    "declines for others": (headed(declined=[0]), DECLINES),
    "declines twice": (
        lambda header, parts: wire.encode_letter({**header, "declined": [BAD, BAD]}),
        DECLINES,
    ),
    "declines and answers": (headed(declined=[BAD]), "The answer declines for somebody and answers for them"),
    "people in lists": (headed(people=[[0]]), WHO),
    "people twice": (headed(people=[0, 0]), WHO),
    "items without end": (headed(items=2**40), WHO),
    "holds in lists": (headed(holds=[[1]]), WHO),
    "holds a long name": (headed(holds=["x" * 65]), WHO),
    "lacks in lists": (headed(lacks=[[1]]), "The answer lacks something that nobody is sent"),
    "lacks and answers": (headed(lacks="shared"), "The answer sends something that was not asked for"),
    "lacks for ever": (
        lambda header, parts: wire.encode_letter({**header, "lacks": "shared"}),
        "it lacks what it was given",
    ),
}


@pytest.mark.parametrize("twist", TWISTS)
def test_a_bad_answer_is_refused_and_harms_nobody(
    town: Callable[..., Any], people: Callable[..., Any], without: Callable[[], Tree], twist: str
) -> None:
    one = town(people(), SIZES, PLAN, quorum=0.5)
    change, reason = TWISTS[twist]
    one.mail.twisted[MARK] = lambda kind, letter, given: (
        change(*wire.decode_letter(given)) if kind == "train" else given
    )
    runtime = one.runtime()
    one.near(one.fit(runtime).shared, without())
    assert [line["clients"] for line in one.records.rounds()] == [6, 6, 6]
    ((name, count),) = one.records.counters().items()
    assert count == 1
    assert re.match(f"refused: {reason}", name)
    (said,) = one.said("refused")
    assert said["device"] == MARK
    json.dumps(one.logs)
    # Once it is itself again, it takes part again after a while.
    del one.mail.twisted[MARK]
    assert runtime.available().tolist() == [0, 1, 2, 4, 5, 6]
    one.clock.sleep(correspondence.REST_SECONDS + 1)
    assert runtime.available().tolist() == list(range(7))


@pytest.fixture
def without(people: Callable[..., Any]) -> Callable[[], Tree]:
    """What is trained where nothing of the bad client's is taken."""

    def train() -> Tree:
        simulator = Without(everything(people(), seed=5))
        return fit(PLAN.build(), simulator, rounds=3, seed=5, evaluate_every=0).shared

    return train


def test_an_answer_of_an_earlier_round_is_refused(
    town: Callable[..., Any], people: Callable[..., Any], without: Callable[[], Tree]
) -> None:
    """It came late, or somebody says it again."""
    one = town(people(), SIZES, PLAN, quorum=0.5)
    given: list[bytes] = []

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes:
        given.append(answer)
        return given[1] if kind == "train" else answer

    one.mail.twisted[MARK] = twist
    fitted = one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [7, 6, 6]
    assert one.records.counters() == {"refused: an answer to another letter": 1}
    honest = town(people(), SIZES, PLAN, quorum=0.5)
    honest.mail.twisted[MARK] = lambda kind, letter, answer: answer if len(honest.records.rounds()) < 1 else None
    honest.near(fitted.shared, honest.fit().shared)


def test_who_answers_twice_counts_once(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), SIZES, PLAN)
    one.mail.twisted[MARK] = lambda kind, letter, answer: [answer, answer]
    one.near(one.fit().shared, one.simulated().shared)
    assert one.records.counters() == {}


@pytest.mark.parametrize("other", ["٣", "03", "+3", " 3", "3.0"])
def test_a_person_is_called_by_one_name_alone(
    town: Callable[..., Any], people: Callable[..., Any], without: Callable[[], Tree], other: str
) -> None:
    """Otherwise the same person could be there twice."""
    one = town(people(), SIZES, PLAN, quorum=0.5)
    one.mail.twisted[MARK] = lambda kind, letter, answer: (
        renamed("3", other)(*wire.decode_letter(answer)) if kind == "train" else answer
    )
    one.near(one.fit().shared, without())
    assert one.records.counters() == {f"refused: {NUMBER}": 1}


def test_who_is_silent_costs_one_deadline(
    town: Callable[..., Any], people: Callable[..., Any], without: Callable[[], Tree]
) -> None:
    one = town(people(), SIZES, PLAN, quorum=0.5, deadline=60.0)
    began = one.clock.now
    one.mail.twisted[MARK] = lambda kind, letter, answer: answer if not one.said("joined")[2:] else None
    one.near(one.fit().shared, without())
    assert one.records.counters() == {"answers_missing": 1}
    assert [fact["reason"] for fact in one.said("silent")] == ["no answer in time"]
    assert 60 <= one.clock.now - began < 70


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense", wire.encode_letter({}), wire.encode_letter({"refused": "too old"})]
)
def test_a_bad_answer_to_a_greeting_is_refused_and_not_asked_for_again_at_once(
    town: Callable[..., Any], people: Callable[..., Any], answer: bytes
) -> None:
    one = town(people(), SIZES, PLAN)
    one.mail.twisted[MARK] = lambda kind, letter, given: answer
    runtime = one.runtime()
    for _ in range(5):
        assert runtime.available().tolist() == [0, 1, 2, 4, 5, 6]
    (counted,) = one.records.counters().values()
    assert counted == 1
    del one.mail.twisted[MARK]
    one.clock.sleep(correspondence.GREET_SECONDS + 1)
    assert runtime.available().tolist() == list(range(7))


def test_an_old_client_is_told_so_and_the_server_counts_it(
    town: Callable[..., Any], people: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = town(people(), SIZES, PLAN)
    device = one.mail.devices[MARK]

    class Old:
        def answer(self, body: bytes) -> bytes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(wire, "VERSION", 0)
                given: bytes = device.answer(body)
                return given

    one.mail.devices[MARK] = Old()
    assert one.runtime().available().tolist() == [0, 1, 2, 4, 5, 6]
    assert one.records.counters() == {"refused: another wire version": 1}
    said = [fact["reason"] for fact in one.said("refused")]
    assert said == [
        "The letter is of wire version 1, and this side reads 0: update the older.",
        "The letter is of wire version 0, and this side reads 1: update the older.",
    ]


def test_a_key_that_nobody_registered_is_not_even_greeted(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), SIZES, replace(PLAN, rounds=1))
    stranger = one.mail.devices["stranger"] = one.mail.devices[MARK]
    assert stranger is one.mail.devices[MARK]
    one.mail.keys["stranger"] = b"stranger"
    one.mail.registered.add(b"stranger")  # the network may let it in: the records do not
    runtime = one.runtime()
    one.fit(runtime)
    assert {mark for mark, _, _ in one.mail.letters} == {"mark0", "mark1", "mark2"}
    one.records.remove_device("device 1")
    assert runtime.available().tolist() == [0, 1, 2, 4, 5, 6]
    assert b"mark1" not in one.mail.registered


def test_half_of_a_household_may_answer_badly(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """Of device 0's three people, the second sends NaN: the others of the household count."""
    one = town(people(), SIZES, replace(PLAN, rounds=1), quorum=0.5)

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes:
        header, parts = wire.decode_letter(answer)
        if kind == "train":
            parts["1"] = wire.encode_tree(filled(float("nan"))(wire.decode_tree(parts["1"])))
        return wire.encode_letter(header, parts)

    one.mail.twisted["mark0"] = twist
    runtime = one.runtime()
    one.fit(runtime)
    assert [line["clients"] for line in one.records.rounds()] == [6]
    assert runtime.available().tolist() == [0, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 1.01, -2])
def test_bad_telemetry_is_refused(town: Callable[..., Any], people: Callable[..., Any], value: float) -> None:
    plan = replace(PLAN, evaluate_every=1, rounds=1)
    one, honest = (town(people(), SIZES, plan, quorum=0.5) for _ in range(2))

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes:
        header, parts = wire.decode_letter(answer)
        if kind == "evaluate":
            tree = wire.decode_tree(parts[str(BAD)])
            parts[str(BAD)] = wire.encode_tree({**tree, "metrics": torch.full_like(tree["metrics"], value)})
        return wire.encode_letter(header, parts)

    one.mail.twisted[MARK] = twist
    honest.mail.twisted[MARK] = lambda kind, letter, answer: None if kind == "evaluate" else answer
    one.fit()
    honest.fit()
    assert one.records.rounds()[0]["metrics"] == honest.records.rounds()[0]["metrics"] != {}
    assert [name.startswith("refused: 'metrics' has numbers") for name in one.records.counters()] == [True]


@pytest.mark.parametrize(
    ("stages", "value", "taken"),
    [
        (["clip:norm=0.5"], 0.6, False),
        (["clip:norm=0.5"], 0.4, True),
        (["clip:norm=0.5", "gaussian:z=1"], 0.6, False),
        (["clip:norm=0.5,order=1", "laplace:b=1"], 9.0, True),
    ],
)
def test_nothing_is_taken_that_the_channel_could_not_have_let_through(
    town: Callable[..., Any], people: Callable[..., Any], stages: list[str], value: float, taken: bool
) -> None:
    one = town(people(), SIZES, replace(PLAN, rounds=1, stages=stages), quorum=0.5)
    grid = replace(PLAN, stages=stages).build().uplink.facts.grid
    step = grid.step if grid else 1.0

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes:
        header, parts = wire.decode_letter(answer)
        if kind == "train":
            tree = wire.decode_tree(parts[str(BAD)])
            for numbers in tree.values():
                numbers = numbers.value if isinstance(numbers, Rows) else numbers
                numbers.view(-1)[-1] = value if numbers.is_floating_point() else round(value / step)
            parts[str(BAD)] = wire.encode_tree(tree)
        return wire.encode_letter(header, parts)

    one.mail.twisted[MARK] = twist
    one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [7 if taken else 6]


@pytest.mark.parametrize(("more", "taken"), [(0, True), (1, False), (60_000, False)])
def test_nobody_sends_more_reports_than_were_asked_for(
    town: Callable[..., Any], people: Callable[..., Any], more: int, taken: bool
) -> None:
    one = town(people(), SIZES, replace(PLAN, rounds=1, stages=["one-bit:epsilon=1,k=3"]), quorum=0.5)

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes:
        header, parts = wire.decode_letter(answer)
        if kind == "train":
            tree = wire.decode_tree(parts[str(BAD)])
            (name, rows) = next(iter(tree.items()))
            index = torch.cat([rows.index, torch.zeros(more, dtype=torch.int64)])
            tree[name] = Rows(index, torch.ones(len(index), dtype=torch.bool), rows.size)
            parts[str(BAD)] = wire.encode_tree(tree)
        return wire.encode_letter(header, parts)

    one.mail.twisted[MARK] = twist
    one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [7 if taken else 6]

"""What a device answers: charged before it is told, told once, and nothing of its people in it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from homebody.core import Catalogue, Tree
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.device import Device
from homebody.federation.device.home import Home
from homebody.federation.device.household import recommend
from homebody.methods import find
from homebody.rng import Rng

ITEMS = [(f"secret-item-{n}", f"Secret title {n}") for n in range(12)]
PEOPLE = {"ann-of-green": (0, 1, 2, 3, 4), "bob-the-builder": (5, 6, 7), "cleo-patra": (2, 8, 11, 10)}


class Killed(BaseException):
    """Nothing catches it."""


class Server:
    """Writes letters to one device, as a server would."""

    def __init__(self, home: Home, method: str = "fedmf", **described: Any) -> None:
        self.home, self.logs, self.now = home, list[dict[str, Any]](), 0.0
        self.device = Device(
            home,
            lambda event, **facts: self.logs.append({"event": event, **facts}),
            clock=lambda: self.now,
            sleep=self.sleep,
        )
        self.described = {
            "run": "feedbeef00",
            "method": method,
            "fields": {"factors": 3},
            "stages": [],
            "seed": 1,
            "protocol": "strict",
            "held_out": None,
            "negatives": 5,
            "cutoffs": [3],
            "measures": True,
            **described,
        }

    def sleep(self, seconds: float) -> None:
        """Answers wait by a clock that nobody has to wait for."""
        self.now += seconds

    def shared(self, items: int = 12, seed: int = 0) -> Tree:
        method = find(self.described["method"])(**self.described["fields"])
        return method.init_shared(Catalogue(items), Rng.of(seed))

    def letter(
        self, do: str = "train", step: int = 1, shared: Tree | None = None, items: int = 12, **more: Any
    ) -> bytes:
        content = wire.encode_tree(self.shared(items) if shared is None else shared)
        parts = {
            "items": json.dumps([0, ITEMS[:items]]).encode(),
            "shared": content,
            **more.pop("parts", {}),
        }
        header = {
            **self.described,
            "do": do,
            "release": f"train/{step}",
            "step": step,
            "key": 17 + step,
            "clients_key": 5,
            "keep": None,
            "n_items": items,
            "half": False,
            "first": 40,
            "people": [40, 41, 42],
            "shared": more.pop("named", None) or wire.digest(parts["shared"] or b""),
            **more,
        }
        return wire.encode_letter(header, {name: part for name, part in parts.items() if part is not None})

    def ask(self, *given: Any, **more: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        return wire.decode_letter(self.device.answer(self.letter(*given, **more)))

    def charged(self, slot: int = 0) -> list[str]:
        entries = self.home.ledger(slot).entries()
        return [name.partition("@")[0] for name in dict.fromkeys(entry.release for entry in entries)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with Home.create(tmp_path / "device", server="127.0.0.1:9092") as made:
        for name, items in PEOPLE.items():
            file = tmp_path / "history.csv"
            file.write_text("item,time\n" + "".join(f"{ITEMS[item][0]},{when}\n" for when, item in enumerate(items)))
            made.history.import_file(file, name)
        yield made


@pytest.fixture
def server(home: Home) -> Server:
    return Server(home)


def test_a_greeting_is_answered_with_who_takes_part(server: Server) -> None:
    header, parts = server.ask("hello", people=[], parts={"items": None, "shared": b""})
    assert header.pop("to") == wire.digest(server.letter("hello", people=[], parts={"items": None, "shared": b""}))
    assert (header, parts) == ({"people": [0, 1, 2], "items": 0, "holds": []}, {})
    server.home.people.opt_out("bob-the-builder")
    header, _ = server.ask("hello", people=[], parts={"items": None, "shared": b""})
    assert header["people"] == [0, 2]
    assert server.charged() == []


def test_an_answer_has_an_update_of_each_and_is_charged(server: Server) -> None:
    header, parts = server.ask()
    assert (header["people"], header["items"], header["declined"]) == ([0, 1, 2], 12, [])
    assert header["holds"] == [wire.digest(wire.encode_tree(server.shared()))]
    assert list(parts) == ["40", "41", "42"]
    update = wire.decode_tree(parts["40"])["item"]
    assert (update.size, update.value.shape[1]) == (12, 3)
    assert [server.charged(slot) for slot in range(3)] == [["feedbeef00/train/1"]] * 3


def test_nobody_is_answered_for_who_was_not_asked(server: Server) -> None:
    _, parts = server.ask(people=[41])
    assert list(parts) == ["41"]
    assert [server.charged(slot) for slot in range(3)] == [[], ["feedbeef00/train/1"], []]


@pytest.mark.parametrize("number", [0, 39, 43, 2**61])
def test_a_number_of_nobody_here_is_declined(server: Server, number: int) -> None:
    header, parts = server.ask(people=[number, 41])
    assert (list(parts), header["declined"]) == (["41"], [number])


def test_asked_the_same_again_it_says_the_same_and_is_not_charged_again(server: Server) -> None:
    server.described |= {"stages": ["clip:norm=1,order=1", "laplace:b=1"]}
    first, telemetry = server.device.answer(server.letter()), server.device.answer(server.letter("evaluate"))
    again = Server(server.home, **server.described)  # the process was started anew
    assert again.device.answer(server.letter()) == first
    assert again.device.answer(server.letter("evaluate")) == telemetry
    assert server.charged() == ["feedbeef00/train/1", "feedbeef00/train/1/telemetry"]


@pytest.mark.parametrize(
    "other",
    [
        {"stages": ["clip:norm=1"]},
        {"key": 99},
        {"half": True},
        {"seed": 2},
        {"shared": "other"},
    ],
)
def test_another_letter_of_the_same_name_is_another_release(server: Server, other: dict[str, Any]) -> None:
    server.ask()
    if other.pop("shared", None):
        server.ask(shared=server.shared(seed=9))
    else:
        server.ask(**other)
    assert server.charged() == ["feedbeef00/train/1"] * 2
    assert len({entry.release for entry in server.home.ledger(0).entries()}) == 2


@pytest.mark.parametrize("where", ["household.Household.train", "outbox.Outbox.finish", "models.Models.rank_with"])
def test_killed_after_the_charge_it_answers_later_and_is_charged_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with monkeypatch.context() as patch:

        def killed(*given: Any, **more: Any) -> Any:
            raise Killed

        patch.setattr(f"homebody.federation.device.{where}", killed)
        with pytest.raises(Killed):
            server.ask()
    assert server.charged() == ["feedbeef00/train/1"]
    again = Server(server.home)
    header, parts = again.ask()
    assert (len(parts), header["declined"]) == (3, [])
    assert [server.charged(slot) for slot in range(3)] == [["feedbeef00/train/1"]] * 3


def test_an_answer_that_was_given_and_is_gone_is_a_new_release(server: Server) -> None:
    """Only the last two are kept; asked about an older one it must work anew, and its noise would be new."""
    for step in (1, 2, 3):
        server.ask(step=step)
    assert server.charged() == [f"feedbeef00/train/{step}" for step in (1, 2, 3)]
    server.ask(step=1)
    names = list(dict.fromkeys(entry.release for entry in server.home.ledger(0).entries()))
    assert len(names) == 4
    assert names[3].endswith("#2")


def test_a_round_may_be_run_again_from_the_state_before_it(server: Server) -> None:
    """Another letter, so it works anew: from where it stood before the round, not from what came of it."""
    for step in (1, 2):
        server.ask(step=step)
    _, wanted = server.ask(step=3)
    _, found = server.ask(step=3, cutoffs=[7])
    assert found == wanted
    assert server.charged() == ["feedbeef00/train/1", "feedbeef00/train/2", "feedbeef00/train/3", "feedbeef00/train/3"]
    _, further = server.ask(step=4, key=20)
    assert further != wanted


def test_a_spent_budget_declines_before_anything_is_charged(server: Server) -> None:
    server.described |= {"stages": ["clip:norm=1,order=1", "laplace:b=1"]}  # ε = 2 a release
    server.home.configure(budget="eps=4.5,delta=0,observer=server")
    answers = [server.ask(step=step) for step in (1, 2, 3)]
    assert [len(parts) for _, parts in answers] == [3, 3, 0]
    assert answers[2][0]["declined"] == [40, 41, 42]
    assert server.charged() == ["feedbeef00/train/1", "feedbeef00/train/2"]
    # What was answered before costs nothing, and a larger budget goes on.
    assert len(server.ask(step=2)[1]) == 3
    server.home.configure(budget=None)
    assert len(server.ask(step=3)[1]) == 3


def test_telemetry_counts_against_the_budget(server: Server) -> None:
    server.described |= {"stages": ["clip:norm=1,order=1", "laplace:b=1"]}
    server.home.configure(budget="eps=2.5,delta=0,observer=server")
    server.ask()
    header, parts = server.ask("evaluate")
    assert (parts, header["declined"]) == ({}, [40, 41, 42])


def test_no_log_and_no_answer_names_a_person_or_an_item(
    server: Server, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []

    def ask(*given: Any, **more: Any) -> None:
        said.append(server.device.answer(server.letter(*given, **more)))

    ask("hello", people=[])
    ask()
    ask("evaluate")
    ask("adapt", people=[])
    ask(people=[7])
    ask(parts={"items": json.dumps([0, [["secret-item-1", "x"]]]).encode()})
    ask(parts={"items": json.dumps([12, [["secret-item-1", "x"]]]).encode()})
    ask(parts={"items": json.dumps([5000, [["new", "x"]]]).encode()})
    ask(parts={"items": json.dumps([12, [["", "secret-item-1"]]]).encode()})
    ask(parts={"items": json.dumps([0, "secret-item-1"]).encode()})
    ask(parts={"items": b"["})
    real = home.outbox.finish

    def opts_out(who: Any, *given: Any) -> None:
        if who == 1:
            home.people.opt_out("bob-the-builder")  # while their round is being worked on
        real(who, *given)

    with monkeypatch.context() as patch:
        patch.setattr(home.outbox, "finish", opts_out)
        ask(step=2)
    with monkeypatch.context() as patch:

        def broken(*given: Any) -> None:
            raise RuntimeError(f"{home.path} secret-item-1 of ann-of-green")

        patch.setattr(home.history, "population", broken)
        home.history.append("ann-of-green", "secret-item-9")
        ask(step=3)
        patch.setattr(home.models, "put_shared", broken)
        ask(step=4)
    home.store.connection.close()
    ask(step=5)
    home.store.connection = sqlite3.connect(home.store.file, isolation_level=None)
    for what in (*said, json.dumps(server.logs).encode()):
        for secret in ("secret", "Secret", "ann-of", "bob-the", "cleo-", "patra"):
            assert secret.encode() not in what
    assert all(str(home.path).encode() not in one for one in said)
    reasons = [one["reason"] for one in server.logs if "reason" in one]
    assert "Nobody of this number takes part." in reasons
    assert "RuntimeError" in reasons
    assert [one["event"] for one in server.logs].count("failed") == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"do": "steal"}, "asks for something that this client does not know: update it"),
        (
            {"method": "nosuch"},
            "There is no method 'nosuch' in this device's Homebody, and it allows none of that name",
        ),
        ({"code": "x" * 301}, "The letter's stages"),
        ({"code": 5}, "The letter's 'code' is of another kind"),
        ({"method": "./mine.py:Mine"}, "A server may name methods that come with Homebody"),
        ({"method": "popularity", "fields": {}}, "popularity collects raw data"),
        ({"fields": {"factors": "many"}}, "factors must be a whole number"),
        ({"fields": {"nosuch": 1}}, "There is no field of fedmf 'nosuch'"),
        ({"stages": ["nosuch"]}, "There is no stage 'nosuch'"),
        ({"stages": [5]}, "The letter's stages"),
        ({"key": 2**70}, "too large"),
        ({"clients_key": -(2**70)}, "too large"),
        ({"seed": 2**64}, "too large"),
        ({"negatives": 10**12}, "too large"),
        ({"negatives": 0}, "too large"),
        ({"step": -1}, "counts that are not whole numbers"),
        ({"keep": -1}, "counts that are not whole numbers"),
        ({"stages": ["clip:norm=1e308,order=1", "laplace:b=1"]}, "cannot be drawn exactly"),
        ({"stages": ["clip:norm=1e-300,order=1", "laplace:b=1e-320"]}, "cannot be drawn exactly"),
        ({"stages": ["clip:norm=1e308", "secure-sum", "gaussian:z=1e308"]}, "cannot be drawn exactly"),
        ({"keep": 2**62}, "counts that are not whole numbers"),
        ({"people": ["40"]}, "counts that are not whole numbers"),
        ({"cutoffs": [1.5]}, "counts that are not whole numbers"),
        ({"half": 1}, "'half' is missing or of another kind"),
        ({"run": None}, "'run' is missing or of another kind"),
        ({"step": True}, "'step' is missing or of another kind"),
        ({"named": "f" * 32}, "not those that the letter names"),
        ({"n_items": 11}, "another shape than the method's"),
        ({"n_items": 0}, "not those of the method"),
    ],
)
def test_a_letter_that_makes_no_sense_is_refused_in_a_sentence(
    server: Server, change: dict[str, Any], said: str
) -> None:
    header, parts = server.ask(**change)
    assert said in header["refused"]
    assert parts == {}
    assert server.charged() == []


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ({"item": torch.zeros(12, 4), "user": torch.zeros(3)}, "another shape"),
        ({"item": torch.zeros(13, 3), "user": torch.zeros(3)}, "another shape"),
        ({"item": torch.zeros(12, 3)}, "not those of the method"),
        ({"item": torch.zeros(12, 3, dtype=torch.int64), "user": torch.zeros(3)}, "not the numbers"),
        ({"item": torch.full((12, 3), float("nan")), "user": torch.zeros(3)}, "not the numbers"),
    ],
)
def test_shared_parameters_that_are_not_the_methods_are_refused(server: Server, shared: Tree, said: str) -> None:
    """Kernels believe in shapes: nothing is computed with others."""
    header, _ = server.ask(shared=shared)
    assert said in header["refused"]
    assert server.charged() == []


def test_a_letter_that_breaks_something_is_refused_and_does_not_end_the_process(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Any) -> Any:
        raise OverflowError("ann-of-green")

    monkeypatch.setattr("homebody.federation.task.Task.acting", property(breaks))
    header, _ = server.ask()
    assert header["refused"] == "The letter asks for something that this device cannot work with."
    assert server.logs[-1] == {"event": "failed", "reason": "OverflowError"}
    assert server.charged() == []


@pytest.mark.parametrize(
    "body", [b"", b"HB", b"nonsense" * 9, wire.encode_letter({}), wire.encode_letter({"do": "hello"})]
)
def test_noise_is_refused(server: Server, body: bytes) -> None:
    header, _ = wire.decode_letter(server.device.answer(body))
    assert header["refused"]
    assert header["to"] == wire.digest(body)


def test_whoever_cannot_answer_does_not_keep_the_household_from_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server.home.outbox.finish

    def broken(who: Any, *given: Any) -> None:
        if who == 1:
            raise ZeroDivisionError
        real(who, *given)

    monkeypatch.setattr(server.home.outbox, "finish", broken)
    header, parts = server.ask()
    assert (list(parts), header["declined"]) == (["40", "42"], [41])


def test_a_device_that_lacks_something_says_so(server: Server) -> None:
    header, parts = server.ask(parts={"shared": None})
    assert (header["lacks"], header["items"], header["holds"], parts) == ("shared", 12, [], {})


def test_a_device_that_lacks_items_keeps_the_parameters(server: Server) -> None:
    header, _ = server.ask(parts={"items": json.dumps([0, ITEMS[:7]]).encode()})
    assert (header["lacks"], header["items"]) == ("items", 7)
    assert header["holds"] == [wire.digest(wire.encode_tree(server.shared()))]
    assert server.charged() == []
    assert len(server.ask(parts={"items": json.dumps([7, ITEMS[7:]]).encode()})[1]) == 3


def test_a_device_that_knows_more_items_answers_about_those_it_was_asked_about(server: Server, tmp_path: Path) -> None:
    """The catalogue may have grown since the letter's parameters were made."""
    with Home.create(tmp_path / "other", server="127.0.0.1:9092") as fresh:
        for name, items in PEOPLE.items():
            person = fresh.people.add(name)
            for when, item in enumerate(items):
                fresh.history.append(person, ITEMS[item][0], time=when)
        other = Server(fresh)
        _, wanted = other.ask(items=9)
        _, found = server.ask(items=9, parts={"items": json.dumps([0, ITEMS]).encode()})
        assert found == wanted
        assert int(wire.decode_tree(found["42"])["item"].index.max()) < 9
        assert len(server.home.items) == 12


def test_a_device_recommends_without_a_network(server: Server, home: Home) -> None:
    with pytest.raises(HomebodyError, match="has no model yet"):
        recommend(home, home.people.find("ann-of-green"))
    server.ask()
    best = recommend(home, home.people.find("ann-of-green"), 20)
    assert {one.item for one in best} == {item for item, _ in ITEMS[5:]}
    assert all(one.name == one.item.replace("secret-item-", "Secret title ") for one in best)
    assert [one.score for one in best] == sorted((one.score for one in best), reverse=True)
    assert len(recommend(home, home.people.find(1), 2)) == 2


@pytest.mark.parametrize("method", ["fedmf", "pfedrec", "fedials", "fedrecon", "fedncf"])
@pytest.mark.parametrize("half", [False, True])
def test_every_method_recommends_to_those_who_trained_and_to_newcomers(home: Home, method: str, half: bool) -> None:
    """Also to somebody without a single interaction, and after the catalogue grew."""
    server = Server(home, method, fields={"factors": 3, **({"hidden": "3"} if method == "fedncf" else {})})
    content = wire.encode_tree(server.shared(10), half=half)
    server.ask(items=10, parts={"shared": content}, half=half)
    new, idle = home.people.add("dora"), home.people.add("eve")
    home.history.append(new, ITEMS[3][0])
    home.history.append(new, ITEMS[4][0])
    home.items.add(0, ITEMS)
    for person, count in ((home.people.find(0), 7), (new, 10), (idle, 12)):
        best = recommend(home, person, 20)
        assert len(best) == count
        assert np.isfinite([one.score for one in best]).all()


def test_a_private_state_changes_what_is_recommended_and_is_kept_by_round(server: Server, home: Home) -> None:
    server.described |= {"method": "pfedrec"}
    _, first = server.ask()
    assert [home.models.state(slot, "feedbeef00").step for slot in range(3)] == [1, 1, 1]  # type: ignore[union-attr]
    assert len(first) == 3
    before = recommend(home, home.people.find(0), 3)
    home.people.opt_out("ann-of-green")
    home.people.opt_in("ann-of-green")
    assert recommend(home, home.people.find(0), 3) != before


def test_what_a_person_did_since_counts_in_the_next_round(server: Server, home: Home) -> None:
    server.described |= {"measures": False}
    server.ask()
    assert ITEMS[9][0] in {one.item for one in recommend(home, home.people.find(0), 20)}
    home.history.append("ann-of-green", ITEMS[9][0], time=99)
    assert ITEMS[9][0] not in {one.item for one in recommend(home, home.people.find(0), 20)}
    _, parts = server.ask(step=2)
    assert 9 in wire.decode_tree(parts["40"])["item"].index.tolist()

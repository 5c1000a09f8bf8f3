"""A server that lies to real devices in a secure sum, and devices that lie to it; letters in one process.

A lie is a letter that a server of ours would not write. The device must refuse it in a sentence, log it, and charge
nobody for it; the server counts that the device refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from tests.federation.secure_sum.test_liars import listed, question_of
from tests.federation.test_rosters import SIGNER, knows, roster, round_of
from tests.federation.test_secure_sum import HOMES, NOISY, PLAN, Killed, exchange_of

from homebody.core import Cohort
from homebody.database import connect
from homebody.errors import Abandoned
from homebody.federation import wire
from homebody.federation.flower.protocol import load_private
from homebody.federation.secure_sum.collector import Collector
from homebody.federation.secure_sum.identities import identity_of, load_public_key
from homebody.federation.secure_sum.messages import EXCHANGES, SEALED, SIGNED, Listing, Terms, pack_numbers
from homebody.federation.secure_sum.party import Party
from homebody.federation.secure_sum.signatures import sign
from homebody.federation.server import admin
from homebody.federation.server.letters import GREET_SECONDS, SILENT_TIMES
from homebody.federation.server.rosters import put_roster
from homebody.federation.task import Task, asks
from homebody.privacy import Channel, Ledger

ONE = replace(NOISY, rounds=1)
Letter = tuple[dict[str, Any], dict[str, bytes]]
Lie = Callable[[dict[str, Any], dict[str, bytes]], Letter]
KEPT = "answered 'masked' of this attempt already, to another question"


def lie_to(one: Any, mark: str, lie: Lie, exchange: str, *, truth_first: bool = False, times: int = 1) -> list[bytes]:
    """Have the server send this device another letter in an exchange; truth_first: after the right one.

    Returns what the device answers to the lies.
    """
    device, lies = one.mail.devices[mark], list[bytes]()
    answer = device.answer

    def answering(body: bytes, until: float = math.inf) -> bytes:
        if exchange_of(body) != exchange or len(lies) >= times:
            return bytes(answer(body, until))
        if truth_first:
            answer(body, until)
        lies.append(answer(wire.encode_letter(*lie(*wire.decode_letter(body))), until))
        header, parts = wire.decode_letter(lies[-1])
        return wire.encode_letter({**header, "to": wire.digest(body)}, parts)

    device.answer = answering
    return lies


def question(change: Callable[[bytes], bytes]) -> Lie:
    """A letter with another question."""
    return lambda header, parts: (header, {**parts, wire.QUESTION: change(parts[wire.QUESTION])})


def terms_of(header: dict[str, Any]) -> Terms:
    asked = Task.read(header).sum
    assert asked is not None
    assert isinstance(asked.terms, Terms)
    return asked.terms


def with_terms(header: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A letter's header with other terms."""
    return {**header, "sum": {**header["sum"], "terms": replace(terms_of(header), **changes).encode().hex()}}


def refused(one: Any, lies: list[bytes], sentence: str, times: int = 1) -> None:
    """The device refused in this sentence, logged it, and the server logged and counted it."""
    assert len(lies) == times
    said = [wire.decode_letter(lie)[0].get("refused", "") for lie in lies]
    assert all(sentence in each for each in said), said
    assert [line["reason"] for line in one.said("refused") if "device" not in line][:times] == said
    assert [line["said"] for line in one.said("refused") if "said" in line][:times] == [each[:200] for each in said]
    assert one.records.counters()["refused: the device refuses"] == times


def swapped(asked: bytes) -> bytes:
    parties, signed = listed(asked)
    parties[1][2:], parties[2][2:] = parties[2][2:], parties[1][2:]
    return question_of(parties, signed)


def left_out(asked: bytes) -> bytes:
    parties, signed = listed(asked)
    return question_of(parties[:3], signed[:2])


def one_fewer(asked: bytes) -> bytes:
    """Sealed shares, survivors or signatures, without the last row."""
    size = {True: SEALED.size, False: SIGNED.size}[len(asked) % SEALED.size == 0]
    return asked[:-size]


LIES = {
    "swapped keys": ("shares", question(swapped), False, "are not signed by its device for this attempt"),
    "a second list": ("shares", question(left_out), True, "answered 'shares' of this attempt already"),
    "a second set of shares": ("masked", question(one_fewer), True, KEPT),
    "two sets of survivors": (
        "survivors",
        question(lambda asked: pack_numbers((0, 2, 4))),
        True,
        "answered 'survivors' of this attempt already, to another question",
    ),
    "too few survivors": ("survivors", question(lambda asked: pack_numbers((0, 2))), False, "2 parties survive"),
    "early opening": (
        "survivors",
        lambda header, parts: ({**header, "sum": {**header["sum"], "exchange": "open"}}, parts),
        False,
        "'open' is asked for before 'survivors' was answered",
    ),
    "opening against too few signatures": (
        "open",
        question(lambda asked: asked[: 2 * SIGNED.size]),
        False,
        "2 parties have signed the survivors, and 3 must before anything opens",
    ),
    "a second opening": ("open", question(one_fewer), True, "answered 'open' of this attempt already"),
    "another number": ("shares", lambda header, parts: ({**header, "first": 2, "people": [2, 3]}, parts), False, ""),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_logged_and_counted(town: Callable[..., Any], people: Callable[..., Any], name: str) -> None:
    exchange, lie, truth_first, sentence = LIES[name]
    one = town(people(), HOMES, ONE, quorum=0.5)
    lies = lie_to(one, "mark0", lie, exchange, truth_first=truth_first)
    one.fit()
    if sentence:
        refused(one, lies, sentence)
    # Who is lost before the vector left is not charged; after it, once. The others go on, and are charged once.
    before = exchange in EXCHANGES[:2] and bool(sentence)
    counted = [0 if before or exchange == "masked" else 2, 5]
    assert [line["clients"] for line in one.records.rounds()] == [sum(counted)]
    assert [one.own(at, 0) for at in range(4)] == [[] if before else ["train/1"], *([["train/1"]] * 3)]
    assert one.told() == ["train/1"]


def test_keys_of_another_attempt_are_refused(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), HOMES, NOISY, quorum=0.5)
    first = list[bytes]()

    def replayed(asked: bytes) -> bytes:
        """Of the second party, what it gave and signed in the round before."""
        parties, signed = listed(asked)
        earlier, signatures = listed(first[0])
        parties[1], signed[0] = earlier[1], signatures[0]
        return question_of(parties, signed)

    lies = lie_to(one, "mark0", question(lambda asked: (first.append(asked), asked)[1]), "shares")
    one.fit(rounds=1)
    assert "refused" not in wire.decode_letter(lies[0])[0]
    lies = lie_to(one, "mark0", question(replayed), "shares")
    one.fit()
    refused(one, lies, "The round keys of party 2 are not signed by its device for this attempt.")
    assert one.own(0, 0) == ["train/1"]
    assert one.own(1, 0) == ["train/1", "train/2"]


def test_a_party_that_no_roster_has_is_refused(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """The server takes part as a device of its own, which signs all that it must."""
    one = town(people(), HOMES, ONE, quorum=0.5)
    knows(one)
    put_roster(one.records, roster(one).signed(SIGNER))

    def invented(header: dict[str, Any], parts: dict[str, bytes]) -> Letter:
        party = Party.join(terms_of(header), 6, ec.generate_private_key(ec.SECP384R1()))
        keys, (parties, signed) = party.answer("keys", b""), listed(parts[wire.QUESTION])
        parties[3][1:], signed[2][1] = [party.identity, keys[9:41], keys[41:73]], keys[-96:]
        return header, {**parts, wire.QUESTION: question_of(parties, signed)}

    lies = lie_to(one, "mark0", invented, "shares")
    one.fit()
    refused(one, lies, "Party 6 of the list is a device that the roster does not have.")
    assert [one.own(at, 0) for at in range(2)] == [[], ["train/1"]]


@pytest.mark.parametrize(
    "changed",
    [
        {"stages": ["clip:norm=1", "skellam:z=1.9", "secure-sum"]},
        {"stages": ["clip:norm=0.9", "skellam:z=2", "secure-sum"]},
        {"key": 7},
        {"seed": 6},
        {"largest": 5.0},
        {"unknown": "to this version"},
    ],
    ids=str,
)
@pytest.mark.parametrize("exchange", ["keys", "masked"])
def test_a_letter_that_asks_something_else_than_the_others_is_refused(
    town: Callable[..., Any], people: Callable[..., Any], changed: dict[str, Any], exchange: str
) -> None:
    """A device counts on the others' noise, so they must have been asked for the same."""
    one = town(people(), HOMES, ONE, quorum=0.5)
    lies = lie_to(one, "mark0", lambda header, parts: ({**header, **changed}, parts), exchange)
    one.fit()
    refused(one, lies, "The letter's secure sum is about another letter than this one.")
    assert [one.own(at, 0) for at in range(2)] == [[], ["train/1"]]


def test_devices_with_other_parameters_do_not_add_up(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """Whoever is alone with parameters of their own would be the only one whose update depends on them."""
    one = town(people(), HOMES, replace(PLAN, rounds=1), quorum=0.5)

    def other(header: dict[str, Any], parts: dict[str, bytes]) -> Letter:
        content = one.homes[0].models.shared(header["shared"]) if "shared" not in parts else parts["shared"]
        tree = {name: value + 1 for name, value in wire.decode_tree(content).items()}
        shared = wire.encode_tree(tree)
        header = {**header, "shared": wire.digest(shared)}
        return header, {**parts, "shared": shared}

    lies = lie_to(one, "mark0", other, "keys")
    one.fit()
    refused(one, lies, "is about another letter than this one")


def test_a_server_that_states_other_terms_to_each_cannot_join_them(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """The terms that one device gets fit its letter, and the others' fit theirs: then no key is signed for both."""
    one = town(people(), HOMES, ONE, quorum=0.5)

    def other(header: dict[str, Any], parts: dict[str, bytes]) -> Letter:
        header = {**header, "stages": ["clip:norm=1", "skellam:z=1.9", "secure-sum"]}
        return with_terms(header, asks=asks(header)), parts

    keys = lie_to(one, "mark0", other, "keys")

    def passed_on(asked: bytes) -> bytes:
        """To another device, what this one signed for terms of its own."""
        given, (parties, signed) = wire.decode_letter(keys[0])[1][wire.SUM], listed(asked)
        row = [0, identity(one, 0), given[9:41], given[41:73]]
        return question_of([row, *parties], [[0, given[-96:]], *signed])

    lies = lie_to(one, "mark1", question(passed_on), "shares")
    with pytest.raises(Abandoned):  # the server itself does not accept these keys, and with two lost it opens nothing
        round_of(one)
    refused(one, lies, "The round keys of party 0 are not signed by its device for this attempt.")
    assert one.own(0, 0) == one.own(1, 0) == []


def identity(one: Any, at: int) -> bytes:
    return identity_of(load_public_key((one.homes[at].path / "device.pub").read_bytes()))


def answered(one: Any, letter: bytes) -> dict[str, bytes]:
    """The parts that a device sent back for this letter."""
    sent = (wire.decode_letter(body) for _, _, body in one.mail.answers)
    (parts,) = (parts for header, parts in sent if header["to"] == wire.digest(letter))
    return parts


class TestDevice:
    def letters(self, one: Any, mark: str = "mark0") -> dict[str, bytes]:
        """The letters of a round to a device, by exchange."""
        return {exchange_of(body): body for to, kind, body in one.mail.letters if (to, kind) == (mark, "train")}

    def test_a_replayed_attempt_gets_other_keys_and_is_charged_again(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        one = town(people(), HOMES, NOISY)
        one.fit(rounds=1)
        letters, device = self.letters(one), one.mail.devices["mark0"]
        given = {name: answered(one, letter)[wire.SUM] for name, letter in letters.items()}
        assert given == {
            name: wire.decode_letter(device.answer(letter))[1][wire.SUM] for name, letter in letters.items()
        }
        assert one.own(0, 0) == ["train/1"]  # asked the same again, it gives the same bytes
        one.fit()  # a second round: the first is forgotten
        shared = {"shared": wire.decode_letter(letters["keys"])[1]["shared"]}
        for name, letter in letters.items():
            header, parts = wire.decode_letter(letter)
            letters[name] = wire.encode_letter(header, {**parts, **shared})
        for name in EXCHANGES[1:]:
            said = wire.decode_letter(device.answer(letters[name]))[0]["refused"]
            assert said == "This device has no part in this attempt at a secure sum: begin another."
        again = wire.decode_letter(device.answer(letters["keys"]))[1][wire.SUM]
        assert again != given["keys"]
        said = wire.decode_letter(device.answer(letters["shares"]))[0]["refused"]
        assert "does not name this device with the round keys that it gave" in said
        assert one.own(0, 0) == ["train/1", "train/2"]

    def test_a_second_vector_in_the_same_terms_is_charged_and_recorded(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        """The server goes back to an attempt that devices have forgotten: they begin it anew, with other noise."""
        one = town(people(), HOMES, ONE)
        one.fit()
        for home in one.homes:
            home.sums.drop_others()
        letters = {f"mark{at}": self.letters(one, f"mark{at}") for at in range(4)}
        header, _ = wire.decode_letter(letters["mark0"]["keys"])
        numbers = {f"mark{at}": first for at, first in enumerate((0, 2, 4, 6))}
        collector = Collector(terms_of(header), {first: identity(one, at) for at, first in enumerate(numbers.values())})
        while (asked := collector.ask()) is not None:
            came = []
            for mark, first in numbers.items():
                head, parts = wire.decode_letter(letters[mark][asked.exchange])
                body = wire.encode_letter(head, {**parts, wire.QUESTION: asked.question(first)})
                came.append((first, wire.decode_letter(one.mail.devices[mark].answer(body))[1][wire.SUM]))
            collector.take(came)
        assert one.own(0, 0) == ["train/1", "train/1"]
        assert [sent.release for sent in one.homes[0].outbox.sent(0)] == ["train/1", "train/1"]

    def test_what_a_person_was_in_who_opts_out_before_it_leaves_stays(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        one = town(people(), HOMES, ONE, quorum=0.5)
        device = one.mail.devices["mark0"]
        device._sleep = lambda left: one.homes[0].people.opt_out(0) and True
        one.fit()
        assert [line["clients"] for line in one.records.rounds()] == [5]
        assert answered(one, self.letters(one)["masked"]) == {}

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_a_person_opts_out_in_any_exchange(
        self, town: Callable[..., Any], people: Callable[..., Any], exchange: str
    ) -> None:
        """Their device gives nothing more. What had left before is in the sum."""
        one = town(people(), HOMES, ONE, quorum=0.5)
        device, answer = one.mail.devices["mark0"], one.mail.devices["mark0"].answer

        def answering(body: bytes, until: float = math.inf) -> bytes:
            if exchange_of(body) == exchange and one.homes[0].people.find(0).active:
                one.homes[0].people.opt_out(0)
            return bytes(answer(body, until))

        device.answer = answering
        one.fit()
        # Asked for keys, the other person of the device takes part alone.
        clients = {"keys": 6, "shares": 5, "masked": 5}.get(exchange, 7)
        assert [line["clients"] for line in one.records.rounds()] == [clients]
        assert one.own(0, 0) == ([] if clients < 7 else ["train/1"])

    @pytest.mark.parametrize(
        ("lost", "sentence", "charged"),
        [
            ("keys", "The list names 3 parties: this device takes part among 4 or more.", []),
            ("masked", "3 parties survive: 3 of 4 must, and 4 at least.", ["train/1"]),
        ],
    )
    def test_a_device_takes_part_among_as_many_as_it_wants_to_the_end(
        self, town: Callable[..., Any], people: Callable[..., Any], lost: str, sentence: str, charged: list[str]
    ) -> None:
        """Four are asked, and one is lost on the way."""
        one = town(people(), HOMES, ONE, quorum=0.5)
        one.homes[0].configure(fewest=4)
        one.mail.twisted["mark3"] = lambda kind, letter, answer: None if exchange_of(letter) == lost else answer
        with pytest.raises(Abandoned):  # two devices are too few
            round_of(one)
        assert [line["said"] for line in one.said("refused") if "said" in line] == [sentence]
        assert one.own(0, 0) == charged

    def test_a_roster_that_comes_in_between_counts_before_a_vector_leaves(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        """People would be charged as if the roster had vouched for everyone in the list."""
        one = town(people(), HOMES, ONE, quorum=0.5)

        def given(header: dict[str, Any], parts: dict[str, bytes]) -> Letter:
            knows(one, 0)
            one.homes[0].roster.accept(roster(one, [0, 1, 2]).signed(SIGNER))
            return header, parts

        lies = lie_to(one, "mark0", given, "masked")
        one.fit()
        refused(one, lies, "Party 6 of the list is a device that the roster does not have.")
        assert one.own(0, 0) == []

    def test_a_letter_of_another_kind_has_no_secure_sum(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        one = town(people(), HOMES, ONE)
        one.fit()
        header, parts = wire.decode_letter(self.letters(one)["keys"])
        device = one.mail.devices["mark0"]
        for changed in ({"do": "adapt"}, {"do": "hello"}):
            said = wire.decode_letter(device.answer(wire.encode_letter({**header, **changed}, parts)))[0]
            assert "secure sum" in said["refused"]
        said = wire.decode_letter(device.answer(wire.encode_letter({**header, "do": "evaluate"}, parts)))[0]
        assert "of another round" in said["refused"]
        assert one.own(0, 0) == ["train/1"]

    @pytest.mark.parametrize(
        "changed",
        [{"parties": 5}, {"people": 700}, {"people": 1}, {"least": 0.7}, {"colluding": 0.05}, {"entries": 7}],
        ids=str,
    )
    def test_other_terms_in_the_middle_are_another_attempt_or_none(
        self, town: Callable[..., Any], people: Callable[..., Any], changed: dict[str, Any]
    ) -> None:
        one = town(people(), HOMES, ONE, quorum=0.5)
        lies = lie_to(one, "mark0", lambda header, parts: (with_terms(header, **changed), parts), "masked")
        one.fit()
        refused(one, lies, "secure sum")
        assert [one.own(at, 0) for at in range(2)] == [[], ["train/1"]]

    def test_a_sum_among_so_many_that_little_noise_is_left_is_over_the_budget(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        """Without a roster a device counts on its own noise, of which it would add the less the more take part."""
        one = town(people(), HOMES, ONE)
        one.fit()
        header, parts = wire.decode_letter(self.letters(one)["keys"])
        spent = one.homes[0].ledger(0).epsilons(1e-6)["server"]
        one.homes[0].configure(budget=f"eps={3 * spent},observer=server")
        device = one.mail.devices["mark0"]
        for parties, answers in ((4, True), (1000, False)):
            asked = with_terms(header, parties=parties, attempt=f"train/1#{parties}")
            reply, sent = wire.decode_letter(device.answer(wire.encode_letter(asked, parts)))
            assert (wire.SUM in sent) is answers
            assert reply["declined"] == ([] if answers else [0, 1])


def kill_at(one: Any, exchange: str, attempt: str = "train/1") -> None:
    """Train, and kill the server before it asks in this exchange, or once the sum is open."""
    put = one.records.put_sum

    def dying(name: str, people: Any, state: bytes | None, result: bytes | None) -> None:
        put(name, people, state, result)
        ask = Collector.of_state(state).ask() if state else None
        if name == attempt and (state or result) and (ask.exchange if ask else "opened") == exchange:
            raise Killed

    one.records.put_sum = dying
    with pytest.raises(Killed):
        one.fit()
    one.records.put_sum = put


class TestServer:
    def test_a_device_that_leaves_each_sum_on_the_way_is_left_alone(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        one = town(people(), HOMES, replace(PLAN, rounds=8), quorum=0.5)
        one.mail.twisted["mark3"] = lambda kind, letter, answer: None if exchange_of(letter) == "shares" else answer

        def later(line: Any) -> None:
            one.records.add_round(line)
            one.clock.sleep(GREET_SECONDS + 1)

        one.fit(on_round=later)
        asked = [wire.decode_letter(body)[0] for to, kind, body in one.mail.letters if (to, kind) == ("mark3", "train")]
        # After three times it is left alone, each time for twice as long.
        assert [header["step"] for header in asked if header["sum"]["exchange"] == "keys"] == [1, 2, 3, 4, 6]
        assert SILENT_TIMES == 3
        assert [line["clients"] for line in one.records.rounds()] == [6] * 8

    def test_a_device_whose_shares_do_not_open_is_blamed_and_left_alone(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        """It spoils one attempt, and the next one is without it."""
        one = town(people(), HOMES, ONE, quorum=0.5)
        key = load_private((one.homes[3].path / "device.key").read_bytes())

        def spoilt(kind: str, letter: bytes, answer: bytes) -> bytes:
            if exchange_of(letter) != "shares":
                return answer
            asked, (header, parts) = wire.decode_letter(letter), wire.decode_letter(answer)
            listing, _ = Listing.read(terms_of(asked[0]), asked[1][wire.QUESTION])
            content = parts[wire.SUM][9:41] + SEALED.pack_all((number, bytes(82)) for number in (0, 2, 4))
            message = sign(key, terms_of(asked[0]), listing.digest, "shares", 6, content)
            return wire.encode_letter(header, {wire.SUM: message})

        one.mail.twisted["mark3"] = spoilt
        one.fit()
        assert one.told() == ["train/1", "train/1#2"]
        assert [line["clients"] for line in one.records.rounds()] == [6]
        assert [device.faults for device in one.records.devices()] == [0, 0, 0, 1]
        assert one.records.counters()["refused: The shares that it gave to others do not open its secret."] == 1

    def test_a_restored_backup_begins_a_sum_anew_and_charges_it(
        self, town: Callable[..., Any], people: Callable[..., Any], tmp_path: Any
    ) -> None:
        """The sum that was under way may have been opened since: another one has other noise."""
        one = town(people(), HOMES, ONE)
        put, backed_up = one.records.put_sum, list[str]()

        def copied(attempt: str, people: Any, state: bytes | None, result: bytes | None) -> None:
            put(attempt, people, state, result)
            if state and Collector.of_state(state).ask().exchange == "keys":  # type: ignore[union-attr]
                admin.backup(one.records, tmp_path / "backup.sqlite")
                backed_up.append(attempt)

        one.records.put_sum = copied
        one.fit()
        assert backed_up == ["train/1"]
        one.records.database.close()
        one.records = admin.restore(tmp_path / "backup.sqlite", connect(tmp_path / "server.sqlite"))
        one.fit()
        assert one.told() == ["train/1", "train/1#2"]
        assert one.own(0, 0) == ["train/1", "train/1"]

    def test_a_server_that_is_killed_before_it_asks_charges_once(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        one = town(people(), HOMES, ONE)
        runtime = one.runtime()

        def killed(*given: Any) -> None:
            raise Killed

        runtime.collect = killed
        with pytest.raises(Killed):
            one.fit(runtime)
        one.fit()
        assert one.told() == ["train/1"]

    @pytest.mark.parametrize("exchange", ["survivors", "opened"])
    def test_a_server_that_would_ask_something_else_after_a_kill_charges_that(
        self, town: Callable[..., Any], people: Callable[..., Any], exchange: str
    ) -> None:
        one = town(people(), HOMES, ONE)
        kill_at(one, exchange)
        one.plan = replace(one.plan, largest=5e8)  # which letters say
        one.fit()
        assert one.told() == ["train/1", "train/1#2"]
        assert one.own(0, 0) == ["train/1", "train/1"]
        assert one.records.counters() == {"rounds_abandoned": 1}  # no device had to refuse

    @pytest.mark.parametrize("exchange", ["survivors", "opened"])
    def test_measuring_goes_on_though_others_are_there(
        self, town: Callable[..., Any], people: Callable[..., Any], exchange: str
    ) -> None:
        """The numbers of a sum depend on how many devices it was begun among: four need two bytes here, three three."""
        stages = ["clip:norm=1", "skellam:z=0.0525", "secure-sum"]
        one = town(people(), HOMES, replace(ONE, stages=stages, evaluate_every=1, cutoffs=[3]), quorum=0.5)
        kill_at(one, exchange, "train/1/telemetry")
        one.mail.offline.add("mark3")
        one.fit()
        assert one.own(0, 0) == ["train/1", "train/1/telemetry"]

    def test_what_was_measured_of_other_parameters_is_not_taken_for_these(
        self, town: Callable[..., Any], people: Callable[..., Any]
    ) -> None:
        one = town(people(), HOMES, replace(PLAN, rounds=1, evaluate_every=1, cutoffs=[3]))
        runtime = one.runtime()
        fitted = one.fit(runtime)
        other = {name: torch.zeros_like(value) for name, value in fitted.shared.items()}
        asked = len(one.mail.letters)
        runtime.evaluate(fitted.method, fitted.shared)
        assert len(one.mail.letters) == asked  # the same: the sum is stored
        runtime.evaluate(fitted.method, other)
        kinds = [exchange_of(body) for _, _, body in one.mail.letters[asked:]]
        assert kinds == [name for name in EXCHANGES for _ in HOMES]


@pytest.mark.parametrize("lost", ["nobody", "masked"])
def test_a_sum_of_nothing_has_the_noise_that_is_stated(
    town: Callable[..., Any], people: Callable[..., Any], lost: str
) -> None:
    """Nobody has a history, so that the sum is noise: a share of each device whose vector came, however many people."""
    one = town(people((0,) * 7, items=300), HOMES, replace(ONE, fields={"factors": 16}), quorum=0.5)
    one.mail.twisted["mark3"] = lambda kind, letter, answer: None if exchange_of(letter) == lost else answer
    total = round_of(one).total.sum
    (noise,) = (value for value in total.values() if value.numel())
    shares = 3 if lost == "masked" else 4
    stated = one.recipe.build().uplink.among(4).deviation(noise.numel(), shares)
    assert stated == pytest.approx(2 * 2 * math.sqrt(shares / 3), rel=0.01)  # z × twice the norm; 3 of 4 must answer
    # Of 4,800 draws the deviation is off by 1 % or so; five times that has odds of one in a million.
    assert float(noise.double().std()) == pytest.approx(stated, rel=5 / math.sqrt(2 * noise.numel()))


def test_telemetry_is_charged_by_the_devices_that_add_it_up(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """As training is: a client knows the noise of its own device, which is a larger share than one person's of all."""
    one = town(people(), HOMES, replace(ONE, evaluate_every=1, cutoffs=[3]))
    one.fit()
    for ledger in (one.records.ledger(), one.homes[0].ledger(0)):
        charged: dict[str, dict[str, str]] = {}
        for entry in ledger.entries():
            charged.setdefault(entry.release.partition("@")[0], {})[entry.observer] = str(entry.event)
        train, telemetry = charged.values()
        assert [name.rpartition("/")[2] for name in charged] == ["1", "telemetry"]
        assert train == telemetry
    assert one.records.ledger().epsilons(1e-6)["clients"] > one.records.ledger().epsilons(1e-6)["server"]


def test_who_is_in_a_second_attempt_is_told_by_that_attempt(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    """The first person of a device can afford the first attempt only, the second person both."""
    one = town(people(), HOMES, ONE, quorum=0.5)
    channel = Channel(*one.recipe.build().uplink.stages[:-1])  # without a roster, a device counts on its own noise
    charges = channel.charges(Cohort(np.zeros(1, dtype=np.int64), "all", 1, 1, devices=len(HOMES)))
    ledger, spent = Ledger(), list[float]()
    for number in range(3):
        ledger.charge(f"before/{number}", charges)
        spent.append(ledger.epsilons(1e-6)["server"])
    one.homes[0].configure(budget=f"eps={(spent[1] + spent[2]) / 2},observer=server,delta=1e-6")
    one.homes[0].ledger(0).charge("before", charges)
    lost: list[str] = []

    def twist(kind: str, letter: bytes, answer: bytes) -> bytes | None:
        if exchange_of(letter) == "survivors" and len(lost) < 2:
            lost.append(kind)
            return None
        return answer

    one.mail.twisted["mark1"] = one.mail.twisted["mark2"] = twist
    one.fit()
    assert one.told() == ["train/1", "train/1#2"]
    assert [len(one.own(0, slot)) for slot in (0, 1)] == [2, 2]  # what was charged before, and one attempt; two
    assert [line["clients"] for line in one.records.rounds()] == [6]


def test_too_few_people_in_a_sum_open_nothing(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """Enough devices gave a vector, but of too few people."""
    one = town(people(), HOMES, ONE, quorum=1.0)
    one.mail.twisted["mark0"] = lambda kind, letter, answer: None if exchange_of(letter) == "masked" else answer
    one.fit()
    tasks = [Task.read(wire.decode_letter(body)[0]).sum for _, kind, body in one.mail.letters if kind == "train"]
    assert {task.exchange for task in tasks if task.terms.attempt == "train/1"} == {"keys", "shares", "masked"}
    assert one.told()[:2] == ["train/1", "train/1#2"]
    assert [line["clients"] for line in one.records.rounds()] == [5]

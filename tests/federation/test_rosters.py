"""Secure sums of devices that know whom to believe, and a server that lies to them; in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from homebody.core import Cohort
from homebody.errors import Abandoned, HomebodyError
from homebody.federation import wire
from homebody.federation.secure_sum.identities import identity_of, load_public_key
from homebody.federation.secure_sum.roster import Roster
from homebody.federation.server.rosters import put_roster, stored_roster
from homebody.federation.task import Task
from homebody.recipe import Recipe
from homebody.rng import Rng

SIGNER, OTHER = (ec.derive_private_key(number, ec.SECP384R1()) for number in (901, 902))
STAGES = ["clip:norm=1", "skellam:z=2", "secure-sum"]
PLAN = Recipe("fedmf", "devices", {"factors": 4}, stages=STAGES, rounds=1, seed=5, evaluate_every=0)
HOMES = (2, 2, 2, 1)


def text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def roster(one: Any, which: Collection[int] | None = None, number: int = 1, run: str = "") -> Roster:
    """A roster of some devices of a town, by default of all."""
    numbers = range(len(one.homes)) if which is None else which
    keys = (load_public_key((one.homes[at].path / "device.pub").read_bytes()) for at in numbers)
    return Roster.of(number, map(identity_of, keys), run)


def knows(one: Any, *which: int) -> None:
    """Give these devices, or all, the signer's key."""
    for at in which or range(len(one.homes)):
        one.homes[at].configure(roster_key=text(SIGNER))


def round_of(one: Any, *, lies: bool = False) -> Any:
    """One round with everybody who is there. lies: the server asks devices that its own roster does not name."""
    runtime, method = one.runtime(), one.recipe.build()
    if lies:
        runtime._vouched = runtime._letters.present
    runtime.begin(method, Rng.of(0))
    users = runtime.available()
    shared = method.init_shared(runtime.catalogue, Rng.of(0))
    opened = runtime.open("train/1", Cohort(users, "all", len(users), len(users)), shared)
    return runtime.collect(method, shared, opened.cohort, Rng.of(0), 1)


def refusals(one: Any) -> set[str]:
    return {line["said"] for line in one.said("refused") if "said" in line}


def times_sent(one: Any, mark: str) -> int:
    return sum(wire.ROSTER in wire.decode_letter(body)[1] for to, _, body in one.mail.letters if to == mark)


def test_devices_get_the_roster_once_and_count_on_one_another(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=2))
    knows(one)
    listed = roster(one)
    put_roster(one.records, listed.signed(SIGNER))
    one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [7, 7]
    assert [times_sent(one, f"mark{at}") for at in range(4)] == [1, 1, 1, 1]
    assert [home.roster.current() for home in one.homes] == [listed] * 4
    # Devices that somebody vouches for: a person's ledger counts on the noise of all, as the server's does.
    spent = one.records.ledger().epsilons(1e-6)["server"]
    assert one.homes[0].ledger(0).epsilons(1e-6)["server"] == pytest.approx(spent)
    assert one.records.counters() == {}


def test_without_a_key_a_device_wants_no_roster_and_counts_on_its_own_noise(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=2))
    knows(one, 1)
    put_roster(one.records, roster(one).signed(SIGNER))
    one.fit()
    assert [times_sent(one, f"mark{at}") for at in range(4)] == [0, 1, 0, 0]
    own, rostered = (one.homes[at].ledger(0).epsilons(1e-6)["server"] for at in (0, 1))
    assert (rostered, own) == pytest.approx((3.543, 6.578), abs=1e-3)  # as docs/secure-sum.md says


def test_a_server_that_invents_devices_is_refused_before_anything_is_charged(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), (*HOMES[:3], 1), PLAN, quorum=0.5)
    knows(one, 0, 1, 2)
    put_roster(one.records, roster(one, [0, 1, 2]).signed(SIGNER))  # the fourth is the server's own
    with pytest.raises(Abandoned):
        round_of(one, lies=True)
    assert refusals(one) == {"Party 6 of the list is a device that the roster does not have."}
    assert [one.own(at, 0) for at in range(3)] == [[], [], []]
    exchanges = {
        Task.read(wire.decode_letter(body)[0]).sum.exchange for _, kind, body in one.mail.letters if kind == "train"
    }
    assert exchanges == {"keys", "shares"}


def test_without_a_roster_invented_devices_are_not_noticed_and_only_own_noise_counts(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    assert round_of(one, lies=True).answered == 7
    spent = [one.homes[at].ledger(0).epsilons(1e-6)["server"] for at in range(4)]
    assert len(set(spent)) == 1
    other = town(people(), HOMES, PLAN)
    knows(other)
    put_roster(other.records, roster(other).signed(SIGNER))
    round_of(other)
    assert other.homes[0].ledger(0).epsilons(1e-6)["server"] < spent[0] < math.inf


def test_a_server_that_swaps_the_roster_for_one_of_its_own_is_refused(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    knows(one)
    put_roster(one.records, roster(one).signed(OTHER))
    with pytest.raises(Abandoned):
        round_of(one)
    assert refusals(one) == {"The roster is not signed by the key that this device was given for rosters."}
    assert [home.roster.current() for home in one.homes] == [None] * 4


def test_without_a_roster_of_the_server_a_device_that_needs_one_says_so(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    knows(one)
    with pytest.raises(Abandoned):
        round_of(one)
    (said,) = refusals(one)
    assert said.startswith("This device takes part in a secure sum among devices of a signed roster only")
    assert one.own(0, 0) == []


def test_who_refused_for_want_of_a_roster_is_asked_as_soon_as_there_is_one(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    knows(one)
    runtime, began = one.runtime(), one.clock.now
    log = runtime._log

    def telling(event: str, **facts: Any) -> None:
        log(event, **facts)
        if event == "waiting":  # everybody rests
            put_roster(one.records, roster(one).signed(SIGNER))

    runtime._log = telling
    one.fit(runtime)
    assert len(one.said("begun again")) == 1  # nothing had left: the same release, and no second charge
    assert one.told() == ["train/1"]
    assert [line["clients"] for line in one.records.rounds()] == [7]
    assert one.clock.now - began < 300


def test_a_roster_that_the_device_was_given_by_hand_is_enough(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    knows(one)
    for home in one.homes:
        home.roster.accept(roster(one).signed(SIGNER))
    assert round_of(one).answered == 7


def test_a_server_cannot_go_back_to_an_older_roster(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """The device that was taken out stays out for whoever knows the newer list."""
    one = town(people(), HOMES, PLAN, quorum=0.5)
    knows(one)
    for home in one.homes:
        home.roster.accept(roster(one, [0, 1, 2], number=6).signed(SIGNER))
    put_roster(one.records, roster(one, number=5).signed(SIGNER))
    with pytest.raises(Abandoned):
        round_of(one)
    assert refusals(one) == {"Roster 5 is older than roster 6, which this device has accepted."}


def test_a_newer_roster_reaches_devices_with_the_next_round(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, replace(PLAN, rounds=3))
    knows(one)
    put_roster(one.records, roster(one, [0, 1, 2], number=5).signed(SIGNER))
    add_round = one.records.add_round

    def after(line: Any) -> None:
        add_round(line)
        if line.step == 1:
            put_roster(one.records, roster(one, number=6).signed(SIGNER))

    one.fit(on_round=after)
    assert [line["clients"] for line in one.records.rounds()] == [6, 7, 7]
    assert [times_sent(one, f"mark{at}") for at in range(4)] == [2, 2, 2, 1]
    assert {home.roster.current().number for home in one.homes} == {6}


def test_a_registered_device_that_the_roster_lacks_is_not_asked(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    knows(one)
    put_roster(one.records, roster(one, [0, 1, 2]).signed(SIGNER))
    one.fit()
    assert [line["clients"] for line in one.records.rounds()] == [6]
    assert one.own(3, 0) == []
    (line,) = one.said("not in the roster")
    assert (line["roster"], line["devices"], line["first"]) == (1, 1, ["mark3"])


def test_a_roster_for_another_run_is_refused(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one, other = (town(people(), HOMES, PLAN) for _ in range(2))
    for each, run in ((one, "another"), (other, other.plan.run)):
        knows(each)
        put_roster(each.records, roster(each, run=run).signed(SIGNER))
    with pytest.raises(Abandoned):
        round_of(one)
    assert refusals(one) == {"The roster of this device is for another run."}
    assert round_of(other).answered == 7


def test_a_device_that_wants_more_parties_takes_no_part(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), HOMES, PLAN, quorum=0.5)
    one.homes[0].configure(fewest=5)
    assert round_of(one).answered == 5
    assert refusals(one) == {"A secure sum of 4 parties is refused: this device takes part among 5 or more."}


def test_a_damaged_roster_is_not_told_to_the_server(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    one = town(people(), HOMES, PLAN, quorum=0.5)
    knows(one)
    put_roster(one.records, roster(one).signed(SIGNER))
    one.homes[0].roster.accept(roster(one).signed(SIGNER))
    file = one.homes[0].path / "roster.signed"
    file.write_bytes(file.read_bytes()[:-1])
    assert round_of(one).answered == 5
    assert refusals(one) == {"The device cannot answer this now."}
    assert any("is damaged: remove it" in line["reason"] for line in one.said("failed"))


def test_a_letter_that_names_another_roster_than_it_brings_is_refused(
    town: Callable[..., Any], people: Callable[..., Any]
) -> None:
    one = town(people(), HOMES, PLAN)
    knows(one)
    put_roster(one.records, roster(one).signed(SIGNER))
    one.fit()
    header, parts = next(
        wire.decode_letter(body)
        for _, kind, body in one.mail.letters
        if kind == "train" and wire.ROSTER in wire.decode_letter(body)[1]
    )

    def refused(named: Any, brings: bytes) -> str:
        letter = wire.encode_letter(
            {**header, "sum": {**header["sum"], "roster": named}}, {**parts, wire.ROSTER: brings}
        )
        return str(wire.decode_letter(one.mail.devices["mark0"].answer(letter))[0]["refused"])

    newer = roster(one, number=2)
    assert "not the one that the letter names" in refused(header["sum"]["roster"], newer.signed(SIGNER))
    for named in (7, None, "x", "A" * 32, ["a"]):
        assert "description of a secure sum" in refused(named, newer.signed(SIGNER))


class TestOnTheServer:
    def test_the_newest_roster_is_kept(self, town: Callable[..., Any], people: Callable[..., Any]) -> None:
        one = town(people(), HOMES, PLAN)
        assert (stored_roster(one.records), one.records.features()) == (None, None)
        put_roster(one.records, roster(one, number=5).signed(SIGNER))
        put_roster(one.records, roster(one, number=6).signed(SIGNER))
        with pytest.raises(HomebodyError, match="has roster 6, which is newer than 5"):
            put_roster(one.records, roster(one, number=5).signed(SIGNER))
        with pytest.raises(HomebodyError, match="another roster of the number 6"):
            put_roster(one.records, roster(one, [0, 1, 2], number=6).signed(SIGNER))
        with pytest.raises(HomebodyError, match="not signed"):
            put_roster(one.records, roster(one, number=7).content)
        assert stored_roster(one.records) == roster(one, number=6)
        assert one.records.features() is None
        one.records.put_features(b"schema")
        assert (one.records.features(), stored_roster(one.records)) == (b"schema", roster(one, number=6))


def test_one_key_registered_twice_is_one_party_only(town: Callable[..., Any], people: Callable[..., Any]) -> None:
    """A server that has a device of its own under two names cannot make it two parties."""
    one = town(people(), HOMES, PLAN)
    one.records.add_device("mark9", one.mail.keys["mark3"], "device 3 again", 1)
    users, method, runtime = np.array([0, 2, 4, 6, 7]), one.recipe.build(), one.runtime()
    runtime.begin(method, Rng.of(0))
    runtime.available()
    shared = method.init_shared(runtime.catalogue, Rng.of(0))
    opened = runtime.open("train/1", Cohort(users, "all", 5, 5), shared)
    with pytest.raises(HomebodyError, match="needs as many different devices"):
        runtime.collect(method, shared, opened.cohort, Rng.of(0), 1)

"""Rosters: what is signed, and everything that is refused as one."""

from __future__ import annotations

import struct

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from tests.federation.secure_sum.world import World, device_key

from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.secure_sum.identities import fingerprint_of, identity_of, sign_statement
from homebody.federation.secure_sum.messages import BadMessage
from homebody.federation.secure_sum.party import Party
from homebody.federation.secure_sum.roster import BadRoster, Roster

SIGNER = device_key(900)
DEVICES = [identity_of(device_key(number).public_key()) for number in range(10, 14)]


def rostered(number: int = 7, run: str = "") -> Roster:
    return Roster.of(number, DEVICES, run)


def encoded(devices: list[bytes], number: int = 7, run: bytes = b"", count: int | None = None) -> bytes:
    """What somebody else could write."""
    head = struct.pack("<4sQBI", b"HBR1", number, len(run), len(devices) if count is None else count)
    return b"".join([head, run, *devices])


def signed(content: bytes, key: ec.EllipticCurvePrivateKey = SIGNER) -> bytes:
    return content + sign_statement(key, b"homebody roster 1, signed\0" + content)


@pytest.mark.parametrize("run", ["", "2f6e", "Übung 1"])
def test_a_roster_is_read_as_it_was_signed(run: str) -> None:
    roster = rostered(run=run)
    read = Roster.read(roster.signed(SIGNER), SIGNER.public_key())
    assert (read, read.devices, read.number, read.run) == (roster, frozenset(DEVICES), 7, run)
    assert Roster.decode(roster.content) == Roster.unverified(roster.signed(SIGNER)) == roster


def test_there_is_one_way_to_write_a_list() -> None:
    one, other = Roster.of(7, DEVICES), Roster.of(7, reversed(DEVICES))
    assert one.content == other.content == encoded(sorted(DEVICES))
    assert one.digest == other.digest == wire.digest(one.content)
    assert (
        len({one.digest, Roster.of(8, DEVICES).digest, Roster.of(7, DEVICES[1:]).digest, rostered(run="a").digest}) == 4
    )


def test_two_signatures_of_one_list_are_one_roster() -> None:
    first, second = rostered().signed(SIGNER), rostered().signed(SIGNER)
    assert first != second
    assert Roster.unverified(first).digest == Roster.unverified(second).digest


ORDERED = sorted(DEVICES)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "This is no roster"),
        (b"HBR2" + encoded(ORDERED)[4:], "This is no roster"),
        (b"HBR1\1", "ends too early"),
        (encoded(ORDERED, count=9), "ends too early"),
        (encoded(ORDERED, count=1 << 31), "ends too early"),
        (encoded(ORDERED[::-1]), "twice, or is not in order"),
        (encoded([ORDERED[0], *ORDERED]), "twice, or is not in order"),
        (encoded(ORDERED[:2]), "3 to 1,048,576 devices, not 2"),
        (encoded(ORDERED, number=0), "whole number from 1"),
        (encoded(ORDERED, number=1 << 63), "whole number from 1"),
        (encoded([*ORDERED, b"\4" * 49]), "no public key of a device"),
        (encoded(ORDERED, run=b"\xff"), "is no text"),
        (encoded(ORDERED, run=b"a\nb"), "one line"),
        (encoded(ORDERED, run=b"a" * 201), "at most 200 bytes"),
        (encoded(ORDERED) + b"x", r"signature has 97 bytes|longer"),
    ],
)
def test_any_other_form_is_refused_though_signed(content: bytes, sentence: str) -> None:
    with pytest.raises(BadRoster, match=sentence):
        Roster.read(signed(content), SIGNER.public_key())
    with pytest.raises(BadRoster, match=sentence):
        Roster.decode(content)


def test_a_roster_that_is_too_large_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homebody.federation.secure_sum.roster.LONGEST", 300)
    with pytest.raises(BadRoster, match="at most 300 bytes, not 309"):
        Roster.read(rostered().signed(SIGNER), SIGNER.public_key())


@pytest.mark.parametrize(
    "content",
    [
        signed(encoded(ORDERED), device_key(901)),
        encoded(ORDERED) + bytes(96),
        # The same key may sign other statements of the protocol: they are no roster.
        encoded(ORDERED) + sign_statement(SIGNER, b"homebody secure sum 1, signed\0" + encoded(ORDERED)),
        encoded(ORDERED) + sign_statement(SIGNER, encoded(ORDERED)),
    ],
    ids=["another key", "nobody", "another label", "no label"],
)
def test_what_the_signer_did_not_sign_as_a_roster_is_refused(content: bytes) -> None:
    with pytest.raises(BadRoster, match="not signed by the key that this device was given"):
        Roster.read(content, SIGNER.public_key())


def test_a_list_and_a_signed_one_are_not_taken_for_one_another() -> None:
    with pytest.raises(BadRoster, match="not signed: sign it with `homebody keys sign-roster`"):
        Roster.read(rostered().content, SIGNER.public_key())
    with pytest.raises(BadRoster, match="signed already, or damaged"):
        Roster.decode(rostered().signed(SIGNER))


SIGNED = rostered().signed(SIGNER)


@given(st.integers(0, 8 * len(SIGNED) - 1))
def test_no_bit_can_be_changed(bit: int) -> None:
    changed = bytearray(SIGNED)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadRoster):
        Roster.read(bytes(changed), SIGNER.public_key())


@given(st.integers(0, len(SIGNED) - 1))
def test_no_beginning_of_one_is_a_roster(length: int) -> None:
    with pytest.raises(BadRoster):
        Roster.read(SIGNED[:length], SIGNER.public_key())


@given(st.binary(max_size=400))
def test_whatever_comes_is_refused_in_a_sentence(content: bytes) -> None:
    for given_bytes in (content, b"HBR1" + content):
        with pytest.raises(BadRoster):
            Roster.read(given_bytes, SIGNER.public_key())


def test_a_device_is_listed_once() -> None:
    with pytest.raises(BadRoster, match="names a device twice: leave one out"):
        Roster.of(1, [*DEVICES, DEVICES[0]])


def test_a_key_off_the_curve_has_no_fingerprint() -> None:
    with pytest.raises(HomebodyError, match="no point of the curve"):
        fingerprint_of(b"\2" + b"\xff" * 48)


class TestInASum:
    def test_invented_devices_are_refused_with_a_roster_and_accepted_without(self) -> None:
        world = World(6)
        devices = [identity_of(device_key(number).public_key()) for number in range(10, 14)]  # 14 and 15 are invented
        known = Roster.of(1, devices).devices
        world.parties[10] = world.join(10, known=known)
        question = world.to("shares").question(10)
        with pytest.raises(BadMessage, match="Party 14 of the list is a device that the roster does not have"):
            world.parties[10].answer("shares", question)
        assert world.parties[11].answer("shares", world.ask().question(11))

    def test_a_roster_that_comes_in_the_middle_holds_before_the_vector_leaves(self) -> None:
        world = World(4)
        asked = world.to("masked")
        known = Roster.of(1, [world.parties[number].identity for number in (10, 11, 12)]).devices
        party = Party.of_state(world.parties[10].state(), device_key(10), known=known)
        with pytest.raises(BadMessage, match="Party 13 of the list is a device that the roster does not have"):
            party.answer("masked", asked.question(10), lambda: pytest.fail("worked for nothing"))

    def test_a_device_that_the_roster_lacks_itself_takes_no_part(self) -> None:
        world = World(4)
        world.parties[10] = world.join(
            10, known=Roster.of(1, [party.identity for party in world.parties.values()][1:]).devices
        )
        with pytest.raises(BadMessage, match="Party 10 of the list"):
            world.parties[10].answer("shares", world.to("shares").question(10))

    def test_fewer_devices_than_this_one_wants_are_refused(self) -> None:
        world = World(4)
        with pytest.raises(BadMessage, match="takes part among 5 or more"):
            world.join(10, fewest=5)

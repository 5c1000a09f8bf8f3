"""A server that lies to devices, and devices that lie to the server, to others or to both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federation.secure_sum.world import World, device_key

from homebody.errors import Abandoned, HomebodyError
from homebody.federation.secure_sum import shamir, signatures
from homebody.federation.secure_sum.masks import derive
from homebody.federation.secure_sum.messages import (
    COUNT,
    EXCHANGES,
    LISTED,
    OPENED,
    SEALED,
    SIGNED,
    BadMessage,
    Exchange,
    pack_numbers,
)
from homebody.federation.secure_sum.party import Party
from homebody.federation.secure_sum.signatures import identity_of, sign

Rows = list[list[object]]


def listed(question: bytes) -> tuple[Rows, Rows]:
    """The list of parties in a question, and the signatures."""
    (count,) = COUNT.unpack_from(question)
    end = 4 + count * LISTED.size
    return (
        [list(row) for row in LISTED.unpack(question[4:end], "list")],
        [list(row) for row in SIGNED.unpack(question[end:], "signatures")],
    )


def question_of(parties: Rows, signed: Rows) -> bytes:
    return COUNT.pack(len(parties)) + LISTED.pack_all(map(tuple, parties)) + SIGNED.pack_all(map(tuple, signed))


def swap_keys(parties: Rows, signed: Rows) -> None:
    parties[1][2:], parties[2][2:] = parties[2][2:], parties[1][2:]


def swap_purposes(parties: Rows, signed: Rows) -> None:
    parties[1][2:] = parties[1][:1:-1]


def double_a_key(parties: Rows, signed: Rows) -> None:
    parties[1][2] = parties[2][2]


def double_a_device(parties: Rows, signed: Rows) -> None:
    parties[1][1] = parties[2][1]


def replay_keys(parties: Rows, signed: Rows) -> None:
    """Those that the same device gave, and signed, in another attempt."""
    other = World(4, attempt="round 0")
    content = other.parties[11].answer("keys", b"")
    parties[1][2:], signed[0][1] = [content[9:41], content[41:73]], content[-96:]


def change_own_keys(parties: Rows, signed: Rows) -> None:
    parties[0][2] = b"k" * 32


def leave_me_out(parties: Rows, signed: Rows) -> None:
    del parties[0]


def sign_too_few(parties: Rows, signed: Rows) -> None:
    del signed[0]


def sign_nonsense(parties: Rows, signed: Rows) -> None:
    signed[1][1] = bytes(96)


def name_twice(parties: Rows, signed: Rows) -> None:
    parties[2] = parties[1]


def name_too_few(parties: Rows, signed: Rows) -> None:
    del parties[1:3], signed[0:2]


class TestALyingServer:
    @pytest.mark.parametrize(
        ("lie", "why"),
        [
            (swap_keys, "round keys of party 11 are not signed by its device for this attempt"),
            (swap_purposes, "round keys of party 11 are not signed by its device for this attempt"),
            (replay_keys, "round keys of party 11 are not signed by its device for this attempt"),
            (sign_nonsense, "round keys of party 12 are not signed"),
            (double_a_key, "A round key is in the list twice"),
            (double_a_device, "names one device as two parties"),
            (name_twice, "name a party twice"),
            (name_too_few, r"names 2 parties: of 4, 3 at least must take part"),
            (change_own_keys, "does not name this device with the round keys that it gave"),
            (leave_me_out, "does not name this device with the round keys that it gave"),
            (sign_too_few, "not a signature of the round keys of each neighbour"),
        ],
    )
    def test_a_false_list(self, lie: Callable[[Rows, Rows], None], why: str) -> None:
        world = World(4)
        asked, party = world.to("shares"), world.parties[10]
        parties, signed = listed(asked.question(10))
        lie(parties, signed)
        before = party.state()
        with pytest.raises(BadMessage, match=why):
            party.answer("shares", question_of(parties, signed))
        assert party.state() == before  # nothing was given, and the right question is answered
        assert party.answer("shares", asked.question(10))

    def test_parties_that_the_roster_does_not_have(self) -> None:
        world = World(4)
        known = {identity_of(device_key(number).public_key()) for number in (10, 11, 12)}
        world.parties[10] = world.join(10, known=known)
        with pytest.raises(BadMessage, match="Party 13 of the list is a device that the roster does not have"):
            world.answer(10, world.to("shares"))
        known.add(identity_of(device_key(13).public_key()))
        assert world.answer(10, world.asked["shares"])

    def test_too_few_parties(self) -> None:
        with pytest.raises(BadMessage, match=r"A secure sum of 2 parties is refused: .* among 3 or more"):
            World(2)
        world = World(4)
        world.parties[10] = world.join(10, fewest=4)
        world.exchange(lambda number: number == 13)
        with pytest.raises(BadMessage, match="The list names 3 parties: this device takes part among 4 or more"):
            world.answer(10, world.ask())

    def test_too_few_survive(self) -> None:
        """A sum of two would tell each of them the other's vector."""
        world = World(3)
        world.to("masked")
        world.exchange(lambda number: number == 12)
        with pytest.raises(BadMessage, match="2 parties survive: 2 of 3 must, and 3 at least"):
            world.answer(10, world.ask())

    @pytest.mark.parametrize(
        ("boxes", "why"),
        [
            (slice(0, 1), "1 neighbour sent shares, and 2 must"),
            (slice(0, 0), "0 neighbours sent shares"),
        ],
    )
    def test_too_few_masks(self, boxes: slice, why: str) -> None:
        world = World(4)
        rows = SEALED.unpack(world.to("masked").question(10), "sealed shares")
        with pytest.raises(BadMessage, match=why):
            world.parties[10].answer(
                "masked", SEALED.pack_all(rows[boxes]), lambda: pytest.fail("the vector was drawn")
            )

    def test_shares_of_strangers(self) -> None:
        world = World(4)
        rows = SEALED.unpack(world.to("masked").question(10), "sealed shares")
        with pytest.raises(BadMessage, match="shares of a party that is no neighbour"):
            world.parties[10].answer("masked", SEALED.pack_all([*rows, (99, rows[0][1])]), lambda: pytest.fail("drawn"))

    @pytest.mark.parametrize(
        ("survivors", "why"),
        [
            ((10, 11), "2 parties survive: 3 of 4 must"),
            ((11, 12, 13), "do not include this device"),
            ((10, 11, 12, 99), "A survivor is no party of this attempt"),
            ((10, 11, 12, 13), "A neighbour survives whose shares did not come"),
        ],
    )
    def test_false_survivors(self, survivors: tuple[int, ...], why: str) -> None:
        world = World(4)
        world.to("shares")
        world.exchange(lambda number: number == 13)
        world.exchange()
        with pytest.raises(BadMessage, match=why):
            world.parties[10].answer("survivors", pack_numbers(survivors))
        assert world.answer(10, world.ask())

    def test_two_sets_of_survivors(self) -> None:
        world = World(5)
        asked, party = world.to("survivors"), world.parties[10]
        party.answer("survivors", asked.question(10))
        with pytest.raises(BadMessage, match=r"has answered 'survivors' of this attempt already, to another question"):
            party.answer("survivors", pack_numbers((10, 11, 12, 13)))
        # Restored from what is stored, it knows that too.
        with pytest.raises(BadMessage, match="it answers one only"):
            Party.of_state(party.state(), device_key(10)).answer("survivors", pack_numbers((10, 11, 12, 13)))

    def test_a_split_view_opens_nothing(self) -> None:
        """Half of the parties sign one set, half another: neither half finds enough signatures."""
        world = World(6)
        world.to("survivors")
        first, second = (10, 11, 12, 13, 14), (11, 12, 13, 14, 15)
        signed = {
            number: world.parties[number].answer("survivors", pack_numbers(first if number < 13 else second))[-96:]
            for number in range(10, 16)
        }
        for number in range(10, 16):
            all_of = [(other, signed[other]) for other in (first if number < 13 else second)]
            own = [(other, signature) for other, signature in all_of if (other < 13) == (number < 13)]
            with pytest.raises(
                BadMessage, match="3 parties have signed the survivors, and 4 must before anything opens"
            ):
                world.parties[number].answer("open", SIGNED.pack_all(own))
            with pytest.raises(BadMessage, match="has not signed the same survivors as this device"):
                world.parties[number].answer("open", SIGNED.pack_all(all_of))

    def test_another_list_of_parties(self) -> None:
        """Survivors are signed together with the list: devices that saw different lists do not open together."""
        world, other = World(4), World(4)
        world.to("survivors")
        other.exchange(lambda number: number == 13)
        other.to("survivors")
        signed = [(n, other.parties[n].answer("survivors", pack_numbers((10, 11, 12)))[-96:]) for n in (10, 11, 12)]
        world.parties[10].answer("survivors", pack_numbers((10, 11, 12)))
        with pytest.raises(BadMessage, match="Party 10 has not signed the same survivors"):
            world.parties[10].answer("open", SIGNED.pack_all(signed))

    def test_early_opening(self) -> None:
        world = World(4)
        for exchange in EXCHANGES[:-1]:
            with pytest.raises(BadMessage, match=f"'open' is asked for before '{exchange}' was answered"):
                world.parties[10].answer("open", b"")
            world.exchange()
        rows = SIGNED.unpack(world.ask().question(10), "signatures")
        with pytest.raises(BadMessage, match="2 parties have signed the survivors, and 3 must"):
            world.parties[10].answer("open", SIGNED.pack_all(rows[:2]))
        with pytest.raises(BadMessage, match="by a party that is not one of them"):
            world.parties[10].answer("open", SIGNED.pack_all([*rows, (99, rows[0][1])]))
        with pytest.raises(BadMessage, match="name a party twice"):
            world.parties[10].answer("open", SIGNED.pack_all([rows[0], rows[0], rows[1]]))

    def test_the_second_secret_is_never_given(self) -> None:
        world = World(4)
        world.to("masked")
        world.exchange(lambda number: number == 13)
        world.exchange()
        party, asked = world.parties[10], world.ask()
        given = party.answer("open", asked.question(10))
        for question in (b"", asked.question(10)[: 3 * SIGNED.size - 1], asked.question(10) + bytes(SIGNED.size)):
            with pytest.raises(BadMessage, match="it answers one only"):
                party.answer("open", question)
        with pytest.raises(BadMessage, match="it answers one only"):
            party.answer("survivors", pack_numbers((10, 11, 12, 13)))
        assert party.answer("open", asked.question(10)) == given

    def test_each_signature_is_really_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other tests remember what was checked: one round without that."""
        checked: list[bytes] = []
        plain = signatures._holds.__wrapped__  # type: ignore[attr-defined]
        monkeypatch.setattr(signatures, "_holds", lambda *given: (checked.append(given[1]), plain(*given))[1])
        world = World(4)
        world.run()
        # 4 parties × 3 neighbours' keys, 4 × 3 signatures of survivors, and 4 × 5 by the server.
        assert len(checked) == 12 + 12 + 20

    @settings(max_examples=40)
    @given(st.data())
    def test_nonsense_is_refused_and_changes_nothing(self, data: st.DataObject) -> None:
        world = World(4)
        exchange: Exchange = data.draw(st.sampled_from(EXCHANGES[1:]))
        right = world.to(exchange).question(10)
        cut = data.draw(st.integers(0, len(right) - 1))
        changed = bytearray(right)
        changed[cut] ^= data.draw(st.integers(1, 255))
        vector = world.vectors[10]
        for wrong in (right[:cut], right + b"x", bytes(changed), data.draw(st.binary(max_size=300))):
            before = world.parties[10].state()
            try:
                world.parties[10].answer(exchange, wrong, lambda: vector)
            except BadMessage:
                assert world.parties[10].state() == before
            else:
                # Sealed shares are opened at the end alone; a set of fewer survivors may be right.
                assert exchange in ("masked", "survivors")
                world = World(4)
                world.to(exchange)


def resign(world: World, exchange: Exchange, number: int, content: bytes) -> bytes:
    """What this device would sign if it lied."""
    listing = b"" if exchange == "keys" else world.collector._listing.digest
    return sign(device_key(number), world.terms, listing, exchange, number, content)


def liar(world: World, exchange: Exchange, change: Callable[[bytes], bytes]) -> Callable[[int, bytes], bytes]:
    """Party 10 gives another content, and signs it."""
    return lambda number, given: resign(world, exchange, 10, change(given[9:-96])) if number == 10 else given


class TestLyingDevices:
    """Whoever lies counts as lost, and the sum of the others comes out; it is said why."""

    @pytest.mark.parametrize(
        ("exchange", "change", "why"),
        [
            ("keys", lambda content: content[:-1], "no two round keys"),
            ("keys", lambda content: bytes(32) + content[32:], "no two round keys"),
            ("keys", lambda content: content[:32] * 2, "is there twice"),
            ("shares", lambda content: content[: -SEALED.size], "not shares for each neighbour"),
            ("shares", lambda content: content[:-1], "no whole number of rows"),
            ("masked", lambda content: content[:-1], "has 15 bytes, not 14"),
            ("masked", lambda content: content + b"x", "has 15 bytes, not 16"),
            ("survivors", lambda content: hashlib.sha256(b"others").digest(), "signs other survivors"),
            ("open", lambda content: content[:-1], "no whole number of rows"),
            ("open", lambda content: OPENED.pack(10, b"\0", bytes(33)), "of a party that stays closed"),
            ("open", lambda content: OPENED.pack(99, b"\1", bytes(33)), "of a party that gave it none"),
            ("open", lambda content: OPENED.pack(10, b"\1", b"\xff" * 33), "too large to be one"),
        ],
    )
    def test_one_of_them(self, exchange: Exchange, change: Callable[[bytes], bytes], why: str) -> None:
        world = World(6)
        world.to(exchange)
        world.exchange(changed=liar(world, exchange, change))
        assert why in world.collector.faults[10]
        found = world.run()
        late = exchange in ("survivors", "open")
        assert found.survivors == tuple(range(10 if late else 11, 16))
        assert found.numbers.tolist() == world.sum(found.survivors)

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_what_is_not_signed(self, exchange: Exchange) -> None:
        world = World(4)
        world.to(exchange)
        world.exchange(changed=lambda number, given: given[:-1] + bytes([given[-1] ^ 1]) if number == 10 else given)
        assert "signature does not hold for this device, attempt and exchange" in world.collector.faults[10]

    def test_keys_of_another_attempt_device_or_exchange(self) -> None:
        world = World(5)
        given = World(5, attempt="round 0").parties[10].answer("keys", b"")
        stranger = Party.join(world.terms, 11, ec.generate_private_key(ec.SECP384R1())).answer("keys", b"")
        answers = {number: party.answer("keys", b"") for number, party in world.parties.items()}
        world.to("keys")
        came = [(10, given), (11, stranger), (12, answers[13]), (13, b""), (99, b""), (14, answers[14])]
        with pytest.raises(Abandoned, match=r"^1 party of 5"):
            world.collector.take([*came, (14, answers[14]), (13, answers[13])])  # a second answer counts for nothing
        assert {number: why.split(" ", 2)[2][:22] for number, why in world.collector.faults.items()} == {
            10: "signature does not hol",
            11: "signature does not hol",
            12: "is of another exchange",
            13: "is no message of a sec",
        }

    def test_a_round_key_that_another_party_gave(self) -> None:
        world = World(4)
        stolen = world.parties[11].answer("keys", b"")[9:-96]
        asked = world.ask()
        answers = [(number, world.answer(number, asked)) for number in (11, 12, 13)]
        world.collector.take([*answers, (10, resign(world, "keys", 10, stolen))])
        assert "another party's" in world.collector.faults[10]

    def test_shares_that_nobody_can_open(self) -> None:
        """Its neighbours mask with it as before. None of them has a share of it, so that the sum stays closed."""
        world = World(4)
        world.to("shares")
        empty = SEALED.pack_all((number, bytes(82)) for number in (11, 12, 13))
        world.exchange(changed=liar(world, "shares", lambda content: content[:32] + empty))
        with pytest.raises(
            Abandoned, match=r"Party 10 .* has 1 share of a secret opened, and it takes 3: .* stays closed"
        ):
            world.run()
        assert world.collector.faults == {10: "The shares that it gave to others do not open its secret."}

    def test_shares_that_do_not_fit_together(self) -> None:
        """They can be unsealed, and are not those of its secret."""
        world = World(6)
        world.to("shares")
        sender, listing = world.parties[10], world.collector._listing
        secrets = sender._secrets(sender._seed or b"")

        def wrong(content: bytes) -> bytes:
            boxes = []
            for number in listing.graph.neighbours(10):
                key = derive(sender._agree(secrets, listing, "seal", number), world.terms.digest, "shares", 10, number)
                plain = 2 * number.to_bytes(33, "little")
                boxes.append((number, ChaCha20Poly1305(key).encrypt(bytes(12), plain, None)))
            return content[:32] + SEALED.pack_all(boxes)

        world.exchange(changed=liar(world, "shares", wrong))
        with pytest.raises(Abandoned, match="The shares of party 10 do not fit together"):
            world.run()
        assert world.collector.faults == {10: "The shares that it gave to others do not open its secret."}

    @pytest.mark.parametrize("withheld", [(10,), (10, 11), (10, 11, 12, 13, 14, 15)])
    def test_holders_of_shares_discredit_nobody(self, withheld: tuple[int, ...]) -> None:
        """One of those who must open keeps shares of others to itself."""
        world = World(6)
        world.to("survivors")
        world.exchange(lambda number: number in (14, 15))
        asked = world.ask()

        def opened(number: int) -> bytes:
            given = world.answer(number, asked)
            if number != 13:
                return given
            rows = OPENED.unpack(given[9:-96], "shares")
            return resign(world, "open", number, OPENED.pack_all(row for row in rows if row[0] not in withheld))

        with pytest.raises(Abandoned, match=r"Party 10 .* has 3 shares of a secret opened, and it takes 4"):
            world.collector.take([(number, opened(number)) for number in asked.own])
        assert not world.collector.faults

    def test_a_few_shares_that_cannot_be_opened(self) -> None:
        """The others' shares do."""
        world = World(6)
        world.to("shares")

        def spoil(content: bytes) -> bytes:
            rows = SEALED.unpack(content[32:], "sealed shares")
            return content[:32] + SEALED.pack_all([(rows[0][0], bytes(82)), *rows[1:]])

        world.exchange(changed=liar(world, "shares", spoil))
        found = world.run()
        assert found.numbers.tolist() == world.sum(world.parties)

    def test_shares_too_large_do_not_discredit_who_holds_them(self) -> None:
        world = World(6)
        world.to("shares")
        sender, listing = world.parties[10], world.collector._listing
        secrets = sender._secrets(sender._seed or b"")
        agreed = sender._agree(secrets, listing, "seal", 11)
        key = derive(agreed, world.terms.digest, "shares", 10, 11)
        box = ChaCha20Poly1305(key).encrypt(bytes(12), b"\xff" * 66, None)
        spoilt = SEALED.pack(11, box)
        world.exchange(changed=liar(world, "shares", lambda given: given[:32] + spoilt + given[32 + SEALED.size :]))
        found = world.run()
        assert not world.collector.faults
        assert found.numbers.tolist() == world.sum(world.parties)

    def test_wrong_shares_at_the_end(self) -> None:
        """Two of nine open wrong shares of everyone. Seven are left, six are enough: the sum is right."""
        world = World(9)
        world.to("masked")
        world.exchange(lambda number: number == 18)
        world.to("open")

        def wrong(number: int, given: bytes) -> bytes:
            if number not in (10, 13):
                return given
            rows = OPENED.unpack(given[9:-96], "shares")
            content = OPENED.pack_all((owner, kind, (1).to_bytes(33, "little")) for owner, kind, _ in rows)
            return resign(world, "open", number, content)

        world.exchange(changed=wrong)
        assert world.collector.result is not None
        assert world.collector.result.numbers.tolist() == world.sum(range(10, 18))

    def test_wrong_shares_where_there_are_no_more(self) -> None:
        world = World(4)
        world.to("open")
        answers = {number: world.answer(number, world.ask()) for number in (10, 11, 12)}
        rows = OPENED.unpack(answers[10][9:-96], "shares")
        lie = OPENED.pack_all((owner, kind, (1).to_bytes(33, "little")) for owner, kind, _ in rows)
        with pytest.raises(Abandoned, match="The shares of party 10 do not fit together: the sum stays closed"):
            world.collector.take([*list(answers.items())[1:], (10, resign(world, "open", 10, lie))])
        assert world.collector.result is None
        assert (1 << 256) < shamir.PRIME < (1 << 257)

    def test_a_vector_of_another_length_never_leaves(self) -> None:
        world = World(4)
        world.vectors[10] = world.vectors[10][:-1]
        with pytest.raises(HomebodyError, match="A vector of 4 numbers does not fit a secure sum of 5"):
            world.answer(10, world.to("masked"))

    @pytest.mark.parametrize("roster", [{1: b"x" * 49}, {1: b"x" * 49, 2: b"x" * 49, 3: b"y" * 49}])
    def test_a_roster_of_another_size(self, roster: dict[int, bytes]) -> None:
        from homebody.federation.secure_sum.collector import Collector

        with pytest.raises(HomebodyError, match="among 3 parties needs as many different devices"):
            Collector(World(3).terms, roster)

"""A secure sum gives the sum of the survivors' vectors, bit for bit, or nothing."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federation.secure_sum.world import World, device_key

from homebody.errors import Abandoned, HomebodyError
from homebody.federation.secure_sum import graph, shamir
from homebody.federation.secure_sum.collector import Collector
from homebody.federation.secure_sum.masks import MaskedSum, agree, derive, public_half, round_key
from homebody.federation.secure_sum.messages import EXCHANGES, OPENED, Terms, commitment, traffic
from homebody.federation.secure_sum.party import Party, _Secrets
from homebody.privacy.ring import Ring


class TestShares:
    def test_the_prime_is_one(self) -> None:
        assert all(pow(base, shamir.PRIME - 1, shamir.PRIME) == 1 for base in (2, 3, 5, 7, 11))
        assert shamir.PRIME.bit_length() == 257

    @settings(max_examples=25)
    @given(st.binary(min_size=32, max_size=32), st.data())
    def test_any_choice_of_enough_shares_gives_the_secret_back(self, secret: bytes, data: st.DataObject) -> None:
        threshold = data.draw(st.integers(1, 9))
        random = shamir.coefficients(data.draw(st.binary(min_size=48 * (threshold - 1), max_size=48 * (threshold - 1))))
        shares = dict(zip(range(1, 13), shamir.split(secret, random, range(1, 13)), strict=True))
        points = data.draw(st.permutations(sorted(shares)))[:threshold]
        assert shamir.combine({point: shares[point] for point in points}) == secret

    def test_one_share_too_few_fits_every_secret(self) -> None:
        """Whatever the secret is, there is a last share with which it comes out: the others do not narrow it down."""
        secret, random = b"a" * 32, shamir.coefficients(hashlib.shake_256(b"any").digest(48 * 3))
        known = dict(zip((1, 2, 3), shamir.split(secret, random, (1, 2, 3)), strict=True))
        for other in (b"a" * 32, b"b" * 32, bytes(32)):
            # The polynomial through the known shares and (0, other), at 4, by Lagrange.
            points, values = [0, 1, 2, 3], [int.from_bytes(other, "little"), *known.values()]
            fourth = 0
            for point, value in zip(points, values, strict=True):
                above = below = 1
                for another in points:
                    if another != point:
                        above, below = above * (4 - another), below * (point - another)
                fourth += value * above * pow(below, -1, shamir.PRIME)
            assert shamir.combine({**known, 4: fourth % shamir.PRIME}) == other


class TestMasks:
    @pytest.mark.parametrize("width", range(1, 9))
    def test_masks_come_off_again_in_any_ring(self, width: int) -> None:
        ring, numbers = Ring(width, 1.0), np.arange(7, dtype=np.uint64) ** 15 & Ring(width, 1.0).mask
        total = MaskedSum(7, width)
        total.add_packed(ring.pack(numbers))
        total.add(b"k" * 32)
        masked = total.numbers()
        assert not np.array_equal(masked, numbers)
        assert ring.unpack(total.packed()).tolist() == masked.tolist()
        total.subtract(b"k" * 32)
        assert total.numbers().tolist() == numbers.tolist()

    def test_keys_differ_by_attempt_purpose_and_direction(self) -> None:
        keys = {
            derive(b"s" * 32, attempt, purpose, sender, receiver)
            for attempt in (b"1" * 32, b"2" * 32)
            for purpose in ("mask", "shares")
            for sender, receiver in ((1, 2), (2, 1))
        }
        assert len(keys) == 8


class TestGraph:
    def test_published_designs(self) -> None:
        found = graph.design(1000, staying=667, colluding=100)
        assert (found.degree, found.threshold, found.complete) == (96, 37, False)
        assert found.privacy <= 2**-40
        assert found.failure <= 2**-20

    @pytest.mark.parametrize("degree", [20, 94])
    def test_fewer_neighbours_do_not_do(self, degree: int) -> None:
        for threshold in range(1, degree + 1):
            privacy, failure = graph.odds(1000, 667, 100, degree, threshold)
            assert privacy > graph.PRIVACY or failure > graph.FAILURE

    def test_tails_are_those_of_all_neighbourhoods(self) -> None:
        """2 of 5 others are marked, and a party has 2 neighbours: 10 choices, 1 of both, 3 of none."""
        assert [str(tail) for tail in graph._tail(6, 2, 2)] == ["1", "7/10", "1/10", "0"]

    def test_neighbours_are_mutual_and_as_many_as_said(self) -> None:
        found = graph.Graph(range(5, 205), graph.design(200, 134, 20), b"seed")
        for number in range(5, 205):
            neighbours = found.neighbours(number)
            assert len(set(neighbours) - {number}) == found.design.degree
            assert all(number in found.neighbours(other) for other in neighbours)
        other = graph.Graph(range(5, 205), graph.design(200, 134, 20), b"another seed")
        assert other.neighbours(5) != found.neighbours(5)

    def test_more_must_stay_than_collude(self) -> None:
        with pytest.raises(HomebodyError, match="let more stay than collude"):
            graph.design(200, staying=20, colluding=20)


class TestTerms:
    @pytest.mark.parametrize(
        ("changed", "why"),
        [
            ({"least": 0.55}, "let least be above 0.55"),
            ({"least": 0.55 + 1e-12}, "raise least, or lower colluding"),
            ({"parties": 0}, "1 to 1,048,576 parties, not 0"),
            ({"width": 9}, "bytes in a number, not 9"),
            ({"attempt": ""}, "names of 1 to 200 bytes"),
        ],
    )
    def test_refused(self, changed: dict[str, object], why: str) -> None:
        usual: dict[str, object] = {"run": "r", "attempt": "1", "parties": 100, "entries": 3, "width": 4}
        with pytest.raises(HomebodyError, match=why):
            Terms(**{**usual, **changed})  # type: ignore[arg-type]


class TestSum:
    def test_everyone_answers(self) -> None:
        world = World(4)
        found = world.run()
        assert found.survivors == tuple(world.parties)
        assert found.numbers.tolist() == world.sum(world.parties)

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_a_third_is_lost_in_one_exchange(self, exchange: str) -> None:
        world = World(12)
        lost = {10, 13, 14, 21}
        found = world.run({exchange: lost})  # type: ignore[dict-item]
        late = exchange in ("survivors", "open")  # their vectors are there
        assert found.survivors == tuple(number for number in world.parties if late or number not in lost)
        assert found.numbers.tolist() == world.sum(found.survivors)

    @pytest.mark.parametrize("exchange", EXCHANGES)
    def test_one_more_and_nothing_opens(self, exchange: str) -> None:
        world = World(12)
        with pytest.raises(
            Abandoned, match=rf"^7 parties of 12 answered '{exchange}' .* and 8 must: nothing was opened"
        ):
            world.run({exchange: {10, 13, 14, 21, 12}})  # type: ignore[dict-item]
        assert world.collector.result is None

    def test_a_hundred_parties_lose_a_third_over_all_exchanges_and_not_one_more(self) -> None:
        world = World(100)
        numbers = list(world.parties)
        lost = {exchange: set(numbers[place : 33 : len(EXCHANGES)]) for place, exchange in enumerate(EXCHANGES)}
        gone: set[int] = set()
        for exchange in EXCHANGES[:-1]:
            gone |= lost[exchange]
            world.exchange(gone.__contains__)
        before, states = world.collector.state(), {number: party.state() for number, party in world.parties.items()}
        found = world.run({"open": set(numbers[:33])})
        assert len(found.survivors) == 100 - sum(map(len, list(lost.values())[:3]))
        assert found.numbers.tolist() == world.sum(found.survivors)
        world.collector = Collector.of_state(before)
        world.parties = {number: Party.of_state(state, device_key(number)) for number, state in states.items()}
        with pytest.raises(Abandoned, match=r"^66 parties of 100 answered 'open' .*: nothing was opened"):
            world.run({"open": set(numbers[:34])})
        assert world.collector.result is None

    def test_sparse(self) -> None:
        world = World(150, entries=3, width=4)
        lost = {"shares": set(range(10, 20)), "masked": set(range(20, 45)), "open": set(range(45, 60))}
        found = world.run(lost)  # type: ignore[arg-type]
        design = world.collector._listing.graph.design
        assert (design.complete, design.degree, design.threshold) == (False, 48, 16)
        assert found.survivors == tuple(range(45, 160))
        assert found.numbers.tolist() == world.sum(found.survivors)

    def test_vectors_of_a_channel(self) -> None:
        """Skellam noise and updates of several people a party go through as the channel encodes them."""
        import torch

        from homebody.privacy import Channel, Clip, SecureSum, Skellam
        from homebody.rng import Rng

        channel = Channel(Clip(1.0), Skellam(z=1), SecureSum()).among(4)
        ring = channel.ring(entries=6, people=8)
        world = World(4, entries=6, width=ring.width, least=channel.facts.sum.shares[0])  # type: ignore[union-attr]
        people = [{"w": torch.full((2, 3), 0.1)}, {"w": torch.full((2, 3), -0.3)}]
        world.vectors = {number: channel.party(people, ring, Rng.of(number)) for number in world.parties}
        added = np.zeros(6, dtype=np.uint64)
        for vector in world.vectors.values():
            added = ring.add(added, vector)
        assert world.run().numbers.tolist() == added.tolist()


class TestStored:
    """Killed between any two steps, everyone goes on, and says the same bytes again."""

    def test_state_saved_and_restored_in_every_exchange(self) -> None:
        world = World(7)
        world.restart = True
        found = world.run({"masked": {10, 11}})
        assert found.numbers.tolist() == world.sum(range(12, 17))

    def test_sparse_and_bytes_are_as_stated(self) -> None:
        world = World(130, entries=2)
        world.restart = True
        found = world.run({"open": set(range(20, 60))})
        assert found.numbers.tolist() == world.sum(world.parties)
        degree = world.collector._listing.graph.design.degree
        assert degree == 42
        for exchange, (sent, received) in traffic(world.terms, degree).items():
            assert len(world.answers[exchange][10]) == sent
            assert len(world.asked[exchange].question(10)) == received

    def test_secrets_are_forgotten_after_the_round(self) -> None:
        world = World(4)
        party = world.parties[10]
        seed = party._seed
        assert seed is not None
        assert seed in party.state()
        asked = world.to("open")
        opened = world.answer(10, asked)
        assert seed not in party.state()
        assert party._seed is None
        assert not party._agreed
        assert world.asked["shares"].question(10) not in party.state()
        again = Party.of_state(party.state(), device_key(10))
        assert again.answer("open", asked.question(10)) == opened

    def test_forgotten_before_the_end(self) -> None:
        world = World(4)
        asked = world.to("masked")
        world.parties[10].forget()
        with pytest.raises(HomebodyError, match="has forgotten the secrets of this attempt: begin another"):
            world.answer(10, asked)

    def test_a_state_is_for_its_device(self) -> None:
        state = World(4).parties[10].state()
        with pytest.raises(HomebodyError, match="another device's"):
            Party.of_state(state, device_key(11))

    def test_an_opened_sum_has_no_state(self) -> None:
        world = World(4)
        world.run()
        with pytest.raises(HomebodyError, match="store its result"):
            world.collector.state()

    @settings(max_examples=60)
    @given(st.data())
    def test_changed_states_are_refused_in_a_sentence(self, data: st.DataObject) -> None:
        world = World(3)
        world.exchange()
        for state, read in (
            (world.parties[10].state(), lambda text: Party.of_state(text, device_key(10))),
            (world.collector.state(), Collector.of_state),
        ):
            cut = data.draw(st.integers(0, len(state) - 1))
            with pytest.raises(HomebodyError, match=r"\.$"):
                read(state[:cut])
            with pytest.raises(HomebodyError, match=r"\.$"):
                read(state + b"x")
            changed = bytearray(state)
            changed[cut] ^= data.draw(st.integers(1, 255))
            with suppress(HomebodyError):  # what it holds may be changed without a sign, and nothing else is raised
                read(bytes(changed))


@lru_cache(maxsize=1)
def seen() -> World:
    """A round of nine, of whom two are lost before their vectors come, and one after it."""
    world = World(9)
    world.run({"masked": {10, 11}, "open": {12}})
    return world


def secrets_of(number: int) -> _Secrets:
    party = World(9).parties[number]
    assert party._seed is not None
    return party._secrets(party._seed)


class TestWhatTheServerSees:
    def test_one_secret_of_each_party_and_never_both(self) -> None:
        kinds: dict[int, set[int]] = {}
        for message in seen().answers["open"].values():
            for owner, kind, _ in OPENED.unpack(message[9:-96], "shares"):
                kinds.setdefault(owner, set()).add(kind[0])
        assert kinds == {number: {0} if number in (10, 11) else {1} for number in seen().parties}

    def test_all_that_is_opened_leaves_a_vector_masked(self) -> None:
        """Its own mask and those with the lost come off. The masks with other survivors stay."""
        for number, message in seen().answers["masked"].items():
            own, terms = secrets_of(number), seen().terms
            assert commitment(terms.digest, number, own.own_seed) == seen().collector._known.commitments[number]
            total = MaskedSum(terms.entries, terms.width)
            total.add_packed(message[9:-96])
            total.subtract(derive(own.own_seed, terms.digest, "own mask", number, number))
            for other in seen().parties:
                if other == number:
                    continue
                agreed = agree(round_key(secrets_of(other).mask), public_half(own.mask))
                assert agreed is not None
                if other == 12:  # the first whose secret nobody opens
                    assert total.numbers().tolist() != seen().vectors[number].tolist()
                low, high = min(number, other), max(number, other)
                key = derive(agreed, terms.digest, "mask", low, high)
                (total.subtract if number == low else total.add)(key)
            assert total.numbers().tolist() == seen().vectors[number].tolist()

    def test_no_message_holds_a_secret(self) -> None:
        sent = b"".join(b"".join(answers.values()) for answers in seen().answers.values())
        assert len(sent) > 9 * 1000
        for number in seen().parties:
            assert not any(secret in sent for secret in secrets_of(number))

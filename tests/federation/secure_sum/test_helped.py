"""A sum that a helper opens: bit for bit the sum of the vectors, and the noise; one set an epoch; no lies."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings as sodium

from homebody.errors import Abandoned, HomebodyError
from homebody.federation.envelopes import epoch_keys, signing_keys
from homebody.federation.secure_sum.helped import (
    DIGEST_BYTES,
    ROW_BYTES,
    HelpedSum,
    HelpedTerms,
    Helper,
    HelperEpoch,
    SetRefused,
    draw_noise,
    sign_message,
)
from homebody.federation.secure_sum.messages import BadMessage
from homebody.federation.secure_sum.requests import BadRequest, open_request, sign_request
from homebody.privacy.ring import Numbers, Ring


@dataclass
class World:
    """Some devices, a helper and a server. depth: of the noise, −1 for none."""

    parties: int
    entries: int = 5
    width: int = 4
    depth: int = -1
    least: float = 2 / 3

    def __post_init__(self) -> None:
        terms = HelpedTerms("run", "round 1", self.parties, self.entries, self.width, self.depth, self.least)
        public, self.secret = epoch_keys()
        self.epoch = HelperEpoch(os.urandom(16), public, terms, closes=2e9)
        self.keys = [signing_keys() for _ in range(self.parties)]
        self.vectors = np.random.default_rng(self.parties).integers(
            0, 1 << 8 * self.width, size=(self.parties, self.entries), dtype=np.uint64
        )

    def helper(self, **rest: object) -> Helper:
        known = {public for public, _ in self.keys}
        return Helper(self.epoch, self.secret, known.__contains__, **rest)  # type: ignore[arg-type]

    def message(self, number: int, epoch: HelperEpoch | None = None) -> bytes:
        return sign_message(epoch or self.epoch, self.vectors[number], self.keys[number][1])

    def collected(self, numbers: object) -> HelpedSum:
        total = HelpedSum(self.epoch)
        for number in numbers:  # type: ignore[attr-defined]
            assert total.take(number, self.message(number))
        return total

    def right(self, numbers: list[int]) -> Numbers:
        return np.sum(self.vectors[numbers], axis=0) & Ring(self.width, 1.0).mask


@pytest.mark.parametrize(("parties", "width"), [*((3, width) for width in range(1, 9)), (100, 3), (100, 4)])
def test_the_sum_is_right_bit_for_bit_though_a_third_is_lost(parties: int, width: int) -> None:
    world = World(parties, width=width)
    for lost in (0, parties - world.epoch.terms.quorum):
        left = list(range(lost, parties))
        total = world.collected(left)
        assert total.opened(world.helper().open(total.request())).tolist() == world.right(left).tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(3, 9), st.integers(1, 8), st.integers(1, 40), st.data())
def test_any_ring_and_any_set(parties: int, width: int, entries: int, data: st.DataObject) -> None:
    world = World(parties, entries=entries, width=width, least=0.1)
    left = sorted(data.draw(st.sets(st.integers(0, parties - 1), min_size=3)))
    total = world.collected(reversed(left))
    assert total.opened(world.helper().open(total.request())).tolist() == world.right(left).tolist()


def test_the_helper_adds_all_of_the_noise() -> None:
    """20,000 numbers: the deviation is within 5 standard errors of 2⁹; what was drawn is exactly what is in the sum."""
    world = World(4, entries=20_000, depth=9)
    drawn: list[npt.NDArray[np.int64]] = []

    def draw(depth: int, entries: int) -> npt.NDArray[np.int64]:
        drawn.append(draw_noise(depth, entries))
        return drawn[-1]

    total = world.collected(range(4))
    moved = total.opened(world.helper(draw=draw).open(total.request())) - world.right([0, 1, 2, 3])
    noise = (moved & np.uint64(2**32 - 1)).astype(np.uint32).view(np.int32)
    assert noise.tolist() == (-drawn[0]).tolist()
    assert float(noise.std()) == pytest.approx(2**9, rel=5 / math.sqrt(40_000))


def test_neither_side_sees_a_vector() -> None:
    """The same vector twice gives masked ones that have nothing in common, and the helper's answer no vector at all."""
    world = World(3, entries=1000)
    world.vectors[:] = 0
    first, second = (np.frombuffer(world.message(0)[-4000:], dtype="<u4") for _ in range(2))
    assert len(set(first.tolist()) & set(second.tolist())) < 5
    assert len(set(first.tolist())) > 990
    shared = world.collected(range(3)).request()
    assert len(shared) == 3 * ROW_BYTES
    public = world.keys[0][0]
    assert public not in shared  # nor does the server learn by which key the helper knows a device


class TestOneSet:
    """That an epoch opens one set, and answers the same again, is the proxy's to keep: tests/federation/proxy."""

    def test_whoever_opens_a_set_again_draws_the_noise_again(self) -> None:
        """So the answer is stored before it is given: of two the server would know the noise's difference."""
        world = World(5, depth=9)
        total = world.collected(range(5))
        assert world.helper().open(total.request()) != world.helper().open(total.request())


class TestLies:
    def test_too_few_and_too_many(self) -> None:
        world = World(6, least=0.9)
        assert world.epoch.terms.quorum == 6
        with pytest.raises(SetRefused, match="has 5 messages: of 6 devices, 6 at least must be in it"):
            world.helper().open(world.collected(range(5)).request())
        with pytest.raises(SetRefused, match="whole number of rows"):
            world.helper().open(world.collected(range(6)).request()[:-1])
        small = World(2)
        with pytest.raises(SetRefused, match="3 at least"):
            small.helper().open(small.collected(range(2)).request())
        few = World(4)
        few.epoch = replace(few.epoch, terms=replace(few.epoch.terms, parties=3))
        with pytest.raises(SetRefused, match="has 4 messages"):
            few.helper().open(few.collected(range(4)).request())

    def refused(self, world: World, request: bytes, places: dict[int, str]) -> None:
        with pytest.raises(SetRefused, match="cannot be opened") as caught:
            world.helper().open(request)
        assert caught.value.faulty.keys() == places.keys()
        for place, words in places.items():
            assert words in caught.value.faulty[place]

    def rows(self, request: bytes) -> list[bytes]:
        return [request[at : at + ROW_BYTES] for at in range(0, len(request), ROW_BYTES)]

    def test_swapped_seeds(self) -> None:
        world = World(4)
        rows = self.rows(world.collected(range(4)).request())
        swapped = [
            rows[0][:DIGEST_BYTES] + rows[1][DIGEST_BYTES:],
            rows[1][:DIGEST_BYTES] + rows[0][DIGEST_BYTES:],
            *rows[2:],
        ]
        self.refused(world, b"".join(swapped), dict.fromkeys((0, 1), "signature does not hold"))

    def test_a_vector_that_was_changed(self) -> None:
        world = World(4)
        rows = self.rows(world.collected(range(4)).request())
        rows[2] = hashlib.sha256(b"other").digest() + rows[2][DIGEST_BYTES:]
        self.refused(world, b"".join(rows), {2: "signature does not hold"})

    def test_a_device_twice(self) -> None:
        world = World(4)
        rows = self.rows(world.collected(range(4)).request())
        again = world.collected([1]).request()
        self.refused(world, b"".join([*rows[:3], rows[0]]), {3: "two messages in the set"})
        self.refused(world, b"".join([*rows[:3], again]), {3: "two messages in the set"})

    def test_devices_that_the_server_invents(self) -> None:
        world = World(4)
        rows = self.rows(world.collected(range(3)).request())
        message = sign_message(world.epoch, world.vectors[0], signing_keys()[1])
        other = HelpedSum(world.epoch)
        assert other.take(0, message)
        self.refused(world, b"".join([*rows, other.request()]), {3: "does not know the device"})

    @pytest.mark.parametrize(
        "change",
        [
            lambda epoch: replace(epoch, id=bytes(16)),
            lambda epoch: replace(epoch, terms=replace(epoch.terms, depth=2)),
            lambda epoch: replace(epoch, terms=replace(epoch.terms, attempt="round 1#2")),
            lambda epoch: replace(epoch, terms=replace(epoch.terms, parties=5)),
            lambda epoch: replace(epoch, terms=replace(epoch.terms, least=0.5)),
        ],
        ids=["epoch", "less noise", "attempt", "parties", "least"],
    )
    def test_what_was_signed_for_another_sum(self, change: Callable[[HelperEpoch], HelperEpoch]) -> None:
        """The same key, so that only the signature tells."""
        world = World(4, depth=9)
        rows = self.rows(world.collected(range(4)).request())
        other = HelpedSum(change(world.epoch))
        assert other.take(3, world.message(3, change(world.epoch)))
        self.refused(world, b"".join([*rows[:3], other.request()]), {3: "signature does not hold"})

    def test_what_was_sealed_to_another_key(self) -> None:
        world = World(4)
        rows = self.rows(world.collected(range(4)).request())
        other = HelpedSum(replace(world.epoch, key=epoch_keys()[0]))
        assert other.take(0, world.message(0, other.epoch))
        self.refused(world, b"".join([other.request(), *rows[1:]]), {0: "not sealed to the key of this epoch"})

    def test_a_box_that_another_device_copies_gives_another_mask(self) -> None:
        """A device on the server's side signs the seed of somebody else as its own. Could it do so with their mask, the
        set would have that mask twice, and their vector twice behind noise for one."""
        world = World(4)
        total = world.collected(range(4))
        rows = self.rows(total.request())
        opened = sodium.crypto_box_seal_open(rows[0][DIGEST_BYTES:], world.epoch.key, world.secret)
        seed, (public, secret) = opened[:32], world.keys[3]
        digest = hashlib.sha256(b"anything").digest()
        statement = b"".join(
            [
                b"homebody helped sum 1, signed\0",
                world.epoch.terms.digest,
                world.epoch.id,
                hashlib.sha256(seed).digest(),
                digest,
            ]
        )
        signature = sodium.crypto_sign(statement, secret)[:64]
        forged = digest + sodium.crypto_box_seal(seed + public + signature, world.epoch.key)
        ring, both = world.epoch.terms.ring, (rows[1], forged)
        sums = [ring.unpack(world.helper().open(b"".join([rows[0], rows[2], last]))) for last in both]
        # In the second sum the forged row's mask stands in the place of device 1's.
        copied = ring.add(ring.subtract(sums[1], sums[0]), self.mask_of(world, rows, 1))
        assert copied.tolist() != self.mask_of(world, rows, 0).tolist()

    def mask_of(self, world: World, rows: list[bytes], place: int) -> Numbers:
        both = (rows, [row for at, row in enumerate(rows) if at != place])
        sums = [world.epoch.terms.ring.unpack(world.helper().open(b"".join(some))) for some in both]
        return world.epoch.terms.ring.subtract(sums[0], sums[1])


class TestServer:
    def test_malformed_messages_count_as_lost(self) -> None:
        world = World(4)
        total, good = world.collected(range(3)), world.message(3)
        other = world.message(3, replace(world.epoch, id=bytes(16)))
        for message, words in (
            (good[:-1], "bytes, and this is not one"),
            (b"X" + good[1:], "not one"),
            (other, "epoch"),
        ):
            assert not total.take(3, message)
            assert words in total.faults[3]
        assert total.senders == (0, 1, 2)

    def test_what_the_helper_refuses_is_left_out_and_the_rest_opened(self) -> None:
        world = World(5)
        total = world.collected(range(4))
        assert total.take(4, sign_message(world.epoch, world.vectors[4], signing_keys()[1]))
        with pytest.raises(SetRefused) as caught:
            world.helper().open(total.request())
        total.leave_out({**caught.value.faulty, 99: "nobody"})
        assert total.senders == (0, 1, 2, 3)
        assert "does not know the device" in total.faults[4]
        assert total.opened(world.helper().open(total.request())).tolist() == world.right([0, 1, 2, 3]).tolist()

    def test_an_answer_of_another_length(self) -> None:
        world = World(3)
        with pytest.raises(BadMessage, match="answer has 19 bytes, not 20"):
            world.collected(range(3)).opened(bytes(19))


class TestDescriptions:
    def test_they_are_read_back_and_checked(self) -> None:
        epoch = World(3, depth=9).epoch
        said = epoch.to_json()
        assert HelperEpoch.read({**said, "more": 1}) == epoch
        assert epoch.agrees(replace(epoch, closes=1.0))
        assert not epoch.agrees(replace(epoch, key=bytes(32)))
        wrong: tuple[dict[str, object], ...] = (
            {"epoch": "00"},
            {"key": 5},
            {"terms": "zz"},
            {"terms": "00"},
            {"terms": said["terms"][:-2]},
            {"terms": said["terms"] + "00"},
            {"closes": math.nan},
            {"closes": True},
            {"closes": -1},
        )
        for fields in wrong:
            with pytest.raises(BadMessage):
                HelperEpoch.read({**said, **fields})
        with pytest.raises(BadMessage):
            HelperEpoch.read([])

    def test_terms_that_make_no_sum_are_refused(self) -> None:
        terms = World(3).epoch.terms
        for fields in (
            {"run": ""},
            {"attempt": "a" * 201},
            {"parties": 0},
            {"entries": 0},
            {"entries": 1 << 31},
            {"width": 9},
            {"depth": -2},
            {"depth": 31},
            {"least": 0.0},
            {"least": 1.5},
        ):
            with pytest.raises(HomebodyError):
                replace(terms, **fields)  # type: ignore[arg-type]

    def test_a_vector_of_another_length_is_not_signed(self) -> None:
        world = World(3)
        with pytest.raises(HomebodyError, match="has 5 numbers, not 4"):
            sign_message(world.epoch, world.vectors[0][:4], world.keys[0][1])


class TestFuzz:
    """Whatever a stranger sends is read, or refused in a sentence."""

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=300), st.sampled_from([b"", b"HBH1", b"HBQ1", b"HBL1"]))
    def test_bytes(self, body: bytes, magic: bytes) -> None:
        world = World(3)
        for read in (
            HelpedTerms.decode,
            HelpedSum.of_state,
            lambda body: open_request(body, "set"),
            lambda body: open_request(body, "epoch"),
            world.helper().open,
        ):
            with pytest.raises((HomebodyError, BadRequest)):
                read(magic + body)
        assert not HelpedSum(world.epoch).take(0, magic + body)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, 10_000), st.integers(0, 7), st.sampled_from(["terms", "request", "message"]))
    def test_a_bit_that_is_flipped(self, place: int, bit: int, what: str) -> None:
        world = World(3, depth=9)
        total = world.collected(range(3))
        content = {
            "terms": world.epoch.terms.encode(),
            "request": sign_request("set", world.epoch.id, total.request(), world.keys[0][1]),
            "message": world.message(0),
        }[what]
        changed = bytearray(content)
        changed[place % len(content)] ^= 1 << bit
        if what == "terms":
            with suppress(HomebodyError):
                assert HelpedTerms.decode(bytes(changed)) != world.epoch.terms
        elif what == "request":
            with pytest.raises(BadRequest):
                open_request(bytes(changed), "set")
        else:
            again = HelpedSum(world.epoch)
            if not again.take(0, bytes(changed)):
                return
            for number in (1, 2):
                again.take(number, world.message(number))
            with pytest.raises(SetRefused) as caught:
                world.helper().open(again.request())
            assert caught.value.faulty.keys() == {0}


def test_a_stored_set_is_opened_as_it_was() -> None:
    """A server that was killed knows the set and the sum, and no vector: it cannot leave anybody out."""
    world = World(4)
    total = world.collected(range(4))
    again = HelpedSum.of_state(total.state())
    assert (again.epoch, again.senders, again.request()) == (world.epoch, total.senders, total.request())
    assert again.state() == total.state()
    assert again.opened(world.helper().open(again.request())).tolist() == world.right([0, 1, 2, 3]).tolist()
    with pytest.raises(Abandoned, match="nothing was opened"):
        again.leave_out({0: "any"})

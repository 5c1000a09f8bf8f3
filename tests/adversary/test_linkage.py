"""The linkage attack: it finds what a bad shuffle leaves, and nothing behind a good one."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from homebody.adversary.interactions import area
from homebody.adversary.linkage import (
    Linkage,
    ReportBatch,
    Reported,
    _Content,
    _drawn,
    _Ranked,
    as_they_come,
    linkage,
    reported,
)
from homebody.errors import HomebodyError
from homebody.federation.wire import report_numbers
from homebody.methods.fedmf import FedMF
from homebody.methods.fmf_ldp import FMFLDP
from homebody.privacy import Channel, Clip, OneBit, Shuffle
from homebody.rng import Rng
from homebody.simulation import Simulator

ITEMS, FACTORS, EPSILON = 200, 5, 2.5
Longs = npt.NDArray[np.int64]


def people(count: int, k: int, seed: int) -> list[Longs]:
    """Each has signs of their own, one for each factor, and every entry is that sign: all that content can share."""
    generator = np.random.default_rng(seed)
    signs = generator.choice([-1.0, 1.0], size=(count, FACTORS))
    entries = generator.integers(ITEMS * FACTORS, size=(count, k))
    chance = 0.5 + 0.5 * math.tanh(EPSILON / 2) * np.take_along_axis(signs, entries % FACTORS, axis=1)
    return list(2 * entries + (generator.random((count, k)) < chance))


def others(count: int = 200) -> npt.NDArray[np.float32]:
    signs = np.random.default_rng(99).choice([-1.0, 1.0], size=(count, FACTORS))
    return np.tile(signs, ITEMS).astype(np.float32)


def mixed(messages: list[Longs], seed: int, batch: int = 500, releases: int = 1) -> tuple[list[ReportBatch], Longs]:
    """Through a shuffle that is one: each release is of some devices, mixed, and cut into batches."""
    generator = np.random.default_rng(seed)
    view, whose = [], []
    for part in np.array_split(np.arange(len(messages)), releases):
        said, who = np.concatenate([messages[one] for one in part]), np.repeat(part, len(messages[0]))
        order = generator.permutation(len(said))
        whose.append(who[order])
        view += [ReportBatch(float(len(view)), one) for one in np.array_split(said[order], -(-len(said) // batch))]
    return view, np.concatenate(whose)


def attack(view: list[ReportBatch], truth: Longs, seed: int = 0, pairs: int = 6000) -> Linkage:
    return linkage(view, truth, others(), EPSILON, pairs=pairs, seed=seed)


def test_behind_a_shuffle_order_and_batches_tell_nothing_and_content_a_little() -> None:
    found = attack(*mixed(people(100, 40, 1), 2))
    assert not found.linked
    assert abs(found.difference.value) < 0.01
    # One pair in five is of one factor, and says so in the mean 86 % of the time: 0.5 + 0.2 × (0.86 − 0.5).
    agree = (1 + math.tanh(EPSILON / 2) ** 2) / 2
    assert found.content.value == pytest.approx(0.5 + (agree - 0.5) / FACTORS, abs=0.02)
    assert found.content.low > 0.52
    assert (found.devices, found.reports, found.batches) == (100, 4000, 8)


@pytest.mark.parametrize("together", [1, 10, 100])
def test_without_a_shuffle_they_are_linked(together: int) -> None:
    found = attack(*as_they_come(people(100, 40, 1), together=together))
    assert found.linked
    assert found.everything.value > 0.95
    assert found.content.value < 0.6


@pytest.mark.parametrize(
    "bad",
    ["within messages", "half stays", "windows", "whole messages are mixed", "two releases"],
)
def test_a_shuffle_that_is_none_is_found_out(bad: str) -> None:
    messages = people(100, 40, 1)
    generator = np.random.default_rng(5)
    truth = np.repeat(np.arange(100), 40)
    order = np.arange(4000)
    if bad == "within messages":
        order = order.reshape(100, 40)[:, generator.permutation(40)].ravel()
    elif bad == "half stays":
        moved = generator.permutation(4000)[:2000]
        order[np.sort(moved)] = moved
    elif bad == "windows":
        order = np.concatenate([generator.permutation(part) for part in order.reshape(4, 1000)])
    elif bad == "whole messages are mixed":
        order = order.reshape(100, 40)[generator.permutation(100)].ravel()
    said = np.concatenate(messages)[order]
    view, whose = [ReportBatch(float(n), one) for n, one in enumerate(said.reshape(8, 500))], truth[order]
    if bad == "two releases":  # each well mixed: but a device is in one of them alone
        view, whose = mixed(messages, 5, releases=2)
    found = attack(view, whose)
    assert found.linked, found
    assert found.difference.value > 0.02


@pytest.mark.slow
def test_false_alarms_are_rare() -> None:
    """An interval of 95 % is above 0 in one of 40 views: of 30, five or more have a probability of 0.001."""
    alarms = [attack(*mixed(people(60, 20, seed), seed), seed=seed, pairs=1500).linked for seed in range(30)]
    assert sum(alarms) < 5


def test_the_score_of_content_is_the_likelihood_ratio() -> None:
    """Over two kinds of people, by enumeration."""
    known = np.array([[1.0, 0.5, -1.0], [-1.0, 0.5, 0.0]], dtype=np.float32)
    score, t = _Content(known, EPSILON), math.tanh(EPSILON / 2)

    def chance(bit: int, value: float) -> float:
        return 0.5 + 0.5 * t * value * (2 * bit - 1)

    for one, two in product(range(6), repeat=2):
        first, second = ([chance(said % 2, person[said // 2]) for person in known] for said in (one, two))
        same = np.mean([a * b for a, b in zip(first, second, strict=True)])
        apart = np.mean(first) * np.mean(second)
        found = score(np.array([one]), np.array([two]))
        assert found == pytest.approx([math.log(same / apart)], abs=1e-6)


def test_pairs_are_what_they_say() -> None:
    generator = np.random.default_rng(0)
    truth = generator.permutation(np.repeat([3, 7, 9, 20], [2, 5, 30, 13]))
    places = np.flatnonzero(truth != 9)
    drawn = _drawn(truth, places, 4000, generator)
    assert drawn.same.sum() == 4000
    assert ((truth[drawn.first] == truth[drawn.second]) == drawn.same).all()
    assert (drawn.first != drawn.second).all()
    assert set(truth[drawn.first]) == {3, 7, 20}
    # Pairs of one device as often as there are: 2, 20 and 156 of 178.
    share = np.bincount(truth[drawn.first[drawn.same]], minlength=21)[[3, 7, 20]] / 4000
    assert np.abs(share - np.array([2, 20, 156]) / 178).max() < 4 * math.sqrt(0.25 / 4000)


def test_the_area_counts_pairs_ties_and_weights() -> None:
    generator = np.random.default_rng(3)
    scores, same = generator.integers(6, size=80).astype(float), generator.random(80) < 0.4
    ranked = _Ranked(scores, same)
    assert ranked.area(np.ones(80)) == pytest.approx(area(scores, np.flatnonzero(same)))
    times = generator.integers(4, size=80)
    repeated = np.repeat(np.arange(80), times)
    expected = area(scores[repeated], np.flatnonzero(same[repeated]))
    assert ranked.area(times.astype(float)) == pytest.approx(expected)


def test_reports_are_those_of_the_next_round(simulator: Simulator) -> None:
    """And what others work out is in the order that reports are numbered in, clipped and projected as on devices."""
    method = FMFLDP(decoder="published", init_scale=1.0, uplink=Channel(Clip(30.0), OneBit(2.5, k=7), Shuffle()))
    shared = method.init_shared(simulator.catalogue, Rng.of(1))
    found = reported(method, simulator, shared, users=30, seed=3)
    assert (len(found.messages), found.worked_out.shape, found.epsilon) == (30, (30, 600), 2.5)
    assert np.abs(found.worked_out).max() <= 1
    drawn = np.random.default_rng(int(Rng.of(3, "linkage").fold("users").key) % 2**64).permutation(300)
    rng = Rng.of(3, "linkage").fold("round")
    assert found.messages[4].tolist() == report_numbers(simulator.message(method, shared, int(drawn[4]), rng)).tolist()
    bare = FMFLDP(decoder="published", init_scale=1.0, uplink=Channel())
    whole = simulator.message(bare, shared, int(drawn[30]), rng)["item"]
    scale = min(1.0, 30.0 / float(whole.norm()))
    expected = (whole * scale).clamp(-1, 1).flatten()
    assert torch.allclose(torch.from_numpy(found.worked_out[0]), expected, atol=1e-4)
    half = reported(method, simulator, shared, users=1000)
    assert (len(half.messages), len(half.worked_out)) == (150, 150)


def test_a_real_method_is_linked_by_its_order_alone(simulator: Simulator) -> None:
    method = FMFLDP()
    shared = method.init_shared(simulator.catalogue, Rng.of(1))
    round_: Reported = reported(method, simulator, shared, users=100)
    view, truth = as_they_come(round_.messages)
    open_ = linkage(view, truth, round_.worked_out, round_.epsilon, pairs=4000)
    shuffled = linkage(*mixed(round_.messages, 1), round_.worked_out, round_.epsilon, pairs=4000)
    assert open_.linked
    assert not shuffled.linked
    assert json.loads(json.dumps(open_.as_dict()))["linked"] is True


def test_errors_are_sentences(simulator: Simulator) -> None:
    messages = people(30, 4, 1)
    view, truth = as_they_come(messages)
    with pytest.raises(HomebodyError, match="The view has 120 reports, and the senders of 119 are given"):
        attack(view, truth[:-1])
    with pytest.raises(HomebodyError, match="at least 20 devices that send 2 or more each"):
        attack(*as_they_come(messages[:19]))
    with pytest.raises(HomebodyError, match="at least 20 devices that send 2 or more each"):
        attack(*as_they_come([message[:1] for message in messages]))
    plain, one = FedMF(), FedMF(uplink=Channel(OneBit(1.0)))
    with pytest.raises(HomebodyError, match="Only reports of one bit can be linked"):
        reported(plain, simulator, {})
    with pytest.raises(HomebodyError, match="k must be 2 or more"):
        reported(one, simulator, {})

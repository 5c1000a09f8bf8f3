"""What is shown of one-bit reports is what the code that runs makes of them."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from homebody.adversary.inspection import ClientReports, inspect
from homebody.core import Method
from homebody.federation.wire import report_numbers
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.fmf_ldp import FMFLDP
from homebody.privacy import Channel, Clip, OneBit, Shuffle
from homebody.privacy.reports import sealed_bytes
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import population

PUBLISHED = FMFLDP(decoder="published", uplink=Channel(OneBit(2.5, k=40), Shuffle()))


def shown(method: Method, simulator: Simulator, user: int = 7, seed: int = 0) -> ClientReports:
    found = inspect(method, simulator, user, seed=seed).reports
    assert found is not None
    return found


@pytest.mark.parametrize(
    "method",
    [
        PUBLISHED,
        FMFLDP(),
        FedMF(factors=3, uplink=Channel(OneBit(1.0, k=9))),
        FedIALS(factors=2, uplink=Channel(Clip(3.0), OneBit(1.0, k=60), Shuffle())),
    ],
    ids=["published", "improved", "fedmf", "two tables"],
)
def test_reports_are_those_of_the_run(simulator: Simulator, method: Method) -> None:
    found = shown(method, simulator, seed=4)
    rng = Rng.of(4, "train")
    simulator.begin(method, rng.fold("clients"))
    shared = method.init_shared(simulator.catalogue, rng.fold("shared"))
    sent = report_numbers(simulator.message(method, shared, 7, rng.fold("round", 1)))
    assert [2 * one.entry + one.bit for one in found.reports] == sent.tolist()
    assert [one.plain for one in found.reports] == [bytes(pair).hex() for pair in sent.astype("<u4")[:, None]]
    assert len(found.reports) == found.k
    if found.sealed:
        opened = Counter(2 * entry + bit for entry, bit in found.sealed.server_opened)
        assert opened == Counter(sent.tolist())
    json.dumps(found.as_dict())


def test_values_are_the_gradient_that_the_paper_writes(simulator: Simulator) -> None:
    """f(u, i) = c (p − x·v) x, by hand; and P[1] by the paper's formula."""
    found = shown(PUBLISHED, simulator)
    V = PUBLISHED.init_shared(simulator.catalogue, Rng.of(0, "train").fold("shared"))["item"].double()
    padded = simulator.split.padded(np.array([7]))
    own = padded.items[0][padded.valid[0]]
    r = torch.bincount(torch.from_numpy(own), minlength=120).double()
    c, p = 1 + PUBLISHED.confidence * r, (r > 0).double()
    x = torch.linalg.solve(V.T @ (c[:, None] * V) + PUBLISHED.regularisation * torch.eye(5), V.T @ (c * p))
    f = (c * (p - V @ x))[:, None] * x
    assert found.entries == 600
    e = math.exp(2.5)
    for one in found.reports:
        item, factor = one.place
        assert one.entry == 5 * item + factor
        assert one.value == pytest.approx(float(f[item, factor]), rel=1e-3, abs=1e-5)
        g = min(1.0, max(-1.0, one.value))
        assert one.projected == pytest.approx(g)
        assert one.chance == pytest.approx((g * (e - 1) + e + 1) / (2 * e + 2))
        assert int(one.binary.replace(" ", ""), 2) == 2 * one.entry + one.bit
        assert one.item == str(item)
        assert one.own == bool(r[item] > 0)
    assert {one.own for one in found.reports} == {True, False}


@pytest.mark.slow
def test_bits_are_tossed_with_that_chance(simulator: Simulator) -> None:
    """Of likely bits and of unlikely ones, over 100 people: within 4 standard errors of their chances."""
    reports = [one for user in range(0, 300, 3) for one in shown(FMFLDP(), simulator, user).reports]
    for likely in (True, False):
        some = [one for one in reports if (one.chance > 0.5) == likely]
        assert len(some) > 500
        off = sum(one.bit - one.chance for one in some)
        assert abs(off) < 4 * math.sqrt(sum(one.chance * (1 - one.chance) for one in some))
        assert np.mean([abs(one.chance - 0.5) for one in some]) > 0.3


def test_two_tables_and_a_clip_before(simulator: Simulator) -> None:
    """Entries are numbered over both, in the order of their names; values are those after the clip."""
    clipped = FedIALS(factors=2, uplink=Channel(Clip(0.01), OneBit(1.0, k=400)))
    found = shown(clipped, simulator)
    assert found.entries == 4 + 120 * 5  # gram, and item: a vector and the upper half of its square
    assert {one.table for one in found.reports} == {"gram", "item"}
    for one in found.reports:
        if one.table == "gram":
            assert (one.item, one.entry) == (None, 2 * one.place[0] + one.place[1])
        else:
            assert (one.item, one.entry) == (str(one.place[0]), 4 + 5 * one.place[0] + one.place[1])
    distinct = {one.entry: one.value for one in found.reports}
    assert 0 < math.sqrt(sum(value**2 for value in distinct.values())) <= 0.01
    assert found.sealed is None
    assert found.reports[0].sealed is None


def test_what_a_proxy_has_and_what_the_server_opens(simulator: Simulator) -> None:
    found = shown(PUBLISHED, simulator)
    way = found.sealed
    assert way is not None
    assert (way.report_bytes, way.bytes) == (52, sealed_bytes(40))
    assert way.proxy_opened == 0
    assert len(way.server_opened) == 40
    boxes = [one.sealed for one in found.reports]
    assert len(set(boxes)) == 40  # the same report sealed twice is not the same
    assert all(box is not None and len(bytes.fromhex(box)) == 52 for box in boxes)
    assert [len(bytes.fromhex(text)) for text in (way.epoch, way.number, way.device)] == [16, 16, 32]
    again = shown(PUBLISHED, simulator).sealed
    assert again is not None
    assert {again.epoch, again.number, again.device}.isdisjoint({way.epoch, way.number, way.device})
    assert again.server_opened != way.server_opened  # another order
    assert sorted(again.server_opened) == sorted(way.server_opened)


def test_titles_where_there_are_any() -> None:
    split = population()
    named = replace(
        split.population,
        item_ids=pl.Series([f"i{n}" for n in range(120)]),
        item_names=pl.Series([f"Film {n}" for n in range(120)]),
    )
    found = shown(PUBLISHED, Simulator(replace(split, population=named)))
    assert all((one.item, one.title) == (f"i{one.place[0]}", f"Film {one.place[0]}") for one in found.reports)


def test_without_pynacl_it_says_so(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    import homebody.federation

    monkeypatch.delitem(sys.modules, "homebody.federation.envelopes", raising=False)
    monkeypatch.delattr(homebody.federation, "envelopes", raising=False)
    monkeypatch.setitem(sys.modules, "nacl", None)
    found = shown(PUBLISHED, simulator)
    assert found.sealed is None
    assert "pip install '.[serve]' in Homebody's clone" in found.note
    assert len(found.reports) == 40


def test_other_channels_have_no_reports(simulator: Simulator) -> None:
    assert inspect(FedMF(factors=3), simulator, 0).reports is None

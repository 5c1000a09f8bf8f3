"""Asking for rows: what it costs, what it saves, and that the server is charged for what it is told."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from homebody.core import Batch, Cohort
from homebody.data import Population, load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import (
    Channel,
    Charge,
    Clip,
    Gaussian,
    Laplace,
    LaplaceRelease,
    NonPrivate,
    OneBit,
    SecureSum,
    Shuffle,
)
from homebody.privacy.specs import parse_channel, stage_texts
from homebody.privacy.stages import Stage
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

SOME = Cohort(np.arange(30), "fixed", size=30, population=480)
REST: dict[str, tuple[Stage, ...]] = {
    "nothing": (),
    "clip": (Clip(1.0),),
    "noise on the sum": (Clip(1.0), Gaussian(1.0)),
    "secure sum": (Clip(1.0), SecureSum(), Gaussian(1.0)),
    "noise on the device": (Clip(1.0, order=1), Laplace(1.0)),
    "reports": (OneBit(1.0, k=3),),
    "shuffled reports": (OneBit(1.0, k=3), Shuffle()),
}


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load("synthetic:users=40,items=200,mean=8"))


def told(charge: Charge) -> bool:
    return isinstance(charge.event, NonPrivate) and "asks the server for the rows it trains on" in charge.event.reason


@pytest.mark.parametrize("name", REST)
def test_the_server_is_told_everything_and_the_others_what_the_rest_tells(name: str) -> None:
    rest = Channel(*REST[name]).charges(SOME)
    texts = stage_texts(Channel(*REST[name]))
    for place in range(len(REST[name]) + 1):  # its text may stand anywhere, and stays there
        spelt = [*texts[:place], "ask-rows", *texts[place:]]
        channel = parse_channel(spelt)
        assert channel == Channel(*REST[name], asks_rows=True)
        assert stage_texts(channel) == spelt
        assert channel.asks_rows
        charges = channel.charges(SOME)
        assert [(one.observer, one.unit) for one in charges] == [(one.observer, one.unit) for one in rest]
        assert all(told(one) for one in charges if one.observer == "server")
        if name != "nothing":
            others = [one for one in charges if one.observer != "server"]
            assert others == [one for one in rest if one.observer != "server"]
    assert not Channel(*REST[name]).asks_rows


def test_no_budget_against_the_server_survives_a_request(split: Split) -> None:
    channel = Channel(Clip(0.5, order=1), Laplace(5.0))
    quiet, asking = (
        fit(FedMF(factors=2, uplink=one), Simulator(split), rounds=2, evaluate_every=0).epsilon
        for one in (channel, Channel(*channel.stages, asks_rows=True))
    )
    assert quiet["server"] < 1
    assert asking == {**quiet, "server": float("inf")}


@pytest.mark.parametrize("name", REST)
@pytest.mark.parametrize("kind", [FedMF, PFedRec])
def test_training_gives_the_same_numbers(split: Split, kind: type[FedMF | PFedRec], name: str) -> None:
    whole, asking = (
        fit(kind(factors=3, item_rate=0.1, uplink=uplink), Simulator(split), rounds=2, cohort=20)
        for uplink in (Channel(*REST[name]), Channel(*REST[name], asks_rows=True))
    )
    assert whole.metrics == asking.metrics
    assert all(torch.equal(whole.shared[one], asking.shared[one]) for one in whole.shared)


def test_bytes_by_hand() -> None:
    """Two training items of four, and negatives that touch the other two, all but surely."""
    items = np.array([0, 1, 2, 3], dtype=np.int32)
    split = leave_one_out(Population("toy", np.array([0, 4]), items, n_items=4), how="latest")
    method = PFedRec(factors=2, negatives=20, uplink=Channel(asks_rows=True))
    runtime = Simulator(split)
    runtime.begin(method, Rng.of(0))
    shared = method.init_shared(runtime.catalogue, Rng.of(0))
    got = runtime.collect(method, shared, Cohort(np.array([0]), "all", 1, 1), Rng.of(0), 1)
    assert got.bytes_down == 4 * 2 * 4 + 3 * 4  # four rows, and the score function whole
    assert got.bytes_up == 4 * (4 + 2 * 4) + 4 * 4  # four rows with their numbers, and the request for them


@pytest.mark.parametrize("name", REST)
def test_bytes_count_what_was_asked_for(split: Split, name: str) -> None:
    whole, asking = (PFedRec(factors=3, uplink=Channel(*REST[name], asks_rows=asks)) for asks in (False, True))
    users = np.array([1, 5, 6, 30])
    runtime = Simulator(split)
    rng = Rng.of(3)
    rows = sum(
        len(torch.unique(own[own >= 0]))
        for _, request in runtime.requests(asking, users, rng)
        for own in request["item"]
    )
    bytes_ = []
    for method in (whole, asking):
        runtime.begin(method, Rng.of(0))
        shared = method.init_shared(runtime.catalogue, Rng.of(0))
        got = runtime.collect(method, shared, Cohort(users, "fixed", 4, 40), rng, 1)
        bytes_.append((got.bytes_up, got.bytes_down))
    assert 0 < rows < 4 * 200
    assert bytes_[1] == (bytes_[0][0] + 4 * rows, 4 * 4 * (3 + 1) + rows * 3 * 4)


def test_a_method_that_needs_whole_tables_is_refused() -> None:
    with pytest.raises(HomebodyError, match="FedIALS needs its shared parameters whole and cannot ask for rows"):
        FedIALS(uplink=Channel(asks_rows=True))
    with pytest.raises(HomebodyError, match="cannot ask for rows"):
        replace(FedIALS(), uplink=Channel(Clip(1.0), asks_rows=True))


@dataclass(frozen=True)
class Mistaken(FedMF):
    """Asks for rows of a table that is not shared."""

    def asks(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"items": batch["index"]}


def test_rows_of_a_table_that_is_not_there_are_an_error(split: Split) -> None:
    with pytest.raises(HomebodyError, match="asks for rows of 'items', but what is shared is item"):
        fit(Mistaken(factors=2, uplink=Channel(asks_rows=True)), Simulator(split), rounds=1)


def test_once_is_enough() -> None:
    with pytest.raises(HomebodyError, match="second ask-rows"):
        parse_channel(["ask-rows", "clip:norm=1", "ask-rows"])


def test_as_text() -> None:
    assert parse_channel(["clip:norm=1", "secure-sum", "ask-rows"]) == Channel(Clip(1.0), SecureSum(), asks_rows=True)
    with pytest.raises(HomebodyError, match="no setting of the stage ask-rows 'rows'"):
        parse_channel(["ask-rows:rows=3"])


def test_other_stages_leave_the_requests_as_they_were() -> None:
    channel = parse_channel(["one-bit:epsilon=1,k=2", "ask-rows", "shuffle"])
    assert channel.facts.shuffle is not None
    fewer = channel.with_stages(*channel.stages[:1])
    assert fewer == Channel(OneBit(1.0, k=2), asks_rows=True)
    assert stage_texts(fewer) == ["one-bit:epsilon=1,k=2", "ask-rows"]
    assert channel.before(channel.facts.shuffle) == fewer


@dataclass(frozen=True)
class Stated(FedMF):
    """States what it tells by itself, and to some alone."""

    to: tuple[str, ...] = ("server", "clients", "public")

    def charges(self, cohort: Cohort) -> list[Charge]:
        return [Charge(who, "user", LaplaceRelease(5.0, "replace-one")) for who in self.to]  # type: ignore[arg-type]


@pytest.mark.parametrize("to", [("server", "clients", "public"), ("public",)])
def test_a_method_that_states_its_own_charges_is_charged_for_its_requests_too(to: tuple[str, ...]) -> None:
    cohort = Cohort(np.arange(4), "all", 4, 4)
    quiet, asking = (
        [(one.observer, one.event) for one in method.uplink.with_requests(method.charges(cohort))]
        for method in (Stated(factors=2, to=to, uplink=one) for one in (Channel(), Channel(asks_rows=True)))
    )
    assert quiet == [(who, LaplaceRelease(5.0, "replace-one")) for who in to]
    assert {who for who, event in asking if isinstance(event, NonPrivate)} == {"server"}

"""What the server reads from requests for rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import homebody as hb
from homebody.adversary import interactions
from homebody.adversary.inspection import inspect
from homebody.adversary.interactions import ROUNDS, Always, read_requests
from homebody.core import Batch, Catalogue, Cohort, Tree
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel, Clip, Gaussian, Laplace, OneBit, SecureSum
from homebody.rng import Rng
from homebody.simulation import Simulator

CHANNELS = {
    "alone": Channel(asks_rows=True),
    "secure sum": Channel(Clip(0.5), SecureSum(), Gaussian(z=1), asks_rows=True),
    "one-bit": Channel(OneBit(epsilon=1.0, k=13), asks_rows=True),
    "laplace": Channel(Clip(1.0, order=1), Laplace(b=1), asks_rows=True),
}


def begun(method: FedMF | PFedRec, simulator: Simulator) -> Tree:
    simulator.begin(method, Rng.of(0, "clients"))
    return method.init_shared(simulator.catalogue, Rng.of(0, "shared"))


def test_what_is_asked_every_time_by_counting_one_by_one(simulator: Simulator) -> None:
    method = FedMF(factors=3, negatives=2, uplink=Channel(asks_rows=True))
    shared, rng = begun(method, simulator), Rng.of(5)
    users = simulator.available()[[3, 4, 50, 299]]
    read = read_requests(method, simulator, shared, users, rng, rounds=(1, 3))["item"]
    assert [one.rounds for one in read] == [1, 3]
    for place, user in enumerate(users):
        own = set(simulator.split.training(int(user)).tolist())
        asked = []
        for number in (1, 2, 3):
            ((_, request),) = simulator.requests(method, np.array([user]), rng.fold("round", number))
            asked.append(set(request["item"][0].tolist()) - {-1})
            assert own <= asked[-1]
        for one, kept in zip(read, (asked[0], asked[0] & asked[1] & asked[2]), strict=True):
            assert (one.rows[place], one.own[place], one.items[place]) == (len(kept), len(kept & own), len(own))
    assert read[0].precision < read[1].precision
    assert read[1].recall == 1.0


def test_precision_recall_and_who_is_read_by_hand() -> None:
    found = Always(2, np.array([4, 2, 3]), np.array([2, 2, 3]), np.array([2, 4, 3]))
    assert found.precision == pytest.approx((0.5 + 1 + 1) / 3)
    assert found.recall == pytest.approx((1 + 0.5 + 1) / 3)
    assert found.read == pytest.approx(1 / 3)
    assert found.as_dict()["read"] == found.read


def test_people_are_read_in_parts_alike(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    method = FedMF(factors=3, uplink=Channel(asks_rows=True))
    shared, users = begun(method, simulator), simulator.available()[:50]
    whole = read_requests(method, simulator, shared, users, Rng.of(1))["item"]
    monkeypatch.setattr(interactions, "CELLS", 7 * simulator.catalogue.n_items)
    parts = read_requests(method, simulator, shared, users, Rng.of(1))["item"]
    for one, other in zip(whole, parts, strict=True):
        assert one.rounds == other.rounds
        for name in ("rows", "own", "items"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("kind", [FedMF, PFedRec])
def test_inspect_shows_the_request(simulator: Simulator, kind: type[FedMF | PFedRec], channel: str) -> None:
    method = kind(factors=3, uplink=CHANNELS[channel])
    user = int(simulator.available()[7])
    found = inspect(method, simulator, user, seed=4)
    (request,) = found.requests
    own = len(set(simulator.split.training(user).tolist()))
    assert (request.table, request.own, request.rows_of) == ("item", own, simulator.catalogue.n_items)
    assert own < request.rows <= 5 * own
    assert [line["rounds"] for line in request.always] == list(ROUNDS)
    assert (request.always[0]["rows"], request.always[0]["own"]) == (request.rows, own)
    kept = [line["rows"] for line in request.always]
    assert kept == sorted(kept, reverse=True)
    assert [line["precision"] for line in request.always] == pytest.approx([own / rows for rows in kept])
    assert found.tells[0].startswith(f"The device asks for {request.rows:,} of 120 rows of 'item': {own} are this")
    first = found.parts[0]
    assert (first.name, first.shape, first.dtype) == ("request for item", (request.rows,), "int32")
    assert first.bytes == 4 * request.rows
    assert found.observers["server"].sees.endswith("And before that, which rows this device asks for.")
    assert "asks for" not in found.observers["clients"].sees
    assert "asks the server for the rows" in found.observers["server"].charged[0]
    json.dumps(found.as_dict())
    # Byte by byte what the run counts.
    rng = Rng.of(4, "train")
    simulator.begin(method, rng.fold("clients"))
    shared = method.init_shared(simulator.catalogue, rng.fold("shared"))
    alone = Cohort(np.array([user]), "all", 1, 1)
    assert simulator.collect(method, shared, alone, rng.fold("round", 1), 1).bytes_up == found.bytes


def test_without_the_stage_nothing_is_asked(simulator: Simulator) -> None:
    found = inspect(FedMF(factors=3), simulator, 0)
    assert found.requests == ()
    assert [part.name for part in found.parts] == ["item"]
    assert "asks for" not in found.observers["server"].sees


@dataclass(frozen=True)
class Halves(FedMF):
    """Asks for rows of a table that has no row for each item."""

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {**super().init_shared(catalogue, rng), "half": torch.zeros(catalogue.n_items // 2, 1)}

    def asks(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"half": torch.where(batch["index"] < 0, -1, batch["index"] // 2)}


def test_rows_that_are_no_items_are_counted_and_not_judged(simulator: Simulator) -> None:
    found = inspect(Halves(factors=3, uplink=Channel(asks_rows=True)), simulator, 0)
    (request,) = found.requests
    assert (request.own, request.always, request.rows_of) == (None, (), 60)
    assert found.tells[0].endswith(f"asks for {request.rows} of 60 rows of 'half': the server knows which they are.")


def test_ten_requests_tell_nearly_every_history_of_movielens(real_data: Path) -> None:
    """What docs/auditing.md says of MovieLens-100K."""
    simulator = Simulator(hb.leave_one_out(hb.load("ml-100k", data_dir=str(real_data))))
    method = PFedRec(factors=2, uplink=Channel(asks_rows=True))
    shared = begun(method, simulator)
    read = read_requests(method, simulator, shared, simulator.available(), Rng.of(0, "train"))["item"]
    assert {one.recall for one in read} == {1.0}
    assert [round(one.precision, 2) for one in read] == [0.22, 0.64, 0.85, 0.96, 0.99]
    assert round(read[-1].read, 2) == 0.87

"""What `inspect` shows is what a run sends, to the byte."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
import torch

from homebody.adversary.inspection import inspect
from homebody.core import Cohort, Method, Rows
from homebody.data import Population
from homebody.data.partitions import leave_one_out
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel, Clip, Gaussian, Laplace, OneBit, SecureSum, Shuffle, Skellam
from homebody.privacy.assumptions import ROSTER, assumptions
from homebody.privacy.secure_sum import HELPER, SEMI_HONEST
from homebody.privacy.stages import summable
from homebody.rng import Rng
from homebody.simulation import Simulator

CHANNELS = {
    "plain": Channel(),
    "clip": Channel(Clip(0.5)),
    "noise": Channel(Clip(0.5), Gaussian(z=1)),
    "one-bit": Channel(OneBit(epsilon=1.0, k=13)),
    "shuffle": Channel(OneBit(epsilon=1.0, k=5), Shuffle()),
    "secure-sum": Channel(Clip(0.5), SecureSum()),
    "secure noise": Channel(Clip(0.5), SecureSum(), Gaussian(z=1)),
    "laplace": Channel(Clip(1.0, order=1), Laplace(b=1)),
}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("kind", [FedMF, PFedRec, FedIALS])
def test_bytes_and_numbers_are_those_of_the_first_round(
    simulator: Simulator, kind: type[FedMF | PFedRec | FedIALS], channel: str
) -> None:
    if channel == "laplace":  # each device's own noise, as a plain run draws it
        simulator = Simulator(simulator.split, fused=False)
    method = kind(factors=3, uplink=CHANNELS[channel])
    user = int(simulator.available()[7])
    found = inspect(method, simulator, user, seed=4)
    rng = Rng.of(4, "train")
    simulator.begin(method, rng.fold("clients"))
    shared = method.init_shared(simulator.catalogue, rng.fold("shared"))
    alone = Cohort(np.array([user]), "all", 1, 1)
    got = simulator.collect(method, shared, alone, rng.fold("round", 1), 1)
    assert found.bytes == got.bytes_up
    assert 0 <= sum(part.bytes for part in found.parts) - found.bytes < len(found.parts)
    # The same numbers too: the run's sum over this one client, where nothing is added to it.
    simulator.begin(method, rng.fold("clients"))
    again = simulator.message(method, shared, user, rng.fold("round", 1))
    if channel in ("plain", "clip", "secure-sum", "laplace"):
        for name, value in again.items():
            torch.testing.assert_close(summable(value), got.total.sum[name])
    for part, value in zip(found.parts, again.values(), strict=True):
        assert part.bytes == len(bytes.fromhex(part.hex)) or len(bytes.fromhex(part.hex)) == 24
        assert part.rows_of == (value.size if isinstance(value, Rows) else None)


def test_the_excerpt_is_the_beginning_of_the_message(simulator: Simulator) -> None:
    """Of a plain update: the first row numbers, four bytes each, lowest byte first."""
    method = FedMF(factors=3)
    user = int(simulator.available()[0])
    (part,) = inspect(method, simulator, user).parts
    rng = Rng.of(0, "train")
    simulator.begin(method, rng.fold("clients"))
    shared = method.init_shared(simulator.catalogue, rng.fold("shared"))
    rows = simulator.message(method, shared, user, rng.fold("round", 1))["item"]
    index = rows.index[rows.index >= 0]
    assert list(np.frombuffer(bytes.fromhex(part.hex), dtype="<i4")) == index[:6].tolist()
    assert part.shape == (len(index), 3)
    assert part.rows_of == simulator.catalogue.n_items
    assert part.bytes == len(index) * (4 + 3 * 4)


@pytest.mark.parametrize(
    ("channel", "server", "tells"),
    [
        ("plain", "This message, every number of it, and whose it is.", "names"),
        (
            "noise",
            "This message, every number of it, and whose it is, without the noise, which it adds itself.",
            "names",
        ),
        (
            "secure noise",
            (
                "Only the sum over the 50 people of the round, drawn from 300, without the noise, which it adds "
                "itself, and who they are; not this message."
            ),
            "Behind the secure sum",
        ),
        ("one-bit", "This message of 13 randomised bits, and whose it is.", "drawn without looking"),
        (
            "shuffle",
            "Single randomised reports without a sender, among those of 50 people, if the proxy is honest.",
            "one by one",
        ),
        ("laplace", "This message, with the noise that was added on the device, and whose it is.", None),
    ],
)
def test_who_sees_what(simulator: Simulator, channel: str, server: str, tells: str | None) -> None:
    found = inspect(FedMF(factors=3, uplink=CHANNELS[channel]), simulator, 0, cohort=50)
    assert found.observers["server"].sees == server
    summed = "noised sum" if "noise" in channel else "sum"
    assert f"computed from the {summed} over the 50 people" in found.observers["clients"].sees
    assert found.observers["public"].sees.startswith("The final model alone")
    steps = [line for line in found.tells if line.startswith("Its numbers are whole steps of ")]
    assert bool(steps) == ("noise" in channel)
    others = [line for line in found.tells if line not in steps]
    assert [tells in line for line in others] == [True] if tells else others == []
    json.dumps(found.as_dict())


def test_events_are_those_of_the_planned_cohort(simulator: Simulator) -> None:
    noisy: Method = FedMF(factors=3, uplink=CHANNELS["noise"])
    views = inspect(noisy, simulator, 0, cohort=50).observers
    assert views["server"].charged == (
        "one user: not private: the server adds the noise itself: it sees the sum without it",
    )
    assert "50 of 300 drawn without replacement" in views["public"].charged[0]
    assert "no sampling" in inspect(noisy, simulator, 0).observers["public"].charged[0]
    reports = inspect(FedMF(factors=3, uplink=CHANNELS["one-bit"]), simulator, 0).observers["server"].charged
    assert [event.split(":")[0] for event in reports] == ["one user", "one report"]


def test_one_is_called_as_in_the_data_and_who_sends_nothing_is_refused() -> None:
    """Bea has one interaction, which leaves nothing to hold out but is still learnt from; Cy has none."""
    items = np.array([0, 1, 2, 3, 4, 1], dtype=np.int32)
    ids = pl.Series(["ann", "bea", "cy"])
    split = leave_one_out(Population("three", np.array([0, 5, 6, 6]), items, n_items=6, user_ids=ids))
    simulator = Simulator(split)
    assert inspect(FedMF(factors=2), simulator, 0).user == "ann"
    absent = next(user for user in range(3) if user not in simulator.available())
    with pytest.raises(HomebodyError, match=f"User {ids[absent]} takes no part in training"):
        inspect(FedMF(factors=2), simulator, absent)


@pytest.mark.parametrize(
    ("channel", "cohort", "first", "of"),
    [
        (
            "secure-sum",
            50,
            "The server sees the sum of 34 of 50 parties or more, and never a single vector.",
            "5 of 50",
        ),
        (
            "skellam",
            200,
            "The server sees the sum of 160 of 200 parties or more, and never a single vector.",
            "40 of 200",
        ),
    ],
)
def test_a_secure_sum_says_who_sees_what_and_what_it_rests_on(
    simulator: Simulator, channel: str, cohort: int, first: str, of: str
) -> None:
    channels = {**CHANNELS, "skellam": Channel(Clip(0.5), Skellam(z=1, least=0.8, colluding=0.2), SecureSum())}
    found = inspect(FedMF(factors=3, uplink=channels[channel]), simulator, 0, cohort=cohort)
    seen, who, colluding, roster, *rest = found.assumes
    assert seen == first
    assert who == "The server and all parties see who takes part."
    assert colluding == f"Assumed: no more than {of} parties collude with the server."
    assert roster == ROSTER
    assert rest == ([SEMI_HONEST] if cohort > 128 else [])
    assert found.as_dict()["assumes"] == found.assumes


def test_without_a_secure_sum_nothing_of_it_is_said(simulator: Simulator) -> None:
    assert inspect(FedMF(factors=3, uplink=CHANNELS["noise"]), simulator, 0, cohort=50).assumes == ()


def test_a_helper_is_named_and_what_it_is_trusted_with() -> None:
    seen, who, assumed = assumptions(Channel(Clip(0.5), SecureSum(helper=True), Gaussian(z=1)))
    assert seen == "The server sees the sum of 67% of a round's parties or more, and never a single vector."
    assert (who, assumed) == (HELPER, "Assumed: server and helper do not collude.")

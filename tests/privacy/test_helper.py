"""A secure sum that a helper opens: who adds the noise, what is charged, and the ring."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from homebody.adversary.canaries import draw_releases
from homebody.adversary.inspection import inspect
from homebody.core import Cohort, Total
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.privacy import (
    Budget,
    Channel,
    Clip,
    Gaussian,
    GaussianRelease,
    HelpedRelease,
    Laplace,
    OneBit,
    Sampling,
    SecureSum,
    Shuffle,
    Skellam,
    Stage,
    event_from_json,
)
from homebody.privacy.accountant import epsilon
from homebody.privacy.budget import calibrated
from homebody.privacy.events import event_as_json
from homebody.privacy.ring import WRAPS, reach_of_gaussian
from homebody.privacy.specs import parse_channel, stage_texts
from homebody.recipe import Recipe
from homebody.report.record import RunFolder
from homebody.report.statement import statement
from homebody.rng import Rng, SystemRng
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.training import fit

SOME = Cohort(np.arange(30), "fixed", 30, 4800)
ALL = Cohort(np.arange(100), "all", 100, 100)
HELPED = Channel(Clip(3.0), SecureSum(helper=True), Gaussian(1.5))


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load("synthetic:users=60,items=400,mean=10"))


class TestCharges:
    def test_the_server_is_charged_for_the_noise_and_not_for_the_draw(self) -> None:
        found = {charge.observer: charge.event for charge in HELPED.charges(SOME)}
        drawn = GaussianRelease(1.5, "replace-one", Sampling("fixed", 30, 4800))
        assert found == {"server": HelpedRelease(1.5, "replace-one"), "clients": drawn, "public": drawn}

    def test_where_everyone_takes_part_a_departure_counts_as_a_replacement(self) -> None:
        channel = Channel(Clip(3.0), SecureSum(helper=True), Gaussian(1.5, "add-remove"))
        found = {charge.observer: charge.event for charge in channel.charges(ALL)}
        assert found["server"] == HelpedRelease(0.75, "replace-one")
        assert found["public"] == GaussianRelease(0.75, "replace-one")

    def test_it_costs_what_gaussian_noise_costs(self) -> None:
        """The exact ε of one round at z = 1 and δ = 1e-6 is 4.887 (issue: 'exact Gaussian 4.887')."""
        bound = epsilon([(HelpedRelease(1.0, "replace-one"), 1)], 1e-6)
        assert bound.epsilon == epsilon([(GaussianRelease(1.0, "replace-one"), 1)], 1e-6).epsilon
        assert bound.epsilon == pytest.approx(4.887, abs=1e-3)
        assert any("server and helper do not collude" in note for note in bound.notes)

    def test_without_noise_nothing_is_claimed(self) -> None:
        for channel in (
            Channel(Clip(3.0), SecureSum(helper=True)),
            Channel(Clip(3.0), SecureSum(helper=True), Gaussian(0.0)),
        ):
            assert {charge.event.kind for charge in channel.charges(SOME)} == {"not-private"}

    def test_without_a_helper_the_server_adds_the_noise(self) -> None:
        found = {
            charge.observer: charge.event for charge in Channel(Clip(3.0), SecureSum(), Gaussian(1.5)).charges(SOME)
        }
        assert found["server"].kind == "not-private"

    def test_the_event_is_read_back(self) -> None:
        event = HelpedRelease(1.25, "replace-one")
        assert event_from_json(event_as_json(event)) == event
        assert str(event) == "Gaussian noise that a helper adds, 1.25 × the ℓ2 sensitivity (replace-one); no sampling"

    def test_noise_is_found_that_spends_a_budget_against_the_server(self) -> None:
        budget = Budget(4, observer="server")
        z = calibrated(HELPED, budget, lambda noisy: [(noisy.charges(SOME), 50)])
        assert 4 * (1 - 1e-3) <= epsilon([(HelpedRelease(z, "replace-one"), 50)], budget.delta).epsilon <= 4


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([Clip(1.0), Skellam(1.0), SecureSum(helper=True)], "leave out skellam, and put gaussian after secure-sum"),
        ([Clip(1.0, order=1), SecureSum(helper=True), Laplace(1.0, where="sum")], "use gaussian instead of laplace"),
        ([OneBit(1.0), Shuffle(), SecureSum(helper=True)], "both hide who sent what"),
        ([SecureSum(helper=True), Gaussian(1.0)], "put a Clip of order 2 before it"),
        ([Clip(1.0), Gaussian(1.0), SecureSum(helper=True)], "put it before"),
    ],
)
def test_nonsense_is_refused(stages: list[Stage], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        Channel(*stages)


def test_shares() -> None:
    """One helper opens one set, so that two sets never have to have a device in common."""
    assert SecureSum(helper=True, least=0.3).threshold(10) == 3
    with pytest.raises(HomebodyError, match="leave colluding out"):
        SecureSum(helper=True, colluding=0.1)
    for least in (0.0, 1.1):
        with pytest.raises(HomebodyError, match="must answer"):
            SecureSum(helper=True, least=least)


def test_it_is_written_as_it_is_read() -> None:
    texts = ["clip:norm=3", "secure-sum:helper=true", "gaussian:z=1.5"]
    assert parse_channel(texts) == HELPED
    assert stage_texts(HELPED) == stage_texts(HELPED.noised_elsewhere()) == texts
    assert not parse_channel(["clip:norm=3", "secure-sum:helper=false", "gaussian:z=1.5"]).facts.helped


class TestRing:
    @pytest.mark.parametrize("z", [0.01, 1.0, 1.5, 7.0])
    def test_a_number_has_4_bytes_for_some_thousand_people(self, z: float) -> None:
        channel = Channel(Clip(3.0), SecureSum(helper=True), Gaussian(z))
        assert channel.ring(54_000, people=1000).width == 4
        assert channel.ring(54_000, people=4000).width == 4
        grid = channel.facts.grid
        assert grid is not None
        assert 2**18 <= 3.0 / grid.step < 2**19
        assert 2.0**grid.depth * grid.step == pytest.approx(z * 6.0)

    def test_noise_leaves_it_with_less_than_the_stated_probability(self) -> None:
        for entries in (1, 54_000):
            reach = reach_of_gaussian(1000.0, entries)
            assert 2 * entries * stats.norm.sf((reach - 0.5) / 1000.0) < WRAPS
            assert reach < 11 * 1000.0
        people, entries = 50, 54_000
        ring, grid = HELPED.ring(entries, people), HELPED.facts.grid
        assert grid is not None
        assert people * 3.0 / grid.step + reach_of_gaussian(2.0**grid.depth, entries) < 2 ** (8 * ring.width - 1)

    def test_parties_add_whole_steps_that_are_no_longer_than_the_clip(self) -> None:
        """ε rests on it: noise is measured against the clip's norm."""
        updates = [{"w": 2 * torch.randn(400, generator=torch.Generator().manual_seed(n))} for n in range(6)]
        ring = HELPED.ring(400, people=6)
        sent = [HELPED.party(updates[n : n + 2], ring, SystemRng()) for n in (0, 2, 4)]
        total = ring.decode(sum(sent[1:], start=sent[0]) & ring.mask, {"w": (400,)})["w"]
        whole = [HELPED.device(update, Rng.of(0))["w"] for update in updates]
        assert torch.equal(total, torch.stack(whole).sum(0))
        for steps, update in zip(whole, updates, strict=True):
            assert float(steps.double().norm()) * ring.step <= 3.0
            clipped = update["w"] * (3.0 / update["w"].norm())
            assert (steps.double() * ring.step - clipped).abs().max() < 1.01 * ring.step + 1e-5


class TestSimulation:
    def test_the_server_is_held_to_a_budget(self, split: Split) -> None:
        method = FedMF(factors=4, uplink=Channel(Clip(0.5), SecureSum(helper=True), Gaussian(2.0)))
        fitted = fit(method, Simulator(split), rounds=12, cohort=20, budget=Budget(8, observer="server"))
        rounds = fitted.ledger.releases()
        assert fitted.stopped is not None
        assert 1 < rounds < 12
        event = HelpedRelease(2.0, "replace-one")
        assert fitted.epsilon["server"] == epsilon([(event, rounds)], 1e-6).epsilon <= 8
        assert epsilon([(event, rounds + 1)], 1e-6).epsilon > 8
        assert fitted.epsilon["public"] < fitted.epsilon["server"]

    def test_noise_is_added_once(self) -> None:
        """20,000 numbers: the deviation is within 5 standard errors of what is stated."""
        sums = {"w": torch.zeros(20_000, dtype=torch.int64)}
        noise = HELPED.server(Total(sums, 5), Rng.of(1)).sum["w"]
        assert float(noise.double().std()) == pytest.approx(HELPED.deviation(20_000, 5), rel=5 / math.sqrt(40_000))
        step = HELPED.facts.grid.step  # type: ignore[union-attr]
        again = HELPED.noised_elsewhere().server(Total({"w": torch.tensor([-7, 0, 2**20])}, 5), Rng.of(1)).sum["w"]
        assert torch.equal(again, (torch.tensor([-7.0, 0, 2**20]).double() * step).float())
        plain = Channel(Clip(3.0), SecureSum(), Gaussian(1.5))
        assert plain.noised_elsewhere() is plain

    def test_no_attack_on_a_release_exceeds_its_bound(self) -> None:
        """One person sends the largest update or its opposite. The server guesses from the noised sum."""
        channel = Channel(Clip(1.0), SecureSum(helper=True), Gaussian(1.0))
        for finding in draw_releases(channel, draws=20_000, delta=1e-5):
            assert not finding.contradicted
            assert finding.lower is not None
            assert 1.0 < finding.lower.epsilon < finding.certified < 5

    def test_what_is_said_of_one_message(self, split: Split) -> None:
        method = FedMF(factors=4, uplink=HELPED)
        shown = inspect(method, Simulator(split), 3, cohort=20)
        assert "with the noise that the helper added, if the helper is honest" in shown.observers["server"].sees
        assert "without the noise" not in shown.observers["server"].sees
        assert shown.bytes == 4 * 1600

    def test_the_statement_names_the_helper(self, tmp_path: Path) -> None:
        recipe = Recipe(
            "fedmf",
            "synthetic:users=60,items=100,mean=10",
            rounds=2,
            cohort=20,
            stages=["clip:norm=0.5", "secure-sum:helper=true", "gaussian:z=4"],
        )
        said = statement(RunFolder.open(Path(execute(recipe, tmp_path)["run"])))
        assert {row["observer"]: row["epsilon"] for row in said["certified"]}["server"] < 3
        assert any("server and helper do not collude" in line for line in said["assumptions"])
        assert any("a helper that sees the shared parameters" in line for line in said["outside"])
        means = [stage["means"] for stage in said["stages"]]
        assert "A helper opens it" in means[1]
        assert means[2].startswith("The helper adds Gaussian noise")

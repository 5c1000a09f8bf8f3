"""Canaries: lower bounds stay under what is certified, and are not idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from homebody.adversary import bounds
from homebody.adversary import canaries as module
from homebody.adversary.canaries import Finding, _evidence, _Nest, _Watched, plant
from homebody.core import Cohort, Tree
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.methods.fedmf import FedMF
from homebody.methods.nearby import Nearby, NearbyPopularity
from homebody.privacy import (
    Channel,
    Charge,
    Clip,
    Gaussian,
    GaussianRelease,
    Laplace,
    OneBit,
    SecureSum,
    Shuffle,
    Skellam,
)
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.training import fit

DELTA = 1e-5


@dataclass(frozen=True)
class Various(FedMF):
    """Everyone's vector starts elsewhere: others' updates are then no common direction that drowns the canaries'."""

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {**super().init_local(shared, rng), "user": (2 * rng.uniform(self.factors) - 1) * self.factors**-0.5}


def found(simulator: Simulator, uplink: Channel, **how: Any) -> dict[str, Finding]:
    wanted = {"rounds": 4, "canaries": 200, **how}
    findings = plant(Various(factors=4, uplink=uplink), simulator, delta=DELTA, **wanted)
    assert [one.observer for one in findings] == ["server", "clients", "public"]
    return {one.observer: one for one in findings}


def lower(finding: Finding) -> float:
    assert finding.lower is not None
    return finding.lower.epsilon


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "uplink",
    [
        Channel(Clip(1.0), Gaussian(z=0.3)),
        Channel(Clip(1.0), Gaussian(z=1)),
        Channel(Clip(1.0), Gaussian(z=4)),
        Channel(Clip(1.0), SecureSum(), Gaussian(z=1, relation="add-remove")),
        Channel(Clip({"item": 0.5}), Gaussian(z=1)),
        Channel(Clip(1.0, order=1), Laplace(b=2)),
        Channel(Clip(1.0, order=1), Laplace(b=8, where="sum")),
        Channel(Clip(1.0), Skellam(z=1), SecureSum()),
        Channel(Clip(1.0), SecureSum(helper=True), Gaussian(z=1)),
        Channel(OneBit(epsilon=0.5, k=2)),
        Channel(OneBit(epsilon=1.0, k=10), Shuffle()),
    ],
    ids=lambda channel: " ".join(type(stage).__name__ for stage in channel.stages),
)
def test_lower_bounds_stay_under_what_is_certified(simulator: Simulator, uplink: Channel, seed: int) -> None:
    for one in found(simulator, uplink, seed=seed).values():
        assert lower(one) <= one.certified
        assert not one.contradicted


@pytest.mark.parametrize(
    ("uplink", "cohort", "observers"),
    [
        (Channel(Clip(1.0), Gaussian(z=0.3)), None, ["clients", "public"]),
        (Channel(Clip(1.0), Gaussian(z=0.5, relation="add-remove")), None, ["clients"]),
        (Channel(Clip(1.0), SecureSum(), Gaussian(z=0.3)), None, ["clients", "public"]),
        (Channel(Clip(1.0), Gaussian(z=0.1)), 250, ["clients"]),
        (Channel(Clip(1.0, order=1), Laplace(b=0.5, where="sum")), None, ["clients", "public"]),
        (Channel(Clip(1.0), Skellam(z=0.3), SecureSum()), None, ["server", "clients"]),
        (Channel(Clip(1.0), SecureSum(helper=True), Gaussian(z=0.3)), None, ["server", "clients"]),
        (Channel(Clip(1.0, order=1), Laplace(b=0.5)), None, ["server"]),
        (Channel(OneBit(epsilon=2.0, k=4)), None, ["server"]),
    ],
)
def test_little_noise_shows(simulator: Simulator, uplink: Channel, cohort: int | None, observers: list[str]) -> None:
    findings = found(simulator, uplink, **({} if cohort is None else {"cohort": cohort}))
    for name in observers:
        assert math.isfinite(findings[name].certified)
        assert lower(findings[name]) > 1


def test_more_noise_shows_less(simulator: Simulator) -> None:
    bounds = [lower(found(simulator, Channel(Clip(1.0), Gaussian(z=z)))["clients"]) for z in (0.3, 1.2, 12)]
    assert bounds[0] > bounds[1] > bounds[2]


def test_the_server_that_adds_the_noise_reads_every_coin(simulator: Simulator) -> None:
    server = found(simulator, Channel(Clip(1.0), Gaussian(z=50)))["server"]
    assert math.isinf(server.certified)
    assert server.lower is not None
    assert server.lower.right == server.lower.guesses
    assert not server.contradicted
    assert server.as_dict()["certified"] == "inf"


def test_a_secure_sum_without_noise_tells_the_server_and_a_shuffle_does_not(simulator: Simulator) -> None:
    assert lower(found(simulator, Channel(Clip(1.0), SecureSum()))["server"]) > 2
    assert lower(found(simulator, Channel(OneBit(epsilon=0.5, k=2), Shuffle()))["server"]) < 0.5


@pytest.mark.slow
def test_one_canary_in_many_trainings(simulator: Simulator) -> None:
    """Independent runs: Clopper and Pearson."""
    clients = found(simulator, Channel(Clip(1.0), Gaussian(z=0.3)), rounds=1, canaries=1, trials=60)["clients"]
    assert clients.lower is not None
    assert clients.lower.estimator == "Clopper–Pearson"
    assert clients.lower.coins == 60
    assert 0.5 < lower(clients) <= clients.certified


def test_trials_add_coins(simulator: Simulator) -> None:
    done: list[tuple[int, int]] = []
    uplink = Channel(Clip(1.0), Gaussian(z=0.5))
    findings = plant(
        FedMF(factors=4, uplink=uplink),
        simulator,
        rounds=2,
        canaries=30,
        trials=3,
        on_round=lambda *one: done.append(one),
    )
    assert findings[1].lower is not None
    assert findings[1].lower.coins == 90
    assert done == [(step, 6) for step in range(1, 7)]


def test_the_certified_epsilon_is_that_of_the_training_with_canaries(simulator: Simulator) -> None:
    uplink = Channel(Clip(1.0), Gaussian(z=1))
    with_them = found(simulator, uplink, cohort=60, canaries=300)["public"].certified
    without = fit(FedMF(factors=4, uplink=uplink), simulator, rounds=4, cohort=60, delta=DELTA, evaluate_every=0)
    assert with_them < without.epsilon["public"]  # 60 of 600, not of 300


def test_a_model_that_is_solved_anew_is_not_measured(simulator: Simulator) -> None:
    method = FedIALS(factors=3, uplink=Channel(Clip(1.0), Gaussian(z=0.3)))
    _, clients, public = plant(method, simulator, rounds=2, canaries=100)
    assert public.lower is None
    assert public.as_dict()["lower"] is None
    assert not public.contradicted
    assert lower(clients) > 1


def laid_out(nest: _Nest) -> torch.Tensor:
    """What each canary's device sends of its update, after the clip."""
    assert nest.places is not None
    return torch.zeros(len(nest.coins), nest.size).scatter_(1, nest.places, nest.clipped)


class TestNest:
    def nest(self, simulator: Simulator, uplink: Channel, count: int = 50) -> _Nest:
        coins = (Rng.of(3, "coins").bits(count) & 1).bool()
        return _Nest.of(FedMF(factors=4, uplink=uplink), simulator, coins, Rng.of(3))

    @pytest.mark.parametrize("uplink", [Channel(Clip(0.7)), Channel(Clip({"item": 0.7})), Channel(Clip(0.7, order=1))])
    def test_each_is_as_long_as_the_clip_allows_and_apart_from_the_others(
        self, simulator: Simulator, uplink: Channel
    ) -> None:
        nest = self.nest(simulator, uplink)
        updates = laid_out(nest)
        order = 1 if uplink.stages[0].order == 1 else 2  # type: ignore[attr-defined]
        torch.testing.assert_close(torch.linalg.vector_norm(updates, order, dim=1), torch.full((50,), 0.7))
        gram = updates @ updates.T
        assert torch.equal(gram, torch.diag(gram.diagonal()))

    def test_against_laplace_noise_it_is_all_in_one_entry(self, simulator: Simulator) -> None:
        nest = self.nest(simulator, Channel(Clip(1.0, order=1), Laplace(b=1)))
        assert ((nest.laid_out(torch.arange(50)) != 0).sum(1) == 1).all()

    def test_without_a_clip_it_is_as_long_as_a_real_update(self, simulator: Simulator) -> None:
        nest = self.nest(simulator, Channel())
        method = FedMF(factors=4)
        shared = method.init_shared(simulator.catalogue, Rng.of(0))
        simulator.begin(method, Rng.of(0))
        real = simulator.message(method, shared, 0, Rng.of(0))["item"].value.norm()
        assert 0.1 < nest.laid_out(torch.arange(1)).norm() / real < 10

    def test_the_channel_carries_them_as_they_are(self, simulator: Simulator) -> None:
        """A round of canaries alone, by hand: the sum is heads minus tails."""
        uplink = Channel(Clip(1.0), SecureSum())
        method = FedMF(factors=4, uplink=uplink)
        watched = _Watched(simulator, torch.tensor([True, False, True, True, False, False]), Rng.of(3))
        watched.begin(method, Rng.of(0))
        nest = watched.nest
        shared = method.init_shared(simulator.catalogue, Rng.of(0))
        users = watched.available()[-6:]
        got = watched.collect(method, shared, Cohort(users, "all", 6, 6), Rng.of(1), 1)
        expected = torch.where(nest.coins, 1.0, -1.0) @ laid_out(nest)
        torch.testing.assert_close(nest.flat(got.total.sum), expected)
        assert torch.equal(watched.evidence["server"].sign() > 0, nest.coins)
        torch.testing.assert_close(nest.along(expected), torch.where(nest.coins, 1.0, -1.0))

    def test_real_clients_are_in_the_sum_as_well(self, simulator: Simulator) -> None:
        method = FedMF(factors=4)
        watched = _Watched(simulator, torch.tensor([True, False, True, True, False, False]), Rng.of(3))
        shared = method.init_shared(simulator.catalogue, Rng.of(0))
        real = simulator.available()
        simulator.begin(method, Rng.of(0))
        plain = simulator.collect(method, shared, Cohort(real, "all", 300, 300), Rng.of(1), 1)
        watched.begin(method, Rng.of(0))
        nest = watched.nest
        got = watched.collect(method, shared, Cohort(watched.available(), "all", 306, 306), Rng.of(1), 1)
        more = torch.where(nest.coins, 1.0, -1.0) @ laid_out(nest)
        torch.testing.assert_close(nest.flat(got.total.sum), nest.flat(plain.total.sum) + more, rtol=1e-4, atol=1e-2)
        assert got.total.clients == 306

    def test_chunks_change_nothing(self, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
        uplink = Channel(Clip(1.0, order=1), Laplace(b=1))
        whole = found(simulator, uplink, rounds=2, canaries=40)
        monkeypatch.setattr(module, "ENTRIES_AT_ONCE", 1500)
        parts = found(simulator, uplink, rounds=2, canaries=40)
        assert {name: one.as_dict() for name, one in whole.items()} == {
            name: one.as_dict() for name, one in parts.items()
        }

    @pytest.mark.parametrize("sparse", [True, False])
    @pytest.mark.parametrize(
        "noise", [[SecureSum(helper=True), Gaussian(z=0.1, relation="add-remove")], [Skellam(z=0.1), SecureSum()]]
    )
    def test_a_sum_of_rows_is_that_of_messages_that_are_laid_out(
        self, simulator: Simulator, noise: list[Any], sparse: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both are heads minus tails, if tails send anything, with the noise that the channel states."""
        if not sparse:
            monkeypatch.setattr(_Nest, "sparse", property(lambda nest: False))
        method = NearbyPopularity(uplink=Channel(Clip(1.0), *noise), rank=4)
        coins = (Rng.of(3, "coins").bits(40) & 1).bool()
        watched = _Watched(simulator, coins, Rng.of(3))
        watched.begin(method, Rng.of(0))
        shared = method.init_shared(simulator.catalogue, Rng.of(0))
        got = watched.collect(method, shared, Cohort(watched.available()[-40:], "all", 40, 40), Rng.of(1), 1)
        nest = watched.nest
        assert nest.sparse == sparse
        left = nest.flat(got.total.sum) - torch.where(coins, 1.0, float(nest.tails)) @ laid_out(nest)
        # 120 draws: their deviation is known to 6.5 %.
        stated = method.uplink.among(40).deviation(120, 40)
        assert float(left.square().mean().sqrt()) == pytest.approx(stated, rel=0.35)

    def test_of_two_sums_the_noisier_one_weighs_less(self, simulator: Simulator) -> None:
        """A tenth of the budget is the first one's. μ of their plain sum would be 0.92; of this one it is 1.53."""
        server, clients, _ = plant(Nearby(rank=4), simulator, rounds=1, canaries=120, trials=10)
        assert server.gaussian is not None
        assert clients.gaussian is not None
        assert server.certified > server.gaussian.epsilon > 5.5 > bounds._of_gaussian(1.1, DELTA)
        assert clients.gaussian.epsilon == server.gaussian.epsilon

    def test_tails_is_what_the_relation_compares_with(self, simulator: Simulator, shipped: None) -> None:
        for uplink in (Channel(), Channel(Clip(1.0), Gaussian(z=1)), Channel(OneBit(1.0))):
            assert self.nest(simulator, uplink).relation == "replace-one"
        method, coins = OrNobody(factors=4, uplink=Channel(Clip(1.0), Gaussian(z=1))), torch.tensor([True, False])
        nest = _Nest.of(method, simulator, coins, Rng.of(3))
        assert (nest.relation, nest.factor(torch.arange(2)).tolist()) == ("add-remove", [1.0, 0.0])


@dataclass(frozen=True)
class OrNobody(FedMF):
    """States its noise against an empty seat, which moves a sum half as far as a replacement."""

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        return [
            replace(one, event=GaussianRelease(2 * one.event.multiplier, "add-remove"))
            if isinstance(one.event, GaussianRelease)
            else one
            for one in self.uplink.charges(cohort)
        ]


def test_an_empty_seat_is_told_from_a_canary(simulator: Simulator, shipped: None) -> None:
    uplink = Channel(Clip(1.0), Gaussian(z=1))
    clients = plant(OrNobody(factors=4, uplink=uplink), simulator, rounds=2, canaries=400)[1]
    assert clients.relation == "add-remove"
    assert clients.gaussian is not None
    assert 0.4 * clients.certified < clients.gaussian.epsilon < clients.certified


def test_evidence_by_hand() -> None:
    """Halves of the time in the sum: log of the two mixtures' ratio, with the spread that the numbers have."""
    shown = torch.tensor([0.8, -0.4, 0.1], dtype=torch.float64)
    spread = float(shown.var())

    def mixture(value: float, sign: int) -> float:
        return 0.5 + 0.5 * math.exp((sign * value - 0.5) / spread)

    expected = [math.log(mixture(v, 1) / mixture(v, -1)) for v in shown.tolist()]
    assert _evidence(shown, 0.5, -1).tolist() == pytest.approx(expected)
    sure = [(v - 0.5) / spread for v in shown.tolist()]
    assert _evidence(shown, 1.0, 0).tolist() == pytest.approx(sure)
    assert np.isfinite(_evidence(torch.tensor([3.0]), 1.0, -1).numpy()).all()


def test_nonsense_is_refused(simulator: Simulator) -> None:
    method = FedMF(factors=4, uplink=Channel(Clip(1.0), Gaussian(z=1)))
    with pytest.raises(HomebodyError, match="at least 1 canary and 1 trial, not 0 and 1"):
        plant(method, simulator, rounds=1, canaries=0)
    with pytest.raises(HomebodyError, match="3 coins can show nothing"):
        plant(method, simulator, rounds=1, canaries=3)
    with pytest.raises(HomebodyError, match="480 entries has room for 480 canaries, not 481: no two may move"):
        plant(method, simulator, rounds=1, canaries=481)
    with pytest.raises(HomebodyError, match="they would not fit"):
        plant(replace(method, uplink=Channel(OneBit(1.0))), simulator, rounds=1, canaries=10**6)
    with pytest.raises(HomebodyError, match="A cohort has 1 to 350"):
        plant(method, simulator, rounds=1, canaries=50, cohort=1000)

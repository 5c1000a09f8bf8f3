"""The attack of one view on another: it reads everything without noise, and no more than noise allows with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from homebody.adversary.views import Guess, _Attack, most_right, read_view
from homebody.core import Tree
from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.privacy import Channel, Views, grid, views
from homebody.privacy.stages import clip_factor
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import described, population
from homebody.training import Trained, fit


def trained(*, semi: bool = False, stages: tuple[Any, ...] = (Views(0.5),), names: str = "profile,taste") -> Trained:
    method = FLMVDSSM(
        uplink=Channel(*stages), views=names, aggregate_users=not semi, widths="8,6,4", batch_size=8, server_rate=0.02
    )
    return fit(method, Simulator(described()), rounds=15, cohort=60)


@pytest.fixture(scope="module")
def model() -> Trained:
    return trained()


def attacked(fitted: Trained, **wanted: Any) -> dict[str, Any]:
    assert isinstance(fitted.runtime, Simulator)
    wanted = {"users": 15, "participations": [1, 5], "sigmas": [0, 1, 4], "candidates": 6, **wanted}
    return read_view(fitted.method, fitted.runtime, fitted.shared, **wanted)


def guess(found: dict[str, Any], question: str, sigma: float, length: int, tower: str = "known") -> dict[str, Any]:
    (one,) = [
        one
        for one in found["guesses"]
        if (one["question"], one["sigma"], one["participations"], one["tower"]) == (question, sigma, length, tower)
    ]
    return dict(one)


class TestBound:
    @pytest.mark.parametrize(("sigma", "length", "most"), [(1, 1, 0.841345), (4, 1, 0.598706), (4, 100, 0.993790)])
    def test_of_two_candidates_it_is_the_normal_distribution(self, sigma: float, length: int, most: float) -> None:
        assert most_right(sigma, length) == pytest.approx(most, abs=1e-6)

    @pytest.mark.parametrize("candidates", [2, 5, 20])
    @pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
    def test_no_candidates_in_a_ball_are_told_apart_more_often(self, sigma: float, candidates: int) -> None:
        """Corners of a simplex, which are opposite if there are two, and random points: 40,000 guesses each."""
        generator = np.random.default_rng(candidates)
        simplex = np.eye(candidates, 30) - np.eye(candidates, 30).mean(0)
        rights = []
        for points in (generator.normal(size=(candidates, 30)), simplex):
            points /= np.linalg.norm(points, axis=1, keepdims=True)
            truth = generator.integers(candidates, size=40_000)
            seen = points[truth] + sigma * generator.normal(size=(40_000, 30))
            rights.append(float(((seen @ points.T).argmax(1) == truth).mean()))
        assert max(rights) <= most_right(sigma, 1, candidates) + 4 * math.sqrt(0.25 / 40_000)
        if candidates == 2:
            assert rights[1] == pytest.approx(most_right(sigma, 1), abs=0.01)

    def test_a_share_is_above_only_beyond_chance(self) -> None:
        at = Guess("gender", "known", 4.0, 1, 2, right=599, trials=1000, deviation=0.0, computed=None, error=1e-3)
        assert not at.above
        assert not replace(at, right=640).above  # 2.7 deviations
        assert replace(at, right=660).above  # 4 deviations
        assert not replace(at, sigma=0.0, right=1000).above


class TestWithoutNoise:
    @pytest.mark.slow
    def test_the_other_view_is_read(self, model: Trained) -> None:
        found = attacked(model)
        (error,) = [one for one in found["errors"] if one["sigma"] == 0]
        assert error["largest"] <= 1e-4
        assert (found["target"], found["attackers"], found["feature"]) == ("profile", ["taste"], "kind")
        assert guess(found, "kind", 0, 1)["accuracy"] >= 0.99
        assert guess(found, "profile", 0, 1)["accuracy"] >= 0.99
        assert guess(found, "kind", 0, 1)["most"] == 1
        assert not found["contradicted"]

    def test_numbers_are_told_among_candidates_as_well(self, model: Trained) -> None:
        found = attacked(model, target="taste", sigmas=[0], users=10)
        assert (found["feature"], found["attackers"]) == ("", ["profile"])
        assert guess(found, "profile", 0, 1)["accuracy"] == 1
        assert {one["question"] for one in found["guesses"]} == {"profile", "opposite"}

    def test_there_are_no_more_candidates_than_profiles(self, model: Trained) -> None:
        kinds = set(described().encoded["users"].columns["kind"].values.tolist()) - {0}
        found = attacked(model, candidates=60, users=2, participations=[1], sigmas=[0])
        assert found["candidates"] == len(kinds) > 2

    def test_people_of_whom_the_view_knows_nothing_are_not_asked_about(self, model: Trained) -> None:
        assert isinstance(model.runtime, Simulator)
        attack = _Attack.of(model.method, model.runtime, model.shared, "profile", None)
        people = attack.people(np.random.default_rng(0))
        assert len(people) == 270  # one in ten of 300 has no profile
        assert all(user % 10 for user in people)


class TestWithNoise:
    @pytest.mark.slow
    def test_opposite_parts_are_told_apart_as_often_as_the_limit_says(self, model: Trained) -> None:
        found = attacked(model, users=30, participations=[1, 5], sigmas=[1, 4], seed=3)
        for sigma, length in ((1, 1), (4, 1), (4, 5)):
            one = guess(found, "opposite", sigma, length)
            assert one["trials"] == 30 * 5 // length
            spread = math.sqrt(one["most"] * (1 - one["most"]) / one["trials"])
            assert abs(one["accuracy"] - one["most"]) < 4 * spread
        assert not found["contradicted"]

    @pytest.mark.slow
    def test_noise_as_drawn_hides_what_distances_say(self, model: Trained) -> None:
        found = attacked(model, users=30, sigmas=[1], seed=4)
        for length in (1, 5):
            one = guess(found, "kind", 1, length)
            spread = math.sqrt(0.25 / one["trials"])
            assert abs(one["accuracy"] - one["computed"]) < 4 * spread
            assert one["computed"] < one["most"]

    def test_it_is_in_every_coordinate(self, model: Trained) -> None:
        (error,) = attacked(model, sigmas=[1], users=5, participations=[1])["errors"]
        numbers = sum(value.numel() for name, value in model.shared.items() if name.startswith("item/"))
        # A part is as long as the clip at most, and the noise has the clip as its deviation.
        assert error["median"] >= 0.95 * math.sqrt(numbers)

    @pytest.mark.slow
    def test_too_little_noise_is_found_out(self, model: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
        def half(rng: Rng, depth: int, *shape: int) -> Tensor:
            return grid.gaussian(rng, depth, *shape) // 2

        monkeypatch.setattr(views, "gaussian", half)
        found = attacked(model, users=40, sigmas=[2])
        assert found["contradicted"]
        assert guess(found, "opposite", 2, 1)["above"]

    @pytest.mark.slow
    def test_a_loose_clip_is_found_out(self, model: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
        def loose(power: Tensor, order: int, norm: float) -> Tensor:
            return clip_factor(power, order, 2 * norm)

        monkeypatch.setattr(views, "clip_factor", loose)
        assert attacked(model, users=40, sigmas=[2])["contradicted"]

    def test_the_same_seed_gives_the_same(self, model: Trained) -> None:
        one, again, other = (attacked(model, users=5, sigmas=[1], seed=seed) for seed in (1, 1, 2))
        assert one == again
        assert one != other


class TestTowersThatStayHome:
    @pytest.mark.slow
    def test_an_attacker_without_the_tower_is_tried_beside_one_with_it(self) -> None:
        found = attacked(trained(semi=True), sigmas=[0, 1])
        towers = {one["tower"] for one in found["guesses"]}
        assert towers == {"known", "the first", "mean of others"}
        assert guess(found, "kind", 0, 1)["accuracy"] >= 0.99
        assert all(one["computed"] is None for one in found["guesses"] if one["tower"] != "known")
        assert not found["contradicted"]

    def test_before_training_everyone_has_the_first_tower(self) -> None:
        simulator = Simulator(described())
        method = FLMVDSSM(views="profile,taste", aggregate_users=False, widths="8,6,4")
        simulator.begin(method, Rng.of(0))
        shared: Tree = method.init_shared(simulator.catalogue, Rng.of(0))
        found = read_view(method, simulator, shared, users=5, participations=[1], sigmas=[0], candidates=6)
        for tower in ("the first", "mean of others"):
            assert guess(found, "profile", 0, 1, tower)["accuracy"] == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("wanted", "sentence"),
        [
            ({"target": "shop"}, "view of this run"),
            ({"feature": "age"}, "feature of 'profile'"),
            ({"target": "taste", "feature": "kind"}, "feature of 'taste'"),
            ({"candidates": 1}, "at least 2 candidates"),
            ({"users": 0}, "at least 1 person"),
            ({"sigmas": [-1.0]}, "from 0 on"),
            ({"participations": [0]}, "at least 1 participation"),
            ({"confidence": 1.0}, "between 0 and 1"),
        ],
    )
    def test_what_makes_no_sense(self, model: Trained, wanted: dict[str, Any], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            attacked(model, **wanted)

    def test_runs_without_views(self) -> None:
        simulator = Simulator(population())
        with pytest.raises(HomebodyError, match="has no views"):
            read_view(FedMF(), simulator, {})
        with pytest.raises(HomebodyError, match="no other to attack"):
            attacked(trained(names="profile"))
        with pytest.raises(HomebodyError, match="Nothing joins the views"):
            attacked(trained(stages=()))

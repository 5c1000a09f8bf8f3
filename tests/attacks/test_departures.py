"""Somebody who leaves where everyone takes part: the printed ε covers by how much the released numbers move.

A sum that is divided by how many people there are moves twice as far as what one of them sent. `nearby` divides by
nothing, so that its sums move by what was sent, which a clip bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from homebody.core import Catalogue, Cohort, Data, Total, Tree, Update, releases
from homebody.methods.nearby import Nearby, NearbyPopularity
from homebody.privacy import Channel, Clip, Gaussian, Laplace, Ledger, SecureSum
from homebody.privacy.events import Relation
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute

NORM, PEOPLE, ENTRIES, DELTA = 2.0, 20, 50_000, 1e-6
RELATIONS: list[Relation] = ["add-remove", "replace-one"]


def released(channel: Channel, values: list[float]) -> tuple[float, float]:
    """The mean over these people of what they send, without the noise on it; and how far that noise spreads.

    The same noise on nothing at all is taken off again; that of all entries tells its spread, by the seed.
    """

    def mean(values: list[float]) -> torch.Tensor:
        sent = []
        for number, value in enumerate(values):
            update = torch.zeros(ENTRIES)
            update[0] = value
            sent.append(channel.device({"item": update}, Rng.of(number))["item"])
        # Whole steps stay whole numbers: others would be rounded to steps again.
        total = Total({"item": torch.stack(sent).sum(0)}, len(values))
        return channel.server(total, Rng.of(7)).mean["item"].double()

    noise = mean([0.0] * len(values))
    return float(mean(values)[0] - noise[0]), float(noise.abs().mean())


def moved(channel: Channel) -> float:
    """By how much of the noise's mean size a mean moves when one leaves who is the opposite of everybody else."""
    others = [NORM] * (PEOPLE - 1)
    (there, size), (gone, _) = released(channel, [*others, -NORM]), released(channel, others)
    return abs(there - gone) / size


def printed(channel: Channel) -> float:
    ledger = Ledger()
    ledger.charge("train/1", channel.charges(Cohort(np.arange(PEOPLE), "all", PEOPLE, PEOPLE)))
    found = ledger.epsilon("public", delta=DELTA).epsilon
    ledger.close()
    return found


def exact(shift: float, delta: float = DELTA) -> float:
    """ε of two normal distributions that are so many standard deviations apart (Balle and Wang, 2018)."""

    def excess(epsilon: float) -> float:
        far, near = stats.norm.cdf([-shift / 2 - epsilon / shift, shift / 2 - epsilon / shift])
        return float(near - math.exp(epsilon) * far - delta)

    return float(optimize.brentq(excess, 0, 100)) if excess(0) > 0 else 0.0


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("z", [1.0, 1.5, 4.0])
def test_gaussian_noise_covers_a_departure(z: float, relation: Relation) -> None:
    channel = Channel(Clip(NORM), Gaussian(z, relation))
    shift = moved(channel) * math.sqrt(2 / math.pi)  # the mean of |N(0, 1)|
    assert shift == pytest.approx((2 if relation == "add-remove" else 1) / z, rel=0.02)  # the spread is known to 0.5 %
    assert printed(channel) >= exact(shift) * 0.95


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("b", [4.0, 16.0])
def test_laplace_noise_on_the_sum_covers_a_departure(b: float, relation: Relation) -> None:
    channel = Channel(Clip(NORM, order=1), Laplace(b, where="sum", relation=relation))
    shift = moved(channel)
    assert shift == pytest.approx(2 * NORM / b, rel=0.02)
    assert printed(channel) >= shift * 0.95


@pytest.mark.parametrize("relation", RELATIONS)
def test_so_does_what_a_run_prints(relation: Relation, tmp_path: Path) -> None:
    """A sum that is divided by n moves by 2S/n, with noise of z S/n or of z 2S/n."""
    stages = ["clip:norm=1", f"gaussian:z=1.5,relation={relation}"]
    recipe = Recipe("fedmf", "synthetic:users=20,items=30,mean=6", fields={"factors": 4}, rounds=1, stages=stages)
    result = execute(recipe, tmp_path)
    ledger = Ledger(Path(result["run"]) / "ledger.sqlite")
    delta = ledger.epsilon("public").delta
    ledger.close()
    shift = (2 if relation == "add-remove" else 1) / 1.5
    assert result["epsilon"]["public"] >= exact(shift, delta) * (1 - 1e-6)


ITEMS, LONGEST = 40, 60
CATALOGUE = Catalogue(ITEMS)
HISTORIES: dict[str, list[int]] = {
    "nothing": [],
    "one item": [3],
    "two items in turn": [1, 2] * 30,
    "one item again and again": [7] * 60,
    "everything": list(range(ITEMS)),
    "everything, twice": [*range(20), *range(20), *range(20, ITEMS)],
}
"""Whoever leaves. Two items in turn are one pair, many times over: its weights add up."""
METHODS: dict[str, Nearby] = {
    "whole": Nearby(),
    "a sketch": Nearby(buckets=50),
    "a sketch of few numbers": Nearby(buckets=2),
    "without a clip of its own": Nearby(decay=1.0, damping=0.0, window=60),
}


def someone(items: list[int]) -> Data:
    valid = torch.arange(LONGEST) < len(items)
    return Data(
        torch.tensor([*items, *[0] * (LONGEST - len(items))]), valid, torch.empty(0, dtype=torch.long), CATALOGUE
    )


def shared_after_popularity(method: Nearby) -> Tree:
    popularity = (torch.arange(ITEMS) + 1.0) / 20
    return {**method.init_shared(CATALOGUE, Rng.of(0)), "popularity": popularity, "place": torch.arange(ITEMS)}


def sent(method: Nearby | NearbyPopularity, items: list[int]) -> Tree:
    """What this person adds to the sum: their message through the device's half of the channel."""
    shared = shared_after_popularity(Nearby())
    update, _ = method.client(shared, {}, method.prepare(someone(items), Rng.of(1)))
    return method.uplink.decoded(method.uplink.device(update, Rng.of(2)))


def length(tree: Tree) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in tree.values()))


def acting(method: Nearby) -> list[Nearby | NearbyPopularity]:
    return [phase.method for phase in method.phases]  # type: ignore[misc]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", METHODS)
def test_what_one_person_adds_to_the_sums_of_nearby_is_no_longer_than_the_clip(name: str, history: str) -> None:
    for method in acting(METHODS[name]):
        assert length(sent(method, HISTORIES[history])) <= 1.0


@pytest.mark.parametrize("history", HISTORIES)
def test_a_departure_moves_the_sums_of_nearby_by_what_was_sent_and_the_printed_epsilon_covers_it(history: str) -> None:
    """Released with one person and without, by the server's half of the channel, with the same noise."""
    method = Nearby(buckets=50)
    stays, leaves, shifts = [[1, 2, 3], [4, 5, 6, 7]], HISTORIES[history], []
    for acts in acting(method):
        shared, channel = shared_after_popularity(method), acts.uplink

        def released(people: list[list[int]], acts: Nearby | NearbyPopularity = acts, shared: Tree = shared) -> Tree:
            total: Tree = {}
            for items in people:
                update, _ = acts.client(shared, {}, acts.prepare(someone(items), Rng.of(1)))
                for name, value in acts.uplink.device(update, Rng.of(2)).items():
                    total[name] = total[name] + value.long() if name in total else value.long()
            return acts.uplink.server(Total(total, len(people)), Rng.of(3)).sum

        there, gone = released([*stays, leaves]), released(stays)
        moved = length({name: there[name].double() - gone[name].double() for name in there})
        assert moved <= 1.0 + 1e-5  # sums are in 32 bits
        shifts.append(moved / channel.deviation(1, 1))
    assert exact(max(1e-9, math.hypot(*shifts))) <= charged(method, PEOPLE) * (1 + 1e-6)


def charged(method: Nearby, people: int, observer: str = "server") -> float:
    ledger, everyone = Ledger(), Cohort(np.arange(people), "all", people, people)
    for number, acts in enumerate(acting(method)):
        ledger.charge(f"{number}", releases(acts, everyone))
    found = ledger.epsilon(observer, delta=DELTA).epsilon  # type: ignore[arg-type]
    ledger.close()
    return found


@dataclass(frozen=True)
class Unclipped(Clip):
    """Leaves the clip to the device's arithmetic, which brings all pairs to length 1 before they are sketched."""

    def device(self, update: Update, rng: Rng) -> Update:
        return update


@pytest.mark.parametrize("history", ["two items in turn", "everything, twice"])
def test_pairs_of_length_1_are_longer_in_a_sketch(history: str, shipped: None) -> None:
    """So the sketch has to be clipped: what the same person would send without that is not covered."""
    method = Nearby(buckets=2, uplink=Channel(Unclipped(1.0), SecureSum(helper=True), Gaussian(1, "add-remove")))
    _, pairs = acting(method)
    alone = length(sent(pairs, HISTORIES[history]))
    assert alone > 2.5
    assert exact(2.5 / pairs.uplink.deviation(1, 1)) > 2 * charged(method, PEOPLE)


@pytest.mark.parametrize("clients", [1, 10**9])
def test_the_numbers_of_nearby_do_not_depend_on_how_many_people_there_are(clients: int) -> None:
    """Which is what `About.divides` promises, and what makes a departure cost no more than what was sent."""
    method = Nearby(rank=5)
    shared = shared_after_popularity(method)
    for acts, name, size in zip(
        acting(method), ("popularity", "pairs"), (ITEMS, ITEMS * (ITEMS - 1) // 2), strict=True
    ):
        assert not acts.about.divides
        counts = {name: 20 * Rng.of(1, name).uniform(size)}
        (few, _), (many, _) = (
            acts.server(shared, {}, Total(counts, there, catalogue=CATALOGUE)) for there in (7, clients)
        )
        assert all(torch.equal(few[part], many[part]) for part in shared)
        assert not torch.equal(few["item"], shared["item"])

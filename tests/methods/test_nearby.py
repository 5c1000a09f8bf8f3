from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import homebody as hb
from homebody.core import Catalogue, Column, Data, Total, Tree
from homebody.data.partitions import leave_one_out
from homebody.data.population import Population
from homebody.errors import HomebodyError
from homebody.methods.nearby import Nearby, NearbyPopularity
from homebody.models import pairs
from homebody.privacy import Channel, Clip, Gaussian
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import described, population
from homebody.training import fit

POPULARITY = torch.tensor([4.0, 0.5, 1.0, 2.0, 0.1, 0.2])
PLACE = torch.tensor([0, 1, 2, 3, -1, 4])
METHOD = Nearby(window=2, decay=0.5, damping=0.5, items=5, rank=3, uplink=Channel(Clip(1.0)))
SHARED = {"popularity": POPULARITY, "place": PLACE, "item": torch.zeros(6, 4)}


def data_of(items: list[int], n_items: int = 6, padded: int = 0) -> Data:
    history = torch.tensor([*items, *[0] * padded])
    return Data(history, torch.arange(len(history)) < len(items), history[:0], Catalogue(n_items))


def sent(method: Nearby, items: list[int], padded: int = 0) -> Tensor:
    update, _ = method.client(SHARED, {}, method.prepare(data_of(items, padded=padded), Rng.of(0)))
    return update["pairs"].dense()


def triangle(told: Tensor, items: int) -> dict[tuple[int, int], float]:
    both = itertools.combinations(range(items), 2)
    return {pair: value for pair, value in zip(both, told.tolist(), strict=True) if value}


@pytest.mark.parametrize("padded", [0, 3])
def test_a_device_sends_its_pairs_weighed_by_distance_and_popularity(padded: int) -> None:
    history = [0, 3, 4, 1, 3]  # item 4 is not kept; 3 is there twice
    damped = {0: 4.0**-0.5, 1: 1.0, 3: 2.0**-0.5}  # under the mean popularity nothing is damped
    expected: dict[tuple[int, int], float] = {}
    for (at, one), (then, other) in itertools.combinations(enumerate(history), 2):
        if then - at <= 2 and one != other and 4 not in (one, other):
            pair = (min(one, other), max(one, other))
            expected[pair] = expected.get(pair, 0.0) + 0.5 ** (then - at - 1) * damped[one] * damped[other]
    found = triangle(sent(METHOD, history, padded), 5)
    assert found.keys() == expected.keys()
    scale = found[0, 3] / expected[0, 3]
    assert found == pytest.approx({pair: scale * weight for pair, weight in expected.items()}, rel=1e-5)


def test_a_message_has_length_one_however_long_the_history() -> None:
    assert float(sent(METHOD, [0, 1, 2, 3]).norm()) == pytest.approx(1)
    assert float(sent(METHOD, [0, 1]).norm()) == pytest.approx(1)


@pytest.mark.parametrize("history", [[], [2], [2, 2, 2], [4, 4], [0, 4]])
def test_a_history_without_a_pair_sends_zeros(history: list[int]) -> None:
    assert not sent(METHOD, history, padded=1).any()


def test_every_pair_has_a_place_of_its_own_in_the_triangle() -> None:
    low, high = torch.triu_indices(40, 40, 1)
    slot, sign = pairs.slots(low, high, 40, 0)
    assert slot.tolist() == list(range(pairs.entries(40, 0)))
    assert sign == 1


def test_a_sketch_spreads_pairs_over_its_buckets_and_signs() -> None:
    low, high = torch.triu_indices(400, 400, 1)
    slot, sign = pairs.slots(low, high, 400, 1000)
    counts = torch.bincount(slot, minlength=1000)
    assert len(counts) == 1000
    assert counts.min() > 40  # 79.8 on average; the hash is fixed
    assert counts.max() < 130
    assert isinstance(sign, Tensor)
    assert abs(float(sign.float().mean())) < 0.02


def test_a_sketch_is_the_triangle_added_up() -> None:
    sketched = Nearby(window=2, decay=0.5, damping=0.5, items=5, rank=3, buckets=4, uplink=Channel(Clip(1.0)))
    low, high = torch.triu_indices(5, 5, 1)
    slot, sign = pairs.slots(low, high, 5, 4)
    whole, sketch = sent(METHOD, [0, 3, 1, 2, 5]), sent(sketched, [0, 3, 1, 2, 5])
    torch.testing.assert_close(sketch, torch.zeros(4).index_add_(0, slot, whole * sign))


def belonging(m: int = 40, rank: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """g, and X: independent pairs and tastes of low rank."""
    g = Rng.of(seed, "g").uniform(m) + 0.5
    tastes = Rng.of(seed, "tastes").normal(m, rank)
    return g, torch.outer(g, g) + tastes @ tastes.T


def upper(X: Tensor) -> Tensor:
    low, high = torch.triu_indices(len(X), len(X), 1)
    return X[low, high]


def product(found: pairs.Together, g: Tensor) -> Tensor:
    return found.vectors @ found.vectors.T + found.independent * torch.outer(g, g)


def test_without_noise_the_sum_is_found_again() -> None:
    g, X = belonging()
    found = product(pairs.posterior(upper(X), 0.0, g, None, rank=40), g)
    assert float((upper(found) - upper(X)).norm() / upper(X).norm()) < 0.2


def test_little_noise_moves_little_and_much_noise_leaves_popularity() -> None:
    g, X = belonging(m=400)
    error, beyond = [], []
    for deviation in (0.1, 1.0, 100.0):
        found = pairs.posterior(upper(X) + deviation * Rng.of(1).normal(len(upper(X))), deviation, g, None, rank=10)
        error.append(float((upper(product(found, g)) - upper(X)).norm() / upper(X).norm()))
        beyond.append(float((found.vectors @ found.vectors.T).norm()) / (found.independent * float(g @ g)))
    assert error[0] < error[1] < 0.25
    assert beyond[2] < 0.25 < 0.5 < beyond[1]


def test_what_is_public_stands_in_for_what_noise_hides() -> None:
    g = torch.ones(60)
    kind = torch.arange(60) % 3
    alike = (kind[:, None] == kind).float()
    X = torch.outer(g, g) * (1 + 4 * alike)
    told = upper(X) + 5.0 * Rng.of(1).normal(len(upper(X)))
    found = product(pairs.posterior(told, 5.0, g, alike, rank=10), g)
    same, other = found[alike.bool()].mean(), found[~alike.bool()].mean()
    assert float(same / other) == pytest.approx(5, rel=0.3)


def test_a_sketch_recovers_what_the_triangle_says() -> None:
    g, X = belonging(m=200)
    whole = upper(X)
    low, high = torch.triu_indices(200, 200, 1)
    slot, sign = pairs.slots(low, high, 200, 10_000)
    sketch = torch.zeros(10_000).index_add_(0, slot, whole * sign)
    found = upper(product(pairs.posterior(sketch, 0.0, g, None, rank=10, buckets=10_000), g))
    first = sketch[slot] * sign
    assert float((found - whole).norm() / whole.norm()) < 0.3 < float((first - whole).norm() / whole.norm())


def test_likeness_by_hand() -> None:
    kind = Column(torch.tensor([1, 1, 2, 0]), 3, "one")
    year = Column(torch.tensor([0.0, 0.2, 0.0, 0.0]), 1, "number")
    found = pairs.likeness(Catalogue(4, {"kind": kind, "year": year}), torch.arange(4))
    assert found is not None
    assert float(found[0, 1]) == pytest.approx(np.exp(-0.5), rel=1e-5)
    assert float(found[0, 2]) == 0
    assert float(found[0, 3]) == 0  # an unknown kind is like no other
    assert pairs.likeness(Catalogue(4), torch.arange(4)) is None


def test_the_server_does_not_read_how_many_took_part() -> None:
    method = Nearby(items=5, rank=3, uplink=Channel(Clip(1.0), Gaussian(z=0.1)))
    told = {"pairs": Rng.of(3).uniform(10)}
    one, many = (method.server(SHARED, {}, Total(told, clients, catalogue=Catalogue(6)))[0] for clients in (1, 900))
    assert torch.equal(one["item"], many["item"])


def test_items_that_are_not_kept_rank_by_popularity() -> None:
    people = leave_one_out(hb.load("synthetic:users=200,items=60,mean=10"), seed=1)
    fitted = fit(Nearby(items=20, rank=5, uplink=Channel(Clip(1.0))), Simulator(people))
    dropped = fitted.shared["place"] < 0
    assert int(dropped.sum()) == 40
    assert not fitted.shared["item"][dropped, :-1].any()
    assert (fitted.shared["item"][dropped, -1] > 0).all()


def test_the_last_item_weighs_most_and_everyone_gets_a_ranking() -> None:
    item = torch.eye(6)[:, :4].clone()
    shared: Tree = {"popularity": torch.ones(6), "place": PLACE, "item": item}
    every = torch.arange(6)
    scores = METHOD.score(shared, {}, data_of([0, 1], padded=2), every)
    assert scores.argmax() == 1
    assert float(scores[0] / scores[1]) == pytest.approx(2**-METHOD.recency)
    shared["popularity"] = POPULARITY
    assert METHOD.score(shared, {}, data_of([], padded=2), every).tolist() == POPULARITY.tolist()


def test_padding_changes_no_score() -> None:
    shared: Tree = {"popularity": POPULARITY, "place": PLACE, "item": Rng.of(2).normal(6, 4)}
    every = torch.arange(6)
    alone, padded = (METHOD.score(shared, {}, data_of([3, 0, 5], padded=more), every) for more in (0, 7))
    torch.testing.assert_close(alone, padded)


def population_of(*histories: list[int], n_items: int) -> Population:
    ends = np.cumsum([0, *map(len, histories)])
    items = np.array([item for history in histories for item in history], dtype=np.int32)
    return Population("toy", ends, items, n_items=n_items)


@pytest.mark.parametrize(
    "people",
    [
        population_of([0], [1], [0, 1, 2], n_items=3),
        population_of(list(range(2000)), [5, 6, 7], n_items=2000),
    ],
    ids=["one item", "a long history"],
)
def test_odd_populations_get_a_result(people: Population) -> None:
    split = leave_one_out(people, how="latest", negatives=1)
    fitted = fit(Nearby(rank=3, uplink=Channel(Clip(1.0), Gaussian(z=0.5))), Simulator(split))
    assert all(torch.isfinite(value).all() for value in fitted.shared.values())


def test_features_lift_it_where_noise_hides_the_pairs() -> None:
    split = described()
    channel = Channel(Clip(1.0), Gaussian(z=1.0))
    found = [
        fit(Nearby(rank=16, features=features, uplink=channel), Simulator(split)).metrics["valid/ndcg@10"]
        for features in (True, False)
    ]
    assert found[0] > found[1]


def test_pairs_lift_popularity() -> None:
    split = population()
    near = fit(Nearby(rank=16, uplink=Channel(Clip(1.0))), Simulator(split)).metrics["valid/ndcg@10"]
    alone = fit(NearbyPopularity(uplink=Channel(Clip(1.0))), Simulator(split)).metrics["valid/ndcg@10"]
    assert near > alone


@pytest.mark.parametrize(
    "people",
    [population_of(*([item] * 3 for item in range(5)), n_items=5), population_of(*[[0, 0, 0, 0]] * 4, n_items=1)],
    ids=["an item each", "a catalogue of one"],
)
def test_who_has_one_item_alone_is_refused_with_a_sentence(people: Population) -> None:
    with pytest.raises(HomebodyError, match="No user of toy has the 3 interactions"):
        leave_one_out(people, how="latest", negatives=1)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_leaves_something_for_both(share: float) -> None:
    with pytest.raises(HomebodyError, match="share"):
        Nearby(share=share)


def test_an_item_that_is_not_kept_takes_nothing_from_other_pairs() -> None:
    assert float(sent(METHOD, [0, 4, 1]).norm()) == pytest.approx(1)


def test_popularity_counts_by_the_root_of_how_many_items_there_are() -> None:
    method = NearbyPopularity(uplink=Channel(Clip(1.0)))
    update, _ = method.client(SHARED, {}, method.prepare(data_of([0, 2, 5, 3], padded=2), Rng.of(0)))
    assert update["popularity"].dense().tolist() == pytest.approx([0.5, 0, 0.5, 0.5, 0, 0.5])


def test_a_score_adds_up_recent_items_and_trusts_them_by_their_number() -> None:
    shared: Tree = {"popularity": POPULARITY, "place": PLACE, "item": Rng.of(4).normal(6, 4)}
    found = METHOD.score(shared, {}, data_of([3, 1, 0], padded=2), torch.arange(6))
    recent = [1.0, 2**-METHOD.recency, 3**-METHOD.recency]
    person = sum(
        weight / max(float(POPULARITY[item]), 1.0) ** 0.5 * shared["item"][item]
        for weight, item in zip(recent, [0, 1, 3], strict=True)
    )
    assert isinstance(person, Tensor)
    many = sum(recent) ** 2 / sum(weight**2 for weight in recent)
    expected = shared["item"][:, :-1] @ person[:-1] * METHOD.trust * many + shared["item"][:, -1] * person[-1]
    torch.testing.assert_close(found, expected)


def test_each_phase_has_the_noise_of_its_share() -> None:
    method = Nearby(share=0.2, uplink=Channel(Clip(1.0), Gaussian(z=2.0, relation="add-remove")))
    assert [phase.method.uplink.deviation(1, 1) for phase in method.phases if phase.method] == pytest.approx(
        [2 / 0.2**0.5, 2 / 0.8**0.5]
    )


def test_items_of_which_nothing_is_known_are_like_no_others() -> None:
    kind = Column(torch.tensor([0, 0, 1]), 2, "one")
    found = pairs.likeness(Catalogue(3, {"kind": kind}), torch.arange(3))
    assert found is not None
    assert float(found[0, 1]) == 0


def test_kinds_that_go_together_are_found_under_noise_that_hides_each_pair() -> None:
    g, kind = torch.ones(90), torch.arange(90) % 3
    first, second, third = (kind == number for number in range(3))
    X = torch.ones(90, 90)
    for one, other in ((first, second), (second, first)):
        X[torch.outer(one, other)] += 4.0
    told = upper(X) + 20.0 * Rng.of(1).normal(len(upper(X)))
    alike = (kind[:, None] == kind).float()
    found = product(pairs.posterior(told, 20.0, g, alike, rank=10), g)
    together, apart = found[torch.outer(first, second)].mean(), found[torch.outer(first, third)].mean()
    assert float(together - apart) > 1

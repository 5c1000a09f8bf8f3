"""DPLCF: neighbours from randomised histories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.testing import assert_close

from homebody.adversary.inspection import inspect
from homebody.adversary.interactions import read_interactions
from homebody.core import Catalogue, Cohort, Data, Total, releases
from homebody.errors import HomebodyError
from homebody.federation.wire import refuse_unfit
from homebody.methods.dplcf import DPLCF, _near, near_in_torch
from homebody.privacy import OBSERVERS, Channel, Clip, RandomisedResponse
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.testing import population
from homebody.training import fit

SURE = Channel(RandomisedResponse(epsilon=36.0))
FOUR = Catalogue(n_items=4)


def data(items: list[int]) -> Data:
    own = torch.tensor(items)
    return Data(own, torch.ones(len(items), dtype=torch.bool), own.unique(), FOUR)


def test_two_neighbours_by_hand() -> None:
    """People {0,1}, {0,1,2}, {2}, {1,2}: items 0, 1, 2 are with 2, 3 and 3 of them, and item 3 with nobody."""
    method = DPLCF(uplink=SURE, neighbours=2, shrinkage=0)
    taken = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0], [0, 1, 1, 0]])
    shared, _ = method.server(
        method.init_shared(FOUR, Rng.of(0)), {}, Total({"history": taken.sum(0), "history²": taken.T @ taken}, 4)
    )
    cosine = {(0, 1): 2 / 6**0.5, (0, 2): 1 / 6**0.5, (1, 2): 2 / 3}
    assert shared["neighbour"][:3].tolist() == [[1, 2], [0, 2], [1, 0]]
    expected = [[cosine[0, 1], cosine[0, 2]], [cosine[0, 1], cosine[1, 2]], [cosine[1, 2], cosine[0, 2]], [0, 0]]
    assert_close(shared["weight"], torch.tensor(expected))
    # Who has 1, twice, and 3: 0 and 2 are worth their likeness to 1, and 1 is no neighbour of its own.
    scores = method.score(shared, {}, data([1, 3, 1]), torch.tensor([2, 0, 1, 3]))
    assert_close(scores, torch.tensor([cosine[1, 2], cosine[0, 1], 0.0, 0.0]))


def test_with_little_to_hide_it_is_plain_item_knn() -> None:
    """Against neighbours counted in the open, over a whole population."""
    split = population()
    fitted = fit(DPLCF(uplink=SURE, neighbours=20), Simulator(split), rounds=1, evaluate_every=0)
    indptr, items = split.histories()[:2]
    taken = np.zeros((split.n_users, split.n_items))
    taken[np.repeat(np.arange(split.n_users), np.diff(indptr)), items] = 1
    both, counts = taken.T @ taken, np.maximum(taken.sum(0), 1)
    cosine = both / np.sqrt(counts[:, None] * counts)
    np.fill_diagonal(cosine, 0)
    nearest = np.argsort(-cosine, axis=1, kind="stable")[:, :20]
    near = np.zeros_like(cosine)
    np.put_along_axis(near, nearest, np.take_along_axis(cosine, nearest, axis=1), axis=1)
    weights = np.sort(fitted.shared["weight"].numpy(), axis=1)
    assert np.allclose(weights, np.sort(near, axis=1)[:, -20:], atol=1e-6)
    for user in (0, 7, 150):
        best = dict(fitted.ranked(user, k=split.n_items))
        expected = taken[user] @ near.T
        # Neighbours that tie at the end of a list may be either; nearly all scores are the same.
        same = [abs(score - expected[item]) < 1e-5 for item, score in best.items()]
        assert np.mean(same) > 0.9


def test_the_kernel_adds_up_what_a_product_does_and_people_may_ask_for_their_own() -> None:
    generator = torch.Generator().manual_seed(4)
    owned = (torch.rand(9, 30, generator=generator) < 0.3).float()
    near = torch.randint(30, (30, 5), generator=generator, dtype=torch.int32)
    weight = torch.rand(30, 5, generator=generator)
    items = torch.tensor([3, 29, 3, 0])
    kernel = vmap(lambda own: _near(own, items, near, weight))(owned)
    expected = near_in_torch(owned, items, near, weight)
    assert_close(kernel, expected)
    by_hand = sum(float(weight[29, n]) * float(owned[2, near[29, n]]) for n in range(5))
    assert float(kernel[2, 1]) == pytest.approx(by_hand)
    each = vmap(lambda own, one: _near(own, one[None], near, weight))(owned[:4], items)
    assert_close(each[:, 0], expected[:4].diagonal())


def test_the_less_is_hidden_the_more_neighbours_are_the_true_ones() -> None:
    near = []
    for epsilon in (0.5, 2.5, 6.0, 36.0):
        method = DPLCF(uplink=Channel(RandomisedResponse(epsilon)), neighbours=10)
        near.append(fit(method, Simulator(population()), rounds=1, evaluate_every=0).shared["neighbour"])
    *hidden, true = near
    shared = [(some[:, :, None] == true[:, None, :]).any(2).float().mean().item() for some in hidden]
    assert 0.05 < shared[0] < shared[1] < shared[2] < 1
    assert shared[2] > 0.8


def test_shrinkage_is_in_standard_errors_of_a_count() -> None:
    method = DPLCF(uplink=Channel(RandomisedResponse(1.0)), shrinkage=3.0)
    both, counts = torch.full((2, 2), 10.0), torch.tensor([16.0, 4.0])
    found = method.similarity(both, counts, slice(0, 2), clients=100)
    p = method.response.truth
    error = p * (1 - p) / (2 * p - 1) ** 2 * 10
    assert_close(found, torch.tensor([[0.0, 10 / (8 + 3 * error)], [10 / (8 + 3 * error), 0.0]]))
    assert method.similarity(-both, counts, slice(1, 2), clients=100).tolist() == [[0.0, 0.0]]


def test_a_person_costs_epsilon_for_every_item() -> None:
    ledger = fit(DPLCF(), Simulator(population()), rounds=1, evaluate_every=0).ledger
    for observer in OBSERVERS:
        assert ledger.epsilon(observer, "user", delta=0.0).epsilon == 120 * 2.5
        assert ledger.epsilon(observer, "interaction", delta=0.0).epsilon == 2.5
        assert ledger.epsilon(observer, "report", delta=0.0).epsilon == 2.5
        assert 200 < ledger.epsilon(observer, "user", delta=1e-6).epsilon < 300
    with pytest.raises(HomebodyError, match="charged for every item of the catalogue"):
        releases(DPLCF(), Cohort(np.arange(3), "all", 3, 3))


def test_another_way_out_is_refused() -> None:
    for channel in (Channel(), Channel(Clip(1.0))):
        with pytest.raises(HomebodyError, match="its last stage is randomised-response"):
            DPLCF(uplink=channel)
    with pytest.raises(HomebodyError, match="cannot ask for rows"):
        DPLCF(uplink=Channel(RandomisedResponse(1.0), asks_rows=True))


def test_devices_refuse_it_in_a_sentence() -> None:
    with pytest.raises(HomebodyError, match="DPLCF's server reads each message before it sums them"):
        refuse_unfit(DPLCF())


def test_it_runs_from_a_recipe_at_its_own_epsilon(tmp_path: Path) -> None:
    data = "synthetic:users=60,items=40,mean=10"
    result = execute(Recipe("dplcf", data, stages=["randomised-response:epsilon=4"], delta=1e-9), tmp_path)
    assert result["rounds"] == 1
    assert result["bytes_up"] == 5
    assert 100 < result["epsilon"]["server"] <= 160


def test_inspecting_it_shows_a_bit_for_every_item() -> None:
    found = inspect(DPLCF(), Simulator(population()), 0)
    (part,) = found.parts
    assert (part.name, part.shape, part.dtype, part.bytes) == ("history", (120,), "bool", 15)
    assert found.observers["server"].sees.startswith("This message of 120 randomised bits, one for each item")
    assert found.observers["server"].charged[0] == (
        "one user: 120 locally randomised reports of ε = 2.5 each; no sampling"
    )
    assert [line for line in found.tells if "true with probability 0.924" in line]


def test_the_server_reads_a_history_as_well_as_the_bits_are_true() -> None:
    """An own item's bit is 1 with p, another's with q: AUC is p² + pq = p."""
    simulator, method = Simulator(population()), DPLCF()
    shared = method.init_shared(simulator.catalogue, Rng.of(0))
    reading = read_interactions(method, simulator, shared, users=200, seed=2)
    assert reading.table == "history"
    assert abs(reading.auc.mean() - method.response.truth) < 0.02


def test_neighbours_outside_the_table_count_for_nothing() -> None:
    """A server may send any: memory beside the table is neither read nor added up."""
    near = torch.tensor([4, 2**31 - 1, -1, -(2**31)], dtype=torch.int32).expand(4, 4)
    assert (
        vmap(lambda own: _near(own, torch.arange(4), near, torch.ones(4, 4)))(torch.ones(3, 4)).tolist()
        == [[0.0] * 4] * 3
    )

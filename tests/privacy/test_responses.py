"""Randomised response: what a message says, what the server reads in many, and what it costs."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.func import vmap
from torch.testing import assert_close

from homebody import kernels
from homebody.core import Cohort, Rows, Total, Tree, releases
from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.privacy import (
    OBSERVERS,
    Channel,
    Clip,
    Gaussian,
    Laplace,
    Ledger,
    OneBit,
    RandomisedResponse,
    SecureSum,
    Shuffle,
)
from homebody.privacy.reports import products_in_torch
from homebody.privacy.specs import parse_channel
from homebody.privacy.stages import Stage
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import population

ONE = Cohort(np.arange(1), "all", 1, 1, items=4)


def answers(stage: RandomisedResponse, truths: list[float], draws: int, seed: int = 0) -> torch.Tensor:
    """So many people's messages about the same truths."""
    keys = Rng.of(seed, "answers").fold(torch.arange(draws)).key
    sent = vmap(lambda key: stage.device({"w": torch.tensor(truths)}, Rng(key)))(keys)
    assert sent["w"].dtype == torch.bool
    return sent["w"]


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.5])
def test_a_bit_is_true_as_often_as_it_says_and_bits_are_independent(epsilon: float) -> None:
    """Within 4 standard errors: 1 of 16,000 such numbers is not."""
    stage, truths, draws = RandomisedResponse(epsilon), [1.0, 0.0, 1.0], 40_000
    right = (answers(stage, truths, draws) == (torch.tensor(truths) > 0.5)).double()
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert stage.truth == pytest.approx(p)
    assert np.abs(right.mean(0).numpy() - p).max() < 4 * math.sqrt(p * (1 - p) / draws)
    correlation = np.corrcoef(right.numpy().T)
    assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 4 / math.sqrt(draws)


def test_the_ratio_of_probabilities_is_exactly_what_is_charged() -> None:
    """Over every message about three entries: e^ε for one that differs, e^3ε for all, and no more."""
    stage = RandomisedResponse(1.25)
    p = stage.truth

    def chance(message: tuple[int, ...], truths: tuple[int, ...]) -> float:
        return math.prod(p if bit == truth else 1 - p for bit, truth in zip(message, truths, strict=True))

    everything = list(product((0, 1), repeat=3))
    assert sum(chance(message, (1, 0, 1)) for message in everything) == pytest.approx(1)
    for one, two in product(everything, repeat=2):
        apart = sum(a != b for a, b in zip(one, two, strict=True))
        worst = max(chance(message, one) / chance(message, two) for message in everything)
        assert math.log(worst) == pytest.approx(1.25 * apart, abs=1e-9)
    charged = {(one.observer, one.unit): one for one in stage.charges_for(entries=3)}
    ledger = Ledger()
    ledger.charge("one", stage.charges_for(entries=3))
    for observer in OBSERVERS:
        assert ledger.epsilon(observer, "user", delta=0.0).epsilon == pytest.approx(3 * 1.25)
        assert ledger.epsilon(observer, "report", delta=0.0).epsilon == pytest.approx(1.25)
        found = ledger.epsilon(observer, "interaction", delta=0.0)
        assert (found.epsilon, found.relation) == (pytest.approx(1.25), "add-remove")
    assert len(charged) == 9


@pytest.mark.parametrize("epsilon", [30.0, 40.0, 1000.0])
def test_a_lie_is_never_less_likely_than_it_says(epsilon: float) -> None:
    """However large ε is, the largest draw there is makes a lie of the answer."""

    class Largest(Rng):
        def bits(self, *shape: int) -> torch.Tensor:
            return torch.full(shape, -1)

        def fold(self, *parts: object) -> Rng:
            return self

    found = RandomisedResponse(epsilon).device({"w": torch.tensor([1.0, 0.0])}, Largest(torch.tensor(0)))
    assert found["w"].tolist() == [False, True]


def test_sums_and_pairs_are_unbiased() -> None:
    """Of 40,000 people of four kinds, within 4 standard errors: 15 numbers, p = 0.001 altogether."""
    stage, each = RandomisedResponse(1.0), 10_000
    kinds = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [1, 1, 1, 0, 1]]).float()
    messages = torch.cat([answers(stage, kind.tolist(), each, seed) for seed, kind in enumerate(kinds)])
    sums: Tree = {}
    for some in messages.split(777):
        Channel(stage).read({"w": some}, sums)
    found = Channel(stage).server(Total(sums, clients=4 * each), Rng.of(0))
    truth = each * kinds.T @ kinds
    # Randomising adds v to a bit's variance; to a product's v² + v (bᵢ + bⱼ), which is v² + v b of both.
    v = stage.spread
    counts = truth.diagonal()
    error = (4 * each * v**2 + v * (counts[:, None] + counts)).sqrt()
    error.diagonal().fill_(math.sqrt(4 * each * v))
    assert ((found.sum["w²"] - truth).abs() / error).max() < 4
    assert_close(found.sum["w²"].diagonal(), found.sum["w"])
    assert_close(found.sum["w²"], found.sum["w²"].T)
    assert float(error.max()) < 0.1 * each


def test_pairs_are_counted_by_hand() -> None:
    """Three messages about three entries: with p − q = 1 to the last digit they are what they say."""
    stage = RandomisedResponse(36.0)
    bits = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    sums: Tree = {}
    stage.read({"w": bits}, sums)
    found = stage.server(Total(sums, clients=3), Rng.of(0)).sum
    assert_close(found["w"], torch.tensor([3.0, 2.0, 1.0]))
    assert_close(found["w²"], torch.tensor([[3.0, 2, 1], [2, 2, 1], [1, 1, 1]]))


@pytest.mark.parametrize(("people", "size"), [(1, 1), (63, 5), (64, 8), (257, 33), (300, 1100)])
def test_the_kernel_counts_the_upper_half(people: int, size: int) -> None:
    bits = np.random.default_rng(people).random((people, size)) < 0.4
    pairs = np.full((size, size), 7, dtype=np.int32)
    kernels.count_pairs(bits, pairs)
    expected = bits.T.astype(np.int32) @ bits.astype(np.int32)
    assert np.array_equal(np.triu(pairs), np.triu(expected + 7))
    assert np.array_equal(np.tril(pairs, -1), np.tril(np.full_like(pairs, 7), -1))
    assert np.array_equal(products_in_torch(torch.from_numpy(bits)).numpy(), expected)


def test_a_large_matrix_is_decoded_block_by_block() -> None:
    """Larger than one block, so that nothing may be written over before it was read."""
    stage, size = RandomisedResponse(1.5), 1300
    bits = torch.from_numpy(np.random.default_rng(1).random((40, size)) < 0.3)
    sums: Tree = {}
    stage.read({"w": bits}, sums)
    found = stage.server(Total(sums, clients=40), Rng.of(0)).sum["w²"]
    p = stage.truth
    guess = (bits.double() - (1 - p)) / (2 * p - 1)
    expected = guess.T @ guess
    expected.diagonal().copy_(guess.sum(0))
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


def test_rows_are_whole_and_what_is_no_number_is_no() -> None:
    stage = RandomisedResponse(36.0)
    update = {"w": Rows(torch.tensor([2, 2, -1]), torch.ones(3), size=4), "v": torch.tensor([[0.6, torch.nan]])}
    sent = stage.device(update, Rng.of(0))
    assert sent["w"].tolist() == [False, False, True, False]
    assert sent["v"].tolist() == [[True, False]]
    sums: Tree = {}
    stage.read({name: value[None] for name, value in sent.items()}, sums)
    found = stage.server(Total(sums, clients=1), Rng.of(0)).sum
    assert found["v"].shape == (1, 2)
    assert found["v²"].shape == (2, 2)


def test_a_sum_without_pairs_is_decoded_too() -> None:
    """One message, as an attacker reads it."""
    stage = RandomisedResponse(2.0)
    p, total = stage.truth, Total({"w": torch.tensor([1.0, 0.0])}, clients=1)
    assert_close(stage.server(total, Rng.of(0)).sum["w"], torch.tensor([p / (2 * p - 1), (p - 1) / (2 * p - 1)]))


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([OneBit(1.0), RandomisedResponse(1.0)], "RandomisedResponse cannot follow one-bit reports"),
        ([Clip(1.0, 1), Laplace(1.0), RandomisedResponse(1.0)], "Randomised response cannot follow Laplace noise"),
        ([RandomisedResponse(1.0), RandomisedResponse(1.0)], "the server reads each message"),
        ([RandomisedResponse(1.0), OneBit(1.0)], "OneBit cannot follow randomised response"),
        ([RandomisedResponse(1.0), Shuffle()], "the server reads each message"),
        ([RandomisedResponse(1.0), SecureSum()], "SecureSum cannot follow randomised response"),
        ([RandomisedResponse(1.0), Clip(1.0)], "the server reads each message"),
        ([RandomisedResponse(1.0), Gaussian(1.0)], "the server reads each message"),
    ],
)
def test_nonsense_is_refused(stages: list[Stage], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        Channel(*stages)


def test_epsilon_is_a_positive_number() -> None:
    for epsilon in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(HomebodyError, match="ε of randomised response must be a number above 0"):
            RandomisedResponse(epsilon)


def test_only_a_method_that_knows_its_entries_can_be_charged() -> None:
    assert parse_channel(["randomised-response:epsilon=2"]).stages == (RandomisedResponse(2.0),)
    with pytest.raises(HomebodyError, match="only a method that says how many there are can use it"):
        Channel(RandomisedResponse(1.0)).charges(ONE)
    with pytest.raises(HomebodyError, match="such as dplcf"):
        releases(FedMF(uplink=Channel(RandomisedResponse(1.0), asks_rows=True)), ONE)


def test_channels_that_only_sum_have_nothing_to_read() -> None:
    channel = Channel(Clip(1.0))
    assert not channel.reads
    with pytest.raises(HomebodyError, match="summed as they come"):
        channel.read({}, {})


def test_a_simulation_reads_what_it_would_have_summed() -> None:
    """The sum of the messages is the same as without pairs, and each takes one bit an item."""
    from homebody.methods.dplcf import DPLCF

    method, simulator, rng = DPLCF(), Simulator(population()), Rng.of(3, "train")
    users = simulator.available()[:90]
    shared = method.init_shared(simulator.catalogue, rng)
    simulator.begin(method, rng)
    got = simulator.collect(method, shared, Cohort(users, "all", 90, 90, 120), rng.fold("round", 1), 1)
    messages = [simulator.message(method, shared, int(user), rng.fold("round", 1))["history"] for user in users]
    p = method.response.truth
    guess = (torch.stack(messages).double() - (1 - p)) / (2 * p - 1)
    assert_close(got.total.sum["history"].double(), guess.sum(0), rtol=1e-5, atol=1e-4)
    off = ~torch.eye(120, dtype=torch.bool)
    assert_close(got.total.sum["history²"].double()[off], (guess.T @ guess)[off], rtol=1e-5, atol=1e-3)
    assert 90 * 120 / 8 <= got.bytes_up < 90 * 120 / 8 + 5

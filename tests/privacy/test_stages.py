"""The stages: each bound holds, each noise is what it says, and a noise that is not is noticed.

Statistical tests have fixed seeds. Each states how often a correct stage would fail it under another seed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.func import vmap

from homebody import ops
from homebody.core import Cohort, Rows, Total, Tree
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods.fedmf import FedMF
from homebody.privacy import Channel, Clip, Gaussian, GaussianRelease, Laplace, OneBit, SecureSum, Shuffle, stages
from homebody.privacy.accountant import epsilon
from homebody.privacy.grid import gaussian
from homebody.rng import Rng
from homebody.simulation import Simulator

numbers = st.floats(-(2.0**127), 2.0**127, width=32)


@st.composite
def updates(draw: st.DrawFn) -> Tree:
    """A dense tensor, and rows with duplicates and padding, whose values may be huge, tiny or all zero."""
    length, width = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    index = draw(st.lists(st.integers(-1, 3), min_size=length, max_size=length))
    value = draw(st.lists(numbers, min_size=length * width, max_size=length * width))
    dense = draw(st.lists(numbers, min_size=1, max_size=5))
    rows = Rows(torch.tensor(index, dtype=torch.int64), torch.tensor(value).view(length, width), 4)
    return {"rows": rows, "dense": torch.tensor(dense)}


def norm(update: Tree, order: int) -> float:
    """Of the table that the server adds, in 64 bits."""
    parts = []
    for value in update.values():
        if isinstance(value, Rows):
            wide = Rows(value.index, value.value.double(), value.size).dense()
        else:
            wide = value.double()
        parts.append(wide.flatten())
    return float(torch.linalg.vector_norm(torch.cat(parts), ord=order))


@settings(max_examples=300, deadline=None)
@given(updates(), st.sampled_from([1, 2]), st.floats(1e-3, 1e6))
def test_a_clipped_update_never_exceeds_its_bound(update: Tree, order: int, bound: float) -> None:
    clipped = Clip(bound, order=order).device(update, Rng.of(0))
    assert norm(clipped, order) <= bound


@settings(max_examples=100, deadline=None)
@given(updates(), st.sampled_from([1, 2]))
def test_a_clip_of_each_tensor_bounds_each_and_all(update: Tree, order: int) -> None:
    clip = Clip({"rows": 0.5, "dense": 2.0}, order=order)
    clipped = clip.device(update, Rng.of(0))
    assert norm({"rows": clipped["rows"]}, order) <= 0.5
    assert norm({"dense": clipped["dense"]}, order) <= 2.0
    assert norm(clipped, order) <= clip.whole * (1 + 1e-12)


def test_clipping_by_hand() -> None:
    """Rows 1 and 1 add up to (3, 4); with the 12 the norm is 13, and the padding's 99 counts for nothing."""
    rows = Rows(torch.tensor([1, -1, 1]), torch.tensor([[1.0, 1.0], [99.0, 99.0], [2.0, 3.0]]), 2)
    update = {"rows": rows, "dense": torch.tensor(12.0)}
    half = Clip(6.5).device(update, Rng.of(0))
    assert half["rows"].dense().flatten().tolist() == pytest.approx([0.0, 0.0, 1.5, 2.0], rel=1e-5)
    assert half["dense"].item() == pytest.approx(6.0, rel=1e-5)
    first = Clip(9.5, order=1).device(update, Rng.of(0))
    assert first["dense"].item() == pytest.approx(6.0, rel=1e-5)
    assert Clip(13.1).device(update, Rng.of(0))["dense"].item() == 12.0  # what is within stays, bit by bit


def test_opposite_rows_of_one_index_are_nothing() -> None:
    rows = Rows(torch.tensor([2, 2, 0]), torch.tensor([[1e9], [-1e9], [1.0]]), 3)
    assert Clip(1.5).device({"w": rows}, Rng.of(0))["w"].dense().flatten().tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_sent_as_zeros(bad: float) -> None:
    update = {"w": torch.tensor([1.0, bad]), "rows": Rows(torch.tensor([0]), torch.tensor([[1.0]]), 1)}
    sent = Clip(1.0).device(update, Rng.of(0))
    assert sent["w"].tolist() == [0.0, 0.0]
    assert sent["rows"].dense().tolist() == [[0.0]]


def test_a_tensor_without_a_norm_is_refused() -> None:
    with pytest.raises(HomebodyError, match="names no norm for the update's 'bias'"):
        Clip({"item": 1.0}).device({"item": torch.ones(1), "bias": torch.ones(1)}, Rng.of(0))


def test_sensitivities() -> None:
    for relation, expected in (("add-remove", 3.0), ("replace-one", 6.0)):
        assert Channel(Clip(3.0), Gaussian(1.0, relation)).stages[1].sensitivity == expected  # type: ignore
    clips = Clip({"a": 3.0, "b": 4.0}, order=1)
    assert Channel(clips, Laplace(1.0)).stages[1].sensitivity == 14.0  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=8))
def test_coalesced_rows_are_the_same_table(index: list[int]) -> None:
    value = torch.arange(1.0, 1 + 2 * len(index)).view(-1, 2)
    rows = Rows(torch.tensor(index), value, 4)
    once = rows.coalesced()
    assert torch.equal(once.dense(), rows.dense())
    real = [one for one in once.index.tolist() if one >= 0]
    assert real == sorted({one for one in index if one >= 0})
    assert torch.equal(once.value[len(real) :], torch.zeros(len(index) - len(real), 2))
    twice = vmap(lambda own: own.coalesced())(Rows(torch.stack([rows.index] * 2), torch.stack([value] * 2), 4))
    assert torch.equal(twice.index[1], once.index)
    assert torch.equal(twice.value[1], once.value)


def fits(draws: torch.Tensor, distribution: stats.rv_continuous, scale: float) -> bool:
    """Kolmogorov and Smirnov; a correct sample is rejected once in a million."""
    return float(stats.kstest(draws.double().numpy().ravel(), distribution(scale=scale).cdf).pvalue) > 1e-6


DRAWS = 100_000


@pytest.mark.parametrize(("relation", "scale"), [("replace-one", 3.0), ("add-remove", 1.5)])
def test_gaussian_noise_has_z_times_the_sensitivity(relation: str, scale: float) -> None:
    channel = Channel(Clip(2.0), Gaussian(0.75, relation))
    total = channel.server(Total({"w": torch.zeros(DRAWS // 4, 4)}, 2), Rng.of(1))
    assert fits(total.sum["w"], stats.norm, scale)
    assert not fits(total.sum["w"] / 2, stats.norm, scale)
    assert total.clients == 2


def test_laplace_noise_on_the_sum_and_on_the_device() -> None:
    on_sum = Channel(Clip(1.0, order=1), Laplace(2.5, where="sum"))
    assert fits(on_sum.server(Total({"w": torch.zeros(DRAWS)}, 1), Rng.of(2)).sum["w"], stats.laplace, 2.5)
    on_device = Channel(Clip(1.0, order=1), Laplace(2.5))
    rows = Rows(torch.tensor([[3], [-1]]), torch.zeros(2, 1, 1), DRAWS // 2)
    sent = vmap(lambda key, own: on_device.device(own, Rng(key)))(Rng.of(3).fold(torch.arange(2)).key, {"w": rows})
    assert fits(sent["w"], stats.laplace, 2.5)  # also where the device touched nothing
    assert abs(np.corrcoef(sent["w"].flatten(1).numpy())[0, 1]) < 0.03  # each device draws its own
    untouched = Total({"w": torch.ones(3)}, 1)
    assert torch.equal(on_device.server(untouched, Rng.of(2)).sum["w"], torch.ones(3))


def test_tensors_get_noise_of_their_own() -> None:
    noise = Channel(Clip(1.0), Gaussian(1.0)).server(Total({"a": torch.zeros(9), "b": torch.zeros(9)}, 1), Rng.of(0))
    assert not torch.equal(noise.sum["a"], noise.sum["b"])


def lower_bound(channel: Channel, gap: float, scale: float, delta: float) -> float:
    """ε that 10⁵ releases of each of two neighbours refute, with confidence 99.9 % (Clopper and Pearson)."""

    def above(value: float, seed: int, threshold: float) -> int:
        keys = Rng.of(seed).fold(torch.arange(DRAWS)).key
        release = vmap(lambda key: channel.server(Total({"w": torch.full((1,), value)}, 1), Rng(key)).sum["w"])
        return int((release(keys) > threshold).sum())

    best = 0.0
    for threshold in (gap / 2 + step * scale / 2 for step in range(1, 5)):
        hits, misses = above(gap, 1, threshold), above(0.0, 2, threshold)
        least = stats.beta.ppf(5e-4, hits, DRAWS - hits + 1)
        most = stats.beta.ppf(1 - 5e-4, misses + 1, DRAWS - misses)
        best = max(best, math.log(max(least - delta, 1e-12) / most))
    return best


def test_noise_of_half_the_scale_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mechanism-level audit: what is certified is not refuted, and a planted bug is."""
    channel, delta = Channel(Clip(1.0), Gaussian(1.0)), 1e-3
    certified = epsilon([(GaussianRelease(1.0, "replace-one"), 1)], delta).epsilon
    assert lower_bound(channel, 2.0, 2.0, delta) <= certified
    right = stages.gaussian
    monkeypatch.setattr(stages, "gaussian", lambda rng, depth, *shape: right(rng, depth - 1, *shape))
    assert lower_bound(channel, 2.0, 2.0, delta) > certified


@pytest.mark.parametrize("power", [0.1, 1.0, 2.5, 8.0])
def test_the_ratio_of_a_report_by_enumeration(power: float) -> None:
    """Over all pairs of values and both answers: never above e^ε, and reached at the ends."""
    values = torch.linspace(-1, 1, 201, dtype=torch.float64)
    one = OneBit(power).chance(values)
    e = math.exp(power)
    assert torch.allclose(one, (values * (e - 1) + e + 1) / (2 * e + 2), rtol=1e-12)
    for answer in (one, 1 - one):
        ratio = answer[:, None] / answer[None, :]
        assert ratio.max().item() == pytest.approx(e, rel=1e-9)


def reported(stage: OneBit, update: Tree, clients: int, seed: int) -> Tree:
    """What so many clients with the same update send, stacked."""
    keys = Rng.of(seed).fold(torch.arange(clients)).key
    sent: Tree = vmap(lambda key: stage.device(update, Rng(key)))(keys)
    return sent


def test_bits_and_entries_have_their_chances() -> None:
    """Eight counts, each within 5 standard deviations: a correct stage fails once in 200,000 times."""
    update = {"w": torch.tensor([0.5, -3.0]), "v": Rows(torch.tensor([1]), torch.tensor([[0.0]]), 2)}
    sent = reported(OneBit(1.5, k=2), update, DRAWS // 2, 5)
    assert list(sent) == ["w[2]", "v[2,1]"]
    chance = OneBit(1.5).chance(torch.tensor([0.5, -1.0, 0.0, 0.0])).tolist()
    for number, one in enumerate(chance):
        pairs = sent["w[2]" if number < 2 else "v[2,1]"].index
        for bit, expected in ((0, (1 - one) / 4), (1, one / 4)):
            count = int((pairs == 2 * (number % 2) + bit).sum())
            assert abs(count - DRAWS * expected) < 5 * math.sqrt(DRAWS * expected * (1 - expected))


@pytest.mark.parametrize("k", [1, 7])
def test_the_decoded_sum_is_unbiased(k: int) -> None:
    """Within 4 standard errors in each of 6 entries: a correct stage fails four times in ten thousand."""
    update = {"w": torch.tensor([[0.25, -1.0], [0.0, 4.0]]), "b": torch.tensor([-0.5, 1.0])}
    stage, clients = OneBit(1.0, k), 40_000
    sent = reported(stage, update, clients, 11 + k)
    sums: Tree = {}
    for name, rows in sent.items():
        sums[name] = Rows(rows.index.flatten(), rows.value.flatten().float(), rows.size).dense()
    read = stage.server(Total(sums, clients), Rng.of(0)).sum
    assert read["w"].shape == (2, 2)
    mean = torch.cat([read["w"].flatten(), read["b"]]) / clients
    truth = torch.tensor([0.25, -1.0, 0.0, 1.0, -0.5, 1.0])
    # One report reads ±B at an entry with probability 1/6, and 0 elsewhere.
    each = 6 / math.tanh(0.5) / math.sqrt(6)
    assert ((mean - truth).abs() < 4 * each / math.sqrt(k * clients)).all()


def test_a_report_takes_four_bytes_and_a_bit(few: Split) -> None:
    method = FedMF(factors=2, uplink=Channel(OneBit(1.0, k=16)))
    assert collect(method, few, [0, 1, 2]).bytes_up == -(-3 * 16 * 33 // 8)


def test_a_simulation_spares_filling_tables_and_counts_them(few: Split) -> None:
    """What a secure sum fills changes no sum; each device is said to send 50 rows of two numbers all the same."""
    users, noise = list(range(9)), (SecureSum(), Gaussian(1.0))
    spared = collect(FedMF(factors=2, uplink=Channel(Clip(0.5), *noise)), few, users)
    filled = collect(FedMF(factors=2, uplink=Channel(Clip(0.5), *noise)), few, users, fused=False)
    assert spared.bytes_up == filled.bytes_up == 9 * 50 * 2 * 4
    torch.testing.assert_close(spared.total.sum["item"], filled.total.sum["item"])


def test_values_that_are_not_finite_say_nothing_special() -> None:
    sent = reported(OneBit(20.0), {"w": torch.tensor([math.nan])}, 1000, 0)
    assert 400 < int((sent["w[1]"].index == 1).sum()) < 600


@pytest.fixture(scope="module")
def few() -> Split:
    return leave_one_out(load("synthetic:users=12,items=50,mean=9"))


def collect(method: FedMF, split: Split, users: list[int], *, fused: bool = True):  # type: ignore[no-untyped-def]
    runtime = Simulator(split, fused=fused)
    runtime.begin(method, Rng.of(0, "clients"))
    shared = method.init_shared(runtime.catalogue, Rng.of(0, "shared"))
    cohort = Cohort(np.array(users), "fixed", len(users), len(runtime.available()))
    return runtime.collect(method, shared, cohort, Rng.of(0, "round"), 1)


def test_two_clients_through_a_channel_by_hand(few: Split) -> None:
    """Their updates as a plain channel sends them, clipped, summed and noised with the numbers of the stream."""
    plain = FedMF(factors=2)
    alone = [collect(plain, few, [user]).total.sum["item"].double() for user in (3, 5)]
    bound = float(alone[0].norm()) / 2
    method = replace(plain, uplink=Channel(Clip(bound), SecureSum(), Gaussian(0.01)))
    got = collect(method, few, [3, 5])
    clipped = sum(one * min(1.0, bound / float(one.norm())) for one in alone)
    stream = Rng.of(0, "round").private.fold("server").fold(2).fold("item")
    grid = method.uplink.facts.grid
    assert grid is not None
    assert grid.step * 2**grid.depth == pytest.approx(0.01 * 2 * bound)
    noise = grid.doubles(gaussian(stream, grid.depth, *alone[0].shape))
    assert torch.allclose(got.total.sum["item"].double(), clipped + noise, rtol=1e-4, atol=1e-5 * bound)
    assert got.bytes_up == 2 * 4 * alone[0].numel()  # whole tables: rows would tell what was touched
    assert len(collect(plain, few, [3]).total.sum["item"].nonzero()) < alone[0].numel()


@pytest.mark.parametrize(
    "channel",
    [
        Channel(Clip(0.5), Gaussian(1.0)),
        Channel(Clip(0.5), SecureSum(), Gaussian(1.0)),
        Channel(Clip({"item": 0.5}, order=1), Laplace(0.1, where="sum")),
    ],
)
def test_fused_and_plain_cohorts_pass_a_channel_alike(few: Split, channel: Channel) -> None:
    method = FedMF(factors=4, item_rate=1.0, uplink=channel)
    fused, plain = (collect(method, few, list(range(10)), fused=one).total.sum["item"] for one in (True, False))
    assert torch.allclose(fused, plain, rtol=1e-4, atol=1e-5)
    assert not torch.equal(fused, torch.zeros_like(fused))


def test_without_a_channel_noise_refuses_to_act() -> None:
    """It would have no measure, and no noise at all would look like noise."""
    with pytest.raises(HomebodyError, match="put it into a Channel"):
        Gaussian(1.0).server(Total({"w": torch.zeros(1)}, 1), Rng.of(0))
    with pytest.raises(HomebodyError, match="put it into a Channel"):
        Laplace(1.0).device({"w": torch.zeros(1)}, Rng.of(0))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Clip(0.0), "above 0, not 0.0"),
        (lambda: Clip(math.inf), "not inf"),
        (lambda: Clip({}), "at least one tensor"),
        (lambda: Clip({"w": -1.0}), "not -1.0"),
        (lambda: Clip(1.0, order=3), "order 1 or 2"),
        (lambda: Gaussian(-1.0), "from 0, not -1.0"),
        (lambda: Gaussian(math.nan), "not nan"),
        (lambda: Gaussian(1.0, "swap"), "no relation 'swap'"),
        (lambda: Laplace(1.0, where="proxy"), "no place for Laplace noise 'proxy'"),
        (lambda: Laplace(1.0, relation="add-remove"), "its relation is replace-one"),
        (lambda: Laplace(1.0, where="sum", unbounded=True), "leave out where"),
        (lambda: OneBit(0.0), "above 0"),
        (lambda: OneBit(1.0, k=0), "whole number from 1"),
        (lambda: Shuffle(users=0), "whole number from 1"),
    ],
)
def test_values_that_make_no_sense_are_refused(make, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(HomebodyError, match=sentence):
        make()


def test_what_was_told_of_an_entry_is_the_mean_over_its_reports() -> None:
    stage = OneBit(2.0, k=5)
    counts = torch.tensor([1.0, 3.0, 0.0, 0.0, 2.0, 0.0])  # of entry 0: one zero, three ones; of entry 2: two zeros
    total = stage.server(Total({"w[3]": counts}, clients=9), Rng.of(0))
    bias = math.tanh(1.0)
    torch.testing.assert_close(total.told["w"], torch.tensor([2 / 4, 0 / 6, -2 / 2]) / bias)
    torch.testing.assert_close(total.sum["w"], torch.tensor([2.0, 0.0, -2.0]) * 3 / bias / 5)


@pytest.mark.parametrize("epsilon", [2.5, 36.0, 37.0, 50.0, 800.0])
def test_no_report_is_ever_certain_on_the_grid_that_is_drawn_on(epsilon: float) -> None:
    """Enumerated: of 2⁵² equally likely draws, how many say 1 for each of the two ends."""
    ends = ops.grid(OneBit(epsilon).chance(torch.tensor([-1.0, 1.0])))
    low, high = ends.tolist()
    assert low >= 1
    assert high <= 2**52 - 1
    assert math.log(math.ceil(high) / math.ceil(low)) <= epsilon * (1 + 1e-3)
    keys = Rng.of(3).fold(torch.arange(4))
    same = ops.tosses_of_many(keys, torch.tensor([[1.0, -1.0]] * 4), math.tanh(epsilon / 2))
    plain = OneBit(epsilon, k=2)
    for number in range(4):
        own = Rng.of(3).fold(number)
        assert same[number].tolist() == plain._toss(torch.tensor([1.0, -1.0]), own).tolist()

"""Sums of whole numbers, noise that parties add between them, and what it costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch.func import vmap

from homebody.adversary.canaries import draw_releases
from homebody.adversary.inspection import inspect
from homebody.core import Cohort, Rows, Total, Tree
from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.federation.wire import refuse_unfit
from homebody.methods.fedmf import FedMF
from homebody.privacy import (
    Budget,
    Channel,
    Clip,
    Gaussian,
    GaussianRelease,
    Laplace,
    Ledger,
    OneBit,
    Ring,
    Sampling,
    SecureSum,
    ShuffledReports,
    Skellam,
    SkellamRelease,
    Stage,
    event_from_json,
    noise_kernels,
)
from homebody.privacy.accountant import epsilon
from homebody.privacy.budget import calibrated
from homebody.privacy.events import Event, event_as_json
from homebody.privacy.mechanisms import rdp, rdp_orders, sampled_rdp, skellam_rdp, terms
from homebody.privacy.ring import COARSEST, LENGTHENED, WRAPS, fitting, longest, reach_of_noise, rounded
from homebody.privacy.secure_sum import honest
from homebody.privacy.skellam import UNIT, skellam, table
from homebody.privacy.specs import parse_channel, stage_texts
from homebody.rng import Rng, SystemRng
from homebody.simulation import Simulator
from homebody.training import fit

SOME = Cohort(np.arange(30), "fixed", 30, 4800)
ALL = Cohort(np.arange(100), "all", 100, 100)


@pytest.fixture(scope="module")
def split() -> Split:
    return leave_one_out(load("synthetic:users=60,items=400,mean=10"))


class TestWholeNumbers:
    @pytest.mark.parametrize("entries", [0, 1, 1000, 54_000, 117_000, 118_000, 10**6, 10**9])
    def test_the_norm_has_as_few_steps_as_rounding_allows(self, entries: int) -> None:
        steps = fitting(entries)
        assert steps >= 2**12
        assert steps & (steps - 1) == 0
        assert longest(steps, entries) <= LENGTHENED * steps
        assert steps == 2**12 or longest(steps // 2, entries) > LENGTHENED * steps // 2

    def test_rounding_keeps_the_mean_and_whole_numbers(self) -> None:
        """40,000 draws of each fraction: within 5 deviations, ½/200 at most, of it."""
        given = torch.tensor([0.1, 0.25, -0.9, 3.0, -2.0, 0.0])
        keys = Rng.of(3).fold(torch.arange(40_000)).key
        drawn = vmap(lambda key: rounded({"w": given}, Rng(key), 1.0)["w"])(keys).double()
        assert (drawn.mean(0) - given).abs().max() < 5 * 0.5 / 200
        assert set(drawn[:, 0].tolist()) == {0.0, 1.0}
        assert torch.equal(drawn[:, 3:], given[3:].double().expand(40_000, 3))

    def test_no_update_is_longer_than_noise_is_measured_against(self) -> None:
        """Of 2,000 updates at the clip's norm a part is rounded again: without that, some would be longer."""
        entries = 400
        steps = fitting(entries)
        most = longest(steps, entries)
        flat = torch.randn(2000, entries, generator=torch.Generator().manual_seed(1))
        flat = flat / flat.norm(dim=1, keepdim=True) * (1 - 2**-20)
        keys = Rng.of(4).fold(torch.arange(2000)).key
        free = vmap(lambda key, own: rounded({"w": own}, Rng(key), steps)["w"])(keys, flat)
        held = vmap(lambda key, own: rounded({"w": own}, Rng(key), steps, most)["w"])(keys, flat)
        assert (free.double().norm(dim=1) > most).any()
        assert (held.double().norm(dim=1) <= most).all()
        assert (held.double() - steps * flat.double()).abs().max() < 1

    def test_what_stays_too_long_is_rounded_toward_zero_and_else_to_zeros(self) -> None:
        halves = torch.full((300,), 1.5)
        assert rounded({"w": halves}, Rng.of(0), 1.0, math.sqrt(300))["w"].tolist() == [1] * 300
        assert rounded({"w": halves}, Rng.of(0), 1.0, 17.0)["w"].tolist() == [0] * 300
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0])
        assert rounded({"w": odd}, Rng.of(0), 1.0, 9.0)["w"].tolist() == [0, 0, 0, 2]

    def test_rounding_depends_neither_on_company_nor_on_padding(self) -> None:
        rows = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(2))
        other = torch.randn(3, 5, generator=torch.Generator().manual_seed(3))
        index = torch.tensor([0, 2, 7, 8]).expand(3, 4)
        keys = Rng.of(5).fold(torch.arange(3)).key

        def own(key: torch.Tensor, at: torch.Tensor, row: torch.Tensor, rest: torch.Tensor) -> Tree:
            return rounded({"item": Rows(at, row, 9), "w": rest}, Rng(key), 100.0, 1e5)

        together = vmap(own)(keys, index, rows, other)
        for n in range(3):
            padded = torch.cat([rows[n], torch.zeros(2, 2)]), torch.cat([index[n], torch.tensor([-1, -1])])
            alone = own(keys[n], padded[1], padded[0], other[n])
            assert torch.equal(alone["w"], together["w"][n])
            assert isinstance(alone["item"], Rows)
            assert torch.equal(alone["item"].value[:4], together["item"].value[n])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3), min_size=1, max_size=5),
)
def test_a_ring_adds_whole_numbers_exactly(width: int, messages: list[list[int]]) -> None:
    exact = [sum(column) for column in zip(*messages, strict=True)]
    ring = Ring(width, 0.25, whole=True)
    total = np.zeros(3, dtype=np.uint64)
    for message in messages:
        sent = ring.encode({"b": torch.tensor(message[1:]), "a": torch.tensor(message[:1])}, Rng.of(0))
        again = ring.unpack(ring.pack(sent))
        assert np.array_equal(again, sent)
        assert len(ring.pack(sent)) == 3 * width
        mask = ring.unpack(np.random.default_rng(width).bytes(3 * width))
        masked = ring.add(sent, mask)
        assert np.array_equal(ring.subtract(masked, mask), sent)
        total = ring.add(total, sent)
    got = ring.decode(total, {"b": (2,), "a": (1,)})
    half = 1 << (8 * width - 1)
    wrapped = [(number + half) % (2 * half) - half for number in exact]
    assert [*got["a"].tolist(), *got["b"].tolist()] == wrapped


class TestRing:
    def test_its_width_is_the_fewest_bytes(self) -> None:
        assert [Ring.fitted(reach, 1.0).width for reach in (127, 128, 32767, 32768, 2.0**62, 2.0**63 - 1024)] == [
            *(1, 2, 2, 3, 8, 8)
        ]
        with pytest.raises(HomebodyError, match="does not fit into 64 bits"):
            Ring.fitted(2.0**63, 1.0)

    @pytest.mark.parametrize("variance", [0.5, 40.0, 3e6])
    @pytest.mark.parametrize("entries", [1, 54_000])
    def test_noise_leaves_it_with_less_than_the_stated_probability(self, variance: float, entries: int) -> None:
        reach = reach_of_noise(variance, entries)
        beyond = 2 * entries * stats.skellam.sf(math.floor(reach), variance / 2, variance / 2)
        assert beyond < WRAPS
        assert reach < 10 + 12 * math.sqrt(variance + 9)  # and it is not much wider than it must be

    @pytest.mark.parametrize(
        "channel",
        [
            Channel(Clip(2.0), Skellam(1.0), SecureSum()),
            Channel(Clip(2.0), SecureSum()),
            Channel(Clip(2.0), SecureSum(range=0.125)),
            Channel(SecureSum(range=3.0)),
            Channel(Clip(2.0), SecureSum(), Gaussian(1.0)),
        ],
        ids=["skellam", "clipped", "clip and range", "range", "gaussian"],
    )
    def test_what_parties_add_is_the_sum_of_their_people(self, channel: Channel) -> None:
        """Three parties of two people. Without noise of their own, the sum is off by a step each at most."""
        generator = torch.Generator().manual_seed(6)
        updates = [
            {"item": Rows(torch.tensor([1, 4]), torch.randn(2, 3, generator=generator), 5), "b": torch.ones(2)}
            for _ in range(6)
        ]
        fitted = channel.among(3)
        ring = fitted.ring(17, people=6)
        sent = [fitted.party(updates[n : n + 2], ring, Rng.of(7, n)) for n in (0, 2, 4)]
        decoded = ring.decode(
            sum(sent[1:], start=sent[0]) & ring.mask,
            {"item": (5, 3), "b": (2,)},
        )
        quiet = Channel(*(stage for stage in channel.stages if not isinstance(stage, Gaussian | Skellam)))
        exact: Tree = {}
        for update in updates:
            for name, value in quiet.device(update, Rng.of(0)).items():
                exact[name] = exact.get(name, 0) + (value.dense() if isinstance(value, Rows) else value).double()
        found = {name: value.double() * (ring.step if ring.whole else 1) for name, value in decoded.items()}
        noise = fitted.deviation(17, 3) if channel.facts.skellam else 0.0
        for name, value in exact.items():
            assert (found[name] - value).abs().max() <= 6 * ring.step + 6 * noise + 1e-6
            assert value.abs().max() > 0
        if channel.facts.skellam:
            assert ring.whole
            after = fitted.server(Total(decoded, 6), Rng.of(0)).sum
            assert torch.equal(after["b"], (decoded["b"].double() * ring.step).float())
            again = fitted.party(updates[:2], ring, Rng.of(8))
            assert not np.array_equal(again, sent[0])

    @pytest.mark.parametrize(
        ("stages", "sentence"),
        [
            ([SecureSum()], "put a Clip before it, or give its range, as in secure-sum:range=4"),
            ([Clip(1.0, order=1), Laplace(1.0), SecureSum()], "nothing bounds them after Laplace noise"),
            ([OneBit(1.0), SecureSum()], "nothing bounds them after one-bit reports"),
        ],
    )
    def test_what_has_no_range_has_no_ring(self, stages: list[Stage], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            Channel(*stages).ring(10, people=4)

    def test_a_ring_that_cannot_hold_the_sum_is_refused(self) -> None:
        with pytest.raises(HomebodyError, match="does not fit into 64 bits"):
            Channel(Clip(1.0), Skellam(1.0), SecureSum()).ring(10, people=10**16)

    def test_a_range_cuts_numbers_off_in_simulations_too(self, split: Split) -> None:
        channel = Channel(SecureSum(range=1e-3))
        assert not channel.stages[0].keeps_sum
        assert Channel(SecureSum()).stages[0].keeps_sum
        sums = [a_round(FedMF(factors=4, uplink=one), split).total.sum["item"] for one in (channel, Channel())]
        assert sums[0].abs().max() <= 30 * 1.0001e-3 < sums[1].abs().max()


def exact_log_pmf(variance: float, largest: int) -> NDArray[np.float64]:
    """log P(0), log P(1), … of a Skellam variable, by ratios of Bessel functions, from the far end."""
    ratios, ratio = [], 0.0
    for k in range(largest + 200, 0, -1):
        ratio = 1 / (2 * k / variance + ratio)
        ratios.append(ratio)
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios[::-1]))])[: largest + 1]
    return logs - np.logaddexp.reduce(np.concatenate([logs, logs[1:]]))


class TestDraws:
    @pytest.mark.parametrize("units", [UNIT // 2, 37 * UNIT + 5, 5000 * UNIT])
    def test_the_table_is_right_to_120_bits(self, units: int) -> None:
        """Against Bessel functions in 400 bits, by ratios from a start that lies twice as far out."""
        from mpmath import mp, mpf

        high, low, _, smallest = table(units)
        with mp.workprec(400):
            v, ratio, ratios = mpf(units) / UNIT, mpf(0), []
            for k in range(-2 * smallest, 0, -1):
                ratio = 1 / (2 * k / v + ratio)
                ratios.append(ratio)
            mass = [mp.exp(-v) * mp.besseli(0, v)]
            for ratio in ratios[::-1]:
                mass.append(mass[-1] * ratio)
            assert abs(mass[3] / (mp.exp(-v) * mp.besseli(3, v)) - 1) < mpf(2) ** -380
            below = mp.fsum(mass[-smallest + 1 :])
            for place, k in enumerate(range(smallest, 1 - smallest)):
                below += mass[abs(k)]
                found = int(high[place]) << 64 | int(low[place])
                assert abs(found - int(below * 2**128)) < 2**8
        assert len(high) == 1 - 2 * smallest
        assert (np.diff(high.astype(object)) >= 0).all()

    @pytest.mark.random_draws
    @pytest.mark.parametrize("rng", [Rng.of(12), SystemRng()], ids=["seed", "system"])
    @pytest.mark.parametrize("variance", [0.5, 40.0, 3000.0])
    def test_every_whole_number_has_its_chance(self, variance: float, rng: Rng) -> None:
        """10⁶ draws; Pearson's χ² over all cells that 200 or more are expected in, and what is left as one. A correct
        sampler is refused with probability 1e-10, to within a factor of ten."""
        draws = 1_000_000
        drawn = skellam(rng, round(variance * UNIT), draws).numpy()
        far = int(12 * math.sqrt(variance) + 20)
        counts = np.bincount(drawn + far, minlength=2 * far + 1)
        for scale, least, most in ((1.0, 1e-10, 1.0), (1.06, 0.0, 1e-30)):  # a deviation of 3 % more would be seen
            half = np.exp(exact_log_pmf(scale * variance, far))
            expected = draws * np.concatenate([half[:0:-1], half])
            kept = expected >= 200
            seen = np.append(counts[kept], draws - counts[kept].sum())
            wanted = np.append(expected[kept], max(draws - expected[kept].sum(), 1.0))
            chance = stats.chi2.sf(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1)
            assert least <= chance <= most

    def test_a_draw_by_hand(self) -> None:
        """64 bits decide; where a boundary has the same, 64 more do."""
        known = table(5 * UNIT)
        high, low = [int(word) for word in known.high], [int(word) for word in known.low]
        three = 3 - known.smallest

        def read(word: int, *more: int) -> int:
            out, ties = np.empty(1, dtype=np.int64), np.array([*more, 0, 0], dtype=np.uint64)
            taken = noise_kernels.skellam_read(np.array([word], dtype=np.uint64), ties, *known, out)
            assert taken == (1 if more else 0)
            return int(out[0])

        assert read(high[three] - 1) == 3
        assert read(high[three] + 1) == 4
        assert read(high[three], low[three] - 1) == 3
        assert read(high[three], low[three]) == 4
        assert read(high[three], low[three] + 1) == 4
        # Beyond 2⁻¹²⁸ nothing is drawn: the table begins with zeros and ends with ones.
        assert low[-known.smallest - 44] == 0 < low[-known.smallest - 43]
        assert read(0, 0) == -43
        assert read(2**64 - 1, 2**64 - 2) <= 44

    def test_ties_beyond_what_was_drawn_for_them_are_counted(self) -> None:
        known = table(5 * UNIT)
        words = np.full(3, known.high[0 - known.smallest], dtype=np.uint64)
        out = np.empty(3, dtype=np.int64)
        assert noise_kernels.skellam_read(words, np.zeros(2, dtype=np.uint64), *known, out) == 3

    def test_streams_do_not_depend_on_padding_or_on_company(self) -> None:
        assert torch.equal(skellam(Rng.of(3), 99 * UNIT, 5, 2), skellam(Rng.of(3), 99 * UNIT, 9, 2)[:5])
        keys = Rng.of(4).fold(torch.arange(7)).key
        together = vmap(lambda key: skellam(Rng(key), 99 * UNIT, 3))(keys)
        assert torch.equal(together, torch.stack([skellam(Rng(key), 99 * UNIT, 3) for key in keys]))

    def test_a_large_variance_is_drawn_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("homebody.privacy.skellam._WIDEST", 40)
        drawn = skellam(Rng.of(5), 90 * UNIT, 200_000).double()
        assert float(drawn.var()) == pytest.approx(90, rel=5 * math.sqrt(2 / 200_000))


def a_round(method: FedMF, split: Split, clients: int = 30, *, fused: bool = True) -> object:
    runtime = Simulator(split, fused=fused)
    runtime.begin(method, Rng.of(0, "clients"))
    shared = method.init_shared(runtime.catalogue, Rng.of(0, "shared"))
    cohort = Cohort(np.arange(clients), "fixed", clients, len(runtime.available()))
    return runtime.collect(method, shared, cohort, Rng.of(1, "round"), 1)


class TestSimulation:
    @pytest.mark.parametrize(("least", "colluding"), [(2 / 3, 0.1), (1.0, 0.0)])
    def test_the_noise_of_all_parties_is_what_is_stated(self, least: float, colluding: float) -> None:
        """n/h times the variance that is counted on: 320,000 numbers, within 1 %, which is 4 deviations."""
        channel = Channel(Clip(2.0), Skellam(0.01, least=least, colluding=colluding), SecureSum()).among(20)
        entries, parties = 320_000, 20
        ring = channel.ring(entries, parties)
        total = np.zeros(entries, dtype=np.uint64)
        for party in range(parties):
            total = ring.add(total, channel.party([{"w": torch.zeros(entries)}], ring, Rng.of(9, party)))
        noise = channel.server(Total(ring.decode(total, {"w": (entries,)}), parties), Rng.of(0)).sum["w"].double()
        counted = 0.01 * 2 * 2.0 * longest(fitting(entries), entries) / fitting(entries)
        excess = parties / honest(parties, least, colluding)
        assert float(noise.var()) == pytest.approx(excess * counted**2, rel=0.01)
        assert channel.deviation(entries, parties) == pytest.approx(math.sqrt(excess) * counted, rel=1e-3)

    def test_there_is_little_more_noise_than_is_counted_on(self) -> None:
        for parties in range(1, 3000):
            assert math.sqrt(parties / honest(parties, 2 / 3, 0.1)) <= 1.34

    @pytest.mark.slow
    @pytest.mark.parametrize("z", [0.001, 1.0])
    def test_both_ways_have_the_same_distribution(self, split: Split, z: float) -> None:
        """3,200 sums each way, drawn at once exactly and as rounded normal variables."""
        ways = []
        method = FedMF(factors=8, item_rate=0.01, uplink=Channel(Clip(0.5), Skellam(z), SecureSum()))
        plain = a_round(replace(method, uplink=Channel(Clip(0.5))), split).total.sum["item"]
        for fused in (True, False):
            got = a_round(method, split, fused=fused)
            ways.append((got.total.sum["item"] - plain).double().flatten().numpy())
            assert got.bytes_up == 30 * 3200 * 3
        stated = method.uplink.among(30).deviation(3200, 30)
        # Rounding adds to it: 30 numbers, each off by up to half a step in the mean square.
        rounding = math.sqrt(30 / 4) * 0.5 / 4096
        for way in ways:
            assert stated * 0.93 < way.std() < 1.07 * math.hypot(stated, rounding)
        assert stats.ks_2samp(*ways).pvalue > 1e-6
        assert stats.ks_2samp(ways[0] / 2, ways[1]).pvalue < 1e-6

    def test_the_server_is_charged_and_held_to_a_budget(self, split: Split) -> None:
        method = FedMF(factors=4, uplink=Channel(Clip(0.5), Skellam(2.0), SecureSum()))
        budget = Budget(6, delta=1e-6, observer="server")
        fitted = fit(method, Simulator(split), rounds=9, cohort=20, budget=budget)
        event = SkellamRelease(2.0, 8192)
        rounds = fitted.ledger.releases()
        assert fitted.stopped is not None
        assert 1 < rounds < 9
        assert fitted.epsilon["server"] == epsilon([(event, rounds)], 1e-6).epsilon <= 6
        assert epsilon([(event, rounds + 1)], 1e-6).epsilon > 6
        assert fitted.epsilon["public"] < fitted.epsilon["server"]

    def test_one_message_is_a_share_of_the_noise(self, split: Split) -> None:
        method = FedMF(factors=4, uplink=Channel(Clip(0.5), Skellam(2.0), SecureSum()))
        shown = inspect(method, Simulator(split), 3, cohort=20)
        assert "the sum over the 20 people of the round, drawn from 60 with the noise" in shown.observers["server"].sees
        share = method.uplink.among(20).deviation(1600, 1)
        words = f"with this device's share of the noise, {share:.3g}. Each is sent in 3 bytes."
        assert any(words in line for line in shown.tells)
        assert shown.bytes == 3 * 1600
        assert shown.parts[0].dtype == "int64"

    @pytest.mark.parametrize(
        "channel", [Channel(Clip(1.0), Skellam(1.0), SecureSum()), Channel(Clip(1.0), Skellam(1.0))]
    )
    def test_no_attack_on_a_release_exceeds_its_bound(self, channel: Channel) -> None:
        """One party alone adds all of the noise. The audit comes within reach of ε, so that it could."""
        findings = draw_releases(channel, draws=20_000, delta=1e-5)
        for finding in findings:
            assert not finding.contradicted
            assert 1.0 < finding.lower.epsilon < finding.certified < 5


class TestCharges:
    def test_behind_a_secure_sum_everyone_is_charged_for_all_of_the_noise(self) -> None:
        channel = Channel(Clip(3.0), Skellam(1.5), SecureSum())
        known = SkellamRelease(1.5, 2 * COARSEST)
        drawn = replace(known, sampling=Sampling("fixed", 30, 4800))
        # The parties of a sum learn of each other: a draw hides nobody from them.
        assert events(channel, SOME) == {"server": known, "clients": known, "public": drawn}
        assert events(channel, ALL) == dict.fromkeys(("server", "clients", "public"), known)

    def test_without_one_everyone_is_charged_for_the_noise_of_one_party(self) -> None:
        found = events(Channel(Clip(3.0), Skellam(1.5)), ALL)
        assert set(found.values()) == {SkellamRelease(1.5 / math.sqrt(57), 2 * COARSEST)}

    def test_a_client_that_takes_part_knows_its_own_noise(self) -> None:
        """With a share of parties that may collude it is one of them; otherwise it is one more."""
        found = events(Channel(Clip(3.0), Skellam(1.0, least=1, colluding=0), SecureSum()), ALL)
        assert found["server"] == found["public"] == SkellamRelease(1.0, 2 * COARSEST)
        assert found["clients"] == SkellamRelease(math.sqrt(0.99), 2 * COARSEST)

    def test_where_everyone_takes_part_a_message_may_be_compared_with_none(self) -> None:
        channel = Channel(Clip(3.0), Skellam(1.0, "add-remove"), SecureSum())
        assert events(channel, ALL)["server"] == SkellamRelease(1.0, COARSEST, 0, "add-remove")
        with pytest.raises(HomebodyError, match="accounted under replace-one"):
            channel.charges(SOME)
        twice = Channel(Clip(3.0), Skellam(0.5), SecureSum())
        assert channel.deviation(9, 1) == pytest.approx(twice.deviation(9, 1), rel=1e-6)

    @pytest.mark.parametrize(
        ("stages", "sentence"),
        [
            ([Skellam(1.0)], "Skellam noise needs a bound on what one person can change: put a Clip of order 2"),
            ([Clip(1.0, order=1), Skellam(1.0)], "put a Clip of order 2"),
            ([Clip(1.0), SecureSum(), Skellam(1.0)], "Skellam works on the device, so it cannot come after SecureSum"),
            ([Clip(1.0), Skellam(1.0), Skellam(1.0)], "cannot follow Skellam noise"),
            ([Clip(1.0), Skellam(1.0), Clip(1.0)], "cannot follow Skellam noise"),
            ([Clip(1.0), Skellam(1.0), SecureSum(), Gaussian(1.0)], "cannot follow Skellam noise"),
            ([Clip(1.0), Skellam(1.0), SecureSum(least=0.9)], "leave them out of secure-sum"),
            ([Clip(1.0), Skellam(1.0), SecureSum(range=2.0)], "leave them out of secure-sum"),
            ([Clip(1.0, order=1), Laplace(1.0), SecureSum(range=2.0)], "here is Laplace noise"),
        ],
    )
    def test_nonsense_is_refused(self, stages: list[Stage], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            Channel(*stages)

    def test_requests_beside_it_are_refused(self) -> None:
        with pytest.raises(HomebodyError, match="leave out ask-rows or skellam"):
            parse_channel(["clip:norm=1", "ask-rows", "skellam:z=1", "secure-sum"])

    @pytest.mark.parametrize("stage", [lambda **set_: Skellam(1.0, **set_), SecureSum])
    def test_shares_with_which_two_sums_could_be_opened_are_refused(self, stage: type[SecureSum]) -> None:
        stage(least=0.56, colluding=0.1)
        for least, colluding in ((0.55, 0.1), (0.5, 0.0), (0.9, 0.8)):
            with pytest.raises(HomebodyError, match="two sums could be opened"):
                stage(least=least, colluding=colluding)
        for least, colluding in ((1.1, 0.1), (0.0, 0.0), (0.9, -0.1), (math.nan, 0.1)):
            with pytest.raises(HomebodyError, match="share of parties"):
                stage(least=least, colluding=colluding)

    def test_devices_refuse_it_without_a_secure_sum(self) -> None:
        refuse_unfit(FedMF(uplink=Channel(Clip(1.0), Skellam(1.0), SecureSum())))
        with pytest.raises(HomebodyError, match="next to no noise"):
            refuse_unfit(FedMF(uplink=Channel(Clip(1.0), Skellam(1.0))))

    def test_it_is_written_as_it_is_read(self) -> None:
        texts = ["clip:norm=1", "skellam:z=2,least=0.9,colluding=0", "secure-sum"]
        channel = parse_channel(texts)
        assert channel == Channel(Clip(1.0), Skellam(2.0, least=0.9, colluding=0.0), SecureSum())
        assert stage_texts(channel) == texts
        assert stage_texts(channel.among(7)) == texts
        assert stage_texts(parse_channel(["secure-sum:range=4,least=0.75"])) == ["secure-sum:range=4,least=0.75"]

    def test_noise_is_found_that_spends_a_budget(self) -> None:
        channel = Channel(Clip(1.0), Skellam(1.0), SecureSum())
        budget = Budget(4, observer="server")
        z = calibrated(channel, budget, lambda noisy: [(noisy.charges(SOME), 50)])
        spent = epsilon([(SkellamRelease(z, 2 * COARSEST), 50)], budget.delta).epsilon
        assert 4 * (1 - 1e-3) <= spent <= 4


def events(channel: Channel, cohort: Cohort) -> dict[str, Event]:
    return {charge.observer: charge.event for charge in channel.charges(cohort)}


class TestAccounting:
    def test_figures(self) -> None:
        server = SkellamRelease(1.0, 8192, 54_000)
        assert epsilon([(server, 1)], 1e-6).epsilon == pytest.approx(5.222, abs=1e-3)
        public = replace(server, sampling=Sampling("fixed", 30, 4800))
        assert epsilon([(public, 1000)], 1e-6).epsilon == pytest.approx(2.446, abs=1e-3)
        gaussian = GaussianRelease(1.0, "replace-one")
        assert epsilon([(gaussian, 1)], 1e-6, only=("rdp",)).epsilon == pytest.approx(5.222, abs=1e-3)

    @pytest.mark.parametrize("variance", [1.0, 7.0, 60.0, 900.0, 5000.0])
    @pytest.mark.parametrize("shift", [1, 2, 9, 50])
    def test_the_bound_lies_above_exact_divergences(self, variance: float, shift: int) -> None:
        """One number that moves by so many steps. It is also close where the noise is fine."""
        orders = np.array([2, 3, 5, 8, 16, 33, 64])
        far = int(64 * shift + 40 * math.sqrt(variance) + 200)
        half = exact_log_pmf(variance, far + shift)
        logs = np.concatenate([half[:0:-1], half])
        here, there = logs[shift:], logs[:-shift]  # P(k + shift) and P(k)
        exact = [np.logaddexp.reduce(order * here - (order - 1) * there) / (order - 1) for order in orders]
        bound = skellam_rdp(math.sqrt(variance) / shift, shift, 1, orders)
        assert (bound >= np.array(exact) * (1 - 1e-9)).all()
        if variance == 5000.0 and shift < 50:
            assert bound == pytest.approx(exact, rel=0.01)

    def test_the_bound_on_samples_is_that_of_autodp(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rdp_acct = pytest.importorskip("autodp.rdp_acct")
        orders = np.arange(2, 65)
        for multiplier, rate in ((1.0, 30 / 4800), (4.0, 100 / 943), (0.7, 0.3)):
            curve = skellam_rdp(multiplier, 8192, 54_000, orders)

            def own(order: float, curve: NDArray[np.float64] = curve) -> float:
                return math.inf if math.isinf(order) else float(curve[round(order) - 2]) if order >= 2 else 0.0

            accountant = rdp_acct.anaRDPacct(m=64, m_max=64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accountant.compose_subsampled_mechanism(own, rate)
            for order in (2, 3, 4, 7, 20, 60):
                theirs = accountant.RDPs_int[order - 1]
                assert sampled_rdp(curve, rate, order) == pytest.approx(theirs, rel=1e-6)

    def test_orders_between_whole_ones_take_the_next(self) -> None:
        ((term, _),) = terms([(SkellamRelease(1.0, 8), 1)], "replace-one", set()).items()
        curve, orders = rdp(term), rdp_orders()
        assert curve is not None
        for order, value in zip(orders, curve, strict=True):
            whole = max(2, math.ceil(order))
            assert value == pytest.approx(skellam_rdp(1.0, 8, 0, np.array([whole]))[0], rel=1e-9)

    def test_fewer_steps_or_more_entries_cost_no_less(self) -> None:
        """So a channel may charge for the fewest steps, and any number of entries."""
        spent = [epsilon([(SkellamRelease(1.0, steps), 1)], 1e-6).epsilon for steps in (1, 4, 64, 8192)]
        assert spent == sorted(spent, reverse=True)
        many = [epsilon([(SkellamRelease(1.0, 64, entries), 1)], 1e-6).epsilon for entries in (1, 1000, 0)]
        assert many == sorted(many)

    def test_groups_and_relations(self) -> None:
        removed = SkellamRelease(4.0, 4096, 9, "add-remove")
        replaced = SkellamRelease(2.0, 8192, 9)
        other = GaussianRelease(8.0, "replace-one")
        for events in ([(removed, 3)], [(removed, 1), (other, 2)]):
            beside = [(replaced if event is removed else event, count) for event, count in events]
            relation = epsilon(events, 1e-6).relation
            assert relation == ("add-remove" if len(events) == 1 else "replace-one")
            if len(events) > 1:
                assert epsilon(events, 1e-6).epsilon == pytest.approx(epsilon(beside, 1e-6).epsilon)
        pair = epsilon([(removed, 3)], 1e-6, group=2).epsilon
        assert pair == pytest.approx(epsilon([(replaced, 3)], 1e-6).epsilon)
        sampled = replace(replaced, sampling=Sampling("fixed", 30, 4800))
        assert epsilon([(sampled, 3)], 1e-6, group=2).epsilon > 1.9 * epsilon([(sampled, 3)], 1e-6).epsilon

    def test_beside_a_shuffle_each_has_a_share_of_delta(self) -> None:
        events = [(SkellamRelease(2.0, 8192), 1), (ShuffledReports(1.0, 1, 1000), 1)]
        bound = epsilon(events, 1e-6)
        assert bound.accountant == "by parts"
        assert bound.epsilon < 1.2 * sum(epsilon([event], 1e-6).epsilon for event in events)

    def test_a_bound_says_what_it_rests_on(self) -> None:
        (note,) = epsilon([(SkellamRelease(1.0, 8192), 1)], 1e-6).notes
        assert all(word in note for word in ("least", "colluding", "roster"))
        drawn = SkellamRelease(1.0, 4096, 0, "add-remove", Sampling("poisson", 30, 4800))
        bound = epsilon([(drawn, 1)], 1e-6)
        assert any("Poisson sampling is not counted" in note for note in bound.notes)
        assert bound.epsilon == epsilon([(replace(drawn, sampling=Sampling()), 1)], 1e-6).epsilon
        assert math.isinf(epsilon([(SkellamRelease(1.0, 8192), 1)], 0.0).epsilon)

    def test_events_are_read_back_and_checked(self) -> None:
        event = SkellamRelease(1.25, 8192, 54_000, "replace-one", Sampling("fixed", 30, 4800))
        assert event_from_json(event_as_json(event)) == event
        ledger = Ledger()
        ledger.charge("train/1", Channel(Clip(1.0), Skellam(1.0), SecureSum()).charges(SOME))
        assert ledger.epsilons(1e-6)["server"] == pytest.approx(5.222, abs=1e-3)
        wrong: Sequence[dict[str, object]] = (
            {"multiplier": 0.0},
            {"steps": 0},
            {"steps": 1.5},
            {"entries": -1},
            {"relation": "other"},
        )
        for fields in wrong:
            with pytest.raises(HomebodyError):
                replace(event, **fields)  # type: ignore[arg-type]

"""PrivateRec: as published, and certified, where the server trains on reports.

Statistical tests have fixed seeds. Each states how often a right method would fail it under another seed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tests.methods.news import SMALL, made_up_vectors, texts, worded
from torch import Tensor
from torch.func import vmap

from homebody.core import Batch, Catalogue, Cohort, Data, Shown, Total, Tree
from homebody.errors import HomebodyError
from homebody.methods.fedrec import FedRec
from homebody.methods.privaterec import PrivateRec, centres
from homebody.models.adam import adam_start, adam_step
from homebody.privacy import Channel, Clip, ImpressionReport, Ledger
from homebody.privacy.queries import attention_l1, before_padding
from homebody.rng import DeviceRng, Rng
from homebody.simulation import Simulator
from homebody.testing import impressed
from homebody.text_vectors import news_inputs
from homebody.training import fit


@pytest.fixture(autouse=True)
def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_vectors(monkeypatch)


def published(**settings: Any) -> PrivateRec:
    return PrivateRec(**{**SMALL, "encoder": "id", "guarantee": "published", **settings})


def certified(**settings: Any) -> PrivateRec:
    return PrivateRec(**{**SMALL, "encoder": "id", "basis": 3, **settings})


def moved(method: PrivateRec, catalogue: Catalogue | None = None) -> Tree:
    """Parameters of which none is 0."""
    shared = method.init_shared(catalogue or texts(), Rng.of(1))
    return {name: value + 0.3 * Rng.of(2, name).normal(*value.shape) for name, value in shared.items()}


def told(method: PrivateRec) -> Tree:
    """Seven reports: of three news, of two, and of none."""
    news = torch.tensor([[3, 8, 1], [8, 3, 29], [11, 0, 5], [4, 9, -1], [-1, -1, -1], [3, 8, 1], [20, 21, 22]])
    if method.chooses:
        return {"news": news.to(torch.int32), "choice": torch.tensor([0, 2, 1, 1, 0, 2, 2], dtype=torch.int32)}
    return {"news": news.to(torch.int32), "weights": Rng.of(3).normal(7, 3).to(torch.float16)}


class TestGradientOfReports:
    @pytest.mark.parametrize("mechanism", ["choice", "attention"])
    @pytest.mark.parametrize("encoder", ["id", "nrms", "naml", "plm"])
    def test_it_is_the_mean_of_what_each_device_would_compute(self, encoder: str, mechanism: str) -> None:
        """−log of the softmax of the pseudo-click, differentiated by torch for one report after the other."""
        method = certified(encoder=encoder, mechanism=mechanism, epsilon=2.0)
        shared, reports = moved(method), told(method)
        inputs = news_inputs(method.news, texts())
        found = method.gradient(shared, reports, inputs)
        expected = {name: torch.zeros_like(value) for name, value in shared.items()}
        for row in range(7):
            alone = {name: value.clone().requires_grad_() for name, value in shared.items()}
            items = reports["news"][row][reports["news"][row] >= 0].long()
            if not len(items):
                continue
            news = method.news.encode(alone, {name: value[items] for name, value in inputs.items()})
            fit = news @ (self.weights(reports, row, method) @ alone["basis"])
            (-fit.log_softmax(0)[0]).backward()
            for name, value in alone.items():
                expected[name] += 0 if value.grad is None else value.grad / 7
        assert found.keys() == {name for name in shared if name.startswith("news/") or name == "basis"}
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4, msg=name)
        assert found["basis"].any()
        assert not any(expected[name].any() for name in shared.keys() - found.keys())

    def weights(self, reports: Tree, row: int, method: PrivateRec) -> Tensor:
        if method.chooses:
            true = math.exp(2.0) / (math.exp(2.0) + 2)
            return torch.tensor([true if one == reports["choice"][row] else (1 - true) / 2 for one in range(3)])
        positive = reports["weights"][row].float().clamp(min=0)
        return positive / positive.sum() if positive.any() else torch.full((3,), 1 / 3)

    def test_dropout_is_of_the_news_alone_and_by_the_stream(self) -> None:
        method = certified(encoder="nrms", dropout=0.5)
        shared, inputs = moved(method), news_inputs(method.news, texts())
        first, again, other = (method.gradient(shared, told(method), inputs, Rng.of(seed)) for seed in (1, 1, 2))
        assert torch.equal(first["basis"], again["basis"])
        assert not torch.allclose(first["basis"], other["basis"])

    def test_by_hand(self) -> None:
        """Two reports on three news of one number, r = (1, 2, -1), and a basis of b = (2, -1): choice 0 with two to
        one. u = 2·2/3 − 1/3 = 1 for choice 0, and 2·1/3 − 2/3 = 0 for choice 1."""
        method = PrivateRec(encoder="id", d=1, basis=2, negatives=1, epsilon=math.log(2), dropout=0.0)
        shared = {
            "news/item": torch.tensor([[1.0], [2.0], [-1.0]]),
            "basis": torch.tensor([[2.0], [-1.0]]),
            "pad": torch.zeros(1),
        }
        reports = {"news": torch.tensor([[1, 0], [0, 2]]), "choice": torch.tensor([0, 1])}
        found = method.gradient(shared, reports, news_inputs(method.news, Catalogue(3)))
        q = 1 / (1 + math.e)  # what the first leaves to news 0; the second leaves a half to news 2
        assert found["news/item"].flatten().tolist() == pytest.approx([q / 2, -q / 2, 0.0], abs=1e-5)
        first, second = -q * (2 - 1), -0.5 * (1 + 1)
        expected = [(2 * first + second) / 6, (first + 2 * second) / 6]
        assert found["basis"].flatten().tolist() == pytest.approx(expected, abs=1e-5)


class TestServer:
    def collected(self, reports: Tree, clients: int) -> Total:
        return Total({}, clients, messages=reports, catalogue=texts())

    def alike(self, count: int, item: int = 3) -> Tree:
        """Reports that say the same: whichever are drawn for a step, it is the same step."""
        return {
            "news": torch.tensor([[item, 8, 1]] * count, dtype=torch.int32),
            "choice": torch.ones(count, dtype=torch.int32),
        }

    def test_steps_of_adam_and_the_running_mean(self) -> None:
        method = certified(steps=3, averaging=0.15, learning_rate=0.02, batch_size=4)
        start = moved(method)
        inputs = news_inputs(method.news, texts())
        shared, state = method.server(start, method.init_server(start), self.collected(self.alike(6), 6))
        learnt = {name: value for name, value in start.items() if name != "level"}
        moments, mean = adam_start(learnt), learnt
        for past in (0.0, 1 / 11, 0.15):  # 0/10, 1/11, then 2/12 is more than 0.15
            slope = method.gradient(learnt, self.alike(1), inputs)
            learnt, moments = adam_step(learnt, moments, slope, 0.02, (0.9, 0.99))
            mean = {name: past * value + (1 - past) * learnt[name] for name, value in mean.items()}
        for name in learnt:
            torch.testing.assert_close(state[f"learnt/{name}"], learnt[name])
        assert "learnt/level" not in state
        # A level is no parameter: it follows from the others and from the news of the reports, each told as often here.
        news = method.news.encode(mean, {name: value[[3, 8, 1]] for name, value in inputs.items()})
        mean["level"] = (mean["basis"] @ news.T).exp().mean(1).log()
        for name in start:
            torch.testing.assert_close(shared[name], mean[name])
        assert state["step"] == 3
        assert not torch.allclose(shared["basis"], learnt["basis"])
        assert torch.equal(shared["pad"], start["pad"])
        # The next round goes on from what was learnt, not from the mean.
        _, after = method.server(shared, state, self.collected(self.alike(6), 6))
        slope = method.gradient(learnt, self.alike(1), inputs)
        one = replace(method, steps=1).server(shared, state, self.collected(self.alike(6), 6))[1]
        torch.testing.assert_close(
            one["learnt/basis"], adam_step(learnt, moments, slope, 0.02, (0.9, 0.99))[0]["basis"]
        )
        assert after["step"] == 6

    @pytest.mark.parametrize(("memory", "kept"), [(1, [7]), (2, [6, 7]), (0, [5, 6, 7])])
    def test_it_remembers_the_reports_of_the_last_rounds(self, memory: int, kept: list[int]) -> None:
        method = certified(steps=1, memory=memory)
        shared = moved(method)
        state = method.init_server(shared)
        for item in (5, 6, 7):
            shared, state = method.server(shared, state, self.collected(self.alike(4, item), 4))
        assert state["told/news"][:, 0].tolist() == [item for item in kept for _ in range(4)]
        assert len(state["told/choice"]) == 4 * len(kept)

    def test_it_trains_on_what_it_remembers(self) -> None:
        """News 5 was reported on in an earlier round alone: its vector moves where that is remembered."""
        for memory, moves in ((1, False), (2, True)):
            method = certified(steps=30, memory=memory)
            shared = moved(method)
            state = method.init_server(shared)
            shared, state = method.server(shared, state, self.collected(self.alike(4, 5), 4))
            state |= {name: torch.zeros_like(value) for name, value in state.items() if name[:2] in ("m/", "v/")}
            before = state["learnt/news/item"][5]
            _, after = method.server(shared, state, self.collected(self.alike(4, 6), 4))
            assert torch.equal(after["learnt/news/item"][5], before) != moves

    def test_levels_are_by_the_news_that_were_shown(self) -> None:
        """One number a news item, r = (1, 2, -1), b = (2, -1): news 1 was told twice, news 2 once, -1 is no news."""
        method = PrivateRec(encoder="id", d=1, basis=2, negatives=1, steps=1, learning_rate=0.0, dropout=0.0)
        shared = method.init_shared(Catalogue(3), Rng.of(0))
        assert shared["level"].shape == (2,)
        shared |= {"news/item": torch.tensor([[1.0], [2.0], [-1.0]]), "basis": torch.tensor([[2.0], [-1.0]])}
        state = method.init_server(shared)
        reports = {
            "news": torch.tensor([[1, 2], [1, -1]], dtype=torch.int32),
            "choice": torch.zeros(2, dtype=torch.int32),
        }
        after, _ = method.server(shared, state, Total({}, 2, messages=reports, catalogue=Catalogue(3)))
        expected = [math.log((2 * math.exp(4) + math.exp(-2)) / 3), math.log((2 * math.exp(-2) + math.exp(1)) / 3)]
        assert after["level"].tolist() == pytest.approx(expected, abs=1e-5)
        # Nobody told any news: the levels stay.
        nothing = {"news": torch.full((1, 2), -1, dtype=torch.int32), "choice": torch.zeros(1, dtype=torch.int32)}
        again, _ = method.server(after, state, Total({}, 1, messages=nothing, catalogue=Catalogue(3)))
        assert torch.equal(again["level"], after["level"])
        assert "level" not in replace(method, mechanism="attention").init_shared(Catalogue(3), Rng.of(0))

    def test_levels_are_of_all_reports_not_of_the_last_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """News 0, r = 1, in the first half of 4,000 places and news 1, r = -1, in the second; 1,000 are looked at."""
        monkeypatch.setattr("homebody.methods.privaterec.LEVEL_NEWS", 1_000)
        method = PrivateRec(encoder="id", d=1, basis=2, negatives=1, steps=1, learning_rate=0.0, dropout=0.0)
        shared = method.init_shared(Catalogue(2), Rng.of(0))
        shared |= {"news/item": torch.tensor([[1.0], [-1.0]]), "basis": torch.tensor([[1.0], [2.0]])}
        news = torch.arange(2, dtype=torch.int32).repeat_interleave(2_000).view(-1, 2)
        reports = {"news": news, "choice": torch.zeros(2_000, dtype=torch.int32)}
        total = Total({}, 2_000, messages=reports, catalogue=Catalogue(2))
        after, _ = method.server(shared, method.init_server(shared), total)
        # Half of the places name news 0, within 5 deviations of 0.0158: that moves a level by up to 0.153.
        assert after["level"].tolist() == pytest.approx([math.log(math.cosh(1)), math.log(math.cosh(2))], abs=0.153)

    def test_without_a_catalogue_it_says_so(self) -> None:
        method = certified()
        shared = moved(method)
        with pytest.raises(HomebodyError, match="needs the catalogue"):
            method.server(shared, method.init_server(shared), Total({}, 2, messages=told(method)))

    @pytest.mark.parametrize("mechanism", ["choice", "attention"])
    def test_a_round_is_the_same_fused_or_not(self, mechanism: str) -> None:
        method = certified(mechanism=mechanism, encoder="nrms")
        found = []
        for fused in (True, False):
            simulator = Simulator(worded(), fused=fused)
            simulator.begin(method, Rng.of(0))
            who = simulator.available()
            cohort = Cohort(who, "all", len(who), len(who))
            shared = method.init_shared(simulator.catalogue, Rng.of(1))
            found.append(simulator.collect(method, shared, cohort, Rng.of(2), 1))
        assert found[0].total.messages.keys() == {"news", "choice" if mechanism == "choice" else "weights"}
        for name, value in found[0].total.messages.items():
            assert len(value) == 149
            order = [np.lexsort(one.total.messages["news"].numpy().T) for one in found]
            assert torch.equal(value[order[0]], found[1].total.messages[name][order[1]])
        width = 4 * 3 + (4 if mechanism == "choice" else 2 * 3)
        assert found[0].bytes_up == found[1].bytes_up == 149 * width


class TestReports:
    def test_news_of_reports_start_from_the_axes_of_their_texts(self) -> None:
        """The mean news is 0, and the first number differs most, the last least; as published, they start at random."""
        for method, orderly in ((certified(encoder="plm", d=6), True), (published(encoder="plm", d=6), False)):
            news = method.news.encode(method.init_shared(texts(), Rng.of(1)), news_inputs(method.news, texts()))[:-1]
            assert torch.allclose(news.mean(0), torch.zeros(6), atol=1e-5) == orderly
            assert bool((news.std(0).diff() < 0).all()) == orderly

    def test_a_run_takes_as_many_rounds_as_reports_of_everyone(self) -> None:
        method = certified(reports=2, steps=1)
        assert (method.about.rounds, method.about.cohort, method.about.evaluate_every) == (2, None, 1)
        assert PrivateRec.about.rounds == published().about.rounds == FedRec.about.rounds
        assert published().about.cohort == FedRec.about.cohort
        ledger, lines = Ledger(), list[int]()
        quiet, rounds = replace(method, epsilon=0.5), method.about.rounds
        fit(quiet, Simulator(impressed()), rounds=rounds, ledger=ledger, on_round=lambda r: lines.append(r.clients))
        assert lines == [149, 149]
        assert ledger.epsilon("server", "user", delta=0.0).epsilon == pytest.approx(2 * 2 * 0.5)
        assert ledger.epsilon("server", "interaction", delta=0.0).epsilon == pytest.approx(2 * 0.5)

    def test_a_device_hands_over_its_interest_the_impression_and_the_click(self) -> None:
        method = certified(d=2, basis=2, sharpness=3.0, dropout=0.0)
        shared = {
            "news/item": torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 1.0], [7.0, 7.0]]),
            "basis": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
            "pad": torch.tensor([5.0, 5.0]),
            "level": torch.tensor([0.25, -1.0]),
        }
        items = torch.tensor([0, 1, 2])
        shown = Shown(torch.tensor([[2, 3, 4]]), torch.tensor([[True, False, False]]), torch.tensor([2]))
        data = Data(items, items >= 0, items, Catalogue(4), shown=shown)
        update, _ = method.client(shared, {}, method.prepare(data, Rng.of(0)))
        # The first two items came before: u = (½, ½), u bᵀ = (½, 1), and each is taken relative to its level.
        assert update["interest"].tolist() == pytest.approx([0.25, 2.0])
        assert update["shown"].tolist() == [2, 3, -1]
        assert update["click"].tolist() == [1, 0, 0]
        method = replace(method, mechanism="attention")
        update, _ = method.client(shared, {}, method.prepare(data, Rng.of(0)))
        # For attention it is u bᵀ / √2, three times as sharp.
        assert update["interest"].tolist() == pytest.approx([1.5 / math.sqrt(2), 3 / math.sqrt(2)])
        hiding = replace(method, padding=0.99)
        update, _ = hiding.client(shared, {}, hiding.prepare(data, Rng.of(0)))
        assert update["interest"].tolist() == pytest.approx([15 / math.sqrt(2), 30 / math.sqrt(2)])

    @pytest.mark.parametrize("candidates", [0, 4])
    def test_news_of_the_impression_are_hidden_in_its_history(self, candidates: int) -> None:
        """Where times are wrong a click is in both. Then it changes the click that is told, and no interest."""
        method = certified(padding=0.0, candidates=candidates)
        found = []
        for clicked in (4, 6):  # the last click of the history is the click of the impression
            items = torch.tensor([3, 4, 2, clicked])
            shown = Shown(torch.tensor([[4, 6, 7]]), torch.tensor([[4, 6, 7]]) == clicked, torch.tensor([4]))
            data = Data(items, items >= 0, items, texts(), shown=shown)
            batch = method.prepare(data, Rng.of(0))
            assert batch["hidden"].tolist() == [False, True, False, True]
            found.append(method.client(moved(method), {}, batch)[0])
        assert torch.equal(found[0]["interest"], found[1]["interest"])
        assert candidates or not torch.equal(found[0]["click"], found[1]["click"])

    def handed(self, method: PrivateRec, shown: Shown | None, **shared: Any) -> Tree:
        """What a device hands over whose history is the news 0 and 1."""
        items = torch.tensor([0, 1])
        known = {**method.init_shared(Catalogue(9), Rng.of(0)), **shared}
        data = Data(items, items >= 0, items, Catalogue(9), shown=shown)
        return method.client(known, {}, method.prepare(data, Rng.of(0)))[0]

    def test_candidates_take_the_place_of_what_was_shown(self) -> None:
        method, candidates = certified(candidates=4), torch.tensor([3, 8, 5, -1], dtype=torch.int32)
        for item, click in ((8, [0, 1, 0, 0]), (2, [0, 0, 0, 0])):
            shown = Shown(torch.tensor([[7, item, 9]]), torch.tensor([[False, True, False]]), torch.tensor([2]))
            update = self.handed(method, shown, candidates=candidates)
            assert update["shown"].tolist() == [3, 8, 5, -1]
            assert update["click"].tolist() == click
            assert update["interest"].any()

    @pytest.mark.parametrize("candidates", [0, 5])
    def test_without_a_click_a_device_hands_over_nothing_of_its_own(self, candidates: int) -> None:
        method = certified(candidates=candidates)
        unclicked = Shown(torch.tensor([[7, 2]]), torch.zeros(1, 2, dtype=torch.bool), torch.tensor([2]))
        for shown in (None, unclicked):
            update = self.handed(method, shown)
            assert not update["interest"].any()
            assert not update["click"].any()
            assert int((update["shown"] >= 0).sum()) == (candidates or 3)

    @pytest.mark.random_draws
    def test_nobody_can_draw_again_what_it_tells_without_an_impression(self) -> None:
        """From the system: the server knows the stream that is agreed upon. Twenty of 30 news agree once in 10²⁹."""
        items = torch.tensor([0, 1])
        data = Data(items, items >= 0, items, texts())
        method = certified(negatives=19)
        first, again = (method.prepare(data, DeviceRng(Rng.of(0).key))["shown"] for _ in range(2))
        assert not torch.equal(first, again)

    def test_the_server_draws_other_candidates_for_each_round(self) -> None:
        method, catalogue = certified(candidates=5, steps=1, reports=2), Catalogue(9)
        shared = method.init_shared(catalogue, Rng.of(0))
        state = method.init_server(shared)
        drawn = [shared["candidates"]]
        for _ in range(2):
            reports = {"news": torch.tensor([[3, 8, 1]], dtype=torch.int32), "choice": torch.tensor([1])}
            shared, state = method.server(shared, state, Total({}, 1, messages=reports, catalogue=catalogue))
            drawn.append(shared["candidates"])
        assert all(len(set(items.tolist())) == 5 and int(items.min()) >= 0 and int(items.max()) < 9 for items in drawn)
        assert len({tuple(items.tolist()) for items in drawn}) == 3
        few = replace(method, candidates=12).init_shared(catalogue, Rng.of(0))["candidates"]
        assert sorted(few.tolist()) == [-1, -1, -1, *range(9)]
        assert "candidates" not in {name.rpartition("/")[2] for name in state}

    def test_it_trains_on_candidates(self) -> None:
        """As many as there are items: then a click is always among them."""
        method = certified(candidates=120, epsilon=8.0, steps=20, d=8)
        fitted = fit(method, Simulator(impressed()), rounds=3)
        assert fitted.evaluated.metrics["impressions/auc"] > 0.52

    @pytest.mark.parametrize("padding", [0.0, 0.3, 0.8])
    def test_each_news_is_hidden_with_its_chance(self, padding: float) -> None:
        """20,000 draws of chance p: 5 deviations of at most 0.0035 are missed once in 1.7 million."""
        method, real = certified(padding=padding), torch.ones(10) > 0
        hidden = vmap(lambda key: method._hidden(real, Rng(key)))(Rng.of(5).fold(torch.arange(2_000)).key)
        assert abs(float(hidden.float().mean()) - padding) <= 5 * 0.0035 * (padding > 0)

    def test_what_the_uplink_and_the_settings_say_is_the_same(self) -> None:
        method = certified(mechanism="attention", theta=0.6, epsilon=2.0, noise="gaussian", delta=1e-4, padding=0.25)
        (stage,) = method.uplink.stages
        assert stage == ImpressionReport(2.0, "attention", 3, 0.6, "gaussian", 1e-4, 0.25, 2)
        assert replace(method, epsilon=3.0).uplink.stages == (replace(stage, epsilon=3.0),)

    @pytest.mark.parametrize(
        ("settings", "problem"),
        [
            ({"guarantee": "published", "mechanism": "choice"}, "choice is for guarantee=certified"),
            ({"guarantee": "published", "candidates": 9}, "candidates is for guarantee=certified"),
            ({"noise": "none"}, "noise=none hides nothing: it is for guarantee=published"),
            ({"uplink": Channel(Clip(1.0))}, "sends reports through a stage of its own"),
            ({"basis": 1}, "basis must be at least 2, not 1"),
            ({"epsilon": 0.0}, "epsilon must be above 0"),
            ({"padding": 1.0}, "padding must be at most 0.99, not 1.0"),
            ({"padding": -0.1}, "padding must be at least 0"),
            ({"query": "vector"}, "query must be"),
            ({"d": 10, "heads": 3, "encoder": "nrms"}, "10 numbers cannot be shared out among 3 heads"),
        ],
    )
    def test_errors_are_sentences(self, settings: dict[str, Any], problem: str) -> None:
        with pytest.raises(HomebodyError, match=problem):
            PrivateRec(**settings)


class TestPublished:
    @pytest.mark.parametrize(
        ("noise", "scale"), [("laplace", 0.6 / 3), ("gaussian", 0.6 / 3 * math.sqrt(2 * math.log(1250)))]
    )
    def test_the_noise_on_the_weights(self, noise: str, scale: float) -> None:
        """Kolmogorov and Smirnov at one in a million, of 10,000 numbers."""
        method = published(noise=noise, theta=0.6, epsilon=3.0, basis=5)
        drawn = vmap(lambda key: method._unit_noise(Rng(key)))(Rng.of(6).fold(torch.arange(2_000)).key)
        kind = stats.laplace if noise == "laplace" else stats.norm
        assert stats.kstest(drawn.double().numpy().ravel(), kind(scale=scale).cdf).pvalue > 1e-6
        assert stats.kstest(drawn.double().numpy().ravel(), kind(scale=1.25 * scale).cdf).pvalue < 1e-6
        inside, _ = before_padding(3.0, 1e-3, 0.5)
        assert replace(method, noise="laplace", padding=0.5)._query(3.0, 1e-3, 0.6, "laplace", "published").scale == (
            pytest.approx(0.6 / inside)
        )

    def test_the_reader_is_made_of_noised_weights_that_are_positive(self) -> None:
        method = published(d=2, basis=2, theta=0.5)
        parameters = {"basis": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "pad": torch.zeros(2)}
        batch = {"real": torch.tensor([True]), "hidden": torch.tensor([False]), "noise": torch.tensor([0.3, -2.0])}
        history = torch.tensor([[1.0, 1.0]])
        found = method.reader(parameters, history, batch)
        torch.testing.assert_close(found, torch.tensor([1.0, 0.0]))
        quiet = method.reader(parameters, history, {**batch, "noise": torch.zeros(2)})
        shares = torch.tensor([1.0, 2.0]).div(math.sqrt(2)).softmax(0)
        torch.testing.assert_close(quiet, shares * torch.tensor([1.0, 2.0]))
        # Clipped to 0.5, noise of 0.1 counts for more.
        loud = method.reader(parameters, history, {**batch, "noise": torch.tensor([0.1, 0.0])})
        weights = shares * 0.5 / shares.norm() + torch.tensor([0.1, 0.0])
        torch.testing.assert_close(loud, weights / weights.sum() * torch.tensor([1.0, 2.0]))

    def batch(self, there: int, shown: int) -> Batch:
        return {
            "there": torch.arange(5) < there,
            "shown": torch.tensor(shown),
            "candidate:item": torch.arange(5),
            "history:item": torch.arange(5),
        }

    @pytest.mark.parametrize(
        ("epsilon", "there", "shown"), [(1.0, 5, 10), (3.0, 5, 10), (0.1, 5, 20), (1.0, 3, 3), (2.0, 2, 40)]
    )
    def test_the_click_is_drawn_again(self, epsilon: float, there: int, shown: int) -> None:
        """Pearson's test at one in a million, of 10,000 draws."""
        method = published(epsilon=epsilon, negatives=4)
        given = self.batch(there, shown)
        draw = vmap(lambda key: method._permuted(given, Rng(key))["candidate:item"])
        order = draw(Rng.of(7).fold(torch.arange(10_000)).key)
        beta = max(0.0, math.log(4 * math.exp(epsilon) / (shown - 1)))
        weights = np.array([math.exp(beta) if place == 0 else 1.0 for place in range(there)])
        found = np.bincount(order[:, 0].numpy())
        assert stats.chisquare(found, 10_000 * weights / weights.sum()).pvalue > 1e-6
        assert torch.equal(order.sort(1).values, torch.arange(5).expand(10_000, 5))
        assert torch.equal(order[:, there:], torch.arange(5)[there:].expand(10_000, -1))
        # The true click takes the place of the one that was drawn.
        assert (order.gather(1, order[:, :1]) == 0).all()

    def test_without_noise_or_without_others_it_stays(self) -> None:
        for method, given in (
            (published(negatives=4, noise="none"), self.batch(5, 10)),
            (published(negatives=4, epsilon=1e-6), self.batch(1, 1)),
            (published(negatives=4, epsilon=1e-6), self.batch(0, 0)),
            (published(negatives=4, epsilon=1e4), self.batch(5, 10)),
        ):
            draw = vmap(lambda key, method=method, given=given: method._permuted(given, Rng(key))["candidate:item"])
            assert torch.equal(draw(Rng.of(8).fold(torch.arange(50)).key), torch.arange(5).expand(50, 5))

    def test_nothing_is_claimed_of_it(self) -> None:
        charges = published().uplink.charges(Cohort(np.arange(5), "all", 5, 5))
        ledger = Ledger()
        ledger.charge("round 1", charges)
        assert ledger.epsilon("server", "user", delta=1e-3).epsilon == math.inf


def scores(method: PrivateRec, shared: Tree, items: list[int], key: int = 3) -> Tensor:
    history = torch.tensor(items, dtype=torch.int64)
    data = Data(history, torch.ones(len(items)) > 0, history, texts())
    return method.score(shared, {"key": torch.tensor(key)}, data, torch.arange(30))


class TestServing:
    def test_at_a_huge_epsilon_a_choice_is_what_the_device_would_choose(self) -> None:
        plain = certified(sharpness=5.0)
        shared = moved(plain)
        asks = replace(plain, query="choice", serving_epsilon=60.0)
        for items in ([1, 2, 3], [9], [4, 17], []):
            found, expected = scores(asks, shared, items), scores(plain, shared, items)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            best = plain.interest(shared, shared["news/item"][items], torch.ones(len(items)) > 0) if items else None
            if best is not None:
                torch.testing.assert_close(expected, shared["news/item"] @ shared["basis"][best.argmax()])

    def test_at_a_huge_epsilon_attention_is_what_the_device_would_mix(self) -> None:
        """SoftPlus makes weights alike that ReLU would leave apart."""
        plain = certified(mechanism="attention", basis=4, sharpness=5.0)
        shared = moved(plain)
        asks = replace(plain, query="attention", serving_epsilon=1e7, serving_noise="laplace")
        shares = plain.interest(shared, shared["news/item"][[1, 2]], torch.ones(2) > 0).softmax(-1)
        torch.testing.assert_close(scores(plain, shared, [1, 2]), shared["news/item"] @ (shares @ shared["basis"]))
        soft = torch.nn.functional.softplus(shares)
        expected = shared["news/item"] @ (soft / soft.sum() @ shared["basis"])
        torch.testing.assert_close(scores(asks, shared, [1, 2]), expected, atol=1e-4, rtol=1e-3)

    def test_nobody_is_the_same_for_everyone(self) -> None:
        for method in (certified(query="nobody"), published(query="nobody"), certified(encoder="nrms", query="nobody")):
            shared = moved(method)
            first, *others = (scores(method, shared, items, key) for items, key in (([1, 2], 3), ([7], 9), ([], 1)))
            assert all(torch.equal(first, other) for other in others)
            news = method.vectors(shared, texts(), torch.arange(30))
            torch.testing.assert_close(first, news @ shared["basis"].mean(0))

    @pytest.mark.parametrize("query", ["choice", "attention"])
    def test_noise_is_that_of_the_person_the_model_and_the_length(self, query: str) -> None:
        method = certified(query=query, serving_epsilon=0.5, basis=8)
        shared = moved(method)
        everything = [1, 2, 3, 4, 5, 6]
        first = scores(method, shared, everything)
        assert torch.equal(scores(method, shared, everything), first)
        models = [scores(method, {**shared, "pad": shared["pad"] + step}, everything) for step in (1e-3, 2e-3, 3e-3)]
        lengths = [scores(method, shared, [1] * count) for count in (1, 2, 3, 4)]
        people = [scores(method, shared, everything, key) for key in range(4)]
        for some in (models, lengths, people):
            assert len({tuple(one.tolist()) for one in some}) > 1

    def test_no_two_models_and_settings_share_their_noise(self) -> None:
        """A difference of two answers with one draw of noise would tell the interest exactly."""

        def noise(method: PrivateRec, basis: Tensor, pad: float) -> Tensor:
            shared = {**start, "basis": basis, "pad": torch.full_like(start["pad"], pad)}
            history, real = torch.tensor([1, 2, 3]), torch.ones(3) > 0
            stream = method._request(shared, {"key": torch.tensor(7)}, history, real, torch.tensor(3))
            return stream.normal(4)

        method = certified(query="attention", serving_noise="gaussian")
        start = moved(method)
        basis = start["basis"]
        drawn = [
            noise(method, basis, 0.0),
            noise(method, basis.flip(0), 0.0),
            *(noise(method, rows, math.nan) for rows in (basis, basis.flip(0), 2 * basis)),
            *(noise(method, rows, 3e38) for rows in (basis, 2 * basis)),
            noise(replace(method, serving_epsilon=2.0), basis, 0.0),
            noise(replace(method, serving_guarantee="published"), basis, 0.0),
            noise(replace(method, query="choice"), basis, 0.0),
            noise(replace(method, query="choice", padding=0.5), basis, 0.0),
        ]
        assert len({tuple(one.tolist()) for one in drawn}) == len(drawn)
        assert torch.equal(drawn[2], noise(method, basis, math.nan))

    def test_a_choice_is_randomised_for_each_person(self) -> None:
        """2,000 people with one history: the true choice has its share, within 5 deviations of 0.0111."""
        method = certified(query="choice", serving_epsilon=1.0, basis=4)
        shared = moved(method)
        plain = replace(method, query="")
        history = torch.tensor([1, 2, 3])
        data = Data(history, history > 0, history, texts())
        ask = vmap(lambda key: method.score(shared, {"key": key}, data, torch.arange(30)))
        found = ask(torch.arange(2_000) * 7919)
        server = method.serving.server(torch.arange(4))
        people = server @ shared["basis"] @ shared["news/item"].T
        told = torch.cdist(found, people).argmin(1)
        best = plain.interest(shared, shared["news/item"][history], history > 0).argmax()
        share = math.e / (math.e + 3)
        assert abs(float((told == best).float().mean()) - share) < 5 * 0.0111
        counts = np.bincount(told.numpy(), minlength=4)
        assert counts.min() > 250

    def test_the_mechanism_of_a_request(self) -> None:
        method = certified(query="attention", serving_theta=0.6, serving_epsilon=2.0, serving_noise="laplace")
        assert method.serving.scale == pytest.approx(attention_l1(0.6, 3) / 2)  # type: ignore[attr-defined]
        assert replace(method, serving_guarantee="published").serving.scale == pytest.approx(0.3)  # type: ignore[attr-defined]
        assert replace(method, query="choice", padding=0.5).serving.epsilon == before_padding(2.0, 0.0, 0.5)[0]


class TestBasis:
    def test_centres_are_those_of_clusters_and_as_long_as_news(self) -> None:
        """Three directions from the mean, 20 news around each."""
        corners = 10 * torch.eye(4)[:3]
        news = corners.repeat_interleave(20, 0) + 0.1 * Rng.of(0).normal(60, 4)
        found = centres(news, 3, Rng.of(1))
        torch.testing.assert_close(found.norm(dim=1), news.norm(dim=1).mean().expand(3))
        directions = corners - corners.mean(0)
        fit = torch.nn.functional.cosine_similarity(found[:, None], directions[None], dim=2)
        assert sorted(fit.argmax(1).tolist()) == [0, 1, 2]
        assert float(fit.max(1).values.min()) > 0.99

    def test_news_that_are_all_alike_or_few_are_no_problem(self) -> None:
        for news in (torch.ones(5, 3), torch.zeros(2, 3), Rng.of(0).normal(2, 3)):
            assert torch.isfinite(centres(news, 4, Rng.of(1))).all()

    def test_it_is_the_same_for_everyone_who_starts_from_the_seed(self) -> None:
        method = certified(encoder="nrms")
        first, again, other = (method.init_shared(texts(), Rng.of(seed))["basis"] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

"""FedRec and DP-FedRec: by hand, by their kernel and by clients, and what a request tells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.methods.news import SMALL, made_up_vectors, texts, worded
from torch import Tensor
from torch.func import vmap

from homebody.core import Batch, Catalogue, Cohort, Collected, Data, Method, Shown, Total, Tree
from homebody.errors import HomebodyError
from homebody.federation.device.limits import estimate
from homebody.methods.dp_fedrec import DPFedRec
from homebody.methods.fedrec import INDEX, FedRec, drawn_impression, model_hash
from homebody.methods.kernels import indexed, kernel_of, train_many
from homebody.methods.privaterec import PrivateRec
from homebody.models.adam import adam_start, adam_step
from homebody.privacy import Channel, Clip, Gaussian, Laplace, SecureSum
from homebody.privacy.stages import VectorLaplace
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import impressed

PADDED = PrivateRec(guarantee="published", basis=3, epsilon=2.0, padding=0.4, sharpness=4.0, **SMALL)
METHODS: dict[str, FedRec] = {
    "id": FedRec(encoder="id", **SMALL),
    "nrms": FedRec(encoder="nrms", **SMALL),
    "naml": FedRec(encoder="naml", **SMALL),
    "plm": FedRec(encoder="plm", **SMALL),
    "without ids": FedRec(encoder="naml", ids=False, **SMALL),
    "published id": replace(PADDED, encoder="id"),
    "published nrms": replace(PADDED, encoder="nrms", noise="gaussian"),
    "published plm": replace(PADDED, encoder="plm", theta=0.5),
}


@pytest.fixture(autouse=True)
def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_vectors(monkeypatch)


def begun(method: Method, *, fused: bool = True) -> tuple[Simulator, Tree]:
    """A simulator, and parameters of which none is 0."""
    simulator = Simulator(worded(), fused=fused)
    simulator.begin(method, Rng.of(0))
    shared = method.init_shared(simulator.catalogue, Rng.of(1))
    return simulator, {name: value + 0.1 * Rng.of(2, name).normal(*value.shape) for name, value in shared.items()}


def batches(method: Method, simulator: Simulator, count: int) -> Batch:
    users = simulator.available()[:count]
    data = simulator._data(users)
    return simulator._batches(method, simulator._streams(Rng.of(5), users), data)


def near(found: Tree, expected: Tree) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max()) if value.is_floating_point() else 0.0
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * max(scale, 1e-3), msg=name)


class TestLayers:
    def test_a_language_models_layers_move_at_a_rate_of_their_own(self) -> None:
        method = FedRec(encoder="plm", layers=1, learning_rate=0.5, layers_rate=0.125, **SMALL)
        name = "news/encoder.layer.5.output.dense.bias"
        shared = {name: torch.zeros(2), "pad": torch.zeros(2)}
        slopes = {name: torch.tensor([1.0, -3.0]), "pad": torch.tensor([-2.0, 5.0])}
        after, _ = method.server(shared, adam_start(shared), Total(slopes, 1))
        torch.testing.assert_close(after, {name: torch.tensor([-0.125, 0.125]), "pad": torch.tensor([0.5, -0.5])})

    def test_other_encoders_have_none(self) -> None:
        with pytest.raises(HomebodyError, match="The encoder nrms has no language model whose layers could be trained"):
            FedRec(encoder="nrms", layers=2, **SMALL)
        with pytest.raises(HomebodyError, match="layers"):
            FedRec(encoder="plm", layers=7, **SMALL)


class TestKernel:
    @pytest.mark.parametrize("name", METHODS)
    def test_the_sum_at_once_equals_the_sum_of_clients(self, name: str) -> None:
        method = METHODS[name]
        simulator, shared = begun(method)
        some = batches(method, simulator, 9)
        assert any("keep" in part for part in some) == (method.encoder != "id"), "dropout is drawn"
        # One of them has no impression, and one has no history.
        some["there"][4] = False
        some["real"][2] = False
        locals_ = {"key": torch.arange(9)}
        each, kept = train_many(method, shared, locals_, some, fused=False)
        total = kernel_of(method).total
        assert total is not None
        found, after = total(method, shared, locals_, some)
        near(found, {key: value.sum(0) for key, value in each.items()})
        near(after, kept)
        assert kept["loss"][4] == 0
        assert kept["loss"][2] > 0
        assert all(bool(value.any()) for key, value in found.items() if not key.endswith("offset"))

    @pytest.mark.parametrize("name", METHODS)
    def test_scores_by_the_index_equal_scores_without(self, name: str) -> None:
        method = METHODS[name]
        simulator, shared = begun(method)
        user = np.array([int(simulator.available()[3])])
        data = simulator._client_data(*(part[0] for part in simulator._data(user)))
        local, items = {"key": torch.tensor(3)}, torch.tensor([7, 0, 119, 7])
        plain = method.score(shared, local, data, items)
        fast = indexed(method, shared, simulator.catalogue)
        torch.testing.assert_close(method.score(fast, local, data, items), plain, rtol=1e-4, atol=1e-5)
        assert fast[INDEX].shape == (121, SMALL["d"])
        assert not fast[INDEX][120].any()
        assert plain[0] == plain[3]
        assert plain.unique().numel() == 3

    @pytest.mark.parametrize("name", ["id", "naml", "published id"])
    def test_a_round_is_the_same_by_the_kernel_and_by_clients(self, name: str) -> None:
        method = METHODS[name]
        rounds = [collected(method, fused=fused, users=20) for fused in (True, False)]
        near(*(one.total.sum for one in rounds))
        numbers = sum(value.numel() for value in begun(method)[1].values())
        assert rounds[0].bytes_up == rounds[1].bytes_up == 20 * 4 * numbers
        assert rounds[0].bytes_down == rounds[1].bytes_down
        assert rounds[0].loss == pytest.approx(rounds[1].loss, rel=1e-5)

    def test_metrics_and_groups_do_not_depend_on_the_kernel(self) -> None:
        method = METHODS["nrms"]
        both = []
        for fused in (True, False):
            simulator, shared = begun(method, fused=fused)
            both.append(simulator.evaluate(method, shared).metrics)
        assert both[0] == pytest.approx(both[1], rel=1e-5)

    def test_few_clients_at_a_time_give_the_same_sum_and_count_the_same_bytes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = collected(METHODS["naml"], fused=True, users=20)
        monkeypatch.setattr("homebody.simulation.clients.SHOWN_AT_ONCE", 30)  # three clients of ten
        parts = collected(METHODS["naml"], fused=True, users=20)
        near(parts.total.sum, whole.total.sum)
        assert parts.bytes_up == whole.bytes_up

    @pytest.mark.parametrize("channel", [Channel(Clip(1e-4)), Channel(SecureSum())], ids=["clipped", "secret"])
    def test_a_channel_that_changes_or_hides_updates_gets_each_of_them(self, channel: Channel) -> None:
        method = replace(METHODS["id"], uplink=channel)
        simulator, _ = begun(method)
        assert simulator._added(method) is None
        found = collected(method, fused=True, users=20).total.sum
        norm = math.sqrt(sum(float((value**2).sum()) for value in found.values()))
        alone = collected(METHODS["id"], fused=True, users=20).total.sum
        if channel.facts.clips:
            assert norm <= 20 * 1e-4
        else:
            near(found, alone)


def collected(method: Method, *, fused: bool, users: int) -> Collected:
    simulator, shared = begun(method, fused=fused)
    who = simulator.available()[:users]
    return simulator.collect(method, shared, Cohort(who, "fixed", users, 149), Rng.of(4), 1)


THREE = Catalogue(3)


def somebody(items: list[int], shown: list[int], click: int, before: int) -> Data:
    owned = torch.tensor(items, dtype=torch.int64)
    impression = Shown(torch.tensor([shown]), (torch.tensor(shown) == click)[None], torch.tensor([before]))
    return Data(owned, torch.ones(len(items)) > 0, owned, THREE, shown=impression)


class TestByHand:
    """Three news of one number each: r = (1, 2, -1), and r₀ = 0.5."""

    method = FedRec(encoder="id", d=1, negatives=1, dropout=0.0, learning_rate=0.1)
    shared = {"news/item": torch.tensor([[1.0], [2.0], [-1.0]]), "pad": torch.tensor([0.5])}  # noqa: RUF012

    def test_two_clients_and_the_server(self) -> None:
        """The first read news 0 and 1, then clicked 2 rather than 0; what they read later does not count. u = 1.5,
        s = (-1.5, 1.5), so p = (1, e³) / (1 + e³). The loss is log(1 + e³); its slope in s is (q, -q) times -1, where
        q = e³ / (1 + e³). The second has read nothing: u = r₀ = 0.5; they clicked 1 rather than 0: s = (1, 0.5).
        """
        q = math.exp(3) / (1 + math.exp(3))
        first, kept = self.sent(somebody([0, 1, 2], [2, 0], click=2, before=2))
        assert float(kept["loss"]) == pytest.approx(math.log1p(math.exp(3)), rel=1e-5)
        # ds₂ = -q, ds₀ = q. r₂ gets -q u, r₀' gets q u; u gets -q r₂ + q r₀' = 2q, half of it for each news read.
        expected = [[q * 1.5 + q], [q], [-q * 1.5]]
        torch.testing.assert_close(first["news/item"], torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert float(first["pad"]) == 0
        p = math.exp(0.5) / (1 + math.exp(0.5))
        second, kept = self.sent(somebody([], [0, 1], click=1, before=0))
        assert float(kept["loss"]) == pytest.approx(-math.log(p), rel=1e-5)
        torch.testing.assert_close(
            second["news/item"], torch.tensor([[0.5 * (1 - p)], [-0.5 * (1 - p)], [0.0]]), rtol=1e-5, atol=1e-6
        )
        assert float(second["pad"]) == pytest.approx(-(1 - p) * (2 - 1), rel=1e-5)
        # The first step of Adam goes by the learning rate against the sign of the mean, whatever its size.
        total = Total({name: first[name] + second[name] for name in first}, 2)
        after, state = self.method.server(self.shared, self.method.init_server(self.shared), total)
        signs = [1.0, 1.0, -1.0]
        moved = torch.tensor([[1.0], [2.0], [-1.0]]) - 0.1 * torch.tensor(signs)[:, None]
        torch.testing.assert_close(after["news/item"], moved, rtol=1e-5, atol=1e-6)
        assert float(after["pad"]) == pytest.approx(0.5 + 0.1, rel=1e-5)
        mean = total.sum["pad"] / 2
        torch.testing.assert_close(state["m/pad"], 0.1 * mean)
        torch.testing.assert_close(state["v/pad"], 0.01 * mean**2)
        assert state["step"] == 1

    def sent(self, data: Data) -> tuple[Tree, Tree]:
        update, kept = self.method.client(self.shared, {}, self.method.prepare(data, Rng.of(0)))
        return update, kept

    def test_a_score_is_the_product_with_the_mean_of_the_last_news(self) -> None:
        data = somebody([2, 0, 1], [0, 1], click=1, before=0)
        local = self.method.init_local(self.shared, Rng.of(0))
        scores = self.method.score(self.shared, local, data, torch.arange(3))
        torch.testing.assert_close(scores, 2 / 3 * torch.tensor([1.0, 2.0, -1.0]))
        two = replace(self.method, latest=2).score(self.shared, local, data, torch.arange(3))
        torch.testing.assert_close(two, 1.5 * torch.tensor([1.0, 2.0, -1.0]))
        nobody = self.method.score(self.shared, local, somebody([], [0, 1], 1, 0), torch.arange(3))
        torch.testing.assert_close(nobody, 0.5 * torch.tensor([1.0, 2.0, -1.0]))

    def test_who_has_no_impression_sends_zeros(self) -> None:
        nothing = Shown(torch.full((2, 4), 3), torch.zeros(2, 4) > 0, torch.zeros(2, dtype=torch.int64))
        for shown in (nothing, None):
            update, kept = self.sent(somebody([0, 1], [0, 1], 1, 2)._replace(shown=shown))
            assert not any(bool(value.any()) for value in update.values())
            assert kept["loss"] == 0


class TestCandidates:
    def test_a_click_and_others_that_were_not_clicked_all_drawn_evenly(self) -> None:
        """Impressions of five items, two of them clicked, three times two of three negatives: 3,000 draws.

        Each share has a standard deviation of at most 0.0092, and there are five: one of 4.5 is missed once in 30,000.
        """
        method = FedRec(encoder="id", d=1, negatives=2)
        items, clicked = torch.tensor([8, 3, 5, 1, 9, 10]), torch.tensor([False, True, False, True, False, False])
        keys = Rng.of(3).fold(torch.arange(3_000)).key
        drawn, there = vmap(lambda key: method._candidates(items, clicked, 10, Rng(key)))(keys)
        assert there.all()
        assert set(drawn[:, 0].tolist()) == {3, 1}
        assert abs(float((drawn[:, 0] == 3).float().mean()) - 0.5) < 4.5 * 0.0092
        others = drawn[:, 1:]
        assert set(others.flatten().tolist()) == {8, 5, 9}
        assert (others[:, 0] != others[:, 1]).all()
        for item in (8, 5, 9):
            assert abs(float((others == item).any(1).float().mean()) - 2 / 3) < 4.5 * 0.0087

    def test_too_few_others_leave_empty_places(self) -> None:
        method = FedRec(encoder="id", d=1, negatives=4)
        items, there = method._candidates(torch.tensor([8, 3, 10]), torch.tensor([False, True, False]), 10, Rng.of(0))
        assert items.tolist() == [3, 8, 10, 10, 10]
        assert there.tolist() == [True, True, False, False, False]

    def test_each_impression_with_a_click_is_drawn_as_often(self) -> None:
        """Of four, one has no click and one is padding: 2,000 draws, with a standard deviation of 0.011."""
        clicked = torch.tensor([[True, False], [False, False], [False, True], [False, False]])
        shown = Shown(torch.tensor([[0, 1], [2, 3], [4, 5], [9, 9]]), clicked, torch.tensor([1, 2, 3, 0]))
        keys = Rng.of(4).fold(torch.arange(2_000)).key
        before = vmap(lambda key: drawn_impression(shown, Rng(key), torch.device("cpu"))[2])(keys)
        assert set(before.tolist()) == {1, 3}
        assert abs(float((before == 1).float().mean()) - 0.5) < 5 * 0.011


def test_adam_equals_torchs() -> None:
    start, rng = Rng.of(0).normal(3, 2), Rng.of(1)
    mine, state = {"w": start, "still": torch.ones(2)}, adam_start({"w": start, "still": torch.ones(2)})
    theirs = torch.nn.Parameter(start.clone())
    optimiser = torch.optim.Adam([theirs], lr=0.03, betas=(0.9, 0.99))
    for step in range(5):
        slope = rng.fold(step).normal(3, 2)
        theirs.grad = slope
        optimiser.step()
        mine, state = adam_step(mine, state, {"w": slope}, 0.03, (0.9, 0.99))
        torch.testing.assert_close(mine["w"], theirs.detach())
    assert mine["still"].tolist() == [1.0, 1.0]


class TestDPFedRec:
    def test_its_channel_is_made_of_its_settings(self) -> None:
        channel = DPFedRec(theta=0.25, epsilon=3.0, guarantee="published").uplink
        clip, noise = channel.stages
        assert clip == Clip(0.25)
        assert isinstance(noise, VectorLaplace)
        assert (noise.epsilon, noise.guarantee, noise.norm) == (3.0, "published", 0.25)
        again = replace(DPFedRec(), epsilon=7.0)
        assert again.uplink.stages[1] == replace(noise, epsilon=7.0, guarantee="certified", norm=0.005)

    @pytest.mark.parametrize("channel", [Channel(Clip(1.0)), Channel(Clip(1.0, order=1), Laplace(1.0))])
    def test_other_channels_are_refused(self, channel: Channel) -> None:
        with pytest.raises(HomebodyError, match="DP-FedRec has stages of its own"):
            DPFedRec(uplink=channel)
        with pytest.raises(HomebodyError, match="DP-FedRec has stages of its own"):
            replace(DPFedRec(), uplink=Channel(Clip(1.0), SecureSum(), Gaussian(1.0)))

    @pytest.mark.parametrize("fused", [True, False])
    def test_what_is_sent_is_the_clipped_gradient_with_noise_of_its_scale(self, fused: bool) -> None:
        """500 numbers of 20 clients, Laplace noise of scale b: the mean of squares is 2b² × 20, with a relative
        standard deviation under 0.08; 4.5 of them are missed once in 150,000."""
        method = DPFedRec(encoder="id", **{**SMALL, "d": 4}, theta=1e-6, epsilon=3.0, guarantee="published")
        sums = collected(method, fused=fused, users=20).total.sum
        numbers = torch.cat([value.flatten() for value in sums.values()]).double()
        variance = 2 * (2 * 1e-6 / 3.0) ** 2 * 20
        assert len(numbers) == 121 * 4
        assert abs(float((numbers**2).mean()) / variance - 1) < 4.5 * 0.08
        assert collected(method, fused=fused, users=20).bytes_up == 20 * 4 * len(numbers)


def scores(method: FedRec, shared: Tree, items: list[int], key: int = 3) -> Tensor:
    history = torch.tensor(items, dtype=torch.int64)
    data = Data(history, torch.ones(len(items)) > 0, history, texts())
    return method.score(shared, {"key": torch.tensor(key)}, data, torch.arange(30))


class TestServing:
    """What a request tells, in a simulation."""

    asks = FedRec(encoder="id", query="vector", serving_theta=1.0, serving_epsilon=5.0, **SMALL)

    def model(self, method: FedRec, seed: int = 1) -> Tree:
        return method.init_shared(texts(), Rng.of(seed))

    def noise(self, shared: Tree, items: list[int], key: int = 3) -> Tensor:
        """The noise of a request, read off the scores."""
        loud = replace(self.asks, serving_epsilon=1e7)
        apart = scores(self.asks, shared, items, key) - scores(loud, shared, items, key)
        return torch.linalg.lstsq(shared["news/item"].double(), apart.double()[:, None]).solution[:, 0]

    def test_the_same_question_is_asked_again_with_the_same_noise(self) -> None:
        shared = self.model(self.asks)
        assert torch.equal(scores(self.asks, shared, [1, 2, 3]), scores(self.asks, shared, [1, 2, 3]))
        first = self.noise(shared, [1, 2, 3])
        torch.testing.assert_close(self.noise(shared, [1, 2, 3]), first, atol=1e-3, rtol=1e-3)

    def test_another_model_another_history_and_another_person_get_other_noise(self) -> None:
        shared = self.model(self.asks)
        first = self.noise(shared, [1, 2, 3])
        moved = {**shared, "pad": shared["pad"] + 1e-3}
        others = [self.noise(shared, items) for items in ([1, 2], [4, 5, 6], [3, 2, 1])]
        for other in (*others, self.noise(moved, [1, 2, 3]), self.noise(shared, [1, 2, 3], key=4)):
            assert float((other - first).norm()) > 0.1
        assert model_hash(moved) != model_hash(shared)
        assert model_hash({**shared, INDEX: torch.ones(2)}) == model_hash(shared)

    def test_without_noise_it_is_the_clipped_vector(self) -> None:
        loud = replace(self.asks, serving_epsilon=1e7, serving_theta=0.05)
        plain = replace(self.asks, query="")
        shared = self.model(loud)
        shared = {**shared, "news/item": 5 * shared["news/item"]}
        person = shared["news/item"][[1, 2, 3]].mean(0)
        expected = scores(plain, shared, [1, 2, 3]) * 0.05 / person.norm()
        torch.testing.assert_close(scores(loud, shared, [1, 2, 3]), expected, atol=1e-4, rtol=1e-3)

    @pytest.mark.parametrize(
        "method",
        [FedRec(encoder="nrms", query="nobody", **SMALL), FedRec(encoder="id", query="nobody", **SMALL)],
        ids=["nrms", "id"],
    )
    def test_nobody_is_the_same_for_everyone(self, method: FedRec) -> None:
        shared = self.model(method)
        everyone = [scores(method, shared, items, key) for items, key in (([1, 2, 3], 3), ([7], 9), ([], 1))]
        torch.testing.assert_close(everyone[0], everyone[1])
        torch.testing.assert_close(everyone[0], everyone[2])
        torch.testing.assert_close(everyone[2], scores(replace(method, query=""), shared, []))
        assert everyone[0].unique().numel() > 10

    def test_a_simulation_asks_each_person_with_noise_of_their_own(self) -> None:
        method = replace(self.asks, serving_epsilon=0.5)
        simulator = Simulator(impressed())
        simulator.begin(method, Rng.of(0))
        shared = method.init_shared(simulator.catalogue, Rng.of(1))
        first = [simulator.scores(method, shared, user) for user in (3, 3, 4)]
        assert torch.equal(first[0], first[1])
        assert simulator.evaluate(method, shared).metrics == simulator.evaluate(method, shared).metrics
        quiet: Callable[[int], Tensor] = lambda user: simulator.scores(replace(method, query=""), shared, user)  # noqa: E731
        apart = [one - quiet(user) for one, user in zip(first, (3, 3, 4), strict=True)]
        assert float((apart[2] - apart[0]).norm()) > 0.1


def test_a_round_takes_less_than_ranking_all_news() -> None:
    """By which a device times its answers: it would take minutes to encode 10,000 news, and a round encodes few."""
    method = FedRec(encoder="nrms", words="random", ids=False)
    many = replace(texts(), n_items=10_000)
    few, all_of_them = (method.work(news, 50) for news in (texts(), many))
    assert all_of_them.operations > 50 * (all_of_them.operations - all_of_them.ranking)
    assert all_of_them.operations - all_of_them.ranking < 2 * (few.operations - few.ranking)
    whole, trained = (estimate(method, many, 50, people=2, ranks=ranks) for ranks in (True, False))
    assert whole.operations - trained.operations == 2 * all_of_them.ranking

"""Several apps of one person: what their parts are bounded by, the noise between them, and what is charged for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from homebody.core import Cohort, Rows, Tree
from homebody.errors import HomebodyError
from homebody.methods.fl_mv_dssm import FLMVDSSM
from homebody.privacy import Budget, Channel, Clip, Gaussian, GaussianRelease, Ledger, SecureSum, ViewNoise, Views
from homebody.privacy.specs import parse_channel, stage_texts
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import described
from homebody.training import fit

DRAWN = Cohort(np.arange(30), "fixed", size=30, population=300)


def rows(index: list[int], value: list[float], size: int = 4) -> Rows:
    return Rows(torch.tensor(index), torch.tensor(value)[:, None], size)


def parts(**views: list[float]) -> Tree:
    return {f"{name}/item/w": torch.tensor(value) for name, value in views.items()}


def small(channel: Channel, *, semi: bool = False, views: str = "profile,taste") -> FLMVDSSM:
    return FLMVDSSM(channel, views=views, aggregate_users=not semi, widths="4,2", batch_size=3, negatives=2)


def epsilons(channel: Channel, rounds: int, delta: float) -> dict[str, float]:
    fitted = fit(small(channel, semi=True), Simulator(described()), rounds=rounds, cohort=2, evaluate_every=rounds)
    return fitted.ledger.epsilons(delta)


class TestViews:
    def test_each_view_is_clipped_by_itself_over_all_its_parts(self) -> None:
        update = {
            "a/item/w": torch.tensor([3.0, 0.0]),
            "a/item/b": torch.tensor([4.0]),
            "b/item/w": torch.tensor([0.0, 0.1]),
            "b/item/b": torch.tensor([0.2]),
        }
        found = Views(clip=1.0).device(update, Rng.of(0))
        assert sorted(found) == ["item/b", "item/w"]
        assert found["item/w"].tolist() == pytest.approx([0.3, 0.05], rel=1e-3)
        assert found["item/b"].tolist() == pytest.approx([0.4 + 0.1], rel=1e-3)

    def test_rows_of_all_views_join(self) -> None:
        same = {"a/item/t": rows([0, 2], [0.1, 0.2]), "b/item/t": rows([0, 2], [0.3, 0.4])}
        other = {"a/item/t": rows([0, 2], [0.1, 0.2]), "b/item/t": rows([2, 3, -1], [0.4, 0.5, 9.0])}
        mixed = {"a/item/t": rows([0, 2], [0.1, 0.2]), "b/item/t": torch.tensor([[0.3], [0.0], [0.4], [0.0]])}
        for update, expected in (
            (same, [0.2, 0.0, 0.3, 0.0]),
            (other, [0.05, 0.0, 0.3, 0.25]),
            (mixed, [0.2, 0.0, 0.3, 0.0]),
        ):
            found = Views(clip=1.0).device(update, Rng.of(0))["item/t"]
            whole = found.dense() if isinstance(found, Rows) else found
            assert whole[:, 0].tolist() == pytest.approx(expected)

    def test_the_mean_divides_by_the_planned_number(self) -> None:
        alone = Views(clip=1.0, count=4).device(parts(a=[0.4]), Rng.of(0))
        assert alone["item/w"].tolist() == pytest.approx([0.1])

    def test_what_is_no_view_s_part_passes_as_it_is(self) -> None:
        update = {**parts(a=[9.0]), "a/user/w": torch.tensor([9.0]), "loss": torch.tensor(7.0)}
        found = Views(clip=1.0).device(update, Rng.of(0))
        assert found["a/user/w"].tolist() == [9.0]
        assert found["loss"].item() == 7.0

    @pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30, -1e9])
    def test_a_hostile_view_moves_the_mean_by_the_clip_at_most(self, bad: float) -> None:
        honest = parts(a=[0.1, 0.2])
        found = Views(clip=0.5).device({**honest, **parts(b=[bad, bad])}, Rng.of(0))["item/w"]
        without = Views(clip=0.5, count=2).device(honest, Rng.of(0))["item/w"]
        assert torch.isfinite(found).all()
        assert float((found - without).norm()) <= 0.25

    def test_sampled_views_take_turns(self) -> None:
        update = parts(a=[0.3], b=[0.03], c=[0.003])
        stage = Views(clip=1.0, sample=1, count=3)
        drawn = [round(stage.device(update, Rng.of(seed))["item/w"].item(), 6) for seed in range(600)]
        counts = [drawn.count(value) for value in (0.3, 0.03, 0.003)]
        assert sum(counts) == 600
        assert min(counts) > 150  # 200 expected; this few come once in 10⁵ seeds

    def test_a_stage_is_written_as_it_is_read(self) -> None:
        texts = ["views:clip=0.5,sample=1", "view-noise:z=4,relation=replace-one", "secure-sum"]
        assert stage_texts(parse_channel(texts)) == texts
        assert stage_texts(parse_channel(["views:clip=0.5", "view-noise:z=1"])) == ["views:clip=0.5", "view-noise:z=1"]

    @pytest.mark.parametrize(
        ("stages", "sentence"),
        [
            ((ViewNoise(1),), "put views right before it"),
            ((Views(0.5), Views(0.5)), "second Views"),
            ((Views(0.5), Clip(1.0), ViewNoise(1)), "right after views"),
            ((Views(0.5), ViewNoise(1), Clip(1.0)), "clip first"),
            ((Views(0.5), ViewNoise(1), Gaussian(1)), "cannot follow view noise"),
            ((Views(0.5), Gaussian(1)), "needs a bound"),
        ],
    )
    def test_nonsense_is_refused(self, stages: tuple[Views, ...], sentence: str) -> None:
        with pytest.raises(HomebodyError, match=sentence):
            Channel(*stages)

    @pytest.mark.parametrize("text", ["views:clip=0", "views:clip=-1", "views:clip=1,sample=-1", "view-noise:z=-1"])
    def test_senseless_settings_are_refused(self, text: str) -> None:
        with pytest.raises(HomebodyError):
            parse_channel(["views:clip=1", text] if text.startswith("view-noise") else [text])

    def test_more_cannot_be_drawn_than_there_are(self) -> None:
        with pytest.raises(HomebodyError, match="3 views cannot be drawn from 2"):
            Channel(Views(0.5, sample=3)).for_views(2)


class TestViewNoise:
    channel = Channel(Views(clip=0.5, count=2), ViewNoise(z=1.5), SecureSum())

    def test_its_scale_is_that_of_what_one_view_changes(self) -> None:
        noise = self.channel.facts.view_noise
        assert noise is not None
        assert noise.scale == 1.5 * 0.5 / 2
        assert self.channel.deviation(10, 9) == 3 * 1.5 * 0.5 / 2

    def test_it_covers_the_shared_part_alone_and_fills_tables(self) -> None:
        update = {"a/item/t": rows([1], [0.5]), "b/item/t": rows([1], [0.5]), "a/user/w": torch.tensor([3.0])}
        sent = self.channel.device(update, Rng.of(1))
        assert sent["a/user/w"].tolist() == [3.0]
        assert (sent["item/t"] != 0).all()

    def test_a_message_lies_on_the_grid(self) -> None:
        noise = self.channel.facts.view_noise
        assert noise is not None
        assert noise.grid is not None
        sent = self.channel.device(parts(a=[0.1] * 500, b=[0.2] * 500), Rng.of(2))["item/w"].double()
        # A float has 24 digits, and the grid is finer only for what is tiny.
        steps = sent / noise.grid.step
        assert torch.allclose(steps, steps.round(), atol=0.5)
        assert noise.grid.step * 2**noise.grid.depth == pytest.approx(noise.scale)

    @pytest.mark.parametrize("devices", [1, 7])
    def test_one_draw_for_many_devices_has_their_distribution(self, devices: int) -> None:
        update = parts(a=[0.1] * 4000, b=[0.2] * 4000)
        each = sum(self.channel.device(update, Rng.of(3, number))["item/w"].double() for number in range(devices))
        before = self.channel.for_sum(update, Rng.of(0))["item/w"]
        assert before.dtype in (torch.int32, torch.int64)
        at_once = self.channel.noise_of_many({"item/w": before.to(torch.int64) * devices}, devices, Rng.of(4))["item/w"]
        clean = devices * Views(clip=0.5).device(update, Rng.of(0))["item/w"][0].item()
        deviation = math.sqrt(devices) * 1.5 * 0.5 / 2
        for noised in (each, at_once.double()):
            assert isinstance(noised, torch.Tensor)
            assert stats.kstest((noised - clean) / deviation, "norm").pvalue > 1e-6

    def test_with_or_without_a_view_the_message_moves_by_no_more_than_it_is_charged_for(self) -> None:
        """Rounding included: at the bound, in a table whose every number is touched."""
        generator = np.random.default_rng(5)
        noise = self.channel.facts.view_noise
        assert noise is not None
        for _ in range(20):
            one, other = (torch.from_numpy(generator.normal(size=5000)).float() for _ in range(2))
            both = self.channel.for_sum({"a/item/w": one, "b/item/w": other}, Rng.of(0))["item/w"]
            alone = self.channel.for_sum({"a/item/w": one, "b/item/w": torch.zeros(5000)}, Rng.of(0))["item/w"]
            assert noise.grid is not None
            moved = float((both - alone).double().norm()) * noise.grid.step
            assert 0.999 * 0.25 < moved <= 0.25

    def test_tables_too_large_for_the_grid_are_refused(self) -> None:
        faint = Channel(Views(clip=0.5, count=2), ViewNoise(z=1e9))
        with pytest.raises(HomebodyError, match="cannot be drawn exactly"):
            faint.device(parts(a=[0.1] * 1000, b=[0.1] * 1000), Rng.of(0))

    def test_without_z_there_is_no_noise_and_no_privacy(self) -> None:
        silent = Channel(Views(clip=0.5, count=2), ViewNoise(z=0))
        assert silent.device(parts(a=[0.1], b=[0.2]), Rng.of(0))["item/w"].tolist() == pytest.approx([0.15])
        (views,) = (one for one in silent.charges(DRAWN) if one.observer == "views")
        assert "no noise" in str(views.event)

    def test_how_many_views_there_are_must_be_known(self) -> None:
        with pytest.raises(HomebodyError, match="name them"):
            FLMVDSSM(parse_channel(["views:clip=0.5", "view-noise:z=1"]))


class TestCharges:
    noisy = Channel(Views(0.5), ViewNoise(z=1))

    def told(self, method: FLMVDSSM) -> dict[str, str]:
        return {charge.observer: str(charge.event) for charge in method.charges(DRAWN)}

    def test_user_towers_without_noise_tell_the_server_everything(self) -> None:
        told = self.told(small(self.noisy))
        assert told["views"] == "Gaussian noise, 1 × the ℓ2 sensitivity (add-remove); no sampling"
        assert all("user towers carry no noise" in told[who] for who in ("server", "clients", "public"))

    def test_towers_that_stay_home_leave_a_message_that_is_noised_whole(self) -> None:
        charges = {charge.observer: charge.event for charge in small(self.noisy, semi=True).charges(DRAWN)}
        # A person in another's place moves the mean by 2 C; the noise is z C / 2.
        assert charges["server"] == GaussianRelease(0.25, "replace-one")
        assert str(charges["public"]).endswith("30 of 300 drawn without replacement")
        assert charges["views"] == GaussianRelease(1.0, "add-remove")

    def test_drawing_views_earns_nothing(self) -> None:
        drawn = small(Channel(Views(0.5, sample=1), ViewNoise(z=1)), semi=True)
        charges = {charge.observer: charge.event for charge in drawn.charges(DRAWN)}
        assert charges["views"] == GaussianRelease(1.0, "add-remove")
        assert charges["server"] == GaussianRelease(0.5, "replace-one")

    def test_without_noise_the_other_views_are_told_everything(self) -> None:
        for channel in (Channel(), Channel(Views(0.5)), Channel(Views(0.5), SecureSum())):
            assert "not private" in self.told(small(channel))["views"]

    def test_one_view_has_no_other(self) -> None:
        assert "views" not in self.told(small(self.noisy, views="taste"))

    def test_the_last_stage_that_speaks_of_an_observer_wins(self) -> None:
        observers = [charge.observer for charge in Channel(Views(0.5), ViewNoise(z=1)).charges(DRAWN)]
        assert observers == ["views", "server", "clients", "public"]


class TestRun:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("z", "relation", "expected"),
        [(4, "add-remove", 10.20), (1, "add-remove", 80.03), (4, "replace-one", 27.18), (1, "replace-one", 260.9)],
    )
    def test_the_ledger_of_a_hundred_rounds(self, z: float, relation: str, expected: float) -> None:
        """The paper claims 4.33 for z = 4, δ = 1e-3."""
        noise = ViewNoise(z, relation)  # type: ignore[arg-type]
        found = epsilons(Channel(Views(0.5), noise), 100, 1e-3)
        assert found["views"] == pytest.approx(expected, rel=5e-4)
        assert math.isfinite(found["server"])

    def test_a_budget_of_the_views_stops_it(self) -> None:
        budget = Budget.parse("eps=10,delta=1e-3,observer=views")
        method = small(Channel(Views(0.5), ViewNoise(z=4)))
        fitted = fit(method, Simulator(described()), rounds=100, cohort=2, evaluate_every=100, budget=budget)
        assert "against the views" in str(fitted.stopped)
        rounds = len({entry.release for entry in fitted.ledger.entries()})
        assert 90 < rounds < 100
        assert fitted.ledger.epsilons(1e-3)["views"] <= 10

    def test_a_budget_needs_another_view(self) -> None:
        with pytest.raises(HomebodyError, match="Nothing is released to the observer 'views'"):
            Budget.parse("eps=10,observer=views").refuse_hopeless(Channel(Clip(1.0), Gaussian(1)).charges(DRAWN))

    def test_a_ledger_without_views_names_three_observers(self) -> None:
        ledger = Ledger()
        assert list(ledger.epsilons()) == ["server", "clients", "public"]

    def test_noise_drawn_at_once_trains_as_noise_of_each_device(self) -> None:
        method = small(Channel(Views(0.5), ViewNoise(z=0.01), SecureSum()))
        quiet = replace(method, uplink=Channel(Views(0.5)))
        cohort = Cohort(np.arange(20), "fixed", 20, 300)

        def summed(one: FLMVDSSM, *, fused: bool) -> Tree:
            runtime = Simulator(described(), fused=fused)
            runtime.begin(one, Rng.of(0, "clients"))
            shared = one.init_shared(runtime.catalogue, Rng.of(0, "shared"))
            return runtime.collect(one, shared, cohort, Rng.of(0, "round"), 1).total.sum

        clean = summed(quiet, fused=False)
        for fused in (True, False):
            found = summed(method, fused=fused)
            noise = (found["item/first"] - clean["item/first"]).double().flatten() / (0.01 * 0.25 * math.sqrt(20))
            assert stats.kstest(noise, "norm").pvalue > 1e-6
            assert torch.allclose(found["taste/user/first"], clean["taste/user/first"], atol=1e-6)

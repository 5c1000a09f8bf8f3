"""The one door off the device: its order, what it refuses, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from homebody.core import Cohort, Total, Tree, Update
from homebody.errors import HomebodyError
from homebody.privacy import (
    OBSERVERS,
    Channel,
    Charge,
    Clip,
    Gaussian,
    GaussianRelease,
    Laplace,
    LaplaceRelease,
    NonPrivate,
    OneBit,
    RandomisedResponse,
    Reports,
    Sampling,
    SecureSum,
    Shuffle,
    ShuffledReports,
)
from homebody.privacy.specs import parse_channel, stage_texts
from homebody.privacy.stages import Stage
from homebody.rng import Rng

EVERYONE = Cohort(np.arange(3), "all", size=3, population=3)
SOME = Cohort(np.arange(30), "fixed", size=30, population=4800)
DRAWN = Sampling("fixed", 30, 4800)


@dataclass(frozen=True)
class Scale(Stage):
    """Multiplies on the device, adds on the server: the order of stages can be read from the result."""

    by: float

    def device(self, update: Update, rng: Rng) -> Update:
        return {name: value * self.by + 1 for name, value in update.items()}

    def server(self, total: Total, rng: Rng) -> Total:
        return Total({name: value / self.by - 1 for name, value in total.sum.items()}, total.clients)


@dataclass(frozen=True)
class OnSum(Scale):
    on_sum = True

    def device(self, update: Update, rng: Rng) -> Update:
        return update


def test_without_stages_everything_passes_as_it_is() -> None:
    update, total = {"w": torch.tensor([1.5])}, Total({"w": torch.tensor([3.0])}, 2)
    assert Channel().device(update, Rng.of(0)) is update
    assert Channel().server(total, Rng.of(0)) is total
    assert total.mean["w"].tolist() == [1.5]


def test_stages_run_in_order_on_the_device_and_are_undone_in_reverse() -> None:
    channel = Channel(Scale(2.0), Scale(10.0))
    assert channel.device({"w": torch.tensor([3.0])}, Rng.of(0))["w"].tolist() == [71.0]
    assert channel.server(Total({"w": torch.tensor([80.0])}, 1), Rng.of(0)).sum["w"].tolist() == [2.5]


def test_what_acts_on_the_sum_runs_last_and_in_order() -> None:
    """((80 / 10 − 1) / 2 − 1) is undone; then / 5 − 1, then / 4 − 1."""
    channel = Channel(Scale(2.0), Scale(10.0), OnSum(5.0), OnSum(4.0))
    found = channel.server(Total({"w": torch.tensor([80.0])}, 1), Rng.of(0)).sum["w"].item()
    assert found == pytest.approx((2.5 / 5 - 1) / 4 - 1)
    assert channel.device({"w": torch.tensor([3.0])}, Rng.of(0))["w"].tolist() == [71.0]


def test_reports_are_decoded_before_the_server_does_more() -> None:
    channel = Channel(OneBit(1.0), OnSum(1.0))
    total = Total({"w[2]": torch.zeros(4)}, 1)
    assert channel.server(total, Rng.of(0)).sum["w"].tolist() == [-1.0, -1.0]


def test_a_plain_channel_charges_every_observer_as_not_private() -> None:
    charges = Channel().charges(EVERYONE)
    assert [charge.observer for charge in charges] == list(OBSERVERS)
    assert {charge.event.kind for charge in charges} == {"not-private"}
    assert {charge.unit for charge in charges} == {"user"}
    assert all(charge.event.reason for charge in charges)  # type: ignore[union-attr]


def test_channels_are_equal_by_what_they_do() -> None:
    assert Channel(Scale(2.0)) == Channel(Scale(2.0))
    assert Channel(Scale(2.0)) != Channel()
    assert Channel(Clip(1.0), Gaussian(1.0)) == Channel(Clip(1.0), Gaussian(1.0))


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([Gaussian(1.0)], "needs a bound on what one person can change: put a Clip of order 2"),
        ([Laplace(1.0)], "put a Clip of order 1"),
        ([Laplace(1.0, where="sum")], "put a Clip of order 1"),
        ([Clip(1.0), Laplace(1.0)], "ℓ2 alone bounds nothing here: put a Clip of order 1"),
        ([Clip(1.0, order=1), Gaussian(1.0)], "put a Clip of order 2"),
        ([Shuffle()], "a whole update can be linked"),
        ([Clip(1.0), Shuffle()], "a whole update can be linked"),
        ([Clip(1.0, order=1), Laplace(1.0), Shuffle()], "a whole update can be linked"),
        ([Clip(1.0), OneBit(1.0), Gaussian(1.0)], "cannot follow one-bit reports"),
        ([Clip(1.0), OneBit(1.0), Clip(1.0)], "cannot follow one-bit reports"),
        ([OneBit(1.0), OneBit(1.0)], "cannot follow one-bit reports"),
        ([OneBit(1.0), Scale(2.0)], "cannot follow one-bit reports"),
        ([OneBit(1.0), Shuffle(), Shuffle()], "second Shuffle"),
        ([OneBit(1.0), Shuffle(), SecureSum()], "keep one of them"),
        ([Clip(1.0), Clip(1.0, order=1), Laplace(1.0), Gaussian(1.0)], "cannot follow Laplace noise"),
        ([Clip(1.0, order=1), Laplace(1.0), OneBit(1.0)], "cannot follow Laplace noise"),
        ([Clip(1.0, order=1), Laplace(1.0), Clip(1.0)], "clip first"),
        ([Clip(1.0), Gaussian(1.0), Gaussian(1.0)], "cannot follow Gaussian noise"),
        ([Clip(1.0), SecureSum(), SecureSum(), Gaussian(1.0)], "second SecureSum"),
        ([Clip(1.0), Gaussian(1.0), SecureSum()], "put it before"),
        ([SecureSum(), Clip(1.0), Gaussian(1.0)], "Clip works on the device, so it cannot come after SecureSum"),
        ([Clip(1.0), Gaussian(1.0), Scale(1.0)], "Scale works on the device, so it cannot come after Gaussian"),
        ([Clip(1.0), Scale(5.0), Gaussian(1.0)], "cannot follow Scale, which states no bound"),
        ([Scale(5.0), Clip(1.0), Gaussian(1.0)], "cannot follow Scale, which states no bound"),
        ([Clip(1.0, order=1), Laplace(1.0, unbounded=True)], "leave out unbounded"),
    ],
)
def test_nonsense_is_refused_when_it_is_built(stages: list[Stage], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence) as refused:
        Channel(*stages)
    assert "\n" not in str(refused.value)


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(HomebodyError, match=r"str is not one: derive it from homebody\.privacy\.Stage"):
        Channel("clip")  # type: ignore[arg-type]


BITS, ANSWERS = OneBit(2.5, k=9), RandomisedResponse(1.0)


@pytest.mark.parametrize(
    ("stages", "known"),
    [
        ((), {"plain": True}),
        ((Clip(3.0), Clip(2.0), Clip(5.0, order=1)), {"norms": {2: 2.0, 1: 5.0}, "plain": True}),
        ((Clip(3.0), SecureSum()), {"norms": {2: 3.0}, "secret": True, "plain": True, "acts_on_sum": "SecureSum"}),
        (
            (Clip(3.0), Gaussian(1.0)),
            {"noise": "gaussian", "noise_on_sum": True, "plain": True, "norms": {2: 3.0}, "acts_on_sum": "Gaussian"},
        ),
        (
            (Clip(3.0, order=1), Laplace(1.0, where="sum")),
            {"noise": "laplace", "noise_on_sum": True, "plain": True, "norms": {1: 3.0}, "acts_on_sum": "Laplace"},
        ),
        ((Clip(3.0, order=1), Laplace(1.0)), {"noise": "laplace", "noise_on_device": True, "norms": {1: 3.0}}),
        ((Laplace(1.0, unbounded=True),), {"noise": "laplace", "noise_on_device": True}),
        ((Clip(3.0), BITS), {"reports": BITS}),
        ((BITS, Shuffle(4)), {"reports": BITS, "shuffled": True, "shuffle": Shuffle(4, reports=(2.5, 9))}),
        ((ANSWERS,), {"responses": ANSWERS, "reader": ANSWERS}),
        ((Clip(3.0), Scale(2.0)), {"unknown": "Scale"}),
        ((Clip(3.0), OnSum(2.0)), {"unknown": "OnSum", "norms": {2: 3.0}, "plain": True, "acts_on_sum": "OnSum"}),
        ((Scale(2.0), Clip(3.0)), {"unknown": "Scale", "norms": {2: 3.0}}),
    ],
    ids=lambda part: "-".join(type(one).__name__ for one in part) if isinstance(part, tuple) else "",
)
def test_a_channel_keeps_what_it_knows(stages: tuple[Stage, ...], known: dict[str, object]) -> None:
    """Whatever is not named here is not so."""
    facts = Channel(*stages).facts
    nothing = {"norms": {}, "noise": "", "acts_on_sum": "", "unknown": ""} | dict.fromkeys(
        ("noise_on_sum", "noise_on_device", "secret", "shuffled", "plain"), False
    )
    expected = nothing | dict.fromkeys(("reports", "shuffle", "responses", "reader")) | known
    assert {name: getattr(facts, name) for name in expected} == expected
    assert facts.clips == tuple(stage for stage in stages if isinstance(stage, Clip))
    numbers_in_steps = [stage for stage in Channel(*stages).stages if stage.on_sum and hasattr(stage, "grid")]
    assert facts.grid == (numbers_in_steps[0].grid if numbers_in_steps else None)  # type: ignore[attr-defined]


class Whispers:
    """No stage: it changes a half beside one."""

    def device(self, update: Update, rng: Rng) -> Update:
        return {}


class Mixed(Whispers, Laplace): ...


class Sums(Laplace):
    def noise_of_many(self, sums: Tree, devices: int, rng: Rng) -> Tree:
        return sums


class Draws(OneBit):
    def device(self, update: Update, rng: Rng) -> Update:
        return update


class Again(Draws):
    """It says nothing new, so it has nothing new either."""


class Promises(Draws):
    samples = True


def test_a_promise_ends_where_its_half_is_changed() -> None:
    assert Laplace.noise_adds_up
    assert not any(kind.noise_adds_up for kind in (Mixed, Sums, Clip, Stage))
    assert OneBit.samples
    assert Promises.samples
    assert not any(kind.samples for kind in (Draws, Again, Laplace))
    assert Channel(OneBit(1.0)).samples
    assert not Channel(Draws(1.0)).samples


def events(channel: Channel, cohort: Cohort, unit: str = "user") -> dict[str, object]:
    return {one.observer: one.event for one in channel.charges(cohort) if one.unit == unit}


def test_noise_on_the_sum_tells_the_server_everything() -> None:
    for channel in (Channel(Clip(3.0), Gaussian(1.5)), Channel(Clip(3.0), SecureSum(), Gaussian(1.5))):
        found = events(channel, SOME)
        assert isinstance(found.pop("server"), NonPrivate)
        assert found == dict.fromkeys(("clients", "public"), GaussianRelease(1.5, "replace-one", DRAWN))
        assert events(channel, EVERYONE)["public"] == GaussianRelease(1.5, "replace-one")
    added = events(Channel(Clip(3.0), Gaussian(1.5, "add-remove")), EVERYONE)
    assert added["public"] == GaussianRelease(0.75, "replace-one")  # a mean over everyone moves twice as far
    laplace = events(Channel(Clip(3.0, order=1), Laplace(12.0, where="sum")), SOME)
    assert isinstance(laplace["server"], NonPrivate)
    assert laplace["public"] == LaplaceRelease(2.0, "replace-one", DRAWN)


def test_noise_on_the_device_holds_against_the_server_which_knows_the_cohort() -> None:
    found = events(Channel(Clip(3.0, order=1), Laplace(12.0), SecureSum()), SOME)
    assert found["server"] == LaplaceRelease(2.0, "replace-one")
    assert found["public"] == found["clients"] == LaplaceRelease(2.0, "replace-one", DRAWN)


def test_a_fixed_cohort_cannot_be_stated_under_add_remove() -> None:
    with pytest.raises(HomebodyError, match="accounted under replace-one"):
        Channel(Clip(3.0), Gaussian(1.5, "add-remove")).charges(SOME)


@pytest.mark.parametrize(
    "channel",
    [
        Channel(Clip(1.0)),
        Channel(Clip(1.0), SecureSum()),
        Channel(SecureSum()),
        Channel(Scale(2.0)),
        Channel(Laplace(0.5, unbounded=True)),
        Channel(Clip(1.0), Gaussian(0.0)),
        Channel(Clip(1.0, order=1), Laplace(0.0)),
    ],
)
def test_what_adds_no_bounded_noise_is_not_private_for_anyone(channel: Channel) -> None:
    found = events(channel, SOME)
    assert list(found) == list(OBSERVERS)
    assert all(isinstance(event, NonPrivate) for event in found.values())


def test_reports_are_charged_to_everyone_by_user_and_by_report() -> None:
    channel = Channel(Clip(1.0), OneBit(2.5, k=100))
    assert events(channel, SOME) == dict.fromkeys(OBSERVERS, Reports(2.5, 100))
    assert events(channel, SOME, "report") == dict.fromkeys(OBSERVERS, Reports(2.5, 1))


def test_a_shuffle_counts_those_who_take_part() -> None:
    assert events(Channel(OneBit(2.5, k=100), Shuffle()), SOME) == dict.fromkeys(
        OBSERVERS, ShuffledReports(2.5, 100, 30)
    )
    assert events(Channel(OneBit(2.5), Shuffle(users=9)), SOME, "report")["server"] == ShuffledReports(2.5, 1, 9)
    with pytest.raises(HomebodyError, match="among 31 people: 30 take part"):
        Channel(OneBit(2.5), Shuffle(users=31)).charges(SOME)


def test_charges_are_charges() -> None:
    assert all(isinstance(one, Charge) for one in Channel(Clip(1.0), Gaussian(1.0)).charges(SOME))


@pytest.mark.parametrize(
    ("specs", "stages"),
    [
        ([], ()),
        (
            ["clip:norm=0.5", "secure-sum", "gaussian:z=1,relation=add-remove"],
            (Clip(0.5), SecureSum(), Gaussian(1.0, "add-remove", sensitivity=0.5)),
        ),
        (["clip:norm.item=3,norm.bias=4,order=1"], (Clip({"item": 3.0, "bias": 4.0}, order=1),)),
        (["laplace:b=0.1,unbounded=true"], (Laplace(0.1, unbounded=True),)),
        (["one-bit:epsilon=2.5,k=100", "shuffle:users=7"], (OneBit(2.5, 100), Shuffle(7, reports=(2.5, 100)))),
    ],
)
def test_channels_from_text(specs: list[str], stages: tuple[Stage, ...]) -> None:
    assert parse_channel(specs).stages == stages
    assert parse_channel(stage_texts(Channel(*stages))).stages == stages


def test_channels_as_text() -> None:
    specs = ["ask-rows", "clip:norm.item=3,norm.bias=4.5,order=1", "laplace:b=0.1,unbounded=true"]
    for spec in (*specs, "one-bit:epsilon=2.5,k=1", "shuffle:users=7", "randomised-response:epsilon=1"):
        before = ["one-bit:epsilon=1,k=2"] if spec.startswith("shuffle") else []
        assert stage_texts(parse_channel([*before, spec])) == [*before, spec]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("clap:norm=1", "no stage 'clap'; did you mean 'clip'"),
        ("clip", "needs norm, as in clip:norm=1"),
        ("one-bit:epsilon=0.5", "'one-bit:epsilon=0.5' needs k, as in one-bit:epsilon=0.5,k=100"),
        ("one-bit:k=7", "needs epsilon, as in one-bit:epsilon=1,k=7"),
        ("clip:norm", "not 'clip:norm'"),
        ("clip:norm=", "not 'clip:norm='"),
        ("clip:norm=one", "norm in the stage 'clip:norm=one' must be a number, not 'one'"),
        ("clip:norm=1,norm=2", "says twice what norm is"),
        ("clip:norm=1,norm.item=2", "give one kind"),
        ("clip:norm.item=2,norm=1", "give one kind"),
        ("clip:norm=1,order=2.5", "must be a whole number"),
        ("clip:norm=-1", "above 0, not -1.0"),
        ("gaussian:z=1,sensitivity=1", "no setting of the stage gaussian 'sensitivity'"),
        ("laplace:b=1,unbounded=perhaps", "must be true or false"),
        ("shuffle:users=many", "must be a whole number"),
    ],
)
def test_text_that_is_no_stage_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        parse_channel([spec])

"""DP-PrivRec: its two stages, what each choice certifies, and who takes part in which."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import cross_entropy

from homebody.core import Cohort, Data, Method, Phase, Tree
from homebody.data.partitions import split as split_population
from homebody.data.splits import Split
from homebody.data.synthetic import Synthetic, synthetic
from homebody.errors import HomebodyError
from homebody.methods.contrastive import VIEWS, Contrastive
from homebody.methods.dp_privrec import DPPrivRec
from homebody.methods.privrec import PrivRec
from homebody.models.networks import GRU, FeedForward
from homebody.privacy import Budget, Channel, Clip, Gaussian, Laplace, Ledger, SecureSum
from homebody.progress import Progress, Round
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute, reopen, resume
from homebody.simulation import Simulator
from homebody.testing import CATALOGUE, MethodContract, client, population
from homebody.training import fit

SMALL: dict[str, Any] = {
    "factors": 4,
    "hidden": "6",
    "epochs": 2,
    "negatives": 2,
    "batch_size": 8,
    "pretrain_steps": 2,
    "windows": 2,
    "window": 6,
    "segment": 2,
    "item_negatives": 3,
    "segment_negatives": 2,
}
NOISY = Channel(Clip(1.0), SecureSum(), Gaussian(z=2.0))
DATA = "synthetic:users=60,items=40,mean=8,seed=3"


class TestContrastive(MethodContract):
    rounds = 5

    def method(self) -> Method:
        return Contrastive(factors=4, steps=2, windows=2, window=5, segment=2, item_negatives=3, segment_negatives=2)

    def learner(self) -> Method:
        small = {"windows": 2, "window": 6, "segment": 2, "item_negatives": 5, "segment_negatives": 2}
        return Contrastive(factors=8, steps=5, learning_rate=1.0, init_scale=0.3, **small)


def test_windows_may_be_longer_than_anybodys_history() -> None:
    contract = TestContrastive()
    longest = Contrastive(factors=3, steps=1, windows=1, window=40, segment=20, item_negatives=1, segment_negatives=1)
    contract.method = lambda: longest  # type: ignore[method-assign]
    contract.test_a_client_is_the_same_alone_and_in_a_padded_cohort()
    contract.test_updates_are_finite_floats_under_the_same_names()


class TestDPPrivRecJoint(MethodContract):
    rounds = 5

    def method(self) -> Method:
        return DPPrivRec(**SMALL, joint=0.5)

    def learner(self) -> Method:
        return DPPrivRec(
            Channel(), factors=8, hidden="16", epochs=5, learning_rate=0.5, init_scale=0.3, joint=0.2, windows=2
        )


# The encoders and the losses.


def unit_and_reference(inputs: int, width: int) -> tuple[GRU, Tensor, torch.nn.GRU]:
    """Ours with weights from a seed, and torch's with the same."""
    unit = GRU(inputs, width)
    weights = unit.start(Rng.of(4))
    reference = torch.nn.GRU(inputs, width, batch_first=True)
    ends = [3 * width * inputs, 3 * width * (inputs + width), 3 * width * (inputs + width + 1)]
    of_input, of_state, input_offset, state_offset = weights.tensor_split(ends)
    with torch.no_grad():
        reference.weight_ih_l0.copy_(of_input.view(inputs, -1).T)
        reference.weight_hh_l0.copy_(of_state.view(width, -1).T)
        reference.bias_ih_l0.copy_(input_offset)
        reference.bias_hh_l0.copy_(state_offset)
    return unit, weights, reference


def test_the_gru_is_torchs() -> None:
    unit, weights, reference = unit_and_reference(5, 3)
    rows = Rng.of(5).normal(4, 7, 5)
    with torch.no_grad():
        expected = reference(rows)[1][0]
    everything = torch.ones(4, 7, dtype=torch.bool)
    torch.testing.assert_close(unit.last(weights, rows, everything), expected)
    stacked = vmap(unit.last, in_dims=(None, 0, 0))(weights, rows[:, None], everything[:, None])
    torch.testing.assert_close(stacked[:, 0], expected)


def test_what_is_not_real_is_passed_over_wherever_it_stands() -> None:
    unit, weights, reference = unit_and_reference(5, 3)
    rows = Rng.of(5).normal(7, 5)
    real = torch.tensor([True, False, True, True, False, False, True])
    with torch.no_grad():
        expected = reference(rows[real][None])[1][0, 0]
    torch.testing.assert_close(unit.last(weights, rows, real), expected)
    nothing = unit.last(weights, rows, torch.zeros(7, dtype=torch.bool))
    assert nothing.tolist() == [0.0, 0.0, 0.0]


def test_the_feed_forward_network_is_torchs() -> None:
    network = FeedForward(5, 3)
    weights = network.start(Rng.of(6))
    first, second = torch.nn.Linear(5, 3), torch.nn.Linear(3, 3)
    parts = weights.tensor_split([15, 18, 27])
    with torch.no_grad():
        for layer, weight, offset in ((first, *parts[:2]), (second, *parts[2:])):
            layer.weight.copy_(weight.view(-1, 3).T)
            layer.bias.copy_(offset)
        rows = Rng.of(7).normal(4, 5)
        torch.testing.assert_close(network.encode(weights, rows), second(first(rows).relu()))


def method(**changes: Any) -> Contrastive:
    return Contrastive(**{"factors": 4, "steps": 3, "windows": 5, "window": 6, "segment": 2, **changes})


def test_the_losses_are_the_cross_entropy_of_the_truth_among_what_is_there() -> None:
    """Window by window with torch's own modules, from a view with gaps."""
    one = method(item_weight=0.7, segment_weight=1.3)
    table, gru, encoder = Rng.of(1).normal(30, 4), one.gru.start(Rng.of(2)), one.encoder.start(Rng.of(3))
    view = {
        "sequence": torch.tensor([[[3, 9, 5, 6, -1, -1], [3, 4, 7, 8, -1, -1]], [[-1] * 6, [-1] * 6]]),
        "item": torch.tensor([[4, 9, -1, 11], [-1, -1, -1, -1]]),
        "segment": torch.tensor([[[5, 6], [7, 8], [-1, -1]], [[-1, -1]] * 3]),
    }
    found = one.loss(gru, encoder, {name: table[ids.clamp(min=0)] for name, ids in view.items()}, view)

    def state(items: list[int]) -> Tensor:
        return one.gru.last(gru, table[items], torch.ones(len(items), dtype=torch.bool))

    def told(scores: list[Tensor]) -> Tensor:
        return cross_entropy(torch.stack(scores)[None], torch.tensor([0]))

    def item(number: int) -> Tensor:
        return one.encoder.encode(encoder, table[number])

    by_item = told([state([3, 9, 5, 6]) @ item(v) for v in (4, 9, 11)])
    by_segment = told([state([3, 4, 7, 8]) @ state(list(v)) for v in ((5, 6), (7, 8))])
    torch.testing.assert_close(found, torch.stack([0.7 * by_item + 1.3 * by_segment, torch.tensor(0.0)]))


def test_a_step_follows_the_slope_and_touches_nothing_else() -> None:
    one = method(steps=1)
    view = {name: value[0] for name, value in one.views(client(list(range(9))), Rng.of(3), 1).items()}
    mine = one.init_shared(CATALOGUE, Rng.of(5))
    after, value = one.step(mine, view, 0.1)
    leaves = {name: part.clone().requires_grad_() for name, part in mine.items()}
    rows = {name: leaves["item"][ids.clamp(min=0)] for name, ids in view.items()}
    loss = one.loss(leaves["gru"], leaves["encoder"], rows, view).mean()
    loss.backward()
    assert value.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.abs().max() > 0
        torch.testing.assert_close(after[name], mine[name] - 0.1 * leaf.grad, rtol=1e-4, atol=1e-7)
    untouched = sorted(set(range(30)) - {i for ids in view.values() for i in ids.flatten().tolist()})
    assert torch.equal(after["item"][untouched], mine["item"][untouched])


# The views.


def views_of(data: Data, one: Contrastive, steps: int = 40) -> dict[str, Tensor]:
    return one.views(data, Rng.of(8), steps)


def test_views_mask_one_item_and_one_segment_of_a_window() -> None:
    owned = [20, 3, 17, 8, 25, 1, 12, 6, 29, 14]
    views = views_of(client(owned), method(item_negatives=4, segment_negatives=3))
    masked_at, cut_at = set(), set()
    for (without_item, without_segment), item, segment in zip(
        *(views[name].flatten(0, 1).tolist() for name in VIEWS), strict=True
    ):
        (place,) = [n for n, v in enumerate(without_item) if v not in owned]
        window = [*without_item[:place], item[0], *without_item[place + 1 :]]
        start = owned.index(window[0])
        assert window == owned[start : start + 6], "a window is a piece of the history"
        assert without_item[place] == item[1], "what masks is the first negative"
        assert not set(item[1:]) & set(owned), "negatives are nobody's own"
        first = window.index(segment[0][0])
        assert segment[0] == window[first : first + 2]
        assert without_segment == [*window[:first], *segment[1], *window[first + 2 :]]
        for other in segment[1:]:
            at = owned.index(other[0])
            assert other == owned[at : at + 2], "a negative segment is a piece of the same history"
            assert not set(other) & set(segment[0]), "and has no place in common with the true one"
        masked_at.add(place)
        cut_at.add((start, first))
    assert masked_at == set(range(6))
    assert cut_at == {(start, first) for start in range(5) for first in range(5)}


def test_a_short_history_takes_its_negative_segments_from_the_catalogue() -> None:
    owned = [20, 3, 17]
    views = views_of(client(owned), method(segment=3, window=4))
    segments = views["segment"].flatten(0, 1)
    assert (segments[..., 1:] == -1).all(), "half of three is one"
    for true, *others in segments[..., 0].tolist():
        assert true in owned
        assert all(other in owned and other != true for other in others)
    both = views_of(client([20, 3]), method(segment=1, segment_negatives=1, windows=1))
    assert {tuple(one) for one in both["segment"].flatten(0, 1)[..., 0].tolist()} == {(20, 3), (3, 20)}
    middle = views_of(client(owned), method(segment=1, window=2))
    assert not (middle["segment"] == -1).any()
    four = views_of(client([20, 3, 17, 8]), method(segment=2, window=4)).get("segment")
    assert four is not None
    for true, *others in four.flatten(0, 1).tolist():
        if true == [3, 17]:  # nothing fits before or behind it
            assert all(not set(other) & {20, 3, 17, 8} for other in others)
        else:
            assert all(set(other) <= {20, 3, 17, 8} - set(true) for other in others)
    assert [3, 17] in four[..., 0, :].flatten(0, 1).tolist()


def test_a_single_item_and_none_at_all_teach_nothing() -> None:
    for owned in ([7], []):
        one = method()
        data = client(owned)
        assert all((ids == -1).all() for ids in views_of(data, one).values())
        shared = one.init_shared(CATALOGUE, Rng.of(1))
        update, kept = one.client(shared, {}, one.prepare(data, Rng.of(2)))
        assert kept["loss"].item() == 0
        assert update["item"].dense().abs().max() == 0
        assert update["gru"].abs().max() == 0


def test_who_has_every_item_meets_no_negatives() -> None:
    views = views_of(client(list(range(30))), method())
    assert (views["item"][..., 1:] == -1).all()
    assert ((views["sequence"][..., 0, :] == -1).sum(-1) == 1).all(), "the masked place is passed over"


# Two phases, one ledger.


def two_stages(pretraining: str, uplink: Channel = NOISY, **changes: Any) -> DPPrivRec:
    return DPPrivRec(uplink, **{**SMALL, "pretrain_rounds": 3, "pretraining": pretraining, **changes})


def trained(method: DPPrivRec, split: Split | None = None, **rest: Any) -> tuple[Any, list[Round]]:
    lines: list[Round] = []
    runtime = Simulator(split or population())
    given = {"rounds": 4, "cohort": 20, "evaluate_every": 4, **rest}
    return fit(method, runtime, on_round=lines.append, **given), lines


def certified(channel: Channel, rounds: int, people: int, size: int = 20) -> float:
    """ε to the public after so many rounds, by the accountant alone."""
    ledger = Ledger()
    for number in range(rounds):
        ledger.charge(str(number), channel.charges(Cohort(np.arange(size), "fixed", size, people)))
    return ledger.epsilon("public").epsilon


def test_one_stage_is_one_phase() -> None:
    assert list(DPPrivRec().phases) == [Phase("train")]
    assert [phase.note for phase in DPPrivRec().phases] == [""]


@pytest.mark.parametrize("pretraining", ["private", "noiseless", "public"])
def test_what_each_choice_for_stage_one_certifies(pretraining: str) -> None:
    split = population().published(0.2) if pretraining == "public" else population()
    fitted, lines = trained(two_stages(pretraining), split)
    assert [(line.phase, line.round) for line in lines] == [
        *(("pretrain", n) for n in (1, 2, 3)),
        *(("train", n) for n in (1, 2, 3, 4)),
    ]
    charged = {"private": 7, "noiseless": 7, "public": 4}[pretraining]
    assert fitted.ledger.releases() == charged
    people = 240 if pretraining == "public" else 300
    expected = float("inf") if pretraining == "noiseless" else certified(NOISY, charged, people)
    assert fitted.epsilon["public"] == pytest.approx(expected, rel=1e-9)
    assert fitted.epsilon["server"] == float("inf"), "the server adds the noise itself"
    assert [bool(line.metrics) for line in lines] == [False] * 6 + [True]


def test_stage_one_says_in_the_notes_what_it_certifies() -> None:
    def notes(method: DPPrivRec) -> list[str]:
        return [phase.note for phase in method.phases]

    assert notes(two_stages("private")) == ["", ""]
    assert "ε is ∞" in notes(two_stages("noiseless"))[0]
    assert "nothing is charged" in notes(two_stages("public"))[0]
    assert notes(two_stages("noiseless", pretrain_rounds=0)) == [""]


class Watched(Simulator):
    """Notes who works in which phase, and from what."""

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self.who: dict[str, set[int]] = {}
        self.given: list[tuple[str, Tree]] = []
        self.after: list[Tree] = []

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Any:
        self.who.setdefault(type(method).__name__, set()).update(cohort.users.tolist())
        self.given.append((type(method).__name__, shared))
        got = super().collect(method, shared, cohort, rng, step)
        self.after.append(method.server(shared, {}, got.total)[0])
        return got


def test_item_vectors_are_carried_over_and_the_encoders_only_where_they_are_wanted() -> None:
    for joint in (0.0, 0.5):
        runtime = Watched(population())
        one = two_stages("private", Channel(), joint=joint)
        fit(one, runtime, rounds=1, cohort=20, evaluate_every=0)
        assert [name for name, _ in runtime.given] == ["Contrastive"] * 3 + ["DPPrivRec"]
        learnt, second = runtime.after[2], runtime.given[3][1]
        fresh = one.init_shared(runtime.catalogue, Rng.of(0, "train").fold("shared"))
        carried = {"item", "gru", "encoder"} if joint else {"item"}
        assert second.keys() == {"item", "feature", "layers"} | carried
        for name, value in second.items():
            assert torch.equal(value, (learnt if name in carried else fresh)[name]), name
            assert name not in carried or not torch.equal(value, fresh[name])


def test_without_a_joint_loss_a_round_is_privrecs_own() -> None:
    data = client([5, 8, 13, 21, 1])
    same = {name: value for name, value in SMALL.items() if name in ("factors", "hidden", "epochs", "negatives")}
    one, other = DPPrivRec(**same), PrivRec(**same)
    shared = other.init_shared(CATALOGUE, Rng.of(1))
    found = [each.client(shared, {}, each.prepare(data, Rng.of(2)))[0] for each in (one, other)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in shared)


def test_the_joint_loss_takes_its_steps_in_turn() -> None:
    """Two epochs by hand: a pass over the interactions, a step on the windows, and again."""
    one = DPPrivRec(**SMALL, joint=0.5, learning_rate=0.2)
    plain = PrivRec(
        **{n: v for n, v in SMALL.items() if n in ("factors", "hidden", "negatives", "batch_size")}, epochs=1
    )
    data = client([5, 8, 13, 21, 1])
    shared = one.init_shared(CATALOGUE, Rng.of(1))
    batch = one.prepare(data, Rng.of(2))
    mine = dict(shared)
    for epoch in (0, 1):
        order, negative = batch["order"][[epoch]], batch["negative"][:, [epoch]]
        own = {**batch, "order": order, "negative": negative}
        mine.update(plain.stepped(mine, own, 1, 0.2, batch["valid"])[0])
        mine, _ = one.sequences.step(mine, {name: batch[f"view/{name}"][epoch] for name in VIEWS}, 0.1)
    update, _ = one.client(shared, {}, batch)
    for name in shared:
        torch.testing.assert_close(update[name], mine[name] - shared[name])
    assert update["gru"].abs().max() > 0


def test_the_clip_bounds_both_stages() -> None:
    """However far devices walk, one person's message is no longer than the clip."""
    split, one = population(), two_stages("private", Channel(Clip(0.01), SecureSum()), pretrain_rate=5.0)
    for acting in (one.sequences, one):
        runtime = Simulator(split)
        runtime.begin(acting, Rng.of(0))
        shared = acting.init_shared(runtime.catalogue, Rng.of(1))
        message = runtime.message(acting, shared, 3, Rng.of(2))
        norm = torch.cat([value.flatten() for value in message.values()]).norm().item()
        assert norm == pytest.approx(0.01, rel=1e-4)


# Budgets and calibration.


@pytest.mark.parametrize(("allowed", "phase", "before"), [(2, "pretrain", 2), (3, "train", 3), (5, "train", 5)])
def test_a_budget_ends_training_in_the_middle_of_either_stage(allowed: int, phase: str, before: int) -> None:
    epsilon = certified(NOISY, allowed, 300) * 1.0001
    fitted, lines = trained(two_stages("private"), budget=Budget(epsilon))
    assert len(lines) == before
    assert fitted.stopped is not None
    assert f"({phase})" in fitted.stopped
    assert fitted.epsilon["public"] <= epsilon
    assert bool(fitted.metrics) == (phase == "train")


def test_a_budget_holds_stage_two_alone_where_stage_one_is_public() -> None:
    split = population().published(0.2)
    epsilon = certified(NOISY, 2, 240) * 1.0001
    fitted, lines = trained(two_stages("public"), split, budget=Budget(epsilon))
    assert [line.phase for line in lines] == ["pretrain"] * 3 + ["train"] * 2
    assert fitted.epsilon["public"] == pytest.approx(certified(NOISY, 2, 240), rel=1e-9)


def recipe(**changes: Any) -> Recipe:
    fields = {**SMALL, "pretrain_rounds": 2, **changes.pop("fields", {})}
    return Recipe("dp-privrec", DATA, fields=fields, **{"rounds": 3, "cohort": 10, "evaluate_every": 3, **changes})


NOISE = ["clip:norm=1", "secure-sum", "gaussian:z=2"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [[], ["clip:norm=0.5", "secure-sum", "gaussian"]])
@pytest.mark.parametrize("pretraining", ["private", "public"])
def test_calibration_spends_the_budget_over_all_that_is_charged(
    tmp_path: Path, stages: list[str], pretraining: str
) -> None:
    public = 0.3 if pretraining == "public" else 0.0
    given = recipe(fields={"pretraining": pretraining}, stages=stages, budget="eps=3", calibrate=True, public=public)
    result = execute(given, tmp_path)
    assert result["rounds"] == 5
    assert result["stopped"] is None
    assert 2.97 < result["epsilon"]["public"] <= 3
    noise = float(result["stages"][2].rpartition("z=")[2])
    channel = Channel(Clip(1.0), SecureSum(), Gaussian(z=noise))
    people, rounds = (42, 3) if public else (60, 5)
    assert result["epsilon"]["public"] == pytest.approx(certified(channel, rounds, people, 10), rel=1e-9)


def test_a_noiseless_first_stage_is_refused_a_budget_and_noted_in_the_result(tmp_path: Path) -> None:
    given = recipe(fields={"pretraining": "noiseless"}, stages=NOISE)
    with pytest.raises(HomebodyError, match="from the first round ε is ∞"):
        execute(replace(given, budget="eps=8"), tmp_path)
    with pytest.raises(HomebodyError, match="from the first round ε is ∞"):
        execute(replace(given, budget="eps=8", calibrate=True), tmp_path)
    result = execute(given, tmp_path)
    assert result["epsilon"]["public"] == "inf"
    assert any("without noise" in note for note in result["notes"])


def test_a_run_that_ends_in_stage_one_says_so_and_has_no_model(tmp_path: Path) -> None:
    epsilon = certified(Channel(Clip(1.0), SecureSum(), Gaussian(z=2.0)), 1, 60, 10) * 1.0001
    result = execute(recipe(stages=NOISE, budget=f"eps={epsilon}"), tmp_path)
    assert (result["rounds"], result["metrics"]) == (1, {})
    assert "(pretrain)" in result["stopped"]
    with pytest.raises(HomebodyError, match="before the last stage"):
        reopen(Path(result["run"]))


# Laplace noise.


def test_laplace_noise_on_the_sum_against_an_l1_clip(tmp_path: Path) -> None:
    stages = ["clip:norm=1,order=1", "secure-sum", "laplace:b=4,where=sum"]
    result = execute(recipe(stages=stages), tmp_path)
    channel = Channel(Clip(1.0, order=1), SecureSum(), Laplace(b=4.0, where="sum"))
    assert result["epsilon"]["public"] == pytest.approx(certified(channel, 5, 60, 10), rel=1e-9)
    assert 0 < result["epsilon"]["public"] < float("inf")
    assert result["metrics"]
    with pytest.raises(HomebodyError, match="Clip of order 1"):
        execute(recipe(stages=["clip:norm=1", "secure-sum", "laplace:b=4,where=sum"]), tmp_path)


# Going on after an interruption.


class Kept:
    """Checkpoints in memory; dies right after the one of this step was written."""

    def __init__(self, dies: int | None) -> None:
        self.dies, self.kept = dies, list[Progress]()

    def load(self) -> Progress | None:
        return replace(self.kept[-1]) if self.kept else None

    def due(self) -> bool:
        return True

    def save(self, progress: Progress) -> None:
        self.kept.append(replace(progress))
        if progress.step == self.dies:
            self.dies = None
            raise KeyboardInterrupt


@cache
def uninterrupted(pretraining: str) -> Any:
    return trained(two_stages(pretraining), population().published(0.2))[0]


@pytest.mark.parametrize("pretraining", ["private", "public"])
@pytest.mark.parametrize("dies", [2, 3, 5])
def test_a_run_goes_on_within_and_between_its_stages(pretraining: str, dies: int) -> None:
    split, whole = population().published(0.2), uninterrupted(pretraining)
    kept, ledger = Kept(dies), Ledger()
    with pytest.raises(KeyboardInterrupt):
        trained(two_stages(pretraining), split, checkpoints=kept, ledger=ledger)
    again, _ = trained(two_stages(pretraining), split, checkpoints=kept, ledger=ledger)
    assert again.metrics == whole.metrics
    assert again.epsilon == whole.epsilon
    assert all(torch.equal(again.shared[name], whole.shared[name]) for name in whole.shared)


def test_a_run_on_disk_goes_on_between_its_stages(tmp_path: Path) -> None:
    from homebody.run import Watcher

    def stop(line: Any) -> None:
        if line.step == 3:
            raise KeyboardInterrupt

    given = recipe(stages=NOISE)
    whole = execute(given, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        execute(given, tmp_path / "cut", Watcher(on_round=stop))
    (cut,) = (tmp_path / "cut").iterdir()
    result = resume(cut)
    assert (result["metrics"], result["epsilon"]) == (whole["metrics"], whole["epsilon"])
    fitted, _ = reopen(cut)
    assert len(fitted.ranked(3, 5)) == 5


# People whose data is public.


def test_nobody_public_is_asked_or_trains_with_the_others() -> None:
    split = population().published(0.25)
    public = set(np.flatnonzero(split.public).tolist())
    assert len(public) == 75
    runtime = Watched(split)
    fit(two_stages("public"), runtime, rounds=3, cohort=None, evaluate_every=3)
    assert runtime.who["Contrastive"] == public
    assert runtime.who["DPPrivRec"] == set(range(300)) - public
    assert not public & set(split.asked().tolist())
    assert len(split.asked()) == 225
    assert (split.lengths == population().lengths).all()
    assert [split.part(user, "train").tolist() for user in sorted(public)] == [
        population().part(user, "train").tolist() for user in sorted(public)
    ]


def test_a_cohort_of_public_people_is_as_large_as_there_are() -> None:
    runtime = Watched(population().published(0.04))
    fit(two_stages("public"), runtime, rounds=1, cohort=20, evaluate_every=0)
    assert len(runtime.who["Contrastive"]) == 12
    assert len(runtime.who["DPPrivRec"]) == 20


def test_who_is_public_depends_on_the_seed_alone() -> None:
    people = synthetic(Synthetic(users=300, items=120, mean=16, factors=4, seed=5))
    one, two, other = (split_population(people, seed=seed, public=0.2).public for seed in (1, 1, 2))
    assert (one == two).all()
    assert (one != other).any()


def test_public_people_are_drawn_from_those_who_train() -> None:
    people = synthetic(Synthetic(users=300, items=120, mean=16, factors=4, seed=5))
    before = split_population(people, "held-out-users:test=0.2,valid=0.1", seed=1)
    after = split_population(people, "held-out-users:test=0.2,valid=0.1", seed=1, public=0.2)
    assert after.public.sum() == 60
    assert before.learn[after.public].all()
    assert not after.learn[after.public].any()
    assert (after.asked() == before.asked()).all(), "who is asked had not been training"


@pytest.mark.parametrize(
    ("share", "said"),
    [(-0.1, "at least 0 and under 1"), (1.0, "at least 0 and under 1"), (0.001, "0 of 300"), (0.999, "300 of")],
)
def test_a_share_that_leaves_nobody_is_refused(share: float, said: str) -> None:
    with pytest.raises(HomebodyError, match=said):
        population().published(share)


def test_a_public_stage_needs_public_people(tmp_path: Path) -> None:
    with pytest.raises(HomebodyError, match="give --public"):
        execute(recipe(fields={"pretraining": "public"}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_public_run_says_who_and_what(tmp_path: Path) -> None:
    result = execute(recipe(fields={"pretraining": "public"}, public=0.3, stages=NOISE), tmp_path)
    assert any("18 of 60 people's data is public" in note for note in result["notes"])
    assert any("nothing is charged" in note for note in result["notes"])
    channel = Channel(Clip(1.0), SecureSum(), Gaussian(z=2.0))
    assert result["epsilon"]["public"] == pytest.approx(certified(channel, 3, 42, 10), rel=1e-9)


def test_the_recipe_keeps_who_is_public() -> None:
    given = recipe(public=0.3)
    assert Recipe.from_toml(given.to_toml()) == given
    assert given.options()[given.options().index("--public") + 1] == "0.3"

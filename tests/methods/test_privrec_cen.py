from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from homebody.core import Users
from homebody.data.partitions import split
from homebody.data.population import Features, Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.evaluation import measure
from homebody.methods import privrec_cen
from homebody.methods.kernels.mf import outside
from homebody.methods.nn_self import FOFLSelf
from homebody.methods.privrec import PrivRec
from homebody.methods.privrec_cen import Adapted, Everyone, PrivRecCEN
from homebody.reference import Histories, ScoreNow
from homebody.rng import Rng
from homebody.simulation import Simulator
from homebody.testing import population

ITEMS, PEOPLE = 40, 60
SMALL = PrivRecCEN(factors=4, hidden="8", learning_rate=0.01, batch_size=16, adapt_epochs=2, adapt_batch=4)
EVERY = torch.arange(ITEMS)


def people() -> Population:
    """Who is old takes odd items, who is young even ones; at night everyone takes those from 20 on."""
    generator = np.random.default_rng(0)
    old, night = np.arange(PEOPLE) % 2, generator.integers(0, 2, (PEOPLE, 10))
    items = np.stack([generator.permutation(10)[:10] for _ in range(PEOPLE)]) * 2 + old[:, None] + 20 * night
    return Population(
        "toy",
        np.arange(PEOPLE + 1) * 10,
        items.ravel().astype(np.int32),
        ITEMS,
        user_features=Features(pl.DataFrame({"age": np.array(["young", "old"])[old]}), {"age": "categorical"}),
        item_features=Features(pl.DataFrame({"half": ["low", "high"] * 20}), {"half": "categorical"}),
        contexts=Features(pl.DataFrame({"night": night.ravel().astype(str)}), {"night": "categorical"}),
    )


def held_out() -> Split:
    return split(people(), "held-out-users", seed=1)


def test_histories_bring_features_and_circumstances() -> None:
    whole, made = people(), held_out()
    given = made.histories()
    assert given.features["age"].tolist() == made.encoded["users"].columns["age"].values.tolist()
    assert len(given.contexts["night"]) == len(given.items)
    codes = {"0": set[int](), "1": set[int]()}
    for item, code in zip(given.items, given.contexts["night"], strict=True):
        codes[str(int(item >= 20))].add(int(code))
    assert all(len(found) == 1 for found in codes.values())
    assert codes["0"] != codes["1"]
    assert not population().histories().features
    assert whole.n_items == ITEMS


def test_scores_and_metrics_are_those_of_devices_that_hold_the_same() -> None:
    """The same parameters, the same random numbers: once asked in one place, once device by device."""
    made = held_out()
    method = PrivRec(factors=4, hidden="8", epochs=2, batch_size=4, negatives=2)
    device = Simulator(made)
    shared = method.init_shared(device.catalogue, Rng.of(5))
    device.begin(method, Rng.of(9))
    score = Adapted(method, shared, Everyone(made.histories(), ""), Rng.of(9).fold("adapt"))
    here, there = measure(made, score), device.evaluate(method, shared)
    assert here.metrics == pytest.approx(there.metrics, rel=1e-6)
    assert "valid/hr@10" in here.metrics
    user = int(made.asked()[0])
    best = dict(device.recommend(method, shared, user, 5))
    own = score(np.array([user]), EVERY)[0]
    assert_close(own[list(best)], torch.tensor(list(best.values())))


def test_it_learns_who_takes_what_and_when() -> None:
    made = held_out()
    score = replace(SMALL, adapt_epochs=0, init_scale=0.3).trained(made.histories(), rounds=40)
    assert isinstance(score, ScoreNow)
    codes = made.encoded["contexts"].columns["night"].values
    at_night = torch.tensor([int(codes[people().items < 20][0]), int(codes[people().items >= 20][0])])
    scores = score.now(np.array([0, 1]), torch.tensor([0, 0, 1, 1]), {"night": at_night.repeat(2)}, EVERY)
    for row, (old, night) in zip(scores, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        theirs = (old == EVERY % 2) & ((EVERY >= 20) == bool(night))
        assert row[theirs].min() > row[~theirs].max(), (old, night)
    alike = score(np.array([0, 2]), EVERY)
    assert torch.equal(alike[0], alike[1])  # nobody has an identity


def test_who_is_asked_adapts_to_what_they_have() -> None:
    given = held_out().histories()
    plain, own = (replace(SMALL, adapt_epochs=passes).trained(given, rounds=1) for passes in (0, 5))
    users = np.array([0, 2])
    before, after = plain(users, EVERY), own(users, EVERY)
    assert torch.equal(before[0], before[1])
    assert not torch.equal(after[0], after[1])
    for number, user in enumerate(users):
        mine = torch.from_numpy(given.items[given.indptr[user] : given.indptr[user + 1]]).long()
        gained = after[number] - before[number]
        assert gained[mine].mean() > gained.mean()


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.7])
def test_they_adapt_by_as_many_passes_and_steps_as_it_says(passes: int, rate: float) -> None:
    task = replace(SMALL, adapt_epochs=passes, adapt_rate=rate).task
    assert (task.adapt_passes, task.adapt_step) == (passes, rate)


def test_those_who_came_later_may_change_what_they_are_like_and_teach_nothing() -> None:
    given = held_out().histories()
    late = np.arange(PEOPLE) >= 40
    other = {"age": np.where(late, 0, given.features["age"])}
    night = np.where(np.repeat(late, np.diff(given.indptr)), 0, given.contexts["night"])
    first, second = (
        SMALL.trained(histories._replace(learn=~late), rounds=2)(np.arange(40), EVERY)
        for histories in (given, given._replace(features=other, contexts={"night": night}))
    )
    assert torch.equal(first, second)


def test_people_are_scored_alike_however_many_adapt_together(monkeypatch: pytest.MonkeyPatch) -> None:
    score = SMALL.trained(held_out().histories(), rounds=1)
    users = np.arange(PEOPLE)
    together = score(users, EVERY)
    monkeypatch.setattr(privrec_cen, "ADAPTED_BYTES", 1)
    monkeypatch.setattr(privrec_cen, "SCORES_AT_ONCE", 1)
    assert_close(score(users, EVERY), together)


def test_someone_without_a_history_is_scored_as_nobody_adapted() -> None:
    given = Histories.of([[1, 2, 3], [], [4, 5, 1]], n_items=8)
    own, plain = (replace(SMALL, adapt_epochs=passes).trained(given, rounds=1) for passes in (3, 0))
    every = torch.arange(8)
    assert torch.equal(own(np.array([1]), every), plain(np.array([1]), every))
    assert_close(own(np.array([1, 0]), every)[0], plain(np.array([1]), every)[0])


def test_negatives_are_what_a_person_does_not_have() -> None:
    given = Histories.of([[1, 2, 3], [0, 4], list(range(6))], n_items=6)
    drawn = outside(given, np.array([0, 1, 2] * 50), 4, Rng.of(0)).reshape(50, 3, 4)
    assert set(drawn[:, 0].ravel()) == {0, 4, 5}
    assert set(drawn[:, 1].ravel()) == {1, 2, 3, 5}
    assert set(drawn[:, 2].ravel()) == {-1}


def test_a_score_that_is_told_the_circumstances_is_asked_about_each() -> None:
    """One that knows in which half an item is taken at which hour, and one that is not told."""
    made = held_out()
    codes = made.encoded["contexts"].columns["night"].values
    late = int(codes[people().items >= 20][0])

    class Told:
        def __call__(self, users: Users, items: Tensor) -> Tensor:
            return torch.zeros(len(users), len(items))

        def now(self, users: Users, owner: Tensor, circumstances: dict[str, Tensor], items: Tensor) -> Tensor:
            half = (items >= 20) == (circumstances["night"] == late)[:, None]
            age = items % 2 == torch.from_numpy(users)[owner][:, None] % 2
            return (half & age).float() - 0.001 * (items % 20)

    knows = measure(made, Told()).metrics
    assert knows["full/hr@10"] == 1.0
    blind = measure(made, Told().__call__).metrics
    assert blind["full/hr@10"] < 1.0


def test_widths_that_are_none_are_refused() -> None:
    with pytest.raises(HomebodyError, match="hidden must be widths"):
        PrivRecCEN(hidden="64,x")


def test_fofl_self_is_privrec_that_knows_no_feature() -> None:
    made = held_out()
    fields = {"factors": 4, "hidden": "8", "epochs": 2, "batch_size": 4}
    one, other = FOFLSelf(**fields), PrivRec(features="none", **fields)  # type: ignore[arg-type]
    device = Simulator(made)
    trees = [method.init_shared(device.catalogue, Rng.of(5)) for method in (one, other)]
    assert trees[0]["feature"].shape == (0, 4)
    found = []
    for method, shared in zip((one, other), trees, strict=True):
        device.begin(method, Rng.of(9))
        found.append(device.evaluate(method, shared).metrics)
    assert found[0] == found[1]

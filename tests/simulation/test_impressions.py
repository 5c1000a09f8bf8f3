"""Clients that learn from impressions, and are asked about impressions as they were at the time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from homebody.core import Batch, Catalogue, Cohort, Data, Method, Rows, Total, Tree, Update
from homebody.data.partitions import split
from homebody.data.population import Impressions, Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError
from homebody.methods import find
from homebody.privacy import Channel
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute
from homebody.simulation.simulator import Simulator
from homebody.testing import MethodContract, impressed


@dataclass(frozen=True)
class ClickRates(Method):
    """Items by how often they were clicked where they were shown."""

    uplink: Channel = Channel()
    needs: ClassVar = ("impressions",)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"item": torch.zeros(catalogue.n_items, 2)}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        assert data.shown is not None
        index = torch.where(data.shown.items < data.catalogue.n_items, data.shown.items, -1)
        return {"index": index.flatten(), "clicked": data.shown.clicked.flatten()}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        counts = torch.stack([batch["clicked"].float(), torch.ones_like(batch["index"], dtype=torch.float32)], 1)
        return {"item": Rows(batch["index"], counts, len(shared["item"]))}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {"item": total.sum["item"]}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        clicks, views = shared["item"][items].unbind(-1)
        return clicks / views.clamp(min=1.0)


@dataclass(frozen=True)
class Rates(Method):
    """How often each item is clicked, and shown; somebody's score is that of the items they had last."""

    uplink: Channel = Channel()
    needs: ClassVar = ("impressions",)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"clicks": torch.zeros(catalogue.n_items), "views": torch.zeros(catalogue.n_items)}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"read": torch.zeros(())}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        assert data.shown is not None
        return {"items": data.shown.items, "clicked": data.shown.clicked, "before": data.shown.before}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        size = len(shared["clicks"])
        there = torch.nn.functional.one_hot(batch["items"], size + 1)[..., :size].float()
        update = {"clicks": (there * batch["clicked"][..., None]).sum((0, 1)), "views": there.sum((0, 1))}
        return update, {"read": batch["before"].sum().float()}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return total.sum, state

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        return local

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        # The person's last item is what they like: the score is how near an item's number is to it.
        last = torch.where(data.valid, torch.arange(1, len(data.items) + 1), 0).argmax()
        return -(items - data.items[last]).abs().float() - 100.0 * (~data.valid.any())


def people(n_users: int = 12, n_items: int = 40, seed: int = 0) -> Population:
    """Everyone read item after item and was shown some in between: the next, and five others."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(6, 12, n_users)
    starts = draw.integers(0, n_items - 12, n_users)
    items = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    users = np.repeat(np.arange(n_users), 3)
    before = np.stack([draw.choice(np.arange(1, n), 3, replace=False) for n in lengths]).ravel()
    click = starts[users] + before
    free = [np.setdiff1d(np.arange(n_items), np.arange(item - 2, item + 1)) for item in click]
    shown = np.stack([[item, *draw.choice(some, 5, replace=False)] for item, some in zip(click, free, strict=True)])
    impressions = Impressions(
        users,
        np.arange(len(users) + 1) * 6,
        shown.ravel().astype(np.int32),
        np.tile([True] + [False] * 5, len(users)),
        before=before,
    )
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    return Population("toy", indptr, items.astype(np.int32), n_items, impressions=impressions)


def collected(population: Population, *, users: list[int] | None = None) -> tuple[Simulator, Total, Tree]:
    method, done = Rates(), split(population, "impressions-people")
    runtime = Simulator(done)
    rng = Rng.of(0)
    shared = method.init_shared(runtime.catalogue, rng)
    runtime.begin(method, rng)
    who = runtime.available() if users is None else np.array(users)
    outcome = runtime.collect(method, shared, Cohort(who, "all", len(who), len(who)), rng, 1)
    return runtime, outcome.total, shared


def test_clients_learn_from_their_own_impressions_alone() -> None:
    population = people()
    runtime, total, _ = collected(population)
    shown, learnt = population.impressions, runtime.split.shown
    assert shown is not None
    assert learnt is not None
    some = shown.taken(learnt["train"])
    assert total.sum["views"].tolist() == np.bincount(some.items, minlength=40).tolist()
    assert total.sum["clicks"].tolist() == np.bincount(some.items[some.clicked], minlength=40).tolist()
    state = {user: float(runtime.private_state(Rates(), {}, user)["read"]) for user in runtime.available().tolist()}
    assert shown.before is not None
    assert state == {user: shown.before[shown.users == user].sum() for user in state}
    alone = [collected(population, users=[user])[1].sum["views"] for user in runtime.available().tolist()]
    assert torch.equal(torch.stack(alone).sum(0), total.sum["views"])


def test_few_clients_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = collected(people())[1].sum
    monkeypatch.setattr("homebody.simulation.clients.SHOWN_AT_ONCE", 40)  # two clients of three times six
    assert all(torch.equal(values, whole[name]) for name, values in collected(people())[1].sum.items())


def test_only_those_with_impressions_to_learn_from_take_part() -> None:
    population = people()
    assert population.impressions is not None
    some = population.impressions.taken(np.flatnonzero(population.impressions.users < 9))
    runtime, _, _ = collected(replace(population, impressions=some))
    assert runtime.available().max() < 9
    runtime.begin(find("fedmf")(), Rng.of(0))  # type: ignore[arg-type]
    assert runtime.available().max() == 11


def test_people_are_asked_as_they_were_and_only_about_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the last item is clicked, so whoever is asked with the right history finds it at once."""
    population = people()
    runtime, _, shared = collected(population)
    widths: list[int] = []
    score = Rates.score

    def watched(self: Rates, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        widths.append(len(items))
        return score(self, shared, local, data, items)

    monkeypatch.setattr(Rates, "score", watched)
    found = runtime.evaluate(Rates(), shared)
    assert found.metrics["impressions/auc"] == found.metrics["auc"] == 1.0
    assert found.metrics["impressions/mrr"] == 1.0
    assert max(widths) <= 6
    assert runtime.evaluate(Rates(), shared).metrics == found.metrics
    assert population.impressions is not None
    late = Simulator(replace(runtime.split, before=runtime.split.lengths[population.impressions.users]))
    late.begin(Rates(), Rng.of(0))
    assert late.evaluate(Rates(), shared).metrics["impressions/auc"] < 1.0


def test_where_nothing_says_what_came_before_an_impression_nobody_learns_from_it() -> None:
    """The click would be in the history that it is predicted from."""
    blind = Simulator(replace(collected(people())[0].split, before=None))
    with pytest.raises(HomebodyError, match="its own click might be among those that a model reads: give the inter"):
        blind.begin(Rates(), Rng.of(0))
    blind.begin(find("fedmf")(), Rng.of(0))  # type: ignore[arg-type]


def test_a_split_without_impressions_to_learn_from_is_refused(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homebody.run.load", lambda *_, **__: people())
    monkeypatch.setattr(Recipe, "build", lambda self: Rates())
    with pytest.raises(HomebodyError, match="learns from impressions, and the split leave-one-out has none to learn"):
        execute(Recipe("fedmf", "synthetic"), tmp_path)  # type: ignore[arg-type]
    result = execute(Recipe("fedmf", "synthetic", split="impressions-people", rounds=1), tmp_path)  # type: ignore[arg-type]
    assert result["metrics"]["impressions/ndcg@5"] == 1.0


class TestRates(MethodContract):
    """A method that learns from impressions keeps the contract of every method."""

    rounds = 1

    def method(self) -> ClickRates:
        return ClickRates()

    def people(self) -> Split:
        return impressed()

"""What is known of people and items reaches a method, and stays where it belongs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from homebody.core import Batch, Catalogue, Data, Method, Rows, Total, Tree, Update
from homebody.data.partitions import split
from homebody.data.population import Features, Population
from homebody.errors import HomebodyError
from homebody.methods import trust
from homebody.privacy import Channel
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute
from homebody.simulation import Simulator
from homebody.training import fit

ITEMS = 40


@dataclass(frozen=True)
class GroupCounts(Method):
    """How often each group of people took each item; items of a person's favourite colour first."""

    uplink: Channel = Channel()
    needs: ClassVar[tuple[str, ...]] = ("user features", "item features")

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        colour = torch.nn.functional.one_hot(catalogue.items["colour"].values, catalogue.items["colour"].size)
        return {
            "count": torch.zeros(catalogue.people["group"].size, catalogue.n_items),
            "colour": colour.float(),
        }

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"group": torch.zeros((), dtype=torch.int64)}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"index": torch.where(data.valid, data.items, -1), "group": data.features["group"]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        size = shared["count"].numel()
        flat = torch.where(batch["index"] < 0, -1, batch["group"] * shared["count"].shape[1] + batch["index"])
        ones = torch.ones_like(flat, dtype=torch.float32)
        return {"count": Rows(flat, ones, size)}, {"group": batch["group"]}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {**shared, "count": total.sum["count"].reshape(shared["count"].shape)}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["count"][data.features["group"]][items] + shared["colour"][items, data.features["likes"]]


def people() -> Population:
    """Two groups who take items of their own half; one person's group is known to nobody else."""
    generator = np.random.default_rng(0)
    groups = ["a", "b"] * 30
    histories = [generator.choice(20, 8, replace=False) + 20 * (group == "b") for group in groups]
    described = pl.DataFrame({"group": [*groups[:-1], "c"], "likes": ["red", "blue"] * 30})
    return Population(
        "toy",
        np.arange(61) * 8,
        np.concatenate(histories).astype(np.int32),
        n_items=ITEMS,
        user_features=Features(described, {"group": "categorical", "likes": "categorical"}),
        item_features=Features(pl.DataFrame({"colour": ["red", "blue"] * 20}), {"colour": "categorical"}),
    )


def test_a_method_sees_its_own_persons_features() -> None:
    population = people()
    done = split(population)
    simulator = Simulator(done)
    fitted = fit(GroupCounts(), simulator, rounds=1, evaluate_every=0)
    groups = population.user_features.table["group"].to_list()  # type: ignore[union-attr]
    expected = np.zeros((4, ITEMS))
    for user, group in enumerate(groups):
        np.add.at(expected[{"a": 1, "b": 2, "c": 3}[group]], done.training(user), 1)
    np.testing.assert_array_equal(fitted.shared["count"], expected)
    assert all(item < 20 for item, _ in fitted.ranked(0, k=5))
    assert all(item >= 20 for item, _ in fitted.ranked(1, k=5))


def test_people_training_never_met_are_unknown() -> None:
    population = people()
    done = split(population, "held-out-users", seed=2)
    codes = done.encoded["users"].columns["group"].values
    groups = np.array(population.user_features.table["group"].to_list())  # type: ignore[union-attr]
    known = set(groups[done.learn])
    assert all((code == 0) == (group not in known) for code, group in zip(codes.tolist(), groups, strict=True))
    catalogue = Simulator(done).catalogue
    assert catalogue.people["group"].size == len(known) + 1
    assert len(catalogue.people["group"].values) == 0, "nobody's features are common knowledge"


def test_new_items_bring_features_that_training_may_not_know() -> None:
    colours = Features(pl.DataFrame({"colour": [f"shade {n}" for n in range(ITEMS)]}), {"colour": "categorical"})
    done = split(replace(people(), item_features=colours), "cold-items")
    codes = done.encoded["items"].columns["colour"].values
    assert set(np.flatnonzero(codes == 0)) == set(done.absent.tolist())
    assert any("in training has" in note for note in done.encoded["items"].notes)


def csv(folder: Path) -> Path:
    population = people()
    users = np.repeat(np.arange(60), 8)
    pl.DataFrame({"user": users, "item": population.items}).write_csv(folder / "mine.csv")
    pl.DataFrame({"user": np.arange(60), "group": ["a", "b"] * 30, "likes": ["red", "blue"] * 30}).write_csv(
        folder / "users.csv"
    )
    pl.DataFrame({"item": np.arange(ITEMS), "colour": ["red", "blue"] * 20}).write_csv(folder / "items.csv")
    return folder / "mine.csv"


def recipe(folder: Path, **changes: object) -> Recipe:
    trust(f"{__file__}:GroupCounts")
    return Recipe(
        f"{__file__}:GroupCounts",
        str(csv(folder)),
        rounds=1,
        user_features=str(folder / "users.csv"),
        item_features=str(folder / "items.csv"),
        **changes,  # type: ignore[arg-type]
    )


def test_features_of_ones_own_reach_ones_own_method(tmp_path: Path) -> None:
    result = execute(recipe(tmp_path), tmp_path / "runs")
    assert result["metrics"]["hr@10"] > 0.5
    filtered = execute(recipe(tmp_path, filters={"users": 30}, slices=["8-9"]), tmp_path / "runs")
    assert filtered["metrics"]["8-9/hr@10"] == filtered["metrics"]["hr@10"]


@dataclass(frozen=True)
class Beyond(GroupCounts):
    """Sends a row that its table does not have."""

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        update, kept = super().client(shared, local, batch)
        rows = update["count"]
        return {"count": Rows(rows.index + rows.size, rows.value, rows.size)}, kept


def test_a_row_that_no_table_has_is_refused() -> None:
    with pytest.raises(HomebodyError, match=r"'count' has a row \d+, but its table has 160 rows"):
        fit(Beyond(), Simulator(split(people())), rounds=1, evaluate_every=0)


def test_what_a_method_needs_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    without = replace(recipe(tmp_path), user_features=None)
    with pytest.raises(HomebodyError, match="GroupCounts needs user features, which mine does not have"):
        execute(without, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()

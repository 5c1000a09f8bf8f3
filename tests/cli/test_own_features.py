"""One file with everything in it, from the command line, to a method that looks at features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.recipe import Recipe

METHOD = f"{Path(__file__).parents[1] / 'simulation' / 'test_features.py'}:GroupCounts"
"""It needs the users' group and likes, and the items' colour."""


def printed(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two groups who take items of their own half, in one file and in three."""
    generator = np.random.default_rng(0)
    user = np.repeat(np.arange(60), 8)
    item = np.concatenate([generator.choice(20, 8, replace=False) + 20 * (one % 2) for one in range(60)])
    loans = pl.DataFrame({"user": user, "item": item})
    users = pl.DataFrame({"user": np.arange(60), "group": ["a", "b"] * 30, "likes": ["red", "blue"] * 30})
    items = pl.DataFrame({"item": np.arange(40), "colour": ["red", "blue"] * 20})
    loans.write_csv(tmp_path / "loans.csv")
    users.write_csv(tmp_path / "users.csv")
    items.write_csv(tmp_path / "items.csv")
    whole = loans.join(users, on="user", maintain_order="left").join(items, on="item", maintain_order="left")
    whole.with_columns(hour=pl.Series(generator.integers(0, 24, len(item)))).write_csv(tmp_path / "all.csv")
    return tmp_path


def test_info_says_whose_every_column_is(folder: Path) -> None:
    found = printed("data", "info", str(folder / "all.csv"))
    sides = ("user_features", "item_features", "contexts")
    assert {side: [one["name"] for one in found[side]] for side in sides} == {
        "user_features": ["group", "likes"],
        "item_features": ["colour"],
        "contexts": ["hour"],
    }
    assert found["notes"][1].startswith("all.csv: took for features of users group as categorical, likes as categ")
    fewer = printed("data", "info", str(folder / "all.csv"), "--feature-cols", "hour", "--kind", "hour=numeric")
    assert [fewer[side] for side in sides[:2]] == [[], []]
    assert [(one["name"], one["kind"]) for one in fewer["contexts"]] == [("hour", "numeric")]


def test_a_run_on_one_file_is_the_run_on_three(folder: Path) -> None:
    def metrics(*data: str) -> dict[str, float]:
        found = printed("run", METHOD, "--rounds", "1", "--out", str(folder / "runs"), *data)
        values: dict[str, float] = found["metrics"]
        return values

    three = ("--user-features", str(folder / "users.csv"), "--item-features", str(folder / "items.csv"))
    apart = metrics("--data", str(folder / "loans.csv"), *three)
    assert apart["hr@10"] > 0.5
    assert metrics("--data", str(folder / "all.csv")) == apart
    assert metrics("--data", str(folder / "all.csv"), "--feature-cols", "group,likes,colour") == apart


def test_the_recipe_keeps_the_choice(folder: Path) -> None:
    printed("run", "popularity", "--data", str(folder / "all.csv"), "--feature-cols", "", "--out", str(folder / "runs"))
    (file,) = (folder / "runs").glob("*/recipe.toml")
    recipe = Recipe.from_toml(file.read_text())
    assert recipe.columns == {"feature_cols": ""}
    words = recipe.options()
    assert words[words.index("--feature-cols") + 1] == ""


def test_features_that_were_not_taken_are_missed(folder: Path) -> None:
    command = ["run", METHOD, "--data", str(folder / "all.csv"), "--feature-cols", "colour", "--out", str(folder)]
    with pytest.raises(HomebodyError, match="needs user features, which all does not have"):
        CliRunner().invoke(app, command, catch_exceptions=False)

"""`homebody audit --attack view`: one app of a person reads what another gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.typed import typed
from torch import Tensor

from homebody.privacy import grid, views
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute

Call = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 people of two apps: one knows gender and job, the other a vector."""
    out = tmp_path_factory.mktemp("runs")
    generator = np.random.default_rng(0)
    pairs = [(user, item) for user in range(60) for item in generator.permutation(40)[:10]]
    files = {
        "data.csv": ["user,item", *(f"u{user},i{item}" for user, item in pairs)],
        "items.csv": ["item,title,genre", *(f"i{item},Film number {item},g{item % 4}" for item in range(40))],
        "profile.csv": ["user,gender,job", *(f"u{user},{'fm'[user % 2]},j{user % 3}" for user in range(60))],
    }
    for name, lines in files.items():
        (out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe = Recipe(
        "fl-mv-dssm",
        str(out / "data.csv"),
        fields={"views": "profile,taste", "widths": "8,4", "batch_size": 5},
        rounds=2,
        split="ratio:test=0.2,valid=0",
        item_features=str(out / "items.csv"),
        views={"profile": str(out / "profile.csv"), "taste": "svd:size=3,share=0.3"},
        stages=["views:clip=0.5", "view-noise:z=2"],
    )
    return Path(execute(recipe, out, name="views")["run"])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return partial(typed, monkeypatch, capsys, "audit", columns=100)


def test_it_tries_the_run_s_noise_beside_others(call: Call, run: Path) -> None:
    out, _ = call(run, "--attack", "view", "--users", 8, "--participations", "1,4", "--json")
    found: dict[str, Any] = json.loads(out)
    assert (found["attack"], found["target"], found["feature"]) == ("view", "profile", "profile.gender")
    assert [one["sigma"] for one in found["errors"]] == [0, 1, 2, 4]
    assert found["errors"][0]["largest"] <= 1e-4
    assert not found["contradicted"]
    assert found["epsilon"]["views"] > 0


def test_a_page_for_people(call: Call, run: Path) -> None:
    out, _ = call(run, "--attack", "view", "--users", 5, "--participations", "1,2", "--sigma", "0,1")
    assert "fl-mv-dssm: what taste reads of profile, 5 people" in out
    assert "relative error of the gradient" in out
    assert "profile of 6" in out  # there are no more
    assert "CONTRADICTED" not in out


def test_too_little_noise_ends_with_1(call: Call, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tenth(rng: Rng, depth: int, *shape: int) -> Tensor:
        return grid.gaussian(rng, depth, *shape) // 10

    monkeypatch.setattr(views, "gaussian", tenth)
    settings = ("--users", 10, "--participations", "1,3", "--sigma", "4")
    out, _ = call(run, "--attack", "view", *settings, code=1)
    assert "CONTRADICTED" in out
    assert " ABOVE" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--attack", "view", "--sigma", "much"), "--sigma takes numbers"),
        (("--attack", "view", "--participations", "1.5"), "whole numbers"),
        (("--attack", "view", "--target", "shop"), "view of this run"),
        (("--attack", "view", "--canaries", "3"), "--canaries is not for --attack view"),
        (("--attack", "linkage", "--sigma", "1"), "--sigma is not for --attack linkage"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Call, run: Path, arguments: tuple[str, ...], sentence: str) -> None:
    _, error = call(run, *arguments, code=2)
    assert sentence in error

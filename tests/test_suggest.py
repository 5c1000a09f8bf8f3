"""What a person's views predict, given to one of them: bounded, noised and charged before it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from homebody.cli import app
from homebody.errors import HomebodyError
from homebody.privacy import Ledger
from homebody.privacy.views import ToView
from homebody.recipe import Recipe
from homebody.rng import Rng
from homebody.run import execute
from homebody.suggest import recommend_for, recommend_to, recommend_to_view


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two views, without noise in training."""
    return trained_in(tmp_path_factory.mktemp("views"))


def trained_in(folder: Path, *, more_fields: dict[str, Any] | None = None, **more: Any) -> Path:
    for name, offset in (("hobby", 1), ("shop", 2)):
        lines = ["user,x,y", *(f"{user},{(user * offset) % 5 / 5},{(user + offset) % 3}" for user in range(60))]
        (folder / f"{name}.csv").write_text("\n".join(lines))
    (folder / "items.csv").write_text("\n".join(["item,colour", *(f"{item},c{item}" for item in range(40))]))
    recipe = Recipe(
        method="fl-mv-dssm",
        data="synthetic:users=60,items=40,mean=8",
        views={name: str(folder / f"{name}.csv") for name in ("hobby", "shop")},
        item_features=str(folder / "items.csv"),
        kinds={"colour": "categorical"},
        fields={"views": "hobby,shop", "widths": "4,3", **(more_fields or {})},
        rounds=2,
        cohort=20,
        **more,
    )
    return Path(execute(recipe, folder / "runs")["run"])


def entries(folder: Path) -> list[tuple[str, str]]:
    ledger = Ledger(folder / "ledger.sqlite")
    found = [(entry.release, entry.observer) for entry in ledger.entries() if "prediction" in entry.release]
    ledger.close()
    return found


class TestToView:
    def test_every_list_is_a_release_that_is_charged(self, trained: Path) -> None:
        first = recommend_to_view(trained, "3", "shop:z=2,clip=0.1", 5)
        again = recommend_to_view(trained, "3", "shop:z=2,clip=0.1", 5)
        assert len(first.items) == 5
        assert [one["score"] for one in first.items] != [one["score"] for one in again.items]
        assert "Noise of 0.2 in every score" in first.notes[0]
        assert entries(trained)[:2] == [("prediction of 3 to shop", "views"), ("prediction of 3 to shop#2", "views")]

    def test_with_hardly_any_noise_it_is_what_the_person_is_shown(self, trained: Path) -> None:
        shown = recommend_to(trained, "3", k=5).items
        released = recommend_to_view(trained, "3", "hobby:z=1e-7,clip=1", 5).items
        assert [one["item"] for one in released] == [one["item"] for one in shown]
        assert [one["score"] for one in released] == pytest.approx([one["score"] for one in shown], abs=1e-5)

    def test_somebody_new_has_views_too(self, trained: Path) -> None:
        clicks, features = ["3", "7", "11"], {"hobby.x": 0.2, "hobby.y": 1, "shop.x": 0.4}
        shown = recommend_for(trained, clicks, features, k=5)
        released = recommend_to_view(trained, None, "hobby:z=1e-7,clip=1", 5, clicks=clicks, features=features)
        assert [one["item"] for one in released.items] == [one["item"] for one in shown.items]
        assert [one["score"] for one in released.items] == pytest.approx(
            [one["score"] for one in shown.items], abs=1e-5
        )
        assert not {one["item"] for one in released.items} & set(clicks)
        assert released.notes[:-1] == shown.notes
        assert entries(trained)[-1] == ("prediction of somebody new to hobby", "views")

    def test_somebody_new_steps_in_each_view_where_towers_stay_home(self, tmp_path: Path) -> None:
        semi = trained_in(tmp_path, more_fields={"aggregate_users": False, "learning_rate": 2.0})
        clicks, features = ["3", "7"], {"hobby.x": 0.2, "hobby.y": 1, "shop.x": 0.4}
        shown = recommend_for(semi, clicks, features, k=4).items
        released = recommend_to_view(semi, None, "shop:z=1e-7,clip=1", 4, clicks=clicks, features=features).items
        assert [one["item"] for one in released] == [one["item"] for one in shown]

    def test_somebody_new_with_unknown_items_is_refused_and_not_charged(self, trained: Path) -> None:
        before = entries(trained)
        with pytest.raises(HomebodyError):
            recommend_to_view(trained, None, "shop:z=1", clicks=["no such item"])
        assert entries(trained) == before

    def test_the_command_takes_clicks(self, trained: Path) -> None:
        given = ["recommend", str(trained), "--clicks", "3,7", "--to-view", "shop:clip=0.05,z=4", "-k", "2", "--json"]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["to_view"], found["clicks"], len(found["items"])) == ("shop:clip=0.05,z=4", ["3", "7"], 2)
        assert "charged to the views" in found["notes"][-1]
        refused = CliRunner().invoke(app, [*given, "--now", "weather=sunny"])
        assert isinstance(refused.exception, HomebodyError | SystemExit)

    @pytest.mark.parametrize(
        ("to_view", "sentence"),
        [
            ("shop", "Without noise shop would read"),
            ("shop:z=0", "above 0"),
            ("shop:z=1,clip=-1", "above 0"),
            ("shop:noise=1", "NAME:clip=0.05,z=4"),
            ("shopp:z=1", "did you mean 'shop'"),
        ],
    )
    def test_nonsense_is_refused_and_not_charged(self, trained: Path, to_view: str, sentence: str) -> None:
        before = entries(trained)
        with pytest.raises(HomebodyError, match=sentence):
            recommend_to_view(trained, "3", to_view)
        assert entries(trained) == before

    def test_a_run_s_budget_holds_for_lists_too(self, tmp_path: Path) -> None:
        folder = trained_in(
            tmp_path,
            stages=["views:clip=0.5", "view-noise:z=4"],
            vocabularies={f"{view}.{name}": "0..10" for view in ("hobby", "shop") for name in "xy"},
            budget="eps=1.2,delta=1e-3,observer=views",
        )
        assert len(recommend_to_view(folder, "3", "shop", 2).items) == 2  # with the clip and the noise of its stages
        with pytest.raises(HomebodyError, match=r"the run's budget is 1\.2: nothing is given to shop"):
            recommend_to_view(folder, "3", "shop", 2)
        assert len(entries(folder)) == 1

    def test_the_sum_moves_by_the_clip_at_most_and_its_noise_is_normal(self) -> None:
        release, vectors = ToView("a", clip=0.5, z=2.0), torch.full((2, 4000), 3.0)
        clipped = 0.5 / np.sqrt(4000)
        both, alone = (release.sum(vectors[:count], Rng.of(1)).double() for count in (2, 1))
        assert 0.4999 < float((both - alone).norm()) <= 0.5 + 1e-6
        assert stats.kstest((both - 2 * clipped) / 1.0, "norm").pvalue > 1e-6

    def test_a_view_that_is_not_finite_adds_nothing(self) -> None:
        vectors = torch.stack([torch.full((9,), torch.nan), torch.zeros(9)])
        assert torch.equal(
            ToView("a", 0.5, 1.0).sum(vectors, Rng.of(1)), ToView("a", 0.5, 1.0).sum(vectors[1:], Rng.of(1))
        )

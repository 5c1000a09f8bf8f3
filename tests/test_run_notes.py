"""What a run says of features, of ε, and of numbers that ran away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from homebody.errors import Diverged, HomebodyError
from homebody.evaluation import Block, Question, sound
from homebody.recipe import Recipe
from homebody.run import Watcher, execute

SMALL = {"factors": 4, "hidden": "4", "epochs": 1, "adapt_epochs": 2}


@pytest.fixture
def own(tmp_path: Path) -> Recipe:
    """People with an age, items with a colour, of which some are missing, in some weather or other."""
    rows = [
        f"u{user},i{(user * 3 + step * 2) % 11},{20 + user},{'' if (user * 3 + step * 2) % 11 == 4 else 'red'},"
        f"{'rainy' if (user + step) % 3 else 'sunny'},{1 + (user + step) % 5}"
        for user in range(9)
        for step in range(5)
    ]
    file = tmp_path / "own.csv"
    file.write_text("\n".join(["user,item,age,colour,weather,rating", *rows]) + "\n")
    return Recipe("privrec", str(file), rounds=1, fields=SMALL)


def said(recipe: Recipe, out: Path) -> list[str]:
    told: list[str] = []
    execute(recipe, out, Watcher(say=told.append))
    return told


def test_a_method_without_features_says_one_line_of_them_at_most(own: Recipe, tmp_path: Path) -> None:
    looking = said(own, tmp_path / "runs")
    assert any("no 'colour'" in note for note in looking)
    notes = said(replace(own, method="fedmf", fields={"factors": 4}), tmp_path / "runs")
    (only,) = [note for note in notes if "features" in note]
    assert only.startswith("own.csv: took for features of users age as numeric; of items colour")


def test_where_noise_is_certified_what_it_leaves_out_is_said(own: Recipe, tmp_path: Path) -> None:
    left = "The values of age, weather, and the scale of numbers, are those of the people who train: ε leaves them out."
    stages = ["clip:norm=1", "gaussian:z=1"]
    accepted = replace(own, stages=stages, vocabularies={"*": "found"})
    assert left in said(accepted, tmp_path / "runs")
    assert not any("ε leaves" in note for note in said(own, tmp_path / "runs"))
    declared = replace(accepted, vocabularies={"age": "range:0:100", "weather": "sunny,rainy"})
    assert not any("ε leaves" in note for note in said(declared, tmp_path / "runs"))
    plain = replace(own, method="fedmf", fields={"factors": 4}, stages=stages)
    assert not any("ε leaves" in note for note in said(plain, tmp_path / "runs"))


@pytest.mark.parametrize("there", [False, True])
def test_an_unknown_feature_leaves_nothing_behind(own: Recipe, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "runs").mkdir()
    named = replace(own, fields={**SMALL, "features": "agee"})
    sentence = "There is no feature of this data 'agee'; did you mean 'age'\\? Known: age, colour, weather\\."
    with pytest.raises(HomebodyError, match=sentence):
        execute(named, tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == [] if there else not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("method", "fields", "sentence"),
    [
        (
            "privrec",
            {**SMALL, "output": "explicit", "learning_rate": 1e30, "batch_size": 1},
            "'item' is no longer finite. Lower one of learning_rate \\(1e\\+30\\), .*adapt_rate \\(0.1\\)\\.$",
        ),
        (
            "privrec-cen",
            {"factors": 4, "hidden": "4", "learning_rate": 1e9},
            "what items are ranked by is no longer finite. Lower one of learning_rate \\(1e\\+09\\), ",
        ),
    ],
)
def test_numbers_that_run_away_end_a_run_in_a_sentence(
    own: Recipe, tmp_path: Path, method: str, fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(Diverged, match=f"^Training diverged in round 1: {sentence}"):
        execute(replace(own, method=method, fields=fields, rounds=2), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_scores_are_refused_where_none_is_a_number() -> None:
    asked = Question(torch.tensor([[2]]), torch.tensor([[0, 1]]), None, torch.tensor([0]))
    nothing, something = torch.full((1, 3), torch.nan), torch.tensor([[torch.nan, 1.0, 2.0]])

    def block(scores: torch.Tensor) -> Block:
        return Block(torch.tensor([0]).numpy(), scores, {"test": asked})

    assert len(list(sound([block(nothing), block(something), block(nothing)]))) == 3
    assert list(sound([])) == []
    assert len(list(sound([block(torch.empty(0, 3))]))) == 1  # where nobody is asked, nothing went wrong
    with pytest.raises(Diverged, match="No score of anybody is a number"):
        list(sound([block(nothing), block(nothing)]))


@pytest.mark.parametrize("split", ["leave-one-out", "ratio:test=0.3,valid=0.1", "cold-items"])
def test_references_are_what_their_own_runs_get(split: str, tmp_path: Path) -> None:
    recipe = Recipe(
        "fedials", "synthetic:users=60,items=50,mean=12", rounds=1, split=split, negatives=10, slices=["-12"]
    )
    found = execute(recipe, tmp_path)
    popular = execute(replace(recipe, method="popularity"), tmp_path)
    assert found["references"]["popularity"] == popular["metrics"]
    assert found["references"].keys() == {"popularity", "chance"}
    assert found["references"]["chance"].keys() == popular["metrics"].keys()
    many = [execute(replace(recipe, method="random", seed=seed), tmp_path)["metrics"]["hr@5"] for seed in range(3)]
    # 180 draws of a rate p: 4 standard errors, and chance differs a little from seed to seed where questions do.
    assert found["references"]["chance"]["hr@5"] == pytest.approx(sum(many) / 3, abs=4 * (0.25 / 150) ** 0.5)


def test_how_many_items_there_were_to_be_ranked_against(tmp_path: Path) -> None:
    recipe = Recipe("popularity", "synthetic:users=60,items=50,mean=12")
    found = execute(recipe, tmp_path)
    assert found["negatives"]["asked"] == 99
    assert found["negatives"]["short"] == found["negatives"]["questions"] == 60
    assert found["negatives"]["least"] < found["negatives"]["median"] < 50
    assert any("had fewer than 99 items to be ranked against" in said for said in found["cautions"])
    enough = execute(replace(recipe, data="synthetic:users=60,items=200,mean=12", negatives=5), tmp_path)
    assert enough["negatives"]["short"] == 0
    assert enough["cautions"] == []


def test_fewer_rounds_than_usual_are_said(tmp_path: Path) -> None:
    recipe = Recipe("fedials", "synthetic:users=60,items=200,mean=12", rounds=2, negatives=5)
    assert execute(recipe, tmp_path)["cautions"] == ["Fewer rounds than by default: fedials 2 of 5."]
    usual = execute(replace(recipe, rounds=None), tmp_path)
    assert (usual["planned_rounds"], usual["default_rounds"], usual["cautions"]) == (5, 5, [])


def test_a_private_run_below_popularity_says_so(tmp_path: Path) -> None:
    stages = ["clip:norm=0.001", "secure-sum", "gaussian:z=100"]
    recipe = Recipe("fedmf", "synthetic:users=60,items=80,mean=14", rounds=1, negatives=20, fields={"factors": 4})
    private = execute(replace(recipe, stages=stages), tmp_path)
    assert private["metrics"]["ndcg@10"] < private["references"]["popularity"]["ndcg@10"]
    (said,) = [said for said in private["cautions"] if said.startswith("Below popularity: NDCG@10 of fedmf is 0.")]
    assert "--calibrate" in said
    # Without noise nothing was given up for privacy, and the figures stand beside one another.
    assert not any("Below" in said for said in execute(recipe, tmp_path)["cautions"])

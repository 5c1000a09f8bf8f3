"""A setting is declared once: its option, its help, its key in TOML and its checks follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from homebody.cli import options
from homebody.errors import HomebodyError
from homebody.recipe import TRAINING, Recipe
from homebody.settings import check, setting


@dataclass(frozen=True)
class Warmer(Recipe):
    """A recipe with three more fields, which are named here and nowhere else."""

    temperature: float = setting(1.0, "How warm a round is.", low=0.5, high=2.0, unit="degree", panel=TRAINING)
    blankets: list[str] = setting([], "What covers a round; repeat.", panel=TRAINING, option="--blanket")
    windy: bool = setting(False, "Open the window.", panel=TRAINING)


def typed(*words: str) -> tuple[Warmer | None, str]:
    """The recipe that a command gets from these words, and what it prints."""
    recipes: list[Any] = []

    def heat(given: options.Given) -> None:
        recipes.append(given.recipe("fedmf"))

    app = typer.Typer()
    app.command()(options.from_settings(Warmer)(heat))
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120", "NO_COLOR": "1", "TERMINAL_WIDTH": "120"})
    assert result.exit_code == 0, result.output
    return (recipes[0] if recipes else None), result.output


def test_a_new_field_of_a_recipe_is_an_option_with_its_help_in_its_panel() -> None:
    _, text = typed("--help")
    panel = text[text.index("Training") : text.index("Evaluation")]
    for word in ("--temperature", "How warm a round is.", "[default: 1.0]", "--blanket", "What covers a round"):
        assert word in panel
    assert "--windy" in panel
    assert "--no-windy" not in panel


def test_a_new_field_comes_from_the_command_line_and_goes_back_to_it() -> None:
    words = ["--data", "ml-1m", "--temperature", "1.5", "--blanket", "wool", "--blanket", "down", "--windy"]
    recipe, _ = typed(*words)
    assert recipe == Warmer("fedmf", "ml-1m", temperature=1.5, blankets=["wool", "down"], windy=True)
    assert recipe.options() == words
    assert typed()[0] == Warmer("fedmf", "ml-100k")


def test_a_new_field_is_kept_in_toml() -> None:
    recipe = Warmer("fedmf", "ml-1m", temperature=2.0, blankets=["wool"])
    assert "temperature = 2.0" in recipe.to_toml()
    assert Warmer.from_toml(recipe.to_toml()) == recipe


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temperature = 'warm'", "The recipe's temperature must be a number, not 'warm'."),
        ("temperature = 0", "The recipe's temperature must be at least 0.5 degrees, not 0."),
        ("temperature = 3.5", "The recipe's temperature must be at most 2.0 degrees, not 3.5."),
        ("temperature = nan", "The recipe's temperature must be a finite number, not nan."),
        ("blankets = 'wool'", "The recipe's blankets must be a list, not 'wool'."),
        ("blankets = ['wool', 3]", "Each of the recipe's blankets must be a text, not 3."),
        ("windy = 1", "The recipe's windy must be true or false, not 1."),
        ("temprature = 1", "There is no recipe field 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_a_new_field_is_checked(line: str, said: str) -> None:
    with pytest.raises(HomebodyError) as refused:
        Warmer.from_toml(f"method = 'fedmf'\ndata = 'ml-1m'\n{line}\n")
    assert said in str(refused.value)


def test_a_recipe_keeps_the_toml_that_fingerprints_cover() -> None:
    recipe = Recipe(
        "fedmf", "ml-100k", {"factors": 8}, rounds=3, cohort=10, budget="eps=8", vocabularies={"a": "hash:4"}
    )
    lines = [line.partition(" = ")[0] for line in recipe.to_toml().splitlines() if line and line[0] not in " ]"]
    assert lines == [
        *("schema", "method", "data", "rounds", "seed", "split", "protocol", "negatives", "public", "cohort"),
        *("device", "fused", "cutoffs", "slices", "stages", "budget", "calibrate", "delta"),
        *("[fields]", "factors", "[columns]", "[kinds]", "[vocabularies]", "a", "[filters]"),
    ]


def test_bounds_above_and_choices_are_checked() -> None:
    @dataclass(frozen=True)
    class Oven:
        share: float = setting(0.5, "How full.", above=0, high=1)
        fuel: str = setting("wood", "What burns.", choices=("wood", "gas"))

    check(Oven(), "The oven's ")
    for wrong, said in (
        (replace(Oven(), share=0), "The oven's share must be above 0, not 0."),
        (replace(Oven(), share=1.5), "The oven's share must be at most 1, not 1.5."),
        (replace(Oven(), fuel="coal"), "The oven's fuel must be one of wood, gas, not coal."),
    ):
        with pytest.raises(HomebodyError) as refused:
            check(wrong, "The oven's ")
        assert str(refused.value) == said

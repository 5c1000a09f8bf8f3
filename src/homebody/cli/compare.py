"""`homebody compare`: several methods on the same data and splits, over several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from homebody.cli import options
from homebody.errors import HomebodyError

__all__ = ["compare"]


@options.recipe_options
def compare(
    given: options.Given,
    methods: Annotated[list[str], typer.Argument(help="Names from `homebody methods`, or path/to/file.py:Class.")],
    seeds: Annotated[int, typer.Option("--seeds", help="Run each method with seeds 0 to this less 1.")] = 3,
    out: options.Out = Path("runs"),
    as_json: options.Json = False,
) -> None:
    """Mean and deviation over seeds, and whether a method really differs from the best one.

    Methods meet the same splits and candidates, so users are compared in pairs (NDCG@10, sign-flip test, Holm).
    """
    from homebody.cli.progress import watching
    from homebody.report.comparison import summarise_runs
    from homebody.run import execute

    if seeds < 1:
        raise HomebodyError(f"Seeds must be at least 1, not {seeds}.")
    recipes = [given.recipe(method, seed=seed) for method in dict.fromkeys(methods) for seed in range(seeds)]
    for recipe in recipes:
        recipe.build()
    results = []
    for recipe in recipes:
        with watching(f"{recipe.short_method} seed {recipe.seed}", quiet=as_json) as watcher:
            results.append(execute(recipe, out, watcher))
    comparison = summarise_runs(results)
    if as_json:
        typer.echo(json.dumps(comparison))
        return

    from homebody.report.terminal import print_comparison

    print_comparison(comparison)

"""`homebody leaderboard`: all methods that fit a data set, with their accuracy, ε and costs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from homebody import screen
from homebody.cli import options
from homebody.settings import check_counts

__all__ = ["leaderboard"]


@options.recipe_options
def leaderboard(
    given: options.Given,
    seeds: Annotated[int, Option(help="Number of seeds (0, 1, …) to run each method with.")] = 3,
    methods: Annotated[
        str | None, Option(help="Only these methods, separated by commas; by default all that fit the data.")
    ] = None,
    jobs: options.Jobs = None,
    out: options.Out = Path("runs"),
    as_json: options.Json = False,
) -> None:
    """Compare accuracy, ε, bytes and seconds of all methods on one data set, as JSON, Markdown and an HTML page.

    Finished runs are kept: give the same command again to continue an interrupted leaderboard.
    """
    from homebody.cli.data import fetching
    from homebody.cli.progress import watching_cells
    from homebody.report.pages import NEEDS, has_plotly
    from homebody.run import Watcher, population_of
    from homebody.studies.leaderboard import fitting
    from homebody.studies.leaderboard import leaderboard as run_all
    from homebody.studies.provenance import without_paths
    from homebody.studies.workers import cores

    check_counts(seeds=seeds)
    names = dict.fromkeys(name.strip() for name in (methods or "").split(",") if name.strip())
    recipe = given.recipe("popularity")
    named = [given.recipe(name).method for name in names]
    with fetching(quiet=as_json) as (say, progress):
        population = population_of(recipe, Watcher(say=say, fetched=progress))
    total = len(fitting(population, named).methods) * seeds
    chosen = ["--methods", ",".join(names)] if names else []
    words = ["homebody", "leaderboard", *recipe.options(), "--seeds", str(seeds), *chosen]
    with watching_cells("leaderboard", total, quiet=as_json) as (watch, tell):
        command, at_once = without_paths(shlex.join(words)), jobs if jobs is not None else cores()
        shown: dict[str, Any] = {"command": command, "watch": watch, "say": tell}
        result = run_all(recipe, population, out, methods=named, seeds=seeds, jobs=at_once, **shown)
    options.answer(result, as_json, lambda: _print(result))
    if not has_plotly():
        options.warn(NEEDS)


def _print(result: dict[str, Any]) -> None:
    from homebody.report.terminal import comparison_table, unlike_public
    from homebody.report.words import say

    console = screen.console()
    marked = [
        {**row, "name": row["name"] + (" (c)" if row["kind"] == "centralised" else "")} for row in result["methods"]
    ]
    comparison_table({**result, "methods": marked}, console)
    folder = Path(result["folder"])
    page = "index.html" if (folder / "index.html").exists() else "LEADERBOARD.md"
    say(
        console,
        "(c): centralised",
        *result.get("cautions", []),
        *unlike_public(marked),
        *result["legend"],
        *(f"not in the table: {method['name']}: {method['reason']}" for method in result["skipped"]),
        f"page: {folder / page}",
    )

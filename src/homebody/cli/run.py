"""`homebody run`, `compare` and `show`: train one method or several, and read the record of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from click.core import ParameterSource
from typer import Argument, Option

from homebody.cli import options
from homebody.errors import HomebodyError
from homebody.settings import check_counts

__all__ = ["compare", "run", "show"]


@options.recipe_options
def run(
    given: options.Given,
    method: Annotated[str | None, options.METHOD] = None,
    seed: Annotated[int, options.of_recipe("seed")] = 0,
    settings: options.Settings = None,
    plain: Annotated[bool, options.of_recipe("fused")] = False,
    out: options.Out = Path("runs"),
    resume: Annotated[Path | None, Option(help="Continue the run in this folder; give no method.")] = None,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Train a method and print its test metrics, at the round chosen on validation, with ε and costs.

    bytes_up and bytes_down are means per client and round. --resume continues a run that was killed.
    """
    from homebody import run as runs
    from homebody.cli.progress import watching
    from homebody.methods import find
    from homebody.reference import Reference
    from homebody.report.terminal import print_result

    if (method is None) == (resume is None):
        raise HomebodyError("Give either a method to run (see `homebody methods`) or --resume RUN.")
    if resume is not None:
        _refuse_others()
        if trust_code:
            runs.trust_folder(resume, options.warn)
        with watching("resumed", quiet=as_json) as watcher:
            result = runs.resume(resume, watcher)
    else:
        assert method is not None
        if trust_code:
            raise HomebodyError(
                "--trust-code is for --resume: leave it out, because a method given on the command line is trusted."
            )
        recipe = given.recipe(method, settings, seed=seed, fused=not plain)
        if (recipe.stages or recipe.budget) and issubclass(find(method), Reference):
            raise HomebodyError(
                f"{method} is a centralised reference that collects raw data, so ε is ∞: leave out stages and budgets."
            )
        with watching(f"{recipe.short_method} seed {seed}", quiet=as_json, select=recipe.selects()) as watcher:
            result = runs.execute(recipe, out, watcher)
    options.answer(result, as_json, lambda: print_result(result))


def _refuse_others() -> None:
    """A resumed run is what its recipe says; an option that would be ignored is refused."""
    context = click.get_current_context()
    for name in context.params:
        typed = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if typed and name not in ("resume", "trust_code", "as_json"):
            option = next(p.opts[-1] for p in context.command.params if p.name == name)
            raise HomebodyError(f"--resume continues with the run's own recipe: leave out {option}.")


@options.recipe_options
def compare(
    given: options.Given,
    methods: Annotated[list[str], Argument(help="Names from `homebody methods`, or path/to/file.py:Class.")],
    seeds: Annotated[int, Option(help="Number of seeds (0, 1, …) to run each method with.")] = 3,
    out: options.Out = Path("runs"),
    as_json: options.Json = False,
) -> None:
    """Compare methods: mean and deviation over seeds, and whether each differs significantly from the best.

    All methods use the same splits and candidates, so users are compared in pairs (NDCG@10, sign-flip test, Holm).
    """
    from homebody.cli.progress import watching
    from homebody.report.comparison import summarise_runs
    from homebody.report.terminal import print_comparison
    from homebody.run import execute

    check_counts(seeds=seeds)
    recipes = [given.recipe(method, seed=seed) for method in dict.fromkeys(methods) for seed in range(seeds)]
    for recipe in recipes:
        recipe.build()
    results = []
    for recipe in recipes:
        with watching(f"{recipe.short_method} seed {recipe.seed}", quiet=as_json) as watcher:
            results.append(execute(recipe, out, watcher))
    comparison = summarise_runs(results)
    options.answer(comparison, as_json, lambda: print_comparison(comparison))


def show(run: Annotated[Path, Argument(help="A run's folder.")], as_json: options.Json = False) -> None:
    """Show a run: its recipe, its metrics by round, what it disclosed to whom, and its result."""
    from homebody.report import RunFolder
    from homebody.report.terminal import print_run

    folder = RunFolder.open(run)
    options.answer(folder.result() if as_json else {}, as_json, lambda: print_run(folder))

"""`homebody run`, `compare` and `show`: train one method or several, and read the record of a run."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from click.core import ParameterSource
from typer import Argument, Option

from homebody.cli import options
from homebody.errors import HomebodyError
from homebody.report.listing import LATEST, named_run
from homebody.settings import check_counts

if TYPE_CHECKING:
    from homebody.run import Watcher

__all__ = ["compare", "run", "show"]


@options.recipe_options
def run(
    given: options.Given,
    method: Annotated[str | None, options.METHOD] = None,
    seed: Annotated[int, options.of_recipe("seed")] = 0,
    settings: options.Settings = None,
    plain: Annotated[bool, options.of_recipe("fused")] = False,
    out: options.Out = Path("runs"),
    resume: Annotated[
        Path | None,
        Option(help="Continue the run in this folder, or latest; give no method.", callback=options.run_named),
    ] = None,
    trust_code: options.TrustCode = False,
    beyond: options.Beyond = False,
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

    said: list[str] = []
    if (method is None) == (resume is None):
        raise HomebodyError("Give either a method to run (see `homebody methods`) or --resume RUN.")
    if resume is not None:
        _refuse_others("--resume continues with the run's own recipe", "resume", "trust_code", "beyond", "as_json")
        if trust_code:
            runs.trust_folder(resume, options.warn)
        with watching("resumed", quiet=as_json) as watcher:
            result = runs.resume(resume, _keeping(watcher, said))
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
            result = runs.execute(recipe, out, _keeping(watcher, said))
    known = said if options.one_output() else []
    shown = {**result, "notes": [note for note in result["notes"] if note not in known]}
    options.answer(result, as_json, lambda: print_result(shown, beyond=beyond))


def _keeping(watcher: Watcher, said: list[str]) -> Watcher:
    """The same watcher; what it says is kept, too."""

    def say(text: str) -> None:
        said.append(text)
        watcher.say(text)

    return replace(watcher, say=say)


def _refuse_others(why: str, *taken: str) -> None:
    """Runs that exist are what their recipes say; an option that would be ignored is refused."""
    context = click.get_current_context()
    for name in context.params:
        typed = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if typed and name not in taken:
            option = next(p.opts[-1] for p in context.command.params if p.name == name)
            raise HomebodyError(f"{why}: leave out {option}.")


@options.recipe_options
def compare(
    given: options.Given,
    methods: Annotated[
        list[str],
        Argument(
            help="Methods to train: names from `homebody methods`, or path/to/file.py:Class. Or finished runs: "
            "folders, names in runs/, or latest.",
            metavar="METHOD|RUN...",
        ),
    ],
    seeds: Annotated[int, Option(help="Number of seeds (0, 1, …) to run each method with.")] = 3,
    out: options.Out = Path("runs"),
    beyond: options.Beyond = False,
    as_json: options.Json = False,
) -> None:
    """Compare methods: mean and deviation over seeds, and whether each differs significantly from the best.

    With --calibrate a budget holds for methods whose channel has noise; the others show their own ε. All methods use
    the same splits and candidates, so users are compared in pairs (NDCG@10, sign-flip test, Holm).
    Finished runs are compared without training again: homebody compare runs/a runs/b
    """
    from homebody.cli.progress import watching
    from homebody.recipe import under_one_budget
    from homebody.report.comparison import compared_runs, summarise_runs
    from homebody.report.terminal import print_comparison
    from homebody.run import execute

    if finished := _finished(methods, out):
        _refuse_others("Finished runs are compared as they are", "methods", "out", "beyond", "as_json")
        compared = compared_runs(finished)
        options.answer(compared, as_json, lambda: print_comparison(compared, beyond=beyond))
        return
    check_counts(seeds=seeds)
    recipes = [given.recipe(method, seed=seed) for method in dict.fromkeys(methods) for seed in range(seeds)]
    for recipe in recipes:
        recipe.build()
    recipes, notes = under_one_budget(recipes)
    for note in notes:
        options.warn(note)
    results = []
    for recipe in recipes:
        with watching(f"{recipe.short_method} seed {recipe.seed}", quiet=as_json) as watcher:
            results.append(execute(recipe, out, watcher))
    comparison = summarise_runs(results)
    options.answer(comparison, as_json, lambda: print_comparison(comparison, beyond=beyond))


def _finished(given: list[str], out: Path) -> list[Path]:
    """The folders of runs, if runs were named; empty if methods were."""
    from homebody.methods import METHODS

    folders = {text: named_run(Path(text), out) for text in given if text not in METHODS}
    found = {text: folder for text, folder in folders.items() if folder.is_dir() or str(folder) == LATEST}
    if found and (others := [text for text in given if text not in found]):
        raise HomebodyError(
            f"{next(iter(found))} is a run's folder, and {others[0]} is none: name methods to train, or finished runs."
        )
    return list(found.values())


def show(
    run: Annotated[
        Path, Argument(help=f"{options.RUN_HELP} Or a server's folder.", metavar="RUN", callback=options.run_named)
    ],
    beyond: options.Beyond = False,
    as_json: options.Json = False,
) -> None:
    """Show a run or a server's training: its recipe, its metrics by round, what it disclosed to whom, its result."""
    from homebody.federation.server.plan import FILE as SERVER_FILE
    from homebody.report import RunFolder
    from homebody.report.terminal import print_run

    if (run / SERVER_FILE).is_file():
        _show_server(run, as_json, beyond)
        return
    folder = RunFolder.open(run)
    options.answer(folder.result() if as_json else {}, as_json, lambda: print_run(folder, beyond=beyond))


def _show_server(folder: Path, as_json: bool, beyond: bool) -> None:
    from contextlib import closing

    from homebody.federation.server.admin import outcome
    from homebody.federation.server.plan import opened
    from homebody.report.terminal import print_record

    with opened(folder) as (plan, records), closing(records.ledger()) as ledger:
        result, lines, recipe = outcome(records, folder), records.rounds(), plan.recipe
        if as_json and result is None:
            raise HomebodyError(
                f"The training of {folder} has not ended: `homebody server status {folder} --json` says how far it is."
            )
        unfinished = f"`homebody server status {folder}` says who is connected and what it waits for"
        shown = tomllib.loads(recipe.to_toml())
        options.answer(
            result or {},
            as_json,
            lambda: print_record(shown, lines, ledger, recipe.stated_at, result, unfinished, beyond=beyond),
        )

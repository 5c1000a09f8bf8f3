"""`homebody run`: train one method on one data set, and keep the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import click
import typer
from click.core import ParameterSource

from homebody.cli import options
from homebody.errors import HomebodyError

__all__ = ["run"]


def run(
    method: Annotated[
        str | None, typer.Argument(help="A name from `homebody methods`, or path/to/file.py:Class.")
    ] = None,
    data: options.Data = "ml-100k",
    rounds: options.Rounds = None,
    seed: Annotated[int, typer.Option("--seed", help="All of a run's randomness derives from it.")] = 0,
    protocol: options.Protocol = "strict",
    settings: Annotated[list[str] | None, typer.Option("--set", help="field=value of the method; repeat.")] = None,
    cohort: options.Cohort = None,
    evaluate_every: options.EvaluateEvery = 1,
    held_out: options.HeldOut = None,
    device: options.Device = "cpu",
    plain: Annotated[bool, typer.Option("--plain", help="Run `client` under vmap, without fused kernels.")] = False,
    out: options.Out = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with this run's folder; takes no method.")
    ] = None,
    as_json: options.Json = False,
    data_dir: options.DataDir = None,
    user_col: options.UserCol = None,
    item_col: options.ItemCol = None,
    time_col: options.TimeCol = None,
    rating_col: options.RatingCol = None,
) -> None:
    """Train a method and print its test metrics, at the round chosen on validation, with ε and costs.

    bytes_up and bytes_down are means per client and round. A run that was killed goes on with --resume.
    """
    from homebody import run as runs
    from homebody.cli.progress import watching
    from homebody.recipe import Recipe, parse_fields

    if (method is None) == (resume is None):
        raise HomebodyError("Give a method to run (see `homebody methods`), or --resume RUN; not both, not neither.")
    if resume is not None:
        _refuse_others()
        with watching("resumed", quiet=as_json) as watcher:
            result = runs.resume(resume, watcher)
    else:
        assert method is not None
        recipe = Recipe(
            method=options.method_anywhere(method),
            data=options.data_anywhere(data),
            fields=parse_fields(method, settings or []),
            rounds=rounds,
            seed=seed,
            protocol=protocol,
            held_out=held_out,
            cohort=cohort,
            evaluate_every=evaluate_every,
            device=device,
            fused=not plain,
            columns=options.columns(user_col, item_col, time_col, rating_col),
            data_dir=options.folder_anywhere(data_dir),
        )
        with watching(f"{recipe.short_method} seed {seed}", quiet=as_json) as watcher:
            result = runs.execute(recipe, out, watcher)
    if as_json:
        typer.echo(json.dumps(result))
        return

    from homebody.report.tables import print_result

    print_result(result)


def _refuse_others() -> None:
    """A resumed run is what its recipe says; an option that would be ignored is refused."""
    context = click.get_current_context()
    for name in context.params:
        if name not in ("resume", "as_json") and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            option = next(p.opts[-1] for p in context.command.params if p.name == name)
            raise HomebodyError(f"--resume goes on with the run's own recipe: leave out {option}.")

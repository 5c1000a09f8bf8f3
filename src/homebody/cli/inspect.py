"""`homebody inspect`: what exactly leaves a device, and who sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from homebody.cli import options
from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from homebody.audit.inspection import Inspection

__all__ = ["inspect"]


@options.about_data
def inspect(
    given: options.Given,
    method: Annotated[str, typer.Argument(help="A name from `homebody methods`, or path/to/file.py:Class.")],
    user: Annotated[str | None, typer.Option("--user", help="By the name the data has; by default the first.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="As in the run whose first message this is.")] = 0,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """The message that one person's device would send in the first round: fields, bytes, and what it tells whom."""
    from homebody.audit.inspection import inspect as look
    from homebody.cli.progress import watching
    from homebody.core import Method
    from homebody.recipe import parse_fields
    from homebody.run import prepare, simulator

    recipe = given.recipe(method, fields=parse_fields(method, settings or []), seed=seed)
    with watching(recipe.short_method, quiet=as_json) as watcher:
        built, split = prepare(recipe, watcher)
    if not isinstance(built, Method):
        raise HomebodyError(f"{method} is a centralised reference: it collects whole histories, not messages.")
    people = split.population
    number = people.user(user) if user is not None else int(simulator(recipe, split).available()[0])
    found = look(built, simulator(recipe, split), number, cohort=recipe.cohort, seed=seed)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
        return
    _print(found, recipe.short_method)


def _print(found: Inspection, method: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{method}: one message of user {found.user}, {found.bytes:,} bytes", box=box.SIMPLE_HEAD)
    for heading in ("part", "shape", "type", "bytes", "begins"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    for part in found.parts:
        shape = " × ".join(map(str, part.shape)) or "1"
        whole = f" of {part.rows_of:,} rows" if part.rows_of is not None else ""
        table.add_row(part.name, shape + whole, part.dtype, f"{part.bytes:,}", part.hex)
    console.print(table)
    for observer, sentence in found.sees.items():
        console.print(f"{observer}: {sentence}", highlight=False, soft_wrap=True, markup=False)
    for line in found.tells:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

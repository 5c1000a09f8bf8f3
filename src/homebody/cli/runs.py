"""`homebody runs`: the runs of a folder, filtered and sorted."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from homebody import screen
from homebody.cli import options
from homebody.errors import several
from homebody.report.listing import RUNS, ListedRun, kept, listed, ordered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

__all__ = ["runs"]

SHOWN = ("begun", "rounds", "ndcg@10", "epsilon/server", "seconds")
"""The columns after a run's name; what runs are sorted by stands beside them."""
NARROW = 110
"""Columns of a terminal below which the time that a run began at is left out: a run's name ends in it."""


def runs(
    folder: Annotated[Path, Argument(help="The folder with the runs.", metavar="FOLDER")] = RUNS,
    where: Annotated[
        list[str] | None,
        Option(
            help="Only runs of which this holds: method=fedmf, seed=0, state=finished, factors=16, ndcg@10>=0.2, "
            "epsilon/server<8; repeat."
        ),
    ] = None,
    sort: Annotated[
        str, Option(help="Sort by this: begun, name, seconds, a metric such as ndcg@10, or a setting.")
    ] = "begun",
    limit: Annotated[int | None, Option("-n", "--limit", help="List so many at most.", min=1)] = None,
    as_json: options.Json = False,
) -> None:
    """List the runs of a folder: when each began, how far it is, its test metrics, ε and time. The latest comes first.

    Example: homebody runs --where data=ml-100k --where state=finished --sort ndcg@10
    """
    conditions = where or []
    chosen = ordered(kept(listed(folder), conditions), sort)[:limit]
    found = [{"run": str(run.path), **run.facts} for run in chosen]
    options.answer({"folder": str(folder), "runs": _jsonable(found)}, as_json, lambda: _print(folder, chosen, sort))


def _print(folder: Path, chosen: Sequence[ListedRun], sort: str) -> None:
    if not chosen:
        options.show(f"No run in {folder} is like that.")
        return
    console = screen.console()
    begun = {"begun"} if console.width < NARROW else set()
    columns = [name for name in dict.fromkeys([*SHOWN, sort]) if name not in {"name", "state", *begun}]
    numbers = [_heading(name) for name in columns if name != "begun"]
    drawn: Table = options.table(["run", *map(_heading, columns)], numbers, tight=True)
    for column in drawn.columns:
        column.no_wrap = True
    for run in chosen:
        drawn.add_row(options.plain(run["name"]), *(_cell(run, name) for name in columns))
    unfinished = sum(run["state"] != "finished" for run in chosen)
    note = f"; {several(unfinished, 'is', 'are')} not complete (…)" if unfinished else ""
    if not console.is_terminal or screen.fits(drawn, console.width):
        options.show(drawn)
    else:  # a name is there to be copied: it stays whole, with its figures below
        for run in chosen:
            figures = (f"{_heading(name)} {_cell(run, name)}" for name in columns)
            options.show(options.plain(run["name"]), f"  {' · '.join(figures)}")
    options.show(f"{several(len(chosen), 'run')}{note}. `homebody show RUN` shows one, `latest` is the last begun.")


def _heading(name: str) -> str:
    return {"epsilon/server": "ε, server", "seconds": "time s"}.get(name, name)


def _cell(run: ListedRun, name: str) -> str:
    value = run[name]
    if name == "begun":
        return f"{datetime.fromisoformat(value).astimezone():%Y-%m-%d %H:%M}"
    if value is None:
        return "–"
    if name == "rounds" and run["state"] != "finished":
        return f"{value} …"
    if name == "seconds":
        return f"{value:.1f}"
    if isinstance(value, float):
        return "∞" if value == float("inf") else f"{value:.4g}" if name.startswith("epsilon") else f"{value:.4f}"
    return options.plain(value)


def _jsonable(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """JSON knows no infinity: it is a text, as in `result.json`."""
    return [
        {name: str(value) if value in (float("inf"), float("-inf")) else value for name, value in run.items()}
        for run in found
    ]

"""`homebody recommend`: what a trained run recommends to one of its simulated people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from homebody.cli import options

__all__ = ["recommend"]


def recommend(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    user: Annotated[str, typer.Option("--user", help="The person, as the data set calls them.")],
    k: Annotated[int, typer.Option("-k", help="How many items.", min=1)] = 10,
    as_json: options.Json = False,
) -> None:
    """The person's best new items, ranked as their own device would."""
    from homebody.run import reopen

    fitted, population = reopen(run)
    best = fitted.recommend(population.user(user), k)
    rows = [{"item": population.item_id(i), "name": population.item_name(i), "score": s} for i, s in best]
    if as_json:
        typer.echo(json.dumps({"user": user, "items": rows}))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("", "item", "name", "score", title=f"For {user}")
    for place, row in enumerate(rows, 1):
        table.add_row(str(place), str(row["item"]), str(row["name"]), f"{row['score']:.3f}")
    Console().print(table)

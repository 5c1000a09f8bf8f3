"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "Cohort",
    "Data",
    "DataDir",
    "Device",
    "EvaluateEvery",
    "HeldOut",
    "ItemCol",
    "Json",
    "Out",
    "Protocol",
    "RatingCol",
    "Rounds",
    "TimeCol",
    "UserCol",
    "columns",
    "data_anywhere",
    "folder_anywhere",
    "method_anywhere",
]

Data = Annotated[
    str,
    typer.Option("--data", help="A dataset's name, a CSV or Parquet file, or synthetic[:…]."),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Training rounds; by default what the method takes.")]
Protocol = Annotated[str, typer.Option("--protocol", help="strict, isolated or published: see docs/evaluation.md.")]
HeldOut = Annotated[
    str | None,
    typer.Option("--held-out", help="latest or random; by default latest where there are times."),
]
Cohort = Annotated[int | None, typer.Option("--cohort", help="Clients that take part in a round; by default all.")]
EvaluateEvery = Annotated[
    int,
    typer.Option("--evaluate-every", help="Rounds from one evaluation to the next; the last always is.", min=1),
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Out = Annotated[Path, typer.Option("--out", help="The folder that run folders are made in.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="A folder with a folder per dataset; read before $HOMEBODY_DATA and the cache."),
]
UserCol = Annotated[str | None, typer.Option("--user-col", help="For a file of your own: the column of users.")]
ItemCol = Annotated[str | None, typer.Option("--item-col", help="The column of items.")]
TimeCol = Annotated[str | None, typer.Option("--time-col", help="The column of times.")]
RatingCol = Annotated[str | None, typer.Option("--rating-col", help="The column of ratings.")]


def method_anywhere(method: str) -> str:
    """A method's file by its whole path, so that the run can be resumed from any folder."""
    path, colon, name = method.rpartition(":")
    return f"{Path(path).resolve()}:{name}" if colon and path.endswith(".py") else method


def data_anywhere(data: str) -> str:
    """Likewise a file of one's own."""
    return str(Path(data).resolve()) if Path(data).is_file() else data


def folder_anywhere(folder: Path | None) -> str | None:
    """Likewise a folder; one that is not there stays as it was typed, for the error to name."""
    return None if folder is None else str(folder.resolve() if folder.is_dir() else folder)


def columns(user_col: str | None, item_col: str | None, time_col: str | None, rating_col: str | None) -> dict[str, str]:
    """The columns that were named."""
    named = {"user_col": user_col, "item_col": item_col, "time_col": time_col, "rating_col": rating_col}
    return {name: value for name, value in named.items() if value is not None}

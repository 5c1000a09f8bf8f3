"""`homebody show`: a run's record, for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from homebody.cli import options

__all__ = ["show"]


def show(run: Annotated[Path, typer.Argument(help="A run's folder.")], as_json: options.Json = False) -> None:
    """What was run, how it went round by round, what it told whom, and what came of it."""
    from homebody.report import RunFolder
    from homebody.report.terminal import print_run

    folder = RunFolder.open(run)
    if as_json:
        typer.echo(json.dumps(folder.result()))
        return
    print_run(folder)

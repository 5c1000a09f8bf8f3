"""How commands of many runs show how far they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from homebody.cli.progress import EVERY, Interrupted

if TYPE_CHECKING:
    from homebody.studies.cells import CellProgress

__all__ = ["watching_cells"]


def left(seconds: float, done: int, todo: int) -> str:
    """How long the rest may take, as those took that are done; nothing before the first is.

    >>> left(60, 2, 10), left(60, 0, 10), left(60, 2, 0)
    ('about 5 min 0 s left', '', '')
    """
    from homebody.report.words import duration

    return f"about {duration(seconds / done * todo)} left" if done and todo else ""


@contextmanager
def watching_cells(
    label: str, total: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[CellProgress], None], Callable[[str], None]]]:
    """A bar over runs on the error stream, narrow enough for 80 columns; Ctrl-C says how to go on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    console = Console(stderr=True, quiet=quiet)
    bar = Bar(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=12),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=console,
        expand=True,
    )
    task = bar.add_task(label, total=total, told="")
    finished, last = 0, time.monotonic()
    began, before, took = last, set[int](), 0.0

    def watch(progress: CellProgress) -> None:
        nonlocal finished, last, took
        if progress.finished > finished:
            took = time.monotonic() - began  # until then: a long cell in the middle does not make the rest longer
        finished = progress.finished
        if progress.result is not None and not progress.planned:
            before.add(progress.cell)  # finished by an earlier command, or refused at once: no measure of the others
        recipe = progress.recipe
        rest = left(took, finished - len(before), total - finished)
        told = f"{rest} · " if rest else ""
        told += f"{recipe.short_method} {recipe.data} {recipe.protocol} seed {recipe.seed}"
        if progress.planned:
            told += f", round {progress.done}/{progress.planned}"
        bar.update(task, completed=finished, told=told)
        if not console.is_terminal and time.monotonic() - last > EVERY:
            last = time.monotonic()
            console.print(
                f"{label}: {finished} of {total} runs · {told}", highlight=False, soft_wrap=True, markup=False
            )

    def say(text: str) -> None:
        console.print(f"{label}: {text}", highlight=False, soft_wrap=True, markup=False)

    drawn = console.is_terminal and not quiet
    if drawn:
        bar.start()
    try:
        yield watch, say
    except KeyboardInterrupt:
        kept = f"{finished} of {total} runs are finished and kept; give the same command again to go on."
        raise Interrupted(None, go_on=kept) from None
    finally:
        if drawn:
            bar.stop()

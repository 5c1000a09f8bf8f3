"""Progress of one run or of many, on the error stream, so that results stay apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from homebody.cli.data import fetching

if TYPE_CHECKING:
    from homebody.progress import Round
    from homebody.run import Watcher
    from homebody.studies.cells import CellProgress

__all__ = ["Interrupted", "watching", "watching_cells"]

EVERY = 5.0
"""Seconds between lines where there is no terminal to draw a bar on."""


class Interrupted(Exception):
    """Ctrl-C while a run was going on; `run` is its folder, once there is one, or `go_on` says how to go on."""

    def __init__(self, run: Path | None, go_on: str = "") -> None:
        super().__init__()
        self.run, self.go_on = run, go_on


@contextmanager
def watching(label: str, *, quiet: bool = False, select: str = "valid/ndcg@10") -> Iterator[Watcher]:
    """A bar with round, time left, loss, validation metric and ε, narrow enough for 80 columns."""
    from homebody.report.words import epsilon as epsilon_text
    from homebody.run import Watcher

    run: Path | None = None

    def begun(folder: Path) -> None:
        nonlocal run
        run = folder

    if quiet:
        try:
            yield Watcher(begun=begun)
        except KeyboardInterrupt:
            raise Interrupted(run) from None
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=8),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=console,
        expand=True,
    )
    task = bar.add_task(label, total=None, told="", start=False)
    last_line, metric, rounds = time.monotonic(), "", 0
    started = False

    def start(total: int) -> None:
        nonlocal rounds, started
        rounds, started = total, console.is_terminal
        if started:
            bar.start()
        bar.update(task, total=total)
        bar.start_task(task)

    def on_round(line: Round) -> None:
        nonlocal last_line, metric
        if select in line.metrics:
            metric = f"{select} {line.metrics[select]:.3f}"
        loss = "" if line.loss is None else f"loss {line.loss:.3f}"
        values = {who: epsilon_text(value) for who, value in line.epsilon.items()}
        told_of = set(values.values())
        epsilon = "ε " + (next(iter(told_of)) if len(told_of) == 1 else " ".join(f"{w} {v}" for w, v in values.items()))
        epsilon += f" at δ {line.delta:g}" if told_of != {"∞"} else ""
        told = " · ".join(part for part in (loss, metric, epsilon) if part)
        bar.update(task, completed=line.step, told=told)
        if not console.is_terminal and time.monotonic() - last_line > EVERY:
            last_line = time.monotonic()
            console.print(f"{label} round {line.step}/{rounds} · {told}", highlight=False, soft_wrap=True)

    def say(text: str) -> None:
        console.print(f"{label}: {text}", highlight=False, soft_wrap=True)

    with fetching() as (_, fetched):
        try:
            yield Watcher(say=say, begun=begun, start=start, on_round=on_round, fetched=fetched)
        except KeyboardInterrupt:
            raise Interrupted(run) from None
        finally:
            if started:
                bar.stop()


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

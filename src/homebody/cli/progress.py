"""How a run shows that it is alive: on the error stream, so that results stay apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from homebody.cli.data import fetching

if TYPE_CHECKING:
    from homebody.progress import Round
    from homebody.run import Watcher

__all__ = ["Interrupted", "watching"]

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

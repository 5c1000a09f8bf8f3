"""Progress of one run or of many, on the error stream, so that results stay apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homebody.cli.data import fetching
from homebody.errors import several
from homebody.screen import say

if TYPE_CHECKING:
    from homebody.progress import Round
    from homebody.run import Watcher
    from homebody.studies.cells import CellProgress

__all__ = ["Bar", "Interrupted", "watching", "watching_cells", "watching_trials"]

EVERY = 5.0
"""Seconds between lines where there is no terminal to draw a bar on."""


class Interrupted(Exception):
    """Ctrl-C during a run. `run` is its folder, once it exists; otherwise `go_on` says how to continue."""

    def __init__(self, run: Path | None, go_on: str = "") -> None:
        super().__init__()
        self.run, self.go_on = run, go_on


class Bar:
    """A progress bar with a note, narrow enough for 80 columns; without a terminal, a line every few seconds."""

    def __init__(
        self, label: str, *, width: int = 12, counts: bool = True, elapsed: bool = False, quiet: bool = False
    ) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        fixed = partial(Column, no_wrap=True)
        remaining = progress.TimeRemainingColumn(compact=True, table_column=fixed())
        self.console = Console(stderr=True, quiet=quiet)
        self.last = time.monotonic()
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", table_column=fixed()),
            progress.BarColumn(bar_width=width),
            *([progress.MofNCompleteColumn(table_column=fixed())] if counts else []),
            progress.TimeElapsedColumn(fixed()) if elapsed else remaining,
            progress.TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=self.console,
            expand=True,
        )
        self.task = self.bar.add_task(label, total=None, note="")

    def start(self) -> None:
        """Draw the bar, if there is a terminal."""
        if self.console.is_terminal and not self.console.quiet:
            self.bar.start()

    def update(self, note: str, line: str, **progress: Any) -> None:
        """Show a note beside the bar, or a line instead of it."""
        self.bar.update(self.task, note=note, **progress)
        if not self.console.is_terminal and time.monotonic() - self.last > EVERY:
            self.last = time.monotonic()
            self.say(line)

    def say(self, text: str) -> None:
        say(self.console, text)

    def stop(self) -> None:
        if self.bar.live.is_started:
            self.bar.stop()


@contextmanager
def _until_stopped(bar: Bar, stopped: Callable[[], Interrupted]) -> Iterator[None]:
    """Take the bar away at the end; Ctrl-C becomes `stopped`."""
    try:
        yield
    except KeyboardInterrupt:
        raise stopped() from None
    finally:
        bar.stop()


@contextmanager
def watching(label: str, *, quiet: bool = False, select: str = "valid/ndcg@10") -> Iterator[Watcher]:
    """Show a run: the round, the time left, the loss, the validation metric and ε."""
    from homebody.report.words import epsilon as epsilon_text
    from homebody.run import Watcher

    run: Path | None = None

    def begun(folder: Path) -> None:
        nonlocal run
        run = folder

    bar, metric, rounds = Bar(label, width=8, quiet=quiet), "", 0

    def start(total: int) -> None:
        nonlocal rounds
        rounds = total
        bar.start()
        bar.bar.reset(bar.task, total=total)

    def on_round(line: Round) -> None:
        nonlocal metric
        if select in line.metrics:
            metric = f"{select} {line.metrics[select]:.3f}"
        loss = "" if line.loss is None else f"loss {line.loss:.3f}"
        values = {who: epsilon_text(value) for who, value in line.epsilon.items()}
        different = set(values.values())
        epsilon = "ε " + (different.pop() if len(different) == 1 else " ".join(f"{w} {v}" for w, v in values.items()))
        epsilon += f" at δ {line.delta:g}" if set(values.values()) != {"∞"} else ""
        note = " · ".join(part for part in (loss, metric, epsilon) if part)
        bar.update(note, f"{label} round {line.step}/{rounds} · {note}", completed=line.step)

    with fetching(quiet=quiet) as (_, fetched), _until_stopped(bar, lambda: Interrupted(run)):
        yield Watcher(
            say=lambda text: bar.say(f"{label}: {text}"), begun=begun, start=start, on_round=on_round, fetched=fetched
        )


def left(seconds: float, done: int, todo: int) -> str:
    """How long the rest may take, at the speed so far; empty before the first is done.

    >>> left(60, 2, 10), left(60, 0, 10), left(60, 2, 0)
    ('about 5 min 0 s left', '', '')
    """
    from homebody.report.words import duration

    return f"about {duration(seconds / done * todo)} left" if done and todo else ""


@contextmanager
def watching_cells(
    label: str, total: int, *, quiet: bool = False
) -> Iterator[tuple[Callable[[CellProgress], None], Callable[[str], None]]]:
    """Show a command of many runs; Ctrl-C says how to continue."""
    bar = Bar(label, elapsed=True, quiet=quiet)
    finished, began, before, took = 0, time.monotonic(), set[int](), 0.0

    def watch(progress: CellProgress) -> None:
        nonlocal finished, took
        if progress.finished > finished:
            took = time.monotonic() - began  # until then: a long cell in the middle does not make the rest longer
        finished = progress.finished
        if progress.result is not None and not progress.planned:
            before.add(progress.cell)  # finished by an earlier command, or refused at once: no measure of the others
        recipe = progress.recipe
        rest = left(took, finished - len(before), total - finished)
        note = f"{rest} · " if rest else ""
        note += f"{recipe.short_method} {recipe.data} {recipe.protocol} seed {recipe.seed}"
        if progress.planned:
            note += f", round {progress.done}/{progress.planned}"
        bar.update(note, f"{label}: {finished} of {total} runs · {note}", completed=finished, total=total)

    def stopped() -> Interrupted:
        go_on = f"{finished} of {total} runs are finished and kept; give the same command again to go on."
        return Interrupted(None, go_on=go_on)

    bar.start()
    with _until_stopped(bar, stopped):
        yield watch, lambda text: bar.say(f"{label}: {text}")


@contextmanager
def watching_trials(
    label: str, select: str, *, quiet: bool
) -> Iterator[tuple[Watcher, Callable[[CellProgress, dict[str, Any]], None]]]:
    """Show a search: all rounds of all trials, and the best trial so far."""
    from homebody.run import Watcher

    bar = Bar(f"tune {label}", counts=False, quiet=quiet)
    share: dict[int, float] = {}
    begun = False

    def start(_: Path) -> None:
        nonlocal begun
        begun = True
        bar.start()

    def watch(now: CellProgress, record: dict[str, Any]) -> None:
        share[now.cell] = 0.0 if now.result is not None else now.done / max(1, now.planned)
        best, spec = record["best"], record["spec"]
        ended = sum(trial["status"] != "waiting" for trial in record["trials"])
        count = max(len(record["trials"]), spec["trials"]) if spec["strategy"] == "adaptive" else len(record["trials"])
        note = f"{ended}/{several(count, 'trial')}"
        if best:
            note += f" · best {select} {best['validation']:.4f} (trial {best['trial']})"
        seeds = spec["seeds"]
        bar.update(note, f"tune {label}: {note}", total=count * seeds, completed=ended * seeds + sum(share.values()))

    def stopped() -> Interrupted:
        return Interrupted(None, "The same command goes on from here." if begun else "")

    with fetching(quiet=quiet) as (_, fetched), _until_stopped(bar, stopped):
        yield Watcher(say=bar.say, begun=start, fetched=fetched), watch

"""How far a call is, in one plain line on the error stream, once it takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from homebody.progress import Round
from homebody.run import Watcher

__all__ = ["watching"]

PATIENCE = 2.0
"""Seconds before anything is shown."""
EVERY = 5.0
"""Seconds between lines where a line cannot be written over."""


class ProgressLine:
    """One line that is written over and over; where that cannot be, a new line every few seconds."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        # A notebook's stream is no terminal, and still takes a carriage return.
        self._over = sys.stderr.isatty() or "ipykernel" in type(sys.stderr).__module__
        self._began = time.monotonic()
        self._last, self._width = self._began, 0
        self._said: set[str] = set()

    def show(self, text: str) -> None:
        """How far it is, if that has taken long enough for anybody to wonder."""
        now = time.monotonic()
        wait = 0.2 if self._over and self._width else EVERY if self._width else PATIENCE
        if self._quiet or now - self._last < wait:
            return
        self._last = now
        end = f"{' ' * max(0, self._width - len(text))}\r" if self._over else "\n"
        self._width = len(text)
        sys.stderr.write(text + end)
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """A sentence that stays; each is said once."""
        if self._quiet or text in self._said:
            return
        self._said.add(text)
        self.clear()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Take away a line that would be written over."""
        if self._over and self._width:
            sys.stderr.write(" " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


@contextmanager
def watching(label: str, line: ProgressLine, select: str = "valid/ndcg@10") -> Iterator[Watcher]:
    """A watcher that shows the round, the metric that chooses the round, and ε."""
    from homebody.report.words import epsilon

    rounds, metric = 0, ""

    def start(total: int) -> None:
        nonlocal rounds
        rounds = total
        line.show(f"{label}: compiling and starting")

    def on_round(told: Round) -> None:
        nonlocal metric
        if select in told.metrics:
            metric = f", {select} {told.metrics[select]:.3f}"
        known = told.epsilon.get("public")
        spent = "" if known is None else f", ε {epsilon(known)}"
        line.show(f"{label}: round {told.step} of {rounds}{metric}{spent}")

    def fetched(done: int, of: int | None) -> None:
        line.show(f"{label}: {done / 1e6:.0f}{f' of {of / 1e6:.0f}' if of else ''} MB fetched")

    def begun(folder: Path) -> None:
        line.show(f"{label}: starting")

    try:
        yield Watcher(say=line.say, begun=begun, start=start, on_round=on_round, fetched=fetched)
    finally:
        line.clear()

"""Compiled loops shared out over threads.

numba can do this itself (`parallel=True`), but its parallel compiler takes three times as long for the same loop, which
a first run waits for. Here a loop is compiled once, for a range of its rows, and threads take ranges in turn.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numba as nb

__all__ = ["parallel"]

PARTS = 8
"""Ranges a thread: rows take unequal time, so a thread that is done early takes another range."""


def parallel(over: str | Callable[..., int], **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compile `kernel(lower, upper, *arguments)` and call it as `kernel(*arguments)`, on all threads.

    over: the argument whose length is the number of rows, or a function of the arguments that gives it. The kernel
    works on rows lower to upper − 1 alone, writes to no other row, and returns nothing. With `alone=True` a call stays
    on the caller's thread: for little work, which is done before another thread wakes.

    >>> import numpy as np
    >>> @parallel(over="out")
    ... def squares(lower, upper, out):
    ...     for row in range(lower, upper):
    ...         out[row] = row * row
    >>> out = np.empty(5, dtype=np.int64)
    >>> squares(out)
    >>> out.tolist()
    [0, 1, 4, 9, 16]
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)[2:]
        place = names.index(over) if isinstance(over, str) else 0
        # A function that is not in a file, such as one in a notebook or a doctest, has no place for a cache.
        cached = Path(inspect.getfile(function)).is_file()
        compiled = nb.njit(nogil=True, cache=cached, **options)(function)

        @wraps(function)
        def run(*arguments: Any, alone: bool = False) -> None:
            count = over(*arguments) if callable(over) else len(arguments[place])
            if alone:
                compiled(0, count, *arguments)
            else:
                _share_out(compiled, count, arguments)

        run.compiled = compiled  # type: ignore[attr-defined]
        return run

    return decorate


def _share_out(kernel: Callable[..., None], count: int, arguments: tuple[Any, ...]) -> None:
    threads = min(nb.get_num_threads(), count)
    if threads <= 1 or threading.current_thread() in _crew().threads:
        kernel(0, count, *arguments)
        return
    size = -(-count // (PARTS * threads))
    starts = itertools.count(0, size)

    def work() -> None:
        while (start := next(starts)) < count:
            kernel(start, min(count, start + size), *arguments)

    crew, done = _crew(), SimpleQueue[BaseException | None]()
    for _ in range(threads - 1):
        crew.jobs.put((work, done))
    try:
        work()
    finally:
        failures = [done.get() for _ in range(threads - 1)]
    for failure in failures:
        if failure is not None:
            raise failure


class _Crew:
    """Threads that wait for work as long as the process lives; whoever calls is one more."""

    def __init__(self, size: int) -> None:
        self.jobs: SimpleQueue[tuple[Callable[[], None], SimpleQueue[BaseException | None]]] = SimpleQueue()
        self.threads = [threading.Thread(target=self._serve, name=f"homebody-{n}", daemon=True) for n in range(size)]
        for thread in self.threads:
            thread.start()

    def _serve(self) -> None:
        if torch := sys.modules.get("torch"):
            # Its OpenMP threads spin for milliseconds after each operation, on the cores that these threads need. They
            # give way at once where OpenMP knows that there are more threads than cores, which this makes it see.
            torch.ones(1 << 17).sum()
        while True:
            work, done = self.jobs.get()
            try:
                work()
                done.put(None)
            except BaseException as error:
                done.put(error)


@cache
def _crew() -> _Crew:
    most: int = nb.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return _Crew(most - 1)


os.register_at_fork(after_in_child=_crew.cache_clear)  # threads do not survive a fork

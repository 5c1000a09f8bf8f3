"""Wall time, with the time that numba spends compiling counted apart."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, NamedTuple

__all__ = ["Lap", "Stopwatch"]


class Lap(NamedTuple):
    """Seconds of wall time since the last lap."""

    seconds: float
    """Without compilation."""
    compile_seconds: float
    """In which some thread compiled. Loading a compiled kernel from the cache is no compilation."""


class Stopwatch:
    """Measures laps of wall time.

    >>> watch = Stopwatch()
    >>> lap = watch.lap()
    >>> lap.seconds >= 0, lap.compile_seconds
    (True, 0.0)
    """

    def __init__(self) -> None:
        self._began, self._compiled = time.perf_counter(), _compiled()

    def lap(self) -> Lap:
        """The time since the last lap, or since the start."""
        now, compiled = time.perf_counter(), _compiled()
        spent = compiled - self._compiled
        lap = Lap(max(0.0, now - self._began - spent), spent)
        self._began, self._compiled = now, compiled
        return lap


class _Compilations:
    """The wall time during which at least one function is being compiled.

    One compilation starts others: for functions that are called, and in other threads. So only the time from the first
    start to the last end counts.
    """

    def __init__(self) -> None:
        self._lock, self._open, self._since, self._seconds = threading.Lock(), 0, 0.0, 0.0

    def start(self) -> None:
        with self._lock:
            if not self._open:
                self._since = time.perf_counter()
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._seconds += time.perf_counter() - self._since

    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)


_compilations: _Compilations | None = None


def _compiled() -> float:
    """Seconds of compilation in this process since the first call after numba was imported.

    Numba takes long to import, so it is not imported here: without it nothing compiles.
    """
    global _compilations
    if _compilations is None:
        if "numba" not in sys.modules:
            return 0.0
        from numba.core import event

        _compilations = counted = _Compilations()

        class Listener(event.Listener):
            def on_start(self, event: Any) -> None:
                counted.start()

            def on_end(self, event: Any) -> None:
                counted.end()

        event.register("numba:compile", Listener())  # type: ignore[no-untyped-call]
    return _compilations.seconds()

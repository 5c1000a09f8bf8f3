"""Compilation is counted apart from the work, once, and in every thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numba as nb
import pytest

from homebody.stopwatch import Stopwatch, _Compilations


def test_compilation_is_no_part_of_the_seconds() -> None:
    watch = Stopwatch()

    @nb.njit
    def inner(x: int) -> int:
        return x + 1

    @nb.njit
    def outer(x: int) -> int:
        return inner(x) * 2

    began = time.perf_counter()
    assert outer(3) == 8
    first = watch.lap()
    wall = time.perf_counter() - began
    assert 0 < first.compile_seconds <= wall
    assert first.seconds + first.compile_seconds <= wall * 1.5 + 0.1
    assert outer(4) == 10
    assert watch.lap().compile_seconds == 0


def test_other_threads_count_too() -> None:
    watch = Stopwatch()

    @nb.njit
    def work(x: float) -> float:
        return x * 3

    thread = threading.Thread(target=work, args=(1.5,))
    thread.start()
    thread.join()
    assert watch.lap().compile_seconds > 0


def test_compilations_within_one_another_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 to 8 two are open in turn, from 8 to 10 none, from 10 to 11 one that is not done yet."""
    clock = iter([1.0, 8.0, 10.0, 11.0])
    compilations = _Compilations()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    compilations.start()
    compilations.start()
    compilations.end()
    compilations.end()
    compilations.start()
    assert compilations.seconds() == 8.0


def test_a_stopwatch_does_not_import_numba() -> None:
    code = (
        "import sys; from homebody.stopwatch import Stopwatch; lap = Stopwatch().lap(); "
        "assert lap.compile_seconds == 0; sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

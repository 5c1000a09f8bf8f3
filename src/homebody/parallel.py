"""Compiled loops shared out over threads.

numba can do this itself (`parallel=True`), but its parallel compiler takes three times as long for the same loop, which
a first run waits for. Here a loop is compiled once, for a range of its rows, and threads take ranges in turn. They are
the threads of torch's OpenMP, which are awake between two operations.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numba as nb

__all__ = ["inner", "parallel"]

PARTS = 4
"""Ranges a thread: rows take unequal time, so a thread that is done early takes another range."""
_UNWRAPPED: dict[str, Any] = {"no_cfunc_wrapper": True}
"""Nothing here is called from C, and what would let C call a function takes time to compile."""


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
        compiled = nb.njit(nogil=True, cache=cached, **_UNWRAPPED, **options)(function)

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


def inner(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that compiled code alone calls.

    numba would compile two more functions, through which Python and C could call it: a sixth of the time. With
    `forceinline=True` LLVM puts it into its callers. numba's `inline="always"` does so before types are known, and
    infers and compiles each copy anew: that takes three times as long, for the same machine code.
    """
    return nb.njit(**{**_UNWRAPPED, "no_cpython_wrapper": True, **options})


def _share_out(kernel: Callable[..., None], count: int, arguments: tuple[Any, ...]) -> None:
    torch = sys.modules.get("torch")
    # As many as torch takes: OpenMP would end and start threads whenever the number changes.
    threads = 1 if _forked else min(nb.get_num_threads(), torch.get_num_threads() if torch else count, count)
    if threads <= 1:
        kernel(0, count, *arguments)
        return
    size = -(-count // (PARTS * threads))
    starts = itertools.count(0, size)
    failures: list[BaseException] = []

    def work(_: object = None) -> None:
        try:
            while not failures and (start := next(starts)) < count:
                kernel(start, min(count, start + size), *arguments)
        except BaseException as error:
            failures.append(error)

    if (openmp := _openmp(torch is not None)) is not None:
        openmp(_CALLBACK(work), None, threads, 0)
    else:
        wait([_pool().submit(work) for _ in range(threads)])
    if failures:
        raise failures[0]


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp(loaded: bool) -> Callable[..., None] | None:
    """Runs a function on the threads of torch's OpenMP, or None where torch has another one, as on macOS.

    A pool of our own would compete with theirs, which wait for the next operation by spinning on the same cores.
    """
    if not loaded:
        return None
    try:
        run = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    run.restype, run.argtypes = None, [_CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return run


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(nb.config.NUMBA_NUM_THREADS, "homebody")  # type: ignore[attr-defined]


def _after_fork() -> None:
    """Threads do not survive a fork, and OpenMP would wait for them for ever."""
    global _forked
    _forked = True


_forked = False
os.register_at_fork(after_in_child=_after_fork)

"""The other side of a pool: takes a cell from the input, runs it, tells how it goes on the output."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["main"]

EVERY = 0.25
"""Seconds between two words about rounds."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Work until the input ends."""
    _die_with_parent()
    # What a method prints goes to the error stream; lines for the parent have a way of their own.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, tasks), daemon=True).start()
    while True:
        _work(json.loads(tasks.get()), out)


def _die_with_parent() -> None:
    """Where the system offers it, at once and even within compiled code; the end of the input does it elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _listen(source: BinaryIO, tasks: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        tasks.put(line)
    os._exit(0)  # whoever gave the tasks is gone, and a cell can be left at any moment


def _work(task: dict[str, Any], out: BinaryIO) -> None:
    from homebody.errors import Diverged, HomebodyError
    from homebody.methods import trust
    from homebody.progress import Round
    from homebody.recipe import Recipe
    from homebody.run import Watcher
    from homebody.studies.cells import run_cell

    planned, told_at = 0, 0.0

    def tell(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    def start(rounds: int) -> None:
        nonlocal planned
        planned = rounds
        tell({"planned": planned, "done": 0})

    def on_round(line: Round) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > EVERY:
            told_at = time.monotonic()
            tell({"planned": planned, "done": line.step})

    def looked(done: int, steps: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at > EVERY or done == steps:
            told_at = time.monotonic()
            tell({"planned": steps, "done": done})

    watcher = Watcher(say=lambda text: tell({"say": text}), start=start, on_round=on_round, looked=looked)
    try:
        recipe = Recipe.from_toml(task["recipe"])
        if task["code"]:
            trust(recipe.method, task["code"])
        result = run_cell(recipe, Path(task["path"]), watcher, keep_state=task["keep_state"], probes=task["probes"])
    except HomebodyError as error:
        tell({"error": str(error), "diverged": isinstance(error, Diverged)})
    except OSError as error:
        where = f" {error.filename}" if error.filename else " this"
        tell({"error": f"The system refused{where}: {error.strerror or error}."})
    except Exception:
        tell({"crash": traceback.format_exc()})
    else:
        tell({"result": result})


if __name__ == "__main__":
    main()

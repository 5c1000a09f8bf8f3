"""Worker processes that run cells: `Pool` is the parent's side, `main` is the worker's.

Tasks and answers are lines of JSON. A worker exits when its input ends, which also happens when the parent is
killed. A worker can be killed at any moment, because a cell continues from its checkpoint; Ctrl-C relies on that.
A worker that dies is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from homebody.progress import Round

__all__ = ["Pool", "cores", "main"]

ATTEMPTS = 2
"""How often a cell is started before its worker's death counts as an error."""
POLL_SECONDS = 1.0
"""How often the parent looks for Ctrl-C: a signal that arrives just before a wait does not end the wait."""
REPORT_SECONDS = 0.25
"""The shortest time between two progress messages of a worker."""
ENDS = {"result", "error", "stopped"}
"""What is in the last message of a task."""
PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Workers for as long as the block lasts; none of them outlives it. Tasks may be added while others run."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.tasks: dict[str, Mapping[str, Any]] = {}
        self._todo: deque[str] = deque()
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._attempts: Counter[str] = Counter()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._selector.close()
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.close()

    def add(self, name: str, task: Mapping[str, Any]) -> None:
        self.tasks[name] = task
        self._todo.append(name)

    @property
    def has_room(self) -> bool:
        """Whether a task that is added now begins at once."""
        return len(self._todo) + sum(bool(worker.task) for worker in self._workers) < self.jobs

    def stop(self, name: str) -> None:
        """End a task early. Its last message is `stopped`, or its result if that was on its way."""
        for worker in self._workers:
            if worker.task == name:
                worker.send({"stop": True})

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The messages of the workers with their tasks, until every task has a result or an error, or was stopped."""
        while self._todo or any(worker.task for worker in self._workers):
            self._employ()
            for key, _ in self._selector.select(POLL_SECONDS):
                worker: _Worker = key.data
                messages = worker.read()
                if messages is None:
                    yield from self._bury(worker)
                    continue
                for message in messages:
                    task = worker.task
                    if "crash" in message:
                        raise RuntimeError(f"{Path(self.tasks[task]['path']).name} failed:\n{message['crash']}")
                    if message.keys() & ENDS:
                        worker.task = ""
                    yield task, message

    def _employ(self) -> None:
        for worker in self._workers:
            if self._todo and not worker.task:
                self._give(worker)
        while self._todo and len(self._workers) < self.jobs:
            worker = _Worker(max(1, cores() // self.jobs))
            self._workers.append(worker)
            self._selector.register(worker.output, selectors.EVENT_READ, worker)
            self._give(worker)

    def _give(self, worker: _Worker) -> None:
        worker.task = self._todo.popleft()
        self._attempts[worker.task] += 1
        worker.send(self.tasks[worker.task])

    def _bury(self, worker: _Worker) -> Iterator[tuple[str, dict[str, Any]]]:
        """A worker died: its task gets another worker, or an error."""
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        how = worker.close()
        task = worker.task
        if not task:
            return
        if self._attempts[task] < ATTEMPTS:
            self._todo.appendleft(task)
            return
        folder = Path(self.tasks[task]["path"])
        yield (
            task,
            {
                "error": f"The process that ran {folder.name} ended {ATTEMPTS} times ({how}): the machine may have too "
                f"little memory for it, or for so many jobs; what it did is kept in {folder}."
            },
        )


class _Worker:
    """A worker process with its input and output."""

    def __init__(self, threads: int) -> None:
        self.task = ""
        self._rest = b""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "homebody.studies.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=_environment(threads),
            process_group=0,  # Ctrl-C reaches us alone, and we end them
        )
        assert self.process.stdin
        assert self.process.stdout
        self.input, self.output = self.process.stdin, self.process.stdout

    def send(self, task: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: `read` will report it
            self.input.write(json.dumps(task).encode() + b"\n")
            self.input.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """The complete lines received so far, or None after the worker has ended."""
        received = os.read(self.output.fileno(), 1 << 16)
        if not received:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> str:
        """Wait for its end, and say how it ended."""
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        self.output.close()
        code = self.process.wait()
        self._complaints.seek(0)
        said = self._complaints.read().decode(errors="replace").strip().splitlines()
        self._complaints.close()
        if code < 0:
            return f"by signal {signal.Signals(-code).name}"
        return f"with code {code}" + (f": {said[-1][-200:]}" if said else "")


def _environment(threads: int) -> dict[str, str]:
    """A worker imports what this process would import, and shares the processors with the others."""
    given = os.environ
    limits = {}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        limits[name] = str(min(threads, int(given[name])) if given.get(name, "").isdigit() else threads)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    return {**given, **limits, "POLARS_MAX_THREADS": str(threads), "PYTHONPATH": path}


def main() -> None:
    """A worker process: run cells until the input ends."""
    _die_with_parent()
    # What a method prints goes to the error stream; lines for the parent have a way of their own.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    stopping = threading.Event()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, tasks, stopping), daemon=True).start()
    while True:
        task = tasks.get()
        stopping.clear()  # meant for the task before, which was done already
        _work(task, out, stopping)


def _die_with_parent() -> None:
    """Ask Linux to kill this process with its parent, even within compiled code; elsewhere the input's end does it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _listen(source: BinaryIO, tasks: queue.SimpleQueue[dict[str, Any]], stopping: threading.Event) -> None:
    for line in source:
        message = json.loads(line)
        if "stop" in message:
            stopping.set()
        else:
            tasks.put(message)
    os._exit(0)  # whoever gave the tasks is gone, and a cell can be left at any moment


def _work(task: dict[str, Any], out: BinaryIO, stopping: threading.Event) -> None:
    from homebody.errors import Diverged, HomebodyError
    from homebody.methods import trust
    from homebody.recipe import Recipe
    from homebody.run import Watcher
    from homebody.studies.cells import Stopped, run_cell

    planned, sent_at = 0, 0.0
    measured: dict[int, float] = {}

    def tell(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    def start(rounds: int) -> None:
        nonlocal planned
        planned = rounds
        tell({"planned": planned, "done": 0})

    def looked(done: int, steps: int) -> None:
        nonlocal sent_at
        if time.monotonic() - sent_at > REPORT_SECONDS or done == steps:
            sent_at = time.monotonic()
            tell({"planned": steps, "done": done, "measured": list(measured.items())})
            measured.clear()

    def on_round(line: Round) -> None:
        if select in line.metrics:
            measured[line.step] = line.metrics[select]
        looked(line.step, planned)
        if stopping.is_set():
            raise Stopped

    watcher = Watcher(say=lambda text: tell({"say": text}), start=start, on_round=on_round, looked=looked)
    try:
        recipe = Recipe.from_toml(task["recipe"])
        if task["code"]:
            trust(recipe.method, task["code"])
        select = recipe.selects()
        result = run_cell(recipe, Path(task["path"]), watcher, keep_state=task["keep_state"], probes=task["probes"])
    except Stopped:
        tell({"stopped": True})
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

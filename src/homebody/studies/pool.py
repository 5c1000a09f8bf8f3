"""Cells in processes of their own: started here, told what to do in lines of JSON, replaced when they die.

A worker reads tasks from its input. Once this process is gone, killed or not, that input ends, and the worker
with it. A worker may be killed at any moment, since a cell goes on from its checkpoint: that is how Ctrl-C
stops them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Pool", "cores"]

ATTEMPTS = 2
"""How often a cell is begun whose worker dies."""
LOOK_SECONDS = 1.0
"""Between looks for Ctrl-C: one that comes just before a wait does not end it."""


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool:
    """Workers for as long as the block lasts; none of them outlives it."""

    def __init__(self, jobs: int, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        self.jobs, self.tasks = jobs, tasks
        self._todo = list(tasks)[::-1]
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

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the workers tell of each task, until every one has a result or an error."""
        while self._todo or any(worker.task for worker in self._workers):
            self._employ()
            for key, _ in self._selector.select(LOOK_SECONDS):
                worker: _Worker = key.data
                told = worker.read()
                if told is None:
                    yield from self._bury(worker)
                    continue
                for message in told:
                    task = worker.task
                    if "crash" in message:
                        raise RuntimeError(f"{Path(self.tasks[task]['path']).name} failed:\n{message['crash']}")
                    if "result" in message or "error" in message:
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
        worker.task = self._todo.pop()
        self._attempts[worker.task] += 1
        worker.send(self.tasks[worker.task])

    def _bury(self, worker: _Worker) -> Iterator[tuple[str, dict[str, Any]]]:
        """A worker died: its task gets another, or an end."""
        self._selector.unregister(worker.output)
        self._workers.remove(worker)
        how = worker.close()
        task = worker.task
        if not task:
            return
        if self._attempts[task] < ATTEMPTS:
            self._todo.append(task)
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
    """A process, its way in and its way out."""

    def __init__(self, threads: int) -> None:
        self.task = ""
        self._rest = b""
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "homebody.studies.worker"],
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
        with contextlib.suppress(BrokenPipeError):  # its output has ended too, which says so
            self.input.write(json.dumps(task).encode() + b"\n")
            self.input.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """The whole lines there are; None when it has ended."""
        found = os.read(self.output.fileno(), 1 << 16)
        if not found:
            return None
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> str:
        """Wait for its end; how it came."""
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
    own = os.environ
    limits = {}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        limits[name] = str(min(threads, int(own[name])) if own.get(name, "").isdigit() else threads)
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    return {**own, **limits, "POLARS_MAX_THREADS": str(threads), "PYTHONPATH": path}

"""Logs of our processes, one JSON object a line on standard error; counts; and how a process ends with its parent.

A log holds no item, name, address, key or secret.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Lines", "Trouble", "counts", "follow_parent", "log", "samples"]


def log(event: str, **facts: Any) -> None:
    """Log an event in one write, so that lines of two processes do not mix."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **facts})
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class Trouble:
    """Logs a failure once when it begins, and once when it is over."""

    def __init__(self, begins: str, over: str, **facts: Any) -> None:
        self._begins, self._over, self._facts = begins, over, facts
        self._why, self._lock = "", threading.Lock()

    def say(self, why: str) -> None:
        """Why it fails now; empty where it works."""
        with self._lock:
            before, self._why = self._why, why
        if why and why != before:
            log(self._begins, **self._facts, why=why)
        elif before and not why:
            log(self._over, **self._facts)


class Lines(logging.Handler):
    """The log of libraries in the same form: the first line of a message, and the type of an exception only, since the
    rest could name a person."""

    def emit(self, record: logging.LogRecord) -> None:
        facts = {"level": record.levelname.lower()}
        if record.exc_info and record.exc_info[0] is not None:
            facts["error"] = record.exc_info[0].__name__
        log((record.getMessage().splitlines() or [""])[0][:200], **facts)


def samples(name: str, kind: str, helped: str, values: Mapping[str, float | str]) -> list[str]:
    """A figure as Prometheus reads it, by its labels."""
    lines = [f"homebody_{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP homebody_{name} {helped}", f"# TYPE homebody_{name} {kind}", *lines]


def counts(counters: Mapping[str, int], prefix: str, helped: Callable[[str], str]) -> list[str]:
    """Counters as Prometheus reads them. What follows ": " in a name is the reason, which becomes a label."""
    counted: dict[str, dict[str, float | str]] = {}
    for name, amount in counters.items():
        what, _, reason = name.partition(": ")
        labels = f'{{reason="{quoted(reason)}"}}' if reason else ""
        counted.setdefault(what.replace(" ", "_"), {})[labels] = amount
    lines: list[str] = []
    for what, values in counted.items():
        lines += samples(f"{prefix}{what}_total", "counter", helped(what), values)
    return lines


def quoted(text: str) -> str:
    """The value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def follow_parent(end: Callable[[], object]) -> None:
    """Call `end` when standard input ends, which means that the parent process has ended."""

    def follow() -> None:
        while os.read(0, 4096):
            pass
        end()

    threading.Thread(target=follow, daemon=True).start()

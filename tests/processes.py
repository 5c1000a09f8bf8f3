"""What tests that start processes share: a free port, and patience.

A test waits for a condition, never for seconds. `PATIENCE` bounds a wait whose condition never comes true; it is far
longer than any wait takes on a machine that is ten times too busy.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600.0
COMMAND = (sys.executable, "-P", "-c", "from homebody.cli import main; main()")
"""`homebody`, as a process of its own."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def wait_until(done: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not done():
        assert time.monotonic() < until, f"Waited {patience:g} s until {what}."
        time.sleep(0.02)

"""Structured logs: one JSON object a line on standard error; never an item, a name, a key or a secret."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

__all__ = ["log"]


def log(event: str, **facts: Any) -> None:
    """Say what happened, at once and in one write, so that lines of two processes do not mix."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **facts})
    sys.stderr.write(line + "\n")
    sys.stderr.flush()

"""Structured logs: one JSON object a line on standard error; never an item, a name, a key or a secret."""

from __future__ import annotations

from homebody.runtime.logs import log

__all__ = ["log"]

"""Recommendations from a catalogue that is too large for a device: what a service gives, and how a device uses it.

docs/serving.md says how to run one. `Client` is what a program asks a service by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homebody.serving.client import Client as Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """The client is imported when it is first used: torch is slow to load, and `--help` does not need it."""
    if name != "Client":
        raise AttributeError(f"module 'homebody.serving' has no attribute '{name}'")
    from homebody.serving.client import Client

    return Client

"""Who computes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homebody.runtime.clients import usable_device
    from homebody.runtime.simulator import Simulator

__all__ = ["Simulator", "usable_device"]


def __getattr__(name: str) -> Any:
    """Imported when first used: the processes that carry messages come by here too, and need no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'homebody.runtime' has no attribute '{name}'")
    return getattr(
        import_module("homebody.runtime.simulator" if name == "Simulator" else "homebody.runtime.clients"), name
    )

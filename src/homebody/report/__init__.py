"""What is kept of a run, and how it is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homebody.report.record import RunFolder, jsonable

__all__ = ["RunFolder", "jsonable"]


def __getattr__(name: str) -> Any:
    """Opening a run needs torch, which a list of runs need not wait for."""
    if name in __all__:
        from homebody.report import record

        return getattr(record, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

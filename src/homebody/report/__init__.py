"""What is kept of a run, and how it is shown."""

from homebody.report.record import RunFolder, jsonable

__all__ = ["RunFolder", "jsonable"]

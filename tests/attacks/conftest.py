"""What campaigns share: how long they are, and the table of what they did.

A campaign states its full size. The environment variable HOMEBODY_ATTACKS multiplies it: 0.01 runs a hundredth of
every campaign. Each campaign records what it did with `campaign.did`; the session ends with one Markdown table of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

FACTOR = float(os.environ.get("HOMEBODY_ATTACKS", "1"))


class Campaign:
    """How much of a campaign is to be done, and what was done."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record
        self._began = time.monotonic()

    def size(self, full: int, *, least: int = 1) -> int:
        """How many of `full` attempts to make."""
        return max(least, round(full * FACTOR))

    def did(self, what: str, count: int, **outcomes: int) -> None:
        """Record `count` attempts of a kind, and how many of them ended how."""
        seconds = time.monotonic() - self._began
        self._began = time.monotonic()
        self._record("campaign", {"what": what, "count": count, "seconds": seconds, "outcomes": outcomes})


@pytest.fixture
def campaign(record_property: Callable[[str, object], None]) -> Campaign:
    """A campaign whose rows are in the table at the end of the session."""
    return Campaign(record_property)


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a campaign that syncs a million times would measure the disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="hb-", dir=memory) as folder:
        yield Path(folder)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table. Rows travel in the tests' reports, so that workers of pytest-xdist are heard too."""
    lines = []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            lines += [_line(row, outcome) for name, row in report.user_properties if name == "campaign"]
    if lines:
        terminalreporter.section(f"campaigns, {time.strftime('%Y-%m-%d', time.gmtime())}, factor {FACTOR:g}")
        terminalreporter.write_line("| campaign | attempts | outcomes | minutes | defects |")
        terminalreporter.write_line("|---|---|---|---|---|")
        for line in lines:
            terminalreporter.write_line(line)


def _line(row: dict[str, Any], outcome: str) -> str:
    ended = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in row["outcomes"].items())
    verdict = "none" if outcome == "passed" else "see above"
    return f"| {row['what']} | {row['count']:,} | {ended} | {row['seconds'] / 60:.1f} | {verdict} |"

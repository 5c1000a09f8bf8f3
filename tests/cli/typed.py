"""A command of `homebody`, as somebody types it."""

from __future__ import annotations

import sys

import pytest

from homebody.cli import main


def typed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *arguments: object,
    code: int = 0,
    columns: int = 80,
) -> tuple[str, str]:
    """Run it in this process, and check how it ends; what it printed, and what it printed as errors."""
    monkeypatch.setattr(sys, "argv", ["homebody", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", str(columns))
    try:
        main()
        ended = 0
    except SystemExit as end:
        ended = int(end.code or 0)
    done = capsys.readouterr()
    assert ended == code, done.err
    return done.out, done.err

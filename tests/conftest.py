"""What several tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of published datasets; tests that need it are skipped where there is none."""
    folder = Path(os.environ.get("HOMEBODY_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (folder / "ml-100k" / "u.data").exists():
        pytest.skip("no published data: HOMEBODY_DATA names no folder that holds ml-100k/u.data")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing was ever fetched; gives the folder datasets would land in."""
    monkeypatch.delenv("HOMEBODY_DATA", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "homebody" / "data"

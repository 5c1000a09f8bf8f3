from __future__ import annotations

from functools import lru_cache

import pytest

from homebody.federation.secure_sum import signatures


@pytest.fixture(autouse=True)
def _check_each_signature_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parties check the same signatures, and here they are one process: the answer is the same, and cheaper."""
    monkeypatch.setattr(signatures, "_holds", lru_cache(maxsize=None)(signatures._holds))

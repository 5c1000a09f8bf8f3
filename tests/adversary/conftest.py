"""A small population for attacks."""

from __future__ import annotations

import pytest

from homebody.simulation import Simulator
from homebody.testing import population


@pytest.fixture
def simulator() -> Simulator:
    """300 people and 120 items, with something held out."""
    return Simulator(population())

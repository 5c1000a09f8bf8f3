"""README.md, copied and pasted: its commands work on the data that it uses itself."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from tests.pages import Section
from tests.warm import Nest

pytestmark = pytest.mark.processes


def pasted(heading: str, folder: Path, data: Path, warm: Nest, ports: tuple[int, ...] = ()) -> list[str]:
    return Section("../README.md", heading).paste(folder, data, warm, ports=ports)


def test_your_own_data(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    trained, looked_at = pasted("Your own data", tmp_path, real_data, warm)
    assert "1,682" in trained
    assert "fedials on ratings.csv, test" in trained
    assert "For 196" in looked_at
    assert "For somebody with 3 items" in looked_at
    assert pl.read_parquet(tmp_path / "recommendations.parquet").height == 943 * 20


def test_epsilon(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    trained, shown = pasted("What ε = ∞ means", tmp_path, real_data, warm)
    assert "clients 8, public 8; δ = 1e-05" in trained
    assert "below popularity" not in trained
    assert "2.446" in shown
    assert "whose items are whose?" in shown


def test_devices(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    (shown,) = pasted("On real devices", tmp_path, real_data, warm, ports=(9092, 9464))
    assert "pfedrec on devices, test" in shown
    assert "6 releases charged" in shown


def test_reports(real_data: Path, tmp_path: Path, warm: Nest) -> None:
    (shown,) = pasted("One bit at a time, through a proxy", tmp_path, real_data, warm)
    assert "fmf-ldp on ml-100k, test" in shown

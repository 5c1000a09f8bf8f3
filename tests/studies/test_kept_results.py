"""The committed pages of papers: each is what its kept figures give, so that none can be edited by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homebody.report.markdown import CURVES, PICTURE, reproduction_markdown
from homebody.report.reproduction import curves, picture

PAPERS = sorted((Path(__file__).parents[2] / "experiments").glob("*/results.json"))


@pytest.mark.parametrize("kept", PAPERS, ids=lambda path: path.parent.name)
def test_the_page_is_made_from_the_kept_figures(kept: Path) -> None:
    result = json.loads(kept.read_text(encoding="utf-8"))
    assert (kept.parent / "RESULTS.md").read_text(encoding="utf-8") == reproduction_markdown(result)
    for name, drawing in ((PICTURE, picture(result)), (CURVES, curves(result))):
        kept_drawing = kept.parent / name
        assert (kept_drawing.read_text(encoding="utf-8") if kept_drawing.exists() else None) == drawing
    for line in (kept.parent / "RESULTS.md").read_text(encoding="utf-8").splitlines():
        assert not (line.startswith("| ") and " / 0." in line), "one figure a cell"


def test_every_paper_has_kept_figures() -> None:
    recipes = (Path(__file__).parents[2] / "experiments").glob("*/recipe.toml")
    assert [path.parent.name for path in PAPERS] == sorted(path.parent.name for path in recipes)

"""The committed pages of papers: each is what its kept figures give, so that none can be edited by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homebody.report.markdown import PICTURE, reproduction_markdown
from homebody.report.reproduction import picture

PAPERS = sorted((Path(__file__).parents[2] / "experiments").glob("*/results.json"))


@pytest.mark.parametrize("kept", PAPERS, ids=lambda path: path.parent.name)
def test_the_page_is_made_from_the_kept_figures(kept: Path) -> None:
    result = json.loads(kept.read_text(encoding="utf-8"))
    assert (kept.parent / "RESULTS.md").read_text(encoding="utf-8") == reproduction_markdown(result)
    assert (kept.parent / PICTURE).read_text(encoding="utf-8") == picture(result)
    for line in (kept.parent / "RESULTS.md").read_text(encoding="utf-8").splitlines():
        assert not (line.startswith("| ") and " / 0." in line), "one figure a cell"


def test_every_paper_has_kept_figures() -> None:
    recipes = (Path(__file__).parents[2] / "experiments").glob("*/recipe.toml")
    assert [path.parent.name for path in PAPERS] == sorted(path.parent.name for path in recipes)

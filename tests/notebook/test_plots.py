"""Charts of a training: well-formed SVG that says what it shows."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import polars as pl
import pytest

import homebody as hb
from homebody.notebook.plots import Plot, history_plot


def history(**columns: list[float | None]) -> pl.DataFrame:
    count = len(next(iter(columns.values())))
    return pl.DataFrame({"step": range(1, count + 1), "loss": [None] * count, **columns}, strict=False)


class TestHistory:
    def test_curves_of_metrics_and_of_epsilon(self) -> None:
        rounds = history(
            **{
                "epsilon/server": [math.inf] * 3,
                "epsilon/clients": [1.0, 2.0, 3.0],
                "epsilon/public": [1.0, 2.0, 3.0],
                "valid/ndcg@10": [0.1, 0.3, 0.2],
                "valid/hr@10": [0.2, 0.5, 0.4],
                "ndcg@10": [0.1, 0.3, 0.2],
            }
        )
        svg = history_plot("a run", rounds, 2).svg
        root = ElementTree.fromstring(svg)
        assert sum(element.tag.endswith("polyline") for element in root.iter()) == 3
        assert svg.count('class="mark"') == 2
        assert "clients, public" in svg
        assert "∞ for server" in svg
        assert "on validation: NDCG@10 0.2000, HR@10 0.4000" in root.attrib["aria-label"]

    def test_an_unbounded_epsilon_is_said_and_takes_no_room(self) -> None:
        svg = history_plot("a run", history(**{"epsilon/server": [math.inf] * 2, "hr@10": [0.1, 0.2]}), 2).svg
        assert "a run: ε is ∞ for server" in svg
        assert svg.count("<polyline") == 1

    def test_one_round_is_a_point_and_none_measured_is_said(self) -> None:
        assert "<circle" in history_plot("a run", history(**{"hr@10": [0.25]}), 1).svg
        assert "not measured" in history_plot("a run", history(**{"epsilon/server": [1.0]}), 1).svg

    def test_gaps_and_names(self) -> None:
        rounds = history(**{"valid/hr@10": [0.1, None, 0.3], "full/hr@10": [0.1, None, 0.2]})
        svg = history_plot("<b>", rounds, 3, ("full/hr@10",)).svg
        assert svg.count("<polyline") == 1
        assert "full HR@10" in svg
        assert "<b>" not in svg
        with pytest.raises(hb.HomebodyError, match="There is no metric 'hr@11' here; did you mean full/hr@10"):
            history_plot("x", rounds, 3, ("hr@11",))


class TestPlot:
    def test_it_shows_itself_and_can_be_saved(self, tmp_path: Path) -> None:
        model = hb.fit("fedials", "synthetic:users=60,items=40,mean=8", rounds=3, quiet=True)
        plot = model.plot()
        assert plot._repr_svg_().startswith("<svg")
        assert plot._repr_html_().startswith('<img alt="')
        saved = plot.save(tmp_path / "charts" / "curves.svg")
        assert saved.read_text() == plot.svg
        assert len(repr(plot)) < 80

    def test_another_format_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(hb.HomebodyError, match=r"ends in \.svg, not curves\.png"):
            Plot("<svg/>").save(tmp_path / "curves.png")
        assert list(tmp_path.iterdir()) == []

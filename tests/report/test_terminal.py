"""What `homebody run` prints of a result: references beside the figures, and what ε means."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from homebody.report.terminal import comparison_table, print_result

RESULT: dict[str, Any] = {
    "method": "fedmf",
    "data": "toy",
    "split": "leave-one-out",
    "meaning": "what it means",
    "metrics": {"hr@5": 0.25, "hr@10": 0.5, "ndcg@5": 0.125, "ndcg@10": 0.375, "full/hr@10": 0.0625},
    "epsilon": {"server": "inf", "clients": 2.0, "public": 2.0},
    "epsilon_delta": 1e-5,
    "rounds": 3,
    "planned_rounds": 3,
    "default_rounds": 100,
    "chosen_round": 2,
    "seconds": 1.0,
    "seconds_per_round": 0.1,
    "peak_rss_mb": 100.0,
    "bytes_up": 10,
    "bytes_down": 20,
    "notes": [],
    "run": "runs/toy",
    "references": {
        "popularity": {"hr@5": 0.3, "hr@10": 0.4444, "ndcg@10": 0.2222, "full/hr@10": 0.0333},
        "chance": {"hr@5": 0.05, "hr@10": 0.1111, "ndcg@10": 0.0555, "full/hr@10": 0.0111},
    },
}


def printed(result: dict[str, Any], width: int = 80, terminal: bool = False) -> str:
    out = io.StringIO()
    print_result(result, Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return out.getvalue()


def line(text: str, start: str) -> list[str]:
    return next(line for line in text.splitlines() if line.strip().startswith(start)).split()


def test_references_stand_beside_the_figures() -> None:
    text = printed(RESULT)
    assert line(text, "HR, sampled")[2:] == ["0.2500", "0.5000", "0.4444", "0.1111"]
    assert line(text, "HR, full")[3:] == ["0.0625", "0.0333", "0.0111"]
    assert "references, on the same questions: popularity and chance" in text
    assert "Fewer rounds than by default: fedmf 3 of 100." in text


def test_a_reference_does_not_stand_beside_itself() -> None:
    text = printed({**RESULT, "method": "popularity"})
    assert line(text, "HR, sampled")[2:] == ["0.2500", "0.5000", "0.1111"]
    assert "references, on the same questions: chance" in text


def test_a_record_of_an_earlier_version_is_printed() -> None:
    old = {name: value for name, value in RESULT.items() if name not in ("references", "planned_rounds")}
    text = printed(old)
    assert line(text, "HR, sampled")[2:] == ["0.2500", "0.5000"]
    assert "reference" not in text


def test_each_epsilon_is_put_in_words_once() -> None:
    text = printed(RESULT)
    assert "against server: ε = ∞: nothing bounds" in text
    assert (
        "against clients, public: ε = 2: an observer's odds about one person move by a factor of at most 7.39" in text
    )
    assert text.count("no attack finds more than 7.39 %") == 1
    assert "not covered by ε: observers that pool" in text
    assert "not covered" not in printed({**RESULT, "epsilon": {"server": "inf"}})
    assert "odds" not in printed({**RESULT, "epsilon": {"server": 0.0}})


@pytest.mark.parametrize("width", [30, 50, 80])
def test_nothing_is_cut_on_a_narrow_terminal(width: int) -> None:
    text = printed(RESULT, width, terminal=True)
    for figure in ("0.2500", "0.5000", "0.4444", "0.1111", "0.0333", "0.0111"):
        assert figure in text
    assert "…" not in text


def test_a_wide_comparison_keeps_its_last_columns_at_80() -> None:
    """Updates of a million numbers, and hours: the figures that once were cut off."""
    metrics = {name: {"mean": 0.5, "sd": 0.01} for name in ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10")}
    row = {
        "name": "a-method-of-mine",
        "metrics": metrics,
        "p_against_best": 0.00001,
        "epsilon": {"server": 4512.3, "public": 4512.3},
        "bytes_up": 123_456_789,
        "bytes_down": 987_654_321,
        "seconds": 12345.6,
    }
    comparison = {"data": "toy", "protocol": "strict", "seeds": [0, 1], "methods": [row, {**row, "name": "other"}]}
    for terminal in (True, False):
        out = io.StringIO()
        comparison_table(comparison, Console(file=out, width=80, force_terminal=terminal, color_system=None))
        text = out.getvalue()
        for figure in ("123,456.8", "987,654.3", "12345.6", "4,512", "0.5000", "a-method-of-mine", "other"):
            assert figure in text, (terminal, figure)
        assert terminal is False or (max(map(len, text.splitlines())) <= 80 and " ε server " in text)

"""What people see on a terminal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homebody.errors import HomebodyError
from homebody.privacy import OBSERVERS, Charge, Ledger, NonPrivate
from homebody.progress import Round
from homebody.report import RunFolder
from homebody.report.terminal import print_comparison, print_result, print_run
from homebody.report.words import epsilon

RESULT: dict[str, Any] = {
    "method": "fedmf",
    "data": "toy[1]",
    "protocol": "strict",
    "meaning": "protocol strict: what it means",
    "seed": 0,
    "rounds": 3,
    "chosen_round": 2,
    "metrics": {"hr@5": 0.25, "ndcg@5": 0.125, "hr@10": 0.5, "ndcg@10": 0.3333333, "full/hr@10": 0.0625},
    "epsilon": {"server": "inf", "clients": 1.25, "public": 0.0},
    "bytes_up": 1_234_567,
    "bytes_down": 64,
    "seconds": 12.34,
    "seconds_per_round": 0.5,
    "peak_rss_mb": 512.0,
    "notes": ["3 of 9 users [sic] have too few"],
    "run": "runs/a-very-long-name-" + "x" * 120,
}


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=110, force_terminal=False)


def test_a_result(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(RESULT, console)
    text = console.export_text()
    for part in ("fedmf on toy[1], test", "0.2500", "0.3333", "0.0625", "server ∞, clients 1.25, public 0"):
        assert part in text
    assert "rounds 3, chosen 2; 12.3 s, 0.500 s a training round; 512 MB" in text
    assert "1,234.6 KB up, 0.1 KB down" in text
    assert "protocol strict: what it means" in text
    assert "3 of 9 users [sic] have too few" in text
    assert f"record: {RESULT['run']}" in text  # on one line, to be copied


def test_compilation_is_shown_apart_from_training(console: Console) -> None:
    print_result({**RESULT, "compile_seconds": 7.25}, console)
    assert "12.3 s, 0.500 s a training round, 7.2 s more to compile; 512 MB" in console.export_text()
    print_result({**RESULT, "compile_seconds": 0.0}, console)
    assert "compile" not in console.export_text()


def test_every_metric_of_everyone_and_of_some(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"{name}@{k}" for name in ("hr", "ndcg", "precision", "recall", "mrr") for k in (5, 10)]
    several = {f"{p}{n}": 0.1 + i / 1000 for p in ("", "full/", "20-30/") for i, n in enumerate([*names, "auc"])}
    print_result({**RESULT, "metrics": several}, console)
    text = console.export_text()
    for row in ("Precision, sampled ", "Recall, full catalogue ", "MRR, sampled, users of 20-30 "):
        assert row in text
    assert "HR, full catalogue, users of 20-30" not in text
    assert "AUC 0.1100 sampled, 0.1100 full catalogue" in text
    print_result(
        {**RESULT, "metrics": {**several, "recall@5": several["hr@5"], "recall@10": several["hr@10"]}}, console
    )
    assert "Recall, sampled " not in console.export_text()


@pytest.mark.parametrize(("count", "told"), [(1, "2.5 × 1 report × 3 rounds = 7.5"), (4, "2.5 × 4 reports × 3 rounds")])
def test_what_reports_add_up_to(console: Console, count: int, told: str) -> None:
    reports = {"count": count, "epsilon": 2.5, "round": 2.5 * count, "total": 7.5 * count}
    print_result({**RESULT, "reports": reports}, console)
    assert f"ε of reports, by addition: {told}" in console.export_text()


def test_a_result_that_was_not_measured_has_no_table(console: Console) -> None:
    print_result({**RESULT, "metrics": {}}, console)
    text = console.export_text()
    assert text.startswith("fedmf on toy[1]: not measured")
    assert "protocol strict" not in text
    assert "rounds 3" in text


def test_errors_that_are_no_numbers_are_said(console: Console) -> None:
    print_result({**RESULT, "metrics": {**RESULT["metrics"], "rmse": "nan", "mae": "nan"}}, console)
    text = console.export_text()
    assert "RMSE nan, MAE nan on held-out ratings" in text
    assert "smaller learning_rate" in text


def test_a_comparison(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "method": "fedmf",
        "metrics": {name: {"mean": 0.5, "sd": 0.0123} for name in ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10")},
        "epsilon": {"server": "inf", "public": 2.0},
        "bytes_up": 1000,
        "bytes_down": 2000,
        "rounds": 3,
        "seconds": 1.0,
        "runs": ["runs/one", "runs/two"],
        "p_against_best": None,
    }
    single = {name: {"mean": 0.25, "sd": None} for name in row["metrics"]}
    comparison = {
        "data": "toy",
        "protocol": "strict",
        "meaning": "protocol strict: what it means",
        "notes": [],
        "seeds": [0, 1],
        "test": "paired",
        "best": "fedmf",
        "methods": [
            row,
            {**row, "method": "ials", "metrics": single, "p_against_best": 0.0001},
            {**row, "method": "popularity", "p_against_best": 0.04},
        ],
    }
    wide = Console(record=True, width=200, force_terminal=False)
    print_comparison(comparison, wide)
    text = wide.export_text()
    assert "which took" not in text
    assert "toy, protocol strict, 2 seeds" in text
    assert "0.5000  0.5000" in text
    assert "±0.012  ±0.012" in text
    lines = {line.split()[0]: line for line in text.splitlines() if "∞" in line and "max" not in line}
    assert "best" in lines["fedmf"]
    assert re.search(r"∞ +2\b", lines["fedmf"])
    assert "<.001" in lines["ials"]
    assert "±" not in lines["ials"]
    assert "0.040" in lines["popularity"]
    assert "protocol strict: what it means" in text
    assert "runs/two" in text
    print_comparison({**comparison, "methods": [{**row, "compile_seconds": 20.0}, {**row, "method": "ials"}]}, wide)
    assert "time: without compilation, which took fedmf 20.0 s" in wide.export_text()


def folder_with(tmp_path: Path, rounds: int) -> RunFolder:
    folder = RunFolder.create(tmp_path, "fedmf")
    folder.write_text("recipe.toml", 'schema = 1\nmethod = "fedmf"\ndata = "toy"\nseed = 4\n[fields]\nfactors = 8\n')
    ledger = Ledger(folder.ledger_path)
    for number in range(1, rounds + 1):
        ledger.charge(f"train/{number}", [Charge(who, "user", NonPrivate("plain updates")) for who in OBSERVERS])
        metrics = {"valid/ndcg@10": number / 10, "ndcg@10": 0.2}
        folder.add_round(
            Round("train", number, number, 3, 1 / number, metrics, {"server": float("inf")}, 1, 2, 0.5, 0.25)
        )
    ledger.close()
    return folder


def test_a_run_that_is_not_complete(tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(folder_with(tmp_path, 3), console)
    text = console.export_text()
    assert "method=fedmf data=toy seed=4 fields={'factors': 8}" in text
    assert "0.1000 → 0.3000" in text
    assert "1.0000 → 0.3333" in text
    assert "ledger: 9 charges, chain whole; not private: plain updates" in text
    assert "not complete: 3 rounds are recorded; go on with `homebody run --resume" in text


def test_a_run_that_is_complete(tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, 2)
    folder.write_json("result.json", RESULT)
    print_run(folder, console)
    assert "fedmf on toy[1], test" in console.export_text()


def test_a_recipe_that_cannot_be_read_is_an_error(tmp_path: Path, console: Console) -> None:
    folder = folder_with(tmp_path, 1)
    folder.write_text("recipe.toml", "method = ")
    with pytest.raises(HomebodyError, match="recipe"):
        print_run(folder, console)


@pytest.mark.parametrize(("value", "text"), [("inf", "∞"), (float("inf"), "∞"), (0.0, "0"), (12.345, "12.3")])
def test_epsilon_for_people(value: float | str, text: str) -> None:
    assert epsilon(value) == text

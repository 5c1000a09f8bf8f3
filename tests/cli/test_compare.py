"""`homebody compare`: methods side by side on the same splits."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from homebody.cli import main
from homebody.report import RunFolder

DATA = "synthetic:users=60,items=80,mean=14"
COMMAND = ["compare", "popularity", "fedials", "fedmf", "--data", DATA, "--seeds", "2", "--rounds", "2"]


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    output, errors = capsys.readouterr()
    return output, errors


def test_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output, errors = printed(monkeypatch, capsys, *COMMAND, "--json", "--out", str(tmp_path))
    assert errors == ""
    assert output.count("\n") == 1
    found: dict[str, Any] = json.loads(output)
    assert [row["method"] for row in found["methods"]] == ["popularity", "fedials", "fedmf"]
    assert (found["data"], found["protocol"], found["seeds"]) == (DATA, "strict", [0, 1])
    assert "protocol strict" in found["meaning"]
    assert "ranked against at most 99 sampled negatives" in found["meaning"]
    for row in found["methods"]:
        results = [RunFolder.open(Path(run)).read_json("result.json") for run in row["runs"]]
        assert [result["seed"] for result in results] == [0, 1]
        for name, spread in row["metrics"].items():
            values = [result["metrics"][name] for result in results]
            assert spread == {
                "mean": pytest.approx(statistics.fmean(values)),
                "sd": pytest.approx(statistics.stdev(values)),
            }
        assert row["epsilon"]["server"] == "inf"
    best = max(found["methods"], key=lambda row: row["metrics"]["ndcg@10"]["mean"])
    assert found["best"] == best["method"]
    assert [row["method"] for row in found["methods"] if row["p_against_best"] is None] == [best["method"]]
    assert all(0 < row["p_against_best"] <= 1 for row in found["methods"] if row is not best)


def test_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["popularity", "fedials", "popularity"]  # named twice, run once
    output, _ = printed(
        monkeypatch, capsys, "compare", *names, "--data", DATA, "--seeds", "1", "--rounds", "1", "--out", str(tmp_path)
    )
    assert f"{DATA}, protocol strict, 1 seed" in output
    table = output.partition("protocol strict: ")[0]
    rows = [line.strip() for line in table.splitlines() if "∞" in line]
    assert [row.split()[0] for row in rows] == ["popularity", "fedials"]
    assert all(re.search("∞ +∞", row) for row in rows)
    assert sum("best" in row for row in rows) == 1
    assert "training negatives are any items outside the person's training items" in output
    runs = sorted(str(path) for path in tmp_path.iterdir())
    assert sorted(line.strip() for line in output.partition("records:")[2].splitlines() if line) == runs
    assert len(runs) == 2

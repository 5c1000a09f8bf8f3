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
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import execute

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


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    return errors


def trained(out: Path, method: str = "fedials", **settings: Any) -> str:
    recipe = Recipe(method, DATA, **{"rounds": 1, **settings})
    return str(execute(recipe, out)["run"])


def test_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = [trained(tmp_path, fields={"factors": 4}, seed=seed) for seed in (0, 1)]
    large = [trained(tmp_path, fields={"factors": 8}, seed=seed) for seed in (0, 1)]
    popular = [trained(tmp_path, "popularity", seed=seed) for seed in (0, 1)]
    before = sorted(tmp_path.iterdir())
    out = ("--out", str(tmp_path))
    output, _ = printed(monkeypatch, capsys, "compare", *small, *large, *popular, "--json", *out)
    found = json.loads(output)
    assert [row["name"] for row in found["methods"]] == ["fedials factors=4", "fedials factors=8", "popularity"]
    assert [row["runs"] for row in found["methods"]] == [small, large, popular]
    assert [row["p_against_best"] is None for row in found["methods"]].count(True) == 1
    means = [json.loads((Path(run) / "result.json").read_text())["metrics"]["ndcg@10"] for run in small]
    assert found["methods"][0]["metrics"]["ndcg@10"]["mean"] == pytest.approx(statistics.fmean(means))
    assert sorted(tmp_path.iterdir()) == before, "Nothing is trained."

    # Rows of other seeds asked their users something else.
    output, _ = printed(monkeypatch, capsys, "compare", small[0], large[1], *out)
    assert "p: none, because the seeds of the rows differ" in output
    assert "fedials factors=8" in output
    named = Path(small[0]).name
    output, _ = printed(monkeypatch, capsys, "compare", named, "latest", "--json", *out)
    assert [row["runs"][0] for row in json.loads(output)["methods"]] == [str(tmp_path / named), popular[1]]


def test_runs_that_do_not_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strict, published = trained(tmp_path), trained(tmp_path, protocol="published")
    first = trained(tmp_path, held_out="random")
    ratio = trained(tmp_path, split="ratio:test=0.2")

    def said(*arguments: str) -> str:
        return refused(monkeypatch, capsys, "compare", *arguments)

    assert f"protocol is strict in {strict} and published in {published}" in said(strict, published)
    assert f"split is leave-one-out in {first} and ratio:test=0.2 in {ratio}" in said(first, ratio)
    assert "is a run's folder, and fedmf is none" in said(strict, "fedmf")
    assert "leave out --rounds" in said(strict, ratio, "--rounds", "3")
    assert "one run to compare" in said(strict, strict)
    environment = Path(strict) / "environment.json"
    other = trained(tmp_path, fields={"factors": 4})
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "data_fingerprint": "other"}))
    assert "The data changed between" in said(strict, other)

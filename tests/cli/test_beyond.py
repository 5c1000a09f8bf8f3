"""`--beyond` of run, compare and show: a second table on request, and one line without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homebody.cli import main
from homebody.report.beyond import FIGURES, beyond_means, figures_of

DATA = "synthetic:users=60,items=40,mean=10"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["homebody", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as ended:
            main()
        output, errors = capsys.readouterr()
        assert ended.value.code == 0, errors
        return output

    return run


def test_a_run_shows_it_on_request(run: Any, tmp_path: Path) -> None:
    short = run("run", "fedials", "--data", DATA, "--rounds", "2", "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    found = json.loads((folder / "result.json").read_text())["beyond"]
    line = f"beyond accuracy, lists of 10: coverage {found['coverage']:.3f}, novelty {found['novelty']:.2f}"
    assert line in short
    assert "Groups of people" not in short
    long = run("show", folder, "--beyond")
    assert "Beyond accuracy, lists of 10" in long
    assert line not in long
    for figure in FIGURES:
        assert figure.heading in long
        assert figure.write(figures_of(found)[figure.key]) in long
    assert "by item vectors" in long
    assert long.index("NDCG, sampled") < long.index("Beyond accuracy") < long.index("Groups of people")
    assert all(f"{one['ndcg@10']:.4f}" in long for one in found["groups"])


def test_methods_stand_side_by_side(run: Any, tmp_path: Path) -> None:
    asked = ("compare", "fedials", "popularity", "--data", DATA, "--rounds", "2", "--seeds", "2", "--out", tmp_path)
    output = run(*asked, "--beyond")
    table = output.partition("Beyond accuracy")[2]
    rows = {line.split()[0]: line for line in table.splitlines() if line.split()[:1] in (["fedials"], ["popularity"])}
    assert set(rows) == {"fedials", "popularity"}
    assert "diversity" not in table  # vectors of one's own do not compare
    assert "coverage: the share of the catalogue that is in anybody's list" in output
    assert "Beyond accuracy" not in run(*asked)
    known = json.loads(run(*asked, "--json"))["methods"][0]["beyond"]
    assert known["coverage"]["sd"] is not None


def test_records_of_older_versions_have_none(run: Any, tmp_path: Path) -> None:
    run("run", "popularity", "--data", DATA, "--out", tmp_path)
    (folder,) = tmp_path.iterdir()
    result = json.loads((folder / "result.json").read_text())
    del result["beyond"]
    (folder / "result.json").write_text(json.dumps(result))
    assert "beyond" not in run("show", folder)
    assert "Nothing beyond accuracy is known" in run("show", folder, "--beyond")
    assert beyond_means([None, {"coverage": 0.5}]) == {}


def test_a_leaderboard_has_a_second_table(run: Any, tmp_path: Path) -> None:
    asked = ("leaderboard", "--data", DATA, "--seeds", "1", "--rounds", "2", "--jobs", "1", "--out", tmp_path)
    run(*asked, "--methods", "fedials,popularity")
    (markdown,) = tmp_path.rglob("LEADERBOARD.md")
    table = markdown.read_text().partition("## Beyond accuracy")[2]
    assert "| method | coverage | novelty |" in table
    assert "| fedials |" in table
    for page in tmp_path.rglob("index.html"):
        assert "<h2>Beyond accuracy</h2>" in page.read_text()

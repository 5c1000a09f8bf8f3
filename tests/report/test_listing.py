"""The runs of a folder: which there are, how far they are, and which one a name stands for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homebody.cli import main
from homebody.errors import HomebodyError
from homebody.report import RunFolder
from homebody.report.listing import kept, listed, named_run, ordered


def run(parent: Path, name: str, begun: int, result: dict[str, Any] | None = None, rounds: int = 0, **of: Any) -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    recipe = {"method": "fedmf", "data": "toy", "seed": 0, **of}
    fields = recipe.pop("fields", {})
    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe.items()]
    lines += ["[fields]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items())]
    (folder / "recipe.toml").write_text("\n".join(lines))
    os.utime(folder / "recipe.toml", (begun, begun))
    (folder / "metrics.jsonl").write_text("{}\n" * rounds)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three runs: the second of them goes on, the others ended."""
    good = {"rounds": 5, "metrics": {"ndcg@10": 0.4}, "epsilon": {"server": "inf", "public": 2.0}, "seconds": 3.0}
    poor = {"rounds": 9, "metrics": {"ndcg@10": 0.1}, "epsilon": {"server": 7.5, "public": 7.5}, "seconds": 1.0}
    runs = tmp_path / "runs"
    run(runs, "good", 300, good, fields={"factors": 8})
    run(runs, "middle", 200, rounds=4, method="/there/own.py:Mine", fields={"factors": 16})
    run(runs, "poor", 100, poor, seed=1, fused=False)
    (runs / "leaderboard").mkdir()
    (runs / "notes.txt").write_text("none")
    return runs


def names(found: Any) -> list[str]:
    return [one["name"] for one in found]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_name_of_a_run_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    name = "fedmf-synthetic_users200_items100_mean12-strict-seed0-20260101-120000"
    run(tmp_path, name, 100, {"rounds": 5, "metrics": {"ndcg@10": 0.4}, "epsilon": {"server": "inf"}, "seconds": 3.0})
    monkeypatch.setattr(sys, "argv", ["homebody", "runs", str(tmp_path)])
    monkeypatch.delenv("COLUMNS", raising=False)
    if terminal:
        monkeypatch.setenv("COLUMNS", "60")
        monkeypatch.setenv("FORCE_COLOR", "1")  # it says that there is a terminal
        monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if name in line]
    if terminal:
        assert line == name
        assert lines[1] == "  rounds 5 · ndcg@10 0.4000 · ε, server ∞ · time s 3.0"
    else:
        assert "0.4000" in line


def test_what_is_there(folder: Path) -> None:
    found = listed(folder)
    assert names(found) == ["poor", "middle", "good"]
    assert [one["state"] for one in found] == ["finished", "not complete", "finished"]
    assert [one["rounds"] for one in found] == [9, 4, 5]
    assert [one["epsilon/server"] for one in found] == [7.5, None, float("inf")]
    assert found[1]["method"] == "Mine"
    assert found[1]["begun"] == "1970-01-01T00:03:20Z"


def test_a_run_that_is_damaged_is_listed(folder: Path) -> None:
    (folder / "good" / "result.json").write_text('{"rounds"')
    (folder / "poor" / "recipe.toml").write_text("method =")
    assert {one["name"]: one["state"] for one in listed(folder)} == {
        "poor": "finished",
        "middle": "not complete",
        "good": "not complete",
    }


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("method=fedmf", ["poor", "good"]),
        ("method!=fedmf", ["middle"]),
        ("factors>=8", ["middle", "good"]),
        ("factors = 16", ["middle"]),
        ("seed=0", ["middle", "good"]),
        ("ndcg@10>0.2", ["good"]),
        ("epsilon/server<8", ["poor"]),
        ("epsilon/server>8", ["good"]),
        ("state=not complete", ["middle"]),
        ("fused=false", ["poor"]),
        ("seed=none", []),
    ],
)
def test_filters(folder: Path, condition: str, expected: list[str]) -> None:
    assert names(kept(listed(folder), [condition])) == expected


def test_several_conditions_hold_together(folder: Path) -> None:
    assert names(kept(listed(folder), ["method=fedmf", "seed=1"])) == ["poor"]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("begun", ["good", "middle", "poor"]),
        ("ndcg@10", ["good", "poor", "middle"]),
        ("epsilon/server", ["poor", "good", "middle"]),
        ("seconds", ["poor", "good", "middle"]),
        ("name", ["good", "middle", "poor"]),
    ],
)
def test_orders(folder: Path, by: str, expected: list[str]) -> None:
    assert names(ordered(listed(folder), by)) == expected


def test_what_there_is_not_is_named(folder: Path) -> None:
    with pytest.raises(HomebodyError, match=r"'ndgc@10'; did you mean 'ndcg@10'"):
        ordered(listed(folder), "ndgc@10")
    with pytest.raises(HomebodyError, match=r"'colour'\. Known: begun"):
        kept(listed(folder), ["colour=red"])
    with pytest.raises(HomebodyError, match=r"--where takes NAME=VALUE.*not 'fedmf'"):
        kept(listed(folder), ["fedmf"])
    with pytest.raises(HomebodyError, match="There is no folder"):
        listed(folder / "nowhere")


def test_the_name_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_run(Path("latest"), folder) == folder / "good"
    assert named_run(Path("poor"), folder) == folder / "poor"
    assert named_run(Path("none"), folder) == Path("none")
    assert named_run(folder / "poor", folder) == folder / "poor"
    monkeypatch.chdir(folder.parent)
    assert named_run(Path("latest")) == Path("runs/good")
    (folder.parent / "latest").mkdir()
    assert named_run(Path("latest")) == Path("latest"), "A folder of that name is meant."
    monkeypatch.chdir(folder)
    assert named_run(Path("latest"), folder / "leaderboard") == Path("latest")
    with pytest.raises(HomebodyError, match="There is no run in runs yet"):
        RunFolder.open(named_run(Path("latest")))


def test_a_list_needs_no_torch(folder: Path) -> None:
    script = (
        "import sys; from homebody.cli import main; sys.argv = ['homebody', 'runs', sys.argv[1]]\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules, 'polars' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
    assert "1 is not complete" in done.stdout

"""`homebody reproduce` and `homebody leaderboard`, as they are typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.processes import COMMAND, PATIENCE
from tests.warm import Nest

from homebody.cli import main
from homebody.cli.progress import watching_cells
from homebody.recipe import Recipe
from homebody.studies.cells import CellProgress
from homebody.studies.reproduce import work

DATA = "synthetic:users=40,items=60,mean=12"
RECIPE = f"""
title = "A tiny paper"
citation = "Nobody, Nowhere 2020"
[[table]]
id = "1"
title = "Two methods"
metrics = ["hr@10", "ndcg@10"]
scale = 100
data = ["{DATA}"]
seeds = 2
rounds = 2
row = [
  {{ name = "Popularity", method = "popularity", published = {{ "{DATA}" = [99, 98] }} }},
  {{ name = "iALS", method = "ials" }},
]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_workers: None) -> Path:
    """A folder of one's own, with a paper in it."""
    folder = tmp_path / "experiments" / "tiny"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capsys.readouterr()
    assert ended.value.code == code, errors
    return output, errors


def test_what_can_be_reproduced(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, _ = typed(monkeypatch, capsys, "reproduce")
    assert "tiny: A tiny paper" in output
    assert "pfedrec: Dual Personalization" in output
    assert "Figure 4" in output
    listed = json.loads(typed(monkeypatch, capsys, "reproduce", "--json")[0])["papers"]
    (tiny,) = (paper for paper in listed if paper["name"] == "tiny")
    assert tiny["tables"] == [{"id": "1", "title": "Two methods", "data": [DATA]}]


def test_a_paper_for_people(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = typed(monkeypatch, capsys, "reproduce", "tiny", "--write")
    assert all(len(line) <= 80 for line in output.splitlines())
    line = next(line for line in output.splitlines() if line.strip().startswith("Popularity"))
    assert re.search(r"HR@10 +99\.00 +\d+\.\d\d ± \d+\.\d\d +\d+\.\d\d ± \d+\.\d\d +▼ −\d+\.\d\d", line)
    assert "page: runs/reproduce/tiny/index.html" in output
    assert "▼ −" in (here / "runs/reproduce/tiny/index.html").read_text(encoding="utf-8")
    written = (here / "experiments/tiny/RESULTS.md").read_text(encoding="utf-8")
    assert written == (here / "runs/reproduce/tiny/RESULTS.md").read_text(encoding="utf-8")
    assert "`homebody reproduce tiny`" in written

    # Once more from the figures that were kept: nothing is run, and nothing changes.
    drawn = (here / "experiments/tiny/results.svg").read_bytes()
    (here / "experiments/tiny/RESULTS.md").unlink()
    (here / "experiments/tiny/results.svg").unlink()
    monkeypatch.setattr("homebody.studies.reproduce.run_cells", None)
    output, _ = typed(monkeypatch, capsys, "reproduce", "tiny", "--rewrite")
    assert output.startswith("page: ")
    assert (here / "experiments/tiny/RESULTS.md").read_text(encoding="utf-8") == written
    assert (here / "experiments/tiny/results.svg").read_bytes() == drawn


def test_nothing_to_rewrite(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["homebody", "reproduce", "tiny", "--rewrite"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "has no results.json" in capsys.readouterr().err
    (here / "experiments/tiny/results.json").write_text('{"schema": 2}')
    with pytest.raises(SystemExit):
        main()
    assert "is not the result of a reproduction" in capsys.readouterr().err


def test_a_paper_as_json(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("reproduce", "experiments/tiny", "--seeds", "1", "--rounds", "1", "--data", DATA, "--json")
    output, errors = typed(monkeypatch, capsys, *words, "--out", "elsewhere")
    assert errors == ""
    result = json.loads(output)
    assert result["folder"] == "elsewhere/reproduce/tiny"
    assert result["invocations"][0]["command"] == f"homebody reproduce tiny --data {DATA} --seeds 1 --rounds 1"
    assert not (here / "experiments/tiny/RESULTS.md").exists()


def test_figures_and_one_protocol_on_the_terminal(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = here / "experiments/tiny/recipe.toml"
    sweep = 'kind = "sweep"\ntitle = "Sizes"\nvary = "fields.factors"\nvalues = [2, 4]\nmetrics = ["hr@10"]\n'
    row = f'data = ["{DATA}"]\nseeds = 1\nrounds = 2\n[[figure.row]]\nname = "FedMF"\nmethod = "fedmf"\n'
    curve = '[[figure]]\nid = "3"\nkind = "convergence"\ntitle = "Rounds"\ntable = "1"\nrows = ["iALS"]\nseeds = 1\n'
    recipe.write_text(f'{RECIPE}[[figure]]\nid = "2"\n{sweep}{row}{curve}', encoding="utf-8")
    words = ("reproduce", "tiny", "--figure", "2", "--protocol", "strict")
    output, _ = typed(monkeypatch, capsys, *words)
    assert all(len(line) <= 80 for line in output.splitlines())
    assert len(re.findall(r"obtained, strict +\d", output)) == 2
    assert "obtained, published" not in output
    output, _ = typed(monkeypatch, capsys, "reproduce", "tiny", "--figure", "3")
    assert re.search(r"iALS +published +HR@10 +\d+\.\d\d +\d+\.\d\d +[12]\b", output)
    assert {path.name.split("-")[0] for path in (here / "runs/cells").glob("*/")} == {"fedmf", "ials"}


def test_a_failed_run_does_not_end_as_if_all_were_well(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = here / "experiments/tiny/recipe.toml"
    recipe.write_text(recipe.read_text().replace(DATA, "missing.csv"), encoding="utf-8")
    _, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--seeds", "1", code=2)
    assert re.search(r"homebody: Table 1, Popularity on missing\.csv failed: .*4 failed in all", errors)
    assert "failed" in (here / "runs/reproduce/tiny/RESULTS.md").read_text(encoding="utf-8")


def test_a_row_that_is_known_to_diverge_fails_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = here / "experiments/tiny/recipe.toml"
    wild = 'name = "wild", method = "fedmf", fields = { learning_rate = 1e30, item_rate = 1e30 }'
    recipe.write_text(RECIPE.replace('name = "iALS", method = "ials"', wild), encoding="utf-8")
    _, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--seeds", "1", code=2)
    assert "wild on" in errors
    recipe.write_text(RECIPE.replace('name = "iALS", method = "ials"', f"{wild}, diverges = true"), encoding="utf-8")
    output, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--seeds", "1")
    assert "diverged" in output
    assert "failed" not in output + errors


def test_without_plotly_a_sentence_says_so(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("homebody.report.pages.importlib.util.find_spec", lambda name: None)
    words = ("reproduce", "tiny", "--seeds", "1", "--rounds", "1")
    output, errors = typed(monkeypatch, capsys, *words)
    assert errors.splitlines()[-1].startswith(
        "note: HTML pages need Plotly: pip install '.[report]' in Homebody's clone."
    )
    assert "page: runs/reproduce/tiny/RESULTS.md" in output


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("reproduce", "tinny"), "There is no paper 'tinny'; did you mean 'tiny'?"),
        (("reproduce", "tiny", "--table", "2"), "There is no table '2'"),
        (("reproduce", "tiny", "--protocol", "loose"), "There is no protocol of this part of the paper 'loose'"),
        (("reproduce", "tiny", "--jobs", "0"), "Jobs must be at least 1, not 0."),
        (("leaderboard", "--data", DATA, "--seeds", "0"), "Seeds must be at least 1, not 0."),
        (("leaderboard", "--data", DATA, "--methods", "fedmf,nobody"), "There is no method 'nobody'"),
        (("leaderboard", "--data", DATA, "--protocol", "loose"), "loose"),
        (("leaderboard", "--data", "nothing.csv"), "nothing.csv"),
    ],
)
def test_bad_words(
    words: tuple[str, ...],
    expected: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, errors = typed(monkeypatch, capsys, *words, code=2)
    assert output == ""
    assert expected in errors
    assert errors.count("\n") == 1
    assert not (here / "runs" / "leaderboard").exists()


def test_a_leaderboard(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("leaderboard", "--data", DATA, "--seeds", "2", "--rounds", "1", "--methods", "popularity, ials,popularity")
    output, _ = typed(monkeypatch, capsys, *words)
    table = output.partition("(c): centralised")[0]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "popularity (c)" in table
    assert "±" in table
    (page,) = (here / "runs" / "leaderboard").glob("synthetic-users-40-items-60-mean-12-strict-*/index.html")
    assert f"page: {page.relative_to(here)}" in output
    output, errors = typed(monkeypatch, capsys, *words, "--json")
    assert errors == ""
    result = json.loads(output)
    assert result["made"]["command"] == (
        f"homebody leaderboard --data {DATA} --rounds 1 --seeds 2 --methods popularity,ials"
    )
    assert [row["kind"] for row in result["methods"]] == ["centralised", "centralised"]


def test_interrupted_by_hand(here: Path, warm: Nest) -> None:
    """Ctrl-C in the middle: exit code 130, a sentence, and the same command goes on."""
    recipe = here / "experiments/tiny/recipe.toml"
    text = recipe.read_text().replace('"ials"', '"fedmf", rounds = 400')
    recipe.write_text(text.replace("mean=12", "mean=12,seed=1"), encoding="utf-8")
    command = [*COMMAND, "reproduce", "tiny", "--seeds", "1"]
    process = warm.popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"}
    )
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if any(file.stat().st_size for file in here.glob("runs/cells/fedmf-*/metrics.jsonl")):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(0.02)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert re.search(r"interrupted\. \d of 4 runs are finished and kept; give the same command again to go on", errors)
    finished = {path.parent.name for path in here.glob("runs/cells/*/result.json")}
    assert any(name.startswith("popularity") for name in finished)
    assert "Not complete" in (here / "runs/reproduce/tiny/RESULTS.md").read_text(encoding="utf-8")
    before = {name: (here / "runs/cells" / name / "result.json").stat().st_mtime_ns for name in finished}
    done = warm.run([*command, "--json"], capture_output=True, text=True, check=True)
    (study,) = json.loads(done.stdout)["studies"]
    ((_, part),) = study["data"].items()
    assert (part["finished"], part["planned"]) == (4, 4)
    assert {name: (here / "runs/cells" / name / "result.json").stat().st_mtime_ns for name in finished} == before


def test_how_much_there_is_to_do_is_said_before_it_is_begun(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrower = "; --table and --figure ask for one part, --data, --protocol and --seeds for less of it."
    _, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--seeds", "1", "--jobs", "1")
    assert errors.splitlines()[0] == f"tiny: 4 runs, 0 of them finished before{narrower}"
    _, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--jobs", "1")
    assert errors.splitlines()[0] == f"tiny: 8 runs, 4 of them finished before{narrower}"
    _, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--jobs", "1")
    assert errors.splitlines()[0] == "tiny: 8 runs, all of them finished before."
    _, errors = typed(monkeypatch, capsys, "reproduce", "tiny", "--table", "1", "--seeds", "3", "--jobs", "1")
    assert errors.splitlines()[0] == "tiny: 12 runs, 8 of them finished before."


def test_a_single_run_is_not_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: Any = SimpleNamespace(recipes=[Recipe("fedmf", DATA)], probes=[()], asked_for="1")
    assert work(planned, tmp_path) == "1 run, not finished before."
    monkeypatch.setattr("homebody.studies.reproduce.count_done", lambda *_: 1)
    assert work(planned, tmp_path) == "1 run, finished before."


def test_the_time_left_is_guessed_from_runs_of_this_command_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six runs, of which two were there before: after one of the other four, in 40 s, three are left."""
    now = [0.0]
    monkeypatch.setattr("homebody.cli.progress.time.monotonic", lambda: now[0])
    recipe = Recipe("fedmf", DATA)
    with watching_cells("tiny", 6) as (watch, _):
        for cell in range(2):
            watch(CellProgress(cell, recipe, done=0, planned=0, finished=cell + 1, result={}))
        now[0] = 10.0
        watch(CellProgress(2, recipe, done=1, planned=2, finished=2))
        now[0] = 40.0
        watch(CellProgress(2, recipe, done=2, planned=2, finished=3, result={}))
        now[0] = 70.0
        watch(CellProgress(3, recipe, done=1, planned=2, finished=3))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tiny: 2 of 6 runs · fedmf synthetic")
    assert lines[1].startswith("tiny: 3 of 6 runs · about 2 min 0 s left · fedmf synthetic")
    assert lines[2].startswith("tiny: 3 of 6 runs · about 2 min 0 s left · fedmf synthetic")  # no more than before

"""`homebody recommend --all`: everybody's list in a file, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

import homebody as hb
from homebody.cli import app, options
from homebody.errors import HomebodyError

SOURCE = "synthetic:users=60,items=40,mean=8"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hb.fit("fedmf", SOURCE, rounds=2, out=tmp_path_factory.mktemp("runs"), quiet=True).path


def recommend(*words: str) -> str:
    return CliRunner().invoke(app, ["recommend", *words], catch_exceptions=False).stdout


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_everybody_s_list_is_written(run: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / "lists" / f"all{ending}"
    told = json.loads(recommend(str(run), "--all", "-k", "4", "--out", str(file), "--json"))
    frame = (pl.read_csv if ending == ".csv" else pl.read_parquet)(file)
    assert (told["people"], told["rows"], told["out"]) == (60, 240, str(file))
    expected = hb.open(run).recommend("all", k=4)
    assert frame.columns == ["user", "rank", "item", "score"]
    assert frame.select("user", "rank", "item").rows() == expected.select("user", "rank", "item").rows()
    assert file.stat().st_mode & 0o077 == 0
    assert "60 lists, 240 rows" in recommend(str(run), "--all", "-k", "4", "--out", str(file))


def test_a_centralised_reference_and_a_saved_model_too(tmp_path: Path) -> None:
    popular = hb.fit("popularity", SOURCE, out=tmp_path / "runs", quiet=True)
    saved = popular.save(tmp_path / "model", data=True)
    for folder in (popular.path, saved):
        recommend(str(folder), "--all", "-k", "1", "--out", str(tmp_path / "lists.csv"))
        assert pl.read_csv(tmp_path / "lists.csv").height == 60


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--all"], "give --all and --out lists.parquet together"),
        (["--out", "lists.parquet"], "give --all and --out lists.parquet together"),
        (["--all", "--out", "lists.txt"], "end the name in .parquet or .csv, not lists.txt"),
        (["--all", "--out", "lists.csv", "--user", "3"], "leave out --user"),
        (["--all", "--out", "lists.csv", "--clicks", "3,4"], "leave out --clicks"),
        (["--all", "--out", "lists.csv", "--now", "weather=sunny"], "weather"),
    ],
)
def test_misuse_gets_a_sentence_and_writes_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HomebodyError, match=sentence):
        CliRunner().invoke(app, ["recommend", str(run), *words], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lists.csv"
    file.write_text("old")

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(HomebodyError, match="No space left"):
        CliRunner().invoke(app, ["recommend", str(run), "--all", "--out", str(file)], catch_exceptions=False)
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["lists.csv"]


def test_names_stand_beside_items_that_have_any(run: Path) -> None:
    assert "name" not in recommend(str(run), "--user", "3").splitlines()[2].split()
    named = options.ranking("For ann", [("1", "Alien", 0.5), ("2", "2", 0.25)])
    with (console := Console(width=80)).capture() as shown:
        console.print(named)
    assert [line.split() for line in shown.get().splitlines()][2:] == [
        ["item", "name", "score"],
        ["─" * len(shown.get().splitlines()[3].strip())],
        ["1", "1", "Alien", "0.500"],
        ["2", "2", "2", "0.250"],
        [],
    ]

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from homebody.cli.data import app
from homebody.data.catalogue import DATASETS
from homebody.errors import HomebodyError

runner = CliRunner()


def printed(*arguments: str) -> str:
    result = runner.invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list_says_what_is_here(cache: Path) -> None:
    rows = {row["name"]: row for row in json.loads(printed("list", "--json"))["datasets"]}
    assert rows["ml-100k"]["status"] == "not fetched"
    assert rows["ml-1m"]["interactions"] == 1_000_209
    damaged = cache / "ml-1m" / "ml-1m.zip"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"half")
    table = printed("list")
    assert "damaged" in table
    assert "not fetched" in table
    assert "must be supplied" in table
    assert "synthetic" in table
    assert max(map(len, table.splitlines())) <= 80
    assert "…" not in table


def test_list_tells_every_status(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(folder: Path, content: bytes) -> None:
        folder.parent.mkdir(parents=True)
        folder.write_bytes(content)

    mine = tmp_path / "mine"
    put(cache / "amazon-video" / "ratings.dat", b"changed")
    put(mine / "ml-20m" / "ratings.csv", b"any")
    put(cache / "ml-25m" / "ml-25m.zip", b"1234")
    known = DATASETS["ml-25m"]
    monkeypatch.setitem(DATASETS, "ml-25m", replace(known, sizes={"ml-25m.zip": 4}))
    monkeypatch.setattr("homebody.data.catalogue.sha256", hashed := Hashed())
    rows = {row["name"]: row for row in json.loads(printed("list", "--data-dir", str(mine), "--json"))["datasets"]}
    assert {name: (row["status"], row["checked"]) for name, row in rows.items()} == {
        "ml-100k": ("not fetched", None),
        "ml-1m": ("not fetched", None),
        "ml-20m": ("local folder", "counts, when read"),
        "ml-25m": ("cached", "size"),
        "lastfm-2k": ("must be supplied", None),
        "amazon-video": ("damaged", "sha256"),
        "frappe": ("not fetched", None),
        "book-crossing": ("not fetched", None),
    }
    assert hashed.files == ["ratings.dat"]
    assert rows["ml-25m"]["folder"] == str(cache / "ml-25m")
    assert rows["frappe"]["files"] == [["Mobile_Frappe.zip"]]
    assert rows["frappe"]["supply"] is None
    assert "FOLDER/lastfm-2k" in rows["lastfm-2k"]["supply"]
    assert all(row["licence"] and row["url"].startswith("http") and row["megabytes"] > 0 for row in rows.values())


class Hashed:
    """Which files were hashed."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, path: Path) -> str:
        self.files.append(path.name)
        return "0" * 64


def test_info_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "loans.csv"
    file.write_text("reader,item,time\nann,emma,2024-01-01\nann,emma,2024-01-01\nbob,ulysses,2024-01-02\n")
    found = json.loads(printed("info", str(file), "--user-col", "reader", "--json"))
    assert (found["users"], found["items"], found["interactions"], found["duplicates"]) == (2, 2, 3, 1)
    assert found["sparsity"] == 0.5
    assert found["tied_users"] == 0.5
    assert found["names"] == ["emma", "ulysses"]
    text = printed("info", str(file), "--user-col", "reader")
    assert "2024-01-01 00:00 to 2024-01-02 00:00" in text
    assert "3 (1 repeat an item)" in text


def test_info_of_a_synthetic_population() -> None:
    found = json.loads(printed("info", "synthetic:users=20,items=30,mean=6", "--json"))
    assert (found["users"], found["items"], found["tied_users"]) == (20, 30, None)


def test_get_and_info_of_published_data(real_data: Path, cache: Path) -> None:
    folder = json.loads(printed("get", "ml-100k", "--data-dir", str(real_data), "--json"))["folder"]
    assert Path(folder) == real_data / "ml-100k"
    text = printed("info", "ml-100k", "--data-dir", str(real_data))
    assert "93.70%" in text
    assert "Star Wars (1977)" in text
    assert "genres, year" in text


@pytest.mark.parametrize("command", ["get", "info"])
def test_an_unknown_name_is_an_error_with_a_suggestion(command: str, cache: Path) -> None:
    with pytest.raises(HomebodyError, match="did you mean 'ml-1m'"):
        printed(command, "ml-1")


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys; import homebody.cli.data; "
        "print(sorted({'torch', 'numba', 'polars', 'numpy', 'rich.progress'} & set(sys.modules)))"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "[]"


def test_data_is_loaded_without_torch() -> None:
    script = "import sys; import homebody.data; homebody.data.load('synthetic'); print('torch' in sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert outcome.stdout.strip() == "False"

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.warm import Nest
from typer.testing import CliRunner

from homebody.cli.data import app
from homebody.data.datasets import DATASETS
from homebody.errors import HomebodyError
from homebody.screen import wrapped

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
    monkeypatch.setattr("homebody.data.datasets.sha256", hashed := Hashed())
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
        "mind": ("must be supplied", None),
        "ebnerd": ("must be supplied", None),
        "ibm-articles": ("not fetched", None),
    }
    assert hashed.files == ["ratings.dat"]
    assert rows["ml-25m"]["folder"] == str(cache / "ml-25m")
    assert rows["frappe"]["files"] == [["Mobile_Frappe.zip"]]
    assert rows["frappe"]["supply"] is None
    assert "FOLDER/lastfm-2k" in rows["lastfm-2k"]["supply"]
    assert all(row["licence"] and row["url"].startswith("http") for row in rows.values())
    assert {name for name, row in rows.items() if row["megabytes"] is None} == {"mind", "ebnerd"}
    assert all(row["megabytes"] > 0 for row in rows.values() if row["megabytes"] is not None)


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


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Five readers of four books, what is known of them, and what they were shown."""
    (tmp_path / "loans.csv").write_text(
        "user,item,rating\n1,a,5\n1,b,4\n1,c,2\n2,a,5\n2,b,3\n3,a,4\n3,b,4\n4,c,1\n5,d,5\n"
    )
    (tmp_path / "users.csv").write_text("user,age,job\n1,31,cook\n2,40,vet\n3,22,cook\n4,57,\n9,18,spy\n")
    (tmp_path / "items.csv").write_text("item,title,genres\na,Emma,novel|comedy\nb,Ulysses,novel\nc,Faust,play\n")
    (tmp_path / "shown.csv").write_text("impression,user,item,clicked\n1,1,a,1\n1,1,d,0\n2,4,c,1\n2,4,b,0\n3,2,a,0\n")
    return tmp_path


def test_info_of_features_filters_and_impressions(files: Path) -> None:
    options = [
        *("info", str(files / "loans.csv"), "--user-features", str(files / "users.csv")),
        *("--item-features", str(files / "items.csv"), "--impressions", str(files / "shown.csv")),
        *("--kind", "job=text", "--filter", "core=2", "--filter", "min_rating=2"),
    ]
    found = json.loads(printed(*options, "--json"))
    assert (found["users"], found["items"], found["interactions"]) == (3, 2, 6)
    assert found["names"] == ["Emma", "Ulysses"]
    assert found["user_features"] == [
        {"name": "age", "kind": "numeric", "distinct": 3, "missing": 0.0, "view": ""},
        {"name": "job", "kind": "text", "distinct": 2, "missing": 0.0, "view": ""},
    ]
    assert [(one["name"], one["kind"]) for one in found["item_features"]] == [
        ("title", "text"),
        ("genres", "multi-hot"),
    ]
    assert found["activity"] == [{"least": 1, "most": 1, "users": 0}, {"least": 2, "most": 4, "users": 3}]
    assert found["impressions"] == {"impressions": 0, "users": 0, "shown": 0, "clicked": 0}
    assert len(found["notes"]) == 8
    assert found["notes"][-1].startswith("The filters min_rating=2, core=2 kept 3 of 5 users")
    text = printed(*options)
    for note in found["notes"]:
        assert note in text.splitlines()
    assert max(len(line) for line in text.splitlines() if line not in found["notes"]) <= 80


def test_info_shows_how_active_people_are(files: Path) -> None:
    lines = [line.split() for line in printed("info", str(files / "loans.csv")).splitlines()]
    bars = {" ".join(line[:-2]): (line[-2], len(line[-1])) for line in lines if line and set(line[-1]) <= {"█", "#"}}
    assert bars == {"1": ("2", 21), "2 to 4": ("3", 32)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--filter", "core"], "--filter takes NAME=VALUE, not 'core'"),
        (["--filter", "core=2", "--filter", "core=3"], "--filter gives 'core' twice"),
        (["--filter", "cor=2"], "no filter 'cor'; did you mean 'core'"),
        (["--kind", "=text"], "--kind takes NAME=VALUE, not '=text'"),
        (["--kind", "age=numeric"], "There is no feature 'age' to declare as numeric: loans has no features"),
        (["--user-features", "nowhere.csv"], "There is no file nowhere.csv"),
    ],
)
def test_info_refuses_what_it_does_not_understand(files: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(HomebodyError, match=sentence):
        printed("info", str(files / "loans.csv"), *options)


def test_info_of_a_synthetic_population() -> None:
    found = json.loads(printed("info", "synthetic:users=20,items=30,mean=6", "--json"))
    assert (found["users"], found["items"], found["tied_users"]) == (20, 30, None)


def test_get_and_info_of_published_data(real_data: Path, cache: Path) -> None:
    folder = json.loads(printed("get", "ml-100k", "--data-dir", str(real_data), "--json"))["folder"]
    assert Path(folder) == real_data / "ml-100k"
    text = printed("info", "ml-100k", "--data-dir", str(real_data))
    assert "93.70%" in text
    assert "Star Wars (1977)" in text
    assert "genres  multi-hot  19 distinct" in text


def test_the_10_core_of_movielens(real_data: Path, cache: Path) -> None:
    options = ("ml-100k", "--data-dir", str(real_data), "--filter", "core=10", "--kind", "year=categorical", "--json")
    found = json.loads(printed("info", *options))
    assert (found["users"], found["items"], found["interactions"]) == (943, 1152, 97_953)
    assert sum(one["users"] for one in found["activity"]) == 943
    assert [one["kind"] for one in found["item_features"] if one["name"] == "year"] == ["categorical"]


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


PAGE = Path(__file__).parents[2] / "docs" / "your-own-data.md"


def test_the_page_on_ones_own_data_by_copy_and_paste(tmp_path: Path, warm: Nest) -> None:
    """Every block of commands, in one folder and in order; what it prints is what the page shows below it."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    path = f"{warm.programs}{os.pathsep}{os.environ['PATH']}"
    shown = 0
    for (language, code), (following, expected) in pairwise([*blocks, ("", "")]):
        if language == "python":
            done = warm.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        if language != "bash":
            continue
        done = subprocess.run(
            ["bash", "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            check=False,
        )
        if following != "text":
            assert done.returncode == 0, done.stderr
            continue
        shown += 1
        # The page shows sentences as a terminal does, and errors as a file does.
        printed = [
            part
            for line in (done.stdout + done.stderr).splitlines()
            for part in ([line] if line.startswith("homebody: ") else wrapped(line, 80).split("\n"))
        ]
        lines = expected.splitlines()
        assert done.returncode == (2 if lines[0].startswith("homebody: ") else 0)
        if lines[-1] == "…":
            lines, printed = lines[:-1], printed[: len(lines) - 1]
        assert printed == lines
    assert shown >= 8

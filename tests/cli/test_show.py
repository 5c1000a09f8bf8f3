"""`homebody show` and `homebody recommend`: what became of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from homebody.cli import main
from homebody.data import load
from homebody.federation.server.plan import opened
from homebody.progress import Round
from homebody.recipe import Recipe
from homebody.report import jsonable
from homebody.run import execute

DATA = "synthetic:users=20,items=30,mean=8"
TITLES = ["Emma", "Ulysses", "Dune", "Solaris", "Momo", "Walden", "Middlemarch"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    return Path(execute(Recipe("fedmf", DATA, rounds=3, fields={"factors": 4}), out)["run"])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a file whose people and items have names."""
    folder = tmp_path_factory.mktemp("own")
    rows = [f"reader-{user},{TITLES[(user * 3 + step) % 7]}" for user in range(8) for step in range(4)]
    (folder / "loans.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    return Path(execute(Recipe("fedials", str(folder / "loans.csv"), rounds=2), folder / "runs")["run"])


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int | str | None, str, str]:
    monkeypatch.setattr(sys, "argv", ["homebody", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_show(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = called(monkeypatch, capsys, "show", str(run))
    assert (code, errors) == (0, "")
    assert f"method=fedmf data={DATA}" in output
    assert "valid/ndcg@10" in output
    assert "ledger: 9 charges, chain whole" in output
    assert "server ∞, clients ∞, public ∞" in output
    assert f"record: {run}" in output


def test_show_as_json(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = called(monkeypatch, capsys, "show", str(run), "--json")
    assert (code, errors) == (0, "")
    assert json.loads(output) == json.loads((run / "result.json").read_text())


def test_the_latest_run(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(run.parent.parent)
    (run.parent.parent / "runs").unlink(missing_ok=True)
    (run.parent.parent / "runs").symlink_to(run.parent)
    for name in ("latest", run.name):
        code, output, _ = called(monkeypatch, capsys, "show", name)
        assert code == 0
        assert f"record: runs/{run.name}" in output
    code, output, _ = called(monkeypatch, capsys, "recommend", "latest", "--user", "3", "-k", "2")
    assert code == 0
    code, output, _ = called(monkeypatch, capsys, "runs", "--where", "state=finished", "--json")
    assert [entry["run"] for entry in json.loads(output)["runs"]] == [f"runs/{run.name}"]


def test_a_servers_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """While it trains, and once it has ended."""
    server = tmp_path / "server"
    code, _, errors = called(monkeypatch, capsys, "server", "init", str(server), "--method", "fedmf", "--rounds", "4")
    assert (code, errors) == (0, "")
    with opened(server) as (_, records):
        records.add_round(Round("train", 1, 1, 3, metrics={"valid/ndcg@10": 0.25}, epsilon={"server": 1.0}))
    code, output, _ = called(monkeypatch, capsys, "show", str(server))
    assert code == 0
    assert "method=fedmf data=devices rounds=4" in output
    assert "valid/ndcg@10 ▁ 0.2500 → 0.2500" in output
    assert f"not complete: 1 round is recorded; `homebody server status {server}`" in output
    code, output, errors = called(monkeypatch, capsys, "show", str(server), "--json")
    assert (code, output) == (2, "")
    assert f"The training of {server} has not ended" in errors

    simulated = execute(Recipe("fedmf", DATA, rounds=1, fields={"factors": 4}), tmp_path / "runs")
    with opened(server) as (_, records):
        records.note("result", json.dumps(jsonable({**simulated, "data": "devices", "run": "elsewhere"})))
    code, output, _ = called(monkeypatch, capsys, "show", str(server))
    assert code == 0
    assert "fedmf on devices, test" in output
    assert f"record: {server}" in output
    code, output, _ = called(monkeypatch, capsys, "show", str(server), "--json")
    assert json.loads(output)["run"] == str(server)


def test_show_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def contents() -> dict[str, bytes]:
        # SQLite's own files come and go with the process that reads.
        return {path.name: path.read_bytes() for path in run.iterdir() if not path.name.startswith("ledger.sqlite-")}

    before = contents()
    called(monkeypatch, capsys, "show", str(run))
    called(monkeypatch, capsys, "recommend", str(run), "--user", "3")
    assert contents() == before


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("recipe.toml", "method = ", "recipe"),
        ("metrics.jsonl", "{\n", "metrics.jsonl"),
        ("result.json", '{"method', "result.json is not readable"),
        ("ledger.sqlite", "no database, only words\n" * 50, "ledger"),
    ],
)
def test_a_record_that_was_spoilt_is_said_to_be(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: str,
    said: str,
) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for path in run.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / file).write_text(content)
    code, _, errors = called(monkeypatch, capsys, "show", str(copy))
    assert code == 2
    assert errors.startswith("homebody: ")
    assert said in errors
    assert errors.count("\n") == 1


def test_recommend_as_json(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = called(monkeypatch, capsys, "recommend", str(run), "--user", "7", "-k", "30", "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert found["user"] == "7"
    scores = [row["score"] for row in found["items"]]
    assert scores == sorted(scores, reverse=True)
    items = {int(row["item"]) for row in found["items"]}
    history = set(load(DATA).history(7).tolist())
    assert items == set(range(30)) - history


def test_recommend_by_the_names_of_the_data(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = called(monkeypatch, capsys, "recommend", str(own), "--user", "reader-1", "--json")
    assert code == 0
    owned = {TITLES[(3 + step) % 7] for step in range(4)}
    assert {row["item"] for row in json.loads(output)["items"]} == set(TITLES) - owned
    code, output, _ = called(monkeypatch, capsys, "recommend", str(own), "--user", "reader-1", "-k", "1")
    assert "For reader-1" in output
    assert sum(title in output for title in TITLES) == 1


@pytest.mark.parametrize("user", ["reader-9", "1", ""])
def test_recommending_to_someone_unknown(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], user: str
) -> None:
    code, output, errors = called(monkeypatch, capsys, "recommend", str(own), "--user", user)
    assert (code, output) == (2, "")
    assert errors == f"homebody: There is no user '{user}' in this population; the first is called reader-0.\n"


def test_recommending_from_a_checkpoint_that_was_spoilt(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for path in own.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (checkpoint,) = tmp_path.glob("state-*.safetensors")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1])
    code, output, errors = called(monkeypatch, capsys, "recommend", str(tmp_path), "--user", "reader-1")
    assert (code, output) == (2, "")
    assert "corrupt" in errors
    assert errors.count("\n") == 1


def test_recommending_to_somebody_new(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = called(monkeypatch, capsys, "recommend", str(own), "--clicks", "Emma, dune", "--json")
    assert code == 0
    told = json.loads(output)
    assert told["clicks"] == ["Emma", "dune"]
    assert {row["item"] for row in told["items"]} == set(TITLES) - {"Emma", "Dune"}
    assert told["notes"] == []
    code, output, _ = called(monkeypatch, capsys, "recommend", str(own), "--clicks", "Emma,Emma", "-k", "1")
    assert code == 0
    assert "For somebody with 2 items" in output
    assert "1 repeated interaction was left out" in output
    code, output, _ = called(monkeypatch, capsys, "recommend", str(own), "--clicks", "", "--json")
    assert len(json.loads(output)["items"]) == 7


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Give the person: --user NAME for one of the run's people, or --clicks ITEM,ITEM for somebody new."),
        (["--user", "reader-1", "--clicks", "Emma"], "Give the person: --user NAME"),
        (["--user", "reader-1", "--feature", "age=3"], "--feature is for somebody new: leave it out, or give --clicks"),
        (["--user", "reader-1", "--ratings", "3"], "--ratings is for somebody new"),
        (
            ["--user", "reader-1", "--now", "weather=hot"],
            "This data has no circumstance, so 'weather' cannot be used",
        ),
        (["--clicks", "Ema"], "There is no item 'Ema' in this population; did you mean Emma?"),
        (["--clicks", "Emma\ndune"], "--clicks takes items with commas between them, in one line."),
        (["--clicks", "xyz"], "There is no item 'xyz' in this population; the first is called"),
        (["--clicks", "Emma", "--feature", "age=3"], "This data has no feature of people, so 'age' cannot be used"),
        (["--clicks", "Emma", "--now", "weather=hot"], "This data has no circumstance, so 'weather' cannot be used"),
        (["--clicks", "Emma", "--feature", "age"], "--feature takes NAME=VALUE, not 'age'."),
        (["--clicks", "Emma", "--ratings", "good"], "--ratings takes numbers with commas between them"),
        (["--clicks", "Emma", "--ratings", "3,4"], "Each item needs a rating: 1 item was given, and 2 ratings."),
    ],
)
def test_what_somebody_new_cannot_say(
    own: Path,
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, output, errors = called(monkeypatch, capsys, "recommend", str(own), *words)
    assert (code, output) == (2, "")
    assert sentence in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_somebody_who_has_everything_is_told_so(
    own: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("recommend", str(own), "--clicks", ",".join(TITLES), *(["--json"] if as_json else []))
    code, output, _ = called(monkeypatch, capsys, *words)
    assert code == 0
    said = "Nothing is left to recommend: they have all 7 items."
    if as_json:
        assert (json.loads(output)["items"], json.loads(output)["notes"]) == ([], [said])
    else:
        assert output == f"{said}\n"


def test_one_of_the_runs_people_asks_in_circumstances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        f"reader-{user},{TITLES[(user * 3 + step) % 7]},{'rainy' if (user + step) % 3 else 'sunny'}"
        for user in range(8)
        for step in range(4)
    ]
    (tmp_path / "loans.csv").write_text("\n".join(["user,item,weather", *rows]) + "\n")
    fields = {"factors": 4, "hidden": "4", "epochs": 1, "adapt_epochs": 2}
    recipe = Recipe("privrec", str(tmp_path / "loans.csv"), rounds=1, fields=fields)
    run = execute(recipe, tmp_path / "runs")["run"]
    told = {}
    for weather in ("sunny", "rainy", "hail"):
        words = ("recommend", run, "--user", "reader-1", "--now", f"weather={weather}", "--json")
        code, output, errors = called(monkeypatch, capsys, *words)
        assert (code, errors) == (0, "")
        told[weather] = json.loads(output)
        assert told[weather]["now"] == {"weather": weather}
    scores = [{row["item"]: row["score"] for row in told[weather]["items"]} for weather in ("sunny", "rainy")]
    assert scores[0].keys() == scores[1].keys()
    assert scores[0] != scores[1]
    assert told["sunny"]["notes"] == []
    assert "hail" in told["hail"]["notes"][0]

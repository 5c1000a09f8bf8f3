"""Folders that a stranger made, changed or reads: run folders, studies, servers, proxies, homes, downloads."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from homebody.cli import main
from homebody.data import load
from homebody.data.export import export
from homebody.data.fetch import install
from homebody.errors import HomebodyError
from homebody.federation.device.home import Home
from homebody.files import appending, holding, is_held, replacing, touch
from homebody.methods import code_of, find, trust
from homebody.privacy import Ledger
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.statement import statement
from homebody.run import Watcher, execute, reopen, resume
from homebody.studies.cells import cell_key, run_cells
from homebody.studies.tune import Search, tune
from homebody.suggest import recommend_for, recommend_to

DATA = "synthetic:users=20,items=30,mean=6"
NOISED = Recipe(
    "fedmf",
    DATA,
    rounds=6,
    evaluate_every=9,
    stages=["clip:norm=0.5", "secure-sum", "gaussian:z=2"],
    fields={"factors": 4},
)
CODE = """
from dataclasses import dataclass
from pathlib import Path

from homebody.methods.fedmf import FedMF

Path({marker!r}).write_text("ran")


@dataclass(frozen=True)
class Theirs(FedMF):
    pass
"""


class Cut(Exception):
    """The run stops here, as if it had been killed."""


def cut_short(recipe: Recipe, out: Path, rounds: int) -> Path:
    """A run's folder after so many rounds."""

    def on_round(line: Any) -> None:
        if line.step == rounds:
            raise Cut

    with pytest.raises(Cut):
        execute(recipe, out, Watcher(on_round=on_round), name="run")
    return out / "run"


def charged(folder: Path) -> list[str]:
    """The releases in a folder's ledger, in their order."""
    ledger = Ledger(folder / "ledger.sqlite")
    try:
        return list(dict.fromkeys(entry.release for entry in ledger.entries()))
    finally:
        ledger.close()


def edit(folder: Path, **changes: Any) -> None:
    recipe = Recipe.from_toml((folder / "recipe.toml").read_text())
    (folder / "recipe.toml").write_text(replace(recipe, **changes).to_toml())


def released(folder: Path) -> dict[str, Any]:
    progress = RunFolder(folder).read()
    assert progress is not None
    return progress.shared


class TestAnEditedRecipe:
    @pytest.fixture(autouse=True)
    def _no_checkpoint_before_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RunFolder, "due", lambda self: False)

    def test_it_is_charged_in_full_and_says_so_before(self, tmp_path: Path) -> None:
        folder = cut_short(NOISED, tmp_path, 4)
        before = charged(folder)
        assert before == [f"train/{n}" for n in range(1, 5)]
        edit(folder, fields={"factors": 4, "learning_rate": 0.05})
        told: list[str] = []

        def say(text: str) -> None:
            if charged(folder) == before:
                told.append(text)

        result = resume(folder, Watcher(say=say))
        assert any("charged in full" in text and "the recipe" in text for text in told)
        assert any("changed while this run was going on" in note for note in result["notes"])
        assert charged(folder) == [*before, *(f"train/{n}#2" for n in range(1, 5)), "train/5", "train/6"]
        ledger = Ledger(folder / "ledger.sqlite")
        spent = ledger.epsilon("public").epsilon
        ledger.close()
        fresh = execute(NOISED, tmp_path)
        assert spent > fresh["epsilon"]["public"]

    def test_an_unchanged_one_repeats_what_was_charged_and_ends_the_same(self, tmp_path: Path) -> None:
        folder = cut_short(NOISED, tmp_path, 4)
        told: list[str] = []
        result = resume(folder, Watcher(say=told.append))
        assert charged(folder) == [f"train/{n}" for n in range(1, 7)]
        assert not any("charged in full" in text for text in told)
        whole = execute(NOISED, tmp_path)
        assert result["epsilon"] == whole["epsilon"]
        ours, theirs = released(folder), released(Path(whole["run"]))
        assert all(bool((ours[name] == theirs[name]).all()) for name in theirs)

    def test_noise_does_not_cancel_between_the_models_before_and_after(self, tmp_path: Path) -> None:
        """The recipe's edit changes nothing that a device sends: with the same noise the models would be equal."""
        recipe = replace(NOISED, rounds=1)
        first = execute(recipe, tmp_path, name="first")
        again = tmp_path / "again"
        shutil.copytree(first["run"], again)
        for name in ("result.json", "state.json"):
            (again / name).unlink()
        edit(again, cutoffs=[5, 10])
        resume(again)
        ours, theirs = released(again)["item"], released(Path(first["run"]))["item"]
        assert bool((ours != theirs).float().mean() > 0.9)

    def test_back_and_forth_is_charged_each_time_that_something_new_is_released(self, tmp_path: Path) -> None:
        folder = cut_short(NOISED, tmp_path, 3)
        for rate in (0.05, 0.05, 0.07):
            edit(folder, fields={"factors": 4, "learning_rate": rate}, rounds=3)
            shutil.rmtree(tmp_path / "kept", ignore_errors=True)
            shutil.copytree(folder, tmp_path / "kept")
            resume(folder)
            ledger = (folder / "ledger.sqlite").read_bytes()
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "kept", folder)  # killed before the checkpoint, but after its charges
            (folder / "ledger.sqlite").write_bytes(ledger)
        assert charged(folder) == [f"train/{n}{again}" for again in ("", "#2", "#3") for n in (1, 2, 3)]

    @pytest.mark.parametrize("part", ["state.json", "ledger.sqlite"])
    def test_a_folder_without_a_digest_is_read_and_charged_in_full(self, tmp_path: Path, part: str) -> None:
        folder = cut_short(NOISED, tmp_path, 3)
        resume(folder, Watcher(on_round=lambda line: None))
        (folder / "result.json").unlink()
        if part == "state.json":
            about = json.loads((folder / part).read_text())
            del about["digest"]
            about["step"] = 6
            (folder / part).write_text(json.dumps(about))
        else:
            _to_second_schema(folder / part)
            for name in ("state.json", *(one.name for one in folder.glob("state-*"))):
                (folder / name).unlink()
        told: list[str] = []
        assert resume(folder, Watcher(say=told.append))["rounds"] == 6
        again = [name for name in charged(folder) if name.endswith("#2")]
        assert again == ([] if part == "state.json" else [f"train/{n}#2" for n in range(1, 7)])

    def test_the_ledger_keeps_the_rule_by_itself(self) -> None:
        from homebody.privacy import Charge, GaussianRelease

        told = [Charge("public", "user", GaussianRelease(4, "replace-one"))]
        ledger = Ledger()
        for digest in ("a", "a", "b", "a", "b", ""):
            assert ledger.repeats("train/1", digest) == any(one.digest == digest for one in ledger.entries())
            ledger.charge("train/1", told, repeat=True, digest=digest)
        assert [entry.release for entry in ledger.entries()] == ["train/1", "train/1#2", "train/1#3"]
        ledger.verify()


def _to_second_schema(path: Path) -> None:
    """The ledger as an earlier version wrote it: without the column, and with the hashes of fewer columns."""
    import hashlib
    import sqlite3

    ledger = Ledger(path)
    rows = ledger.entries()
    ledger.close()
    with sqlite3.connect(path) as db:
        for name in ("changed", "removed"):
            db.execute(f"DROP TRIGGER charge_is_never_{name}")
        previous = "0" * 64
        for row in rows:
            text = json.dumps([*row[1:10], previous])
            own = hashlib.sha256(text.encode()).hexdigest()
            db.execute("UPDATE charge SET previous = ?, hash = ? WHERE id = ?", (previous, own, row.id))
            previous = own
        db.execute("ALTER TABLE charge DROP COLUMN digest")
        db.execute("PRAGMA user_version = 2")
    db.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a method that comes with Homebody."""
    out = tmp_path_factory.mktemp("finished")
    return Path(execute(replace(NOISED, rounds=2), out, name="run")["run"])


@pytest.fixture
def stranger(finished: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run's folder whose recipe names a file of a stranger; and what would be there had it run."""
    folder, marker = tmp_path / "theirs", tmp_path / "ran"
    shutil.copytree(finished, folder)
    code = folder / "evil.py"
    code.write_text(CODE.format(marker=str(marker)))
    edit(folder, method=f"{code}:Theirs")
    return folder, marker


class TestCodeFromAFolder:
    @pytest.mark.parametrize(
        "command",
        [
            ["recommend", "RUN", "--user", "0"],
            ["recommend", "RUN", "--clicks", "1,2"],
            ["audit", "RUN", "--attack", "interactions"],
            ["audit", "RUN", "--attack", "canary"],
            ["audit", "RUN", "--attack", "linkage"],
            ["audit", "RUN", "--attack", "membership"],
            ["run", "--resume", "RUN"],
        ],
    )
    def test_no_command_runs_it(
        self,
        command: list[str],
        stranger: tuple[Path, Path],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        folder, marker = stranger
        if command[0] == "run":
            (folder / "result.json").unlink()
        monkeypatch.setattr(sys, "argv", ["homebody", *(str(folder) if word == "RUN" else word for word in command)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr().err
        assert left.value.code == 2
        code = code_of(f"{folder / 'evil.py'}:Theirs")
        assert code is not None
        assert str(code.path) in said
        assert code.sha256 in said
        assert "--trust-code" in said
        assert not marker.exists()

    def test_what_only_reads_the_record_needs_no_trust(
        self, stranger: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, marker = stranger
        for command in (["show", str(folder)], ["account", "--run", str(folder)], ["run", "--resume", str(folder)]):
            monkeypatch.setattr(sys, "argv", ["homebody", *command])
            main_quietly()
        assert capsys.readouterr().out
        assert not marker.exists()

    def test_with_trust_it_is_named_and_run(
        self, stranger: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, marker = stranger
        environment = json.loads((folder / "environment.json").read_text())
        from homebody.recipe import fingerprint

        environment["method_fingerprint"] = fingerprint({"file": (folder / "evil.py").read_bytes()})
        (folder / "environment.json").write_text(json.dumps(environment))
        monkeypatch.setattr(sys, "argv", ["homebody", "recommend", str(folder), "--user", "0", "--trust-code"])
        main_quietly()
        said = capsys.readouterr().err
        code = code_of(f"{folder / 'evil.py'}:Theirs")
        assert said == f"note: {folder} runs the code of {code}.\n"
        assert marker.exists()

    @pytest.mark.parametrize(
        "opened",
        [
            reopen,
            resume,
            lambda path: recommend_to(path, "0"),
            lambda path: recommend_for(path, []),
            lambda path: Recipe.from_toml((path / "recipe.toml").read_text()).build(),
        ],
    )
    def test_nor_does_python_without_an_argument(
        self, opened: Callable[[Path], object], stranger: tuple[Path, Path]
    ) -> None:
        folder, marker = stranger
        if opened is resume:
            (folder / "result.json").unlink()
        with pytest.raises(HomebodyError, match="which nobody here named"):
            opened(folder)
        assert not marker.exists()

    def test_a_planted_cell_does_not_run_its_code(self, stranger: tuple[Path, Path], tmp_path: Path) -> None:
        """A study goes on with what its folder holds: there another recipe may stand."""
        folder, marker = stranger
        recipe = replace(NOISED, rounds=2)
        cell = tmp_path / "cells" / cell_key(recipe)
        cell.parent.mkdir()
        shutil.copytree(folder, cell)
        (cell / "result.json").unlink()
        with pytest.raises(HomebodyError, match="which nobody here named"):
            run_cells([recipe], tmp_path / "cells")
        assert not marker.exists()

    def test_neither_a_list_of_papers_nor_a_paper_runs_its_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        marker, folder = tmp_path / "ran", tmp_path / "experiments" / "theirs"
        folder.mkdir(parents=True)
        (folder / "own.py").write_text(CODE.format(marker=str(marker)))
        (folder / "recipe.toml").write_text(
            'title = "t"\ncitation = "c"\n[[table]]\nid = "1"\ntitle = "t"\n'
            f'data = ["{DATA}"]\nmetrics = ["hr@10"]\nseeds = 1\n[[table.row]]\nname = "theirs"\n'
            'method = "own.py:Theirs"\n'
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["homebody", "reproduce"])
        main_quietly()
        assert "theirs" in capsys.readouterr().out
        monkeypatch.setattr(sys, "argv", ["homebody", "reproduce", "theirs"])
        with pytest.raises(SystemExit):
            main()
        assert "which nobody here named" in capsys.readouterr().err
        assert not marker.exists()

    def test_what_runs_is_the_file_that_was_read_and_no_bytecode_beside_it(self, tmp_path: Path) -> None:
        """Importing would take a __pycache__ whose times fit, which is not what the SHA-256 is of."""
        file, marker = tmp_path / "mine.py", tmp_path / "ran"
        harmless, evil = (CODE.format(marker=str(tmp_path / name)) for name in ("fine", "ran.."))
        evil = evil.replace("ran..", "ran")
        evil += "#" * (len(harmless) - len(evil))
        harmless += "#" * (len(evil) - len(harmless))
        file.write_text(evil)
        os.utime(file, (10**9, 10**9))
        py_compile.compile(str(file))
        file.write_text(harmless)
        os.utime(file, (10**9, 10**9))
        find(trust(f"{file}:Theirs"))
        assert (tmp_path / "fine").exists()
        assert not marker.exists()

    def test_a_file_that_changes_after_it_was_named_is_not_run(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text(CODE.format(marker=str(tmp_path / "fine")))
        name = trust(f"{file}:Theirs")
        find(name)
        file.write_text(CODE.format(marker=str(tmp_path / "ran")))
        with pytest.raises(HomebodyError, match="which nobody here named"):
            find(name)
        assert not (tmp_path / "ran").exists()

    def test_an_installed_entry_point_needs_no_trust(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from importlib.metadata import EntryPoint, EntryPoints

        group = "homebody.methods"
        known = EntryPoints([EntryPoint("theirs", "homebody.methods.fedmf:FedMF", group)])
        monkeypatch.setattr("homebody.methods.packages.entry_points", lambda **asked: known.select(**asked))
        assert find("theirs").__name__ == "FedMF"
        with pytest.raises(HomebodyError, match="There is no method 'other'"):
            find("other")


def main_quietly() -> None:
    """A command that ends well."""
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, None)


VICTIM = "precious\n"


def _run_lock(folder: Path, lock: Path) -> None:
    RunFolder(folder).alone().__enter__()


def _cells_lock(folder: Path, lock: Path) -> None:
    run_cells([NOISED], folder)


def _server_lock(folder: Path, lock: Path) -> None:
    from homebody.federation.server.admin import running

    running(folder)
    holding(folder / ".lock", "busy").__enter__()


def _proxy_lock(folder: Path, lock: Path) -> None:
    from homebody.federation.proxy.app import running

    running(folder)


def _fetch_lock(folder: Path, lock: Path) -> None:
    install(folder / "set", lambda fresh, scratch: None, lambda target: False, lambda text: None)


def _home_lock(folder: Path, lock: Path) -> None:
    home = Home(folder / "home")
    try:
        home.store.only_client().__enter__()
    finally:
        home.close()


LOCKS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "a run": (".lock", _run_lock),
    "a study's cells": (".lock", _cells_lock),
    "a server": (".lock", _server_lock),
    "a proxy": (".lock", _proxy_lock),
    "a download": (".set.lock", _fetch_lock),
    "a device": ("home/running.lock", _home_lock),
}


class TestLinks:
    @pytest.mark.parametrize("what", LOCKS)
    @pytest.mark.parametrize("there", [True, False])
    def test_a_lock_that_is_a_link_is_refused_and_what_it_names_stays(
        self, what: str, there: bool, tmp_path: Path
    ) -> None:
        name, take = LOCKS[what]
        folder, victim = tmp_path / "folder", tmp_path / "victim"
        folder.mkdir()
        if what == "a device":
            Home.create(folder / "home", server="127.0.0.1:1").close()
        if there:
            victim.write_text(VICTIM)
        (folder / name).symlink_to(victim)
        with pytest.raises(HomebodyError, match=r"it is a link"):
            take(folder, folder / name)
        assert victim.exists() == there
        if there:
            assert victim.read_text() == VICTIM

    def test_a_lock_empties_no_file_even_by_a_second_name(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text(VICTIM)
        (tmp_path / ".lock").hardlink_to(victim)
        with RunFolder(tmp_path).alone():
            assert is_held(tmp_path / ".lock")
        assert victim.read_text() == VICTIM

    def test_a_pipe_in_place_of_a_lock_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / ".lock")
        with pytest.raises(HomebodyError, match="no plain file"):
            RunFolder(tmp_path).alone().__enter__()
        with pytest.raises(HomebodyError, match="no plain file"):
            is_held(tmp_path / ".lock")

    @pytest.mark.parametrize("name", ["metrics.jsonl", ".recipe.toml.partial", ".state.json.partial"])
    def test_no_write_of_a_run_goes_through_a_link(self, name: str, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text(VICTIM)
        folder = cut_short(NOISED, tmp_path, 2)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        with pytest.raises(HomebodyError, match="is a link"):
            resume(folder)
        run = RunFolder(folder)
        run.write_text("recipe.toml", "schema = 1\n")  # replaces the link of its scratch file
        run.write_json("state.json", {})
        if name == "metrics.jsonl":
            with pytest.raises(HomebodyError, match="it is a link"), appending(folder / name):
                pass
        assert victim.read_text() == VICTIM

    @pytest.mark.parametrize("name", ["ledger.sqlite", "ledger.sqlite-wal", "environment.json", "result.json"])
    def test_a_run_that_holds_a_link_is_not_opened(self, name: str, finished: Path, tmp_path: Path) -> None:
        folder, victim = tmp_path / "run", tmp_path / "victim"
        shutil.copytree(finished, folder)
        victim.write_bytes(b"")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        for opened in (resume, reopen, lambda path: statement(RunFolder.open(path))):
            with pytest.raises(HomebodyError, match="is a link"):
                opened(folder)
        assert victim.read_bytes() == b""

    def test_a_ledger_is_not_made_through_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "ledger.sqlite").symlink_to(tmp_path / "victim")
        with pytest.raises(HomebodyError, match="it is a link"):
            Ledger(tmp_path / "ledger.sqlite")
        assert not (tmp_path / "victim").exists()


def modes(root: Path) -> dict[str, str]:
    """Every entry below a folder, and the folder itself, that others may do something with."""
    found = [root, *root.rglob("*")]
    return {str(one): oct(stat.S_IMODE(one.lstat().st_mode)) for one in found if one.lstat().st_mode & 0o077}


class TestPermissions:
    @pytest.fixture(autouse=True)
    def _open_umask(self) -> Any:
        before = os.umask(0)  # nothing is taken away: each writer says itself who may read
        yield
        os.umask(before)

    def test_a_run_is_its_owners_alone(self, tmp_path: Path) -> None:
        path = Path(execute(replace(NOISED, rounds=2), tmp_path / "runs")["run"])
        assert modes(path) == {}
        assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o777  # a folder of folders, as the umask says
        folder = cut_short(NOISED, tmp_path, 2)
        resume(folder)
        assert modes(folder) == {}

    def test_so_are_studies_and_what_diverged(self, tmp_path: Path) -> None:
        study = tune(Search(replace(NOISED, rounds=1), {"learning_rate": (0.05, 1e30)}, trials=2), tmp_path)
        assert modes(Path(study["study"])) == {}
        run_cells([replace(NOISED, rounds=1)], tmp_path / "cells")
        assert modes(tmp_path / "cells") == {}

    def test_so_is_a_device(self, tmp_path: Path) -> None:
        home = Home.create(tmp_path / "device", server="127.0.0.1:1")
        person = home.people.add("ann")
        home.history.append(person, "emma", 1)
        home.ledger(person)
        with home.store.only_client():
            assert modes(tmp_path / "device") == {}
        home.close()

    def test_so_are_databases(self, tmp_path: Path) -> None:
        from homebody.database import connect

        database = connect(tmp_path / "records.sqlite")
        database.migrate("list", ["CREATE TABLE list (number INTEGER PRIMARY KEY)"])
        database.execute("INSERT INTO list (number) VALUES (1)")
        assert {one.name for one in tmp_path.iterdir()} >= {"records.sqlite", "records.sqlite-wal"}
        for one in tmp_path.iterdir():
            assert stat.S_IMODE(one.stat().st_mode) == 0o600, one
        database.close()

    def test_what_is_made_to_be_shown_is_as_the_umask_says(self, finished: Path, tmp_path: Path) -> None:
        from homebody.report.statement_page import write_statement

        os.umask(0o027)
        for file in write_statement(statement(RunFolder.open(finished)), tmp_path / "shown"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o640


class TestStatements:
    @pytest.mark.parametrize("said", [True, False], ids=["new records", "old records"])
    @pytest.mark.parametrize(
        "recipe",
        [
            Recipe("alone", DATA, rounds=2, fields={"factors": 4}),
            Recipe("random", DATA, rounds=2),
            Recipe("popularity", DATA),
        ],
        ids=lambda one: one.method,
    )
    def test_no_sound_run_is_accused(self, recipe: Recipe, said: bool, tmp_path: Path) -> None:
        path = Path(execute(recipe, tmp_path)["run"])
        if not said:
            _forget_charged(path)
        found = statement(RunFolder.open(path))
        epsilons = {float(row["epsilon"]) for row in found["certified"]}
        assert epsilons == ({float("inf")} if recipe.method == "popularity" else {0.0})

    @pytest.mark.parametrize("said", [True, False], ids=["new records", "old records"])
    def test_nor_one_that_learnt_from_public_people_first(self, said: bool, tmp_path: Path) -> None:
        recipe = Recipe(
            "dp-privrec",
            "synthetic:users=60,items=30,mean=8",
            rounds=2,
            public=0.5,
            fields={"pretraining": "public", "pretrain_rounds": 1, "factors": 4, "hidden": "4"},
        )
        path = Path(execute(recipe, tmp_path)["run"])
        if not said:
            _forget_charged(path)
        found = statement(RunFolder.open(path))
        assert found["run"]["rounds"] == 3

    def test_a_lost_charge_is_still_told(self, finished: Path, tmp_path: Path) -> None:
        path = tmp_path / "run"
        shutil.copytree(finished, path)
        for file in path.glob("ledger.sqlite*"):
            file.unlink()
        Ledger(path / "ledger.sqlite").close()
        with pytest.raises(HomebodyError, match="no charge for train/1"):
            statement(RunFolder.open(path))


def _forget_charged(path: Path) -> None:
    """Rounds as an earlier version recorded them."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({n: v for n, v in line.items() if n != "charged"}) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)


JUNK = [b"\xff\xfe\x00\xd8", b"", b"[]\n", b"null\n", b'"text"\n', b"\x00" * 64, b"{\n"]


class TestDamagedRecords:
    @pytest.mark.parametrize(
        "name",
        [
            "recipe.toml",
            "environment.json",
            "metrics.jsonl",
            "state.json",
            "result.json",
            "ledger.sqlite",
            "ranks.parquet",
        ],
    )
    def test_every_reader_says_a_sentence_or_reads(self, name: str, finished: Path, tmp_path: Path) -> None:
        path = tmp_path / "run"
        shutil.copytree(finished, path)
        for content in JUNK:
            (path / name).write_bytes(content)
            for reader in (
                lambda: statement(RunFolder.open(path)),
                lambda: reopen(path),
                lambda: resume(path),
                lambda: RunFolder.open(path).ranks(),
                lambda: RunFolder.open(path).rounds(),
            ):
                with suppress(HomebodyError):
                    reader()

    @pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "recipe.toml", "ledger.sqlite"])
    def test_and_so_does_every_command(
        self,
        name: str,
        finished: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = tmp_path / "run"
        shutil.copytree(finished, path)
        (path / name).write_bytes(JUNK[0])
        for command in (["show"], ["account", "--run"], ["recommend", "--user", "0"], ["run", "--resume"]):
            monkeypatch.setattr(sys, "argv", ["homebody", *command, str(path)])
            with pytest.raises(SystemExit) as left:
                main()
            if left.value.code:  # a file that the command does not read does not matter
                assert left.value.code == 2
                assert capsys.readouterr().err.count("\n") == 1


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "'=x", "''=x", "＝1", "plain", "o'clock", "-7", "+1.5"]


class TestSpreadsheets:
    def test_no_exported_name_is_a_formula_and_each_comes_back(self, tmp_path: Path) -> None:
        rows = [{"user": user, "item": item, "time": -n} for n, (user, item) in enumerate(_pairs())]
        pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
        population = load(str(tmp_path / "in.parquet"))
        export(population, tmp_path / "out.csv")
        _no_formulas(tmp_path / "out.csv")
        again = load(str(tmp_path / "out.csv"))
        for ids in ("user_ids", "item_ids"):
            assert sorted(getattr(again, ids).to_list()) == sorted(getattr(population, ids).to_list())
        assert again.times is not None
        assert population.times is not None
        assert sorted(again.times) == sorted(population.times)

    def test_nor_one_of_a_device(self, tmp_path: Path) -> None:
        home = Home.create(tmp_path / "device", server="127.0.0.1:1")
        for user, item in _pairs():
            person = next((one for one in home.people.all() if one.name == user), None) or home.people.add(user)
            home.history.append(person, item, -3)
        home.history.export(tmp_path / "out.csv")
        home.close()
        _no_formulas(tmp_path / "out.csv")
        other = Home.create(tmp_path / "other", server="127.0.0.1:1")
        other.history.import_file(tmp_path / "out.csv")
        other.history.export(tmp_path / "again.csv")
        other.close()
        assert (tmp_path / "again.csv").read_text() == (tmp_path / "out.csv").read_text()


def _pairs() -> list[tuple[str, str]]:
    return [(user, item) for user in FORMULAS for item in FORMULAS]


def _no_formulas(file: Path) -> None:
    table = pl.read_csv(file, infer_schema=False)
    for column in ("user", "item"):
        for cell in table[column]:
            assert cell[0] not in "=+-@\t\r＝" or cell in ("-7", "+1.5"), cell
    assert table["time"].cast(pl.Int64).max() is not None  # numbers stay numbers


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    with pytest.raises(TypeError), replacing(tmp_path / "a") as file:
        file.writelines([b"half", "no bytes"])  # type: ignore[list-item]
    assert [one.name for one in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "before"
    touch(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "before"


def test_one_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    assert not is_held(lock)
    holders: list[AbstractContextManager[int]] = [holding(lock, "busy"), holding(lock, "busy", patience=0.2)]
    with holders[0]:
        assert is_held(lock)
        waits: list[str] = []
        with pytest.raises(HomebodyError, match="busy"):
            holding(lock, "busy", patience=0.2, waits=lambda: waits.append("once")).__enter__()
        assert waits == ["once"]
    with holders[1]:
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600

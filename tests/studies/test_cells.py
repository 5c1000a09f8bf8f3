"""Cells: run once, kept, resumed, and dependable when processes die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.processes import wait_until
from tests.warm import Nest

from homebody import __version__, run_notes
from homebody.errors import Diverged, HomebodyError
from homebody.methods import trust
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.run import execute, reopen, resume
from homebody.studies import CellProgress, cell_key, cells, code_version, commit, run_cells

DATA = "synthetic:users=30,items=40,mean=8"
FEDIALS = Recipe("fedials", DATA, fields={"factors": 4}, rounds=5)
POPULARITY = Recipe("popularity", DATA)
DIVERGING = Recipe("fedmf", DATA, fields={"factors": 4, "learning_rate": 1e30, "item_rate": 1e30}, rounds=3)
TIMES = {"seconds", "seconds_per_round", "cpu_seconds", "peak_rss_mb", "run"}

OWN = """
import os, signal, sys, time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from homebody.settings import param
from homebody.reference import Histories, Reference, Score

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Odd(Reference):
    what: str = param("count", "what it does besides")
    number: int = param(1, "to tell runs apart", low=0)

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        with (HERE / "log").open("a") as log:
            log.write(f"{self.what} {self.number} {os.getpid()}\\n")
        while True:
            if self.what == "print":
                print("this is not JSON")
                os.write(1, b"{nor this}\\n")
            if self.what == "break":
                raise ZeroDivisionError("nothing goes into nothing")
            if self.what == "die" or self.what == "die once" and not (HERE / "died once").exists():
                (HERE / f"{self.what.replace('die', 'died')}").touch()  # of its own: others die at the same time
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(6000):
                if self.what == "sleep" and not (HERE / "awake").exists():
                    time.sleep(0.2)
            if self.what == "complain":
                print("no more of this", file=sys.stderr, flush=True)
                os._exit(3)
            size = histories.catalogue.n_items
            yield lambda users, items: torch.arange(size).float()[items].expand(len(users), -1)
"""


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in TIMES}


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("it was run again")


class Stop(BaseException):
    """Ends a run from inside, as Ctrl-C does."""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Recipe]:
    """Recipes of a reference that does what it is told."""
    file = tmp_path / "method" / "odd.py"
    file.parent.mkdir()
    file.write_text(OWN)

    def recipe(what: str, number: int = 1, rounds: int = 1) -> Recipe:
        return Recipe(trust(f"{file}:Odd"), DATA, fields={"what": what, "number": number}, rounds=rounds)

    return recipe


def log(tmp_path: Path) -> list[str]:
    return [line.rpartition(" ")[0] for line in (tmp_path / "method" / "log").read_text().splitlines()]


class TestOneProcess:
    def test_results_are_those_of_single_runs_in_order(self, tmp_path: Path) -> None:
        recipes = [POPULARITY, FEDIALS, replace(FEDIALS, seed=1)]
        results = run_cells(recipes, tmp_path / "cells")
        alone = [execute(recipe, tmp_path / "alone") for recipe in recipes]
        assert [timeless(result) for result in results] == [timeless(result) for result in alone]
        assert [Path(result["run"]) for result in results] == [tmp_path / "cells" / cell_key(r) for r in recipes]

    def test_nothing_is_run_twice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = run_cells([FEDIALS, POPULARITY, FEDIALS], tmp_path)
        assert first[0] == first[2]
        assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2
        monkeypatch.setattr(cells, "execute", forbidden)
        monkeypatch.setattr("homebody.run._run", forbidden)
        assert run_cells([POPULARITY, FEDIALS], tmp_path) == [first[1], first[0]]

    def test_an_interrupted_cell_goes_on_from_its_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RunFolder, "due", lambda self: True)

        def stop(progress: CellProgress) -> None:
            if progress.done == 4:
                raise Stop

        with pytest.raises(Stop):
            run_cells([FEDIALS], tmp_path / "cells", watch=stop)
        seen: list[int] = []
        (result,) = run_cells([FEDIALS], tmp_path / "cells", watch=lambda progress: seen.append(progress.done))
        assert seen == [0, 4, 5, 5]
        assert timeless(result) == timeless(execute(FEDIALS, tmp_path / "alone"))

    def test_a_folder_without_a_recipe_is_begun_anew(self, tmp_path: Path) -> None:
        left = tmp_path / cell_key(POPULARITY)
        left.mkdir()
        (left / ".recipe.toml.partial").write_text("meth")
        (result,) = run_cells([POPULARITY], tmp_path)
        assert result["rounds"] == 1
        assert not (left / ".recipe.toml.partial").exists()

    def test_what_is_told(self, tmp_path: Path) -> None:
        told: list[CellProgress] = []
        recipes = [replace(FEDIALS, rounds=2), POPULARITY, replace(FEDIALS, rounds=2)]
        results = run_cells(recipes, tmp_path, watch=told.append)
        assert [(p.cell, p.done, p.planned, p.finished) for p in told if p.cell != 2] == [
            *((0, done, 2, 0) for done in (0, 1, 2)),
            (0, 2, 2, 2),
            *((1, done, 1, 2) for done in (0, 1)),
            (1, 1, 1, 3),
        ]
        assert [p.result for p in told if p.result] == [results[0], results[2], results[1]]
        assert all(p.recipe == recipes[p.cell] for p in told)
        told.clear()
        run_cells(recipes, tmp_path, watch=told.append)
        assert [(p.done, p.planned, p.finished) for p in told] == [(0, 0, 2), (0, 0, 2), (0, 0, 3)]

    def test_notes_about_the_data_are_said_once(self, tmp_path: Path) -> None:
        file = tmp_path / "loans.csv"
        rows = [f"u{user},i{item}" for user in range(9) for item in range(4)]
        file.write_text("\n".join(["user,item", "u99,i1", *rows]))
        recipes = [Recipe("popularity", str(file), seed=seed) for seed in range(2)]
        said: list[str] = []
        run_cells(recipes, tmp_path / "cells", say=said.append)
        assert said
        assert len(said) == len(set(said))

    def test_models_are_dropped_when_not_wanted(self, tmp_path: Path) -> None:
        (kept,) = run_cells([FEDIALS], tmp_path)
        folder = Path(kept["run"])
        assert list(folder.glob("state*"))
        assert run_cells([FEDIALS], tmp_path, keep_state=False) == [kept]
        assert not list(folder.glob("state*"))
        assert resume(folder) == kept
        with pytest.raises(HomebodyError, match="holds no model"):
            reopen(folder)

    def test_no_second_process_works_on_the_same_cells(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path).alone(), pytest.raises(HomebodyError, match="Another process is working on"):
            run_cells([POPULARITY], tmp_path)

    def test_a_cell_that_a_dying_worker_holds_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / cell_key(POPULARITY)
        path.mkdir()
        held = RunFolder(path).alone()
        held.__enter__()
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                held.__exit__(None, None, None)

        monkeypatch.setattr(time, "sleep", sleep)
        assert run_cells([POPULARITY], tmp_path)[0]["rounds"] == 1
        assert len(waits) == 3

    def test_no_jobs_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(HomebodyError, match="Jobs must be at least 1, not 0"):
            run_cells([POPULARITY], tmp_path, jobs=0)

    def test_a_root_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(HomebodyError, match="No run can be written below"):
            run_cells([POPULARITY], tmp_path / "file" / "cells")


class TestErrors:
    def test_they_are_raised_or_kept(self, tmp_path: Path) -> None:
        with pytest.raises(Diverged, match="diverged in round"):
            run_cells([POPULARITY, DIVERGING], tmp_path)
        results = run_cells([DIVERGING, POPULARITY], tmp_path, on_error="keep")
        assert "diverged in round" in results[0]["error"]
        assert results[0]["method"] == "fedmf"
        assert "metrics" in results[1]

    def test_what_diverged_is_not_run_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (first,) = run_cells([DIVERGING], tmp_path, on_error="keep", keep_state=False)
        assert not list((tmp_path / cell_key(DIVERGING)).glob("state*"))
        monkeypatch.setattr(cells, "execute", forbidden)
        monkeypatch.setattr(cells, "resume", forbidden)
        assert run_cells([DIVERGING], tmp_path, on_error="keep") == [first]
        with pytest.raises(Diverged):
            run_cells([DIVERGING], tmp_path)

    def test_what_can_be_put_right_is_tried_again(self, tmp_path: Path) -> None:
        file = tmp_path / "loans.csv"
        recipe = Recipe("popularity", str(file))
        (failed,) = run_cells([recipe], tmp_path / "cells", on_error="keep")
        assert "loans.csv" in failed["error"]
        file.write_text("\n".join(["user,item", *(f"u{u},i{i}" for u in range(9) for i in range(4))]))
        assert run_cells([recipe], tmp_path / "cells")[0]["rounds"] == 1

    def test_a_lack_of_memory_is_a_sentence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*_: Any, **__: Any) -> None:
            raise RuntimeError("[enforce fail] not enough memory: you tried to allocate 9 bytes.")

        monkeypatch.setattr(cells, "execute", run)
        (result,) = run_cells([POPULARITY], tmp_path, on_error="keep")
        assert "does not fit in memory" in result["error"]


class TestKeys:
    def test_other_code_is_another_cell(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = cell_key(FEDIALS)
        assert cell_key(FEDIALS) == before
        assert re.fullmatch(r"[\w.-]+", before)
        monkeypatch.setattr(cells, "code_fingerprint", lambda: "another")
        assert cell_key(FEDIALS) != before

    def test_the_code_is_that_of_all_modules(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_notes, "PACKAGE", tmp_path)
        versions = set()
        for name, text in (("a.py", ""), ("a.py", "x = 1"), ("b.py", ""), ("b.txt", "no code")):
            (tmp_path / name).write_text(text)
            versions.add(run_notes.code_fingerprint.__wrapped__())
        assert len(versions) == 3

    def test_a_method_file_that_changed_is_another_cell(self, own: Callable[..., Recipe]) -> None:
        recipe = own("count")
        before, version = cell_key(recipe), code_version(recipe)
        file = Path(recipe.method.rpartition(":")[0])
        file.write_text(file.read_text() + "\n")
        assert cell_key(recipe) != before
        assert code_version(recipe) != version != code_version()

    def test_a_changed_file_of_data_is_another_cell(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.csv"
        file.write_text("user,item\na,1\n")
        recipe = Recipe("popularity", str(file))
        before = cell_key(recipe)
        file.write_text("user,item\na,2\n")
        assert cell_key(recipe) != before
        file.write_text("user,item\na,1\n")
        assert cell_key(recipe) == before
        described = Recipe("popularity", "ml-100k", user_features=str(file))
        before = cell_key(described)
        file.write_text("user,item\na,2\n")
        assert cell_key(described) != before

    def test_the_commit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert re.fullmatch(rf"[0-9a-f]{{12}}(\+changes)?|{re.escape(__version__)}", commit())
        monkeypatch.setattr(cells, "PACKAGE", tmp_path)
        version = commit.__wrapped__
        assert version() == __version__

        def git(*arguments: str) -> None:
            who = ["-c", "user.name=a", "-c", "user.email=a@b"]
            subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

        git("init")
        git("commit", "--allow-empty", "-m", "begin")
        (tmp_path / "__init__.py").touch()
        assert version() == __version__  # a checkout, but not of this package
        git("add", ".")
        git("commit", "-m", "add the package")
        os.utime(tmp_path / "__init__.py", (1, 1))
        index = (tmp_path / ".git" / "index").read_bytes()
        assert re.fullmatch("[0-9a-f]{12}", version())
        assert (tmp_path / ".git" / "index").read_bytes() == index, "A kill at that moment would leave a lock behind."
        (tmp_path / "new.py").touch()
        assert re.fullmatch(r"[0-9a-f]{12}\+changes", version())


class TestProcesses:
    @pytest.mark.processes
    def test_they_give_the_same_results(self, tmp_path: Path) -> None:
        recipes = [FEDIALS, DIVERGING, POPULARITY, FEDIALS, replace(FEDIALS, seed=1)]
        told: list[CellProgress] = []
        here = run_cells(recipes, tmp_path / "here", on_error="keep")
        apart = run_cells(recipes, tmp_path / "apart", jobs=2, on_error="keep", keep_state=False, watch=told.append)
        assert [timeless(r) for r in apart if "error" not in r] == [timeless(r) for r in here if "error" not in r]
        assert "diverged" in apart[1]["error"]
        assert told[-1].finished == 5
        assert {p.cell for p in told if p.result} == {0, 1, 2, 3, 4}
        assert any(p.planned == 5 and p.done >= 1 for p in told if not p.result)
        assert not list((tmp_path / "apart").glob("*/state*"))
        with pytest.raises(Diverged):
            run_cells(recipes, tmp_path / "apart", jobs=2)

    def test_a_death_costs_one_retry_and_then_a_sentence(
        self, tmp_path: Path, own: Callable[..., Recipe], warm_workers: None
    ) -> None:
        recipes = [own("die once"), own("print"), own("die"), own("complain"), own("count")]
        results = run_cells(recipes, tmp_path / "cells", jobs=2, on_error="keep")
        assert ["error" in result for result in results] == [False, False, True, True, False]
        assert "ended 2 times (by signal SIGKILL)" in results[2]["error"]
        assert "ended 2 times (with code 3: no more of this)" in results[3]["error"]
        assert sorted(log(tmp_path)) == sorted(
            ["die once 1", "die once 1", "print 1", "die 1", "die 1", "complain 1", "complain 1", "count 1"]
        )

    def test_a_mistake_in_a_method_is_shown(
        self, tmp_path: Path, own: Callable[..., Recipe], warm_workers: None
    ) -> None:
        with pytest.raises(RuntimeError, match="ZeroDivisionError: nothing goes into nothing"):
            run_cells([own("break")], tmp_path / "cells", jobs=2, on_error="keep")

    @pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
    def test_nobody_outlives_the_parent_and_the_next_start_goes_on(
        self, tmp_path: Path, own: Callable[..., Recipe], how: signal.Signals, code: int, warm: Nest
    ) -> None:
        recipes = [own("count", number=7), *(own("sleep", number=number, rounds=2) for number in range(3))]
        script = (
            "import sys\nfrom pathlib import Path\nfrom homebody.methods import trust\n"
            "from homebody.recipe import Recipe\nfrom homebody.studies import run_cells\n"
            "recipes = [Recipe.from_toml(text) for text in sys.argv[2:]]\nfor one in recipes:\n    trust(one.method)\n"
            "try:\n    run_cells(recipes, Path(sys.argv[1]), jobs=2)\n"
            "except KeyboardInterrupt:\n    sys.exit(130)\n"
        )
        root = tmp_path / "cells"
        texts = [recipe.to_toml() for recipe in recipes]
        parent = warm.popen([sys.executable, "-c", script, str(root), *texts])
        begun = tmp_path / "method" / "log"
        wait_until(
            lambda: begun.exists() and log(tmp_path).count("sleep 0") + log(tmp_path).count("sleep 1") == 2,
            "two cells are under way",
        )
        workers = psutil.Process(parent.pid).children(recursive=True)
        assert len(workers) == 2
        os.kill(parent.pid, how)
        assert parent.wait(timeout=300) == code
        # They are silent for twenty minutes, so that no line they cannot send ends them.
        wait_until(
            lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers),
            "the workers end",
        )
        (tmp_path / "method" / "awake").touch()
        results = run_cells(recipes, root)
        assert [result["rounds"] for result in results] == [1, 2, 2, 2]
        assert log(tmp_path).count("count 7") == 1


class TestFolders:
    def test_a_run_of_a_given_name_is_not_written_over(self, tmp_path: Path) -> None:
        result = execute(POPULARITY, tmp_path, name="mine")
        assert Path(result["run"]) == tmp_path / "mine"
        with pytest.raises(HomebodyError, match="mine is there already"):
            execute(POPULARITY, tmp_path, name="mine")
        assert json.loads((tmp_path / "mine" / "result.json").read_text()) == result

"""A cell is one recipe, run once and kept.

A cell's folder is the record of a run. Its name has a hash of the recipe and of the code. A finished cell is never
run again, an interrupted one continues from its checkpoint, and a change of the code makes a new cell.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from homebody import __version__
from homebody.data.fetch import sha256
from homebody.errors import Diverged, HomebodyError
from homebody.files import insisting, private_folder
from homebody.methods import code_of, find
from homebody.progress import Round
from homebody.recipe import Recipe, fingerprint
from homebody.report import RunFolder
from homebody.run import QUIET, InMemory, Watcher, execute, resume
from homebody.run_notes import PACKAGE, code_fingerprint
from homebody.settings import check_counts
from homebody.studies import probes as looking

if TYPE_CHECKING:
    from homebody.studies.workers import Pool

__all__ = ["CellProgress", "Stopped", "cell_key", "code_version", "commit", "count_done", "run_cell", "run_cells"]


PATIENCE = 100
"""Tenths of a second to wait for a folder that a dying worker still holds."""


@dataclass(frozen=True)
class CellProgress:
    """How far the cells are, after a round of a cell or at its end."""

    cell: int
    """Which of the recipes."""
    recipe: Recipe
    done: int
    """Rounds done; `planned` is how many there will be. Both are 0 for a cell that was finished before."""
    planned: int
    finished: int
    """Cells, over all."""
    result: dict[str, Any] | None = None
    """Once this cell is finished."""
    measured: Mapping[int, float] = field(default_factory=dict)
    """By round, what the round is chosen by, of the rounds measured since the last report."""


class Stopped(Exception):
    """A cell was stopped on purpose before its last round."""


def run_cells(
    recipes: Sequence[Recipe],
    root: Path,
    *,
    jobs: int = 1,
    watch: Callable[[CellProgress], object] | None = None,
    say: Callable[[str], None] | None = None,
    on_error: Literal["raise", "keep"] = "raise",
    keep_state: bool = True,
    probes: Sequence[Sequence[str]] = (),
    more: Callable[[], Recipe | None] | None = None,
    data: InMemory | None = None,
) -> list[dict[str, Any]]:
    """Run the recipes and return their results in order; cells that `root` holds already are not run again.

    jobs: processes; with 1 the cells run in this one. say: receives each sentence about the data once.
    watch: receives progress. If it returns True, the cell stops, and its result is {"cut_short": True}.
    more: called when a process has nothing to do; returns another recipe, or None if there is none now.
    data: what is learnt from, instead of what the recipes name, with jobs=1; `root` is for this data alone.
    on_error: "keep" returns {"error": sentence, …} for a cell that failed, in place of its result.
    keep_state: False removes the models of finished cells, which are large; their figures stay.
    probes: for each recipe, the probes to take before its model is removed; see `homebody.studies.probes`.
    """
    check_counts(jobs=jobs)
    with insisting(f"No run can be written below {root}"):
        private_folder(root)
    with RunFolder(root).alone():
        cells = _Cells(root, watch or _ignore, cache(say or _ignore), on_error, keep_state, more or _nothing, data)
        return cells.run(recipes, probes, jobs)


def count_done(recipes: Sequence[Recipe], root: Path, probes: Sequence[Sequence[str]] = ()) -> int:
    """How many of the recipes are finished in `root`; `run_cells` does not run them again."""
    wanted = probes or [()] * len(recipes)
    return sum(_needs_nothing(root / cell_key(recipe), asked) for recipe, asked in zip(recipes, wanted, strict=True))


def run_cell(
    recipe: Recipe,
    path: Path,
    watcher: Watcher = QUIET,
    *,
    keep_state: bool = True,
    probes: Sequence[str] = (),
    data: InMemory | None = None,
) -> dict[str, Any]:
    """Finish the cell in this folder: start it, continue it, or return its result if it is finished.

    A probe that cannot work on this model gives its reason in the result's `refused`; the cell is valid all the same.
    """
    failed = path / "error.json"
    if failed.exists():
        raise Diverged(RunFolder(path).read_json("error.json")["error"])
    try:
        if (path / "recipe.toml").exists():
            result = resume(path, watcher, data=data)
        else:
            shutil.rmtree(path, ignore_errors=True)  # killed before it began
            result = execute(recipe, path.parent, watcher, name=path.name, data=data)
    except Stopped:
        if not keep_state:
            _drop_state(path)
        raise
    except Diverged as error:
        private_folder(path)  # a run without a whole round leaves none
        RunFolder(path).write_json("error.json", {"error": str(error)})
        if not keep_state:
            _drop_state(path)
        raise
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        raise HomebodyError(f"{recipe.name} does not fit in memory: {str(error).splitlines()[-1][-200:]}") from error
    wanted = unprobed(path, probes)
    refused = _probe(recipe, path, watcher, wanted) if wanted else {}
    if not keep_state and not refused:  # what could not be looked at now can be later
        _drop_state(path)
    return {**result, "refused": refused} if refused else {**result}


def unprobed(path: Path, probes: Sequence[str]) -> list[str]:
    """The probes that a cell has no answer of yet."""
    return [name for name in probes if not looking.file_of(path, name).exists()]


def _probe(recipe: Recipe, path: Path, watcher: Watcher, probes: Sequence[str]) -> dict[str, str]:
    """Probe a finished cell's model; a model that was removed is trained once more, in a folder beside the cell."""
    refused = {name: why for name in probes if (why := looking.lacks(name))}
    probes = [name for name in probes if name not in refused]
    if not probes:
        return refused
    if (path / "state.json").exists():
        return refused | looking.take(path, probes, watcher.looked)
    again = path.with_name(f"{path.name}-again")
    try:
        refused |= run_cell(recipe, again, watcher, probes=probes).get("refused", {})
    except HomebodyError as error:  # the cell has its result all the same
        return refused | dict.fromkeys(probes, str(error))
    for name in probes:
        if (answer := looking.file_of(again, name)).exists():
            answer.replace(looking.file_of(path, name))
    shutil.rmtree(again)
    return refused


def cell_key(recipe: Recipe) -> str:
    """The name of a cell's folder: from the recipe, the code, and the contents of files of one's own.

    >>> cell_key(Recipe("fedmf", "ml-100k")).rpartition("-")[0]
    'fedmf-ml-100k-strict-seed0'
    >>> cell_key(Recipe("fedmf", "ml-100k")) == cell_key(Recipe("fedmf", "ml-100k", fields={"factors": 8}))
    False
    """
    parts = {"recipe": recipe.to_toml().encode(), "code": code_version(recipe).encode(), **_own_files(recipe)}
    return f"{recipe.name}-{fingerprint(parts)[:12]}"


def _own_files(recipe: Recipe) -> dict[str, bytes]:
    """Hashes of the user's own files that a recipe names: a changed file makes another cell."""
    named = {name: getattr(recipe, name) for name in ("data", "user_features", "item_features", "impressions")}
    named.update({f"view {name}": file for name, file in (recipe.views or {}).items()})
    files = {name: Path(file.removeprefix("sqlite:///")) for name, file in named.items() if file}
    return {name: sha256(file).encode() for name, file in files.items() if file.is_file()}


def code_version(recipe: Recipe | None = None) -> str:
    """A fingerprint of this package's code, and of the recipe's method where it is a file of one's own."""
    file, colon, _ = (recipe.method if recipe else "").rpartition(":")
    if not (colon and file.endswith(".py") and Path(file).is_file()):
        return code_fingerprint()
    return fingerprint({"package": code_fingerprint().encode(), "method": Path(file).read_bytes()})


@cache
def commit() -> str:
    """The commit of the source checkout, "+changes" if the package differs from it; else the version."""

    def git(*arguments: str) -> str:
        # Without a lock: killed while it holds one, it would leave it in somebody's checkout.
        command = ["git", "--no-optional-locks", *arguments]
        return subprocess.run(command, cwd=PACKAGE, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed package may lie in anyone's checkout
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return __version__


@dataclass
class _Cells:
    """One call of `run_cells`: the cells to run, and their results so far."""

    root: Path
    watch: Callable[[CellProgress], object]
    say: Callable[[str], None]
    on_error: Literal["raise", "keep"]
    keep_state: bool
    more: Callable[[], Recipe | None]
    data: InMemory | None

    def __post_init__(self) -> None:
        self.recipes: list[Recipe] = []
        self.places: dict[str, list[int]] = {}
        self.probes: dict[str, list[str]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.at: dict[str, tuple[int, int]] = {}
        """Rounds that are done of each, and how many are planned."""
        self.stopping: set[str] = set()

    def run(self, recipes: Sequence[Recipe], probes: Sequence[Sequence[str]], jobs: int) -> list[dict[str, Any]]:
        for place, recipe in enumerate(recipes):
            self._enter(recipe, probes[place] if probes else ())
        known = [key for key in self.places if _needs_nothing(self.root / key, self.probes[key])]
        for key in known:
            self._run_here(key)
        todo = [key for key in self.places if key not in self.results]
        for key in todo:
            _wait_for(self.root / key)
        if jobs == 1:
            for key in todo:
                self._run_here(key)
            while (another := self.more()) is not None:
                self._run_here(self._enter(another))
        else:
            self._run_apart(todo, jobs)
        return [self.results[cell_key(recipe)] for recipe in self.recipes]

    def _enter(self, recipe: Recipe, probes: Sequence[str] = ()) -> str:
        recipe.check()
        key = cell_key(recipe)
        self.places.setdefault(key, []).append(len(self.recipes))
        self.recipes.append(recipe)
        known = self.probes.setdefault(key, [])
        known += [name for name in probes if name not in known]
        self.at.setdefault(key, (0, 0))
        return key

    def _run_here(self, key: str) -> None:
        recipe, path, probes = self._recipe(key), self.root / key, self.probes[key]
        select = recipe.selects()

        def on_round(line: Round) -> None:
            measured = {line.step: line.metrics[select]} if select in line.metrics else {}
            self._progress(key, line.step, self.at[key][1], measured)
            if key in self.stopping:
                raise Stopped

        watcher = Watcher(
            say=self.say,
            start=lambda rounds: self._progress(key, 0, rounds),
            on_round=on_round,
            looked=lambda done, steps: self._progress(key, done, steps),
        )
        try:
            result = run_cell(recipe, path, watcher, keep_state=self.keep_state, probes=probes, data=self.data)
        except Stopped:
            self._finish(key, {"cut_short": True})
        except HomebodyError as error:
            self._fail(key, error)
        else:
            self._finish(key, result)

    def _run_apart(self, todo: list[str], jobs: int) -> None:
        from homebody.studies.workers import Pool  # here, so that `-m homebody.studies.workers` imports it once

        with Pool(jobs) as pool:
            for key in todo:
                pool.add(key, self._task(key))
            self._fill(pool)
            for key, message in pool.messages():
                if "say" in message:
                    self.say(message["say"])
                elif "planned" in message:
                    self._progress(key, message["done"], message["planned"], dict(message.get("measured", ())))
                    if key in self.stopping:
                        pool.stop(key)
                elif "error" in message:
                    self._fail(key, (Diverged if message.get("diverged") else HomebodyError)(message["error"]))
                elif key in self.stopping:  # also if it was done before it could be stopped
                    self._finish(key, {"cut_short": True})
                else:
                    self._finish(key, message["result"])
                self._fill(pool)

    def _fill(self, pool: Pool) -> None:
        """Give the pool more to do, as long as it has room."""
        while pool.has_room and (recipe := self.more()) is not None:
            key = self._enter(recipe)
            if key in self.results or _needs_nothing(self.root / key, self.probes[key]):
                self._run_here(key)
            else:
                _wait_for(self.root / key)
                pool.add(key, self._task(key))

    def _task(self, key: str) -> dict[str, Any]:
        recipe = self._recipe(key)
        return {
            "recipe": recipe.to_toml(),
            "code": _trusted(recipe),
            "path": str(self.root / key),
            "keep_state": self.keep_state,
            "probes": self.probes[key],
        }

    def _recipe(self, key: str) -> Recipe:
        return self.recipes[self.places[key][0]]

    def _progress(self, key: str, done: int, planned: int, measured: Mapping[int, float] | None = None) -> None:
        self.at[key] = done, planned
        self._tell(key, measured or {})

    def _fail(self, key: str, error: HomebodyError) -> None:
        if self.on_error == "raise":
            raise error
        recipe = self._recipe(key)
        named = {"method": recipe.method, "data": recipe.data, "protocol": recipe.protocol, "seed": recipe.seed}
        failure = {"error": str(error), "diverged": isinstance(error, Diverged)}
        self._finish(key, {**failure, **named, "run": str(self.root / key)})

    def _finish(self, key: str, result: dict[str, Any]) -> None:
        self.results[key] = result
        done, planned = self.at[key]
        self._progress(key, planned if not result.keys() & {"error", "cut_short"} else done, planned)

    def _tell(self, key: str, measured: Mapping[int, float]) -> None:
        finished = sum(len(self.places[other]) for other in self.results)
        for place in self.places[key]:
            now = CellProgress(place, self.recipes[place], *self.at[key], finished, self.results.get(key), measured)
            if self.watch(now) is True:
                self.stopping.add(key)


def _trusted(recipe: Recipe) -> str:
    """The SHA-256 of the file that a recipe's method is from, which must be trusted here; empty for any other."""
    if (code := code_of(recipe.method)) is None:
        return ""
    find(recipe.method)
    return code.sha256


def _needs_nothing(path: Path, probes: Sequence[str]) -> bool:
    """Whether a cell need not run: it diverged before, or it has its result and these probes' answers."""
    return (path / "error.json").exists() or ((path / "result.json").exists() and not unprobed(path, probes))


def _wait_for(path: Path) -> None:
    """Wait until a cell's folder is free. We hold the root, so only a dying worker of a killed process can hold it."""
    if not path.exists():
        return
    for patience in range(PATIENCE, -1, -1):
        try:
            with RunFolder(path).alone():
                return
        except HomebodyError:
            if not patience:
                raise
        time.sleep(0.1)


def _drop_state(path: Path) -> None:
    """Remove a cell's model. The pointer goes first: a pointer to a missing file would look like damage."""
    for file in (path / "state.json", *path.glob("state-*.safetensors")):
        file.unlink(missing_ok=True)


def _ignore(_: Any) -> None:
    """A listener that does nothing."""


def _nothing() -> None:
    """There are no more recipes."""

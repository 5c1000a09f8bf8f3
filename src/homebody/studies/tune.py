"""Look for better hyper-parameters: trials over a search space, chosen on validation, kept and continued.

| file       | what                                                                              |
|------------|-----------------------------------------------------------------------------------|
| study.json | what was asked, every trial with its validation metric, and the best               |
| best.toml  | the recipe of the best trial                                                       |
| trials/    | a run's record for each trial and seed                                             |
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError, several
from homebody.evaluation.metrics import ERRORS
from homebody.files import insisting, private_folder
from homebody.methods import find
from homebody.recipe import Recipe, fingerprint
from homebody.report import RunFolder
from homebody.run import Watcher, prepare
from homebody.settings import check_counts, params
from homebody.studies.cells import CellProgress, cell_key, code_version, commit, count_done, run_cells
from homebody.studies.space import Space, points, space_text

__all__ = ["Search", "command", "tune"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Search:
    """A search for hyper-parameters: a recipe, the ranges of its fields, and how many trials."""

    recipe: Recipe
    """Its `fields` are fixed; its seed is the first one, and that of the draw."""
    space: Space
    trials: int = 8
    seeds: int = 1

    @property
    def name(self) -> str:
        """The folder's name. It does not depend on the number of trials, so a search can be extended."""
        asked = {"recipe": self.recipe.to_toml(), "space": _texts(self.space), "seeds": self.seeds}
        short = (self.recipe.short_method, Path(self.recipe.data).stem)
        readable = "-".join(re.sub(r"[^\w.-]+", "_", part)[:40] for part in short)
        return f"tune-{readable}-{fingerprint({'study': json.dumps(asked).encode()})[:12]}"

    def settings(self) -> list[dict[str, Any]]:
        """The varied fields of each trial: the defaults first, and none twice; fewer if there are no more."""
        defaults = {spec.name: spec.default for spec in params(find(self.recipe.method))}
        first = {name: defaults[name] for name in self.space}
        others = (point for point in points(self.space, self.recipe.seed) if point != first)
        return [first, *islice(others, self.trials - 1)]

    def recipes(self, setting: dict[str, Any]) -> list[Recipe]:
        """A trial's runs, one for each seed."""
        chosen = {**self.recipe.fields, **setting}
        return [replace(self.recipe, fields=chosen, seed=self.recipe.seed + k) for k in range(self.seeds)]


def tune(
    search: Search,
    out: Path,
    *,
    jobs: int = 1,
    watch: Callable[[CellProgress, dict[str, Any]], None] | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Run the trials that are not done yet and return the record; `watch` receives it as it grows."""
    _check(search)
    check_counts(jobs=jobs)
    watcher = watcher or Watcher()
    path = out / search.name
    settings = search.settings()
    recipes = [recipe for setting in settings for recipe in search.recipes(setting)]
    if count_done(recipes, path / "trials") < len(recipes):
        prepare(recipes[0], watcher)
    if len(settings) < search.trials:
        watcher.say(f"There are only {len(settings)} different settings to try.")
    with insisting(f"No search can be written below {out}"):
        private_folder(path)
    folder = RunFolder(path)
    with folder.alone():
        watcher.begun(path)
        results: list[dict[str, Any] | None] = [None] * len(recipes)
        record = _record(search, settings, recipes, results)
        folder.write_json("study.json", record)

        def progress(now: CellProgress) -> None:
            nonlocal record
            if now.result is not None:
                results[now.cell] = now.result
                trial = now.cell // search.seeds
                if None not in results[trial * search.seeds : (trial + 1) * search.seeds]:
                    record = _record(search, settings, recipes, results)
                    folder.write_json("study.json", record)
            if watch:
                watch(now, record)

        run_cells(
            recipes, path / "trials", jobs=jobs, watch=progress, say=watcher.say, on_error="keep", keep_state=False
        )
        best = record["best"]
        if best is None:
            first = next(row["error"] for row in record["trials"])
            raise HomebodyError(f"None of {several(len(settings), 'trial')} came to an end; the first: {first}")
        folder.write_text("best.toml", search.recipes(settings[best["trial"]])[0].to_toml())
        return {**record, "study": str(path)}


def command(recipe: Recipe) -> str:
    """What to type to run a recipe.

    >>> command(Recipe("fedmf", "ml-100k", fields={"factors": 8}, rounds=20, filters={"core": 5}))
    'homebody run fedmf --data ml-100k --rounds 20 --filter core=5 --set factors=8'
    """
    return shlex.join(["homebody", "run", recipe.method, *recipe.options()])


def _check(search: Search) -> None:
    recipe = search.recipe
    recipe.check()
    recipe.build()
    check_counts(trials=search.trials, seeds=search.seeds)
    if not recipe.selects().startswith("valid/"):
        raise HomebodyError(f"Trials are chosen on validation, by a metric under valid/, not by '{recipe.selects()}'.")
    for name in search.space:
        if name in recipe.fields:
            raise HomebodyError(f"{name} is fixed and searched at once: leave out --set {name} or --search {name}.")
    if not search.space and search.trials > 1:
        raise HomebodyError(
            f"There is nothing to vary in {recipe.short_method}: name a field and where to look, "
            "as --search field=low:high."
        )


def _record(
    search: Search, settings: list[dict[str, Any]], recipes: list[Recipe], results: list[dict[str, Any] | None]
) -> dict[str, Any]:
    """All that is known so far. Only the best trial's test metrics are in it, and only once all are done."""
    trials = []
    for number, setting in enumerate(settings):
        part = slice(number * search.seeds, (number + 1) * search.seeds)
        trials.append({"trial": number, "fields": setting, **_outcome(search, recipes[part], results[part])})
    done = [trial for trial in trials if trial["status"] == "done"]
    best: dict[str, Any] | None = None
    if done:
        sign = -1.0 if search.recipe.selects().rpartition("/")[2] in ERRORS else 1.0
        top = max(done, key=lambda trial: (sign * trial["validation"], -trial["trial"]))
        chosen = search.recipes(settings[top["trial"]])[0]
        best = {name: top[name] for name in ("trial", "fields", "validation")}
        best |= {"command": command(chosen), "test": None}
        if None not in results:
            part = slice(top["trial"] * search.seeds, (top["trial"] + 1) * search.seeds)
            tested = [result["metrics"] for result in results[part] if result]
            best["test"] = {name: statistics.fmean(metrics[name] for metrics in tested) for name in tested[0]}
    known = {name: value for name, value in asdict(search.recipe).items() if value is not None}
    return {
        "schema": SCHEMA_VERSION,
        "spec": {
            "method": search.recipe.method,
            "data": search.recipe.data,
            "trials": search.trials,
            "seeds": search.seeds,
            "select": search.recipe.selects(),
            "search": _texts(search.space),
            "recipe": known,
        },
        "commit": commit(),
        "code": code_version(search.recipe),
        "complete": None not in results,
        "trials": trials,
        "best": best,
    }


def _outcome(search: Search, recipes: list[Recipe], results: list[dict[str, Any] | None]) -> dict[str, Any]:
    """What came of one trial."""
    runs = [f"trials/{cell_key(recipe)}" for recipe in recipes]
    known = [result for result in results if result is not None]
    nothing = {"validation": None, "by_seed": None, "seconds": None, "runs": runs}
    if len(known) < len(results):
        return {"status": "waiting", **nothing}
    failed = [result["error"] for result in known if "error" in result]
    if failed:
        return {"status": "failed", **nothing, "error": failed[0]}
    metric = search.recipe.selects().removeprefix("valid/")
    values = [float(result["validation"][metric]) for result in known]
    seconds = sum(result["seconds"] for result in known)
    return {
        "status": "done",
        "validation": statistics.fmean(values),
        "by_seed": values,
        "seconds": seconds,
        "runs": runs,
    }


def _texts(space: Space) -> dict[str, str]:
    return {name: space_text(where) for name, where in space.items()}

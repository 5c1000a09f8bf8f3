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

from homebody.counts import several
from homebody.errors import HomebodyError
from homebody.evaluation.metrics import ERRORS
from homebody.files import private_folder
from homebody.methods import find
from homebody.params import params
from homebody.recipe import Recipe, fingerprint
from homebody.report import RunFolder
from homebody.run import Watcher, check
from homebody.studies.cells import Progress, cell_key, check_jobs, code_version, commit, is_finished, run_cells
from homebody.studies.space import Space, points, space_text

__all__ = ["Study", "command", "tune"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Study:
    """What is tried: a recipe, where to look, and how often."""

    recipe: Recipe
    """Its `fields` are fixed; its seed is the first one, and that of the draw."""
    space: Space
    trials: int = 8
    seeds: int = 1

    @property
    def name(self) -> str:
        """A folder's name. More trials are the same study, so that it can go on."""
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
    study: Study,
    out: Path,
    *,
    jobs: int = 1,
    watch: Callable[[Progress, dict[str, Any]], None] | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Run the trials that are not done yet, and give the study's record; `watch` gets it as it grows."""
    _check(study)
    check_jobs(jobs)
    watcher = watcher or Watcher()
    path = out / study.name
    settings = study.settings()
    recipes = [recipe for setting in settings for recipe in study.recipes(setting)]
    if not all(is_finished(path / "trials" / cell_key(recipe)) for recipe in recipes):
        check(recipes[0], watcher)
    if len(settings) < study.trials:
        watcher.say(f"There are only {len(settings)} different settings to try.")
    try:
        private_folder(path)
    except OSError as error:
        raise HomebodyError(f"No study can be written below {out}: {error.strerror}.") from error
    folder = RunFolder(path)
    with folder.alone():
        watcher.begun(path)
        results: list[dict[str, Any] | None] = [None] * len(recipes)
        record = _record(study, settings, recipes, results)
        folder.write_json("study.json", record)

        def progress(now: Progress) -> None:
            nonlocal record
            if now.result is not None:
                results[now.cell] = now.result
                trial = now.cell // study.seeds
                if None not in results[trial * study.seeds : (trial + 1) * study.seeds]:
                    record = _record(study, settings, recipes, results)
                    folder.write_json("study.json", record)
            if watch:
                watch(now, record)

        run_cells(
            recipes,
            path / "trials",
            jobs=jobs,
            watch=progress,
            say=watcher.say,
            on_error="keep",
            keep_state=False,
        )
        best = record["best"]
        if best is None:
            first = next(row["error"] for row in record["trials"])
            raise HomebodyError(f"None of {several(len(settings), 'trial')} came to an end; the first: {first}")
        folder.write_text("best.toml", study.recipes(settings[best["trial"]])[0].to_toml())
        return {**record, "study": str(path)}


def command(recipe: Recipe) -> str:
    """What to type to run a recipe.

    >>> command(Recipe("fedmf", "ml-100k", fields={"factors": 8}, rounds=20, filters={"core": 5}))
    'homebody run fedmf --data ml-100k --rounds 20 --filter core=5 --set factors=8'
    """
    return shlex.join(["homebody", "run", recipe.method, *recipe.options()])


def _check(study: Study) -> None:
    recipe = study.recipe
    recipe.check()
    recipe.build()
    if study.trials < 1:
        raise HomebodyError(f"Trials must be at least 1, not {study.trials}.")
    if study.seeds < 1:
        raise HomebodyError(f"Seeds must be at least 1, not {study.seeds}.")
    if not recipe.selects().startswith("valid/"):
        raise HomebodyError(f"Trials are chosen on validation, by a metric under valid/, not by '{recipe.selects()}'.")
    for name in study.space:
        if name in recipe.fields:
            raise HomebodyError(f"{name} is fixed and searched at once: leave out --set {name} or --search {name}.")
    if not study.space and study.trials > 1:
        raise HomebodyError(
            f"There is nothing to vary in {recipe.short_method}: name a field and where to look, "
            "as --search field=low:high."
        )


def _record(
    study: Study, settings: list[dict[str, Any]], recipes: list[Recipe], results: list[dict[str, Any] | None]
) -> dict[str, Any]:
    """All that is known so far. Only the best trial's test metrics are in it, and only once all are done."""
    trials = []
    for number, setting in enumerate(settings):
        part = slice(number * study.seeds, (number + 1) * study.seeds)
        trials.append({"trial": number, "fields": setting, **_outcome(study, recipes[part], results[part])})
    done = [trial for trial in trials if trial["status"] == "done"]
    best: dict[str, Any] | None = None
    if done:
        sign = -1.0 if study.recipe.selects().rpartition("/")[2] in ERRORS else 1.0
        top = max(done, key=lambda trial: (sign * trial["validation"], -trial["trial"]))
        chosen = study.recipes(settings[top["trial"]])[0]
        best = {name: top[name] for name in ("trial", "fields", "validation")}
        best |= {"command": command(chosen), "test": None}
        if None not in results:
            part = slice(top["trial"] * study.seeds, (top["trial"] + 1) * study.seeds)
            best["test"] = _mean([result["metrics"] for result in results[part] if result])
    known = {name: value for name, value in asdict(study.recipe).items() if value is not None}
    return {
        "schema": SCHEMA_VERSION,
        "spec": {
            "method": study.recipe.method,
            "data": study.recipe.data,
            "trials": study.trials,
            "seeds": study.seeds,
            "select": study.recipe.selects(),
            "search": _texts(study.space),
            "recipe": known,
        },
        "commit": commit(),
        "code": code_version(study.recipe),
        "complete": None not in results,
        "trials": trials,
        "best": best,
    }


def _outcome(study: Study, recipes: list[Recipe], results: list[dict[str, Any] | None]) -> dict[str, Any]:
    """What came of one trial."""
    runs = [f"trials/{cell_key(recipe)}" for recipe in recipes]
    known = [result for result in results if result is not None]
    failed = next((result["error"] for result in known if "error" in result), None)
    nothing = {"validation": None, "by_seed": None, "seconds": None, "runs": runs}
    if len(known) < len(results):
        return {"status": "waiting", **nothing}
    if failed is not None:
        return {"status": "failed", **nothing, "error": failed}
    metric = study.recipe.selects().removeprefix("valid/")
    values = [float(result["validation"][metric]) for result in known]
    return {
        "status": "done",
        "validation": statistics.fmean(values),
        "by_seed": values,
        "seconds": sum(result["seconds"] for result in known),
        "runs": runs,
    }


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in metrics) for name in metrics[0]}


def _texts(space: Space) -> dict[str, str]:
    return {name: space_text(where) for name, where in space.items()}

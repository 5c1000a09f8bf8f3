"""From a recipe to a finished run: load, split, fit, record."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from homebody.core import Evaluated, Method
from homebody.data import Population, load
from homebody.data.splits import Split, leave_one_out
from homebody.errors import HomebodyError
from homebody.evaluation import Block, describe, questions, summarise
from homebody.fit import Best, Fitted, Round, fit
from homebody.privacy import OBSERVERS, Charge, Ledger, NonPrivate
from homebody.recipe import Recipe, fingerprint
from homebody.reference import Reference, Score
from homebody.report import RunFolder
from homebody.rng import Rng
from homebody.runtime import Simulator, usable_device

__all__ = ["Watcher", "check", "execute", "reopen", "resume"]

SCORES_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Watcher:
    """What wants to know how a run goes; each may do nothing."""

    say: Callable[[str], None] = lambda text: None
    begun: Callable[[Path], None] = lambda folder: None
    start: Callable[[int], None] = lambda rounds: None
    on_round: Callable[[Round], None] = lambda line: None
    fetched: Callable[[int, int | None], None] | None = None


QUIET = Watcher()


def execute(recipe: Recipe, out: Path, watcher: Watcher = QUIET, name: str | None = None) -> dict[str, Any]:
    """Run a recipe in a new folder below `out`. Nothing is written before everything given was checked.

    name: what the folder is called, exactly; by default after the recipe and the time.
    """
    method, split = _prepare(recipe, watcher)
    recipe = replace(recipe, rounds=_rounds(recipe, method))
    stamped = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = RunFolder.create(out, name or stamped, exact=name is not None)
    with folder.alone():
        try:
            folder.write_text("recipe.toml", recipe.to_toml())
            folder.write_json("environment.json", environment(recipe, method, split))
            watcher.begun(folder.path)
            return _run(recipe, method, split, folder, watcher)
        except BaseException as error:
            if not folder.rounds():
                shutil.rmtree(folder.path, ignore_errors=True)
            elif isinstance(error, HomebodyError):
                raise type(error)(f"{error} The rounds before are recorded in {folder.path}.") from error
            raise


def check(recipe: Recipe, watcher: Watcher = QUIET) -> None:
    """Refuse a recipe that could not run, as `execute` would; nothing is written."""
    _prepare(recipe, watcher)


def resume(path: Path, watcher: Watcher = QUIET) -> dict[str, Any]:
    """Go on with a run that was cut short; a complete one just says its result."""
    folder = RunFolder.open(path)
    with folder.alone():
        watcher.begun(path)
        if (path / "result.json").exists():
            Ledger(folder.ledger_path).close()  # refuses a chain that is broken
            return {**folder.read_json("result.json"), "run": str(path)}
        recipe = Recipe.from_toml(folder.recipe_text())
        method, split = _prepare(recipe, watcher)
        now = environment(recipe, method, split)
        if (path / "environment.json").exists():
            _insist_on_same(folder, now)
        else:  # killed in its very first moment
            folder.write_json("environment.json", now)
        folder.check_rounds()
        return _run(recipe, method, split, folder, watcher)


def reopen(path: Path) -> tuple[Fitted, Population]:
    """A finished run's model, ready to recommend, and the population it was trained on."""
    folder = RunFolder.open(path)
    folder.read_json("result.json")
    recipe = Recipe.from_toml(folder.recipe_text())
    method, split = _prepare(recipe, QUIET)
    _insist_on_same(folder, environment(recipe, method, split))
    if isinstance(method, Reference):
        raise HomebodyError(f"{recipe.method} is a centralised reference: its run keeps figures, not a model.")
    progress = folder.read()
    if progress is None:
        raise HomebodyError(f"{path} holds no model.")
    acting = method.phases[-1].method or method
    runtime = Simulator(split, device=recipe.device, fused=recipe.fused)
    runtime.begin(acting, Rng.of(recipe.seed, method.phases[-1].name).fold("clients"))
    best = progress.best or Best(progress.step, Evaluated({}), progress.shared, progress.clients)
    runtime.load_state(best.clients)
    shared = {name: value.to(runtime.device) for name, value in best.shared.items()}
    fitted = Fitted(acting, runtime, shared, best.evaluated, best.step, Ledger(folder.ledger_path))
    return fitted, split.population


def _insist_on_same(folder: RunFolder, now: dict[str, Any]) -> None:
    then = folder.read_json("environment.json")
    for name, meaning in (("data_fingerprint", "The data"), ("method_fingerprint", "The method's file")):
        if now[name] != then.get(name):
            raise HomebodyError(f"{meaning} changed since {folder.path} was begun: the two do not belong together.")


def environment(recipe: Recipe, method: Method | Reference, split: Split) -> dict[str, Any]:
    """What the numbers of a run may depend on."""
    file = sys.modules[type(method).__module__].__file__
    own = recipe.method.rpartition(":")[0].endswith(".py")
    return {
        "homebody": version("homebody"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "numpy", "numba", "polars")},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if recipe.device.startswith("cuda") else "cpu",
        "randomness": "simulated: every number derives from the seed",
        "data_fingerprint": fingerprint({"indptr": split.indptr.data, "items": np.ascontiguousarray(split.items).data}),
        "method_fingerprint": fingerprint({"file": Path(file).read_bytes()}) if own and file else "",
    }


def _prepare(recipe: Recipe, watcher: Watcher) -> tuple[Method | Reference, Split]:
    recipe.check()
    usable_device(recipe.device)
    method = recipe.build()
    _rounds(recipe, method)
    population: Population = load(
        recipe.data, data_dir=recipe.data_dir, say=watcher.say, progress=watcher.fetched, **recipe.columns
    )
    split = leave_one_out(
        population,
        protocol=recipe.protocol,
        how=recipe.held_out,
        seed=recipe.seed,
        negatives=recipe.negatives,
    )
    for note in split.notes:
        watcher.say(note)
    if recipe.cohort is not None and not 1 <= recipe.cohort <= (split.lengths > 0).sum():
        raise HomebodyError(
            f"A cohort has 1 to {(split.lengths > 0).sum()} clients with this data, not {recipe.cohort}."
        )
    return method, split


def _rounds(recipe: Recipe, method: Method | Reference) -> int:
    if recipe.rounds is not None and recipe.rounds < 1:
        raise HomebodyError(f"Rounds must be at least 1, not {recipe.rounds}.")
    return recipe.rounds or method.default_rounds


def _run(
    recipe: Recipe, method: Method | Reference, split: Split, folder: RunFolder, watcher: Watcher
) -> dict[str, Any]:
    cpu = time.process_time()
    ledger = Ledger(folder.ledger_path)
    try:
        if isinstance(method, Reference):
            evaluated, chosen = _reference(recipe, method, split, folder, ledger, watcher)
        else:
            fitted = _federated(recipe, method, split, folder, ledger, watcher)
            evaluated, chosen = fitted.evaluated, fitted.chosen
        folder.add_ranks(evaluated)
        lines = folder.rounds()
        per_client = sum(line["clients"] for line in lines)
        result = {
            "method": recipe.method,
            "data": Path(recipe.data).name if Path(recipe.data).is_file() else recipe.data,
            "protocol": recipe.protocol,
            "meaning": describe(recipe.protocol, split.how, min(split.negatives, split.n_items - 1)),
            "seed": recipe.seed,
            "rounds": len(lines),
            "chosen_round": chosen,
            "metrics": {n: v for n, v in evaluated.metrics.items() if not n.startswith("valid/")},
            "validation": {n.removeprefix("valid/"): v for n, v in evaluated.metrics.items() if n.startswith("valid/")},
            "epsilon": ledger.epsilons(),
            "epsilon_unit": "user",
            "bytes_up": round(sum(line["bytes_up"] for line in lines) / per_client),
            "bytes_down": round(sum(line["bytes_down"] for line in lines) / per_client),
            "seconds": sum(line["seconds"] + line["evaluation_seconds"] for line in lines),
            "seconds_per_round": statistics.median(line["seconds"] for line in lines),
            "cpu_seconds": time.process_time() - cpu,
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "notes": list(split.notes),
            "run": str(folder.path),
        }
        folder.write_json("result.json", result)
        return folder.read_json("result.json")
    finally:
        ledger.close()


def _federated(
    recipe: Recipe, method: Method, split: Split, folder: RunFolder, ledger: Ledger, watcher: Watcher
) -> Fitted:
    assert recipe.rounds is not None
    watcher.start(sum(phase.rounds or recipe.rounds for phase in method.phases))

    def on_round(line: Round) -> None:
        folder.add_round(line)
        watcher.on_round(line)

    return fit(
        method,
        Simulator(split, device=recipe.device, fused=recipe.fused),
        rounds=recipe.rounds,
        cohort=recipe.cohort,
        seed=recipe.seed,
        ledger=ledger,
        evaluate_every=recipe.evaluate_every,
        select=recipe.select,
        on_round=on_round,
        checkpoints=folder,
    )


def _reference(
    recipe: Recipe, method: Reference, split: Split, folder: RunFolder, ledger: Ledger, watcher: Watcher
) -> tuple[Evaluated, int]:
    """Every pass is evaluated like a round; the best on validation stands."""
    assert recipe.rounds is not None
    watcher.start(recipe.rounds)
    raw = NonPrivate("raw data collected")
    ledger.charge("collection", [Charge(observer, "user", raw) for observer in OBSERVERS], repeat=True)
    folder.load()  # takes back what an interrupted attempt recorded
    histories = split.histories()
    people = int((split.lengths > 0).sum())
    best, chosen = Evaluated({}), 0
    began = time.perf_counter()
    for step, score in enumerate(islice(method.fit(histories, recipe.seed), recipe.rounds), start=1):
        trained = time.perf_counter()
        asked = step % recipe.evaluate_every == 0 or step == recipe.rounds
        found = _ask(split, score) if asked or not chosen else Evaluated({})
        if found.metrics and (not chosen or found.metrics[recipe.select] > best.metrics[recipe.select]):
            best, chosen = found, step
        line = Round(
            phase="fit",
            round=step,
            step=step,
            clients=people if step == 1 else 0,  # they send what they have once
            loss=None,
            metrics=found.metrics,
            epsilon=ledger.epsilons(),
            bytes_up=histories.items.nbytes if step == 1 else 0,
            bytes_down=0,
            seconds=trained - began,
            evaluation_seconds=time.perf_counter() - trained,
        )
        folder.add_round(line)
        watcher.on_round(line)
        began = time.perf_counter()
    return best, chosen


def _ask(split: Split, score: Score) -> Evaluated:
    """What a reference's scores are worth."""
    everything = torch.arange(split.n_items)

    def blocks() -> Iterator[Block]:
        asked = split.asked()
        size = max(1, SCORES_AT_ONCE // split.n_items)
        for start in range(0, len(asked), size):
            users = asked[start : start + size]
            yield Block(users, score(users, everything), questions(split, users))

    return summarise(blocks())

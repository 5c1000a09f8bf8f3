"""From a recipe to a finished run: load, split, fit, record."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from homebody.core import Cohort, Evaluated, Method, releases
from homebody.counts import several
from homebody.data import Population, load
from homebody.data.partitions import split as split_population
from homebody.data.splits import Split
from homebody.errors import Diverged, HomebodyError
from homebody.evaluation import describe, measure, sliced
from homebody.fit import Fitted, diverged, fit, origin, phase_rng
from homebody.methods import code_of, trust
from homebody.privacy import OBSERVERS, Channel, Charge, Ledger, NonPrivate
from homebody.privacy.limits import calibrated
from homebody.privacy.reports import sealed_bytes, tally
from homebody.privacy.specs import stage_texts, with_noise
from homebody.progress import Best, Round, better
from homebody.recipe import Recipe
from homebody.reference import Reference
from homebody.report import RunFolder
from homebody.report.record import Result
from homebody.run_notes import (
    changes,
    counted,
    digest_of,
    environment,
    guessing,
    notes_of,
    parameters_of,
    refuse_found,
    result_of,
    unheld,
)
from homebody.simulation import Simulator, usable_device
from homebody.stopwatch import Stopwatch

__all__ = [
    "Watcher",
    "check",
    "cohort_of",
    "execute",
    "population_of",
    "prepare",
    "reopen",
    "resume",
    "simulator",
    "trust_folder",
]


@dataclass(frozen=True)
class Watcher:
    """What wants to know how a run goes; each may do nothing."""

    say: Callable[[str], None] = lambda text: None
    begun: Callable[[Path], None] = lambda folder: None
    start: Callable[[int], None] = lambda rounds: None
    on_round: Callable[[Round], None] = lambda line: None
    looked: Callable[[int, int], None] = lambda done, steps: None
    """How far something is that is done with the finished model, of how many steps."""
    fetched: Callable[[int, int | None], None] | None = None


QUIET = Watcher()
CHANGED = (
    "What shapes a release changed while this run was going on (recipe, code, data or machine): all that was released "
    "before and after is charged."
)


def execute(recipe: Recipe, out: Path, watcher: Watcher = QUIET, name: str | None = None) -> Result:
    """Run a recipe in a new folder below `out`. Nothing is written before everything given was checked.

    name: what the folder is called, exactly; by default after the recipe and the time.
    """
    method, split = prepare(recipe, watcher)
    recipe = replace(recipe, rounds=_rounds(recipe, method), cohort=cohort_of(recipe, method, split))
    recipe, method = _calibrated(recipe, method, split, watcher)
    stamped = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    there = out.exists()
    folder = RunFolder.create(out, name or stamped, exact=name is not None)
    with folder.alone():
        try:
            folder.write_text("recipe.toml", recipe.to_toml())
            folder.write_json("environment.json", now := environment(recipe, method, split))
            watcher.begun(folder.path)
            return _run(recipe, method, split, folder, now, watcher)
        except BaseException as error:
            if not folder.rounds():
                shutil.rmtree(folder.path, ignore_errors=True)
                if not there:
                    with contextlib.suppress(OSError):  # somebody else began to write there
                        out.rmdir()
            elif isinstance(error, HomebodyError):
                raise type(error)(f"{error} The rounds before are recorded in {folder.path}.") from error
            raise


def check(recipe: Recipe, watcher: Watcher = QUIET) -> None:
    """Refuse a recipe that could not run, as `execute` would; nothing is written."""
    prepare(recipe, watcher)


def resume(path: Path, watcher: Watcher = QUIET, *, trust_code: bool = False) -> Result:
    """Go on with a run that was cut short; a complete one just says its result.

    trust_code: run the file that its recipe names as the method; without it, such a run is refused.
    """
    folder = RunFolder.open(path)
    if trust_code:
        trust_folder(path, watcher.say)
    with folder.alone():
        watcher.begun(path)
        if (path / "result.json").exists():
            Ledger(folder.ledger_path).close()  # refuses a chain that is broken
            return folder.result()
        recipe = Recipe.from_toml(folder.recipe_text())
        method, split = prepare(recipe, watcher)
        now = environment(recipe, method, split)
        if (path / "environment.json").exists():
            _insist_on_same(folder, now)
        else:  # killed in its very first moment
            folder.write_json("environment.json", now)
        folder.check_rounds()
        return _run(recipe, method, split, folder, now, watcher)


def trust_folder(path: Path, say: Callable[[str], None] = QUIET.say) -> None:
    """Let the code run that a run's recipe names as its method; which that is, is said first."""
    recipe = Recipe.from_toml(RunFolder.open(path).recipe_text())
    if code := code_of(recipe.method):
        say(f"{path} runs the code of {code}.")
        trust(recipe.method, code.sha256)


def reopen(path: Path, *, trust_code: bool = False) -> tuple[Fitted, Population]:
    """A finished run's model, ready to recommend, and the population it was trained on.

    trust_code: run the file that its recipe names as the method; without it, such a run is refused.
    """
    folder = RunFolder.open(path)
    if trust_code:
        trust_folder(path)
    folder.read_json("result.json")
    recipe = Recipe.from_toml(folder.recipe_text())
    method, split = prepare(recipe, QUIET)
    _insist_on_same(folder, environment(recipe, method, split))
    if isinstance(method, Reference):
        raise HomebodyError(f"{recipe.method} is a centralised reference: its run keeps figures, not a model.")
    progress = folder.read()
    if progress is None:
        raise HomebodyError(f"{path} holds no model.")
    if progress.step < (before := sum(phase.rounds or recipe.rounds or 0 for phase in method.phases[:-1])):
        raise HomebodyError(
            f"{path} ended after {several(progress.step, 'round')}, before the last stage, which begins after "
            f"{before}: it has no model that ranks anything."
        )
    acting = method.phases[-1].method or method
    runtime = simulator(recipe, split)
    runtime.begin(acting, phase_rng(recipe.seed, method.phases[-1].name, progress.digest).fold("clients"))
    best = progress.best or Best(progress.step, Evaluated({}), progress.shared, progress.clients)
    runtime.load_state(best.clients)
    shared = {name: value.to(runtime.device) for name, value in best.shared.items()}
    fitted = Fitted(acting, runtime, shared, best.evaluated, best.step, Ledger(folder.ledger_path), recipe.stated_at)
    return fitted, split.population


def _insist_on_same(folder: RunFolder, now: dict[str, Any]) -> None:
    then = folder.read_json("environment.json")
    for name, meaning in (("data_fingerprint", "The data"), ("method_fingerprint", "The method's file")):
        if now[name] != then.get(name):
            raise HomebodyError(f"{meaning} changed since {folder.path} was begun: the two do not belong together.")


def population_of(recipe: Recipe, watcher: Watcher = QUIET) -> Population:
    """The people that a recipe is about, with their features, after its filters."""
    return load(
        recipe.data,
        data_dir=recipe.data_dir,
        **cast(dict[str, Any], recipe.columns),
        user_features=recipe.user_features,
        item_features=recipe.item_features,
        kinds=recipe.kinds,
        vocabularies=recipe.vocabularies,
        impressions=recipe.impressions,
        filters=recipe.filters,
        say=watcher.say,
        progress=watcher.fetched,
    )


def prepare(recipe: Recipe, watcher: Watcher = QUIET) -> tuple[Method | Reference, Split]:
    """What a recipe names: the method and the split population, all checked; nothing is written."""
    recipe.check()
    usable_device(recipe.device)
    method = recipe.build()
    _rounds(recipe, method)
    population = population_of(recipe, watcher)
    sliced(population, recipe.slices)  # refuses what it cannot read
    if lacking := population.lacks(method.needs):
        raise HomebodyError(f"{recipe.method} needs {lacking}, which {population.name} does not have.")
    if method.scoring.predicts == "ratings":
        _refuse_unrated(recipe, population)
    split = split_population(
        population,
        recipe.split,
        protocol=recipe.protocol,
        how=recipe.held_out,
        seed=recipe.seed,
        negatives=recipe.negatives,
        public=recipe.public,
    )
    for note in (*notes_of(method, split), *recipe.unshuffled()):
        watcher.say(note)
    members = int((split.learn & (split.lengths > 0)).sum())
    if recipe.cohort is not None and not 1 <= recipe.cohort <= members:
        raise HomebodyError(f"A cohort has 1 to {members} clients with this data, not {recipe.cohort}.")
    if isinstance(method, Method):
        if any(phase.public for phase in method.phases) and not split.public.any():
            raise HomebodyError(f"{recipe.method} learns from public people here, and nobody is: give --public 0.1.")
        # Charges that cannot be stated are refused now, and so is a budget that no round fits into.
        planned = _planned(recipe, method, split)
        told = [charges for charges, _ in planned]
        refuse_found(method, split, told)
        if (budget := recipe.allowed()) and not recipe.calibrate:
            before = [charge for own in counted(method, split, told).values() for charge in own]
            for charges in told:
                budget.refuse_hopeless([*charges, *before])
    return method, split


def _refuse_unrated(recipe: Recipe, population: Population) -> None:
    """Ratings are predicted from ratings, and measured by ratings."""
    if population.ratings is None:
        raise HomebodyError(
            f"{recipe.short_method} predicts ratings with these settings, and {population.name} has none: "
            "leave out --set output=explicit, or name their column with --rating-col."
        )
    if recipe.split.partition(":")[0] == "impressions":
        raise HomebodyError("What was shown has no ratings to predict: choose another split than impressions.")


def _planned(recipe: Recipe, method: Method, split: Split) -> list[tuple[Sequence[Charge], int]]:
    """What each phase's rounds will be charged, and how many there are; nothing where all is public."""
    members = int((split.learn & (split.lengths > 0)).sum())
    asked = cohort_of(recipe, method, split)
    size = asked or members
    cohort = Cohort(np.arange(size), "fixed" if asked else "all", size, members, split.n_items)
    rounds = _rounds(recipe, method)
    charged = [phase for phase in method.phases if not phase.public]
    return [(releases(phase.method or method, cohort), phase.rounds or rounds) for phase in charged]


def _calibrated(
    recipe: Recipe, method: Method | Reference, split: Split, watcher: Watcher
) -> tuple[Recipe, Method | Reference]:
    """The recipe with the noise that spends its budget over all rounds, where that is asked for."""
    budget = recipe.allowed()
    if not recipe.calibrate or budget is None or not isinstance(method, Method):
        return recipe, method
    fixed: Method = method

    def planned(channel: Channel) -> list[tuple[Sequence[Charge], int]]:
        rounds = _planned(recipe, replace(fixed, uplink=channel), split)  # type: ignore[type-var]
        before = counted(fixed, split, [charges for charges, _ in rounds])
        return [*rounds, *((charges, 1) for charges in before.values())]

    noise = calibrated(method.uplink, budget, planned)
    stages = recipe.stages or stage_texts(method.uplink)
    recipe = replace(recipe, stages=with_noise(stages, noise), calibrate=False)
    rounds = sum(count for _, count in _planned(recipe, method, split))
    watcher.say(f"calibrated: {' → '.join(recipe.stages)} spends ε = {budget.epsilon:g} in {several(rounds, 'round')}")
    built = recipe.build()
    assert isinstance(built, Method)
    budget.refuse_hopeless(_planned(recipe, built, split)[0][0])
    return recipe, built


def cohort_of(recipe: Recipe, method: Method | Reference, split: Split) -> int | None:
    """Clients a round; a method's own number where nobody says, as far as there are so many."""
    own = method.about.cohort
    if recipe.cohort is not None or own is None:
        return recipe.cohort
    return min(own, int((split.learn & (split.lengths > 0)).sum()))


def _rounds(recipe: Recipe, method: Method | Reference) -> int:
    if recipe.rounds is not None and recipe.rounds < 1:
        raise HomebodyError(f"Rounds must be at least 1, not {recipe.rounds}.")
    return recipe.rounds or method.about.rounds


def _run(
    recipe: Recipe,
    method: Method | Reference,
    split: Split,
    folder: RunFolder,
    now: dict[str, Any],
    watcher: Watcher,
) -> Result:
    cpu = time.process_time()
    ledger = Ledger(folder.ledger_path)
    try:
        digest = digest_of(now)
        _tell_of_changes(folder, ledger, now, digest, watcher)
        if isinstance(method, Reference):
            evaluated, chosen = _reference(recipe, method, split, folder, ledger, digest, watcher)
            stopped, parameters = None, None
        else:
            fitted = _federated(recipe, method, split, folder, ledger, digest, watcher)
            evaluated, chosen, stopped = fitted.evaluated, fitted.chosen, fitted.stopped
            parameters = parameters_of(fitted, recipe.seed)
            if stopped:
                watcher.say(stopped)
        folder.add_ranks(evaluated)
        lines = folder.rounds()
        result = result_of(
            recipe,
            method,
            lines,
            evaluated,
            ledger.epsilons(recipe.stated_at),
            data=Path(recipe.data).name if Path(recipe.data).is_file() else recipe.data,
            meaning=describe(recipe.protocol, split.how, split.negatives, recipe.split, split.enough),
            chosen=chosen,
            stopped=stopped,
            notes=[
                *notes_of(method, split),
                *recipe.unshuffled(),
                *unheld(recipe, method),
                *guessing(evaluated, split),
                *([CHANGED] if len(ledger.digests()) > 1 else []),
            ],
            run=folder.path,
        )
        result["passes"] = getattr(method, "passes", getattr(method, "epochs", 1))
        result["parameters"] = parameters
        result["reports"] = _reports(recipe, method, split, len(lines))
        result["cpu_seconds"] = time.process_time() - cpu
        folder.write_json("result.json", result)
        return folder.result()
    finally:
        ledger.close()


def _tell_of_changes(folder: RunFolder, ledger: Ledger, now: dict[str, Any], digest: str, watcher: Watcher) -> None:
    """Before anything is charged: whether what follows is charged in full, and why."""
    then = folder.read_json("environment.json")
    step, before = folder.stands()
    if ledger.releases() and origin(digest, step, before, ledger) not in ledger.digests():
        why = changes(then, now)
        watcher.say(
            f"What shapes a release is not as it was when this run was charged last{why and f' ({why})'}. What follows "
            f"is another release: its noise is new, and every round from {step + 1} on is charged in full, also where "
            "it was charged before."
        )
    if then != now:
        folder.write_json("environment.json", now)


def _reports(recipe: Recipe, method: Method | Reference, split: Split, rounds: int) -> dict[str, float] | None:
    """Where devices send randomised reports: how many, what they add up to, and their bytes sealed one by one."""
    if not isinstance(method, Method):
        return None
    found = tally(_planned(recipe, method, split)[0][0], rounds)
    if found is not None and method.uplink.facts.shuffled:
        found["sealed_bytes"] = sealed_bytes(int(found["count"]))
    return found


def simulator(recipe: Recipe, split: Split) -> Simulator:
    """The runtime of a recipe."""
    return Simulator(split, device=recipe.device, fused=recipe.fused, cutoffs=recipe.measured(), slices=recipe.slices)


def _federated(
    recipe: Recipe, method: Method, split: Split, folder: RunFolder, ledger: Ledger, digest: str, watcher: Watcher
) -> Fitted:
    assert recipe.rounds is not None
    watcher.start(sum(phase.rounds or recipe.rounds for phase in method.phases))

    def on_round(line: Round) -> None:
        folder.add_round(line)
        watcher.on_round(line)

    told = [charges for charges, _ in _planned(recipe, method, split)]
    for release, charges in counted(method, split, told).items():
        ledger.charge(release, charges, repeat=True, digest=digest)
    return fit(
        method,
        simulator(recipe, split),
        rounds=recipe.rounds,
        cohort=recipe.cohort,
        seed=recipe.seed,
        ledger=ledger,
        budget=recipe.allowed(),
        delta=recipe.stated_at,
        evaluate_every=recipe.every(method),
        select=recipe.selects(),
        on_round=on_round,
        checkpoints=folder,
        digest=digest,
    )


def _reference(
    recipe: Recipe, method: Reference, split: Split, folder: RunFolder, ledger: Ledger, digest: str, watcher: Watcher
) -> tuple[Evaluated, int]:
    """Every pass is evaluated like a round; the best on validation stands."""
    assert recipe.rounds is not None
    every = recipe.every(method)
    watcher.start(recipe.rounds)
    raw = NonPrivate("raw data collected")
    if method.reads:
        told = [Charge(observer, "user", raw) for observer in OBSERVERS]
        ledger.charge("collection", told, repeat=True, digest=digest)
    folder.load()  # takes back what an interrupted attempt recorded
    histories = split.histories()
    people = int((split.lengths > 0).sum())
    best, chosen, step = Evaluated({}), 0, 0
    watch = Stopwatch()
    for step, score in enumerate(islice(method.fit(histories, recipe.seed), recipe.rounds), start=1):
        trained = watch.lap()
        due = every and (not chosen or step == recipe.rounds or step % every == 0)
        try:
            found = measure(split, score, recipe.measured(), recipe.slices) if due else Evaluated({})
        except Diverged as error:
            raise diverged(method, step, "what items are ranked by") from error
        if better(found, best if chosen else None, recipe.selects()):
            best, chosen = found, step
        line = Round(
            phase="fit",
            round=step,
            step=step,
            clients=people if step == 1 else 0,  # they send what they have once
            loss=None,
            metrics={},
            epsilon=ledger.epsilons(recipe.stated_at),
            bytes_up=histories.items.nbytes if step == 1 and method.reads else 0,
            bytes_down=0,
            seconds=trained.seconds,
            evaluation_seconds=0.0,
            delta=recipe.stated_at,
            charged=method.reads,
            compile_seconds=trained.compile_seconds,
        )
        line = line.measured(found, line.epsilon, watch.lap())
        folder.add_round(line)
        watcher.on_round(line)
        watch.lap()
    return best, chosen or step

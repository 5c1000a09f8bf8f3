"""From a recipe to a finished run: load, split, fit, record."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from homebody import run_notes
from homebody.core import Cohort, Evaluated, Method, releases
from homebody.data import Population, load
from homebody.data.partitions import split as split_population
from homebody.data.splits import Split
from homebody.data.stored import read_split, without_people, write_split
from homebody.errors import Diverged, HomebodyError, several
from homebody.evaluation import beyond, describe, measure, sliced
from homebody.evaluation.metrics import CUTOFFS
from homebody.files import insisting, private_folder, replacing
from homebody.methods import code_of, find, trust
from homebody.privacy import OBSERVERS, Channel, Charge, Ledger, NonPrivate
from homebody.privacy.budget import calibrated
from homebody.privacy.reports import sealed_bytes, tally
from homebody.privacy.specs import stage_texts, with_noise
from homebody.progress import Best, Progress, Round, better
from homebody.recipe import Recipe
from homebody.reference import Reference, Score, federated
from homebody.report import RunFolder
from homebody.report.record import Parameters, Result
from homebody.rng import Rng
from homebody.settings import check_counts
from homebody.simulation import Simulator, usable_device
from homebody.stopwatch import Stopwatch
from homebody.training import Trained, Training, diverged, fit, origin, phase_rng
from homebody.view_vectors import make_views

__all__ = [
    "Finished",
    "InMemory",
    "Watcher",
    "cohort_of",
    "execute",
    "finish",
    "keep",
    "population_of",
    "prepare",
    "reopen",
    "reopened",
    "resume",
    "settled",
    "simulator",
    "trust_folder",
]


@dataclass(frozen=True)
class Watcher:
    """Callbacks that report how a run proceeds. By default they do nothing."""

    say: Callable[[str], None] = lambda text: None
    begun: Callable[[Path], None] = lambda folder: None
    start: Callable[[int], None] = lambda rounds: None
    on_round: Callable[[Round], None] = lambda line: None
    looked: Callable[[int, int], None] = lambda done, steps: None
    """Steps done, of how many, of an analysis of the finished model."""
    fetched: Callable[[int, int | None], None] | None = None


QUIET = Watcher()
SPLIT = "split"
"""The folder, in that of a run which was kept apart from its data, with what it was trained and asked on."""
InMemory = Population | Split | Simulator
"""What may stand in the place of the data that a recipe names: people, people after their split, or a runtime."""
CHANGED = (
    "What shapes a release changed while this run was going on (recipe, code, data or machine): all that was released "
    "before and after is charged."
)

OF_DATA = (
    *("data_dir", "user_features", "item_features", "kinds", "vocabularies", "impressions", "views", "filters"),
    *("time_format", "separator", "encoding", "no_header", "drop_missing", "query"),
)
"""The fields of a recipe that say what is read of the data, beside its columns."""
REMEDIES = {
    "impressions": "choose other data, or give --impressions FILE",
    "item features": "choose other data, or give --item-features FILE",
    "ratings": "choose other data, or name their column with --rating-col",
    "times": "choose other data, or name their column with --time-col",
    "user features": "choose other data, or give --user-features FILE",
}
"""What to do where data lacks what a method needs."""


class Finished(NamedTuple):
    """A run that is over: its record, and what it was made of."""

    folder: RunFolder
    result: Result
    recipe: Recipe
    """As it was run: its rounds, cohort and noise are settled."""
    method: Method | Reference
    split: Split
    trained: Trained | None
    """None: a reference, which has no shared parameters."""
    score: Score | None = None
    """Of a reference, the score function of the chosen round, where that was the last."""


def execute(
    recipe: Recipe, out: Path, watcher: Watcher = QUIET, name: str | None = None, data: InMemory | None = None
) -> Result:
    """Run a recipe in a new folder below `out`. Nothing is written before the recipe is checked.

    name: the exact name of the folder; by default it is made from the recipe and the time.
    data: what is learnt from, instead of what the recipe names.
    """
    return finish(recipe, out, watcher, name, data).result


def finish(
    recipe: Recipe,
    out: Path,
    watcher: Watcher = QUIET,
    name: str | None = None,
    data: InMemory | None = None,
    *,
    lasting: bool = True,
) -> Finished:
    """As `execute`, with the model. lasting: whether the record outlives an error, so that the error names it."""
    recipe = settled(recipe, data)
    method, split = prepare(recipe, watcher, data)
    recipe = replace(recipe, rounds=_rounds(recipe, method), cohort=cohort_of(recipe, method, split))
    recipe, method = _calibrated(recipe, method, split, watcher)
    stamped = f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    there = out.exists()
    folder = RunFolder.create(out, name or stamped, exact=name is not None)
    with folder.alone():
        try:
            folder.write_text("recipe.toml", recipe.to_toml())
            folder.write_json("environment.json", now := run_notes.environment(recipe, method, split))
            watcher.begun(folder.path)
            return _run(recipe, method, split, folder, now, watcher, data if isinstance(data, Simulator) else None)
        except BaseException as error:
            if not folder.rounds():
                shutil.rmtree(folder.path, ignore_errors=True)
                if not there:
                    with contextlib.suppress(OSError):  # somebody else began to write there
                        out.rmdir()
            elif lasting and isinstance(error, HomebodyError):
                raise type(error)(f"{error} The rounds before are recorded in {folder.path}.") from error
            raise


def resume(path: Path, watcher: Watcher = QUIET, *, trust_code: bool = False, data: InMemory | None = None) -> Result:
    """Continue a run that was interrupted, and return its result. A complete run is not run again.

    trust_code: allow a recipe whose method is a file to run that file; otherwise such a run is refused.
    data: what is learnt from, instead of what the recipe names.
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
        method, split = prepare(recipe, watcher, data)
        now = run_notes.environment(recipe, method, split)
        if (path / "environment.json").exists():
            _insist_on_same(folder, now)
        else:  # killed before it was written
            folder.write_json("environment.json", now)
        folder.check_rounds()
        return _run(recipe, method, split, folder, now, watcher, data if isinstance(data, Simulator) else None).result


def keep(done: Finished, path: Path, *, people: bool = False) -> None:
    """Write a finished run with its model into a new folder that `reopened` opens anywhere.

    people: also everybody's data and states; without them, somebody new can be ranked for, and nobody else.
    """
    folder, old = RunFolder(path), done.folder
    with insisting(f"{path} cannot be written"):
        private_folder(path, exist_ok=False)
    for name in ("recipe.toml", "environment.json", "metrics.jsonl", "result.json"):
        if (old.path / name).exists():
            folder.write_text(name, (old.path / name).read_text(encoding="utf-8"))
    with contextlib.closing(Ledger(old.ledger_path)) as ledger:
        ledger.copy_to(folder.ledger_path)
    split = done.split if people else without_people(done.split)
    write_split(split, path / SPLIT)
    if people and (old.path / "ranks.parquet").exists():
        with replacing(path / "ranks.parquet") as file:
            file.write((old.path / "ranks.parquet").read_bytes())
    if (trained := done.trained) is None:
        return
    runtime = trained.runtime
    if not people:
        runtime = simulator(done.recipe, split)
        runtime.begin(trained.method, Rng.of(0))
    _, digest = old.stands()
    evaluated = trained.evaluated if people else replace(trained.evaluated, per_user={})
    states = runtime.state(lasting=True)
    best = Best(trained.chosen, evaluated, trained.shared, states)
    folder.save(Progress(trained.chosen, trained.shared, {}, states, best, digest))


def trust_folder(path: Path, say: Callable[[str], None] = QUIET.say) -> None:
    """Allow the file that a run's recipe names as its method to run, and report which file that is."""
    recipe = Recipe.from_toml(RunFolder.open(path).recipe_text())
    if code := code_of(recipe.method):
        say(f"{path} runs the code of {code}.")
        trust(recipe.method, code.sha256)


def reopen(path: Path, *, trust_code: bool = False) -> tuple[Trained, Population]:
    """The model of a finished run, ready to recommend, and the population it was trained on.

    trust_code: as in `resume`.
    """
    done = reopened(path, trust_code=trust_code)
    if done.trained is None:
        federated(done.method, done.recipe.method, "its run keeps figures, not a model")
    assert done.trained is not None
    return done.trained, done.split.population


def reopened(path: Path, *, trust_code: bool = False) -> Finished:
    """A finished run, with its model; that of a reference is not kept, but can be trained again.

    trust_code: as in `resume`.
    """
    folder = RunFolder.open(path)
    if trust_code:
        trust_folder(path)
    result = folder.result()
    recipe = Recipe.from_toml(folder.recipe_text())
    if (path / SPLIT).is_dir():
        prepared, split = recipe.build(), read_split(path / SPLIT)
    else:
        prepared, split = prepare(recipe, QUIET)
        _insist_on_same(folder, run_notes.environment(recipe, prepared, split))
    trained = _trained(folder, recipe, prepared, split) if isinstance(prepared, Method) else None
    return Finished(folder, result, recipe, prepared, split, trained)


def _trained(folder: RunFolder, recipe: Recipe, method: Method, split: Split) -> Trained:
    """The model that a run's last checkpoint holds."""
    progress = folder.read()
    if progress is None:
        raise HomebodyError(f"{folder.path} holds no model.")
    if progress.step < (before := sum(phase.rounds or recipe.rounds or 0 for phase in method.phases[:-1])):
        raise HomebodyError(
            f"{folder.path} ended after {several(progress.step, 'round')}, before the last stage, which begins after "
            f"{before}: it has no model that ranks anything."
        )
    acting = method.phases[-1].method or method
    runtime = simulator(recipe, split)
    runtime.begin(acting, phase_rng(recipe.seed, method.phases[-1].name, progress.digest).fold("clients"))
    best = progress.best or Best(progress.step, Evaluated({}), progress.shared, progress.clients)
    runtime.load_state(best.clients)
    shared = {name: value.to(runtime.device) for name, value in best.shared.items()}
    ledger, training = Ledger(folder.ledger_path), _training(recipe, method, split)
    return Trained(acting, runtime, shared, best.evaluated, best.step, ledger, training, recipe.stated_at)


def _training(recipe: Recipe, method: Method, split: Split) -> Training:
    """How a recipe trains this method."""
    cohort = cohort_of(recipe, method, split)
    return Training(method, _rounds(recipe, method), cohort, recipe.seed, recipe.allowed())


def _insist_on_same(folder: RunFolder, now: dict[str, Any]) -> None:
    then = folder.read_json("environment.json")
    for name, meaning in (("data_fingerprint", "The data"), ("method_fingerprint", "The method's file")):
        if now[name] != then.get(name):
            raise HomebodyError(
                f"{meaning} changed since {folder.path} was started, so it cannot be resumed: start a new run."
            )


def population_of(recipe: Recipe, watcher: Watcher = QUIET) -> Population:
    """The population of a recipe, with its features, after its filters and without what is elsewhere."""
    population = load(
        recipe.data,
        **cast(dict[str, Any], recipe.columns),
        **{name: getattr(recipe, name) for name in OF_DATA},
        say=watcher.say,
        progress=watcher.fetched,
    )
    return make_views(population, recipe.views, recipe.seed) if recipe.views else population


def settled(recipe: Recipe, data: InMemory | None = None) -> Recipe:
    """The recipe with the split that its method can learn from: held-out people where it learns from impressions.

    data: a split in memory stays as it is.

    >>> settled(Recipe("fedrec", "ibm-articles")).split
    'impressions-people'
    """
    given = isinstance(data, Split | Simulator)
    if not given and recipe.split == Recipe.split and "impressions" in find(recipe.method).needs:
        return replace(recipe, split="impressions-people")
    return recipe


def prepare(recipe: Recipe, watcher: Watcher = QUIET, data: InMemory | None = None) -> tuple[Method | Reference, Split]:
    """Build and check what a recipe names: the method, and the population after its split. Nothing is written.

    data: taken instead of what the recipe names.
    """
    recipe = settled(recipe, data)
    recipe.check()
    usable_device(recipe.device)
    method = recipe.build()
    _rounds(recipe, method)
    given = data.split if isinstance(data, Simulator) else data
    population = given.population if isinstance(given, Split) else given or population_of(recipe, watcher)
    sliced(population, recipe.slices)  # raises if a slice cannot be read
    most = max(population.n_items, *CUTOFFS)
    if too_long := [k for k in recipe.cutoffs if k > most]:
        raise HomebodyError(
            f"A cut-off of {too_long[0]:,} is beyond the {population.n_items:,} items of {population.name}: give at "
            f"most {most:,}."
        )
    if lacking := population.lacks(method.needs):
        raise HomebodyError(
            f"{recipe.method} needs {lacking}, which {population.name} does not have: {REMEDIES[lacking]}."
        )
    if method.scoring.predicts == "ratings" and population.ratings is None:
        raise HomebodyError(
            f"{recipe.short_method} predicts ratings with these settings, and {population.name} has none: "
            "leave out --set output=explicit, or name their column with --rating-col."
        )
    if method.scoring.predicts == "ratings" and recipe.split.startswith("impressions"):
        raise HomebodyError("Impressions have no ratings to predict: choose another split.")
    split = given if isinstance(given, Split) else _split(recipe, population)
    if "impressions" in method.needs and "train" not in (split.shown or {}):
        raise HomebodyError(
            f"{recipe.method} learns from impressions, and the split {recipe.split} has none to learn from: give "
            "--split impressions-people, or impressions-later where impressions have times."
        )
    for note in (*run_notes.notes_of(method, split), *recipe.unshuffled()):
        watcher.say(note)
    members = len(split.members(method.needs))
    if recipe.cohort is not None and not 1 <= recipe.cohort <= members:
        raise HomebodyError(f"A cohort has 1 to {members} clients with this data, not {recipe.cohort}.")
    if isinstance(method, Method):
        if any(phase.public for phase in method.phases) and not split.public.any():
            raise HomebodyError(
                f"{recipe.method} needs people whose data is public, and there are none: give --public 0.1."
            )
        # This refuses charges that cannot be stated, and a budget that is smaller than one round.
        planned = _planned(recipe, method, split)
        charged = [charges for charges, _ in planned]
        run_notes.refuse_found(method, split, charged)
        if (budget := recipe.allowed()) and not recipe.calibrate:
            before = [charge for counted in run_notes.counted(method, split, charged).values() for charge in counted]
            for charges in charged:
                budget.refuse_hopeless([*charges, *before])
    return method, split


def _split(recipe: Recipe, population: Population) -> Split:
    return split_population(
        population,
        recipe.split,
        protocol=recipe.protocol,
        how=recipe.held_out,
        seed=recipe.seed,
        negatives=recipe.negatives,
        public=recipe.public,
    )


def _planned(recipe: Recipe, method: Method, split: Split) -> list[tuple[Sequence[Charge], int]]:
    """The charges of one round of each phase, and its number of rounds. Public phases are left out."""
    members = len(split.members(method.needs))
    asked = cohort_of(recipe, method, split)
    size = asked or members
    cohort = Cohort(np.arange(size), "fixed" if asked else "all", size, members, split.n_items)
    rounds = _rounds(recipe, method)
    charged = [phase for phase in method.phases if not phase.public]
    return [(releases(phase.method or method, cohort), phase.rounds or rounds) for phase in charged]


def _calibrated(
    recipe: Recipe, method: Method | Reference, split: Split, watcher: Watcher
) -> tuple[Recipe, Method | Reference]:
    """The recipe and method with the noise that spends the budget over all rounds, if calibration is asked for."""
    budget = recipe.allowed()
    if not recipe.calibrate or budget is None or not isinstance(method, Method):
        return recipe, method

    def planned(channel: Channel, method: Method = method) -> list[tuple[Sequence[Charge], int]]:
        rounds = _planned(recipe, replace(method, uplink=channel), split)  # type: ignore[type-var]
        before = run_notes.counted(method, split, [charges for charges, _ in rounds])
        return [*rounds, *((charges, 1) for charges in before.values())]

    noise = calibrated(method.uplink, budget, planned)
    stages = recipe.stages or stage_texts(method.uplink)
    recipe = replace(recipe, stages=with_noise(stages, noise), calibrate=False)
    rounds = sum(count for _, count in _planned(recipe, method, split))
    watcher.say(f"calibrated: {' → '.join(recipe.stages)} spends ε = {budget.epsilon:g} in {several(rounds, 'round')}")
    built = federated(recipe.build(), recipe.method)
    budget.refuse_hopeless(_planned(recipe, built, split)[0][0])
    return recipe, built


def cohort_of(recipe: Recipe, method: Method | Reference, split: Split) -> int | None:
    """Clients a round: as the recipe says, else the method's default, but no more than there are."""
    usual = method.about.cohort
    if recipe.cohort is not None or usual is None:
        return recipe.cohort
    return min(usual, len(split.members(method.needs)))


def _rounds(recipe: Recipe, method: Method | Reference) -> int:
    check_counts(rounds=recipe.rounds)
    return recipe.rounds or method.about.rounds


class _Job(NamedTuple):
    """A run that is under way, in its folder."""

    recipe: Recipe
    split: Split
    folder: RunFolder
    ledger: Ledger
    digest: str
    """Of everything that shapes a release."""
    watcher: Watcher
    runtime: Simulator | None = None
    """None: one that the recipe describes."""

    def record(self, line: Round) -> None:
        self.folder.add_round(line)
        self.watcher.on_round(line)


class _Outcome(NamedTuple):
    """The chosen round of a run."""

    evaluated: Evaluated
    chosen: int
    parameters: Parameters | None = None
    stopped: str | None = None
    trained: Trained | None = None
    score: Score | None = None


def _run(
    recipe: Recipe,
    method: Method | Reference,
    split: Split,
    folder: RunFolder,
    now: dict[str, Any],
    watcher: Watcher,
    runtime: Simulator | None = None,
) -> Finished:
    """Train from the folder's last checkpoint, or from the start, and write the result. now: the environment."""
    began = time.process_time()
    with contextlib.closing(Ledger(folder.ledger_path)) as ledger:
        job = _Job(recipe, split, folder, ledger, run_notes.digest_of(now), watcher, runtime)
        _report_changes(job, now)
        outcome = _reference(job, method) if isinstance(method, Reference) else _federated(job, method)
        folder.add_ranks(outcome.evaluated)
        result = _result(job, method, outcome)
        result["cpu_seconds"] = time.process_time() - began
        folder.write_json("result.json", result)
        return Finished(folder, folder.result(), recipe, method, split, outcome.trained, outcome.score)


def _report_changes(job: _Job, now: dict[str, Any]) -> None:
    """Report, before anything is charged, if rounds are charged that were charged before, and why."""
    folder, ledger = job.folder, job.ledger
    then = folder.read_json("environment.json")
    step, before = folder.stands()
    if ledger.releases() and origin(job.digest, step, before, ledger) not in ledger.digests():
        why = run_notes.changes(then, now)
        job.watcher.say(
            f"What shapes a release is not as it was when this run was charged last{why and f' ({why})'}. What follows "
            f"is another release: its noise is new, and every round from {step + 1} on is charged in full, also where "
            "it was charged before."
        )
    if then != now:
        folder.write_json("environment.json", now)


def _federated(job: _Job, method: Method) -> _Outcome:
    """Charge vocabularies that are counted with noise, then train."""
    recipe, split, ledger = job.recipe, job.split, job.ledger
    assert recipe.rounds is not None
    total = sum(phase.rounds or recipe.rounds for phase in method.phases)
    job.watcher.start(total)
    planned = [charges for charges, _ in _planned(recipe, method, split)]
    for release, charges in run_notes.counted(method, split, planned).items():
        ledger.charge(release, charges, repeat=True, digest=job.digest)
    runtime = job.runtime or simulator(recipe, split)
    runtime.listing = total == 1

    def on_round(line: Round) -> None:
        job.record(line)
        runtime.listing = line.step == total - 1  # if the last round is chosen, its scores are at hand

    trained = fit(
        method,
        runtime,
        rounds=recipe.rounds,
        cohort=recipe.cohort,
        seed=recipe.seed,
        ledger=ledger,
        budget=recipe.allowed(),
        delta=recipe.stated_at,
        evaluate_every=recipe.every(method),
        select=recipe.selects(),
        on_round=on_round,
        checkpoints=job.folder,
        digest=job.digest,
    )
    if trained.stopped:
        job.watcher.say(trained.stopped)
    numbers = run_notes.parameters_of(trained, recipe.seed)
    runtime.listing = False
    evaluated = trained.evaluated
    if evaluated.metrics and not evaluated.lists and split.shown is None:
        evaluated = replace(evaluated, lists=runtime.first_items(trained.method, trained.shared))
    return _Outcome(evaluated, trained.chosen, numbers, trained.stopped, trained)


def simulator(recipe: Recipe, split: Split) -> Simulator:
    """The runtime of a recipe."""
    return Simulator(split, device=recipe.device, fused=recipe.fused, cutoffs=recipe.measured(), slices=recipe.slices)


def _reference(job: _Job, method: Reference) -> _Outcome:
    """Train a reference. Each pass is evaluated as a round is, and the best on validation is chosen."""
    recipe, split, ledger = job.recipe, job.split, job.ledger
    assert recipe.rounds is not None
    every = recipe.every(method)
    job.watcher.start(recipe.rounds)
    if method.reads:
        raw = NonPrivate("raw data collected")
        collected = [Charge(observer, "user", raw) for observer in OBSERVERS]
        ledger.charge("collection", collected, repeat=True, digest=job.digest)
    job.folder.load()  # drops the rounds that an interrupted attempt recorded
    histories = split.histories()._replace(device=usable_device(recipe.device))
    people = int((split.lengths > 0).sum())
    best, chosen, step = Evaluated({}), 0, 0
    watch = Stopwatch()
    for step, score in enumerate(islice(method.fit(histories, recipe.seed), recipe.rounds), start=1):
        trained = watch.lap()
        due = every and (not chosen or step == recipe.rounds or step % every == 0)
        try:
            evaluated = measure(split, score, recipe.measured(), recipe.slices) if due else Evaluated({})
        except Diverged as error:
            raise diverged(method, step, "what items are ranked by") from error
        if better(evaluated, best if chosen else None, recipe.selects()):
            best, chosen = evaluated, step
        line = Round(
            phase="fit",
            round=step,
            step=step,
            clients=people if step == 1 else 0,  # they send their histories once
            epsilon=ledger.epsilons(recipe.stated_at),
            bytes_up=histories.items.nbytes if step == 1 and method.reads else 0,
            seconds=trained.seconds,
            delta=recipe.stated_at,
            charged=method.reads,
            compile_seconds=trained.compile_seconds,
        )
        job.record(line.measured(evaluated, line.epsilon, watch.lap()))
        watch.lap()
    return _Outcome(best, chosen or step, score=score if step and chosen in (0, step) else None)


def _result(job: _Job, method: Method | Reference, outcome: _Outcome) -> Result:
    """The result of a simulated run, from its record."""
    recipe, split, evaluated, lines = job.recipe, job.split, outcome.evaluated, job.folder.rounds()
    notes = [*run_notes.notes_of(method, split), *recipe.unshuffled(), *run_notes.unheld(recipe, method)]
    notes += run_notes.guessing(evaluated, split)
    result = run_notes.result_of(
        recipe,
        method,
        lines,
        evaluated,
        job.ledger.epsilons(recipe.stated_at),
        data=Path(recipe.data).name if Path(recipe.data).is_file() else recipe.data,
        meaning=describe(recipe.protocol, split.how, split.negatives, recipe.split, split.enough),
        chosen=outcome.chosen,
        stopped=outcome.stopped,
        notes=[*notes, *([CHANGED] if len(job.ledger.digests()) > 1 else [])],
        run=job.folder.path,
    )
    result["passes"] = getattr(method, "passes", getattr(method, "epochs", 1))
    result["parameters"] = outcome.parameters
    result["reports"] = _reports(recipe, method, split, len(lines))
    run_notes.measure_references(recipe, method, split, result)
    table = outcome.trained.shared.get("item") if outcome.trained else None
    vectors = table if table is not None and table.ndim == 2 and len(table) == split.n_items else None
    result["beyond"] = beyond(split, evaluated, vectors)
    return result


def _reports(recipe: Recipe, method: Method | Reference, split: Split, rounds: int) -> dict[str, float] | None:
    """If devices send randomised reports: their number, their total ε, and their bytes when each is sealed."""
    if not isinstance(method, Method):
        return None
    counts = tally(_planned(recipe, method, split)[0][0], rounds)
    if counts is not None and method.uplink.facts.shuffled:
        counts["sealed_bytes"] = sealed_bytes(int(counts["count"]))
    return counts

"""The only training loop: a simulation and a federation of devices differ only in the `Runtime` they pass to it."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch

from homebody import __version__
from homebody.core import (
    Cohort,
    Collected,
    Evaluated,
    Method,
    Newcomer,
    Phase,
    Recommended,
    Recommender,
    Runtime,
    Tree,
    Users,
    releases,
)
from homebody.errors import Abandoned, Diverged, HomebodyError, several
from homebody.privacy import Budget, Ledger
from homebody.privacy.ledger import DELTA
from homebody.progress import Best, Checkpoints, Progress, Round, better
from homebody.rng import Rng, SystemRng
from homebody.stopwatch import Lap, Stopwatch

__all__ = ["Trained", "Training", "carry", "choose", "diverged", "fit", "origin", "phase_rng", "reopened"]

ATTEMPTS = 5
"""How often a round is tried before training is given up. Each attempt is charged."""


@dataclass(frozen=True)
class Training:
    """What `fit` was asked for: enough to train again in the same way, as an audit does."""

    method: Method
    rounds: int
    """Of each phase that does not say its own."""
    cohort: int | None
    seed: int
    budget: Budget | None = None


@dataclass(frozen=True)
class Trained:
    """What the loop leaves: the shared parameters, and a runtime whose clients hold their own.

    Users and items are numbers here; `homebody.notebook.Fitted` calls them what the data calls them.
    """

    method: Method
    runtime: Runtime
    shared: Tree
    evaluated: Evaluated
    """The metrics of the chosen round."""
    chosen: int
    """The best round on validation, counted over all phases."""
    ledger: Ledger
    training: Training
    delta: float = DELTA
    """The δ that ε is stated at."""
    stopped: str | None = None
    """Why training ended before its last round."""

    def __repr__(self) -> str:
        measured = ", ".join(f"{name} {value:.4f}" for name, value in [*self.metrics.items()][:2])
        return f"<Trained {type(self.method).__name__}, round {self.chosen}: {measured or 'not measured'}>"

    @property
    def metrics(self) -> dict[str, float]:
        """Test metrics under their names, validation metrics under `valid/`."""
        return self.evaluated.metrics

    @property
    def epsilon(self) -> dict[str, float]:
        """Certified ε of one person for each observer, at `delta`."""
        return self.ledger.epsilons(self.delta)

    def ranked(self, user: int, k: int = 10) -> list[tuple[int, float]]:
        """The best new items for a simulated client, with their scores."""
        return self.runtime.recommend(self.method, self.shared, user, k)

    def ranked_for(
        self,
        items: Sequence[int] = (),
        features: Mapping[str, object] | None = None,
        now: Mapping[str, object] | None = None,
        k: int = 10,
        *,
        ratings: Sequence[float] | None = None,
    ) -> Recommended:
        """The best items for a person who took no part in training, from the items that they have, oldest first.

        They adapt as a device that never took part would. Without any items they rank with the shared parameters and a
        new client's state. Features of theirs, and of the context, that are not given are unknown.

        >>> from homebody import FedIALS, Simulator, leave_one_out, load
        >>> few = leave_one_out(load("synthetic:users=200,items=100,mean=12"))
        >>> fitted = fit(FedIALS(factors=4), Simulator(few), rounds=2)
        >>> best = fitted.ranked_for([3, 14, 15, 92, 65], k=3)
        >>> len(best.items), best.notes
        (3, ())
        """
        newcomer = Newcomer(tuple(items), dict(features or {}), dict(now or {}), ratings)
        return self.runtime.recommend_for(self.method, self.shared, newcomer, k)


def fit(
    method: Method,
    runtime: Runtime,
    *,
    rounds: int = 100,
    cohort: int | None = None,
    seed: int = 0,
    ledger: Ledger | None = None,
    budget: Budget | None = None,
    delta: float = DELTA,
    evaluate_every: int = 1,
    select: str | None = None,
    on_round: Callable[[Round], None] | None = None,
    checkpoints: Checkpoints | None = None,
    digest: str = "",
) -> Trained:
    """Train: choose cohort → charge ledger → collect through the channel → server step → evaluate → record.

    cohort: clients a round; None takes all. evaluate_every: 0 never evaluates and keeps the last round.
    select: the metric that chooses the round; None: the method's own.
    budget: training ends before the round that would break it. delta: ε is stated at this δ if there is no budget.
    on_round: called once a round. With checkpoints over real devices it is called as soon as the round is trained, and
    again once the round is measured.
    digest: of everything that shapes a release: recipe, code, data, machine. A simulation that resumes with the same
    digest repeats charged rounds at no further cost. With another digest, or none, every round is a new release and is
    charged; with another digest it also gets new noise.
    """
    _check(method, runtime, rounds, evaluate_every)
    ledger, delta = Ledger() if ledger is None else ledger, budget.delta if budget else delta
    select = select or method.scoring.select
    loop = _Loop(
        method, runtime, rounds, cohort, seed, ledger, budget, delta, evaluate_every, select, on_round, checkpoints
    )
    loop.restore(digest)
    acting, stopped = method, None
    for part in loop.parts():
        acting, stopped = part.method, _phase(loop, part)
        if stopped:
            break
    return loop.finished(acting, stopped)


def reopened(
    method: Method,
    runtime: Runtime,
    progress: Progress,
    *,
    rounds: int,
    seed: int,
    ledger: Ledger,
    delta: float,
    stopped: str | None = None,
) -> Trained:
    """The model of a training that ended, from its last progress. No client is asked, and nothing is charged.

    stopped: why it ended before its last round.
    """
    loop = _Loop(method, runtime, rounds, None, seed, ledger, None, delta, 0, "", None, None, progress=progress)
    part = next(loop.parts())
    runtime.begin(part.method, part.rng.fold("clients"))
    runtime.load_state(progress.clients)
    return loop.finished(part.method, stopped)


def _phase(loop: _Loop, part: _Part) -> str | None:
    """Train the rounds of a phase that are left. Return why training stopped early, or None."""
    progress = loop.progress
    _enter(loop, part)
    if loop.saves_first and progress.step > part.start and loop.measures(part, progress.step):
        # The process was killed after this round was saved, perhaps before it was measured.
        _grow(loop, part)
        if _measure_once(loop, part):
            loop.save()
    for step in range(progress.step + 1, part.end + 1):
        try:
            _round(loop, part, step)
        except _BudgetSpent as spent:
            if loop.measures(part) and (step == part.start + 1 or not loop.measures(part, step - 1)):
                _measure_once(loop, part)  # the last round is always measured
            loop.save()
            return str(spent)
    return None


def _round(loop: _Loop, part: _Part, step: int) -> None:
    """One round: choose and charge a cohort, collect, take the server's step, record, measure, record that too."""
    number, progress = step - part.start, loop.progress
    for attempt in range(1, ATTEMPTS + 1):
        who, charged = _charge(loop, part, number)
        watch = Stopwatch()
        try:
            got = loop.runtime.collect(part.method, progress.shared, who, part.rng.fold("round", number), step)
        except Abandoned as error:
            if attempt == ATTEMPTS:
                raise Abandoned(f"{error} Given up after {attempt} attempts at round {number}.") from error
            continue
        got = replace(got, total=replace(got.total, catalogue=loop.runtime.catalogue))
        if _step(part.method, progress, got, number, last=attempt == ATTEMPTS):
            break
    trained = watch.lap()
    if got.loss is not None and not math.isfinite(got.loss):
        raise diverged(part.method, number, "the devices' loss")
    progress.step, progress.charged = step, progress.charged + charged
    line = loop.line(part, who, got, trained, charged)
    if loop.saves_first:
        # Before anybody sees the result: a round that was seen and then run again would reveal more.
        loop.tell(line)
        loop.save()
    if loop.measures(part, step):
        evaluated = _measure(loop, part)
        line = line.measured(evaluated, loop.ledger.epsilons(loop.delta), watch.lap())
    if not loop.saves_first or line.metrics:
        loop.tell(line)
    if step == part.end or (loop.checkpoints and loop.checkpoints.due()):
        loop.save()


class _BudgetSpent(Exception):
    """The next round would break the budget."""


@dataclass
class _Part:
    """A phase of this run."""

    phase: Phase
    method: Method
    start: int
    """Rounds of all phases before it."""
    end: int
    """Rounds of all phases up to its last."""
    rng: Rng
    items: int = -1
    """How many items the shared tables have rows for; -1: unknown."""


@dataclass
class _Loop:
    """One call of `fit`: what it was given, and how far it is."""

    method: Method
    runtime: Runtime
    rounds: int
    cohort: int | None
    seed: int
    ledger: Ledger
    budget: Budget | None
    delta: float
    evaluate_every: int
    select: str
    on_round: Callable[[Round], None] | None
    checkpoints: Checkpoints | None
    repeats: bool = False
    """Whether a round that is run again is the same release, so that it is not charged again."""
    progress: Progress = field(default_factory=Progress)

    @property
    def saves_first(self) -> bool:
        """Whether a round is recorded and saved before it is measured: devices cannot repeat it bit by bit."""
        return self.checkpoints is not None and not self.runtime.simulated

    def restore(self, digest: str) -> None:
        """Continue from the last checkpoint. A ledger that knows fewer releases than were charged is refused."""
        if self.checkpoints:
            self.progress = self.checkpoints.load() or self.progress
        known, due = self.ledger.releases(), self.progress.charged
        if known < due:
            raise HomebodyError(
                f"The ledger {self.ledger.path} knows of {several(known, 'release')}, but "
                f"{several(due, 'round was', 'rounds were')} charged: it lost charges, and its ε would be too small."
            )
        self.repeats = self.runtime.simulated and self.checkpoints is not None and bool(digest)
        self.progress.digest = origin(digest, self.progress.step, self.progress.digest, self.ledger)

    def parts(self) -> Iterator[_Part]:
        """The phases that have rounds left, in order; the last phase always."""
        parts = self._all_parts()
        return (part for part in parts if self.progress.step < part.end or part is parts[-1])

    def _all_parts(self) -> list[_Part]:
        parts, start = [], 0
        for phase in self.method.phases:
            end = start + (phase.rounds or self.rounds)
            rng = phase_rng(self.seed, phase.name, self.progress.digest)
            parts.append(_Part(phase, phase.method or self.method, start, end, rng))
            start = end
        return parts

    def measures(self, part: _Part, step: int | None = None) -> bool:
        """Whether this round of a phase is measured; without a round: whether any is."""
        every = self.evaluate_every if part.phase.evaluated else 0
        return bool(every) and (step is None or (step - part.start) % every == 0 or step == part.end)

    def line(self, part: _Part, who: Cohort, got: Collected, trained: Lap, charged: bool) -> Round:
        """What is known of the round that was just trained."""
        return Round(
            phase=part.phase.name,
            round=self.progress.step - part.start,
            step=self.progress.step,
            clients=len(who.users) if got.answered is None else got.answered,
            loss=got.loss,
            epsilon=self.ledger.epsilons(self.delta),
            bytes_up=got.bytes_up,
            bytes_down=got.bytes_down,
            seconds=trained.seconds,
            delta=self.delta,
            charged=charged,
            compile_seconds=trained.compile_seconds,
        )

    def tell(self, line: Round) -> None:
        if self.on_round:
            self.on_round(line)

    def save(self) -> None:
        if self.checkpoints:
            self.checkpoints.save(replace(self.progress, clients=self.runtime.state()))

    def finished(self, acting: Method, stopped: str | None) -> Trained:
        """The model of the chosen round; the last one if none was measured."""
        runtime, best = self.runtime, self.progress.best
        if best is None:
            evaluated, step, shared = Evaluated({}), self.progress.step, _on(runtime, self.progress.shared)
        else:
            runtime.load_state(best.clients)
            evaluated, step, shared = best.evaluated, best.step, _on(runtime, best.shared)
        asked = Training(self.method, self.rounds, self.cohort, self.seed, self.budget)
        return Trained(acting, runtime, shared, evaluated, step, self.ledger, asked, self.delta, stopped)


def _charge(loop: _Loop, part: _Part, number: int) -> tuple[Cohort, bool]:
    """Choose a cohort and charge the round. Return the cohort, and whether the round has any charge.

    Raises `_BudgetSpent` instead of breaking the budget.
    """
    runtime, ledger, budget, digest = loop.runtime, loop.ledger, loop.budget, loop.progress.digest
    people = runtime.available(public=True) if part.phase.public else runtime.available()
    _grow(loop, part)
    size = loop.cohort
    if part.phase.public and size is not None:
        size = min(size, len(people))  # there may be fewer public people, and their number hides nobody
    who = choose(people, size, _draw(runtime, part.rng, number), part.items)
    release, who, again = runtime.open(f"{part.phase.name}/{number}", who, loop.progress.shared)
    again, charges = again or loop.repeats, () if part.phase.public else releases(part.method, who)
    known = again and ledger.repeats(release, digest)
    if budget and charges and not known and not budget.allows(ledger, charges):
        raise _BudgetSpent(
            f"Training stopped before round {number} of {part.end - part.start} ({part.phase.name}): it would bring ε "
            f"to {budget.spent(ledger, charges):.4g} for {budget.who}, and the budget is {budget.epsilon:g}; "
            f"{budget.spent(ledger):.4g} is spent."
        )
    ledger.charge(release, charges, repeat=again, number=number, code=_code(part.method), digest=digest)
    return who, bool(charges)


def _draw(runtime: Runtime, rng: Rng, number: int) -> Rng:
    """The random numbers that choose a cohort: from the seed in a simulation, else from the operating system.

    Devices could derive numbers from the seed, and sampling hides people only if nobody knows the cohort.
    """
    return rng.fold("cohort", number) if runtime.simulated else Rng(SystemRng().next_key())


def _measure_once(loop: _Loop, part: _Part) -> bool:
    """Measure the last round, unless devices were asked about it before and a best round is known. Whether it was."""
    if loop.progress.best is not None and loop.ledger.knows(_telemetry(loop, part)):
        return False
    _measure(loop, part)
    return True


def _measure(loop: _Loop, part: _Part) -> Evaluated:
    """How good the model is now. What devices reveal by that is charged first; without the budget, nothing is asked.

    The best round on validation is kept.
    """
    runtime, progress, method = loop.runtime, loop.progress, part.method
    if charges := runtime.telemetry(method):
        if loop.budget and not loop.budget.allows(loop.ledger, charges):
            return Evaluated({})
        number = progress.step - part.start
        loop.ledger.charge(_telemetry(loop, part), charges, number=number, code=_code(method))
    try:
        evaluated = runtime.evaluate(method, progress.shared)
    except Diverged as error:
        raise diverged(method, progress.step, "what items are ranked by") from error
    if better(evaluated, progress.best.evaluated if progress.best else None, loop.select):
        progress.best = Best(progress.step, evaluated, progress.shared, runtime.state(lasting=True))
    return evaluated


def _telemetry(loop: _Loop, part: _Part) -> str:
    """The name under which the ledger charges what devices reveal when the last round is measured."""
    return f"{part.phase.name}/{loop.progress.step - part.start}/telemetry"


def origin(digest: str, step: int, before: str, ledger: Ledger) -> str:
    """The mark of all releases from here on: the digest, and if it changed, a hash of the mark before it as well.

    step, before: the checkpoint's round and its mark. Without a checkpoint, the mark before is that of the first
    charge: a run that was started with one digest cannot continue with another as if that had been its first.

    >>> ledger = Ledger()
    >>> origin("ab", 0, "", ledger), origin("ab", 5, "ab", ledger)
    ('ab', 'ab')
    >>> origin("cd", 5, "ab", ledger)
    'cd:cd552c489f1bd76f'
    """
    if not digest:
        return ""
    came = before if step else next(iter(ledger.digests()), digest)
    if came.partition(":")[0] == digest:
        return came
    return f"{digest}:{hashlib.sha256(f'{came} at {step}'.encode()).hexdigest()[:16]}"


def phase_rng(seed: int, phase: str, origin: str = "") -> Rng:
    """The random numbers of a phase.

    After a change of digest they are new. Noise from the same seed would cancel out between releases before and after.
    """
    return Rng.of(seed, phase, origin) if ":" in origin else Rng.of(seed, phase)


def choose(available: Users, size: int | None, rng: Rng, items: int = 0) -> Cohort:
    """Everyone, or a cohort of fixed size drawn without replacement, in ascending order."""
    count = len(available)
    if not count:
        raise HomebodyError("No client is available to train with.")
    if size is None:
        return Cohort(available, "all", count, count, items)
    if not 1 <= size <= count:
        raise HomebodyError(f"A cohort has 1 to {count} clients here, not {size}.")
    generator = np.random.default_rng(int(rng.key) % 2**64)
    return Cohort(np.sort(generator.choice(available, size, replace=False)), "fixed", size, count, items)


def carry(old: Tree, new: Tree) -> Tree:
    """Parameters for a new phase or a larger catalogue: old values where the names match, new values for the rest.

    >>> carry({"item": torch.ones(1, 2)}, {"item": torch.zeros(2, 2), "bias": torch.zeros(1)})["item"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    out = dict(new)
    for name in old.keys() & new.keys():
        before, after = old[name], new[name]
        if before.shape == after.shape:
            out[name] = before
        elif before.shape[1:] == after.shape[1:] and len(before) < len(after):
            out[name] = torch.cat([before, after[len(before) :]])
        else:
            raise HomebodyError(f"'{name}' was {tuple(before.shape)} and cannot go on as {tuple(after.shape)}.")
    return out


def _check(method: Method, runtime: Runtime, rounds: int, evaluate_every: int) -> None:
    """Refuse what cannot be trained; callers without a type checker may give anything."""
    given: object = method
    if isinstance(given, Recommender) and not isinstance(given, Method):
        raise HomebodyError(
            f"{type(given).__name__} is a centralised reference, which no runtime trains: hb.fit takes it."
        )
    if not isinstance(given, Method):
        raise HomebodyError(f"A method is an object such as hb.FedMF(factors=16), not {given!r}.")
    if not hasattr(runtime, "collect"):
        raise HomebodyError(
            f"Training takes a runtime, such as hb.Simulator(split), not a {type(runtime).__name__}: hb.fit takes data."
        )
    if rounds < 1:
        raise HomebodyError(f"Rounds must be at least 1, not {rounds}.")
    if evaluate_every < 0:
        raise HomebodyError(f"evaluate-every must be 0 (never) or more, not {evaluate_every}.")
    names = [phase.name for phase in method.phases]
    if len(set(names)) != len(names):
        raise HomebodyError(f"The phases of a method need different names, not {', '.join(names)}.")


def _enter(loop: _Loop, part: _Part) -> None:
    """Begin a phase, or resume in the middle of it."""
    runtime, progress, method, rng = loop.runtime, loop.progress, part.method, part.rng
    runtime.begin(method, rng.fold("clients"))
    if progress.step == part.start:
        shared = carry(progress.shared, method.init_shared(runtime.catalogue, rng.fold("shared")))
        progress.shared = _on(runtime, shared)
        progress.server = method.init_server(progress.shared)
        progress.best = None
        part.items = runtime.catalogue.n_items
    else:
        progress.shared, progress.server = _on(runtime, progress.shared), _on(runtime, progress.server)
        runtime.load_state(progress.clients)
    progress.clients = {}  # the runtime holds them now, and they are large


def _on(runtime: Runtime, tree: Tree) -> Tree:
    return {name: value.to(runtime.device) for name, value in tree.items()}


def _grow(loop: _Loop, part: _Part) -> None:
    """Add rows for new items to every table that has one row an item. Known rows stay as they are."""
    runtime, progress, method = loop.runtime, loop.progress, part.method
    if runtime.catalogue.n_items == part.items:
        return
    part.items = runtime.catalogue.n_items
    shared = method.init_shared(runtime.catalogue, part.rng.fold("shared"))
    progress.shared = _on(runtime, carry(progress.shared, shared))
    server = method.init_server(progress.shared)
    progress.server = _on(runtime, carry(progress.server, server))
    if progress.best is not None:
        progress.best.shared = carry(progress.best.shared, progress.shared)


def _code(method: Method) -> str:
    """The method and version that cause a release, for readers of the ledger."""
    return f"{type(method).__name__}, homebody {__version__}"


def _step(method: Method, progress: Progress, got: Collected, number: int, *, last: bool) -> bool:
    """Take the server's step on a round's total. Return False if it failed on clients that may lie.

    The runtime then leaves out whoever spoiled the total, and the round is tried again, unless this was the last
    attempt.
    """
    try:
        before = {name: value.shape for name, value in progress.shared.items()}
        shared, server = _served(method, progress, got)
        _refuse_nonsense(method, before, shared, number)
    except Exception as error:
        if got.spoiled is None:
            raise
        reason = str(error) if isinstance(error, HomebodyError) else type(error).__name__
        if last:
            raise Diverged(f"The server's step failed {ATTEMPTS} times in round {number}: {reason}") from error
        got.spoiled(reason)
        return False
    # A checkpoint keeps numbers, not their layout in memory, and sums over another layout differ in their last bits.
    progress.shared = {name: value.contiguous() for name, value in shared.items()}
    progress.server = server
    return True


def _served(method: Method, progress: Progress, got: Collected) -> tuple[Tree, Tree]:
    """The server's step. An update whose name it does not know is refused, whether it fails on it or ignores it."""
    sent, before, kind = got.total.sum, progress.shared, type(method).__name__
    listed = ", ".join(f"'{name}'" for name in sent)
    try:
        shared, server = method.server(before, progress.server, got.total)
    except KeyError as error:
        name = error.args[0]
        if name in sent or not isinstance(name, str):
            raise
        raise HomebodyError(
            f"{kind}.server() reads '{name}', and {kind}.client() sends {listed}: give both the same name."
        ) from error
    near = [name for each in sent if each not in before for name in difflib.get_close_matches(each, before, n=1)]
    if (
        near
        and not sent.keys() & before.keys()
        and all(torch.equal(shared[n], before[n]) for n in before if n in shared)
    ):
        raise HomebodyError(
            f"{kind}.client() sends {listed}, and {kind}.server() changed nothing: did you mean '{near[0]}'?"
        )
    return shared, server


def _refuse_nonsense(method: Method, before: dict[str, torch.Size], shared: Tree, number: int) -> None:
    """Refuse shared parameters with other names or shapes, or with values that are not finite."""
    if before != {name: value.shape for name, value in shared.items()}:
        raise HomebodyError(
            f"{type(method).__name__}.server() must keep the names and shapes of the shared parameters."
        )
    for name, value in shared.items():
        if not bool(torch.isfinite(value).all()):
            raise diverged(method, number, f"'{name}'")


def diverged(method: Recommender, number: int, what: str) -> Diverged:
    """The error for values that are not finite, with the settings of the method that could be lowered.

    >>> from homebody.methods.fedials import FedIALS
    >>> print(diverged(FedIALS(), 3, "the devices' loss"))
    Training diverged in round 3: the devices' loss is no longer finite. Smaller steps help.
    """
    settings = {setting.name: getattr(method, setting.name) for setting in fields(method)}  # type: ignore[arg-type]
    rates = [f"{name} ({value:g})" for name, value in settings.items() if name.endswith("rate") and value]
    lower = f"Lower {'one of ' if len(rates) > 1 else ''}{', '.join(rates)}." if rates else "Smaller steps help."
    return Diverged(f"Training diverged in round {number}: {what} is no longer finite. {lower}")

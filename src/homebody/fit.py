"""The only training loop: simulation, cluster and deployment differ in the `Runtime` they pass it."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

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
    Runtime,
    Tree,
    Users,
    releases,
)
from homebody.counts import several
from homebody.errors import Abandoned, Diverged, HomebodyError
from homebody.privacy import Budget, Charge, Ledger
from homebody.privacy.ledger import DELTA
from homebody.progress import Best, Checkpoints, Progress, Round, better
from homebody.reference import Reference
from homebody.rng import Rng, SystemRng

__all__ = ["Fitted", "carry", "choose", "diverged", "fit", "origin", "phase_rng"]

ATTEMPTS = 5
"""At one round, before a runtime whose devices do not answer is given up: each attempt is charged."""


@dataclass(frozen=True)
class Fitted:
    """A trained model: the shared parameters, and a runtime whose clients hold the rest."""

    method: Method
    runtime: Runtime
    shared: Tree
    evaluated: Evaluated
    """At the round chosen on validation."""
    chosen: int
    """That round, counted over all phases."""
    ledger: Ledger
    delta: float = DELTA
    """What ε is stated at."""
    stopped: str | None = None
    """Why training ended before its last round, in a sentence."""

    @property
    def metrics(self) -> dict[str, float]:
        """On test under bare names, on validation under `valid/`."""
        return self.evaluated.metrics

    @property
    def epsilon(self) -> dict[str, float]:
        """Certified ε for each observer, about one person, at `delta`."""
        return self.ledger.epsilons(self.delta)

    def recommend(self, user: int, k: int = 10) -> list[tuple[int, float]]:
        """A simulated client's best items that it does not have yet, with their scores."""
        return self.runtime.recommend(self.method, self.shared, user, k)

    def recommend_for(
        self,
        items: Sequence[int] = (),
        features: Mapping[str, object] | None = None,
        now: Mapping[str, object] | None = None,
        k: int = 10,
        *,
        ratings: Sequence[float] | None = None,
    ) -> Recommended:
        """The best items for somebody whom training never met, from the few that they have, oldest first.

        They adapt as a device would that never took part; without any items they rank with the common start. What they
        do not say of themselves, or of the circumstances in which they ask, is unknown.

        >>> from homebody import FedIALS, Simulator, leave_one_out, load
        >>> few = leave_one_out(load("synthetic:users=200,items=100,mean=12"))
        >>> fitted = fit(FedIALS(factors=4), Simulator(few), rounds=2)
        >>> best = fitted.recommend_for([3, 14, 15, 92, 65], k=3)
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
) -> Fitted:
    """Train: choose cohort → charge ledger → collect through the channel → server step → evaluate → record.

    cohort: clients a round; None takes all. evaluate_every: 0 never evaluates and keeps the last round.
    select: the metric that chooses the round; None: the method's own.
    budget: training ends before the round that would break it. delta: what ε is stated at where there is no budget.
    on_round: on real devices it is told of a round as soon as that is kept, and again where it was measured.
    digest: of everything that shapes a release: recipe, code, data, machine. A simulation that goes on from a
    checkpoint with the same digest repeats rounds that were charged, and pays nothing for them. With another digest,
    or with none, every round is another release: it is charged, and a digest gives it noise of its own.
    """
    _check(method, rounds, evaluate_every)
    select = select or method.scoring.select
    delta = budget.delta if budget else delta
    ledger = Ledger() if ledger is None else ledger
    progress = (checkpoints.load() if checkpoints else None) or Progress()
    if ledger.releases() < (due := _due(method, runtime, progress.step, rounds, cohort)):
        raise HomebodyError(
            f"The ledger {ledger.path} knows of {several(ledger.releases(), 'release')}, but "
            f"{several(due, 'round was', 'rounds were')} charged: it lost charges, and its ε would be too small."
        )
    # What a resumed simulation does again is the same release, bit by bit; anything else is a new one.
    repeats = runtime.simulated and checkpoints is not None and bool(digest)
    progress.digest = origin(digest, progress.step, progress.digest, ledger)
    phases = tuple(method.phases)
    start, acting, stopped, items = 0, method, None, -1
    for phase in phases:
        acting, end = phase.method or method, start + (phase.rounds or rounds)
        if progress.step < end or phase is phases[-1]:
            rng = phase_rng(seed, phase.name, progress.digest)
            items = _enter(acting, runtime, progress, rng, fresh=progress.step == start)
            if not runtime.simulated and evaluate_every and phase.evaluated and progress.step > start:
                items = _grow(acting, runtime, progress, rng, items)
                account = _Account(ledger, budget, phase.name, progress.step - start)
                if (account.number % evaluate_every == 0 or progress.step == end) and not account.paid(progress):
                    _asked(acting, runtime, progress, select, account)
                    if checkpoints:
                        checkpoints.save(replace(progress, clients=runtime.state()))
        for step in range(progress.step + 1, end + 1):
            number, attempts = step - start, 0
            while True:
                people = runtime.available(public=True) if phase.public else runtime.available()
                items = _grow(acting, runtime, progress, rng, items)
                who = choose(people, _size(phase, cohort, people), _draw(runtime, rng, number), items)
                release, who, again = runtime.open(f"{phase.name}/{number}", who, progress.shared)
                again, charges = again or repeats, () if phase.public else releases(acting, who)
                known = again and ledger.repeats(release, progress.digest)
                if budget and charges and not known and not budget.allows(ledger, charges):
                    stopped = _stopped(budget, ledger, charges, f"{number} of {end - start}", phase.name)
                    break
                ledger.charge(release, charges, repeat=again, number=number, code=_code(acting), digest=progress.digest)
                began = time.perf_counter()
                try:
                    got = runtime.collect(acting, progress.shared, who, rng.fold("round", number), step)
                    if _step(acting, progress, got, number, last=attempts + 1 == ATTEMPTS):
                        break
                    attempts += 1
                except Abandoned as error:
                    attempts += 1
                    if attempts == ATTEMPTS:
                        raise Abandoned(f"{error} Given up after {attempts} attempts at round {number}.") from error
            if stopped:
                break
            trained = time.perf_counter()
            if got.loss is not None and not math.isfinite(got.loss):
                raise diverged(acting, number, "the devices' loss")
            progress.step = step
            line = Round(
                phase=phase.name,
                round=number,
                step=step,
                clients=len(who.users) if got.answered is None else got.answered,
                loss=got.loss,
                metrics={},
                epsilon=ledger.epsilons(delta),
                bytes_up=got.bytes_up,
                bytes_down=got.bytes_down,
                seconds=trained - began,
                evaluation_seconds=0.0,
                delta=delta,
                charged=bool(charges),
            )
            if not runtime.simulated and checkpoints:
                # Before anybody sees what came of it: a round that was seen and then run again would tell more.
                _tell(on_round, line)
                checkpoints.save(replace(progress, clients=runtime.state()))
            if phase.evaluated and evaluate_every and (number % evaluate_every == 0 or step == end):
                evaluated = _asked(acting, runtime, progress, select, _Account(ledger, budget, phase.name, number))
                spent = time.perf_counter() - trained
                epsilon = ledger.epsilons(delta)
                line = replace(
                    line,
                    metrics=evaluated.metrics,
                    epsilon=epsilon,
                    evaluation_seconds=spent,
                    errors=evaluated.errors,
                    unclipped=evaluated.unclipped,
                )
            if runtime.simulated or not checkpoints or line.metrics:
                _tell(on_round, line)
            if checkpoints and (step == end or checkpoints.due()):
                checkpoints.save(replace(progress, clients=runtime.state()))
        if stopped:
            account = _Account(ledger, budget, phase.name, number - 1)
            unasked = phase.evaluated and evaluate_every and (number == 1 or (number - 1) % evaluate_every)
            if unasked and not account.paid(progress):
                _asked(acting, runtime, progress, select, account)  # a last round is always asked
            if checkpoints:
                checkpoints.save(replace(progress, clients=runtime.state()))
            break
        start = end
    if progress.best is None:
        return Fitted(acting, runtime, progress.shared, Evaluated({}), progress.step, ledger, delta, stopped)
    best = progress.best
    runtime.load_state(best.clients)
    return Fitted(acting, runtime, _on(runtime, best.shared), best.evaluated, best.step, ledger, delta, stopped)


def origin(digest: str, step: int, before: str, ledger: Ledger) -> str:
    """What releases from here on are bound to: the digest; and once something else came before, also that.

    step, before: the checkpoint's round, and what it is bound to. Where there is no checkpoint, it is what the first
    charge is bound to: a run that was begun in one way does not go on in another as if it had been its first.

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
    """What a phase's random numbers derive from.

    After a change, noise of the same seed would cancel out between the releases before it and those after it.
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


def _size(phase: Phase, cohort: int | None, people: Users) -> int | None:
    """Clients a round; of public people there may be fewer, and their number hides nobody."""
    return min(cohort, len(people)) if phase.public and cohort is not None else cohort


def carry(old: Tree, new: Tree) -> Tree:
    """Parameters for a new phase or a larger catalogue: the old values under their names, the rest as new.

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


def _check(method: Method, rounds: int, evaluate_every: int) -> None:
    if rounds < 1:
        raise HomebodyError(f"Rounds must be at least 1, not {rounds}.")
    if evaluate_every < 0:
        raise HomebodyError(f"evaluate-every must be 0 (never) or more, not {evaluate_every}.")
    names = [phase.name for phase in method.phases]
    if len(set(names)) != len(names):
        raise HomebodyError(f"The phases of a method need names of their own, not {', '.join(names)}.")


def _enter(method: Method, runtime: Runtime, progress: Progress, rng: Rng, fresh: bool) -> int:
    """Begin a phase, or come back to its middle; answer for how many items its tables are known to be."""
    runtime.begin(method, rng.fold("clients"))
    if fresh:
        shared = carry(progress.shared, method.init_shared(runtime.catalogue, rng.fold("shared")))
        progress.shared = _on(runtime, shared)
        progress.server = method.init_server(progress.shared)
        progress.best = None
    else:
        progress.shared, progress.server = _on(runtime, progress.shared), _on(runtime, progress.server)
        runtime.load_state(progress.clients)
    progress.clients = {}  # the runtime holds them now, and they are large
    return runtime.catalogue.n_items if fresh else -1


def _on(runtime: Runtime, tree: Tree) -> Tree:
    return {name: value.to(runtime.device) for name, value in tree.items()}


class _Account(NamedTuple):
    """Where it is charged what devices tell of how well they are served."""

    ledger: Ledger
    budget: Budget | None
    phase: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.phase}/{self.number}/telemetry"

    def paid(self, progress: Progress) -> bool:
        """Whether it was asked before, and there is something to choose a round by: it need not be asked again."""
        return self.ledger.knows(self.name) and progress.best is not None

    def pays(self, charges: Sequence[Charge], code: str) -> bool:
        """Charge it, unless that would break the budget."""
        if not charges:
            return True
        if self.budget and not self.budget.allows(self.ledger, charges):
            return False
        self.ledger.charge(self.name, charges, number=self.number, code=code)
        return True


def _tell(on_round: Callable[[Round], None] | None, line: Round) -> None:
    if on_round:
        on_round(line)


def _draw(runtime: Runtime, rng: Rng, number: int) -> Rng:
    """What a cohort is drawn by. From the seed in a simulation; real devices could work that out, and who is in a
    round must stay unknown for sampling to hide anybody."""
    return rng.fold("cohort", number) if runtime.simulated else Rng(SystemRng().next_key())


def _asked(method: Method, runtime: Runtime, progress: Progress, select: str, account: _Account) -> Evaluated:
    """How good the model is now; the best on validation is kept."""
    if not account.pays(runtime.telemetry(method), _code(method)):
        return Evaluated({})
    try:
        evaluated = runtime.evaluate(method, progress.shared)
    except Diverged as error:
        raise diverged(method, progress.step, "what items are ranked by") from error
    if better(evaluated, progress.best.evaluated if progress.best else None, select):
        progress.best = Best(progress.step, evaluated, progress.shared, runtime.state(lasting=True))
    return evaluated


def _grow(method: Method, runtime: Runtime, progress: Progress, rng: Rng, items: int) -> int:
    """Give the items that came since a row in every table that has one for each; answer how many there are now."""
    now = runtime.catalogue.n_items
    if now != items:
        shared = method.init_shared(runtime.catalogue, rng.fold("shared"))
        progress.shared = _on(runtime, carry(progress.shared, shared))
        server = method.init_server(progress.shared)
        progress.server = _on(runtime, carry(progress.server, server))
        if progress.best is not None:
            progress.best.shared = carry(progress.best.shared, progress.shared)
    return now


def _stopped(budget: Budget, ledger: Ledger, charges: Sequence[Charge], number: str, phase: str) -> str:
    """Why no further round may be charged."""
    return (
        f"Training stopped before round {number} ({phase}): it would bring ε to {budget.spent(ledger, charges):.4g} "
        f"for {budget.who}, and the budget is {budget.epsilon:g}; {budget.spent(ledger):.4g} is spent."
    )


def _code(method: Method) -> str:
    """What causes a release: for whoever reads the ledger."""
    return f"{type(method).__name__}, homebody {__version__}"


def _step(method: Method, progress: Progress, got: Collected, number: int, *, last: bool) -> bool:
    """The server's step on what a round brought. Where clients may lie, one that fails is no round, and the answer is
    False: whoever spoiled it is left out of the next attempt, before the last."""
    try:
        before = {name: value.shape for name, value in progress.shared.items()}
        shared, server = method.server(progress.shared, progress.server, got.total)
        _refuse_nonsense(method, before, shared, number)
    except Exception as error:
        if got.spoiled is None:
            raise
        reason = str(error) if isinstance(error, HomebodyError) else type(error).__name__
        if last:
            raise Diverged(f"The server's step failed {ATTEMPTS} times in round {number}: {reason}") from error
        got.spoiled(reason)
        return False
    progress.shared, progress.server = shared, server
    return True


def _refuse_nonsense(method: Method, before: dict[str, torch.Size], shared: Tree, number: int) -> None:
    """The server's step may change numbers; names and shapes stay, and the numbers stay finite."""
    if before != {name: value.shape for name, value in shared.items()}:
        raise HomebodyError(
            f"{type(method).__name__}.server() must keep the names and shapes of the shared parameters."
        )
    for name, value in shared.items():
        if not bool(torch.isfinite(value).all()):
            raise diverged(method, number, f"'{name}'")


def diverged(method: Method | Reference, number: int, what: str) -> Diverged:
    """Why training cannot go on, and what of the method's settings may be lowered.

    >>> from homebody.methods.fedials import FedIALS
    >>> print(diverged(FedIALS(), 3, "the devices' loss"))
    Training diverged in round 3: the devices' loss is no longer finite. Smaller steps help.
    """
    settings = {one.name: getattr(method, one.name) for one in fields(method)}  # type: ignore[arg-type]
    rates = [f"{name} ({value:g})" for name, value in settings.items() if name.endswith("rate") and value]
    lower = f"Lower {'one of ' if len(rates) > 1 else ''}{', '.join(rates)}." if rates else "Smaller steps help."
    return Diverged(f"Training diverged in round {number}: {what} is no longer finite. {lower}")


def _due(method: Method, runtime: Runtime, step: int, rounds: int, cohort: int | None) -> int:
    """How many releases a ledger must know of after so many rounds; those that tell nothing are not in it."""
    due = start = 0
    for phase in method.phases:
        acting, end = phase.method or method, start + (phase.rounds or rounds)
        done = min(step, end) - start
        if done > 0 and not phase.public:
            who = choose(runtime.available(), cohort, Rng.of(0), runtime.catalogue.n_items)
            due += done if releases(acting, who) else 0
        start = end
    return due

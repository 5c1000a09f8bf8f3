"""What a device answers: it does its people's share of a round, and decides what leaves.

An answer is written down before it is given, together with the state that came of it, and the person's ledger is
charged before that. So a device may be killed at any moment: asked the same again, it gives the same answer, which
tells nothing new; and what it never gave, it works out anew.

Whether a person answers is decided before their history is read: by who takes part, by budgets, and by what the letter
asks for. From the charge on every outcome leaves through the channel, a failure as the zero update. Where a finite ε is
stated against the server, the answer leaves at a time that does not depend on the history either.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from homebody import __version__
from homebody.core import Cohort, Method, Rows, Tree, Update, Work, releases
from homebody.data import Population
from homebody.data.partitions import LEAST, everything, leave_one_out
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.home import Home
from homebody.federation.device.household import Household, grown
from homebody.federation.device.limits import ITEM_BYTES, TooLarge, answering_seconds, estimate, private, refuse_larger
from homebody.federation.device.models import PrivateState
from homebody.federation.device.outbox import ProxyMessage
from homebody.federation.device.people import OptedOut, Person
from homebody.federation.epoch import MESSAGE_REPORTS, Epoch
from homebody.federation.schema import FeatureSchema
from homebody.federation.task import Task, acting
from homebody.federation.telemetry import measurements
from homebody.fit import carry
from homebody.privacy import Budget, Charge
from homebody.rng import Rng, SystemRng

if TYPE_CHECKING:
    from homebody.federation.device.reporter import Reporter

__all__ = ["Device", "Recommended", "recommend"]


TOY_ITEMS = 8
"""Of the catalogue that kernels are compiled with."""
COMPILING = 20
"""How many times as long as a person's work that may take: it depends on nobody, and comes once."""
T = TypeVar("T")
_Said = tuple[dict[str, Any], dict[str, bytes]]
"""A letter's header and its parts."""


class OverBudget(HomebodyError):
    """A person's own budget would be broken."""


class OutOfTime(HomebodyError):
    """The work on a task took longer than the device allows."""


class _Asked(NamedTuple):
    """What a letter asks of each person, all of it known before any history is read."""

    shared: Tree
    charges: Sequence[Charge]
    nothing: Update
    """The update of somebody who has nothing to learn from, before the channel."""
    seconds: float
    """When the answer leaves after the work began; 0: at once."""


class Device:
    """Answers the server's letters for the people of a home.

    clock, sleep: what answers wait by; a client that is told to stop cuts a wait short, and then sends nothing.
    """

    def __init__(
        self,
        home: Home,
        log: Callable[..., None] = lambda event, **facts: None,
        reporter: Reporter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.home, self._log, self._reporter = home, log, reporter
        self._clock, self._sleep = clock, sleep
        self._household: tuple[object, Household, list[Person]] | None = None
        self._shared: tuple[object, Tree] | None = None
        self._nothing: tuple[object, Update] | None = None
        self._warm: set[str] = set()
        self._abandoned: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Whether work that was given up is still going on: only a new process is rid of it."""
        return self._abandoned is not None and self._abandoned.is_alive()

    def answer(self, body: bytes, until: float = math.inf) -> bytes:
        """The letter to send back, which says what it answers; where it cannot, a letter that says why.

        until: how long a proxy may be tried that is away, by the monotonic clock.
        """
        said, parts = self._answered(body, until)
        return wire.encode_letter({"to": wire.digest(body), **said}, parts)

    def _answered(self, body: bytes, until: float) -> _Said:
        try:
            header, parts = wire.decode_letter(body)
            task = Task.read(header)
            self._refuse_unfit(task)  # here, where it is about the letter alone
        except (wire.Malformed, HomebodyError) as error:
            self._log("refused", reason=str(error))
            return {"refused": str(error)[:500]}, {}
        except Exception as error:  # no history was looked at yet; a letter must not end the process
            self._log("failed", reason=_reason(error))
            return {"refused": "The letter asks for something that this device cannot work with."}, {}
        try:
            return self._answer(task, parts, until)
        except (wire.Malformed, TooLarge, OutOfTime) as error:
            self._log("refused", reason=str(error))
            return {"refused": str(error)[:500]}, {}
        except Exception as error:
            # What went wrong may name a person or a folder: that stays here. A letter must not end the process.
            self._log("failed", do=task.do, release=task.release, reason=_reason(error))
            return {"refused": "The device cannot answer this now."}, {}

    def _refuse_unfit(self, task: Task) -> None:
        through = task.acting.uplink.facts.shuffled
        if through and self._reporter is None:
            raise HomebodyError(
                "Reports of this method go through a proxy, and this device has none: make it anew, with "
                "`homebody client init … --proxy https://HOST:PORT`; a device that is there cannot be given one."
            )
        if (task.epoch is not None) != (through and task.do in ("train", "evaluate")):
            raise wire.Malformed("The letter has no epoch for what goes through a proxy, or one for something else.")
        if self.stuck:
            raise HomebodyError("The device is about to start anew: ask again.")

    def _answer(self, task: Task, parts: Mapping[str, bytes], until: float) -> _Said:
        if "items" in parts:
            self._new_items(parts["items"])
        if task.do == "hello":
            self._refuse_too_large(task, 1)
            self._warm_up(task)
            return self._about_myself(), {}
        active = {person.slot for person in self.home.people.active()}
        asked = [] if task.do == "adapt" else list(dict.fromkeys(task.people))
        people = [number for number in asked if number - task.first in active]
        lacks = self._take_in(task, parts, len(people))
        if lacks:
            self.home.models.drop_unused({task.shared})
            held = self.home.models.shared(task.shared) is not None
            return {**self._about_myself(task.shared if held else ""), "lacks": lacks}, {}
        if task.features:
            self._warm_up(task)  # a greeting brings no features, and without them the method may be another
        letter = self._asked(task, len(people))
        if task.epoch is not None:
            self._confirm(task, until)
        began = self._clock()
        answers: dict[str, bytes] = {}
        declined = [number for number in asked if number not in people]
        for _ in declined:
            self._log("declined", release=task.release, reason="Nobody of this number takes part.")
        for number in people:
            try:
                answers[str(number)] = self._one(task, letter, number)
            except Exception as error:
                # Over a budget, opted out, or a disk that cannot be written. The server is not told why, and the others
                # of the household answer all the same.
                declined.append(number)
                self._log("declined", release=task.release, reason=_reason(error))
        self.home.models.rank_with(json.dumps(task.described()), task.shared, task.release, task.step)
        self.home.models.keep_states(task.run, [task.step] if task.keep is None else [task.keep, task.step])
        self.home.models.drop_unused({task.shared})
        self._log("answered", do=task.do, release=task.release, people=len(answers), declined=len(declined))
        self._wait(task, began, letter.seconds)
        if task.epoch is not None:
            answers, more = self._report(task, answers, until)
            declined += more
        return {**self._about_myself(task.shared), "declined": declined}, answers

    def _take_in(self, task: Task, parts: Mapping[str, bytes], people: int) -> str:
        """Keep what the letter brings, once it is known to fit; what it lacks, if anything."""
        if "features" in parts:
            if not task.features or wire.digest(parts["features"]) != task.features:
                raise wire.Malformed("The sheet of features is not the one that the letter names.")
            FeatureSchema.read(parts["features"])  # refuses what it cannot read before it is kept
            self.home.items.put_schema(task.features, parts["features"])
        if task.features and self.home.items.schema(task.features) is None:
            return "features"
        self._refuse_too_large(task, people)
        if "shared" in parts:
            if wire.digest(parts["shared"]) != task.shared:
                raise wire.Malformed("The shared parameters are not those that the letter names.")
            self._readable(task, parts["shared"])  # refuses what it cannot read before it is kept
            self.home.models.put_shared(task.shared, parts["shared"])
        if self.home.models.shared(task.shared) is None:
            return "shared"
        return "items" if len(self.home.items) < task.n_items else ""

    def _refuse_too_large(self, task: Task, people: int) -> None:
        """Before anything of the size that the letter names is made."""
        refuse_larger(self._estimate(task, people), self.home.settings)

    def _estimate(self, task: Task, people: int) -> Work:
        """Also of the toy that kernels are compiled with."""
        sizes = replace(_sheet(self.home, task.features).catalogue(0), n_items=max(TOY_ITEMS, task.n_items))
        return estimate(task.acting, sizes, max(TOY_ITEMS, task.longest), people)

    def _readable(self, task: Task, content: bytes) -> Tree:
        """The shared parameters, which are read once a letter."""
        about = (task.shared, task.described(), task.phase, task.n_items)
        if self._shared is None or self._shared[0] != about:
            sheet = _sheet(self.home, task.features)
            self._shared = (about, _readable(task.acting, wire.decode_tree(content), task.n_items, sheet))
        return self._shared[1]

    def _asked(self, task: Task, people: int) -> _Asked:
        """What is to be done for each person. What is wrong with the letter shows here, before anybody is charged."""
        content = self.home.models.shared(task.shared)
        assert content is not None
        shared, method, own = self._readable(task, content), task.acting, _alone(task.acting)
        # Charged as one who is always drawn: a device cannot know who else could have been.
        cohort = Cohort(np.zeros(1, dtype=np.int64), "all", 1, 1, task.n_items)
        try:
            charges = releases(own, cohort) if task.do == "train" else own.uplink.charges(cohort)
            about = (task.do, task.described(), task.phase, task.n_items)
            if self._nothing is None or self._nothing[0] != about:
                known = _sheet(self.home, task.features).catalogue(task.n_items)
                none = measurements({}, task.cutoffs)
                if task.do != "evaluate":
                    none = self._in_time(lambda: wire.nothing(method, shared, known))
                method.uplink.device(none, Rng.of(0))
                self._nothing = (about, none)
        except OutOfTime:
            raise
        except Exception as error:
            raise wire.Malformed("The letter's method, stages and parameters do not go together.") from error
        nothing = self._nothing[1]
        if task.epoch is not None:
            entries = sum(_entries(value) for value in nothing.values())
            reports = method.uplink.facts.reports
            if reports is None or (entries, reports.k) != (task.epoch.entries, task.epoch.k):
                raise wire.Malformed("The letter's epoch is about another update than the method's.")
        seconds = answering_seconds(self._estimate(task, people), people) if private(charges) else 0.0
        return _Asked(shared, charges, nothing, seconds)

    def _wait(self, task: Task, began: float, seconds: float) -> None:
        """Until the answer may leave. One that took longer leaves a whole number of such times after the work began,
        and is counted: it tells that it was late."""
        if not seconds:
            return
        taken = self._clock() - began
        if taken > seconds:
            self.home.outbox.note_late()
            self._log("late", release=task.release, seconds=round(taken, 3), estimate=seconds)
        end = began + seconds * max(1, math.ceil(taken / seconds))
        while (left := end - self._clock()) > 0:
            if self._sleep(left):
                return

    def _confirm(self, task: Task, until: float) -> None:
        """That everybody is asked the same, before anything is charged."""
        assert self._reporter is not None
        assert task.epoch is not None
        self._reporter.confirm(task.epoch, until)

    def _report(self, task: Task, sealed: Mapping[str, bytes], until: float) -> tuple[dict[str, bytes], list[int]]:
        """Give these people's reports to the proxy; what goes into the letter, and who of them did not report.

        All in one message, if it is not too long for that: a proxy could pass on the one of two, and then wait for
        enough other devices before it passes on the other.
        """
        assert self._reporter is not None
        assert task.epoch is not None
        slots = {int(number) - task.first: reports for number, reports in sealed.items()}
        reported: set[int] = set()
        try:
            made = {slot for message in self.home.outbox.messages(task.ask) for slot in message.people}
            left, most = [slot for slot in slots if slot not in made], max(1, MESSAGE_REPORTS // task.epoch.k)
            for some in (left[at : at + most] for at in range(0, len(left), most)):
                message = self._reporter.message(task.epoch, b"".join(slots[slot] for slot in some))
                self.home.outbox.put_message(task.ask, some, message)
            for kept in self.home.outbox.messages(task.ask):
                self._reporter.send(kept.bytes, until, partial(self._keeps, task.ask, kept))
                reported.update(kept.people)
        except HomebodyError as error:
            self._log("declined", release=task.release, reason=_reason(error))
        told = {str(task.first + slot): wire.encode_tree({}) for slot in slots if slot in reported}
        return told, [task.first + slot for slot in slots if slot not in reported]

    def _keeps(self, ask: str, message: ProxyMessage) -> bool:
        """Whoever opts out takes back what has not left yet."""
        return message in self.home.outbox.messages(ask)

    def _about_myself(self, holds: str = "") -> dict[str, Any]:
        """Who takes part here, and what need not be sent again."""
        people = [person.slot for person in self.home.people.active()]
        content = self.home.items.schema()
        held = [name for name in (holds, "" if content is None else wire.digest(content)) if name]
        return {"people": people, "items": len(self.home.items), "holds": held}

    def _new_items(self, part: bytes) -> None:
        try:
            first, items = json.loads(part)
            pairs = [(str(item), str(name)) for item, name in items]
            first = int(first)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise wire.Malformed("The list of items is not the JSON it should be.") from error
        refuse_larger(Work(memory=ITEM_BYTES * (first + len(pairs))), self.home.settings)
        try:
            self.home.items.add(first, pairs)
        except HomebodyError as error:
            if error.__cause__ is not None:  # the disk's fault, not the letter's
                raise
            raise wire.Malformed("The items do not go on from the catalogue that this device knows.") from error

    def _one(self, task: Task, letter: _Asked, number: int) -> bytes:
        """One person's answer: the one that was given before, or a new one, charged and written down first."""
        slot = number - task.first
        release = task.release if task.do == "train" else f"{task.release}/telemetry"
        given = self.home.outbox.answer(slot, task.run, release, task.ask)
        if given is not None:
            return given
        self._charge(task, slot, release, letter.charges)
        try:
            update, state = self._worked(task, letter.shared, slot)
        except Exception as error:
            self._log("nothing", release=task.release, reason=_reason(error))
            update, state = task.acting.uplink.device(letter.nothing, SystemRng()), None
        answer, reports = wire.encode_tree(update, half=task.half), 0
        if task.epoch is not None:
            answer, reports = self._sealed(task.epoch, update)
        step, base, content = state or (0, None, None)
        self.home.outbox.finish(slot, task.run, release, task.ask, step, base, content, answer, reports)
        return answer

    def _worked(self, task: Task, shared: Tree, slot: int) -> tuple[Update, PrivateState | None]:
        """What leaves, and the state that is kept. It may fail in any way that histories and parameters make it."""
        method = task.acting
        household, people = self._people(task)
        user = [person.slot for person in people].index(slot)
        household.begin(method, Rng(torch.tensor(task.clients_key)))
        state = self.home.models.state(slot, task.run, task.step if task.do == "train" else task.step + 1)
        empty = not household.split.lengths[user]
        if state is not None and not empty:
            _restore(self.home, household, state, task.phase, shared, user)
        if empty:
            raise HomebodyError("Nothing is known here of what this person did.")
        if task.do == "evaluate":
            found = self._in_time(lambda: household.measure(method, shared, user))
            if not all(map(math.isfinite, found.values())):
                raise HomebodyError("What was measured is not finite.")
            return method.uplink.device(measurements(found, task.cutoffs), SystemRng()), state
        update, kept = self._in_time(lambda: household.train(method, shared, user, Rng(torch.tensor(task.key))))
        base = task.shared if method.scoring.parameters == "base" else None
        return update, PrivateState(
            task.step, base, wire.encode_letter({"phase": task.phase}, {"state": wire.encode_tree(kept)})
        )

    def _in_time(self, work: Callable[[], T], times: int = 1) -> T:
        """What the work gives, or `OutOfTime` after so many times the home's limit.

        Nothing can stop a thread: it is left to itself, see `stuck`.
        """
        done: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="work", daemon=True)
        thread.start()
        thread.join(times * self.home.settings.most_seconds)
        if thread.is_alive():
            self._abandoned, self._household = thread, None
            raise OutOfTime("The work took longer than this device allows.")
        if failed:
            raise failed[0]
        return done[0]

    def _sealed(self, epoch: Epoch, update: Tree) -> tuple[bytes, int]:
        """Reports for the proxy, and how many they are."""
        assert self._reporter is not None
        pairs = wire.report_numbers(update)
        return self._reporter.sealed(epoch, pairs), len(pairs)

    def _charge(self, task: Task, slot: int, release: str, charges: Sequence[Charge]) -> None:
        """Before anything is worked out, let alone told."""
        ledger, allowed = self.home.ledger(slot), self.home.settings.budget
        name = f"{task.run}/{release}@{task.ask}"
        # What was begun, charged and never given is the same release. What was given and is no longer here is a new
        # one, and so is what a store that was put back to an earlier day does not know of.
        given = task.ask in self.home.outbox.answered(slot, task.run, release)
        same = self.home.outbox.begun(slot, task.run, release, task.ask) and not given and ledger.knows(name)
        if allowed and not same and not Budget.parse(allowed).allows(ledger, charges):
            raise OverBudget("It would spend more than this person allows.")
        self.home.outbox.begin(slot, task.run, release, task.ask)
        ledger.charge(name, charges, repeat=same, number=task.step, code=f"{task.method}, homebody {__version__}")

    def _people(self, task: Task) -> tuple[Household, list[Person]]:
        """The household as it is now; it is made anew when a history, the people or the catalogue change."""
        about = (self.home.store.changes, task.n_items, task.described())
        if self._household is None or self._household[0] != about:
            people = self.home.people.active()
            found = _household(self.home, people, task.described(), task.n_items, task.longest)
            self._household = (about, found, people)
        return self._household[1], self._household[2]

    def _warm_up(self, task: Task) -> None:
        """Compile a method's kernels before it is asked in earnest: a round does not wait for that."""
        about = json.dumps([task.method, task.fields], sort_keys=True)
        if about in self._warm or (task.features and self.home.items.schema(task.features) is None):
            return  # without its features a method may not be the same
        toy = Population("toy", np.array([0, 3]), np.array([0, 1, 2], dtype=np.int32), n_items=TOY_ITEMS)
        method, rng = task.acting, Rng.of(0)
        split = leave_one_out(toy, how="latest", negatives=2) if task.measures else everything(toy)
        household = Household(replace(split, coded=_sheet(self.home, task.features).encoded([{}], TOY_ITEMS)))
        household.begin(method, rng)
        shared = method.init_shared(household.catalogue, rng)
        both = partial(household.train, method, shared, 0, rng), partial(household.measure, method, shared, 0)
        for work in both:
            self._in_time(work, COMPILING)
        self._warm.add(about)


class Recommended(NamedTuple):
    """One item for one person."""

    item: str
    name: str
    score: float


def recommend(home: Home, person: Person, k: int = 10) -> list[Recommended]:
    """A person's best new items, by what the device holds; there need be no network."""
    model = home.models.ranking()
    content = None if model is None else home.models.shared(model.digest)
    if model is None or content is None:
        raise HomebodyError("This device has no model yet: it gets one when it takes part in a round.")
    described = json.loads(model.description)
    phase, n_items = model.release.rpartition("/")[0], len(home.items)
    method = acting(described, phase)
    name = described.get("features", "")
    if name and home.items.schema(name) is None:
        raise HomebodyError("This device lacks what its model knows of features: it gets that with the next round.")
    household = _household(home, [person], {**described, "measures": False}, n_items)
    household.begin(method, Rng(torch.tensor(described["clients_key"])))
    state = home.models.state(person.slot, described["run"], model.step + 1)
    fresh = method.init_shared(household.catalogue, Rng.of(described["seed"]))
    shared = _carried(wire.decode_tree(content), fresh)  # items that came after the model are as new
    if state is not None and household.split.lengths[0]:
        _restore(home, household, state, phase, shared, 0)
    population = household.split.population
    best = household.recommend(method, shared, 0, k)
    return [Recommended(population.item_id(item), population.item_name(item), score) for item, score in best]


def _reason(error: Exception) -> str:
    """Why something failed, for the device's own log: without a person's name, and of an accident its kind alone."""
    if isinstance(error, OptedOut):
        return "Nobody of this number takes part."
    return str(error) if isinstance(error, HomebodyError | wire.Malformed) else type(error).__name__


def _alone(method: Method) -> Method:
    """The method as a device must charge it: it cannot know that others report honestly, so a shuffle hides nothing."""
    channel, shuffle = method.uplink, method.uplink.facts.shuffle
    if shuffle is None:
        return method
    own = channel.with_stages(*(stage for stage in channel.stages if stage is not shuffle))
    return replace(method, uplink=own)  # type: ignore[type-var]


def _sheet(home: Home, name: str) -> FeatureSchema:
    """What is known of features; nothing, where the letter names none."""
    content = home.items.schema(name) if name else None
    return FeatureSchema() if content is None else FeatureSchema.read(content)


def _entries(value: Any) -> int:
    """How many numbers a tensor has, or a table that it has rows of."""
    if isinstance(value, Rows):
        return value.size * math.prod(value.value.shape[1:])
    return int(value.numel())


def _readable(method: Method, shared: Tree, n_items: int, sheet: FeatureSchema) -> Tree:
    """The shared parameters in the precision that the method computes in; refused where they are not its own.

    Its tables grow by so many rows with each item: two toy catalogues tell by how many, and nothing large is made.
    """
    two, three = (method.init_shared(sheet.catalogue(count), Rng.of(0)) for count in (2, 3))
    if shared.keys() != two.keys() or n_items < 2:
        raise wire.Malformed("The shared parameters are not those of the method.")
    for name, value in two.items():
        rows = (len(three[name]) - len(value)) * (n_items - 2) if value.dim() else 0
        wanted = (len(value) + rows, *value.shape[1:]) if value.dim() else ()
        found = shared[name]
        if isinstance(found, Rows) or tuple(found.shape) != wanted:
            raise wire.Malformed("The shared parameters have another shape than the method's.")
        if found.is_floating_point() != value.is_floating_point() or not bool(torch.isfinite(found).all()):
            raise wire.Malformed("The shared parameters are not the numbers that the method works with.")
    return {name: shared[name].to(value.dtype) for name, value in two.items()}


def _carried(old: Tree, new: Tree) -> Tree:
    """As `carry`, where the old parameters may have come in 16 bits."""
    return carry({name: value.to(new[name].dtype) if name in new else value for name, value in old.items()}, new)


def _household(
    home: Home, people: list[Person], described: Mapping[str, Any], n_items: int, longest: int | None = None
) -> Household:
    """These people with what they have of so many items; the last two of each are held out where devices measure.

    longest: how many interactions of a person count, the latest; None: all.
    """
    population = home.history.population(people, n_items, longest)
    numbers: npt.NDArray[np.int64] = np.array([described["first"] + person.slot for person in people])
    if described["measures"] and population.lengths.max(initial=0) >= LEAST:
        split = leave_one_out(
            population,
            protocol=described["protocol"],
            how=described["held_out"],
            seed=described["seed"],
            negatives=described["negatives"],
        )
    else:
        split = everything(population, seed=described["seed"])
    if name := described.get("features", ""):
        coded = _sheet(home, name).encoded([home.people.profile(person) for person in people], n_items)
        split = replace(split, coded=coded)
    return Household(replace(split, numbers=numbers), cutoffs=described["cutoffs"])


def _restore(home: Home, household: Household, state: PrivateState, phase: str, shared: Tree, user: int) -> None:
    """Give a household a person's state of this phase, and the parameters that it refers to, as long as the shared
    ones are now. Another phase begins without any."""
    header, parts = wire.decode_letter(state.bytes)
    if header["phase"] != phase:
        return
    tree = grown(wire.decode_tree(parts["state"]), shared)
    if any(isinstance(rows, Rows) and len(rows.index) and int(rows.index.max()) >= rows.size for rows in tree.values()):
        raise HomebodyError("The private state is about a larger catalogue than the shared parameters.")
    base = None if state.base is None else home.models.shared(state.base)
    household.hold(user, tree, None if base is None else _carried(wire.decode_tree(base), shared))

"""How a device answers a letter.

    decode the letter → check the task → take in its parts → for each person: charge, work, send through the channel,
    write down → wait → report to the proxy → reply

In a secure sum a device answers five letters a round, one for each exchange (`secure_sum.party`). The third asks for
the sum of its people's updates: only then are people charged, and work.

An answer is written down before it is given, together with the state that came with it; the person's ledger is charged
before the work. So a device may be killed at any moment. Asked the same again, it gives the same answer, which
discloses nothing new; it computes an answer again only if it never gave it.

Whether a person answers is decided before their history is read: by who takes part, by budgets, and by the letter.
After the charge every outcome leaves through the channel, a failure as the zero update. If the method states a finite ε
against the server, the time at which the answer leaves does not depend on the history either.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from homebody import __version__
from homebody.core import Cohort, Method, Rows, Tree, Update, Work, releases
from homebody.errors import HomebodyError
from homebody.federation import wire
from homebody.federation.device.apps import Apps
from homebody.federation.device.home import Home
from homebody.federation.device.household import TOY_ITEMS, Household, compile_kernels, feature_schema
from homebody.federation.device.limits import ITEM_BYTES, TooLarge, answering_seconds, estimate, private, refuse_larger
from homebody.federation.device.models import PrivateState
from homebody.federation.device.people import OptedOut, Person
from homebody.federation.epoch import BIT_BYTES, MESSAGE_REPORTS, SEAL_BYTES
from homebody.federation.schema import FeatureSchema
from homebody.federation.secure_sum.helped import HelpedParty, HelpedTerms, noise_depth
from homebody.federation.secure_sum.messages import BadMessage, Terms
from homebody.federation.secure_sum.roster import BadRoster
from homebody.federation.task import SumTask, Task, asks, measurements, measuring
from homebody.federation.views import views_of
from homebody.privacy import Budget, Channel, Charge
from homebody.privacy.ring import Numbers, Ring, entries_of
from homebody.rng import Rng, SystemRng

if TYPE_CHECKING:
    from homebody.federation.device.desk import Desk
    from homebody.federation.device.reporter import Reporter
    from homebody.federation.secure_sum.party import Party

__all__ = ["Device"]

COMPILING = 40
"""How many times as long as a person's work compilation may take: it depends on nobody, and happens once."""
NO_PART = "This device has no part in this attempt at a secure sum: begin another."
T = TypeVar("T")
Reply = tuple[dict[str, Any], dict[str, bytes]]
"""A letter's header and its parts."""
Finished = tuple[int, PrivateState | None]
"""The number of a person who took part in a secure sum, and their state, until both are written down."""


class OutOfTime(HomebodyError):
    """The work on a task took longer than the device allows."""


class NobodyAnswers(HomebodyError):
    """Each person of the device declined, so that it has nothing to add to a secure sum."""


class Assignment(NamedTuple):
    """What a letter asks of each person. All of it is known before any history is read."""

    method: Method
    """What computes an update; its channel is empty where the device adds up its people's updates first."""
    shared: Tree
    charges: Sequence[Charge]
    zero: Update
    """The update of a person who has nothing to learn from, before the channel."""
    seconds: float
    """How long after the start of the work the answer leaves; 0: at once."""
    channel: Channel
    """The channel that the method's updates leave by, fitted to the parties of a secure sum."""
    ring: Ring | None = None
    """The whole numbers that a secure sum adds up."""


class Device:
    """Answers the server's letters for the people of a home.

    clock, sleep: what answers wait by. A client that is stopping cuts the wait short, and then sends nothing.
    """

    def __init__(
        self,
        home: Home,
        log: Callable[..., None] = lambda event, **facts: None,
        reporter: Reporter | None = None,
        *,
        desk: Desk | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.home, self._log, self._reporter = home, log, reporter
        self._apps = Apps(home, desk, log)
        self._clock, self._sleep = clock, sleep
        # The latest results, each with what it was computed from.
        self._household: tuple[object, Household, list[Person]] | None = None
        self._shared: tuple[object, Tree] | None = None
        self._zero: tuple[object, Update] | None = None
        self._compiled: set[str] = set()
        self._abandoned: threading.Thread | None = None

    @property
    def stuck(self) -> bool:
        """Whether work that was given up is still running: only a new process ends it."""
        return self._abandoned is not None and self._abandoned.is_alive()

    def answer(self, body: bytes, until: float = math.inf) -> bytes:
        """The letter to send back. It names the letter that it answers; a refusal says why.

        until: how long a proxy that cannot be reached is tried, by the monotonic clock.
        """
        sayable: tuple[type[Exception], ...] = (wire.Malformed, HomebodyError)
        otherwise = "The letter asks for something that this device cannot work with."
        about: dict[str, str] = {}
        try:
            header, parts = wire.decode_letter(body)
            task = Task.read(header, self._allowed())
            facts = task.acting.uplink.facts
            # Messages that the server reads one by one leave in letters, or through a proxy: the server says which.
            through, helped = facts.shuffled or (task.epoch is not None and facts.reader is not None), facts.helped
            if (through or helped) and self._reporter is None:
                what = (
                    "Reports of this method go through a proxy" if through else "A helper opens the sums of this method"
                )
                raise HomebodyError(
                    f"{what}, and this device has {'none' if through else 'no proxy'}: create a new device with "
                    "`homebody client init … --proxy https://HOST:PORT`; an existing one cannot be given a proxy."
                )
            if (task.epoch is not None) != (through and task.do in ("train", "evaluate")):
                raise wire.Malformed(
                    "The letter has no epoch for what goes through a proxy, or one for something else."
                )
            if (task.sum is not None) != (task.acting.uplink.facts.secret and task.do in ("train", "evaluate")):
                raise wire.Malformed(
                    "The letter asks for no secure sum where the method has one, or for one where it has none."
                )
            if task.sum is not None and (task.sum.helper is not None) != helped:
                raise wire.Malformed(
                    "The letter asks for a secure sum with a helper, or without one, unlike the method."
                )
            if task.sum is not None and task.sum.terms.asks != asks(header):
                # Other devices may be asked for other noise, or to work on parameters that tell this one's part apart.
                raise wire.Malformed("The letter's secure sum is about another letter than this one.")
            if self.stuck:
                raise HomebodyError("The device is restarting: ask again.")
            # From here on other errors may name a person or a folder, which must not leave the device.
            sayable = (wire.Malformed, TooLarge, OutOfTime, BadMessage, BadRoster)
            otherwise = "The device cannot answer this now."
            about = {"do": task.do, "release": task.release}
            reply, answers = self._answer(task, parts, until)
        except sayable as error:
            self._log("refused", reason=str(error))
            reply, answers = {"refused": str(error)[:500]}, {}
        except Exception as error:  # a letter must not end the process
            self._log("failed", **about, reason=_reason(error))
            reply, answers = {"refused": otherwise}, {}
        return wire.encode_letter({"to": wire.digest(body), **reply}, answers)

    def _allowed(self) -> Sequence[str]:
        """The methods of packages that may run here. An error of the home names its folder, which must not leave."""
        try:
            return self.home.settings.methods
        except HomebodyError as error:
            raise RuntimeError("the settings cannot be read") from error

    def _answer(self, task: Task, parts: Mapping[str, bytes], until: float) -> Reply:
        models = self.home.models
        if "items" in parts:
            self._add_items(parts["items"])
        if task.do == "hello":
            if self._describes(task):
                refuse_larger(self._estimate(task, 1), self.home.settings)
            self._compile(task)
            return self._status(), {}
        active = {person.slot for person in self.home.people.active()}
        asked = [] if task.do == "adapt" else list(dict.fromkeys(task.people))
        people = [number for number in asked if number - task.first in active]
        lacks = self._take_in(task, parts, len(people))
        if lacks:
            models.drop_unused({task.shared})
            held = models.shared(task.shared) is not None
            return {**self._status(task.shared if held else ""), "lacks": lacks}, {}
        if task.features:
            self._compile(task)  # a greeting brings no features, and without them the method may be another
        assignment = self._assign(task, len(people))
        self.home.sums.drop_others(task.sum)
        if task.sum is not None and task.sum.helper is not None:
            assert self._reporter is not None  # `answer` has checked it
            # What the helper itself says counts, and nobody is charged before.
            self._reporter.confirm_sum(task.sum.helper, until)
        if task.sum is not None:
            return self._answer_sum(task, assignment, people, parts.get(wire.QUESTION, b""))
        if task.epoch is not None:
            assert self._reporter is not None  # `answer` has checked it
            self._reporter.confirm(task.epoch, until)  # everybody is asked the same; before anything is charged
        began = self._clock()
        answers: dict[str, bytes] = {}
        declined = [number for number in asked if number not in people]
        for _ in declined:
            self._log("declined", release=task.release, reason="Nobody of this number takes part.")
        for number in people:
            try:
                answers[str(number)] = self._answer_person(task, assignment, number - task.first)
            except Exception as error:
                # Over a budget, opted out, or a disk that cannot be written. The server is not told why, and the others
                # of the household answer all the same.
                declined.append(number)
                self._log("declined", release=task.release, reason=_reason(error))
        self._answered(task, len(answers), len(declined))
        self._wait(task, began, assignment.seconds)
        if task.epoch is not None:
            answers, unreported = self._report(task, answers, until)
            declined += unreported
        return {**self._status(task.shared), "declined": declined}, answers

    def _answered(self, task: Task, people: int, declined: int) -> None:
        """After the work on a letter: rank with its model, and drop what is not needed any more."""
        models = self.home.models
        models.rank_with(json.dumps(task.described()), task.shared, task.release, task.step)
        models.keep_states(task.run, [task.step] if task.keep is None else [task.keep, task.step])
        models.drop_unused({task.shared})
        self._log("answered", do=task.do, release=task.release, people=people, declined=declined)

    def _answer_sum(self, task: Task, assignment: Assignment, people: Sequence[int], question: bytes) -> Reply:
        """One exchange of a secure sum. What this device answers is stored before it leaves: asked the same again, it
        gives the same bytes."""
        assert task.sum is not None
        exchange, terms = task.sum.exchange, task.sum.terms
        began, finished = self._clock(), list[Finished]()

        def vector() -> Numbers:
            assert assignment.ring is not None
            updates = self._finish(task, assignment, people, finished)
            numbers = assignment.channel.party(updates, assignment.ring, SystemRng())
            if not finished:
                raise NobodyAnswers("Nobody of this device takes part in the sum.")
            return numbers

        try:
            if exchange == "keys" and not any(self._may(assignment, number - task.first) for number in people):
                raise NobodyAnswers("Nobody of this device takes part in the sum.")
            party, message = self._exchanged(task, question, vector)
        except NobodyAnswers as error:
            self._log("declined", release=task.release, reason=str(error))
            return {**self._status(task.shared), "declined": list(dict.fromkeys(task.people))}, {}
        with self.home.store.writing():
            for number, state in finished:
                about = (number - task.first, task.run, task.counted, task.ask)
                self.home.outbox.finish(*about, state, b"", size=len(message))
            self.home.sums.put(task.sum, party.state())
        # Also where the same was answered before: who took part is in the record of what left.
        declined = list[int]()
        if exchange == "masked":
            answered = partial(self.home.outbox.answered, run=task.run, release=task.counted)
            gave = {number for number in people if task.ask in answered(number - task.first)}
            declined = [number for number in dict.fromkeys(task.people) if number not in gave]
        if finished:
            self._answered(task, len(finished), len(declined))
            self._wait(task, began, assignment.seconds)
        if self.home.sums.get(task.sum) is None:  # somebody opted out by now: what they were in stays here
            raise BadMessage(NO_PART)
        if task.sum.last:
            self.home.store.scrub()  # of the secrets of the round
        self._log("exchanged", exchange=exchange, release=task.release, attempt=terms.attempt, parties=terms.parties)
        return {**self._status(task.shared), "declined": declined}, {wire.SUM: message}

    def _exchanged(
        self, task: Task, question: bytes, vector: Callable[[], Numbers]
    ) -> tuple[Party | HelpedParty, bytes]:
        """This device in the attempt that a letter names, after it has answered, and what it answers."""
        from homebody.federation.flower.protocol import load_private
        from homebody.federation.secure_sum.party import Party

        assert task.sum is not None
        state = self.home.sums.get(task.sum)
        if task.sum.helper is not None:
            assert self._reporter is not None
            helped = self._reporter.helped(task.sum.helper, state)
            return helped, helped.answer(vector)
        assert isinstance(task.sum.terms, Terms)
        key, fewest = load_private((self.home.path / "device.key").read_bytes()), self.home.settings.fewest
        known = self.home.roster.known(task.run)
        if state is not None:
            party = Party.of_state(state, key, fewest=fewest, known=known)
        elif task.sum.exchange == "keys":
            party = Party.join(task.sum.terms, task.first, key, fewest=fewest, known=known)
        else:
            raise BadMessage(NO_PART)
        return party, party.answer(task.sum.exchange, question, vector)

    def _finish(
        self, task: Task, assignment: Assignment, people: Sequence[int], finished: list[Finished]
    ) -> Iterator[Update]:
        """The updates of all who take part, one after the other, each charged before the work; and in `finished` who
        they are."""
        for number in people:
            try:
                self._charge(task, assignment, number - task.first)
            except Exception as error:
                self._log("declined", release=task.release, reason=_reason(error))
                continue
            update, state = self._work(task, assignment, number - task.first)
            finished.append((number, state))
            yield update

    def _describes(self, task: Task) -> bool:
        """Whether the device has the features that the method may need: a greeting brings none."""
        here = not task.features or self.home.items.schema(task.features) is not None
        return here or not {"user features", "item features"} & {*task.acting.needs, *task.acting.uses}

    def _add_items(self, part: bytes) -> None:
        try:
            first, items = json.loads(part)
            pairs = [(str(item), str(name)) for item, name in items]
            first = int(first)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise wire.Malformed("The list of items is malformed.") from error
        refuse_larger(Work(memory=ITEM_BYTES * (first + len(pairs))), self.home.settings)
        try:
            self.home.items.add(first, pairs)
        except HomebodyError as error:
            if error.__cause__ is not None:  # the disk's fault, not the letter's
                raise
            raise wire.Malformed("The new items do not fit the catalogue that this device has.") from error

    def _take_in(self, task: Task, parts: Mapping[str, bytes], people: int) -> str:
        """Keep the parts of a letter, each once it has been checked. Returns the name of a part that is missing."""
        items, models = self.home.items, self.home.models
        if "features" in parts:
            if not task.features or wire.digest(parts["features"]) != task.features:
                raise wire.Malformed("The feature schema is not the one that the letter names.")
            FeatureSchema.read(parts["features"])
            items.put_schema(task.features, parts["features"])
        if task.features and items.schema(task.features) is None:
            return "features"
        # Before anything of the size that the letter names is allocated.
        refuse_larger(self._estimate(task, people), self.home.settings)
        if "shared" in parts:
            if wire.digest(parts["shared"]) != task.shared:
                raise wire.Malformed("The shared parameters are not those that the letter names.")
            self._read_shared(task, parts["shared"])
            models.put_shared(task.shared, parts["shared"])
        if models.shared(task.shared) is None:
            return "shared"
        if len(items) < task.n_items:
            return "items"
        return wire.ROSTER if task.sum is not None and self._lacks_roster(task.sum, parts) else ""

    def _lacks_roster(self, asked: SumTask, parts: Mapping[str, bytes]) -> bool:
        """Whether the device must be sent the server's roster; one that comes is kept, or refused. Without a key to
        check rosters with, it wants none."""
        known = self.home.roster
        if not known.required or not asked.roster:
            return False
        if wire.ROSTER in parts and known.accept(parts[wire.ROSTER]).digest != asked.roster:
            raise wire.Malformed("The roster is not the one that the letter names.")
        current = known.current()
        return current is None or current.digest != asked.roster

    def _estimate(self, task: Task, people: int, *, ranks: bool = True) -> Work:
        """Upper bounds of what the task takes, with ranking by its model or without, and of the toy that kernels are
        compiled with."""
        schema = feature_schema(self.home, task.features)
        sizes = replace(schema.catalogue(0), n_items=max(TOY_ITEMS, task.n_items))
        return estimate(task.acting, sizes, max(TOY_ITEMS, task.longest), people, ranks=ranks)

    def _read_shared(self, task: Task, content: bytes) -> Tree:
        """The shared parameters in the precision that the method computes in; refused unless they are the method's.
        Tables grow by a number of rows with each item. Two toy catalogues show that number without a large
        allocation."""
        about = (task.shared, task.described(), task.phase, task.n_items)
        if self._shared is not None and self._shared[0] == about:
            return self._shared[1]
        shared, schema = wire.decode_tree(content), feature_schema(self.home, task.features)
        two, three = (task.acting.init_shared(schema.catalogue(count), Rng.of(0)) for count in (2, 3))
        if shared.keys() != two.keys() or task.n_items < 2:
            raise wire.Malformed("The shared parameters are not those of the method.")
        for name, toy in two.items():
            more = (len(three[name]) - len(toy)) * (task.n_items - 2) if toy.dim() else 0
            shape = (len(toy) + more, *toy.shape[1:]) if toy.dim() else ()
            value = shared[name]
            if isinstance(value, Rows) or tuple(value.shape) != shape:
                raise wire.Malformed("The shared parameters have another shape than the method's.")
            if value.is_floating_point() != toy.is_floating_point() or not bool(torch.isfinite(value).all()):
                raise wire.Malformed("The shared parameters are not the numbers that the method works with.")
        self._shared = (about, {name: shared[name].to(toy.dtype) for name, toy in two.items()})
        return self._shared[1]

    def _assign(self, task: Task, people: int) -> Assignment:
        """What each person is to do. A letter that contradicts itself is refused here, before anybody is charged."""
        content = self.home.models.shared(task.shared)
        assert content is not None
        shared, method = self._read_shared(task, content), task.acting
        channel = method.uplink.among(task.sum.terms.parties) if task.sum else method.uplink
        # Charged as somebody who is always drawn: a device cannot know who else could have been.
        parties = task.sum.terms.parties if task.sum else 0
        cohort = Cohort(np.zeros(1, dtype=np.int64), "all", 1, 1, task.n_items, parties)
        charged = self._certain(method)
        try:
            charges = releases(charged, cohort) if task.do == "train" else measuring(charged.uplink, cohort)
            about = (task.do, task.described(), task.phase, task.n_items)
            if self._zero is None or self._zero[0] != about:
                if task.do == "evaluate":
                    zero = measurements({}, task.cutoffs)
                else:
                    catalogue = feature_schema(self.home, task.features).catalogue(task.n_items)
                    zero = self._in_time(lambda: wire.nothing(method, shared, catalogue))
                channel.device(zero, Rng.of(0))
                self._zero = (about, zero)
        except OutOfTime:
            raise
        except Exception as error:
            raise wire.Malformed("The letter's method, stages and parameters do not go together.") from error
        zero, ring = self._zero[1], None
        if task.epoch is not None:
            form = (task.epoch.entries, task.epoch.k, task.epoch.size)
            if form != _reported(channel, zero):
                raise wire.Malformed("The letter's epoch is about another update than the method's.")
        if task.sum is not None:
            ring = self._ring(task, channel, entries_of(zero))
            method = replace(method, uplink=Channel())  # type: ignore[type-var]
        work = self._estimate(task, people, ranks=task.do != "train")  # nobody waits for what is ranked later
        seconds = answering_seconds(work, people) if private(charges) else 0.0
        return Assignment(method, shared, charges, zero, seconds, channel, ring)

    def _certain(self, method: Method) -> Method:
        """The method with a channel of which this device can be certain, to charge by: it cannot know that others
        report honestly, so it counts on no shuffle; nor, without a roster, that parties of a secure sum are other
        people's devices, so it counts on its own noise alone. A helper's noise does not depend on others, and the
        device chose its proxy."""
        channel, facts = method.uplink, method.uplink.facts
        doubted = (facts.shuffle, None if self.home.roster.required or facts.helped else facts.sum)
        if doubted == (None, None):
            return method
        stages = (stage for stage in channel.stages if stage not in doubted)
        return replace(method, uplink=channel.with_stages(*stages))  # type: ignore[type-var]

    def _ring(self, task: Task, channel: Channel, entries: int) -> Ring:
        """The whole numbers of a secure sum; refused if its terms are not what this device's own channel says."""
        assert task.sum is not None
        assert channel.facts.sum is not None
        terms = task.sum.terms
        try:
            ring = channel.ring(entries, terms.people)
        except HomebodyError as error:
            raise wire.Malformed(str(error)) from error
        least, colluding = channel.facts.sum.shares
        own, theirs = (entries, ring.width, least), (terms.entries, terms.width, terms.least)
        if isinstance(terms, HelpedTerms):
            same = own == theirs and terms.depth == noise_depth(channel)
            if terms.quorum < self.home.settings.fewest:
                raise wire.Malformed(
                    "The secure sum may be of fewer devices than this one takes part among (--fewest)."
                )
        else:
            same = (*own, colluding) == (*theirs, terms.colluding)
        if not same or terms.people < len(task.people):
            raise wire.Malformed("The terms of the secure sum are not those of the letter's method and stages.")
        return ring

    def _may(self, assignment: Assignment, slot: int) -> bool:
        budget = self.home.settings.budget
        return not budget or Budget.parse(budget).allows(self.home.ledger(slot), assignment.charges)

    def _charge(self, task: Task, assignment: Assignment, slot: int) -> None:
        """Charge a person for an answer, before the work on it.

        An answer that was begun and charged, and never given, is the same release. One that was given and dropped is a
        new release, and so is one that a store restored from an older copy does not know.
        """
        outbox, release = self.home.outbox, task.counted
        ledger, name = self.home.ledger(slot), f"{task.run}/{release}@{task.ask}"
        with self.home.charging(slot):  # queries to a service are charged to the same ledger
            begun = outbox.begun(slot, task.run, release, task.ask) and ledger.knows(name)
            again = begun and task.ask not in outbox.answered(slot, task.run, release)
            if not again and not self._may(assignment, slot):
                raise HomebodyError("The task would exceed this person's privacy budget.")
            outbox.begin(slot, task.run, release, task.ask)
            code = f"{task.method}, homebody {__version__}"
            ledger.charge(name, assignment.charges, repeat=again, number=task.step, code=code)

    def _answer_person(self, task: Task, assignment: Assignment, slot: int) -> bytes:
        """One person's answer: the one that was given before, or a new one, charged first and then written down."""
        outbox = self.home.outbox
        given = outbox.answer(slot, task.run, task.counted, task.ask)
        if given is not None:
            return given
        self._charge(task, assignment, slot)
        update, state = self._work(task, assignment, slot)
        if task.epoch is None:
            answer, reports = wire.encode_tree(update, half=task.half), 0
        else:
            assert self._reporter is not None
            if assignment.channel.facts.reports is None:
                answer, reports = self._reporter.sealed_message(task.epoch, wire.packed(update)), 1
            else:
                numbers = wire.report_numbers(update)
                answer, reports = self._reporter.sealed(task.epoch, numbers), len(numbers)
        outbox.finish(slot, task.run, task.counted, task.ask, state, answer, reports)
        return answer

    def _work(self, task: Task, assignment: Assignment, slot: int) -> tuple[Update, PrivateState | None]:
        """The update after the channel, and the state to keep. Histories and parameters may make the work fail in any
        way: in its place stands the zero update through the same channel, so that nobody learns of it."""
        try:
            shared = assignment.shared
            about = (self.home.store.changes, task.n_items, task.described())
            if self._household is None or self._household[0] != about:
                people = self.home.people.active()
                described, learns = task.described(), task.acting
                household = Household.of(self.home, people, described, task.n_items, task.longest, learns)
                self._household = (about, household, people)
            _, household, people = self._household
            method, user = assignment.method, [person.slot for person in people].index(slot)
            household.begin(method, Rng(torch.tensor(task.clients_key)))
            if not household.split.lengths[user]:
                raise HomebodyError("This person has no history on this device.")
            state = self.home.models.state(slot, task.run, task.step if task.do == "train" else task.step + 1)
            if state is not None:
                household.restore(self.home, user, state, task.phase, shared)
            if self._apps.names(method, household.catalogue):
                return self._work_with_apps(task, assignment, household, user, people[user].name)
            if task.do == "evaluate":
                return self._measured(task, assignment, household, user), state
            update, local = self._in_time(lambda: household.train(method, shared, user, Rng(torch.tensor(task.key))))
            base = task.shared if method.scoring.parameters == "base" else None
            return update, _state(task, base, local)
        except Exception as error:
            self._log("nothing", release=task.release, reason=_reason(error))
            return assignment.method.uplink.device(assignment.zero, SystemRng()), None

    def _work_with_apps(
        self, task: Task, assignment: Assignment, household: Household, user: int, person: str
    ) -> tuple[Update, PrivateState | None]:
        """As `_work`, for a method some of whose views are apps: they are asked, and the device does the rest."""
        shared, method, schema = assignment.shared, assignment.method, feature_schema(self.home, task.features)
        about = {name: getattr(task, name) for name in ("run", "release", "ask", "step", "keep", "n_items", "phase")}
        about |= {"person": person, "method": task.method, "fields": task.fields, "stages": task.stages}
        if task.do == "evaluate":
            household.app_scores = self._apps.scores(about, method, shared, schema)
            return self._measured(task, assignment, household, user), None
        batch = self._in_time(lambda: household.samples(method, user, Rng(torch.tensor(task.key))))
        apps = self._apps.gradients(about, method, shared, schema, batch, assignment.zero)
        update, local = self._in_time(
            lambda: household.train_views(method, shared, user, batch, apps, assignment.zero.keys())
        )
        return update, _state(task, None, local) if local else None

    def _measured(self, task: Task, assignment: Assignment, household: Household, user: int) -> Update:
        method = assignment.method
        metrics = self._in_time(lambda: household.measure(method, assignment.shared, user))
        if not all(map(math.isfinite, metrics.values())):
            raise HomebodyError("The measured metrics are not finite.")
        return method.uplink.device(measurements(metrics, task.cutoffs), SystemRng())

    def _in_time(self, work: Callable[[], T], times: int = 1) -> T:
        """The result of the work, or `OutOfTime` after so many times the home's limit. A thread cannot be stopped: one
        that takes too long is abandoned, see `stuck`."""
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

    def _wait(self, task: Task, began: float, seconds: float) -> None:
        """Wait until the answer may leave. A late answer leaves a whole number of such times after the work began, and
        is counted, because it discloses that it was late."""
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

    def _report(self, task: Task, sealed: Mapping[str, bytes], until: float) -> tuple[dict[str, bytes], list[int]]:
        """Give these people's reports to the proxy. Returns the parts of the reply, and who did not report.

        All reports go into one message, unless it would be too long: a proxy could pass on one of two messages, and
        wait for enough other devices before it passes on the other.
        """
        assert self._reporter is not None
        assert task.epoch is not None
        outbox, ask = self.home.outbox, task.ask
        slots = {int(number) - task.first: reports for number, reports in sealed.items()}
        reported: set[int] = set()
        try:
            written = {slot for message in outbox.messages(ask) for slot in message.people}
            left = [slot for slot in slots if slot not in written]
            most = max(1, MESSAGE_REPORTS * (BIT_BYTES + SEAL_BYTES) // (task.epoch.k * (task.epoch.size + SEAL_BYTES)))
            for group in (left[at : at + most] for at in range(0, len(left), most)):
                content = self._reporter.message(task.epoch, b"".join(slots[slot] for slot in group))
                outbox.put_message(ask, group, content)
            for message in outbox.messages(ask):
                self._reporter.send(message.bytes, until, partial(outbox.keeps, ask, message))
                reported.update(message.people)
        except HomebodyError as error:
            self._log("declined", release=task.release, reason=_reason(error))
        parts = {str(task.first + slot): wire.encode_tree({}) for slot in slots if slot in reported}
        return parts, [task.first + slot for slot in slots if slot not in reported]

    def _status(self, shared: str = "") -> dict[str, Any]:
        """Who takes part here, and which parts need not be sent again."""
        schema = self.home.items.schema()
        held = [digest for digest in (shared, "" if schema is None else wire.digest(schema)) if digest]
        people = [person.slot for person in self.home.people.active()]
        return {"people": people, "items": len(self.home.items), "holds": held}

    def _compile(self, task: Task) -> None:
        """Compile a method's kernels before the first round needs them."""
        about = json.dumps([task.method, task.fields], sort_keys=True)
        if about in self._compiled or (task.features and self.home.items.schema(task.features) is None):
            return  # without its features a method may not be the same
        schema = feature_schema(self.home, task.features)
        apart = bool(self.home.views.all()) and views_of(task.acting) is not None
        self._in_time(lambda: compile_kernels(task.acting, schema, measures=task.measures, apart=apart), COMPILING)
        self._compiled.add(about)


def _reported(channel: Channel, zero: Update) -> tuple[int, int, int]:
    """The entries that a person's reports are about, how many reports those are, and the bytes of each."""
    if channel.facts.reports is not None:
        return entries_of(zero), channel.facts.reports.k, BIT_BYTES
    return 1, 1, wire.packed_bytes(wire.shapes(channel.device(zero, Rng.of(0))))


def _state(task: Task, base: str | None, local: Tree) -> PrivateState:
    return PrivateState(task.step, base, wire.encode_letter({"phase": task.phase}, {"state": wire.encode_tree(local)}))


def _reason(error: Exception) -> str:
    """Why something failed, for the device's own log. It names no person; of an unexpected error only the type."""
    if isinstance(error, OptedOut):
        return "Nobody of this number takes part."
    return str(error) if isinstance(error, HomebodyError | wire.Malformed) else type(error).__name__

"""Real devices over a network: the runtime whose clients are elsewhere.

Flower carries the letters; what is in them is ours (`homebody.federation.wire`). A device is a public key, and each of
its people a client with a number that never changes. Every letter says all that is needed to answer it, so that a
device may come and go; whoever does not answer in time is not waited for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from homebody.core import Catalogue, Cohort, Collected, Evaluated, Method, Opened, Total, Tree, Users
from homebody.errors import Abandoned, HomebodyError
from homebody.federation import wire
from homebody.federation.schema import FeatureSchema
from homebody.federation.secure_sum.messages import FEWEST
from homebody.federation.server.aggregate import (
    Answers,
    LetterRoute,
    MessageRoute,
    NothingLeft,
    ProxyRoute,
    Route,
    Summed,
    SumRoute,
    TooFew,
    bounds,
    by_device,
    cleaning,
    largest,
)
from homebody.federation.server.helped import HelpedRoute
from homebody.federation.server.letters import PAUSE, Ask, Correspondence
from homebody.federation.server.plan import NOBODY_PUBLIC, ServerPlan
from homebody.federation.task import Task, asks, measuring, metric_names, telemetry
from homebody.privacy import Channel, Charge
from homebody.rng import Rng, SystemRng
from homebody.training import carry

if TYPE_CHECKING:
    from homebody.core import Newcomer, Recommended
    from homebody.federation.flower.link import Link
    from homebody.federation.server.epochs import Epochs
    from homebody.federation.server.helper import HelperClient
    from homebody.federation.server.records import Records

__all__ = ["Flower", "within_range"]

MOST_UNSENT = 2
"""Attempts at a secure sum that may end before anything left a device, until the round is abandoned."""
BACK_SECONDS = 20.0
"""How long a round that was cut short waits for devices to come back that it can do without."""


class _Answers(NamedTuple):
    """The outcome of a conversation with devices, and the bytes that came and went."""

    summed: Summed
    channel: Channel
    """The channel that the sum came by, fitted to the parties of a secure sum."""
    up: int = 0
    down: int = 0


class Flower:
    """Sends the work of a round to the devices of its cohort, and adds up what comes back through the channel.

    plan: what letters say of the training, how long to wait, for how many, and what is let in. epochs: where reports
    arrive that come through a proxy. helper: who opens secure sums, where a method has a helper. schema: the features
    that devices know, where the method uses any.
    """

    simulated = False
    device = torch.device("cpu")

    def __init__(
        self,
        link: Link,
        records: Records,
        plan: ServerPlan,
        *,
        keep: int | None = None,
        epochs: Epochs | None = None,
        helper: HelperClient | None = None,
        schema: FeatureSchema | None = None,
        log: Callable[..., None] = lambda event, **facts: None,
    ) -> None:
        self._records, self._plan, self._description, self._log = records, plan, plan.describe(), log
        self._schema = schema or FeatureSchema()
        if self._schema.digest:
            self._description["features"] = self._schema.digest
        self.catalogue = self._schema.catalogue(records.n_items())
        self._letters = Correspondence(link, records, log, self._plan.most_faults)
        self._key, self._release = 0, records.notes().get("opened", "").partition(" ")[0].partition("#")[0]
        self._step, self._keep, self._epochs, self._helper = 0, keep, epochs, helper
        if records.notes().get("waiting"):
            records.note("waiting", "")  # of a process that has ended
        self._method: Method | None = None
        self._measured: Users | None = None
        self._roster, self._unlisted = "", ("", 0)

    def available(self, *, public: bool = False) -> Users:
        """The numbers of all people who are there, once there are enough of them."""
        if public:
            raise HomebodyError(NOBODY_PUBLIC)
        # Between two rounds, and at no other time: what is shared has a row for each item of it.
        self.catalogue = self._catalogue()
        return self._gathered()

    def _gathered(self) -> Users:
        said: dict[str, int] | None = None
        while True:
            self._letters.look_around(self._greeting())
            numbers, devices = self._vouched() if self._adds_up else self._letters.present(), FEWEST
            if self._adds_up:
                devices = len(by_device(self._records.devices(), numbers))
            if len(numbers) >= self._plan.least_present and devices >= FEWEST:
                if said is not None:
                    self._records.note("waiting", "")
                return np.array(numbers, dtype=np.int64)
            more = {"devices": devices, "least_devices": FEWEST} if self._adds_up else {}
            missing = {"present": len(numbers), "least": self._plan.least_present, **more}
            if said is None:
                self._log("waiting", **missing)
            if missing != said:
                self._records.note("waiting", json.dumps(missing))
            said = missing
            time.sleep(PAUSE)

    def _vouched(self) -> list[int]:
        """Those who are there and whose devices the roster names; all where there is none. In a secure sum with others,
        devices that know the roster would take no part."""
        from homebody.federation.server.rosters import stored_roster, unlisted

        if (roster := stored_roster(self._records)) is None:
            return self._letters.present()
        if roster.digest != self._roster:
            self._roster = roster.digest
            self._letters.wake()  # devices may have refused for want of it
        numbers, others = self._letters.present(), unlisted(roster, self._records.devices())
        if others and self._unlisted != (about := (roster.digest, len(others))):
            self._unlisted = about
            marks = [device.fingerprint[:12] for device in others[:16]]
            self._log("not in the roster", roster=roster.number, devices=len(others), first=marks)
        aside = {number for device in others for number in range(device.first, device.first + device.people)}
        return [number for number in numbers if number not in aside]

    def begin(self, method: Method, rng: Rng) -> None:
        wire.refuse_unfit(method, proxied=self._epochs is not None, helped=self._helper is not None)
        self._key, self._method = int(rng.key), method

    @property
    def _adds_up(self) -> bool:
        """Whether devices add up between them in a secure sum."""
        return self._method is not None and self._method.uplink.facts.secret

    def _on_devices(self, cohort: Cohort) -> Cohort:
        """A cohort with the number of its devices, where they are the parties of a secure sum."""
        users = cohort.users.tolist()
        return replace(cohort, devices=len(by_device(self._records.devices(), users))) if self._adds_up else cohort

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        """A round that was cut short is the same one only if it asks the same: then its devices answer the same."""
        self._release = release
        asks = wire.digest(json.dumps([self._description, self.catalogue.n_items, self._plan.half]).encode())
        asks += wire.digest(wire.encode_tree(shared, half=self._plan.half))
        name = self._attempt()
        before = self._records.opened(name)
        other = before is not None and self._records.notes().get("opened") != f"{name} {asks}"
        # As after a backup was restored: its sum may have been opened, and another one has other noise.
        lost = before is not None and self._adds_up and self._records.sum(self._sum_attempt()) is None
        if other or lost:
            self._give_up(reason="it would ask something else now" if other else "what devices added up is not stored")
            return self.open(release, cohort, shared)
        if before is None and self._adds_up:
            self._records.put_sum(self._sum_attempt(), {}, None, None)
        if before is None:
            self._records.note("opened", f"{name} {asks}")
            self._records.open_round(name, cohort)
        opened = Opened(name, self._on_devices(cohort if before is None else before), again=before is not None)
        self._log("opened", release=name, clients=len(opened.cohort.users), again=opened.again)
        return opened

    def _attempt(self) -> str:
        """The name of the round's release; a round that was abandoned is another release."""
        base, _, attempts = self._records.notes().get("abandoned", "").partition("#")
        return f"{self._release}#{int(attempts) + 1}" if base == self._release else self._release

    def _give_up(self, **facts: Any) -> None:
        """This attempt at the round."""
        name = self._attempt()
        self._log("abandoned", release=name, **facts)
        self._records.note("abandoned", f"{self._release}#{name.partition('#')[2] or 1}")
        self._records.count("rounds_abandoned")

    def _begin_again(self, reason: str) -> None:
        """Another attempt at the same release, with the same people, since nothing left a device; a few times only: it
        may be that some of them do not come back."""
        name, tries = self._attempt(), self._unsent() + 1
        if tries > MOST_UNSENT:
            self._give_up(reason=reason)
            return
        self._log("begun again", release=name, reason=reason)
        self._records.note("unsent", f"{name} {tries}")
        self._records.put_sum(self._sum_attempt(), {}, None, None)
        self._records.count("sums_begun_again")

    def _unsent(self) -> int:
        """How many attempts at a secure sum of this release ended before anything left a device."""
        name, _, tries = self._records.notes().get("unsent", "").rpartition(" ")
        return int(tries) if name == self._attempt() else 0

    def _sum_attempt(self) -> str:
        """The name of the attempt at a secure sum; another one after an attempt that ended before anything left."""
        name, tries = self._attempt(), self._unsent()
        return f"{name if '#' in name else f'{name}#1'}.{tries + 1}" if tries else name

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        wanted, within = wire.expected(method, shared, self.catalogue), bounds(method.uplink, self._plan.largest)
        channel = method.uplink
        plain = LetterRoute(
            wanted, within, cleaning(channel, self.catalogue.n_items), channel.read if channel.reads else None
        )
        try:
            got = self._ask(method, shared, self._task("train", step, rng), cohort.users.tolist(), plain)
        except NothingLeft as error:
            self._begin_again(str(error))
            raise
        except Abandoned as error:
            self._give_up(reason=str(error))
            raise
        total = got.channel.server(Total(got.summed.sum, cohort.size), SystemRng().fold("server"))
        before, self._step = self._step, step

        def spoiled(reason: str) -> None:
            self._step = before
            self._letters.suspect(largest(got.summed.updates))
            self._give_up(reason=reason)

        return Collected(total, got.up, got.down, answered=got.summed.answered, spoiled=spoiled)

    def _ask(self, method: Method, shared: Tree, task: Task, users: list[int], plain: LetterRoute) -> _Answers:
        """Ask these people, and sum what comes back; `Abandoned` where too few answer.

        plain: the way back where the channel has no other.
        """
        body = wire.encode_tree(shared, half=self._plan.half)
        route = self._route(method, task, users, plain, wire.digest(body))
        needed, traffic = max(1, math.ceil(self._plan.quorum * len(users))), [0, 0]
        talk = route.talk(task, users, needed)
        try:
            answers: Answers | None = None
            end = math.inf
            while True:
                asked = next(talk) if answers is None else talk.send(answers)
                if answers is None:
                    end = time.monotonic() + min(self._plan.deadline, route.left())
                    self._await(users, needed, end)
                now = time.monotonic()
                until = now + asked.share * (end - now)
                answers = self._letters.letters(asked, body, until, schema=self._schema.content, traffic=traffic)
        except StopIteration as done:
            summed: Summed = done.value
            channel = self._fitted(method, users)
            channel = channel.among(summed.parties) if summed.parties else channel
            return _Answers(summed, channel, traffic[0] + summed.beside, traffic[1])
        except TooFew as few:
            declined = len(self._letters.declined)
            raise Abandoned(
                f"{few.answered} of {len(users)} clients answered within {self._plan.deadline:g} s"
                f"{f', {declined} declined' if declined else ''}, and {needed} must"
                f"{': does the proxy run, and do devices reach it?' if declined and route.proxied else '.'}"
            ) from few

    def _route(self, method: Method, task: Task, users: list[int], plain: LetterRoute, shared: str) -> Route:
        """The way by which this method's updates come back. shared: the digest of the shared parameters."""
        facts, about, wanted = method.uplink.facts, asks(replace(task, shared=shared).header()), plain.wanted
        if facts.shuffled:
            assert self._epochs is not None  # refused when the phase began
            name = f"{task.run}/{self._attempt()}{'' if task.do == 'train' else '/telemetry'}"
            seconds = self._plan.deadline + self._plan.reports_wait
            return ProxyRoute(self._epochs, name, about, method.uplink, wanted, seconds)
        if facts.reader is not None and self._epochs is not None:
            name, seconds = f"{task.run}/{self._attempt()}", self._plan.deadline + self._plan.reports_wait
            among = self._plan.shuffled_among
            return MessageRoute(self._epochs, name, about, method.uplink, wanted, seconds, plain, among)
        if facts.secret:
            attempt = task.counted + self._sum_attempt().removeprefix(task.release)
            channel, devices = self._fitted(method, users), self._records.devices()
            secure = (self._records, attempt, about, channel, wanted, devices, self._letters.blame)
            if facts.helped:
                assert self._helper is not None  # refused when the phase began
                return HelpedRoute(*secure, self._helper, self._plan.deadline)
            return SumRoute(*secure, self._records.roster() or b"")
        return plain

    def _fitted(self, method: Method, users: list[int]) -> Channel:
        """The method's channel, fitted to the devices that these people are on, and to a helper that adds the noise."""
        channel = method.uplink.noised_elsewhere()
        return channel.among(len(by_device(self._records.devices(), users))) if channel.facts.secret else channel

    def telemetry(self, method: Method) -> Sequence[Charge]:
        self._measured = users = self._gathered()
        return measuring(method.uplink, self._on_devices(Cohort(users, "all", len(users), len(users))))

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        """The mean of what people measure on their own devices; it leaves through the method's channel."""
        everyone = (self._gathered() if self._measured is None else self._measured).tolist()
        task = replace(self._task("evaluate", self._step, Rng.of(0)), cutoffs=self._plan.recipe.measured())
        # Shares, where nothing is added to them on the way: one device does not decide for all.
        within = bounds(method.uplink, self._plan.largest if method.uplink.stages else 1.0)
        clean = partial(method.uplink.bounded, clean=_shares) if method.uplink.facts.plain else method.uplink.bounded
        plain = LetterRoute(telemetry(method, task.cutoffs), within, clean)
        try:
            got = self._ask(method, shared, task, everyone, plain)
        except Abandoned:
            return Evaluated({})  # of too few to choose a round by
        answered, shares = got.summed.answered, got.summed.shares
        sums = got.channel.server(Total(got.summed.sum, answered), SystemRng().fold("server")).sum
        asked, names = float(sums["asked"]), metric_names(task.cutoffs)
        if not asked >= 1:
            return Evaluated({})
        metrics = {name: float(value) / asked for name, value in zip(names, sums["metrics"], strict=True)}
        noise = got.channel.deviation(len(names) + 1, answered if shares is None else shares)
        return within_range(metrics, noise / asked)

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
        raise HomebodyError("Rankings stay on the devices: ask there, with homebody client recommend.")

    def recommend_for(self, method: Method, shared: Tree, newcomer: Newcomer, k: int) -> Recommended:
        raise HomebodyError("Rankings stay on the devices: ask there, with homebody client recommend.")

    def state(self, *, lasting: bool = False) -> dict[str, Tensor]:
        """The devices keep their own state, by round: its number is enough to come back to it."""
        if lasting:
            self._keep = self._step
        return {"step": torch.tensor(self._step)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._step = int(state["step"])

    def publish(self, method: Method, shared: Tree, step: int, known: set[str]) -> set[str]:
        """Give every device that is there the model to rank with from now on; answer which have it.

        known: those that have it already; where items came since, nobody has.
        """
        before, self.catalogue = self.catalogue, self._catalogue()
        known = known if self.catalogue is before else set()
        self._letters.look_around(self._greeting())
        there = {node: state for node, state in self._letters.known.items() if state.device.fingerprint not in known}
        if not there:
            return known
        numbers = [number for state in there.values() for number in state.active]
        asked = Ask(self._task("adapt", step, Rng.of(0)), numbers, needed=0)
        # Items that came after the model have fresh rows, as devices give them.
        shared = carry(shared, method.init_shared(self.catalogue, Rng.of(self._plan.recipe.seed)))
        body = wire.encode_tree(shared, half=self._plan.half)
        had, end = set(known), time.monotonic() + self._plan.deadline
        for device, _ in self._letters.letters(asked, body, end, schema=self._schema.content, only=set(there)):
            known.add(device.fingerprint)
        if known != had:
            self._log("published", devices=len(known - had), items=self.catalogue.n_items)
        return known

    def _task(self, do: str, step: int, rng: Rng) -> Task:
        """The task of letters of this kind, without a recipient."""
        return Task(
            do=do,
            release=self._release,
            step=step,
            key=int(rng.key),
            clients_key=self._key,
            keep=self._keep,
            n_items=self.catalogue.n_items,
            half=self._plan.half,
            largest=self._plan.largest,
            **self._description,
        )

    def _greeting(self) -> Task:
        return self._task("hello", self._step, Rng.of(0))

    def _await(self, users: list[int], needed: int, end: float) -> None:
        """After a restart the devices of a round that was cut short need a moment to come back; until then, or until
        the deadline where there are too few without them."""
        until = time.monotonic() + BACK_SECONDS
        while away := set(users) - {number for node in self._letters.known.values() for number in node.active}:
            if time.monotonic() > (until if len(users) - len(away) >= needed else end):
                return
            time.sleep(PAUSE)
            self._letters.look_around(self._greeting())

    def _catalogue(self) -> Catalogue:
        count = self._records.n_items()
        return self.catalogue if count == self.catalogue.n_items else self._schema.catalogue(count)


def _shares(tree: Tree) -> Tree:
    return {name: value.clamp(0, 1) for name, value in tree.items()}


def within_range(estimates: Mapping[str, float], deviation: float) -> Evaluated:
    """Shares that were estimated as one noisy sum over another, clipped to 0 … 1, each with its standard error.

    deviation: of the noise of a sum, over the sum that is divided by.

    >>> clipped = within_range({"hr@10": 0.5, "ndcg@10": -0.25}, 0.25)
    >>> clipped.metrics, clipped.unclipped
    ({'hr@10': 0.5, 'ndcg@10': 0.0}, {'ndcg@10': -0.25})
    >>> {name: round(error, 3) for name, error in clipped.errors.items()}
    {'hr@10': 0.28, 'ndcg@10': 0.25}
    """
    metrics = {name: min(1.0, max(0.0, value)) for name, value in estimates.items()}
    if deviation == 0:
        return Evaluated(metrics)
    # To the first order, a quotient moves with what is above by 1, and with what is below by the quotient itself.
    errors = {name: deviation * math.hypot(1.0, value) for name, value in metrics.items()}
    return Evaluated(metrics, {}, errors, {name: value for name, value in estimates.items() if metrics[name] != value})

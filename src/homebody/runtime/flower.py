"""Real devices over a network: the runtime whose clients are elsewhere.

Flower carries the letters; what is in them is ours (`homebody.runtime.wire`). A device is a public key, and each of its
people a client with a number that never changes. Every letter says all that is needed to answer it, so that a device
may come and go; whoever does not answer in time is not waited for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from homebody.core import Catalogue, Cohort, Collected, Evaluated, Method, Opened, Rows, Total, Tree, Users
from homebody.errors import Abandoned, HomebodyError
from homebody.evaluation.metrics import METRICS
from homebody.privacy import Channel, Charge, Clip, OneBit
from homebody.rng import Rng, SystemRng
from homebody.runtime import wire

__all__ = ["Flower", "Registry", "Settings", "metric_names"]

ITEMS_AT_ONCE = 50_000
"""Of a catalogue, in one letter: a device that knows fewer is told the rest by and by."""
MOST_LETTERS = 3
"""To one device in one round, beside those that tell it of a large catalogue: it may lack the shared parameters."""
HELLO_SECONDS = 120.0
"""How long a greeting waits to be answered before it is said again: a device compiles its kernels first."""
MOST_RESTS = 8
"""How often a rest is doubled."""
REST_SECONDS = 600.0
"""How long somebody is not asked who had nothing to answer with, or whose answer was refused."""
GREET_SECONDS = 30.0
"""How long a device is not greeted again of which nobody takes part, or whose answer to a greeting was refused."""
AWAY_SECONDS = 1.0
"""How long a device may be away in a round, once that is known: one that joins anew is away for a moment."""
MOST_LOST = 5
"""Letters to one device in one round that may be lost before it is left alone."""
LOOK_SECONDS = 2.0
"""Between looks, in a round, for devices that were away and came back."""
SILENT_TIMES = 3
"""Rounds in a row that a device may leave unanswered before it is left alone, longer each time."""
BACK_SECONDS = 20.0
"""How long a round that was cut short waits for its devices to come back."""
PAUSE = 0.2
ROUNDING = 1.001
"""By how much a number in 16 bits may be over its bound."""


class Device(Protocol):
    """A device as the registry knows it: its people have the numbers from `first` on."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def public_key(self) -> bytes: ...
    @property
    def name(self) -> str: ...
    @property
    def first(self) -> int: ...
    @property
    def people(self) -> int: ...
    @property
    def removed(self) -> Any: ...


class Registry(Protocol):
    """What of a server's records the runtime needs; they survive it."""

    def devices(self) -> Sequence[Device]: ...
    def n_items(self) -> int: ...
    def items(self, since: int = 0) -> Sequence[tuple[str, str]]: ...
    def open_round(self, release: str, cohort: Cohort) -> None: ...
    def opened(self, release: str) -> Cohort | None: ...
    def note(self, name: str, value: str) -> None: ...
    def notes(self) -> Mapping[str, str]: ...
    def count(self, name: str, amount: int = 1) -> None: ...


class Answer(Protocol):
    """What comes back for a message: a body, or a sentence why there is none."""

    @property
    def message(self) -> str: ...
    @property
    def body(self) -> bytes | None: ...
    @property
    def error(self) -> str: ...


class Post(Protocol):
    """Who carries letters: `homebody.runtime.flower_link.Link`."""

    def register(self, public_key: bytes, name: str) -> None: ...
    def unregister(self, public_key: bytes) -> None: ...
    def nodes(self) -> dict[str, int]: ...
    def send(self, letters: Mapping[int, tuple[str, bytes]], deadline: float) -> dict[str, int]: ...
    def receive(self, messages: Collection[str], wait: float) -> Sequence[Answer]: ...


@dataclass(frozen=True)
class Settings:
    """How long to wait, for how many, and what is let in."""

    deadline: float = 60.0
    """Seconds for a round."""
    quorum: float = 0.5
    """The share of a cohort that must answer; otherwise the round is abandoned."""
    least: int = 1
    """Clients that must be there before a round begins."""
    half: bool = False
    """Whether floats travel in 16 bits."""
    largest: float = 1e9
    """The largest number that an update may hold."""
    cutoffs: tuple[int, ...] = (5, 10, 20)
    """Lengths of the lists that telemetry looks at."""


@dataclass
class _Node:
    """What is known of a device that is there."""

    device: Device
    active: list[int]
    """The numbers of its people that take part."""
    items: int
    """How much of the catalogue it knows."""
    holds: set[str] = field(default_factory=set)
    """Shared parameters that it has already."""


class _Part(NamedTuple):
    """One person's answer."""

    number: int
    tree: Tree


class Flower:
    """Sends the work of a round to the devices of its cohort, and adds up what comes back through the channel.

    description: what a device needs to do the same mathematics, as JSON: the recipe's method, fields and stages, the
    seed, the protocol and whether anything is held out.
    """

    simulated = False
    device = torch.device("cpu")

    def __init__(
        self,
        post: Post,
        registry: Registry,
        description: Mapping[str, Any],
        settings: Settings | None = None,
        *,
        keep: int | None = None,
        log: Callable[..., None] = lambda event, **facts: None,
    ) -> None:
        self._post, self._registry, self._description, self._log = post, registry, dict(description), log
        self.settings = settings or Settings()
        self.catalogue = Catalogue(registry.n_items())
        self._known: dict[int, _Node] = {}
        self._greeted: dict[str, tuple[int, float]] = {}
        self._registered: dict[str, Device] = {}
        self._resting: dict[int, float] = {}
        self._rests: dict[int, int] = {}
        self._silent: dict[str, int] = {}
        self._left_alone: dict[int, float] = {}
        self._key, self._release = 0, registry.notes().get("opened", "").partition(" ")[0].partition("#")[0]
        self._step, self._keep = 0, keep

    def available(self) -> Users:
        """The numbers of all people who are there, once there are enough of them."""
        # Between two rounds, and at no other time: what is shared has a row for each item of it.
        self.catalogue = self._catalogue()
        return self._gathered()

    def _gathered(self) -> Users:
        said = False
        while True:
            self._look_around()
            numbers = self._present()
            if len(numbers) >= max(1, self.settings.least):
                return np.array(numbers, dtype=np.int64)
            if not said:
                self._log("waiting", present=len(numbers), least=self.settings.least)
                said = True
            time.sleep(PAUSE)

    def begin(self, method: Method, rng: Rng) -> None:
        wire.refuse_unfit(method)
        self._key = int(rng.key)

    def open(self, release: str, cohort: Cohort, shared: Tree) -> Opened:
        """A round that was cut short is the same one only if it asks the same: then its devices answer the same."""
        self._release = release
        asks = wire.digest(json.dumps([self._description, self.catalogue.n_items, self.settings.half]).encode())
        asks += wire.digest(wire.pack(shared, half=self.settings.half))
        name = self._attempt()
        before = self._registry.opened(name)
        if before is not None and self._registry.notes().get("opened") != f"{name} {asks}":
            self._give_up(reason="it would ask something else now")
            return self.open(release, cohort, shared)
        if before is None:
            self._registry.note("opened", f"{name} {asks}")
            self._registry.open_round(name, cohort)
        opened = Opened(name, cohort if before is None else before, again=before is not None)
        self._log("opened", release=name, clients=len(opened.cohort.users), again=opened.again)
        return opened

    def _attempt(self) -> str:
        """What the round is called: after it was given up it is another release."""
        base, _, attempts = self._registry.notes().get("abandoned", "").partition("#")
        return f"{self._release}#{int(attempts) + 1}" if base == self._release else self._release

    def _give_up(self, **facts: Any) -> None:
        """This attempt at the round."""
        name = self._attempt()
        self._log("abandoned", release=name, **facts)
        self._registry.note("abandoned", f"{self._release}#{name.partition('#')[2] or 1}")
        self._registry.count("rounds_abandoned")

    def collect(self, method: Method, shared: Tree, cohort: Cohort, rng: Rng, step: int) -> Collected:
        wanted = wire.expected(method, shared, self.catalogue)
        end = time.monotonic() + self.settings.deadline
        self._await(cohort.users.tolist(), end)
        task, bounds = self._task("train", step, rng), _bounds(method.uplink, self.settings.largest)
        answers, up, down = self._ask("train", task, shared, cohort.users.tolist(), wanted, end, bounds)
        needed = max(1, math.ceil(self.settings.quorum * len(cohort.users)))
        if len(answers) < needed:
            self._give_up(answered=len(answers), needed=needed)
            raise Abandoned(
                f"{len(answers)} of {len(cohort.users)} clients answered within {self.settings.deadline:g} s, and "
                f"{needed} must."
            )
        answers = [_Part(number, method.uplink.bounded(tree)) for number, tree in answers]
        total = method.uplink.server(Total(_summed(answers, wanted), cohort.size), SystemRng().fold("server"))
        self._step = step
        return Collected(total, up, down, answered=len(answers))

    def telemetry(self, method: Method) -> Sequence[Charge]:
        users = self._gathered()
        return method.uplink.charges(Cohort(users, "all", len(users), len(users)))

    def evaluate(self, method: Method, shared: Tree) -> Evaluated:
        """The mean of what people measure on their own devices; it leaves through the method's channel."""
        names = metric_names(self.settings.cutoffs)
        wanted = telemetry(method, self.settings.cutoffs)
        everyone = self._gathered().tolist()
        task = {**self._task("evaluate", self._step, Rng.of(0)), "cutoffs": list(self.settings.cutoffs)}
        end = time.monotonic() + self.settings.deadline
        # Shares, where nothing is added to them on the way.
        bounds = _bounds(method.uplink, self.settings.largest if method.uplink.stages else 1.0)
        answers, _, _ = self._ask("evaluate", task, shared, everyone, wanted, end, bounds)
        if len(answers) < max(1, math.ceil(self.settings.quorum * len(everyone))):
            return Evaluated({})  # of too few to choose a round by
        if method.uplink.plain:  # every metric is a share: one device does not decide for all
            shares = [{name: value.clamp(0, 1) for name, value in tree.items()} for _, tree in answers]
            answers = [
                _Part(number, method.uplink.bounded(tree)) for (number, _), tree in zip(answers, shares, strict=True)
            ]
        sums = method.uplink.server(Total(_summed(answers, wanted), len(answers)), SystemRng().fold("server")).sum
        asked = float(sums["asked"])
        if not asked >= 1:
            return Evaluated({})
        return Evaluated({name: float(value) / asked for name, value in zip(names, sums["metrics"], strict=True)})

    def recommend(self, method: Method, shared: Tree, user: int, k: int) -> list[tuple[int, float]]:
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
        self._look_around()
        there = {node: one for node, one in self._known.items() if one.device.fingerprint not in known}
        if not there:
            return known
        task = self._task("adapt", step, Rng.of(0))
        numbers = [number for one in there.values() for number in one.active]
        had, end = set(known), time.monotonic() + self.settings.deadline
        for node, _ in self._letters("query.adapt", task, shared, numbers, end, only=set(there)):
            known.add(self._known[node].device.fingerprint)
        if known != had:
            self._log("published", devices=len(known - had), items=self.catalogue.n_items)
        return known

    def _task(self, do: str, step: int, rng: Rng) -> dict[str, Any]:
        """What a letter says of itself."""
        return {
            "do": do,
            "release": self._release,
            "step": step,
            "key": int(rng.key),
            "clients_key": self._key,
            "keep": self._keep,
            "n_items": self.catalogue.n_items,
            "half": self.settings.half,
            "largest": self.settings.largest,
            **self._description,
        }

    def _await(self, users: list[int], end: float) -> None:
        """After a restart the devices of a round that was cut short need a moment to come back."""
        until = min(end, time.monotonic() + BACK_SECONDS)
        while not set(users) <= {number for node in self._known.values() for number in node.active}:
            if time.monotonic() > until:
                return
            time.sleep(PAUSE)
            self._look_around()

    def _ask(
        self,
        kind: str,
        task: Mapping[str, Any],
        shared: Tree,
        users: list[int],
        wanted: Mapping[str, wire.Expected],
        end: float,
        bounds: tuple[float, int | None],
    ) -> tuple[list[_Part], int, int]:
        """Every person's answer that is as it should be, by number; and the bytes that came and went."""
        found: dict[int, Tree] = {}
        traffic, most = [0, 0], wire.longest(wanted)
        for node, (header, parts) in self._letters(kind, task, shared, users, end, traffic=traffic):
            theirs = set(self._known[node].active) & set(users)
            for name, part in parts.items():
                number = int(name) if name.isdecimal() and len(name) < 19 else -1
                if number not in theirs or number in found:
                    self._refuse(node, "someone else's number", theirs)
                    continue
                try:
                    if len(part) > most:
                        raise wire.Malformed("The update is larger than any of its method's.")
                    tree = wire.unpack(part)
                    wire.check(tree, wanted, *bounds)
                except wire.Malformed as error:
                    self._refuse(node, error, {number})
                    continue
                found[number] = tree
            self._note_declined(header.get("declined"), theirs - found.keys())
        return [_Part(number, found[number]) for number in sorted(found)], traffic[0], traffic[1]

    def _note_declined(self, declined: Any, theirs: set[int]) -> None:
        """Whoever declines is left alone for a while, and longer each time."""
        for number in declined if isinstance(declined, list) else ():
            if number in theirs:
                self._registry.count("declined")
                self._rest({number})

    def _present(self) -> list[int]:
        """The numbers of all people who are there and not resting."""
        now = time.monotonic()
        self._resting = {number: until for number, until in self._resting.items() if until > now}
        return sorted({number for node in self._known.values() for number in node.active} - self._resting.keys())

    def _letters(
        self,
        kind: str,
        task: Mapping[str, Any],
        shared: Tree,
        users: list[int],
        end: float,
        *,
        only: set[int] | None = None,
        traffic: list[int] | None = None,
    ) -> Iterator[tuple[int, tuple[dict[str, Any], dict[str, bytes]]]]:
        """Write to everyone concerned, and give the answers as they come, until the deadline."""
        body = wire.pack(shared, half=self.settings.half)
        name = wire.digest(body)
        traffic = [0, 0] if traffic is None else traffic
        where = self._homes(users, only)
        waiting: dict[str, int] = {}
        digests: dict[int, str] = {}
        asked, lost = dict.fromkeys(where, 0), dict.fromkeys(where, 0)
        gone: dict[int, tuple[float, str]] = {}
        most = MOST_LETTERS + self.catalogue.n_items // ITEMS_AT_ONCE

        def write(nodes: Collection[int]) -> None:
            letters = {}
            for node in nodes:
                one, asked[node] = self._known[node], asked[node] + 1
                lacking = min(ITEMS_AT_ONCE, self.catalogue.n_items - one.items)
                news = self._registry.items(one.items)[:lacking] if lacking > 0 else []
                parts = {"items": json.dumps([one.items, list(news)]).encode()} if news else {}
                if name not in one.holds:
                    parts["shared"] = body
                header = {**task, "first": one.device.first, "people": where[node], "shared": name}
                letters[node] = (kind, wire.seal(header, parts))
                digests[node] = wire.digest(letters[node][1])
                traffic[1] += len(letters[node][1])
            waiting.update(self._post.send(letters, max(1.0, end - time.monotonic())))

        if where:
            write(where)
            self._log("sent", kind=kind, release=task["release"], devices=len(waiting))
        while (waiting or gone) and (left := end - time.monotonic()) > 0:
            if gone:
                self._ask_again(gone, lost, write)
            if not waiting:
                time.sleep(min(left, PAUSE))
                continue
            for answer in self._post.receive(set(waiting), min(left, PAUSE if gone else LOOK_SECONDS)):
                node = waiting.pop(answer.message, None)
                if node is None or node not in self._known:
                    continue
                if answer.body is None:
                    gone[node] = (time.monotonic() + AWAY_SECONDS, answer.error)
                    continue
                traffic[0] += len(answer.body)
                try:
                    header, parts = wire.open_letter(answer.body)
                except wire.Malformed as error:
                    self._refuse(node, error, set(where[node]))
                    continue
                if header.get("to") != digests[node]:
                    self._refuse(node, "an answer to another letter", set(where[node]))
                elif not self._learn(node, header):
                    self._rest(set(where[node]))
                elif "lacks" not in header:
                    self._silent.pop(self._known[node].device.fingerprint, None)
                    yield node, (header, parts)
                elif asked[node] < most:
                    write([node])
                else:
                    self._refuse(node, "it lacks what it was given", set(where[node]))
        for node in {*waiting.values(), *gone}:
            self._forget(node, "no answer in time")

    def _ask_again(
        self, gone: dict[int, tuple[float, str]], lost: dict[int, int], write: Callable[[Collection[int]], None]
    ) -> None:
        """A device that was away for a moment is asked again: it gives what it gave, or would have given."""
        there = set(self._post.nodes().values())
        for node, (until, error) in list(gone.items()):
            if node in there and lost[node] < MOST_LOST:
                lost[node] += 1
                write([node])
            elif node not in there and time.monotonic() < until:
                continue
            else:
                self._forget(node, error)
            del gone[node]

    def _homes(self, users: list[int], only: set[int] | None) -> dict[int, list[int]]:
        """Which of these people are where."""
        wanted = set(users)
        where = {
            node: [number for number in one.active if number in wanted]
            for node, one in self._known.items()
            if only is None or node in only
        }
        return {node: theirs for node, theirs in where.items() if theirs or only is not None}

    def _look_around(self) -> None:
        """Who is there now. A device that is new, or was silent, is greeted and counts once it has answered."""
        devices = self._devices()
        online = {node: devices[mark] for mark, node in self._post.nodes().items() if mark in devices}
        for node in set(self._known) - set(online):
            del self._known[node]
        greeting = wire.seal({**self._task("hello", self._step, Rng.of(0))})
        now = time.monotonic()
        self._left_alone = {node: until for node, until in self._left_alone.items() if until > now and node in online}
        asked = {node for node, until in self._greeted.values() if until > now} | self._left_alone.keys()
        # Also those of whom nobody took part: somebody may by now.
        present = {node for node, one in self._known.items() if one.active}
        strangers = [node for node in online if node not in present and node not in asked]
        if strangers:
            sent = self._post.send(dict.fromkeys(strangers, ("query.hello", greeting)), HELLO_SECONDS)
            self._greeted.update({message: (node, now + HELLO_SECONDS) for message, node in sent.items()})
        self._greeted = {message: one for message, one in self._greeted.items() if one[1] > now and one[0] in online}
        if not self._greeted:
            return
        for answer in self._post.receive(set(self._greeted), PAUSE):
            node, _ = self._greeted.pop(answer.message, (0, 0.0))
            if node not in online or answer.body is None:
                continue
            self._left_alone[node] = time.monotonic() + GREET_SECONDS
            known = self._known.get(node)
            self._known[node] = _Node(online[node], [], 0)
            try:
                header, _ = wire.open_letter(answer.body)
            except wire.Malformed as error:
                self._refuse(node, error)
                del self._known[node]
                continue
            if not self._learn(node, header):
                del self._known[node]
            elif known is None or self._known[node].active:
                self._log("joined", device=online[node].fingerprint[:12], people=len(self._known[node].active))

    def _devices(self) -> dict[str, Device]:
        """Whoever may take part; the network is told of those who are new, and of those who are no more."""
        devices = {one.fingerprint: one for one in self._registry.devices() if not one.removed}
        for mark in devices.keys() - self._registered.keys():
            self._post.register(devices[mark].public_key, devices[mark].name)
        for mark in self._registered.keys() - devices.keys():
            self._post.unregister(self._registered[mark].public_key)
        self._registered = devices
        return devices

    def _learn(self, node: int, header: Mapping[str, Any]) -> bool:
        """What a device says of itself; False, and it is left alone, where it refuses or makes no sense."""
        one = self._known[node]
        slots, items, holds = header.get("people"), header.get("items"), header.get("holds")
        if "refused" in header:
            self._refuse(node, "the device refuses", said=str(header["refused"])[:200])
            return False
        sensible = isinstance(slots, list) and all(
            type(slot) is int and 0 <= slot < one.device.people for slot in slots
        )
        if not sensible or type(items) is not int or items < 0 or not isinstance(holds, list) or len(holds) > 64:
            self._refuse(node, "its answer does not say who it is")
            return False
        assert isinstance(slots, list)
        one.active = sorted({one.device.first + slot for slot in slots})
        one.items, one.holds = items, {str(name) for name in holds}
        return True

    def _refuse(
        self, node: int, reason: str | wire.Malformed, people: Collection[int] = (), said: str | None = None
    ) -> None:
        """Count and log it, and leave these people alone for a while. What a device says is logged, never counted:
        it could say anything."""
        mark = self._known[node].device.fingerprint if node in self._known else ""
        counted = "another wire version" if isinstance(reason, wire.OtherVersion) else str(reason)
        self._registry.count(f"refused: {counted}")
        self._log("refused", device=mark[:12], reason=str(reason), **({} if said is None else {"said": said}))
        self._rest(people)

    def _rest(self, people: Collection[int]) -> None:
        for number in people:
            self._rests[number] = min(self._rests.get(number, 0) + 1, MOST_RESTS)
            self._resting[number] = time.monotonic() + REST_SECONDS * 2 ** (self._rests[number] - 1)

    def _forget(self, node: int, why: str) -> None:
        """It must answer a greeting before it counts again: one that is gone costs a deadline, not each."""
        one = self._known.pop(node, None)
        self._registry.count("answers_missing")
        if one is not None:
            mark = one.device.fingerprint
            times = self._silent[mark] = min(self._silent.get(mark, 0) + 1, MOST_RESTS)
            # At first it is greeted at once: it may have been killed and come back.
            if times >= SILENT_TIMES:
                self._left_alone[node] = time.monotonic() + GREET_SECONDS * 2 ** (times - SILENT_TIMES)
            self._log("silent", device=mark[:12], reason=why)

    def _catalogue(self) -> Catalogue:
        count = self._registry.n_items()
        return self.catalogue if count == self.catalogue.n_items else Catalogue(count)


def _bounds(channel: Channel, otherwise: float) -> tuple[float, int | None]:
    """The largest number and the most rows that can come out of a channel's half on the device."""
    most, rows = otherwise, None
    for stage in channel.stages:
        if isinstance(stage, Clip):
            most = min(most, ROUNDING * stage.whole)
        elif isinstance(stage, OneBit):
            most, rows = 1.0, stage.k
        elif not getattr(stage, "on_sum", False):  # noise, or what is not known here
            most = otherwise
    return most, rows


def metric_names(cutoffs: Sequence[int]) -> list[str]:
    """What devices measure, in the order they tell it."""
    at = [*(f"{name}@{k}" for name in METRICS for k in cutoffs), "auc"]
    return [f"{held}{kind}{name}" for held in ("", "valid/") for kind in ("", "full/") for name in at]


def telemetry(method: Method, cutoffs: Sequence[int]) -> dict[str, wire.Expected]:
    """What a person's measurements look like once they passed the method's channel; refused where they cannot."""
    told = {"metrics": torch.zeros(len(metric_names(cutoffs))), "asked": torch.zeros(1)}
    try:
        return wire.shapes(method.uplink.device(told, Rng.of(0)))
    except HomebodyError as error:
        raise HomebodyError(f"What devices measure cannot leave this way: {error} Or measure never.") from error


def _summed(answers: Sequence[_Part], wanted: Mapping[str, wire.Expected]) -> Tree:
    """The sum in order of the clients' numbers, in doubles: the same whoever was first."""
    sums = {
        name: torch.zeros(shape if size is None else (size, *shape), dtype=torch.float64)
        for name, (shape, size, _) in wanted.items()
    }
    for _, tree in answers:
        for name, value in tree.items():
            if isinstance(value, Rows):
                sums[name].index_add_(0, value.index, value.value.to(torch.float64))
            else:
                sums[name] += value
    return {name: total.to(torch.promote_types(wanted[name].kind, torch.float32)) for name, total in sums.items()}

"""Letters to devices: who is there, what each has, who is asked, and who is left alone for a while."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from homebody.core import Tree
from homebody.federation import wire
from homebody.federation.server import answers
from homebody.federation.server.answers import LONGEST_REFUSAL, Answer
from homebody.federation.server.records import Presence
from homebody.federation.server.records import now as moment_of_records
from homebody.federation.task import Task

if TYPE_CHECKING:
    from homebody.federation.flower.link import Link
    from homebody.federation.server.records import Records, RegisteredDevice

__all__ = ["PAUSE", "Ask", "Correspondence", "Node", "resting"]

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
"""How long a device is not greeted again if nobody on it takes part or its answer to a greeting was refused."""
AWAY_SECONDS = 1.0
"""How long a device may be away in a round that can do without it, once that is known: one that joins anew is away for
a moment."""
MOST_LOST = 5
"""Letters to one device in one round that may be lost before it is left alone."""
LOOK_SECONDS = 2.0
"""Between looks, in a round, for devices that were away and came back."""
SILENT_TIMES = 3
"""Rounds in a row that a device may leave unanswered before it is left alone, longer each time."""
PAUSE = 0.2
PRESENCE_SECONDS = 10.0
"""How often what is known of connections is brought up to date while a round waits for answers."""
SEEN_SECONDS = 60.0
"""How often the time is written down at which a device was last connected, while it is."""


def resting(notes: Mapping[str, str]) -> dict[str, Any] | None:
    """How many people a server leaves alone, and until when at most, by its notes; None if there are none.

    >>> resting({"resting": '{"60": 3, "32503680000": 2}'})
    {'people': 2, 'until': '3000-01-01 00:00 UTC'}
    """
    ends = {int(end): count for end, count in json.loads(notes.get("resting", "{}")).items()}
    left = {end: count for end, count in ends.items() if end > datetime.now(UTC).timestamp()}
    return {"people": sum(left.values()), "until": moment(max(left))} if left else None


def _storable(sentence: str) -> str:
    r"""A device's words as a database holds them: it could say anything.

    >>> _storable("no\0 \ud800")
    'no\ufffd ?'
    """
    return sentence[:LONGEST_REFUSAL].replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


@dataclass
class Node:
    """What the server knows about a connected device."""

    device: RegisteredDevice
    active: list[int]
    """The numbers of its people that take part."""
    items: int
    """How much of the catalogue it knows."""
    holds: set[str] = field(default_factory=set)
    lacks: str = ""
    """What it said last that it must receive first."""


@dataclass(frozen=True)
class Ask:
    """One letter to each device concerned, and what is wanted back."""

    task: Task
    users: list[int]
    """Whose devices are asked."""
    needed: int
    """How many people must answer, in a secure sum how many devices: beyond them, nobody who is away is waited for."""
    read: Callable[[bytes], Tree] | None = None
    """What is made of one person's part, where people have parts of their own."""
    questions: Callable[[int], bytes] | None = None
    """The question to a device, by its first number, in a secure sum."""
    share: float = 1.0
    """How much of the time that is left it may take."""
    roster: bytes = b""
    """The signed list of devices that may take part in a secure sum, if the server has one."""


class Correspondence:
    """With all the devices of a server's records, over its link.

    most_faults: how many broken answers of one device are borne before it is set aside: the operator may readmit it.
    """

    def __init__(self, link: Link, records: Records, log: Callable[..., None], most_faults: int) -> None:
        self._link, self._records, self._log, self._most_faults = link, records, log, most_faults
        self.known: dict[int, Node] = {}
        self._greeted: dict[str, tuple[int, float]] = {}
        self._registered: dict[str, RegisteredDevice] = {}
        self._resting: dict[int, float] = {}
        self._rests: dict[int, int] = {}
        self._silent: dict[str, int] = {}
        self._left_alone: dict[int, float] = {}
        self._sent_to_rest: set[int] = set()
        self.declined: set[int] = set()
        """The numbers of people who declined in the round, or whose device did for all of its people."""
        self._refuses: dict[str, str] = {}
        self._noted: dict[str, tuple[Presence, float]] = {}
        self._looked = 0.0
        if "resting" in records.notes():
            records.note("resting", "{}")  # of a process that is no more: this one asks everybody
        records.forget_connections()

    def look_around(self, greeting: Task) -> None:
        """Who is there now. A device that is new, or was silent, is greeted and counts once it has answered."""
        devices = self._devices()
        asked = {mark: device for mark, device in devices.items() if not device.set_aside}
        nodes = self._link.nodes()
        online = {node: asked[mark] for mark, node in nodes.items() if mark in asked}
        for node in set(self.known) - set(online):
            del self.known[node]
        now = time.monotonic()
        self._left_alone = {node: until for node, until in self._left_alone.items() if until > now and node in online}
        greeted = {node for node, until in self._greeted.values() if until > now} | self._left_alone.keys()
        # Also devices on which nobody took part: somebody may by now.
        present = {node for node, state in self.known.items() if state.active}
        strangers = [node for node in online if node not in present and node not in greeted]
        if strangers:
            letter = (greeting.kind, wire.encode_letter(greeting.header()))
            sent = self._link.send(dict.fromkeys(strangers, letter), HELLO_SECONDS)
            self._greeted.update({message: (node, now + HELLO_SECONDS) for message, node in sent.items()})
        self._greeted = {message: to for message, to in self._greeted.items() if to[1] > now and to[0] in online}
        if not self._greeted:
            self._note_presence(nodes)
            return
        for reply in self._link.receive(set(self._greeted), PAUSE):
            node, _ = self._greeted.pop(reply.message, (0, 0.0))
            if node not in online or reply.body is None:
                continue
            self._left_alone[node] = time.monotonic() + GREET_SECONDS
            known = self.known.get(node)
            state = self.known[node] = Node(online[node], [], 0)
            try:
                answer = answers.read(reply.body, state.device)
            except wire.Malformed as error:
                self.refuse(node, error)
                self.known.pop(node, None)
                continue
            if not self._learn(node, answer):
                del self.known[node]
            elif known is None or state.active:
                self._log("joined", device=state.device.fingerprint[:12], people=len(state.active))
        self._note_presence(nodes)

    def _note_presence(self, nodes: Mapping[str, int]) -> None:
        """Write down who is connected, for whoever asks: what changed, and now and then when a device was seen."""
        now, at = time.monotonic(), moment_of_records()
        self._looked = now
        changed: dict[str, Presence] = {}
        for mark, node in nodes.items():
            if mark not in self._registered:
                continue
            people = len(self.known[node].active) if node in self.known else 0
            seen = Presence(at, True, people, self._refuses.get(mark, ""))
            before, when = self._noted.get(mark, (None, 0.0))
            if before is None or before[1:] != seen[1:] or now - when > SEEN_SECONDS:
                changed[mark] = seen
        for mark, (before, _) in self._noted.items():
            if before.connected and mark not in nodes:
                changed[mark] = Presence(at, False, 0, "")
        if changed:
            self._records.note_presence(changed)
            self._noted.update({mark: (seen, now) for mark, seen in changed.items()})

    def present(self) -> list[int]:
        """The numbers of all people who are there and not resting."""
        now = time.monotonic()
        self._resting = {number: until for number, until in self._resting.items() if until > now}
        return sorted({number for node in self.known.values() for number in node.active} - self._resting.keys())

    def homes(self, users: list[int], only: set[int] | None) -> dict[int, list[int]]:
        """Which of these people are where."""
        wanted = set(users)
        nodes = {node: state for node, state in self.known.items() if only is None or node in only}
        where = {node: [number for number in state.active if number in wanted] for node, state in nodes.items()}
        return {node: theirs for node, theirs in where.items() if theirs or only is not None}

    def letters(
        self,
        asked: Ask,
        shared: bytes,
        end: float,
        *,
        schema: bytes = b"",
        only: set[int] | None = None,
        traffic: list[int] | None = None,
    ) -> Iterator[tuple[RegisteredDevice, Answer]]:
        """Write to everyone concerned, and give the answers as they come, until the deadline.

        schema: the task's features, for whoever does not hold them. A device that is away is given up soon if there are
        enough others. Otherwise it is waited for until the deadline: a round that is given up has been charged, and is
        charged again.
        """
        task, questions = replace(asked.task, shared=wire.digest(shared)), asked.questions
        traffic = [0, 0] if traffic is None else traffic
        self.declined = set()
        where = self.homes(asked.users, only)
        waiting: dict[str, int] = {}
        digests: dict[int, str] = {}
        written, lost, answered = dict.fromkeys(where, 0), dict.fromkeys(where, 0), 0
        gone: dict[int, tuple[float, str]] = {}
        most = MOST_LETTERS + task.n_items // ITEMS_AT_ONCE
        weights = {node: len(theirs) if questions is None else 1 for node, theirs in where.items()}

        def write(nodes: Collection[int]) -> None:
            letters = {}
            for node in nodes:
                state, written[node] = self.known[node], written[node] + 1
                lacking = min(ITEMS_AT_ONCE, task.n_items - state.items)
                news = self._records.items(state.items)[:lacking] if lacking > 0 else []
                parts = {"items": json.dumps([state.items, list(news)]).encode()} if news else {}
                if task.shared not in state.holds:
                    parts["shared"] = shared
                if task.features and task.features not in state.holds:
                    parts["features"] = schema
                if questions is not None:
                    parts[wire.QUESTION] = questions(state.device.first)
                # Devices that were given no key to check it with never ask for it.
                if asked.roster and state.lacks == wire.ROSTER:
                    parts[wire.ROSTER] = asked.roster
                header = replace(task, first=state.device.first, people=where[node]).header()
                letters[node] = (task.kind, wire.encode_letter(header, parts))
                digests[node] = wire.digest(letters[node][1])
                traffic[1] += len(letters[node][1])
            waiting.update(self._link.send(letters, max(1.0, end - time.monotonic())))

        if where:
            write(where)
            part = {} if task.sum is None else {"exchange": task.sum.exchange}
            self._log("sent", kind=task.kind, release=task.release, devices=len(waiting), **part)
        while (waiting or gone) and (left := end - time.monotonic()) > 0:
            if time.monotonic() - self._looked > PRESENCE_SECONDS:
                self._note_presence(self._link.nodes())
            if gone:
                possible = answered + sum(weights[node] for node in {*waiting.values(), *gone})
                self._ask_again(gone, lost, write, weights, possible - asked.needed)
            if not waiting:
                time.sleep(min(left, PAUSE))
                continue
            for reply in self._link.receive(set(waiting), min(left, PAUSE if gone else LOOK_SECONDS)):
                node = waiting.pop(reply.message, None)
                if node is None or node not in self.known:
                    continue
                if reply.body is None:
                    gone[node] = (time.monotonic() + AWAY_SECONDS, reply.error)
                    continue
                traffic[0] += len(reply.body)
                device = self.known[node].device
                try:
                    about = (digests[node], where[node], asked.read)
                    answer = answers.read(reply.body, device, *about, summed=questions is not None)
                except wire.Malformed as error:
                    self.refuse(node, error, where[node])
                    continue
                if not self._learn(node, answer):
                    self.declined.update(where[node])
                    self._rest(where[node])
                elif not answer.lacks:
                    answered += len(answer.updates) + (answer.message is not None)
                    if task.sum is None or task.sum.last:  # whoever leaves a sum on the way is silent too
                        self._silent.pop(device.fingerprint, None)
                    if answer.declined:
                        self._records.count("declined", len(answer.declined))
                    self.declined.update(answer.declined)
                    self._rest(answer.declined)
                    if answer.faults:
                        self.refuse(node, next(iter(answer.faults.values())), answer.faults)
                    yield device, answer
                elif written[node] < most:
                    write([node])
                else:
                    self.refuse(node, wire.Malformed("it lacks what it was given"), where[node])
        for node in {*waiting.values(), *gone}:
            self._forget(node, "no answer in time")
        self._tell_rests()

    def _ask_again(
        self,
        gone: dict[int, tuple[float, str]],
        lost: dict[int, int],
        write: Callable[[Collection[int]], None],
        weights: Mapping[int, int],
        spare: int,
    ) -> None:
        """A device that was away for a moment is asked again: it gives what it gave, or would have given.

        weights: what each counts for. spare: how much the round can do without; below 0 it is lost, whoever comes back.
        """
        there = set(self._link.nodes().values())
        for node, (until, error) in list(gone.items()):
            if node in there and lost[node] < MOST_LOST:
                lost[node] += 1
                write([node])
            elif node not in there and (time.monotonic() < until or 0 <= spare < weights[node]):
                continue
            else:
                self._forget(node, error)
                spare -= weights[node]
            del gone[node]

    def refuse(self, node: int, reason: wire.Malformed, people: Collection[int] = ()) -> None:
        """An answer that is broken: count and log it, and leave these people alone for a while. A device that gives too
        many is set aside; one of another version is not at fault."""
        device = self.known[node].device
        known = isinstance(reason, wire.OtherVersion)
        self._records.count(f"refused: {'another wire version' if known else reason}")
        accident = {} if reason.__cause__ is None else {"error": type(reason.__cause__).__name__}
        self._log("refused", device=device.fingerprint[:12], reason=str(reason), **accident)
        self._rest(people)
        if not known and self._records.add_fault(device.fingerprint, self._most_faults):
            self._records.count("devices_set_aside")
            self._log("set aside", device=device.fingerprint[:12], faults=self._most_faults)
            del self.known[node]

    def blame(self, first: int, reason: str) -> None:
        """Refuse an answer of the device whose first number this is."""
        for node, state in list(self.known.items()):
            if state.device.first == first:
                self.refuse(node, wire.Malformed(reason), state.active)

    def suspect(self, number: int | None) -> None:
        """Blame a round whose total broke the server's step on this person's device: its people are left alone."""
        for node, state in list(self.known.items()):
            if number in state.active:
                self.refuse(node, wire.Malformed("it spoiled a round"), state.active)
                self._tell_rests()

    def _devices(self) -> dict[str, RegisteredDevice]:
        """Whoever may take part; the network is told of those who are new, and of those who are no more."""
        devices = {device.fingerprint: device for device in self._records.devices() if not device.removed}
        for mark in devices.keys() - self._registered.keys():
            self._link.register(devices[mark].public_key, devices[mark].name)
        for mark in self._registered.keys() - devices.keys():
            self._link.unregister(self._registered[mark].public_key)
        self._registered = devices
        return devices

    def _learn(self, node: int, answer: Answer) -> bool:
        """What a device says of itself; False where it refuses. Its words are logged, never counted: it could say
        anything."""
        state = self.known[node]
        if answer.refused is not None:
            self._refuses[state.device.fingerprint] = _storable(answer.refused)
            self._records.count("refused: the device refuses")
            said = {"reason": "the device refuses", "said": answer.refused[:200]}
            self._log("refused", device=state.device.fingerprint[:12], **said)
            return False
        if answer.unregistered and not state.active:  # said once, when it is greeted
            people = {"people": len(answer.people) + answer.unregistered, "registered": state.device.people}
            self._log("more people than registered", device=state.device.fingerprint[:12], **people)
        self._refuses.pop(state.device.fingerprint, None)
        state.active, state.items, state.holds = list(answer.people), answer.items, set(answer.holds)
        state.lacks = answer.lacks
        return True

    def _rest(self, people: Collection[int]) -> None:
        """Leave these people alone for a while, and longer each time."""
        for number in people:
            self._rests[number] = min(self._rests.get(number, 0) + 1, MOST_RESTS)
            self._resting[number] = time.monotonic() + REST_SECONDS * 2 ** (self._rests[number] - 1)
        self._sent_to_rest.update(people)

    def wake(self) -> None:
        """Ask everybody again who was left alone: what their devices refused has changed."""
        if self._resting:
            self._resting.clear()
            self._rests.clear()
            self._records.note("resting", "{}")

    def _tell_rests(self) -> None:
        """Log who was sent to rest since this was told last, and note for whoever asks how many rest until when."""
        if not self._sent_to_rest:
            return
        ahead, ends = datetime.now(UTC).timestamp() - time.monotonic(), Counter[int]()
        for until in self._resting.values():
            ends[math.ceil((until + ahead) / 60) * 60] += 1
        last = max(self._resting[number] for number in self._sent_to_rest) + ahead
        self._log("left alone", clients=len(self._sent_to_rest), until=moment(last))
        self._records.note("resting", json.dumps(ends))
        self._sent_to_rest.clear()

    def _forget(self, node: int, why: str) -> None:
        """It must answer a greeting before it counts again: one that is gone costs a deadline, not each."""
        state = self.known.pop(node, None)
        self._records.count("answers_missing")
        if state is not None:
            mark = state.device.fingerprint
            times = self._silent[mark] = min(self._silent.get(mark, 0) + 1, MOST_RESTS)
            # At first it is greeted at once: it may have been killed and come back.
            if times >= SILENT_TIMES:
                self._left_alone[node] = time.monotonic() + GREET_SECONDS * 2 ** (times - SILENT_TIMES)
            self._log("silent", device=mark[:12], reason=why)

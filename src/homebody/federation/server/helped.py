"""How a round's updates come back as a secure sum that a helper opens: one exchange with devices, one with the helper.

How far the attempt is, is stored before each step: the number and the terms of the sum before the helper makes a key
for it, and the set before the helper is asked to open it. After a kill the same is asked again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from homebody.errors import Abandoned, several
from homebody.federation import wire
from homebody.federation.secure_sum.helped import EPOCH_BYTES, HelpedSum, HelpedTerms, SetRefused, noise_depth
from homebody.federation.secure_sum.messages import FEWEST, Unpacker, blob
from homebody.federation.server.aggregate import Answers, Ask, NothingLeft, Summed, TooFew, by_device, sent_by_devices
from homebody.federation.task import HelpedTask, Task
from homebody.privacy import Channel

if TYPE_CHECKING:
    from homebody.federation.server.helper import HelperClient
    from homebody.federation.server.records import Records, RegisteredDevice, StoredSum

__all__ = ["HelpedRoute"]

_BEGUN, _SET = b"E", b"S"
_LONGEST = 86_400.0
"""Seconds that a helper keeps a sum open, at most."""


class HelpedRoute:
    """Updates come back masked, one vector a device, and the helper opens their sum and adds the noise.

    devices: all that are registered. blame: refuses an answer of the device of this first number, and says why.
    deadline: seconds for the helper, and for devices, each. asks: a digest of what letters ask, which the terms hold.
    """

    proxied = True

    def __init__(
        self,
        records: Records,
        attempt: str,
        channel: Channel,
        wanted: Mapping[str, wire.Expected],
        devices: Sequence[RegisteredDevice],
        blame: Callable[[int, str], None],
        helper: HelperClient,
        deadline: float,
        asks: str,
    ) -> None:
        self._records, self._attempt, self._devices, self._blame = records, attempt, devices, blame
        self._channel, self._shapes = channel, {name: form.shape for name, form in wanted.items()}
        self._entries = sum(math.prod(shape) for shape in self._shapes.values())
        self._helper, self._deadline, self._asks = helper, deadline, asks

    def left(self) -> float:
        return math.inf

    def talk(self, task: Task, users: list[int], needed: int) -> Generator[Ask, Answers, Summed]:
        stored = self._stored(task)
        if stored is not None and stored.result is not None:
            return self._summed(stored.people, stored.result)
        if stored is not None and stored.state is not None and stored.state.startswith(_SET):
            total, people = HelpedSum.of_state(stored.state[1:]), stored.people
        else:
            begun = None if stored is None else stored.state
            total, people = yield from self._collect(task, users, needed, begun)
        return self._open(total, people, needed)

    def _stored(self, task: Task) -> StoredSum | None:
        """How far this attempt is, as in `SumRoute._stored`."""
        stored = self._records.sum(self._attempt)
        if stored is None or (stored.state is None and stored.result is None):
            return stored
        if stored.state is None:
            terms = HelpedTerms.decode(Unpacker(stored.result or b"", "The stored sum").blob())
        elif stored.state.startswith(_SET):
            terms = HelpedSum.of_state(stored.state[1:]).epoch.terms
        else:
            terms = HelpedTerms.decode(stored.state[1 + EPOCH_BYTES :])
        if terms.asks == self._asks:
            return stored
        if task.do == "train":
            raise Abandoned("The attempt that was cut short asked something else.")
        return None

    def _collect(
        self, task: Task, users: list[int], needed: int, begun: bytes | None
    ) -> Generator[Ask, Answers, tuple[HelpedSum, dict[int, int]]]:
        """The messages of all devices that answer, and of how many people each is."""
        theirs, fresh = by_device(self._devices, users), begun is None
        if begun is None:
            begun = _BEGUN + os.urandom(EPOCH_BYTES) + self._terms(task.run, theirs).encode()
            self._records.put_sum(self._attempt, {}, begun, None)
        number, terms = begun[1 : 1 + EPOCH_BYTES], HelpedTerms.decode(begun[1 + EPOCH_BYTES :])
        seconds = min(3 * self._deadline + 60, _LONGEST)
        try:
            epoch = self._helper.begin(number, terms, seconds, time.monotonic() + self._deadline)
        except Abandoned as error:
            raise NothingLeft(str(error)) if fresh else error from None
        task = replace(task, sum=HelpedTask(epoch))
        answers = yield Ask(task, users, terms.quorum, questions=lambda _: b"")
        total, gave = HelpedSum(epoch), dict[int, int]()
        for first, message in sent_by_devices(answers, theirs, gave):
            if not total.take(first, message):
                self._blame(first, total.faults[first])
        return total, {first: gave[first] for first in total.senders}

    def _terms(self, run: str, theirs: Mapping[int, Sequence[int]]) -> HelpedTerms:
        if len(theirs) < FEWEST:
            raise Abandoned(
                f"The people of this round are on {several(len(theirs), 'device')}, and a secure sum needs {FEWEST} at "
                "least: ask more people a round (--cohort), or register more devices."
            )
        assert self._channel.facts.sum is not None
        people, (least, _) = sum(map(len, theirs.values())), self._channel.facts.sum.shares
        width, depth = self._channel.ring(self._entries, people).width, noise_depth(self._channel)
        return HelpedTerms(run, self._attempt, len(theirs), self._entries, width, depth, least, people, self._asks)

    def _open(self, total: HelpedSum, people: dict[int, int], needed: int) -> Summed:
        """The sum that the helper opens. What it refuses is left out, as long as enough are left."""
        until = time.monotonic() + self._deadline
        while True:
            self._check(total, people, needed)
            self._records.put_sum(self._attempt, people, _SET + total.state(), None)
            try:
                answer = self._helper.open(total.epoch, total.request(), until)
                break
            except SetRefused as refused:
                if not refused.faulty:
                    raise Abandoned(f"The helper opens no set: {refused}") from refused
                before = set(total.faults)
                total.leave_out(refused.faulty)
                for first in total.faults.keys() - before:
                    self._blame(first, total.faults[first])
                people = {first: people[first] for first in total.senders}
        ring = self._channel.ring(self._entries, total.epoch.terms.people)
        result = blob(total.epoch.terms.encode()) + ring.pack(total.opened(answer))
        self._records.put_sum(self._attempt, people, None, result)
        return self._summed(people, result)

    def _check(self, total: HelpedSum, people: Mapping[int, int], needed: int) -> None:
        if sum(people.values()) < needed:
            raise TooFew(sum(people.values()))
        quorum = total.epoch.terms.quorum
        if len(people) < quorum:
            raise Abandoned(
                f"{several(len(people), 'device')} of {total.epoch.terms.parties:,} are in a secure sum, and "
                f"{quorum:,} must: nothing was opened."
            )

    def _summed(self, people: Mapping[int, int], result: bytes) -> Summed:
        content = Unpacker(result, "The stored sum")
        ring = self._channel.ring(self._entries, HelpedTerms.decode(content.blob()).people)
        numbers = ring.unpack(content.take(self._entries * ring.width))
        return Summed(ring.decode(numbers, self._shapes), sum(people.values()))

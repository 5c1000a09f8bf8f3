"""How a round's updates come back as a secure sum that a helper opens: one exchange with devices, one with the helper.

How far the attempt is, is stored before each step: the number and the terms of the sum before the helper makes a key
for it, and the set before the helper is asked to open it. After a kill the same is asked again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from homebody.errors import Abandoned, several
from homebody.federation.secure_sum.helped import EPOCH_BYTES, HelpedSum, HelpedTerms, SetRefused, noise_depth
from homebody.federation.secure_sum.messages import Terms
from homebody.federation.server.aggregate import (
    Answers,
    NothingLeft,
    SecureRoute,
    Summed,
    TooFew,
    by_device,
    sent_by_devices,
)
from homebody.federation.server.letters import Ask
from homebody.federation.task import SumTask, Task
from homebody.privacy.ring import Ring

if TYPE_CHECKING:
    from homebody.federation.server.helper import HelperClient

__all__ = ["HelpedRoute"]

_BEGUN, _SET = b"E", b"S"
_LONGEST = 86_400.0
"""Seconds that a helper keeps a sum open, at most."""


@dataclass(frozen=True)
class HelpedRoute(SecureRoute):
    """Updates come back masked, one vector a device, and the helper opens their sum and adds the noise.

    deadline: seconds for the helper, and for devices, each.
    """

    helper: HelperClient
    deadline: float

    proxied = True
    form = HelpedTerms

    def talk(self, task: Task, users: list[int], needed: int) -> Generator[Ask, Answers, Summed]:
        people, state, result = self.stored(task)
        if result is not None:
            return self.summed(people, result)
        if state is not None and state.startswith(_SET):
            total = HelpedSum.of_state(state[1:])
        else:
            total, people = yield from self._collect(task, users, state)
        return self._open(total, people, needed)

    def ring(self, terms: Terms | HelpedTerms) -> Ring:
        return self.channel.ring(self.entries, terms.people)

    def terms_in(self, state: bytes) -> HelpedTerms:
        if state.startswith(_SET):
            return HelpedSum.of_state(state[1:]).epoch.terms
        return HelpedTerms.decode(state[1 + EPOCH_BYTES :])

    def _collect(
        self, task: Task, users: list[int], begun: bytes | None
    ) -> Generator[Ask, Answers, tuple[HelpedSum, dict[int, int]]]:
        """The messages of all devices that answer, and of how many people each is."""
        theirs, fresh = by_device(self.devices, users), begun is None
        if begun is None:
            begun = _BEGUN + os.urandom(EPOCH_BYTES) + self._terms(task.run, theirs).encode()
            self.records.put_sum(self.attempt, {}, begun, None)
        number, terms = begun[1 : 1 + EPOCH_BYTES], HelpedTerms.decode(begun[1 + EPOCH_BYTES :])
        seconds = min(3 * self.deadline + 60, _LONGEST)
        try:
            epoch = self.helper.begin(number, terms, seconds, time.monotonic() + self.deadline)
        except Abandoned as error:
            raise NothingLeft(str(error)) if fresh else error from None
        task = replace(task, sum=SumTask.helped(epoch))
        answers = yield Ask(task, users, terms.quorum, questions=lambda _: b"")
        total, gave = HelpedSum(epoch), dict[int, int]()
        for first, message in sent_by_devices(answers, theirs, gave):
            if not total.take(first, message):
                self.blame(first, total.faults[first])
        return total, {first: gave[first] for first in total.senders}

    def _terms(self, run: str, theirs: Mapping[int, Sequence[int]]) -> HelpedTerms:
        self.refuse_few(theirs)
        assert self.channel.facts.sum is not None
        people, (least, _) = sum(map(len, theirs.values())), self.channel.facts.sum.shares
        width, depth = self.channel.ring(self.entries, people).width, noise_depth(self.channel)
        return HelpedTerms(run, self.attempt, len(theirs), self.entries, width, depth, least, people, self.asks)

    def _open(self, total: HelpedSum, people: dict[int, int], needed: int) -> Summed:
        """The sum that the helper opens. What it refuses is left out, as long as enough are left."""
        until = time.monotonic() + self.deadline
        while True:
            if sum(people.values()) < needed:
                raise TooFew(sum(people.values()))
            terms = total.epoch.terms
            if len(people) < terms.quorum:
                raise Abandoned(
                    f"{several(len(people), 'device')} of {terms.parties:,} are in a secure sum, and "
                    f"{terms.quorum:,} must: nothing was opened."
                )
            self.records.put_sum(self.attempt, people, _SET + total.state(), None)
            try:
                answer = self.helper.open(total.epoch, total.request(), until)
                break
            except SetRefused as refused:
                if not refused.faulty:
                    raise Abandoned(f"The helper opens no set: {refused}") from refused
                before = set(total.faults)
                total.leave_out(refused.faulty)
                for first in total.faults.keys() - before:
                    self.blame(first, total.faults[first])
                people = {first: people[first] for first in total.senders}
        return self.opened(people, terms, total.opened(answer))

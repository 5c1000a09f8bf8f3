"""Parties and a server in one process, and what may go wrong between them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from homebody.federation.secure_sum.collector import Collector, OpenedSum, PartyQuestions
from homebody.federation.secure_sum.messages import Exchange, Terms
from homebody.federation.secure_sum.party import Party

Answers = list[tuple[int, bytes]]


@cache
def device_key(number: int) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(number + 2, ec.SECP384R1())


class World:
    """Everyone of one attempt. Keys and secrets are the same in every run; signatures are not."""

    def __init__(
        self, parties: int, attempt: str = "round 1", entries: int = 5, width: int = 3, **terms: float
    ) -> None:
        self.terms = Terms("run", attempt, parties=parties, entries=entries, width=width, **terms)
        self.parties = {number: self.join(number) for number in range(10, 10 + parties)}
        self.roster = {number: party.identity for number, party in self.parties.items()}
        self.collector = Collector(self.terms, self.roster)
        drawn = np.random.default_rng(parties).integers(0, 1 << 8 * width, (parties, entries), dtype=np.uint64)
        self.vectors = dict(zip(self.parties, drawn, strict=True))
        self.asked: dict[Exchange, PartyQuestions] = {}
        self.answers: dict[Exchange, dict[int, bytes]] = {}
        self.restart = False

    def join(self, number: int, **settings: object) -> Party:
        seed = hashlib.sha256(f"{self.terms.attempt} {number}".encode()).digest()
        return Party.join(self.terms, number, device_key(number), seed=seed, **settings)  # type: ignore[arg-type]

    def ask(self) -> PartyQuestions:
        asked = self.collector.ask()
        assert asked is not None
        if self.restart:
            self.collector = Collector.of_state(self.collector.state())
            assert self.collector.ask() == asked
        self.asked[asked.exchange] = asked
        return asked

    def answer(self, number: int, asked: PartyQuestions) -> bytes:
        question, vector = asked.question(number), self.vectors[number]
        given = self.parties[number].answer(asked.exchange, question, lambda: vector)
        if self.restart:
            self.parties[number] = Party.of_state(self.parties[number].state(), device_key(number))
            again = self.parties[number].answer(asked.exchange, question, lambda: pytest.fail("drawn a second time"))
            assert again == given
        return given

    def exchange(
        self,
        lost: Callable[[int], bool] = lambda number: False,
        changed: Callable[[int, bytes], bytes] = lambda number, given: given,
    ) -> None:
        """One exchange, in which these parties are lost, and answers are changed on their way."""
        asked = self.ask()
        given = {number: self.answer(number, asked) for number in asked.own if not lost(number)}
        self.answers[asked.exchange] = {number: changed(number, one) for number, one in given.items()}
        self.collector.take(self.answers[asked.exchange].items())

    def to(self, exchange: Exchange) -> PartyQuestions:
        """Everything before this exchange, and what it asks."""
        while (asked := self.ask()).exchange != exchange:
            self.exchange()
        return asked

    def run(self, lost: Mapping[Exchange, set[int]] | None = None) -> OpenedSum:
        gone: set[int] = set()
        while (asked := self.collector.ask()) is not None:
            gone |= (lost or {}).get(asked.exchange, set())
            self.exchange(gone.__contains__)
        assert self.collector.result is not None
        return self.collector.result

    def sum(self, numbers: object) -> list[int]:
        """The sum of these parties' vectors, as anybody would add it up."""
        total = sum(self.vectors[number].astype(object) for number in numbers)  # type: ignore[attr-defined]
        return [int(entry) % (1 << 8 * self.terms.width) for entry in total]

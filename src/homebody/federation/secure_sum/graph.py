"""Who masks with whom, and how many shares open a secret.

Up to `COMPLETE` parties everyone masks with everyone (Bonawitz et al. 2017). With more, each masks with a few
neighbours on a ring (Bell et al. 2020). Its order is hashed from all round keys: nobody knows it when keys are chosen.

| Bell et al. 2020 | here |
|---|---|
| n clients, γn corrupt, δn lost | `listed`, `colluding`, `listed − staying` |
| degree k, threshold t | `Design.degree`, `Design.threshold` |
| σ, η | `PRIVACY`, `FAILURE` |

The neighbours of a party are a uniform choice of k others, so that the tails below are hypergeometric and exact. They
are for a server that follows the protocol: one that does not could try many keys for parties of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb

from homebody.errors import HomebodyError
from homebody.privacy.secure_sum import COMPLETE

__all__ = ["Design", "Graph", "design", "odds"]

PRIVACY = Fraction(1, 2**40)
"""The probability that the parties which collude open what they should not is at most this."""
FAILURE = Fraction(1, 2**20)
"""The probability that too few neighbours of some party stay, though enough parties do, is at most this."""


@dataclass(frozen=True)
class Design:
    """How many neighbours a party has, and how many shares open one of its secrets."""

    degree: int
    threshold: int
    privacy: float
    """The probability that the parties which collude can open a single vector; 0 among all."""
    failure: float
    """The probability that a sum cannot be opened, though enough parties stay; 0 among all."""
    complete: bool
    """Whether everyone is everyone's neighbour. If not, it holds against a server that follows the protocol."""


@lru_cache(maxsize=64)
def design(listed: int, staying: int, colluding: int) -> Design:
    """The least degree at which a sum over so many parties is private and opens, and the largest threshold for it.

    staying: how many of them stay to the end at least. colluding: how many may collude with the server.

    >>> design(1000, staying=667, colluding=100)
    Design(degree=96, threshold=37, privacy=8.1...e-13, failure=6.8...e-07, complete=False)
    >>> design(100, staying=67, colluding=10)
    Design(degree=99, threshold=67, privacy=0.0, failure=0.0, complete=True)
    """
    if not colluding < staying <= listed:
        raise HomebodyError(
            f"Of {listed:,} parties {staying:,} must stay and {colluding:,} may collude: let more stay than collude."
        )
    if listed > COMPLETE:
        for degree in range(2, listed - 1, 2):
            if _disconnected(listed, staying, colluding, degree) > PRIVACY:
                continue
            stay = _tail(listed, staying - 1, degree)
            opens = [count for count in range(1, degree + 1) if listed * (1 - stay[count]) <= FAILURE]
            if not opens:
                continue
            privacy, failure = odds(listed, staying, colluding, degree, opens[-1])
            if privacy <= PRIVACY:
                return Design(degree, opens[-1], float(privacy), float(failure), complete=False)
    return Design(listed - 1, staying, 0.0, 0.0, complete=True)


def odds(listed: int, staying: int, colluding: int, degree: int, threshold: int) -> tuple[Fraction, Fraction]:
    """The probabilities that a sum on a ring is not private, and that it does not open: each party's, added up.

    It is not private if so many neighbours of an honest party collude that they open a secret, or if the honest parties
    that stay fall apart into groups without a common mask.
    """
    privacy = (listed - colluding) * _tail(listed, colluding, degree)[threshold]
    failure = listed * (1 - _tail(listed, staying - 1, degree)[threshold])
    return privacy + _disconnected(listed, staying, colluding, degree), failure


def _tail(listed: int, marked: int, degree: int) -> list[Fraction]:
    """P(at least k neighbours of a party are marked), for k from 0 to degree + 1."""
    others = listed - 1
    ways = [comb(marked, count) * comb(others - marked, degree - count) for count in range(degree + 1)]
    total, tails = comb(others, degree), [0]
    for count in reversed(ways):
        tails.append(tails[-1] + count)
    return [Fraction(count, total) for count in reversed(tails)]


def _disconnected(listed: int, staying: int, colluding: int, degree: int) -> Fraction:
    """An upper bound of the probability that the honest parties which stay are not connected.

    A ring on which everyone knows degree / 2 on either side falls apart only where degree / 2 in a row are missing, in
    two places.
    """
    missing = listed - (staying - colluding)
    return comb(listed, 2) * Fraction(comb(missing, degree), comb(listed, degree))


class Graph:
    """The neighbours of each party of a round.

    >>> graph = Graph([3, 5, 8, 9], design(4, staying=3, colluding=0), b"seed")
    >>> graph.neighbours(5), graph.holders(5)
    ((3, 8, 9), {3: 1, 5: 2, 8: 3, 9: 4})
    """

    def __init__(self, numbers: Sequence[int], chosen: Design, seed: bytes) -> None:
        self.design, everyone = chosen, sorted(numbers)
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._holders: dict[int, dict[int, int]] = {}
        if chosen.complete:
            self._points = {number: point for point, number in enumerate(everyone, start=1)}
        else:
            drawn = hashlib.shake_256(b"homebody secure sum neighbours" + seed).digest(16 * len(everyone))
            order = sorted(range(len(everyone)), key=lambda place: drawn[16 * place : 16 * place + 16])
            self._ring = [everyone[place] for place in order]
            self._place = {number: place for place, number in enumerate(self._ring)}

    def neighbours(self, number: int) -> tuple[int, ...]:
        """In ascending order."""
        if number not in self._neighbours:
            self._neighbours[number] = tuple(other for other in self.holders(number) if other != number)
        return self._neighbours[number]

    def holders(self, number: int) -> dict[int, int]:
        """Who has a share of this party's secrets, itself included, in ascending order, and at which point."""
        if self.design.complete:
            return self._points
        if number not in self._holders:
            place, reach, size = self._place[number], self.design.degree // 2, len(self._ring)
            held = sorted(self._ring[(place + step) % size] for step in range(-reach, reach + 1))
            self._holders[number] = {holder: point for point, holder in enumerate(held, start=1)}
        return self._holders[number]

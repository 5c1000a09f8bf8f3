"""A secure sum whose parties are all in one process: the conversation that devices have, for simulations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
from nacl import bindings as sodium

from homebody.federation.secure_sum.collector import Collector, OpenedSum, talk
from homebody.federation.secure_sum.helped import EPOCH_BYTES, HelpedSum, HelpedTerms, Helper, HelperEpoch, sign_message
from homebody.federation.secure_sum.identities import new_key
from homebody.federation.secure_sum.messages import FEWEST, Terms
from homebody.federation.secure_sum.party import Party
from homebody.privacy.ring import Numbers

__all__ = ["add_up", "add_up_with_helper"]


def add_up(vectors: Sequence[Numbers], width: int, shares: tuple[float, float], attempt: str = "round") -> Numbers:
    """The sum of one vector of each party, modulo 2^(8·width), as a server opens it.

    shares: of the parties that must answer, and that may collude (`SecureSum.shares`).

    >>> import numpy as np
    >>> add_up([np.array([1, 2], dtype=np.uint64), np.array([3, 65535], dtype=np.uint64)], 2, (2 / 3, 0.1)).tolist()
    [4, 1]
    """
    terms = Terms("simulation", attempt, len(vectors), len(vectors[0]), width, *shares, len(vectors))
    fewest = min(FEWEST, len(vectors))
    parties = [Party.join(terms, number, new_key(), fewest=fewest) for number in range(len(vectors))]
    talking = talk(Collector(terms, {party.number: party.identity for party in parties}))
    asked = next(talking)

    def answer(number: int) -> tuple[int, bytes]:
        given = partial(vectors.__getitem__, number)
        return number, parties[number].answer(asked.exchange, asked.question(number), given)

    while True:
        answers = map(answer, asked.own)
        try:
            asked = talking.send(answers)
        except StopIteration as ended:
            opened: OpenedSum = ended.value
            return opened.numbers


def add_up_with_helper(vectors: Sequence[Numbers], width: int, least: float, attempt: str = "round") -> Numbers:
    """The same with a helper that opens the sum. It adds no noise here: a simulation draws it from its seed.

    >>> vectors = np.array([[1, 2], [3, 65535]], dtype=np.uint64)
    >>> add_up_with_helper(list(vectors), 2, least=2 / 3).tolist()
    [4, 1]
    """
    # A helper opens no sum of fewer; a simulated round may have them.
    added = [*vectors, *[np.zeros_like(vectors[0])] * (FEWEST - len(vectors))]
    terms = HelpedTerms("simulation", attempt, len(added), len(vectors[0]), width, least=least)
    secret, keys = os.urandom(32), [sodium.crypto_sign_keypair() for _ in added]
    epoch = HelperEpoch(bytes(EPOCH_BYTES), sodium.crypto_scalarmult_base(secret), terms, closes=1.0)
    total = HelpedSum(epoch)
    for number, (vector, (_, key)) in enumerate(zip(added, keys, strict=True)):
        total.take(number, sign_message(epoch, vector, key))
    return total.opened(Helper(epoch, secret, {public for public, _ in keys}.__contains__).open(total.request()))

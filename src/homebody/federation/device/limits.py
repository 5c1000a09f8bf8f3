"""What a task may use of a device, and when its answer leaves.

A device estimates a task before it starts, and refuses a task over its limits. If the method states a finite ε against
the server, the same estimate decides when the answer leaves: the time that the work took would depend on the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from homebody.core import CALL, Catalogue, Method, Work
from homebody.errors import HomebodyError, several
from homebody.federation.device.settings import HomeSettings
from homebody.privacy import Charge, NonPrivate

__all__ = ["TooLarge", "answering_seconds", "estimate", "private", "refuse_larger"]

RATE = 1e9
"""Operations a second that every device is assumed to reach."""
BASE_SECONDS, PERSON_SECONDS = 0.25, 0.25
"""To read the home and to write an answer down, for a letter and for each person in it."""
STEP_SECONDS = 0.05
ITEM_BYTES, ITEM_OPERATIONS = 600, 10_000
"""What one item of the catalogue, with its name, and one interaction take while a household is built."""


class TooLarge(HomebodyError):
    """A task exceeds one of the device's limits; the message says which."""


def estimate(method: Method, catalogue: Catalogue, longest: int, people: int, *, ranks: bool = True) -> Work:
    """Upper bounds for a letter that asks this many people, one after the other. ranks: and for ranking afterwards.

    >>> from homebody.methods.fedmf import FedMF
    >>> small, large = (estimate(FedMF(factors=size), Catalogue(100), 50, 1) for size in (4, 400))
    >>> large.memory > small.memory, large.operations > small.operations, large.bytes > small.bytes
    (True, True, True)
    """
    try:
        whole = method.work(catalogue, longest)
        work = method.uplink.work(replace(whole, operations=whole.operations - (0 if ranks else whole.ranking)))
    except (RuntimeError, OverflowError, MemoryError) as error:  # sizes that have no number of bytes
        raise TooLarge("The task takes more memory than any device has, and this device allows less.") from error
    n_items = catalogue.n_items
    return Work(
        memory=work.memory + ITEM_BYTES * n_items + 400 * longest * people,
        operations=people * (work.operations + ITEM_OPERATIONS * longest) + ITEM_OPERATIONS * n_items + 100 * CALL,
        bytes=work.bytes * (1 if method.uplink.facts.secret else people),  # in a secure sum they send one vector
    )


def refuse_larger(work: Work, settings: HomeSettings) -> None:
    """Refuse a task that exceeds a limit.

    >>> refuse_larger(Work(memory=3 << 30), HomeSettings(server="localhost:9092"))
    Traceback (most recent call last):
        ...
    homebody.federation.device.limits.TooLarge: The task takes up to 3,222 MB of memory, and this device allows \
2,148 MB.
    """
    memory, operations, size = settings.most_memory, settings.most_operations, settings.most_bytes
    if work.memory > memory:
        raise TooLarge(f"The task takes up to {_mega(work.memory)} of memory, and this device allows {_mega(memory)}.")
    if work.operations > operations:
        raise TooLarge(
            f"The task takes up to {work.operations:.1e} operations, and this device allows {operations:.1e}."
        )
    if work.bytes > size:
        raise TooLarge(f"The answer takes up to {_mega(work.bytes)}, and this device allows {_mega(size)}.")


def answering_seconds(work: Work, people: int) -> float:
    """When the answer to a letter leaves after its work began, rounded up to 50 ms.

    >>> answering_seconds(Work(operations=300_000_000), people=2)
    1.05
    """
    needed = BASE_SECONDS + people * PERSON_SECONDS + work.operations / RATE
    return round(math.ceil(round(needed / STEP_SECONDS, 6)) * STEP_SECONDS, 2)


def private(charges: Sequence[Charge]) -> bool:
    """Whether a finite ε is stated against the server: nothing that it sees is charged as not private."""
    return not any(charge.observer == "server" and isinstance(charge.event, NonPrivate) for charge in charges)


def _mega(size: int) -> str:
    return several(math.ceil(size / 1e6), "MB", "MB")

"""An epoch: what the reports of one round are sealed to, as server, proxies and devices describe it to one another.

Every party reads a description here, and all devices must find the same one: a server that gave a device a key or a
model of its own could recognise its reports. Nothing here needs torch, so that a proxy and an intake start quickly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["BIT_BYTES", "MESSAGE_REPORTS", "SEAL_BYTES", "BadEpoch", "Epoch"]

MESSAGE_REPORTS = 4096
"""The most one-bit reports in a device's message to a proxy; a device that has more sends several messages. Of longer
reports as many as take as many bytes."""
_TEXTS = {"epoch": re.compile("[0-9a-f]{32}"), "key": re.compile("[0-9a-f]{64}"), "shared": re.compile(".{0,200}")}
"""The form of each text in a description; a device compares `shared` with what its letter asks."""
_BOUNDS = {"k": 1_000_001, "entries": 2**30, "among": 2**40, "closes": 2**40}
"""The number that each number in a description must be below."""
BIT_BYTES = 4
"""Of a report of one bit."""
SEAL_BYTES = 48
"""By how much a sealed report is longer than the report."""
MOST_BYTES = 1024
"""Of any report."""


class BadEpoch(ValueError):
    """The description of an epoch is malformed."""


@dataclass(frozen=True)
class Epoch:
    """The public facts of a round of reports.

    >>> epoch = Epoch(bytes(16), bytes(32), asks="ab" * 16, k=2, entries=3, among=1, closes=2_000_000_000)
    >>> Epoch.read(epoch.to_json()) == epoch
    True
    >>> Epoch.read({**epoch.to_json(), "k": 0})
    Traceback (most recent call last):
        ...
    homebody.federation.epoch.BadEpoch: The epoch's 'k' is missing or malformed.
    """

    id: bytes
    """Its id in envelopes."""
    key: bytes
    """The public key that its reports are sealed to."""
    asks: str
    """A digest of everything that its reports depend on (`shared` on the wire)."""
    k: int
    """Reports of one person."""
    entries: int
    """Entries of the update that reports are about."""
    among: int
    """How many people's reports a proxy must mix before it passes any on: the ledger relies on it."""
    closes: float
    """Unix seconds."""
    size: int = field(default=BIT_BYTES, kw_only=True)
    """Bytes of a report before it is sealed (`bytes` on the wire, where it is another than that of one bit)."""

    @classmethod
    def read(cls, said: object) -> Epoch:
        """A description from another party, checked; names that are not known here are ignored."""
        if not isinstance(said, Mapping):
            raise BadEpoch("The epoch's description is not a JSON object.")
        for name, form in _TEXTS.items():
            if type(said.get(name)) is not str or not form.fullmatch(said[name]):
                raise BadEpoch(f"The epoch's '{name}' is missing or malformed.")
        for name, bound in _BOUNDS.items():
            kinds = (int, float) if name == "closes" else (int,)  # a proxy closes fractions of a second earlier
            if type(said.get(name)) not in kinds or not math.isfinite(said[name]) or not 0 < said[name] < bound:
                raise BadEpoch(f"The epoch's '{name}' is missing or malformed.")
        size = said.get("bytes", BIT_BYTES)
        if type(size) is not int or not 0 < size <= MOST_BYTES:
            raise BadEpoch("The epoch's 'bytes' is malformed.")
        texts = bytes.fromhex(said["epoch"]), bytes.fromhex(said["key"]), said["shared"]
        return cls(*texts, *(said[name] for name in _BOUNDS), size=size)

    def to_json(self) -> dict[str, Any]:
        """The inverse of `read`."""
        texts = {"epoch": self.id.hex(), "key": self.key.hex(), "shared": self.asks}
        size = {} if self.size == BIT_BYTES else {"bytes": self.size}
        return texts | {name: getattr(self, name) for name in _BOUNDS} | size

    def agrees(self, other: Epoch) -> bool:
        """Whether both describe the same epoch; every hop closes it a little before the next."""
        return replace(self, closes=other.closes) == other

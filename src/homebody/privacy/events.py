"""What a release tells whom: the vocabulary of the ledger. It fails closed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["OBSERVERS", "Charge", "NonPrivate", "Observer", "Unit"]

Observer = Literal["server", "clients", "public"]
Unit = Literal["user"]
OBSERVERS: tuple[Observer, ...] = ("server", "clients", "public")
"""The server; the other clients, who receive the shared parameters; the public, who sees the final model."""


@dataclass(frozen=True)
class NonPrivate:
    """A release with no bound on what it tells: ε = ∞."""

    reason: str
    kind: Literal["not-private"] = "not-private"


@dataclass(frozen=True)
class Charge:
    """One event, as one observer sees it, about one unit."""

    observer: Observer
    unit: Unit
    event: NonPrivate
    part: str = ""
    """Which part of the release, where it has several."""

    def as_json(self) -> str:
        """The event, as the ledger keeps it."""
        return json.dumps(asdict(self.event), sort_keys=True)

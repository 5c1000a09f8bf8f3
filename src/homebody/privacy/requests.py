"""Asking the server for rows, instead of downloading whole tables: cheap, and plain to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from homebody.errors import HomebodyError
from homebody.privacy.events import Charge, NonPrivate
from homebody.privacy.stages import Message, Step

__all__ = ["AskRows"]


@dataclass(frozen=True)
class AskRows(Step):
    """The device downloads only the rows that it works on in this round (PFedRec, appendix B.1).

    So it has to say which: the request leaves the device too, as it is, and names everything that the person trains
    on among a few negatives. Whatever else the channel hides, ε = ∞ against the server; the others never see the
    request. It may stand anywhere in a channel. Only for methods that say what they ask for (`Method.asks`).
    """

    keeps_sum: ClassVar[bool] = True

    def place(self, message: Message) -> tuple[Self, Message]:
        if message.asks:
            raise HomebodyError("A second AskRows asks for the same rows: leave one out.")
        return self, replace(message, asks=True)

    def told(self, charges: Sequence[Charge]) -> list[Charge]:
        """The charges of the rest of the channel, with the request in place of all that the server is told."""
        request = NonPrivate("each device asks the server for the rows it trains on, its own items among them")
        known = [replace(one, event=request) if one.observer == "server" else one for one in charges]
        if any(one.observer == "server" for one in known):
            return known
        return [Charge("server", "user", request), *known]

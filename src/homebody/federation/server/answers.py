"""What devices answer, read into typed values at one place, before anything uses it.

Whatever is wrong with an answer is its device's fault: `read` refuses it with `wire.Malformed`, and raises nothing
else. A person whose update is wrong is refused alone; the others of a household count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

from homebody.core import Tree
from homebody.federation import wire

if TYPE_CHECKING:
    from homebody.federation.server.records import RegisteredDevice

__all__ = ["Answer", "read"]

MOST_HELD = 64
"""Shared parameters and feature schemas that a device may say it holds."""
LONGEST_NAME = 64
"""Characters of the name of one."""
LONGEST_REFUSAL = 500
"""Characters of a device's sentence why it does not answer."""
MOST_ITEMS = 2**31
LACKS = frozenset({"shared", "items", "features", wire.ROSTER})


@dataclass(frozen=True)
class Answer:
    """What a device says of itself, and what its people send.

    >>> class Two:
    ...     first, people = 40, 2
    >>> answer = read(wire.encode_letter({"people": [1], "items": 9, "holds": []}), Two())
    >>> answer.people, answer.items, answer.refused
    ((41,), 9, None)
    >>> read(wire.encode_letter({"people": [1], "items": 9, "holds": [], "declined": [[1]]}), Two())
    Traceback (most recent call last):
        ...
    homebody.federation.wire.Malformed: The answer declines for people who were not asked, or not once each.
    """

    people: tuple[int, ...] = ()
    """The numbers of those who take part, in order."""
    unregistered: int = 0
    """How many more people it says it has than were registered."""
    items: int = 0
    """How much of the catalogue it knows."""
    holds: frozenset[str] = frozenset()
    """Shared parameters, and feature schemas, that it has already."""
    lacks: str = ""
    """What the device must receive before it can answer."""
    refused: str | None = None
    """Why it does not answer at all, in its own words."""
    declined: frozenset[int] = frozenset()
    """Who of those who were asked declined."""
    updates: Mapping[int, Tree] = field(default_factory=lambda: MappingProxyType({}))
    """What people sent, by their numbers."""
    faults: Mapping[int, wire.Malformed] = field(default_factory=lambda: MappingProxyType({}))
    """The errors of the other people's parts."""
    message: bytes | None = None
    """What the device sends for all of its people, in an exchange of a secure sum."""


def read(
    body: bytes,
    device: RegisteredDevice,
    letter: str | None = None,
    asked: Collection[int] = (),
    update: Callable[[bytes], Tree] | None = None,
    *,
    summed: bool = False,
) -> Answer:
    """An answer of this device's; refused where anything about it is not as it must be.

    letter: the digest of the letter that it must name; None where it answers a greeting. asked: the numbers of the
    people whom that letter asked. update: reads and checks what one of them sent; None where nothing is to be sent.
    summed: the letter is an exchange of a secure sum, in which a device sends one part for all of its people.
    """
    asked = frozenset(asked)
    try:
        header, parts = wire.decode_letter(body)
        if letter is not None and header.get("to") != letter:
            raise wire.Malformed("an answer to another letter")
        if "refused" in header:
            if type(header["refused"]) is not str or len(header["refused"]) > LONGEST_REFUSAL:
                raise wire.Malformed("The answer refuses in something else than a sentence.")
            return Answer(refused=header["refused"])
        slots, items, holds = header.get("people"), header.get("items"), header.get("holds")
        if not _numbers(slots) or type(items) is not int or not 0 <= items < MOST_ITEMS or not _names(holds):
            raise wire.Malformed("its answer does not say who it is")
        registered = sorted(slot for slot in slots if slot < device.people)
        people = tuple(device.first + slot for slot in registered)
        lacks = header.get("lacks", "")
        if lacks and (type(lacks) is not str or lacks not in LACKS):
            raise wire.Malformed("The answer lacks something that nobody is sent.")
        declined = header.get("declined", [])
        if not _numbers(declined) or not asked.issuperset(declined):
            raise wire.Malformed("The answer declines for people who were not asked, or not once each.")
        updates, faults, message = {}, {}, parts.pop(wire.SUM, None) if summed else None
        if summed and not lacks and (message is None) != asked.issubset(declined):
            raise wire.Malformed("The answer declines for everybody and takes part, or does neither.")
        if message is not None and lacks:
            raise wire.Malformed("The answer sends something that was not asked for.")
        if parts and (update is None or lacks):
            raise wire.Malformed("The answer sends something that was not asked for.")
        numbers = {name: _number(name) for name in parts}
        if not asked.issuperset(numbers.values()):
            raise wire.Malformed("someone else's number")
        if not set(declined).isdisjoint(numbers.values()):
            raise wire.Malformed("The answer declines for somebody and answers for them.")
        for name, part in parts.items():
            number = numbers[name]
            if number not in people:
                continue  # who has opted out since sends nothing
            assert update is not None
            try:
                updates[number] = update(part)
            except wire.Malformed as error:
                faults[number] = error
            except Exception as error:
                faults[number] = wire.Malformed("The update cannot be read.")
                faults[number].__cause__ = error
        return Answer(
            people=people,
            unregistered=len(slots) - len(registered),
            items=items,
            holds=frozenset(holds),
            lacks=lacks,
            declined=frozenset(declined),
            updates=MappingProxyType(updates),
            faults=MappingProxyType(faults),
            message=message,
        )
    except wire.Malformed:
        raise
    except Exception as error:
        # The device chose the bytes that a reader of ours stumbled over.
        raise wire.Malformed("The answer cannot be read.") from error


def _numbers(said: Any) -> TypeGuard[list[int]]:
    """Whether it is a list of whole numbers from 0, each once."""
    return isinstance(said, list) and all(type(n) is int and n >= 0 for n in said) and len(set(said)) == len(said)


def _names(said: Any) -> TypeGuard[list[str]]:
    few = isinstance(said, list) and len(said) <= MOST_HELD
    return few and all(type(name) is str and len(name) <= LONGEST_NAME for name in said)


def _number(name: str) -> int:
    """The person's number in the name of a part. Only one spelling is valid, so nobody is there twice."""
    plain = name.isascii() and name.isdecimal() and len(name) < 19
    return int(name) if plain and str(int(name)) == name else -1

"""Where to look for better hyper-parameters, and which values a trial tries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field
from typing import Any

import numpy as np

from homebody.core import Recommender
from homebody.errors import HomebodyError, refuse_unknown
from homebody.settings import KINDS, Range, check_value, params, parse

__all__ = [
    "Space",
    "every_point",
    "parse_search",
    "points",
    "search_space",
    "size",
    "space_text",
    "tidied",
    "within",
]

Space = Mapping[str, Range | tuple[Any, ...]]
"""For each field that is varied, a range or the values to try."""
FACTOR = 10.0
"""How far around its default a number is searched if the method declares no range."""
REPEATS = 1_000
"""Draws in a row without a new point, after which a space counts as exhausted."""


def search_space(method: type[Recommender]) -> tuple[Space, bool]:
    """The ranges a method declares, and True; one that declares none gets ranges around its defaults, and False.

    >>> from homebody.methods import find
    >>> space, declared = search_space(find("fedmf"))
    >>> space_text(space["learning_rate"]), declared
    ('0.01:1:log', True)
    """
    searched = [spec for spec in params(method) if spec.metadata["search"] is not None]
    declared = {spec.name: _typed(spec, spec.metadata["search"]) for spec in searched}
    if declared:
        return declared, True
    guessed = {spec.name: _around(spec) for spec in params(method)}
    return {name: space for name, space in guessed.items() if space is not None}, False


def space_text(space: Range | tuple[Any, ...]) -> str:
    """As `--search` takes it.

    >>> space_text((16, 32)), space_text((True, False))
    ('16,32', 'true,false')
    """
    if isinstance(space, Range):
        return str(space)
    return ",".join(str(value).lower() if isinstance(value, bool) else str(value) for value in space)


def parse_search(method: type[Recommender], texts: Sequence[str]) -> Space:
    """`field=low:high`, `field=low:high:log` and `field=a,b,c` as where to look.

    >>> from homebody.methods import find
    >>> parse_search(find("fedmf"), ["factors=8,16", "learning_rate=0.1:1:log"])
    {'factors': (8, 16), 'learning_rate': Range(low=0.1, high=1.0, log=True)}
    """
    known = {spec.name: spec for spec in params(method)}
    space: dict[str, Range | tuple[Any, ...]] = {}
    for text in texts:
        name, equals, where = text.partition("=")
        if not equals or not where:
            raise HomebodyError(f"--search takes field=low:high, field=low:high:log or field=a,b,c, not '{text}'.")
        refuse_unknown(f"field of {method.__name__}", [name], known)
        space[name] = _parse(known[name], where)
    return space


def points(space: Space, seed: int) -> Iterator[dict[str, Any]]:
    """One set of values after the other, each different, spread evenly over the space; it may end.

    The additive recurrence of the generalised golden ratio (Roberts, 2018), shifted by the seed: the first
    points are the same however many are taken.

    >>> [point["x"] for _, point in zip(range(4), points({"x": (1, 2, 3)}, seed=0))]
    [1, 3, 2]
    """
    generator = np.random.default_rng(seed % 2**64)
    shift = generator.random(len(space))
    step = _golden(len(space)) ** -np.arange(1, len(space) + 1)
    seen: set[tuple[Any, ...]] = set()
    number = missed = 0
    while space and missed < REPEATS:
        number += 1
        shares = (shift + number * step) % 1.0
        point = {name: _at(where, float(share)) for (name, where), share in zip(space.items(), shares, strict=True)}
        if (values := tuple(point.values())) in seen:
            missed += 1
            continue
        missed = 0
        seen.add(values)
        yield point


def _golden(dimensions: int) -> float:
    """The root above 1 of x ** (dimensions + 1) = x + 1."""
    root = 1.5
    for _ in range(64):
        root = (1.0 + root) ** (1.0 / (dimensions + 1))
    return root


def _at(where: Range | tuple[Any, ...], share: float) -> Any:
    """The value at this share of the way; whole numbers are equally likely each, their range's ends included."""
    if isinstance(where, tuple):
        return where[int(share * len(where))]
    low, high = where.low, where.high + 1 if isinstance(where.low, int) else where.high
    return _tidy(where, low * (high / low) ** share if where.log else low + (high - low) * share)


def tidied(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """These values in the order of the space, real numbers with four digits, as people would write them.

    >>> tidied({"rate": Range(0.01, 1.0, log=True), "size": (4, 8)}, {"size": 8, "rate": 0.123456})
    {'rate': 0.1235, 'size': 8}
    """
    return {
        name: _tidy(where, values[name]) if isinstance(where, Range) else values[name] for name, where in space.items()
    }


def size(space: Space) -> float:
    """How many different settings a space has; infinite where a field is a real number.

    >>> size({"factors": (4, 8), "epochs": Range(1, 3)}), size({"rate": Range(0.1, 1.0)})
    (6, inf)
    """
    return math.prod(math.inf if values is None else len(values) for values in map(_values, space.values()))


def every_point(space: Space) -> Iterator[dict[str, Any]]:
    """All settings of a space that is not infinite, and none of one that is."""
    values = [_values(where) or () for where in space.values()]
    return (dict(zip(space, point, strict=True)) for point in itertools.product(*values))


def _values(where: Range | tuple[Any, ...]) -> Sequence[Any] | None:
    """All values that a field may take; None for a range of real numbers."""
    if isinstance(where, tuple):
        return tuple(dict.fromkeys(where))
    return range(where.low, int(where.high) + 1) if isinstance(where.low, int) else None


def within(where: Range | tuple[Any, ...], value: Any) -> bool:
    """Whether a field may take this value."""
    return value in where if isinstance(where, tuple) else where.low <= value <= where.high


def _tidy(where: Range, value: float) -> int | float:
    """A value of the range: a whole number, or one as short as people would write it."""
    if isinstance(where.low, int):
        return min(int(value), int(where.high))
    return min(max(float(f"{value:.4g}"), where.low), where.high)


def _typed(spec: Field[Any], where: Range | tuple[Any, ...]) -> Range | tuple[Any, ...]:
    """With numbers of the field's own kind, all within its bounds."""
    kind = type(spec.default)
    if isinstance(where, Range):
        if kind not in (int, float):
            raise HomebodyError(f"{spec.name} is {KINDS.get(kind, 'no number')}: name the values to try, as a,b,c.")
        if kind is int and not (float(where.low).is_integer() and float(where.high).is_integer()):
            raise HomebodyError(f"{spec.name} must be a whole number, so it cannot be searched from {where}.")
        where = Range(kind(where.low), kind(where.high), where.log)
    else:
        where = tuple(float(value) if kind is float and type(value) is int else value for value in where)
    for value in (where.low, where.high) if isinstance(where, Range) else where:
        check_value(spec, value, type(spec.default))
    return where


def _around(spec: Field[Any]) -> Range | tuple[Any, ...] | None:
    """Around the default: numbers a factor down and up, whole numbers half to double, both of true and false."""
    default: Any = spec.default
    low, high = spec.metadata["low"], spec.metadata["high"]
    if type(default) is bool:
        return (False, True)
    if type(default) not in (int, float) or default <= 0:
        return None
    least, most = (max(1, default // 2), default * 2) if type(default) is int else (default / FACTOR, default * FACTOR)
    least, most = least if low is None else max(low, least), most if high is None else min(high, most)
    return _typed(spec, Range(least, most, log=type(default) is float)) if least < most else None


def _parse(spec: Field[Any], text: str) -> Range | tuple[Any, ...]:
    kind = type(spec.default)
    parts = text.split(":")
    if kind is str or len(parts) == 1:
        return _typed(spec, tuple(_value(spec, part) for part in text.split(",")))
    if len(parts) not in (2, 3) or parts[2:] not in ([], ["log"]):
        raise HomebodyError(f"{spec.name} is searched from low:high or low:high:log, not '{text}'.")
    if kind is bool:
        raise HomebodyError(f"{spec.name} is true or false: search it as {spec.name}=true,false.")
    return _typed(spec, Range(_value(spec, parts[0]), _value(spec, parts[1]), log=len(parts) == 3))


def _value(spec: Field[Any], text: str) -> Any:
    return parse(spec.name, text, type(spec.default))

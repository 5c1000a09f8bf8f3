"""Hyper-parameters: dataclass fields that know their meaning, their bounds, and where to look for better values."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar

from homebody.errors import HomebodyError
from homebody.settings import check_value, setting

__all__ = ["Range", "check_params", "param", "params"]

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Where `homebody tune` looks for a number: evenly from low to high, or evenly in its logarithm.

    >>> print(Range(0.01, 1, log=True), Range(1, 5))
    0.01:1:log 1:5
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise HomebodyError(
                f"A range goes from a lower number to a higher one, not from {self.low} to {self.high}."
            )
        if self.log and self.low <= 0:
            raise HomebodyError(f"A range in logarithms begins above 0, not at {self.low}.")

    def __str__(self) -> str:
        return f"{self.low:.12g}:{self.high:.12g}" + (":log" if self.log else "")


def param(
    default: T,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    search: Range | tuple[T, ...] | None = None,
    choices: tuple[T, ...] = (),
) -> T:
    """A hyper-parameter of a method or reference: a setting that `--set` gives and `homebody tune` searches.

    search: where `homebody tune` looks: a range or a few values. A field without it keeps its value, unless no field of
    the method has it; then every field is searched around its default.
    choices: the only values that are allowed.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Model:
    ...     factors: int = param(32, "size of a vector", low=1)
    ...     def __post_init__(self):
    ...         check_params(self)
    >>> Model(factors=0)
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: factors must be at least 1, not 0.
    """
    value: T = setting(default, doc, low=low, high=high, choices=choices, search=search)
    return value


def params(owner: Any) -> list[Field[Any]]:
    """The hyper-parameters of a dataclass or of its instance, in order."""
    return [spec for spec in fields(owner) if "search" in spec.metadata and spec.default is not MISSING]


def check_params(owner: Any) -> None:
    """Refuse a hyper-parameter of the wrong type or out of its bounds. A whole number becomes a number where needed."""
    for spec in params(owner):
        value = getattr(owner, spec.name)
        if type(spec.default) is float and type(value) is int:
            object.__setattr__(owner, spec.name, float(value))
        check_value(spec, getattr(owner, spec.name), type(spec.default))

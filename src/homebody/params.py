"""Hyper-parameters: dataclass fields that know their meaning, their bounds, and where to look for better values."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from homebody.errors import HomebodyError

__all__ = ["Range", "check_params", "check_value", "param", "params"]

T = TypeVar("T")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


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
    """A field of a method or reference, with its default.

    search: where `homebody tune` looks: a range or a few values. A field without stays as it is, unless the
    method declares none at all; then every field is searched around its default.
    choices: the only values there are.

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
    value: Any = field(
        default=default, metadata={"doc": doc, "low": low, "high": high, "search": search, "choices": choices}
    )
    return value


def params(owner: Any) -> list[Field[Any]]:
    """The hyper-parameters of a dataclass or of its instance, in order."""
    return [spec for spec in fields(owner) if "doc" in spec.metadata and spec.default is not MISSING]


def check_params(owner: Any) -> None:
    """Refuse a hyper-parameter of the wrong type or out of its bounds, in a sentence."""
    for spec in params(owner):
        value = getattr(owner, spec.name)
        if type(spec.default) is float and type(value) is int:
            value = float(value)
            object.__setattr__(owner, spec.name, value)
        check_value(spec, value)


def check_value(spec: Field[Any], value: Any) -> None:
    """Likewise one value for one of them."""
    wanted = type(spec.default)
    low, high = spec.metadata["low"], spec.metadata["high"]
    if type(value) is not wanted:
        raise HomebodyError(f"{spec.name} must be {KINDS.get(wanted, wanted.__name__)}, not {value!r}.")
    if (known := spec.metadata["choices"]) and value not in known:
        raise HomebodyError(f"{spec.name} must be one of {', '.join(map(str, known))}, not {value}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise HomebodyError(f"{spec.name} must be a finite number, not {value}.")
    if low is not None and value < low:
        raise HomebodyError(f"{spec.name} must be at least {low}, not {value}.")
    if high is not None and value > high:
        raise HomebodyError(f"{spec.name} must be at most {high}, not {value}.")

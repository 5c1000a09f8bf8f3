"""Hyper-parameters: dataclass fields that know their meaning and their bounds."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, field, fields
from typing import Any, TypeVar

from homebody.errors import HomebodyError

__all__ = ["check_params", "param", "params"]

T = TypeVar("T")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def param(default: T, doc: str, *, low: float | None = None, high: float | None = None) -> T:
    """A field of a method or reference, with its default.

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
    value: Any = field(default=default, metadata={"doc": doc, "low": low, "high": high})
    return value


def params(owner: Any) -> list[Field[Any]]:
    """The hyper-parameters of a dataclass or of its instance, in order."""
    return [spec for spec in fields(owner) if "doc" in spec.metadata and spec.default is not MISSING]


def check_params(owner: Any) -> None:
    """Refuse a hyper-parameter of the wrong type or out of its bounds, in a sentence."""
    for spec in params(owner):
        value, wanted = getattr(owner, spec.name), type(spec.default)
        low, high = spec.metadata["low"], spec.metadata["high"]
        if wanted is float and type(value) is int:
            value = float(value)
            object.__setattr__(owner, spec.name, value)
        if type(value) is not wanted:
            raise HomebodyError(f"{spec.name} must be {KINDS.get(wanted, wanted.__name__)}, not {value!r}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise HomebodyError(f"{spec.name} must be a finite number, not {value}.")
        if low is not None and value < low:
            raise HomebodyError(f"{spec.name} must be at least {low}, not {value}.")
        if high is not None and value > high:
            raise HomebodyError(f"{spec.name} must be at most {high}, not {value}.")

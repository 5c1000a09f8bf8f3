"""Settings: dataclass fields that are declared once, with their meaning and bounds.

The command line (`homebody.cli.options`), the strict reader of TOML files (`read`) and the checks (`check`) derive from
the declaration. A method's hyper-parameters are settings too (`param`), which also say where `homebody tune` looks for
better values.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from numbers import Integral
from types import NoneType
from typing import Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from homebody.errors import HomebodyError, refuse_unknown, several

__all__ = [
    "KINDS",
    "Kind",
    "Range",
    "check",
    "check_counts",
    "check_params",
    "check_value",
    "common_params",
    "is_count",
    "load",
    "param",
    "params",
    "parse",
    "plain",
    "proper_share",
    "read",
    "setting",
    "to_toml",
    "words",
]

T = TypeVar("T")
KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a table",
}
DELTA = 1e-6
"""The δ that ε is stated at by default."""


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[Any, ...] = (),
    unit: str = "",
    panel: str = "",
    make: Callable[[], Any] | None = None,
    **typed: Any,
) -> Any:
    """A dataclass field with its default, its meaning and its bounds.

    default: a list or a table is copied for every instance. Without a default, the setting must be given.
    low, high, above: the bounds of a number, or of each number in a list. above: the number itself is out of bounds.
    unit: what a number counts, in the singular, for the error.
    make: computes the default of each instance.
    panel: where `--help` lists the option. A setting without a panel is no option that commands share.
    typed: how the option is typed, where that does not follow from the name and the type:
    option: its name.
    path: "file" or "folder": an existing path is made absolute. "name": the same for a text that may be a path, or for
    each value of a table. "values": the same for values of a table that begin with file:.
    keys: for a table, an option for each key, with its help.
    assume: the option's default, where the setting has none.
    min: the lowest number that may be typed, where a file may hold a lower one.
    rank: its place in the panel, where that is not the order of the fields: those of rank 0 come before those of 1.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Oven:
    ...     heat: int = setting(180, "Degrees.", low=50, high=300)
    >>> check(Oven(heat=20), "The oven's ")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The oven's heat must be at least 50, not 20.
    """
    bounds = {"low": low, "high": high, "above": above, "choices": choices, "unit": unit}
    metadata = {"doc": doc, **bounds, "panel": panel, **typed}
    if make is not None or isinstance(default, list | dict):
        return field(default_factory=make or (lambda: copy(default)), metadata=metadata)
    return field(default=default, metadata=metadata)


class Kind:
    """The type of a setting, as its annotation says.

    >>> Kind(list[int] | None).outer, Kind(list[int] | None).inner, Kind(list[int] | None).optional
    (<class 'list'>, <class 'int'>, True)
    """

    def __init__(self, hint: Any) -> None:
        options = [hint] if get_origin(hint) in KINDS or hint in KINDS else get_args(hint)
        self.optional = NoneType in options
        (whole,) = (option for option in options if option is not NoneType)
        self.outer: type = get_origin(whole) or whole
        self.inner: Any = (get_args(whole) or (Any,))[-1]
        """The type of the values in a list or a table; Any where it is not said."""


@functools.cache
def declared(owner: Any) -> dict[str, tuple[Field[Any], Kind]]:
    """The settings of a dataclass by name, in order."""
    hints = get_type_hints(owner)
    return {spec.name: (spec, Kind(hints[spec.name])) for spec in fields(owner) if "doc" in spec.metadata}


def default_of(spec: Field[Any]) -> Any:
    """The default of a field, or MISSING."""
    return spec.default if spec.default_factory is MISSING else spec.default_factory()


def check(owner: Any, whose: str) -> None:
    """Refuse a setting of the wrong type or out of its bounds. Errors begin with `whose`, such as "The recipe's "."""
    for name, (spec, kind) in declared(owner.__class__).items():
        value = getattr(owner, name)
        if value is None and kind.optional:
            continue
        if kind.outer not in (list, dict):
            check_value(spec, value, kind.outer, whose)
            continue
        if type(value) is not kind.outer:
            raise _wrong_kind(f"{whose}{name}", kind.outer, value)
        for entry in dict(enumerate(value) if kind.outer is list else value).values():
            if kind.inner is not Any:
                check_value(spec, entry, kind.inner, f"Each of {whose[:1].lower()}{whose[1:]}")


def check_value(spec: Field[Any], value: Any, kind: type, whose: str = "") -> None:
    """Refuse a single value of the wrong type or out of its setting's bounds."""
    name, of = f"{whose}{spec.name}", spec.metadata
    if not fits(value, kind):
        raise _wrong_kind(name, kind, value)
    if of["choices"] and value not in of["choices"]:
        raise HomebodyError(f"{name} must be one of {', '.join(map(str, of['choices']))}, not {value}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise HomebodyError(f"{name} must be a finite number, not {value}.")
    for bound, text, inside in (
        (of["low"], "at least", operator.ge),
        (of["above"], "above", operator.gt),
        (of["high"], "at most", operator.le),
    ):
        if bound is not None and not inside(value, bound):
            amount = several(bound, of["unit"]) if of["unit"] else f"{bound:,}"
            raise HomebodyError(f"{name} must be {text} {amount}, not {value:,}.")
    if further := of.get("check"):
        further(name, value)


def fits(value: Any, kind: type) -> bool:
    """Whether a value is of this very type; a whole number is a number."""
    return type(value) is kind or (kind is float and type(value) is int)


def _wrong_kind(name: str, kind: type, value: Any) -> HomebodyError:
    return HomebodyError(f"{name} must be {KINDS.get(kind, kind.__name__)}, not {value!r}.")


def parse(name: str, text: str, kind: type) -> Any:
    """The value of a setting from what was typed for it.

    >>> parse("epochs", "3", int), parse("dual", "True", bool)
    (3, True)
    """
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise HomebodyError(f"{name} must be {KINDS.get(kind, kind.__name__)}, not '{text}'.") from None


def load(text: str, what: str, schema: int) -> tuple[dict[str, Any], int]:
    """The values of a TOML file and the version of their schema, at most `schema`."""
    import tomllib

    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HomebodyError(f"{what} is not valid TOML: {error}.") from error
    version = values.pop("schema", schema)
    if type(version) is not int or version < 1:
        raise HomebodyError(f"{what} has a schema, which must be a whole number from 1, not {version!r}.")
    if version > schema:
        raise HomebodyError(f"{what} was written by a newer Homebody; update to run it.")
    return values, version


def read(owner: type[T], values: Mapping[str, Any], what: str, kind: str, **tables: Callable[[Any], Any]) -> T:
    """An instance from the values of a TOML table.

    kind: what an error calls a key, such as "recipe field". tables: how the values of some keys are read; by default
    they are taken as they are.
    """
    specs = fields(owner)  # type: ignore[arg-type]
    names = [spec.name for spec in specs]
    refuse_unknown(kind, values, names)
    values = {**values, **{name: table(values.get(name, {})) for name, table in tables.items()}}
    for spec in specs:
        if spec.name not in values and default_of(spec) is MISSING:
            raise HomebodyError(f"{what} names no {spec.name}.")
    return owner(**values)


def to_toml(owner: Any, schema: int) -> str:
    """The TOML that `load` and `read` take back. A setting that is None is left out."""
    import tomli_w

    given = asdict(owner, dict_factory=lambda pairs: {name: value for name, value in pairs if value is not None})
    return tomli_w.dumps({"schema": schema, **given})


def option(spec: Field[Any]) -> str:
    """The name of a setting on the command line."""
    return str(spec.metadata.get("option") or f"--{spec.name.replace('_', '-')}")


def words(owner: Any) -> Iterator[tuple[str, list[str]]]:
    """What is typed to give each setting that differs from its default, by name."""
    for name, (spec, kind) in declared(owner.__class__).items():
        value = getattr(owner, name)
        if value == default_of(spec) or (kind.outer is bool and kind.optional and not value):
            continue
        if kind.outer is bool:
            yield name, [option(spec)]
        elif "keys" in spec.metadata:
            yield name, [word for key, text in value.items() for word in (f"--{key.replace('_', '-')}", text)]
        elif kind.outer is dict:
            yield name, [word for key, text in value.items() for word in (option(spec), f"{key}={text}")]
        elif kind.inner is str:
            yield name, [word for text in value for word in (option(spec), text)]
        else:
            yield name, [option(spec), ",".join(map(str, value)) if kind.outer is list else str(value)]


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
            raise HomebodyError(f"A logarithmic range must start above 0, not at {self.low}.")

    def __str__(self) -> str:
        return f"{self.low:.12g}:{self.high:.12g}" + (":log" if self.log else "")


def param(
    default: T,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    search: Range | tuple[T, ...] | None = None,
    choices: tuple[T, ...] = (),
    check: Callable[[str, T], object] | None = None,
) -> T:
    """A hyper-parameter of a method or reference: a setting that `--set` gives and `homebody tune` searches.

    search: where `homebody tune` looks: a range or a few values. A field without it keeps its value, unless no field of
    the method has it; then every field is searched around its default.
    choices: the only values that are allowed.
    check: raises an error for other values that are refused; it is called with the name and the value.

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
    return setting(default, doc, low=low, high=high, above=above, choices=choices, search=search, check=check)


def params(owner: Any) -> list[Field[Any]]:
    """The hyper-parameters of a dataclass or of its instance, in order."""
    return [spec for spec in fields(owner) if "search" in spec.metadata and spec.default is not MISSING]


def common_params(owner: Any, other: Any) -> dict[str, Any]:
    """The hyper-parameters of an instance that another class has too, by name."""
    names = {spec.name for spec in params(other)}
    return {spec.name: getattr(owner, spec.name) for spec in params(owner) if spec.name in names}


def proper_share(name: str, value: float) -> None:
    """Refuse a share that leaves nothing to one of two parts."""
    if value in (0.0, 1.0):
        raise HomebodyError(f"{name} must be above 0 and under 1, not {value:g}.")


def check_counts(**counts: object) -> None:
    """Refuse a number of things below 1, or what is no whole number, by its name; None is not given.

    >>> check_counts(seeds=3, rounds=None)
    >>> check_counts(trials="4")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: Trials must be a whole number, not '4'.
    """
    for name, count in counts.items():
        if count is None:
            continue
        if not is_count(count):
            raise _wrong_kind(name.capitalize(), int, count)
        if count < 1:
            raise HomebodyError(f"{name.capitalize()} must be at least 1, not {count}.")


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, NumPy's too.

    >>> is_count(3), is_count(True), is_count("3"), is_count(2.5)
    (True, False, False, False)
    """
    return not isinstance(value, bool) and isinstance(value, Integral)


def plain(value: Any) -> Any:
    """A single number of NumPy or torch as Python's own; anything else as it is.

    >>> import numpy as np
    >>> plain(np.int64(2)), plain(np.float32(0.5)), plain("2")
    (2, 0.5, '2')
    """
    own = type(value).__module__.partition(".")[0] in ("numpy", "torch")
    return value.item() if own and getattr(value, "shape", None) == () else value


def check_params(owner: Any) -> None:
    """Refuse a hyper-parameter of the wrong type or out of its bounds. A whole number becomes a number where needed."""
    for spec in params(owner):
        given = getattr(owner, spec.name)
        value = plain(given)
        if type(spec.default) is float and type(value) is int:
            value = float(value)
        if value is not given:
            object.__setattr__(owner, spec.name, value)
        check_value(spec, getattr(owner, spec.name), type(spec.default))

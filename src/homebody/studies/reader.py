"""Reading TOML strictly: every value of its kind, every mistake with its place, nothing left over."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any

from homebody.errors import HomebodyError, unknown_name
from homebody.settings import KINDS, fits

__all__ = ["Reader", "at", "insist_distinct"]


def insist_distinct(names: Sequence[str], where: str, what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise HomebodyError(f"{where}: there are {names.count(name)} {what} '{name}'; each needs its own.")


def at(where: str, error: HomebodyError) -> HomebodyError:
    return HomebodyError(f"{where}: {error}")


class Reader:
    """Takes values out of a TOML table one by one, each of its kind; what is left over is refused."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = dict(values), where
        self.known: list[str] = []

    def take(self, name: str, kind: type, default: Any = MISSING) -> Any:
        self.known.append(name)
        if name not in self.values:
            if default is MISSING:
                near = difflib.get_close_matches(name, self.values, n=1)
                raise self.error(f"'{name}' is missing" + (f" (is '{near[0]}' meant?)" if near else ""))
            return default
        value = self.values.pop(name)
        if not fits(value, kind):
            raise self.error(f"'{name}' must be {KINDS[kind]}, not {value!r}")
        return float(value) if kind is float else value

    def identity(self) -> str:
        """The number or letter that the paper gives it, written as a text or as a number."""
        if type(self.values.get("id")) is int:
            self.values["id"] = str(self.values["id"])
        identity: str = self.take("id", str)
        self.where = f"{self.where.rpartition(' ')[0]} {identity}"
        return identity

    def texts(self, name: str, default: Any = MISSING) -> list[str]:
        """At least one; a default may be none."""
        if name not in self.values and default is not MISSING:
            self.known.append(name)
            return list(default)
        values: list[str] = self.take(name, list)
        if not values or not all(isinstance(value, str) for value in values):
            raise self.error(f"'{name}' must be a list of at least one text, not {values!r}")
        insist_distinct(values, self.where, f"entries of '{name}' called")
        return list(values)

    def tables(self, name: str) -> Iterator[dict[str, Any]]:
        values = self.take(name, list, [])
        for value in values:
            if not isinstance(value, dict):
                raise self.error(f"'{name}' must be written as [[{name}]], not {value!r}")
            yield value

    def done(self) -> None:
        for name in self.values:
            raise self.wrong(unknown_name("key", name, self.known))

    def error(self, text: str) -> HomebodyError:
        return HomebodyError(f"{self.where}: {text}.")

    def wrong(self, error: HomebodyError) -> HomebodyError:
        return at(self.where, error)

"""What a letter from the server asks of a device, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from homebody.core import Method
from homebody.errors import HomebodyError, unknown_name
from homebody.federation import wire
from homebody.federation.server.aggregate import about
from homebody.federation.service.text import one_line
from homebody.methods import METHODS
from homebody.recipe import Recipe

__all__ = ["Task", "acting"]

LONGEST = 5_000
"""Interactions of a person that count where the plan does not say how many."""
MOST_INTERACTIONS = 10_000_000
MOST_ITEMS = 2**31
"""No row has a number on the wire that is as large."""
_KINDS: dict[str, type | tuple[type, ...]] = {
    "do": str,
    "run": str,
    "release": str,
    "step": int,
    "key": int,
    "clients_key": int,
    "n_items": int,
    "half": bool,
    "method": str,
    "fields": dict,
    "stages": list,
    "seed": int,
    "protocol": str,
    "held_out": (str, type(None)),
    "negatives": int,
    "cutoffs": list,
    "measures": bool,
    "keep": (int, type(None)),
}
_OPTIONAL: dict[str, tuple[type | tuple[type, ...], Any]] = {
    "first": (int, 0),
    "people": (list, []),
    "shared": (str, ""),
    "epoch": ((dict, type(None)), None),
    "features": (str, ""),
    "longest": (int, LONGEST),
}
MOST_OF_A_FIELD = 1_000_000
"""A method's sizes: a server must not make a device run out of memory."""
DO = ("hello", "train", "evaluate", "adapt")
MOST_OF_A_NAME = 900
"""Characters: a home keeps a thousand, and telemetry has a longer name than its round."""
MOST_NEGATIVES = 100_000
MOST_CUTOFFS = 100
MOST_STAGES = 16


@dataclass(frozen=True)
class Task:
    """One letter. A server is believed in what is to be computed, and in nothing that could harm the device."""

    do: str
    run: str
    release: str
    step: int
    key: int
    clients_key: int
    n_items: int
    half: bool
    method: str
    fields: dict[str, Any]
    stages: list[str]
    seed: int
    protocol: str
    held_out: str | None
    negatives: int
    cutoffs: list[int]
    measures: bool
    """Whether devices hold interactions out to measure themselves."""
    keep: int | None
    """The round that may be come back to."""
    first: int
    """The number of this device's first person."""
    people: list[int]
    shared: str
    """What the shared parameters are called."""
    epoch: dict[str, Any] | None
    """What reports are sealed to, where they go through a proxy."""
    features: str = ""
    """What the sheet of features is called; empty: the method takes none in."""
    longest: int = LONGEST
    """How many interactions of a person count, the latest: what a task takes is reckoned with so many."""

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> Task:
        values: dict[str, Any] = {}
        for name, kind in _KINDS.items():
            value = header.get(name)
            # bool is an int, and must not pass for one.
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise wire.Malformed(f"The letter's '{name}' is missing or of another kind.")
            values[name] = value
        for name, (kind, default) in _OPTIONAL.items():
            values[name] = header.get(name, default)
            if not isinstance(values[name], kind):
                raise wire.Malformed(f"The letter's '{name}' is of another kind.")
        numbers = [*values["people"], *values["cutoffs"], values["step"], values["n_items"], values["first"]]
        numbers += [] if values["keep"] is None else [values["keep"]]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise wire.Malformed("The letter has numbers that are none.")
        words = [values["key"], values["clients_key"], values["seed"]]
        if not all(-(2**63) <= word < 2**63 for word in words) or not 1 <= values["negatives"] <= MOST_NEGATIVES:
            raise wire.Malformed("The letter has numbers that are too large.")
        if values["n_items"] >= MOST_ITEMS:
            raise wire.Malformed("The letter has numbers that are too large.")
        if type(values["longest"]) is not int or not 1 <= values["longest"] <= MOST_INTERACTIONS:
            raise wire.Malformed("The letter has numbers that are too large.")
        for name in ("run", "release") if values["do"] != "hello" else ("run",):  # a greeting is of no round
            _check_name(values[name])
        right = all(type(stage) is str for stage in values["stages"]) and len(values["stages"]) <= MOST_STAGES
        if not right or len(values["cutoffs"]) > MOST_CUTOFFS:
            raise wire.Malformed("The letter's stages or cut-offs are not as they should be.")
        if any(type(value) is int and abs(value) > MOST_OF_A_FIELD for value in values["fields"].values()):
            raise wire.Malformed("The letter has numbers that are too large.")
        if values["do"] not in DO:
            raise wire.Malformed("The letter asks for something that this client does not know: update it.")
        if values["epoch"] is not None:
            _check_epoch(values["epoch"], about(header))
        return cls(**values)

    @property
    def phase(self) -> str:
        """Which stage of the training it belongs to."""
        return self.release.rpartition("/")[0]

    @cached_property
    def acting(self) -> Method:
        """The method of this letter's phase, by this device's own code."""
        return acting(self.described(), self.phase)

    def described(self) -> dict[str, Any]:
        """What says how to compute: it is kept with the model, to rank with where there is no network."""
        names = ("run", "method", "fields", "stages", "seed", "protocol", "held_out", "negatives", "cutoffs")
        own = [name for name, usual in (("features", ""), ("longest", LONGEST)) if getattr(self, name) != usual]
        return {name: getattr(self, name) for name in (*names, "measures", "clients_key", "first", *own)}

    @cached_property
    def ask(self) -> str:
        """A name for all that an answer depends on: asked the same again, a person answers the same."""
        asked: list[Any] = [self.do, self.described(), self.shared, self.key, self.step, self.half]
        if self.epoch is not None:  # sealed to another key, the same reports would be others to the server
            asked.append(self.epoch)
        return wire.digest(json.dumps(asked, sort_keys=True).encode())


def acting(described: Mapping[str, Any], phase: str) -> Method:
    """The method that a description names, in one of its phases; only methods that are installed here."""
    name = described["method"]
    if ":" in name or "/" in name or "." in name:
        raise HomebodyError(f"A server may name methods that come with Homebody, not '{name[:60]}'.")
    if name not in METHODS:  # nor one of another package that is installed here
        raise unknown_name("method", name[:60], METHODS)
    built = Recipe(name, "devices", fields=described["fields"], stages=described["stages"]).build()
    if not isinstance(built, Method):
        raise HomebodyError(f"{name} collects raw data: no device takes part in that.")
    found = next((one for one in built.phases if one.name == phase), None)
    method = (found.method if found else None) or built
    wire.refuse_unfit(method, proxied=True)  # whether there is one is for the device to say
    return method


def _check_name(text: str) -> None:
    """That a home can note an answer under it: what it refuses would be charged first."""
    try:
        right = one_line(text, "A name", MOST_OF_A_NAME) == text
    except HomebodyError:
        right = False
    if not right:
        raise wire.Malformed("The letter's run or release is not named as it should be.")


def _check_epoch(epoch: Mapping[str, Any], asked: str) -> None:
    digits = {"epoch": 32, "key": 64, "shared": 32}
    numbers = {"k": 2**31, "entries": 2**30, "among": 2**40, "closes": 2**40}
    right = epoch.keys() == digits.keys() | numbers.keys()
    right = right and all(
        type(epoch[name]) is str and len(epoch[name]) == count and not epoch[name].strip("0123456789abcdef")
        for name, count in digits.items()
    )
    right = right and all(type(epoch[name]) is int and 0 < epoch[name] < most for name, most in numbers.items())
    if not right:
        raise wire.Malformed("The letter's epoch is not as it should be.")
    if epoch["shared"] != asked:
        raise wire.Malformed("The letter's epoch is about another letter.")

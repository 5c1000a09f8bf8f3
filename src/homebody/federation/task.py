"""What a letter asks of a device: the server writes it, the device reads and checks it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from types import GenericAlias
from typing import Any, get_origin, get_type_hints

import torch

from homebody.core import Cohort, Method, Tree
from homebody.errors import HomebodyError
from homebody.evaluation.metrics import METRICS
from homebody.federation import LONGEST, MOST_INTERACTIONS, wire
from homebody.federation.epoch import BadEpoch, Epoch
from homebody.federation.secure_sum.helped import HelpedTerms, HelperEpoch
from homebody.federation.secure_sum.messages import EXCHANGES, Exchange, Terms
from homebody.federation.service.text import one_line
from homebody.methods import METHODS, build
from homebody.methods.packages import PackagedMethod, packaged
from homebody.privacy import Channel, Charge
from homebody.rng import Rng

__all__ = [
    "DO",
    "SumTask",
    "Task",
    "acting",
    "asks",
    "json_kinds",
    "measurements",
    "measuring",
    "metric_names",
    "telemetry",
]

MOST_ITEMS = 2**31
"""No row has a number on the wire that is as large."""
MOST_OF_A_FIELD = 1_000_000
"""A method's sizes: a server must not make a device run out of memory."""
DO = ("hello", "train", "evaluate", "adapt")
MOST_OF_A_NAME = 900
"""Characters: a home keeps a thousand, and telemetry has a longer name than its round."""
MOST_NEGATIVES = 100_000
MOST_CUTOFFS = 100
MOST_STAGES = 16
LONGEST_CODE = 300
_NOT_COMMON = frozenset({"first", "people", "epoch", "keep", "sum"})
"""Fields of a letter that are for one device only, or not about the work."""


@dataclass(frozen=True)
class SumTask:
    """One exchange of a secure sum; the question itself is a part of the letter. Of a sum that a helper opens there is
    one: a device sends its vector, masked.

    >>> asked = SumTask(Terms("run", "train/1", parties=4, entries=2, width=2), "keys")
    >>> SumTask.read(asked.to_json()) == asked
    True
    >>> terms = HelpedTerms("run", "train/1", parties=4, entries=2, width=2)
    >>> asked = SumTask.helped(HelperEpoch(bytes(16), bytes(32), terms, closes=2e9))
    >>> SumTask.read(asked.to_json()) == asked
    True
    """

    terms: Terms | HelpedTerms
    exchange: Exchange
    roster: str = ""
    """The digest of the server's roster of devices; empty: it has none."""
    helper: HelperEpoch | None = None
    """The helper's epoch, whose key a device seals its seed to."""

    @classmethod
    def helped(cls, epoch: HelperEpoch) -> SumTask:
        """What is asked in a sum that a helper opens."""
        return cls(epoch.terms, "masked", helper=epoch)

    @property
    def digest(self) -> bytes:
        """Stands for the attempt, whatever the exchange."""
        return (self.helper or self.terms).digest

    @property
    def last(self) -> bool:
        """Whether nothing more is asked in this attempt."""
        return self.helper is not None or self.exchange == EXCHANGES[-1]

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> SumTask:
        """What a letter says of a secure sum, with a helper or without."""
        try:
            if {*said} == {"helper"}:
                return cls.helped(HelperEpoch.read(said["helper"]))
            if {*said} - {"roster"} != {"terms", "exchange"} or said["exchange"] not in EXCHANGES:
                raise ValueError("other names")
            if not re.fullmatch("[0-9a-f]{32}|", said.get("roster", "")):
                raise ValueError("no digest")
            return cls(Terms.decode(bytes.fromhex(said["terms"])), said["exchange"], said.get("roster", ""))
        except (ValueError, TypeError, HomebodyError) as error:
            raise wire.Malformed("The letter's description of a secure sum is not as it should be.") from error

    def to_json(self) -> dict[str, Any]:
        """The inverse of `read`."""
        if self.helper is not None:
            return {"helper": self.helper.to_json()}
        named = {"roster": self.roster} if self.roster else {}
        return {"terms": self.terms.encode().hex(), "exchange": self.exchange, **named}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One letter. A server is believed in what is to be computed, and in nothing that could harm the device. Fields
    stand in the order of a letter's header."""

    do: str
    release: str
    """The round, as the ledger names it."""
    step: int
    key: int
    clients_key: int
    keep: int | None
    """The round that devices may have to return to."""
    n_items: int
    half: bool
    """Whether floats travel in 16 bits."""
    largest: float | None = None
    """The largest number that the server accepts in an update; devices do not use it."""
    run: str
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
    longest: int = LONGEST
    """How many interactions of a person count, the latest ones: the device's estimate of the work relies on it."""
    features: str = ""
    """The digest of the feature schema; empty: the method uses no features."""
    code: str = ""
    """The package, version and fingerprint of a method that does not come with Homebody (`PackagedMethod.code`)."""
    epoch: Epoch | None = None
    """The epoch whose key reports are sealed to, if they go through a proxy."""
    sum: SumTask | None = None
    """The exchange of a secure sum that it asks for, if devices add up between them."""
    first: int = 0
    """The number of this device's first person, and its own in a secure sum."""
    people: list[int] = field(default_factory=list)
    shared: str = ""
    """The digest of the shared parameters."""
    allowed: Collection[str] = field(default=(), compare=False)
    """The methods of packages that this device allows; no letter holds them."""

    @classmethod
    def read(cls, header: Mapping[str, Any], allowed: Collection[str] = ()) -> Task:
        """The task of a letter's header, with every field checked; unknown names are ignored.

        allowed: the methods that may run here beside those of Homebody, if they are installed.
        """
        values: dict[str, Any] = {}
        for name, (kind, required) in _KINDS.items():
            if name not in header and not required:
                continue
            values[name] = value = header.get(name)
            # bool is an int, and must not pass for one.
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise wire.Malformed(f"The letter's '{name}' is {'missing or ' if required else ''}of another kind.")
        if (said := values.get("epoch")) is not None:
            try:
                values["epoch"] = epoch = Epoch.read(said)
            except BadEpoch as error:
                raise wire.Malformed("The letter's epoch is not as it should be.") from error
            if epoch.to_json() != said or type(epoch.closes) is not int:
                raise wire.Malformed("The letter's epoch is not as it should be.")
            if epoch.asks != asks(header):
                raise wire.Malformed("The letter's epoch is about another letter.")
        if (said := values.get("sum")) is not None:
            values["sum"] = SumTask.read(said)
        task = cls(**values, allowed=allowed)
        task._check()
        return task

    def _check(self) -> None:
        """Refuse values that no server of ours writes, or that could harm a device."""
        numbers = [*self.people, *self.cutoffs, self.step, self.n_items, self.first]
        numbers += [] if self.keep is None else [self.keep]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise wire.Malformed("The letter has counts that are not whole numbers from 0.")
        sizes = all(
            (
                all(-(2**63) <= word < 2**63 for word in (self.key, self.clients_key, self.seed)),
                1 <= self.negatives <= MOST_NEGATIVES,
                self.n_items < MOST_ITEMS,
                type(self.longest) is int and 1 <= self.longest <= MOST_INTERACTIONS,
                not any(type(value) is int and abs(value) > MOST_OF_A_FIELD for value in self.fields.values()),
            )
        )
        if not sizes:
            raise wire.Malformed("The letter has numbers that are too large.")
        for name in (self.run, self.release) if self.do != "hello" else (self.run,):  # a greeting is of no round
            _check_name(name)
        right = all(type(stage) is str for stage in self.stages) and len(self.stages) <= MOST_STAGES
        if not right or len(self.cutoffs) > MOST_CUTOFFS or len(self.code) > LONGEST_CODE:
            raise wire.Malformed("The letter's stages or cut-offs are not as they should be.")
        if self.do not in DO:
            raise wire.Malformed("The letter asks for something that this client does not know: update it.")
        if self.sum is not None and (self.sum.terms.run, self.sum.terms.attempt.partition("#")[0]) != (
            self.run,
            self.counted.partition("#")[0],
        ):
            raise wire.Malformed("The letter's secure sum is of another round.")

    def header(self) -> dict[str, Any]:
        """The inverse of `read`."""
        left_out = {
            "largest": self.largest is None,
            "features": not self.features,
            "epoch": self.epoch is None,
            "sum": self.sum is None,
            "code": not self.code,
            "allowed": True,
            **dict.fromkeys(("first", "people", "shared"), not self.shared),  # a greeting is to everyone
        }
        values = {spec.name: getattr(self, spec.name) for spec in fields(self) if not left_out.get(spec.name)}
        described = {"epoch": self.epoch, "sum": self.sum}
        return values | {name: value.to_json() for name, value in described.items() if value is not None}

    @property
    def kind(self) -> str:
        """Flower's message type for this task."""
        return self.do if self.do in ("train", "evaluate") else f"query.{self.do}"

    @property
    def counted(self) -> str:
        """The release that a person's ledger and outbox name: what is measured is a release of its own."""
        return self.release if self.do == "train" else f"{self.release}/telemetry"

    @property
    def phase(self) -> str:
        """Which stage of the training it belongs to."""
        return self.release.rpartition("/")[0]

    @cached_property
    def acting(self) -> Method:
        """The method of this letter's phase, by this device's own code."""
        return acting(self.described(), self.phase, self.allowed)

    def described(self) -> dict[str, Any]:
        """The fields that say how to compute. They are stored with the model, to rank without a network."""
        names = ("run", "method", "fields", "stages", "seed", "protocol", "held_out", "negatives", "cutoffs")
        usual = {"features": "", "longest": LONGEST, "code": ""}
        unusual = [name for name, value in usual.items() if getattr(self, name) != value]
        return {name: getattr(self, name) for name in (*names, "measures", "clients_key", "first", *unusual)}

    @cached_property
    def ask(self) -> str:
        """A name for all that an answer depends on: asked the same again, a person answers the same."""
        asked: list[Any] = [self.do, self.described(), self.shared, self.key, self.step, self.half]
        if self.epoch is not None:  # sealed to another key, the same reports would be others to the server
            asked.append(self.epoch.to_json())
        if self.sum is not None:  # another attempt gets other noise: the same in two sums would cancel out
            asked.append(self.sum.digest.hex())
        return wire.digest(json.dumps(asked, sort_keys=True).encode())


def json_kinds(owner: type) -> dict[str, Any]:
    """The type of each field of a dataclass, as JSON has it."""
    hints = get_type_hints(owner)
    return {name: get_origin(hint) if isinstance(hint, GenericAlias) else hint for name, hint in hints.items()}


def _kinds() -> dict[str, tuple[Any, bool]]:
    """The type of each field in a header, as JSON has it, and whether it must be there."""
    kinds = {**json_kinds(Task), "epoch": dict | None, "sum": dict | None}
    del kinds["largest"], kinds["allowed"]  # devices do not use the one, and letters do not hold the other
    given = {spec.name for spec in fields(Task) if spec.default is MISSING and spec.default_factory is MISSING}
    return {name: (kind, name in given) for name, kind in kinds.items()}


_KINDS = _kinds()


def asks(header: Mapping[str, Any]) -> str:
    """A digest of all that a letter asks, whomever it is written to: every device must be asked the same.

    Names that are not known here count too: a newer server may ask more by them.

    >>> asks({"do": "train", "first": 0}) == asks({"first": 7, "do": "train"})
    True
    """
    common = {name: value for name, value in header.items() if name not in _NOT_COMMON}
    return wire.digest(json.dumps(common, sort_keys=True).encode())


def acting(described: Mapping[str, Any], phase: str, allowed: Collection[str] = ()) -> Method:
    """The method that a description names, in one of its phases: one that comes with Homebody, or one of an installed
    package that is allowed here.

    Word vectors come with the shared parameters: a device fetches none, and reads no file that a server names.
    """
    name = described["method"]
    if ":" in name or "/" in name or "." in name:
        raise HomebodyError(f"A server may name methods that come with Homebody, or with a package, not '{name[:60]}'.")
    if name not in METHODS:
        _refuse_foreign(name[:60], described.get("code", ""), allowed)
    built = build(name, described["fields"], described["stages"])
    if hasattr(built, "words"):
        built = replace(built, words="random")  # type: ignore[type-var]
    if not isinstance(built, Method):
        raise HomebodyError(f"{name} collects raw data: no device takes part in that.")
    current = next((each for each in built.phases if each.name == phase), None)
    method = (current.method if current else None) or built
    wire.refuse_unfit(method, proxied=True, helped=True)  # whether there is one is for the device to say
    return method


def _refuse_foreign(name: str, code: str, allowed: Collection[str]) -> None:
    """Refuse a method of a package unless it is allowed and installed here, with the code that the server has. Its
    package is imported by none of this."""
    theirs = PackagedMethod.of_code(name, code) if code else None
    brings = f" {theirs.package} {theirs.version}" if theirs else ""
    if name not in allowed:
        raise HomebodyError(
            f"There is no method '{name}' in this device's Homebody, and it allows none of that name: install the "
            f"package{brings} that brings it, and give homebody client methods DIR --allow {name}."
        )
    here = packaged(name)
    if here is None:
        raise HomebodyError(f"This device allows the method '{name}', but its package{brings} is not installed here.")
    if theirs is not None and theirs.fingerprint != here.fingerprint:
        raise HomebodyError(
            f"The server has the method '{name}' of {theirs}, and this device that of {here}: install the same package."
        )


def _check_name(text: str) -> None:
    """That a home can note an answer under it: what it refuses would be charged first."""
    try:
        right = one_line(text, "A name", MOST_OF_A_NAME) == text
    except HomebodyError:
        right = False
    if not right:
        raise wire.Malformed("The letter's run or release is not named as it should be.")


def metric_names(cutoffs: Sequence[int]) -> list[str]:
    """What devices measure, in the order that they send it."""
    at = [*(f"{name}@{k}" for name in METRICS for k in cutoffs), "auc"]
    return [f"{held}{kind}{name}" for held in ("", "valid/") for kind in ("", "full/") for name in at]


def measurements(metrics: Mapping[str, float], cutoffs: Sequence[int]) -> Tree:
    """One person's metrics as an update, before the channel; zeros where nothing could be measured."""
    values = torch.tensor([metrics.get(name, 0.0) for name in metric_names(cutoffs)], dtype=torch.float32)
    return {"metrics": values, "asked": torch.tensor([1.0 if metrics else 0.0])}


def measuring(channel: Channel, cohort: Cohort) -> list[Charge]:
    """The privacy charges of devices' metrics, for each observer. A person's other views see nothing of it."""
    return [charge for charge in channel.charges(cohort) if charge.observer != "views"]


def telemetry(method: Method, cutoffs: Sequence[int]) -> dict[str, wire.Expected]:
    """The shapes of a person's measurements after the method's channel; refused where they cannot pass it."""
    try:
        return wire.shapes(method.uplink.device(measurements({}, cutoffs), Rng.of(0)))
    except HomebodyError as error:
        raise HomebodyError(
            f"Devices cannot send their metrics through these stages: {error} Or turn evaluation off."
        ) from error

"""What a release tells whom: the vocabulary of the ledger.

Events are data. Each says how much noise stands against how much influence, under which change of the data, and
by which draw of participants. None says ε: the accountant derives it. The vocabulary fails closed: what cannot be
read back is `NonPrivate`, ε = ∞.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from homebody.errors import HomebodyError, several

__all__ = [
    "OBSERVERS",
    "Charge",
    "Event",
    "GaussianRelease",
    "HelpedRelease",
    "LaplaceRelease",
    "NonPrivate",
    "Observer",
    "PureRelease",
    "Relation",
    "Reports",
    "Sampling",
    "ShuffledReports",
    "SkellamRelease",
    "Unit",
    "event_as_json",
    "event_from_json",
]

Observer = Literal["server", "clients", "views", "public"]
OBSERVERS: tuple[Observer, ...] = ("server", "clients", "public")
"""Those whom every federated run has: the server; the other clients, who receive the shared parameters; the public,
who sees the final model. Where a device holds several views of a person, each is an observer of the others."""

Unit = Literal["report", "interaction", "user"]
"""What ε protects: one report, one interaction, or one person with everything they did."""

Relation = Literal["add-remove", "replace-one"]
"""Which two data sets ε compares: one has the unit and the other has not, or it is another one in each."""


def _check(right: bool, sentence: str) -> None:
    if not right:
        raise HomebodyError(sentence)


@dataclass(frozen=True)
class Sampling:
    """How a round's participants were drawn, as far as the observer does not learn it.

    An observer who learns who took part gets `Sampling()`, whatever was drawn: the server that picks the cohort
    always does.

    >>> Sampling("fixed", cohort=30, population=4800).rate
    0.00625
    """

    kind: Literal["none", "poisson", "fixed"] = "none"
    """Everyone, or known to the observer; each alone with probability `rate`; or exactly `cohort` of `population`,
    without replacement."""
    cohort: int = 1
    population: int = 1

    def __post_init__(self) -> None:
        _check(
            self.kind in ("none", "poisson", "fixed"), f"There is no sampling '{self.kind}': none, poisson or fixed."
        )
        whole = type(self.cohort) is int and type(self.population) is int
        _check(whole, f"A cohort and a population are whole numbers, not {self.cohort!r} of {self.population!r}.")
        _check(self.cohort >= 1, f"A cohort has at least 1 member, not {self.cohort}.")
        _check(
            self.cohort <= self.population,
            f"A cohort of {self.cohort} cannot be drawn from a population of {self.population}.",
        )
        if self.kind == "none":
            _check((self.cohort, self.population) == (1, 1), "Without sampling there is no cohort to state.")

    @property
    def rate(self) -> float:
        """The probability that one of the population takes part."""
        return self.cohort / self.population

    @property
    def amplifies(self) -> bool:
        return self.kind != "none" and self.cohort < self.population

    def __str__(self) -> str:
        if self.kind == "none":
            return "no sampling"
        how = "drawn without replacement" if self.kind == "fixed" else "expected, each drawn on their own"
        return f"{self.cohort:,} of {self.population:,} {how}"


@dataclass(frozen=True)
class _NoisyRelease:
    """One release of a bounded quantity with noise.

    A sum of vectors of norm at most S changes by S when one is added or removed, and by 2S when one is replaced.
    """

    multiplier: float
    """The noise's scale over the sensitivity **under this relation**."""
    relation: Relation
    sampling: Sampling = Sampling()

    _noise: ClassVar[str]

    def __post_init__(self) -> None:
        _number(self, "multiplier", "A noise multiplier")
        _check_relation(self.relation, self.sampling)

    def __str__(self) -> str:
        return f"{self._noise.format(self.multiplier)} sensitivity ({self.relation}); {self.sampling}"


@dataclass(frozen=True)
class GaussianRelease(_NoisyRelease):
    """One release with Gaussian noise, its standard deviation measured against the ℓ2 sensitivity."""

    kind: Literal["gaussian"] = "gaussian"
    _noise = "Gaussian noise, {:g} × the ℓ2"


@dataclass(frozen=True)
class HelpedRelease(_NoisyRelease):
    """The same, as the server sees it where a helper adds the noise: it holds while the two do not collude."""

    kind: Literal["helped-gaussian"] = "helped-gaussian"
    _noise = "Gaussian noise that a helper adds, {:g} × the ℓ2"


@dataclass(frozen=True)
class LaplaceRelease(_NoisyRelease):
    """One release with Laplace noise in each coordinate, its scale measured against the ℓ1 sensitivity."""

    kind: Literal["laplace"] = "laplace"
    _noise = "Laplace noise, {:g} × the ℓ1"


@dataclass(frozen=True)
class SkellamRelease:
    """One release of whole numbers with Skellam noise, its standard deviation measured against the ℓ2 sensitivity.

    The parties of a secure sum add it between them. Under add-remove the neighbour's message is zero: who took part is
    public, so a cohort that is drawn goes with replace-one.
    """

    multiplier: float
    """The noise's standard deviation over the sensitivity **under this relation**."""
    steps: int
    """The ℓ2 sensitivity in whole numbers, or less: the noise is like Gaussian noise the more there are."""
    entries: int = 0
    """How many numbers there are at most; 0: any number."""
    relation: Relation = "replace-one"
    sampling: Sampling = Sampling()
    kind: Literal["skellam"] = "skellam"

    def __post_init__(self) -> None:
        _number(self, "multiplier", "A noise multiplier")
        _check_count(self.steps, "steps")
        right = type(self.entries) is int and self.entries >= 0
        _check(right, f"The number of entries must be a whole number, 0 for any, not {self.entries!r}.")
        _check_relation(self.relation, self.sampling)

    def __str__(self) -> str:
        among = f" in {self.entries:,} entries" if self.entries else ""
        return (
            f"Skellam noise, {self.multiplier:g} × the ℓ2 sensitivity of {self.steps:,} steps{among} "
            f"({self.relation}); {self.sampling}"
        )


@dataclass(frozen=True)
class PureRelease:
    """One release of a mechanism known to be (ε, δ)-DP under this relation, when nobody is sampled."""

    epsilon: float
    delta: float = 0.0
    relation: Relation = "replace-one"
    sampling: Sampling = Sampling()
    kind: Literal["pure"] = "pure"

    def __post_init__(self) -> None:
        _number(self, "epsilon", "ε")
        _number(self, "delta", "δ", zero=True)
        _check(self.delta < 1, f"δ must be under 1, not {self.delta}.")
        _check_relation(self.relation, self.sampling)

    def __str__(self) -> str:
        known = f"ε = {self.epsilon:g}" + (f", δ = {self.delta:g}" if self.delta else "")
        return f"a mechanism of {known} ({self.relation}); {self.sampling}"


@dataclass(frozen=True)
class Reports:
    """What one device sends in one round: `count` reports, each randomised on the device with ε.

    They are about the same unit, so they compose. A report hides what it says, not that it was sent: the relation
    is replace-one.
    """

    epsilon: float
    count: int = 1
    sampling: Sampling = Sampling()
    kind: Literal["reports"] = "reports"
    relation: ClassVar[Relation] = "replace-one"

    def __post_init__(self) -> None:
        _number(self, "epsilon", "ε of a report")
        _check_count(self.count, "reports")

    def __str__(self) -> str:
        sent, each = several(self.count, "locally randomised report"), "" if self.count == 1 else " each"
        return f"{sent} of ε = {self.epsilon:g}{each}; {self.sampling}"


@dataclass(frozen=True)
class ShuffledReports:
    """The same reports, seen only after a shuffle among `users` people.

    Each of a device's `count` reports counts as shuffled with one report of each of the others; one large shuffle
    is computed from `count` such shuffles, so it tells no more. It holds behind a proxy that does not collude with
    the observer, and only if at least `users` people reported honestly.
    """

    epsilon: float
    count: int
    users: int
    kind: Literal["shuffled-reports"] = "shuffled-reports"
    relation: ClassVar[Relation] = "replace-one"
    sampling: ClassVar[Sampling] = Sampling()

    def __post_init__(self) -> None:
        _number(self, "epsilon", "ε of a report")
        _check_count(self.count, "reports")
        _check_count(self.users, "shuffled users")

    def __str__(self) -> str:
        sent, each = several(self.count, "report"), "" if self.count == 1 else " each"
        return f"{sent} of ε = {self.epsilon:g}{each}, shuffled among {several(self.users, 'person', 'people')}"


@dataclass(frozen=True)
class NonPrivate:
    """A release with no bound on what it tells: ε = ∞."""

    reason: str
    kind: Literal["not-private"] = "not-private"
    relation: ClassVar[Relation] = "replace-one"
    sampling: ClassVar[Sampling] = Sampling()

    def __str__(self) -> str:
        return f"not private: {self.reason}"


Event = (
    GaussianRelease
    | HelpedRelease
    | LaplaceRelease
    | SkellamRelease
    | PureRelease
    | Reports
    | ShuffledReports
    | NonPrivate
)
_KINDS: dict[str, type[Event]] = {event.kind: event for event in get_args(Event)}


@dataclass(frozen=True)
class Charge:
    """One event, as one observer sees it, about one unit.

    >>> Charge("public", "user", GaussianRelease(4, "replace-one"))
    <Charge to public, about one user: Gaussian noise, 4 × the ℓ2 sensitivity (replace-one); no sampling>
    """

    observer: Observer
    unit: Unit
    event: Event
    part: str = ""
    """Which part of the release, where it has several."""

    def __post_init__(self) -> None:
        for name, value, known in (("observer", self.observer, Observer), ("unit", self.unit, Unit)):
            _check(value in get_args(known), f"There is no {name} '{value}': {', '.join(get_args(known))}.")

    def __repr__(self) -> str:
        part = f", {self.part}" if self.part else ""
        return f"<Charge to {self.observer}, about one {self.unit}{part}: {self.event}>"

    def as_json(self) -> str:
        """The event, as the ledger keeps it."""
        return event_as_json(self.event)


def event_as_json(event: Event) -> str:
    """An event as text. Numbers are exact: they read back bit by bit.

    >>> print(event_as_json(Reports(2.5, 100)))  # doctest: +ELLIPSIS
    {"count": 100, "epsilon": 2.5, "kind": "reports", "sampling": {...}}
    """
    return json.dumps(asdict(event), sort_keys=True, allow_nan=False)


def event_from_json(text: str) -> Event:
    """An event from its text. One that is not understood to the last field is not private.

    >>> event_from_json('{"kind": "magic", "epsilon": 0.1}')
    NonPrivate(reason="the event cannot be read: its kind is 'magic'", kind='not-private')
    """
    try:
        record = json.loads(text)
        kind = record.get("kind")
        if kind not in _KINDS:
            raise HomebodyError(f"its kind is {kind!r}")
        return _from_fields(_KINDS[kind], record)
    except (HomebodyError, ValueError, TypeError, AttributeError) as error:
        return NonPrivate(f"the event cannot be read: {error}")


def _from_fields(kind: type[Any], record: dict[str, Any]) -> Any:
    expected = {spec.name for spec in fields(kind)}
    if set(record) != expected:
        raise HomebodyError(f"its fields are {sorted(record)}, not {sorted(expected)}")
    values = dict(record)
    if "sampling" in values:
        values["sampling"] = _from_fields(Sampling, values["sampling"])
    if not isinstance(values.get("reason", ""), str):
        raise HomebodyError("its reason is no text")
    return kind(**values)


def _number(event: Any, field: str, name: str, *, zero: bool = False) -> None:
    """Refuse what is no finite positive number; keep it as a float, so that its text is always the same."""
    value = getattr(event, field)
    right = type(value) in (int, float) and math.isfinite(value) and (value > 0 or (zero and value == 0))
    _check(right, f"{name} must be a {'number of at least' if zero else 'finite number above'} 0, not {value!r}.")
    object.__setattr__(event, field, float(value))


def _check_count(value: int, what: str) -> None:
    _check(type(value) is int and value >= 1, f"The number of {what} must be a whole number from 1, not {value!r}.")


def _check_relation(relation: Relation, sampling: Sampling) -> None:
    known = get_args(Relation)
    _check(relation in known, f"There is no relation '{relation}': {', '.join(known)}.")
    # Take one person away, and another takes their place in a cohort of fixed size: the sum moves by the sensitivity
    # of a replacement, and the noise was stated against that of a removal.
    _check(
        not (sampling.kind == "fixed" and relation == "add-remove"),
        "A cohort of fixed size is accounted under replace-one, where the population keeps its size: state the noise "
        "against the replace-one sensitivity, or sample each person on their own (poisson).",
    )

"""Where the vocabulary of a feature, or the scale of its numbers, comes from.

A model has a row for each value of a feature. Values that are read off the people who train change the model's shape
with a single person, which no noise on updates hides. What people are described by is therefore declared (`Code`:
listed, hashed, or bounded), or counted with noise and charged (`Counted`), or taken as found, which ε leaves out
(`Found`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from homebody.data.codes import LARGEST, Code, Scale
from homebody.data.population import Features, Kind, Population
from homebody.errors import HomebodyError, refuse_unknown
from homebody.rng import Rng

__all__ = ["ALL", "FORMS", "Counted", "Declaration", "Found", "Words", "declare", "found_in", "kinds_of", "parse"]

ALL = "*"
"""The name that stands for every feature of people and circumstances that is not named."""
FORMS = (
    "found, VALUE,VALUE, file:PATH, hash:SIZE or private:EPSILON (with many: or text: before it where one person has "
    "several), number:MEAN:SPREAD or range:LOW:HIGH, or words:COUNT for a text of items"
)
DELTA = 1e-9
"""The δ of a private vocabulary, unless one is given."""
LONGEST = 4096
"""The most words of a sequence."""
LOOSEST = 15.0
"""The largest ε of a private vocabulary."""
INEXACT = 2.0**-40
"""The part of δ for probabilities of noise that are off by 2⁻⁵²: of two counts, at most e^(15 / 2) < 2¹¹ times over."""
SHAPES: dict[str, tuple[Literal["one", "many"], Kind]] = {
    "one": ("one", "categorical"),
    "many": ("many", "multi-hot"),
    "text": ("many", "text"),
}
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """As those who train have it: nothing is charged, and ε leaves it out."""


@dataclass(frozen=True)
class Counted:
    """Values that enough people have, by counts with noise: (ε, δ)-differentially private under replace-one.

    Each person contributes one value. A count gets discrete Laplace noise of scale 2/ε, since replacing a person
    changes two counts by one. Values that nobody has get no count, so those that one person alone has must stay
    below the threshold but with probability δ.

    >>> Counted(1.0).threshold
    42
    >>> Counted(1.0).least
    66
    """

    epsilon: float
    delta: float = DELTA
    kind: Literal["one", "many"] = "one"
    text: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.epsilon <= LOOSEST and 10 * INEXACT <= self.delta < 1):
            raise HomebodyError(
                f"A private vocabulary needs ε above 0 and at most {LOOSEST:g}, and δ from {10 * INEXACT:.0e} to under "
                f"1, not {self.epsilon:g} and {self.delta:g}."
            )

    @property
    def scale(self) -> float:
        """Of the noise, in people."""
        return 2.0 / self.epsilon

    @property
    def threshold(self) -> int:
        """The noisy count from which on a value is kept: 1 person reaches it with a probability of at most δ.

        P(X ≥ k) = e^(-k/b) / (1 + e^(-1/b)) for discrete Laplace noise of scale b and k ≥ 1.
        """
        above = -self.scale * (math.log(self.delta - INEXACT) + math.log1p(math.exp(-1 / self.scale)))
        return 1 + max(1, math.ceil(above))

    @property
    def least(self) -> int:
        """So many people have a value that is kept with a probability of at least 1 - 1e-5, for a sentence."""
        return self.threshold + math.ceil(self.scale * math.log(1e5))

    def kept(self, people: Longs, values: Longs, count: int, rng: Rng) -> npt.NDArray[np.bool_]:
        """Which of `count` values are kept, given pairs of a person and a value of theirs.

        Who has several contributes one, drawn at random. Other data, or another ε, draw from another stream: the noise
        of two such counts must not cancel out.
        """
        about = hashlib.blake2b(people.tobytes() + values.tobytes(), digest_size=16).hexdigest()
        rng = rng.fold(f"{self.epsilon!r} {self.delta!r} {about}")
        order = np.argsort(rng.fold("one of each").bits(len(people)).numpy(), kind="stable")
        _, first = np.unique(people[order], return_index=True)
        counts = np.bincount(values[order][first], minlength=count)
        noise = discrete_laplace(self.scale, count, rng.fold("noise"))
        # A value that nobody contributed is no candidate: choosing it would reveal that somebody has it.
        return np.asarray((counts > 0) & (counts + noise >= self.threshold))


@dataclass(frozen=True)
class Words:
    """The first words of a text of items, in their order.

    All items' texts are public, those that nobody met in training too, so their words are the vocabulary.
    """

    count: int = 30

    def __post_init__(self) -> None:
        if not 1 <= self.count <= LONGEST:
            raise HomebodyError(f"A sequence has 1 to {LONGEST:,} words of a text, not {self.count}.")


Declaration = Code | Counted | Found | Words


def discrete_laplace(scale: float, count: int, rng: Rng) -> Longs:
    """Integers k with probability proportional to e^(-|k| / scale): differences of two geometric variables.

    They are made of doubles of 53 bits, so that a probability is off by 2⁻⁵² at most (`INEXACT`). No digit of a double
    is released: only whether a whole number reaches a threshold.
    """
    uniform = ((rng.bits(2, count).numpy().view(np.uint64) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    geometric = np.floor(-scale * np.log(uniform)).astype(np.int64)
    return np.asarray(geometric[0] - geometric[1])


def parse(name: str, text: str) -> Declaration:
    """What is said of one feature.

    >>> parse("job", "cook, vet").values, parse("town", "hash:64").size, parse("hobbies", "many:chess,golf").kind
    (('cook', 'vet'), 65, 'many')
    >>> parse("height", "number:170:10").of("height", "180")[0].tolist()
    1.0
    >>> parse("town", "private:0.5"), parse("town", "found"), parse("title", "words:30")
    (Counted(epsilon=0.5, delta=1e-09, kind='one', text=False), Found(), Words(count=30))
    """
    said = text.strip()
    if said == "found":
        return Found()
    form, _, rest = said.partition(":")
    shape = "one"
    if form in SHAPES:
        shape = form
        form, _, rest = (said := rest.strip()).partition(":")
    kind, _ = SHAPES[shape]
    numbers = _numbers(rest)
    if form in ("number", "range") and shape == "one" and len(numbers) == 2:
        first, second = numbers
        if form == "number" and second > 0:
            return Code("number", scale=Scale(1.0, first, second))
        if form == "range" and first < second:
            return Code("number", scale=Scale.within(first, second))
    elif form == "hash" and rest.strip().isdecimal() and 1 <= int(rest) <= LARGEST:
        return Code(kind, text=shape == "text", buckets=int(rest))
    elif form == "private" and len(numbers) in (1, 2):
        failing = numbers[1] if len(numbers) == 2 else DELTA
        return Counted(numbers[0], failing, kind, text=shape == "text")
    elif form == "words" and shape == "one" and rest.strip().isdecimal():
        return Words(int(rest))
    elif form not in ("number", "range", "hash", "private", "words"):
        values = _listed(Path(rest)) if form == "file" else [part.strip() for part in said.split(",")]
        if values and all(values):
            return Code(kind, tuple(dict.fromkeys(values)), shape == "text")
    raise HomebodyError(f"The vocabulary of '{name}' is {FORMS}, not '{text}'.")


def kinds_of(vocabularies: Mapping[str, str], kinds: Mapping[str, str]) -> dict[str, str]:
    """The kinds of columns that their declarations say, beside those given: then no value in the data decides it."""
    said = {}
    for name, text in vocabularies.items():
        vocabulary = parse(name, text)
        if isinstance(vocabulary, Found) or name == ALL:
            continue
        said[name] = kind = _kind(vocabulary)
        if kinds.get(name, kind) != kind:
            raise HomebodyError(
                f"'{name}' is declared as {kinds[name]}, but its vocabulary is for {kind}: change one of them."
            )
    return {**kinds, **said}


def declare(population: Population, vocabularies: Mapping[str, str]) -> Population:
    """The population with these vocabularies in place of what it has.

    >>> import polars as pl
    >>> job = Features(pl.DataFrame({"job": ["cook"]}), {"job": "categorical"})
    >>> toy = Population("toy", np.array([0, 1]), np.array([0], dtype=np.int32), 1, user_features=job)
    >>> declare(toy, {"job": "hash:64"}).user_features.declared["job"].size
    65
    """
    if not vocabularies:
        return population
    given = {name: parse(name, text) for name, text in vocabularies.items()}
    everyone = given.pop(ALL, None)
    if everyone is not None and not isinstance(everyone, Found):
        raise HomebodyError(f"{ALL} means all features and takes only the vocabulary 'found', not {vocabularies[ALL]}.")
    users, items, contexts = population.user_features, population.item_features, population.contexts
    known = [name for table in (users, items, contexts) if table is not None for name in table.names]
    for name, vocabulary in given.items():
        if not known:
            raise HomebodyError(f"There is no feature '{name}' to declare: {population.name} has none.")
        refuse_unknown("feature", [name], known)
        if isinstance(vocabulary, Counted) and items is not None and name in items.names:
            raise HomebodyError(
                f"'{name}' describes items, but a private vocabulary counts people: choose another vocabulary for it."
            )
    return replace(
        population,
        user_features=_with(users, given, everyone),
        item_features=_with(items, given, None),
        contexts=_with(contexts, given, everyone),
    )


def found_in(features: Features | None, names: Collection[str]) -> dict[str, bool]:
    """Which of these columns are taken from those who train, and whether somebody said that they may be."""
    if features is None:
        return {}
    said = {name: features.declared.get(name) for name in features.names if name in names}
    return {name: code is not None for name, code in said.items() if code is None or isinstance(code, Found)}


def _with(features: Features | None, given: Mapping[str, Declaration], rest: Declaration | None) -> Features | None:
    if features is None:
        return None
    old = features.declared if rest is None else dict.fromkeys(features.names, rest)
    declared = {name: vocabulary for name, vocabulary in given.items() if name in features.names}
    for name, vocabulary in declared.items():
        if not isinstance(vocabulary, Found) and _kind(vocabulary) != features.kinds[name]:
            raise HomebodyError(
                f"'{name}' is {features.kinds[name]}, and its vocabulary is for {_kind(vocabulary)}: give --kind "
                f"{name}={_kind(vocabulary)}, or another vocabulary."
            )
    return replace(features, declared={**old, **declared})


def _kind(said: Code | Counted | Words) -> Kind:
    if isinstance(said, Words) or said.kind == "sequence":
        return "sequence"
    if said.kind == "number":
        return "numeric"
    return "text" if said.text else "multi-hot" if said.kind == "many" else "categorical"


def _numbers(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def _listed(path: Path) -> list[str]:
    """The values of a file, one a line; empty lines say nothing."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HomebodyError(f"The vocabulary {path} cannot be read: {error}.") from error
    return [line.strip() for line in lines if line.strip()]

"""A newcomer, who took no part in training, as a population of one, encoded as the training data is.

Also the context in which anybody asks for recommendations.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from homebody.core import Method, Newcomer
from homebody.data.codes import Numbers, encode_one
from homebody.data.partitions import everything
from homebody.data.population import Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError, several

__all__ = ["Moment", "NewcomerSplit", "moment", "newcomer_split"]


class NewcomerSplit(NamedTuple):
    """A split of one person who takes no part in training."""

    split: Split
    now: dict[str, Tensor] | None
    """The context of the request, one row; None if the method reads none or none is given."""
    notes: tuple[str, ...]


class Moment(NamedTuple):
    """The context in which somebody asks for recommendations."""

    now: dict[str, Tensor] | None
    """One row; None if the method reads no context or none is given."""
    notes: tuple[str, ...]


def moment(method: Method, training: Split, said: Mapping[str, object]) -> Moment:
    """Encode a context as in training. Raises `HomebodyError` for a name that is no context."""
    now, unheard = _around(method, training, said)
    return Moment(now, (*_unheeded(method, Newcomer((), {}, dict(said))), *unheard))


def _around(method: Method, training: Split, said: Mapping[str, object]) -> Moment:
    """The context of one person, if the method reads it, with notes on unknown values."""
    _refuse_misplaced(training, "contexts", said)
    codes, unheard = encode_one(training.encoded["contexts"].codes, said, what="circumstance")
    heard = said and "contexts" in (*method.needs, *method.uses)
    now = {name: torch.from_numpy(code[None, None]) for name, code in codes.items()} if heard else None
    return Moment(now, tuple(unheard))


def newcomer_split(method: Method, training: Split, newcomer: Newcomer) -> NewcomerSplit:
    """Encode this person as in training. Raises `HomebodyError` for an unknown item or feature."""
    items = _items(newcomer, training.n_items)
    ratings = _ratings(method, newcomer)
    known = training.encoded
    _refuse_misplaced(training, "users", newcomer.features)
    now, unheard = _around(method, training, newcomer.now)
    codes, strange = encode_one(known["users"].codes, newcomer.features, what="feature of people")
    people = known["users"].rows({name: numbers[None] for name, numbers in codes.items()})
    around = known["contexts"]
    contexts = around.rows({name: code.unknown(len(items)) for name, code in around.codes.items()})
    population = Population("newcomer", np.array([0, len(items)]), items, training.n_items, ratings=ratings)
    split = replace(
        everything(population, seed=training.seed),
        population=replace(population, item_features=training.population.item_features),  # encoders read the texts
        learn=np.zeros(1, dtype=np.bool_),
        absent=training.absent,
        numbers=np.array([training.n_users]),  # an unused number, so that they draw their own random numbers
        coded={"users": people, "items": known["items"], "contexts": contexts},
    )
    return NewcomerSplit(split, now, (*_unheeded(method, newcomer), *strange, *unheard, *split.notes))


WHOSE = {"users": "belongs to people", "items": "belongs to items", "contexts": "is a circumstance"}
"""Whom a column describes, for error messages."""


def _refuse_misplaced(training: Split, unit: str, said: Iterable[str]) -> None:
    """Refuse a name that belongs to another kind of column, exactly or nearly, and say to which."""
    known = {kind: list(encoded.codes) for kind, encoded in training.encoded.items()}
    owner = {name: kind for kind, names in known.items() for name in names}
    what, have = {"users": ("feature of people", "people have"), "contexts": ("circumstance", "circumstances are")}[
        unit
    ]
    for name in said:
        near = difflib.get_close_matches(name, owner, n=1, cutoff=0.8)
        if name in known[unit] or not near or owner[near[0]] == unit:
            continue
        it = "it" if near[0] == name else f"'{near[0]}'"
        others = f"{have} {', '.join(sorted(known[unit]))}" if known[unit] else f"this data has no {what}"
        raise HomebodyError(f"There is no {what} '{name}': {it} {WHOSE[owner[near[0]]]}, and {others}.")


def _items(newcomer: Newcomer, n_items: int) -> Numbers:
    for item in newcomer.items:
        if not 0 <= item < n_items:
            raise HomebodyError(f"There is no item {item!r}: items are numbered 0 to {n_items - 1}.")
    return np.array(newcomer.items, dtype=np.int32)


def _ratings(method: Method, newcomer: Newcomer) -> Numbers | None:
    count, ratings = len(newcomer.items), newcomer.ratings
    if ratings is None:
        if method.scoring.predicts == "ratings" and count:
            raise HomebodyError(
                f"{type(method).__name__} predicts ratings here, so it adapts to those alone: give a rating of "
                f"{'the item' if count == 1 else f'each of the {count:,} items'}."
            )
        return None
    if len(ratings) != count:
        raise HomebodyError(
            f"Each item needs a rating: {several(count, 'item was', 'items were')} given, and "
            f"{several(len(ratings), 'rating')}."
        )
    values = np.array(ratings, dtype=np.float32)
    if not np.isfinite(values).all():
        raise HomebodyError("A rating must be a finite number.")
    return values


def _unheeded(method: Method, newcomer: Newcomer) -> list[str]:
    """Values that were given but that the method does not read."""
    taken = (*method.needs, *method.uses)
    said = {
        "user features": ", ".join(newcomer.features),
        "contexts": ", ".join(newcomer.now),
        "ratings": "ratings" if newcomer.ratings is not None and method.scoring.predicts != "ratings" else "",
    }
    unheeded = [names for what, names in said.items() if names and (what not in taken or what == "ratings")]
    return [f"{type(method).__name__} does not look at {', '.join(unheeded)}."] if unheeded else []

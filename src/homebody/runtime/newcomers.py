"""Somebody whom training never met, as a population of one: what they say, in the numbers that training uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from homebody.core import Method, Newcomer
from homebody.counts import several
from homebody.data.codes import Numbers, encode_one
from homebody.data.partitions import everything
from homebody.data.population import Population
from homebody.data.splits import Split
from homebody.errors import HomebodyError

__all__ = ["Alone", "alone"]


class Alone(NamedTuple):
    """A split of one person who takes no part in training."""

    split: Split
    now: dict[str, Tensor] | None
    """The circumstances in which they ask, a row; None where the method looks at none, or nothing is said of them."""
    notes: tuple[str, ...]


def alone(method: Method, training: Split, newcomer: Newcomer) -> Alone:
    """This person as those of training would be seen; refused, in a sentence, where something is no item or feature."""
    items = _items(newcomer, training.n_items)
    ratings = _ratings(method, newcomer)
    known = training.encoded
    own, strange = encode_one(known["users"].codes, newcomer.features, what="feature of people")
    around, unheard = encode_one(known["contexts"].codes, newcomer.now, what="circumstance")
    people = known["users"].rows({name: numbers[None] for name, numbers in own.items()})
    contexts = known["contexts"].rows(
        {name: code.unknown(len(items)) for name, code in known["contexts"].codes.items()}
    )
    population = Population("newcomer", np.array([0, len(items)]), items, training.n_items, ratings=ratings)
    split = replace(
        everything(population, seed=training.seed),
        learn=np.zeros(1, dtype=np.bool_),
        absent=training.absent,
        numbers=np.array([training.n_users]),  # nobody's, so that they draw as nobody else does
        coded={"users": people, "items": known["items"], "contexts": contexts},
    )
    taken = (*method.needs, *method.uses)
    now = _rows(around) if newcomer.now and "contexts" in taken else None
    return Alone(split, now, (*_unheeded(method, newcomer), *strange, *unheard, *split.notes))


def _items(newcomer: Newcomer, n_items: int) -> Numbers:
    for item in newcomer.items:
        if not 0 <= item < n_items:
            raise HomebodyError(f"There is no item {item!r}: items are numbered 0 to {n_items - 1}.")
    return np.array(newcomer.items, dtype=np.int32)


def _ratings(method: Method, newcomer: Newcomer) -> Numbers | None:
    count, ratings = len(newcomer.items), newcomer.ratings
    if ratings is None:
        if method.predicts == "ratings" and count:
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
    found = np.array(ratings, dtype=np.float32)
    if not np.isfinite(found).all():
        raise HomebodyError("A rating must be a finite number.")
    return found


def _rows(around: Mapping[str, Numbers]) -> dict[str, Tensor]:
    """One person, asked in one moment."""
    return {name: torch.from_numpy(numbers[None, None]) for name, numbers in around.items()}


def _unheeded(method: Method, newcomer: Newcomer) -> list[str]:
    """What was said that the method does not look at."""
    taken = (*method.needs, *method.uses)
    said = {
        "user features": ", ".join(newcomer.features),
        "contexts": ", ".join(newcomer.now),
        "ratings": "ratings" if newcomer.ratings is not None and method.predicts != "ratings" else "",
    }
    unheeded = [names for what, names in said.items() if names and (what not in taken or what == "ratings")]
    return [f"{type(method).__name__} does not look at {', '.join(unheeded)}."] if unheeded else []

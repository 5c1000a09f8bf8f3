"""What a model may learn from, and what it is asked afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

from homebody.core import Catalogue
from homebody.data import split_kernels as kernels
from homebody.data.population import Population
from homebody.errors import HomebodyError, unknown_name
from homebody.reference import Histories
from homebody.rng import Rng

__all__ = ["PROTOCOLS", "Held", "Protocol", "Split", "leave_one_out"]

Protocol = Literal["strict", "isolated", "published"]
How = Literal["latest", "random"]
Held = Literal["valid", "test"]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

PROTOCOLS: dict[str, str] = {
    "strict": "training negatives are any items outside the person's training items",
    "isolated": "diagnostic: training negatives avoid the held-out items and those they are ranked against",
    "published": "as in the papers: training negatives avoid the held-out items, which flatters every score",
}
LEAST = 3
"""Fewest interactions for a user to be asked anything: one to learn from, one to validate, one to test."""


class Padded(NamedTuple):
    """Some users' training data, one row a user."""

    items: Longs
    valid: npt.NDArray[np.bool_]
    excluded: Longs


@dataclass(frozen=True, eq=False)
class Split:
    """Each user's interactions as training items, one validation item and one test item.

    >>> toy = Population("toy", np.array([0, 4]), np.array([3, 0, 2, 1], dtype=np.int32), n_items=6)
    >>> split = leave_one_out(toy, how="latest")
    >>> split.training(0).tolist(), split.valid.tolist(), split.test.tolist()
    ([3, 0], [2], [1])
    >>> split.padded(np.array([0])).excluded.tolist()
    [[0, 3, 6, 6]]
    """

    population: Population
    protocol: Protocol
    how: How
    seed: int
    negatives: int
    """How many items the held-out one is ranked against in the sampled metrics."""
    indptr: Longs
    items: Ints
    """Every user's training items, then the validation item, then the test item."""
    stop: Longs
    """Where each user's training items end."""
    ordered: Ints
    """Every user's whole history, ascending."""
    valid: Longs
    """-1 where a user is not asked."""
    test: Longs
    notes: tuple[str, ...] = ()
    _avoid: tuple[Longs, Ints] | None = field(default=None, repr=False)
    """What training negatives avoid where that is more than the history: like `indptr` and `ordered`."""

    @property
    def n_users(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_items(self) -> int:
        return self.population.n_items

    @property
    def lengths(self) -> Longs:
        """How many training items each user has."""
        return self.stop - self.indptr[:-1]

    def training(self, user: int) -> Ints:
        return self.items[self.indptr[user] : self.stop[user]]

    def histories(self) -> Histories:
        """Everyone's training items in one place: what a centralised reference collects."""
        position = np.arange(len(self.items)) - np.repeat(self.indptr[:-1], np.diff(self.indptr))
        kept = position < np.repeat(self.lengths, np.diff(self.indptr))
        everyone = np.ones(self.n_users, dtype=np.bool_)
        indptr = np.concatenate([[0], np.cumsum(self.lengths)])
        items = self.items[kept]
        avoid = (indptr, kernels.sort_segments(indptr, items)) if self.protocol == "strict" else None
        avoid = _distinct(*(avoid or self._avoid or (self.indptr, self.ordered)))
        return Histories(indptr, items, Catalogue(self.n_items), everyone, avoid)

    def asked(self) -> Longs:
        """The users that have something held out."""
        return np.flatnonzero(self.test >= 0)

    def padded(self, users: Longs, width: int | None = None) -> Padded:
        """These users' training items and what their negatives avoid, padded to a common width."""
        width = int(self.lengths[users].max(initial=0)) if width is None else width
        items = np.empty((len(users), width), dtype=np.int64)
        valid = np.empty((len(users), width), dtype=np.bool_)
        kernels.pad_items(users, self.indptr[:-1], self.stop, self.items, items, valid)
        spare = (self.valid, self.test) if self.protocol == "strict" else ()
        return Padded(items, valid, self._outside(users, *spare, avoid=self._avoid))

    def seen(self, users: Longs, held: Held) -> Longs:
        """What these users' full ranking leaves out; padded with the size of the catalogue.

        For test, training and validation items; for validation, training items alone.
        """
        return self._outside(users, self.test, *((self.valid,) if held == "valid" else ()))

    def candidates(self, users: Longs, held: Held) -> Longs:
        """The items each user's held-out one is ranked against in the sampled metrics; -1 where too few.

        Never an item of the user's own; only the strict protocol lets validation meet the test item, as a
        device that does not know the future would.
        """
        spare = (self.test,) if held == "valid" and self.protocol == "strict" else ()
        excluded = self._outside(users, *spare)
        keys = Rng.of(self.seed, "candidates", held).fold(torch.from_numpy(users)).key.numpy()
        out = np.empty((len(users), self.negatives), dtype=np.int64)
        kernels.candidates(keys, excluded, self.n_items, out)
        return out

    def _outside(self, users: Longs, *spare: Longs, avoid: tuple[Longs, Ints] | None = None) -> Longs:
        """The users' sorted histories less the spared items."""
        indptr, ordered = avoid or (self.indptr, self.ordered)
        nothing = np.full(len(users), -1, dtype=np.int64)
        spare_a, spare_b = [array[users] for array in spare] + [nothing] * (2 - len(spare))
        width = int((indptr[users + 1] - indptr[users]).max(initial=0))
        out = np.empty((len(users), width), dtype=np.int64)
        kernels.pad_excluded(users, indptr, ordered, spare_a, spare_b, self.n_items, out)
        return out


def leave_one_out(
    population: Population,
    *,
    protocol: str = "strict",
    how: str | None = None,
    seed: int = 0,
    negatives: int = 99,
) -> Split:
    """Hold out each user's latest interaction (or a random one) for test, the one before for validation.

    Ties in time are broken by file order. Without times the default is random.
    """
    by: Protocol = _known("protocol", protocol, Protocol)
    way: How = _known("way to hold out", how or ("random" if population.times is None else "latest"), How)
    if negatives < 1:
        raise HomebodyError(f"The sampled metrics need at least 1 negative, not {negatives}.")
    indptr, items = population.indptr, population.items
    ordered = kernels.sort_segments(indptr, items)
    notes = []
    repeats = int(kernels.count_repeats(indptr, ordered).sum())
    if repeats and by == "published":
        notes.append(f"{repeats:,} repeated interactions are kept: a held-out item may stand in training too.")
    elif repeats:
        notes.append(f"{repeats:,} repeated interactions were left out: each user's first with an item counts.")
        indptr, items = _first_only(indptr, items, population.n_items)
        ordered = kernels.sort_segments(indptr, items)
    lengths = np.diff(indptr)
    asked = lengths >= LEAST
    if not asked.any():
        raise HomebodyError(
            f"No user of {population.name} has the {LEAST} interactions that leave-one-out needs (training, "
            f"validation, test); the longest history has {lengths.max(initial=0)}."
        )
    if not asked.all():
        notes.append(
            f"{(~asked).sum():,} of {len(lengths):,} users have fewer than {LEAST} interactions: "
            "they take part in training and are not evaluated."
        )
    if way == "random":
        keys = Rng.of(seed, "held out").fold(torch.arange(len(lengths))).key.numpy()
        items = kernels.hold_out(indptr, items, keys, LEAST)
    stop = indptr[1:] - np.where(asked, 2, 0)
    if not (stop > indptr[:-1]).all():
        notes.append(f"{(stop == indptr[:-1]).sum():,} users have no training items and take no part.")
    valid, test = np.full((2, len(lengths)), -1, dtype=np.int64)
    valid[asked] = items[indptr[1:][asked] - 2]
    test[asked] = items[indptr[1:][asked] - 1]
    split = Split(population, by, way, seed, negatives, indptr, items, stop, ordered, valid, test, tuple(notes))
    return replace(split, _avoid=_isolate(split)) if by == "isolated" else split


def _known(kind: str, name: str, names: Any) -> Any:
    if name not in get_args(names):
        raise unknown_name(kind, name, get_args(names))
    return name


def _first_only(indptr: Longs, items: Ints, n_items: int) -> tuple[Longs, Ints]:
    keep = kernels.first_only(indptr, items, n_items)
    kept_before = np.concatenate([[0], np.cumsum(keep)])
    return kept_before[indptr], items[keep]


def _distinct(indptr: Longs, ordered: Ints) -> tuple[Longs, Ints]:
    """Ascending rows, each entry once."""
    first = np.ones(len(ordered), dtype=np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    first[indptr[:-1][np.diff(indptr) > 0]] = True
    return np.concatenate([[0], np.cumsum(first)])[indptr], ordered[first]


def _isolate(split: Split) -> tuple[Longs, Ints]:
    """Each user's history and everything a held-out item of theirs is ranked against, ascending."""
    users = np.arange(split.n_users)
    asked = split.asked()
    drawn = np.full((split.n_users, 2 * split.negatives), -1, dtype=np.int64)
    drawn[asked] = np.hstack([split.candidates(asked, "valid"), split.candidates(asked, "test")])
    owner = np.concatenate([np.repeat(users, np.diff(split.indptr)), np.repeat(users, drawn.shape[1])])
    item = np.concatenate([split.ordered, drawn.ravel()])
    owner, item = owner[item >= 0], item[item >= 0]
    order = np.argsort(owner, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=split.n_users))])
    return indptr, kernels.sort_segments(indptr, item[order].astype(np.int32))

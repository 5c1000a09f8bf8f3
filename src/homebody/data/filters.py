"""A part of a population: by rating, popularity, activity, or chance.

The steps, in the order of `Filters`' fields; each works on what the one before left, and an interaction counts
as often as it stands in the data:

1. `min_rating` keeps the interactions rated at least so.
2. `top_items` keeps the most popular items.
3. `items` keeps a random set of the items that are left, and `users` of the users.
4. `min_item` keeps items with at least so many interactions, then `min_user` users, each once.
5. `core` does both, until every user and every item has so many.
6. `sample_items` and `sample_users` keep random sets of what all these left.

Users who lost all their interactions are dropped. So are items that nobody has, unless an impression that is
left shows them and no filter of items speaks against them; and impressions left without a click, or without an
item that was not clicked. Users and items keep their order and are numbered anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from homebody.data.population import Impressions, Population, UserItems, pointers
from homebody.errors import HomebodyError, refuse_unknown

__all__ = ["Filters", "apply", "kept_impressions", "recounted"]

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Filters:
    """Which part of a population is used; None leaves a step out.

    >>> Filters.parse({"core": "5", "min_rating": 4}).as_dict()
    {'min_rating': 4.0, 'core': 5}
    >>> Filters.parse({"cor": 5})
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no filter 'cor'; did you mean 'core'?
    Known: core, items, min_item, min_rating, min_user, sample_items, sample_users, seed, top_items, users.
    """

    min_rating: float | None = None
    top_items: int | None = None
    items: int | None = None
    users: int | None = None
    min_item: int | None = None
    min_user: int | None = None
    core: int | None = None
    sample_items: int | None = None
    sample_users: int | None = None
    seed: int = 0
    """Of random sets. Of two sets by one seed, the smaller is part of the larger."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Filters:
        """From a recipe's table, or from texts on a command line."""
        known = [spec.name for spec in fields(cls)]
        refuse_unknown("filter", given, known)
        values: dict[str, Any] = {
            name: _rating(value) if name == "min_rating" else _count(name, value) for name, value in given.items()
        }
        return cls(**values)

    def as_dict(self) -> dict[str, float]:
        """What differs from the defaults."""
        return {
            spec.name: getattr(self, spec.name) for spec in fields(self) if getattr(self, spec.name) != spec.default
        }


def _rating(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise HomebodyError(f"The filter min_rating needs a number, such as 4, not {value!r}.")
    return number


def _count(name: str, value: Any) -> int:
    least = 0 if name == "seed" else 1
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not least <= number < 2**63:
        raise HomebodyError(f"The filter {name} needs a whole number from {least} up, not {value!r}.")
    return number


def apply(
    population: Population, filters: Mapping[str, Any] | None, say: Callable[[str], None] | None = None
) -> Population:
    """The part of the population that the filters leave, all its columns with it.

    >>> three = Population("toy", np.array([0, 2, 4, 5]), np.array([0, 1, 0, 1, 2], dtype=np.int32), n_items=3)
    >>> part = apply(three, {"core": 2}, say=print)
    The filter core=2 kept 2 of 3 users, 2 of 3 items and 4 of 5 interactions.
    >>> part.indptr.tolist(), part.items.tolist()
    ([0, 2, 4], [0, 1, 0, 1])
    """
    wanted = Filters.parse(filters or {})
    steps = [name for name in wanted.as_dict() if name != "seed"]
    if not steps:
        return population
    left = _Left(population)
    for name in steps:
        left.take(name, wanted)
    part = left.population()
    if say is not None:
        say(_sentence(population, part, wanted))
    return part


class _Left:
    """What is left of a population while filters work on it."""

    def __init__(self, population: Population) -> None:
        self.whole = population
        self.user = np.repeat(np.arange(population.n_users, dtype=np.int32), population.lengths)
        self.item = population.items
        self.row: npt.NDArray[np.int64] | None = None
        """Which of the population's interactions are left; None: all."""
        self.user_ok: Mask = np.ones(population.n_users, dtype=np.bool_)
        self.item_ok: Mask = np.ones(population.n_items, dtype=np.bool_)
        """Whom no filter has spoken against."""

    def take(self, name: str, filters: Filters) -> None:
        value = getattr(filters, name)
        if name == "min_rating":
            self._by_rating(value)
        elif name in ("top_items", "items", "sample_items"):
            counts = self._item_counts()
            # Lowest first: most popular, then by number, which is the order of ids.
            popular = np.where(counts > 0, -counts.astype(np.float64), np.inf)
            self._only(items=_first(popular if name == "top_items" else self._drawn("item", filters), value))
        elif name in ("users", "sample_users"):
            self._only(users=_first(self._drawn("user", filters), value))
        elif name == "min_item":
            self._only(items=self._item_counts() >= value)
        elif name == "min_user":
            self._only(users=self._user_counts() >= value)
        else:
            self._core(value)
        if len(self.item) == 0:
            raise HomebodyError(
                f"The filter {name}={value:g} removes all {self.whole.n_users:,} users of {self.whole.name}; "
                "lower it, or leave it out."
            )

    def _by_rating(self, least: float) -> None:
        if self.whole.ratings is None:
            raise HomebodyError(
                f"The filter min_rating={least:g} needs ratings, and {self.whole.name} has none; leave it out."
            )
        self._keep(self.whole.ratings >= np.float32(least))

    def _user_counts(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.user, minlength=self.whole.n_users)

    def _item_counts(self) -> npt.NDArray[np.int64]:
        return np.bincount(self.item, minlength=self.whole.n_items)

    def _drawn(self, kind: str, filters: Filters) -> npt.NDArray[np.float64]:
        """A random order of those who have interactions left."""
        counts = self._user_counts() if kind == "user" else self._item_counts()
        draw = np.random.default_rng([filters.seed, len(kind), ord(kind[0])]).random(len(counts))
        return np.where(counts > 0, draw, np.inf)

    def _core(self, least: int) -> None:
        before = -1
        while len(self.item) not in (0, before):
            before = len(self.item)
            self._only(items=self._item_counts() >= least)
            self._only(users=self._user_counts() >= least)

    def _only(self, *, users: Mask | None = None, items: Mask | None = None) -> None:
        if users is not None:
            self.user_ok &= users
            self._keep(users[self.user])
        if items is not None:
            self.item_ok &= items
            self._keep(items[self.item])

    def _keep(self, mask: Mask) -> None:
        if mask.all():
            return
        self.user, self.item = self.user[mask], self.item[mask]
        self.row = np.flatnonzero(mask) if self.row is None else self.row[mask]

    def population(self) -> Population:
        whole, row = self.whole, self.row
        users, items = self._user_counts() > 0, self._item_counts() > 0
        shown = None
        if whole.impressions is not None:
            # A user without history may still have impressions, unless the filters removed the history.
            may = self.user_ok & (users | (whole.lengths == 0))
            shown, asked = whole.impressions, may[whole.impressions.users]
            shown = kept_impressions(shown, asked[shown.owners] & self.item_ok[shown.items])
            users[shown.users] = True
            items[shown.items] = True
            if row is not None:
                stays = np.zeros(whole.n_interactions, dtype=np.bool_)
                stays[row] = True
                shown = recounted(shown, whole, stays)
            shown = replace(
                shown, users=_numbers(users)[shown.users], items=_numbers(items)[shown.items].astype(np.int32)
            )
        if (elsewhere := whole.elsewhere) is not None:
            keep = users[elsewhere.owners] & items[elsewhere.items]
            owners, others = _numbers(users)[elsewhere.owners[keep]], _numbers(items)[elsewhere.items[keep]]
            elsewhere = UserItems.of(owners, others, int(users.sum()))
        who, what = np.flatnonzero(users), np.flatnonzero(items)
        return replace(
            whole,
            indptr=pointers(self._user_counts()[users]),
            items=_numbers(items).astype(np.int32)[self.item],
            n_items=len(what),
            user_ids=None if whole.user_ids is None else whole.user_ids.gather(who),
            item_ids=None if whole.item_ids is None else whole.item_ids.gather(what),
            item_names=None if whole.item_names is None else whole.item_names.gather(what),
            user_features=None if whole.user_features is None else whole.user_features.rows(who),
            item_features=None if whole.item_features is None else whole.item_features.rows(what),
            times=whole.times if whole.times is None or row is None else whole.times[row],
            ratings=whole.ratings if whole.ratings is None or row is None else whole.ratings[row],
            contexts=whole.contexts if whole.contexts is None or row is None else whole.contexts.rows(row),
            impressions=shown,
            elsewhere=elsewhere,
        )


def _first(order: npt.NDArray[np.float64], count: int) -> Mask:
    """The `count` lowest, ties by number; what is infinite is never among them."""
    chosen = np.argsort(order, kind="stable")[:count]
    mask = np.zeros(len(order), dtype=np.bool_)
    mask[chosen] = np.isfinite(order[chosen])
    return mask


def _numbers(kept: Mask) -> npt.NDArray[np.int64]:
    """The new number of each that is kept."""
    return np.cumsum(kept) - 1


def kept_impressions(impressions: Impressions, keep: Mask) -> Impressions:
    """The impressions with only these items; each keeps at least one clicked and one unclicked item."""
    which = impressions.owners
    count = len(impressions.users)
    clicks = np.bincount(which[keep & impressions.clicked], minlength=count)
    sizes = np.bincount(which[keep], minlength=count)
    items, clicked = impressions.items[keep], impressions.clicked[keep]
    useful = np.flatnonzero((clicks > 0) & (clicks < sizes))
    return replace(impressions, indptr=pointers(sizes), items=items, clicked=clicked).taken(useful)


def recounted(impressions: Impressions, whole: Population, stays: Mask) -> Impressions:
    """The impressions of a population of which only these interactions stay: fewer came before each."""
    if impressions.before is None:
        return impressions
    left, start = pointers(stays), whole.indptr[impressions.users]
    return replace(impressions, before=left[start + impressions.before] - left[start])


def _sentence(whole: Population, part: Population, filters: Filters) -> str:
    given = [f"{name}={value:g}" for name, value in filters.as_dict().items()]
    counts = [
        f"{part.n_users:,} of {whole.n_users:,} users",
        f"{part.n_items:,} of {whole.n_items:,} items",
        f"{part.n_interactions:,} of {whole.n_interactions:,} interactions",
    ]
    if whole.impressions is not None and part.impressions is not None:
        counts.append(f"{len(part.impressions.users):,} of {len(whole.impressions.users):,} impressions")
    filter_s = "filter" if len(given) == 1 else "filters"
    return f"The {filter_s} {', '.join(given)} kept {', '.join(counts[:-1])} and {counts[-1]}."

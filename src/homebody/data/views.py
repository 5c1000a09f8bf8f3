"""Views: what several apps of a person's know of them.

A view comes with a data set, from a file, or is made of a share of everyone's interactions, as if another app had
seen them: `svd:size=30,share=0.5` or `fedials:size=30,share=0.5`. That share is `Population.elsewhere`. This module
reads what is asked for and takes the share out; `homebody.view_vectors` makes the vectors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.attach import Say, attach_view, with_view
from homebody.data.codes import Code
from homebody.data.filters import kept_impressions, recounted
from homebody.data.population import Features, Population, UserItems, pointers
from homebody.errors import HomebodyError, refuse_unknown

__all__ = ["MadeView", "View", "attach_views", "move_elsewhere", "outside", "parse_views", "with_vectors"]

Way = Literal["svd", "fedials"]
WAYS: tuple[Way, ...] = get_args(Way)
NAME = r"[A-Za-z][A-Za-z0-9_-]*"
SEEN: dict[Way, str] = {
    "svd": (
        "The view '{name}' is a singular value decomposition of {share:.0%} of everyone's interactions: whoever "
        "computed it saw all of them. ε leaves that out."
    ),
    "fedials": (
        "The view '{name}' holds vectors of federated implicit ALS on {share:.0%} of everyone's interactions: they "
        "stayed on the devices, which sent sums without noise, so that ε = ∞ for them. ε leaves that training out."
    ),
}
"""What a view that is made says of the interactions it is made of."""


@dataclass(frozen=True)
class MadeView:
    """A view of vectors that are made of a share of everyone's interactions.

    >>> MadeView.parse("taste", "svd:size=8")
    MadeView(way='svd', size=8, share=0.5, seed=None)
    >>> MadeView.parse("taste", "svd:share=2")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: The view 'taste' takes a share between 0 and 1, not 2.
    """

    way: Way
    size: int = 30
    share: float = 0.5
    seed: int | None = None
    """Which interactions are taken; None: the run's seed."""

    @classmethod
    def parse(cls, name: str, text: str) -> MadeView:
        """From its text, such as svd:size=30,share=0.5."""
        way, _, rest = text.partition(":")
        refuse_unknown("way to make a view", [way], WAYS)
        known = [spec.name for spec in fields(cls)][1:]
        given: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, _, value = (word.strip() for word in part.partition("="))
            refuse_unknown(f"setting of the view {name}", [key], known)
            try:
                given[key] = float(value) if key == "share" else int(value)
            except ValueError:
                raise HomebodyError(f"The view '{name}' takes {key} as a number, not '{value}'.") from None
        view = replace(cls(cast(Way, way)), **given)
        if not 0 < view.share < 1:
            raise HomebodyError(f"The view '{name}' takes a share between 0 and 1, not {view.share:g}.")
        if view.size < 1:
            raise HomebodyError(f"The view '{name}' takes a size of at least 1, not {view.size}.")
        return view


View = Path | MadeView


def parse_views(given: Mapping[str, str]) -> dict[str, View]:
    """Where each view comes from: a file, or a share of the interactions.

    >>> parse_views({"taste": "svd:size=8", "shop": "shop.csv"})
    {'taste': MadeView(way='svd', size=8, share=0.5, seed=None), 'shop': PosixPath('shop.csv')}
    """
    views: dict[str, View] = {}
    for name, text in given.items():
        if not re.fullmatch(NAME, name):
            raise HomebodyError(f"The name of a view is a letter, then letters, digits, _ or -, not '{name}'.")
        views[name] = MadeView.parse(name, text) if text.partition(":")[0] in WAYS else Path(text).expanduser()
    return views


def attach_views(
    population: Population, views: Mapping[str, View], *, kinds: Mapping[str, str] | None = None, say: Say | None = None
) -> Population:
    """The population with the views that are files. Refuses the name of a view that it has."""
    taken = set() if population.user_features is None else set(population.user_features.views.values())
    for name, view in views.items():
        if name in taken:
            raise HomebodyError(f"{population.name} has a view '{name}' already: give this one another name.")
        if isinstance(view, Path):
            population = attach_view(population, name, view, kinds=kinds, say=say)
    return population


def move_elsewhere(population: Population, name: str, view: MadeView, seed: int = 0) -> tuple[Population, UserItems]:
    """The population without a random share of each person's items, which are elsewhere; and those items.

    A person's share is rounded, and one item at least stays. All interactions of a person with an item go together.

    >>> toy = Population("toy", np.array([0, 4, 5]), np.array([0, 1, 2, 3, 0], dtype=np.int32), n_items=4)
    >>> left, taken = move_elsewhere(toy, "taste", MadeView("svd"))
    >>> left.lengths.tolist(), np.diff(taken.indptr).tolist(), left.elsewhere == taken
    ([2, 1], [2, 0], True)
    """
    owner = np.repeat(np.arange(population.n_users), population.lengths)
    pair, place = np.unique(owner * population.n_items + population.items, return_inverse=True)
    people = pair // population.n_items
    draw = np.random.default_rng([seed if view.seed is None else view.seed, *name.encode()]).random(len(pair))
    order = np.lexsort((draw, people))
    many = np.bincount(people, minlength=population.n_users)
    first = np.cumsum(many) - many
    away = np.minimum(np.floor(view.share * many + 0.5).astype(np.int64), np.maximum(many - 1, 0))
    rank = np.empty(len(pair), dtype=np.int64)
    rank[order] = np.arange(len(pair)) - first[people]
    gone = rank < away[people]
    if not gone.any():
        raise HomebodyError(
            f"A share of {view.share:g} takes nothing of {population.name} for the view '{name}': histories are too "
            "short, or the share is too small."
        )
    taken = UserItems.of(people[gone], pair[gone] % population.n_items, population.n_users)
    stays = ~gone[place]
    rows = np.flatnonzero(stays)
    elsewhere = taken
    if (old := population.elsewhere) is not None:
        owners = np.concatenate([old.owners, taken.owners])
        elsewhere = UserItems.of(owners, np.concatenate([old.items, taken.items]), population.n_users)
    shown = population.impressions
    if shown is not None:
        at_home = ~np.isin(shown.users[shown.owners] * population.n_items + shown.items, pair[gone])
        shown = recounted(kept_impressions(shown, at_home), population, stays)
    left = replace(
        population,
        indptr=pointers(np.bincount(owner[stays], minlength=population.n_users)),
        items=population.items[rows],
        times=None if population.times is None else population.times[rows],
        ratings=None if population.ratings is None else population.ratings[rows],
        contexts=None if population.contexts is None else population.contexts.rows(rows),
        impressions=shown,
        elsewhere=elsewhere,
    )
    return left, taken


def with_vectors(
    population: Population, name: str, vectors: npt.NDArray[np.floating], known: npt.NDArray[np.bool_]
) -> Population:
    """The population with a vector for each known person as the view of this name, taken as it is."""
    columns = {
        f"{name}.{number}": pl.Series(column).set(pl.Series(~known), None)
        for number, column in enumerate(vectors.astype(np.float32).T, start=1)
    }
    declared = dict.fromkeys(columns, Code("number"))
    return with_view(population, name, Features(pl.DataFrame(columns), dict.fromkeys(columns, "numeric"), declared))


def outside(views: Mapping[str, str]) -> list[str]:
    """What was done to make these views that no ledger charges, in sentences.

    >>> outside({"shop": "shop.csv"})
    []
    """
    return [
        SEEN[view.way].format(name=name, share=view.share)
        for name, view in parse_views(views).items()
        if isinstance(view, MadeView)
    ]

"""What a population looks like, in a few numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from homebody.data.population import Features, Impressions, Kind, Population
from homebody.errors import HomebodyError

__all__ = ["Bin", "FeatureSummary", "ImpressionSummary", "Summary", "summarise"]

INTERACTIONS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Bin:
    """The users with `least` to `most` interactions."""

    least: int
    most: int
    users: int


@dataclass(frozen=True)
class FeatureSummary:
    """One column of features."""

    name: str
    kind: Kind
    distinct: int
    """Different values; of multi-hot ones, in all lists together."""
    missing: float
    """The share of rows of which nothing is known."""
    view: str = ""
    """The view that it is in, if any."""


@dataclass(frozen=True)
class ImpressionSummary:
    impressions: int
    users: int
    shown: int
    clicked: int


@dataclass(frozen=True)
class Summary:
    """The numbers `homebody data info` prints."""

    name: str
    users: int
    items: int
    interactions: int
    duplicates: int
    """Interactions of a user with an item they had before."""
    sparsity: float
    """The share of user-item pairs that never met."""
    shortest: int
    median: float
    mean: float
    longest: int
    """Of interactions per user."""
    unseen_items: int
    """Items of the catalogue that nobody touched."""
    top_tenth: float
    """The share of interactions that the most popular tenth of the items has."""
    tied_users: float | None
    """The share of users with two interactions at one time, whose order only the file knows."""
    first_time: int | None
    last_time: int | None
    ratings: tuple[float, float] | None
    """The lowest and the highest."""
    names: list[str]
    """The most popular items' names."""
    activity: list[Bin]
    """Users by how many interactions they have, in steps of 1, 2, 5, 10, …: PrivRec's Figure 2."""
    user_features: list[FeatureSummary]
    item_features: list[FeatureSummary]
    contexts: list[FeatureSummary]
    impressions: ImpressionSummary | None
    elsewhere: int = 0
    """Interactions that people have in another app: they are in no history."""


def summarise(population: Population) -> Summary:
    """Compute all counts in one pass over blocks of users.

    >>> two = Population("toy", np.array([0, 2, 5]), np.array([0, 1, 1, 1, 0], dtype=np.int32), n_items=2)
    >>> summary = summarise(two)
    >>> summary.duplicates, summary.sparsity, summary.median, summary.longest
    (1, 0.0, 2.5, 3)
    """
    if population.n_users == 0 or population.n_items == 0:
        raise HomebodyError(f"The population '{population.name}' is empty.")
    lengths, popularity = population.lengths, population.popularity
    duplicates, tied = _repeats(population)
    times, ratings = population.times, population.ratings
    ranked = np.argsort(-popularity, kind="stable")
    top = popularity[ranked[: max(1, population.n_items // 10)]].sum()
    distinct = population.n_interactions - duplicates
    names = population.item_names if population.item_names is not None else population.item_ids
    return Summary(
        name=population.name,
        users=population.n_users,
        items=population.n_items,
        interactions=population.n_interactions,
        duplicates=duplicates,
        sparsity=1.0 - distinct / (population.n_users * population.n_items),
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        mean=float(lengths.mean()),
        longest=int(lengths.max()),
        unseen_items=int((popularity == 0).sum()),
        top_tenth=float(top / max(1, population.n_interactions)),
        tied_users=None if times is None else tied / population.n_users,
        first_time=None if times is None or len(times) == 0 else int(times.min()),
        last_time=None if times is None or len(times) == 0 else int(times.max()),
        ratings=None if ratings is None or len(ratings) == 0 else (float(ratings.min()), float(ratings.max())),
        names=[] if names is None else [str(name) for name in names.gather(ranked[:5]).to_list()],
        activity=_activity(lengths),
        user_features=_features(population.user_features),
        item_features=_features(population.item_features),
        contexts=_features(population.contexts),
        impressions=None if population.impressions is None else _impressions(population.impressions),
        elsewhere=0 if population.elsewhere is None else len(population.elsewhere.items),
    )


def _activity(lengths: npt.NDArray[np.int64]) -> list[Bin]:
    """All bins up to the longest history; a bin for empty histories only if there are any.

    >>> [(each.least, each.most, each.users) for each in _activity(np.array([1, 4, 5, 6]))]
    [(1, 1, 1), (2, 4, 1), (5, 9, 2)]
    """
    longest = max(1, int(lengths.max()))
    edges = [step * 10**power for power in range(len(str(longest)) + 1) for step in (1, 2, 5)]
    edges = [1, *(edge for edge in edges if 1 < edge <= longest), next(edge for edge in edges if edge > longest)]
    counts = np.histogram(lengths, bins=np.array(edges))[0]
    idle = int((lengths == 0).sum())
    bins = [Bin(low, high - 1, int(n)) for low, high, n in zip(edges[:-1], edges[1:], counts, strict=True)]
    return [Bin(0, 0, idle), *bins] if idle else bins


def _features(features: Features | None) -> list[FeatureSummary]:
    if features is None:
        return []
    summaries = []
    for name, kind in features.kinds.items():
        present = features.table[name].drop_nulls()
        different = present.explode().drop_nulls() if kind == "multi-hot" else present
        missing = 1.0 - len(present) / max(1, len(features))
        summaries.append(FeatureSummary(name, kind, different.n_unique(), missing, features.views.get(name, "")))
    return summaries


def _impressions(shown: Impressions) -> ImpressionSummary:
    return ImpressionSummary(len(shown.users), len(np.unique(shown.users)), len(shown.items), int(shown.clicked.sum()))


def _repeats(population: Population) -> tuple[int, int]:
    """How many interactions repeat an item, and how many users have two at one time."""
    indptr, duplicates, tied = population.indptr, 0, 0
    begin = 0
    while begin < population.n_users:
        # As many users as fill a block, and at least one: the sort needs eight bytes an interaction.
        end = int(np.searchsorted(indptr, indptr[begin] + INTERACTIONS_AT_ONCE, side="right")) - 1
        end = min(max(end, begin + 1), population.n_users)
        rows = slice(indptr[begin], indptr[end])
        user = np.repeat(np.arange(end - begin), np.diff(indptr[begin : end + 1]))
        pair = np.sort(user * population.n_items + population.items[rows])
        duplicates += int((pair[1:] == pair[:-1]).sum())
        if population.times is not None:
            time = population.times[rows]
            same = (time[1:] == time[:-1]) & (user[1:] == user[:-1])
            tied += int(np.count_nonzero(np.bincount(user[1:][same])))
        begin = end
    return duplicates, tied

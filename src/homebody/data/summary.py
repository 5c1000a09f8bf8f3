"""What a population looks like, in a few numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from homebody.data.population import Population
from homebody.errors import HomebodyError

__all__ = ["Summary", "summarise"]

INTERACTIONS_AT_ONCE = 1 << 22


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
    user_features: list[str]
    item_features: list[str]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def summarise(population: Population) -> Summary:
    """Count what there is to count, in one pass over blocks of users.

    >>> two = Population("toy", np.array([0, 2, 5]), np.array([0, 1, 1, 1, 0], dtype=np.int32), n_items=2)
    >>> found = summarise(two)
    >>> found.duplicates, found.sparsity, found.median, found.longest
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
        user_features=[] if population.user_features is None else population.user_features.names,
        item_features=[] if population.item_features is None else population.item_features.names,
    )


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
            tied += len(np.unique(user[1:][same]))
        begin = end
    return duplicates, tied

"""What a finished run recommends, by the names that its source has for items: also to somebody whom it never met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from homebody.core import Recommended
from homebody.data import Population
from homebody.errors import HomebodyError
from homebody.fit import Fitted
from homebody.run import reopen
from homebody.simulation import Simulator

__all__ = ["Suggested", "recommend_for", "recommend_to"]


class Suggested(NamedTuple):
    """What is recommended to somebody: items as the source calls them, and what was unknown or left out."""

    items: list[dict[str, Any]]
    """The best first: item, name, score."""
    notes: tuple[str, ...]


def recommend_for(
    path: Path,
    clicks: Sequence[str],
    features: Mapping[str, object] | None = None,
    now: Mapping[str, object] | None = None,
    k: int = 10,
    *,
    ratings: Sequence[float] | None = None,
    trust_code: bool = False,
) -> Suggested:
    """What a finished run recommends to somebody whom it never met, from a few items by the source's ids or names.

    trust_code: run the file that the run's recipe names as its method; without it, such a run is refused.
    """
    fitted, population = _opened(path, k, trust_code)
    items = [population.item(name) for name in clicks]
    best = fitted.recommend_for(items, features, now, k, ratings=ratings)
    return _shown(population, best)


def recommend_to(
    path: Path, user: str, now: Mapping[str, object] | None = None, k: int = 10, *, trust_code: bool = False
) -> Suggested:
    """What a finished run recommends to one of its own people, in the circumstances in which they ask.

    trust_code: as in `recommend_for`.
    """
    fitted, population = _opened(path, k, trust_code)
    runtime = fitted.runtime
    assert isinstance(runtime, Simulator)
    best = runtime.recommend_in(fitted.method, fitted.shared, population.user(user), k, now or {})
    return _shown(population, best)


def _opened(path: Path, k: int, trust_code: bool) -> tuple[Fitted, Population]:
    if k < 1:
        raise HomebodyError(f"At least 1 item must be asked for, not {k}.")
    return reopen(path, trust_code=trust_code)


def _shown(population: Population, best: Recommended) -> Suggested:
    """Items with their scores, as the source calls them."""
    items = [{"item": population.item_id(i), "name": population.item_name(i), "score": s} for i, s in best.items]
    nothing = () if items else (f"Nothing is left to recommend: they have all {population.n_items:,} items.",)
    return Suggested(items, (*best.notes, *nothing))

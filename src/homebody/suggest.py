"""What a finished run recommends, by the names that its source has for items: also to somebody whom it never met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from homebody.data import Population
from homebody.run import reopen

__all__ = ["Suggested", "recommend_for", "shown"]


class Suggested(NamedTuple):
    """What is recommended to somebody new: items as the source calls them, and what was unknown or left out."""

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
) -> Suggested:
    """What a finished run recommends to somebody whom it never met, from a few items by the source's ids or names."""
    fitted, population = reopen(path)
    items = [population.item(name) for name in clicks]
    best = fitted.recommend_for(items, features, now, k, ratings=ratings)
    return Suggested(shown(population, best.items), best.notes)


def shown(population: Population, best: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Items with their scores, as the source calls them."""
    return [{"item": population.item_id(i), "name": population.item_name(i), "score": score} for i, score in best]

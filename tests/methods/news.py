"""News with texts, for the tests of news recommenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from homebody import testing
from homebody.core import Catalogue, Column
from homebody.data.partitions import split
from homebody.data.population import Features
from homebody.data.splits import Split
from homebody.models.minilm import WIDTH
from homebody.rng import Rng
from homebody.testing import impressed

__all__ = ["SMALL", "made_up_vectors", "texts", "worded"]

SMALL: dict[str, Any] = {"d": 4, "heads": 2, "words": "random", "latest": 6, "negatives": 2}
"""Settings of a small model."""


@cache
def texts() -> Catalogue:
    """The contract's catalogue, whose items have a title, a body and a category; one has no title."""
    draw = np.random.default_rng(2)
    known = testing.CATALOGUE.items
    words = tuple(f"w{number:02}" for number in range(12))
    columns = {"category": known["colour"]}
    for name, width in (("title", 3), ("body", 5)):
        codes = torch.from_numpy(draw.integers(1, len(words) + 1, (testing.N_ITEMS, width)))
        length = torch.from_numpy(draw.integers(1, width + 1, testing.N_ITEMS))
        codes = torch.where(torch.arange(width) < length[:, None], codes, -1)
        columns[name] = Column(
            codes, len(words) + 1, "sequence", True, words=words, texts=tuple(f"{name} {row}" for row in codes.tolist())
        )
    columns["title"].values[11] = -1
    return Catalogue(testing.N_ITEMS, columns, testing.CATALOGUE.people, testing.CATALOGUE.contexts)


@cache
def worded() -> Split:
    """`impressed`, with a title, a body and a category of each item; a title tells an item apart."""
    people, draw = impressed().population, np.random.default_rng(3)
    table = {
        "title": [f"own{item} {' '.join(f'w{one}' for one in draw.integers(9, size=2))}" for item in range(120)],
        "body": [" ".join(f"b{one}" for one in draw.integers(9, size=item % 5 + 1)) for item in range(120)],
        "category": [f"c{item % 3}" for item in range(120)],
    }
    kinds = {"title": "sequence", "body": "sequence", "category": "categorical"}
    described = replace(people, item_features=Features(pl.DataFrame(table), kinds))  # type: ignore[arg-type]
    return split(described, "impressions-people:test=0.2,valid=0.3", seed=5)


def made_up_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a language model's vectors, which have length 1: one drawn for each different text."""

    def vectors(some: Sequence[str], say: object = None) -> Tensor:
        return torch.nn.functional.normalize(torch.stack([Rng.of(0, text).normal(WIDTH) for text in some]))

    monkeypatch.setattr("homebody.text_vectors.text_vectors", vectors)

"""A few people for `homebody.testing`: of very different lengths, with features of every kind and some unknown."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from homebody.core import Catalogue, Column, Data

__all__ = ["CATALOGUE", "client", "data_of", "stack"]

N_ITEMS = 30
_colours = torch.arange(N_ITEMS) % 4
_tags = torch.stack([torch.arange(N_ITEMS) % 3, torch.where(torch.arange(N_ITEMS) % 5 > 0, 3, -1)], 1)

CATALOGUE = Catalogue(
    N_ITEMS,
    items={
        "colour": Column(_colours, 4, "one"),
        "tags": Column(_tags, 4, "many"),
        "price": Column(torch.linspace(-1.5, 1.5, N_ITEMS), 1, "number"),
    },
    people={
        "job": Column(torch.empty(0, dtype=torch.int64), 3, "one"),
        "hobbies": Column(torch.empty(0, 2, dtype=torch.int64), 4, "many"),
        "age": Column(torch.empty(0), 1, "number"),
    },
    contexts={"weather": Column(torch.empty(0, dtype=torch.int64), 3, "one")},
)
_PEOPLE: dict[str, list[Any]] = {
    "job": [1, 0, 2, 1, 0, 2],
    "hobbies": [[1, 2], [-1, -1], [3, -1], [2, 3], [1, -1], [-1, -1]],
    "age": [0.3, -1.2, 0.0, 2.0, -0.5, 0.9],
}


def client(items: list[int], number: int = 0) -> Data:
    """Someone who has these items; what else is known of them, their number says."""
    owned = torch.tensor(items, dtype=torch.int64)
    return Data(
        owned,
        torch.ones_like(owned, dtype=torch.bool),
        torch.tensor(sorted(set(items)), dtype=torch.int64),
        CATALOGUE,
        {name: torch.tensor(rows[number % len(rows)]) for name, rows in _PEOPLE.items()},
        {"weather": (owned + number) % 3},
        1.0 + (owned + number) % 5,
    )


def stack(clients: list[Data], extra: int = 0) -> tuple[Tensor, ...]:
    """Everyone padded to the longest and a bit more: what `data_of` takes, one row a client."""

    def pad(rows: list[Tensor], value: float) -> Tensor:
        width = max(map(len, rows)) + extra
        return torch.stack([torch.cat([row, row.new_full((width - len(row),), value)]) for row in rows])

    return (
        pad([data.items for data in clients], 0),
        pad([data.valid for data in clients], False),
        pad([data.excluded for data in clients], N_ITEMS),
        *(torch.stack([data.features[name] for data in clients]) for name in CATALOGUE.people),
        *(pad([data.contexts[name] for data in clients], 0) for name in CATALOGUE.contexts),
        pad([_rated(data) for data in clients], 0.0),
    )


def data_of(items: Tensor, valid: Tensor, excluded: Tensor, *others: Tensor) -> Data:
    features = dict(zip(CATALOGUE.people, others, strict=False))
    contexts = dict(zip(CATALOGUE.contexts, others[len(features) :], strict=False))
    return Data(items, valid, excluded, CATALOGUE, features, contexts, others[-1])


def _rated(data: Data) -> Tensor:
    assert data.ratings is not None
    return data.ratings

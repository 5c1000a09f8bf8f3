"""What devices tell by asking for rows: their own items are in every request, negatives drawn anew come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Method, Tree, Users
from homebody.rng import Rng
from homebody.simulation import Simulator

__all__ = ["ROUNDS", "Always", "read_requests"]

ROUNDS = (1, 2, 3, 5, 10)
"""Numbers of requests after which the server guesses."""
CELLS = 1 << 26
"""The most people × items that are processed together."""
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Always:
    """Rows that people asked for in every one of some rounds, beside the items that they train on."""

    rounds: int
    rows: Counts
    """(people,) how many."""
    own: Counts
    """(people,) how many of these are items of theirs."""
    items: Counts
    """(people,) how many items they train on."""

    @property
    def precision(self) -> float:
        """How many of these rows are someone's own; the mean over people."""
        return float((self.own / self.rows).mean())

    @property
    def recall(self) -> float:
        """How many of someone's items are among these rows; the mean over people."""
        return float((self.own / self.items).mean())

    @property
    def read(self) -> float:
        """The share of people of whom these rows are the history, exactly."""
        return float(((self.own == self.items) & (self.rows == self.items)).mean())

    def as_dict(self) -> dict[str, Any]:
        """For JSON; of one person, in whole numbers."""
        alone = {"rows": int(self.rows[0]), "own": int(self.own[0])} if len(self.rows) == 1 else {"read": self.read}
        return {"rounds": self.rounds, **alone, "precision": self.precision, "recall": self.recall}


def read_requests(
    method: Method, simulator: Simulator, shared: Tree, users: Users, rng: Rng, rounds: Sequence[int] = ROUNDS
) -> dict[str, list[Always]]:
    """By table: what the server knows of these clients who say which rows they need, after so many rounds with them.

    It guesses that the rows asked for every time are the history, and needs to know nothing else. Only tables with a
    row for each item are read. `rng.fold("round", number)` is the stream of a round.
    """
    n_items = simulator.catalogue.n_items
    tables = [name for name in shared if shared[name].ndim and len(shared[name]) == n_items]
    parts: dict[str, list[list[Always]]] = {}
    size = max(1, CELLS // n_items)
    for start in range(0, len(users), size):
        for name, read in _read(method, simulator, tables, users[start : start + size], rng, rounds).items():
            parts.setdefault(name, []).append(read)
    return {name: [_together(same) for same in zip(*lists, strict=True)] for name, lists in parts.items()}


def _read(
    method: Method, simulator: Simulator, tables: Sequence[str], users: Users, rng: Rng, rounds: Sequence[int]
) -> dict[str, list[Always]]:
    """Of people who fit into memory together, with a cell for each of them and each item."""
    n_items = simulator.catalogue.n_items
    place = np.full(simulator.split.n_users, -1)
    place[users] = np.arange(len(users))
    own = torch.zeros(len(users), n_items, dtype=torch.bool)
    padded = simulator.split.padded(users)
    who, entry = np.nonzero(padded.valid)
    own[torch.from_numpy(who), torch.from_numpy(padded.items[who, entry].astype(np.int64))] = True
    times: dict[str, Tensor] = {}
    found: dict[str, list[Always]] = {}
    for number in range(1, max(rounds) + 1):
        for some, request in simulator.requests(method, users, rng.fold("round", number)):
            where = torch.from_numpy(place[some])
            for name in (one for one in tables if one in request):
                counts = times.setdefault(name, torch.zeros(len(users), n_items + 1, dtype=torch.int16))
                # Padding is counted in a column of its own.
                rows = torch.where(request[name] < 0, n_items, request[name]).cpu()
                counts[where] = counts[where].scatter_add(1, rows, torch.ones_like(rows, dtype=torch.int16))
        if number in rounds:
            for name, counts in times.items():
                always = counts[:, :-1] == number
                sums = (always.sum(1), (always & own).sum(1), own.sum(1))
                found.setdefault(name, []).append(Always(number, *(one.numpy() for one in sums)))
    return found


def _together(some: Sequence[Always]) -> Always:
    names = ("rows", "own", "items")
    return Always(some[0].rounds, *(np.concatenate([getattr(one, name) for one in some]) for name in names))

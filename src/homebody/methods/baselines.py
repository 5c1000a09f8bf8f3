"""Baselines for a table: popularity, popularity from private reports, and random scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import About, Batch, Catalogue, Data, Stateless, Total, Tree, Update, Users, Work, plain_work
from homebody.privacy import Channel, OneBit, Shuffle
from homebody.reference import Histories, LearntImpressions, Reference, Score
from homebody.rng import Rng

__all__ = ["Chance", "Popularity", "PrivatePopularity"]

AT_ONCE = 64
"""People whose random scores are drawn together: few enough for caches."""


@dataclass(frozen=True)
class Popularity(Reference):
    """Items by the number of their interactions. A click in an impression that may be learnt from is one, unless the
    person's history has it already.

    >>> score = Popularity().trained(Histories.of([[1, 2], [1]], n_items=3))
    >>> score(np.array([0]), torch.arange(3))
    tensor([[0., 2., 1.]])
    """

    about: ClassVar[About] = About(title="the same list for everyone, by number of interactions", rounds=1)

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        learnt, n_items = np.repeat(histories.learn, np.diff(histories.indptr)), histories.catalogue.n_items
        count = np.bincount(histories.items[learnt], minlength=n_items)
        if histories.shown is not None:
            count += np.bincount(_new_clicks(histories, histories.shown), minlength=n_items)
        popularity = torch.from_numpy(count).float()
        yield lambda users, items: popularity[items].expand(len(users), -1)


def _new_clicks(histories: Histories, shown: LearntImpressions) -> npt.NDArray[np.int64]:
    """What people clicked in impressions, each once, and do not have in their histories."""
    n_items = histories.catalogue.n_items
    had = np.repeat(np.arange(len(histories.learn)), np.diff(histories.indptr)) * n_items + histories.items
    clicked = np.repeat(shown.users, np.diff(shown.indptr))[shown.clicked] * n_items + shown.items[shown.clicked]
    return np.setdiff1d(clicked, had) % n_items


@dataclass(frozen=True)
class PrivatePopularity(Stateless):
    """Items by the share of people who report that they have them: what a private method must beat at its budget.

    Each device fills a table with 1 for what it has and −1 for what it has not, and sends a few randomised bits of it
    (`OneBit`, with the ε, k and rounds of `fmf-ldp`). The server averages what it decoded over all rounds.

    >>> import homebody as hb
    >>> model = hb.fit(hb.PrivatePopularity(), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> round(model.epsilon["server"], 2)
    156.52
    """

    uplink: Channel = Channel(OneBit(epsilon=2.5, k=100), Shuffle())

    about: ClassVar[About] = About(
        title="popularity from one-bit reports, at the budget of fmf-ldp", rounds=20, draws_negatives=False, dense=True
    )

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"taken": torch.zeros(catalogue.n_items)}

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        return plain_work(catalogue.n_items, catalogue, longest)

    def init_server(self, shared: Tree) -> Tree:
        # Rounds are counted for each item: one that comes later is averaged over fewer.
        return {"sum": torch.zeros_like(shared["taken"]), "rounds": torch.zeros_like(shared["taken"])}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": data.items, "valid": data.valid}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        count = len(shared["taken"])
        items = torch.where(batch["valid"], batch["items"], count)
        absent = torch.full((count + 1,), -1.0, device=items.device)
        return {"taken": absent.scatter(0, items, 1.0)[:-1]}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        taken = total.told.get("taken", total.mean["taken"])
        kept = {"sum": state["sum"] + taken, "rounds": state["rounds"] + 1}
        return {"taken": kept["sum"] / kept["rounds"]}, kept

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["taken"][items]


@dataclass(frozen=True)
class Chance(Reference):
    """A random order of the items for each person, the lowest line of a table; HR@10 among 99 others is 0.1.

    >>> import numpy as np
    >>> score = Chance().trained(Histories.of([[1, 2], [1]], n_items=3), seed=4)
    >>> both = score(np.array([0, 1]), torch.arange(3))
    >>> both.shape, torch.equal(both[0], both[1]), torch.equal(both[1:], score(np.array([1]), torch.arange(3)))
    (torch.Size([2, 3]), False, True)
    """

    about: ClassVar[About] = About(title="random scores: reads nobody's history", diagnostic=True, rounds=1)
    reads: ClassVar[bool] = False

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        def score(users: Users, items: Tensor) -> Tensor:
            some = torch.split(torch.from_numpy(users)[:, None], AT_ONCE)
            drawn = (Rng.of(seed, "random").fold(part).fold(items).key for part in some)
            return torch.cat([((bits >> 40) & 0xFFFFFF).float() for bits in drawn])  # as many bits as a float holds

        yield score

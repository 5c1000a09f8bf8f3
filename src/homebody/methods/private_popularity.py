"""Popularity, learnt from one-bit reports: what a private method must beat at the same budget.

Each device fills a table with 1 for what it has and −1 for what it has not, and tells a few randomised bits of it
(`OneBit`, with the ε, k and rounds of `fmf-ldp`). The server averages what it decoded over all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import About, Batch, Catalogue, Data, Method, Total, Tree, Update, Work, plain_work
from homebody.privacy import Channel, OneBit, Shuffle
from homebody.rng import Rng

__all__ = ["PrivatePopularity"]


@dataclass(frozen=True)
class PrivatePopularity(Method):
    """Items by the share of people who report that they have them."""

    uplink: Channel = Channel(OneBit(epsilon=2.5, k=100), Shuffle())

    about: ClassVar[About] = About(
        title="popularity from one-bit reports, at the budget of fmf-ldp",
        rounds=20,
        draws_negatives=False,
        dense=True,
    )

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"taken": torch.zeros(catalogue.n_items)}

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        return plain_work(catalogue.n_items, catalogue, longest)

    def init_server(self, shared: Tree) -> Tree:
        # Rounds are counted for each item: one that comes later is averaged over fewer.
        return {"sum": torch.zeros_like(shared["taken"]), "rounds": torch.zeros_like(shared["taken"])}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": data.items, "valid": data.valid}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        count = len(shared["taken"])
        items = torch.where(batch["valid"], batch["items"], count)
        absent = torch.full((count + 1,), -1.0, device=items.device)
        return {"taken": absent.scatter(0, items, 1.0)[:-1]}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        told = total.told.get("taken", total.mean["taken"])
        kept = {"sum": state["sum"] + told, "rounds": state["rounds"] + 1}
        return {"taken": kept["sum"] / kept["rounds"]}, kept

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["taken"][items]

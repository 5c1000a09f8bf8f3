"""FedRecon: Federated Reconstruction, Partially Local Federated Learning (Singhal et al., NeurIPS 2021), for matrix
factorisation as PFedRec's authors compare with it.

| paper                                    | here                                                                   |
|------------------------------------------|------------------------------------------------------------------------|
| g, global parameters                     | `shared["item"]`, M × `factors`                                        |
| l_i, local parameters                    | `local["user"]`, built anew from zero each round                       |
| support and query set, S and Q           | the first `support` share of a round's shuffled samples, and the others |
| R(S, g), η_r, k_r                        | `rebuild` passes over S with `learning_rate`                           |
| U(Q, l, g), η_u, k_u                     | `epochs` passes over Q, × M × `item_rate`                              |

A device keeps nothing that matters between rounds. To rank, it rebuilds its vector from all it has with the latest
table; so does someone who never trained. With `dual` it also tunes the rows then, on all it has, and ranks with those;
training is the same with and without, for the rows step after the vector in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody import ops
from homebody.core import About, Batch, Data, Rows, Scoring, Tree, Update, param
from homebody.methods.item_table import ItemTable
from homebody.rng import Rng
from homebody.settings import Range, proper_share

__all__ = ["FedRecon"]


@dataclass(frozen=True)
class FedRecon(ItemTable):
    """Matrix factorisation whose user vectors are rebuilt each round; only the item table lasts.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FedRecon(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    rebuild: int = param(5, "k_r: passes over the support part that build the user vector", low=1, search=Range(1, 10))
    support: float = param(
        0.5, "share of a round's samples that build it; the others step the rows", low=0, high=1, check=proper_share
    )

    about: ClassVar[About] = About(
        title="matrix factorisation: user vectors rebuilt each round, one shared item table",
        paper="Singhal et al., Federated Reconstruction, NeurIPS 2021",
    )

    @property
    def scoring(self) -> Scoring:
        return Scoring(parameters="adapted")

    @property
    def passes(self) -> int:
        """Passes of a round that build the user vector, as a run records them."""
        return self.rebuild

    @property
    def all_passes(self) -> int:
        return self.rebuild + self.epochs

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"user": torch.zeros_like(shared["item"][0]), **self.untuned(shared, rng)}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        batch = super().prepare(data, rng)
        return {**batch, "support": (self.support * batch["valid"].sum()).ceil().long().clamp(min=1)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        place = torch.arange(len(batch["valid"]), device=batch["valid"].device)
        first = place < batch["support"]
        change, user, loss = self._round(shared, batch, batch["valid"] & first, batch["valid"] & ~first)
        return {"item": change}, self.kept(local, user, loss)

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        change, user, loss = self._round(shared, batch, batch["valid"], batch["valid"])
        return {"user": user, "loss": loss, **self.tuned(change)}

    def kept(self, local: Tree, user: Tensor, loss: Tensor) -> Tree:
        """What a round keeps. Rows are tuned again for ranking, so none of them is kept."""
        return {"user": user, "loss": loss, **({"item": local["item"]} if self.dual else {})}

    def _round(self, shared: Tree, batch: Batch, support: Tensor, query: Tensor) -> tuple[Rows, Tensor, Tensor]:
        """Rebuild the user vector on the support part, then step the rows on the query part; the last pass's loss."""
        base = rows = shared["item"][batch["index"]]
        user = torch.zeros_like(base[0])
        total = torch.zeros_like(user[0])
        for number in range(self.rebuild):
            for slot, label, mine in ops.minibatches(self.batch_size, batch["slot"], batch["label"], support):
                sample = ops.take_rows(rows, slot)
                error, loss = ops.logistic(sample @ user, label, mine)
                user = user - self.learning_rate * (error @ sample)
                total = total + (loss if number == self.rebuild - 1 else 0.0)
        for _ in range(self.epochs):
            for slot, label, mine in ops.minibatches(self.batch_size, batch["slot"], batch["label"], query):
                error, _ = ops.logistic(ops.take_rows(rows, slot) @ user, label, mine)
                rows = ops.add_rows(rows, slot, torch.outer(error, user), scale=-self.row_rate(shared))
        return Rows(batch["index"], rows - base, len(shared["item"])), user, total / support.sum().clamp(min=1)

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return self.linear_score(shared, local, local["user"], items)

"""FedMF: Secure Federated Matrix Factorization (Chai et al., IEEE Intelligent Systems 2020), for implicit
feedback as PFedRec's authors compare with it.

| paper                  | here                                                     |
|------------------------|----------------------------------------------------------|
| V, item profiles       | `shared["item"]`, M × `factors`                          |
| u_i, user profile      | `local["user"]`, never sent                              |
| γ, learning rate       | `learning_rate`; for items × M × `item_rate`             |
| Gradient_j of a user   | `update["item"]`: the change of the rows it touched      |

The step on both sides is taken from the same point, and everyone ranks with the shared table. The paper's
homomorphic encryption is not here: the server sees each update, as the ledger says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody import ops
from homebody.core import Batch, Catalogue, Data, Method, Rows, Total, Tree, Update, param
from homebody.methods import factor_kernels
from homebody.models.logistic import logistic
from homebody.params import Range
from homebody.privacy import Channel
from homebody.rng import Rng

__all__ = ["FedMF"]


@dataclass(frozen=True)
class FedMF(Method):
    """Matrix factorisation with private user vectors and a shared item table."""

    uplink: Channel = Channel()
    factors: int = param(32, "size of a user's and of an item's vector", low=1, search=(16, 32, 64))
    learning_rate: float = param(0.1, "γ: step on the user vector", low=0, search=Range(0.01, 1, log=True))
    item_rate: float = param(
        80.0, "the step on item rows is γ × number of items × this", low=0, search=Range(8, 800, log=True)
    )
    negatives: int = param(4, "negatives drawn for each positive, anew each round", low=1, search=Range(1, 8))
    batch_size: int = param(256, "samples in a step", low=1)
    epochs: int = param(1, "passes over the round's samples", low=1, search=Range(1, 4))

    title: ClassVar[str] = "matrix factorisation: private user vectors, one shared item table"
    paper: ClassVar[str] = "Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020"

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"item": rng.normal(catalogue.n_items, self.factors)}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"user": (2.0 * rng.uniform(self.factors) - 1.0) * self.factors**-0.5}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        items, label, valid = ops.labelled(rng, data, self.negatives)
        index, slot = ops.touched(items, valid, data.catalogue.n_items)
        return {"index": index, "slot": slot, "label": label, "valid": valid}

    def asks(self, batch: Batch) -> dict[str, Tensor]:
        return {"item": batch["index"]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        base = rows = shared["item"][batch["index"]]
        user = local["user"]
        total = torch.zeros_like(user[0])
        for _ in range(self.epochs):
            for slot, label, valid in ops.minibatches(self.batch_size, batch["slot"], batch["label"], batch["valid"]):
                sample = ops.take_rows(rows, slot)
                error, loss = logistic(sample @ user, label, valid)
                rows = ops.add_rows(rows, slot, torch.outer(error, user), scale=-self.row_rate(shared))
                user = user - self.learning_rate * (error @ sample)
                total = total + loss
        mean_loss = total / (self.epochs * batch["valid"].sum()).clamp(min=1)
        return {"item": Rows(batch["index"], rows - base, len(shared["item"]))}, {"user": user, "loss": mean_loss}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {"item": shared["item"] + total.mean["item"]}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items] @ local["user"]

    def row_rate(self, shared: Tree) -> float:
        return self.learning_rate * len(shared["item"]) * self.item_rate

    def cohort(self, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
        if shared["item"].device.type != "cpu":
            return super().cohort(shared, locals_, batches)
        user = locals_["user"].clone()
        rates = (self.learning_rate, self.row_rate(shared))
        update, loss = factor_kernels.train(shared["item"], user, None, batches, rates, self.batch_size, self.epochs)
        return {"item": update}, {"user": user, "loss": loss}

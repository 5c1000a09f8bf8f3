"""FedMF: Secure Federated Matrix Factorization (Chai et al., IEEE Intelligent Systems 2020), for implicit
feedback as PFedRec's authors compare with it.

| paper                  | here                                                     |
|------------------------|----------------------------------------------------------|
| V, item profiles       | `shared["item"]`, M × `factors`                          |
| u_i, user profile      | `local["user"]`, never sent                              |
| γ, learning rate       | `learning_rate`; for items × M × `item_rate`             |
| Gradient_j of a user   | `update["item"]`: the change of the rows it touched      |

The step on both sides is taken from the same point, and everyone ranks with the shared table. All user profiles
start from one common vector: so popularity is learnt at once, and the figures of PFedRec's authors are met on sparse
data too. The paper's homomorphic encryption is not here: the server sees each update, as the ledger says.

With `dual` it is PFedRec without the offset: the user profile is the weight of a one-layer score function, which
was private all along; what is new is the order of the steps and the tuned rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody import ops
from homebody.core import About, Batch, Catalogue, Data, Rows, Tree, Update
from homebody.methods.item_table import ItemTable
from homebody.rng import Rng

__all__ = ["FedMF"]


@dataclass(frozen=True)
class FedMF(ItemTable):
    """Matrix factorisation with private user vectors and a shared item table.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FedMF(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    about: ClassVar[About] = About(
        title="matrix factorisation: private user vectors, one shared item table",
        paper="Chai et al., Secure Federated Matrix Factorization, IEEE Intelligent Systems 2020",
    )

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        # One common start: it travels with the table, for whoever joins, and never changes.
        user = (2.0 * rng.uniform(self.factors) - 1.0) * self.factors**-0.5
        return {**super().init_shared(catalogue, rng), "user": user}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"user": shared["user"], **self.untuned(shared, rng)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        base = rows = shared["item"][batch["index"]]
        user = local["user"]
        total = torch.zeros_like(user[0])
        for _ in range(self.epochs):
            for slot, label, valid in ops.minibatches(self.batch_size, batch["slot"], batch["label"], batch["valid"]):
                sample = ops.take_rows(rows, slot)
                error, loss = ops.logistic(sample @ user, label, valid)
                stepped = user - self.learning_rate * (error @ sample)
                if self.dual:
                    user = stepped
                    error, _ = ops.logistic(sample @ user, label, valid)
                rows = ops.add_rows(rows, slot, torch.outer(error, user), scale=-self.row_rate(shared))
                user = stepped
                total = total + loss
        change = Rows(batch["index"], rows - base, len(shared["item"]))
        mean_loss = total / (self.epochs * batch["valid"].sum()).clamp(min=1)
        return {"item": change}, {"user": user, "loss": mean_loss, **self.tuned(change)}

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return self.linear_score(shared, local, local["user"], items)

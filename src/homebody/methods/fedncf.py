"""FedNCF: Federated Neural Collaborative Filtering (Perifanis and Efraimidis, Knowledge-Based Systems 2022), with the
MLP alone, as PFedRec's authors compare with it.

| paper                                    | here                                                                   |
|------------------------------------------|------------------------------------------------------------------------|
| item embedding                           | `shared["item"]`, M × `factors`                                        |
| φ, layers on [user, item], then a number | `shared["layers"]`, flat; `hidden` widths                              |
| user embedding                           | `local["user"]`, never sent                                            |
| η, learning rate                         | `learning_rate`; for items × M × `item_rate`                           |
| a client's change of both                | `update["item"]`: of the rows it touched; `update["layers"]`           |

The server takes the plain mean of tables and layers. The paper's masks (secure aggregation) are the channel's
`secure-sum`. With `dual` the layers stay at home too: each client trains its own from the common start, and ranks
with its own tuned rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody import ops
from homebody.core import About, Batch, Catalogue, Rows, Tree, Update, param
from homebody.methods.item_table import ItemTable
from homebody.methods.kernels import network
from homebody.models.networks import ScoreFunction, read_widths
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["FedNCF"]


@dataclass(frozen=True)
class FedNCF(ItemTable):
    """A network on a private user vector and a shared item row; table and layers are averaged.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FedNCF(), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    learning_rate: float = param(0.5, "step on the layers", low=0, search=Range(0.05, 2, log=True))
    user_rate: float = param(
        80.0, "the step on the user vector is the learning rate × this", low=0, search=Range(1, 200, log=True)
    )
    hidden: str = param("32,16,8", "widths of the hidden layers", check=read_widths)

    about: ClassVar[About] = About(
        title="neural collaborative filtering: private user vectors, shared layers and item table",
        paper="Perifanis and Efraimidis, Federated Neural Collaborative Filtering, KBS 2022",
    )

    @property
    def function(self) -> ScoreFunction:
        return ScoreFunction(self.factors, read_widths("hidden", self.hidden), beside=self.factors)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        # Common starts, the user vector's too: they travel with the table, for whoever joins.
        start = {"layers": self.function.start(rng), "user": rng.normal(self.factors)}
        return {**super().init_shared(catalogue, rng), **start}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        layers = {"layers": shared["layers"]} if self.dual else {}
        return {"user": shared["user"], **layers, **self.untuned(shared, rng)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        base = rows = shared["item"][batch["index"]]
        start = layers = self._layers(shared, local)
        user = local["user"]
        total = torch.zeros_like(user[0])

        def at(layers: Tensor, user: Tensor, rows: Tensor) -> Tensor:
            return self.function.logit(layers, rows, user)

        for _ in range(self.epochs):
            for slot, *truth in ops.minibatches(self.batch_size, batch["slot"], batch["label"], batch["valid"]):
                sample = ops.take_rows(rows, slot)
                of_layers, of_user, of_rows, loss = ops.slopes(at, layers, user, sample, *truth)
                layers = layers - self.learning_rate * of_layers
                user = user - self.learning_rate * self.user_rate * of_user
                if self.dual:
                    _, _, of_rows, _ = ops.slopes(at, layers, user, sample, *truth)
                rows = ops.add_rows(rows, slot, of_rows, scale=-self.row_rate(shared))
                total = total + loss
        change = Rows(batch["index"], rows - base, len(shared["item"]))
        mean_loss = total / (self.epochs * batch["valid"].sum()).clamp(min=1)
        return self.sent(change, layers, start), {**self.kept(change, layers, user), "loss": mean_loss}

    def _layers(self, shared: Tree, local: Tree) -> Tensor:
        return local["layers"] if self.dual else shared["layers"]

    def sent(self, change: Rows, layers: Tensor, start: Tensor) -> Update:
        return {"item": change} if self.dual else {"item": change, "layers": layers - start}

    def kept(self, change: Rows, layers: Tensor, user: Tensor) -> Tree:
        return {"user": user, **({"layers": layers} if self.dual else {}), **self.tuned(change)}

    def logit(self, shared: Tree, local: Tree, rows: Tensor) -> Tensor:
        return network.logits(self.function, self._layers(shared, local), rows, local["user"])

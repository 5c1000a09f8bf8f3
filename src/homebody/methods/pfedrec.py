"""PFedRec: Dual Personalization on Federated Recommendation (Zhang et al., IJCAI 2023).

| paper                        | here                                        |
|------------------------------|---------------------------------------------|
| θ^m, item embedding          | `shared["item"]`, M × `factors`             |
| θ_i^s, score function        | `local["weight"]`, `local["bias"]`          |
| its layers                   | `hidden`; none: one linear layer            |
| θ_i^m, tuned item embedding  | `shared["item"]` + `local["item"]`, the change of the rows it touched |
| η, learning rate             | `learning_rate`                             |
| η′, item learning rate       | `learning_rate` × M × `item_rate`           |
| B, E                         | `batch_size`, `epochs`                      |
| D_i ∪ D_i⁻                   | `batch["slot"]`, `batch["label"]`           |

The mean runs over whole tables, rows nobody touched included; that is why η′ is so large. A client ranks with
its own tuned table as it stood before averaging, on top of the shared table it was tuned from.

With one layer it is FedMF with `dual`, and an offset.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from homebody import ops
from homebody.core import About, Batch, Catalogue, Data, Rows, Scoring, Total, Tree, Update, Work, param
from homebody.errors import HomebodyError
from homebody.methods.item_table import ItemTable
from homebody.methods.kernels import network
from homebody.models.networks import ScoreFunction, read_widths
from homebody.privacy import Channel
from homebody.rng import Rng

__all__ = ["Alone", "PFedRec"]


@dataclass(frozen=True)
class PFedRec(ItemTable):
    """Private score function, item table tuned per user; only the table is averaged.

    >>> import homebody as hb
    >>> model = hb.fit(hb.PFedRec(), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    dual: bool = param(True, "false: a joint step, and everyone ranks with the shared table")
    hidden: str = param(
        "", "widths of the score function's hidden layers, such as 16,8; empty: one linear layer", check=read_widths
    )

    about: ClassVar[About] = About(
        title="dual personalisation: private score function, item table tuned per user",
        paper="Zhang et al., Dual Personalization on Federated Recommendation, IJCAI 2023",
    )

    @property
    def function(self) -> ScoreFunction:
        return ScoreFunction(self.factors, read_widths("hidden", self.hidden))

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        # One common initial score function: it travels with the table, for whoever joins, and never changes.
        start = self.function.start(rng)
        return {**super().init_shared(catalogue, rng), "weight": start[:-1], "bias": start[-1]}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"weight": shared["weight"], "bias": shared["bias"], **self.untuned(shared, rng)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        base = rows = shared["item"][batch["index"]]
        theta = torch.cat([local["weight"], local["bias"][None]])
        total = torch.zeros_like(theta[0])
        for _ in range(self.epochs):
            for slot, *truth in ops.minibatches(self.batch_size, batch["slot"], batch["label"], batch["valid"]):
                sample = ops.take_rows(rows, slot)
                of_theta, of_rows, loss = ops.slopes(self.function.logit, theta, sample, *truth)
                theta = theta - self.learning_rate * of_theta
                if self.dual:
                    _, of_rows, _ = ops.slopes(self.function.logit, theta, sample, *truth)
                rows = ops.add_rows(rows, slot, of_rows, scale=-self.row_rate(shared))
                total = total + loss
        change = Rows(batch["index"], rows - base, len(shared["item"]))
        mean_loss = total / (self.epochs * batch["valid"].sum()).clamp(min=1)
        return {"item": change}, {"weight": theta[:-1], "bias": theta[-1], "loss": mean_loss, **self.tuned(change)}

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        if self.function.hidden:
            return super().score(shared, local, data, items)
        return self.linear_score(shared, local, local["weight"], items) + local["bias"]

    def logit(self, shared: Tree, local: Tree, rows: Tensor) -> Tensor:
        return network.logits(self.function, torch.cat([local["weight"], local["bias"][None]]), rows, None)


@dataclass(frozen=True)
class Alone(PFedRec):
    """Federation switched off: each device trains PFedRec's score function and item table on its own history alone.

    Nothing is sent, so ε = 0. It shows what a method owes to others' histories and, under the published protocol, how
    much of a score comes without learning (docs/published-protocol.md). Every client keeps a whole table of its own, so
    it is for small populations.

    >>> import homebody as hb
    >>> model = hb.fit(hb.Alone(), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.epsilon
    {'server': 0.0, 'clients': 0.0, 'public': 0.0}
    """

    about: ClassVar[About] = replace(
        PFedRec.about,
        title="federation switched off: each device trains its own table and score function",
        paper="",
        diagnostic=True,
        sends=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uplink != Channel():
            raise HomebodyError("Nothing leaves a device that trains alone: leave out the stages.")

    @property
    def scoring(self) -> Scoring:
        return Scoring()

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        return super().work(catalogue, longest) + Work(memory=24 * self.shared_numbers(catalogue))  # a table of its own

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"weight": shared["weight"], "bias": shared["bias"], "item": shared["item"]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        update, kept = super().client({**shared, "item": local["item"]}, local, batch)
        return {}, {**kept, "item": local["item"] + update["item"].dense()}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return shared, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return self.logit(shared, local, local["item"][items])

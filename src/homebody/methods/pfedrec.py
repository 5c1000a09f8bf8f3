"""PFedRec: Dual Personalization on Federated Recommendation (Zhang et al., IJCAI 2023).

| paper                        | here                                        |
|------------------------------|---------------------------------------------|
| θ^m, item embedding          | `shared["item"]`, M × `factors`             |
| θ_i^s, score function        | `local["weight"]`, `local["bias"]`          |
| θ_i^m, tuned item embedding  | `shared["item"]` + `local["item"]`, the change of the rows it touched |
| η, learning rate             | `learning_rate`                             |
| η′, item learning rate       | `learning_rate` × M × `item_rate`           |
| B, E                         | `batch_size`, `epochs`                      |
| D_i ∪ D_i⁻                   | `batch["slot"]`, `batch["label"]`           |

The mean runs over whole tables, rows nobody touched included; that is why η′ is so large. A client ranks with
its own tuned table as it stood before averaging, on top of the shared table it was tuned from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from homebody import ops
from homebody.core import Batch, Catalogue, Data, Method, Rows, Total, Tree, Update, param
from homebody.methods import factor_kernels
from homebody.models.logistic import logistic
from homebody.params import Range
from homebody.privacy import Channel
from homebody.rng import Rng

__all__ = ["PFedRec"]


@dataclass(frozen=True)
class PFedRec(Method):
    """Private one-layer score function, item table tuned per user; only the table is averaged."""

    uplink: Channel = Channel()
    factors: int = param(32, "size of an item's embedding", low=1, search=(16, 32, 64))
    learning_rate: float = param(0.1, "η: step on the score function", low=0, search=Range(0.01, 1, log=True))
    item_rate: float = param(
        80.0, "the step on item rows is η × number of items × this", low=0, search=Range(8, 800, log=True)
    )
    negatives: int = param(4, "negatives drawn for each positive, anew each round", low=1, search=Range(1, 8))
    batch_size: int = param(256, "B: samples in a step", low=1)
    epochs: int = param(1, "E: passes over the round's samples", low=1, search=Range(1, 4))

    title: ClassVar[str] = "dual personalisation: private score function, item table tuned per user"
    paper: ClassVar[str] = "Zhang et al., Dual Personalization on Federated Recommendation, IJCAI 2023"
    scores_from: ClassVar[Literal["latest", "base"]] = "base"

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        # One common initial score function: it travels with the table, for whoever joins, and never changes.
        start = (2.0 * rng.uniform(self.factors + 1) - 1.0) * self.factors**-0.5
        item = rng.normal(catalogue.n_items, self.factors)
        return {"item": item, "weight": start[:-1], "bias": start[-1]}

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        nothing = Rows(rng.integers(1, 0), shared["item"][:0], len(shared["item"]))
        return {"weight": shared["weight"], "bias": shared["bias"], "item": nothing}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        items, label, valid = ops.labelled(rng, data, self.negatives)
        index, slot = ops.touched(items, valid, data.catalogue.n_items)
        return {"index": index, "slot": slot, "label": label, "valid": valid}

    def asks(self, batch: Batch) -> dict[str, Tensor]:
        return {"item": batch["index"]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        base = rows = shared["item"][batch["index"]]
        weight, bias = local["weight"], local["bias"]
        total = torch.zeros_like(bias)
        for _ in range(self.epochs):
            for slot, label, valid in ops.minibatches(self.batch_size, batch["slot"], batch["label"], batch["valid"]):
                sample = ops.take_rows(rows, slot)
                error, loss = logistic(sample @ weight + bias, label, valid)
                weight = weight - self.learning_rate * (error @ sample)
                bias = bias - self.learning_rate * error.sum()
                error, _ = logistic(sample @ weight + bias, label, valid)
                rows = ops.add_rows(rows, slot, torch.outer(error, weight), scale=-self.row_rate(shared))
                total = total + loss
        tuned = Rows(batch["index"], rows - base, len(shared["item"]))
        mean_loss = total / (self.epochs * batch["valid"].sum()).clamp(min=1)
        return {"item": tuned}, {"weight": weight, "bias": bias, "item": tuned, "loss": mean_loss}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return {**shared, "item": shared["item"] + total.mean["item"]}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        weight, tuned = local["weight"], local["item"]
        common = shared["item"][items] @ weight + local["bias"]
        return common + ops.overlay(torch.zeros_like(common), items, tuned.index, tuned.value @ weight, tuned.size)

    def row_rate(self, shared: Tree) -> float:
        return self.learning_rate * len(shared["item"]) * self.item_rate

    def cohort(self, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
        if shared["item"].device.type != "cpu":
            return super().cohort(shared, locals_, batches)
        weight, bias = locals_["weight"].clone(), locals_["bias"].clone()
        rates = (self.learning_rate, self.row_rate(shared))
        tuned, loss = factor_kernels.train(shared["item"], weight, bias, batches, rates, self.batch_size, self.epochs)
        return {"item": tuned}, {"weight": weight, "bias": bias, "item": tuned, "loss": loss}

"""BiasedMF: logistic matrix factorisation with an item bias; a whole method in one file."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.func import grad_and_value
from torch.nn.functional import binary_cross_entropy_with_logits

from homebody import ops
from homebody.core import About, Method, Rows, param
from homebody.privacy import Channel


@dataclass(frozen=True)
class BiasedMF(Method):
    """A person keeps a vector; everyone learns each item's vector and, in the last column, its bias."""

    uplink: Channel = Channel()
    factors: int = param(8, "size of a person's and of an item's vector", low=1)
    learning_rate: float = param(0.2, "size of a step", low=0)
    negatives: int = param(4, "negatives drawn for each positive, anew each round", low=1)

    about: ClassVar[About] = About(title="logistic matrix factorisation with an item bias", rounds=40)

    def init_shared(self, catalogue, rng):
        return {"item": 0.1 * rng.normal(catalogue.n_items, self.factors + 1)}

    def init_local(self, shared, rng):
        return {"user": 0.1 * rng.normal(self.factors)}

    def prepare(self, data, rng):
        items, label, valid = ops.labelled(rng, data, self.negatives)
        index, slot = ops.touched(items, valid, data.catalogue.n_items)
        return {"index": index, "slot": slot, "label": label, "valid": valid.float()}

    def client(self, shared, local, batch):
        rows, user = shared["item"][batch["index"]], local["user"]
        (g_user, g_rows), loss = grad_and_value(bce, argnums=(0, 1))(user, rows[batch["slot"]], batch)
        step = ops.add_rows(torch.zeros_like(rows), batch["slot"], g_rows, scale=-self.learning_rate)
        step = torch.cat([step, torch.ones_like(rows[:, :1])], dim=1)  # one more person touched this row
        kept = {"user": user - self.learning_rate * g_user, "loss": loss / batch["valid"].sum()}
        return {"item": Rows(batch["index"], step, len(shared["item"]))}, kept

    def server(self, shared, state, total):
        step, people = total.sum["item"].tensor_split([self.factors + 1], dim=1)
        return {"item": shared["item"] + step / people.clamp(min=1)}, state

    def score(self, shared, local, data, items):
        return logits(local["user"], shared["item"][items])


def logits(user, rows):
    return rows[:, :-1] @ user + rows[:, -1]


def bce(user, rows, batch):
    z = logits(user, rows)
    return binary_cross_entropy_with_logits(z, batch["label"], batch["valid"], reduction="sum")

"""FedGNN: Federated Graph Neural Network for Privacy-Preserving Recommendation (Wu et al., 2021, arXiv:2102.04925), in
its simple form: each device trains on the graph of its own person and items.

| paper                                  | here                                                                     |
|----------------------------------------|--------------------------------------------------------------------------|
| e^t_j, item embeddings                 | `shared["item"]`, M × `factors`                                          |
| e^u, user embedding                    | `local["user"]`, never sent                                              |
| the GNN, as graph attention (GAT)      | `shared["transform"]`, W, and `shared["attention"]`, a                   |
| h^u, the user's node after the layer   | e^u + Σ_j α_j W e^t_j; α = softmax of LeakyReLU(a · [W e^u, W e^t_j])    |
| h^t_i, an item's node after the layer  | e^t_i + W e^u: the person is the only neighbour there is                 |
| predicted preference                   | the product of the two                                                   |
| local gradients of items and model     | `update`: the changes of the rows it touched, of W and of a              |
| aggregation                            | the mean; that of the rows × M × `item_rate`                             |

What is left out, or other than published:

- **No neighbours from other devices.** The paper finds the users with items in common through a server that matches
  encrypted identifiers, and adds their embeddings to the graph. None of that encryption is here, nor the expansion.
- **No noise and no pseudo-interacted items in the method.** The paper's local differential privacy is a matter of the
  channel (`clip`, `laplace`); the sampled negatives are among the rows that a device sends, but are no such promise.
- The paper predicts ratings. Here it is interactions, with cross-entropy over a person's items and `negatives` drawn
  for each. An item would then give itself away: it is a neighbour of the person, and a negative is not. So while an
  item is predicted its own edge is taken out of the user's node, and every candidate's node hears from the person.
- A layer keeps its node's own embedding beside the message: among many items it would have next to no weight.
- User embeddings start from one common vector, so that the common direction of the table learns popularity at once.

Someone who did not train starts from that vector too, and takes the same local steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.functional import leaky_relu, softplus

from homebody import ops
from homebody.core import About, Batch, Catalogue, Data, Method, Rows, Total, Tree, Update, Work, param
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["FedGNN"]

SLOPE = 0.2
"""The slope of LeakyReLU below zero, as in GAT."""


@dataclass(frozen=True)
class FedGNN(Method):
    """Graph attention of a person over their own items; private user embeddings, shared items and weights.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FedGNN(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    uplink: Channel = Channel()
    factors: int = param(32, "size of a user's and of an item's embedding", low=1, search=(16, 32, 64))
    learning_rate: float = param(0.1, "learning rate of all local steps", low=0, search=Range(0.02, 0.3, log=True))
    item_rate: float = param(
        1.0,
        "the server's step on item rows is the mean × number of items × this",
        low=0,
        search=Range(0.1, 2, log=True),
    )
    steps: int = param(5, "local steps a round, each on all of its samples", low=1, search=Range(1, 20))
    negatives: int = param(4, "negatives drawn for each positive, anew each round", low=1, search=Range(1, 8))
    init_scale: float = param(0.3, "spread of the initial embeddings", low=1e-9, search=Range(0.1, 1, log=True))

    about: ClassVar[About] = About(
        title="graph attention over one's own items: private user embeddings, shared items and weights",
        paper="Wu et al., FedGNN: Federated Graph Neural Network for Privacy-Preserving Recommendation, 2021",
    )

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        size = self.factors
        return {
            "item": self.init_scale * rng.normal(catalogue.n_items, size),
            "transform": torch.eye(size, device=rng.key.device),
            "attention": size**-0.5 * rng.normal(2 * size),
            "user": self.init_scale * rng.normal(size),
        }

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, samples, n_items = self.factors, longest * (1 + self.negatives), catalogue.n_items
        numbers = n_items * F + F * F + 3 * F
        held = 3 * numbers + samples * (24 * F + 64) + longest * 32 * F + 24 * F * F + n_items * (2 * F + 8)
        operations = self.steps * (samples * 100 * (F + 4) + (12 * longest + 40) * F * F)
        operations += samples * 400 + n_items * 8 * F
        rows = min(longest, n_items) + min(samples, n_items)
        return Work.of(held, operations, calls=300 * self.steps + 400, sent=numbers + rows * (F + 1))

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"user": shared["user"]}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        drawn = ops.negatives(rng, data, len(data.items) * self.negatives)
        met = (data.valid[:, None].expand(-1, self.negatives)).flatten() & (drawn >= 0)
        own, times = _counted(data.items, data.valid, data.catalogue.n_items)
        others, drawn_times = _counted(drawn.clamp(min=0), met, data.catalogue.n_items)
        return {"own": own, "times": times, "drawn": others, "drawn_times": drawn_times}

    def asks(self, batch: Batch) -> dict[str, Tensor]:
        return {"item": torch.cat([batch["own"], batch["drawn"]])}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        own, times, drawn, drawn_times = (batch[name] for name in ("own", "times", "drawn", "drawn_times"))
        samples = (times.sum() + drawn_times.sum()).clamp(min=1)

        def loss(user: Tensor, mine: Tensor, theirs: Tensor, *layer: Tensor) -> Tensor:
            taken, left = _logits(user, mine, own >= 0, theirs, *layer)
            return (times @ softplus(-taken) + drawn_times @ softplus(left)) / samples

        table = shared["item"]
        start = (local["user"], table[own], table[drawn], shared["transform"], shared["attention"])
        now, total = start, torch.zeros_like(samples)
        for _ in range(self.steps):
            slopes, value = grad_and_value(loss, argnums=tuple(range(len(now))))(*now)
            now = tuple(value - self.learning_rate * slope for value, slope in zip(now, slopes, strict=True))
            total = total + value
        _, mine, theirs, transform, attention = (value - begun for value, begun in zip(now, start, strict=True))
        item = Rows(torch.cat([own, drawn]), torch.cat([mine, theirs]), len(table))
        kept = {"user": now[0], "loss": total / self.steps}
        return {"item": item, "transform": transform, "attention": attention}, kept

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        mean = total.mean
        # A row is in few people's samples, and one among many there: its mean slope is about 1 / M of a sample's.
        change = {**mean, "item": len(shared["item"]) * self.item_rate * mean["item"]}
        return {name: value + change[name] if name in change else value for name, value in shared.items()}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        node = self.node(shared, local, data)
        return shared["item"][items] @ node + node @ (shared["transform"] @ local["user"])

    def node(self, shared: Tree, local: Tree, data: Data) -> Tensor:
        """The person's node after the layer."""
        own, _ = ops.touched(data.items, data.valid, len(shared["item"]))
        user, mine, transform = local["user"], shared["item"][own], shared["transform"]
        strength = _strengths(user, mine, own >= 0, transform, shared["attention"])
        return user + _message(_weights(strength), mine, transform)


def _counted(items: Tensor, valid: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """The distinct items, padded with -1, and how often each occurs."""
    index, slot = ops.touched(items, valid, n_items)
    count = ops.add_rows(torch.zeros_like(index[:, None], dtype=torch.float32), slot, valid[:, None].float())
    return index, count[:, 0]


def _strengths(user: Tensor, mine: Tensor, real: Tensor, transform: Tensor, attention: Tensor) -> Tensor:
    """The attention of the person's node to each of their items, before the softmax."""
    to_user, to_items = (attention.view(2, -1) @ transform).unbind()
    return torch.where(real, leaky_relu(user @ to_user + mine @ to_items, SLOPE), -torch.inf)


def _weights(strength: Tensor) -> Tensor:
    """The numerators of the softmax, the largest of which is 1; 0 if there are no items."""
    return (strength - strength.detach().amax().clamp(min=-1e30)).exp()


def _message(weight: Tensor, mine: Tensor, transform: Tensor) -> Tensor:
    """The message to a node: Σ_j α_j W e_j."""
    return transform @ (weight @ mine) / weight.sum().clamp(min=0.5)


def _logits(
    user: Tensor, mine: Tensor, real: Tensor, theirs: Tensor, transform: Tensor, attention: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits of the person's items, each without its own edge in the user's node, and of the drawn negatives."""
    strength = _strengths(user, mine, real, transform, attention)
    weight = _weights(strength)
    # Taken off the sums, any item but the strongest leaves about 1 or more; without that one they are formed anew. The
    # bounds are for people without items alone: at 1, rounding would meet them and cut the slope.
    strongest = torch.arange(len(mine), device=mine.device) == strength.argmax()
    passed = weight[:, None] * (mine @ transform.T)
    others = torch.where(strongest, 1.0, weight.sum() - weight).clamp(min=0.5)
    second = _message(_weights(torch.where(strongest, -torch.inf, strength)), mine, transform)
    without = torch.where(strongest[:, None], second, (passed.sum(0) - passed) / others[:, None])
    heard = transform @ user
    taken = ((user + without) * (mine + heard)).sum(1)
    return taken, (theirs + heard) @ (user + _message(weight, mine, transform))

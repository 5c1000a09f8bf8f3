"""NCF: Neural Collaborative Filtering (He, Liao, Zhang, Nie, Hu and Chua, WWW 2017).

| paper                                             | here                                                     |
|---------------------------------------------------|----------------------------------------------------------|
| p_u^G, q_i^G and p_u^M, q_i^M                     | a row of `users`, of `items`: GMF's part, then the MLP's |
| φ^GMF = p_u^G ∘ q_i^G (equation 8)                | `factors` numbers                                        |
| φ^MLP, ReLU layers on [p_u^M, q_i^M] (10)         | `layers`; the first width is both vectors side by side   |
| ŷ_ui = σ(hᵀ [φ^GMF, φ^MLP]) (11, 12)              | `Network.logit`; `model` says which parts there are      |
| L, log-loss on Y ∪ Y⁻ (7)                         | mean over a batch of `batch_size`                        |
| Adam                                              | `learning_rate`; of embeddings only touched rows move    |

NeuMF's two parts are trained together from a random start: the paper's other way, to train them apart first
and to join them by α, is left out. A late-comer's row takes the same steps after each pass, with the items and
the layers as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from homebody.core import About, Users, param
from homebody.errors import HomebodyError, refuse_unknown
from homebody.methods.kernels.mf import Embeddings, Samples, draw
from homebody.models.networks import Network
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["NCF"]

MODELS = ("gmf", "mlp", "neumf")
ONLY = torch.zeros(1, dtype=torch.int64)


class Learnt(NamedTuple):
    """All parameters. The layers are one row, which every step touches."""

    users: Embeddings
    items: Embeddings
    layers: Embeddings


@dataclass(frozen=True)
class NCF(Reference):
    """A network on a user's and an item's embedding, trained on everyone's histories.

    >>> import homebody as hb
    >>> model = hb.fit(hb.NCF(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    model: str = param("neumf", "gmf, mlp, or neumf: both", search=("gmf", "mlp", "neumf"))
    factors: int = param(32, "size of GMF's vectors", low=1, search=(8, 16, 32))
    layers: str = param("64,32,16,8", "widths of the MLP, from its input (two vectors side by side) to its last layer")
    learning_rate: float = param(0.001, "Adam's learning rate", low=0, search=Range(0.0003, 0.01, log=True))
    negatives: int = param(4, "negatives drawn for each positive, anew each pass", low=1)
    batch_size: int = param(1024, "samples in a step", low=1)
    init_scale: float = param(0.01, "standard deviation of the initial embeddings", low=0)

    about: ClassVar[About] = About(
        title="neural collaborative filtering on everyone's histories, in one place",
        paper="He et al., Neural Collaborative Filtering, WWW 2017",
        rounds=30,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unknown("model of ncf", [self.model], MODELS)
        widths = [width.strip() for width in self.layers.split(",")]
        if len(widths) < 2 or not all(width.isdecimal() and int(width) for width in widths) or int(widths[0]) % 2:
            raise HomebodyError(
                f"layers must be two or more widths, the first of them even, such as 64,32,16,8; not {self.layers!r}."
            )

    @property
    def network(self) -> Network:
        widths = tuple(int(width) for width in self.layers.split(","))
        return Network(0 if self.model == "mlp" else self.factors, () if self.model == "gmf" else widths)

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        rng, late, network = Rng.of(seed, "ncf"), ~histories.learn, self.network
        learnt = Learnt(
            Embeddings(self.init_scale * rng.fold("users").normal(len(late), network.embedding)),
            Embeddings(self.init_scale * rng.fold("items").normal(histories.catalogue.n_items, network.embedding)),
            Embeddings(network.start(rng.fold("layers"))[None]),
        )
        steps = late_steps = 0

        def score(users: Users, items: Tensor) -> Tensor:
            p, q = learnt.users.value[torch.from_numpy(users)], learnt.items.value[items]
            return network.scores(p, q, learnt.layers.value[0])

        for number in count():
            samples = draw(histories, histories.learn, self.negatives, rng.fold("learn", number))
            steps = self._train(network, samples, learnt, steps, frozen=False)
            if late.any():
                samples = draw(histories, late, self.negatives, rng.fold("late", number))
                late_steps = self._train(network, samples, learnt, late_steps, frozen=True)
            yield score

    def _train(self, network: Network, samples: Samples, learnt: Learnt, steps: int, frozen: bool) -> int:
        """One pass of mini-batches; frozen: only users' rows move. Returns the number of steps so far."""
        users, items, labels = (torch.from_numpy(part) for part in samples)
        for start in range(0, len(labels), self.batch_size):
            batch = slice(start, start + self.batch_size)
            p, q = learnt.users.value[users[batch]], learnt.items.value[items[batch]]
            weights = learnt.layers.value[0].clone()
            moving = [p] if frozen else [p, q, weights]
            for part in moving:
                part.requires_grad_()
            loss = binary_cross_entropy_with_logits(network.logit(p, q, weights), labels[batch])
            slopes = torch.autograd.grad(loss, moving)
            steps += 1
            learnt.users.step(users[batch], slopes[0], self.learning_rate, steps)
            if not frozen:
                learnt.items.step(items[batch], slopes[1], self.learning_rate, steps)
                learnt.layers.step(ONLY, slopes[2][None], self.learning_rate, steps)
        return steps

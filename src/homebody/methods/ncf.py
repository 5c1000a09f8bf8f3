"""NCF: Neural Collaborative Filtering (He, Liao, Zhang, Nie, Hu and Chua, WWW 2017).

| paper                                             | here                                                     |
|---------------------------------------------------|----------------------------------------------------------|
| p_u^G, q_i^G and p_u^M, q_i^M                     | a row of `users`, of `items`: GMF's part, then the MLP's |
| φ^GMF = p_u^G ∘ q_i^G (equation 8)                | `factors` numbers                                        |
| φ^MLP, ReLU layers on [p_u^M, q_i^M] (10)         | `layers`; the first width is both vectors side by side   |
| ŷ_ui = σ(hᵀ [φ^GMF, φ^MLP]) (11, 12)              | `_logit`; `model` says which parts there are             |
| L, log-loss on Y ∪ Y⁻ (7)                         | mean over a batch of `batch_size`                        |
| Adam                                              | `learning_rate`; of embeddings only touched rows move    |

NeuMF's two parts are trained together from a random start: the paper's other way, to train them apart first
and to join them by α, is left out. A late-comer's row takes the same steps after each pass, with the items and
the layers as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from math import prod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from homebody.core import Users, param
from homebody.errors import HomebodyError, unknown_name
from homebody.methods.mf_kernels import Embeddings, Samples, draw
from homebody.reference import Histories, Reference, Score
from homebody.rng import Rng

__all__ = ["NCF"]

MODELS = ("gmf", "mlp", "neumf")
NUMBERS_AT_ONCE = 1 << 20
"""How large the MLP's first layer may grow while scoring."""
ONLY = torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class NCF(Reference):
    """What a network makes of a user's and an item's embedding, on everyone's histories."""

    model: str = param("neumf", "gmf, mlp, or neumf: both")
    factors: int = param(32, "size of GMF's vectors", low=1)
    layers: str = param("64,32,16,8", "widths of the MLP, from its input (two vectors side by side) to its last layer")
    learning_rate: float = param(0.0005, "Adam's step", low=0)
    negatives: int = param(4, "negatives drawn for each positive, anew each pass", low=1)
    batch_size: int = param(256, "samples in a step", low=1)
    init_scale: float = param(0.01, "standard deviation of the initial embeddings", low=0)

    default_rounds: ClassVar[int] = 30
    title: ClassVar[str] = "neural collaborative filtering on everyone's histories, in one place"
    paper: ClassVar[str] = "He et al., Neural Collaborative Filtering, WWW 2017"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in MODELS:
            raise unknown_name("model of ncf", self.model, MODELS)
        widths = self.layers.replace(" ", "").split(",")
        if len(widths) < 2 or not all(width.isdecimal() and int(width) for width in widths) or int(widths[0]) % 2:
            raise HomebodyError(
                f"layers must be two or more widths, the first of them even, such as 64,32,16,8; not {self.layers!r}."
            )

    @property
    def product(self) -> int:
        """How much of an embedding is GMF's; the rest is the MLP's."""
        return 0 if self.model == "mlp" else self.factors

    @property
    def tower(self) -> list[int]:
        """The MLP's widths; none without one."""
        return [] if self.model == "gmf" else [int(width) for width in self.layers.split(",")]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Weights and offsets of each layer, then h and its offset."""
        hidden = [shape for low, high in pairwise(self.tower) for shape in ((low, high), (high,))]
        return [*hidden, (self.product + (self.tower or [0])[-1],), (1,)]

    def fit(self, histories: Histories, seed: int) -> Iterator[Score]:
        rng, late = Rng.of(seed, "ncf"), ~histories.learn
        size = self.product + (self.tower or [0])[0] // 2
        users = Embeddings(self.init_scale * rng.fold("users").normal(len(late), size))
        items = Embeddings(self.init_scale * rng.fold("items").normal(histories.catalogue.n_items, size))
        layers = Embeddings(self._start(rng.fold("layers"))[None])  # one row that every step touches
        steps = late_steps = 0
        for number in count():
            samples = draw(histories, histories.learn, self.negatives, rng.fold("learn", number))
            steps = self._train(samples, users, items, layers, steps)
            if late.any():
                samples = draw(histories, late, self.negatives, rng.fold("late", number))
                late_steps = self._train(samples, users, items, layers, late_steps, frozen=True)
            yield partial(self._score, users.value, items.value, layers.value[0])

    def _start(self, rng: Rng) -> Tensor:
        """Glorot's uniform weights for the layers and for h, offsets of zero."""
        parts = [torch.zeros(shape) for shape in self.shapes]
        for weight in [*parts[:-2:2], parts[-2]]:
            spread = (6.0 / (sum(weight.shape) + (weight.ndim == 1))) ** 0.5
            weight += spread * (2.0 * rng.uniform(weight.numel()) - 1.0).reshape(weight.shape)
        return torch.cat([part.flatten() for part in parts])

    def _train(
        self,
        samples: Samples,
        users: Embeddings,
        items: Embeddings,
        layers: Embeddings,
        steps: int,
        frozen: bool = False,
    ) -> int:
        """A pass of mini-batches; with `frozen`, of the users' rows alone."""
        batches = zip(*(torch.from_numpy(part).split(self.batch_size) for part in samples), strict=True)
        for steps, (user, item, label) in enumerate(batches, start=steps + 1):  # noqa: B020, PLW2901
            p, q, flat = users.value[user], items.value[item], layers.value[0].clone()
            moving = [p] if frozen else [p, q, flat]
            for part in moving:
                part.requires_grad_()
            loss = binary_cross_entropy_with_logits(self._logit(p, q, flat), label)
            slopes = torch.autograd.grad(loss, moving)
            users.step(user, slopes[0], self.learning_rate, steps)
            if not frozen:
                items.step(item, slopes[1], self.learning_rate, steps)
                layers.step(ONLY, slopes[2][None], self.learning_rate, steps)
        return steps

    def _logit(self, p: Tensor, q: Tensor, flat: Tensor) -> Tensor:
        """hᵀ [φ^GMF, φ^MLP] of users and items in pairs."""
        *hidden, h, offset = self._unpack(flat)
        cut, half = self.product, (self.tower or [0])[0] // 2
        logit = (p[:, :cut] * q[:, :cut]) @ h[:cut] + offset
        if not hidden:
            return logit
        first = torch.addmm(hidden[1], p[:, cut:], hidden[0][:half]) + q[:, cut:] @ hidden[0][half:]
        return logit + _climb(first, hidden[2:]) @ h[cut:]

    @torch.no_grad()
    def _score(self, p: Tensor, q: Tensor, flat: Tensor, users: Users, items: Tensor) -> Tensor:
        """The logit of every user with every item, in pieces: the MLP's layers are too large for all at once."""
        *hidden, h, offset = self._unpack(flat)
        cut, half = self.product, (self.tower or [0])[0] // 2
        p, q = p[torch.from_numpy(users)], q[items]
        out = (p[:, :cut] * h[:cut]) @ q[:, :cut].T + offset
        if not hidden:
            return out
        of_user, of_item = p[:, cut:] @ hidden[0][:half] + hidden[1], q[:, cut:] @ hidden[0][half:]
        pairs = max(1, NUMBERS_AT_ONCE // self.tower[1])
        wide = max(1, min(pairs, len(items)))
        for column in range(0, len(items), wide):
            for row in range(0, len(users), pairs // wide):
                first = of_user[row : row + pairs // wide, None] + of_item[column : column + wide]
                out[row : row + pairs // wide, column : column + wide] += _climb(first, hidden[2:]) @ h[cut:]
        return out

    def _unpack(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _climb(first: Tensor, layers: list[Tensor]) -> Tensor:
    """From the first layer, before its ReLU, to the last, after it."""
    x = first.relu()
    for weight, offset in zip(layers[::2], layers[1::2], strict=True):
        x = (x @ weight + offset).relu()
    return x

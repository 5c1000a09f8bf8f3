"""The network of neural collaborative filtering, on a user's and an item's embedding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from homebody.rng import Rng

__all__ = ["Network"]

NUMBERS_AT_ONCE = 1 << 20
"""Limit on the first layer's activations while all users are scored with all items."""


@dataclass(frozen=True)
class Network:
    """GMF on the first `product` numbers of an embedding, an MLP with these `widths` on the others.

    Without widths there is no MLP. The weights are one flat vector.

    >>> network = Network(product=2, widths=(6, 4))
    >>> network.embedding
    5
    >>> weights = network.start(Rng.of(0))
    >>> network.logit(torch.ones(7, 5), torch.ones(7, 5), weights).shape
    torch.Size([7])
    """

    product: int
    widths: tuple[int, ...] = ()

    @property
    def half(self) -> int:
        """The MLP's part of an embedding."""
        return self.widths[0] // 2 if self.widths else 0

    @property
    def embedding(self) -> int:
        return self.product + self.half

    @cached_property
    def ends(self) -> list[int]:
        """Where each part of the flat weights but the last ends."""
        return list(accumulate(prod(shape) for shape in self.shapes))[:-1]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Weights and offset of each layer, then h and its offset."""
        layers = [shape for low, high in pairwise(self.widths) for shape in ((low, high), (high,))]
        return [*layers, (self.product + (self.widths or (0,))[-1],), (1,)]

    def start(self, rng: Rng) -> Tensor:
        """Glorot's uniform weights, offsets of zero."""
        parts = [torch.zeros(shape) for shape in self.shapes]
        for weight in parts[::2]:
            spread = (6.0 / (weight.shape[0] + (weight.shape[1] if weight.ndim == 2 else 1))) ** 0.5
            weight += spread * (2.0 * rng.uniform(*weight.shape) - 1.0)
        return torch.cat([part.flatten() for part in parts])

    def logit(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """hᵀ [φ^GMF, φ^MLP] for users (B, size) and items (B, size) in pairs."""
        *layers, h, offset = self._parts(weights)
        cut = self.product
        logit = (p[:, :cut] * q[:, :cut]) @ h[:cut] + offset
        if not layers:
            return logit
        of_user, of_item = p[:, cut:] @ layers[0][: self.half], q[:, cut:] @ layers[0][self.half :]
        return logit + _climb(of_user + of_item + layers[1], layers[2:]) @ h[cut:]

    @torch.no_grad()
    def scores(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """The logits of all users (B, size) with all items (N, size), in pieces that fit into a cache."""
        *layers, h, offset = self._parts(weights)
        cut = self.product
        out = (p[:, :cut] * h[:cut]) @ q[:, :cut].T + offset
        if not layers:
            return out
        of_user, of_item = p[:, cut:] @ layers[0][: self.half] + layers[1], q[:, cut:] @ layers[0][self.half :]
        pairs = max(1, NUMBERS_AT_ONCE // self.widths[1])
        wide = max(1, min(pairs, len(q)))
        high = pairs // wide
        for row in range(0, len(p), high):
            for column in range(0, len(q), wide):
                first = of_user[row : row + high, None] + of_item[column : column + wide]
                out[row : row + high, column : column + wide] += _climb(first, layers[2:]) @ h[cut:]
        return out

    def _parts(self, weights: Tensor) -> list[Tensor]:
        parts = weights.tensor_split(self.ends)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def _climb(first: Tensor, layers: list[Tensor]) -> Tensor:
    """From the first layer, before its ReLU, to the last, after it."""
    x = first.relu()
    for weight, offset in zip(layers[::2], layers[1::2], strict=True):
        x = (x @ weight + offset).relu()
    return x

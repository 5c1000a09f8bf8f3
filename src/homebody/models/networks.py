"""Small networks that methods share. The weights of each are one flat vector.

`ScoreFunction` scores an item's row, alone or beside a person's vector. `GRU` encodes sequences, `FeedForward` items.
`Network` is that of neural collaborative filtering, on a user's and an item's embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor

from homebody.errors import HomebodyError
from homebody.rng import Rng

__all__ = ["GRU", "FeedForward", "Flat", "Network", "ScoreFunction", "glorot", "read_widths", "tower_widths"]

NUMBERS_AT_ONCE = 1 << 20
"""Limit on the first layer's activations while `Network` scores all users with all items."""


class Flat(ABC):
    """A network whose weights are one flat vector."""

    @property
    @abstractmethod
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of the weights and offsets, layer by layer."""

    @property
    def size(self) -> int:
        """How many weights there are."""
        return sum(prod(shape) for shape in self.shapes)

    def parts(self, weights: Tensor) -> list[Tensor]:
        """The flat vector as weights and offsets."""
        ends = list(accumulate(prod(shape) for shape in self.shapes))[:-1]
        return [part.view(shape) for part, shape in zip(weights.tensor_split(ends), self.shapes, strict=True)]


def layer_shapes(widths: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes of the weights and the offset of each layer."""
    return [shape for low, high in pairwise(widths) for shape in ((low, high), (high,))]


def glorot(rng: Rng, low: int, high: int) -> Tensor:
    """Uniform weights within √(6 / (inputs + outputs))."""
    return (6.0 / (low + high)) ** 0.5 * (2.0 * rng.uniform(low, high) - 1.0)


def _within_roots(widths: Sequence[int], rng: Rng) -> Tensor:
    """Weights and offsets, uniform within one over the root of a layer's inputs."""
    device = rng.key.device
    bounds = torch.cat([torch.full(((low + 1) * high,), low**-0.5, device=device) for low, high in pairwise(widths)])
    return (2.0 * rng.uniform(len(bounds)) - 1.0) * bounds


@dataclass(frozen=True)
class ScoreFunction(Flat):
    """Layers with ReLU (or a sigmoid) between them and one number at the end; its weights are one flat vector.

    `beside` numbers of the input are the person's own, the same for every item. Without hidden layers and without
    them it is a linear function with an offset.

    >>> network = ScoreFunction(factors=2)
    >>> network.logit(torch.tensor([0.5, -1.0, 3.0]), torch.tensor([[2.0, 1.0], [0.0, 0.0]])).tolist()
    [3.0, 3.0]
    >>> ScoreFunction(factors=32, hidden=(32, 16, 8), beside=32).size
    2753
    """

    factors: int
    hidden: tuple[int, ...] = ()
    beside: int = 0
    activation: Literal["relu", "sigmoid"] = "relu"

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.beside + self.factors, *self.hidden, 1)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return layer_shapes(self.widths)

    def start(self, rng: Rng) -> Tensor:
        return _within_roots(self.widths, rng)

    def logit(self, weights: Tensor, rows: Tensor, person: Tensor | None = None) -> Tensor:
        """One number for each of the rows (N, factors)."""
        return self.inputs(self.parts(weights), rows, person)[-1].squeeze(-1)

    def inputs(self, parts: Sequence[Tensor], rows: Tensor, person: Tensor | None = None) -> list[Tensor]:
        """The inputs of each layer without the person's part, then the output (N, 1)."""
        first, offset, *others = parts
        if person is not None:
            offset = offset + person @ first[: self.beside]
        seen = [rows, rows @ first[self.beside :] + offset]
        for weight, offset in zip(others[::2], others[1::2], strict=True):
            seen[-1] = seen[-1].relu() if self.activation == "relu" else seen[-1].sigmoid()
            seen.append(seen[-1] @ weight + offset)
        return seen

    def slopes(
        self, parts: Sequence[Tensor], seen: Sequence[Tensor], person: Tensor, slope: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Backpropagate the gradients (N, 1) of the output: those of each part, of the rows and of the person.

        What autograd gives, in a fraction of the calls. The person is (N, beside), or (1, beside) for all rows.
        """
        gradients: list[Tensor] = []
        for weight, x in zip(parts[-2:1:-2], seen[-2:0:-1], strict=True):
            gradients = [x.mT @ slope, slope.sum(0), *gradients]
            slope = slope @ weight.mT
            slope = torch.where(x > 0, slope, 0.0) if self.activation == "relu" else slope * (x * (1 - x))
        first, offset = parts[0], slope.sum(0)
        of_person = slope if len(person) > 1 else offset[None]
        gradients = [torch.cat([person.mT @ of_person, seen[0].mT @ slope]), offset, *gradients]
        return gradients, slope @ first[self.beside :].mT, of_person @ first[: self.beside].mT


def read_widths(name: str, text: str) -> tuple[int, ...]:
    """Read widths of hidden layers, such as 16,8; an empty text means none.

    >>> read_widths("hidden", "32,16,8"), read_widths("hidden", "")
    ((32, 16, 8), ())
    """
    widths: Sequence[str] = [width.strip() for width in text.split(",")] if text.strip() else []
    if not all(width.isdecimal() and int(width) for width in widths):
        raise HomebodyError(f"{name} must be widths of hidden layers, such as 32,16,8, or empty; not {text!r}.")
    return tuple(int(width) for width in widths)


def tower_widths(name: str, text: str) -> tuple[int, ...]:
    """Read widths of a tower's layers, such as 64,32,16: two or more."""
    widths = read_widths(name, text)
    if len(widths) < 2:
        raise HomebodyError(f"{name} must name two layers or more, such as 64,32,16; not {text!r}.")
    return widths


@dataclass(frozen=True)
class GRU(Flat):
    """A gated recurrent unit, written out with plain products: `torch.nn.GRU` does not run under vmap.

    >>> unit = GRU(inputs=2, width=3)
    >>> unit.last(torch.zeros(unit.size), torch.ones(5, 4, 2), torch.ones(5, 4, dtype=torch.bool)).shape
    torch.Size([5, 3])
    """

    inputs: int
    width: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Weights of the input and of the state, then their offsets; in each the reset, update and new gates."""
        gates = 3 * self.width
        return (self.inputs, gates), (self.width, gates), (gates,), (gates,)

    def start(self, rng: Rng) -> Tensor:
        """Uniform within one over the root of the width."""
        return (2.0 * rng.uniform(self.size) - 1.0) * self.width**-0.5

    def last(self, weights: Tensor, rows: Tensor, real: Tensor) -> Tensor:
        """The state (…, width) after the last real step of each sequence (…, steps, inputs); padding is skipped."""
        of_input, of_state, input_offset, state_offset = self.parts(weights)
        given = rows @ of_input + input_offset
        state = torch.zeros_like(given[..., 0, : self.width])
        for step in range(rows.shape[-2]):
            held = state @ of_state + state_offset
            come, past = given[..., step, :].chunk(3, -1), held.chunk(3, -1)
            reset, update = (come[0] + past[0]).sigmoid(), (come[1] + past[1]).sigmoid()
            new = (come[2] + reset * past[2]).tanh()
            state = torch.where(real[..., step, None], new + update * (state - new), state)
        return state


@dataclass(frozen=True)
class FeedForward(Flat):
    """Two layers of one width, with ReLU between them.

    >>> FeedForward(inputs=2, width=3).encode(torch.zeros(21), torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """

    inputs: int
    width: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return layer_shapes((self.inputs, self.width, self.width))

    def start(self, rng: Rng) -> Tensor:
        return _within_roots((self.inputs, self.width, self.width), rng)

    def encode(self, weights: Tensor, rows: Tensor) -> Tensor:
        """(…, width) of rows (…, inputs)."""
        first, offset, second, end = self.parts(weights)
        return (rows @ first + offset).relu() @ second + end


@dataclass(frozen=True)
class Network(Flat):
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

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Weights and offset of each layer, then h and its offset."""
        return [*layer_shapes(self.widths), (self.product + (self.widths or (0,))[-1],), (1,)]

    def start(self, rng: Rng) -> Tensor:
        """Glorot's uniform weights, offsets of zero."""
        parts = [torch.zeros(shape) for shape in self.shapes]
        for weight in parts[::2]:
            spread = (6.0 / (weight.shape[0] + (weight.shape[1] if weight.ndim == 2 else 1))) ** 0.5
            weight += spread * (2.0 * rng.uniform(*weight.shape) - 1.0)
        return torch.cat([part.flatten() for part in parts])

    def logit(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """hᵀ [φ^GMF, φ^MLP] for users (B, size) and items (B, size) in pairs."""
        *layers, h, offset = self.parts(weights)
        cut = self.product
        logit = (p[:, :cut] * q[:, :cut]) @ h[:cut] + offset
        if not layers:
            return logit
        of_user, of_item = p[:, cut:] @ layers[0][: self.half], q[:, cut:] @ layers[0][self.half :]
        return logit + _climb(of_user + of_item + layers[1], layers[2:]) @ h[cut:]

    @torch.no_grad()
    def scores(self, p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
        """The logits of all users (B, size) with all items (N, size), in pieces that fit into a cache."""
        *layers, h, offset = self.parts(weights)
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


def _climb(first: Tensor, layers: list[Tensor]) -> Tensor:
    """From the first layer, before its ReLU, to the last, after it."""
    x = first.relu()
    for weight, offset in zip(layers[::2], layers[1::2], strict=True):
        x = (x @ weight + offset).relu()
    return x

"""Encoders of sequences and of items. The weights of each are one flat vector."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from homebody.rng import Rng

__all__ = ["GRU", "FeedForward"]


@dataclass(frozen=True)
class GRU:
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

    @property
    def size(self) -> int:
        """How many weights there are."""
        return _size(self.shapes)

    def start(self, rng: Rng) -> Tensor:
        """Uniform within one over the root of the width."""
        return (2.0 * rng.uniform(self.size) - 1.0) * self.width**-0.5

    def last(self, weights: Tensor, rows: Tensor, real: Tensor) -> Tensor:
        """The state (…, width) after the last real step of each sequence (…, steps, inputs); padding is skipped."""
        of_input, of_state, input_offset, state_offset = _parts(weights, self.shapes)
        given = rows @ of_input + input_offset
        state = torch.zeros_like(given[..., 0, : self.width])
        for step in range(rows.shape[-2]):
            held = state @ of_state + state_offset
            come, kept = given[..., step, :].chunk(3, -1), held.chunk(3, -1)
            reset, update = (come[0] + kept[0]).sigmoid(), (come[1] + kept[1]).sigmoid()
            new = (come[2] + reset * kept[2]).tanh()
            state = torch.where(real[..., step, None], new + update * (state - new), state)
        return state


@dataclass(frozen=True)
class FeedForward:
    """Two layers of one width, with ReLU between them.

    >>> FeedForward(inputs=2, width=3).encode(torch.zeros(21), torch.ones(5, 2)).shape
    torch.Size([5, 3])
    """

    inputs: int
    width: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Weights and offset of each layer."""
        return (self.inputs, self.width), (self.width,), (self.width, self.width), (self.width,)

    @property
    def size(self) -> int:
        """How many weights there are."""
        return _size(self.shapes)

    def start(self, rng: Rng) -> Tensor:
        """Uniform within one over the root of a layer's inputs, offsets too."""
        first = (self.inputs + 1) * self.width
        bound = torch.full((self.size,), self.width**-0.5, device=rng.key.device)
        bound[:first] = self.inputs**-0.5
        return (2.0 * rng.uniform(self.size) - 1.0) * bound

    def encode(self, weights: Tensor, rows: Tensor) -> Tensor:
        """(…, width) of rows (…, inputs)."""
        first, offset, second, end = _parts(weights, self.shapes)
        return (rows @ first + offset).relu() @ second + end


def _size(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(shape) for shape in shapes)


def _parts(weights: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    ends = list(accumulate(prod(shape) for shape in shapes))[:-1]
    return [part.view(shape) for part, shape in zip(weights.tensor_split(ends), shapes, strict=True)]

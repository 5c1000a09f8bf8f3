"""A score function: a small network on an item's row, alone or beside a person's vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor

from homebody.errors import HomebodyError
from homebody.rng import Rng

__all__ = ["ScoreFunction", "read_widths"]


@dataclass(frozen=True)
class ScoreFunction:
    """Layers with ReLU (or a sigmoid) between them and one number at the end; its weights are one flat vector.

    `beside` numbers of the input are the person's own, the same for every item. Without hidden layers and without
    them it is a linear function with an offset.

    >>> one = ScoreFunction(factors=2)
    >>> one.logit(torch.tensor([0.5, -1.0, 3.0]), torch.tensor([[2.0, 1.0], [0.0, 0.0]])).tolist()
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

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Weights and offset of each layer."""
        return [shape for low, high in pairwise(self.widths) for shape in ((low, high), (high,))]

    @cached_property
    def size(self) -> int:
        """How many weights there are."""
        return sum(prod(shape) for shape in self.shapes)

    def start(self, rng: Rng) -> Tensor:
        """Uniform within one over the root of a layer's inputs, offsets too."""
        device = rng.key.device
        bounds = [torch.full(((low + 1) * high,), low**-0.5, device=device) for low, high in pairwise(self.widths)]
        return (2.0 * rng.uniform(self.size) - 1.0) * torch.cat(bounds)

    def logit(self, weights: Tensor, rows: Tensor, person: Tensor | None = None) -> Tensor:
        """One number for each of the rows (N, factors)."""
        return self.through(self.parts(weights), rows, person)

    def through(self, parts: Sequence[Tensor], rows: Tensor, person: Tensor | None = None) -> Tensor:
        """As `logit`, from `parts`: gradients are cheaper in the parts than in the flat vector."""
        return self.inputs(parts, rows, person)[-1].squeeze(-1)

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
        found: list[Tensor] = []
        for weight, x in zip(parts[-2:1:-2], seen[-2:0:-1], strict=True):
            found = [x.mT @ slope, slope.sum(0), *found]
            slope = slope @ weight.mT
            slope = torch.where(x > 0, slope, 0.0) if self.activation == "relu" else slope * (x * (1 - x))
        first, offset = parts[0], slope.sum(0)
        of_person = slope if len(person) > 1 else offset[None]
        found = [torch.cat([person.mT @ of_person, seen[0].mT @ slope]), offset, *found]
        return found, slope @ first[self.beside :].mT, of_person @ first[: self.beside].mT

    def parts(self, weights: Tensor) -> list[Tensor]:
        """The flat vector as each layer's weights and offset."""
        ends = list(accumulate(prod(shape) for shape in self.shapes))[:-1]
        return [part.view(shape) for part, shape in zip(weights.tensor_split(ends), self.shapes, strict=True)]


def read_widths(name: str, text: str) -> tuple[int, ...]:
    """Read widths of hidden layers, such as 16,8; an empty text means none.

    >>> read_widths("hidden", "32,16,8"), read_widths("hidden", "")
    ((32, 16, 8), ())
    """
    widths: Sequence[str] = [width.strip() for width in text.split(",")] if text.strip() else []
    if not all(width.isdecimal() and int(width) for width in widths):
        raise HomebodyError(f"{name} must be widths of hidden layers, such as 32,16,8, or empty; not {text!r}.")
    return tuple(int(width) for width in widths)

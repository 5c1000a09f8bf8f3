"""Exact noise: whole numbers on a public grid.

Noise in floating point can be taken off again: a zero and another number plus such noise fall on different numbers
(Mironov, 2012). So what is to be noised becomes a whole number of steps first, the noise is drawn in whole numbers, and
only their sum is scaled. Whatever is made of a whole number afterwards, in whatever precision, tells no more than it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.errors import HomebodyError
from homebody.ops import for_cohort
from homebody.privacy import noise_kernels
from homebody.rng import Rng, SystemRng

__all__ = ["COARSEST", "STEPS", "Grid", "drawn", "gaussian", "laplace", "summed_steps"]

STEPS = (torch.int32, torch.int64)
"""The types that whole numbers of steps are sent in."""

COARSEST = 20
"""The scale of Laplace noise is at least 2 to this power steps, unless it is tiny beside what it hides."""
_FINEST = 40
_MOST = 1 << 44
"""The most steps in one number of a message. Sums of such numbers, with their noise, fit in 64 bits."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Scales and bounds for which no step overflows or vanishes, in single precision either."""


@dataclass(frozen=True)
class Grid:
    """Whole numbers of a step, of which the scale of the noise is a power of two.

    >>> grid = Grid.fitted(scale=2.0, bound=1.0)
    >>> grid.depth, grid.step == 2.0**-28
    (29, True)
    >>> steps = grid.whole(torch.tensor([0.5, -0.25]))
    >>> steps.dtype, grid.values(steps).tolist()
    (torch.int32, [0.5, -0.25])
    """

    step: float
    depth: int
    """The noise's scale is 2 to this power steps."""
    kind: torch.dtype
    """The type that fits a message's numbers."""

    @classmethod
    def fitted(cls, scale: float, bound: float, *, coarsest: int = 0, bits: int = 28) -> Grid:
        """The grid for noise of this scale on numbers within the bound: 2^bits steps to the bound, or up to twice as
        many, where that can be."""
        if not all(_SMALLEST <= number <= _LARGEST for number in (scale, bound)):
            raise HomebodyError(
                f"Noise of scale {scale:g} on numbers within {bound:g} cannot be drawn exactly: both must lie between "
                f"{_SMALLEST:g} and {_LARGEST:g}."
            )
        wanted = bits + math.ceil(math.log2(scale) - math.log2(bound))
        depth = min(max(wanted, coarsest), _FINEST)
        step = scale * 2.0**-depth
        return cls(step, depth, torch.int32 if bound < step * 2**31 else torch.int64)

    def whole(self, value: Tensor, *, over: bool = False) -> Tensor:
        """Steps, rounded toward zero: that lengthens no vector, so what bounds a norm bounds it on the grid.

        over: whether they may be written over the numbers, which saves the memory of a cohort's updates.
        """
        (steps,) = _whole(value.flatten(), self.step, self.kind, over)
        return steps.reshape(value.shape)

    def values(self, steps: Tensor) -> Tensor:
        return self.doubles(steps).to(torch.float32)

    def doubles(self, steps: Tensor) -> Tensor:
        return steps.to(torch.float64) * self.step


def summed_steps(messages: Tensor) -> Tensor:
    """The exact sum of stacked messages in whole steps.

    >>> summed_steps(torch.tensor([[1, 2], [3, -4]], dtype=torch.int32)).tolist()
    [4, -2]
    """
    if messages.device.type != "cpu":
        return messages.sum(0, dtype=torch.int64)
    out = torch.zeros(messages.shape[1:], dtype=torch.int64)
    noise_kernels.add_steps(messages.reshape(len(messages), -1).numpy(), out.view(-1).numpy())
    return out


@for_cohort
def _whole(value: Tensor, step: float, kind: torch.dtype, over: bool) -> tuple[Tensor, ...]:
    if value.device.type == "cpu" and value.dtype == torch.float32:
        numbers = value.detach().contiguous()
        out = numbers.view(kind) if over and kind == torch.int32 else torch.empty(value.shape, dtype=kind)
        noise_kernels.steps(numbers.numpy(), step, float(_most(kind)), out.numpy())
        return (out,)
    steps = (value.to(torch.float64) / step).trunc().nan_to_num(0.0)
    return (steps.clamp(-_most(kind), _most(kind)).to(kind),)


def _most(kind: torch.dtype) -> int:
    return min(_MOST, torch.iinfo(kind).max)


def laplace(rng: Rng, depth: int, *shape: int) -> Tensor:
    """Discrete Laplace noise, exactly: k with probability proportional to exp(−|k| / 2^depth).

    >>> laplace(Rng.of(0), 1, 8).dtype
    torch.int64
    """
    return _noise(rng, "laplace", depth, shape)


def gaussian(rng: Rng, depth: int, *shape: int) -> Tensor:
    """Normal noise of standard deviation 2^depth, rounded to whole numbers.

    Rounding comes after the noise, though it is done before: for a whole x, x + round(N) is round(x + N). So all that
    is known of Gaussian noise holds for it.

    >>> gaussian(Rng.of(0), 0, 3).shape
    torch.Size([3])
    """
    return _noise(rng, "gaussian", depth, shape)


Name = Literal["laplace", "gaussian"]
Whole = npt.NDArray[np.int64]


def _noise(rng: Rng, name: Name, depth: int, shape: tuple[int, ...]) -> Tensor:
    system = partial(_from_system, name, depth)
    return drawn(rng, shape, system, noise_kernels.noise_keyed, depth, *_table(name))


def drawn(
    rng: Rng, shape: tuple[int, ...], system: Callable[[int], Whole], kernel: Callable[..., None], *given: Any
) -> Tensor:
    """Whole numbers: from the operating system by `system`, from a stream by the kernel with what it is given."""
    count = math.prod(shape)
    if isinstance(rng, SystemRng):
        return torch.from_numpy(system(count)).reshape(shape)
    found: Tensor = _keyed(rng.next_key(), kernel, count, *given)
    return found.reshape(shape)


@for_cohort
def _keyed(keys: Tensor, kernel: Callable[..., None], count: int, *given: Any) -> Tensor:
    out = torch.empty(len(keys), count, dtype=torch.int64)
    kernel(keys.cpu().contiguous().numpy(), *given, out.numpy())
    return out.to(keys.device)


_AT_ONCE = 1 << 16
_UNITS = {"laplace": 13, "gaussian": 6}
"""Units of 32 random bits that a draw reads, a little more than on average."""


def _from_system(name: Name, depth: int, count: int) -> Whole:
    """Drawn from the operating system's bits, by two threads where there are many."""
    out = np.empty(count, dtype=np.int64)
    parts = [out[start : start + _AT_ONCE] for start in range(0, count, _AT_ONCE)]
    if len(parts) < 2:
        for part in parts:
            _fill(name, depth, part)
    else:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda part: _fill(name, depth, part), parts))
    return out


def _fill(name: Name, depth: int, out: npt.NDArray[np.int64]) -> None:
    while len(out):
        # An array that may be written to, as all others: for one that may not, numba would compile the kernels again.
        drawn = bytearray(os.urandom(4 * (noise_kernels.MOST_UNITS + _UNITS[name] * len(out))))
        out = out[noise_kernels.noise_read(np.frombuffer(drawn, dtype=np.uint32), depth, *_table(name), out) :]


Words = npt.NDArray[np.uint64]


@lru_cache(maxsize=2)
def _table(name: Name) -> tuple[Words, Words, npt.NDArray[np.int64]]:
    """What the kernels draw by; Laplace noise needs no table.

    Cells of 1/256 of the deviation: the chance of one or of those before it, as 256 bits; and where to look first.

    The chances are proportional to exp(−c²/2¹⁷), c from 0 to 20 deviations, worked out in whole numbers of 384 bits.
    """
    if name == "laplace":
        return np.empty(0, dtype=np.uint64), np.empty((0, 3), dtype=np.uint64), np.empty(0, dtype=np.int64)
    ratio, shrink = _exp_minus(17), _exp_minus(16)  # from exp(−c²/2¹⁷) to the next: × exp(−(2c + 1)/2¹⁷)
    weight, total, sums = 1 << _BITS, 0, []
    for _ in range(20 * 256):
        total += weight
        sums.append(total)
        weight, ratio = weight * ratio >> _BITS, ratio * shrink >> _BITS
    scaled = [min((part << 256) // total, (1 << 256) - 1) for part in sums]
    words = np.array([[part >> shift & (2**64 - 1) for shift in (192, 128, 64, 0)] for part in scaled], dtype=np.uint64)
    high = np.ascontiguousarray(words[:, 0])
    first = np.arange(4096, dtype=np.uint64) << np.uint64(52)
    return high, np.ascontiguousarray(words[:, 1:]), np.searchsorted(high, first).astype(np.int64)


_BITS = 384


def _exp_minus(bits: int) -> int:
    """exp(−2^−bits) as a fraction of 2 to the power of `_BITS`, by its series."""
    term = total = 1 << _BITS
    k = 0
    while term:
        k += 1
        term = (term >> bits) // k
        total += -term if k % 2 else term
    return total

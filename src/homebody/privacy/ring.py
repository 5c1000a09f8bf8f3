"""Whole numbers for a secure sum: their step, how updates are rounded to them, and the modulus of their sum.

A masked number tells nothing only if every value is equally likely, so a secure sum adds whole numbers modulo
2^(8·width): its ring. An update is scaled to steps and each of its numbers rounded up or down at random, so that the
mean stays. That may lengthen the update. Noise is measured against the greatest length allowed (`longest`; Kairouz, Liu
and Steinke 2021, proposition 22 with β = e^−½): a longer update is rounded again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.core import Rows, Tree, Update
from homebody.errors import HomebodyError
from homebody.ops import for_cohort
from homebody.privacy import noise_kernels
from homebody.privacy.stages import dense, values_of
from homebody.rng import Rng

__all__ = ["Ring", "entries_of", "finest", "fitting", "longest", "reach_of_gaussian", "reach_of_noise", "rounded"]

Numbers = npt.NDArray[np.uint64]

COARSEST = 1 << 12
"""The fewest steps that the norm of an update has."""
LENGTHENED = 1.001
"""Rounding may lengthen an update by this factor at most."""
TRIES = 10
"""Draws before an update is rounded toward zero."""
WRAPS = 2.0**-40
"""The probability that any number of a sum leaves its ring is under this."""
_MOST_STEPS = 1 << 28
"""Finer steps than these would not show in the 32 bits of an update's numbers."""
_MOST_BYTES = 8


def longest(steps: int, entries: int) -> float:
    """The largest norm, in steps, of an update of so many numbers that had this norm before it was rounded at random.

    >>> round(longest(4096, 54_000) / 4096, 5)
    1.00053
    """
    return math.sqrt(steps**2 + entries / 4 + steps + math.sqrt(entries) / 2)


def fitting(entries: int) -> int:
    """How many steps the norm of an update has where noise is measured against it: as few as rounding allows.

    >>> fitting(54_000), fitting(1_000_000)
    (4096, 16384)
    """
    steps = COARSEST
    while longest(steps, entries) > LENGTHENED * steps:
        steps *= 2
    return steps


def finest(people: int) -> int:
    """How many steps the range of a number has where there is no noise: as many as fit, and no fewer than with it.

    A sum over so many people is to fit into 4 bytes.

    >>> finest(100) == 2**24, finest(10**6)
    (True, 4096)
    """
    steps = _MOST_STEPS
    while steps > COARSEST and people * (steps + 1) >= 1 << 31:
        steps //= 2
    return steps


def reach_of_noise(variance: float, entries: int) -> float:
    """A bound that any of so many Skellam variables of this variance exceeds with probability `WRAPS` at most.

    By Bernstein's inequality: P(|X| ≥ t) ≤ 2 exp(−t²/(2(variance + t/3))).
    """
    level = math.log(2 * max(1, entries) / WRAPS)
    return level / 3 + math.sqrt(level**2 / 9 + 2 * level * variance)


def reach_of_gaussian(deviation: float, entries: int) -> float:
    """The same for rounded normal variables of this standard deviation: P(|X| ≥ t) ≤ 2 exp(−t²/(2 × variance))."""
    return deviation * math.sqrt(2 * math.log(2 * max(1, entries) / WRAPS)) + 1


@dataclass(frozen=True)
class Ring:
    """Whole numbers modulo 2^(8·width), in which messages are masked and added.

    `encode` turns a message into one vector, its tensors in the order of their names; `decode` is the inverse.

    >>> ring = Ring.fitted(reach=300, step=0.5)
    >>> ring.width
    2
    >>> sent = ring.encode({"w": torch.tensor([1.0, -2.0])}, Rng.of(0))
    >>> sent.tolist()
    [2, 65532]
    >>> ring.decode(ring.add(sent, sent), {"w": (2,)})["w"].tolist()
    [2.0, -4.0]
    """

    width: int
    """The bytes of a number."""
    step: float
    """What one step is worth."""
    whole: bool = False
    """Whether messages are whole steps already; if not, `encode` rounds them and `decode` gives plain numbers."""
    largest: float = math.inf
    """Numbers of a message beyond this are cut off before they are rounded."""

    @classmethod
    def fitted(cls, reach: float, step: float, *, whole: bool = False, largest: float = math.inf) -> Ring:
        """The smallest ring for sums whose numbers are within so many steps."""
        for width in range(1, _MOST_BYTES + 1):
            if reach < 1 << (8 * width - 1):
                return cls(width, step, whole, largest)
        raise HomebodyError(
            f"A sum of up to {reach:.3g} steps does not fit into {8 * _MOST_BYTES} bits: let fewer people take part, "
            "or take less noise."
        )

    @property
    def mask(self) -> np.uint64:
        """The largest number of the ring."""
        return np.uint64((1 << 8 * self.width) - 1)

    def encode(self, message: Tree, rng: Rng) -> Numbers:
        """A message, dense, as one vector. What is not whole is cut off at `largest` and rounded at random."""
        tensors = {name: dense(message[name]) for name in sorted(message)}
        if not self.whole:
            most = self.largest
            cut = {
                name: value.float().nan_to_num(0.0, most, -most).clamp(-most, most) for name, value in tensors.items()
            }
            tensors = {name: dense(value) for name, value in rounded(cut, rng, 1 / self.step).items()}
        flat = [value.detach().cpu().to(torch.int64).flatten().numpy() for value in tensors.values()]
        return (np.concatenate(flat) if flat else np.zeros(0, dtype=np.int64)).view(np.uint64) & self.mask

    def decode(self, numbers: Numbers, shapes: Mapping[str, tuple[int, ...]]) -> Tree:
        """A vector of the ring as a tree of these shapes: whole steps of 64 bits, or plain numbers of 32."""
        spare = 64 - 8 * self.width
        signed = (numbers << np.uint64(spare)).view(np.int64) >> np.int64(spare)
        if len(signed) != sum(math.prod(shape) for shape in shapes.values()):
            raise HomebodyError(f"A vector of {len(signed):,} numbers has other shapes than its message.")
        tree: Tree = {}
        start = 0
        for name in sorted(shapes):
            end = start + math.prod(shapes[name])
            value = torch.from_numpy(signed[start:end].copy()).reshape(shapes[name])
            tree[name] = value if self.whole else (value.double() * self.step).to(torch.float32)
            start = end
        return {name: tree[name] for name in shapes}

    def add(self, first: Numbers, second: Numbers) -> Numbers:
        return (first + second) & self.mask

    def subtract(self, first: Numbers, second: Numbers) -> Numbers:
        return (first - second) & self.mask

    def pack(self, numbers: Numbers) -> bytes:
        """Numbers as they are sent: so many bytes each, the lowest first."""
        little = np.ascontiguousarray(numbers, dtype="<u8").view(np.uint8).reshape(-1, 8)
        return little[:, : self.width].tobytes()

    def unpack(self, sent: bytes) -> Numbers:
        """The inverse of `pack`. Any bytes are numbers: masks too can be drawn as bytes."""
        if len(sent) % self.width:
            raise HomebodyError(f"{len(sent):,} bytes are no whole count of numbers of {self.width} bytes.")
        wide = np.zeros((len(sent) // self.width, 8), dtype=np.uint8)
        wide[:, : self.width] = np.frombuffer(sent, dtype=np.uint8).reshape(-1, self.width)
        return wide.view("<u8").astype(np.uint64).reshape(-1)


def entries_of(tree: Update) -> int:
    """How many numbers a message has once its tables are filled."""
    return sum(
        value.size * math.prod(value.value.shape[1:]) if isinstance(value, Rows) else value.numel()
        for value in tree.values()
    )


def rounded(update: Update, rng: Rng, scale: float, most: float | None = None) -> Update:
    """An update times `scale` in whole numbers of 32 bits, rounded at random; runs under vmap.

    most: its largest norm after rounding. A longer update is rounded again, after ten draws toward zero. `Rows` stay
    `Rows`: a number that is 0 stays 0.

    >>> rounded({"w": torch.tensor([0.5, -3.0])}, Rng.of(1), 2.0)["w"].tolist()
    [1, -6]
    """
    if not update:
        return {}
    parts = {name: values_of(value) for name, value in update.items()}
    starts = np.cumsum([0, *(part.numel() for part in parts.values())])
    flat = torch.cat([part.flatten().to(torch.promote_types(part.dtype, torch.float32)) for part in parts.values()])
    keys = torch.stack([rng.fold(name).next_key() for name in parts])
    limit = -1 if most is None else math.floor(most**2)
    (whole,) = _rounded(flat, keys, tuple(starts.tolist()), scale, limit)
    out: Update = {}
    for (name, part), start, end in zip(parts.items(), starts[:-1], starts[1:], strict=True):
        numbers, value = whole[int(start) : int(end)].reshape(part.shape), update[name]
        out[name] = Rows(value.index, numbers, value.size) if isinstance(value, Rows) else numbers
    return out


@for_cohort
def _rounded(value: Tensor, keys: Tensor, starts: tuple[int, ...], scale: float, most: int) -> tuple[Tensor, ...]:
    numbers, streams = value.detach().cpu().contiguous().numpy(), keys.cpu().contiguous().numpy()
    out = torch.empty(numbers.shape, dtype=torch.int32)
    noise_kernels.round_at_random(numbers, streams, np.array(starts), scale, most, TRIES, out.numpy())
    return (out.to(value.device),)

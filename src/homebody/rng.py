"""Random numbers that depend on who draws them, not on where or with whom.

Every number is a hash (SplitMix64) of a key and a position, so that client u of round r draws the same
numbers alone on a device, among thousands in a simulation, on a CPU or on a GPU.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch as functorch

__all__ = ["DeviceRng", "Rng", "SystemRng"]

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


FEW = 1 << 12
"""Up to so many numbers, numpy is several times as fast as torch."""


def mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser. Torch shifts arithmetically: the masks make the shifts logical."""
    if _is_plain(bits) and bits.numel() <= FEW:
        words = bits.numpy().reshape(-1).view(np.uint64)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1 % 2**64)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2 % 2**64)
        return torch.from_numpy((words ^ (words >> np.uint64(31))).view(np.int64)).reshape(bits.shape)
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MIX_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def _is_plain(tensor: Tensor) -> bool:
    """Whether this is a tensor in this machine's memory, and not one of a transform such as vmap."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not functorch.is_functorch_wrapped_tensor(tensor)


def _mixed(number: int) -> int:
    """`mix` of one number, given and taken as unsigned."""
    number = (number ^ (number >> 30)) * _MIX_1 % 2**64
    number = (number ^ (number >> 27)) * _MIX_2 % 2**64
    return number ^ (number >> 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _number(name: int | str) -> int:
    """The number of a stream's name."""
    if isinstance(name, str):
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
    number = operator.index(name)
    if not -(2**63) <= number < 2**63:
        raise OverflowError(f"A stream's number has 64 bits, and {number} has more.")
    return number


class Rng:
    """A stream of random tensors, given by its key; `fold` derives independent streams.

    The first dimension of a shape may be padding: a longer draw begins with the shorter one.

    >>> client = Rng.of(7, "train", 3).fold(42)
    >>> again = Rng.of(7, "train", 3).fold(42)
    >>> torch.equal(client.uniform(4), again.uniform(9)[:4])
    True
    >>> torch.equal(client.uniform(4), client.uniform(4))
    False
    """

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self._draws = 0

    @classmethod
    def of(cls, *parts: int | str, device: torch.device | str = "cpu") -> Rng:
        """The stream named by these parts, a seed first."""
        return cls(torch.zeros((), dtype=torch.int64, device=device)).fold(*parts)

    def fold(self, *parts: int | str | Tensor) -> Rng:
        """The stream of this name below this one; a tensor of users gives one stream for each."""
        key = self.key
        names = [part if isinstance(part, Tensor) else _mixed((_number(part) + GOLDEN) % 2**64) for part in parts]
        for name in names:
            if isinstance(name, Tensor):
                key = mix(key ^ mix(name.to(torch.int64) + GOLDEN))
            elif key.ndim == 0 and _is_plain(key):
                key = torch.tensor(_signed(_mixed(int(key) % 2**64 ^ name)))
            else:
                key = mix(key ^ _signed(name))
        return type(self)(key)

    def next_key(self) -> Tensor:
        """The key of one more draw: for operations that hash on their own."""
        self._draws += 1
        step = (self._draws * GOLDEN + 2**63) % 2**64 - 2**63  # wrapped, as in 64-bit arithmetic
        return mix(self.key + step)

    def bits(self, *shape: int) -> Tensor:
        """Random 64-bit integers."""
        position = torch.arange(1, math.prod(shape) + 1, device=self.key.device)
        return mix(self.next_key() + position * GOLDEN).reshape(shape)

    @property
    def private(self) -> Rng:
        """The stream for privacy noise and secret choices: simulated here, the operating system's on a device."""
        return self.fold("private")

    def uniform(self, *shape: int) -> Tensor:
        """Floats in the open interval (0, 1)."""
        return (((self.bits(*shape) >> 41) & 0x7FFFFF).to(torch.float32) + 0.5) * 2.0**-23

    def normal(self, *shape: int) -> Tensor:
        """Standard normal floats (Box and Muller)."""
        radius = torch.sqrt(-2.0 * torch.log(self._fine(*shape)))
        return (radius * torch.cos(2.0 * math.pi * self._fine(*shape))).to(torch.float32)

    def normal_doubles(self, *shape: int) -> Tensor:
        """Standard normal doubles: for sums of many variables, whose noise needs more than a float's digits."""
        place = torch.arange(1, math.prod(shape) + 1, device=self.key.device)
        return self._normal_at(place).reshape(shape)

    def laplace(self, *shape: int) -> Tensor:
        """Laplace floats of scale 1."""
        centred = 2.0 * self._fine(*shape) - 1.0
        return (-torch.sign(centred) * torch.log1p(-centred.abs())).to(torch.float32)

    def laplace_sum(self, count: int, *shape: int) -> Tensor:
        """Sums of so many independent Laplace variables of scale 1, in doubles, each drawn at once; not under vmap.

        A Laplace variable is a normal one whose variance is twice an exponential one. Variances add up, and
        exponential variables add up to a Gamma: so the sum is exactly √(2 Gamma(count)) × a normal variable.

        >>> Rng.of(7).laplace_sum(10_000, 3).shape, Rng.of(7).laplace_sum(0, 3).tolist()
        (torch.Size([3]), [0.0, 0.0, 0.0])
        """
        if count < 1:
            return torch.zeros(shape, dtype=torch.float64, device=self.key.device)
        place = torch.arange(1, math.prod(shape) + 1, device=self.key.device)
        spread = (2.0 * type(self)(self.next_key())._gamma(count, place)).sqrt()
        return (spread * self._normal_at(place)).reshape(shape)

    def _gamma(self, count: int, place: Tensor) -> Tensor:
        """Doubles of Gamma(count), one for each place (Marsaglia and Tsang, 2000): who is refused draws again."""
        d = count - 1.0 / 3.0
        drawn = torch.zeros(len(place), dtype=torch.float64, device=place.device)
        waiting = torch.arange(len(place), device=place.device)
        while len(waiting):
            at = place[waiting]
            x, u = self._normal_at(at), self._fine_at(at)
            v = (1.0 + x / math.sqrt(9.0 * d)) ** 3
            # A v that is not positive has no logarithm, and no comparison with one holds.
            accepted = torch.log(u) < 0.5 * x * x + d * (1.0 - v + torch.log(v))
            drawn[waiting[accepted]] = d * v[accepted]
            waiting = waiting[~accepted]
        return drawn

    def _normal_at(self, place: Tensor) -> Tensor:
        """As `normal`, in doubles and at these places alone."""
        radius = torch.sqrt(-2.0 * torch.log(self._fine_at(place)))
        return radius * torch.cos(2.0 * math.pi * self._fine_at(place))

    def _fine(self, *shape: int) -> Tensor:
        return _doubles(self.bits(*shape))

    def _fine_at(self, place: Tensor) -> Tensor:
        return _doubles(mix(self.next_key() + place * GOLDEN))

    def integers(self, high: int, *shape: int) -> Tensor:
        """Integers from 0 to high - 1; high at most 2**31."""
        return (((self.bits(*shape) >> 32) & 0xFFFFFFFF) * high) >> 32


class DeviceRng(Rng):
    """A stream as a real device draws it: what is agreed upon from the key, what is private from the system."""

    @property
    def private(self) -> Rng:
        return SystemRng()


class SystemRng(Rng):
    """The operating system's generator: its draws cannot be repeated, whatever the name.

    >>> torch.equal(SystemRng().fold("noise").bits(4), SystemRng().fold("noise").bits(4))
    False
    """

    def __init__(self, key: Tensor | None = None) -> None:
        super().__init__(torch.zeros((), dtype=torch.int64))

    def fold(self, *parts: int | str | Tensor) -> Rng:
        return self

    def next_key(self) -> Tensor:
        return self.bits(1)[0]

    def bits(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        drawn = torch.frombuffer(bytearray(os.urandom(8 * max(1, count))), dtype=torch.int64)
        return drawn[:count].reshape(shape)

    @property
    def private(self) -> Rng:
        return self

    def _fine_at(self, place: Tensor) -> Tensor:
        return _doubles(self.bits(*place.shape))


def _doubles(bits: Tensor) -> Tensor:
    """Doubles in (0, 1): the tails of noise need more than a float's 23 bits."""
    return (((bits >> 12) & 0xFFFFFFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-52

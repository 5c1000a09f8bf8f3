"""Shares of a secret: a threshold of them gives it back, fewer tell nothing (Shamir 1979).

The secret is the value at 0 of a random polynomial modulo a prime, and a share its value at 1, 2 and so on. These
points are small, so a value is computed in whole numbers and reduced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

__all__ = ["PRIME", "SECRET_BYTES", "SHARE_BYTES", "coefficients", "combine", "split"]

PRIME = 2**257 - 93
"""The largest prime under 2²⁵⁷: any 32 bytes are a secret."""
SECRET_BYTES, SHARE_BYTES = 32, 33
_DRAWN = 48
"""Bytes that a coefficient is drawn from: reduced modulo the prime, it is uniform to 2⁻¹²⁷."""


def coefficients(drawn: bytes) -> list[int]:
    """Random bytes as random numbers modulo the prime, one for each 48 bytes."""
    return [int.from_bytes(drawn[at : at + _DRAWN], "little") % PRIME for at in range(0, len(drawn), _DRAWN)]


def bytes_to_draw(threshold: int) -> int:
    """How many random bytes one secret's coefficients take."""
    return _DRAWN * (threshold - 1)


def split(secret: bytes, random: Sequence[int], points: Iterable[int]) -> list[int]:
    """The shares of a secret at these points; one more of them than there are random coefficients give it back.

    >>> shares = split(b"s" * 32, [7, 9], range(1, 6))
    >>> combine({2: shares[1], 3: shares[2], 5: shares[4]}) == b"s" * 32
    True
    """
    lowest, shares = int.from_bytes(secret, "little"), []
    for point in points:
        value = 0
        for coefficient in random:
            value = value * point + coefficient
        shares.append((value * point + lowest) % PRIME)
    return shares


def combine(shares: Mapping[int, int]) -> bytes | None:
    """The secret that these shares, by their points, give back; None if it has more than 32 bytes, as no secret has."""
    weights = _weights(tuple(shares))
    value = sum(weight * share for weight, share in zip(weights, shares.values(), strict=True)) % PRIME
    return value.to_bytes(SHARE_BYTES, "little")[:SECRET_BYTES] if value < 1 << 8 * SECRET_BYTES else None


@lru_cache(maxsize=256)
def _weights(points: tuple[int, ...]) -> list[int]:
    """What the values of a polynomial at these points count for in its value at 0 (Lagrange)."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above *= other
                below *= other - point
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights

"""How items belong together, from a noised sum of pairs and from what is public of the items.

What is looked for is a symmetric matrix X over some items: how often two of them are near one another. M is the sum
that was released: X and noise of a known deviation σ. Of X something is known before M is looked at:

1. Without any taste, pairs come as often as both items do: b g gᵀ, with g from the released popularity.
2. Items that are alike come together more often: b g gᵀ ∘ (1 + c K), with K from what is public of the items.
3. The rest differs smoothly over items that are alike: a Gaussian process with covariance τ S ⊗ S, S = √g K √g.
4. What is left then differs from pair to pair, by a variance of τ' √(g_i g_j).

b, c, τ and τ' are four numbers, which all of M is averaged for: noise hardly moves them. With them each part has a
posterior mean in closed form: an entry of M, in the eigenvectors of S or as it is, is kept by the share that is signal.
With much noise the two first parts remain; without noise all of M does.

Once a first X is there, its own eigenvectors take the place of those of S, and 3 and 4 are done once more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from homebody.core import Catalogue, Column
from homebody.errors import HomebodyError
from homebody.rng import GOLDEN, Rng, mix

__all__ = ["Together", "entries", "likeness", "positive", "posterior", "prior", "slots", "under_one"]

WIDTH = 0.2
"""Numbers are alike within so many of their standard deviations."""
TEXT = 0.25
"""What a text counts beside a category."""
SMOOTH = 500
"""How many eigenvectors of S are looked at."""
BOLD = 3.0
"""Shares are those of a signal of so many times its variance: a score adds up pairs, and their noise averages out."""
LIKELY = 4.0
"""c, where there are no pairs to fit it to."""
RECOVERIES = 4
"""How often what a sketch leaves over is put back."""


def under_one(name: str, value: float) -> None:
    """Refuse a share that leaves nothing."""
    if value == 1.0:
        raise HomebodyError(f"{name} must be under 1, or nothing of the budget is left for pairs: not {value:g}.")


class Together(NamedTuple):
    """X, as vectors of items: `vectors` @ `vectors`.T + `independent` g gᵀ."""

    vectors: Tensor
    """(m, rank)"""
    independent: float
    """b"""


def positive(counts: Tensor, deviation: float) -> Tensor:
    """What counts were before Gaussian noise: their expectation, if they are exponentially distributed.

    >>> [round(count, 2) for count in positive(torch.tensor([-3.0, 0.0, 5.0]), 1.0).tolist()]
    [0.2, 0.44, 3.5]
    """
    if not deviation:
        return counts.clamp_min(1e-3)
    counts = counts.double()
    z = counts / deviation - deviation / counts.mean().clamp_min(0.1 * deviation)
    beyond = torch.exp(-0.5 * z * z - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(z))
    return (deviation * (z + beyond)).clamp_min(1e-9).float()


def likeness(catalogue: Catalogue, items: Tensor) -> Tensor | None:
    """How alike these items are by what is public of them, from 0 to 1; None where nothing is.

    That is the mean cosine of their categories and of their words, each weighted by how rare it is, times a Gaussian of
    their numbers. A text counts `TEXT` as much as a category.
    """
    columns = [column._replace(values=column.values.to(items.device)[items]) for column in catalogue.items.values()]
    if not columns or not len(items):
        return None
    alike = torch.ones(len(items), len(items), device=items.device)
    words = [(TEXT if column.text else 1.0, _cosine(column)) for column in columns if column.kind != "number"]
    if words:
        total = sum(weight for weight, _ in words)
        alike = sum((weight / total * cosine for weight, cosine in words), torch.zeros_like(alike))
    for column in columns:
        if column.kind == "number":
            value = column.values.float()
            alike *= torch.exp((value[:, None] - value) ** 2 / (-2 * WIDTH**2))
    return alike


def _cosine(column: Column) -> Tensor:
    codes = column.values.long().reshape(len(column.values), -1)
    has = torch.zeros(len(codes), column.size + 1, device=codes.device)
    has = has.scatter_(1, torch.where(codes > 0, codes, column.size), 1.0)[:, :-1]
    weighted = has * torch.log(len(codes) / has.sum(0).clamp_min(1.0))
    weighted /= weighted.norm(dim=1, keepdim=True).clamp_min(1e-9)
    return weighted @ weighted.T


def entries(items: int, buckets: int) -> int:
    """How many numbers a device sends of the pairs of so many items: all of them, or a sketch if that is smaller.

    >>> entries(4, 0), entries(4000, 0), entries(4000, 500_000)
    (6, 7998000, 500000)
    """
    every = items * (items - 1) // 2
    return min(buckets, every) if buckets else every


def slots(low: Tensor, high: Tensor, items: int, buckets: int) -> tuple[Tensor, Tensor | int]:
    """In which number each pair low < high is counted, and with which sign.

    >>> slots(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), items=3, buckets=0)
    (tensor([0, 1, 2]), 1)
    """
    if entries(items, buckets) == entries(items, 0):
        return low * (2 * items - low - 1) // 2 + high - low - 1, 1
    bits = mix((low * items + high) * GOLDEN)
    return ((bits >> 1) & 0x7FFFFFFFFFFF) % buckets, 1 - 2 * (bits & 1)


def prior(g: Tensor, alike: Tensor | None, rank: int) -> Together:
    """X before any pairs are known."""
    if alike is None:
        return Together(g.new_zeros(len(g), 0), 1.0)
    return Together(_root(LIKELY * torch.outer(g, g) * alike, rank), 1.0)


def posterior(
    told: Tensor,
    deviation: float,
    g: Tensor,
    alike: Tensor | None,
    rank: int,
    buckets: int = 0,
    among: int | None = None,
) -> Together:
    """X, expected once the noised pairs `told` are known, whole or as a sketch.

    A sketch adds up pairs in one number, which is noise as well. What it does not explain of the sketch is put back.
    among: how many items the pairs that were told are of, these first; None: these alone.
    """
    m = len(g)
    if m < 2:
        return Together(g.new_zeros(m, 0), 1.0)
    low, high = torch.triu_indices(m, m, 1, device=g.device)
    among = m if among is None else among
    slot, sign = slots(low, high, among, buckets)
    sketched = len(told) < entries(among, 0)

    def matrix(numbers: Tensor) -> Tensor:
        out = torch.zeros(m, m, device=g.device)
        out[low, high] = numbers[slot] * sign
        return out + out.T

    M = matrix(told)
    fitted, X = _fitted(M, _deviation(told, deviation) if sketched else deviation, g, alike, rank)
    for _ in range(RECOVERIES if sketched else 0):
        explained = torch.zeros_like(told).index_add_(0, slot, X[low, high] * sign)
        rest = told - explained
        fitted, X = _fitted(matrix(rest) + X, _deviation(rest, deviation), g, alike, rank)
    return fitted


def _deviation(rest: Tensor, noise: float) -> float:
    """Of each number that a sketch gives for a pair: its noise, and the other pairs in the same bucket."""
    return max(float(rest.square().mean().sqrt()), noise)


def _fitted(M: Tensor, deviation: float, g: Tensor, alike: Tensor | None, rank: int) -> tuple[Together, Tensor]:
    """X as vectors and as a matrix without a diagonal. That of M is 0: nobody sends it."""
    noise, alone = deviation**2, torch.outer(g.sqrt(), g.sqrt())
    b, mean = _mean(M, g, alike)
    rest = (M - mean).fill_diagonal_(0)
    smooth = torch.zeros_like(rest)
    if alike is not None:
        smooth = _smooth(rest, *_largest(alone * alike, SMOOTH), noise)
    varied = smooth + _single(rest - smooth, alone, noise)
    # Once more, with what is known of the diagonal and of the directions in which X varies.
    vectors = _root(varied + mean, rank)
    rest.diagonal().copy_((vectors * vectors).sum(1) - mean.diagonal())
    values, directions = _largest(varied, rank)
    smooth = _smooth(rest, values.abs(), directions, noise)
    X = smooth + _single(rest - smooth, alone, noise) + mean
    return Together(_root(X - b * torch.outer(g, g), rank), b), X.fill_diagonal_(0)


def _mean(M: Tensor, g: Tensor, alike: Tensor | None) -> tuple[float, Tensor]:
    """b, and b g gᵀ ∘ (1 + c K): by least squares over all pairs, where both are positive."""
    flat = torch.outer(g, g)
    seen = flat.clone().fill_diagonal_(0)
    alone = max(_dot(seen, M) / _dot(seen, seen), 1e-12)
    if alike is not None:
        tilted = seen * alike
        ff, ft, tt, fm, tm = (_dot(*two) for two in _products(seen, tilted, M))
        both = ff * tt - ft * ft
        if both > 1e-9 * ff * tt:  # or all pairs are equally alike
            b, tilt = (fm * tt - tm * ft) / both, (tm * ff - fm * ft) / both
            if b > 0 and tilt > 0:
                return b, flat * (b + tilt * alike)
    return alone, alone * flat


def _products(seen: Tensor, tilted: Tensor, M: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(seen, seen), (seen, tilted), (tilted, tilted), (seen, M), (tilted, M)]


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.flatten(), other.flatten()))


def _smooth(rest: Tensor, values: Tensor, directions: Tensor, noise: float) -> Tensor:
    """What is expected of `rest` in these directions, in which it varies by the products of these values."""
    turned = directions.T @ (rest @ directions)
    return directions @ _single(turned, torch.outer(values, values), noise) @ directions.T


def _single(observed: Tensor, variance: Tensor, noise: float) -> Tensor:
    """What is expected of each number by itself: the share of it that is signal.

    variance: that of the signal, up to a factor, which is fitted to all numbers.
    """
    if not noise:
        return observed
    factor = BOLD * max(_dot(variance, observed.square() - noise) / _dot(variance, variance), 1e-12)
    return observed * (variance / (variance + noise / factor))


def _largest(S: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues of a symmetric matrix, and their vectors, by subspace iteration."""
    m = len(S)
    if m <= 2 * count + 40:
        values, vectors = torch.linalg.eigh(S)
        return values[-count:], vectors[:, -count:]
    vectors = Rng.of(0, "pairs", device=S.device).normal(m, count + 20)
    for _ in range(5):
        vectors = torch.linalg.qr(S @ vectors)[0]
    values, turn = torch.linalg.eigh(vectors.T @ (S @ vectors))
    return values[-count:], vectors @ turn[:, -count:]


def _root(X: Tensor, rank: int) -> Tensor:
    """Vectors of items whose products are X, as well as so many numbers each can be."""
    values, vectors = _largest(X, rank)
    return vectors * values.clamp_min(0).sqrt()

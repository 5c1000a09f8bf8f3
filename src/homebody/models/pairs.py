"""How items belong together, from a noised sum of pairs and from what is public of the items.

What is looked for is a symmetric matrix X over some items: how often two of them are near one another. M is the sum
that was released: X and noise of a known deviation σ. Four parts make up X:

1. Pairs come as often as both items do, and more often where items are alike: b g gᵀ ∘ (1 + c K). g is from the
   released popularity, and K from what is public of the items. b and c are fitted to all of M: noise hardly moves them.
2. Tastes: the directions in which the rest of M varies by more than noise can.
3. What differs smoothly over items that are alike: a Gaussian process of covariance b² S ⊗ S, with S = √g K √g.
4. What differs from pair to pair, with a variance of b² (g_i g_j)^0.7.

Of 3 and 4 there is the posterior mean: each number of M, in the eigenvectors of S or as it is, is kept by the share of
it that is signal. With much noise the first part alone remains; without noise all of M does. The factors of these
variances were chosen on the validation parts of MovieLens and Amazon-Video; nothing of them depends on whom they are
used for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from homebody.core import Catalogue, Column
from homebody.rng import GOLDEN, Rng, mix

__all__ = ["Together", "entries", "likeness", "positive", "posterior", "prior", "slots"]

WIDTH = 0.2
"""Numbers are alike within so many of their standard deviations."""
TEXT = 0.25
"""What a text counts beside a category."""
SMOOTH = 500
"""How many eigenvectors of S are looked at."""
LIFT, OWN_LIFT, OWN_LIFT_ALONE = 10.0, 30.0, 100.0
"""How far X varies beyond what is expected, as squares of b: smoothly over items that are alike, and from pair to pair
where something is public of items, and where nothing is."""
LIKELY = 4.0
"""c, where there are no pairs to fit it to."""
RECOVERIES = 2
"""How often what a sketch leaves over is looked at again."""
TINY = 1e-12
"""In the place of 0 where something is divided by it."""


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

    A sketch adds up many pairs in one number, which is noise as well. So what X says of the sketch is taken off it, and
    what is left is looked at again.
    among: how many items the pairs that were told are of, these first; None: these alone.
    """
    m = len(g)
    if m < 2:
        return Together(g.new_zeros(m, 0), 1.0)
    among = m if among is None else among
    if len(told) == entries(among, 0) and among == m:
        above = torch.ones(m, m, dtype=torch.bool, device=g.device).triu_(1)
        M = torch.zeros(m, m, device=g.device).masked_scatter_(above, told)
        return _fitted(M + M.T, deviation, g, alike, rank)[0]
    low, high = torch.triu_indices(m, m, 1, device=g.device)
    slot, sign = slots(low, high, among, buckets)
    sketched = len(told) < entries(among, 0)

    def matrix(numbers: Tensor) -> Tensor:
        out = torch.zeros(m, m, device=g.device)
        out[low, high] = numbers[slot] * sign
        return out + out.T

    fitted, X = _fitted(matrix(told), _deviation(told, deviation) if sketched else deviation, g, alike, rank)
    for _ in range(RECOVERIES if sketched else 0):
        rest = told - torch.zeros_like(told).index_add_(0, slot, X[low, high] * sign)
        fitted, X = _fitted(matrix(rest) + X, _deviation(rest, deviation), g, alike, rank)
    return fitted


def _deviation(rest: Tensor, noise: float) -> float:
    """Of each number that a sketch gives for a pair: its noise, and the other pairs in the same bucket."""
    return max(float(rest.square().mean().sqrt()), noise)


def _fitted(M: Tensor, deviation: float, g: Tensor, alike: Tensor | None, rank: int) -> tuple[Together, Tensor]:
    """X as vectors; and as a matrix, what of it many pairs say together. M's diagonal is 0: nobody sends it."""
    flat, noise = torch.outer(g, g), deviation**2
    b, mean = _mean(M, g, alike)
    # Where b itself is mostly noise, nothing is known of how far X varies.
    spread = max(b * b - 2 * noise / _dot(flat, flat), TINY * b * b)
    rest = (M - mean).fill_diagonal_(0)
    for _ in range(2):
        tastes = _tastes(rest, deviation, g, rank)
        rest.diagonal().copy_(tastes.diagonal())
    rest -= tastes
    X = mean + tastes
    if alike is not None:
        values, directions = _largest(g.sqrt()[:, None] * alike * g.sqrt(), SMOOTH)
        values = values.clamp_min(TINY)
        turned = directions.T @ (rest @ directions)
        smooth = directions @ _kept(turned, torch.outer(values, values), noise / (LIFT * spread)) @ directions.T
        X += smooth
        rest -= smooth
    own = _kept(rest, flat**0.7, noise / ((OWN_LIFT_ALONE if alike is None else OWN_LIFT) * spread))
    return Together(_root(X + own - b * flat, rank), b), X


def _tastes(rest: Tensor, deviation: float, g: Tensor, rank: int) -> Tensor:
    """The directions in which `rest` varies by more than noise can, each as far as it is signal.

    The eigenvalues of noise alone end at 2 σ √m. One of signal comes out larger than it is. Its vector is noisy, the
    more so for items that few people have.
    """
    values, vectors = _largest(rest, rank)
    edge = 2 * deviation * len(g) ** 0.5
    values, vectors = values[values > edge], vectors[:, values > edge]
    known = g[:, None] / g.mean()
    vectors = vectors * (known / (known + len(g) * deviation**2 / values**2))
    return (vectors * (values**2 - edge**2).sqrt()) @ vectors.T


def _mean(M: Tensor, g: Tensor, alike: Tensor | None) -> tuple[float, Tensor]:
    """b, and b g gᵀ ∘ (1 + c K): by least squares over all pairs, where both are positive."""
    flat = torch.outer(g, g)
    seen = flat.clone().fill_diagonal_(0)
    alone = max(_dot(seen, M) / _dot(seen, seen), TINY)
    if alike is not None:
        tilted = seen * alike
        ff, ft, tt, fm, tm = _dot(seen, seen), _dot(seen, tilted), _dot(tilted, tilted), _dot(seen, M), _dot(tilted, M)
        both = ff * tt - ft * ft
        if both > 1e-9 * ff * tt:  # or all pairs are equally alike
            b, tilt = (fm * tt - tm * ft) / both, (tm * ff - fm * ft) / both
            if b > 0 and tilt > 0:
                return b, flat * (b + tilt * alike)
    return alone, alone * flat


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.flatten(), other.flatten()))


def _kept(observed: Tensor, variance: Tensor, noise: float) -> Tensor:
    """The share of each number that is signal, where signal has these variances, and noise this one."""
    return observed * (variance / (variance + noise))


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

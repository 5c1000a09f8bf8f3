"""Where items lie: a vector for each, of the methods and references that have one."""

from __future__ import annotations

import torch
from torch import Tensor

from homebody.core import Method
from homebody.errors import HomebodyError
from homebody.methods.kernels import indexed
from homebody.methods.serving import serving_of
from homebody.reference import Products, Score
from homebody.training import Trained

__all__ = ["most_similar", "vectors_of", "vectors_of_score"]


def vectors_of(trained: Trained) -> Tensor:
    """(items, r) the vector of each item, as the server has it. A method without any is refused."""
    method, catalogue = trained.method, trained.runtime.catalogue
    try:
        serving = serving_of(method)
    except HomebodyError:
        raise _none(method) from None
    shared = indexed(method, trained.shared, catalogue)
    if "query" not in serving.ways or any(name not in shared for name in serving.tables(method)):
        raise _none(method)
    places = serving.places(method, shared, catalogue)
    if places.ndim != 2 or len(places) != catalogue.n_items:
        raise _none(method)
    return places.detach().float().cpu().contiguous()


def vectors_of_score(method: object, score: Score) -> Tensor:
    """The same of a reference, whose score is the product of two vectors."""
    if not isinstance(score, Products):
        raise _none(method)
    return score.items.detach().float().cpu().contiguous()


def most_similar(vectors: Tensor, item: int, k: int) -> tuple[Tensor, Tensor]:
    """The k items whose vectors point most nearly the same way, and the cosines, the largest first.

    >>> vectors = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.0, 0.0]])
    >>> items, cosines = most_similar(vectors, 0, k=1)
    >>> items.tolist(), round(cosines[0].item(), 3)
    ([1], 0.999)
    """
    lengths = vectors.norm(dim=1)
    cosines = (vectors @ vectors[item]) / (lengths * lengths[item]).clamp(min=1e-12)
    cosines[item] = -torch.inf
    best = torch.topk(cosines, min(k, len(cosines) - 1))
    return best.indices, best.values


def _none(method: object) -> HomebodyError:
    kind = "method" if isinstance(method, Method) else "reference"
    return HomebodyError(f"{type(method).__name__} has no vector for each item: this {kind} ranks without one.")

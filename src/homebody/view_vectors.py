"""Views that are made of interactions: a vector for each person, from what they have in another app.

Two ways. SVD takes the person's row of the left singular vectors of the matrix of people and items: whoever computes
it sees everyone's interactions. FedIALS trains item factors over simulated devices, and each device solves its own
vector: nobody collects interactions, but the devices' sums carry no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import csr_array
from scipy.sparse.linalg import svds
from torch.func import vmap

from homebody.data.partitions import everything
from homebody.data.population import Population, UserItems
from homebody.data.views import SEEN, MadeView, Way, move_elsewhere, parse_views, with_vectors
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.simulation import Simulator
from homebody.training import fit

__all__ = ["make_views"]

Vectors = npt.NDArray[np.floating]
AT_ONCE = 256
"""People whose vectors are solved together."""
ROUNDS = 5
"""Of federated implicit ALS."""


def make_views(population: Population, views: Mapping[str, str], seed: int = 0) -> Population:
    """The population with the views that are made of its interactions, which are then elsewhere.

    Each view takes its share of what the views before it left.

    >>> from homebody.data import load
    >>> few = make_views(load("synthetic:users=60,items=40,mean=12"), {"taste": "svd:size=4,share=0.5"})
    >>> few.user_features.names, few.elsewhere is not None
    (['taste.1', 'taste.2', 'taste.3', 'taste.4'], True)
    """
    for name, view in parse_views(views).items():
        if isinstance(view, MadeView):
            population, taken = move_elsewhere(population, name, view, seed)
            vectors = WAYS[view.way](taken, population.n_items, view, seed)
            known = np.diff(taken.indptr) > 0
            note = f"{SEEN[view.way].format(name=name, share=view.share)} {_counts(population, taken)}"
            population = with_vectors(population, name, vectors, known)
            population = replace(population, notes=(*population.notes, note))
    return population


def _counts(population: Population, taken: UserItems) -> str:
    people = int((np.diff(taken.indptr) > 0).sum())
    missing = population.n_users - people
    without = f" {missing:,} people have too few for it: their view is missing." if missing else ""
    return f"{len(taken.items):,} interactions are elsewhere: not learnt from, asked or ranked.{without}"


def _svd(taken: UserItems, n_items: int, view: MadeView, seed: int) -> Vectors:
    """The left singular vectors of the matrix of ones where a person has an item; each column has variance 1."""
    n_users = len(taken.indptr) - 1
    if view.size >= min(n_users, n_items):
        raise HomebodyError(
            f"An SVD of {n_users:,} people and {n_items:,} items has too few vectors for a view of {view.size}: take a "
            "smaller size."
        )
    matrix = csr_array((np.ones(len(taken.items)), taken.items, taken.indptr), shape=(n_users, n_items))
    left, values, _ = svds(matrix, k=view.size, v0=np.ones(min(n_users, n_items)))
    left = left[:, np.argsort(-values, kind="stable")]
    # A singular vector has no sign of its own.
    left = left * np.sign(left[np.abs(left).argmax(axis=0), np.arange(view.size)])
    return np.asarray(left * np.sqrt(n_users))


def _fedials(taken: UserItems, n_items: int, view: MadeView, seed: int) -> Vectors:
    """Each person's vector of implicit ALS, scaled on their device to the length of a vector of ones."""
    split = everything(Population("elsewhere", taken.indptr, taken.items, n_items), seed=seed)
    method = FedIALS(factors=view.size)
    fitted = fit(method, Simulator(split), rounds=ROUNDS, seed=seed, evaluate_every=0)
    table = fitted.shared["item"]
    parts = []
    for start in range(0, split.n_users, AT_ONCE):
        histories = split.padded(np.arange(start, min(start + AT_ONCE, split.n_users)), avoided=False)
        items, valid = torch.from_numpy(histories.items), torch.from_numpy(histories.valid)
        parts.append(vmap(lambda history, real: method.user_vector({"item": table}, history, real))(items, valid))
    vectors = torch.cat(parts)
    return (vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12) * view.size**0.5).numpy()


WAYS: dict[Way, Callable[[UserItems, int, MadeView, int], Vectors]] = {"svd": _svd, "fedials": _fedials}

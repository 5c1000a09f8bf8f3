"""DP-ALS: alternating least squares whose item half is solved from noised sums (Chien, Jain, Krichene, Rendle, Song,
Thakurta and Zhang, Private Alternating Least Squares: Practical Private Matrix Completion with Tighter Rates, ICML
2021; its loss for implicit feedback, with a term for all pairs of a person and an item).

| paper                                          | here                                                              |
|------------------------------------------------|-------------------------------------------------------------------|
| U_i, solved exactly on the device, at no cost  | `FedIALS.user_vector`                                             |
| U_i clipped to Γ_u                             | scaled to length 1: only its direction is told of                 |
| k, the most items of a person that are used    | `sampled`, drawn evenly in each round; 0: all                     |
| Σ_i U_i, over the people of item j, and noise  | `total.sum["item"]`                                               |
| Σ_i U_i U_iᵀ, over them, and noise             | the same rows go on with it, × `squares`; 0: left out             |
| Σ_i U_i U_iᵀ, over everyone, and noise         | `total.sum["gram"]`                                               |
| Π_PSD                                          | `_semidefinite`                                                   |
| λ of items                                     | `item_ridge` × the mean eigenvalue of the noised matrix of everyone |
| noise on all of it together                    | `uplink`: a clip to 1, a secure sum that a helper opens, noise    |

A symmetric matrix is sent as its upper half, with √2 × what is off the diagonal: so it is as long as the whole. A
person weighs w = 1 / √(1 + m (1 + `squares`²)) with m items: all that they send is then of length 1, however many items
they have, and the clip changes nothing. The sums are those of a loss in which person i weighs w_i.

The paper draws more of a person's rare items, by a noised count of everyone's. Here items are drawn evenly, which costs
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import About, Batch, Catalogue, Data, Rows, Stateless, Total, Tree, Update, Work, param
from homebody.methods.fedials import FedIALS, upper
from homebody.privacy import Channel, Clip, Gaussian, SecureSum
from homebody.rng import Rng
from homebody.settings import Range, common_params

__all__ = ["DPALS"]

TINY = 1e-9


@dataclass(frozen=True)
class DPALS(Stateless):
    """Each client solves its own vector and tells noised sums of its direction; the server solves the items'.

    >>> import homebody as hb
    >>> hb.DPALS().uplink
    Channel(Clip(norm=1.0), SecureSum(helper=True), Gaussian(z=1.131, relation='add-remove'))
    >>> model = hb.fit(hb.DPALS(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    uplink: Channel = Channel(Clip(1.0), SecureSum(helper=True), Gaussian(z=1.131, relation="add-remove"))
    factors: int = param(24, "size of a user's and of an item's vector", low=1, search=(8, 16, 24, 32))
    confidence: float = param(
        2.0, "α: extra weight of an interaction over a non-interaction", low=0, search=Range(0.5, 50, log=True)
    )
    regularisation: float = param(1.0, "λ of a person's vector", low=1e-9, search=Range(0.01, 100, log=True))
    item_ridge: float = param(
        2.0,
        "λ of an item's vector, in mean eigenvalues of everyone's matrix",
        low=1e-9,
        search=Range(0.1, 10, log=True),
    )
    squares: float = param(
        0.0,
        "weight of an item's own second moments beside its first; 0: not sent",
        low=0,
        high=100,
        search=(0.0, 0.5, 1.0),
    )
    sampled: int = param(0, "k: items of a person that a round is told of, drawn evenly; 0: all", low=0)
    init_scale: float = param(0.1, "spread of the initial item factors, over √factors", low=1e-9)

    about: ClassVar[About] = About(
        title="alternating least squares: clients add sufficient statistics under noise",
        paper="Chien et al., Private Alternating Least Squares, ICML 2021",
        rounds=3,
        draws_negatives=False,
        divides=False,
    )

    @property
    def device(self) -> FedIALS:
        """The part shared with implicit ALS: the initial factors, and a person's vector."""
        return FedIALS(**common_params(self, FedIALS))

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return self.device.init_shared(catalogue, rng)

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, n_items = self.factors, catalogue.n_items
        row = F + F * (F + 1) // 2 * (self.squares > 0)
        held = 3 * n_items * F + longest * (4 * F + 3 * row + 32) + 30 * F * F
        operations = 4 * (n_items + longest) * F * F + 8 * F**3 + longest * (8 * row + 100)
        return Work.of(held, operations, calls=400, sent=F * F + max(longest, n_items) * row)

    def prepare(self, data: Data, rng: Rng) -> Batch:
        told = data.valid
        if self.sampled:
            drawn = torch.where(data.valid, rng.uniform(len(data.items)), 2.0)
            told = data.valid & (drawn.argsort(stable=True).argsort() < self.sampled)
        return {"items": data.items, "valid": data.valid, "told": told}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        items, told, table = batch["items"], batch["told"], shared["item"]
        x = self.device.user_vector(shared, items, batch["valid"])
        x = x / x.norm().clamp_min(TINY)
        square = halved(torch.outer(x, x))
        row = torch.cat([x, self.squares * square]) if self.squares else x
        weight = (1.0 + told.sum() * (1.0 + self.squares**2)) ** -0.5
        rows = Rows(torch.where(told, items, -1), (weight * row).expand(len(items), -1), len(table))
        return {"gram": weight * square, "item": rows}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        gram = _semidefinite(whole(total.sum["gram"], self.factors))
        first, second = total.sum["item"].tensor_split([self.factors], dim=1)
        mean = gram.diagonal().mean().clamp_min(TINY)
        system = gram + self.item_ridge * mean * torch.eye(self.factors, device=gram.device)
        if self.squares:
            system = system + self.confidence / self.squares * _semidefinite(whole(second, self.factors))
        return {"item": torch.linalg.solve(system, (1.0 + self.confidence) * first[..., None])[..., 0]}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items] @ self.device.user_vector(shared, data.items, data.valid)


def halved(square: Tensor) -> Tensor:
    """The upper half of a symmetric matrix, as long as the whole.

    >>> halved(torch.tensor([[1.0, 2.0], [2.0, 3.0]])).square().sum()
    tensor(18.)
    """
    rows, columns = upper(len(square))
    return square[rows, columns] * torch.where(rows == columns, 1.0, 2.0**0.5)


def whole(halves: Tensor, size: int) -> Tensor:
    """The symmetric matrices, (…, size, size), that these are the upper halves of.

    >>> whole(halved(torch.eye(2)), 2)
    tensor([[1., 0.],
            [0., 1.]])
    """
    rows, columns = upper(size)
    halves = halves * torch.where(rows == columns, 1.0, 0.5**0.5).to(halves)
    squares = halves.new_empty(*halves.shape[:-1], size, size)
    squares[..., rows, columns] = halves
    squares[..., columns, rows] = halves
    return squares


def _semidefinite(square: Tensor) -> Tensor:
    """The nearest positive semidefinite matrices: noise may have left negative eigenvalues."""
    values, vectors = torch.linalg.eigh(square)
    return (vectors * values.clamp_min(0.0)[..., None, :]) @ vectors.mT

"""FedIALS: implicit alternating least squares, federated exactly.

Collaborative Filtering for Implicit Feedback Datasets (Hu, Koren and Volinsky, ICDM 2008), with the split
between device and server of Federated Collaborative Filtering (Ammad-ud-din et al., 2019) but none of its
gradient steps: the item half is a sum over people, so each client adds its part and the server solves.
`scaling` is Rendle et al.'s (Revisiting the Performance of iALS, RecSys 2022): larger rows, larger λ. It
needs the number of people of an item, so that each row then ends with a 1.

| Hu et al.                                  | here                                              |
|--------------------------------------------|---------------------------------------------------|
| y_i, item factors                          | `shared["item"]`, M × `factors`                   |
| x_u = (YᵀCᵘY + λI)⁻¹ YᵀCᵘp(u)              | `user_vector`, solved on the device when needed   |
| c_ui = 1 + α where u interacted with i     | `confidence` is α                                 |
| λ                                          | `regularisation`, a row's own where `scaling` > 0 |
| Σ_u x_u x_uᵀ                               | `update["gram"]`                                  |
| the sums over the people of item i         | `update["item"]`: rows [x, upper half of x xᵀ]    |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import (
    About,
    Batch,
    Catalogue,
    Data,
    Rows,
    Stateless,
    Total,
    Tree,
    Update,
    Work,
    gram,
    param,
    table_size,
)
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["FedIALS"]

TINY = 1e-9


@dataclass(frozen=True)
class FedIALS(Stateless):
    """Each client solves its own vector and contributes sufficient statistics; the server solves the items'.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FedIALS(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    uplink: Channel = Channel()
    factors: int = param(16, "size of a user's and of an item's vector", low=1, search=(8, 16, 32, 64))
    confidence: float = param(
        5.0, "α: extra weight of an interaction over a non-interaction", low=0, search=Range(0.5, 50, log=True)
    )
    regularisation: float = param(1.0, "λ", low=1e-9, search=Range(0.01, 100, log=True))
    scaling: float = param(0.0, "ν: a row with n members has λ (n + others / α)^ν; 0: λ for all", low=0, high=1)
    init_scale: float = param(0.1, "spread of the initial item factors, over √factors", low=1e-9)

    about: ClassVar[About] = About(
        title="implicit ALS: clients add sufficient statistics, the server solves; exact",
        paper="Hu et al., ICDM 2008; Ammad-ud-din et al., Federated Collaborative Filtering, 2019",
        rounds=5,
    )

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        item = rng.normal(catalogue.n_items, self.factors) * (self.init_scale * self.factors**-0.5)
        return {"item": item}

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, n_items = self.factors, catalogue.n_items
        row = F + F * (F + 1) // 2 + 3
        held = 3 * n_items * F + longest * (4 * F + 3 * row + 16) + 24 * F * F
        operations = 4 * (n_items + longest) * F * F + 8 * F**3 + 8 * longest * row
        return Work.of(held, operations, calls=300, sent=F * F + max(longest, n_items) * row)

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": data.items, "valid": data.valid}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        x = self.user_vector(shared, batch["items"], batch["valid"])
        square = torch.outer(x, x)
        row = torch.cat([x, square[upper(self.factors)], x.new_ones(int(self.scaling > 0))])
        index = torch.where(batch["valid"], batch["items"], -1)
        return {"gram": square, "item": Rows(index, row.expand(len(index), -1), len(shared["item"]))}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        rows, columns = upper(self.factors)
        vectors, halves, members = total.sum["item"].tensor_split([self.factors, self.factors + len(rows)], dim=1)
        squares = halves.new_empty(len(halves), self.factors, self.factors)
        squares[:, rows, columns] = halves
        squares[:, columns, rows] = halves
        return {"item": self._solve(total.sum["gram"], squares, vectors, members.sum(1), total.clients)}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items] @ self.user_vector(shared, data.items, data.valid)

    def user_vector(self, shared: Tree, items: Tensor, valid: Tensor) -> Tensor:
        """x_u, from the server's table and the person's items; zeros if the system has no solution."""
        seen = shared["item"][items] * valid[:, None]
        x = self._solve(gram(shared), seen.T @ seen, seen.sum(0), valid.sum(), table_size(shared))
        return torch.where(torch.isfinite(x).all(), x, 0.0)

    def ridge(self, members: Tensor, others: int) -> Tensor:
        """λ for rows with so many members, out of so many on the other side."""
        return self.regularisation * (members + others / max(self.confidence, TINY)) ** self.scaling

    def _solve(self, gram: Tensor, squares: Tensor, vectors: Tensor, members: Tensor, others: int) -> Tensor:
        """(G + α Σ yyᵀ + λI)⁻¹ (1 + α) Σ y, for one row or many; not finite if the system is singular.

        Nothing is raised then: whether a client fails would tell what it has.
        """
        ridge = self.ridge(members, others)[..., None, None] * torch.eye(self.factors, device=gram.device)
        system = gram + self.confidence * squares + ridge
        solution, info = torch.linalg.solve_ex(system, (1.0 + self.confidence) * vectors)
        return torch.where((info == 0)[..., None], solution, torch.nan)


def upper(size: int) -> tuple[Tensor, Tensor]:
    """Where the upper half of a square matrix is: rows and columns."""
    rows, columns = torch.triu_indices(size, size)
    return rows, columns

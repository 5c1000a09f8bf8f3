"""FED-MVMF: Federated Multi-view Matrix Factorization for Personalized Recommendations (Flanagan et al., 2020,
arXiv:2004.04256).

Implicit matrix factorisation of three kinds of data with common vectors: who has which item, what people are like, and
what items are like.

J = Σ_ij c_ij (r_ij − p_i q_jᵀ)² + λ₁ Σ_i Σ_v ‖x_iv − p_i U_vᵀ‖² + λ₁ Σ_j ‖y_j − q_j Vᵀ‖² + λ₂ (all squares)

| paper                                                 | here                                                       |
|-------------------------------------------------------|------------------------------------------------------------|
| q_j, item factors                                     | `shared["item"]`, M × `factors`                            |
| U, factors of the user features                       | `shared["view/NAME"]`, a row for each input of that view   |
| x_i, user features; y_j, item features                | `towers.inputs` of each view; `shared["features"]`         |
| c_ij = 1 + α r_ij; λ₂                                 | `confidence` is α; `regularisation`                        |
| λ₁                                                    | `view_weight` for people's views, `item_weight` for items  |
| p_i, in closed form on the device                     | `user_vector`                                              |
| ∂J/∂q_j, devices: −2 Σ_i c_ij (r_ij − p_i q_jᵀ) p_i   | the update's `item` and `gram`, as in `fcf`                |
| ∂J/∂U_v, devices: −2 λ₁ Σ_i (x_iv − p_i U_vᵀ)ᵀ p_i    | the update's `view/NAME`                                   |
| V, and its part of ∂J/∂q_j                            | `item_side`, at the server                                 |
| Adam                                                  | `learning_rate`, `beta1`, `beta2`, `eps`                   |

Features of people never leave a device: it sends its part of the gradient of each view's matrix. Features of items are
public. A view that knows nothing of a person has no part in their vector and a gradient of zero. Somebody without any
history has a vector by their views alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import About, Batch, Catalogue, Data, Rows, Stateless, Total, Tree, Update, Work, gram, param
from homebody.methods.fcf import adam, adam_decay
from homebody.models.towers import input_width, inputs, item_rows, row_count
from homebody.models.views import item_columns, knows, view_columns
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["FedMVMF"]

VIEW = "view/"


@dataclass(frozen=True)
class FedMVMF(Stateless):
    """Each client solves its vector from its items and its views; the server steps with Adam on all gradients' sum.

    >>> import homebody as hb
    >>> from homebody.testing import described
    >>> model = hb.fit(hb.FedMVMF(factors=4), described(), rounds=1, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    uplink: Channel = Channel()
    views: str = param("", "views that people are described by, such as profile,taste; empty: every view of the data")
    features: str = param("", "items' features it reads, such as genres; empty: all but texts and numbers")
    factors: int = param(16, "size of a user's and of an item's vector", low=1, search=(8, 16, 32, 64))
    confidence: float = param(
        8.0, "α: extra weight of an interaction over a non-interaction", low=0, search=Range(0.5, 50, log=True)
    )
    view_weight: float = param(1.0, "λ₁ of people's views", low=0, search=Range(0.1, 100, log=True))
    item_weight: float = param(10.0, "λ₁ of items' features", low=0, search=Range(0.1, 100, log=True))
    regularisation: float = param(50.0, "λ₂", low=1e-9, search=Range(0.01, 100, log=True))
    learning_rate: float = param(0.05, "Adam's learning rate", low=0, search=Range(0.005, 0.5, log=True))
    beta1: float = param(0.9, "β₁: what Adam's mean gradient keeps a round", low=0, high=1, check=adam_decay)
    beta2: float = param(0.99, "β₂: what Adam's mean squared gradient keeps a round", low=0, high=1, check=adam_decay)
    eps: float = param(1e-8, "ε: added to the root of Adam's mean squared gradient", low=1e-30)
    init_scale: float = param(0.1, "spread of the initial factors, over √factors", low=1e-9)

    needs: ClassVar[tuple[str, ...]] = ("user features",)
    uses: ClassVar[tuple[str, ...]] = ("item features",)
    about: ClassVar[About] = About(
        title="matrix factorisation of interactions, people's views and items' features, with common vectors",
        paper="Flanagan et al., Federated Multi-view Matrix Factorization for Personalized Recommendations, 2020",
        rounds=50,
        draws_negatives=False,
    )

    def takes_in(self, catalogue: Catalogue) -> tuple[str, ...]:
        return tuple(name for columns in view_columns(catalogue, self.views).values() for name in columns)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        scale = self.init_scale * self.factors**-0.5
        shared = {"item": scale * rng.normal(catalogue.n_items, self.factors), "features": self._items(catalogue)}
        for name, columns in view_columns(catalogue, self.views).items():
            width = input_width(list(columns.values()))
            shared[VIEW + name] = scale * rng.fold("view", name).normal(width, self.factors)
        return shared

    def _items(self, catalogue: Catalogue) -> Tensor:
        """Y: a row for each item."""
        columns = item_columns(catalogue, self.features, texts=False)
        device = next((one.values.device for one in columns.values()), torch.device("cpu"))
        table = torch.zeros(catalogue.n_items, row_count(columns), device=device)
        return table.scatter_add(1, *item_rows(columns)) if columns else table

    def init_server(self, shared: Tree) -> Tree:
        # Steps are counted for each row: an item that comes later has moments that are younger.
        state: Tree = {}
        for name in ("item", *_views(shared)):
            zero = torch.zeros_like(shared[name])
            state |= {f"{name}/mean": zero, f"{name}/square": zero, f"{name}/steps": zero[:, 0]}
        return state

    def prepare(self, data: Data, rng: Rng) -> Batch:
        views = {
            VIEW + name: inputs(columns, data.features)
            for name, columns in view_columns(data.catalogue, self.views).items()
        }
        return {"items": data.items, "valid": data.valid, **views}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        table, items, valid = shared["item"], batch["items"], batch["valid"]
        p = self.user_vector(shared, batch)
        weight = 1.0 + self.confidence - self.confidence * (table[items] @ p)
        update: Update = {
            "gram": torch.outer(p, p),
            "item": Rows(torch.where(valid, items, -1), torch.outer(weight, p), len(table)),
        }
        for name in _views(shared):
            update[name] = torch.outer(knows(batch[name]) * (batch[name] - shared[name] @ p), p)
        return update, local

    def user_vector(self, shared: Tree, batch: Batch) -> Tensor:
        """p = (QᵀCQ + λ₁ Σ_v U_vᵀU_v + λ₂I)⁻¹ (QᵀC r + λ₁ Σ_v U_vᵀx_v); zeros if the system has no solution."""
        table = shared["item"]
        own = table[batch["items"]] * batch["valid"][:, None]
        system = gram(shared) + self.confidence * own.T @ own
        system = system + self.regularisation * torch.eye(self.factors, device=table.device)
        right = (1.0 + self.confidence) * own.sum(0)
        for name in _views(shared):
            known = self.view_weight * knows(batch[name])
            system = system + known * (shared[name].T @ shared[name])
            right = right + known * (shared[name].T @ batch[name])
        found, info = torch.linalg.solve_ex(system, right)
        return torch.where((info == 0) & torch.isfinite(found).all(), found, 0.0)

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        after, kept = dict(shared), dict(state)
        for name, slope in self.gradients(shared, total).items():
            mean, square, steps = (f"{name}/{part}" for part in ("mean", "square", "steps"))
            after[name], kept[mean], kept[square], kept[steps] = adam(
                shared[name], slope, state[mean], state[square], state[steps], self
            )
        return after, kept

    def gradients(self, shared: Tree, total: Total) -> Tree:
        """∂J/∂Q and every ∂J/∂U_v, from what the devices sent and what items are like."""
        table = shared["item"]
        f = total.sum["item"] - table @ total.sum["gram"]
        slopes = {"item": -2.0 * f + self.item_side(table, shared["features"]) + 2.0 * self.regularisation * table}
        for name in _views(shared):
            slopes[name] = -2.0 * self.view_weight * total.sum[name] + 2.0 * self.regularisation * shared[name]
        return slopes

    def item_side(self, table: Tensor, features: Tensor) -> Tensor:
        """−2 λ₁ (Y − QVᵀ) V, with the V that is best for Q: (λ₁ QᵀQ + λ₂I) Vᵀ = λ₁ QᵀY."""
        system = self.item_weight * table.T @ table + self.regularisation * torch.eye(self.factors, device=table.device)
        found, info = torch.linalg.solve_ex(system, self.item_weight * table.T @ features)
        v = torch.where(info == 0, found, 0.0).T
        return -2.0 * self.item_weight * (features - table @ v.T) @ v

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items] @ self.user_vector(shared, self.prepare(data, Rng.of(0)))

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, n_items = self.factors, catalogue.n_items
        views = [input_width(list(columns.values())) for columns in view_columns(catalogue, self.views).values()]
        described, inside = row_count(item_columns(catalogue, self.features, texts=False)), sum(views)
        held = n_items * (3 * F + described) + longest * (8 * F + 32) + (24 + 4 * len(views)) * F * F + 8 * inside * F
        operations = 4 * (n_items + longest + inside) * F * F + 8 * F**3 + 40 * (longest + inside) * F
        sent = F * F + max(longest, n_items) * (F + 1) + inside * F
        return Work.of(held, operations, calls=300 + 60 * len(views), sent=sent)


def _views(shared: Tree) -> list[str]:
    return [name for name in shared if name.startswith(VIEW)]

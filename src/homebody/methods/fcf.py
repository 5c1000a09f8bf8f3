"""FCF: Federated Collaborative Filtering for Privacy-Preserving Personalized Recommendation System (Ammad-ud-din et
al., 2019, arXiv:1901.09888).

Implicit matrix factorisation. The device solves its user vector in closed form, as in `fedials`; the server moves the
item factors by one step of Adam a round on the gradient that the devices add up.

| paper                                                | here                                                      |
|------------------------------------------------------|-----------------------------------------------------------|
| y_i, item factors                                    | `shared["item"]`, M × `factors`                           |
| x_u = (YCᵘYᵀ + λI)⁻¹ YCᵘp(u)                         | `FedIALS.user_vector`, solved on the device when needed   |
| c_ui = 1 + α r_ui; λ                                 | `confidence` is α; `regularisation`                       |
| f(u,i) = [c_ui (p_ui − x_uᵀ y_i)] x_u                | `update`, see below                                       |
| ∂J/∂y_i = −2 Σ_u f(u,i) + 2λ y_i                     | `gradient`, at the server                                 |
| Adam's γ, β₁, β₂, ε                                  | `learning_rate`, `beta1`, `beta2`, `eps`                  |

The paper uploads f(u,i) for every item of the catalogue. For an item that u does not have it is −(x xᵀ) y_i, the same
matrix for all of them, and the server knows y_i: so a device sends x xᵀ once, and for each item of its own what f has
on top of that, [1 + α − α xᵀy_i] x. The sum over people is the same to the last term. What a channel does with it is
not: a clip bounds this pair and not the dense table, and rows name the items a person has, which a dense table only
implies. An item that someone has twice counts as two, as in `fedials`.

Where few take part in a round, λ weighs more against their sum: the loss is the paper's, of those who answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from homebody.core import About, Batch, Catalogue, Data, Rows, Stateless, Total, Tree, Update, Work, param
from homebody.errors import HomebodyError
from homebody.methods.fedials import FedIALS
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range, common_params

if TYPE_CHECKING:
    from homebody.methods.fed_mvmf import FedMVMF

__all__ = ["FCF", "adam"]


def adam_decay(name: str, value: float) -> None:
    """Refuse a decay with which Adam's means never take in a gradient."""
    if value == 1.0:
        raise HomebodyError(f"{name} must be under 1, or Adam never learns of a gradient: not {value:g}.")


@dataclass(frozen=True)
class FCF(Stateless):
    """Each client solves its own vector and sends its gradient of the item factors; the server steps with Adam.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FCF(factors=4), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    uplink: Channel = Channel()
    factors: int = param(32, "size of a user's and of an item's vector", low=1, search=(8, 16, 32, 64))
    confidence: float = param(
        2.0, "α: extra weight of an interaction over a non-interaction", low=0, search=Range(0.5, 50, log=True)
    )
    regularisation: float = param(1.0, "λ", low=1e-9, search=Range(0.01, 100, log=True))
    learning_rate: float = param(0.05, "γ: Adam's learning rate", low=0, search=Range(0.005, 0.5, log=True))
    beta1: float = param(0.9, "β₁: what Adam's mean gradient keeps a round", low=0, high=1, check=adam_decay)
    beta2: float = param(0.99, "β₂: what Adam's mean squared gradient keeps a round", low=0, high=1, check=adam_decay)
    eps: float = param(1e-8, "ε: added to the root of Adam's mean squared gradient", low=1e-30)
    init_scale: float = param(0.1, "spread of the initial item factors, over √factors", low=1e-9)

    about: ClassVar[About] = About(
        title="implicit matrix factorisation: clients solve their vectors, the server steps with Adam",
        paper="Ammad-ud-din et al., Federated Collaborative Filtering, 2019",
        rounds=50,
        draws_negatives=False,
    )

    @property
    def device(self) -> FedIALS:
        """The part shared with implicit ALS: the initial factors, and a person's vector."""
        return FedIALS(**common_params(self, FedIALS))

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return self.device.init_shared(catalogue, rng)

    def init_server(self, shared: Tree) -> Tree:
        # Steps are counted for each item: one that comes later has moments that are younger.
        item = shared["item"]
        return {"mean": torch.zeros_like(item), "square": torch.zeros_like(item), "steps": torch.zeros_like(item[:, 0])}

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, n_items = self.factors, catalogue.n_items
        held = 3 * n_items * F + longest * (8 * F + 32) + 24 * F * F
        operations = 4 * (n_items + longest) * F * F + 8 * F**3 + 40 * longest * F
        return Work.of(held, operations, calls=300, sent=F * F + max(longest, n_items) * (F + 1))

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": data.items, "valid": data.valid}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        table, items, valid = shared["item"], batch["items"], batch["valid"]
        x = self.device.user_vector(shared, items, valid)
        weight = 1.0 + self.confidence - self.confidence * (table[items] @ x)
        rows = Rows(torch.where(valid, items, -1), torch.outer(weight, x), len(table))
        return {"gram": torch.outer(x, x), "item": rows}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        slope = self.gradient(shared["item"], total)
        item, mean, square, steps = adam(shared["item"], slope, state["mean"], state["square"], state["steps"], self)
        return {"item": item}, {"mean": mean, "square": square, "steps": steps}

    def gradient(self, table: Tensor, total: Total) -> Tensor:
        """∂J/∂Y, from what the devices sent."""
        f = total.sum["item"] - table @ total.sum["gram"]
        return -2.0 * f + 2.0 * self.regularisation * table

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return shared["item"][items] @ self.device.user_vector(shared, data.items, data.valid)


def adam(
    table: Tensor, slope: Tensor, mean: Tensor, square: Tensor, steps: Tensor, by: FCF | FedMVMF
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One step of Adam down this slope: the table and its moments after it. `steps` counts those of each row."""
    mean = by.beta1 * mean + (1.0 - by.beta1) * slope
    square = by.beta2 * square + (1.0 - by.beta2) * slope**2
    steps = steps + 1.0
    unbiased_mean = mean / (1.0 - by.beta1**steps)[:, None]
    unbiased_square = square / (1.0 - by.beta2**steps)[:, None]
    return table - by.learning_rate * unbiased_mean / (unbiased_square.sqrt() + by.eps), mean, square, steps

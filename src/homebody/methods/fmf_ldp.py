"""FMF-LDP: Stronger Privacy for Federated Collaborative Filtering with Implicit Feedback (Minto et al., RecSys 2021).

| paper                                            | here                                                       |
|--------------------------------------------------|------------------------------------------------------------|
| V, M × F item matrix                             | `shared["item"]`                                           |
| c_ui = 1 + α r_ui                                | `confidence` is α; r: how often the item is in the history |
| x_u = (VCᵘVᵀ + λI)⁻¹ VCᵘp(u)  (4)                | `user_vector`, solved on the device, never sent            |
| f(u, i) = c_ui (p_ui − x·v_i) x  (5)             | `update["item"]`                                           |
| k entries, one ε-LDP bit each (Algorithm 1)      | `OneBit(epsilon, k)` in the channel                        |
| proxy network                                    | `Shuffle` in the channel; on devices `homebody proxy`      |
| V ← V − γ(−2 mean f + 2λV), 20 steps an epoch    | `server`                                                   |

**As published** (`decoder=published`). The 20 steps of an epoch reuse one set of reports: with new ones for each, ε
would be 20 times as large. f is −½ of the gradient; Algorithm 2 leaves the −2 out. As the paper is written, the k
reports of a device add up, and its mean is k times the gradient; here they are averaged, and its γ does well so.

**Improved** (`decoder=improved`): the same devices and the same reports, but a server that asks better. V may be
anything, so it sends V = s [1, δT] with a tiny s, and T's columns orthogonal to 1. Then x is so large that nearly every
entry of f is projected to ±1, and a report answers one clear question: the sign of (2p_ui − 1) x_uf.

- Column 0: x_u0 > 0, so its mean over people is 2q_i − 1, where q_i is the share of people who have item i.
- Taste f: x_uf has the sign s_uf of Σ_j T_jf over the person's history; so the mean m_if = E[(2p_ui − 1) s_uf] says how
  item i goes together with that sign. Half its mean over epochs, made orthogonal to 1 and to q, is B: a sketch of the
  items' covariance. The next T is B made orthonormal: a power iteration that averages its noise and has no learning
  rate. When ranking, each column is shrunk by the part of it that is noise (James and Stein).
- At first V = s 1: all F columns ask for popularity, and what they differ by is the noise, which is so measured. Tastes
  are asked once 90 % of the spread of q is not noise; where that never comes, popularity is what can be had.
- Devices rank with another V, `shared["rank"]` = [q, B] at a scale at which λ is a ridge of `ridge`, by the same solve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody.core import WHOLE, About, Batch, Catalogue, Data, Stateless, Total, Tree, Update, Work, param
from homebody.privacy import Channel, OneBit, Shuffle
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["FMFLDP"]

DELTA = 0.1
"""δ: so small that tastes do not move x·v out of [0, 1], where a report would change its sign."""
RELIABLE = 0.9
TINY = 1e-12
LARGEST = 1e18
"""The largest s: its square still fits into a 32-bit float."""


@dataclass(frozen=True)
class FMFLDP(Stateless):
    """Implicit matrix factorisation from one-bit reports of single gradient entries.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FMFLDP(factors=2), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> round(model.epsilon["server"], 1)
    156.5
    """

    uplink: Channel = Channel(OneBit(epsilon=2.5, k=100), Shuffle())
    decoder: str = param("improved", "how the server decodes reports", choices=("improved", "published"))
    factors: int = param(5, "F: size of a user's and of an item's vector", low=2, search=(3, 5, 8))
    confidence: float = param(4.0, "α: extra weight of an interaction", low=0, search=Range(0.1, 40, log=True))
    regularisation: float = param(1e-6, "λ", low=1e-12)
    learning_rate: float = param(
        1e-3, "published: γ, the server's learning rate", low=0, search=Range(1e-5, 1, log=True)
    )
    steps: int = param(20, "published: the server's steps on one epoch's reports", low=1)
    init_scale: float = param(0.1, "published: spread of the first V", low=1e-9, search=Range(0.01, 1, log=True))
    ridge: float = param(0.1, "improved: regularisation of ranking", low=1e-9, search=Range(0.01, 1, log=True))

    about: ClassVar[About] = About(
        title="implicit matrix factorisation from one-bit ε-LDP reports through a shuffling proxy",
        paper="Minto et al., Stronger Privacy for Federated Collaborative Filtering, RecSys 2021",
        rounds=20,
        draws_negatives=False,
        dense=True,
    )

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        size = catalogue.n_items, self.factors
        if self.decoder == "published":
            return {"item": self.init_scale * rng.normal(*size)}
        return {"item": torch.full(size, self.scale), "rank": torch.zeros(size)}

    def init_server(self, shared: Tree) -> Tree:
        V = shared["item"]
        if self.decoder == "published":
            return {}
        # Rounds are counted for each item: one that comes later is averaged over fewer.
        none, zero = torch.zeros_like(V[:, 0]), torch.zeros(())
        tastes = torch.zeros_like(V[:, 1:])
        return {"told": none, "asked": none, "tastes": tastes, "tasted": none, "noise": torch.zeros(2), "rounds": zero}

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, n_items = self.factors, catalogue.n_items
        held = 2 * ((8 * F + 64) * n_items + longest * (8 * F + 16) + 24 * F * F)
        operations = (n_items + longest) * (4 * F * F + 20 * F + 100) + 8 * F**3
        return Work.of(held, operations, calls=300, sent=n_items * F)

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": data.items, "valid": data.valid}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        V = shared["item"]
        r, x = self.user_vector(V, batch["items"], batch["valid"])
        c, p = 1.0 + self.confidence * r, (r > 0).to(V.dtype)
        f = (c * (p - V @ x))[:, None] * x
        return {"item": f}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return (self._steps if self.decoder == "published" else self._sketch)(shared, state, total)

    def _steps(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        """Algorithm 2."""
        V, f = shared["item"], total.mean["item"]
        for _ in range(self.steps):
            V = V - self.learning_rate * (-2.0 * f + 2.0 * self.regularisation * V)
        return {"item": V}, state

    def _sketch(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        """Update popularity and the sketch of the items' covariance, and choose the next V."""
        m, V, kept = total.mean["item"], shared["item"], dict(state)
        mean = {"item": m, **total.told}["item"]
        popular = bool((V - self.scale).abs().max() == 0)
        if popular:
            kept["told"], kept["asked"] = state["told"] + mean.sum(1), state["asked"] + self.factors
            kept["noise"] = state["noise"] + torch.stack([mean.var(1).mean(), m.var(1).mean()])
            kept["rounds"] = state["rounds"] + 1
        else:
            kept["told"], kept["asked"] = state["told"] + mean[:, 0], state["asked"] + 1
            kept["tastes"], kept["tasted"] = state["tastes"] + m[:, 1:], state["tasted"] + 1
        q = 0.5 * (1.0 + kept["told"] / kept["asked"])
        # Of half of what one round says at an entry, over its reports and as a plain mean: copies differ by it alone.
        # Over its reports is quieter where nearly all say the same, as of popularity; tastes are never so sure.
        noise, taste_noise = 0.25 * kept["noise"] / kept["rounds"]
        known = torch.stack([torch.ones_like(q), q], 1)
        B = 0.5 * kept["tastes"] / kept["tasted"].clamp(min=1)[:, None]
        T = _orthonormal(m[:, 1:] - m.mean(1, keepdim=True) if popular else B, known)
        if popular and not noise / kept["asked"].max() <= (1.0 - RELIABLE) * q.var(correction=0):
            item = torch.full_like(V, self.scale)
        else:
            item = self.scale * torch.cat([torch.ones_like(q)[:, None], DELTA * len(q) ** 0.5 * T], 1)
        B = B - (basis := _orthonormal(known)) @ (basis.T @ B)
        left = taste_noise / kept["tasted"].max().clamp(min=1)
        B = B * (1.0 - left / B.square().mean(0).clamp(min=TINY)).clamp(min=0)
        rank = (self.regularisation / self.ridge) ** 0.5 * torch.cat([q[:, None], B], 1)
        return {"item": item, "rank": rank}, kept

    @property
    def scale(self) -> float:
        """s: so small that nearly every entry of f is projected, so large that λ does not matter."""
        return min((0.01 * self.regularisation) ** 0.5, LARGEST)

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        V = shared["item"] if self.decoder == "published" else shared["rank"]
        _, x = self.user_vector(V, data.items, data.valid, shared.get(f"{WHOLE}gram"))
        return V[items] @ x

    def user_vector(self, V: Tensor, items: Tensor, valid: Tensor, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """r, how often each item is in the person's history, and x, which solves for it against V.

        gram: VᵀV of the whole table, where V is a part of it.
        """
        r = torch.zeros(len(V), device=V.device).scatter_add(0, items, valid.to(V.dtype))
        whole, seen = V.double(), V[items].double() * valid[:, None]
        ridge = self.regularisation * torch.eye(self.factors, dtype=whole.dtype, device=V.device)
        system = (whole.T @ whole if gram is None else gram.double()) + self.confidence * (seen.T @ seen) + ridge
        # An item that is there r times adds (1 + αr) v in all.
        # Nothing is raised where there is no solution: whether a client fails would tell what it has.
        x, _ = torch.linalg.solve_ex(system, (self.confidence + 1.0 / r[items].clamp(min=1)).double() @ seen)
        x = x.to(V.dtype)
        return r, torch.where(torch.isfinite(x).all(), x, 0.0)


def _orthonormal(columns: Tensor, others: Tensor | None = None) -> Tensor:
    """The columns made orthonormal, and orthogonal to others, without turning any to the opposite direction."""
    first = columns if others is None else torch.cat([others, columns], 1)
    q, r = torch.linalg.qr(first.double())
    turned = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    turned = torch.nn.functional.pad(turned, (0, first.shape[1] - q.shape[1]))  # more than there is room for are zero
    return turned[:, 0 if others is None else others.shape[1] :].to(columns.dtype)

"""News recommenders for many clients: every news item of a cohort is encoded in one pass.

Under vmap an encoder would run for each client by itself, padding included. Here the rows of all clients are encoded
together, without padding; what follows the encoder is small and runs under vmap. The gradient of the news vectors goes
back through the encoder in parts (`homebody.models.news.encode_many`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad, vmap

from homebody.core import Batch, Catalogue, Tree, Update
from homebody.methods.kernels import Kernel
from homebody.models.news import encode_many
from homebody.text_vectors import news_inputs

if TYPE_CHECKING:
    from homebody.methods.fedrec import FedRec

SIDES = (("history", "real"), ("candidate", "there"))
INDEXED_AT_ONCE = 1024


def total(method: FedRec, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    """The sum of the clients' gradients, and their states."""
    rows: dict[str, list[Tensor]] = {}
    for side, real in SIDES:
        there = batches[real].flatten()
        for name, value in batches.items():
            if name.startswith(f"{side}:"):
                rows.setdefault(name.removeprefix(f"{side}:"), []).append(value.flatten(0, 1)[there])
    vectors, back = encode_many(method.news, shared, {name: torch.cat(parts) for name, parts in rows.items()})
    own = {name: value for name, value in shared.items() if not name.startswith("news/")}
    small = {name: value for name, value in batches.items() if ":" not in name}

    def losses(vectors: Tensor, parameters: Tree) -> tuple[Tensor, Tensor]:
        placed, start = [], 0
        for _, real in SIDES:
            there = batches[real]
            count = int(there.sum())
            empty = vectors.new_zeros(there.numel(), vectors.shape[1])
            filled = empty.index_put((there.flatten().nonzero()[:, 0],), vectors[start : start + count])
            placed.append(filled.view(*there.shape, -1))
            start += count
        one = partial(method.loss, parameters)
        each: Tensor = vmap(one)(*placed, small)
        return each.sum(), each

    (slope, update), each = grad(losses, argnums=(0, 1), has_aux=True)(vectors, own)
    return {**back(slope), **update}, {**locals_, "loss": each}


def index(method: FedRec, shared: Tree, catalogue: Catalogue) -> Tree:
    """The vectors of all news, and a last row of zeros for no news."""
    inputs = news_inputs(method.news, catalogue, shared["pad"].device)
    count = catalogue.n_items + 1
    with torch.no_grad():
        parts = [
            method.news.encode(shared, {name: value[first : first + INDEXED_AT_ONCE] for name, value in inputs.items()})
            for first in range(0, count, INDEXED_AT_ONCE)
        ]
    return {"index/news": torch.cat(parts)}


NEWS = Kernel(total=total, index=index, anywhere=True, mixed=lambda method: not method.news.light)

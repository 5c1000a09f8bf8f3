"""Compiled reports of `fmf_ldp` and `private_popularity`: single entries of tables that nobody writes out.

items (C, L) and valid (C, L) are the clients' padded histories; places (C, k) names k entries of each client's
flattened table, and out (C, k) receives their values. Clients are split into `CHUNKS` fixed parts; each part counts
items in an array of its own, which is all zeros between two clients. Client c writes to row c alone, so the parts may
run in parallel, and the numbers do not depend on the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba as nb
import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch, Tree, Update
from homebody.kernels import store
from homebody.methods.kernels import Kernel
from homebody.methods.kernels.ials import _solve
from homebody.parallel import parallel

if TYPE_CHECKING:
    from homebody.methods.baselines import PrivatePopularity
    from homebody.methods.fmf_ldp import FMFLDP

__all__ = ["FMF_LDP", "PRIVATE_POPULARITY", "entries", "taken", "user_vectors"]

CHUNKS = 64
"""Parts of a cohort, each with its own counts of items."""


@nb.njit(inline="always")
def _count(items, valid, counts):
    for position in range(len(items)):
        if valid[position]:
            counts[items[position]] += 1


@nb.njit(inline="always")
def _forget(items, counts):
    for position in range(len(items)):
        counts[items[position]] = 0


@parallel(over=lambda *_: CHUNKS, fastmath=True, error_model="numpy")
def user_vectors(lower, upper, table, gram, items, valid, confidence, regularisation, out):
    """x = (VᵀCV + λI)⁻¹ VᵀCp for each client, in doubles; an item that stands there r times has c = 1 + α r."""
    clients, width = items.shape
    size = table.shape[1]
    for chunk in range(lower, upper):
        counts = np.zeros(table.shape[0], dtype=np.int32)
        system = np.empty((size, size))
        right = np.empty(size)
        for client in range(chunk * clients // CHUNKS, (chunk + 1) * clients // CHUNKS):
            _count(items[client], valid[client], counts)
            for a in range(size):
                store(gram[a], system[a])
            right[:] = 0.0
            for position in range(width):
                item = items[client, position]
                if valid[client, position] and counts[item] > 0:
                    times = counts[item]
                    counts[item] = 0  # each item once
                    weight = confidence * times
                    for a in range(size):
                        value = np.float64(table[item, a])
                        right[a] += (1.0 + weight) * value
                        for b in range(a + 1):
                            system[a, b] += weight * value * np.float64(table[item, b])
            for a in range(size):
                system[a, a] += regularisation
            _solve(system, right)
            store(right, out[client])


@parallel(over=lambda *_: CHUNKS, error_model="numpy")
def entries(lower, upper, table, vectors, items, valid, confidence, places, out):
    """f = c (p − x·v) x at these places of each client's flattened table."""
    clients = len(items)
    size = table.shape[1]
    for chunk in range(lower, upper):
        counts = np.zeros(table.shape[0], dtype=np.int32)
        for client in range(chunk * clients // CHUNKS, (chunk + 1) * clients // CHUNKS):
            _count(items[client], valid[client], counts)
            for report in range(places.shape[1]):
                item = places[client, report] // size
                score = np.float32(0.0)
                for a in range(size):
                    score += vectors[client, a] * table[item, a]
                times = counts[item]
                weight = np.float32(1.0 + confidence * times)
                error = np.float32(1.0 if times > 0 else 0.0) - score
                out[client, report] = weight * error * vectors[client, places[client, report] - item * size]
            _forget(items[client], counts)


@parallel(over=lambda *_: CHUNKS, error_model="numpy")
def taken(lower, upper, n_items, items, valid, places, out):
    """1 where a client has the item, −1 where it has not."""
    clients = len(items)
    for chunk in range(lower, upper):
        counts = np.zeros(n_items, dtype=np.int32)
        for client in range(chunk * clients // CHUNKS, (chunk + 1) * clients // CHUNKS):
            _count(items[client], valid[client], counts)
            for report in range(places.shape[1]):
                out[client, report] = 1.0 if counts[places[client, report]] > 0 else -1.0
            _forget(items[client], counts)


class _Gradients:
    """Every client's f of FMF-LDP: user vectors are solved at once, entries of f when they are asked for."""

    def __init__(self, method: FMFLDP, table: Tensor, batches: Batch) -> None:
        self.shape = tuple(table.shape)
        self._confidence, self._table = method.confidence, table.contiguous().numpy()
        self._items, self._valid = batches["items"].numpy(), batches["valid"].numpy()
        self._vectors = torch.empty(len(self._items), method.factors)
        whole = table.double()
        gram, ridge = (whole.T @ whole).numpy(), method.regularisation
        user_vectors(self._table, gram, self._items, self._valid, self._confidence, ridge, self._vectors.numpy())

    def at(self, places: Tensor) -> Tensor:
        out, vectors = torch.empty(places.shape), self._vectors.numpy()
        asked = places.contiguous().numpy()
        entries(self._table, vectors, self._items, self._valid, self._confidence, asked, out.numpy())
        return out

    def dense(self) -> Tensor:
        places = torch.arange(self.shape[0] * self.shape[1]).expand(len(self._items), -1)
        return self.at(places).view(-1, *self.shape)


class _Taken:
    """Every client's table of ±1, read only at the entries that its reports are about."""

    def __init__(self, n_items: int, batches: Batch) -> None:
        self.shape = (n_items,)
        self._items, self._valid = batches["items"].numpy(), batches["valid"].numpy()

    def at(self, places: Tensor) -> Tensor:
        out = torch.empty(places.shape)
        taken(self.shape[0], self._items, self._valid, places.contiguous().numpy(), out.numpy())
        return out

    def dense(self) -> Tensor:
        return self.at(torch.arange(self.shape[0]).expand(len(self._items), -1))


def _fmf_ldp(method: FMFLDP, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    return {"item": _Gradients(method, shared["item"], batches)}, locals_


def _private_popularity(method: PrivatePopularity, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    return {"taken": _Taken(len(shared["taken"]), batches)}, locals_


FMF_LDP = Kernel(_fmf_ldp, formulas=True)
PRIVATE_POPULARITY = Kernel(_private_popularity, formulas=True)

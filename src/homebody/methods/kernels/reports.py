"""Compiled user vectors and gradient entries of implicit matrix factorisation: one client a row."""

from __future__ import annotations

import numba as nb
import numpy as np

from homebody.methods.kernels.ials import _solve
from homebody.parallel import parallel

__all__ = ["entries", "taken", "user_vectors"]

CHUNKS = 64
"""Clients are shared out in so many parts, each with its own counts of items."""


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
            system[:] = gram
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
            for a in range(size):
                out[client, a] = right[a]


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

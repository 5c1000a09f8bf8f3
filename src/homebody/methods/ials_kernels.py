"""A compiled half of an ALS sweep."""

from __future__ import annotations

import numba as nb
import numpy as np

__all__ = ["half_sweep"]


@nb.njit(parallel=True, cache=True)
def half_sweep(indptr, members, other, confidence, regularisation):
    """Solve every row's vector against the other side's, by Cholesky factorisation."""
    size = other.shape[1]
    gram = np.zeros((size, size))
    for i in range(other.shape[0]):
        for a in range(size):
            for b in range(a + 1):
                gram[a, b] += other[i, a] * other[i, b]
    for a in range(size):
        gram[a, a] += regularisation
    out = np.zeros((len(indptr) - 1, size))
    for row in nb.prange(len(indptr) - 1):
        system = gram.copy()
        right = np.zeros(size)
        for position in range(indptr[row], indptr[row + 1]):
            vector = other[members[position]]
            for a in range(size):
                right[a] += (1.0 + confidence) * vector[a]
                for b in range(a + 1):
                    system[a, b] += confidence * vector[a] * vector[b]
        for a in range(size):
            for b in range(a + 1):
                rest = system[a, b]
                for c in range(b):
                    rest -= system[a, c] * system[b, c]
                system[a, b] = np.sqrt(rest) if a == b else rest / system[b, b]
        for a in range(size):
            for c in range(a):
                right[a] -= system[a, c] * right[c]
            right[a] /= system[a, a]
        for a in range(size - 1, -1, -1):
            for c in range(a + 1, size):
                right[a] -= system[c, a] * right[c]
            right[a] /= system[a, a]
        out[row] = right
    return out

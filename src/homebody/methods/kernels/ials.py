"""A compiled half of an ALS sweep: every row of one side is solved against the fixed vectors of the other.

indptr (N + 1,) and members are the rows' members as compressed rows; other (M, F) and the result (N, F) are doubles.
Row n reads `other` and writes to out[n] alone, so the rows may be solved in parallel. Of each symmetric system only the
lower half is read.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from homebody.kernels import Array, store
from homebody.parallel import parallel

__all__ = ["half_sweep"]

TOGETHER = 8
"""Members that are added to a row's system at once: the more, the less often it is read and written."""


@nb.njit(fastmath=True, inline="always")
def _add_squares(system, weight, block):
    """weight · Σ y yᵀ over the vectors of a block, into the lower half and a little beyond.

    Whole runs of eight columns are one instruction or two each; single ones at the end would cost as much.
    """
    size = system.shape[0]
    for a in range(size):
        w0, w1, w2, w3 = weight * block[0, a], weight * block[1, a], weight * block[2, a], weight * block[3, a]
        w4, w5, w6, w7 = weight * block[4, a], weight * block[5, a], weight * block[6, a], weight * block[7, a]
        for b in range(min(size, (a // 8 + 1) * 8)):
            system[a, b] += (
                (w0 * block[0, b] + w1 * block[1, b])
                + (w2 * block[2, b] + w3 * block[3, b])
                + (w4 * block[4, b] + w5 * block[5, b])
                + (w6 * block[6, b] + w7 * block[7, b])
            )


@nb.njit(fastmath=True, inline="always")
def _solve(system, right):
    """Cholesky factorisation of the lower half, then both substitutions; both arguments are overwritten."""
    size = len(right)
    for a in range(size):
        for b in range(a + 1):
            rest = system[a, b]
            for c in range(b):
                rest -= system[a, c] * system[b, c]
            system[a, b] = np.sqrt(rest) if a == b else rest / system[b, b]
    for a in range(size):
        rest = right[a]
        for c in range(a):
            rest -= system[a, c] * right[c]
        right[a] = rest / system[a, a]
    for a in range(size - 1, -1, -1):
        right[a] /= system[a, a]
        for c in range(a):
            right[c] -= system[a, c] * right[a]


def half_sweep(indptr: Array, members: Array, other: Array, confidence: float, regularisation: Array) -> Array:
    """Solve every row's vector against the other side's; `regularisation` is each row's own."""
    out = np.zeros((len(indptr) - 1, other.shape[1]))
    _solve_rows(indptr, members, other, _gram(other), confidence, regularisation, out)
    return out


@nb.njit(fastmath=True, error_model="numpy", cache=True)
def _gram(other):
    size = other.shape[1]
    gram = np.zeros((size, size))
    block = np.zeros((TOGETHER, size))
    for start in range(0, other.shape[0], TOGETHER):
        for i in range(TOGETHER):
            if start + i < other.shape[0]:
                store(other[start + i], block[i])
            else:
                block[i] = 0.0
        _add_squares(gram, 1.0, block)
    return gram


@parallel(over="out", fastmath=True, error_model="numpy")
def _solve_rows(lower, upper, indptr, members, other, gram, confidence, regularisation, out):
    size = other.shape[1]
    for row in range(lower, upper):
        system = gram.copy()
        right = np.zeros(size)
        block = np.zeros((TOGETHER, size))
        for start in range(indptr[row], indptr[row + 1], TOGETHER):
            for i in range(TOGETHER):
                if start + i < indptr[row + 1]:
                    store(other[members[start + i]], block[i])
                    for a in range(size):
                        right[a] += (1.0 + confidence) * block[i, a]
                else:
                    block[i] = 0.0
            _add_squares(system, confidence, block)
        for a in range(size):
            system[a, a] += regularisation[row]
        _solve(system, right)
        store(right, out[row])

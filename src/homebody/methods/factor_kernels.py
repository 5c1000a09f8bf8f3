"""A compiled round of logistic factor models: one client a thread, the numbers of the vmapped `client`."""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch, Rows

__all__ = ["train"]


def train(
    table: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batches: Batch,
    rates: tuple[float, float],
    batch_size: int,
    epochs: int,
) -> tuple[Rows, Tensor]:
    """One round for a cohort: `weight` and `bias` change in place; gives the rows' change, and the loss.

    With a bias it is PFedRec's post-tuning; without, a joint step.
    """
    # No wider than they must be: these rows are most of what a round writes and keeps.
    width = int((batches["index"] >= 0).sum(1).max())
    index = batches["index"][:, :width].clone()
    dual = bias is not None
    bias = torch.zeros(len(index)) if bias is None else bias
    change = torch.empty(*index.shape, table.shape[1])
    loss = torch.empty(len(index))
    _train(
        table.numpy(),
        weight.numpy(),
        bias.numpy(),
        index.numpy(),
        batches["slot"].numpy(),
        batches["label"].numpy(),
        batches["valid"].sum(1).numpy(),
        torch.tensor(rates, dtype=torch.float32).numpy(),
        batch_size,
        epochs,
        dual,
        change.numpy(),
        loss.numpy(),
    )
    return Rows(index, change, len(table)), loss


@nb.njit(fastmath=True, inline="always")
def _dot(a, b):
    total = np.float32(0.0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@nb.njit(fastmath=True, error_model="numpy")
def _errors(logit, label, scale, error):
    """The slope of the mean loss at each logit, into `error`; answers the sum of the losses."""
    one, zero = np.float32(1.0), np.float32(0.0)
    linear, logs, product = 0.0, 0.0, 1.0
    for i in range(len(label)):
        z, y = logit[i], label[i]
        e = np.float32(math.exp(-abs(z)))
        p = one / (one + e)
        error[i] = ((p if z >= zero else one - p) - y) * scale
        # The loss is softplus(z) - y z. One logarithm serves many samples, since 1 + e is at most 2.
        linear += max(z, zero) - z * y
        product *= one + e
        if i % 64 == 63:
            logs += math.log(product)
            product = 1.0
    return linear + logs + math.log(product)


@nb.njit(fastmath=True, error_model="numpy", parallel=True, cache=True)
def _train(table, weight, bias, index, slot, label, count, rates, batch_size, epochs, dual, change, loss):
    """Mini-batch SGD on each client's `weight` and `bias`, changed in place, and on the rows it touched.

    dual: step the score function first and the rows against the stepped one (post-tuning), with a bias;
    otherwise both from the same point, without.
    """
    rate, row_rate = rates[0], rates[1]
    width = table.shape[1]
    zero = np.float32(0.0)
    for client in nb.prange(index.shape[0]):
        rows, touched = change[client], index[client]
        n_rows = len(touched)
        while n_rows > 0 and touched[n_rows - 1] < 0:
            n_rows -= 1
        for i in range(n_rows):
            for j in range(width):
                rows[i, j] = table[touched[i], j]
        for i in range(n_rows, len(touched)):
            for j in range(width):
                rows[i, j] = zero
        w, b = weight[client].copy(), bias[client]
        step = np.empty(width, dtype=np.float32)
        logit, error = np.empty((2, batch_size), dtype=np.float32)
        slots, labels, n = slot[client], label[client], count[client]
        total = 0.0
        for _ in range(epochs):
            for start in range(0, n, batch_size):
                stop = min(n, start + batch_size)
                scale = np.float32(1.0 / (stop - start))
                for s in range(start, stop):
                    logit[s - start] = b + _dot(rows[slots[s]], w)
                total += _errors(logit, labels[start:stop], scale, error)
                step[:] = zero
                b_step = zero
                for s in range(start, stop):
                    row, g = rows[slots[s]], error[s - start]
                    b_step += g
                    for j in range(width):
                        step[j] += g * row[j]
                if dual:
                    for j in range(width):
                        w[j] -= rate * step[j]
                    b -= rate * b_step
                    for s in range(start, stop):
                        logit[s - start] = b + _dot(rows[slots[s]], w)
                    _errors(logit, labels[start:stop], scale, error)
                for s in range(start, stop):
                    row = rows[slots[s]]
                    g = row_rate * error[s - start]
                    for j in range(width):
                        row[j] -= g * w[j]
                if not dual:
                    for j in range(width):
                        w[j] -= rate * step[j]
        weight[client] = w
        bias[client] = b
        loss[client] = total / max(1, n * epochs)
        for i in range(n_rows):
            for j in range(width):
                rows[i, j] -= table[touched[i], j]

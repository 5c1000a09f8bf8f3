"""A compiled round of logistic factor models: one client a thread, the numbers of the vmapped `client`."""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch

__all__ = ["train"]


def train(
    table: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    batches: Batch,
    rates: tuple[float, float],
    batch_size: int,
    epochs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One round for a cohort: `weight` and `bias` change in place; gives tuned rows, their change, the loss.

    With a bias it is PFedRec's post-tuning, and tuned rows are given; without, a joint step, and they are not.
    """
    index = batches["index"]
    dual = bias is not None
    bias = torch.zeros(len(index)) if bias is None else bias
    rows = torch.empty(*index.shape, table.shape[1])
    update = torch.empty_like(rows) if dual else rows
    loss = torch.empty(len(index))
    _train(
        table.numpy(),
        weight.numpy(),
        bias.numpy(),
        index.numpy(),
        batches["slot"].numpy(),
        batches["label"].numpy(),
        batches["valid"].sum(1).numpy(),
        (np.float32(rates[0]), np.float32(rates[1])),
        batch_size,
        epochs,
        dual,
        rows.numpy(),
        update.numpy(),
        loss.numpy(),
    )
    return rows, update, loss


@nb.njit(fastmath=True, parallel=True, cache=True)
def _train(table, weight, bias, index, slot, label, count, rates, batch_size, epochs, dual, rows, update, loss):
    """Mini-batch SGD on each client's `weight`, `bias` (changed in place) and touched `rows`.

    dual: step the score function first and the rows against the stepped one (post-tuning), with a bias;
    otherwise both from the same point, without.
    """
    rate, row_rate = rates
    width = table.shape[1]
    for client in nb.prange(index.shape[0]):
        own, touched = rows[client], index[client]
        for i in range(len(touched)):
            for j in range(width):
                own[i, j] = table[touched[i], j] if touched[i] >= 0 else np.float32(0.0)
        w, b = weight[client].copy(), bias[client]
        step = np.empty(width, dtype=np.float32)
        error = np.empty(batch_size, dtype=np.float32)
        slots, labels, n = slot[client], label[client], count[client]
        total = 0.0
        for _ in range(epochs):
            for start in range(0, n, batch_size):
                stop = min(n, start + batch_size)
                scale = np.float32(1.0 / (stop - start))
                step[:] = 0.0
                b_step = np.float32(0.0)
                batch_loss = 0.0
                for s in range(start, stop):
                    row = own[slots[s]]
                    z = b
                    for j in range(width):
                        z += row[j] * w[j]
                    e = np.float32(math.exp(-abs(z)))
                    # softplus(z) - y z, and its slope, without overflow
                    batch_loss += max(z, np.float32(0.0)) - z * labels[s] + math.log1p(e)
                    p = np.float32(1.0) / (np.float32(1.0) + e)
                    g = ((p if z >= 0 else np.float32(1.0) - p) - labels[s]) * scale
                    error[s - start] = g
                    b_step += g
                    for j in range(width):
                        step[j] += g * row[j]
                total += batch_loss
                if dual:
                    for j in range(width):
                        w[j] -= rate * step[j]
                    b -= rate * b_step
                    for s in range(start, stop):
                        row = own[slots[s]]
                        z = b
                        for j in range(width):
                            z += row[j] * w[j]
                        e = np.float32(math.exp(-abs(z)))
                        p = np.float32(1.0) / (np.float32(1.0) + e)
                        error[s - start] = ((p if z >= 0 else np.float32(1.0) - p) - labels[s]) * scale
                for s in range(start, stop):
                    row = own[slots[s]]
                    g = row_rate * error[s - start]
                    for j in range(width):
                        row[j] -= g * w[j]
                if not dual:
                    for j in range(width):
                        w[j] -= rate * step[j]
        weight[client] = w
        bias[client] = b
        loss[client] = total / max(1, n * epochs)
        for i in range(len(touched)):
            for j in range(width):
                update[client, i, j] = own[i, j] - (table[touched[i], j] if touched[i] >= 0 else np.float32(0.0))

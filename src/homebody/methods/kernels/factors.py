"""Compiled rounds of logistic factor models, one client a thread: `fedmf`, `fedrecon`, and `pfedrec` with one layer.

All arrays are C-contiguous. C clients have up to S samples each, which touch up to R rows of the M × F item table:

- table (M, F): the shared item table, only read;
- index (C, R): the items that a client touches, ascending and distinct, then -1;
- slot (C, S): for each sample, the place of its item in `index`; label (C, S);
- count (C,): how many samples are real; they come first;
- change (C, R, F): the client's own copy of its rows during the round, and at its end what was added to them.

Client c writes to row c of each output and to scratch of its own, so the loops over clients may run in parallel, and
the numbers do not depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numba as nb
import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch, Rows, Tree, Update
from homebody.kernels import store
from homebody.methods.kernels import Kernel, arrays
from homebody.parallel import inner, parallel

if TYPE_CHECKING:
    from homebody.methods.fedmf import FedMF
    from homebody.methods.fedrecon import FedRecon
    from homebody.methods.item_table import ItemTable

__all__ = ["FEDMF", "FEDRECON", "errors", "fetch", "room", "train"]


def train(method: ItemTable, shared: Tree, weight: Tensor, bias: Tensor | None, batches: Batch) -> tuple[Rows, Tensor]:
    """One round for a cohort: `weight` and `bias` change in place; gives the rows' change, and the loss."""
    table, rates = shared["item"], torch.tensor([method.learning_rate, method.row_rate(shared)], dtype=torch.float32)
    samples, change, loss = room(table, batches)
    given = arrays(table, weight, torch.zeros(len(weight)) if bias is None else bias, *samples, rates)
    _train(*given, method.batch_size, method.epochs, method.dual, bias is not None, *arrays(change, loss))
    return Rows(samples[0], change, len(table)), loss


def _fedmf(method: FedMF, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    user = locals_["user"].clone()
    change, loss = train(method, shared, user, None, batches)
    return {"item": change}, {"user": user, "loss": loss, **method.tuned(change)}


def _fedrecon(method: FedRecon, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    change, user, loss = _rebuilt(method, shared, batches, batches["support"], batches["support"])
    return {"item": change}, method.kept(locals_, user, loss)


def _fedrecon_adapt(method: FedRecon, shared: Tree, locals_: Tree, batches: Batch) -> Tree:
    count = batches["valid"].sum(1)
    change, user, loss = _rebuilt(method, shared, batches, count, torch.zeros_like(count))
    return {"user": user, "loss": loss, **method.tuned(change)}


def _rebuilt(
    method: FedRecon, shared: Tree, batches: Batch, until: Tensor, after: Tensor
) -> tuple[Rows, Tensor, Tensor]:
    """A user vector from zero on samples before `until`, then steps of rows on those `after`.

    Gives the rows' change, the vectors, and the loss of the last pass that built them.
    """
    table, rates = shared["item"], torch.tensor([method.learning_rate, method.row_rate(shared)], dtype=torch.float32)
    samples, change, loss = room(table, batches)
    user = torch.zeros(len(loss), table.shape[1])
    given = arrays(table, user, *samples, until, after, rates)
    _rebuild(*given, method.batch_size, method.rebuild, method.epochs, *arrays(change, loss))
    return Rows(samples[0], change, len(table)), user, loss


FEDMF = Kernel(_fedmf)
FEDRECON = Kernel(_fedrecon, _fedrecon_adapt)


def room(table: Tensor, batches: Batch) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """`index`, `slot`, `label` and `count`, and empty tensors for the rows' change and for the losses.

    They are no wider than needed: these rows are most of what a round writes and keeps.
    """
    width = int((batches["index"] >= 0).sum(1).max())
    index = batches["index"][:, :width].clone()
    samples = (index, batches["slot"], batches["label"], batches["valid"].sum(1))
    return samples, torch.empty(*index.shape, table.shape[1]), torch.empty(len(index))


@nb.njit(fastmath=True, inline="always")
def _dot(a, b):
    total = np.float32(0.0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@inner(fastmath=True, error_model="numpy")
def errors(logit, label, scale, error):
    """Write the gradient of the mean loss at each logit to `error`, and return the sum of the losses."""
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


@inner()
def fetch(table, touched, rows):
    """Copy the touched rows of the table to `rows`, pad with zeros, and return how many rows there are."""
    n_rows = len(touched)
    while n_rows > 0 and touched[n_rows - 1] < 0:
        n_rows -= 1
    for i in range(n_rows):
        store(table[touched[i]], rows[i])
    rows[n_rows:] = np.float32(0.0)
    return n_rows


@parallel(over="index", fastmath=True, error_model="numpy")
def _train(
    lower, upper, table, weight, bias, index, slot, label, count, rates, batch_size, epochs, dual, offset, change, loss
):
    """Mini-batch SGD on each client's `weight` and `bias`, changed in place, and on the rows it touched.

    weight (C, F), bias (C,): the score functions. dual: step the score function first and the rows against the stepped
    one (post-tuning); otherwise both from the same point. offset: whether there is a bias to step.
    """
    rate, row_rate = rates[0], rates[1]
    width = table.shape[1]
    zero = np.float32(0.0)
    for client in range(lower, upper):
        rows, touched = change[client], index[client]
        n_rows = fetch(table, touched, rows)
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
                total += errors(logit, labels[start:stop], scale, error)
                step[:] = zero
                b_step = zero
                for s in range(start, stop):
                    row, g = rows[slots[s]], error[s - start]
                    b_step += g
                    for j in range(width):
                        step[j] += g * row[j]
                if not offset:
                    b_step = zero
                if dual:
                    for j in range(width):
                        w[j] -= rate * step[j]
                    b -= rate * b_step
                    for s in range(start, stop):
                        logit[s - start] = b + _dot(rows[slots[s]], w)
                    errors(logit, labels[start:stop], scale, error)
                for s in range(start, stop):
                    row = rows[slots[s]]
                    g = row_rate * error[s - start]
                    for j in range(width):
                        row[j] -= g * w[j]
                if not dual:
                    for j in range(width):
                        w[j] -= rate * step[j]
                    b -= rate * b_step
        store(w, weight[client])
        bias[client] = b
        loss[client] = total / max(1, n * epochs)
        for i in range(n_rows):
            for j in range(width):
                rows[i, j] -= table[touched[i], j]


@parallel(over="index", fastmath=True, error_model="numpy")
def _rebuild(
    lower, upper, table, user, index, slot, label, count, until, after, rates, batch_size, passes, epochs, change, loss
):
    """FedRecon: `user` (C, F) from zero on samples before `until`, then the rows on samples from `after` on.

    Batches begin at multiples of their size, whichever part a sample belongs to.
    """
    rate, row_rate = rates[0], rates[1]
    width = table.shape[1]
    for client in range(lower, upper):
        rows, touched = change[client], index[client]
        n_rows = fetch(table, touched, rows)
        w = np.zeros(width, dtype=np.float32)
        step = np.empty(width, dtype=np.float32)
        logit, error = np.empty((2, batch_size), dtype=np.float32)
        slots, labels, n = slot[client], label[client], count[client]
        end, begin = min(n, until[client]), after[client]
        total = 0.0
        for _ in range(passes):
            total = 0.0
            for start in range(0, end, batch_size):
                stop = min(end, start + batch_size)
                scale = np.float32(1.0 / (stop - start))
                for s in range(start, stop):
                    logit[s - start] = _dot(rows[slots[s]], w)
                total += errors(logit, labels[start:stop], scale, error)
                step[:] = np.float32(0.0)
                for s in range(start, stop):
                    row, g = rows[slots[s]], error[s - start]
                    for j in range(width):
                        step[j] += g * row[j]
                for j in range(width):
                    w[j] -= rate * step[j]
        for _ in range(epochs):
            for first in range(0, n, batch_size):
                start, stop = max(first, begin), min(n, first + batch_size)
                if start >= stop:
                    continue
                scale = np.float32(1.0 / (stop - start))
                for s in range(start, stop):
                    logit[s - start] = _dot(rows[slots[s]], w)
                errors(logit, labels[start:stop], scale, error)
                for s in range(start, stop):
                    row, g = rows[slots[s]], row_rate * error[s - start]
                    for j in range(width):
                        row[j] -= g * w[j]
        store(w, user[client])
        loss[client] = total / max(1, end)
        for i in range(n_rows):
            for j in range(width):
                rows[i, j] -= table[touched[i], j]

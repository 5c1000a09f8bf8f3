"""Compiled rounds and scores of score functions with hidden layers, one client a thread: `fedncf` and `pfedrec`.

`table`, `index`, `slot`, `label`, `count` and `change` are laid out as in `factors`. Besides:

- theta (C, weights): each client's layers, flat: for each layer its weights (inputs, outputs), then its offsets;
- person (C, P): each client's vector, the first P inputs of the first layer; P may be 0;
- x (F, batch), acts and slopes (layers, widest, batch): scratch of one client, with samples innermost, so that the
  inner loops run over a batch and become vector instructions.

Client c writes to row c of each output and to scratch of its own, so the loops over clients may run in parallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch, Rows, Tree, Update
from homebody.kernels import NO, YES, store
from homebody.methods.kernels import Kernel, arrays, factors
from homebody.methods.kernels.factors import errors, fetch, room
from homebody.models.networks import ScoreFunction
from homebody.ops import for_cohort
from homebody.parallel import inner, parallel

if TYPE_CHECKING:
    from homebody.methods.fedncf import FedNCF
    from homebody.methods.item_table import ItemTable
    from homebody.methods.pfedrec import PFedRec

__all__ = ["FEDNCF", "PFEDREC", "logits", "train"]

AT_ONCE = 256
"""Items that are scored together: their activations fit into a cache."""


def train(
    method: ItemTable, shared: Tree, theta: Tensor, person: Tensor, person_rate: float, batches: Batch
) -> tuple[Rows, Tensor]:
    """One round for a cohort: `theta` and `person` change in place; gives the rows' change, and the loss."""
    table, rates = shared["item"], (method.learning_rate, method.row_rate(shared), person_rate)
    samples, change, loss = room(table, batches)
    given = arrays(table, theta, person, *samples, torch.tensor(rates, dtype=torch.float32))
    steps = (method.batch_size, method.epochs, method.dual)
    _train(np.array(method.function.widths), *given, *steps, *arrays(change, loss))
    return Rows(samples[0], change, len(table)), loss


def _fedncf(method: FedNCF, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    user = locals_["user"].clone()
    start = locals_["layers"] if method.dual else shared["layers"]
    layers = start.expand(len(user), -1).clone()
    change, loss = train(method, shared, layers, user, method.learning_rate * method.user_rate, batches)
    return method.sent(change, layers, start), {**method.kept(change, layers, user), "loss": loss}


def _pfedrec(method: PFedRec, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    weight, bias = locals_["weight"].clone(), locals_["bias"].clone()
    if method.function.hidden:
        theta = torch.cat([weight, bias[:, None]], dim=1)
        change, loss = train(method, shared, theta, torch.empty(len(theta), 0), 0.0, batches)
        weight, bias = theta[:, :-1], theta[:, -1]
    else:
        change, loss = factors.train(method, shared, weight, bias, batches)
    return {"item": change}, {"weight": weight, "bias": bias, "loss": loss, **method.tuned(change)}


FEDNCF = Kernel(_fedncf)
PFEDREC = Kernel(_pfedrec)


def logits(function: ScoreFunction, weights: Tensor, rows: Tensor, person: Tensor | None) -> Tensor:
    """`function.logit`, for a cohort in one pass; no gradient passes through it."""
    return _logits(weights, rows, weights.new_empty(0) if person is None else person, function)


@for_cohort
def _logits(weights: Tensor, rows: Tensor, person: Tensor, function: ScoreFunction) -> Tensor:
    if weights.device.type != "cpu":
        logits = torch.func.vmap(lambda theta, some, row: function.logit(theta, some, row if len(row) else None))
        return logits(weights, rows, person)
    out = torch.empty(rows.shape[:2])
    # Values common to all clients are stored once, whatever the first dimension says.
    alike, same = weights.stride(0) == 0, rows.stride(0) == 0
    weights, rows = weights[:1] if alike else weights, rows[:1] if same else rows
    ready = alike and same and len(out) > 1
    if ready:  # so has the first layer's share of the items
        rows = rows @ function.parts(weights[0])[0][function.beside :]
    given = arrays(weights.contiguous(), person.contiguous(), rows.contiguous())
    _score(np.array(function.widths), *given, ready, out.numpy())
    return out


@inner(fastmath=True, error_model="numpy")
def _mix(weight, x, n, out):
    """out[j] += Σ_k weight[k, j] x[k], for n samples."""
    high, wide = weight.shape
    for j in range(wide):
        z = out[j]
        k = 0
        while k + 4 <= high:
            a, b, c, d = weight[k, j], weight[k + 1, j], weight[k + 2, j], weight[k + 3, j]
            p, q, r, s = x[k], x[k + 1], x[k + 2], x[k + 3]
            for i in range(n):
                z[i] += a * p[i] + b * q[i] + c * r[i] + d * s[i]
            k += 4
        while k < high:
            a, p = weight[k, j], x[k]
            for i in range(n):
                z[i] += a * p[i]
            k += 1


@inner(fastmath=True, error_model="numpy")
def _outer(x, d, n, out):
    """out[k, j] = Σ_i x[k, i] d[j, i], over n samples."""
    high, wide = out.shape
    for k in range(high):
        p = x[k]
        j = 0
        while j + 4 <= wide:
            a = b = c = e = np.float32(0.0)
            q, r, s, t = d[j], d[j + 1], d[j + 2], d[j + 3]
            for i in range(n):
                v = p[i]
                a += v * q[i]
                b += v * r[i]
                c += v * s[i]
                e += v * t[i]
            out[k, j], out[k, j + 1], out[k, j + 2], out[k, j + 3] = a, b, c, e
            j += 4
        while j < wide:
            a, q = np.float32(0.0), d[j]
            for i in range(n):
                a += p[i] * q[i]
            out[k, j] = a
            j += 1


@inner(fastmath=True, error_model="numpy")
def _forward(widths, theta, person, x, n, acts, ready):
    """Write the activations of n samples `x` to `acts`: hidden layers after their ReLU, then the logits.

    ready: `x` already holds the product of the samples and the first layer's weights.
    """
    beside = len(person)
    at = 0
    below = x
    for layer in range(len(widths) - 1):
        low, high = widths[layer], widths[layer + 1]
        weight = theta[at : at + low * high].reshape(low, high)
        offset = theta[at + low * high : at + (low + 1) * high]
        out = acts[layer]
        for j in range(high):
            start = offset[j]
            if layer == 0:
                for k in range(beside):
                    start += person[k] * weight[k, j]
            out[j, :n] = start
        if layer == 0 and ready:
            for j in range(high):
                z, p = out[j], below[j]
                for i in range(n):
                    z[i] += p[i]
        else:
            _mix(weight[beside:] if layer == 0 else weight, below, n, out)
        if layer < len(widths) - 2:
            for j in range(high):
                z = out[j]
                for i in range(n):
                    z[i] = max(z[i], np.float32(0.0))
        at += (low + 1) * high
        below = out


@inner(fastmath=True, error_model="numpy")
def _backward(widths, theta, person, x, n, acts, error, slopes, of_theta, of_person, of_x, want_theta, want_x):
    """Backpropagate the errors at the logits: gradients of all weights, of the person's vector, and of the samples."""
    beside = len(person)
    at = len(theta)
    slope = slopes[0]
    store(error[:n], slope[0, :n])
    for layer in range(len(widths) - 2, -1, -1):
        low, high = widths[layer], widths[layer + 1]
        at -= (low + 1) * high
        weight = theta[at : at + low * high].reshape(low, high)
        first = layer == 0
        below = x if first else acts[layer - 1]
        if want_theta:
            of_weight = of_theta[at : at + low * high].reshape(low, high)
            of_offset = of_theta[at + low * high : at + (low + 1) * high]
            _outer(below, slope, n, of_weight[beside:] if first else of_weight)
            for j in range(high):
                total, d = np.float32(0.0), slope[j]
                for i in range(n):
                    total += d[i]
                of_offset[j] = total
            if first:
                for k in range(beside):
                    total = np.float32(0.0)
                    for j in range(high):
                        total += weight[k, j] * of_offset[j]
                        of_weight[k, j] = person[k] * of_offset[j]
                    of_person[k] = total
        if first and not want_x:
            return
        out = of_x if first else slopes[layer]
        rows = weight[beside:] if first else weight
        out[: rows.shape[0], :n] = np.float32(0.0)
        _mix(rows.T, slope, n, out)
        if not first:
            for k in range(low):
                d, act = out[k], below[k]
                for i in range(n):
                    d[i] = d[i] if act[i] > np.float32(0.0) else np.float32(0.0)
        slope = out


@parallel(over="index", fastmath=True, error_model="numpy")
def _train(
    lower, upper, widths, table, thetas, people, index, slot, label, count, rates, batch, epochs, dual, change, loss
):
    """Mini-batch SGD on each client's weights and vector, changed in place, and on the rows it touched."""
    rate, row_rate, person_rate = rates[0], rates[1], rates[2]
    width = table.shape[1]
    layers, widest = len(widths) - 1, max(widths)
    for client in range(lower, upper):
        rows, touched = change[client], index[client]
        n_rows = fetch(table, touched, rows)
        theta, person = thetas[client], people[client]
        of_theta, of_person = np.empty_like(theta), np.empty_like(person)
        x, of_x = np.empty((width, batch), np.float32), np.empty((width, batch), np.float32)
        acts = np.empty((layers, widest, batch), np.float32)
        slopes = np.empty((layers, widest, batch), np.float32)
        error = np.empty(batch, np.float32)
        slots, labels, n = slot[client], label[client], count[client]
        total = 0.0
        for _ in range(epochs):
            for start in range(0, n, batch):
                stop = min(n, start + batch)
                m = stop - start
                scale = np.float32(1.0 / m)
                for i in range(m):
                    row = rows[slots[start + i]]
                    for k in range(width):
                        x[k, i] = row[k]
                _forward(widths, theta, person, x, m, acts, NO)
                total += errors(acts[layers - 1, 0], labels[start:stop], scale, error)
                _backward(widths, theta, person, x, m, acts, error, slopes, of_theta, of_person, of_x, YES, not dual)
                for k in range(len(theta)):
                    theta[k] -= rate * of_theta[k]
                for k in range(len(person)):
                    person[k] -= person_rate * of_person[k]
                if dual:
                    _forward(widths, theta, person, x, m, acts, NO)
                    errors(acts[layers - 1, 0], labels[start:stop], scale, error)
                    _backward(widths, theta, person, x, m, acts, error, slopes, of_theta, of_person, of_x, NO, YES)
                for i in range(m):
                    row = rows[slots[start + i]]
                    for k in range(width):
                        row[k] -= row_rate * of_x[k, i]
        loss[client] = total / max(1, n * epochs)
        for i in range(n_rows):
            for k in range(width):
                rows[i, k] -= table[touched[i], k]


@parallel(over="out", fastmath=True, error_model="numpy")
def _score(lower, upper, widths, thetas, persons, rows, ready, out):
    """Each client's logits; `thetas` and `rows` may be one for all."""
    layers, widest = len(widths) - 1, max(widths)
    for client in range(lower, upper):
        who = np.int64(client)
        theta, table = thetas[min(who, len(thetas) - 1)], rows[min(who, len(rows) - 1)]
        x = np.empty((table.shape[1], AT_ONCE), np.float32)
        acts = np.empty((layers, widest, AT_ONCE), np.float32)
        for start in range(0, table.shape[0], AT_ONCE):
            n = min(AT_ONCE, table.shape[0] - start)
            for i in range(n):
                for k in range(table.shape[1]):
                    x[k, i] = table[start + i, k]
            _forward(widths, theta, persons[client], x, n, acts, ready)
            for i in range(n):
                out[client, start + i] = acts[layers - 1, 0, i]

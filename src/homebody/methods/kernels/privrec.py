"""Compiled rounds and scores of `privrec` and the methods built on it, one client a thread.

tables (C, M, F), features (C, rows, F) and layers (C, weights) are each client's own copy of the parameters, changed in
place; for scores they may be one copy for all. items and real (C, L) are histories; orders (C, epochs, L) and negatives
(C, L, epochs, N) are what `prepare` drew. People (C, K), circumstances (C, L, K) and items (M, K) are described by rows
of features, their weights, and the block of the input that each of the K columns belongs to.

Client c writes to its own parameters and to scratch of its own, so the loops over clients may run in parallel. `_dealt`
changes which thread computes a client, never a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba as nb
import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from homebody.core import Batch, Tree, Update
from homebody.kernels import NO, YES, ZERO
from homebody.methods.contrastive import VIEWS
from homebody.methods.kernels import Kernel, arrays
from homebody.methods.kernels.privrec_steps import (
    PackedFeatures,
    backward,
    errors,
    forward,
    gather,
    network_of,
    scratch_for,
    unpacked,
)
from homebody.methods.kernels.vectors import padded
from homebody.models.dssm import PARTS, Described
from homebody.models.networks import ScoreFunction, read_widths
from homebody.ops import for_cohort, single
from homebody.parallel import inner, parallel

if TYPE_CHECKING:
    from homebody.methods.dp_privrec import DPPrivRec
    from homebody.methods.nn_self import NNSelf
    from homebody.methods.privrec import PrivRec

__all__ = ["DP_PRIVREC", "NN_SELF", "PRIVREC", "scores"]

NUMBERS_AT_ONCE = 1 << 28
"""Held by all the inner steps of NN-SELF's clients that work together."""
AT_ONCE = 256
"""Items that are scored together: what the layers make of them fits into a cache."""


def _stepped(
    method: PrivRec, shared: Tree, batches: Batch, valid: Tensor, rate: float, epochs: int
) -> tuple[Tree, Tensor]:
    """Each client's parameters after so many passes of SGD, and the mean loss of the last pass.

    It starts from the shared parameters, or from each client's own where a row for each of them is given.
    """
    blocks = [batches[f"{part}/block"].shape[1] for part in PARTS]
    network = method.network(blocks[2], blocks[0] + blocks[1])
    clients, length = valid.shape
    personal = shared["layers"].ndim == 2
    mine = {
        name: shared[name].clone() if personal else shared[name].repeat(clients, *[1] * shared[name].ndim)
        for name in ("item", "feature", "layers")
    }
    loss = torch.zeros(clients)
    explicit = "rating" in batches
    count = batches["valid"].sum(1)
    person, around, of_items = (
        PackedFeatures(*(batches[f"{name}/{part}"] for part in PackedFeatures._fields)) for name in PARTS
    )
    # Values common to all clients are repeated for each of them.
    person, around = (part._replace(block=part.block[0]) for part in (person, around))
    of_items = PackedFeatures(*(part[0] for part in of_items))
    rating = batches["rating"] if explicit else torch.empty(clients, 0)
    # Contiguous, so that one version of the kernel serves slices of batches too.
    given = (batches["item"], valid, rating, batches["order"], batches["negative"], count)
    history = arrays(*(part.contiguous() for part in given))
    described = (_packed(*person), _packed(*around), _packed(*of_items), (len(person.block), len(around.block)))
    steps = ((single(rate), single(method.item_rate)), method.batch_size or max(1, length), epochs)
    shape = (np.array(network.widths), network.activation == "sigmoid", explicit)
    _train(_dealt(count.numpy()), *shape, *arrays(*mine.values()), tuple(history), *described, *steps, loss.numpy())
    return mine, loss


def _privrec(method: PrivRec, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    mine, loss = _stepped(method, shared, batches, batches["valid"], method.learning_rate, method.epochs)
    return {name: mine[name].sub_(shared[name]) for name in shared}, {"loss": loss}


def _privrec_adapt(method: PrivRec, shared: Tree, locals_: Tree, batches: Batch) -> Tree:
    latest = method.at_hand(batches["valid"])
    return _stepped(method, shared, batches, latest, method.adapt_step, method.adapt_passes)[0]


def _dp_privrec(method: DPPrivRec, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    """PrivRec's round; with `joint`, pass by pass, since a step on the sequences follows each."""
    if not method.joint:
        return _privrec(method, shared, locals_, batches)
    valid, rate = batches["valid"], method.learning_rate
    mine = {name: value.expand(len(valid), *value.shape) for name, value in shared.items()}
    loss, first = torch.zeros(len(valid)), method.sequences
    for epoch in range(method.epochs):
        now = slice(epoch, epoch + 1)
        once = {**batches, "order": batches["order"][:, now], "negative": batches["negative"][:, :, now]}
        stepped, loss = _stepped(method, mine, once, valid, rate, 1)
        view = {name: batches[f"view/{name}"][:, epoch] for name in VIEWS}
        mine = vmap(lambda tree, seen: first.step(tree, seen, method.joint * rate)[0])({**mine, **stepped}, view)
    return {name: mine[name] - shared[name] for name in shared}, {"loss": loss}


def _nn_self(method: NNSelf, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    """`client` under vmap, for as many clients at a time as all their inner steps fit into memory."""
    from homebody.methods.nn_self import NUMBERS_A_UNIT  # it imports this module for its scores

    blocks = 1 + sum(batches[f"{name}/block"].shape[1] for name in PARTS)
    width = blocks * method.factors + sum(read_widths("hidden", method.hidden))
    steps = (1 + method.epochs) * batches["support/place"].shape[1] * method.per_item
    size = max(1, NUMBERS_AT_ONCE // max(1, NUMBERS_A_UNIT * width * steps))
    return vmap(method.client, in_dims=(None, 0, 0), chunk_size=size)(shared, locals_, batches)


PRIVREC = Kernel(_privrec, _privrec_adapt)
DP_PRIVREC = Kernel(_dp_privrec, _privrec_adapt)
NN_SELF = Kernel(_nn_self, _privrec_adapt, anywhere=True)


def scores(
    network: ScoreFunction, mine: Tree, person: Described, around: Described, of_items: Described, items: Tensor
) -> Tensor:
    """One client's scores of these items; under vmap those of a whole cohort in one pass."""
    parts = (person, around, of_items)
    described = (given for part in parts for given in (part.row, part.weight))
    return _scores(
        network, [part.block for part in parts], mine["item"], mine["feature"], mine["layers"], items, *described
    )


@for_cohort
def _scores(network: ScoreFunction, blocks: list[Tensor], *given: Tensor) -> Tensor:
    item, feature, layers, items, person_row, person_weight, around_row, around_weight, thing_row, thing_weight = given
    out = torch.empty(items.shape)
    shape = (np.array(network.widths), network.activation == "sigmoid")
    # What vmap expanded over the clients is passed as one copy.
    once = [(part[:1] if part.stride(0) == 0 else part).contiguous() for part in (item, feature, layers, items)]
    described = (
        _packed(person_row, person_weight, blocks[0]),
        _packed(around_row[:, None], around_weight[:, None], blocks[1]),
        _packed(thing_row[0], thing_weight[0], blocks[2]),
    )
    _score(*shape, *arrays(*once), *described, (len(blocks[0]), len(blocks[1])), out.numpy())
    return out


def _dealt(count: Any) -> Any:
    """An order of clients in which each thread's share holds long and short histories alike."""
    order, threads = np.argsort(-count, kind="stable"), nb.get_num_threads()
    return np.concatenate([order[thread::threads] for thread in range(threads)])


def _packed(row: Tensor, weight: Tensor, block: Tensor) -> tuple[Any, ...]:
    """Rows and weights, and the one block that each column of them belongs to."""
    where = block.argmax(0) if block.numel() else torch.zeros(0, dtype=torch.int64)
    return row.contiguous().numpy(), weight.contiguous().numpy(), where.numpy()


@inner()
def _train_one(common, table, feature, flat, history, person, around, who, rates, batch_size, epochs):
    """Mini-batch SGD on one client's parameters, changed in place; the mean loss of the last pass."""
    net = network_of(*common)
    items, real, rating, order, negative, n = history
    person_, around_ = PackedFeatures(*person), PackedFeatures(*around)
    per_item = 1 if net.explicit else 1 + negative.shape[2]
    scratch = scratch_for(net, len(feature) // net.factors, per_item * min(batch_size, max(1, n)))
    unpacked(net.widths, scratch.theta, flat, NO)
    total, count = 0.0, 0
    for epoch in range(epochs):
        total, count = 0.0, 0
        for start in range(0, n, batch_size):
            m = ZERO
            for i in range(start, min(n, start + batch_size)):
                place = order[epoch, i]
                if not real[place]:
                    continue
                scratch.sample[m], scratch.place[m] = items[place], place
                scratch.label[m] = rating[place] if net.explicit else np.float32(1.0)
                m += 1
                for j in range(per_item - 1):
                    if negative[place, epoch, j] >= 0:
                        scratch.sample[m], scratch.place[m] = negative[place, epoch, j], place
                        scratch.label[m] = np.float32(0.0)
                        m += 1
            if m == 0:
                continue
            n_met = gather(net, scratch, table, feature, person_, around_, who, m)
            forward(net, scratch, person_, around_, who, m, n_met)
            step = np.float32(-rates[0] / m)
            last = len(net.widths) - 2
            wide = padded(net.widths[last + 1])
            total += errors(scratch.acts[last], wide, scratch.label, m, net.explicit, step, scratch.slopes[0])
            backward(net, scratch, table, feature, person_, around_, who, m, n_met, rates[1])
            count += m
    unpacked(net.widths, scratch.theta, flat, YES)
    return total / max(1, count)


@parallel(over="ranked")
def _train(
    lower, upper, ranked, widths, sigmoid, explicit, tables, features, layers, histories, person, around, of_items,
    blocks, rates, batch_size, epochs, loss,
):  # fmt: skip
    items, real, rating, orders, negatives, counts = histories
    for place in range(lower, upper):
        who = ranked[place]
        common = (widths, sigmoid, explicit, tables.shape[2], blocks, of_items)
        mine = (tables[who].reshape(-1), features[who].reshape(-1), layers[who])
        history = (items[who], real[who], rating[who], orders[who], negatives[who], counts[who])
        loss[who] = _train_one(common, *mine, history, person, around, who, rates, batch_size, epochs)


@parallel(over="out")
def _score(lower, upper, widths, sigmoid, tables, features, layers, items, person, around, of_items, blocks, out):
    """Each client's logits; parameters may be one for all, and so may items."""
    net = network_of(widths, sigmoid, NO, tables.shape[2], blocks, of_items)
    person_, around_, last = PackedFeatures(*person), PackedFeatures(*around), len(widths) - 2
    for place in range(lower, upper):
        who = np.int64(place)
        table = tables[min(who, len(tables) - 1)].reshape(-1)
        feature = features[min(who, len(features) - 1)].reshape(-1)
        wanted = items[min(who, len(items) - 1)]
        scratch = scratch_for(net, len(feature) // net.factors, min(AT_ONCE, len(wanted)))
        unpacked(widths, scratch.theta, layers[min(who, len(layers) - 1)], NO)
        for start in range(0, len(wanted), AT_ONCE):
            m = min(AT_ONCE, len(wanted) - start)
            for i in range(m):
                scratch.sample[i], scratch.place[i] = wanted[start + i], 0
            n_met = gather(net, scratch, table, feature, person_, around_, who, m)
            forward(net, scratch, person_, around_, who, m, n_met)
            for i in range(m):
                out[who, start + i] = scratch.acts[last][i * padded(1)]
            for u in range(n_met):
                scratch.seat[scratch.met[u]] = -1

"""A compiled round of PrivRec, and its scores: a client a thread, the numbers of the vmapped `client`."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch, Tree
from homebody.methods.kernels.privrec_steps import (
    Described,
    backward,
    errors,
    forward,
    gather,
    network_of,
    room_for,
    unpacked,
)
from homebody.methods.kernels.vectors import padded
from homebody.models.dssm import Described as Features
from homebody.models.score import ScoreFunction
from homebody.ops import for_cohort, single
from homebody.parallel import parallel

__all__ = ["scores", "train"]

AT_ONCE = 256
"""Items that are scored together: what the layers make of them fits into a cache."""


def train(
    network: ScoreFunction,
    shared: Tree,
    batches: Batch,
    valid: Tensor,
    rates: tuple[float, float],
    batch_size: int,
    epochs: int,
) -> tuple[Tree, Tensor]:
    """Where SGD leads a cohort in so many passes, and the mean loss of the last.

    It starts from the shared parameters, or from each client's own where a row for each of them is given.
    """
    clients, length = valid.shape
    own = shared["layers"].ndim == 2
    mine = {
        name: shared[name].clone() if own else shared[name].repeat(clients, *[1] * shared[name].ndim)
        for name in ("item", "feature", "layers")
    }
    loss = torch.zeros(clients)
    explicit = "rating" in batches
    count = batches["valid"].sum(1)
    person, around, things = (
        Described(*(batches[f"{name}/{part}"] for part in Described._fields)) for name in ("person", "around", "items")
    )
    # What everyone has in common stands there once for each.
    person, around = (one._replace(block=one.block[0]) for one in (person, around))
    things = Described(*(part[0] for part in things))
    _train(
        np.array(network.widths),
        network.activation == "sigmoid",
        mine["item"].numpy(),
        mine["feature"].numpy(),
        mine["layers"].numpy(),
        batches["item"].numpy(),
        valid.numpy(),
        (batches["rating"] if explicit else torch.empty(clients, 0)).numpy(),
        batches["order"].numpy(),
        batches["negative"].numpy(),
        explicit,
        count.numpy(),
        _dealt(count.numpy()),
        _arrays(*person),
        _arrays(*around),
        _arrays(*things),
        (len(person.block), len(around.block)),
        (single(rates[0]), single(rates[1])),
        batch_size or max(1, length),
        epochs,
        loss.numpy(),
    )
    return mine, loss


def scores(
    network: ScoreFunction, mine: Tree, person: Features, around: Features, things: Features, items: Tensor
) -> Tensor:
    """What one client's network says of these items; of a cohort's in one pass."""
    blocks = [one.block for one in (person, around, things)]
    parts = (person.row, person.weight, around.row, around.weight, things.row, things.weight)
    (out,) = _scores(mine["item"], mine["feature"], mine["layers"], *parts, items, blocks, network)
    return out


@for_cohort
def _scores(
    item: Tensor,
    feature: Tensor,
    layers: Tensor,
    person_row: Tensor,
    person_weight: Tensor,
    around_row: Tensor,
    around_weight: Tensor,
    thing_row: Tensor,
    thing_weight: Tensor,
    items: Tensor,
    blocks: list[Tensor],
    network: ScoreFunction,
) -> tuple[Tensor, ...]:
    out = torch.empty(items.shape)
    _score(
        np.array(network.widths),
        network.activation == "sigmoid",
        _once(item).numpy(),
        _once(feature).numpy(),
        _once(layers).numpy(),
        _once(items).numpy(),
        _arrays(person_row, person_weight, blocks[0]),
        _arrays(around_row[:, None], around_weight[:, None], blocks[1]),
        _arrays(thing_row[0], thing_weight[0], blocks[2]),
        (len(blocks[0]), len(blocks[1])),
        out.numpy(),
    )
    return (out,)


def _dealt(count: Any) -> Any:
    """Clients in an order of which every thread gets an equal piece: long ones and short ones in each."""
    order, threads = np.argsort(-count, kind="stable"), nb.get_num_threads()
    return np.concatenate([order[thread::threads] for thread in range(threads)])


def _once(part: Tensor) -> Tensor:
    """What all clients have in common stands there once, whatever the first dimension says."""
    return (part[:1] if part.stride(0) == 0 else part).contiguous()


def _arrays(row: Tensor, weight: Tensor, block: Tensor) -> tuple[Any, ...]:
    """Rows and weights, and the one block that each column of them belongs to."""
    where = block.argmax(0) if block.numel() else torch.zeros(0, dtype=torch.int64)
    return row.contiguous().numpy(), weight.contiguous().numpy(), where.numpy()


@nb.njit
def _train_one(
    common,
    table,
    feature,
    flat,
    items,
    real,
    rating,
    order,
    negative,
    n,
    person,
    around,
    who,
    rates,
    batch_size,
    epochs,
):
    """Mini-batch SGD on one client's parameters, changed in place; the mean loss of the last pass."""
    net = network_of(*common)
    person_, around_ = Described(*person), Described(*around)
    per_item = 1 if net.explicit else 1 + negative.shape[2]
    room = room_for(net, len(feature) // net.factors, per_item * min(batch_size, max(1, n)))
    unpacked(net.widths, room.theta, flat, False)
    total, told = 0.0, 0
    for epoch in range(epochs):
        total, told = 0.0, 0
        for start in range(0, n, batch_size):
            m = 0
            for i in range(start, min(n, start + batch_size)):
                place = order[epoch, i]
                if not real[place]:
                    continue
                room.sample[m], room.place[m] = items[place], place
                room.label[m] = rating[place] if net.explicit else np.float32(1.0)
                m += 1
                for j in range(per_item - 1):
                    if negative[place, epoch, j] >= 0:
                        room.sample[m], room.place[m] = negative[place, epoch, j], place
                        room.label[m] = np.float32(0.0)
                        m += 1
            if m == 0:
                continue
            n_met = gather(net, room, table, feature, person_, around_, who, m)
            forward(net, room, person_, around_, who, m, n_met)
            step = np.float32(-rates[0] / m)
            last = len(net.widths) - 2
            total += errors(
                room.acts[last], padded(net.widths[last + 1]), room.label, m, net.explicit, step, room.slopes[0]
            )
            backward(net, room, table, feature, person_, around_, who, m, n_met, rates[1])
            told += m
    unpacked(net.widths, room.theta, flat, True)
    return total / max(1, told)


@parallel(over="items")
def _train(
    lower, upper, widths, sigmoid, tables, features, layers, items, real, rating, orders, negatives, explicit, counts,
    ranked, person, around, things, blocks, rates, batch_size, epochs, loss,
):  # fmt: skip
    for place in range(lower, upper):
        who = ranked[place]
        loss[who] = _train_one(
            (widths, sigmoid, explicit, tables.shape[2], blocks, things),
            tables[who].reshape(-1),
            features[who].reshape(-1),
            layers[who],
            items[who],
            real[who],
            rating[who],
            orders[who],
            negatives[who],
            counts[who],
            person,
            around,
            who,
            rates,
            batch_size,
            epochs,
        )


@nb.njit
def _score_one(common, table, feature, flat, items, person, around, who, out):
    net, person_, around_ = network_of(*common), Described(*person), Described(*around)
    room = room_for(net, len(feature) // net.factors, min(AT_ONCE, len(items)))
    unpacked(net.widths, room.theta, flat, False)
    last = len(net.widths) - 2
    for start in range(0, len(items), AT_ONCE):
        m = min(AT_ONCE, len(items) - start)
        for i in range(m):
            room.sample[i], room.place[i] = items[start + i], 0
        n_met = gather(net, room, table, feature, person_, around_, who, m)
        forward(net, room, person_, around_, who, m, n_met)
        for i in range(m):
            out[start + i] = room.acts[last][i * padded(1)]
        for u in range(n_met):
            room.seat[room.met[u]] = -1


@parallel(over="out")
def _score(lower, upper, widths, sigmoid, tables, features, layers, items, person, around, things, blocks, out):
    """Each client's logits; parameters may be one for all, and so may items."""
    for place in range(lower, upper):
        who = np.int64(place)
        _score_one(
            (widths, sigmoid, False, tables.shape[2], blocks, things),
            tables[min(who, len(tables) - 1)].reshape(-1),
            features[min(who, len(features) - 1)].reshape(-1),
            layers[min(who, len(layers) - 1)],
            items[min(who, len(items) - 1)],
            person,
            around,
            who,
            out[who],
        )

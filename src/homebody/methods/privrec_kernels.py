"""A compiled round of PrivRec: a client a thread, the numbers of the vmapped `client`.

All that a client changes lies in buffers of its own, layers with their columns padded to whole vectors. What a
feature's row adds to the first layer is computed once a step for each row that is met, not for each sample: people
share few features, and so do items.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np
import torch
from torch import Tensor

from homebody.core import Batch, Tree
from homebody.methods.vector_kernels import add, copy, padded, product, turned
from homebody.models.dssm import Described as Features
from homebody.models.score import ScoreFunction
from homebody.ops import for_cohort

__all__ = ["scores", "train"]

AT_ONCE = 256
"""Items that are scored together: what the layers make of them fits into a cache."""


class Described(NamedTuple):
    """Rows of features with weights, and the block of the input that each column of them belongs to."""

    row: Any
    weight: Any
    block: Any


class Network(NamedTuple):
    """What all clients have in common."""

    widths: Any
    starts: Any
    """Where each layer begins, its columns padded."""
    factors: int
    first: int
    """Padded width of what the first layer makes."""
    people: int
    around: int
    """Blocks of the input that are a person's, and of circumstances; then come the item's row, and its features."""
    sigmoid: bool
    explicit: bool
    things: Described
    """The items' features."""


class Room(NamedTuple):
    """What a client works in."""

    theta: Any
    sample: Any
    place: Any
    """Which interaction a sample belongs to."""
    label: Any
    x: Any
    of_x: Any
    acts: Any
    slopes: Any
    turned: Any
    base: Any
    seat: Any
    """Where each row of features stands among those a step has met; -1: nowhere."""
    met: Any
    block: Any
    """Of each row that was met."""
    met_x: Any
    of_met: Any
    made: Any
    """What the first layer makes of each row that was met."""
    of_made: Any
    one: Any
    none: Any


def train(
    network: ScoreFunction,
    shared: Tree,
    batches: Batch,
    valid: Tensor,
    rates: tuple[float, float],
    batch_size: int,
    epochs: int,
) -> tuple[Tree, Tensor]:
    """Where SGD leads a cohort from the shared parameters in so many passes, and the mean loss of the last."""
    clients, length = valid.shape
    mine = {name: value.repeat(clients, *[1] * value.ndim) for name, value in shared.items()}
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
        (np.float32(rates[0]), np.float32(rates[1])),
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
        items[0].contiguous().numpy(),
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
def _unpacked(widths, theta, flat, back):
    """Each layer's weights and offset, with columns padded by zeros; or back."""
    at = to = 0
    for layer in range(len(widths) - 1):
        high = widths[layer + 1]
        for _ in range(widths[layer] + 1):
            if back:
                copy(theta, to, flat, at, high)
            else:
                copy(flat, at, theta, to, high)
            at += high
            to += padded(high)


@nb.njit(fastmath=True, error_model="numpy")
def _active(z, n, sigmoid):
    if sigmoid:
        for k in range(n):
            z[k] = np.float32(1.0) / (np.float32(1.0) + np.exp(-z[k]))
    else:
        for k in range(n):
            z[k] = max(z[k], np.float32(0.0))


@nb.njit(fastmath=True, error_model="numpy")
def _through(slope, z, n, sigmoid):
    """The slope before what `_active` does, from that after it."""
    if sigmoid:
        for k in range(n):
            slope[k] *= z[k] * (np.float32(1.0) - z[k])
    else:
        for k in range(n):
            slope[k] = slope[k] if z[k] > np.float32(0.0) else np.float32(0.0)


@nb.njit
def _meet(row, block, room, n_met):
    """Give a row of features a place among those that a step has met; how many those are then."""
    if room.seat[row] >= 0:
        return n_met
    room.seat[row], room.met[n_met], room.block[n_met] = n_met, row, block
    return n_met + 1


@nb.njit
def _gather(net, room, table, feature, person, around, who, m):
    """The samples' own rows, and the rows of features that they meet, those of a block side by side."""
    n_met = 0
    for k in range(person.row.shape[1]):
        if person.weight[who, k] != 0:
            n_met = _meet(person.row[who, k], person.block[k], room, n_met)
    for k in range(around.row.shape[2]):
        for i in range(m):
            at = room.place[i]
            if around.weight[who, at, k] != 0:
                n_met = _meet(around.row[who, at, k], net.people + around.block[k], room, n_met)
    for k in range(net.things.row.shape[1]):
        for i in range(m):
            item = room.sample[i]
            if net.things.weight[item, k] != 0:
                block = net.people + net.around + 1 + net.things.block[k]
                n_met = _meet(net.things.row[item, k], block, room, n_met)
    width = net.factors
    for u in range(n_met):
        copy(feature, room.met[u] * width, room.met_x, u * width, width)
    for i in range(m):
        copy(table, room.sample[i] * width, room.x, i * width, width)
    return n_met


@nb.njit
def _block_end(room, low, n_met):
    """Where the rows end that were met of the same block as this one."""
    high = low + 1
    while high < n_met and room.block[high] == room.block[low]:
        high += 1
    return high


@nb.njit
def _forward(net, room, person, around, who, m, n_met):
    """What each layer makes of m samples, into `acts`; hidden layers after their activation."""
    theta, first, width, low = room.theta, net.first, net.factors, 0
    while low < n_met:
        high = _block_end(room, low, n_met)
        at = room.block[low] * width * first
        rows, weights, made = (room.met_x, low * width, width, 1), (theta, at, first), (room.made, low * first, first)
        product(*rows, *weights, room.none, 0, -1, *made, high - low, first, width)
        low = high
    base, z = room.base, room.acts[0]
    copy(theta, net.widths[0] * first, base, 0, first)
    for k in range(person.row.shape[1]):
        if person.weight[who, k] != 0:
            add(room.made, room.seat[person.row[who, k]] * first, person.weight[who, k], base, 0, first)
    for i in range(m):
        copy(base, 0, z, i * first, first)
        for k in range(around.row.shape[2]):
            weight = around.weight[who, room.place[i], k]
            if weight != 0:
                seat = room.seat[around.row[who, room.place[i], k]]
                add(room.made, seat * first, weight, z, i * first, first)
        for k in range(net.things.row.shape[1]):
            weight = net.things.weight[room.sample[i], k]
            if weight != 0:
                seat = room.seat[net.things.row[room.sample[i], k]]
                add(room.made, seat * first, weight, z, i * first, first)
    at = (net.people + net.around) * width * first
    product(room.x, 0, width, 1, theta, at, first, z, 0, first, z, 0, first, m, first, width)
    for layer in range(1, len(net.widths) - 1):
        low, high, at = net.widths[layer], padded(net.widths[layer + 1]), net.starts[layer]
        below, wide = room.acts[layer - 1], padded(low)
        _active(below, m * wide, net.sigmoid)
        offset = at + low * high
        product(below, 0, wide, 1, theta, at, high, theta, offset, 0, room.acts[layer], 0, high, m, high, low)


@nb.njit(fastmath=True, error_model="numpy")
def _errors(z, row, label, m, explicit, step, slope):
    """The slopes at the output, times the step; and the sum of the losses."""
    for k in range(m * row):
        slope[k] = np.float32(0.0)
    total = 0.0
    for i in range(m):
        value = z[i * row]
        if explicit:
            error = value - label[i]
            total += 0.5 * error * error
        else:
            small = np.exp(-abs(value))
            chance = (np.float32(1.0) if value >= 0 else small) / (np.float32(1.0) + small)
            error = chance - label[i]
            total += max(value, np.float32(0.0)) - label[i] * value + np.log1p(small)
        slope[i * row] = step * error
    return total


@nb.njit
def _backward(net, room, table, feature, person, around, who, m, n_met, item_rate):
    """From the slopes at the output down, each added to its weights as it is: they carry the step's size."""
    theta, first, width = room.theta, net.first, net.factors
    turn = 0
    for layer in range(len(net.widths) - 2, 0, -1):
        low, high, at = net.widths[layer], padded(net.widths[layer + 1]), net.starts[layer]
        below, wide = room.acts[layer - 1], padded(low)
        slope, other = room.slopes[turn], room.slopes[1 - turn]
        turned(theta, at, low, net.widths[layer + 1], high, room.turned, wide)
        weights = (room.turned, 0, wide)
        product(slope, 0, high, 1, *weights, room.none, 0, -1, other, 0, wide, m, wide, net.widths[layer + 1])
        product(below, 0, 1, wide, slope, 0, high, theta, at, high, theta, at, high, low, high, m)
        at += low * high
        product(room.one, 0, 0, 0, slope, 0, high, theta, at, high, theta, at, high, 1, high, m)
        _through(other, below, m * wide, net.sigmoid)
        turn = 1 - turn
    # What samples have in common is summed before it is multiplied.
    slope, base, of_made = room.slopes[turn], room.base, room.of_made
    for k in range(n_met * first):
        of_made[k] = np.float32(0.0)
    product(room.one, 0, 0, 0, slope, 0, first, room.none, 0, -1, base, 0, first, 1, first, m)
    for i in range(m):
        for k in range(around.row.shape[2]):
            weight = around.weight[who, room.place[i], k]
            if weight != 0:
                seat = room.seat[around.row[who, room.place[i], k]]
                add(slope, i * first, weight, of_made, seat * first, first)
        for k in range(net.things.row.shape[1]):
            weight = net.things.weight[room.sample[i], k]
            if weight != 0:
                seat = room.seat[net.things.row[room.sample[i], k]]
                add(slope, i * first, weight, of_made, seat * first, first)
    for k in range(person.row.shape[1]):
        if person.weight[who, k] != 0:
            add(base, 0, person.weight[who, k], of_made, room.seat[person.row[who, k]] * first, first)
    add(base, 0, np.float32(1.0), theta, net.widths[0] * first, first)
    row, low = padded(width), 0
    while low < n_met:
        high = _block_end(room, low, n_met)
        at = room.block[low] * width * first
        rows, slopes = (room.met_x, low * width), (of_made, low * first)
        _layer_back(net, room, rows, slopes, at, room.of_met, low * row, high - low)
        low = high
    at = (net.people + net.around) * width * first
    _layer_back(net, room, (room.x, 0), (slope, 0), at, room.of_x, 0, m)
    for i in range(m):
        add(room.of_x, i * row, item_rate, table, room.sample[i] * width, width)
    for u in range(n_met):
        add(room.of_met, u * row, np.float32(1.0), feature, room.met[u] * width, width)
        room.seat[room.met[u]] = -1


@nb.njit
def _layer_back(net, room, rows, slopes, at, out, to, n):
    """One block of the first layer: the slopes of its n rows into `out`, and its weights stepped."""
    theta, first, width = room.theta, net.first, net.factors
    row = padded(width)
    turned(theta, at, width, net.widths[1], first, room.turned, row)
    weights = (room.turned, 0, row)
    product(*slopes, first, 1, *weights, room.none, 0, -1, out, to, row, n, row, net.widths[1])
    product(*rows, 1, width, *slopes, first, theta, at, first, theta, at, first, width, first, n)


@nb.njit
def _room(net, n_rows, most):
    widest, row = padded(net.factors), padded(net.factors)
    depth = len(net.widths) - 1
    for layer in range(depth):
        widest = max(widest, padded(net.widths[layer + 1]))
    return Room(
        np.zeros(net.starts[depth], np.float32),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.float32),
        np.empty(most * net.factors, np.float32),
        np.empty(most * row, np.float32),
        np.empty((depth, most * widest), np.float32),
        np.empty((2, most * widest), np.float32),
        np.empty(widest * widest, np.float32),
        np.empty(net.first, np.float32),
        np.full(n_rows, -1, np.int64),
        np.empty(n_rows, np.int64),
        np.empty(n_rows, np.int64),
        np.empty(n_rows * net.factors, np.float32),
        np.empty(n_rows * row, np.float32),
        np.empty(n_rows * net.first, np.float32),
        np.empty(n_rows * net.first, np.float32),
        np.ones(1, np.float32),
        np.empty(0, np.float32),
    )


@nb.njit
def _network(widths, sigmoid, explicit, factors, blocks, things):
    starts = np.zeros(len(widths), np.int64)
    for layer in range(len(widths) - 1):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * padded(widths[layer + 1])
    return Network(
        widths, starts, factors, padded(widths[1]), blocks[0], blocks[1], sigmoid, explicit, Described(*things)
    )


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
    net = _network(*common)
    person_, around_ = Described(*person), Described(*around)
    per_item = 1 if net.explicit else 1 + negative.shape[2]
    room = _room(net, len(feature) // net.factors, per_item * min(batch_size, max(1, n)))
    _unpacked(net.widths, room.theta, flat, False)
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
            n_met = _gather(net, room, table, feature, person_, around_, who, m)
            _forward(net, room, person_, around_, who, m, n_met)
            step = np.float32(-rates[0] / m)
            last = len(net.widths) - 2
            total += _errors(
                room.acts[last], padded(net.widths[last + 1]), room.label, m, net.explicit, step, room.slopes[0]
            )
            _backward(net, room, table, feature, person_, around_, who, m, n_met, rates[1])
            told += m
    _unpacked(net.widths, room.theta, flat, True)
    return total / max(1, told)


@nb.njit(parallel=True, cache=True)
def _train(
    widths, sigmoid, tables, features, layers, items, real, rating, orders, negatives, explicit, counts, ranked,
    person, around, things, blocks, rates, batch_size, epochs, loss,
):  # fmt: skip
    for place in nb.prange(len(items)):
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
    net, person_, around_ = _network(*common), Described(*person), Described(*around)
    room = _room(net, len(feature) // net.factors, min(AT_ONCE, len(items)))
    _unpacked(net.widths, room.theta, flat, False)
    last = len(net.widths) - 2
    for start in range(0, len(items), AT_ONCE):
        m = min(AT_ONCE, len(items) - start)
        for i in range(m):
            room.sample[i], room.place[i] = items[start + i], 0
        n_met = _gather(net, room, table, feature, person_, around_, who, m)
        _forward(net, room, person_, around_, who, m, n_met)
        for i in range(m):
            out[start + i] = room.acts[last][i * padded(1)]
        for u in range(n_met):
            room.seat[room.met[u]] = -1


@nb.njit(parallel=True, cache=True)
def _score(widths, sigmoid, tables, features, layers, items, person, around, things, blocks, out):
    """Each client's logits; parameters may be one for all."""
    for place in nb.prange(len(out)):
        who = np.int64(place)
        _score_one(
            (widths, sigmoid, False, tables.shape[2], blocks, things),
            tables[min(who, len(tables) - 1)].reshape(-1),
            features[min(who, len(features) - 1)].reshape(-1),
            layers[min(who, len(layers) - 1)],
            items,
            person,
            around,
            who,
            out[who],
        )

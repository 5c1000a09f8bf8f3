"""One step of PrivRec's compiled round: what a client's network makes of some samples, and their slopes.

All that a client changes lies in buffers of its own, layers with their columns padded to whole vectors. What a
feature's row adds to the first layer is computed once a step for each row that is met, not for each sample: people
share few features, and so do items.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np

from homebody.methods.kernels.vectors import add, copy, padded, product, turned

__all__ = ["Described", "backward", "errors", "forward", "gather", "network_of", "room_for", "unpacked"]


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


@nb.njit
def unpacked(widths, theta, flat, back):
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
def gather(net, room, table, feature, person, around, who, m):
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
def forward(net, room, person, around, who, m, n_met):
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
def errors(z, row, label, m, explicit, step, slope):
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
def backward(net, room, table, feature, person, around, who, m, n_met, item_rate):
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
def room_for(net, n_rows, most):
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
def network_of(widths, sigmoid, explicit, factors, blocks, things):
    starts = np.zeros(len(widths), np.int64)
    for layer in range(len(widths) - 1):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * padded(widths[layer + 1])
    return Network(
        widths, starts, factors, padded(widths[1]), blocks[0], blocks[1], sigmoid, explicit, Described(*things)
    )

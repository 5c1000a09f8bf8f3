"""One step of PrivRec's compiled round: the network's forward and backward pass over some samples of one client.

All matrices are flat arrays of floats. A client's layers are unpacked to `theta`, in which the columns of each layer
are padded with zeros to whole vectors, as are activations (samples, padded width). What a feature's row adds to the
first layer is computed once a step for each distinct row, not for each sample: people share few features, and so do
items.

Between two steps every entry of `seat` is -1; `gather` sets those of the rows that a step meets, and `backward`, or the
loop that scores, resets them. All of it belongs to one client, so clients may run in parallel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from homebody.kernels import ZERO
from homebody.methods.kernels.vectors import add, copy, padded, product, turned
from homebody.parallel import inner

__all__ = ["PackedFeatures", "backward", "errors", "forward", "gather", "network_of", "scratch_for", "unpacked"]


class PackedFeatures(NamedTuple):
    """Rows of features with weights, and the block of the input that each column of them belongs to."""

    row: Any
    weight: Any
    block: Any


class PackedNetwork(NamedTuple):
    """The parts of the network that all clients share."""

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
    of_items: PackedFeatures
    """The items' features."""


class Scratch(NamedTuple):
    """One client's scratch memory, allocated once a round."""

    theta: Any
    """The layers, padded."""
    sample: Any
    """(samples,) the item of each."""
    place: Any
    """(samples,) the interaction that each belongs to."""
    label: Any
    x: Any
    """(samples, factors) the items' own rows; `of_x` (samples, padded factors) their gradients."""
    of_x: Any
    acts: Any
    """(layers, samples × widest); `slopes` (2, samples × widest) holds the gradients of two layers by turns."""
    slopes: Any
    turned: Any
    """(widest × widest) one layer's weights, transposed."""
    base: Any
    """(first,) what all samples of a step have in common in the first layer."""
    seat: Any
    """Where each row of features stands among those a step has met; -1: nowhere."""
    met: Any
    """The rows that a step has met, in the order of their seats; `block` is the input block of each."""
    block: Any
    met_x: Any
    """(rows, factors) their values; `of_met` (rows, padded factors) their gradients."""
    of_met: Any
    projected: Any
    """The product of each row that was met and its block of the first layer."""
    of_projected: Any
    unit: Any
    """A single 1, which `product` reads as a row of ones to sum over samples."""
    none: Any
    """Empty: `product` starts its sums from zero."""


@inner()
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


@inner(fastmath=True, error_model="numpy")
def _active(z, n, sigmoid):
    if sigmoid:
        for k in range(n):
            z[k] = np.float32(1.0) / (np.float32(1.0) + np.exp(-z[k]))
    else:
        for k in range(n):
            z[k] = max(z[k], np.float32(0.0))


@inner(fastmath=True, error_model="numpy")
def _through(slope, z, n, sigmoid):
    """The slope before what `_active` does, from that after it."""
    if sigmoid:
        for k in range(n):
            slope[k] *= z[k] * (np.float32(1.0) - z[k])
    else:
        for k in range(n):
            slope[k] = slope[k] if z[k] > np.float32(0.0) else np.float32(0.0)


@inner()
def _meet(row, block, scratch, n_met):
    """Give a row of features a place among those that a step has met; how many those are then."""
    if scratch.seat[row] >= 0:
        return n_met
    scratch.seat[row], scratch.met[n_met], scratch.block[n_met] = n_met, row, block
    return n_met + 1


@inner()
def gather(net, scratch, table, feature, person, around, who, m):
    """The samples' own rows, and the rows of features that they meet, those of a block side by side."""
    n_met = ZERO
    for k in range(person.row.shape[1]):
        if person.weight[who, k] != 0:
            n_met = _meet(person.row[who, k], person.block[k], scratch, n_met)
    for k in range(around.row.shape[2]):
        for i in range(m):
            at = scratch.place[i]
            if around.weight[who, at, k] != 0:
                n_met = _meet(around.row[who, at, k], net.people + around.block[k], scratch, n_met)
    for k in range(net.of_items.row.shape[1]):
        for i in range(m):
            item = scratch.sample[i]
            if net.of_items.weight[item, k] != 0:
                block = net.people + net.around + 1 + net.of_items.block[k]
                n_met = _meet(net.of_items.row[item, k], block, scratch, n_met)
    width = net.factors
    for u in range(n_met):
        copy(feature, scratch.met[u] * width, scratch.met_x, u * width, width)
    for i in range(m):
        copy(table, scratch.sample[i] * width, scratch.x, i * width, width)
    return n_met


@inner()
def _block_end(scratch, low, n_met):
    """Where the rows end that were met of the same block as this one."""
    high = low + 1
    while high < n_met and scratch.block[high] == scratch.block[low]:
        high += 1
    return high


@inner()
def forward(net, scratch, person, around, who, m, n_met):
    """Write the activations of m samples to `acts`; hidden layers after their activation function."""
    theta, first, width, low = scratch.theta, net.first, net.factors, ZERO
    while low < n_met:
        high = _block_end(scratch, low, n_met)
        rows, weights = (scratch.met_x, low * width, width, 1), (theta, scratch.block[low] * width * first, first)
        product(*rows, *weights, scratch.none, 0, -1, scratch.projected, low * first, first, high - low, first, width)
        low = high
    base, z = scratch.base, scratch.acts[0]
    copy(theta, net.widths[0] * first, base, 0, first)
    for k in range(person.row.shape[1]):
        if person.weight[who, k] != 0:
            add(scratch.projected, scratch.seat[person.row[who, k]] * first, person.weight[who, k], base, 0, first)
    for i in range(m):
        copy(base, 0, z, i * first, first)
        for k in range(around.row.shape[2]):
            weight = around.weight[who, scratch.place[i], k]
            if weight != 0:
                seat = scratch.seat[around.row[who, scratch.place[i], k]]
                add(scratch.projected, seat * first, weight, z, i * first, first)
        for k in range(net.of_items.row.shape[1]):
            weight = net.of_items.weight[scratch.sample[i], k]
            if weight != 0:
                seat = scratch.seat[net.of_items.row[scratch.sample[i], k]]
                add(scratch.projected, seat * first, weight, z, i * first, first)
    at = (net.people + net.around) * width * first
    product(scratch.x, 0, width, 1, theta, at, first, z, 0, first, z, 0, first, m, first, width)
    for layer in range(1, len(net.widths) - 1):
        low, high, at = net.widths[layer], padded(net.widths[layer + 1]), net.starts[layer]
        below, wide = scratch.acts[layer - 1], padded(low)
        _active(below, m * wide, net.sigmoid)
        offset = at + low * high
        product(below, 0, wide, 1, theta, at, high, theta, offset, 0, scratch.acts[layer], 0, high, m, high, low)


@inner(fastmath=True, error_model="numpy")
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


@inner()
def backward(net, scratch, table, feature, person, around, who, m, n_met, item_rate):
    """Backpropagate the slopes at the output and add them to the weights: they already hold the step's size."""
    theta, first, width = scratch.theta, net.first, net.factors
    turn = 0
    for layer in range(len(net.widths) - 2, 0, -1):
        low, high, at = net.widths[layer], padded(net.widths[layer + 1]), net.starts[layer]
        below, wide = scratch.acts[layer - 1], padded(low)
        slope, other = scratch.slopes[turn], scratch.slopes[1 - turn]
        turned(theta, at, low, net.widths[layer + 1], high, scratch.turned, wide)
        weights = (scratch.turned, 0, wide)
        product(slope, 0, high, 1, *weights, scratch.none, 0, -1, other, 0, wide, m, wide, net.widths[layer + 1])
        product(below, 0, 1, wide, slope, 0, high, theta, at, high, theta, at, high, low, high, m)
        at += low * high
        product(scratch.unit, 0, 0, 0, slope, 0, high, theta, at, high, theta, at, high, 1, high, m)
        _through(other, below, m * wide, net.sigmoid)
        turn = 1 - turn
    # What samples have in common is summed before it is multiplied.
    slope, base, of_projected = scratch.slopes[turn], scratch.base, scratch.of_projected
    for k in range(n_met * first):
        of_projected[k] = np.float32(0.0)
    product(scratch.unit, 0, 0, 0, slope, 0, first, scratch.none, 0, -1, base, 0, first, 1, first, m)
    for i in range(m):
        for k in range(around.row.shape[2]):
            weight = around.weight[who, scratch.place[i], k]
            if weight != 0:
                seat = scratch.seat[around.row[who, scratch.place[i], k]]
                add(slope, i * first, weight, of_projected, seat * first, first)
        for k in range(net.of_items.row.shape[1]):
            weight = net.of_items.weight[scratch.sample[i], k]
            if weight != 0:
                seat = scratch.seat[net.of_items.row[scratch.sample[i], k]]
                add(slope, i * first, weight, of_projected, seat * first, first)
    for k in range(person.row.shape[1]):
        if person.weight[who, k] != 0:
            add(base, 0, person.weight[who, k], of_projected, scratch.seat[person.row[who, k]] * first, first)
    add(base, 0, np.float32(1.0), theta, net.widths[0] * first, first)
    row, low = padded(width), ZERO
    while low < n_met:
        high = _block_end(scratch, low, n_met)
        at = scratch.block[low] * width * first
        rows, slopes = (scratch.met_x, low * width), (of_projected, low * first)
        _layer_back(net, scratch, rows, slopes, at, scratch.of_met, low * row, high - low)
        low = high
    at = (net.people + net.around) * width * first
    _layer_back(net, scratch, (scratch.x, ZERO), (slope, ZERO), at, scratch.of_x, ZERO, m)
    for i in range(m):
        add(scratch.of_x, i * row, item_rate, table, scratch.sample[i] * width, width)
    for u in range(n_met):
        add(scratch.of_met, u * row, np.float32(1.0), feature, scratch.met[u] * width, width)
        scratch.seat[scratch.met[u]] = -1


@inner()
def _layer_back(net, scratch, rows, slopes, at, out, to, n):
    """One block of the first layer: the slopes of its n rows into `out`, and its weights stepped."""
    theta, first, width = scratch.theta, net.first, net.factors
    row = padded(width)
    turned(theta, at, width, net.widths[1], first, scratch.turned, row)
    weights = (scratch.turned, 0, row)
    product(*slopes, first, 1, *weights, scratch.none, 0, -1, out, to, row, n, row, net.widths[1])
    product(*rows, 1, width, *slopes, first, theta, at, first, theta, at, first, width, first, n)


@inner()
def scratch_for(net, n_rows, most):
    widest, row = padded(net.factors), padded(net.factors)
    depth = len(net.widths) - 1
    for layer in range(depth):
        widest = max(widest, padded(net.widths[layer + 1]))
    return Scratch(
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


@inner()
def network_of(widths, sigmoid, explicit, factors, blocks, of_items):
    starts = np.zeros(len(widths), np.int64)
    for layer in range(len(widths) - 1):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * padded(widths[layer + 1])
    return PackedNetwork(
        widths, starts, factors, padded(widths[1]), blocks[0], blocks[1], sigmoid, explicit, PackedFeatures(*of_items)
    )

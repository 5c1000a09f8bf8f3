"""A compiled round of PrivRec: a client a thread, the numbers of the vmapped `client`.

All that a client changes lies in buffers of its own, layers with their columns padded to whole vectors. What a
feature's row adds to the first layer is computed once a step for each row that is met, not for each sample: people
share few features, and so do items.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba as nb
import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

from homebody.core import Batch, Tree
from homebody.models.score import ScoreFunction

__all__ = ["train"]

MANY_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if MANY_REGISTERS else 8
"""Numbers in a vector of the processor."""
TALL, ACROSS = 4, 4 if MANY_REGISTERS else 2
"""Rows and vectors of a product that are summed up at once: as many as there are registers for."""
WIDE = ACROSS * LANES


def train(
    network: ScoreFunction, shared: Tree, batches: Batch, valid: Tensor, rate: float, batch_size: int, epochs: int
) -> tuple[Tree, Tensor]:
    """Where SGD leads a cohort from the shared parameters in so many passes, and the mean loss of the last."""
    clients, length = valid.shape
    mine = {name: value.repeat(clients, *[1] * value.ndim) for name, value in shared.items()}
    loss = torch.zeros(clients)
    person, around, items = (
        tuple(batches[f"{name}/{part}"] for part in ("row", "weight", "block"))
        for name in ("person", "around", "items")
    )
    explicit = "rating" in batches
    count = batches["valid"].sum(1)
    _train(
        np.array(network.widths),
        network.activation == "sigmoid",
        mine["item"].numpy(),
        mine["feature"].numpy(),
        mine["layers"].numpy(),
        batches["item"].numpy(),
        valid.numpy(),
        (batches["rating"] if explicit else valid.new_empty(clients, 0, dtype=torch.float32)).numpy(),
        batches["order"].numpy(),
        batches["negative"].numpy(),
        explicit,
        count.numpy(),
        count.argsort(descending=True).numpy(),
        _described(person),
        _described(around),
        _described(tuple(part[:1] for part in items)),
        np.float32(rate),
        batch_size or max(1, length),
        epochs,
        loss.numpy(),
    )
    return mine, loss


def _described(parts: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Rows, weights, and the block of each, as arrays of three dimensions: clients, things, rows."""
    row, weight, block = parts
    shape = (len(row), -1 if row.shape[-1] else int(np.prod(row.shape[1:-1])), row.shape[-1])
    where = block[0].argmax(0) if block.shape[-1] else torch.zeros(0, dtype=torch.int64)
    return row.reshape(shape).numpy(), weight.reshape(shape).numpy(), where.numpy()


def _tile(rows: int, vectors: int) -> Any:
    """A product of `rows` × `vectors` vectors whose sums stay in registers, which no loop could promise."""

    @intrinsic
    def tile(typing, a, a_at, a_row, a_step, b, b_at, b_row, c, c_at, c_row, depth, keep):  # type: ignore[no-untyped-def]
        whole = types.intp
        floats = types.Array(types.float32, 1, "C")
        signature = types.void(
            floats, whole, whole, whole, floats, whole, whole, floats, whole, whole, whole, types.boolean
        )
        return signature, generate

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        def data(place):  # type: ignore[no-untyped-def]
            return context.make_array(signature.args[place])(context, builder, given[place]).data

        (a, b, c), (a_at, a_row, a_step) = (data(place) for place in (0, 4, 7)), given[1:4]
        (b_at, b_row), (c_at, c_row), depth, keep = given[5:7], given[8:10], given[10], given[11]
        vector = ir.VectorType(ir.FloatType(), LANES)
        whole = depth.type

        def number(value):  # type: ignore[no-untyped-def]
            return ir.Constant(whole, value)

        def vector_at(base, place):  # type: ignore[no-untyped-def]
            return builder.bitcast(builder.gep(base, [place]), vector.as_pointer())

        sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(rows)]
        for row in sums:
            for one in row:
                builder.store(ir.Constant(vector, None), one)
        a_rows = [builder.add(a_at, builder.mul(a_row, number(r))) for r in range(rows)]
        c_rows = [builder.add(c_at, builder.mul(c_row, number(r))) for r in range(rows)]
        with cgutils.for_range(builder, depth) as loop:
            start = builder.add(b_at, builder.mul(b_row, loop.index))
            right = [
                builder.load(vector_at(b, builder.add(start, number(v * LANES))), align=4) for v in range(vectors)
            ]
            along = builder.mul(a_step, loop.index)
            for r in range(rows):
                scalar = builder.load(builder.gep(a, [builder.add(a_rows[r], along)]))
                lone = builder.insert_element(
                    ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0)
                )
                mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
                left = builder.shuffle_vector(lone, ir.Constant(vector, ir.Undefined), mask)
                for v in range(vectors):
                    times = builder.fmul(left, right[v], flags=("contract",))
                    builder.store(builder.fadd(builder.load(sums[r][v]), times, flags=("contract",)), sums[r][v])
        for r in range(rows):
            for v in range(vectors):
                where = vector_at(c, builder.add(c_rows[r], number(v * LANES)))
                with builder.if_then(keep):
                    before = builder.load(where, align=4)
                    builder.store(builder.fadd(before, builder.load(sums[r][v])), sums[r][v])
                builder.store(builder.load(sums[r][v]), where, align=4)
        return context.get_dummy_value()

    return tile


_tall_wide, _tall, _wide, _small = _tile(TALL, ACROSS), _tile(TALL, 1), _tile(1, ACROSS), _tile(1, 1)


@nb.njit
def _product(a, a_at, a_row, a_step, b, b_at, b_row, c, c_at, c_row, rows, columns, depth, keep):
    """c[r, j] = Σ_p a[r, p] b[p, j], or plus that; all in flat arrays, columns in whole vectors."""
    r = 0
    while r < rows:
        tall = r + TALL <= rows
        j = 0
        while j < columns:
            x, y, z = a_at + r * a_row, b_at + j, c_at + r * c_row + j
            if j + WIDE <= columns:
                if tall:
                    _tall_wide(a, x, a_row, a_step, b, y, b_row, c, z, c_row, depth, keep)
                else:
                    _wide(a, x, a_row, a_step, b, y, b_row, c, z, c_row, depth, keep)
                j += WIDE
            else:
                if tall:
                    _tall(a, x, a_row, a_step, b, y, b_row, c, z, c_row, depth, keep)
                else:
                    _small(a, x, a_row, a_step, b, y, b_row, c, z, c_row, depth, keep)
                j += LANES
        r += TALL if tall else 1


@nb.njit(inline="always")
def _padded(width):
    return (width + LANES - 1) // LANES * LANES


@nb.njit
def _turned(a, at, rows, columns, row, out, out_row):
    """out[j, r] = a[r, j]; what pads its columns becomes zero."""
    for r in range(rows, out_row):
        for j in range(columns):
            out[j * out_row + r] = np.float32(0.0)
    for r in range(rows):
        for j in range(columns):
            out[j * out_row + r] = a[at + r * row + j]


@nb.njit
def _unpacked(widths, theta, flat):
    """Each layer's weights and offset, with columns padded by zeros."""
    theta[:] = np.float32(0.0)
    at = to = 0
    for layer in range(len(widths) - 1):
        high = widths[layer + 1]
        for _ in range(widths[layer] + 1):
            theta[to : to + high] = flat[at : at + high]
            at += high
            to += _padded(high)


@nb.njit
def _packed(widths, theta, flat):
    at = to = 0
    for layer in range(len(widths) - 1):
        high = widths[layer + 1]
        for _ in range(widths[layer] + 1):
            flat[at : at + high] = theta[to : to + high]
            at += high
            to += _padded(high)


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


@nb.njit(fastmath=True, error_model="numpy")
def _add(source, at, weight, out, to, n):
    for k in range(n):
        out[to + k] += weight * source[at + k]


@nb.njit(fastmath=True, error_model="numpy")
def _dot(a, at, b, to, n):
    total = np.float32(0.0)
    for k in range(n):
        total += a[at + k] * b[to + k]
    return total


@nb.njit
def _seated(row, seat, met, n_met):
    """The place of a row of features among those that a step has met."""
    if seat[row] < 0:
        seat[row] = n_met
        met[n_met] = row
        return n_met + 1
    return n_met


@nb.njit(fastmath=True, error_model="numpy", parallel=True, cache=True)
def _train(
    widths,
    sigmoid,
    tables,
    features,
    layers,
    items,
    real,
    rating,
    orders,
    negatives,
    explicit,
    counts,
    ranked,
    people,
    arounds,
    things,
    rate,
    batch_size,
    epochs,
    loss,
):
    """Mini-batch SGD on each client's parameters, changed in place."""
    depth = len(widths) - 1
    factors = tables.shape[2]
    per_item = 1 if explicit else 1 + negatives.shape[3]
    thing_row, thing_weight, thing_block = things[0][0], things[1][0], things[2]
    person_blocks = people[2].max() + 1 if len(people[2]) else 0
    around_blocks = arounds[2].max() + 1 if len(arounds[2]) else 0
    beside = person_blocks + around_blocks
    first_high = _padded(widths[1])
    row_pad = _padded(factors)
    starts = np.zeros(depth + 1, np.int64)
    widest = row_pad
    for layer in range(depth):
        starts[layer + 1] = starts[layer] + (widths[layer] + 1) * _padded(widths[layer + 1])
        widest = max(widest, _padded(widths[layer + 1]))
    most = per_item * min(batch_size, max(1, counts.max()))
    n_rows = features.shape[1]
    for place in nb.prange(len(items)):
        client = ranked[place]
        n = counts[client]
        table, feature, flat = tables[client].reshape(-1), features[client].reshape(-1), layers[client]
        theta = np.empty(starts[depth], np.float32)
        _unpacked(widths, theta, flat)
        x = np.empty(most * factors, np.float32)
        of_x = np.empty(most * row_pad, np.float32)
        acts = np.empty((depth, most * widest), np.float32)
        slope, other = np.empty(most * widest, np.float32), np.empty(most * widest, np.float32)
        turned = np.empty(widest * widest, np.float32)
        sample, at_place = np.empty(most, np.int64), np.empty(most, np.int64)
        label = np.empty(most, np.float32)
        seat = np.full(n_rows, -1, np.int64)
        met, block_of = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
        met_x = np.empty(n_rows * factors, np.float32)
        made = np.empty(n_rows * first_high, np.float32)
        of_made = np.empty(n_rows * first_high, np.float32)
        of_met = np.empty(n_rows * row_pad, np.float32)
        base = np.empty(first_high, np.float32)
        order, negative = orders[client], negatives[client]
        person_row, person_weight = people[0][client, 0], people[1][client, 0]
        around_row, around_weight = arounds[0][client], arounds[1][client]
        for epoch in range(epochs):
            total, told = 0.0, 0
            for start in range(0, n, batch_size):
                m = 0
                for i in range(start, min(n, start + batch_size)):
                    where = order[epoch, i]
                    if not real[client, where]:
                        continue
                    sample[m], at_place[m] = items[client, where], where
                    label[m] = rating[client, where] if explicit else np.float32(1.0)
                    m += 1
                    for j in range(per_item - 1):
                        if negative[where, epoch, j] >= 0:
                            sample[m], at_place[m] = negative[where, epoch, j], where
                            label[m] = np.float32(0.0)
                            m += 1
                if m == 0:
                    continue
                # Which rows of features are met, those of a block side by side.
                n_met = 0
                for k in range(len(person_row)):
                    if person_weight[k] != 0:
                        before, n_met = n_met, _seated(person_row[k], seat, met, n_met)
                        block_of[before:n_met] = people[2][k]
                for k in range(around_row.shape[1]):
                    for i in range(m):
                        if around_weight[at_place[i], k] != 0:
                            before, n_met = n_met, _seated(around_row[at_place[i], k], seat, met, n_met)
                            block_of[before:n_met] = person_blocks + arounds[2][k]
                for k in range(thing_row.shape[1]):
                    for i in range(m):
                        if thing_weight[sample[i], k] != 0:
                            before, n_met = n_met, _seated(thing_row[sample[i], k], seat, met, n_met)
                            block_of[before:n_met] = beside + 1 + thing_block[k]
                for u in range(n_met):
                    for k in range(factors):
                        met_x[u * factors + k] = feature[met[u] * factors + k]
                # Forward.
                low = 0
                while low < n_met:
                    high = low + 1
                    while high < n_met and block_of[high] == block_of[low]:
                        high += 1
                    at = block_of[low] * factors * first_high
                    _product(
                        met_x, low * factors, factors, 1, theta, at, first_high,
                        made, low * first_high, first_high, high - low, first_high, factors, False,
                    )
                    low = high
                offset = widths[0] * first_high
                base[:] = theta[offset : offset + first_high]
                for k in range(len(person_row)):
                    if person_weight[k] != 0:
                        _add(made, seat[person_row[k]] * first_high, person_weight[k], base, 0, first_high)
                z = acts[0]
                for i in range(m):
                    to = i * first_high
                    for k in range(first_high):
                        z[to + k] = base[k]
                    for k in range(around_row.shape[1]):
                        weight = around_weight[at_place[i], k]
                        if weight != 0:
                            _add(made, seat[around_row[at_place[i], k]] * first_high, weight, z, to, first_high)
                    for k in range(thing_row.shape[1]):
                        weight = thing_weight[sample[i], k]
                        if weight != 0:
                            _add(made, seat[thing_row[sample[i], k]] * first_high, weight, z, to, first_high)
                    for k in range(factors):
                        x[i * factors + k] = table[sample[i] * factors + k]
                own = beside * factors * first_high
                _product(
                    x, 0, factors, 1, theta, own, first_high, z, 0, first_high, m, first_high, factors, True
                )
                for layer in range(1, depth - 1):
                    low, high = widths[layer], _padded(widths[layer + 1])
                    wide = _padded(low)
                    _active(acts[layer - 1], m * wide, sigmoid)
                    z = acts[layer]
                    offset = starts[layer] + low * high
                    for i in range(m):
                        for k in range(high):
                            z[i * high + k] = theta[offset + k]
                    _product(
                        acts[layer - 1], 0, wide, 1, theta, starts[layer], high, z, 0, high, m, high, low, True
                    )
                # The output layer has one column: its weights stand a vector apart.
                last, wide = starts[depth - 1], _padded(widths[depth - 1])
                if depth > 1:
                    _active(acts[depth - 2], m * wide, sigmoid)
                    for k in range(widths[depth - 1]):
                        base_k = theta[last + k * LANES]
                        turned[k] = base_k
                    for k in range(widths[depth - 1], wide):
                        turned[k] = np.float32(0.0)
                of_offset = np.float32(0.0)
                for i in range(m):
                    if depth > 1:
                        value = theta[last + widths[depth - 1] * LANES] + _dot(acts[depth - 2], i * wide, turned, 0, wide)
                    else:
                        value = acts[0][i * first_high]
                    if explicit:
                        error = value - label[i]
                        total += 0.5 * error * error
                    else:
                        error = np.float32(1.0) / (np.float32(1.0) + np.exp(-value)) - label[i]
                        if epoch == epochs - 1:
                            total += max(value, np.float32(0.0)) - label[i] * value
                            total += np.log1p(np.exp(-abs(value)))
                    error *= -rate / m
                    of_offset += error
                    if depth > 1:
                        for k in range(wide):
                            slope[i * wide + k] = error * turned[k]
                        label[i] = error
                    else:
                        for k in range(first_high):
                            slope[i * first_high + k] = np.float32(0.0)
                        slope[i * first_high] = error
                told += m
                # Backward; the slopes carry the step's size, so that they are added as they are.
                if depth > 1:
                    theta[last + widths[depth - 1] * LANES] += of_offset
                    turned[:wide] = np.float32(0.0)
                    for i in range(m):
                        _add(acts[depth - 2], i * wide, label[i], turned, 0, wide)
                    for k in range(widths[depth - 1]):
                        theta[last + k * LANES] += turned[k]
                for layer in range(depth - 2, 0, -1):
                    low, high = widths[layer], _padded(widths[layer + 1])
                    wide = _padded(low)
                    at = starts[layer]
                    _through(slope, acts[layer], m * high, sigmoid)
                    _turned(theta, at, low, widths[layer + 1], high, turned, wide)
                    _product(slope, 0, high, 1, turned, 0, wide, other, 0, wide, m, wide, widths[layer + 1], False)
                    _product(acts[layer - 1], 0, 1, wide, slope, 0, high, theta, at, high, low, high, m, True)
                    for i in range(m):
                        _add(slope, i * high, np.float32(1.0), theta, at + low * high, high)
                    slope, other = other, slope
                if depth > 1:
                    _through(slope, acts[0], m * first_high, sigmoid)
                # The first layer: what samples have in common is summed before it is multiplied.
                of_made[: n_met * first_high] = np.float32(0.0)
                base[:] = np.float32(0.0)
                for i in range(m):
                    at = i * first_high
                    for k in range(first_high):
                        base[k] += slope[at + k]
                    for k in range(around_row.shape[1]):
                        weight = around_weight[at_place[i], k]
                        if weight != 0:
                            _add(slope, at, weight, of_made, seat[around_row[at_place[i], k]] * first_high, first_high)
                    for k in range(thing_row.shape[1]):
                        weight = thing_weight[sample[i], k]
                        if weight != 0:
                            _add(slope, at, weight, of_made, seat[thing_row[sample[i], k]] * first_high, first_high)
                for k in range(len(person_row)):
                    if person_weight[k] != 0:
                        _add(base, 0, person_weight[k], of_made, seat[person_row[k]] * first_high, first_high)
                _add(base, 0, np.float32(1.0), theta, widths[0] * first_high, first_high)
                low = 0
                while low < n_met:
                    high = low + 1
                    while high < n_met and block_of[high] == block_of[low]:
                        high += 1
                    at = block_of[low] * factors * first_high
                    _turned(theta, at, factors, widths[1], first_high, turned, row_pad)
                    _product(
                        of_made, low * first_high, first_high, 1, turned, 0, row_pad,
                        of_met, low * row_pad, row_pad, high - low, row_pad, widths[1], False,
                    )
                    _product(
                        met_x, low * factors, 1, factors, of_made, low * first_high, first_high,
                        theta, at, first_high, factors, first_high, high - low, True,
                    )
                    low = high
                _turned(theta, own, factors, widths[1], first_high, turned, row_pad)
                _product(slope, 0, first_high, 1, turned, 0, row_pad, of_x, 0, row_pad, m, row_pad, widths[1], False)
                _product(x, 0, 1, factors, slope, 0, first_high, theta, own, first_high, factors, first_high, m, True)
                for i in range(m):
                    _add(of_x, i * row_pad, np.float32(1.0), table, sample[i] * factors, factors)
                for u in range(n_met):
                    _add(of_met, u * row_pad, np.float32(1.0), feature, met[u] * factors, factors)
                    seat[met[u]] = -1
            if epoch == epochs - 1 and told:
                loss[client] = total / told
        _packed(widths, theta, flat)

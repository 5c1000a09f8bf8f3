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
    """A product of `rows` × `vectors` vectors whose sums stay in registers, which no loop could promise.

    c[r, j] = s[r, j] + Σ_p a[r, p] b[p, j] in flat arrays; the sums start from zero where s_row is negative.
    """

    @intrinsic
    def tile(typing, a, a_at, a_row, a_step, b, b_at, b_row, s, s_at, s_row, c, c_at, c_row, depth):  # type: ignore[no-untyped-def]
        whole, floats = types.intp, types.Array(types.float32, 1, "C")
        third = (floats, whole, whole)
        return types.void(*third, whole, *third, *third, *third, whole), generate

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        code = _Vectors(context, builder, signature, given)
        a, a_at, a_row, a_step = code.data(0), *given[1:4]
        b, b_at, b_row = code.data(4), *given[5:7]
        s, s_at, s_row = code.data(7), *given[8:10]
        c, c_at, c_row, depth = code.data(10), *given[11:14]
        sums = [[cgutils.alloca_once(builder, code.vector) for _ in range(vectors)] for _ in range(rows)]
        a_rows, s_rows, c_rows = (
            [builder.add(at, builder.mul(step, code.number(r))) for r in range(rows)]
            for at, step in ((a_at, a_row), (s_at, s_row), (c_at, c_row))
        )
        places = [(r, v) for r in range(rows) for v in range(vectors)]
        with builder.if_else(builder.icmp_signed("<", s_row, code.number(0))) as (anew, onwards):
            with anew:
                for r, v in places:
                    builder.store(ir.Constant(code.vector, None), sums[r][v])
            with onwards:
                for r, v in places:
                    builder.store(code.load(s, s_rows[r], v), sums[r][v])
        with cgutils.for_range(builder, depth) as loop:
            start = builder.add(b_at, builder.mul(b_row, loop.index))
            right = [code.load(b, start, v) for v in range(vectors)]
            along = builder.mul(a_step, loop.index)
            for r in range(rows):
                left = code.spread(builder.load(builder.gep(a, [builder.add(a_rows[r], along)])))
                for v in range(vectors):
                    builder.store(code.fused(left, right[v], builder.load(sums[r][v])), sums[r][v])
        for r, v in places:
            code.store(builder.load(sums[r][v]), c, c_rows[r], v)
        return context.get_dummy_value()

    return tile


class _Vectors:
    """Code for vectors in flat arrays of floats, among the arguments of an intrinsic."""

    def __init__(self, context: Any, builder: Any, signature: Any, given: Any) -> None:
        self.context, self.builder, self.signature, self.given = context, builder, signature, given
        self.vector = ir.VectorType(ir.FloatType(), LANES)

    def number(self, value: int) -> Any:
        return ir.Constant(self.given[1].type, value)

    def data(self, place: int) -> Any:
        """Where the array begins that is this argument."""
        array = self.context.make_array(self.signature.args[place])
        return array(self.context, self.builder, self.given[place]).data

    def _place(self, base: Any, at: Any, vector: int) -> Any:
        at = self.builder.add(at, self.number(vector * LANES))
        return self.builder.bitcast(self.builder.gep(base, [at]), self.vector.as_pointer())

    def load(self, base: Any, at: Any, vector: int = 0) -> Any:
        return self.builder.load(self._place(base, at, vector), align=4)

    def store(self, value: Any, base: Any, at: Any, vector: int = 0) -> None:
        self.builder.store(value, self._place(base, at, vector), align=4)

    def spread(self, number: Any) -> Any:
        """One number in every lane."""
        none, first = ir.Constant(self.vector, ir.Undefined), ir.IntType(32)
        lone = self.builder.insert_element(none, number, ir.Constant(first, 0))
        return self.builder.shuffle_vector(lone, none, ir.Constant(ir.VectorType(first, LANES), None))

    def fused(self, left: Any, right: Any, onto: Any) -> Any:
        """left × right + onto, rounded once where the processor can."""
        return self.builder.fadd(self.builder.fmul(left, right, flags=("contract",)), onto, flags=("contract",))


@intrinsic
def _add_vectors(typing, source, at, weight, out, to, count):  # type: ignore[no-untyped-def]
    """out[k] += weight × source[k], for so many whole vectors."""
    whole, floats = types.intp, types.Array(types.float32, 1, "C")

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        code = _Vectors(context, builder, signature, given)
        times = code.spread(given[2])
        with cgutils.for_range(builder, given[5]) as loop:
            along = builder.mul(loop.index, code.number(LANES))
            own, there = builder.add(given[1], along), builder.add(given[4], along)
            code.store(code.fused(times, code.load(code.data(0), own), code.load(code.data(3), there)), code.data(3), there)
        return context.get_dummy_value()

    return types.void(floats, whole, types.float32, floats, whole, whole), generate


@intrinsic
def _copy_vectors(typing, source, at, out, to, count):  # type: ignore[no-untyped-def]
    whole, floats = types.intp, types.Array(types.float32, 1, "C")

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        code = _Vectors(context, builder, signature, given)
        with cgutils.for_range(builder, given[4]) as loop:
            along = builder.mul(loop.index, code.number(LANES))
            value = code.load(code.data(0), builder.add(given[1], along))
            code.store(value, code.data(2), builder.add(given[3], along))
        return context.get_dummy_value()

    return types.void(floats, whole, floats, whole, whole), generate


@nb.njit
def _add(source, at, weight, out, to, n):
    """out[k] += weight × source[k]."""
    _add_vectors(source, at, weight, out, to, n // LANES)
    for k in range(n - n % LANES, n):
        out[to + k] += weight * source[at + k]


@nb.njit
def _copy(source, at, out, to, n):
    _copy_vectors(source, at, out, to, n // LANES)
    for k in range(n - n % LANES, n):
        out[to + k] = source[at + k]


_tall_wide, _tall, _wide, _small = _tile(TALL, ACROSS), _tile(TALL, 1), _tile(1, ACROSS), _tile(1, 1)


@nb.njit
def _product(a, a_at, a_row, a_step, b, b_at, b_row, s, s_at, s_row, c, c_at, c_row, rows, columns, depth):
    """c[r, j] = s[r, j] + Σ_p a[r, p] b[p, j], as `_tile` has it; columns in whole vectors."""
    r = 0
    while r < rows:
        tall = r + TALL <= rows
        j = 0
        while j < columns:
            x, y, w, z = a_at + r * a_row, b_at + j, s_at + r * s_row + j, c_at + r * c_row + j
            if j + WIDE <= columns:
                if tall:
                    _tall_wide(a, x, a_row, a_step, b, y, b_row, s, w, s_row, c, z, c_row, depth)
                else:
                    _wide(a, x, a_row, a_step, b, y, b_row, s, w, s_row, c, z, c_row, depth)
                j += WIDE
            else:
                if tall:
                    _tall(a, x, a_row, a_step, b, y, b_row, s, w, s_row, c, z, c_row, depth)
                else:
                    _small(a, x, a_row, a_step, b, y, b_row, s, w, s_row, c, z, c_row, depth)
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
        base, one, none = np.empty(first_high, np.float32), np.ones(1, np.float32), np.empty(0, np.float32)
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
                    _copy(feature, met[u] * factors, met_x, u * factors, factors)
                # Forward.
                low = 0
                while low < n_met:
                    high = low + 1
                    while high < n_met and block_of[high] == block_of[low]:
                        high += 1
                    at, to = block_of[low] * factors * first_high, low * first_high
                    _product(
                        *(met_x, low * factors, factors, 1),
                        *(theta, at, first_high),
                        *(none, 0, -1),
                        *(made, to, first_high),
                        *(high - low, first_high, factors),
                    )
                    low = high
                _copy(theta, widths[0] * first_high, base, 0, first_high)
                for k in range(len(person_row)):
                    if person_weight[k] != 0:
                        _add(made, seat[person_row[k]] * first_high, person_weight[k], base, 0, first_high)
                z = acts[0]
                for i in range(m):
                    to = i * first_high
                    _copy(base, 0, z, to, first_high)
                    for k in range(around_row.shape[1]):
                        weight = around_weight[at_place[i], k]
                        if weight != 0:
                            _add(made, seat[around_row[at_place[i], k]] * first_high, weight, z, to, first_high)
                    for k in range(thing_row.shape[1]):
                        weight = thing_weight[sample[i], k]
                        if weight != 0:
                            _add(made, seat[thing_row[sample[i], k]] * first_high, weight, z, to, first_high)
                    _copy(table, sample[i] * factors, x, i * factors, factors)
                own = beside * factors * first_high
                _product(
                    *(x, 0, factors, 1),
                    *(theta, own, first_high),
                    *(z, 0, first_high),
                    *(z, 0, first_high),
                    *(m, first_high, factors),
                )
                for layer in range(1, depth):
                    low, high = widths[layer], _padded(widths[layer + 1])
                    at, wide = starts[layer], _padded(low)
                    below = acts[layer - 1]
                    _active(below, m * wide, sigmoid)
                    _product(
                        *(below, 0, wide, 1),
                        *(theta, at, high),
                        *(theta, at + low * high, 0),
                        *(acts[layer], 0, high),
                        *(m, high, low),
                    )
                # The slopes carry the step's size, so that they are added to the weights as they are.
                z, high = acts[depth - 1], LANES
                slope[: m * high] = np.float32(0.0)
                for i in range(m):
                    value = z[i * high]
                    if explicit:
                        error = value - label[i]
                        total += 0.5 * error * error
                    else:
                        error = np.float32(1.0) / (np.float32(1.0) + np.exp(-value)) - label[i]
                        if epoch == epochs - 1:
                            total += max(value, np.float32(0.0)) - label[i] * value
                            total += np.log1p(np.exp(-abs(value)))
                    slope[i * high] = error * (-rate / np.float32(m))
                told += m
                # Backward.
                for layer in range(depth - 1, 0, -1):
                    low, high = widths[layer], _padded(widths[layer + 1])
                    at, wide = starts[layer], _padded(low)
                    below = acts[layer - 1]
                    _turned(theta, at, low, widths[layer + 1], high, turned, wide)
                    _product(
                        *(slope, 0, high, 1),
                        *(turned, 0, wide),
                        *(none, 0, -1),
                        *(other, 0, wide),
                        *(m, wide, widths[layer + 1]),
                    )
                    _product(
                        *(below, 0, 1, wide),
                        *(slope, 0, high),
                        *(theta, at, high),
                        *(theta, at, high),
                        *(low, high, m),
                    )
                    at += low * high
                    _product(*(one, 0, 0, 0), *(slope, 0, high), *(theta, at, high), *(theta, at, high), *(1, high, m))
                    _through(other, below, m * wide, sigmoid)
                    slope, other = other, slope
                # The first layer: what samples have in common is summed before it is multiplied.
                of_made[: n_met * first_high] = np.float32(0.0)
                _product(
                    *(one, 0, 0, 0),
                    *(slope, 0, first_high),
                    *(none, 0, -1),
                    *(base, 0, first_high),
                    *(1, first_high, m),
                )
                for i in range(m):
                    at = i * first_high
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
                    at, to = block_of[low] * factors * first_high, low * first_high
                    _turned(theta, at, factors, widths[1], first_high, turned, row_pad)
                    _product(
                        *(of_made, to, first_high, 1),
                        *(turned, 0, row_pad),
                        *(none, 0, -1),
                        *(of_met, low * row_pad, row_pad),
                        *(high - low, row_pad, widths[1]),
                    )
                    _product(
                        *(met_x, low * factors, 1, factors),
                        *(of_made, to, first_high),
                        *(theta, at, first_high),
                        *(theta, at, first_high),
                        *(factors, first_high, high - low),
                    )
                    low = high
                _turned(theta, own, factors, widths[1], first_high, turned, row_pad)
                _product(
                    *(slope, 0, first_high, 1),
                    *(turned, 0, row_pad),
                    *(none, 0, -1),
                    *(of_x, 0, row_pad),
                    *(m, row_pad, widths[1]),
                )
                _product(
                    *(x, 0, 1, factors),
                    *(slope, 0, first_high),
                    *(theta, own, first_high),
                    *(theta, own, first_high),
                    *(factors, first_high, m),
                )
                for i in range(m):
                    _add(of_x, i * row_pad, np.float32(1.0), table, sample[i] * factors, factors)
                for u in range(n_met):
                    _add(of_met, u * row_pad, np.float32(1.0), feature, met[u] * factors, factors)
                    seat[met[u]] = -1
            if epoch == epochs - 1 and told:
                loss[client] = total / told
        _packed(widths, theta, flat)

"""Products of small matrices and other loops over whole vectors, for kernels that keep a client to a thread.

Everything lies in flat arrays of floats, with a place to start from and steps between rows. The code is given to the
compiler as vectors: sums then stay in registers, at the processor's pace, without a library that has its own threads.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba as nb
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["LANES", "add", "copy", "padded", "product", "turned"]

MANY_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if MANY_REGISTERS else 8
"""Numbers in a vector of the processor."""
TALL, ACROSS = 4, 4 if MANY_REGISTERS else 2
"""Rows and vectors of a product that are summed up at once: as many as there are registers for."""
WIDE = ACROSS * LANES

# Signatures are written out where functions are called with constants: numba would compile one version a constant.
_WHOLE, _FLOATS = types.intp, types.Array(types.float32, 1, "C")
_MATRIX = (_FLOATS, _WHOLE, _WHOLE)


def _tile(rows: int, vectors: int) -> Any:
    """A product of `rows` × `vectors` vectors whose sums stay in registers, which no loop could promise.

    c[r, j] = s[r, j] + Σ_p a[r, p] b[p, j] in flat arrays; the sums start from zero where s_row is negative.
    """

    @intrinsic
    def tile(typing, a, a_at, a_row, a_step, b, b_at, b_row, s, s_at, s_row, c, c_at, c_row, depth):
        return types.void(*_MATRIX, _WHOLE, *_MATRIX, *_MATRIX, *_MATRIX, _WHOLE), generate

    def generate(context, builder, signature, given):
        code = _Vectors(context, builder, signature, given)
        a, b, s, c = (code.data(place) for place in (0, 4, 7, 10))
        _, a_at, a_row, a_step, _, b_at, b_row, _, s_at, s_row, _, c_at, c_row, depth = given
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
def _add_vectors(typing, source, at, weight, out, to, count):
    """out[k] += weight × source[k], for so many whole vectors."""

    def generate(context, builder, signature, given):
        code = _Vectors(context, builder, signature, given)
        times = code.spread(given[2])
        with cgutils.for_range(builder, given[5]) as loop:
            along = builder.mul(loop.index, code.number(LANES))
            own, there = builder.add(given[1], along), builder.add(given[4], along)
            code.store(
                code.fused(times, code.load(code.data(0), own), code.load(code.data(3), there)), code.data(3), there
            )
        return context.get_dummy_value()

    return types.void(_FLOATS, _WHOLE, types.float32, _FLOATS, _WHOLE, _WHOLE), generate


@intrinsic
def _copy_vectors(typing, source, at, out, to, count):
    def generate(context, builder, signature, given):
        code = _Vectors(context, builder, signature, given)
        with cgutils.for_range(builder, given[4]) as loop:
            along = builder.mul(loop.index, code.number(LANES))
            value = code.load(code.data(0), builder.add(given[1], along))
            code.store(value, code.data(2), builder.add(given[3], along))
        return context.get_dummy_value()

    return types.void(_FLOATS, _WHOLE, _FLOATS, _WHOLE, _WHOLE), generate


@nb.njit(types.void(_FLOATS, _WHOLE, types.float32, _FLOATS, _WHOLE, _WHOLE), cache=True)
def add(source, at, weight, out, to, n):
    """out[k] += weight × source[k]."""
    _add_vectors(source, at, weight, out, to, n // LANES)
    for k in range(n - n % LANES, n):
        out[to + k] += weight * source[at + k]


@nb.njit(types.void(_FLOATS, _WHOLE, _FLOATS, _WHOLE, _WHOLE), cache=True)
def copy(source, at, out, to, n):
    _copy_vectors(source, at, out, to, n // LANES)
    for k in range(n - n % LANES, n):
        out[to + k] = source[at + k]


_tall_wide, _tall, _wide, _small = _tile(TALL, ACROSS), _tile(TALL, 1), _tile(1, ACROSS), _tile(1, 1)


@nb.njit(types.void(*_MATRIX, _WHOLE, *_MATRIX, *_MATRIX, *_MATRIX, _WHOLE, _WHOLE, _WHOLE), cache=True)
def product(a, a_at, a_row, a_step, b, b_at, b_row, s, s_at, s_row, c, c_at, c_row, rows, columns, depth):
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
def padded(width):
    """The width in whole vectors."""
    return (width + LANES - 1) // LANES * LANES


@intrinsic
def _turn_square(typing, a, at, row, out, to, out_row):
    """As many rows as a vector has lanes, as columns."""

    def generate(context, builder, signature, given):
        code = _Vectors(context, builder, signature, given)
        _, at, row, _, to, out_row = given
        numbers = [code.number(r) for r in range(LANES)]
        lines = [code.load(code.data(0), builder.add(at, builder.mul(row, r))) for r in numbers]
        half = LANES // 2
        masks = [
            ir.Constant(ir.VectorType(ir.IntType(32), LANES), [k // 2 + start + LANES * (k % 2) for k in range(LANES)])
            for start in (0, half)
        ]
        step = 1
        while step < LANES:  # merging the upper half with the lower, so often, turns it
            pairs = zip(lines[:half], lines[half:], strict=True)
            lines = [builder.shuffle_vector(*pair, mask) for pair in pairs for mask in masks]
            step *= 2
        for r, line in zip(numbers, lines, strict=True):
            code.store(line, code.data(3), builder.add(to, builder.mul(out_row, r)))
        return context.get_dummy_value()

    return types.void(_FLOATS, _WHOLE, _WHOLE, _FLOATS, _WHOLE, _WHOLE), generate


@nb.njit(types.void(_FLOATS, _WHOLE, _WHOLE, _WHOLE, _WHOLE, _FLOATS, _WHOLE), cache=True)
def turned(a, at, rows, columns, row, out, out_row):
    """out[j, r] = a[r, j]; what pads its columns becomes zero."""
    whole_rows, whole_columns = rows - rows % LANES, columns - columns % LANES
    for r in range(0, whole_rows, LANES):
        for j in range(0, whole_columns, LANES):
            _turn_square(a, at + r * row + j, row, out, j * out_row + r, out_row)
        for j in range(whole_columns, columns):
            for k in range(r, r + LANES):
                out[j * out_row + k] = a[at + k * row + j]
    for j in range(columns):
        for r in range(whole_rows, rows):
            out[j * out_row + r] = a[at + r * row + j]
        for r in range(rows, out_row):
            out[j * out_row + r] = np.float32(0.0)

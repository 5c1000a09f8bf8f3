"""Compiled sums of a table's rows by block, and the way back."""

import numba as nb

from homebody.parallel import parallel

__all__ = ["spread_rows", "sum_rows"]


@nb.njit(inline="always")
def _sum_rows_of(table, row, weight, block, out):
    out[:] = 0
    for i in range(row.shape[0]):
        for k in range(row.shape[1]):
            w = weight[i, k]
            if w != 0:
                source, target = table[row[i, k]], out[i, block[k]]
                for column in range(len(source)):
                    target[column] += w * source[column]


@nb.njit(inline="always")
def _spread_rows_of(row, weight, block, change, table):
    for i in range(row.shape[0]):
        for k in range(row.shape[1]):
            w = weight[i, k]
            if w != 0:
                target, source = table[row[i, k]], change[i, block[k]]
                for column in range(len(target)):
                    target[column] += w * source[column]


@parallel(over="row")
def sum_rows(lower, upper, table, row, weight, block, out):
    """Sums of some rows of each client's own table with weights, in each block."""
    for client in range(lower, upper):
        _sum_rows_of(table[client], row[client], weight[client], block[client], out[client])


@parallel(over="row")
def spread_rows(lower, upper, row, weight, block, change, table):
    """Add to the rows that `sum_rows` takes what their block changes by, with the same weights, in place."""
    for client in range(lower, upper):
        _spread_rows_of(row[client], weight[client], block[client], change[client], table[client])

"""Compiled counting: how many others score no less than each relevant item. One question a row, rows in parallel.

A score that is no number, of another item, is no less than anything; of a relevant item, no more than anything.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import torch

__all__ = ["among", "in_catalogue"]


def among(scores, owner, relevant, listed):
    """Of the listed items (-1 pads): (Q, P) no less than each relevant one, (Q, P) the same, (Q,) in all."""
    return _run(_among, scores, owner, relevant, listed)


def in_catalogue(scores, owner, relevant, seen):
    """Of all items but the relevant ones and those seen (the catalogue's size pads)."""
    return _run(_in_catalogue, scores, owner, relevant, seen)


def _run(kernel, scores, owner, relevant, listed):
    above, tied = (np.zeros(relevant.shape, dtype=np.int64) for _ in range(2))
    others = np.zeros(len(relevant), dtype=np.int64)
    kernel(scores.detach().numpy(), owner.numpy(), relevant.numpy(), listed.numpy(), above, tied, others)
    return torch.from_numpy(above), torch.from_numpy(tied), torch.from_numpy(others)


@nb.njit(parallel=True, cache=True)
def _among(scores, owner, relevant, listed, above, tied, others):
    for row in nb.prange(len(owner)):
        own = scores[owner[row]]
        for place in range(listed.shape[1]):
            if listed[row, place] < 0:
                continue
            others[row] += 1
            score = own[listed[row, place]]
            for j in range(relevant.shape[1]):
                if relevant[row, j] >= 0:
                    target = own[relevant[row, j]]
                    above[row, j] += not (score < target)
                    tied[row, j] += score == target


@nb.njit
def _one(own, target):
    """How many of all scores are no less than the target, and how many the same: a loop the compiler vectorises."""
    above, tied = np.int32(0), np.int32(0)
    for item in range(len(own)):
        above += np.int32(0) if own[item] < target else np.int32(1)
        tied += np.int32(1) if own[item] == target else np.int32(0)
    return above, tied


@nb.njit
def _not_above(ascending, score):
    """How many of these the score is not below: all of them where it is no number."""
    before, left = 0, len(ascending)
    while left > 1:  # no branch depends on the data: the processor could not guess it
        half = left >> 1
        before += half * (not (score < ascending[before + half - 1]))
        left -= half
    return before + (not (score < ascending[before]))


@nb.njit(parallel=True, cache=True)
def _in_catalogue(scores, owner, relevant, seen, above, tied, others):
    n_items = scores.shape[1]
    for row in nb.prange(len(owner)):
        own = scores[owner[row]]
        count = 0
        for j in range(relevant.shape[1]):
            count += relevant[row, j] >= 0
        left_out = 0
        while left_out < seen.shape[1] and seen[row, left_out] < n_items:
            left_out += 1
        others[row] = n_items - left_out - count
        if count == 1:
            j = 0
            while relevant[row, j] < 0:
                j += 1
            target = own[relevant[row, j]]
            most, same = _one(own, target)
            for place in range(left_out):
                score = own[seen[row, place]]
                most -= 0 if score < target else 1
                same -= 1 if score == target else 0
            above[row, j] = most - 1  # less itself
            tied[row, j] = same - (1 if target == target else 0)
            continue
        ascending = np.empty(count, dtype=own.dtype)
        n = 0
        for j in range(relevant.shape[1]):
            if relevant[row, j] >= 0:
                target = own[relevant[row, j]]
                ascending[n] = target if target == target else -np.inf
                n += 1
        ascending.sort()
        passed = np.zeros(count + 1, dtype=np.int64)  # by how many relevant items each score is not below
        equal = np.zeros(count + 1, dtype=np.int64)
        for item in range(n_items):
            step = _not_above(ascending, own[item])
            passed[step] += 1
            equal[step] += step > 0 and ascending[step - 1] == own[item]
        for place in range(left_out + relevant.shape[1]):
            item = seen[row, place] if place < left_out else relevant[row, place - left_out]
            if item >= 0:
                step = _not_above(ascending, own[item])
                passed[step] -= 1
                equal[step] -= step > 0 and ascending[step - 1] == own[item]
        for step in range(count - 1, -1, -1):
            passed[step] += passed[step + 1]
        for j in range(relevant.shape[1]):
            if relevant[row, j] >= 0:
                target = own[relevant[row, j]]
                bound = target if target == target else -np.inf
                step = _not_above(ascending, bound)
                first = step
                while first > 0 and ascending[first - 1] == bound:
                    first -= 1
                above[row, j] = passed[first + 1]
                tied[row, j] = equal[step] if target == target else 0

"""Compiled counting: how many others score no less than each relevant item. One question a row, rows in parallel.

A score that is no number, of another item, is no less than anything; of a relevant item, no more than anything.
"""

from __future__ import annotations

import numpy as np
import torch

from homebody.kernels import ZERO
from homebody.parallel import inner, parallel

__all__ = ["among", "first", "in_catalogue"]


def among(scores, owner, relevant, listed):
    """Of the listed items (-1 pads): (Q, P) no less than each relevant one, (Q, P) the same, (Q,) in all."""
    return _run(_among, scores, owner, relevant, listed)


def in_catalogue(scores, owner, relevant, seen):
    """Of all items but the relevant ones and those seen (the catalogue's size pads)."""
    kernel = _few_in_catalogue if relevant.shape[1] <= FEW else _in_catalogue
    return _run(kernel, scores, owner, relevant, seen)


def first(scores, owner, seen, k):
    """(Q, k) the k items of the highest scores but those seen, best first, then -1; of a tie, the first item."""
    found = np.full((len(owner), k), -1, dtype=np.int64)
    _first(scores.detach().contiguous().numpy(), owner.numpy(), seen.numpy(), found)
    return torch.from_numpy(found)


def _run(kernel, scores, owner, relevant, listed):
    above, tied = (np.zeros(relevant.shape, dtype=np.int64) for _ in range(2))
    others = np.zeros(len(relevant), dtype=np.int64)
    kernel(scores.detach().contiguous().numpy(), owner.numpy(), relevant.numpy(), listed.numpy(), above, tied, others)
    return torch.from_numpy(above), torch.from_numpy(tied), torch.from_numpy(others)


@parallel(over="owner")
def _among(lower, upper, scores, owner, relevant, listed, above, tied, others):
    for row in range(lower, upper):
        of, wanted = scores[owner[row]], relevant[row]
        for item in listed[row]:
            if item < 0:
                continue
            others[row] += 1
            for j in range(len(wanted)):
                if wanted[j] >= 0:
                    target = of[wanted[j]]
                    above[row, j] += 0 if of[item] < target else 1
                    tied[row, j] += 1 if of[item] == target else 0


@parallel(over="owner")
def _few_in_catalogue(lower, upper, scores, owner, relevant, seen, above, tied, others):
    """As `_in_catalogue` where no question has many relevant items: a first run need not compile what those take."""
    for row in range(lower, upper):
        of, size = scores[owner[row]], len(relevant[row])
        left_out = _listed(seen[row], scores.shape[1])
        _one_by_one(of, relevant[row], seen[row, :left_out], above[row], tied[row])
        for j in range(len(relevant[row])):
            size -= relevant[row, j] < 0
        others[row] = len(of) - left_out - size


@parallel(over="owner")
def _in_catalogue(lower, upper, scores, owner, relevant, seen, above, tied, others):
    for row in range(lower, upper):
        of, wanted, count = scores[owner[row]], relevant[row], ZERO
        left_out = _listed(seen[row], len(of))
        for item in wanted:
            count += item >= 0
        if count <= FEW:
            _one_by_one(of, wanted, seen[row, :left_out], above[row], tied[row])
        else:
            _all_at_once(of, wanted, seen[row, :left_out], count, above[row], tied[row])
        others[row] = len(of) - left_out - count


@parallel(over="owner")
def _first(lower, upper, scores, owner, seen, found):
    best = np.empty(found.shape[1], dtype=scores.dtype)
    of = np.empty(scores.shape[1], dtype=scores.dtype)
    last = found.shape[1] - 1
    for row in range(lower, upper):
        of[:] = scores[owner[row]]
        for item in seen[row, : _listed(seen[row], len(of))]:
            of[item] = -np.inf  # what people have would be first, and would have to be looked up
        items = found[row]
        best[:] = -np.inf
        for start in range(0, len(of), STRIDE):
            end, higher = min(start + STRIDE, len(of)), ZERO
            for item in range(start, end):  # the compiler vectorises this one
                higher += 1 if of[item] > best[last] else 0
            if higher:
                for item in range(start, end):
                    if of[item] > best[last]:
                        place = last
                        while place > 0 and of[item] > best[place - 1]:
                            best[place], items[place] = best[place - 1], items[place - 1]
                            place -= 1
                        best[place], items[place] = of[item], item


STRIDE = 32
"""Items that are compared with the last of the first k in one go: few of them are better."""
FEW = 24
"""So many relevant items are counted one by one, in a loop that the compiler vectorises."""


@inner()
def _one(scores, target):
    above, tied = 0, 0
    for item in range(len(scores)):
        above += 0 if scores[item] < target else 1
        tied += 1 if scores[item] == target else 0
    return above, tied


@inner()
def _not_above(ascending, score):
    """How many of these the score is not below: all of them where it is no number."""
    before, left = 0, len(ascending)
    while left > 1:  # no branch depends on the data: the processor could not guess it
        half = left >> 1
        before += half * (not (score < ascending[before + half - 1]))
        left -= half
    return before + (not (score < ascending[before]))


@inner()
def _listed(seen, n_items):
    """How many items are listed before the padding."""
    count = 0
    while count < len(seen) and seen[count] < n_items:
        count += 1
    return count


@inner()
def _one_by_one(scores, relevant, seen, above, tied):
    for j in range(len(relevant)):
        if relevant[j] < 0:
            continue
        target = scores[relevant[j]]
        above[j], tied[j] = _one(scores, target)
        for items in (seen, relevant):
            for item in items:
                if item >= 0:
                    above[j] -= 0 if scores[item] < target else 1
                    tied[j] -= 1 if scores[item] == target else 0


@inner()
def _all_at_once(scores, relevant, seen, count, above, tied):
    """One pass over the catalogue: between which of the relevant scores, in ascending order, does each one lie?"""
    ascending = np.empty(count, dtype=scores.dtype)
    n = 0
    for item in relevant:
        if item >= 0:
            score = scores[item] if scores[item] == scores[item] else -np.inf
            place = n
            while place > 0 and ascending[place - 1] > score:  # an insertion sort: numpy's takes seconds to compile
                ascending[place] = ascending[place - 1]
                place -= 1
            ascending[place] = score
            n += 1
    passed = np.zeros(count + 1, dtype=np.int64)
    equal = np.zeros(count + 1, dtype=np.int64)
    for score in scores:
        step = _not_above(ascending, score)
        passed[step] += 1
        equal[step] += step > 0 and ascending[step - 1] == score
    for items in (seen, relevant):
        for item in items:
            if item >= 0:
                step = _not_above(ascending, scores[item])
                passed[step] -= 1
                equal[step] -= step > 0 and ascending[step - 1] == scores[item]
    for step in range(count - 1, -1, -1):
        passed[step] += passed[step + 1]
    for j in range(len(relevant)):
        if relevant[j] >= 0:
            target = scores[relevant[j]]
            bound = target if target == target else -np.inf
            last = _not_above(ascending, bound)
            first = last
            while first > 0 and ascending[first - 1] == bound:
                first -= 1
            above[j] = passed[first + 1]
            tied[j] = equal[last] if target == target else 0

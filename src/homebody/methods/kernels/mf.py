"""Compiled parts of the references that learn from sampled negatives: drawing, lazy Adam, a pass of MF.

rows (N, 3, F) holds each row's value and Adam's two moments side by side, for a step reads and writes all three. slot
(N,) is -1 everywhere between two steps; during one it is the place where a touched row's gradient is summed, and
touched[place] is that row. Steps follow one another, so nothing here runs in parallel.
"""

from __future__ import annotations

import math

import numba as nb
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.kernels import below, nth_outside
from homebody.reference import Histories
from homebody.rng import Rng

__all__ = ["Embeddings", "Samples", "avoided", "draw", "outside", "train"]

Samples = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]
"""Users, items and labels."""
DECAY_1, DECAY_2, EPSILON = 0.9, 0.999, 1e-8  # Adam's own


class Embeddings:
    """Rows to be learnt by lazy Adam: a step moves the rows it touches, and the moments of the others wait.

    >>> rows = Embeddings(torch.zeros(3, 2))
    >>> rows.step(torch.tensor([1, 1]), torch.tensor([[4.0, -1.0], [4.0, 0.0]]), rate=0.5, number=1)
    >>> rows.value
    tensor([[ 0.0000,  0.0000],
            [-0.5000,  0.5000],
            [ 0.0000,  0.0000]])
    """

    def __init__(self, start: Tensor) -> None:
        zero = torch.zeros_like(start)
        self.rows = torch.stack([start, zero, zero], dim=1).numpy()  # values and moments side by side
        self.value = torch.from_numpy(self.rows[:, 0])
        self.slot = np.full(len(start), -1, dtype=np.int64)

    def step(self, index: Tensor, slopes: Tensor, rate: float, number: int) -> None:
        """The step of this number, from 1, down these slopes; those of one row are added up."""
        _adam(self.rows, self.slot, index.numpy(), slopes.numpy(), rate, number)


def draw(histories: Histories, who: npt.NDArray[np.bool_], negatives: int, rng: Rng) -> Samples:
    """One pass of samples: these users' training items, and fresh negatives for each, shuffled."""
    avoid = avoided(histories)
    keys = (int(rng.next_key()) for _ in range(2))
    packed = _draw(histories.indptr, histories.items, who, *avoid, histories.catalogue.n_items, negatives, *keys)
    return packed >> 32, (packed >> 1) & 0x7FFFFFFF, (packed & 1).astype(np.float32)


def train(
    samples: Samples,
    users: Embeddings,
    items: Embeddings,
    rates: tuple[float, float],
    batch_size: int,
    steps: int,
    frozen: bool,
) -> int:
    """A pass of matrix factorisation in mini-batches; `rates` are Adam's and the regularisation's.

    With `frozen` only the users' rows move. Answers how many steps there were by now.
    """
    return int(_train(*samples, users.rows, items.rows, users.slot, items.slot, *rates, batch_size, steps, frozen))


def outside(histories: Histories, users: npt.NDArray[np.int64], negatives: int, rng: Rng) -> npt.NDArray[np.int64]:
    """(users, negatives): items drawn for each of these users, none that they avoid; -1 where they avoid all."""
    out = np.empty((len(users), negatives), dtype=np.int64)
    _outside(users, *avoided(histories), histories.catalogue.n_items, int(rng.next_key()), out)
    return out


def avoided(histories: Histories) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """What negatives avoid, as compressed rows, ascending and distinct: what the protocol says, or training items."""
    if histories.avoid:
        return histories.avoid
    n_items = histories.catalogue.n_items
    owner = np.repeat(np.arange(len(histories.indptr) - 1), np.diff(histories.indptr))
    pairs = np.unique(owner * n_items + histories.items)
    counts = np.bincount(pairs // n_items, minlength=len(histories.indptr) - 1)
    return np.concatenate([[0], np.cumsum(counts)]), (pairs % n_items).astype(np.int32)


@nb.njit(cache=True)
def _draw(indptr, items, who, avoid_indptr, avoid, n_items, negatives, drawing, shuffling):
    """user · 2³² + item · 2 + label, in random order. Nothing is drawn for a user that has everything."""
    total = 0
    for user in range(len(who)):
        free = n_items - (avoid_indptr[user + 1] - avoid_indptr[user])
        total += who[user] * (indptr[user + 1] - indptr[user]) * (1 + negatives * (free > 0))
    out = np.empty(total, dtype=np.int64)
    n = 0
    for user in range(len(who)):
        if not who[user]:
            continue
        avoided = avoid[avoid_indptr[user] : avoid_indptr[user + 1]]
        free = n_items - len(avoided)
        for position in range(indptr[user], indptr[user + 1]):
            out[n] = (user << 32) + 2 * np.int64(items[position]) + 1
            n += 1
            if free > 0:
                for _ in range(negatives):
                    out[n] = (user << 32) + 2 * nth_outside(avoided, len(avoided), below(drawing, n, free))
                    n += 1
    for i in range(n - 1, 0, -1):  # Fisher and Yates
        j = below(shuffling, i, i + 1)
        out[i], out[j] = out[j], out[i]
    return out


@nb.njit(cache=True)
def _outside(users, avoid_indptr, avoid, n_items, key, out):
    for n in range(len(users)):
        avoided = avoid[avoid_indptr[users[n]] : avoid_indptr[users[n] + 1]]
        free = n_items - len(avoided)
        for j in range(out.shape[1]):
            position = n * out.shape[1] + j
            out[n, j] = nth_outside(avoided, len(avoided), below(key, position, free)) if free > 0 else -1


@nb.njit(inline="always")
def _place(slot, touched, count, row, gradient):
    """Where the batch's gradient of a row is summed up; a new place starts at zero."""
    place = slot[row]
    if place < 0:
        place = count
        slot[row] = place
        touched[place] = row
        gradient[place] = np.float32(0.0)
        count += 1
    return place, count


@nb.njit(inline="always")
def _step(rows, slot, touched, count, gradient, rate, step):
    """Adam on the touched rows alone; the moments of the others wait. `slot` is left clean."""
    b1, b2, eps, one = np.float32(DECAY_1), np.float32(DECAY_2), np.float32(EPSILON), np.float32(1.0)
    rate = np.float32(rate * math.sqrt(1.0 - DECAY_2**step) / (1.0 - DECAY_1**step))
    for place in range(count):
        row = rows[touched[place]]
        slope = gradient[place]
        for j in range(len(slope)):
            first = b1 * row[1, j] + (one - b1) * slope[j]
            second = b2 * row[2, j] + (one - b2) * slope[j] * slope[j]
            row[1, j] = first
            row[2, j] = second
            row[0, j] -= rate * first / (np.sqrt(second) + eps)
        slot[touched[place]] = -1


@nb.njit(fastmath=True, error_model="numpy", cache=True)
def _adam(rows, slot, index, slopes, rate, step):
    touched = np.empty(len(index), dtype=np.int64)
    gradient = np.empty_like(slopes)
    count = 0
    for s in range(len(index)):
        place, count = _place(slot, touched, count, index[s], gradient)
        for j in range(slopes.shape[1]):
            gradient[place, j] += slopes[s, j]
    _step(rows, slot, touched, count, gradient, rate, step)


@nb.njit(fastmath=True, error_model="numpy", cache=True)
def _train(
    users, items, labels, user_rows, item_rows, user_slot, item_slot, rate, regularisation, batch_size, step, frozen
):
    width = user_rows.shape[2]
    one = np.float32(1.0)
    user_touched, item_touched = np.empty((2, batch_size), dtype=np.int64)
    user_slope, item_slope = np.empty((2, batch_size, width), dtype=np.float32)
    for start in range(0, len(users), batch_size):
        stop = min(len(users), start + batch_size)
        scale = np.float32(1.0 / (stop - start))
        decay = np.float32(regularisation) * scale
        n_users = n_items = 0
        for s in range(start, stop):
            p, q = user_rows[users[s], 0], item_rows[items[s], 0]
            place_p, n_users = _place(user_slot, user_touched, n_users, users[s], user_slope)
            place_q, n_items = _place(item_slot, item_touched, n_items, items[s], item_slope)
            logit = np.float32(0.0)
            for j in range(width):
                logit += p[j] * q[j]
            error = (one / (one + np.float32(math.exp(-logit))) - labels[s]) * scale
            slope_p, slope_q = user_slope[place_p], item_slope[place_q]
            for j in range(width):
                slope_p[j] += error * q[j] + decay * p[j]
                slope_q[j] += error * p[j] + decay * q[j]
        step += 1
        _step(user_rows, user_slot, user_touched, n_users, user_slope, rate, step)
        if frozen:
            item_slot[item_touched[:n_items]] = -1
        else:
            _step(item_rows, item_slot, item_touched, n_items, item_slope, rate, step)
    return step

"""Building blocks for `prepare`, `client`, `score` and stages: written for one client, run for a cohort in one pass.

Each works on one client's tensors, and under `torch.func.vmap` on all of them at once: compiled on the CPU,
in plain torch elsewhere, with the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.functional import softplus

from homebody import kernels
from homebody.core import Data, Rows
from homebody.rng import GOLDEN, Rng, mix

functorch: Any = None
try:
    from torch._C import _functorch
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
except ImportError:  # parts of torch that are not public: without them `for_cohort` takes the public way
    pass
else:
    functorch = _functorch

__all__ = [
    "add_rows",
    "coalesced",
    "dropout_mask",
    "for_cohort",
    "labelled",
    "logistic",
    "minibatches",
    "negatives",
    "overlay",
    "power",
    "scaled",
    "scatter_sum",
    "shuffled",
    "shuffles",
    "single",
    "slopes",
    "take_rows",
    "touched",
    "weighted_rows",
]

Tensors = tuple[Tensor, ...]


class for_cohort:  # noqa: N801
    """Let one client's code call a function of whole cohorts (first dimension: clients), which is `cohort`.

    It gives a tensor, or a tuple of them. No gradient passes through it.
    """

    def __init__(self, cohort: Callable[..., Tensor | Tensors]) -> None:
        self.cohort: Callable[..., Any] = cohort

        class Operation(torch.autograd.Function):
            @staticmethod
            def forward(*arguments: Any) -> Tensor | Tensors:
                out = cohort(*(a.unsqueeze(0) if isinstance(a, Tensor) else a for a in arguments))
                return out.squeeze(0) if isinstance(out, Tensor) else tuple(part.squeeze(0) for part in out)

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))

            @staticmethod
            def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
                stacked = [_stacked(*given, info.batch_size) for given in zip(arguments, in_dims, strict=True)]
                out = cohort(*stacked)
                return out, 0 if isinstance(out, Tensor) else tuple(0 for _ in out)

        self._operation = Operation

    def __call__(self, *arguments: Any) -> Any:
        if functorch is None:
            return self._operation.apply(*arguments)  # type: ignore[no-untyped-call]
        top: Any = functorch.peek_interpreter_stack()
        kind = None if top is None else top.key()
        # torch's own way, an autograd function, takes several times as long as what most of these do for a few clients.
        if kind == functorch.TransformType.Vmap and top.level() == 1:
            return self._for_all(functorch.CVmapInterpreterPtr(top).batchSize(), arguments)
        if kind == functorch.TransformType.Grad:
            constants = [_below(argument, top.level()) for argument in arguments]
            with temporarily_pop_interpreter_stack():
                return self(*constants)
        if kind is None and not any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
            return self._operation.forward(*arguments)
        return self._operation.apply(*arguments)  # type: ignore[no-untyped-call]

    def _for_all(self, clients: int, arguments: tuple[Any, ...]) -> Any:
        """What all clients of the vmap around give: it is the only transform that is under way."""
        stacked = []
        with temporarily_pop_interpreter_stack():
            for argument in arguments:
                dim = functorch.maybe_get_bdim(argument) if isinstance(argument, Tensor) else -1
                stacked.append(_stacked(_below(argument, 1), None if dim < 0 else dim, clients))
            out = self.cohort(*stacked)
        if isinstance(out, Tensor):
            return functorch._add_batch_dim(out, 0, 1)
        return tuple(functorch._add_batch_dim(part, 0, 1) for part in out)


def _below(argument: Any, level: int) -> Any:
    """The same without the wrapper of this transform, if it has one."""
    wrapped = isinstance(argument, Tensor) and functorch.maybe_get_level(argument) == level
    return functorch.get_unwrapped(argument) if wrapped else argument


def _stacked(argument: Any, dim: int | None, clients: int) -> Any:
    """A tensor with one row per client, whatever dimension they were in, if in any; something else as it is."""
    if not isinstance(argument, Tensor):
        return argument
    return argument.expand(clients, *argument.shape) if dim is None else argument.movedim(dim, 0)


def _arrays(*tensors: Tensor) -> list[Any]:
    """Tensors as the arguments of compiled code, each row after the other: any other layout is compiled apart."""
    return [tensor.contiguous().numpy() for tensor in tensors]


def _words(tensor: Tensor) -> Any:
    """A tensor of any kind as whole numbers of the same size: what copies it is compiled for each size, not each kind.

    It may be one table for many clients, and is not copied.
    """
    array = tensor.numpy()
    return array.view(f"i{array.itemsize}")


def single(value: float) -> np.float32:
    """A number in 32 bits; one that is too large is the largest there is."""
    most = float(np.finfo(np.float32).max)
    return np.float32(min(max(value, -most), most))


@for_cohort
def _negatives(keys: Tensor, excluded: Tensor, n_items: int, count: int) -> Tensor:
    if keys.device.type == "cpu":
        out = torch.empty(len(keys), count, dtype=torch.int64)
        kernels.draw_negatives(*_arrays(keys, excluded), n_items, out.numpy())
        return out
    listed = (excluded < n_items).sum(1, keepdim=True)
    free = n_items - listed
    position = torch.arange(1, count + 1, device=keys.device)
    bits = mix(keys[:, None] + position * GOLDEN)
    rank = (((bits >> 32) & 0xFFFFFFFF) * free) >> 32
    step = torch.arange(excluded.shape[1], device=keys.device)
    # Padding must never count as an item before the rank.
    ahead = torch.where(excluded < n_items, excluded - step, 2 * n_items)
    drawn = rank + torch.searchsorted(ahead.contiguous(), rank, right=True)
    return torch.where(free > 0, drawn, -1)


def negatives(rng: Rng, data: Data, count: int) -> Tensor:
    """(count,) items drawn evenly from those outside `data.excluded`; -1 when nothing is outside it.

    >>> from homebody.core import Catalogue
    >>> mine = Data(torch.tensor([0, 2]), torch.tensor([True, True]), torch.tensor([0, 2]), Catalogue(4))
    >>> sorted(set(negatives(Rng.of(0), mine, 100).tolist()))
    [1, 3]
    """
    return _negatives(rng.next_key(), data.excluded, data.catalogue.n_items, count)


@for_cohort
def _kept(keys: Tensor, rate: float, count: int, width: int) -> Tensor:
    least, kept = round(rate * 65536), 1.0 / (1.0 - rate)
    if keys.device.type == "cpu":
        out = torch.empty(len(keys), count, width)
        kernels.drop(*_arrays(keys), np.uint64(least), np.float32(kept), out.numpy())
        return out
    words = -(-width // 4)
    bits = mix(keys[:, None] + torch.arange(1, count * words + 1, device=keys.device) * GOLDEN)
    parts = (bits[..., None] >> (16 * torch.arange(4, device=keys.device))) & 0xFFFF
    return (parts.view(len(keys), count, 4 * words)[..., :width] >= least) * kept


def dropout_mask(rng: Rng, rate: float, count: int, *shape: int) -> Tensor:
    """(count, *shape): 0 with probability `rate`, otherwise 1 / (1 - rate). Four of them come from one random number.

    >>> dropout_mask(Rng.of(0), 0.2, 500, 8, 5).mean().round(decimals=1).item()
    1.0
    """
    return _kept(rng.next_key(), rate, count, math.prod(shape)).reshape(count, *shape)


@for_cohort
def _shuffled(keys: Tensor, valid: Tensor) -> Tensor:
    if keys.device.type == "cpu":
        out = torch.empty(valid.shape, dtype=torch.int64)
        kernels.permute(*_arrays(keys, valid), out.numpy())
        return out
    position = torch.arange(1, valid.shape[1] + 1, device=keys.device)
    hashes = (mix(keys[:, None] + position * GOLDEN) >> 33) & 0x7FFFFFFF
    return torch.where(valid, hashes, 2**31 + position).argsort(dim=1, stable=True)


def shuffled(rng: Rng, valid: Tensor) -> Tensor:
    """A random order of the valid positions, the others behind them.

    >>> order = shuffled(Rng.of(0), torch.tensor([True, False, True, True]))
    >>> sorted(order[:3].tolist()), order[3].item()
    ([0, 2, 3], 1)
    """
    return _shuffled(rng.next_key(), valid)


@for_cohort
def _shuffles(keys: Tensor, valid: Tensor, count: int) -> Tensor:
    if keys.device.type == "cpu":
        out = torch.empty(len(keys), count, valid.shape[1], dtype=torch.int32)
        kernels.permute_often(*_arrays(keys, valid), out.numpy())
        return out
    turn = torch.arange(1, count + 1, device=keys.device)
    streams = mix(keys[:, None] + turn * GOLDEN).flatten()
    return _shuffled.cohort(streams, valid.repeat_interleave(count, 0)).to(torch.int32).reshape(len(keys), count, -1)


def shuffles(rng: Rng, valid: Tensor, count: int) -> Tensor:
    """(count, L) orders as `shuffled` gives them, drawn together, in 32 bits: a round may have very many.

    >>> orders = shuffles(Rng.of(0), torch.tensor([True, False, True, True]), 5)
    >>> orders[:, 3].tolist(), orders.sort().values.unique(dim=0).tolist(), len(orders.unique(dim=0)) > 1
    ([1, 1, 1, 1, 1], [[0, 1, 2, 3]], True)
    """
    return _shuffles(rng.next_key(), valid, count)


@for_cohort
def _touched(items: Tensor, valid: Tensor, n_items: int) -> Tensors:
    rows, width = items.shape
    room = min(width, n_items)
    if items.device.type == "cpu":
        index = torch.empty(rows, room, dtype=torch.int64)
        slot = torch.empty(rows, width, dtype=torch.int64)
        kernels.touch(*_arrays(items, valid), n_items, index.numpy(), slot.numpy())
        return index, slot
    padded = torch.where(valid, items, n_items)
    ordered, origin = padded.sort(dim=1)
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    place = new.cumsum(1) - 1
    slot = torch.empty_like(padded).scatter_(1, origin, place)
    index = torch.full((rows, width + 1), -1, dtype=torch.int64, device=items.device)
    index.scatter_(1, torch.where(ordered < n_items, place, width), ordered)
    return index[:, :room].contiguous(), torch.where(valid, slot, 0)


def touched(items: Tensor, valid: Tensor, n_items: int) -> tuple[Tensor, Tensor]:
    """The distinct items in ascending order (-1 pads), and where among them each position's item stands.

    >>> touched(torch.tensor([5, 2, 5]), torch.tensor([True, True, True]), n_items=9)
    (tensor([ 2,  5, -1]), tensor([1, 0, 1]))
    """
    return _touched(items, valid, n_items)


@for_cohort
def _overlay(base: Tensor, items: Tensor, index: Tensor, over: Tensor, n_items: int, add: bool) -> Tensor:
    if base.device.type == "cpu":
        out = torch.empty(items.shape, dtype=base.dtype)
        given = (base.contiguous().numpy(), items.numpy(), index.numpy(), over.numpy())
        kernels.lay_over(*given, n_items, add, out.numpy())
        return out
    where = torch.full((len(index), n_items + 1), -1, dtype=torch.int64, device=base.device)
    place = torch.arange(index.shape[1], device=base.device).expand_as(index)
    where.scatter_(1, torch.where(index < 0, n_items, index), place)
    slot = where.gather(1, items)
    value = over.gather(1, slot.clamp(min=0))
    return torch.where(slot >= 0, base + value if add else value, base)


def overlay(base: Tensor, items: Tensor, index: Tensor, over: Tensor, n_items: int, *, add: bool = False) -> Tensor:
    """`base`, one number for each of `items`, with `over` in place of those that are in `index`; add: added to them.

    >>> over = torch.tensor([5.0, 6.0])
    >>> overlay(torch.ones(3), torch.tensor([7, 8, 9]), torch.tensor([8, -1]), over, 10)
    tensor([1., 5., 1.])
    >>> overlay(torch.ones(3), torch.tensor([7, 8, 9]), torch.tensor([8, -1]), over, 10, add=True)
    tensor([1., 6., 1.])
    """
    return _overlay(base, items, index, over, n_items, add) if index.shape[-1] else base


@for_cohort
def _labelled(
    draw: Tensor, order: Tensor, items: Tensor, valid: Tensor, excluded: Tensor, n_items: int, per_item: int
) -> Tensors:
    rows, length = items.shape
    if items.device.type == "cpu":
        out = torch.empty(rows, length * (1 + per_item), dtype=torch.int64)
        labels, real = torch.empty_like(out, dtype=torch.float32), torch.empty_like(out, dtype=torch.bool)
        kernels.label(
            *_arrays(draw, order, items, valid, excluded), n_items, per_item, out.numpy(), labels.numpy(), real.numpy()
        )
        return out, labels, real
    drawn = _negatives.cohort(draw, excluded, n_items, length * per_item).view(rows, length, per_item)
    # Each item stands before its negatives: a position must not depend on how long the padding is.
    out = torch.cat([items[:, :, None], drawn], dim=2).flatten(1)
    real = (valid[:, :, None] & (torch.cat([items[:, :, None], drawn], dim=2) >= 0)).flatten(1)
    labels = (torch.arange(out.shape[1], device=out.device) % (1 + per_item) == 0).float().expand_as(out)
    place = _shuffled.cohort(order, real)
    real = real.gather(1, place)
    return torch.where(real, out.gather(1, place), 0), torch.where(real, labels.gather(1, place), 0), real


def labelled(rng: Rng, data: Data, per_item: int) -> tuple[Tensor, Tensor, Tensor]:
    """A client's items (label 1) and `per_item` fresh negatives for each (label 0), shuffled.

    Gives items, labels and which positions are real, each of length L × (1 + per_item), the real ones first.
    """
    draw, order = rng.next_key(), rng.next_key()
    return _labelled(draw, order, data.items, data.valid, data.excluded, data.catalogue.n_items, per_item)


@for_cohort
def _take_rows(rows: Tensor, slot: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        out = rows.new_empty(*slot.shape, rows.shape[2])
        kernels.take_rows(_words(rows), *_arrays(slot), _words(out))
        return out
    return rows.gather(1, slot[:, :, None].expand(-1, -1, rows.shape[2]))


def take_rows(rows: Tensor, slot: Tensor) -> Tensor:
    """`rows[slot]`, for which vmap knows only a slow way; no gradient passes through it.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1, 0])).tolist()
    [[2.0], [2.0], [1.0]]
    """
    return _take_rows(rows, slot)


@for_cohort
def _add_rows(rows: Tensor, slot: Tensor, value: Tensor, scale: float) -> Tensor:
    out = rows.clone(memory_format=torch.contiguous_format)
    if rows.device.type == "cpu":
        kernels.add_rows(*_arrays(slot, value), single(scale), out.numpy())
        return out
    place = slot + torch.arange(len(slot), device=slot.device)[:, None] * rows.shape[1]
    with repeatable():
        out.flatten(0, 1).index_add_(0, place.flatten(), value.flatten(0, 1), alpha=scale)
    return out


def add_rows(rows: Tensor, slot: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    """`rows.index_add(0, slot, value, alpha=scale)`, which vmap would take one client at a time.

    >>> add_rows(torch.zeros(2, 1), torch.tensor([1, 1]), torch.tensor([[2.0], [3.0]]), scale=-1.0).tolist()
    [[0.0], [-5.0]]
    """
    return _add_rows(rows, slot, value, scale)


def _compiled(value: Tensor) -> bool:
    return value.device.type == "cpu" and value.dtype in (torch.float32, torch.float64)


@for_cohort
def _coalesced(index: Tensor, value: Tensor, size: int) -> Tensors:
    if _compiled(value) and kernels.in_order(*_arrays(index, value)):
        return index.view_as(index), value.view_as(value)
    rows = torch.func.vmap(lambda at, of: Rows(at, of, size).coalesced())(index, value)
    return rows.index, rows.value


def coalesced(rows: Rows) -> Rows:
    """`rows.coalesced()`, which costs nothing where a whole cohort's rows are so already.

    >>> coalesced(Rows(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [5.0], [2.0]]), size=3)).index.tolist()
    [0, 2, -1]
    """
    if not rows.index.shape[0]:
        return rows
    index, value = _coalesced(rows.index, rows.value.reshape(len(rows.index), -1), rows.size)
    return Rows(index, value.reshape(rows.value.shape), rows.size)


@for_cohort
def _power(value: Tensor, order: int) -> Tensor:
    if _compiled(value):
        out = torch.empty(len(value), dtype=torch.float64)
        kernels.power(*_arrays(value), order, out.numpy())
        return out
    wide = value.to(torch.float64)
    return (wide.abs() if order == 1 else wide * wide).sum(1)


def power(value: Tensor, order: int) -> Tensor:
    """The sum of |x| or of x² over a tensor, in 64 bits, where the square of any 32-bit number is finite.

    >>> power(torch.tensor([3.0, -4.0]), 1).item(), power(torch.tensor([3.0, -4.0]), 2).item()
    (7.0, 25.0)
    """
    return _power(value.flatten(), order)


@for_cohort
def _scaled(value: Tensor, factor: Tensor) -> Tensor:
    out = torch.empty(value.shape, dtype=torch.promote_types(value.dtype, torch.float32), device=value.device)
    if _compiled(value):
        kernels.scale(*_arrays(value, factor), out.numpy())
        return out
    times = factor[:, None]
    return torch.where(times != 0, value.to(torch.float64) * times, 0).to(out.dtype)


def scaled(value: Tensor, factor: Tensor) -> Tensor:
    """A tensor times a 64-bit number, rounded once at the end: a tiny factor has few digits left in 32 bits.

    A factor of 0 gives zeros, whatever was not finite before.

    >>> scaled(torch.tensor([3.0, torch.inf]), torch.tensor(0.0, dtype=torch.float64)).tolist()
    [0.0, 0.0]
    """
    return _scaled(value.flatten(), factor).reshape(value.shape)


@for_cohort
def _weighted_rows(*parts: Tensor) -> Tensors:
    """Of (index, value, factor) of each summand: the rows of their weighted sum."""
    indices, values, factors = parts[::3], parts[1::3], parts[2::3]
    same = all(index.shape == indices[0].shape and torch.equal(index, indices[0]) for index in indices[1:])
    total = _scaled.cohort(values[0].flatten(1), factors[0])
    if not same:
        others = (_scaled.cohort(value.flatten(1), by) for value, by in zip(values[1:], factors[1:], strict=True))
        flat = [part.reshape(value.shape) for part, value in zip((total, *others), values, strict=True)]
        return torch.cat(indices, 1), torch.cat(flat, 1)
    for value, factor in zip(values[1:], factors[1:], strict=True):
        if _compiled(value) and total.dtype == value.dtype:
            kernels.add_scaled(value.flatten(1).numpy(), factor.numpy(), total.numpy())
        else:
            total = total + _scaled.cohort(value.flatten(1), factor)
    return indices[0].clone(), total.reshape(values[0].shape)


def weighted_rows(rows: Sequence[Rows], factors: Sequence[Tensor]) -> Rows:
    """The sum of rows of one table, each times its 64-bit factor; cheap if all have the same indices.

    >>> half, one = torch.tensor([0.5, 1.0], dtype=torch.float64)
    >>> table = weighted_rows([Rows(torch.tensor([2]), torch.ones(1, 1), 3)] * 2, [half, one])
    >>> table.index.tolist(), table.value.tolist()
    ([2], [[1.5]])
    """
    given = [part for row, by in zip(rows, factors, strict=True) for part in (row.index, row.value.flatten(1), by)]
    index, value = _weighted_rows(*given)
    return Rows(index, value.reshape(len(index), *rows[0].value.shape[1:]), rows[0].size)


def minibatches(size: int, *columns: Tensor) -> Iterator[Tensors]:
    """Consecutive slices of columns of equal length.

    >>> [part[0].tolist() for part in minibatches(2, torch.arange(3))]
    [[0, 1], [2]]
    """
    for start in range(0, len(columns[0]), size):
        yield tuple(column[start : start + size] for column in columns)


def integers_of_many(rng: Rng, high: int, count: int) -> Tensor:
    """What `rng.integers(high, count)` gives each of many streams: (streams, count).

    >>> streams = Rng.of(1).fold(torch.arange(3))
    >>> torch.equal(integers_of_many(streams, 50, 4)[2], Rng.of(1).fold(2).integers(50, 4))
    True
    """
    keys = rng.next_key()
    if keys.device.type != "cpu":
        places = torch.arange(1, count + 1, device=keys.device) * GOLDEN
        return (((mix(keys[:, None] + places) >> 32) & 0xFFFFFFFF) * high) >> 32
    out = torch.empty(len(keys), count, dtype=torch.int64)
    kernels.integers(keys.numpy(), high, out.numpy())
    return out


def grid(chance: Tensor) -> Tensor:
    """How many of 2⁵² equally likely numbers say yes with this chance: never none, and never all, whatever ε is."""
    return (chance * 2.0**52).clamp(2.0, 2.0**52 - 2.0)


def tosses_of_many(rng: Rng, value: Tensor, bias: float) -> Tensor:
    """One coin for each value (streams, count) in [−1, 1], that says yes with probability ½ + ½ · bias · value."""
    keys = rng.next_key()
    if keys.device.type != "cpu":
        places = torch.arange(1, value.shape[1] + 1, device=keys.device) * GOLDEN
        drawn = ((mix(keys[:, None] + places) >> 12) & (2**52 - 1)).to(torch.float64)
        return drawn < grid(0.5 + 0.5 * bias * value.to(torch.float64))
    out = torch.empty(value.shape, dtype=torch.bool)
    kernels.toss(keys.numpy(), value.contiguous().numpy(), bias, out.numpy())
    return out


def scatter_sum(index: Tensor, value: Tensor, table: Tensor) -> None:
    """Add the rows `value` (n, …) to `table` (size, …) in place; rows of index -1 are dropped.

    The order of additions is fixed, so the sum does not vary from run to run.
    """
    width = math.prod(table.shape[1:])
    if value.dtype not in (table.dtype, torch.int32) or table.device.type != "cpu":
        value = value.to(table.dtype)  # compiled code adds 32-bit whole numbers to any
    flat_value, flat_table = value.reshape(len(index), width), table.view(len(table), width)
    if table.device.type == "cpu":
        kernels.scatter_sum(index.numpy(), flat_value.numpy(), flat_table.numpy())
        return
    keep = (index >= 0).unsqueeze(1)
    with repeatable():
        flat_table.index_add_(0, index.clamp(min=0), torch.where(keep, flat_value, 0))


@contextmanager
def repeatable() -> Iterator[None]:
    """A GPU adds in any order unless told otherwise, and a sum would differ from run to run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def logistic(logit: Tensor, label: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The logistic loss over the real samples: the gradient of its mean at each logit, and its sum.

    >>> slope, loss = logistic(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0]), torch.tensor([True, True, False]))
    >>> slope.tolist(), round(loss.item(), 4)
    ([-0.25, 0.25, 0.0], 1.3863)
    """
    slope = (torch.sigmoid(logit) - label) / valid.sum().clamp(min=1)
    loss = softplus(logit) - label * logit
    return torch.where(valid, slope, 0.0), torch.where(valid, loss, 0.0).sum()


def slopes(logit: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the mean loss in each of the logit's arguments, then the sum of the losses.

    The last two of what is given are labels and which samples are real.

    >>> label, valid = torch.tensor([1.0, 1.0]), torch.tensor([True, True])
    >>> of_weight, of_rows, loss = slopes(lambda w, rows: rows @ w, torch.ones(1), torch.zeros(2, 1), label, valid)
    >>> of_weight.abs().tolist(), of_rows.tolist(), round(loss.item(), 4)
    ([0.0], [[-0.25], [-0.25]], 1.3863)
    """
    *arguments, label, valid = given

    def loss(*at: Tensor) -> Tensor:
        value = logit(*at)
        return torch.where(valid, softplus(value) - label * value, 0.0).sum()

    slopes, total = grad_and_value(loss, argnums=tuple(range(len(arguments))))(*arguments)
    count = valid.sum().clamp(min=1)
    return (*(slope / count for slope in slopes), total)

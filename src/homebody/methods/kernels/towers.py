"""FL-MV-DSSM for many clients at once, as stacked products.

All views of a client work on the same samples with the same item tower: its layers are computed once for all views,
and only the way back is each view's own. Arrays have the clients first: C clients, S samples each, of which the first
of every 1 + negatives is the positive; G rows of the item tower's first layer that a client touches, D its width; K
features of an item.
"""

from __future__ import annotations

import torch
from torch import Tensor

from homebody.core import Batch, Rows, Tree, Update
from homebody.kernels import spread_rows
from homebody.methods.fl_mv_dssm import FLMVDSSM, views_of
from homebody.methods.kernels import Kernel, arrays
from homebody.models.towers import TINY, Tower
from homebody.parallel import parallel

__all__ = ["FL_MV_DSSM"]


def train(method: FLMVDSSM, shared: Tree, locals_: Tree, batches: Batch) -> tuple[Update, Tree]:
    """As `FLMVDSSM.client` under vmap."""
    tower, real = method.tower, batches["real"]
    index, place, weight = batches["index"], batches["place"], batches["weight"]
    most = max(1, int((index >= 0).sum(1).max()))  # of the rows that there is room for, most are padding
    index = index[:, :most].contiguous()
    table = shared["item/first"]
    first_of_items = table.new_empty(*place.shape[:2], table.shape[1])
    _sum(*arrays(table, index, place, weight, first_of_items))
    item_parts = tower.parts(shared["item/layers"])
    seen = _through(item_parts, first_of_items)
    count = real[:, :, 0].sum(1).clamp(min=1)
    per = count if method.weighting == "clients" else torch.full_like(count, method.batch_size or 1)
    update: Update = {}
    kept: Tree = {}
    losses = []
    for name in views_of(shared):
        given = batches[f"{name}/input"]  # (C, inputs)
        where = shared if method.aggregate_users else locals_
        first, layers = where[f"{name}/user/first"], where[f"{name}/user/layers"]
        user_parts = _stacked(tower, layers if layers.dim() > 1 else layers[None])
        person = _through(user_parts, given[:, None] @ first)  # (C, 1, widths)
        loss, of_person, of_items = _loss(method.gamma, person[-1], seen[-1], real)
        share = (given != 0).any(1).float() / per
        of_person, of_items = (one * share[:, None, None] for one in (of_person, of_items))
        item_layers, of_first = _back(item_parts, seen, of_items)
        user_layers, of_user = _back(user_parts, person, of_person)
        rows = table.new_zeros(*index.shape, table.shape[1])
        spread_rows(*arrays(place, weight, torch.zeros_like(place[:, 0]), of_first[:, :, None], rows))
        gradient = {
            "item/first": Rows(index, rows, len(table)),
            "item/layers": item_layers,
            "user/first": given[:, :, None] * of_user,
            "user/layers": user_layers,
        }
        losses.append(loss / count)
        if not method.aggregate_users:
            kept |= method.stepped(name, locals_, gradient)
        update |= {f"{name}/{part}": one for part, one in gradient.items() if method.leaves(part)}
    return update, {**kept, "loss": torch.stack(losses).mean(0)}


@parallel(over="place")
def _sum(lower, upper, table, index, place, weight, sums):
    """The sums (C, S, D) of an item's rows, read from the table (R, D) that all clients have in common."""
    for client in range(lower, upper):
        for sample in range(place.shape[1]):
            target = sums[client, sample]
            target[:] = 0
            for k in range(place.shape[2]):
                w = weight[client, sample, k]
                if w != 0:
                    source = table[index[client, place[client, sample, k]]]
                    for column in range(len(target)):
                        target[column] += w * source[column]


def _through(parts: list[Tensor], first: Tensor) -> list[Tensor]:
    """What each layer gives, from the first (C, N, D) on."""
    seen = [first]
    for weight, offset in zip(parts[::2], parts[1::2], strict=True):
        seen.append((seen[-1] @ weight + offset).tanh())
    return seen


def _back(parts: list[Tensor], seen: list[Tensor], slope: Tensor) -> tuple[Tensor, Tensor]:
    """From the slopes (C, N, last width) of the output: those of the layers, flat (C, size), and of the first."""
    found: list[Tensor] = []
    for weight, low, high in zip(parts[-2::-2], seen[-2::-1], seen[:0:-1], strict=True):
        slope = slope * (1 - high * high)
        found = [(low.mT @ slope).flatten(1), slope.sum(1), *found]
        slope = slope @ weight.mT
    return torch.cat(found, 1), slope


def _loss(gamma: float, person: Tensor, items: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the samples' losses (C,), and its slopes in the person's vector (C, 1, K) and the items' (C, S, K)."""
    clients, batch, drawn = real.shape
    lengths = [(one * one).sum(-1, keepdim=True) for one in (person, items)]
    inverse = [
        one.clamp(min=TINY).rsqrt() for one in lengths
    ]  # of the lengths of the person (C, 1, 1), items (C, S, 1)
    cosine = (items @ person.mT) * inverse[0] * inverse[1]
    fit = gamma * cosine.view(clients, batch, drawn)
    positive = torch.arange(drawn, device=real.device) == 0
    fit = torch.where(real | positive, fit, -torch.inf)
    sample = real[:, :, :1]
    loss = torch.where(sample[:, :, 0], fit.logsumexp(2) - fit[:, :, 0], 0.0).sum(1)
    slope = torch.where(sample & (real | positive), gamma * (fit.softmax(2) - positive.float()), 0.0).view(
        clients, -1, 1
    )
    # The cosine is constant in the length of a vector, unless it is too short to be told from 0.
    along = [torch.where(one > TINY, back * back, 0.0) for one, back in zip(lengths, inverse, strict=True)]
    straight, turned = slope * inverse[0] * inverse[1], slope * cosine
    of_items = straight * person - turned * along[1] * items
    of_person = straight.mT @ items - turned.sum(1, keepdim=True) * along[0] * person
    return loss, of_person, of_items


def _stacked(tower: Tower, layers: Tensor) -> list[Tensor]:
    """Each client's own layers, or those of all as of one; with offsets as (C, 1, width)."""
    parts = torch.func.vmap(tower.parts)(layers)
    return [part if part.dim() > 2 else part[:, None] for part in parts]


FL_MV_DSSM = Kernel(train, mixed=lambda method: method.batch_size > 0)

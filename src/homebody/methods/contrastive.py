"""The first stage of DP-PrivRec (Wang et al., VLDB Journal 2021, §2.4): item vectors from the order of items.

| paper                                       | here                                                                |
|---------------------------------------------|---------------------------------------------------------------------|
| X, T consecutive items                      | a window of `window` items of a person's history, `windows` a step  |
| X̂_i, an item masked by a negative one       | `view["sequence"][:, 0]`, `view["item"]`: v_i, then the negatives   |
| X̄_i:j, a segment masked by a negative one   | `view["sequence"][:, 1]`, `view["segment"]`: v_i:j, then negatives  |
| f_Σ, a GRU's last state                     | `shared["gru"]`, on rows of `shared["item"]`                        |
| f_Ψ, a feed-forward network                 | `shared["encoder"]`, on rows of `shared["item"]`                    |
| λ_IM, λ_SM                                  | `item_weight`, `segment_weight`                                     |

Eqs. 8 and 9 lack their minus sign, and their sums the positive: here each loss is the cross-entropy of the positive
among itself and the negatives. What masks is the first of the negatives. Items come from the catalogue, as far as the
person does not have them; segments from elsewhere in the same history, or from the catalogue where that is too short.
Nothing ever comes from other people. Devices take `steps` of SGD, and the server steps towards the mean of their ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from homebody import ops
from homebody.core import CALL, About, Batch, Catalogue, Data, Rows, Stateless, Total, Tree, Update, Work, param
from homebody.models.networks import GRU, FeedForward
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["Contrastive"]

NEVER = -1e9
"""The score of padding: finite, so that gradients are finite."""
VIEWS = ("sequence", "item", "segment")


@dataclass(frozen=True)
class Contrastive(Stateless):
    """Item vectors that distinguish a masked item, or a masked segment, from others by its context."""

    uplink: Channel = Channel()
    factors: int = param(64, "size of an item's vector, and of a sequence's", low=1, search=(16, 32, 64))
    learning_rate: float = param(0.1, "learning rate on the device", low=0, search=Range(0.01, 1, log=True))
    meta_rate: float = param(1.0, "the server's step towards the mean", low=0, search=Range(0.1, 2, log=True))
    steps: int = param(20, "steps of SGD on a device in a round", low=1)
    windows: int = param(4, "windows of the history in a step", low=1)
    window: int = param(10, "T, items in a window", low=2)
    segment: int = param(3, "items in a masked segment, at most half of the window", low=1)
    item_negatives: int = param(10, "negatives for a masked item", low=1)
    segment_negatives: int = param(5, "negatives for a masked segment", low=1)
    item_weight: float = param(1.0, "λ_IM, of the masked item's loss", low=0)
    segment_weight: float = param(1.0, "λ_SM, of the masked segment's loss", low=0)
    init_scale: float = param(0.1, "standard deviation of the initial rows", low=0, search=Range(0.01, 1, log=True))

    about: ClassVar[About] = About(
        title="item vectors from the order of items: the first stage of dp-privrec",
        paper="Wang et al., Fast-adapting and Privacy-preserving Federated Recommender System, VLDBJ 2021",
    )

    @property
    def gru(self) -> GRU:
        return GRU(self.factors, self.factors)

    @property
    def encoder(self) -> FeedForward:
        return FeedForward(self.factors, self.factors)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        item = self.init_scale * rng.fold("item").normal(catalogue.n_items, self.factors)
        return {"item": item, **self.init_encoders(rng)}

    def init_encoders(self, rng: Rng) -> Tree:
        """The initial weights of the encoders Σ and Ψ."""
        return {"gru": self.gru.start(rng.fold("gru")), "encoder": self.encoder.start(rng.fold("encoder"))}

    def shared_numbers(self, catalogue: Catalogue) -> int:
        return catalogue.n_items * self.factors + self.encoder_numbers

    @property
    def encoder_numbers(self) -> int:
        return self.gru.size + self.encoder.size

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        F, numbers, listed = self.factors, self.shared_numbers(catalogue), self.listed
        rows = min(self.steps * listed, catalogue.n_items)
        held = 6 * numbers + 12 * rows * F + 24 * longest + 8 * catalogue.n_items * F
        operations = catalogue.n_items * 8 * F * F
        return self.sequence_work(self.steps) + Work.of(held, operations, calls=400, sent=numbers + 2 * rows)

    @property
    def listed(self) -> int:
        """How many items the views of one step list."""
        segments = (1 + self.segment_negatives) * self.segment
        return self.windows * (2 * self.window + 1 + self.item_negatives + segments)

    def sequence_work(self, steps: int) -> Work:
        """The work of drawing the views of so many steps and of taking the steps, without the items' rows."""
        F, listed, encoders = self.factors, self.listed, self.encoder_numbers
        calls = 100 * (self.window + self.segment) + 400  # on tensors, in one step
        return Work(
            memory=4 * (24 * steps * listed + listed * (80 * F + 40) + 24 * encoders),
            operations=steps * (listed * 100 * F * (F + 4) + 10 * encoders + calls * CALL),
        )

    def prepare(self, data: Data, rng: Rng) -> Batch:
        views = self.views(data, rng, self.steps)
        listed = torch.cat([ids.flatten() for ids in views.values()])
        index, slot = ops.touched(listed.clamp(min=0), listed >= 0, data.catalogue.n_items)
        return {"index": index, **_apart(torch.where(listed >= 0, slot, -1), views)}

    def asks(self, batch: Batch) -> dict[str, Tensor]:
        return {"item": batch["index"]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        begun = {**shared, "item": ops.take_rows(shared["item"], batch["index"].clamp(min=0))}
        mine, loss = begun, torch.zeros_like(shared["gru"][0])
        for number in range(self.steps):
            mine, loss = self.step(mine, {name: batch[name][number] for name in VIEWS}, self.learning_rate)
        change = {name: mine[name] - begun[name] for name in begun}
        return {**change, "item": Rows(batch["index"], change["item"], len(shared["item"]))}, {"loss": loss}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        mean = total.mean
        return {name: value + self.meta_rate * mean[name] for name, value in shared.items()}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        """How well an item fits the latest window. The phase is trained for its vectors, not for these scores."""
        held, place = data.valid.sum(), torch.arange(self.window, device=data.items.device)
        latest = _at(data, (held - self.window).clamp(min=0) + place, place < held)
        rows = shared["item"][latest.clamp(min=0)]
        person = self.gru.last(shared["gru"], rows, latest >= 0)
        return self.encoder.encode(shared["encoder"], shared["item"][items]) @ person

    def views(self, data: Data, rng: Rng, steps: int) -> Batch:
        """For each step and window the two masked sequences and their candidates, the true one first.

        Items by their numbers; -1 where there is nothing, and everywhere in the window of a person with one item.
        """
        shape, device = (steps, self.windows), data.items.device
        place, inside = torch.arange(self.window, device=device), torch.arange(self.segment, device=device)
        held = data.valid.sum()
        length = held.clamp(max=self.window)
        start = _below(rng.uniform(*shape), held - length + 1)
        window = _at(data, start[..., None] + place, place < length)

        masked = _below(rng.uniform(*shape), length)[..., None]
        strangers = _drawn(rng, data, *shape, self.item_negatives)
        without_item = torch.where(place == masked, strangers[..., :1], window)
        item = torch.cat([window.gather(-1, masked), strangers], -1)

        span = (length // 2).clamp(1, self.segment)
        first = _below(rng.uniform(*shape), length - span + 1)[..., None]
        begin = start[..., None] + first
        true = _at(data, begin + inside, inside < span)
        # Elsewhere in the history, before it or behind it, without a common place.
        before, behind = (begin - span + 1).clamp(min=0), (held - begin - 2 * span + 1).clamp(min=0)
        chosen = _below(rng.uniform(*shape, self.segment_negatives), before + behind)
        other = torch.where(chosen < before, chosen, begin + span + chosen - before)
        elsewhere = _at(data, other[..., None] + inside, inside < span)
        invented = _drawn(rng, data, *shape, self.segment_negatives, self.segment)
        false = torch.where((before + behind > 0)[..., None], elsewhere, torch.where(inside < span, invented, -1))
        offset = place - first
        filling = false[..., 0, :].gather(-1, offset.clamp(0, self.segment - 1))
        without_segment = torch.where((offset >= 0) & (offset < span), filling, window)

        sequence = torch.stack([without_item, without_segment], -2)
        segment = torch.cat([true[..., None, :], false], -2)
        views = dict(zip(VIEWS, (sequence, item, segment), strict=True))
        return {name: torch.where(held > 1, ids, -1) for name, ids in views.items()}

    def step(self, mine: Tree, view: Batch, rate: float) -> tuple[Tree, Tensor]:
        """One step of SGD on L_SSL over a step's windows, and their mean loss; `view` by rows of `mine["item"]`."""
        slot = torch.cat([view[name].flatten() for name in VIEWS]).clamp(min=0)
        count = (view["item"][:, 0] >= 0).sum().clamp(min=1)

        def loss(gru: Tensor, encoder: Tensor, rows: Tensor) -> Tensor:
            return self.loss(gru, encoder, _apart(rows, view), view).sum() / count

        wrt = (mine["gru"], mine["encoder"], ops.take_rows(mine["item"], slot))
        slopes, value = grad_and_value(loss, argnums=(0, 1, 2))(*wrt)
        stepped = {"gru": mine["gru"] - rate * slopes[0], "encoder": mine["encoder"] - rate * slopes[1]}
        return {**mine, **stepped, "item": ops.add_rows(mine["item"], slot, slopes[2], -rate)}, value

    def loss(self, gru: Tensor, encoder: Tensor, rows: Tree, view: Batch) -> Tensor:
        """λ_IM L_IM + λ_SM L_SM of each window; `rows` are the vectors of what `view` lists."""
        state = self.gru.last(gru, rows["sequence"], view["sequence"] >= 0)
        items = self.encoder.encode(encoder, rows["item"])
        segments = self.gru.last(gru, rows["segment"], view["segment"] >= 0)
        by_item = _among((items @ state[:, 0, :, None]).squeeze(-1), view["item"] >= 0)
        by_segment = _among((segments @ state[:, 1, :, None]).squeeze(-1), view["segment"][..., 0] >= 0)
        both = self.item_weight * by_item + self.segment_weight * by_segment
        return torch.where(view["item"][:, 0] >= 0, both, 0.0)


def _apart(joined: Tensor, view: Batch) -> Tree:
    """Split what was concatenated over all views, and restore each view's shape."""
    ends = list(accumulate(view[name].numel() for name in VIEWS))[:-1]
    parts = zip(VIEWS, joined.tensor_split(ends), strict=True)
    return {name: part.reshape(*view[name].shape, *joined.shape[1:]) for name, part in parts}


def _among(score: Tensor, real: Tensor) -> Tensor:
    """The cross-entropy of the first candidate among all that are not padding."""
    score = torch.where(real, score, NEVER)
    return score.logsumexp(-1) - score[..., 0]


def _below(uniform: Tensor, count: Tensor) -> Tensor:
    """Integers from 0 to count - 1, and 0 where count is 0."""
    return torch.minimum((uniform * count).long(), count - 1).clamp(min=0)


def _at(data: Data, place: Tensor, real: Tensor) -> Tensor:
    """The items at these positions of the history; -1 outside it."""
    items = torch.cat([data.items, data.items.new_zeros(1)])  # a history may be empty
    picked = ops.take_rows(items[:, None], place.clamp(max=len(data.items)).flatten()).reshape(place.shape)
    return torch.where(real, picked, -1)


def _drawn(rng: Rng, data: Data, *shape: int) -> Tensor:
    """Random items that this person does not have; -1 if they have all."""
    return ops.negatives(rng, data, torch.Size(shape).numel()).reshape(shape)

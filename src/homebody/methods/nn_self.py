"""NN-SELF: Federated Meta-Learning with Fast Convergence and Efficient Communication (Chen et al., 2018), by MAML, with
the network of PrivRec, whose authors compare with it.

| paper                                    | here                                                                   |
|------------------------------------------|------------------------------------------------------------------------|
| D_S^u, D_Q^u                             | `support`, the share of a device's interactions, drawn each round      |
| θ_u ← θ − α ∇L_{D_S^u}(θ)                | `epochs` passes over the support set, `learning_rate`                  |
| g_u ← ∇_θ L_{D_Q^u}(θ_u)                 | the update, with its sign turned; `first_order`                        |
| θ ← θ − β/m Σ g_u                        | `meta_rate`                                                            |

The gradient of the query loss goes back through the inner steps to where they began: second derivatives of the support
loss, unless `first_order` takes the steps as given. All of them are held in memory until then, so there are few, and
each is of all the support set (`batch_size=0`). A device with a single interaction has nothing to ask itself about: it
sends zeros. Before it ranks, a device takes such steps on all it has, `adapt_epochs` of `adapt_rate`.

FOFL-SELF, with which PrivRec's authors compare too, is REPTILE on item ids: PrivRec without any features. Its paper is
A Simple and Efficient Federated Recommender System (Jalalirad, Scavuzzo, Capota and Sprague, BDCAT 2019).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value
from torch.nn.functional import softplus

from homebody import ops
from homebody.core import CALL, About, Batch, Catalogue, Data, Rows, Tree, Update, Work, param
from homebody.methods.privrec import PrivRec
from homebody.models.dssm import PARTS, Described, Vocabulary, vectors
from homebody.rng import Rng
from homebody.settings import Range, proper_share

__all__ = ["FOFLSelf", "NNSelf"]

NUMBERS_A_UNIT = 8
"""Numbers held for one unit and one sample of a step, roughly, until it is differentiated twice."""


@dataclass(frozen=True)
class NNSelf(PrivRec):
    """A network on features, and a start from which a few steps on one part of the data fit the other (MAML).

    >>> import homebody as hb
    >>> model = hb.fit(hb.NNSelf(factors=4, hidden="4"), "synthetic:users=50,items=30,mean=6", rounds=1, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    support: float = param(
        0.5, "share of a device's interactions that the inner steps take in", low=0, high=1, check=proper_share
    )
    first_order: bool = param(False, "take the inner steps as given, without their derivatives (FOMAML)")
    epochs: int = param(5, "inner steps: passes over the support set in a round", low=1, search=Range(1, 10))
    batch_size: int = param(0, "interactions in a step, each with its negatives; 0: all in one step", low=0)
    meta_rate: float = param(1.0, "β, the server's step down the mean gradient", low=0, search=Range(0.1, 10, log=True))

    about: ClassVar[About] = replace(
        PrivRec.about,
        title="PrivRec's network, and a common start by second-order meta-learning (MAML)",
        paper="Chen et al., Federated Meta-Learning with Fast Convergence and Efficient Communication, 2018",
    )

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        """Every inner step is held until the last is differentiated."""
        known = Vocabulary.of(catalogue, self.features)
        network = self.network_for(known)
        samples, size = longest * self.per_item, self.batch_size or longest
        steps = 1 + self.epochs * -(-longest // max(1, size))
        units = sum(network.widths) + self.factors * (1 + known.values)
        rows = min((1 + self.epochs) * samples, catalogue.n_items)
        parameters = network.size + known.size * self.factors + rows * self.factors
        held = (1 + self.epochs) * samples * (NUMBERS_A_UNIT * units + 64) + 8 * steps * parameters
        operations = (1 + self.epochs) * samples * 80 * (network.size + units)
        operations += steps * (20 * parameters + (1000 + 400 * len(network.widths)) * CALL)
        sent = Work(bytes=8 * rows)
        return super().work(catalogue, longest) + Work(memory=4 * held, operations=operations) + sent

    def prepare(self, data: Data, rng: Rng) -> Batch:
        batch, length = super().prepare(data, rng), len(data.items)
        among, count = ops.shuffled(rng, data.valid), data.valid.sum()
        most = int(self._supporting(torch.tensor(length)))
        first, room = self._supporting(count), min(length, max(1, most))
        inside = torch.arange(room, device=among.device) < first
        behind = first + torch.arange(min(length, max(1, length - most)), device=among.device)
        return batch | {
            "support/place": among[:room],
            "support/valid": inside,
            "support/order": torch.stack([ops.shuffled(rng, inside) for _ in range(self.epochs)]),
            "query/place": take(among, behind.clamp(max=max(0, length - 1))),
            "query/valid": (behind < count) & (count > 1),
            "query/negative": ops.negatives(rng, data, length * self.negatives).reshape(length, self.negatives),
        }

    def _supporting(self, count: Tensor) -> Tensor:
        """The size of the support set out of `count` interactions: at least 1 and at most count - 1, if count > 1."""
        share = (count.double() * self.support + 1e-9).long()
        return share.clamp(min=1).minimum(count - 1).clamp(min=0)

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        n_items = len(shared["item"])
        support = self._part(batch, "support", batch["negative"][:, : self.epochs].flatten(1))
        query = self._part(batch, "query", batch["query/negative"])
        items, real = (
            torch.cat([getattr(part, name).flatten() for part in (support, query)]) for name in ("item", "real")
        )
        index, slot = ops.touched(items, real, n_items)
        cut = support.item.numel()
        support, query = support.with_slots(slot[:cut]), query.with_slots(slot[cut:])
        start = {**shared, "item": ops.take_rows(shared["item"], index.clamp(min=0))}

        def asked(tree: Tree) -> Tensor:
            return self._loss(self._inner(tree, batch, support), batch, query.of(0))

        slopes, loss = grad_and_value(asked)(start)
        update: Update = {name: -slope for name, slope in slopes.items()}
        return update | {"item": Rows(index, update["item"], n_items)}, {"loss": loss}

    def _part(self, batch: Batch, part: str, drawn: Tensor) -> Samples:
        """The interactions of the support or query set, with the negatives of each pass."""
        place, valid = batch[f"{part}/place"], batch[f"{part}/valid"]
        positive = take(batch["item"], place)[:, None, None]
        drawn = ops.take_rows(drawn, place).reshape(len(place), -1, self.negatives)
        positive = positive.expand(-1, drawn.shape[1], -1)
        item = torch.cat([positive, drawn], -1) if self.output == "implicit" else positive
        real = valid[:, None, None] & (item >= 0)
        label = take(batch["rating"], place)[:, None] if self.output == "explicit" else self._labels(place)
        return Samples(place, torch.where(real, item, 0), real, label, slot=item)

    def _inner(self, tree: Tree, batch: Batch, support: Samples) -> Tree:
        """The parameters after SGD on the support set, as a differentiable function of `tree`."""
        size = self.batch_size or max(1, len(support.place))
        for epoch in range(self.epochs):
            for (chosen,) in ops.minibatches(size, batch["support/order"][epoch]):
                slopes = grad(self._loss)(tree, batch, support.of(epoch).at(chosen))
                if self.first_order:
                    slopes = {name: slope.detach() for name, slope in slopes.items()}
                rates = {"item": self.learning_rate * self.item_rate}
                tree = {
                    name: value - rates.get(name, self.learning_rate) * slopes[name] for name, value in tree.items()
                }
        return tree

    def _loss(self, tree: Tree, batch: Batch, samples: Samples) -> Tensor:
        """The mean loss of some samples; `tree["item"]` holds the touched rows alone."""
        person, around, items = (Described(*(batch[f"{name}/{part}"] for part in Described._fields)) for name in PARTS)
        given = (person, around.at(samples.place), items.at(samples.item.flatten()))
        who, where, what = (vectors(tree["feature"], part) for part in given)
        network = self.network(items.block.shape[0], person.block.shape[0] + around.block.shape[0])
        beside = torch.cat([who.expand(len(samples.place), -1), where], -1).repeat_interleave(self.per_item, 0)
        rows = torch.cat([tree["item"][samples.slot.flatten()], what], -1)
        value = network.logit(tree["layers"], rows, beside).reshape(samples.item.shape)
        label = samples.label
        error = softplus(value) - label * value if self.output == "implicit" else 0.5 * (value - label) ** 2
        return torch.where(samples.real, error, 0.0).sum() / samples.real.sum().clamp(min=1)


class Samples(NamedTuple):
    """Interactions, each with its negatives."""

    place: Tensor
    """(N,) positions in the person's history."""
    item: Tensor
    """(N, passes, samples of one interaction), or without passes."""
    real: Tensor
    """As `item`."""
    label: Tensor
    """(N, samples of one interaction)."""
    slot: Tensor
    """As `item`: its place among the touched items."""

    def with_slots(self, slot: Tensor) -> Samples:
        return self._replace(slot=slot.reshape(self.item.shape))

    def of(self, epoch: int) -> Samples:
        """The samples of one pass."""
        return self._replace(item=self.item[:, epoch], real=self.real[:, epoch], slot=self.slot[:, epoch])

    def at(self, chosen: Tensor) -> Samples:
        """The samples at these places."""
        return Samples(take(self.place, chosen), *(ops.take_rows(part, chosen) for part in self[1:]))


def take(values: Tensor, place: Tensor) -> Tensor:
    """`values[place]` for a vector, by `ops.take_rows`."""
    return ops.take_rows(values[:, None], place)[:, 0]


@dataclass(frozen=True)
class FOFLSelf(PrivRec):
    """A network on items' own rows, and a start from which each device adapts it quickly.

    >>> import homebody as hb
    >>> model = hb.fit(hb.FOFLSelf(factors=4, hidden="4"), "synthetic:users=50,items=30,mean=6", rounds=1, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    features: str = param("none", "features to use, such as age,genres; none: items' own rows")

    about: ClassVar[About] = replace(
        PrivRec.about,
        title="PrivRec on the ids of items alone: a common start that each device adapts (REPTILE)",
        paper="Jalalirad et al., A Simple and Efficient Federated Recommender System, BDCAT 2019",
    )

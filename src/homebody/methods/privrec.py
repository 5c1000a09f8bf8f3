"""PrivRec: Fast-adapting and Privacy-preserving Federated Recommender System (Wang et al., VLDB Journal 2021).

| paper                                    | here                                                                   |
|------------------------------------------|------------------------------------------------------------------------|
| u_i, v_j: features as one-hot vectors    | `Vocabulary`: rows of `shared["feature"]`, `factors` numbers each      |
| V, the items' own representations        | `shared["item"]`                                                       |
| W, b: N hidden layers and one output     | `shared["layers"]`, flat; `hidden` widths, `activation`                |
| E_2 local epochs, α_1                    | `epochs`, `learning_rate`                                              |
| Δ_τ = θ_τ − θ_0, α_2                     | the update; `meta_rate`                                                |
| fine-tuning on device                    | `adapt`: `adapt_epochs` of the same steps, nothing is sent             |

Nobody has an identity in the model: a person is their features, and what their device makes of the common parameters
by adapting them. In training each device takes many steps of SGD from the common parameters, and the server moves
those towards the mean of where the devices ended (REPTILE). One step of all samples at once (`epochs=1`,
`batch_size=0`) is the paper's PrivRec-SGD.

The paper does not mention negatives, and learns nothing without: `negatives` items that a person does not have are
drawn for each that they have, anew for each epoch, in the same circumstances. A batch is so many interactions, each
with its negatives. With `output=explicit` there are none: the network predicts the rating, and the loss is squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from homebody import ops
from homebody.bags import Bags, spread_rows, sum_rows
from homebody.core import About, Batch, Catalogue, Data, Scoring, Stateless, Total, Tree, Update, Work, param
from homebody.methods.kernels import privrec as kernels
from homebody.models.dssm import PARTS, Described, Vocabulary, vectors
from homebody.models.networks import ScoreFunction, read_widths
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["PrivRec"]


@dataclass(frozen=True)
class PrivRec(Stateless):
    """A network on features of people and items, and a start from which each device adapts it quickly.

    >>> import homebody as hb
    >>> from homebody.testing import described
    >>> model = hb.fit(hb.PrivRec(factors=4, hidden="4"), described(), rounds=1, quiet=True)
    >>> model.recommend(user=7, k=3).height
    3
    """

    uplink: Channel = Channel()
    features: str = param("", "features to use, such as age,genres; empty: all but texts; none: items' own rows")
    factors: int = param(64, "size of a feature's vector", low=1, search=(16, 32, 64))
    hidden: str = param("64", "widths of the hidden layers", check=read_widths)
    activation: str = param("relu", "activation of the hidden layers", choices=("relu", "sigmoid"))
    output: str = param("implicit", "what is predicted: clicks, or ratings", choices=("implicit", "explicit"))
    learning_rate: float = param(0.3, "α_1, learning rate on the device", low=0, search=Range(0.01, 1, log=True))
    meta_rate: float = param(1.0, "α_2, the server's step towards the mean", low=0, search=Range(0.1, 2, log=True))
    item_rate: float = param(
        1.0, "the step on an item's own row is the learning rate × this", low=0, search=Range(0.01, 10, log=True)
    )
    item_meta_rate: float = param(
        10.0,
        "the server's step on items' rows is α_2 × this: few clients have an item",
        low=0,
        search=Range(1, 100, log=True),
    )
    epochs: int = param(5, "E_2, passes over a device's data in a round", low=1, search=Range(5, 100, log=True))
    adapt_epochs: int = param(20, "passes when a device adapts before it ranks; 0: as many as in training", low=0)
    adapt_rate: float = param(0.1, "learning rate when a device adapts; 0: as in training", low=0)
    adapt_items: int = param(0, "latest interactions of a person to adapt to; 0: all", low=0)
    batch_size: int = param(32, "interactions in a step, each with its negatives; 0: all in one step", low=0)
    negatives: int = param(4, "negatives drawn for each interaction, anew each pass", low=1, search=Range(1, 8))
    init_scale: float = param(0.3, "standard deviation of the initial rows", low=0, search=Range(0.01, 1, log=True))

    uses: ClassVar[tuple[str, ...]] = ("user features", "item features", "contexts", "ratings")
    about: ClassVar[About] = About(
        title="a network on features, and a common start that each device adapts quickly (REPTILE)",
        paper="Wang et al., Fast-adapting and Privacy-preserving Federated Recommender System, VLDBJ 2021",
        rounds=200,
        cohort=100,
        evaluate_every=20,
    )

    @property
    def scoring(self) -> Scoring:
        return Scoring("ratings" if self.output == "explicit" else "ranking", "adapted", numbers=64)

    def network(self, blocks: int, beside: int) -> ScoreFunction:
        """The layers, for so many features of items and so many of people and circumstances."""
        hidden = read_widths("hidden", self.hidden)
        return ScoreFunction((1 + blocks) * self.factors, hidden, beside * self.factors, self.activation)  # type: ignore[arg-type]

    def network_for(self, known: Vocabulary) -> ScoreFunction:
        """The layers for all features of a vocabulary."""
        return self.network(len(known.item_names), len(known.users) + len(known.contexts))

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        known = Vocabulary.of(catalogue, self.features)
        feature = self.init_scale * rng.fold("feature").normal(known.size, self.factors)
        feature[known.unknown] = 0.0  # until somebody turns up who is of no known kind
        return {
            "item": self.init_scale * rng.fold("item").normal(catalogue.n_items, self.factors),
            "feature": feature,
            "layers": self.network_for(known).start(rng.fold("layers")),
        }

    def takes_in(self, catalogue: Catalogue) -> tuple[str, ...]:
        known = Vocabulary.of(catalogue, self.features)
        return (*known.users, *known.contexts)

    def shared_numbers(self, catalogue: Catalogue) -> int:
        known = Vocabulary.of(catalogue, self.features)
        return (catalogue.n_items + known.size) * self.factors + self.network_for(known).size

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        known, n_items = Vocabulary.of(catalogue, self.features), catalogue.n_items
        network, numbers = self.network_for(known), self.shared_numbers(catalogue)
        units, listed = sum(network.widths), known.values
        epochs, drawn = max(self.epochs, self.adapt_passes), max(self.epochs, self.adapt_epochs)
        samples, size = longest * self.per_item, self.batch_size or longest
        steps = epochs * -(-longest // max(1, size))
        batch = min(longest, size) * self.per_item
        held = 6 * numbers + 16 * batch * (units + self.factors * listed + 8) + 8 * n_items * (listed + 4)
        held += drawn * longest * (6 * self.negatives + 6) + samples * (4 * listed + 8) + 24 * network.size
        held += 4 * min(n_items, SCORED) * units
        operations = epochs * samples * (12 * network.size + 40 * self.factors * (1 + listed) + 200)
        operations += n_items * (4 * network.size + 60 * (1 + listed))
        operations += drawn * longest * 100 * (1 + self.negatives) + 10 * numbers
        calls = 200 * epochs + steps * len(network.widths) // 10 + 800
        return Work.of(held, operations, calls, sent=numbers)

    def prepare(self, data: Data, rng: Rng) -> Batch:
        epochs, length = max(self.epochs, self.adapt_epochs), len(data.items)
        order = ops.shuffles(rng, data.valid, epochs)
        drawn = ops.negatives(rng, data, length * epochs * self.negatives)
        known = Vocabulary.of(data.catalogue, self.features)
        parts = (known.person(data.features), known.around(data.contexts, length), known.items(data.catalogue.items))
        described = {name: part.on(data.items.device) for name, part in zip(PARTS, parts, strict=True)}
        batch = {
            "item": data.items,
            "valid": data.valid,
            "order": order,
            "negative": drawn.to(torch.int32).reshape(length, epochs, self.negatives),
        }
        if self.output == "explicit":
            unrated = torch.zeros_like(data.items, dtype=torch.float32)
            batch["rating"] = unrated if data.ratings is None else data.ratings
        return batch | {f"{name}/{part}": value for name, d in described.items() for part, value in d._asdict().items()}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        mine, loss = self.stepped(shared, batch, self.epochs, self.learning_rate, batch["valid"])
        return {name: mine[name] - shared[name] for name in shared}, {"loss": loss}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        mean = total.mean
        rates = {"item": self.meta_rate * self.item_meta_rate}
        return {name: value + rates.get(name, self.meta_rate) * mean[name] for name, value in shared.items()}, state

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        return self.stepped(shared, batch, self.adapt_passes, self.adapt_step, self.at_hand(batch["valid"]))[0]

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        mine = {**shared, **{name: local[name] for name in shared if name in local}}
        known = Vocabulary.of(data.catalogue, self.features)
        person, around, described = (
            part.on(items.device)
            for part in (known.person(data.features), known.around(data.now), known.items(data.catalogue.items))
        )
        network = self.network_for(known)
        if items.device.type == "cpu" and not data.now:  # many moments are a vmap of their own
            return kernels.scores(network, mine, person, around, described, items)
        beside = torch.cat([vectors(mine["feature"], part) for part in (person, around)])
        about = vectors(mine["feature"], described._replace(row=described.row[items], weight=described.weight[items]))
        return network.logit(mine["layers"], torch.cat([mine["item"][items], about], -1), beside)

    @property
    def adapt_passes(self) -> int:
        return self.adapt_epochs or self.epochs

    @property
    def adapt_step(self) -> float:
        return self.adapt_rate or self.learning_rate

    def at_hand(self, valid: Tensor) -> Tensor:
        """The interactions that a device adapts to: the latest `adapt_items`, or all."""
        later = valid.sum(-1, keepdim=True) - valid.long().cumsum(-1)
        return valid & (later < self.adapt_items) if self.adapt_items else valid

    def stepped(self, start: Tree, batch: Batch, epochs: int, rate: float, valid: Tensor) -> tuple[Tree, Tensor]:
        """The parameters after so many passes of SGD, and the mean loss of the last pass."""
        n_items, table = len(start["item"]), torch.cat([start["item"], start["feature"]])
        described = (Described(*(batch[f"{name}/{part}"] for part in Described._fields)) for name in PARTS)
        person, around, items = (part._replace(row=part.row + n_items) for part in described)
        network = self.network(len(items.block), len(person.block) + len(around.block))
        parts = network.parts(start["layers"])
        whose = _bags(person._replace(row=person.row[None], weight=person.weight[None]))
        where, what = _bags(around), _bags(_with_own(items))
        size = self.batch_size or len(batch["item"])
        loss = torch.zeros_like(start["layers"][0])
        for epoch in range(epochs):
            place = batch["order"][epoch].long()
            sample, label, real = self._samples(batch, place, epoch, valid)
            there = [ops.take_rows(column, place) for column in where[:2]]
            about = [ops.take_rows(column, sample.flatten()).reshape(*sample.shape, -1) for column in what[:2]]
            loss = torch.zeros_like(loss)
            for label_, real_, *now in ops.minibatches(size, label, real, *there, *about):
                given = [whose, what._replace(row=now[2].flatten(0, 1), weight=now[3].flatten(0, 1))]
                if where.blocks:  # otherwise the same for all samples
                    given.append(where._replace(row=now[0], weight=now[1]))
                table, parts, step = self._step(network, table, parts, given, label_, real_, rate)
                loss = loss + step
            loss = loss / real.sum().clamp(min=1)
        layers = torch.cat([part.flatten() for part in parts])
        return {"item": table[:n_items], "feature": table[n_items:], "layers": layers}, loss

    def _samples(self, batch: Batch, place: Tensor, epoch: int, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The interactions at these places with their negatives, the label of each, and which are real."""
        item, real = batch["item"].gather(0, place)[:, None], valid.gather(0, place)[:, None]
        if self.output == "explicit":
            return item, batch["rating"].gather(0, place)[:, None], real
        sample = torch.cat([item, ops.take_rows(batch["negative"][:, epoch], place)], 1)
        real = real & (sample >= 0)
        return torch.where(real, sample, 0), self._labels(place), real

    def _labels(self, place: Tensor) -> Tensor:
        label = torch.zeros(len(place), self.per_item, device=place.device)
        label[:, 0] = 1.0
        return label

    def _step(
        self,
        network: ScoreFunction,
        table: Tensor,
        parts: list[Tensor],
        given: list[Bags],
        label: Tensor,
        real: Tensor,
        rate: float,
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """One step of SGD on some interactions and their negatives; also the sum of their losses.

        given: the person, the samples, and their circumstances if there are any.
        """
        whose, what, *where = sum_rows(table, *given)
        beside = whose.flatten(1)
        if where:
            around = torch.cat([beside.expand(len(label), -1), where[0].flatten(1)], 1)
            beside = around.repeat_interleave(self.per_item, 0)
        seen = network.inputs(parts, what.flatten(1), beside)
        value = seen[-1].reshape(label.shape)
        if self.output == "implicit":
            loss, slope = softplus(value) - label * value, value.sigmoid() - label
        else:
            loss, slope = 0.5 * (value - label) ** 2, value - label
        down = torch.where(real, slope, 0.0) * (-rate / real.sum().clamp(min=1))
        steps, of_what, of_beside = network.slopes(parts, seen, beside, down.reshape(-1, 1))
        changes = [of_beside, of_what.reshape(what.shape) * self._rates(what)]
        if where:
            of_around = of_beside.reshape(len(label), self.per_item, -1).sum(1)
            changes[0], of_where = of_around.tensor_split([whose.numel()], 1)
            changes = [changes[0].sum(0), changes[1], of_where.reshape(where[0].shape)]
        changes[0] = changes[0].reshape(whose.shape)
        table = spread_rows(table, given, changes)
        parts = [part + step for part, step in zip(parts, steps, strict=True)]
        return table, parts, torch.where(real, loss, 0.0).sum()

    def _rates(self, what: Tensor) -> Tensor:
        """(blocks, 1): the relative step of each block; the first block is an item's own row."""
        first = torch.arange(what.shape[1], device=what.device) == 0
        return torch.where(first, float(ops.single(self.item_rate)), 1.0)[:, None]

    @property
    def per_item(self) -> int:
        """Samples of one interaction: itself and its negatives."""
        return 1 + self.negatives if self.output == "implicit" else 1


SCORED = 1 << 15
"""Items that are scored together."""


def _with_own(items: Described) -> Described:
    """The items' features, with each item's own row first."""
    row, weight, block = items
    place = torch.arange(len(row), device=row.device)[:, None]
    ahead = torch.nn.functional.pad(block, (1, 0, 1, 0))
    ahead[0, 0] = 1.0
    ones = torch.ones(len(row), 1, device=row.device)
    return Described(torch.cat([place, row], 1), torch.cat([ones, weight], 1), ahead)


def _bags(described: Described) -> Bags:
    block = described.block.argmax(0) if described.block.numel() else torch.zeros(0, dtype=torch.int64)
    return Bags(described.row, described.weight, block.to(described.row.device), len(described.block))

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
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn.functional import softplus

from homebody import ops
from homebody.core import Batch, Catalogue, Data, Method, Total, Tree, Update, param
from homebody.models.dssm import Described, Vocabulary, vectors
from homebody.models.score import ScoreFunction, read_widths
from homebody.params import Range
from homebody.privacy import Channel
from homebody.rng import Rng

__all__ = ["PrivRec"]


@dataclass(frozen=True)
class PrivRec(Method):
    """A network on features of people and items, and a start from which each device adapts it quickly."""

    uplink: Channel = Channel()
    features: str = param("", "features it takes in, such as age,genres; empty: all but texts; none: items' own rows")
    factors: int = param(64, "size of a feature's vector", low=1, search=(16, 32, 64))
    hidden: str = param("64,64,64,64", "widths of the hidden layers")
    activation: str = param("relu", "of the hidden layers", choices=("relu", "sigmoid"))
    output: str = param("implicit", "what is predicted: clicks, or ratings", choices=("implicit", "explicit"))
    learning_rate: float = param(0.1, "α_1, step on the device", low=0, search=Range(0.01, 1, log=True))
    meta_rate: float = param(1.0, "α_2, the server's step towards the mean", low=0, search=Range(0.1, 2, log=True))
    epochs: int = param(100, "E_2, passes over a device's data in a round", low=1, search=Range(5, 100, log=True))
    adapt_epochs: int = param(0, "passes when a device adapts before it ranks; 0: as many as in training", low=0)
    adapt_rate: float = param(0.0, "step when it adapts; 0: as in training", low=0)
    adapt_items: int = param(0, "how many of a person's latest interactions it adapts to; 0: all", low=0)
    batch_size: int = param(32, "interactions in a step, each with its negatives; 0: all in one step", low=0)
    negatives: int = param(4, "negatives drawn for each interaction, anew each pass", low=1, search=Range(1, 8))
    init_scale: float = param(0.1, "standard deviation of the initial rows", low=0, search=Range(0.01, 1, log=True))

    uses: ClassVar[tuple[str, ...]] = ("user features", "item features", "contexts", "ratings")
    default_rounds: ClassVar[int] = 80
    default_cohort: ClassVar[int | None] = 20
    default_evaluate_every: ClassVar[int] = 10
    numbers_a_score: ClassVar[int] = 64
    title: ClassVar[str] = "a network on features, and a common start that each device adapts quickly (REPTILE)"
    paper: ClassVar[str] = "Wang et al., Fast-adapting and Privacy-preserving Federated Recommender System, VLDBJ 2021"

    def __post_init__(self) -> None:
        super().__post_init__()
        read_widths("hidden", self.hidden)

    @property
    def scores_from(self) -> Literal["latest", "base", "adapted"]:
        return "adapted"

    @property
    def predicts(self) -> Literal["ranking", "ratings"]:
        return "ratings" if self.output == "explicit" else "ranking"

    @property
    def passes(self) -> int:
        return self.epochs

    def network(self, blocks: int, beside: int) -> ScoreFunction:
        """The layers, for so many features of items and so many of people and circumstances."""
        hidden = read_widths("hidden", self.hidden)
        return ScoreFunction((1 + blocks) * self.factors, hidden, beside * self.factors, self.activation)  # type: ignore[arg-type]

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        known = Vocabulary.of(catalogue, self.features)
        feature = self.init_scale * rng.fold("feature").normal(known.size, self.factors)
        feature[known.unknown] = 0.0  # until somebody turns up who is of no known kind
        network = self.network(len(known.item_names), len(known.users) + len(known.contexts))
        return {
            "item": self.init_scale * rng.fold("item").normal(catalogue.n_items, self.factors),
            "feature": feature,
            "layers": network.start(rng.fold("layers")),
        }

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        epochs, length = max(self.epochs, self.adapt_epochs), len(data.items)
        order = torch.stack([ops.shuffled(rng, data.valid) for _ in range(epochs)])
        drawn = ops.negatives(rng, data, length * epochs * self.negatives)
        known = Vocabulary.of(data.catalogue, self.features)
        described = {
            "person": known.person(data.features),
            "around": known.around(data.contexts, length),
            "items": known.items(data.catalogue.items),
        }
        batch = {
            "item": data.items,
            "valid": data.valid,
            "order": order,
            "negative": drawn.reshape(length, epochs, self.negatives),
        }
        if self.output == "explicit":
            batch["rating"] = (
                torch.zeros_like(data.items, dtype=torch.float32) if data.ratings is None else data.ratings
            )
        return batch | {f"{name}/{part}": one for name, d in described.items() for part, one in d._asdict().items()}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        mine, loss = self.stepped(shared, batch, self.epochs, self.learning_rate, batch["valid"])
        return {name: mine[name] - shared[name] for name in shared}, {"loss": loss}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        mean = total.mean
        return {name: value + self.meta_rate * mean[name] for name, value in shared.items()}, state

    def adapt(self, shared: Tree, local: Tree, batch: Batch) -> Tree:
        return self.stepped(shared, batch, self.adapt_passes, self.adapt_step, self.at_hand(batch["valid"]))[0]

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        mine = {**shared, **{name: local[name] for name in shared if name in local}}
        known = Vocabulary.of(data.catalogue, self.features)
        people = [known.person(data.features), known.around(data.now)]
        person = torch.cat([vectors(mine["feature"], one) for one in people])
        described = known.items(data.catalogue.items)
        own = vectors(mine["feature"], described._replace(row=described.row[items], weight=described.weight[items]))
        network = self.network(len(known.item_names), len(known.users) + len(known.contexts))
        return network.logit(mine["layers"], torch.cat([mine["item"][items], own], -1), person)

    @property
    def adapt_passes(self) -> int:
        return self.adapt_epochs or self.epochs

    @property
    def adapt_step(self) -> float:
        return self.adapt_rate or self.learning_rate

    def at_hand(self, valid: Tensor) -> Tensor:
        """The interactions that a device adapts to: the latest, where not all."""
        later = valid.sum(-1, keepdim=True) - valid.long().cumsum(-1)
        return valid & (later < self.adapt_items) if self.adapt_items else valid

    def stepped(self, start: Tree, batch: Batch, epochs: int, rate: float, valid: Tensor) -> tuple[Tree, Tensor]:
        """Where SGD leads from here in so many passes, and the mean loss of the last."""
        mine, loss = dict(start), torch.zeros_like(start["layers"][0])
        size = self.batch_size or len(batch["item"])
        for epoch in range(epochs):
            sums = []
            for (place,) in ops.minibatches(size, batch["order"][epoch]):
                mine, one = self._step(mine, batch, place, epoch, rate, valid)
                sums.append(one)
            loss = torch.stack(sums).sum(0) if sums else torch.zeros(2, device=loss.device)
            loss = loss[0] / loss[1].clamp(min=1)
        return mine, loss

    def _step(
        self, mine: Tree, batch: Batch, place: Tensor, epoch: int, rate: float, valid: Tensor
    ) -> tuple[Tree, Tensor]:
        """One step on some interactions and their negatives; the sum of the losses, and of how many."""
        person, around, items = (Described(*(batch[f"{name}/{part}"] for part in Described._fields)) for name in PARTS)
        own = take(batch["item"], place)
        real = take(valid, place)[:, None].expand(-1, self.per_item)
        label = take(batch["rating"], place)[:, None] if self.output == "explicit" else self._labels(place)
        if self.output == "implicit":
            drawn = ops.take_rows(batch["negative"][:, epoch], place)
            sample = torch.cat([own[:, None], drawn], 1)
            real = real & (sample >= 0)
            sample = torch.where(real, sample, 0).flatten()
        else:
            sample = own
        of_items = Described(ops.take_rows(items.row, sample), ops.take_rows(items.weight, sample), items.block)
        at_place = Described(ops.take_rows(around.row, place), ops.take_rows(around.weight, place), around.block)
        given = (person, at_place, of_items)
        rows = tuple(_rows(mine["feature"], one) for one in given)
        network = self.network(items.block.shape[0], person.block.shape[0] + around.block.shape[0])

        def loss(layers: Tensor, item: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
            who, where, what = (_summed(own, one) for own, one in zip(rows, given, strict=True))
            beside = torch.cat([who.expand(len(place), -1), where], -1).repeat_interleave(self.per_item, 0)
            value = network.logit(layers, torch.cat([item, what], -1), beside).reshape(label.shape[0], -1)
            error = softplus(value) - label * value if self.output == "implicit" else 0.5 * (value - label) ** 2
            return torch.where(real, error, 0.0).sum()

        slopes, total = grad_and_value(loss, argnums=(0, 1, 2))(
            mine["layers"], ops.take_rows(mine["item"], sample), rows
        )
        count = real.sum()
        scale = -rate / count.clamp(min=1)
        index = torch.cat([one.row.flatten() for one in given])
        change = torch.cat([slope.flatten(0, -2) for slope in slopes[2]])
        after = {
            "item": ops.add_rows(mine["item"], sample, slopes[1] * scale),
            "feature": ops.add_rows(mine["feature"], index, change * scale),
            "layers": mine["layers"] + scale * slopes[0],
        }
        return after, torch.stack([total, count])

    @property
    def per_item(self) -> int:
        """Samples of one interaction: itself and its negatives."""
        return 1 + self.negatives if self.output == "implicit" else 1

    def _labels(self, place: Tensor) -> Tensor:
        label = torch.zeros(len(place), self.per_item, device=place.device)
        label[:, 0] = 1.0
        return label


PARTS = ("person", "around", "items")


def take(values: Tensor, place: Tensor) -> Tensor:
    """`values[place]` of one column, as `ops.take_rows` does it."""
    return ops.take_rows(values[:, None], place)[:, 0]


def _rows(table: Tensor, described: Described) -> Tensor:
    return ops.take_rows(table, described.row.flatten()).reshape(*described.row.shape, table.shape[1])


def _summed(rows: Tensor, described: Described) -> Tensor:
    return (described.block @ (rows * described.weight[..., None])).flatten(-2)

"""FL-MV-DSSM: A Federated Multi-View Deep Learning Framework for Privacy-Preserving Recommendations (Huang et al.,
2020).

| paper                                         | here                                                                 |
|-----------------------------------------------|----------------------------------------------------------------------|
| U_i, the user features of view i              | the people's features whose `Column.view` is the view's name         |
| I, the item features                          | `features`: 3-grams of titles, genres                                |
| W_I: 64, 32, 16 units (Eq. 3, Table I)        | `shared["item/first"]`, `shared["item/layers"]`                      |
| W_Ui                                          | "VIEW/user/first", "VIEW/user/layers": in `shared`, or in `local`    |
| R(Q, D), the cosine (Eq. 4)                   | `homebody.models.towers.cosine`                                      |
| P(D|Q), γ (Eq. 5), −log P(D⁺|Q) (Eq. 6)       | `_learn`; `gamma`, `negatives`                                       |
| (g_I)_i and (g_Ui)_i, lines 3 to 6            | `view`: one app's gradients, from its own features                   |
| local_secure_aggregate, line 7                | the channel's stages `views` and `view-noise`                        |
| remote_secure_aggregate, lines 8 and 11       | the channel's stage `secure-sum`                                     |
| aggregate_user_sub-model, line 9              | `aggregate_users`; False: SEMI-FL-MV-DSSM                            |
| η = 0.2 on the device, Adam 0.001 (V-A)       | `learning_rate` of towers that stay home, `server_rate`              |
| m_k / m (Eq. 2)                               | `weighting`: the clients' mean, or by their numbers of samples       |
| Algorithm 2                                   | `score`: the softmax of each view over all items, summed             |

Every view computes a gradient of the one item tower and of its own user tower, from the same samples: all views learn
which items a person has, as in Algorithm 1. A view reads no other view's features. With one view this is FL-DSSM.

A client sends one gradient a round. The device clips and sums the views' gradients of the item tower; an app is never
believed to have done so. By sample count, a client sends the sum over its samples divided by `batch_size`, and the
server divides by the planned number of clients: it need not be told how many samples each has, and Adam's steps do not
depend on the scale. A view that knows nothing of a person has a gradient of zero and ranks all items alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value

from homebody import ops
from homebody.bags import spread_rows
from homebody.core import (
    About,
    Batch,
    Catalogue,
    Cohort,
    Column,
    Data,
    Method,
    Rows,
    Scoring,
    Total,
    Tree,
    Update,
    Work,
    param,
)
from homebody.errors import HomebodyError
from homebody.models.adam import adam_start, adam_step
from homebody.models.networks import tower_widths
from homebody.models.towers import Tower, bags_of, cosine, first_layer, input_width, inputs, item_rows, row_count
from homebody.models.views import knows, tower_columns, view_columns
from homebody.privacy import OBSERVERS, Channel, Charge, NonPrivate, Views
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["FLMVDSSM", "views_of"]

PARTS = ("first", "layers")


@dataclass(frozen=True)
class FLMVDSSM(Method):
    """A user tower for each view of a person and one item tower for all; none of the views sees another's features.

    >>> import homebody as hb
    >>> from homebody.testing import described
    >>> model = hb.fit(hb.FLMVDSSM(widths="8,4"), described(), rounds=1, quiet=True)
    >>> model.method.uplink
    Channel(Views(clip=0.5))
    """

    uplink: Channel = Channel(Views(0.5))
    views: str = param("", "views that train, such as profile,taste; empty: every view of the data")
    aggregate_users: bool = param(True, "whether user towers are aggregated; false: they stay on the device (SEMI)")
    gamma: float = param(4.0, "γ: by how much cosines are multiplied", low=0, search=Range(1, 20, log=True))
    negatives: int = param(10, "negatives drawn for each positive", low=1, search=Range(1, 20, log=True))
    batch_size: int = param(20, "positives in a client's round; 0: all it has", low=0)
    learning_rate: float = param(
        0.2, "the device's learning rate for towers that stay on it", low=0, search=Range(0.02, 2, log=True)
    )
    server_rate: float = param(0.001, "learning rate of the server's Adam", low=0, search=Range(1e-4, 0.1, log=True))
    weighting: str = param(
        "clients", "what has equal weight in the mean: clients, or their samples", choices=("clients", "samples")
    )
    widths: str = param("64,32,16", "units of each layer of a tower", check=tower_widths)
    features: str = param("", "items' features it reads, such as title,genres; empty: all but numbers")

    needs: ClassVar[tuple[str, ...]] = ("user features", "item features")
    uses: ClassVar[tuple[str, ...]] = ("texts",)
    about: ClassVar[About] = About(
        title="a user tower for each app of a person, isolated from the others, and one item tower for all (DSSM)",
        paper="Huang et al., A Federated Multi-View Deep Learning Framework for Privacy-Preserving Recommendations, "
        "2020",
        rounds=100,
        cohort=100,
        evaluate_every=10,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if "item" in self.named or len(set(self.named)) < len(self.named):
            raise HomebodyError(f"views names each view once, and none is called item; not {self.views!r}.")
        if self.named:
            object.__setattr__(self, "uplink", self.uplink.for_views(len(self.named)))
        elif self.uplink.facts.view_noise:
            raise HomebodyError("View noise depends on how many views there are: name them, as in views=profile,taste.")

    @property
    def scoring(self) -> Scoring:
        return Scoring(numbers=4 + self.tower.widths[-1])

    @property
    def named(self) -> tuple[str, ...]:
        """The views that `views` names."""
        return tuple(name.strip() for name in self.views.split(",")) if self.views.strip() else ()

    @property
    def tower(self) -> Tower:
        return Tower(tower_widths("widths", self.widths))

    def people(self, catalogue: Catalogue) -> dict[str, dict[str, Column]]:
        """The features of people in each view that trains."""
        columns = view_columns(catalogue, self.views)
        if "item" in catalogue.views:
            raise HomebodyError("A view cannot be called item, which is what the common tower is called: rename it.")
        return columns

    def items(self, catalogue: Catalogue) -> dict[str, Column]:
        """The features of items that the item tower reads."""
        return tower_columns(catalogue, self.features)

    def takes_in(self, catalogue: Catalogue) -> tuple[str, ...]:
        return tuple(name for columns in self.people(catalogue).values() for name in columns)

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {
            f"{name}/{part}": one
            for name, width in self._inputs(catalogue).items()
            for part, one in self.tower.start(width, rng.fold(name)).items()
        }

    def _inputs(self, catalogue: Catalogue) -> dict[str, int]:
        """How many inputs each tower has."""
        items, views = row_count(self.items(catalogue)), self.people(catalogue)
        return {"item": items, **{f"{name}/user": input_width(list(own.values())) for name, own in views.items()}}

    def init_server(self, shared: Tree) -> Tree:
        return adam_start({name: shared[name] for name in self._sent(shared)})

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        """Towers that stay home begin as the server's."""
        return {} if self.aggregate_users else {name: shared[name] for name in shared if not name.startswith("item/")}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        """The samples, which all views have in common, and the inputs of each view's tower."""
        count = min(self.batch_size or len(data.items), len(data.items))
        chosen = ops.shuffled(rng, data.valid)[:count]
        own, real = data.items.gather(0, chosen)[:, None], data.valid.gather(0, chosen)[:, None]
        drawn = ops.negatives(rng, data, count * self.negatives).reshape(count, self.negatives)
        item = torch.cat([own, drawn], 1)
        real = real & (item >= 0)
        columns = self.items(data.catalogue)
        row, weight = item_rows(columns)
        row, weight = (part[torch.where(real, item, 0).flatten()] for part in (row, weight))
        weight = torch.where(real.reshape(-1, 1), weight, 0.0)
        index, place = ops.touched(row.flatten(), (weight != 0).flatten(), row_count(columns))
        samples = {"index": index, "place": place.reshape(row.shape), "weight": weight, "real": real}
        own_inputs = {
            f"{name}/input": inputs(of_view, data.features) for name, of_view in self.people(data.catalogue).items()
        }
        return {**samples, **own_inputs}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        update: Update = {}
        kept: Tree = {}
        losses = []
        for name in views_of(shared):
            gradient, loss = self._learn(name, shared, local, batch)
            losses.append(loss)
            if not self.aggregate_users:
                kept |= self.stepped(name, local, gradient)
            update |= {f"{name}/{part}": one for part, one in gradient.items() if self.leaves(part)}
        return update, {**kept, "loss": torch.stack(losses).mean()}

    def view(self, name: str, shared: Tree, local: Tree, batch: Batch) -> Update:
        """One view's gradients: "item/first" and "item/layers" of the item tower, "user/first" and "user/layers" of its
        own tower.

        It reads the item tower, the view's own tower, the samples and "NAME/input": nothing of another view.
        """
        return self._learn(name, shared, local, batch)[0]

    def silence(self, name: str, shared: Tree) -> Update:
        """What `view` would give for no samples: for a view that does not answer."""
        item = shared["item/first"]
        nothing = Rows(torch.full((1,), -1, device=item.device), torch.zeros_like(item[:1]), len(item))
        return {
            "item/first": nothing,
            "item/layers": torch.zeros_like(shared["item/layers"]),
            **{f"user/{part}": torch.zeros_like(shared[f"{name}/user/{part}"]) for part in PARTS},
        }

    def stepped(self, name: str, local: Tree, gradient: Update) -> Tree:
        """A view's own tower after the device's step, where towers stay home."""
        return {
            f"{name}/user/{part}": local[f"{name}/user/{part}"] - self.learning_rate * gradient[f"user/{part}"]
            for part in PARTS
        }

    def _learn(self, name: str, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tensor]:
        """The gradients of one view, and its mean loss."""
        first, layers = self._own(name, shared, local)
        given, real, index = batch[f"{name}/input"], batch["real"], batch["index"]
        touched = torch.where(index[:, None] >= 0, shared["item/first"][index.clamp(min=0)], 0.0)
        of_items = first_layer(touched, batch["place"], batch["weight"])
        count = real[:, 0].sum().clamp(min=1)
        positive = torch.arange(real.shape[1], device=real.device) == 0  # so that no row of the softmax is empty
        tower = self.tower

        def loss(of_person: Tensor, user_layers: Tensor, of_items: Tensor, item_layers: Tensor) -> Tensor:
            person, items = tower.encode(user_layers, of_person), tower.encode(item_layers, of_items)
            fit = self.gamma * cosine(person, items).reshape(real.shape)
            fit = torch.where(real | positive, fit, -torch.inf)  # Eq. 5, among those that were drawn
            return torch.where(real[:, 0], fit.logsumexp(1) - fit[:, 0], 0.0).sum()

        slopes, total = grad_and_value(loss, argnums=(0, 1, 2, 3))(
            given @ first, layers, of_items, shared["item/layers"]
        )
        share = knows(given) / (count if self.weighting == "clients" else float(self.batch_size or 1))
        of_person, user_layers, of_items, item_layers = (share * one for one in slopes)
        empty = torch.zeros_like(touched)
        rows = spread_rows(empty, [bags_of(batch["place"], batch["weight"])], [of_items[:, None]])
        gradient = {
            "item/first": Rows(index, rows, len(shared["item/first"])),
            "item/layers": item_layers,
            "user/first": given[:, None] * of_person,
            "user/layers": user_layers,
        }
        return gradient, total / count

    def _own(self, name: str, shared: Tree, local: Tree) -> tuple[Tensor, Tensor]:
        where = shared if self.aggregate_users else local
        return where[f"{name}/user/first"], where[f"{name}/user/layers"]

    def leaves(self, part: str) -> bool:
        """Whether a part of the gradient is sent."""
        return self.aggregate_users or part.startswith("item/")

    def _sent(self, shared: Tree) -> list[str]:
        """The shared parameters that the server moves."""
        return [name for name in shared if self.leaves(name)]

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        """One step of Adam on the mean gradient."""
        gradient = _joined(total.mean, views_of(shared))
        return adam_step(shared, state, {name: gradient[name] for name in self._sent(shared)}, self.server_rate)

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        """Algorithm 2: the probabilities of each view, over the whole catalogue, summed by the device."""
        scores = [one[items] for one in self.probabilities(shared, local, data).values()]
        return torch.stack(scores).sum(0)

    def probabilities(self, shared: Tree, local: Tree, data: Data) -> dict[str, Tensor]:
        """P(item | view) for every item, as each view computes it from its own features."""
        tower = self.tower
        described = item_rows(self.items(data.catalogue))
        vectors = tower.encode(shared["item/layers"], first_layer(shared["item/first"], *described))
        found = {}
        for name, columns in self.people(data.catalogue).items():
            first, layers = self._own(name, shared, local)
            given = inputs(columns, data.features)
            fit = cosine(tower.encode(layers, given @ first), vectors)
            found[name] = (self.gamma * knows(given) * fit).softmax(0)
        return found

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        """What the channel derives. If user towers stay home, the noise on the item tower covers all that is sent."""
        noise, told = self.uplink.facts.view_noise, list(super().charges(cohort))
        if noise is not None and not self.aggregate_users:
            told = noise.whole(cohort)
        elif noise is not None:
            towers = NonPrivate("gradients of the user towers carry no noise")
            told = [replace(one, event=towers) if one.observer in OBSERVERS else one for one in told]
        if len(self.named) == 1:
            return [one for one in told if one.observer != "views"]  # there is no other view
        if any(one.observer == "views" for one in told):
            return told
        return [*told, Charge("views", "user", NonPrivate("nothing bounds or hides each view's gradient"))]

    def shared_numbers(self, catalogue: Catalogue) -> int:
        """How many shared parameters there are."""
        return sum(map(self.tower.numbers, self._inputs(catalogue).values()))

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        tower, numbers, views = self.tower, self.shared_numbers(catalogue), len(self.people(catalogue))
        listed = sum(one.width for one in self.items(catalogue).values())
        drawn = min(self.batch_size or longest, longest) * (1 + self.negatives)
        rows, units = drawn * listed, sum(tower.widths)
        touched = min(rows, row_count(self.items(catalogue))) * tower.widths[0]
        held = 8 * numbers + 12 * (views + 1) * touched + 24 * rows + 40 * drawn * units * (views + 1)
        held += catalogue.n_items * (6 * listed + 8 * units + 8 * views) + 16 * longest
        operations = views * (40 * rows * tower.widths[0] + 40 * drawn * tower.size) + 20 * views * touched
        operations += catalogue.n_items * (4 * listed * tower.widths[0] + 4 * tower.size) + 100 * longest + 20 * numbers
        return Work.of(held, operations, calls=400 * (views + 1), sent=views * (numbers + 3 * touched + rows))


def views_of(shared: Mapping[str, object]) -> list[str]:
    """The views whose towers there are."""
    return [name.removesuffix("/user/first") for name in shared if name.endswith("/user/first")]


def _joined(mean: Tree, views: list[str]) -> Tree:
    """The gradient of each tower. Where no stage joined the views' gradients of the item tower, their mean is taken."""
    apart = {part: [mean[f"{name}/item/{part}"] for name in views if f"{name}/item/{part}" in mean] for part in PARTS}
    return {**mean, **{f"item/{part}": sum(found) / len(views) for part, found in apart.items() if found}}

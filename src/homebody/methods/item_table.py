"""What FedMF, FedNCF, FedRecon and PFedRec have in common: one shared item table, and a score function.

Each device draws negatives for its positives, takes steps of SGD on the logistic loss, and sends the change of the
rows it touched. The mean runs over whole tables, rows that a client never touched included, so the step on rows is
large: rate × number of items × `item_rate`.

**Dual personalisation** (Zhang et al., IJCAI 2023), `dual`: the score function stays on the device, all of it; a step
on the score function comes first, and the rows step against the stepped one (post-tuning); and the device ranks with
its own tuned rows, as they were before the mean was taken, on top of the table they were tuned from.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from homebody import ops
from homebody.core import Batch, Catalogue, Data, Method, Rows, Scoring, Total, Tree, Work, param, table_size
from homebody.errors import HomebodyError
from homebody.models.networks import ScoreFunction
from homebody.privacy import Channel
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["ItemTable"]


@dataclass(frozen=True)
class ItemTable(Method):
    """A shared item table. A method adds its score function and its round."""

    uplink: Channel = Channel()
    factors: int = param(32, "size of an item's vector", low=1, search=(16, 32, 64))
    learning_rate: float = param(0.1, "step on the score function", low=0, search=Range(0.01, 1, log=True))
    item_rate: float = param(
        80.0,
        "the step on item rows is the learning rate × number of items × this",
        low=0,
        search=Range(8, 800, log=True),
    )
    negatives: int = param(4, "negatives drawn for each positive, anew each round", low=1, search=Range(1, 8))
    batch_size: int = param(256, "samples in a step", low=1)
    epochs: int = param(1, "passes over the round's samples", low=1, search=Range(1, 4))
    dual: bool = param(False, "dual personalisation: private score function, item rows tuned per user")

    @property
    def scoring(self) -> Scoring:
        return Scoring(parameters="base" if self.dual else "latest")

    @property
    def function(self) -> ScoreFunction:
        """The score function of an item's row; by default a linear one."""
        return ScoreFunction(self.factors)

    @property
    def all_passes(self) -> int:
        """Passes over a client's samples in a round, all kinds together."""
        return self.epochs

    def shared_numbers(self, catalogue: Catalogue) -> int:
        return (catalogue.n_items + 1) * self.factors + self.function.size

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        numbers, samples, n_items = self.shared_numbers(catalogue), longest * (1 + self.negatives), catalogue.n_items
        weights, widths = self.function.size, self.function.widths
        rows, batch, units = min(samples, n_items), min(samples, self.batch_size), sum(widths)
        steps = self.all_passes * -(-samples // self.batch_size)
        held = 4 * numbers + 16 * weights + (16 * rows + 8 * samples) * self.factors
        held += 24 * batch * units + (4 * self.factors + 2 * units) * n_items + 40 * samples
        operations = self.all_passes * samples * (40 * weights + 100) + samples * 400 + n_items * (4 * weights + 20)
        calls = steps * (20 + 40 * len(widths)) + 400
        return Work.of(held, operations, calls, sent=numbers + 2 * rows)

    def logit(self, shared: Tree, local: Tree, rows: Tensor) -> Tensor:
        """The client's score function at these rows. `linear_score` is faster if it is linear."""
        raise HomebodyError(f"{type(self).__name__} must define logit(), or score().")

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        return {"item": rng.normal(catalogue.n_items, self.factors)}

    def untuned(self, shared: Tree, rng: Rng) -> Tree:
        """The empty place for tuned rows in a new client's state."""
        if not self.dual:
            return {}
        return {"item": Rows(rng.integers(1, 0), shared["item"][:0], len(shared["item"]))}

    def tuned(self, change: Rows) -> Tree:
        """The part of a client's state that holds the rows it tuned."""
        return {"item": change} if self.dual else {}

    def prepare(self, data: Data, rng: Rng) -> Batch:
        items, label, valid = ops.labelled(rng, data, self.negatives)
        index, slot = ops.touched(items, valid, data.catalogue.n_items)
        return {"index": index, "slot": slot, "label": label, "valid": valid}

    def asks(self, batch: Batch) -> dict[str, Tensor]:
        return {"item": batch["index"]}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        mean = total.mean
        return {name: value + mean[name] if name in mean else value for name, value in shared.items()}, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        common = self.logit(shared, local, shared["item"][items])
        if not self.dual:
            return common
        tuned = local["item"]
        adapted = self.logit(shared, local, shared["item"][tuned.index.clamp(min=0)] + tuned.value)
        return ops.overlay(common, items, tuned.index, adapted, tuned.size)

    def linear_score(self, shared: Tree, local: Tree, weight: Tensor, items: Tensor) -> Tensor:
        """`score` if the logit is a product: the change of a row then adds to its score."""
        common = shared["item"][items] @ weight
        if not self.dual:
            return common
        tuned = local["item"]
        return ops.overlay(common, items, tuned.index, tuned.value @ weight, tuned.size, add=True)

    def row_rate(self, shared: Tree) -> float:
        return self.learning_rate * table_size(shared) * self.item_rate

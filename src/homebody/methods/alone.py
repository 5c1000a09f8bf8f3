"""Federation switched off: PFedRec's model, trained by each device on its own history alone.

Nothing is sent, so nothing is told: ε = 0. It says what a method owes to the others' histories; and under the
published protocol it shows how much of a score is no learning at all (docs/published-protocol.md).

Every client keeps a whole table of its own, so this is for small populations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from homebody.core import About, Batch, Catalogue, Data, Scoring, Total, Tree, Update, Work
from homebody.errors import HomebodyError
from homebody.methods.pfedrec import PFedRec
from homebody.privacy import Channel
from homebody.rng import Rng

__all__ = ["Alone"]


@dataclass(frozen=True)
class Alone(PFedRec):
    """A score function and an item table on each device, from a common start; nothing is averaged."""

    about: ClassVar[About] = replace(
        PFedRec.about,
        title="federation switched off: each device trains its own table and score function",
        paper="",
        diagnostic=True,
        sends=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uplink != Channel():
            raise HomebodyError("Nothing leaves a device that trains alone: leave out the stages.")

    @property
    def scoring(self) -> Scoring:
        return Scoring()

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        return super().work(catalogue, longest) + Work(memory=24 * self.shared_numbers(catalogue))  # a table of its own

    def init_local(self, shared: Tree, rng: Rng) -> Tree:
        return {"weight": shared["weight"], "bias": shared["bias"], "item": shared["item"]}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        update, kept = super().client({**shared, "item": local["item"]}, local, batch)
        return {}, {**kept, "item": local["item"] + update["item"].dense()}

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        return shared, state

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        return self.logit(shared, local, local["item"][items])

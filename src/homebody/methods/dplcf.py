"""DPLCF: Differentially Private Local Collaborative Filtering (Gao et al., SIGIR 2020).

FMF-LDP's strongest private rival. Each device tells its whole history once, through randomised response; the server
estimates how many people have both of two items, and from that how similar they are; the device ranks by the
neighbours that it has. We hold its abstract and what the FMF-LDP paper says of it (Section 5.2); what they leave open
is ours: cosine similarity, its shrinkage, and the number of neighbours, chosen on validation.

| the papers                                | here                                                           |
|-------------------------------------------|----------------------------------------------------------------|
| interaction vector b ∈ {0, 1}ᴹ            | `update["history"]`, one entry an item                         |
| each bit kept with p = e^ε′ / (1 + e^ε′)  | `RandomisedResponse(ε′)`, the way out                          |
| b̂ = (b − q) / (p − q), Σᵤ b̂ᵢ b̂ⱼ           | `total.sum["history"]`, `total.sum["history²"]`                |
| similarity of items                       | `similarity`: b̂ᵢb̂ⱼ / √(b̂ᵢ b̂ⱼ), shrunk by its standard error   |
| item similarities, sent to everyone       | `shared["neighbour"]`, `shared["weight"]`: the nearest of each |
| kNN on the device                         | `score`: the weights of the neighbours in one's history        |
| M ε′ at user level                        | `charges`                                                      |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from homebody import ops
from homebody.core import About, Batch, Catalogue, Cohort, Data, Rows, Stateless, Total, Tree, Update, Work, param
from homebody.errors import HomebodyError
from homebody.methods.kernels import dplcf as kernels
from homebody.privacy import Channel, Charge, RandomisedResponse
from homebody.rng import Rng
from homebody.settings import Range

__all__ = ["DPLCF"]

ROWS = 256
"""Items whose neighbours are computed together."""


@dataclass(frozen=True)
class DPLCF(Stateless):
    """Item neighbours from histories that each device reports once, through randomised response.

    >>> import homebody as hb
    >>> model = hb.fit(hb.DPLCF(), "synthetic:users=50,items=30,mean=6", rounds=2, quiet=True)
    >>> round(model.epsilon["server"], 3)
    150.0
    """

    uplink: Channel = Channel(RandomisedResponse(epsilon=2.5))
    neighbours: int = param(50, "neighbours that an item keeps", low=1, search=(20, 50, 100, 200))
    shrinkage: float = param(
        20.0,
        "added to the denominator of the similarity, in standard errors of an estimated count",
        low=0,
        search=Range(2, 50),
    )

    about: ClassVar[About] = About(
        title="item neighbours from whole histories told once by randomised response",
        paper="Gao et al., DPLCF: Differentially Private Local Collaborative Filtering, SIGIR 2020",
        rounds=1,
        draws_negatives=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uplink.facts.responses is None:
            raise HomebodyError(
                "DPLCF counts pairs of items in each person's message: its last stage is randomised-response, as in "
                "--stage randomised-response:epsilon=2.5."
            )

    @property
    def response(self) -> RandomisedResponse:
        responses = self.uplink.facts.responses
        assert responses is not None
        return responses

    def init_shared(self, catalogue: Catalogue, rng: Rng) -> Tree:
        room = max(1, min(self.neighbours, catalogue.n_items - 1))
        shape = (catalogue.n_items, room)
        return {"neighbour": torch.zeros(shape, dtype=torch.int32), "weight": torch.zeros(shape)}

    def shared_numbers(self, catalogue: Catalogue) -> int:
        return 2 * catalogue.n_items * min(self.neighbours, catalogue.n_items)

    def work(self, catalogue: Catalogue, longest: int) -> Work:
        numbers, n_items = self.shared_numbers(catalogue), catalogue.n_items
        held, operations = 4 * numbers + 16 * (n_items + longest), 8 * numbers + 100 * (n_items + longest)
        return Work.of(held, operations, calls=200, sent=max(n_items, 2 * longest))

    def prepare(self, data: Data, rng: Rng) -> Batch:
        return {"items": torch.where(data.valid, data.items, -1)}

    def client(self, shared: Tree, local: Tree, batch: Batch) -> tuple[Update, Tree]:
        ones = torch.ones_like(batch["items"], dtype=torch.float32)
        return {"history": Rows(batch["items"], ones, len(shared["weight"]))}, local

    def server(self, shared: Tree, state: Tree, total: Total) -> tuple[Tree, Tree]:
        counts, both = total.sum["history"], total.sum["history²"]
        neighbour, weight = torch.empty_like(shared["neighbour"]), torch.empty_like(shared["weight"])
        for start in range(0, len(counts), ROWS):
            rows = slice(start, start + ROWS)
            weight[rows], neighbour[rows] = self.similarity(both, counts, rows, total.clients).topk(weight.shape[1])
        return {"neighbour": neighbour, "weight": weight}, state

    def similarity(self, both: Tensor, counts: Tensor, rows: slice, clients: int) -> Tensor:
        """The similarity of some items to all items: not negative, and 0 to themselves.

        A count below its standard error carries no information: the shrinkage in the denominator keeps it small.
        """
        sizes = counts.clamp(min=1)
        error = self.response.spread * clients**0.5
        below = (sizes[rows, None] * sizes).sqrt_().add_(self.shrinkage * error)
        near = (both[rows] / below).clamp_(min=0)
        near.diagonal(rows.start).zero_()
        return near

    def score(self, shared: Tree, local: Tree, data: Data, items: Tensor) -> Tensor:
        size = len(shared["weight"])
        owned = torch.zeros(size + 1, device=items.device)
        owned = owned.scatter(0, torch.where(data.valid, data.items, size), 1.0)[:-1]
        return _near(owned, items, shared["neighbour"], shared["weight"])

    def charges(self, cohort: Cohort) -> Sequence[Charge]:
        if not cohort.items:
            raise HomebodyError("DPLCF is charged for every item of the catalogue: state how many there are.")
        return self.response.charges_for(cohort.items)


@ops.for_cohort
def _near(owned: Tensor, items: Tensor, neighbour: Tensor, weight: Tensor) -> Tensor:
    """For each person and item, the sum of the weights of the item's neighbours that the person has."""
    given = (owned, items, neighbour, weight)
    if len(owned) > 1 and any(part.stride(0) for part in given[1:]):  # not all ask the same
        return torch.cat([_near.cohort(*(part[client : client + 1] for part in given)) for client in range(len(owned))])
    common = [part[0].contiguous() for part in given[1:]]
    if owned.device.type == "cpu":
        out = torch.empty(len(owned), items.shape[1])
        kernels.add_up_neighbours(*(part.numpy() for part in (*common, owned.T.contiguous(), out)))
        return out
    return near_in_torch(owned, *common)


def near_in_torch(owned: Tensor, items: Tensor, neighbour: Tensor, weight: Tensor) -> Tensor:
    """What the kernel computes, on any device."""
    table = torch.zeros(len(items), owned.shape[1], device=owned.device)
    return owned @ table.scatter_add_(1, neighbour[items].long(), weight[items]).T

"""How each method is served: from parts of its shared parameters, so that a device need not hold all of them.

A service gives a device the rows of some items, and the device ranks those at home (docs/serving.md). What that takes
of a method is registered here for its class, as kernels are; a method does not know of it.

A class that nothing is registered for is served by the defaults: its item table is `shared["item"]`, and its score
reads no other item's row. `check` finds out whether that is so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from homebody.core import WHOLE, Catalogue, Column, Data, Method, Rows, Tree, gram
from homebody.errors import HomebodyError
from homebody.reference import Reference
from homebody.rng import Rng

__all__ = [
    "WAYS",
    "Serving",
    "Way",
    "check",
    "nobody",
    "part_of_catalogue",
    "register",
    "renumbered",
    "serving_of",
]

Way = Literal["table", "shelf", "query", "server"]
WAYS: tuple[Way, ...] = get_args(Way)
"""All rows; the same rows for everyone; half of these, and rows that a query chooses; or the server ranks."""
OWN: tuple[Way, ...] = ("table", "shelf", "query")
"""The ways in which the server ranks nothing."""


def unknown_scores(method: Any, shared: Tree, catalogue: Catalogue) -> Tensor:
    """The scores of somebody of whom nothing is known."""
    rng = Rng.of(0, "nobody", device=_device(shared))
    everything = torch.arange(catalogue.n_items, device=_device(shared))
    scores: Tensor = method.score(
        shared, method.init_local(shared, rng), nobody(catalogue, _device(shared)), everything
    )
    return scores.float()


def lengths(method: Any, shared: Tree, catalogue: Catalogue) -> Tensor:
    """The lengths of the items' rows: where somebody unknown has no vector, popular items have long ones."""
    return serving_of(method).places(method, shared, catalogue).norm(dim=1)


def item_rows(method: Any, shared: Tree, catalogue: Catalogue) -> Tensor:
    """The item table."""
    return _table(method, shared)[: catalogue.n_items]


def mean_place(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    """The mean of the places of a person's items; zeros if they have none."""
    places = serving_of(method).places(method, shared, data.catalogue)
    own = places[data.items] * data.valid[:, None]
    return own.sum(0) / data.valid.sum().clamp(min=1)


def _nothing(method: Any, shared: Tree) -> Tree:
    return {}


def _squares(method: Any, shared: Tree) -> Tree:
    """The sum of the outer products of all rows, which a person's vector is solved against."""
    name = serving_of(method).tables(method)[0]
    return {f"{WHOLE}gram": gram(shared, name)}


@dataclass(frozen=True)
class Serving:
    """What a service needs of a method, each time for one model."""

    common: Callable[[Any, Tree, Catalogue], Tensor] = unknown_scores
    """(N,) the order of items that is the same for everyone; higher comes first."""
    places: Callable[[Any, Tree, Catalogue], Tensor] = item_rows
    """(N, r) where items lie."""
    interest: Callable[[Any, Tree, Tree, Data], Tensor] = mean_place
    """(r,) where a person looks, from a part or from the whole of the shared parameters; zeros if nothing is known."""
    basis: Callable[[Any, Tree], tuple[Tensor, Tensor] | None] = lambda method, shared: None
    """The method's own interests, (B, r), and what is taken off the fit of each, (B,); None: it has none."""
    tables: Callable[[Any], tuple[str, ...]] = lambda method: ("item",)
    """The shared parameters that have a row for each item, and that `score` reads."""
    whole: Callable[[Any, Tree], Tree] = _nothing
    """Sums over all items that `score` reads, under names that begin with `whole/`."""
    leaves: tuple[str, ...] = ()
    """Shared parameters that ranking does not read: names, or their beginnings."""
    ends: bool = False
    """Whether each table has one row more than there are items: zeros, for no item."""
    features: bool = False
    """Whether `score` reads items' features from the catalogue."""
    ways: tuple[Way, ...] = OWN
    refused: str = ""
    """Why the method is not served, as a sentence."""

    def common_part(self, method: Method, shared: Tree) -> Tree:
        """The shared parameters that are not by item, as far as ranking reads them."""
        tables = self.tables(method)
        return {
            name: value
            for name, value in shared.items()
            if name not in tables and not name.startswith(self.leaves) and not name.startswith(WHOLE)
        }

    def rows(self, method: Method, shared: Tree, items: Tensor) -> Tree:
        """The rows of these items in every table."""
        return {name: shared[name][items] for name in self.tables(method)}

    def joined(self, common: Tree, rows: Tree, whole: Tree) -> Tree:
        """The shared parameters of a part, from its pieces."""
        if self.ends:
            rows = {name: torch.cat([value, torch.zeros_like(value[:1])]) for name, value in rows.items()}
        return {**common, **rows, **whole}

    def sums(self, method: Method, shared: Tree) -> Tree:
        """What a part says of the whole table: how many rows it has, and the sums that `score` reads."""
        tables = self.tables(method)
        if not tables:
            return {}
        size = shared.get(f"{WHOLE}size", torch.tensor(len(shared[tables[0]]) - self.ends))
        return {f"{WHOLE}size": size, **self.whole(method, shared)}

    def part(self, method: Method, shared: Tree, items: Tensor) -> Tree:
        """The shared parameters of these items alone, numbered from 0 in the order given."""
        tables = self.tables(method)
        if self.ways == ("table",) and tables and not torch.equal(items, torch.arange(len(shared[tables[0]]))):
            raise HomebodyError(
                f"{type(method).__name__} ranks by the whole table: its devices take all rows, as in --mode table."
            )
        return self.joined(
            self.common_part(method, shared), self.rows(method, shared, items), self.sums(method, shared)
        )


def nobody(catalogue: Catalogue, device: torch.device | str = "cpu") -> Data:
    """The data of somebody of whom nothing is known."""
    item = torch.zeros(1, dtype=torch.int64, device=device)
    features = {name: _unknown(column, device) for name, column in catalogue.people.items()}
    contexts = {name: _unknown(column, device)[None] for name, column in catalogue.contexts.items()}
    ratings = torch.zeros(1, device=device)
    return Data(item, item > 0, item[:0], catalogue, features, contexts, ratings)


def _unknown(column: Column, device: torch.device | str) -> Tensor:
    shape = column.values.shape[1:]
    return torch.full(shape, -1 if column.several else 0, device=device).to(column.values.dtype)


def part_of_catalogue(catalogue: Catalogue, items: Tensor) -> Catalogue:
    """The catalogue of these items alone, numbered from 0 in the order given."""
    columns = {name: column._replace(values=column.values[items]) for name, column in catalogue.items.items()}
    chosen = items.tolist() if any(column.texts for column in columns.values()) else []
    for name, column in columns.items():
        if column.texts:
            columns[name] = column._replace(texts=tuple(column.texts[item] for item in chosen))
    return replace(catalogue, n_items=len(items), items=columns)


def renumbered(local: Tree, items: Tensor) -> Tree:
    """A person's state about these items alone, numbered from 0 in the order given: rows of others are left out.

    >>> kept = renumbered({"item": Rows(torch.tensor([7, 2]), torch.ones(2, 1), size=9)}, torch.tensor([2, 5]))
    >>> kept["item"].index.tolist(), kept["item"].size
    ([-1, 0], 2)
    """
    if not any(isinstance(value, Rows) for value in local.values()):
        return local
    order = items.argsort()
    found: Tree = {}
    for name, value in local.items():
        if isinstance(value, Rows):
            place = torch.searchsorted(items[order], value.index).clamp(max=max(0, len(items) - 1))
            there = (
                (items[order[place]] == value.index) if len(items) else torch.zeros_like(value.index, dtype=torch.bool)
            )
            value = Rows(torch.where(there, order[place] if len(items) else -1, -1), value.value, len(items))
        found[name] = value
    return found


def _device(shared: Tree) -> torch.device | str:
    return next((value.device for value in shared.values()), "cpu")


def _table(method: Any, shared: Tree) -> Tensor:
    table: Tensor = shared[serving_of(method).tables(method)[0]]
    return table


# Where a person looks, if the score is the product of an item's row and a vector of theirs.


def _state(name: str) -> Callable[[Any, Tree, Tree, Data], Tensor]:
    def interest(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
        return local[name]

    return interest


def _solved(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    return method.user_vector(shared, data.items, data.valid)


def _solved_by_device(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    return _solved(method.device, shared, local, data)


def _solved_with_views(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    return method.user_vector(shared, method.prepare(data, Rng.of(0)))


def _solved_from_reports(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    table = _table(method, shared)
    vector: Tensor = method.user_vector(table, data.items, data.valid, shared.get(f"{WHOLE}gram"))[1]
    return vector


def _weight(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    return mean_place(method, shared, local, data) if method.function.hidden else local["weight"]


def _node(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    return method.node(shared, local, data)


def _reader(method: Any, shared: Tree, local: Tree, data: Data) -> Tensor:
    return method.person(shared, data)


def _popularity_too(method: Any) -> tuple[str, ...]:
    return ("item", "popularity")


def _as_nobody(method: Any, shared: Tree, catalogue: Catalogue) -> Tensor:
    return unknown_scores(replace(method, query="nobody"), shared, catalogue)


def _own_basis(method: Any, shared: Tree) -> tuple[Tensor, Tensor] | None:
    """The basis vectors of a PrivateRec, as long as makes a fit what the method takes for one."""
    scale = 1.0 if method.chooses else method.sharpness * method.d**-0.5
    basis = scale * shared["basis"]
    return basis, shared.get("level", torch.zeros_like(basis[:, 0]))


def _taken(method: Any) -> tuple[str, ...]:
    return ("taken",)


def _news(method: Any) -> tuple[str, ...]:
    return ("index/news",)


_FACTORS = Serving(interest=_state("user"))
_NETWORK = Serving(features=True)
_NEWS = Serving(common=_as_nobody, interest=_reader, tables=_news, leaves=("news/", "candidates"), ends=True, ways=WAYS)
_NEARBY = Serving(interest=_reader, tables=_popularity_too, leaves=("place",))
_SHIPPED: Mapping[str, Serving] = {
    "baselines.PrivatePopularity": Serving(tables=_taken, ways=("table", "shelf")),
    "dp_als.DPALS": Serving(common=lengths, interest=_solved_by_device, whole=_squares),
    "dp_fedrec.DPFedRec": _NEWS,
    "dp_privrec.DPPrivRec": _NETWORK,
    "dplcf.DPLCF": Serving(tables=lambda method: ("neighbour", "weight"), ways=("table",)),
    "fcf.FCF": Serving(common=lengths, interest=_solved_by_device, whole=_squares),
    "fed_mvmf.FedMVMF": Serving(common=lengths, interest=_solved_with_views, whole=_squares, leaves=("features",)),
    "fedgnn.FedGNN": Serving(interest=_node),
    "fedials.FedIALS": Serving(common=lengths, interest=_solved, whole=_squares),
    "fedmf.FedMF": _FACTORS,
    "fedncf.FedNCF": Serving(),
    "fedrec.FedRec": _NEWS,
    "fedrecon.FedRecon": Serving(common=lengths, interest=_state("user")),
    "fl_mv_dssm.FLMVDSSM": Serving(tables=lambda method: (), features=True, ways=("table",)),
    "fmf_ldp.FMFLDP": Serving(
        common=lengths,
        interest=_solved_from_reports,
        tables=lambda method: ("item",) if method.decoder == "published" else ("rank",),
        whole=_squares,
        leaves=("item", "rank"),
    ),
    "nearby.Nearby": _NEARBY,
    "nearby.NearbyPopularity": _NEARBY,
    "nearby.PublicFeatures": _NEARBY,
    "nn_self.FOFLSelf": _NETWORK,
    "nn_self.NNSelf": _NETWORK,
    "pfedrec.Alone": Serving(
        refused="alone learns nothing from others, so a server has nothing to serve: its devices rank by themselves."
    ),
    "pfedrec.PFedRec": Serving(interest=_weight),
    "privaterec.PrivateRec": replace(_NEWS, basis=_own_basis),
    "privrec.PrivRec": _NETWORK,
}
"""By module and class."""
_REGISTERED: dict[type[Method], Serving] = {}
_PLAIN = Serving()


def register(kind: type[Method], serving: Serving) -> None:
    """Serve methods of exactly this class so from now on.

    >>> from homebody.methods.fedmf import FedMF
    >>> class Mine(FedMF): ...
    >>> register(Mine, serving_of(FedMF()))
    >>> serving_of(Mine()) is serving_of(FedMF())
    True
    """
    _REGISTERED[kind] = serving


def serving_of(method: Method | Reference) -> Serving:
    """How methods of this class are served. Raises `HomebodyError` for one that is not."""
    if not isinstance(method, Method):
        raise HomebodyError(
            f"{type(method).__name__} collects everyone's histories in one place, so no device is served from its run: "
            "serve the run of a federated method."
        )
    kind = type(method)
    module = kind.__module__.removeprefix("homebody.methods.")
    serving = _REGISTERED.get(kind) or _SHIPPED.get(f"{module}.{kind.__qualname__}", _PLAIN)
    if serving.refused:
        raise HomebodyError(serving.refused)
    return serving


def check(method: Method, shared: Tree, catalogue: Catalogue) -> None:
    """Refuse a method that cannot be served from parts as its class says: its scores on a part would be others."""
    serving, name = serving_of(method), type(method).__name__
    missing = [table for table in serving.tables(method) if table not in shared]
    advice = "Register a Serving for it (homebody.methods.serving.register)."
    if missing:
        raise HomebodyError(f"{name} shares no table '{missing[0]}' with a row for each item. {advice}")
    if serving is not _PLAIN:
        return
    some = torch.arange(min(4, catalogue.n_items))
    whole = nobody(catalogue)._replace(items=some[:2], valid=torch.ones(len(some[:2]), dtype=torch.bool))
    at_home = whole._replace(catalogue=part_of_catalogue(catalogue, some))
    try:
        part = serving.part(method, shared, some)
        here = method.score(part, method.init_local(part, Rng.of(0)), at_home, some)
        there = method.score(shared, method.init_local(shared, Rng.of(0)), whole, some)
        same = torch.allclose(here, there, rtol=1e-4, atol=1e-5)
    except (RuntimeError, IndexError, KeyError):
        same = False
    if not same:
        raise HomebodyError(f"{name} scores items otherwise where it has a part of them alone. {advice}")

"""A trained model as a service gives it out, and as a device ranks with what it was given.

`Served` is the service's side: all rows, the order that is the same for everyone, interests and their lists. `Head` is
what a device needs beside rows, and `Part` the rows of some items. `rank` is the device's side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from homebody.core import Catalogue, Column, Data, Method, Rows, Tree
from homebody.data.codes import Code
from homebody.data.population import Population
from homebody.errors import HomebodyError, several
from homebody.federation import wire
from homebody.federation.schema import FeatureSchema
from homebody.methods import METHODS, build
from homebody.methods.fedrec import FedRec
from homebody.methods.kernels import adapt_many, indexed
from homebody.methods.serving import Serving, check, renumbered, serving_of
from homebody.privacy.queries import MANY, Attention, Choice, Mechanism, Query
from homebody.reference import Reference
from homebody.rng import Rng
from homebody.serving import interests
from homebody.serving.rows import SCALE, Part
from homebody.simulation import Simulator
from homebody.training import Trained

__all__ = ["AtHome", "Head", "Ranked", "Served", "acting", "interest_of", "item_ids", "rank"]

T = TypeVar("T")
SHARPNESS = 16.0
"""Attention is the softmax of the fit of each interest, a cosine, times this."""


def acting(built: Method | Reference) -> Method:
    """The method that ranks at home: that of the last phase. It sends no request of its own."""
    serving_of(built)
    assert isinstance(built, Method)
    method = built.phases[-1].method or built
    return replace(method, query="") if isinstance(method, FedRec) else method


@dataclass(frozen=True, eq=False)
class Head:
    """What a device needs of a model beside rows: the method, what is shared of it that is not by item, the interests,
    and how features are encoded. Everyone gets the same."""

    name: str
    """The method's name; its fields follow."""
    fields: Mapping[str, Any]
    shared: Tree
    """The shared parameters that are not by item."""
    interests: Tensor
    """(B, r) what a choice or weights are about; (0, r) if a query is about neither."""
    levels: Tensor
    """(B,) what is taken off the fit of each."""
    own_basis: bool
    """Whether the interests are the method's own, so that fits are products; otherwise they are cosines."""
    query: Query | None
    size: int
    """r, the numbers of an interest; 0: the method has none."""
    codes: Mapping[str, Mapping[str, Code]] = field(default_factory=dict)
    """How the features of people, items and contexts are encoded."""
    rows: str = ""
    """A digest of the items and rows that came with the model: those of another training do not go with it."""
    run: str = ""
    """The run over devices that it comes from, whose private states go with it; empty: none."""

    @cached_property
    def method(self) -> Method:
        """The method that ranks: that of the last phase."""
        if self.name not in METHODS:
            raise HomebodyError(
                f"Devices run methods that come with Homebody alone, so a model of '{self.name[:60]}' is not served."
            )
        return acting(build(self.name, self.fields))

    @property
    def serving(self) -> Serving:
        return serving_of(self.method)

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which this model is served: without a query, only those that need none."""
        asks = ("query", "server") if self.query is None else ()
        return tuple(way for way in self.serving.ways if way not in asks)

    @cached_property
    def mechanism(self) -> Mechanism | None:
        """How an interest is told; None: nothing is asked."""
        return None if self.query is None else self.query.mechanism(self.size, len(self.interests) or None)

    def fit(self, interest: Tensor) -> Tensor:
        """What the mechanism's device half is given of an interest (…, r): the fit of each interest, or a direction."""
        if isinstance(self.mechanism, Choice | Attention):
            if self.own_basis:
                return interest @ self.interests.T - self.levels
            fit = torch.nn.functional.normalize(interest, dim=-1) @ self.interests.T - self.levels
            return SHARPNESS * fit
        return torch.nn.functional.normalize(interest, dim=-1)

    def tell(self, interest: Tensor, rng: Rng) -> Tensor:
        """What a device tells of an interest. Of one without a direction, or with numbers that are not finite, it
        tells what a direction that is drawn evenly would: nobody sees who has no history.

        rng: the operating system's, on a device.
        """
        if self.mechanism is None:
            raise HomebodyError("This model is served without queries.")
        blank = rng.fold("blank").normal(self.size)
        sound = torch.isfinite(interest).all() & (interest != 0).any()
        return self.mechanism.device(self.fit(torch.where(sound, interest, blank)), rng.fold("query"))

    def heard(self, told: Tensor) -> Tensor:
        """(…, r) where the server looks for somebody who told this: items are ranked by the product with it."""
        assert self.mechanism is not None
        made = self.mechanism.server(told)
        return made @ self.interests if isinstance(self.mechanism, Choice | Attention) else made

    def catalogue(self, part: Part) -> Catalogue:
        """The items of a part as the method reads them, numbered from 0."""
        return self._catalogue(part.features, len(part))

    def _catalogue(self, numbers: Tree, count: int) -> Catalogue:
        people, items = self.codes.get("people", {}), self.codes.get("items", {})
        known = FeatureSchema.of(people, items, numbers).catalogue(count)
        contexts = {name: _column(code) for name, code in self.codes.get("contexts", {}).items()}
        return replace(known, contexts=contexts)

    @cached_property
    def _toy(self) -> Tree:
        """The shared parameters of two items, as the method begins: their names and shapes are what is right."""
        unknown = {name: torch.from_numpy(code.unknown(2)) for name, code in self.codes.get("items", {}).items()}
        return self.method.init_shared(self._catalogue(unknown, 2), Rng.of(0))

    def refuse_unfit(self, part: Part) -> None:
        """Refuse rows that are not those of the method: compiled loops read what shapes promise."""
        serving, tables = self.serving, self.serving.tables(self.method)
        rows = {name: value for name, value in part.tables.items() if not name.endswith(SCALE)}
        right = rows.keys() == set(tables) and all(isinstance(value, Tensor) for value in self.shared.values())
        if right and not serving.ends:  # of news, rows are what an encoder made, and all is plain torch
            toy = self._toy
            right = self.shared.keys() == serving.common_part(self.method, toy).keys()
            right = right and all(value.shape == toy[name].shape for name, value in self.shared.items())
            if serving.ways == ("table",):
                right = right and len({value.shape for value in rows.values()}) <= 1
            else:
                right = right and all(value.shape[1:] == toy[name].shape[1:] for name, value in rows.items())
        if not right:
            raise HomebodyError("The model or its rows are not those of the method: fetch the model again.")

    @cached_property
    def content(self) -> bytes:
        """As a letter of `homebody.federation.wire`."""
        header = {
            "head": 1,
            "method": self.name,
            "fields": dict(self.fields),
            "query": None if self.query is None else str(self.query),
            "size": self.size,
            "own_basis": self.own_basis,
            "rows": self.rows,
            "run": self.run,
        }
        codes = {whose: {name: code.to_json() for name, code in known.items()} for whose, known in self.codes.items()}
        parts = {
            "shared": wire.encode_tree(self.shared),
            "interests": wire.encode_tree({"interests": self.interests, "levels": self.levels}),
            "codes": json.dumps(codes).encode(),
        }
        return wire.encode_letter(header, parts)

    @cached_property
    def digest(self) -> str:
        """Its name. Rows and choices are of the model of this digest."""
        return wire.digest(self.content)

    @classmethod
    def read(cls, content: bytes) -> Head:
        """The inverse of `content`; refused unless the method is one that comes with Homebody."""
        header, parts = wire.decode_letter(content)
        try:
            query = None if header["query"] is None else Query.parse(str(header["query"]))
            codes = {
                str(whose): {str(name): Code.from_json(code) for name, code in known.items()}
                for whose, known in json.loads(parts["codes"]).items()
            }
            shared, lying = wire.decode_tree(parts["shared"]), wire.decode_tree(parts["interests"])
            name, fields, size = str(header["method"]), dict(header["fields"]), int(header["size"])
            own, rows, run = bool(header["own_basis"]), str(header["rows"]), str(header["run"])
            head = cls(name, fields, shared, lying["interests"], lying["levels"], own, query, size, codes, rows, run)
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise wire.Malformed("The model is not as it should be.") from error
        bad = head.interests.dim() != 2 or head.levels.shape != head.interests.shape[:1]
        bad = bad or (len(head.interests) > 0 and head.interests.shape[1] != head.size) or not 0 <= size < 2**20
        bad = bad or not (len(head.interests) == 0 or 2 <= len(head.interests) <= MANY)
        if bad or not all(bool(torch.isfinite(value).all()) for value in (head.interests, head.levels)):
            raise wire.Malformed("The model's interests are not as they should be.")
        _ = head.method
        return head


@dataclass(frozen=True, eq=False)
class Served:
    """A finished run as a service has it."""

    head: Head
    shared: Tree
    """All shared parameters, with the method's index."""
    catalogue: Catalogue
    ids: tuple[str, ...]
    places: Tensor
    """(N, r) where the items lie; (N, 0) if the method has no places."""
    order: Tensor
    """(N,) the items' numbers in the order that is the same for everyone, best first."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names for display, by id."""
    version: int = 1
    """Of the catalogue."""
    codes: Mapping[str, Code] = field(default_factory=dict)
    """How the items' features are written in numbers, also of those that only the server reads, such as texts."""

    @classmethod
    def of(
        cls,
        name: str,
        fields: Mapping[str, Any],
        shared: Tree,
        catalogue: Catalogue,
        query: Query | None,
        *,
        ids: Sequence[str],
        names: Mapping[str, str] | None = None,
        codes: Mapping[str, Mapping[str, Code]] | None = None,
        run: str = "",
    ) -> Served:
        """From the shared parameters of a method with these fields. run: of devices, if it is of one."""
        if name not in METHODS:
            raise HomebodyError(f"Devices run methods that come with Homebody alone, so {name} is not served.")
        method = acting(build(name, fields))
        serving = serving_of(method)
        with torch.no_grad():
            shared = indexed(method, {part: value.cpu() for part, value in shared.items()}, catalogue)
            check(method, shared, catalogue)
            order = torch.arange(catalogue.n_items)
            places = torch.zeros(catalogue.n_items, 0)
            if "shelf" in serving.ways:
                common = serving.common(method, shared, catalogue)
                order = common.nan_to_num(-torch.inf).argsort(descending=True, stable=True)
            if "query" in serving.ways:
                places = serving.places(method, shared, catalogue).float()
        needed = _needed(serving, method, catalogue, codes or {})
        common_part = serving.common_part(method, shared)
        rows = _digest(ids, serving.rows(method, shared, torch.arange(catalogue.n_items)))
        blank = places[:0], torch.zeros(0), False
        head = Head(name, dict(fields), common_part, *blank, None, places.shape[1], needed, rows, run)
        known = (codes or {}).get("items", {})
        model = cls(head, shared, catalogue, tuple(ids), places, order, names or {}, codes=known)
        return model if query is None else model.asking(query)

    def asking(self, query: Query) -> Served:
        """The same model, with this query."""
        head, serving = self.head, self.head.serving
        if "query" not in serving.ways:
            ways = " or ".join(serving.ways)
            raise HomebodyError(f"{head.name} is served by {ways} alone, without a query: leave out --query.")
        lying, levels, own = self.places[:0], torch.zeros(0), False
        if query.count:
            basis = serving.basis(self.method, self.shared)
            if basis is not None and query.interests in (None, len(basis[0])):
                (lying, levels), own = basis, True
            else:
                lying = interests.of_catalogue(self.places, self.order, query.count)
                levels = torch.zeros(len(lying))
        return replace(self, head=replace(head, query=query, interests=lying, levels=levels, own_basis=own))

    @classmethod
    def from_run(cls, path: Path, query: Query | None = None, *, trust_code: bool = False) -> Served:
        """From a finished run's folder."""
        from homebody.recipe import Recipe
        from homebody.report.record import RunFolder
        from homebody.run import reopen

        fitted, population = reopen(path, trust_code=trust_code)
        recipe = Recipe.from_toml(RunFolder.open(path).recipe_text())
        ids, names = item_ids(population), population.item_names
        called = {} if names is None else dict(zip(ids, map(str, names.to_list()), strict=True))
        return cls.of_fitted(fitted, recipe.method, recipe.fields, query, ids=ids, names=called)

    @classmethod
    def of_fitted(
        cls,
        fitted: Trained,
        name: str,
        fields: Mapping[str, Any],
        query: Query | None,
        *,
        ids: Sequence[str],
        names: Mapping[str, str] | None = None,
    ) -> Served:
        """From a fitted model of a simulation.

        Where devices rank from the parameters that they trained from, those that most of them trained from are served.
        """
        runtime, shared = fitted.runtime, fitted.shared
        assert isinstance(runtime, Simulator)
        codes = {whose: dict(runtime.split.encoded[unit].codes) for whose, unit in _UNITS.items()}
        if fitted.method.scoring.parameters == "base":
            shared = runtime.common_base(shared)
        return cls.of(name, fields, shared, runtime.catalogue, query, ids=ids, names=names, codes=codes)

    @property
    def method(self) -> Method:
        return self.head.method

    @property
    def digest(self) -> str:
        return self.head.digest

    @cached_property
    def sums(self) -> Tree:
        """What every part says of the whole table."""
        return self.head.serving.sums(self.method, self.shared)

    def rows(self, items: Tensor | Sequence[int] | None = None) -> Part:
        """The rows of these items, or of all."""
        chosen = torch.arange(len(self.ids)) if items is None else torch.as_tensor(items, dtype=torch.int64)
        rows = self.head.serving.rows(self.method, self.shared, chosen)
        features = {name: self.catalogue.items[name].values[chosen] for name in self.head.codes.get("items", {})}
        ids = [self.ids[item] for item in chosen.tolist()]
        names = {item: self.names[item] for item in ids if item in self.names}
        return Part.of(self.digest, self.version, ids, chosen, rows, self.sums, features, names)

    def shelf(self, k: int) -> Tensor:
        """The numbers of the first k items for everyone."""
        return self.order[:k]

    def lists(self, k: int) -> Tensor:
        """(B, k) the best items for each interest, best first, without the first k of the shelf."""
        return interests.lists(self.places, self.head.interests, k, self.shelf(k))

    def ask(self, told: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k items for what somebody told, and their scores: the server's half of a query that it ranks."""
        scores = self.places @ self.head.heard(told)
        best = scores.topk(min(k, len(scores)))
        return best.indices, best.values


def item_ids(population: Population) -> list[str]:
    """What the source calls each item."""
    known = population.item_ids
    return list(map(str, range(population.n_items) if known is None else known.to_list()))


class AtHome(NamedTuple):
    """What a device knows of somebody whom it ranks for."""

    items: Sequence[str] = ()
    """Ids of their items, oldest first."""
    ratings: Sequence[float] | None = None
    """Their rating of each."""
    features: Mapping[str, object] = {}
    now: Mapping[str, object] = {}
    """The circumstances in which they ask."""
    local: Tree | None = None
    """The private state of a device that trained; its rows are numbered as items are. None: it never trained."""


class Ranked(NamedTuple):
    """The best items of a part that a person does not have, by id, with their scores; and notes."""

    items: list[tuple[str, float]]
    notes: tuple[str, ...] = ()


class _Home(NamedTuple):
    """A part and a person as the method reads them."""

    shared: Tree
    local: Tree
    data: Data
    notes: tuple[str, ...]


def rank(head: Head, part: Part, person: AtHome, k: int) -> Ranked:
    """The best k items of a part for somebody, as their device computes them.

    Their own items count as far as their rows are in the part. Somebody who never trained adapts first, as a newcomer
    does.
    """
    home = _home(head, part, person)
    scores = _tried(lambda: head.method.score(home.shared, home.local, home.data, torch.arange(len(part)))).clone()
    scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    scores[home.data.items[home.data.valid]] = -torch.inf
    best = scores.argsort(descending=True, stable=True)[:k]  # equal ones, as for somebody unknown, in the part's order
    pairs = zip(best.tolist(), scores[best].tolist(), strict=True)
    return Ranked([(part.ids[place], score) for place, score in pairs if score > -torch.inf], home.notes)


def interest_of(head: Head, part: Part, person: AtHome) -> Tensor:
    """(r,) where somebody looks, as `Head.tell` takes it; zeros if nothing is known: they never trained, and the part
    has none of their items."""
    home = _home(head, part, person)
    if person.local is None and not bool(home.data.valid.any()):
        return torch.zeros(head.size)
    interest = _tried(lambda: head.serving.interest(head.method, home.shared, home.local, home.data))
    return interest.detach().float()


def _tried(work: Callable[[], T]) -> T:
    """What the method makes of a model; one that came damaged is refused in a sentence."""
    try:
        return work()
    except (RuntimeError, KeyError, IndexError, ValueError, TypeError) as error:
        raise HomebodyError(f"The model or its rows do not fit the method ({error}): fetch the model again.") from error


def _home(head: Head, part: Part, person: AtHome) -> _Home:
    if part.model != head.digest:
        raise HomebodyError("These rows are of another model: fetch the model again, and then its rows.")
    head.refuse_unfit(part)
    method, serving, notes = head.method, head.serving, list[str]()
    shared = serving.joined(head.shared, part.rows, part.whole)
    place = {item: number for number, item in enumerate(part.ids)}
    kept = [number for number, item in enumerate(person.items) if item in place]
    if missing := len(person.items) - len(kept):
        notes.append(f"{missing:,} of their {several(len(person.items), 'item')} had no rows here and did not count.")
    own = torch.tensor([place[person.items[number]] for number in kept], dtype=torch.int64)
    catalogue = _tried(lambda: head.catalogue(part))
    ratings = None
    if person.ratings is not None:
        ratings = torch.tensor([float(person.ratings[number]) for number in kept], dtype=torch.float32)
    codes = head.codes
    features, of_features = _encoded(codes.get("people", {}), person.features)
    now, of_now = _encoded(codes.get("contexts", {}), person.now)
    real = torch.ones(len(own), dtype=torch.bool)
    if not len(own):  # there is always an entry, real or not
        own, real, ratings = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool), torch.zeros(1)
    around = {name: torch.from_numpy(code.unknown(len(own))) for name, code in codes.get("contexts", {}).items()}
    data = Data(own, real, torch.unique(own[real]), catalogue, features, around, ratings, now if person.now else {})
    local = None if person.local is None else renumbered(person.local, part.items)
    begun = method.init_local(shared, Rng.of(0, "home"))
    trained = local is not None and all(_shape(local.get(name)) == _shape(value) for name, value in begun.items())
    if local is None or not trained:
        notes += [] if local is None else ["Their state is of another model: they are ranked for as a newcomer."]
        local = begun
    adapts = (method.scoring.adapts and not trained) or method.scoring.parameters == "adapted"
    if adapts and kept:
        batch = method.prepare(data, Rng.of(0, "adapt"))
        stacked = torch.utils._pytree.tree_map(lambda leaf: leaf[None], (local, batch))
        adapted = adapt_many(method, shared, *stacked)
        local = torch.utils._pytree.tree_map(lambda leaf: leaf[0], adapted)
    return _Home(shared, local, data, (*notes, *of_features, *of_now))


def _shape(value: Any) -> tuple[Any, ...]:
    """What a state's entry has in common with that of anybody else."""
    if isinstance(value, Rows):
        return "rows", value.size, *value.value.shape[1:]
    return tuple(getattr(value, "shape", "?"))


def _encoded(codes: Mapping[str, Code], said: Mapping[str, object]) -> tuple[dict[str, Tensor], list[str]]:
    found, notes = {}, []
    for name, code in codes.items():
        try:
            number, note = code.of(name, said.get(name))
        except HomebodyError as error:
            number, note = code.unknown(), f"{error} It counts as unknown."
        found[name] = torch.from_numpy(np.asarray(number))
        notes += [note] if note else []
    return found, notes


def _digest(ids: Sequence[str], tables: Tree) -> str:
    digests = [hashlib.sha256(value.contiguous().numpy()).digest() for _, value in sorted(tables.items())]
    return wire.digest(b"".join([json.dumps(list(ids)).encode(), *digests]))


def _column(code: Code) -> Column:
    return Column(torch.from_numpy(code.unknown(0)), code.size, code.kind, code.text)


_UNITS = {"people": "users", "items": "items", "contexts": "contexts"}


def _needed(
    serving: Serving, method: Method, catalogue: Catalogue, codes: Mapping[str, Mapping[str, Code]]
) -> dict[str, dict[str, Code]]:
    """The codes of the features that ranking reads."""
    taken = (*method.needs, *method.uses)
    whose = {
        "people": method.takes_in(catalogue),
        "contexts": method.takes_in(catalogue) if "contexts" in taken else (),
        "items": tuple(codes.get("items", {})) if serving.features else (),
    }
    return {
        kind: {name: code for name, code in codes.get(kind, {}).items() if name in names}
        for kind, names in whose.items()
    }

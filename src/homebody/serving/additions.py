"""Items that come after the model: what an operator gives of them, and what the model makes of it.

A row of the item table is given as it is (`vector`); a news item's is made of its text (`features`), on arrival.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from homebody.core import Catalogue, Tree
from homebody.data.codes import Code
from homebody.errors import HomebodyError, refuse_unknown
from homebody.federation import wire
from homebody.federation.service.text import one_line
from homebody.methods.fedrec import FedRec
from homebody.methods.serving import serving_of
from homebody.models.news import NewsById
from homebody.serving.model import Served
from homebody.serving.model_file import Model
from homebody.text_vectors import news_inputs

__all__ = ["GivenItem", "Lacking", "MadeItem", "make", "read_items"]

LONGEST_ID, LONGEST_NAME = 200, 500
LARGEST = 1e6
"""The largest number of a vector."""


class Lacking(HomebodyError):
    """An item does not have what the model makes its row of."""


@dataclass(frozen=True)
class GivenItem:
    """What was given of an item."""

    id: str
    name: str = ""
    features: Mapping[str, Any] = field(default_factory=dict)
    vector: Any = None
    """A list of numbers, or one for each table of the model by its name."""

    def to_json(self) -> dict[str, Any]:
        said = {"name": self.name, "features": dict(self.features), "vector": self.vector}
        return {name: value for name, value in said.items() if value}


@dataclass(frozen=True, eq=False)
class MadeItem:
    """An item with what the model made of it."""

    id: str
    name: str
    tables: Tree
    """Its row in each table."""
    features: Tree
    common: float
    place: Tensor

    @property
    def content(self) -> bytes:
        """As a letter; the id and the name are not in it."""
        tree = {f"table/{name}": value for name, value in self.tables.items()}
        tree |= {f"feature/{name}": value for name, value in self.features.items()}
        return wire.encode_tree({**tree, "common": torch.tensor(self.common), "place": self.place})

    @classmethod
    def read(cls, id_: str, name: str, content: bytes) -> MadeItem:
        tree = wire.decode_tree(content)
        tables, features = (
            {key.removeprefix(kind): value for key, value in tree.items() if key.startswith(kind)}
            for kind in ("table/", "feature/")
        )
        return cls(id_, name, tables, features, float(tree["common"]), tree["place"])


def read_items(said: Any) -> list[GivenItem]:
    """Items from JSON: an object, or a list of them.

    >>> read_items({"id": "n1", "features": {"title": "A cat"}})[0].features
    {'title': 'A cat'}
    """
    listed = said if isinstance(said, list) else [said]
    items = [_read_item(entry) for entry in listed]
    if not items:
        raise HomebodyError("There is no item: give at least one.")
    if len({item.id for item in items}) < len(items):
        twice = next(item.id for place, item in enumerate(items) if item.id in [other.id for other in items[:place]])
        raise HomebodyError(f"The item '{twice}' stands there twice; leave one out.")
    return items


def _read_item(said: Any) -> GivenItem:
    if not isinstance(said, dict):
        raise HomebodyError("An item is an object with its id, and its features or its vector.")
    refuse_unknown("part of an item", said, ("id", "name", "features", "vector"))
    id_ = one_line(said.get("id"), "An item's id", LONGEST_ID)
    name = one_line(said["name"], "An item's name", LONGEST_NAME) if said.get("name") not in (None, "") else ""
    features = said.get("features") or {}
    if not isinstance(features, dict) or not all(_is_feature(value) for value in features.values()):
        raise HomebodyError(f"The features of '{id_}' must be an object of texts, numbers or lists of texts.")
    return GivenItem(id_, name, features, said.get("vector"))


def _is_feature(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(part, str) and _is_feature(part) for part in value)
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)  # JSON knows them, UTF-8 does not
    return type(value) in (int, float) and abs(value) < 1e300


def make(model: Model, items: Sequence[GivenItem]) -> list[MadeItem]:
    """What a model makes of items."""
    served = model.served
    method, serving = served.method, serving_of(served.method)
    tables = serving.tables(method)
    if serving.ways == ("table",) and tables:
        raise Lacking(f"The rows of {served.head.name} name other items, so none can be added: serve another run.")
    catalogue = _catalogue(served.catalogue, served.codes, items)
    with torch.no_grad():
        rows = _encoded(served, catalogue, items) if isinstance(method, FedRec) else _given(served, tables, items)
        if serving.features:
            _insist_on_features(served.catalogue, items)
        shared = serving.joined({**served.shared, **served.head.shared}, rows, served.sums)
        common = serving.common(method, shared, catalogue) if "shelf" in serving.ways else torch.zeros(len(items))
        places = served.places[:0]
        if served.places.shape[1]:
            places = serving.places(method, shared, catalogue).float()
        else:
            places = places.new_zeros(len(items), 0)
    if not (bool(torch.isfinite(common).all()) and bool(torch.isfinite(places).all())):
        raise Lacking("The model makes a number that is not finite of an item: give smaller ones.")
    features = catalogue.items if serving.features else {}
    return [
        MadeItem(
            item.id,
            item.name,
            {name: value[place].clone() for name, value in rows.items()},
            {name: column.values[place].clone() for name, column in features.items()},
            float(common[place]),
            places[place].clone(),
        )
        for place, item in enumerate(items)
    ]


def _catalogue(known: Catalogue, codes: Mapping[str, Code], items: Sequence[GivenItem]) -> Catalogue:
    """The catalogue of these items alone."""
    columns = {}
    for item in items:
        refuse_unknown("feature of items", item.features, codes)
    for name, code in codes.items():
        column = known.items[name]
        numbers = [code.of(name, item.features.get(name))[0] for item in items]
        width = max((len(row) for row in numbers), default=1) if code.several else 0
        if code.several:
            numbers = [np.pad(row, (0, width - len(row)), constant_values=-1) for row in numbers]
        values = torch.from_numpy(np.stack(numbers)).to(column.values.dtype)
        texts = tuple(str(item.features.get(name) or "") for item in items) if code.kind == "sequence" else ()
        columns[name] = column._replace(values=values, texts=texts)
    return replace(known, n_items=len(items), items=columns)


def _encoded(served: Served, catalogue: Catalogue, items: Sequence[GivenItem]) -> Tree:
    """The vectors of news, from their texts."""
    method = served.method
    assert isinstance(method, FedRec)
    encoder = replace(method.news, ids=False)  # nobody was shown them: they are what their text says
    if isinstance(encoder, NewsById):
        raise Lacking("This model knows news by their ids alone, so none can be added: serve one that reads texts.")
    title = str(getattr(encoder, "title", "title"))
    for item in items:
        if not str(item.features.get(title) or "").strip():
            raise Lacking(f"'{item.id}' has no text: give its features, with a '{title}'.")
    inputs = news_inputs(encoder, catalogue, served.shared["pad"].device)
    return {"index/news": encoder.encode(served.shared, {name: rows[:-1] for name, rows in inputs.items()}).float()}


def _given(served: Served, tables: Sequence[str], items: Sequence[GivenItem]) -> Tree:
    """The rows of items, from their vectors."""
    rows: Tree = {}
    for name in tables:
        like = served.shared[name]
        rows[name] = torch.stack([_vector(item, name, tables, tuple(like.shape[1:])) for item in items]).to(like.dtype)
    return rows


def _vector(item: GivenItem, name: str, tables: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    given = item.vector.get(name) if isinstance(item.vector, dict) else item.vector if len(tables) == 1 else None
    size = math.prod(shape)
    fit = isinstance(given, list) and len(given) == size
    fit = fit and all(type(number) in (int, float) and abs(number) <= LARGEST for number in given or ())
    if not fit:
        where = "" if len(tables) == 1 else f" for each of {', '.join(tables)}"
        raise Lacking(f"'{item.id}' has no row of this model: give its vector, a list of {size} numbers{where}.")
    return torch.tensor(given, dtype=torch.float32).reshape(shape)


def _insist_on_features(known: Catalogue, items: Sequence[GivenItem]) -> None:
    for item in items:
        if known.items and not item.features:
            names = ", ".join(known.items)
            raise Lacking(f"'{item.id}' has no features, which this model reads: give some of {names}.")

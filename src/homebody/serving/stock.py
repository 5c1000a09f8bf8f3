"""What a service has in memory of one model: rows, places and answers that are made once for everybody.

One thread changes a stock; passes of the ranking run beside it. Answers are made anew after each change, as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from homebody.federation import wire
from homebody.privacy.queries import Attention, Choice
from homebody.serving.additions import MadeItem
from homebody.serving.model_file import Model
from homebody.serving.ranking import BestItems, Columns
from homebody.serving.rows import Part
from homebody.serving.settings import ServiceSettings

__all__ = ["Answers", "Stock"]

_ROUND = 1024
"""Answers of one length have a multiple of so many bytes: it changes seldom when items do."""
_SLACK = 128
"""Bytes by which the head of an answer varies with the lengths that it states."""
_SCORED, _NUMBER = 32, 26
"""The most characters around a label and its score, and of a number, as JSON."""


@dataclass
class _Grown:
    """A tensor by item that grows: as it came with the model, and what was added."""

    base: Tensor
    more: Tensor

    @classmethod
    def of(cls, base: Tensor) -> _Grown:
        return cls(base, base[:0])

    def __getitem__(self, items: Tensor) -> Tensor:
        if not len(self.more):
            return self.base[items]
        late = items >= len(self.base)
        rows = self.base[torch.where(late, 0, items)]
        rows[late] = self.more[items[late] - len(self.base)].to(rows.dtype)
        return rows

    def add(self, rows: Tensor) -> None:
        self.more = torch.cat([self.more, rows.to(self.base.dtype)])


class Stock:
    """One model, and the items that it has rows of."""

    def __init__(self, model: Model, settings: ServiceSettings) -> None:
        served, head = model.served, model.served.head
        self.source, self._settings = model, settings
        self.model, self.head, self.mechanism = head.digest, head, head.mechanism
        self.base = len(served.ids)
        """Items that came with the model."""
        self._places = {id_: place for place, id_ in enumerate(served.ids)}
        self._numbers = np.arange(self.base, dtype=np.int64)
        """The numbers by which devices know the items: of one that was added, never that of another before it."""
        self._labels = [_label(id_, served.names.get(id_, "")) for id_ in served.ids]
        self._widths = np.fromiter(map(len, self._labels), dtype=np.int32, count=self.base)
        self._alive = np.ones(self.base, dtype=np.bool_)
        self._since = np.zeros(self.base, dtype=np.int64)
        tables = head.serving.tables(served.method)
        self._tables = {name: _Grown.of(served.shared[name][: self.base]) for name in tables}
        features = head.codes.get("items", {})
        self._features = {name: _Grown.of(served.catalogue.items[name].values[: self.base]) for name in features}
        self._common = Columns(model.common[None].numpy())
        # Weights of a few interests, or directions: whichever has the fewer numbers is multiplied with every item.
        self._interests = head.interests.double() if isinstance(self.mechanism, Choice | Attention) else None
        self._weighs = self._interests is not None and len(head.interests) < head.size
        self._columns = Columns(self._as_columns(served.places))

    def __len__(self) -> int:
        return int(self._alive.sum())

    @property
    def choices(self) -> int:
        """How many lists there are."""
        return self.mechanism.basis if isinstance(self.mechanism, Choice) else 0

    @property
    def told(self) -> int:
        """How many numbers a query tells, where it is not a choice."""
        return int(getattr(self.mechanism, "size", 0))

    @property
    def half(self) -> int:
        """Rows of the better half of the shelf."""
        return self._settings.rows // 2

    def _as_columns(self, places: Tensor) -> npt.NDArray[np.float32]:
        return (self.head.interests @ places.T if self._weighs else places.T).numpy()

    def _weights(self, told: Tensor) -> npt.NDArray[np.float32]:
        """(n, weights of the columns) of what was told. In doubles: what a query is answered does not depend on those
        that wait beside it."""
        assert self.mechanism is not None
        if told.is_floating_point():
            told = told.double()
        made = self.mechanism.server(told).double()
        if self._interests is not None and not self._weighs:
            made = made @ self._interests
        return made.float().numpy()

    def best(self, told: Tensor, k: int) -> BestItems:
        """The k best items for each query."""
        return self._columns.best(self._weights(told), k)

    # Items

    def has(self, id_: str) -> bool:
        return id_ in self._places

    def add(self, made: Sequence[MadeItem], numbers: Sequence[int], versions: Sequence[int]) -> None:
        """Add items, each with its number among all that were ever added, and the version at which it came. One that
        came with the model gives way."""
        if not made:
            return
        self.remove([item.id for item in made])
        first = len(self._labels)
        for place, item in enumerate(made, first):
            self._places[item.id] = place
            self._labels.append(_label(item.id, item.name))
        self._numbers = np.append(self._numbers, self.base + np.array(numbers, dtype=np.int64))
        self._widths = np.append(self._widths, [len(label) for label in self._labels[first:]]).astype(np.int32)
        self._alive = np.append(self._alive, np.ones(len(made), dtype=np.bool_))
        self._since = np.append(self._since, np.array(versions, dtype=np.int64))
        for name, table in self._tables.items():
            table.add(torch.stack([item.tables[name] for item in made]))
        for name, feature in self._features.items():
            feature.add(_stacked([item.features[name] for item in made], feature.base))
        self._common.add(np.array([[item.common for item in made]]))
        self._columns.add(self._as_columns(torch.stack([item.place for item in made])))

    def remove(self, ids: Iterable[str]) -> None:
        """Remove items; those that are not here are none."""
        gone = np.array([self._places.pop(id_) for id_ in ids if id_ in self._places], dtype=np.int64)
        self._alive[gone] = False
        self._common.remove(gone)
        self._columns.remove(gone)

    # Rows

    def part(self, items: npt.NDArray[np.int64], version: int) -> Part:
        """The rows of these items."""
        places, numbers = torch.from_numpy(items), torch.from_numpy(self._numbers[items])
        labels = [json.loads(f"{{{self._labels[item]}}}") for item in items.tolist()]
        ids, names = [label["id"] for label in labels], {one["id"]: one["name"] for one in labels if "name" in one}
        rows = {name: table[places] for name, table in self._tables.items()}
        features = {name: feature[places] for name, feature in self._features.items()}
        return Part.of(self.model, version, ids, numbers, rows, self.source.served.sums, features, names)

    def whole_part(self, version: int, since: int | None = None) -> Part:
        """All rows, or those that came after a version."""
        wanted = self._alive if since is None else self._alive & (self._since > since)
        return self.part(wanted.nonzero()[0], version)

    @property
    def table_bytes(self) -> int:
        """About how many bytes all rows take as a letter."""
        each = sum(4 + table.base[:1].numel() for table in self._tables.values())
        each += sum(feature.base[:1].numel() * feature.base.element_size() for feature in self._features.values())
        return len(self) * (4 + each) + int(self._widths[self._alive].sum())

    def shelf(self, k: int) -> npt.NDArray[np.int64]:
        """The first k items of the order that is the same for everyone."""
        return _real(self._common.best(np.ones((1, 1)), k).items[0])

    def lists(self, shelf: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """For each choice, the items that fit it best and are not in the better half of the shelf."""
        if not self.choices:
            return []
        weights = np.eye(self.choices, dtype=np.float32) if self._weighs else self.head.interests.numpy()
        half, length = shelf[: self.half], self._settings.rows - self.half
        ranked = self._columns.best(weights, length + len(half))
        return [_real(items[~np.isin(items, half)])[:length] for items in ranked.items]

    def widest(self, count: int) -> int:
        """The most bytes that the labels of so many items take."""
        widths = self._widths[self._alive]
        few = len(widths) <= count
        return int((widths if few else np.partition(widths, len(widths) - count)[len(widths) - count :]).sum())

    def labels(self, items: Iterable[int]) -> list[str]:
        """Ids, with names where there are any, as they stand in a JSON object."""
        return [self._labels[item] for item in items]


class Answers:
    """What a stock answers at one version: made once, the same for everybody.

    Letters are made at once. The same as JSON is for people, and is made when somebody asks for it.
    """

    def __init__(self, stock: Stock, version: int, settings: ServiceSettings) -> None:
        self.stock, self.version, self._answers = stock, version, settings.answers
        shelf = stock.shelf(settings.rows)
        self._rows = settings.rows - stock.half
        parts = {"/v1/shelf": stock.part(shelf, version), "/v1/shelf?half=1": stock.part(shelf[: stock.half], version)}
        lists = {
            f"/v1/lists/{stock.model}/{choice:03d}": stock.part(items, version)
            for choice, items in enumerate(stock.lists(shelf))
        }
        self._parts = {**parts, **lists}
        self._room, self._half = stock.widest(self._rows), shelf[: stock.half]
        self._sample = stock.part(shelf[: self._rows], version) if stock.mechanism else None
        self.letters = {path: part.content for path, part in parts.items()}
        self.letters |= {path: self._padded(part) for path, part in lists.items()}
        """By path."""
        self._head = f'{{"model": "{stock.model}", "version": {version}, "ranked": ['
        self._length = len(self._head) + stock.widest(self._answers) + self._answers * _SCORED + 8
        self.ranked: list[bytes] = []
        """By choice, where the service ranks."""
        if stock.choices and "server" in stock.head.ways:
            best = stock.best(torch.arange(stock.choices), self._answers)
            self.ranked = [self.ranking(items, scores) for items, scores in zip(*best, strict=True)]

    def as_json(self, path: str) -> bytes:
        """The rows of a path for people; all lists have one length."""
        part = self._parts[path]
        text = json.dumps(_readable(part)).encode()
        if not path.startswith("/v1/lists/") or self._sample is None:
            return text
        numbers = sum(value.numel() for value in (*self._sample.tables.values(), *self._sample.features.values()))
        names = sum(len(name) + 8 for name in (*self._sample.tables, *self._sample.features))
        length = 2 * _SLACK + self._room + self._rows * (names + 64) + numbers * _NUMBER
        return text.ljust(_rounded(length))

    def ranking(self, items: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]) -> bytes:
        """The answer to a query, the same length whatever is in it."""
        pairs = zip(self.stock.labels(items[items >= 0].tolist()), scores.tolist(), strict=False)
        listed = ", ".join([f'{{{label}, "score": {score:.7g}}}' for label, score in pairs])
        return f"{self._head}{listed}]}}".ljust(self._length - 1).encode() + b"\n"

    def chosen(self, items: npt.NDArray[np.int64]) -> bytes:
        """The rows of the first of these items that are not in the better half of the shelf, as those of a list."""
        wanted = _real(items[~np.isin(items, self._half)])[: self._rows]
        return self._padded(self.stock.part(wanted, self.version))

    def _padded(self, part: Part) -> bytes:
        """A list as a letter, the same length whatever is in it: as long as the longest that could be."""
        header, parts = wire.decode_letter(part.content)
        bare = wire.encode_letter({**header, "pad": ""}, parts)
        return wire.encode_letter({**header, "pad": " " * (self._longest - len(bare))}, parts)

    @cached_property
    def _longest(self) -> int:
        assert self._sample is not None
        content = self._sample.content
        _, parts = wire.decode_letter(content)
        return _rounded(len(content) - len(parts["ids"]) - len(parts["names"]) + self._room + 8 * self._rows + _SLACK)


def _label(id_: str, name: str) -> str:
    """The id and the name of an item, as they stand in a JSON object."""
    return f'"id": {json.dumps(id_)}' + (f', "name": {json.dumps(name)}' if name and name != id_ else "")


def _real(items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return items[items >= 0]


def _stacked(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Rows of a feature as wide as the others: what is more of several codes is left out, what is missing is none."""
    if like.dim() == 1:
        return torch.stack(list(rows))
    width = like.shape[1]
    blank = rows[0].new_full((len(rows), width), -1)
    for place, row in enumerate(rows):
        blank[place, : min(width, len(row))] = row[:width]
    return blank


def _rounded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def _readable(part: Part) -> dict[str, Any]:
    """A part as JSON: rows in 8 bits with their scales, as they travel."""
    tables = {name: value.tolist() for name, value in part.tables.items()}
    features = {name: value.tolist() for name, value in part.features.items()}
    items = [
        {
            "id": id_,
            **({"name": part.names[id_]} if id_ in part.names else {}),
            "rows": {name: values[place] for name, values in tables.items()},
            **({"features": {name: values[place] for name, values in features.items()}} if features else {}),
        }
        for place, id_ in enumerate(part.ids)
    ]
    return {"model": part.model, "version": part.version, "items": items}

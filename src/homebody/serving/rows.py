"""Rows of some items as they travel: in 8 bits with a scale each, as a letter.

A row is scaled so that its largest number is ±127. So no number is off by more than 1/254 of the row's largest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from homebody.core import Tree
from homebody.errors import HomebodyError
from homebody.federation import wire

__all__ = ["SCALE", "Part", "dequantised", "join", "quantised"]

STEPS = 127
SCALE = ":scale"
"""Ends the name of the scales of a table's rows."""
IDS = 1 << 24
"""The most items of a part."""


def quantised(table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, and the scale of each.

    >>> rows, scale = quantised(torch.tensor([[0.5, -1.0], [0.0, 0.0]]))
    >>> rows.tolist(), (scale * 127).tolist()
    ([[64, -127], [0, 0]], [1.0, 0.0])
    >>> [len(none) for none in quantised(torch.zeros(0, 2))]
    [0, 0]
    """
    rows = table.reshape(len(table), math.prod(table.shape[1:])).to(torch.float32).nan_to_num(posinf=0.0, neginf=0.0)
    scale = rows.abs().amax(1) / STEPS if rows.shape[1] else rows.new_zeros(len(rows))
    steps = (rows / scale.clamp(min=1e-38)[:, None]).round().clamp(-STEPS, STEPS).to(torch.int8)
    return steps.reshape(table.shape), scale


def dequantised(rows: Tensor, scale: Tensor) -> Tensor:
    """The numbers of rows in 8 bits."""
    return rows.to(torch.float32) * scale.view(-1, *[1] * (rows.dim() - 1))


@dataclass(frozen=True, eq=False)
class Part:
    """What a device is given of some items: ids, names, rows of the tables, and features.

    >>> part = Part.of("m", 3, ["a", "b"], torch.tensor([4, 0]), {"item": torch.tensor([[1.0, 0.5], [0.0, 2.0]])})
    >>> again = Part.read(part.content)
    >>> again.ids, again.items.tolist(), again.rows["item"].tolist()
    (('a', 'b'), [4, 0], [[1.0, 0.50...], [0.0, 2.0]])
    """

    model: str
    """The digest of the model that the rows are of."""
    version: int
    """The version of the catalogue."""
    ids: tuple[str, ...]
    items: Tensor
    """(K,) the items' numbers. A number never stands for another item of the same model."""
    tables: Tree
    """The rows as they travel; of each table in 8 bits, its scales too."""
    whole: Tree = field(default_factory=dict)
    """What the model's method needs to know of all items together."""
    features: Tree = field(default_factory=dict)
    """The items' features, by name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names for display, by id, of the items that have one."""

    @classmethod
    def of(
        cls,
        model: str,
        version: int,
        ids: Sequence[str],
        items: Tensor,
        rows: Tree,
        whole: Tree | None = None,
        features: Tree | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Part:
        """From rows as they are."""
        tables: Tree = {}
        for name, value in rows.items():
            if value.is_floating_point():
                tables[name], tables[name + SCALE] = quantised(value)
            else:
                tables[name] = value
        return cls(model, version, tuple(ids), items, tables, whole or {}, features or {}, names or {})

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> Tree:
        """The rows of each table, as numbers."""
        return {
            name: dequantised(value, self.tables[name + SCALE]) if name + SCALE in self.tables else value
            for name, value in self.tables.items()
            if not name.endswith(SCALE)
        }

    @property
    def content(self) -> bytes:
        """As a letter of `homebody.federation.wire`. The same items have the same bytes."""
        named = [self.names.get(item, "") for item in self.ids] if self.names else []
        parts = {
            "ids": json.dumps(self.ids, ensure_ascii=False).encode(),
            "names": json.dumps(named, ensure_ascii=False).encode(),
            "rows": wire.encode_tree({"number": self.items.to(torch.int32), **_prefixed("row/", self.tables)}),
            "whole": wire.encode_tree(self.whole),
            "features": wire.encode_tree(self.features),
        }
        return wire.encode_letter({"part": 1, "model": self.model, "version": self.version}, parts)

    @classmethod
    def read(cls, content: bytes) -> Part:
        """The inverse of `content`; refused unless everything fits together."""
        header, parts = wire.decode_letter(content)
        model, version = header.get("model"), header.get("version")
        if not isinstance(model, str) or type(version) is not int:
            raise wire.Malformed("The part does not name its model and version.")
        if {*parts} != {"ids", "names", "rows", "whole", "features"}:
            raise wire.Malformed("The part lacks rows, or has more than rows.")
        ids, names = (_texts(parts[name]) for name in ("ids", "names"))
        rows, whole, features = (wire.decode_tree(parts[name]) for name in ("rows", "whole", "features"))
        number = rows.pop("number", None)
        if not isinstance(number, Tensor) or number.dtype != torch.int32 or number.shape != (len(ids),):
            raise wire.Malformed("The part does not number its items.")
        tables = {name.removeprefix("row/"): value for name, value in rows.items()}
        if any(not isinstance(value, Tensor) for value in (*tables.values(), *whole.values(), *features.values())):
            raise wire.Malformed("A part has whole tensors.")
        if any(value.dim() < 1 or len(value) != len(ids) for value in (*tables.values(), *features.values())):
            raise wire.Malformed("The part has not one row for each item.")
        if len(set(ids)) != len(ids) or len(torch.unique(number)) != len(ids) or (len(ids) and number.min() < 0):
            raise wire.Malformed("The part has an item twice.")
        for name, value in tables.items():
            if name.endswith(SCALE) and (value.dtype != torch.float32 or value.dim() != 1):
                raise wire.Malformed("The part has scales that are no numbers.")
            if value.dtype == torch.int8 and name + SCALE not in tables:
                raise wire.Malformed("The part has rows in 8 bits without their scales.")
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise wire.Malformed("The part has numbers that are not finite.")
        if names and len(names) != len(ids):
            raise wire.Malformed("The part has names for other items.")
        called = {item: name for item, name in zip(ids, names, strict=False) if name}
        return cls(model, version, tuple(ids), number.to(torch.int64), tables, whole, features, called)

    def only(self, places: Tensor) -> Part:
        """The rows at these places alone."""
        chosen = places.tolist()
        ids = tuple(self.ids[place] for place in chosen)
        return replace(
            self,
            ids=ids,
            items=self.items[places],
            tables={name: value[places] for name, value in self.tables.items()},
            features={name: value[places] for name, value in self.features.items()},
            names={item: self.names[item] for item in ids if item in self.names},
        )


def join(first: Part, *others: Part) -> Part:
    """The items of several parts of one model; of an item that is in several, the first part's rows."""
    for other in others:
        if other.model != first.model:
            raise HomebodyError("These rows are of two models: fetch them again, all of the newer one.")
        if _widths(other) != _widths(first):
            raise wire.Malformed("Rows of one model have other tables or features than others.")
        known = set(first.ids)
        new = other.only(torch.tensor([n for n, item in enumerate(other.ids) if item not in known], dtype=torch.int64))
        if not new.ids:
            continue
        first = replace(
            first,
            ids=first.ids + new.ids,
            items=torch.cat([first.items, new.items]),
            tables={name: torch.cat([value, new.tables[name]]) for name, value in first.tables.items()},
            features={name: torch.cat([value, new.features[name]]) for name, value in first.features.items()},
            names={**first.names, **new.names},
        )
    return first


def _widths(part: Part) -> list[tuple[str, torch.Size]]:
    """What a part has of each item, and how wide that is."""
    return sorted((name, value.shape[1:]) for name, value in (*part.tables.items(), *part.features.items()))


def _prefixed(start: str, tree: Tree) -> Tree:
    return {f"{start}{name}": value for name, value in tree.items()}


def _texts(content: bytes) -> list[str]:
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise wire.Malformed("The part's ids or names are not a list.") from error
    if not isinstance(found, list) or len(found) > IDS or not all(isinstance(text, str) for text in found):
        raise wire.Malformed("The part's ids or names are not a list of texts.")
    return found

"""The feature schema that a server sends to devices: how people's features are encoded, and the items' features.

A schema holds nothing of anybody: which features people may have and which values those take is the operator's to say.
A device encodes its people by it, and what they say of themselves stays there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from homebody.core import Catalogue, Column
from homebody.data.codes import Code, Numbers
from homebody.data.encode import Encoded, EncodedColumn
from homebody.errors import HomebodyError
from homebody.federation import wire

__all__ = ["FeatureSchema"]


@dataclass(frozen=True, eq=False)
class FeatureSchema:
    """Features as a server and its devices know them.

    >>> schema = FeatureSchema({"job": Code("one", ("cook", "vet"))}, {"colour": Code("one", ("red",))},
    ...     {"colour": np.array([1, 0, 1])})
    >>> again = FeatureSchema.read(schema.content)
    >>> again.people == schema.people, again.catalogue(4).items["colour"].values.tolist()
    (True, [1, 0, 1, 0])
    """

    people: Mapping[str, Code] = field(default_factory=dict)
    items: Mapping[str, Code] = field(default_factory=dict)
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    """The items' own, a row for each of the first; of those that came later nothing is known."""

    @cached_property
    def content(self) -> bytes:
        """As it travels and is stored."""
        codes = {
            whose: {name: code.to_json() for name, code in known.items()}
            for whose, known in (("people", self.people), ("items", self.items))
        }
        numbers = {name: torch.from_numpy(values) for name, values in self.numbers.items()}
        return wire.encode_letter({}, {"codes": json.dumps(codes).encode(), "items": wire.encode_tree(numbers)})

    @cached_property
    def digest(self) -> str:
        """Its name; empty where there is nothing in it."""
        return wire.digest(self.content) if self.people or self.items else ""

    @classmethod
    def read(cls, content: bytes) -> FeatureSchema:
        """Read a schema; an invalid one is a malformed letter: a code beyond its table would read another's row."""
        _, parts = wire.decode_letter(content)
        try:
            read = json.loads(parts["codes"])
            people, items = (
                {str(name): Code.from_json(code) for name, code in read[whose].items()} for whose in ("people", "items")
            )
            numbers = wire.decode_tree(parts["items"])
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, HomebodyError) as error:
            raise wire.Malformed("The feature schema is not as it should be.") from error
        return cls.of(people, items, numbers)

    @classmethod
    def of(cls, people: Mapping[str, Code], items: Mapping[str, Code], numbers: Mapping[str, Tensor]) -> FeatureSchema:
        """A schema of these codes; numbers that they do not have are a malformed letter."""
        if numbers.keys() != items.keys() or len({len(values) for values in numbers.values()}) > 1:
            raise wire.Malformed("The schema's items do not have the features that it names.")
        for name, code in items.items():
            _refuse_misfit(code, numbers[name])
        return cls(people, items, {name: values.numpy() for name, values in numbers.items()})

    def catalogue(self, n_items: int) -> Catalogue:
        """The catalogue of the first `n_items` items."""
        values = {name: torch.from_numpy(self._of_items(name, n_items)) for name in self.items}
        items = {name: Column(values[name], *_form(code), words=_words(code)) for name, code in self.items.items()}
        nobody = {name: torch.from_numpy(code.unknown(0)) for name, code in self.people.items()}
        people = {name: Column(nobody[name], *_form(code), code.view) for name, code in self.people.items()}
        return Catalogue(n_items, items, people)

    def encoded(self, profiles: Sequence[Mapping[str, str]], n_items: int) -> dict[str, Encoded]:
        """These people and the items as `Split.coded` takes them; what the schema does not know of is left out."""
        rows = [self._of_person(profile)[0] for profile in profiles]
        values = {name: _stacked([row[name] for row in rows], code) for name, code in self.people.items()}
        people = {name: EncodedColumn(values[name], *_form(code), code.view) for name, code in self.people.items()}
        items = {name: EncodedColumn(self._of_items(name, n_items), *_form(code)) for name, code in self.items.items()}
        encoded = {"users": Encoded(people, (), self.people), "items": Encoded(items, (), self.items)}
        return {**encoded, "contexts": Encoded({}, ())}

    def notes(self, profile: Mapping[str, str]) -> list[str]:
        """A sentence for each part of a profile that is ignored."""
        missing = "The server's model has no feature '{}' (it has {}): it counts for nothing."
        names, strange = ", ".join(self.people) or "none", [name for name in profile if name not in self.people]
        return [*(missing.format(name, names) for name in strange), *self._of_person(profile)[1]]

    def _of_person(self, profile: Mapping[str, str]) -> tuple[dict[str, Numbers], list[str]]:
        """Somebody's numbers, and what of their profile is unknown. What cannot be read is unknown too: it was said
        before anybody knew how, and must not keep a person from taking part."""
        row, notes = {}, []
        for name, code in self.people.items():
            try:
                row[name], note = code.of(name, profile.get(name))
            except HomebodyError as error:
                row[name], note = code.unknown(), f"{error} It counts as unknown."
            notes += [note] if note else []
        return row, notes

    def _of_items(self, name: str, n_items: int) -> Numbers:
        numbers = self.numbers[name][:n_items]
        return np.concatenate([numbers, self.items[name].unknown(n_items - len(numbers)).astype(numbers.dtype)])


def _words(code: Code) -> tuple[str, ...]:
    return code.values if code.kind == "sequence" else ()


def _form(code: Code) -> tuple[int, Any, bool]:
    return code.size, code.kind, code.text


def _stacked(rows: Sequence[Numbers], code: Code) -> Numbers:
    """Rows of people, those of several codes padded to the widest."""
    if not rows:
        return code.unknown(0)
    if not code.several:
        return np.stack(rows)
    width = max(len(row) for row in rows)
    return np.stack([np.pad(row, (0, width - len(row)), constant_values=-1) for row in rows])


def _refuse_misfit(code: Code, values: Any) -> None:
    fit = isinstance(values, Tensor) and values.ndim == (2 if code.several else 1)
    fit = fit and values.dtype == (torch.float32 if code.kind == "number" else torch.int64)
    if fit and code.kind == "number":
        fit = bool(torch.isfinite(values).all())
    elif fit and values.numel():
        least = -1 if code.several else 0
        fit = least <= int(values.min()) and int(values.max()) < code.size
        fit = fit and (not code.several or values.shape[1] == code.width)
    if not fit:
        raise wire.Malformed("The schema has numbers of an item that its feature does not have.")

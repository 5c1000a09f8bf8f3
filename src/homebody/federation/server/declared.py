"""Which features a server's model knows: its items', as their file has them, and people's, as its operator says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from homebody.data.codes import Code
from homebody.data.encode import Encoded, encode
from homebody.data.features import Features
from homebody.data.kinds import as_kind, guess_of_items
from homebody.data.vocabularies import parse
from homebody.errors import HomebodyError
from homebody.federation.schema import FeatureSchema

__all__ = ["declare", "features_of_items", "person_code"]


def declare(items: Features | None, people: Features | None, given: Sequence[str]) -> FeatureSchema:
    """The sheet of a server: texts are left out, and so are circumstances, which devices do not note.

    people: those of a dataset by name, whose values are known to everyone. given: NAME=VALUE,VALUE in their place.
    """
    of_items, of_people = (_encoded(table, unit) for table, unit in ((items, "items"), (people, "users")))
    named = dict(person_code(text) for text in given)
    if len(named) < len(given):
        raise HomebodyError("--person-feature says twice what a feature of people is; leave one out.")
    return FeatureSchema(
        {**of_people.codes, **named},
        of_items.codes,
        {name: column.values for name, column in of_items.columns.items()},
    )


def person_code(text: str) -> tuple[str, Code]:
    """What `--person-feature` says: categories, several of them at once, hashed ones, or a number with its scale.

    >>> person_code("gender=F,M")[1].values, person_code("town=hash:64")[1].size
    (('F', 'M'), 65)
    >>> person_code("height=number:170:10")[1].of("height", "180")[0].tolist()
    1.0
    >>> person_code("hobbies=many:chess,golf")[1].kind
    'many'
    """
    name, equals, said = (part.strip() for part in text.partition("="))
    try:
        found = parse(name, said) if equals and name else None
    except HomebodyError:
        if said.rpartition("file:")[1]:
            raise
        found = None
    if isinstance(found, Code) and not found.text:
        return name, found
    raise HomebodyError(
        f"--person-feature takes NAME=VALUE,VALUE, NAME=many:VALUE,VALUE, NAME=hash:SIZE, NAME=number:MEAN:SPREAD or "
        f"NAME=range:LOW:HIGH, not '{text}'."
    )


def features_of_items(path: Path, table: pl.DataFrame, others: Sequence[str]) -> Features | None:
    """The other columns of a file of items."""
    from homebody.data.columns import Column

    columns = [Column(table[name], "item", path) for name in others]
    kinds = {column.values.name: guess_of_items(column) for column in columns}
    made = {column.values.name: as_kind(column, kinds[column.values.name]) for column in columns}
    return Features(pl.DataFrame(made), kinds) if made else None


def _encoded(features: Features | None, unit: str) -> Encoded:
    if features is None:
        return Encoded({}, ())
    kept = [name for name, kind in features.kinds.items() if kind != "text"]
    declared = {name: one for name, one in features.declared.items() if name in kept}
    chosen = Features(features.table.select(kept), {name: features.kinds[name] for name in kept}, declared)
    return encode(chosen, np.ones(len(chosen), dtype=np.bool_), unit=unit)

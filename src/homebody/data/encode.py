"""Features as numbers for models. What was not seen in training is unknown, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.codes import Code, Scale
from homebody.data.features import Features
from homebody.data.words import Pairs, codes, listed, trigrams
from homebody.errors import HomebodyError

__all__ = ["Encoded", "EncodedColumn", "encode"]


class EncodedColumn(NamedTuple):
    """One column as numbers.

    - one: (N,) int64 codes; 0 is unknown or missing.
    - many: (N, W) int64 codes in ascending order, then -1; 0 is never used.
    - number: (N,) float32.
    """

    values: npt.NDArray[Any]
    size: int
    """Codes are below it: the vocabulary's length and one more; 1 for numbers."""
    kind: Literal["one", "many", "number"]
    text: bool = False
    """Whether the codes are pieces of a text."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Columns of `Features` as numbers, and sentences about what is unknown or missing in them."""

    columns: dict[str, EncodedColumn]
    notes: tuple[str, ...]
    vocabularies: dict[str, pl.Series] = field(default_factory=dict)
    """What the codes of a column mean: code c is in place c - 1."""
    scales: dict[str, Scale] = field(default_factory=dict)
    """How the numbers of a column were standardised."""

    @property
    def codes(self) -> dict[str, Code]:
        """How each column is written in numbers, for whoever comes later."""
        return {
            name: Code(
                column.kind,
                tuple(self.vocabularies[name].cast(pl.String)) if name in self.vocabularies else (),
                column.text,
                self.scales.get(name, Scale()),
                column.values.shape[1] if column.kind == "many" else 1,
            )
            for name, column in self.columns.items()
        }

    def rows(self, numbers: Mapping[str, npt.NDArray[Any]]) -> Encoded:
        """These rows in place of its own, encoded as they were."""
        return replace(self, columns={name: one._replace(values=numbers[name]) for name, one in self.columns.items()})


def encode(features: Features, known: npt.NDArray[np.bool_], *, unit: str = "rows") -> Encoded:
    """Numbers for every row, by what the `known` rows (of training users, or items) have.

    Categories are numbered from 1 in sorted order. A text is the set of the character 3-grams of its words
    (`trigrams`). Numbers are standardised by the known rows' mean and standard deviation; a missing one is 0,
    the mean. `unit` is what the notes call the rows.

    >>> jobs = Features(pl.DataFrame({"job": ["cook", "vet", None, "spy"]}), {"job": "categorical"})
    >>> found = encode(jobs, np.array([True, True, True, False]), unit="users")
    >>> found.columns["job"].values.tolist(), found.columns["job"].size
    ([1, 2, 0, 0], 3)
    >>> found.notes
    ("1 of 4 users has no 'job'; it counts as unknown.",
     "1 of 4 users has a 'job' that none in training has; it counts as unknown.")
    """
    if known.shape != (len(features),) or known.dtype != np.bool_:
        raise HomebodyError(
            f"The known rows must be marked by {len(features)} booleans, not {known.shape} {known.dtype}."
        )
    columns: dict[str, EncodedColumn] = {}
    vocabularies: dict[str, pl.Series] = {}
    scales: dict[str, Scale] = {}
    notes: list[str] = []
    for name, kind in features.kinds.items():
        values, note = features.table[name], _Notes(name, unit, len(features), notes)
        if kind == "numeric":
            columns[name], scales[name] = _number(values, known, note)
        elif kind == "categorical":
            columns[name], vocabularies[name] = _one(values, known, note)
        elif kind == "multi-hot":
            columns[name], vocabularies[name] = _many(listed(values), values, known, note, "value")
        else:
            column, vocabularies[name] = _many(trigrams(values), values, known, note, "3-gram")
            columns[name] = column._replace(text=True)
    return Encoded(columns, tuple(notes), vocabularies, scales)


@dataclass(frozen=True)
class _Notes:
    column: str
    unit: str
    of: int
    kept: list[str]

    def add(self, count: int, what: str) -> None:
        if count:
            has = "has" if count == 1 else "have"
            self.kept.append(f"{count:,} of {self.of:,} {self.unit} {has} {what}.")


def _one(values: pl.Series, known: npt.NDArray[np.bool_], note: _Notes) -> tuple[EncodedColumn, pl.Series]:
    if values.dtype in (pl.Categorical, pl.Enum):
        # Those sort by their first appearance, which the order of rows decides.
        values = values.cast(pl.String)
    vocabulary = values.filter(pl.Series(known)).drop_nulls().unique().sort()
    coded = codes(values, vocabulary)
    missing = values.is_null().to_numpy()
    note.add(int(missing.sum()), f"no '{note.column}'; it counts as unknown")
    unseen = int(((coded == 0) & ~missing).sum())
    note.add(unseen, f"a '{note.column}' that none in training has; it counts as unknown")
    return EncodedColumn(coded, len(vocabulary) + 1, "one"), vocabulary


def _many(
    pairs: Pairs, values: pl.Series, known: npt.NDArray[np.bool_], note: _Notes, what: str
) -> tuple[EncodedColumn, pl.Series]:
    seen = np.zeros(len(pairs.distinct), dtype=np.bool_)
    seen[pairs.value[known[pairs.row]]] = True
    vocabulary, size = pairs.distinct.filter(pl.Series(seen)), int(seen.sum()) + 1
    usable = seen[pairs.value]
    # One number for a row and its code: the set of them, sorted, is the matrix read line by line.
    both = np.sort(pairs.row[usable] * size + np.cumsum(seen)[pairs.value[usable]])
    both = both[np.diff(both, prepend=-1) > 0]
    row, code = both // size, both % size
    counts = np.bincount(row, minlength=len(values))
    matrix = np.full((len(values), max(1, int(counts.max(initial=0)))), -1, dtype=np.int64)
    matrix[row, np.arange(len(both)) - (np.cumsum(counts) - counts)[row]] = code
    note.add(values.null_count(), f"no '{note.column}'")
    note.add(
        int(np.count_nonzero(np.bincount(pairs.row[~usable]))),
        f"a {what} of '{note.column}' that none in training has ({int((~seen).sum()):,} different); it is dropped",
    )
    return EncodedColumn(matrix, size, "many"), vocabulary


def _number(values: pl.Series, known: npt.NDArray[np.bool_], note: _Notes) -> tuple[EncodedColumn, Scale]:
    number = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
    missing = ~np.isfinite(number)
    seen = number[known & ~missing]
    largest = float(np.abs(seen).max(initial=0.0)) or 1.0
    mean, spread = (float((seen / largest).mean()), float((seen / largest).std())) if len(seen) else (0.0, 0.0)
    note.add(int(missing.sum()), f"no '{note.column}'; it counts as the mean")
    if len(seen) == 0 or seen.min() == seen.max():
        spread = 1.0
        same = "the same for all" if len(seen) else "unknown of all"
        note.kept.append(f"'{note.column}' is {same} {note.unit} in training, so it says nothing.")
    scale = Scale(largest, mean, spread or 1.0)
    return EncodedColumn(scale.standard(number), 1, "number"), scale

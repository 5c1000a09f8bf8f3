"""Features as numbers for models. What their vocabularies do not have is unknown, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.codes import Code, Numbers, Pairs, Scale, listed, places, trigrams, words
from homebody.data.population import Features, Kind
from homebody.data.vocabularies import Counted, Declaration, Words
from homebody.errors import HomebodyError
from homebody.rng import Rng

__all__ = ["Encoded", "EncodedColumn", "encode"]


class EncodedColumn(NamedTuple):
    """One column as numbers.

    - one: (N,) int64 codes; 0 is unknown or missing.
    - many: (N, W) int64 codes in ascending order, then -1; 0 is never used.
    - number: (N,) float32.
    - sequence: (N, W) int64 codes in the order of the text, then -1; 0 is an unknown word.
    """

    values: npt.NDArray[Any]
    size: int
    """Codes are below it: the vocabulary's length and one more; 1 for numbers."""
    kind: Literal["one", "many", "number", "sequence"]
    text: bool = False
    """Whether the codes are pieces of a text."""
    view: str = ""
    """The view that it is in, if any."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Columns of `Features` as numbers, and sentences about what is unknown or missing in them."""

    columns: dict[str, EncodedColumn]
    notes: tuple[str, ...]
    codes: Mapping[str, Code] = field(default_factory=dict)
    """How each column is written in numbers, for whoever comes later."""

    def rows(self, numbers: Mapping[str, npt.NDArray[Any]]) -> Encoded:
        """These rows in place of its own, encoded as they were."""
        return replace(self, columns={name: old._replace(values=numbers[name]) for name, old in self.columns.items()})


def encode(
    features: Features,
    known: npt.NDArray[np.bool_],
    *,
    unit: str = "rows",
    owners: npt.NDArray[np.int64] | None = None,
    rng: Rng | None = None,
) -> Encoded:
    """Numbers for every row, by the vocabularies that are declared, or by what the `known` rows have.

    The known rows are those of training users, items or interactions. Categories are numbered from 1, in sorted
    order where they are found. A text is the set of the character 3-grams of its words (`trigrams`). A sequence is its
    first words in their order; the words of all rows are its vocabulary, because texts of items are public. Numbers are
    standardised by their declared scale, or by the known rows' mean and standard deviation; a missing one is 0, the
    mean. `unit` is what the notes call the rows. owners: whose each row is, where a person may have several. rng:
    what noise on counts is drawn from.

    >>> jobs = Features(pl.DataFrame({"job": ["cook", "vet", None, "spy"]}), {"job": "categorical"})
    >>> encoded = encode(jobs, np.array([True, True, True, False]), unit="users")
    >>> encoded.columns["job"].values.tolist(), encoded.columns["job"].size
    ([1, 2, 0, 0], 3)
    >>> encoded.notes
    ("1 of 4 users has no 'job'; it counts as unknown.",
     "1 of 4 users has a 'job' that none in training has; it counts as unknown.")
    """
    if known.shape != (len(features),) or known.dtype != np.bool_:
        raise HomebodyError(
            f"The known rows must be marked by {len(features)} booleans, not {known.shape} {known.dtype}."
        )
    columns: dict[str, EncodedColumn] = {}
    written: dict[str, Code] = {}
    notes: list[str] = []
    owner = np.arange(len(features)) if owners is None else owners
    for name, kind in features.kinds.items():
        said, values = features.declared.get(name), features.table[name]
        note = _Notes(name, unit, len(features), notes, listed=isinstance(said, Code))
        if kind == "numeric":
            code = said if isinstance(said, Code) else _scaled(values, known, note)
            numbers = _number(values, code, note)
        elif kind == "sequence":
            numbers, code = _sequence(values, said, note)
        else:
            pairs = _pairs(values, kind)
            if isinstance(said, Code):
                code = said
            else:
                kept = np.zeros(len(pairs.distinct), dtype=np.bool_)
                usable = known[pairs.row]
                if isinstance(said, Counted):
                    drawn = (rng or Rng.of(0)).fold("vocabulary", name).private
                    kept = said.kept(owner[pairs.row[usable]], pairs.value[usable], len(kept), drawn)
                else:
                    kept[pairs.value[usable]] = True
                vocabulary = pairs.distinct.filter(pl.Series(kept)).cast(pl.String)
                code = Code("one" if kind == "categorical" else "many", tuple(vocabulary), text=kind == "text")
            numbers = (_one if code.kind == "one" else _many)(pairs, values, code, note)
            code = replace(code, width=numbers.shape[1] if code.kind == "many" else 1)
        view = features.views.get(name, "")
        columns[name] = EncodedColumn(numbers, code.size, code.kind, code.text, view)
        written[name] = replace(code, view=view) if view else code
    return Encoded(columns, tuple(notes), written)


@dataclass(frozen=True)
class _Notes:
    column: str
    unit: str
    of: int
    kept: list[str]
    listed: bool

    @property
    def strange(self) -> str:
        """Why a value is unknown."""
        return "its vocabulary does not list" if self.listed else "none in training has"

    def add(self, count: int, what: str) -> None:
        if count:
            has = "has" if count == 1 else "have"
            self.kept.append(f"{count:,} of {self.of:,} {self.unit} {has} {what}.")


def _pairs(values: pl.Series, kind: Kind) -> Pairs:
    """Which rows have which values."""
    if kind == "multi-hot":
        return listed(values)
    if kind == "text":
        return trigrams(values)
    if values.dtype in (pl.Categorical, pl.Enum):
        # Those sort by their first appearance, which the order of rows decides.
        values = values.cast(pl.String)
    distinct = values.drop_nulls().unique().sort()
    place = places(values, distinct) - 1
    row = np.flatnonzero(place >= 0)
    return Pairs(row, place[row], distinct)


def _places(pairs: Pairs, code: Code) -> npt.NDArray[np.int64]:
    """The code of each pair; 0 where the value has none."""
    place = np.array([code.place(value) for value in pairs.distinct.cast(pl.String)], dtype=np.int64)
    return place[pairs.value]


def _one(pairs: Pairs, values: pl.Series, code: Code, note: _Notes) -> Numbers:
    coded = np.zeros(len(values), dtype=np.int64)
    coded[pairs.row] = _places(pairs, code)
    note.add(values.null_count(), f"no '{note.column}'; it counts as unknown")
    unseen = len(pairs.row) - int(np.count_nonzero(coded))
    note.add(unseen, f"a '{note.column}' that {note.strange}; it counts as unknown")
    return coded


def _many(pairs: Pairs, values: pl.Series, code: Code, note: _Notes) -> Numbers:
    place, size = _places(pairs, code), code.size
    usable = place > 0
    # One number for a row and its code: the set of them, sorted, is the matrix read line by line.
    both = np.sort(pairs.row[usable] * size + place[usable])
    both = both[np.diff(both, prepend=-1) > 0]
    row, column = both // size, both % size
    counts = np.bincount(row, minlength=len(values))
    matrix = np.full((len(values), max(1, int(counts.max(initial=0)))), -1, dtype=np.int64)
    matrix[row, np.arange(len(both)) - (np.cumsum(counts) - counts)[row]] = column
    note.add(values.null_count(), f"no '{note.column}'")
    lost = int(np.count_nonzero(np.bincount(pairs.row[~usable])))
    different = len(np.unique(pairs.value[~usable]))
    what = "3-gram" if code.text else "value"
    note.add(lost, f"a {what} of '{note.column}' that {note.strange} ({different:,} different); it is dropped")
    return matrix


def _sequence(values: pl.Series, said: Declaration | None, note: _Notes) -> tuple[Numbers, Code]:
    most = said.width if isinstance(said, Code) else (said if isinstance(said, Words) else Words()).count
    pairs = listed(words(values).list.head(most))  # in the order of the texts
    counts = np.bincount(pairs.row, minlength=len(values))
    code = said if isinstance(said, Code) else None
    code = code or Code("sequence", tuple(pairs.distinct), text=True, width=max(1, int(counts.max(initial=0))))
    matrix = np.full((len(values), code.width), -1, dtype=np.int64)
    matrix[pairs.row, np.arange(len(pairs.row)) - (np.cumsum(counts) - counts)[pairs.row]] = _places(pairs, code)
    note.add(int((counts == 0).sum()), f"no words of '{note.column}'")
    strange = int((matrix == 0).any(1).sum())
    note.add(strange, f"a word of '{note.column}' that {note.strange}; it counts as unknown")
    return matrix, code


def _amounts(values: pl.Series) -> npt.NDArray[np.float64]:
    return np.asarray(values.cast(pl.Float64).fill_null(np.nan).to_numpy())


def _scaled(values: pl.Series, known: npt.NDArray[np.bool_], note: _Notes) -> Code:
    """By the mean and the standard deviation of the known rows."""
    number = _amounts(values)
    seen = number[known & np.isfinite(number)]
    largest = float(np.abs(seen).max(initial=0.0)) or 1.0
    mean, spread = (float((seen / largest).mean()), float((seen / largest).std())) if len(seen) else (0.0, 0.0)
    if len(seen) == 0 or seen.min() == seen.max():
        spread = 1.0
        same = "the same for all" if len(seen) else "unknown of all"
        note.kept.append(f"'{note.column}' is {same} {note.unit} in training, so it says nothing.")
    return Code("number", scale=Scale(largest, mean, spread or 1.0))


def _number(values: pl.Series, code: Code, note: _Notes) -> Numbers:
    number = _amounts(values)
    note.add(int((~np.isfinite(number)).sum()), f"no '{note.column}'; it counts as the mean")
    return code.scale.standard(number)

"""Features as numbers for models. What was not seen in training is unknown, and counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.features import Features
from homebody.errors import HomebodyError

__all__ = ["Encoded", "EncodedColumn", "Pairs", "encode", "trigrams"]

# Whatever is no letter, accent or digit parts two words.
WORDS = r"[\p{L}\p{M}\p{N}]+"
BOUNDARY = "#"


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
    notes: list[str] = []
    for name, kind in features.kinds.items():
        values, note = features.table[name], _Notes(name, unit, len(features), notes)
        if kind == "numeric":
            columns[name] = _number(values, known, note)
        elif kind == "categorical":
            columns[name], vocabularies[name] = _one(values, known, note)
        elif kind == "multi-hot":
            columns[name], vocabularies[name] = _many(_listed(values), values, known, note, "value")
        else:
            column, vocabularies[name] = _many(trigrams(values), values, known, note, "3-gram")
            columns[name] = column._replace(text=True)
    return Encoded(columns, tuple(notes), vocabularies)


class Pairs(NamedTuple):
    """Which rows have which values; a pair may stand several times."""

    row: npt.NDArray[np.int64]
    value: npt.NDArray[np.int64]
    """A place in `distinct`."""
    distinct: pl.Series
    """The values, sorted."""


def trigrams(texts: pl.Series) -> Pairs:
    """Each row's character 3-grams: those of its words, in lower case and with a # at both ends.

    Words are runs of letters and digits, as in DSSM's word hashing (Huang et al. 2013).

    >>> found = trigrams(pl.Series(["A cat!"]))
    >>> found.distinct.gather(found.value).to_list()
    ['#a#', '#ca', 'cat', 'at#']
    """
    words = _listed(texts.cast(pl.String).str.to_lowercase().str.extract_all(WORDS))
    # People use the same words again and again: each is cut up once.
    marked = pl.DataFrame({"word": pl.int_range(len(words.distinct), eager=True), "text": words.distinct}).select(
        "word", (BOUNDARY + pl.col("text") + BOUNDARY).alias("text")
    )
    marked = marked.with_columns(pl.col("text").str.len_chars().alias("length"))
    pieces = [pl.DataFrame(schema={"word": pl.Int64, "gram": pl.String})]
    for start in range(int(marked["length"].to_numpy().max(initial=2)) - 2):
        marked = marked.filter(pl.col("length") >= start + 3)
        pieces.append(marked.select("word", pl.col("text").str.slice(start, 3).alias("gram")))
    grams = pl.concat(pieces).sort("word", maintain_order=True)
    distinct = grams["gram"].unique().sort()
    gram = _codes(grams["gram"], distinct) - 1
    many = np.bincount(grams["word"].to_numpy(), minlength=len(words.distinct))
    # For each word of each row, the places of that word's grams.
    length = many[words.value]
    begin = np.repeat((np.cumsum(many) - many)[words.value] - (np.cumsum(length) - length), length)
    return Pairs(np.repeat(words.row, length), gram[begin + np.arange(len(begin))], distinct)


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


def _listed(lists: pl.Series) -> Pairs:
    """The pairs that lists of texts are."""
    table = pl.DataFrame({"row": pl.int_range(len(lists), eager=True), "value": lists})
    table = table.filter(pl.col("value").list.len() > 0).explode("value").drop_nulls()
    distinct = table["value"].unique().sort()
    return Pairs(table["row"].to_numpy(), _codes(table["value"], distinct) - 1, distinct)


def _codes(values: pl.Series, vocabulary: pl.Series) -> npt.NDArray[np.int64]:
    """The place of each value in the vocabulary, from 1; 0 where it has none."""
    index = pl.DataFrame({"value": vocabulary, "code": pl.int_range(1, len(vocabulary) + 1, eager=True)})
    found = values.alias("value").to_frame().join(index, on="value", how="left", maintain_order="left")
    return found["code"].fill_null(0).to_numpy().astype(np.int64)


def _one(values: pl.Series, known: npt.NDArray[np.bool_], note: _Notes) -> tuple[EncodedColumn, pl.Series]:
    if values.dtype in (pl.Categorical, pl.Enum):
        # Those sort by their first appearance, which the order of rows decides.
        values = values.cast(pl.String)
    vocabulary = values.filter(pl.Series(known)).drop_nulls().unique().sort()
    codes = _codes(values, vocabulary)
    missing = values.is_null().to_numpy()
    note.add(int(missing.sum()), f"no '{note.column}'; it counts as unknown")
    unseen = int(((codes == 0) & ~missing).sum())
    note.add(unseen, f"a '{note.column}' that none in training has; it counts as unknown")
    return EncodedColumn(codes, len(vocabulary) + 1, "one"), vocabulary


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


def _number(values: pl.Series, known: npt.NDArray[np.bool_], note: _Notes) -> EncodedColumn:
    number = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
    missing = ~np.isfinite(number)
    seen = number[known & ~missing]
    # By the largest first, so that squares of large numbers stay finite.
    scale = float(np.abs(seen).max(initial=0.0)) or 1.0
    mean, spread = (float((seen / scale).mean()), float((seen / scale).std())) if len(seen) else (0.0, 0.0)
    note.add(int(missing.sum()), f"no '{note.column}'; it counts as the mean")
    if len(seen) == 0 or seen.min() == seen.max():
        spread = 1.0
        same = "the same for all" if len(seen) else "unknown of all"
        note.kept.append(f"'{note.column}' is {same} {note.unit} in training, so it says nothing.")
    limit = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        standard = np.clip((number / scale - mean) / (spread or 1.0), -limit, limit)
    return EncodedColumn(np.where(missing, 0.0, standard).astype(np.float32), 1, "number")

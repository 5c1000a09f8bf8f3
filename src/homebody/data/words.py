"""Lists of texts, and the pieces of words, as pairs of a row and a value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["Pairs", "codes", "listed", "trigrams"]

# Whatever is no letter, accent or digit parts two words.
WORDS = r"[\p{L}\p{M}\p{N}]+"
BOUNDARY = "#"


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
    words = listed(texts.cast(pl.String).str.to_lowercase().str.extract_all(WORDS))
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
    gram = codes(grams["gram"], distinct) - 1
    many = np.bincount(grams["word"].to_numpy(), minlength=len(words.distinct))
    # For each word of each row, the places of that word's grams.
    length = many[words.value]
    begin = np.repeat((np.cumsum(many) - many)[words.value] - (np.cumsum(length) - length), length)
    return Pairs(np.repeat(words.row, length), gram[begin + np.arange(len(begin))], distinct)


def listed(lists: pl.Series) -> Pairs:
    """The pairs that lists of texts are."""
    table = pl.DataFrame({"row": pl.int_range(len(lists), eager=True), "value": lists})
    table = table.filter(pl.col("value").list.len() > 0).explode("value").drop_nulls()
    distinct = table["value"].unique().sort()
    return Pairs(table["row"].to_numpy(), codes(table["value"], distinct) - 1, distinct)


def codes(values: pl.Series, vocabulary: pl.Series) -> npt.NDArray[np.int64]:
    """The place of each value in the vocabulary, from 1; 0 where it has none."""
    index = pl.DataFrame({"value": vocabulary, "code": pl.int_range(1, len(vocabulary) + 1, eager=True)})
    found = values.alias("value").to_frame().join(index, on="value", how="left", maintain_order="left")
    return found["code"].fill_null(0).to_numpy().astype(np.int64)

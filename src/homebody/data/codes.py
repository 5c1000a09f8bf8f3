"""How one feature is written in numbers: what training knows of it, enough to encode somebody who comes later."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.columns import SEPARATOR
from homebody.data.population import entries
from homebody.errors import HomebodyError, refuse_unknown

__all__ = ["Code", "Pairs", "Scale", "encode_one", "listed", "places", "trigrams", "words"]

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


def words(texts: pl.Series) -> pl.Series:
    """The words of each text in their order, in lower case: runs of letters and digits.

    >>> words(pl.Series(["A cat's nap, 2 a.m.", None])).to_list()
    [['a', 'cat', 's', 'nap', '2', 'a', 'm'], None]
    """
    return texts.cast(pl.String).str.to_lowercase().str.extract_all(WORDS)


def trigrams(texts: pl.Series) -> Pairs:
    """Each row's character 3-grams: those of its words, in lower case and with a # at both ends.

    Words are runs of letters and digits, as in DSSM's word hashing (Huang et al. 2013).

    >>> grams = trigrams(pl.Series(["A cat!"]))
    >>> grams.distinct.gather(grams.value).to_list()
    ['#a#', '#ca', 'cat', 'at#']
    """
    used = listed(words(texts))
    # People use the same words again and again: each is cut up once.
    marked = pl.DataFrame({"word": pl.int_range(len(used.distinct), eager=True), "text": used.distinct}).select(
        "word", (BOUNDARY + pl.col("text") + BOUNDARY).alias("text")
    )
    marked = marked.with_columns(pl.col("text").str.len_chars().alias("length"))
    pieces = [pl.DataFrame(schema={"word": pl.Int64, "gram": pl.String})]
    for start in range(int(marked["length"].to_numpy().max(initial=2)) - 2):
        marked = marked.filter(pl.col("length") >= start + 3)
        pieces.append(marked.select("word", pl.col("text").str.slice(start, 3).alias("gram")))
    grams = pl.concat(pieces).sort("word", maintain_order=True)
    distinct = grams["gram"].unique().sort()
    gram = places(grams["gram"], distinct) - 1
    many = np.bincount(grams["word"].to_numpy(), minlength=len(used.distinct))
    # For each word of each row, the places of that word's grams.
    length = many[used.value]
    return Pairs(np.repeat(used.row, length), gram[entries((np.cumsum(many) - many)[used.value], length)], distinct)


def listed(lists: pl.Series) -> Pairs:
    """The pairs that lists of texts are."""
    table = pl.DataFrame({"row": pl.int_range(len(lists), eager=True), "value": lists})
    table = table.filter(pl.col("value").list.len() > 0).explode("value").drop_nulls()
    distinct = table["value"].unique().sort()
    return Pairs(table["row"].to_numpy(), places(table["value"], distinct) - 1, distinct)


def places(values: pl.Series, vocabulary: pl.Series) -> npt.NDArray[np.int64]:
    """The place of each value in the vocabulary, from 1; 0 where it has none."""
    index = pl.DataFrame({"value": vocabulary, "code": pl.int_range(1, len(vocabulary) + 1, eager=True)})
    joined = values.alias("value").to_frame().join(index, on="value", how="left", maintain_order="left")
    return joined["code"].fill_null(0).to_numpy().astype(np.int64)


Numbers = npt.NDArray[Any]
SHOWN = 60
"""Characters of a value that a sentence repeats."""
LARGEST = 1 << 20
"""Buckets of a hashed vocabulary, and columns of a row of several codes, at most."""


@dataclass(frozen=True)
class Scale:
    """How a number is standardised: by the largest first, so that squares of large ones stay finite.

    >>> Scale.within(0, 100).standard(np.array([0.0, 50.0, 900.0])).astype(int).tolist()
    [-1, 0, 1]
    """

    largest: float = 1.0
    mean: float = 0.0
    spread: float = 1.0
    most: float = math.inf
    """What a standardised number is clipped to, on both sides."""

    @classmethod
    def within(cls, low: float, high: float) -> Scale:
        """That of numbers spread evenly over these bounds; numbers beyond them are clipped."""
        largest = max(abs(low), abs(high))
        low, high = low / largest, high / largest
        return cls(largest, (low + high) / 2, (high - low) / math.sqrt(12), math.sqrt(3))

    def standard(self, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Standardised; what is missing is 0, the mean."""
        limit = min(self.most, float(np.finfo(np.float32).max))
        with np.errstate(over="ignore", invalid="ignore"):
            standard = np.clip((numbers / self.largest - self.mean) / self.spread, -limit, limit)
        return np.where(np.isfinite(numbers), standard, 0.0).astype(np.float32)


@dataclass(frozen=True)
class Code:
    """One feature's numbers: of categories and pieces of texts their places or buckets, of amounts the scale.

    >>> job = Code("one", ("cook", "vet"))
    >>> job.of("job", "vet"), job.of("job", "spy"), job.of("job", None)
    ((array(2), ''), (array(0), "'spy' is no job that training knows; it counts as unknown."), (array(0), ''))
    >>> Code("many", ("Drama", "War")).of("genres", "War|Drama|Noir")[0].tolist()
    [1, 2]
    >>> Code("sequence", ("a", "cat"), text=True, width=4).of("title", "Cat and a cat")[0].tolist()
    [2, 0, 1, 2]
    >>> town = Code("one", buckets=64)
    >>> town.size, town.of("town", "Ulm")
    (65, (array(42), ''))
    """

    kind: Literal["one", "many", "number", "sequence"]
    values: tuple[str, ...] = ()
    """The value of code c is in place c - 1."""
    text: bool = False
    """Whether they are pieces of a text."""
    scale: Scale = Scale()
    width: int = 1
    """Columns of a row of several codes, where nobody has more; a longer sequence is cut there."""
    buckets: int = 0
    """Into how many buckets values are hashed in place of a vocabulary; 0: they are listed in `values`."""
    view: str = ""
    """The view that the feature is in, if any."""

    @property
    def several(self) -> bool:
        """Whether a row has several codes, then -1."""
        return self.kind in ("many", "sequence")

    @property
    def size(self) -> int:
        """Codes are below it."""
        return 1 if self.kind == "number" else (self.buckets or len(self.values)) + 1

    def place(self, value: str) -> int:
        """The code of a value; 0 where it has none. A hash is the same in every version and on every machine."""
        if not self.buckets:
            return self._places.get(value, 0)
        digest = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8).digest()
        return 1 + int.from_bytes(digest, "big") % self.buckets

    @cached_property
    def _places(self) -> dict[str, int]:
        return {value: number for number, value in enumerate(self.values, 1)}

    def unknown(self, rows: int | None = None) -> Numbers:
        """The numbers of somebody of whom it is not known, or of so many."""
        shape = () if rows is None else (rows,)
        if self.several:
            return np.full((*shape, self.width), -1, dtype=np.int64)
        return np.zeros(shape, dtype=np.float32 if self.kind == "number" else np.int64)

    def of(self, name: str, value: object) -> tuple[Numbers, str]:
        """One value's numbers, and a sentence where something of it is unknown."""
        if value is None or (isinstance(value, str) and not value.strip()):
            return self.unknown(), ""
        if self.kind == "number":
            return self._amount(name, value)
        if self.kind == "sequence":
            return self._sequence(name, value)
        parts = [_plain(value)] if self.kind == "one" else self._parts(value)
        places = {part: self.place(part) for part in parts}
        codes = sorted({place for place in places.values() if place})
        strange = [part for part in parts if not places[part]]
        note = ""
        if self.text and strange:
            shares = f"{len(set(strange))} of {len(set(parts))} 3-grams"
            note = f"{shares} of {name} are unknown to training; they are left out."
        elif strange:
            listed = ", ".join(f"'{value[:SHOWN]}'" for value in strange)
            become = "it counts as unknown" if self.kind == "one" else "left out"
            note = f"{listed} is no {name} that training knows; {become}."
        if self.kind == "one":
            return np.array(codes[0] if codes else 0, dtype=np.int64), note
        row = np.full(max(self.width, len(codes)), -1, dtype=np.int64)
        row[: len(codes)] = codes
        return row, note

    def _sequence(self, name: str, value: object) -> tuple[Numbers, str]:
        read = words(pl.Series([str(value)]))[0].to_list()[: self.width]
        row = self.unknown()
        row[: len(read)] = [self.place(word) for word in read]
        strange = int((row == 0).sum())
        note = f"{strange} of {len(read)} words of {name} are unknown to training." if strange else ""
        return row, note

    def _amount(self, name: str, value: object) -> tuple[Numbers, str]:
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise HomebodyError(f"{name} is a number, not '{str(value)[:SHOWN]}': give one, or leave it out.")
        return self.scale.standard(np.array(number)).reshape(()), ""

    def _parts(self, value: object) -> list[str]:
        if self.text:
            grams = trigrams(pl.Series([str(value)]))
            return [str(gram) for gram in grams.distinct.gather(grams.value).to_list()]
        if isinstance(value, str):
            value = value.split(SEPARATOR)
        parts = value if isinstance(value, list | tuple | set | frozenset | np.ndarray) else [value]
        return [text for text in dict.fromkeys(_plain(part) for part in parts) if text]

    def to_json(self) -> dict[str, Any]:
        """What can travel; the inverse is `from_json`."""
        scale = [self.scale.largest, self.scale.mean, self.scale.spread]
        if math.isfinite(self.scale.most):
            scale.append(self.scale.most)
        fields: dict[str, Any] = {"values": list(self.values), "text": self.text, "scale": scale, "width": self.width}
        if self.view:
            fields["view"] = self.view
        # A version that knows no buckets, or no clipping, must not read it as something else.
        if self.buckets:
            return {"kind": f"hashed-{self.kind}", **fields, "buckets": self.buckets}
        return {"kind": self.kind, **fields}

    @classmethod
    def from_json(cls, record: Any) -> Code:
        """Read a code from JSON; an invalid one is refused in a sentence.

        >>> amount = Code("number", scale=Scale(8.0, 0.5, 0.25))
        >>> Code.from_json(amount.to_json()) == amount
        True
        """
        try:
            kind, values, width = record["kind"], record["values"], record["width"]
            scale = [float(number) for number in record["scale"]]
            text, buckets, view = record["text"], 0, record.get("view", "")
            if kind in ("hashed-one", "hashed-many"):
                kind, buckets = kind.removeprefix("hashed-"), record["buckets"]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _not_a_code() from None
        fit = kind in ("one", "many", "number", "sequence") and type(text) is bool
        fit = fit and type(width) is int and 1 <= width <= LARGEST
        fit = fit and isinstance(values, list) and all(type(text) is str for text in (view, *values))
        fit = fit and type(buckets) is int and 0 <= buckets <= LARGEST and not (buckets and values)
        if not fit or len(scale) not in (3, 4) or not all(map(math.isfinite, scale)) or not scale[0] or not scale[2]:
            raise _not_a_code()
        return cls(kind, tuple(values), text, Scale(*scale), width, buckets, view)


def encode_one(
    codes: Mapping[str, Code], given: Mapping[str, object], *, what: str = "feature of people"
) -> tuple[dict[str, Numbers], tuple[str, ...]]:
    """Somebody's features, or one moment's circumstances, in the order of the codes; what is not given is unknown.

    >>> numbers, notes = encode_one({"job": Code("one", ("cook",)), "age": Code("number")}, {"age": "2"})
    >>> {name: value.tolist() for name, value in numbers.items()}, notes
    ({'job': 0, 'age': 2.0}, ())
    """
    if given and not codes:
        raise HomebodyError(f"This data has no {what}, so '{next(iter(given))}' cannot be used: leave it out.")
    refuse_unknown(what, given, codes)
    coded = {name: code.of(name, given.get(name)) for name, code in codes.items()}
    return {name: numbers for name, (numbers, _) in coded.items()}, tuple(note for _, note in coded.values() if note)


def _plain(value: object) -> str:
    """A category as texts of the data are: whole numbers without a point, and no spaces around it."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()


def _not_a_code() -> HomebodyError:
    return HomebodyError("How a feature is written in numbers is not readable: the other side has another version.")

"""Book-Crossing (Ziegler et al. 2005): ratings of books from 1 to 10, and 0 where someone only registered one.

`BX-Book-Ratings.csv` is semicolons, quotes and Latin-1, with quotes inside a field escaped by a backslash; it may
be packed as `.xz`. Books are ISBNs as people typed them, mistakes included. There are no times: a history stands
in the order of the file.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from homebody.data.builder import build
from homebody.data.population import Population
from homebody.data.reading import file_bytes, read_rows

__all__ = ["read_book_crossing"]

COLUMNS = {"User-ID": pl.Int32, "ISBN": pl.String, "Book-Rating": pl.Float32}


def read_book_crossing(folder: Path) -> Population:
    """Book-Crossing from a folder that holds `BX-Book-Ratings.csv`, plain or as `.xz`."""
    plain = folder / "BX-Book-Ratings.csv"
    path = plain if plain.exists() else folder / "BX-Book-Ratings.csv.xz"
    # CSV readers know quotes that are doubled, not escaped.
    text = file_bytes(path).replace(b'\\"', b'""').decode("latin-1").encode()
    rows = read_rows(text, path, COLUMNS, separator=";", header=tuple(COLUMNS), quote='"')
    return build("book-crossing", rows["User-ID"], rows["ISBN"], ratings=rows["Book-Rating"])

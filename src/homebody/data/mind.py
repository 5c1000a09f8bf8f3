"""MIND, Microsoft's news data (Wu et al. 2020), small or large, or any folder in its format.

`behaviors.tsv` has an impression a line, without a header: its id, a user, a time (11/15/2019 8:55:22 AM), what the
user had read before, and what was shown, each with -1 if it was clicked and -0 if not. `news.tsv` has a news item a
line: id, category, subcategory, title, abstract, address, and the entities of title and abstract, which are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.news import described, merged, with_impressions
from homebody.data.population import Impressions, Kind, Population, entries, pointers
from homebody.data.published import file_bytes
from homebody.errors import HomebodyError
from homebody.files import insisting

__all__ = ["PARTS", "read_mind"]

PARTS = ("train", "dev")
"""Folders that each hold the two files, one after another in time; or the folder itself holds them."""
CHUNK_BYTES = 16 << 20
"""So much of a file of impressions is parsed at once: lists of texts take many times their room."""
COLUMNS = ("impression", "user", "time", "history", "shown")
CLOCK = "%m/%d/%Y %I:%M:%S %p"
NEWS = ("id", "category", "subcategory", "title", "abstract")
KINDS: dict[str, Kind] = {
    "category": "categorical",
    "subcategory": "categorical",
    "title": "sequence",
    "abstract": "sequence",
}


class _Chunk(NamedTuple):
    """Some lines of a file: ids are texts, which one table for all chunks numbers."""

    lines: pl.DataFrame
    """user, time, state: the hash of the history."""
    states: pl.DataFrame
    """user, state, history: each once."""
    lengths: npt.NDArray[np.int64]
    items: pl.Series
    clicked: npt.NDArray[np.bool_]


def read_mind(folder: Path) -> Population:
    """MIND from a folder that holds `behaviors.tsv` and `news.tsv`, or from its folders `train` and `dev`.

    A history is the one that `behaviors.tsv` gives. Where a user has several, as of train and of dev, they are one
    history, of which each impression knows how much came before it. MIND says nothing about when somebody read what.
    """
    whole = (folder / "behaviors.tsv").exists()
    folders = [folder] if whole else [folder / part for part in PARTS if (folder / part / "behaviors.tsv").exists()]
    if not folders:
        raise HomebodyError(f"{folder} has no behaviors.tsv: put MIND's behaviors.tsv and news.tsv there.")
    for part in folders:
        if not (part / "news.tsv").exists():
            raise HomebodyError(f"{part} has no news.tsv, which says what the news in behaviors.tsv are: put it there.")
    ids = _TextNumbers()
    users = _TextNumbers()
    chunks = [
        chunk
        for part in folders
        for chunk in (_numbered(parsed, users, ids) for parsed in _chunks(part / "behaviors.tsv"))
    ]
    states = pl.concat([chunk.states for chunk in chunks]).unique(["user", "state"], keep="first", maintain_order=True)
    starts, history, before = _histories(states, users, ids)
    lines = pl.concat([chunk.lines for chunk in chunks]).join(
        before, on=["user", "state"], how="left", maintain_order="left"
    )
    user_ids, user_order = users.sorted()
    item_ids, item_order = ids.sorted()
    table = pl.concat([_news(part / "news.tsv") for part in folders]).unique("id", keep="first", maintain_order=True)
    start = np.argsort(user_order)  # the user of each new number
    sizes = np.diff(starts)[start]
    people = Population(
        "mind",
        pointers(sizes),
        item_order[history[entries(starts[:-1][start], sizes)]].astype(np.int32),
        n_items=len(item_ids),
        user_ids=user_ids,
        item_ids=item_ids,
    )
    people = described(people, str(folders[0] / "news.tsv"), table, KINDS)
    shown = Impressions(
        user_order[lines["user"].to_numpy()],
        pointers(np.concatenate([chunk.lengths for chunk in chunks])),
        item_order[np.concatenate([chunk.items.to_numpy() for chunk in chunks])].astype(np.int32),
        np.concatenate([chunk.clicked for chunk in chunks]),
        lines["time"].to_numpy(),
        lines["before"].to_numpy().astype(np.int64),
    )
    return with_impressions(people, shown)


class _TextNumbers:
    """Texts, numbered as they come."""

    def __init__(self) -> None:
        self._known = pl.DataFrame(schema={"text": pl.String, "number": pl.Int32})

    def of(self, texts: pl.Series) -> pl.Series:
        asked = texts.alias("text").to_frame()
        new = asked.unique(maintain_order=True).join(self._known, on="text", how="anti", maintain_order="left")
        numbers = pl.int_range(self._known.height, self._known.height + new.height, dtype=pl.Int32, eager=True)
        self._known = pl.concat([self._known, new.with_columns(numbers.alias("number"))])
        return asked.join(self._known, on="text", how="left", maintain_order="left")["number"]

    def __len__(self) -> int:
        return self._known.height

    def sorted(self) -> tuple[pl.Series, npt.NDArray[np.int64]]:
        """The texts in their order, and the place of each number among them."""
        texts = self._known["text"]
        return texts.sort(), np.argsort(texts.arg_sort().to_numpy())


def _chunks(path: Path) -> Iterator[tuple[Path, int, pl.DataFrame]]:
    """Whole lines of the file, some at a time, with the number of the first."""
    first, rest = 1, b""
    with insisting(f"{path} cannot be read"), path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                table = _table(path, first, whole)
                yield path, first, table
                first += table.height
    if rest.strip():
        yield path, first, _table(path, first, rest)
    elif first == 1:
        raise HomebodyError(f"{path} is empty: it should have an impression a line.")


def _table(path: Path, first: int, text: bytes) -> pl.DataFrame:
    lines = _lines(text)
    tabs = lines.str.count_matches("\t", literal=True)
    wrong = (tabs != len(COLUMNS) - 1).arg_true()
    if len(wrong):
        have = int(tabs[int(wrong[0])]) + 1
        raise HomebodyError(
            f"Line {first + int(wrong[0]):,} of {path} has {have} columns: an impression has {len(COLUMNS)}, "
            f"divided by tabs ({', '.join(COLUMNS)})."
        )
    parts = lines.str.split_exact("\t", len(COLUMNS) - 1).struct.rename_fields(COLUMNS)
    return parts.struct.unnest()


def _numbered(parsed: tuple[Path, int, pl.DataFrame], users: _TextNumbers, ids: _TextNumbers) -> _Chunk:
    path, first, table = parsed

    def refuse(bad: pl.Series, what: str) -> None:
        rows = bad.fill_null(True).arg_true()
        if len(rows):
            raise HomebodyError(f"Line {first + int(rows[0]):,} of {path} is malformed: {what}.")

    times = table["time"].str.to_datetime(CLOCK, strict=False)
    refuse(times.is_null(), "its time is not like 11/15/2019 8:55:22 AM")
    refuse(table["user"].str.strip_chars() == "", "it names no user")
    shown = table["shown"].str.strip_chars().str.split(" ")
    refuse(table["shown"].str.strip_chars() == "", "it shows nothing")
    lengths = shown.list.len()
    flat = shown.explode()
    flags = flat.str.slice(-2)
    marked = flags.is_in(["-0", "-1"]) & (flat.str.len_bytes() > 2)
    if not marked.all():
        row = int(np.searchsorted(np.cumsum(lengths.to_numpy()), int((~marked).arg_max() or 0), side="right"))
        refuse(pl.Series(np.arange(table.height) == row), "what it shows is not like N123-1 N456-0, clicked or not")
    rows = pl.DataFrame(
        {
            "user": users.of(table["user"].str.strip_chars()),
            "time": times.dt.epoch("s"),
            "history": table["history"].str.strip_chars(),
        }
    ).with_columns(state=pl.col("history").hash())
    return _Chunk(
        rows.select("user", "time", "state"),
        rows.select("user", "state", "history", "time").unique(["user", "state"], keep="first", maintain_order=True),
        lengths.to_numpy().astype(np.int64),
        ids.of(flat.str.slice(0, flat.str.len_chars() - 2)),
        (flags == "-1").to_numpy(),
    )


def _histories(
    states: pl.DataFrame, users: _TextNumbers, ids: _TextNumbers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], pl.DataFrame]:
    """Everyone's history, as row pointers and items, and how long it was at each of its states."""
    states = states.sort("user", "time", maintain_order=True)
    read = states["history"].str.split(" ")
    read = pl.select(
        pl.when(states["history"] == "").then(pl.lit([], dtype=pl.List(pl.String))).otherwise(read)
    ).to_series()
    lengths = read.list.len().to_numpy().astype(np.int64)
    items = ids.of(read.explode().drop_nulls()).to_numpy()
    owner = states["user"].to_numpy()
    ends = np.cumsum(lengths)
    several = np.flatnonzero(np.bincount(owner, minlength=len(users)) > 1)
    before = lengths.copy()
    if len(several):
        pieces: dict[int, list[int]] = {}
        first, last = np.searchsorted(owner, several, side="left"), np.searchsorted(owner, several, side="right")
        for user, start, stop in zip(several.tolist(), first.tolist(), last.tolist(), strict=True):
            of_user = [items[ends[n] - lengths[n] : ends[n]].tolist() for n in range(start, stop)]
            pieces[user], before[start:stop] = merged(of_user)
        single = np.isin(owner, several, invert=True)
        kept = items[np.repeat(single, lengths)]
        owners = np.concatenate(
            [np.repeat(owner[single], lengths[single]), *(np.full(len(p), u) for u, p in pieces.items())]
        )
        items = np.concatenate([kept, *(np.array(piece, dtype=items.dtype) for piece in pieces.values())])
        items = items[np.argsort(owners, kind="stable")]
        counts = np.bincount(owners.astype(np.int64), minlength=len(users))
    else:
        counts = np.bincount(owner, lengths, len(users)).astype(np.int64)
    return pointers(counts), items, states.select("user", "state").with_columns(before=pl.Series(before))


def _news(path: Path) -> pl.DataFrame:
    lines = _lines(file_bytes(path))
    lines = lines.filter(lines.str.strip_chars() != "")
    if not len(lines):
        raise HomebodyError(f"{path} is empty: it should have a news item a line.")
    wrong = (lines.str.count_matches("\t", literal=True) < len(NEWS) - 1).arg_true()
    if len(wrong):
        raise HomebodyError(
            f"Line {int(wrong[0]) + 1:,} of {path} has too few columns: a news item has {len(NEWS)} or more, divided "
            f"by tabs ({', '.join(NEWS)}, …)."
        )
    return lines.str.split_exact("\t", len(NEWS) - 1).struct.rename_fields(NEWS).struct.unnest()


def _lines(text: bytes) -> pl.Series:
    return pl.Series("line", text.replace(b"\r", b"").decode("utf-8", errors="replace").split("\n"))

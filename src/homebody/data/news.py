"""News: what people read and what they were shown, put together from arrays. One module reads each source.

A source says what each person had read by the time of an impression. Several such states of one history, as of several
weeks, become one history, and each impression knows how much of it came before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.population import Features, Impressions, Kind, Population
from homebody.errors import HomebodyError, several

__all__ = ["NewsHistory", "NewsLines", "described", "merged", "news_population"]

Longs = npt.NDArray[np.int64]


class NewsHistory(NamedTuple):
    """Everyone's history: user u read `items[indptr[u]:indptr[u + 1]]`, oldest first."""

    indptr: Longs
    items: npt.NDArray[np.int32]
    times: Longs | None = None


class NewsLines(NamedTuple):
    """Impressions in the order of a source: line n showed `items[indptr[n]:indptr[n + 1]]`."""

    users: Longs
    times: Longs | None
    indptr: Longs
    items: npt.NDArray[np.int32]
    clicked: npt.NDArray[np.bool_]
    before: Longs
    """How many interactions of the user came before each."""
    asked: npt.NDArray[np.bool_] | None = None
    """Which a model may be asked about; None: all."""


def merged(states: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """One history from its states, oldest first, and how long it is at each.

    A state repeats the end of what is known so far and goes on. It may have lost old entries; it never loses new ones.

    >>> merged([[1, 2, 3], [1, 2, 3, 4], [3, 4, 5], [9]])
    ([1, 2, 3, 4, 5, 9], [3, 4, 5, 6])
    """
    whole: list[int] = []
    lengths = []
    for state in states:
        known = next(
            (count for count in range(min(len(whole), len(state)), 0, -1) if whole[-count:] == list(state[:count])), 0
        )
        whole += state[known:]
        lengths.append(len(whole))
    return whole, lengths


def news_population(
    name: str,
    history: NewsHistory,
    lines: NewsLines,
    *,
    user_ids: pl.Series,
    item_ids: pl.Series,
    features: Features | None = None,
    item_names: pl.Series | None = None,
    notes: Sequence[str] = (),
) -> Population:
    """The population with the impressions by user and time. Those that ask nothing are left out, and said."""
    lines, said = _asking(lines, len(item_ids))
    if not len(lines.users):
        raise HomebodyError(f"No impression of {name} has both a click and something that was not clicked.")
    keys = (lines.users,) if lines.times is None else (lines.times, lines.users)
    shown = Impressions(lines.users, lines.indptr, lines.items, lines.clicked, lines.times, lines.before, lines.asked)
    return Population(
        name,
        history.indptr,
        history.items,
        n_items=len(item_ids),
        times=history.times,
        user_ids=user_ids,
        item_ids=item_ids,
        item_names=item_names,
        item_features=features,
        impressions=shown.taken(np.lexsort(keys)),
        notes=(*notes, *said),
    )


def _asking(lines: NewsLines, n_items: int) -> tuple[NewsLines, list[str]]:
    """The lines with each item once, in which something was clicked and something was not."""
    said = []
    line = np.repeat(np.arange(len(lines.users)), np.diff(lines.indptr))
    distinct, first, where = np.unique(line * n_items + lines.items, return_index=True, return_inverse=True)
    items, clicked = lines.items, lines.clicked
    if len(distinct) < len(items):
        said.append(
            f"{several(len(items) - len(distinct), 'item is', 'items are')} shown again in the same impression: each "
            "counts once, as clicked if once clicked."
        )
        ever = np.bincount(where.reshape(-1), clicked, len(distinct)) > 0
        order = np.argsort(first)  # as the source lists them
        items, clicked, line = items[first[order]], ever[order], line[first[order]]
    clicks, sizes = (
        np.bincount(line[clicked], minlength=len(lines.users)),
        np.bincount(line, minlength=len(lines.users)),
    )
    for useless, why in ((clicks == 0, "no click"), ((clicks == sizes) & (clicks > 0), "nothing that was not clicked")):
        if useless.any():
            many = several(int(useless.sum()), "impression has", "impressions have")
            said.append(f"{many} {why}: left out, as there is nothing to rank.")
    asks = (clicks > 0) & (clicks < sizes)
    entries = asks[line]
    indptr = np.concatenate([[0], np.cumsum(sizes[asks])]).astype(np.int64)
    times = None if lines.times is None else lines.times[asks]
    asked = None if lines.asked is None else lines.asked[asks]
    return NewsLines(
        lines.users[asks], times, indptr, items[entries], clicked[entries], lines.before[asks], asked
    ), said


def described(
    name: str, item_ids: pl.Series, table: pl.DataFrame, kinds: Mapping[str, Kind], titles: str = "title"
) -> tuple[Features, pl.Series, list[str]]:
    """The items' features in the order of the ids, their titles as names, and notes on what is missing.

    table: a row for each item that something is known of, with its `id`.
    """
    strangers = int((~item_ids.is_in(table["id"].implode())).sum())
    notes = []
    if strangers == len(item_ids):
        raise HomebodyError(
            f"{name} describes none of the {len(item_ids):,} news that people read or were shown, such as "
            f"'{item_ids[0]}': give the file that belongs to them."
        )
    if strangers:
        many = several(strangers, "news item is", "news items are")
        notes.append(f"{many} in histories or impressions and not in {name}: known by id alone, without text.")
    known = item_ids.rename("id").to_frame().join(table, on="id", how="left", maintain_order="left").drop("id")
    texts = [column for column, kind in kinds.items() if kind in ("text", "sequence")]
    known = known.with_columns(
        pl.when(pl.col(column).str.strip_chars() != "").then(pl.col(column)) for column in texts
    ).select(list(kinds))
    silent = int(known.select(pl.all_horizontal(pl.col(texts).is_null()))["title"].sum()) - strangers
    if silent + strangers == len(item_ids):
        raise HomebodyError(f"No news item of {name} has a text: it needs at least titles.")
    if silent:
        notes.append(
            f"{several(silent, 'news item', 'news items')} of {name} {'has' if silent == 1 else 'have'} no text."
        )
    return Features(known, kinds), known[titles].fill_null(item_ids.cast(pl.String)), notes

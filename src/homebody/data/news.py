"""News: what people read and what they were shown, put together from arrays. One module reads each source.

A source says what each person had read by the time of an impression. Several such states of one history, as of several
weeks, become one history, and each impression knows how much of it came before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from homebody.data.population import Features, Impressions, Kind, Population, pointers
from homebody.data.published import rows_for
from homebody.errors import HomebodyError, several

__all__ = ["described", "merged", "usable", "with_impressions"]


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


def with_impressions(people: Population, lines: Impressions) -> Population:
    """The people with a source's impressions. lines: as `usable` takes them."""
    impressions, said = usable(lines, people.n_items, people.name)
    return replace(people, impressions=impressions, notes=(*people.notes, *said))


def usable(lines: Impressions, n_items: int, name: str) -> tuple[Impressions, list[str]]:
    """Impressions ordered by user and time, and what is said of those left out. lines: in the order of the source.

    An item counts once in an impression. Impressions that ask nothing are left out. name: of the source.
    """
    said, line, count = [], lines.owners, len(lines.users)
    distinct, first, where = np.unique(line * n_items + lines.items, return_index=True, return_inverse=True)
    if len(distinct) < len(lines.items):
        said.append(
            f"{several(len(lines.items) - len(distinct), 'item is', 'items are')} shown again in the same impression: "
            "each counts once, as clicked if once clicked."
        )
        ever = np.bincount(where.reshape(-1), lines.clicked, len(distinct)) > 0
        order = np.argsort(first)  # as the source lists them
        once, line = first[order], line[first[order]]
        indptr = pointers(np.bincount(line, minlength=count))
        lines = replace(lines, indptr=indptr, items=lines.items[once], clicked=ever[order])
    clicks, sizes = np.bincount(line[lines.clicked], minlength=count), np.diff(lines.indptr)
    for useless, why in ((clicks == 0, "no click"), ((clicks == sizes) & (clicks > 0), "nothing that was not clicked")):
        if useless.any():
            many = several(int(useless.sum()), "impression has", "impressions have")
            said.append(f"{many} {why}: left out, as there is nothing to rank.")
    asks = (clicks > 0) & (clicks < sizes)
    if not asks.any():
        raise HomebodyError(
            f"No impression of {name} can be used: each needs a known user, an item that was clicked and one that was "
            "not."
        )
    order = np.lexsort((lines.users,) if lines.times is None else (lines.times, lines.users))
    return lines.taken(order[asks[order]]), said


def described(people: Population, name: str, table: pl.DataFrame, kinds: Mapping[str, Kind]) -> Population:
    """The people with their items' features and titles, and notes on what is missing.

    table: a row for each item that something is known of, with its `id`. name: where it is from.
    """
    assert people.item_ids is not None
    item_ids = people.item_ids
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
    known = rows_for(item_ids, table)
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
    names = known["title"].fill_null(item_ids.cast(pl.String))
    return replace(people, item_names=names, item_features=Features(known, kinds), notes=(*people.notes, *notes))

"""Impressions from a file: a row for every item that somebody was shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from homebody.data.columns import Column, flags, ids, times
from homebody.data.population import Impressions, Population
from homebody.data.table import USUAL_NAMES, listed, raw_table, usual
from homebody.errors import HomebodyError, several

__all__ = ["attach_impressions", "places"]

NAMES = {
    "impression": ("impression", "impressionid"),
    "clicked": ("clicked", "click"),
    **{role: USUAL_NAMES[role] for role in ("user", "item", "time")},
}
Say = Callable[[str], None]


def attach_impressions(population: Population, path: Path, say: Say) -> Population:
    """The population with the file's impressions: columns impression, user, item, clicked, and perhaps time.

    What cannot be used is left out, counted and said: unknown users and items, an item that one impression
    shows twice (it was clicked if one of them was), impressions without a click or with nothing else.
    """
    roles: dict[str, str] = {}

    def choose(present: list[str]) -> list[str]:
        roles.update(_roles(path, present))
        return list(roles.values())

    table = raw_table(path, choose)
    if table.height == 0:
        raise HomebodyError(f"{path} has no rows below its header, so there are no impressions.")
    column = {role: Column(table[name], role, path) for role, name in roles.items()}
    called = ids(column["user"])
    rows = pl.DataFrame(
        {
            "impression": ids(column["impression"]).cast(pl.String),
            "user": places(called, population.user_ids, population.n_users),
            "item": places(ids(column["item"]), population.item_ids, population.n_items),
            "clicked": flags(column["clicked"]),
            "time": times(column["time"]) if "time" in column else pl.repeat(0, table.height, eager=True),
            "called": called,
        }
    )
    _refuse_shared(rows, path)
    kept = _usable(rows, path, say)
    if population.impressions is not None:
        say(f"{path.name} takes the place of the impressions that {population.name} has already.")
    return replace(population, impressions=_impressions(kept))


def places(found: pl.Series, known: pl.Series | None, count: int) -> pl.Series:
    """Which user (or item) of the population each id is; null where it is none. 7 is '7' but not '007'.

    >>> places(pl.Series(["7", "007", "x"]), pl.Series([5, 7]), 2).to_list()
    [1, None, None]
    """
    names = pl.Series("id", range(count)) if known is None else known
    index = pl.DataFrame({"id": names.cast(pl.String), "place": pl.int_range(count, eager=True)})
    asked = found.cast(pl.String).rename("id").to_frame()
    return asked.join(index, on="id", how="left", maintain_order="left")["place"]


def _roles(path: Path, present: list[str]) -> dict[str, str]:
    roles = {}
    for role, names in NAMES.items():
        matches = usual(present, names)
        if len(matches) > 1:
            raise HomebodyError(
                f"{path} has several columns that could be the {role} ({listed(matches)}); rename all but one."
            )
        if matches:
            roles[role] = matches[0]
        elif role != "time":
            raise HomebodyError(
                f"{path} has no column '{role}': impressions need the columns impression, user, item and clicked, "
                f"and its columns are {listed(present)}."
            )
    return roles


def _refuse_shared(rows: pl.DataFrame, path: Path) -> None:
    people = rows.group_by("impression", maintain_order=True).agg(pl.col("called").n_unique())
    shared = people.filter(pl.col("called") > 1)
    if shared.height:
        raise HomebodyError(
            f"The impression '{shared['impression'][0]}' of {path} is of {shared['called'][0]} users "
            f"({several(shared.height, 'such impression')}); give each its own number."
        )


def _usable(rows: pl.DataFrame, path: Path, say: Say) -> pl.DataFrame:
    """The rows that can be asked of a model, saying how many cannot."""
    strangers = rows.filter(pl.col("user").is_null())
    if strangers.height:
        many = several(strangers["impression"].n_unique(), "impression")
        say(f"{path.name} has {many} of users who have no interactions; left out.")
        rows = rows.filter(pl.col("user").is_not_null())
    unknown = rows["item"].null_count()
    if unknown:
        many = several(unknown, "row")
        say(f"{path.name} shows items that the population does not have in {many}; those are left out.")
        rows = rows.filter(pl.col("item").is_not_null())
    once = rows.group_by("impression", "item", maintain_order=True).agg(
        pl.col("user", "time").first(), pl.col("clicked").any()
    )
    if once.height < rows.height:
        say(
            f"{path.name} shows an item again in the same impression in {several(rows.height - once.height, 'row')}; "
            "it counts once, as clicked if once clicked."
        )
    clicks = pl.col("clicked").sum().over("impression")
    shown = pl.len().over("impression")
    for problem, sentence in ((clicks == 0, "no click"), (clicks == shown, "nothing that was not clicked")):
        useless = once.filter(problem)["impression"].n_unique()
        if useless:
            many = several(useless, "impression")
            say(f"{path.name} has {many} with {sentence}; left out, as there is nothing to rank.")
    once = once.filter((clicks > 0) & (clicks < shown))
    if once.height == 0:
        raise HomebodyError(
            f"No impression of {path} can be used: each needs a known user, an item that was clicked and one "
            "that was not."
        )
    return once


def _impressions(rows: pl.DataFrame) -> Impressions:
    # Sorting is stable: what the file shows first stands first.
    rows = (
        rows.with_row_index("first")
        .with_columns(pl.col("time", "first").min().over("impression"))
        .sort("user", "time", "first", maintain_order=True)
    )
    starts = np.flatnonzero(np.diff(rows["first"].cast(pl.Int64).to_numpy(), prepend=-1))
    return Impressions(
        users=rows["user"].to_numpy()[starts].astype(np.int64),
        indptr=np.append(starts, rows.height).astype(np.int64),
        items=rows["item"].cast(pl.Int32).to_numpy(),
        clicked=rows["clicked"].to_numpy(),
    )

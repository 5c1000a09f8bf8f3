"""EB-NeRD, the news data of Ekstra Bladet (Kruse et al. 2024): demo, small or large.

The published folders hold `train` and `validation`, each with `behaviors.parquet` and `history.parquet`, and perhaps
`articles.parquet`. Files that were renamed to `train_behaviors.parquet` and so on are read as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from homebody.data.news import described, with_impressions
from homebody.data.population import Impressions, Kind, Population, pointers
from homebody.errors import HomebodyError

__all__ = ["WEEKS", "read_ebnerd"]

WEEKS = ("train", "validation")
"""Two weeks, one after the other; what people had read is given as of the beginning of each."""
BEHAVIOURS = ("user_id", "impression_time", "article_ids_inview", "article_ids_clicked")
HISTORY = ("user_id", "impression_time_fixed", "article_id_fixed")
ARTICLES: dict[str, Kind] = {"category": "categorical", "title": "sequence", "subtitle": "sequence", "body": "sequence"}


def read_ebnerd(folder: Path) -> Population:
    """EB-NeRD from a folder with the behaviours and histories of one week or two.

    The two histories of a person are one, by time. An impression comes after what its week's history held, so that
    what somebody read within a week is not before the impressions of that week. Articles are known by id alone where
    there is no `articles.parquet`.
    """
    weeks = [week for week in WEEKS if _file(folder, week, "behaviors").exists()]
    if not weeks:
        raise HomebodyError(
            f"{folder} has no train/behaviors.parquet and no validation/behaviors.parquet: put EB-NeRD's files there."
        )
    read = {week: _history(_file(folder, week, "history")) for week in weeks}
    shown = {week: _behaviours(_file(folder, week, "behaviors")) for week in weeks}
    history = pl.concat(read.values()).unique(maintain_order=True).sort("user", "time", maintain_order=True)
    user_ids = pl.concat([history["user"], *(some["user"] for some in shown.values())]).unique().sort()
    entries = [some["shown"].explode() for some in shown.values()]
    item_ids = pl.concat([history["item"], *entries]).unique().sort()
    owner = user_ids.search_sorted(history["user"]).to_numpy().astype(np.int64)
    table = pl.concat(shown.values())
    whose = {week: user_ids.search_sorted(some["user"]).to_numpy().astype(np.int64) for week, some in shown.items()}
    before = []
    for week in weeks:
        known = history["time"] <= read[week]["time"].max()
        before.append(np.bincount(owner[known.to_numpy()], minlength=len(user_ids))[whose[week]])
    marks = table.select("shown", "clicked").explode("shown")
    marks = marks.with_columns(clicked=pl.col("shown").is_in(pl.col("clicked")).fill_null(False))
    people = Population(
        "ebnerd",
        pointers(np.bincount(owner, minlength=len(user_ids))),
        item_ids.search_sorted(history["item"]).to_numpy().astype(np.int32),
        n_items=len(item_ids),
        times=history["time"].dt.epoch("s").to_numpy(),
        user_ids=user_ids,
        item_ids=item_ids,
    )
    people = _described(people, folder / "articles.parquet")
    impressions = Impressions(
        np.concatenate(list(whose.values())),
        pointers(table["shown"].list.len().to_numpy()),
        item_ids.search_sorted(marks["shown"]).to_numpy().astype(np.int32),
        marks["clicked"].to_numpy(),
        table["time"].dt.epoch("s").to_numpy(),
        np.concatenate(before).astype(np.int64),
    )
    return with_impressions(people, impressions)


def _file(folder: Path, week: str, name: str) -> Path:
    renamed = folder / f"{week}_{name}.parquet"
    return renamed if renamed.exists() else folder / week / f"{name}.parquet"


def _columns(path: Path, columns: tuple[str, ...]) -> pl.DataFrame:
    try:
        return pl.read_parquet(path, columns=list(columns))
    except FileNotFoundError:
        raise HomebodyError(f"{path} is missing, which EB-NeRD needs: put it there.") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")[:200]
        raise HomebodyError(f"{path} needs the columns {', '.join(columns)} of EB-NeRD: {reason}.") from error


def _history(path: Path) -> pl.DataFrame:
    table = _columns(path, HISTORY)
    uneven = table["impression_time_fixed"].list.len() != table["article_id_fixed"].list.len()
    if uneven.any():
        whom = table["user_id"][int(uneven.arg_max() or 0)]
        raise HomebodyError(f"{path} is malformed: the history of user {whom} has more articles than times, or fewer.")
    flat = table.explode("impression_time_fixed", "article_id_fixed").drop_nulls()
    return flat.select(
        user=pl.col("user_id"), time=pl.col("impression_time_fixed"), item=pl.col("article_id_fixed").cast(pl.Int64)
    )


def _behaviours(path: Path) -> pl.DataFrame:
    table = _columns(path, BEHAVIOURS)
    listed = pl.List(pl.Int64)
    table = table.select(
        user=pl.col("user_id"),
        time=pl.col("impression_time"),
        shown=pl.col("article_ids_inview").cast(listed),
        clicked=pl.col("article_ids_clicked").cast(listed),
    )
    bad = table.select(
        pl.any_horizontal(pl.all().is_null()) | (pl.col("shown").list.len() == 0)
        | (pl.col("clicked").list.set_difference("shown").list.len() > 0)
    ).to_series()  # fmt: skip
    if bad.any():
        row = int(bad.arg_max() or 0) + 1
        raise HomebodyError(
            f"Row {row:,} of {path} is malformed: an impression has a user, a time, articles in view, and its clicks "
            "are among them."
        )
    return table


def _described(people: Population, path: Path) -> Population:
    if not path.exists():
        note = f"There is no {path.name}, so articles are known by id alone, without text."
        return replace(people, notes=(*people.notes, note))
    table = _columns(path, ("article_id", "title", "subtitle", "body", "category_str"))
    table = table.rename({"article_id": "id", "category_str": "category"}).with_columns(pl.col("id").cast(pl.Int64))
    return described(people, str(path), table, ARTICLES)

"""Articles of IBM Watson Studio: who clicked which, with titles and bodies. There are no times and no impressions.

So impressions are drawn: a click of a person among articles that they did not click.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.news import described, with_impressions
from homebody.data.population import Impressions, Kind, Population, build
from homebody.data.published import file_bytes, read_rows
from homebody.errors import several

__all__ = ["read_ibm_articles"]

FEWEST = 4
"""People with fewer different articles get no impression."""
OTHERS = 19
"""Articles that an impression shows beside the one that was clicked."""
SEED = 0
AT_ONCE = 4096
"""Impressions that are drawn together."""
KINDS: dict[str, Kind] = dict.fromkeys(("title", "description", "body"), "sequence")


def read_ibm_articles(folder: Path, *, seed: int = SEED, by_popularity: bool = True) -> Population:
    """The clicks and articles from a folder that holds `user-item-interactions.csv` and `articles_community.csv`.

    Clicks without a person are left out. The second file has bodies of some articles, and may be packed as `.xz`.

    Everyone with at least four different articles gets impressions: one for each different article from the fourth on,
    of it and of 19 articles that they did not click, drawn without repetition by the number of their clicks. If these
    were drawn evenly, popularity alone would tell the click. A history is in the order of the file, but for one article
    of each person, drawn evenly, whose clicks stand last. An impression came before the first click on its article. A
    model is asked about that of the drawn article alone; the others are for learning. All of it depends on the seed
    alone.
    """
    path = folder / "user-item-interactions.csv"
    columns = {"article_id": pl.Float64, "title": pl.String, "email": pl.String}
    rows = read_rows(
        file_bytes(path), path, columns, separator=",", header=("", *columns), needed=["article_id"], quote='"'
    )
    nobody = rows["email"].null_count()
    rows = rows.drop_nulls("email").with_columns(pl.col("article_id").cast(pl.Int64))
    people = build("ibm-articles", rows["email"], rows["article_id"])
    titles = rows.unique("article_id", keep="first", maintain_order=True).select(id="article_id", title="title")
    table = titles.join(_bodies(folder), on="id", how="left", maintain_order="left")
    people = described(people, path.name, table, KINDS)
    items, shown = _drawn(people, np.random.default_rng([seed, *b"ibm-articles"]), by_popularity)
    how = "by the number of their clicks" if by_popularity else "evenly"
    many = several(len(np.unique(shown.users)), "person", "people")
    notes = [f"{several(nobody, 'click names', 'clicks name')} no person: left out."] if nobody else []
    notes.append(
        f"ibm-articles has no impressions, so they are drawn (seed {seed}): {many} with {FEWEST} different "
        f"articles or more get one for each from the fourth on, of that article and {OTHERS} others, drawn {how}; "
        "one of each person, drawn evenly, is asked about, and the others are for learning alone."
    )
    return with_impressions(replace(people, items=items, notes=(*people.notes, *notes)), shown)


def _bodies(folder: Path) -> pl.DataFrame:
    plain = folder / "articles_community.csv"
    path = plain if plain.exists() else folder / "articles_community.csv.xz"
    header = ("", "doc_body", "doc_description", "doc_full_name", "doc_status", "article_id")
    columns = {"doc_body": pl.String, "doc_description": pl.String, "article_id": pl.Int64}
    table = read_rows(file_bytes(path), path, columns, separator=",", header=header, needed=["article_id"], quote='"')
    return table.select(id="article_id", description="doc_description", body="doc_body").unique(
        "id", keep="first", maintain_order=True
    )


def _drawn(
    people: Population, generator: np.random.Generator, by_popularity: bool
) -> tuple[npt.NDArray[np.int32], Impressions]:
    """Everyone's articles with the clicks on the drawn ones last, and the impressions."""
    owner = np.repeat(np.arange(people.n_users), people.lengths)
    has = np.zeros((people.n_users, people.n_items), dtype=np.bool_)
    has[owner, people.items] = True
    users = np.flatnonzero((has.sum(1) >= FEWEST) & (people.n_items - has.sum(1) >= OTHERS))
    chosen = np.full(people.n_users, -1)
    chosen[users] = np.where(has[users], generator.random((len(users), people.n_items)), np.inf).argmin(1)
    order = np.lexsort((people.items == chosen[owner], owner))
    items = people.items[order]
    # An article counts where it stands first: from the fourth different one on, each gets an impression.
    first = np.unique(owner * people.n_items + items, return_index=True)[1]
    new = np.zeros(len(items), dtype=np.int64)
    new[first] = 1
    place = np.cumsum(new) - new  # different articles of everyone before
    place -= place[people.indptr[owner]]
    asked = np.flatnonzero((new > 0) & (place >= FEWEST - 1) & (chosen[owner] >= 0))
    whose = owner[asked]
    shown = np.empty((len(asked), OTHERS + 1), dtype=np.int32)
    shown[:, 0] = items[asked]
    weights = people.popularity if by_popularity else np.ones(people.n_items)
    for start in range(0, len(asked), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        # Of exponential draws divided by weights, the lowest are a sample without repetition by these weights.
        keys = generator.exponential(size=(len(whose[some]), people.n_items)) / weights
        keys[has[whose[some]]] = np.inf
        lowest = np.argpartition(keys, OTHERS - 1, axis=1)[:, :OTHERS]  # all of them need not be in order
        order = np.take_along_axis(keys, lowest, axis=1).argsort(1, kind="stable")
        shown[some, 1:] = np.take_along_axis(lowest, order, axis=1)
    # The click stands at any place, so that no order of equal scores gives it away.
    places = generator.random(shown.shape).argsort(1)
    return items, Impressions(
        whose,
        np.arange(len(asked) + 1, dtype=np.int64) * (OTHERS + 1),
        np.take_along_axis(shown, places, axis=1).ravel(),
        (places == 0).ravel(),
        before=asked - people.indptr[whose],
        asked=items[asked] == chosen[whose],
    )

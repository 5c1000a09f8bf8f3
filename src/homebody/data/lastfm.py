"""Lastfm-2K (HetRec 2011, Cantador et al.) in the form that PFedRec's authors train on.

`ratings.dat` has a row for every tag that someone gave an artist (user, artist, tag, time in milliseconds),
without the people of fewer than five rows. Every row is an interaction, so an artist of three tags stands three
times in a history, and which tag it was is left out: a tag is known only once the artist is chosen. Times become
seconds. Five are dated 1956 to 1979; they are kept as published. `artists.dat` gives the artists'
names; it may be absent, and an artist that it lacks is called by number.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl

from homebody.data.builder import build
from homebody.data.population import Population
from homebody.data.reading import file_bytes, read_rows, rows_for

__all__ = ["read_lastfm_2k"]

COLUMNS = {"user": pl.Int32, "artist": pl.Int32, "tag": pl.Int32, "time": pl.Int64}
ARTISTS = ("id", "name", "url", "pictureURL")


def read_lastfm_2k(folder: Path) -> Population:
    """Lastfm-2K from a folder that holds `ratings.dat` and, for names, `artists.dat`."""
    path = folder / "ratings.dat"
    rows = read_rows(file_bytes(path), path, COLUMNS, separator=",")
    people = build("lastfm-2k", rows["user"], rows["artist"], times=rows["time"] // 1000)
    path = folder / "artists.dat"
    if not path.exists():
        return people
    artists = read_rows(
        file_bytes(path), path, {"id": pl.Int32, "name": pl.String}, separator="\t", header=ARTISTS, needed=["id"]
    )
    assert people.item_ids is not None
    named = rows_for(people.item_ids, artists)
    assert named is not None
    return replace(people, item_names=named["name"].fill_null(people.item_ids.cast(pl.String)))

"""Amazon Instant Video (McAuley et al. 2015) in the form that PFedRec's authors train on.

`ratings.dat` has a row for every rating (user, item, stars, time in seconds), without the people of fewer than
five. Times are whole days, so most of a history may be tied; ties keep the order of the file, which is by item.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from homebody.data.builder import build
from homebody.data.population import Population
from homebody.data.reading import file_bytes, read_rows

__all__ = ["read_amazon_video"]

COLUMNS = {"user": pl.String, "item": pl.String, "rating": pl.Float32, "time": pl.Int64}


def read_amazon_video(folder: Path) -> Population:
    """Amazon Instant Video from a folder that holds `ratings.dat`."""
    path = folder / "ratings.dat"
    rows = read_rows(file_bytes(path), path, COLUMNS, separator=",")
    return build("amazon-video", rows["user"], rows["item"], times=rows["time"], ratings=rows["rating"])

"""MovieLens-100K, -1M, -20M and -25M (Harper and Konstan 2015), read from the files their sources ship.

GroupLens ships MovieLens-100K as `u.data`, `u.item` and `u.user`; RecBole ships the same rows in the same
order as `ml-100k.inter`, `.item` and `.user`, in UTF-8 and with the year apart from the title. Both give
equal populations. The others are read from their zip without unpacking, or from its members in the folder:
`ratings.dat` beside `movies.dat` and `users.dat` for MovieLens-1M, `ratings.csv` beside `movies.csv` for the
larger ones. There only the movies someone rated are items. Files that describe users or items may be absent:
then the population has no features or titles.

Features of users: age, gender, occupation (none in the larger ones), all in the view `profile`. MovieLens-100K has
ages in years, a number from 0 to 100; MovieLens-1M has seven ranges, which are categories. Their vocabularies are the
published lists (`u.occupation`, and the README of MovieLens-1M), whoever is in the data. Features of items: genres,
the year, and the title as published (with its year) as a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl

from homebody.data.codes import Code, Scale
from homebody.data.population import Features, Kind, Population, build
from homebody.data.published import file_bytes, member_bytes, named, read_rows, rows_for
from homebody.errors import HomebodyError

__all__ = ["read_ml_1m", "read_ml_100k", "read_ml_large"]

Describe = Callable[[pl.DataFrame], pl.DataFrame]

# The order of the flags in u.item.
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)

# MovieLens-1M codes what MovieLens-100K spells out.
OCCUPATIONS = (
    *("other", "academic/educator", "artist", "clerical/admin", "college/grad student", "customer service"),
    *("doctor/health care", "executive/managerial", "farmer", "homemaker", "K-12 student", "lawyer", "programmer"),
    *("retired", "sales/marketing", "scientist", "self-employed", "technician/engineer", "tradesman/craftsman"),
    *("unemployed", "writer"),
)

# As in u.occupation.
JOBS = (
    *("administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive", "healthcare"),
    *("homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer", "retired", "salesman"),
    *("scientist", "student", "technician", "writer"),
)
GENDERS = Code("one", ("F", "M"))
PEOPLE_100K = {
    "age": Code("number", scale=Scale.within(0, 100)),
    "gender": GENDERS,
    "occupation": Code("one", JOBS),
}
PEOPLE_1M = {
    "age": Code("one", ("1", "18", "25", "35", "45", "50", "56")),
    "gender": GENDERS,
    "occupation": Code("one", tuple(sorted(OCCUPATIONS))),
}

ITEM_KINDS: dict[str, Kind] = {"genres": "multi-hot", "year": "numeric", "title": "text"}
RATINGS = {"user": pl.Int32, "item": pl.Int32, "rating": pl.Float32, "time": pl.Int64}
LARGE_RATINGS = {"userId": pl.Int32, "movieId": pl.Int32, "rating": pl.Float32, "timestamp": pl.Int64}
LARGE_MOVIES = {"movieId": pl.Int32, "title": pl.String, "genres": pl.String}


def read_ml_100k(folder: Path) -> Population:
    """MovieLens-100K from a folder in either layout; GroupLens' own where both are there."""
    if (folder / "u.data").exists():
        ratings = _ratings(file_bytes(folder / "u.data"), folder / "u.data")
        people = _described_by(folder / "u.user", _people_100k, separator="|")
        movies = _described_by(folder / "u.item", _movies_grouplens, separator="|", encoding="latin-1")
    else:
        path = folder / "ml-100k.inter"
        ratings = _ratings(file_bytes(path), path, header=True)
        people = _described_by(folder / "ml-100k.user", _people_100k, header=True)
        movies = _described_by(folder / "ml-100k.item", _movies_recbole, header=True)
    return _population("ml-100k", ratings, people, movies, PEOPLE_100K)


def read_ml_1m(folder: Path) -> Population:
    """MovieLens-1M from a folder that holds `ml-1m.zip`, or the unpacked `ratings.dat`."""

    def tabbed(part: str) -> bytes:
        return _part("ml-1m", folder, part)[0].replace(b"::", b"\t")

    ratings = tabbed("ratings.dat")
    people, movies = (
        _described(tabbed(part), folder / part, describe, encoding="latin-1") if _has("ml-1m", folder, part) else None
        for part, describe in (("users.dat", _people_1m), ("movies.dat", _movies_1m))
    )
    return _population("ml-1m", _ratings(ratings, folder / "ratings.dat"), people, movies, PEOPLE_1M)


def read_ml_large(name: str, folder: Path) -> Population:
    """MovieLens-20M or -25M from a folder that holds its zip, or the unpacked `ratings.csv`."""

    def rows(part: str, columns: Mapping[str, type[pl.DataType]], quote: str | None = None) -> pl.DataFrame:
        text, of = _part(name, folder, part)
        return read_rows(text, of, columns, separator=",", header=tuple(columns), quote=quote)

    movies = _movies_large(rows("movies.csv", LARGE_MOVIES, '"')) if _has(name, folder, "movies.csv") else None
    ratings = rows("ratings.csv", LARGE_RATINGS)
    ratings.columns = list(RATINGS)
    return _population(name, ratings, None, movies)


def _has(name: str, folder: Path, part: str) -> bool:
    """Whether the folder has a part of this data set; a zip has all of them."""
    return (folder / f"{name}.zip").exists() or (folder / part).exists()


def _part(name: str, folder: Path, part: str) -> tuple[bytes, str]:
    """A part of this data set, from its zip or unpacked, and what an error calls it."""
    archive = folder / f"{name}.zip"
    if archive.exists():
        return member_bytes(archive, f"{name}/{part}"), f"{archive} ({part})"
    return file_bytes(folder / part), str(folder / part)


def _population(
    name: str,
    ratings: pl.DataFrame,
    people: pl.DataFrame | None,
    movies: pl.DataFrame | None,
    declared: Mapping[str, Code] = MappingProxyType({}),
) -> Population:
    bare = build(name, ratings["user"], ratings["item"], times=ratings["time"], ratings=ratings["rating"])
    if people is not None:
        kinds: dict[str, Kind] = {
            name: "numeric" if code.kind == "number" else "categorical" for name, code in declared.items()
        }
        about = rows_for(bare.user_ids, people)
        bare = replace(bare, user_features=Features(about, kinds, declared, dict.fromkeys(declared, "profile")))
    if movies is not None:
        about = rows_for(bare.item_ids, movies)
        bare = replace(bare, item_names=named(bare, about["title"]), item_features=Features(about, ITEM_KINDS))
    return bare


def _ratings(text: bytes, path: Path, *, header: bool = False) -> pl.DataFrame:
    return read_rows(text, path, RATINGS, separator="\t", skip_header=header)


def _described_by(path: Path, describe: Describe, **form: Any) -> pl.DataFrame | None:
    return _described(file_bytes(path), path, describe, **form) if path.exists() else None


def _described(
    text: bytes, path: Path, describe: Describe, *, separator: str = "\t", encoding: str = "utf-8", header: bool = False
) -> pl.DataFrame:
    """What `describe` makes of the columns, all as text and named by their place from 0.

    Titles hold quotes that quote nothing.
    """
    if encoding != "utf-8":
        text = text.decode(encoding).encode()
    try:
        table = pl.read_csv(
            text, separator=separator, has_header=False, skip_rows=int(header), quote_char=None, infer_schema=False
        )
        table.columns = [str(place) for place in range(table.width)]
        return describe(table)
    except pl.exceptions.PolarsError as error:
        reason = (str(error).splitlines() or ["it is empty"])[0].rstrip(".:")
        raise HomebodyError(f"{path} cannot be read and may be damaged: {reason}.") from error


ID = pl.col("0").cast(pl.Int32).alias("id")


def _people_100k(table: pl.DataFrame) -> pl.DataFrame:
    return table.select(ID, age=pl.col("1").cast(pl.Int32), gender=pl.col("2"), occupation=pl.col("3"))


def _people_1m(table: pl.DataFrame) -> pl.DataFrame:
    """Ages are the lower ends of the published ranges: 1 (under 18), 18, 25, 35, 45, 50 and 56."""
    occupation = pl.Series(OCCUPATIONS).gather(table["3"].cast(pl.UInt32))
    return table.select(ID, age=pl.col("2").cast(pl.Int32), gender=pl.col("1"), occupation=occupation)


def _year(title: pl.Expr) -> pl.Expr:
    """The last year in brackets: some titles go on after it, as in 'Land Before Time III (1995) (V)'."""
    return title.str.extract(r".*\((\d{4})\)").cast(pl.Int32)


def _movies_grouplens(table: pl.DataFrame) -> pl.DataFrame:
    flags = [pl.when(pl.col(f"{place}") == "1").then(pl.lit(genre)) for place, genre in enumerate(GENRES, start=5)]
    title = pl.col("1").str.strip_chars()
    return table.select(ID, genres=pl.concat_list(flags).list.drop_nulls(), year=_year(title), title=title)


def _movies_recbole(table: pl.DataFrame) -> pl.DataFrame:
    # One movie has no title; RecBole misspells the word that says so.
    title = (
        pl.when(pl.col("1") == "unkonwn")
        .then(pl.lit("unknown"))
        .otherwise(pl.format("{} ({})", pl.col("1"), pl.col("2")))
    )
    return table.select(ID, genres=pl.col("3").str.split(" "), year=_year(title), title=title)


def _movies_1m(table: pl.DataFrame) -> pl.DataFrame:
    title = pl.col("1")
    return table.select(ID, genres=pl.col("2").str.split("|"), year=_year(title), title=title)


def _movies_large(table: pl.DataFrame) -> pl.DataFrame:
    listed = pl.when(pl.col("genres") != "(no genres listed)").then(pl.col("genres").str.split("|"))
    title = pl.col("title")
    return table.select(pl.col("movieId").alias("id"), genres=listed, year=_year(title), title=title)

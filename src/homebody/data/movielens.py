"""MovieLens-100K and -1M (Harper and Konstan 2015), read from the files their sources ship.

GroupLens ships MovieLens-100K as `u.data`, `u.item` and `u.user`; RecBole ships the same rows in the same
order as `ml-100k.inter`, `.item` and `.user`, in UTF-8 and with the year apart from the title. Both give
equal populations. MovieLens-1M is read from `ml-1m.zip` without unpacking, or from `ratings.dat` beside
`movies.dat` and `users.dat`; only the movies someone rated are items. Files that describe users or items
may be absent: then the population has no features or titles.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl

from homebody.data.builder import build
from homebody.data.features import Features, Kind
from homebody.data.population import Population
from homebody.errors import HomebodyError

__all__ = ["read_ml_1m", "read_ml_100k"]

# The order of the flags in u.item.
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *(
        "Fantasy",
        "Film-Noir",
        "Horror",
        "Musical",
        "Mystery",
        "Romance",
        "Sci-Fi",
        "Thriller",
        "War",
        "Western",
    ),
)

# MovieLens-1M codes what MovieLens-100K spells out.
OCCUPATIONS = (
    "other",
    "academic/educator",
    "artist",
    "clerical/admin",
    "college/grad student",
    "customer service",
    "doctor/health care",
    "executive/managerial",
    "farmer",
    "homemaker",
    "K-12 student",
    "lawyer",
    "programmer",
    "retired",
    "sales/marketing",
    "scientist",
    "self-employed",
    "technician/engineer",
    "tradesman/craftsman",
    "unemployed",
    "writer",
)

USER_KINDS: dict[str, Kind] = {"age": "categorical", "gender": "categorical", "occupation": "categorical"}
ITEM_KINDS: dict[str, Kind] = {"genres": "multi-hot", "year": "numeric"}
COLUMNS = ("user", "item", "rating", "time")
TYPES = (pl.Int32, pl.Int32, pl.Float32, pl.Int64)


def read_ml_100k(folder: Path) -> Population:
    """MovieLens-100K from a folder in either layout; GroupLens' own where both are there."""
    if (folder / "u.data").exists():
        ratings = _ratings(_bytes(folder / "u.data"))
        people = _described_by(folder / "u.user", _people_100k, separator="|")
        movies = _described_by(folder / "u.item", _movies_grouplens, separator="|", encoding="latin-1")
    else:
        ratings = _ratings(_bytes(folder / "ml-100k.inter"), header=True)
        people = _described_by(folder / "ml-100k.user", _people_100k, header=True)
        movies = _described_by(folder / "ml-100k.item", _movies_recbole, header=True)
    return _population("ml-100k", ratings, people, movies)


def read_ml_1m(folder: Path) -> Population:
    """MovieLens-1M from a folder that holds `ml-1m.zip`, or the unpacked `ratings.dat`."""
    archive = folder / "ml-1m.zip"
    parts = ("ratings.dat", "users.dat", "movies.dat")
    if archive.exists():
        try:
            with zipfile.ZipFile(archive) as pack:
                ratings, users, movies = (pack.read(f"ml-1m/{part}") for part in parts)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise HomebodyError(f"{archive} is not the MovieLens-1M archive: {error}.") from error
    else:
        ratings = _bytes(folder / parts[0])
        users, movies = (_bytes(folder / part) if (folder / part).exists() else b"" for part in parts[1:])
    return _population(
        "ml-1m",
        _ratings(ratings.replace(b"::", b"\t")),
        _people_1m(_split(users.replace(b"::", b"\t"))) if users else None,
        _movies_1m(_split(movies.replace(b"::", b"\t"), encoding="latin-1")) if movies else None,
    )


def _population(
    name: str, ratings: pl.DataFrame, people: pl.DataFrame | None, movies: pl.DataFrame | None
) -> Population:
    bare = build(name, ratings["user"], ratings["item"], times=ratings["time"], ratings=ratings["rating"])
    about_users = _rows_for(bare.user_ids, people)
    about_items = _rows_for(bare.item_ids, movies)
    return replace(
        bare,
        user_features=None if about_users is None else Features(about_users, USER_KINDS),
        item_names=None if about_items is None else about_items["name"],
        item_features=None if about_items is None else Features(about_items.drop("name"), ITEM_KINDS),
    )


def _rows_for(ids: pl.Series | None, table: pl.DataFrame | None) -> pl.DataFrame | None:
    """The table's rows in the order of the ids; what it says of anyone else is left out."""
    if ids is None or table is None:
        return None
    return ids.rename("id").to_frame().join(table, on="id", how="left", maintain_order="left").drop("id")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HomebodyError(f"{path} cannot be read: {error.strerror or error}.") from error


def _ratings(text: bytes, *, header: bool = False) -> pl.DataFrame:
    try:
        return pl.read_csv(
            text,
            separator="\t",
            has_header=False,
            skip_rows=int(header),
            new_columns=list(COLUMNS),
            schema_overrides=list(TYPES),
        )
    except pl.exceptions.PolarsError as error:
        raise HomebodyError(f"The ratings cannot be read: {str(error).splitlines()[0]}.") from error


def _split(text: bytes, *, separator: str = "\t", encoding: str = "utf-8", header: bool = False) -> pl.DataFrame:
    """Every column as text, named by its place from 0. Titles hold quotes that quote nothing."""
    if encoding != "utf-8":
        text = text.decode(encoding).encode()
    table = pl.read_csv(
        text,
        separator=separator,
        has_header=False,
        skip_rows=int(header),
        quote_char=None,
        infer_schema=False,
    )
    table.columns = [str(place) for place in range(table.width)]
    return table


def _described_by(
    path: Path,
    describe: Callable[[pl.DataFrame], pl.DataFrame],
    *,
    separator: str = "\t",
    encoding: str = "utf-8",
    header: bool = False,
) -> pl.DataFrame | None:
    if not path.exists():
        return None
    try:
        return describe(_split(_bytes(path), separator=separator, encoding=encoding, header=header))
    except pl.exceptions.PolarsError as error:
        raise HomebodyError(f"{path} cannot be read: {str(error).splitlines()[0]}.") from error


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
    return table.select(ID, name=title, genres=pl.concat_list(flags).list.drop_nulls(), year=_year(title))


def _movies_recbole(table: pl.DataFrame) -> pl.DataFrame:
    # One movie has no title; RecBole misspells the word that says so.
    title = (
        pl.when(pl.col("1") == "unkonwn")
        .then(pl.lit("unknown"))
        .otherwise(pl.format("{} ({})", pl.col("1"), pl.col("2")))
    )
    return table.select(ID, name=title, genres=pl.col("3").str.split(" "), year=_year(title))


def _movies_1m(table: pl.DataFrame) -> pl.DataFrame:
    title = pl.col("1")
    return table.select(ID, name=title, genres=pl.col("2").str.split("|"), year=_year(title))

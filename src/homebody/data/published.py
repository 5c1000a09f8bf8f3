"""The published data sets that take a small reader: Amazon-Video, Book-Crossing, Lastfm-2K and Frappe.

What is wrong with a file becomes a sentence that names it. MovieLens has a module of its own.
"""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from homebody.data.codes import Code
from homebody.data.population import Features, Kind, Population, build
from homebody.errors import HomebodyError
from homebody.files import insisting

__all__ = [
    "file_bytes",
    "member_bytes",
    "named",
    "read_amazon_video",
    "read_book_crossing",
    "read_frappe",
    "read_lastfm_2k",
    "read_rows",
    "rows_for",
]

# Frappe's circumstances and apps.
CONTEXTS: dict[str, type[pl.DataType]] = {
    **dict.fromkeys(("daytime", "weekday", "isweekend", "homework", "cost", "weather", "country"), pl.String),
    # Cities are numbers that name none.
    "city": pl.Int32,
}
DECLARED = {
    "daytime": Code("one", ("afternoon", "evening", "morning", "night", "noon", "sunrise", "sunset")),
    "weekday": Code("one", ("friday", "monday", "saturday", "sunday", "thursday", "tuesday", "wednesday")),
    "isweekend": Code("one", ("weekend", "workday")),
    "homework": Code("one", ("home", "work")),
    "cost": Code("one", ("free", "paid")),
    "weather": Code("one", ("cloudy", "drizzle", "foggy", "rainy", "sleet", "snowy", "stormy", "sunny")),
    "country": Code("one", buckets=256),
    "city": Code("one", buckets=1024),
}
USES: dict[str, type[pl.DataType]] = {"user": pl.Int32, "item": pl.Int32, "cnt": pl.Float32, **CONTEXTS}
APPS = (
    *("item", "package", "category", "downloads", "developer", "icon", "language", "description", "name"),
    *("price", "rating", "short desc"),
)
APP_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("category", "downloads", "developer", "language"), "categorical"),
    **dict.fromkeys(("price", "stars"), "numeric"),
    **dict.fromkeys(("name", "short_description"), "text"),
}


def file_bytes(path: Path) -> bytes:
    """The file's content, unpacked if its name ends in `.xz`."""
    try:
        with insisting(f"{path} cannot be read"):
            return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise HomebodyError(f"{path} cannot be unpacked and may be damaged: {str(error).rstrip('.')}.") from error


def member_bytes(archive: Path, member: str) -> bytes:
    """One member of a zip archive."""
    try:
        with insisting(f"{archive} cannot be read"), zipfile.ZipFile(archive) as pack:
            return pack.read(member)
    except KeyError:
        raise HomebodyError(f"{archive} is not the published archive: it holds no {member}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise HomebodyError(f"{archive} cannot be unpacked and may be damaged: {str(error).rstrip('.')}.") from error


def read_rows(
    text: bytes,
    of: Path | str,
    columns: Mapping[str, type[pl.DataType]],
    *,
    separator: str,
    header: Sequence[str] | None = None,
    skip_header: bool = False,
    needed: Sequence[str] | None = None,
    quote: str | None = None,
) -> pl.DataFrame:
    """The rows of a published file as these columns.

    With a `header` the file's first line has exactly these names, of which `columns` are kept; without one the
    columns are known by their place, and `skip_header` skips a first line that nobody relies on. No row may lack a
    value in the `needed` columns; by default these are all.

    >>> read_rows(b"1,7\\n2,\\n", "toy.csv", {"user": pl.Int32, "item": pl.Int32}, separator=",")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: toy.csv has no item in row 2, so it is damaged or not the published file.
    """
    first = text.partition(b"\n")[0].decode("utf-8-sig", errors="replace").strip("\r")
    names = [name.strip('"') for name in first.split(separator)]
    if header is not None and names != list(header):
        raise HomebodyError(
            f"{of} should start with the columns {', '.join(header)}, but starts with {_short(', '.join(names))}."
        )
    if header is None and not skip_header and first and len(names) != len(columns):
        raise HomebodyError(
            f"{of} should have {len(columns)} columns ({', '.join(columns)}), but its first row has {len(names)}."
        )
    try:
        table = pl.read_csv(
            text,
            separator=separator,
            has_header=header is not None,
            skip_rows=int(skip_header),
            columns=None if header is None else list(columns),
            new_columns=list(columns) if header is None else None,
            schema_overrides=dict(columns) if header is not None else list(columns.values()),
            quote_char=quote,
        )
    except pl.exceptions.NoDataError:
        raise HomebodyError(f"{of} is empty.") from None
    except pl.exceptions.PolarsError as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise HomebodyError(f"{of} cannot be read and may be damaged: {_short(reason)}.") from error
    for name in columns if needed is None else needed:
        if table[name].null_count():
            row = table[name].is_null().arg_max()
            raise HomebodyError(
                f"{of} has no {name} in row {(row or 0) + 1}, so it is damaged or not the published file."
            )
    return table.select(list(columns))


def rows_for(ids: pl.Series | None, table: pl.DataFrame) -> pl.DataFrame:
    """The table's rows in the order of the ids; what it says of anyone else is left out."""
    assert ids is not None
    return ids.rename("id").to_frame().join(table, on="id", how="left", maintain_order="left").drop("id")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} …"


def named(population: Population, names: pl.Series) -> pl.Series:
    """Names of the population's items. An item without a name is called by its id."""
    assert population.item_ids is not None
    return names.fill_null(population.item_ids.cast(pl.String))


def read_amazon_video(folder: Path) -> Population:
    """Amazon Instant Video (McAuley et al. 2015) from a folder that holds `ratings.dat`, as PFedRec's authors use it.

    The file has a row for every rating (user, item, stars, time in seconds), without the people of fewer than five.
    Times are whole days, so most of a history may be tied; ties keep the order of the file, which is by item.
    """
    path = folder / "ratings.dat"
    columns = {"user": pl.String, "item": pl.String, "rating": pl.Float32, "time": pl.Int64}
    rows = read_rows(file_bytes(path), path, columns, separator=",")
    return build("amazon-video", rows["user"], rows["item"], times=rows["time"], ratings=rows["rating"])


def read_book_crossing(folder: Path) -> Population:
    """Book-Crossing (Ziegler et al. 2005) from a folder that holds `BX-Book-Ratings.csv`, plain or as `.xz`.

    Ratings of books are from 1 to 10, and 0 where someone only registered a book. The file is semicolons, quotes and
    Latin-1; a backslash escapes a quote inside a field. Books are ISBNs as people typed them, mistakes included. There
    are no times: a history stands in the order of the file.
    """
    plain = folder / "BX-Book-Ratings.csv"
    path = plain if plain.exists() else folder / "BX-Book-Ratings.csv.xz"
    # CSV readers know quotes that are doubled, not escaped.
    text = file_bytes(path).replace(b'\\"', b'""').decode("latin-1").encode()
    columns = {"User-ID": pl.Int32, "ISBN": pl.String, "Book-Rating": pl.Float32}
    rows = read_rows(text, path, columns, separator=";", header=tuple(columns), quote='"')
    return build("book-crossing", rows["User-ID"], rows["ISBN"], ratings=rows["Book-Rating"])


def read_lastfm_2k(folder: Path) -> Population:
    """Lastfm-2K (HetRec 2011, Cantador et al.) from a folder that holds `ratings.dat`, as PFedRec's authors use it.

    The file has a row for every tag that someone gave an artist (user, artist, tag, time in milliseconds), without the
    people of fewer than five rows. Every row is an interaction, so an artist of three tags stands three times in a
    history, and which tag it was is left out: a tag is known only once the artist is chosen. Times become seconds. Five
    are dated 1956 to 1979; they are kept as published. `artists.dat` gives the artists' names and may be absent.
    """
    path = folder / "ratings.dat"
    columns = {"user": pl.Int32, "artist": pl.Int32, "tag": pl.Int32, "time": pl.Int64}
    rows = read_rows(file_bytes(path), path, columns, separator=",")
    people = build("lastfm-2k", rows["user"], rows["artist"], times=rows["time"] // 1000)
    path = folder / "artists.dat"
    if not path.exists():
        return people
    known, header = {"id": pl.Int32, "name": pl.String}, ("id", "name", "url", "pictureURL")
    artists = read_rows(file_bytes(path), path, known, separator="\t", header=header, needed=["id"])
    return replace(people, item_names=named(people, rows_for(people.item_ids, artists)["name"]))


def read_frappe(folder: Path) -> Population:
    """Frappe (Baltrunas et al. 2015) from a folder that holds `Mobile_Frappe.zip`, which is read without unpacking it.

    A row of `frappe.csv` is a user, an app and a circumstance (time of day, weekday, weather, place …) with the number
    of times it happened, `cnt`. Every row is an interaction, its circumstance the `contexts`, and `cnt` its rating.
    `cnt` exists only for what happened, so it must never become a feature of the app: there it would give away the
    label. There are no times; a history stands in the order of the file. Which countries and cities there are is
    published nowhere but in people's rows, so these are hashed; the other circumstances have fixed lists.

    Of the apps' shop pages (`meta.csv`) these are features: category, downloads (a range), developer and language as
    categories; price in dollars and the shop's mean stars as numbers; name and short description as texts. The package,
    the icon's address and the long description are left out. The word `unknown` becomes null, as does a price in
    another currency.
    """
    archive = folder / "Mobile_Frappe.zip"
    uses = read_rows(
        member_bytes(archive, "Mobile_Frappe/frappe/frappe.csv"),
        f"{archive} (frappe.csv)",
        USES,
        separator="\t",
        header=tuple(USES),
    )
    circumstances = uses.select(list(CONTEXTS)).with_columns(_known(name) for name in CONTEXTS if name != "city")
    people = build(
        "frappe",
        uses["user"],
        uses["item"],
        ratings=uses["cnt"],
        contexts=Features(circumstances, dict.fromkeys(CONTEXTS, "categorical"), DECLARED),
    )
    apps = rows_for(people.item_ids, _apps(archive))
    return replace(people, item_names=named(people, apps["name"]), item_features=Features(apps, APP_KINDS))


def _apps(archive: Path) -> pl.DataFrame:
    table = read_rows(
        member_bytes(archive, "Mobile_Frappe/frappe/meta.csv"),
        f"{archive} (meta.csv)",
        {"item": pl.Int32, **dict.fromkeys(APPS[1:], pl.String)},
        separator="\t",
        header=APPS,
        needed=["item"],
        quote='"',
    )
    dollars = pl.when(pl.col("price") == "Free").then(0.0).otherwise(_number(pl.col("price").str.strip_prefix("$")))
    return table.select(
        pl.col("item").alias("id"),
        *(_known(name) for name in ("category", "downloads", "developer", "language")),
        price=dollars.cast(pl.Float32),
        stars=_number(pl.col("rating")),
        name=_known("name"),
        short_description=_known("short desc"),
    )


def _known(column: str) -> pl.Expr:
    return pl.when(pl.col(column) != "unknown").then(pl.col(column)).alias(column)


def _number(text: pl.Expr) -> pl.Expr:
    """Null where the text is no number: unknown, or a price in another currency."""
    return text.cast(pl.Float32, strict=False)

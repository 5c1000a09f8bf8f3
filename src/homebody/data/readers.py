"""One table from wherever it is: a text file, Parquet, Excel, JSON lines, a database, or a data frame.

`read` gives the columns that are asked for, as they stand; `homebody.data.columns.FileColumn` says what they hold.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sqlite3
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

import polars as pl

from homebody.data.delimited import TAKEN, opened, read_text
from homebody.data.frames import Frame, as_polars, is_frame
from homebody.data.origins import FRAME, Layout, LoadedTable, Named, Origin, option
from homebody.errors import HomebodyError, install

__all__ = ["FILE_ENDINGS", "SCHEMES", "Source", "origin_of", "raw_table", "read"]

Choose = Callable[[list[str]], list[str]]
Source: TypeAlias = str | Path | Frame
"""A file, the address of a database, or a frame."""
FILE_ENDINGS = (
    *(
        f"{plain}{packed}"
        for plain in (".csv", ".tsv", ".txt", ".jsonl")
        for packed in ("", ".gz", ".zst", ".bz2", ".xz")
    ),
    *(".parquet", ".pq", ".ndjson", ".json", ".xlsx", ".xls", ".ods", ".feather", ".arrow", ".zip", ".dat", ".data"),
)
SCHEMES = ("sqlite://", "postgresql://", "postgres://")
Format = Literal["text", "parquet", "excel", "lines", "json", "arrow"]
PICTURES = {b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF", b"%PDF-": "PDF"}
SHEETS = (".xlsx", ".xls", ".ods")
DATABASES = ("mysql", "mariadb", "mssql", "oracle", "duckdb", "snowflake", "bigquery", "redshift")


def origin_of(source: Source, what: str = "") -> Origin:
    """What errors call a source. what: what a frame is called, such as the frame of user features.

    >>> str(origin_of("sqlite:///shop.db")), str(origin_of(pl.DataFrame()))
    ('sqlite:///shop.db', 'the frame')
    """
    if not isinstance(source, str | Path):
        if not is_frame(source):
            kind = type(source).__name__
            raise HomebodyError(
                "Data come from a name, a file, the address of a database or a data frame (pandas, polars, Arrow), "
                f"not from a {kind}."
            )
        return FRAME if not what else Named(what, what, "frame", typed=False)
    text = str(source)
    if isinstance(source, str) and text.startswith(SCHEMES):
        name = Path(unquote(urlsplit(text).path)).name or text
        return Named(text, name, Path(name).stem)
    return Path(text)


def read(source: Source, choose: Choose | None = None, layout: Layout | None = None, what: str = "") -> LoadedTable:
    """The columns of a source as they stand, those of text files as texts or whole numbers; `choose` picks from their
    names, otherwise all. What must be said of how it was read comes with them.

    >>> read(pl.DataFrame({"user": [1], "item": [2]}), lambda names: names[:1]).rows.columns
    ['user']
    """
    layout = layout or Layout()
    origin = origin_of(source, what)
    if isinstance(origin, Path):
        return _file(origin, choose, layout)
    if not isinstance(source, str | Path):
        table = as_polars(source, str(origin))
        if table.width == 0:
            raise HomebodyError(f"{str(origin).capitalize()} is empty: it needs a column of users and one of items.")
        return LoadedTable(table if choose is None else table.select(_distinct(choose(table.columns))), [])
    table = _query(origin, layout)
    return LoadedTable(table if choose is None else table.select(_distinct(choose(table.columns))), [])


def raw_table(path: Path, choose: Choose | None = None) -> pl.DataFrame:
    """The columns of a file as they stand: `read` without its remarks."""
    return read(path, choose).rows


def _distinct(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _file(path: Path, choose: Choose | None, layout: Layout) -> LoadedTable:
    form = _format(path)
    if layout.query is not None:
        raise HomebodyError(f"{option(path, 'query')} asks a database, and {path} is a file: leave it out.")
    if form == "text":
        return read_text(path, choose, layout)
    for name, given in (("separator", layout.separator), ("encoding", layout.encoding)):
        if given is not None:
            raise HomebodyError(f"{option(path, name)} is for text files, and {path} is none: leave it out.")
    if not layout.header and form != "excel":
        raise HomebodyError(f"{option(path, 'no_header')} is for text files and sheets, and {path} names its columns.")
    with _failures_named(path):
        if form == "parquet":
            names = list(pl.read_parquet_schema(path))
            return LoadedTable(pl.read_parquet(path, columns=None if choose is None else _distinct(choose(names))), [])
        notes: list[str] = []
        if form == "excel":
            table = _sheet(path, layout, notes)
        elif form == "arrow":
            table = pl.read_ipc(path)
        else:
            table = _objects(path, form)
    return LoadedTable(table if choose is None else table.select(_distinct(choose(table.columns))), notes)


def _format(path: Path) -> Format:
    """By the first bytes, which also prove that the file can be opened; of a text, by its name and its first "
    "character."""
    if path.is_dir():
        raise HomebodyError(
            f"{path} is a folder; give a CSV or Parquet file, or name a dataset and point --data-dir at its folder."
        )
    try:
        with path.open("rb") as file:
            magic = file.read(512)
    except FileNotFoundError:
        raise HomebodyError(f"There is no file {path}.") from None
    except OSError as error:
        raise HomebodyError(f"{path} cannot be opened: {error.strerror or error}.") from error
    if not magic:
        raise HomebodyError(f"{path} is empty: it needs a header line and at least one row.")
    ending = path.suffix.lower()
    if magic.startswith(b"PAR1") or ending in {".parquet", ".pq"}:
        return "parquet"
    if magic.startswith(b"ARROW1"):
        return "arrow"
    if magic.startswith(b"SQLite format 3"):
        raise HomebodyError(
            f"{path} is an SQLite database: give its address, sqlite:///{path}, and {option(path, 'query')} with the "
            "SELECT "
            "that gives users and items."
        )
    if magic.startswith(b"\xd0\xcf\x11\xe0") or _is_sheet(path, magic):
        return "excel"
    for begin, what in (
        (b"\x89HDF", "HDF5"),
        (b"\x93NUMPY", "numpy"),
        (b"\x80\x04", "pickle"),
        (b"\x80\x05", "pickle"),
    ):
        if magic.startswith(begin):
            raise HomebodyError(f"{path} is a {what} file, which is not read: save the table as Parquet or CSV.")
    picture = next((what for begin, what in PICTURES.items() if magic.startswith(begin)), None)
    if picture is not None:
        raise HomebodyError(f"{path} is a {picture} file, so it is no table: give a text file, Parquet or Excel.")
    begin = _unpacked_start(path)
    if ending in SHEETS and not any(mark.encode() in begin for mark in TAKEN):
        raise HomebodyError(f"{path} is no table: it is called a spreadsheet, and holds text of one column.")
    if ending == ".json" and begin[:1] == b"[":
        return "json"
    bare = path.name.lower().removesuffix(".gz").removesuffix(".zst")
    if bare.endswith((".jsonl", ".ndjson")) or begin.startswith((b'{"', b"{ ")):
        return "lines"
    return "text"


def _unpacked_start(path: Path) -> bytes:
    try:
        with opened(path) as file:
            return file.read(512).lstrip(b"\xef\xbb\xbf \t\r\n")
    except HomebodyError:
        return b""  # whoever reads it says what is wrong


def _is_sheet(path: Path, magic: bytes) -> bool:
    if not magic.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as pack:
            names = set(pack.namelist())
    except zipfile.BadZipFile as error:
        raise HomebodyError(
            f"{path} cannot be read as a table; it may be damaged: {str(error).rstrip('.')}."
        ) from error
    return "xl/workbook.xml" in names or "xl/workbook.bin" in names or "content.xml" in names


def _sheet(path: Path, layout: Layout, notes: list[str]) -> pl.DataFrame:
    """The first sheet of a workbook."""
    try:
        fastexcel = importlib.import_module("fastexcel")
    except ImportError:
        raise HomebodyError(
            f"{path} is a spreadsheet: install what reads it ({install('files')}), or save it as CSV."
        ) from None
    try:
        sheets = fastexcel.read_excel(path).sheet_names
        table = pl.read_excel(
            path,
            engine="calamine",
            has_header=layout.header,
            drop_empty_rows=False,
            drop_empty_cols=False,
            infer_schema_length=None,
        )
    except (fastexcel.FastExcelError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(f"{path} cannot be read as a table; it may be damaged: {reason}.") from error
    if len(sheets) > 1:
        notes.append(f"{path.name}: read the sheet '{sheets[0]}', the first of {len(sheets)}; save others as files.")
    if not layout.header:
        table.columns = [str(number) for number in range(1, table.width + 1)]
    # Rows that a sheet has below its table.
    while table.height and all(value is None for value in table.row(-1)):
        table = table.head(-1)
    return table


def _objects(path: Path, form: Format) -> pl.DataFrame:
    """JSON objects, a line each or in one list."""
    with opened(path) as file:
        content = file.read()
    if form == "json":
        return pl.read_json(content, infer_schema_length=None)
    try:
        table = pl.read_ndjson(content, infer_schema_length=None)
    except (pl.exceptions.PolarsError, RuntimeError):  # older versions of polars raise the latter
        _refuse_line(path, content)
        raise
    if table.height != sum(1 for line in content.splitlines() if line.strip()):
        _refuse_line(path, content)
        raise HomebodyError(f"{path} has lines that are no single JSON object: JSON lines have one in each line.")
    return table


def _refuse_line(path: Path, content: bytes) -> None:
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            known = not line.strip() or isinstance(json.loads(line), dict)
        except ValueError:
            known = False
        if not known:
            raise HomebodyError(
                f"Line {number:,} of {path} is no JSON object: JSON lines have one in each line, such as "
                '{"user": "ann", "item": "Emma"}.'
            ) from None


@contextmanager
def _failures_named(path: Path) -> Iterator[None]:
    try:
        yield
    except pl.exceptions.NoDataError:
        raise HomebodyError(f"{path} is empty: it needs a header line and at least one row.") from None
    except (pl.exceptions.PolarsError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(f"{path} cannot be read as a table; it may be damaged: {reason}.") from error


def _query(origin: Named, layout: Layout) -> pl.DataFrame:
    """What a database answers."""
    for name in ("separator", "encoding"):
        if getattr(layout, name) is not None:
            raise HomebodyError(f"{option(origin, name)} is for text files, and {origin} is a database: leave it out.")
    address = urlsplit(origin.full)
    if address.password is not None:
        raise HomebodyError(
            f"The address of the database {address.hostname} has a password, which would be kept with the run: leave "
            "it out, "
            "and give it in PGPASSWORD or in ~/.pgpass."
        )
    connect, errors = _sqlite(origin) if address.scheme == "sqlite" else _postgresql(origin)
    try:
        with contextlib.closing(connect()) as connection:
            query = layout.query or _only_table(origin, connection)
            cursor = connection.cursor()
            cursor.execute(query)
            if cursor.description is None:
                raise HomebodyError(
                    f"The query of {origin} gives no rows: give a SELECT with {option(origin, 'query')}."
                )
            names = [column[0] for column in cursor.description]
            twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
            if twice is not None:
                raise HomebodyError(f"The query of {origin} gives two columns called '{twice}': rename one with AS.")
            return pl.concat(_batches(cursor, names), how="vertical_relaxed")
    except errors as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise HomebodyError(f"{origin} does not answer: {reason}.") from error
    except pl.exceptions.PolarsError as error:
        raise HomebodyError(f"The answer of {origin} is no table: {str(error).splitlines()[0].rstrip('.')}.") from error


def _batches(cursor: Any, names: list[str]) -> Iterator[pl.DataFrame]:
    empty = True
    while rows := cursor.fetchmany(200_000):
        empty = False
        yield pl.DataFrame([_typed(name, values) for name, values in zip(names, zip(*rows, strict=True), strict=True)])
    if empty:
        yield pl.DataFrame(schema=dict.fromkeys(names, pl.String))


def _typed(name: str, values: tuple[Any, ...]) -> pl.Series:
    try:
        return pl.Series(name, values, strict=True)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        # A column of SQLite holds whatever was put into it.
        return pl.Series(name, [None if value is None else str(value) for value in values], dtype=pl.String)


def _sqlite(origin: Named) -> tuple[Callable[[], Any], type[Exception]]:
    file = Path(unquote(urlsplit(origin.full).path).removeprefix("/"))
    if not file.is_file():
        raise HomebodyError(
            f"There is no file {file} (three slashes before a relative path, four before an absolute one)."
        )
    return lambda: sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True), sqlite3.Error


def _postgresql(origin: Named) -> tuple[Callable[[], Any], type[Exception]]:
    try:
        psycopg = importlib.import_module("psycopg")
    except ImportError:
        raise HomebodyError(f"{origin} is a PostgreSQL database: install what reads it ({install('files')}).") from None

    def connect() -> Any:
        connection = psycopg.connect(origin.full)
        connection.read_only = True
        return connection

    return connect, psycopg.Error


def _only_table(origin: Named, connection: Any) -> str:
    """What reads the only table of an SQLite database."""
    names: list[str] = []
    if isinstance(connection, sqlite3.Connection):
        known = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")
        names = [name for (name,) in known if not name.startswith("sqlite_")]
        if len(names) == 1:
            quoted = names[0].replace('"', '""')
            return f'SELECT * FROM "{quoted}"'
    tables = f"; its tables are {', '.join(names)}" if names else ""
    example = option(origin, "query", "SELECT user, item FROM loans")
    raise HomebodyError(f"What of {origin} are the interactions? Give {example}, or the like{tables}.")

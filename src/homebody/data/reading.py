"""Reading the files that data sets are published as; what is wrong with one becomes a sentence that names it."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from homebody.errors import HomebodyError

__all__ = ["file_bytes", "member_bytes", "read_rows", "rows_for"]


def file_bytes(path: Path) -> bytes:
    """The file's content, unpacked if its name ends in `.xz`."""
    try:
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except OSError as error:
        raise HomebodyError(f"{path} cannot be read: {error.strerror or error}.") from error
    except lzma.LZMAError as error:
        raise HomebodyError(f"{path} cannot be unpacked and may be damaged: {str(error).rstrip('.')}.") from error


def member_bytes(archive: Path, member: str) -> bytes:
    """One member of a zip archive."""
    try:
        with zipfile.ZipFile(archive) as pack:
            return pack.read(member)
    except KeyError:
        raise HomebodyError(f"{archive} is not the published archive: it holds no {member}.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise HomebodyError(f"{archive} cannot be unpacked and may be damaged: {str(error).rstrip('.')}.") from error
    except OSError as error:
        raise HomebodyError(f"{archive} cannot be read: {error.strerror or error}.") from error


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
    columns are told by their place, and `skip_header` passes over a first line that no one relies on. No row
    may lack a value in the `needed` columns: all of them, unless told otherwise.

    >>> read_rows(b"1,7\\n2,\\n", "toy.csv", {"user": pl.Int32, "item": pl.Int32}, separator=",")
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: toy.csv has no item in row 2, so it is damaged or not the published file.
    """
    first = text.partition(b"\n")[0].decode("utf-8-sig", errors="replace").strip("\r")
    found = [name.strip('"') for name in first.split(separator)]
    if header is not None and found != list(header):
        raise HomebodyError(
            f"{of} should start with the columns {', '.join(header)}, but starts with {_short(', '.join(found))}."
        )
    if header is None and not skip_header and first and len(found) != len(columns):
        raise HomebodyError(
            f"{of} should have {len(columns)} columns ({', '.join(columns)}), but its first row has {len(found)}."
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


def rows_for(ids: pl.Series | None, table: pl.DataFrame | None) -> pl.DataFrame | None:
    """The table's rows in the order of the ids; what it says of anyone else is left out."""
    if ids is None or table is None:
        return None
    return ids.rename("id").to_frame().join(table, on="id", how="left", maintain_order="left").drop("id")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} …"

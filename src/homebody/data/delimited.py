"""Tables in text files: values between separators, one row a line.

A file is read in parts of some megabytes, so that memory is bounded by the columns that are wanted. Of each part the
rows and their cells are counted first, and a line that is not like the header is named. Then polars reads the values,
and must find as many rows. Whole numbers are kept as numbers, everything else as text.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.data.origins import Layout, LoadedTable, option
from homebody.errors import HomebodyError, several

__all__ = ["PACKED", "TAKEN", "opened", "read_text"]

PART = 1 << 25
"""Bytes that are read at once."""
LONGEST = 1 << 28
"""A row of more bytes than this is a quotation mark that was not closed."""
TAKEN = (",", "\t", ";", "|", "::")
"""Separators that are found out."""
SUGGESTED = (" ", "^", "~", ":", "\x01", "\x1f")
"""Separators that are suggested, if rows look as if they had them."""
UNIT = "\x1f"
"""What stands for a separator of several characters while the rows are read."""
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PK\x03\x04": "zip",
}


def read_text(path: Path, choose: Callable[[list[str]], list[str]] | None, layout: Layout) -> LoadedTable:
    """The columns that `choose` picks from the header's names, otherwise all.

    A file without a header (`layout.header`) has columns called 1, 2, 3 and so on. A row with more or fewer cells than
    the first is refused, or left out and counted where `layout.drop` says so.
    """
    return _Reader(path, choose, layout).table()


class _Reader:
    """One file while it is read."""

    def __init__(self, path: Path, choose: Callable[[list[str]], list[str]] | None, layout: Layout) -> None:
        self.path, self.choose, self.layout = path, choose, layout
        self.notes: list[str] = []
        self.separator = ""
        self.names: list[str] = []
        self.picked: list[int] = []
        self.lines = 0
        """Lines of the parts before this one."""
        self.cells = 0
        self.ragged = 0
        self.literal = False

    def table(self) -> LoadedTable:
        parts: list[list[pl.Series]] = []
        with opened(self.path, self.notes) as file:
            rest = b""
            for piece, last in _utf_8(self.path, file, self.layout, self.notes):
                text = rest + piece if rest else piece
                if not self.separator:
                    self.separator = self._separator(text)
                    rest = b""
                if len(self.separator.encode()) > 1:
                    piece = piece.replace(self.separator.encode(), UNIT.encode())
                    text = rest + piece if rest else piece
                rows, end = self._rows(text, last)
                rest = text[end:]
                if rows is not None:
                    parts.append(self._columns(rows, parts))
        if not self.names:
            raise HomebodyError(f"{self.path} is empty: it needs a header line and at least one row.")
        if self.ragged:
            self.notes.append(
                f"{self.path.name}: left out {several(self.ragged, 'row')} with more or fewer cells than "
                f"{self._first()} ({option(self.path, 'drop_missing')})."
            )
        if self.literal:
            self.notes.append(f"{self.path.name} has quotation marks inside values: they are read as they stand.")
        columns = [_joined(self.names[at], [part[n] for part in parts]) for n, at in enumerate(self.picked)]
        return LoadedTable(pl.DataFrame(columns), self.notes)

    def _separator(self, text: bytes) -> str:
        if self.layout.separator is not None:
            return self.layout.separator
        lines = [line for line in text[: 1 << 20].decode("utf-8", "replace").split("\n") if line.strip()][:20]
        if not lines:
            return ","
        common = max((",", "\t", ";"), key=_unquoted(lines[0]).count)
        if common in _unquoted(lines[0]):
            return common
        for other in TAKEN[3:]:
            if other in lines[0]:
                given = option(self.path, "separator", ",")
                self.notes.append(
                    f"{self.path.name}: took {other} for what stands between values ({given} takes commas)."
                )
                return other
        return common

    def _rows(self, text: bytes, last: bool) -> tuple[pl.DataFrame | None, int]:
        """The whole rows of this text, and where they end."""
        if last and text and not text.endswith(b"\n"):
            text += b"\n"
        separator = UNIT if len(self.separator.encode()) > 1 else self.separator
        quoting = True
        scan = _scan(text, separator, quoting)
        if scan.loose is not None:
            loose, quoting, self.literal = self._line(text, scan.loose), False, True
            scan = _scan(text, separator, quoting)
            cells = scan.cells[_full(text, scan)]
            if len(cells) and (cells != (self.cells or cells[0])).any():
                raise self._loose(loose)
        end = int(scan.stops[-1]) if len(scan.stops) else 0
        if b"\0" in text:
            raise HomebodyError(
                f"Line {self._line(text, text.index(0)):,} of {self.path} has a NUL byte: the file is damaged, "
                f"is no text, or is UTF-16, which {option(self.path, 'encoding', 'utf-16')} reads."
            )
        if len(text) - end > 0 and (last or len(text) - end > LONGEST):
            where = end + text[end:].rfind(b'"')
            raise HomebodyError(
                f"{self.path} has a quotation mark that is not closed in line {self._line(text, where):,} or before: "
                "close it, or remove it."
            )
        kept = self._kept(text, scan)
        rows = int(kept.sum())
        if not rows:
            self.lines += text.count(b"\n", 0, end)
            return None, end
        if rows < len(kept):
            lengths = np.diff(scan.stops, prepend=0)
            whole = np.frombuffer(text, dtype=np.uint8, count=end)[np.repeat(kept, lengths)].tobytes()
        else:
            whole = text[:end]
        parsed = self._parsed(whole, separator, rows, quoting)
        self.lines += text.count(b"\n", 0, end)
        return parsed, end

    def _loose(self, line: int) -> HomebodyError:
        """Quotation marks inside values are read as they stand only where no value needs any."""
        return HomebodyError(
            f"Line {line:,} of {self.path} has a quotation mark inside a value, and not all rows have as many cells: "
            'write it twice and put the value between quotation marks, as in "a 5"" disk".'
        )

    def _line(self, text: bytes, at: int) -> int:
        return self.lines + text.count(b"\n", 0, at) + 1

    def _kept(self, text: bytes, scan: _Scan) -> npt.NDArray[np.bool_]:
        """Which rows have as many cells as the first; empty lines are no rows."""
        full = _full(text, scan)
        if not full.any():
            return full
        self.cells = self.cells or int(scan.cells[full.argmax()])
        wrong = full & (scan.cells != self.cells)
        if not wrong.any():
            return full
        if not self.layout.drop:
            row = int(wrong.argmax())
            start = int(scan.stops[row - 1]) if row else 0
            remedy = "correct it"
            if self.layout.main:
                remedy += f", or leave such rows out with {option(self.path, 'drop_missing')}"
            raise HomebodyError(
                f"Line {self._line(text, start):,} of {self.path} has "
                f"{several(int(scan.cells[row]), 'cell')}, and {self._first()} has {self.cells:,}: {remedy}."
            )
        self.ragged += int(wrong.sum())
        return full & ~wrong

    def _first(self) -> str:
        return "the header" if self.layout.header else "the first row"

    def _parsed(self, text: bytes, separator: str, rows: int, quoting: bool) -> pl.DataFrame:
        names = [str(number) for number in range(1, self.cells + 1)]
        picked = self.picked if self.names else list(range(self.cells))
        try:
            table = pl.read_csv(
                text,
                separator=separator,
                has_header=False,
                schema=dict.fromkeys(names, pl.String),
                columns=picked,
                quote_char='"' if quoting else None,
            )
        except pl.exceptions.PolarsError as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise HomebodyError(f"{self.path} cannot be read as a table; it may be damaged: {reason}.") from error
        if table.height != rows:
            raise HomebodyError(
                f"{self.path} cannot be read as a table: {rows:,} rows stand before line {self.lines + 1:,} where "
                f"{table.height:,} were understood; look for quotation marks that do not belong there."
            )
        if not quoting:
            begun = table.select(pl.any_horizontal(pl.all().str.contains(r'^\s*"[^"]*$').fill_null(False))).to_series()
            if begun.any():
                raise self._loose(self.lines + 1 + int(begun.arg_max() or 0))
            for name in table.columns:
                quoted = pl.col(name).str.extract(r'^\s*"(.*)"\s*$').str.replace_all('""', '"', literal=True)
                table = table.with_columns(pl.coalesce(quoted, pl.col(name)))
        return table

    def _columns(self, table: pl.DataFrame, before: list[list[pl.Series]]) -> list[pl.Series]:
        if not self.names:
            if self.layout.header:
                names = [(name or "").strip() for name in table.row(0)]
                # Columns without a name are told apart by spaces.
                self.names = [name or " " * (1 + names[:at].count("")) for at, name in enumerate(names)]
                table = table.slice(1)
            else:
                self.names = table.columns
            self._refuse_twice()
            wanted = self.names if self.choose is None else self.choose(self.names)
            self.picked = [at for at, name in enumerate(self.names) if name in wanted]
            table = table.select([table.columns[at] for at in self.picked])
        last = before[-1] if before else [None] * table.width
        return [_whole(values, old) for values, old in zip(table.get_columns(), last, strict=True)]

    def _refuse_twice(self) -> None:
        known: dict[str, int] = {}
        for at, name in enumerate(self.names, start=1):
            if name in known:
                raise HomebodyError(
                    f"{self.path} has two columns called '{name}', the columns {known[name]} and {at}: rename one of "
                    f"them, or remove the header and give {option(self.path, 'no_header')}."
                )
            known[name] = at


class _Scan(NamedTuple):
    """The rows of a text."""

    stops: npt.NDArray[np.int64]
    """Where each row ends, after its newline; the last one may be followed by a row that is not whole."""
    cells: npt.NDArray[np.int64]
    loose: int | None
    """The place of the first quotation mark that stands neither at an end of a value nor beside another one."""


def _scan(text: bytes, separator: str, quoting: bool) -> _Scan:
    """Where rows end, and how many cells each has.

    >>> scan = _scan(b'a,"b,c"\\nd,e,f\\ng', ",", True)
    >>> scan.stops.tolist(), scan.cells.tolist(), scan.loose
    ([8, 14], [2, 3], None)
    """
    data = np.frombuffer(text, dtype=np.uint8)
    ends, marks = data == ord("\n"), data == ord(separator)
    loose = None
    if quoting and b'"' in text:
        quotes = data == ord('"')
        inside = np.cumsum(quotes, dtype=np.uint8) & 1 == 1
        at, last = np.flatnonzero(quotes), len(data) - 1
        edge = ends | marks | quotes
        before = (at == 0) | edge[at - 1]
        after = (at == last) | edge[np.minimum(at + 1, last)] | (data[np.minimum(at + 1, last)] == ord("\r"))
        strange = ~np.where(inside[at], before, after)
        loose = int(at[strange.argmax()]) if strange.any() else None
        ends, marks = ends & ~inside, marks & ~inside
    stops = np.flatnonzero(ends) + 1
    return _Scan(stops, _cells(stops, np.flatnonzero(marks)), loose)


def _full(text: bytes, scan: _Scan) -> npt.NDArray[np.bool_]:
    """Which rows are not empty."""
    if not len(scan.stops):
        return np.ones(0, dtype=np.bool_)
    starts = np.concatenate([[0], scan.stops[:-1]])
    bare = scan.stops - starts - 1
    return (bare > 1) | ((bare == 1) & (np.frombuffer(text, dtype=np.uint8)[starts] != ord("\r")))


def _cells(stops: npt.NDArray[np.int64], marks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    rows = len(stops)
    marks = marks[: int(np.searchsorted(marks, stops[-1]))] if rows else marks[:0]
    each, uneven = divmod(len(marks), rows) if rows else (0, 0)
    if uneven == 0 and each:
        table = marks.reshape(rows, each)
        if (table[:, -1] < stops).all() and (table[1:, 0] >= stops[:-1]).all():
            return np.full(rows, each + 1)
    return np.diff(np.searchsorted(marks, stops), prepend=0) + 1


def suggested(names: list[str]) -> str | None:
    """A separator that the only column's name may hold.

    >>> suggested(["user^item^time"])
    '^'
    """
    return next((mark for mark in (*TAKEN, *SUGGESTED) if len(names) == 1 and mark in names[0].strip()), None)


def _whole(values: pl.Series, before: pl.Series | None) -> pl.Series:
    """Whole numbers, if each value is written as one would be written; otherwise the texts. 007 is no number."""
    if before is not None and before.dtype == pl.String and before.null_count() < len(before):
        return values
    few = values.head(1000)
    for some in (few, values):
        whole = some.cast(pl.Int64, strict=False)
        if whole.null_count() != some.null_count() or not (whole.cast(pl.String) == some).all():
            return values
    small = whole.cast(pl.Int32, strict=False)
    return small if small.null_count() == whole.null_count() else whole


def _joined(name: str, parts: list[pl.Series]) -> pl.Series:
    types = {part.dtype for part in parts}
    if len(types) > 1:
        widest = pl.String if pl.String in types else pl.Int64
        parts = [part.cast(widest) for part in parts]
    return pl.concat(parts).alias(name)


def _unquoted(line: str) -> str:
    return "".join(line.split('"')[::2])


@contextmanager
def opened(path: Path, notes: list[str] | None = None) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if it is packed. What the block finds wrong with it becomes a sentence."""
    try:
        with path.open("rb") as plain:
            magic = plain.read(6)
            plain.seek(0)
            packed = next((how for begin, how in PACKED.items() if magic.startswith(begin)), None)
            if packed is None:
                yield plain
            else:
                with _unpacked(path, plain, packed, notes) as file:
                    yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise HomebodyError(
            f"{path} cannot be read as a table; it may be damaged: {str(error).rstrip('.')}."
        ) from error


def _unpacked(path: Path, plain: BinaryIO, packed: str, notes: list[str] | None) -> BinaryIO:
    if packed == "zstandard":
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:
            raise HomebodyError(
                f"{path} is packed by zstandard: install what reads it (pip install zstandard), or unpack it with "
                "zstd -d."
            ) from None

        class Stream(io.RawIOBase):
            """The reader of zstandard, whose error becomes an OSError."""

            def __init__(self) -> None:
                self.reader = zstandard.ZstdDecompressor().stream_reader(plain, read_across_frames=True)

            def readable(self) -> bool:
                return True

            def readinto(self, buffer: object) -> int:
                try:
                    return int(self.reader.readinto(buffer))
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None

        return io.BufferedReader(Stream())
    if packed == "zip":
        pack = zipfile.ZipFile(plain)
        members = [each for each in pack.infolist() if not each.is_dir() and not each.filename.startswith("__MACOSX/")]
        if len(members) != 1:
            raise HomebodyError(
                f"{path} is a zip archive of {several(len(members), 'file')}: unpack it, and name one of them."
            )
        if notes is not None:
            notes.append(f"{path.name}: read {members[0].filename}, the only file in it.")
        try:
            return cast(BinaryIO, pack.open(members[0]))
        except (RuntimeError, NotImplementedError) as error:
            raise HomebodyError(f"{path} cannot be unpacked here ({error}): unpack it, and name its file.") from None
    opener: Any = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}[packed]
    return cast(BinaryIO, opener(plain))


def _utf_8(path: Path, file: BinaryIO, layout: Layout, notes: list[str]) -> Iterator[tuple[bytes, bool]]:
    """The text in UTF-8 with ends of lines as \\n, in parts that end where a line does; and whether it is the last."""
    head = file.read(PART)
    encoding = next((name for mark, name in BOMS if head.startswith(mark)), None)
    if encoding is not None:
        head = head[len(next(mark for mark, _ in BOMS if head.startswith(mark))) :]
    elif layout.encoding is None:
        _refuse_utf_16(path, head)
    encoding = codecs.lookup(encoding or layout.encoding or "utf-8").name
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    returns = False
    kept, lines, first = b"", 0, True
    while head or kept or first:
        more = file.read(PART) if head else b""
        try:
            text = decoder.decode(head, final=not more)
        except UnicodeDecodeError as error:
            raise _not_so_encoded(path, encoding, head, lines, error) from None
        piece = head if encoding == "utf-8" else text.encode("utf-8", "surrogatepass")
        if first:
            if encoding != "utf-8" and layout.encoding is not None and _also_utf_8(head):
                notes.append(
                    f"{path.name} looks like UTF-8, and is read as {encoding} ({option(path, 'encoding')}): letters "
                    "with "
                    "marks may be wrong."
                )
            returns = b"\r" in piece and b"\n" not in piece
            first = False
        if returns:
            piece = piece.replace(b"\r", b"\n")
        lines += piece.count(b"\n")
        piece = kept + piece if kept else piece
        if not more:
            yield piece, True
            return
        end = piece.rfind(b"\n") + 1
        kept = piece[end:]
        if len(kept) > LONGEST:
            raise HomebodyError(f"{path} has a line of more than {LONGEST >> 20} MB: it is no table in text.")
        if end:
            yield piece[:end], False
        head = more


def _also_utf_8(part: bytes) -> bool:
    """Whether this is UTF-8 with more than plain letters, as other texts hardly ever are."""
    try:
        part.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return not part.isascii() and b"\0" not in part


def _refuse_utf_16(path: Path, head: bytes) -> None:
    """Text in two bytes a character has a NUL in every second place, as long as it is English."""
    begin = np.frombuffer(head[:2000], dtype=np.uint8)
    for offset, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if len(begin) > 3 and (begin[offset::2] == 0).mean() > 0.7 and (begin[1 - offset :: 2] == 0).mean() < 0.1:
            raise HomebodyError(f"{path} looks like UTF-16 text: give {option(path, 'encoding', name)}.")


def _not_so_encoded(path: Path, encoding: str, part: bytes, lines: int, error: UnicodeDecodeError) -> HomebodyError:
    # What an earlier part kept back is in the error's object, and ends a character of several bytes.
    at = error.start - (len(error.object) - len(part))
    line = lines + part[: max(at, 0)].count(b"\n") + 1
    if encoding != "utf-8":
        return HomebodyError(f"{path} is not {encoding} text: line {line:,} cannot be read; give another --encoding.")
    if b"\0" in part:
        return HomebodyError(
            f"{path} is no table: it has bytes that no text has (if it is UTF-16, give "
            f"{option(path, 'encoding', 'utf-16')})."
        )
    likely = "cp1252" if set(part) & set(range(0x80, 0xA0)) else "latin-1"
    return HomebodyError(
        f"{path} is not UTF-8 text: line {line:,} has the byte 0x{error.object[error.start]:02X}; if it is a file of "
        f"Western Europe, give {option(path, 'encoding', likely)}, or else the name of its encoding."
    )

"""What a table was read from, as errors and notes call it, and how its owner said that it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import polars as pl

from homebody.errors import HomebodyError

__all__ = ["FRAME", "Layout", "LoadedTable", "Named", "Origin", "features_option", "kind_option", "option"]

SEPARATOR_NAMES = {
    "tab": "\t",
    "\\t": "\t",
    "space": " ",
    "comma": ",",
    "semicolon": ";",
    "pipe": "|",
    "\\x01": "\x01",
    "\\x1f": "\x1f",
}


@dataclass(frozen=True)
class Named:
    """A source that is no file, with the members of a path that errors and notes use.

    >>> shop = Named("sqlite:///shop.db", "shop.db", "shop")
    >>> f"{shop}: {shop.name}"
    'sqlite:///shop.db: shop.db'
    """

    full: str
    name: str
    stem: str
    typed: bool = True
    """Whether it is named on the command line, so that options are; otherwise they are arguments in Python."""

    def __str__(self) -> str:
        return self.full


Origin = Path | Named
FRAME = Named("the frame", "the frame", "frame", typed=False)


def option(origin: Origin, name: str, value: str = "") -> str:
    """An option, as whoever named this source would give it.

    >>> option(Path("a.csv"), "time_col"), option(FRAME, "time_col", "day"), option(FRAME, "drop_missing")
    ('--time-col', "time_col='day'", 'drop_missing')
    """
    if not _typed(origin):
        return f"{name}={value!r}" if value else name
    typed = f"--{name.replace('_', '-')}"
    return f"{typed} '{value}'" if " " in value or "%" in value or "|" in value else f"{typed} {value}".rstrip()


def kind_option(origin: Origin) -> str:
    """How the kind of a column is given."""
    return "--kind COLUMN=KIND" if _typed(origin) else "kinds={column: kind}"


def features_option(origin: Origin) -> str:
    """How the columns that are features are given."""
    return "--feature-cols NAMES" if _typed(origin) else "feature_cols=[names]"


def _typed(origin: Origin) -> bool:
    return isinstance(origin, Path) or origin.typed


@dataclass(frozen=True)
class Layout:
    """What the owner of a file says of how it is written; what is None is found out."""

    separator: str | None = None
    encoding: str | None = None
    header: bool = True
    drop: bool = False
    """Whether rows that cannot be used are left out and counted; otherwise they are refused."""
    query: str | None = None
    main: bool = False
    """Whether it has the interactions, of which rows may be left out."""

    @classmethod
    def of(
        cls,
        *,
        separator: str | None = None,
        encoding: str | None = None,
        no_header: bool | None = None,
        drop_missing: bool | None = None,
        query: str | None = None,
    ) -> Layout:
        """From the options, which are checked.

        >>> Layout.of(separator="tab").separator
        '\\t'
        >>> Layout.of(encoding="latin-9000")
        Traceback (most recent call last):
            ...
        homebody.errors.HomebodyError: There is no encoding 'latin-9000': give --encoding one that Python knows, such as
        latin-1, cp1252, utf-16 or shift_jis.
        """
        if separator is not None:
            separator = SEPARATOR_NAMES.get(separator.lower(), separator)
            if not separator or any(char in separator for char in '\n\r"'):
                raise HomebodyError(
                    f"A separator is one or more characters between values, such as ; or tab, not {separator!r}."
                )
        if encoding is not None:
            import codecs

            try:
                text = codecs.lookup(encoding)._is_text_encoding
            except (LookupError, ValueError):
                text = False
            if not text:
                raise HomebodyError(
                    f"There is no encoding '{encoding}': give --encoding one that Python knows, such as latin-1, "
                    "cp1252, utf-16 or shift_jis."
                )
        return cls(separator, encoding, not no_header, bool(drop_missing), query, main=True)

    def given(self) -> dict[str, str | bool | None]:
        """The options by name; None if not given."""
        return {
            "separator": self.separator,
            "encoding": self.encoding,
            "no_header": None if self.header else True,
            "drop_missing": self.drop or None,
            "query": self.query,
        }

    @property
    def others(self) -> Layout:
        """The same for the files beside it, of features: only the encoding is theirs too."""
        return Layout(encoding=self.encoding)


class LoadedTable(NamedTuple):
    """Rows, and what is to be said of how they were read."""

    rows: pl.DataFrame
    notes: list[str]

"""What people read on a terminal: one style of table that loses no column, sentences that break at words, errors.

Rich is imported only when something is printed, so that commands start quickly.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table

__all__ = ["console", "fits", "loading", "plain", "put", "refuse", "say", "show", "table", "wrapped"]

STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal takes for a command, apart from tabs and ends of lines."""
ROOM = 10_000
"""Columns that no table needs."""
FOLDED = 8
"""Characters that a column keeps whose words may break."""


def plain(text: object) -> str:
    r"""A text that steers no terminal: names and sentences of a server or service are whatever it says they are.

    >>> plain("a\x1b[2J cat\n") == "a\ufffd[2J cat\n"
    True
    """
    return STEERING.sub("\ufffd", str(text))


def console() -> Console:
    """The output: as wide as the terminal, or as COLUMNS says. A file without either has room for any table."""
    from rich.console import Console

    output = Console()
    if not output.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        output.width = ROOM
    return output


def say(console: Console, *lines: str) -> None:
    """Print lines as they are: nothing in them is markup. On a terminal they break at words; a file gets them whole."""
    for line in lines:
        text = wrapped(line, console.width) if console.is_terminal else line
        console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def wrapped(line: str, width: int) -> str:
    """A line broken at words, with its own indent; a path or a hash stays whole.

    >>> print(wrapped("  - one two three", 10))
      - one
        two
        three
    """
    if len(line) <= width:
        return line
    body = line.lstrip(" ")
    indent = " " * (len(line) - len(body))
    hanging = indent + ("  " if body.startswith("- ") else "")
    parts = textwrap.wrap(
        body,
        max(width, len(hanging) + 1),
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts)


def table(
    headings: Sequence[str], right: Collection[str] = (), *, title: str = "", tight: bool = False, **column: Any
) -> Table:
    """An empty table without lines between its rows. right: the headings of numbers, which never break. column:
    settings of every column."""
    from rich import box
    from rich.table import Table

    padding = (0, 1, 0, 0) if tight else (0, 1)
    drawn = Table(title=title or None, box=box.SIMPLE_HEAD, padding=padding, pad_edge=False)
    for heading in headings:
        number = heading in right
        drawn.add_column(heading, **{"justify": "right" if number else "left", "no_wrap": number, **column})
    return drawn


def put(console: Console, drawn: Table) -> None:
    """Print a table whole. On a terminal that is too narrow for it its rows become columns, as many at a time as fit;
    a file gets it as wide as it needs to be."""
    if fits(drawn, console.width):
        show(console, drawn)
    elif not console.is_terminal:
        before, console.width = console.width, ROOM
        for column in drawn.columns:
            column.overflow = "ellipsis"  # there is room: no word needs to break
        fits(drawn, 0)
        show(console, drawn)
        console.width = before
    else:
        for part in _turned(drawn, console.width):
            show(console, part)


def show(console: Console, drawn: RenderableType) -> None:
    """Print a table, or something else that is drawn; a file gets it without blanks at the ends of its lines."""
    if console.is_terminal:
        console.print(drawn)
        return
    with console.capture() as printed:
        console.print(drawn)
    say(console, "\n".join(line.rstrip() for line in printed.get().splitlines()))


def fits(drawn: Table, width: int) -> bool:
    """Give the columns of a table widths that fit, and say whether there are any that cut no word and no number.

    Where there are none, the widths are the least that cut nothing.
    """
    least, most = zip(*(_spans(column) for column in drawn.columns), strict=True) if drawn.columns else ((), ())
    if sum(most) + _between(drawn) <= width:
        return True
    if sum(drawn.padding) > 1:  # closer together before anything breaks
        drawn.padding = (0, 1, 0, 0)
    room, widths = width - _between(drawn) - sum(least), list(least)
    wanting = sorted(range(len(least)), key=lambda place: most[place] - least[place])
    for count, place in enumerate(wanting):
        given = min(most[place] - least[place], max(0, room) // (len(wanting) - count))
        widths[place] += given
        room -= given
    for column, each in zip(drawn.columns, widths, strict=True):
        column.width = each
    return room >= 0


def _between(drawn: Table) -> int:
    """The width of what is no cell: edges, gaps and padding."""
    _, right, _, left = drawn.padding
    count = len(drawn.columns)
    return count + 1 + (count if drawn.pad_edge else count - 1) * (left + right)


def _spans(column: Column) -> tuple[int, int]:
    """The widths of a column's longest word, or number, and of its longest line."""
    from rich.cells import cell_len
    from rich.text import Text

    texts = [cell.plain if isinstance(cell, Text) else str(cell) for cell in (column.header, *column.cells)]
    lines = [line for text in texts for line in text.splitlines()]
    longest = max(map(cell_len, lines), default=0)
    if column.no_wrap:
        return longest, longest
    if column.overflow == "fold":  # its words may break, down to this width
        return min(longest, max(column.min_width or 0, FOLDED)), longest
    return max((cell_len(word) for line in lines for word in line.split()), default=0), longest


def _turned(drawn: Table, width: int) -> Iterator[Table]:
    """A table's rows as columns, in as many tables as are needed for none to be too wide."""
    heads = [str(column.header).replace("-\n", "").replace("\n", " ") for column in drawn.columns]
    rows = list(zip(*(column.cells for column in drawn.columns), strict=True))
    start = 0
    while start < len(rows):
        title = "" if start else str(drawn.title or "")
        end = start + 1
        part = _columns(heads, rows[start:end], title)
        fits(part, width)
        while end < len(rows):
            wider = _columns(heads, rows[start : end + 1], title)
            if not fits(wider, width):
                break
            end, part = end + 1, wider
        yield part
        start = end


def _columns(heads: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> Table:
    names = [row[0] for row in rows]
    part = table([heads[0]], title=title)
    for name in names:
        part.add_column(name, justify="right")
    for place, head in enumerate(heads[1:], 1):
        part.add_row(head, *(row[place] for row in rows))
    return part


def refuse(sentence: str, usage: str = "") -> None:
    """Print why a command ends, to the error stream: on a terminal in Typer's box, in a file on one line."""
    from rich.console import Console

    console, sentence = Console(stderr=True), plain(sentence)
    if not console.is_terminal:
        sys.stderr.write(" ".join(["homebody:", sentence, *usage.split()]) + "\n")
        return
    from rich.panel import Panel
    from rich.text import Text

    if usage:
        console.print(Text(usage, style="yellow"), highlight=False)
    console.print(Panel(Text(sentence), border_style="red", title="Error", title_align="left"))


@contextmanager
def loading(text: str) -> Iterator[None]:
    """Show on a terminal that something is coming; whatever is printed first takes its place. Nothing in a file."""
    out, err = sys.stdout, sys.stderr
    if not err.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    there = True

    def erase() -> None:
        nonlocal there
        if there:
            there = False
            err.write("\r\x1b[2K")
            err.flush()

    err.write(text)
    err.flush()
    sys.stdout, sys.stderr = _Until(out, erase), _Until(err, erase)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err  # not before: Python's print() holds no reference to the stream it writes to
        erase()


class _Until:
    """A stream that calls something before it is written to."""

    def __init__(self, stream: TextIO, first: Any) -> None:
        self._stream, self._first = stream, first

    def write(self, text: str) -> int:
        self._first()
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        self._first()
        self._stream.writelines(lines)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

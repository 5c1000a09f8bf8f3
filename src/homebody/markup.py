"""How things are shown in notebooks: small tables with text around them, and nothing that needs a style sheet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html"]

_LEFT = ' style="text-align: left"'


def html(
    title: str,
    headings: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
    lines: Iterable[str] = (),
    *,
    most: int = 20,
) -> str:
    """A title, a table and lines below it. The first column stands left, and so do others of texts.

    Every text is escaped. Of more than `most` rows the first are shown, and how many are left out.

    >>> html("a <b>", ["name", "ε"], [("server", 1.5)])
    '<div><b>a &lt;b&gt;</b><table><thead><tr><th style="text-align: left">name</th><th>ε</th></tr></thead>\
<tbody><tr><td style="text-align: left">server</td><td>1.5</td></tr></tbody></table></div>'
    """
    body, listed = "", [*rows]
    if headings:
        text = [not place or any(map(_is_text, (row[place] for row in listed))) for place in range(len(headings))]
        head = "".join(f"<th{_LEFT * left}>{_cell(name)}</th>" for name, left in zip(headings, text, strict=True))
        lined = "".join(
            f"<tr>{''.join(f'<td{_LEFT * left}>{_cell(cell)}</td>' for cell, left in zip(row, text, strict=True))}</tr>"
            for row in listed[:most]
        )
        body = f"<table><thead><tr>{head}</tr></thead><tbody>{lined}</tbody></table>"
    below = [f"and {len(listed) - most:,} more"] if len(listed) > most else []
    under = "".join(f"<div><small>{escape(line)}</small></div>" for line in [*below, *lines])
    return f"<div><b>{escape(title)}</b>{body}{under}</div>"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not re.fullmatch(r"[-+−±–<∞\d.,%e ]*", value)


def _cell(value: object) -> str:
    return escape(str(value)).replace("\n", "<br>")

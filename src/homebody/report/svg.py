"""Charts as SVG: dots for obtained figures, with the published ones beside them; curves over rounds; and lines over a
setting.

The text is a file of its own: no script, no font, no link. Its colours follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

__all__ = [
    "Curve",
    "CurvePanel",
    "DotPanel",
    "DotRow",
    "Line",
    "LinePanel",
    "curve_chart",
    "dot_chart",
    "line_chart",
]

WIDTH = 800
GAP = 24
ROW = 24
TOP, HEAD, FOOT = 74, 30, 34
"""Heights of the title and key, of a panel's title, and of its axis."""
PLOT = 170
"""Height of the curves of a panel."""
HUES = 4
"""How many colours curves have."""
VALUE = 54
"""Width of the column with obtained figures at the right of a panel."""
LETTER = 6.9
"""Width of a letter of 13 px, on average."""
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #1b2130; }
.title { font-size: 15px; font-weight: 600; } .head { font-weight: 600; } .soft { fill: #566074; font-size: 12px; }
.ground { fill: #ffffff; } .grid { stroke: #dde1e8; } .sd { stroke: #1f6fd1; stroke-width: 2; }
.mark { stroke: #566074; stroke-dasharray: 3 3; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .curve0 { stroke: #1f6fd1; }
.curve1 { stroke: #c2410c; } .curve2 { stroke: #15803d; } .curve3 { stroke: #7e22ce; }
.ours { fill: #1f6fd1; } .theirs { fill: none; stroke: #c2410c; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
text { fill: #e8ebf2; } .soft { fill: #a6afc1; } .ground { fill: #12151c; } .grid { stroke: #313949; }
.sd { stroke: #6cabff; } .mark { stroke: #a6afc1; } .ours { fill: #6cabff; } .theirs { stroke: #ff9b62; }
.curve0 { stroke: #6cabff; } .curve1 { stroke: #ff9b62; } .curve2 { stroke: #5fd38d; } .curve3 { stroke: #c792ea; }
}"""

LINE_STYLE = """
.curve0 { stroke-width: 3; } .curve4 { stroke: #a16207; } .curve5 { stroke: #be185d; }
.flat { stroke: #566074; stroke-width: 1.5; fill: none; }
.flat0 { stroke-dasharray: 8 4; } .flat1 { stroke-dasharray: 2 3; } .flat2 { stroke-dasharray: 10 3 2 3; }
.flat3 { stroke-dasharray: 14 6; }
@media (prefers-color-scheme: dark) {
.curve4 { stroke: #facc15; } .curve5 { stroke: #f472b6; } .flat { stroke: #a6afc1; }
}"""
"""What lines over a setting have besides: more colours, and dashes for those that the setting does not concern."""
LINE_HUES, DASHES = 6, 4
SAMPLE = 26
"""Width of the piece of a line that a key shows."""


class DotRow(NamedTuple):
    """A method: its published and obtained figures, None where there is none, and the deviation over seeds."""

    name: str
    published: float | None
    measured: float | None
    sd: float = 0.0


class DotPanel(NamedTuple):
    """One part of a chart, with an axis of its own."""

    title: str
    rows: Sequence[DotRow]


def dot_chart(title: str, axis: str, panels: Sequence[DotPanel]) -> str:
    """The whole picture, two panels side by side.

    >>> chart = dot_chart("A paper", "HR@10", [DotPanel("Table 1", [DotRow("PFedRec", 71.62, 71.5, 1.1)])])
    >>> "PFedRec" in chart, chart.count('class="ours"'), chart.count('class="theirs"')
    (True, 2, 2)
    """
    across = min(2, len(panels))
    wide = (WIDTH - GAP * (across + 1)) / max(1, across)
    parts: list[str] = []
    top = float(TOP)
    for start in range(0, len(panels), across or 1):
        beside = panels[start : start + across]
        for place, panel in enumerate(beside):
            parts += _panel(panel, GAP + place * (wide + GAP), top, wide)
        top += HEAD + FOOT + ROW * max(len(panel.rows) for panel in beside)
    height = round(top + 8)
    with_published = any(row.published is not None for panel in panels for row in panel.rows)
    label = escape(f"{title}: {axis}. " + " ".join(_described(panel) for panel in panels))
    return _picture(title, height, label, [*_key(axis, with_published), *parts])


class Curve(NamedTuple):
    """What one quantity does over rounds."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class CurvePanel(NamedTuple):
    """One part of a chart, with axes of its own; where there is no curve, `note` says why."""

    title: str
    curves: Sequence[Curve]
    note: str = ""


def curve_chart(title: str, axis: str, panels: Sequence[CurvePanel], mark: float | None = None) -> str:
    """The whole picture, two panels side by side. mark: where a dashed line stands in each panel.

    >>> chart = curve_chart("A run", "round", [CurvePanel("NDCG@10", [Curve("test", [1, 2, 3], [0.1, 0.3, 0.4])])], 3)
    >>> chart.count('class="curve curve0"'), chart.count('class="mark"'), "test 0.4000" in chart
    (2, 1, True)
    """
    across = min(2, len(panels)) or 1
    wide = (WIDTH - GAP * (across + 1)) / across
    tall = 2 * HEAD + PLOT + FOOT
    parts: list[str] = []
    for place, panel in enumerate(panels):
        left, top = GAP + place % across * (wide + GAP), TOP - HEAD + place // across * tall
        parts += _curves(panel, left, top, wide, axis, mark)
    height = round(TOP - HEAD + -(-len(panels) // across) * tall + 8)
    label = escape(f"{title}, over each {axis}. " + " ".join(_told(panel) for panel in panels))
    return _picture(title, height, label, parts)


def _told(panel: CurvePanel) -> str:
    """How a panel's curves end, as a sentence, for readers who do not see them."""
    ends = ", ".join(f"{curve.name} {_short(curve.y[-1])}" for curve in panel.curves if curve.y)
    return f"{panel.title}: {ends or panel.note}."


def _curves(panel: CurvePanel, left: float, top: float, wide: float, axis: str, mark: float | None) -> Iterator[str]:
    yield _text(left, top + 16, _fitting(panel.title, wide, 7.9), "head")
    start, end, high, low = left + 46, left + wide - 8, top + 2 * HEAD, top + 2 * HEAD + PLOT
    curves = [curve for curve in panel.curves if curve.y]
    if not curves:
        yield _text(left, top + HEAD + 12, _fitting(panel.note, wide), "soft")
        return
    ticks = _ticks([value for curve in curves for value in curve.y])
    rounds = [value for curve in curves for value in curve.x]
    first, last = min(rounds), max(rounds)

    def across(x: float) -> float:
        return start + (end - start) * ((x - first) / (last - first) if last > first else 0.5)

    def up(y: float) -> float:
        return low - (low - high) * (y - ticks[0]) / (ticks[-1] - ticks[0])

    for tick in ticks:
        yield f'<path class="grid" d="M{start:.1f} {up(tick):.1f}H{end:.1f}"/>'
        yield _text(start - 6, up(tick) + 4, f"{tick:g}", "soft", "end")
    for x in dict.fromkeys((first, round((first + last) / 2), last)):
        yield _text(across(x), low + 18, f"{axis} {x:g}" if x == first else f"{x:g}", "soft", "middle")
    if mark is not None and first <= mark <= last:
        yield f'<path class="mark" d="M{across(mark):.1f} {high:.1f}V{low:.1f}"/>'
    legend = left
    for place, curve in enumerate(curves):
        hue = f"curve curve{place % HUES}"
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True))
        yield f'<polyline class="{hue}" points="{points}"/>' if len(curve.y) > 1 else _point(hue, points)
        yield f'<path class="{hue}" d="M{legend:.1f} {top + HEAD + 8:.1f}h16"/>'
        yield _text(legend + 22, top + HEAD + 12, curve.name)
        legend += 22 + 1.2 * LETTER * len(curve.name) + 16  # many names are capitals


def _point(hue: str, at: str) -> str:
    x, _, y = at.partition(",")
    return f'<circle class="{hue}" cx="{x}" cy="{y}" r="3"/>'


class Line(NamedTuple):
    """A method's figures over the values of a setting; None where there is none."""

    name: str
    y: Sequence[float | None]
    flat: bool = False
    """Whether the setting does not concern it: a dashed line, to hold the others against."""


class LinePanel(NamedTuple):
    """One part of a chart, with a vertical axis of its own."""

    title: str
    lines: Sequence[Line]


def line_chart(title: str, axis: str, labels: Sequence[str], panels: Sequence[LinePanel]) -> str:
    """The whole picture, two panels side by side, under one key. labels: what the values are called, evenly spaced.

    >>> panels = [LinePanel("ml-1m", [Line("nearby", [0.6, None, 0.7]), Line("popularity", [0.4, 0.4, 0.4], True)])]
    >>> chart = line_chart("Accuracy", "ε", ["1", "2", "8"], panels)
    >>> chart.count("<polyline"), "nearby 0.7000 at 8" in chart
    (2, True)
    """
    every = [line for panel in panels for line in panel.lines]
    styles: dict[str, str] = {}
    for flat, kind, count in ((False, "curve", LINE_HUES), (True, "flat", DASHES)):
        names = dict.fromkeys(line.name for line in every if line.flat == flat)
        styles |= {name: f"{kind} {kind}{place % count}" for place, name in enumerate(names)}
    key, top = _line_key(styles)
    across = min(2, len(panels)) or 1
    wide = (WIDTH - GAP * (across + 1)) / across
    tall = HEAD + PLOT + FOOT + 4
    parts = list(key)
    for place, panel in enumerate(panels):
        left, head = GAP + place % across * (wide + GAP), top + place // across * tall
        parts += _lines(panel, left, head, wide, axis, labels, styles)
    height = round(top + -(-len(panels) // across) * tall + 8)
    label = escape(f"{title}, over {axis}. " + " ".join(_read_aloud(panel, labels) for panel in panels))
    return _picture(title, height, label, parts, LINE_STYLE)


def _line_key(styles: dict[str, str]) -> tuple[list[str], float]:
    """The names of all lines, in as many rows as they need, and where the first panel begins."""
    parts, left, y = [], float(GAP), 52.0
    for name, style in styles.items():
        wide = SAMPLE + 8 + LETTER * len(name) + 18
        if left > GAP and left + wide > WIDTH - GAP:
            left, y = float(GAP), y + 20
        parts.append(f'<path class="{style}" d="M{left:.1f} {y - 4:.1f}h{SAMPLE}"/>')
        parts.append(_text(left + SAMPLE + 8, y, name))
        left += wide
    return parts, y + 14


def _lines(
    panel: LinePanel, left: float, top: float, wide: float, axis: str, labels: Sequence[str], styles: dict[str, str]
) -> Iterator[str]:
    yield _text(left, top + 16, _fitting(panel.title, wide - GAP, 8.2), "head")
    start, end, high, low = left + 46, left + wide - 14, top + HEAD, top + HEAD + PLOT
    known = [value for line in panel.lines for value in line.y if value is not None]
    if not known:
        return
    ticks = _ticks(known)

    def across(place: int) -> float:
        return start + 14 + (end - start - 14) * place / max(1, len(labels) - 1)

    def up(y: float) -> float:
        return low - (low - high) * (y - ticks[0]) / (ticks[-1] - ticks[0])

    for tick in ticks:
        yield f'<path class="grid" d="M{start:.1f} {up(tick):.1f}H{end:.1f}"/>'
        yield _text(start - 6, up(tick) + 4, f"{tick:g}", "soft", "end")
    for place, label in enumerate(labels):
        yield _text(across(place), low + 18, label if place else f"{axis} = {label}", "soft", "middle")
    for line in sorted(panel.lines, key=lambda line: not line.flat):
        at = [(across(place), up(y)) for place, y in enumerate(line.y) if y is not None]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        if len(at) > 1:
            yield f'<polyline class="{styles[line.name]}" points="{points}"/>'
        if not line.flat or len(at) == 1:
            yield from (_point(styles[line.name], f"{x:.1f},{y:.1f}") for x, y in at)


def _read_aloud(panel: LinePanel, labels: Sequence[str]) -> str:
    """A panel's last figures as a sentence, for readers who do not see them."""
    ends = []
    for line in panel.lines:
        known = [(value, label) for value, label in zip(line.y, labels, strict=True) if value is not None]
        ends += [f"{line.name} {_short(known[-1][0])}" + ("" if line.flat else f" at {known[-1][1]}")] if known else []
    return f"{panel.title}: {', '.join(ends)}."


def _picture(title: str, height: int, label: str, parts: Sequence[str], style: str = "") -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">',
            f"<style>{STYLE}{style}\n</style>",
            f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>',
            _text(GAP, 28, _fitting(title, WIDTH - 2 * GAP, 8.2), "title"),
            *parts,
            "</svg>\n",
        ]
    )


def _described(panel: DotPanel) -> str:
    """A panel's figures as a sentence, for readers who do not see them."""
    rows = []
    for row in panel.rows:
        ours = "not run" if row.measured is None else _short(row.measured)
        rows.append(f"{row.name} {ours}" + ("" if row.published is None else f" (published {_short(row.published)})"))
    return f"{panel.title}: {', '.join(rows)}."


def _key(axis: str, with_published: bool) -> Iterator[str]:
    yield f'<circle class="ours" cx="{GAP + 5}" cy="49" r="5"/>'
    yield _text(GAP + 16, 53, axis)
    if with_published:
        after = GAP + 16 + LETTER * len(axis) + 24
        yield f'<circle class="theirs" cx="{after:.0f}" cy="49" r="5"/>'
        yield _text(after + 11, 53, "published")


def _panel(panel: DotPanel, left: float, top: float, wide: float) -> Iterator[str]:
    names = min(wide * 0.45, LETTER * max(len(row.name) for row in panel.rows) + 10)
    start, end = left + names, left + wide - VALUE
    ticks = _ticks([end for row in panel.rows for end in _ends(row)])
    low, high = ticks[0], ticks[-1]
    bottom = top + HEAD + ROW * len(panel.rows)

    def at(value: float) -> float:
        return start + (end - start) * (value - low) / (high - low)

    yield _text(left, top + 16, _fitting(panel.title, wide, 7.9), "head")
    for tick in ticks:
        yield f'<path class="grid" d="M{at(tick):.1f} {top + HEAD - 4:.1f}V{bottom:.1f}"/>'
        yield _text(at(tick), bottom + 16, f"{tick:g}", "soft", "middle")
    for place, row in enumerate(panel.rows):
        y = top + HEAD + ROW * (place + 0.5)
        yield _text(left, y + 4, _fitting(row.name, names))
        if row.measured is not None:
            if row.sd:
                ends = f"M{at(max(low, row.measured - row.sd)):.1f} {y:.1f}H{at(min(high, row.measured + row.sd)):.1f}"
                yield f'<path class="sd" d="{ends}"/>'
            yield f'<circle class="ours" cx="{at(row.measured):.1f}" cy="{y:.1f}" r="4.5"/>'
            yield _text(left + wide, y + 4, _short(row.measured), anchor="end")
        if row.published is not None:
            yield f'<circle class="theirs" cx="{at(row.published):.1f}" cy="{y:.1f}" r="6.5"/>'


def _ends(row: DotRow) -> Iterator[float]:
    if row.published is not None:
        yield row.published
    if row.measured is not None:
        yield from (row.measured - row.sd, row.measured + row.sd)


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers around these values, about five.

    >>> _ticks([59.0, 73.0]), _ticks([0.1, 0.58])
    ([55.0, 60.0, 65.0, 70.0, 75.0], [0.0, 0.2, 0.4, 0.6])
    """
    low, high = min(values), max(values)
    rough = (high - low or abs(high) or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, max(last, first + 1) + 1)]


def _short(value: float) -> str:
    """A figure with four digits.

    >>> _short(71.501), _short(0.24271)
    ('71.50', '0.2427')
    """
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


def _fitting(text: str, room: float, letter: float = LETTER) -> str:
    """Cut where it would run out of its place.

    >>> _fitting("a very long name", 60)
    'a very…'
    """
    most = max(1, int(room / letter))
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{side}>{escape(text)}</text>'

"""Self-contained HTML pages: opened from disk, without a network, by light and by dark.

Whatever came from outside (names, notes, sentences) is escaped, and the page's own policy forbids it to load
anything. Charts are drawn by Plotly, whose script is part of the page.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError, install, several
from homebody.report.beyond import cell as beyond_cell
from homebody.report.beyond import legend_of, shown_of
from homebody.report.charts import choice_of, privacy_chart
from homebody.report.comparison import comparison_columns, reference_rows
from homebody.report.words import duration

__all__ = ["choice", "drawn", "has_plotly", "leaderboard_page", "listed", "origin", "page", "quiet"]

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
NEEDS = f"HTML pages need Plotly: {install('report')}. The JSON and Markdown files are written without it."
HERE = Path(__file__).parent


def has_plotly() -> bool:
    """Whether pages can be made here."""
    return importlib.util.find_spec("plotly") is not None


@cache
def _plotly() -> str:
    if not has_plotly():
        raise HomebodyError(NEEDS)
    script: str = importlib.import_module("plotly.offline").get_plotlyjs()
    return script


def page(title: str, header: str, body: Iterable[str], charts: Sequence[Mapping[str, Any]]) -> str:
    """A whole document around what is shown; a page without charts needs no script."""
    css = (HERE / "page.css").read_text(encoding="utf-8")
    scripts = ""
    if charts:
        data = json.dumps(charts, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        drawing = (HERE / "page.js").read_text(encoding="utf-8")
        scripts = (
            f'<script type="application/json" id="charts">{data}</script>\n'
            f"<script>{_plotly()}</script>\n<script>{drawing}</script>"
        )
    inner = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{css}</style>
</head>
<body>
<header class="top">
{header}
</header>
<main>
{inner}
</main>
<footer>Made by Homebody. This page holds everything it shows and loads nothing.</footer>
{scripts}
</body>
</html>
"""


def drawn(chart: Mapping[str, Any]) -> str:
    """The place of a chart; the script fills it."""
    tall = " tall" if chart["kind"] in ("privacy", "scatter") else ""
    return (
        f"<figure><figcaption>{escape(chart['title'])}</figcaption>"
        f'<div class="chart{tall}" id="{chart["id"]}" role="img" aria-label="{escape(chart["label"])}"></div></figure>'
    )


def choice(label: str, name: str, options: Mapping[str, str]) -> str:
    """Radio buttons, the first one chosen."""
    inputs = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{"" if place else " checked"}>'
        f"{escape(text)}</label>"
        for place, (value, text) in enumerate(options.items())
    )
    return f'<fieldset class="choice"><legend>{escape(label)}</legend>{inputs}</fieldset>'


def listed(notes: Sequence[str]) -> str:
    return f"<ul class=soft>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""


def origin(source: Mapping[str, Any]) -> str:
    return (
        f"<dt>Homebody</dt><dd>{escape(source['version'])}, commit {escape(source['commit'])}</dd>"
        f"<dt>machine</dt><dd>{escape(source['machine'])}</dd><dt>date</dt><dd>{escape(source['date'])}</dd>"
    )


def quiet(text: str) -> str:
    """A cell whose deviation is set in small type behind its figure."""
    return re.sub(r" (± [\d.,]+)", r' <span class="sd">\1</span>', escape(text))


def leaderboard_page(result: Mapping[str, Any]) -> str:
    """Methods side by side, and a plot of privacy against utility."""
    observers, source, count = result["observers"], result["made"], several(len(result["seeds"]), "seed")
    chart = privacy_chart(result)
    header = (
        f'<p class="eyebrow">Leaderboard</p><h1>{escape(result["data"])}</h1>'
        f'<p class="soft">Protocol {escape(result["protocol"])}; {count}.</p>'
    )
    columns = comparison_columns(observers)
    cells = [[column.cell(row) for column in columns] for row in result["methods"]]
    heads = '<th scope="col" class="left">method</th>'
    heads += "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in columns)
    best = [_largest([row[place] for row in cells]) if column.best else "" for place, column in enumerate(columns)]
    rows = "".join(_leader(row, texts, best) for row, texts in zip(result["methods"], cells, strict=True))
    references = [{**row, "kind": "reference"} for row in reference_rows(result)]
    rows += "".join(_leader(row, [column.text(row) for column in columns], [""] * len(columns)) for row in references)
    skipped = listed([f"{method['name']}: {method['reason']}" for method in result["skipped"]])
    board = (
        '<section><h2>Accuracy, privacy, costs</h2><div class="scroll" tabindex="0" role="region" '
        'aria-label="Leaderboard"><table><caption class="small soft">Mean ± standard deviation over '
        f"{count}, the best first</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{listed([*result.get('cautions', []), *result['legend']])}</section>"
    )
    picker = choice("ε against", choice_of("privacy"), {observer: observer for observer in observers})
    plot = (
        f"<section><h2>Privacy and utility</h2>{picker}"
        '<noscript><p class="down">The chart needs JavaScript; its figures are above.</p></noscript>'
        f'{drawn(chart)}<p class="soft small">Further left is more private, further up is more accurate. Error bars: '
        "± one standard deviation over seeds. Within the shaded part nothing bounds ε, and the place from left to "
        "right only keeps names apart.</p></section>"
    )
    made_of = (
        '<section id="made"><h2>How it was made</h2><dl>'
        f"<dt>command</dt><dd><code>{escape(source['command'])}</code></dd>{origin(source)}"
        f"<dt>wall time</dt><dd>{duration(source['seconds'])}</dd></dl></section>"
    )
    left_out = f"<section><h2>Not in the table</h2>{skipped}</section>" if skipped else ""
    body = [board, _beyond(result), plot, left_out, made_of]
    return page(f"Leaderboard: {result['data']}", header, body, [chart])


def _beyond(result: Mapping[str, Any]) -> str:
    """A second table: what the lists of each method are like together."""
    figures = shown_of(result["methods"])
    if not figures:
        return ""
    heads = "".join(f'<th scope="col">{escape(figure.heading)}</th>' for figure in figures)
    rows = "".join(
        _leader(row, [beyond_cell(row, figure) for figure in figures], [""] * len(figures)) for row in result["methods"]
    )
    return (
        '<section><h2>Beyond accuracy</h2><div class="scroll" tabindex="0" role="region" aria-label="Beyond accuracy">'
        f'<table><thead><tr><th scope="col" class="left">method</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
        f"</div>{listed(legend_of(figures))}</section>"
    )


def _largest(texts: Sequence[str]) -> str:
    """The largest mean, as it is printed."""
    return max((text.partition(" ±")[0] for text in texts if text != "–"), key=float, default="")


def _leader(row: Mapping[str, Any], texts: Sequence[str], best: Sequence[str]) -> str:
    cells = "".join(
        f"<td{' class=best' if top and text.partition(' ±')[0] == top else ''}>{quiet(text)}</td>"
        for text, top in zip(texts, best, strict=True)
    )
    shape = {"centralised": "key central", "reference": "key none"}.get(row["kind"], "key")
    name = f'<span class="{shape}" aria-hidden="true"></span>&nbsp;{escape(row["name"])}'
    kind = f'<span class="small">{escape(row["kind"])}</span>'
    return f'<tr><th scope="row" class="row">{name}{kind}</th>{cells}</tr>'

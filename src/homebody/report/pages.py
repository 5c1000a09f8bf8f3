"""Self-contained HTML pages: opened from disk, without a network, by light and by dark.

Whatever came from outside (names, notes, sentences) is escaped, and the page's own policy forbids it to load
anything. Charts are drawn by Plotly, whose script is part of the page.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError
from homebody.report.charts import choice_of, convergence_charts, privacy_chart, sweep_charts
from homebody.report.markdown import SHORT, UNKNOWN, obtained, p_text, state
from homebody.report.scatter import EMBEDDING, SWAPS, embedding_charts, embedding_remarks, swap_charts
from homebody.report.tables import kilobytes
from homebody.report.words import duration, epsilon, metric_name, number, points

__all__ = ["has_plotly", "leaderboard_page", "reproduction_page"]

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
NEEDS = "HTML pages need Plotly: install homebody[report]. The JSON and Markdown files are written without it."
HERE = Path(__file__).parent
CHARTS = {
    "convergence": convergence_charts,
    "sweep": sweep_charts,
    "tables": swap_charts,
    "embedding": embedding_charts,
}
BANDS = "The line is the mean over seeds; the band reaches from the lowest to the highest seed."
EXPLAINED = {"tables": f"{SWAPS} Error bars: ± one standard deviation over seeds.", "embedding": EMBEDDING}


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


def reproduction_page(result: Mapping[str, Any]) -> str:
    """A paper's tables and figures: published and obtained."""
    charts: list[dict[str, Any]] = []
    sections = []
    links = []
    for number_, study in enumerate(result["studies"]):
        anchor = f"study-{number_}"
        links.append(f'<a href="#{anchor}">{escape(study["label"])}</a>')
        parts = [f"<h2>{escape(study['label'])}: {escape(study['title'])}</h2>"]
        if study["note"]:
            parts.append(f"<p>{escape(study['note'])}</p>")
        if not study["data"]:
            parts.append('<p class="soft">Not run yet.</p>')
        elif study["kind"] == "table":
            parts += [_table(study, data, part, result["tolerance"]) for data, part in study["data"].items()]
        else:
            own = CHARTS[study["kind"]](study, anchor)
            charts += own
            parts += _figure(study, own, anchor)
        sections.append(f'<section id="{anchor}">{"".join(parts)}</section>')
    links.append('<a href="#made">How it was made</a>')
    docs = f" More on the method: <code>{escape(result['docs'])}</code>." if result["docs"] else ""
    note = f"<p>{escape(result['note'])}</p>" if result["note"] else ""
    header = (
        f'<p class="eyebrow">Reproduction</p><h1>{escape(result["title"])}</h1>'
        f'<p class="soft">{escape(result["citation"].rstrip("."))}.{docs}</p>{note}'
        f'<nav aria-label="Parts">{"".join(links)}</nav>'
    )
    return page(f"{result['title']}: reproduction", header, [*sections, _made(result), _meanings(result)], charts)


def _table(study: Mapping[str, Any], data: str, part: Mapping[str, Any], tolerance: float) -> str:
    per_metric = 2 + len(study["protocols"])
    groups = "".join(
        f'<th scope="colgroup" colspan="{per_metric}" class="first">{escape(metric_name(metric))}'
        f"{_times(study['scale'])}</th>"
        for metric in study["metrics"]
    )
    columns = ["published", *(obtained(p).replace(", ", ",\n") for p in study["protocols"]), "difference"]
    heads = "".join(
        f'<th scope="col"{" class=first" if place == 0 else ""}>{escape(column).replace(chr(10), "<br>")}</th>'
        for _ in study["metrics"]
        for place, column in enumerate(columns)
    )
    body = "".join(_table_row(study, part, row) for row in part["rows"])
    seeds = f"mean ± standard deviation over {part['seeds']} seeds" if part["seeds"] > 1 else "one seed"
    shown = [gap for row in part["rows"] for gap in row["difference"].values()]
    short = sum(len(row["short"]) for row in part["rows"])
    others = " ▼ marks the others." if short else ""
    verdict = (
        f"<p class=soft>{len(shown) - short} of {len(shown)} obtained figures reach the published ones, or come within "
        f"{tolerance:g} points of them ({escape(study['against'])} protocol).{others}</p>"
        if shown
        else ""
    )
    return (
        f'<h3>{escape(data)}</h3>{verdict}{_state(part)}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(study["label"])}, {escape(data)}"><table><caption class="small soft">'
        f"{escape(study['label'])} on {escape(data)} <span class=soft>· {seeds}</span></caption>"
        f'<thead><tr class="groups"><td></td>{groups}</tr>'
        f'<tr><th scope="col" class="left">method</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{_notes(part['notes'])}"
    )


def _state(part: Mapping[str, Any]) -> str:
    said = state(part)
    return f'<p class="down">{" ".join(said)}</p>' if said else ""


def _table_row(study: Mapping[str, Any], part: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    remarks = []
    if row["missing"]:
        remarks.append(f"not run: {row['missing']}")
    for protocol, found in row["obtained"].items():
        remarks += [f"failed ({protocol}): {error}" for error in found["errors"]]
    if row["short"] and not row["note"]:
        remarks.append(f"{SHORT} falls short. {UNKNOWN}")
    if row["note"]:
        remarks.append(row["note"])
    small = "".join(f'<span class="small">{escape(remark)}</span>' for remark in remarks)
    cells = []
    for metric in study["metrics"]:
        cells.append(f'<td class="first">{number(row["published"].get(metric), study["scale"])}</td>')
        cells += [_obtained(study, part, row, protocol, metric) for protocol in study["protocols"]]
        gap = row["difference"].get(metric)
        kind = "down" if metric in row["short"] else "up" if gap is not None and gap >= 0 else ""
        mark = "▼ " if metric in row["short"] else ""
        cells.append(f'<td class="{kind}">{mark}{points(gap)}</td>')
    away = ' class="away"' if row["missing"] else ""
    return f'<tr{away}><th scope="row" class="row">{_name(row["name"])}{small}</th>{"".join(cells)}</tr>'


def _name(name: str) -> str:
    """A long name may break after a plus sign."""
    return escape(name).replace("+", "+<wbr>")


def _obtained(
    study: Mapping[str, Any], part: Mapping[str, Any], row: Mapping[str, Any], protocol: str, metric: str
) -> str:
    found = row["obtained"].get(protocol)
    if found is None:
        return "<td>not run</td>"
    if metric not in found["metrics"]:
        return f"<td>{'failed' if found['errors'] else '…'}</td>"
    spread = found["metrics"][metric]
    told = "seeds: " + ", ".join(number(value, study["scale"]) for value in spread["values"])
    partly = f' <span class="sd">({found["n"]} of {part["seeds"]})</span>' if found["n"] < part["seeds"] else ""
    return f'<td title="{told}">{_spread(spread, study["scale"])}{partly}</td>'


def _spread(found: Mapping[str, Any] | None, scale: float = 1.0) -> str:
    if found is None:
        return "–"
    sd = "" if found["sd"] is None else f' <span class="sd">± {number(found["sd"], scale)}</span>'
    return f"{number(found['mean'], scale)}{sd}"


def _times(scale: float) -> str:
    return "" if scale == 1 else f" <span class=soft>× {scale:g}</span>"


def _figure(study: Mapping[str, Any], charts: Sequence[Mapping[str, Any]], anchor: str) -> list[str]:
    """The choice of protocol, the charts, and their figures as a table for those who cannot see or draw them."""
    parts = [
        f'<p class="soft">{EXPLAINED.get(study["kind"], BANDS)}</p>',
        *(_state(part) for part in study["data"].values()),
    ]
    protocols = study["protocols"]
    if len(protocols) > 1 and any(chart["choice"] for chart in charts):
        parts.append(choice("Protocol", choice_of(anchor), {protocol: protocol for protocol in protocols}))
    parts.append('<noscript><p class="down">The charts need JavaScript; their figures are below.</p></noscript>')
    parts.append(f'<div class="charts">{"".join(map(drawn, charts))}</div>')
    rows = [(*name, *values) for chart in charts for name, values in chart["table"]["rows"]]
    if rows:
        parts.append(
            f"<details><summary>The figures of the charts</summary>{_plain(charts[0]['table'], rows)}</details>"
        )
    away = [(data, row) for data, part in study["data"].items() for row in part["rows"]]
    remarks = [f"{row['name']}, {data}: not run: {row['missing']}" for data, row in away if row["missing"]]
    remarks += [f"{row['name']}, {data}: failed: {one}" for data, row in away for one in _errors(row)]
    if study["kind"] == "embedding":
        remarks = list(embedding_remarks(study))
    return [*parts, _notes(remarks)]


def _errors(row: Mapping[str, Any]) -> list[str]:
    """Why a curve has holes, each reason once."""
    points = (found for point in row.get("points", []) for found in point["obtained"].values())
    return list(dict.fromkeys([*row.get("errors", []), *(error for found in points for error in found["errors"])]))


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


def _plain(table: Mapping[str, Any], rows: Sequence[Sequence[str]]) -> str:
    left = table["left"]
    heads = "".join(
        f'<th scope="col"{" class=left" if place < left else ""}>{escape(name)}</th>'
        for place, name in enumerate(table["columns"])
    )
    body = ""
    for row in rows:
        cells = (f"<td{' class=left' if n < left else ''}>{escape(cell)}</td>" for n, cell in enumerate(row[1:], 1))
        body += f'<tr><th scope="row" class="row">{escape(row[0])}</th>{"".join(cells)}</tr>'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table["caption"])}"><table>'
        f'<caption class="small soft">{escape(table["caption"])}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _notes(notes: Sequence[str]) -> str:
    return f"<ul class=soft>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""


def _made(result: Mapping[str, Any]) -> str:
    entries = "".join(
        f"<dl><dt>command</dt><dd><code>{escape(made['command'])}</code></dd>"
        f"<dt>made</dt><dd>{escape(made['parts'])}</dd>{_machine(made)}"
        f"<dt>wall time</dt><dd>{duration(made['seconds'])}; its {made['runs']} runs took "
        f"{duration(made['run_seconds'])} (those finished before are not run again)</dd></dl>"
        for made in result["invocations"]
    )
    return f'<section id="made"><h2>How it was made</h2>{entries}</section>'


def _machine(made: Mapping[str, Any]) -> str:
    return (
        f"<dt>Homebody</dt><dd>{escape(made['version'])}, commit {escape(made['commit'])}</dd>"
        f"<dt>machine</dt><dd>{escape(made['machine'])}</dd><dt>date</dt><dd>{escape(made['date'])}</dd>"
    )


def _meanings(result: Mapping[str, Any]) -> str:
    found = {
        protocol: meaning
        for study in result["studies"]
        for part in study["data"].values()
        for protocol, meaning in part["meanings"].items()
    }
    gap = "Obtained less published, in points (hundredths). ▼ marks one that falls short by more than"
    lines = [
        "<dt>published</dt><dd>The figure in the paper.</dd>",
        *(f"<dt>{escape(obtained(name))}</dt><dd>{escape(meaning)}</dd>" for name, meaning in found.items()),
        f"<dt>difference</dt><dd>{gap} {result['tolerance']:g} points.</dd>",
    ]
    return f'<section id="meanings"><h2>What the columns mean</h2><dl>{"".join(lines)}</dl></section>'


def leaderboard_page(result: Mapping[str, Any]) -> str:
    """Methods side by side, and a plot of privacy against utility."""
    observers = result["observers"]
    chart = privacy_chart(result)
    made = result["made"]
    header = (
        f'<p class="eyebrow">Leaderboard</p><h1>{escape(result["data"])}</h1>'
        f'<p class="soft">Protocol {escape(result["protocol"])}; {_seeds(len(result["seeds"]))}.</p>'
    )
    metrics = ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10")
    found = {m: [row["metrics"][m]["mean"] for row in result["methods"] if m in row["metrics"]] for m in metrics}
    tops = {metric: max(means) for metric, means in found.items() if means}
    heads = [
        '<th scope="col" class="left">method</th>',
        *(f'<th scope="col">{escape(metric_name(metric))}</th>' for metric in metrics),
        '<th scope="col"><abbr title="Against the best; see below">p</abbr></th>',
        *(f'<th scope="col">ε,<br>{escape(observer)}</th>' for observer in observers),
        '<th scope="col">KB up</th><th scope="col">KB down</th><th scope="col">seconds</th>',
    ]
    rows = "".join(_leader(row, metrics, tops, observers) for row in result["methods"])
    skipped = _notes([f"{one['name']}: {one['reason']}" for one in result["skipped"]])
    count = _seeds(len(result["seeds"]))
    board = (
        '<section><h2>Accuracy, privacy, costs</h2><div class="scroll" tabindex="0" role="region" '
        'aria-label="Leaderboard"><table><caption class="small soft">Mean ± standard deviation over '
        f"{count}, the best first</caption><thead><tr>{''.join(heads)}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{_notes(result['legend'])}</section>"
    )
    picker = choice("ε against", choice_of("privacy"), {observer: observer for observer in observers})
    plot = (
        f"<section><h2>Privacy and utility</h2>{picker}"
        '<noscript><p class="down">The chart needs JavaScript; its figures are above.</p></noscript>'
        f'{drawn(chart)}<p class="soft small">Further left is more private, further up is more accurate. Error bars: '
        "± one standard deviation over seeds. Within the shaded part nothing bounds ε, and the place from left to "
        "right only keeps names apart.</p></section>"
    )
    origin = (
        '<section id="made"><h2>How it was made</h2><dl>'
        f"<dt>command</dt><dd><code>{escape(made['command'])}</code></dd>{_machine(made)}"
        f"<dt>wall time</dt><dd>{duration(made['seconds'])}</dd></dl></section>"
    )
    left_out = f"<section><h2>Not in the table</h2>{skipped}</section>" if skipped else ""
    body = [board, plot, left_out, origin]
    return page(f"Leaderboard: {result['data']}", header, body, [chart])


def _leader(row: Mapping[str, Any], metrics: Sequence[str], tops: Mapping[str, float], observers: Sequence[str]) -> str:
    cells = []
    for metric in metrics:
        found = row["metrics"].get(metric)
        best = ' class="best"' if found and number(found["mean"]) == number(tops[metric]) else ""
        cells.append(f"<td{best}>{_spread(found)}</td>")
    cells.append(f"<td>{p_text(row['p_against_best']).replace('<', '&lt;')}</td>")
    cells += [f"<td>{epsilon(row['epsilon'][observer])}</td>" for observer in observers]
    cells += [f"<td>{text}</td>" for text in (kilobytes(row["bytes_up"]), kilobytes(row["bytes_down"]))]
    cells.append(f"<td>{row['seconds']:.1f}</td>")
    shape = "key central" if row["kind"] == "centralised" else "key"
    name = f'<span class="{shape}" aria-hidden="true"></span>&nbsp;{escape(row["name"])}'
    kind = f'<span class="small">{escape(row["kind"])}</span>'
    return f'<tr><th scope="row" class="row">{name}{kind}</th>{"".join(cells)}</tr>'


def _seeds(count: int) -> str:
    return f"{count} seed{'s' if count > 1 else ''}"

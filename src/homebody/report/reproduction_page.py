"""A reproduction as one self-contained page: tables, charts, and how they were made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from homebody.counts import several
from homebody.report.charts import choice_of, convergence_charts, sweep_charts
from homebody.report.grids import (
    SHORT,
    columns_of,
    gathered,
    grids,
    has_published,
    missing_or,
    noted,
    printed,
    remarks,
    state,
    sweep_grid,
    under,
)
from homebody.report.pages import choice, drawn, listed, origin, page
from homebody.report.scatter import ADAPTED, EMBEDDING, SWAPS, embedding_charts, swap_charts
from homebody.report.words import QUANTITIES, duration, figure, metric_name, points

__all__ = ["reproduction_page"]

Charts = list[dict[str, Any]]
BANDS = "The line is the mean over seeds; the band reaches from the lowest to the highest seed."
EXPLAINED = {
    "tables": f"{SWAPS} Error bars: ± one standard deviation over seeds.",
    "embedding": EMBEDDING,
    "adaptation": f"{ADAPTED} {BANDS}",
    "lengths": "How many people have how many interactions, and with how many different items.",
}


def reproduction_page(result: Mapping[str, Any]) -> str:
    """A paper's tables and figures: published and obtained."""
    charts: Charts = []
    sections, links = [], []
    for place, study in enumerate(result["studies"]):
        if not study["data"]:
            continue
        anchor = f"study-{place}"
        links.append(f'<a href="#{anchor}">{escape(study["label"])}</a>')
        parts = [f"<h2>{escape(study['label'])}: {escape(study['title'])}</h2>"]
        if study["note"]:
            parts.append(f"<p>{escape(study['note'])}</p>")
        parts += SHOWN[study["form"], study["kind"]](study, anchor, charts, result["tolerance"])
        sections.append(f'<section id="{anchor}">{"".join(parts)}</section>')
    away = [study["label"] for study in result["studies"] if not study["data"]]
    if away:
        sections.append(f'<section class="soft">Not run yet: {escape(", ".join(away))}.</section>')
    links.append('<a href="#made">How it was made</a>')
    docs = f" More on the method: <code>{escape(result['docs'])}</code>." if result["docs"] else ""
    note = f"<p>{escape(result['note'])}</p>" if result["note"] else ""
    header = (
        f'<p class="eyebrow">Reproduction</p><h1>{escape(result["title"])}</h1>'
        f'<p class="soft">{escape(result["citation"].rstrip("."))}.{docs}</p>{note}'
        f'<nav aria-label="Parts">{"".join(links)}</nav>'
    )
    return page(f"{result['title']}: reproduction", header, [*sections, _made(result), _meanings(result)], charts)


def _tables(study: Mapping[str, Any], anchor: str, charts: Charts, tolerance: float) -> list[str]:
    return [_table(study, data, part, tolerance) for data, part in study["data"].items()]


def _table(study: Mapping[str, Any], data: str, part: Mapping[str, Any], tolerance: float) -> str:
    groups = heads = ""
    for metric in columns_of(study):
        columns = _columns(study, metric)
        scale = "" if metric in QUANTITIES else _times(study["scale"])
        groups += (
            f'<th scope="colgroup" colspan="{len(columns)}" class="first">{escape(metric_name(metric))}{scale}</th>'
        )
        heads += "".join(
            f'<th scope="col"{"" if place else " class=first"}>{escape(column).replace(", ", ",<br>")}</th>'
            for place, column in enumerate(columns)
        )
    body = "".join(_table_row(study, part, line, tolerance) for line in part["rows"])
    top = (
        f'<thead><tr class="groups"><td></td>{groups}</tr>'
        f'<tr><th scope="col" class="left">method</th>{heads}</tr></thead>'
    )
    lines = [line for line in part["rows"] if not line.get("improvement")]
    return (
        f"<h3>{escape(data)}</h3>{_verdict(study, lines, tolerance)}{_state(study, part)}"
        f"{_framed(study, data, part, top + f'<tbody>{body}</tbody>')}{listed(noted(part))}"
    )


def _columns(study: Mapping[str, Any], metric: str) -> list[str]:
    ours = [under(protocol) for protocol in study["protocols"]]
    if metric not in study["metrics"] or not has_published(study):
        return ours
    return ["published", *ours, *([] if metric in QUANTITIES else ["difference"])]


def _framed(study: Mapping[str, Any], data: str, part: Mapping[str, Any], inner: str, scale: str = "") -> str:
    said = f"mean ± standard deviation over {part['seeds']} seeds" if part["seeds"] > 1 else "one seed"
    seeds = f" <span class=soft>· {said}</span>" if part["seeds"] else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(study["label"])}, {escape(data)}">'
        f'<table><caption class="small soft">{escape(study["label"])} on {escape(data)}{scale}'
        f"{seeds}</caption>{inner}</table></div>"
    )


def _verdict(study: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], tolerance: float) -> str:
    shown = sum(len(group["difference"]) for group in groups)
    short = sum(len(group["short"]) for group in groups)
    others = f" {SHORT} marks the others." if short else ""
    return (
        f"<p class=soft>{shown - short} of {shown} obtained figures reach the published ones, or come within "
        f"{tolerance:g} points of them ({escape(study['against'])} protocol).{others}</p>"
        if shown
        else ""
    )


def _state(study: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    said = state(part, study["protocols"])
    return f'<p class="down">{escape(" ".join(said))}</p>' if said else ""


def _table_row(study: Mapping[str, Any], part: Mapping[str, Any], line: Mapping[str, Any], tolerance: float) -> str:
    small = "".join(f'<span class="small">{escape(remark)}</span>' for remark in remarks(study, line, tolerance))
    cells = []
    for metric in columns_of(study):
        start = ' class="first"'
        if metric in study["metrics"] and has_published(study):
            cells.append(f"<td{start}>{_quiet(printed(study, line, metric))}</td>")
            start = ""
        for protocol in study["protocols"]:
            cells.append(_obtained(study, part, line, protocol, metric, start))
            start = ""
        if metric in study["metrics"] and metric not in QUANTITIES and has_published(study):
            gap = line["difference"].get(metric)
            kind = "down" if metric in line["short"] else "up" if gap is not None and gap >= 0 else ""
            mark = f"{SHORT} " if metric in line["short"] else ""
            cells.append(f'<td class="{kind}">{mark}{points(gap)}</td>')
    kinds = [name for name, here in (("away", line["missing"]), ("gain", line.get("improvement"))) if here]
    shown = f' class="{" ".join(kinds)}"' if kinds else ""
    return f'<tr{shown}><th scope="row" class="row">{_name(line["name"])}{small}</th>{"".join(cells)}</tr>'


def _name(name: str) -> str:
    """A long name may break after a plus sign."""
    return escape(name).replace("+", "+<wbr>")


def _quiet(text: str) -> str:
    """The deviation stands back behind its figure."""
    return re.sub(r" (± [\d.,]+)", r' <span class="sd">\1</span>', escape(text))


def _obtained(
    study: Mapping[str, Any],
    part: Mapping[str, Any],
    line: Mapping[str, Any],
    protocol: str,
    metric: str,
    attributes: str,
) -> str:
    found = line["obtained"].get(protocol, {"metrics": {}})
    if metric not in found["metrics"]:
        return f"<td{attributes}>{missing_or(part, line, protocol)}</td>"
    spread = found["metrics"][metric]
    scale = 100 if line.get("improvement") else study["scale"]
    told = "seeds: " + ", ".join(figure(metric, value, scale) for value in spread["values"])
    partly = f' <span class="sd">({found["n"]} of {part["seeds"]})</span>' if found["n"] < part["seeds"] else ""
    return f'<td{attributes} title="{told}">{_quiet(gathered(study, line, spread, metric))}{partly}</td>'


def _times(scale: float) -> str:
    return "" if scale == 1 else f" <span class=soft>× {scale:g}</span>"


def _sweep_tables(study: Mapping[str, Any], anchor: str, charts: Charts, tolerance: float) -> list[str]:
    """A column a value; the lines of a method under its name."""
    parts = []
    for data, part in study["data"].items():
        grid = sweep_grid(study, part)
        heads = "".join(f'<th scope="col">{escape(label)}</th>' for label in study["labels"])
        top = f'<thead><tr><th scope="col" class="left">{escape(study["axis"])}</th>{heads}</tr></thead>'
        said = {line["name"]: remarks(study, line, tolerance) for line in part["rows"]}
        body = ""
        for name, rows in groupby(grid.rows, key=lambda row: row[0]):
            small = "".join(f'<span class="small">{escape(remark)}</span>' for remark in said[name])
            body += (
                f'<tbody><tr class="name"><th scope="rowgroup" class="row" colspan="{1 + len(study["labels"])}">'
                f"{_name(name)}{small}</th></tr>"
            )
            for _, metric, source, *texts in rows:
                cells = "".join(
                    f"<td{' class=down' if text.startswith(SHORT) else ''}>{_quiet(text)}</td>" for text in texts
                )
                title = f'{escape(metric)}<span class="small">{escape(source)}</span>'
                body += f'<tr><th scope="row" class="row">{title}</th>{cells}</tr>'
            body += "</tbody>"
        groups = [point for line in part["rows"] for point in line["points"]]
        parts.append(
            f"<h3>{escape(data)}</h3>{_verdict(study, groups, tolerance)}{_state(study, part)}"
            f"{_framed(study, data, part, top + body, _times(study['scale']))}{listed(noted(part))}"
        )
    return parts


def _figure(make: Callable[[Mapping[str, Any], str], Charts]) -> Callable[..., list[str]]:
    """The choice of protocol, the charts, and their figures as a table for those who cannot see or draw them."""

    def shown(study: Mapping[str, Any], anchor: str, charts: Charts, tolerance: float) -> list[str]:
        own = make(study, anchor)
        charts += own
        parts = [
            f'<p class="soft">{EXPLAINED.get(study["kind"], BANDS)}</p>',
            *(_state(study, part) for part in study["data"].values()),
        ]
        protocols = study["protocols"]
        if len(protocols) > 1 and any(chart["choice"] for chart in own):
            parts.append(choice("Protocol", choice_of(anchor), {protocol: protocol for protocol in protocols}))
        parts.append('<noscript><p class="down">The charts need JavaScript; their figures are below.</p></noscript>')
        parts.append(f'<div class="charts">{"".join(map(drawn, own))}</div>')
        tables = "".join(_plain(study, data, part) for data, part in study["data"].items())
        parts.append(f"<details><summary>The figures of the charts</summary>{tables}</details>")
        said = [
            f"{line['name']}, {data}: {remark}"
            for data, part in study["data"].items()
            for line in part["rows"]
            for remark in remarks(study, line, tolerance)
        ]
        return [*parts, listed(said)]

    return shown


SHOWN: dict[tuple[str, str], Callable[..., list[str]]] = {
    ("table", "table"): _tables,
    ("table", "pairs"): _tables,
    ("figure", "table"): _tables,
    ("table", "sweep"): _sweep_tables,
    ("figure", "sweep"): _figure(sweep_charts),
    ("figure", "convergence"): _figure(convergence_charts),
    ("figure", "tables"): _figure(swap_charts),
    ("figure", "embedding"): _figure(embedding_charts),
    ("figure", "adaptation"): _figure(sweep_charts),
    ("figure", "lengths"): _figure(sweep_charts),
    ("table", "accounting"): _sweep_tables,
    ("table", "membership"): _tables,
}
"""How each kind of study is shown, by form and kind."""


def _plain(study: Mapping[str, Any], data: str, part: Mapping[str, Any]) -> str:
    grid = grids(study, part)
    heads = "".join(
        f'<th scope="col"{" class=left" if place < grid.left else ""}>{escape(name)}</th>'
        for place, name in enumerate(grid.columns)
    )
    body = ""
    for row in grid.rows:
        cells = (
            f"<td{' class=left' if place < grid.left else ''}>{_quiet(cell)}</td>"
            for place, cell in enumerate(row[1:], 1)
        )
        body += f'<tr><th scope="row" class="row">{escape(row[0])}</th>{"".join(cells)}</tr>'
    named = f"{escape(study['label'])} on {escape(data)}" + (", mean over seeds" if part["seeds"] else "")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{named}"><table>'
        f'<caption class="small soft">{named}{_times(study["scale"])}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _made(result: Mapping[str, Any]) -> str:
    entries = "".join(
        f"<dl><dt>command</dt><dd><code>{escape(made['command'])}</code></dd>"
        f"<dt>made</dt><dd>{escape(made['parts'])}</dd>{origin(made)}"
        f"<dt>wall time</dt><dd>{duration(made['seconds'])}; its {several(made['runs'], 'run')} took "
        f"{duration(made['run_seconds'])} (those finished before are not run again)</dd></dl>"
        for made in result["invocations"]
    )
    return f'<section id="made"><h2>How it was made</h2>{entries}</section>'


def _meanings(result: Mapping[str, Any]) -> str:
    found = {
        protocol: meaning
        for study in result["studies"]
        for part in study["data"].values()
        for protocol, meaning in part["meanings"].items()
    }
    gap = f"Obtained less published, in points (hundredths). {SHORT} marks one that falls short by more than"
    lines = [
        "<dt>published</dt><dd>The figure in the paper.</dd>",
        *(f"<dt>{escape(under(name))}</dt><dd>{escape(meaning)}</dd>" for name, meaning in found.items()),
        f"<dt>difference</dt><dd>{gap} {result['tolerance']:g} points.</dd>",
    ]
    return f'<section id="meanings"><h2>What the columns mean</h2><dl>{"".join(lines)}</dl></section>'

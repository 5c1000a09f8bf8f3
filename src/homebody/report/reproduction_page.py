"""A reproduction as one self-contained HTML page: the picture, tables, charts, and how they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from homebody.errors import several
from homebody.report import reproduction
from homebody.report.charts import choice_of, convergence_charts, embedding_charts, swap_charts, sweep_charts
from homebody.report.pages import choice, drawn, listed, origin, page, quiet
from homebody.report.reproduction import SHORT, Footnotes, ResultTable
from homebody.report.words import duration

__all__ = ["reproduction_page"]

Charts = list[dict[str, Any]]
BANDS = "The line is the mean over seeds; the band reaches from the lowest to the highest seed."
DRAWN: dict[str, tuple[Callable[[Mapping[str, Any], str], Iterable[dict[str, Any]]], str]] = {
    **dict.fromkeys(("sweep", "serving", "adaptation", "view-attack"), (sweep_charts, BANDS)),
    **dict.fromkeys(("noise", "lengths"), (sweep_charts, "")),
    "convergence": (convergence_charts, BANDS),
    "tables": (swap_charts, "Error bars: ± one standard deviation over seeds."),
    "embedding": (embedding_charts, ""),
}
"""How each kind of figure is drawn, and what a reader must know of the drawing; the other kinds are tables."""


def reproduction_page(result: Mapping[str, Any]) -> str:
    """A paper's tables and figures: published and obtained."""
    charts: Charts = []
    notes = Footnotes()
    sections, links = [], []
    for place, study in enumerate(result["studies"]):
        if study["data"]:
            anchor = f"study-{place}"
            links.append(f'<a href="#{anchor}">{escape(study["label"])}</a>')
            inner = "".join(_study(study, anchor, charts, result["tolerance"], notes, reproduction.varied(result)))
            sections.append(f'<section id="{anchor}">{inner}</section>')
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
    shown = reproduction.picture(result)
    first = [f'<section><div class="scroll">{shown}</div></section>'] if shown else []
    last = [_notes(notes, result), _commands(result), _meanings(result)]
    return page(f"{result['title']}: reproduction", header, [*first, *sections, *last], charts)


def _study(
    study: Mapping[str, Any], anchor: str, charts: Charts, tolerance: float, notes: Footnotes, varied: set[str]
) -> list[str]:
    parts = [f"<h2>{escape(study['label'])}: {escape(study['title'])}</h2>"]
    if study["note"]:
        parts.append(f"<p>{escape(study['note'])}</p>")
    if study["form"] == "figure" and study["kind"] in DRAWN and not reproduction.by_metric(study):
        return [*parts, *_figure(study, anchor, charts, notes, varied)]
    for data, part in study["data"].items():
        said = reproduction.verdict(study, part, tolerance)
        first, *rest = _tables(study, data, part, notes)
        more = f"<details><summary>The other metrics</summary>{''.join(rest)}</details>" if rest else ""
        parts.append(
            f"<h3>{escape(data)}</h3>{f'<p class=soft>{escape(said)}</p>' if said else ''}{_state(study, part)}"
            f"{listed(reproduction.splits(part, varied))}{first}{more}{listed(part.get('footnotes', []))}"
        )
    return parts


def _figure(study: Mapping[str, Any], anchor: str, charts: Charts, notes: Footnotes, varied: set[str]) -> list[str]:
    """The choice of protocol, the charts, and their figures as a table for those who cannot see or draw them."""
    make, drawing = DRAWN[study["kind"]]
    drawings = list(make(study, anchor))
    charts += drawings
    parts = [
        f'<p class="soft">{escape(" ".join(filter(None, (reproduction.explanation(study), drawing))))}</p>',
        *(_state(study, part) + listed(reproduction.splits(part, varied)) for part in study["data"].values()),
    ]
    protocols = study["protocols"]
    if len(protocols) > 1 and any(chart["choice"] for chart in drawings):
        parts.append(choice("Protocol", choice_of(anchor), {protocol: protocol for protocol in protocols}))
    parts.append('<noscript><p class="down">The charts need JavaScript; their figures are below.</p></noscript>')
    parts.append(f'<div class="charts">{"".join(map(drawn, drawings))}</div>')
    tables = "".join("".join(_tables(study, data, part, notes)) for data, part in study["data"].items())
    parts.append(f"<details><summary>The figures of the charts</summary>{tables}</details>")
    said = dict.fromkeys(note for part in study["data"].values() for note in part.get("footnotes", []))
    return [*parts, listed(list(said))]


def _state(study: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    said = reproduction.state(part, study["protocols"])
    return f'<p class="down">{escape(" ".join(said))}</p>' if said else ""


def _tables(study: Mapping[str, Any], data: str, part: Mapping[str, Any], notes: Footnotes) -> list[str]:
    marks = {line["name"]: notes.numbers(reproduction.remarks(study, line)) for line in part["rows"]}
    marked = [line for line in part["rows"] if line["missing"] or line.get("improvement")]
    kinds = {line["name"]: "away" if line["missing"] else "gain" for line in marked}
    named = f"{escape(study['label'])} on {escape(data)}"
    said = reproduction.caption(study, part)
    title = f"{named} <span class=soft>{escape(said)}</span>" if said else named
    return [
        f'<div class="scroll" tabindex="0" role="region" aria-label="{named}"><table>'
        f'<caption class="small soft">{title}</caption>{_heads(table)}{_body(table, marks, kinds)}</table></div>'
        for table in reproduction.result_tables(study, part)
    ]


def _heads(table: ResultTable) -> str:
    columns = "".join(
        f'<th scope="col"{_class(table, place)}>{escape(column).replace(", ", ",<br>")}</th>'
        for place, column in enumerate(table.columns)
    )
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(list(same))}" class="first">{escape(group)}</th>'
        for group, same in groupby(table.groups[1:])
    )
    above = f'<tr class="groups"><td></td>{groups}</tr>' if groups else ""
    return f"<thead>{above}<tr>{columns}</tr></thead>"


def _class(table: ResultTable, place: int, text: str = "") -> str:
    """Names stand left, a metric begins with a line, and differences have the colour of what they mean."""
    kinds = ["left"] if place < table.left else []
    if place and table.groups and table.groups[place] != table.groups[place - 1]:
        kinds.append("first")
    if text.startswith(SHORT):
        kinds.append("down")
    elif table.columns[place] == "difference" and text[:1] in ("+", "0"):
        kinds.append("up")
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _body(table: ResultTable, marks: Mapping[str, Sequence[int]], kinds: Mapping[str, str]) -> str:
    body = ""
    seen: set[str] = set()
    for number, row in enumerate(table.rows):
        links = "" if row[0] in seen else ", ".join(f'<a href="#note-{mark}">{mark}</a>' for mark in marks[row[0]])
        seen.add(row[0])
        # A long name may break after a plus sign.
        name = escape(row[0]).replace("+", "+<wbr>") + (f"<sup>{links}</sup>" if links else "")
        cells = ""
        for place, text in enumerate(row[1:], 1):
            title = table.titles.get((number, place))
            more = f' title="{title}"' if title else ""
            cells += f"<td{_class(table, place, text)}{more}>{quiet(text)}</td>"
        shown = f' class="{kinds[row[0]]}"' if row[0] in kinds else ""
        body += f'<tr{shown}><th scope="row" class="row">{name}</th>{cells}</tr>'
    return f"<tbody>{body}</tbody>"


def _notes(notes: Footnotes, result: Mapping[str, Any]) -> str:
    lines = "".join(f'<li id="note-{number}">{escape(text)}</li>' for number, text in enumerate(notes.texts, 1))
    runs = "".join(
        f"<details><summary>Notes on the runs on {escape(data)}</summary>{listed(said)}</details>"
        for data, said in reproduction.data_notes(result).items()
    )
    return f'<section id="notes"><h2>Notes</h2><ol class=soft>{lines}</ol>{runs}</section>' if lines or runs else ""


def _commands(result: Mapping[str, Any]) -> str:
    entries = "".join(
        f"<dl><dt>command</dt><dd><code>{escape(run['command'])}</code></dd>"
        f"<dt>made</dt><dd>{escape(run['parts'])}</dd>{origin(run)}"
        f"<dt>wall time</dt><dd>{duration(run['seconds'])}; its {several(run['runs'], 'run')} took "
        f"{duration(run['run_seconds'])} (those finished before are not run again)</dd></dl>"
        for run in result["invocations"]
    )
    return f'<section id="made"><h2>How it was made</h2>{entries}</section>'


def _meanings(result: Mapping[str, Any]) -> str:
    gap = f"Obtained less published, in points (hundredths). {SHORT} marks one that falls short by more than"
    meanings = {
        "published": "The figure in the paper.",
        **{reproduction.under(name): meaning for name, meaning in reproduction.meanings(result).items()},
        "difference": f"{gap} {result['tolerance']:g} points.",
    }
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in meanings.items())
    return f'<section id="meanings"><h2>What the columns mean</h2><dl>{lines}</dl></section>'

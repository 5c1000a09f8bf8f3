"""A privacy statement for people: a page that holds everything it shows, its text for a terminal, and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from homebody import screen
from homebody.errors import several
from homebody.files import SHARED, insisting, replace_all
from homebody.report import words
from homebody.report.pages import page
from homebody.report.statement import figure

__all__ = ["print_statement", "statement_page", "write_statement"]

NO_STAGES = "No stage stands between a message and the server: it leaves the device as the method makes it."
WHY = "why ∞, or what it assumes"
COLLECTED = "Nothing stays on a device: a centralised reference collects everyone's history."


def write_statement(stated: Mapping[str, Any], into: Path) -> tuple[Path, Path]:
    """statement.json and statement.html in a folder, each all or nothing; both are made before either is written."""
    texts = {
        "statement.json": json.dumps(stated, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "statement.html": statement_page(stated),
    }
    with insisting(f"The statement cannot be written to {into}"):
        into.mkdir(parents=True, exist_ok=True)
    replace_all(into, texts, mode=SHARED)
    return into / "statement.json", into / "statement.html"


def heading(stated: Mapping[str, Any]) -> str:
    return f"{stated['run']['method']} on {stated['run']['data']}"


def state(stated: Mapping[str, Any]) -> str:
    """How far the run is, in a sentence."""
    run = stated["run"]
    rounds = several(run["rounds"], "round")
    if run["kind"] == "centralised":
        done = "" if run["complete"] else " It is not complete."
        return f"A centralised reference: raw data were collected once.{done}"
    if not run["complete"]:
        return f"Not complete: {rounds} recorded. A round is charged before it is collected, so more may be charged."
    planned = run["planned"]
    short = f" of {planned:,} planned" if planned and planned > run["rounds"] else ""
    return f"Complete: {rounds}{short}."


def sentence(row: Mapping[str, Any]) -> str:
    """One certified ε, whole: nothing that it depends on is left out."""
    about = f"Against the {row['observer']}, about {row['means']}"
    if not row["releases"]:
        return f"{about}: nothing was released."
    return f"{about}: ε = {figure(row['epsilon'])} at δ = {row['delta']:g} over {several(row['releases'], 'release')}"


def others(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {figure(value)}" for name, value in row["other_bounds"].items())


def claim_figures(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What a paper claims, what its mechanism certifies, and what this run does."""
    claimed = "none" if row["claimed"] is None else figure(row["claimed"])
    here = "nothing released" if row["this_run"] is None else figure(row["this_run"])
    return claimed, figure(row["certified"]), here


def _to(observers: Sequence[str]) -> str:
    """
    >>> _to(["server"]), _to(["server", "clients", "public"])
    ('server', 'server, clients and public')
    """
    return observers[0] if len(observers) == 1 else f"{', '.join(observers[:-1])} and {observers[-1]}"


def _each(line: Mapping[str, Any], charge: Mapping[str, Any]) -> str:
    each = "each" if line["count"] > 1 else "once"
    return f"ε = {figure(charge['epsilon_of_one'])} {each}"


def statement_page(stated: Mapping[str, Any]) -> str:
    """The statement as a page, to be handed on."""
    simulated = " The devices were simulated." if stated["run"]["simulated"] else ""
    header = (
        f'<p class="eyebrow">Privacy statement</p><h1>{escape(heading(stated))}</h1>'
        f'<p class="soft">{escape(state(stated))} ε is derived from the run’s ledger, never typed in.{simulated}</p>'
    )
    body = [_certified(stated), _allowed(stated), _way_out(stated), _ledger(stated)]
    if stated["budget"]:
        body.append(_section("Budget", f"<p>{escape(stated['budget']['state'])}</p>"))
    if stated["paper"]:
        body.append(_claims(stated["paper"]))
    body.append(_section("What it assumes", _list(stated["assumptions"])))
    body.append(_section("Outside the guarantee", _list(stated["outside"])))
    body.append(_origin(stated))
    return page(f"Privacy statement: {heading(stated)}", header, body, [])


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _list(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = ()) -> str:
    """Cells are HTML; those of the columns in `words` are texts that may break."""

    def kind(place: int) -> str:
        return ' class="left"' if place == 0 else ' class="words"' if place in words else ""

    heads = "".join(f'<th scope="col"{kind(place)}>{column}</th>' for place, column in enumerate(columns))
    body = "".join(
        f'<tr><th scope="row" class="row">{first}</th>'
        + "".join(f"<td{kind(place)}>{cell}</td>" for place, cell in enumerate(rest, 1))
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<caption class="small soft">{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _certified(stated: Mapping[str, Any]) -> str:
    rows = []
    for row in stated["certified"]:
        unbounded = row["epsilon"] == "inf"
        shown = figure(row["epsilon"]) if row["releases"] else "nothing released"
        rows.append(
            (
                f'{escape(row["observer"])}<span class="small">sees {escape(row["sees"])}</span>',
                f'{escape(row["unit"])}<span class="sd">{escape(row["means"])}</span>',
                f'<span class="{"down" if unbounded else "best"}">{shown}</span>',
                figure(row["epsilon_of_one_round"]) if row["releases"] else "–",
                f"{row['releases']:,}",
                escape(row["accountant"]) if row["accountant"] != "none" else "–",
                escape(others(row)) or "–",
                " ".join(escape(note) for note in row["notes"]) or "–",
            )
        )
    columns = ("observer", "unit", "ε in total", "ε of one round", "releases", "by", "other valid bounds", WHY)
    relations = sorted({row["relation"] for row in stated["certified"]})
    caption = f"Certified ε at δ = {stated['delta']:g}; {', '.join(relations)}"
    note = (
        '<p class="soft small">ε = ∞ means that nothing bounds what this observer learns. The smallest valid bound '
        "counts; the others hold too. ε of one round is that of the worst one.</p>"
    )
    return _section("What is certified", _table(caption, columns, rows, (1, 6, 7)) + note)


def allowed(stated: Mapping[str, Any]) -> list[str]:
    """What each ε allows, a sentence for all observers that it is the same for."""
    said: dict[str, list[str]] = {}
    for row in stated["certified"]:
        if row["releases"] and "allows" in row:  # statements of earlier versions do not say
            said.setdefault(row["allows"], []).append(row["observer"])
    return [f"{_to(list(dict.fromkeys(observers)))}: {sentence}" for sentence, observers in said.items()]


ATTACKER = (
    "An attacker sees what was released and decides between two data sets that differ in what ε is about. At a rate f "
    "of false positives its true positives are at most min(e^ε · f + δ, 1 − e^−ε (1 − δ − f)), whatever else it knows."
)
"""How the sentences of a statement are derived."""


def _allowed(stated: Mapping[str, Any]) -> str:
    """What ε means, and what it does not cover."""
    said = allowed(stated)
    if not said and not stated.get("not_covered"):
        return ""
    inner = f"{_list(said)}<p>{escape(ATTACKER)}</p><p>No ε covers this:</p>{_list(stated.get('not_covered', []))}"
    return _section("What ε means", inner)


def _way_out(stated: Mapping[str, Any]) -> str:
    title = "How a message leaves a device"
    if not stated["stages"]:
        return _section(title, f"<p>{COLLECTED if stated['run']['kind'] == 'centralised' else NO_STAGES}</p>")
    rows = [(escape(stage["stage"]), escape(stage["means"]), escape(_settings(stage))) for stage in stated["stages"]]
    table = _table("Stages, as the message travels", ("stage", "what it does", "settings"), rows, (1, 2))
    return _section(title, table)


def _settings(stage: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_plain(value)}" for name, value in stage["settings"].items()) or "–"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_plain(part)}" for name, part in value.items()) + "}"
    return f"{value:g}" if type(value) is float else str(value)


def _ledger(stated: Mapping[str, Any]) -> str:
    ledger = stated["ledger"]
    rows = [
        (
            escape(line["rounds"]).replace("–", "&#8288;–&#8288;"),  # a span does not break
            escape(_to(charge["observers"])),
            escape(charge["unit"] + (f", {charge['part']}" if charge["part"] else "")),
            escape(charge["what"]),
            escape(_each(line, charge)),
        )
        for line in ledger["lines"]
        for charge in line["told"]
    ]
    code = f"<code>{ledger['hash']}</code>"  # which may break where a narrow page ends
    intro = f"<p>{escape(chain(ledger)).replace(ledger['hash'] or code, code)}</p>"
    columns = ("releases", "told to", "about one", "what happened", "costs")
    return _section("What the ledger says", intro + (_table("Charges", columns, rows, (1, 2, 3)) if rows else ""))


def chain(ledger: Mapping[str, Any]) -> str:
    """What was verified."""
    if not ledger["rows"]:
        return "The ledger is empty: nothing was charged."
    count = f"{several(ledger['rows'], 'charge')} for {several(ledger['releases'], 'release')}"
    return f"{count}; the chain is whole, its last hash {ledger['hash']}."


def _claims(claims: Mapping[str, Any]) -> str:
    reasons = list(dict.fromkeys(row["why"] for row in claims["rows"]))
    rows = [
        (
            escape(row["what"]),
            escape(row["observer"]),
            escape(row["unit"]),
            f"{row['delta']:g}",
            *claim_figures(row),
            str(reasons.index(row["why"]) + 1),
        )
        for row in claims["rows"]
    ]
    columns = ("what", "observer", "unit", "δ", "claimed ε", "certified ε", "this run’s certified ε", "why")
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    intro = (
        f"<p>{escape(claims['title'])}. <em>Claimed</em> is what the paper prints, <em>certified</em> what its "
        "mechanism as published bounds; the last is this run’s, whose settings may be others, at the same δ.</p>"
    )
    return _section("What the paper claims", f"{intro}{_table('Claimed and certified', columns, rows)}<ol>{why}</ol>")


def _origin(stated: Mapping[str, Any]) -> str:
    run, versions, ledger = stated["run"], stated["versions"], stated["ledger"]
    parts = {
        "method": run["method"],
        "data": run["data"] + (f", fingerprint {run['data_fingerprint']}" if run["data_fingerprint"] else ""),
        "ran with": f"homebody {versions['ran']}" if versions["ran"] else "not recorded",
        "charged by": ", ".join(versions["code"]) or "not recorded",
        "ε derived by": f"homebody {versions['derived']}",
        "ledger": f"{several(ledger['rows'], 'row')}, last hash {ledger['hash'] or 'none'}",
    }
    inner = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in parts.items())
    check = (
        "<dt>check it</dt><dd><code>homebody account --run RUN</code> on the run’s folder: the hash must agree.</dd>"
    )
    return _section("What it was made from", f"<dl>{inner}{check}</dl>")


def print_statement(stated: Mapping[str, Any], console: Console | None = None) -> None:
    """The same on a terminal, line by line."""
    console = console or screen.console()
    say = partial(words.say, console)

    def title(text: str) -> None:
        say("")
        console.print(text, style="bold", highlight=False, markup=False)

    say(f"{heading(stated)}. {state(stated)}")
    title("How a message leaves a device")
    for number, stage in enumerate(stated["stages"], start=1):
        say(f"  {number}. {stage['stage']}: {stage['means']}")
    if not stated["stages"]:
        say(f"  {COLLECTED if stated['run']['kind'] == 'centralised' else NO_STAGES}")
    title("What the ledger says")
    say(f"  {chain(stated['ledger'])}")
    for line in stated["ledger"]["lines"]:
        say(f"  {line['rounds']}{f' ({code})' if (code := line['code']) else ''}:")
        for charge in line["told"]:
            part = f", {charge['part']}" if charge["part"] else ""
            about = f"about one {charge['unit']}{part}: {charge['what']}; {_each(line, charge)}"
            say(f"    to {_to(charge['observers'])}, {about}")
    title(f"What is certified, at δ = {stated['delta']:g}")
    columns = ("observer", "unit", "ε in total", "by", "ε of one round", "other valid bounds")
    table = screen.table(columns, ("ε in total", "ε of one round"))
    for row in stated["certified"]:
        by = row["accountant"] if row["accountant"] != "none" else ""
        known = (figure(row["epsilon"]), by, figure(row["epsilon_of_one_round"]), others(row))
        table.add_row(row["observer"], row["unit"], *(known if row["releases"] else ("nothing released", "", "", "")))
    screen.put(console, table)
    for row in stated["certified"]:
        say(f"  {' '.join([sentence(row).rstrip('.') + '.', *(row['notes'] if row['releases'] else [])])}")
    if said := allowed(stated):
        title("What ε means")
        for text in said:
            say(f"  - {text}")
        say(f"  {ATTACKER}", "  No ε covers this:")
        for text in stated["not_covered"]:
            say(f"  - {text}")
    if stated["budget"]:
        title("Budget")
        say(f"  {stated['budget']['state']}")
    if stated["paper"]:
        title(f"What the paper claims: `homebody account --paper {stated['paper']['id']}` has the whole table")
        say(f"  {stated['paper']['title']}: claimed, certified as published, and certified for this run at the same δ:")
        for row in stated["paper"]["rows"]:
            figures = ", ".join(claim_figures(row))
            say(f"  {row['what']}; {row['observer']}, {row['unit']}, δ = {row['delta']:g}: {figures}")
    for name, texts in (("What it assumes", stated["assumptions"]), ("Outside the guarantee", stated["outside"])):
        title(name)
        for text in texts:
            say(f"  - {text}")

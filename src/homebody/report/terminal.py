"""Results, comparisons and reproductions on a terminal."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from homebody import screen
from homebody.errors import several
from homebody.evaluation.metrics import main_cutoff
from homebody.privacy import Ledger, event_from_json
from homebody.report import reproduction, words
from homebody.report.beyond import (
    FIGURES,
    beyond_line,
    figures_of,
    group_rows,
    legend_of,
    metrics_of,
    shown_of,
)
from homebody.report.beyond import cell as beyond_cell
from homebody.report.comparison import cautions, comparison_columns, legend, reference_rows, seeds_of
from homebody.report.record import RunFolder
from homebody.report.reproduction import SHORT, ResultTable
from homebody.report.statement import recipe_of, stated_at
from homebody.report.words import kilobytes, say

__all__ = [
    "comparison_table",
    "print_comparison",
    "print_record",
    "print_reproduction",
    "print_result",
    "print_run",
    "unlike_public",
]

TITLES = {"hr": "HR", "ndcg": "NDCG", "precision": "Precision", "recall": "Recall", "mrr": "MRR"}
NEWS = {"auc": "AUC", "mrr": "MRR", "ndcg@5": "NDCG@5", "ndcg@10": "NDCG@10"}
SPARKS = "▁▂▃▄▅▆▇█"


def print_result(result: Mapping[str, Any], console: Console | None = None, *, beyond: bool = False) -> None:
    """One run: metrics, ε, costs, and where the record is. beyond: also what it is like beyond accuracy."""
    console = console or screen.console()
    metrics, errors = result["metrics"], result.get("errors", {})
    name = result["method"].rpartition(":")[2]
    # Records of earlier versions have no references; one that is itself a reference does not stand beside itself.
    references = {who: known for who, known in (result.get("references") or {}).items() if who != name}
    cuts = [name.removeprefix("hr") for name in metrics if name.startswith("hr@")]
    what = f"{name} on {result['data']}"
    at = f"@{main_cutoff([int(cut[1:]) for cut in cuts])}" if cuts else ""
    beside = [f"{who}\n{at}" for who in references]
    table = screen.table(["", *cuts, *beside], [*cuts, *beside], title=f"{what}, test")
    first = "among what was shown" if result.get("split", "").startswith("impressions") else "sampled"
    groups = {"": "", **{prefix: f", users of {prefix.rstrip('/')}" for prefix in _slices(metrics)}}
    for group, users in groups.items():
        for label, prefix in ((first, group), ("full catalogue", f"{group}full/")):
            for metric in _informative(metrics, prefix, cuts):
                asked = [prefix + metric + cut for cut in cuts]
                shown = (words.with_error(metrics[key], errors.get(key)) if key in metrics else "" for key in asked)
                main = prefix + metric + at
                others = (f"{known[main]:.4f}" if main in known else "" for known in references.values())
                table.add_row(f"{TITLES[metric]}, {label}{users}", *shown, *others)
    if metrics:
        screen.put(console, table)
    else:
        say(console, f"{what}: not measured")
    named = {"auc": first, "full/auc": "full catalogue"}
    areas = [f"{words.with_error(metrics[n], errors.get(n))} {label}" for n, label in named.items() if n in metrics]
    for group, users in groups.items():
        if f"{group}rmse" in metrics:
            rmse, mae = (float(metrics[group + name]) for name in ("rmse", "mae"))  # JSON has no NaN: it is a text
            say(console, f"RMSE {rmse:.4f}, MAE {mae:.4f} on held-out ratings{users}")
            if not math.isfinite(rmse):
                say(console, "predictions went out of bounds: a smaller learning_rate or adapt_rate may help")
    if areas:
        say(console, f"AUC {', '.join(areas)}")
    for group, users in groups.items():
        if f"{group}impressions/auc" in metrics:
            means = (f"{title} {float(metrics[f'{group}impressions/{name}']):.4f}" for name, title in NEWS.items())
            say(console, f"mean over impressions{users}: {', '.join(means)}")
    if beyond:
        print_beyond(result, console)
    epsilon = ", ".join(f"{who} {words.epsilon(value)}" for who, value in result["epsilon"].items())
    # Records of earlier versions have no δ, nor a finite ε.
    delta = f"; δ = {result['epsilon_delta']:g}" if result.get("epsilon_delta") is not None else ""
    passed = result.get("stages") or result.get("channel")
    costs = f"{result['seconds']:.1f} s, {result['seconds_per_round']:.3f} s a training round"
    if (compilation := result.get("compile_seconds", 0.0)) >= 0.05:  # otherwise kernels came from the cache
        costs += f", {compilation:.1f} s more to compile"
    say(
        console,
        *cautions([result]),
        *([f"references, on the same questions: {' and '.join(references)}"] if references and metrics else []),
        *([result["meaning"]] if metrics else []),
        *_noise_line(result),
        *([line] if not beyond and (line := beyond_line(result.get("beyond"))) else []),
        f"ε certified, one user, over the whole training: {epsilon}{delta}",
        *_meaning_lines(result),
        *_reports_line(result),
        *([f"stages: {' → '.join(passed)}"] if passed else []),
        *([result["stopped"]] if result.get("stopped") else []),
        f"rounds {result['rounds']}, chosen {result['chosen_round']}; {costs}; {result['peak_rss_mb']:,.0f} MB at most",
        f"per client and round: {kilobytes(result['bytes_up'])} KB up, {kilobytes(result['bytes_down'])} KB down",
        *result["notes"],
        f"record: {result['run']}",
    )


def print_beyond(result: Mapping[str, Any], console: Console) -> None:
    """What a run's lists are like together, and how good they are for groups of people."""
    found = result.get("beyond")
    if not found:
        say(console, "Nothing beyond accuracy is known: devices do not send it, and older records do not have it.")
        return
    known = figures_of(found)
    if known:
        title = f"Beyond accuracy, lists of {found['k']}"
        table = screen.table(["", "value", "what it is"], ["value"], title=title)
        for figure in FIGURES:
            if figure.key in known:
                by = f", by {found['diversity_by']}" if figure.key == "diversity" else ""
                table.add_row(figure.heading, figure.write(known[figure.key]), figure.meaning + by)
        screen.put(console, table)
    if rows := group_rows(found):
        headings = ["by", "group", "users", *metrics_of(found)]
        groups = screen.table(headings, headings[2:], title="Groups of people")
        for row in rows:
            groups.add_row(*row)
        screen.put(console, groups)


def _meaning_lines(result: Mapping[str, Any]) -> list[str]:
    """What each ε allows; nothing where nothing was released."""
    values = [float(value) for value in result["epsilon"].values()]
    if not any(values):
        return []
    lines = words.epsilon_meanings(result["epsilon"], result.get("epsilon_delta") or 0.0)
    if any(0 < value < math.inf for value in values):
        more = "" if result["data"] == "devices" else "; `homebody account --run RUN` says more"
        lines.append(f"not covered by ε: {words.NOT_COVERED_IN_SHORT}{more}")
    return lines


def _noise_line(result: Mapping[str, Any]) -> list[str]:
    """What ± means, and which metrics noise carried out of their range."""
    if not result.get("errors"):
        return []
    clipped = result.get("unclipped", {})
    beyond = f"; clipped to 0 … 1: {', '.join(sorted(clipped))}" if clipped else ""
    return [f"± is the standard error of the noise that was added to what devices measured{beyond}"]


def _reports_line(result: Mapping[str, Any]) -> list[str]:
    """What reports tell without the shuffle, beside what they tell with it."""
    reports = result.get("reports")
    if not reports:
        return []
    counts = f"{several(reports['count'], 'report')} × {several(result['rounds'], 'round')}"
    parts = f"{words.epsilon(reports['epsilon'])} × {counts}"
    shown = "; the lower figures above hold behind a proxy that does not collude with whoever looks"
    behind = shown if "sealed_bytes" in reports else ""
    return [f"ε of reports, by addition: {parts} = {words.epsilon(reports['total'])} at δ = 0{behind}"]


def print_comparison(comparison: Mapping[str, Any], console: Console | None = None, *, beyond: bool = False) -> None:
    """Methods side by side, and what the columns mean. beyond: a second table, of what is beyond accuracy."""
    console = console or screen.console()
    rows = [{"name": row["method"].rpartition(":")[2], **row} for row in comparison["methods"]]
    comparison_table({**comparison, "methods": rows}, console)
    figures = shown_of(rows) if beyond else []
    if figures:
        headings = [figure.heading for figure in figures]
        table = screen.table(["method", *headings], headings, title="Beyond accuracy")
        for row in rows:
            table.add_row(row["name"], *(beyond_cell(row, figure) for figure in figures))
        screen.put(console, table)
    say(
        console,
        *comparison.get("cautions", []),
        *legend(comparison),
        *legend_of(figures),
        *unlike_public(rows),
        *_compilation(rows),
        *comparison["notes"],
        "records:",
        *(f"  {run}" for row in rows for run in row["runs"]),
    )


def comparison_table(comparison: Mapping[str, Any], console: Console) -> None:
    """The columns of a comparison, narrow enough for 80 characters: headings and deviations are broken into lines.

    References stand below the methods.
    """
    title = f"{comparison['data']}, protocol {comparison['protocol']}, {seeds_of(comparison)}"
    columns = comparison_columns(("server", "public"))
    wide = console.width >= 100
    headings = ["method"]
    for column in columns:
        heading = column.heading.replace("seconds", "time s").replace("@", " @").replace(", ", " ")
        if not wide:
            heading = heading.replace("server", "ser- ver").replace("public", "pub- lic")
        headings.append(heading.replace(" ", "\n"))
    table = screen.table(headings, headings[1:], title=title, tight=not wide)
    table.padding = (0, int(wide), 0, 0)
    table.columns[0].overflow, table.columns[0].min_width = "fold", 10
    for row in (*comparison["methods"], *reference_rows(comparison)):
        cells = (column.text(row) for column in columns)
        name = f"{row['name']} (reference)" if row.get("reference") else row["name"]
        shown = (re.sub(r" ± (\d\.\d{3})\d*", r"\n±\1", cell).strip("–") for cell in cells)
        table.add_row(name, *shown, style="dim" if row.get("reference") else None)
    screen.put(console, table)


def _compilation(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Per method, the time that compilation took; nothing where all kernels came from the cache."""
    spent = {row["name"]: row.get("compile_seconds", 0.0) for row in rows}
    apart = [f"{name} {seconds:.1f} s" for name, seconds in spent.items() if seconds >= 0.05]
    return [f"time: without compilation, which took {', '.join(apart)}"] if apart else []


def unlike_public(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """ε against the other clients, which has no column: they mostly see what the public sees."""
    apart = [
        f"{row['name']} {words.epsilon(row['epsilon']['clients'])}"
        for row in rows
        if row["epsilon"].get("clients", row["epsilon"]["public"]) != row["epsilon"]["public"]
    ]
    return ["ε against other clients: " + (", ".join(apart) if apart else "as against the public")]


def print_reproduction(
    result: Mapping[str, Any], folder: Path, labels: Collection[str], console: Console | None = None
) -> None:
    """The tables and figures of these labels, narrow enough for 80 characters, and where the page is."""
    console = console or screen.console()
    short = False
    for study in result["studies"]:
        if study["label"] not in labels:
            continue
        for data, part in study["data"].items():
            title = ", ".join(filter(None, (study["label"], data, reproduction.caption(study, part))))
            screen.put(console, _narrow(_result_table(study, part), title, console.width))
            groups = [group for line in part["rows"] for group in (line, *line.get("points", []))]
            short = short or any(group.get("short") for group in groups)
            for sentence in (*reproduction.state(part, study["protocols"]), *part.get("footnotes", [])):
                say(console, sentence)
    page = "index.html" if (folder / "index.html").exists() else "RESULTS.md"
    mark = f"{SHORT} short by more than {result['tolerance']:g} points" if short else ""
    say(console, *filter(None, (mark, f"page: {folder / page}")))


def _result_table(study: Mapping[str, Any], part: Mapping[str, Any]) -> ResultTable:
    """The table of a study that is narrowest: a row a metric, a value or a protocol."""
    kind = study["kind"]
    if kind == "convergence":
        return reproduction.rounds_table(study, part, shares=(1.0,))
    if kind == "accounting":
        return reproduction.sweep_table(study, part)
    if kind == "embedding":
        table = reproduction.panel_table(study, part)
        heads = [column.replace("test item", "test").replace(" ", "\n") for column in table.columns]
        rows = [[*row[:2], row[2].partition(",")[0], *row[3:]] for row in table.rows]
        return replace(table, columns=heads, rows=rows)
    if reproduction.by_metric(study):
        table = reproduction.metric_table(study, part).by_metric()
        short = {"difference": "differ-\nence"}
        heads = [short.get(column, column).replace(", ", ",\n").replace(" protocol", "") for column in table.columns]
        return replace(table, columns=heads)
    return reproduction.values_table(study, part)


def _narrow(result: ResultTable, title: str, width: int) -> Table:
    """Names stand once, until they change. Headings may break, and so may what a row is called; figures never do."""
    rows: list[list[str]] = []
    before: list[str] = []
    last = max(0, result.left - 1)
    for row in result.rows:
        cells = [cell.replace(" protocol", "") for cell in row[: result.left]] + row[result.left :]
        same = next((n for n in range(last) if before[n : n + 1] != cells[n : n + 1]), last)
        rows.append(["" for _ in range(same)] + cells[same:])
        before = cells
    wide = [max((len(row[place]) for row in rows), default=0) for place in range(len(result.columns))]
    words_ = [max(map(len, column.split()), default=0) for column in result.columns]
    widths = [max(pair) for pair in zip(wide, words_, strict=True)]
    left = width - sum(widths[1:]) - 2 * len(widths) - 1  # between columns, and at both ends
    widths[0] = max(min(widths[0], left), 8)
    shown = screen.table([], title=title, tight=True)
    for place, column in enumerate(result.columns):
        side: Literal["left", "right"] = "left" if place < result.left else "right"
        shown.add_column(column, overflow="fold", width=widths[place], justify=side)
    for row in rows:
        shown.add_row(*row)
    return shown


def print_run(folder: RunFolder, console: Console | None = None, *, beyond: bool = False) -> None:
    """A run's record: recipe, rounds, ledger, result."""
    recipe, lines = recipe_of(folder), folder.rounds()
    result = folder.result() if (folder.path / "result.json").exists() else None
    unfinished = f"go on with `homebody run --resume {folder.path}`"
    with contextlib.ExitStack() as stack:
        ledger = None
        if folder.ledger_path.exists():
            ledger = stack.enter_context(contextlib.closing(Ledger(folder.ledger_path)))
        print_record(recipe, lines, ledger, stated_at(recipe), result, unfinished, console, beyond=beyond)


def print_record(
    recipe: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    ledger: Ledger | None,
    delta: float,
    result: Mapping[str, Any] | None,
    unfinished: str,
    console: Console | None = None,
    *,
    beyond: bool = False,
) -> None:
    """What is kept of a training, simulated or with real devices. unfinished: the sentence where it has no result."""
    console = console or screen.console()
    parts = (f"{name}={value}" for name, value in recipe.items() if value not in ({}, None) and name != "schema")
    say(console, "recipe: " + " ".join(parts))
    metrics = ("valid/ndcg@10", "ndcg@10")
    curves = {name: [line["metrics"][name] for line in lines if name in line["metrics"]] for name in metrics}
    curves["loss"] = [line["loss"] for line in lines if isinstance(line["loss"], float)]
    for name, values in curves.items():
        if values:
            say(console, f"{name:>14} {_spark(values)} {values[0]:.4f} → {values[-1]:.4f}")
    if ledger is not None:
        _print_ledger(ledger, delta, console)
    if result is not None:
        print_result(result, console, beyond=beyond)
    else:
        recorded = several(len(lines), "round is", "rounds are")
        say(console, f"not complete: {recorded} recorded; {unfinished}")


def _print_ledger(ledger: Ledger, delta: float, console: Console) -> None:
    entries, spent = ledger.entries(), ledger.epsilons(delta)
    seen_by: dict[str, set[str]] = {}
    for text, observer in {(entry.event, entry.observer): None for entry in entries}:
        seen_by.setdefault(str(event_from_json(text)), set()).add(observer)
    everyone = {observer for observers in seen_by.values() for observer in observers}
    summary = "; ".join(
        what if observers == everyone else f"to {', '.join(who for who in spent if who in observers)}: {what}"
        for what, observers in seen_by.items()
    )
    if any(0 < value < float("inf") for value in spent.values()):
        summary += f"; ε {', '.join(f'{who} {words.epsilon(value)}' for who, value in spent.items())} at δ = {delta:g}"
    say(console, f"ledger: {several(len(entries), 'charge')}, chain whole; {summary}")


def _slices(metrics: Mapping[str, float]) -> list[str]:
    """Prefixes of the metrics of some users."""
    prefixes = (name.removesuffix("auc") for name in metrics if name.endswith("/auc"))
    return [prefix for prefix in prefixes if not prefix.endswith(("full/", "impressions/"))]


def _informative(metrics: Mapping[str, float], prefix: str, cuts: list[str]) -> list[str]:
    """The metrics that say something: with one relevant item each, recall is HR and precision a part of it."""
    there = [name for name in TITLES if any(f"{prefix}{name}{cut}" in metrics for cut in cuts)]
    single = all(metrics.get(f"{prefix}recall{cut}") == metrics.get(f"{prefix}hr{cut}") for cut in cuts)
    return [name for name in there if not (single and name in ("precision", "recall"))]


def _spark(values: list[float], width: int = 40) -> str:
    count = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    low, high = min(picked), max(picked)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[int((value - low) * scale)] for value in picked)

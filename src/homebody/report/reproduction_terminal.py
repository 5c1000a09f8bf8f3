"""A reproduction on the terminal: tables that 80 columns are enough for; the rest is on the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from homebody.report.grids import (
    SHORT,
    Grid,
    columns_of,
    compared,
    embedding_grid,
    has_published,
    obtained,
    printed,
    rounds_grid,
    seeds_of,
    state,
    sweep_grid,
    values_grid,
)
from homebody.report.words import metric_name, points

__all__ = ["print_reproduction"]


def print_reproduction(
    result: Mapping[str, Any], folder: Path, labels: Collection[str], console: Console | None = None
) -> None:
    """The tables and figures of these labels, and where the page is."""
    console = console or Console()
    short = False
    for study in result["studies"]:
        if study["label"] not in labels:
            continue
        for data, part in study["data"].items():
            scale = f" × {study['scale']:g}" if study["scale"] != 1 and compared(study) else ""
            title = ", ".join(filter(None, (study["label"], f"{data}{scale}", seeds_of(part))))
            console.print(SHOWN[study["kind"]](study, part, title, console.width))
            short = short or any(_is_short(line) for line in part["rows"])
            for sentence in (*state(part, study["protocols"]), *part.get("footnotes", [])):
                console.print(sentence, highlight=False, markup=False)
    page = "index.html" if (folder / "index.html").exists() else "RESULTS.md"
    mark = f"{SHORT} short by more than {result['tolerance']:g} points" if short else ""
    for text in filter(None, (mark, f"page: {folder / page}")):
        console.print(text, highlight=False, soft_wrap=True, markup=False)


def _is_short(line: Mapping[str, Any]) -> bool:
    return any(group.get("short") for group in (line, *line.get("points", [])))


def _table(title: str, names: int, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """Headings may break, and so may what a row is called; figures never do."""
    wide = [max((len(row[place]) for row in rows), default=0) for place in range(len(columns))]
    words = [max(map(len, column.split()), default=0) for column in columns]
    widths = [max(pair) for pair in zip(wide, words, strict=True)]
    left = width - sum(widths[1:]) - 2 * len(columns) - 1  # between columns, and at both ends
    widths[0] = max(min(widths[0], left), 8)
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, column in enumerate(columns):
        side: Literal["left", "right"] = "left" if place < names else "right"
        shown.add_column(column, overflow="fold", width=widths[place], justify=side)
    for row in rows:
        shown.add_row(*row)
    return shown


def _rows(study: Mapping[str, Any], part: Mapping[str, Any], title: str, width: int) -> Table:
    """A line a row and metric."""
    found = {name for line in part["rows"] for name, one in line["obtained"].items() if one["n"]}
    protocols = [name for name in study["protocols"] if name in part["protocols"] or name in found]
    ours = [f"obtained,\n{protocol}" for protocol in protocols]
    paper = ["published"] if has_published(study) else []
    differs = ["differ-\nence"] if paper and compared(study) else []
    rows: list[list[str]] = []
    for line in part["rows"]:
        for place, metric in enumerate(columns_of(study)):
            cells = [obtained(study, part, line, protocol, metric) for protocol in protocols]
            gap = points(line["difference"].get(metric))
            marked = f"{SHORT} {gap}" if metric in line["short"] else gap
            start = ["" if place else line["name"], metric_name(metric)]
            theirs = [printed(study, line, metric)] if paper else []
            rows.append([*start, *theirs, *cells, *([marked] if differs else [])])
    return _table(title, 2, ["method", "metric", *paper, *ours, *differs], rows, width)


def _values(study: Mapping[str, Any], part: Mapping[str, Any], title: str, width: int) -> Table:
    """A line a value, and what was published or obtained for it."""
    return _drawn(values_grid(study, part), title, width)


def _across(study: Mapping[str, Any], part: Mapping[str, Any], title: str, width: int) -> Table:
    """A column a value: there are few, and each a single figure."""
    return _drawn(sweep_grid(study, part), title, width)


def _rounds(study: Mapping[str, Any], part: Mapping[str, Any], title: str, width: int) -> Table:
    """The last round and the best."""
    return _drawn(rounds_grid(study, part, shares=(1.0,)), title, width)


def _apart(study: Mapping[str, Any], part: Mapping[str, Any], title: str, width: int) -> Table:
    """What a plot shows in figures."""
    columns, left, rows = embedding_grid(study, part)
    narrow = [[cell.partition(",")[0] if place == 2 else cell for place, cell in enumerate(row)] for row in rows]
    heads = [column.replace("test item", "test").replace(" ", "\n") for column in columns]
    return _drawn(Grid(heads, left, narrow), title, width)


SHOWN = {
    "table": _rows,
    "pairs": _rows,
    "sweep": _values,
    "convergence": _rounds,
    "tables": _values,
    "adaptation": _values,
    "embedding": _apart,
    "accounting": _across,
    "lengths": _values,
    "membership": _rows,
}
"""How each kind of study is printed."""


def _drawn(grid: Grid, title: str, width: int) -> Table:
    """Names stand once, until they change."""
    rows: list[list[str]] = []
    before: list[str] = []
    for row in grid.rows:
        cells = [cell.replace(" protocol", "") for cell in row[: grid.left]] + row[grid.left :]
        same = 0
        while same < grid.left - 1 and before[: same + 1] == cells[: same + 1]:
            same += 1
        rows.append(["" for _ in range(same)] + cells[same:])
        before = cells
    return _table(title, grid.left, grid.columns, rows, width)

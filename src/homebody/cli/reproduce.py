"""`homebody reproduce`: run what a paper prints, and set it beside the published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from homebody.cli import options
from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from rich.table import Table

    from homebody.studies.papers import Paper

__all__ = ["reproduce"]


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="A paper's name, or a folder with its recipe.toml; without one: a list.")
    ] = None,
    table: Annotated[str | None, typer.Option("--table", help="Only this table; by default everything.")] = None,
    figure: Annotated[str | None, typer.Option("--figure", help="Only this figure.")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="Only this data set; repeat.")] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Seeds 0 to this less 1; by default the recipe's.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="For a quick look: rounds of every run.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time.")] = 1,
    write: Annotated[bool, typer.Option("--write", help="Copy RESULTS.md beside the paper's recipe.")] = False,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    as_json: options.Json = False,
) -> None:
    """Published figures beside obtained ones: as JSON, as Markdown and as a page that works without a network.

    Runs that are finished are kept: an interrupted reproduction goes on when the same command is given again.
    """
    from homebody.studies.papers import find_paper, list_papers, read_paper

    if paper is None:
        _list([read_paper(folder) for folder in list_papers()], as_json)
        return

    from homebody.cli.cells import watching_cells
    from homebody.report.pages import NEEDS, has_plotly
    from homebody.studies.reproduce import plan
    from homebody.studies.reproduce import reproduce as run_plan

    folder = find_paper(paper)
    planned = plan(
        read_paper(folder),
        table=table,
        figure=figure,
        data=data or [],
        seeds=seeds,
        rounds=rounds,
        data_dir=options.folder_anywhere(data_dir),
    )
    with watching_cells(planned.paper.name, len(planned.recipes), quiet=as_json) as (watch, say):
        result = run_plan(planned, out, jobs=jobs, watch=watch, say=say)
    made = out / "reproduce" / planned.paper.name
    if write:
        _copy(made / "RESULTS.md", folder / "RESULTS.md")
    if as_json:
        typer.echo(json.dumps({**result, "folder": str(made)}))
    else:
        _print(result, made, [study.label for study, _ in planned.studies])
    if not has_plotly():
        typer.echo(f"homebody: {NEEDS}", err=True)
    _complain(result, planned.command)


def _copy(source: Path, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.partial")
    try:
        scratch.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        scratch.replace(target)
    except OSError as error:
        raise HomebodyError(f"{target} cannot be written: {error.strerror}.") from error


def _complain(result: dict[str, Any], command: str) -> None:
    """A reproduction with holes does not end as if it had none."""
    errors = [
        (study["label"], data, row["name"], error)
        for study in result["studies"]
        for data, part in study["data"].items()
        if part["made"]["command"] == command
        for row in part["rows"]
        for error in _errors(row)
    ]
    if errors:
        label, data, name, error = errors[0]
        more = f" ({len(errors)} failed in all; the page lists them.)" if len(errors) > 1 else ""
        raise HomebodyError(f"{label}, {name} on {data} failed: {error}{more}")


def _errors(row: dict[str, Any]) -> list[str]:
    groups = [row, *row.get("points", [])]
    found = [error for group in groups for one in group.get("obtained", {}).values() for error in one["errors"]]
    return [*found, *row.get("errors", [])]


def _list(papers: list[Paper], as_json: bool) -> None:
    if as_json:
        listed = [
            {
                "name": paper.name,
                "title": paper.title,
                "citation": paper.citation,
                "tables": [{"id": one.id, "title": one.title, "data": one.data} for one in paper.tables],
                "figures": [{"id": one.id, "title": one.title, "data": one.data} for one in paper.figures],
            }
            for paper in papers
        ]
        typer.echo(json.dumps({"papers": listed}))
        return

    from rich.console import Console

    console = Console()

    def line(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    if not papers:
        line("There is no paper here: a paper is a folder experiments/NAME with a recipe.toml (docs/reproducing.md).")
        return
    for paper in papers:
        line(f"{paper.name}: {paper.title}. {paper.citation}")
        for study in paper.studies:
            line(f"  {study.label}: {study.title} ({', '.join(study.data)})")
    line("Run one with `homebody reproduce NAME`, or a part of it with --table, --figure and --data.")


def _print(result: dict[str, Any], folder: Path, labels: list[str]) -> None:
    """Tables on the terminal, one line a metric so that 80 columns are enough; the rest is on the page."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from homebody.report.words import metric_name, number, points

    console = Console()
    for study in result["studies"]:
        if study["kind"] != "table" or study["label"] not in labels:
            continue
        for data, part in study["data"].items():
            scale = f" × {study['scale']:g}" if study["scale"] != 1 else ""
            title = f"{study['label']}, {data}{scale}, {part['seeds']} seed{'s' if part['seeds'] > 1 else ''}"
            shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            shown.add_column("method", overflow="fold")
            shown.add_column("metric", no_wrap=True)
            ours = [f"obtained,\n{protocol}" for protocol in study["protocols"]]
            for heading in ("published", *ours, "differ-\nence"):
                shown.add_column(heading, justify="right", no_wrap=True)
            for row in part["rows"]:
                for place, metric in enumerate(study["metrics"]):
                    cells = [_cell(row, protocol, metric, study["scale"]) for protocol in study["protocols"]]
                    gap = points(row["difference"].get(metric))
                    shown.add_row(
                        "" if place else row["name"],
                        metric_name(metric),
                        number(row["published"].get(metric), study["scale"]),
                        *cells,
                        f"▼ {gap}" if metric in row["short"] else gap,
                    )
            console.print(shown)
    for study in result["studies"]:
        if study["label"] in labels and study["kind"] in ("tables", "embedding"):
            console.print(_looked(study))
    lines = [f"▼ short by more than {result['tolerance']:g} points" if any(map(_short, result["studies"])) else ""]
    page = "index.html" if (folder / "index.html").exists() else "RESULTS.md"
    for text in filter(None, (*lines, f"page: {folder / page}")):
        console.print(text, highlight=False, soft_wrap=True, markup=False)


def _looked(study: dict[str, Any]) -> Table:
    """What was found within models, one line each."""
    from rich import box
    from rich.table import Table

    from homebody.report.scatter import HEADINGS, embedding_rows, swap_rows
    from homebody.report.words import metric_name

    title = f"{study['label']}: {study['title']}"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    swapped = study["kind"] == "tables"
    metrics = map(metric_name, study["metrics"]) if swapped else ()
    for place, heading in enumerate((*HEADINGS[study["kind"]], *metrics)):
        left = place < 4
        shown.add_column(
            heading.replace(": ", ":\n"),
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=not left or place == 2,
        )
    for line in swap_rows(study) if swapped else embedding_rows(study):
        shown.add_row(*line)
    return shown


def _short(study: dict[str, Any]) -> bool:
    return any(row.get("short") for part in study["data"].values() for row in part["rows"])


def _cell(row: dict[str, Any], protocol: str, metric: str, scale: float) -> str:
    from homebody.report.words import spread

    found = row["obtained"].get(protocol)
    if found is None:
        return "not run"
    if metric in found["metrics"]:
        return spread(found["metrics"][metric], scale)
    return "failed" if found["errors"] else "…"

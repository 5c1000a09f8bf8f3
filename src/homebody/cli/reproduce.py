"""`homebody reproduce`: run what a paper prints, and set it beside the published figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from homebody.cli import options
from homebody.errors import HomebodyError

if TYPE_CHECKING:
    from homebody.studies.papers import Paper

__all__ = ["reproduce"]


def reproduce(
    paper: Annotated[
        str | None, Argument(help="A paper's name, or a folder with its recipe.toml; leave it out to list the papers.")
    ] = None,
    table: Annotated[str | None, Option(help="Only this table; by default everything.")] = None,
    figure: Annotated[str | None, Option(help="Only this figure.")] = None,
    data: Annotated[list[str] | None, Option(help="Only this data set; repeat.")] = None,
    protocol: Annotated[list[str] | None, Option(help="Only under this protocol; repeat.")] = None,
    seeds: Annotated[int | None, Option(help="Number of seeds (0, 1, …); by default the recipe's.")] = None,
    rounds: Annotated[int | None, Option(help="Rounds of every run, for a quick look.")] = None,
    jobs: options.Jobs = None,
    device: Annotated[
        str | None, Option(help="The processor to train on, cpu or cuda; by default the recipe's, which is cpu.")
    ] = None,
    write: Annotated[
        bool, Option("--write", help="Write RESULTS.md, its picture and results.json beside the paper's recipe.")
    ] = False,
    rewrite: Annotated[
        bool, Option("--rewrite", help="Run nothing: write RESULTS.md again from results.json beside the recipe.")
    ] = False,
    out: options.Out = Path("runs"),
    data_dir: options.DataDir = None,
    trust_code: options.TrustCode = False,
    as_json: options.Json = False,
) -> None:
    """Reproduce a paper: its figures beside ours, as JSON, Markdown and an HTML page that works offline.

    Finished runs are kept: give the same command again to continue an interrupted reproduction.
    """
    from homebody.studies.papers import find_paper, list_papers, read_paper

    if paper is None:
        _list([read_paper(folder, load=False) for folder in list_papers()], as_json)
        return

    from homebody.cli.progress import watching_cells
    from homebody.methods import code_of, trust
    from homebody.report.pages import NEEDS, has_plotly
    from homebody.report.terminal import print_reproduction
    from homebody.settings import check_counts
    from homebody.simulation import usable_device
    from homebody.studies.reproduce import plan, publish, work
    from homebody.studies.reproduce import reproduce as run_plan
    from homebody.studies.reproduce import rewrite as write_again
    from homebody.studies.workers import cores

    if device is not None:
        usable_device(device)
    folder = find_paper(paper)
    if rewrite:
        result = write_again(folder)
        options.answer({**result, "folder": str(folder)}, as_json, f"page: {folder / 'RESULTS.md'}")
        return
    check_counts(jobs=(jobs := jobs if jobs is not None else cores()))
    if trust_code:
        for method in read_paper(folder, load=False).methods:
            if code := code_of(method):
                options.warn(f"{folder} runs the code of {code}.")
                trust(method, code.sha256)
    part: dict[str, Any] = {"table": table, "figure": figure, "data": data or [], "protocols": protocol or []}
    where = options.folder_anywhere(data_dir)
    planned = plan(read_paper(folder), **part, seeds=seeds, rounds=rounds, device=device, data_dir=where)
    with watching_cells(planned.paper.name, len(planned.recipes), quiet=as_json) as (watch, say):
        if much := work(planned, out):
            say(much)
        result = run_plan(planned, out, jobs=jobs, watch=watch, say=say)
    pages = out / "reproduce" / planned.paper.name
    if write:
        publish(result, folder)
    labels = [study.label for study, _ in planned.studies]
    options.answer({**result, "folder": str(pages)}, as_json, lambda: print_reproduction(result, pages, labels))
    if not has_plotly():
        options.warn(NEEDS)
    _complain(result, planned.command)


def _complain(result: dict[str, Any], command: str) -> None:
    """Fail if a run of this command failed: a reproduction with missing figures is no success."""
    failed = [
        f"{study['label']}, {row['name']} on {data} failed: {error}"
        for study in result["studies"]
        for data, part in study["data"].items()
        if part["made"]["command"] == command
        for row in part["rows"]
        for error in _errors(row)
    ]
    if failed:
        more = f" ({len(failed)} failed in all; the page lists them.)" if len(failed) > 1 else ""
        raise HomebodyError(f"{failed[0]}{more}")


def _errors(row: dict[str, Any]) -> list[str]:
    """The errors of a row, without divergences that the recipe declares."""
    from homebody.report.reproduction import diverged_as_known

    groups = [row, *row.get("points", [])]
    figures = [entry for group in groups for entry in group.get("obtained", {}).values()]
    errors = [error for entry in figures if not diverged_as_known(row, entry) for error in entry["errors"]]
    return [*errors, *row.get("errors", [])]


def _list(papers: list[Paper], as_json: bool) -> None:
    listed = [
        {
            **{name: getattr(paper, name) for name in ("name", "title", "citation")},
            "tables": [{"id": study.id, "title": study.title, "data": study.data} for study in paper.tables],
            "figures": [{"id": study.id, "title": study.title, "data": study.data} for study in paper.figures],
        }
        for paper in papers
    ]
    lines = []
    for paper in papers:
        lines.append(f"{paper.name}: {paper.title}. {paper.citation}")
        lines += (f"  {study.label}: {study.title} ({', '.join(study.data)})" for study in paper.studies)
    lines.append(
        "Run one with `homebody reproduce NAME`, or a part of it with --table, --figure and --data."
        if papers
        else "There is no paper here: a paper is a folder experiments/NAME with a recipe.toml (docs/reproducing.md)."
    )
    options.answer({"papers": listed}, as_json, lambda: options.show(*lines))

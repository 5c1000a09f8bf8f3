"""Run a paper's tables and figures, and set what was obtained beside what was published."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from homebody.errors import HomebodyError, unknown_name
from homebody.recipe import Recipe
from homebody.report import RunFolder
from homebody.report.markdown import reproduction_markdown
from homebody.report.pages import has_plotly, reproduction_page
from homebody.studies import probes
from homebody.studies.cells import Progress, run_cells
from homebody.studies.made import command_text, made, without_paths, write_all
from homebody.studies.papers import Paper, Row, Study, published

__all__ = ["Plan", "plan", "reproduce"]

SCHEMA_VERSION = 1
TOLERANCE = 1.5
"""Points by which an obtained figure may fall short before it is marked."""
EVERY = 2.0
"""Seconds between two writings of the pages while cells finish."""


@dataclass(frozen=True)
class Cell:
    """One run of a study, and where its result belongs."""

    study: Study
    row: Row
    data: str
    protocol: str
    point: int
    run: int
    """Which of the plan's recipes: a table and a figure may show the same run."""


@dataclass(frozen=True)
class Plan:
    """What a command asks for: some studies of a paper, on some data sets, with so many seeds."""

    paper: Paper
    studies: list[tuple[Study, list[str]]]
    recipes: list[Recipe]
    cells: list[Cell]
    command: str
    rounds: int | None
    probes: list[list[str]]
    """For each recipe, what is looked for in its model."""


def plan(
    paper: Paper,
    *,
    table: str | None = None,
    figure: str | None = None,
    data: Sequence[str] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    data_dir: str | None = None,
) -> Plan:
    """Which cells a command needs. Without a table or a figure, all of them."""
    for name, value in (("Seeds", seeds), ("Rounds", rounds)):
        if value is not None and value < 1:
            raise HomebodyError(f"{name} must be at least 1, not {value}.")
    chosen = _named("table", table, paper.tables, figure is None) + _named(
        "figure", figure, paper.figures, table is None
    )
    known = {name for study in chosen for name in study.data}
    for name in data:
        if name not in known:
            raise unknown_name("data set of this part of the paper", name, known)
    studies = []
    for study in chosen:
        wanted = [name for name in study.data if not data or name in data]
        if wanted:
            studies.append((replace(study, seeds=seeds or study.seeds), wanted))
    recipes: dict[str, Recipe] = {}
    cells = []
    for study, names in studies:
        rows = [row for row in study.rows if row.method is not None]
        points = list(enumerate(study.points))
        for name, row, protocol, (point, value), seed in product(
            names, rows, study.protocols, points, range(study.seeds)
        ):
            recipe = study.recipe(row, name, protocol, seed, value)
            recipe = replace(recipe, rounds=rounds or recipe.rounds, data_dir=data_dir)
            recipes.setdefault(recipe.to_toml(), recipe)
            cells.append(Cell(study, row, name, protocol, point, list(recipes).index(recipe.to_toml())))
    options = {"table": table, "figure": figure, "data": list(data), "seeds": seeds, "rounds": rounds}
    command = command_text(f"homebody reproduce {paper.name}", options)
    looked = _probes(paper, studies, recipes, seeds, rounds, data_dir)
    return Plan(paper, studies, list(recipes.values()), cells, command, rounds, looked)


def _probes(
    paper: Paper,
    studies: Sequence[tuple[Study, list[str]]],
    recipes: Mapping[str, Recipe],
    seeds: int | None,
    rounds: int | None,
    data_dir: str | None,
) -> list[list[str]]:
    """Also what figures that were not asked for would look for: a model is there once, and looking costs little."""
    found: dict[str, list[str]] = {text: [] for text in recipes}
    asked = {study.label for study, _ in studies}
    for study in paper.studies:
        if study.kind not in probes.PROBES or (study.label not in asked and probes.lacks(study.kind)):
            continue
        rows = [row for row in study.rows if row.method is not None]
        for name, row, protocol, seed in product(study.data, rows, study.protocols, range(seeds or study.seeds)):
            recipe = study.recipe(row, name, protocol, seed)
            text = replace(recipe, rounds=rounds or recipe.rounds, data_dir=data_dir).to_toml()
            if study.kind not in found.get(text, [study.kind]):
                found[text].append(study.kind)
    return list(found.values())


def _named(kind: str, wanted: str | None, studies: Sequence[Study], otherwise: bool) -> list[Study]:
    if wanted is None:
        return list(studies) if otherwise else []
    found = [study for study in studies if study.id == wanted]
    if not found:
        raise unknown_name(kind, wanted, [study.id for study in studies])
    return found


def reproduce(
    planned: Plan,
    out: Path,
    *,
    jobs: int = 1,
    watch: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run what is planned; out/reproduce/PAPER has the pages, rewritten as cells finish.

    A failed cell is told of on the pages and stops nothing. What was interrupted goes on with the same plan.
    """
    folder = out / "reproduce" / planned.paper.name
    book = _Book(planned, folder)
    written = time.monotonic()

    def on_progress(progress: Progress) -> None:
        nonlocal written
        if progress.result is not None:
            book.add(progress.cell, progress.result)
            if time.monotonic() - written > EVERY:
                book.write()
                written = time.monotonic()
        if watch is not None:
            watch(progress)

    try:
        run_cells(
            planned.recipes,
            out / "cells",
            jobs=jobs,
            watch=on_progress,
            say=say,
            on_error="keep",
            keep_state=False,
            probes=planned.probes,
        )
    finally:
        result = book.write()
    return result


class _Book:
    """The result as it grows: what earlier commands made, and what this one has so far."""

    def __init__(self, planned: Plan, folder: Path) -> None:
        self.planned, self.folder = planned, folder
        self.before = _read(folder / "result.json", planned.paper)
        self.results: dict[int, Mapping[str, Any]] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.looked: dict[Path, dict[str, Any]] = {}
        self.made = made(planned.command)
        self.began = time.monotonic()

    def add(self, run: int, result: Mapping[str, Any]) -> None:
        self.results[run] = result

    def write(self) -> dict[str, Any]:
        result = self.result()
        files: dict[str, Any] = {"result.json": result, "RESULTS.md": reproduction_markdown(result)}
        if has_plotly():
            files["index.html"] = reproduction_page(result)
        if self.results or not self.planned.cells:
            write_all(self.folder, files)
        return result

    def result(self) -> dict[str, Any]:
        paper = self.planned.paper
        finished = [result for result in self.results.values() if "error" not in result]
        self.made |= {
            "seconds": time.monotonic() - self.began,
            "runs": len(self.results),
            "run_seconds": sum(float(result["seconds"]) for result in finished),
        }
        studies = [self._study(study) for study in paper.studies]
        return {
            "schema": SCHEMA_VERSION,
            "paper": paper.name,
            "title": paper.title,
            "citation": paper.citation,
            "docs": paper.docs,
            "note": paper.note,
            "tolerance": TOLERANCE,
            "studies": studies,
            "invocations": _invocations(studies),
        }

    def _study(self, study: Study) -> dict[str, Any]:
        parts = dict(self.before.get(study.label, {}))
        for own, names in self.planned.studies:
            if own.label == study.label:
                for name in names:
                    part = self._part(own, name)
                    if part["finished"] or not part["planned"] or name not in parts:
                        parts[name] = part
        return {
            "id": study.id,
            "label": study.label,
            "kind": study.kind,
            "title": study.title,
            "note": study.note,
            "metrics": study.metrics,
            "scale": study.scale,
            "protocols": study.protocols,
            "against": against(study),
            "vary": study.vary,
            "data": {name: parts[name] for name in study.data if name in parts},
        }

    def _part(self, study: Study, data: str) -> dict[str, Any]:
        mine = {cell.run for cell in self.planned.cells if cell.study is study and cell.data == data}
        done = [self.results[n] for n in sorted(mine) if n in self.results]
        whole = [result for result in done if "error" not in result]
        show = {
            "table": self._row,
            "convergence": self._curves,
            "sweep": self._points,
            "tables": self._points,
            "embedding": self._panels,
        }[study.kind]
        return {
            "made": self.made,
            "seeds": study.seeds,
            "rounds": self.planned.rounds,
            "planned": len(mine),
            "finished": len(done),
            "meanings": {result["protocol"]: _meaning(result) for result in whole},
            "notes": list(dict.fromkeys(without_paths(note) for result in whole for note in result["notes"])),
            "rows": [show(study, row, data) for row in study.rows],
        }

    def _cells(self, study: Study, row: Row, data: str, protocol: str, point: int = 0) -> list[Mapping[str, Any]]:
        found = [
            self.results[cell.run]
            for cell in self.planned.cells
            if cell.study is study and cell.row is row and cell.run in self.results
            if (cell.data, cell.protocol, cell.point) == (data, protocol, point)
        ]
        if study.kind not in probes.PROBES:
            return found
        looked = [self._looked(study.kind, result) for result in found]
        if study.kind == "tables":
            name = study.points[point]
            return [one if "error" in one else {**one, "metrics": one["probe"]["metrics"][name]} for one in looked]
        return looked

    def _looked(self, probe: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
        """A run's result with what a probe found in its model, or why there is none."""
        if "error" in result:
            return result
        if why := result.get("refused", {}).get(probe):
            return {**result, "error": why}
        file = probes.file_of(Path(str(result["run"])), probe)
        if file not in self.looked:
            self.looked[file] = RunFolder.open(file.parent).read_json(file.name)
        return {**result, "probe": self.looked[file]}

    def _panels(self, study: Study, row: Row, data: str) -> dict[str, Any]:
        """By protocol: the picture of the first seed, and how far apart a person's own items lie, over all seeds."""
        panels, errors = {}, []
        for protocol in study.protocols if row.method is not None else ():
            cells = self._cells(study, row, data, protocol)
            errors += [without_paths(str(result["error"])) for result in cells if "error" in result]
            if found := [result["probe"] for result in cells if "error" not in result]:
                panels[protocol] = probes.panel(found)
        return {**_named_row(row, data), "panels": panels, "errors": list(dict.fromkeys(errors))}

    def _row(self, study: Study, row: Row, data: str) -> dict[str, Any]:
        return {**_named_row(row, data), **self._figures(study, row, data)}

    def _points(self, study: Study, row: Row, data: str) -> dict[str, Any]:
        points = [
            {"value": value, **self._figures(study, row, data, point)} for point, value in enumerate(study.points)
        ]
        return {**_named_row(row, data), "points": points}

    def _figures(self, study: Study, row: Row, data: str, point: int = 0) -> dict[str, Any]:
        """Published, obtained under each protocol, and how far apart they are, in points."""
        given = published(study, row, data, point)
        found = (
            {}
            if row.method is None
            else {p: _obtained(self._cells(study, row, data, p, point), study.metrics) for p in study.protocols}
        )
        ours = found.get(against(study), {}).get("metrics", {})
        gaps = {name: 100 * (ours[name]["mean"] - figure) for name, figure in given.items() if name in ours}
        short = [name for name, gap in gaps.items() if gap < -TOLERANCE]
        return {"published": given, "obtained": found, "difference": gaps, "short": short}

    def _curves(self, study: Study, row: Row, data: str) -> dict[str, Any]:
        curves, errors = {}, []
        for protocol in study.protocols if row.method is not None else ():
            cells = self._cells(study, row, data, protocol)
            errors += [without_paths(str(result["error"])) for result in cells if "error" in result]
            runs = [self._rounds(str(result["run"])) for result in cells if "error" not in result]
            if runs:
                curves[protocol] = {metric: _curve(runs, metric) for metric in study.metrics}
        return {**_named_row(row, data), "curves": curves, "errors": list(dict.fromkeys(errors))}

    def _rounds(self, run: str) -> list[dict[str, Any]]:
        if run not in self.lines:
            self.lines[run] = RunFolder.open(Path(run)).rounds()
        return self.lines[run]


def against(study: Study) -> str:
    """The protocol whose figures are set against the published ones."""
    return "published" if "published" in study.protocols else study.protocols[0]


def _meaning(result: Mapping[str, Any]) -> str:
    return without_paths(str(result["meaning"])).removeprefix(f"protocol {result['protocol']}: ")


def _named_row(row: Row, data: str) -> dict[str, Any]:
    reason = row.missing if row.method is None else ""
    return {"name": row.name, "note": row.note_on(data), "missing": reason}


def _obtained(results: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    runs = [result for result in results if "error" not in result]
    errors = [without_paths(str(result["error"])) for result in results if "error" in result]
    found = {}
    for metric in metrics if runs else ():
        if metric not in runs[0]["metrics"]:
            raise unknown_name("metric", metric, runs[0]["metrics"])
        values = [float(run["metrics"][metric]) for run in runs]
        sd = statistics.stdev(values) if len(values) > 1 else None
        found[metric] = {"mean": statistics.fmean(values), "sd": sd, "values": values}
    return {
        "n": len(runs),
        "metrics": found,
        "errors": list(dict.fromkeys(errors)),
        "seconds": statistics.fmean(float(run["seconds"]) for run in runs) if runs else None,
        "chosen_rounds": [run["chosen_round"] for run in runs],
        "cells": [Path(run["run"]).name for run in runs],
    }


def _curve(runs: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> dict[str, Any]:
    """Mean, least and most over seeds, at each round that all of them evaluated."""
    series = [{line["step"]: line["metrics"][metric] for line in lines if metric in line["metrics"]} for lines in runs]
    if not all(series):
        raise HomebodyError(f"No round was evaluated for {metric}: a convergence figure needs a metric of every round.")
    rounds = sorted(set.intersection(*(set(one) for one in series)))
    at = [[float(one[step]) for one in series] for step in rounds]
    return {
        "n": len(series),
        "round": rounds,
        "mean": [statistics.fmean(values) for values in at],
        "low": [min(values) for values in at],
        "high": [max(values) for values in at],
    }


def _invocations(studies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The commands that the parts come from, the latest first, each with what it made."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for study in studies:
        for name, part in study["data"].items():
            key = (part["made"]["date"], part["made"]["command"])
            entry = found.setdefault(key, {**part["made"], "made_parts": {}})
            entry["made_parts"].setdefault(study["label"], []).append(name)
    for entry in found.values():
        parts = entry.pop("made_parts")
        entry["parts"] = "; ".join(f"{label}: {', '.join(names)}" for label, names in parts.items())
    return [found[key] for key in sorted(found, reverse=True)]


def _read(path: Path, paper: Paper) -> dict[str, dict[str, Any]]:
    """The parts that earlier commands made, by label and data set."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["schema"] > SCHEMA_VERSION or result["paper"] != paper.name:
            raise HomebodyError(f"{path} was written by a newer Homebody, or for another paper: move it away.")
        # A table whose recipe has other columns by now does not go together with what was made before.
        shapes = {study.label: (study.kind, study.metrics, study.protocols, study.vary) for study in paper.studies}
        return {
            study["label"]: dict(study["data"])
            for study in result["studies"]
            if shapes.get(study["label"]) == (study["kind"], study["metrics"], study["protocols"], study["vary"])
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise HomebodyError(f"{path} is not the result of a reproduction ({error}): move it away.") from error

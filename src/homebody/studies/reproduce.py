"""Run a paper's tables and figures, and write obtained figures beside published ones."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from homebody.errors import HomebodyError, several
from homebody.report import RunFolder, jsonable
from homebody.report.markdown import CURVES, PICTURE, reproduction_markdown
from homebody.report.pages import has_plotly
from homebody.report.reproduction import curves, picture
from homebody.report.reproduction_page import reproduction_page
from homebody.report.words import behind_proxy
from homebody.studies.cells import CellProgress, cell_key, count_done, run_cells
from homebody.studies.figures import LINES, MEANINGS, TOLERANCE, Runs, ordered
from homebody.studies.plan import Plan, plan
from homebody.studies.provenance import provenance_of, without_paths, write_all
from homebody.studies.study import COMPUTED, Row, Study

__all__ = ["Plan", "plan", "publish", "reproduce", "rewrite", "work"]

SCHEMA_VERSION = 2
KEPT = "results.json"
"""The figures of a paper, beside its recipe: RESULTS.md can be made from them without a run."""
SHAPE = ("kind", "metrics", "also", "protocols", "vary", "labels")
"""Fields that two results of a study must share to be merged."""
SHOWN = (
    *("id", "label", "form", "kind", "title", "note", "metrics", "also"),
    *("scale", "protocols", "against", "vary", "axis", "labels", "lines"),
)
"""What a result says of a study, before its data."""
INTERVALS = "In brackets: the interval of 95 %, over people; of several seeds, from the lowest end to the highest."
EVERY = 2.0
"""Seconds between two writes of the pages while cells finish."""


def work(planned: Plan, out: Path) -> str:
    """How many runs a plan has and how many are finished, as a sentence."""
    total, before = len(planned.recipes), count_done(planned.recipes, out / "cells", planned.probes)
    if not total:
        return ""
    done = "all of them finished before" if before == total else f"{before:,} of them finished before"
    if total == 1:
        done = "finished before" if before else "not finished before"
    whole = not (planned.asked_for or before == total)
    narrower = "; --table and --figure ask for one part, --data, --protocol and --seeds for less of it" if whole else ""
    return f"{several(total, 'run')}, {done}{narrower}."


def reproduce(
    planned: Plan,
    out: Path,
    *,
    jobs: int = 1,
    watch: Callable[[CellProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run what is planned; out/reproduce/PAPER has the pages, rewritten as cells finish.

    A failed cell is reported on the pages and stops nothing. The same plan continues what was interrupted.
    """
    folder = out / "reproduce" / planned.paper.name
    book = _Book(planned, folder)
    for place, recipe in enumerate(planned.others, len(planned.recipes)):
        cell = out / "cells" / cell_key(recipe)
        if (cell / "result.json").exists():
            book.add(place, {**RunFolder.open(cell).read_json("result.json"), "run": str(cell)})
    written = time.monotonic()

    def on_progress(progress: CellProgress) -> None:
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
    """The result as it grows: parts of earlier commands, and those of this one so far."""

    def __init__(self, planned: Plan, folder: Path) -> None:
        self.planned, self.folder = planned, folder
        shapes = {study.label: _shape(vars(study)) for study in planned.paper.studies}
        self.before = _read(folder / "result.json", planned.paper.name, shapes)
        self.results: dict[int, Mapping[str, Any]] = {}
        self.places: dict[tuple[str, str, str, str, int], list[int]] = {}
        for cell in planned.cells:
            key = (cell.study.label, cell.row.name, cell.data, cell.protocol, cell.point)
            self.places.setdefault(key, []).append(cell.run)
        self.rounds = cache(lambda run: RunFolder.open(Path(run)).rounds())
        self.cores = cache(lambda run: int(RunFolder.open(Path(run)).read_json("environment.json")["cores"] or 0))
        self.computed: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.provenance = provenance_of(planned.command)
        self.began = time.monotonic()

    def add(self, run: int, result: Mapping[str, Any]) -> None:
        self.results[run] = result

    def write(self) -> dict[str, Any]:
        result = self.result()
        files = {"result.json": result, **_shown(result)}
        if has_plotly():
            files["index.html"] = reproduction_page(result)
        if self._ours() or not self.planned.recipes:
            write_all(self.folder, files)
        return result

    def _ours(self) -> list[Mapping[str, Any]]:
        """The results of what this command runs."""
        return [result for run, result in self.results.items() if run < len(self.planned.recipes)]

    def result(self) -> dict[str, Any]:
        paper = self.planned.paper
        finished = [result for result in self._ours() if "error" not in result]
        self.provenance |= {
            "seconds": time.monotonic() - self.began,
            "runs": len(self._ours()),
            "run_seconds": sum(float(result["seconds"]) for result in finished),
        }
        studies = [self._study(study) for study in paper.studies]
        whole = {
            "schema": SCHEMA_VERSION,
            "paper": paper.name,
            **{name: getattr(paper, name) for name in ("title", "citation", "docs", "note")},
            "tolerance": TOLERANCE,
            "studies": studies,
            "invocations": _invocations(studies),
        }
        return cast(dict[str, Any], jsonable(whole))

    def _study(self, study: Study) -> dict[str, Any]:
        parts = dict(self.before.get(study.label, {}))
        for chosen, names in self.planned.studies:
            if chosen.label == study.label:
                for name in names:
                    part = self._part(chosen, name)
                    if part["finished"] or not part["planned"] or name not in parts:
                        parts[name] = part
        shown = {name: getattr(study, name) for name in SHOWN}
        return {**shown, "data": {name: parts[name] for name in study.data if name in parts}}

    def _part(self, study: Study, data: str) -> dict[str, Any]:
        """One study on one data set. A study that needs no run has no cells, and is computed once."""
        computed = study.kind in COMPUTED
        mine = {cell.run for cell in self.planned.cells if cell.study is study and cell.data == data}
        asked = {run for run in mine if run < len(self.planned.recipes)}
        whole = [self.results[n] for n in sorted(mine) if n in self.results and "error" not in self.results[n]]
        rows = self._rows(study, data)
        return {
            "made": self.provenance,
            "seeds": 0 if computed else study.seeds,
            "rounds": None if computed else self.planned.rounds,
            "protocols": [name for name in study.protocols if computed or name in self.planned.protocols],
            "planned": len(asked),
            "finished": len(asked & self.results.keys()),
            "meanings": {name: MEANINGS[name] for name in study.protocols if computed}
            | {result["protocol"]: _meaning(result) for result in whole},
            **self._of_rows(study, data),
            "notes": [
                *dict.fromkeys(without_paths(note) for result in whole for note in result["notes"]),
                *self._elsewhere(whole),
            ],
            "footnotes": [
                *(behind_proxy(whole) if "epsilon" in (*study.metrics, *study.also) else []),
                *([INTERVALS] if study.kind in ("membership", "view-attack") else []),
                *(ordered(study, rows) if study.orders else []),
            ],
            "rows": rows,
        }

    def _rows(self, study: Study, data: str) -> list[dict[str, Any]]:
        def of(row: Row, protocol: str, point: int) -> list[Mapping[str, Any]]:
            places = self.places.get((study.label, row.name, data, protocol, point), [])
            return [self.results[place] for place in places if place in self.results]

        key = (study.label, data)
        if study.kind not in COMPUTED or key not in self.computed:
            self.computed[key] = LINES[study.kind](Runs(study, data, of, self.rounds, self.planned.data_dir))
        return self.computed[key]

    def _of_rows(self, study: Study, data: str) -> dict[str, Any]:
        """What a protocol means for which rows, where rows differ in it: in their splits."""
        found: dict[str, dict[str, list[str]]] = {}
        for (label, row, name, protocol, _), places in self.places.items():
            if (label, name) == (study.label, data):
                for result in (self.results[place] for place in places if place in self.results):
                    if "error" not in result:
                        rows = found.setdefault(protocol, {}).setdefault(_meaning(result), [])
                        rows += [row] if row not in rows else []
        differing = {protocol: texts for protocol, texts in found.items() if len(texts) > 1}
        return {"meanings_of_rows": differing} if differing else {}

    def _elsewhere(self, results: Sequence[Mapping[str, Any]]) -> list[str]:
        """Notes on kept runs, and so their seconds, that come from another machine than this page."""
        counts = Counter(self.cores(str(result["run"])) for result in results)
        here = os.cpu_count() or 0
        return [
            f"{count} of {several(len(results), 'run was', 'runs were')} made on another machine, of "
            f"{several(cores, 'core')}."
            for cores, count in sorted(counts.items())
            if cores != here
        ]


def publish(result: Mapping[str, Any], folder: Path) -> None:
    """Write RESULTS.md, its picture, and the figures that both are made from, beside a paper's recipe.

    What is there already of other studies and data sets stays: they may have been run elsewhere.
    """
    result = _without_plots(result)
    kept = _read(folder / KEPT, result["paper"], {study["label"]: _shape(study) for study in result["studies"]})
    for study in result["studies"]:
        study["data"] = kept.get(study["label"], {}) | study["data"]
    result["invocations"] = _invocations(result["studies"])
    write_all(folder, {KEPT: result, **_shown(result)})


def rewrite(folder: Path) -> dict[str, Any]:
    """Write RESULTS.md and its picture again, from the figures that `publish` kept; nothing is run."""
    try:
        result: dict[str, Any] = json.loads((folder / KEPT).read_text(encoding="utf-8"))
        if result["schema"] != SCHEMA_VERSION:
            raise HomebodyError(f"{folder / KEPT} was written by another version of Homebody.")
        write_all(folder, _shown(result))
    except FileNotFoundError as error:
        raise HomebodyError(f"{folder} has no {KEPT}: `homebody reproduce {folder.name} --write` makes it.") from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise HomebodyError(f"{folder / KEPT} is not the result of a reproduction ({error}).") from error
    return result


def _shown(result: Mapping[str, Any]) -> dict[str, Any]:
    drawings = {PICTURE: picture(result), CURVES: curves(result)}
    return {
        "RESULTS.md": reproduction_markdown(result),
        **{name: drawing for name, drawing in drawings.items() if drawing},
    }


def _without_plots(result: Mapping[str, Any]) -> dict[str, Any]:
    """Without the points of embedding plots, which only the HTML page draws."""
    copy: dict[str, Any] = json.loads(json.dumps(result))
    for study in copy["studies"]:
        for part in study["data"].values():
            for line in part["rows"]:
                for panel in line.get("panels", {}).values():
                    for name in ("names", "x", "y", "mark"):
                        panel.pop(name, None)
    return copy


def _meaning(result: Mapping[str, Any]) -> str:
    return without_paths(str(result["meaning"])).removeprefix(f"protocol {result['protocol']}: ")


def _invocations(studies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The commands that the parts come from, the latest first, each with what it made."""
    commands: dict[tuple[str, str], dict[str, Any]] = {}
    for study in studies:
        for name, part in study["data"].items():
            key = (part["made"]["date"], part["made"]["command"])
            entry = commands.setdefault(key, {**part["made"], "made_parts": {}})
            entry["made_parts"].setdefault(study["label"], []).append(name)
    for entry in commands.values():
        parts = entry.pop("made_parts")
        entry["parts"] = "; ".join(f"{label}: {', '.join(names)}" for label, names in parts.items())
    return [commands[key] for key in sorted(commands, reverse=True)]


def _shape(study: Mapping[str, Any]) -> list[Any]:
    return [study[name] for name in SHAPE]


def _read(path: Path, paper: str, shapes: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """The parts that earlier commands made, by label and data set.

    A table whose recipe has other columns by now does not go together with what was made before: shapes, by label.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["schema"] != SCHEMA_VERSION or result["paper"] != paper:
            raise HomebodyError(
                f"{path} was written by another version of Homebody, or for another paper: move it away."
            )
        return {
            study["label"]: dict(study["data"])
            for study in result["studies"]
            if shapes.get(study["label"]) == _shape(study)
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise HomebodyError(f"{path} is not the result of a reproduction ({error}): move it away.") from error

"""Every method that fits a data set, one protocol, several seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from homebody.core import Method
from homebody.data import Population
from homebody.data.splits import PROTOCOLS
from homebody.errors import HomebodyError, refuse_unknown
from homebody.methods import METHODS, find
from homebody.recipe import Recipe, fingerprint
from homebody.report.comparison import legend, summarise_runs
from homebody.report.markdown import leaderboard_markdown
from homebody.report.pages import has_plotly, leaderboard_page
from homebody.studies.cells import CellProgress, run_cells
from homebody.studies.provenance import provenance_of, slug, without_paths, write_all

__all__ = ["Entrants", "fitting", "leaderboard", "table_of"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Entrants:
    """Who takes part, and who cannot."""

    methods: list[str]
    skipped: list[dict[str, str]]

    def some(self) -> list[str]:
        """The methods; data that has enough for none is refused."""
        if not self.methods:
            reasons = "; ".join(f"{method['name']} {method['reason']}" for method in self.skipped)
            raise HomebodyError(f"No method fits this data: {reasons}.")
        return self.methods


def fitting(population: Population, methods: Sequence[str] = ()) -> Entrants:
    """The methods and references that this data has enough for: those named, or all but diagnostics."""
    fit, skipped = [], []
    for name in methods or METHODS:
        method = find(name)
        absent = population.lacks(method.needs)
        if not methods and method.about.diagnostic:
            skipped.append({"name": _short(name), "reason": "is a diagnostic: name it with --methods"})
        elif absent:
            skipped.append({"name": _short(name), "reason": f"needs {absent}, which this data lacks"})
        else:
            fit.append(name)
    return Entrants(fit, skipped)


def leaderboard(
    recipe: Recipe,
    population: Population,
    out: Path,
    *,
    methods: Sequence[str] = (),
    seeds: int = 3,
    jobs: int = 1,
    command: str = "homebody leaderboard",
    watch: Callable[[CellProgress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run every method that fits, as the recipe says; out/leaderboard/DATA-PROTOCOL… has the pages.

    The recipe's method and seed are set here. A method that fails is reported and stops nothing.
    """
    began = time.monotonic()
    refuse_unknown("protocol", [recipe.protocol], PROTOCOLS)
    entrants = fitting(population, methods)
    cells = [replace(recipe, method=name, seed=seed) for name in entrants.some() for seed in range(seeds)]
    results = run_cells(cells, out / "cells", jobs=jobs, watch=watch, say=say, on_error="keep", keep_state=False)
    result = table_of(results, entrants)
    result["made"] = {**provenance_of(command), "seconds": time.monotonic() - began}
    # One folder for each set of options: another way to ask, or other methods, are another leaderboard.
    asked = {
        "recipe": replace(recipe, method="", seed=0).to_toml(),
        "methods": " ".join(entrants.methods),
        "n": str(seeds),
    }
    mark = fingerprint({name: text.encode() for name, text in asked.items()})[:8]
    folder = out / "leaderboard" / f"{slug(str(result['data']))}-{slug(recipe.protocol)}-{mark}"
    files: dict[str, Any] = {"result.json": result, "LEADERBOARD.md": leaderboard_markdown(result)}
    if has_plotly():
        files["index.html"] = leaderboard_page(result)
    write_all(folder, files)
    return {**result, "folder": str(folder)}


def table_of(results: Sequence[dict[str, Any]], entrants: Entrants) -> dict[str, Any]:
    """The leaderboard of these results, best first; a method of which a run failed is left out, and its reason kept."""
    failed = {str(result["method"]): without_paths(str(result["error"])) for result in results if "error" in result}
    whole = [result for result in results if str(result["method"]) not in failed]
    if not whole:
        raise HomebodyError(f"No method got through: {next(iter(failed.values()))}")
    return _result(whole, entrants, failed)


def _result(results: Sequence[dict[str, Any]], entrants: Entrants, failed: dict[str, str]) -> dict[str, Any]:
    summary = summarise_runs(results)
    rows = []
    for row in sorted(summary["methods"], key=lambda row: -row["metrics"]["ndcg@10"]["mean"]):
        federated = issubclass(find(row["method"]), Method)
        rows.append(
            {
                "name": _short(row["method"]),
                "kind": "federated" if federated else "centralised",
                **{name: value for name, value in row.items() if name not in ("method", "runs")},
                "cells": [Path(run).name for run in row["runs"]],
            }
        )
    failures = [{"name": _short(name), "reason": f"failed: {why}"} for name, why in failed.items()]
    return {
        "schema": SCHEMA_VERSION,
        **{name: summary[name] for name in ("data", "protocol", "seeds")},
        "observers": list(rows[0]["epsilon"]),
        "best": _short(summary["best"]),
        "methods": rows,
        "references": summary["references"],
        "cautions": [without_paths(said) for said in summary["cautions"]],
        "skipped": [*entrants.skipped, *failures],
        "legend": [*legend(summary), *(without_paths(note) for note in summary["notes"])],
    }


def _short(method: str) -> str:
    return method.rpartition(":")[2]

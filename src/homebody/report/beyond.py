"""Coverage, novelty, diversity, popularity bias and gaps between groups, in tables.

`homebody.evaluation.beyond` computes what is shown here. To add a figure to the tables, add it to `FIGURES`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from homebody.report.words import spread

__all__ = [
    "FIGURES",
    "ListFigure",
    "beyond_line",
    "beyond_means",
    "cell",
    "figures_of",
    "group_rows",
    "legend_of",
    "metrics_of",
    "shown_of",
]


class ListFigure(NamedTuple):
    """One figure: its key, its heading, how it is written, and what it says."""

    key: str
    heading: str
    write: Callable[[float], str]
    meaning: str


FIGURES = (
    ListFigure("coverage", "coverage", "{:.3f}".format, "the share of the catalogue that is in anybody's list"),
    ListFigure("novelty", "novelty", "{:.2f}".format, "the mean self-information of recommended items, in bits"),
    ListFigure("diversity", "diversity", "{:.3f}".format, "the mean distance of two items of a list, 1 - cosine"),
    ListFigure(
        "popularity_lift",
        "popularity lift",
        "{:+.0%}".format,
        "how much more popular the recommended items are than those of people's histories",
    ),
    ListFigure("gini", "Gini", "{:.3f}".format, "how unequally items are recommended: 0 all alike, 1 one item alone"),
    ListFigure(
        "gap", "activity gap", "{:.3f}".format, "NDCG of the best third of people by activity, less the worst's"
    ),
)


def figures_of(found: Mapping[str, Any] | None) -> dict[str, float]:
    """The figures of one run by key; empty for a run that has none, such as one of an older version.

    >>> figures_of({"k": 10, "coverage": 0.5, "gaps": {"activity": 0.1}})
    {'coverage': 0.5, 'gap': 0.1}
    """
    if not found:
        return {}
    known = {**found, "gap": found.get("gaps", {}).get("activity")}
    values = {figure.key: known.get(figure.key) for figure in FIGURES}
    # JSON has no NaN: it is a text there.
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(float(value))}


def beyond_means(runs: Iterable[Mapping[str, Any] | None]) -> dict[str, dict[str, float | None]]:
    """The mean and deviation over seeds of the figures that all of them have.

    Diversity stands beside that of other methods only if it is by the items' own features.
    """
    listed = [run or {} for run in runs]
    known = [figures_of(run) for run in listed]
    if any(run.get("diversity_by") != "item features" for run in listed):
        known = [{key: value for key, value in one.items() if key != "diversity"} for one in known]
    shared = [figure.key for figure in FIGURES if all(figure.key in one for one in known)]
    return {
        key: {
            "mean": statistics.fmean(one[key] for one in known),
            "sd": statistics.stdev([one[key] for one in known]) if len(known) > 1 else None,
        }
        for key in shared
    }


def cell(row: Mapping[str, Any], figure: ListFigure) -> str:
    """A figure of a method in a comparison."""
    known = (row.get("beyond") or {}).get(figure.key)
    if known is None:
        return "–"
    if "%" in figure.write(0.0):
        more = "" if known["sd"] is None else f" ± {100 * known['sd']:.0f}"
        return figure.write(known["mean"]) + more
    return spread(known)


def shown_of(rows: Sequence[Mapping[str, Any]]) -> list[ListFigure]:
    """The figures that any of these rows of a comparison has."""
    return [figure for figure in FIGURES if any(figure.key in (row.get("beyond") or {}) for row in rows)]


def legend_of(figures: Iterable[ListFigure]) -> list[str]:
    """What the figures mean, a sentence each."""
    return [f"{figure.heading}: {figure.meaning}" for figure in figures]


def beyond_line(found: Mapping[str, Any] | None) -> str:
    """The figures of one run in a line; empty if there are none.

    >>> beyond_line({"k": 10, "coverage": 0.5, "popularity_lift": 0.25, "gaps": {}})
    'beyond accuracy, lists of 10: coverage 0.500, popularity lift +25%'
    """
    known = figures_of(found)
    texts = [f"{figure.heading} {figure.write(known[figure.key])}" for figure in FIGURES if figure.key in known]
    return f"beyond accuracy, lists of {found['k']}: {', '.join(texts)}" if texts and found else ""


def group_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Each group of people: what it is by, which, how many, and its metrics."""
    return [
        (one["by"], one["group"], f"{one['users']:,}", *(f"{one[name]:.4f}" for name in metrics_of(found)))
        for one in found["groups"]
    ]


def metrics_of(found: Mapping[str, Any]) -> list[str]:
    """The metrics that groups are compared by."""
    return [name for name in (found["groups"] or [{}])[0] if "ndcg@" in name]

"""Figures that look into a model: ranking with another item table, and how one person's items lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from homebody.report.charts import choice_of
from homebody.report.words import metric_name, number, spread

__all__ = [
    "EMBEDDING",
    "HEADINGS",
    "SWAPS",
    "embedding_charts",
    "embedding_remarks",
    "embedding_rows",
    "swap_charts",
    "swap_rows",
]

SWAPS = (
    "Each client ranks with its own score function and one of three item tables: its own tuned one, the latest shared "
    "one, or the tuned one of another client, drawn at random. Nothing is trained for it."
)
EMBEDDING = (
    "Each plot is t-SNE of the items as one person, drawn at random, has them. A tuned table is the shared table that "
    "it was tuned from, with the changes of the rows that the person's device touched when it last tuned them; the "
    "other methods have one table for everyone. The separation is an AUC in the table itself, not in the plot: how "
    "often an item lies nearer to the person's (other) training items than one that the person never met; 0.5 is chance."
)
GROUPS = ("others, not touched", "others, drawn as negatives", "training items", "validation item", "test item")
"""In the order of a panel's marks."""
HEADINGS = {
    "tables": ("method", "data", "protocol", "item table"),
    "embedding": (
        *("method", "data", "protocol", "table"),
        *("one user: training", "one user: test", "mean: training", "mean: test"),
    ),
}


def swap_charts(study: Mapping[str, Any], anchor: str) -> list[dict[str, Any]]:
    """A chart a data set and metric: bars by item table, one colour a method and protocol."""
    scale = study["scale"]
    charts: list[dict[str, Any]] = []
    for data, part in study["data"].items():
        for metric in study["metrics"]:
            bars, rows = [], []
            for row in part["rows"]:
                for protocol in study["protocols"]:
                    found = [(point["value"], _found(point, protocol).get(metric)) for point in row["points"]]
                    known = [(value, one) for value, one in found if one is not None]
                    if not known:
                        continue
                    name = protocol if len(part["rows"]) == 1 else f"{row['name']}, {protocol}"
                    bars.append(
                        {
                            "name": escape(name),
                            "x": [escape(str(value)) for value, _ in known],
                            "y": [one["mean"] * scale for _, one in known],
                            "sd": [(one["sd"] or 0.0) * scale for _, one in known],
                            "told": [spread(one, scale) for _, one in known],
                        }
                    )
                    start = (row["name"], data, protocol, metric_name(metric))
                    rows += [(start, (str(value), spread(one, scale))) for value, one in known]
            axis = metric_name(metric) + ("" if scale == 1 else f" × {scale:g}")
            columns = ("method", "data", "protocol", "metric", "item table", "obtained")
            charts.append(
                {
                    "id": f"{anchor}-chart-{len(charts)}",
                    "kind": "bars",
                    "choice": None,
                    "title": f"{data}: {metric_name(metric)}",
                    "label": f"{metric_name(metric)} by item table on {data}. The figures are in a table below.",
                    "views": {"all": {"x": "item table", "y": axis, "bars": bars}},
                    "table": {"caption": "Mean over seeds", "columns": columns, "left": 5, "rows": rows},
                }
            )
    return charts


def _found(point: Mapping[str, Any], protocol: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = point["obtained"].get(protocol, {}).get("metrics", {})
    return found


def swap_rows(study: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A line a method, data set, protocol and item table; behind HEADINGS, a column a metric."""
    for data, part in study["data"].items():
        for row in part["rows"]:
            for protocol in study["protocols"]:
                for point in row["points"]:
                    found = point["obtained"].get(protocol, {})
                    lacking = "not run" if row["missing"] else "failed" if found.get("errors") else "…"
                    metrics = found.get("metrics", {})
                    figures = (
                        spread(metrics[m], study["scale"]) if m in metrics else lacking for m in study["metrics"]
                    )
                    yield (row["name"], data, protocol, str(point["value"]), *figures)


def embedding_charts(study: Mapping[str, Any], anchor: str) -> list[dict[str, Any]]:
    """A chart a data set and method: a person's items in two dimensions, one view a protocol."""
    charts: list[dict[str, Any]] = []
    cells = list(embedding_rows(study))
    for data, part in study["data"].items():
        for row in part["rows"]:
            if not row["panels"]:
                continue
            first = next(iter(row["panels"].values()))
            views = {protocol: _view(row["panels"].get(protocol), first["names"]) for protocol in study["protocols"]}
            told = [(tuple(line[:4]), tuple(line[4:])) for line in cells if line[:2] == (row["name"], data)]
            label = (
                f"The items of user {first['user']} of {data} as {row['name']} has them, in two dimensions. "
                "How far the person's own lie apart is in a table below."
            )
            charts.append(
                {
                    "id": f"{anchor}-chart-{len(charts)}",
                    "kind": "scatter",
                    "choice": choice_of(anchor),
                    "title": f"{row['name']}, {data}, user {first['user']}",
                    "label": label,
                    "names": [escape(name) for name in first["names"]],
                    "views": views,
                    "table": {"caption": "Separation (AUC)", "columns": HEADINGS["embedding"], "left": 4, "rows": told},
                }
            )
    return charts


def _view(panel: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    if panel is None:
        return {"groups": [], "told": "no run under this protocol"}
    groups = [
        {"name": name, "place": place, "at": [n for n, mark in enumerate(panel["mark"]) if mark == place]}
        for place, name in enumerate(GROUPS)
    ]
    own = panel["separation"]
    told = f"separation: training {own['training']:.2f}, test item {own['held_out']:.2f} · table: {table_name(panel)}"
    view = {"x": panel["x"], "y": panel["y"], "groups": [group for group in groups if group["at"]], "told": told}
    return view if panel["names"] == names else {**view, "names": [escape(name) for name in panel["names"]]}


def table_name(panel: Mapping[str, Any]) -> str:
    """
    >>> table_name({"tuned": True, "touched": 99, "items": 1682}), table_name({"tuned": False})
    ('tuned, 99 of 1,682 rows', 'shared')
    """
    return f"tuned, {panel['touched']:,} of {panel['items']:,} rows" if panel["tuned"] else "shared"


def embedding_rows(study: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A line a method, data set and protocol, for every kind of page; its columns are in HEADINGS."""
    for data, part in study["data"].items():
        for row in part["rows"]:
            for protocol in study["protocols"]:
                start = (row["name"], data, protocol)
                panel = row["panels"].get(protocol)
                if panel is None:
                    why = "not run" if row["missing"] else "failed" if row["errors"] else "not finished"
                    yield (*start, why, *("–",) * 4)
                    continue
                own, people = panel["separation"], panel["people"]
                yield (
                    *start,
                    table_name(panel),
                    *(number(own[name]) for name in ("training", "held_out")),
                    *(spread(people[name]) for name in ("training", "held_out")),
                )


def embedding_remarks(study: Mapping[str, Any]) -> Iterator[str]:
    """Below the figures: whose items they are, over how many the means run, and what was not run or failed."""
    for data, part in study["data"].items():
        shown = [panel for row in part["rows"] for panel in row["panels"].values()]
        for user, count in dict.fromkeys((panel["user"], panel["people"]["count"]) for panel in shown):
            yield f"{data}: the person is user {user}; the mean is over {count} users drawn at random."
        for row in part["rows"]:
            if row["missing"]:
                yield f"{row['name']}, {data}: not run: {row['missing']}."
            yield from (f"{row['name']}, {data}: failed: {error}" for error in row["errors"])

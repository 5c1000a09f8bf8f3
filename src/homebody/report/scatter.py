"""Figures that look into a model: ranking with another item table, and how one person's items lie."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from homebody.report.charts import choice_of
from homebody.report.grids import table_name
from homebody.report.words import metric_name, spread

__all__ = ["ADAPTED", "EMBEDDING", "SWAPS", "embedding_charts", "swap_charts"]

SWAPS = (
    "Each client ranks with its own score function and one of three item tables: its own tuned one, the latest shared "
    "one, or the tuned one of another client, drawn at random. Nothing is trained for it."
)
ADAPTED = (
    "One trained model, adapted by the devices of the people who are asked in different ways; 0 is the common start as "
    "it was sent, which no device has adapted. Nothing is trained for it."
)
EMBEDDING = (
    "Each plot is t-SNE of the items as one person, drawn at random, has them. A tuned table is the shared table that "
    "it was tuned from, with the changes of the rows that the person's device touched when it last tuned them; the "
    "other methods have one table for everyone. The separation is an AUC in the table itself, not in the plot: how "
    "often an item lies nearer to the person's (other) training items than one that the person never met does; 0.5 is "
    "chance."
)
GROUPS = ("others, not touched", "others, drawn as negatives", "training items", "validation item", "test item")
"""In the order of a panel's marks."""


def swap_charts(study: Mapping[str, Any], anchor: str) -> list[dict[str, Any]]:
    """A chart a data set and metric: bars by item table, one colour a method and protocol."""
    scale = study["scale"]
    charts: list[dict[str, Any]] = []
    for data, part in study["data"].items():
        for metric in study["metrics"]:
            bars = []
            for line in part["rows"]:
                for protocol in study["protocols"]:
                    found = [(point["label"], _found(point, protocol).get(metric)) for point in line["points"]]
                    known = {label: one for label, one in found if one is not None}
                    name = protocol if len(part["rows"]) == 1 else f"{line['name']}, {protocol}"
                    if known:
                        bars.append(
                            {
                                "name": escape(name),
                                "x": [escape(label) for label in known],
                                "y": [one["mean"] * scale for one in known.values()],
                                "sd": [(one["sd"] or 0.0) * scale for one in known.values()],
                                "told": [spread(one, scale) for one in known.values()],
                            }
                        )
            axis = metric_name(metric) + ("" if scale == 1 else f" × {scale:g}")
            charts.append(
                {
                    "id": f"{anchor}-chart-{len(charts)}",
                    "kind": "bars",
                    "choice": None,
                    "title": f"{data}: {metric_name(metric)}",
                    "label": f"{metric_name(metric)} by item table on {data}. The figures are in a table below.",
                    "views": {"all": {"x": escape(study["axis"]), "y": axis, "bars": bars}},
                }
            )
    return charts


def _found(point: Mapping[str, Any], protocol: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = point["obtained"].get(protocol, {}).get("metrics", {})
    return found


def embedding_charts(study: Mapping[str, Any], anchor: str) -> list[dict[str, Any]]:
    """A chart a data set and method: a person's items in two dimensions, one view a protocol."""
    charts: list[dict[str, Any]] = []
    for data, part in study["data"].items():
        for line in part["rows"]:
            if not line["panels"]:
                continue
            first = next(iter(line["panels"].values()))
            views = {protocol: _view(line["panels"].get(protocol), first["names"]) for protocol in study["protocols"]}
            label = (
                f"The items of user {first['user']} of {data} as {line['name']} has them, in two dimensions. "
                "How far the person's own lie apart is in a table below."
            )
            charts.append(
                {
                    "id": f"{anchor}-chart-{len(charts)}",
                    "kind": "scatter",
                    "choice": choice_of(anchor),
                    "title": f"{line['name']}, {data}, user {first['user']}",
                    "label": label,
                    "names": [escape(name) for name in first["names"]],
                    "views": views,
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

"""What charts show, as plain data; page.js draws it in the colours of the day."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import product
from typing import Any

from homebody.errors import several
from homebody.report.reproduction import table_name
from homebody.report.words import QUANTITIES, epsilon, figure, metric_name, spread

__all__ = ["choice_of", "convergence_charts", "embedding_charts", "privacy_chart", "swap_charts", "sweep_charts"]

GROUPS = ("others, not touched", "others, drawn as negatives", "training items", "validation item", "test item")
"""Kinds of items in a plot, in the order of a panel's marks."""


def choice_of(anchor: str) -> str:
    """The name of the radio buttons that choose among a part's views."""
    return f"{anchor}-view"


def _axis(metric: str, scale: float) -> str:
    return metric_name(metric) + ("" if scale == 1 else f" × {scale:g}")


def _chart(
    anchor: str, place: int, title: str, label: str, views: Mapping[str, Any], kind: str = "curves"
) -> dict[str, Any]:
    return {
        "id": f"{anchor}-chart-{place}",
        "kind": kind,
        "choice": None if kind == "bars" else choice_of(anchor),
        "title": title,
        "label": label,
        "views": dict(views),
    }


def convergence_charts(study: Mapping[str, Any], anchor: str) -> Iterator[dict[str, Any]]:
    """A chart a data set and metric: the metric over rounds, mean and band of each method."""
    scale = study["scale"]
    for number, ((data, part), metric) in enumerate(product(study["data"].items(), study["metrics"])):
        views = {}
        for protocol in study["protocols"]:
            series = []
            for place, row in enumerate(part["rows"]):
                curve = row["curves"].get(protocol, {}).get(metric)
                if curve is not None:
                    series.append(_series(row["name"], place, curve["round"], curve, metric, scale))
            views[protocol] = {"x": "round", "y": _axis(metric, scale), "series": series}
        named = ", ".join(row["name"] for row in part["rows"])
        curves = f"Curves of {metric_name(metric)} over rounds on {data}, for {named}"
        label = f"{curves}. The figures are in a table below."
        yield _chart(anchor, number, f"{data}: {metric_name(metric)}", label, views)


def sweep_charts(study: Mapping[str, Any], anchor: str) -> Iterator[dict[str, Any]]:
    """A chart a data set and metric, or quantity: its course over the values of one setting."""
    axis, metrics = study["axis"], (*study["metrics"], *study["also"])
    for number, ((data, part), metric) in enumerate(product(study["data"].items(), metrics)):
        scale = 1.0 if metric in QUANTITIES else study["scale"]
        views = {}
        for protocol in study["protocols"]:
            series = [line for n, row in enumerate(part["rows"]) for line in _swept(row, n, protocol, metric, scale)]
            ticks = _ticks(series)
            views[protocol] = {"x": escape(axis), "y": _axis(metric, scale), "series": series, "ticks": ticks}
        label = f"Curves of {metric_name(metric)} over {axis} on {data}. The figures are in a table below."
        yield _chart(anchor, number, f"{data}: {metric_name(metric)}", label, views)


def _swept(row: Mapping[str, Any], place: int, protocol: str, metric: str, scale: float) -> Iterator[dict[str, Any]]:
    """What was obtained, as a line; what was published, as loose points."""
    points = [(_place(point), _at(point, protocol, metric)) for point in row.get("points", [])]
    known = [(x, figures) for x, figures in points if figures is not None and math.isfinite(float(figures["mean"]))]
    if known:
        curve = {
            "mean": [figures["mean"] for _, figures in known],
            "low": [min(figures["values"]) for _, figures in known],
            "high": [max(figures["values"]) for _, figures in known],
            "n": max(len(figures["values"]) for _, figures in known),
        }
        yield _series(row["name"], place, [value for value, _ in known], curve, metric, scale)
    given = [(_place(point), point["published"][metric]) for point in row["points"] if metric in point["published"]]
    if given:
        curve = {"mean": [figure_ for _, figure_ in given], "n": 0}
        published = _series(f"{row['name']}, published", place, [value for value, _ in given], curve, metric, scale)
        yield {**published, "loose": True}


def _place(point: Mapping[str, Any]) -> Any:
    """Where a value stands on its axis: as a number if it is one, otherwise under its label."""
    value = point["value"]
    return value if isinstance(value, int | float) and not isinstance(value, bool) else point["label"]


def _at(point: Mapping[str, Any], protocol: str, metric: str) -> Any:
    return point["obtained"].get(protocol, {}).get("metrics", {}).get(metric)


def _ticks(series: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Texts and booleans have no numeric position, so they are spaced evenly."""
    values = list(dict.fromkeys(value for line in series for value in line["x"]))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return {"at": values, "text": [f"{value:g}" for value in values]} if len(values) < 9 else None
    return {"at": values, "text": [escape(str(value)) for value in values]}


def _series(
    name: str, place: int, x: Sequence[Any], curve: Mapping[str, Any], metric: str, scale: float
) -> dict[str, Any]:
    """One line, its band where there are several seeds, and what the tooltip says at each point."""
    mean = [value * scale for value in curve["mean"]]
    banded = curve["n"] > 1
    low = [value * scale for value in curve["low"]] if banded else None
    high = [value * scale for value in curve["high"]] if banded else None
    texts = [figure(metric, value, scale) for value in curve["mean"]]
    if low is not None:
        limits = zip(curve["low"], curve["high"], strict=True)
        texts = [
            f"{text} ({figure(metric, a, scale)} to {figure(metric, b, scale)}, {several(curve['n'], 'seed')})"
            for text, (a, b) in zip(texts, limits, strict=True)
        ]
    return {"name": escape(name), "place": place, "x": list(x), "mean": mean, "low": low, "high": high, "told": texts}


def privacy_chart(result: Mapping[str, Any], metric: str = "ndcg@10") -> dict[str, Any]:
    """NDCG against ε of an observer, on a logarithmic scale that ends in ∞."""
    views = {observer: _privacy_view(result["methods"], observer, metric) for observer in result["observers"]}
    named = "; ".join(
        f"{row['name']} ({row['kind']}): {metric_name(metric)} {spread(row['metrics'][metric])}, ε "
        + ", ".join(f"{observer} {epsilon(value)}" for observer, value in row["epsilon"].items())
        for row in result["methods"]
    )
    return {
        "id": "privacy-chart",
        "kind": "privacy",
        "choice": choice_of("privacy"),
        "title": f"{metric_name(metric)} against certified ε, one user, whole training",
        "label": f"Privacy against utility. {named}.",
        "views": views,
    }


def _privacy_view(rows: Sequence[Mapping[str, Any]], observer: str, metric: str) -> dict[str, Any]:
    values = {row["name"]: float(row["epsilon"][observer]) for row in rows}
    finite = [value for value in values.values() if math.isfinite(value)]
    logs = [math.log10(max(value, 1e-3)) for value in finite]
    low, high = (math.floor(min(logs)), math.ceil(max(logs))) if logs else (0, 0)
    if logs and high == low:
        high = low + 1
    # The part for ∞ is as wide as it takes to keep names apart.
    unbounded = sorted((row for row in rows if not math.isfinite(values[row["name"]])), key=lambda r: _mean(r, metric))
    width = max(1.0, (high - low) * 0.6) if unbounded else 0.5
    zone = (high + 0.25, high + 0.25 + width) if logs else (0.0, 1.0)
    places = {
        row["name"]: zone[0] + (zone[1] - zone[0]) * (number_ + 0.5) / len(unbounded)
        for number_, row in enumerate(unbounded)
    }
    points = []
    for row in sorted(rows, key=lambda r: _mean(r, metric)):
        value, figures = values[row["name"]], row["metrics"][metric]
        x = places.get(row["name"], math.log10(max(value, 1e-3)) if math.isfinite(value) else 0.0)
        tip = f"<b>{escape(row['name'])}</b> ({row['kind']})<br>{metric_name(metric)} {spread(figures)}<br>"
        points.append(
            {
                "name": escape(row["name"]),
                "kind": row["kind"],
                "x": x,
                "y": figures["mean"],
                "sd": figures["sd"] or 0.0,
                "told": f"{tip}ε, {escape(observer)}: {epsilon(value)}",
                # Above and below are error bars; at the right end there is no room on the right.
                "side": "middle left" if x > zone[0] + 0.6 * (zone[1] - zone[0]) else "middle right",
            }
        )
    decades = list(range(low, high + 1)) if logs else []
    tops = [point["y"] + point["sd"] for point in points]
    lows = [point["y"] - point["sd"] for point in points]
    room = (max(tops) - min(lows)) * 0.12 or 0.05
    return {
        "x": f"ε, {escape(observer)}, on a log scale",
        "y": metric_name(metric),
        "points": points,
        "range": [low - 0.25 if logs else zone[0], zone[1]],
        "height": [max(0.0, min(lows) - room), max(tops) + 1.6 * room],
        "zone": zone,
        "zone_text": "no bound",
        "ticks": {
            "at": [*decades, (zone[0] + zone[1]) / 2],
            "text": [*(f"{10.0**decade:g}" for decade in decades), "∞"],
        },
    }


def _mean(row: Mapping[str, Any], metric: str) -> float:
    return float(row["metrics"][metric]["mean"])


def swap_charts(study: Mapping[str, Any], anchor: str) -> Iterator[dict[str, Any]]:
    """A chart a data set and metric: bars by item table, one colour a method and protocol."""
    scale = study["scale"]
    for number, ((data, part), metric) in enumerate(product(study["data"].items(), study["metrics"])):
        bars = []
        for line, protocol in product(part["rows"], study["protocols"]):
            labelled = [(point["label"], _at(point, protocol, metric)) for point in line["points"]]
            known = {label: figures for label, figures in labelled if figures is not None}
            name = protocol if len(part["rows"]) == 1 else f"{line['name']}, {protocol}"
            if known:
                bars.append(
                    {
                        "name": escape(name),
                        "x": [escape(label) for label in known],
                        "y": [figures["mean"] * scale for figures in known.values()],
                        "sd": [(figures["sd"] or 0.0) * scale for figures in known.values()],
                        "told": [spread(figures, scale) for figures in known.values()],
                    }
                )
        views = {"all": {"x": escape(study["axis"]), "y": _axis(metric, scale), "bars": bars}}
        label = f"{metric_name(metric)} by item table on {data}. The figures are in a table below."
        yield _chart(anchor, number, f"{data}: {metric_name(metric)}", label, views, "bars")


def embedding_charts(study: Mapping[str, Any], anchor: str) -> Iterator[dict[str, Any]]:
    """A chart a data set and method: a person's items in two dimensions, one view a protocol."""
    drawn = [(data, line) for data, part in study["data"].items() for line in part["rows"] if line["panels"]]
    for number, (data, line) in enumerate(drawn):
        first = next(iter(line["panels"].values()))
        views = {protocol: _view(line["panels"].get(protocol), first["names"]) for protocol in study["protocols"]}
        label = (
            f"The items of user {first['user']} of {data} as {line['name']} has them, in two dimensions. "
            "How well the person's own items separate from the others is in a table below."
        )
        title = f"{line['name']}, {data}, user {first['user']}"
        chart = _chart(anchor, number, title, label, views, "scatter")
        yield {**chart, "names": [escape(name) for name in first["names"]]}


def _view(panel: Mapping[str, Any] | None, names: list[str]) -> dict[str, Any]:
    if panel is None:
        return {"groups": [], "told": "no run under this protocol"}
    groups = [
        {"name": name, "place": place, "at": [n for n, mark in enumerate(panel["mark"]) if mark == place]}
        for place, name in enumerate(GROUPS)
    ]
    apart = panel["separation"]
    figures = f"training {apart['training']:.2f}, test item {apart['held_out']:.2f}"
    summary = f"separation: {figures} · table: {table_name(panel)}"
    view = {"x": panel["x"], "y": panel["y"], "groups": [group for group in groups if group["at"]], "told": summary}
    return view if panel["names"] == names else {**view, "names": [escape(name) for name in panel["names"]]}

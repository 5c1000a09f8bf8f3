"""Charts that show themselves in a notebook, and can be saved."""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from pathlib import Path
from re import fullmatch

import polars as pl

from homebody.errors import HomebodyError
from homebody.files import SHARED, insisting, path_of, replacing
from homebody.report.svg import Curve, CurvePanel, curve_chart
from homebody.report.words import metric_name

__all__ = ["Plot", "history_plot"]


class Plot:
    """A chart as SVG. A notebook shows it; `save` writes it to a file.

    >>> Plot("<svg></svg>")
    <Plot: 11 characters of SVG; save(path) writes them>
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | Path) -> Path:
        """Write the chart to a file that ends in .svg."""
        file = path_of(path)
        if file.suffix.lower() != ".svg":
            raise HomebodyError(f"A chart is saved as SVG: give a name that ends in .svg, not {file.name}.")
        with insisting(f"{file} cannot be written"):
            file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, mode=SHARED) as writer:
            writer.write(self.svg.encode())
        return file

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_html_(self) -> str:
        # As an image: a style sheet inside of the page would change the rest of it.
        return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"/>'

    def __repr__(self) -> str:
        return f"<Plot: {len(self.svg):,} characters of SVG; save(path) writes them>"


def refuse_unmeasured(metrics: Iterable[str], measured: Collection[str]) -> None:
    """Refuse metrics that were not measured, with the nearest that were: there are too many to list.

    >>> refuse_unmeasured(["ndcg@7"], ["hr@5", "ndcg@5", "ndcg@10"])
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: There is no metric 'ndcg@7' here; did you mean ndcg@10 or ndcg@5?
    """
    for name in metrics:
        if name not in measured:
            near = get_close_matches(str(name).lower(), measured, n=3, cutoff=0.5) or [*measured][:3]
            raise HomebodyError(f"There is no metric '{name}' here; did you mean {' or '.join(sorted(near))}?")


def history_plot(title: str, history: pl.DataFrame, chosen: int, metrics: tuple[str, ...] = ()) -> Plot:
    """Curves of metrics, of the loss and of ε over the rounds; a dashed line at the chosen round.

    metrics: by default NDCG and hit rate on validation, and on test where nothing is validated. The loss has a panel
    of its own; "loss" alone leaves out the metrics.
    """
    measured = _measured(history)
    refuse_unmeasured(metrics, [*measured, "loss"])
    shown = tuple(name for name in metrics if name != "loss") if metrics else _usual(measured)
    curves = [_curve(history, name, _named(name)) for name in shown]
    panels = [] if metrics and not shown else [CurvePanel(_heading(shown), curves, "not measured")]
    if (loss := _curve(history, "loss", "mean over clients")).y:
        panels.append(CurvePanel("loss", [loss]))
    spent = _spent(history)
    if spent.curves:
        panels.append(spent)
    else:
        title += f": {spent.note}"
    return Plot(curve_chart(title, "round", panels, chosen))


def _measured(history: pl.DataFrame) -> list[str]:
    """The metrics among the columns."""
    plain = ("phase", "round", "step", "clients", "loss", "bytes_up", "bytes_down")
    return [n for n in history.columns if n not in plain and not n.startswith("epsilon/") and "seconds" not in n]


def _usual(measured: list[str]) -> tuple[str, ...]:
    for names in (("ndcg@10", "hr@10"), ("rmse", "mae"), ("impressions/auc",)):
        for prefix in ("valid/", ""):
            if there := tuple(prefix + name for name in names if prefix + name in measured):
                return there
    ranked = [name for name in measured if fullmatch(r"(valid/)?(ndcg|hr)@\d+", name)]
    return tuple((ranked or measured)[:2])


def _heading(shown: tuple[str, ...]) -> str:
    return "on validation" if shown and all(name.startswith("valid/") for name in shown) else "on test"


def _named(metric: str) -> str:
    return metric_name(metric.removeprefix("valid/"))


def _spent(history: pl.DataFrame) -> CurvePanel:
    """ε of each observer for whom it is bounded; observers with the same curve share one."""
    curves: dict[tuple[float, ...], tuple[list[str], Curve]] = {}
    endless = []
    for column in (name for name in history.columns if name.startswith("epsilon/")):
        who, curve = column.removeprefix("epsilon/"), _curve(history, column, "")
        if len(curve.y) < history.height:
            endless.append(who)
        else:
            curves.setdefault(tuple(curve.y), ([], curve))[0].append(who)
    bounded = [curve._replace(name=", ".join(names)) for names, curve in curves.values()]
    unbounded = f"∞ for {', '.join(endless)}" if endless else ""
    return CurvePanel(f"ε so far{f' ({unbounded})' if bounded and unbounded else ''}", bounded, f"ε is {unbounded}")


def _curve(history: pl.DataFrame, column: str, name: str) -> Curve:
    points = [
        (step, value)
        for step, value in history.select("step", column).iter_rows()
        if value is not None and math.isfinite(value)
    ]
    return Curve(name, [step for step, _ in points], [value for _, value in points])

"""What a reproduction shows: its tables, notes and picture, as texts that each renderer lays out.

`report/markdown.py` writes RESULTS.md, `report/reproduction_page.py` the HTML page, and `report/terminal.py` prints.
Every cell has one figure, with its deviation or interval. The headline metrics are in the first table of a study.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from homebody.errors import several
from homebody.evaluation.metrics import main_cutoff
from homebody.report.svg import DotPanel, DotRow, LinePanel, dot_chart, line_chart
from homebody.report.svg import Line as Drawn
from homebody.report.words import QUANTITIES, figure, metric_name, percent, points, spread

__all__ = [
    "SHORT",
    "Footnotes",
    "ResultTable",
    "caption",
    "curves",
    "data_notes",
    "diverged_as_known",
    "explanation",
    "has_differences",
    "has_published",
    "meanings",
    "metric_table",
    "panel_table",
    "picture",
    "remarks",
    "result_tables",
    "rounds_table",
    "splits",
    "state",
    "sweep_table",
    "table_name",
    "under",
    "values_table",
    "varied",
    "verdict",
]

SHORT = "▼"
SPLIT = "; split "
"""Where a protocol's meaning goes on to the split: see `homebody.evaluation.protocols.describe`."""
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""The parts of its rounds after which a curve is printed."""
WIDEST = 10
"""Columns of figures that a table has at most, before metrics go to the next table."""
LONGEST = 12
"""Rows of a sweep, before all but the headline metrics go to the next table."""
PANELS = 4
"""Parts of the picture at the top."""
NOT_RUN = {"certified", "certified for views", "counted", "computed"}
"""What stands in place of a protocol where nothing was run."""
SEPARATED = {"training": "training", "test item": "held_out"}
"""The items whose separation is measured, and their names in a panel."""
SWAPS = (
    "Each client ranks with its own score function and one of three item tables: its own tuned one, the latest shared "
    "one, or the tuned one of another client, drawn at random. Nothing is trained for it."
)
ADAPTED = (
    "One trained model, adapted by the devices of the evaluated people in different ways; 0 is the shared model as it "
    "was sent, which no device has adapted. Nothing is trained for it."
)
EMBEDDING = (
    "Each plot is t-SNE of the items as one person, drawn at random, has them. A tuned table is the shared table that "
    "it was tuned from, with the changes of the rows that the person's device touched when it last tuned them; the "
    "other methods have one table for everyone. The separation is an AUC in the table itself, not in the plot: how "
    "often an item lies nearer to the person's (other) training items than one that the person never met does; 0.5 is "
    "chance."
)
ATTACKED = (
    "All views of a person but one send nulls, read the aggregate of the device, and guess what the remaining view "
    "holds, by a matched filter over T messages. Noise is drawn by the device's own stages. What is right is counted "
    "among candidates of which the truth is drawn, so that blind guesses are right in one of two cases, or one of ten; "
    "no attack is right more often than Φ(√T/σ) allows, or its counterpart for ten. Nothing is trained for it."
)
SERVED = (
    "A model is trained once, and is asked under the request settings of each row that shows it. τ is the share of "
    "places of a ranking at which noise puts another item, averaged over the test impressions. ε of a request is "
    "certified for a whole person; it is 0 where nothing is sent."
)
EXPLANATIONS = {
    "serving": SERVED,
    "tables": SWAPS,
    "embedding": EMBEDDING,
    "adaptation": ADAPTED,
    "view-attack": ATTACKED,
    "lengths": "How many people have how many interactions, and with how many different items.",
}

Study = Mapping[str, Any]
Part = Mapping[str, Any]
Line = Mapping[str, Any]
"""A study, its part on one data set, and a row of that, as result.json stores them."""


@dataclass(frozen=True)
class ResultTable:
    """Headings and cells; the first `left` columns are names."""

    columns: list[str]
    left: int
    rows: list[list[str]]
    groups: list[str] = field(default_factory=list)
    """For each column the metric that it belongs to; empty where columns are no metrics."""
    titles: dict[tuple[int, int], str] = field(default_factory=dict)
    """More about a cell, by its row and column: the figures of the seeds."""

    def narrowed(self) -> tuple[ResultTable, list[str]]:
        """Without the names that are the same in every row, and these names.

        >>> ResultTable(["method", "metric", "2"], 2, [["a", "HR", "1"], ["b", "HR", "3"]]).narrowed()[1]
        ['HR']
        """
        same = [place for place in range(1, self.left) if len({row[place] for row in self.rows}) == 1]
        varied = [place for place in range(len(self.columns)) if place not in same]
        rows = [[row[place] for place in varied] for row in self.rows]
        groups = [self.groups[place] for place in varied] if self.groups else []
        table = ResultTable([self.columns[place] for place in varied], self.left - len(same), rows, groups)
        return table, [self.rows[0][place] for place in same]

    def by_metric(self) -> ResultTable:
        """A row for each method and metric, in place of a column for each metric."""
        names = list(dict.fromkeys(self.columns[1:]))
        rows = []
        for row in self.rows:
            for group in dict.fromkeys(self.groups[1:]):
                cells = {self.columns[n]: row[n] for n in range(1, len(row)) if self.groups[n] == group}
                rows.append([row[0], group, *(cells.get(name, "–") for name in names)])
        return ResultTable(["method", "metric", *names], 2, rows)


class Footnotes:
    """Notes on rows, numbered over the whole document; a note that is repeated keeps its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def numbers(self, texts: Sequence[str]) -> list[int]:
        """
        >>> notes = Footnotes()
        >>> notes.numbers(["a", "b"]), notes.numbers(["b"]), notes.texts
        ([1, 2], [2], ['a', 'b'])
        """
        self.texts += [text for text in dict.fromkeys(texts) if text not in self.texts]
        return [self.texts.index(text) + 1 for text in dict.fromkeys(texts)]


def under(protocol: str) -> str:
    """
    >>> under("published"), under("strict"), under("certified")
    ('obtained, published protocol', 'obtained, strict', 'certified')
    """
    if protocol in NOT_RUN:
        return protocol
    return f"obtained, {protocol}" + (" protocol" if protocol == "published" else "")


def seeds_of(part: Part) -> str:
    """
    >>> seeds_of({"seeds": 3}), seeds_of({"seeds": 1}), seeds_of({"seeds": 0})
    ('3 seeds', '1 seed', '')
    """
    return several(part["seeds"], "seed") if part["seeds"] else ""


def state(part: Part, protocols: Sequence[str]) -> list[str]:
    """What a reader must know before the figures: that runs are missing, or were cut short."""
    said = []
    if part["finished"] < part["planned"]:
        said.append(f"Not complete: {part['finished']} of {part['planned']} runs are finished.")
    if part["rounds"]:
        count = several(part["rounds"], "round")
        said.append(f"Every run was given {count} on the command line, not the recipe's.")
    if len(part["protocols"]) < len(protocols):
        said.append(f"Asked for under {' and '.join(part['protocols'])} only; of the rest what had been run before.")
    return said


def explanation(study: Study) -> str:
    """What a kind of study shows; empty where a table explains itself."""
    return EXPLANATIONS.get(study["kind"], "")


def has_axis(study: Study) -> bool:
    """Whether the rows of a study have a point for each value of something."""
    if study["kind"] == "serving":
        return bool(study["vary"])
    kinds = ("sweep", "accounting", "lengths", "noise", "tables", "adaptation", "view-attack")
    return study["kind"] in kinds


def by_metric(study: Study) -> bool:
    """Whether the rows of a study have one figure for each metric."""
    return not has_axis(study) and study["kind"] not in ("convergence", "embedding")


def verdict(study: Study, part: Part, tolerance: float) -> str:
    """How many figures reach the published ones; empty where there are none to compare."""
    lines = [line for line in part["rows"] if not line.get("improvement")]
    groups = [group for line in lines for group in _groups(line) if "difference" in group]
    shown = sum(len(group["difference"]) for group in groups)
    short = sum(len(group["short"]) for group in groups)
    if not shown:
        return ""
    others = f" {SHORT} marks the others." if short else ""
    return (
        f"{shown - short} of {shown} obtained figures reach the published ones, or come within {tolerance:g} points of "
        f"them ({study['against']} protocol).{others}"
    )


def caption(study: Study, part: Part) -> str:
    """What holds of every figure of a part: its scale, and over how many seeds it is a mean."""
    scaled = study["scale"] != 1 and any(metric not in QUANTITIES for metric in study["metrics"])
    return ", ".join(filter(None, (f"× {study['scale']:g}" if scaled else "", seeds_of(part))))


def meanings(result: Mapping[str, Any]) -> dict[str, str]:
    """What each protocol of a result means. Where its studies differ in their splits, each says its own: `splits`."""
    said = {}
    for protocol, texts in _meanings(result).items():
        first, *others = texts
        head, *differing = dict.fromkeys(text.partition(SPLIT)[0] for text in texts)
        if others:
            said[protocol] = "; or: ".join(texts) if differing else f"{head}; each table and figure states its split"
        else:
            said[protocol] = first
    return said


def varied(result: Mapping[str, Any]) -> set[str]:
    """The protocols under which the studies of a result, or their rows, have different splits."""
    return {protocol for protocol, texts in _meanings(result).items() if len(texts) > 1}


def splits(part: Part, protocols: Collection[str]) -> list[str]:
    """How the rows of a part were split and measured, under these protocols.

    >>> splits({"meanings": {"strict": "nothing leaks; split ratio, random held out"}}, {"strict"})
    ['obtained, strict: split ratio, random held out.']
    """
    said = []
    for protocol, texts in _meanings_of(part).items():
        for text, rows in texts.items() if protocol in protocols else ():
            whose = f" ({'; '.join(rows)})" if rows else ""
            _, split, rest = text.partition(SPLIT)
            said.append(f"{under(protocol)}{whose}: {f'split {rest}' if split else text}.")
    return said


def _meanings(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Everything that each protocol means in some part of a result."""
    found: dict[str, list[str]] = {}
    for part in (part for study in result["studies"] for part in study["data"].values()):
        for protocol, texts in _meanings_of(part).items():
            found.setdefault(protocol, []).extend(text for text in texts if text not in found.get(protocol, []))
    return found


def _meanings_of(part: Part) -> dict[str, dict[str, list[str]]]:
    """What each protocol means in a part, and for which rows; no rows: for all."""
    alike: dict[str, dict[str, list[str]]] = {protocol: {text: []} for protocol, text in part["meanings"].items()}
    return {**alike, **part.get("meanings_of_rows", {})}


def has_published(result: Mapping[str, Any]) -> bool:
    """Whether a paper prints any of its figures."""
    lines = [line for study in result["studies"] for part in study["data"].values() for line in part["rows"]]
    return any(group.get("published") for line in lines for group in _groups(line))


def has_differences(study: Study) -> bool:
    """Whether any obtained figure is compared with a published one."""
    rows = [line for part in study["data"].values() for line in part["rows"]]
    return any(group.get("difference") for line in rows for group in _groups(line))


def remarks(study: Study, line: Line) -> list[str]:
    """Why a row was not run or failed, and what the recipe says of it."""
    said = [f"not run: {line['missing']}."] if line["missing"] and not line.get("improvement") else []
    said += [f"{several(line['seeds'], 'seed')}."] if "seeds" in line else []
    for protocol in study["protocols"]:
        figures = [group["obtained"][protocol] for group in _groups(line) if protocol in group.get("obtained", {})]
        failures = {
            error: "diverged, as it is known to" if diverged_as_known(line, outcome) else "failed"
            for outcome in figures
            for error in outcome["errors"]
        }
        said += [f"{how} ({protocol}): {error}" for error, how in failures.items()]
    said += [f"failed: {error}" for error in line.get("errors", [])]
    return [*said, *([line["note"]] if line["note"] else [])]


def diverged_as_known(line: Line, outcome: Mapping[str, Any]) -> bool:
    """Whether training diverged just as the recipe says: that is a result, not a failure."""
    return bool(line.get("diverges") and outcome.get("diverged"))


def data_notes(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """By data set, each note on its runs once; behind it the studies, where it does not hold for all of them."""
    notes_of: dict[str, dict[str, list[str]]] = {}
    labels: dict[str, list[str]] = {}
    for study in result["studies"]:
        for data, part in study["data"].items():
            if part["notes"]:
                labels.setdefault(data, []).append(study["label"])
            for note in part["notes"]:
                notes_of.setdefault(data, {}).setdefault(note, []).append(study["label"])
    return {
        data: [note if where == labels[data] else f"{note} ({', '.join(where)})" for note, where in notes.items()]
        for data, notes in notes_of.items()
    }


def result_tables(study: Study, part: Part) -> list[ResultTable]:
    """The tables of a study on one data set: the headline metrics first, the others behind it."""
    if study["kind"] == "convergence":
        return [rounds_table(study, part)]
    if study["kind"] == "embedding":
        return [panel_table(study, part)]
    if by_metric(study):
        return [metric_table(study, part, metrics) for metrics in _metric_groups(study, part)]
    whole = sweep_table(study, part)
    metrics = _metrics(study)
    if len(whole.rows) <= LONGEST or len(metrics) == 1:
        return [whole]
    return [sweep_table(study, part, metrics[:1]), sweep_table(study, part, metrics[1:])]


def metric_table(study: Study, part: Part, metrics: Sequence[str] = ()) -> ResultTable:
    """A row a method; for each metric what was published, what was obtained, and the difference."""
    columns, groups = ["method"], [""]
    for metric in metrics or _metrics(study):
        names = _metric_columns(study, part, metric)
        columns += names
        groups += [metric_name(metric)] * len(names)
    rows: list[list[str]] = []
    titles: dict[tuple[int, int], str] = {}
    for line in part["rows"]:
        row = [line["name"]]
        for metric in metrics or _metrics(study):
            for column, protocol in _metric_columns(study, part, metric).items():
                result = line["obtained"].get(protocol, {}).get("metrics", {}).get(metric)
                if result is not None and result["values"]:
                    scale = 100 if line.get("improvement") else study["scale"]
                    seeds = ", ".join(figure(metric, value, scale) for value in result["values"])
                    titles[len(rows), len(row)] = f"seeds: {seeds}"
                row.append(_cell(study, part, line, metric, column, protocol))
        rows.append(row)
    return ResultTable(columns, 1, rows, groups, titles)


def _metrics(study: Study) -> list[str]:
    """Metrics, then the quantities beside them."""
    return [*study["metrics"], *study["also"]]


def _metric_groups(study: Study, part: Part) -> Iterator[list[str]]:
    """The metrics of each table, narrow enough to be read; those at the main cutoff are the headline."""
    rest = _metrics(study)
    order = _headline_first(rest)
    while rest:
        chosen: list[str] = []
        width = 0
        for metric in order:
            width += len(_metric_columns(study, part, metric))
            if chosen and width > WIDEST:
                break
            chosen.append(metric)
        yield [metric for metric in rest if metric in chosen]
        order = rest = [metric for metric in rest if metric not in chosen]


def _headline_first(metrics: Sequence[str]) -> list[str]:
    """
    >>> _headline_first(["hr@5", "hr@10", "ndcg@10", "epsilon"])
    ['hr@10', 'ndcg@10', 'hr@5', 'epsilon']
    >>> _headline_first(["impressions/auc", "impressions/ndcg@5", "impressions/ndcg@10"])
    ['impressions/auc', 'impressions/ndcg@10', 'impressions/ndcg@5']
    """
    cutoffs = sorted({int(cut[1]) for metric in metrics if (cut := re.search(r"@(\d+)$", metric))})
    main = f"@{main_cutoff(cutoffs)}" if cutoffs else "@"
    return sorted(metrics, key=lambda metric: not metric.endswith(main) and metric != "impressions/auc")


def _metric_columns(study: Study, part: Part, metric: str) -> dict[str, str]:
    """The columns of a metric, and the protocol of each that has one."""
    ran = {name for line in part["rows"] for name, outcome in line["obtained"].items() if outcome["n"]}
    ours = {under(name): name for name in study["protocols"] if name in part["protocols"] or name in ran}
    lines = [line for other in study["data"].values() for line in other["rows"]]
    if not any(metric in line["published"] for line in lines):
        return ours
    return {"published": "", **ours, **({} if metric in QUANTITIES else {"difference": ""})}


def _cell(study: Study, part: Part, line: Line, metric: str, column: str, protocol: str) -> str:
    if column == "published":
        return _published(study, line, metric)
    if column == "difference":
        gap = points(line["difference"].get(metric))
        return f"{SHORT} {gap}" if metric in line["short"] else gap
    text = _obtained(study, part, line, protocol, metric)
    outcome = line["obtained"].get(protocol, {})
    planned = line.get("seeds", part["seeds"])
    partly = metric in outcome.get("metrics", {}) and outcome["n"] < planned
    return f"{text} ({outcome['n']} of {planned})" if partly else text


def _groups(line: Line) -> list[Mapping[str, Any]]:
    return [line, *line.get("points", [])]


def _published(study: Study, line: Line, metric: str) -> str:
    value = line["published"].get(metric)
    if line.get("improvement"):
        return percent(value)
    text = figure(metric, value, study["scale"])
    sd = line["published_sd"].get(metric)
    return text if sd is None else f"{text} ± {figure(metric, sd, study['scale'])}"


def _obtained(study: Study, part: Part, line: Line, protocol: str, metric: str) -> str:
    """What was obtained, or why there is nothing."""
    group = line["obtained"].get(protocol)
    result = (group or {}).get("metrics", {}).get(metric)
    if result is not None:
        improvement = line.get("improvement")
        return percent(result["mean"], result["sd"]) if improvement else spread(result, study["scale"], metric)
    if line["missing"] or group is None:
        return "not run"
    if group["errors"]:
        return "diverged" if diverged_as_known(line, group) else "failed"
    return "–" if group["n"] or protocol not in part["protocols"] else "not finished"


def sweep_table(study: Study, part: Part, metrics: Sequence[str] = ()) -> ResultTable:
    """A column a value, as papers print it; a row for each metric of a method, and what it comes from."""
    columns = ["method", "metric", "source", *study["labels"]]
    rows = []
    for line in part["rows"]:
        if line["missing"] or not line["points"]:
            why = "not run" if line["missing"] else "failed"
            rows.append([line["name"], "", why, *("–" for _ in study["labels"])])
            continue
        for metric in metrics or _metrics(study):
            for source, texts in _sources(study, part, line, metric):
                rows.append([line["name"], metric_name(metric), source, *texts])
    return ResultTable(columns, 3, rows)


def _sources(study: Study, part: Part, line: Line, metric: str) -> Iterator[tuple[str, list[str]]]:
    """A metric over the values: as published, and under each protocol; what the protocol does not change, once."""
    points_ = line["points"]
    if any(metric in point["published"] for point in points_):
        yield "published", [_published(study, point, metric) for point in points_]
    sources = {
        protocol: [_marked(study, part, {**line, **point}, protocol, metric) for point in points_]
        for protocol in study["protocols"]
        if protocol in part["protocols"] or any(point["obtained"].get(protocol, {}).get("n") for point in points_)
    }
    first = next(iter(sources.values()), [])
    if len(sources) > 1 and metric in QUANTITIES and all(texts == first for texts in sources.values()):
        yield "obtained", first
    else:
        yield from ((under(protocol), texts) for protocol, texts in sources.items())


def _marked(study: Study, part: Part, line: Line, protocol: str, metric: str) -> str:
    text = _obtained(study, part, line, protocol, metric)
    return f"{SHORT} {text}" if protocol == study["against"] and metric in line["short"] else text


def values_table(study: Study, part: Part) -> ResultTable:
    """A row a value, for a terminal that is too narrow for a column a value."""
    metrics = _metrics(study)

    def figures(line: Line) -> Iterator[list[str]]:
        for point in line["points"]:
            start = [line["name"], point["label"]]
            if point["published"]:
                yield [*start, "published", *(_published(study, point, metric) for metric in metrics)]
            for protocol in part["protocols"]:
                texts = (_marked(study, part, {**line, **point}, protocol, metric) for metric in metrics)
                yield [*start, under(protocol), *texts]

    return _table(part, ["method", study["axis"], "source", *map(metric_name, metrics)], figures)


def _table(part: Part, columns: list[str], rows: Callable[[Line], Iterable[list[str]]]) -> ResultTable:
    """A table with these rows of each line. A line that was not run has one row, which says so."""
    nothing = ["–"] * (len(columns) - 3)
    lines = ([[line["name"], "", "not run", *nothing]] if line["missing"] else rows(line) for line in part["rows"])
    return ResultTable(columns, 3, list(chain(*lines)))


def rounds_table(study: Study, part: Part, shares: Sequence[float] = SHARES) -> ResultTable:
    """Curves at some of their rounds, the same for all, and where they are best."""
    scale = study["scale"]
    known = [curve for line in part["rows"] for curves in line["curves"].values() for curve in curves.values()]
    last = max((curve["round"][-1] for curve in known), default=0)
    steps = sorted({max(1, round(last * share)) for share in shares}) if last else []
    columns = ["method", "protocol", "metric", *(f"round {step}" for step in steps), "best", "in round"]
    nothing = ["–"] * (len(steps) + 2)

    def figures(line: Line) -> Iterator[list[str]]:
        for protocol in study["protocols"]:
            curves = line["curves"].get(protocol)
            if not curves and protocol in part["protocols"]:
                yield [line["name"], protocol, "failed" if line["errors"] else "not finished", *nothing]
            for metric, curve in (curves or {}).items():
                at = dict(zip(curve["round"], curve["mean"], strict=True))
                texts = [_at(metric, at, step, scale) for step in steps]
                best = max(at, key=at.__getitem__)
                yield [line["name"], protocol, metric_name(metric), *texts, figure(metric, at[best], scale), str(best)]

    return _table(part, columns, figures)


def _at(metric: str, curve: Mapping[int, float], step: int, scale: float) -> str:
    """At this round, or at the last evaluated one before it; a curve that ended before has nothing there."""
    before = [known for known in curve if known <= step]
    return figure(metric, curve[before[-1]], scale) if before and max(curve) >= step else "–"


def panel_table(study: Study, part: Part) -> ResultTable:
    """How well a person's own items separate from the others, for the person that is shown and on average."""
    panels = [panel for line in part["rows"] for panel in line["panels"].values()]
    users, counts = ({panel[name] for panel in panels} for name in ("user", "count"))
    person = f"user {users.pop()}" if len(users) == 1 else "one user"
    mean = f"mean of {counts.pop()}" if len(counts) == 1 else "mean"
    columns = ["method", "protocol", "item table", *(f"{who}: {what}" for who in (person, mean) for what in SEPARATED)]

    def figures(line: Line) -> Iterator[list[str]]:
        for protocol in study["protocols"]:
            panel = line["panels"].get(protocol)
            if panel is not None:
                texts = [f"{panel['separation'][name]:.3f}" for name in SEPARATED.values()]
                people = [(panel["people"][name]["mean"], panel["people"][name]["sd"]) for name in SEPARATED.values()]
                texts += [f"{mean:.3f}" + ("" if sd is None else f" ± {sd:.3f}") for mean, sd in people]
                yield [line["name"], protocol, table_name(panel), *texts]
            elif protocol in part["protocols"]:
                yield [line["name"], protocol, "failed" if line["errors"] else "not finished", *("–",) * 4]

    return _table(part, columns, figures)


def table_name(panel: Mapping[str, Any]) -> str:
    """
    >>> table_name({"tuned": True, "touched": 1318}), table_name({"tuned": False})
    ('tuned, 1,318 rows', 'shared')
    """
    return f"tuned, {several(panel['touched'], 'row')}" if panel["tuned"] else "shared"


def picture(result: Mapping[str, Any]) -> str | None:
    """The headline metric of the first tables as SVG, obtained figures beside published ones; None without any."""
    tables = [
        study
        for study in result["studies"]
        if study["kind"] in ("table", "serving") and by_metric(study) and study["data"]
    ]
    measured = [study for study in tables if study["metrics"] and study["metrics"][0] not in QUANTITIES]
    chosen = [study for study in measured if has_differences(study)] or measured
    if not chosen:
        return None
    first = chosen[0]
    metric = _headline_first(first["metrics"])[0]
    panels = [
        DotPanel(f"{study['label']}, {data}", _dots(study, part, metric))
        for study in chosen
        for data, part in study["data"].items()
        if metric in study["metrics"] and study["against"] == first["against"]
    ]
    times = "" if first["scale"] == 1 else f" × {first['scale']:g}"
    axis = f"{metric_name(metric)}{times}, {under(first['against'])}"
    return dot_chart(result["title"], axis, [panel for panel in panels if panel.rows][:PANELS])


def curves(result: Mapping[str, Any]) -> str | None:
    """The sweeps that ask for it as lines over their setting, as SVG: a row of panels for each data set."""
    drawn = [study for study in result["studies"] if study.get("lines") and study["data"]]
    if not drawn:
        return None
    first = drawn[0]
    panels = [
        LinePanel(f"{metric_name(metric)}, {data}", lines)
        for study in drawn
        if study["labels"] == first["labels"]
        for data, part in study["data"].items()
        for metric in study["metrics"]
        if (lines := _drawn(study, part, metric))
    ]
    return line_chart(result["title"], first["axis"], first["labels"], panels)


def _drawn(study: Study, part: Part, metric: str) -> list[Drawn]:
    """What was obtained of a metric, a line a row, without rows that have nothing."""
    lines = []
    for line in part["rows"]:
        found = [point["obtained"].get(study["against"], {}).get("metrics", {}).get(metric) for point in line["points"]]
        values = [None if figures is None else figures["mean"] * study["scale"] for figures in found]
        if any(value is not None for value in values):
            lines.append(Drawn(line["name"], values, bool(line.get("fixed"))))
    return lines


def _dots(study: Study, part: Part, metric: str) -> list[DotRow]:
    rows = []
    for line in part["rows"]:
        result = line["obtained"].get(study["against"], {}).get("metrics", {}).get(metric)
        published = line["published"].get(metric)
        if result is None and published is None:
            continue
        scale, sd = study["scale"], (result and result["sd"]) or 0.0
        printed = None if published is None else published * scale
        measured = None if result is None else float(result["mean"]) * scale
        rows.append(DotRow(line["name"], printed, measured, sd * scale))
    return rows

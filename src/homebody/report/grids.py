"""The figures of a study as plain tables of texts, the same on the page, in Markdown and on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from homebody.counts import several
from homebody.report.words import QUANTITIES, figure, metric_name, percent, spread

__all__ = [
    "SHORT",
    "Grid",
    "columns_of",
    "compared",
    "embedding_grid",
    "gathered",
    "grids",
    "has_published",
    "known_to_diverge",
    "missing_or",
    "noted",
    "obtained",
    "printed",
    "remarks",
    "rounds_grid",
    "seeds_of",
    "state",
    "sweep_grid",
    "table_name",
    "under",
    "values_grid",
]

SHORT = "▼"
UNKNOWN = "The recipe names no reason."
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
"""After which parts of its rounds a curve is written down."""

OUTSIDE = {"certified", "counted"}
"""What stands in place of a protocol where nothing was run."""
OWN = {"training": "training", "test item": "held_out"}
"""Of what a person has, what is set apart from the rest, and its name in a panel."""


class Grid(NamedTuple):
    """Headings and rows; the first `left` columns are names."""

    columns: list[str]
    left: int
    rows: list[list[str]]


def under(protocol: str) -> str:
    """
    >>> under("published"), under("strict"), under("certified")
    ('obtained, published protocol', 'obtained, strict', 'certified')
    """
    if protocol in OUTSIDE:
        return protocol
    return f"obtained, {protocol}" + (" protocol" if protocol == "published" else "")


def seeds_of(part: Mapping[str, Any]) -> str:
    """
    >>> seeds_of({"seeds": 3}), seeds_of({"seeds": 1}), seeds_of({"seeds": 0})
    ('3 seeds', '1 seed', '')
    """
    return several(part["seeds"], "seed") if part["seeds"] else ""


def noted(part: Mapping[str, Any]) -> list[str]:
    """What stands below the figures; parts that an earlier version made have no footnotes."""
    return [*part["notes"], *part.get("footnotes", [])]


def state(part: Mapping[str, Any], protocols: Sequence[str]) -> list[str]:
    """What a reader must know before the figures: that some are missing, or that the runs were cut short."""
    said = []
    if part["finished"] < part["planned"]:
        said.append(f"Not complete: {part['finished']} of {part['planned']} runs are finished.")
    if part["rounds"]:
        count = several(part["rounds"], "round")
        said.append(f"Every run was given {count} on the command line, not the recipe's.")
    if len(part["protocols"]) < len(protocols):
        said.append(f"Asked for under {' and '.join(part['protocols'])} only; of the rest what had been run before.")
    return said


def compared(study: Mapping[str, Any]) -> bool:
    """Whether differences make sense: metrics have them, costs on another machine do not."""
    return any(metric not in QUANTITIES for metric in study["metrics"])


def has_published(study: Mapping[str, Any]) -> bool:
    """Whether the paper has any figure of it: a table of our own is without."""
    lines = [line for part in study["data"].values() for line in part["rows"]]
    return any(group.get("published") for line in lines for group in (line, *line.get("points", [])))


def columns_of(study: Mapping[str, Any]) -> list[str]:
    """Metrics, then the quantities beside them."""
    return [*study["metrics"], *study["also"]]


def printed(study: Mapping[str, Any], line: Mapping[str, Any], metric: str) -> str:
    """What the paper has."""
    value = line["published"].get(metric)
    if line.get("improvement"):
        return percent(value)
    text = figure(metric, value, study["scale"])
    sd = line["published_sd"].get(metric)
    return text if sd is None else f"{text} ± {figure(metric, sd, study['scale'])}"


def gathered(study: Mapping[str, Any], line: Mapping[str, Any], found: Mapping[str, Any], metric: str) -> str:
    """What was obtained, where it was."""
    if not line.get("improvement"):
        return spread(found, study["scale"], metric)
    return percent(found["mean"], found["sd"])


def known_to_diverge(line: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether it went wrong just as the recipe says: that is a result."""
    return bool(line.get("diverges") and found.get("diverged"))


def missing_or(part: Mapping[str, Any], line: Mapping[str, Any], protocol: str) -> str:
    """Why there is no figure."""
    found = line["obtained"].get(protocol)
    if line["missing"] or found is None:
        return "not run"
    if found["errors"]:
        return "diverged" if known_to_diverge(line, found) else "failed"
    return "–" if found["n"] or protocol not in part["protocols"] else "not finished"


def obtained(
    study: Mapping[str, Any], part: Mapping[str, Any], line: Mapping[str, Any], protocol: str, metric: str
) -> str:
    """What was obtained, or why there is nothing."""
    found = line["obtained"].get(protocol, {}).get("metrics", {}).get(metric)
    return missing_or(part, line, protocol) if found is None else gathered(study, line, found, metric)


def remarks(study: Mapping[str, Any], line: Mapping[str, Any], tolerance: float) -> list[str]:
    """Why something was not run, failed, or fell short; and what the recipe says of it."""
    said = [f"not run: {line['missing']}."] if line["missing"] and not line.get("improvement") else []
    groups = [line, *line.get("points", [])]
    for protocol in study["protocols"]:
        found = [group["obtained"][protocol] for group in groups if protocol in group.get("obtained", {})]
        told = {
            error: "diverged, as it is known to" if known_to_diverge(line, one) else "failed"
            for one in found
            for error in one["errors"]
        }
        said += [f"{how} ({protocol}): {error}" for error, how in told.items()]
    said += [f"failed: {error}" for error in line.get("errors", [])]
    if any(group.get("short") for group in groups):
        said.append(f"{SHORT} short by more than {tolerance:g} points. {line['note'] or UNKNOWN}")
    elif line["note"]:
        said.append(line["note"])
    return said


def grids(study: Mapping[str, Any], part: Mapping[str, Any]) -> Grid:
    """The numbers of a sweep, of curves or of plots on one data set."""
    if study["kind"] == "convergence":
        return rounds_grid(study, part)
    if study["kind"] == "embedding":
        return embedding_grid(study, part)
    return sweep_grid(study, part) if study["form"] == "table" else values_grid(study, part)


def sweep_grid(study: Mapping[str, Any], part: Mapping[str, Any]) -> Grid:
    """A column a value, as papers print it."""
    columns = ["method", "metric", "source", *study["labels"]]
    rows = []
    for line in part["rows"]:
        if line["missing"]:
            rows.append([line["name"], "", "not run", *("–" for _ in study["labels"])])
            continue
        for metric in columns_of(study):
            for source, texts in _sources(study, part, line, metric):
                rows.append([line["name"], metric_name(metric), source, *texts])
    return Grid(columns, 3, rows)


def _sources(
    study: Mapping[str, Any], part: Mapping[str, Any], line: Mapping[str, Any], metric: str
) -> Iterator[tuple[str, list[str]]]:
    """A metric over the values: as published, and under each protocol; what the protocol does not change, once."""
    points = line["points"]
    if any(metric in point["published"] for point in points):
        yield "published", [printed(study, point, metric) for point in points]
    found = {
        protocol: [_marked(study, part, {**line, **point}, protocol, metric) for point in points]
        for protocol in study["protocols"]
        if protocol in part["protocols"] or any(point["obtained"].get(protocol, {}).get("n") for point in points)
    }
    first = next(iter(found.values()), [])
    ran = not OUTSIDE & found.keys()
    if ran and metric in QUANTITIES and all(texts == first for texts in found.values()):
        yield "obtained", first
    else:
        yield from ((under(protocol), texts) for protocol, texts in found.items())


def _marked(
    study: Mapping[str, Any], part: Mapping[str, Any], line: Mapping[str, Any], protocol: str, metric: str
) -> str:
    text = obtained(study, part, line, protocol, metric)
    return f"{SHORT} {text}" if protocol == study["against"] and metric in line["short"] else text


def values_grid(study: Mapping[str, Any], part: Mapping[str, Any]) -> Grid:
    """A line a value, and what was published or obtained for it."""
    metrics = columns_of(study)
    columns = ["method", study["axis"], "source", *map(metric_name, metrics)]
    rows = []
    for line in part["rows"]:
        if line["missing"]:
            rows.append([line["name"], "", "not run", *("–" for _ in metrics)])
            continue
        for point in line["points"]:
            merged = {**line, **point}
            start = [line["name"], point["label"]]
            if point["published"]:
                rows.append([*start, "published", *(printed(study, point, metric) for metric in metrics)])
            for protocol in part["protocols"]:
                texts = (_marked(study, part, merged, protocol, metric) for metric in metrics)
                rows.append([*start, under(protocol), *texts])
    return Grid(columns, 3, rows)


def rounds_grid(study: Mapping[str, Any], part: Mapping[str, Any], shares: Sequence[float] = SHARES) -> Grid:
    """Curves at some of their rounds, the same for all, and where they are best."""
    scale = study["scale"]
    known = [one for line in part["rows"] for curves in line["curves"].values() for one in curves.values()]
    last = max((curve["round"][-1] for curve in known), default=0)
    steps = sorted({max(1, round(last * share)) for share in shares}) if last else []
    columns = ["method", "protocol", "metric", *(f"round {step}" for step in steps), "best (round)"]
    rows = []
    for line in part["rows"]:
        if line["missing"]:
            rows.append([line["name"], "", "not run", *("–" for _ in steps), "–"])
            continue
        for protocol in study["protocols"]:
            curves = line["curves"].get(protocol)
            if not curves:
                if protocol in part["protocols"]:
                    why = "failed" if line["errors"] else "not finished"
                    rows.append([line["name"], protocol, why, *("–" for _ in steps), "–"])
                continue
            for metric, curve in curves.items():
                at = dict(zip(curve["round"], curve["mean"], strict=True))
                texts = [_at(metric, at, step, scale) for step in steps]
                best = max(at, key=lambda step: at[step])
                top = f"{figure(metric, at[best], scale)} ({best})"
                rows.append([line["name"], protocol, metric_name(metric), *texts, top])
    return Grid(columns, 3, rows)


def embedding_grid(study: Mapping[str, Any], part: Mapping[str, Any]) -> Grid:
    """How far a person's own items lie apart from the others, for the one that is shown and on average."""
    panels = [panel for line in part["rows"] for panel in line["panels"].values()]
    users, counts = ({panel[name] for panel in panels} for name in ("user", "count"))
    one = f"user {users.pop()}" if len(users) == 1 else "one user"
    mean = f"mean of {counts.pop()}" if len(counts) == 1 else "mean"
    columns = ["method", "protocol", "item table", *(f"{who}: {what}" for who in (one, mean) for what in OWN)]
    rows = []
    for line in part["rows"]:
        if line["missing"]:
            rows.append([line["name"], "", "not run", *("–",) * 4])
            continue
        for protocol in study["protocols"]:
            panel = line["panels"].get(protocol)
            if panel is not None:
                texts = [f"{panel['separation'][name]:.3f}" for name in OWN.values()]
                for name in OWN.values():
                    found = panel["people"][name]
                    texts.append(f"{found['mean']:.3f}" + ("" if found["sd"] is None else f" ± {found['sd']:.3f}"))
                rows.append([line["name"], protocol, table_name(panel), *texts])
            elif protocol in part["protocols"]:
                rows.append([line["name"], protocol, "failed" if line["errors"] else "not finished", *("–",) * 4])
    return Grid(columns, 3, rows)


def table_name(panel: Mapping[str, Any]) -> str:
    """
    >>> table_name({"tuned": True, "touched": 1318}), table_name({"tuned": False})
    ('tuned, 1,318 rows', 'shared')
    """
    return f"tuned, {several(panel['touched'], 'row')}" if panel["tuned"] else "shared"


def _at(metric: str, curve: Mapping[int, float], step: int, scale: float) -> str:
    """At this round, or the last one before it that was evaluated; a curve that ended before has nothing there."""
    before = [known for known in curve if known <= step]
    return figure(metric, curve[before[-1]], scale) if before and max(curve) >= step else "–"

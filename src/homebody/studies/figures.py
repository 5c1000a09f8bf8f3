"""From results of runs to the rows of a table or figure: means, deviations, differences, curves.

Some kinds of study need no run: ε from our accountants, how long people's histories are, how much a data set has of
everything, and the noise of a request.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from homebody.data.population import Population
from homebody.errors import HomebodyError, refuse_unknown
from homebody.privacy import GaussianRelease, Sampling
from homebody.privacy.accountant import epsilon
from homebody.recipe import Recipe
from homebody.report.words import OF_RUNS, QUANTITIES, metric_name, number
from homebody.run import population_of
from homebody.studies import probes
from homebody.studies.provenance import without_paths
from homebody.studies.serving import SKEW, PaddedRequest, check_release
from homebody.studies.study import COUNTS, EPSILON, Row, Study, deviations, published

__all__ = ["LINES", "MEANINGS", "TOLERANCE", "NoisyRelease", "Runs", "ordered"]

TOLERANCE = 1.5
"""Points by which an obtained figure may fall short before it is marked."""
MEANINGS = {
    "certified": (
        "ε of one person against the public, who sees every model and not who took part, composed over all rounds by "
        "our accountants: the smallest of their bounds"
    ),
    "certified for views": (
        "ε of what one view of a person gives, against their other views, who see every aggregate of the device, "
        "composed over all rounds by our accountants: the smallest of their bounds"
    ),
    "counted": "the data set itself, whole, before any split",
    "computed": "the noise that the mechanism adds, by its formula",
}
"""What stands in place of a protocol, and what it means."""
Results = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Runs:
    """What was run for one table or figure on one data set."""

    study: Study
    """With as many seeds as were asked for."""
    data: str
    of: Callable[[Row, str, int], Results]
    """The results so far, of a row, a protocol and a point."""
    rounds: Callable[[str], Sequence[Mapping[str, Any]]]
    """The rounds of a run."""
    data_dir: str | None = None
    """Where data sets are, for kinds that count in the data itself."""


def table(runs: Runs) -> list[dict[str, Any]]:
    """A line a row."""
    return [{**_named(row, runs.data), **_figures(runs, row)} for row in runs.study.rows]


def pairs(runs: Runs) -> list[dict[str, Any]]:
    """Three lines a pair: without, with, and the improvement as a part of the first."""
    lines = {line["name"]: line for line in table(runs)}
    out = []
    for without, with_ in runs.study.pairs:
        first, other = lines[without], lines[with_]
        out += [first, other, _improvement(runs, first, other)]
    return out


def sweep(runs: Runs) -> list[dict[str, Any]]:
    """A line a row, with a point for each value."""
    lines = []
    for row in runs.study.rows:
        values = enumerate(zip(runs.study.points(row), runs.study.labels, strict=True))
        points = [{"value": value, "label": label, **_figures(runs, row, n)} for n, (value, label) in values]
        lines.append({**_named(row, runs.data), **({"fixed": True} if row.fixed else {}), "points": points})
    if runs.study.vary == EPSILON:
        for point in (point for line in lines for point in line["points"]):
            point["value"] = point["label"]  # ε of ∞, and rows without a budget, stand on the same axis
    return lines


def convergence(runs: Runs) -> list[dict[str, Any]]:
    """A line a row, with a curve for each protocol and metric."""

    def curves(row: Row, results: Results) -> dict[str, Any]:
        histories = [runs.rounds(str(result["run"])) for result in results]
        return {metric: _curve(histories, row.metric_on(runs.data, metric)) for metric in runs.study.metrics}

    return _by_protocol(runs, "curves", curves)


def tables(runs: Runs) -> list[dict[str, Any]]:
    """A line a row, with a point for each item table that clients rank with, or for each way to adapt."""
    names = [str(value) for value in runs.study.values]
    return sweep(_probed(runs, lambda answer, point: {"metrics": answer["metrics"][names[point]]}))


def membership(runs: Runs) -> list[dict[str, Any]]:
    """A line a row: what attacks on its model found."""
    return table(_probed(runs, lambda answer, _: {name: answer[name] for name in ("metrics", "intervals")}))


def view_attack(runs: Runs) -> list[dict[str, Any]]:
    """A line a row, with a point for each noise and number of participations: what an attack on its model found."""
    names = [str(value) for value in runs.study.values]
    return sweep(_probed(runs, lambda answer, point: answer["points"][names[point]]))


def serving(runs: Runs) -> list[dict[str, Any]]:
    """As a table or a sweep: how well finished models serve people whose requests are noised."""
    unasked = {SKEW: math.nan}

    def of(row: Row, protocol: str, point: int) -> Results:
        results = runs.of(row, protocol, point)
        if probe := runs.study.probe_at(row, point):
            answers = probes.probed(probe, results)
            names = ("metrics", "epsilon_query")
            return [it if "error" in it else {**it, **{name: it["probe"][name] for name in names}} for it in answers]
        return [it if "error" in it else {**it, "metrics": {**it["metrics"], **unasked}} for it in results]

    asked = replace(runs, of=of)
    if not runs.study.vary:
        return table(asked)
    lines = sweep(asked)
    for point in (point for line in lines for point in line["points"]):
        point["value"] = point["label"]  # ε of ∞, and rows without any, stand on the same axis
    return lines


def ordered(study: Study, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each pair of rows that the paper orders, the metrics in which our figures have that order or not.

    The order is that of the published figures; without them, the first row is above the second.
    """
    by_name = {line["name"]: line for line in lines}
    said = []
    for names in study.orders:
        pair = [by_name[name] for name in names]
        ours = [line["obtained"].get(study.against, {}).get("metrics", {}) for line in pair]
        printed = [line["published"] for line in pair]
        verdicts_on: dict[bool, list[str]] = {True: [], False: []}
        for metric in (name for name in study.metrics if name != SKEW and all(name in figures for figures in ours)):
            mean, other = (float(figures[metric]["mean"]) for figures in ours)
            above = printed[0][metric] > printed[1][metric] if all(metric in figures for figures in printed) else True
            scaled = (number(value, study.scale) for value in (mean, other))
            verdicts_on[(mean > other) == above].append(f"{metric_name(metric)} {' to '.join(scaled)}")
        verdicts = {True: "in the paper's order", False: "NOT in the paper's order"}
        texts = [f"{verdicts[kind]}: {', '.join(some)}" for kind, some in verdicts_on.items() if some]
        if texts:
            said.append(f"{names[0]} and {names[1]}, {'; '.join(texts)}.")
    return said


def embedding(runs: Runs) -> list[dict[str, Any]]:
    """A line a row, with a panel for each protocol: the picture of the first seed, its figures over all seeds."""

    def panel(row: Row, results: Results) -> dict[str, Any]:
        panels = [result["probe"] for result in results]
        return {
            **{name: value for name, value in panels[0].items() if name not in ("schema", "people")},
            "n": len(panels),
            "count": panels[0]["people"]["count"],
            "people": {n: _spread([shown["people"][n] for shown in panels]) for n in ("training", "held_out")},
        }

    return _by_protocol(_probed(runs, lambda answer, _: {}), "panels", panel)


def _probed(runs: Runs, change: Callable[[Mapping[str, Any], int], dict[str, Any]]) -> Runs:
    """The same runs, with their results updated by the answer of the study's probe at a point."""

    def of(row: Row, protocol: str, point: int) -> Results:
        answers = probes.probed(runs.study.probe_at(row, point), runs.of(row, protocol, point))
        return [answer if "error" in answer else {**answer, **change(answer["probe"], point)} for answer in answers]

    return replace(runs, of=of)


def _by_protocol(runs: Runs, name: str, make: Callable[[Row, Results], dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a row, with what is made of the results under each protocol that has any, under this name."""
    lines = []
    for row in runs.study.rows:
        parts, errors = {}, []
        for protocol in runs.study.protocols if row.method is not None else ():
            results = runs.of(row, protocol, 0)
            errors += _errors(results)
            if whole := [result for result in results if "error" not in result]:
                parts[protocol] = make(row, whole)
        lines.append({**_named(row, runs.data), name: parts, "errors": list(dict.fromkeys(errors))})
    return lines


@dataclass(frozen=True)
class NoisyRelease:
    """What a round tells: a sum of clipped updates with Gaussian noise, of a cohort out of a population.

    >>> NoisyRelease.of({"noise": 1, "cohort": 30, "population": 4800}).epsilon(1000, 0.0)
    inf
    """

    noise: float
    """Of the sensitivity under this relation."""
    cohort: int = 1
    population: int = 1
    """Without sampling neither says anything."""
    relation: str = "replace-one"
    sampling: str = "fixed"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> NoisyRelease:
        """From a recipe's table, checked."""
        check_release(cls, given, "release")
        drawn = given.get("sampling") != "none"
        for name in ("noise", *(("cohort", "population") if drawn else ())):
            if name not in given:
                raise HomebodyError(f"release.{name} is missing: give it to the table or to this row.")
        release = cls(**given)
        release.event()
        return release

    def event(self) -> GaussianRelease:
        size = (1, 1) if self.sampling == "none" else (self.cohort, self.population)
        drawn = Sampling(self.sampling, *size)  # type: ignore[arg-type]
        return GaussianRelease(self.noise, self.relation, drawn)  # type: ignore[arg-type]

    def epsilon(self, rounds: int, delta: float) -> float:
        """Certified, of so many rounds."""
        return epsilon([(self.event(), rounds)], delta).epsilon


def accounting(runs: Runs) -> list[dict[str, Any]]:
    """A line a release, with a point for each δ."""

    def certified(row: Row) -> Callable[[float], float]:
        release = NoisyRelease.of({**runs.study.release, **row.release})
        return partial(release.epsilon, row.rounds or runs.study.rounds or 1)

    return _by_value(runs, certified)


def noise(runs: Runs) -> list[dict[str, Any]]:
    """A line a request, with a point for each padding: how much noise it needs."""
    return _by_value(runs, lambda row: PaddedRequest.of({**runs.study.release, **row.release}).scale)


def _by_value(runs: Runs, formula: Callable[[Row], Callable[[float], float]]) -> list[dict[str, Any]]:
    """A line a row, with a point for each value, by a formula of the row."""
    study, lines = runs.study, []
    for row in study.rows:
        of = formula(row)
        points = [
            {
                **_point(study, place, of(value)),
                "published": published(study, row, runs.data, place),
                "published_sd": deviations(study, row, runs.data, place),
            }
            for place, value in enumerate(study.values)
        ]
        lines.append({**_named(row, runs.data), "points": points})
    return lines


def lengths(runs: Runs) -> list[dict[str, Any]]:
    """Two lines, of interactions and of different items: how many people have so many."""
    study = runs.study
    population, errors = _population(runs)
    if population is None:
        return [{"name": "interactions", "note": "", "missing": "", "points": [], "errors": errors}]
    lines = []
    for name, counts in (("different items", different(population)), ("interactions", population.lengths)):
        points = [
            # By its label: bins of different widths stand side by side.
            {**_point(study, n, float(count)), "value": study.labels[n], "published": {}, "published_sd": {}}
            for n, count in enumerate(binned(counts, study.values))
        ]
        note = f"{population.n_users:,} people, the one in the middle with {np.median(counts):,.0f}."
        lines.append({"name": name, "note": note, "missing": "", "points": points})
    return lines


def statistics_of(runs: Runs) -> list[dict[str, Any]]:
    """A line for each thing that is counted in the data set."""
    study = runs.study
    population, errors = _population(runs)
    counts = {} if population is None else counted(population)
    lines = []
    for row in study.rows:
        figures = {study.metrics[0]: _spread([float(counts[row.name])])} if counts else {}
        obtained = {"counted": {"n": len(figures), "metrics": figures, "errors": errors, "cells": []}}
        printed = {"published": published(study, row, runs.data), "published_sd": {}, "difference": {}, "short": []}
        lines.append({**_named(row, runs.data), "obtained": obtained, **printed})
    return lines


def _population(runs: Runs) -> tuple[Population | None, list[str]]:
    """The data set itself, or why there is none: the rest of the paper is made all the same."""
    settings = {**runs.study.run, **runs.study.run_on.get(runs.data, {})}
    try:
        return population_of(Recipe("popularity", runs.data, data_dir=runs.data_dir, **settings)), []
    except HomebodyError as error:
        return None, [without_paths(str(error))]


def counted(population: Population) -> dict[str, int]:
    """How much there is of everything in a population: `COUNTS`.

    >>> counted(Population("toy", np.array([0, 3, 5]), np.array([4, 4, 1, 0, 2], dtype=np.int32), n_items=5))["users"]
    2
    """
    shown = population.impressions
    clicks = 0 if shown is None else int(shown.clicked.sum())
    impressions, others = (0, 0) if shown is None else (len(shown.users), len(shown.clicked) - clicks)
    numbers = (population.n_items, population.n_users, impressions, clicks, others)
    return dict(zip(COUNTS, numbers, strict=True))


def different(population: Population) -> npt.NDArray[np.int64]:
    """How many different items each person met.

    >>> different(Population("toy", np.array([0, 3, 3, 5]), np.array([4, 4, 1, 0, 2], dtype=np.int32), n_items=5))
    array([2, 0, 2])
    """
    users = np.repeat(np.arange(population.n_users), population.lengths)
    pairs = np.unique(users * population.n_items + population.items)
    return np.bincount(pairs // population.n_items, minlength=population.n_users)


def binned(counts: npt.NDArray[np.int64], least: Sequence[int]) -> list[int]:
    """How many of the counts lie from each of these numbers to under the next; the last is open.

    >>> binned(np.array([1, 9, 10, 25, 400]), [1, 10, 20])
    [2, 1, 2]
    """
    sizes = np.histogram(counts, [*least, max(int(counts.max(initial=0)), least[-1]) + 1])[0]
    return [int(count) for count in sizes]


def _point(study: Study, place: int, value: float) -> dict[str, Any]:
    """A figure that no run is made for, at one of the study's values."""
    spread = {"mean": value, "sd": None, "values": [value]}
    figures = {study.protocols[0]: {"n": 1, "metrics": {study.metrics[0]: spread}, "errors": [], "cells": []}}
    labelled = {"value": study.values[place], "label": study.labels[place]}
    return {**labelled, "obtained": figures, "difference": {}, "short": []}


LINES: dict[str, Callable[[Runs], list[dict[str, Any]]]] = {
    "table": table,
    "pairs": pairs,
    "sweep": sweep,
    "serving": serving,
    "convergence": convergence,
    "tables": tables,
    "adaptation": tables,
    "embedding": embedding,
    "membership": membership,
    "view-attack": view_attack,
    "accounting": accounting,
    "lengths": lengths,
    "statistics": statistics_of,
    "noise": noise,
}
"""How each kind of study makes its lines."""


def _named(row: Row, data: str) -> dict[str, Any]:
    reason = row.missing if row.method is None else ""
    named: dict[str, Any] = {"name": row.name, "note": row.note_on(data), "missing": reason}
    return named | ({"diverges": True} if row.diverges else {}) | ({"seeds": row.seeds} if row.seeds else {})


def _figures(runs: Runs, row: Row, point: int = 0) -> dict[str, Any]:
    """Published, obtained under each protocol, and how far apart they are, in points."""
    study, data = runs.study, runs.data
    given = published(study, row, data, point)
    names = {metric: row.metric_on(data, metric) for metric in (*study.metrics, *study.also)}
    protocols = [] if row.method is None else study.protocols
    outcomes = {protocol: _obtained(runs.of(row, protocol, point), names) for protocol in protocols}
    ours = outcomes.get(study.against, {}).get("metrics", {})
    compared = [name for name in given if name in ours and name not in QUANTITIES]
    gaps = {name: 100 * (ours[name]["mean"] - given[name]) for name in compared}
    return {
        "published": given,
        "published_sd": deviations(study, row, data, point),
        "obtained": outcomes,
        "difference": gaps,
        "short": [name for name, gap in gaps.items() if gap < -TOLERANCE],
    }


def _obtained(results: Results, names: Mapping[str, str]) -> dict[str, Any]:
    """Mean and deviation over seeds. names: what a run's result calls each metric."""
    runs = [result for result in results if "error" not in result]
    figures = {}
    for metric, name in names.items() if runs else ():
        if metric not in OF_RUNS:
            refuse_unknown("metric", [name], runs[0]["metrics"])
        values = [_quantity(run, metric) if metric in OF_RUNS else float(run["metrics"][name]) for run in runs]
        if not any(map(math.isnan, values)):
            figures[metric] = {**_spread(values), **_interval([run.get("intervals", {}).get(name) for run in runs])}
    return {
        "n": len(runs),
        "metrics": figures,
        "errors": list(dict.fromkeys(_errors(results))),
        "diverged": len(runs) < len(results) and all(result.get("diverged") for result in results if "error" in result),
        "seconds": statistics.fmean(float(run["seconds"]) for run in runs) if runs else None,
        "chosen_rounds": [run["chosen_round"] for run in runs],
        "cells": [Path(run["run"]).name for run in runs],
    }


_OBSERVERS = {"epsilon": "server", "epsilon_public": "public", "epsilon_views": "views"}
_OF_REPORTS = {
    "reports": "count",
    "epsilon_report": "epsilon",
    "epsilon_round": "round",
    "epsilon_total": "total",
    "bytes_sealed": "sealed_bytes",
}


def _quantity(run: Mapping[str, Any], name: str) -> float:
    """One of `OF_RUNS`; nan where a run has none, as a reference has no model of one device."""
    if name == "parameters":
        return float(run["parameters"]["model"]) if run["parameters"] else math.nan
    if name == "epochs":
        return float(run["chosen_round"] * run["passes"])
    if name == "epsilon_query":
        return float(run.get(name, math.nan))
    if name in _OBSERVERS:
        return float(run["epsilon"].get(_OBSERVERS[name], math.nan))
    if name.endswith("_total") and name.startswith("bytes"):
        return float(run[name.removesuffix("_total")] * run["rounds"])
    if name in _OF_REPORTS:
        return float((run.get("reports") or {}).get(_OF_REPORTS[name], math.nan))
    return float(run[name])


def _spread(values: Sequence[float]) -> dict[str, Any]:
    mean = statistics.fmean(values)
    sd = statistics.stdev(values) if len(values) > 1 and math.isfinite(mean) else None
    return {"mean": mean, "sd": sd, "values": list(values)}


def _interval(intervals: Sequence[Sequence[float] | None]) -> dict[str, Any]:
    """One interval for several seeds, from the lowest end to the highest."""
    known = [ends for ends in intervals if ends is not None]
    return {"interval": [min(low for low, _ in known), max(high for _, high in known)]} if known else {}


def _errors(results: Results) -> list[str]:
    return [without_paths(str(result["error"])) for result in results if "error" in result]


def _improvement(runs: Runs, first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What the second of a pair gains on the first: of the means, as papers count it, with the deviation over seeds."""
    metrics = [metric for metric in runs.study.metrics if metric not in QUANTITIES]
    gained = {}
    for protocol in runs.study.protocols if first["obtained"] and other["obtained"] else ():
        before, after = (line["obtained"][protocol] for line in (first, other))
        seeds = first.get("seeds", runs.study.seeds)
        gains = {m: _gains(before["metrics"].get(m), after["metrics"].get(m), seeds) for m in metrics}
        gained[protocol] = {
            "n": min(before["n"], after["n"]),
            "metrics": {metric: gain for metric, gain in gains.items() if gain},
            "errors": [],
            "cells": [],
        }
    printed = [(m, first["published"].get(m), other["published"].get(m)) for m in metrics]
    given = {m: after / before - 1 for m, before, after in printed if before and after is not None}
    ours = gained.get(runs.study.against, {}).get("metrics", {})
    return {
        "name": f"improvement on {first['name']}",
        "note": "",
        "missing": "" if gained else first["missing"] or other["missing"],
        "improvement": True,
        "published": given,
        "published_sd": {},
        "obtained": gained,
        "difference": {m: 100 * (ours[m]["mean"] - gain) for m, gain in given.items() if m in ours},
        "short": [],
    }


def _gains(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, seeds: int) -> dict[str, Any] | None:
    if not before or not after or not before["mean"]:
        return None
    ours, theirs = before["values"], after["values"]
    # Seed by seed only where every seed is there: otherwise the n-th of one may be another seed than the other's.
    paired = len(ours) == len(theirs) == seeds and all(ours)
    values = [new / old - 1 for old, new in zip(ours, theirs, strict=True)] if paired else []
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": after["mean"] / before["mean"] - 1, "sd": sd, "values": values}


def _curve(runs: Sequence[Sequence[Mapping[str, Any]]], metric: str) -> dict[str, Any]:
    """Mean, least and most over seeds, at each round that all of them evaluated."""
    series = [{line["step"]: line["metrics"][metric] for line in lines if metric in line["metrics"]} for lines in runs]
    if not all(series):
        raise HomebodyError(f"No round was evaluated for {metric}: a convergence figure needs a metric of every round.")
    rounds = sorted(set.intersection(*(set(curve) for curve in series)))
    at = [[float(curve[step]) for curve in series] for step in rounds]
    return {
        "n": len(series),
        "round": rounds,
        "mean": [statistics.fmean(values) for values in at],
        "low": [min(values) for values in at],
        "high": [max(values) for values in at],
    }

"""Several runs side by side: means, deviations, which differences are significant, and the columns that show them.

To add a column to `homebody compare` and to the leaderboard, add it to `comparison_columns`: the terminal, Markdown
and HTML tables are all made from that list.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.errors import HomebodyError, several
from homebody.evaluation.metrics import main_cutoff
from homebody.report.beyond import beyond_means
from homebody.report.record import RunFolder
from homebody.report.statement import recipe_of
from homebody.report.words import (
    NOT_COVERED_IN_SHORT,
    behind_proxy,
    epsilon,
    epsilon_meaning,
    kilobytes,
    metric_name,
    spread,
)

__all__ = [
    "ComparisonColumn",
    "cautions",
    "compared_runs",
    "comparison_columns",
    "holm",
    "in_common",
    "legend",
    "paired_p",
    "reference_rows",
    "refuse_unlike",
    "seeds_of",
    "summarise_runs",
]

FLIPS = 10_000
Floats = npt.NDArray[np.float64]
METRICS = ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10")
TO_TRY = (
    "To try: everyone in each round (no --cohort), fewer rounds, fewer --set factors, another clip norm, and "
    "--calibrate. docs/privacy.md has settings that do better."
)
"""For a private run that is worse than one list for everyone."""
ASKED = ("data", "split", "protocol", "negatives", "public", "filters", "columns", "impressions")
"""What runs that are compared have in common. How items are held out is in the meaning of their metrics."""
UNPAIRED = "none, because the seeds of the rows differ, so that their users were not asked the same"
UNBOUNDED = "∞ means no bound: updates, their sum or raw data are seen without noise"


class ComparisonColumn(NamedTuple):
    """One column of a comparison: its heading, the cell of a row, and whether the largest value is marked as best."""

    heading: str
    cell: Callable[[Mapping[str, Any]], str]
    best: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        """The cell of a method, or of a reference row, which has metrics alone."""
        return "" if row.get("reference") and not self.best else self.cell(row)


def comparison_columns(observers: Sequence[str]) -> list[ComparisonColumn]:
    """Every column after the method's name, in order, for the rows of `summarise_runs`."""
    return [
        *(ComparisonColumn(metric_name(metric), _metric(metric), best=True) for metric in METRICS),
        ComparisonColumn("p", lambda row: _p_value(row["p_against_best"]) if "p_against_best" in row else "–"),
        *(ComparisonColumn(f"ε, {observer}", _epsilon(observer)) for observer in observers),
        ComparisonColumn("KB up", lambda row: kilobytes(row["bytes_up"])),
        ComparisonColumn("KB down", lambda row: kilobytes(row["bytes_down"])),
        ComparisonColumn("seconds", lambda row: f"{row['seconds']:.1f}"),
    ]


def reference_rows(comparison: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for what popularity and chance get, to stand below the methods; a reference among these has its row."""
    there = {row["method"] if "method" in row else row["name"] for row in comparison["methods"]}
    return [
        {"name": name, "reference": True, "metrics": metrics}
        for name, metrics in (comparison.get("references") or {}).items()
        if name not in there
    ]


def cautions(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before the figures of these runs, one of each method.

    >>> run = {"method": "fedmf", "planned_rounds": 5, "default_rounds": 100, "epsilon": {"server": "inf"}}
    >>> cautions([{**run, "metrics": {"ndcg@10": 0.1}, "references": {"popularity": {"ndcg@10": 0.2}}}])
    ['Fewer rounds than by default: fedmf 5 of 100.']
    """
    few = [_few_negatives(result) for result in results]
    below = [_below_popularity(result) for result in results]
    return list(dict.fromkeys(filter(None, (_few_rounds(results), *few, *below))))


def _few_rounds(results: Sequence[Mapping[str, Any]]) -> str:
    # Records of earlier versions do not know what was usual.
    counts = [(_short(run), run.get("planned_rounds") or 0, run.get("default_rounds") or 0) for run in results]
    short = [f"{name} {planned:,} of {usual:,}" for name, planned, usual in counts if 0 < planned < usual]
    return f"Fewer rounds than by default: {', '.join(short)}." if short else ""


def _few_negatives(result: Mapping[str, Any]) -> str:
    found = result.get("negatives")
    if not found or not found["short"]:
        return ""
    how_many = f"{found['least']:,} at least, {found['median']:,g} in the median"
    return (
        f"{found['short']:,} of {several(found['questions'], 'question')} had fewer than {found['asked']} items to be "
        f"ranked against ({how_many}): that is easier, and chance is higher."
    )


def _below_popularity(result: Mapping[str, Any]) -> str:
    """That a private run is worse than the same list for everyone, and what to change."""
    private = any(0 < float(value) < float("inf") for value in result["epsilon"].values())
    popular = (result.get("references") or {}).get("popularity", {})
    metric = _main_metric(result["metrics"])
    if not private or metric not in popular or float(result["metrics"][metric]) >= popular[metric]:
        return ""
    name, reached = metric_name(metric), float(result["metrics"][metric])
    figures = f"{name} of {_short(result)} is {reached:.4f}, that of one list for everyone {popular[metric]:.4f}"
    return f"Below popularity: {figures}. {TO_TRY}"


def _main_metric(metrics: Iterable[str]) -> str:
    """NDCG at 10, or the cut-off nearest to it; empty where there is none."""
    cutoffs = [int(name.removeprefix("ndcg@")) for name in metrics if name.startswith("ndcg@")]
    return f"ndcg@{main_cutoff(cutoffs)}" if cutoffs else ""


def _short(result: Mapping[str, Any]) -> str:
    return str(result.get("label") or result.get("name") or result["method"].rpartition(":")[2])


def _metric(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: spread(row["metrics"].get(name))


def _epsilon(observer: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: epsilon(row["epsilon"][observer])


def _p_value(p: float | None) -> str:
    """
    >>> _p_value(None), _p_value(0.0312), _p_value(0.0001)
    ('best', '0.031', '<.001')
    """
    return "best" if p is None else f"{p:.3f}" if p >= 0.001 else "<.001"


def legend(comparison: Mapping[str, Any]) -> list[str]:
    """What the columns of a comparison mean, a sentence a column."""
    delta = comparison.get("epsilon_delta")
    return [
        comparison["meaning"],
        f"p: {comparison['test']}",
        f"ε: certified, one user, whole training{'' if delta is None else f'; δ = {delta:g}'}; {UNBOUNDED}",
        *_allowed(comparison["methods"], delta or 0.0),
        "KB: per client and round; a centralised method's is the raw history, sent once",
        "seconds: wall time of a run's training and evaluation, without compilation, mean over seeds",
    ]


def _allowed(rows: Sequence[Mapping[str, Any]], delta: float) -> list[str]:
    """What each bounded ε of a comparison allows, and what these words mean; nothing where none is bounded."""
    allows: dict[str, list[str]] = {}
    for row in rows:
        for value in dict.fromkeys(float(value) for value in row["epsilon"].values()):
            if 0 < value < math.inf:
                who = [observer for observer, of in row["epsilon"].items() if float(of) == value]
                whom = "everyone" if len(who) == len(row["epsilon"]) else " and ".join(who)
                allows.setdefault(epsilon_meaning(value, delta).short, []).append(f"{_short(row)} against {whom}")
    if not allows:
        return []
    each = "; ".join(f"{', '.join(whose)}: {short}" for short, whose in allows.items())
    means = "odds: the factor by which an observer's odds about one person may move; finds: the most true positives of "
    return [f"what ε allows: {each}; {means}any attack at 1 % false ones; not covered: {NOT_COVERED_IN_SHORT}"]


def paired_p(difference: Floats, flips: int = FLIPS, seed: int = 0) -> float:
    """Two-sided p of a mean paired difference: how often flipping signs at random gives one as large.

    >>> paired_p(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])) < 0.02
    True
    >>> paired_p(np.array([1.0, -1.0, 1.0, -1.0]))
    1.0
    """
    difference = difference[difference != 0]
    if not len(difference):
        return 1.0
    generator = np.random.default_rng(seed)
    observed = abs(difference.sum())
    at_least = 0
    for start in range(0, flips, 500):
        signs = generator.integers(0, 2, size=(min(500, flips - start), len(difference)), dtype=np.int8) * 2 - 1
        at_least += int((np.abs(signs @ difference) >= observed - 1e-9).sum())
    return (at_least + 1) / (flips + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction for looking several times.

    >>> holm([0.01, 0.04])
    [0.02, 0.04]
    """
    order = np.argsort(p_values)
    out, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - place)))
        out[index] = largest
    return out


def summarise_runs(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row a method, over its seeds; p against the method of the best mean NDCG (at 10, or nearest to it).

    A result may have a `label`, where runs of one method differ: then there is a row for each label. Rows whose seeds
    differ get no p, because their users were not asked the same.
    """
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_label.setdefault(str(result.get("label", result["method"])), []).append(result)
    rows = {label: _row(label, runs) for label, runs in by_label.items()}
    metric = _main_metric(results[0]["metrics"])
    best = max(rows, key=lambda label: rows[label]["metrics"][metric]["mean"])
    paired = len({frozenset(run["seed"] for run in runs) for runs in by_label.values()}) == 1
    if paired:
        gains = {label: _gains(runs, metric) for label, runs in by_label.items()}
        others = [label for label in rows if label != best]
        p_values = holm([paired_p(gains[best] - gains[label]) for label in others])
        for label, p in zip(others, p_values, strict=True):
            rows[label]["p_against_best"] = p
        rows[best]["p_against_best"] = None
    first = results[0]
    return {
        **{name: first[name] for name in ("data", "protocol", "meaning")},
        "notes": [*dict.fromkeys(note for result in results for note in result["notes"]), *behind_proxy(results)],
        "epsilon_delta": first.get("epsilon_delta"),
        "seeds": sorted({result["seed"] for result in results}),
        "test": f"paired over users on {metric}, sign flips, Holm-corrected, against the best" if paired else UNPAIRED,
        "best": best,
        "methods": list(rows.values()),
        "references": _references(by_label[best]),
        "cautions": cautions([_mean_run(runs) for runs in by_label.values()]),
    }


def compared_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Finished runs side by side, as `summarise_runs` gives them: one row for each recipe, over its seeds.

    Runs that asked something else of their users are refused: their figures do not compare.
    """
    opened = [RunFolder.open(folder) for folder in dict.fromkeys(folders)]
    if len(opened) < 2:
        raise HomebodyError("There is one run to compare: name two or more, or see it with `homebody show`.")
    results = [folder.result() for folder in opened]
    recipes = [recipe_of(folder) for folder in opened]
    refuse_unlike([(str(folder.path), recipe) for folder, recipe in zip(opened, recipes, strict=True)], ASKED)
    first = opened[0]
    for folder, result in zip(opened, results, strict=True):
        if result["meaning"] != results[0]["meaning"]:
            raise HomebodyError(
                f'These runs do not compare: {first.path} says "{results[0]["meaning"]}", and {folder.path} '
                f'"{result["meaning"]}".'
            )
    _refuse_changed_data(opened, recipes)
    return summarise_runs(
        [{**result, "label": label} for result, label in zip(in_common(results), _labels(recipes), strict=True)]
    )


def refuse_unlike(runs: Sequence[tuple[str, Mapping[str, Any]]], fields: Iterable[str]) -> None:
    """Refuse runs, by name, that differ in one of these fields of what they asked of their users.

    >>> refuse_unlike([("mine", {"split": "ratio"}), ("popularity", {"split": "leave-one-out"})], ["split"])
    Traceback (most recent call last):
        ...
    homebody.errors.HomebodyError: These runs do not compare: split is ratio in mine and leave-one-out in popularity.
    Train both with the same split.
    """
    for field in fields:
        for name, asked in runs:
            one, other = runs[0][1].get(field), asked.get(field)
            if one != other:
                said = f"{field} is {_said(one)} in {runs[0][0]} and {_said(other)} in {name}"
                raise HomebodyError(
                    f"These runs do not compare: {said}. Train both with the same {field.removeprefix('the ')}."
                )


def in_common(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same results with the metrics that all of them have."""
    shared = set.intersection(*(set(result["metrics"]) for result in results))
    if not any(name.startswith("ndcg@") for name in shared):
        raise HomebodyError("These runs have no NDCG at one list length in common: give them the same --cutoffs.")
    return [
        {**result, "metrics": {name: value for name, value in result["metrics"].items() if name in shared}}
        for result in results
    ]


def seeds_of(comparison: Mapping[str, Any]) -> str:
    """How many seeds each row has; rows of different seeds have no number in common.

    >>> seeds_of({"seeds": [0, 1], "test": "paired over users"}), seeds_of({"seeds": [0, 7], "test": UNPAIRED})
    ('2 seeds', 'different seeds')
    """
    return "different seeds" if comparison.get("test") == UNPAIRED else several(len(comparison["seeds"]), "seed")


def _refuse_changed_data(opened: Sequence[RunFolder], recipes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse runs of one method and one split whose data have different fingerprints. What a method reads of the data
    is its own, so runs of different methods cannot be checked by them."""
    known: dict[tuple[str, int], tuple[RunFolder, str]] = {}
    for folder, recipe in zip(opened, recipes, strict=True):
        if recipe.get("vocabularies") or recipe.get("views"):  # they are part of the fingerprint
            continue
        found = str(folder.read_json("environment.json").get("data_fingerprint"))
        other, before = known.setdefault((recipe["method"], recipe.get("seed", 0)), (folder, found))
        if before != found:
            raise HomebodyError(f"The data changed between {other.path} and {folder.path}: run one of them again.")


def _labels(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells these recipes apart, whatever their seeds: the method, and each setting in which two recipes of one
    method differ."""
    told = [{**recipe, **recipe.get("fields", {})} for recipe in recipes]
    labels = []
    for own in told:
        others = [other for other in told if other["method"] == own["method"]]
        names = dict.fromkeys(name for other in others for name in other if name not in ("seed", "fields", "schema"))
        differ = [name for name in names if any(other.get(name) != own.get(name) for other in others)]
        short = own["method"].rpartition(":")[2]
        labels.append(" ".join([short, *(f"{name}={_said(own.get(name))}" for name in differ)]))
    return labels


def _said(value: Any) -> str:
    """
    >>> _said(None), _said(["clip:norm=1", "gaussian:z=2"]), _said({"core": 5})
    ('default', 'clip:norm=1,gaussian:z=2', 'core=5')
    """
    if value in (None, [], {}):
        return "default"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={part}" for name, part in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _references(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What popularity and chance get, over the seeds of a method: the same questions for every method."""
    known = [run["references"] for run in runs if run.get("references")]
    return {name: _means([references[name] for references in known]) for name in (known[0] if known else ())}


def _mean_run(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first of these runs, with the means over all seeds."""

    def means(of: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {name: part["mean"] for name, part in of.items()}

    references = {name: means(metrics) for name, metrics in _references(runs).items()}
    return {**runs[0], "metrics": means(_means([run["metrics"] for run in runs])), "references": references}


def _means(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """The mean of each metric, and its deviation over more than one run."""
    return {name: _spread([run[name] for run in runs]) for name in runs[0]}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def _row(method: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "method": method,
        "name": method if "label" in runs[0] else method.rpartition(":")[2],
        "metrics": _means([run["metrics"] for run in runs]),
        "beyond": beyond_means(run.get("beyond") for run in runs),
        "epsilon": runs[0]["epsilon"],
        "bytes_up": round(statistics.fmean(run["bytes_up"] for run in runs)),
        "bytes_down": round(statistics.fmean(run["bytes_down"] for run in runs)),
        "rounds": runs[0]["rounds"],
        "seconds": statistics.fmean(run["seconds"] for run in runs),
        "compile_seconds": statistics.fmean(run.get("compile_seconds", 0.0) for run in runs),
        "runs": [run["run"] for run in runs],
    }


def _gains(runs: Sequence[Mapping[str, Any]], metric: str) -> Floats:
    """Each user's NDCG, averaged over the seeds that ask this user: the same ones for every method."""
    frames = [RunFolder.open(Path(run["run"])).ranks().select("user", pl.col(metric).alias("gain")) for run in runs]
    mean = pl.concat(frames).group_by("user").agg(pl.col("gain").mean()).sort("user")
    return mean["gain"].to_numpy()

"""Several runs side by side: means, deviations, which differences are significant, and the columns that show them.

To add a column to `homebody compare` and to the leaderboard, add it to `comparison_columns`: the terminal, Markdown
and HTML tables are all made from that list.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from homebody.evaluation.metrics import main_cutoff
from homebody.report.record import RunFolder
from homebody.report.words import behind_proxy, epsilon, kilobytes, metric_name, spread

__all__ = ["ComparisonColumn", "comparison_columns", "holm", "legend", "paired_p", "summarise_runs"]

FLIPS = 10_000
Floats = npt.NDArray[np.float64]
METRICS = ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10")
UNBOUNDED = "∞ means no bound: updates, their sum or raw data are seen without noise"


class ComparisonColumn(NamedTuple):
    """One column of a comparison: its heading, the cell of a row, and whether the largest value is marked as best."""

    heading: str
    cell: Callable[[Mapping[str, Any]], str]
    best: bool = False


def comparison_columns(observers: Sequence[str]) -> list[ComparisonColumn]:
    """Every column after the method's name, in order, for the rows of `summarise_runs`."""
    return [
        *(ComparisonColumn(metric_name(metric), _metric(metric), best=True) for metric in METRICS),
        ComparisonColumn("p", lambda row: _p_value(row["p_against_best"])),
        *(ComparisonColumn(f"ε, {observer}", _epsilon(observer)) for observer in observers),
        ComparisonColumn("KB up", lambda row: kilobytes(row["bytes_up"])),
        ComparisonColumn("KB down", lambda row: kilobytes(row["bytes_down"])),
        ComparisonColumn("seconds", lambda row: f"{row['seconds']:.1f}"),
    ]


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
        "KB: per client and round; a centralised method's is the raw history, sent once",
        "seconds: wall time of a run's training and evaluation, without compilation, mean over seeds",
    ]


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
    """One row a method, over its seeds; p against the method of the best mean NDCG (at 10, or nearest to it)."""
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_method.setdefault(str(result["method"]), []).append(result)
    rows = [_row(method, runs) for method, runs in by_method.items()]
    cutoffs = [int(name.removeprefix("ndcg@")) for name in results[0]["metrics"] if name.startswith("ndcg@")]
    metric = f"ndcg@{main_cutoff(cutoffs)}"
    best = max(rows, key=lambda row: row["metrics"][metric]["mean"])
    gains = {method: _gains(runs, metric) for method, runs in by_method.items()}
    others = [row for row in rows if row is not best]
    p_values = holm([paired_p(gains[best["method"]] - gains[row["method"]]) for row in others])
    for row, p in zip(others, p_values, strict=True):
        row["p_against_best"] = p
    best["p_against_best"] = None
    first = results[0]
    return {
        **{name: first[name] for name in ("data", "protocol", "meaning")},
        "notes": [*dict.fromkeys(note for result in results for note in result["notes"]), *behind_proxy(results)],
        "epsilon_delta": first.get("epsilon_delta"),
        "seeds": [result["seed"] for result in by_method[best["method"]]],
        "test": f"paired over users on {metric}, sign flips, Holm-corrected, against the best",
        "best": best["method"],
        "methods": rows,
    }


def _row(method: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def summary(values: Sequence[float]) -> dict[str, float | None]:
        return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}

    return {
        "method": method,
        "metrics": {name: summary([run["metrics"][name] for run in runs]) for name in runs[0]["metrics"]},
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

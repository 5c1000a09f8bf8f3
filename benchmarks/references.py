"""`ials` against the `implicit` library's alternating least squares: the same histories, the same evaluation.

`python benchmarks/references.py` fits both with fields chosen on validation and prints a table; `--search` chooses
them anew, from the same grid for both. Both run on as many threads as OMP_NUM_THREADS and NUMBA_NUM_THREADS say.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from homebody.data import load
from homebody.data.partitions import leave_one_out
from homebody.data.splits import Split
from homebody.evaluation import measure
from homebody.methods.ials import IALS
from homebody.reference import Histories, Score

SELECT = "valid/ndcg@10"
SWEEPS = 10
GRID = {"factors": (64,), "confidence": (2.0, 5.0, 10.0), "regularisation": (10.0, 30.0, 100.0)}
SCALED = {"factors": (64,), "confidence": (2.0, 5.0, 10.0), "regularisation": (0.01, 0.03, 0.1), "scaling": (1.0,)}
TUNED = {
    "ials": {"factors": 64, "confidence": 2.0, "regularisation": 30.0, "scaling": 0.0},
    "ials, scaled": {"factors": 64, "confidence": 5.0, "regularisation": 0.03, "scaling": 1.0},
    "implicit": {"factors": 64, "confidence": 2.0, "regularisation": 30.0},
}
Fit = Callable[[Histories], Score]


def ours(histories: Histories, **fields: Any) -> Score:
    return IALS(**fields).trained(histories, seed=0, rounds=SWEEPS)


def theirs(histories: Histories, **fields: Any) -> Score:
    """implicit gives an interaction the weight `alpha` where we give it 1 + α."""
    from implicit.cpu.als import AlternatingLeastSquares
    from scipy.sparse import csr_matrix

    shape = len(histories.indptr) - 1, histories.catalogue.n_items
    taken = csr_matrix((np.ones(len(histories.items), np.float32), histories.items, histories.indptr), shape)
    model = AlternatingLeastSquares(
        factors=fields["factors"],
        alpha=1.0 + fields["confidence"],
        regularization=fields["regularisation"],
        iterations=SWEEPS,
        num_threads=torch.get_num_threads(),
        random_state=0,
    )
    model.fit(taken, show_progress=False)
    users, items = (torch.from_numpy(np.asarray(part)) for part in (model.user_factors, model.item_factors))
    return lambda asked, wanted: users[torch.from_numpy(asked)] @ items[wanted].T


def measured(split: Split, histories: Histories, fit: Fit) -> tuple[dict[str, float], float]:
    """What the scores are worth, and the processor seconds of training, which other work disturbs least."""
    began = time.process_time()
    score = fit(histories)
    seconds = time.process_time() - began
    return dict(measure(split, score).metrics), seconds


def search(split: Split, histories: Histories, fit: Callable[..., Score], grid: dict[str, Any]) -> dict[str, Any]:
    """The fields of the grid that are best on validation."""
    found = []
    for values in product(*grid.values()):
        fields = dict(zip(grid, values, strict=True))
        metrics, _ = measured(split, histories, partial(fit, **fields))
        print(f"{fields}: {SELECT} {metrics[SELECT]:.4f}", file=sys.stderr, flush=True)
        found.append((metrics[SELECT], fields))
    return max(found, key=lambda pair: pair[0])[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="ml-1m", help="as in `homebody run --data`")
    parser.add_argument("--search", action="store_true", help="choose the fields on validation first")
    given = parser.parse_args()
    if importlib.util.find_spec("implicit") is None:
        sys.exit("The comparison needs the implicit library, which homebody does not: pip install implicit.")
    split = leave_one_out(load(given.data))
    histories = split.histories()
    ours(leave_one_out(load("synthetic")).histories(), **TUNED["ials"])  # compiles
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{given.data}, strict, {SWEEPS} sweeps, {torch.get_num_threads()} thread(s)")
    for heading in ("library", "fields", "HR@10", "NDCG@10", "full HR@10", "full NDCG@10", SELECT, "CPU seconds"):
        table.add_column(heading, justify="left" if heading in ("library", "fields") else "right")
    for name, fit, grid in (("ials", ours, GRID), ("ials, scaled", ours, SCALED), ("implicit", theirs, GRID)):
        fields = search(split, histories, fit, grid) if given.search else TUNED[name]
        metrics, seconds = measured(split, histories, partial(fit, **fields))
        figures = [f"{metrics[key]:.4f}" for key in ("hr@10", "ndcg@10", "full/hr@10", "full/ndcg@10", SELECT)]
        table.add_row(name, " ".join(f"{key}={value:g}" for key, value in fields.items()), *figures, f"{seconds:.1f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

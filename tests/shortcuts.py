"""What libraries work out again and again, worked out once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import typer.testing
from dp_accounting import gaussian_mechanism
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy.special import log_ndtr

__all__ = ["HIGHEST", "install"]

HIGHEST = 256
"""The highest order whose bound dp_accounting works out exactly."""

Differences = Callable[[Callable[[float], float], int], tuple[Any, Any]]


def install() -> None:
    """Replace what takes long by what gives the same from memory."""
    # A command line is put together at each call.
    typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]
    # Renyi's divergence under sampling without replacement needs differences of a function of the noise up to each
    # order. They are worked out anew for each of 160 orders.
    rdp._get_forward_diffs = _remembered(rdp._get_forward_diffs)
    # So are binomial coefficients, for each order of each noise.
    rdp._log_comb = cache(rdp._log_comb)
    # A root is sought with one number at a time, and `scipy.stats` takes long to check it.
    gaussian_mechanism._norm = SimpleNamespace(logcdf=log_ndtr)


def _remembered(differences: Differences) -> Differences:
    """Differences up to a lower order are the first of those up to a higher order."""
    known: dict[tuple[float, float], tuple[Any, Any]] = {}

    @wraps(differences)
    def remembered(function: Callable[[float], float], order: int) -> tuple[Any, Any]:
        if order > HIGHEST:
            return differences(function, order)
        name = function(1.0), function(2.0)  # the function is x (x + 1) / 2σ²
        if name not in known:
            known[name] = differences(function, HIGHEST)
        deltas, signs = known[name]
        return deltas[: order + 2].copy(), signs[: order + 2].copy()

    return remembered

"""What libraries work out again and again, worked out once for all tests."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import typer.testing
from dp_accounting import gaussian_mechanism
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy.special import log_ndtr

__all__ = ["install"]


def install() -> None:
    """Replace what takes long by what gives the same from memory."""
    # A command line is put together at each call.
    typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]
    # Binomial coefficients are worked out anew for each order of each noise.
    rdp._log_comb = cache(rdp._log_comb)
    # A root is sought with one number at a time, and `scipy.stats` takes long to check it.
    gaussian_mechanism._norm = SimpleNamespace(logcdf=log_ndtr)

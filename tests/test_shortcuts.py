"""The tests' shortcuts give what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting import gaussian_mechanism
from dp_accounting.rdp import rdp_privacy_accountant as rdp
from scipy import stats
from tests.shortcuts import HIGHEST


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.5, 400.0])
def test_differences_up_to_a_lower_order_are_the_first(sigma: float) -> None:
    def divergence(x: float) -> float:
        return x * 1.0 * (x + 1) / (2.0 * sigma**2)

    plain = rdp._get_forward_diffs.__wrapped__
    for order in (2, 3, 17, 64, HIGHEST, HIGHEST + 1):
        for expected, shared in zip(plain(divergence, order), rdp._get_forward_diffs(divergence, order), strict=True):
            assert np.array_equal(expected, shared)


def test_the_logarithm_of_the_normal_distribution_is_the_same() -> None:
    for x in (-700.0, -40.0, -1.0, -1e-9, 0.0, 0.3, 5.0, 40.0, 700.0):
        assert gaussian_mechanism._norm.logcdf(x) == stats.norm.logcdf(x)

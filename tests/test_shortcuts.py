"""The tests' shortcuts give what they stand for."""

from __future__ import annotations

from dp_accounting import gaussian_mechanism
from scipy import stats


def test_the_logarithm_of_the_normal_distribution_is_the_same() -> None:
    for x in (-700.0, -40.0, -1.0, -1e-9, 0.0, 0.3, 5.0, 40.0, 700.0):
        assert gaussian_mechanism._norm.logcdf(x) == stats.norm.logcdf(x)

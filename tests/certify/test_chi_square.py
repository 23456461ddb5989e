"""The chi-square law with a shift, and the promise that `detectable_tv` makes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from respec.certify.chi_square import critical, detectable_tv, statistic, survival


@pytest.mark.parametrize("df", [1, 9, 120])
@pytest.mark.parametrize("shift", [0.0, 0.3, 12.0, 300.0])
def test_survival_is_that_of_the_noncentral_law(df, shift):
    law = stats.ncx2(df, shift) if shift else stats.chi2(df)
    for x in law.ppf([0.01, 0.5, 0.99, 1 - 1e-6]):
        assert survival(float(x), df, shift) == pytest.approx(float(law.sf(x)), rel=1e-6)


def test_the_needed_shift_is_found_with_the_stated_power():
    assert critical(9, 1e-4) == pytest.approx(float(stats.chi2(9).isf(1e-4)))
    shift = 4 * 1000 * detectable_tv(1000, 9, 1e-4) ** 2
    assert stats.ncx2(9, shift).sf(stats.chi2(9).isf(1e-4)) == pytest.approx(0.99, abs=1e-6)
    assert detectable_tv(16_000, 9, 1e-4) == pytest.approx(detectable_tv(4000, 9, 1e-4) / 2)


def test_the_statistic_is_pearsons():
    count, mass = np.array([30.0, 50.0, 20.0]), np.array([0.3, 0.4, 0.3])
    assert statistic(count, mass) == pytest.approx(stats.chisquare(count, 100 * mass).statistic)


@pytest.mark.parametrize("shape", ["halves", "one cell", "random"])
def test_a_bias_of_the_detectable_tv_is_detected_in_any_direction(shape):
    """2000 trials: a power of 0.99 shows as 0.983 or more but for once in a thousand; the halves are the hardest direction."""
    n, cells, level = 4000, 10, 1e-4
    tv = detectable_tv(n, cells - 1, level)
    rng = np.random.default_rng(0)
    up = {"halves": np.r_[np.ones(5), -np.ones(5)], "one cell": np.r_[9.0, -np.ones(9)], "random": rng.normal(size=10)}[
        shape
    ]
    up = up - up.mean()
    biased = 0.1 + tv * up / (np.abs(up).sum() / 2)
    limit = critical(cells - 1, level)
    mass = np.full(cells, 0.1)
    found = np.mean([statistic(row, mass) > limit for row in rng.multinomial(n, biased / biased.sum(), 2000)])
    assert found >= 0.983

"""Intervals and p values, by hand and as in SciPy."""

import math

import pytest
from scipy import stats

from experiments.position.statistics import estimate, holm, paired_difference


def test_three_seeds_by_hand_and_one():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    # The 97.5% quantile of t with 2 degrees of freedom is 4.3027; deviation 1, error 1 / sqrt(3).
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert found.show(percent=False) == '2.000 ± 2.484'
    one = estimate([0.5])
    assert math.isnan(one.half) and math.isnan(one.p) and one.show() == '50.0'


def test_pairs():
    values, others = [0.3, 0.8, 0.1, 0.5], [0.1, 0.9, 0.4, 0.2]
    assert paired_difference(values, others).p == pytest.approx(stats.ttest_rel(values, others)[1])
    constant = paired_difference([2.0, 3.0], [1.0, 2.0])
    assert (constant.mean, constant.half) == (1, 0) and math.isnan(constant.p)
    rounded = paired_difference([0.3, 0.2, 0.4], [0.2, 0.1, 0.3])  # not the same floats
    assert rounded.half == 0 and math.isnan(rounded.p)


def test_holm_by_hand():
    # Sorted 0.01 0.02 0.04, times 3, 2, 1; then never decreasing.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    adjusted = holm([math.nan, 0.5, 0.9])
    assert math.isnan(adjusted[0]) and adjusted[1:] == [1.0, 1.0]

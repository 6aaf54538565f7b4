"""Means with intervals, and differences between paired runs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import ttest_1samp

CONFIDENCE = 0.95
ROUNDING = 1e-9  # a relative spread that is none: equal differences of floats differ by 1e-16


class Estimate(NamedTuple):
    """A mean over seeds and its 95% interval, mean - half to mean + half."""

    mean: float
    half: float  # NaN for one seed
    count: int
    p: float = math.nan  # of the hypothesis that the mean is 0; NaN if all values are equal

    def show(self, percent: bool = True, sign: bool = False) -> str:
        """As in '71.3 ± 2.4'."""
        scale = 100 if percent else 1
        digits = 1 if percent else 3
        plus = '+' if sign else ''
        mean = f'{self.mean * scale:{plus}.{digits}f}'
        if math.isnan(self.half):
            return mean
        return f'{mean} ± {self.half * scale:.{digits}f}'


def show_p(p: float) -> str:
    return '< 0.001' if p < 0.001 else f'{p:.3f}'


def with_p(difference: Estimate, p: float) -> str:
    """As in '+2.4 ± 1.1 (0.012)'; without the p value if there is none."""
    if math.isnan(p):
        return difference.show(sign=True)
    return f'{difference.show(sign=True)} ({show_p(p)})'


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, interval and p value by Student's t distribution."""
    values = np.asarray(values, float)
    mean = float(values.mean())
    count = len(values)
    if count < 2:
        return Estimate(mean, math.nan, count)
    if values.std() <= ROUNDING * np.abs(values).max():
        return Estimate(mean, 0.0, count, math.nan if mean else 1.0)  # no spread to compare with
    test = ttest_1samp(values, 0)
    half = test.confidence_interval(CONFIDENCE).high - mean
    return Estimate(mean, float(half), count, float(test.pvalue))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """The mean difference of runs paired by their seed: the same pictures in the same order."""
    return estimate(np.subtract(values, reference))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for their number (Holm, 1979); NaN stays and does not count."""
    p = np.asarray(p_values, float)
    adjusted = np.full(len(p), math.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind='stable')]
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p[index]))
        adjusted[index] = largest
    return adjusted.tolist()

"""Means with intervals, and differences between paired runs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over seeds and its 95% interval, mean - half to mean + half."""

    mean: float
    half: float  # NaN for one seed
    count: int
    p: float = math.nan  # of the hypothesis that the mean is 0

    def show(self, percent: bool = True, sign: bool = False) -> str:
        """As in '71.3 ± 2.4'."""
        scale, digits = (100, 1) if percent else (1, 3)
        mean = f'{self.mean * scale:{"+" if sign else ""}.{digits}f}'
        return mean if math.isnan(self.half) else f'{mean} ± {self.half * scale:.{digits}f}'


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, interval and p value by Student's t distribution."""
    from scipy.stats import t as student

    values = np.asarray(values, float)
    count = len(values)
    if count < 2:
        return Estimate(float(values.mean()), math.nan, count)
    error = values.std(ddof=1) / math.sqrt(count)
    half = student.ppf((1 + CONFIDENCE) / 2, count - 1) * error
    mean = float(values.mean())
    if error == 0:
        return Estimate(mean, 0.0, count, 1.0 if mean == 0 else 0.0)
    p = 2 * student.sf(abs(mean) / error, count - 1)
    return Estimate(mean, float(half), count, float(p))


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
